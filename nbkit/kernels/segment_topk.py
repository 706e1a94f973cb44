"""Per-segment top-k: which positions of a row survive when every segment has its own quota.

The Triton version counts, for every position, the better ones of its segment: quadratic in the segment's length, no sort. It is checked in the
Triton interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from nbkit.kernels._registry import Example, Op, Program, one_device, register, require, shape_of

triton = tl = None  # bound by _triton_kernel on the first Triton call: importing this file must not import Triton
_BLOCK = 64  # positions per Triton program


def segment_topk(scores: torch.Tensor, segment: torch.Tensor, quota: torch.Tensor, *, backend: str | None = None,
                 validate: bool = True) -> torch.Tensor:
    """Mark the `quota[s]` highest scores of every segment s of every row.

    Ties go to the lower position, and -0.0 ties with 0.0. +inf is the best score. -inf is the worst one but still a candidate: it is kept
    when the quota reaches it (to exclude a position give it segment -1). A quota beyond the segment's length keeps all of it.

    Parameters
    ----------
    scores: (..., tokens) floating point, any dtype; compared in its own precision.
    segment: (..., tokens) int64 ids 0..segments-1, -1 = not selectable. Segments that are contiguous runs (non-decreasing ids) are fastest
        on Triton; other orders are allowed.
    quota: (..., segments) int64, >= 0.
    validate: also check the values (NaN, ids, negative quotas); on a GPU this waits for the device.

    Returns
    -------
    mask: (..., tokens) bool.

    Raises
    ------
    InputError: shapes, dtypes or devices do not fit; with validate: NaN scores, ids outside -1..segments-1, negative quotas.
    BackendError: a forced backend cannot run.

    Source: arXiv 2607.04343 (AMS), selection within segments.

    >>> scores = torch.tensor([5.0, 1.0, 1.0, 9.0, 8.0, 7.0])
    >>> segment_topk(scores, torch.tensor([-1, 0, 0, 1, 1, 1]), torch.tensor([1, 2])).int().tolist()
    [0, 1, 0, 1, 1, 0]
    """
    require(scores.is_floating_point() and scores.dim() >= 1, "scores", got=shape_of(scores), allowed="floating point (..., tokens)")
    require(segment.dtype == torch.int64 and segment.shape == scores.shape, "segment", got=shape_of(segment),
            allowed=f"{tuple(scores.shape)} int64, the shape of scores", hint="use .expand(scores.shape) to share ids among rows")
    require(quota.dtype == torch.int64 and quota.dim() == scores.dim() and quota.shape[:-1] == scores.shape[:-1], "quota", got=shape_of(quota),
            allowed=f"{(*scores.shape[:-1], 'segments')} int64".replace("'", ""), hint="use .expand to share quotas among rows")
    one_device([scores, segment, quota], "segment_topk")
    if validate:
        _check_values(scores, segment, quota)
    return OP.run(backend, scores, segment, quota)


def _check_values(scores: torch.Tensor, segment: torch.Tensor, quota: torch.Tensor) -> None:
    if scores.numel():
        require(not bool(torch.isnan(scores).any()), "scores", got="NaN", allowed="numbers, +inf or -inf", hint="find the NaN before ranking")
        low, high = (int(value) for value in torch.aminmax(segment))
        require(low >= -1 and high < quota.shape[-1], "segment", got=f"ids {low}..{high}", allowed=f"-1..{quota.shape[-1] - 1}, a quota for each")
    if quota.numel():
        require(int(quota.min()) >= 0, "quota", got=int(quota.min()), allowed=">= 0")


def _reference(scores: torch.Tensor, segment: torch.Tensor, quota: torch.Tensor) -> torch.Tensor:
    tokens, segments = scores.shape[-1], quota.shape[-1]
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    if not mask.numel():
        return mask.to(scores.device)
    rows = mask.view(-1, tokens)
    table = zip(rows, scores.double().reshape(rows.shape).tolist(), segment.reshape(rows.shape).tolist(),
                quota.reshape(len(rows), segments).tolist(), strict=True)
    for out, row, ids, limits in table:
        for wanted, limit in enumerate(limits):
            members = [position for position in range(tokens) if ids[position] == wanted]
            members.sort(key=lambda position: (-row[position], position))
            out[members[:limit]] = True
    return mask.to(scores.device)


def _torch(scores: torch.Tensor, segment: torch.Tensor, quota: torch.Tensor) -> torch.Tensor:
    tokens = scores.shape[-1]
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    if not mask.numel():
        return mask
    order, sorted_slot = _order(scores.detach(), segment)
    # Sorted by segment, a segment's survivors are the places from its start to start + quota; id -1 comes first, as slot 0 with nothing to keep.
    slots = torch.arange(1, quota.shape[-1] + 1, device=scores.device).expand(quota.shape).contiguous()
    limit = torch.searchsorted(sorted_slot.contiguous(), slots) + quota.clamp(max=tokens)
    limit = torch.nn.functional.pad(limit, (1, 0))
    return mask.scatter_(-1, order, torch.arange(tokens, device=scores.device) < limit.gather(-1, sorted_slot))


def _order(scores: torch.Tensor, segment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions sorted by (segment, falling score, position), and 1 + the segments in that order."""
    if scores.dtype == torch.float64:
        by_score = scores.argsort(dim=-1, descending=True, stable=True)
        sorted_slot, by_segment = (segment.gather(-1, by_score) + 1).sort(dim=-1, stable=True)
        return by_score.gather(-1, by_segment), sorted_slot
    # One int64 sort instead of two sorts: a float's bits order like an integer once the negative half is mirrored; adding 0.0 turns -0.0 into 0.0.
    bits = (scores.float() + 0.0).view(torch.int32)
    falling = torch.where(bits < 0, bits & 0x7FFFFFFF, ~bits)
    key, order = (segment + 1).bitwise_left_shift_(32).add_(falling).sort(dim=-1, stable=True)
    return order, key.add_(1 << 31).bitwise_right_shift_(32)


@cache
def _triton_kernel():
    global triton, tl
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(scores, segment, quota, first, last, mask, tokens, segments, score_row, score_step, segment_row, segment_step, quota_row, quota_step,
               BLOCK: tl.constexpr):
        # A position survives when fewer than `quota` positions of its segment rank before it: counting needs no sort and no shared state.
        row = tl.program_id(0).to(tl.int64)
        here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = here < tokens
        mine = tl.load(segment + row * segment_row + here * segment_step, mask=inside, other=-1)
        selectable = inside & (mine >= 0)
        score = tl.load(scores + row * score_row + here * score_step, mask=inside, other=0.0)
        if score.dtype != tl.float64:
            score = score.to(tl.float32)
        start = tl.min(tl.load(first + row * segments + mine, mask=selectable, other=tokens)).to(tl.int32)
        stop = tl.max(tl.load(last + row * segments + mine, mask=selectable, other=-1)).to(tl.int32) + 1
        ahead = tl.zeros([BLOCK], dtype=tl.int32)
        for base in range(start, stop, BLOCK):
            there = base + tl.arange(0, BLOCK)
            valid = there < stop
            theirs = tl.load(segment + row * segment_row + there * segment_step, mask=valid, other=-1)
            rival = tl.load(scores + row * score_row + there * score_step, mask=valid, other=0.0)
            if rival.dtype != tl.float64:
                rival = rival.to(tl.float32)
            better = (rival[None, :] > score[:, None]) | ((rival[None, :] == score[:, None]) & (there[None, :] < here[:, None]))
            counts = better & valid[None, :] & (theirs[None, :] == mine[:, None])
            ahead += tl.sum(counts.to(tl.int32), axis=1)
        limit = tl.load(quota + row * quota_row + mine * quota_step, mask=selectable, other=0)
        tl.store(mask + row * tokens + here, selectable & (ahead < limit), mask=inside)

    return kernel


def _triton(scores: torch.Tensor, segment: torch.Tensor, quota: torch.Tensor) -> torch.Tensor:
    tokens, segments = scores.shape[-1], quota.shape[-1]
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if not mask.numel():
        return mask
    if not segments:
        return mask.fill_(False)
    scores, segment, quota = scores.detach().reshape(-1, tokens), segment.reshape(-1, tokens), quota.reshape(-1, segments)
    # The span of each segment bounds the counting loop. Ids of -1 go to a spare last column, cut off afterwards.
    places = torch.arange(tokens, device=scores.device).expand_as(segment)
    column = torch.where(segment < 0, segments, segment)
    first = column.new_full((len(scores), segments + 1), tokens).scatter_reduce_(1, column, places, "amin")[:, :-1].contiguous()
    last = column.new_full((len(scores), segments + 1), -1).scatter_reduce_(1, column, places, "amax")[:, :-1].contiguous()
    _triton_kernel()[(len(scores), -(-tokens // _BLOCK))](scores, segment, quota, first, last, mask, tokens, segments, *scores.stride(),
                                                         *segment.stride(), *quota.stride(), BLOCK=_BLOCK)
    return mask


def triton_programs() -> Iterator[Program]:
    """The kernels with one typical signature each, for the compile check."""
    for dtype in ("fp32", "bf16", "fp64"):
        yield Program(_triton_kernel(), {"scores": f"*{dtype}", "segment": "*i64", "quota": "*i64", "first": "*i64", "last": "*i64", "mask": "*i1"},
                      {"BLOCK": _BLOCK})


def examples(generator: torch.Generator) -> Iterator[Example]:
    """Inputs of the contract suite: odd sizes, ties, holes, infinities, empty rows, every dtype."""
    def example(name, shape, tokens, segments, dtype=torch.float32, levels=None, edges=False):
        scores = torch.randn(*shape, tokens, generator=generator)
        if levels:
            scores = (scores * levels).round() / levels * torch.where(torch.rand(scores.shape, generator=generator) < 0.5, -1.0, 1.0)
        if edges and tokens:
            special = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0, 1e-42, -1e-42])[torch.randint(6, scores.shape, generator=generator)]
            scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.6, special, scores)
        segment = torch.randint(max(segments, 1), (*shape, tokens), generator=generator).sort(-1).values
        holes = torch.rand(segment.shape, generator=generator) < (0.2 if segments else 1.0)
        quota = torch.randint(0, tokens // max(segments, 1) + 3, (*shape, segments), generator=generator)
        return Example(name, {"scores": scores.to(dtype), "segment": segment.masked_fill(holes, -1), "quota": quota})

    yield example("odd sizes", (2, 3), 67, 5)
    yield example("longer than a block", (2, 2), 131, 3, levels=4)
    yield example("ties and signed zeros", (3, 3), 41, 4, levels=1)
    yield example("infinities and subnormals", (2, 2), 53, 4, edges=True)
    yield example("one segment", (3, 1), 19, 1)
    yield example("float64", (2, 2), 37, 4, dtype=torch.float64, edges=True)
    yield example("float16", (2, 2), 37, 4, dtype=torch.float16, levels=2)
    yield example("bfloat16", (2, 2), 37, 4, dtype=torch.bfloat16)
    yield example("no tokens", (2, 3), 0, 2)
    yield example("no rows", (0, 3), 8, 2)
    yield example("no segments", (2, 1), 9, 0)
    yield example("one token", (1, 1), 1, 1)
    huge = example("quota beyond the length", (2, 2), 23, 6)
    huge.args["quota"].fill_(2**63 - 1)
    yield huge
    mixed = example("ids in any order", (2, 2), 29, 3)
    yield Example(mixed.name, mixed.args | {"segment": mixed.args["segment"].flip(-1)})


OP = register(Op(
    name="segment_topk", summary="mask of the highest scores of each segment, by quota", call=segment_topk,
    versions={"reference": _reference, "torch": _torch, "triton": _triton}, examples=examples, exact=True, triton_programs=triton_programs,
    batch_axes={"scores": 0, "segment": 0, "quota": 0}, head_axes={"scores": 1, "segment": 1, "quota": 1},
))
