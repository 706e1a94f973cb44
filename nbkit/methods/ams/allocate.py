"""Allocate, then score: where the budget of a cache goes before any token is ranked.

Everything here is a pure function of tensors, vectorised over leading axes (layers, batch, heads), and needs no model.

Glossary of axes: ``T`` cache slots in order of their original positions, ``S`` segments (padded to the longest row).
Source of the method: "Adaptive Mass-Segmented KV Compression for Long-Context Reasoning" (arXiv 2605.23200), the method section and appendix B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError

EPS = 1e-12


def pool(evidence: Tensor, kernel: int = 5) -> Tensor:
    """Average ``evidence`` (..., T) over a centred window of ``kernel`` slots, stride 1, zeros outside."""
    if kernel < 1 or kernel % 2 == 0:
        raise InputError("pool", got=kernel, allowed="odd numbers >= 1")
    if kernel == 1:
        return evidence
    flat = evidence.reshape(-1, 1, evidence.shape[-1])
    return F.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2).reshape(evidence.shape)


def mass(evidence: Tensor, eps: float = EPS) -> Tensor:
    """Turn evidence (..., T) into mass: non-negative, each row sums to one.

    Source: paper, mass: ``(max(u_t, 0) + eps) / sum_v (max(u_v, 0) + eps)``. Computed in float64 so that cut points do
    not depend on the precision of the model.

    >>> mass(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    if not torch.isfinite(evidence).all():
        raise InputError("evidence", got="NaN or infinite values", allowed="finite numbers", hint="check the model's attention inputs")
    positive = evidence.double().clamp_min(0) + eps
    return positive / positive.sum(-1, keepdim=True)


def credited(current: Tensor, credit: Tensor | None, ema: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Blend the current mass with an exponentially averaged one.

    Args:
        current: (..., T) mass of this event.
        credit: (..., T') running credit aligned with the first T' slots, or None before the first event; the slots that arrived since
            start at zero.
        ema: (decay lambda, mix beta).

    Returns:
        (mass used, new credit), both (..., T). At the first event the mass used equals ``current`` for every lambda and beta.

    Source: paper, EMA credit: ``c <- lambda c + (1 - lambda) m``, ``m_used = norm(beta m + (1 - beta) norm(c))``.
    """
    decay, beta = ema
    if credit is None:
        old = torch.zeros_like(current)
    else:
        old = F.pad(credit, (0, current.shape[-1] - credit.shape[-1]))
    new = decay * old + (1 - decay) * current
    total = new.sum(-1, keepdim=True)
    # decay = 1 never lets mass in: before any credit exists the current mass stands in for it.
    smooth = torch.where(total > 0, new / total.clamp_min(1e-300), current)
    used = beta * current + (1 - beta) * smooth
    return used / used.sum(-1, keepdim=True), new


@dataclass(frozen=True)
class Segmentation:
    """Consecutive segments that tile ``T`` slots, one tiling per row.

    Attributes:
        ids: (..., T) int64, segment of every slot, 0, 1, 2, ... from left to right.
        lengths: (..., S) int64, slots per segment; 0 pads rows with fewer segments.
    """

    ids: Tensor
    lengths: Tensor

    @property
    def counts(self) -> Tensor:
        """(...,) int64, number of segments of each row."""
        return (self.lengths > 0).sum(-1)

    def bounds(self, *row: int) -> list[tuple[int, int]]:
        """Half-open (start, end) pairs of one row."""
        lengths = [n for n in self.lengths[row].tolist() if n > 0]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        return [(e - n, e) for n, e in zip(lengths, ends, strict=True)]

    def sums(self, values: Tensor) -> Tensor:
        """Sum ``values`` (..., T) over every segment: (..., S)."""
        out = torch.zeros(self.lengths.shape, dtype=values.dtype, device=values.device)
        return out.scatter_add_(-1, self.ids, values)


def _from_starts(start: Tensor) -> Segmentation:
    ids = start.long().cumsum(-1) - 1
    lengths = torch.zeros(*start.shape[:-1], int(ids[..., -1].max()) + 1, dtype=torch.long, device=start.device)
    return Segmentation(ids, lengths.scatter_add_(-1, ids, torch.ones_like(ids)))


def _split(start: Tensor, longest: int, *, even: bool) -> Tensor:
    """Add starts inside every piece longer than ``longest``: equal parts, or chops of exactly ``longest`` with a remainder."""
    slots = torch.arange(start.shape[-1], device=start.device)
    first = torch.where(start, slots, 0).cummax(-1).values
    offset = slots - first
    if not even:
        return start | (offset % longest == 0)
    piece = _from_starts(start)
    length = piece.lengths.gather(-1, piece.ids)
    parts = (length + longest - 1) // longest
    part = offset * parts // length
    before = F.pad(part[..., :-1], (1, 0))
    return start | (part != before)


def _merge(start: Tensor, shortest: int, *, last_left: bool) -> Tensor:
    """Join every piece shorter than ``shortest`` with its right neighbour; a short last piece joins to the left if asked."""
    piece = _from_starts(start)
    # A running sum that resets is sequential; small integer arrays are quickest outside of torch.
    lengths = np.moveaxis(piece.lengths.cpu().numpy(), -1, 0)
    filled = np.zeros(lengths.shape[1:], dtype=np.int64)
    closed = np.empty(lengths.shape, dtype=bool)
    for s, length in enumerate(lengths):
        filled += length
        closed[s] = (filled >= shortest) & (length > 0)
        filled[closed[s]] = 0
    closes = torch.from_numpy(np.ascontiguousarray(np.moveaxis(closed, 0, -1))).to(start.device)
    group = closes.long().cumsum(-1) - closes.long()
    if last_left:
        group = torch.minimum(group, (closes.sum(-1, keepdim=True) - 1).clamp_min(0))
    ids = group.gather(-1, piece.ids)
    return F.pad(ids[..., 1:] != ids[..., :-1], (1, 0), value=True)


def segments(mass: Tensor, segment_mass: float = 0.1, seg_len: tuple[int, int] = (16, 128), *, order: str = "paper") -> Segmentation:
    """Cut each row into consecutive segments of about equal mass, none much shorter or longer than ``seg_len`` allows.

    Args:
        mass: (..., T) non-negative; only ratios matter.
        segment_mass: mass per segment, in (0, 1]; cuts stand at the first slot where the running sum reaches k * segment_mass.
        seg_len: (shortest, longest). Longer pieces are split into equal parts, shorter ones joined with their right neighbour, a short
            last one with its left neighbour.
        order: "paper" as above, with a last pass that splits what merging made too long, so that both limits hold wherever
            longest >= 2 * shortest and T >= shortest; "released" as the published code: chops of exactly ``longest``, merged segments may
            be too long and the last one too short.

    Raises:
        InputError: for NaN or negative mass, an empty row or limits that contradict each other.

    Source: paper, segmentation.

    >>> segments(torch.ones(100), 0.25, (1, 100)).lengths.tolist()
    [24, 25, 25, 26]
    """
    shortest, longest = seg_len
    if not 0 < segment_mass <= 1:
        raise InputError("segment_mass", got=segment_mass, allowed="(0, 1]")
    if not 1 <= shortest <= longest:
        raise InputError("seg_len", got=seg_len, allowed="1 <= shortest <= longest")
    if order not in ("paper", "released"):
        raise InputError("order", got=order, allowed="'paper' or 'released'")
    slots = mass.shape[-1]
    if slots == 0:
        raise InputError("mass", got="0 slots", allowed="at least one slot")
    if not bool((mass >= 0).all()):
        raise InputError("mass", got="negative or NaN values", allowed="non-negative numbers")
    running = mass.double().cumsum(-1)
    cuts = math.ceil(1 / segment_mass - 1e-9) - 1
    start = torch.zeros(mass.shape, dtype=torch.bool, device=mass.device)
    if slots > 1 and cuts > 0:
        # A hair below the target, so that rounding in the running sum cannot move a cut that falls exactly on a slot.
        targets = torch.arange(1, cuts + 1, dtype=torch.float64, device=mass.device) * segment_mass * (1 - 1e-12)
        where = torch.searchsorted(running, (running[..., -1:] * targets).contiguous()).clamp(1, slots - 1)
        start.scatter_(-1, where, True)
    start[..., 0] = True
    start = _split(start, longest, even=order == "paper")
    start = _merge(start, shortest, last_left=order == "paper")
    if order == "paper":
        start = _split(start, longest, even=True)
    return _from_starts(start)


def fixed_segments(shape: torch.Size, length: int, device=None) -> Segmentation:
    """Segments of ``length`` slots each regardless of mass (the paper's ablation); the last one may be shorter."""
    slots = torch.arange(shape[-1], device=device)
    return _from_starts((slots % length == 0).expand(shape).contiguous())


def _even_quotas(caps: Tensor, keep: int) -> Tensor:
    """Share ``keep`` evenly over segments with room ``caps``, whatever their mass; a remainder goes to evenly spaced ones."""
    level = torch.zeros(*caps.shape[:-1], 1, dtype=torch.long, device=caps.device)
    for trial in range(1, int(caps.max()) + 1):
        level = torch.where(caps.clamp_max(trial).sum(-1, keepdim=True) <= keep, trial, level)
    quota = torch.minimum(caps, level)
    left = keep - quota.sum(-1, keepdim=True)
    open_ = caps > level
    rank = open_.long().cumsum(-1) - 1
    n = open_.sum(-1, keepdim=True).clamp_min(1)
    return quota + (open_ & ((rank + 1) * left // n > rank * left // n)).long()


def _released_quotas(weights: list[float], lengths: list[int], keep: int, floor: int) -> list[int]:
    """The published code's rounding: floors, rounded shares, then one unit at a time from the left until the sum fits."""
    low = [min(floor, n) for n in lengths]
    quota = list(low)
    if sum(quota) >= keep:
        if sum(min(1, q) for q in quota) > keep:
            raise InputError(
                "keep", got=f"{keep} for {len(lengths)} segments", allowed="at least one entry per segment in released order",
                hint="raise keep or segment_mass; the published loop never ends here",
            )
        while sum(quota) > keep:
            for i, q in enumerate(quota):
                if q > 1 and sum(quota) > keep:
                    quota[i] -= 1
        return quota
    rest, total = keep - sum(quota), sum(weights) + EPS
    quota = [min(n, q + round(rest * w / total)) for n, q, w in zip(lengths, quota, weights, strict=True)]
    while sum(quota) != keep:
        step = 1 if sum(quota) < keep else -1
        before = sum(quota)
        for i, n in enumerate(lengths):
            if sum(quota) != keep and (quota[i] < n if step > 0 else quota[i] > low[i]):
                quota[i] += step
        if sum(quota) == before:
            break
    return quota


def quotas(mass: Tensor, bounds: Segmentation, keep: int, min_keep: int = 1, *, order: str = "paper") -> Tensor:
    """Entries granted to every segment: a floor for each, the rest in proportion to mass.

    Args:
        mass: (..., T) non-negative weights of the slots (the slot count itself gives length-proportional quotas).
        bounds: segmentation of the same rows.
        keep: entries to share out; more than T means all of them.
        min_keep: floor per segment, cut to the segment's length.
        order: "paper" uses largest remainders under the caps (so a quota never falls when its own mass grows); "released" rounds and
            corrects from the left, as the published code does.

    Returns:
        (..., S) int64 with ``0 <= quota <= length`` and row sums of exactly ``min(keep, T)``. If the floors alone need ``keep`` or more, the
        quotas are as equal as possible and do not depend on mass; if there are more segments than entries, evenly spaced segments get one.

    Source: paper, quotas, with largest remainders in place of round-and-correct.

    >>> s = segments(torch.ones(100), 0.25, (1, 100))
    >>> quotas(torch.ones(100), s, 10, 1).tolist()
    [2, 3, 2, 3]
    """
    slots = bounds.ids.shape[-1]
    for name, value in (("keep", keep), ("min_keep", min_keep)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            raise InputError(name, got=value, allowed="an integer >= 0")
    if not bool((mass >= 0).all() & torch.isfinite(mass).all()):
        raise InputError("mass", got="negative, infinite or NaN values", allowed="finite non-negative numbers")
    if mass.shape != bounds.ids.shape:
        raise InputError("mass", got=tuple(mass.shape), allowed=f"{tuple(bounds.ids.shape)}, the shape that was segmented")
    keep = min(keep, slots)
    weight, length = bounds.sums(mass.double()), bounds.lengths
    if order == "released":
        rows = zip(weight.reshape(-1, weight.shape[-1]).tolist(), length.reshape(-1, length.shape[-1]).tolist(), strict=True)
        out = []
        for w, n in rows:
            real = sum(x > 0 for x in n)
            out.append(_released_quotas(w[:real], n[:real], keep, min_keep) + [0] * (len(n) - real))
        return torch.tensor(out, dtype=torch.long, device=mass.device).reshape(length.shape)
    floor = length.clamp_max(min_keep)
    floors = floor.sum(-1, keepdim=True)
    tight = floors >= keep
    room = length - floor
    rest = (keep - floors).clamp_min(0).double()
    share = torch.zeros_like(weight)
    active = room > 0
    for _ in range(length.shape[-1]):
        w = torch.where(active, weight + 1e-300, 0)
        offer = rest * w / w.sum(-1, keepdim=True).clamp_min(1e-300)
        full = active & (offer >= room)
        if not bool(full.any()):
            break
        share = torch.where(full, room.double(), share)
        rest = rest - torch.where(full, room, 0).sum(-1, keepdim=True)
        active = active & ~full
    else:
        offer = torch.zeros_like(weight)
    share = torch.where(active, offer, share)
    whole = torch.floor(share + 1e-9).long()
    left = (keep - floors).clamp_min(0) - whole.sum(-1, keepdim=True)
    remainder = torch.where(active & (whole < room), share - whole, -1.0)
    rank = remainder.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    quota = floor + whole + ((rank < left) & (remainder >= -0.5)).long()
    if bool(tight.any()):
        quota = torch.where(tight, _even_quotas(floor, keep), quota)
    return quota
