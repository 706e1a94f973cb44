"""Keys and values chosen by each head: sparse attention over the sets, and the cache entries that are worth keeping for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nbkit import kernels
from nbkit.errors import InputError
from nbkit.inference.parts import Attention, Eviction, register
from nbkit.inference.patterns import Pattern
from nbkit.methods.fastprefill.baselines.rules import edges, pool, share, tokens_of, whole
from nbkit.methods.fastprefill.prune import layer_scores

__all__ = ["GRANULARITIES", "HeadCache", "HeadSelected", "head_sets", "recalled_mass"]

GRANULARITIES = ("shared", "kv", "query")
"""One set of keys a layer, a key head, or a query head."""


def head_sets(scores: Tensor, kv_heads: int, count: int, *, granularity: str = "query", forced: Tensor | None = None) -> Tensor:
    """The best ``count`` keys of each set, increasing: int64 (sets, count), with 1, kv_heads or query_heads sets.

    scores: (query_heads, n); heads that share a set add up their scores. forced: keys that are in every set (and count).

    Raises: InputError for NaN scores or an unknown granularity.

    >>> scores = torch.tensor([[5.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    >>> head_sets(scores, 1, 1).tolist(), head_sets(scores, 1, 1, granularity="kv").tolist()
    ([[0], [1]], [[0]])
    """
    if granularity not in GRANULARITIES:
        raise InputError("granularity", got=granularity, allowed=", ".join(GRANULARITIES))
    if torch.isnan(scores).any():
        raise InputError("scores", got="NaN", allowed="numbers", hint="look for NaN in the weights or the states of the model")
    heads, keys = scores.shape
    sets = {"shared": 1, "kv": kv_heads, "query": heads}[granularity]
    scores = scores.view(sets, heads // sets, keys).sum(1)
    if forced is not None and len(forced):
        scores = scores.index_fill(1, forced, torch.inf)
    # A stable sort, so that of equal scores the earlier key wins whatever the library does.
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, : min(count, keys)].sort(dim=1).values


def recalled_mass(attention: Tensor, sets: Tensor) -> Tensor:
    """Share of each query head's attention mass (heads, n) that its set of keys (1, kv_heads or heads, m) holds: (heads,).

    >>> recalled_mass(torch.tensor([[3.0, 1.0], [1.0, 3.0]]), torch.tensor([[0]])).tolist()
    [0.75, 0.25]
    """
    sets = sets.repeat_interleave(attention.shape[0] // sets.shape[0], 0)
    return attention.gather(1, sets).sum(1) / attention.sum(1)


@register
@dataclass(frozen=True)
class HeadSelected(Attention):
    """Each head reads its own ``budget`` of keys, and a band: itself and its ``band`` - 1 nearest earlier rows alive.

    granularity: one set a "query" head, "kv" head, or "shared" by the layer. budget: share (float) of the prompt, or number (int) of keys, the
    first ``sinks`` and the last ``window`` included, which are in every set (also when the budget is smaller; ``strict``: InputError then).
    The sets come from window attention (`layer_scores`) summed over the heads that share a set. Keys are gathered, not masked.

    Source: reconstruction of FastPrefill, section 3.3 (which granularity the paper uses is not public).

    >>> HeadSelected(granularity="kv", budget=0.1).band
    32
    """

    granularity: str = "query"
    budget: float = 0.2
    sinks: int = 4
    window: int = 32
    pool: int = 7
    pooling: str = "max"
    band: int = 32
    strict: bool = False
    name: ClassVar[str] = "fastprefill"

    def __post_init__(self):
        if self.granularity not in GRANULARITIES:
            raise InputError("granularity", got=self.granularity, allowed=", ".join(GRANULARITIES))
        if isinstance(self.budget, int):
            whole("budget", self.budget, 1)
        else:
            share("budget", self.budget)
        whole("sinks", self.sinks, 0)
        whole("window", self.window, 1)
        whole("band", self.band, 1)
        pool(torch.zeros(1), self.pool, self.pooling)

    def attend(self, run, layer, q, k, v, scaling):
        """Sparse attention over the sets; all of dense attention where they hold every row."""
        heads, rows = q.shape[1], q.shape[2]
        sets = self.choose(run, layer, q, k, scaling)
        run.state[self] = {"layer": layer, "sets": sets}
        pattern = Pattern(heads, window=self.band, columns=sets.repeat_interleave(heads // len(sets), 0))
        run.charge(layer, pairs=float(pattern.pairs(rows).sum()))
        return kernels.sparse_attention(q, k, v, scaling, window=self.band, columns=sets[None])[0]

    def choose(self, run: Any, layer: int, q: Tensor, k: Tensor, scaling: float) -> Tensor:
        """The sets of one layer: int64 (1, kv_heads or heads, m) without the leading axis."""
        rows, forced = k.shape[2], self.sinks + self.window
        wanted = tokens_of(self.budget, run.tokens)
        if self.strict and wanted < min(forced, run.tokens):
            raise InputError("head budget", got=f"{wanted} of {run.tokens} tokens", allowed=f"at least {forced} tokens (sinks + window)",
                             hint="raise the budget, or lower sinks and window")
        scores = layer_scores(run, layer, q, k, scaling, window=self.window, size=self.pool, pooling=self.pooling)
        always = edges(rows, self.sinks, self.window).to(k.device)
        return head_sets(scores, k.shape[1], max(wanted, forced), granularity=self.granularity, forced=always)


@register
@dataclass(frozen=True)
class HeadCache(Eviction):
    """Keeps in the cache only what the sets of ``heads`` hold: those that the attention part chose, if it is the same one, else its own choice.

    Key heads with a set of their own keep exactly that. With "query" sets a key head keeps the union of its group's sets, and since all key heads
    of a layer hold equally many entries, the smaller unions are filled up with their next best keys.

    >>> HeadCache(HeadSelected(granularity="kv")).heads.granularity
    'kv'
    """

    heads: HeadSelected = HeadSelected()
    name: ClassVar[str] = "fastprefill"

    def keep(self, run, layer, k, v, queries, positions):
        """Slots (1, kv_heads, m)."""
        kv_heads, rows = k.shape[1:3]
        state = run.state.get(self.heads)
        sets = state["sets"] if state is not None and state["layer"] == layer else self.heads.choose(run, layer, queries, k, run.scaling)
        if len(sets) in (1, kv_heads):
            return sets.expand(kv_heads, -1)[None].contiguous()
        _, scores = run.state[layer_scores]
        held = torch.zeros(kv_heads, rows, dtype=torch.bool, device=k.device)
        held.scatter_(1, sets.reshape(kv_heads, -1), True)
        rank = scores.view(kv_heads, -1, rows).amax(1).masked_fill(held, torch.inf)
        order = rank.sort(dim=1, descending=True, stable=True).indices
        return order[:, : int(held.sum(1).max())].sort(dim=1).values[None]
