"""Window evidence: how much attention the last queries pay to every cached key.

The Triton version makes two passes over the keys (log-sum-exp, then shares) and never holds (query_heads, window, tokens). It is checked in the
Triton interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

from nbkit.kernels._registry import Example, Op, Program, one_device, register, require, shape_of

triton = tl = _logits_block = _visible_block = None  # bound by _triton_kernels on the first Triton call: importing this file must not import Triton

# Logits held at once by the torch version: on a CPU a block that stays in the second-level cache, on a GPU one that fills it.
_CPU_BLOCK, _CUDA_BLOCK = 2**17, 2**27
_SPLIT = 1024  # keys per program of the first Triton pass
_ROWS, _KEYS = 32, 64  # (query head, query) rows and keys per Triton block


def window_evidence(queries: torch.Tensor, keys: torch.Tensor, scaling: float, query_positions: torch.Tensor | None = None,
                    key_positions: torch.Tensor | None = None, valid: torch.Tensor | None = None, *, backend: str | None = None) -> torch.Tensor:
    """Mean attention of a window of queries to each key, over the window and the query heads that share a key head.

    A query sees the keys with key_position <= query_position that are valid; without positions it sees every valid key. A query that sees
    nothing contributes 0, and an invisible key gets exactly 0 whatever its content (also NaN). NaN in a query or in a key
    that is seen makes the evidence of that key head NaN.

    Parameters
    ----------
    queries: (batch, query_heads, window, head_dim), rotated; query head h belongs to key head h // (query_heads / kv_heads).
    keys: (batch, kv_heads, tokens, head_dim), rotated; dtype of queries.
    scaling: factor of the dot products, 1/sqrt(head_dim) in most models.
    query_positions: (window,) or (batch, window) int64; None = no causal mask (then key_positions must be None, too).
    key_positions: int64, (batch, kv_heads, tokens) or a shape that broadcasts to it.
    valid: bool, (batch, kv_heads, tokens) or a shape that broadcasts to it; None = all valid.

    Returns
    -------
    evidence: (batch, kv_heads, tokens) float32 (float64 for float64 input), computed in that precision. An empty window gives zeros.

    Raises
    ------
    InputError: shapes, dtypes or devices do not fit.
    BackendError: a forced backend cannot run.

    Source: arXiv 2607.04343 (AMS), window evidence before pooling; SnapKV, arXiv 2404.14469.

    >>> queries, keys = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 5, 4)
    >>> window_evidence(queries, keys, 0.5, torch.tensor([3]), torch.arange(5)).tolist()
    [[[0.25, 0.25, 0.25, 0.25, 0.0]]]
    """
    require(queries.is_floating_point() and queries.dim() == 4, "queries", got=shape_of(queries),
            allowed="floating (batch, query_heads, window, head_dim)")
    batch, query_heads, window, dim = queries.shape
    require(keys.dtype == queries.dtype and keys.dim() == 4 and (keys.shape[0], keys.shape[3]) == (batch, dim), "keys", got=shape_of(keys),
            allowed=f"({batch}, kv_heads, tokens, {dim}) {str(queries.dtype).removeprefix('torch.')}, to fit queries {tuple(queries.shape)}")
    heads, tokens = keys.shape[1:3]
    require(heads > 0 and query_heads % heads == 0, "query_heads", got=query_heads, allowed=f"a multiple of kv_heads = {heads}")
    require(math.isfinite(scaling), "scaling", got=scaling, allowed="a finite number")
    require((query_positions is None) == (key_positions is None), "query_positions and key_positions", got="one of them", allowed="both or neither")
    if query_positions is not None:
        require(query_positions.dtype == torch.int64 and tuple(query_positions.shape) in ((window,), (batch, window)), "query_positions",
                got=shape_of(query_positions), allowed=f"({window},) or ({batch}, {window}) int64")
        query_positions = query_positions.expand(batch, window)
        key_positions = _expanded("key_positions", key_positions, torch.int64, (batch, heads, tokens))
    if valid is not None:
        valid = _expanded("valid", valid, torch.bool, (batch, heads, tokens))
    one_device([tensor for tensor in (queries, keys, query_positions, key_positions, valid) if tensor is not None], "window_evidence")
    return OP.run(backend, queries, keys, float(scaling), query_positions, key_positions, valid)


def _expanded(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int, int]) -> torch.Tensor:
    fits = tensor.dim() <= 3 and all(have in (1, want) for have, want in zip(reversed(tensor.shape), reversed(shape), strict=False))
    require(tensor.dtype == dtype and fits, what, got=shape_of(tensor), allowed=f"{str(dtype).removeprefix('torch.')}, broadcastable to {shape}")
    return tensor.expand(shape)


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reference(queries, keys, scaling, query_positions, key_positions, valid) -> torch.Tensor:
    batch, query_heads, window, _ = queries.shape
    heads, tokens = keys.shape[1:3]
    group = query_heads // heads
    evidence = torch.zeros(batch, heads, tokens, dtype=torch.float64, device=keys.device)
    for b in range(batch):
        for h in range(query_heads):
            for w in range(window):
                sees = torch.ones(tokens, dtype=torch.bool, device=keys.device)
                if query_positions is not None:
                    sees &= key_positions[b, h // group] <= query_positions[b, w]
                if valid is not None:
                    sees &= valid[b, h // group]
                if sees.any():
                    logits = (keys[b, h // group][sees].double() @ queries[b, h, w].double()) * scaling
                    share = (logits - logits.max()).exp()
                    evidence[b, h // group, sees] += share / share.sum() / (window * group)
    return evidence.to(_result_dtype(queries.dtype))


def _torch(queries, keys, scaling, query_positions, key_positions, valid) -> torch.Tensor:
    batch, query_heads, window, dim = queries.shape
    heads, tokens = keys.shape[1:3]
    group, pairs, dtype = query_heads // heads, batch * heads, _result_dtype(queries.dtype)
    if not (pairs and group and window and tokens):
        return torch.zeros(batch, heads, tokens, dtype=dtype, device=keys.device)
    q = (queries.to(dtype) * scaling).reshape(pairs, group * window, dim)
    k = keys.reshape(pairs, tokens, dim)
    fills, dead = _masks(window, query_positions, key_positions, valid)
    limit = _CPU_BLOCK if keys.device.type == "cpu" else _CUDA_BLOCK
    step = max(1, limit // (group * window * tokens))
    blocks = []
    for start in range(0, pairs, step):
        part = slice(start, start + step)
        logits = torch.bmm(q[part], k[part].to(dtype).transpose(1, 2)).view(-1, group, window, tokens)
        for columns, hidden in fills:
            logits[..., columns].masked_fill_(hidden[part, None], -math.inf)
        share = logits.softmax(-1)
        if dead is not None:
            share = share.masked_fill(dead[part, None, :, None], 0.0)
        blocks.append(share.flatten(1, 2).mean(1))
    return torch.cat(blocks).view(batch, heads, tokens)


def _masks(window, query_positions, key_positions, valid) -> tuple[list[tuple[slice, torch.Tensor]], torch.Tensor | None]:
    """What to hide, as (columns, (pairs, window or 1, columns)), and the queries that see nothing, (pairs, window), or None."""
    fills, dead, padded = [], None, None
    if valid is not None:
        padded = ~valid.flatten(0, 1)
        columns = _span(padded)
        fills.append((columns, padded[:, None, columns]))
        dead = padded.all(-1, keepdim=True).expand(-1, window)
    if key_positions is not None:
        positions = key_positions.flatten(0, 1)
        at = query_positions[:, None].expand(-1, key_positions.shape[1], -1).flatten(0, 1)
        # A causal mask hides only keys newer than the oldest query: usually the last few columns.
        columns = _span(positions > at.amin(-1, keepdim=True))
        fills.append((columns, positions[:, None, columns] > at[..., None]))
        oldest = positions if padded is None else positions.masked_fill(padded, torch.iinfo(torch.int64).max)
        dead = oldest.amin(-1, keepdim=True) > at
    if dead is not None and dead.device.type == "cpu" and not bool(dead.any()):
        dead = None
    return fills, dead


def _span(marked: torch.Tensor) -> slice:
    """The stretch of columns with a mark in any row; on a GPU all columns, because looking would wait for the device."""
    if marked.device.type != "cpu":
        return slice(0, marked.shape[-1])
    columns = marked.any(0).nonzero()
    return slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 0)


@cache
def _triton_kernels():
    # Module names, not closures: the interpreter runs a kernel's text with the module's names only.
    global triton, tl, _logits_block, _visible_block
    import triton
    import triton.language as tl

    @triton.jit
    def _logits_block(queries, keys, query_row, key_row, query_inside, key_inside, query_step, key_step, dim, scaling,
                      ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):
        # query_row, key_row: element offsets of the rows; dim runs in chunks, so any head size fits.
        total = tl.zeros([ROWS, KEYS], dtype=tl.float32)
        for base in range(0, dim, DIM):
            column = base + tl.arange(0, DIM)
            q = tl.load(queries + query_row[:, None] + column[None, :] * query_step, mask=query_inside[:, None] & (column < dim)[None, :], other=0.0)
            k = tl.load(keys + key_row[None, :] + column[:, None] * key_step, mask=key_inside[None, :] & (column < dim)[:, None], other=0.0)
            total = tl.dot(q, k, total, input_precision="ieee")
        return total * scaling

    @triton.jit
    def _visible_block(row_inside, query_position, key_positions, valid, key_index, key_inside, position_base, position_step, valid_base, valid_step,
                       CAUSAL: tl.constexpr, VALID: tl.constexpr):
        sees = row_inside[:, None] & key_inside[None, :]
        if CAUSAL:
            key_position = tl.load(key_positions + position_base + key_index * position_step, mask=key_inside, other=0)
            sees = sees & (key_position[None, :] <= query_position[:, None])
        if VALID:
            alive = tl.load(valid + valid_base + key_index * valid_step, mask=key_inside, other=0)
            sees = sees & (alive != 0)[None, :]
        return sees

    @triton.jit
    def normaliser(queries, keys, query_positions, key_positions, valid, partial, heads, group, window, tokens, dim, scaling,
                   q_batch, q_head, q_window, q_dim, k_batch, k_head, k_token, k_dim, qp_batch, qp_window, kp_batch, kp_head, kp_token,
                   v_batch, v_head, v_token, CAUSAL: tl.constexpr, VALID: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
                   DIM: tl.constexpr):
        # First pass: log-sum-exp of one block of (query head, query) rows over one stretch of keys; torch merges the stretches.
        pair, split = tl.program_id(0), tl.program_id(1)
        batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        row_inside = row < group * window
        member, query = (row // window).to(tl.int64), (row % window).to(tl.int64)
        query_row = batch * q_batch + (head * group + member) * q_head + query * q_window
        query_position = tl.load(query_positions + batch * qp_batch + query * qp_window, mask=row_inside, other=0)
        best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        begin = split.to(tl.int64) * SPLIT
        for base in range(begin, tl.minimum(begin + SPLIT, tokens), KEYS):
            key_index = base + tl.arange(0, KEYS)
            key_inside = key_index < tokens
            logits = _logits_block(queries, keys, query_row, batch * k_batch + head * k_head + key_index * k_token, row_inside, key_inside, q_dim,
                                   k_dim, dim, scaling, ROWS, KEYS, DIM)
            sees = _visible_block(row_inside, query_position, key_positions, valid, key_index, key_inside, batch * kp_batch + head * kp_head,
                                  kp_token, batch * v_batch + head * v_head, v_token, CAUSAL, VALID)
            logits = tl.where(sees, logits, float("-inf"))
            higher = tl.maximum(best, tl.max(logits, axis=1))
            # While a row has seen nothing its maximum is -inf; 0 in its place keeps the exponents at exp(-inf) = 0 instead of NaN.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(best - shift) + tl.sum(tl.exp(logits - shift[:, None]), axis=1)
            best = higher
        place = (pair.to(tl.int64) * tl.num_programs(1) + split) * group * window + row
        # A row that saw nothing has best -inf and total 0: its normaliser is -inf.
        tl.store(partial + place, best + tl.log(tl.where(total == 0.0, 1.0, total)), mask=row_inside)

    @triton.jit
    def accumulate(queries, keys, query_positions, key_positions, valid, normalisers, evidence, heads, group, window, tokens, dim, scaling,
                   q_batch, q_head, q_window, q_dim, k_batch, k_head, k_token, k_dim, qp_batch, qp_window, kp_batch, kp_head, kp_token,
                   v_batch, v_head, v_token, CAUSAL: tl.constexpr, VALID: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):
        # Second pass: the logits again, as shares of their row, summed over the rows. One program owns its keys, so no atomics and no order effects.
        pair = tl.program_id(0)
        batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
        key_index = tl.program_id(1).to(tl.int64) * KEYS + tl.arange(0, KEYS)
        key_inside = key_index < tokens
        summed = tl.zeros([KEYS], dtype=tl.float32)
        for base in range(0, group * window, ROWS):
            row = base + tl.arange(0, ROWS)
            row_inside = row < group * window
            member, query = (row // window).to(tl.int64), (row % window).to(tl.int64)
            query_row = batch * q_batch + (head * group + member) * q_head + query * q_window
            query_position = tl.load(query_positions + batch * qp_batch + query * qp_window, mask=row_inside, other=0)
            logits = _logits_block(queries, keys, query_row, batch * k_batch + head * k_head + key_index * k_token, row_inside, key_inside, q_dim,
                                   k_dim, dim, scaling, ROWS, KEYS, DIM)
            sees = _visible_block(row_inside, query_position, key_positions, valid, key_index, key_inside, batch * kp_batch + head * kp_head,
                                  kp_token, batch * v_batch + head * v_head, v_token, CAUSAL, VALID)
            normaliser_here = tl.load(normalisers + pair.to(tl.int64) * group * window + row, mask=row_inside, other=0.0)
            # A row that sees nothing has normaliser -inf, but then no key is visible to it either.
            shares = tl.exp(tl.where(sees, logits - normaliser_here[:, None], float("-inf")))
            summed += tl.sum(shares, axis=0)
        tl.store(evidence + pair.to(tl.int64) * tokens + key_index, summed / (group * window), mask=key_inside)

    return normaliser, accumulate


def _triton(queries, keys, scaling, query_positions, key_positions, valid) -> torch.Tensor:
    batch, query_heads, window, dim = queries.shape
    heads, tokens = keys.shape[1:3]
    group, pairs = query_heads // heads, batch * heads
    evidence = torch.empty(batch, heads, tokens, dtype=torch.float32, device=keys.device)
    if not evidence.numel():
        return evidence
    if not (group and window):
        return evidence.zero_()
    normaliser, accumulate = _triton_kernels()
    causal, masked = query_positions is not None, valid is not None
    # Pointers that the kernel never reads still need a tensor.
    unused = evidence.new_zeros(1, dtype=torch.int64)
    positions = (query_positions, key_positions) if causal else (unused.expand(batch, window), unused.expand(batch, heads, tokens))
    alive = valid if masked else unused.expand(batch, heads, tokens).bool()
    tensors = (queries, keys, *positions, alive)
    strides = tuple(stride for tensor in tensors for stride in tensor.stride())
    sizes = (heads, group, window, tokens, dim, scaling)
    shape = {"CAUSAL": causal, "VALID": masked, "ROWS": _ROWS, "KEYS": _KEYS, "DIM": min(64, max(16, 1 << max(0, dim - 1).bit_length()))}
    splits = -(-tokens // _SPLIT)
    partial = torch.empty(pairs, splits, group * window, dtype=torch.float32, device=keys.device)
    normaliser[(pairs, splits, -(-group * window // _ROWS))](*tensors, partial, *sizes, *strides, SPLIT=_SPLIT, **shape)
    normalisers = partial.logsumexp(1) if splits > 1 else partial
    accumulate[(pairs, -(-tokens // _KEYS))](*tensors, normalisers, evidence, *sizes, *strides, **shape)
    return evidence


def triton_programs() -> Iterator[Program]:
    """The kernels with one typical signature each, for the compile check."""
    for dtype, masked in (("fp32", True), ("bf16", True), ("fp16", False)):
        pointers = {"queries": f"*{dtype}", "keys": f"*{dtype}", "query_positions": "*i64", "key_positions": "*i64", "valid": "*i1",
                    "scaling": "fp32"}
        constants = {"CAUSAL": masked, "VALID": masked, "ROWS": _ROWS, "KEYS": _KEYS, "DIM": 64}
        normaliser, accumulate = _triton_kernels()
        yield Program(normaliser, pointers | {"partial": "*fp32"}, constants | {"SPLIT": _SPLIT})
        yield Program(accumulate, pointers | {"normalisers": "*fp32", "evidence": "*fp32"}, constants)


def plain(queries, keys, scaling, query_positions=None, key_positions=None, valid=None) -> torch.Tensor:
    """The shortest torch expression of the same mean: the yardstick of the contract suite, holding all of (query_heads, window, tokens)."""
    batch, query_heads, window, _ = queries.shape
    heads, tokens = keys.shape[1:3]
    sees = torch.ones(batch, heads, window, tokens, dtype=torch.bool, device=keys.device)
    if query_positions is not None:
        sees = sees & (key_positions.expand(batch, heads, tokens)[:, :, None] <= query_positions.expand(batch, window)[:, None, :, None])
    if valid is not None:
        sees = sees & valid.expand(batch, heads, tokens)[:, :, None]
    sees = sees.repeat_interleave(query_heads // heads, 1)
    logits = queries @ keys.repeat_interleave(query_heads // heads, 1).transpose(-1, -2) * scaling
    share = torch.where(sees.any(-1, keepdim=True), logits.masked_fill(~sees, -math.inf).softmax(-1), 0.0)
    return share.view(batch, heads, -1, tokens).mean(2) if share.numel() else share.new_zeros(batch, heads, tokens)


def _plain_reordered(queries, keys, scaling, *masks, **named) -> torch.Tensor:
    """The plain expression with the head dimension summed backwards, after scaling."""
    return plain(queries.flip(-1) * scaling, keys.flip(-1), 1.0, *masks, **named)


def examples(generator: torch.Generator) -> Iterator[Example]:
    """Inputs of the contract suite: odd sizes, grouped heads, causal and padding masks, rows that see nothing, empty axes, half precision."""
    def example(name, batch, heads, group, window, tokens, dim, dtype=torch.float32, causal=True, padding=0.0, gap=3, spread=1.0):
        queries = torch.randn(batch, heads * group, window, dim, generator=generator) * spread
        keys = torch.randn(batch, heads, tokens, dim, generator=generator) * spread
        args = {"queries": queries.to(dtype), "keys": keys.to(dtype), "scaling": dim**-0.5, "query_positions": None, "key_positions": None,
                "valid": None}
        if causal:
            steps = torch.randint(1, gap + 1, (batch, heads, tokens), generator=generator)
            args["key_positions"] = steps.cumsum(-1) - 1
            top = int(args["key_positions"].max()) if tokens * batch else 0
            args["query_positions"] = torch.arange(window) + max(0, top - window + 1)
        if padding:
            args["valid"] = torch.rand(batch, heads, tokens, generator=generator) >= padding
        return Example(name, args)

    yield example("odd sizes, causal", 2, 3, 3, 7, 67, 19)
    yield example("no mask", 2, 2, 2, 5, 33, 16, causal=False)
    yield example("one query head per key head", 1, 2, 1, 9, 41, 24)
    yield example("padding", 2, 2, 2, 6, 37, 8, padding=0.3)
    yield example("padding without positions", 2, 2, 2, 6, 37, 8, causal=False, padding=0.3)
    yield example("rows that see nothing", 2, 2, 2, 12, 9, 8, padding=0.9)
    nothing = example("nothing visible", 1, 2, 2, 4, 9, 8, padding=0.5)
    nothing.args["valid"].fill_(False)
    yield nothing
    late = example("first block of keys hidden", 1, 2, 1, 3, 100, 8, padding=0.2)
    late.args["valid"][..., :70] = False
    yield late
    early = example("queries before every key", 1, 1, 2, 3, 9, 8)
    yield Example(early.name, early.args | {"query_positions": torch.tensor([-3, -2, -1])})
    yield example("peaked", 1, 2, 2, 8, 50, 32, spread=6.0)
    hidden = example("NaN and inf in hidden keys", 1, 2, 2, 5, 40, 8, padding=0.4)
    hidden.args["keys"][~hidden.args["valid"]] = math.nan
    hidden.args["keys"][0, 0, -1] = math.inf
    hidden.args["valid"][0, 0, -1] = False
    yield hidden
    unsorted = example("positions in any order, one row for all", 2, 2, 2, 5, 30, 8)
    order = torch.randperm(30, generator=generator)
    yield Example(unsorted.name, unsorted.args | {"key_positions": unsorted.args["key_positions"][:1, :1, order]})
    rows = example("query positions by sequence", 3, 1, 2, 4, 21, 8)
    yield Example(rows.name, rows.args | {"query_positions": rows.args["query_positions"][None] - 5 * torch.arange(3)[:, None]})
    yield example("wide head", 2, 2, 2, 3, 40, 130)
    yield example("several stretches of keys", 1, 1, 1, 4, _SPLIT + 7, 4)
    yield example("window 256", 1, 1, 1, 256, 70, 8)
    yield example("float16", 1, 2, 2, 5, 45, 24, dtype=torch.float16)
    yield example("bfloat16", 1, 2, 2, 5, 45, 24, dtype=torch.bfloat16)
    yield example("float64", 1, 2, 2, 5, 45, 24, dtype=torch.float64)
    yield example("no tokens", 2, 2, 2, 5, 0, 8)
    yield example("empty window", 2, 2, 2, 0, 9, 8)
    yield example("no batch", 0, 2, 2, 5, 9, 8)
    yield example("one of each", 1, 1, 1, 1, 1, 1)


OP = register(Op(
    name="window_evidence", summary="mean attention of the last queries to every key", call=window_evidence,
    versions={"reference": _reference, "torch": _torch, "triton": _triton}, examples=examples, exact=False, plain=(plain, _plain_reordered),
    gradients=("queries", "keys"), triton_programs=triton_programs,
    batch_axes={"queries": 0, "keys": 0, "query_positions": -2, "key_positions": -3, "valid": -3},
    head_axes={"queries": 1, "keys": 1, "key_positions": -2, "valid": -2},
    triton_dtypes=(torch.float32, torch.float16, torch.bfloat16), interpreter_dtypes=(torch.float32, torch.float16),
))
