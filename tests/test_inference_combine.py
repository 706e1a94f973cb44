"""Scores of one prompt, the eviction part, and the matrix of combinations."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nbkit.errors import InputError
from nbkit.inference import PARTS, Attention, Rows, attach, register
from nbkit.inference.combine import Matrix, fill, matrix
from nbkit.inference.scoring import score_evictions, score_prompt, token_losses
from nbkit.methods.ams import SegmentedPolicy
from nbkit.methods.ams.eviction import AmsEviction, SnapKVEviction

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 8, "initializer_range": 0.4}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request):
    torch.manual_seed(0)
    config, cls = (LlamaConfig(**SIZES), LlamaForCausalLM) if request.param == "llama" else (Qwen3Config(**SIZES), Qwen3ForCausalLM)
    return cls(config).eval()


def prompt(tokens=48, answer=(3, 1, 4), name="p", kind="any", inside=0, evidence=((4, 9),), seed=0):
    ids = np.random.default_rng([seed, tokens]).integers(0, 50, tokens)
    return SimpleNamespace(id=name, kind=kind, ids=ids, answer_ids=np.array(answer), evidence=evidence, inside=inside)


@dataclasses.dataclass(frozen=True)
class Drop(Rows):
    """Keeps the last share of the rows from layer 2 on."""

    share: float = 0.5

    def keep(self, run, layer):
        if layer != 2:
            return None
        return torch.arange(run.tokens - max(1, round(self.share * run.tokens)), run.tokens)


@dataclasses.dataclass(frozen=True)
class Local(Attention):
    """A band of 8 keys, through a mask."""

    name = "test-local"

    def attend(self, run, layer, q, k, v, scaling):
        n = q.shape[2]
        i = torch.arange(n)
        band = (i[:, None] >= i) & (i[:, None] - i < 8)
        run.charge(layer, pairs=q.shape[1] * int(band.sum()))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, band, scale=scaling, enable_gqa=True)


# Scoring.


def test_score_equals_the_loss_of_one_teacher_forced_pass(model):
    p = prompt()
    whole = torch.tensor([*p.ids, *p.answer_ids])[None]
    with torch.no_grad():
        log_p = model(whole).logits[0, len(p.ids) - 1 : -1].log_softmax(-1)
    expected = -log_p[range(3), p.answer_ids]
    for parts in (None, {}):
        score = score_prompt(model, p, parts=parts)
        assert score.nll == pytest.approx(float(expected.mean()), abs=1e-5)
        assert score.first_nll == pytest.approx(float(expected[0]), abs=1e-5)
        assert score.top1 == pytest.approx(float((log_p.argmax(-1) == torch.as_tensor(p.answer_ids)).float().mean()))
        assert score.exact == (score.top1 == 1)
        assert score.cache_bytes == 4 * 2 * 2 * 48 * 8 * 4
    assert (score.density, score.evidence_kept) == (1.0, (1.0,) * 4)


def test_greedy_answer_is_exact_and_another_one_is_not(model):
    p = prompt()
    out = model.generate(torch.as_tensor(p.ids)[None], max_new_tokens=3, do_sample=False, attention_mask=torch.ones(1, 48), pad_token_id=0,
                         eos_token_id=None)[0, 48:]
    assert score_prompt(model, prompt(answer=out.tolist())).exact
    wrong = out.clone()
    wrong[1] = (wrong[1] + 1) % 50
    score = score_prompt(model, prompt(answer=wrong.tolist()))
    assert not score.exact
    assert score.top1 < 1


def test_inside_scores_the_last_tokens_of_the_prompt(model):
    p = prompt(inside=6)
    ids = torch.as_tensor(p.ids)[None]
    with torch.no_grad():
        log_p = model(ids).logits[0, -7:-1].log_softmax(-1)
    score = score_prompt(model, p, parts={}, inside=True)
    assert score.nll == pytest.approx(float(-log_p[range(6), p.ids[-6:]].mean()), abs=1e-5)
    thin = score_prompt(model, p, parts={"attention": Local()}, inside=True)
    assert thin.nll != pytest.approx(score.nll, abs=1e-3)
    assert thin.density < 0.4


def test_scoring_inside_an_open_reader_uses_it(model):
    p = prompt()
    with attach(model, rows=Drop()) as run:
        inner = score_prompt(model, p)
        assert run.counts == [48, 48, 24, 24]
    outer = score_prompt(model, p, parts={"rows": Drop()})
    assert (inner.nll, inner.cache_bytes) == pytest.approx((outer.nll, outer.cache_bytes))
    assert (inner.macs, inner.density) == (None, None)
    # Evidence at 4..8 is dropped with the first half.
    assert outer.evidence_kept == (1.0, 1.0, 0.0, 0.0)
    assert outer.macs < score_prompt(model, p, parts={}).macs


def test_scoring_leaves_the_model_as_it_was(model):
    p = prompt()
    before = model.config._attn_implementation
    first = score_prompt(model, p).nll
    score_prompt(model, p, parts={"attention": Local(), "rows": Drop(), "eviction": AmsEviction(budget=24)})
    assert score_prompt(model, p).nll == first
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(("change", "options", "match"), [
    ({}, {"parts": {"row": Drop()}}, "parts"),
    ({"answer": ()}, {}, "prompt"),
    ({"tokens": 0}, {}, "prompt"),
    ({}, {"inside": True}, "inside"),
    ({"inside": 48}, {"inside": True}, "inside"),
    ({"inside": 4}, {"inside": True, "parts": {"rows": Drop()}}, "inside"),
    ({}, {"parts": {"rows": Local()}}, "rows"),
])
def test_wrong_scoring_is_refused(model, change, options, match):
    with pytest.raises(InputError, match=match):
        score_prompt(model, prompt(**change), **options)


def test_nan_logits_are_refused():
    with pytest.raises(InputError, match="NaN"):
        token_losses(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0]))


# Eviction.


@pytest.mark.parametrize("part", [AmsEviction, SnapKVEviction])
def test_eviction_keeps_the_budget_with_sinks_and_the_last_slots(model, part):
    with attach(model, eviction=part(budget=30)) as run, torch.inference_mode():
        model(torch.as_tensor(prompt(100).ids)[None])
    assert run.cache.lengths() == (30,) * 4
    for layer in range(4):
        positions = run.cache.positions(layer)
        assert positions.shape == (2, 30)
        assert positions[:, :4].tolist() == [[0, 1, 2, 3]] * 2
        assert positions[:, -16:].tolist() == [list(range(84, 100))] * 2


def test_a_budget_of_everything_changes_nothing(model):
    p = prompt()
    full = score_prompt(model, p, parts={})
    for budget in (48, 60, 1.0):
        assert score_prompt(model, p, parts={"eviction": AmsEviction(budget=budget)}) == dataclasses.replace(full, seconds=pytest.approx(0, abs=99))


def test_eviction_selects_as_the_policy_does_on_the_same_keys(model):
    from nbkit import kernels
    from nbkit.methods.ams import QueryWindow

    torch.manual_seed(1)
    k, v, q = torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 8), torch.randn(1, 4, 64, 8)
    positions = torch.arange(90)
    run = SimpleNamespace(tokens=90, scaling=8**-0.5)
    for part, allocation in ((AmsEviction(budget=0.5), "mass"), (SnapKVEviction(budget=0.5), "none")):
        policy = SegmentedPolicy(scorer="snapkv", keep=0.5, allocation=allocation)
        window = QueryWindow(q, positions[-64:], 8**-0.5)
        scores = policy.score(k, v, window, positions.expand(1, 2, -1))
        last = window.last(32)
        evidence = kernels.window_evidence(last.states, k, 8**-0.5, last.positions, positions.expand(1, 2, -1))
        expected = policy.select(scores, evidence, 45).index
        assert torch.equal(part.keep(run, 0, k, v, q, positions), expected)


def test_eviction_after_dropped_rows_works_on_ragged_layers_and_original_positions(model):
    with attach(model, rows=Drop(share=0.5), eviction=AmsEviction(budget=30)) as run, torch.inference_mode():
        model(torch.as_tensor(prompt(100).ids)[None])
        assert run.cache.lengths() == (30, 30, 30, 30)
        assert int(run.cache.positions(3).min()) == 50
        # Kept entries are those of the layer's own rows.
        assert bool((run.cache.positions(3).diff(dim=-1) > 0).all())
        after = model(torch.tensor([[7]]), cache=run.cache)
        assert torch.isfinite(after.logits).all()
        assert run.cache.lengths() == (31, 31, 31, 31)
    with attach(model, rows=Drop(share=0.2), eviction=AmsEviction(budget=30)) as run, torch.inference_mode():
        model(torch.as_tensor(prompt(100).ids)[None])
        assert run.cache.lengths() == (30, 30, 20, 20)


def test_evicting_with_the_random_scorer_is_seeded_by_layer(model):
    p = prompt(100)
    part = AmsEviction(budget=30, scorer="random")
    scores = [score_prompt(model, p, parts={"eviction": part}).nll for _ in range(2)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(("options", "match"), [
    ({"budget": 3}, "keep"), ({"budget": 1.5}, "keep"), ({"budget": "1 KiB"}, "budget"), ({"scorer": "expected_attention"}, "scorer"),
    ({"scorer": "best"}, "scorer"), ({"sinks": -1}, "sinks"),
])
def test_wrong_eviction_is_refused(options, match):
    with pytest.raises(InputError, match=match):
        AmsEviction(**options)


# The matrix.


def test_fill_waters_every_layer_to_the_same_level():
    assert fill([10, 10, 4], 24) == 10
    assert fill([10, 10, 4], 20) == 8
    assert fill([10, 10, 4], 12) == 4
    for total in range(3, 25):
        k = fill([10, 10, 4], total)
        assert sum(min(n, k) for n in (10, 10, 4)) <= total
        assert k == 10 or sum(min(n, k + 1) for n in (10, 10, 4)) > total
    with pytest.raises(InputError, match="cache budget"):
        fill([10, 10, 4], 2)


def test_matrix_has_every_combination_on_equal_budgets(model):
    prompts = [prompt(96, name=f"{kind}{i}", kind=kind, seed=i) for kind in "ab" for i in range(3)]
    found = matrix(model, prompts, rows=["none", ("half", Drop)], attention=["dense", ("local", Local())], eviction=["none", ("ams", AmsEviction())],
                   time=0.8, space=0.5)
    assert len(found.labels) == 8
    assert found.labels[0] == ("none", "dense", "none")
    rows = {(r["rows"], r["attention"], r["eviction"]): r for r in found.table()}
    full = rows["none", "dense", "none"]
    assert (full["macs"], full["bytes"], full["density"], full["prompts"]) == (1.0, 1.0, 1.0, 6)
    assert (full["nll_rise"].low, full["nll_rise"].high) == (0, 0)
    for labels, row in rows.items():
        if labels[2] == "ams":
            assert row["bytes"] == pytest.approx(0.5, abs=0.02)
        if labels[0] == "half":
            # Sparse attention saves work, which the rate of pruning gets back.
            assert 0.74 <= row["macs"] <= 0.8
            assert row["fits"] == (labels[2] == "ams")
    assert rows["half", "local", "none"]["rate"] > rows["half", "dense", "none"]["rate"]
    assert found.kinds == ["a", "b"]
    assert found.table("a")[0]["prompts"] == 3
    rise = found.compare(("half", "dense", "none"), ("none", "dense", "none"))
    assert rise.estimate == pytest.approx(rows["half", "dense", "none"]["nll_rise"].estimate)
    assert str(found).count("\n") == 8


def test_scores_of_the_matrix_are_those_of_single_readings(model):
    prompts = [prompt(name="x"), prompt(name="y", seed=1)]
    found = matrix(model, prompts, rows=[Drop(0.5)], attention=[Local()], eviction=[("ams", AmsEviction(budget=24))])
    assert found.labels == [("none", "dense", "none"), ("", "test-local", "ams")]
    for p, cell in zip(prompts, [c for c in found.cells if c["eviction"] == "ams"], strict=True):
        alone = score_prompt(model, p, parts={"rows": Drop(0.5), "attention": Local(), "eviction": AmsEviction(budget=24)})
        assert (cell["nll"], cell["macs"], cell["cache_bytes"]) == (alone.nll, alone.macs, alone.cache_bytes)
        assert cell["evidence_kept"] == 0.0


def test_a_registered_class_is_an_entry_by_its_name(model):
    register(Local)
    try:
        found = matrix(model, [prompt()], attention=["none", "test-local"])
        assert found.labels == [("none", "dense", "none"), ("none", "test-local", "none")]
    finally:
        PARTS["attention"].pop("test-local")
    with pytest.raises(InputError, match="attention part"):
        matrix(model, [prompt()], attention=["test-local"])


def test_a_second_call_reads_what_is_there(model, tmp_path, monkeypatch):
    from nbkit.inference import combine

    prompts = [prompt(name="x"), prompt(name="y", seed=1)]
    first = matrix(model, prompts[:1], rows=["none", ("half", Drop(0.5))], resume=tmp_path / "scores.jsonl")
    read = []
    monkeypatch.setattr(combine, "score_evictions", lambda m, p, *a, **k: read.append(p.id) or score_evictions(m, p, *a, **k))
    second = matrix(model, prompts, rows=["none", ("half", Drop(0.5))], resume=tmp_path / "scores.jsonl")
    assert read == ["y", "y"]
    assert second.cells[:2] == first.cells
    # Other options of a part are another cell.
    matrix(model, prompts[:1], rows=[("half", Drop(0.25))], resume=tmp_path / "scores.jsonl")
    assert read == ["y", "y", "x"]


@pytest.mark.parametrize("rows", [None, Drop(0.5)])
def test_several_evictions_from_one_reading_score_as_each_alone(model, rows):
    p = prompt(100)
    parts = {} if rows is None else {"rows": rows}
    evictions = {"none": None, "ams": AmsEviction(budget=30), "snapkv": SnapKVEviction(budget=40)}
    for name, score in score_evictions(model, p, evictions, parts=parts).items():
        alone = score_prompt(model, p, parts=parts if evictions[name] is None else parts | {"eviction": evictions[name]})
        assert dataclasses.replace(score, seconds=0) == dataclasses.replace(alone, seconds=0)
    with pytest.raises(InputError, match="parts"):
        score_evictions(model, p, evictions, parts={"eviction": AmsEviction()})
    with pytest.raises(InputError, match="prompt"):
        score_evictions(model, prompt(answer=()), evictions)


def test_a_time_limit_ends_the_matrix_after_whole_prompts(model):
    prompts = [prompt(name=str(i), seed=i) for i in range(3)]
    found = matrix(model, prompts, eviction=["none", "snapkv"], minutes=0)
    assert [c["prompt"] for c in found.cells] == ["0", "0"]


def test_a_recorded_matrix_gives_the_same_table(model):
    import json

    found = matrix(model, [prompt(name=str(i), seed=i) for i in range(3)], eviction=["none", "snapkv"], space=0.5)
    again = Matrix(json.loads(json.dumps(found.cells)), found.time, found.space)
    assert again.table() == found.table()


@pytest.mark.parametrize(("prompts", "options", "match"), [
    (0, {}, "prompts"),
    (2, {}, "same id"),
    (1, {"time": 0.0}, "time"),
    (1, {"space": 1.5}, "space"),
    (1, {"rows": ["none", "none"]}, "rows"),
    (1, {"rows": []}, "rows"),
    (1, {"rows": "none"}, "rows"),
    (1, {"rows": [Local()]}, "rows"),
    (1, {"eviction": ["no-such"]}, "eviction part"),
    (1, {"rows": [("half", Drop)], "time": 0.1}, "time"),
    (1, {"eviction": ["ams"], "space": 0.01}, "cache budget"),
])
def test_wrong_matrices_are_refused(model, prompts, options, match):
    with pytest.raises(InputError, match=match):
        matrix(model, [prompt()] * prompts, **options)


def test_unknown_kind_and_combination_are_named(model):
    found = matrix(model, [prompt()])
    with pytest.raises(InputError, match="kind"):
        found.table("b")
    with pytest.raises(InputError, match="combination"):
        found.compare(("none", "dense", "none"), ("none", "dense", "ams"))


def test_plain_cache_and_reader_agree(model):
    p = prompt()
    ids = torch.as_tensor(p.ids)[None]
    with torch.inference_mode():
        plain = model(ids, cache=DynamicCache(config=model.config)).logits[0, -1]
    nll, _ = token_losses(plain[None], torch.tensor([3]))
    assert score_prompt(model, p, parts={}).first_nll == pytest.approx(float(nll), abs=1e-5)
