"""The contract of every kernel, without pytest: run by test_kernels.py, by its interpreter subprocess and by gpu_contract.py.

Error rule for inexact operations: at most twice the error of plain torch at the same precision (float32 for half-precision input), both against
the float64 reference. Plain torch is written twice, in different orders of summation, because one order can be right by luck; one unit in the last
place of the largest value is added.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from nbkit import kernels
from nbkit.kernels import Example, Op

SEED = 20260704


def examples_of(op: Op) -> list[Example]:
    """The registered examples; the same ones in every process."""
    return list(op.examples(torch.Generator().manual_seed(SEED)))


def mapped(args: dict, fn: Callable[[str, torch.Tensor], torch.Tensor]) -> dict:
    """Arguments with fn(name, tensor) in place of every tensor."""
    def one(name, value):
        if isinstance(value, tuple):
            return tuple(one(name, part) for part in value)
        return fn(name, value) if isinstance(value, torch.Tensor) else value
    return {name: one(name, value) for name, value in args.items()}


def outputs(op: Op, args: dict, backend: str) -> list[torch.Tensor]:
    """All result tensors of one call."""
    out = op.call(**args, backend=backend)
    return list(out) if isinstance(out, tuple) else [out]


def widened(args: dict, dtype: torch.dtype) -> dict:
    """Arguments with every floating tensor in a wider dtype."""
    return mapped(args, lambda _, t: t.to(torch.promote_types(t.dtype, dtype)) if t.is_floating_point() else t)


def truth_and_bound(op: Op, args: dict) -> tuple[list[torch.Tensor], list[float]]:
    """The reference results, and how far those of another version may be from them."""
    args = mapped(args, lambda _, t: t.cpu())
    if op.exact:
        exact = outputs(op, args, "reference")
        return exact, [0.0] * len(exact)
    truths = outputs(op, widened(args, torch.float64), "reference")
    plain = [expression(**widened(args, torch.float32)) for expression in op.plain]
    plain = [list(out) if isinstance(out, tuple) else [out] for out in plain]
    bounds = []
    for place, (truth, out) in enumerate(zip(truths, outputs(op, args, "torch"), strict=True)):
        error = max(float((one[place].double() - truth).abs().max()) for one in plain) if truth.numel() else 0.0
        # A result in half precision is rounded once more than the plain expression in float32.
        last_place = max(torch.finfo(kind).eps for kind in (out.dtype, plain[0][place].dtype))
        if out.dtype == torch.float64:
            last_place *= 8  # the reference has no more digits than the result, so its own rounding counts
        bounds.append(2 * error + last_place * float(truth.abs().max()) if truth.numel() else 0.0)
    return truths, bounds


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], bounds: list[float], what: str, slack: float = 1.0) -> None:
    """Same shapes, and no value further apart than slack * its bound; NaN is never near anything."""
    assert len(got) == len(want) == len(bounds), f"{what}: {len(got)} results instead of {len(want)}"
    for one, other, bound in zip(got, want, (slack * bound for bound in bounds), strict=True):
        assert one.shape == other.shape, f"{what}: shape {tuple(one.shape)} instead of {tuple(other.shape)}"
        one, other = one.cpu(), other.cpu()
        apart = one != other if bound == 0.0 else ~((one.double() - other.double()).abs() <= bound)
        if bool(apart.any()):
            where = apart.nonzero()[:4].tolist()
            values = [(one[tuple(index)].item(), other[tuple(index)].item()) for index in where]
            raise AssertionError(f"{what}: {int(apart.sum())} of {one.numel()} values off by more than {bound:.3g}, at {where}: (got, want) {values}")


def check_agreement(op: Op, args: dict, backend: str) -> None:
    """Equals the reference (2x rule), with its dtype, contiguous, on the device of the input."""
    got, (want, bounds) = outputs(op, args, backend), truth_and_bound(op, args)
    assert_near(got, want, bounds, "against the reference")
    dtypes = [out.dtype for out in outputs(op, mapped(args, lambda _, t: t.cpu()), "reference")]
    device = kernels._registry.tensors_in(args.values())[0].device
    for out, dtype in zip(got, dtypes, strict=True):
        assert out.dtype == dtype and out.is_contiguous() and out.device == device, f"{out.dtype}, strides {out.stride()}, {out.device}"


def check_strides(op: Op, args: dict, backend: str) -> None:
    """Transposed, padded and offset inputs give the same values."""
    def strided(_, tensor):
        if tensor.dim() < 2:
            wide = tensor.new_zeros(*tensor.shape, 3)
            wide[..., 1] = tensor
            return wide[..., 1]
        wide = tensor.new_zeros(*(size + 2 for size in reversed(tensor.shape)))
        view = wide[tuple(slice(1, 1 + size) for size in reversed(tensor.shape))].permute(*reversed(range(tensor.dim())))
        return view.copy_(tensor)
    want, bounds = truth_and_bound(op, args)
    assert_near(outputs(op, mapped(args, strided), backend), want, bounds, "non-contiguous input")


def check_untouched(op: Op, args: dict, backend: str) -> None:
    """Inputs are not written to."""
    before = mapped(args, lambda _, t: t.clone())
    outputs(op, args, backend)
    for kept, now in zip(kernels._registry.tensors_in(before.values()), kernels._registry.tensors_in(args.values()), strict=True):
        assert torch.equal(kept.nan_to_num(nan=12345.0), now.nan_to_num(nan=12345.0)), "an input was changed"


def check_poison(op: Op, args: dict, backend: str) -> None:
    """Fresh memory full of NaN (or the largest integer) does not reach the result: every element is written."""
    with poisoned():
        got = outputs(op, args, backend)
    want, bounds = truth_and_bound(op, args)
    assert_near(got, want, bounds, "poisoned buffers")


def check_determinism(op: Op, args: dict, backend: str) -> None:
    """Two runs agree bit for bit."""
    first = outputs(op, args, backend)
    assert_near(first, outputs(op, args, backend), [0.0] * len(first), "second run")


def check_batch(op: Op, args: dict, backend: str) -> None:
    """A batch gives what its members give alone."""
    together = outputs(op, args, backend)
    size = together[0].shape[0]
    singles = [outputs(op, mapped(args, lambda name, t, i=i: _take(op.batch_axes, name, t, [i])), backend) for i in range(size)]
    if singles:
        _, bounds = truth_and_bound(op, args)
        assert_near(together, [torch.cat(parts) for parts in zip(*singles, strict=True)], bounds, "batch against singles", slack=2.0)


def check_heads(op: Op, args: dict, backend: str) -> None:
    """Permuted heads give permuted results; query heads move in the groups that share a key head."""
    straight = outputs(op, args, backend)
    many = [straight[0].shape[1], *(args[name].shape[axis] for name, axis in op.head_axes.items()
                                    if isinstance(args.get(name), torch.Tensor) and args[name].is_floating_point() and axis == 1)]
    size = min(many)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(SEED))

    def grouped(count):
        group = count // max(size, 1)
        return (order[:, None] * group + torch.arange(group)).flatten()

    def permuted(name, tensor):
        axis = op.head_axes.get(name)
        if axis is None or not -tensor.dim() <= axis < tensor.dim():
            return tensor
        return _take(op.head_axes, name, tensor, grouped(tensor.shape[axis]).tolist())
    _, bounds = truth_and_bound(op, args)
    want = [out[:, grouped(out.shape[1]).to(out.device)] for out in straight]
    assert_near(outputs(op, mapped(args, permuted), backend), want, bounds, "permuted heads", slack=2.0)


def check_gradients(op: Op, args: dict, backend: str) -> None:
    """Where gradients are defined they equal finite differences in float64 (small, finite examples on the torch version)."""
    if backend != "torch" or not op.gradients:
        return
    args = widened(args, torch.float64)
    floating = [t for t in kernels._registry.tensors_in(args[name] for name in op.gradients) if t.is_floating_point()]
    if not floating or sum(t.numel() for t in floating) > 2500 or not all(bool(t.isfinite().all()) for t in floating):
        return
    leaves = [t.clone().requires_grad_() for t in floating]

    def call(*values):
        queue = list(values)
        return tuple(outputs(op, mapped(args, lambda name, t: queue.pop(0) if name in op.gradients and t.is_floating_point() else t), backend))
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


CHECKS = {check.__name__.removeprefix("check_"): check for check in (
    check_agreement, check_strides, check_untouched, check_poison, check_determinism, check_batch, check_heads, check_gradients)}


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Make torch.empty and its relatives return memory full of NaN, True or the largest integer."""
    def poison(make):
        def made(*args, **kwargs):
            out = make(*args, **kwargs)
            if out.dtype == torch.bool:
                return out.fill_(True)
            return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)
        return made
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, poison(getattr(owner, name))))
        yield


def _take(axes: dict, name: str, tensor: torch.Tensor, index: list[int]) -> torch.Tensor:
    """Members of an argument along its mapped axis; arguments without that axis, or broadcast along it, are shared."""
    axis = axes.get(name)
    if axis is None or not -tensor.dim() <= axis < tensor.dim() or tensor.shape[axis] == 1:
        return tensor
    return tensor.index_select(axis, torch.tensor(index, dtype=torch.int64, device=tensor.device))


def run(op: Op, backend: str, device: str = "cpu") -> tuple[int, int, list[str]]:
    """All checks on all examples: how many ran, how many examples the backend cannot take, and what failed."""
    ran, left_out, failures = 0, 0, []
    for example in examples_of(op):
        args = mapped(example.args, lambda _, t: t.to(device))
        if op.reasons(backend, kernels._registry.tensors_in(args.values())):
            left_out += 1
            continue
        for name, check in CHECKS.items():
            try:
                check(op, args, backend)
            except Exception as error:
                lines = traceback.format_exception_only(error)
                failures.append(f"{op.name} / {backend} / {example.name} / {name}: {''.join(lines).strip()}")
            ran += 1
    return ran, left_out, failures


def main(argv: list[str] | None = None) -> int:
    """`python kernel_contract.py --backend triton [op ...]`: print the first failures and a count; status 1 when something failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("ops", nargs="*", help="operations; default all")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    bad = 0
    for name in options.ops or kernels.ops():
        ran, left_out, failures = run(kernels.get(name), options.backend, options.device)
        print(*failures[:20], sep="\n", end="\n" if failures else "")
        print(f"{name}: {ran} checks ran on {options.backend}, {left_out} examples left out, {len(failures)} failures")
        bad += len(failures) + (ran == 0)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
