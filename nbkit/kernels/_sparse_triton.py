"""The Triton version of sparse_attention: online softmax over the key blocks that hold a visible pair, then over a list of columns.

It is checked in the Triton interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch.nn.functional import pad

from nbkit.kernels._registry import Program
from nbkit.kernels._sparse_paths import Pattern, by_unit, membership

triton = tl = _logits = _absorbed = None  # bound by _kernel on the first Triton call: importing this file must not import Triton

_ROWS, _KEYS = 64, 64  # rows and keys of a Triton block


@cache
def _kernel():
    # Module names, not closures: the interpreter runs a kernel's text with the module's names only.
    global triton, tl, _logits, _absorbed
    import triton
    import triton.language as tl

    @triton.jit
    def _logits(queries, keys, query_row, key_row, query_inside, key_inside, query_step, key_step, dim, scaling,
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
    def _absorbed(logits, sees, v, best, total, mixed, spoilt):
        # One more block of keys in the running maximum, sum of exponentials, weighted values and count of seen values that are not finite.
        logits = tl.where(sees, logits, float("-inf"))
        higher = tl.maximum(best, tl.max(logits, axis=1))
        # While a row has seen nothing its maximum is -inf; 0 in its place keeps the exponents at exp(-inf) = 0 instead of NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(best - shift)
        weight = tl.exp(logits - shift[:, None])
        bad = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0.0, 1.0)
        if tl.max(tl.max(bad, axis=0), axis=0) > 0.0:
            spoilt += tl.dot(tl.where(sees, 1.0, 0.0), bad, input_precision="ieee")
            v = tl.where(bad > 0.0, 0.0, v).to(v.dtype)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        return higher, total * shrink + tl.sum(weight, axis=1), mixed, spoilt

    @triton.jit
    def attend(queries, keys, values, out, lse, order, counts, covered, column_list, column_counts, column_flags, slash_flags, blocks,
               heads, group, rows, tokens, dim, value_dim, scaling, window, dense_from, block, listed_columns, key_blocks, row_squares, key_squares,
               q_batch, q_head, q_row, q_dim, k_batch, k_head, k_token, k_dim, v_batch, v_head, v_token, v_dim,
               COLUMNS: tl.constexpr, SLASHES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
               VALUES: tl.constexpr):
        unit, tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        place = unit * tl.num_programs(1) + tile
        batch, head = unit // heads, unit % heads
        row = tile * ROWS + tl.arange(0, ROWS)
        row_inside = row < rows
        position = row + (tokens - rows)
        query_row = batch * q_batch + head * q_head + row * q_row
        key_base, value_base = batch * k_batch + (head // group) * k_head, batch * v_batch + (head // group) * v_head
        value_column = tl.arange(0, VALUES)
        best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, VALUES], dtype=tl.float32)
        spoilt = tl.zeros([ROWS, VALUES], dtype=tl.float32)
        for step in range(tl.load(counts + place)):
            key = tl.load(order + place * key_blocks + step).to(tl.int64) * KEYS + tl.arange(0, KEYS)
            key_inside = key < tokens
            apart = position[:, None] - key[None, :]
            sees = (apart < window) | (row >= dense_from)[:, None]
            if COLUMNS:
                sees = sees | (tl.load(column_flags + unit * tokens + key, mask=key_inside, other=0) != 0)[None, :]
            if SLASHES:
                sees = sees | (tl.load(slash_flags + unit * tokens + apart, mask=(apart >= 0) & (apart < tokens), other=0) != 0)
            if BLOCKS:
                square = (unit * row_squares + row // block)[:, None] * key_squares + (key // block)[None, :]
                sees = sees | (tl.load(blocks + square, mask=row_inside[:, None] & key_inside[None, :], other=0) != 0)
            sees = sees & (apart >= 0) & row_inside[:, None] & key_inside[None, :]
            logits = _logits(queries, keys, query_row, key_base + key * k_token, row_inside, key_inside, q_dim, k_dim, dim, scaling, ROWS, KEYS, DIM)
            v = tl.load(values + value_base + (key * v_token)[:, None] + value_column[None, :] * v_dim,
                        mask=key_inside[:, None] & (value_column < value_dim)[None, :], other=0.0)
            best, total, mixed, spoilt = _absorbed(logits, sees, v, best, total, mixed, spoilt)
        if COLUMNS:
            # Columns in the blocks above were counted there.
            listed = tl.load(column_counts + place)
            for base in range(0, listed, KEYS):
                slot = base + tl.arange(0, KEYS)
                key = tl.load(column_list + unit * listed_columns + slot, mask=slot < listed, other=0)
                fresh = (slot < listed) & (tl.load(covered + place * key_blocks + key // KEYS, mask=slot < listed, other=1) == 0)
                sees = fresh[None, :] & (key[None, :] <= position[:, None]) & row_inside[:, None]
                logits = _logits(queries, keys, query_row, key_base + key * k_token, row_inside, fresh, q_dim, k_dim, dim, scaling, ROWS, KEYS, DIM)
                v = tl.load(values + value_base + (key * v_token)[:, None] + value_column[None, :] * v_dim,
                            mask=fresh[:, None] & (value_column < value_dim)[None, :], other=0.0)
                best, total, mixed, spoilt = _absorbed(logits, sees, v, best, total, mixed, spoilt)
        result = tl.where(spoilt > 0.0, float("nan"), mixed / tl.where(total == 0.0, 1.0, total)[:, None])
        tl.store(out + ((unit * rows + row) * value_dim)[:, None] + value_column[None, :], result.to(out.dtype.element_ty),
                 mask=row_inside[:, None] & (value_column < value_dim)[None, :])
        tl.store(lse + unit * rows + row, best + tl.log(tl.where(total == 0.0, 1.0, total)), mask=row_inside)

    return attend


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp."""
    batch, heads, rows, dim = queries.shape
    kv_heads, tokens, value_dim = *keys.shape[1:3], values.shape[3]
    out = torch.empty(batch, heads, rows, value_dim, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=queries.device)
    if not lse.numel():
        return out, lse
    units, tiles = batch * heads, -(-rows // _ROWS)
    blocks = None if pattern.blocks is None else by_unit(pattern.blocks, batch, heads).contiguous()
    slashes = None if pattern.slashes is None else by_unit(membership(pattern.slashes, tokens), batch, heads).contiguous()
    covered = _covered(pattern, slashes, blocks, units, rows, tokens, queries.device)
    counts, order = covered.sum(2, dtype=torch.int32), covered.to(torch.uint8).argsort(dim=2, descending=True, stable=True).to(torch.int32)
    columns = pattern.columns is not None or pattern.sinks > 0
    unused = torch.zeros(1, dtype=torch.int64, device=queries.device)  # pointers that the kernel never reads still need a tensor
    flags, listed, listed_counts = unused.bool(), unused, unused.int()
    if columns:
        flags = (torch.arange(tokens, device=queries.device) < pattern.sinks).expand(units, tokens)
        if pattern.columns is not None:
            flags = flags | by_unit(membership(pattern.columns, tokens), batch, heads)
        flags = flags.contiguous()
        listed = flags.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        ends = (tokens - rows + _ROWS * torch.arange(1, tiles + 1, device=queries.device)).clamp_(max=tokens)
        listed_counts = pad(flags.cumsum(1), (1, 0))[:, ends].to(torch.int32)
    sizes = (heads, heads // kv_heads, rows, tokens, dim, value_dim, scaling, min(pattern.window, tokens), max(0, rows - pattern.dense_rows),
             pattern.block, listed.shape[-1], covered.shape[2], *((1, 1) if blocks is None else blocks.shape[1:]))
    strides = tuple(stride for tensor in (queries, keys, values) for stride in tensor.stride())
    tables = (order, counts, covered, listed, listed_counts, flags, unused.bool() if slashes is None else slashes,
              unused.bool() if blocks is None else blocks)
    _kernel()[(units, tiles)](queries, keys, values, out, lse, *(table.contiguous() for table in tables), *sizes, *strides, COLUMNS=columns,
                              SLASHES=slashes is not None, BLOCKS=blocks is not None, ROWS=_ROWS, KEYS=_KEYS, DIM=min(64, _power(dim)),
                              VALUES=_power(value_dim))
    return out, lse


def _power(size: int) -> int:
    return max(16, 1 << max(0, size - 1).bit_length())


def _covered(pattern: Pattern, slashes: torch.Tensor | None, blocks: torch.Tensor | None, units: int, rows: int, tokens: int,
             device: torch.device) -> torch.Tensor:
    """Key blocks in which the window, the dense rows, a slash or a square may show a pair to a tile of rows: (units, tiles, key blocks)."""
    row = torch.arange(0, rows, _ROWS, device=device)[:, None]
    row_end = (row + _ROWS).clamp(max=rows)
    key = torch.arange(0, tokens, _KEYS, device=device)
    key_end = (key + _KEYS).clamp(max=tokens)
    nearest, farthest = (row + tokens - rows - key_end + 1).clamp_min(0), row_end - 1 + tokens - rows - key  # distances in the block
    causal = farthest >= 0
    covered = (causal & ((nearest < pattern.window) | (row_end > rows - pattern.dense_rows)))[None].expand(units, -1, -1)
    if slashes is not None:
        summed = pad(slashes.cumsum(1), (1, 0))
        covered = covered | (causal & (summed[:, (farthest + 1).clamp_min(0)] > summed[:, nearest]))
    if blocks is not None:
        area = pad(blocks.cumsum(1).cumsum(2), (1, 0, 1, 0))
        top, bottom = row // pattern.block, (row_end - 1) // pattern.block + 1
        left, right = (key // pattern.block)[None], ((key_end - 1) // pattern.block + 1)[None]
        inside = area[:, bottom, right] - area[:, top, right] - area[:, bottom, left] + area[:, top, left]
        covered = covered | (causal & (inside > 0))
    return covered.contiguous()


def programs() -> Iterator[Program]:
    """The kernel with typical signatures, for the compile check."""
    for dtype, columns, slashes, blocks in (("fp32", True, True, True), ("bf16", True, False, False), ("fp16", False, False, True)):
        tensors = dict.fromkeys(("queries", "keys", "values", "out"), f"*{dtype}")
        tables = {"lse": "*fp32", "order": "*i32", "counts": "*i32", "covered": "*i1", "column_list": "*i64", "column_counts": "*i32",
                  "column_flags": "*i1", "slash_flags": "*i1", "blocks": "*i1", "scaling": "fp32"}
        yield Program(_kernel(), tensors | tables, {"COLUMNS": columns, "SLASHES": slashes, "BLOCKS": blocks, "ROWS": _ROWS, "KEYS": _KEYS,
                                                    "DIM": 64, "VALUES": 64})
