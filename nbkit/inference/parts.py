"""What can change how a model reads a prompt: rules that drop rows, that thin out attention, or that shrink the cache; by name and kind."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from nbkit.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from nbkit.inference.session import Run

__all__ = ["KINDS", "PARTS", "Attention", "Eviction", "Part", "Rows", "get", "register"]

KINDS = ("rows", "attention", "eviction")


class Part:
    """One rule. What it learns while a prompt is read belongs in ``run.state[self]``, so one part can serve many prompts.

    Subclasses are best frozen dataclasses: they are keys of ``run.state``.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = ""


class Rows(Part):
    """Chooses which rows (tokens) the next layers still read.

    prune_at: "pre" drops rows before a layer, "post_attn" already between attention and FFN of the layer before it.
    last_row_only: the last layer computes query, attention and FFN for its last row alone, which changes no logits there.
    """

    kind: ClassVar[str] = "rows"
    prune_at: str = "pre"
    last_row_only: bool = False

    def prefilter(self, run: Run, model: Any, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Choose prompt tokens before layer 0: (indices, positions), both (k,), or None for all of them.

        ids: (1, tokens). indices: strictly increasing. positions: strictly increasing; either the original ones (equal to the
        indices, and decoding goes on at position ``tokens``) or new ones, and decoding goes on behind the last of them.
        """
        return None

    def keep(self, run: Run, layer: int) -> Tensor | None:
        """Before ``layer`` (1..layers-1): strictly increasing int64 indices into the rows alive now, the last row among them; None = all."""
        return None

    def observe(self, run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        """See the rotated q (1, heads, n, d) and k, v (1, kv_heads, n, d) of ``layer``, before its attention is computed."""


class Attention(Part):
    """Computes the attention of the prefill."""

    kind: ClassVar[str] = "attention"

    def attend(self, run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Attention output (1, heads, n, d_v) of rotated q (1, heads, n, d) over k, v (1, kv_heads, n, d), the last n rows of the keys.

        Report the work with ``run.charge(layer, pairs=..., probe=...)``; without it the layer counts as dense.
        """
        raise NotImplementedError


class Eviction(Part):
    """Chooses which cache entries each key head keeps, once a layer has read the prompt."""

    kind: ClassVar[str] = "eviction"

    def keep(self, run: Run, layer: int, k: Tensor, v: Tensor, queries: Tensor, positions: Tensor) -> Tensor | None:
        """Strictly increasing int64 slots (1, kv_heads, m); None = all.

        k, v: (1, kv_heads, n, d). queries: the last rotated rows (1, heads, <= 64, d). positions: (n,) original positions.
        """
        raise NotImplementedError


PARTS: dict[str, dict[str, type[Part]]] = {kind: {} for kind in KINDS}
"""Registered part classes by kind and name."""

_P = TypeVar("_P", bound=type[Part])


def register(part: _P) -> _P:
    """Enter a part class in :data:`PARTS` under its kind and name; use it as a decorator.

    Raises: InputError for a class without a kind or name, or a name that another class has.

    >>> @register
    ... class Nothing(Rows):
    ...     name = "doctest-nothing"
    >>> PARTS["rows"].pop("doctest-nothing") is Nothing
    True
    """
    if getattr(part, "kind", None) not in KINDS or not getattr(part, "name", ""):
        raise InputError("part", got=part.__name__, allowed="a subclass of Rows, Attention or Eviction with a name")
    other = PARTS[part.kind].get(part.name)
    # The same class once more is a reloaded module.
    if other is not None and (other.__module__, other.__qualname__) != (part.__module__, part.__qualname__):
        raise InputError("name of a part", got=f"{part.name!r}, taken by {other.__qualname__}", allowed="a name of its own")
    PARTS[part.kind][part.name] = part
    return part


def get(kind: str, name: str, **options: Any) -> Part:
    """Make the registered part ``name`` of ``kind``.

    Raises: InputError for an unknown kind or name; it lists the known ones. The module that registers a part has to be imported before.

    >>> get("rows", "no-such-rule")
    Traceback (most recent call last):
    nbkit.errors.InputError: rows part: got no-such-rule, allowed ...
    """
    if kind not in KINDS:
        raise InputError("kind of a part", got=kind, allowed=", ".join(KINDS))
    known = PARTS[kind]
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1)
        raise InputError(f"{kind} part", got=str(name), allowed=", ".join(sorted(known)) or "none registered yet",
                         hint=f"{near[0]!r}" if near else "import the method that registers it")
    return known[name](**options)
