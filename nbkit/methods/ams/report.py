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
        self._rows = {self._key(row["cell"]): row for row in data["cells"]}

    @property
    def budgets(self) -> list[int]:
        """All budgets of the grid."""
        return sorted({row["cell"]["keep"] for row in self.data["cells"] if row["cell"]})

    def row(self, **cell) -> Mapping:
        """The stored record of one cell; no arguments mean the full cache."""
        key = self._key(cell)
        if key not in self._rows:
            near = sorted(str(dict(k)) for k in self._rows if dict(k).get("keep") == cell.get("keep"))
            raise InputError("cell", got=cell, allowed="; ".join(near[:8]) + " ...", hint="only precomputed cells can be looked up")
        return self._rows[key]

    def _key(self, cell: Mapping) -> tuple:
        """A cell with everything it leaves at the recording's common settings filled in; the full cache has none."""
        full = {**self.data.get("base", {}), **cell} if cell else {}
        return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in full.items()))

    def __call__(self, what: str, **cell) -> np.ndarray:
        """One number per unit (chain, text, question or prompt).

        Of chains, ``passed`` is pass@1 at the recording's ``pass_lines`` and ``passed@24`` at 24 lines: a chain that is right for n lines is
        an answer to every shorter question too.
        """
        row = self.row(**cell)
        if what.startswith("passed"):
            lines = int(what.partition("@")[2] or self.data["pass_lines"])
            return (np.asarray(row["correct_lines"]) >= lines).astype(float)
        return np.asarray(row[what], dtype=float)

    def gain(self, what: str, ours: Mapping, theirs: Mapping, keeps: Iterable[int], cluster=None, method: str = "percentile") -> Interval:
        """Paired difference ours - theirs, averaged over budgets within each unit; 95 % bootstrap interval over units (or clusters).

        method: of `nbkit.metrics.paired`; "expanded" for fewer than about 20 clusters.
        """
        ours_, theirs_ = (np.mean([self(what, **cell, keep=k) for k in keeps], 0) for cell in (ours, theirs))
        return paired(ours_, theirs_, cluster=cluster, method=method)

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


PAPER: dict[str, dict[str, str]] = {
    "C1": {"statement": "AMS wipes out fewer regions than its scorer's top-k", "paper": "11.3 % to 8.7 % of regions (no formula given)"},
    "C2": {"statement": "more right answers at the same budget", "paper": "up to +20 points (KeyDiff, MATH500, budget 256)"},
    "C3": {
        "statement": "it helps every scorer (here: on average over budgets)",
        "paper": "TOVA, Expected Attention, KeyDiff, R-KV, TriAttention, at all budgets",
    },
    "C4": {
        "statement": "the gain grows as the budget shrinks",
        "paper": "TOVA +7.2/+3.8/+4.6, KeyDiff +20/+17.6/+11 at 256/512/1024; the reverse for R-KV and TriAttention",
    },
    "C5": {"statement": "sometimes better than the full cache", "paper": "AMS-Expected 54.0, full 52.8; TriAttention without AMS 55.0"},
    "C6": {"statement": "credit makes consecutive caches more alike", "paper": "overlap 0.219 to 0.260"},
    "C7": {
        "statement": "every part matters",
        "paper": "full 48.4; without mass quotas 46.0, without credit 48.0, fixed segments 48.0, one segment 42.8 (budget 512)",
    },
    "C8": {"statement": "generated text loops less", "paper": "repeated n-grams 21.6 % to 16.2 %"},
    "C9": {"statement": "the overhead is negligible", "paper": "15.0 GB like other gather methods; 44.0 s against 52.3 s per sample"},
    "C10": {
        "statement": "it helps other long-context work (here: recall of facts in a long text)",
        "paper": "NIAH 0.238, TOVA 0.189, full 0.375; also RepoBench, TriviaQA, LongBench, which need larger models",
    },
    "C11": {"statement": "it is insensitive to its parameters", "paper": "exactly 50.0 % in all 25 settings"},
}
"""The paper's claims and numbers, by the ids of the notebook."""
