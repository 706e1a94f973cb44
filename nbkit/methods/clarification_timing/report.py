"""Reading the recordings ``clarify-grid`` and ``clarify-smollm2``, and the comparisons that verdicts rest on.

Fixed with the criteria of the recipe, before either recording existed: the association of loss and commitment is taken at half of the run, over all
variants, with the share of the actions taken; waste is compared at the times .1 to .9, since before the first action there is none; input keeps its
value if VOI at 50 % is above zero, and goal has lost it if less than half of the oracle's gain is left then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbkit.agents import HFChoiceAgent
from nbkit.envs.office import OfficeOps, Variant
from nbkit.errors import InputError
from nbkit.metrics import Interval

from .grid import Grid
from .inject import ForcedInjection, Run
from .measure import Resampling
from .outcomes import Outcomes, cells, condition_name
from .ranks import spearman

TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)

PAPER: dict[str, dict[str, str]] = {
    "C1": {
        "statement": "what a clarification is worth at a time depends on the kind of fact that is missing",
        "paper": "MCP-Atlas, pass@3 at 10/30/50/70/90 %: goal .78/.50/.44/.39/.39 (oracle .80, never .40), "
                 "input .46/.36/.36/.32/.25 (oracle .57, never .33)",
    },
    "C2": {
        "statement": "goals must be clarified at once, inputs can wait until about mid-run",
        "paper": "goal nearly worthless after 10 %; input keeps value to about 50 %",
    },
    "C3": {
        "statement": "asking late is worse than never asking (here: if, and only if, reacting costs more than the slack)",
        "paper": "past mid-run worse than never, any kind; its own table: SWE-Bench Pro constraint .68 at 90 % against .56 never",
    },
    "C4": {
        "statement": "which jobs and times suffer is a property of the task: agents agree",
        "paper": "Kendall tau .78 to .87 among 3 models on identical variants, .34 to .67 over 4 models with unequal coverage",
    },
    "C5": {
        "statement": "agents do not ask at the right time by themselves",
        "paper": "300 sessions: GPT-5.2 asks in 52 % at mean position 43 %, Claude Sonnet 4.5 in 23 %, Gemini 3 Flash never; none in the goal window",
    },
    "C6": {
        "statement": "the later the clarification, the more of the work before it is wasted",
        "paper": "MCP-Atlas 38.4/39.7/49.2/52.6/52.9 % at 10/30/50/70/90 %; TheAgentCompany 0/9.6/13.7/17.6/21.7 %",
    },
    "C7": {
        "statement": "what is left to gain is bounded by the share of the work that does not yet depend on the fact",
        "paper": "VOI(t) <= VOI(0)(1 - C(t)), the mechanism behind C1",
    },
}
"""The paper's claims and numbers, by the ids of the notebook."""


class SweptAgent:
    """A fast agent's recorded counts under the nearest rules of the office that were swept, for a panel.

    grid: the recording ``clarify-grid``; name: of the agent.
    """

    kind = "trained toy, recorded"

    def __init__(self, grid: Grid, name: str = "learned"):
        self.grid, self.name = grid, name

    def nearest(self, **wanted: float) -> dict[str, float]:
        """The swept setting that is nearest, each rule measured in steps of its own values."""
        distance = np.zeros(len(self.grid.settings))
        for name, value in wanted.items():
            values = np.array([setting[name] for setting in self.grid.settings])
            steps = np.unique(values)
            distance += np.abs(np.searchsorted(steps, values) - np.interp(value, steps, np.arange(len(steps))))
        return self.grid.settings[int(distance.argmin())]

    def scores(self, dimension: str, k: int, **wanted: float) -> tuple[np.ndarray, int, ForcedInjection]:
        """pass@k (variants, never + the five times + oracle), the k that was possible, and the experiment behind them."""
        setting = self.nearest(**wanted)
        k = min(k, int(self.grid.table["trial"].max()) + 1)
        found = self.grid.sweep(self.name, k=k, **setting)
        names = ("never", *(condition_name("inject", f) for f in TIMES), "oracle")
        suite = OfficeOps(dims=(dimension,), irreversible=setting["irreversible"], reverify=int(setting["reverify"]))
        rows = self.grid.data["sweep_dimension"] == dimension
        return np.stack([found[name][rows] for name in names], 1), k, ForcedInjection(suite, timings=TIMES, budget=setting["budget"])

    def runs(self, experiment: ForcedInjection, variant: Variant, fraction: float) -> list[Run]:
        """Full request, never told, told: played now, since the network is fast enough for three runs."""
        from .explore import live_agent

        who = live_agent(self.name)
        return [experiment.episode(who, variant, arm=arm, fraction=fraction) for arm in ("oracle", "never", "inject")]


class ReplayedModel:
    """A language model's recorded outcomes, and its runs played again from its recorded choices in a live office.

    grid: the recording ``clarify-smollm2``; settings: trials and budget, as on its card.
    """

    kind = "real model, recorded"

    def __init__(self, grid: Grid, settings: Mapping[str, Any], *, seed: int = 0):
        self.grid, self.name, self.trials = grid, grid.table.agents[0], int(settings["trials"])
        self._settings = {"timings": TIMES, "trials": self.trials, "budget": float(settings["budget"]), "sham": False, "seed": seed}
        table = grid.table
        fraction = np.nan_to_num(table["fraction"].astype(float), nan=-1.0).round(6)
        keys = zip(table["variant"].tolist(), table["arm"].tolist(), fraction.tolist(), table["trial"].tolist())
        self._place = {key: i for i, key in enumerate(keys)}
        self._cells = {d: cells(table.where(dimension=d), self.name) for d in table.dimensions}

    def experiment(self, dimension: str) -> ForcedInjection:
        """The experiment that was recorded, for the jobs of one dimension."""
        return ForcedInjection(OfficeOps(dims=(dimension,), seed=self._settings["seed"]), **self._settings)

    def place(self, variant: str, arm: str, fraction: float = math.nan, trial: int = 0) -> int:
        """Row of the table. Raises: InputError for an episode that was not recorded."""
        key = (variant, arm, -1.0 if arm in ("oracle", "never") else round(fraction, 6), trial)
        if key not in self._place:
            raise InputError("recorded episode", got=key, allowed=f"oracle, never, or inject at {TIMES}; trials 0 to {self.trials - 1}")
        return self._place[key]

    def picked(self, variant: str, arm: str, fraction: float = math.nan, trial: int = 0) -> list[int]:
        """The options that the model chose in an episode, in order."""
        return self.grid.data["choice_option"][self.grid.data["choice_row"] == self.place(variant, arm, fraction, trial)].tolist()

    def replay(self, variant: Variant, arm: str, fraction: float = 0.5, trial: int = 0) -> Run:
        """The run again, with the recorded choices in place of the model."""
        agent = RecordedChoices(self.picked(variant.id, arm, fraction, trial), name=self.name)
        return self.experiment(variant.dimension).episode(agent, variant, arm=arm, fraction=fraction, trial=trial)

    def scores(self, dimension: str, k: int, **rules: float) -> tuple[np.ndarray, int, ForcedInjection]:
        """pass@k (variants, never + the five times + oracle), the k that was possible, and the experiment; it was recorded under one setting."""
        counted, k = self._cells[dimension], min(k, self.trials)
        columns = [counted.at("never"), *(counted.at("inject", f) for f in TIMES), counted.at("oracle")]
        return counted.score(k)[:, columns], k, self.experiment(dimension)

    def runs(self, experiment: ForcedInjection, variant: Variant, fraction: float) -> list[Run]:
        """Full request, never told, told at the nearest recorded time."""
        nearest = min(TIMES, key=lambda f: abs(f - fraction))
        return [self.replay(variant, arm, nearest) for arm in ("oracle", "never", "inject")]


class _NoTokenizer:
    """Stands where a tokenizer would; a replay reads nothing."""


class RecordedChoices(HFChoiceAgent):
    """An agent that takes its choices from a list, where a model would score the options. Raises: InputError when the list runs out."""

    def __init__(self, options: Sequence[int], *, name: str = "lm"):
        super().__init__(None, _NoTokenizer(), name=name)
        self._list = list(options)

    def reset(self, variant: Any, text: str, seed: int, rng: np.random.Generator) -> None:
        """Begin a job, at the first choice of the list."""
        super().reset(variant, text, seed, rng)
        self._left = iter(self._list)

    def _choose(self) -> str:
        option = next(self._left, None)
        if option is None:
            raise InputError("recorded choices", got=f"{len(self._list)}, all used", allowed="as many as the run makes")
        return self.variant.options[option]


def as_in_paper(table: Outcomes) -> Outcomes:
    """The rows of the paper's conditions: full request, never told, told at .1 to .9; what is left can be joined with other agents' rows."""
    inner = np.isclose(table["fraction"].astype(float)[:, None], TIMES, atol=1e-5).any(1)
    return table.where((table["arm"] == "oracle") | (table["arm"] == "never") | ((table["arm"] == "inject") & inner))


def loss_by_commitment(
    table: Outcomes, commitment: Sequence[Mapping[str, Any]], agent: str, *, fraction: float = 0.5, k: int = 3, n: int = 2000,
) -> tuple[Interval, np.ndarray, np.ndarray]:
    """Over all variants: rank correlation of C(t), of the actions taken, with what waiting until t loses, oracle - told; bootstrap over templates.

    Returns the interval and both vectors. Raises: InputError when there is no variation to correlate.
    """
    counted = cells(table, agent)
    score = counted.score(k)
    loss = score[:, counted.at("oracle")] - score[:, counted.at("inject", fraction)]
    share = {row["variant"]: row["taken"] for row in commitment if row["agent"] == agent and abs(row["fraction"] - fraction) < 1e-6}
    committed = np.array([share[v] for v in counted.variants.tolist()])
    return spearman(committed, loss, counted.template, n=n), committed, loss


def waste_contrast(table: Outcomes, a: str, b: str, fraction: float) -> Interval:
    """Wasted share of the actions before the message, agent a minus agent b, paired by variant; bootstrap over templates."""
    means = []
    for agent in (a, b):
        part = table.where(agent=agent, arm="inject", fraction=fraction)
        variants, first, row = np.unique(part["variant"], return_index=True, return_inverse=True)
        means.append(np.bincount(row, part["wasted"]) / np.bincount(row))
    resampling = Resampling(part["template"][first])
    return resampling.interval(*resampling.mean(means[0] - means[1]), "paired cluster bootstrap")
