"""The notebook contract: `lint` reads a source notebook, `execute` runs one, `audit` reads what came out.

An executed notebook that raised nothing is not yet right: widgets swallow errors, figures can be empty, warnings scroll by.
`audit` looks at the outputs themselves.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbkit.errors import InputError, RunError

MAX_BYTES = 60 * 1024
MAX_LINES = 25
# The index is a table of contents: it makes no claim and has no panel of its own.
INDEX = "index"

_PLOTLY = "application/vnd.plotly.v1+json"
_VIEW = "application/vnd.jupyter.widget-view+json"
_STATE = "application/vnd.jupyter.widget-state+json"
_ID = re.compile(r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$")
_RANDOM_ID = re.compile(r"^[0-9a-f]{8}(-[0-9a-f]{4}){0,3}(-[0-9a-f]{12})?$")
_ABSOLUTE = re.compile(r"^(/(home|root|tmp|work|usr|opt|mnt|media|data|content|Users|var|srv|private|Volumes)(/|$)|[A-Za-z]:[\\/]|~[/\\]|\\\\)")
_INSTALL = re.compile(r"(^|[\s!%;])(pip3?|conda|mamba|uv|apt(-get)?)\s+(\w+\s+)?install\b")
# What may stay in the text although it holds a decimal point: code, mathematics, links, and numbers that name a place or a version.
_NOT_PROSE = re.compile(r"```.*?```|~~~.*?~~~|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$|\]\([^)]*\)|<https?://[^>]*>|https?://\S+", re.DOTALL)
_NAMED = re.compile(
    r"(?i)\b(sections?|sec|§|eqs?|equations?|figures?|figs?|tables?|tabs?|appendix|app|chapters?|arxiv|doi|python|version|v|step|theorem|lemma|claim)\.?[\s:]*"
    r"\(?[A-Z]?\d+(\.\d+)+(\s*(,|and|to|–|-)\s*[A-Z]?\d+(\.\d+)+)*|§\s*\d+(\.\d+)+|^\s*\d+(\.\d+)+\s",
    re.MULTILINE,
)
_FLOAT = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\.\d)(e-?\d+)?")
_PROGRESS = re.compile(r"\d+%\||\d+it \[|it/s\]|s/it\]|B/s\]")


@dataclass(frozen=True)
class Problem:
    """One broken rule: where, and what to do about it."""

    path: str
    where: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path} [{self.where}] {self.rule}: {self.text}"


@dataclass(frozen=True)
class Record:
    """What one execution cost. peak_mb: memory of the kernel and its children together, in MiB; slowest_cell: its id and seconds."""

    notebook: str
    seconds: float
    peak_mb: float
    cells: int
    slowest_cell: str = ""
    slowest_seconds: float = 0.0
    preset: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report."""
        return asdict(self)


# Source notebooks.


def lint(path: str | Path) -> list[Problem]:
    """Rules of the notebook contract that `path` breaks; an empty list is what we want."""
    path = Path(path)
    problems: list[Problem] = []

    def report(where: str, rule: str, text: str) -> None:
        problems.append(Problem(path.name, where, rule, text))

    size = path.stat().st_size
    if size > MAX_BYTES:
        report("file", "size", f"{size / 1024:.0f} KB, allowed {MAX_BYTES // 1024} KB; move code to nbkit and data to a loader")
    book = _read(path)
    if (book.get("nbformat"), book.get("nbformat_minor", 0) >= 5) != (4, True):
        report("file", "format", "save as nbformat 4.5 or newer (cell ids)")
    _lint_metadata(book.get("metadata", {}), report)
    cells = book.get("cells", [])
    seen: set[str] = set()
    paper = path.stem != INDEX
    sources = "\n".join(_source(cell) for cell in cells if cell.get("cell_type") == "code")
    for i, cell in enumerate(cells):
        where = cell.get("id") or f"cell {i + 1}"
        if not _ID.match(cell.get("id", "")) or _RANDOM_ID.match(cell.get("id", "")):
            report(where, "id", "give the cell a meaningful id of small letters, digits and dashes")
        if cell.get("id") in seen:
            report(where, "id", "used twice")
        seen.add(cell.get("id", ""))
        tags = cell.get("metadata", {}).get("tags", [])
        for tag in ("skip-execution", "allow-errors"):
            if tag in tags:
                report(where, "metadata", f"tag {tag} hides a cell from the tests")
        if cell.get("cell_type") == "code":
            previous = cells[i - 1] if i else {}
            if previous.get("cell_type") != "markdown" or len(_words(_source(previous))) < 3:
                report(where, "text before code", "put a text cell that says what follows before every code cell")
            _lint_code(cell, where, report)
        elif cell.get("cell_type") == "markdown":
            _lint_text(_source(cell), where, report)
            if cell.get("attachments"):
                report(where, "size", "attachments: draw the picture or link it")
        else:
            report(where, "cell type", f"{cell.get('cell_type')!r}, allowed markdown and code")
    for needed, why in (("nbkit.preset(", "read the preset in one visible cell"), (".card()", "close with the claims card"),
                        ("nbkit.stamp(", "end with the stamp"), (".sweep(", "sweep every panel")):
        if paper and needed not in sources:
            report("file", "skeleton", f"no {needed}...: {why}")
    return problems


def _lint_metadata(metadata: Mapping[str, Any], report: Any) -> None:
    kernel = metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        report("file", "kernel", f"{kernel!r}, allowed 'python3'")
    if "widgets" in metadata:
        report("file", "outputs", "widget state is stored: clear it")
    execution = metadata.get("execution", {})
    for key in ("allow_errors", "timeout", "mock", "post_cell_execute"):
        if key in metadata or key in execution:
            report("file", "metadata", f"{key} changes what the tests see")


def _lint_code(cell: Mapping[str, Any], where: str, report: Any) -> None:
    source = _source(cell)
    if cell.get("outputs") or cell.get("execution_count") is not None:
        report(where, "outputs", "clear outputs and execution counts")
    if "execution" in cell.get("metadata", {}):
        report(where, "outputs", "clear the execution times in the cell's metadata")
    count = len(source.rstrip("\n").split("\n"))
    if count > MAX_LINES:
        report(where, "cell length", f"{count} lines, allowed {MAX_LINES}; split it or move code to nbkit")
    if not source.strip():
        report(where, "cell length", "empty code cell")
    if _INSTALL.search(source):
        report(where, "install", "notebooks install nothing: the environment does")
    lines = ["pass  # magic" if line.lstrip().startswith(("%", "!")) else line for line in source.split("\n")]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError as error:
        report(where, "syntax", str(error))
        return
    definitions = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    if len(definitions) > 1:
        report(where, "definitions", f"{', '.join(definitions)}: one a cell")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _ABSOLUTE.match(node.value):
            report(where, "path", f"{node.value!r}: use the loaders or nbkit.data_path")
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in ("filterwarnings", "simplefilter", "catch_warnings", "set_verbosity_error"):
            report(where, "warnings", f"{name}: mend the cause instead of hiding the message")
    if re.search(r"^\s*%%capture", source, re.MULTILINE):
        report(where, "warnings", "%%capture hides output")


def _lint_text(text: str, where: str, report: Any) -> None:
    prose = _NAMED.sub(" ", _NOT_PROSE.sub(" ", text))
    for found in _FLOAT.finditer(prose):
        around = prose[max(0, found.start() - 20):found.end() + 10].replace("\n", " ").strip()
        report(where, "number in text", f"'...{around}...': results come from variables, numbers of the paper go in a code span")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _source(cell: Mapping[str, Any]) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _read(path: Path) -> dict[str, Any]:
    try:
        book = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("notebook", got=f"{path.name}: {error}", allowed="a readable .ipynb file") from None
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise InputError("notebook", got=f"{path.name}: no cells", allowed="a Jupyter notebook of format 4")
    return book


# Executed notebooks.


def audit(path: str | Path) -> list[Problem]:
    """What is wrong in the outputs of an executed notebook, widget state included; an empty list is what we want."""
    path = Path(path)
    book = _read(path)
    problems: list[Problem] = []
    panels: dict[str, str] = {}
    swept: set[str] = set()
    html_seen = ""
    models = book.get("metadata", {}).get("widgets", {}).get(_STATE, {}).get("state", {})

    def report(where: str, rule: str, text: str) -> None:
        problems.append(Problem(path.name, where, rule, text))

    code = [cell for cell in book["cells"] if cell.get("cell_type") == "code"]
    for i, cell in enumerate(code):
        where = cell.get("id") or f"code cell {i + 1}"
        expected = "raises-exception" in cell.get("metadata", {}).get("tags", [])
        if cell.get("execution_count") is None and _source(cell).strip():
            report(where, "not run", "the cell was not executed")
        for output in cell.get("outputs", []):
            if not (expected and output.get("output_type") == "error"):
                _audit_output(output, where, report)
            data = output.get("data", {})
            page = _joined(data.get("text/html", ""))
            html_seen += page
            swept |= {_unescape(title) for title in re.findall(r'class="nbkit-sweep" data-panel="([^"]*)"', page)}
            view = models.get(data.get(_VIEW, {}).get("model_id", ""), {}).get("state", {})
            for title in _panel_titles(view, models):
                panels.setdefault(title, where)
            note = output.get("metadata", {}).get("nbkit", {})
            if "panel" in note:
                panels.setdefault(note["panel"], where)
    for model in models.values():
        state = model.get("state", {})
        for output in state.get("outputs", []) if isinstance(state.get("outputs"), list) else []:
            _audit_output(output, f"widget {model.get('model_name')}", report)
        if _is_bar(state) and state.get("error"):
            report(f"panel {state.get('title')!r}", "widget error", str(state["error"]).split("\n")[0])
    for title, where in panels.items():
        if title not in swept:
            report(where, "sweep", f"panel {title!r} is shown but never swept: call panel.sweep() in a later cell")
    if path.stem != INDEX:
        if "nbkit-claims" not in html_seen:
            report("file", "claims", "no claims card in the outputs")
        if "nbkit-stamp" not in html_seen:
            report("file", "stamp", "no stamp in the outputs")
        if not panels:
            report("file", "panel", "no panel is shown")
    return problems


def _is_bar(state: Mapping[str, Any]) -> bool:
    return "indices" in state and "spec" in state and "title" in state


def _panel_titles(state: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    """Titles of the panels inside the box that a cell displays."""
    if _is_bar(state):
        yield state["title"]
    for child in state.get("children", []) if isinstance(state.get("children"), list) else []:
        yield from _panel_titles(models.get(str(child).removeprefix("IPY_MODEL_"), {}).get("state", {}), models)


def _audit_output(output: Mapping[str, Any], where: str, report: Any) -> None:
    kind = output.get("output_type")
    if kind == "error":
        report(where, "error", f"{output.get('ename')}: {output.get('evalue')}")
    if kind == "stream" and output.get("name") == "stderr":
        lines = [line for line in re.split(r"[\r\n]+", _joined(output.get("text", ""))) if line.strip() and not _PROGRESS.search(line)]
        if lines:
            report(where, "stderr", " / ".join(lines)[:300])
    data, note = output.get("data", {}), output.get("metadata", {}).get("nbkit", {})
    if _PLOTLY in data:
        from nbkit.widgets.panel import trace_problem

        traces = data[_PLOTLY].get("data", [])
        if not traces:
            report(where, "empty figure", "a plotly figure without traces")
        for k, trace in enumerate(traces):
            if problem := trace_problem(trace):
                report(where, "empty figure", f"trace {k} {problem}")
        if not (note.get("alt") or (data[_PLOTLY].get("layout", {}).get("meta") or {}).get("alt")):
            report(where, "alt", "a figure without a text summary: use nbkit.widgets.figures.caption or the alt of the panel")
    if "image/png" in data:
        if not note.get("alt"):
            report(where, "alt", "a picture without a text summary: use nbkit.widgets.figures.caption")
        if note.get("marks") == 0 or _blank(_joined(data["image/png"])):
            report(where, "empty figure", "the picture shows nothing")


def _blank(png: str) -> bool:
    """Whether all pixels of a base64 PNG are the same."""
    import matplotlib.image

    try:
        pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(png)), format="png")
    except Exception:  # whatever the decoder raises: a picture that cannot be read shows nothing
        return True
    return bool((pixels == pixels[:1, :1]).all())


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _unescape(text: str) -> str:
    import html

    return html.unescape(text)


# Running.


class MemoryWatch:
    """Peak memory (MiB) of a process and all its descendants, sampled while the block runs.

    Pages that processes share are counted once for each of them, so this is an upper estimate.
    """

    def __init__(self, pid: int | None = None, interval: float = 0.1):
        self.pid, self.interval, self.peak_mb = pid, interval, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> float:
        """Memory now, in MiB; 0 before a process is known or after it is gone."""
        import psutil

        if self.pid is None:
            return 0.0
        total = 0
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(self.pid)
            for process in [parent, *parent.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
        return total / 2**20

    def _loop(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self.sample())
            if self._stop.wait(self.interval):
                return


def environment(preset: str) -> dict[str, str]:
    """Environment of a kernel that runs a notebook for the export: one thread, the preset, static figures beside the panels."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    return dict(os.environ) | one | {"NBKIT_PRESET": preset, "NBKIT_EXPORT": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline",
                                     "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def execute(path: str | Path, out: str | Path, preset: str = "demo", timeout: float = 600.0) -> Record:
    """Run the notebook `path` in a fresh kernel of this interpreter and write the executed copy to `out`; `path` is not touched.

    timeout: seconds for the whole notebook; the kernel and its children are then killed. The copy is written even when a cell fails.

    Raises: RunError at the time limit, naming the cell; nbclient's CellExecutionError when a cell fails.
    """
    import nbformat
    import zmq
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    path, out = Path(path), Path(out)
    if out.resolve() == path.resolve():
        raise InputError("out", got=str(out), allowed="another file than the notebook itself")
    if not timeout > 0:
        raise InputError("timeout", got=timeout, allowed="> 0 seconds")
    _read(path)
    book = nbformat.read(path, as_version=4)
    out.parent.mkdir(parents=True, exist_ok=True)

    class ThisInterpreter(AsyncKernelManager):
        """The kernel of the running interpreter, whatever kernel specs are installed; its sockets are encrypted where that can be had."""

        def _transport_encryption_default(self) -> str:
            return "auto" if zmq.has("curve") else "disabled"

        @property
        def kernel_spec(self) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(**(get_kernel_dict() | {"argv": argv, "name": "python3"}))

    started: dict[int, float] = {}
    seconds: dict[int, float] = {}
    state = {"cell": 0, "late": False}
    watch = MemoryWatch()

    def on_start(cell: Any, cell_index: int) -> None:
        state["cell"] = cell_index
        started[cell_index] = time.perf_counter()
        if watch.pid is None:
            watch.pid = _kernel_pid(client)

    def on_done(cell: Any, cell_index: int, **_: Any) -> None:
        seconds[cell_index] = time.perf_counter() - started[cell_index]

    client = NotebookClient(
        book, timeout=None, kernel_name="python3", kernel_manager_class=ThisInterpreter, resources={"metadata": {"path": str(out.parent)}},
        on_cell_start=on_start, on_cell_executed=on_done,
    )

    def kill() -> None:
        state["late"] = True
        _kill_tree(_kernel_pid(client))

    begin = time.perf_counter()
    timer = threading.Timer(timeout, kill)
    timer.daemon = True
    timer.start()
    try:
        with watch:
            client.execute(env=environment(preset))
    except Exception as error:
        if not state["late"]:
            raise
        cell = book.cells[state["cell"]]
        raise RunError(f"notebook {path.name}", got=f"still running in cell {cell.get('id')!r} after {timeout:g} s", allowed=f"{timeout:g} s in all",
                       hint="use a smaller preset or a longer timeout") from error
    finally:
        timer.cancel()
        nbformat.write(book, out)
    slowest = max(seconds, key=seconds.get, default=None)
    name = "" if slowest is None else book.cells[slowest].get("id", "")
    took, longest = round(time.perf_counter() - begin, 2), round(seconds.get(slowest, 0.0), 2)
    return Record(path.stem, took, round(watch.peak_mb, 1), len(seconds), name, longest, preset)


def _kernel_pid(client: Any) -> int | None:
    provisioner = getattr(client.km, "provisioner", None)
    return getattr(provisioner, "pid", None)


def _kill_tree(pid: int | None) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        if pid is not None:
            parent = psutil.Process(pid)
            for process in [*parent.children(recursive=True), parent]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
