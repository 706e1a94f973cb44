"""What the notebook attention_drift reads and draws: lookups, two-way intervals, the panel's view of a chain."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from nbkit.errors import InputError
from nbkit.methods import attention_drift as drift
from nbkit.methods.attention_drift import evaluate, explore
from nbkit.methods.attention_drift import grid as reading
from nbkit.metrics import bootstrap
from nbkit.models import letters
from nbkit.widgets.panel import trace_problem

CELLS = [
    {"variant": "pre", "ttt": 2, "seed": seed, "tau": [1.0 + seed, None, 3.0], "noise": {"hidden": {"0.5": [0.5, 0.5]}},
     "drift": {"sink": [[0.5, 0.1]] * 3}}
    for seed in (0, 1)
] + [{"variant": "post", "ttt": 2, "seed": 1, "tau": [2.0, 2.0, 2.0]}]


@pytest.fixture(scope="module")
def grid():
    return reading.Grid({"cells": CELLS})


def test_claims_of_the_paper_and_criteria_name_the_same():
    assert set(drift.PAPER) == set(evaluate.CRITERIA) == {f"C{i}" for i in range(1, 15)}
    assert all(set(entry) == {"statement", "paper"} and all(entry.values()) for entry in drift.PAPER.values())


def test_grid_looks_up_cells_seeds_and_nested_measurements(grid):
    assert grid("tau", "pre", 2).shape == (2, 3) and np.isnan(grid("tau", "pre", 2)[0, 1])
    assert grid("drift.sink", "pre", 2).shape == (2, 3, 2)
    assert grid.seeds(("pre", 2), ("post", 2)) == [1]
    ours, theirs = grid.pair("tau", ("pre", 2), ("post", 2))
    assert ours[0, 0] == 2.0 and theirs[0, 0] == 2.0
    assert ("pre", 2) in grid and ("gate", 2) not in grid
    assert grid.noise("pre", 2, "hidden", [0.5]).shape == (2, 2, 2)


@pytest.mark.parametrize("call", [
    lambda g: g("tau", "gate", 2), lambda g: g("tauu", "pre", 2), lambda g: g("drift.sunk", "pre", 2), lambda g: g("tau.more", "pre", 2),
    lambda g: g.cell("post", 2, 0), lambda g: reading.Grid({"cells": [CELLS[0], CELLS[2]]}).seeds(("pre", 2), ("post", 2)),
], ids=["cell", "measurement", "nested", "too deep", "seed", "no common seed"])
def test_what_was_not_measured_is_refused(grid, call):
    with pytest.raises(InputError):
        call(grid)


def test_two_way_adds_both_kinds_of_chance():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 1)) + rng.normal(size=(1, 40)) + 3
    both = reading.two_way(values)
    prompts = bootstrap(values.mean(0))
    seeds = bootstrap(values.mean(1), method="expanded")
    assert both.estimate == pytest.approx(values.mean())
    assert both.high - both.estimate == pytest.approx(np.hypot(prompts.high - prompts.estimate, seeds.high - seeds.estimate))
    assert both.low < min(prompts.low, seeds.low) and both.n == 5


def test_two_way_of_one_seed_is_the_bootstrap_over_measured_prompts():
    values = np.arange(30.0)[None]
    values[0, 3] = np.nan
    got, want = reading.two_way(values), bootstrap(np.delete(values[0], 3))
    assert (got.low, got.high, got.n) == (want.low, want.high, 29)
    few = reading.two_way(np.arange(8.0)[None], cluster=[0, 0, 1, 1, 2, 2, 3, 3])
    assert few.n == 4 and "expanded" in few.method
    with pytest.raises(InputError):
        reading.two_way(np.zeros(4))


def test_statistics_have_their_closed_forms():
    assert reading.step_slope(0.5 * np.arange(12) + 3).item() == pytest.approx(0.5)
    rows = np.array([[2.0, 1.0, 4.0, 1.0]])
    assert reading.relative_change(rows[:, :2]) == -0.5
    assert reading.ratio_of_ratios(rows) == pytest.approx(0.5)
    assert reading.change_gap(rows) == pytest.approx(-0.5 + 0.75)
    assert reading.steepness(np.array([[-2.0, 1.0]])) == 1.0
    with pytest.raises(InputError):
        reading.step_slope(np.ones((2, 3)), first=3)


@pytest.fixture(scope="module")
def material():
    """An untrained target over letters, two drafters, and texts with the target's states."""
    model = letters.build(0, dim=32, heads=4, kv_heads=2).eval()
    tokens = torch.randint(1, letters.VOCAB, (2, 60), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = letters.BOS
    found = drift.target_features(model, tokens)
    drafters = {
        name: drift.EagleDrafter(drift.DrafterConfig.from_target(model, norm_output=name == "post"), model, seed=0) for name in ("pre", "post")
    }
    rows = (tokens, found.aux, found.last, found.logits.argmax(-1))
    return model, drafters, rows


def word(token: int) -> str:
    return letters.decode([token])


def test_view_agrees_with_the_chain_and_its_control(material):
    model, drafters, rows = material
    texts = explore.Texts(*rows, at=40, words=word, model=model)
    view = explore.chain_view(texts, drafters["pre"], 1, 6, drift.Intervention(), step=4)
    chain = drift.draft_chain(drafters["pre"], rows[0][1:, :40], rows[1][1:], 6)
    assert np.allclose(view["rms"], chain.rms[0]) and np.allclose(view["chain"], chain.chain[0], atol=1e-6)
    assert np.allclose(view["weights"], chain.attention[3][0].mean(0), atol=1e-6) and len(view["letters"]) == len(view["kind"]) == 39 + 3
    # Step 1 reads a true state, so it is its own control.
    for name, _ in explore.PARTS:
        assert view[name][0] == pytest.approx(view["control_" + name][0], abs=1e-5)
    for prefix in ("", "control_"):
        assert np.allclose(sum(view[prefix + name] for name, _ in explore.PARTS), 1, atol=1e-5)
    assert view["accepted"] == int(view["correct"].cumprod().sum()) and (view["kind"] == 3).sum() == 4
    # The target's choice, by the plain pass over prompt and drafts.
    read = torch.cat([rows[0][1:, :40], chain.fed[:, 1:]], 1)
    best = model(read).logits[0, 39:].argmax(-1)
    assert [explore._visible(word(int(t))) for t in best] == view["wanted"]


def test_heads_average_to_the_mean(material):
    model, drafters, rows = material
    texts = explore.Texts(*rows, at=40, words=word, model=model)
    views = [explore.chain_view(texts, drafters["post"], 0, 5, drift.Intervention(), head=h) for h in (None, 0, 1, 2, 3)]
    assert np.allclose(views[0]["chain"], np.mean([v["chain"] for v in views[1:]], 0), atol=1e-6)


def test_chains_that_read_the_answer_are_judged_by_it(material):
    _, drafters, rows = material
    texts = explore.Texts(*rows, at=40, words=word, depth=12)
    view = explore.chain_view(texts, drafters["post"], 0, 12, drift.Intervention(), live_accuracy=False)
    assert view["wanted"] == [explore._visible(word(int(t))) for t in rows[0][0, 40:52]] and not view["accuracy"].size


def test_accuracy_is_that_of_the_measurements(material):
    model, drafters, rows = material
    texts = explore.Texts(*rows, at=40, words=word, model=model)
    got, starts = texts.accuracy(drafters["pre"], 0, drift.Intervention(), every=1)
    want = evaluate.forced_steps(drafters["pre"], rows[0][:1], rows[1][:1], rows[3][:1], first=20, depth=16)["accuracy"][0]
    assert starts == 60 - 17 - 20 and np.allclose(got, want, atol=1e-6)


def test_every_setting_draws_the_same_traces(material):
    model, drafters, rows = material
    texts = explore.Texts(*rows, at=40, words=word, model=model)
    kinds = set()
    for depth, step, head, window in ((1, 1, None, None), (16, 16, 2, 8), (5, 16, 0, None)):
        what = drift.Intervention(window=window, carry_sink=2, noise=0.3)
        view = explore.chain_view(texts, drafters["post"], 0, depth, what, step=step, head=head, beside={"recorded": np.linspace(0.5, 0.1, 16)})
        figure = go.Figure(explore.draw_chain(view))
        kinds.add(tuple(trace.type for trace in figure.data))
        assert not [p for trace in figure.data if (p := trace_problem(trace.to_plotly_json()))]
        assert "bonus token" in explore.describe_chain(view) and "+ 1 bonus token" in figure.layout.annotations[-1].text
    assert len(kinds) == 1


def test_bars_by_template_take_the_place_of_accuracy(material):
    _, drafters, rows = material
    texts = explore.Texts(*rows, at=40, words=word, depth=12)
    bars = {v: {"as trained": (1.0, 0.8, 1.2), "neither": (0.5, 0.4, 0.6)} for v in ("pre", "post")}
    view = explore.chain_view(texts, drafters["pre"], 0, 4, drift.Intervention(), live_accuracy=False, beside={"bars": bars})
    shown = [trace for trace in go.Figure(explore.draw_chain(view)).data if trace.name in bars]
    assert [list(trace.y) for trace in shown] == [[1.0, 0.5], [1.0, 0.5]]


def test_trace_is_green_up_to_the_refusal():
    result = {"k": np.arange(1, 5), "accepted": 2, "correct": np.array([True, True, False, True]), "drafted": list("abcd"), "wanted": list("abxd")}
    drawn, target = explore._trace(result, {})
    assert drawn["customdata"] == ["accepted", "accepted", "refused", "dropped"] and drawn["marker"]["color"][2] == explore.RED
    assert target["text"] == ["a", "b", "≠ x", "d"]


@pytest.mark.parametrize("change", [{"depth": 0}, {"depth": 17}, {"head": 4}, {"step": 0}], ids=str)
def test_views_that_do_not_exist_are_refused(material, change):
    model, drafters, rows = material
    texts = explore.Texts(*rows, at=40, words=word, model=model)
    arguments = {"depth": 4, "head": None, "step": 1} | change
    with pytest.raises(InputError):
        explore.chain_view(texts, drafters["pre"], 0, arguments["depth"], drift.Intervention(), step=arguments["step"], head=arguments["head"])


@pytest.mark.parametrize("at", [1, 45])
def test_prompts_without_room_for_a_chain_are_refused(material, at):
    with pytest.raises(InputError):
        explore.Texts(*material[2], at=at, words=word)


def test_untrained_chain_grows_only_when_it_feeds_back_raw():
    raw, normed = (explore.untrained_chain(normalise=flag) for flag in (False, True))
    assert (np.diff(raw["rms"]) > 0).all() and np.allclose(normed["rms"], 1, atol=1e-5)
    # The same layer sees the same first state: the first update is the same.
    assert raw["update"][0] == normed["update"][0]
    assert raw["cos"][-1] > 0.99 > normed["cos"][-1] and raw["update"][-1] < 0.2 * raw["update"][0]
    with pytest.raises(InputError):
        explore.untrained_chain(0, normalise=True)
