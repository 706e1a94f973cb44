"""Reading the recordings ``adacal-grid`` and ``adacal-heads``: look cells up, compare two of them prompt by prompt.

A cell is one rule on one task; it holds a loss (nats), a top-1 share and a density (probe included) for every prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval, bootstrap, paired, slope

# A task whose dense loss is below this many nats would make any rise look huge in relation to it.
LEAST_LOSS = 0.1

Rule = str | tuple[str, Mapping[str, Any]]
"""A rule's name, or its name and options."""


class Grid:
    """Cells of the recording ``adacal-grid``; chunks of prompts of one cell are joined.

    >>> cell = {"task": "needle", "method": "dense", "chunk": 0, "tokens": 512}
    >>> grid = Grid({"tasks": ["needle"], "tokens": 512, "cells": [{"cell": cell, "ids": ["a"], "nll": [0.5], "density": [1.0]}]})
    >>> grid("nll", "needle", "dense").tolist()
    [0.5]
    """

    def __init__(self, data: Mapping):
        self.data, self.tasks = data, list(data["tasks"])
        self._rows: dict[tuple, list[Mapping]] = {}
        for row in sorted(data["cells"], key=lambda row: row["cell"].get("chunk", 0)):
            self._rows.setdefault(self._key(row["cell"]), []).append(row)

    def _key(self, cell: Mapping) -> tuple:
        full = {"tokens": self.data["tokens"]} | {name: value for name, value in cell.items() if name not in ("chunk", "size")}
        return tuple(sorted((name, tuple(sorted(value.items())) if isinstance(value, Mapping) else value) for name, value in full.items()))

    def _find(self, task: str, rule: Rule, where: Mapping) -> list[Mapping]:
        method, options = (rule, {}) if isinstance(rule, str) else rule
        key = self._key({"task": task, "method": method, **({"options": options} if options else {}), **where})
        if key not in self._rows:
            near = sorted({dict(k)["method"] for k in self._rows if dict(k)["task"] == task})
            allowed = f"{task} with {', '.join(near) or 'nothing'}"
            raise InputError("cell", got=dict(key), allowed=allowed, hint="only recorded cells can be looked up")
        return self._rows[key]

    def has(self, task: str, rule: Rule, **where) -> bool:
        """Whether a cell was recorded."""
        try:
            return bool(self._find(task, rule, where))
        except InputError:
            return False

    def __call__(self, what: str, task: str, rule: Rule, **where) -> np.ndarray:
        """One number a prompt: ``nll``, ``top1``, ``density`` or ``seconds``. where: tokens, keys, depth or rivals of the cell."""
        return np.array([value for row in self._find(task, rule, where) for value in row[what]], dtype=float)

    def ids(self, task: str, rule: Rule, **where) -> list[str]:
        """Prompts of a cell in the order of its numbers."""
        return [name for row in self._find(task, rule, where) for name in row["ids"]]

    def both(self, what: str, task: str, ours: Rule, theirs: Rule, **where) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of two rules on the prompts that both have read."""
        sides = [dict(zip(self.ids(task, rule, **where), self(what, task, rule, **where), strict=True)) for rule in (ours, theirs)]
        common = [name for name in sides[0] if name in sides[1]]
        if len(common) < 2:
            raise InputError("common prompts", got=len(common), allowed=">= 2", hint="the two cells were measured on different prompts")
        return tuple(np.array([side[name] for name in common]) for side in sides)

    def gain(self, what: str, task: str, ours: Rule, theirs: Rule, **where) -> Interval:
        """Paired difference ours - theirs on one task; 95 % bootstrap interval over prompts."""
        a, b = self.both(what, task, ours, theirs, **where)
        return paired(a, b, method=_method(len(a)))

    def gain_over(self, what: str, tasks: Iterable[str], ours: Rule, theirs: Rule, **where) -> Interval:
        """Paired difference ours - theirs over the prompts of several tasks."""
        pairs = [self.both(what, task, ours, theirs, **where) for task in tasks]
        a, b = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
        return paired(a, b, method=_method(len(a)))

    def relative(self, task: str, rule: Rule, **where) -> float:
        """Rise of the mean loss over the dense model's, as a share of the dense model's (at least 0.1 nats)."""
        a, dense = self.both("nll", task, rule, "dense", **where)
        return float((a.mean() - dense.mean()) / max(dense.mean(), LEAST_LOSS))

    def worst(self, rule: Rule | Mapping[str, Rule], **where) -> tuple[str, float]:
        """The task with the largest relative rise, and that rise. rule: one for all tasks, or one a task."""
        values = {task: self.relative(task, _of(rule, task), **where) for task in self.tasks}
        task = max(values, key=values.get)
        return task, values[task]

    def worst_gain(self, ours: Rule, theirs: Rule, **where) -> Interval:
        """Worst relative rise of ours less that of theirs; bootstrap over prompts, all tasks resampled together.

        Negative: ours is the more robust rule. The worst task may differ between the rules and between resamples.
        """
        columns = []
        for task in self.tasks:
            sides = [dict(zip(self.ids(task, rule, **where), self("nll", task, rule, **where), strict=True)) for rule in (ours, theirs, "dense")]
            common = [name for name in sides[0] if all(name in side for side in sides)]
            columns.append(np.array([[side[name] for name in common] for side in sides]))
        n = min(block.shape[1] for block in columns)
        rows = np.concatenate([block[:, :n] for block in columns]).T

        def difference(sample: np.ndarray) -> float:
            means = sample.mean(0).reshape(-1, 3)
            dense = means[:, 2]
            share = (means[:, :2] - dense[:, None]) / np.maximum(dense, LEAST_LOSS)[:, None]
            return float(share[:, 0].max() - share[:, 1].max())

        return bootstrap(rows, stat=difference, method=_method(n))

    def matched(self, method: str, density: float) -> Rule | None:
        """The rule with the setting that was chosen for a density on calibration prompts; None where none came near."""
        for row in self.data["matched"]:
            if row["cell"] == {"method": method, "density": density} and abs(row["density"] - density) < 0.03:
                return method, row["options"]
        return None

    def cheapest_equal(self, rules: Iterable[Rule], reference: Rule, *, tolerance: float = 0.03) -> Rule | None:
        """The rule of smallest mean density whose mean loss over all tasks is at most ``tolerance`` above the reference's; None if none is."""
        fit = []
        for rule in rules:
            loss = np.mean([np.subtract(*self.both("nll", task, rule, reference)).mean() for task in self.tasks])
            cost = np.mean([self("density", task, rule).mean() for task in self.tasks])
            if loss <= tolerance:
                fit.append((float(cost), rule))
        return min(fit, key=lambda pair: pair[0])[1] if fit else None

    def rivals(self, *, keys: int = 7) -> Interval:
        """Slope of the loss (nats a statement) against the number of wrong-key statements whose columns are kept beside the right one."""
        counts = sorted({row["cell"]["rivals"] for row in self.data["cells"] if row["cell"].get("keys") == keys and "rivals" in row["cell"]})
        if len(counts) < 2:
            raise InputError("numbers of rivals", got=counts, allowed="at least two recorded numbers")
        losses = np.stack([self("nll", "multikey", "given-columns", keys=keys, rivals=count) for count in counts], 1)
        prompt = np.repeat(np.arange(len(losses)), len(counts))
        return slope(np.tile(counts, len(losses)), losses.ravel(), cluster=prompt, method=_method(len(losses)))

    def best(self, task: str, rules: Iterable[Rule]) -> Rule:
        """The rule with the smallest mean loss on a task."""
        return min(rules, key=lambda rule: self("nll", task, rule).mean())

    def rank_changes(self, rules: Iterable[Rule]) -> list[tuple[str, Rule, str, Rule, Interval]]:
        """Cases (task A, rule, task B, other, difference): the rule is best on A and worse than another by its whole interval on B."""
        rules, found = list(rules), []
        for task in self.tasks:
            best = self.best(task, rules)
            for other_task in self.tasks:
                for other in rules:
                    if other != best and other_task != task:
                        gap = self.gain("nll", other_task, best, other)
                        if gap.low > 0:
                            found.append((task, best, other_task, other, gap))
        return found


class Heads:
    """The recording ``adacal-heads``: losses by ranking of the heads, profiles, and the damage of single heads."""

    def __init__(self, data: Mapping):
        self.data = data
        self._rows: dict[tuple, list[Mapping]] = {}
        for row in sorted(data["cells"], key=lambda row: row["cell"].get("chunk", 0)):
            self._rows.setdefault(self._key(row["cell"]), []).append(row)

    @staticmethod
    def _key(cell: Mapping) -> tuple:
        return tuple(sorted((name, value) for name, value in cell.items() if name != "chunk"))

    def has(self, task: str, ranking: str, share: float = 0.2) -> bool:
        """Whether a cell was recorded."""
        return self._key({"task": task, "ranking": ranking, "share": _share(ranking, share)}) in self._rows

    def __call__(self, what: str, task: str, ranking: str, share: float = 0.2) -> np.ndarray:
        """One number a prompt. ranking "random" is the mean over the recorded draws; "all" and "none" take no share."""
        return np.array(list(self._by_prompt(what, task, ranking, share).values()))

    def _by_prompt(self, what: str, task: str, ranking: str, share: float) -> dict[str, float]:
        names = [f"random-{i}" for i in range(9) if self.has(task, f"random-{i}", share)] if ranking == "random" else [ranking]
        sides = []
        for name in names or ["random-0"]:
            key = self._key({"task": task, "ranking": name, "share": _share(name, share)})
            if key not in self._rows:
                known = sorted({dict(k).get("ranking") for k in self._rows if dict(k)["task"] == task} - {None})
                raise InputError("cell", got=dict(key), allowed=f"{task} with {', '.join(known) or 'nothing'}")
            sides.append({name: value for row in self._rows[key] for name, value in zip(row["ids"], row[what], strict=True)})
        return {prompt: float(np.mean([side[prompt] for side in sides])) for prompt in sides[0] if all(prompt in side for side in sides)}

    def gain(self, task: str, ours: str, theirs: str, share: float = 0.2) -> Interval:
        """Paired difference of the losses, ours - theirs, over prompts."""
        a, b = self._by_prompt("nll", task, ours, share), self._by_prompt("nll", task, theirs, share)
        common = [name for name in a if name in b]
        return paired([a[name] for name in common], [b[name] for name in common], method=_method(len(common)))

    def damage(self, task: str) -> dict[int, np.ndarray]:
        """Mean rise of the loss when one head alone is A-shaped: layer -> (heads,)."""
        found = {row["cell"]["layer"]: np.mean(row["rise"], 0) for row in self.data["cells"] if row["cell"].get("task") == task and "rise" in row}
        if not found:
            raise InputError("task", got=task, allowed="a task with measured damages")
        return found

    def agreement(self, task: str, metric: str) -> Interval:
        """Spearman's rank correlation of a metric of the profile with the damage; bootstrap over heads."""
        damage = self.damage(task)
        values = np.array(self.data["profiles"][task][metric])
        rows = np.array([(values[layer, h], hurt) for layer, line in damage.items() for h, hurt in enumerate(line)])
        return bootstrap(rows, stat=lambda sample: spearman(sample[:, 0], sample[:, 1]))


def spearman(x: Any, y: Any) -> float:
    """Spearman's rank correlation; ties get their mean rank. NaN when one side is constant.

    >>> round(spearman([1, 2, 3, 4], [1, 3, 2, 4]), 3)
    0.8
    """
    ranks = []
    for values in (x, y):
        values = np.asarray(values, dtype=float)
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    a, b = (rank - rank.mean() for rank in ranks)
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale > 0 else float("nan")


def _share(ranking: str, share: float) -> float:
    return {"all": 1.0, "none": 0.0}.get(ranking, share)


def _of(rule: Rule | Mapping[str, Rule], task: str) -> Rule:
    return rule[task] if isinstance(rule, Mapping) else rule


def _method(n: int) -> str:
    """Percentile intervals are too narrow for fewer than about 20 prompts."""
    return "percentile" if n >= 20 else "expanded"


PAPER: dict[str, dict[str, str]] = {
    "C1": {"statement": "static sparse masks miss evidence that the task needs", "paper": "stated in the abstract, no number"},
    "C2a": {"statement": "dynamic sparsity is brittle across tasks: too little coverage", "paper": "stated in the abstract, no number"},
    "C2b": {"statement": "dynamic sparsity is brittle across tasks: it pulls in distractors", "paper": "stated in the abstract, no number"},
    "C3": {
        "statement": "entropy, concentration and mid-zone coverage of a light probe tell which heads need more",
        "paper": "stated in the abstract; formulas reconstructed",
    },
    "C4": {
        "statement": "task-conditional policies expand less on structure-dominant prompts and more on retrieval prompts",
        "paper": "stated in the abstract, no number",
    },
    "C5": {"statement": "extra computation is spent on demand", "paper": "stated in the abstract, no number"},
    "C6": {
        "statement": "more robust than strong static and dynamic baselines (worst task at equal density)",
        "paper": "clearer gains beyond 32K tokens, which are out of reach here",
    },
}
"""The claims of the abstract, the only public part of the paper, by the ids of the notebook."""
