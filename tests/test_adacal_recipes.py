"""Facts about the recipes of adacal and about reading their recordings, with small random models and made-up cells."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nbkit.errors import InputError, RunError
from nbkit.inference import attach, get
from nbkit.inference.patterns import Pattern
from nbkit.loaders.long_tasks import LongPrompt, load_long_tasks
from nbkit.methods.adacal import AdaCalConfig, Grid, Heads, spearman
from nbkit.methods.adacal.report import LEAST_LOSS
from nbkit.recipes import RECIPES, adacal, adacal_grid, adacal_timing

TOKENS = 96


def made_up(index, category="structure"):
    ids = np.random.default_rng(index).integers(0, 40, TOKENS)
    return LongPrompt(f"p{index}", "table", category, "t", "f", ids, "a", ids[:3], (), None, 8 if category == "structure" else 0, None)


@pytest.fixture
def small(monkeypatch):
    """The recipes with a three-layer model and four made-up prompts a task."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight", "embed_tokens.weight")):
                weight.mul_(10)
    monkeypatch.setattr(adacal, "load", lambda: SimpleNamespace(model=model, tokenizer=None))
    monkeypatch.setattr(adacal, "wide", lambda: model)
    monkeypatch.setattr(adacal, "DAMAGE_PROMPTS", 2)
    monkeypatch.setattr(adacal, "WINDOW", 8)
    monkeypatch.setattr(adacal, "PROBE", 16)

    def prompts(task, n, tokens=TOKENS, split="held-out", keys=None, depth=None):
        return tuple(made_up(i, "retrieval" if task == "needle" else "structure") for i in range(min(n, 4)))

    monkeypatch.setattr(adacal, "prompts", prompts)
    adacal.mean_profile.cache_clear()
    yield model
    adacal.mean_profile.cache_clear()


# ---- the recipes ----


@pytest.mark.parametrize("task", ["needle", "table"])
def test_the_loss_is_that_of_tokens_predicted_inside_the_prefill(small, task):
    prompt = adacal.prompts(task, 1)[0]
    found = adacal.read(prompt, get("attention", "dense"))
    with torch.inference_mode():
        logits = small(torch.from_numpy(prompt.ids)[None]).logits[0]
    rows, target = (logits[-1:], prompt.answer_ids[:1]) if task == "needle" else (logits[-9:-1], prompt.ids[-8:])
    target = torch.from_numpy(target)
    assert found["nll"] == pytest.approx(float(torch.nn.functional.cross_entropy(rows, target)), abs=1e-4)
    assert found["top1"] == pytest.approx(float((rows.argmax(-1) == target).float().mean()), abs=1e-4)
    assert found["density"] == 1.0


@pytest.mark.parametrize("task", ["needle", "table"])
def test_damage_by_restart_equals_reading_with_one_head_a_shaped(small, task):
    for layer in (0, 2):
        rise = adacal.damage(task, layer)["rise"]
        assert np.shape(rise) == (2, 4)
        for prompt, line in zip(adacal.prompts(task, 2), rise, strict=True):
            dense = adacal.read(prompt, get("attention", "dense"))["nll"]
            for head, value in enumerate(line):
                others = [pair for pair in itertools.product(range(3), range(4)) if pair != (layer, head)]
                part = get("attention", "head-set", active=others, sinks=adacal.SINKS, window=8)
                assert value == pytest.approx(adacal.read(prompt, part)["nll"] - dense, abs=2e-4)
    assert any(abs(x) > 1e-3 for line in rise for x in line)


def test_rankings_pick_the_wanted_share_of_heads_in_order(small):
    profile = adacal.mean_profile("table")
    assert profile["mid_max"].shape == (3, 4)
    for ranking, (name, largest) in adacal.RANKINGS.items():
        chosen = adacal.flags({"task": "table", "ranking": ranking, "share": 0.25})
        values = torch.from_numpy(profile[name])
        assert int(chosen.sum()) == 3
        inside, outside = values[chosen], values[~chosen]
        assert inside.min() >= outside.max() if largest else inside.max() <= outside.min()
    assert adacal.flags({"task": "table", "ranking": "all", "share": 1.0}).all()
    assert not adacal.flags({"task": "table", "ranking": "none", "share": 0.0}).any()


def test_a_cell_of_the_ranking_reads_its_chunk(small, monkeypatch):
    monkeypatch.setattr(adacal, "CHUNK", 2)
    found = adacal.evaluate_heads({"task": "table", "ranking": "max", "share": 0.25, "chunk": 1})
    assert found["ids"] == ["p2", "p3"] and len(found["nll"]) == 2 and json.dumps(found)
    part = get("attention", "head-set", active=adacal.flags(found["cell"]).nonzero().tolist(), sinks=adacal.SINKS, window=8)
    assert found["nll"][0] == adacal.read(made_up(2), part)["nll"]


def test_runs_stop_in_time_and_go_on_where_they_stopped(tmp_path):
    seen = []

    def evaluate(cell):
        seen.append(cell["x"])
        return {"key": f"x{cell['x']}", "total": 0.0}

    def run(cells, minutes):
        return [row["key"] for row in adacal.in_time(evaluate, cells, lambda c: f"x{c['x']}", tmp_path / "r.jsonl", minutes, log.append)]

    grid, log = [{"x": i} for i in range(4)], []
    assert run(grid, -1.0) == [] and "time is up at cell 1 of 4" in log[0]
    assert run(grid[1:3], 5.0) == ["x1", "x2"]
    assert run(grid, -1.0) == ["x1", "x2"]
    assert run(grid, 5.0) == ["x0", "x1", "x2", "x3"]
    assert seen == [1, 2, 0, 3]


@pytest.fixture
def unread(monkeypatch):
    """Rules without the real model's tokenizer."""
    monkeypatch.setattr(adacal_grid, "load", lambda: SimpleNamespace(tokenizer=None))
    adacal_grid.part_of.cache_clear()
    yield
    adacal_grid.part_of.cache_clear()


def test_cells_are_distinct_and_start_with_the_core(unread):
    tasks = ["needle", "tracking", "table", "code", "prose"]
    matches = [{"cell": {"method": m, "density": 0.3}, "density": 0.3, "options": adacal_grid.knob(m, 0.5)} for m in adacal_grid.MATCHED]
    grid = adacal_grid.cells(tasks) + adacal_grid.matched_cells(tasks, matches) + adacal_grid.more_cells(tasks)
    keys = [adacal_grid.grid_key(cell) for cell in grid]
    assert len(set(keys)) == len(keys)
    core = {(cell["task"], cell["method"]) for cell in grid[: len(tasks) * len(adacal_grid.CORE)]}
    assert core == set(itertools.product(tasks, adacal_grid.CORE))
    assert adacal_grid.matched_cells(tasks, [matches[0] | {"density": 0.5}]) == []
    heads = [adacal.cell_key(cell) for cell in adacal.head_cells()]
    assert len(set(heads)) == len(heads)
    for cell in grid:
        if "rivals" not in cell:
            adacal_grid.part_of(cell["method"], tuple(sorted(cell.get("options", {}).items())))


def test_knobs_raise_the_density(unread):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 256, 16, generator=generator), torch.randn(1, 2, 256, 16, generator=generator)
    run = SimpleNamespace(state={}, layers=2, ids=torch.arange(256)[None])
    for method in adacal_grid.MATCHED:
        densities = []
        for x in (0.1, 0.4, 0.7, 1.0):
            part = adacal_grid.part_of(method, tuple(sorted(adacal_grid.knob(method, x).items())))
            run.state = {}
            densities.append(part.pattern(run, 0, q, k, k, 0.25).density(256))
        assert densities == sorted(densities) and densities[0] < densities[-1], method


def test_rival_statements_are_found_and_their_columns_kept():
    for prompt in load_long_tasks("multikey", n=4, tokens=512, split="held-out", keys=7):
        places = adacal_grid.statements(prompt)
        assert len(places) == 7 and prompt.evidence[0][0] in places
        q = torch.zeros(1, 2, 512, 4)
        widths = []
        for rivals in adacal_grid.RIVALS:
            pattern = adacal_grid.rival_part(prompt, rivals).pattern(None, 0, q, q, q, 0.5)
            kept = set(pattern.columns[0].tolist())
            assert set(range(*prompt.evidence[0])) <= kept
            widths.append(len(kept))
        size = prompt.evidence[0][1] - prompt.evidence[0][0]
        # Statements may differ by a token in the name of their key.
        assert widths[0] == size and all(abs(width - size * (1 + rivals)) <= rivals for width, rivals in zip(widths, adacal_grid.RIVALS, strict=True))


def test_cells_must_have_read_the_same_prompts():
    rows = [{"key": m, "cell": {"task": "table", "chunk": c}, "digest": d} for m, c, d in (("a", 0, "x"), ("b", 0, "x"), ("a", 1, "y"))]
    adacal_grid.same_prompts(rows)
    with pytest.raises(RunError, match="prompts of c differ"):
        adacal_grid.same_prompts([*rows, {"key": "c", "cell": rows[0]["cell"], "digest": "z"}])


def test_timing_reads_both_ways_in_turn(monkeypatch, small, tmp_path):
    import nbkit

    monkeypatch.setattr(nbkit, "load_model", lambda name: SimpleNamespace(model=small, tokenizer=None))
    monkeypatch.setattr("nbkit.loaders.long_tasks.load_long_tasks", lambda *a, **o: [made_up(0, "retrieval")])
    short = AdaCalConfig(probe=16)
    monkeypatch.setattr("nbkit.methods.adacal.AdaCalConfig", lambda: short)
    found = adacal_timing.measure(TOKENS, 2, lambda text: None)
    assert {name: len(values) for name, values in found["seconds"].items()} == {"dense": 2, "adacal": 2}
    assert found["dense"]["density"] == 1.0 and found["adacal"]["probe"] == pytest.approx(16 * TOKENS / (TOKENS * (TOKENS + 1) / 2))
    assert found["adacal"]["task"] == "general"


def test_the_recipes_are_registered():
    for name in ("adacal-heads", "adacal-grid", "adacal-timing"):
        assert RECIPES[name].outputs == (f"recordings/{name}",) and callable(RECIPES[name].load())


# ---- reading the recordings ----

RULES = {"dense": (0.2, 1.0), "adacal": (0.3, 0.5), "a-shape": (2.0, 0.25), "tri-shape": (0.35, 0.4)}


def cells(task, chunk, shift=0.0, n=3, **more):
    rng = np.random.default_rng([len(task), chunk])
    noise = rng.normal(0, 0.01, n)
    return [
        {"key": f"{task}{method}{chunk}", "cell": {"task": task, "method": method, "chunk": chunk, "tokens": 512, **more},
         "ids": [f"{task}{chunk}{i}" for i in range(n)], "nll": (loss + shift * (method != "dense") + noise).tolist(), "top1": [1.0] * n,
         "density": [share] * n, "seconds": [1.0] * n}
        for method, (loss, share) in RULES.items()
    ]


@pytest.fixture
def grid():
    rows = cells("needle", 1) + cells("needle", 0) + cells("prose", 0, shift=-0.1)
    rows.append(rows[0] | {"cell": {"task": "needle", "method": "a-shape", "chunk": 0, "tokens": 512, "options": {"window": 32}}})
    matched = [{"cell": {"method": "adacal", "density": 0.3}, "options": {"ease": 0.1}, "density": 0.29},
               {"cell": {"method": "tri-shape", "density": 0.3}, "options": {"last": 9}, "density": 0.36}]
    return Grid({"tasks": ["needle", "prose"], "tokens": 512, "matched": matched, "cells": rows})


def test_chunks_are_joined_in_order_and_pairs_are_common_prompts(grid):
    assert grid.ids("needle", "dense") == [f"needle{chunk}{i}" for chunk in (0, 1) for i in range(3)]
    assert len(grid("nll", "needle", "dense")) == 6
    a, b = grid.both("nll", "needle", "adacal", ("a-shape", {"window": 32}))
    assert len(a) == 3 and b.tolist() == grid("nll", "needle", "dense")[3:].tolist()
    gain = grid.gain("nll", "needle", "a-shape", "dense")
    assert gain.estimate == pytest.approx(1.8) and gain.n == 6 and "expanded" in gain.method
    assert grid.gain_over("density", ["needle", "prose"], "adacal", "a-shape").estimate == pytest.approx(0.25)
    assert grid.has("prose", "adacal") and not grid.has("prose", "adacal", tokens=1024)
    with pytest.raises(InputError, match="needle with a-shape, adacal, dense, tri-shape"):
        grid("nll", "needle", "flexprefill")


def test_worst_task_relative_loss_and_its_difference(grid):
    def rises(rule):
        found = {}
        for task in ("needle", "prose"):
            dense = grid("nll", task, "dense").mean()
            found[task] = (grid("nll", task, rule).mean() - dense) / max(dense, LEAST_LOSS)
        return found

    task, value = grid.worst("adacal")
    assert (task, value) == ("needle", pytest.approx(rises("adacal")["needle"]))
    gap = grid.worst_gain("adacal", "tri-shape")
    # Only the prompts that every task has count: three of them.
    first = {t: (grid("nll", t, "dense")[:3], grid("nll", t, "adacal")[:3], grid("nll", t, "tri-shape")[:3]) for t in ("needle", "prose")}
    shares = [max((first[t][side].mean() - first[t][0].mean()) / first[t][0].mean() for t in first) for side in (1, 2)]
    assert gap.estimate == pytest.approx(shares[0] - shares[1]) and gap.high < 0


def test_matched_settings_and_the_cheapest_rule_of_equal_loss(grid):
    assert grid.matched("adacal", 0.3) == ("adacal", {"ease": 0.1})
    assert grid.matched("tri-shape", 0.3) is None and grid.matched("adacal", 0.25) is None
    assert grid.cheapest_equal(["a-shape", "tri-shape", "dense"], "adacal", tolerance=0.06) == "tri-shape"
    assert grid.cheapest_equal(["a-shape"], "adacal") is None


def test_rank_changes_name_a_rule_that_is_best_here_and_worse_there(grid):
    assert grid.rank_changes(["adacal", "tri-shape"]) == []
    rows = [row | {"nll": [x + 1.0 for x in row["nll"]]} if row["cell"]["task"] == "prose" and row["cell"]["method"] == "adacal" else row
            for row in grid.data["cells"]]
    found = Grid(grid.data | {"cells": rows}).rank_changes(["adacal", "tri-shape"])
    assert [case[:4] for case in found] == [("needle", "adacal", "prose", "tri-shape"), ("prose", "tri-shape", "needle", "adacal")]


def test_the_rival_slope_is_that_of_the_losses(grid):
    rows = [{"key": str(r), "cell": {"task": "multikey", "method": "given-columns", "chunk": 0, "tokens": 512, "keys": 7, "rivals": r},
             "ids": ["a", "b", "c"], "nll": [0.1 + 0.2 * r, 0.2 * r, 0.3 + 0.2 * r]} for r in (0, 1, 3)]
    assert Grid(grid.data | {"cells": rows}).rivals().estimate == pytest.approx(0.2)
    with pytest.raises(InputError, match="numbers of rivals"):
        grid.rivals()


def test_heads_average_random_draws_and_rank_metrics_against_damage():
    def row(ranking, share, losses, **more):
        cell = {"task": "needle", "ranking": ranking, "share": share, "chunk": 0}
        return {"key": ranking, "cell": cell, "ids": ["a", "b", "c"], "nll": losses, **more}

    damage = [{"key": f"d{layer}", "cell": {"task": "needle", "layer": layer}, "rise": [[0.1 * layer, 0.2 + layer], [0.3 * layer, 0.4 + layer]]}
              for layer in (0, 1)]
    rows = [row("max", 0.2, [0.1, 0.2, 0.3]), row("random-0", 0.2, [2.0] * 3), row("random-1", 0.2, [4.0] * 3), row("all", 1.0, [0.0] * 3)]
    data = {"profiles": {"needle": {"mid_max": [[0.1, 0.2], [0.15, 0.9]]}}, "cells": [*rows, *damage]}
    heads = Heads(data)
    assert heads("nll", "needle", "random").tolist() == [3.0, 3.0, 3.0] and heads("nll", "needle", "all").tolist() == [0.0] * 3
    assert heads.gain("needle", "max", "random").estimate == pytest.approx(0.2 - 3.0)
    assert heads.has("needle", "max") and not heads.has("table", "max")
    assert heads.damage("needle")[1].tolist() == pytest.approx([0.2, 1.3])
    assert heads.agreement("needle", "mid_max").estimate == pytest.approx(spearman([0.1, 0.2, 0.15, 0.9], [0.0, 0.3, 0.2, 1.3])) == pytest.approx(1.0)
    with pytest.raises(InputError, match="needle with all, max, random-0, random-1"):
        heads("nll", "needle", "last")
    with pytest.raises(InputError, match="measured damages"):
        heads.damage("table")


def test_spearman_ranks_ties_alike():
    assert spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5 over the root of 4.5 * 5.
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert np.isnan(spearman([1, 1], [1, 2]))


def test_reading_leaves_the_model_as_it_was(small):
    before = small.config._attn_implementation
    adacal.read(made_up(0), get("attention", "a-shape", window=8))
    assert small.config._attn_implementation == before
    with attach(small, attention=get("attention", "dense")):
        pass
    assert Pattern(1, window=3).density(3) == 1.0
