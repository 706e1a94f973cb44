"""A small notebook that keeps the whole contract, written by the tests; changing one cell of it makes each canary."""

from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

SAMPLE_PANEL = "Damped wave"
CELLS = [
    ("title", r"""# A damped wave

How does the **damping** $\gamma$ change the energy $E = \frac{1}{2}\sum_i y_i^2$? See equation 2.1.

| symbol | meaning |
|---|---|
| $\gamma$ | damping |"""),
    ("setup-text", "Sizes come from the preset."),
    ("setup", """import numpy as np
import plotly.graph_objects as go

import nbkit
from nbkit.widgets import controls, figures

preset = nbkit.preset()
points = preset.pick(smoke=200, demo=400, full=800)
print(preset.name, points)"""),
    ("compute-text", "The method: a pure function from parameters to arrays."),
    ("compute", """def compute(damping, waves, shape, mark):
    x = np.linspace(0, 1, points)
    base = np.sin(2 * np.pi * waves * x)
    y = np.exp(-damping * x) * (base if shape == 'sine' else np.sign(base))
    peaks = x[:-1][np.diff(np.sign(y)) != 0] if mark else x[:0]
    return {'x': x, 'y': y, 'peaks': peaks, 'energy': float((y**2).mean() / 2), 'damping': damping}"""),
    ("draw-text", "What it looks like: every result gives the same traces."),
    ("draw", """def draw(result):
    figure = go.Figure([
        go.Scatter(x=result['x'], y=result['y'], name='wave', line={'width': 3}),
        go.Scatter(x=result['peaks'], y=0 * result['peaks'], name='zero crossings', mode='markers', meta='may be empty'),
        go.Heatmap(z=np.abs(result['y'][:64]).reshape(8, 8), xaxis='x2', yaxis='y2', colorbar={'title': '|y|'}),
    ])
    figure.update_layout(title=f"energy {result['energy']:.3f}", height=420, xaxis={'domain': [0, 0.62], 'title': 'time (s)'},
                         yaxis={'title': 'displacement (m)', 'range': [-1.1, 1.1]}, xaxis2={'domain': [0.72, 1], 'title': 'column'},
                         yaxis2={'anchor': 'x2', 'title': 'row'})
    return figure.add_vline(x=min(1, 1 / max(result['damping'], 1)), line_dash='dot')"""),
    ("panel-text", "Drag the damping: the wave follows."),
    ("panel", """panel = nbkit.Panel(
    compute,
    {'damping': controls.number(0, 10, 2, 0.1, label='Damping', unit='1/s', help='how fast the wave dies'),
     'waves': controls.log_integer(1, 50, 4, label='Number of waves in the window'),
     'shape': controls.choice({'sine wave': 'sine', 'square wave': 'square'}, label='Shape'),
     'mark': controls.toggle(True, label='Mark zero crossings')},
    draw, title='Damped wave',
    alt=lambda r: f"With damping {r['damping']:g} per second the mean energy is {r['energy']:.3f} J.",
)
panel"""),
    ("sweep-text", "The same panel, driven over its corners and random settings."),
    ("sweep", "panel.sweep(n=6)"),
    ("figure-text", "A static overview with matplotlib."),
    ("figure", """dampings = [0, 1, 2, 4, 8]
energy = [compute(d, 4, 'sine', False)['energy'] for d in dampings]
figure = figures.lines(dampings, {'energy': energy}, xlabel='damping (1/s)', ylabel='mean energy (J)')
figures.caption(figure, 'The mean energy falls as the damping grows.')"""),
    ("claims-text", "What was claimed, and what came out."),
    ("claims", """claims = nbkit.Claims('sample', ids=['C1'])
falls = bool(np.all(np.diff(energy) < 0))
claims.add('C1', statement='damping lowers the energy', paper='always', measured=None, unit='',
           criterion=nbkit.claims.All(falls=falls), source='computed', expect='reproduced')
claims.card()"""),
    ("stamp-text", "What this ran on."),
    ("stamp", "nbkit.stamp()"),
]


def notebook(only: Sequence[str] = (), **sources: str) -> nbformat.NotebookNode:
    """The sample notebook; `sources` replaces cells by id, `only` keeps the named code cells and their text."""
    cells = []
    for name, source in CELLS:
        if only and name.removesuffix("-text") not in only:
            continue
        make = new_markdown_cell if name == "title" or name.endswith("-text") else new_code_cell
        cells.append(make(sources.get(name, source), id=name))
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})


def write(path: Path, only: Sequence[str] = (), **sources: str) -> Path:
    """Write the sample notebook to `path` and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook(only, **sources), path)
    return path
