"""What dropping tokens at one layer costs: the table of losses behind the optimiser, and the schedule fitted to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.methods.fastprefill.cost import MacCost, ModelShape
from nbkit.methods.fastprefill.optimise import FORBIDDEN, Planner, refine
from nbkit.methods.fastprefill.schedule import PruneSchedule
from nbkit.methods.fastprefill.stored import LayerRunner, Stored

RATES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Keep rates of the table beside 1."""


def prompt_losses(
    runner: LayerRunner, stored: Stored, *, layers: Sequence[int], rates: Sequence[float] = RATES, evidence: Sequence[tuple[int, int]] = (),
    **pruning: Any,
) -> dict[str, Any]:
    """Extra answer loss of one prompt for one drop at each layer to each rate: ``loss[i][j]`` nats per token over the full model's ``nll``.

    Also ``exact[i][j]`` and ``kept[i][j]``, the share of evidence tokens that survive. pruning: options of TokenPruning (score, sinks, window, pool).
    """
    from nbkit.methods.fastprefill.prune import TokenPruning

    out: dict[str, Any] = {"nll": stored.nll, "full_exact": stored.exact, "loss": [], "exact": [], "kept": []}
    for layer in layers:
        runs = [runner.replay(stored, TokenPruning(PruneSchedule.one_shot(layer, rate, runner.shape.layers), **pruning)) for rate in rates]
        out["loss"].append([run.nll - stored.nll for run in runs])
        out["exact"].append([run.exact for run in runs])
        out["kept"].append([run.evidence_kept(evidence)[-1] for run in runs])
    return out


@dataclass(frozen=True)
class SensitivityTable:
    """Losses by prompt, layer and rate, with what each prompt is.

    layers, rates: the grid, rising. losses: (prompts, layers, rates) nats per answer token over the full model. kinds: task of each prompt.
    draws: calibration draw of each prompt.
    Raises: InputError when shapes or orders do not fit, or a loss is NaN.

    >>> table = SensitivityTable((2, 4), (0.1, 0.5), np.array([[[3.0, 1.0], [0.5, 0.6]]]), ("needle",))
    >>> table.smooth()[0].tolist()
    [[3.0, 1.0], [0.55, 0.55]]
    """

    layers: tuple[int, ...]
    rates: tuple[float, ...]
    losses: np.ndarray
    kinds: tuple[str, ...]
    draws: tuple[int, ...] = ()

    def __post_init__(self):
        losses = np.asarray(self.losses, dtype=float)
        object.__setattr__(self, "losses", losses)
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "rates", tuple(self.rates))
        object.__setattr__(self, "kinds", tuple(self.kinds))
        object.__setattr__(self, "draws", tuple(self.draws) or (0,) * len(self.kinds))
        if losses.shape != (len(self.kinds), len(self.layers), len(self.rates)) or not losses.size:
            raise InputError("losses", got=losses.shape, allowed=f"({len(self.kinds)} prompts, {len(self.layers)} layers, {len(self.rates)} rates)")
        if len(self.draws) != len(self.kinds):
            raise InputError("draws", got=len(self.draws), allowed=f"{len(self.kinds)}, one for every prompt")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1 or list(self.rates) != sorted(set(self.rates)):
            raise InputError("layers and rates", got=(self.layers, self.rates), allowed="rising, layers from 1 on")
        if not 0 < self.rates[0] <= self.rates[-1] < 1:
            raise InputError("rates", got=self.rates, allowed="shares in (0, 1); the losses at 1 are 0")
        if not np.isfinite(losses).all():
            raise InputError("losses", got="NaN or infinity", allowed="finite numbers", hint="find the prompt whose full model fails")

    def mean(self, *, kinds: Sequence[str] | None = None, draw: int | None = None) -> np.ndarray:
        """(layers, rates) mean over tasks of the mean over prompts (a task with more prompts weighs no more), of some tasks or one draw."""
        return self.by_kind(kinds=kinds, draw=draw)[1].mean(0)

    def by_kind(self, *, kinds: Sequence[str] | None = None, draw: int | None = None) -> tuple[tuple[str, ...], np.ndarray]:
        """The tasks and their (tasks, layers, rates) means over prompts.

        Raises: InputError for a task or draw that the table does not have.
        """
        names = tuple(dict.fromkeys(self.kinds)) if kinds is None else tuple(kinds)
        which = [[i for i, (k, d) in enumerate(zip(self.kinds, self.draws, strict=True)) if k == name and draw in (None, d)] for name in names]
        if not names or not all(which):
            raise InputError("tasks", got=names, allowed=", ".join(dict.fromkeys(self.kinds)))
        return names, np.stack([self.losses[i].mean(0) for i in which])

    def smooth(self, **choice: Any) -> tuple[np.ndarray, float]:
        """Least-squares fit of the mean that falls with rate and with layer and is >= 0; and the mean absolute change, in nats."""
        raw = self.mean(**choice)
        fitted = np.maximum(monotone(raw), 0)
        return fitted, float(np.abs(fitted - raw).mean())

    def smooth_by_kind(self, **choice: Any) -> tuple[tuple[str, ...], np.ndarray]:
        """The same for every task alone."""
        names, raw = self.by_kind(**choice)
        return names, np.stack([np.maximum(monotone(rows), 0) for rows in raw])

    def spread(self, losses: np.ndarray, depth: int) -> tuple[np.ndarray, tuple[float, ...]]:
        """(..., depth, rates + 1) table for a Planner, and its rates: linear between layers, the last value beyond, no drop before the first.

        losses: (..., layers, rates), such as from smooth().
        """
        losses = np.asarray(losses, dtype=float)
        inside = np.arange(depth)
        flat = losses.reshape(-1, len(self.layers), len(self.rates))
        out = np.zeros((len(flat), depth, len(self.rates) + 1))
        for block, rows in zip(out, flat, strict=True):
            for j in range(len(self.rates)):
                block[:, j] = np.interp(inside, self.layers, rows[:, j])
        out[:, : self.layers[0], : len(self.rates)] = FORBIDDEN
        return out.reshape(*losses.shape[:-2], depth, -1), (*self.rates, 1.0)

    def planner(self, shape: ModelShape, *, tokens: int, cost: Any = None, window: int = 32, floor: int = 36, by_kind: bool = False,
                scored: str = "drop", **choice: Any) -> Planner:
        """A Planner over the smoothed table; ``by_kind`` keeps tasks apart, for the worst-task objective. choice: kinds, draw."""
        losses = self.smooth_by_kind(**choice)[1] if by_kind else self.smooth(**choice)[0]
        table, rates = self.spread(losses, shape.layers)
        return Planner(table, rates, tokens=tokens, cost=cost or MacCost(shape, window), floor=floor, scored=scored)

    def as_dict(self) -> dict[str, Any]:
        """JSON values that from_dict reads."""
        return {
            "layers": list(self.layers), "rates": list(self.rates), "losses": np.round(self.losses, 5).tolist(), "kinds": list(self.kinds),
            "draws": list(self.draws),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> SensitivityTable:
        """A table from as_dict().

        Raises: InputError for a missing key.
        """
        try:
            return cls(value["layers"], value["rates"], np.asarray(value["losses"]), value["kinds"], tuple(value.get("draws", ())))
        except KeyError as error:
            raise InputError("sensitivity table", got=f"no {error}", allowed="layers, rates, losses, kinds, draws") from error


def monotone(table: Any, *, rounds: int = 200, tolerance: float = 1e-9) -> np.ndarray:
    """The closest table (least squares) that never rises along either axis: isotonic regressions in turn, by Dykstra's projections.

    >>> monotone([[1.0, 2.0], [1.0, 0.0]]).tolist()
    [[1.5, 1.5], [1.0, 0.0]]
    """
    from scipy.optimize import isotonic_regression

    current = np.array(table, dtype=float)
    corrections = [np.zeros_like(current), np.zeros_like(current)]
    for _ in range(rounds):
        before = current
        for axis in (0, 1):
            target = current + corrections[axis]
            lines = target.T if axis == 0 else target
            fitted = np.stack([isotonic_regression(line, increasing=False).x for line in lines])
            current = fitted.T if axis == 0 else fitted
            corrections[axis] = target - current
        if np.abs(current - before).max() < tolerance:
            break
    # What a finite number of rounds leaves open along the first axis is closed without opening the second.
    return np.minimum.accumulate(current, axis=0)


def default_layers(depth: int, count: int = 9) -> tuple[int, ...]:
    """``count`` layers for the table, evenly from about a tenth of the depth to the last but two.

    >>> default_layers(30)
    (3, 6, 9, 12, 15, 18, 21, 24, 27)
    """
    if depth < 2:
        raise InputError("model", got=f"{depth} layer", allowed=">= 2 layers", hint="with one layer nothing can be dropped")
    return tuple(sorted({int(i) for i in np.linspace(max(1, depth // 10), max(1, depth - max(1, depth // 10)), count).round()}))


def fit_schedule(
    model: Any, tokenizer: Any, prompts: Sequence[Any], *, latency_budget: float = 0.75, objective: str = "mean", rates: Sequence[float] = RATES,
    layers: Sequence[int] | None = None, score: str = "max", cost: Any = "macs", refine_evaluations: int = 0, sinks: int = 4, window: int = 32,
    **pruning: Any,
) -> PruneSchedule:
    """Measure the table on calibration prompts and return the best schedule within a latency budget.

    prompts: LongPrompt objects, or (prompt text, answer text) pairs, which ``tokenizer`` encodes. latency_budget: share of full prefill.
    objective: "mean" over tasks or "worst" task. rates, layers: the grid (1 is added to the rates; default `default_layers`). cost: "macs", a
    LatencyModel, or any object with layer(rows) and scoring(rows). refine_evaluations: measured coordinate moves afterwards (at most 50).
    The costs are those of the median prompt length. meta holds the smoothing's change in nats.
    Raises: InputError for no prompts, an unknown cost or objective, or a budget outside (0, 1]; RunError for one that no schedule meets.
    Source: reconstruction of FastPrefill, section 3.5.
    """
    if not prompts:
        raise InputError("prompts", got="none", allowed="at least one calibration prompt")
    if not 0 < latency_budget <= 1:
        raise InputError("latency budget", got=latency_budget, allowed="a share of full prefill in (0, 1]")
    if objective not in ("mean", "worst"):
        raise InputError("objective", got=objective, allowed="mean, worst")
    if not 0 <= refine_evaluations <= 50:
        raise InputError("refine_evaluations", got=refine_evaluations, allowed="0 to 50")
    runner = LayerRunner(model)
    charge = MacCost(runner.shape, window) if isinstance(cost, str) and cost == "macs" else cost
    if not all(callable(getattr(charge, name, None)) for name in ("layer", "scoring")):
        raise InputError("cost", got=cost, allowed="'macs', a LatencyModel, or an object with layer(rows) and scoring(rows)")
    grid = tuple(layers) if layers is not None else default_layers(runner.shape.layers)
    wrong = [layer for layer in grid if not 1 <= layer < runner.shape.layers]
    if wrong:
        raise InputError("layers", got=wrong, allowed=f"1 to {runner.shape.layers - 1}")
    shares = tuple(sorted({float(r) for r in rates} - {1.0}))
    options = {"score": score, "sinks": sinks, "window": window, **pruning}
    items = [_encoded(prompt, tokenizer) for prompt in prompts]
    with runner.attached():
        # Refinement replays every prompt again: it is stored twice rather than all at once, as one takes about 0.2 MB a token.
        rows = [prompt_losses(runner, runner.store(ids, answer), layers=grid, rates=shares, **options) for ids, answer, _ in items]
        table = SensitivityTable(grid, shares, np.array([row["loss"] for row in rows]), tuple(kind for _, _, kind in items))
        tokens = int(np.median([len(ids) for ids, _, _ in items]))
        floor = min(tokens, sinks + window)
        planner = table.planner(runner.shape, tokens=tokens, cost=charge, window=window, floor=floor, by_kind=objective == "worst",
                                scored="all" if score == "cummax" else "drop")
        schedule = planner.solve(latency_budget, objective=objective).with_loss(None, smoothing=table.smooth()[1], score=score)
        schedule = schedule.with_loss(planner.loss(schedule, objective=objective))
        if refine_evaluations:
            schedule, _ = refine(schedule, _measured(runner, items, options, objective), planner, latency_budget, max_evaluations=refine_evaluations)
    return schedule


def _measured(runner: LayerRunner, items: Sequence[tuple[Any, Any, str]], options: Mapping[str, Any], objective: str) -> Any:
    """schedule -> measured extra loss on the calibration prompts."""
    from nbkit.methods.fastprefill.prune import TokenPruning

    def evaluate(schedule: PruneSchedule) -> float:
        by_kind: dict[str, list[float]] = {}
        for ids, answer, kind in items:
            stored = runner.store(ids, answer)
            by_kind.setdefault(kind, []).append(runner.replay(stored, TokenPruning(schedule, **options)).nll - stored.nll)
        means = [float(np.mean(values)) for values in by_kind.values()]
        return max(means) if objective == "worst" else float(np.mean(means))

    return evaluate


def _encoded(prompt: Any, tokenizer: Any) -> tuple[Any, Any, str]:
    """(prompt ids, answer ids, task) of a LongPrompt or a pair of texts."""
    if hasattr(prompt, "answer_ids"):
        return prompt.ids, prompt.answer_ids, getattr(prompt, "kind", "prompts")
    try:
        text, answer = prompt
        return tokenizer(text)["input_ids"], tokenizer(answer, add_special_tokens=False)["input_ids"], "prompts"
    except (TypeError, ValueError) as error:
        raise InputError("prompt", got=type(prompt).__name__, allowed="a LongPrompt or a (prompt, answer) pair of texts") from error
