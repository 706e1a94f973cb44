"""Facts about the measurements of attention_drift and about the recipe that measures the drafters of SmolLM2."""

import json
from functools import lru_cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nbkit
from nbkit.errors import InputError
from nbkit.methods.attention_drift import DrafterConfig, EagleDrafter, Intervention, MTPHead, draft_chain, prefill_control, rms, target_features
from nbkit.methods.attention_drift import evaluate as measure
from nbkit.recipes import drift_rollouts
from nbkit.recipes import drift_smollm2_eval as smol

P, N, DEPTH, FIRST = 3, 24, 4, 9


@lru_cache
def target():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, pad_token_id=None,
    ))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.mul_(25 if "embed" in name or "head" in name else 6)
    return model.eval()


@lru_cache
def material(greedy: bool):
    """(tokens, features) of texts: 10 random tokens, then the target's greedy choice, or random ones all the way."""
    tokens = torch.randint(12, (P, N if not greedy else 10), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        while tokens.shape[1] < N:
            tokens = torch.cat([tokens, target()(tokens).logits[:, -1:].argmax(-1)], 1)
        return tokens, target_features(target(), tokens)


def make(**switches):
    cfg = DrafterConfig.from_target(target(), **switches)
    return (MTPHead if cfg.kind == "mtp" else EagleDrafter)(cfg, target(), seed=1)


def chain(drafter, tokens, feats, start, what=None, teacher=True):
    forced = tokens[:, start + 2 : start + 1 + DEPTH] if teacher else None
    return draft_chain(drafter, tokens[:, : start + 2], feats, DEPTH, teacher=forced, intervention=what or Intervention())


@pytest.mark.parametrize("what", [Intervention(), Intervention(pin=True), Intervention(window=6, carry_sink=1)], ids=["clean", "pin", "window"])
@pytest.mark.parametrize("switches", [{}, {"norm_output": True}, {"kind": "mtp"}], ids=["pre", "post", "mtp"])
def test_accepted_drafts_are_those_of_real_chains(switches, what):
    drafter, (tokens, seen) = make(**switches), material(True)
    feats = drafter.pick_features(seen.aux, seen.last)
    counts = measure.accepted_drafts(drafter, tokens, feats, first=FIRST, depth=DEPTH, rows=2, intervention=what)
    assert counts.shape == (P, N - 1 - DEPTH - FIRST)
    for column, start in enumerate(range(FIRST, N - 1 - DEPTH)):
        # The chain reads its own proposals here, as it does in speculative decoding.
        proposed = chain(drafter, tokens, feats, start, what, teacher=False).proposed
        right = (proposed == tokens[:, start + 2 : start + 2 + DEPTH]).long()
        assert counts[:, column].tolist() == right.cumprod(1).sum(1).tolist()


def test_forced_steps_are_means_over_teacher_forced_chains():
    drafter, (tokens, seen) = make(), material(False)
    best = seen.logits.argmax(-1)
    ends = torch.tensor([N, N - 3, FIRST + DEPTH + 1])
    out = measure.forced_steps(drafter, tokens, seen.aux, best, first=FIRST, depth=DEPTH, ends=ends, rows=2)
    for row, end in enumerate(ends.tolist()):
        starts = [t for t in range(FIRST, N - 1 - DEPTH) if t + DEPTH + 1 < end]
        if not starts:
            assert all(out[name][row].isnan().all() for name in out)
            continue
        chains = [(t, chain(drafter, tokens, seen.aux, t)) for t in starts]
        accuracy = torch.stack([(c.proposed[row] == best[row, t + 1 : t + 1 + DEPTH]).float() for t, c in chains]).mean(0)
        torch.testing.assert_close(out["accuracy"][row], accuracy)
        for name in ("rms", "cos", "update"):
            torch.testing.assert_close(out[name][row], torch.stack([getattr(c, name)[row] for _, c in chains]).mean(0), atol=2e-4, rtol=1e-4)
    # Without ``ends`` every text counts to its end.
    whole = measure.forced_steps(drafter, tokens, seen.aux, best, first=FIRST, depth=DEPTH)
    torch.testing.assert_close(whole["accuracy"][0], out["accuracy"][0])


def test_drift_measures_average_chains_and_their_controls():
    drafter, (tokens, seen) = make(norm_output=True), material(False)
    out = measure.drift_measures(drafter, tokens, seen.aux, starts=(9, 13), depth=DEPTH, rows=2)
    chains = [chain(drafter, tokens, seen.aux, t) for t in (9, 13)]
    controls = [prefill_control(drafter, tokens[:, : t + 1 + DEPTH], seen.aux, DEPTH) for t in (9, 13)]
    for name in ("sink", "recent", "entropy", "key_cos", "rms"):
        torch.testing.assert_close(out[name], sum(getattr(c, name) for c in chains) / 2, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out["control_" + name], sum(getattr(c, name) for c in controls) / 2, atol=1e-4, rtol=1e-4)
    # Step 1 reads a true feature in both.
    torch.testing.assert_close(out["sink"][:, 0], out["control_sink"][:, 0], atol=1e-4, rtol=1e-4)


def test_acceptance_by_prompt_counts_whole_chains_before_the_end():
    counts = torch.tensor([[4, 2, 0, 1], [3, 3, 3, 3]])
    out = measure.acceptance_by_prompt(counts, 4, first=10, ends=[18, 15])
    # The chain from start t predicts tokens t + 2 .. t + 5, so with the end at 18 starts 10, 11, 12 count, at 15 none.
    assert out["starts"] == [3, 0] and out["tau"] == [2.0, None] and out["rates"][1] == [None] * 4
    assert out["tau"][0] == pytest.approx(sum(out["rates"][0]), abs=1e-3)
    assert out["rates"][0] == sorted(out["rates"][0], reverse=True)


def test_sinks_of_target_and_drafter():
    before = target().config._attn_implementation
    tokens, seen = material(False)
    position, mass = measure.target_sinks(target(), tokens)
    assert target().config._attn_implementation == before
    assert position.shape == mass.shape == (5, 4) and bool((mass > 0).all()) and bool((mass <= 1).all())
    # Uniform attention: every early key has the same mean, and ties go to the first.
    weights = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    position, mass = measure.head_sinks(weights[None, None])
    assert position.tolist() == [0] and mass.item() == pytest.approx((1 / 5 + 1 / 6 + 1 / 7 + 1 / 8) / 4)
    drafter = make()
    position, mass = measure.drafter_sinks(drafter, tokens, seen.aux)
    attention = drafter.ttt(tokens, seen.aux, 1, attention=True)[0].attention[..., : N - 1]
    late = attention[:, :, (N - 1) // 2 :].mean((0, 2))
    assert position.tolist() == late.argmax(-1).tolist()
    torch.testing.assert_close(mass, late.max(-1).values)


def test_scaled_stream_changes_the_high_stream_alone_and_fc_norm_does_not_see_it():
    tokens, seen = material(True)
    scaled = measure.scaled_stream(seen.aux, 10.0)
    d = seen.aux.shape[-1] // 3
    assert torch.equal(scaled[..., : 2 * d], seen.aux[..., : 2 * d]) and torch.equal(scaled[..., 2 * d :], 10 * seen.aux[..., 2 * d :])
    for switches, same in (({"fc_norm": True}, True), ({}, False)):
        drafter = make(**switches)
        assert torch.allclose(rms(drafter.fuse(scaled)), rms(drafter.fuse(seen.aux)), rtol=1e-3) == same


def test_first_repeat_and_numbers():
    assert measure.first_repeat([5, 5, 5, 5], 2) == 1
    assert measure.first_repeat([], 3) == 0
    assert measure.numbers(torch.tensor([[0.12345, float("nan")]])) == [[0.1235, None]] or measure.numbers(
        torch.tensor([[0.12345, float("nan")]])
    ) == [[0.1234, None]]
    with pytest.raises(InputError, match="gram"):
        measure.first_repeat([1], 0)


def test_starts_outside_the_text_are_refused():
    drafter, (tokens, seen) = make(), material(True)
    with pytest.raises(InputError, match="first"):
        measure.accepted_drafts(drafter, tokens, seen.aux, first=N - 1 - DEPTH, depth=DEPTH)
    with pytest.raises(InputError, match="starts"):
        measure.drift_measures(drafter, tokens, seen.aux, starts=[N - DEPTH], depth=DEPTH)
    with pytest.raises(InputError, match="starts"):
        measure.drift_measures(drafter, tokens, seen.aux, starts=[], depth=DEPTH)


def test_every_claim_has_a_criterion():
    assert list(measure.CRITERIA) == [f"C{number}" for number in range(1, 15)]


# Texts and the recipe for SmolLM2 -----------------------------------------------------------------------------------------------


def test_templates_change_what_stands_around_the_same_words(monkeypatch):
    tokenizer = smol._smol().tokenizer
    # Every call would read and encode all documents again.
    once = lru_cache(lambda kind, split: nbkit.loaders.load_text(kind, split=split, tokenizer=tokenizer))
    monkeypatch.setattr(nbkit, "load_text", lambda kind, split, **_: once(kind, split))
    ids = {template: smol.template_ids(tokenizer, template, 8) for template in smol.TEMPLATES}
    trained, words = ids["as trained"], ids["neither"]
    assert trained.shape == (8, drift_rollouts.PROMPT)
    assert torch.equal(ids["no first token"], trained[:, 1:])
    assert torch.equal(ids["no template"], torch.cat([trained[:, :1], words], 1))
    assert trained[0, 0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    text = tokenizer.decode(words[0])
    assert text in tokenizer.decode(trained[0]) and "<|im_start|>" not in text
    long = smol.long_ids(tokenizer)
    assert long.shape == (smol.LONG, smol.LONG_PROMPT)
    # The same prompts, only longer.
    assert torch.equal(long[:8, :100], trained[:, :100])


def test_answers_end_at_the_end_of_text_or_where_they_repeat():
    prompt = 3
    held = {
        "tokens": torch.tensor([[9, 9, 9, 1, 2, 3, 1, 2, 4], [9, 9, 9, 1, 2, 3, 4, 5, 6]]),
        "mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0, 0]]).bool(),
    }
    assert smol.answer_ends(held, prompt, 2) == [6, 6]


def test_finished_answers_are_read_and_not_made_again(tmp_path, monkeypatch):
    calls = []

    def answer(model, ids, greedy, generator, tokens):
        calls.append(len(ids))
        assert bool(greedy.all())
        return {"tokens": torch.cat([ids, ids.new_zeros(len(ids), tokens)], 1)}

    monkeypatch.setattr(drift_rollouts, "answer", answer)
    monkeypatch.setattr(smol, "_smol", lambda: type("Loaded", (), {"model": None}))
    ids = torch.arange(10).view(5, 2)
    lines = []
    first = smol.greedy_answers(tmp_path / "a.safetensors", ids, 3, 2, lines.append)
    again = smol.greedy_answers(tmp_path / "a.safetensors", ids, 3, 2, lines.append)
    assert calls == [2, 2, 1] and len(lines) == 1
    assert torch.equal(first["tokens"], again["tokens"]) and first["tokens"].shape == (5, 5)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_stopped_evaluation_goes_on_with_the_missing_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("NBKIT_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    work = tmp_path / "work"
    work.mkdir()
    calls = []

    class Broken(Exception):
        pass

    def part(name, broken):
        def compute(drafter, texts):
            calls.append(name)
            if broken():
                raise Broken(name)
            return {f"value_{name}": [len(calls)]}

        return compute

    state = {"broken": True}
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    texts = {name: {"tokens": tokens, "mask": tokens.bool()} for name in (*smol.TEMPLATES, "long", "sampled")}
    drafter = make()
    monkeypatch.setattr(drafter, "bind", lambda model: drafter)
    loaded = type("Loaded", (), {"model": drafter, "tokenizer": None})
    monkeypatch.setattr(smol, "_smol", lambda: loaded)
    monkeypatch.setattr(nbkit, "load_model", lambda name: loaded)
    monkeypatch.setattr(smol, "make_texts", lambda work, log: texts)
    monkeypatch.setattr(smol, "_texts", lambda work: texts)
    monkeypatch.setattr(smol, "PARTS", {"drift": part("drift", lambda: False), "noise": part("noise", lambda: state["broken"])})
    monkeypatch.setattr(smol, "speculative_row", speculative)
    monkeypatch.setattr(smol, "target_facts", facts)
    monkeypatch.setattr(drift_rollouts, "prompts", lambda tokenizer, split, count: [])
    monkeypatch.setattr(smol, "answer_ends", lambda held, prompt: [prompt])
    with pytest.raises(nbkit.errors.RunError):
        smol.run_smol(work, tmp_path / "data", lambda line: None)
    assert calls == ["drift", "drift", "noise", "noise"]
    state["broken"] = False
    smol.run_smol(work, tmp_path / "data", lambda line: None)
    assert calls[4:] == ["noise", "noise"]
    data = nbkit.load_recording("drift-smollm2").data
    assert [cell["variant"] for cell in data["cells"]] == ["pre", "post"]
    assert data["cells"][0]["value_drift"] == [1] and data["cells"][1]["value_noise"] == [6]
    assert data["aux_rms"] == [[1.0]]


def speculative(job):
    return {"variant": job["variant"]}


def facts(job):
    return {"aux_rms": [[1.0]]}


@lru_cache
def recorded():
    return nbkit.load_recording("drift-smollm2").data


def test_recorded_smollm2_has_what_its_format_says():
    data = recorded()
    assert [cell["variant"] for cell in data["cells"]] == ["pre", "post"]
    for cell in data["cells"]:
        assert len(cell["tau"]) == len(cell["tau_pin"]) == smol.GREEDY
        for name in ("accuracy", "rms", "cos", "update"):
            assert all(len(row) == data["depth"] for row in cell[name])
        for name, rows in cell["drift"].items():
            assert len(rows) == len(cell["drift_rows"]), name
        for template, found in cell["templates"].items():
            assert template in smol.TEMPLATES
            for tau, rates in zip(found["tau"], found["rates"], strict=True):
                assert (tau is None) == (rates[0] is None)
                assert tau is None or (rates == sorted(rates, reverse=True) and tau == pytest.approx(sum(rates), abs=2e-3))
        shares = [[cell["drift"][name] for name in ("sink", "recent_text", "chain", "prompt")]]
        total = torch.tensor(shares).sum(1)
        assert torch.allclose(total, torch.ones_like(total), atol=5e-4)
    post = data["cells"][1]
    assert max(value for row in post["rms"] for value in row if value is not None) <= post["norm_bound"] + 1e-4
    # Speculative decoding gave what plain greedy decoding gives, in every try.
    assert all(row["equal"] for row in data["speculative"])
    assert json.dumps(data)


def test_recorded_smollm2_is_what_the_code_measures_today(tmp_path):
    model, tokenizer = smol._smol()
    # One prompt of 32: its greedy answer is made again, and the drafters are measured on it again.
    held = smol.greedy_answers(tmp_path / "one.safetensors", smol.template_ids(tokenizer, "as trained", 1), smol.ANSWER, 1, lambda line: None)
    for cell in recorded()["cells"]:
        drafter = nbkit.load_model(f"drift-smollm2-{cell['variant']}").model.float().bind(model)
        now, then = smol._tau(drafter, held, depth=smol.DRAFT_DEPTH, answer=smol.ANSWER), cell["templates"]["as trained"]
        assert now["starts"][0] == then["starts"][0]
        # Two of some forty chains may fall the other way, since sums of a batch of one are rounded otherwise.
        assert now["tau"][0] == pytest.approx(then["tau"][0], abs=2 / now["starts"][0] + 1e-4)
