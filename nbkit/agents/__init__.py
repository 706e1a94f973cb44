"""Agents that work in the rooms of :mod:`nbkit.envs`, and the parts they are made of; names load on first use.

Scripted agents are simulations of decision rules, :class:`LearnedPolicy` is a trained toy, :class:`HFChoiceAgent` and
:class:`OpenAICompatibleAgent` are real models; every agent says which in ``describe``.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Agent": "protocol",
    "ChatEndpoint": "endpoint",
    "Choice": "choice",
    "ChoiceScorer": "choice",
    "Deferring": "scripted",
    "Eager": "scripted",
    "HFChoiceAgent": "lm",
    "LearnedPolicy": "learned",
    "OpenAICompatibleAgent": "endpoint",
    "PlanAgent": "protocol",
    "Restart": "scripted",
    "SCORES": "choice",
    "read_value": "protocol",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'nbkit.agents' has no attribute {name!r}; public names: {', '.join(sorted(_LAZY))}")
    value = getattr(importlib.import_module(f"nbkit.agents.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
