"""nbkit: research papers as live notebooks, backed by methods that work on your own models.

Names are loaded on first use, so that ``import nbkit`` stays quick and pulls in neither torch nor plotly.

>>> import nbkit
>>> "Panel" in dir(nbkit)
True
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Where each public name lives: "module" for a whole room, "module:attribute" for one object in it.
_LAZY = {
    "Claims": "nbkit.claims:Claims",
    "Panel": "nbkit.widgets:Panel",
    "Preset": "nbkit.presets:Preset",
    "check": "nbkit.check",
    "doctor": "nbkit.doctor",
    "errors": "nbkit.errors",
    "gallery": "nbkit.gallery",
    "kernels": "nbkit.kernels",
    "load_long_tasks": "nbkit.loaders:load_long_tasks",
    "load_model": "nbkit.loaders:load_model",
    "load_recording": "nbkit.loaders:load_recording",
    "load_text": "nbkit.loaders:load_text",
    "parallel": "nbkit.parallel",
    "preset": "nbkit.presets:preset",
    "stamp": "nbkit.doctor:stamp",
}

__all__ = [*_LAZY, "build_path", "data_path"]

# stamp() reports the wall time of a notebook from here.
_IMPORTED_AT = time.time()


def __getattr__(name: str) -> Any:
    target = _LAZY.get(name)
    if target is None:
        raise AttributeError(f"module 'nbkit' has no attribute {name!r}; public names: {', '.join(sorted(__all__))}")
    module, _, attribute = target.partition(":")
    value = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def project_path(*parts: str) -> Path | None:
    """The folder of the project's checkout (the one with pyproject.toml), or None when only the package is installed."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "pyproject.toml").is_file():
        return None
    return root.joinpath(*parts)


def data_root() -> Path | None:
    """The data folder itself, whether or not it exists: NBKIT_DATA if set, else ``data/`` beside the package; None without a checkout."""
    setting = os.environ.get("NBKIT_DATA")
    root = Path(setting).expanduser() if setting else project_path("data")
    return None if root is None else root.resolve()


def data_path(*parts: str) -> Path:
    """The path of a file or folder of the project's data, which must exist.

    Looked up under the environment variable NBKIT_DATA if it is set, else in ``data/`` beside the package.

    Raises: MissingResourceError when there is no data folder or the file is not in it; InputError when the path leaves it.
    """
    from nbkit.errors import InputError, MissingResourceError

    root = data_root()
    name = "/".join(parts)
    if root is None:
        raise MissingResourceError(
            f"project data {name!r}", got="an installation without the project's data folder", allowed="a checkout of the project or NBKIT_DATA",
            hint="install from a clone with pip install -e . or point NBKIT_DATA to a copy of data/",
        )
    path = root.joinpath(*parts)
    if root not in (path.resolve(), *path.resolve().parents):
        raise InputError("path below the data folder", got=name, allowed=f"paths inside {root}")
    if not path.exists():
        raise MissingResourceError(
            f"project data {name!r}", got="no such file or folder", allowed=f"what lies under {root}",
            hint="see `python -m nbkit train` for the recipes that make it",
        )
    return path


def build_path(*parts: str) -> Path:
    """The path of a file or folder below the build folder (environment variable NBKIT_BUILD, else ``build/``); need not exist."""
    setting = os.environ.get("NBKIT_BUILD")
    root = Path(setting).expanduser() if setting else (project_path("build") or Path.cwd() / "build")
    return root.resolve().joinpath(*parts)
