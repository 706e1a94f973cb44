"""Replay of recorded passes, the panel's arrays, and the precomputed grids of ams."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nbkit
from nbkit.errors import InputError, MissingResourceError
from nbkit.methods import ams
from nbkit.recipes import ams_chain, ams_text
from nbkit.widgets.tokens import token_html

TOKENS = 160


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=None, pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 97, (TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def recording(model, ids):
    return ams.record_pass(model, ids)


def policies():
    for scorer in ams.SCORERS:
        for allocation in ("mass", "none"):
            yield ams.SegmentedPolicy(scorer=scorer, allocation=allocation, keep=40, interval=32, recent=8, seg_len=(4, 16))
    for allocation in ("length", "fixed", "chunk", "head"):
        yield ams.SegmentedPolicy(scorer="snapkv", allocation=allocation, keep=40, interval=32, recent=8, seg_len=(4, 16), fixed_len=12)
    yield ams.SegmentedPolicy(keep=40, interval=32, recent=8, order="released", recent_in_mass=True)


@pytest.mark.parametrize("policy", list(policies()), ids=lambda p: f"{p.scorer}-{p.allocation}-{p.order}")
def test_first_replayed_event_is_the_real_one(model, ids, recording, policy):
    """Before the first eviction a real run has seen exactly what the recording holds, so both must evict the same entries."""
    cache = ams.CompactedCache(model.config, policy)
    with torch.inference_mode(), policy.attach(model):
        for start in range(0, TOKENS, 32):
            model(ids[None, start : start + 32], cache=cache)
    real = cache.events[0].positions
    for layer in range(3):
        replayed = ams.replay(recording, policy, layer)[0]
        assert replayed.seen == cache.events[0].seen == 64
        # Heads may be padded in different places only where they keep different numbers.
        for head in range(2):
            want = sorted(p for p in real[layer, 0, head].tolist() if p >= 0)
            assert sorted(p for p in replayed.kept[head].tolist() if p >= 0) == want


def test_replay_counts_events_like_the_cache(model, ids, recording):
    policy = ams.SegmentedPolicy(keep=40, interval=16, recent=8, seg_len=(4, 16))
    cache = ams.CompactedCache(model.config, policy)
    with torch.inference_mode(), policy.attach(model):
        for start in range(0, TOKENS, 16):
            model(ids[None, start : start + 16], cache=cache)
    assert [e.seen for e in ams.replay(recording, policy, 0)] == [e.seen for e in cache.events]


def test_recording_leaves_the_model_as_it_was(model, ids):
    before = model.config._attn_implementation
    want = model(ids[None]).logits
    ams.record_pass(model, ids)
    assert model.config._attn_implementation == before
    torch.testing.assert_close(model(ids[None]).logits, want, rtol=0, atol=0)


@pytest.mark.parametrize(("layer", "prefill"), [(3, None), (-4, None), (0, 0), (0, TOKENS + 1)])
def test_replay_refuses_what_is_not_there(recording, layer, prefill):
    with pytest.raises(InputError):
        ams.replay(recording, ams.SegmentedPolicy(keep=40, interval=32), layer, prefill)


def test_record_pass_refuses_batches_and_nothing(model):
    for bad in (torch.zeros(2, 5, dtype=torch.long), torch.zeros(1, dtype=torch.long)):
        with pytest.raises(InputError, match="one sequence"):
            ams.record_pass(model, bad)


def test_record_pass_names_the_vocabulary(model):
    for bad in (torch.tensor([1, 10**6]), torch.tensor([-1, 2]), torch.tensor([0.5, 1.0])):
        with pytest.raises(InputError, match="token ids 0.."):
            ams.record_pass(model, bad)


@pytest.mark.parametrize("allocation", list(ams.ALLOCATIONS))
def test_inspection_adds_up(recording, allocation):
    policy = ams.SegmentedPolicy(keep=40, interval=32, recent=8, seg_len=(4, 16), allocation=allocation, fixed_len=12)
    for event in (0.0, 1.0):
        result = ams.inspect_layer(recording, policy, 1, 0, event)
        row, seen = result["raster"][result["event"]], result["seen"][result["event"]]
        assert (row[:seen] > 0).all() and (row[seen:] == 0).all()
        assert np.array_equal(np.where(row == 2)[0], np.sort(result["kept"]))
        assert result["mass"].min() >= 0 and result["share"].sum() <= 1 + 1e-9
        assert (result["end"] > result["start"]).all() and (result["start"][1:] >= result["end"][:-1]).all()
        inside = set(result["place"].tolist())
        assert result["got"].sum() == len(inside & set(result["kept"].tolist()))
        if allocation in ("mass", "length", "fixed"):
            assert np.array_equal(result["got"], result["quota"]) and result["floor_lost"] == 0
    assert np.isnan(result["iou"][0]) and ((result["iou"][1:] >= 0) & (result["iou"][1:] <= 1)).all()


def test_inspection_counts_floors_that_the_released_order_breaks():
    """A scorer that prefers the start, as in the paper's released code: the released order empties segments and the count says so."""
    class Start:
        __name__ = "start"

        def __call__(self, keys, values, queries, positions):
            return -positions.float()

    torch.manual_seed(0)
    tokens = 256
    keys = torch.zeros(1, tokens, 8)
    flat = ams.Recording([torch.zeros(1, tokens, 8)], [keys], [keys], 1.0, None, torch.arange(tokens))
    lost = {}
    for order in ("paper", "released"):
        policy = ams.SegmentedPolicy(
            scorer=Start(), keep=64, interval=128, sinks=4, recent=32, seg_len=(8, 64), order=order, window=1, pool=1, ema=None, min_keep=1
        )
        lost[order] = ams.inspect_layer(flat, policy, 0, 0)["floor_lost"]
    assert lost["paper"] == 0 < lost["released"]


def test_drawing_has_one_structure(recording):
    kinds = set()
    for allocation in ams.ALLOCATIONS:
        policy = ams.SegmentedPolicy(keep=40, interval=16, recent=8, seg_len=(4, 16), allocation=allocation)
        figure = go.Figure(ams.draw_inspection(ams.inspect_layer(recording, policy, 0, 1, 0.5)))
        kinds.add(tuple(trace.type for trace in figure.data))
        assert figure.layout.xaxis4.title.text == "tokens seen" and figure.layout.yaxis.title.text == "share"
    assert kinds == {("bar", "scatter", "scatter", "bar", "bar", "heatmap", "scatter", "scatter")}


def test_inspection_says_what_is_wrong(recording):
    with pytest.raises(InputError, match="head"):
        ams.inspect_layer(recording, ams.SegmentedPolicy(keep=40, interval=32), 0, 2)
    with pytest.raises(InputError, match="an event within"):
        ams.inspect_layer(recording, ams.SegmentedPolicy(keep=4096, interval=32), 0, 0)


def test_grid_looks_up_and_compares():
    rows = [
        {"cell": {}, "correct_lines": [9, 9]}, {"cell": {"keep": 8, "scorer": "tova"}, "correct_lines": [3, 5]},
        {"cell": {"keep": 8, "scorer": "tova", "ema": [0.9, 1.0]}, "correct_lines": [5, 9]},
    ]
    grid = ams.Grid({"pass_lines": 5, "base": {"window": 32, "seg_len": [8, 64]}, "cells": rows})
    assert grid.row(keep=8, scorer="tova", window=32, seg_len=[8, 64]) is rows[1], "spelling out a common setting finds the same cell"
    assert grid("passed", keep=8, scorer="tova").tolist() == [0, 1] and grid("passed@3", keep=8, scorer="tova").tolist() == [1, 1]
    assert grid("passed").tolist() == [1, 1] and grid.budgets == [8]
    gain = grid.gain("correct_lines", {"scorer": "tova", "ema": (0.9, 1.0)}, {"scorer": "tova"}, [8])
    assert gain.estimate == 3 and gain.low >= 2 and gain.high <= 4
    with pytest.raises(InputError, match="precomputed"):
        grid("passed", keep=8, scorer="random")


def _load(name):
    try:
        return nbkit.load_recording(name).data
    except MissingResourceError as error:
        pytest.fail(f"{error}")


def test_chain_recording_is_complete():
    data = _load("ams-chain")
    assert (data["chains"], data["places"], data["lines"], data["pass_lines"], data["seed"]) == (
        ams_chain.CHAINS, ams_chain.PLACES, ams_chain.LINES, ams_chain.PASS_LINES, ams_chain.SEED)
    assert {row["key"] for row in data["cells"]} == {ams_chain.cell_key(c) for c in ams_chain.cells()}
    for row in data["cells"]:
        assert len(row["correct_lines"]) == ams_chain.CHAINS and all(0 <= n <= ams_chain.LINES for n in row["correct_lines"])
    assert np.mean(ams.Grid(data)("passed")) >= 0.95


@pytest.mark.parametrize(("name", "cells", "field", "units"), [
    ("ams-text", ams_text.text_cells, "nll", ams_text.TEXTS), ("ams-needles", ams_text.needle_cells, "exact", ams_text.PROMPTS * ams_text.NEEDLES),
    ("ams-loops", ams_text.loop_cells, "repeated", ams_text.STORIES),
])
def test_text_recordings_are_complete(name, cells, field, units):
    data = _load(name)
    assert {row["key"] for row in data["cells"]} == {ams_text.cell_key(c) for c in cells()}
    assert all(len(row[field]) == units and np.isfinite(row[field]).all() for row in data["cells"])


def test_chain_cell_keys_do_not_depend_on_spelling():
    assert ams_chain.cell_key({"keep": 64, "scorer": "tova"}) == ams_chain.cell_key({"scorer": "tova", "keep": 64, "order": "paper"})
    assert len({ams_chain.cell_key(c) for c in ams_chain.cells()}) == len(ams_chain.cells())


def test_repetition_measures():
    loop = [1, 2, 3, 4] * 8
    assert ams_text.repeated_share(loop) == pytest.approx(1 - 4 / 25)
    assert ams_text.first_loop(loop) == 4
    fresh = list(range(32))
    assert ams_text.repeated_share(fresh) == 0 and ams_text.first_loop(fresh) == 32


def test_token_strip_escapes_and_marks():
    page = token_html(["<b>", " kept", " gone"], kept=[1], alt='a "quoted" sentence')
    assert "<b>" not in page and "&lt;b&gt;" in page and "&quot;quoted&quot;" in page
    assert page.count("font-weight:600") == 1 and page.index("font-weight:600") < page.index(" kept")
    with pytest.raises(InputError):
        token_html(["a"], kept=[], alt="")


@pytest.mark.parametrize("bad", [
    {"interval": 2.5}, {"interval": "64"}, {"sinks": True}, {"window": 3.5}, {"seed": "a"}, {"scorer": None}, {"scorer": 3}, {"ema": (0.9, 0.9, 0.9)},
    {"ema": 0.9}, {"seg_len": 16}, {"seg_len": (1, 2, 3)},
], ids=str)
def test_policy_refuses_wrong_types(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        ams.SegmentedPolicy(**bad)


def test_policy_takes_numpy_integers_and_lists():
    policy = ams.SegmentedPolicy(keep=np.int64(64), interval=np.int32(16), seg_len=[8, 32], ema=[0.9, 0.5])
    assert policy.keep == 64 and policy.seg_len == (8, 32)
    assert hash(policy) == hash(ams.SegmentedPolicy(keep=64, interval=16, seg_len=(8, 32), ema=(0.9, 0.5)))


def test_pure_functions_refuse_what_would_come_out_silently_wrong():
    cut = ams.segments(torch.ones(40), 0.25, (1, 40))
    for mass, keep in ((torch.full((40,), float("nan")), 8), (-torch.ones(40), 8), (torch.ones(40), 2.5), (torch.ones(40), -1)):
        with pytest.raises(InputError):
            ams.quotas(mass, cut, keep)
    with pytest.raises(InputError, match="evidence"):
        ams.mass(torch.tensor([1.0, float("inf")]))
    scores = torch.zeros(1, 1, 60)
    for keep in (-1, 0, 2.5):
        with pytest.raises(InputError, match="keep"):
            ams.SegmentedPolicy(allocation="none").select(scores, None, keep)


@pytest.mark.parametrize("event", [2.0, -1.0, float("nan")])
def test_inspection_refuses_events_outside(recording, event):
    with pytest.raises(InputError, match="event"):
        ams.inspect_layer(recording, ams.SegmentedPolicy(keep=40, interval=32), 0, 0, event)


@pytest.mark.parametrize(("policy", "queries"), [
    (ams.SegmentedPolicy(scorer="tova", allocation="none", keep=40, interval=32), 1),
    (ams.SegmentedPolicy(scorer="keydiff", window=24, keep=40, interval=32), 24),
    (ams.SegmentedPolicy(scorer="expected_attention", keep=40, interval=32), 63),
], ids=("tova", "window", "expected"))
def test_only_the_queries_that_are_needed_are_buffered(model, ids, policy, queries):
    """63 tokens in chunks of 32 and single ones, no event yet: what is buffered is what scorer and window look at, and no view of more."""
    cache = ams.CompactedCache(model.config, policy)
    with torch.inference_mode(), policy.attach(model):
        model(ids[None, :32], cache=cache)
        for i in range(32, 63):
            model(ids[None, i : i + 1], cache=cache)
    assert not cache.events
    layer = cache.layers[0]
    assert layer.window(None, 0).states.shape[2] == queries
    held = sum(q.untyped_storage().nbytes() for q in layer.queries)
    assert held <= (queries + 32) * 4 * 16 * 4
