"""Exact facts about the drafters of attention_drift; `test_identity_NN` are the exact identities of the method."""

import itertools
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nbkit.errors import InputError, UnsupportedModelError
from nbkit.methods.attention_drift import (
    Batch,
    DrafterConfig,
    EagleDrafter,
    Intervention,
    MTPHead,
    build,
    coverage,
    default_aux_layers,
    fit_drafter,
    frequent_tokens,
    rms,
    target_features,
    ttt_loss,
)

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None)
SWITCHES = {
    "pre": {}, "post": dict(norm_output=True), "post+fc_norm": dict(norm_output=True, fc_norm=True), "fc_norm": dict(fc_norm=True),
    "gate": dict(gate=True), "gate+post": dict(gate=True, norm_output=True), "residual-norm": dict(norm_before_residual=True),
    "norm_before_fc": dict(norm_before_fc=True), "mtp": dict(kind="mtp"),
}
N = 14


@lru_cache
def target(family="llama"):
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False))
    # Larger weights than usual, so that the distributions are far from uniform.
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.mul_(25 if "embed" in name or "head" in name else 6)
    return model.eval()


def make(variant="pre", seed=0, family="llama", **more):
    cfg = DrafterConfig.from_target(target(family), **{**SWITCHES[variant], **more})
    return (MTPHead if cfg.kind == "mtp" else EagleDrafter)(cfg, target(family), seed=seed)


@lru_cache
def material(family="llama", rows=2, n=N):
    ids = torch.randint(0, 50, (rows, n), generator=torch.Generator().manual_seed(1))
    return ids, target_features(target(family), ids)


def feats_of(drafter, found):
    return drafter.pick_features(found.aux, found.last)


def teacher_chain(drafter, tokens, feats, t, depth, **options):
    """Chain of ``depth`` steps from start t by single inference steps, fed the text's own tokens."""
    with torch.no_grad():
        g = drafter.fuse(feats[:, : t + 1])
        out = [drafter.step(drafter.embed(tokens[:, 1 : t + 2]), g, torch.arange(t + 1), attention=True, **options)]
        f = out[0].feedback[:, -1:]
        for j in range(2, depth + 1):
            step = drafter.step(drafter.embed(tokens[:, t + j : t + j + 1]), f, torch.tensor([t + j - 1]), out[-1].kv, attention=True, **options)
            out.append(step)
            f = step.feedback
    return out


# ---- the identities ----


@pytest.mark.parametrize("variant", sorted(SWITCHES))
def test_identity_01_first_ttt_step_is_the_prefill(variant):
    drafter, (ids, found) = make(variant), material()
    feats = feats_of(drafter, found)
    with torch.no_grad():
        first = drafter.ttt(ids, feats, 1)[0]
        prefill = drafter.step(drafter.embed(ids[:, 1:]), drafter.fuse(feats[:, :-1]), torch.arange(N - 1))
    torch.testing.assert_close(first.logits, prefill.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("variant", sorted(SWITCHES))
@pytest.mark.parametrize("limits", [(None, 0), (4, 0), (3, 2), (1, 0)])
def test_identity_02_ttt_step_is_an_inference_chain_on_the_same_tokens(variant, family, limits):
    drafter, (ids, found) = make(variant, family=family, window=limits[0], carry_sink=limits[1]), material(family)
    feats = feats_of(drafter, found)
    with torch.no_grad():
        unrolled = drafter.ttt(ids, feats, 6, attention=True)
    for t in (0, 1, 5, N - 7):
        for j, single in enumerate(teacher_chain(drafter, ids, feats, t, 6), 1):
            torch.testing.assert_close(unrolled[j - 1].logits[:, t], single.logits[:, -1], rtol=0, atol=1e-4)
            torch.testing.assert_close(unrolled[j - 1].feedback[:, t], single.feedback[:, -1], rtol=0, atol=1e-4)
            # The same weights, text first and then the own chain; the parallel form holds zeros for later text.
            mine = unrolled[j - 1].attention[:, :, t]
            mine = torch.cat([mine[..., : t + 1], mine[..., N - 1 :]], -1)
            torch.testing.assert_close(mine, single.attention[:, :, -1], rtol=0, atol=1e-4)


def test_identity_03_pre_and_post_agree_at_step_1_and_differ_from_step_2():
    (ids, found), pre, post = material(), make("pre"), make("post")
    assert all(torch.equal(a, b) for a, b in zip(pre.state_dict().values(), post.state_dict().values(), strict=True))
    with torch.no_grad():
        a, b = pre.ttt(ids, found.aux, 3), post.ttt(ids, found.aux, 3)
    assert torch.equal(a[0].logits, b[0].logits)
    for k in (1, 2):
        assert (a[k].logits - b[k].logits).abs().max() > 1e-2


# ---- features, training ----


def test_features_are_the_raw_streams_after_the_layers_and_the_normed_last_state():
    model, (ids, found) = target(), material()
    seen = {}
    hooks = [layer.register_forward_hook(lambda _m, _i, out, i=i: seen.__setitem__(i, out[0] if isinstance(out, tuple) else out))
             for i, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    assert default_aux_layers(5) == (0, 2, 3)
    torch.testing.assert_close(found.aux, torch.cat([seen[0], seen[2], seen[3]], -1))
    torch.testing.assert_close(found.last, model.model.norm(seen[4]))
    torch.testing.assert_close(found.logits, logits)
    assert target_features(model, ids, logits=False).logits is None


def naive_loss(drafter, ids, found, mask, ttt, decay):
    """The loss from one inference chain per start, position by position."""
    total = 0.0
    chains = {t: teacher_chain(drafter, ids, feats_of(drafter, found), t, min(ttt, N - 1 - t)) for t in range(N - 2)}
    for j in range(1, ttt + 1):
        terms = []
        for b, t in itertools.product(range(len(ids)), range(N - 2)):
            if t + j + 1 < N and mask[b, t + j + 1]:
                p = F.linear(found.last[b, t + j], drafter.head[0]).softmax(-1)
                terms.append(-(p * chains[t][j - 1].logits[b, -1].log_softmax(-1)).sum())
        total = total + decay ** (j - 1) * torch.stack(terms).mean()
    return total


@pytest.mark.parametrize("variant", ["pre", "post+fc_norm", "mtp"])
@pytest.mark.parametrize("reduced", [False, True])
def test_loss_is_the_mean_over_inference_chains_of_masked_tokens(variant, reduced):
    drafter, (ids, found) = make(variant, draft_vocab=20 if reduced else None), material()
    if reduced:
        drafter.set_vocab(torch.arange(3, 43, 2))
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.6
    got = ttt_loss(drafter, Batch(ids, found.aux, found.last, mask), ttt=4, step_decay=0.7)
    torch.testing.assert_close(got.loss.detach(), naive_loss(drafter, ids, found, mask, 4, 0.7), rtol=1e-5, atol=1e-5)


def test_left_padding_changes_nothing_at_real_positions():
    drafter, (ids, found) = make("post", window=5, carry_sink=1), material()
    pad = 3
    padded = F.pad(ids, (pad, 0), value=7)
    attention_mask = F.pad(torch.ones_like(ids), (pad, 0))
    again = target_features(target(), padded, attention_mask=attention_mask)
    torch.testing.assert_close(again.aux[:, pad:], found.aux, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        plain = drafter.ttt(ids, found.aux, 4)
        key_mask = attention_mask[:, :-1].bool()
        positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)[:, :-1]
        shifted = drafter.ttt(padded, again.aux, 4, key_mask=key_mask, positions=positions)
    for a, b in zip(plain, shifted, strict=True):
        torch.testing.assert_close(a.logits, b.logits[:, pad:], rtol=0, atol=1e-3)


def test_right_padding_reaches_no_earlier_position():
    drafter, (ids, _) = make("pre"), material()
    other = ids.clone()
    other[:, 10:] = 3
    with torch.no_grad():
        a = drafter.ttt(ids, target_features(target(), ids).aux, 3)
        b = drafter.ttt(other, target_features(target(), other).aux, 3)
    for j in (1, 2, 3):
        torch.testing.assert_close(a[j - 1].logits[:, : 10 - j], b[j - 1].logits[:, : 10 - j], rtol=0, atol=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_training_lowers_the_loss_at_every_unrolled_step_and_resumes_exactly(tmp_path, bf16):
    ids, found = material(rows=8, n=24)
    data = [Batch(ids[i : i + 4], found.aux[i : i + 4], found.last[i : i + 4]) for i in (0, 4)]
    options = dict(ttt=3, steps=60, lr=3e-3, bf16=bf16, every=20)
    whole, logged = make("post"), []
    before = [ttt_loss(whole, one, ttt=3).parts for one in data]
    result = fit_drafter(whole, target(), data, log=logged.append, **options)
    after = [ttt_loss(whole, one, ttt=3).parts for one in data]
    p = found.logits.double().softmax(-1)
    floor = -(p * p.log()).sum(-1).mean().item()
    assert all(b - floor < 0.5 * (a - floor) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    assert len(result.losses) == 60 and result.tokens == 60 * 4 * 24 and len(logged) == 3

    class Stop(Exception):
        pass

    def stop(line):
        raise Stop

    parts, path = make("post"), tmp_path / "checkpoint.pt"
    with pytest.raises(Stop):
        fit_drafter(parts, target(), data, log=lambda line: stop(line) if "step 40/" in line else None, checkpoint=path, **options)
    resumed = make("post", seed=9)
    fit_drafter(resumed, target(), data, checkpoint=path, **options)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    with pytest.raises(InputError, match="checkpoint"):
        fit_drafter(resumed, target(), data, checkpoint=path, **{**options, "lr": 1e-3})


def test_rows_give_the_same_training_as_their_precomputed_features():
    ids, found = material(rows=8, n=24)
    a, b = make("pre"), make("pre")
    fit_drafter(a, target(), ids, steps=4, batch=8, lr=1e-3, ttt=2)
    first = fit_drafter(b, target(), lambda step: _shuffled(ids, found, step), steps=4, lr=1e-3, ttt=2)
    assert len(first.losses) == 4
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def _shuffled(ids, found, step):
    order = torch.randperm(8, generator=torch.Generator().manual_seed(step))
    return Batch(ids[order], found.aux[order], found.last[order])


def test_identity_13_no_gradient_reaches_the_target():
    model = target()
    drafter, (ids, found) = make("gate+post"), material()
    ttt_loss(drafter, Batch(ids, found.aux, found.last), ttt=3).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    # hidden_norm at step 1 and every other weight of the drafter does receive one.
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    embedding = model.get_input_embeddings().weight
    assert not any(p is embedding for p in drafter.parameters()) and not any("embed" in key for key in drafter.state_dict())
