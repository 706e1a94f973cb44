"""Facts about the table of losses, about replays from stored layer inputs, and about the recordings of fastprefill.

Identity 6: rows alive and MACs of an execution are those of the cost model. The table is exact for one drop.
"""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nbkit.errors import InputError, UnsupportedModelError
from nbkit.inference import attach
from nbkit.inference.parts import Rows
from nbkit.methods.fastprefill import baselines as b
from nbkit.methods.fastprefill.cost import LatencyModel, ModelShape, measure_layers, prefill_macs
from nbkit.methods.fastprefill.prune import TokenPruning
from nbkit.methods.fastprefill.schedule import PruneSchedule
from nbkit.methods.fastprefill.sensitivity import SensitivityTable, fit_schedule, prompt_losses
from nbkit.methods.fastprefill.stored import LayerRunner

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60, "num_hidden_layers": 4,
    "max_position_embeddings": 256, "initializer_range": 0.3,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}), "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}), "mha": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
}
TOKENS, ANSWER = 70, 8
PRUNING = {"sinks": 2, "window": 6, "pool": 3}


def tiny(family="llama", seed=0):
    torch.manual_seed(seed)
    model, config, more = FAMILIES[family]
    return model(config(**(SIZES | more))).eval()


def tokens(seed=0):
    ids = np.random.default_rng(seed).integers(0, 60, TOKENS + ANSWER)
    return ids[:TOKENS], ids[TOKENS:]


def answer_loss(logits, answer):
    """Mean loss of the answer from the logits of the prompt's last row and of all answer rows but the last."""
    return float(torch.nn.functional.cross_entropy(logits.float(), torch.as_tensor(answer)))


def in_a_session(model, rule, prompt, answer):
    """The same rule in the session: prefill, then the answer as one chunk through the ragged cache."""
    with torch.inference_mode(), attach(model, rows=rule) as run:
        first = model(torch.as_tensor(prompt)[None], use_cache=True)
        rest = model(torch.as_tensor(answer)[None, :-1], cache=first.cache)
        return answer_loss(torch.cat([first.logits[0, -1:], rest.logits[0]]), answer), run.counts, run.macs


RULES = [
    TokenPruning(PruneSchedule.one_shot(2, 0.3, 4), score="max", **PRUNING),
    TokenPruning(PruneSchedule((1.0, 0.8, 0.5, 0.2)), score="cummax", **PRUNING),
    b.Full(), b.FastKV(layer=2, rate=0.3), b.ASL(first=1, tau=2.0, keep_tokens=0.3, span=2), b.PyramidInfer(delta=0.5, least=5),
    b.LazyLLM(layers=(1, 2), rates=(0.5, 0.3), revive="none"), b.SlimInfer(layers=(1, 2), rates=(0.8, 0.5), block=8, unit=2),
    b.GemFilter(layer=1, keep_tokens=0.3), b.SpecPrefill(draft=1, keep_share=0.5, chunk=8), b.RandomRows(layer=1, rate=0.4, window=4),
    b.OracleRows(evidence=((3, 9),), layer=1, rate=0.4, window=4),
]


# ---- replays ----


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_stored_prompt_has_the_loss_of_the_full_model(family):
    model, (prompt, answer) = tiny(family), tokens()
    with torch.inference_mode():
        logits = model(torch.as_tensor(np.concatenate([prompt, answer]))[None]).logits[0, TOKENS - 1 : -1]
    runner = LayerRunner(model)
    with runner.attached():
        stored = runner.store(prompt, answer)
    assert stored.nll == pytest.approx(answer_loss(logits, answer), abs=1e-4)
    assert stored.first_nll == pytest.approx(answer_loss(logits[:1], answer[:1]), abs=1e-4)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{RULES.index(rule)}")
def test_a_replay_is_the_session_with_the_answer_read_through_the_pruned_cache(rule):
    model, (prompt, answer) = tiny(), tokens(1)
    runner = LayerRunner(model)
    with runner.attached():
        stored = runner.store(prompt, answer)
        replay = runner.replay(stored, rule)
    nll, counts, macs = in_a_session(model, rule, prompt, answer)
    assert replay.nll == pytest.approx(nll, abs=1e-4) and replay.counts == counts
    assert replay.macs(runner.shape) == pytest.approx(macs, rel=1e-9)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("score", ["max", "sum", "cummax"])
def test_identity_06_rows_and_macs_of_the_session_are_those_of_the_cost_model(family, score):
    model, (prompt, answer) = tiny(family), tokens(2)
    schedule, shape = PruneSchedule((1.0, 0.7, 0.7, 0.3)), ModelShape.from_config(model.config)
    _, counts, macs = in_a_session(model, TokenPruning(schedule, score=score, **PRUNING), prompt, answer)
    assert counts == list(schedule.counts(TOKENS, 8))
    scored = "all" if score == "cummax" else "drop"
    assert macs == prefill_macs(shape, counts, window=6, scored=scored).total


def test_dropping_rows_equals_masking_their_keys():
    """The replay against a plain forward pass in which, from the drop on, dropped keys are masked for every surviving query."""
    model, (prompt, answer) = tiny(), tokens(3)
    keep = torch.tensor(sorted({0, 1, *range(20, 40, 3), *range(60, 70)}))

    class Fixed(Rows):
        def keep(self, run, layer):
            return keep if layer == 2 else None

    runner = LayerRunner(model)
    with runner.attached():
        replay = runner.replay(runner.store(prompt, answer), Fixed())
    length = TOKENS + ANSWER
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    alive = torch.ones(length, dtype=torch.bool)
    alive[:TOKENS] = False
    alive[keep] = True
    masked = causal & (alive[None] | torch.eye(length, dtype=torch.bool))
    ids = torch.as_tensor(np.concatenate([prompt, answer]))[None]
    masks = [causal, causal, masked, masked]
    handles = [
        layer.register_forward_pre_hook(lambda m, a, k, i=i: (a, {**k, "attention_mask": masks[i][None, None]}), with_kwargs=True)
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.inference_mode():
        logits = model(ids).logits[0, TOKENS - 1 : -1]
    for handle in handles:
        handle.remove()
    assert replay.nll == pytest.approx(answer_loss(logits, answer), abs=1e-4) and replay.counts == [70, 70, len(keep), len(keep)]


def test_stored_attention_masses_are_those_of_the_attention():
    model, (prompt, answer) = tiny(), tokens(4)
    runner = LayerRunner(model)
    with runner.attached():
        window, column = runner.attention_masses(runner.store(prompt, answer), 6)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        shares = model(torch.as_tensor(prompt)[None], output_attentions=True).attentions
    assert np.allclose(column, torch.stack([a[0].sum(1).amax(0) for a in shares]), atol=1e-4)
    assert np.allclose(window, torch.stack([a[0, :, -6:].sum(1).amax(0) for a in shares]), atol=1e-4)


def test_evidence_and_wrong_replays():
    model, (prompt, answer) = tiny(), tokens(5)
    runner = LayerRunner(model)

    class Backwards(Rows):
        def keep(self, run, layer):
            return torch.tensor([3, 2]) if layer == 1 else None

    class Late(Rows):
        prune_at = "post_attn"

    with runner.attached():
        stored = runner.store(prompt, answer)
        oracle = runner.replay(stored, b.OracleRows(evidence=((3, 9),), layer=2, rate=0.3, window=4))
        assert oracle.evidence_kept(((3, 9),)) == [1.0] * 4 and oracle.evidence_kept(()) == [1.0] * 4
        for rule in (Backwards(), Late()):
            with pytest.raises(InputError):
                runner.replay(stored, rule)
        with pytest.raises(InputError, match="prompt and answer"):
            runner.store(prompt, answer[:0])
    with pytest.raises(UnsupportedModelError):
        LayerRunner(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="sliding"):
        LayerRunner(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=1)))


# ---- the table and the schedule fitted to it ----


def test_the_table_is_exact_for_one_drop():
    model, (prompt, answer) = tiny(), tokens(6)
    runner, options = LayerRunner(model), {"score": "max", **PRUNING}
    with runner.attached():
        row = prompt_losses(runner, runner.store(prompt, answer), layers=(1, 3), rates=(0.2, 0.6), evidence=((3, 9),), **options)
    for i, layer in enumerate((1, 3)):
        for j, rate in enumerate((0.2, 0.6)):
            nll, _, _ = in_a_session(model, TokenPruning(PruneSchedule.one_shot(layer, rate, 4), **options), prompt, answer)
            assert row["loss"][i][j] == pytest.approx(nll - row["nll"], abs=2e-4)
    assert np.shape(row["kept"]) == np.shape(row["exact"]) == (2, 2)


class Pair:
    def __init__(self, seed, kind):
        self.ids, self.answer_ids = tokens(seed)
        self.kind = kind


@pytest.mark.parametrize("objective", ["mean", "worst"])
def test_fitted_schedules_keep_the_budget_and_say_how_they_came_about(objective):
    model = tiny()
    calibration = [Pair(1, "a"), Pair(2, "b")]
    options = {"rates": (0.2, 0.5), "layers": (1, 2, 3), "refine_evaluations": 3, **PRUNING}
    schedule = fit_schedule(model, None, calibration, latency_budget=0.8, objective=objective, **options)
    shape = ModelShape.from_config(model.config)
    spent = prefill_macs(shape, schedule.counts(TOKENS, 8), window=6).total
    assert spent <= 0.8 * prefill_macs(shape, [TOKENS] * 4).total and schedule.layers == 4
    assert schedule.meta["objective"] == objective and schedule.meta["smoothing"] >= 0 and schedule.meta["evaluations"] <= 3
    full = fit_schedule(model, None, calibration, latency_budget=1.0, rates=(0.5,), layers=(1, 3), **PRUNING)
    assert full.ratios == (1.0,) * 4 and full.predicted_loss == 0


def test_a_latency_model_can_stand_for_macs():
    model = tiny()
    cost = measure_layers(model, (16, 24, 48, 70), window=6, repeat=3)
    assert len(cost.samples) == 8 and min(cost.a, cost.b, cost.c, cost.e) >= 0
    # One that only counts rows allows exactly a mean share of the rows.
    rows = LatencyModel(a=1.0, b=0.0, c=0.0, e=0.0)
    schedule = fit_schedule(model, None, [Pair(1, "a")], latency_budget=0.75, rates=(0.2, 0.5), layers=(1, 2, 3), cost=rows, **PRUNING)
    assert sum(schedule.counts(TOKENS, 8)) <= 0.75 * 4 * TOKENS


@pytest.mark.parametrize("change", [
    {"prompts": []}, {"latency_budget": 0}, {"latency_budget": 1.5}, {"latency_budget": float("nan")}, {"objective": "best"}, {"cost": "seconds"},
    {"layers": (4,)}, {"layers": (0,)}, {"refine_evaluations": 51}, {"prompts": ["text"]}, {"rates": (1.0,)}, {"rates": (0.5, 2.0)},
])
def test_wrong_arguments_of_fit_schedule_are_refused(change):
    options = {"prompts": [Pair(1, "a")], **change}
    with pytest.raises(InputError):
        fit_schedule(tiny(), None, options.pop("prompts"), **({"layers": (1, 2)} | PRUNING | options))


def test_a_schedule_of_another_model_is_refused_when_it_is_used():
    model, (prompt, _) = tiny(), tokens()
    with pytest.raises(InputError, match="6 ratios"), attach(model, rows=TokenPruning(PruneSchedule.one_shot(3, 0.5, 6), **PRUNING)):
        model(torch.as_tensor(prompt)[None])


# ---- recipes and recordings ----


SMOL = ModelShape(30, 576, 9, 3, 64, 1536, 49152)


def recording(name):
    from nbkit.loaders import load_recording

    return load_recording(name).data


@pytest.mark.parametrize("tau", [0.75, 0.65])
def test_published_rules_use_their_budget_and_no_more(tau):
    from nbkit.recipes import fastprefill as recipe

    rules, full = recipe.baseline_rules(SMOL, tau), prefill_macs(SMOL, [recipe.TOKENS] * 30).total
    spent = {
        "gemfilter": b.gemfilter_first_pass(SMOL, recipe.TOKENS, 12) + prefill_macs(SMOL, [rules["gemfilter"].keep_tokens] * 30).total,
        "specprefill": b.draft_reading(ModelShape(**{**vars(SMOL), "layers": recipe.DRAFT_LAYERS}), recipe.TOKENS, 8)
        + prefill_macs(SMOL, [int(rules["specprefill"].keep_share * recipe.TOKENS + 0.5)] * 30).total,
        "fastkv": prefill_macs(SMOL, PruneSchedule.one_shot(15, rules["fastkv"].rate, 30).counts(recipe.TOKENS), window=8).total,
    }
    for name, macs in spent.items():
        # A chunk of 32 tokens is the smallest step of the draft's choice.
        assert tau - (0.05 if name == "specprefill" else 0.01) < macs / full <= tau
    for name in ("lazyllm", "sliminfer"):
        ratios = [1.0] * 30
        for layer, rate in zip((10, 15, 20), rules[name].rates, strict=True):
            ratios[layer:] = [rate] * (30 - layer)
        assert tau - 0.01 < prefill_macs(SMOL, PruneSchedule(tuple(ratios)).counts(recipe.TOKENS)).total / full <= tau


def test_the_recorded_table_gives_the_recorded_schedules():
    from nbkit.methods.fastprefill.cost import MacCost

    data, grid = recording("fastprefill-sensitivity"), recording("fastprefill-grid")
    table = SensitivityTable.from_dict(data["table"])
    planner = table.planner(SMOL, tokens=data["tokens"], cost=MacCost(SMOL, data["window"]), floor=data["floor"], scored=data["scored"])
    for tau in grid["taus"]:
        found = planner.solve(tau)
        assert list(found.ratios) == pytest.approx(grid["schedules"][f"optimised@{tau:g}"]["ratios"])
        assert planner.cost(found) <= tau * planner.full_cost
    assert table.smooth()[1] == pytest.approx(data["smoothing"], abs=1e-4)


def test_recorded_cells_keep_their_budgets_and_pair_up():
    from nbkit.methods.fastprefill.report import Grid

    data = recording("fastprefill-grid")
    grid = Grid(data)
    full = prefill_macs(SMOL, [data["tokens"]] * 30).total
    assert set(grid.values("macs", "full")) == {full}
    for cell in grid.names:
        name, _, tau = cell.partition("@")
        assert set(grid.common(cell)) <= set(grid.common("full")) and np.isfinite(grid.values("nll", cell)).all()
        if cell in data["schedules"]:
            # A rule whose ratios still fall where the floor holds all rows goes on scoring there: a few hundred-thousandths.
            assert (grid.values("macs", cell) <= float(tau) * full * (1 + 1e-4)).all(), cell
            assert name != "optimised" or (grid.values("macs", cell) <= float(tau) * full).all()
    assert {f"{name}@{tau:g}" for name in ("optimised", "one-shot-middle", "single-best") for tau in data["taus"]} <= set(grid.names)
    # A schedule that was chosen on one set of prompts is only judged on others.
    calibration = set(recording("fastprefill-sensitivity")["ids"])
    assert not calibration & set(grid.prompts) and all("held-out" in name for name in grid.prompts)
