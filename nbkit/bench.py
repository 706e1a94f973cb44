"""Timings that are only printed behind a correctness check: ``python -m nbkit bench``.

A row states what is measured, in which unit, against what. Its check runs first on the same inputs: if that fails, no number is shown
and the run ends red. Rows live in ``nbkit/bench_rows/<name>.py`` as a tuple called ``ROWS``; adding a file adds its rows.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nbkit.errors import InputError, MissingResourceError

__all__ = ["Measured", "Outcome", "Row", "compare", "rows", "run", "seconds", "table"]


@dataclass(frozen=True)
class Measured:
    """A value in the row's unit, the baseline's value in the same unit if there is one, and how many repetitions it comes from."""

    value: float
    baseline: float | None = None
    n: int = 1
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        """Value over baseline; None without one."""
        return None if not self.baseline else self.value / self.baseline


@dataclass(frozen=True)
class Row:
    """One measurement.

    ``check()`` raises AssertionError (or returns False) when the measured code gives wrong answers; ``measure()`` returns a Measured or a plain
    number in ``unit``; either may raise MissingResourceError when this machine cannot run the row. ``goal`` is an upper bound in ``unit``.
    """

    name: str
    unit: str
    baseline: str
    measure: Callable[[], Measured | float]
    check: Callable[[], bool | None]
    goal: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a row: state is "measured", "wrong" (check failed) or "skipped" (cannot run here)."""

    row: Row
    state: str
    measured: Measured | None = None
    reason: str = ""


def seconds(fn: Callable[[], object], *, repeat: int = 7, warmup: int = 2) -> list[float]:
    """Wall time of ``repeat`` calls in seconds, after ``warmup`` calls that do not count; waits for the GPU where there is one.

    >>> len(seconds(lambda: sum(range(10)), repeat=3))
    3
    """
    if repeat < 1 or warmup < 0:
        raise InputError("repeat and warmup", got=(repeat, warmup), allowed="repeat >= 1, warmup >= 0")
    times = []
    for i in range(warmup + repeat):
        start = time.perf_counter()
        fn()
        _wait()
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return times


def compare(fn: Callable[[], object], baseline: Callable[[], object], *, repeat: int = 7, warmup: int = 2, scale: float = 1e3) -> Measured:
    """Median wall times of two functions called in turn, so that a machine that slows down hits both; milliseconds by default.

    >>> compare(lambda: None, lambda: None, repeat=3).n
    3
    """
    for _ in range(warmup):
        fn()
        baseline()
    pairs = [(seconds(fn, repeat=1, warmup=0)[0], seconds(baseline, repeat=1, warmup=0)[0]) for _ in range(repeat)]
    ours = sorted(scale * a for a, _ in pairs)
    return Measured(
        value=statistics.median(ours), baseline=statistics.median(scale * b for _, b in pairs), n=repeat,
        low=ours[repeat // 4], high=ours[-1 - repeat // 4],
    )


def _wait() -> None:
    """Kernels run behind the host's back; a clock stopped before they end shows nothing."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def rows() -> list[Row]:
    """All registered rows, in the order of the files in nbkit/bench_rows.

    >>> any(row.name == "import nbkit" for row in rows())
    True
    """
    package = importlib.import_module("nbkit.bench_rows")
    found: list[Row] = []
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        found.extend(importlib.import_module(f"{package.__name__}.{info.name}").ROWS)
    names = [row.name for row in found]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise InputError("names of bench rows", got=", ".join(double) + " twice", allowed="each name once")
    return found


def run(chosen: Iterable[Row]) -> list[Outcome]:
    """Check, then measure, each row; a wrong row gets no number."""
    outcomes = []
    for row in chosen:
        gc.collect()
        try:
            if row.check() is False:
                outcomes.append(Outcome(row, "wrong", reason="the check returned False"))
                continue
            measured = row.measure()
        except AssertionError as error:
            outcomes.append(Outcome(row, "wrong", reason=str(error).strip().split("\n")[0] or "the check failed"))
        except MissingResourceError as error:
            outcomes.append(Outcome(row, "skipped", reason=str(error)))
        else:
            outcomes.append(Outcome(row, "measured", measured if isinstance(measured, Measured) else Measured(float(measured))))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as aligned text: name, value, baseline, ratio, goal."""
    lines = [("", "row", "value", "baseline", "ratio", "goal")]
    notes = []
    for outcome in outcomes:
        row, measured = outcome.row, outcome.measured
        if measured is None:
            mark = "✗" if outcome.state == "wrong" else "-"
            lines.append((mark, row.name, outcome.state, "", "", ""))
            notes.append(f"{mark} {row.name}: {outcome.reason}")
            continue
        met = row.goal is None or measured.value <= row.goal
        spread = f" ({measured.low:.3g} to {measured.high:.3g})" if measured.low is not None and measured.high is not None else ""
        lines.append((
            "✓" if met else "!", row.name, f"{measured.value:.3g} {row.unit}{spread}",
            row.baseline if measured.baseline is None else f"{measured.baseline:.3g} {row.unit}: {row.baseline}",
            "" if measured.ratio is None else f"{measured.ratio:.2f}x", "" if row.goal is None else f"<= {row.goal:g} {row.unit}",
        ))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join(text + notes)
