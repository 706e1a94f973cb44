"""PyramidInfer: the context shrinks a little before every next layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from nbkit.errors import InputError
from nbkit.inference.parts import register

from .row_rule import RowRule
from .rules import best, row_attention, share, whole

SHAPES = ("cosine", "linear", "constant")
"""How the keep share of a layer goes from 1 at layer 0 towards ``delta`` at the last one ("constant": delta everywhere)."""


def pyramid_share(layer: int, layers: int, delta: float, shape: str = "cosine") -> float:
    """Share of the context that stays after ``layer``.

    Source: mutonix/pyramidinfer. There "linear" acts like "constant", since the test for the cosine that follows it starts anew with `if` and
    its `else` overwrites the share by delta; here it is the straight line that the option promises.

    >>> pyramid_share(0, 4, 0.5), round(pyramid_share(2, 4, 0.5), 9), pyramid_share(2, 4, 0.5, "linear"), pyramid_share(0, 4, 0.5, "constant")
    (1.0, 0.75, 0.75, 0.5)
    """
    if shape == "cosine":
        return delta + (1 - delta) * (1 + math.cos(math.pi * layer / layers)) / 2
    if shape == "linear":
        return 1 - (1 - delta) * layer / layers
    if shape == "constant":
        return delta
    raise InputError("shape", got=shape, allowed=", ".join(SHAPES))


def pyramid_counts(tokens: int, layers: int, *, delta: float = 0.9, shape: str = "cosine", recent: float = 0.2, least: int = 64) -> tuple[int, ...]:
    """Rows alive in every layer: floor(recent * tokens) recent ones, and the context, which is not cut below ``least``.

    >>> pyramid_counts(1000, 4, delta=0.5)
    (1000, 1000, 941, 755)
    """
    last = _recent(tokens, recent)
    context, counts = tokens - last, []
    for layer in range(layers):
        counts.append(last + context)
        context = _shrink(context, pyramid_share(layer, layers, delta, shape), least)
    return tuple(counts)


def _recent(tokens: int, recent: float) -> int:
    return max(1, math.floor(recent * tokens))


def _shrink(context: int, keep: float, least: int) -> int:
    return max(min(context, least), math.floor(context * keep + 1e-9))


@register
@dataclass(frozen=True)
class PyramidInfer(RowRule):
    """Before every next layer the context keeps floor(share * length) tokens; the last ``recent`` share of the prompt always stays.

    A token's score is the attention of the recent rows to it, averaged over heads, with row weights from 1 to 1.2; ``sinks`` first tokens stay.

    Source: PyramidInfer, arXiv 2405.12532, and its code (delta 0.9, recent 0.2, at least 64 context tokens); `pyramid_share` on its "linear".

    >>> PyramidInfer().drops(4)
    (1, 2, 3)
    """

    delta: float = 0.9
    shape: str = "cosine"
    recent: float = 0.2
    sinks: int = 4
    least: int = 64
    name: ClassVar[str] = "pyramidinfer"

    def __post_init__(self):
        share("delta", self.delta)
        share("recent", self.recent)
        pyramid_share(0, 1, self.delta, self.shape)
        whole("sinks", self.sinks, 0)
        whole("least", self.least, 1)

    def drops(self, layers):
        return tuple(range(1, layers))

    def choose(self, run, layer, queries, keys, scaling):
        rows = keys.shape[2]
        recent = min(rows, _recent(run.tokens, self.recent))
        context = rows - recent
        left = _shrink(context, pyramid_share(layer, run.layers, self.delta, self.shape), self.least)
        if left == context:
            return None
        run.charge(layer, probe=float(queries.shape[1] * recent * rows))
        weights = torch.linspace(1.0, 1.2, recent)
        scores = row_attention(queries[:, :, -recent:], keys, scaling, weights=weights).mean(0)
        return best(scores, left + recent, [*range(min(self.sinks, left)), *range(context, rows)])
