"""The table of a forced-injection experiment: one row per (variant, agent, condition, trial)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import pass_at_k

ARMS = ("oracle", "never", "inject", "sham")
"""Information in the first message; never; at a fraction of the run; a message of the same length at that time that repeats known facts."""

COLUMNS = (
    "variant", "template", "dimension", "options", "agent", "arm", "fraction", "trial", "passed", "delivered", "actions", "wasted", "realised",
    "absorbed", "irreversible", "stopped", "oracle_actions", "budget",
)
"""Fraction is NaN without a message; wasted and realised are shares; absorbed is 1, 0 or -1 (does not apply); irreversible: a wrong action that
cannot be taken back was done before the message; stopped: the agent ended by itself; oracle_actions and budget are numbers of actions."""

_KINDS = {
    "variant": str, "template": np.int16, "dimension": str, "options": np.int8, "agent": str, "arm": str, "fraction": np.float32, "trial": np.int16,
    "passed": bool, "delivered": bool, "actions": np.int16, "wasted": np.float32, "realised": np.float32, "absorbed": np.int8, "irreversible": bool,
    "stopped": bool, "oracle_actions": np.int16, "budget": np.int32,
}


def condition_name(arm: str, fraction: float = math.nan) -> str:
    """The name of a condition.

    >>> condition_name("inject", 0.3), condition_name("never")
    ('inj-0.3', 'never')
    """
    return {"inject": f"inj-{fraction:g}", "sham": f"sham-{fraction:g}"}.get(arm, arm)


@dataclass(frozen=True)
class Outcomes:
    """Results of an experiment as columns of equal length, see :data:`COLUMNS`.

    Raises: InputError for a missing column or columns of different lengths.

    >>> row = dict(zip(COLUMNS, ("v", 0, "goal", 6, "eager", "never", math.nan, 0, True, False, 9, 0., 1., -1, False, True, 20, 24)))
    >>> table = Outcomes.from_rows([row, row | {"trial": 1, "passed": False}])
    >>> len(table), table.agents, float(table["passed"].mean())
    (2, ('eager',), 0.5)
    """

    columns: Mapping[str, np.ndarray]

    def __post_init__(self):
        lacking = [name for name in COLUMNS if name not in self.columns]
        sizes = {len(values) for values in self.columns.values()}
        if lacking or len(sizes) != 1:
            got = f"no {', '.join(lacking)}" if lacking else f"columns of {sorted(sizes)} rows"
            raise InputError("table of outcomes", got=got, allowed=f"columns of one length: {', '.join(COLUMNS)}")

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Outcomes:
        """A table from dicts; at least one."""
        rows = list(rows)
        if not rows:
            raise InputError("table of outcomes", got="no rows", allowed="at least one row")
        return cls({name: np.array([row[name] for row in rows], dtype=_KINDS[name]) for name in COLUMNS})

    @classmethod
    def concat(cls, tables: Sequence[Outcomes]) -> Outcomes:
        """Several tables under each other."""
        return cls({name: np.concatenate([table[name] for table in tables]) for name in COLUMNS})

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table as dicts, with the name of the condition."""
        lists = {name: self[name].tolist() for name in COLUMNS}
        out = [dict(zip(COLUMNS, values)) for values in zip(*(lists[name] for name in COLUMNS))]
        return [{**row, "fraction": round(row["fraction"], 6), "condition": condition_name(row["arm"], round(row["fraction"], 6))} for row in out]

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents in order of appearance."""
        return tuple(dict.fromkeys(self["agent"].tolist()))

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Missing dimensions in order of appearance."""
        return tuple(dict.fromkeys(self["dimension"].tolist()))

    @property
    def timings(self) -> tuple[float, ...]:
        """Fractions at which the message was injected, ascending."""
        return tuple(sorted({round(float(f), 6) for f in self["fraction"][self["arm"] == "inject"]}))

    def __len__(self) -> int:
        return len(self.columns["variant"])

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.columns:
            raise InputError("column", got=name, allowed=", ".join(COLUMNS))
        return self.columns[name]

    def where(self, mask: np.ndarray | None = None, **equal: Any) -> Outcomes:
        """The rows with these values (a tuple means any of them), and, where a mask is given, those it marks.

        Raises: InputError when nothing is left.
        """
        keep = np.ones(len(self), bool) if mask is None else np.asarray(mask, bool).copy()
        for name, value in equal.items():
            column = self[name]
            values = value if isinstance(value, (tuple, list, set)) else (value,)
            keep &= np.isclose(column[:, None], np.array(sorted(values))).any(1) if name == "fraction" else np.isin(column, list(values))
        if not keep.any():
            raise InputError("rows", got=f"none with {equal}", allowed=f"agents {', '.join(self.agents)}; dimensions {', '.join(self.dimensions)}")
        return Outcomes({name: self[name][keep] for name in COLUMNS})

    def arrays(self) -> dict[str, np.ndarray]:
        """Compact columns for an npz file: names become numbers into a list of names."""
        out: dict[str, np.ndarray] = {}
        for name in COLUMNS:
            if _KINDS[name] is str:
                names, codes = np.unique(self[name], return_inverse=True)
                out[name], out[f"{name}_names"] = codes.astype(np.int16), names
            else:
                out[name] = self[name]
        return out

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str = "") -> Outcomes:
        """The table behind :meth:`arrays`."""
        def column(name: str) -> np.ndarray:
            values = arrays[prefix + name]
            return arrays[f"{prefix}{name}_names"][values] if _KINDS[name] is str else values

        return cls({name: column(name) for name in COLUMNS})

    def __repr__(self) -> str:
        return f"Outcomes({len(self)} episodes; agents {', '.join(self.agents)}; dimensions {', '.join(self.dimensions)}; timings {self.timings})"


@dataclass(frozen=True)
class Cells:
    """Successes by variant and condition of one agent.

    variants, template, dimension: (v,); conditions: (arm, fraction) pairs; n, c: (v, conditions) trials and successes.
    """

    agent: str
    variants: np.ndarray
    template: np.ndarray
    dimension: np.ndarray
    conditions: tuple[tuple[str, float], ...]
    n: np.ndarray
    c: np.ndarray

    def score(self, k: int) -> np.ndarray:
        """(v, conditions) unbiased pass@k. Raises: InputError for a cell with fewer than k trials. Source: Chen et al., arXiv 2107.03374, eq. 1."""
        if self.n.min() < k:
            empty = self.conditions[int(self.n.min(0).argmin())]
            raise InputError("k of pass@k", got=k, allowed=f"<= {self.n.min()} trials, which {condition_name(*empty)} of {self.agent} has")
        return pass_at_k(self.n, self.c, k)

    def at(self, arm: str, fraction: float = math.nan) -> int:
        """The column of a condition. Raises: InputError when it was not run."""
        for i, (name, f) in enumerate(self.conditions):
            if name == arm and (math.isnan(f) or abs(f - fraction) < 1e-6):
                return i
        names = ", ".join(condition_name(*condition) for condition in self.conditions)
        raise InputError("condition", got=condition_name(arm, fraction), allowed=names)


def cells(table: Outcomes, agent: str) -> Cells:
    """Count the trials and successes of one agent.

    Raises: InputError for an agent that is not in the table.
    """
    if agent not in table.agents:
        raise InputError("agent", got=agent, allowed=", ".join(table.agents))
    part = table.where(agent=agent)
    variants, first, row = np.unique(part["variant"], return_index=True, return_inverse=True)
    # In the order of the table, which is that of the templates.
    order = np.argsort(first)
    variants, first, row = variants[order], first[order], np.argsort(order)[row]
    fractions = np.where(np.isnan(part["fraction"]), -1.0, part["fraction"].astype(float).round(6))
    pairs = sorted(set(zip(part["arm"].tolist(), fractions.tolist())), key=lambda pair: (ARMS.index(pair[0]), pair[1]))
    place = {pair: i for i, pair in enumerate(pairs)}
    column = np.array([place[pair] for pair in zip(part["arm"].tolist(), fractions.tolist())])
    n = np.zeros((len(variants), len(pairs)), int)
    c = np.zeros_like(n)
    np.add.at(n, (row, column), 1)
    np.add.at(c, (row, column), part["passed"].astype(int))
    conditions = tuple((arm, math.nan if f < 0 else f) for arm, f in pairs)
    return Cells(agent, variants, part["template"][first], part["dimension"][first], conditions, n, c)
