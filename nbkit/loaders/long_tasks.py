"""Long prompts with known answers, made from text that ships with installed packages: what a faster way of reading a prompt must not break.

Categories follow long-context suites: *retrieval* (``needle``, ``multikey``, ``tracking``, ``aggregation``, ``qa``), *structure* (``code``,
``table``, ``log``) and *general* (``prose``). The first are scored on an answer whose evidence lies at a known place; the others on their own
continuation. Splits share no document, no wording and no key.

Source: the kinds of task follow RULER (arXiv 2404.06654) and LongBench (arXiv 2308.14508); every prompt is the project's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.loaders import long_templates as words
from nbkit.loaders.long_makers import MAKERS, Task, tools_of
from nbkit.loaders.text import SPLITS

__all__ = ["TASKS", "LongPrompt", "LongTaskSet", "load_long_tasks"]

TASKS: dict[str, str] = {
    "needle": "retrieval", "multikey": "retrieval", "tracking": "retrieval", "aggregation": "retrieval", "qa": "retrieval",
    "code": "structure", "table": "structure", "log": "structure", "prose": "general",
}
"""Category of every kind of task."""

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class LongPrompt:
    """One prompt with its answer.

    Attributes:
        id: unique and stable.
        kind, category: see `TASKS`.
        template: wording or line format it was made with.
        filler: the text it is embedded in or cut from.
        ids: (tokens,) int64 token ids.
        answer: text of the answer.
        answer_ids: (answer tokens,) int64; the first of them carries content.
        evidence: half-open token spans without which the answer cannot be known; empty for the free kinds.
        depth: place of the (first) evidence as a share of the filler, or None.
        inside: how many of the prompt's last tokens can be scored instead of an answer; 0 for the retrieval kinds.
        chance: share of exact answers of a reader who knows the candidates but not the evidence; None for the free kinds.
    """

    id: str
    kind: str
    category: str
    template: str
    filler: str
    ids: np.ndarray = field(repr=False, compare=False)
    answer: str
    answer_ids: np.ndarray = field(repr=False, compare=False)
    evidence: tuple[tuple[int, int], ...]
    depth: float | None
    inside: int
    chance: float | None

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids)


@dataclass(frozen=True)
class LongTaskSet:
    """Prompts of one kind, length and split."""

    kind: str
    category: str
    split: str
    tokens: int
    prompts: tuple[LongPrompt, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[LongPrompt]:
        return iter(self.prompts)

    def __getitem__(self, index: int) -> LongPrompt:
        return self.prompts[index]


def load_long_tasks(
    kind: str, *, n: int = 8, tokens: int = 1024, split: str = "calibration", tokenizer: Any = None, seed: int = 0, filler: str = "prose",
    evidence: bool = True, digits: int = 4, keys: int | None = None, hops: int = 2, depth: float | None = None,
) -> LongTaskSet:
    """Make ``n`` prompts of exactly ``tokens`` tokens; the same arguments give the same prompts.

    Args:
        kind: name in `TASKS`.
        n: how many; places of the evidence cycle through .1, .3, .5, .7 and .9 of the filler.
        tokens: length of every prompt.
        split: ``calibration`` or ``held-out``; they share no document, wording, key or line format.
        tokenizer: of transformers or tokenizers; None for SmolLM2's.
        seed: another seed gives other prompts.
        filler: ``prose`` or ``code``, what needles, keys, variables and votes are hidden in.
        evidence: False leaves the evidence out and asks all the same: the control that no reader can answer from the prompt.
        digits: of the values asked for by needle, multikey and tracking.
        keys: statements that look like evidence, the right one among them (default: 4 for multikey, 1 chain for tracking, 4 options for aggregation).
        hops: statements from a name to its value in tracking; the question names the last of the chain alone.
        depth: one place for all prompts, in [0, 1], instead of the cycle.

    Raises: InputError for an unknown kind or split, numbers out of range, or more text than there is.

    >>> tasks = load_long_tasks("needle", n=2, tokens=512)
    >>> tasks[0].tokens, tasks[0].answer.isdigit(), len(tasks[0].answer_ids)
    (512, True, 4)
    """
    if kind not in TASKS:
        raise InputError("kind", got=kind, allowed=", ".join(TASKS))
    if split not in SPLITS:
        raise InputError("split", got=split, allowed=" or ".join(SPLITS))
    if filler not in ("prose", "code"):
        raise InputError("filler", got=filler, allowed="prose or code")
    keys = keys if keys is not None else {"tracking": 1}.get(kind, 4)
    bounds = {"n": (n, 1, 10_000), "tokens": (tokens, 128, 32_768), "digits": (digits, 1, 9), "keys": (keys, 1 if kind == "tracking" else 2, 7),
              "hops": (hops, 1, 4), "seed": (seed, 0, 2**32)}
    for name, (value, low, high) in bounds.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
            raise InputError(name, got=value, allowed=f"an integer in [{low}, {high}]")
    if depth is not None and not 0 <= depth <= 1:
        raise InputError("depth", got=depth, allowed="a share in [0, 1] or None")
    if kind == "tracking" and keys * hops > len(words.KEYS[split]):
        raise InputError("keys * hops", got=keys * hops, allowed=f"<= {len(words.KEYS[split])}")
    tools = tools_of(tokenizer)
    make = MAKERS[kind]
    prompts = []
    for index in range(n):
        # A generator of its own for every prompt: more prompts change none of the first ones.
        rng = np.random.default_rng([seed, index, int(tokens), *hashlib.sha256(f"{kind}/{split}".encode()).digest()[:4]])
        place = DEPTHS[(index + seed) % len(DEPTHS)] if depth is None else float(depth)
        task = Task(kind, tools, rng, split, int(tokens), index, filler, evidence, place, digits, keys, hops)
        made = make(task)
        if not tools.content(int(made.answer_ids[0])):
            raise InputError("tokenizer", got=f"answer {made.answer!r} that starts with token {tools.piece(made.answer_ids[0])!r}",
                             allowed="tokenizers that do not split off a space before a word or number")
        prompts.append(LongPrompt(
            f"{kind}-{split}-{tokens}-{seed}-{index}" + ("" if evidence else "-absent"), kind, TASKS[kind], made.template, made.filler, made.ids,
            made.answer, made.answer_ids, made.evidence, made.depth, made.inside, made.chance,
        ))
    return LongTaskSet(kind, TASKS[kind], split, int(tokens), tuple(prompts))
