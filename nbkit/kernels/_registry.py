"""Which version of an operation runs: registry, choice and explanation."""

from __future__ import annotations

import html
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nbkit.errors import BackendError, InputError

BACKENDS = ("reference", "torch", "triton")
ENVIRONMENT = "NBKIT_KERNELS"

_OPS: dict[str, Op] = {}
_RAN: dict[str, Counter] = {}


@dataclass(frozen=True)
class Example:
    """One input of the contract suite: `args` in call order, by name, and the options of the call."""

    name: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """One Triton kernel with the types of its pointers and floats (other arguments are i32) and its constants: what a compile check needs."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class Op:
    """One array operation and all its versions.

    Parameters
    ----------
    call: the public function (checks its input, then dispatches).
    versions: backend name -> function of the same positional arguments.
    examples: `(generator) -> iterator of Example`, CPU tensors; the contract suite runs every one on every backend.
    exact: True when backends must agree bit for bit (selection, copies); False puts them under the 2x rule against float64.
    plain: for inexact operations: short torch expressions whose float32 error is the yardstick of the 2x rule.
    batch_axes, head_axes: argument name -> axis, for the batch and head-permutation contracts; the result has them at 0 and 1. A negative
        axis is absent from tensors with fewer dimensions.
    gradients: names of the arguments for which the torch version is differentiable.
    triton_programs: the Triton kernels with their signatures, for a compile check without a GPU.
    triton_dtypes: floating dtypes that the Triton version takes; None = every dtype.
    interpreter_dtypes: the same in the Triton interpreter, which lacks bfloat16 arithmetic.
    """

    name: str
    summary: str
    call: Callable
    versions: Mapping[str, Callable]
    examples: Callable[[torch.Generator], Iterator[Example]]
    exact: bool
    plain: tuple[Callable, ...] = ()
    batch_axes: Mapping[str, int] = field(default_factory=dict)
    head_axes: Mapping[str, int] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    triton_programs: Callable[[], Iterator[Program]] | None = None
    triton_dtypes: tuple[torch.dtype, ...] | None = None
    interpreter_dtypes: tuple[torch.dtype, ...] | None = None
    triton_status: str = "checked in the Triton interpreter, not yet run on a GPU"

    def reasons(self, backend: str, tensors: list[torch.Tensor]) -> list[str]:
        """Why `backend` cannot run on these tensors; empty when it can."""
        if backend not in self.versions:
            return [f"{self.name} has no {backend} version"]
        if backend != "triton":
            return []
        found = []
        if importlib.util.find_spec("triton") is None:
            found.append("triton is not installed")
        devices = sorted({tensor.device.type for tensor in tensors})
        if devices and devices != ["cuda"] and not _interpreted():
            found.append(f"tensors are on {', '.join(devices)}, Triton needs cuda (or TRITON_INTERPRET=1, set before the first call)")
        for dtypes, where, applies in ((self.triton_dtypes, "Triton version", True), (self.interpreter_dtypes, "Triton interpreter", _interpreted())):
            odd = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} - set(dtypes or ())
            if dtypes is not None and applies and odd:
                found.append(f"no {', '.join(sorted(map(_dtype_name, odd)))} in the {where}")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            found.append("an input requires gradients, the Triton version has no backward")
        return found

    def choose(self, backend: str | None, tensors: list[torch.Tensor]) -> tuple[str, str]:
        """The backend that runs, and what decided it.

        Raises
        ------
        InputError: unknown backend name.
        BackendError: a forced backend cannot run on these tensors.
        """
        forced, origin = backend, "the argument backend="
        if forced is None:
            forced, origin = os.environ.get(ENVIRONMENT) or None, f"the environment variable {ENVIRONMENT}"
        if forced is not None:
            if forced not in BACKENDS:
                raise InputError(f"kernel backend ({origin})", got=forced, allowed=", ".join(BACKENDS),
                                 hint="leave it unset to let the tensors decide")
            reasons = self.reasons(forced, tensors)
            if reasons:
                raise BackendError(f"{self.name} on the {forced} backend, forced by {origin}, cannot run ({'; '.join(reasons)})",
                                   hint=f"nbkit.kernels.explain({self.name!r}, ...) lists what can")
            return forced, origin
        on_cuda = bool(tensors) and all(tensor.device.type == "cuda" for tensor in tensors)
        if on_cuda and not self.reasons("triton", tensors):
            return "triton", "capability: cuda tensors"
        return "torch", "capability"

    def run(self, backend: str | None, *args: Any) -> Any:
        """Choose, record the choice, and run."""
        tensors = tensors_in(args)
        name, _ = self.choose(backend, tensors)
        device = tensors[0].device.type if tensors else "cpu"
        _RAN.setdefault(self.name, Counter())[f"{name} on {device}"] += 1
        return self.versions[name](*args)


@dataclass(frozen=True)
class Explanation:
    """What would run for one call, and why the other backends would not; prints as a table."""

    op: str
    chosen: str
    rows: tuple[tuple[str, str, str], ...]  # backend, "runs" / "can run" / "cannot run", reason

    def __str__(self) -> str:
        table = [("backend", "state", "why"), *self.rows]
        wide = [max(len(row[column]) for row in table) for column in (0, 1)]
        return "\n".join([f"nbkit.kernels.{self.op}", *(f"  {a:<{wide[0]}}  {b:<{wide[1]}}  {c}".rstrip() for a, b, c in table)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th scope='col'>{title}</th>" for title in ("backend", "state", "why"))
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<table><caption>nbkit.kernels.{html.escape(self.op)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def register(op: Op) -> Op:
    """Add an operation to the registry (and with that to the contract suite)."""
    if op.name in _OPS:
        raise InputError("operation name", got=op.name, allowed="a name not registered yet")
    _OPS[op.name] = op
    return op


def ops() -> tuple[str, ...]:
    """Names of all registered operations, sorted.

    >>> ops()
    ('gather_rows', 'head_profile', 'segment_topk', 'sparse_attention', 'window_evidence')
    """
    return tuple(sorted(_OPS))


def get(op: str) -> Op:
    """The registry entry of one operation.

    Raises
    ------
    InputError: no operation has that name.
    """
    if op not in _OPS:
        raise InputError("operation", got=op, allowed=", ".join(ops()))
    return _OPS[op]


def explain(op: str, *args: Any, backend: str | None = None) -> Explanation:
    """A table of what would run for these arguments and why the other backends would not.

    >>> print(explain("segment_topk", torch.zeros(1, 4), backend="reference"))  # doctest: +ELLIPSIS
    nbkit.kernels.segment_topk
      backend    state       why
      reference  runs        the argument backend=
      torch      can run     vectorised torch, the CPU path
      triton     cannot run  ...tensors are on cpu, Triton needs cuda (or TRITON_INTERPRET=1, set before the first call)
    """
    entry, tensors = get(op), tensors_in(args)
    try:
        chosen, why = entry.choose(backend, tensors)
    except BackendError as error:
        chosen, why = "none", str(error)
    notes = {"reference": "float64 loops, only when forced", "torch": "vectorised torch, the CPU path", "triton": entry.triton_status}
    rows = []
    for name in BACKENDS:
        reasons = entry.reasons(name, tensors)
        if name == chosen:
            rows.append((name, "runs", why))
        else:
            rows.append((name, "cannot run" if reasons else "can run", "; ".join(reasons) or notes[name]))
    if chosen == "none":
        rows.append(("none", "raises", why))
    return Explanation(op=op, chosen=chosen, rows=tuple(rows))


def choices() -> dict[str, dict[str, int]]:
    """What ran in this process so far: operation -> {"backend on device": calls}."""
    return {name: dict(counter) for name, counter in sorted(_RAN.items())}


def tensors_in(args: Any) -> list[torch.Tensor]:
    """All tensors among the arguments, also those inside tuples and lists."""
    found = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(tensors_in(value))
    return found


def require(condition: bool, what: str, **parts: Any) -> None:
    """Raise InputError unless the condition holds."""
    if not condition:
        raise InputError(what, **parts)


def shape_of(tensor: torch.Tensor) -> str:
    """A tensor's shape and dtype for messages, as in '(2, 3) int64'."""
    return f"{tuple(tensor.shape)} {_dtype_name(tensor.dtype)}"


def one_device(tensors: list[torch.Tensor], op: str) -> None:
    """Raise InputError unless all tensors are on one device."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    require(len(devices) <= 1, f"{op} tensors", got=f"devices {', '.join(devices)}", allowed="one device", hint="move them with .to(device)")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
