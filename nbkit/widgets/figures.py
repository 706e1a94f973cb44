"""Static figures of the notebooks: small matplotlib helpers, and `caption`, which shows a figure with its sentence."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbkit.errors import InputError, RunError
from nbkit.widgets import theme

# An image beyond this many cells a side cannot be read anyway and makes the page heavy.
MAX_CELLS = 256


def caption(figure: Any, alt: str) -> None:
    """Display a matplotlib or plotly figure with the one sentence that says what it shows, and close it.

    The sentence is printed under the figure and stored as its text alternative.

    Raises: InputError for a missing sentence; RunError for a figure without a single finite point.
    """
    from IPython.display import publish_display_data

    if not isinstance(alt, str) or len(alt.split()) < 4:
        raise InputError("alt", got=alt, allowed="a sentence that says what the figure shows")
    if hasattr(figure, "savefig"):
        count = _marks(figure)
        if not count:
            raise RunError("figure", got="no finite data in any axes", allowed="at least one visible mark")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=figure.dpi)
        import matplotlib.pyplot as plt

        plt.close(figure)
        publish_display_data({"image/png": buffer.getvalue(), "text/plain": alt}, metadata={"nbkit": {"alt": alt, "marks": count}})
    else:
        import json

        from nbkit.widgets.panel import PLOT_CONFIG, trace_problem

        found = [problem for trace in figure.data if (problem := trace_problem(trace.to_plotly_json()))]
        if found or not figure.data:
            raise RunError("figure", got=found[0] if found else "no traces", allowed="traces with finite data")
        figure.update_layout(meta={"alt": alt}, template=theme.template(False))
        bundle = json.loads(figure.to_json()) | {"config": PLOT_CONFIG}
        publish_display_data({"application/vnd.plotly.v1+json": bundle, "text/plain": alt}, metadata={"nbkit": {"alt": alt}})
    publish_display_data({"text/html": f'<p class="nbkit-caption" style="margin:2px 0 10px;opacity:.8">{html.escape(alt)}</p>', "text/plain": alt},
                         metadata={"nbkit": {"caption": True}})


def _marks(figure: Any) -> int:
    """Number of artists of a matplotlib figure that show finite data."""
    count = 0
    for axes in figure.axes:
        for line in axes.lines:
            xy = np.asarray(line.get_xydata(), dtype=float)
            count += bool(line.get_visible() and xy.size and np.isfinite(xy).all(axis=1).any())
        for image in axes.images:
            array = image.get_array()
            count += array is not None and bool(np.isfinite(np.ma.filled(np.ma.asarray(array, dtype=float), np.nan)).any())
        for patch in axes.patches:
            box = patch.get_path().get_extents(patch.get_transform()).bounds
            count += bool(np.isfinite(box).all() and box[2] > 0 and box[3] > 0)
        for group in axes.collections:
            offsets = np.ma.filled(np.ma.asarray(group.get_offsets(), dtype=float), np.nan)
            paths = [p.vertices for p in group.get_paths()]
            if group.get_offset_transform().is_affine and offsets.size and np.isfinite(offsets).all(axis=1).any() and paths:
                count += any(np.isfinite(v).any() for v in paths)
        count += len(axes.tables)
    return count


def forest(rows: Sequence[tuple[str, Any]], *, xlabel: str, zero: float | None = None, reference: Mapping[str, float] | None = None, title: str = "",
           axes: Any = None) -> Any:
    """Estimates with their intervals, one line each. rows: (label, object with estimate, low and high); zero: a vertical line.

    reference: label -> the paper's number, drawn as an open diamond. Returns the matplotlib figure.
    """
    if not rows:
        raise InputError("rows", got="none", allowed="one or more (label, interval)")
    axes = _axes(axes, height=0.9 + 0.42 * len(rows))
    for i, (label, interval) in enumerate(rows):
        color = theme.COLORS[0]
        axes.plot([interval.low, interval.high], [i, i], color=color, linestyle="-", marker="|", markersize=11)
        axes.plot([interval.estimate], [i], color=color, linestyle="none", marker="o", markersize=8)
        if reference and label in reference:
            axes.plot([reference[label]], [i], color=theme.ORANGE, linestyle="none", marker="D", markersize=8, fillstyle="none", markeredgewidth=2)
    if zero is not None:
        axes.axvline(zero, color=theme.GREY, linestyle="--", linewidth=1.4, marker="none")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)
    if title:
        axes.set_title(title)
    return axes.figure


def lines(x: Sequence[float], series: Mapping[str, Any], *, xlabel: str, ylabel: str, log: str = "", title: str = "", axes: Any = None) -> Any:
    """Curves with bands. series: name -> values, or a list of objects with estimate, low and high. log: "x", "y" or "xy"."""
    if not series:
        raise InputError("series", got="none", allowed="one or more curves")
    axes = _axes(axes)
    for i, (name, values) in enumerate(series.items()):
        color, dash, marker = (kind[i % len(theme.COLORS)] for kind in (theme.COLORS, theme.LINESTYLES, theme.PLAIN_MARKERS))
        values = list(values)
        if values and hasattr(values[0], "estimate"):
            axes.fill_between(x, [v.low for v in values], [v.high for v in values], color=color, alpha=0.18, linewidth=0)
            values = [v.estimate for v in values]
        axes.plot(x, values, color=color, linestyle=dash, marker=marker, label=name)
    if "x" in log:
        axes.set_xscale("log")
        if len(x) <= 10:  # the values that were measured, not powers of ten between them
            axes.set_xticks(list(x), [f"{v:g}" for v in x])
            axes.minorticks_off()
    if "y" in log:
        axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title)
    if len(series) > 1:
        axes.legend(ncols=min(4, len(series)), loc="lower left", bbox_to_anchor=(0, 1.0 if not title else 1.06), borderaxespad=0.2)
    return axes.figure


def heat(values: Any, *, xlabel: str, ylabel: str, unit: str, xticks: Sequence[Any] | None = None, yticks: Sequence[Any] | None = None,
         numbers: bool = False, title: str = "", axes: Any = None) -> Any:
    """An image of `values` (rows, columns) with a colour bar named `unit`; numbers: write the values into the cells."""
    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or not values.size or max(values.shape) > MAX_CELLS:
        raise InputError("values", got=f"shape {values.shape}", allowed=f"(rows, columns), 1 to {MAX_CELLS} each", hint="average over blocks first")
    axes = _axes(axes)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", origin="upper")
    axes.grid(visible=False)
    axes.figure.colorbar(image, ax=axes, label=unit)
    for ticks, place in ((xticks, axes.set_xticks), (yticks, axes.set_yticks)):
        if ticks is not None:
            place(range(len(ticks)), [str(t) for t in ticks])
    if numbers:
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                axes.text(j, i, f"{value:.2g}", ha="center", va="center", color="white" if value < middle else "black", fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title)
    return axes.figure


def _axes(axes: Any, height: float | None = None) -> Any:
    if axes is not None:
        return axes
    import matplotlib.pyplot as plt

    # Once: what a notebook changed behind it, such as the resolution, stays.
    if plt.rcParams["image.cmap"] != theme.SEQUENTIAL.lower():
        theme.matplotlib()
    _, axes = plt.subplots(figsize=None if height is None else (8.0, height))
    return axes
