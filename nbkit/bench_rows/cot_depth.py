"""Bench rows of cot_depth: the formula beside its own recursion, a simulation, and a map computed point by point."""

from __future__ import annotations

import numpy as np

from nbkit import bench

DEPTHS = np.arange(21)
SETTING = {"alpha": 2.0, "tau": 4.0, "noise": 0.1}
ALPHAS, TAUS = np.geomspace(0.2, 6, 60), np.geomspace(1.05, 50, 60)


def _theory():
    from nbkit.methods.cot_depth import CoTDepthTheory

    return CoTDepthTheory(**SETTING)


def _against_recursion() -> bench.Measured:
    return bench.compare(lambda: _theory().error(DEPTHS), lambda: _theory().error_recursion(DEPTHS), repeat=15)


def _equals_recursion() -> None:
    worst = np.abs(_theory().error(DEPTHS) / _theory().error_recursion(DEPTHS) - 1).max()
    assert worst < 1e-9, f"largest relative difference {worst:.1e}"


def _against_simulation() -> bench.Measured:
    from nbkit.methods.cot_depth import simulate

    return bench.compare(
        lambda: _theory().error(DEPTHS), lambda: simulate(**SETTING, d=400, depth=20, draws=1, contexts=1, seed=0), repeat=5, warmup=1
    )


def _agrees_with_simulation() -> None:
    """Early depths only: later ones carry the finite-size error that the notebook shows."""
    from nbkit.methods.cot_depth import simulate

    run = simulate(**SETTING, d=400, depth=4, draws=2, contexts=2, seed=0).error.mean((0, 1))
    worst = np.abs(run / _theory().error(np.arange(5)) - 1).max()
    assert worst < 0.03, f"largest relative difference {worst:.1%}"


def _one_by_one() -> np.ndarray:
    from nbkit.methods.cot_depth import CoTDepthTheory

    return np.array([[CoTDepthTheory(alpha, tau).rate().value for alpha in ALPHAS] for tau in TAUS])


def _map() -> bench.Measured:
    from nbkit.methods.cot_depth import rate_map

    return bench.compare(lambda: rate_map(ALPHAS, TAUS), _one_by_one, repeat=7)


def _map_is_exact() -> None:
    from nbkit.methods.cot_depth import rate_map

    assert np.allclose(rate_map(ALPHAS, TAUS), _one_by_one(), rtol=1e-10), "the map differs from the rate of single settings"


def _panel() -> bench.Measured:
    """What a slider of the main panel waits for: formula, baselines, phase diagram and figure."""
    from nbkit.methods.cot_depth import depth_view, draw_depth

    times = bench.seconds(lambda: draw_depth(depth_view(**SETTING, depth=20)), repeat=15)
    ordered = sorted(1000 * t for t in times)
    return bench.Measured(ordered[len(ordered) // 2], n=len(ordered), low=ordered[0], high=ordered[-1])


def _panel_is_right() -> None:
    from nbkit.methods.cot_depth import depth_view

    assert np.array_equal(depth_view(**SETTING, depth=20)["error"], _theory().error(DEPTHS))


ROWS = (
    bench.Row("cot_depth: error at depths 0 to 20", "ms", "the recursion", _against_recursion, _equals_recursion, goal=15.0),
    bench.Row("cot_depth: formula against one simulation, d = 400", "ms", "one pre-training, one context", _against_simulation,
              _agrees_with_simulation),
    bench.Row("cot_depth: growth factor on a 60 x 60 map", "ms", "one setting at a time", _map, _map_is_exact, goal=10.0),
    bench.Row("cot_depth: figure of the main panel", "ms", "", _panel, _panel_is_right, goal=80.0),
)
