"""Exact facts about the cot_depth method: formula, asymptotics, simulation, attention layers and what was recorded.

Golden values without another source were computed by an independent first implementation (two-dimensional FFT over a fixed quadrature).
"""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq

import nbkit
from nbkit.errors import InputError, RunError
from nbkit.methods.cot_depth import (
    CoTDepthTheory,
    LinearSelfAttentionCoT,
    SoftmaxCoT,
    WeightPredictor,
    context_baselines,
    density,
    edges,
    exact_errors,
    gd_risk,
    ols_risk,
    one_step_risk,
    pretrain,
    prompt_sampler,
    quadrature,
    rate_map,
    ridge_risk,
    sample_covariance,
    sample_moments,
    sample_prompts,
    sample_step_matrix,
    simulate,
    train_cot,
    train_gamma,
)
from nbkit.recipes import cot_attention, cot_depth

INF = math.inf
SETTINGS = [
    dict(alpha=2.0, tau=3.0, noise=0.1, alpha_test=4.0),
    dict(alpha=0.5, tau=4.0, noise=0.25, step=0.5),
    dict(alpha=4.0, tau=6.0, noise=0.1, alpha_test=1.5, step=0.6),
    dict(alpha=2.0, tau=4.0, noise=0.5),
    dict(alpha=2.0, tau=1.6),
    dict(alpha=1.03, tau=5.0, noise=0.2, noise_test=0.05, step=0.7),
    dict(alpha=0.3, tau=1.2, noise=0.4, alpha_test=0.9),
]
named = pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))


# ---- the law of S ----


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.95, 0.9999, 1.0, 1.0001, 1.05, 2.0, 50.0])
def test_quadrature_has_the_moments_of_the_law(alpha):
    values, weights = quadrature(alpha, 600)
    assert np.all(weights >= 0) and np.all(values >= 0)
    y = 1 / alpha
    for power, moment in ((0, 1), (1, 1), (2, 1 + y), (3, 1 + 3 * y + y**2)):
        assert weights @ values**power == pytest.approx(moment, rel=1e-12)
    assert (values[-1], weights[-1]) == (0.0, 1 - alpha) if alpha < 1 else values[-1] > 0
    if alpha not in (0.9999, 1.0, 1.0001):
        keep = values > 0
        inverse = alpha**2 / (1 - alpha) if alpha < 1 else alpha / (alpha - 1)
        assert weights[keep] @ (1 / values[keep]) == pytest.approx(inverse, rel=1e-10)


@pytest.mark.parametrize("alpha", [0.4, 3.0])
def test_density_agrees_with_the_quadrature(alpha):
    low, high = edges(alpha)
    values, weights = quadrature(alpha, 600)
    keep = values > 0
    for f in (np.ones_like, np.cos):
        direct = quad(lambda x, f=f: density(alpha, x) * f(np.asarray(x)), low, high, limit=200)[0]
        assert direct == pytest.approx(weights[keep] @ f(values[keep]), abs=1e-7)
    assert density(alpha, [low / 2, high * 1.01]).tolist() == [0.0, 0.0]


# ---- the error ----


def literal_signal(theory, most):
    """The recursion over coefficients written out in plain loops."""
    values, weights = theory.spectrum()
    a = 1 - theory.gain * values
    m = [weights @ a**k for k in range(2 * most + 2)]
    beta = [theory.spread * (weights @ (values**2 * a**k)) for k in range(2 * most + 2)]
    b = np.zeros((most + 1, most + 1))
    for p in range(most + 1):
        for q in range(most + 1):
            b[p, q] = beta[p + q] + sum(beta[i + j - 2] * b[p - i, q - j] for i in range(1, p + 1) for j in range(1, q + 1))
    return [m[2 * t] + sum(m[i + j - 2] * b[t - i, t - j] for i in range(1, t + 1) for j in range(1, t + 1)) for t in range(most + 1)]


@named
def test_signal_equals_the_recursion_in_plain_loops(setting):
    theory = CoTDepthTheory(**setting)
    assert theory.components(range(9)).signal == pytest.approx(literal_signal(theory, 8), rel=1e-11)


@named
def test_fft_equals_the_recursion(setting):
    theory = CoTDepthTheory(**setting)
    depths = np.arange(61)
    np.testing.assert_allclose(theory.error(depths), theory.error_recursion(depths), rtol=1e-10)
    np.testing.assert_allclose(theory.error(range(21)), theory.error_recursion(range(21)), rtol=1e-11)


@named
def test_depth_zero_is_one_and_more_nodes_change_nothing(setting):
    theory = CoTDepthTheory(**setting)
    assert theory.error(0) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(theory.error(range(41)), CoTDepthTheory(**setting, nodes=4000).error(range(41)), rtol=1e-10)


@named
def test_error_does_not_depend_on_the_other_depths_asked_for(setting):
    theory = CoTDepthTheory(**setting)
    many = theory.error(np.arange(201))
    assert [float(theory.error(t)) for t in (1, 7, 30)] == pytest.approx(many[[1, 7, 30]].tolist(), rel=1e-9)
    assert theory.error([[3, 1], [0, 2]]).shape == (2, 2)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 7.0])
@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0])
def test_one_step_is_double_descent_in_tau(alpha, noise):
    for tau in (1.05, 1.5, 4.0, 100.0):
        expected = (1 - 1 / (1 + (1 + noise) / alpha)) * tau / (tau - 1)
        assert CoTDepthTheory(alpha, tau, noise).error(1) == pytest.approx(expected, rel=1e-11)
        assert one_step_risk(alpha, tau, noise) == pytest.approx(expected, rel=1e-14)
    assert one_step_risk(alpha, INF, noise) == pytest.approx(float(CoTDepthTheory(alpha, INF, noise).error(1)), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_unlimited_pretraining_is_a_mean_over_eigenvalues(alpha):
    theory = CoTDepthTheory(alpha, INF, 0.2)
    low, high = edges(alpha)
    for t in (1, 4, 9):
        def a(x, t=t):
            return (1 - theory.gain * x) ** t

        signal = quad(lambda x: density(alpha, x) * a(x) ** 2, low, high, limit=400)[0] + max(0, 1 - alpha)
        noise = 0.2 / alpha * quad(lambda x: density(alpha, x) * (1 - a(x)) ** 2 / x, low, high, limit=400)[0]
        parts = theory.components(t)
        assert (float(parts.signal), float(parts.noise)) == pytest.approx((signal, noise), rel=1e-6)


def test_vanishing_spread_gives_the_same_by_fft():
    for alpha, noise in ((2.0, 0.3), (0.5, 0.0)):
        nearly = CoTDepthTheory(alpha, 1e13, noise)
        assert nearly.spread > 0
        np.testing.assert_allclose(nearly.error(range(31)), CoTDepthTheory(alpha, INF, noise).error(range(31)), rtol=1e-10)
        np.testing.assert_allclose(nearly.unlimited().error(5), CoTDepthTheory(alpha, INF, noise).error(5), rtol=0)


def test_long_contexts_leave_a_binomial_sum():
    # All eigenvalues are one: m = 1 / ((1 - x a)(1 - y a)), so E_t = sum over k of C(t, k)^2 a^(2 (t - k)) nu^k.
    theory = CoTDepthTheory(2.0, 3.0, alpha_test=1e12, noise_test=0.0)
    a, nu = 1 - theory.gain, theory.spread
    expected = [sum(math.comb(t, k) ** 2 * a ** (2 * (t - k)) * nu**k for k in range(t + 1)) for t in range(12)]
    assert theory.error(range(12)) == pytest.approx(expected, rel=1e-5)


def test_a_vanishing_step_changes_nothing():
    assert CoTDepthTheory(2.0, 2.0, 0.5, step=1e-9).error([1, 5, 20]) == pytest.approx([1, 1, 1], abs=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 2.0, 5.0])
def test_noise_free_pretraining_finds_the_best_richardson_step(alpha):
    theory = CoTDepthTheory(alpha, INF)
    low, high = edges(alpha)
    assert theory.gain == pytest.approx(2 / (low + high), rel=1e-14)
    assert 1 - theory.gain * low == pytest.approx(theory.gain * high - 1, rel=1e-12)
    assert 1 - theory.gain * low == pytest.approx(2 * math.sqrt(alpha) / (1 + alpha), rel=1e-12)
    assert theory.rate().value == pytest.approx(4 * alpha / (1 + alpha) ** 2, rel=1e-12)
    np.testing.assert_allclose(gd_risk(range(20), alpha), theory.error(range(20)), rtol=1e-12)


GOLDEN = [
    (SETTINGS[0], [0.386, 0.186, 0.113, 0.078, 0.049, 0.039, 0.035, 0.034]),
    (SETTINGS[1], [0.845, 0.828, 0.834, 0.848, 0.881, 0.915, 0.946, 0.974]),
    (SETTINGS[2], [0.464, 0.324, 0.262, 0.225, 0.186, 0.166, 0.155, 0.149]),
    (dict(alpha=3.0, tau=1.5, step=0.5), [0.563, 0.412, 0.325, 0.266, 0.189, 0.140, 0.106, 0.082]),
    (dict(alpha=2.0, tau=4.0), [0.444, 0.243, 0.168, 0.119, 0.070, 0.045, 0.030, 0.021]),
    (SETTINGS[3], [0.571, 0.404, 0.368, 0.350, 0.351, 0.364, 0.379, 0.394]),
    (SETTINGS[4], [0.889, 0.720, 0.669, 0.670, 0.860, 1.386, 2.561, 5.096]),
]


@pytest.mark.parametrize(("setting", "errors"), GOLDEN, ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "")
def test_golden_errors(setting, errors):
    assert CoTDepthTheory(**setting).error([1, 2, 3, 4, 6, 8, 10, 12]) == pytest.approx(errors, abs=6e-4)


@pytest.mark.parametrize(("alpha", "tau", "errors"), [
    (3.0, 20.0, [0.263, 0.114, 0.0338, 0.01245, 0.00509, 0.00100]), (3.0, 1.5, [0.750, 0.531, 0.380, 0.377, 0.461, 0.937]),
    (0.5, 20.0, [0.702, 0.615, 0.565, 0.547, 0.539, 0.532]), (0.5, 1.5, [2.0, 3.16, 8.09, 24.26, 91.2, 2087]),
])
def test_golden_errors_of_rich_and_poor(alpha, tau, errors):
    assert CoTDepthTheory(alpha, tau).error([1, 2, 4, 6, 8, 12]) == pytest.approx(errors, rel=5e-3)


def test_very_deep_and_hopeless_is_infinite_not_wrong():
    errors = CoTDepthTheory(2.0, 1.01).error(np.arange(201))
    assert errors[-1] == INF and np.all(errors > 0) and np.all(np.diff(errors[np.isfinite(errors)]) > 0)


def test_errors_that_are_not_positive_are_refused():
    with pytest.raises(RunError, match="error by FFT: got -0.1 at depth 1, allowed > 0"):
        CoTDepthTheory._positive(np.array([1.0, -0.1, 0.2]))
    with pytest.raises(RunError, match="nan at depth 1"):
        CoTDepthTheory._positive(np.array([1.0, math.nan, 0.2]))


# ---- asymptotics ----


@pytest.mark.parametrize(("alpha", "critical"), [(1.5, 7.0), (2.0, 3.5), (3.0, 2.0), (0.5, 6.0)])
def test_transition_without_noise_has_a_closed_form(alpha, critical):
    y = 1 / alpha
    formula = 1 + (y * (1 + 3 * y) / (1 - y) if alpha > 1 else (3 + y) / (y - 1))
    theory = CoTDepthTheory(alpha, critical)
    assert theory.critical_tau() == pytest.approx(formula, rel=1e-12) and formula == pytest.approx(critical)
    assert theory.rate().value == pytest.approx(1, abs=1e-9) and theory.regime() == "polynomial"
    assert max(theory.indices()) == pytest.approx(1, rel=1e-9)
    below, above = CoTDepthTheory(alpha, critical - 1e-3), CoTDepthTheory(alpha, critical + 1e-3)
    assert below.rate().value > 1 > above.rate().value
    assert below.regime() == "overthinking" and above.regime() == ("saturation" if alpha < 1 else "exponential")


def test_transition_diverges_at_one_and_small_steps_lower_it():
    assert CoTDepthTheory(1.0, 9.0).critical_tau() == INF and CoTDepthTheory(1.0, 100.0).regime() == "overthinking"
    assert CoTDepthTheory(2.0, 9.0, 0.2, step=0.05).critical_tau() == pytest.approx(1 + 1.2 / 2.0, rel=1e-12)
    assert CoTDepthTheory(0.5, 9.0, 0.2, step=0.05).critical_tau() == pytest.approx(1 + 1.2, rel=1e-12)


@named
def test_rate_solves_the_equation_of_the_nearest_singularity(setting):
    theory = CoTDepthTheory(**{**setting, "nodes": 20000})
    values, weights = theory.spectrum()
    live = values > 0
    values, weights, a = values[live], weights[live], 1 - theory.gain * values[live]
    low, high = edges(theory.context)
    rate = theory.rate()
    for sign, found, reach in ((1, rate.plus, 1 - theory.gain * low), (-1, rate.minus, theory.gain * high - 1)):
        if reach <= 0 or found < reach**2 * (1 + 1e-6):
            continue  # no outlier on this side, or none that double precision tells from the edge

        def excess(x, sign=sign):
            return x**2 * theory.spread * (weights @ (values**2 / (1 - sign * x * a) ** 2)) - 1

        x = brentq(excess, 1e-9, (1 - 1e-7) / reach, xtol=1e-14)
        assert 1 / x**2 == pytest.approx(found, rel=1e-6)
    assert rate.value == max(rate.plus, rate.minus, rate.edge) and rate.edge == pytest.approx(max(a**2), rel=1e-3)


@named
def test_indices_are_the_equation_at_one(setting):
    theory = CoTDepthTheory(**setting)
    values, weights = theory.spectrum()
    c, live = theory.gain, values > 0
    plus = theory.spread * (weights[live] @ np.ones(live.sum())) / c**2
    assert theory.indices().plus == pytest.approx(plus, rel=1e-9)
    if c * edges(theory.context)[1] < 2:
        assert theory.indices().minus == pytest.approx(theory.spread * (weights @ (values**2 / (2 - c * values) ** 2)), rel=1e-8)
    else:
        assert theory.indices().minus == INF


def test_index_is_infinite_when_the_step_overshoots():
    theory = CoTDepthTheory(8.0, 50.0, alpha_test=1.0)
    assert theory.gain * 4 > 2 and theory.indices().minus == INF == theory.critical_tau() and theory.rate().edge > 1
    assert CoTDepthTheory(8.0, INF, alpha_test=1.0).indices() == (0.0, INF)
    assert CoTDepthTheory(2.0, INF).indices() == (0.0, 0.0)


def test_both_signs_are_needed():
    # The large-eigenvalue instability decides at step 1; the other sign alone would promise convergence.
    rate = CoTDepthTheory(2.0, 2.0).rate()
    assert rate.minus > 1 > rate.plus
    small = CoTDepthTheory(2.0, 1.2, step=0.1).rate()
    assert small.plus > 1 > small.minus


@pytest.mark.parametrize(("setting", "window", "tolerance"), [
    (dict(alpha=2.0, tau=1.6), (20, 200), 1e-3), (dict(alpha=2.0, tau=2.5), (20, 200), 1e-3), (dict(alpha=2.0, tau=2.5), (400, 800), 1e-5),
    (dict(alpha=2.0, tau=5.0), (200, 400), 1e-3), (dict(alpha=0.5, tau=2.0), (20, 200), 1e-3),
])
def test_error_over_its_limit_decays_or_grows_as_lambda_to_the_t_over_root_t(setting, window, tolerance):
    theory = CoTDepthTheory(**setting)
    t = np.arange(window[0], window[1] + 1)
    assert np.polyfit(t, np.log(theory.error(t) * np.sqrt(t)), 1)[0] == pytest.approx(math.log(theory.rate().value), abs=tolerance)


def test_prefactor_settles():
    theory = CoTDepthTheory(2.0, 1.6)
    t = np.array([20, 40, 80, 120, 160, 200])
    assert theory.error(t) * np.sqrt(t) / theory.rate().value ** t == pytest.approx([0.1141, 0.1109, 0.1094, 0.1088, 0.1086, 0.1084], abs=6e-5)


@pytest.mark.parametrize(("setting", "limit"), [
    (dict(alpha=2.0, tau=30.0, noise=0.5), 0.5), (dict(alpha=3.0, tau=8.0), 0.0), (dict(alpha=0.5, tau=20.0), 0.5 / (1 - 1 / 9.5 / 1 * 0.5)),
    (dict(alpha=0.5, tau=8.0, noise=0.3), None), (dict(alpha=0.5, tau=4.0, noise=0.25, step=0.5), None), (dict(alpha=0.3, tau=INF, noise=0.1), None),
    (dict(alpha=2.0, tau=9.0, noise=0.1, alpha_test=0.4, noise_test=0.7, step=0.6), None),
])
def test_limit_is_where_deep_errors_go(setting, limit):
    theory = CoTDepthTheory(**setting)
    if limit is not None:
        assert theory.limit() == pytest.approx(limit, rel=1e-12)
    assert theory.error(1500) == pytest.approx(theory.limit(), rel=1e-6, abs=1e-12)


def test_limits_of_least_squares():
    # Unlimited pre-training converges to (minimum-norm) least squares; finite pre-training adds to it below alpha = 1.
    assert CoTDepthTheory(0.5, INF, 0.3).limit() == pytest.approx(ols_risk(0.5, 0.3), rel=1e-12)
    assert CoTDepthTheory(3.0, 9.0, 0.3).limit() == pytest.approx(ols_risk(3.0, 0.3), rel=1e-12)
    assert CoTDepthTheory(0.5, 20.0, 0.3).limit() > ols_risk(0.5, 0.3)
    assert float(CoTDepthTheory(2.0, 30.0, 0.5).error(80)) == pytest.approx(0.49898, abs=1e-5)
    assert float(CoTDepthTheory(0.5, 20.0).error(80)) == pytest.approx(0.52777, abs=1e-5)


@pytest.mark.parametrize(("setting", "regime", "limit"), [
    (dict(alpha=2.0, tau=4.0), "exponential", 0.0), (dict(alpha=0.5, tau=7.0), "saturation", 0.5 / 0.8333333333),
    (dict(alpha=1.0, tau=INF), "polynomial", 0.0), (dict(alpha=1.0, tau=6.0, step=0.5), "polynomial", 0.0),
    (dict(alpha=1.0, tau=INF, noise=0.1), "polynomial", INF), (dict(alpha=1.0, tau=6.0), "overthinking", INF),
    (dict(alpha=2.0, tau=2.0), "overthinking", INF), (dict(alpha=8.0, tau=INF, alpha_test=1.0), "overthinking", INF),
    (dict(alpha=0.5, tau=2.0, step=0.05), "polynomial", INF),
])
def test_regimes(setting, regime, limit):
    theory = CoTDepthTheory(**setting)
    assert theory.regime() == regime and theory.limit() == pytest.approx(limit, rel=1e-8)


def test_the_gap_closes_polynomially_at_alpha_one():
    theory = CoTDepthTheory(1.0, INF)
    t = np.array([100, 200, 400, 800, 1600])
    assert np.polyfit(np.log(t), np.log(theory.error(t)), 1)[0] == pytest.approx(-0.5, abs=0.01)


def test_rate_map_is_the_rate_of_every_point():
    alphas, taus = [0.3, 1.0, 2.5], [1.3, 4.0, INF]
    for options in (dict(), dict(noise=0.3, step=0.6, test_ratio=0.5)):
        ratio = options.get("test_ratio", 1.0)
        theory = {k: v for k, v in options.items() if k != "test_ratio"}
        want = [[CoTDepthTheory(a, t, alpha_test=a * ratio, **theory).rate().value for a in alphas] for t in taus]
        np.testing.assert_allclose(rate_map(alphas, taus, **options), want, rtol=1e-9)


# ---- the best depth ----


@pytest.mark.parametrize(("tau", "depth"), [(2, 3), (3, 8), (4, 14), (6, 34), (8, 62), (10, 98), (12, 146)])
def test_best_depth_at_alpha_one(tau, depth):
    best = CoTDepthTheory(1.0, float(tau)).optimal_depth(400)
    errors = CoTDepthTheory(1.0, float(tau)).error([depth, int(best.depth)])
    # At tau = 2 depths 2 and 3 are equal to rounding.
    assert (best.depth == depth or errors[0] == pytest.approx(errors[1], rel=1e-12)) and best.reached


def test_best_depth_scalings():
    taus = np.array([4.0, 6.0, 8.0, 10.0, 12.0])
    depths = [CoTDepthTheory(1.0, tau).optimal_depth(400).depth for tau in taus]
    assert np.polyfit(np.log(taus), np.log(depths), 1)[0] == pytest.approx(2, abs=0.2)
    noises = np.array([0.3, 0.1, 0.03, 0.01, 0.003])
    critical = [CoTDepthTheory(1.0, INF, s).optimal_depth(800).depth for s in noises]
    assert critical == [4, 12, 40, 121, 403] and np.polyfit(np.log(noises), np.log(critical), 1)[0] == pytest.approx(-1, abs=0.1)
    rich = [CoTDepthTheory(2.0, INF, s).optimal_depth(400).depth for s in noises]
    assert rich == [6, 12, 24, 40, 58]

    def misfit(x, y):
        return np.polyfit(x, y, 1, full=True)[1][0]

    # Linear in log(1 / noise) fits the depths themselves better than a power law does.
    power = np.exp(np.polyval(np.polyfit(np.log(noises), np.log(rich), 1), np.log(noises)))
    assert misfit(np.log(noises), rich) < ((power - rich) ** 2).sum()


@pytest.mark.parametrize(("alpha", "tau", "depth", "error", "rate"), [
    (2.0, 1.5, 2, 0.90, 1.65), (2.0, 2.0, 7, 0.235, 1.24), (2.0, 2.5, 13, 0.077, 1.11), (2.0, 3.0, 25, 0.0237, 1.039), (2.0, 3.25, 40, 0.0114, 1.017),
    (1.5, 2.2, 6, None, None), (1.5, 3.4, 17, None, None), (1.5, 4.6, 35, None, None), (1.5, 5.8, 70, None, None), (1.5, 6.4, 109, None, None),
])
def test_best_depth_on_the_overthinking_side(alpha, tau, depth, error, rate):
    theory = CoTDepthTheory(alpha, tau)
    best = theory.optimal_depth()
    assert (best.depth, best.reached) == (depth, True)
    if error is not None:
        assert best.error == pytest.approx(error, rel=6e-3) and theory.rate().value == pytest.approx(rate, rel=6e-3)


def test_best_depth_without_an_end_or_beyond_the_search():
    assert CoTDepthTheory(2.0, 4.0).optimal_depth(100) == (INF, 0.0, True)
    short = CoTDepthTheory(1.5, 6.4).optimal_depth(50)
    assert (short.depth, short.reached) == (50, False)
    assert CoTDepthTheory(0.5, 1.5).optimal_depth(40)[:2] == (0, pytest.approx(1.0))
    # Early stopping beats the limit whenever the labels are noisy.
    noisy = CoTDepthTheory(2.0, 9.0, 0.3)
    assert noisy.optimal_depth().error < noisy.limit() == pytest.approx(0.3)


# ---- what it is compared with ----


@pytest.mark.parametrize("alpha", [0.5, 0.999, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("noise", [0.01, 0.5])
def test_ridge_is_the_bayes_risk(alpha, noise):
    values, weights = quadrature(alpha, 4000)
    penalty = noise / alpha
    assert ridge_risk(alpha, noise) == pytest.approx(weights @ (penalty / (values + penalty)), rel=1e-9)
    for tau in (1.5, 4.0, INF):
        assert CoTDepthTheory(alpha, tau, noise).error(range(40)).min() > ridge_risk(alpha, noise)
    assert gd_risk(range(60), alpha, noise).min() > ridge_risk(alpha, noise) and ols_risk(alpha, noise) > ridge_risk(alpha, noise)


def test_least_squares_limits():
    assert (ols_risk(2.0), ols_risk(1.0), ols_risk(1.0, 0.1), ridge_risk(3.0), ridge_risk(0.25)) == (0.0, 0.0, INF, 0.0, 0.75)
    assert gd_risk(2000, 2.0, 0.4) == pytest.approx(ols_risk(2.0, 0.4), rel=1e-9)
    assert gd_risk(2000, 0.5, 0.4) == pytest.approx(ols_risk(0.5, 0.4), rel=1e-9)
    assert gd_risk([1], 2.0, step=0.5)[0] == pytest.approx(1 - 2 * 0.5 + 0.25 * 1.5, rel=1e-12)


# ---- bad input ----


@pytest.mark.parametrize(("options", "what"), [
    (dict(alpha=0.0), "alpha: got 0.0"), (dict(alpha=-1.0), "alpha"), (dict(alpha=math.nan), "alpha"), (dict(alpha=INF), "alpha"),
    (dict(alpha=True), "alpha"), (dict(alpha="two"), "alpha"), (dict(tau=1.0), "tau: got 1.0, allowed > 1"),
    (dict(tau=0.5), "WeightPredictor"), (dict(tau=math.nan), "tau"),
    (dict(noise=-0.1), "noise"), (dict(noise=INF), "noise"), (dict(step=0.0), "step"), (dict(step=1.1), "step"), (dict(step=math.nan), "step"),
    (dict(alpha_test=0.0), "alpha_test"), (dict(noise_test=-1.0), "noise_test"), (dict(nodes=10), "nodes"), (dict(nodes=100.0), "nodes"),
])
def test_bad_settings(options, what):
    with pytest.raises(InputError, match=what):
        CoTDepthTheory(**{"alpha": 2.0, "tau": 4.0, **options})


@pytest.mark.parametrize("depths", [-1, [0, -2], 1.5, [math.nan], [], "3", True, 2001, [INF], 1j])
def test_bad_depths(depths):
    for call in (CoTDepthTheory(2.0, 4.0).error, lambda t: gd_risk(t, 2.0)):
        with pytest.raises(InputError, match="depths"):
            call(depths)


def test_other_bad_input():
    with pytest.raises(InputError, match="integers from 0 to 100"):
        CoTDepthTheory(2.0, 4.0).error_recursion(101)
    cases = (([0.0], [2.0], 1, "alphas"), ([[1.0]], [2.0], 1, "alphas"), ([1.0], [1.0], 1, "taus"), ([1.0], [2.0], 0, "step"))
    for alphas, taus, step, what in cases:
        with pytest.raises(InputError, match=what):
            rate_map(alphas, taus, step=step)
    for call in (ols_risk, ridge_risk, lambda a: gd_risk(1, a), lambda a: density(a, 1.0)):
        with pytest.raises(InputError, match="alpha"):
            call(-2.0)
    with pytest.raises(InputError, match="step"):
        gd_risk(1, 2.0, step=-1)
    with pytest.raises(InputError, match="gamma"):
        simulate(2.0, 4.0, gamma="mean")
    for options in (dict(d=1), dict(draws=0), dict(depth=-1), dict(contexts=1.5)):
        with pytest.raises(InputError, match=next(iter(options))):
            simulate(2.0, 4.0, **options)
    with pytest.raises(InputError, match="tau"):
        simulate(2.0, 0.0)


# ---- the reduced model at finite dimension ----


def test_exact_errors_are_the_predictor_on_a_basis():
    """Errors are linear in (w, noise), so averages are sums over unit vectors."""
    d, n, noise, depth = 4, 7, 0.3, 6
    rng = np.random.default_rng(0)
    gamma, X = rng.standard_normal((d, d)) / 3, rng.standard_normal((n, d))
    model = WeightPredictor(step=0.7)
    model.gamma_, model.n_features_in_ = gamma, d
    signal, extra = exact_errors(gamma, X.T @ X / n, depth, n=n, noise=noise, step=0.7)
    basis = np.eye(d)
    path = model.predict(np.repeat(X[None], d, 0), (X @ basis).T, depth=depth, return_path=True)
    np.testing.assert_allclose(signal, ((path - basis) ** 2).sum((1, 2)) / d, rtol=1e-12)
    path = model.predict(np.repeat(X[None], n, 0), np.eye(n), depth=depth, return_path=True)
    np.testing.assert_allclose(extra, noise * (path**2).sum((1, 2)), rtol=1e-12)


def test_moments_are_distributed_like_those_of_whole_prompts():
    d, n, noise, prompts = 4, 6, 0.3, 200_000
    X, y, w = sample_prompts(20_000, n, d, noise=noise, seed=0)
    phi, tasks = sample_moments(prompts, n, d, noise=noise, seed=1)
    # E|phi|^2 = (1 + 1/n) E|w|^2 + d (E|w|^2 + noise) / n and E(phi . w) = E|w|^2 = 1.
    size = 1 + 1 / n + d * (1 + noise) / n
    assert (phi**2).sum(1).mean() == pytest.approx(size, rel=0.02)
    assert (phi * tasks).sum(1).mean() == pytest.approx(1, rel=0.02)
    explicit = np.einsum("pnd,pn->pd", X, y) / n
    for power in (1, 2):
        a, b = (((p * v).sum(1) / (v**2).sum(1)) ** power for p, v in ((phi, tasks), (explicit, w)))
        assert a.mean() == pytest.approx(b.mean(), rel=0.03)
    across = [((p - (p * v).sum(1, keepdims=True) / (v**2).sum(1, keepdims=True) * v) ** 2).sum(1) for p, v in ((phi, tasks), (explicit, w))]
    assert np.quantile(across[0], [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(across[1], [0.1, 0.5, 0.9]), rel=0.05)


def test_pretraining_solves_its_least_squares_problem():
    phi, w = sample_moments(30, 20, 8, noise=0.1, seed=0)
    for ridge in (0.0, 0.5):
        gamma = pretrain(phi, w, ridge=ridge)
        gradient = (gamma @ phi.T - w.T) @ phi + ridge * 30 / 8 * gamma
        assert np.abs(gradient).max() < 1e-10
    few, tasks = phi[:5], w[:5]
    np.testing.assert_allclose(pretrain(few, tasks), tasks.T @ np.linalg.pinv(few.T), atol=1e-10)
    for bad in ((phi, w[:5]), (phi[0], w[0]), (phi * np.nan, w), (phi[:0], w[:0])):
        with pytest.raises(InputError, match="phi and w"):
            pretrain(*bad)
    with pytest.raises(InputError, match="ridge"):
        pretrain(phi, w, ridge=-1)


def test_learned_matrix_has_the_mean_and_spread_of_the_formula():
    theory = CoTDepthTheory(2.0, 4.0, 0.2)
    phi, w = sample_moments(1200, 600, 300, noise=0.2, seed=3)
    gamma = pretrain(phi, w)
    assert np.trace(gamma) / 300 == pytest.approx(theory.gain, rel=0.01)
    rest = gamma - theory.gain * np.eye(300)
    assert (rest**2).sum() / 300 == pytest.approx(theory.spread, rel=0.03)


@pytest.mark.parametrize(("setting", "tolerance"), [(SETTINGS[0], 0.03), (SETTINGS[1], 0.02), (dict(alpha=2.0, tau=INF, noise=0.3), 0.02)])
def test_simulation_agrees_with_the_formula(setting, tolerance):
    run = simulate(**setting, d=200, depth=8, draws=3, contexts=2, seed=5)
    np.testing.assert_allclose(run.error.mean((0, 1)), CoTDepthTheory(**setting).error(range(9)), rtol=tolerance)
    parts = CoTDepthTheory(**setting).components(range(1, 9))
    np.testing.assert_allclose(run.noise.mean((0, 1))[1:], parts.noise, rtol=3 * tolerance)


def test_context_baselines_are_their_limits_and_bounds():
    n, d, noise = 600, 300, 0.2
    s = sample_covariance(n, d, seed=0)
    found = context_baselines(s, 300, n=n, noise=noise)
    assert found["ols"] == pytest.approx(ols_risk(2.0, noise), rel=0.03) and found["ridge"] == pytest.approx(ridge_risk(2.0, noise), rel=0.02)
    assert found["gd"][0] == pytest.approx(1) and found["gd"][-1] == pytest.approx(float(found["ols"]), rel=1e-6)
    direct = np.linalg.inv(s + noise * d / n * np.eye(d))
    # Ridge is linear: signal (I - A S) w, noise A X^T eps / n.
    exact = ((np.eye(d) - direct @ s) ** 2).sum() / d + noise / n * ((direct @ s) * direct).sum()
    assert float(found["ridge"]) == pytest.approx(exact, rel=1e-9)
    few = context_baselines(sample_covariance(100, 300, seed=1), 2, n=100)
    assert float(few["ols"]) == pytest.approx(2 / 3, rel=1e-9) == float(few["ridge"])


def test_ablation_of_the_estimation_error():
    options = dict(d=120, depth=8, draws=2, contexts=2, seed=1)
    runs = {kind: simulate(2.0, 2.0, gamma=kind, **options).error.mean((0, 1)) for kind in ("learned", "scalar", "symmetric")}
    ideal = simulate(2.0, INF, **options).error.mean((0, 1))
    # Only the random part of Gamma harms: its mean alone does as well as unlimited pre-training.
    np.testing.assert_allclose(runs["scalar"], ideal, rtol=0.1)
    assert runs["learned"][8] > 3 * ideal[8] and runs["symmetric"][1] < runs["learned"][1]


def test_seeds_decide_and_step_matrix_is_amplified_where_lambda_says():
    a, b, c = (simulate(2.0, 3.0, d=20, depth=2, draws=1, contexts=1, seed=s).error for s in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert np.array_equal(sample_step_matrix(2.0, 3.0, d=30, seed=4), sample_step_matrix(2.0, 3.0, d=30, seed=4))
    theory = CoTDepthTheory(2.0, 1.6)
    m = sample_step_matrix(2.0, 1.6, d=300, seed=0)
    assert np.abs(np.linalg.eigvals(m)).max() == pytest.approx(math.sqrt(theory.rate().value), rel=0.1)
    assert np.abs(np.linalg.eigvals(sample_step_matrix(2.0, 20.0, d=300, seed=0))).max() < 1


def test_estimator_interface():
    X, y, w = sample_prompts(60, 24, 6, noise=0.05, seed=0)
    model = WeightPredictor(step=0.9, ridge=0.1)
    assert model.get_params() == {"step": 0.9, "ridge": 0.1} and repr(model) == "WeightPredictor(step=0.9, ridge=0.1)"
    assert model.set_params(ridge=0.0) is model and model.ridge == 0.0
    with pytest.raises(InputError, match="predict before fit"):
        model.predict(X, y)
    with pytest.raises(InputError, match="parameter: got depth, allowed step, ridge"):
        model.set_params(depth=3)
    assert model.fit(X, y, w) is model and model.gamma_.shape == (6, 6) and model.n_features_in_ == 6
    np.testing.assert_allclose(model.gamma_, pretrain(np.einsum("pnd,pn->pd", X, y) / 24, w), rtol=1e-12)
    path = model.predict(X, y, depth=4, return_path=True)
    assert path.shape == (5, 60, 6) and not path[0].any()
    np.testing.assert_allclose(model.predict(X[7], y[7], depth=4, return_path=True), path[:, 7], rtol=1e-10)
    np.testing.assert_allclose(model.predict(X[7], y[7], depth=2), path[2, 7], rtol=1e-10)
    errors = model.error(X, y, w, depth=4)
    assert errors == pytest.approx(((path - w) ** 2).sum(-1).mean(1)) and model.score(X, y, w, depth=4) == pytest.approx(1 - errors[4] / errors[0])
    # One step on the training prompts is what was minimised: no other multiple of Gamma does better.
    for factor in (0.95, 1.05):
        other = WeightPredictor()
        other.gamma_, other.n_features_in_ = factor * model.gamma_, 6
        assert other.error(X, y, w)[1] > WeightPredictor().fit(X, y, w).error(X, y, w)[1]


@pytest.mark.parametrize(("change", "what"), [
    (dict(X=np.zeros((2, 3))), "X and y"), (dict(y=np.zeros((4, 3))), "X and y"), (dict(y=np.full((4, 5), np.nan)), "X and y"),
    (dict(w=np.zeros((4, 2))), "w"),
])
def test_estimator_refuses_prompts_that_do_not_fit(change, what):
    good = dict(X=np.ones((4, 5, 3)), y=np.ones((4, 5)), w=np.ones((4, 3)))
    with pytest.raises(InputError, match=what):
        WeightPredictor().fit(**{**good, **change})
    with pytest.raises(InputError, match="step"):
        WeightPredictor(step=2.0).fit(**good)
    fitted = WeightPredictor(ridge=1.0).fit(**good)
    with pytest.raises(InputError, match="2 features, allowed 3"):
        fitted.predict(np.ones((4, 5, 2)), np.ones((4, 5)))
    with pytest.raises(InputError, match="depth"):
        fitted.predict(good["X"], good["y"], depth=-1)


# ---- attention ----


def batch(prompts=3, n=7, d=4, seed=0):
    return tuple(torch.from_numpy(part) for part in sample_prompts(prompts, n, d, noise=0.1, seed=seed))


@pytest.mark.parametrize("append", [True, False])
def test_layer_with_the_block_weights_is_the_recursion(append):
    X, y, _ = batch()
    gamma = np.random.default_rng(1).standard_normal((4, 4)) / 4
    model = WeightPredictor(step=0.8)
    model.gamma_, model.n_features_in_ = gamma, 4
    want = model.predict(X.numpy(), y.numpy(), depth=9, return_path=True)
    layer = LinearSelfAttentionCoT.from_gamma(torch.from_numpy(gamma), step=0.8)
    found = layer(X, y, 9, append=append).detach().numpy()
    np.testing.assert_allclose(found.transpose(1, 0, 2), want, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(layer.gamma.numpy(), 0.8 * gamma, rtol=1e-12)


@pytest.mark.parametrize("append", [True, False])
def test_layer_with_any_weights_is_linear_attention_over_all_tokens(append):
    X, y, _ = batch(prompts=1)
    n, d = X.shape[1:]
    layer = LinearSelfAttentionCoT.random(d, seed=3, scale=0.3).double()
    V, W = (weight.detach().numpy() for weight in (layer.V, layer.W))
    examples = np.concatenate([X[0].numpy(), y[0, :, None].numpy(), np.zeros((n, d + 1))], 1).T
    thoughts, path = [], [np.zeros(d)]
    for _ in range(4):
        token = np.concatenate([np.zeros(d + 1), path[-1], [1.0]])[:, None]
        thoughts = [*thoughts, token] if append else [token]
        Z = np.concatenate([examples, *thoughts], 1)
        path.append((Z + V @ Z @ Z.T @ W @ Z / n)[d + 1 : 2 * d + 1, -1])
    np.testing.assert_allclose(layer(X, y, 4, append=append)[0].detach().numpy(), path, rtol=1e-9)


def test_appended_thoughts_matter_only_off_the_block_structure():
    X, y, _ = batch()
    layer = LinearSelfAttentionCoT.random(4, seed=0, scale=0.1).double()
    assert not torch.allclose(layer(X, y, 3, append=True), layer(X, y, 3, append=False), rtol=1e-4)
    torch.testing.assert_close(layer(X, y, 1, append=True), layer(X, y, 1, append=False))


def test_softmax_transformer_reads_a_set_of_examples():
    X, y, _ = (part.float() for part in batch())
    model = SoftmaxCoT(4, seed=1)
    assert torch.equal(model(X, y, 2), torch.zeros(3, 3, 4))  # no correction before training
    torch.nn.init.normal_(model.read.weight, generator=torch.Generator().manual_seed(0))
    path, order = model(X, y, 3), torch.randperm(7, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(X[:, order], y[:, order], 3), path, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(X[1:2], y[1:2], 3), path[1:2], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(X, -y, 3), path, rtol=0.1)
    same, other = SoftmaxCoT(4, seed=1), SoftmaxCoT(4, seed=2)
    assert torch.equal(same.example.weight, model.example.weight) and not torch.equal(other.example.weight, model.example.weight)


def test_training_learns_and_depends_on_its_seed_alone():
    def run(seed):
        model = LinearSelfAttentionCoT.random(3, seed=0)
        return train_cot(model, prompt_sampler(3, 12), seed=seed, steps=120, batch=64, every=20), model

    (first, model), (again, _), (other, _) = run(0), run(0), run(1)
    assert first == again != other and [step for step, _ in first] == [20, 40, 60, 80, 100, 120]
    assert first[-1][1] < 0.6 * first[0][1]
    gamma = model.gamma
    assert gamma.diagonal().min() > 0.2 and (gamma - torch.diag(gamma.diagonal())).abs().max() < 0.1


def test_gradient_descent_on_gamma_reaches_the_closed_form():
    X, y, w = batch(prompts=32, n=16, d=8)
    layer = LinearSelfAttentionCoT.from_gamma(torch.zeros(8, 8, dtype=torch.float64))
    before = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    losses = train_gamma(layer, X, y, w, tolerance=1e-12)
    closed = pretrain(np.einsum("pnd,pn->pd", X.numpy(), y.numpy()) / 16, w.numpy())
    np.testing.assert_allclose(layer.gamma.numpy(), closed, atol=1e-5)
    assert losses[-1] < losses[0] and torch.equal(layer.W, before["W"])
    changed = (layer.V != before["V"]).nonzero()
    assert changed[:, 0].min() >= layer.blocks["w"].start and changed[:, 1].max() < 8


def test_fixed_prompts_are_the_same_for_every_draw():
    sampler, generator = prompt_sampler(3, 5, prompts=4, seed=7), torch.Generator().manual_seed(0)
    X, _, w = sampler(200, generator)
    assert len(torch.unique(w, dim=0)) == 4 == len(torch.unique(X.flatten(1), dim=0))
    again = prompt_sampler(3, 5, prompts=4, seed=7)(200, torch.Generator().manual_seed(1))[2]
    assert torch.equal(torch.unique(again, dim=0), torch.unique(w, dim=0))


def test_attention_refuses_wrong_shapes():
    layer, softmax = LinearSelfAttentionCoT(3), SoftmaxCoT(3)
    for model in (layer, softmax):
        for X, y in ((torch.zeros(2, 5, 4), torch.zeros(2, 5)), (torch.zeros(5, 3), torch.zeros(5)), (torch.zeros(2, 5, 3), torch.zeros(2, 4))):
            with pytest.raises(InputError, match="X and y"):
                model(X, y, 1)
        with pytest.raises(InputError, match="depth"):
            model(torch.zeros(1, 5, 3), torch.zeros(1, 5), -1)
    with pytest.raises(InputError, match="gamma"):
        LinearSelfAttentionCoT.from_gamma(torch.zeros(2, 3))
    for call in (lambda: LinearSelfAttentionCoT(0), lambda: SoftmaxCoT(2.5), lambda: prompt_sampler(3, 5, prompts=0)):
        with pytest.raises(InputError, match="integers >= 1"):
            call()
    with pytest.raises(InputError, match="steps"):
        train_cot(layer, prompt_sampler(3, 5), seed=0, steps=0)


def test_formula_and_simulation_load_without_torch():
    program = "import sys, nbkit.methods.cot_depth as c; c.CoTDepthTheory(2.0, 4.0).error(3); print('torch' in sys.modules, 'train_cot' in dir(c))"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["False", "True"]
    import nbkit.methods.cot_depth as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="public names: .*CoTDepthTheory"):
        package.nonsense  # noqa: B018


# ---- what was recorded ----


def test_recorded_simulation_is_what_the_recipe_computes():
    data = nbkit.load_recording("cot-depth-sim").data
    assert [row["key"] for row in data["rows"]] == [cot_depth.row_key(row) for row in cot_depth.rows()]
    small = next(row for row in data["rows"] if row["setting"]["d"] == 100)
    again = cot_depth.measure({"group": small["group"], "setting": small["setting"]})
    for name in ("error", "noise", "ols", "ridge", "gd"):
        np.testing.assert_allclose(again[name], small[name], rtol=2e-5, atol=1e-9)
    for row in data["rows"]:
        shape = (data["draws"], data["contexts"], row["setting"]["depth"] + 1)
        assert np.shape(row["error"]) == np.shape(row["noise"]) == np.shape(row["gd"]) == shape and np.shape(row["ols"]) == shape[:2]
        assert np.asarray(row["error"])[..., 0] == pytest.approx(1) and np.all(np.asarray(row["error"]) > 0)


def test_recorded_networks_are_those_of_the_recipe():
    data = nbkit.load_recording("cot-depth-attention").data
    assert [row["key"] for row in data["rows"]] == [cot_attention.attention_key(row) for row in cot_attention.attention_rows()]
    X, y, w = cot_attention.held_out(16, 64)
    loaded = nbkit.load_model("cot-lsa")
    row = next(row for row in data["rows"] if row["setting"] == {"seed": 0, "nudge": 0.1})
    with torch.inference_mode():
        for name in ("markov", "append"):
            error = ((loaded.model(X, y, data["depth"], append=name == "append") - w[:, None]) ** 2).sum(-1)
            assert error.mean(0).tolist() == pytest.approx(row[name]["mean"], rel=1e-3)
    assert loaded.model.gamma.diagonal().mean().item() == pytest.approx(row["gamma"]["diagonal"], abs=1e-4)


def test_recorded_transformers_are_those_of_the_recipe():
    data = nbkit.load_recording("cot-depth-softmax").data
    assert [row["key"] for row in data["rows"]] == [cot_attention.attention_key(row) for row in cot_attention.softmax_rows()]
    for row in data["rows"]:
        # All start at w = 0, on the same test prompts for one context length.
        w = cot_attention.held_out(5, row["setting"]["n"])[2].double()
        assert len(row["mean"]) == data["depth"] + 1 and row["mean"][0] == pytest.approx((w**2).sum(-1).mean().item(), rel=1e-4)
        assert row["loss"][-1][0] == data["settings"]["softmax"]["steps"] and row["loss"][-1][1] < row["loss"][0][1]


def test_one_recorded_descent_is_computed_again():
    data = nbkit.load_recording("cot-depth-attention").data
    row = next(row for row in data["rows"] if row["group"] == "descent" and row["setting"]["tau"] == 2.0)
    again = cot_attention._descent(row["setting"])
    assert again["closed"] == pytest.approx(row["closed"], rel=1e-4)
    assert again["trained"]["10"] == pytest.approx(row["trained"]["10"], rel=1e-4)
