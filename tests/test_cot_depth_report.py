"""Facts about what the cot_depth notebook shows and judges: rules of the verdicts, views of the panels, the table of best depths."""

import math

import numpy as np
import plotly.graph_objects as go
import pytest

import nbkit
from nbkit.errors import InputError
from nbkit.methods import cot_depth as cot
from nbkit.methods.cot_depth import explore
from nbkit.recipes import cot_best
from nbkit.widgets import Panel, controls
from nbkit.widgets.panel import trace_problem


@pytest.fixture(scope="module")
def runs():
    return cot.Runs(nbkit.load_recording("cot-depth-sim").data)


@pytest.fixture(scope="module")
def table():
    return cot.BestTable(nbkit.load_recording("cot-depth-best").data)


# ---- intervals and look-ups ----


def test_t_interval_is_the_textbook_one():
    interval = cot.t_interval([1.0, 2.0, 3.0, 4.0])
    # t(0.975, 3) = 3.18245 (any table); standard error sqrt(5/3)/2.
    assert interval.estimate == 2.5 and interval.n == 4
    assert interval.high - 2.5 == pytest.approx(3.18245 * math.sqrt(5 / 3) / 2, rel=1e-5)
    for bad in ([1.0], [1.0, math.nan], [[1.0, 2.0]]):
        with pytest.raises(InputError):
            cot.t_interval(bad)


def test_a_row_is_found_by_its_setting(runs):
    row = runs("agreement", alpha=2.0, tau=4.0, noise=None, d=400)
    assert row["setting"] == {"alpha": 2.0, "tau": 4.0, "d": 400, "depth": 12}
    assert cot.by_draw(row).shape == (row["draws"], 13) and cot.by_draw(row, "ols").shape == (row["draws"],)
    assert cot.at_depth(row, 0).estimate == 1
    for wrong in ({"alpha": 2.0}, {"alpha": 7.0}):
        with pytest.raises(InputError, match="rows with"):
            runs("agreement", **wrong)


# ---- the rules of the verdicts ----


def made_up(shift: float, spread: float = 0.0, **setting) -> cot.Runs:
    """A recording whose errors are the formula times 1 + shift (ten times that at d = 100), with draws that differ by +-spread."""
    rows = []
    for d, factor in ((100, 10.0), (400, 1.0)):
        exact = cot.theory_for(setting).error(np.arange(9)) * (1 + factor * shift)
        error = [[list(exact * (1 + sign * spread))] for sign in (-1, 1, -1, 1)]
        rows.append({"group": "agreement", "setting": {**setting, "d": d, "depth": 8}, "error": error})
    return cot.Runs({"rows": rows})


@pytest.mark.parametrize("shift, spread, passes", [(0.029, 0.0, True), (-0.029, 0.0, True), (0.031, 0.0, False), (0.031, 0.05, True)])
def test_agreement_needs_three_percent_or_an_interval_that_holds_the_formula(shift, spread, passes):
    (row,) = cot.agreement(made_up(shift, spread, alpha=2.0, tau=3.0, noise=0.1, alpha_test=4.0))
    assert row.rate < 0.97 and row.passes is passes and row.shrinks
    assert row.relative[400][3].estimate == pytest.approx(shift)


def test_agreement_has_no_tolerance_near_the_boundary():
    (row,) = cot.agreement(made_up(0.01, alpha=2.0, tau=4.0))
    assert row.rate > 0.97 and not row.passes
    (same,) = cot.agreement(made_up(0.01, 0.05, alpha=2.0, tau=4.0))
    assert same.passes


def test_recorded_agreement_fails_only_near_and_beyond_the_boundary(runs):
    rows = cot.agreement(runs)
    assert len(rows) == 7 and all(row.shrinks for row in rows)
    assert [row.passes for row in rows] == [row.rate < 0.97 for row in rows]


@pytest.mark.parametrize("alpha, tau", [(2.0, 1.6), (2.0, 2.25), (0.5, 2.5)])
def test_fitted_rate_tends_to_the_growth_factor(alpha, tau):
    theory = cot.CoTDepthTheory(alpha, tau)
    off = [abs(cot.fitted_rate(theory, *ends) - math.log(theory.rate().value)) for ends in ((20, 200), (200, 400))]
    assert off[1] < off[0] < 1e-3 and off[1] < 3e-5


def test_no_fitted_rate_where_the_error_crosses_its_limit():
    assert math.isnan(cot.fitted_rate(cot.CoTDepthTheory(0.5, 9.0)))


def test_error_returns_to_its_plateau_from_below():
    """Saturation with Lambda below the edge of the spectrum: the late gap is negative and falls like edge^(t/2), slower than Lambda^t."""
    theory = cot.CoTDepthTheory(0.5, 16.0)
    t = np.arange(90, 151)
    gap = theory.error(t) - theory.limit()
    slope = math.exp(np.polyfit(t, np.log(-gap * t**1.5), 1)[0])
    assert gap.max() < 0 and slope == pytest.approx(math.sqrt(theory.rate().edge), abs=0.004) and slope > theory.rate().value + 0.02


def test_trend_is_the_slope_of_the_logarithm():
    error = [[list(np.exp(-0.3 * np.arange(5)))]] * 3
    assert cot.trend({"error": error}, 2).estimate == pytest.approx(-0.3)


def test_laws():
    x = np.array([1.0, 2.0, 5.0, 9.0])
    assert cot.power_law(x, 3 * x**-1.5) == pytest.approx(-1.5)
    assert cot.explained(x, 2 + np.log(x), log=False) == pytest.approx(1) and cot.explained(x, x**2, log=True) == pytest.approx(1)
    assert cot.explained(x, x**2, log=False) < 0.99


def test_follows_looks_at_order_and_size():
    reference = [1, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.005]
    assert cot.follows(reference, reference).holds
    assert not cot.follows(np.array(reference) * 1.5, reference).holds
    assert cot.follows(np.array(reference) * 1.5, reference).log_ratio == pytest.approx(math.log(1.5))
    small = [*reference[:-1], 0.018]  # far off, but where the reference is below 0.01
    assert cot.follows(small, reference).holds
    turned = [1, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.04, 0.06]
    assert cot.follows(turned, reference).rank < 0.9


def test_best_depths_are_those_of_the_mean_curve():
    assert cot.best_depths([{"mean": [1, 0.5, 0.4, 0.6]}, {"mean": [1, 2]}]) == [2, 0]


# ---- main panel ----


def test_depth_view_is_the_formula_with_its_baselines():
    view = cot.depth_view(2.0, 6.0, 0.1, step=0.8, test_ratio=0.75, depth=30)
    theory = cot.CoTDepthTheory(2.0, 6.0, 0.1, alpha_test=1.5, step=0.8)
    assert np.array_equal(view["error"], theory.error(np.arange(31))) and view["best"] == view["error"].argmin()
    assert view["regime"] == theory.regime() and view["limit"] == theory.limit() and view["critical_tau"] == theory.critical_tau()
    assert view["ols"] == pytest.approx(0.2) and view["ridge"] < min(view["ols"], view["error"].min(), view["descent"].min())
    assert len(view["dots"]["mean"]) == 0


@pytest.mark.parametrize("noise, step, ratio", [(0.0, 1.0, 1.0), (0.3, 0.5, 0.5)])
def test_colours_of_the_diagram_are_the_regimes(noise, step, ratio):
    view, seen = cot.depth_view(2.0, 4.0, noise, step=step, test_ratio=ratio), set()
    for i, j in np.random.default_rng(0).integers(0, 60, (40, 2)):
        alpha, tau = explore.MAP_ALPHAS[j], explore.MAP_TAUS[i]
        regime = cot.CoTDepthTheory(alpha, tau, noise, alpha_test=alpha * ratio, step=step).regime()
        assert ("exponential", "saturation", "overthinking")[int(view["map"][i, j])] == regime
        seen.add(regime)
    assert seen == {"exponential", "saturation", "overthinking"}


def test_dots_are_a_simulation():
    view = cot.depth_view(2.0, 6.0, 0.1, depth=40, d=100)
    run = cot.simulate(2.0, 6.0, 0.1, alpha_test=2.0, d=100, depth=20, draws=3, contexts=2, seed=0).error
    assert np.array_equal(view["dots"]["mean"], run.mean((0, 1))) and view["dots"]["depths"][-1] == 20
    assert np.all(view["dots"]["low"] <= view["dots"]["mean"]) and "d = 100" in cot.describe_depth(view)
    with pytest.raises(InputError, match="100, 200, 400"):
        cot.depth_view(2.0, 6.0, d=150)


@pytest.mark.parametrize(
    "setting", [{"alpha": 2.0, "tau": 2.0}, {"alpha": 0.5, "tau": math.inf}, {"alpha": 1.0, "tau": 1.05, "noise": 1.0}, {"alpha": 6.0, "tau": 50.0}],
    ids=lambda s: "-".join(f"{v:g}" for v in s.values()),
)
def test_every_figure_has_the_same_traces(setting):
    pictures = [go.Figure(cot.draw_depth(cot.depth_view(**setting, depth=depth, d=d))) for depth, d in ((1, None), (20, 100))]
    kinds = [[trace.type for trace in picture.data] for picture in pictures]
    assert kinds[0] == kinds[1] == ["scatter"] * 8 + ["heatmap", "scatter", "scatter"]
    assert not any(trace_problem(trace.to_plotly_json()) for picture in pictures for trace in picture.data)


# ---- eigenvalues ----


@pytest.mark.parametrize("alpha, tau, step", [(2.0, 1.6, 1.0), (0.5, 4.0, 0.5), (3.0, 1.3, 0.4)])
def test_edge_of_the_eigenvalues(alpha, tau, step):
    """Its farthest point is sqrt(Lambda), and the eigenvalues of a sampled step lie inside, but for a few at finite dimension."""
    view = cot.eigenvalue_view(alpha, tau, step=step, d=200, seed=1)
    edge = view["edge_real"] + 1j * view["edge_imaginary"]
    assert np.abs(edge).max() == pytest.approx(math.sqrt(cot.CoTDepthTheory(alpha, tau, step=step).rate().value), rel=1e-3)
    upper = slice(0, len(edge) // 2 + 1)
    height = np.interp(view["real"], view["edge_real"][upper], view["edge_imaginary"][upper], left=-1, right=-1)
    unseen = np.hypot(view["real"] - 1, view["imaginary"]) < 1e-6
    assert unseen.mean() == pytest.approx(max(0.0, 1 - alpha))
    assert (np.abs(view["imaginary"]) <= height + 0.05)[~unseen].mean() > 0.95


def test_density_and_factor_of_the_context():
    view = cot.eigenvalue_view(2.0, 2.0)
    assert np.trapezoid(view["density"], view["grid"]) == pytest.approx(1, abs=0.01)
    # Without noise the mean step is the best constant one: both edges of the law are shrunk alike.
    low, high = cot.edges(2.0)
    factor = np.interp([low, high], view["grid"], view["factor"])
    assert factor[0] == pytest.approx(-factor[1])
    assert cot.describe_eigenvalues(view).startswith("At α = 2 and τ = 2, 0 of 150")


# ---- best depth ----


def test_table_is_what_the_formula_gives(table):
    for alpha, tau, noise, want in ((2.0, 2.0, 0.0, 7), (1.0, 6.0, 0.0, 34), (2.0, 3.0, 0.1, 22)):
        # The recursion shares no code with the search along the formula.
        assert cot.CoTDepthTheory(alpha, tau, noise).error_recursion(range(61)).argmin() == want
        assert table.view(alpha, tau, noise)["here"] == want
        assert cot_best.search({"alpha": alpha, "tau": tau, "noise": noise}) == want
    assert table.view(2.0, 20.0, 0.0)["here"] == math.inf and math.isnan(table.view(1.0, 20.0, 0.0)["here"])
    assert table.values.shape == (len(cot_best.ALPHAS), len(cot_best.TAUS), len(cot_best.NOISES))


def test_table_refuses_other_settings(table):
    with pytest.raises(InputError, match="0.003"):
        table.view(2.0, 2.0, 0.005)


def test_best_depth_is_drawn_also_where_there_is_none(table):
    for alpha in table.alphas:
        for tau in (table.taus[0], table.taus[-1]):
            for noise in (0.0, 1.0):
                view = table.view(alpha, tau, noise)
                figure = go.Figure(cot.draw_best(view))
                assert [trace.type for trace in figure.data] == ["scatter"] * 7
                assert not any(trace_problem(trace.to_plotly_json()) for trace in figure.data)
                assert f"α = {alpha:g}" in cot.describe_best(view)


# ---- attention ----


def test_attention_view_shows_the_layer_at_work():
    torch = pytest.importorskip("torch")
    gamma = cot.pretrain(*cot.sample_moments(60, 24, 6, seed=0))
    model = cot.LinearSelfAttentionCoT.from_gamma(torch.from_numpy(gamma))
    X, y, w = (part[0] for part in cot.sample_prompts(1, 24, 6, seed=3))
    error, path = w, [w @ w]
    for _ in range(4):
        error = error - gamma @ (X.T @ (X @ error)) / 24
        path.append(error @ error)
    for append in (True, False):
        view = cot.attention_view(model, n=24, thoughts=4, append=append, seed=3)
        assert np.allclose(view["errors"], path)
        tokens = view["tokens"]
        assert tokens.shape == (14, 24 + 13) and np.allclose(tokens[:6, :24], X.T) and np.allclose(tokens[6, :24], y)
        present = ~np.isnan(tokens[0, 24:])
        assert present.tolist() == [append] * 4 + [True] + [False] * 8
        assert np.allclose(tokens[7:13, 28], view["thought"]) and np.all(tokens[13, 24:][present] == 1)
    with pytest.raises(InputError, match="0 to 12"):
        cot.attention_view(model, n=24, thoughts=13)


def test_attention_panel_sweeps():
    torch = pytest.importorskip("torch")
    model = cot.LinearSelfAttentionCoT.from_gamma(0.7 * torch.eye(4))
    panel = Panel(lambda thoughts, append: cot.attention_view(model, n=12, thoughts=thoughts, append=append), {
        "thoughts": controls.integer(0, 12, 3), "append": controls.toggle(True),
    }, cot.draw_attention, title="Tokens", alt=cot.describe_attention)
    assert panel.sweep(n=3).points >= 6
