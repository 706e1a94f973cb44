"""A real language model inside a scripted skeleton: the order of the steps is given, every choice of the hidden word is the model's."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbkit.errors import InputError

from .choice import SCORES, Choice, ChoiceScorer
from .protocol import PlanAgent

__all__ = ["HFChoiceAgent"]

# Names of tables are bookkeeping of the skeleton; leaving them out halves what the model has to read.
_SILENT = ("into", "table", "left", "right")
_LONGEST = 48
CUES = ("The user said:", "Note:", "As told:")
"""Three wordings of the question, one for each of three seeds in a row: the choice is greedy, so trials differ in these."""


class HFChoiceAgent(PlanAgent):
    """Works through the plan of a job; the hidden word is whatever the model finds most likely after all it has seen so far.

    The model reads the request, one line for each action (what it found where it listed a folder, and refusals; not the numbers that came out), and
    messages as they came; then one of :data:`CUES` and the sentence of the hidden slot up to its word, which it continues with one of the options. It
    chooses at the first call of each phase (load, clean, derive, output) that holds the word, and once more after a message; if that choice differs
    from an earlier one, the skeleton goes back to the first call made with the earlier word and goes on from there, whatever depends on it or not.

    model, tokenizer: any causal language model of transformers; window: tokens that the model sees: the request and, of the log, the newest lines
    (dropped a quarter of the window at a time, so that what was read stays usable); score: ``sum``, ``mean`` or ``pmi``. `choices` lists what was
    chosen in the last run: (actions before, Choice).
    Raises: InputError for an unknown score or a window below 64.
    """

    kind = "real model"

    def __init__(self, model: Any, tokenizer: Any, *, window: int = 1024, score: str = "sum", name: str = "lm"):
        super().__init__(name)
        if score not in SCORES:
            raise InputError("score", got=score, allowed=", ".join(SCORES))
        if window < 64:
            raise InputError("window", got=window, allowed=">= 64 tokens")
        self.scorer, self.window, self.score = ChoiceScorer(model, tokenizer), window, score

    def reset(self, variant: Any, text: str, seed: int, rng: np.random.Generator) -> None:
        """Begin a job; nothing is drawn at random."""
        super().reset(variant, text, seed, rng)
        # What a scripted agent would read from the text stays unknown here: only the model reads.
        self.known, self.value = None, variant.options[0]
        self.lines: list[str] = []
        self.choices: list[tuple[int, Choice]] = []
        self._head = f"Request: {text}\n\nLog:"
        self._frame = f"{CUES[seed % len(CUES)]} {variant.segment.partition(variant.answer)[0].rstrip()}"
        self._dropped, self._phase, self._again = 0, "", False
        self._sizes: list[int] = []

    def tell(self, text: str) -> None:
        """Receive a message: it goes into the log, and the next step begins with a choice."""
        super().tell(text)
        self.lines.append(f"User: {text}")
        self._again = True

    def learn(self, word: str) -> None:
        """Nothing: the message is in the log, and what the model makes of it shows in its next choice."""

    def observed(self, call: Any, observation: Any) -> None:
        self.lines.append(_line(call, observation))

    @property
    def transcript(self) -> str:
        """What the model sees before the sentence that it continues; the oldest lines are dropped when it outgrows the window."""
        count = self.scorer.count
        self._sizes += [count("\n" + line) for line in self.lines[len(self._sizes) :]]
        fixed = count(self._head) + count("\n" + self._frame)
        if fixed + sum(self._sizes[self._dropped :]) > self.window:
            while self._dropped < len(self.lines) and fixed + sum(self._sizes[self._dropped :]) > 0.75 * self.window:
                self._dropped += 1
        return "\n".join([self._head, *self.lines[self._dropped :]])

    def choice(self) -> Choice:
        """The model's scores of the options now."""
        null = self._frame if self.score == "pmi" else None
        return self.scorer(f"{self.transcript}\n{self._frame}", self.variant.options, null=null)

    def entropy(self) -> float | None:
        """Entropy of the next choice in nats; None when the next step asks for none."""
        step = self.order[self._at] if self._at < self.length else None
        due = step is not None and self.steps(self.value)[step].fields and self.steps(self.value)[step].kind != self._phase
        return self.choice().entropy(self.score) if due or (self._again and self._used()) else None

    def _used(self) -> list[int]:
        """Steps that were done with a call that holds the word."""
        steps = self.steps(self.value)
        return [i for i in self.done if steps[i].fields]

    def _choose(self) -> str:
        found = self.choice()
        self.choices.append((self.acted - 1, found))
        return self.variant.options[found.pick(self.score)]

    def choose_step(self, observation: Any) -> int | None:
        if self._again:
            self._again = False
            used = self._used()
            if used:
                chosen = self._choose()
                if self._message is not None and self._absorbed is None:
                    self._absorbed = chosen == self._message
                stale = [i for i in used if self.done[i] != chosen]
                self.value = chosen
                if stale:
                    self._at = min(stale)
                    self._phase = self.steps(chosen)[self._at].kind
        return super().choose_step(observation)

    def word(self, step: int, observation: Any) -> str:
        now = self.steps(self.value)[step]
        if now.fields and now.kind != self._phase:
            self._phase = now.kind
            self.value = self._choose()
        return self.value


def _line(call: Any, observation: Any) -> str:
    """One line of the log: the tool, its telling arguments, and of the answer what a listing shows or a refusal says."""
    told = " ".join([call.name, *(str(value) for key, value in call.args.items() if key not in _SILENT)])
    shown = not observation.ok or call.name in ("list", "verify")
    return f"- {told}: {observation.text[:_LONGEST]}" if shown else f"- {told}"
