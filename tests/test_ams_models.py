"""Compacting caches inside real (small, random) transformers models, against plain generation and an independent masked reference."""

from functools import cache as memo

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from nbkit.errors import InputError, RunError, UnsupportedModelError
from nbkit.methods.ams import ALLOCATIONS, SCORERS, CompactedCache, SegmentedPolicy

SIZE = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, head_dim=16, max_position_embeddings=512)
# Wide enough that attention is far from uniform: otherwise nothing would depend on what is evicted.
SPREAD = dict(initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None)
ARCHITECTURES = {
    "llama-gqa": (LlamaConfig, dict(num_key_value_heads=2)),
    "llama-mha": (LlamaConfig, dict(num_key_value_heads=4)),
    "qwen2": (Qwen2Config, dict(num_key_value_heads=2)),
    "qwen3": (Qwen3Config, dict(num_key_value_heads=2)),
    "mistral": (MistralConfig, dict(num_key_value_heads=2, sliding_window=None)),
    "gemma-mqa": (GemmaConfig, dict(num_key_value_heads=1)),
}
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@memo
def small(name):
    kind, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**SIZE, **SPREAD, **changes)).eval()


def prompt(rows=2, length=40, seed=0):
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def policy(**changes):
    base = dict(scorer="snapkv", keep=24, interval=10, sinks=2, recent=6, seg_len=(3, 8), window=8)
    return SegmentedPolicy(**(base | changes))


def write(model, cache, ids, new, **kwargs):
    kwargs = dict(max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids)) | kwargs
    if isinstance(cache, CompactedCache):
        with cache.policy.attach(model):
            return model.generate(ids, cache=cache, **kwargs)
    return model.generate(ids, **kwargs)


@torch.no_grad()
def read(model, cache, ids, sizes):
    """Logits of every token, fed in chunks of ``sizes``, the last size repeated."""
    out, at, sizes = [], 0, list(sizes)
    with cache.policy.attach(model):
        while at < ids.shape[1]:
            n = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            out.append(model(ids[:, at : at + n], cache=cache).logits)
            at += n
    return torch.cat(out, 1)


_MASK: list = []


def _masked_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Eager attention over all positions; pairs (head, position) that an event dropped are invisible to every later query."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    visible = _MASK[0][module.layer_idx].repeat_interleave(groups, 1)
    logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, -torch.inf)
    return (torch.softmax(logits, -1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("test_masked", _masked_attention)


@torch.no_grad()
def reference(model, ids, events):
    """Logits of one plain forward pass over the whole text, masked per head as ``events`` say."""
    rows, length = ids.shape
    config, masks = model.config, []
    for layer in range(config.num_hidden_layers):
        heads = config.num_key_value_heads
        visible = torch.ones(length, length).tril().bool().expand(rows, heads, length, length).clone()
        for event in events:
            held = torch.zeros(rows, heads, event.seen + 1, dtype=torch.bool)
            kept = event.positions[layer].long()
            held.scatter_(-1, torch.where(kept < 0, event.seen, kept), True)
            visible[:, :, event.seen :, : event.seen] &= held[:, :, None, : event.seen]
        masks.append(visible)
    before = config._attn_implementation
    _MASK[:] = [masks]
    model.set_attn_implementation("test_masked")
    try:
        return model(ids, cache=DynamicCache()).logits
    finally:
        model.set_attn_implementation(before)
        _MASK.clear()


def close(a, b, atol=1e-4):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# ---- nothing dropped: nothing changes ----


@every_architecture
@pytest.mark.parametrize("allocation", ["mass", "head"])
def test_budget_beyond_length_generates_the_same_tokens(name, allocation):
    model, ids = small(name), prompt()
    cache = CompactedCache(model.config, policy(keep=100, allocation=allocation))
    assert torch.equal(write(model, cache, ids, 40), write(model, None, ids, 40))
    assert cache.events == [] and model.config._attn_implementation == "sdpa"


@every_architecture
def test_identity_01_budget_beyond_length_leaves_a_bit_identical_cache(name):
    model, ids = small(name), prompt()
    plain = DynamicCache()
    with torch.no_grad():
        for at in (slice(0, 40), slice(40, 41), slice(41, 42)):
            model(prompt(length=42)[:, at], cache=plain)
    cache = CompactedCache(model.config, policy(keep=42, interval=1))
    read(model, cache, prompt(length=42), [40, 1])
    assert cache.events == []
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    assert torch.equal(cache.kept_positions(0), torch.arange(42).expand(model.config.num_key_value_heads, 42))
    assert ids.shape[1] == 40


@every_architecture
def test_identity_11_zero_events_leave_logits_equal_to_plain_generate(name):
    model, ids = small(name), prompt()
    cache = CompactedCache(model.config, policy(interval=30))
    ask = dict(output_logits=True, return_dict_in_generate=True)
    ours, plain = write(model, cache, ids, 20, **ask), write(model, None, ids, 20, **ask)
    assert cache.events == [] and torch.equal(ours.sequences, plain.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, plain.logits, strict=True))


# ---- something dropped: the same as masking it ----


@every_architecture
@pytest.mark.parametrize("allocation, scorer", [("mass", "snapkv"), ("head", "tova")])
def test_compaction_equals_the_full_cache_masked_per_head(name, allocation, scorer):
    model, ids = small(name), prompt()
    cache = CompactedCache(model.config, policy(allocation=allocation, scorer=scorer))
    out = write(model, cache, ids, 36, output_logits=True, return_dict_in_generate=True)
    assert [e.seen for e in cache.events] == [50, 60, 70]
    got = torch.stack(out.logits, 1)
    text = out.sequences[:, :-1]
    close(got, reference(model, text, cache.events)[:, 39:])
    # The test can tell: without the mask, or with an event forgotten, the logits are elsewhere.
    for events in ([], cache.events[:2]):
        assert float((got - reference(model, text, events)[:, 39:])[:, -4:].abs().max()) > 1e-2


@pytest.mark.parametrize("allocation", sorted(ALLOCATIONS))
@pytest.mark.parametrize("scorer", sorted(SCORERS))
def test_every_scorer_and_allocation_equals_its_mask(allocation, scorer):
    model, ids = small("qwen3"), prompt(length=72, seed=3)
    cache = CompactedCache(model.config, policy(allocation=allocation, scorer=scorer))
    got = read(model, cache, ids, [42, 10])
    assert [e.seen for e in cache.events] == [52, 62, 72]
    close(got, reference(model, ids, cache.events))
    if allocation != "head":
        assert all(e.positions.shape[-1] == 24 for e in cache.events)
    else:
        assert all(int((e.positions >= 0).sum()) == 3 * 2 * 2 * 24 for e in cache.events)


def test_released_order_equals_its_mask():
    model, ids = small("llama-gqa"), prompt(length=70)
    cache = CompactedCache(model.config, policy(order="released", seg_len=(3, 64), segment_mass=0.25))
    close(read(model, cache, ids, [40, 10]), reference(model, ids, cache.events))
    assert len(cache.events) == 3


@every_architecture
def test_rope_positions_continue_after_compaction(name):
    """Layer 0 sees token embeddings only, so its keys are those of the full pass at the positions the cache says it holds."""
    model, ids = small(name), prompt(length=67)
    cache, plain = CompactedCache(model.config, policy()), DynamicCache()
    read(model, cache, ids, [41, 1])
    with torch.no_grad():
        model(ids, cache=plain)
    assert cache.get_seq_length() == 67 and cache.layers[0].slots == 24 + 6
    for row in range(2):
        held = cache.kept_positions(0, row)
        assert held[:, -6:].tolist() == [list(range(61, 67))] * len(held)
        want = plain.layers[0].keys[row].gather(1, held[..., None].expand(-1, -1, 16))
        close(cache.layers[0].keys[row], want, atol=1e-5)


@pytest.mark.parametrize("allocation", ["mass", "head"])
@pytest.mark.parametrize("size", [2, 7, 9])
def test_chunks_after_compaction_equal_single_tokens(allocation, size):
    model, ids = small("llama-gqa"), prompt(length=59)
    logits = []
    for tail in (1, size):
        cache = CompactedCache(model.config, policy(allocation=allocation))
        logits.append(read(model, cache, ids, [40, 10, tail]))
        assert len(cache.events) == 1
    close(*logits, atol=1e-5)


def test_chunked_events_do_not_depend_on_the_chunk_size():
    model, ids = small("qwen2"), prompt(length=70)
    runs = []
    for sizes in ([40, 10], [40, 5], [40, 1]):
        cache = CompactedCache(model.config, policy())
        runs.append((read(model, cache, ids, sizes), cache.events))
    for logits, events in runs[1:]:
        close(logits, runs[0][0])
        assert all(torch.equal(a.positions, b.positions) for a, b in zip(events, runs[0][1], strict=True))


def test_identity_10_order_of_kept_entries_does_not_matter():
    model, ids = small("llama-gqa"), prompt(length=52)
    outputs = []
    for shuffle in (False, True):
        cache = CompactedCache(model.config, policy())
        read(model, cache, ids[:, :51], [41, 1])
        if shuffle:
            for layer in cache.layers:
                order = torch.randperm(layer.slots)
                layer.keys, layer.values = layer.keys[:, :, order], layer.values[:, :, order]
        outputs.append(read(model, cache, ids[:, 51:], [1]))
    close(*outputs, atol=1e-5)


@every_architecture
def test_identity_12_and_13_hold_on_real_events(name):
    model, ids = small(name), prompt()
    cache = CompactedCache(model.config, policy(min_keep=2, scorer="tova", segment_mass=0.2, seg_len=(3, 16)), record="full")
    write(model, cache, ids, 36)
    assert len(cache.events) == 3
    before = torch.arange(50).expand(3, 2, model.config.num_key_value_heads, 50)
    for event in cache.events:
        chosen, kept = event.selection, event.positions
        assert kept.shape[-1] == 24 and bool((kept.diff(dim=-1) > 0).all()) and event.before == before.shape[-1]
        assert torch.equal(before.gather(-1, chosen.index), kept.long())
        start, end = chosen.middle
        for row in torch.cartesian_prod(*(torch.arange(n) for n in kept.shape[:3])).tolist():
            slots = chosen.index[tuple(row)]
            assert set(range(start)) | set(range(end, event.before)) <= set(slots.tolist())
            for a, b in chosen.segments.bounds(*row):
                assert int(((slots >= start + a) & (slots < start + b)).sum()) >= min(2, b - a)
        fresh = torch.arange(event.seen, event.seen + 10).expand(*kept.shape[:3], 10)
        before = torch.cat([kept.long(), fresh], -1)


# ---- what an event sees ----


class Spy:
    """A scorer that records its arguments and ranks as ``inner`` does."""

    def __init__(self, inner="knorm"):
        self.calls, self.inner = [], SCORERS[inner]

    def __call__(self, keys, values, queries, positions):
        self.calls.append((keys.clone(), queries, positions.clone()))
        return self.inner(keys, values, queries, positions)


def test_pitfall_6_query_window_holds_each_query_at_its_true_position():
    model, ids = small("qwen3"), prompt(length=60)
    spy, seen = Spy(), []

    def catch(module, query, key, value, attention_mask, **kwargs):
        if module.layer_idx == 0:
            seen.append(query)
        return _masked_attention(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("test_catch", catch)
    cache = CompactedCache(model.config, policy(scorer=spy))
    read(model, cache, ids, [40, 3, 7, 1])
    _MASK[:] = [[torch.ones(60, 60).tril().bool().expand(2, 2, 60, 60)] * 3]
    model.set_attn_implementation("test_catch")
    with torch.no_grad():
        model(ids)
    model.set_attn_implementation("sdpa")
    assert len(spy.calls) == 6
    for (_, queries, positions), start, end in ((spy.calls[0], 0, 50), (spy.calls[3], 50, 60)):
        assert queries.positions.tolist() == list(range(start, end))
        close(queries.states, seen[0][:, :, start:end], atol=1e-5)
        assert queries.scaling == 16**-0.5 and int(positions.max()) == end - 1
        cos, sin = queries.rotary(queries.positions)
        want = model.model.rotary_emb(torch.zeros(1), torch.arange(start, end)[None])
        assert torch.equal(cos, want[0][0]) and torch.equal(sin, want[1][0])
    assert torch.equal(spy.calls[3][2][..., :24], cache.events[0].positions[0].long())


def test_query_buffer_is_bounded_and_keeps_the_newest():
    spy = Spy()
    model, ids = small("llama-gqa"), prompt(rows=1, length=310)
    read(model, CompactedCache(model.config, policy(scorer=spy, keep=64)), ids, [300, 10])
    assert spy.calls[0][1].positions.tolist() == list(range(310 - 256, 310)) and spy.calls[0][1].states.shape[2] == 256


def test_asking_for_rotations_far_ahead_leaves_the_model_alone():
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)
    config = LlamaConfig(**(SIZE | dict(max_position_embeddings=64)), **SPREAD, num_key_value_heads=2, rope_parameters=rope)
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), prompt(length=60)
    before = model.model.rotary_emb.inv_freq.clone()
    cache = CompactedCache(config, policy(scorer="expected_attention"))
    got = read(model, cache, ids, [40, 10])
    assert len(cache.events) == 2 and torch.equal(model.model.rotary_emb.inv_freq, before)
    close(got, reference(model, ids, cache.events))


def test_credit_is_gathered_with_the_kept_entries():
    model, ids = small("llama-gqa"), prompt(length=70)
    decay, beta, window = 0.8, 0.6, 8
    spy = Spy()
    cache = CompactedCache(model.config, policy(scorer=spy, ema=(decay, beta)), record="full")
    read(model, cache, ids, [40, 10])
    credit = torch.zeros(3, 2, 2, 0, dtype=torch.float64)
    for number, event in enumerate(cache.events):
        chosen, (start, end) = event.selection, event.selection.middle
        current = []
        for keys, queries, positions in spy.calls[3 * number : 3 * number + 3]:
            q = queries.states[:, :, -window:].double()
            logits = q @ keys.repeat_interleave(2, 1).double().transpose(2, 3) * queries.scaling
            future = positions.repeat_interleave(2, 1)[:, :, None] > queries.positions[-window:, None]
            attention = torch.softmax(logits.masked_fill(future, -torch.inf), -1).mean(2).reshape(2, 2, 2, -1).mean(2)
            smooth = F.pad(attention, (2, 2)).unfold(-1, 5, 1).mean(-1)[..., start:end]
            current.append(smooth / smooth.sum(-1, keepdim=True))
        current = torch.stack(current)
        old = F.pad(credit, (0, event.before - credit.shape[-1]))[..., start:end]
        new = decay * old + (1 - decay) * current
        used = beta * current + (1 - beta) * new / new.sum(-1, keepdim=True)
        close(chosen.mass, used, atol=1e-6)
        close(chosen.credit[..., start:end], new, atol=1e-6)
        assert float(chosen.credit[..., :start].abs().sum() + chosen.credit[..., end:].abs().sum()) == 0
        credit = F.pad(new, (start, event.before - end)).gather(-1, chosen.index)
    close(torch.stack([layer.credit for layer in cache.layers]), credit, atol=1e-6)
    assert len(cache.events) == 3


def test_padding_of_shorter_heads_is_invisible_to_attention_scorers():
    model, ids, spy = small("llama-gqa"), prompt(length=60), Spy("snapkv")
    cache = CompactedCache(model.config, policy(scorer=spy, allocation="head"))
    read(model, cache, ids, [40, 10])
    held = cache.events[0].positions[0]
    assert bool((held < 0).any())
    keys, queries, positions = spy.calls[3]
    dead = F.pad(held < 0, (0, 10))
    logits = queries.states[:, :, -1:] @ keys.repeat_interleave(2, 1).transpose(2, 3) * queries.scaling
    want = torch.softmax(logits.masked_fill(dead.repeat_interleave(2, 1)[:, :, None], -torch.inf), -1)[:, :, 0].mean(1)
    close(SCORERS["tova"](keys, None, queries, positions)[:, 0], want, atol=1e-6)


def test_random_scorer_differs_by_layer_and_event_and_repeats_by_seed():
    model, ids = small("llama-gqa"), prompt()
    runs = []
    for seed in (0, 0, 1):
        cache = CompactedCache(model.config, policy(scorer="random", seed=seed, allocation="none"))
        write(model, cache, ids, 30)
        runs.append([e.positions for e in cache.events])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[2][0])
    first = runs[0][0]
    assert not torch.equal(first[0], first[1])
    spy = Spy("random")
    write(model, CompactedCache(model.config, policy(scorer=spy)), ids, 30)
    assert len({queries.seed for _, queries, _ in spy.calls}) == 6


# ---- rows ----


def test_batch_rows_do_not_influence_each_other():
    model, ids = small("qwen2"), prompt(rows=3, length=70)
    together = CompactedCache(model.config, policy())
    logits = read(model, together, ids, [40, 10])
    for row in range(3):
        alone = CompactedCache(model.config, policy())
        close(read(model, alone, ids[row : row + 1], [40, 10]), logits[row : row + 1])
        for a, b in zip(alone.events, together.events, strict=True):
            assert torch.equal(a.positions[:, 0], b.positions[:, row])


@pytest.mark.parametrize("allocation", ["mass", "head"])
@pytest.mark.parametrize("how", ["reorder", "select", "repeat"])
def test_rows_can_be_reordered_selected_and_repeated(how, allocation):
    """Moved rows go on as if they had been alone: keys, positions, padding, credit and the query buffer all follow."""
    model, ids = small("llama-gqa"), prompt(rows=3, length=70, seed=4)
    rows = {"reorder": [2, 0, 0], "select": [2, 1], "repeat": [0, 0, 1, 1, 2, 2]}[how]
    # A scorer that looks at each slot alone: how wide the padding between heads is depends on the other rows.
    p = policy(allocation=allocation, scorer="knorm" if allocation == "head" else "snapkv")
    cache = CompactedCache(model.config, p)
    read(model, cache, ids[:, :55], [40, 5])
    assert len(cache.events) == 1
    if how == "reorder":
        cache.reorder_cache(torch.tensor(rows))
    elif how == "select":
        cache.batch_select_indices(torch.tensor(rows))
    else:
        cache.batch_repeat_interleave(2)
    moved = read(model, cache, ids[rows, 55:], [5])
    assert len(cache.events) == 3
    for at, row in enumerate(rows):
        alone = CompactedCache(model.config, p)
        close(moved[at : at + 1], read(model, alone, ids[row : row + 1], [40, 5])[:, 55:])


def test_beam_search_without_eviction_equals_plain_beam_search():
    model, ids = small("llama-gqa"), prompt()
    kwargs = dict(num_beams=3, num_return_sequences=2)
    cache = CompactedCache(model.config, policy(keep=100))
    assert torch.equal(write(model, cache, ids, 20, **kwargs), write(model, None, ids, 20, **kwargs))


def test_beam_search_scores_its_own_beams():
    """With eviction every returned beam's score is the sum of its log-probabilities under its own masked cache, so rows moved correctly."""
    model, ids = small("llama-gqa"), prompt(rows=1)
    cache = CompactedCache(model.config, policy(interval=8))
    out = write(model, cache, ids, 10, num_beams=3, num_return_sequences=1, output_scores=True, return_dict_in_generate=True)
    assert len(cache.events) == 1
    event = cache.events[0]
    scores = []
    for beam in range(3):
        alone = type(event)(event.seen, event.before, event.positions[:, beam : beam + 1], None)
        logits = reference(model, out.sequences, [alone])[0, 39:-1].log_softmax(-1)
        scores.append(float(logits.gather(-1, out.sequences[0, 40:, None]).sum()) / 10)
    assert min(abs(s - float(out.sequences_scores[0])) for s in scores) < 1e-4


def test_reset_serves_the_next_sample_like_a_new_cache():
    model = small("qwen3")
    for allocation in ("mass", "head"):
        p = policy(allocation=allocation)
        used, new = CompactedCache(model.config, p, record="full"), CompactedCache(model.config, p, record="full")
        write(model, used, prompt(seed=1, rows=3), 33)
        used.reset()
        assert used.events == [] and used.get_seq_length() == 0 and used.nbytes == {"logical": 0, "physical": 0, "bookkeeping": 0}
        a, b = write(model, used, prompt(seed=2), 33), write(model, new, prompt(seed=2), 33)
        assert torch.equal(a, b) and len(new.events) == 3
        for x, y in zip(used.events, new.events, strict=True):
            assert torch.equal(x.positions, y.positions)
            if allocation == "mass":
                assert torch.equal(x.selection.credit, y.selection.credit)


# ---- size, settings, records ----


def test_nbytes_are_exact():
    model, ids = small("qwen2"), prompt()
    cache = CompactedCache(model.config, policy(allocation="head"))
    write(model, cache, ids, 24)
    entry = 2 * 16 * 4
    slots = sum(layer.keys.shape[2] * 2 * 2 for layer in cache.layers)
    alive = sum(int((cache.kept_positions(layer, row) >= 0).sum()) for layer in range(3) for row in range(2))
    assert alive == 3 * 2 * 2 * (24 + 3) < slots
    size = cache.nbytes
    assert (size["logical"], size["physical"]) == (alive * entry, slots * entry)
    held = slots - 3 * 2 * 2 * 3
    assert size["bookkeeping"] == held * 8 + held + 3 * (2 * 4 * 3 * 16 * 4)
    plain = CompactedCache(model.config, policy())
    write(model, plain, ids, 24)
    assert plain.nbytes["logical"] == plain.nbytes["physical"] == 3 * 2 * 2 * 27 * entry


@pytest.mark.parametrize("keep, want", [(0.5, [25, 30, 35]), (f"{24 * 3 * 2 * 2 * 16 * 4} B", [24, 24, 24]), ("18 KiB", [24, 24, 24])])
def test_keep_as_share_or_bytes_sets_the_entries(keep, want):
    model = small("llama-gqa")
    cache = CompactedCache(model.config, policy(keep=keep))
    write(model, cache, prompt(), 34)
    assert [e.positions.shape[-1] for e in cache.events] == want


@pytest.mark.parametrize("record", ["none", "positions", "full"])
def test_record_says_what_events_hold(record):
    model = small("llama-gqa")
    cache = CompactedCache(model.config, policy(), record=record)
    write(model, cache, prompt(), 30)
    assert len(cache.events) == (0 if record == "none" else 2)
    assert all((e.selection is not None) == (record == "full") for e in cache.events)
    assert cache.layers[0].slots < 40


def test_interval_counts_generated_tokens_only():
    model = small("llama-gqa")
    for length in (1, 9, 40):
        cache = CompactedCache(model.config, policy(keep=9, interval=10, sinks=1, recent=2))
        write(model, cache, prompt(length=length), 31)
        assert [e.seen for e in cache.events] == [length + 10, length + 20, length + 30]


def test_learned_positions_work_and_expected_attention_says_why_not():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.1)).eval()
    model.generation_config.eos_token_id = None
    cache = CompactedCache(model.config, policy())
    out = write(model, cache, prompt(), 30, output_logits=True, return_dict_in_generate=True, pad_token_id=0)
    assert len(cache.events) == 2
    model.config.num_key_value_heads = 4
    scale = dict(scaling=16**-0.5)
    AttentionInterface.register("test_masked", lambda *a, **k: _masked_attention(*a, **(k | scale)))
    close(torch.stack(out.logits, 1), reference(model, out.sequences[:, :-1], cache.events)[:, 39:])
    AttentionInterface.register("test_masked", _masked_attention)
    with pytest.raises(UnsupportedModelError, match="rotary"):
        write(model, CompactedCache(model.config, policy(scorer="expected_attention")), prompt(), 30, pad_token_id=0)


def test_eager_model_is_restored():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZE, **SPREAD, num_key_value_heads=2), attn_implementation="eager").eval()
    cache = CompactedCache(model.config, policy())
    write(model, cache, prompt(), 30)
    assert len(cache.events) == 2 and model.config._attn_implementation == "eager"
    with pytest.raises(ZeroDivisionError), cache.policy.attach(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "eager"


# ---- bad input ----


def test_budget_below_must_keep_shrinks_the_recent_suffix():
    model = small("llama-gqa")
    cache = CompactedCache(model.config, policy(keep=6, sinks=4, recent=16))
    out = write(model, cache, prompt(), 14, output_logits=True, return_dict_in_generate=True)
    assert cache.events[0].positions.reshape(-1, 6).unique(dim=0).tolist() == [[0, 1, 2, 3, 48, 49]]
    close(torch.stack(out.logits, 1), reference(model, out.sequences[:, :-1], cache.events)[:, 39:])


def test_more_segments_than_budget_spread_thin_or_say_so():
    model = small("llama-gqa")
    cache = CompactedCache(model.config, policy(keep=10, seg_len=(1, 2)), record="full")
    write(model, cache, prompt(), 12)
    chosen = cache.events[0].selection
    assert int(chosen.segments.counts.min()) > 2 and chosen.quota.sum(-1).unique().tolist() == [2] and int(chosen.quota.max()) == 1
    with pytest.raises(InputError, match="segments"):
        write(model, CompactedCache(model.config, policy(keep=10, seg_len=(1, 2), order="released")), prompt(), 12)


def test_share_that_does_not_hold_the_sinks_is_an_error():
    model = small("llama-gqa")
    with pytest.raises(InputError, match=r"keep: got 0.02 = 1 tokens, allowed more than 2"):
        write(model, CompactedCache(model.config, policy(keep=0.02)), prompt(), 12)


def test_nan_scores_stop_the_run_and_name_the_scorer():
    def broken(keys, values, queries, positions):
        return keys[..., 0] * float("nan")

    model = small("llama-gqa")
    with pytest.raises(InputError, match="scorer broken: got NaN"):
        write(model, CompactedCache(model.config, policy(scorer=broken)), prompt(), 12)
    assert model.config._attn_implementation == "sdpa"


def test_empty_prompt_is_a_clear_error():
    model, empty = small("llama-gqa"), torch.zeros(1, 0, dtype=torch.long)
    cache = CompactedCache(model.config, policy())
    with pytest.raises(InputError, match="prompt: got 0 tokens"):
        write(model, cache, empty, 4)
    with pytest.raises(InputError, match="prompt: got 0 tokens"), cache.policy.attach(model):
        model(empty, cache=cache)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(),
        Gemma3TextConfig(),
        MistralConfig(sliding_window=64),
        Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=4),
    ],
    ids=lambda c: type(c).__name__,
)
def test_sliding_window_and_hybrid_models_are_refused(config):
    with pytest.raises(UnsupportedModelError, match="sliding_attention.*full attention in every layer"):
        CompactedCache(config, policy())


@pytest.mark.parametrize("kind", ["quantized", "static", "offloaded"])
def test_other_cache_implementations_are_refused(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZE, **SPREAD, num_key_value_heads=2))
    model.generation_config.cache_implementation = kind
    with pytest.raises(UnsupportedModelError, match=f"cache_implementation: got {kind}"), policy().attach(model):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_models_outside_of_the_attention_interface_are_refused():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)).eval()
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        write(model, CompactedCache(model.config, policy()), prompt(), 12)


def test_forward_without_attach_is_an_error():
    model = small("llama-gqa")
    cache = CompactedCache(model.config, policy())
    with pytest.raises(RunError, match="outside of its policy's attach"), torch.no_grad():
        model(prompt(), cache=cache)
    other = policy(keep=30)
    with pytest.raises(RunError, match="attach"), other.attach(model):
        model(prompt(), cache=cache)


def test_a_plain_cache_inside_attach_is_left_alone():
    model, ids = small("llama-gqa"), prompt()
    with policy().attach(model):
        inside = model.generate(ids, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(inside, write(model, None, ids, 20))


def test_cropping_is_an_error():
    model = small("llama-gqa")
    cache = CompactedCache(model.config, policy())
    read(model, cache, prompt(), [40])
    with pytest.raises(RunError, match="crop"):
        cache.crop(-3)
    with pytest.raises(ValueError, match="crop"):
        write(model, CompactedCache(model.config, policy()), prompt(rows=1), 12, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_are_refused(side):
    model, ids = small("llama-gqa"), prompt()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask = mask if side == "left" else mask.flip(1)
    with pytest.raises(InputError, match="attention_mask: got a padded batch"):
        write(model, CompactedCache(model.config, policy()), ids, 12, attention_mask=mask)


def test_padding_in_a_later_chunk_is_refused():
    model, ids = small("llama-gqa"), prompt(length=60)
    cache = CompactedCache(model.config, policy())
    read(model, cache, ids[:, :50], [40, 10])
    mask = torch.ones_like(ids)
    mask[1, 50:53] = 0
    with pytest.raises(InputError, match="attention_mask: got a padded batch"), cache.policy.attach(model):
        model(ids[:, 50:], attention_mask=mask, cache=cache)


@every_architecture
def test_a_mask_of_ones_changes_nothing(name):
    model, ids = small(name), prompt(length=65)
    logits = []
    for masked in (False, True):
        cache, out = CompactedCache(model.config, policy()), []
        with cache.policy.attach(model), torch.no_grad():
            for a, b in ((0, 40), (40, 50), (50, 55), (55, 56), (56, 65)):
                mask = torch.ones(2, b, dtype=torch.long) if masked else None
                out.append(model(ids[:, a:b], attention_mask=mask, cache=cache).logits)
        assert len(cache.events) == 2
        logits.append(torch.cat(out, 1))
    assert torch.equal(*logits)


# ---- a real language model ----


@pytest.fixture(scope="module")
def smollm():
    loaders = pytest.importorskip("nbkit.loaders", reason="the loaders are not built yet")
    model, tokenizer = loaders.load_model("smollm2-135m", device="cpu", dtype="float32")
    text = "The key-value cache of a language model grows by one entry per token. When it is full, the least useful entries have to go: "
    return model, tokenizer(text, return_tensors="pt").input_ids


def test_smollm2_budget_beyond_length_generates_the_same_tokens(smollm):
    model, ids = smollm
    cache = CompactedCache(model.config, policy(keep=ids.shape[1] + 8, interval=4))
    assert torch.equal(write(model, cache, ids, 8), write(model, None, ids, 8))
    assert cache.events == []


def test_smollm2_compaction_equals_the_full_cache_masked_per_head(smollm):
    model, ids = smollm
    cache = CompactedCache(model.config, policy(keep=16, interval=4, scorer="tova"))
    out = write(model, cache, ids, 10, output_logits=True, return_dict_in_generate=True)
    assert len(cache.events) == 2
    got, text = torch.stack(out.logits, 1), out.sequences[:, :-1]
    close(got, reference(model, text, cache.events)[:, ids.shape[1] - 1 :])
    assert float((got - reference(model, text, [])[:, ids.shape[1] - 1 :])[:, -1].abs().max()) > 0.1
