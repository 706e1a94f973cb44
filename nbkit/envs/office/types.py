"""What passes between an agent and the office: calls, observations, variants of a job, steps of a plan, the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nbkit.errors import InputError

__all__ = ["DIMENSIONS", "Call", "Check", "Observation", "Step", "Variant"]

DIMENSIONS = ("goal", "input", "constraint", "context")


@dataclass(frozen=True, eq=False)
class Call:
    """One action: a tool's name and its arguments (text or numbers). Equal when name and arguments are equal.

    Raises: InputError when a name is not text or an argument is neither text nor a number.

    >>> call = Call("round", {"table": "north_rank", "to": "tens"})
    >>> print(call)
    round(table=north_rank, to=tens)
    >>> call.key()
    ('round', '{"table":"north_rank","to":"tens"}')
    >>> call == Call("round", {"to": "tens", "table": "north_rank"})
    True
    """

    name: str
    args: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        good = isinstance(self.name, str) and isinstance(self.args, Mapping)
        if not good or not all(isinstance(key, str) and isinstance(value, (str, int, float)) for key, value in self.args.items()):
            raise InputError("call", got=f"{self.name!r} with {self.args!r}", allowed="a name and a mapping from names to text or numbers")
        text = json.dumps(dict(self.args), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        # Episodes look results up by this key thousands of times a second: it is made once.
        object.__setattr__(self, "_key", (self.name, text))

    def key(self) -> tuple[str, str]:
        """Name and canonical JSON of the arguments."""
        return self._key

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Call) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.args.items())})"


class Observation(NamedTuple):
    """What the office answers: a line of text, whether the action was done, and the actions left (None without a budget)."""

    text: str
    ok: bool
    left: int | None


class Check(NamedTuple):
    """The verdict on what an episode left behind: passed, and one sentence per thing that is not as it should be."""

    passed: bool
    reasons: tuple[str, ...]


class Step(NamedTuple):
    """One action of a plan.

    `depends`: the call or its result changes with the hidden value (declared by data flow; `intervene` measures it).
    `undoable`: doing it again puts a wrong one right. `kind`: inspect, load, clean, derive, output or close.
    `fields`: the arguments in which the hidden value itself stands.
    """

    call: Call
    depends: bool
    undoable: bool
    kind: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """One job with one piece of information missing.

    `dimension` is the label under which it is counted, `slot` the piece that is really hidden (they differ only in a relabelled suite).
    `full` is the request, `masked` the request without the sentence `segment`, `facts` the sentences about the other three slots.
    `options` are the words that the hidden slot can hold, `truth` the index of the right one, `slots` the right word of every slot.
    `lasting` names the tools whose doing cannot be undone; `reverify` is the number of ``verify`` actions that a late message costs.
    """

    id: str
    template: int
    dimension: str
    slot: str
    k: int
    options: tuple[str, ...]
    truth: int
    seed: int
    full: str
    masked: str
    segment: str
    facts: tuple[str, ...]
    slots: Mapping[str, str]
    lasting: frozenset[str] = frozenset()
    reverify: int = 1

    @property
    def answer(self) -> str:
        """The right word of the hidden slot."""
        return self.options[self.truth]

    def __hash__(self) -> int:
        return hash((self.id, self.seed, self.k, self.lasting, self.reverify))
