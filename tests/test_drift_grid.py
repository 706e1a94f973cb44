"""The measurements of the small drafters against decoding token by token, and the recording against live values."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch

import nbkit
from nbkit.methods.attention_drift import Intervention, draft_chain, fit_drafter, speculative_generate, target_features
from nbkit.models import letters
from nbkit.recipes import drift_eval, drift_train

STARTS, DEPTH = (10, 17, 30), 5


@pytest.fixture(scope="module")
def model():
    model = letters.build(3, dim=32).eval()
    with torch.no_grad():
        # Larger embeddings make a random model sure of something, which a drafter can learn.
        model.get_input_embeddings().weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def tokens():
    ids = torch.randint(1, letters.VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = letters.BOS
    return ids


@pytest.fixture(scope="module")
def truth(model, tokens):
    return drift_eval.continuations(model, tokens, STARTS, DEPTH)


@functools.cache
def drafter_of(variant, model):
    """A drafter trained for a moment, so that some of its proposals are accepted and others are not."""
    drafter = drift_train.fresh(drift_train.config_of(model, variant), model, 0)
    rows = torch.randint(1, letters.VOCAB, (16, 40), generator=torch.Generator().manual_seed(2))
    fit_drafter(drafter, model, rows, ttt=2, steps=40, batch=16, lr=1e-2, seed=0)
    return drafter.eval()


def features(drafter, model, tokens):
    seen = target_features(model, tokens, drafter.cfg.aux_layers)
    return drafter.pick_features(seen.aux, seen.last)


def counts_of(drafter, model, tokens, truth, **what):
    return drift_eval.accepted_from(drafter, tokens, features(drafter, model, tokens), STARTS, truth, Intervention(**what))


def test_continuations_are_plain_greedy_decoding(model, tokens, truth):
    with torch.inference_mode():
        for i, t in enumerate(STARTS):
            text = tokens[:, : t + 2]
            for k in range(DEPTH):
                best = model(text, use_cache=False).logits[:, -1].argmax(-1)
                assert best.tolist() == truth[:, i, k].tolist()
                text = torch.cat([text, best[:, None]], 1)


@pytest.mark.parametrize("variant", ["pre", "post+fc_norm", "mtp"])
def test_counts_are_those_of_chains_that_read_their_own_proposals(model, tokens, truth, variant):
    drafter = drafter_of(variant, model)
    feats, counts = features(drafter, model, tokens), counts_of(drafter, model, tokens, truth)
    for i, t in enumerate(STARTS):
        chain = draft_chain(drafter, tokens[:, : t + 2], feats, DEPTH)
        assert (chain.proposed == truth[:, i]).long().cumprod(1).sum(1).tolist() == counts[:, i].tolist()


def test_counts_are_those_of_decoding(model, tokens):
    drafter, seen = drafter_of("pre", model), set()
    for row in tokens:
        for t in STARTS:
            # Decoding takes its first token from the prompt's own pass; the first chain starts behind that.
            out = speculative_generate(model, drafter, row[: t + 1], depth=DEPTH, max_new_tokens=DEPTH + 2, eos_token_id=[])
            text = out.sequences[:, : t + 2]
            ahead = drift_eval.continuations(model, text, [t], DEPTH)
            mine = drift_eval.accepted_from(drafter, text, features(drafter, model, text), [t], ahead, Intervention())
            assert int(mine[0, 0]) == out.accepted[0]
            seen.add(out.accepted[0])
    assert len(seen) > 1


def test_interventions_reach_the_chain(model, tokens, truth):
    drafter = drafter_of("pre", model)
    clean = counts_of(drafter, model, tokens, truth)
    assert torch.equal(clean, counts_of(drafter, model, tokens, truth, window=64))
    assert not torch.equal(clean, counts_of(drafter, model, tokens, truth, noise=3.0))
    with_norm = drafter_of("fc_norm", model)
    feats = features(with_norm, model, tokens)
    scaled = torch.cat([feats[..., :64], 10 * feats[..., 64:]], -1)
    one, other = (drift_eval.accepted_from(with_norm, tokens, f, STARTS, truth, Intervention()) for f in (feats, scaled))
    assert torch.equal(one, other)


def test_acceptance_adds_up():
    counts = torch.tensor([[0, 5, 3], [2, 2, 2]])
    out = drift_eval.acceptance(counts, DEPTH)
    np.testing.assert_allclose(out["tau"], counts.float().mean(1), atol=1e-4)
    np.testing.assert_allclose(np.sum(out["rates"], 1), out["tau"], atol=1e-3)
    assert all(a >= b for row in out["rates"] for a, b in zip(row, row[1:]))


@pytest.fixture
def small(monkeypatch, tmp_path, model):
    """The recipe on a random target with few and short texts."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("NBKIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("NBKIT_BUILD", str(tmp_path / "build"))
    text = np.random.default_rng(0).integers(32, 127, 5000)
    monkeypatch.setattr(drift_train, "_target", lambda: model)
    for name, value in {
        "held_out": lambda: text, "PROMPTS": 3, "LENGTH": 90, "LONG_PROMPTS": 2, "LONG_PROMPT": 80, "LONG_LENGTH": 96, "STARTS": (62, 70),
        "LONG_STARTS": (78, 82), "DRIFT_STARTS": (64, 70), "SPECULATIVE": 1, "NEW": 8,
    }.items():
        monkeypatch.setattr(drift_eval, name, value)
    drift_eval.tiny_texts.cache_clear()
    yield tmp_path
    drift_eval.tiny_texts.cache_clear()


def test_recipe_goes_on_where_it_stopped(small, model, monkeypatch):
    from safetensors.torch import save_model

    trained = nbkit.build_path("recipes", "drift-tiny")
    grid = [("pre", 2, 0), ("mtp", 2, 0), ("post+fc_norm", 2, 0)]
    monkeypatch.setattr(drift_train, "grid", lambda: grid)
    measured, plain = [], drift_eval.measure_tiny

    def count(drafter, **options):
        measured.append(drafter.cfg.variant)
        return plain(drafter, **options)

    monkeypatch.setattr(drift_eval, "measure_tiny", count)
    work = small / "work"
    work.mkdir()
    for ready in (2, 3):
        for key in grid[:ready]:
            place = drift_train.folder(trained, *key)
            place.mkdir(parents=True, exist_ok=True)
            save_model(drafter_of(key[0], model), str(place / "model.safetensors"))
        drift_eval.run_grid(work, small, lambda line: None)
    assert measured == ["pre", "mtp", "post+fc_norm"]
    held = nbkit.load_recording("drift-grid")
    cells = held.data["cells"]
    assert held.card["cells"] == held.card["cells_planned"] == 3
    assert [cell["variant"] for cell in cells] == measured
    for cell in cells:
        assert np.shape(cell["accuracy"]) == (3, drift_eval.FORCED_DEPTH) and np.shape(cell["drift"]["sink"]) == (3, drift_eval.DRIFT_DEPTH)
        assert cell["speculative"][0]["equal"]
        shares = sum(np.array(cell["drift"][name]) for name in ("sink", "recent_text", "chain", "prompt"))
        np.testing.assert_allclose(shares, 1, atol=1e-3)
        # A chain's first step reads the target's state: nothing distinguishes it from the control.
        np.testing.assert_allclose(np.array(cell["drift"]["entropy"])[:, 0], np.array(cell["drift"]["control_entropy"])[:, 0], atol=1e-3)
    assert "noise" in cells[0] and "noise" not in cells[1] and "tau_scaled" not in cells[1]
    assert cells[2]["tau_scaled"] == cells[2]["tau"] and set(cells[0]["long"]) == set(drift_eval.LONG_SETTINGS)
    assert max(max(row) for row in cells[2]["rms"]) <= cells[2]["norm_bound"] + 1e-4


def test_recipe_without_trained_drafters(small):
    from nbkit.errors import MissingResourceError

    with pytest.raises(MissingResourceError, match="drift-tiny"):
        drift_eval.run_grid(small, small, lambda line: None)


def test_recorded_cell_is_what_the_shipped_drafter_does():
    data = nbkit.load_recording("drift-grid").data
    (cell,) = [cell for cell in data["cells"] if (cell["variant"], cell["ttt"], cell["seed"]) == ("post", 2, 0)]
    drafter, texts = drift_train.tiny("post", 2), drift_eval.tiny_texts()
    feats = drafter.pick_features(texts["aux"], texts["last"])
    live = drift_eval.tau(drafter, feats)
    # Another machine may round a near tie the other way, and a sampled text then goes on differently.
    np.testing.assert_allclose(np.mean(live["tau"]), np.mean(cell["tau"]), atol=0.15)
    same = [a == b for a, b in zip(live["tau"], cell["tau"], strict=True)]
    assert np.mean(same) > 0.5
    assert json.dumps(data["starts"]) == json.dumps(list(drift_eval.STARTS))
