"""Errors that say what is wrong, what was given, what is allowed and what to try.

Every error of the package derives from :class:`NbkitError` and, beside it, from the built-in class that a caller who has never
heard of nbkit would catch (``ValueError`` for input, ``RuntimeError`` for work that could not be done).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BackendError",
    "ClaimError",
    "HashMismatchError",
    "InputError",
    "MissingResourceError",
    "NbkitError",
    "RunError",
    "UnsupportedModelError",
]

# None is a value that a user can pass, so "not given" needs a mark of its own.
_ABSENT: Any = object()


class NbkitError(Exception):
    """Base of all errors of nbkit; built from parts and printed as one sentence and one suggestion.

    >>> print(InputError("keep", got=3, allowed=">= 20 (4 sinks + 16 recent)", hint="raise keep or lower sinks/recent"))
    keep: got 3, allowed >= 20 (4 sinks + 16 recent). Try: raise keep or lower sinks/recent.
    >>> print(RunError("the recipe stopped", hint="run it again, it goes on where it stopped"))
    the recipe stopped. Try: run it again, it goes on where it stopped.
    """

    def __init__(self, what: str, *, got: Any = _ABSENT, allowed: Any = _ABSENT, hint: str | None = None):
        self.what = what
        self.got = None if got is _ABSENT else got
        self.allowed = None if allowed is _ABSENT else allowed
        self.hint = hint
        parts = []
        if got is not _ABSENT:
            parts.append(f"got {got}" if isinstance(got, str) else f"got {got!r}")
        if allowed is not _ABSENT:
            parts.append(f"allowed {allowed}")
        text = f"{what}: {', '.join(parts)}" if parts else what
        text = text if text.endswith((".", "!", "?")) else text + "."
        if hint:
            text += f" Try: {hint}" + ("" if hint.endswith((".", "!", "?")) else ".")
        self.message = text
        super().__init__(text)

    def __reduce__(self):
        # Errors cross process borders in parallel.map; the default would call the class without its keywords.
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(cls: type[NbkitError], state: dict[str, Any]) -> NbkitError:
    """Make an error again from its attributes, in another process."""
    error = cls.__new__(cls, state["message"])
    error.__dict__.update(state)
    error.args = (state["message"],)
    return error


class InputError(NbkitError, ValueError):
    """An argument, a file or an environment variable that the called function cannot accept."""


class UnsupportedModelError(InputError):
    """A model, cache or layer kind for which the method is not defined."""


class RunError(NbkitError, RuntimeError):
    """Work that was accepted and could not be finished."""


class MissingResourceError(RunError):
    """Weights, text, a recording or a program that is not on this machine; the message says where it was looked for."""


class HashMismatchError(RunError):
    """A file whose content is not the pinned one; it is never used."""


class BackendError(RunError):
    """A kernel backend that was forced and cannot run; the message says why."""


class ClaimError(RunError, AssertionError):
    """A claim that is missing, cannot be judged, or came out weaker than the notebook expects."""
