"""The torch paths of sparse_attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_SCORES = 2**22  # scores held at once by the masked path


class Pattern(NamedTuple):
    """What the rows see, as in sparse_attention."""

    window: int
    sinks: int
    dense_rows: int
    columns: torch.Tensor | None
    slashes: torch.Tensor | None
    blocks: torch.Tensor | None
    block: int


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp."""
    return masked(queries, keys, values, scaling, pattern)


def masked(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """The differentiable path that also keeps NaN in unseen keys and values away: the full mask, a block of rows at a time."""
    batch, heads, rows, dim = queries.shape
    kv_heads, tokens, value_dim = *keys.shape[1:3], values.shape[3]
    group, dtype = heads // kv_heads, torch.float64 if queries.dtype == torch.float64 else torch.float32
    if not (batch and heads and rows):
        return queries.new_zeros(batch, heads, rows, value_dim), queries.new_zeros(batch, heads, rows, dtype=dtype)
    k, v = keys.to(dtype), values.to(dtype)
    bad = ~v.isfinite()
    spoilt = bool(bad.any())
    if spoilt:
        v = v.masked_fill(bad, 0.0)
    step = max(1, _SCORES // (batch * heads * tokens))
    outs, lses = [], []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        end = tokens - rows + stop
        sees = mask(pattern, start, stop, rows, tokens, (batch, heads, kv_heads), keys.device)
        q = (queries[:, :, start:stop].to(dtype) * scaling).reshape(batch, kv_heads, group * (stop - start), dim)
        logits = (q @ k[:, :, :end].transpose(-1, -2)).view(batch, heads, stop - start, end).masked_fill(~sees, -math.inf)
        lse = logits.logsumexp(-1)
        share = (logits - lse[..., None]).exp().view(batch, kv_heads, -1, end)
        out = share @ v[:, :, :end]
        if spoilt:
            touched = sees.expand(batch, heads, -1, -1).reshape(batch, kv_heads, -1, end).to(dtype) @ bad[:, :, :end].to(dtype)
            out = out.masked_fill(touched > 0, math.nan)
        outs.append(out.view(batch, heads, stop - start, value_dim))
        lses.append(lse)
    return torch.cat(outs, 2).to(queries.dtype), torch.cat(lses, 2)


def mask(pattern: Pattern, start: int, stop: int, rows: int, tokens: int, sizes: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Which keys before the end of rows start..stop each of them sees: bool, broadcastable to (batch, heads, stop - start, end)."""
    batch, heads, _ = sizes
    end = tokens - rows + stop
    key = torch.arange(end, device=device)
    at = torch.arange(end - (stop - start), end, device=device)[:, None]
    sees = ((at - key < pattern.window) | (key < pattern.sinks) | (at >= tokens - pattern.dense_rows))[None, None]
    if pattern.columns is not None:
        sees = sees | membership(pattern.columns, tokens)[..., :end].repeat_interleave(heads // pattern.columns.shape[1], 1)[:, :, None]
    if pattern.slashes is not None:
        table = membership(pattern.slashes, tokens)
        sees = sees | table[..., (at - key).clamp_min(0)]
    if pattern.blocks is not None:
        row = torch.arange(start, stop, device=device)
        sees = sees | pattern.blocks[:, :, (row // pattern.block)[:, None], key // pattern.block]
    return sees & (key <= at)


def membership(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Index lists (..., m) as flags (..., size); numbers outside 0..size-1 are left out."""
    inside = (indices >= 0) & (indices < size)
    flags = torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool, device=indices.device)
    return flags.scatter_(-1, torch.where(inside, indices, size), True)[..., :size]
