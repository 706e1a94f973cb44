"""Forced injection: the identities of the experiment, its estimators against slow references, and what it refuses."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

import nbkit
from nbkit.agents import Deferring, Eager, LearnedPolicy, Restart
from nbkit.envs.office import Call, OfficeOps, plan
from nbkit.errors import InputError
from nbkit.methods.clarification_timing import (
    ARMS,
    AskPolicy,
    EntropyPolicy,
    ForcedInjection,
    Grid,
    NeverAsk,
    Outcomes,
    Resampling,
    State,
    ask_summary,
    budget_actions,
    cells,
    commitment,
    demand_curve,
    holm,
    kendall_panel,
    moment,
    page_trend,
    sessions,
    sham_message,
    sign_flip,
    spearman,
    tau_b,
    wasted_compute,
    wasted_matrix,
    window_contrast,
    with_word,
)
from nbkit.metrics import bootstrap, kendall, paired, pass_at_k

SUITE = OfficeOps()
FREE = OfficeOps(irreversible=0.0, reverify=0)
SCRIPTED = (Eager, Deferring, Restart)
LATE, TIMES = (0.1, 0.3, 0.5, 0.7, 0.9), (0.0, 0.3, 0.5, 0.9, 1.0)


def last_looks(steps):
    """Looks at the end of a plan: when the budget is gone by then, the job is done all the same."""
    return len(list(itertools.takewhile(lambda step: step.kind == "close", reversed(steps))))


@pytest.fixture(scope="module")
def learned():
    return LearnedPolicy.load()


@pytest.fixture(scope="module")
def table(learned):
    return ForcedInjection(SUITE, timings=TIMES, trials=3).run([Eager(), Deferring(), learned])


@pytest.fixture(scope="module")
def curve(table):
    return demand_curve(table, k=3, n=1000)


# ---- identities of the experiment ----


@pytest.mark.parametrize("dimension", SUITE.dims)
def test_identity_01_injection_at_zero_is_the_oracle_run(dimension, learned):
    experiment = ForcedInjection(SUITE)
    for agent in (*(kind() for kind in SCRIPTED), learned):
        for variant in [v for v in SUITE.variants if v.dimension == dimension][::3]:
            told = experiment.episode(agent, variant, arm="oracle")
            injected = experiment.episode(agent, variant, arm="inject", fraction=0.0)
            assert injected.trace == told.trace and told.row["passed"] and injected.row["delivered"]


@pytest.mark.parametrize("dimension", SUITE.dims)
def test_identity_02_injection_after_the_last_action_is_never(dimension, learned):
    experiment = ForcedInjection(SUITE)
    for agent in (*(kind() for kind in SCRIPTED), learned):
        for variant in [v for v in SUITE.variants if v.dimension == dimension][::3]:
            never = experiment.episode(agent, variant, arm="never")
            last = experiment.episode(agent, variant, arm="inject", fraction=1.0)
            assert last.trace == never.trace and last.row["passed"] == never.row["passed"] and not last.row["delivered"]


def test_identity_03_one_option_makes_all_conditions_equal():
    suite = OfficeOps(options=1, reverify=0)
    experiment = ForcedInjection(suite, trials=1)
    for agent in (Eager(), Deferring()):
        for variant in suite.variants[::5]:
            runs = [experiment.episode(agent, variant, arm=arm, fraction=0.0 if math.isnan(f) else f) for arm, f in experiment.conditions]
            assert all(run.trace == runs[0].trace and run.row["passed"] for run in runs)


@pytest.mark.parametrize("k", [2, 6])
def test_identity_04_without_the_fact_a_guess_is_right_once_in_k(k):
    suite = OfficeOps(options=k)
    table = ForcedInjection(suite, timings=(), trials=6, sham=False).run([Eager()]).where(arm="never")
    n, share = len(table), table["passed"].mean()
    assert n == 84 * 6 and abs(share - 1 / k) < 4 * math.sqrt((1 / k) * (1 - 1 / k) / n)


@pytest.mark.parametrize("budget", [1.0, 1.2, 1.5, 1.9])
def test_identity_05_starting_over_succeeds_iff_the_budget_allows_it(budget):
    experiment = ForcedInjection(FREE, timings=LATE, trials=1, budget=budget, sham=False)
    table = experiment.run([Restart()]).where(arm="inject")
    looks = {variant.id: last_looks(plan(variant)) for variant in FREE.variants}
    for row in table.rows:
        spent = moment(row["fraction"], row["oracle_actions"]) + row["oracle_actions"] - looks[row["variant"]]
        assert row["passed"] == (spent <= math.floor(budget * row["oracle_actions"] + 1e-9)), row


def test_identity_06_without_limits_every_time_is_early_enough():
    experiment = ForcedInjection(FREE, timings=LATE, trials=1, budget=math.inf, sham=False)
    table = experiment.run([kind() for kind in SCRIPTED])
    assert table.where(arm="inject")["passed"].all() and not table.where(arm="never")["passed"].all()


def test_identity_07_pass_at_k():
    rng = np.random.default_rng(0)
    n, c = np.full(50, 5), rng.integers(0, 6, 50)
    at = [pass_at_k(n, c, k) for k in range(1, 6)]
    np.testing.assert_allclose(at[0], c / n)
    np.testing.assert_array_equal(at[-1], c > 0)
    assert all((b >= a - 1e-12).all() for a, b in itertools.pairwise(at))
    product = 1 - np.array([np.prod([1 - 3 / i for i in range(a - b + 1, a + 1)]) if a - b >= 3 else 0.0 for a, b in zip(n, c)])
    np.testing.assert_allclose(at[2], product, atol=1e-12)


@pytest.mark.parametrize("reverify,irreversible,budget", [(1, 0.2, 1.2), (0, 0.5, 1.1), (3, 0.5, 1.4), (2, 0.0, 1.0)])
def test_identity_08_closed_form_of_the_eager_agent_episode_by_episode(reverify, irreversible, budget):
    suite = OfficeOps(irreversible=irreversible, reverify=reverify)
    experiment = ForcedInjection(suite, timings=LATE, trials=2, budget=budget, sham=False)
    agent, seen = Eager(), set()
    for variant in suite.variants:
        steps = plan(variant)
        slack = budget_actions(budget, len(steps)) - len(steps) + last_looks(steps)
        for fraction, trial in itertools.product(LATE, range(2)):
            run = experiment.episode(agent, variant, fraction=fraction, trial=trial)
            before = [step for step in steps[: moment(fraction, len(steps))] if step.depends]
            guessed = agent.history[0][1] == variant.answer
            final = not guessed and any(not step.undoable for step in before)
            redo = 0 if guessed else sum(step.undoable for step in before)
            assert run.row["passed"] == (not final and redo + reverify <= slack), (variant.id, fraction, trial, run.reasons)
            assert run.row["irreversible"] == final
            seen.add((run.row["passed"], guessed))
    assert len(seen) >= 3


def test_identity_09_tau_b_agrees_with_scipy_and_with_the_quadratic_reference():
    rng = np.random.default_rng(1)
    for levels, m in ((2, 30), (4, 200), (6, 588)):
        x = rng.integers(0, levels, m) / 5
        y = np.where(rng.random(m) < 0.5, x, rng.integers(0, levels, m) / 5)
        assert tau_b(x, y) == pytest.approx(stats.kendalltau(x, y, variant="b").statistic, abs=1e-12)
        assert tau_b(x, y) == pytest.approx(kendall(x, y), abs=1e-12)
        assert tau_b(x, x) == pytest.approx(1) and tau_b(x, -x) == pytest.approx(-1)


def test_identity_10_number_of_runs_of_the_paper():
    # arXiv 2605.07937: 36 variants and 4 models, 30 and 3, 18 and 3; 3 trials of every condition.
    experiment = ForcedInjection(SUITE, timings=LATE, trials=3, sham=False)
    runs = (36 * 4 + 30 * 3 + 18 * 3) * len(experiment.conditions) * experiment.trials
    assert runs == 3024 + 1890 + 1134 == 6048


def test_budget_allows_no_action_more(table):
    assert (table["actions"] <= table["budget"]).all()
    assert (table["budget"] == np.floor(1.2 * table["oracle_actions"] + 1e-9)).all()


def test_all_conditions_of_a_trial_share_guess_and_world():
    experiment = ForcedInjection(SUITE)
    for variant in SUITE.variants[::9]:
        runs = [experiment.episode(agent, variant, arm=arm, fraction=0.9) for agent in (Eager(), Restart()) for arm in ("never", "inject", "sham")]
        at = moment(0.9, len(plan(variant)))
        assert all(run.trace[:at] == runs[0].trace[:at] for run in runs)
        other = experiment.episode(Eager(), variant, arm="never", trial=1)
        assert other.trace != runs[0].trace


def test_curves_follow_the_dependencies_and_not_the_labels(table):
    """Hide the input slot under the label goal and the other way round: the outcomes change places exactly."""
    swapped = OfficeOps(relabel={"goal": "input", "input": "goal"})
    moved = ForcedInjection(swapped, timings=TIMES, trials=3).run([Eager()])
    for agent, arm in itertools.product(moved.agents, ARMS):
        for label, slot in (("goal", "input"), ("input", "goal"), ("context", "context")):
            ours, theirs = moved.where(agent=agent, arm=arm, dimension=label), table.where(agent=agent, arm=arm, dimension=slot)
            np.testing.assert_array_equal(ours["passed"], theirs["passed"])
            np.testing.assert_array_equal(ours["actions"], theirs["actions"])


def test_disk_and_memory_give_the_same_episode():
    experiment = ForcedInjection(SUITE)
    for variant, agent in zip(SUITE.variants[1:80:26], (Eager(), Deferring(), Restart())):
        runs = [experiment.episode(agent, variant, fraction=0.5, backend=backend) for backend in ("memory", "disk")]
        assert runs[0] == runs[1]


# ---- messages, records, marks ----


def test_sham_message_says_nothing_new_and_is_as_long():
    for variant in SUITE.variants:
        message = sham_message(variant)
        assert len(message.split()) == len(variant.segment.split()) and message.split()[0] in variant.masked
        assert variant.segment not in message


def test_a_sham_costs_verification_and_brings_no_fact(table):
    sham, never = (table.where(agent="eager", arm=arm, **extra) for arm, extra in (("sham", {"fraction": 0.5}), ("never", {})))
    assert sham["passed"].mean() <= never["passed"].mean()
    np.testing.assert_array_equal(sham["actions"], never["actions"] + 1)


class _Endless(Eager):
    def next_call(self, observation):
        return Call("tables")


class _Idle(Eager):
    def next_call(self, observation):
        return None


@pytest.mark.parametrize("budget", [1.2, math.inf])
def test_an_agent_that_never_stops_is_bounded_and_recorded(budget):
    row = ForcedInjection(SUITE, budget=budget).row(_Endless("endless"), SUITE.variants[0], fraction=0.5)
    assert not row["stopped"] and row["actions"] == row["budget"] == budget_actions(budget, row["oracle_actions"]) and not row["passed"]


def test_an_agent_that_stops_at_once_never_gets_the_message():
    row = ForcedInjection(SUITE).row(_Idle("idle"), SUITE.variants[0], fraction=0.5)
    assert row["stopped"] and not row["delivered"] and not row["passed"] and row["actions"] == 0


def test_marks_tell_wrong_repeated_and_final_actions():
    experiment = ForcedInjection(OfficeOps(irreversible=1.0))
    run = experiment.episode(Eager(), experiment.suite.variants[2], fraction=0.9)
    assert len(run.marks) == len(run.trace) and run.marks[run.message_at] == "verify"
    late = ForcedInjection(FREE).episode(Eager(), FREE.variants[0], fraction=0.5)
    steps, wrong = plan(FREE.variants[0]), [i for i, mark in enumerate(late.marks) if mark == "wrong"]
    assert wrong == [i for i in range(late.message_at) if steps[i].depends]
    assert late.marks[late.message_at : late.message_at + len(wrong)] == ("redone",) * len(wrong)


def test_wasted_share_is_a_multiset_difference(table):
    run = ForcedInjection(FREE).episode(Eager(), FREE.variants[0], fraction=0.5)
    wanted = [step.call.key() for step in plan(FREE.variants[0])]
    extra = 0
    for call, _ in run.trace[: run.message_at]:
        if call.key() in wanted:
            wanted.remove(call.key())
        else:
            extra += 1
    assert run.row["wasted"] == pytest.approx(extra / run.message_at, abs=1e-5)
    assert (table.where(arm="oracle")["wasted"] == 0).all()


def test_rows_survive_the_file_of_results(tmp_path):
    experiment = ForcedInjection(OfficeOps(2), trials=1)
    direct = experiment.run([Eager()])
    once = experiment.run([Eager()], resume=tmp_path / "r.jsonl")
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    again = experiment.run([Eager()], resume=tmp_path / "r.jsonl")
    assert len(lines) == 1 + 8 and (tmp_path / "r.jsonl").read_text().splitlines() == lines
    for name, column in direct.columns.items():
        np.testing.assert_array_equal(column, once[name])
        np.testing.assert_array_equal(column, again[name])
    other = dataclasses.replace(experiment, budget=1.5).run([Eager()], resume=tmp_path / "r.jsonl")
    assert (other["budget"] > direct["budget"]).all()


def test_columns_survive_a_recording(table):
    back = Outcomes.from_arrays({f"x_{name}": values for name, values in table.arrays().items()}, "x_")
    for name, column in table.columns.items():
        np.testing.assert_array_equal(column, back[name])


# ---- commitment and its bound ----


def test_commitment_by_intervention_equals_the_declared_flow_of_data():
    rows = commitment(SUITE, [Eager()], timings=(0.3, 0.9))
    by = {(row["variant"], row["fraction"]): row for row in rows}
    for variant in SUITE.variants:
        steps = plan(variant)
        for f in (0.3, 0.9):
            declared = sum(step.depends for step in steps[: moment(f, len(steps))])
            assert by[variant.id, f]["oracle"] == pytest.approx(declared / len(steps))
            assert by[variant.id, f]["taken"] == pytest.approx(declared / moment(f, len(steps)))


def test_deferring_commits_no_earlier_than_eager():
    rows = commitment(SUITE, [Eager(), Deferring()], timings=LATE)
    value = {(row["agent"], row["variant"], row["fraction"]): row["oracle"] for row in rows}
    assert all(value["defer", v, f] <= value["eager", v, f] + 1e-12 for _, v, f in value)


def test_with_word_changes_only_the_answer():
    variant = SUITE.variants[1]
    other = with_word(variant, next(word for word in variant.options if word != variant.answer))
    assert other.masked == variant.masked and other.answer != variant.answer and other.segment in other.full
    with pytest.raises(InputError, match="hidden word"):
        with_word(variant, "nowhere")


def test_bound_compares_value_with_the_free_share(curve, table):
    rows = commitment(SUITE, [Eager()], timings=curve.timings)
    for row in curve.bound("eager", rows, denom="oracle"):
        mine = [r["oracle"] for r in rows if r["dimension"] == row["dimension"] and abs(r["fraction"] - row["fraction"]) < 1e-9]
        gain = curve.level("eager", row["dimension"])["gain"].estimate
        assert row["bound"] == pytest.approx(gain * (1 - np.mean(mine))) and row["slack"].estimate == pytest.approx(row["bound"] - row["voi"])


# ---- curves ----


def test_curve_is_the_mean_of_pass_at_k_over_variants(table, curve):
    counted = cells(table, "eager")
    score, mask = counted.score(3), counted.dimension == "input"
    row = curve.at("eager", "input", 0.5)
    success, never, oracle = (score[mask, counted.at(arm, f)].mean() for arm, f in (("inject", 0.5), ("never", math.nan), ("oracle", math.nan)))
    assert row["success"].estimate == pytest.approx(success) and row["voi"].estimate == pytest.approx(success - never)
    assert row["regret"].estimate == pytest.approx(oracle - success)
    assert row["normalised"].estimate == pytest.approx((success - never) / (oracle - never))


def test_intervals_are_those_of_the_shared_bootstrap(table):
    counted = cells(table, "defer")
    mask = counted.dimension == "context"
    difference = (counted.score(3)[:, counted.at("inject", 0.3)] - counted.score(3)[:, counted.at("never")])[mask]
    ours = demand_curve(table, k=3, n=2000, seed=4).at("defer", "context", 0.3)["voi"]
    theirs = bootstrap(difference, cluster=counted.template[mask], n=2000, seed=4)
    assert (ours.estimate, ours.low, ours.high) == pytest.approx((theirs.estimate, theirs.low, theirs.high))
    few = np.repeat(np.arange(6), 3)
    values = np.random.default_rng(0).random(18)
    ours = Resampling(few, n=2000, seed=1).interval(*Resampling(few, n=2000, seed=1).mean(values))
    theirs = bootstrap(values, cluster=few, n=2000, seed=1, method="expanded")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


def test_contrast_is_paired_over_templates(table):
    counted = cells(table, "eager")
    score, order = counted.score(3)[:, counted.at("inject", 0.3)], np.argsort(counted.template, kind="stable")
    goal, given = (score[order][counted.dimension[order] == d] for d in ("goal", "input"))
    ours = demand_curve(table, k=3, n=2000, seed=2).contrast("eager", "goal", "input", 0.3, "success")
    theirs = paired(goal, given, n=2000, seed=2)
    assert (ours.estimate, ours.low, ours.high) == pytest.approx((theirs.estimate, theirs.low, theirs.high))


def test_zero_and_one_of_the_curve_are_oracle_and_never(curve):
    for agent, dimension in itertools.product(curve.agents, curve.dimensions):
        assert curve.at(agent, dimension, 0.0)["regret"].estimate == pytest.approx(0, abs=1e-12)
        assert curve.at(agent, dimension, 1.0)["voi"].estimate == pytest.approx(0, abs=1e-12)
        assert 0.0 in curve.window(agent, dimension)


def test_value_against_sham_leaves_out_the_cost_of_being_told(table, curve):
    against = demand_curve(table, k=3, n=200, against="sham")
    counted = cells(table, "eager")
    mask, score = counted.dimension == "goal", counted.score(3)
    want = (score[:, counted.at("inject", 0.9)] - score[:, counted.at("sham", 0.9)])[mask].mean()
    assert against.at("eager", "goal", 0.9)["voi"].estimate == pytest.approx(want)


def test_wasted_compute_and_its_trend(table):
    rows = {(row["agent"], row["fraction"]): row for row in wasted_compute(table, n=500)}
    matrix = wasted_matrix(table, "eager")
    for i, f in enumerate(table.timings):
        assert rows["eager", f]["wasted"].estimate == pytest.approx(matrix[:, i].mean(), abs=1e-6)
        assert rows["eager", f]["excess"].estimate == pytest.approx(matrix[:, i].mean(), abs=1e-6)


# ---- ranks ----


def test_page_trend_agrees_with_scipy():
    rng = np.random.default_rng(3)
    values = rng.integers(0, 4, (30, 5)) + 0.3 * np.arange(5)
    ours, theirs = page_trend(values), stats.page_trend_test(values, method="asymptotic")
    assert ours.statistic == pytest.approx(theirs.statistic) and ours.p == pytest.approx(theirs.pvalue, rel=1e-6)
    assert page_trend(values[:, ::-1]).p > 0.5


def test_spearman_agrees_with_scipy():
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 5, 60), rng.integers(0, 9, 60)
    assert spearman(x, y, n=200).estimate == pytest.approx(stats.spearmanr(x, y).statistic)
    with pytest.raises(InputError, match="constant"):
        spearman([1, 1, 1], [1, 2, 3])


def test_holm_agrees_with_its_definition():
    p = [0.001, 0.04, 0.03, 0.2, 0.012]
    assert holm(p) == pytest.approx([0.005, 0.09, 0.09, 0.2, 0.048])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_sign_flip_is_exact_in_the_limit():
    values = np.array([1.0, 0.5, 0.75, -0.25, 1.0, 0.5])
    signs = np.array(list(itertools.product([-1, 1], repeat=6)))
    exact = (np.abs(signs @ values) >= values.sum() - 1e-12).mean()
    assert sign_flip(values, np.arange(6), n=20000) == pytest.approx(exact, abs=0.01)


def test_panel_of_agents_that_are_one_agent(table):
    twin = Outcomes.concat([table.where(agent="eager"), Outcomes({**table.where(agent="eager").columns, "agent": np.full(84 * 3 * 12, "twin")})])
    for form in ("cells", "centred", "gain"):
        (pair,) = kendall_panel(twin, form=form, n_perm=199, n_boot=100)
        assert pair.tau.estimate == pytest.approx(1) and pair.p == pytest.approx(1 / 200)
    (pair,) = kendall_panel(twin, form="profile", n_boot=100)
    (fewer,) = kendall_panel(twin, form="profile", coverage=0.4, n_boot=100)
    assert pair.tau.estimate == pytest.approx(1) and fewer.tau.estimate < 1


def test_panel_tau_is_that_of_the_cells(table):
    pair = next(p for p in kendall_panel(table, n_perm=99, n_boot=100) if (p.a, p.b) == ("eager", "learned"))
    shares = [cells(table.where(table["arm"] != "sham"), agent) for agent in ("eager", "learned")]
    want = stats.kendalltau(*[(one.c / one.n).ravel() for one in shares]).statistic
    assert pair.tau.estimate == pytest.approx(want) and pair.tau.low <= want <= pair.tau.high


def test_permutation_within_dimension_finds_nothing_where_only_dimensions_matter(table):
    """Two agents whose outcomes depend on the dimension alone, with noise of their own, agree; the permutation sees no more than that."""
    rng = np.random.default_rng(8)
    part = table.where(agent="eager")
    level = np.array([{"goal": 0.2, "input": 0.6, "constraint": 0.8, "context": 0.4}[d] for d in part["dimension"]])
    sides = [Outcomes({**part.columns, "agent": np.full(len(part), name), "passed": rng.random(len(part)) < level}) for name in "ab"]
    (pair,) = kendall_panel(Outcomes.concat(sides), n_perm=499, n_boot=100)
    assert pair.tau.low > 0.05 and pair.p > 0.02


# ---- policies ----


def test_myopic_policy_asks_where_the_curve_says(curve, table):
    policy = AskPolicy(curve, cost=0.02, agent="eager").fit(table)
    voi = curve.array("eager", "goal")[:, 0]
    assert policy.predict(State("goal", 0.0)) == "ask" and policy.predict(State("goal", 1.0)) == "act"
    assert policy.value("goal", 0.4) == pytest.approx((voi[1] + voi[2]) / 2)
    assert AskPolicy(curve, cost=1.01).fit().predict(State("goal", 0.0)) == "act"
    assert policy.value(None, 0.3) == pytest.approx(np.mean([policy.value(d, 0.3) for d in curve.dimensions]))


def test_sessions_with_and_without_an_answer(curve, table):
    experiment = ForcedInjection(SUITE, trials=3)
    policies = [NeverAsk(), EntropyPolicy(0.5), AskPolicy(curve, agent="eager").fit(table)]
    rows = sessions(experiment, Eager(), policies, tasks=60)
    assert len(rows) == 180 and len({row["task"] for row in rows}) == 60
    by = {name: [row for row in rows if row["policy"] == name] for name in ("never", "entropy", "voi")}
    assert not any(row["asked"] for row in by["never"]) and all(row["asked"] for row in by["entropy"])
    for row in by["entropy"]:
        steps = plan(next(v for v in SUITE.variants if v.id == row["variant"]))
        assert row["position"] == pytest.approx(next(i for i, step in enumerate(steps) if step.fields) / len(steps))
    silent = sessions(experiment, Eager(), policies[:2], tasks=60, answer=False)
    never = [row["passed"] for row in silent if row["policy"] == "never"]
    assert never == [row["passed"] for row in by["never"]]
    assert all(n >= e for n, e in zip(never, (row["passed"] for row in silent if row["policy"] == "entropy")))
    summary = {row["policy"]: row for row in ask_summary(rows, curve, "eager")}
    assert summary["never"]["asked"].estimate == 0 and math.isnan(summary["never"]["mean"]) and summary["entropy"]["asked"].estimate == 1
    assert window_contrast(rows, curve, "eager", "never", "voi").estimate < 0


# ---- recordings ----


@pytest.fixture(scope="module")
def grid():
    return Grid(nbkit.load_recording("clarify-grid").data)


@pytest.mark.parametrize("name", ["eager", "defer", "restart", "learned"])
def test_recorded_outcomes_are_those_of_the_present_office(grid, learned, name):
    agent = {"eager": Eager(), "defer": Deferring(), "restart": Restart(), "learned": learned}[name]
    experiment, variants = ForcedInjection(SUITE, trials=5), {variant.id: variant for variant in SUITE.variants[::4 if name == "learned" else 1]}
    for arm, fraction, trial in (("inject", 0.5, 0), ("never", math.nan, 4), ("sham", 0.9, 2)):
        part = grid.table.where(agent=name, arm=arm, trial=trial, **({} if arm == "never" else {"fraction": fraction}))
        rows = [row for row in part.rows if row["variant"] in variants]
        assert len(rows) == len(variants)
        for row in rows:
            live = experiment.row(agent, variants[row["variant"]], arm=arm, fraction=0.0 if arm == "never" else fraction, trial=trial)
            assert all(row[key] == live[key] for key in ("passed", "actions", "delivered", "irreversible", "stopped", "oracle_actions", "budget"))


def test_swept_settings_contain_the_main_experiment(grid):
    counted = cells(grid.table, "eager")
    for arm, fraction, name in (("never", math.nan, "never"), ("inject", 0.9, "inj-0.9"), ("oracle", math.nan, "oracle")):
        np.testing.assert_allclose(grid.sweep("eager")[name], counted.score(3)[:, counted.at(arm, fraction)])
    score = counted.score(3)[:, counted.at("inject", 0.9)] - counted.score(3)[:, counted.at("never")]
    assert grid.sweep_difference("eager", "inj-0.9", "never", n=200).estimate == pytest.approx(score.mean())
    goal = grid.sweep_difference("eager", "inj-0.9", "never", dimension="goal", n=200)
    assert goal.estimate == pytest.approx(score[counted.dimension == "goal"].mean())


def test_recorded_commitment_and_sessions_have_their_columns(grid):
    live = commitment(OfficeOps(2), [Eager()], timings=(0.0, 0.5))
    known = {(row["variant"], row["fraction"]): row for row in grid.commitment if row["agent"] == "eager"}
    assert all(known[row["variant"], row["fraction"]] == pytest.approx(row) for row in live)
    assert len(grid.sessions()) == len(grid.sessions(answer=False)) == 300


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda g: g.sweep("nobody"), "sweep"),
        (lambda g: g.sweep("eager", budget=1.23), "sweep"),
        (lambda g: g.sweep_difference("eager", "inj-0.2", "never"), "difference"),
        (lambda g: g.sweep_difference("eager", "inj-0.9", "never", dimension="mood"), "difference"),
        (lambda g: g.choices(), "choice_row"),
    ],
)
def test_parts_that_were_not_recorded(grid, call, message):
    with pytest.raises(InputError, match=message):
        call(grid)


# ---- wrong input ----


@pytest.mark.parametrize("fraction", [-0.1, 1.01, math.nan])
def test_an_injection_outside_the_run_is_refused(fraction):
    with pytest.raises(InputError, match="0 to 1"):
        ForcedInjection(SUITE, timings=(0.5, fraction))
    with pytest.raises(InputError, match="0 to 1"):
        ForcedInjection(SUITE).row(Eager(), SUITE.variants[0], fraction=fraction)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: ForcedInjection(SUITE, trials=0), "trials"),
        (lambda: ForcedInjection(SUITE, budget=0.9), "budget"),
        (lambda: ForcedInjection(SUITE, budget=math.nan), "budget"),
        (lambda: ForcedInjection(SUITE).run([]), "agents"),
        (lambda: ForcedInjection(SUITE).run([Eager(), Eager()]), "name of its own"),
        (lambda: ForcedInjection(SUITE).row(Eager(), SUITE.variants[0], arm="late"), "arm"),
        (lambda: ForcedInjection(SUITE).episode(Eager(), SUITE.variants[0], arm="late"), "arm"),
        (lambda: OfficeOps(dims=("goal", "mood")), "mood"),
        (lambda: EntropyPolicy(1.5), "theta"),
        (lambda: Outcomes({}), "columns"),
        (lambda: Outcomes.from_rows([]), "at least one"),
        (lambda: page_trend(np.ones((3, 2))), "3 columns"),
        (lambda: tau_b([1, 2], [1, 2, 3]), "same number"),
        (lambda: Resampling(np.zeros(3)), "clusters"),
    ],
)
def test_wrong_settings_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda t, c: demand_curve(t, k=9), "pass@k"),
        (lambda t, c: demand_curve(t, against="nothing"), "against"),
        (lambda t, c: demand_curve(t, cluster="agent"), "cluster"),
        (lambda t, c: demand_curve(t.where(arm=("oracle", "never"))), "injected"),
        (lambda t, c: demand_curve(t.where(arm=("inject", "never"))), "condition"),
        (lambda t, c: demand_curve(t.where(t["arm"] != "sham"), against="sham"), "condition"),
        (lambda t, c: cells(t, "nobody"), "agent"),
        (lambda t, c: t.where(agent="nobody"), "rows"),
        (lambda t, c: t["mood"], "column"),
        (lambda t, c: kendall_panel(t, form="means"), "form"),
        (lambda t, c: kendall_panel(t, coverage=0.5), "coverage"),
        (lambda t, c: kendall_panel(t.where(agent="eager")), "agents"),
        (lambda t, c: c.at("eager", "mood", 0.5), "point"),
        (lambda t, c: c.level("nobody", "goal"), "curve"),
        (lambda t, c: AskPolicy(c, cost=-1), "cost"),
        (lambda t, c: AskPolicy(c, agent="nobody"), "agent"),
        (lambda t, c: AskPolicy(c).predict(State("goal", 0.1)), "not fitted"),
        (lambda t, c: AskPolicy(c).fit().predict(State("mood", 0.1)), "dimension"),
        (lambda t, c: sessions(ForcedInjection(SUITE, trials=1), Eager(), [NeverAsk()], tasks=85), "tasks"),
        (lambda t, c: window_contrast([], c, "eager", "a", "b"), "sessions"),
    ],
)
def test_wrong_questions_are_refused(table, curve, call, message):
    with pytest.raises(InputError, match=message):
        call(table, curve)
