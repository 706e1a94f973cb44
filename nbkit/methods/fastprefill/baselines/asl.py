"""ASL: the layer of the one drop is chosen at run time, when the ranking of the tokens has settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference.parts import register

from .fastkv import fastkv_scores
from .row_rule import RowRule, one_layer
from .rules import amount, best, pool, tokens_of, whole


def ranks(scores: Tensor) -> Tensor:
    """Rank of every token, 0 for the best; of equal scores the earlier token ranks better.

    >>> ranks(torch.tensor([0.1, 0.5, 0.5, 0.2])).tolist()
    [3, 0, 1, 2]
    """
    return scores.sort(descending=True, stable=True).indices.argsort()


def rank_variance(table: Tensor | Sequence[Tensor], top: int) -> float:
    """Variance of a token's rank over layers, averaged over the tokens that are among the ``top`` in one of them.

    table: (layers, tokens) ranks.

    >>> rank_variance(torch.tensor([[0, 1, 2, 3], [1, 0, 2, 3]]), 1)
    0.25
    """
    table = torch.as_tensor(table) if isinstance(table, Tensor) else torch.stack(list(table))
    return float(table[:, (table < top).any(0)].double().var(0, correction=0).mean())


@register
@dataclass(frozen=True)
class ASL(RowRule):
    """One drop to ``keep`` after the first layer whose rank variance has fallen below ``tau`` times its first value; perhaps none.

    first: earliest layer that may be followed by the drop, default 10/32 of the depth; there the ratio is 1 by construction, so tau > 1 always
    drops at once. keep_tokens: share (float) or number (int) of tokens; the published number is 2048 for long contexts. span: layers over which the
    variance is taken. `run.state[part]["ratios"]` lists the ratios of the last prompt.

    Source: ASL, arXiv 2601.07667, and its code (L_min 10 of 32, tau 0.3, k 2048; window 8 and pool 7 of FastKV); span is our choice.

    >>> ASL().drops(32)[0], ASL(first=2).drops(6)
    (11, (3, 4, 5))
    """

    first: int | None = None
    tau: float = 0.3
    keep_tokens: float = 0.2
    span: int = 4
    window: int = 8
    pool: int = 7
    pooling: str = "max"
    name: ClassVar[str] = "asl"

    def __post_init__(self):
        if not isinstance(self.tau, int | float) or isinstance(self.tau, bool) or not self.tau >= 0:
            raise InputError("tau", got=self.tau, allowed="a number >= 0")
        if self.first is not None:
            whole("first", self.first, 1)
        amount("keep_tokens", self.keep_tokens)
        whole("span", self.span, 2)
        whole("window", self.window, 1)
        pool(torch.zeros(1), self.pool, self.pooling)

    def drops(self, layers):
        if self.first is not None:
            one_layer(self.first + 1, layers, 0.5)
        # A variance needs two layers, also in a shallow model.
        first = max(1, 10 * layers // 32) if self.first is None else self.first
        return tuple(range(first + 1, layers))

    def observe(self, run, layer, q, k, v, scaling):
        """Rank the tokens from ``span - 1`` layers before the first possible drop on, until it has happened."""
        super().observe(run, layer, q, k, v, scaling)
        state = run.state[self]
        if layer == 0:
            state.update(table=[], ratios=[], dropped=None)
        if layer + 1 not in state["drops"]:
            self._rank(run, layer, q, k, scaling)

    def _rank(self, run, layer, queries, keys, scaling) -> Tensor | None:
        state, rows = run.state[self], keys.shape[2]
        start = min(state["drops"], default=run.layers) - 1
        if state["dropped"] is not None or layer <= start - self.span:
            return None
        window = min(self.window, rows)
        run.charge(layer, probe=float(queries.shape[1] * window * rows))
        scores = fastkv_scores(queries, keys, scaling, window=window, size=self.pool, pooling=self.pooling).sum(0)
        state["table"] = [*state["table"], ranks(scores)][-self.span :]
        return scores

    def choose(self, run, layer, queries, keys, scaling):
        state, rows = run.state[self], keys.shape[2]
        scores = self._rank(run, layer, queries, keys, scaling)
        count = tokens_of(self.keep_tokens, run.tokens)
        window = min(self.window, rows)
        if scores is None or count >= rows or rows == window:
            return None
        spread = rank_variance(state["table"], max(1, count - window))
        base = state.setdefault("base", spread)
        # A ranking that never moved has settled, whatever it is divided by.
        state["ratios"].append(spread / base if base else float(not state["ratios"]))
        if not state["ratios"][-1] < self.tau:
            return None
        state["dropped"] = layer + 1
        return best(torch.cat([scores, scores.new_zeros(window)]), count, range(rows - window, rows))
