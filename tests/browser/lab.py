"""A real JupyterLab under chromium, driven by the keyboard: helpers of the browser checks, for any notebook with panels."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np

import nbkit
from nbkit.widgets.panel import decoded

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# No phoning home, no sandbox (containers run as root), no GPU.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run", "--disable-component-update",
         "--disable-sync", "--disable-dev-shm-usage"]
_SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "defer"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}
# Reads a plotly figure as plain lists: arrays arrive typed, packed in base64, or as objects with numbered keys.
_SCRIPT = """
window.nbkit = {
  plain(v) {
    if (typeof v === 'number') return Number.isFinite(v) ? v : null;
    if (v === null || typeof v !== 'object') return v === undefined ? null : v;
    if (ArrayBuffer.isView(v)) return Array.from(v, this.plain.bind(this));
    if (Array.isArray(v)) return v.map(this.plain.bind(this));
    if (v.bdata !== undefined) {
      const types = {f8: Float64Array, f4: Float32Array, i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array,
        u4: Uint32Array};
      let buffer = v.bdata;
      if (typeof buffer === 'string') buffer = Uint8Array.from(atob(buffer), c => c.charCodeAt(0)).buffer;
      return this.plain(new types[v.dtype](buffer.buffer || buffer));
    }
    const keys = Object.keys(v);
    return keys.every(k => /^\\d+$/.test(k)) ? keys.map(k => this.plain(v[k])) : null;
  },
  plot(title) {
    for (const panel of document.querySelectorAll('.nbkit-panel'))
      if (panel.querySelector('.nbkit-title').textContent === title) return panel.querySelector('.js-plotly-plot');
    return null;
  },
  data(title, keys) {
    const plot = this.plot(title);
    const pick = t => Object.fromEntries(keys.filter(k => t[k] !== undefined && t[k] !== null).map(k => [k, this.plain(t[k])]));
    return plot && plot.data && plot.data.map(pick);
  },
  watch(title) {
    this.times = [];
    const plot = this.plot(title);
    if (plot.nbkitWatched) return;
    plot.nbkitWatched = true;
    let pressed = null;
    document.addEventListener('keydown', () => { pressed = performance.now(); }, true);
    plot.on('plotly_afterplot', () => requestAnimationFrame(() => {
      // A message posted inside a frame arrives after that frame is painted.
      const channel = new MessageChannel();
      channel.port1.onmessage = () => { if (pressed !== null) { this.times.push(performance.now() - pressed); pressed = null; } };
      channel.port2.postMessage(0);
    }));
  },
};
"""
_KEYS = ("x", "y", "z", "r", "theta", "values", "text")


def missing() -> str:
    """Why the browser checks cannot run here, or an empty string."""
    if CHROMIUM is None:
        return "no chromium found: install it to run the browser checks (Debian: apt-get install chromium)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install playwright (its own browser download is not needed)"
    return ""


@contextlib.contextmanager
def start_lab(notebooks: Sequence[Path], work: Path, *, preset: str = "smoke", dark: bool = False) -> Iterator[str]:
    """A JupyterLab server on loopback over copies of `notebooks`, with settings of its own; yields its address."""
    tree, settings = work / "tree", work / "settings"
    tree.mkdir(parents=True)
    for path in notebooks:
        shutil.copy(path, tree)
    chosen = dict(_SETTINGS) | ({"apputils-extension/themes": {"theme": "JupyterLab Dark"}} if dark else {})
    for name, value in chosen.items():
        file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = dict(os.environ) | {
        "JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTERLAB_WORKSPACES_DIR": str(work / "workspaces"), "JUPYTER_CONFIG_DIR": str(work / "config"),
        "JUPYTER_RUNTIME_DIR": str(work / "runtime"), "JUPYTER_DATA_DIR": str(work / "data"), "NBKIT_PRESET": preset, "OMP_NUM_THREADS": "1",
        "NBKIT_BUILD": str(work / "build"),
    }
    env.pop("NBKIT_EXPORT", None)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
        "--IdentityProvider.token=", f"--ServerApp.root_dir={tree}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None",
        "--LabApp.extension_manager=readonly",
    ]
    with (work / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=tree, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _answering(address, server, work / "server.log")
        yield address
    finally:
        # The server's own session holds its kernels too.
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answering(address: str, server: subprocess.Popen, log: Path) -> None:
    stop = time.monotonic() + 60
    while time.monotonic() < stop:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/api", timeout=2):
            return
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A running chromium (Playwright's Browser), closed at the end; only one at a time in a process."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield running
        finally:
            running.close()


@dataclass
class Watched:
    """What a page said and asked for: console errors, and requests that left this machine."""

    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def attach(self, page: Any) -> None:
        """Listen to `page`."""
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._asked(request.url))

    def _asked(self, url: str) -> None:
        parts = urlparse(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            self.strangers.append(url)


class Notebook:
    """One notebook open in JupyterLab."""

    def __init__(self, browser: Any, address: str, name: str, *, width: int = 1280, height: int = 900):
        self.name, self.watched = name, Watched()
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.watched.attach(self.page)
        self.page.add_init_script(_SCRIPT)
        self.page.goto(f"{address}/lab/tree/{name}?reset")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell", timeout=90_000)
        self._until("jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", 90)

    def _until(self, condition: str, seconds: float) -> None:
        from playwright.sync_api import TimeoutError as Late

        try:
            guarded = f"() => {{ try {{ return {condition} }} catch (e) {{ return false }} }}"
            self.page.wait_for_function(guarded, timeout=1000 * seconds, polling=100)
        except Late:
            picture = nbkit.build_path("browser", f"{Path(self.name).stem}-failed.png")
            picture.parent.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=picture)
            told = f"console: {self.watched.errors}\nscreen: {picture}"
            raise AssertionError(f"{self.name}: still not after {seconds:g} s: {condition}\n{told}") from None

    def run_all(self, seconds: float = 120) -> None:
        """Run every cell and wait until the kernel rests; fails on an error or a message on stderr in any output."""
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells') }")
        code = "jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code' && c.model.sharedModel.getSource().trim())"
        # A cell that fails stops the run: the later ones never get a count.
        failed = f"{code}.some(c => c.model.outputs && [...Array(c.model.outputs.length).keys()].some(i => c.model.outputs.get(i).type === 'error'))"
        self._until(f"({failed}) || {code}.every(c => c.model.executionCount)", seconds)
        self.wait_idle(seconds)
        bad = self.page.evaluate(
            f"() => {code}.flatMap(c => [...Array(c.model.outputs.length).keys()].map(i => c.model.outputs.get(i).toJSON()))"
            ".filter(o => o.output_type === 'error' || o.name === 'stderr')"
            ".map(o => o.output_type === 'error' ? o.ename + ': ' + o.evalue : String(o.text))"
        )
        bad = [text for text in bad if "%|" not in text]
        assert not bad, f"{self.name}: {bad}"

    def wait_idle(self, seconds: float = 30) -> None:
        """Wait until the kernel has nothing to do."""
        self._until("jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'", seconds)

    def ask(self, code: str) -> str:
        """What `code` prints in the notebook's kernel."""
        result = self.page.evaluate(
            """async (code) => {
              const future = jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code, store_history: false});
              let text = '';
              future.onIOPub = (m) => { if (m.header.msg_type === 'stream') text += m.content.text;
                if (m.header.msg_type === 'error') text = 'ERROR ' + m.content.ename + ': ' + m.content.evalue; };
              await future.done;
              return text;
            }""",
            code,
        )
        assert not result.startswith("ERROR "), result
        return result

    def panels(self) -> list[dict[str, Any]]:
        """Title, parameters and slider names of every panel in the kernel, in the order they were made."""
        return json.loads(self.ask(
            "import json as _json, nbkit.widgets as _w\n"
            "_found = {id(v): v for v in list(get_ipython().user_ns.values()) if isinstance(v, _w.Panel)}.values()\n"
            "print(_json.dumps([{'title': p.title, 'params': p.params, 'sliders': {(c.label or n.replace('_', ' ')): n for n, c in p.controls.items()"
            " if c.kind == 'slider'}} for p in _found if p._box is not None], default=str))"
        ))

    def expected(self, title: str) -> list[dict[str, Any]]:
        """The data that a fresh compute and draw of the panel's parameters gives in the kernel."""
        text = self.ask(
            "import nbkit.widgets as _w\n"
            f"print(next(v for v in list(get_ipython().user_ns.values()) if isinstance(v, _w.Panel) and v.title == {title!r}).draw().to_json())"
        )
        return [{key: trace[key] for key in _KEYS if trace.get(key) is not None} for trace in json.loads(text)["data"]]

    def drawn(self, title: str) -> list[dict[str, Any]]:
        """The data of the panel's figure as the browser holds it."""
        return self.page.evaluate("([title, keys]) => nbkit.data(title, keys)", [title, list(_KEYS)])

    def wait_plot(self, title: str, seconds: float = 90) -> None:
        """Bring the panel into view (JupyterLab builds outputs when they come near the screen) and wait until its figure is drawn."""
        drawn = f"nbkit.plot({json.dumps(title)})?.data?.length > 0"
        cells = self.page.evaluate(
            "() => jupyterapp.shell.currentWidget.content.widgets.map((c, i) => [c, i]).filter(([c]) => c.model.type === 'code' &&"
            " [...Array(c.model.outputs.length).keys()].some(k => 'application/vnd.jupyter.widget-view+json' in c.model.outputs.get(k).data))"
            ".map(([c, i]) => i)"
        )
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            for index in cells:
                self.page.evaluate("(i) => { jupyterapp.shell.currentWidget.content.scrollToItem(i, 'start') }", index)
                self.page.wait_for_timeout(500)
                if self.page.evaluate(f"() => {drawn}"):
                    return
        self._until(drawn, 1)

    def slider(self, title: str, label: str) -> Any:
        """Focus a slider by its accessible name and return it."""
        panel = self.page.locator(".nbkit-panel", has=self.page.locator(".nbkit-title", has_text=title)).first
        slider = panel.get_by_role("slider", name=label, exact=True)
        slider.scroll_into_view_if_needed()
        slider.focus()
        return slider

    def at_end(self, title: str, label: str) -> bool:
        """Whether a slider stands in the upper half of its positions."""
        return self.slider(title, label).evaluate("(e) => Number(e.value) > Number(e.max) / 2")

    def positions(self, title: str, label: str) -> int:
        """How many positions a slider has."""
        return self.slider(title, label).evaluate("(e) => Number(e.max) + 1")

    def unnamed(self, title: str) -> list[str]:
        """Controls of a panel without an accessible name."""
        return self.page.evaluate(
            "(title) => [...nbkit.plot(title).closest('.nbkit-panel').querySelectorAll('.nbkit-bar :is(input, select, button)')]"
            ".filter(e => !(e.getAttribute('aria-label') || e.textContent).trim()).map(e => e.outerHTML)", title)

    def close(self) -> None:
        """Close the page; the kernel stays until the server stops."""
        self.page.close()

    def press(self, title: str, label: str, keys: Sequence[str], *, wait: float = 15) -> list[float]:
        """Press keys on a slider one at a time; key-to-paint of each in milliseconds."""
        self.slider(title, label)
        self.page.evaluate("(title) => nbkit.watch(title)", title)
        for i, key in enumerate(keys):
            self.page.keyboard.press(key)
            self._until(f"nbkit.times.length > {i}", wait)
            # The next key comes when the machine is at rest, as from a person who looks at the picture.
            self.page.wait_for_timeout(120)
        return self.page.evaluate("() => nbkit.times")

    def assert_drawn_equals_compute(self, title: str, seconds: float = 10) -> None:
        """The figure in the browser holds what compute gives for the parameters in the kernel."""
        stop = time.monotonic() + seconds
        while True:
            problem = difference(self.drawn(title), self.expected(title))
            if not problem:
                return
            if time.monotonic() > stop:
                raise AssertionError(f"panel {title!r} at {[p['params'] for p in self.panels() if p['title'] == title]}: {problem}")
            time.sleep(0.2)


def difference(drawn: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> str:
    """Where two lists of traces differ, or an empty string."""
    if drawn is None or len(drawn) != len(expected):
        return f"{drawn and len(drawn)} traces drawn, {len(expected)} expected"
    for k, (left, right) in enumerate(zip(drawn, expected, strict=True)):
        if left.keys() != right.keys():
            return f"trace {k}: drawn {sorted(left)}, expected {sorted(right)}"
        for key in left:
            a, b = _flat(left[key]), _flat(right[key])
            if len(a) != len(b):
                return f"trace {k}, {key}: {len(a)} values drawn, {len(b)} expected"
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                numbers = isinstance(x, (int, float)) and isinstance(y, (int, float))
                if not (abs(x - y) <= 1e-9 + 1e-6 * abs(y) if numbers else x == y):
                    return f"trace {k}, {key}[{i}]: drawn {x!r}, expected {y!r}"
    return ""


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = decoded(value).ravel().tolist()
    if not isinstance(value, list):
        return [value]
    out: list[Any] = []
    for item in value:
        out.extend(_flat(item) if isinstance(item, list) else [None if isinstance(item, float) and not np.isfinite(item) else item])
    return out
