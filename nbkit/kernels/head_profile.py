"""Head profile: where the last query rows of every head look, as a few numbers and sums.

The Triton version is checked in the Triton interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from nbkit.kernels._registry import Example, Op, Program, one_device, register, require, shape_of

triton = tl = _scores = None  # bound by _triton_kernels on the first Triton call: importing this file must not import Triton

_ROWS, _KEYS = 32, 64  # rows and keys of a Triton block
_SHARES = 2**20  # attention shares held at once by the torch version on a CPU
_CUDA_SHARES = 2**25


class HeadProfile(NamedTuple):
    """Attention of the probe rows of every head, summed up; float32 (float64 for float64 input)."""

    entropy: torch.Tensor  # (batch, heads): mean row entropy / log(number of visible keys), 0 to 1
    concentration: torch.Tensor  # (batch, heads): share of the mean attention on its largest columns
    sink: torch.Tensor  # (batch, heads, rows): mass on the first keys
    local: torch.Tensor  # (batch, heads, rows): mass on the latest keys
    mid: torch.Tensor  # (batch, heads, rows): the rest
    columns: torch.Tensor  # (batch, heads, tokens): mass of each key, summed over the rows
    diagonals: torch.Tensor  # (batch, heads, tokens): mass at each distance p - j, summed over the rows


def head_profile(queries: torch.Tensor, keys: torch.Tensor, scaling: float, *, sinks: int = 4, window: int = 64, top: float = 0.02,
                 backend: str | None = None) -> HeadProfile:
    """Entropy, concentration and the mass by zone, key and distance, of the causal attention of the last query rows.

    Row i of the probe stands at key index p = tokens - rows + i. Entropy of a row is divided by log(p + 1), its largest value; a row
    that sees one key counts 0. A key in reach of the window (p - j < window) is local, also when it is a sink; of the others, keys j < sinks
    are sinks and the rest is mid, so the three masses sum to 1. Concentration is the share of the mean attention on the
    ceil(top * tokens) largest columns, at least one. Keys after a row never reach it, whatever their content. The results carry no gradient.

    Parameters
    ----------
    queries: (batch, heads, rows, head_dim), the last rows of the sequence, rotated; head h reads key head h // (heads / kv_heads). rows <= tokens.
    keys: (batch, kv_heads, tokens, head_dim), rotated; dtype of queries.
    scaling: factor of the dot products, 1/sqrt(head_dim) in most models.
    sinks: number of first keys that form the sink zone.
    window: number of latest keys, the row itself included, that form the local zone; at least 1.
    top: share of the columns that concentration counts, in (0, 1].

    Returns
    -------
    profile: HeadProfile; without rows everything is 0.

    Raises
    ------
    InputError: shapes, dtypes, devices or options do not fit.
    BackendError: a forced backend cannot run.

    Source: zones and entropy of attention heads as in AdaCal; vertical and slash sums, arXiv 2407.02490 (MInference).

    >>> profile = head_profile(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 8, 4), 0.5, sinks=1, window=3, top=0.25)
    >>> [round(float(number), 3) for number in (profile.entropy, profile.concentration, profile.sink, profile.local, profile.mid)]
    [1.0, 0.25, 0.125, 0.375, 0.5]
    """
    require(queries.is_floating_point() and queries.dim() == 4, "queries", got=shape_of(queries), allowed="floating (batch, heads, rows, head_dim)")
    batch, heads, rows, dim = queries.shape
    require(keys.dtype == queries.dtype and keys.dim() == 4 and (keys.shape[0], keys.shape[3]) == (batch, dim), "keys", got=shape_of(keys),
            allowed=f"({batch}, kv_heads, tokens, {dim}) {str(queries.dtype).removeprefix('torch.')}, to fit queries {tuple(queries.shape)}")
    kv_heads, tokens = keys.shape[1:3]
    require(kv_heads > 0 and heads % kv_heads == 0, "heads", got=heads, allowed=f"a multiple of kv_heads = {kv_heads}")
    require(rows <= tokens, "rows of queries", got=rows, allowed=f"at most tokens = {tokens}", hint="queries are the last rows of the sequence")
    require(math.isfinite(scaling), "scaling", got=scaling, allowed="a finite number")
    for name, number, least in (("sinks", sinks, 0), ("window", window, 1)):
        require(isinstance(number, int) and not isinstance(number, bool) and number >= least, name, got=number, allowed=f"an integer >= {least}")
    require(0 < top <= 1, "top", got=top, allowed="a share in (0, 1]")
    one_device([queries, keys], "head_profile")
    return HeadProfile(*OP.run(backend, queries.detach(), keys.detach(), float(scaling), sinks, window, float(top)))


def _largest(top: float, tokens: int) -> int:
    # 0.07 * 100 is a little above 7 in floating point.
    return min(tokens, max(1, math.ceil(top * tokens - 1e-9)))


def _empty(queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    (batch, heads, rows, _), tokens = queries.shape, keys.shape[2]
    return [queries.new_zeros(shape, dtype=dtype) for shape in ((batch, heads),) * 2 + ((batch, heads, rows),) * 3 + ((batch, heads, tokens),) * 2]


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reference(queries, keys, scaling, sinks, window, top) -> list[torch.Tensor]:
    batch, heads, rows, _ = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    found = _empty(queries, keys, torch.float64)
    entropy, concentration, sink, local, mid, columns, diagonals = found
    for b in range(batch):
        for h in range(heads):
            for i in range(rows):
                p = tokens - rows + i
                logits = (keys[b, h * kv_heads // heads, :p + 1].double() @ queries[b, h, i].double()) * scaling
                shares = logits.softmax(0)
                if p > 0:
                    entropy[b, h] -= torch.special.xlogy(shares, shares).sum() / math.log(p + 1) / rows
                for j, share in enumerate(shares.unbind()):
                    zone = local if p - j < window else sink if j < sinks else mid
                    zone[b, h, i] += share
                    columns[b, h, j] += share
                    diagonals[b, h, p - j] += share
            if rows:
                concentration[b, h] = columns[b, h].sort(descending=True).values[:_largest(top, tokens)].sum() / rows
    return [part.to(_result_dtype(queries.dtype)) for part in found]


def _torch(queries, keys, scaling, sinks, window, top) -> list[torch.Tensor]:
    batch, heads, rows, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    group, dtype = heads // kv_heads, _result_dtype(queries.dtype)
    found = _empty(queries, keys, dtype)
    if not (batch and heads and rows):
        return found
    entropy, concentration, sink, local, mid, columns, diagonals = (part.view(batch * kv_heads, group, *part.shape[2:]) for part in found)
    q = (queries.to(dtype) * scaling).reshape(batch * kv_heads, group, rows, dim)
    k = keys.reshape(batch * kv_heads, tokens, dim)
    limit = _SHARES if keys.device.type == "cpu" else _CUDA_SHARES
    row_step = max(1, min(rows, limit // tokens))
    head_step = max(1, limit // (row_step * tokens * group))
    for first in range(0, batch * kv_heads, head_step):
        part = slice(first, first + head_step)
        for start in range(0, rows, row_step):
            stop = min(rows, start + row_step)
            end = tokens - rows + stop
            shares, row_entropy = _shares(q[part, :, start:stop], k[part, :end].to(dtype))
            near = torch.arange(end, device=keys.device) > torch.arange(end - (stop - start), end, device=keys.device)[:, None] - window
            local[part, :, start:stop] = shares.masked_fill(~near, 0.0).sum(-1)
            far_sinks = shares[..., :sinks].masked_fill(near[:, :sinks], 0.0).sum(-1)
            sink[part, :, start:stop] = far_sinks
            mid[part, :, start:stop] = shares[..., sinks:].masked_fill(near[:, sinks:], 0.0).sum(-1)
            entropy[part] += row_entropy.sum(-1)
            columns[part, ..., :end] += shares.sum(-2)
            diagonals[part, ..., :end] += _by_distance(shares)
    entropy /= rows
    concentration.copy_(columns.topk(_largest(top, tokens), -1).values.sum(-1) / rows)
    return found


def _shares(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last rows, (pairs, group, rows, end), and the normalised entropy of each row, (pairs, group, rows)."""
    (pairs, group, rows, _), end = queries.shape, keys.shape[1]
    logits = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2)).view(pairs, group, rows, end)
    # Only the last rows - 1 columns hold keys that some row must not see.
    logits[..., end - rows:].masked_fill_(torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1), -math.inf)
    shares = logits.softmax(-1)
    most = torch.arange(end - rows + 1, end + 1, device=keys.device, dtype=shares.dtype).log()
    # A lone visible key has entropy 0 and log(1) = 0.
    return shares, torch.special.entr(shares).sum(-1) / most.clamp_min(torch.finfo(shares.dtype).tiny)


def _by_distance(shares: torch.Tensor) -> torch.Tensor:
    """Sums over the rows at equal distance from the row's own key: (..., rows, end) -> (..., end)."""
    pairs, group, rows, end = shares.shape
    # Keys backwards, padded by the number of rows; read with rows one element shorter, equal distances stand below each other.
    sheared = torch.zeros(pairs, group, rows, end + rows, dtype=shares.dtype, device=shares.device)
    sheared[..., :end] = shares.flip(-1)
    return sheared.flatten(-2)[..., rows - 1:].unfold(-1, end, end + rows - 1).sum(-2)


@cache
def _triton_kernels():
    # Module names, not closures: the interpreter runs a kernel's text with the module's names only.
    global triton, tl, _scores
    import triton
    import triton.language as tl

    @triton.jit
    def _scores(queries, keys, query_row, key_row, row_inside, key_inside, position, key, q_dim, k_dim, dim, scaling,
                ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):
        # Causal logits of a block; query_row, key_row: element offsets of the rows; dim runs in chunks, so any head size fits.
        total = tl.zeros([ROWS, KEYS], dtype=tl.float32)
        for base in range(0, dim, DIM):
            column = base + tl.arange(0, DIM)
            q = tl.load(queries + query_row[:, None] + column[None, :] * q_dim, mask=row_inside[:, None] & (column < dim)[None, :], other=0.0)
            k = tl.load(keys + key_row[None, :] + column[:, None] * k_dim, mask=key_inside[None, :] & (column < dim)[:, None], other=0.0)
            total = tl.dot(q, k, total, input_precision="ieee")
        sees = (key[None, :] <= position[:, None]) & row_inside[:, None] & key_inside[None, :]
        return tl.where(sees, total * scaling, float("-inf"))

    @triton.jit
    def by_row(queries, keys, top, norm, entropy, sink, local, mid, heads, group, rows, tokens, dim, scaling, sinks, window,
               q_batch, q_head, q_row, q_dim, k_batch, k_head, k_token, k_dim, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):
        # One pass over the keys: maximum and sum of exponentials, entropy and the mass of the three zones of a block of rows.
        unit = tl.program_id(0).to(tl.int64)
        batch, head = unit // heads, unit % heads
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row_inside = row < rows
        position = row + (tokens - rows)
        query_row = batch * q_batch + head * q_head + row.to(tl.int64) * q_row
        best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        moment = tl.zeros([ROWS], dtype=tl.float32)  # sum of x exp(x), x = logit - best
        first = tl.zeros([ROWS], dtype=tl.float32)
        near = tl.zeros([ROWS], dtype=tl.float32)
        rest = tl.zeros([ROWS], dtype=tl.float32)
        for base in range(0, tokens, KEYS):
            key = base + tl.arange(0, KEYS)
            key_inside = key < tokens
            logits = _scores(queries, keys, query_row, batch * k_batch + (head // group) * k_head + key.to(tl.int64) * k_token, row_inside,
                             key_inside, position, key, q_dim, k_dim, dim, scaling, ROWS, KEYS, DIM)
            higher = tl.maximum(best, tl.max(logits, axis=1))
            # While a row has seen nothing its maximum is -inf; 0 in its place keeps the exponents at exp(-inf) = 0 instead of NaN.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            lower = tl.where(best == float("-inf"), 0.0, best - shift)
            shrink = tl.where(best == float("-inf"), 0.0, tl.exp(lower))
            lag = logits - shift[:, None]
            weight = tl.exp(lag)
            is_near = position[:, None] - key[None, :] < window
            is_first = (key < sinks)[None, :] & (position[:, None] - key[None, :] >= window)
            moment = (moment + lower * total) * shrink + tl.sum(weight * tl.where(weight > 0.0, lag, 0.0), axis=1)
            total = total * shrink + tl.sum(weight, axis=1)
            near = near * shrink + tl.sum(tl.where(is_near, weight, 0.0), axis=1)
            first = first * shrink + tl.sum(tl.where(is_first, weight, 0.0), axis=1)
            rest = rest * shrink + tl.sum(tl.where(is_near | is_first, 0.0, weight), axis=1)
            best = higher
        total = tl.where(row_inside, total, 1.0)
        place = unit * rows + row
        # Kept apart: their log-sum-exp would lose digits when logits are large.
        tl.store(top + place, best, mask=row_inside)
        tl.store(norm + place, total, mask=row_inside)
        # A row that sees one key has entropy 0 and log(1) = 0.
        most = tl.where(position > 0, tl.log((position + 1).to(tl.float32)), 1.0)
        tl.store(entropy + place, tl.where(position > 0, (tl.log(total) - moment / total) / most, 0.0), mask=row_inside)
        tl.store(sink + place, first / total, mask=row_inside)
        tl.store(local + place, near / total, mask=row_inside)
        tl.store(mid + place, rest / total, mask=row_inside)

    @triton.jit
    def by_column(queries, keys, top, norm, columns, sheared, heads, group, rows, tokens, dim, scaling, first, q_batch, q_head, q_row, q_dim,
                  k_batch, k_head, k_token, k_dim, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):
        # The logits again, as shares of their row, summed over the rows and stored by distance. One program owns its keys: no atomics.
        unit = tl.program_id(0).to(tl.int64) + first
        batch, head = unit // heads, unit % heads
        key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
        key_inside = key < tokens
        summed = tl.zeros([KEYS], dtype=tl.float32)
        for base in range(0, rows, ROWS):
            row = base + tl.arange(0, ROWS)
            row_inside = row < rows
            logits = _scores(queries, keys, batch * q_batch + head * q_head + row.to(tl.int64) * q_row,
                             batch * k_batch + (head // group) * k_head + key.to(tl.int64) * k_token, row_inside, key_inside, row + (tokens - rows),
                             key, q_dim, k_dim, dim, scaling, ROWS, KEYS, DIM)
            best = tl.load(top + unit * rows + row, mask=row_inside, other=0.0)
            shares = tl.exp(logits - best[:, None]) / tl.load(norm + unit * rows + row, mask=row_inside, other=1.0)[:, None]
            summed += tl.sum(shares, axis=0)
            apart = row[:, None] + (tokens - rows) - key[None, :]
            place = (tl.program_id(0).to(tl.int64) * rows + row)[:, None] * tokens + apart
            tl.store(sheared + place, shares, mask=(apart >= 0) & row_inside[:, None] & key_inside[None, :])
        tl.store(columns + unit * tokens + key, summed, mask=key_inside)

    return by_row, by_column


def _triton(queries, keys, scaling, sinks, window, top) -> list[torch.Tensor]:
    batch, heads, rows, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    found = _empty(queries, keys, torch.float32)
    if not (batch and heads and rows):
        return found
    entropy, concentration, sink, local, mid, columns, diagonals = found
    highest, norm, row_entropy = (torch.empty_like(sink) for _ in range(3))
    sizes = (heads, heads // kv_heads, rows, tokens, dim, scaling)
    strides = (*queries.stride(), *keys.stride())
    row_blocks, key_blocks = -(-rows // _ROWS), -(-tokens // _KEYS)
    shape = {"ROWS": _ROWS, "KEYS": _KEYS, "DIM": min(64, max(16, 1 << max(0, dim - 1).bit_length()))}
    by_row, by_column = _triton_kernels()
    by_row[(batch * heads, row_blocks)](queries, keys, highest, norm, row_entropy, sink, local, mid, *sizes, sinks, min(window, tokens), *strides,
                                        **shape)
    step = max(1, _CUDA_SHARES // (rows * tokens))
    for first in range(0, batch * heads, step):
        count = min(step, batch * heads - first)
        sheared = torch.zeros(count, rows, tokens, dtype=torch.float32, device=keys.device)
        by_column[(count, key_blocks)](queries, keys, highest, norm, columns, sheared, *sizes, first, *strides, **shape)
        diagonals.flatten(0, 1)[first:first + count] = sheared.sum(1)
    entropy.copy_(row_entropy.mean(-1))
    concentration.copy_(columns.topk(_largest(top, tokens), -1).values.sum(-1) / rows)
    return found


def triton_programs() -> Iterator[Program]:
    """The kernels with typical signatures, for the compile check."""
    for dtype in ("fp32", "bf16"):
        pointers = {"queries": f"*{dtype}", "keys": f"*{dtype}", "top": "*fp32", "norm": "*fp32", "scaling": "fp32"}
        by_row, by_column = _triton_kernels()
        yield Program(by_row, pointers | dict.fromkeys(("entropy", "sink", "local", "mid"), "*fp32"), {"ROWS": _ROWS, "KEYS": _KEYS, "DIM": 64})
        yield Program(by_column, pointers | {"columns": "*fp32", "sheared": "*fp32"}, {"ROWS": _ROWS, "KEYS": _KEYS, "DIM": 64})


def plain(queries, keys, scaling, sinks=4, window=64, top=0.02) -> tuple[torch.Tensor, ...]:
    """The shortest torch expression of the same profile: the yardstick of the contract suite."""
    (batch, heads, rows, _), tokens = queries.shape, keys.shape[2]
    at = torch.arange(tokens - rows, tokens, device=keys.device)[:, None]
    apart = at - torch.arange(tokens, device=keys.device)
    logits = queries @ keys.repeat_interleave(heads // keys.shape[1], 1).transpose(-1, -2) * scaling
    shares = logits.masked_fill(apart < 0, -math.inf).softmax(-1)
    near = apart < window
    first = (torch.arange(tokens, device=keys.device) < sinks) & ~near
    columns = shares.sum(2)
    diagonals = shares.new_zeros(batch, heads, tokens).index_add_(2, apart.clamp_min(0).flatten(), shares.flatten(2))
    entropy = (-torch.special.xlogy(shares, shares).sum(-1) / (at[:, 0] + 1).to(shares.dtype).log().clamp_min(1e-30)).sum(-1) / max(rows, 1)
    concentration = columns.topk(_largest(top, tokens) if tokens else 0, -1).values.sum(-1) / max(rows, 1)
    return entropy, concentration, (shares * first).sum(-1), (shares * near).sum(-1), (shares * (~near & ~first)).sum(-1), columns, diagonals


def _plain_reordered(queries, keys, scaling, **options) -> tuple[torch.Tensor, ...]:
    """The plain expression with the head dimension summed backwards, after scaling."""
    return plain(queries.flip(-1) * scaling, keys.flip(-1), 1.0, **options)


def examples(generator: torch.Generator) -> Iterator[Example]:
    """Inputs of the contract suite: odd sizes, grouped heads, zones that overlap or are empty, empty axes, half precision."""
    def example(name, batch, kv_heads, group, rows, tokens, dim, dtype=torch.float32, spread=1.0, **options):
        queries = torch.randn(batch, kv_heads * group, rows, dim, generator=generator) * spread
        keys = torch.randn(batch, kv_heads, tokens, dim, generator=generator) * spread
        return Example(name, {"queries": queries.to(dtype), "keys": keys.to(dtype), "scaling": dim**-0.5, **options})

    yield example("probe", 2, 2, 2, 8, 70, 16, window=9)
    yield example("all rows", 1, 2, 3, 11, 11, 8, window=5, sinks=2)
    yield example("one row", 2, 1, 2, 1, 40, 8, window=3)
    yield example("window covers the sinks", 1, 2, 1, 9, 20, 8, window=14, sinks=6)
    yield example("everything local", 1, 1, 2, 6, 20, 8, window=99)
    yield example("no sinks", 1, 1, 2, 6, 20, 8, window=1, sinks=0, top=1.0)
    yield example("everything sink or local", 1, 1, 2, 6, 20, 8, window=2, sinks=99, top=0.5)
    yield example("peaked", 1, 2, 2, 8, 50, 32, spread=6.0, window=8)
    yield example("several blocks of keys", 1, 1, 2, 35, 130, 24, window=16, top=0.1)
    yield example("wide head", 1, 2, 2, 3, 40, 130, window=8)
    yield example("float16", 1, 2, 2, 5, 45, 24, dtype=torch.float16, window=8)
    yield example("bfloat16", 1, 2, 2, 5, 45, 24, dtype=torch.bfloat16, window=8)
    yield example("float64", 1, 2, 2, 5, 45, 24, dtype=torch.float64, window=8)
    yield example("no rows", 2, 2, 2, 0, 9, 8)
    yield example("no tokens", 2, 2, 2, 0, 0, 8)
    yield example("no batch", 0, 2, 2, 5, 9, 8)
    yield example("one of each", 1, 1, 1, 1, 1, 1)


OP = register(Op(
    name="head_profile", summary="entropy, concentration and attention mass by zone, key and distance", call=head_profile,
    versions={"reference": _reference, "torch": _torch, "triton": _triton}, examples=examples, exact=False,
    plain=(plain, _plain_reordered), triton_programs=triton_programs, triton_dtypes=(torch.float32, torch.float16, torch.bfloat16),
    interpreter_dtypes=(torch.float32, torch.float16),
    batch_axes={"queries": 0, "keys": 0}, head_axes={"queries": 1, "keys": 1},
))
