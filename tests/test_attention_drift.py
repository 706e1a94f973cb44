"""Exact facts about the drafters of attention_drift; `test_identity_NN` are the exact identities of the method."""

import itertools
import math
from functools import lru_cache

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nbkit.errors import InputError
from nbkit.methods.attention_drift import (
    Batch,
    DrafterConfig,
    EagleDrafter,
    Intervention,
    MTPHead,
    build,
    coverage,
    default_aux_layers,
    draft_chain,
    fit_drafter,
    frequent_tokens,
    measures,
    prefill_control,
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
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
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


# ---- against another implementation ----


def wave(*shape, step, scale=1.0):
    """Numbers that any program can repeat: scale * sin(step * n), n = 1, 2, ... in row order."""
    n = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return (scale * torch.sin(step * n)).float().view(shape)


# Logits of tokens 0, 7 and 19 at start 5 in unrolled steps 1 to 4, from Eagle3DraftModel.forward of speculators 0.9.0 (eager attention, Llama
# layer, float32) with the same state dict; all starts agreed within 1e-5.
GOLDEN = {
    "pre": [[3.6878, 3.5714, 3.7026], [4.0267, 3.883, 4.0336], [2.9439, 2.7497, 2.8992], [3.1434, 2.9327, 3.0938]],
    "post": [[3.6878, 3.5714, 3.7026], [3.3158, 2.9911, 3.2063], [1.9963, 1.6185, 1.8286], [1.9324, 1.5413, 1.756]],
    "post+fc_norm": [[2.2679, 3.8505, 3.2002], [-5.1421, -3.9575, -4.5922], [5.409, 4.3905, 4.9576], [5.7924, 4.3811, 5.1301]],
    "norm_before_fc": [[6.3289, 5.7061, 6.1182], [1.5883, 1.4057, 1.5208], [-1.0517, -1.0227, -1.0583], [-0.0459, 0.0786, 0.0226]],
    "residual-norm": [[2.6876, 2.6398, 2.7191], [1.2721, 1.2571, 1.2913], [0.6159, 0.512, 0.5712], [0.3714, 0.2616, 0.3182]],
}


@pytest.mark.parametrize("variant", sorted(GOLDEN))
def test_unrolled_logits_equal_those_of_speculators(variant):
    sizes = dict(hidden_size=8, intermediate_size=12, heads=4, kv_heads=2, head_dim=2, aux_layers=(0, 2, 3), vocab_size=20)
    cfg = DrafterConfig(**sizes, **SWITCHES[variant])
    drafter = EagleDrafter(cfg)
    with torch.no_grad():
        for k, (_, p) in enumerate(sorted(drafter.named_parameters())):
            p.copy_(wave(*p.shape, step=0.7 + 0.1 * k, scale=0.6) if p.ndim == 2 else 1 + wave(*p.shape, step=0.7 + 0.1 * k, scale=0.5))
        drafter.use_own(embed=wave(20, 8, step=1.3), head=wave(20, 8, step=1.9))
        steps = drafter.ttt(torch.tensor([[1, 7, 3, 12, 19, 5, 0, 7, 11, 2]]), wave(1, 10, 24, step=0.37, scale=2.0), 4)
    for step, want in zip(steps, GOLDEN[variant], strict=True):
        torch.testing.assert_close(step.logits[0, 5, [0, 7, 19]], torch.tensor(want), rtol=0, atol=2e-4)


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


@pytest.mark.parametrize("variant", ["pre", "gate+post", "residual-norm", "mtp"])
@pytest.mark.parametrize("option", [{}, dict(window=4, carry_sink=1), dict(noise=0.0, pin=True)])
def test_unrolling_some_starts_gives_what_all_of_them_give(variant, option):
    drafter, (ids, found) = make(variant), material()
    feats, starts = feats_of(drafter, found), torch.tensor([[7, 2, 11], [0, 12, 5]])
    with torch.no_grad():
        whole = drafter.ttt(ids, feats, 4, intervention=Intervention(**option), attention=True)
        some = drafter.ttt(ids, feats, 4, intervention=Intervention(**option), attention=True, starts=starts)
    for a, b in zip(whole, some, strict=True):
        for row in range(2):
            torch.testing.assert_close(a.feedback[row, starts[row]], b.feedback[row], rtol=0, atol=1e-5)
            torch.testing.assert_close(a.attention[row, :, starts[row]], b.attention[row], rtol=0, atol=1e-5)
            torch.testing.assert_close(a.keys[row, :, starts[row]], b.keys[row], rtol=0, atol=1e-5)


def test_loss_leaves_out_starts_that_no_step_needs():
    """An answer at the end of two rows, longer in one: the loss of all chains, from the starts that matter."""
    (ids, found), drafter = material(), make("post")
    mask = torch.zeros_like(ids).bool()
    mask[0, 9:] = mask[1, 12:] = True
    seen = []
    real = drafter.ttt
    drafter.ttt = lambda *a, **k: seen.append(k["starts"]) or real(*a, **k)
    few = ttt_loss(drafter, Batch(ids, found.aux, found.last, mask), ttt=3)
    assert seen[0].shape == (2, 7) and seen[0][0].tolist() == [5, 6, 7, 8, 9, 10, 11] and seen[0][1].tolist()[:4] == [8, 9, 10, 11]
    counted = F.pad(mask[:, 1:], (0, 1))
    assert few.counted == [sum(int(counted[b, t + j]) for b in range(2) for t in range(N - 1) if t + j < N) for j in (1, 2, 3)]
    torch.testing.assert_close(few.loss.detach(), naive_loss(drafter, ids, found, mask, 3, 0.8), rtol=1e-5, atol=1e-5)


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


def test_autocast_leaves_the_residual_stream_in_float32():
    drafter, (ids, found) = make("post"), material()
    with torch.no_grad():
        exact = drafter.ttt(ids, found.aux, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = drafter.ttt(ids, found.aux, 3)
    for a, b in zip(exact, rough, strict=True):
        assert b.out.dtype == b.normed.dtype == b.feedback.dtype == torch.float32
        assert 0 < (a.out - b.out).norm() / a.out.norm() < 0.05


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


# ---- chains ----


def test_identity_03_double_norm_is_absent():
    """Logits are read from y = norm(o) once; in post-norm the state that was fed back is that same y."""
    for variant in ("pre", "post"):
        drafter, (ids, found) = make(variant), material()
        with torch.no_grad():
            drafter.norm.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(3))
            for step in drafter.ttt(ids, found.aux, 3):
                o = step.out
                y = o / (o.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * drafter.norm.weight
                torch.testing.assert_close(step.normed, y)
                torch.testing.assert_close(step.logits, F.linear(y, target().get_output_embeddings().weight), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(step.feedback, y if variant == "post" else o)


@pytest.mark.parametrize("variant", ["post", "post+fc_norm", "gate+post", "mtp"])
def test_identity_04_post_norm_keeps_the_magnitude_at_every_depth(variant):
    drafter, (ids, found) = make(variant), material()
    chain = draft_chain(drafter, ids, feats_of(drafter, found), 16)
    torch.testing.assert_close(chain.rms, torch.ones(2, 16), rtol=0, atol=1e-4)
    with torch.no_grad():
        drafter.norm.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(3))
    chain = draft_chain(drafter, ids, feats_of(drafter, found), 16)
    assert chain.rms.max() <= drafter.norm.weight.abs().max() + 1e-4
    # Without the output norm a random layer does grow.
    grown = draft_chain(make("pre"), ids, found.aux, 16).rms
    assert (grown[:, -1] > 1.5 * grown[:, 0]).all()


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_identity_05_fc_norm_ignores_the_scale_of_each_stream(stream):
    _, found = material()
    scaled = found.aux.clone()
    scaled[..., 32 * stream : 32 * (stream + 1)] *= 1000
    with torch.no_grad():
        for variant in ("fc_norm", "post+fc_norm"):
            drafter = make(variant)
            torch.testing.assert_close(drafter.fuse(scaled), drafter.fuse(found.aux), rtol=1e-4, atol=1e-4)
        for variant in ("pre", "norm_before_fc"):
            drafter = make(variant)
            assert (drafter.fuse(scaled) - drafter.fuse(found.aux)).abs().max() > 0.1
        # One norm over all streams forgives only a common factor.
        torch.testing.assert_close(make("norm_before_fc").fuse(1000 * found.aux), make("norm_before_fc").fuse(found.aux), rtol=1e-4, atol=1e-4)


def test_identity_06_scaling_the_state_leaves_that_steps_attention_unchanged():
    drafter, (ids, found) = make("pre"), material()
    with torch.no_grad():
        g = drafter.fuse(found.aux[:, :-1])
        text = drafter.step(drafter.embed(ids[:, 1:]), g, torch.arange(N - 1))
        embeds, f, at = drafter.embed(ids[:, :1]), text.feedback[:, -1:], torch.tensor([N - 1])
        a, b = (drafter.step(embeds, c * f, at, text.kv, attention=True) for c in (1.0, 50.0))
        ratio = [(s.out - c * f).norm() / (c * f).norm() for s, c in ((a, 1.0), (b, 50.0))]
    torch.testing.assert_close(a.attention, b.attention, rtol=1e-4, atol=1e-5)
    # What changes is the layer's update relative to the residual.
    assert ratio[1] < ratio[0] / 20


def test_identity_07_wide_open_gate_and_zero_noise_change_nothing():
    (ids, found), gated, plain = material(), make("gate"), make("pre")
    with torch.no_grad():
        gated.layers[0].self_attn.g_proj.bias.fill_(1e4)
    a, b = draft_chain(gated, ids, found.aux, 6), draft_chain(plain, ids, found.aux, 6)
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-4)
    for path in ("hidden", "embedding"):
        quiet = draft_chain(plain, ids, found.aux, 6, intervention=Intervention(noise=0.0, path=path, seed=4))
        assert torch.equal(quiet.logits, b.logits)


@pytest.mark.parametrize("variant", ["pre", "post", "mtp"])
def test_chain_feeds_its_own_proposals_and_equals_the_teacher_chain_on_them(variant):
    drafter, (ids, found) = make(variant), material()
    feats = feats_of(drafter, found)
    own = draft_chain(drafter, ids, feats, 6)
    assert torch.equal(own.fed[:, 0], ids[:, -1]) and torch.equal(own.fed[:, 1:], own.proposed[:, :-1])
    forced = draft_chain(drafter, ids, feats, 6, teacher=own.proposed)
    assert torch.equal(forced.logits, own.logits)
    # ... and the parallel form on the text followed by the proposals.
    with torch.no_grad():
        unrolled = drafter.ttt(torch.cat([ids, own.proposed], 1), F.pad(feats, (0, 0, 0, 6)), 6)
    for k in range(6):
        torch.testing.assert_close(unrolled[k].logits[:, N - 2], own.logits[:, k], rtol=0, atol=1e-4)


def test_chain_of_a_left_padded_row_is_that_of_the_row_alone():
    drafter, (ids, found) = make("post", window=6, carry_sink=1), material()
    padded, feats = F.pad(ids, (4, 0), value=9), F.pad(found.aux, (0, 0, 4, 0), value=3.0)
    mask = F.pad(torch.ones(2, N - 1, dtype=torch.bool), (4, 0))
    a, b = draft_chain(drafter, ids, found.aux, 5), draft_chain(drafter, padded, feats, 5, key_mask=mask)
    assert torch.equal(a.proposed, b.proposed) and torch.equal(a.sink_at + 4, b.sink_at)
    for name, value in measures(a).items():
        torch.testing.assert_close(value, measures(b)[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["pre", "post"])
@pytest.mark.parametrize(("path", "pin"), [("hidden", False), ("embedding", False), ("hidden", True)])
def test_parallel_form_applies_interventions_like_the_chain(variant, path, pin):
    """Noise is drawn per start in one and per row in the other, so the comparison repeats the draw for the start in question."""
    drafter, (ids, found) = make(variant), material(rows=1)
    noisy = Intervention(noise=0.0 if pin else 0.5, path=path, pin=pin, seed=3)
    tokens = torch.cat([ids, ids[:, :5]], 1)
    alone = draft_chain(drafter, ids, found.aux, 4, teacher=ids[:, :3], intervention=noisy)
    clean = draft_chain(drafter, ids, found.aux, 4, teacher=ids[:, :3])
    assert (alone.logits - clean.logits).abs().max() > 1e-3

    class SameDraw(Intervention):
        def disturb(self, embeds, f, step):
            one = Intervention.disturb(self, embeds[:, N - 2 : N - 1], f[:, N - 2 : N - 1], step)
            return tuple(torch.cat([x[:, : N - 2], y, x[:, N - 1 :]], 1) for x, y in zip((embeds, f), one, strict=True))

    with torch.no_grad():
        unrolled = drafter.ttt(tokens, F.pad(found.aux, (0, 0, 0, 5)), 4, intervention=SameDraw(**vars(noisy)))
    for k in range(4):
        torch.testing.assert_close(unrolled[k].logits[:, N - 2], alone.logits[:, k], rtol=0, atol=1e-4)


def test_noise_has_the_stated_size_and_is_drawn_anew_for_every_step_and_seed():
    f = 3 * torch.randn(4, 500, 32, generator=torch.Generator().manual_seed(0))
    draws = [Intervention(noise=0.5, seed=s).disturb(torch.zeros(1), f, k)[1] - f for s, k in ((0, 1), (0, 2), (1, 1))]
    for draw in draws:
        assert (rms(draw) / rms(f)).mean().item() == pytest.approx(0.5, abs=0.01)
    assert all((a - b).abs().max() > 0.1 for a, b in itertools.combinations(draws, 2))
    again = Intervention(noise=0.5, seed=0).disturb(torch.zeros(1), f, 1)[1] - f
    assert torch.equal(again, draws[0])


def test_pin_holds_the_state_that_is_read_at_the_fused_magnitude():
    drafter, (ids, found) = make("pre"), material()
    g = drafter.fuse(found.aux)
    torch.testing.assert_close(rms(Intervention(pin=True).pinned(7 * torch.ones_like(g), g)), rms(g))
    pinned, free = (draft_chain(drafter, ids, found.aux, 12, intervention=i).rms for i in (Intervention(pin=True), Intervention()))
    torch.testing.assert_close(pinned[:, 0], free[:, 0])
    assert (pinned[:, -1] < 0.6 * free[:, -1]).all()


@pytest.mark.parametrize("variant", ["pre", "gate+post", "mtp"])
@pytest.mark.parametrize("recent", [1, 3, 8, 50])
def test_identity_11_shares_sum_to_one(variant, recent):
    drafter, (ids, found) = make(variant), material()
    feats = feats_of(drafter, found)
    chain = draft_chain(drafter, ids, feats, 10, recent=recent)
    again = target_features(target(), torch.cat([ids, chain.fed[:, 1:]], 1))
    beside = prefill_control(drafter, torch.cat([ids, chain.fed[:, 1:]], 1), feats_of(drafter, again), 10, sink_at=chain.sink_at, recent=recent)
    for one in (chain, beside):
        torch.testing.assert_close(one.sink + one.recent_text + one.chain + one.prompt, torch.ones(2, 10))
        assert all(((x >= -1e-6) & (x <= 1 + 1e-6)).all() for x in (one.sink, one.recent, one.recent_text, one.chain, one.prompt))
        assert [a.shape[-1] for a in one.attention] == list(range(N - 1, N + 9))
        for k, a in enumerate(one.attention, 1):
            own = a[:, :, -k:].sum(-1).mean(1) - torch.where(one.sink_at >= N - 2, one.sink[:, k - 1], 0)
            torch.testing.assert_close(one.chain[:, k - 1], own)


def test_control_equals_the_chain_at_step_1_and_is_the_plain_prefill():
    drafter, (ids, found) = make("pre"), material()
    chain = draft_chain(drafter, ids, found.aux, 5)
    tokens = torch.cat([ids, chain.fed[:, 1:]], 1)
    again = target_features(target(), tokens)
    beside = prefill_control(drafter, tokens, again.aux, 5)
    assert torch.equal(beside.sink_at, chain.sink_at)
    for name in measures(chain):
        torch.testing.assert_close(measures(chain)[name][:, 0], measures(beside)[name][:, 0], rtol=0, atol=1e-4)
    assert (beside.logits[:, 1:] - chain.logits[:, 1:]).abs().max() > 1e-2
    with torch.no_grad():
        prefill = drafter.ttt(tokens, again.aux, 1)[0]
    torch.testing.assert_close(prefill.logits[:, N - 2 :], beside.logits, rtol=0, atol=1e-4)


def test_a_layer_without_update_freezes_the_direction():
    """With all output projections at zero the state is never changed: cosine 1, update 0, growth 1."""
    drafter, (ids, found) = make("pre"), material()
    with torch.no_grad():
        drafter.layers[0].self_attn.o_proj.weight.zero_()
        drafter.layers[0].mlp.down_proj.weight.zero_()
    chain = draft_chain(drafter, ids, found.aux, 5, teacher=ids[:, -1:].expand(-1, 4))
    torch.testing.assert_close(chain.cos, torch.ones(2, 5))
    torch.testing.assert_close(chain.update, torch.zeros(2, 5))
    torch.testing.assert_close(chain.rms, chain.fused_rms[:, None].expand(-1, 5))
    # Same state and same token: consecutive keys differ by their rotary position alone, which the measure takes out.
    torch.testing.assert_close(chain.key_cos[:, 1:], torch.ones(2, 4))


def test_identity_12_window_beyond_the_length_is_full_attention_and_a_short_one_is_not():
    (ids, found), full = material(), make("pre")
    base = draft_chain(full, ids, found.aux, 6)
    for option in (dict(window=N + 6), dict(window=1, carry_sink=N + 6)):
        torch.testing.assert_close(draft_chain(make("pre", **option), ids, found.aux, 6).logits, base.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(draft_chain(full, ids, found.aux, 6, intervention=Intervention(**option)).logits, base.logits, rtol=0, atol=1e-4)
    narrow = draft_chain(make("pre", window=4), ids, found.aux, 6)
    assert (narrow.logits - base.logits).abs().max() > 1e-2
    for a in narrow.attention:
        assert bool((a[..., :-4] == 0).all()) and bool((a[..., -4:] > 0).all())
    carried = draft_chain(make("pre", window=4, carry_sink=2), ids, found.aux, 6)
    for a in carried.attention:
        assert bool((a[..., 2:-4] == 0).all()) and bool((a[..., :2] > 0).all())
    # window=0 in an intervention takes the configuration's window off.
    opened = draft_chain(make("pre", window=4, carry_sink=2), ids, found.aux, 6, intervention=Intervention(window=0))
    torch.testing.assert_close(opened.logits, base.logits, rtol=0, atol=1e-4)


# ---- switches ----


@pytest.mark.parametrize("variant", sorted(set(SWITCHES) - {"pre", "post", "mtp"}))
def test_every_switch_changes_the_first_step_alone(variant):
    (ids, found) = material()
    base = make("post" if "post" in variant else "pre")
    other = make(variant)
    shared = set(base.state_dict()) & set(other.state_dict())
    assert len(shared) == len(base.state_dict()) and all(torch.equal(base.state_dict()[k], other.state_dict()[k]) for k in shared)
    with torch.no_grad():
        a, b = base.ttt(ids, found.aux, 1)[0].logits, other.ttt(ids, found.aux, 1)[0].logits
    assert (a - b).abs().max() > 1e-2


def test_residual_norm_starts_from_the_normalised_state():
    drafter, (ids, found) = make("residual-norm"), material()
    with torch.no_grad():
        drafter.layers[0].self_attn.o_proj.weight.zero_()
        drafter.layers[0].mlp.down_proj.weight.zero_()
        out = drafter.ttt(ids, found.aux, 1)[0].out
    torch.testing.assert_close(rms(out), torch.ones(2, N - 1), rtol=0, atol=1e-3)


def test_aux_layer_numbers_choose_the_streams():
    ids, found = material()
    assert [c.shape[-1] for c in found.aux.chunk(3, -1)] == [32, 32, 32]
    other = target_features(target(), ids, (0, 1, 3))
    assert torch.equal(other.aux[..., :32], found.aux[..., :32]) and torch.equal(other.aux[..., 64:], found.aux[..., 64:])
    assert (other.aux[..., 32:64] - found.aux[..., 32:64]).abs().max() > 1e-2


def test_variant_names_and_round_trip():
    for name in SWITCHES:
        cfg = make(name).cfg
        assert cfg.variant == name and DrafterConfig.from_dict(cfg.to_dict()) == cfg
        assert type(build(cfg.to_dict())) is (MTPHead if name == "mtp" else EagleDrafter)
    assert default_aux_layers(30) == (1, 14, 26)


# ---- reduced vocabulary ----


def test_reduced_vocabulary_maps_proposals_and_reports_coverage():
    keep = torch.tensor([3, 4, 9, 17, 49])
    drafter, full, (ids, found) = make("pre", draft_vocab=5), make("pre"), material()
    drafter.set_vocab(keep)
    assert torch.equal(drafter.vocab_ids, keep) and drafter.t2d.nonzero()[:, 0].tolist() == keep.tolist()
    assert torch.equal(torch.arange(5) + drafter.d2t, keep)
    with torch.no_grad():
        a, b = drafter.ttt(ids, found.aux, 1)[0].logits, full.ttt(ids, found.aux, 1)[0].logits
    torch.testing.assert_close(a, b[..., keep])
    assert torch.equal(drafter.propose(a), keep[b[..., keep].argmax(-1)])
    assert coverage(drafter, torch.tensor([3, 3, 5, 49])) == 0.75 and coverage(full, ids) == 1.0
    assert frequent_tokens(torch.tensor([7, 7, 1, 2, 2]), 3, 50).tolist() == [1, 2, 7]
    # Positions whose best token is out of reach are left out of the loss when the batch names them.
    greedy = found.logits.argmax(-1)
    counted = ttt_loss(drafter, Batch(ids, found.aux, found.last, None, greedy), ttt=1).counted[0]
    assert counted == int(torch.isin(greedy[:, 1:-1], keep).sum()) > 0
