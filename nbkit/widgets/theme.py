"""One look for all figures: colours that colour-blind readers can tell apart, line styles beside them, type for a projector.

Source: Okabe & Ito, "Color Universal Design" (2008), palette without black and yellow, which vanish on a dark or a white page.
"""

from __future__ import annotations

import functools
from typing import Any

BLUE, ORANGE, GREEN, PURPLE, AMBER, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, AMBER, SKY, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
# The same order of line styles and markers for matplotlib.
LINESTYLES = ("-", "--", ":", "-.", (0, (8, 3)), (0, (8, 3, 1, 3)), "-")
PLAIN_MARKERS = ("o", "s", "D", "^", "P", "X", "*")
SEQUENTIAL = "Cividis"

_INK = {False: "#1f2328", True: "#e6edf3"}
_PAGE = {False: "#ffffff", True: "#111418"}
_GRID = {False: "#dfe3e8", True: "#30363d"}


def style(index: int) -> dict[str, Any]:
    """Colour, dash and marker of the `index`-th series for a plotly scatter, so that colour is never the only difference.

    >>> style(1)["line"]
    {'color': '#D55E00', 'dash': 'dash', 'width': 2.5}
    """
    i = index % len(COLORS)
    return {"line": {"color": COLORS[i], "dash": DASHES[i], "width": 2.5}, "marker": {"color": COLORS[i], "symbol": MARKERS[i], "size": 8}}


def plain_style(index: int) -> dict[str, Any]:
    """The same for a matplotlib line: keyword arguments of ``plot`` and ``errorbar``.

    >>> plain_style(1)["color"]
    '#D55E00'
    """
    i = index % len(COLORS)
    return {"color": COLORS[i], "linestyle": LINESTYLES[i], "marker": PLAIN_MARKERS[i]}


@functools.cache
def template(dark: bool = False) -> Any:
    """The plotly template "nbkit" for a light or a dark page."""
    import plotly.graph_objects as go

    axis = {
        "automargin": True, "gridcolor": _GRID[dark], "linecolor": _INK[dark], "showline": True, "ticks": "outside", "tickcolor": _INK[dark],
        "zeroline": False, "title": {"standoff": 8},
    }
    layout = go.Layout(
        colorway=COLORS, font={"family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 15, "color": _INK[dark]},
        title={"font": {"size": 17}, "x": 0.01, "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top", "pad": {"t": 12}},
        paper_bgcolor=_PAGE[dark], plot_bgcolor=_PAGE[dark], xaxis=axis, yaxis=axis,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0, "title": {"text": ""}},
        margin={"l": 64, "r": 24, "t": 84, "b": 56}, hovermode="closest", colorscale={"sequential": SEQUENTIAL},
        hoverlabel={"font": {"size": 14}}, shapedefaults={"line": {"color": _INK[dark]}},
        coloraxis={"colorbar": {"thickness": 14, "outlinewidth": 0}},
    )
    data = {"heatmap": [{"colorscale": SEQUENTIAL, "colorbar": {"thickness": 14, "outlinewidth": 0}}],
            "scatter": [{"line": {"width": 2.5}}], "bar": [{"marker": {"line": {"width": 0}}}]}
    return go.layout.Template(layout=layout, data=data)


def plotly() -> None:
    """Make the template the default of every plotly figure of this session, under the name "nbkit"."""
    import plotly.io as pio

    pio.templates["nbkit"] = template(False)
    pio.templates["nbkit_dark"] = template(True)
    pio.templates.default = "nbkit"


def matplotlib() -> None:
    """Give matplotlib the same look: call it once at the top of a notebook."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update({
        "axes.prop_cycle": cycler(color=COLORS) + cycler(linestyle=LINESTYLES) + cycler(marker=PLAIN_MARKERS),
        "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _INK[False],
        "axes.labelsize": 13, "axes.titlesize": 14, "axes.titlelocation": "left", "grid.color": _GRID[False], "font.size": 12.5,
        "legend.frameon": False, "lines.linewidth": 2.2, "lines.markersize": 5, "figure.figsize": (8.0, 4.2), "figure.dpi": 110,
        "figure.constrained_layout.use": True, "image.cmap": SEQUENTIAL.lower(), "savefig.bbox": "tight",
    })
