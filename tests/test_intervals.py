"""Intervals and exact tests against published tables, closed forms, enumeration and SciPy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nbkit.errors import InputError
from nbkit.metrics import Interval, bootstrap, kendall, paired, pass_at_k, sign_test, slope, wilson

# Newcombe, Statistics in Medicine 17 (1998) 857-872, Table I, method 3 (score, no continuity correction), four decimals.
NEWCOMBE = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]


@pytest.mark.parametrize("k, n, low, high", NEWCOMBE)
def test_wilson_published_table(k, n, low, high):
    interval = wilson(k, n)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)
    assert interval.estimate == k / n and interval.n == n and interval.level == 0.95


@pytest.mark.parametrize("k, n, level", [(0, 1, 0.95), (7, 9, 0.9), (500, 500, 0.99), (33, 100, 0.8)])
def test_wilson_equals_scipy(k, n, level):
    want = stats.binomtest(k, n).proportion_ci(level, method="wilson")
    assert wilson(k, n, level=level).low == pytest.approx(want.low, abs=1e-12)
    assert wilson(k, n, level=level).high == pytest.approx(want.high, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_symmetric_and_inside(case):
    k, n = case
    here, there = wilson(k, n), wilson(n - k, n)
    assert 0 <= here.low <= here.estimate <= here.high <= 1
    assert here.low == pytest.approx(1 - there.high, abs=1e-12)


@pytest.mark.parametrize("k, n", [(-1, 3), (4, 3), (0, 0), (1.5, 3)])
def test_wilson_bad_counts(k, n):
    with pytest.raises(InputError):
        wilson(k, n)


# 4 of 5 scorers positive: p = 2 * (1 + 5) / 32; 9 of 10: 2 * (1 + 10) / 1024. By hand from Pascal's triangle.
@pytest.mark.parametrize("k, n, p", [(4, 5, 0.375), (5, 5, 0.0625), (9, 10, 22 / 1024), (5, 10, 1.0), (0, 0, 1.0)])
def test_sign_test_by_hand(k, n, p):
    assert sign_test(k, n) == p == sign_test(n - k, n)


@pytest.mark.parametrize("k, n", [(0, 7), (61, 100), (480, 1000)])
def test_sign_test_equals_scipy(k, n):
    assert sign_test(k, n) == pytest.approx(stats.binomtest(k, n).pvalue, rel=1e-10)


@pytest.mark.parametrize("n, c", [(1, 0), (4, 1), (5, 3), (6, 6), (7, 2)])
def test_pass_at_k_by_enumeration(n, c):
    attempts = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        choices = list(itertools.combinations(attempts, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_arrays_and_errors():
    np.testing.assert_allclose(pass_at_k([4, 10], [1, 5], 2), [0.5, 1 - (5 * 4) / (10 * 9)])
    assert isinstance(pass_at_k(4, 1, 2), float)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)
    for bad in [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)]:
        with pytest.raises(InputError):
            pass_at_k(*bad)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=25))
def test_kendall_equals_scipy(pairs):
    x, y = zip(*pairs, strict=True)
    if len(set(x)) == 1 or len(set(y)) == 1:
        with pytest.raises(InputError):
            kendall(x, y)
    else:
        assert kendall(x, y) == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-12)


def test_kendall_with_ties_by_hand():
    # Of six pairs four are concordant, none discordant, one tied in x and one tied in y: 4 / sqrt(5 * 5).
    assert kendall([1, 1, 2, 3], [1, 2, 2, 3]) == pytest.approx(0.8)


def test_bootstrap_matches_the_exact_bootstrap_distribution():
    # Four values have 4**4 equally likely resamples; their means are known, and so are the percentiles.
    values = np.array([0.0, 1.0, 4.0, 10.0])
    means = np.array([np.mean(choice) for choice in itertools.product(values, repeat=4)])
    want = np.quantile(means, [0.025, 0.975])
    got = bootstrap(values, n=20_000, seed=3)
    assert got.estimate == 3.75 and got.n == 4
    assert got.low == pytest.approx(want[0], abs=0.3) and got.high == pytest.approx(want[1], abs=0.3)


def test_bootstrap_fast_mean_equals_the_general_path_in_law():
    values = np.random.default_rng(0).exponential(size=60)
    labels = np.repeat(np.arange(20), 3)
    fast = bootstrap(values, cluster=labels, n=6000)
    general = bootstrap(values, stat=lambda v: float(np.mean(v)), cluster=labels, n=6000)
    assert fast.low == pytest.approx(general.low, abs=0.03) and fast.high == pytest.approx(general.high, abs=0.03)


def test_bootstrap_close_to_normal_theory_for_many_values():
    values = np.random.default_rng(1).normal(5, 2, size=400)
    error = values.std() / math.sqrt(len(values))
    got = bootstrap(values, n=8000)
    assert got.low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert got.high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)


def test_clusters_are_resampled_whole():
    # Every cluster repeats one number: the interval must be that of the 12 clusters, not the 10 times tighter one of 1,200 rows.
    centres = np.random.default_rng(2).normal(size=12)
    rows, labels = np.repeat(centres, 100), np.repeat(np.arange(12), 100)
    clustered = bootstrap(rows, cluster=labels, n=8000, seed=1)
    assert clustered.n == 12
    assert clustered.low == pytest.approx(bootstrap(centres, n=8000, seed=1).low, abs=1e-9)
    naive = bootstrap(rows, n=2000)
    assert (clustered.high - clustered.low) > 5 * (naive.high - naive.low)


def test_cluster_labels_can_be_names_in_any_order():
    values = np.arange(12.0)
    numbered = bootstrap(values, cluster=np.repeat([0, 1, 2, 3], 3))
    assert numbered == bootstrap(values, cluster=np.repeat(["d", "b", "z", "a"], 3))


def test_bootstrap_seed():
    values = np.random.default_rng(4).normal(size=30)
    assert bootstrap(values, seed=5) == bootstrap(values, seed=5)
    assert bootstrap(values, seed=5) != bootstrap(values, seed=6)


def test_bca_equals_scipy():
    values = np.random.default_rng(7).exponential(size=40)
    want = stats.bootstrap((values,), np.median, n_resamples=9000, method="BCa", rng=np.random.default_rng(1)).confidence_interval
    got = bootstrap(values, stat=np.median, n=9000, method="bca")
    assert got.low == pytest.approx(want.low, abs=0.05) and got.high == pytest.approx(want.high, abs=0.05)
    want = stats.bootstrap((values,), np.mean, n_resamples=20000, method="BCa", rng=np.random.default_rng(1)).confidence_interval
    got = bootstrap(values, n=20000, method="bca")
    assert got.low == pytest.approx(want.low, abs=0.015) and got.high == pytest.approx(want.high, abs=0.015)
    # On skewed data the correction moves both bounds to the right; without it the test above would still be close.
    plain = bootstrap(values, n=20000)
    assert got.low > plain.low + 0.01 and got.high > plain.high + 0.01


@pytest.mark.parametrize("size", [3, 6, 9, 15])
def test_expanded_percentiles_use_the_t_quantile(size):
    values = np.random.default_rng(8).normal(size=size)
    tail = stats.norm.cdf(-math.sqrt(size / (size - 1)) * stats.t.ppf(0.975, size - 1))
    got, low_level = bootstrap(values, method="expanded", n=5000, seed=2), bootstrap(values, level=1 - 2 * tail, n=5000, seed=2)
    assert (got.low, got.high) == pytest.approx((low_level.low, low_level.high), abs=1e-9)
    assert got.level == 0.95


def test_expanded_covers_better_with_five_seeds():
    rng = np.random.default_rng(9)
    samples = rng.normal(size=(300, 5))
    plain = np.mean([i.low <= 0 <= i.high for i in (bootstrap(s, n=400, seed=1) for s in samples)])
    wide = np.mean([i.low <= 0 <= i.high for i in (bootstrap(s, n=400, seed=1, method="expanded") for s in samples)])
    assert plain < 0.88 < 0.9 < wide


def test_paired_uses_the_pairing():
    rng = np.random.default_rng(10)
    difficulty = rng.normal(0, 10, size=50)
    a, b = difficulty + 1 + rng.normal(0, 0.1, 50), difficulty
    interval = paired(a, b)
    assert interval.low > 0.9 and interval.high < 1.1
    assert interval.estimate == pytest.approx(np.mean(a) - np.mean(b))
    assert paired(b, a).scale(-1).estimate == pytest.approx(interval.estimate)
    assert "paired" in interval.method and "cluster" in paired(a, b, cluster=np.repeat(np.arange(25), 2)).method


def test_slope_equals_scipy_and_covers_the_truth():
    rng = np.random.default_rng(11)
    x = np.tile([4.0, 5, 6, 7], 40)
    y = -2 * x + np.repeat(rng.normal(0, 3, 40), 4) + rng.normal(0, 0.5, 160)
    interval = slope(x, y, cluster=np.repeat(np.arange(40), 4))
    assert interval.estimate == pytest.approx(stats.linregress(x, y).slope)
    assert interval.low < -2 < interval.high and interval.high < -1.5 and interval.n == 40
    # Text effects are shared by all four budgets, so the clustered interval is the tighter one here.
    assert interval.high - interval.low < 0.5 * (slope(x, y).high - slope(x, y).low)


@pytest.mark.parametrize("call", [
    lambda: bootstrap([]), lambda: bootstrap([1.0]), lambda: bootstrap([1.0, math.nan]), lambda: bootstrap([1.0, math.inf]),
    lambda: bootstrap([1.0, 2.0], cluster=[0, 0]), lambda: bootstrap([1.0, 2.0], cluster=[0]), lambda: bootstrap([1.0, 2.0], method="basic"),
    lambda: bootstrap([1.0, 2.0], level=95), lambda: bootstrap([1.0, 2.0], n=5), lambda: bootstrap([1.0, 2.0], stat=lambda v: math.nan),
    lambda: paired([1.0, 2.0], [1.0]), lambda: slope([1.0, 1.0], [0.0, 2.0]), lambda: slope([1.0, 2.0], [0.0]), lambda: kendall([1], [1]),
    lambda: sign_test(3, 2), lambda: Interval(1, 2, 1), lambda: Interval(1, 0, 2, level=95),
])
def test_bad_input_is_an_input_error(call):
    with pytest.raises(InputError):
        call()


@pytest.mark.parametrize("interval, text", [
    (Interval(7.213, 3.1, 11.42, n=200, method="paired bootstrap"), "7.21 [3.10, 11.42] (95 % paired bootstrap, n = 200)"),
    (Interval(0.0402, 0.0004, 0.08), "0.0402 [0.0004, 0.0800] (95 %)"),
    (Interval(-0.0001, -2, 2), "0.00 [-2.00, 2.00] (95 %)"),
    (Interval(15234.4, 14000, 16400.2, level=0.9), "15234 [14000, 16400] (90 %)"),
    (Interval(3e-9, 1e-9, 5e-9), "3e-09 [1e-09, 5e-09] (95 %)"),
    (Interval(0, 0, 0, n=30, method="cluster bootstrap"), "0 [0, 0] (95 % cluster bootstrap, n = 30)"),
    (Interval(math.nan, math.nan, math.nan), "nan [nan, nan] (95 %)"),
    (Interval.exact(16384), "16384 (exact)"), (Interval.exact(4_000_001), "4000001 (exact)"), (Interval.exact(1 / 3), "0.3333 (exact)"),
])
def test_interval_reads_well(interval, text):
    assert str(interval) == text == f"{interval}"


def test_interval_scale_and_dict():
    interval = Interval(0.2, 0.1, 0.4, n=9, method="m")
    assert (interval.scale(-100).low, interval.scale(-100).high) == (-40, -10)
    assert Interval(**interval.as_dict()) == interval
