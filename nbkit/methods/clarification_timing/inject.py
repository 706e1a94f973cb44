"""Forced injection: the missing sentence reaches the agent after a fixed share of the oracle's actions, and nothing else differs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nbkit import parallel
from nbkit.envs.office import Call, Episode, OfficeOps, Variant, plan
from nbkit.errors import InputError

from .outcomes import ARMS, COLUMNS, Outcomes

TIMINGS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
# Without a budget an agent that never stops is cut off at this many times the oracle's actions.
_RUNAWAY = 20
_BITS = ("passed", "delivered", "irreversible", "stopped")


def moment(fraction: float, oracle_actions: int) -> int | None:
    """Actions before the message: max(1, round(f T)); 0 stands for "with the request", 1 for "after the last action", when nothing can follow (None).

    Raises: InputError for a fraction outside 0-1.

    >>> moment(0.1, 24), moment(0.01, 24), moment(0, 24), moment(1, 24)
    (2, 1, 0, None)
    """
    if not 0 <= fraction <= 1:
        raise InputError("time of the injection", got=fraction, allowed="0 to 1, a share of the oracle's actions")
    if fraction == 1:
        return None
    return 0 if fraction == 0 else max(1, round(fraction * oracle_actions))


def sham_message(variant: Variant) -> str:
    """Known facts, as many words as the missing sentence has.

    >>> v = OfficeOps().variants[0]
    >>> len(sham_message(v).split()) == len(v.segment.split()), v.answer in sham_message(v)
    (True, False)
    """
    words, wanted = " ".join(variant.facts).split(), len(variant.segment.split())
    return " ".join((words * (1 + wanted // len(words)))[:wanted])


def budget_actions(budget: float, oracle_actions: int) -> int:
    """Actions that a run may take: floor(rho T); without a limit (inf) twenty times the oracle's.

    >>> budget_actions(1.2, 24), budget_actions(math.inf, 24)
    (28, 480)
    """
    return _RUNAWAY * oracle_actions if math.isinf(budget) else math.floor(budget * oracle_actions + 1e-9)


@dataclass(frozen=True)
class Run:
    """One finished episode: its row of the table, what it did, and when the message came (None: not at all)."""

    row: dict[str, Any]
    trace: list[tuple[Call, str]]
    reasons: tuple[str, ...]
    message_at: int | None
    marks: tuple[str, ...]


@dataclass(frozen=True)
class ForcedInjection:
    """The experiment: every variant under every condition, with the same worlds and guesses in all of them.

    suite: the jobs; timings: shares of the oracle's actions at which the message comes; trials: worlds and guesses a variant; budget: rho, times the
    oracle's actions (inf: none); sham: also send a message of the same length without news at the same times; seed: of worlds and guesses.
    The oracle is one and the same for all agents: the plan with the right word. Raises: InputError for numbers out of range.
    Source: arXiv 2605.07937, forced injection with an oracle-calibrated budget; the sham arm is ours.
    """

    suite: OfficeOps
    timings: tuple[float, ...] = TIMINGS
    trials: int = 5
    budget: float = 1.2
    sham: bool = True
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "timings", tuple(sorted({float(f) for f in self.timings})))
        for fraction in self.timings:
            moment(fraction, 20)
        if self.trials < 1 or int(self.trials) != self.trials:
            raise InputError("trials", got=self.trials, allowed=">= 1")
        if not self.budget >= 1:
            raise InputError("budget", got=self.budget, allowed=">= 1, times the oracle's actions", hint="math.inf for none")

    @property
    def conditions(self) -> list[tuple[str, float]]:
        """(arm, fraction) in the order they are run: late messages first, so that a model can reuse what it has read."""
        late = sorted(self.timings, reverse=True)
        injected = [(arm, f) for arm in (("inject", "sham") if self.sham else ("inject",)) for f in late]
        return [("oracle", math.nan), ("never", math.nan), *injected]

    def run(
        self, agents: Sequence[Any], *, executor: Any = "serial", resume: str | Path | None = None, progress: bool = False,
    ) -> Outcomes:
        """All episodes of all agents as a table.

        executor, resume: as in `nbkit.parallel.map`; an item is one agent on one variant. Variants whose oracle does not pass would be dropped.
        Raises: InputError for no agents or two of one name, RunError when an agent fails.
        """
        names = [agent.name for agent in agents]
        if not names or len(set(names)) < len(names):
            raise InputError("agents", got=", ".join(names) or "none", allowed="at least one, each with a name of its own")
        items = [(a, v) for a in range(len(agents)) for v in range(len(self.suite.variants))]
        results = parallel.map(
            _Cell(self, tuple(agents)), items, executor=executor, resume=resume, key=_Key(self._digest(), tuple(names), self.suite),
            progress=progress, desc="episodes",
        )
        return Outcomes.from_rows(_unpack(row, names[a], self.suite.variants[v]) for (a, v), rows in zip(items, results) for row in rows)

    def episode(self, agent: Any, variant: Variant, *, arm: str = "inject", fraction: float = 0.3, trial: int = 0, backend: str | None = None) -> Run:
        """Play one condition and keep its trace, with a mark for every action.

        Marks: ``verify``; of dependent actions ``wrong`` (done with another word than the right one), ``final`` (so, and not to be taken back) and
        ``dependent`` (done rightly); ``redone`` for what is done rightly once more; ``plain`` for all others.
        """
        if arm not in ARMS:
            raise InputError("arm", got=arm, allowed=", ".join(ARMS))
        limit = budget_actions(self.budget, _oracle(variant)[0])
        with self.suite.make(variant, seed=self._world(trial), backend=backend, budget=limit) as episode:
            row = self._play(episode, agent, variant, arm, fraction, trial)
            check = episode.check()
            trace, at = list(episode.trace), episode.messages[0][0] if episode.messages and row["delivered"] else None
        return Run(row, trace, check.reasons, at, _marks(agent, trace))

    def row(self, agent: Any, variant: Variant, *, arm: str = "inject", fraction: float = 0.3, trial: int = 0) -> dict[str, Any]:
        """Play one condition and return its row of the table, without the trace."""
        if arm not in ARMS:
            raise InputError("arm", got=arm, allowed=", ".join(ARMS))
        with self.suite.make(variant, seed=self._world(trial), budget=budget_actions(self.budget, _oracle(variant)[0])) as episode:
            return _unpack(_pack(self._play(episode, agent, variant, arm, fraction, trial)), agent.name, variant)

    def _world(self, trial: int) -> int:
        return 1000 * self.seed + trial

    def _digest(self) -> str:
        suite = self.suite
        settings = [
            list(self.timings), self.trials, str(self.budget), self.sham, self.seed, suite.seed, suite.irreversible, suite.reverify, suite.backend,
            sorted(suite.relabel.items()),
        ]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]

    def _rng(self, variant: Variant, trial: int) -> np.random.Generator:
        # Neither the agent nor the condition is in the seed: all meet the same luck. The slot is, and not its label: relabelling moves curves.
        return np.random.default_rng([self.seed, variant.template, sum(variant.slot.encode()), trial])

    def _play(self, episode: Episode, agent: Any, variant: Variant, arm: str, fraction: float, trial: int) -> dict[str, Any]:
        """Let the agent work until it stops or the budget is spent; returns the row of the table."""
        oracle_actions, wanted = _oracle(variant)
        at = moment(fraction, oracle_actions) if arm in ("inject", "sham") else None
        text = variant.segment if arm == "inject" else sham_message(variant) if arm == "sham" else ""
        agent.reset(variant, variant.full if arm == "oracle" else variant.masked, episode.seed, self._rng(variant, trial))
        limit, stopped, delivered, lasting = episode.budget, False, False, False
        observation = episode.observe()
        while True:
            if at is not None and not delivered and episode.actions == at:
                lasting = agent.irreversible()
                episode.tell(text)
                agent.tell(text)
                delivered = True
            if episode.actions >= limit:
                break
            call = agent.act(observation)
            if call is None:
                stopped = True
                break
            observation = episode.step(call)
            agent.observed(call, observation)
        if not delivered:
            lasting = agent.irreversible()
        before = [call for call, _ in episode.trace[: at if delivered else None]]
        extra = Counter(call.key() for call in before)
        extra.subtract(wanted)
        wasted = sum(n for n in extra.values() if n > 0)
        absorbed = agent.absorbed() if arm == "inject" and delivered else None
        return {
            "arm": arm, "fraction": fraction if arm in ("inject", "sham") else math.nan, "trial": trial, "passed": episode.check().passed,
            "delivered": delivered, "actions": episode.actions, "wasted": wasted / len(before) if before else 0.0,
            "realised": math.nan if arm not in ("inject", "sham") else 1.0 if at is None else at / oracle_actions,
            "absorbed": -1 if absorbed is None else int(absorbed), "irreversible": lasting, "stopped": stopped, "oracle_actions": oracle_actions,
            "budget": limit,
        }


class _Cell:
    """All conditions and trials of one agent on one variant; a class so that worker processes can import it."""

    def __init__(self, experiment: ForcedInjection, agents: tuple[Any, ...]):
        self.experiment, self.agents = experiment, agents

    def __call__(self, item: tuple[int, int]) -> list[list[Any]]:
        exp, agent = self.experiment, self.agents[item[0]]
        variant = exp.suite.variants[item[1]]
        limit = budget_actions(exp.budget, _oracle(variant)[0])
        rows = []
        for trial in range(exp.trials):
            if not oracle_passes(exp.suite, variant, exp._world(trial)):
                return []
            for arm, fraction in exp.conditions:
                with exp.suite.make(variant, seed=exp._world(trial), budget=limit) as episode:
                    rows.append(_pack(exp._play(episode, agent, variant, arm, fraction, trial)))
        return rows


class _Key:
    """What identifies an item in a file of results."""

    def __init__(self, digest: str, names: tuple[str, ...], suite: OfficeOps):
        self.digest, self.names, self.suite = digest, names, suite

    def __call__(self, item: tuple[int, int]) -> list[Any]:
        variant = self.suite.variants[item[1]]
        return [self.digest, self.names[item[0]], variant.id, variant.k, variant.seed]


def _pack(row: dict[str, Any]) -> list[Any]:
    """A row as a short list that JSON can hold: NaN becomes None, the yes/no columns one number."""
    bits = sum(1 << i for i, name in enumerate(_BITS) if row[name])
    fraction, realised = (None if math.isnan(row[name]) else round(row[name], 6) for name in ("fraction", "realised"))
    return [
        ARMS.index(row["arm"]), fraction, row["trial"], bits, row["actions"], round(row["wasted"], 5), realised, row["absorbed"],
        row["oracle_actions"], row["budget"],
    ]


def _unpack(packed: list[Any], agent: str, variant: Variant) -> dict[str, Any]:
    arm, fraction, trial, bits, actions, wasted, realised, absorbed, oracle_actions, limit = packed
    row = {
        "variant": variant.id, "template": variant.template, "dimension": variant.dimension, "options": variant.k, "agent": agent, "arm": ARMS[arm],
        "fraction": math.nan if fraction is None else fraction, "trial": trial, "actions": actions, "wasted": wasted,
        "realised": math.nan if realised is None else realised, "absorbed": absorbed, "oracle_actions": oracle_actions, "budget": limit,
    }
    row |= {name: bool(bits >> i & 1) for i, name in enumerate(_BITS)}
    return {name: row[name] for name in COLUMNS}


@lru_cache(maxsize=4096)
def _oracle(variant: Variant) -> tuple[int, Counter]:
    """Number and multiset of the oracle's actions."""
    steps = plan(variant)
    return len(steps), Counter(step.call.key() for step in steps)


@lru_cache(maxsize=4096)
def oracle_passes(suite: OfficeOps, variant: Variant, seed: int) -> bool:
    """Whether the plan with the right word passes the check in one world."""
    with suite.make(variant, seed=seed, backend="memory") as episode:
        for step in plan(variant):
            episode.step(step.call)
        return episode.check().passed


def with_word(variant: Variant, word: str) -> Variant:
    """The same job with another right word. Raises: InputError for a word that is none of its options.

    >>> v = OfficeOps().variants[0]
    >>> v.options[0] in with_word(v, v.options[0]).segment
    True
    """
    if word not in variant.options:
        raise InputError("hidden word", got=word, allowed=", ".join(variant.options))
    before, _, after = variant.segment.partition(variant.answer)
    segment = before + word + after
    return dataclasses.replace(
        variant, truth=variant.options.index(word), slots={**variant.slots, variant.slot: word}, segment=segment,
        full=variant.full.replace(variant.segment, segment),
    )


def commitment(
    suite: OfficeOps, agents: Sequence[Any], *, timings: Sequence[float] = TIMINGS, seed: int = 0,
) -> list[dict[str, Any]]:
    """How far a run is committed to the hidden word by the time t, measured by intervention.

    The agent does the job twice from the same seed, told the right word and told another one; an action whose call or result differs is committed.
    Mean over all other words. Returns dicts with variant, template, dimension, agent, fraction, ``taken`` (share of the actions taken by t) and
    ``oracle`` (of all actions of the oracle). Source: arXiv 2605.07937, C_d(t); its denominator is ambiguous there, hence both.
    """
    out = []
    for agent in agents:
        for variant in suite.variants:
            total = _oracle(variant)[0]
            base = _told(suite, agent, variant, seed)
            changes = np.zeros(len(base))
            others = [word for word in variant.options if word != variant.answer]
            for word in others:
                other = _told(suite, agent, with_word(variant, word), seed)
                changes += [i >= len(other) or one != other[i] for i, one in enumerate(base)]
            changes /= max(1, len(others))
            for f in timings:
                at = total if moment(f, total) is None else moment(f, total)
                part = changes[:at]
                row = {"variant": variant.id, "template": variant.template, "dimension": variant.dimension, "agent": agent.name, "fraction": float(f)}
                out.append({**row, "taken": float(part.mean()) if len(part) else 0.0, "oracle": float(part.sum()) / total})
    return out


def _told(suite: OfficeOps, agent: Any, variant: Variant, seed: int) -> list[tuple[Call, str]]:
    """The trace of an agent that got the full request."""
    agent.reset(variant, variant.full, seed, np.random.default_rng([seed, variant.template]))
    with suite.make(variant, seed=seed, budget=budget_actions(math.inf, _oracle(variant)[0])) as episode:
        observation = episode.observe()
        while not episode.done and (call := agent.act(observation)) is not None:
            observation = episode.step(call)
            agent.observed(call, observation)
        return list(episode.trace)


def _marks(agent: Any, trace: list[tuple[Call, str]]) -> tuple[str, ...]:
    """What kind of action each entry of a trace is, see `ForcedInjection.episode`; agents without a plan only verify or act."""
    variant, history = agent.variant, iter(getattr(agent, "history", ()))
    right = plan(variant)
    marks, seen = [], set()
    for call, _ in trace:
        step, word = (None, None) if call.name == "verify" else next(history, (None, None))
        if step is None:
            marks.append("verify" if call.name == "verify" else "plain")
            continue
        if right[step].depends and word != variant.answer:
            marks.append("wrong" if right[step].undoable else "final")
        else:
            marks.append("redone" if step in seen else "dependent" if right[step].depends else "plain")
        seen.add(step)
    return tuple(marks)
