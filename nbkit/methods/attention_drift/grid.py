"""Reading the recordings drift-grid and drift-smollm2: look cells up, and intervals over prompts and seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval, bootstrap


class Grid:
    """Cells of one recording by variant and training depth; a value that was not measured is NaN.

    >>> grid = Grid({"cells": [{"variant": "pre", "ttt": 2, "seed": 0, "tau": [1.0, None], "drift": {"sink": [[0.5, 0.2], [0.4, 0.1]]}}]})
    >>> grid("tau", "pre", 2).tolist(), grid("drift.sink", "pre", 2).shape
    ([[1.0, nan]], (1, 2, 2))
    """

    def __init__(self, data: Mapping):
        self.data = data
        self._cells: dict[tuple[str, int], dict[int, Mapping]] = {}
        for cell in data["cells"]:
            self._cells.setdefault((cell["variant"], cell["ttt"]), {})[cell["seed"]] = cell

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._cells

    def seeds(self, *cells: tuple[str, int]) -> list[int]:
        """Seeds that all of these (variant, training depth) have in common.

        Raises: InputError for a cell that was not measured, or cells without a common seed.
        """
        for key in cells:
            if key not in self._cells:
                raise InputError("cell", got=key, allowed=", ".join(f"{v} ttt {t}" for v, t in sorted(self._cells)))
        shared = sorted(set.intersection(*(set(self._cells[key]) for key in cells)))
        if not shared:
            raise InputError("cells", got=cells, allowed="cells with a common seed")
        return shared

    def cell(self, variant: str, ttt: int, seed: int = 0) -> Mapping:
        """The stored record of one drafter."""
        self.seeds((variant, ttt))
        if seed not in self._cells[variant, ttt]:
            raise InputError("seed", got=seed, allowed=self.seeds((variant, ttt)))
        return self._cells[variant, ttt][seed]

    def __call__(self, what: str, variant: str, ttt: int, seeds: Sequence[int] | None = None) -> np.ndarray:
        """One measurement of a cell, (seeds, prompts) or (seeds, prompts, steps); ``what`` may be nested, e.g. ``"drift.sink"``.

        Keys that hold a dot themselves, such as the noise ``0.5``, are written with a colon: ``"noise:hidden:0.5"``.
        """
        seeds = self.seeds((variant, ttt)) if seeds is None else seeds
        return np.array([np.array(_inside(self.cell(variant, ttt, s), what), dtype=float) for s in seeds])

    def noise(self, variant: str, ttt: int, path: str, alphas: Sequence[float]) -> np.ndarray:
        """Accepted drafts without and with noise of each size on ``path``, (seeds, prompts, 1 + alphas); prompts that had no noise are left out."""
        rows = [self("tau", variant, ttt), *(self(f"noise:{path}:{alpha}", variant, ttt) for alpha in alphas)]
        count = min(row.shape[1] for row in rows)
        return np.stack([row[:, :count] for row in rows], -1)

    def pair(self, what: str, a: tuple[str, int], b: tuple[str, int]) -> tuple[np.ndarray, np.ndarray]:
        """The same measurement of two cells on the seeds that both have."""
        seeds = self.seeds(a, b)
        return self(what, *a, seeds), self(what, *b, seeds)


def _inside(cell: Mapping, what: str) -> Any:
    value: Any = cell
    for key in what.split(":" if ":" in what else "."):
        if not isinstance(value, Mapping) or key not in value:
            raise InputError("measurement", got=what, allowed=", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else "a shorter name")
        value = value[key]
    return value


def step_slope(values: np.ndarray, first: int = 1, last: int | None = None) -> np.ndarray:
    """Least-squares slope per chain step of (..., K) values whose column k - 1 is step k, over steps ``first``..``last``.

    Raises: InputError for fewer than two steps.

    >>> step_slope(np.array([[9.0, 1.0, 3.0, 5.0]]), first=2).tolist()
    [2.0]
    """
    y = np.asarray(values, dtype=float)[..., first - 1 : last]
    if y.shape[-1] < 2:
        raise InputError("steps", got=y.shape[-1], allowed=">= 2")
    k = np.arange(y.shape[-1]) - (y.shape[-1] - 1) / 2
    return y @ k / (k @ k)


def two_way(
    values: np.ndarray, stat: Callable[[np.ndarray], float] = np.mean, *, cluster: Sequence | None = None, level: float = 0.95,
) -> Interval:
    """Interval of a statistic over prompts and seeds: the half widths of both bootstraps, added in quadrature.

    Prompts are the same for every seed, so neither bootstrap alone sees both kinds of chance. Few seeds get the expanded percentile interval.

    Args:
        values: (seeds, prompts) or (seeds, prompts, columns); prompts with a NaN are left out. stat: rows -> number, a function of column means.
        cluster: (prompts,) documents that several prompts share.

    Raises: InputError for fewer than two prompts that were measured.

    >>> two_way(np.array([[1.0, 3.0, 2.0]])).estimate
    2.0
    """
    values = np.asarray(values, dtype=float)
    if values.ndim not in (2, 3):
        raise InputError("values", got=values.shape, allowed="(seeds, prompts) or (seeds, prompts, columns)")
    seen = np.isfinite(values).all(axis=(0, *range(2, values.ndim)))
    cluster = None if cluster is None else np.asarray(cluster)[seen]
    kept = values[:, seen]
    few = len(np.unique(cluster)) if cluster is not None else kept.shape[1]
    over_prompts = bootstrap(kept.mean(0), stat, cluster, level=level, method="expanded" if few < 20 else "percentile")
    if len(values) == 1:
        return over_prompts
    over_seeds = bootstrap(kept.mean(1), stat, level=level, method="expanded")
    estimate = over_prompts.estimate
    low, high = (
        math.hypot(*(getattr(i, side) - estimate for i in (over_prompts, over_seeds))) for side in ("low", "high")
    )
    method = f"bootstrap over {kept.shape[1]} prompts and {len(values)} seeds"
    return replace(over_prompts, low=estimate - low, high=estimate + high, n=len(values), method=method)


def relative_change(rows: np.ndarray) -> float:
    """Second column over first, minus 1, of the means of (n, 2) rows.

    >>> relative_change(np.array([[2.0, 1.0], [2.0, 2.0]]))
    -0.25
    """
    before, after = rows.mean(0)
    return float(after / before - 1)


def ratio_of_ratios(rows: np.ndarray) -> float:
    """(d / c) / (b / a) of the means of (n, 4) rows a, b, c, d."""
    a, b, c, d = rows.mean(0)
    return float(d / c / (b / a))


def steepness(rows: np.ndarray) -> float:
    """|mean of the first column| - |mean of the second| of (n, 2) rows: how much steeper the first slope is."""
    a, b = np.abs(rows.mean(0))
    return float(a - b)


def change_gap(rows: np.ndarray) -> float:
    """Relative change of the first two columns minus that of the last two of (n, 4) rows."""
    return relative_change(rows[:, :2]) - relative_change(rows[:, 2:])


def retained_area_gain(rows: np.ndarray, alphas: Sequence[float]) -> float:
    """Area under kept acceptance of the second half of the columns minus that of the first half.

    Args:
        rows: (n, 2 A), accepted drafts of two drafters at ``alphas`` (A,), the first of which is 0 and stands for 100 %.

    >>> retained_area_gain(np.array([[2.0, 0.0, 4.0, 4.0]]), [0.0, 1.0])
    0.5
    """
    means = rows.mean(0).reshape(2, -1)
    first, second = np.trapezoid(means / means[:, :1], np.asarray(alphas, dtype=float), axis=-1) / (alphas[-1] - alphas[0])
    return float(second - first)
