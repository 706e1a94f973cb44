"""Causal attention over a given sparse set of keys, with the log-sum-exp of every row so that results can be merged.

The torch version gathers what each block of rows sees and skips the rest; the Triton version walks over the key blocks that hold a visible pair.
The Triton version is checked in the Triton interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from nbkit.kernels import _sparse_triton
from nbkit.kernels._registry import Example, Op, one_device, register, require, shape_of
from nbkit.kernels._sparse_paths import Pattern, attend


def sparse_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, *, window: int = 1, sinks: int = 0,
                     dense_rows: int = 0, columns: torch.Tensor | None = None, slashes: torch.Tensor | None = None,
                     blocks: torch.Tensor | None = None, block: int = 64, backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every query row over the keys that a pattern lets it see, and the log-sum-exp of its visible logits.

    Query row i stands at key index p = tokens - rows + i. It sees key j <= p when p - j < window, or j < sinks, or j is in its head's
    columns, or p - j is in its head's slashes, or blocks[h, i // block, j // block], or i >= rows - dense_rows. A key that several of
    these name counts once. A row always sees itself, so no row is empty. NaN or infinity in a key or value that a row does not
    see never reaches that row; in a value that it sees, the element of its output is not finite.

    The torch version is differentiable in queries, keys and values (then it masks blocks of the full score matrix, at dense cost).

    Parameters
    ----------
    queries: (batch, heads, rows, head_dim), rotated; head h reads key head h // (heads / kv_heads). rows <= tokens.
    keys: (batch, kv_heads, tokens, head_dim), rotated; dtype of queries.
    values: (batch, kv_heads, tokens, value_dim); dtype of queries.
    scaling: factor of the dot products, 1/sqrt(head_dim) in most models.
    window: number of latest keys that every row sees, itself included; at least 1.
    sinks: number of first keys that every row sees.
    dense_rows: number of last rows that see every key up to themselves.
    columns: (batch or 1, heads or kv_heads or 1, m) int64 key indices, in any order, duplicates allowed; -1 = unused slot.
    slashes: (batch or 1, heads or 1, s) int64 distances p - j; -1 = unused slot.
    blocks: (batch or 1, heads or 1, ceil(rows / block), ceil(tokens / block)) bool.
    block: side of the squares of `blocks`.

    Returns
    -------
    out: (batch, heads, rows, value_dim), dtype of queries.
    lse: (batch, heads, rows) float32 (float64 for float64 input).

    Raises
    ------
    InputError: shapes, dtypes, devices, counts or (on the CPU) indices do not fit.
    BackendError: a forced backend cannot run.

    Source: A-shape and vertical-slash patterns, arXiv 2407.02490 (MInference); log-sum-exp merging, arXiv 2205.14135 (FlashAttention).

    >>> ones = torch.ones(1, 1, 4, 2)
    >>> values = torch.tensor([[[[1.0], [2.0], [4.0], [8.0]]]])
    >>> out, lse = sparse_attention(ones, ones, values, 1.0, window=1, columns=torch.tensor([[[0]]]))
    >>> out.flatten().tolist(), lse.exp().flatten().div(math.e**2).round().tolist()  # a row sees column 0 and itself
    ([1.0, 1.5, 2.5, 4.5], [1.0, 2.0, 2.0, 2.0])
    """
    require(queries.is_floating_point() and queries.dim() == 4, "queries", got=shape_of(queries), allowed="floating (batch, heads, rows, head_dim)")
    batch, heads, rows, dim = queries.shape
    dtype = str(queries.dtype).removeprefix("torch.")
    require(keys.dtype == queries.dtype and keys.dim() == 4 and (keys.shape[0], keys.shape[3]) == (batch, dim), "keys", got=shape_of(keys),
            allowed=f"({batch}, kv_heads, tokens, {dim}) {dtype}, to fit queries {tuple(queries.shape)}")
    kv_heads, tokens = keys.shape[1:3]
    require(values.dtype == queries.dtype and values.dim() == 4 and values.shape[:3] == keys.shape[:3], "values", got=shape_of(values),
            allowed=f"({batch}, {kv_heads}, {tokens}, value_dim) {dtype}, to fit keys {tuple(keys.shape)}")
    require(kv_heads > 0 and heads % kv_heads == 0, "heads", got=heads, allowed=f"a multiple of kv_heads = {kv_heads}")
    require(rows <= tokens, "rows of queries", got=rows, allowed=f"at most tokens = {tokens}", hint="queries are the last rows of the sequence")
    require(math.isfinite(scaling), "scaling", got=scaling, allowed="a finite number")
    for name, number, least in (("window", window, 1), ("sinks", sinks, 0), ("dense_rows", dense_rows, 0), ("block", block, 1)):
        require(isinstance(number, int) and not isinstance(number, bool) and number >= least, name, got=number, allowed=f"an integer >= {least}")
    if columns is not None:
        _fits("columns", columns, torch.int64, (batch, heads), (1, kv_heads, heads), 3)
        _in_range("columns", columns, tokens)
    if slashes is not None:
        _fits("slashes", slashes, torch.int64, (batch, heads), (1, heads), 3)
        _in_range("slashes", slashes, tokens)
    if blocks is not None:
        _fits("blocks", blocks, torch.bool, (batch, heads), (1, heads), 4)
        sides = (-(-rows // block), -(-tokens // block))
        require(tuple(blocks.shape[2:]) == sides, "blocks", got=shape_of(blocks), allowed=f"(..., {sides[0]}, {sides[1]}) for block {block}")
    one_device([tensor for tensor in (queries, keys, values, columns, slashes, blocks) if tensor is not None], "sparse_attention")
    return OP.run(backend, queries, keys, values, float(scaling), window, sinks, dense_rows, columns, slashes, blocks, block)


def _fits(what: str, tensor: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, int], head_counts: tuple[int, ...], axes: int) -> None:
    allowed = " or ".join(str(count) for count in sorted(set(head_counts)))
    fits = tensor.dtype == dtype and tensor.dim() == axes and tensor.shape[0] in (1, sizes[0]) and tensor.shape[1] in head_counts
    require(fits, what, got=shape_of(tensor), allowed=f"{str(dtype).removeprefix('torch.')} with {axes} axes, batch 1 or {sizes[0]}, heads {allowed}")


def _in_range(what: str, tensor: torch.Tensor, tokens: int) -> None:
    # On a GPU looking would wait for the device; numbers out of range match no key there.
    if tensor.device.type == "cpu" and tensor.numel():
        low, high = (int(bound) for bound in tensor.aminmax())
        require(low >= -1 and high < tokens, what, got=f"values {low} to {high}", allowed=f"-1 (unused) to tokens - 1 = {tokens - 1}")


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reference(queries, keys, values, scaling, window, sinks, dense_rows, columns, slashes, blocks, block) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    out = torch.zeros(batch, heads, rows, values.shape[3], dtype=torch.float64, device=keys.device)
    lse = torch.zeros(batch, heads, rows, dtype=torch.float64, device=keys.device)

    def of(tensor, b, h):
        return tensor[min(b, tensor.shape[0] - 1), h * tensor.shape[1] // heads]
    for b in range(batch):
        for h in range(heads):
            named = set(of(columns, b, h).tolist()) if columns is not None else set()
            apart = set(of(slashes, b, h).tolist()) if slashes is not None else set()
            square = of(blocks, b, h).tolist() if blocks is not None else None
            for i in range(rows):
                p = tokens - rows + i
                seen = [j for j in range(p + 1) if p - j < window or j < sinks or j in named or p - j in apart or i >= rows - dense_rows
                        or (square is not None and square[i // block][j // block])]
                logits = (keys[b, h * kv_heads // heads, seen].double() @ queries[b, h, i].double()) * scaling
                lse[b, h, i] = logits.logsumexp(0)
                out[b, h, i] = (logits - lse[b, h, i]).exp() @ values[b, h * kv_heads // heads, seen].double()
    return out.to(queries.dtype), lse.to(_result_dtype(queries.dtype))


def _torch(queries, keys, values, scaling, window, sinks, dense_rows, columns, slashes, blocks, block) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(queries, keys, values, scaling, Pattern(window, sinks, dense_rows, columns, slashes, blocks, block))


def _triton(queries, keys, values, scaling, window, sinks, dense_rows, columns, slashes, blocks, block) -> tuple[torch.Tensor, torch.Tensor]:
    return _sparse_triton.attend(queries, keys, values, scaling, Pattern(window, sinks, dense_rows, columns, slashes, blocks, block))


def plain(queries, keys, values, scaling, window=1, sinks=0, dense_rows=0, columns=None, slashes=None, blocks=None,
          block=64) -> tuple[torch.Tensor, torch.Tensor]:
    """The shortest torch expression of the same attention, with the full mask: the yardstick of the contract suite."""
    batch, heads, rows, _ = queries.shape
    group, tokens = heads // keys.shape[1], keys.shape[2]
    key = torch.arange(tokens, device=keys.device)
    at = torch.arange(tokens - rows, tokens, device=keys.device)[:, None]
    sees = ((at - key < window) | (key < sinks) | (at >= tokens - dense_rows)).expand(batch, heads, rows, tokens)
    if columns is not None:
        sees = sees | (columns[..., None] == key).any(2).repeat_interleave(heads // columns.shape[1], 1)[:, :, None]
    if slashes is not None:
        sees = sees | (slashes[..., None, None] == at - key).any(2)
    if blocks is not None:
        sees = sees | blocks.repeat_interleave(block, 2)[:, :, :rows].repeat_interleave(block, 3)[..., :tokens]
    sees = sees & (key <= at)
    logits = (queries @ keys.repeat_interleave(group, 1).transpose(-1, -2) * scaling).masked_fill(~sees, -math.inf)
    unseen = ~sees.any(2).unflatten(1, (-1, group)).any(2) if heads and rows else sees.new_ones(batch, keys.shape[1], tokens)
    return logits.softmax(-1) @ values.masked_fill(unseen[..., None], 0.0).repeat_interleave(group, 1), logits.logsumexp(-1)


def _plain_reordered(queries, keys, values, scaling, **pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain expression with the head dimension summed backwards, after scaling."""
    return plain(queries.flip(-1) * scaling, keys.flip(-1), values, 1.0, **pattern)


def examples(generator: torch.Generator) -> Iterator[Example]:
    """Inputs of the contract suite: every kind of pattern alone and together, odd sizes, grouped heads, duplicates, empty axes, half precision."""
    def example(name, batch, kv_heads, group, rows, tokens, dim, value_dim=None, dtype=torch.float32, spread=1.0, columns=None, slashes=None,
                squares=None, per="heads", **options):
        heads = kv_heads * group

        def normal(*shape):
            return (torch.randn(*shape, generator=generator) * spread).to(dtype)

        def indices(count):
            size = {"heads": (batch, heads), "kv_heads": (batch, kv_heads), "one": (1, 1)}[per]
            found = torch.randint(0, tokens, (*size, count), generator=generator)
            return found.masked_fill(torch.rand(*size, count, generator=generator) < 0.2, -1)
        args = {"queries": normal(batch, heads, rows, dim), "keys": normal(batch, kv_heads, tokens, dim),
                "values": normal(batch, kv_heads, tokens, value_dim or dim), "scaling": dim**-0.5, **options}
        if columns is not None:
            args["columns"] = indices(columns)
        if slashes is not None:
            args["slashes"] = indices(slashes)
        if squares is not None:
            side = args.setdefault("block", 8)
            shape = (1 if per == "one" else batch, 1 if per == "one" else heads, -(-rows // side), -(-tokens // side))
            args["blocks"] = torch.rand(shape, generator=generator) < squares
        return Example(name, args)

    yield example("itself only", 2, 1, 2, 5, 5, 8)
    yield example("sliding window", 1, 2, 2, 33, 33, 16, window=7)
    yield example("a-shape", 2, 2, 3, 45, 45, 24, window=6, sinks=3)
    yield example("tri-shape", 1, 1, 2, 40, 40, 8, window=5, sinks=2, dense_rows=9)
    yield example("columns by head", 1, 2, 2, 50, 50, 16, window=4, sinks=2, columns=9)
    yield example("columns by key head", 2, 2, 2, 31, 31, 8, window=3, columns=6, per="kv_heads")
    yield example("one set of columns", 2, 2, 1, 31, 31, 8, window=3, columns=40, per="one")
    yield example("slashes", 1, 2, 2, 40, 40, 8, window=2, slashes=5)
    yield example("vertical and slash", 2, 2, 2, 70, 70, 16, window=4, sinks=1, columns=5, slashes=4)
    yield example("blocks", 1, 2, 2, 45, 45, 8, squares=0.3)
    yield example("one set of blocks", 2, 1, 3, 50, 50, 8, window=3, squares=0.4, per="one", block=16)
    yield example("everything", 2, 2, 2, 37, 37, 8, window=3, sinks=2, dense_rows=3, columns=3, slashes=2, squares=0.2)
    yield example("later rows", 1, 2, 2, 13, 60, 16, window=4, sinks=2, columns=5, slashes=3, squares=0.2)
    yield example("one row", 2, 2, 2, 1, 50, 8, window=3, sinks=1, columns=5)
    yield example("dense by window", 1, 1, 2, 30, 30, 8, window=99)
    yield example("dense by rows", 1, 1, 2, 20, 30, 8, dense_rows=99)
    yield example("sinks past the end", 1, 1, 1, 20, 20, 8, sinks=99)
    yield example("several blocks of rows", 1, 1, 2, 300, 333, 8, window=20, sinks=4, columns=12)
    yield example("peaked", 1, 2, 2, 40, 40, 32, spread=6.0, window=4, columns=8)
    unused = example("unused slots only", 1, 2, 1, 20, 20, 8, window=2, columns=4, slashes=3)
    yield Example(unused.name, unused.args | {"columns": unused.args["columns"].fill_(-1), "slashes": unused.args["slashes"].fill_(-1)})
    double = example("duplicates, also in the window and the sinks", 1, 1, 2, 24, 24, 8, window=6, sinks=3, columns=6)
    yield Example(double.name, double.args | {"columns": torch.tensor([[[1, 20, 20, 9, 9, 9], [0, 23, 22, 5, -1, 5]]])})
    hidden = example("NaN and inf in hidden keys and values", 1, 2, 2, 30, 30, 8, window=1, columns=4, per="kv_heads")
    hidden.args["queries"] = hidden.args["queries"][:, :, -7:]
    hidden.args["columns"] = torch.tensor([[[3, 8, 8, -1], [2, 4, 6, 8]]])
    hidden.args["keys"][:, :, 10:20], hidden.args["values"][:, :, 11:21] = math.nan, math.inf
    yield hidden
    yield example("wide head, other value size", 1, 2, 2, 20, 20, 130, 70, window=4, columns=4)
    yield example("float16", 1, 2, 2, 45, 45, 24, dtype=torch.float16, window=5, sinks=2, columns=6)
    yield example("bfloat16", 1, 2, 2, 45, 45, 24, dtype=torch.bfloat16, window=5, sinks=2, columns=6, slashes=3)
    yield example("float64", 1, 2, 2, 45, 45, 24, dtype=torch.float64, window=5, sinks=2, columns=6, squares=0.1)
    yield example("no rows", 2, 2, 2, 0, 9, 8, window=3)
    yield example("no tokens", 2, 2, 2, 0, 0, 8, window=3)
    yield example("no batch", 0, 2, 2, 5, 9, 8, window=3)
    yield example("one of each", 1, 1, 1, 1, 1, 1)


OP = register(Op(
    name="sparse_attention", summary="causal attention over the keys that a sparse pattern names", call=sparse_attention,
    versions={"reference": _reference, "torch": _torch, "triton": _triton}, examples=examples, exact=False, plain=(plain, _plain_reordered),
    gradients=("queries", "keys", "values"), triton_programs=_sparse_triton.programs,
    triton_dtypes=(torch.float32, torch.float16, torch.bfloat16), interpreter_dtypes=(torch.float32, torch.float16),
    batch_axes=dict.fromkeys(("queries", "keys", "values", "columns", "slashes", "blocks"), 0),
    head_axes=dict.fromkeys(("queries", "keys", "values", "columns", "slashes", "blocks"), 1),
))
