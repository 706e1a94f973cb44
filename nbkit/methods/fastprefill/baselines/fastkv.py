"""FastKV: one drop of rows, and a small cache for every key head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nbkit.inference.parts import Eviction, register

from .row_rule import RowRule, one_layer
from .rules import amount, best, pool, row_attention, share, tokens_of, whole


def fastkv_scores(queries: Tensor, keys: Tensor, scaling: float, *, window: int = 8, size: int = 7, pooling: str = "max") -> Tensor:
    """FastKV's score of every token before the window, by query head: (query_heads, tokens - window).

    Softmax attention of the last ``window`` rows, summed over them, pooled along the tokens.

    Source: FastKV, arXiv 2502.01068; window 8, pool 7, maximum in its benchmark scripts.

    >>> fastkv_scores(torch.zeros(1, 2, 6, 4), torch.zeros(1, 1, 6, 4), 0.5, window=2, size=1).shape
    torch.Size([2, 4])
    """
    window = min(window, queries.shape[2])
    attention = row_attention(queries[:, :, -window:], keys, scaling)[:, : keys.shape[2] - window]
    return pool(attention, size, pooling) if attention.shape[-1] else attention


@register
@dataclass(frozen=True)
class FastKV(RowRule):
    """One drop before ``layer`` to ``rate``: best scores of the layer before, summed over heads, the window kept, positions kept.

    layer: default half of the depth (16 of 32). rate: share (float) or number (int) of tokens, the window included.
    The other half of the method, a smaller cache for each key head, is `FastKVCache`; `cache` makes the matching part.

    Source: FastKV, arXiv 2502.01068, and its code.

    >>> FastKV(rate=0.2).drops(32), FastKV(layer=20).drops(30)
    ((16,), (20,))
    """

    layer: int | None = None
    rate: float = 0.2
    window: int = 8
    pool: int = 7
    pooling: str = "max"
    name: ClassVar[str] = "fastkv"

    def __post_init__(self):
        amount("rate", self.rate)
        whole("window", self.window, 1)
        pool(torch.zeros(1), self.pool, self.pooling)

    def drops(self, layers):
        return (one_layer(self.layer, layers, 0.5),)

    def choose(self, run, layer, queries, keys, scaling):
        rows = keys.shape[2]
        window = min(self.window, rows)
        run.charge(layer, probe=float(queries.shape[1] * window * rows))
        scores = fastkv_scores(queries, keys, scaling, window=window, size=self.pool, pooling=self.pooling).sum(0)
        padded = torch.cat([scores, scores.new_zeros(window)])
        return best(padded, tokens_of(self.rate, run.tokens), range(rows - window, rows))

    def cache(self, retain_rate: float = 0.1) -> FastKVCache:
        """The eviction part with the same window and pooling."""
        return FastKVCache(retain_rate, self.window, self.pool, self.pooling)


def fastkv_slots(scores: Tensor, kv_heads: int, count: int, window: int) -> Tensor:
    """Slots of each key head: the last ``window`` and the best others by the scores of its query heads: (kv_heads, count).

    scores: (query_heads, slots - window), see `fastkv_scores`.

    >>> fastkv_slots(torch.tensor([[0.0, 1.0, 0.5], [3.0, 0.0, 0.0]]), 2, 2, 1).tolist()
    [[1, 3], [0, 3]]
    """
    per_head = scores.view(kv_heads, -1, scores.shape[-1]).sum(1)
    padded = torch.cat([per_head, per_head.new_zeros(kv_heads, window)], 1)
    slots = padded.shape[1]
    return torch.stack([best(row, count, range(slots - window, slots)) for row in padded])


@register
@dataclass(frozen=True)
class FastKVCache(Eviction):
    """Each key head keeps max(window, retain_rate * prompt) entries of every layer, by FastKV's score summed over its query heads.

    Source: FastKV, arXiv 2502.01068, and its code (retain rate 0.1).

    >>> FastKVCache(retain_rate=0.25).retain_rate
    0.25
    """

    retain_rate: float = 0.1
    window: int = 8
    pool: int = 7
    pooling: str = "max"
    name: ClassVar[str] = "fastkv"

    def __post_init__(self):
        share("retain_rate", self.retain_rate)
        whole("window", self.window, 1)
        pool(torch.zeros(1), self.pool, self.pooling)

    def keep(self, run, layer, k, v, queries, positions):
        """Increasing slots, (1, kv_heads, kept)."""
        window = min(self.window, queries.shape[2])
        count = max(window, tokens_of(self.retain_rate, run.tokens))
        if count >= k.shape[2]:
            return torch.arange(k.shape[2], device=k.device).expand(1, k.shape[1], -1)
        scores = fastkv_scores(queries, k, k.shape[-1] ** -0.5, window=window, size=self.pool, pooling=self.pooling)
        return fastkv_slots(scores, k.shape[1], count, window)[None]
