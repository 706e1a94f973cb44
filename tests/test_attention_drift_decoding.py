"""Exact facts about speculative decoding, reports and files of attention_drift, on small random models and on SmolLM2."""

import copy
import json
from functools import lru_cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from test_attention_drift import SIZES, N, feats_of, make, material, target
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import nbkit
from nbkit.errors import HashMismatchError, InputError, MissingResourceError, UnsupportedModelError
from nbkit.methods.attention_drift import (
    Batch,
    DrafterConfig,
    EagleDrafter,
    Intervention,
    MTPHead,
    acceptance,
    by_step,
    draft_chain,
    drift_report,
    fit_drafter,
    frequent_tokens,
    load_drafter,
    measures,
    prefill_control,
    reject,
    speculative_generate,
    target_features,
    ttt_loss,
    write_checkpoint,
)


def plain_greedy(model, ids, count, eos=None):
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=eos, pad_token_id=0)


@lru_cache
def trained():
    """A drafter that has seen the target's greedy text, so that some drafts are accepted and some are not."""
    drafter = make("post")
    prompts = torch.randint(1, 50, (12, 6), generator=torch.Generator().manual_seed(8))
    text = plain_greedy(target(), prompts, 26)
    found = target_features(target(), text)
    fit_drafter(drafter, target(), [Batch(text, found.aux, found.last)], steps=120, lr=3e-3, ttt=3)
    return drafter


# ---- speculative decoding ----


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("variant", ["pre", "post+fc_norm", "gate", "residual-norm", "mtp"])
@pytest.mark.parametrize("depth", [1, 4])
def test_identity_08_greedy_output_is_that_of_plain_greedy_decoding(family, variant, depth):
    ids, _ = material(family)
    out = speculative_generate(target(family), make(variant, family=family), ids[:1], depth=depth, max_new_tokens=24)
    assert torch.equal(out.sequences, plain_greedy(target(family), ids[:1], 24))
    assert out.new_tokens == 24 == 1 + sum(a + 1 for a in out.accepted)


@pytest.mark.parametrize("start", [0, 2, 4])
def test_identity_08_holds_for_a_drafter_that_is_often_right(start):
    ids = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(8 + start))
    out = speculative_generate(target(), trained(), ids, depth=5, max_new_tokens=40)
    assert torch.equal(out.sequences, plain_greedy(target(), ids, 40))
    assert 0 < sum(out.accepted) and out.new_tokens == 40 == 1 + sum(a + 1 for a in out.accepted)
    assert out.rounds < 38 and out.tokens_per_pass == 40 / (1 + out.rounds)


def test_accepted_drafts_are_what_a_chain_with_true_features_would_propose():
    """Every round of a speculative run repeats `draft_chain` on the text so far: nothing of earlier chains is left in the drafter."""
    ids = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(8))
    out = speculative_generate(target(), trained(), ids, depth=4, max_new_tokens=30)
    text, at = out.sequences, 7
    found = target_features(target(), text)
    for accepted, drafted in zip(out.accepted, out.drafted, strict=True):
        if drafted:
            chain = draft_chain(trained(), text[:, :at], found.aux, drafted)
            right = (chain.proposed[0] == text[0, at : at + drafted]).long()
            assert int(right.cumprod(0).sum()) == accepted
        at += accepted + 1
    assert at == text.shape[1]


def test_parallel_form_on_greedy_text_gives_the_acceptance_of_every_start():
    ids = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(9))
    text = plain_greedy(target(), ids, 20)
    found = target_features(target(), text)
    with torch.no_grad():
        steps = trained().ttt(text, found.aux, 4)
    starts = text.shape[1] - 5
    right = torch.stack([trained().propose(s.logits)[0, :starts] == text[0, j + 1 : j + 1 + starts] for j, s in enumerate(steps, 1)])
    parallel = right.long().cumprod(0).sum(0)
    for t in range(5, starts):
        chain = draft_chain(trained(), text[:, : t + 2], found.aux, 4)
        assert int((chain.proposed[0] == text[0, t + 2 : t + 6]).long().cumprod(0).sum()) == int(parallel[t])


def test_a_prompt_of_one_token_gets_its_first_token_from_the_target():
    ids = torch.tensor([[5]])
    out = speculative_generate(target(), trained(), ids, depth=3, max_new_tokens=12)
    assert torch.equal(out.sequences, plain_greedy(target(), ids, 12))
    one = speculative_generate(target(), trained(), ids[0], depth=3, max_new_tokens=1)
    assert one.new_tokens == 1 and one.rounds == 0 and torch.equal(one.sequences, plain_greedy(target(), ids, 1))


def test_end_of_text_inside_a_chain_stops_there():
    ids = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(8))
    free = plain_greedy(target(), ids, 40)[0, 6:].tolist()
    for place in range(40):
        eos = free[place]
        if eos in free[:place]:
            continue
        want = plain_greedy(target(), ids, 40, eos=eos)
        out = speculative_generate(target(), trained(), ids, depth=5, max_new_tokens=40, eos_token_id=[eos, 49] if 49 not in free else eos)
        assert torch.equal(out.sequences, want) and out.sequences[0, -1] == eos
        assert out.new_tokens == place + 1 == 1 + sum(a + 1 for a in out.accepted)


def test_reduced_vocabulary_and_interventions_leave_the_output_exact():
    ids, _ = material()
    want = plain_greedy(target(), ids[:1], 20)
    reduced = make("pre", draft_vocab=5)
    reduced.set_vocab([3, 4, 9, 17, 49])
    assert torch.equal(speculative_generate(target(), reduced, ids[:1], depth=3, max_new_tokens=20).sequences, want)
    for option in (dict(noise=0.7), dict(noise=0.7, path="embedding"), dict(pin=True), dict(window=3, carry_sink=1)):
        out = speculative_generate(target(), trained(), ids[:1], depth=4, max_new_tokens=20, intervention=Intervention(**option))
        assert torch.equal(out.sequences, want)


def test_targets_with_a_sliding_window_can_be_rolled_back():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    ids, _ = material()
    drafter = EagleDrafter(DrafterConfig.from_target(model), model)
    out = speculative_generate(model, drafter, ids[:1], depth=4, max_new_tokens=20)
    assert torch.equal(out.sequences, plain_greedy(model, ids[:1], 20))


@pytest.mark.parametrize("family", ["gpt2", "phi", "gpt_neox"])
def test_other_architectures_work_without_change(family):
    """Learned positions and no gated MLP (GPT-2), a biased head (Phi), parallel residuals (GPT-NeoX)."""
    torch.manual_seed(0)
    shape = {name: value for name, value in SIZES.items() if "token_id" not in name}
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=5, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0))
    elif family == "phi":
        model = PhiForCausalLM(PhiConfig(**shape, bos_token_id=0, eos_token_id=0))
    else:
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**{k: v for k, v in shape.items() if k != "num_key_value_heads"}))
    model.eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
        if family == "phi":
            model.get_output_embeddings().bias.normal_(generator=torch.Generator().manual_seed(5))
    drafter, (ids, _) = EagleDrafter(DrafterConfig.from_target(model), model), material()
    found = target_features(model, ids)
    torch.testing.assert_close(drafter.logits(found.last), found.logits)
    out = speculative_generate(model, drafter, ids[:1], depth=3, max_new_tokens=12, eos_token_id=[])
    assert torch.equal(out.sequences, plain_greedy(model, ids[:1], 12))
    assert by_step(drift_report(drafter, model, list(ids), depth=3), "sink").shape == (2, 3)


def test_models_without_attention_are_refused():
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        DrafterConfig.from_target(MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=5)))


def test_noise_differs_between_prompts_and_rounds():
    ids, _ = material()
    noisy = Intervention(noise=0.5)
    same = drift_report(make("pre"), target(), [ids[0], ids[0]], depth=3, intervention=noisy)
    first, second = by_step(same, "rms")
    assert np.abs(first - second).min() > 1e-4
    clean = by_step(drift_report(make("pre"), target(), [ids[0], ids[0]], depth=3), "rms")
    assert (clean[0] == clean[1]).all()


def test_identity_09_equal_distributions_accept_everything():
    p = torch.softmax(3 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), -1)
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        drafts = torch.multinomial(p[:5], 1, generator=generator)[:, 0].tolist()
        assert reject(p, p[:5], drafts, generator)[0] == 5


def test_identity_09_rejection_reproduces_the_target_distribution():
    """Two positions of a five-token vocabulary, drafts from another distribution: chi-square over the 25 pairs that come out."""
    generator = torch.Generator().manual_seed(0)
    first = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    second = torch.softmax(torch.randn(5, 5, generator=generator), -1)
    q1, q2 = torch.tensor([0.05, 0.2, 0.05, 0.6, 0.1]), torch.softmax(torch.randn(5, 5, generator=generator), -1)
    counts, accepted, trials = np.zeros((5, 5)), 0, 12_000
    for _ in range(trials):
        a = int(torch.multinomial(q1, 1, generator=generator))
        b = int(torch.multinomial(q2[a], 1, generator=generator))
        n, last = reject(torch.stack([first, second[a], first]), torch.stack([q1, q2[a]]), [a, b], generator)
        # After one accepted or refused token the second position is drawn from the target when it has not been decided.
        x = a if n else last
        y = (b if n == 2 else last) if n else int(torch.multinomial(second[x], 1, generator=generator))
        counts[x, y] += 1
        accepted += n >= 1
    want = (first[:, None] * second).numpy().astype(np.float64)
    assert stats.chisquare(counts.ravel(), want.ravel() / want.sum() * trials).pvalue > 1e-3
    # The first draft is accepted with probability sum min(p, q); had the draft's distribution leaked, the test above would see it.
    share = float(torch.minimum(first, q1).sum())
    assert abs(accepted / trials - share) < 4 * (share * (1 - share) / trials) ** 0.5
    leaked = q1.double().numpy()
    assert stats.chisquare(counts.sum(1), leaked / leaked.sum() * trials).pvalue < 1e-12


@pytest.mark.parametrize("draft_vocab", [None, 2])
def test_sampled_generation_has_the_targets_distribution(draft_vocab):
    """A five-token Llama: three sampled tokens of many runs against the exact distribution by enumeration."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 5, "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 16})).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(15)
        model.get_input_embeddings().weight.mul_(15)
    # With two of five tokens the other three can only come from the refusals.
    drafter = EagleDrafter(DrafterConfig.from_target(model, draft_vocab=draft_vocab), model, vocab_ids=draft_vocab and [1, 4])
    ids, temperature = torch.tensor([[1, 2]]), 0.8

    def after(rows):
        with torch.no_grad():
            return torch.softmax(model(rows).logits[:, -1].double() / temperature, -1)

    one = after(ids)[0]
    two = after(torch.cat([ids.expand(5, -1), torch.arange(5)[:, None]], 1))
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    three = after(torch.cat([ids.expand(25, -1), pairs], 1)).view(5, 5, 5)
    want = (one[:, None, None] * two[:, :, None] * three).flatten()
    counts, trials = np.zeros(125), 200
    for seed in range(trials):
        out = speculative_generate(model, drafter, ids, depth=2, max_new_tokens=3, do_sample=True, temperature=temperature, seed=seed)
        x, y, z = out.sequences[0, 2:].tolist()
        counts[25 * x + 5 * y + z] += 1
    order = np.argsort(-want.numpy())
    groups = np.array_split(order, 25)
    seen, expected = (np.array([v[g].sum() for g in groups]) for v in (counts, want.numpy() * trials))
    large = expected >= 5
    seen, expected = (np.append(v[large], v[~large].sum()) for v in (seen, expected))
    keep = expected > 0
    assert stats.chisquare(seen[keep], expected[keep] * seen.sum() / expected.sum()).pvalue > 1e-3


def test_sampling_is_a_function_of_the_seed():
    ids, _ = material()
    runs = [speculative_generate(target(), trained(), ids[:1], depth=3, max_new_tokens=16, do_sample=True, seed=s).sequences for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_identity_10_acceptance_counts():
    counts = np.random.default_rng(0).integers(0, 6, 400)
    out = acceptance(counts, 5)
    assert (np.diff(out.rates) <= 0).all()
    assert out.without_bonus == pytest.approx(counts.mean()) and out.with_bonus == pytest.approx(counts.mean() + 1)
    assert out.without_bonus == pytest.approx(out.rates.sum())
    np.testing.assert_allclose(np.cumprod(out.conditional), out.rates)
    none = acceptance([0, 0], 3)
    assert none.rates.tolist() == [0, 0, 0] and none.conditional[0] == 0 and np.isnan(none.conditional[1:]).all()
    run = speculative_generate(target(), trained(), material()[0][:1], depth=4, max_new_tokens=33)
    full = [a for a, d in zip(run.accepted, run.drafted, strict=True) if d == 4]
    assert run.acceptance_length_without_bonus == pytest.approx(np.mean(full))
    assert run.acceptance_length_with_bonus == pytest.approx(np.mean(full) + 1)
    assert run.new_tokens == 1 + sum(run.accepted) + run.rounds


@pytest.fixture(scope="module")
def smollm2():
    return nbkit.load_model("smollm2-135m")


@pytest.mark.parametrize("variant", ["pre", "post"])
def test_smollm2_speculative_text_is_its_plain_greedy_text(smollm2, variant):
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer("<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n")["input_ids"]])
    cfg = DrafterConfig.from_target(model, draft_vocab=512, norm_output=variant == "post")
    assert cfg.aux_layers == (1, 14, 26) and cfg.kv_heads == 3 and cfg.head_dim == 64
    drafter = EagleDrafter(cfg, model, vocab_ids=torch.arange(512))
    want = plain_greedy(model, ids, 12, eos=model.generation_config.eos_token_id)
    out = speculative_generate(model, drafter, ids, depth=3, max_new_tokens=12)
    # Ties aside, which the margin rules out: the smallest gap between the two best logits is far above rounding.
    with torch.no_grad():
        best = model(want).logits[0, ids.shape[1] - 1 : -1].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3
    assert torch.equal(out.sequences, want)
    report = drift_report(drafter, model, [ids], depth=2)
    assert by_step(report, "rms").shape == (1, 2)


# ---- reports ----


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("variant", ["post", "mtp"])
def test_report_holds_the_chain_its_control_and_the_targets_verdict(family, variant):
    drafter, (ids, found) = make(variant, family=family), material(family)
    report = drift_report(drafter, target(family), list(ids), depth=5)
    assert {len(column) for column in report.values()} == {10}
    assert report["prompt"].tolist() == [0] * 5 + [1] * 5 and report["k"].tolist() == [1, 2, 3, 4, 5] * 2
    chain = draft_chain(drafter, ids, feats_of(drafter, found), 5)
    assert by_step(report, "token").tolist() == chain.proposed.tolist()
    for name, value in measures(chain).items():
        np.testing.assert_allclose(by_step(report, "prompt_share" if name == "prompt" else name), value.numpy(), atol=1e-4)
    text = torch.cat([ids, chain.fed[:, 1:]], 1)
    again = target_features(target(family), text)
    beside = prefill_control(drafter, text, feats_of(drafter, again), 5, sink_at=chain.sink_at)
    for name, value in measures(beside).items():
        np.testing.assert_allclose(by_step(report, "control_" + ("prompt_share" if name == "prompt" else name)), value.numpy(), atol=1e-4)
    right = chain.proposed == again.logits[:, N - 1 :].argmax(-1)
    assert by_step(report, "correct").tolist() == right.tolist()
    assert by_step(report, "accepted").tolist() == right.long().cumprod(1).bool().tolist()


def test_report_fed_by_the_target_accepts_the_same_and_stays_on_its_text():
    ids = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(8))
    text = plain_greedy(target(), ids, 30)[0]
    prompts = [text[:n] for n in (2, 6, 13, 18, 25)]
    own, forced = (drift_report(trained(), target(), prompts, depth=6, teacher=t) for t in (False, True))
    assert own["accepted"].any() and not own["accepted"].all()
    assert own["accepted"].tolist() == forced["accepted"].tolist()
    first = by_step(forced, "correct")
    for row, prompt in enumerate(prompts):
        greedy = plain_greedy(target(), prompt[None], 6)[0, len(prompt) :]
        assert (by_step(forced, "token")[row] == greedy.numpy()).tolist() == first[row].tolist()


# ---- files ----


def test_saved_drafters_come_back_and_bind_again(tmp_path, monkeypatch):
    from nbkit import loaders
    from nbkit.loaders import models

    monkeypatch.setenv("NBKIT_DATA", str(tmp_path))
    drafter, (ids, found) = make("post+fc_norm", draft_vocab=20), material()
    drafter.set_vocab(torch.arange(0, 40, 2))
    entry = models.ProjectModel(summary="a drafter", recipe="drift-test", build="nbkit.methods.attention_drift.drafter:build")
    monkeypatch.setitem(models.MODELS, "drift-test", entry)
    card = dict(summary="a drafter", licence="MIT", recipe="drift-test", seed=0, metrics={})
    folder = loaders.save_model(drafter, "drift-test", card, config=drafter.cfg.to_dict())
    assert json.loads((folder / "config.json").read_text())["fc_norm"] is True
    loaded = nbkit.load_model("drift-test").model.bind(target())
    assert loaded.cfg == drafter.cfg and torch.equal(loaded.vocab_ids, drafter.vocab_ids)
    with torch.no_grad():
        assert torch.equal(loaded.ttt(ids, found.aux, 3)[-1].logits, drafter.ttt(ids, found.aux, 3)[-1].logits)
    # Half the size on disk, float32 again in memory.
    small = copy.deepcopy(drafter).half()
    half = loaders.save_model(small, "drift-test", card, config=drafter.cfg.to_dict())
    again = nbkit.load_model("drift-test").model.bind(target())
    for a, b in zip(again.parameters(), small.parameters(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())
    assert torch.equal(again.vocab_ids, drafter.vocab_ids) and drafter.fc.weight.dtype == torch.float32
    assert (half / "model.safetensors").stat().st_size < 0.7 * sum(4 * p.numel() for p in drafter.parameters())
    # Neither embedding nor head are in the file.
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert {"fc.weight", "fc_norm.0.weight", "fc_norm.2.weight", "layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight", "norm.weight",
            "d2t", "t2d"} <= names


def test_speculators_style_checkpoint_is_read_by_its_names(tmp_path):
    ids, found = material()
    drafter = make("post+fc_norm", draft_vocab=20)
    drafter.set_vocab(torch.arange(0, 40, 2))
    folder = write_checkpoint(drafter, tmp_path / "one")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4] and drafter.cfg.aux_layers == (0, 2, 3)
    assert (config["norm_output"], config["fc_norm"]) == (True, True)
    loaded = load_drafter(folder, target())
    assert loaded.cfg == drafter.cfg
    a, b = draft_chain(loaded, ids, found.aux, 4), draft_chain(drafter, ids, found.aux, 4)
    assert torch.equal(a.logits, b.logits) and torch.equal(a.proposed, b.proposed)
    np.testing.assert_allclose(by_step(drift_report(loaded, target(), list(ids), depth=4), "rms"), b.rms.numpy(), atol=1e-4)
    # Its own head is used, not the target's.
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    torch.testing.assert_close(draft_chain(load_drafter(folder, target()), ids, found.aux, 1).logits, 2 * b.logits[:, :1])


def test_older_key_names_own_embedding_and_flat_configuration(tmp_path):
    """The layout of the first EAGLE-3 files: midlayer.*, sizes at the top, no switches, layer numbers from the target."""
    ids, found = material()
    drafter = make("pre")
    folder = write_checkpoint(drafter, tmp_path / "one")
    config = json.loads((folder / "config.json").read_text())
    flat = {**config.pop("transformer_layer_config"), "rope_theta": 10000.0}
    del flat["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = {name.replace("layers.0.", "midlayer."): value for name, value in load_file(folder / "model.safetensors").items()}
    embed = target().get_input_embeddings().weight.detach()
    save_file({**tensors, "embed_tokens.weight": embed.clone()}, folder / "model.safetensors")
    loaded = load_drafter(folder, aux_layers=(0, 2, 3))
    assert loaded.cfg == drafter.cfg
    # With an embedding and a head of its own it runs without its target.
    assert torch.equal(draft_chain(loaded, ids, found.aux, 3).logits, draft_chain(drafter, ids, found.aux, 3).logits)
    assert load_drafter(folder, target()).cfg.aux_layers == (0, 2, 3)
    with pytest.raises(InputError, match="aux_layers"):
        load_drafter(folder)


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    folder = write_checkpoint(make("fc_norm"), tmp_path / "one")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def attempt(error, match, config=config, tensors=tensors, **options):
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(error, match=match):
            load_drafter(folder, target(), **options)

    attempt(UnsupportedModelError, "q_norm", tensors={**tensors, "layers.0.self_attn.q_norm.weight": torch.ones(8)})
    attempt(HashMismatchError, "fc_norm", tensors={k: v for k, v in tensors.items() if k != "fc_norm.1.weight"})
    attempt(HashMismatchError, "norm.weight", tensors={**tensors, "norm.weight": torch.ones(31)})
    attempt(HashMismatchError, "lm_head", tensors={**tensors, "lm_head.weight": torch.ones(7, 32)})
    layer = config["transformer_layer_config"]
    scaled = {**layer, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}
    attempt(UnsupportedModelError, "llama3", config={**config, "transformer_layer_config": scaled})
    attempt(UnsupportedModelError, "hidden size", config={**config, "target_hidden_size": 64})
    attempt(InputError, "hidden_size", config={**config, "transformer_layer_config": {}})
    attempt(InputError, "vocabulary", config={**config, "transformer_layer_config": {**layer, "vocab_size": 60}}, tensors={
        k: v for k, v in tensors.items() if k != "lm_head.weight"})
    attempt(InputError, "aux_layers", aux_layers=(0, 2, 4))
    # A norm that the file holds is applied even where the switch is missing from the configuration.
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "fc_norm"}))
    save_file(tensors, folder / "model.safetensors")
    assert load_drafter(folder, target()).cfg.fc_norm
    (folder / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="config.json"):
        load_drafter(folder)
    (folder / "config.json").unlink()
    with pytest.raises(MissingResourceError, match="config.json"):
        load_drafter(folder)
    for variant in ("gate", "mtp"):
        with pytest.raises(InputError, match="drafter"):
            write_checkpoint(make(variant), tmp_path / "two")


# ---- wrong inputs ----


@pytest.mark.parametrize(("change", "match"), [
    (dict(aux_layers=(0, 2, 4)), "aux_layers"), (dict(aux_layers=(2, 1, 3)), "aux_layers"), (dict(aux_layers=(0, 1)), "aux_layers"),
    (dict(draft_vocab=51), "draft_vocab"), (dict(draft_vocab=0), "draft_vocab"), (dict(window=0), "window"), (dict(carry_sink=-1), "carry_sink"),
    (dict(fc_norm=True, norm_before_fc=True), "fc_norm"), (dict(kind="tree"), "kind"), (dict(normoutput=True), "switch"), (dict(heads=3), "kv_heads"),
    (dict(head_dim=7), "head_dim"), (dict(kind="mtp", gate=True), "MTP"), (dict(hidden_size=0), "hidden_size"),
])
def test_configurations_that_make_no_sense(change, match):
    with pytest.raises(InputError, match=match):
        DrafterConfig.from_target(target(), **change)


def test_wrong_inputs_say_what_is_wrong():
    model, (ids, found) = target(), material()
    drafter = make("pre")
    with pytest.raises(InputError, match="unknown"):
        DrafterConfig.from_dict({**drafter.cfg.to_dict(), "depth": 3})
    with pytest.raises(InputError, match="configuration"):
        DrafterConfig.from_dict({"aux_layers": [0, 1, 2]})
    with pytest.raises(InputError, match="kind"):
        MTPHead(drafter.cfg)
    with pytest.raises(InputError, match="layers of the target"):
        DrafterConfig.from_target(LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 3})))
    for change, match in ((dict(vocab_size=60), "vocabulary"), (dict(hidden_size=64), "hidden size"), (dict(num_hidden_layers=4), "aux_layers")):
        with pytest.raises(InputError, match=match):
            EagleDrafter(drafter.cfg, LlamaForCausalLM(LlamaConfig(**{**SIZES, **change})))
    free = EagleDrafter(drafter.cfg)
    for call in (lambda: free.head, lambda: free.embed(ids)):
        with pytest.raises(InputError, match="no target"):
            call()
    reduced = make("pre", draft_vocab=5)
    for call in (lambda: reduced.head, lambda: reduced.vocab_ids):
        with pytest.raises(InputError, match="not chosen"):
            call()
    for wrong in ([1, 2, 3], [1, 1, 2, 3, 4], [1, 2, 3, 4, 50], [-1, 2, 3, 4, 5]):
        with pytest.raises(InputError, match="vocab_ids"):
            reduced.set_vocab(wrong)
    with pytest.raises(InputError, match="vocab_ids"):
        drafter.set_vocab([1])
    for layers in ((0, 1, 4), (0, 1, 9), (-1, 0, 1), ()):
        with pytest.raises(InputError, match="aux_layers"):
            target_features(model, ids, layers)
    for wrong in (ids[0], ids.float(), ids + 50, ids - 60, ids[:, :0]):
        with pytest.raises(InputError, match="input ids"):
            target_features(model, wrong)
    with pytest.raises(InputError, match="attention_mask"):
        target_features(model, ids, attention_mask=torch.ones_like(ids), cache=object())
    for call in (lambda d: drafter.ttt(ids, found.aux, d), lambda d: draft_chain(drafter, ids, found.aux, d),
                 lambda d: prefill_control(drafter, ids, found.aux, d), lambda d: drift_report(drafter, model, [ids[0]], depth=d),
                 lambda d: speculative_generate(model, drafter, ids[:1], depth=d), lambda d: acceptance([1], d)):
        for depth in (0, -1, 1.5):
            with pytest.raises(InputError, match="depth"):
                call(depth)
    for call in (lambda x: drafter.ttt(x, found.aux[:, :1], 2), lambda x: draft_chain(drafter, x, found.aux, 2)):
        with pytest.raises(InputError, match="tokens"):
            call(ids[:, :1])
    with pytest.raises(InputError, match="tokens"):
        prefill_control(drafter, ids[:, :5], found.aux, 5)
    with pytest.raises(InputError, match="prompt"):
        drift_report(drafter, model, [ids[0, :1]])
    with pytest.raises(InputError, match="prompts"):
        drift_report(drafter, model, [])
    with pytest.raises(InputError, match="tokenizer"):
        drift_report(drafter, model, ["text"])
    with pytest.raises(InputError, match="column"):
        by_step(drift_report(drafter, model, [ids[0]], depth=1), "norm")
    for feats in (found.last, found.aux[:1], found.aux[:, :3]):
        with pytest.raises(InputError, match="feats"):
            drafter.ttt(ids, feats, 2)
        with pytest.raises(InputError, match="feats"):
            draft_chain(drafter, ids, feats, 2)
    for starts in (torch.tensor([[0], [N - 1]]), torch.tensor([[-1], [0]]), torch.tensor([0, 1]), torch.zeros(2, 0).long()):
        with pytest.raises(InputError, match="starts"):
            drafter.ttt(ids, found.aux, 2, starts=starts)
    with pytest.raises(InputError, match="features"):
        make("mtp").pick_features(found.aux, None)
    with pytest.raises(InputError, match="teacher"):
        draft_chain(drafter, ids, found.aux, 4, teacher=ids[:, :2])
    with pytest.raises(InputError, match="key_mask"):
        draft_chain(drafter, ids, found.aux, 4, key_mask=torch.ones_like(ids).bool())
    with pytest.raises(InputError, match="recent"):
        draft_chain(drafter, ids, found.aux, 4, recent=0)
    for option, match in ((dict(noise=-1.0), "noise"), (dict(path="key"), "path"), (dict(window=-1), "window"), (dict(carry_sink=1.5), "carry_sink")):
        with pytest.raises(InputError, match=match):
            Intervention(**option)
    for option, match in ((dict(max_new_tokens=0), "max_new"), (dict(do_sample=True, temperature=0.0), "temperature")):
        with pytest.raises(InputError, match=match):
            speculative_generate(model, drafter, ids[:1], **option)
    with pytest.raises(InputError, match="one prompt"):
        speculative_generate(model, drafter, ids)
    with pytest.raises(InputError, match="accepted"):
        acceptance([4], 3)
    with pytest.raises(InputError, match="size"):
        frequent_tokens(ids, 0, 50)


def test_training_refuses_what_it_cannot_use():
    model, (ids, found) = target(), material()
    drafter = make("pre")
    ready = [Batch(ids, found.aux, found.last)]
    for option, match in ((dict(ttt=0), "ttt"), (dict(steps=0), "steps"), (dict(batch=0), "batch"), (dict(ttt=13), "tokens")):
        with pytest.raises(InputError, match=match):
            fit_drafter(drafter, model, ready, **{"steps": 1, **option})
    for data, match in (([], "data"), (["a text"], "tokenizer"), ([ids[0], ids[0, :5]], "rows of 5 to 14"), (ids[None], "data")):
        with pytest.raises(InputError, match=match):
            fit_drafter(drafter, model, data, steps=1)
    with pytest.raises(InputError, match="mask"):
        fit_drafter(drafter, model, ids, steps=1, mask=ids[:, :3].bool())
    with pytest.raises(InputError, match="model"):
        fit_drafter(drafter, None, ids, steps=1)
    with pytest.raises(InputError, match="no target"):
        fit_drafter(EagleDrafter(drafter.cfg), None, ready, steps=1)
    with pytest.raises(InputError, match="no token to train on"):
        ttt_loss(drafter, Batch(ids, found.aux, found.last, torch.zeros_like(ids).bool()))
    broken = [Batch(ids, found.aux * float("nan"), found.last)]
    with pytest.raises(InputError, match="loss"):
        fit_drafter(drafter, model, broken, steps=1)


def test_texts_are_tokenised_and_choose_the_draft_vocabulary():
    class Letters:
        def __call__(self, text):
            return {"input_ids": [ord(c) - ord("A") for c in text]}

    ids = plain_greedy(target(), torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(8)), 40)
    text = "".join(chr(ord("A") + i) for i in ids[0].tolist())
    drafter = EagleDrafter(DrafterConfig.from_target(target(), draft_vocab=12))
    fit_drafter(drafter, target(), [text, text[:20]], tokenizer=Letters(), steps=2, batch=1, ttt=2)
    assert drafter.vocab_ids.tolist() == frequent_tokens(torch.cat([ids[0], ids[0, :20]]), 12, 50).tolist()


def test_a_bound_drafter_refuses_a_target_of_another_vocabulary():
    def tiny(vocabulary):
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1)
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)).eval()

    model, other, ids = tiny(40), tiny(41), torch.arange(3, 9)
    drafter = EagleDrafter(DrafterConfig.from_target(model), model)
    for call in (lambda: speculative_generate(other, drafter, ids), lambda: drift_report(drafter, other, [ids])):
        with pytest.raises(InputError, match="vocabulary of the target"):
            call()
