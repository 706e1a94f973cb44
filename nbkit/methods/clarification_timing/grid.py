"""The recorded experiments: tables, sweeps, commitment, sessions and the choices of the language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval, pass_at_k

from .measure import Resampling
from .outcomes import Outcomes, condition_name


class Grid:
    """A recording of this experiment (``clarify-grid`` or ``clarify-smollm2``), by the names of its parts.

    data: its arrays. Raises: InputError when a part is read that the recording lacks.
    """

    def __init__(self, data: Mapping[str, np.ndarray]):
        self.data = data

    @cached_property
    def table(self) -> Outcomes:
        """All episodes."""
        return Outcomes.from_arrays(self.data, "grid_")

    @cached_property
    def commitment(self) -> list[dict[str, Any]]:
        """Commitment by intervention, as `commitment` returns it."""
        return self._rows("commitment_")

    def sessions(self, answer: bool = True) -> list[dict[str, Any]]:
        """Unscripted sessions, as `sessions` returns them; answer=False: the user said nothing of use."""
        return [row for row in self._rows("sessions_") if row["answer"] == answer]

    @property
    def settings(self) -> list[dict[str, float]]:
        """The settings of the sweep: budget, reverify, irreversible."""
        names = ("budget", "reverify", "irreversible")
        return [dict(zip(names, values)) for values in zip(*(self._get(f"sweep_{name}").tolist() for name in names))]

    def sweep(self, agent: str, *, budget: float = 1.2, reverify: float = 1, irreversible: float = 0.2, k: int = 3) -> dict[str, np.ndarray]:
        """(variants,) pass@k of one agent under one setting, by condition (``oracle``, ``never``, ``inj-0.1``, ...).

        Raises: InputError for an agent or a setting that was not run.
        """
        agents = self._get("sweep_agents").tolist()
        wanted = {"budget": budget, "reverify": float(reverify), "irreversible": irreversible}
        at = [i for i, setting in enumerate(self.settings) if all(math.isclose(setting[name], wanted[name]) for name in wanted)]
        if agent not in agents or not at:
            values = {name: sorted({setting[name] for setting in self.settings}) for name in wanted}
            raise InputError("cell of the sweep", got={"agent": agent, **wanted}, allowed=f"agents {', '.join(agents)}; {values}")
        c = self._get("sweep_c")[at[0], agents.index(agent)].astype(int)
        score = pass_at_k(np.full_like(c, self.table["trial"].max() + 1), c, k)
        arms, fractions = self._get("sweep_arms").tolist(), self._get("sweep_fractions").tolist()
        return {condition_name(arm, f): score[:, i] for i, (arm, f) in enumerate(zip(arms, fractions))}

    def sweep_difference(
        self, agent: str, a: str, b: str, *, dimension: str | None = None, k: int = 3, n: int = 5000, seed: int = 0, **setting: float,
    ) -> Interval:
        """Condition a minus condition b under one setting, bootstrap over templates; dimension None: all of them.

        Raises: InputError for a condition or dimension that was not run.
        """
        score = self.sweep(agent, k=k, **setting)
        rows = np.ones(len(score["never"]), bool) if dimension is None else self._get("sweep_dimension") == dimension
        if a not in score or b not in score or not rows.any():
            known = ", ".join(sorted(set(self._get("sweep_dimension").tolist())))
            raise InputError("difference", got=(a, b, dimension), allowed=f"conditions {', '.join(score)}; dimensions {known}")
        resampling = Resampling(self._get("sweep_template"), n=n, seed=seed)
        return resampling.interval(*resampling.mean(score[a] - score[b], rows), "paired cluster bootstrap")

    def choices(self) -> list[dict[str, Any]]:
        """Every choice of the language model: variant, dimension, template, arm, fraction, trial, oracle_actions and options of its episode, and
        ``at`` (actions before it), ``entropy`` in nats, ``option`` (index)."""
        names = ("variant", "dimension", "template", "arm", "fraction", "trial", "oracle_actions", "options")
        columns = {name: self.table[name].tolist() for name in names}
        parts = [self._get(f"choice_{name}").tolist() for name in ("row", "at", "entropy", "option")]
        episode = [{name: columns[name][row] for name in names} for row in parts[0]]
        return [{**known, "at": at, "entropy": entropy, "option": option} for known, at, entropy, option in zip(episode, *parts[1:])]

    def entropy_sessions(self, theta: float = 0.5) -> list[dict[str, Any]]:
        """Where the language model would first ask if it asked at an entropy above ``theta`` times the largest, from its runs without the fact.

        Until its first question such a session is that very run. Rows as `sessions` gives them, policy ``entropy``, without passed and actions.
        """
        first: dict[tuple[str, int], float] = {}
        for choice in self.choices():
            key = choice["variant"], choice["trial"]
            if choice["arm"] == "never" and key not in first and choice["entropy"] > theta * math.log(choice["options"]):
                first[key] = choice["at"] / choice["oracle_actions"]
        out = []
        for row in self.table.where(arm="never").rows:
            position = first.get((row["variant"], row["trial"]), math.nan)
            common = {name: row[name] for name in ("variant", "template", "dimension")}
            out.append({"task": len(out), **common, "policy": "entropy", "asked": not math.isnan(position), "position": position})
        return out

    def absorption(self) -> dict[str, tuple[int, int]]:
        """By dimension: messages whose word the very next choice took up, and messages after which there was a choice."""
        out = {}
        for dimension in self.table.dimensions:
            absorbed = self.table.where(arm="inject", dimension=dimension)["absorbed"]
            out[dimension] = int((absorbed == 1).sum()), int((absorbed >= 0).sum())
        return out

    def _get(self, name: str) -> np.ndarray:
        if name not in self.data:
            raise InputError("part of the recording", got=name, allowed=", ".join(sorted(self.data)))
        return self.data[name]

    def _rows(self, prefix: str) -> list[dict[str, Any]]:
        names = [name for name in self.data if name.startswith(prefix)]
        if not names:
            raise InputError("part of the recording", got=prefix, allowed=", ".join(sorted(self.data)))
        lists: Sequence[list] = [self.data[name].tolist() for name in names]
        return [dict(zip((name[len(prefix) :] for name in names), values)) for values in zip(*lists)]
