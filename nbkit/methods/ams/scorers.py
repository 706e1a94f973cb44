"""Token scorers: which entries of a cache look worth keeping.

A scorer is any callable ``score(keys, values, queries, positions) -> (batch, kv_heads, T)``; higher is kept. All built-in ones are
here, in `SCORERS`. None of them protects anything: sinks and the recent suffix are the policy's business, the same for every scorer.

Axes: ``keys, values: (batch, kv_heads, T, head_dim)``, keys carry the rotation of their original position;
``positions: (batch, kv_heads, T)`` original positions; ``queries`` a `QueryWindow`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit import kernels
from nbkit.errors import UnsupportedModelError

from .allocate import pool


@dataclass(frozen=True)
class QueryWindow:
    """The most recent queries of one layer, as its attention saw them.

    Attributes:
        states: (batch, query_heads, W, head_dim), rotated at their own true positions.
        positions: (W,) int64.
        scaling: factor on the logits, usually head_dim ** -0.5.
        rotary: ``positions (n,) -> cos, sin (n, rotary_dim)`` of the model, or None if it has no rotary embedding.
        seed: changes with layer and event; for scorers that draw.
    """

    states: Tensor
    positions: Tensor
    scaling: float
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    seed: int = 0

    def last(self, n: int) -> QueryWindow:
        """The window cut to its last ``n`` queries."""
        return QueryWindow(self.states[:, :, -n:], self.positions[-n:], self.scaling, self.rotary, self.seed)


Scorer = Callable[[Tensor, Tensor, QueryWindow, Tensor], Tensor]


def window_attention(keys: Tensor, queries: QueryWindow, positions: Tensor) -> Tensor:
    """Mean attention of the window over the cache, averaged over each group of query heads: (batch, kv_heads, T)."""
    return kernels.window_evidence(queries.states, keys, queries.scaling, queries.positions, positions)


def tova(keys, values, queries, positions):
    """Attention of the last query, averaged over all heads. Source: TOVA, arXiv 2401.06104."""
    attention = window_attention(keys, queries.last(1), positions)
    return attention.mean(1, keepdim=True).expand_as(attention)


def snapkv(keys, values, queries, positions):
    """Mean attention of the last 32 queries, average-pooled over 5 slots. Source: SnapKV, arXiv 2404.14469."""
    return pool(window_attention(keys, queries.last(32), positions), 5)


def rpc(keys, values, queries, positions):
    """Mean attention of the last 32 queries, average-pooled over 7 slots. Source: Reasoning Path Compression, arXiv 2505.13866."""
    return pool(window_attention(keys, queries.last(32), positions), 7)


def keydiff(keys, values, queries, positions):
    """Minus the cosine between a key and the mean of the normalised keys: unusual keys stay. Source: KeyDiff, arXiv 2504.15364."""
    unit = F.normalize(keys.float(), dim=-1)
    return -F.cosine_similarity(keys.float(), unit.mean(2, keepdim=True), dim=-1)


def knorm(keys, values, queries, positions):
    """Minus the norm of the key. Source: Devoto et al., arXiv 2406.11430."""
    return -keys.float().norm(dim=-1)


def random(keys, values, queries, positions):
    """Uniform random numbers, seeded by policy, layer and event: the floor every scorer should beat."""
    generator = torch.Generator().manual_seed(queries.seed)
    return torch.rand(keys.shape[:-1], generator=generator).to(keys.device)


def streaming(keys, values, queries, positions):
    """The position itself: the most recent entries stay. With sinks kept by the policy this is StreamingLLM (arXiv 2309.17453)."""
    return positions.to(torch.float32)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` channels of x, half-split convention; linear in (cos, sin)."""
    n = cos.shape[-1]
    turn, rest = x[..., :n], x[..., n:]
    half = torch.cat([-turn[..., n // 2 :], turn[..., : n // 2]], -1)
    return torch.cat([turn * cos + half * sin, rest], -1)


def expected_attention(keys, values, queries, positions, *, horizon: int = 512, eps: float = 0.01):
    """Attention expected from the next ``horizon`` queries if queries are Gaussian, times the norm of the value.

    ``s = softmax(mu.k / sqrt(d) + k' Sigma k / 2d)`` with the mean and covariance of the un-rotated window queries, rotated by the mean
    rotation over the next positions; the score is ``(s + eps) * |v|``, s averaged over the group of query heads.

    Raises:
        UnsupportedModelError: if the model has no rotary embedding.

    Source: Expected Attention, arXiv 2510.00636. Positions are the true ones, also while decoding.
    """
    if queries.rotary is None:
        raise UnsupportedModelError("scorer", got="expected_attention on a model without rotary embedding", hint="use snapkv")
    batch, kv_heads, slots, dim = keys.shape
    cos, sin = (t.float() for t in queries.rotary(queries.positions))
    # Some models scale their rotary tables (YaRN): the inverse has to undo that too.
    size = cos.square() + sin.square()
    plain = _rotate(queries.states.float(), cos / size, -sin / size)
    ahead = queries.positions[-1] + torch.arange(1, horizon + 1, device=keys.device)
    mean_cos, mean_sin = (t.float().mean(0) for t in queries.rotary(ahead))
    future = _rotate(plain, mean_cos, mean_sin).reshape(batch, kv_heads, -1, plain.shape[2], dim)
    mean = future.mean(3, keepdim=True)
    k = keys.float()[:, :, None].transpose(-1, -2)
    linear = (mean @ k).squeeze(3) * queries.scaling
    quadratic = ((future - mean) @ k).square().mean(3) * queries.scaling**2 / 2
    expected = torch.softmax(linear + quadratic, -1).mean(2)
    return (expected + eps) * values.float().norm(dim=-1)


def rkv(keys, values, queries, positions, *, window: int = 8, kernel: int = 7, mix: float = 0.07, alike: float = 0.5):
    """Importance minus redundancy: ``mix * max-pooled window attention - (1 - mix) * softmax(mean cosine to other keys)``.

    For every key the latest other key that is more alike than ``alike`` is left out of the mean, so that the newest copy of repeated content
    is not punished. The last ``window`` slots score above all others.

    Source: R-KV, arXiv 2505.24133.
    """
    slots = keys.shape[2]
    if slots <= window:
        return torch.ones(keys.shape[:-1], device=keys.device)
    batch, kv_heads, _, dim = keys.shape
    old = keys[:, :, : slots - window].float()
    recent = queries.last(window).states.float().reshape(batch, kv_heads, -1, dim)
    attention = torch.softmax(recent @ old.transpose(-1, -2) * queries.scaling, -1).mean(2)
    attention = F.max_pool1d(attention, kernel, stride=1, padding=kernel // 2)
    unit = F.normalize(old, dim=-1)
    cosine = unit @ unit.transpose(-1, -2)
    cosine.diagonal(dim1=-2, dim2=-1).zero_()
    index = torch.arange(old.shape[2], device=keys.device)
    latest = torch.where(cosine > alike, index, -1).amax(-1, keepdim=True)
    cosine = cosine.masked_fill(index == latest, 0.0)
    redundancy = torch.softmax(cosine.mean(2), -1)
    score = mix * attention - (1 - mix) * redundancy
    return F.pad(score, (0, window), value=float(score.max()) + 1.0)


BUFFER = 256
"""Most recent queries kept per layer between events, unless policy and scorer need fewer (paper, schedule)."""

QUERIES_NEEDED = {"tova": 1, "snapkv": 32, "rpc": 32, "rkv": 8, "keydiff": 1, "knorm": 1, "random": 1, "streaming": 1}
"""Queries a built-in scorer looks at; every other scorer gets `BUFFER` of them."""

SCORERS: dict[str, Scorer] = {
    "tova": tova, "snapkv": snapkv, "keydiff": keydiff, "knorm": knorm, "random": random, "streaming": streaming,
    "expected_attention": expected_attention, "rkv": rkv, "rpc": rpc,
}
