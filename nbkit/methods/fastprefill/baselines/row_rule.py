"""The frame of a rule that drops rows between layers, from what the layer before saw."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference.parts import Rows

from .rules import share, whole


class RowRule(Rows):
    """A rule that chooses, after some layers, which rows the next layer still reads: a subclass gives ``drops`` and ``choose``."""

    def drops(self, layers: int) -> tuple[int, ...]:
        """Layers before which rows may be dropped, in a model of ``layers`` layers."""
        raise NotImplementedError

    def choose(self, run, layer: int, queries: Tensor, keys: Tensor, scaling: float) -> Tensor | None:
        """Sorted indices of the rows that ``layer + 1`` reads, of the rows that ``layer`` read; None = all."""
        raise NotImplementedError

    def observe(self, run, layer, q, k, v, scaling):
        """Choose, when the next layer is one of ``drops``."""
        if layer == 0 or self not in run.state:
            run.state[self] = {"drops": frozenset(self.drops(run.layers)), "keep": None}
        state = run.state[self]
        if layer + 1 in state["drops"]:
            state["keep"] = self.choose(run, layer, q, k, scaling)

    def keep(self, run, layer):
        """The choice made after the layer before."""
        state = run.state.get(self)
        if state is None:
            return None
        chosen, state["keep"] = state["keep"], None
        return None if chosen is None or len(chosen) == len(run.positions) else chosen


def one_layer(layer: int | None, layers: int, default: float) -> int:
    """``layer``, or the one at the relative depth ``default``; in a model of ``layers`` layers a drop can stand before 1..layers-1.

    Raises: InputError for a layer that the model does not have.

    >>> one_layer(None, 30, 0.5), one_layer(3, 4, 0.5)
    (15, 3)
    """
    if layers < 2:
        raise InputError("model", got=f"{layers} layer", allowed=">= 2 layers", hint="with one layer nothing can be dropped")
    if layer is None:
        return min(layers - 1, max(1, math.floor(default * layers)))
    if not 1 <= layer < layers:
        raise InputError("layer of the drop", got=layer, allowed=f"1 to {layers - 1} in a model of {layers} layers")
    return layer


def steps_of(layers: Sequence[int] | None, rates: Sequence[float]) -> tuple[tuple[int, ...] | None, tuple[float, ...]]:
    """The pair, checked: rates never rise, layers rise, and there are as many of them.

    Raises: InputError otherwise.

    >>> steps_of([2, 5], [0.5, 0.25])
    ((2, 5), (0.5, 0.25))
    """
    if isinstance(rates, str) or not isinstance(rates, Sequence):
        raise InputError("rates", got=rates, allowed="a tuple of shares")
    rates = tuple(share("rates", rate) for rate in rates)
    if not rates or any(b > a for a, b in zip(rates, rates[1:], strict=False)):
        raise InputError("rates", got=rates, allowed="shares in (0, 1] that never rise")
    if layers is None:
        return None, rates
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise InputError("layers", got=layers, allowed="a tuple of layers")
    layers = tuple(whole("layers", layer, 1) for layer in layers)
    if len(layers) != len(rates) or any(b <= a for a, b in zip(layers, layers[1:], strict=False)):
        raise InputError("layers", got=layers, allowed=f"{len(rates)} layers that rise, one for every rate")
    return layers, rates


def plan_of(layers: Sequence[int] | None, rates: Sequence[float], depth: int) -> tuple[float, ...]:
    """Share of the rows alive in each of ``depth`` layers; without ``layers`` the rates start evenly between 1/3 and 2/3 of the depth.

    >>> plan_of((1, 3), (0.5, 0.2), 4), plan_of(None, (0.7, 0.5, 0.3), 6)
    ((1.0, 0.5, 0.5, 0.2), (1.0, 1.0, 0.7, 0.5, 0.3, 0.3))
    """
    if layers is None:
        spread = max(1, len(rates) - 1)
        layers = [one_layer(None, depth, 1 / 3 + i / spread / 3 + 1e-9) for i in range(len(rates))]
    plan = [1.0] * depth
    for layer, rate in zip(layers, rates, strict=True):
        plan[one_layer(layer, depth, 0.5) :] = [rate] * (depth - layer)
    return tuple(plan)


def drops_of(plan: Sequence[float]) -> tuple[int, ...]:
    """Layers before which rows are dropped.

    >>> drops_of((1.0, 0.5, 0.5, 0.2))
    (1, 3)
    """
    return tuple(i for i in range(1, len(plan)) if plan[i] < plan[i - 1])
