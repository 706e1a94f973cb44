"""Attention of the drafter: over text and chain at inference, and along the diagonal during training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class KV:
    """Keys and values of a drafter; never changed in place, so that a chain can be dropped by keeping the object from before it.

    Attributes:
        keys, values: (batch, kv_heads, L, head_dim), keys rotated. positions: (batch, L). mask: (batch, L), False at padding, or None.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return self.keys.shape[2]

    def extend(self, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor | None) -> KV:
        """A longer KV; ``self`` stays as it is."""
        if self.mask is None and mask is None:
            joined = None
        else:
            old, new = (torch.ones_like(p, dtype=torch.bool) if m is None else m for m, p in ((self.mask, self.positions), (mask, positions)))
            joined = torch.cat([old, new], 1)
        return KV(torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2), torch.cat([self.positions, positions], 1), joined)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions for x (batch, heads, T, head_dim) at ``positions`` (batch or 1, T), halves paired as in Llama."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * inverse
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def visible(
    queries: Tensor, keys: Tensor, window: int | None, sink: int, key_mask: Tensor | None, *, before: Tensor | None = None,
) -> Tensor:
    """(batch or 1, queries, keys) booleans: not later than the query, inside its window or among the first ``sink``, and no padding.

    Args:
        queries, keys: positions, (batch or 1, T) and (batch or 1, L). before: (batch or 1, T), only keys at earlier positions than this; default
            the query's own position and everything before it.
    """
    limit = queries + 1 if before is None else before
    at = keys[:, None, :]
    seen = at < limit[:, :, None]
    if window is not None:
        seen = seen & ((at > queries[:, :, None] - window) | (at < sink))
    return seen if key_mask is None else seen & key_mask[:, None, :]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, weights: bool) -> tuple[Tensor, Tensor | None]:
    """Attention of q (batch, heads, T, head_dim) over k, v (batch, kv_heads, L, head_dim); rows without any visible key give zeros.

    Args:
        mask: (batch or 1, T, L), or None for plain causal attention over T = L. weights: whether to return (batch, heads, T, L) too.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]), None
    grouped, scale = _by_kv_head(q, k), q.shape[-1] ** -0.5
    scores = _scores(grouped, k, scale, mask)
    a = torch.nan_to_num(scores.softmax(-1))
    mixed = (a.flatten(2, 3).to(v.dtype) @ v).view(grouped.shape)
    return mixed.flatten(1, 2), a.flatten(1, 2) if weights else None


def attend_diagonal(
    q: Tensor, text_k: Tensor, text_v: Tensor, chain_k: list[Tensor], chain_v: list[Tensor], text: Tensor, own: Tensor | None, *, weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every chain start over the text's keys and, of the chain's keys, only those with its own index.

    Args:
        q: (batch, heads, S, head_dim). text_k, text_v: (batch, kv_heads, S, head_dim). chain_k, chain_v: lists of the same shape, one a step.
        text: (batch or 1, S, S) visible text keys. own: (batch or 1, S, steps) visible own keys, or None for all of them.

    Source: arXiv 2503.01840, section 3.2, figure 6 (mask of the training-time test).
    """
    grouped, scale = _by_kv_head(q, text_k), q.shape[-1] ** -0.5
    s_text = _scores(grouped, text_k, scale, text)
    s_own = torch.stack([(grouped * k[:, :, None]).sum(-1, dtype=torch.float32) for k in chain_k], -1) * scale
    if own is not None:
        s_own = s_own.masked_fill(~own[:, None, None], float("-inf"))
    a = torch.nan_to_num(torch.cat([s_text, s_own], -1).softmax(-1))
    a_text, a_own = a.split([text_k.shape[2], len(chain_k)], -1)
    mixed = (a_text.flatten(2, 3).to(text_v.dtype) @ text_v).view(grouped.shape)
    for i, v in enumerate(chain_v):
        mixed = mixed + a_own[..., i, None].to(v.dtype) * v[:, :, None]
    return mixed.flatten(1, 2), a.flatten(1, 2) if weights else None


def _by_kv_head(q: Tensor, k: Tensor) -> Tensor:
    """q as (batch, kv_heads, group, T, head_dim): query heads beside the key head they share."""
    return q.unflatten(1, (k.shape[1], -1))


def _scores(grouped: Tensor, k: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Masked float32 scores (batch, kv_heads, group, T, L); one matrix product for a whole group of query heads."""
    batch, kv_heads, group, length, _ = grouped.shape
    scores = (grouped.flatten(2, 3) @ k.transpose(-1, -2)).view(batch, kv_heads, group, length, -1)
    return (scores.float() * scale).masked_fill(~mask[:, None, None], float("-inf"))
