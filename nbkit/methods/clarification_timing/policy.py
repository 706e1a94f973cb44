"""When to ask: policies that decide before every action, and sessions in which an agent may ask once and gets a true answer at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbkit.envs.office import Variant
from nbkit.errors import InputError
from nbkit.metrics import Interval, wilson

from .inject import ForcedInjection, _oracle, budget_actions
from .measure import DemandCurve, Resampling
from .outcomes import Outcomes

NO_ANSWER = "Sorry, I cannot say anything about that at the moment."


@dataclass(frozen=True)
class State:
    """What a policy sees before an action.

    dimension: what is missing (None: not known); fraction: actions done over the oracle's; entropy: of the agent's next choice of the missing word
    in nats, None when the next action asks for none; options: number of words to choose from.
    """

    dimension: str | None
    fraction: float
    entropy: float | None = None
    options: int = 6


class NeverAsk:
    """Never asks.

    >>> NeverAsk().predict(State("goal", 0.0))
    'act'
    """

    name = "never"

    def predict(self, state: State) -> str:
        """Always "act"."""
        return "act"


class EntropyPolicy:
    """Asks when the agent is unsure of the very next word: entropy above ``theta`` times that of a uniform choice.

    Raises: InputError for theta outside 0-1.

    >>> EntropyPolicy(0.5).predict(State("goal", 0.2, entropy=math.log(6), options=6))
    'ask'
    """

    name = "entropy"

    def __init__(self, theta: float = 0.5):
        if not 0 <= theta <= 1:
            raise InputError("theta", got=theta, allowed="0 to 1, a share of the largest entropy")
        self.theta = theta

    def predict(self, state: State) -> str:
        """ "ask" or "act"."""
        unsure = state.entropy is not None and state.options > 1 and state.entropy > self.theta * math.log(state.options)
        return "ask" if unsure else "act"


class AskPolicy:
    """Asks when a question is worth its cost and waiting for the next measured time would lose value: myopic value of information.

    curve: measured demand curves; cost: of a question, in units of success; agent: whose curve (None: mean over agents).
    Raises: InputError for a negative cost, an unknown agent, or `predict` before `fit`.
    Source: the decision rule is ours; arXiv 2605.07937 measures the demand side only.
    """

    name = "voi"

    def __init__(self, curve: DemandCurve, *, cost: float = 0.02, agent: str | None = None):
        if cost < 0:
            raise InputError("cost of a question", got=cost, allowed=">= 0")
        if agent is not None and agent not in curve.agents:
            raise InputError("agent", got=agent, allowed=", ".join(curve.agents))
        self.curve, self.cost, self.agent = curve, cost, agent

    def fit(self, table: Outcomes | None = None) -> AskPolicy:
        """Read the curves; how often each dimension is missing comes from the table (without one: equally often)."""
        agents = self.curve.agents if self.agent is None else (self.agent,)
        self.timings_ = np.array(self.curve.timings)
        self.voi_ = {d: np.mean([self.curve.array(a, d)[:, 0] for a in agents], 0) for d in self.curve.dimensions}
        counts = {d: 1 if table is None else int((table["dimension"] == d).sum()) for d in self.voi_}
        self.prior_ = {d: n / sum(counts.values()) for d, n in counts.items()}
        return self

    def value(self, dimension: str | None, fraction: float) -> float:
        """Value of information at a time, interpolated; of an unknown dimension its mean under the prior."""
        if not hasattr(self, "voi_"):
            raise InputError("AskPolicy", got="not fitted", allowed="a fitted policy", hint="AskPolicy(curve).fit(table)")
        if dimension is None:
            return sum(p * self.value(d, fraction) for d, p in self.prior_.items())
        if dimension not in self.voi_:
            raise InputError("dimension", got=dimension, allowed=f"None, {', '.join(self.voi_)}")
        return float(np.interp(fraction, self.timings_, self.voi_[dimension]))

    def predict(self, state: State) -> str:
        """ "ask" or "act"."""
        now = self.value(state.dimension, state.fraction)
        later = max((self.value(state.dimension, f) for f in self.timings_ if f > state.fraction), default=-math.inf)
        return "ask" if now > self.cost and now >= later - 1e-12 else "act"


def sessions(
    experiment: ForcedInjection, agent: Any, policies: Sequence[Any], *, tasks: int = 100, answer: bool = True, seed: int = 0,
) -> list[dict[str, Any]]:
    """Unscripted sessions: before every action a policy decides whether to ask; it may ask once and the user answers at once and truly.

    The same ``tasks`` (variants and worlds) for all policies; answer=False: the user says nothing of use, which costs the same. An answer after the
    first action costs the re-verification of the suite. Returns dicts with task, variant, template, dimension, policy, asked, position (actions over
    the oracle's at the question, NaN without one), passed, actions. Raises: InputError for more tasks than there are.
    """
    variants = experiment.suite.variants
    pairs = [(v, t) for t in range(experiment.trials) for v in range(len(variants))]
    if not 1 <= tasks <= len(pairs):
        raise InputError("tasks", got=tasks, allowed=f"1 to {len(pairs)}, variants times trials")
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:tasks]
    out = []
    for task, at in enumerate(chosen):
        variant, trial = variants[pairs[at][0]], pairs[at][1]
        common = {"task": task, "variant": variant.id, "template": variant.template, "dimension": variant.dimension}
        out += [{**common, "policy": policy.name, **_session(experiment, agent, policy, variant, trial, answer)} for policy in policies]
    return out


def _session(experiment: ForcedInjection, agent: Any, policy: Any, variant: Variant, trial: int, answer: bool) -> dict[str, Any]:
    total = _oracle(variant)[0]
    limit = budget_actions(experiment.budget, total)
    with experiment.suite.make(variant, seed=experiment._world(trial), budget=limit) as episode:
        agent.reset(variant, variant.masked, episode.seed, experiment._rng(variant, trial))
        observation, position = episode.observe(), math.nan
        while not episode.done:
            if math.isnan(position):
                state = State(variant.dimension, episode.actions / total, agent.entropy(), variant.k)
                if policy.predict(state) == "ask":
                    position = episode.actions / total
                    text = variant.segment if answer else NO_ANSWER
                    episode.tell(text)
                    agent.tell(text)
            call = agent.act(observation)
            if call is None:
                break
            observation = episode.step(call)
            agent.observed(call, observation)
        passed, actions = episode.check().passed, episode.actions
    return {"asked": not math.isnan(position), "position": position, "passed": passed, "actions": actions}


def in_window(curve: DemandCurve, agent: str, dimension: str, position: float, share: float = 0.95) -> bool:
    """Whether a question at this position is worth at least ``share`` of the largest value of information, between timings by interpolation."""
    voi = curve.array(agent, dimension)[:, 0]
    if math.isnan(position) or voi.max() <= 0:
        return False
    return float(np.interp(position, curve.timings, voi)) >= share * voi.max() - 1e-12


def ask_summary(rows: Sequence[Mapping[str, Any]], curve: DemandCurve, agent: str, *, seed: int = 0) -> list[dict[str, Any]]:
    """By policy: rate of asking and of success (Wilson), mean and median position, share of all sessions that ask inside the optimal window.

    Returns dicts with policy, sessions, ``asked``, ``passed``, ``mean``, ``median`` (NaN if nobody asks) and ``inside`` by dimension and "all".
    """
    out = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]
        positions = np.array([row["position"] for row in mine if row["asked"]])
        row = {"policy": policy, "sessions": len(mine), "asked": wilson(len(positions), len(mine))}
        row["passed"] = wilson(sum(r["passed"] for r in mine), len(mine))
        row["mean"], row["median"] = (float(f(positions)) if len(positions) else math.nan for f in (np.mean, np.median))
        inside = {d: [r for r in mine if d in ("all", r["dimension"])] for d in ("all", *curve.dimensions)}
        row["inside"] = {
            d: wilson(sum(in_window(curve, agent, r["dimension"], r["position"]) for r in part), len(part)) for d, part in inside.items() if part
        }
        out.append(row)
    return out


def window_contrast(
    rows: Sequence[Mapping[str, Any]], curve: DemandCurve, agent: str, a: str, b: str, *, dimension: str = "goal", n: int = 5000, seed: int = 0,
) -> Interval:
    """Share of sessions that ask inside the window, policy a minus policy b, on the same tasks of a dimension; bootstrap over templates.

    Raises: InputError for a policy or dimension without sessions.
    """
    inside = {
        (row["policy"], row["task"]): (float(in_window(curve, agent, row["dimension"], row["position"])), row["template"])
        for row in rows if row["dimension"] == dimension and row["policy"] in (a, b)
    }
    tasks = sorted({task for policy, task in inside if (a, task) in inside and (b, task) in inside})
    if not tasks:
        known = ", ".join(dict.fromkeys(row["policy"] for row in rows))
        raise InputError("sessions", got=f"none of {a} and {b} with dimension {dimension}", allowed=f"policies {known}")
    difference = np.array([inside[a, task][0] - inside[b, task][0] for task in tasks])
    resampling = Resampling(np.array([inside[a, task][1] for task in tasks]), n=n, seed=seed)
    return resampling.interval(*resampling.mean(difference), "paired cluster bootstrap")
