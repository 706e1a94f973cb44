"""Panel: a pure function, its controls and a drawing of its result, alive in Jupyter and checkable without it.

    panel = Panel(compute, {"keep": controls.integer(32, 512, 128)}, draw, title="Budget", alt=describe)
    panel            # controls and one live figure
    panel.sweep()    # raises if any setting is broken: an executed notebook alone cannot show that

`compute(**params)` returns a mapping of arrays and numbers and must be a pure function. `draw(result)` returns the whole
plotly figure of a result; every result must give the same number and kinds of traces. The panel builds one FigureWidget
from the first figure and afterwards copies only the attributes that changed, in one batch, so nothing flickers and a zoom stays.
A trace that may be empty at some settings says so with ``meta="may be empty"``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import html
import inspect
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbkit.errors import InputError, RunError
from nbkit.widgets import theme
from nbkit.widgets.controls import Control

MAY_BE_EMPTY = "may be empty"
MAX_STEPS = 50
# A drag sends changes faster than `debounce`; after this many debounce times the picture follows anyway.
PATIENCE = 2
PLOT_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}

_DATA_KEYS = ("x", "y", "z", "r", "theta", "values", "a", "b", "c")
_OBJECTS = ("shapes", "annotations", "images")
# Traces whose content is not held in the arrays above.
_OTHER_TRACES = {"table", "indicator", "image", "sankey", "treemap", "sunburst", "icicle", "parcats", "parcoords", "splom"}


class Panel:
    """Controls and one live figure for a pure function.

    compute: params -> mapping of arrays, lists and numbers. draw: result -> plotly figure, or {"data": [dicts], "layout": dict}, which
    spares plotly's checks at every update (those of the first drawing, of what changes and of sweep() remain). preview: a cheap compute shown while
    a control of `slow` (all of them by default) moves; the exact compute then runs in a thread once the value has rested, so it
    must not touch shared state. alt: one sentence that says what the figure shows, or a function from the result to it.
    debounce: a change after a rest is drawn at once; one that follows within this many seconds waits for a rest. vary: the control
    that moves in the exported page (default: the first slider).

    Raises: InputError when controls and the arguments of compute do not fit.

    >>> from nbkit.widgets import controls
    >>> import plotly.graph_objects as go
    >>> def compute(n):
    ...     return {"y": list(range(n))}
    >>> panel = Panel(compute, {"n": controls.integer(1, 9, 4)}, lambda result: go.Figure(go.Scatter(y=result["y"])))
    >>> panel.set(n=6).result["y"]
    [0, 1, 2, 3, 4, 5]
    >>> panel.figure.data[0].y
    (0, 1, 2, 3, 4, 5)
    """

    def __init__(
        self, compute: Callable[..., Mapping[str, Any]], controls: Mapping[str, Control], draw: Callable[[Mapping[str, Any]], Any], *,
        preview: Callable[..., Mapping[str, Any]] | None = None, title: str = "", alt: str | Callable[[Mapping[str, Any]], str] = "",
        debounce: float = 0.05, slow: Sequence[str] = (), vary: str | None = None,
    ):
        self.controls = dict(controls)
        if not self.controls or not all(isinstance(c, Control) for c in self.controls.values()):
            raise InputError("controls", got=dict(controls), allowed="a mapping of names to nbkit.widgets.controls",
                             hint="controls.integer(1, 10, 4)")
        if not debounce >= 0:
            raise InputError("debounce", got=debounce, allowed=">= 0 seconds")
        for name in [*slow, *([vary] if vary else [])]:
            self._known(name)
        for function in (compute, preview):
            if function is not None:
                _fits(function, self.controls)
        self.title, self.errors = title, []
        self._compute, self._draw, self._preview, self._alt = compute, draw, preview, alt
        self._debounce, self._slow, self._vary = debounce, set(slow) or set(self.controls), vary
        self._params = {name: control.value for name, control in self.controls.items()}
        self._result: Mapping[str, Any] | None = None
        self._figure: Any = None
        self._drawn: _Description | None = None
        self._bar: Any = None
        self._box: Any = None
        self._ms = 0.0
        # Requests are numbered; whatever finishes for an older number than the newest is dropped.
        self._sequence = 0
        self._waiting_since: float | None = None
        self._asked_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._preview_due = False
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._muted = False

    def __repr__(self) -> str:
        return f"Panel({self.title!r}, {', '.join(f'{k}={v!r}' for k, v in self._params.items())})"

    # What is shown.

    @property
    def params(self) -> dict[str, Any]:
        """The shown setting."""
        return dict(self._params)

    @property
    def result(self) -> Mapping[str, Any]:
        """What compute returned for the shown setting."""
        self._ensure()
        return self._result

    @property
    def figure(self) -> Any:
        """The figure that is updated in place: a FigureWidget once shown, else a plain plotly figure."""
        self._ensure()
        return self._figure

    @property
    def alt(self) -> str:
        """The sentence that describes the shown figure."""
        return self._sentence(self.result)

    def draw(self, **params: Any) -> Any:
        """A new figure of a setting (the shown one, with `params` changed), beside the panel; the shown state stays."""
        setting = self._params | {name: self._known(name).check(value, name) for name, value in params.items()}
        return _figure(self._draw(_mapping(self._compute(**setting))))

    def set(self, **params: Any) -> Panel:
        """Change some parameters and update at once; returns the panel.

        Raises: InputError for an unknown name or a value outside its control; what compute or draw raises.
        """
        new = self._params | {name: self._known(name).check(value, name) for name, value in params.items()}
        self._supersede()
        self._update(new)
        self._mirror()
        return self

    def show(self) -> None:
        """Display the controls and the live figure (and the static figure beside them when NBKIT_EXPORT=1)."""
        from IPython.display import display, publish_display_data

        display(self._widget())
        if os.environ.get("NBKIT_EXPORT") == "1":
            # A widget is blank without its kernel: readers of the executed copy get a figure of its own instead.
            figure = self.static(self._vary)
            bundle = json.loads(figure.to_json()) | {"config": PLOT_CONFIG}
            publish_display_data({"application/vnd.plotly.v1+json": bundle, "text/plain": self.alt},
                                 metadata={"nbkit": {"panel": self.title, "alt": self.alt, "bytes": len(json.dumps(bundle))}})

    def _ipython_display_(self) -> None:
        self.show()

    # Checks.

    def sweep(self, n: int = 12, seed: int = 0) -> Sweep:
        """Try every control's corners one at a time and `n` random settings; the shown state stays as it is.

        Raises: RunError naming the setting when compute, preview, draw or alt raises, a trace is empty or has no finite value, the
        number or kinds of traces change, or compute is not a function of its parameters; also when a change from the screen failed before.
        """
        if self.errors:
            params, error = self.errors[-1]
            many = f"{len(self.errors)} earlier update(s) failed"
            raise RunError(f"panel {self.title!r}: {many}, the last at {_words(params)} with {error!r}") from error
        begin = time.perf_counter()
        rng = random.Random(seed)
        defaults = {name: control.value for name, control in self.controls.items()}
        points = [defaults] + [defaults | {name: value} for name, control in self.controls.items() for value in control.corners()]
        points = [p for i, p in enumerate(points) if p not in points[:i]]
        drawn = [{name: control.sample(rng) for name, control in self.controls.items()} for _ in range(n)]
        form: list[str] | None = None
        for params in points + drawn:
            try:
                result = _mapping(self._compute(**params))
                variants = [("compute", result)]
                if self._preview is not None:
                    variants.append(("preview", _mapping(self._preview(**params))))
                for source, variant in variants:
                    figure = _figure(self._draw(variant))
                    kinds = _check_figure(figure)
                    form = form or kinds
                    if kinds != form:
                        raise RunError(f"traces drawn from {source}", got=kinds, allowed=f"the same number and kinds for every result: {form}")
                    self._sentence(variant)
                if params in drawn and not _equal(result, _mapping(self._compute(**params))):
                    raise RunError("compute gave two different results for the same parameters", hint="pass an explicit seed to random numbers")
            except Exception as error:
                raise RunError(f"panel {self.title!r} fails at {_words(params)}: {type(error).__name__}: {error}") from error
        return Sweep(self.title, len(points) + len(drawn), len(self.controls), time.perf_counter() - begin)

    def latency(self, n: int = 20, seed: int = 0) -> Latency:
        """Time of compute, draw and the in-place update at `n` random settings, in milliseconds, on a figure that is not shown."""
        if n < 1:
            raise InputError("n", got=n, allowed=">= 1")
        rng = random.Random(seed)
        figure, drawn = self._build(self._draw(_mapping(self._compute(**self._params))), live=True)
        times = []
        for k in range(n + 1):
            params = {name: control.sample(rng) for name, control in self.controls.items()}
            begin = time.perf_counter()
            drawn = self._transfer(figure, drawn, *self._picture(_mapping(self._compute(**params))))
            if k:  # the first one pays for caches
                times.append(1000 * (time.perf_counter() - begin))
        return Latency(float(np.percentile(times, 50)), float(np.percentile(times, 95)), n)

    def static(self, vary: str | None = None, steps: int = 21, *, max_bytes: int = 400_000) -> Any:
        """A plain figure with a slider over precomputed frames, alive without a kernel; the other parameters stay as shown.

        vary: the control that moves (default: the first slider). steps: at most 50 positions; halved until the figure fits `max_bytes`.

        Raises: InputError for an unknown control or too many steps; RunError when three steps do not fit, or draw sets an attribute at
        some steps only.
        """
        import plotly.graph_objects as go

        if vary is None:
            vary = next((name for name, control in self.controls.items() if control.kind == "slider"), next(iter(self.controls)))
        control = self._known(vary)
        if not 3 <= steps <= MAX_STEPS:
            raise InputError("steps", got=steps, allowed=f"3 to {MAX_STEPS}")
        values = control.steps(steps)
        start = min(range(len(values)), key=lambda i: abs(control.index(values[i]) - control.index(self._params[vary])))
        pictures: dict[int, _Description] = {}
        base_figure = None
        for i, value in enumerate(values):
            figure, sentence = self._picture(_mapping(self._compute(**(self._params | {vary: value}))))
            pictures[i] = _Description.of(figure, sentence)
            if i == start:
                base_figure = _figure(figure)
        chosen = list(range(len(values)))
        while True:
            texts = [control.text(values[i]) for i in chosen]
            figure = self._frames(go, base_figure, [pictures[i] for i in chosen], texts, chosen.index(start), control, vary)
            size = len(figure.to_json())
            if size <= max_bytes:
                return figure
            if len(chosen) <= 3:
                raise RunError(f"static figure of panel {self.title!r}", got=f"{size} bytes with {len(chosen)} steps", allowed=f"<= {max_bytes}",
                               hint="draw fewer points or a smaller image")
            ends = {chosen[0], chosen[-1], start}
            chosen = [i for k, i in enumerate(chosen) if i in ends or (k % 2 == 0 and len(chosen) > 5)]

    def _frames(self, go: Any, base_figure: Any, pictures: list[_Description], texts: list[str], start: int, control: Control, vary: str) -> Any:
        base = pictures[start]
        for picture in pictures:
            picture.same_form(base)
        # Every frame sets each attribute that any frame changes: steps can then be taken in any order.
        paths = [sorted({path for p in pictures for path, _ in _changes(base.data[k], p.data[k])}) for k in range(len(base.data))]
        layout_paths = sorted({path for p in pictures for path, _ in _changes(base.layout, p.layout)})
        moving = [k for k, found in enumerate(paths) if found]
        layouts, kinds = [p.layout for p in pictures], base.kinds()
        columns = {k: [p.data[k] for p in pictures] for k in moving}
        frames = [
            {"name": str(i), "traces": moving, "data": [{"type": kinds[k]} | _nested(p.data[k], paths[k], columns[k]) for k in moving],
             "layout": _nested(p.layout, layout_paths, layouts)}
            for i, p in enumerate(pictures)
        ]
        play = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
        # The slider goes below whatever the author put under the axes: titles, a legend.
        bottom = base_figure.layout.margin.b or 56
        below = max(60, bottom - 5)
        slider = {
            "active": start, "pad": {"t": below, "b": 8}, "transition": {"duration": 0}, "len": 0.96, "x": 0.02,
            "currentvalue": {"prefix": f"{control.label or vary}: ", "suffix": f" {control.unit}" if control.unit else "", "font": {"size": 15}},
            "steps": [{"label": text, "method": "animate", "args": [[str(i)], play]} for i, text in enumerate(texts)],
        }
        spec = {"data": [_compact(trace) for trace in base.data], "layout": _compact(base.layout), "frames": [_compact(f) for f in frames]}
        figure = go.Figure(spec, skip_invalid=False)
        height = base_figure.layout.height or 460
        figure.update_layout(template=theme.template(False), sliders=[slider], height=height + 110 + below - 60)
        return figure

    # Updating.

    def _known(self, name: str) -> Control:
        if name not in self.controls:
            raise InputError("control", got=name, allowed=", ".join(self.controls))
        return self.controls[name]

    def _sentence(self, result: Mapping[str, Any]) -> str:
        text = self._alt(result) if callable(self._alt) else self._alt
        if not isinstance(text, str):
            raise RunError("alt", got=type(text).__name__, allowed="a sentence (str)")
        return text

    def _picture(self, result: Mapping[str, Any]) -> tuple[Any, str]:
        return self._draw(result), self._sentence(result)

    def _ensure(self) -> None:
        if self._figure is None:
            self._update(self._params)

    def _update(self, params: dict[str, Any], result: Mapping[str, Any] | None = None, *, preview: bool = False) -> None:
        """Compute (unless `result` is given), draw and show; a failure is kept, shown and raised again."""
        begin = time.perf_counter()
        try:
            if result is None:
                result = _mapping((self._preview if preview else self._compute)(**params))
            figure, sentence = self._picture(result)
            if self._figure is None:
                self._figure, self._drawn = self._build(figure, sentence, live=False)
            else:
                self._drawn = self._transfer(self._figure, self._drawn, figure, sentence)
        except Exception as error:
            self._failed(params, error)
            raise
        self._params, self._result = dict(params), result
        self._ms = 1000 * (time.perf_counter() - begin)
        if self._bar is not None:
            status = f"{self._ms:.0f} ms · preview, exact result follows" if preview else f"{self._ms:.0f} ms"
            with self._bar.hold_sync():
                self._bar.summary, self._bar.status, self._bar.error = sentence, status, ""

    def _failed(self, params: dict[str, Any], error: BaseException) -> None:
        self.errors.append((dict(params), error))
        if self._bar is not None:
            with self._bar.hold_sync():
                self._bar.status = "failed: the figure still shows the last good setting"
                self._bar.error = f"{type(error).__name__}: {error}\nat {_words(params)}"

    def _build(self, figure: Any, sentence: str = "", *, live: bool) -> tuple[Any, _Description]:
        drawn = _Description.of(figure, sentence)
        template = theme.template(self._bar is not None and self._bar.dark)
        spec = {"data": drawn.data, "layout": drawn.layout | {"template": template}}
        if live:
            from nbkit.widgets.bar import LiveFigure

            return LiveFigure(spec, PLOT_CONFIG), drawn
        import plotly.graph_objects as go

        return go.Figure(spec), drawn

    @staticmethod
    def _transfer(target: Any, old: _Description, figure: Any, sentence: str) -> _Description:
        """Copy into `target` what differs between the drawing it shows and `figure`."""
        new = _Description.of(figure, sentence)
        new.same_form(old)
        with target.batch_update():
            for trace, before, after in zip(target.data, old.data, new.data, strict=True):
                for path, value in _changes(before, after):
                    trace[".".join(path)] = value
            for path, value in _changes(old.layout, new.layout):
                target.layout[".".join(path)] = value
        return new

    # The live widget.

    def _widget(self) -> Any:
        self._ensure()
        if self._box is None:
            import ipywidgets

            from nbkit.widgets.bar import ControlBar

            indices = {name: control.index(self._params[name]) for name, control in self.controls.items()}
            defaults = {name: control.index(control.value) for name, control in self.controls.items()}
            self._bar = ControlBar(
                title=self.title, spec=[c.spec(name) for name, c in self.controls.items()], indices=indices, defaults=defaults,
                summary=self.alt, status=f"{self._ms:.0f} ms",
            )
            self._mirror()
            self._bar.observe(self._moved, "indices")
            self._bar.observe(self._recolour, "dark")
            self._figure, self._drawn = self._build(self._draw(self._result), self.alt, live=True)
            layout = {"width": "100%", "overflow": "hidden", "padding": "2px"}
            self._box = ipywidgets.VBox([self._bar, self._figure], layout=layout, _dom_classes=["nbkit-panel"])
        return self._box

    def _mirror(self) -> None:
        """Let the controls on screen show the current parameters."""
        if self._bar is None:
            return
        self._muted = True
        try:
            with self._bar.hold_sync():
                self._bar.exact = {n: c.text(self._params[n]) for n, c in self.controls.items() if self._params[n] not in c.values}
                self._bar.indices = {n: c.index(self._params[n]) for n, c in self.controls.items()}
        finally:
            self._muted = False

    def _recolour(self, change: Any) -> None:
        self._figure.layout.template = theme.template(change["new"])

    def _moved(self, change: Any) -> None:
        """A control was moved on screen."""
        if self._muted:
            return
        moved = {name for name, index in change["new"].items() if change["old"].get(name) != index}
        target = dict(self._wanted if self._waiting_since is not None else self._params)
        target |= {name: self.controls[name].values[change["new"][name]] for name in moved}
        if self._bar.exact:
            self._bar.exact = {n: t for n, t in self._bar.exact.items() if n not in moved}
        self._request(target, moved)

    def _supersede(self) -> int:
        self._sequence += 1
        self._waiting_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self._sequence

    def _request(self, params: dict[str, Any], moved: set[str]) -> None:
        since = self._waiting_since
        sequence = self._supersede()
        self._wanted = params
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # No event loop, no later: do it now.
            self._update(params)
            return
        now = loop.time()
        rested = now - self._asked_at > self._debounce
        self._asked_at = now
        self._waiting_since = now if since is None else since
        delay = self._debounce
        if self._preview is not None and moved & self._slow:
            if not self._preview_due:
                self._preview_due = True
                loop.call_soon(self._show_preview)
        elif rested and since is None:
            delay = 0.0
        else:
            delay = max(0.0, min(delay, self._waiting_since + PATIENCE * self._debounce - now))
        self._timer = loop.call_later(delay, self._rested, sequence, params, loop)

    def _show_preview(self) -> None:
        self._preview_due = False
        if self._waiting_since is not None:
            self._update(self._wanted, preview=True)

    def _rested(self, sequence: int, params: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        if sequence != self._sequence:
            return
        self._waiting_since = self._timer = None
        if self._preview is None:
            self._update(params)
            return
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="nbkit-panel")

        def exact() -> Mapping[str, Any] | None:
            return _mapping(self._compute(**params)) if sequence == self._sequence else None

        begin = time.perf_counter()
        future = loop.run_in_executor(self._thread, exact)
        future.add_done_callback(lambda done: self._arrived(sequence, params, done, begin))

    def _arrived(self, sequence: int, params: dict[str, Any], done: asyncio.Future, begin: float) -> None:
        error = done.exception()
        if error is not None:
            # Even a stale failure is a failure of compute: keep it for sweep().
            self._failed(params, error)
            raise error
        if sequence == self._sequence and done.result() is not None:
            self._update(params, done.result())
            if self._bar is not None:
                self._bar.status = f"{1000 * (time.perf_counter() - begin):.0f} ms · exact"


@dataclass(frozen=True)
class Sweep:
    """What `Panel.sweep` tried; shown in the notebook as proof that the panel works."""

    title: str
    points: int
    controls: int
    seconds: float

    def __str__(self) -> str:
        return f"panel {self.title!r}: {self.points} settings of {self.controls} controls checked in {self.seconds:.1f} s, all draw finite figures"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<div class="nbkit-sweep" data-panel="{html.escape(self.title)}" data-points="{self.points}">✓ {html.escape(str(self))}</div>'


@dataclass(frozen=True)
class Latency:
    """Time from a new setting to an updated figure in the kernel, in milliseconds."""

    p50: float
    p95: float
    n: int

    def __str__(self) -> str:
        return f"compute + draw + update: p50 {self.p50:.0f} ms, p95 {self.p95:.0f} ms over {self.n} settings"

    __repr__ = __str__


@dataclass(frozen=True)
class _Description:
    """A figure as plain data: one dict a trace, and the layout without its template."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]

    @classmethod
    def of(cls, figure: Any, sentence: str) -> _Description:
        if isinstance(figure, Mapping) and {"data"} <= set(figure) <= {"data", "layout"}:
            layout, data = dict(figure.get("layout", {})), [dict(trace) for trace in figure["data"]]
        elif hasattr(figure, "data") and hasattr(figure, "layout"):
            layout, data = figure.layout.to_plotly_json(), [trace.to_plotly_json() for trace in figure.data]
        else:
            raise RunError("draw", got=type(figure).__name__, allowed='a plotly.graph_objects.Figure or {"data": [...], "layout": {...}}',
                           hint="return the figure from draw(result)")
        layout.pop("template", None)
        # A constant uirevision keeps the reader's zoom through updates.
        layout |= {"meta": {"alt": sentence}, "uirevision": "nbkit"}
        return cls(data, layout)

    def kinds(self) -> list[str]:
        return [trace.get("type", "scatter") for trace in self.data]

    def same_form(self, other: _Description) -> None:
        if self.kinds() != other.kinds():
            raise RunError("draw changed the traces of the figure", got=self.kinds(),
                           allowed=f"the same number and kinds for every result: {other.kinds()}",
                           hint='draw an empty trace with meta="may be empty" instead of leaving it out')


def _figure(drawn: Any) -> Any:
    """What draw returned, as a figure that plotly has checked."""
    if not isinstance(drawn, Mapping):
        return drawn
    import plotly.graph_objects as go

    return go.Figure(dict(drawn))


def _fits(function: Callable, controls: Mapping[str, Control]) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(controls))
    except TypeError as error:
        name = getattr(function, "__name__", "compute")
        raise InputError(f"arguments of {name}", got=f"{inspect.signature(function)} ({error})", allowed=f"({', '.join(controls)})") from None
    except ValueError:
        return  # a builtin without a signature: the first call will tell


def _mapping(result: Any) -> Mapping[str, Any]:
    if not isinstance(result, Mapping):
        raise RunError("compute", got=type(result).__name__, allowed="a mapping of names to arrays, lists and numbers")
    return result


def _words(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in params.items())


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Paths whose values differ, with the new value (None where it is gone)."""
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict) and key != "meta":
            yield from _changes(before, after, (*path, key))
        elif not _equal(before, after):
            yield (*path, key), after


def _at(source: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = source
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _nested(source: Mapping[str, Any], paths: Sequence[tuple[str, ...]], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of `source` under `paths`; an empty list (or one invisible object) where only the `others` have a list.

    Raises: RunError where only the others have a value: a frame cannot take one away.
    """
    out: dict[str, Any] = {}
    for path in paths:
        value = _at(source, path)
        if value is None:
            # plotly drops an empty list of layout objects, which would leave those of the frame before.
            value = [{"visible": False}] if path[-1] in _OBJECTS else []
            if any(not isinstance(_at(other, path), (list, tuple, np.ndarray, type(None))) for other in others):
                raise RunError(f"attribute {'.'.join(path)}", got="set at some settings only", allowed="set at all of them, or at none",
                               hint="give it in draw(result) always, also where it has its default")
        inner = out
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return out


def _equal(a: Any, b: Any) -> bool:
    """Deep equality of results; NaN equals NaN, arrays must agree in shape and kind."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if hasattr(a, "__array__") and hasattr(b, "__array__"):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")) if a.dtype != object else _equal(a.tolist(), b.tolist())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def _compact(value: Any) -> Any:
    """The same figure data in fewer bytes: single-precision floats; whole numbers are packed by plotly itself."""
    if isinstance(value, dict):
        return {k: _compact(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return value.astype(np.float32) if value.dtype == np.float64 else value
    if isinstance(value, (list, tuple)):
        if value and len(value) > 16 and all(isinstance(v, float) for v in value):
            return np.asarray(value, np.float32)
        return [_compact(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{float(value):.6g}")
    return value


def _check_figure(figure: Any) -> list[str]:
    """Kinds of the traces of a figure.

    Raises: RunError when there is no trace, or one is empty or has no finite value.
    """
    description = _Description.of(figure, "")
    if not description.data:
        raise RunError("draw returned a figure without traces")
    for i, trace in enumerate(description.data):
        problem = trace_problem(trace)
        if problem:
            raise RunError(f"trace {i} ({trace.get('name') or trace.get('type', 'scatter')}) {problem}")
    return description.kinds()


def trace_problem(trace: Mapping[str, Any]) -> str:
    """Why a plotly trace (a dict) shows nothing, or an empty string.

    >>> trace_problem({"type": "scatter", "y": [float("nan"), None]})
    'has no finite value in y'
    """
    if trace.get("visible") is False:
        return ""
    arrays = {key: decoded(trace[key]) for key in _DATA_KEYS if trace.get(key) is not None}
    kind = trace.get("type", "scatter")
    if not arrays:
        return "" if kind in _OTHER_TRACES or trace.get("meta") == MAY_BE_EMPTY else "has no data"
    for key, array in arrays.items():
        if array.size == 0:
            if trace.get("meta") != MAY_BE_EMPTY:
                return f"is empty in {key}"
        elif not _any_finite(array):
            return f"has no finite value in {key}"
    return ""


def decoded(value: Any) -> np.ndarray:
    """A plotly data array as NumPy: plain lists, arrays, or the packed form {"dtype", "bdata", "shape"}."""
    if isinstance(value, Mapping) and "bdata" in value:
        import base64

        raw = value["bdata"]
        array = np.frombuffer(base64.b64decode(raw) if isinstance(raw, str) else bytes(raw), dtype=np.dtype(value["dtype"]).newbyteorder("<"))
        shape = value.get("shape")
        return array.reshape([int(n) for n in str(shape).split(",")]) if shape else array
    if isinstance(value, (str, bytes)) or np.ndim(value) == 0:
        return np.asarray([value], dtype=object)
    try:
        return np.asarray(value)
    except ValueError:  # rows of different lengths
        return np.asarray([x for row in value for x in np.atleast_1d(np.asarray(row, dtype=object)).ravel()], dtype=object)


def _any_finite(array: np.ndarray) -> bool:
    if array.dtype.kind in "fc":
        return bool(np.isfinite(array).any())
    if array.dtype != object:
        return True
    return any(v is not None and not (isinstance(v, (float, np.floating)) and not np.isfinite(v)) for v in array.ravel())
