"""Exact facts about reading a prompt through parts: what the session does to rows, positions, attention and cache, and what it refuses."""

from functools import cache as memo

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
)

from nbkit.errors import InputError, RunError, UnsupportedModelError
from nbkit.inference import PARTS, Attention, Eviction, RaggedCache, Rows, attach, get, register

SIZE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=512)
# Wide enough that attention is far from uniform: otherwise nothing would depend on what is dropped.
SPREAD = dict(initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None)
ARCHITECTURES = {
    "llama-gqa": (LlamaConfig, dict(num_key_value_heads=2)),
    "llama-mha": (LlamaConfig, dict(num_key_value_heads=4)),
    "qwen3": (Qwen3Config, dict(num_key_value_heads=2, head_dim=8)),
    "mistral": (MistralConfig, dict(num_key_value_heads=2, sliding_window=None)),
}
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(kind, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**(SIZE | SPREAD | changes))).eval()


@memo
def small(name="llama-gqa"):
    kind, changes = ARCHITECTURES[name]
    return build(kind, **changes)


def prompt(length=40, seed=0, batch=1):
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def write(model, ids, tokens=6, **options):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)


class Halves(Rows):
    """Every second row, so that the last one stays, before the given layers."""

    def __init__(self, *layers, prune_at="pre"):
        self.layers, self.prune_at = layers, prune_at

    def keep(self, run, layer):
        alive = len(run.positions)
        return torch.arange((alive + 1) % 2, alive, 2) if layer in self.layers else None


class Fixed(Rows):
    """Gives back what it was made with: rows for keep() before layer 1, or the answer of prefilter()."""

    def __init__(self, rows=None, before=None):
        self.rows, self.before = rows, before

    def keep(self, run, layer):
        return self.rows if layer == 1 else None

    def prefilter(self, run, model, ids):
        return self.before


class Evict(Eviction):
    def __init__(self, slots):
        self.slots = slots

    def keep(self, run, layer, k, v, queries, positions):
        return self.slots(k, queries, positions) if callable(self.slots) else self.slots


class Dense(Attention):
    """Dense attention written out; it notes what it saw."""

    def __init__(self):
        self.seen = []

    def attend(self, run, layer, q, k, v, scaling):
        self.seen.append((layer, tuple(q.shape), tuple(k.shape)))
        groups = q.shape[1] // k.shape[1]
        logits = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        run.charge(layer, pairs=float(q.shape[1] * (~future).sum()), probe=3.0)
        return logits.masked_fill(future, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)


@torch.no_grad()
def masked_logits(model, ids, kept):
    """The model on all rows, where in each layer the rows outside of ``kept`` are hidden from every other row: (1, tokens, vocabulary)."""
    body, tokens = model.model, ids.shape[1]
    hidden, places = body.embed_tokens(ids), torch.arange(tokens)
    around = body.rotary_emb(hidden, places[None])
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for layer, positions in zip(body.layers, kept, strict=True):
        mask = causal & (torch.isin(places, positions)[None] | torch.eye(tokens, dtype=torch.bool))
        hidden = layer(hidden, attention_mask=mask[None, None], position_ids=places[None], position_embeddings=around)
    return model.lm_head(body.norm(hidden))


# ---- nothing changes without parts, and after the block ----


@every_architecture
def test_without_parts_nothing_changes(name):
    model, ids = small(name), prompt()
    with torch.no_grad():
        expected = model(ids).logits
    text = write(model, ids)
    with torch.no_grad(), attach(model) as run:
        close(model(ids).logits, expected, 1e-6)
        assert torch.equal(write(model, ids), text)
        assert isinstance(run.cache, RaggedCache) and run.cache.lengths() == (45,) * 4
    assert run.density == 1 and run.counts == [40] * 4 and len(run.seconds) == 4


@every_architecture
def test_dense_attention_part_sees_every_layer_and_changes_nothing(name):
    model, ids, part = small(name), prompt(), Dense()
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, attention=part) as run:
            close(model(ids).logits, expected)
    heads = model.config.num_key_value_heads
    assert part.seen == [(layer, (1, 4, 40, 8), (1, heads, 40, 8)) for layer in range(4)]
    assert run.pairs == [4 * 820.0] * 4 and run.probe == [3.0] * 4 and run.density == (4 * 820 + 3) / (4 * 820)


@pytest.mark.parametrize("options", [{"rows": Halves(1, prune_at="post_attn")}, {"last_row_only": True}, {"eviction": Evict(None)}])
def test_the_model_is_put_back_also_after_an_error(options):
    model, ids = small(), prompt()
    before = model(ids).logits
    own = [dict(module.__dict__) for module in model.modules()]
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    with pytest.raises(ZeroDivisionError), attach(model, **options):
        model(ids)
        raise ZeroDivisionError
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert [set(m.__dict__) for m in model.modules()] == [set(attributes) for attributes in own]
    assert model.config._attn_implementation == "sdpa" and torch.equal(model(ids).logits, before)


def test_a_prompt_after_one_that_failed():
    model = small()
    with torch.no_grad(), attach(model, rows=Halves(2)) as run:
        expected = model(prompt()).logits
        with pytest.raises(InputError):
            model(prompt(), attention_mask=torch.zeros(1, 40))
        close(model(prompt()).logits, expected, 0)
        assert run.counts == [40, 40, 20, 20]


# ---- rows ----


@every_architecture
@pytest.mark.parametrize("prune_at", ["pre", "post_attn"])
def test_dropped_rows_equal_masked_keys(name, prune_at):
    model, ids = small(name), prompt(41)
    with torch.no_grad(), attach(model, rows=Halves(1, 3, prune_at=prune_at)) as run:
        out = model(ids)
    assert run.counts == [41, 21, 21, 11] and out.cache.lengths() == (41, 21, 21, 11)
    assert run.ffn_rows == ([41, 21, 21, 11] if prune_at == "pre" else [21, 21, 11, 11])
    close(out.logits, masked_logits(model, ids, run.kept)[:, run.kept[-1]], 1e-4)
    assert run.kept[-1].tolist() == list(range(0, 41, 4)) and torch.equal(run.cache.positions(3), run.kept[-1])


@every_architecture
def test_decoding_over_the_ragged_cache(name):
    """One token at a time, one chunk, and the whole text with masked keys give the same."""
    model, ids, new = small(name), prompt(41), torch.tensor([[5, 11, 17]])
    with torch.no_grad(), attach(model, rows=Halves(1, 3)) as run:
        chunk = model(new, cache=model(ids).cache).logits
        cache, single = model(ids).cache, []
        for token in new[0]:
            single.append(model(token.view(1, 1), cache=cache).logits)
        assert run.cache.lengths() == (44, 24, 24, 14) and run.cache.get_seq_length() == 44
        assert run.cache.positions(3).tolist() == [*range(0, 41, 4), 41, 42, 43]
        kept = [torch.cat([k, torch.arange(41, 44)]) for k in run.kept]
    close(torch.cat(single, 1), chunk)
    close(chunk, masked_logits(model, torch.cat([ids, new], 1), kept)[:, -3:], 1e-4)


def test_generate_decodes_like_single_steps():
    model, ids = small(), prompt()
    with torch.no_grad(), attach(model, rows=Halves(2)):
        out, expected = model(ids), []
        for _ in range(5):
            expected.append(out.logits[:, -1].argmax(-1))
            out = model(expected[-1][None], cache=out.cache)
        assert write(model, ids, 5)[0, 40:].tolist() == torch.cat(expected).tolist()
        given = RaggedCache(model.config)
        assert write(model, ids, 5, cache=given)[0, 40:].tolist() == torch.cat(expected).tolist()
        assert given.lengths() == (44, 44, 24, 24)


def test_two_prompts_in_turn_keep_their_own_caches():
    model, new = small(), torch.tensor([[3]])
    with torch.no_grad(), attach(model, rows=Halves(2)) as run:
        alone = model(new, cache=model(prompt(30, 1)).cache).logits
        first = model(prompt(30, 1)).cache
        model(prompt(50, 2))
        assert run.tokens == 50 and run.counts == [50, 50, 25, 25]
        close(model(new, cache=first).logits, alone, 1e-6)


def test_prefilter_with_original_positions():
    model, ids, index = small(), prompt(), torch.tensor([0, 5, 6, 20, 38])
    with torch.no_grad():
        # The library reads gaps in positions without a mask as separate texts.
        expected = model(ids[:, index], position_ids=index[None], attention_mask=torch.ones(1, 5)).logits
        with attach(model, rows=Fixed(before=(index, index))) as run:
            out = model(ids)
            close(out.logits, expected)
            after = model(torch.tensor([[7]]), cache=out.cache).logits
        kept = [torch.cat([index, torch.tensor([40])])] * 4
        close(after[0, -1], masked_logits(model, torch.cat([ids, torch.tensor([[7]])], 1), kept)[0, -1], 1e-4)
    assert run.tokens == 40 and run.counts == [5] * 4 and out.cache.get_seq_length() == 41


def test_prefilter_with_new_positions():
    model, ids, index = small(), prompt(), torch.tensor([0, 5, 6, 20, 38])
    new = torch.tensor([[7]])
    with torch.no_grad():
        expected = model(torch.cat([ids[:, index], new], 1)).logits
        with attach(model, rows=Fixed(before=(index, torch.arange(5)))) as run:
            out = model(ids)
            close(out.logits, expected[:, :-1])
            close(model(new, cache=out.cache).logits, expected[:, -1:])
    # What is told is where the tokens stood, not how they were renumbered.
    assert run.kept[0].tolist() == index.tolist() and run.cache.positions(0).tolist() == [0, 5, 6, 20, 38, 40]


@every_architecture
def test_last_row_only_gives_the_same_last_logits(name):
    model, ids = small(name), prompt()
    text = write(model, ids)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
        with attach(model, last_row_only=True) as run:
            close(model(ids).logits, expected)
            assert torch.equal(write(model, ids), text)
        size = run.sizes[-1]
        dense = 40 * sum(sum(s) for s in run.sizes) + 4 * 820 * 4 * 16
        assert run.macs == dense - 39 * (size.query_output + size.ffn) - (820 - 40) * 4 * 16
        with attach(model, rows=Halves(2), last_row_only=True):
            close(model(ids).logits[:, -1], masked_logits(model, ids, [torch.arange(40)] * 2 + [torch.arange(1, 40, 2)] * 2)[:, -1], 1e-4)


@pytest.mark.parametrize("options", [{"rows": Halves(1, 3, prune_at="post_attn")}, {"rows": Halves(3), "attention": Dense()}])
def test_last_row_only_beside_other_parts(options):
    model, ids, new = small(), prompt(41), torch.tensor([[5]])
    with torch.no_grad():
        with attach(model, **options):
            out = model(ids)
            expected = torch.cat([out.logits[:, -1:], model(new, cache=out.cache).logits], 1)
        with attach(model, **options, last_row_only=True) as run:
            out = model(ids)
            assert out.logits.shape[1] == 1 and run.ffn_rows[-1] == 1
            close(torch.cat([out.logits, model(new, cache=out.cache).logits], 1), expected)


def test_work_is_counted_from_the_shapes():
    model, ids = small(), prompt()
    with torch.no_grad(), attach(model, rows=Halves(2)) as run:
        model(ids)
    row = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    assert run.macs == (40 + 40 + 20 + 20) * row + 2 * (820 + 210) * 4 * 16
    assert run.total_macs(lm_head=True) == run.macs + 32 * 97
    assert run.density == (820 + 210) / (2 * 820)
    assert run.evidence_kept([(10, 13)]) == [1, 1, 1 / 3, 1 / 3] and run.evidence_kept([]) == [1] * 4
    run.charge_macs(5)
    assert run.extra_macs == 5


# ---- eviction ----


@every_architecture
def test_eviction_equals_masked_slots(name):
    """Each key head keeps entries of its own; decoding sees these and nothing else, at their old positions."""
    model, ids, new = small(name), prompt(), torch.tensor([[5, 11]])
    heads = model.config.num_key_value_heads
    slots = torch.stack([torch.arange(h, 40, 3)[:13] for h in range(heads)])[None]
    seen = {}

    def choose(k, queries, positions):
        seen.update(keys=tuple(k.shape), queries=tuple(queries.shape), positions=positions.tolist())
        return slots

    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, eviction=Evict(choose)) as run:
            out = model(ids)
            close(out.logits, expected, 1e-6)
            found = model(new, cache=out.cache).logits
        # The same by hand: a cache of everything, and a mask a head.
        cache = DynamicCache(config=model.config)
        model(ids, cache=cache)
        mask = torch.zeros(heads, 2, 42, dtype=torch.bool)
        mask[:, :, 40:] = torch.ones(2, 2, dtype=torch.bool).tril()
        mask[:, :, :40] = torch.zeros(heads, 40, dtype=torch.bool).scatter(1, slots[0], True)[:, None]
        close(found, model(new, cache=cache, attention_mask=mask.repeat_interleave(4 // heads, 0)[None]).logits, 1e-4)
    assert seen == {"keys": (1, heads, 40, 8), "queries": (1, 4, 40, 8), "positions": list(range(40))}
    assert run.cache.lengths() == (15,) * 4 and torch.equal(run.cache.positions(1)[:, :13], slots[0])
    assert run.cache.positions(1)[:, 13:].tolist() == [[40, 41]] * heads and run.cache.get_seq_length() == 42
    assert run.cache.nbytes == 4 * 2 * heads * 15 * 8 * 4


def test_eviction_after_dropped_rows_keeps_original_positions():
    model = small()
    with torch.no_grad(), attach(model, rows=Halves(2), eviction=Evict(torch.tensor([[[0, 3], [1, 4]]]))) as run:
        model(prompt())
    assert run.cache.positions(3).tolist() == [[1, 7], [3, 9]] and run.counts == [40, 40, 20, 20]


@pytest.mark.parametrize(("slots", "text"), [
    (torch.tensor([[0, 1]]), "int64"), (torch.zeros(1, 2, 0, dtype=torch.long), "m >= 1"), (torch.tensor([[[1, 1], [0, 2]]]), "strictly"),
    (torch.tensor([[[0, 40], [0, 1]]]), "below 40"), (torch.tensor([[[0.0], [1.0]]]), "int64"),
])
def test_wrong_slots(slots, text):
    with attach(small(), eviction=Evict(slots)), pytest.raises(InputError, match=text):
        small()(prompt())


# ---- batches and caches ----


def test_attention_parts_read_a_batch_row_by_row():
    model, ids, part = small(), prompt(batch=3), Dense()
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, attention=part) as run:
            close(model(ids, attention_mask=torch.ones(3, 40)).logits, expected)
    assert run.pairs == pytest.approx([4 * 820.0] * 4) and run.probe == pytest.approx([3.0] * 4) and len(part.seen) == 12


def test_without_a_cache():
    model = small()
    with torch.no_grad(), attach(model, rows=Halves(1), eviction=Evict(None)) as run:
        out = model(prompt(), use_cache=False)
        assert out.cache is None and run.cache is None
        close(out.logits, model(prompt()).logits, 0)


def test_the_cache_cannot_step_back_or_serve_beams():
    model = small()
    with torch.no_grad(), attach(model, rows=Halves(1)) as run:
        model(prompt())
        with pytest.raises(RunError, match="step back"):
            run.cache.crop(-1)
        for change in (lambda: run.cache.reorder_cache(torch.tensor([0])), lambda: run.cache.batch_repeat_interleave(2)):
            with pytest.raises(RunError, match="one prompt at a time"):
                change()
        with pytest.raises(InputError, match="one prompt"):
            write(model, prompt(), num_beams=2)
        held = run.cache
    with pytest.raises(RunError, match="outside of attach"):
        model(torch.tensor([[1]]), cache=held)
    held.reset()
    assert held.lengths() == (0,) * 4 and held.get_seq_length() == 0
    with pytest.raises(InputError, match="holds nothing"):
        held.positions(0)


# ---- what is refused ----


@pytest.mark.parametrize(("call", "text"), [
    (dict(input_ids=prompt(batch=2)), "2 prompts"),
    (dict(input_ids=prompt(), attention_mask=torch.tensor([[0] + [1] * 39])), "padded"),
    (dict(input_ids=prompt(), attention_mask=torch.ones(1, 1, 40, 40)), "own"),
    (dict(input_ids=prompt(), labels=prompt()), "labels"),
    (dict(input_ids=prompt(), position_ids=torch.zeros(1, 40, dtype=torch.long)), "rise"),
    (dict(input_ids=prompt(), cache=DynamicCache()), "RaggedCache"),
    (dict(input_ids=prompt()[:, :0]), "0 tokens"),
])
def test_wrong_calls(call, text):
    with attach(small(), rows=Halves(1)), pytest.raises(InputError, match=text):
        small()(**call)


def test_generate_refuses_a_cache_that_the_caller_chose():
    model = small()
    with attach(model):
        with pytest.raises(InputError, match="RaggedCache"):
            write(model, prompt(), cache=DynamicCache(config=model.config))
        with pytest.raises(InputError, match="RaggedCache"):
            write(model, prompt(), cache_implementation="static")


def test_embeddings_instead_of_ids():
    model, ids = small(), prompt()
    embeds = model.model.embed_tokens(ids).detach()
    with torch.no_grad(), attach(model, rows=Halves(1)) as run:
        close(model(inputs_embeds=embeds).logits, model(ids).logits, 0)
    with attach(model, rows=Fixed(before=(torch.tensor([0]), torch.tensor([0])))), pytest.raises(InputError, match="input_ids"):
        model(inputs_embeds=embeds)
    assert run.counts == [40, 20, 20, 20]


@pytest.mark.parametrize(("rows", "text"), [
    (torch.tensor([3, 2, 39]), "strictly increasing"), (torch.tensor([0, 0, 39]), "strictly increasing"), (torch.tensor([0, 40]), "below 40"),
    (torch.tensor([-1, 39]), "strictly increasing"), (torch.tensor([0, 5]), "last row"), (torch.zeros(0, dtype=torch.long), "at least one"),
    (torch.ones(40, dtype=torch.bool), "at least one whole number"), (torch.tensor([[39]]), "at least one whole number"),
])
def test_wrong_rows(rows, text):
    with attach(small(), rows=Fixed(rows)), pytest.raises(InputError, match=text):
        small()(prompt())


@pytest.mark.parametrize(("before", "text"), [
    ((torch.tensor([4, 2]), torch.tensor([0, 1])), "indices"), ((torch.tensor([0, 40]), torch.tensor([0, 1])), "below 40"),
    ((torch.tensor([0, 4]), torch.tensor([1, 1])), "positions"), ((torch.tensor([0, 4]), torch.tensor([1])), "as many"),
])
def test_wrong_prefilter(before, text):
    with attach(small(), rows=Fixed(before=before)), pytest.raises(InputError, match=text):
        small()(prompt())


def test_attention_of_another_shape():
    class Short(Attention):
        def attend(self, run, layer, q, k, v, scaling):
            return q[:, :, 1:]

    with attach(small(), attention=Short()), pytest.raises(InputError, match=r"attend\(\) in Short"):
        small()(prompt())


@pytest.mark.parametrize(("kind", "part"), [("rows", Dense()), ("attention", Halves(1)), ("eviction", "snapkv")])
def test_parts_of_another_kind(kind, part):
    with pytest.raises(InputError, match=f"a part of kind '{kind}'"), attach(small(), **{kind: part}):
        pass


def test_one_reader_at_a_time():
    model = small()
    with attach(model), pytest.raises(RunError, match="attached already"), attach(model):
        pass
    with attach(model), attach(small("llama-mha")):
        pass
    with pytest.raises(InputError, match="prune_at"), attach(model, rows=Halves(1, prune_at="later")):
        pass
    with attach(model):
        pass


def test_models_that_cannot_be_attached(monkeypatch):
    small_sizes = dict(num_key_value_heads=2)
    with pytest.raises(UnsupportedModelError, match="sliding_attention"), attach(build(MistralConfig, sliding_window=16, **small_sizes)):
        pass
    with pytest.raises(UnsupportedModelError, match="sliding_attention"), attach(build(Gemma2Config, head_dim=8, **small_sizes)):
        pass
    with pytest.raises(UnsupportedModelError, match="list of layers"), attach(build(GPT2Config)):
        pass
    monkeypatch.setattr(type(small()), "_supports_attention_backend", False)
    with pytest.raises(UnsupportedModelError, match="attention interface"), attach(small()):
        pass


def test_a_layer_that_goes_around_the_interface(monkeypatch):
    model = small()

    def own(hidden_states, **options):
        return hidden_states, None

    monkeypatch.setattr(model.model.layers[2].self_attn, "forward", own)
    with attach(model), pytest.raises(UnsupportedModelError, match="layer 2"):
        model(prompt())


@pytest.mark.parametrize("kind", [Olmo2Config, GraniteConfig])
def test_layers_of_another_build_take_rows_only_before_a_layer(kind):
    """OLMo 2 norms after its modules and Granite scales its residuals: the replaced layer would be wrong, the hooks are not."""
    changes = dict(num_key_value_heads=2) | (dict(residual_multiplier=0.5) if kind is GraniteConfig else {})
    model = build(kind, **changes)
    with torch.no_grad(), attach(model, rows=Halves(1)) as run:
        out = model(prompt())
    hidden = masked_logits(model, prompt(), run.kept)[:, run.kept[-1]] if kind is Olmo2Config else None
    if hidden is not None:
        close(out.logits, hidden, 1e-4)
    for options in ({"rows": Halves(1, prune_at="post_attn")}, {"last_row_only": True}):
        with pytest.raises(UnsupportedModelError, match="standard pre-norm"), attach(model, **options):
            pass


def test_fused_projections_cannot_read_the_last_row_alone():
    model = build(Phi3Config, num_key_value_heads=2, sliding_window=None)
    with torch.no_grad(), attach(model, rows=Halves(2)) as run:
        model(prompt())
    assert run.counts == [40, 40, 20, 20]
    with pytest.raises(UnsupportedModelError), attach(model, last_row_only=True):
        pass


def test_a_fixed_cache_kind_in_the_generation_config(monkeypatch):
    model = small()
    monkeypatch.setattr(model.generation_config, "cache_implementation", "static")
    with pytest.raises(UnsupportedModelError, match="static"), attach(model):
        pass


def test_the_run_before_a_prompt():
    with attach(small()) as run, pytest.raises(InputError, match="no prompt"):
        _ = run.macs
    assert run.counts == [] and run.tokens == 0


# ---- names ----


def test_parts_by_name():
    @register
    class Nothing(Rows):
        name = "test-nothing"

    try:
        assert isinstance(get("rows", "test-nothing"), Nothing) and register(Nothing) is Nothing
        with pytest.raises(InputError, match="test-nothing"):
            get("rows", "test-nothin")
        other = type("Other", (Rows,), {"name": "test-nothing"})
        with pytest.raises(InputError, match="taken by"):
            register(other)
    finally:
        PARTS["rows"].pop("test-nothing")
    with pytest.raises(InputError, match="rows, attention, eviction"):
        get("columns", "x")
    with pytest.raises(InputError, match="with a name"):
        register(type("Nameless", (Rows,), {}))


def test_other_models_are_not_touched():
    """While one model is attached, another one keeps its own attention and masks."""
    other, ids = small("llama-mha"), prompt(batch=2)
    mask = torch.ones(2, 40)
    mask[0, :10] = 0
    with torch.no_grad():
        expected = other(ids, attention_mask=mask).logits
        with attach(small(), rows=Halves(1)):
            close(other(ids, attention_mask=mask).logits, expected, 0)
