"""Scripted agents: decision rules that know the plan of a job and which of its steps depend on the hidden word. Simulations, not models."""

from __future__ import annotations

from typing import Any

import numpy as np

from .protocol import PlanAgent

__all__ = ["Deferring", "Eager", "Restart"]


class Eager(PlanAgent):
    """Works in the order of the plan with a guessed word; after a message repeats exactly the dependent steps that were done with another word.

    >>> Eager()
    Eager('eager': scripted simulation)
    """

    def __init__(self, name: str = "eager"):
        super().__init__(name)

    def learn(self, word: str) -> None:
        self.value = word
        steps = self.steps(word)
        wrong = [i for i, used in self.done.items() if used != word and steps[i].depends and steps[i].undoable]
        self._queue.clear()
        self._queue.extend(sorted(wrong))


class Deferring(Eager):
    """Does first what does not depend on the hidden word; reacts to a message as :class:`Eager` does."""

    def __init__(self, name: str = "defer"):
        super().__init__(name)

    def reset(self, variant: Any, text: str, seed: int, rng: np.random.Generator) -> None:
        super().reset(variant, text, seed, rng)
        steps = self.steps(self.value)
        self.order = sorted(range(self.length), key=lambda i: steps[i].depends)


class Restart(PlanAgent):
    """Works like :class:`Eager` and starts over when a message states the word, whether its guess was right or wrong."""

    def __init__(self, name: str = "restart"):
        super().__init__(name)

    def learn(self, word: str) -> None:
        self.value = word
        self._at = 0
