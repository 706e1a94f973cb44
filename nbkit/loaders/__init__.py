"""Loaders: an object and where it came from, by name.

Language models (:func:`load_model`, :func:`save_model`), text (:func:`load_text`), long prompts with known answers
(:func:`load_long_tasks`) and recordings (:func:`load_recording`, :func:`save_recording`). Everything is looked for on this machine first,
checked against its pinned sha256, and refused when it does not match. Nothing is fetched unless the caller allows it, and no file that
could carry code is ever opened.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Document": "text",
    "HubModel": "models",
    "LoadedModel": "models",
    "LongPrompt": "long_tasks",
    "LongTaskSet": "long_tasks",
    "MODELS": "models",
    "PackageModel": "models",
    "ProjectModel": "models",
    "Provenance": "provenance",
    "Recording": "recordings",
    "TASKS": "long_tasks",
    "TEXTS": "text",
    "TextSet": "text",
    "list_models": "models",
    "load_long_tasks": "long_tasks",
    "load_model": "models",
    "load_recording": "recordings",
    "load_text": "text",
    "load_tokenizer": "models",
    "save_model": "models",
    "save_recording": "recordings",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'nbkit.loaders' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"nbkit.loaders.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
