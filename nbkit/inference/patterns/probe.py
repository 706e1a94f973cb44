"""What the rules look at: attention of the last rows, its column and diagonal sums, pooled blocks, and how many entries cover a share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError

__all__ = ["block_means", "coverage", "probe_attention", "probe_sums", "top_slots"]


def shape_of(q: Tensor, k: Tensor, *, square: bool = False) -> tuple[int, int, int]:
    """Check one prompt's queries (1, H, n, d) and keys (1, Hkv, T, d) and return (H, n, T); ``square`` asks for n = T."""
    for name, x in (("queries", q), ("keys", k)):
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(name, got=got, allowed="a float tensor (1, heads, tokens, head_dim)")
        if x.shape[0] != 1:
            raise InputError(name, got=f"batch {x.shape[0]}", allowed="one prompt at a time", hint="loop over the prompts of the batch")
        # One pass over the values: a NaN or an infinity makes the sum not finite.
        if not math.isfinite(float(x.detach().sum(dtype=torch.float32))):
            raise InputError(name, got="NaN or infinite values", allowed="finite values")
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    if heads % k.shape[1] or q.shape[3] != k.shape[3]:
        raise InputError("keys", got=tuple(k.shape), allowed=f"head_dim {q.shape[3]} and a number of heads that divides {heads}")
    if not 1 <= rows <= keys:
        raise InputError("queries", got=f"{rows} rows over {keys} keys", allowed="1 row or more and not more than keys")
    if square and rows != keys:
        raise InputError("queries", got=f"{rows} rows over {keys} keys", allowed="all rows of the prompt at once", hint="do not split the prefill")
    return heads, rows, keys


def check(name: str, value: Any, kind: str) -> None:
    """Raise InputError unless ``value`` is a count (>= 0), a size (>= 1), a share in (0, 1] or a fraction in [0, 1]."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    rules = {
        "count": (number and value == int(value) >= 0, "an int >= 0"),
        "size": (number and value == int(value) >= 1, "an int >= 1"),
        "share": (number and 0 < value <= 1, "in (0, 1]"),
        "fraction": (number and 0 <= value <= 1, "in [0, 1]"),
    }
    fits, allowed = rules[kind]
    if not fits:
        raise InputError(name, got=value, allowed=allowed)


def scale_of(q: Tensor, scaling: float | None) -> float:
    """Return ``scaling``, by default 1 / sqrt(head_dim)."""
    return 1 / math.sqrt(q.shape[-1]) if scaling is None else scaling


def grouped_scores(q: Tensor, k: Tensor) -> Tensor:
    """Multiply (H, n, d) by (Hkv, m, d) where query heads share key heads: (H, n, m), the keys never copied."""
    heads, rows, dim = q.shape
    return (q.reshape(k.shape[0], -1, dim) @ k.transpose(1, 2)).view(heads, rows, -1)


def probe_attention(q: Tensor, k: Tensor, *, rows: int, scaling: float | None = None) -> Tensor:
    """Return the causal attention of the last ``rows`` rows, float32 (heads, rows, keys).

    queries: (1, heads, n, d); keys: (1, kv_heads, T, d). Costs rows * T scores a head.

    >>> q = torch.zeros(1, 2, 4, 8)
    >>> probe_attention(q, q[:, :1], rows=2)[0].round(decimals=2).tolist()
    [[0.33000001311302185, 0.33000001311302185, 0.33000001311302185, 0.0], [0.25, 0.25, 0.25, 0.25]]

    Source: Jiang et al. 2024 (MInference), last_q = 64.
    """
    check("rows", rows, "size")
    keys, rows = k.shape[2], min(rows, q.shape[2])
    scores = grouped_scores(q[0, :, -rows:].float() * scale_of(q, scaling), k[0].float())
    future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    scores[..., keys - rows :].masked_fill_(future, -math.inf)
    return torch.softmax(scores, dim=-1)


def probe_sums(attention: Tensor, *, window: int = 0) -> tuple[Tensor, Tensor]:
    """Sum probe attention (heads, P, T) over columns and over diagonals: two tensors (heads, T); each totals the mass looked at.

    Diagonal t gathers the pairs at distance t between row and key; a diagonal near T is truncated to the rows that reach it.
    ``window`` leaves out pairs at a smaller distance from both sums.

    >>> columns, diagonals = probe_sums(torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]]))
    >>> columns.tolist(), [round(x, 2) for x in diagonals[0].tolist()]
    ([[0.699999988079071, 0.800000011920929, 0.5]], [1.0, 0.8, 0.2])
    """
    heads, rows, keys = attention.shape
    # Reversed in both axes, row r' holds distance t at place t + r': a strided view of a padded copy lines the diagonals up.
    padded = F.pad(attention.flip(1, 2), (0, rows))
    by_distance = padded.as_strided((heads, rows, keys), (rows * (keys + rows), keys + rows + 1, 1))
    diagonals = by_distance.sum(1)
    columns = attention.sum(1)
    if window:
        diagonals[:, :window] = 0
        near = torch.arange(keys - rows, keys, device=attention.device)[:, None] - torch.arange(keys, device=attention.device)
        columns = columns - (attention * ((near >= 0) & (near < window))).sum(1)
    return columns, diagonals


def coverage(mass: Tensor, share: float) -> Tensor:
    """Count the largest entries of each line that together hold ``share`` of its mass: int64 (lines,).

    >>> coverage(torch.tensor([[0.5, 0.1, 0.4], [0.2, 0.2, 0.6]]), 0.8).tolist()
    [2, 2]
    """
    check("share", share, "share")
    if share == 1:
        return torch.full(mass.shape[:-1], mass.shape[-1], dtype=torch.int64, device=mass.device)
    ordered = mass.sort(dim=-1, descending=True).values.double().cumsum(-1)
    # A share that is met up to the rounding of float32 is met.
    return ((ordered < (share - 1e-6) * ordered[..., -1:]).sum(-1) + 1).clamp(max=mass.shape[-1])


def top_slots(mass: Tensor, counts: Tensor | int, *, first: int = 0) -> Tensor:
    """Return the places of the ``counts`` largest entries of each line from place ``first`` on, -1 in unused slots: int64 (lines, slots).

    >>> top_slots(torch.tensor([[0.5, 0.1, 0.4], [0.2, 0.2, 0.6]]), torch.tensor([2, 1])).tolist()
    [[0, 2], [2, -1]]
    """
    counts = torch.as_tensor(counts, device=mass.device).expand(mass.shape[0])
    width = min(int(counts.max()), max(mass.shape[1] - first, 0))
    best = mass[:, first:].topk(width, dim=1).indices + first
    return best.masked_fill(torch.arange(width, device=mass.device) >= counts[:, None], -1)


def block_means(x: Tensor, block: int, *, how: str = "mean") -> Tensor:
    """Pool (heads, tokens, d) over blocks of tokens to (heads, blocks, d); the last block counts only the tokens it has.

    >>> block_means(torch.tensor([[[1.0], [3.0], [5.0]]]), 2).tolist()
    [[[2.0], [5.0]]]
    """
    heads, tokens, dim = x.shape
    blocks = -(-tokens // block)
    fill = {"mean": 0.0, "max": -math.inf, "min": math.inf}[how]
    tiles = F.pad(x, (0, 0, 0, blocks * block - tokens), value=fill).view(heads, blocks, block, dim)
    if how != "mean":
        return tiles.amax(2) if how == "max" else tiles.amin(2)
    size = torch.full((blocks, 1), float(block), device=x.device)
    size[-1] = tokens - (blocks - 1) * block
    return tiles.sum(2) / size.to(x.dtype)
