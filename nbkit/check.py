"""Checks for the exercises: they compare an answer with the right one and say what a wrong one looks like.

A check never raises for a wrong answer: the notebook with unanswered exercises must run to its end.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nbkit.errors import InputError

__all__ = ["Card", "close", "expect"]

_STATES = {"right": ("✓", "#009E73"), "wrong": ("✗", "#C43E00"), "open": ("…", "#5A5A5A")}


@dataclass(frozen=True)
class Card:
    """The result of one check: state is "right", "wrong" or "open" (no answer yet); true when right."""

    name: str
    state: str
    message: str

    def __bool__(self) -> bool:
        return self.state == "right"

    def __str__(self) -> str:
        return f"{_STATES[self.state][0]} {self.name}: {self.message}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        mark, colour = _STATES[self.state]
        return (
            f'<div class="nbkit-check" role="status" style="border-left:4px solid {colour};padding:4px 10px">'
            f'<strong style="color:{colour}">{mark} {html.escape(self.name)}</strong><br>{html.escape(self.message)}</div>'
        )


def expect(name: str, got: Any, want: Any, *, atol: float = 1e-6, why: Mapping[Callable[[Any], bool], str] | None = None) -> Card:
    """Compare ``got`` with ``want`` (numbers, arrays, or anything with ``==``) within ``atol``; ``why`` explains typical mistakes.

    ``why`` maps a predicate of the answer to the sentence shown when it holds; the first one that holds is used.
    ``got=None`` or ``...`` counts as not answered yet.

    >>> expect("entropy of a fair coin in nats", 1.0, 0.6931472, why={lambda x: abs(x - 1) < 1e-6: "that is bits: use the natural logarithm"})
    ✗ entropy of a fair coin in nats: that is bits: use the natural logarithm
    >>> expect("quotas", [3, 2], [3, 2])
    ✓ quotas: right
    >>> expect("quotas", ..., [3, 2])
    … quotas: not answered yet: replace the dots and run the cell again
    """
    if atol < 0:
        raise InputError("atol", got=atol, allowed=">= 0")
    if got is None or got is ...:
        return Card(name, "open", "not answered yet: replace the dots and run the cell again")
    difference = _difference(got, want, atol)
    if difference is None:
        return Card(name, "right", "right")
    for holds, explanation in (why or {}).items():
        if _safely(holds, got):
            return Card(name, "wrong", explanation)
    return Card(name, "wrong", difference)


def close(got: Any, want: Any, *, name: str = "answer", atol: float = 1e-6, hints: Iterable[tuple[Any, str]] = ()) -> Card:
    """Like :func:`expect`, with known wrong answers: ``hints`` pairs a wrong value with what leads to it.

    >>> close(0.5, 0.25, hints=[(0.5, "the square is missing")])
    ✗ answer: the square is missing
    """
    why = {_Equals(wrong, atol): explanation for wrong, explanation in hints}
    return expect(name, got, want, atol=atol, why=why)


@dataclass(frozen=True, eq=False)
class _Equals:
    """A predicate that holds for one wrong value (hashed by identity, since the value may be an array)."""

    wrong: Any
    atol: float

    def __call__(self, got: Any) -> bool:
        return _difference(got, self.wrong, self.atol) is None


def _safely(holds: Callable[[Any], bool], got: Any) -> bool:
    """A predicate written for arrays must not hide the answer's real problem by raising on a list."""
    try:
        return bool(holds(got))
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, ZeroDivisionError, RuntimeError):
        return False


def _difference(got: Any, want: Any, atol: float) -> str | None:
    """None when equal within ``atol``, else one sentence on how they differ."""
    import numpy as np

    def numeric(value: Any) -> Any:
        if hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        try:
            array = np.asarray(value)
        except ValueError:
            return None
        return array if array.dtype.kind in "biufc" else None

    a, b = numeric(got), numeric(want)
    if b is None:
        try:
            same = bool(got == want)
        except (TypeError, ValueError):
            same = False
        return None if same else f"got {_short(got)}, which is not the expected {type(want).__name__}"
    if a is None:
        return f"got {type(got).__name__} {_short(got)}, expected numbers"
    if a.shape != b.shape:
        return f"the shape is {a.shape}, expected {b.shape}"
    if a.size == 0:
        return None
    nan = np.isnan(a) & ~np.isnan(b) if a.dtype.kind in "fc" else np.zeros(a.shape, bool)
    if nan.any():
        return f"{int(nan.sum())} of {a.size} values are NaN: 0/0 or infinity minus infinity somewhere, often a row in which everything is masked"
    if np.allclose(a, b, rtol=0, atol=atol, equal_nan=True):
        return None
    off = np.abs(a.astype(complex) - b.astype(complex))
    worst = np.unravel_index(int(np.nanargmax(off)), a.shape)
    where = f" at index {tuple(int(i) for i in worst)}" if a.ndim else ""
    wrong = int((off > atol).sum())
    return f"{wrong} of {a.size} values differ; the largest difference is {off[worst]:.3g}{where} (allowed {atol:g})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
