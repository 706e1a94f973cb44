"""Exact facts about schedules, costs and the offline optimiser of fastprefill; no language model is needed.

Identity 8: the dynamic program equals brute force, its loss never rises with the budget, the limit holds, and tau = 1 keeps everything.
Identity 6 (cost): MACs follow from the shapes alone; test_fastprefill_recipes.py compares them with what an execution counts.
"""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbkit.errors import InputError, RunError, UnsupportedModelError
from nbkit.methods.fastprefill.cost import (
    LatencyModel,
    MacCost,
    ModelShape,
    banded_pairs,
    causal_pairs,
    decode_macs,
    draft_macs,
    gemfilter_macs,
    prefill_macs,
    schedule_macs,
)
from nbkit.methods.fastprefill.fitprune import fit_fitprune, fitprune_counts
from nbkit.methods.fastprefill.optimise import FORBIDDEN, Planner, best_one_shot, refine, surrogate
from nbkit.methods.fastprefill.report import PAPER, Grid, Timing, frontier
from nbkit.methods.fastprefill.schedule import PruneSchedule, match_cost
from nbkit.methods.fastprefill.sensitivity import SensitivityTable, default_layers, monotone

SMOL = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
exact = settings(deadline=None, max_examples=40, derandomize=True, database=None)


def speed(tokens, schedule):
    full = schedule_macs(SMOL, PruneSchedule.full(30), tokens)
    return full / schedule_macs(SMOL, schedule, tokens)


# ---- schedules ----


@pytest.mark.parametrize("ratios", [(), (0.9, 0.5), (1, 0.5, 0.6), (1, 0), (1, float("nan")), (1, 1.5), (1, "x"), 7])
def test_schedules_that_are_none_are_refused(ratios):
    with pytest.raises(InputError):
        PruneSchedule(ratios)


def test_a_schedule_of_another_depth_is_refused_with_both_depths():
    with pytest.raises(InputError, match="3 ratios, allowed 30"):
        PruneSchedule.full(3).check(30)


@pytest.mark.parametrize("call", [
    lambda: PruneSchedule.one_shot(0, 0.5, 4), lambda: PruneSchedule.one_shot(4, 0.5, 4), lambda: PruneSchedule.linear(0, 4),
    lambda: PruneSchedule.cosine(2, 4), lambda: PruneSchedule.pyramid(0.5, 4, recent=1), lambda: PruneSchedule.full(0),
    lambda: PruneSchedule.full(2).counts(0), lambda: PruneSchedule.full(2).counts(5, 0), lambda: PruneSchedule.from_json("{}"),
    lambda: PruneSchedule.from_json("["), lambda: PruneSchedule((1.0,), float("nan")), lambda: PruneSchedule((1.0,), meta={"a": object()}).to_json(),
])
def test_wrong_arguments_of_schedules_are_refused(call):
    with pytest.raises(InputError):
        call()


@exact
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=12), st.integers(1, 3000), st.integers(1, 64))
def test_counts_never_rise_and_hold_floor_and_share(shares, tokens, floor):
    schedule = PruneSchedule.from_ratios([1, *sorted(shares, reverse=True)])
    counts = schedule.counts(tokens, floor)
    assert counts[0] == tokens and all(a >= b for a, b in itertools.pairwise(counts))
    assert all(n >= min(floor, tokens) and n >= r * tokens - 1e-6 for n, r in zip(counts, schedule.ratios, strict=True))


def test_counts_round_up_and_survive_the_last_bit_of_a_float():
    assert PruneSchedule((1.0, 0.07)).counts(100) == (100, 7)  # 0.07 * 100 is 7.000000000000001
    assert PruneSchedule((1.0, 0.071)).counts(100) == (100, 8)


def test_json_keeps_everything_that_defines_a_schedule():
    schedule = PruneSchedule((1.0, 0.3), 0.25, {"tau": 0.75})
    again = PruneSchedule.from_json(schedule.to_json())
    assert again == schedule and again.meta == {"tau": 0.75} and json.loads(schedule.to_json())["ratios"] == [1.0, 0.3]


def test_rules_have_their_shapes():
    linear, cosine = PruneSchedule.linear(0.1, 31), PruneSchedule.cosine(0.1, 31)
    assert np.allclose(np.diff(linear.ratios), -0.9 / 30) and linear.ratios[-1] == pytest.approx(0.1)
    assert cosine.ratios[15] == pytest.approx(0.55) and cosine.ratios[-1] == pytest.approx(0.1)
    # PyramidInfer multiplies: the context share of layer l is the product of the factors of the layers before it.
    pyramid, factors = PruneSchedule.pyramid(0.7, 30), [0.7 + 0.3 * (1 + np.cos(np.pi * i / 30)) / 2 for i in range(30)]
    assert pyramid.ratios[10] == pytest.approx(0.2 + 0.8 * np.prod(factors[:10]))
    assert PruneSchedule.pyramid(1.0, 30).ratios == PruneSchedule.full(30).ratios


@exact
@given(st.floats(0.52, 1.0), st.sampled_from(["linear", "cosine", "pyramid"]))
def test_families_meet_a_limit_from_below_and_closely(tau, rule):
    full = schedule_macs(SMOL, PruneSchedule.full(30), 1024)

    def cost(schedule):
        return schedule_macs(SMOL, schedule, 1024) / full

    schedule = match_cost(lambda x: getattr(PruneSchedule, rule)(x, 30), cost, tau)
    assert tau - 0.01 < cost(schedule) <= tau


def test_a_family_that_cannot_be_cheap_enough_says_so():
    with pytest.raises(RunError, match="no schedule of this family"):
        match_cost(lambda x: PruneSchedule.linear(x, 10), lambda s: sum(s.ratios), 0.5)


# ---- costs ----


def test_macs_of_a_layer_are_those_of_the_shapes():
    assert SMOL.qkvo == 2 * 576 * 576 + 2 * 576 * 192 and SMOL.feed_forward == 3 * 576 * 1536
    assert SMOL.row == 3_538_944 and SMOL.feed_forward / SMOL.row == 0.75
    # 576 n^2 is the causal half square to leading order; the exact number of pairs is n (n + 1) / 2.
    assert SMOL.pair * causal_pairs(1000) == 576 * 1000 * 1001
    one = prefill_macs(SMOL, [1000] * 30)
    assert one.total == 30 * (3_538_944 * 1000 + 576 * 1000 * 1001)


@pytest.mark.parametrize(("tokens", "share", "empty", "quarter"), [
    (1024, 0.14, 1.17, 1.12), (2048, 0.25, 1.33, 1.23), (4096, 0.40, 1.67, 1.43), (8192, 0.57, 2.33, 1.75),
])
def test_attention_share_bounds_what_sparse_attention_can_save(tokens, share, empty, quarter):
    full = prefill_macs(SMOL, [tokens] * 30)
    pairs = full.attention / SMOL.pair
    assert full.attention_share == pytest.approx(share, abs=0.006)
    assert full.total / prefill_macs(SMOL, [tokens] * 30, pairs=0 * pairs).total == pytest.approx(empty, abs=0.006)
    assert full.total / prefill_macs(SMOL, [tokens] * 30, pairs=0.25 * pairs).total == pytest.approx(quarter, abs=0.006)
    assert full.total / prefill_macs(SMOL, [tokens] * 30, pairs=0 * pairs).total == pytest.approx(1 / (1 - full.attention_share))


@pytest.mark.parametrize(("tokens", "values"), [
    (1024, (1.86, 1.70, 1.32, 1.27, 1.55)), (2048, (1.91, 1.72, 1.33, 1.27, 1.60)), (4096, (1.99, 1.76, 1.35, 1.28, 1.66)),
    (8192, (2.08, 1.80, 1.38, 1.29, 1.74)),
])
def test_speed_ups_of_the_common_schedules_follow_from_the_shapes(tokens, values):
    drops = [(11, 0.3), (15, 0.2), (20, 0.3), (23, 0.1)]
    found = [speed(tokens, PruneSchedule.one_shot(layer, rate, 30)) for layer, rate in drops]
    found.append(schedule_macs(SMOL, PruneSchedule.full(30), tokens) / gemfilter_macs(SMOL, tokens, 13, tokens // 5))
    assert np.allclose(found, values, atol=0.011)


def test_the_last_row_alone_saves_three_percent_and_post_attention_one_ffn():
    full, last = prefill_macs(SMOL, [2048] * 30), prefill_macs(SMOL, [2048] * 30, last_row_only=True)
    assert full.total / last.total == pytest.approx(1.03, abs=0.005)
    counts = [100] * 10 + [40] * 20
    pre, post = prefill_macs(SMOL, counts), prefill_macs(SMOL, counts, prune_at="post_attn")
    assert pre.total - post.total == 60 * SMOL.feed_forward


def test_scores_are_charged_in_the_layer_before_a_drop_or_where_asked():
    counts = [100] * 10 + [40] * 20
    bare = prefill_macs(SMOL, counts).total
    assert prefill_macs(SMOL, counts, window=8).total - bare == 8 * 100 * 576
    assert prefill_macs(SMOL, counts, window=8, scored=[0, 10]).total - bare == 8 * (100 + 40) * 576
    assert prefill_macs(SMOL, counts, lm_head=True).total - bare == 576 * 49152


@pytest.mark.parametrize(("rows", "keys", "band"), [(5, 2, 1), (40, 10, 4), (7, 100, 1), (9, 0, 3)])
def test_banded_pairs_count_keys_and_band_row_by_row(rows, keys, band):
    assert banded_pairs(rows, keys, band) == sum(min(i + 1, keys + band) for i in range(rows))


def test_decoding_costs_follow_the_cache_and_the_revived_tokens():
    step = decode_macs(SMOL, [100] * 30)
    assert step == 30 * (SMOL.row + SMOL.pair * 101) + 576 * 49152
    revived = decode_macs(SMOL, [100] * 30, recomputed=[0] * 29 + [3])
    assert revived - step == 3 * (SMOL.row + SMOL.pair * 101)
    half = ModelShape(10, 576, 9, 3, 64, 1536, 49152)
    parts = prefill_macs(half, [50] * 10, lm_head=True).total + prefill_macs(SMOL, [20] * 30).total + sum(
        decode_macs(half, [50 + i] * 10) for i in range(8)
    )
    assert draft_macs(SMOL, half, 50, 20) == parts


@pytest.mark.parametrize("call", [
    lambda: prefill_macs(SMOL, [10] * 29), lambda: prefill_macs(SMOL, [10] * 29 + [11]), lambda: prefill_macs(SMOL, [10] * 30, pairs=[1]),
    lambda: prefill_macs(SMOL, [10] * 30, prune_at="late"), lambda: prefill_macs(SMOL, [10] * 30, scored="some"),
    lambda: decode_macs(SMOL, [1]), lambda: gemfilter_macs(SMOL, 10, 30, 5),
    lambda: LatencyModel(-1, 0, 0, 0), lambda: LatencyModel.fit([]), lambda: LatencyModel.from_json("[1]"),
    lambda: LatencyModel.fit([{"rows": n, "keys": 1, "scored": 0, "layer": 1, "seconds": 0.0} for n in range(4)]),
])
def test_wrong_arguments_of_costs_are_refused(call):
    with pytest.raises(InputError):
        call()


def test_models_without_the_usual_sizes_are_refused():
    from transformers import GPT2Config

    with pytest.raises(UnsupportedModelError, match="intermediate_size"):
        ModelShape.from_config(GPT2Config())


def test_the_latency_model_recovers_its_own_coefficients_and_never_goes_negative():
    true = LatencyModel(a=2e-5, b=3e-9, c=4e-9, e=1e-3, window=32)
    samples = [{"rows": n, "keys": (n + 1) / 2, "scored": 0, "layer": 1, "seconds": true.layer(n)} for n in (128, 256, 512, 1024)]
    samples += [{"rows": n, "keys": 0, "scored": 32, "layer": 0, "seconds": true.scoring(n)} for n in (128, 1024)]
    fitted = LatencyModel.fit(samples, window=32)
    assert np.allclose([fitted.a, fitted.b, fitted.c, fitted.e], [true.a, true.b, true.c, true.e], rtol=1e-6)
    assert fitted.relative_error < 1e-9
    counts = PruneSchedule.one_shot(3, 0.5, 6).counts(1000)
    assert fitted.total(counts) == pytest.approx(3 * true.layer(1000) + 3 * true.layer(500) + true.scoring(1000))
    falling = [{**s, "seconds": 1 / s["rows"]} for s in samples[:4]]
    assert min(LatencyModel.fit(falling).a, LatencyModel.fit(falling).b, LatencyModel.fit(falling).e) >= 0


# ---- the optimiser ----


class Steps:
    """A cost in whole buckets, so that rounding up loses nothing."""

    def layer(self, rows):
        return float(rows)

    def scoring(self, rows):
        return 0.0


def random_table(seed, layers, rates, tasks=1):
    """Losses that fall with the share and with the layer."""
    rng = np.random.default_rng(seed)
    table = np.cumsum(np.cumsum(rng.exponential(size=(tasks, layers, len(rates))), axis=1)[:, ::-1], axis=2)[:, :, ::-1] / 10
    table[:, :, list(rates).index(1.0)] = 0
    return table


def every(layers, rates):
    return [PruneSchedule((1.0, *rest)) for rest in itertools.product(rates, repeat=layers - 1)
            if all(a >= b for a, b in itertools.pairwise((1.0, *rest)))]


@exact
@given(st.integers(0, 10**6), st.floats(0.45, 1.0))
def test_identity_08_the_dynamic_program_equals_brute_force(seed, tau):
    rates = (0.25, 0.5, 0.75, 1.0)
    table = random_table(seed, 4, rates)
    planner = Planner(table, rates, tokens=100, cost=Steps(), buckets=100)
    best = min(planner.loss(s) for s in every(4, rates) if planner.cost(s) <= tau * planner.full_cost + 1e-9)
    found = planner.solve(tau)
    assert planner.loss(found) == pytest.approx(best, abs=1e-5)
    assert planner.cost(found) <= tau * planner.full_cost + 1e-9


@exact
@given(st.integers(0, 10**6))
def test_identity_08_loss_never_rises_with_the_budget_and_full_budget_keeps_everything(seed):
    rates = (0.05, 0.1, 0.3, 0.5, 0.7, 1.0)
    planner = Planner(random_table(seed, 12, rates), rates, tokens=777, cost=MacCost(ModelShape(12, 64, 4, 2, 16, 128, 100)), floor=20)
    taus = np.linspace(0.25, 1, 16)
    losses = [planner.solve(tau).predicted_loss for tau in taus]
    assert all(a >= b - 1e-5 for a, b in itertools.pairwise(losses))
    for tau in taus:
        assert planner.solve(tau).meta["cost_share"] <= tau
    assert planner.solve(1.0).ratios == PruneSchedule.full(12).ratios and planner.solve(1.0).predicted_loss == 0


@exact
@given(st.integers(0, 10**6), st.floats(0.4, 0.95), st.sampled_from(["drop", "all"]))
def test_the_limit_holds_in_the_macs_of_the_execution(seed, tau, scored):
    """The planner's cost is that of prefill_macs, rows and scores included."""
    rates = (0.05, 0.2, 0.5, 0.7, 1.0)
    planner = Planner(random_table(seed, 30, rates), rates, tokens=640, cost=MacCost(SMOL, window=32), floor=36, scored=scored)
    schedule = planner.solve(tau)
    counts = schedule.counts(640, 36)
    spent = prefill_macs(SMOL, counts, window=32, scored=scored).total
    assert spent == pytest.approx(planner.cost(schedule)) and spent <= tau * prefill_macs(SMOL, [640] * 30).total


@exact
@given(st.integers(0, 10**6), st.floats(0.5, 0.95))
def test_the_lagrangian_keeps_the_limit_and_never_beats_the_program(seed, tau):
    rates = (0.25, 0.5, 0.75, 1.0)
    planner = Planner(random_table(seed, 6, rates), rates, tokens=100, cost=Steps(), buckets=100)
    priced = planner.lagrangian(tau)
    assert planner.cost(priced) <= tau * planner.full_cost * (1 + 1e-9)
    assert planner.loss(priced) >= planner.loss(planner.solve(tau)) - 1e-5
    # On the hull both agree: at exactly the cost of a priced schedule nothing is better.
    again = planner.solve(min(1.0, planner.cost(priced) / planner.full_cost + 1e-9))
    assert planner.loss(again) == pytest.approx(planner.loss(priced), abs=1e-5)


@exact
@given(st.integers(0, 10**6), st.floats(0.5, 0.95))
def test_the_worst_task_objective_is_bounded_by_brute_force(seed, tau):
    rates = (0.25, 0.5, 1.0)
    planner = Planner(random_table(seed, 4, rates, tasks=3), rates, tokens=100, cost=Steps(), buckets=100)
    best = min(planner.loss(s, objective="worst") for s in every(4, rates) if planner.cost(s) <= tau * planner.full_cost + 1e-9)
    found = planner.solve(tau, objective="worst")
    assert found.meta["bound"] <= best + 1e-5 <= found.predicted_loss + 2e-5
    assert found.predicted_loss <= planner.loss(planner.solve(tau), objective="worst") + 1e-5


def test_the_surrogate_is_exact_for_one_drop_and_adds_later_ones():
    table = [[0, 0, 0], [0.9, 0.5, 0], [0.6, 0.2, 0]]
    rates = (0.25, 0.5, 1.0)
    assert surrogate(table, rates, PruneSchedule.one_shot(2, 0.25, 3)).tolist() == [0.6]
    assert surrogate(table, rates, PruneSchedule((1.0, 0.5, 0.25)))[0] == pytest.approx(0.5 + 0.6 - 0.2)
    assert surrogate(table, rates, PruneSchedule.full(3)).tolist() == [0.0]


@exact
@given(st.integers(0, 10**6), st.floats(0.5, 0.95))
def test_no_single_drop_is_better_than_the_optimised_schedule(seed, tau):
    rates = (0.25, 0.5, 0.75, 1.0)
    planner = Planner(random_table(seed, 8, rates), rates, tokens=100, cost=Steps(), buckets=100)
    single = best_one_shot(planner, tau)
    assert planner.solve(tau).predicted_loss <= single.predicted_loss + 1e-5 and len(single.drops) == 1
    assert single.predicted_loss == pytest.approx(planner.loss(single))


def test_refinement_takes_only_measured_gains_within_limit_and_evaluations():
    rates = (0.25, 0.5, 0.75, 1.0)
    planner = Planner(random_table(3, 8, rates), rates, tokens=100, cost=Steps(), buckets=100)
    start, target = planner.solve(0.7), PruneSchedule.one_shot(5, 0.25, 8)

    def measured(schedule):
        return float(np.abs(np.subtract(schedule.ratios, target.ratios)).sum())

    best, history = refine(start, measured, planner, 0.7, max_evaluations=50)
    assert len(history) <= 50 and measured(best) < measured(start) and planner.cost(best) <= 0.7 * planner.full_cost
    assert measured(best) == min(h["loss"] for h in history) == best.meta["refined_loss"]
    same, history = refine(start, measured, planner, 0.7, max_evaluations=1)
    assert same.ratios == start.ratios and len(history) == 1


@pytest.mark.parametrize("call", [
    lambda p: p.solve(0), lambda p: p.solve(1.2), lambda p: p.solve(float("nan")), lambda p: p.solve(0.8, objective="best"),
    lambda p: p.cost(PruneSchedule((1.0, 0.4, 0.4))), lambda p: p.cost(PruneSchedule.full(4)),
    lambda p: refine(p.solve(1), abs, p, 1, max_evaluations=0),
    lambda p: Planner(np.zeros((3, 2)), (0.5, 0.25), tokens=9, cost=Steps()), lambda p: Planner(np.zeros((3, 3)), (0.5, 1), tokens=9, cost=Steps()),
    lambda p: Planner(np.full((3, 2), np.nan), (0.5, 1), tokens=9, cost=Steps()),
    lambda p: Planner(np.zeros((3, 2)), (0.5, 1), tokens=0, cost=Steps()),
    lambda p: Planner(np.zeros((3, 2)), (0.5, 1), tokens=9, cost=Steps(), scored="some"),
    lambda p: Planner(np.zeros((3, 2)), (0.5, 1), tokens=9, cost=Steps(), buckets=0),
])
def test_wrong_arguments_of_the_optimiser_are_refused(call):
    with pytest.raises(InputError):
        call(Planner(np.zeros((3, 2)), (0.5, 1.0), tokens=100, cost=Steps()))


def test_budgets_below_the_cheapest_schedule_say_what_is_possible():
    planner = Planner(random_table(0, 4, (0.5, 1.0)), (0.5, 1.0), tokens=100, cost=Steps())
    assert planner.cheapest == pytest.approx(2.5 / 4)
    for call in (lambda: planner.solve(0.5), lambda: planner.lagrangian(0.5), lambda: best_one_shot(planner, 0.5)):
        with pytest.raises(RunError, match="that cheap"):
            call()


# ---- the table ----


@exact
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_smoothing_is_monotone_and_leaves_monotone_tables_alone(seed, layers, rates):
    rng = np.random.default_rng(seed)
    fitted = monotone(rng.normal(size=(layers, rates)))
    assert (np.diff(fitted, axis=0) <= 1e-9).all() and (np.diff(fitted, axis=1) <= 1e-6).all()
    falling = -np.cumsum(np.cumsum(rng.exponential(size=(layers, rates)), 0), 1)
    assert np.allclose(monotone(falling), falling)


def test_smoothing_in_one_line_is_isotonic_regression():
    from scipy.optimize import isotonic_regression

    line = np.array([3.0, 1.0, 2.0, 2.5, 0.0])
    assert np.allclose(monotone(line[:, None])[:, 0], isotonic_regression(line, increasing=False).x)
    # The projection is at least as close as any other monotone table, for example the constant one.
    noisy = np.random.default_rng(0).normal(size=(5, 4)) - np.add.outer(np.arange(5), np.arange(4)) / 3
    assert ((monotone(noisy) - noisy) ** 2).sum() <= ((noisy.mean() - noisy) ** 2).sum()


def table(seed=0, prompts=("needle", "needle", "code", "qa")):
    rng = np.random.default_rng(seed)
    losses = rng.exponential(size=(len(prompts), 3, 3))
    return SensitivityTable((2, 5, 8), (0.1, 0.3, 0.6), losses, prompts, tuple(i % 2 for i in range(len(prompts))))


def test_the_mean_weighs_tasks_equally_and_choices_are_those_asked_for():
    t = table()
    per_task = [t.losses[:2].mean(0), t.losses[2], t.losses[3]]
    assert np.allclose(t.mean(), np.mean(per_task, 0)) and np.allclose(t.mean(kinds=["code"]), t.losses[2])
    assert np.allclose(t.mean(kinds=["needle"], draw=1), t.losses[1]) and t.by_kind()[0] == ("needle", "code", "qa")
    smooth, change = t.smooth(kinds=["code"])
    assert change == pytest.approx(np.abs(smooth - t.losses[2]).mean()) and (smooth >= 0).all()
    again = SensitivityTable.from_dict(json.loads(json.dumps(t.as_dict())))
    assert np.allclose(again.losses, t.losses, atol=1e-5) and again.kinds == t.kinds and again.draws == t.draws


def test_the_planners_table_interpolates_layers_and_forbids_drops_before_the_first():
    t = table()
    smooth = t.smooth()[0]
    full, rates = t.spread(smooth, 10)
    assert full.shape == (10, 4) and rates == (0.1, 0.3, 0.6, 1.0)
    assert np.allclose(full[5, :3], smooth[1]) and np.allclose(full[3, :3], smooth[0] + (smooth[1] - smooth[0]) / 3)
    assert np.allclose(full[9, :3], smooth[2]) and (full[:2, :3] == FORBIDDEN).all() and (full[:, 3] == 0).all()
    shape = ModelShape(10, 64, 4, 2, 16, 128, 100)
    planner = t.planner(shape, tokens=400)
    for tau in (0.4, 0.6, 0.9):
        schedule = planner.solve(tau)
        assert schedule.drops[0][0] >= 2 and schedule.predicted_loss < 100
    with pytest.raises(RunError, match="before the first measured layer"):
        planner.solve(0.24)
    apart = t.planner(shape, tokens=400, by_kind=True)
    assert apart.tables.shape == (3, 10, 4)
    assert apart.solve(0.6, objective="worst").predicted_loss >= apart.solve(0.6).predicted_loss - 1e-5


@pytest.mark.parametrize("call", [
    lambda: SensitivityTable((2,), (0.5,), np.zeros((1, 1, 2)), ("a",)), lambda: SensitivityTable((2, 1), (0.5,), np.zeros((1, 2, 1)), ("a",)),
    lambda: SensitivityTable((0,), (0.5,), np.zeros((1, 1, 1)), ("a",)), lambda: SensitivityTable((1,), (1.0,), np.zeros((1, 1, 1)), ("a",)),
    lambda: SensitivityTable((1,), (0.5,), np.full((1, 1, 1), np.nan), ("a",)),
    lambda: SensitivityTable((1,), (0.5,), np.zeros((1, 1, 1)), ("a",), (1, 2)),
    lambda: table().mean(kinds=["tables"]), lambda: table().mean(draw=7), lambda: SensitivityTable.from_dict({}), lambda: default_layers(1),
])
def test_wrong_tables_are_refused(call):
    with pytest.raises(InputError):
        call()


# ---- FitPrune ----


@exact
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.integers(4, 30))
def test_fitprune_layers_lose_at_most_alpha_of_their_attention(seed, alpha, floor):
    rng = np.random.default_rng(seed)
    cross, own = rng.exponential(size=(2, 6, 60))
    counts = fitprune_counts(cross, own, alpha, cost=Steps(), limit=0, forced=[0, 59], floor=floor)
    assert counts[0] == 60 and all(a >= b for a, b in itertools.pairwise(counts)) and counts[-1] >= floor
    # The first drop can be checked by hand: the intersection of both bottom lists.
    lists = []
    for mass in (cross[0], own[0]):
        order = np.argsort(mass)
        lists.append({int(i) for i, lost in zip(order, np.cumsum(mass[order]), strict=True) if lost <= alpha * mass.sum() + 1e-12})
    assert counts[1] == max(floor, 60 - len((lists[0] & lists[1]) - {0, 59}))


def test_fitprune_stops_dropping_once_the_rest_fits_and_meets_its_budget():
    rng = np.random.default_rng(1)
    masses = [tuple(rng.exponential(size=(2, 8, 50))) for _ in range(3)]
    for tau in (0.5, 0.75, 0.9):
        schedule = fit_fitprune(masses, tau=tau, cost=Steps())
        assert sum(schedule.counts(50)) <= tau * 8 * 50
    assert fit_fitprune(masses, tau=1.0, cost=Steps()).ratios == PruneSchedule.full(8).ratios
    counts = fitprune_counts(*masses[0], 0.2, cost=Steps(), limit=8 * 50)
    assert counts == (50,) * 8


@pytest.mark.parametrize("call", [
    lambda m: fitprune_counts(m, m[:1], 0.1, cost=Steps(), limit=1), lambda m: fitprune_counts(m, m, 1.1, cost=Steps(), limit=1),
    lambda m: fitprune_counts(m * np.nan, m, 0.1, cost=Steps(), limit=1), lambda m: fit_fitprune([], tau=0.5, cost=Steps()),
    lambda m: fit_fitprune([(m, m)], tau=0, cost=Steps()), lambda m: fit_fitprune([(m, m), (m[:, 1:], m[:, 1:])], tau=0.5, cost=Steps()),
])
def test_wrong_arguments_of_fitprune_are_refused(call):
    with pytest.raises(InputError):
        call(np.ones((4, 10)))


def test_fitprune_says_when_even_losing_everything_is_not_enough():
    with pytest.raises(RunError, match="cannot meet"):
        fit_fitprune([(np.ones((4, 10)), np.ones((4, 10)))], tau=0.3, cost=Steps(), floor=5)


# ---- the report ----


def grid():
    prompts = [f"p{i}" for i in range(24)]
    rng = np.random.default_rng(0)
    full = rng.exponential(size=24)
    cells = {"full": (full, 1), "optimised@0.75": (full + 0.01, 0.75), "linear@0.75": (full + 0.5 + rng.exponential(size=24) / 10, 0.75)}
    return Grid({
        "prompts": prompts, "kinds": ["needle", "qa"] * 12, "taus": [0.75, 0.65],
        "cells": {
            name: {"nll": dict(zip(prompts, nll.tolist(), strict=True)), "exact": dict.fromkeys(prompts, float(name == "full")),
                   "macs": dict.fromkeys(prompts, 100.0 * macs), "evidence": dict.fromkeys(prompts, 1.0)}
            for name, (nll, macs) in cells.items()
        },
    })


def test_the_report_pairs_prompts_and_keeps_costs_and_tasks_apart():
    g = grid()
    assert g.difference("optimised@0.75", "full").estimate == pytest.approx(0.01) and g.cost_share("linear@0.75") == 0.75
    assert g.beats_heuristics(0.75, ["linear", "cosine"]).keys() == {"linear"} and g.beats_heuristics(0.75)["linear"].high < 0
    assert g.budgets_won(["linear"]) == {0.75: True, 0.65: False} and g.budgets_won() == {0.75: False, 0.65: False}
    assert [row["task"] for row in g.quality("linear@0.75")] == ["all", "needle", "qa"] and g.quality("linear@0.75")[1]["prompts"] == 12
    assert {row["cell"] for row in g.rows()} == {"optimised@0.75", "linear@0.75"} and g.rows()[0]["points"].estimate == -100
    assert [row["cell"] for row in frontier(g, g.names, points=100)] == ["optimised@0.75"]
    for call in (lambda: g.values("nll", "x"), lambda: g.common("x"), lambda: g.values("nll", "full", ["p99"])):
        with pytest.raises(InputError):
            call()


def test_timings_compare_within_rounds():
    rng = np.random.default_rng(0)
    slow = rng.exponential(size=11) + 1
    data = {
        "lengths": [512], "seconds": {"512": {"full": slow.tolist(), "half": (slow / 2).tolist()}}, "macs": {"512": {"full": 3.0, "half": 1.0}},
        "decode": {str(n): {"prefill": (slow * n).tolist(), "step": slow.tolist()} for n in (256, 512, 1024)},
        "split": {"512": {"full": slow.tolist(), "without": (slow / 1.1).tolist(), "attention_share": 0.1, "ffn_full": slow.tolist(),
                          "ffn_without": slow.tolist()}},
        "steps": {"seconds": {"full": slow.tolist(), "free": (0.9 * slow).tolist()}},
    }
    timing = Timing(data)
    ratio = timing.ratio("half", 512)
    assert ratio.low == ratio.high == pytest.approx(2.0) and timing.mac_ratio("half", 512) == 3.0
    assert [row["method"] for row in timing.rows()] == ["full", "half"]
    assert timing.prefill_slope().low > 0 and timing.prefill_share()[0] == [256, 512, 1024]
    split = timing.without_attention(512)
    assert split["gain"].estimate == pytest.approx(1.1) and split["bound"] == pytest.approx(1 / 0.9) and split["ffn"].estimate == 1
    assert timing.step_ratio("free").high < 1
    with pytest.raises(InputError):
        timing.seconds("none", 512)


def test_every_claim_has_its_words():
    assert set(PAPER) == {f"C{i}" for i in range(1, 9)} | {"C4b"} and all(entry.keys() == {"statement", "paper"} for entry in PAPER.values())
    assert "not over full prefill" in PAPER["C8"]["paper"]
