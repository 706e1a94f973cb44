"""What the panels show: demand curves run anew at every setting, one run action by action, and when a policy would ask.

Every ``*_view`` is a pure function of its arguments; every ``draw_*`` gives a figure with a constant number and kinds of traces.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nbkit.agents import Deferring, Eager, LearnedPolicy, Restart
from nbkit.envs.office import DIMENSIONS, OfficeOps, Variant, plan
from nbkit.errors import InputError
from nbkit.metrics import pass_at_k

from .grid import Grid
from .inject import ForcedInjection, Run
from .measure import DemandCurve, Resampling
from .policy import AskPolicy, State
from .report import TIMES

LIVE = ("eager", "defer", "restart", "learned")
SHAM_TIMES = (0.1, 0.5, 0.9)
MARKS = {
    "plain": ("does not depend on the fact", "#B8BEC6", "square"), "dependent": ("depends, done rightly", "#0072B2", "square"),
    "wrong": ("depends, done wrongly", "#E69F00", "x"), "final": ("done wrongly for good", "#D55E00", "x"),
    "redone": ("done again, rightly", "#009E73", "diamond"), "verify": ("verifies after the message", "#CC79A7", "triangle-up"),
}
BLUE, ORANGE, GREEN, PURPLE, AMBER, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#7F7F7F"
MAY_BE_EMPTY = "may be empty"
GRID = np.linspace(0, 1, 21)


@functools.lru_cache(maxsize=1)
def _network() -> LearnedPolicy:
    return LearnedPolicy.load()


def live_agent(name: str) -> Any:
    """A new agent that is fast enough to run under a slider. Raises: InputError for a name that is not among them.

    >>> live_agent("defer").describe
    'defer (scripted simulation)'
    """
    if name not in LIVE:
        raise InputError("agent", got=name, allowed=", ".join(LIVE))
    if name == "learned":
        return copy.copy(_network())
    return {"eager": Eager, "defer": Deferring, "restart": Restart}[name]()


@functools.lru_cache(maxsize=512)
def _experiment(dimension: str, options: int, irreversible: float, reverify: int, budget: float) -> ForcedInjection:
    suite = OfficeOps(dims=(dimension,), options=options, irreversible=irreversible, reverify=reverify)
    return ForcedInjection(suite, timings=TIMES, budget=budget)


@functools.lru_cache(maxsize=256)
def _counts(agent: str, setting: tuple, trials: int, jobs: tuple[int, ...]) -> np.ndarray:
    """(jobs, conditions) successes: never, the message at `TIMES`, the oracle, which is run once a job, and the sham message at `SHAM_TIMES`."""
    experiment, who = _experiment(*setting), live_agent(agent)
    conditions = [("never", 0.5), *(("inject", f) for f in TIMES), ("oracle", 0.5), *(("sham", f) for f in SHAM_TIMES)]
    found = np.zeros((len(jobs), len(conditions)), int)
    for row, job in enumerate(jobs):
        variant = experiment.suite.variants[job]
        for trial in range(trials):
            for column, (arm, f) in enumerate(conditions):
                if arm != "oracle" or trial == 0:
                    found[row, column] += experiment.row(who, variant, arm=arm, fraction=f, trial=trial)["passed"]
    return found


def declared_commitment(variant: Variant, agent: str, times: np.ndarray = GRID) -> np.ndarray:
    """Share of the actions taken by each time that depend on the hidden word, from the plan and not from interventions (a test compares both).

    >>> v = OfficeOps().variants[0]
    >>> declared_commitment(v, "eager", np.array([0.0, 1.0])).round(2).tolist()
    [0.0, 0.8]
    """
    depends = np.array([step.depends for step in plan(variant)])
    if agent == "defer":
        depends = np.sort(depends)
    total, taken = len(depends), np.concatenate([[0], depends.cumsum()])
    at = np.array([0 if f == 0 else total if f == 1 else max(1, round(f * total)) for f in times])
    return taken[at] / np.maximum(1, at)


def demand_view(
    agent: str, dimension: str, fraction: float, *, budget: float = 1.2, irreversible: float = 0.2, options: int = 6, reverify: int = 1, k: int = 3,
    job: int = 0, jobs: int = 21, trials: int = 5, recorded: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Curves of one agent and dimension, and one job with the message at ``fraction``, action by action.

    jobs, trials: how many of the 21 jobs are played now, and how often (at least k times). recorded: name -> outcomes of a slower agent
    (:class:`SweptAgent`, :class:`ReplayedModel`), read at the nearest setting that was recorded instead of being played.

    Returns:
        ``times``, ``curve``, ``low``, ``high`` (pass@k with 95 % bootstrap interval over jobs), ``sham_times``, ``sham``, the levels ``oracle`` and
        ``never``, ``grid`` and ``bound`` (never + (oracle - never)(1 - C)), ``fraction``, ``rows``: name -> marks of the actions of three runs,
        ``message`` (actions before it, NaN without one), ``played`` (where the numbers come from), ``k``, ``kind``, ``job``, ``segment``.

    Raises: InputError for an unknown agent, dimension or job, or a number of jobs outside 2 to 21.

    >>> view = demand_view("eager", "goal", 0.3, jobs=3, trials=3)
    >>> view["oracle"], [name.split(":")[0] for name in view["rows"]]
    (1.0, ['full request', 'never told', 'told at 30 %'])
    """
    recorded = recorded or {}
    if dimension not in DIMENSIONS:
        raise InputError("dimension", got=dimension, allowed=", ".join(DIMENSIONS))
    if agent not in LIVE and agent not in recorded:
        raise InputError("agent", got=agent, allowed=", ".join(dict.fromkeys((*LIVE, *recorded))))
    if not 2 <= jobs <= 21:
        raise InputError("jobs", got=jobs, allowed="2 to 21")
    rules = {"budget": budget, "reverify": reverify, "irreversible": irreversible}
    if agent in recorded:
        score, k, experiment = recorded[agent].scores(dimension, k, **rules)
        kind, suite = recorded[agent].kind, experiment.suite
        chosen = suite.variants
        played = f"recorded at budget {experiment.budget:g}, re-verify {suite.reverify}, irreversible {suite.irreversible:g}"
    else:
        setting, trials, kind = (dimension, options, irreversible, reverify, budget), max(k, trials), live_agent(agent).kind
        experiment, places = _experiment(*setting), tuple(np.linspace(0, 20, jobs).round().astype(int).tolist())
        counts, chosen = _counts(agent, setting, trials, places), [experiment.suite.variants[place] for place in places]
        score = pass_at_k(np.full_like(counts, trials), counts, k)
        # The oracle was run once a job: it either does the job or not.
        score[:, 1 + len(TIMES)] = counts[:, 1 + len(TIMES)]
        played = f"{len(places) * ((counts.shape[1] - 1) * trials + 1)} episodes played now"
    variants = experiment.suite.variants
    if not 0 <= job < len(variants):
        raise InputError("job", got=job, allowed=f"0 to {len(variants) - 1}")
    last = 1 + len(TIMES)
    resampling = Resampling(np.arange(len(score)), n=500)
    mean, draws = resampling.mean(score)
    oracle = float(mean[last])
    low, high = np.quantile(draws[:, 1:last], [0.025, 0.975], axis=0)
    commitment = np.mean([declared_commitment(v, agent) for v in chosen], 0)
    runs = recorded[agent].runs(experiment, variants[job], fraction) if agent in recorded else _runs(agent, experiment, variants[job], fraction)
    names = ("full request", "never told", f"told at {100 * fraction:.0f} %")
    return {
        "times": np.array(TIMES), "curve": mean[1:last], "low": low, "high": high,
        "sham_times": np.array(SHAM_TIMES)[: score.shape[1] - last - 1], "sham": mean[last + 1 :], "oracle": oracle, "never": float(mean[0]),
        "grid": GRID, "bound": mean[0] + (oracle - mean[0]) * (1 - commitment), "fraction": fraction,
        "rows": {f"{name}: {'done' if run.row['passed'] else 'failed'}": list(run.marks) for name, run in zip(names, runs)},
        "message": math.nan if runs[-1].message_at is None else float(runs[-1].message_at), "played": played, "k": k, "agent": agent,
        "dimension": dimension, "kind": kind, "job": variants[job].id.rpartition("-")[0], "segment": variants[job].segment,
    }


def _runs(agent: str, experiment: ForcedInjection, variant: Variant, fraction: float) -> list[Run]:
    who = live_agent(agent)
    return [experiment.episode(who, variant, arm=arm, fraction=fraction) for arm in ("oracle", "never", "inject")]


# ---- figures ----


@functools.cache
def _demand_layout() -> dict:
    """The part of the figure that no result changes; building it is slower than drawing."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, row_heights=[0.62, 0.38], vertical_spacing=0.2, subplot_titles=(" ", " "))
    figure.update_xaxes(title_text="time of the message (share of the oracle's actions)", range=[-0.02, 1.02], row=1, col=1)
    figure.update_yaxes(title_text="success (pass@k)", range=[-0.03, 1.06], row=1, col=1)
    figure.update_xaxes(title_text="actions", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(type="category", autorange="reversed", row=2, col=1)
    figure.update_layout(height=760, margin={"t": 46, "b": 150, "l": 190}, legend={"orientation": "h", "yanchor": "top", "y": -0.14, "x": -0.2})
    layout = figure.layout.to_plotly_json()
    layout.pop("template", None)
    return layout


def draw_demand(result: Mapping[str, Any]) -> dict[str, Any]:
    """Two plots: success by time of the message with its interval, levels, sham and bound; three runs of one job, action by action."""
    times, top, bottom = result["times"], {"xaxis": "x", "yaxis": "y"}, {"xaxis": "x2", "yaxis": "y2"}

    def line(name: str, x: Any, y: Any, color: str, dash: str, **more: Any) -> dict:
        style = {"color": color, "dash": dash, "width": 2.5 if dash == "solid" else 2}
        return {"type": "scatter", "x": x, "y": y, "mode": "lines", "name": name, "line": style, **top, **more}

    ends = np.array([0.0, 1.0])
    data = [
        {"type": "scatter", "x": np.concatenate([times, times[::-1]]), "y": np.concatenate([result["high"], result["low"][::-1]]), "fill": "toself",
         "fillcolor": "rgba(0,114,178,0.16)", "line": {"width": 0}, "mode": "lines", "hoverinfo": "skip", "name": "95 % interval", **top},
        line("full request", ends, np.full(2, result["oracle"]), GREEN, "dash"),
        line("never told", ends, np.full(2, result["never"]), ORANGE, "dash"),
        line("bound (1 - C)", result["grid"], result["bound"], PURPLE, "dot"),
        line("sham message", result["sham_times"], result["sham"], GREY, "dashdot", meta=MAY_BE_EMPTY),
        line("told at this time", times, result["curve"], BLUE, "solid") | {"mode": "lines+markers", "marker": {"size": 8, "color": BLUE}},
        line("message of the run below", np.full(2, result["fraction"]), np.array([0.0, 1.0]), "#1f2328", "solid", showlegend=False),
    ]
    names = list(result["rows"])
    for mark, (label, color, symbol) in MARKS.items():
        places = [(i + 1, name) for name in names for i, found in enumerate(result["rows"][name]) if found == mark]
        data.append({
            "type": "scatter", "mode": "markers", "x": [x for x, _ in places], "y": [y for _, y in places], "name": label, "meta": MAY_BE_EMPTY,
            "marker": {"color": color, "symbol": symbol, "size": 12, "line": {"width": 0}}, "hovertemplate": f"action %{{x}}: {label}<extra></extra>",
            **bottom,
        })
    sent = [] if math.isnan(result["message"]) else [result["message"] + 0.5]
    data.append({
        "type": "scatter", "mode": "markers", "x": sent, "y": names[-1:] * len(sent), "name": "message", "meta": MAY_BE_EMPTY,
        "marker": {"color": "#1f2328", "symbol": "line-ns", "size": 26, "line": {"width": 3, "color": "#1f2328"}}, **bottom,
    })
    layout = copy.deepcopy(_demand_layout())
    layout["yaxis"]["title"]["text"] = f"success (pass@{result['k']})"
    layout["yaxis2"]["categoryarray"], layout["yaxis2"]["categoryorder"] = names, "array"
    head = f"{result['agent']} ({result['kind']}), {result['dimension']} missing; {result['played']}"
    for note, text in zip(layout["annotations"], (head, f"the {result['job']} job; missing: {result['segment']}")):
        note["text"], note["x"], note["xanchor"] = text, 0, "left"
    return {"data": data, "layout": layout}


def describe_demand(result: Mapping[str, Any]) -> str:
    """One sentence for readers who do not see the figure."""
    curve = ", ".join(f"{y:.2f} at {f:g}" for f, y in zip(result["times"], result["curve"]))
    runs = "; ".join(f"{name} after {len(marks)} actions" for name, marks in result["rows"].items())
    return (
        f"{result['agent']} ({result['kind']}), {result['dimension']} missing: pass@{result['k']} is {curve}; {result['oracle']:.2f} with the full "
        f"request, {result['never']:.2f} without the fact. One {result['job']} job: {runs}."
    )


# ---- when to ask ----


def ask_view(
    curve: DemandCurve, agent: str, dimension: str, cost: float, theta: float, *, share: float = 0.95, model: Grid | None = None,
) -> dict[str, Any]:
    """What a question is worth over time, where a policy with this cost asks or waits, and when sessions would first ask.

    share: of the largest value that counts as optimal. model: whose recorded entropies the entropy policy also reads.

    Returns:
        ``grid``, ``voi``; ``timings``, ``low``, ``high``; ``cost``; ``decision`` (2 ask, 1 wait) and ``inside`` the optimal window on the grid;
        ``bins`` and shares of jobs that first ask there, ``voi_policy``, ``entropy_policy`` (eager: unsure until told) and ``model_policy`` (NaN
        without a model); ``never``: shares of jobs without a question, by policy.

    Raises: InputError for an agent or dimension without a curve, a negative cost, or theta outside 0-1.
    """
    if not 0 <= theta <= 1:
        raise InputError("theta", got=theta, allowed="0 to 1, a share of the largest entropy")
    policy = AskPolicy(curve, cost=cost, agent=agent).fit()
    array = curve.array(agent, dimension)
    grid = np.linspace(0, 1, 51)
    voi = np.interp(grid, curve.timings, array[:, 0])
    asks = np.array([policy.predict(State(dimension, float(t))) == "ask" for t in grid])
    best = voi.max()
    first = {"voi policy": [], "entropy policy": []}
    for variant in _variants(dimension):
        steps = plan(variant)
        moments = np.arange(len(steps)) / len(steps)
        # The decision depends on the time alone, so the first moment at which the policy asks needs no run.
        first["voi policy"].append(next((m for m in moments if policy.predict(State(dimension, float(m))) == "ask"), math.nan))
        # A scripted agent is as unsure as can be until it is told, and asks at its first call that holds the word.
        unsure = theta < 1
        first["entropy policy"].append(next((m for m, step in zip(moments, steps) if step.fields), math.nan) if unsure else math.nan)
    if model is not None:
        rows = [row for row in model.entropy_sessions(theta) if row["dimension"] == dimension]
        first["entropy of SmolLM2"] = [row["position"] for row in rows]
    edges = np.linspace(0, 1, 21)
    shares = {name: np.histogram([p for p in found if p == p], edges)[0] / len(found) for name, found in first.items()}
    return {
        "grid": grid, "voi": voi, "timings": np.array(curve.timings), "low": array[:, 1], "high": array[:, 2], "cost": cost,
        "decision": np.where(asks, 2, 1), "inside": (voi >= share * best - 1e-12) & (best > 0), "bins": (edges[1:] + edges[:-1]) / 2,
        "first": shares, "never": {name: float(np.mean([p != p for p in found])) for name, found in first.items()}, "agent": agent,
        "dimension": dimension, "k": curve.k,
    }


@functools.cache
def _variants(dimension: str) -> tuple[Variant, ...]:
    return tuple(OfficeOps(dims=(dimension,)).variants)


@functools.cache
def _ask_layout() -> dict:
    from plotly.subplots import make_subplots

    titles = ("what a message is worth, by time", "what the policy does", "first question of a job")
    figure = make_subplots(rows=3, cols=1, row_heights=[0.5, 0.08, 0.42], vertical_spacing=0.11, subplot_titles=titles)
    figure.update_xaxes(range=[-0.02, 1.02])
    figure.update_xaxes(title_text="time (share of the oracle's actions)", row=3, col=1)
    figure.update_yaxes(title_text="gain in success", row=1, col=1)
    figure.update_yaxes(visible=False, row=2, col=1)
    figure.update_yaxes(title_text="share of jobs", range=[0, 1.05], row=3, col=1)
    figure.update_layout(height=760, margin={"t": 46, "b": 130}, barmode="group", legend={"orientation": "h", "yanchor": "top", "y": -0.13})
    layout = figure.layout.to_plotly_json()
    layout.pop("template", None)
    return layout


def draw_ask(result: Mapping[str, Any]) -> dict[str, Any]:
    """Value over time with the price of a question, ask or wait at every time, and when sessions first ask over the optimal window."""
    grid, times, clear = result["grid"], result["timings"], "rgba(0,0,0,0)"
    one, two, three = ({"xaxis": f"x{n}", "yaxis": f"y{n}"} for n in ("", "2", "3"))
    window = np.where(result["inside"], 1.0, np.nan)
    data = [
        {"type": "scatter", "x": np.concatenate([times, times[::-1]]), "y": np.concatenate([result["high"], result["low"][::-1]]), "fill": "toself",
         "fillcolor": "rgba(0,114,178,0.16)", "line": {"width": 0}, "mode": "lines", "hoverinfo": "skip", "name": "95 % interval", **one},
        {"type": "scatter", "x": grid, "y": result["voi"], "mode": "lines", "name": "value of the message",
         "line": {"color": BLUE, "width": 2.5}, **one},
        {"type": "scatter", "x": [0.0, 1.0], "y": [result["cost"]] * 2, "mode": "lines", "name": "cost of a question",
         "line": {"color": ORANGE, "dash": "dash", "width": 2}, **one},
        {"type": "heatmap", "x": grid, "y": ["policy"], "z": [result["decision"]], "zmin": 1, "zmax": 2, "showscale": False,
         "colorscale": [[0, "#E3E6EA"], [0.5, "#E3E6EA"], [0.5, GREEN], [1, GREEN]],
         "hovertemplate": "%{x}: %{z} (2 ask, 1 wait)<extra></extra>", **two},
        {"type": "bar", "x": grid, "y": window, "width": 0.02, "name": "optimal window", "marker": {"color": "rgba(0,158,115,0.18)"},
         "offset": -0.01, "meta": MAY_BE_EMPTY, "hoverinfo": "skip", **three},
    ]
    looks = {"voi policy": (GREEN, ""), "entropy policy": (AMBER, "/"), "entropy of SmolLM2": (PURPLE, "x")}
    for name, (color, shape) in looks.items():
        if name in result["first"]:
            marker = {"color": color, "pattern": {"shape": shape}, "line": {"width": 0}}
            data.append({"type": "bar", "x": result["bins"], "y": result["first"][name], "name": name, "marker": marker, **three})
    layout = copy.deepcopy(_ask_layout())
    high = max(0.05, float(np.nanmax(result["high"])), result["cost"])
    layout["yaxis"]["range"] = [min(-0.05, float(np.nanmin(result["low"]))), 1.08 * high]
    layout["yaxis"]["title"]["text"] = f"gain in pass@{result['k']}"
    layout["paper_bgcolor"] = clear
    return {"data": data, "layout": layout}


def describe_ask(result: Mapping[str, Any]) -> str:
    """One sentence for readers who do not see the figure."""
    asks = result["grid"][result["decision"] == 2]
    when = f"from {asks.min():.0%} to {asks.max():.0%} of the run" if len(asks) else "at no time"
    window = result["grid"][result["inside"]]
    best = f"{window.min():.0%} to {window.max():.0%}" if len(window) else "empty"
    never = ", ".join(f"{name} {share:.0%}" for name, share in result["never"].items())
    return (
        f"{result['agent']}, {result['dimension']} missing: at a cost of {result['cost']:.2f} the policy asks {when}; the optimal window is {best}. "
        f"Jobs without a question: {never}."
    )
