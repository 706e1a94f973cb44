"""Controls of a panel: what a reader may turn, described by plain data.

A control is a finite, ordered list of values with one of them chosen. Sliders are lists too (a grid between two ends),
which is what lets `Panel.sweep` visit them, `Panel.static` precompute them and the keyboard step through them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbkit.errors import InputError

# A slider with more positions than pixels cannot be set by hand; a larger list is a mistake in `step`.
MAX_POSITIONS = 2000


@dataclass(frozen=True)
class Control:
    """One control: the values it may take, the default, and how it is named on screen. Made by the functions below."""

    kind: str  # "choice", "slider" or "toggle"
    values: tuple[Any, ...]
    value: Any
    texts: tuple[str, ...]
    label: str = ""
    unit: str = ""
    help: str = ""
    whole: bool = False  # a slider over integers

    def check(self, value: Any, name: str = "control") -> Any:
        """Return `value` as the type of this control.

        Raises: InputError when a choice is unknown or a number lies outside the slider.

        >>> integer(0, 10, 4).check(7)
        7
        """
        if self.kind == "toggle":
            if value not in (True, False):
                raise InputError(name, got=value, allowed="True or False")
            return bool(value)
        if self.kind == "choice":
            for known in self.values:
                if type(known) is type(value) and known == value or known is value:
                    return known
            raise InputError(name, got=value, allowed=", ".join(repr(v) for v in self.values))
        low, high = self.values[0], self.values[-1]
        numeric = isinstance(value, (int, float)) or hasattr(value, "__float__")
        if not numeric or isinstance(value, (bool, str)) or not low <= float(value) <= high or (self.whole and float(value) != int(value)):
            kind = "whole numbers" if self.whole else "numbers"
            raise InputError(name, got=value, allowed=f"{kind} from {low:g} to {high:g}")
        return int(value) if self.whole else float(value)

    def index(self, value: Any) -> int:
        """Position of the grid value nearest to `value`."""
        if self.kind == "slider":
            return min(range(len(self.values)), key=lambda i: abs(self.values[i] - value))
        return self.values.index(value)

    def text(self, value: Any) -> str:
        """How `value` reads on screen, without its unit."""
        i = self.index(value)
        return self.texts[i] if self.values[i] == value else f"{value:.6g}"

    def corners(self) -> list[Any]:
        """Values that a sweep must visit: both ends of a slider, every option of a choice.

        >>> integer(1, 9, 4).corners()
        [1, 9]
        """
        return [self.values[0], self.values[-1]] if self.kind == "slider" else list(self.values)

    def sample(self, rng: random.Random) -> Any:
        """One value drawn evenly from the positions. `rng`: anything with a `random()` method."""
        return self.values[int(rng.random() * len(self.values))]

    def steps(self, n: int) -> list[Any]:
        """At most `n` values spread over the control in order, with both ends and the default among them.

        >>> integer(0, 100, 30).steps(5)
        [0, 30, 50, 75, 100]
        """
        if n < 3:
            raise InputError("steps", got=n, allowed=">= 3")
        total = len(self.values)
        if total <= n:
            return list(self.values)
        picked = [round(k * (total - 1) / (n - 1)) for k in range(n)]
        default = self.index(self.value)
        if default not in picked:
            # The nearest inner step gives way to the default, so that the ends stay.
            picked[min(range(1, n - 1), key=lambda k: abs(picked[k] - default))] = default
        return [self.values[i] for i in sorted(picked)]

    def spec(self, name: str) -> dict[str, Any]:
        """JSON description for the front end."""
        return {"name": name, "kind": self.kind, "texts": list(self.texts), "label": self.label or name.replace("_", " "), "unit": self.unit,
                "help": self.help}


def choice(options: Sequence[Any] | Mapping[str, Any], value: Any = None, *, label: str = "", unit: str = "", help: str = "") -> Control:
    """One of several options; a mapping gives the shown text of each. The first is the default.

    Raises: InputError when there is no option, one is repeated, or `value` is not among them.

    >>> choice(["tova", "random"]).value
    'tova'
    """
    if isinstance(options, Mapping):
        texts, values = tuple(str(k) for k in options), tuple(options.values())
    else:
        values = tuple(options)
        texts = tuple(str(v) for v in values)
    if not values or len(set(texts)) != len(texts):
        raise InputError("options", got=list(texts), allowed="one or more different options")
    control = Control("choice", values, values[0], texts, label, unit, help)
    return control if value is None else _with_default(control, value)


def toggle(value: bool = False, *, label: str = "", help: str = "") -> Control:
    """On or off.

    >>> toggle(True).corners()
    [False, True]
    """
    return _with_default(Control("toggle", (False, True), False, ("off", "on"), label, "", help), value)


def integer(lo: int, hi: int, value: int | None = None, step: int = 1, *, label: str = "", unit: str = "", help: str = "") -> Control:
    """A slider over whole numbers lo, lo + step, ..., hi.

    Raises: InputError when the ends are not whole numbers in order, or `value` is outside them.

    >>> integer(0, 10, 4, 4).values
    (0, 4, 8, 10)
    """
    lo, hi, step = (_whole(v, n) for v, n in ((lo, "lo"), (hi, "hi"), (step, "step")))
    _ordered(lo, hi, step)
    _positions((hi - lo) / step)
    return _slider([*range(lo, hi, step), hi], value, whole=True, label=label, unit=unit, help=help)


def log_integer(lo: int, hi: int, value: int | None = None, points: int = 60, *, label: str = "", unit: str = "", help: str = "") -> Control:
    """A slider over whole numbers whose steps grow in proportion (about `points` positions).

    Raises: InputError when lo < 1, the ends are out of order, or `value` is outside them.

    >>> log_integer(1, 1000, 100, points=4).values
    (1, 10, 100, 1000)
    """
    lo, hi = _whole(lo, "lo"), _whole(hi, "hi")
    _ordered(lo, hi, 1, positive=True)
    grid = {round(v) for v in _geometric(lo, hi, points)}
    return _slider(sorted(grid | {lo, hi}), value, whole=True, label=label, unit=unit, help=help)


def number(lo: float, hi: float, value: float | None = None, step: float | None = None, *, label: str = "", unit: str = "",
           help: str = "") -> Control:
    """A slider over real numbers lo, lo + step, ..., hi; without `step`, a hundred steps.

    Raises: InputError when the ends or the step are not finite numbers in order, or `value` is outside them.

    >>> number(0, 1, 0.9, 0.25).values
    (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
    """
    step = (hi - lo) / 100 if step is None else step
    _ordered(lo, hi, step)
    count = (hi - lo) / step
    _positions(count)
    # Rounding keeps 0.1 + 0.2 from showing as 0.30000000000000004.
    grid = {round(lo + k * step, 10) for k in range(int(count + 1e-9) + 1)}
    return _slider(sorted({float(v) for v in grid} | {float(hi)}), value, whole=False, label=label, unit=unit, help=help)


def log_number(lo: float, hi: float, value: float | None = None, points: int = 61, *, label: str = "", unit: str = "", help: str = "") -> Control:
    """A slider over positive numbers whose steps grow in proportion; inner positions have three significant digits.

    Raises: InputError when lo <= 0, the ends are out of order, or `value` is outside them.

    >>> log_number(0.01, 1, 0.1, points=3).values
    (0.01, 0.1, 1.0)
    """
    _ordered(lo, hi, 1, positive=True)
    grid = {float(f"{v:.3g}") for v in _geometric(lo, hi, points)}
    return _slider(sorted({v for v in grid if lo < v < hi} | {float(lo), float(hi)}), value, whole=False, label=label, unit=unit, help=help)


def _slider(grid: list, value: Any, *, whole: bool, label: str, unit: str, help: str) -> Control:
    default = grid[len(grid) // 2] if value is None else value
    probe = Control("slider", tuple(grid), grid[0], (), label, unit, help, whole)
    default = probe.check(default, "value")
    # The default is a position of its own: "reset" and the static figure must be able to show it exactly.
    values = tuple(sorted({*grid, default}))
    return Control("slider", values, default, tuple(f"{v:.6g}" for v in values), label, unit, help, whole)


def _with_default(control: Control, value: Any) -> Control:
    value = control.check(value, "value")
    return Control(control.kind, control.values, value, control.texts, control.label, control.unit, control.help)


def _geometric(lo: float, hi: float, points: int) -> list[float]:
    _positions(points)
    if points < 2:
        raise InputError("points", got=points, allowed=">= 2")
    return [lo * (hi / lo) ** (k / (points - 1)) for k in range(points)]


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(name, got=value, allowed="a whole number")
    return int(value)


def _ordered(lo: float, hi: float, step: float, positive: bool = False) -> None:
    if not all(math.isfinite(v) for v in (lo, hi, step)) or not lo < hi or step <= 0 or (positive and lo <= 0):
        raise InputError("slider", got=f"lo={lo}, hi={hi}, step={step}", allowed=f"{'0 < ' if positive else ''}lo < hi and step > 0, all finite")


def _positions(count: float) -> None:
    if count > MAX_POSITIONS:
        raise InputError("slider positions", got=int(count), allowed=f"<= {MAX_POSITIONS}", hint="use a larger step or a log slider")
