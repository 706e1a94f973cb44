"""What adacal's panels show is what AdaCal does: decisions, densities, pictures and the figures read from recordings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nbkit.errors import InputError
from nbkit.inference.patterns import Pattern, causal_pairs
from nbkit.methods import adacal
from nbkit.methods.adacal import explore, overview, report
from nbkit.methods.adacal.policy import plan_layer

LAYERS, HEADS, TOKENS, PROBE = 3, 4, 160, 64


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    # Large projections make sharp attention, so that heads differ.
    return LlamaForCausalLM(LlamaConfig(vocab_size=60, initializer_range=0.6, **sizes)).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 60, (TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def prompt(model, ids):
    return explore.capture(model, ids, probe=PROBE)


def test_what_is_captured_gives_the_profile_of_the_library(model, ids, prompt):
    table = adacal.profile(model, ids)
    scores = overview.head_scores(prompt)
    for name, key in (("mean", "mid_mean"), ("max", "mid_max"), ("last", "mid_last"), ("entropy", "entropy"), ("concentration", "concentration")):
        expected = np.array([row[key] for row in table]).reshape(LAYERS, HEADS)
        assert np.allclose(scores[name], expected, atol=1e-5), name
    assert prompt.tokens == TOKENS and prompt.queries.shape == (LAYERS, HEADS, PROBE, 8) and prompt.keys.shape == (LAYERS, 2, TOKENS, 8)


@pytest.mark.parametrize("task", adacal.TASKS)
def test_a_head_is_treated_as_adacal_treats_it(prompt, task):
    cfg = adacal.AdaCalConfig(task=task, probe=32, window=16, v_cap=6, s_cap=9)
    policy = cfg.policy(task)
    seen = set()
    for layer in range(LAYERS):
        fallback = policy.fallback_after is not None and layer >= policy.fallback_after * LAYERS
        plan = plan_layer(prompt.rows(32)[layer], prompt.keys[layer], cfg, task=task, fallback=fallback)
        for head in range(HEADS):
            view = explore.head_view(prompt, layer, head, cfg)
            assert view["active"] == bool(plan.choice.active[head]) and view["dense"] == bool(plan.choice.dense[head])
            for name in ("columns", "slashes"):
                index = getattr(plan.choice, name)[head]
                assert sorted(view[name].tolist()) == sorted(index[index >= 0].tolist())
            pairs = float(plan.pattern.pairs(TOKENS)[head]) + 32 * TOKENS
            assert view["density"] == pytest.approx(pairs / causal_pairs(TOKENS, TOKENS))
            assert (np.diff(view["curve"]) >= -1e-6).all() and view["curve"][-1] <= 1 + 1e-6
            seen.add(view["active"])
    assert True in seen, "the example activates no head, so it shows nothing"


def test_the_map_holds_the_attention_of_the_probe(prompt):
    view = explore.head_view(prompt, 1, 2, adacal.AdaCalConfig(probe=16), bins=40)
    exact = prompt.attention(1, 2, 16).view(16, 40, 4).sum(-1).clamp_min(1e-4).log10()
    assert np.allclose(view["map"], exact.numpy(), atol=0.006)
    assert view["mid"].shape == (16,)


@pytest.mark.parametrize(("tokens", "bins"), [(24, 24), (24, 8), (25, 8)])
def test_the_picture_shows_what_the_pattern_reads(tokens, bins):
    table = torch.tensor([[5, 11, -1]])
    pattern = Pattern(1, window=3, sinks=2, columns=table, slashes=torch.tensor([[7, -1]]), dense_rows=2)
    step = -(-tokens // bins)
    exact = pattern.mask(tokens)[0].numpy()
    side = -(-tokens // step)
    blocks = np.zeros((side * step, side * step), dtype=bool)
    blocks[:tokens, :tokens] = exact
    picture = explore.picture_of(pattern, tokens, bins)
    assert ((picture >= 2) == blocks.reshape(side, step, side, step).any((1, 3))).all()
    assert set(np.unique(picture)) <= set(range(len(explore.KINDS)))


def test_evidence_mass_is_the_largest_row(prompt):
    found = explore.evidence_mass(prompt, ((10, 14), (30, 31)), slice(0, 20))
    whole = prompt.attention(2, 3, PROBE)
    assert found.shape == (LAYERS, HEADS)
    assert found[2, 3] == pytest.approx(float((whole[:20, 10:14].sum(-1) + whole[:20, 30]).max()), abs=1e-6)


@pytest.mark.parametrize("reduce", adacal.REDUCTIONS)
def test_density_of_a_threshold_is_that_of_the_plans(prompt, reduce):
    tau = float(np.median(overview.head_scores(prompt)[reduce]))
    view = overview.heads_view(prompt, reduce, tau)
    cfg = adacal.AdaCalConfig(task="general", reduce=reduce, tau=tau)
    plans = [plan_layer(prompt.queries[layer], prompt.keys[layer], cfg, task="general") for layer in range(LAYERS)]
    assert (view["active"] == torch.stack([plan.choice.active for plan in plans]).numpy()).all()
    assert 0 < view["active"].sum() < view["active"].size
    exact = np.mean([plan.pattern.density(TOKENS) for plan in plans])
    assert view["density"] == pytest.approx(exact, abs=1e-6)


def test_formulas_are_exact_where_places_do_not_matter():
    for tokens in (100, 512, 2000):
        assert overview.formula_density("tri-shape", tokens) == Pattern(1, window=64, sinks=4, dense_rows=64).density(tokens)
        base = Pattern(1, window=64, sinks=4).density(tokens)
        assert overview.formula_density("TriangleMix", tokens) == pytest.approx((1 + overview.formula_density("tri-shape", tokens)) / 2)
        # Without an active head AdaCal is the A-shape and its probe; with all of them it is the uniform vertical-slash.
        assert overview.formula_density("AdaCal", tokens, active=0.0) == pytest.approx(base + 64 * tokens / causal_pairs(tokens, tokens))
        assert overview.formula_density("AdaCal", tokens, active=1.0) == overview.formula_density("vertical-slash", tokens)
    with pytest.raises(InputError, match="FlexPrefill"):
        overview.formula_density("FlexPrefill", 512)


@pytest.fixture(scope="module")
def grid():
    def cell(method, nll, density, **more):
        return {"cell": {"task": "needle", "method": method, "chunk": 0, "tokens": 512} | more, "ids": ["a", "b"], "nll": nll, "density": density}

    matched = [{"cell": {"method": "tri-shape", "density": 0.3}, "options": {"last": 9}, "density": 0.29},
               {"cell": {"method": "adacal", "density": 0.3}, "options": {}, "density": 0.4}]
    cells = [cell("dense", [1.0, 2.0], [1.0, 1.0]), cell("a-shape", [2.0, 4.0], [0.2, 0.4]), cell("a-shape", [1.0, 1.0], [0.1, 0.1], tokens=1024),
             cell("tri-shape", [1.5, 2.5], [0.3, 0.3], options={"last": 9})]
    return report.Grid({"tasks": ["needle"], "tokens": 512, "matched": matched, "cells": cells})


def test_bars_and_points_are_the_recorded_numbers(grid):
    (name, loss, low, high, density), = overview.bars_of(grid, "needle")
    assert (name, loss, density) == ("A-shape", 1.5, pytest.approx(0.3)) and low <= loss <= high
    (name, loss, *_), = overview.bars_of(grid, "needle", 0.3)  # adacal's setting missed the density
    assert (name, loss) == ("tri-shape", 0.5)
    assert overview.measured_density(grid, "needle")["A-shape"] == [(512, pytest.approx(0.3)), (1024, 0.1)]


def test_recorded_rankings_are_losses_over_the_dense_model():
    def row(ranking, share, nll):
        return {"cell": {"task": "needle", "ranking": ranking, "share": share, "chunk": 0}, "ids": ["a", "b"], "nll": nll}

    cells = [row("all", 1.0, [1.0, 1.0]), row("max", 0.2, [1.5, 2.5]), row("random-0", 0.2, [2.0, 2.0]), row("random-1", 0.2, [4.0, 4.0])]
    found = overview.recorded_heads(report.Heads({"cells": cells}), "needle")
    assert found["max"][0][:2] == (0.2, 1.0) and found["random"][0][:2] == (0.2, 2.0) and found["mean"] == []


def test_panels_draw_the_same_kinds_of_traces_everywhere(prompt, grid):
    import nbkit
    from nbkit.widgets import controls

    def head(layer, task, cap):
        return explore.head_view(prompt, layer, 0, adacal.AdaCalConfig(task=task, v_cap=cap, s_cap=cap))

    beside = {"name": "x", "max": [(0.2, 1.0, 0.5, 1.5)]}
    panels = [
        nbkit.Panel(head, {"layer": controls.integer(0, LAYERS - 1), "task": controls.choice(["auto", *adacal.TASKS]),
                           "cap": controls.integer(0, 96, 8)}, explore.draw_head, title="head", alt=explore.describe_head),
        nbkit.Panel(lambda tau, measure, given: overview.heads_view(prompt, measure, tau, recorded=beside if given else None),
                    {"tau": controls.number(0, 0.95, 0.5), "measure": controls.choice(list(overview.MEASURES)), "given": controls.toggle()},
                    overview.draw_heads, title="heads", alt=overview.describe_heads),
        nbkit.Panel(lambda n, given: overview.tasks_view(prompt, n, bars=overview.bars_of(grid, "needle") if given else (),
                                                         points=overview.measured_density(grid, "needle")),
                    {"n": controls.log_integer(256, 8192), "given": controls.toggle()}, overview.draw_tasks, title="tasks",
                    alt=overview.describe_tasks),
    ]
    for panel in panels:
        assert "all draw finite figures" in str(panel.sweep(4))


def test_wrong_requests_are_named(model, ids, prompt):
    cfg = adacal.AdaCalConfig()
    for wrong in ({"layer": LAYERS, "head": 0}, {"layer": 0, "head": -1}):
        with pytest.raises(InputError, match=r"layer|head"):
            explore.head_view(prompt, **wrong, cfg=cfg)
    with pytest.raises(InputError, match="probe"):
        explore.capture(model, ids[:10])
    with pytest.raises(InputError, match="probe"):
        prompt.rows(PROBE + 1)
    with pytest.raises(InputError, match="measure"):
        overview.heads_view(prompt, "kurtosis", 0.5)
