"""What the other two panels show: the heads that a threshold activates, and the policy, losses and computed share of a prompt's class."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nbkit.errors import InputError
from nbkit.inference.patterns import Pattern, causal_pairs

from .augment import augment
from .config import POLICIES, REDUCTIONS
from .explore import BLUE, GREEN, GREY, INK, MAY_BE_EMPTY, ORANGE, PURPLE, Captured, base_density, profile_of
from .metrics import probe_attention, reduce_rows
from .report import Grid, Heads, Rule

MEASURES = {"mean": "middle mass, mean of the rows", "max": "middle mass, largest row", "last": "middle mass, last row", "entropy": "entropy",
            "concentration": "concentration"}
TAUS = tuple(round(0.05 * k, 2) for k in range(20))
SHOWN_RANKINGS = ("mean", "max", "random")


@functools.lru_cache(maxsize=32)
def head_scores(prompt: Captured, *, window: int = 64, probe: int = 64) -> dict[str, np.ndarray]:
    """Every measure of every head of a dense reading: name -> (layers, heads)."""
    profile = profile_of(prompt, window=window, probe=probe)
    scores = {how: reduce_rows(profile.mid, how).numpy() for how in REDUCTIONS}
    return scores | {"entropy": profile.entropy.numpy(), "concentration": profile.concentration.numpy()}


@functools.lru_cache(maxsize=32)
def augmented_density(prompt: Captured, kappa: float = 0.9, *, v_cap: int = 64, s_cap: int = 96, window: int = 64, probe: int = 64) -> np.ndarray:
    """Density of every head once it is augmented, without the probe: (layers, heads)."""
    rows = []
    heads, tokens = prompt.queries.shape[1], prompt.tokens
    for layer in range(len(prompt.queries)):
        keys = prompt.keys[layer].repeat_interleave(heads // prompt.keys.shape[1], 0)
        attention = probe_attention(prompt.rows(probe)[layer], keys, prompt.scaling)
        found = augment(attention, sinks=4, window=window, v_cap=v_cap, s_cap=s_cap, kappa=kappa)
        pattern = Pattern(heads, window=window, sinks=4, columns=found.columns, slashes=found.slashes)
        rows.append((pattern.pairs(tokens) / causal_pairs(tokens, tokens)).numpy())
    return np.stack(rows)


def heads_view(prompt: Captured, measure: str, tau: float, *, kappa: float = 0.9, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Which heads a threshold activates, and the density that follows at every threshold.

    measure: one of `MEASURES`; heads above tau are active. recorded: losses beside it, ``name`` and for each of `SHOWN_RANKINGS` an array
    (points, 4) of share of heads, extra loss and its interval; None for nothing recorded.
    Returns: ``grid`` (layers, heads), ``active`` (layers, heads) bool, ``curves`` reduction -> density at each of `TAUS`, ``density`` at tau.
    Raises: InputError for an unknown measure.
    """
    if measure not in MEASURES:
        raise InputError("measure", got=measure, allowed=", ".join(MEASURES))
    scores, dense = head_scores(prompt), augmented_density(prompt, kappa)
    base = base_density(prompt.tokens, 4, 64)
    probe = prompt.probe * prompt.tokens / causal_pairs(prompt.tokens, prompt.tokens)

    def density(values: np.ndarray, at: float) -> float:
        return float(np.where(values > at, dense, base).mean() + probe)

    curves = {name: np.array([density(scores[name], at) for at in TAUS]) for name in REDUCTIONS}
    grid = scores[measure]
    held = {"name": "no loss recorded for this prompt's task"} | dict(recorded or {})
    return {"grid": grid, "active": grid > tau, "measure": measure, "tau": tau, "curves": curves, "density": density(grid, tau),
            "floor": base + probe, "prompt": prompt.name, "recorded": held}


@functools.cache
def _heads_layout(layers: int, heads: int) -> dict:
    return {
        "height": 660, "margin": {"t": 84, "b": 66, "l": 66, "r": 24}, "legend": {"orientation": "h", "yanchor": "top", "y": 0.515, "x": 0.53},
        "xaxis": {"domain": [0, 0.34], "anchor": "y", "title": {"text": "head"}, "dtick": 1, "range": [-0.5, heads - 0.5], "showgrid": False},
        "yaxis": {"domain": [0, 1], "anchor": "x", "title": {"text": "layer"}, "range": [-0.5, layers - 0.5], "showgrid": False, "dtick": 5},
        "xaxis2": {"domain": [0.6, 1], "anchor": "y2", "title": {"text": "threshold τ"}, "range": [-0.03, 1]},
        "yaxis2": {"domain": [0.64, 1], "anchor": "x2", "title": {"text": "density"}, "range": [0, 1.02]},
        "xaxis3": {"domain": [0.6, 1], "anchor": "y3", "title": {"text": "share of the heads kept dense"}, "range": [-0.03, 1.03]},
        "yaxis3": {"domain": [0, 0.3], "anchor": "x3", "title": {"text": "extra loss (nats)"}},
    }


def draw_heads(result: Mapping) -> dict[str, Any]:
    """The grid of heads with the active ones marked; density by threshold, live; the recorded loss by share of heads and ranking."""
    grid, active, tau, held = result["grid"], result["active"], result["tau"], result["recorded"]
    where = np.argwhere(active)
    styles = dict(zip(("mean", "max", "last", "random"), ((BLUE, "solid"), (ORANGE, "dash"), (PURPLE, "dot"), (GREY, "dashdot")), strict=True))
    data = [
        {"type": "heatmap", "z": grid.round(3), "zmin": 0, "zmax": 1, "colorscale": "Cividis",
         "colorbar": {"x": 0.355, "xanchor": "left", "len": 0.9, "thickness": 12, "outlinewidth": 0},
         "hovertemplate": "layer %{y}, head %{x}: %{z}<extra></extra>"},
        {"type": "scatter", "x": where[:, 1], "y": where[:, 0], "mode": "markers", "name": "active", "showlegend": False, "meta": MAY_BE_EMPTY,
         "marker": {"color": ORANGE, "symbol": "circle", "size": 9, "line": {"color": "#ffffff", "width": 1}}, "hoverinfo": "skip"},
    ]
    for name in REDUCTIONS:
        color, dash = styles[name]
        data.append({"type": "scatter", "x": TAUS, "y": result["curves"][name], "mode": "lines", "name": name.replace("last", "last row"),
                     "line": {"color": color, "dash": dash, "width": 2.2}, "xaxis": "x2", "yaxis": "y2"})
    data.append({"type": "scatter", "x": [tau], "y": [result["density"]], "mode": "markers", "showlegend": False, "name": "now",
                 "marker": {"color": INK, "symbol": "diamond", "size": 11}, "xaxis": "x2", "yaxis": "y2"})
    for name in SHOWN_RANKINGS:
        points = np.asarray(held.get(name, ()), dtype=float).reshape(-1, 4)
        color, dash = styles[name]
        data.append({"type": "scatter", "x": points[:, 0], "y": points[:, 1], "mode": "lines+markers", "name": "random heads",
                     "showlegend": name == "random", "line": {"color": color, "dash": dash, "width": 2.2}, "marker": {"size": 7},
                     "meta": MAY_BE_EMPTY, "xaxis": "x3", "yaxis": "y3",
                     "error_y": {"array": points[:, 3] - points[:, 1], "arrayminus": points[:, 1] - points[:, 2], "thickness": 1.2}})
    layout = copy.deepcopy(_heads_layout(*grid.shape))
    share, count = float(active.mean()), int(active.sum())
    layout["shapes"] = [{"type": "line", "xref": "x3", "yref": "y3 domain", "x0": share, "x1": share, "y0": 0, "y1": 1,
                         "line": {"color": INK, "dash": "dash", "width": 1.5}}]
    layout["annotations"] = _texts((
        (0, 1.05, f"<b>{MEASURES[result['measure']]} > {tau:.2f}: {count} of {active.size} heads active</b>, prompt “{result['prompt']}”", 16),
        (0.6, 1.0, f"density with probe, live: {result['density']:.2f} (floor {result['floor']:.2f})", 15), (0.6, 0.305, held["name"], 14),
    ))
    return {"data": data, "layout": layout}


def _texts(texts: Sequence[tuple[float, float, str, int]]) -> list[dict]:
    return [{"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
             "align": "left", "font": {"size": size}} for x, y, text, size in texts]


def describe_heads(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    active = result["active"]
    most = np.argsort(active.sum(1), kind="stable")[::-1][:3]
    return (f"Prompt {result['prompt']}: {int(active.sum())} of {active.size} heads lie above {result['tau']:.2f} in {MEASURES[result['measure']]}, "
            f"most of them in layers {', '.join(map(str, most))}; augmenting them gives density {result['density']:.2f}.")


def recorded_heads(heads: Heads, task: str) -> dict[str, Any]:
    """What the recording ``adacal-heads`` holds for the lower plot: extra loss over the dense model by ranking and share of heads kept dense."""
    out: dict[str, Any] = {"name": f"recorded: extra loss on {task}, the rest A-shape"}
    for ranking in SHOWN_RANKINGS:
        first = f"{ranking}-0" if ranking == "random" else ranking
        shares = [share for share in (0.1, 0.2, 0.4) if heads.has(task, first, share)]
        gains = [heads.gain(task, ranking, "all", share) for share in shares]
        out[ranking] = [(share, g.estimate, g.low, g.high) for share, g in zip(shares, gains, strict=True)]
    return out


# Tasks, policies, and what a rule computes at a length.

RULES = {"dense": "dense", "a-shape": "A-shape", "tri-shape": "tri-shape", "trianglemix": "TriangleMix", "vertical-slash": "vertical-slash",
         "block-topk": "block top-k", "flexprefill": "FlexPrefill", "xattention": "XAttention", "duo": "DuoAttention",
         "entropyinfer": "EntropyInfer", "taskkv": "Task-KV", "random-heads": "random heads", "adacal": "AdaCal",
         "adacal-general": "AdaCal, no dispatch", "adacal-uniform": "AdaCal, all heads"}
"""Recorded rules and how they are called on screen."""


def name_of(rule: Rule) -> str:
    """A rule on screen, with its options.

    >>> name_of(("vertical-slash", {"v": 8, "s": 64}))
    'vertical-slash (v 8, s 64)'
    """
    name, options = (rule, {}) if isinstance(rule, str) else rule
    given = ", ".join(f"{key} {value}" for key, value in options.items())
    return RULES.get(name, name) + (f" ({given})" if given else "")


def bars_of(grid: Grid, task: str, density: float | None = None) -> list[tuple[str, float, float, float, float]]:
    """Recorded rules on a task: (name, extra loss over the dense model, its interval, mean density).

    density: None for the rules' defaults, or a density that they were matched at on calibration prompts.
    """
    out = []
    for rule, name in RULES.items():
        chosen = rule if density is None else grid.matched(rule, density)
        if chosen is None or rule == "dense" or not grid.has(task, chosen) or not grid.has(task, "dense"):
            continue
        gain = grid.gain("nll", task, chosen, "dense")
        out.append((name, gain.estimate, gain.low, gain.high, float(grid("density", task, chosen).mean())))
    return out


def measured_density(grid: Grid, task: str, lengths: Sequence[int] = (512, 1024, 2048)) -> dict[str, list[tuple[int, float]]]:
    """Recorded densities of the rules that have a formula: name -> (length, density)."""
    names = {name: rule for rule, name in RULES.items() if name in FORMULAS}
    return {name: [(n, float(grid("density", task, names[name], tokens=n).mean())) for n in lengths if grid.has(task, names[name], tokens=n)]
            for name in FORMULAS}


FORMULAS = ("A-shape", "tri-shape", "TriangleMix", "vertical-slash", "AdaCal")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@functools.lru_cache(maxsize=4096)
def formula_density(
    method: str, tokens: int, *, active: float = 0.5, v: int = 64, s: int = 96, sinks: int = 4, window: int = 64, probe: int = 64,
) -> float:
    """Computed share of the causal pairs at a length, probe included: exact for the static rules.

    Columns and diagonals, whose places depend on the prompt, are taken as spread evenly over the middle; ``active`` is the share of the heads that
    AdaCal augments up to its caps. Raises: InputError for a rule without a formula (its cost depends on the prompt).

    >>> round(formula_density("A-shape", 512), 4), formula_density("A-shape", 64)
    (0.2478, 1.0)
    """
    shape = {"window": window, "sinks": sinks}
    probed = {"probe_pairs": float(min(probe, tokens) * tokens)}
    middle = max(0, tokens - sinks - window)

    def spread(count: int, first: int) -> torch.Tensor:
        count = min(count, middle)
        return (first + (torch.arange(count) + 0.5) * middle / max(count, 1)).long()[None]

    if method == "A-shape":
        return Pattern(1, **shape).density(tokens)
    if method == "tri-shape":
        return Pattern(1, **shape, dense_rows=min(probe, tokens)).density(tokens)
    if method == "TriangleMix":
        return 0.5 + 0.5 * Pattern(1, **shape, dense_rows=min(probe, tokens)).density(tokens)
    if method in ("vertical-slash", "AdaCal"):
        full = Pattern(1, **shape, columns=spread(v, sinks), slashes=spread(s, window), **probed).density(tokens)
        if method == "vertical-slash":
            return full
        return active * full + (1 - active) * Pattern(1, **shape, **probed).density(tokens)
    raise InputError("method", got=method, allowed=", ".join(FORMULAS))


def tasks_view(
    prompt: Captured, tokens: int, *, v_cap: int = 64, s_cap: int = 96, bars: Sequence[tuple[str, float, float, float, float]] = (),
    setting: str = "", points: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> dict[str, Any]:
    """The dispatcher's features and class of a prompt, its policy, recorded losses and densities of all rules, and the computed share by length.

    bars: (rule, extra loss, its interval, density) of the prompt's task, under the name ``setting``; points: rule -> measured (length, density).
    Returns: ``task``, ``features``, ``policy``, ``active`` share of heads above the policy's threshold in a dense reading, ``ratio`` rule ->
    share at each of `LENGTHS`, ``now`` rule -> share at ``tokens``, and what was given.
    """
    task = prompt.found.task
    policy = POLICIES[task]
    active = float((head_scores(prompt)[policy.reduce] > policy.tau).mean())
    sizes = {"active": round(active, 3), "v": round(v_cap * policy.caps), "s": round(s_cap * policy.caps)}
    uniform = {"v": v_cap, "s": s_cap}
    ratio = {m: np.array([formula_density(m, n, **(sizes if m == "AdaCal" else uniform)) for n in LENGTHS]) for m in FORMULAS}
    now = {m: formula_density(m, tokens, **(sizes if m == "AdaCal" else uniform)) for m in FORMULAS}
    return {"prompt": prompt.name, "task": task, "features": prompt.found.features, "policy": policy, "active": active, "ratio": ratio, "now": now,
            "tokens": tokens, "bars": list(bars), "setting": setting, "points": dict(points or {})}


@functools.cache
def _tasks_layout() -> dict:
    return {
        "height": 860, "margin": {"t": 120, "b": 110, "l": 120, "r": 24}, "legend": {"orientation": "h", "yanchor": "top", "y": -0.11, "x": 0},
        "xaxis": {"domain": [0, 0.52], "anchor": "y", "title": {"text": "extra loss over the dense model (nats)"}},
        "yaxis": {"domain": [0.47, 0.93], "anchor": "x", "autorange": "reversed", "type": "category", "dtick": 1},
        "xaxis2": {"domain": [0.6, 1], "anchor": "y2", "title": {"text": "density with probe"}, "range": [0, 1.02]},
        "yaxis2": {"domain": [0.47, 0.93], "anchor": "x2", "autorange": "reversed", "type": "category", "dtick": 1, "showticklabels": False},
        "xaxis3": {"domain": [0, 1], "anchor": "y3", "title": {"text": "prompt length N (tokens)"}, "type": "log", "range": [2.37, 5.15],
                   "tickvals": list(LENGTHS), "ticktext": [f"{n // 1024}k" if n >= 1024 else str(n) for n in LENGTHS]},
        "yaxis3": {"domain": [0, 0.3], "anchor": "x3", "title": {"text": "share computed"}, "range": [0, 1.02]},
    }


def draw_tasks(result: Mapping) -> dict[str, Any]:
    """Recorded extra loss and density of every rule on this task; the computed share by length, from the formula, with measured points."""
    names = [bar[0] for bar in result["bars"]]
    numbers = np.array([bar[1:] for bar in result["bars"]], dtype=float).reshape(-1, 4)
    colors = [ORANGE if name.startswith("AdaCal") else BLUE for name in names]
    data = [
        {"type": "bar", "orientation": "h", "x": numbers[:, 0], "y": names, "marker": {"color": colors}, "showlegend": False, "name": "loss",
         "meta": MAY_BE_EMPTY, "error_x": {"array": numbers[:, 2] - numbers[:, 0], "arrayminus": numbers[:, 0] - numbers[:, 1], "thickness": 1.2}},
        {"type": "bar", "orientation": "h", "x": numbers[:, 3], "y": names, "marker": {"color": colors}, "showlegend": False, "name": "density",
         "meta": MAY_BE_EMPTY, "xaxis": "x2", "yaxis": "y2"},
    ]
    looks = ((BLUE, "solid", "circle"), (PURPLE, "dash", "square"), (GREY, "longdash", "diamond"), (GREEN, "dot", "triangle-up"),
             (ORANGE, "solid", "x"))
    for name, (color, dash, symbol) in zip(FORMULAS, looks, strict=True):
        data.append({"type": "scatter", "x": LENGTHS, "y": result["ratio"][name], "mode": "lines", "name": name, "xaxis": "x3", "yaxis": "y3",
                     "line": {"color": color, "dash": dash, "width": 2.2}})
        measured = np.asarray(result["points"].get(name, ()), dtype=float).reshape(-1, 2)
        data.append({"type": "scatter", "x": measured[:, 0], "y": measured[:, 1], "mode": "markers", "name": f"{name}, measured", "xaxis": "x3",
                     "yaxis": "y3", "showlegend": False, "meta": MAY_BE_EMPTY, "marker": {"color": color, "symbol": symbol, "size": 10}})
    now = result["now"]
    data.append({"type": "scatter", "x": [result["tokens"]] * len(now), "y": list(now.values()), "mode": "markers", "name": "at N",
                 "showlegend": False, "marker": {"color": INK, "symbol": "line-ew-open", "size": 12}, "xaxis": "x3", "yaxis": "y3"})
    layout = copy.deepcopy(_tasks_layout())
    n = result["tokens"]
    layout["shapes"] = [{"type": "line", "xref": "x3", "yref": "y3 domain", "x0": n, "x1": n, "y0": 0, "y1": 1,
                         "line": {"color": INK, "dash": "dash", "width": 1.5}}]
    layout["annotations"] = _task_texts(result)
    return {"data": data, "layout": layout}


def _task_texts(result: Mapping) -> list[dict]:
    f, policy, now = result["features"], result["policy"], result["now"]
    found = (f"rare n-grams that recur {f['overlap']:.0f} (longest {f['longest']:.0f}) · cues {f['cues']:.0f} · digits and marks "
             f"{f['symbols']:.0%} · indented {f['indent']:.0%} · zlib {f['zlib']:.2f}")
    rule = (f"policy: {policy.reduce} middle mass > {policy.tau:g}, augmented to κ {policy.kappa:g}, caps × {policy.caps:g}"
            + (f"; top {policy.dense_top:.0%} with dense last rows" if policy.dense_top else ""))
    shares = ", ".join(f"{name} {share:.2f}" for name, share in now.items())
    return _texts((
        (-0.08, 1.09, f"<b>“{result['prompt']}” is dispatched as {result['task']}</b>: {result['active']:.0%} of the heads pass its threshold", 16),
        (-0.08, 1.04, found, 14), (-0.08, 0.99, rule, 14), (-0.08, 0.935, result["setting"], 14),
        (0, 0.305, f"at N = {result['tokens']:,}: {shares}", 14),
    ))


def describe_tasks(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    now = ", ".join(f"{name} {share:.2f}" for name, share in result["now"].items())
    held = f"{len(result['bars'])} rules have recorded losses" if result["bars"] else "no losses are recorded"
    return (f"The prompt {result['prompt']} is dispatched as {result['task']}; {held} on its task; at {result['tokens']} tokens the formula gives as "
            f"share of the pairs {now}.")
