"""What the panels of the fastprefill notebook show is what the method does: schedules for a budget, work by module, dead tokens, recalled mass."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nbkit.errors import InputError
from nbkit.methods.fastprefill import Grid, LayerRunner, ModelShape, PruneSchedule, SensitivityTable, TokenPruning, explore, prefill_macs

DEPTH, LAYERS, HEADS, TOKENS, FLOOR = 30, 8, 4, 160, 12
EDGES = {"sinks": 2, "window": 8}
KINDS = ("needle", "code", "needle", "code")


@pytest.fixture(scope="module")
def shape():
    return ModelShape(layers=DEPTH, hidden=128, heads=HEADS, kv_heads=2, head_dim=32, ffn=384, vocab=60)


@pytest.fixture(scope="module")
def table():
    # Losses that fall with the layer of the drop and with the share kept; code needs more tokens than needle.
    layers, rates = (6, 15, 22), (0.1, 0.3, 0.6)
    base = np.array([[4.0, 2.0, 0.5], [2.0, 0.8, 0.2], [0.4, 0.1, 0.02]])
    return SensitivityTable(layers, rates, np.stack([base * (2 if kind == "code" else 1) for kind in KINDS]), KINDS)


@pytest.fixture(scope="module")
def plans(table, shape):
    return explore.Plans(table, shape, tokens=512, window=8, floor=FLOOR)


@pytest.fixture(scope="module")
def runner():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    # Large projections make sharp attention, so that heads differ.
    return LayerRunner(LlamaForCausalLM(LlamaConfig(vocab_size=60, initializer_range=0.4, **sizes)).eval())


@pytest.fixture(scope="module")
def stored(runner):
    ids = torch.randint(0, 60, (TOKENS + 3,), generator=torch.Generator().manual_seed(1)).numpy()
    with runner.attached():
        return runner.store(ids[:TOKENS], ids[TOKENS:])


@pytest.fixture(scope="module")
def prompt():
    return SimpleNamespace(evidence=((70, 76), (126, 131)), answer=" 417", kind="needle")


def one_drop(layer=4, rate=0.3, **options):
    return TokenPruning(PruneSchedule.one_shot(layer, rate, LAYERS), **EDGES, **options)


# Schedules for a budget.


@pytest.mark.parametrize("objective", ["mean", "worst"])
@pytest.mark.parametrize("mix", ["all tasks", "needle", "code"])
@pytest.mark.parametrize("tau", [0.56, 0.76, 1.0])
def test_every_schedule_of_a_view_falls_and_keeps_the_budget(plans, objective, mix, tau):
    view = plans.view(tau, objective, mix, 768)
    assert set(view["ratios"]) == set(explore.FAMILIES)
    for family, ratios in view["ratios"].items():
        assert len(ratios) == DEPTH and ratios[0] == 1 and (np.diff(ratios) <= 0).all() and ratios[-1] > 0
        assert view["share"][family] <= tau + 1e-9
        assert view["predicted"][family] >= 0


def test_the_whole_budget_drops_nothing(plans):
    view = plans.view(1.0, "mean", "all tasks", 512)
    assert set(view["ratios"]["optimised"]) == {1.0} and view["predicted"]["optimised"] == pytest.approx(0, abs=1e-5)


def test_the_optimiser_expects_no_more_than_a_single_drop_in_the_middle_on_the_same_grid(plans, table, shape):
    for tau in (0.6, 0.7, 0.8, 0.9):
        best = plans.schedule("optimised", tau, "all tasks", 512, "mean")
        allowed = [PruneSchedule.one_shot(DEPTH // 2, rate, DEPTH) for rate in table.rates]
        # Costs are rounded up, by less than a hundredth in all.
        limit = (tau - 0.01) * plans.planner("all tasks", 512, "mean").full_cost
        rivals = [plans.expected(s, "all tasks", "mean") for s in allowed if plans.cost(s, 512) <= limit]
        assert all(best.predicted_loss <= rival + 1e-5 for rival in rivals)


def test_expected_curves_fall_with_the_budget(plans):
    assert set(plans.curves) == {"all tasks", "needle", "code"}
    for curves in plans.curves.values():
        for family in explore.FAMILIES:
            assert (np.diff(curves[family]) <= 1e-6).all(), family
            assert curves[family].shape == (len(explore.Plans.TAUS),)


def test_the_worst_task_of_one_task_is_its_mean(plans):
    schedule = PruneSchedule.one_shot(15, 0.3, DEPTH)
    assert plans.expected(schedule, "needle", "worst") == pytest.approx(plans.expected(schedule, "needle", "mean"))
    assert plans.expected(schedule, "code", "mean") == pytest.approx(2 * 0.8) and plans.expected(schedule, "needle", "mean") == pytest.approx(0.8)
    assert plans.expected(schedule, "all tasks", "worst") == pytest.approx(1.6)


def test_a_drop_before_the_first_measured_layer_counts_as_if_it_were_there(plans):
    early, first = (plans.expected(PruneSchedule.one_shot(layer, 0.3, DEPTH), "needle", "mean") for layer in (1, 6))
    assert early == first == pytest.approx(2.0)


def test_measured_points_come_from_the_recording(table, shape):
    nll = {"full": [1.0, 2.0], "optimised@0.75": [1.5, 2.5], "linear@0.75": [3.0, 2.0], "optimised@0.65": [2.0, 3.0]}
    cells = {name: {"nll": dict(zip("ab", values, strict=True))} for name, values in nll.items()}
    grid = Grid({"prompts": ["a", "b"], "kinds": ["needle", "code"], "taus": [0.75, 0.65], "cells": cells})
    measured = explore.Plans(table, shape, tokens=512, grid=grid, window=8, floor=FLOOR).view(0.8, "mean", "all tasks", 512)["measured"]
    taus, middle, low, high = measured["optimised"]
    assert taus.tolist() == [0.75, 0.65] and middle.tolist() == [0.5, 1.0] and (low <= middle).all() and (middle <= high).all()
    assert measured["linear"][0].tolist() == [0.75] and measured["linear"][1].tolist() == [1.0]
    assert not len(measured["cosine"][0])


def test_an_unknown_mix_is_refused(plans):
    with pytest.raises(InputError, match="mix"):
        plans.view(0.8, "mean", "poems", 512)


def test_the_drawing_shows_the_view(plans):
    low, high = plans.view(0.6, "mean", "needle", 512), plans.view(0.9, "worst", "all tasks", 8192)
    first, second = explore.draw_budget(low), explore.draw_budget(high)
    assert [t["type"] for t in first["data"]] == [t["type"] for t in second["data"]]
    for view, figure in ((low, first), (high, second)):
        for family, trace in zip(explore.FAMILIES, figure["data"], strict=False):
            assert trace["name"] == family and trace["y"].tolist() == view["ratios"][family].tolist()
        # Frames of the static page do not rescale: every axis has its range.
        assert all("range" in axis for name, axis in figure["layout"].items() if name.startswith(("xaxis", "yaxis")))
    assert f"{low['predicted']['optimised']:.3f}" in explore.describe_budget(low) and "drops before layers" in explore.describe_budget(low)
    assert "drops nothing" in explore.describe_budget(plans.view(1.0, "mean", "needle", 512))


# The work of a prefill.


@pytest.mark.parametrize("tokens", [64, 512, 4096])
@pytest.mark.parametrize("keys", [0.05, 0.3, 1.0])
def test_the_parts_of_the_work_sum_to_the_cost_model(shape, tokens, keys):
    schedule = PruneSchedule.one_shot(15, 0.3, DEPTH)
    view = explore.work_view(shape, schedule, tokens, keys, floor=FLOOR, window=8)
    totals = sum(view["parts"].values()) * 1e9
    assert totals[0] == pytest.approx(prefill_macs(shape, [tokens] * DEPTH).total)
    assert totals[2] == pytest.approx(prefill_macs(shape, schedule.counts(tokens, FLOOR), window=8).total)
    assert np.allclose(view["speed_up"], totals[0] / totals)
    parts = view["parts"]
    # Sparse attention leaves projections and FFN as they are; token pruning shrinks them.
    for name in ("projections", "FFN"):
        assert parts[name][1] == parts[name][0] and parts[name][3] == parts[name][2] < parts[name][0]
    assert (parts["attention"] <= parts["attention"][0]).all()
    # No sparse attention beats a prefill without attention.
    assert view["speed_up"][1] <= 1 / (1 - view["attention_share"])


def test_more_keys_are_more_work(shape):
    work = [explore.work_view(shape, PruneSchedule.one_shot(15, 0.5, DEPTH), 2048, keys)["parts"]["attention"] for keys in (0.1, 0.2, 0.5, 1.0)]
    assert all((more[[1, 3]] > less[[1, 3]]).all() for less, more in zip(work[:-1], work[1:], strict=True))
    assert work[-1][1] == pytest.approx(work[-1][0])


@pytest.mark.parametrize("keys", [0, -0.1, 1.2])
def test_keys_are_a_share(shape, keys):
    with pytest.raises(InputError, match="keys"):
        explore.work_view(shape, PruneSchedule.full(DEPTH), 512, keys)


def test_the_bars_and_the_sentence_say_the_gains(shape):
    view = explore.work_view(shape, PruneSchedule.one_shot(15, 0.3, DEPTH), 1024, 0.2)
    figure = explore.draw_work(view)
    assert [a["text"] for a in figure["layout"]["annotations"][:4]] == [f"<b>{gain:.2f}×</b>" for gain in view["speed_up"]]
    assert all(f"{gain:.2f} times" in explore.describe_work(view) for gain in view["speed_up"][1:])
    assert figure["layout"]["yaxis"]["range"][1] > sum(view["parts"].values()).max()


# Which tokens die where.


@pytest.mark.parametrize("score", ["max", "sum", "cummax", "agg-2", "random", "oracle"])
def test_the_estimate_is_exact_up_to_and_with_the_first_drop(runner, stored, prompt, score):
    options = {"evidence": prompt.evidence} if score == "oracle" else {}
    schedule = PruneSchedule.from_ratios([1, 1, 1, 0.6, 0.6, 0.4, 0.4, 0.2])
    rule = TokenPruning(schedule, score=score, **EDGES, **options)
    with runner.attached():
        exact = runner.replay(stored, rule).kept
    estimate = explore.chosen_rows(runner, stored, rule)
    assert [len(x) for x in estimate] == [len(x) for x in exact] == list(schedule.counts(TOKENS, 10))
    assert all(torch.equal(a, b) for a, b in zip(estimate[:4], exact[:4], strict=True))
    assert len(estimate[3]) < TOKENS


def test_the_strip_of_one_drop_is_the_same_before_and_after_the_exact_reading(runner, stored, prompt):
    estimate, exact = (explore.strip_view(runner, stored, prompt, one_drop(), words=["w"] * TOKENS, exact=how) for how in (False, True))
    assert (estimate["dies"] == exact["dies"]).all() and set(exact["dies"].tolist()) == {4, LAYERS}
    assert (exact["dies"] == LAYERS).sum() == exact["alive"][-1] == 48
    assert np.isnan(estimate["nll"]) and estimate["exact"] is None and np.isfinite(exact["nll"]) and exact["full_nll"] == stored.nll
    # The edges never die.
    assert (exact["dies"][:2] == LAYERS).all() and (exact["dies"][-8:] == LAYERS).all()


def test_evidence_alive_never_rises_and_the_oracle_keeps_it(runner, stored, prompt):
    for score, options in (("max", {}), ("random", {}), ("oracle", {"evidence": prompt.evidence})):
        view = explore.strip_view(runner, stored, prompt, one_drop(score=score, **options), words=["w"] * TOKENS)
        assert view["kept"][0] == 1 and (np.diff(view["kept"]) <= 0).all() and (np.diff(view["alive"]) <= 0).all()
        wanted = np.r_[70:76, 126:131]
        assert view["kept"][-1] == pytest.approx((view["dies"][wanted] == LAYERS).mean())
        assert score != "oracle" or view["kept"][-1] == 1


def test_a_drop_that_keeps_everything_costs_nothing(runner, stored, prompt):
    view = explore.strip_view(runner, stored, prompt, one_drop(rate=1.0), words=["w"] * TOKENS)
    assert view["nll"] == stored.nll and (view["dies"] == LAYERS).all()


def test_outlines_hold_exactly_the_evidence(runner, stored, prompt):
    view = explore.strip_view(runner, stored, prompt, one_drop(), words=[str(i) for i in range(TOKENS)])
    figure = explore.draw_strip(view)
    cells = set()
    for box in figure["layout"]["shapes"]:
        line = round(box["y0"] + 0.5)
        cells |= {explore.ROW * line + column for column in range(round(box["x0"] + 0.5), round(box["x1"] + 0.5))}
    assert cells == set(range(70, 76)) | set(range(126, 131))
    # The second span crosses the end of a line: two outlines.
    assert len(figure["layout"]["shapes"]) == 3
    heat = np.asarray(figure["data"][0]["z"], dtype=float).ravel()
    assert heat[:TOKENS].tolist() == view["dies"].tolist() and np.isnan(heat[TOKENS:]).all()
    assert f"{view['nll']:.2f} nats" in figure["layout"]["annotations"][0]["text"]
    assert "is right" in explore.describe_strip(view | {"exact": True}) and "is wrong" in explore.describe_strip(view | {"exact": False})
    waiting = view | {"exact": None, "nll": float("nan")}
    assert "being computed" in explore.describe_strip(waiting) and "estimate" in explore.draw_strip(waiting)["layout"]["annotations"][0]["text"]


def test_a_prompt_without_marked_evidence_has_no_outline(runner, stored):
    plain = SimpleNamespace(evidence=(), answer="x", kind="prose")
    view = explore.strip_view(runner, stored, plain, one_drop(), words=["w"] * TOKENS)
    assert (view["kept"] == 1).all()
    assert [s.get("visible") for s in explore.draw_strip(view)["layout"]["shapes"]] == [False]


# What each head's keys recall.


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
@pytest.mark.parametrize("budget", [0.1, 0.3])
def test_own_keys_recall_at_least_as_much_as_shared_ones(runner, stored, layer, budget):
    recalled = explore.recall_view(runner, stored, layer, budget, size=1, **EDGES)["recalled"]
    assert set(recalled) == {"shared", "kv", "query"} and all(len(values) == HEADS for values in recalled.values())
    assert (recalled["query"] >= recalled["shared"] - 1e-6).all() and (recalled["query"] >= recalled["kv"] - 1e-6).all()
    # Key heads need not be better head by head, but over the heads that share a set they are.
    assert recalled["kv"].reshape(2, 2).mean(1).tolist() >= (recalled["shared"].reshape(2, 2).mean(1) - 1e-6).tolist()
    assert all(0 < value <= 1 + 1e-6 for values in recalled.values() for value in values)


def test_all_keys_recall_everything_and_more_keys_recall_more(runner, stored):
    found = [explore.recall_view(runner, stored, 5, budget, **EDGES)["recalled"] for budget in (0.1, 0.4, 1.0)]
    for how in ("shared", "kv", "query"):
        assert (found[0][how] <= found[1][how] + 1e-6).all() and np.allclose(found[2][how], 1, atol=1e-5)


def test_few_keys_are_at_least_the_edges(runner, stored):
    view = explore.recall_view(runner, stored, 5, 0.01, **EDGES)
    assert view["keys"] == 10 and view["tokens"] == TOKENS and view["group"] == 2
    figure = explore.draw_recall(view)
    assert [t["y"].tolist() for t in figure["data"]] == [view["recalled"][how].tolist() for how in ("shared", "kv", "query")]
    assert f"{100 * view['recalled']['query'].mean():.0f} % by query head" in explore.describe_recall(view)


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_layers_that_do_not_exist_are_refused(runner, stored, layer):
    with pytest.raises(InputError, match="layer"):
        explore.recall_view(runner, stored, layer, 0.2)
