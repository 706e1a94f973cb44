"""Which share of the prompt every layer keeps: schedules, checked once and passed around as values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nbkit.errors import InputError, RunError

# ceil() of a product such as 0.07 * 100 must not gain a row from the last bit of a float.
_EPS = 1e-9


@dataclass(frozen=True)
class PruneSchedule:
    """Shares of the prompt alive in layers 0..L-1: ``ratios`` start at 1 and never rise, since dropped tokens do not come back.

    predicted_loss: nats per answer token over the full model that the optimiser expects (None for a schedule made by a rule).
    meta: how the schedule came about, JSON values.
    Raises: InputError for no layers, a ratio outside (0, 1], a first ratio below 1, or a rise.
    Source: reconstruction of FastPrefill, section 3 (the paper's body is not public).

    >>> s = PruneSchedule.one_shot(2, 0.25, 4)
    >>> s.ratios, s.counts(100), s.counts(100, floor=36)
    ((1.0, 1.0, 0.25, 0.25), (100, 100, 25, 25), (100, 100, 36, 36))
    >>> PruneSchedule.from_json(s.to_json()) == s
    True
    """

    ratios: tuple[float, ...]
    predicted_loss: float | None = None
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        try:
            ratios = tuple(float(r) for r in self.ratios)
        except (TypeError, ValueError) as error:
            raise InputError("ratios of a schedule", got=self.ratios, allowed="one number in (0, 1] for every layer") from error
        object.__setattr__(self, "ratios", ratios)
        if not ratios:
            raise InputError("ratios of a schedule", got="none", allowed="one number in (0, 1] for every layer")
        wrong = [(i, r) for i, r in enumerate(ratios) if not 0 < r <= 1]  # NaN fails this comparison too
        if wrong:
            raise InputError(f"ratio of layer {wrong[0][0]}", got=wrong[0][1], allowed="a number in (0, 1]")
        if ratios[0] != 1:
            raise InputError("ratio of layer 0", got=ratios[0], allowed="1", hint="layer 0 reads the whole prompt: the first scores come from it")
        rise = next((i for i in range(1, len(ratios)) if ratios[i] > ratios[i - 1]), None)
        if rise is not None:
            raise InputError(
                f"ratio of layer {rise}", got=f"{ratios[rise]:g} after {ratios[rise - 1]:g}", allowed="no rise",
                hint="dropped tokens never come back: sort the ratios from large to small",
            )
        if self.predicted_loss is not None and not math.isfinite(self.predicted_loss):
            raise InputError("predicted_loss", got=self.predicted_loss, allowed="a finite number or None")

    # Rules.

    @classmethod
    def from_ratios(cls, ratios: Iterable[float], **meta: Any) -> PruneSchedule:
        """A schedule from one ratio a layer.

        >>> PruneSchedule.from_ratios([1, 0.5, 0.5]).drops
        ((1, 0.5),)
        """
        return cls(tuple(ratios), meta=meta)

    @classmethod
    def full(cls, layers: int) -> PruneSchedule:
        """Nothing is dropped.

        >>> PruneSchedule.full(2).ratios
        (1.0, 1.0)
        """
        return cls((1.0,) * _layers(layers), meta={"rule": "full"})

    @classmethod
    def one_shot(cls, layer: int, rate: float, layers: int) -> PruneSchedule:
        """One drop to ``rate`` before layer ``layer`` (1..layers-1), as FastKV does it.

        >>> PruneSchedule.one_shot(1, 0.5, 3).ratios
        (1.0, 0.5, 0.5)
        """
        if not 1 <= layer < _layers(layers):
            raise InputError("layer of the drop", got=layer, allowed=f"1 to {layers - 1}", hint="layer 0 reads the whole prompt")
        return cls((1.0,) * layer + (rate,) * (layers - layer), meta={"rule": "one-shot", "layer": layer, "rate": rate})

    @classmethod
    def linear(cls, end: float, layers: int) -> PruneSchedule:
        """From 1 in layer 0 to ``end`` in the last layer by equal steps.

        >>> PruneSchedule.linear(0.5, 3).ratios
        (1.0, 0.75, 0.5)
        """
        return cls._shape(end, layers, "linear", lambda x: 1 - x)

    @classmethod
    def cosine(cls, end: float, layers: int) -> PruneSchedule:
        """From 1 to ``end`` along half a cosine.

        >>> [round(r, 2) for r in PruneSchedule.cosine(0.2, 5).ratios]
        [1.0, 0.88, 0.6, 0.32, 0.2]
        """
        return cls._shape(end, layers, "cosine", lambda x: (1 + math.cos(math.pi * x)) / 2)

    @classmethod
    def pyramid(cls, delta: float, layers: int, *, recent: float = 0.2) -> PruneSchedule:
        """PyramidInfer: before every next layer the context shrinks by delta + (1 - delta)(1 + cos(pi l / L))/2; the ``recent`` share stays whole.

        Source: mutonix/pyramidinfer, whose recent share is 0.2 and delta 0.9.

        >>> [round(r, 3) for r in PruneSchedule.pyramid(0.5, 3).ratios]
        [1.0, 1.0, 0.9]
        """
        _share("delta", delta)
        if not 0 <= recent < 1:
            raise InputError("recent", got=recent, allowed="a share in [0, 1)")
        context, ratios = 1.0, []
        for layer in range(_layers(layers)):
            ratios.append(recent + (1 - recent) * context)
            context *= delta + (1 - delta) * (1 + math.cos(math.pi * layer / layers)) / 2
        # recent + (1 - recent) may miss 1 by a bit.
        return cls((1.0, *(min(1.0, r) for r in ratios[1:])), meta={"rule": "pyramid", "delta": delta, "recent": recent})

    @classmethod
    def _shape(cls, end: float, layers: int, rule: str, shape: Callable[[float], float]) -> PruneSchedule:
        _share("end", end)
        last = max(1, _layers(layers) - 1)
        ratios = [end + (1 - end) * shape(layer / last) for layer in range(layers)]
        return cls((1.0, *(min(1.0, r) for r in ratios[1:])), meta={"rule": rule, "end": end})

    # Reading.

    @property
    def layers(self) -> int:
        """Number of layers.

        >>> PruneSchedule.full(3).layers
        3
        """
        return len(self.ratios)

    @property
    def drops(self) -> tuple[tuple[int, float], ...]:
        """(layer, ratio from there on) of every drop.

        >>> PruneSchedule.from_ratios([1, 0.5, 0.5, 0.2]).drops
        ((1, 0.5), (3, 0.2))
        """
        return tuple((i, self.ratios[i]) for i in range(1, self.layers) if self.ratios[i] < self.ratios[i - 1])

    def counts(self, tokens: int, floor: int = 1) -> tuple[int, ...]:
        """Rows alive in every layer for a prompt of ``tokens``: max(floor, ceil(ratio * tokens)), at most ``tokens``.

        Raises: InputError when tokens or floor is not a positive number.

        >>> PruneSchedule.linear(0.1, 3).counts(50)
        (50, 28, 5)
        """
        if tokens < 1 or floor < 1:
            raise InputError("tokens and floor", got=(tokens, floor), allowed=">= 1")
        return tuple(min(tokens, max(floor, math.ceil(r * tokens - _EPS))) for r in self.ratios)

    def check(self, layers: int) -> PruneSchedule:
        """This schedule, if it fits a model of ``layers`` layers.

        Raises: InputError for a longer or shorter one.

        >>> PruneSchedule.full(3).check(3).layers
        3
        """
        if layers != self.layers:
            raise InputError(
                "schedule", got=f"{self.layers} ratios", allowed=f"{layers}, one for every layer of this model",
                hint="fit_schedule(model, ...) or PruneSchedule.one_shot(layer, rate, layers)",
            )
        return self

    def with_loss(self, loss: float | None, **meta: Any) -> PruneSchedule:
        """The same ratios with another predicted loss and more meta.

        >>> PruneSchedule.full(2).with_loss(0.1, tau=1.0).predicted_loss
        0.1
        """
        return replace(self, predicted_loss=loss, meta={**self.meta, **meta})

    def to_json(self) -> str:
        """Text that from_json reads.

        >>> PruneSchedule((1.0, 0.5)).to_json()
        '{"ratios": [1.0, 0.5], "predicted_loss": null, "meta": {}}'
        """
        try:
            return json.dumps({"ratios": list(self.ratios), "predicted_loss": self.predicted_loss, "meta": dict(self.meta)}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError("meta of the schedule", got=str(error), allowed="JSON values") from error

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> PruneSchedule:
        """A schedule from the text of to_json, or from the dict in it.

        Raises: InputError for anything else.

        >>> PruneSchedule.from_json('{"ratios": [1, 0.5]}').ratios
        (1.0, 0.5)
        """
        try:
            value = json.loads(text) if isinstance(text, str) else text
            ratios, loss, meta = value["ratios"], value.get("predicted_loss"), value.get("meta", {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError("schedule", got=f"{type(error).__name__}: {error}", allowed="JSON with ratios, predicted_loss, meta") from error
        return cls(tuple(ratios), loss, dict(meta))

    def __str__(self) -> str:
        steps = ", ".join(f"{rate:g} from layer {layer}" for layer, rate in self.drops[:4]) or "nothing dropped"
        return f"PruneSchedule({self.layers} layers: {steps}{', ...' if len(self.drops) > 4 else ''})"


def match_cost(make: Callable[[float], PruneSchedule], cost: Callable[[PruneSchedule], float], limit: float, *, low: float = 0.01,
               high: float = 1.0, steps: int = 40) -> PruneSchedule:
    """The schedule of a one-parameter family with the largest cost <= limit, by bisection.

    make: parameter in [low, high] -> schedule, its cost rising with the parameter. cost: schedule -> number.
    Raises: RunError when even ``low`` costs more than the limit.

    >>> mean = lambda s: sum(s.ratios) / s.layers
    >>> s = match_cost(lambda end: PruneSchedule.linear(end, 11), mean, 0.75)
    >>> round(s.ratios[-1], 3), mean(s) <= 0.75
    (0.5, True)
    """
    best = make(low)
    if cost(best) > limit:
        raise RunError("no schedule of this family meets the limit", got=f"{cost(best):.4g} at the least", allowed=f"<= {limit:.4g}",
                       hint="a larger latency budget, or another family")
    if cost(make(high)) <= limit:
        return make(high)
    for _ in range(steps):
        middle = (low + high) / 2
        candidate = make(middle)
        if cost(candidate) <= limit:
            best, low = candidate, middle
        else:
            high = middle
    return best


def _layers(layers: int) -> int:
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise InputError("layers", got=layers, allowed="a whole number >= 1")
    return layers


def _share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise InputError(name, got=value, allowed="a number in (0, 1]")
