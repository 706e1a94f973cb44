"""What an agent is: told a job once, asked for one call at a time, told late messages, and labelled by what it really is."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from nbkit.envs.office import Call, plan
from nbkit.errors import InputError

__all__ = ["KINDS", "VERIFY", "Agent", "PlanAgent", "read_value"]

KINDS = ("scripted simulation", "trained toy", "real model")
VERIFY = Call("verify")
"""Looking again at what was done so far; a late message costs a number of these."""


def read_value(variant: Any, text: str) -> str | None:
    """The word of the hidden slot that a text states in the sentence of that slot; None when it states none.

    >>> from nbkit.envs.office import OfficeOps
    >>> v = OfficeOps().variants[0]
    >>> read_value(v, v.full) == v.answer, read_value(v, v.masked), read_value(v, v.segment) == v.answer
    (True, None, True)
    """
    if variant.segment in text:
        return variant.answer
    before, word, after = variant.segment.partition(variant.answer)
    return next((option for option in variant.options if word and before + option + after in text), None)


class Agent:
    """Base of all agents: bookkeeping of messages, and the ``verify`` actions that a late one costs.

    A subclass defines `next_call(observation) -> Call | None` (None ends the episode) and `kind`, one of :data:`KINDS`. `reset` gets the job as a
    text and a random generator that is the same in every condition of a trial. Everything an agent knows comes from `text`, `tell`, observations and,
    for some, the plan. Raises: InputError for a name that is not text.
    """

    kind = "scripted simulation"

    def __init__(self, name: str):
        if not isinstance(name, str) or not name:
            raise InputError("name of an agent", got=name, allowed="text")
        self.name = name
        self.plan = plan

    @property
    def describe(self) -> str:
        """Name and label, for tables and figures."""
        return f"{self.name} ({self.kind})"

    def reset(self, variant: Any, text: str, seed: int, rng: np.random.Generator) -> None:
        """Begin a job."""
        self.variant, self.rng, self.acted = variant, rng, 0
        self._verify = 0

    def tell(self, text: str) -> None:
        """Receive a message of the user. One that comes before any action costs nothing."""
        if self.acted:
            self._verify += self.variant.reverify

    def act(self, observation: Any) -> Call | None:
        """The next call, or None to stop."""
        self.acted += 1
        if self._verify:
            self._verify -= 1
            return VERIFY
        return self.next_call(observation)

    def next_call(self, observation: Any) -> Call | None:
        """The next call of the agent's own choosing."""
        raise NotImplementedError

    def observed(self, call: Call, observation: Any) -> None:
        """Hear what a call gave, after every action."""

    def absorbed(self) -> bool | None:
        """Whether the first hidden word used after a message is the one it stated; None when there was no such message or use."""
        return None

    def entropy(self) -> float | None:
        """Entropy in nats of the next choice of the hidden word, None when the next action asks for none or the agent cannot say."""
        return None

    def irreversible(self) -> bool:
        """Whether a wrong action that cannot be taken back has been done; agents without a plan do not know and say no."""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}: {self.kind})"


class PlanAgent(Agent):
    """An agent that walks the plan of a job and fills in the hidden word, as it knows or guesses it, step by step.

    `done` maps step numbers to the word with which each was done last, `history` lists (step, word) of all calls but ``verify``. Nothing here looks
    at which steps depend on the word.
    """

    def reset(self, variant: Any, text: str, seed: int, rng: np.random.Generator) -> None:
        """Begin a job; without the word in the text a guess is drawn, uniformly."""
        super().reset(variant, text, seed, rng)
        guess = variant.options[int(rng.integers(variant.k))]
        self.known = read_value(variant, text)
        self.value = self.known or guess
        self.plans: dict[str, list[Any]] = {}
        self.length = len(self.steps(self.value))
        self.done: dict[int, str] = {}
        self.history: list[tuple[int, str]] = []
        self.order: Any = range(self.length)
        self._at = 0
        self._queue: deque[int] = deque()
        self._message: str | None = None
        self._absorbed: bool | None = None

    def steps(self, word: str) -> list[Any]:
        """The plan with that word."""
        found = self.plans.get(word)
        if found is None:
            found = self.plans[word] = self.plan(self.variant, word)
        return found

    def tell(self, text: str) -> None:
        """Receive a message; if it states the word, `learn` it."""
        super().tell(text)
        stated = read_value(self.variant, text)
        if stated is not None:
            self.known = self._message = stated
            self._absorbed = None
            self.learn(stated)

    def learn(self, word: str) -> None:
        """React to the word that a message stated."""
        self.value = word

    def word(self, step: int, observation: Any) -> str:
        """The word to use at a step."""
        return self.value

    def choose_step(self, observation: Any) -> int | None:
        """Number of the next step: first what is queued for repair, then the plan in order."""
        if self._queue:
            return self._queue.popleft()
        if self._at < self.length:
            self._at += 1
            return self.order[self._at - 1]
        return None

    def next_call(self, observation: Any) -> Call | None:
        """The call of the next step that is not a second try at something that cannot be repeated."""
        for _ in range(2 * self.length):
            step = self.choose_step(observation)
            if step is None:
                return None
            word = self.word(step, observation)
            chosen = self.steps(word)[step]
            if not chosen.undoable and step in self.done:
                continue
            self.done[step] = word
            self.history.append((step, word))
            if self._message is not None and self._absorbed is None and chosen.fields:
                self._absorbed = word == self._message
            return chosen.call
        return None

    def absorbed(self) -> bool | None:
        return self._absorbed

    def entropy(self) -> float | None:
        """A uniform guess while the word is unknown, nothing to choose afterwards."""
        step = self._queue[0] if self._queue else self.order[self._at] if self._at < self.length else None
        if step is None or not self.steps(self.value)[step].fields:
            return None
        return math.log(self.variant.k) if self.known is None else 0.0

    def irreversible(self) -> bool:
        """Whether a step whose outcome depends on the word was done with a wrong one and cannot be repeated."""
        right, steps = self.variant.answer, self.steps(self.variant.answer)
        return any(word != right and steps[i].depends and not steps[i].undoable for i, word in self.done.items())
