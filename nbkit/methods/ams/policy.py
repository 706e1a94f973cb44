"""The policy: every choice of the method in one frozen object, and one step of it as a pure function."""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nbkit import kernels
from nbkit.errors import InputError

from . import allocate
from .scorers import BUFFER, QUERIES_NEEDED, SCORERS, Scorer

ALLOCATIONS = {
    "mass": "segments of equal mass, quotas by mass (the paper's method)",
    "length": "segments of equal mass, quotas by length (ablation)",
    "fixed": "segments of fixed length, quotas by mass (ablation)",
    "none": "one segment: the scorer's top-k with the same must-keep set",
    "chunk": "whole chunks by mean score, shared by all heads (ChunkKV, arXiv 2502.00299)",
    "head": "one budget for all heads of a layer, shared out by score (AdaKV, arXiv 2407.11550)",
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)")
_UNIT = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Selection:
    """What one event decided, for all layers at once (leading axis ``layers``).

    Attributes:
        index: (layers, batch, kv_heads, n) int64, kept slots, increasing.
        valid: same shape bool or None; False marks padding where heads keep different numbers (allocation "head").
        segments: segmentation of the slots ``middle``, or None where the allocation has none.
        quota: (layers, batch, kv_heads, S) int64 or None.
        mass: (layers, batch, kv_heads, middle) float64 used for cuts and quotas, or None.
        credit: (layers, batch, kv_heads, T) running credit before the gather, or None.
        middle: (start, end) of the slots that the segments tile.
    """

    index: Tensor
    valid: Tensor | None
    segments: allocate.Segmentation | None
    quota: Tensor | None
    mass: Tensor | None
    credit: Tensor | None
    middle: tuple[int, int]


@dataclass(frozen=True)
class SegmentedPolicy:
    """Adaptive mass-segmented cache compression, its baselines and its ablations.

    Args:
        scorer: name in `SCORERS` or any ``callable(keys, values, queries, positions) -> (batch, kv_heads, T)``.
        keep: entries per head after an event: tokens (int), a share of the tokens seen (float in (0, 1]) or bytes for the whole cache of one
            sequence ("512 KiB").
        interval: generated tokens between events.
        segment_mass, seg_len: see `allocate.segments`.
        min_keep: floor of every segment.
        sinks, recent: first and last slots that always stay. If ``keep`` is smaller than both together the recent suffix shrinks, the
            sinks stay (paper, appendix B.2).
        ema: (lambda, beta) of the credit, or None for no credit.
        window, pool: queries used as evidence and the width of the pooling.
        recent_in_mass: give the last ``window`` slots the row's highest evidence (the paper's rule). It pulls nearly all cuts into the
            window; off (the default) they keep the attention they were measured to get.
        allocation: one of `ALLOCATIONS`.
        order: "paper" sets the must-keep entries aside first and shares out the rest, so every segment keeps its floor; "released" computes
            quotas for the whole budget, adds the must-keep set and drops the lowest scores, as the published code does.
        fixed_len, chunk_len, head_floor: of the allocations "fixed", "chunk", "head".
        seed: for scorers that draw.

    Source: arXiv 2605.23200. The defaults are the paper's table 15, with lengths scaled to contexts of 1-2 thousand tokens.

    >>> SegmentedPolicy(scorer="snapkv", keep=64).keep
    64
    """

    scorer: str | Scorer = "tova"
    keep: int | float | str = 128
    interval: int = 64
    segment_mass: float = 0.1
    seg_len: tuple[int, int] = (16, 128)
    min_keep: int = 1
    sinks: int = 4
    recent: int = 16
    ema: tuple[float, float] | None = (0.9, 0.9)
    window: int = 32
    pool: int = 5
    recent_in_mass: bool = False
    allocation: str = "mass"
    order: str = "paper"
    fixed_len: int = 128
    chunk_len: int = 20
    head_floor: float = 0.2
    seed: int = 0
    _score: Scorer = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self):
        if isinstance(self.scorer, str) and self.scorer not in SCORERS:
            raise InputError("scorer", got=self.scorer, allowed=", ".join(SCORERS), hint="or pass a callable")
        object.__setattr__(self, "_score", SCORERS[self.scorer] if isinstance(self.scorer, str) else self.scorer)
        if self.allocation not in ALLOCATIONS:
            raise InputError("allocation", got=self.allocation, allowed=", ".join(ALLOCATIONS))
        if self.order not in ("paper", "released"):
            raise InputError("order", got=self.order, allowed="'paper' or 'released'")
        if self.order == "released" and self.allocation not in ("mass", "length", "fixed"):
            raise InputError("order", got=f"released with allocation {self.allocation!r}", allowed="mass, length or fixed")
        if not callable(self._score):
            raise InputError("scorer", got=self.scorer, allowed="a name in SCORERS or a callable")
        least = {"interval": 1, "min_keep": 0, "sinks": 0, "recent": 0, "window": 1, "fixed_len": 1, "chunk_len": 1, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
                raise InputError(name, got=value, allowed=f"an integer >= {low}")
        for name in ("seg_len", "ema"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            elif not (isinstance(value, tuple) or (name == "ema" and value is None)):
                raise InputError(name, got=value, allowed="a pair of numbers" + (" or None" if name == "ema" else ""))
            if value is not None and len(value) != 2:
                raise InputError(name, got=value, allowed="two numbers")
        if isinstance(self.keep, np.integer):
            object.__setattr__(self, "keep", int(self.keep))
        if self.ema is not None and not all(0 <= x <= 1 for x in self.ema):
            raise InputError("ema", got=self.ema, allowed="(lambda, beta), both in [0, 1], or None")
        if not 0 <= self.head_floor <= 1:
            raise InputError("head_floor", got=self.head_floor, allowed="[0, 1]")
        allocate.segments(torch.ones(1), self.segment_mass, self.seg_len)
        allocate.pool(torch.ones(1), self.pool)
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float | str):
            raise InputError("keep", got=self.keep, allowed="tokens (int), share (float in (0, 1]) or bytes ('512 KiB')")
        if isinstance(self.keep, int) and self.keep <= self.sinks:
            raise InputError("keep", got=self.keep, allowed=f"> {self.sinks} (the sinks)", hint="raise keep or lower sinks")
        if isinstance(self.keep, float) and not 0 < self.keep <= 1:
            raise InputError("keep", got=self.keep, allowed="a share in (0, 1]; give tokens as an int")
        if isinstance(self.keep, str) and not _BYTES.fullmatch(self.keep.strip()):
            raise InputError("keep", got=self.keep, allowed="a number with B, KiB, MiB or GiB, e.g. '512 KiB'")

    def tokens(self, seen: int, bytes_per_token: int) -> int:
        """Entries per head that ``keep`` means after ``seen`` tokens.

        Args:
            bytes_per_token: keys and values of one token in all layers and heads.

        Raises:
            InputError: if a share or a number of bytes does not even hold the sinks.
        """
        if isinstance(self.keep, int):
            return self.keep
        if isinstance(self.keep, float):
            n = max(1, math.floor(self.keep * seen))
        else:
            number, unit = _BYTES.fullmatch(self.keep.strip()).groups()
            n = int(float(number) * _UNIT[unit] // bytes_per_token)
        if n <= self.sinks:
            raise InputError("keep", got=f"{self.keep} = {n} tokens", allowed=f"more than {self.sinks} tokens (the sinks)", hint="raise keep")
        return n

    def attach(self, model) -> AbstractContextManager:
        """Let ``model`` compact every `CompactedCache` that it fills inside the ``with`` block; the model is restored afterwards."""
        from .cache import attach

        return attach(self, model)

    def score(self, keys: Tensor, values: Tensor, queries, positions: Tensor) -> Tensor:
        """The scorer's output, checked: (batch, kv_heads, T) without NaN.

        Raises:
            InputError: naming the scorer.
        """
        name = self.scorer if isinstance(self.scorer, str) else getattr(self.scorer, "__name__", "user scorer")
        out = self._score(keys, values, queries, positions)
        if out.shape != keys.shape[:-1]:
            raise InputError(f"scorer {name}", got=f"shape {tuple(out.shape)}", allowed=f"{tuple(keys.shape[:-1])}")
        if torch.isnan(out).any():
            raise InputError(f"scorer {name}", got="NaN scores", allowed="numbers (inf allowed)", hint="check keys, values and the scorer")
        return out.float()

    @property
    def needs_evidence(self) -> bool:
        """Whether an event looks at window attention at all."""
        return self.allocation in ("mass", "length", "fixed")

    @property
    def buffer(self) -> int:
        """Queries per layer that have to be remembered between events: what the scorer looks at, and the evidence window."""
        scorer = QUERIES_NEEDED.get(self.scorer, BUFFER) if isinstance(self.scorer, str) else BUFFER
        return max(scorer, self.window if self.needs_evidence else 1)

    def select(
        self, scores: Tensor, evidence: Tensor | None, keep: int, credit: Tensor | None = None, alive: Tensor | None = None
    ) -> Selection:
        """Choose the slots that stay: one event of the method, without a model.

        Args:
            scores: (..., kv_heads, T) from any scorer.
            evidence: (..., kv_heads, T) mean window attention, not yet pooled; may be None where the allocation ignores it.
            keep: entries per head that stay; ``keep >= T`` keeps everything.
            credit: running credit of the surviving slots, or None.
            alive: (..., kv_heads, T) bool, False on slots that only pad a head (allocation "head"), or None.

        Returns:
            Selection with exactly ``min(keep, T)`` increasing indices per head (allocation "head": that many on average).
        """
        slots = scores.shape[-1]
        if isinstance(keep, bool) or not isinstance(keep, int | np.integer) or keep < 1:
            raise InputError("keep", got=keep, allowed="an integer >= 1")
        if keep >= slots:
            index = torch.arange(slots, device=scores.device).expand(scores.shape).contiguous()
            return Selection(index, None, None, None, None, credit, (0, slots))
        if self.order == "released":
            return self._select_released(scores, evidence, keep, credit)
        sinks = min(self.sinks, keep)
        recent = min(self.recent, keep - sinks)
        middle, budget = (sinks, slots - recent), keep - sinks - recent
        inner = scores[..., sinks : slots - recent]
        cut = quota = used = None
        if self.allocation == "head":
            return self._select_heads(scores, keep, middle, alive)
        if self.allocation == "chunk":
            chosen = self._chunks(inner, budget)
        elif self.allocation == "none":
            chosen = kernels.segment_topk(
                inner, torch.zeros_like(inner, dtype=torch.long), torch.full((*inner.shape[:-1], 1), budget, device=inner.device)
            )
        else:
            used, credit = self._mass(evidence, middle, credit)
            cut = self._cut(used)
            weight = torch.ones_like(used) if self.allocation == "length" else used
            quota = allocate.quotas(weight, cut, budget, self.min_keep)
            chosen = kernels.segment_topk(inner, cut.ids, quota)
        kept = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        kept[..., sinks : slots - recent] = chosen
        index = kept.nonzero()[:, -1].reshape(*scores.shape[:-1], keep)
        return Selection(index, None, cut, quota, used, credit, middle)

    def _mass(self, evidence: Tensor, middle: tuple[int, int], credit: Tensor | None) -> tuple[Tensor, Tensor | None]:
        slots = evidence.shape[-1]
        window = min(self.window, slots - 1)
        released = self.order == "released"
        if released:
            u = torch.nn.functional.pad(allocate.pool(evidence[..., : slots - window], self.pool), (0, window))
        else:
            u = allocate.pool(evidence, self.pool)
        if released or self.recent_in_mass:
            axes = tuple(range(u.ndim - 3, u.ndim)) if released else (-1,)
            top = u[..., : slots - window].amax(axes, keepdim=True)
            u = torch.cat([u[..., : slots - window], top.expand(*u.shape[:-1], window)], -1)
        start, end = middle
        current = allocate.mass(u[..., start:end])
        if self.ema is None:
            return current, None
        if credit is not None:
            credit = torch.nn.functional.pad(credit, (0, slots - credit.shape[-1]))[..., start:end]
        used, new = allocate.credited(current, credit, self.ema)
        return used, torch.nn.functional.pad(new, (start, slots - end))

    def _cut(self, mass: Tensor) -> allocate.Segmentation:
        if self.allocation == "fixed":
            return allocate.fixed_segments(mass.shape, self.fixed_len, mass.device)
        return allocate.segments(mass, self.segment_mass, self.seg_len, order=self.order)

    def _chunks(self, scores: Tensor, budget: int) -> Tensor:
        """Whole chunks by mean score over the chunk and all heads; what is left of the budget takes the best tokens of the next chunk."""
        shared = scores.mean(-2, keepdim=True)
        slots = scores.shape[-1]
        chunk = allocate.fixed_segments(shared.shape, min(self.chunk_len, slots), scores.device)
        mean = chunk.sums(shared) / chunk.lengths
        order = mean.argsort(dim=-1, descending=True, stable=True)
        taken = torch.minimum(chunk.lengths.gather(-1, order).cumsum(-1), torch.tensor(budget, device=scores.device))
        quota = torch.zeros_like(chunk.lengths).scatter_(-1, order, taken.diff(dim=-1, prepend=torch.zeros_like(taken[..., :1])))
        return kernels.segment_topk(shared, chunk.ids, quota).expand(scores.shape)

    def _select_heads(self, scores: Tensor, keep: int, middle: tuple[int, int], alive: Tensor | None) -> Selection:
        """One pool of entries for all heads of a layer: a floor for each head, the rest to the highest scores of any head."""
        start, end = middle
        slots, heads = scores.shape[-1], scores.shape[-2]
        inner = scores[..., start:end]
        budget = keep - start - (slots - end)
        floor = int(self.head_floor * budget)
        # Segment -1 is not selectable: padding first, then also what the floor has already secured.
        free = torch.zeros_like(inner, dtype=torch.long) if alive is None else alive[..., start:end].long() - 1
        safe = kernels.segment_topk(inner, free, torch.full((*inner.shape[:-1], 1), floor, device=inner.device))
        pooled = torch.where(safe, -1, free).flatten(-2)
        rest = torch.full((*pooled.shape[:-1], 1), heads * (budget - floor), device=inner.device)
        chosen = safe | kernels.segment_topk(inner.flatten(-2), pooled, rest).reshape(inner.shape)
        kept = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        kept[..., start:end] = chosen
        width = int(kept.sum(-1).max())
        # Shorter heads are padded between the sinks and the rest, so that the last slots are always real.
        place = torch.where(kept, 2, 1)
        place[..., :start] = 0
        short = width - kept.sum(-1, keepdim=True)
        spare = (~kept).long().cumsum(-1) <= short
        index = torch.where(kept | spare, place, 3).argsort(dim=-1, stable=True)[..., :width]
        valid = kept.gather(-1, index)
        return Selection(index, valid, None, None, None, None, middle)

    def _select_released(self, scores: Tensor, evidence: Tensor, keep: int, credit: Tensor | None) -> Selection:
        """The published code's order: quotas for the whole budget, then must-keep, then trim by score over all segments together."""
        slots = scores.shape[-1]
        recent = min(self.recent, keep)
        sinks = min(self.sinks, keep - recent)
        used, credit = self._mass(evidence, (0, slots), credit)
        cut = self._cut(used)
        weight = torch.ones_like(used) if self.allocation == "length" else used
        quota = allocate.quotas(weight, cut, keep, self.min_keep, order="released")
        candidates = kernels.segment_topk(scores, cut.ids, quota)
        must = torch.zeros(slots, dtype=torch.bool, device=scores.device)
        must[:sinks] = True
        must[slots - recent :] = True
        need = keep - int(must.sum())
        free = candidates & ~must
        # Too few candidates outside the must-keep set: the published code falls back to the scorer's plain top-k.
        free = torch.where(free.sum(-1, keepdim=True) < need, (~must).expand_as(free), free)
        one = torch.where(free, 0, -1)
        chosen = kernels.segment_topk(scores, one, torch.full((*scores.shape[:-1], 1), need, device=scores.device)) | must
        index = chosen.nonzero()[:, -1].reshape(*scores.shape[:-1], keep)
        return Selection(index, None, cut, quota, used, credit, (0, slots))
