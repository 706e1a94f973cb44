"""Exact facts about adacal in real forward passes: Llama, Qwen3 and Mistral with small random weights, grouped and full heads."""

from functools import lru_cache

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nbkit.errors import InputError, RunError
from nbkit.inference import attach, get
from nbkit.inference.patterns import PatternAttention
from nbkit.methods.adacal import AdaCal, AdaCalConfig, plan_layer, profile

TOKENS = 48
SIZES = dict(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=128, head_dim=8,
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)
MODELS = {
    "llama, grouped": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=2)),
    "llama, one key head a query head": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=4)),
    "llama, one key head": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=1)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(num_key_value_heads=2)),
    "mistral": (MistralForCausalLM, MistralConfig, dict(num_key_value_heads=2, sliding_window=None)),
}
every_model = pytest.mark.parametrize("name", MODELS)


@lru_cache
def model_of(name):
    kind, config, changes = MODELS[name]
    torch.manual_seed(0)
    model = kind(config(**(SIZES | changes))).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            # Peaked attention: with the initial weights every head would look everywhere alike.
            if key.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(12)
    return model


@lru_cache
def prompt(seed=1, batch=1):
    return torch.randint(60, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))


def config(**changes):
    base = dict(sinks=2, window=6, probe=8, v_cap=6, s_cap=7, task="general", fallback_after=1.0, dense_top=0.0)
    return AdaCalConfig(**(base | changes))


def read(name, part, ids=None):
    """Logits of a prompt read through a part (None: the untouched model), and the run."""
    model, ids = model_of(name), prompt() if ids is None else ids
    with torch.inference_mode():
        if part is None:
            return model(ids).logits, None
        with attach(model, attention=part) as run:
            return model(ids).logits, run


# ---- the identities ----


@every_model
@pytest.mark.parametrize("full", [dict(window=TOKENS, tau=1.0), dict(v_cap=TOKENS, s_cap=TOKENS, tau=-1.0, kappa=1.0)], ids=["window", "caps"])
def test_identity_01_everything_kept_equals_the_dense_model(name, full):
    dense, _ = read(name, None)
    ours, run = read(name, AdaCal(config(**full)))
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    assert sum(run.pairs) == run.dense_pairs
    assert run.density == pytest.approx(1 + 8 * TOKENS / (TOKENS * (TOKENS + 1) / 2))


@every_model
def test_identity_02_no_active_head_is_the_a_shape_bit_for_bit(name):
    ours, run = read(name, AdaCal(config(tau=1.0)))
    base, bare = read(name, get("attention", "a-shape", sinks=2, window=6))
    assert torch.equal(ours, base) and run.pairs == bare.pairs
    assert not torch.allclose(ours, read(name, None)[0], atol=1e-3)


@every_model
def test_identity_03_all_heads_active_is_uniform_vertical_slash(name):
    # Without sinks both rank diagonals by the same mass.
    ours, run = read(name, AdaCal(config(sinks=0, tau=-1.0, kappa=1.0)))
    base, other = read(name, get("attention", "vertical-slash", v=6, s=7, sinks=0, window=6, probe=8))
    assert torch.equal(ours, base) and run.pairs == other.pairs and run.probe == other.probe


@every_model
def test_identity_04_dense_probe_rows_everywhere_are_the_tri_shape(name):
    ours, run = read(name, AdaCal(config(tau=-1.0, v_cap=0, s_cap=0, dense_top=1.0)))
    base, other = read(name, get("attention", "tri-shape", sinks=2, window=6, last=8))
    assert torch.equal(ours, base) and run.pairs == other.pairs
    whole, _ = read(name, AdaCal(config(tau=-1.0, v_cap=0, s_cap=0, dense_top=1.0, probe=TOKENS)))
    torch.testing.assert_close(whole, read(name, None)[0], atol=1e-5, rtol=1e-5)


@every_model
@pytest.mark.parametrize("task", ["retrieval", "structure", "general"])
def test_identity_05_there_is_no_nan(name, task):
    assert torch.isfinite(read(name, AdaCal(config(task=task, fallback_after=None, dense_top=None)))[0]).all()


class MultiHead(PatternAttention):
    """AdaCal's plan on keys that were repeated for every query head."""

    name = "test-repeated"

    def __init__(self, cfg):
        self.cfg = cfg

    def attend(self, run, layer, q, k, v, scaling):
        group = q.shape[1] // k.shape[1]
        return super().attend(run, layer, q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), scaling)

    def pattern(self, run, layer, q, k, v, scaling):
        return plan_layer(q[0], k[0], self.cfg, task="general", scaling=scaling).pattern


@every_model
def test_identity_09_grouped_heads_equal_repeated_heads(name):
    cfg = config(tau=0.3)
    ours, run = read(name, AdaCal(cfg))
    repeated, other = read(name, MultiHead(cfg))
    torch.testing.assert_close(ours, repeated, atol=1e-5, rtol=1e-5)
    assert run.pairs == other.pairs


@every_model
def test_identity_10_decoding_is_dense_over_the_cache(name):
    model, ids = model_of(name), prompt()
    part = AdaCal(config(window=TOKENS, tau=1.0))
    with torch.inference_mode():
        plain = model.generate(ids, max_new_tokens=6, do_sample=False)
        with attach(model, attention=part):
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), plain)
        # A sparse prompt, then one token: the step attends to every cached key, whatever the pattern was.
        sparse = AdaCal(config(tau=1.0))
        with attach(model, attention=sparse) as run:
            model(ids)
            before = [layer.keys.clone() for layer in run.cache.layers], [layer.values.clone() for layer in run.cache.layers]
            step = model(ids[:, :1], cache=run.cache).logits
        full = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(zip(*before, strict=True)):
            full.update(keys, values, layer)
        torch.testing.assert_close(step, model(ids[:, :1], cache=full).logits, atol=1e-5, rtol=1e-5)


class Masked(AdaCal):
    """The same decisions, executed with a full mask by torch's own attention."""

    def attend(self, run, layer, q, k, v, scaling):
        mask = self.pattern(run, layer, q, k, v, scaling).mask(q.shape[2], k.shape[2])
        group = q.shape[1] // k.shape[1]
        return F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask[None], scale=scaling)


@every_model
@pytest.mark.parametrize("task", ["retrieval", "structure", "general"])
def test_identity_11_the_kernel_equals_masked_attention(name, task):
    cfg = config(task=task, tau=0.3, fallback_after=None, dense_top=None)
    torch.testing.assert_close(read(name, AdaCal(cfg))[0], read(name, Masked(cfg))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [100, 512])
def test_identity_11_holds_at_any_length_with_all_heads_alike(tokens):
    ids = torch.randint(60, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    cfg = config(tau=-1.0, kappa=1.0)
    for name in ("llama, grouped", "llama, one key head a query head"):
        torch.testing.assert_close(read(name, AdaCal(cfg), ids)[0], read(name, Masked(cfg), ids)[0], atol=1e-5, rtol=1e-5)


# ---- the run and the profile ----


@every_model
def test_the_run_tells_task_profile_and_density(name):
    model = model_of(name)
    tau = sorted(row["mid_mean"] for row in profile(model, prompt(), config()))[6]
    with torch.inference_mode(), AdaCal(config(reduce="mean", tau=tau)).attach(model) as run:
        with pytest.raises(InputError, match="no prompt read yet"):
            run.profile  # noqa: B018
        model(prompt())
    assert run.task == "general" and run.features == {} and run.tokens == TOKENS
    assert [(row["layer"], row["head"]) for row in run.profile] == [(layer, head) for layer in range(3) for head in range(4)]
    for row in run.profile:
        assert row["active"] == (row["mid_mean"] > tau) and row["mid_mean"] <= row["mid_max"] and row["mid_last"] <= row["mid_max"]
        assert (row["columns"] + row["slashes"] > 0) == row["active"]
    assert 0 < sum(row["active"] for row in run.profile) < 12
    mean = sum(row["density"] for row in run.profile) / 12
    assert run.density == pytest.approx(mean + 8 * TOKENS / (TOKENS * (TOKENS + 1) / 2))


def test_the_offline_profile_agrees_in_the_first_layer_and_then_sees_other_states():
    model, cfg = model_of("llama, grouped"), config(tau=1.0)
    before = model.config._attn_implementation
    offline = profile(model, prompt()[0], cfg)
    with torch.inference_mode(), AdaCal(cfg).attach(model) as run:
        model(prompt())
    assert model.config._attn_implementation == before
    assert offline[:4] == run.profile[:4]
    assert offline[4:] != run.profile[4:]
    # Observing does not change the pass: a dense pattern everywhere gives the offline profile.
    with torch.inference_mode(), AdaCal(config(window=TOKENS, tau=1.0)).attach(model) as run:
        model(prompt())
    for mine, theirs in zip(offline, run.profile, strict=True):
        assert mine["entropy"] == pytest.approx(theirs["entropy"], abs=1e-5)


def test_a_batch_without_padding_is_read_prompt_by_prompt():
    model, ids = model_of("llama, grouped"), prompt(2, batch=2)
    part = AdaCal(config(task="auto", tau=0.3))
    with torch.inference_mode(), part.attach(model) as run:
        both = model(ids).logits
        assert run.task == ["general", "general"] and len(run.profile) == 24
        together = [row for row in run.profile if row["prompt"] == 1]
        alone = model(ids[1:]).logits
        torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=1e-5)
        assert [row["columns"] for row in run.profile] == [row["columns"] for row in together]


def test_a_layer_after_the_first_third_activates_its_best_head():
    model = model_of("llama, grouped")
    with torch.inference_mode(), AdaCal(config(task="retrieval", tau=1.0, fallback_after=1 / 3)).attach(model) as run:
        model(prompt())
    active = [[row["head"] for row in run.profile if row["layer"] == layer and row["active"]] for layer in range(3)]
    best = [max((row for row in run.profile if row["layer"] == layer), key=lambda row: row["mid_max"])["head"] for layer in range(3)]
    assert active == [[], [best[1]], [best[2]]]


# ---- wrong input ----


def test_wrong_prompts_are_refused():
    model = model_of("llama, grouped")
    with torch.inference_mode(), AdaCal(config(probe=49)).attach(model), pytest.raises(InputError, match="49 rows of a prompt of 48 tokens"):
        model(prompt())
    with torch.inference_mode(), AdaCal(config()).attach(model):
        mask = torch.ones(2, TOKENS, dtype=torch.long)
        mask[0, :5] = 0
        with pytest.raises(InputError, match="padd"):
            model(prompt(2, batch=2), attention_mask=mask)
    with torch.inference_mode(), AdaCal(config(task="auto")).attach(model), pytest.raises(InputError, match="inputs_embeds.*AdaCalConfig"):
        model(inputs_embeds=torch.randn(1, TOKENS, 32))
    with torch.inference_mode(), AdaCal(config()).attach(model), pytest.raises(InputError, match="NaN"):
        model(inputs_embeds=torch.full((1, TOKENS, 32), float("nan")))
    with pytest.raises(InputError, match="ids"):
        profile(model, prompt(2, batch=2))
    with pytest.raises(InputError, match="config.*AdaCalConfig"):
        AdaCal({"tau": 0.5})
    with AdaCal(config()).attach(model), pytest.raises(RunError, match="attached already"), AdaCal(config()).attach(model):
        pass
    assert torch.isfinite(model(prompt()).logits).all()


def test_it_is_registered_among_the_attention_rules():
    assert isinstance(get("attention", "adacal"), AdaCal)
    assert isinstance(get("attention", "adacal", config=AdaCalConfig(tau=0.5)), AdaCal)
