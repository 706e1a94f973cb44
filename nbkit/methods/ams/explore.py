"""What one policy does to one layer of a recorded pass: arrays for plots, and the plot.

`inspect_layer` is a pure function of its arguments and fast enough to sit under a slider; `draw_inspection` turns its result into one
figure of a fixed structure.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nbkit import kernels
from nbkit.errors import InputError

from . import allocate
from .measure import overlap, retained, wipe_out_rate
from .policy import SegmentedPolicy
from .replay import Recording, replay

BLOCK = 32


def inspect_layer(recording: Recording, policy: SegmentedPolicy, layer: int, head: int, event: float = 1.0) -> dict:
    """Replay one layer and describe one event of one head.

    Args:
        head: key-value head. event: which event to look into, 0 the first, 1 the last.

    Returns:
        ``seen`` (events,) tokens seen at each event; ``raster`` (events, tokens) int8: 0 not seen yet, 1 evicted, 2 kept; ``wiped`` and ``iou``
        (events,) shares, iou NaN at the first; for the chosen event ``place`` (slots,) original positions of the slots that segments tile, ``mass``
        (slots,), ``start``, ``end`` original positions of every segment, ``share`` its mass, ``quota``, ``got`` its entries, ``kept`` (n,) positions,
        ``floor_lost`` segments below their floor.

    Raises:
        InputError: for a head that does not exist, or a policy that never evicts anything in this recording.
    """
    if not 0 <= event <= 1:
        raise InputError("event", got=event, allowed="0 (the first) to 1 (the last)")
    events = replay(recording, policy, layer)
    heads = recording.keys[0].shape[0]
    if not 0 <= head < heads:
        raise InputError("head", got=head, allowed=f"0..{heads - 1}")
    if not events:
        raise InputError(
            "keep, interval", got=(policy.keep, policy.interval), allowed=f"an event within {recording.tokens} tokens", hint="lower one of them"
        )
    tokens = recording.tokens
    raster = np.zeros((len(events), tokens), dtype=np.int8)
    wiped, iou, held = [], [np.nan], None
    for row, e in enumerate(events):
        now = e.kept[head].numpy()
        raster[row, : e.seen] = 1 + retained(now, e.seen)
        wiped.append(float(wipe_out_rate(now, e.seen, min(BLOCK, e.seen))))
        if held is not None:
            iou.append(float(overlap(held, now, e.seen)))
        held = now
    number = round(event * (len(events) - 1))
    chosen = events[number]
    start, end = chosen.selection.middle
    slots = chosen.slots[head]
    inside = slots[start:end].numpy()
    kept = chosen.kept[head].numpy()
    kept = kept[kept >= 0]
    got = np.isin(inside, kept)
    cut = chosen.selection.segments
    if cut is None:
        ids, mass = np.zeros(len(inside), dtype=int), _attention_mass(recording, policy, layer, head, chosen)[start:end]
        quota = np.array([got.sum()])
    else:
        ids, mass = cut.ids[0, 0, head].numpy(), chosen.selection.mass[0, 0, head].numpy()
        quota = chosen.selection.quota[0, 0, head].numpy()[: ids[-1] + 1]
    count = ids[-1] + 1
    size = np.bincount(ids, minlength=count)
    found = np.bincount(ids, weights=got, minlength=count).astype(int)
    first = np.searchsorted(ids, np.arange(count))
    return {
        "seen": np.array([e.seen for e in events]),
        "raster": raster,
        "wiped": np.array(wiped),
        "iou": np.array(iou),
        "event": number,
        "place": inside,
        "mass": mass,
        "start": inside[first],
        "end": inside[first + size - 1] + 1,
        "share": np.bincount(ids, weights=mass, minlength=count),
        "quota": quota,
        "got": found,
        "kept": kept,
        "floor_lost": int((found < np.minimum(policy.min_keep, size)).sum()) if cut is not None else 0,
    }


def _attention_mass(recording: Recording, policy: SegmentedPolicy, layer: int, head: int, event) -> np.ndarray:
    """Mass for display where the allocation computes none: pooled window attention over all slots of one head."""
    first = max(0, event.seen - policy.window)
    group = recording.queries[layer].shape[0] // recording.keys[layer].shape[0]
    slots = event.slots[head]
    evidence = kernels.window_evidence(
        recording.queries[layer][None, head * group : (head + 1) * group, first : event.seen],
        recording.keys[layer][None, head : head + 1][:, :, slots],
        recording.scaling,
        torch.arange(first, event.seen),
        slots[None, None],
    )
    return allocate.mass(allocate.pool(evidence, policy.pool))[0, 0].numpy()


@functools.cache
def _layout() -> dict:
    """The part of the figure that no result changes; building it is slower than drawing."""
    from plotly.subplots import make_subplots

    titles = (
        "attention mass and its segments, by original position (tokens)",
        "entries per segment",
        "every event: what is still in the cache, by original position (tokens)",
        "over events",
    )
    figure = make_subplots(rows=4, cols=1, row_heights=[0.26, 0.16, 0.38, 0.2], vertical_spacing=0.075, subplot_titles=titles)
    figure.update_xaxes(title_text="tokens seen", row=4, col=1)
    figure.update_yaxes(title_text="share", row=1, col=1)
    figure.update_yaxes(title_text="entries", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(title_text="event at", type="category", autorange="reversed", nticks=8, row=3, col=1)
    figure.update_yaxes(title_text="share", range=[0, 1.02], row=4, col=1)
    figure.update_layout(
        barmode="overlay", height=890, margin={"t": 40, "b": 130}, legend={"orientation": "h", "yanchor": "top", "y": -0.09}
    )
    layout = figure.layout.to_plotly_json()
    layout.pop("template", None)
    return layout


def draw_inspection(result: Mapping) -> dict[str, Any]:
    """Four stacked plots over one axis of positions: mass with segments, quota and entries, the raster of all events, wipe-out and overlap."""
    blue, orange, green, purple, sand, clear = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#F0C9A0", "rgba(0,0,0,0)"
    width = result["end"] - result["start"]
    middle = result["start"] + width / 2
    height, tokens, seen = float(result["mass"].max()), result["raster"].shape[1], result["seen"]
    shade = ["rgba(0,114,178,0.10)" if i % 2 else "rgba(0,114,178,0.22)" for i in range(len(width))]
    first, second, third, fourth = ({"xaxis": "x" + n, "yaxis": "y" + n} for n in ("", "2", "3", "4"))
    data = [
        {
            "type": "bar",
            "x": middle,
            "y": np.full(len(width), height),
            "width": width,
            "marker": {"color": shade, "line": {"width": 0}},
            "showlegend": False,
            "customdata": result["share"],
            "hovertemplate": "segment mass %{customdata:.3f}<extra></extra>",
        }
        | first,
        {
            "type": "scatter",
            "x": result["place"],
            "y": result["mass"],
            "mode": "lines",
            "line": {"color": blue, "width": 1.5},
            "name": "mass",
            "hovertemplate": "position %{x}: mass %{y:.4f}<extra></extra>",
        }
        | first,
        {
            "type": "scatter",
            "x": result["kept"],
            "y": np.full(len(result["kept"]), -0.06 * height),
            "mode": "markers",
            "name": "kept",
            "marker": {"symbol": "line-ns", "size": 9, "line": {"color": green, "width": 1.4}},
            "hovertemplate": "kept: position %{x}<extra></extra>",
        }
        | first,
        {
            "type": "bar",
            "x": middle,
            "y": result["quota"],
            "width": width,
            "name": "quota",
            "marker": {"color": clear, "line": {"color": orange, "width": 2}},
            "hovertemplate": "quota %{y}<extra></extra>",
        }
        | second,
        {
            "type": "bar",
            "x": middle,
            "y": result["got"],
            "width": width * 0.7,
            "name": "kept in segment",
            "marker": {"color": green, "line": {"width": 0}},
            "opacity": 0.75,
            "hovertemplate": "kept %{y}<extra></extra>",
        }
        | second,
        {
            "type": "heatmap",
            "z": result["raster"],
            "y": [str(s) for s in seen],
            "zmin": 0,
            "zmax": 2,
            "showscale": False,
            "colorscale": [[0, clear], [0.33, clear], [0.34, sand], [0.66, sand], [0.67, green], [1, green]],
            "hovertemplate": "position %{x} after %{y} tokens<extra></extra>",
        }
        | third,
        {
            "type": "scatter",
            "x": seen,
            "y": result["wiped"],
            "mode": "lines+markers",
            "name": f"blocks of {BLOCK} wiped out",
            "line": {"color": orange, "width": 2},
        }
        | fourth,
        {
            "type": "scatter",
            "x": seen,
            "y": result["iou"],
            "mode": "lines+markers",
            "name": "overlap with the event before",
            "line": {"color": purple, "width": 2, "dash": "dash"},
            "meta": "may be empty",
        }
        | fourth,
    ]
    layout = copy.deepcopy(_layout())
    for axis in ("xaxis", "xaxis2", "xaxis3", "xaxis4"):
        layout[axis]["range"] = [0, tokens]
    layout["yaxis"]["range"] = [-0.12 * height, 1.02 * height]
    return {"data": data, "layout": layout}


def describe_inspection(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    total = result["raster"].shape[1]
    return (
        f"After {result['seen'][-1]} of {total} tokens, {len(result['seen'])} evictions left {len(result['kept'])} entries at the chosen event, "
        f"spread over {len(result['quota'])} segments; {result['wiped'][-1]:.0%} of the blocks of {BLOCK} original positions are gone in the end; "
        f"{result['floor_lost']} segments lost their floor."
    )
