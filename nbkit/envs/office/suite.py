"""The suite of variants and the episodes that agents play."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from nbkit.envs.office.answer import expected, verdict
from nbkit.envs.office.desk import LASTING, Desk
from nbkit.envs.office.jobs import JOBS
from nbkit.envs.office.memory import MemoryDesk
from nbkit.envs.office.plans import plan
from nbkit.envs.office.types import DIMENSIONS, Call, Check, Observation, Step, Variant
from nbkit.envs.office.world import world
from nbkit.errors import InputError, RunError

__all__ = ["Episode", "OfficeOps", "intervene"]

_BACKENDS = ("memory", "disk")
# How many words each kind of slot can hold unless told otherwise.
_OPTIONS = {"goal": 6, "input": 6, "constraint": 4, "context": 4}


class Episode:
    """One run of one job: `observe`, then `step` after `step`, then `check`. Leaving a ``with`` block removes what was on disk.

    `trace` holds (call, answer) for every action, `actions` their number, `messages` (actions before it, text) for every late message,
    `pending` the ``verify`` actions that are still owed for late messages.

    >>> suite = OfficeOps()
    >>> variant = suite.variants[0]
    >>> with suite.make(variant, seed=0) as episode:
    ...     for step in plan(variant):
    ...         _ = episode.step(step.call)
    ...     episode.check().passed, episode.actions == len(plan(variant))
    (True, True)
    """

    def __init__(self, variant: Variant, *, seed: int, backend: str = "memory", root: str | os.PathLike | None = None, budget: int | None = None):
        if backend not in _BACKENDS:
            raise InputError("back end", got=backend, allowed=" or ".join(_BACKENDS))
        if budget is not None and budget < 1:
            raise InputError("budget", got=budget, allowed=">= 1 action, or None")
        self.variant, self.backend, self.root, self.budget = variant, backend, root, budget
        self._desk: Desk | None = None
        self.reset(seed)

    def reset(self, seed: int | None = None) -> Observation:
        """Start again, from another seed if one is given; returns the first observation."""
        self.close()
        self.seed = self.seed if seed is None else int(seed)
        start = world(self.variant.template, self.seed)
        if self.backend == "memory":
            self._desk = MemoryDesk(start, self.variant.lasting, self.variant.reverify)
        else:
            from nbkit.envs.office.disk import DiskDesk

            self._desk = DiskDesk(start, self.variant.lasting, self.variant.reverify, parent=self.root)
        self.trace: list[tuple[Call, str]] = []
        self.messages: list[tuple[int, str]] = []
        self._last = Observation("The papers are on your desk.", True, self.budget)
        return self._last

    @property
    def actions(self) -> int:
        """How many actions were taken, those that were refused included."""
        return len(self.trace)

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self.budget is not None and len(self.trace) >= self.budget

    @property
    def pending(self) -> int:
        """How many ``verify`` actions are owed before anything else is accepted."""
        return self._open().pending

    def _open(self) -> Desk:
        if self._desk is None:
            raise RunError("the episode is closed", hint="reset() starts it again")
        return self._desk

    @property
    def folder(self) -> Path:
        """The episode's temporary folder. Raises: RunError for the memory back end, which has none."""
        folder = self._open().folder
        if folder is None:
            raise RunError("the memory back end has no folder", hint='backend="disk"')
        return folder

    def observe(self) -> Observation:
        """What the last action answered."""
        return self._last

    def step(self, call: Call) -> Observation:
        """Take one action. A call that is refused changes nothing and counts as an action.

        Raises: InputError when `call` is no Call; RunError when the budget is used up or the episode is closed.
        """
        if self._desk is None or not isinstance(call, Call) or self.done:
            self._open()
            if not isinstance(call, Call):
                raise InputError("action", got=type(call).__name__, allowed="a Call", hint='Call("read", {"path": "notes/rules.txt"})')
            raise RunError(f"the budget of {self.budget} actions is used up")
        text, ok = self._desk.do(call)
        self.trace.append((call, text))
        self._last = Observation(text, ok, None if self.budget is None else self.budget - len(self.trace))
        return self._last

    def tell(self, text: str) -> None:
        """Note a message from the user; once work has begun it costs `variant.reverify` verify actions."""
        desk = self._open()
        self.messages.append((len(self.trace), text))
        if self.trace:
            desk.tell()

    def check(self) -> Check:
        """Compare final bytes and rows with the answer worked out from the records."""
        variant = self.variant
        return verdict(expected(variant.template, self.seed, tuple(variant.slots.items()), variant.lasting), self._open())

    def close(self) -> None:
        """Remove what the episode left on disk; a second call does nothing."""
        if self._desk is not None:
            self._desk.close()
            self._desk = None

    def __enter__(self) -> Episode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class OfficeOps:
    """Up to 84 variants: 21 office jobs, each with its goal, input, constraint or context missing.

    `options`: how many words the hidden slot can hold (one number, or one per dimension; default 6, 6, 4, 4).
    `irreversible`: share of the doings that can be final (posting a joined table, notice, purge, commit, mail) that are.
    `reverify`: actions that a late message costs. `relabel`: which slot is really hidden under each label, a permutation of the dimensions.

    Raises: InputError for numbers out of range, unknown dimensions or back ends, or a `relabel` that is no permutation.

    >>> suite = OfficeOps()
    >>> len(suite.variants), suite.variants[0].segment
    (84, 'It is about the valley branch only.')
    """

    def __init__(
        self, n_templates: int = 21, dims: Sequence[str] = DIMENSIONS, *, seed: int = 0, options: int | Mapping[str, int] | None = None,
        irreversible: float = 0.2, reverify: int = 1, backend: str = "memory", relabel: Mapping[str, str] | None = None,
    ):
        if not 1 <= n_templates <= len(JOBS):
            raise InputError("templates", got=n_templates, allowed=f"1 to {len(JOBS)}")
        unknown = [name for name in dims if name not in DIMENSIONS]
        if unknown or not dims or len(set(dims)) < len(dims):
            raise InputError("dimensions", got=", ".join(map(str, dims)) or "none", allowed=f"some of {', '.join(DIMENSIONS)}, each once")
        if not 0 <= irreversible <= 1:
            raise InputError("irreversible share", got=irreversible, allowed="0 to 1")
        if int(reverify) != reverify or reverify < 0:
            raise InputError("re-verify cost", got=reverify, allowed="0, 1, 2, ... actions")
        if backend not in _BACKENDS:
            raise InputError("back end", got=backend, allowed=" or ".join(_BACKENDS))
        relabel = dict(zip(DIMENSIONS, DIMENSIONS)) if relabel is None else {**dict(zip(DIMENSIONS, DIMENSIONS)), **relabel}
        if sorted(relabel) != sorted(DIMENSIONS) or sorted(relabel.values()) != sorted(DIMENSIONS):
            raise InputError("relabelling", got=relabel, allowed=f"a permutation of {', '.join(DIMENSIONS)}")
        given = dict.fromkeys(DIMENSIONS, options) if isinstance(options, int) else {**_OPTIONS, **(options or {})}
        if any(name not in DIMENSIONS or not 1 <= k <= 8 for name, k in given.items()):
            raise InputError("options of the hidden slot", got=given, allowed="1 to 8 per dimension")
        self.seed, self.irreversible, self.reverify, self.backend, self.relabel = seed, irreversible, int(reverify), backend, relabel
        self.dims = tuple(dims)
        self.variants: tuple[Variant, ...] = tuple(
            self._variant(template, dimension, relabel[dimension], given[dimension]) for template in range(n_templates) for dimension in self.dims
        )

    def _variant(self, template: int, dimension: str, slot: str, k: int) -> Variant:
        job = JOBS[template]
        # One generator per purpose, so that another share or another k leaves everything else as it was.
        orders = {name: random.Random(f"words/{self.seed}/{job.name}/{name}").sample(getattr(job, name).words, 8) for name in DIMENSIONS}
        slots = {name: order[0] for name, order in orders.items()}
        chances = random.Random(f"lasting/{self.seed}/{job.name}")
        lasting = frozenset(name for name in LASTING if chances.random() < self.irreversible)
        options = tuple(word for word in getattr(job, slot).words if word in orders[slot][:k])
        sentences = {name: getattr(job, name).sentence.format(slots[name]) for name in DIMENSIONS}
        fixed = _fixed(job)
        return Variant(
            id=f"{job.name}-{dimension}", template=template, dimension=dimension, slot=slot, k=k, options=options, truth=options.index(slots[slot]),
            seed=self.seed, full=" ".join([job.opening, *sentences.values(), *fixed]),
            masked=" ".join([job.opening, *(text for name, text in sentences.items() if name != slot), *fixed]), segment=sentences[slot],
            facts=tuple(text for name, text in sentences.items() if name != slot), slots=slots, lasting=lasting, reverify=self.reverify,
        )

    def make(
        self, variant: Variant, *, seed: int = 0, backend: str | None = None, root: str | os.PathLike | None = None, budget: int | None = None,
    ) -> Episode:
        """An episode of a variant. `seed` draws the data, `root` is the folder for the temporary folder of the disk back end.

        Raises: InputError for an unknown back end, a `root` that is no folder, or a budget below 1.
        """
        return Episode(variant, seed=seed, backend=backend or self.backend, root=root, budget=budget)

    def plan(self, variant: Variant, value: str | None = None) -> list[Step]:
        """The same as the function `plan`."""
        return plan(variant, value)


def _fixed(job) -> list[str]:
    """Sentences about what no slot leaves open."""
    context = f"Amounts are counted in {job.fixed}." if job.context.kind == "mark" else f"Rows marked {job.fixed} do not count."
    rule = [] if job.constraint.kind in ("round", "exclude") else [f"Round to {job.rounding}."]
    keep = [f"Clear out the old folder, all but the {job.keep}."] if job.keep else []
    return [context, *rule, *keep, "Thank you!"]


def intervene(variant: Variant, value: str, *, seed: int = 0) -> list[bool]:
    """Which actions of the plan change, in call or in result, when the hidden word is `value` and not the right one.

    Both plans run from the same seed, each in an office of its own.

    >>> suite = OfficeOps()
    >>> variant = suite.variants[0]
    >>> changed = intervene(variant, next(word for word in variant.options if word != variant.answer))
    >>> changed == [step.depends for step in plan(variant)]
    True
    """
    traces = []
    for word in (variant.answer, value):
        with Episode(variant, seed=seed) as episode:
            for step in plan(variant, word):
                episode.step(step.call)
            traces.append(episode.trace)
    return [one != other for one, other in zip(*traces)]
