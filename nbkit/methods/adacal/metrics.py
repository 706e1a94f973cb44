"""The probe and what is read from it: zone masses, entropy, concentration, and how much of the middle zone a pattern covers.

All functions here take the attention of the probe rows itself, ``A: (..., probe, tokens)``; row i of the probe stands at position
``tokens - probe + i``. They are the plain form of what :func:`nbkit.kernels.head_profile` computes without holding A.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError


class Zones(NamedTuple):
    """Three masks (probe, tokens) that split what each probe row may see: local (the last ``window`` keys), sink, and the middle."""

    sink: Tensor
    local: Tensor
    mid: Tensor


def probe_attention(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Causal attention of the last rows of a prompt.

    queries: (..., probe, head_dim), the last rows; keys: (..., tokens, head_dim) with as many heads. Returns (..., probe, tokens), rows sum to 1.
    Raises: InputError when there are more rows than keys.

    >>> probe_attention(torch.zeros(1, 2, 8), torch.zeros(1, 4, 8), 1.0)[0, 0]
    tensor([0.3333, 0.3333, 0.3333, 0.0000])
    """
    probe, tokens = queries.shape[-2], keys.shape[-2]
    check_probe(probe, tokens)
    logits = (queries.float() * scaling) @ keys.float().transpose(-1, -2)
    # Only the corner above the diagonal of the last `probe` keys is hidden.
    corner = torch.ones(probe, probe, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., tokens - probe :].masked_fill_(corner, -math.inf)
    return torch.softmax(logits, -1)


def check_probe(probe: int, tokens: int) -> None:
    """Raise InputError unless a probe of that many rows fits into the prompt."""
    if not 1 <= probe <= tokens:
        raise InputError("probe", got=f"{probe} rows of a prompt of {tokens} tokens", allowed=f"1 to {tokens}", hint="lower probe (or shift)")


def zones(probe: int, tokens: int, *, sinks: int, window: int, device: str | torch.device = "cpu") -> Zones:
    """The zones by distance from the row: local is nearer than ``window``, sink the first ``sinks`` keys beyond it, mid everything between.

    >>> [int(z.sum()) for z in zones(1, 10, sinks=2, window=3)]
    [2, 3, 5]
    """
    check_probe(probe, tokens)
    rows = torch.arange(tokens - probe, tokens, device=device)[:, None]
    columns = torch.arange(tokens, device=device)[None]
    seen, near = columns <= rows, rows - columns < window
    return Zones(seen & ~near & (columns < sinks), seen & near, seen & ~near & (columns >= sinks))


def zone_mass(attention: Tensor, zone: Tensor) -> Tensor:
    """Mass of a zone in every probe row: (..., probe). attention: (..., probe, tokens); zone: (probe, tokens) bool."""
    return (attention * zone).sum(-1)


def reduce_rows(mass: Tensor, how: str) -> Tensor:
    """Mass of the rows (..., probe) as one number a head: ``mean``, ``max`` or ``last``. Raises: InputError for another name.

    >>> reduce_rows(torch.tensor([[0.0, 0.8, 0.1]]), "max")
    tensor([0.8000])
    """
    if how == "mean":
        return mass.mean(-1)
    if how == "max":
        return mass.amax(-1)
    if how == "last":
        return mass[..., -1]
    raise InputError("reduce", got=how, allowed="mean, max, last")


def entropy(attention: Tensor) -> Tensor:
    """Mean entropy of the probe rows as a share of the largest possible, log(i + 1) at position i: (...,) in [0, 1]; position 0 counts 0.

    >>> entropy(torch.full((1, 1, 5), 0.2))
    tensor([1.])
    """
    probe, tokens = attention.shape[-2:]
    most = torch.arange(tokens - probe + 1, tokens + 1, device=attention.device, dtype=attention.dtype).log()
    nats = torch.special.entr(attention).sum(-1)
    return torch.where(most > 0, nats / most.clamp_min(1e-12), torch.zeros_like(nats)).mean(-1)


def concentration(attention: Tensor, *, top: float = 0.02) -> Tensor:
    """Mass of the ``top`` share of the keys by mean attention: (...,) in (0, 1]. attention: (..., probe, tokens).

    >>> concentration(torch.full((1, 1, 100), 0.01), top=0.02)
    tensor([0.0200])
    """
    mean = attention.mean(-2)
    return mean.topk(top_count(mean.shape[-1], top), -1).values.sum(-1)


def top_count(tokens: int, top: float) -> int:
    """How many keys the ``top`` share is: at least one, rounded up."""
    return max(1, min(tokens, math.ceil(round(top * tokens, 6))))


def column_sums(attention: Tensor) -> Tensor:
    """Sum over the probe rows of every column: (..., tokens), totals the number of rows."""
    return attention.sum(-2)


def diagonal_sums(attention: Tensor) -> Tensor:
    """Sum over the probe rows by distance row - column: (..., tokens), totals the number of rows.

    Far distances have fewer rows: distance d is seen by the rows at positions >= d only.

    >>> diagonal_sums(torch.tensor([[0.2, 0.8, 0.0], [0.1, 0.3, 0.6]]))
    tensor([1.4000, 0.5000, 0.1000])
    """
    return by_distance(attention).sum(-2)


def by_distance(attention: Tensor) -> Tensor:
    """The same numbers laid out by distance: entry [..., i, d] is attention[..., i, position(i) - d], 0 beyond the first token."""
    *lead, probe, tokens = attention.shape
    # Reversed in both axes, row r holds distance d at place r + d: a strided view of a padded copy lines the distances up.
    padded = F.pad(attention.flip(-1, -2), (0, probe)).reshape(-1, probe, tokens + probe).contiguous()
    view = padded.as_strided((len(padded), probe, tokens), (probe * (tokens + probe), tokens + probe + 1, 1))
    return view.flip(-2).reshape(*lead, probe, tokens)


def covered_share(attention: Tensor, mask: Tensor, mid: Tensor) -> Tensor:
    """Share of the middle-zone mass that a mask keeps: (...,); 1 where the zone holds less than 1e-6.

    attention: (..., probe, tokens); mask: bool, same shape or one that broadcasts, the probe rows of a pattern; mid: (probe, tokens) bool.
    """
    whole = (attention * mid).sum((-1, -2))
    kept = (attention * (mid & mask)).sum((-1, -2))
    return torch.where(whole < 1e-6, torch.ones_like(whole), kept / whole.clamp_min(1e-6))
