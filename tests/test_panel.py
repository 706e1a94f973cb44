"""Panel and controls: in-place updates, debouncing, stale results, errors, sweep and the static figure."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time

import numpy as np
import plotly.graph_objects as go
import pytest

from nbkit.errors import InputError, RunError
from nbkit.widgets import Panel, controls, theme
from nbkit.widgets.panel import MAY_BE_EMPTY, PATIENCE, decoded


def wave(keep, scale=1.0, shape="sine", fill=False):
    x = np.linspace(0, 6, keep)
    y = scale * (np.sin(x) if shape == "sine" else np.abs((x % 2) - 1))
    return {"x": x, "y": y, "fill": fill, "image": np.outer(y, y)[:8, :8], "title": f"{keep} points"}


def draw(result):
    figure = go.Figure([
        go.Scatter(x=result["x"], y=result["y"], name="wave", fill="tozeroy" if result["fill"] else None, marker={"color": result["y"]}),
        go.Heatmap(z=result["image"], xaxis="x2", yaxis="y2"),
        go.Scatter(x=result["x"][40:], y=result["y"][40:], name="tail", meta=MAY_BE_EMPTY),
    ])
    shapes = [{"type": "rect", "x0": 0, "x1": float(result["x"][-1]) / 2, "y0": 0, "y1": 1}] if result["fill"] else []
    return figure.update_layout(title=result["title"], shapes=shapes, xaxis={"domain": [0, 0.6], "range": [0, len(result["x"])]},
                                xaxis2={"domain": [0.7, 1]}, yaxis2={"anchor": "x2"})


def describe(result):
    """The same drawing as plain dicts."""
    figure = draw(result)
    return {"data": [trace.to_plotly_json() for trace in figure.data], "layout": figure.layout.to_plotly_json()}


def make(compute=wave, drawing=draw, **options):
    box = {
        "keep": controls.integer(20, 120, 60, label="Budget", unit="tokens"), "scale": controls.log_number(0.1, 10, 1.0),
        "shape": controls.choice({"sine wave": "sine", "triangle": "saw"}), "fill": controls.toggle(),
    }
    return Panel(compute, box, drawing, title="waves", **({"alt": lambda r: f"{len(r['x'])} points of a wave."} | options))


def shown(figure):
    layout = figure.layout.to_plotly_json()
    for key in ("template", "uirevision", "meta"):
        layout.pop(key, None)
    return json.loads(go.Figure(data=[{k: v for k, v in t.to_plotly_json().items() if k != "uid"} for t in figure.data], layout=layout).to_json())


@pytest.mark.parametrize("drawing", [draw, describe], ids=["figure", "dicts"])
@pytest.mark.parametrize("live", [False, True], ids=["plain figure", "widget"])
def test_in_place_figure_equals_a_fresh_drawing_for_every_setting(live, drawing):
    panel = make(drawing=drawing)
    if live:
        panel._widget()
    figure, rng = panel.figure, random.Random(1)
    for _ in range(25):
        params = {name: control.sample(rng) for name, control in panel.controls.items()}
        panel.set(**params)
        fresh = go.Figure(draw(wave(**params)))
        fresh.layout.template = None
        assert panel.figure is figure
        left, right = shown(figure), shown(fresh)
        # An attribute taken away is None in one and absent in the other.
        assert _plain(left) == _plain(right), params


def _plain(value):
    if isinstance(value, dict):
        if "bdata" in value:
            return decoded(value).tolist()
        return {k: _plain(v) for k, v in value.items() if v is not None and _plain(v) not in ({}, [])}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def test_an_update_is_one_message_with_only_what_changed():
    panel = make()
    panel._widget()
    sent = []
    panel.figure._send_update_msg = lambda **kwargs: sent.append(kwargs)
    panel.figure._send_restyle_msg = panel.figure._send_relayout_msg = lambda *a, **k: pytest.fail("a message outside the batch")
    panel.set(fill=True)
    assert len(sent) == 1
    assert set(sent[0]["restyle_data"]) == {"fill"} and set(sent[0]["relayout_data"]) == {"shapes"}
    panel.set(fill=True)
    assert len(sent) == 1, "nothing changed, nothing sent"


def test_the_live_figure_reaches_the_front_end_whole(monkeypatch):
    """A front end that is slow to load plotly misses what is sent after the opening message, and would show empty axes."""
    import comm
    from comm.base_comm import BaseComm

    sent = []

    class Recorded(BaseComm):
        def publish_msg(self, msg_type, data=None, **rest):
            sent.append((msg_type, (data or {}).get("state", {})))

    monkeypatch.setattr(comm, "create_comm", lambda *args, **kwargs: Recorded(*args, **kwargs))
    make()._widget()
    figures = [state for kind, state in sent if "_widget_data" in state]
    assert len(figures) == 1 and len(figures[0]["_widget_data"]) == 3
    assert figures[0]["_widget_layout"]["template"]["layout"]["colorway"] == list(theme.COLORS), "with the project's look, not plotly's own"
    assert {kind for kind, _ in sent} == {"comm_open"}


class Counting:
    """A compute that remembers its calls and can be held back."""

    def __init__(self, fail_at=None, gate=None):
        self.calls, self.fail_at, self.gate = [], fail_at, gate

    def __call__(self, keep, scale, shape, fill):
        self.calls.append(keep)
        if keep == self.fail_at:
            raise ValueError("boom")
        if self.gate and keep in self.gate:
            self.gate[keep].wait(5)
        return wave(keep, scale, shape, fill)


def move(panel, **values):
    """What the front end does when a control moves."""
    panel._bar.indices = panel._bar.indices | {name: panel.controls[name].index(value) for name, value in values.items()}


def test_without_an_event_loop_a_moved_control_updates_at_once():
    panel = make()
    panel._widget()
    move(panel, keep=100)
    assert len(panel.figure.data[0].x) == 100 and panel.params["keep"] == 100
    assert panel._bar.summary == "100 points of a wave." and panel._bar.status.endswith("ms")


def test_a_drag_is_debounced_and_followed():
    compute = Counting()
    panel = make(compute, debounce=0.04)
    panel._widget()

    async def drag():
        before = len(compute.calls)
        move(panel, keep=25)
        assert len(compute.calls) == before, "nothing runs inside the message"
        await asyncio.sleep(0.01)
        assert compute.calls[before:] == [25], "a single change does not wait"
        before += 1
        for keep in range(30, 36):  # faster than the debounce time
            move(panel, keep=keep)
        move(panel, scale=10.0)  # a second control in the same burst keeps the first one's value
        assert len(compute.calls) == before
        await asyncio.sleep(0.3)
        assert compute.calls[before:] == [35], "a burst is drawn once"
        assert panel.params["scale"] == 10.0
        stop = time.perf_counter() + 0.04 * PATIENCE * 3
        keep = 40
        while time.perf_counter() < stop:  # a drag without a rest
            move(panel, keep=(keep := keep + 1 if keep < 110 else 40))
            await asyncio.sleep(0.01)
        assert len(compute.calls) > before + 1, "the picture follows a long drag"

    asyncio.run(drag())


def test_preview_while_dragging_then_exact_and_stale_exact_results_are_dropped():
    gate = {50: threading.Event()}
    compute, preview, drawn = Counting(gate=gate), Counting(), []

    def drawing(result):
        drawn.append(len(result["x"]))
        return draw(result)

    panel = make(compute, drawing, preview=preview, debounce=0.02)
    panel._widget()

    async def drag():
        move(panel, keep=50)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert preview.calls == [50], "the preview does not wait"
        await asyncio.sleep(0.1)  # the exact result of 50 is now held in its thread
        assert compute.calls[-1] == 50
        move(panel, keep=70)
        await asyncio.sleep(0.1)
        assert drawn[-1] == 70
        late = len(drawn)
        gate[50].set()
        await asyncio.sleep(0.6)
        assert drawn[late:] == [70], "the late result of 50 must not be drawn over 70"
        assert panel._bar.status.endswith("exact")

    asyncio.run(drag())
    assert compute.calls[-1] == 70 and panel.params["keep"] == 70


def test_a_failing_update_is_shown_recorded_raised_and_fails_the_sweep():
    panel = make(Counting(fail_at=21))
    panel._widget()
    panel.sweep(n=0)
    with pytest.raises(ValueError, match="boom"):
        move(panel, keep=21)
    assert "ValueError: boom" in panel._bar.error and "keep=21" in panel._bar.error
    assert len(panel.figure.data[0].x) == 60, "the last good picture stays"
    assert [type(e) for _, e in panel.errors] == [ValueError]
    with pytest.raises(RunError, match="earlier update.*keep=21.*boom"):
        panel.sweep()
    move(panel, keep=22)
    assert panel._bar.error == ""


def broken(change):
    """A drawing that is wrong only for small budgets."""
    def drawing(result):
        figure = draw(result)
        return change(figure) if len(result["x"]) == 20 else figure
    return drawing


@pytest.mark.parametrize(("change", "message"), [
    (lambda f: f.update_traces(y=np.full(20, np.nan), selector=0), "no finite value in y"),
    (lambda f: f.update_traces(x=[], y=[], selector=0), "is empty"),
    (lambda f: f.update_traces(z=np.full((3, 3), np.inf), selector=1), "no finite value in z"),
    (lambda f: f.add_scatter(y=[1]), "same number and kinds"),
    (lambda f: None, "allowed a plotly"),
    (lambda f: 1 / 0, "ZeroDivisionError"),
], ids=["nan", "empty", "inf", "count", "no figure", "raises"])
def test_sweep_finds_a_drawing_that_breaks_at_one_end(change, message):
    panel = make(drawing=broken(change))
    with pytest.raises(RunError, match=message) as caught:
        panel.sweep(n=0)
    assert "keep=20" in str(caught.value) and panel.params["keep"] == 60


def test_sweep_finds_random_numbers_without_a_seed_and_a_broken_preview():
    noise = make(lambda **p: wave(**p) | {"y": np.random.default_rng().normal(size=p["keep"])})
    with pytest.raises(RunError, match="two different results"):
        noise.sweep()
    with pytest.raises(RunError, match="boom"):
        make(preview=Counting(fail_at=120)).sweep(n=0)


def test_sweep_visits_all_corners_keeps_the_state_and_marks_its_output():
    compute = Counting()
    panel = make(compute).set(keep=99)
    report = panel.sweep(n=3)
    assert {20, 120} <= set(compute.calls) and panel.params["keep"] == 99 and len(panel.figure.data[0].x) == 99
    assert 'class="nbkit-sweep"' in report._repr_html_() and 'data-panel="waves"' in report._repr_html_()
    # the default, two ends of two sliders, the other option and the other state, and three random settings
    assert report.points == 1 + 2 * 2 + 1 + 1 + 3


def test_set_refuses_what_a_control_does_not_offer():
    panel = make()
    for params, message in [({"keep": 5}, "whole numbers from 20 to 120"), ({"keep": 30.5}, "whole numbers"), ({"shape": "square"}, "'sine', 'saw'"),
                            ({"nope": 1}, "keep, scale"), ({"scale": float("nan")}, "numbers from"), ({"fill": "yes"}, "True or False")]:
        with pytest.raises(InputError, match=message):
            panel.set(**params)
    assert panel.set(scale=0.123456).params["scale"] == 0.123456, "a value off the slider's grid is exact"
    with pytest.raises(InputError, match="arguments of <lambda>.*allowed .b."):
        Panel(lambda a: {}, {"b": controls.toggle()}, draw)


@pytest.mark.parametrize("bad", [lambda: controls.integer(5, 5), lambda: controls.integer(0, 10, 11), lambda: controls.number(0, 1, step=0),
                                 lambda: controls.log_number(0, 1), lambda: controls.choice([]), lambda: controls.choice(["a", "a"]),
                                 lambda: controls.integer(0, 10**6), lambda: controls.integer(0.5, 3), lambda: controls.number(0, float("inf"))])
def test_bad_controls_are_refused(bad):
    with pytest.raises(InputError):
        bad()


def test_control_grids_hold_their_ends_and_default():
    for control in [controls.integer(0, 100, 37, 10), controls.number(0, 1, 0.333, 0.05), controls.log_integer(1, 5000, 777),
                    controls.log_number(1e-3, 7, 0.2)]:
        assert control.values == tuple(sorted(set(control.values))) and control.value in control.values
        steps = control.steps(7)
        assert len(steps) <= 7 and steps[0] == control.values[0] and steps[-1] == control.values[-1] and control.value in steps
        rng = np.random.default_rng(0)
        assert all(control.sample(rng) in control.values for _ in range(50))


def test_static_frames_draw_the_same_as_the_live_panel():
    panel = make()
    figure = panel.static("keep", steps=9)
    steps = figure.layout.sliders[0].steps
    assert len(figure.frames) == len(steps) == 9 and figure.layout.sliders[0].currentvalue.suffix == " tokens"
    assert steps[figure.layout.sliders[0].active].label == "60" and figure.layout.meta["alt"] == "60 points of a wave."
    for step, frame in zip(steps, figure.frames, strict=True):
        want = draw(wave(int(step.label)))
        np.testing.assert_allclose(np.asarray(frame.data[0].y), want.data[0].y, rtol=1e-5, atol=1e-6)
        assert frame.layout.title.text == want.layout.title.text and frame.layout.meta["alt"].startswith(step.label)
    assert panel.params["keep"] == 60
    assert len(panel.static("keep", steps=50).frames) == 50
    small = panel.static("keep", steps=50, max_bytes=20_000)
    assert 3 <= len(small.frames) < 50 and len(small.to_json()) <= 20_000 and {"20", "60", "120"} <= {s.label for s in small.layout.sliders[0].steps}
    with pytest.raises(RunError, match="bytes"):
        panel.static("keep", steps=5, max_bytes=1000)
    with pytest.raises(InputError, match="3 to 50"):
        panel.static("keep", steps=51)


def test_every_frame_sets_what_any_frame_changes():
    """Otherwise a look that one step brings would stay when the reader goes back."""
    def drawing(dash):
        def drawn(result):
            long = len(result["x"]) > 100
            figure = draw(result).update_traces(line={"dash": "dot"} if long else dash, selector=0)
            return figure.add_vline(x=1) if long else figure
        return drawn

    frames = make(drawing=drawing({"dash": "solid"})).static("keep", steps=5).frames
    assert [frame.data[0].line.dash for frame in frames] == ["solid"] * 4 + ["dot"]
    assert [[shape.visible for shape in frame.layout.shapes] for frame in frames] == [[False]] * 4 + [[None]]
    with pytest.raises(RunError, match="attribute line.*set at some settings only"):
        make(drawing=drawing({})).static("keep", steps=5)


def test_latency_reports_milliseconds_and_leaves_the_panel_alone():
    panel = make()
    report = panel.latency(n=8)
    assert 0 < report.p50 <= report.p95 and report.n == 8 and "p95" in str(report)
    assert panel._figure is None


def test_the_package_needs_no_plotly_or_widgets_until_something_is_drawn():
    heavy = ("plotly", "ipywidgets", "anywidget", "matplotlib", "torch")
    code = f"import sys, nbkit.widgets.controls, nbkit.widgets.panel; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
