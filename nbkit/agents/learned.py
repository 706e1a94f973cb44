"""A small network that learned a job by imitation: which step comes next and which word to use. A trained toy.

It is shown call sequences only. Which steps depend on the hidden word it is never told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nbkit.envs.office import DIMENSIONS
from nbkit.errors import InputError

from .protocol import PlanAgent

__all__ = ["LearnedPolicy", "build_policy", "demonstrations"]

STEPS, WORDS, TEMPLATES = 56, 8, 21
"""Longest plan, most words of a slot, most templates that the network has inputs for."""
FEATURES = 2 * (WORDS + 1) + (STEPS + 1) + STEPS + TEMPLATES + len(DIMENSIONS)
_LAST, _DONE = 2 * (WORDS + 1), 2 * (WORDS + 1) + STEPS + 1


def build_policy(config: Mapping[str, int]) -> Any:
    """The network: two hidden layers, logits of the next step (the last one: stop) and of the word. (batch, FEATURES) -> (batch, STEPS + 1 + WORDS).

    >>> sum(p.numel() for p in build_policy({"hidden": 128}).parameters()) < 100_000
    True
    """
    from torch import nn

    hidden = int(config["hidden"])
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, STEPS + 1 + WORDS),
    )


class _View:
    """What the network sees: the word it was told, the word it used last, the last step, and which calls it would make now have been made."""

    def __init__(self, variant: Any, plans: Mapping[str, list[Any]], length: int):
        self.options, self.plans, self.length = variant.options, plans, length
        self.x = np.zeros(FEATURES, np.float32)
        self.x[[0, WORDS + 1, _LAST]] = 1
        self.x[_DONE + STEPS + variant.template] = 1
        self.x[_DONE + STEPS + TEMPLATES + DIMENSIONS.index(variant.slot)] = 1
        self._known = self._used = self._last = 0

    def know(self, word: str, done: Mapping[int, str]) -> None:
        """Set the word that was told; calls made with other arguments than the word now asks for count as -1."""
        self._known = self._move(0, self._known, 1 + self.options.index(word))
        for step, used in done.items():
            self.x[_DONE + step] = 1 if self.plans[word][step].call == self.plans[used][step].call else -1

    def did(self, step: int, word: str, known: str | None) -> None:
        """Set the step done last, and its word if the call holds one."""
        self._last = self._move(_LAST, self._last, 1 + step)
        if self.plans[word][step].fields:
            self._used = self._move(WORDS + 1, self._used, 1 + self.options.index(word))
        same = known is None or known == word or self.plans[known][step].call == self.plans[word][step].call
        self.x[_DONE + step] = 1 if same else -1

    def _move(self, base: int, old: int, new: int) -> int:
        self.x[base + old] = 0
        self.x[base + new] = 1
        return new

    @property
    def used(self) -> int | None:
        """Index of the word used last, None before the first."""
        return self._used - 1 if self._used else None


def demonstrations(suite: Any, *, n: int, masked: float = 0.3, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Oracle call sequences to imitate: (m, FEATURES) views, (m,) next steps (STEPS: stop), (m,) words (-1 where the call holds none).

    In a share ``masked`` of the ``n`` sequences the word is hidden at first, a random one is used, and the right one is revealed at a random
    moment or not at all: the sequence then goes back to the first call that the right word changes and repeats the oracle's calls from there. Calls
    are compared; dependencies and results play no part. Raises: InputError for a share outside 0-1 or plans longer than the network has inputs for.
    """
    from .protocol import plan

    if not 0 <= masked <= 1:
        raise InputError("masked", got=masked, allowed="0 to 1")
    rng = np.random.default_rng(seed)
    views, steps, words = [], [], []
    for number in range(n):
        variant = suite.variants[number % len(suite.variants)]
        plans = {word: plan(variant, word) for word in variant.options}
        length = len(plans[variant.options[0]])
        if length > STEPS or variant.k > WORDS or variant.template >= TEMPLATES:
            raise InputError("suite", got=f"{variant.id}: {length} steps, {variant.k} words", allowed=f"{STEPS} steps, {WORDS} words")
        right, guess = (variant.options[int(rng.integers(variant.k))] for _ in range(2))
        hidden = rng.random() < masked
        reveal = int(rng.integers(1, length + 2)) if hidden else 0
        view, done, known, word, at = _View(variant, plans, length), {}, None, guess if hidden else right, 0
        made = 0
        while True:
            if made == reveal and known is None:
                known = right
                view.know(right, done)
                changed = [i for i, used in done.items() if plans[used][i].call != plans[right][i].call]
                word, at = right, min(changed, default=at)
            views.append(view.x.copy())
            stop = at >= length
            steps.append(STEPS if stop else at)
            words.append(-1 if stop or not plans[word][at].fields else variant.options.index(word))
            if stop:
                break
            # What cannot be repeated is passed over without an action; the network still names it, as it does not see which steps those are.
            if at not in done or plans[word][at].undoable:
                done[at] = word
                made += 1
            view.did(at, word, known)
            at += 1
    return np.stack(views), np.array(steps), np.array(words)


class LearnedPolicy(PlanAgent):
    """A network of two hidden layers that imitates oracle call sequences with the hidden word masked in a share of them.

    At each step it names the next step of the job and, where the call holds the hidden word, that word: drawn from its probabilities while it knows
    nothing, the most likely one afterwards. Fit it with :meth:`fit`, or take the one the project trained with :meth:`load`.
    Raises: InputError when it is used before either.
    """

    kind = "trained toy"

    def __init__(self, *, hidden: int = 128, seed: int = 0, name: str = "learned"):
        super().__init__(name)
        self.hidden, self.seed = hidden, seed
        self.network_: Any = None
        self._layers: list[tuple[np.ndarray, np.ndarray]] = []

    def fit(
        self, suite: Any, *, sequences: int = 6000, updates: int = 3000, batch: int = 512, lr: float = 2e-3, masked: float = 0.3,
    ) -> LearnedPolicy:
        """Imitate the plans of a suite by cross-entropy; about a minute on one core with the default sizes."""
        import torch
        from torch.nn import functional as F

        x, step, word = (torch.from_numpy(a) for a in demonstrations(suite, n=sequences, masked=masked, seed=self.seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = build_policy({"hidden": self.hidden})
            optimizer = torch.optim.Adam(network.parameters(), lr=lr)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=updates)
            self.history_ = []
            for update in range(updates):
                rows = torch.randint(len(x), (batch,))
                out = network(x[rows])
                loss = F.cross_entropy(out[:, : STEPS + 1], step[rows]) + F.cross_entropy(out[:, STEPS + 1 :], word[rows], ignore_index=-1)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
                if update % 100 == 99:
                    self.history_.append(round(loss.item(), 4))
        return self.use(network)

    @classmethod
    def load(cls, name: str = "clarify-policy") -> LearnedPolicy:
        """The policy that the project trained. Raises: MissingResourceError when it is not there."""
        from nbkit.loaders import load_model

        network = load_model(name, device="cpu").model
        return cls(hidden=network[0].out_features).use(network)

    def use(self, network: Any) -> LearnedPolicy:
        """Act by this network."""
        self.network_ = network
        linear = [layer for layer in network if hasattr(layer, "weight")]
        # A few numbers a step: NumPy answers in microseconds where torch needs a tenth of a millisecond.
        self._layers = [(layer.weight.detach().cpu().numpy().T.copy(), layer.bias.detach().cpu().numpy().copy()) for layer in linear]
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes get the weights as arrays and need no torch.
        return {**self.__dict__, "network_": None}

    def reset(self, variant: Any, text: str, seed: int, rng: np.random.Generator) -> None:
        """Begin a job."""
        if not self._layers:
            raise InputError("LearnedPolicy", got="no weights", allowed="a fitted policy", hint="LearnedPolicy().fit(suite) or LearnedPolicy.load()")
        super().reset(variant, text, seed, rng)
        plans = {word: self.steps(word) for word in variant.options}
        self._view = _View(variant, plans, self.length)
        self._logits: np.ndarray | None = None
        if self.known is not None:
            self._view.know(self.known, self.done)

    def learn(self, word: str) -> None:
        self._view.know(word, self.done)

    def _look(self) -> int | None:
        """Run the network on the present view: the next step, None to stop."""
        x = self._view.x
        for weight, bias in self._layers[:-1]:
            x = np.maximum(x @ weight + bias, 0)
        weight, bias = self._layers[-1]
        self._logits = x @ weight + bias
        step = int(self._logits[: STEPS + 1].argmax())
        return step if step < self.length else None

    def choose_step(self, observation: Any) -> int | None:
        return self._look()

    def _odds(self) -> np.ndarray:
        score = self._logits[STEPS + 1 : STEPS + 1 + self.variant.k]
        p = np.exp(score - score.max())
        return p / p.sum()

    def entropy(self) -> float | None:
        """Entropy of the network's next word in nats; None when the next call holds none."""
        step = self._look()
        if step is None or not self.steps(self.value)[step].fields:
            return None
        p = self._odds()
        return float(-(p * np.log(np.maximum(p, 1e-300))).sum())

    def word(self, step: int, observation: Any) -> str:
        if self.steps(self.value)[step].fields:
            p = self._odds()
            drawn = self.known is None and self._view.used is None
            self.value = self.variant.options[int(self.rng.choice(len(p), p=p)) if drawn else int(p.argmax())]
        self._view.did(step, self.value, self.known)
        return self.value
