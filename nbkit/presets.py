"""Sizes of an experiment, chosen in one visible place: the environment variable NBKIT_PRESET."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

from nbkit.errors import InputError

__all__ = ["NAMES", "Preset", "preset"]

T = TypeVar("T")

NAMES = ("smoke", "demo", "full")


@dataclass(frozen=True, repr=False)
class Preset:
    """One of three sizes: ``smoke`` (CI, seconds), ``demo`` (a laptop, minutes), ``full`` (a GPU or an evening).

    Raises: InputError for another name.

    >>> Preset("smoke").pick(smoke=4, demo=16, full=200)
    4
    """

    name: str = "demo"

    def __post_init__(self):
        if self.name not in NAMES:
            raise InputError("NBKIT_PRESET", got=self.name, allowed=", ".join(NAMES), hint="NBKIT_PRESET=demo, or leave it unset")

    def pick(self, *, smoke: T, demo: T, full: T) -> T:
        """The value that belongs to this preset; all three are required, so that no size is hidden."""
        return {"smoke": smoke, "demo": demo, "full": full}[self.name]

    def __repr__(self) -> str:
        return f"preset {self.name} (to change it, set NBKIT_PRESET to {' | '.join(NAMES)} and run this cell again)"


def preset() -> Preset:
    """The preset that NBKIT_PRESET names now; ``demo`` when it is unset or empty.

    Raises: InputError for an unknown name.
    """
    return Preset(os.environ.get("NBKIT_PRESET") or "demo")
