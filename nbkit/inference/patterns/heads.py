"""Patterns that treat heads differently: given or drawn sets of heads, DuoAttention, Task-KV, EntropyInfer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference.patterns.pattern import Pattern, mix
from nbkit.inference.patterns.probe import block_means, check, grouped_scores, probe_attention, probe_sums, shape_of, top_slots
from nbkit.inference.patterns.static import a_shape, dense, tri_shape

__all__ = ["duo_attention", "entropy_infer", "head_set", "random_flags", "task_kv"]


def head_set(
    q: Tensor, k: Tensor, *, active: Tensor | Sequence[bool], sinks: int = 4, window: int = 64, last: int | None = None
) -> Pattern:
    """The active heads read everything (or, with ``last``, everything in their last ``last`` rows), the others are A-shaped.

    active: one flag a query head.

    >>> q = torch.zeros(1, 2, 8, 4)
    >>> head_set(q, q, active=[True, False], sinks=1, window=2).pairs(8).tolist()
    [36, 21]
    """
    heads = shape_of(q, k)[0]
    if len(active) != heads:
        raise InputError("active", got=f"{len(active)} flags", allowed=f"{heads}, one a head")
    base = a_shape(q, k, sinks=sinks, window=window)
    return mix(active, dense(q, k) if last is None else tri_shape(q, k, sinks=sinks, window=window, last=last), base)


def random_flags(layers: int, heads: int, *, share: float, seed: int) -> Tensor:
    """Draw ``share`` of the heads of the whole model: bool (layers, heads), always the same number of them.

    >>> random_flags(3, 4, share=0.5, seed=0).sum().item()
    6
    """
    check("layers", layers, "size")
    check("heads", heads, "size")
    check("share", share, "fraction")
    order = torch.randperm(layers * heads, generator=torch.Generator().manual_seed(seed))
    flags = torch.zeros(layers * heads, dtype=torch.bool)
    flags[order[: round(share * layers * heads)]] = True
    return flags.view(layers, heads)


def duo_attention(
    q: Tensor, k: Tensor, *, gates: Tensor | Sequence[float], threshold: float = 0.5, sinks: int = 4, window: int = 64
) -> Pattern:
    """Heads whose gate reaches ``threshold`` read everything (retrieval heads), the others are A-shaped (streaming heads).

    gates: numbers in [0, 1], one a query head or one a key head, which its query heads then share.

    >>> q, k = torch.zeros(1, 4, 8, 4), torch.zeros(1, 2, 8, 4)
    >>> duo_attention(q, k, gates=[0.9, 0.1], sinks=1, window=2).pairs(8).tolist()
    [36, 36, 21, 21]

    Source: Xiao et al. 2024 (DuoAttention); sinks 128 and window 256 in its training, here the 4 + 64 of the other rules.
    """
    heads = shape_of(q, k)[0]
    gates = torch.as_tensor(gates, dtype=torch.float32)
    if gates.dim() != 1 or gates.shape[0] not in (heads, k.shape[1]) or not bool(((gates >= 0) & (gates <= 1)).all()):
        raise InputError("gates", got=gates.tolist(), allowed=f"{heads} or {k.shape[1]} numbers in [0, 1]")
    check("threshold", threshold, "fraction")
    return head_set(q, k, active=gates.repeat_interleave(heads // gates.shape[0]) >= threshold, sinks=sinks, window=window)


def task_kv(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: float | None = None, projection: Tensor | None = None, far: float = 0.25, sinks: int = 4,
    window: int = 64, middle: int = 64, probe: int = 64,
) -> Pattern:
    """Heads far from the semantic centre read everything, the others sinks, window and the ``middle`` keys their last rows look at most.

    The vector of a head is its mean output over the last ``probe`` rows, sent through its part of the output ``projection`` (hidden,
    heads * value_dim) where given; the centre is the mean over the heads of the layer; the ``far`` share of heads at the largest
    Euclidean distance is kept whole. values: (1, kv_heads, T, value_dim).

    info: distance (heads,).

    >>> q = torch.zeros(1, 4, 256, 4)
    >>> v = torch.zeros(1, 4, 256, 4); v[0, 2] = 1.0
    >>> task_kv(q, q, v).each("window")
    (64, 64, 256, 64)

    Source: He et al. 2025 (Task-KV), after its abstract; the paper allots a cache, here the same sets of keys serve the prefill.
    """
    heads, rows, keys = shape_of(q, k)
    check("far", far, "fraction")
    check("middle", middle, "count")
    base = a_shape(q, k, sinks=sinks, window=window)
    attention = probe_attention(q, k, rows=probe, scaling=scaling)
    group = heads // k.shape[1]
    vectors = (attention.mean(1).view(-1, group, keys) @ v[0].float()).view(heads, -1)
    if projection is not None:
        if projection.dim() != 2 or projection.shape[1] != vectors.numel():
            raise InputError("projection", got=tuple(projection.shape), allowed=f"(hidden, {vectors.numel()})")
        vectors = torch.einsum("hd,ohd->ho", vectors, projection.float().view(-1, *vectors.shape))
    distance = (vectors - vectors.mean(0)).norm(dim=-1)
    active = torch.zeros(heads, dtype=torch.bool)
    active[distance.topk(math.ceil(far * heads - 1e-9)).indices.cpu()] = True
    columns, _ = probe_sums(attention, window=window)
    rest = Pattern(heads, window=base.window, sinks=base.sinks, columns=top_slots(columns, middle, first=sinks))
    mixed = mix(active, dense(q, k), rest)
    return Pattern(
        heads, window=mixed.window, sinks=mixed.sinks, columns=mixed.columns, probe_pairs=float(heads * min(probe, rows) * keys),
        info={"distance": distance},
    )


def entropy_infer(
    q: Tensor, k: Tensor, *, segment: int | None = None, block: int | None = None, base: int | None = None, dense_until: int | None = None,
    rigid_below: float = 1e-5, delta: float = 0.4, alpha: float = 0.5, sinks: int = 4,
) -> Pattern:
    """Segments of rows read their best earlier blocks; the number follows the change of the entropy of the block scores.

    A block's score is the larger of two bounds, from the maxima and the minima of its keys, each averaged over the maxima and the minima
    of the segment's queries and over the query heads of one key head (unscaled, as in the public code). A head whose entropy (nats)
    stays below ``rigid_below`` keeps ``base`` tokens. For the others the budget moves by alpha * base * (r - delta) from segment to
    segment, r being the relative change of entropy within [0, 1 + delta], and is clamped to [1, 3] * base. Each segment reads itself;
    rows before ``dense_until`` and the last segment read everything. Unlike the public code, each head spends its own budget, not
    the largest of its layer, and the first ``sinks`` keys are always read, as in the other rules here (0 for the published rule).

    Defaults for N tokens: block 32 (16 below 1,024), segment N / 32 but at least two blocks, base N / 16, dense_until N / 8: the shares
    that the published 512, 2,048 and 4,096 tokens have at 32 thousand, where the segment would be N / 64, too short here.

    info: dense, rigid (heads), budgets in tokens (heads, segments).

    >>> q = torch.zeros(1, 1, 512, 4)
    >>> pattern = entropy_infer(q, q)
    >>> pattern.info["rigid"], [round(x, 1) for x in pattern.info["budgets"][0, :4].tolist()], pattern.dense_rows
    ((False,), [32.0, 32.0, 41.6, 39.9], 32)

    Source: EntropyInfer (arXiv 2606.09508) and its public code.
    """
    heads, rows, keys = shape_of(q, k, square=True)
    block = (32 if keys >= 1024 else 16) if block is None else block
    check("block", block, "size")
    segment = max(2, keys // 32 // block) * block if segment is None else segment
    base = max(1, keys // 16 // block) * block if base is None else base
    dense_until = keys // 8 if dense_until is None else dense_until
    for name, value in (("segment", segment), ("base", base)):
        check(name, value, "size")
    check("dense_until", dense_until, "count")
    check("sinks", sinks, "count")
    if segment % block:
        raise InputError("segment", got=segment, allowed=f"a multiple of the block {block}")
    for name, value in (("rigid_below", rigid_below), ("delta", delta), ("alpha", alpha)):
        if not value >= 0:
            raise InputError(name, got=value, allowed=">= 0")
    count, per = -(-keys // block), segment // block
    segments = -(-keys // segment)
    if segments < 2 or dense_until >= keys:
        return Pattern(heads, window=keys, info={"dense": True, "rigid": (False,) * heads, "budgets": None})
    kv = k.shape[1]
    ends = [block_means(q[0].float(), segment, how=how) for how in ("max", "min")]
    bounds = []
    for how in ("max", "min"):
        pooled = block_means(k[0].float(), block, how=how)
        bounds.append(sum(grouped_scores(end, pooled) for end in ends) / 2)
    scores = torch.maximum(*bounds).view(kv, heads // kv, segments, count).mean(1)
    start = torch.arange(segments, device=q.device) * per  # first block of each segment
    earlier = torch.arange(count, device=q.device) < start[:, None]
    # The first segment has nothing before it; its line is left uniform and never used.
    weights = torch.softmax(scores.masked_fill(~earlier & (start[:, None] > 0), -math.inf), dim=-1)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    entropy[:, 0] = 0
    rigid = (entropy[:, 1:] < rigid_below).all(-1)
    change = ((entropy[:, 1:] - entropy[:, :-1]) / (entropy[:, :-1] + 1e-9)).clamp(0, 1 + delta)
    change[:, 0] = delta
    budgets = torch.full((kv, segments), float(base), device=q.device)
    for s in range(1, segments):
        moved = (budgets[:, s - 1] + alpha * base * (change[:, s - 1] - delta)).clamp(base, 3 * base)
        budgets[:, s] = torch.where(rigid, float(base), moved)
    keep = (budgets / block).long()
    order = weights.masked_fill(~earlier, -1).argsort(dim=-1, descending=True)
    rank = torch.empty_like(order).scatter_(2, order, torch.arange(count, device=q.device).expand_as(order))
    chosen = ((rank < keep[..., None]) & earlier).repeat_interleave(per, 1)[:, :count]
    place = torch.arange(count, device=q.device)
    chosen |= place[:, None] // per == place // per
    chosen |= (place * block < dense_until)[:, None]
    group = heads // kv
    return Pattern(
        heads, sinks=sinks, dense_rows=keys - (segments - 1) * segment, blocks=chosen.tril().repeat_interleave(group, 0), block=block,
        probe_pairs=float(4 * heads * segments * count),
        info={"dense": False, "rigid": tuple(rigid.repeat_interleave(group).tolist()), "budgets": budgets.repeat_interleave(group, 0)},
    )
