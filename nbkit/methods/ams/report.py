"""Reading the precomputed grids: look a cell up, compare two of them chain by chain or text by text.

A grid is the ``data`` of one of the recordings ``ams-chain``, ``ams-text``, ``ams-needles`` or ``ams-loops``: the settings that all cells share and a
list of cells, each with the changes it made to them and one number per chain, text, question or prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval, bootstrap, paired, slope


class Grid:
    """Cells of one recording by their settings.

    >>> grid = Grid({"cells": [{"cell": {}, "nll": [1.0]}, {"cell": {"keep": 64, "scorer": "tova"}, "nll": [2.0]}]})
    >>> float(grid("nll", keep=64, scorer="tova")[0])
    2.0
    """

    def __init__(self, data: Mapping):
        self.data = data
        self._rows = {_freeze(row["cell"]): row for row in data["cells"]}

    def row(self, **cell) -> Mapping:
        """The stored record of one cell; no arguments mean the full cache."""
        key = _freeze(cell)
        if key not in self._rows:
            near = sorted(str(dict(k)) for k in self._rows if dict(k).get("keep") == cell.get("keep"))
            raise InputError("cell", got=cell, allowed="; ".join(near[:8]) + " ...", hint="only precomputed cells can be looked up")
        return self._rows[key]

    def __call__(self, what: str, **cell) -> np.ndarray:
        """One number per unit (chain, text, question or prompt).

        Of chains, ``passed`` is pass@1 at the recording's ``pass_lines`` and ``passed@24`` at 24 lines: a chain that is right for n lines is an answer to
        every shorter question too.
        """
        row = self.row(**cell)
        if what.startswith("passed"):
            lines = int(what.partition("@")[2] or self.data["pass_lines"])
            return (np.asarray(row["correct_lines"]) >= lines).astype(float)
        return np.asarray(row[what], dtype=float)

    def gain(self, what: str, ours: Mapping, theirs: Mapping, keeps: Iterable[int], cluster=None) -> Interval:
        """Paired difference ours - theirs, averaged over budgets within each unit; 95 % bootstrap interval over units (or clusters)."""
        ours_, theirs_ = (np.mean([self(what, **cell, keep=k) for k in keeps], 0) for cell in (ours, theirs))
        return paired(ours_, theirs_, cluster=cluster)

    def gain_slope(self, what: str, ours: Mapping, theirs: Mapping, keeps: Iterable[int]) -> Interval:
        """Slope of the paired gain against log2 of the budget, bootstrap over units: negative if tighter budgets gain more."""
        keeps = list(keeps)
        gains = np.stack([self(what, **ours, keep=k) - self(what, **theirs, keep=k) for k in keeps], 1)
        x = np.tile(np.log2(keeps), (len(gains), 1))
        unit = np.repeat(np.arange(len(gains)), len(keeps))
        return slope(x.ravel(), gains.ravel(), cluster=unit)

    def spread(self, what: str, cells: Iterable[Mapping]) -> Interval:
        """Largest minus smallest mean over some cells, bootstrap over units."""
        values = np.stack([self(what, **cell) for cell in cells], 1)
        return bootstrap(values, stat=_range)


def _range(rows: np.ndarray) -> float:
    means = rows.mean(0)
    return float(means.max() - means.min())


def _freeze(cell: Mapping) -> tuple:
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in cell.items()))
