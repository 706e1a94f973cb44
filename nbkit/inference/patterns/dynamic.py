"""Patterns found from the values of one prompt: pooled blocks, FlexPrefill, XAttention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError
from nbkit.inference.patterns.pattern import Pattern, mix
from nbkit.inference.patterns.probe import (
    block_means,
    check,
    coverage,
    grouped_scores,
    probe_attention,
    probe_sums,
    scale_of,
    shape_of,
    top_slots,
)

__all__ = ["block_topk", "flex_prefill", "root_js_divergence", "x_attention"]


def default_block(keys: int) -> int:
    """Return 64, and 32 for prompts below 1,024 tokens, which would have too few blocks to choose from."""
    return 64 if keys >= 1024 else 32


def _pooled_attention(q: Tensor, k: Tensor, block: int, scaling: float) -> Tensor:
    """Return the attention between block means, causal by blocks: float32 (heads, blocks, blocks)."""
    means = block_means(q[0].float() * scaling, block), block_means(k[0].float(), block)
    scores = grouped_scores(*means)
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)


def _force(blocks: Tensor) -> Tensor:
    """Keep the first block and the block of the row itself, drop blocks of the future."""
    blocks[:, :, 0] = True
    blocks |= torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
    return blocks.tril()


def block_topk(q: Tensor, k: Tensor, *, scaling: float | None = None, block: int | None = None, top: int | None = None) -> Pattern:
    """Each block of rows reads the ``top`` key blocks whose mean key fits its mean query best, the first block and its own.

    block: default 64 tokens (32 below 1,024 tokens). top: default an eighth of the blocks, beside the two forced ones; MInference
    takes 100 of 2,000 blocks.

    >>> q = torch.zeros(1, 1, 256, 4)
    >>> block_topk(q, q, block=32, top=1).blocks[0].sum(1).tolist()
    [1, 2, 3, 3, 3, 3, 3, 3]

    Source: Jiang et al. 2024 (MInference), block-sparse heads; the forced blocks follow nano-sparse-attention.
    """
    heads, _, keys = shape_of(q, k, square=True)
    block = default_block(keys) if block is None else block
    check("block", block, "size")
    count = -(-keys // block)
    top = -(-count // 8) if top is None else top
    check("top", top, "count")
    scores = _pooled_attention(q, k, block, scale_of(q, scaling))
    # The forced blocks must not use up the cap, so they leave the ranking.
    scores[:, :, 0] = -1
    scores.masked_fill_(torch.ones(count, count, dtype=torch.bool, device=q.device).triu(), -1)
    best = scores.topk(min(top, count), dim=-1)
    blocks = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best.indices, best.values >= 0)
    return Pattern(heads, blocks=_force(blocks), block=block, probe_pairs=float(heads * count * (count + 1) // 2))


def root_js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the square root of the Jensen-Shannon divergence (nats) of distributions along the last axis; 0 log 0 counts as 0.

    >>> round(root_js_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item(), 6) == round(math.sqrt(math.log(2)), 6)
    True
    """
    p, q = p.double(), q.double()
    middle = ((p + q) / 2).clamp(min=torch.finfo(torch.float64).tiny)
    return (0.5 * (torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)).sum(-1)).clamp(min=0).sqrt()


def flex_prefill(
    q: Tensor, k: Tensor, *, scaling: float | None = None, gamma: float = 0.9, tau: float = 0.1, block: int | None = None,
    min_budget: int | None = None, max_budget: int | None = None,
) -> Pattern:
    """Per head: query-aware blocks where pooling describes the last rows well, else columns and diagonals; both up to coverage ``gamma``.

    The last ``block`` rows are read in full. Where the root of the Jensen-Shannon divergence between their true and their pooled
    block mass is below ``tau``, the pooled block map is kept, largest entries first, until it covers gamma; else the columns and,
    separately, the diagonals that cover gamma of the last rows, rounded up to whole blocks in number and at least ``min_budget``.
    block: default 64 tokens (32 below 1,024 tokens), published 128. min_budget: default one block, published 512 or 1,024 of 128
    thousand tokens. Unlike the published code, coverage is both counted and spent by token, and 0 log 0 is 0.

    info: dense (the prompt is no longer than two blocks or min_budget, so it is read densely), query_aware (heads), divergence (heads,).

    >>> q = torch.zeros(1, 1, 256, 4)
    >>> flex_prefill(q, q, gamma=0.5, block=32).info["query_aware"]
    (True,)
    >>> flex_prefill(q, q, min_budget=256).info["dense"]
    True

    Raises: InputError for gamma outside (0, 1], tau outside [0, 1], NaN values, a batch.
    Source: Lai et al. 2025 (FlexPrefill), algorithms 1-4.
    """
    heads, rows, keys = shape_of(q, k, square=True)
    check("gamma", gamma, "share")
    check("tau", tau, "fraction")
    block = default_block(keys) if block is None else block
    min_budget = block if min_budget is None else min_budget
    max_budget = keys if max_budget is None else max_budget
    for name, value in (("block", block), ("min_budget", min_budget), ("max_budget", max_budget)):
        check(name, value, "size")
    if keys <= max(2 * block, min_budget):
        return Pattern(heads, window=keys, info={"dense": True, "query_aware": (False,) * heads, "divergence": None})
    scaling = scale_of(q, scaling)
    attention = probe_attention(q, k, rows=block, scaling=scaling)
    columns, diagonals = probe_sums(attention / attention.shape[1])
    count = -(-keys // block)
    true = F.pad(columns, (0, count * block - keys)).view(heads, count, block).sum(-1)
    pooled = torch.softmax(grouped_scores(q[0, :, -block:].float().mean(1, keepdim=True) * scaling, block_means(k[0].float(), block))[:, 0], -1)
    divergence = root_js_divergence(true, pooled)
    aware = divergence < tau
    # Columns and diagonals: as many as cover gamma, in whole blocks.
    tables = []
    for mass in (columns, diagonals):
        need = -(-coverage(mass, gamma) // block) * block
        need = need.clamp(min_budget, max(max_budget, min_budget)).clamp(max=keys)
        tables.append(top_slots(mass, torch.where(aware, 0, need)))
    lines = Pattern(heads, window=block, sinks=block, columns=tables[0], slashes=tables[1], probe_pairs=float(heads * (block * keys + count)))
    if aware.any():
        blocks = _covering_blocks(q, k, block, scaling, gamma, least=-(-min_budget // block))
        chosen = Pattern(heads, blocks=blocks, block=block, probe_pairs=float(int(aware.sum()) * count * (count + 1) // 2))
        lines = mix(aware, chosen, lines)
    return Pattern(
        **{name: getattr(lines, name) for name in ("heads", "window", "sinks", "columns", "slashes", "blocks", "block", "probe_pairs")},
        info={"dense": False, "query_aware": tuple(aware.tolist()), "divergence": divergence},
    )


def _covering_blocks(q: Tensor, k: Tensor, block: int, scaling: float, gamma: float, least: int) -> Tensor:
    """Keep the largest entries of the whole pooled map until they cover gamma, and at least ``least`` blocks in every row of blocks."""
    scores = _pooled_attention(q, k, block, scaling)
    heads, count, _ = scores.shape
    flat = scores.flatten(1)
    chosen = top_slots(flat, coverage(flat, gamma))
    blocks = torch.zeros(heads, count * count + 1, dtype=torch.bool, device=q.device)
    blocks.scatter_(1, torch.where(chosen < 0, count * count, chosen), True)
    blocks = blocks[:, :-1].view(heads, count, count)
    blocks.scatter_(2, scores.topk(min(least, count), dim=-1).indices, True)
    return _force(blocks)


def x_attention(
    q: Tensor, k: Tensor, *, scaling: float | None = None, threshold: float = 0.9, stride: int = 8, block: int | None = None
) -> Pattern:
    """Score blocks by the sums along their anti-diagonals and keep, for each row of blocks, those that hold ``threshold`` of the mass.

    In every stride x stride tile the products of row stride - 1 - t and key t are added; a softmax over the strided keys gives each
    block its mass. The first column of key blocks and the diagonal are always kept and their mass counts; the last tile is padded on
    the right. block: default 64 tokens (32 below 1,024), published 128; a multiple of ``stride``. The scan is charged: about 1 / stride
    of the dense scores.

    >>> q = torch.zeros(1, 1, 256, 4)
    >>> x_attention(q, q, threshold=0.5, block=32).blocks[0].sum(1).tolist()
    [1, 2, 2, 3, 3, 4, 4, 5]

    Raises: InputError for a threshold outside (0, 1], a block that is no multiple of the stride.
    Source: Xu et al. 2025 (XAttention), section 2; stride 8 or 16, threshold .8 to .9.
    """
    heads, rows, keys = shape_of(q, k, square=True)
    check("threshold", threshold, "share")
    check("stride", stride, "size")
    block = default_block(keys) if block is None else block
    check("block", block, "size")
    if block % stride:
        raise InputError("block", got=block, allowed=f"a multiple of the stride {stride}")
    scaling = scale_of(q, scaling)
    count, tiles = -(-keys // block), block // stride
    pad = (0, 0, 0, count * block - keys)
    # A tile's anti-diagonal sum is one dot product of the flattened rows, read backwards, and the flattened keys.
    flat_q = F.pad(q[0].float() * (scaling / stride), pad).view(heads, count * tiles, stride, -1).flip(2).flatten(2)
    flat_k = F.pad(k[0].float(), pad).view(k.shape[1], count * tiles, -1)
    real = -(-keys // stride)
    mass = torch.zeros(heads, count, count, device=q.device)
    probe = 0
    for row in range(count):
        stop = min((row + 1) * tiles, real)
        scores = grouped_scores(flat_q[:, row * tiles : stop], flat_k[:, :stop])
        size = stop - row * tiles
        scores[..., -size:].masked_fill_(torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1), -math.inf)
        share = F.pad(torch.softmax(scores, dim=-1).sum(1), (0, (row + 1) * tiles - stop))
        mass[:, row, : row + 1] = share.view(heads, row + 1, tiles).sum(-1)
        probe += heads * size * stop * stride
    ranked = mass.clone()
    ranked[:, :, 0] = math.inf
    ranked.masked_fill_(torch.eye(count, dtype=torch.bool, device=q.device), math.inf)
    order = ranked.sort(dim=-1, descending=True).indices
    before = mass.gather(2, order).double().cumsum(-1)
    # A block is kept while what was kept before it is below the threshold.
    before = F.pad(before[..., :-1], (1, 0))
    need = (threshold - 1e-6) * mass.double().sum(-1, keepdim=True)
    keep = before < need if threshold < 1 else torch.ones_like(before, dtype=torch.bool)
    blocks = torch.zeros_like(mass, dtype=torch.bool).scatter_(2, order, keep)
    return Pattern(heads, blocks=_force(blocks), block=block, probe_pairs=float(probe))
