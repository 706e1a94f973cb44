"""What the notebook of clarification_timing shows and compares: live curves, replays of recorded choices, contrasts behind the verdicts."""

import hashlib
import math

import numpy as np
import plotly.graph_objects as go
import pytest

from nbkit.agents import Deferring, Eager, HFChoiceAgent, Restart
from nbkit.agents.choice import Choice
from nbkit.envs.office import DIMENSIONS, OfficeOps
from nbkit.errors import InputError
from nbkit.methods import clarification_timing as ct
from nbkit.methods.clarification_timing import explore, report

SUITE = OfficeOps(n_templates=6)
EXPERIMENT = ct.ForcedInjection(SUITE, timings=ct.TIMES, trials=3)


class Reader(HFChoiceAgent):
    """Stands for a language model: scores drawn from what was seen, higher for a word that a text has stated."""

    def __init__(self):
        super().__init__(None, report._NoTokenizer(), name="reader")

    def choice(self):
        text = "\n".join([self._head, *self.lines, self._frame])
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))
        score = rng.normal(size=self.variant.k)
        score[self.variant.truth] += 3 * (self.variant.segment in text)
        return Choice(self.variant.options, score, score, None, np.ones(self.variant.k))


@pytest.fixture(scope="module")
def table():
    return EXPERIMENT.run([Eager(), Deferring()])


@pytest.fixture(scope="module")
def commitment():
    return ct.commitment(SUITE, [Eager(), Deferring(), Restart()], timings=ct.TIMES)


@pytest.fixture(scope="module")
def reader():
    """A recording of `Reader` in the form of clarify-smollm2, for the first two jobs."""
    suite = OfficeOps(n_templates=2)
    experiment = ct.ForcedInjection(suite, timings=ct.TIMES, trials=3, sham=False)
    rows, choices, agent = [], [], Reader()
    for variant in suite.variants:
        for trial in range(3):
            for arm, f in experiment.conditions:
                row = experiment.row(agent, variant, arm=arm, fraction=f, trial=trial)
                choices += [(len(rows), at, choice.entropy(), choice.pick()) for at, choice in agent.choices]
                rows.append(row)
    data = {f"grid_{name}": values for name, values in ct.Outcomes.from_rows(rows).arrays().items()}
    data |= {f"choice_{name}": np.array(values) for name, values in zip(("row", "at", "entropy", "option"), zip(*choices))}
    return ct.Grid(data)


def made_up_grid():
    """Two settings; pass counts equal to the number of the setting."""
    suite = OfficeOps()
    variants = suite.variants
    base = ct.ForcedInjection(OfficeOps(n_templates=1), timings=(0.5,), trials=3, sham=False).run([Eager()])
    fractions = [-1.0, -1.0, *ct.TIMES]
    counts = np.stack([np.full((1, len(variants), len(fractions)), c) for c in (1, 3)]).astype(np.int8)
    data = {f"grid_{name}": values for name, values in base.arrays().items()}
    return ct.Grid(data | {
        "sweep_c": counts, "sweep_agents": np.array(["learned"]), "sweep_dimension": np.array([v.dimension for v in variants]),
        "sweep_template": np.array([v.template for v in variants]), "sweep_arms": np.array(["oracle", "never", *["inject"] * 5]),
        "sweep_fractions": np.array(fractions), "sweep_budget": np.array([1.0, 1.6]), "sweep_reverify": np.array([0.0, 0.0]),
        "sweep_irreversible": np.array([0.2, 0.2]),
    })


# ---- the paper's numbers ----


def test_paper_numbers_give_the_normalised_decay_that_the_text_quotes():
    # MCP-Atlas, pass@3: never, then told at 10, 30 and 50 %.
    goal, input_ = (0.40, 0.78, 0.50, 0.44), (0.33, 0.46, 0.36, 0.36)
    kept = [[round((x - never) / (first - never), 2) for x in rest] for never, first, *rest in (goal, input_)]
    assert kept == [[0.26, 0.11], [0.23, 0.23]]
    assert list(ct.PAPER) == [f"C{i}" for i in range(1, 8)]
    assert ".78/.50/.44" in ct.PAPER["C1"]["paper"] and ".46/.36/.36" in ct.PAPER["C1"]["paper"]


# ---- commitment and comparisons ----


@pytest.mark.parametrize("agent", ["eager", "defer", "restart"])
def test_declared_commitment_is_what_interventions_measure(commitment, agent):
    for variant in SUITE.variants:
        measured = [row["taken"] for row in commitment if row["variant"] == variant.id and row["agent"] == agent]
        np.testing.assert_allclose(ct.declared_commitment(variant, agent, np.array(ct.TIMES)), measured, atol=1e-12)


def test_loss_by_commitment_reads_both_at_one_time(table, commitment):
    value, committed, loss = ct.loss_by_commitment(table, commitment, "eager")
    counted = ct.cells(table, "eager")
    for i, name in enumerate(counted.variants.tolist()):
        (row,) = (r for r in commitment if r["variant"] == name and r["agent"] == "eager" and r["fraction"] == 0.5)
        assert committed[i] == row["taken"]
    score = counted.score(3)
    np.testing.assert_array_equal(loss, score[:, counted.at("oracle")] - score[:, counted.at("inject", 0.5)])
    from scipy.stats import spearmanr

    assert value.estimate == pytest.approx(spearmanr(committed, loss).statistic, abs=1e-9)
    assert value.low <= value.estimate <= value.high


def test_waste_contrast_is_the_difference_of_the_means(table):
    mean = {row["agent"]: row["wasted"].estimate for row in ct.wasted_compute(table, n=50) if abs(row["fraction"] - 0.7) < 1e-6}
    contrast = ct.waste_contrast(table, "defer", "eager", 0.7)
    assert contrast.estimate == pytest.approx(mean["defer"] - mean["eager"], abs=1e-6)
    same = ct.waste_contrast(table, "eager", "eager", 0.7)
    assert (same.low, same.estimate, same.high) == (0, 0, 0)


def test_as_in_paper_keeps_seven_conditions():
    full = ct.ForcedInjection(OfficeOps(n_templates=2), trials=1).run([Eager()])
    assert len(full) == 8 * (2 + 7 + 7)
    kept = ct.as_in_paper(full)
    assert len(kept) == 8 * 7 and set(kept["arm"].tolist()) == {"oracle", "never", "inject"} and kept.timings == ct.TIMES


# ---- live curves ----


@pytest.mark.parametrize(("agent", "make"), [("eager", Eager), ("defer", Deferring)])
def test_live_curve_equals_the_experiment(agent, make):
    view = ct.demand_view(agent, "input", 0.3, trials=3, options=4)
    suite = OfficeOps(dims=("input",), options=4)
    curve = ct.demand_curve(ct.ForcedInjection(suite, timings=ct.TIMES, trials=3).run([make()]), k=3, n=50)
    np.testing.assert_allclose(view["curve"], curve.array(agent, "input", "success")[:, 0])
    level = curve.level(agent, "input")
    assert (view["oracle"], view["never"]) == pytest.approx((level["oracle"].estimate, level["never"].estimate))
    against = ct.demand_curve(ct.ForcedInjection(suite, timings=explore.SHAM_TIMES, trials=3).run([make()]), k=3, n=50, against="sham")
    sham = [against.at(agent, "input", f)["success"].estimate - against.at(agent, "input", f)["voi"].estimate for f in explore.SHAM_TIMES]
    np.testing.assert_allclose(view["sham"], sham)
    assert np.all((view["low"] <= view["curve"]) & (view["curve"] <= view["high"]))


def test_view_is_a_pure_function_and_k_is_monotone():
    arguments = {"budget": 1.4, "jobs": 5, "trials": 5, "job": 3}
    first = ct.demand_view("eager", "context", 0.4, **arguments)
    explore._counts.cache_clear()
    again = ct.demand_view("eager", "context", 0.4, **arguments)
    assert all(np.array_equal(first[name], again[name]) for name in ("curve", "low", "high", "sham", "bound")) and first["rows"] == again["rows"]
    curves = [ct.demand_view("eager", "context", 0.4, k=k, **arguments)["curve"] for k in (1, 3, 5)]
    assert np.all(curves[0] <= curves[1] + 1e-12) and np.all(curves[1] <= curves[2] + 1e-12)


def test_runs_of_the_view_are_episodes_of_the_experiment():
    view = ct.demand_view("eager", "goal", 0.3, jobs=2, trials=3, job=4)
    experiment = ct.ForcedInjection(OfficeOps(dims=("goal",), options=6), timings=ct.TIMES)
    run = experiment.episode(Eager(), experiment.suite.variants[4], fraction=0.3)
    *_, (name, marks) = view["rows"].items()
    assert name == f"told at 30 %: {'done' if run.row['passed'] else 'failed'}"
    assert marks == list(run.marks) and view["message"] == run.message_at
    assert math.isnan(ct.demand_view("eager", "goal", 1.0, jobs=2, trials=3)["message"]), "after the last action nothing can be told"
    assert ct.demand_view("eager", "goal", 0.0, jobs=2, trials=3)["message"] == 0


def test_figure_has_one_form_and_shows_every_action():
    forms = set()
    for agent, f, job in (("eager", 0.3, 0), ("defer", 1.0, 7), ("restart", 0.0, 20)):
        view = ct.demand_view(agent, "constraint", f, jobs=2, trials=3, job=job)
        figure = go.Figure(ct.draw_demand(view))
        forms.add(tuple((trace.type, trace.name) for trace in figure.data))
        shown = sum(len(trace.x) for trace in figure.data if trace.name in {label for label, _, _ in ct.MARKS.values()})
        assert shown == sum(len(marks) for marks in view["rows"].values())
        assert f"{view['curve'][2]:.2f} at 0.5" in ct.describe_demand(view)
    assert len(forms) == 1


@pytest.mark.parametrize(("arguments", "what"), [
    (("eager", "mood", 0.3), "dimension"), (("oracle", "goal", 0.3), "agent"), (("eager", "goal", 1.2), "time of the injection"),
])
def test_views_refuse_what_does_not_exist(arguments, what):
    with pytest.raises(InputError, match=what):
        ct.demand_view(*arguments, jobs=2, trials=3)


def test_views_refuse_numbers_out_of_range():
    with pytest.raises(InputError, match="jobs"):
        ct.demand_view("eager", "goal", 0.3, jobs=1)
    with pytest.raises(InputError, match="job"):
        ct.demand_view("eager", "goal", 0.3, jobs=2, trials=3, job=21)
    with pytest.raises(InputError, match="agent"):
        ct.live_agent("smollm2")


# ---- recorded agents ----


def test_replay_repeats_every_recorded_episode(reader):
    model = ct.ReplayedModel(reader, {"trials": 3, "budget": 1.2})
    by_id = {v.id: v for v in OfficeOps(n_templates=2).variants}
    names = ("passed", "actions", "delivered", "absorbed", "wasted", "oracle_actions", "stopped")
    for row in reader.table.rows[::3]:
        run = model.replay(by_id[row["variant"]], row["arm"], 0.5 if math.isnan(row["fraction"]) else row["fraction"], row["trial"])
        assert all(run.row[name] == pytest.approx(row[name], abs=1e-4) for name in names)


def test_replayed_model_in_a_view(reader):
    model = ct.ReplayedModel(reader, {"trials": 3, "budget": 1.2})
    view = ct.demand_view("reader", "goal", 0.42, k=5, budget=2.0, job=1, recorded={"reader": model})
    counted = ct.cells(reader.table.where(dimension="goal"), "reader")
    assert view["k"] == 3, "there are three trials"
    np.testing.assert_allclose(view["curve"], [counted.score(3)[:, counted.at("inject", f)].mean() for f in ct.TIMES])
    assert "budget 1.2" in view["played"] and view["sham"].size == 0
    told = list(view["rows"].values())[-1]
    assert told == list(model.replay(model.experiment("goal").suite.variants[1], "inject", 0.5).marks), "the nearest recorded time"


def test_replay_refuses_what_was_not_recorded(reader):
    model = ct.ReplayedModel(reader, {"trials": 3, "budget": 1.2})
    with pytest.raises(InputError, match="recorded episode"):
        model.place(SUITE.variants[0].id, "inject", 0.2)
    with pytest.raises(InputError, match="recorded choices"):
        EXPERIMENT.episode(ct.RecordedChoices([0]), SUITE.variants[0], fraction=0.5)


def test_swept_agent_reads_the_nearest_setting():
    swept = ct.SweptAgent(made_up_grid())
    assert swept.nearest(budget=1.2, reverify=3, irreversible=0.0)["budget"] == 1.0
    assert swept.nearest(budget=1.5, reverify=0, irreversible=0.2)["budget"] == 1.6
    score, k, experiment = swept.scores("input", 5, budget=2.0, reverify=1, irreversible=0.2)
    assert score.shape == (21, 7) and np.all(score == 1.0) and k == 3 and experiment.budget == 1.6


def test_grid_names_what_it_lacks():
    grid = made_up_grid()
    with pytest.raises(InputError, match="cell of the sweep"):
        grid.sweep("learned", budget=1.3)
    with pytest.raises(InputError, match="difference"):
        grid.sweep_difference("learned", "inj-0.2", "never", budget=1.0, reverify=0)
    with pytest.raises(InputError, match="part of the recording"):
        grid.choices()
    with pytest.raises(InputError, match="part of the recording"):
        grid.commitment  # noqa: B018
    same = grid.sweep_difference("learned", "inj-0.9", "never", budget=1.0, reverify=0)
    assert (same.low, same.estimate, same.high) == (0, 0, 0)


def test_absorption_and_entropy_sessions_count_recorded_choices(reader):
    absorbed = reader.absorption()
    for dimension in DIMENSIONS:
        rows = [row for row in reader.table.rows if row["dimension"] == dimension and row["absorbed"] >= 0]
        assert absorbed[dimension] == (sum(row["absorbed"] for row in rows), len(rows))
    sessions = reader.entropy_sessions(0.0)
    assert len(sessions) == 8 * 3 and all(row["asked"] for row in sessions), "every choice has some entropy"
    first = {(c["variant"], c["trial"]): c["at"] / c["oracle_actions"] for c in reversed(reader.choices()) if c["arm"] == "never"}
    assert sorted(row["position"] for row in sessions) == sorted(first.values())
    assert not any(row["asked"] for row in reader.entropy_sessions(1.0))


# ---- asking ----


@pytest.fixture(scope="module")
def curve(table):
    return ct.demand_curve(table, k=3, n=200)


def test_ask_view_follows_the_policy(curve):
    view = ct.ask_view(curve, "eager", "goal", 0.02, 0.5)
    policy = ct.AskPolicy(curve, cost=0.02, agent="eager").fit()
    asks = [policy.predict(ct.State("goal", float(t))) == "ask" for t in view["grid"]]
    assert (view["decision"] == 2).tolist() == asks
    assert view["voi"][0] == pytest.approx(curve.array("eager", "goal")[0, 0])
    assert set(view["grid"][view["inside"]].round(6)) >= set(curve.window("eager", "goal"))
    dear = ct.ask_view(curve, "eager", "goal", 1.0, 0.5)
    assert not (dear["decision"] == 2).any() and dear["never"]["voi policy"] == 1.0
    assert all(shares.sum() == pytest.approx(1 - view["never"][name]) for name, shares in view["first"].items())


def test_a_scripted_agent_is_unsure_at_its_first_open_word(curve):
    view = ct.ask_view(curve, "eager", "input", 0.02, 0.5)
    asked = ct.sessions(ct.ForcedInjection(OfficeOps(dims=("input",)), timings=(0.5,), trials=1), Eager(), [ct.EntropyPolicy(0.5)], tasks=21)
    expected = np.histogram([row["position"] for row in asked], np.linspace(0, 1, 21))[0] / 21
    np.testing.assert_allclose(view["first"]["entropy policy"], expected)
    assert ct.ask_view(curve, "eager", "input", 0.02, 1.0)["never"]["entropy policy"] == 1.0


def test_ask_figure_has_one_form(curve, reader):
    forms = set()
    for cost, theta in ((0.0, 0.0), (0.3, 0.5), (1.0, 1.0)):
        view = ct.ask_view(curve, "defer", "constraint", cost, theta, model=reader)
        forms.add(tuple((trace.type, trace.name) for trace in go.Figure(ct.draw_ask(view)).data))
        assert f"cost of {cost:.2f}" in ct.describe_ask(view)
    assert len(forms) == 1


def test_ask_view_refuses_wrong_inputs(curve):
    with pytest.raises(InputError, match="theta"):
        ct.ask_view(curve, "eager", "goal", 0.1, 1.5)
    with pytest.raises(InputError, match="cost"):
        ct.ask_view(curve, "eager", "goal", -0.1, 0.5)
    with pytest.raises(InputError, match="agent"):
        ct.ask_view(curve, "nobody", "goal", 0.1, 0.5)
