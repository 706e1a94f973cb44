"""What the panels show: arrays of one setting, and the figures drawn from them.

Every ``*_view`` is a pure function of its arguments; every ``draw_*`` gives a figure with a constant number and kinds of traces.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nbkit.errors import InputError

from .baselines import gd_risk, ols_risk, ridge_risk
from .simulate import sample_step_matrix, simulate
from .spectrum import check_depths, density, edges
from .theory import CoTDepthTheory, rate_map

# Pre-trainings and contexts of the dots: few, because a slider waits for them.
SAMPLES = {100: (3, 2), 200: (2, 2), 400: (2, 1)}
SIMULATED_DEPTH = 20
MAP_ALPHAS, MAP_TAUS = np.geomspace(0.2, 6, 60), np.geomspace(1.05, 50, 60)
BLUE, ORANGE, GREEN, PURPLE, AMBER, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"
MAY_BE_EMPTY = "may be empty"


def theory_of(alpha: float, tau: float, noise: float = 0.0, *, step: float = 1.0, test_ratio: float = 1.0) -> CoTDepthTheory:
    """The formula for a test prompt ``test_ratio`` times as long as those of pre-training.

    >>> theory_of(2.0, 4.0, test_ratio=0.5).context
    1.0
    """
    return CoTDepthTheory(alpha, tau, noise, alpha_test=None if test_ratio == 1 else alpha * test_ratio, step=step)


# ---- error against depth, and the phase diagram ----


def depth_view(
    alpha: float, tau: float, noise: float = 0.0, *, step: float = 1.0, test_ratio: float = 1.0, depth: int = 20, d: int | None = None,
) -> dict[str, Any]:
    """Error at depths 0..depth by the formula, its baselines, the phase diagram around it and, for ``d``, simulated errors.

    Args:
        tau: pre-training prompts per dimension, > 1 or inf. d: dimension of the simulation (100, 200 or 400); None for none.

    Returns:
        ``depths``, ``error``, ``unlimited`` (tau = inf), ``descent`` (best constant step) (depth + 1,); ``ols``, ``ridge`` floors; ``best`` depth
        among those shown and ``best_error``; ``rate``, ``limit``, ``critical_tau``, ``regime``; ``map`` (60, 60) and ``boundary`` (60,) of the
        diagram over alpha and tau; ``dots``: depths, mean, low, high over the simulated prompts, empty without ``d``.

    >>> view = depth_view(2.0, 2.0, depth=20)
    >>> view["best"], view["regime"]
    (7, 'overthinking')
    """
    theory = theory_of(alpha, tau, noise, step=step, test_ratio=test_ratio)
    depths = np.arange(int(check_depths(depth, 200)) + 1)
    error, context = theory.error(depths), theory.context
    best = int(error.argmin())
    map_, boundary = _diagram(noise, step, test_ratio)
    return {
        "alpha": alpha, "tau": tau, "noise": noise, "depths": depths, "error": error, "unlimited": theory.unlimited().error(depths),
        "descent": gd_risk(depths, context, noise), "ols": ols_risk(context, noise), "ridge": ridge_risk(context, noise),
        "best": best, "best_error": float(error[best]), "rate": theory.rate().value, "limit": theory.limit(), "regime": theory.regime(),
        "critical_tau": theory.critical_tau(), "map": map_, "boundary": boundary, "test_ratio": test_ratio,
        "dots": _dots(alpha, tau, noise, step, test_ratio, min(depth, SIMULATED_DEPTH), d), "d": d,
    }


@functools.lru_cache(maxsize=256)
def _diagram(noise: float, step: float, test_ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Regime and rate as one number, Lambda in (0, 1) exponential, 1 + Lambda saturation, 2 + log10 Lambda overthinking; and the critical tau."""
    rate = rate_map(MAP_ALPHAS, MAP_TAUS, noise=noise, step=step, test_ratio=test_ratio)
    stable = rate + (MAP_ALPHAS * test_ratio < 1)
    # The ends of each third of the colour scale belong to the next one.
    value = np.where(rate < 1, np.minimum(stable, np.where(stable < 1, 0.995, 1.995)), 2.005 + np.minimum(np.log10(np.maximum(rate, 1)), 0.99))
    boundary = np.array([theory_of(a, math.inf, noise, step=step, test_ratio=test_ratio).critical_tau() for a in MAP_ALPHAS])
    boundary[(boundary < MAP_TAUS[0]) | (boundary > MAP_TAUS[-1])] = np.nan
    value.flags.writeable = boundary.flags.writeable = False
    return value, boundary


@functools.lru_cache(maxsize=64)
def _dots(alpha: float, tau: float, noise: float, step: float, test_ratio: float, depth: int, d: int | None) -> dict[str, np.ndarray]:
    if d is None:
        return {"depths": np.zeros(0), "mean": np.zeros(0), "low": np.zeros(0), "high": np.zeros(0)}
    if d not in SAMPLES:
        raise InputError("d", got=d, allowed="None, " + ", ".join(map(str, SAMPLES)))
    draws, contexts = SAMPLES[d]
    run = simulate(alpha, tau, noise, alpha_test=alpha * test_ratio, step=step, d=d, depth=depth, draws=draws, contexts=contexts, seed=0).error
    found = {"depths": np.arange(depth + 1), "mean": run.mean((0, 1)), "low": run.min((0, 1)), "high": run.max((0, 1))}
    for values in found.values():
        values.flags.writeable = False
    return found


@functools.cache
def _depth_layout() -> dict:
    ticks = [0.2, 0.5, 1, 2, 4], [1.05, 2, 5, 10, 20, 50]
    axis = {"showgrid": False, "zeroline": False}
    return {
        "height": 580, "margin": {"t": 78, "b": 140, "l": 74, "r": 20}, "legend": {"orientation": "h", "yanchor": "top", "y": -0.17, "x": 0},
        "xaxis": {"domain": [0, 0.53], "title": {"text": "chain-of-thought depth t (steps)"}, "anchor": "y"},
        "yaxis": {"type": "log", "title": {"text": "error E_t = E|w − w_t|²"}, "exponentformat": "power", "dtick": 1, "anchor": "x"},
        "xaxis2": {"domain": [0.64, 1], "title": {"text": "context α = n/d"}, "anchor": "y2", **axis,
                   "range": np.log10(MAP_ALPHAS[[0, -1]]).tolist(), "tickvals": np.log10(ticks[0]).tolist(), "ticktext": list(map(str, ticks[0]))},
        "yaxis2": {"title": {"text": "pre-training τ = B/d"}, "anchor": "x2", **axis,
                   "range": np.log10(MAP_TAUS[[0, -1]]).tolist(), "tickvals": np.log10(ticks[1]).tolist(), "ticktext": list(map(str, ticks[1]))},
    }


# Light at the boundary Lambda = 1, dark far from it; thirds: exponential, saturation, overthinking.
_REGIMES = [[0, "#00416a"], [0.333, "#9ccbe8"], [0.334, "#00553f"], [0.666, "#9edcc6"], [0.667, "#fbd3b4"], [1, "#8a3c00"]]


def draw_depth(result: Mapping) -> dict[str, Any]:
    """Error against depth with its baselines and dots on the left, phase diagram with the cursor on the right."""
    depths, dots, last = result["depths"], result["dots"], int(result["depths"][-1])
    low = max(1e-6, 0.5 * min(result["error"].min(), result["unlimited"].min(), _positive(result["ridge"], 1.0)))
    high = min(1e6, max(2.0, 2 * result["error"].max()))
    ends = [0, last]
    inside = len(dots["depths"]) > 0
    band_x = np.concatenate([dots["depths"], dots["depths"][::-1]])
    band_y = np.clip(np.concatenate([dots["high"], dots["low"][::-1]]), low / 10, high * 10)
    at_cursor = [math.log10(result["alpha"])], [math.log10(min(result["tau"], MAP_TAUS[-1]))]
    right = {"xaxis": "x2", "yaxis": "y2"}
    data = [
        _line(band_x, band_y, "smallest to largest simulated", AMBER, width=0, fill="toself", fillcolor="rgba(230,159,0,0.25)", meta=MAY_BE_EMPTY,
              showlegend=False, hoverinfo="skip"),
        _line(depths, result["unlimited"], "τ = ∞", GREEN, dash="dash"),
        _line(depths, result["descent"], "gradient descent, best step", PURPLE, dash="dot"),
        _line(depths, result["error"], "formula", BLUE, width=3.5, hovertemplate="depth %{x}: %{y:.4g}<extra>formula</extra>"),
        {"type": "scatter", "x": dots["depths"], "y": dots["mean"], "mode": "markers", "name": "simulated", "meta": MAY_BE_EMPTY,
         "marker": {"color": AMBER, "size": 9, "line": {"color": "#5a4300", "width": 1}}, "showlegend": inside},
        _some(ends, [result["ols"]] * 2, "least squares", GREY, dash="longdash"),
        _some(ends, [result["ridge"]] * 2, "best ridge (no method beats it)", SKY, dash="longdashdot"),
        _line([result["best"]] * 2, [low, result["best_error"]], "best depth", ORANGE, dash="solid", mode="lines+markers",
              marker={"symbol": "star", "size": [0, 14], "color": ORANGE}),
        {"type": "heatmap", "x": np.log10(MAP_ALPHAS), "y": np.log10(MAP_TAUS), "z": result["map"], "zmin": 0, "zmax": 3, "colorscale": _REGIMES,
         "showscale": False, "hoverinfo": "skip", **right},
        _some(np.log10(MAP_ALPHAS), np.log10(result["boundary"]), "boundary Λ = 1", "#111111", above=-1, hoverinfo="skip", **right),
        {"type": "scatter", "x": at_cursor[0], "y": at_cursor[1], "mode": "markers", "name": "this setting", "showlegend": False,
         "marker": {"symbol": "cross", "size": 15, "color": "#ffffff", "line": {"color": "#111111", "width": 2}}, **right},
    ]
    layout = copy.copy(_depth_layout())
    layout["yaxis"] = layout["yaxis"] | {"range": [math.log10(low), math.log10(high)]}
    layout["xaxis"] = layout["xaxis"] | {"range": [-0.3, last + 0.3]}
    layout["annotations"] = [_note(_badge(result), 0), _note("<b>blue</b> exponential<br><b>green</b> saturation, <b>orange</b> overthinking", 0.6)]
    return {"data": data, "layout": layout}


def _badge(result: Mapping) -> str:
    limit = "∞" if math.isinf(result["limit"]) else f"{result['limit']:.3g}"
    best = f"best depth shown: {result['best']}, E = {result['best_error']:.3g}"
    return f"<b>{result['regime']}</b>, Λ = {result['rate']:.3f}, limit {limit}<br>{best}"


def describe_depth(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    limit = "without bound" if math.isinf(result["limit"]) else f"to {result['limit']:.3g}"
    dots = f" Simulated at d = {result['d']}." if result["d"] else ""
    critical = "no τ is enough" if math.isinf(result["critical_tau"]) else f"critical τ {result['critical_tau']:.3g}"
    return (
        f"{result['regime'].capitalize()}: at α = {result['alpha']:g}, τ = {result['tau']:g}, noise {result['noise']:g} the error goes {limit} with "
        f"Λ = {result['rate']:.3f}; among depths 0 to {result['depths'][-1]} it is smallest, {result['best_error']:.3g}, at depth {result['best']}; "
        f"{critical}.{dots}"
    )


# ---- where the best depth lies ----


class BestTable:
    """Best depths of the recording ``cot-depth-best`` by (alpha, tau, noise): inf when the error falls forever, NaN beyond ``deepest``.

    >>> table = BestTable({"alphas": [1.0], "taus": [3.0, "inf"], "noises": [0.0], "deepest": 400, "best": [[[8], ["inf"]]]})
    >>> table.values.tolist()
    [[[8.0], [inf]]]
    """

    def __init__(self, data: Mapping):
        self.alphas, self.taus, self.noises = (tuple(float(v) for v in data[key]) for key in ("alphas", "taus", "noises"))
        self.deepest = int(data["deepest"])
        self.values = np.array([[[math.nan if v is None else float(v) for v in row] for row in block] for block in data["best"]])

    def view(self, alpha: float, tau: float, noise: float) -> dict[str, Any]:
        """Best depth along tau at this noise, along noise at this tau, and at both.

        Returns: ``taus``, ``by_tau`` (finite tau), ``noises``, ``by_noise`` (noise > 0), ``here``, ``critical_tau``.
        Raises: InputError for a setting that is not in the table.
        """
        place = []
        for name, value, known in (("alpha", alpha, self.alphas), ("tau", tau, self.taus), ("noise", noise, self.noises)):
            if value not in known:
                raise InputError(name, got=value, allowed=", ".join(f"{v:g}" for v in known))
            place.append(known.index(value))
        block = self.values[place[0]]
        finite, noisy = np.isfinite(self.taus), np.array(self.noises) > 0
        return {
            "alpha": alpha, "tau": tau, "noise": noise, "deepest": self.deepest, "here": float(block[place[1], place[2]]),
            "critical_tau": CoTDepthTheory(alpha, tau, noise).critical_tau(),
            "taus": np.array(self.taus)[finite], "by_tau": block[finite, place[2]],
            "noises": np.array(self.noises)[noisy], "by_noise": block[place[1], noisy],
        }


@functools.cache
def _best_layout() -> dict:
    yaxis = {"type": "log", "range": np.log10([0.9, 300]).tolist(), "title": {"text": "best depth t* (steps)"}, "tickvals": [1, 3, 10, 30, 100, 200]}
    return {
        "height": 470, "margin": {"t": 62, "b": 105, "l": 70, "r": 20}, "legend": {"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0},
        "xaxis": {"type": "log", "domain": [0, 0.46], "anchor": "y", "title": {"text": "pre-training τ = B/d"},
                  "range": np.log10([1.15, 22]).tolist(), "tickvals": [1.25, 2, 3, 5, 10, 20]},
        "yaxis": {**yaxis, "anchor": "x"},
        "xaxis2": {"type": "log", "domain": [0.56, 1], "anchor": "y2", "title": {"text": "label noise s² (variance)"},
                   "range": np.log10([0.0027, 1.1]).tolist(), "tickvals": [0.003, 0.01, 0.03, 0.1, 0.3, 1]},
        "yaxis2": {**yaxis, "anchor": "x2"},
    }


def draw_best(result: Mapping) -> dict[str, Any]:
    """Best depth against tau (left) and against noise (right) on logarithmic axes."""
    right = {"xaxis": "x2", "yaxis": "y2"}
    here, points = result["here"], {"mode": "lines+markers"}
    star = {"mode": "markers", "marker": {"symbol": "star", "size": 16, "color": ORANGE}}
    data = [
        _some(result["taus"], result["by_tau"], "best depth", BLUE, **points),
        _line(result["taus"], result["taus"] ** 2, "τ² (law at α = 1, no noise)", GREY, dash="dash"),
        _some([result["critical_tau"]] * 2, [0.9, 300], "critical τ", GREEN, dash="dot"),
        _some([min(result["tau"], 20.0)], [here], "this setting", ORANGE, **star),
        _some(result["noises"], result["by_noise"], "best depth", BLUE, showlegend=False, **points, **right),
        _line(result["noises"], 1.2 / result["noises"], "1.2 / s² (law at α = 1, τ = ∞)", PURPLE, dash="dashdot", **right),
        _some([max(result["noise"], 0.003)], [here], "this setting", ORANGE, showlegend=False, **star, **right),
    ]
    layout = copy.copy(_best_layout())
    layout["annotations"] = [_note(f"<b>{_best_text(result)}</b>", 0), _note(_best_setting(result), 0.56)]
    return {"data": data, "layout": layout}


def _best_text(result: Mapping) -> str:
    here = result["here"]
    return "every further step helps" if here == math.inf else f"best depth {here:.0f}" if here == here else f"beyond {result['deepest']} steps"


def _best_setting(result: Mapping) -> str:
    return f"α = {result['alpha']:g}, τ = {result['tau']:g}, noise {result['noise']:g}"


def describe_best(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    many = int(np.isfinite(result["by_tau"]).sum())
    return f"At {_best_setting(result)}: {_best_text(result)}; of {len(result['taus'])} values of τ {many} have a finite best depth."


# ---- eigenvalues ----


def eigenvalue_view(alpha: float, tau: float, noise: float = 0.0, *, step: float = 1.0, d: int = 150, seed: int = 0) -> dict[str, Any]:
    """Law of the context's eigenvalues with the factor a(L) that one mean step applies, and the eigenvalues of one sampled step M.

    Returns: ``grid``, ``density``, ``factor`` (120,); ``real``, ``imaginary`` (d,) of M; ``edge_real``, ``edge_imaginary``: closed curve around the
    region that they fill in the limit; ``radius``: its largest distance from 0, sqrt(Lambda); ``outside``: how many lie outside the unit circle.
    """
    theory = CoTDepthTheory(alpha, tau, noise, step=step, nodes=200)
    low, high = edges(alpha)
    grid = np.linspace(max(0.0, low - 0.05 * (high - low)), high + 0.05 * (high - low), 120)
    found = _eigenvalues(alpha, tau, noise, step, d, seed)
    real, imaginary = _edge(theory)
    return {
        "alpha": alpha, "tau": tau, "grid": grid, "density": density(alpha, np.maximum(grid, 1e-3)), "factor": 1 - theory.gain * grid,
        "real": found.real, "imaginary": found.imag, "edge_real": real, "edge_imaginary": imaginary, "rate": theory.rate().value,
        "radius": math.sqrt(theory.rate().value), "outside": int((np.abs(found) > 1 + 1e-9).sum()), "atom": max(0.0, 1 - alpha),
    }


@functools.lru_cache(maxsize=128)
def _eigenvalues(alpha: float, tau: float, noise: float, step: float, d: int, seed: int) -> np.ndarray:
    return np.linalg.eigvals(sample_step_matrix(alpha, tau, noise, step=step, d=d, seed=seed)).astype(complex)


def _edge(theory: CoTDepthTheory) -> tuple[np.ndarray, np.ndarray]:
    """The curve nu * mean of L^2 / |z - a(L)|^2 = 1: the random part of M fills its inside with eigenvalues."""
    rate, (values, weights) = theory.rate(), theory.spectrum()
    x = np.linspace(-math.sqrt(rate.minus), math.sqrt(rate.plus), 61)[1:-1]
    gap, weight = (x[:, None] - (1 - theory.gain * values)) ** 2, theory.spread * weights * values**2
    low, high = np.zeros_like(x), np.full_like(x, math.sqrt(weight.sum()))
    for _ in range(30):
        middle = (low + high) / 2
        inside = (weight / (gap + middle[:, None] ** 2 + 1e-300)).sum(1) > 1
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    ends = [-math.sqrt(rate.minus)], [math.sqrt(rate.plus)]
    return np.concatenate([ends[0], x, ends[1], x[::-1], ends[0]]), np.concatenate([[0.0], high, [0.0], -high[::-1], [0.0]])


@functools.cache
def _eigen_layout() -> dict:
    return {
        "height": 500, "margin": {"t": 62, "b": 110, "l": 70, "r": 20}, "legend": {"orientation": "h", "yanchor": "top", "y": -0.19, "x": 0},
        "xaxis": {"domain": [0, 0.38], "anchor": "y", "title": {"text": "eigenvalue L of the context's S"}},
        "yaxis": {"anchor": "x", "title": {"text": "density of L"}, "rangemode": "tozero"},
        "yaxis3": {"anchor": "x", "overlaying": "y", "side": "right", "title": {"text": "factor a(L)"}, "showgrid": False, "range": [-1.4, 1.05],
                   "tickvals": [-1, -0.5, 0, 0.5, 1]},
        "xaxis2": {"domain": [0.62, 1], "anchor": "y2", "title": {"text": "real part"}, "constrain": "domain"},
        "yaxis2": {"anchor": "x2", "title": {"text": "imaginary part"}, "scaleanchor": "x2", "constrain": "domain"},
    }


_ANGLES = np.linspace(0, 2 * np.pi, 121)


def draw_eigenvalues(result: Mapping) -> dict[str, Any]:
    """Density and a(L) on the left; eigenvalues of one sampled step, the edge of their region and the unit circle on the right."""
    right = {"xaxis": "x2", "yaxis": "y2"}
    data = [
        _line(result["grid"], result["density"], "density of L", BLUE, fill="tozeroy", fillcolor="rgba(0,114,178,0.18)"),
        _line(result["grid"], result["factor"], "a(L) = 1 − cL", PURPLE, dash="dash", yaxis="y3"),
        {"type": "scatter", "x": result["real"], "y": result["imaginary"], "mode": "markers", "name": "eigenvalues of one step M",
         "marker": {"color": AMBER, "size": 6, "line": {"color": "#5a4300", "width": 0.6}}, **right},
        _line(np.cos(_ANGLES), np.sin(_ANGLES), "unit circle", GREY, dash="dot", hoverinfo="skip", **right),
        _line(result["edge_real"], result["edge_imaginary"], "edge in the limit", ORANGE, hoverinfo="skip", **right),
    ]
    layout = copy.copy(_eigen_layout())
    reach = 1.1 * max(1.0, result["radius"], float(np.hypot(result["real"], result["imaginary"]).max()))
    layout["xaxis2"] = layout["xaxis2"] | {"range": [-reach, reach]}
    layout["yaxis2"] = layout["yaxis2"] | {"range": [-reach, reach]}
    atom = f", {result['atom']:.0%} of L at 0" if result["atom"] else ""
    layout["annotations"] = [
        _note(f"α = {result['alpha']:g}{atom}", 0), _note(f"<b>Λ = {result['rate']:.3f}</b>, {result['outside']} outside 1", 0.62)
    ]
    return {"data": data, "layout": layout}


def describe_eigenvalues(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    size, apart = len(result["real"]), " (apart from directions that the context never shows, at 1)" if result["atom"] else ""
    return (
        f"At α = {result['alpha']:g} and τ = {result['tau']:g}, {result['outside']} of {size} eigenvalues of one sampled step lie outside 1; "
        f"in the limit they reach out to {result['radius']:.3f}{apart}, and the error changes by the factor {result['rate']:.3f} a step."
    )


# ---- helpers of the figures ----


def _line(x, y, name: str, color: str, *, dash: str = "solid", width: float = 2.5, **more: Any) -> dict:
    return {"type": "scatter", "x": x, "y": y, "name": name, "mode": "lines", "line": {"color": color, "dash": dash, "width": width}} | more


def _note(text: str, x: float) -> dict:
    """A line of text above one of the two plots."""
    return {"text": text, "xref": "paper", "yref": "paper", "x": x, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "align": "left",
            "showarrow": False}


def _some(x, y, name: str, color: str, *, above: float = 0.0, **more: Any) -> dict:
    """A line with gaps where a logarithmic axis cannot show it: infinite values, and y not above ``above``; without data when nothing is left."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    shown = np.isfinite(x) & np.isfinite(y) & (y > above)
    x, y = (x, np.where(shown, y, np.nan)) if shown.any() else (x[:0], y[:0])
    return _line(x, y, name, color, meta=MAY_BE_EMPTY, **more)


def _positive(value: float, otherwise: float) -> float:
    return value if 0 < value < math.inf else otherwise
