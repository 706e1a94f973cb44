"""Row gather: compact a cache to the positions that survive.

The Triton version is checked in the Triton interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from nbkit.kernels._registry import Example, Op, Program, one_device, register, require, shape_of

triton = tl = None  # bound by _triton_kernel on the first Triton call: importing this file must not import Triton

Rows = torch.Tensor | tuple[torch.Tensor, ...]


def gather_rows(x: Rows, index: torch.Tensor, *, backend: str | None = None, validate: bool = True) -> Rows:
    """Copy rows `index` of every head to a new contiguous tensor: out[b, h, i] = x[b, h, index[b, h, i]].

    Parameters
    ----------
    x: (batch, heads, tokens, dim) of any dtype and strides, or a tuple of such tensors (keys, values) whose dims may differ; a tuple
        shares the index work.
    index: (batch, heads, kept) int64 in 0..tokens-1; sorted indices read memory in order, any order is right.
    validate: also check the range of the indices; on a GPU this waits for the device.

    Returns
    -------
    (batch, heads, kept, dim) contiguous, dtype of x; a tuple for a tuple.

    Raises
    ------
    InputError: shapes, dtypes or devices do not fit; with validate: an index out of range.
    BackendError: a forced backend cannot run.

    >>> x = torch.arange(8.0).view(1, 1, 4, 2)
    >>> gather_rows(x, torch.tensor([[[0, 3]]])).tolist()
    [[[[0.0, 1.0], [6.0, 7.0]]]]
    """
    many = x if isinstance(x, tuple) else (x,)
    require(len(many) > 0, "x", got="()", allowed="a tensor or a non-empty tuple of tensors")
    for part in many:
        require(part.dim() == 4 and part.shape[:3] == many[0].shape[:3], "x", got=shape_of(part),
                allowed="(batch, heads, tokens, dim), all but dim the same for every tensor")
    batch, heads, tokens, _ = many[0].shape
    require(index.dtype == torch.int64 and index.dim() == 3 and tuple(index.shape[:2]) == (batch, heads), "index", got=shape_of(index),
            allowed=f"({batch}, {heads}, kept) int64", hint="one row of indices for each head, .expand(batch, heads, kept) to share one")
    one_device([*many, index], "gather_rows")
    if validate and index.numel():
        low, high = (int(value) for value in torch.aminmax(index))
        require(low >= 0 and high < tokens, "index", got=f"{low}..{high}", allowed=f"0..{tokens - 1}" if tokens else "none, x has no tokens")
    out = OP.run(backend, many, index)
    return out if isinstance(x, tuple) else out[0]


def _reference(many: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch, heads, kept = index.shape
    out = tuple(part.new_zeros(batch, heads, kept, part.shape[3]) for part in many)
    for b in range(batch):
        for h in range(heads):
            for i, position in enumerate(index[b, h].tolist()):
                for part, copy in zip(many, out, strict=True):
                    copy[b, h, i] = part[b, h, position]
    return out


def _torch(many: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch, heads, kept = index.shape
    tokens = many[0].shape[2]
    head = torch.arange(batch * heads, device=index.device).view(batch, heads, 1)
    flat = (head * tokens + index).flatten()
    out = []
    for part in many:
        # Copying whole rows of a flat view is several times faster on a CPU than torch.gather, which moves single numbers.
        if part.is_contiguous():
            out.append(part.view(-1, part.shape[3]).index_select(0, flat).view(batch, heads, kept, part.shape[3]) if part.numel()
                       else part.new_zeros(batch, heads, kept, part.shape[3]))
        else:
            out.append(part[head.div(max(heads, 1), rounding_mode="floor"), head % max(heads, 1), index].contiguous())
    return tuple(out)


@cache
def _triton_kernel():
    global triton, tl
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, index, out, heads, kept, dim, x_batch, x_head, x_token, x_dim, index_batch, index_head, index_step,
               ROWS: tl.constexpr, DIM: tl.constexpr):
        pair = tl.program_id(0)
        batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(2) * DIM + tl.arange(0, DIM)
        source = tl.load(index + batch * index_batch + head * index_head + row * index_step, mask=row < kept, other=0)
        inside = (row < kept)[:, None] & (column < dim)[None, :]
        values = tl.load(x + batch * x_batch + head * x_head + source[:, None] * x_token + column[None, :] * x_dim, mask=inside)
        target = (pair.to(tl.int64) * kept + row)[:, None] * dim + column[None, :]
        tl.store(out + target, values, mask=inside)

    return kernel


def _triton(many: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch, heads, kept = index.shape
    out = []
    for part in many:
        dim = part.shape[3]
        copy = torch.empty(batch, heads, kept, dim, dtype=part.dtype, device=part.device)
        out.append(copy)
        if copy.numel():
            width = min(_power_of_two(dim), 256)
            rows = max(1, min(_power_of_two(kept), 4096 // width))
            grid = (batch * heads, -(-kept // rows), -(-dim // width))
            _triton_kernel()[grid](part, index, copy, heads, kept, dim, *part.stride(), *index.stride(), ROWS=rows, DIM=width)
    return tuple(out)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def triton_programs() -> Iterator[Program]:
    """The kernels with one typical signature each, for the compile check."""
    for dtype in ("fp32", "bf16", "i8"):
        yield Program(_triton_kernel(), {"x": f"*{dtype}", "index": "*i64", "out": f"*{dtype}"}, {"ROWS": 64, "DIM": 64})


def examples(generator: torch.Generator) -> Iterator[Example]:
    """Inputs of the contract suite: odd sizes, pairs of different width, repeated rows, nothing kept, every kind of dtype."""
    def example(name, batch, heads, tokens, kept, dims, dtype=torch.float32, ordered=True):
        many = tuple(torch.randn(batch, heads, tokens, dim, generator=generator).mul(50).to(dtype) for dim in dims)
        index = torch.randint(max(tokens, 1), (batch, heads, kept), generator=generator)
        return Example(name, {"x": many if len(many) > 1 else many[0], "index": index.sort(-1).values if ordered else index})

    yield example("odd sizes", 2, 3, 37, 21, (19,))
    yield example("keys and values", 2, 2, 33, 17, (8, 5))
    yield example("more rows than a block", 1, 2, 150, 140, (65,))
    yield example("wide rows", 1, 1, 9, 5, (300,))
    yield example("any order, repeated", 2, 2, 7, 15, (4,), ordered=False)
    yield example("float64", 1, 2, 9, 4, (6,), dtype=torch.float64)
    yield example("float16", 1, 2, 9, 4, (6,), dtype=torch.float16)
    yield example("bfloat16", 1, 2, 9, 4, (6,), dtype=torch.bfloat16)
    yield example("int64", 1, 2, 9, 4, (6,), dtype=torch.int64)
    yield example("int8", 1, 2, 9, 4, (6,), dtype=torch.int8)
    yield example("nothing kept", 2, 2, 9, 0, (6,))
    yield example("no tokens", 2, 2, 0, 0, (6,))
    yield example("no batch", 0, 2, 5, 3, (6,))
    yield example("dim 0", 2, 1, 5, 3, (0,))


OP = register(Op(
    name="gather_rows", summary="contiguous copy of the kept rows of every head", call=gather_rows,
    versions={"reference": _reference, "torch": _torch, "triton": _triton}, examples=examples, exact=True,
    gradients=("x",), triton_programs=triton_programs,
    batch_axes={"x": 0, "index": 0}, head_axes={"x": 1, "index": 1},
))
