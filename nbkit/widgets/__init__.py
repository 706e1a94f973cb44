"""Widgets: a panel that turns a pure function into a live figure, its controls, the look of figures, and the static site.

None of the other rooms is imported here: a panel receives functions. Names load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Panel": "nbkit.widgets.panel:Panel",
    "controls": "nbkit.widgets.controls",
    "figures": "nbkit.widgets.figures",
    "site": "nbkit.widgets.site",
    "theme": "nbkit.widgets.theme",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    target = _LAZY.get(name)
    if target is None:
        raise AttributeError(f"module 'nbkit.widgets' has no attribute {name!r}; public names: {', '.join(__all__)}")
    module, _, attribute = target.partition(":")
    value = importlib.import_module(module)
    return getattr(value, attribute) if attribute else value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
