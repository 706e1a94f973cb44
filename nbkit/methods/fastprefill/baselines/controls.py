"""What the rules are compared with: the dense model, the dense model without useless work, a random choice and an oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from nbkit.errors import InputError
from nbkit.inference.parts import Rows, register

from .fastkv import fastkv_scores
from .row_rule import RowRule, one_layer
from .rules import amount, best, edges, tokens_of, whole


@register
@dataclass(frozen=True)
class Full(Rows):
    """Nothing is dropped: the reference of every comparison.

    >>> Full().name
    'full'
    """

    name: ClassVar[str] = "full"


@register
@dataclass(frozen=True)
class FullLastRow(Rows):
    """Nothing is dropped, but the last layer computes query, attention and FFN for the last row only: the same logits there, a little cheaper.

    Source: sgl-project/sglang, pull request 38153.

    >>> FullLastRow().last_row_only
    True
    """

    name: ClassVar[str] = "full-lastrow"
    last_row_only: ClassVar[bool] = True


@register
@dataclass(frozen=True)
class RandomRows(RowRule):
    """Control: one drop before ``layer`` to ``rate``, the kept rows drawn at random; ``sinks`` first and ``window`` last rows always stay.

    >>> RandomRows(layer=2, rate=0.5, seed=1).drops(4)
    (2,)
    """

    layer: int | None = None
    rate: float = 0.2
    sinks: int = 4
    window: int = 32
    seed: int = 0
    name: ClassVar[str] = "random"

    def __post_init__(self):
        amount("rate", self.rate)
        whole("sinks", self.sinks, 0)
        whole("window", self.window, 1)

    def drops(self, layers):
        return (one_layer(self.layer, layers, 0.5),)

    def choose(self, run, layer, queries, keys, scaling):
        rows = keys.shape[2]
        scores = torch.rand(rows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + rows))
        return best(scores, tokens_of(self.rate, run.tokens), edges(rows, self.sinks, self.window))


@register
@dataclass(frozen=True)
class OracleRows(RowRule):
    """Control: one drop before ``layer`` to ``rate`` that always keeps the tokens of ``evidence``; the rest as FastKV scores it.

    evidence: (start, stop) spans of prompt positions. More evidence than ``rate`` allows is kept all the same.

    >>> OracleRows(evidence=((10, 14),), layer=1).evidence
    ((10, 14),)
    """

    evidence: tuple[tuple[int, int], ...] = ()
    layer: int | None = None
    rate: float = 0.2
    sinks: int = 4
    window: int = 32
    name: ClassVar[str] = "oracle"

    def __post_init__(self):
        amount("rate", self.rate)
        whole("sinks", self.sinks, 0)
        whole("window", self.window, 1)
        try:
            spans = tuple((int(start), int(stop)) for start, stop in self.evidence)
        except (TypeError, ValueError) as error:
            raise InputError("evidence", got=repr(self.evidence), allowed="(start, stop) pairs of positions") from error
        wrong = [span for span in spans if not 0 <= span[0] < span[1]]
        if wrong or not spans:
            raise InputError("evidence", got=wrong or "none", allowed="(start, stop) pairs with 0 <= start < stop")
        object.__setattr__(self, "evidence", spans)

    def drops(self, layers):
        return (one_layer(self.layer, layers, 0.5),)

    def choose(self, run, layer, queries, keys, scaling):
        rows = keys.shape[2]
        last = max(stop for _, stop in self.evidence)
        if last > rows:
            raise InputError("evidence", got=f"a span up to {last}", allowed=f"positions below {rows}, the length of the prompt")
        window = min(8, rows)
        run.charge(layer, probe=float(queries.shape[1] * window * rows))
        scores = fastkv_scores(queries, keys, scaling, window=window).sum(0)
        forced = edges(rows, self.sinks, self.window).tolist() + [i for start, stop in self.evidence for i in range(start, stop)]
        return best(torch.cat([scores, scores.new_zeros(window)]), tokens_of(self.rate, run.tokens), forced)
