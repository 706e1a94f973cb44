"""The tokens of a linear attention layer while it thinks: what is in its context after each thought, and the drawing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from nbkit.errors import InputError

from .explore import BLUE, GREY, ORANGE, _line, _note
from .simulate import sample_prompts


def attention_view(model: Any, *, n: int, thoughts: int, append: bool = True, noise: float = 0.0, seed: int = 0, most: int = 12) -> dict[str, Any]:
    """One prompt read by a ``LinearSelfAttentionCoT``: its tokens after ``thoughts`` steps and the error after each.

    Args:
        append: keep all thoughts in the context; otherwise only the last. most: thoughts that the picture has room for.

    Returns:
        ``tokens`` (2 d + 2, n + most + 1), NaN where no token is; ``errors`` (thoughts + 1,) squared distance to w over the mean length of w;
        ``w``, ``thought`` (d,); ``d``, ``n``.

    Raises: InputError for more thoughts than ``most``.
    """
    import torch

    if not 0 <= thoughts <= most:
        raise InputError("thoughts", got=thoughts, allowed=f"0 to {most}")
    dtype = model.V.dtype
    X, y, w = (torch.from_numpy(part).to(dtype) for part in sample_prompts(1, n, model.d, noise=noise, seed=seed))
    with torch.inference_mode():
        path = model(X, y, thoughts, append=append)[0]
        kept = path if append else path[-1:]
        examples = torch.cat([X[0], y[0, :, None], torch.zeros(n, model.d + 1, dtype=dtype)], 1)
        tokens = np.full((2 * model.d + 2, n + most + 1), np.nan)
        tokens[:, :n] = examples.T.numpy()
        tokens[:, n + thoughts + 1 - len(kept) : n + thoughts + 1] = model.token(kept).T.numpy()
    errors = ((path - w[0]) ** 2).sum(-1).double().numpy()
    return {"tokens": tokens, "errors": errors, "w": w[0].numpy(), "thought": path[-1].numpy(), "d": model.d, "n": n, "most": most, "append": append}


@functools.cache
def _layout() -> dict:
    legend = {"orientation": "h", "yanchor": "top", "y": -0.13, "x": 0}
    return {
        "height": 720, "margin": {"t": 62, "b": 96, "l": 76, "r": 20}, "legend": legend, "barmode": "group",
        "xaxis": {"domain": [0, 1], "anchor": "y", "title": {"text": "token: the examples, then the thoughts w_0, w_1, …"}, "showgrid": False},
        "yaxis": {"domain": [0.5, 1], "anchor": "x", "showgrid": False},
        "xaxis2": {"domain": [0, 0.44], "anchor": "y2", "title": {"text": "thought t"}, "range": [-0.5, 12.5]},
        "yaxis2": {"domain": [0, 0.34], "anchor": "x2", "type": "log", "title": {"text": "error"}, "exponentformat": "power", "dtick": 1},
        "xaxis3": {"domain": [0.56, 1], "anchor": "y3", "title": {"text": "entry of the weights"}},
        "yaxis3": {"domain": [0, 0.34], "anchor": "x3", "title": {"text": "weight"}},
    }


# Blue below zero, white, orange above; grey beyond the range stands for "no token".
_SCALE = [[0, "#0072B2"], [0.4545, "#f7f7f7"], [0.909, "#D55E00"], [0.91, "#d4d4d4"], [1, "#d4d4d4"]]


def draw_attention(result: Mapping) -> Any:
    """All tokens as columns on top; below, the error after every thought, and the newest thought beside the true weights."""
    import plotly.graph_objects as go

    tokens, errors, d, n = result["tokens"], result["errors"], result["d"], result["n"]
    reach = 2.5
    entries = np.arange(1, d + 1)
    bottom, side = {"xaxis": "x2", "yaxis": "y2"}, {"xaxis": "x3", "yaxis": "y3"}
    data = [
        # Whole numbers in hundredths of the reach: a tenth of the bytes in an exported page.
        {"type": "heatmap", "z": np.where(np.isnan(tokens), 120, np.round(100 * np.clip(tokens / reach, -1, 1))).astype(np.int8), "zmin": -100,
         "zmax": 120, "showscale": False, "colorscale": _SCALE, "hovertemplate": "token %{x}, row %{y}<extra></extra>"},
        _line([n - 0.5, n - 0.5], [-0.5, len(tokens) - 0.5], "thoughts begin", "#111111", dash="dot"),
        _line(np.arange(len(errors)), np.maximum(errors, 1e-12), "error", ORANGE, mode="lines+markers", marker={"size": 9}, **bottom),
        {"type": "bar", "x": entries, "y": result["w"], "name": "true weights w", "marker": {"color": GREY}, **side},
        {"type": "bar", "x": entries, "y": result["thought"], "name": "newest thought", "marker": {"color": BLUE}, **side},
    ]
    layout = copy.copy(_layout())
    rows = {"tickvals": [d / 2 - 0.5, d, 1.5 * d + 0.5, 2 * d + 1], "ticktext": ["x", "y", "thought w", "flag"]}
    layout["yaxis"] = layout["yaxis"] | rows | {"range": [len(tokens) - 0.5, -0.5]}
    low, high = np.log10(max(min(errors.min(), 0.01), 1e-6) / 2), np.log10(min(max(errors.max(), 1.0), 1e6) * 2)
    layout["yaxis2"] = layout["yaxis2"] | {"range": [float(low), float(high)]}
    many = "all thoughts stay" if result["append"] else "only the newest thought stays"
    layout["annotations"] = [_note(f"<b>thought {len(errors) - 1}</b>: error {errors[-1]:.3g} · {many}", 0)]
    return go.Figure({"data": data, "layout": layout})


def describe_attention(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    errors = result["errors"]
    return (
        f"{result['n']} examples of dimension {result['d']} and {len(errors) - 1} thoughts after the first: the error went from {errors[0]:.3g} to "
        f"{errors[-1]:.3g}, its smallest value was {errors.min():.3g} at thought {int(errors.argmin())}."
    )
