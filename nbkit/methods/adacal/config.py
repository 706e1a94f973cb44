"""What AdaCal is told: sizes of the probe and of the base pattern, and one policy a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbkit.errors import InputError

TASKS = ("retrieval", "structure", "general")
REDUCTIONS = ("mean", "max", "last")


def _number(name: str, value: Any, low: float, high: float, hint: str | None = None) -> None:
    # NaN fails both comparisons.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        allowed = f"a number in [{low:g}, {high:g}]" if math.isfinite(high) else f"a number >= {low:g}"
        raise InputError(name, got=value, allowed=allowed, hint=hint)


@dataclass(frozen=True)
class TaskPolicy:
    """How heads are activated and augmented on one class of prompts.

    Args:
        reduce: how the mid-zone mass of the probe rows becomes one number a head: ``mean``, ``max`` or ``last`` row.
        tau: a head is active when that number exceeds tau. Below 0 every head is; 1 or more none.
        kappa: augmentation of an active head stops once this share of its mid-zone mass is covered; 1 spends the caps in full.
        caps: factor on the caps of columns and diagonals.
        dense_top: share of the heads of a layer, by highest ``max`` mass, that also keep the rows of the probe dense when active.
        fallback_after: from this share of the layers on, a layer without an active head activates the one with the most mass; None: never.

    Raises: InputError for a value out of range.

    >>> TaskPolicy(tau=0.5, kappa=0.95).reduce
    'max'
    """

    reduce: str = "max"
    tau: float = 0.6
    kappa: float = 0.9
    caps: float = 1.0
    dense_top: float = 0.0
    fallback_after: float | None = None

    def __post_init__(self):
        if self.reduce not in REDUCTIONS:
            raise InputError("reduce", got=self.reduce, allowed=", ".join(REDUCTIONS))
        _number("tau", self.tau, -1.0, 2.0, hint="mass lies in [0, 1]: tau < 0 activates every head, tau >= 1 none")
        _number("kappa", self.kappa, 0.0, 1.0)
        _number("caps", self.caps, 0.0, math.inf)
        _number("dense_top", self.dense_top, 0.0, 1.0)
        if self.fallback_after is not None:
            _number("fallback_after", self.fallback_after, 0.0, 1.0)


POLICIES: Mapping[str, TaskPolicy] = {
    "retrieval": TaskPolicy("max", 0.5, 0.95, caps=1.5, dense_top=0.2, fallback_after=1 / 3),
    "structure": TaskPolicy("mean", 0.3, 0.8),
    "general": TaskPolicy("max", 0.6, 0.9),
}
"""Policy of each task. Reconstructed: the abstract names the policies and gives no numbers; these were fixed on 600-token pilots."""


@dataclass(frozen=True)
class AdaCalConfig:
    """All choices of AdaCal.

    Args:
        sinks, window: the base pattern of every head: the first ``sinks`` keys and the last ``window`` keys of each row.
        probe: last rows whose attention is computed in full to profile the heads; always charged to the density.
        shift: rows at the end of the prompt that the probe skips, for prompts that end in a fixed template suffix.
        v_cap, s_cap: most columns and most diagonals that an active head may add, before the policy's factor. A forced local band and sinks
            do not count.
        task: ``auto`` (dispatched from the tokens) or one of ``retrieval``, ``structure``, ``general``.
        reduce, tau, kappa, dense_top, fallback_after: replace the value of the task's policy when given; ``fallback_after=1.0`` turns the
            fallback off.
        guard: distractor guard: heads with entropy above .75 and concentration below .3 get diagonals only. Off by default.
        top: share of the keys behind the concentration.
        policies: another table of policies.

    Raises: InputError for a value out of range or an unknown task.

    >>> AdaCalConfig(task="retrieval").policy("retrieval").tau
    0.5
    >>> AdaCalConfig(tau=0.7).policy("structure").tau
    0.7
    """

    sinks: int = 4
    window: int = 64
    probe: int = 64
    shift: int = 0
    v_cap: int = 64
    s_cap: int = 96
    task: str = "auto"
    reduce: str | None = None
    tau: float | None = None
    kappa: float | None = None
    dense_top: float | None = None
    fallback_after: float | None = None
    guard: bool = False
    top: float = 0.02
    policies: Mapping[str, TaskPolicy] | None = None

    def __post_init__(self):
        for name, least in (("sinks", 0), ("window", 1), ("probe", 1), ("shift", 0), ("v_cap", 0), ("s_cap", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(name, got=value, allowed=f"an integer >= {least}")
        if self.task not in ("auto", *TASKS):
            raise InputError("task", got=self.task, allowed="auto, " + ", ".join(TASKS))
        if not isinstance(self.guard, bool):
            raise InputError("guard", got=self.guard, allowed="True or False")
        _number("top", self.top, 1e-6, 1.0)
        table = POLICIES if self.policies is None else self.policies
        missing = [task for task in TASKS if not isinstance(table.get(task), TaskPolicy)]
        if missing:
            raise InputError("policies", got=f"no policy for {', '.join(missing)}", allowed=f"a TaskPolicy for each of {', '.join(TASKS)}")
        for task in TASKS:
            self.policy(task)

    def policy(self, task: str) -> TaskPolicy:
        """The policy of a task with this configuration's own values in place. Raises: InputError for an unknown task."""
        if task not in TASKS:
            raise InputError("task", got=task, allowed=", ".join(TASKS))
        given = {name: getattr(self, name) for name in ("reduce", "tau", "kappa", "dense_top", "fallback_after")}
        table = POLICIES if self.policies is None else self.policies
        return replace(table[task], **{name: value for name, value in given.items() if value is not None})

    def caps(self, task: str) -> tuple[int, int]:
        """Most columns and diagonals of an active head on a task.

        >>> AdaCalConfig().caps("retrieval")
        (96, 144)
        """
        factor = self.policy(task).caps
        return round(self.v_cap * factor), round(self.s_cap * factor)
