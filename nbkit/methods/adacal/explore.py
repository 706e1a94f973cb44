"""What the main panel shows: the probe of one head of a real model, its metrics, and the pattern that AdaCal makes of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbkit import kernels
from nbkit.errors import InputError
from nbkit.inference import Run, attach
from nbkit.inference.patterns import Pattern, PatternAttention

from .augment import augment, choose
from .config import REDUCTIONS, AdaCalConfig
from .dispatch import Dispatch, dispatch
from .metrics import probe_attention, reduce_rows

BLUE, ORANGE, GREEN, PURPLE, AMBER, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#7F7F7F"
INK = "#1f2328"
MAY_BE_EMPTY = "may be empty"
BINS = 128
FLOOR = -4.0  # log10 of the smallest attention that is drawn

# What a cell of the mask picture holds; the highest kind in a block of cells is shown.
KINDS = ("not causal", "not read", "local and sinks", "added column", "added diagonal", "dense last rows")
KIND_COLORS = ("#ffffff", "#e4e7eb", BLUE, ORANGE, PURPLE, GREEN)


@dataclass(frozen=True, eq=False)
class Captured:
    """The rotated probe queries and keys of every layer of a model that read one prompt densely.

    queries: (layers, heads, probe, head_dim), the last rows; keys: (layers, kv_heads, tokens, head_dim); found: class and features of the prompt.
    """

    name: str
    ids: np.ndarray
    queries: Tensor
    keys: Tensor
    scaling: float
    found: Dispatch

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.keys.shape[2]

    @property
    def probe(self) -> int:
        """Rows that were kept, the longest probe."""
        return self.queries.shape[2]

    def rows(self, probe: int) -> Tensor:
        """The queries of the last ``probe`` rows, (layers, heads, probe, head_dim). Raises: InputError when fewer were kept."""
        if not 1 <= probe <= self.probe:
            raise InputError("probe", got=probe, allowed=f"1..{self.probe} rows, as captured")
        return self.queries[:, :, self.probe - probe :]

    def attention(self, layer: int, head: int, probe: int) -> Tensor:
        """Attention of the last ``probe`` rows of one head, (probe, tokens)."""
        group = self.queries.shape[1] // self.keys.shape[1]
        return probe_attention(self.rows(probe)[layer, head], self.keys[layer, head // group], self.scaling)


class _Recorder(PatternAttention):
    """Reads densely and keeps what the probe needs."""

    name = "adacal-recorder"

    def __init__(self, probe: int):
        self.probe = probe

    def pattern(self, run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Pattern:
        kept = run.state.setdefault("captured", {"queries": [], "keys": []})
        kept["queries"].append(q[0, :, -self.probe :].float().cpu().clone())
        kept["keys"].append(k[0].float().cpu().clone())
        return Pattern(q.shape[1], window=k.shape[2])


def capture(model: Any, ids: Any, *, name: str = "prompt", tokenizer: Any = None, probe: int = 64) -> Captured:
    """Read one prompt densely and keep the queries of its last ``probe`` rows and all keys, layer by layer.

    ids: (tokens,). Raises: InputError for a prompt that is shorter than the probe.
    """
    ids = torch.as_tensor(ids).reshape(-1)
    if not 1 <= probe <= len(ids):
        raise InputError("probe", got=f"{probe} rows of a prompt of {len(ids)} tokens", allowed=f"1 to {len(ids)}")
    with torch.inference_mode(), attach(model, attention=_Recorder(probe)) as run:
        model(ids[None].to(model.device), logits_to_keep=1)
        kept, scaling = run.state["captured"], run.scaling
    queries, keys = (torch.stack(kept[name]).clone() for name in ("queries", "keys"))
    return Captured(name, ids.numpy(), queries, keys, scaling, dispatch(ids, tokenizer))


def profile_of(
    prompt: Captured, layers: slice = slice(None), *, sinks: int = 4, window: int = 64, probe: int = 64,
) -> kernels.HeadProfile:
    """The profile of all heads of some layers at once: layers stand where :func:`nbkit.kernels.head_profile` has its batch."""
    return kernels.head_profile(prompt.rows(probe)[layers], prompt.keys[layers], prompt.scaling, sinks=sinks, window=window)


def task_of(prompt: Captured, task: str) -> str:
    """The class whose policy is used: the given one, or the dispatcher's."""
    return prompt.found.task if task == "auto" else task


# Panel 1: one head.


def head_view(prompt: Captured, layer: int, head: int, cfg: AdaCalConfig, *, bins: int = BINS) -> dict[str, Any]:
    """Everything the main panel shows of one head.

    Returns: ``map`` (probe, bins) log10 of the attention on each run of keys; ``mid`` (probe,) middle mass a row and its three reductions;
    ``picture`` (bins, bins) kinds of the pattern's cells; ``curve`` covered share after each step of the greedy order and ``steps`` taken;
    the metrics, whether the head is active and dense, columns, diagonals, covered share and density.
    Raises: InputError for a layer or head that does not exist.
    """
    layers, heads = prompt.queries.shape[:2]
    for name, got, count in (("layer", layer, layers), ("head", head, heads)):
        if not 0 <= got < count:
            raise InputError(name, got=got, allowed=f"0..{count - 1}")
    task, tokens, probe = task_of(prompt, cfg.task), prompt.tokens, cfg.probe
    policy = cfg.policy(task)
    profile = profile_of(prompt, slice(layer, layer + 1), sinks=cfg.sinks, window=cfg.window, probe=probe)
    mass = profile.mid[0]
    late = policy.fallback_after is not None and policy.fallback_after < 1 and layer >= policy.fallback_after * layers
    active, dense = _decide(prompt, layer, mass, cfg, task, late)
    attention = prompt.attention(layer, head, probe)
    v_cap, s_cap = cfg.caps(task)
    found = augment(attention[None], sinks=cfg.sinks, window=cfg.window, v_cap=v_cap, s_cap=s_cap, kappa=policy.kappa)
    columns, slashes = (index[index >= 0] for index in (found.columns[0], found.slashes[0]))
    if not active[head]:
        columns, slashes = columns[:0], slashes[:0]
    rows = probe if dense[head] else 0
    pattern = Pattern(1, window=cfg.window, sinks=cfg.sinks, dense_rows=rows, columns=columns[None], slashes=slashes[None],
                      probe_pairs=float(probe * tokens))
    score = {how: float(reduce_rows(mass[head], how)) for how in REDUCTIONS}
    return {
        "layer": layer, "head": head, "prompt": prompt.name, "task": task, "given": cfg.task != "auto", "reduce": policy.reduce, "tau": policy.tau,
        "kappa": policy.kappa, "caps": (v_cap, s_cap), "tokens": tokens, "probe": probe, "sinks": cfg.sinks, "window": cfg.window,
        "entropy": float(profile.entropy[0, head]), "concentration": float(profile.concentration[0, head]), "score": score,
        "mid": mass[head].numpy(), "map": _shrink(attention, bins), "active": bool(active[head]), "dense": bool(dense[head]),
        "forced": bool(active[head]) and not score[policy.reduce] > policy.tau, "columns": columns.numpy(), "slashes": slashes.numpy(),
        "curve": found.curve[0].numpy(), "steps": int((found.columns >= 0).sum() + (found.slashes >= 0).sum()), "reached": float(found.covered[0]),
        "covered": 1.0 if rows else float(found.covered[0]) if active[head] else 0.0, "picture": picture_of(pattern, tokens, bins),
        "density": pattern.density(tokens), "floor": base_density(tokens, cfg.sinks, cfg.window),
    }


def _decide(prompt: Captured, layer: int, mass: Tensor, cfg: AdaCalConfig, task: str, fallback: bool) -> tuple[list[bool], list[bool]]:
    """Which heads of the layer are active, and which keep dense rows: AdaCal's own choice, without spending on columns."""
    # No columns are asked for, so the attention of a single row and key is enough beside the masses.
    queries, keys = prompt.queries[layer, :, -1:], prompt.keys[layer, :, :1]
    found = choose(queries, keys, prompt.scaling, mass, replace(cfg, v_cap=0, s_cap=0, guard=False), task, fallback=fallback)
    return found.active.tolist(), found.dense.tolist()


@functools.lru_cache(maxsize=64)
def base_density(tokens: int, sinks: int, window: int) -> float:
    """Density of the A-shape alone, which every head has at least."""
    return Pattern(1, window=window, sinks=sinks).density(tokens)


def _shrink(attention: Tensor, bins: int) -> np.ndarray:
    """Sum runs of keys until at most ``bins`` remain; log10 with a floor."""
    probe, tokens = attention.shape
    step = -(-tokens // bins)
    padded = torch.nn.functional.pad(attention, (0, -tokens % step))
    return padded.view(probe, -1, step).sum(-1).clamp_min(10**FLOOR).log10().numpy().round(2)


def picture_of(pattern: Pattern, tokens: int, bins: int = BINS) -> np.ndarray:
    """The pattern of a single head as a picture (bins, bins) of indices into `KINDS`; rare kinds win inside a block.

    >>> picture_of(Pattern(1, window=1, sinks=1), 3, bins=3).tolist()
    [[2, 0, 0], [2, 2, 0], [2, 1, 2]]
    """
    kinds = np.tri(tokens, dtype=np.uint8)
    if pattern.dense_rows:
        kinds[tokens - pattern.dense_rows :] *= 5
    flat = kinds.reshape(-1)
    for distance in _used(pattern.slashes):
        flat[distance * tokens :: tokens + 1] = 4
    for column in _used(pattern.columns):
        kinds[column:, column] = 3
    kinds[_base_mask(tokens, pattern.sinks, pattern.window)] = 2
    step = -(-tokens // bins)
    # Cells beyond the diagonal or the end cannot make a block look read: they are the lowest kind.
    padded = np.pad(kinds, (0, -tokens % step)) if tokens % step else kinds
    side = padded.shape[0] // step
    rows = np.maximum.reduce([padded[k::step] for k in range(step)])
    return np.maximum.reduce([rows[:, k::step] for k in range(step)]).reshape(side, side)


def _used(table: Tensor | None) -> list[int]:
    return [] if table is None else table[0][table[0] >= 0].tolist()


@functools.lru_cache(maxsize=16)
def _base_mask(tokens: int, sinks: int, window: int) -> np.ndarray:
    return Pattern(1, window=window, sinks=sinks).mask(tokens)[0].numpy()


@functools.cache
def _head_layout(tokens: int, probe: int, sinks: int, window: int) -> dict:
    def axes(n: str, x: Sequence[float], y: Sequence[float], xtitle: str, ytitle: str) -> dict:
        return {"xaxis" + n: {"domain": list(x), "anchor": "y" + n, "title": {"text": xtitle}},
                "yaxis" + n: {"domain": list(y), "anchor": "x" + n, "title": {"text": ytitle}}}

    layout = {
        "height": 900, "margin": {"t": 96, "b": 92, "l": 66, "r": 24}, "showlegend": True,
        "legend": {"orientation": "h", "yanchor": "top", "y": 0.645, "x": 0, "yref": "paper"},
        **axes("", (0, 0.92), (0.72, 1), "key: position in the prompt (tokens)", "probe row (tokens)"),
        **axes("2", (0, 0.4), (0, 0.52), "key (tokens)", "row (tokens)"),
        **axes("3", (0.64, 1), (0.36, 0.52), "probe row (tokens)", "middle mass"),
        **axes("4", (0.64, 1), (0, 0.19), "columns and diagonals added", "covered κ"),
    }
    layout["xaxis"] |= {"range": [-1, tokens + 1], "showgrid": False}
    # Room above and below the map for the marks of columns and diagonals.
    layout["yaxis"] |= {"range": [tokens + 5, tokens - probe - 6], "showgrid": False, "tickvals": [tokens - probe, tokens - 1]}
    layout["xaxis2"] |= {"range": [0, tokens], "showgrid": False, "tickvals": [0, tokens // 2, tokens]}
    layout["yaxis2"] |= {"range": [tokens, 0], "showgrid": False, "tickvals": [0, tokens // 2, tokens]}
    layout["yaxis3"]["range"], layout["yaxis4"]["range"] = [0, 1.04], [0, 1.04]
    layout["xaxis3"]["range"] = [tokens - probe - 1, tokens]
    first, last = tokens - probe, tokens
    local = f"M{first - window},{first} L{last - window},{last} L{last},{last} L{first},{first} Z"
    zone = {"xref": "x", "yref": "y", "fillcolor": "rgba(255,255,255,0.28)", "line": {"color": "#ffffff", "width": 1.5, "dash": "dot"}}
    layout["shapes"] = [
        zone | {"type": "rect", "x0": -0.5, "x1": sinks - 0.5, "y0": first, "y1": last}, zone | {"type": "path", "path": local},
    ]
    return layout


def draw_head(result: Mapping) -> dict[str, Any]:
    """Probe map with zones and what was added; the whole pattern; the middle mass of every row against the threshold; covered share by steps."""
    tokens, probe = result["tokens"], result["probe"]
    bins = result["map"].shape[1]
    step = -(-tokens // bins)
    rows = np.arange(tokens - probe, tokens)
    one, two, three, four = ({"xaxis": "x" + n, "yaxis": "y" + n} for n in ("", "2", "3", "4"))
    columns, slashes = result["columns"], result["slashes"]
    ends = tokens - 1 - slashes
    side = result["picture"].shape[0]
    curve, mid, score = result["curve"], result["mid"], result["score"][result["reduce"]]
    data = [
        {"type": "heatmap", "z": result["map"], "x0": (step - 1) / 2, "dx": step, "y": rows, "zmin": FLOOR, "zmax": 0, "colorscale": "Cividis",
         "colorbar": {"x": 0.93, "xanchor": "left", "y": 0.72, "yanchor": "bottom", "len": 0.28, "thickness": 12, "outlinewidth": 0,
                      "tickvals": [-4, -2, 0], "ticktext": ["≤ 1e−4", "0.01", "1"]},
         "hovertemplate": "row %{y}, key %{x}: 10^%{z}<extra></extra>"} | one,
        _marks(columns, tokens - probe - 3.5, "added column", ORANGE, "triangle-down") | one,
        _marks(ends, tokens + 2.5, "added diagonal (its key of the last row)", PURPLE, "triangle-up") | one,
        {"type": "heatmap", "z": result["picture"], "x0": tokens / side / 2, "dx": tokens / side, "y0": tokens / side / 2, "dy": tokens / side,
         "zmin": -0.5, "zmax": len(KINDS) - 0.5, "colorscale": _steps(KIND_COLORS), "hoverinfo": "skip",
         "colorbar": {"x": 0.41, "xanchor": "left", "y": 0.26, "yanchor": "middle", "len": 0.5, "thickness": 12, "outlinewidth": 0,
                      "tickvals": list(range(1, len(KINDS))), "ticktext": list(KINDS[1:]), "tickfont": {"size": 13}}} | two,
        {"type": "scatter", "x": rows, "y": mid, "mode": "lines", "name": "middle mass of the row", "line": {"color": BLUE, "width": 2},
         "showlegend": False} | three,
        {"type": "scatter", "x": [rows[0], rows[-1]], "y": [score, score], "mode": "lines", "name": result["reduce"], "showlegend": False,
         "line": {"color": BLUE, "dash": "dot", "width": 2}} | three,
        {"type": "scatter", "x": [rows[0], rows[-1]], "y": [result["tau"]] * 2, "mode": "lines", "name": "τ", "showlegend": False,
         "line": {"color": ORANGE, "dash": "dash", "width": 2}} | three,
        {"type": "scatter", "x": np.arange(len(curve)), "y": curve, "mode": "lines", "name": "covered share", "showlegend": False,
         "line": {"color": BLUE, "width": 2.2}} | four,
        {"type": "scatter", "x": [0, max(len(curve) - 1, 1)], "y": [result["kappa"]] * 2, "mode": "lines", "name": "target", "showlegend": False,
         "line": {"color": ORANGE, "dash": "dash", "width": 2}} | four,
        {"type": "scatter", "x": [result["steps"]], "y": [result["reached"]], "mode": "markers", "name": "stop", "showlegend": False,
         "marker": {"color": GREEN if result["active"] else GREY, "size": 12, "symbol": "diamond" if result["active"] else "diamond-open"}} | four,
    ]
    layout = copy.deepcopy(_head_layout(tokens, probe, result["sinks"], result["window"]))
    layout["xaxis4"]["range"] = [-0.03 * len(curve), 1.03 * len(curve)]
    layout["annotations"] = _head_texts(result)
    return {"data": data, "layout": layout}


def _marks(at: np.ndarray, height: float, name: str, color: str, symbol: str) -> dict:
    return {"type": "scatter", "x": at, "y": np.full(len(at), height), "mode": "markers", "name": name, "meta": MAY_BE_EMPTY,
            "marker": {"color": color, "symbol": symbol, "size": 7}, "hovertemplate": name + " %{x}<extra></extra>", "cliponaxis": False}


def _steps(colors: Sequence[str]) -> list[list]:
    """A colour scale of flat steps."""
    edges = np.linspace(0, 1, len(colors) + 1)
    return [[float(edge), color] for a, b, color in zip(edges[:-1], edges[1:], colors, strict=True) for edge in (a, b)]


def _verdict(result: Mapping) -> str:
    score, tau, reduce = result["score"][result["reduce"]], result["tau"], result["reduce"]
    if result["forced"]:
        return f"active as the layer's best: {reduce} {score:.2f} ≤ τ {tau:.2f}"
    if not result["active"]:
        return f"left alone: {reduce} {score:.2f} ≤ τ {tau:.2f}"
    dense = ", last rows dense" if result["dense"] else ""
    return f"active: {reduce} {score:.2f} > τ {tau:.2f}{dense}"


def _head_texts(result: Mapping) -> list[dict]:
    score, ended = result["score"], "" if result["active"] else " (if it were active)"
    whose = f"“{result['prompt']}”, {result['task']} ({'given' if result['given'] else 'dispatched'})"
    texts = (
        (0, 1.045, f"<b>layer {result['layer']}, head {result['head']}: {_verdict(result)}</b>; {whose}", 15),
        (0, 1.0, f"entropy {result['entropy']:.2f} · concentration {result['concentration']:.2f} · middle mass: mean {score['mean']:.2f}, largest "
                 f"row {score['max']:.2f}, last row {score['last']:.2f}", 14),
        (0, 0.525, f"pattern: density {result['density']:.2f} with probe (A-shape alone {result['floor']:.2f})", 15),
        (0.64, 0.525, f"middle mass; {result['reduce']} dotted, τ dashed", 15),
        (0.64, 0.195, f"κ {result['reached']:.2f} after {result['steps']} steps{ended}; target dashed", 15),
    )
    return [{"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
             "font": {"size": size}} for x, y, text, size in texts]


def describe_head(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    score = result["score"]
    return (
        f"Layer {result['layer']}, head {result['head']} on the prompt {result['prompt']}: entropy {result['entropy']:.2f}, concentration "
        f"{result['concentration']:.2f}, middle mass {score['mean']:.2f} in the mean and {score['max']:.2f} in its largest row; the head is "
        f"{_verdict(result)}; {len(result['columns'])} columns and {len(result['slashes'])} diagonals cover {result['covered']:.2f} of the middle "
        f"mass at density {result['density']:.2f}."
    )


def evidence_mass(prompt: Captured, spans: Sequence[tuple[int, int]], rows: slice = slice(None)) -> np.ndarray:
    """Largest attention of any of the kept rows on some token spans: (layers, heads). rows: which of the kept rows count."""
    heads = prompt.queries.shape[1]
    out = []
    for queries, keys in zip(prompt.queries, prompt.keys, strict=True):
        attention = probe_attention(queries, keys.repeat_interleave(heads // len(keys), 0), prompt.scaling)
        out.append(sum(attention[..., start:stop].sum(-1) for start, stop in spans)[:, rows].amax(-1).numpy())
    return np.stack(out)
