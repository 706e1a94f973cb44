"""Exact facts about the baselines of fastprefill: choices by hand, counts and positions, identities 5 and 10, work as the layers count it."""

from contextlib import contextmanager
from functools import cache as memo

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config

from nbkit.errors import InputError, RunError, UnsupportedModelError
from nbkit.inference import attach
from nbkit.methods.fastprefill import baselines as B
from nbkit.methods.fastprefill.baselines.lazy import LazyRun
from nbkit.methods.fastprefill.cost import ModelShape, prefill_macs

SIZE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, head_dim=8, max_position_embeddings=512)
# Wide enough that attention is far from uniform: otherwise nothing would depend on what is dropped.
SPREAD = dict(initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None)
ARCHITECTURES = {
    "llama-gqa": (LlamaConfig, dict(num_key_value_heads=2)),
    "llama-mha": (LlamaConfig, dict(num_key_value_heads=4)),
    "qwen3": (Qwen3Config, dict(num_key_value_heads=2)),
    "mistral": (MistralConfig, dict(num_key_value_heads=2, sliding_window=None)),
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


def prompt(length=60, seed=0):
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decoded(model, ids, answer, **options):
    """Logits of the last prompt token and of every answer token, read one at a time."""
    out = model(ids, logits_to_keep=1, use_cache=True, **options)
    logits = [out.logits[0, -1]]
    for token in answer:
        out = model(token.view(1, 1), cache=out.cache, use_cache=True)
        logits.append(out.logits[0, -1])
    return torch.stack(logits)


ANSWER = torch.tensor([5, 11, 17, 3])


@memo
def dense(name):
    return decoded(small(name), prompt(), ANSWER, cache=DynamicCache())


def far(a, b):
    return float((a - b).abs().max())


# ---- choices by hand ----


def test_row_attention_is_the_softmax_of_the_last_rows():
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 4, 9, 8, generator=generator), torch.randn(1, 2, 9, 8, generator=generator)
    logits = torch.einsum("hid,hjd->hij", q[0], k[0].repeat_interleave(2, 0)) * 0.3
    shares = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")).softmax(-1)
    assert far(B.row_attention(q[:, :, -3:], k, 0.3), shares[:, -3:].sum(1)) < 1e-6
    weights = torch.tensor([1.0, 2.0, 4.0])
    assert far(B.row_attention(q[:, :, -3:], k, 0.3, weights=weights), (shares[:, -3:] * weights[:, None]).sum(1)) < 1e-6


def test_best_prefers_the_earlier_of_equals_and_never_loses_a_forced_token():
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, float("-inf"), 0.0])
    assert B.best(scores, 3).tolist() == [0, 1, 2]
    assert B.best(scores, 3, [4, 5]).tolist() == [0, 4, 5]
    assert B.best(scores, 1, [4, 5]).tolist() == [4, 5]
    assert B.best(scores, 99).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(InputError, match="NaN"):
        B.best(torch.tensor([0.0, float("nan")]), 1)


def test_specprefill_chunks_by_hand():
    # 4 chunks of 4 tokens (the last of 2). Step 1: head 0 looks at chunk 1, head 1 a little less at chunk 2. Step 2: both at chunk 0.
    attention = torch.zeros(2, 2, 14)
    attention[0, 0, 5], attention[0, 1, 9], attention[1, :, 0] = 0.8, 0.6, 0.4
    scores = B.spec_scores(attention, size=1)
    want = torch.zeros(14, dtype=torch.float64)
    want[5], want[9], want[0] = 0.4, 0.3, 0.2  # mean over the two steps of the maximum over heads
    assert far(scores, want) < 1e-7
    assert B.chunk_choice(scores, 0.5, chunk=4).tolist() == [4, 5, 6, 7, 12, 13]
    assert B.chunk_choice(scores, 0.75, chunk=4).tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert B.chunk_choice(scores, 0.01, chunk=4).tolist() == [12, 13]
    assert B.chunk_choice(scores, 1.0, chunk=4).tolist() == list(range(14))
    # Pooling over 3 spreads a third to both neighbours before the maximum: 0.8 / 3 beside 0.
    pooled = B.spec_scores(attention[:1, :1], size=3)
    assert far(pooled[4:7], torch.full((3,), 0.8 / 3, dtype=torch.float64)) < 1e-7 and pooled[3] == 0


def test_asl_rank_variance_by_hand():
    first, second, third = (B.ranks(torch.tensor(x)) for x in ([9.0, 8.0, 7.0, 6.0], [9.0, 7.0, 8.0, 6.0], [6.0, 9.0, 8.0, 7.0]))
    assert [r.tolist() for r in (first, second, third)] == [[0, 1, 2, 3], [0, 2, 1, 3], [3, 0, 1, 2]]
    # Top 1: token 0 in the first two layers, token 1 in the third. Ranks (0, 0, 3) vary by 2, (1, 2, 0) by 2/3.
    assert B.rank_variance([first, second, third], 1) == pytest.approx((2 + 2 / 3) / 2)
    # Top 2 of the first two layers: tokens 0, 1, 2 with variances 0, 1/4, 1/4.
    assert B.rank_variance([first, second], 2) == pytest.approx(1 / 6)
    assert B.rank_variance([first, first], 2) == 0


def test_pyramid_counts_by_hand_and_the_linear_option_is_a_line():
    assert [B.pyramid_share(layer, 4, 0.6, "linear") for layer in range(5)] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert [B.pyramid_share(layer, 4, 0.6, "cosine") for layer in (0, 2, 4)] == pytest.approx([1.0, 0.8, 0.6])
    # 100 tokens: 20 recent, context 80 -> 80 * 1 -> floor(80 * .9) -> floor(72 * .8) = 57, but not below 64.
    assert B.pyramid_counts(100, 4, delta=0.6, shape="linear", least=1) == (100, 100, 92, 77)
    assert B.pyramid_counts(100, 4, delta=0.6, shape="linear") == (100, 100, 92, 84)
    assert B.pyramid_counts(50, 4, delta=0.6) == (50, 50, 50, 50)


def test_pyramid_reaches_the_ratios_computed_from_the_layer_shapes_of_smollm2():
    # 1.33 and 1.69 at 1,024 tokens for delta 0.9 and 0.7, without the cost of scoring.
    smol = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
    full = prefill_macs(smol, [1024] * 30).total
    for delta, ratio in ((0.9, 1.33), (0.7, 1.69)):
        assert full / prefill_macs(smol, B.pyramid_counts(1024, 30, delta=delta)).total == pytest.approx(ratio, abs=0.02)


def test_slim_blocks_by_hand():
    assert B.cover(torch.tensor([0.0, 3.0, 2.0, 1.0]), torch.tensor([4, 4, 4, 2]), 10, (0, 3)).tolist() == [0, 1, 3]
    keys = torch.tensor([[0.0, 0.0, 6.0, 0.0], [2.0, 2.0, 2.0, 2.0], [1.0, 9.0, 9.0, 1.0]]).view(1, 1, 12, 1)
    blocks = torch.arange(12) // 4
    # Units of two tokens: means (0, 3), (2, 2), (5, 5); of four: 1.5, 2, 5.
    assert B.block_scores(torch.ones(1, 1, 1, 1), keys, blocks, unit=2).tolist() == [3.0, 2.0, 5.0]
    assert B.block_scores(torch.ones(1, 1, 1, 1), keys, blocks, unit=4).tolist() == [1.5, 2.0, 5.0]


def test_fastkv_cache_chooses_for_every_key_head_alone():
    scores = torch.tensor([[0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.9, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    assert B.fastkv_slots(scores, 2, 3, 2).tolist() == [[2, 4, 5], [0, 4, 5]]


# ---- inside a session ----

RULES = {
    "full": B.Full(),
    "full-lastrow": B.FullLastRow(),
    "fastkv": B.FastKV(rate=1.0),
    "fastkv-number": B.FastKV(rate=60),
    "gemfilter": B.GemFilter(keep_tokens=60),
    "gemfilter-more": B.GemFilter(keep_tokens=5000),
    "pyramidinfer": B.PyramidInfer(delta=1.0, least=1),
    "asl": B.ASL(tau=0.0),
    "lazyllm": B.LazyLLM(rates=(1.0, 1.0, 1.0)),
    "sliminfer": B.SlimInfer(rates=(1.0,), layers=(2,)),
    "specprefill": B.SpecPrefill(keep_share=1.0),
    "random": B.RandomRows(rate=1.0),
    "oracle": B.OracleRows(evidence=((3, 5),), rate=1.0),
}


@every_architecture
@pytest.mark.parametrize("rule", RULES)
def test_identity_05_keeping_everything_equals_the_dense_model(name, rule):
    model, ids, want = small(name), prompt(), dense(name)
    with attach(model, rows=RULES[rule]) as run:
        assert far(decoded(model, ids, ANSWER), want) < 1e-5
        assert {len(kept) for kept in run.kept} == {60}


DROPPING = {
    "fastkv": (B.FastKV(layer=2, rate=0.5), [60, 60, 30, 30, 30]),
    "fastkv-number": (B.FastKV(layer=4, rate=10), [60, 60, 60, 60, 10]),
    "fastkv-window": (B.FastKV(layer=2, rate=0.01), [60, 60, 8, 8, 8]),
    "pyramidinfer": (B.PyramidInfer(delta=0.5, least=1), list(B.pyramid_counts(60, 5, delta=0.5, least=1))),
    "asl": (B.ASL(first=2, tau=1.5, keep_tokens=0.5), [60, 60, 60, 30, 30]),
    "lazyllm": (B.LazyLLM(layers=(1, 3), rates=(0.5, 0.25)), [60, 30, 30, 15, 15]),
    "sliminfer": (B.SlimInfer(layers=(1, 3), rates=(0.8, 0.4), block=6, unit=3), [60, 48, 48, 24, 24]),
    "random": (B.RandomRows(layer=3, rate=0.6), [60, 60, 60, 36, 36]),
    "oracle": (B.OracleRows(evidence=((20, 24),), layer=1, rate=0.75), [60, 45, 45, 45, 45]),
}


@every_architecture
@pytest.mark.parametrize("rule", DROPPING)
def test_exact_counts_order_and_original_positions(name, rule):
    model, (rows, counts) = small(name), DROPPING[rule]
    with attach(model, rows=rows) as run, torch.no_grad():
        out = model(prompt(), logits_to_keep=1)
        assert [len(kept) for kept in run.kept] == counts
        for before, kept in zip([torch.arange(60), *run.kept[:-1]], run.kept, strict=True):
            assert torch.equal(kept, kept.unique()) and set(kept.tolist()) <= set(before.tolist())
        # The last token of the prompt always stays: the answer begins at its logits.
        assert all(int(kept[-1]) == 59 for kept in run.kept)
        assert out.cache.get_seq_length() == 60
        assert out.logits.shape[1] == 1


def test_oracle_keeps_all_evidence_at_any_rate():
    with attach(small("llama-gqa"), rows=B.OracleRows(evidence=((20, 30), (40, 42)), layer=2, rate=0.05, sinks=1, window=2)) as run, torch.no_grad():
        small("llama-gqa")(prompt())
        assert run.kept[2].tolist() == [0, *range(20, 30), 40, 41, 58, 59]


def test_random_rows_depend_on_the_seed_alone():
    def kept(seed):
        with attach(small("llama-gqa"), rows=B.RandomRows(layer=1, rate=0.8, seed=seed)) as run, torch.no_grad():
            small("llama-gqa")(prompt())
            return run.kept[1].tolist()

    assert kept(1) == kept(1) != kept(2)


@every_architecture
def test_gemfilter_is_the_model_on_the_chosen_tokens_alone_renumbered(name):
    model, ids = small(name), prompt()
    rule = B.GemFilter(layer=2, keep_tokens=0.3)
    seen = {}
    with torch.no_grad(), B.watched(draft := B.draft_of(model, 5), lambda layer, q, k, s: seen.setdefault(layer, (q, k))):
        draft(ids)
    q, k = seen[2]
    scores = torch.einsum("hd,hjd->hj", q[0, :, -1], k[0].repeat_interleave(q.shape[1] // k.shape[1], 0)).sum(0)
    padded = torch.nn.functional.pad(scores, (2, 2))
    chosen = padded.unfold(0, 5, 1).mean(-1).topk(18).indices.sort().values
    with attach(model, rows=rule) as run, torch.no_grad():
        logits = model(ids, logits_to_keep=1).logits
        assert [kept.tolist() for kept in run.kept] == [chosen.tolist()] * 5
    with torch.no_grad():
        assert far(logits[0, -1], model(ids[:, chosen]).logits[0, -1]) < 1e-5


@every_architecture
def test_gemfilter_decodes_on_after_the_renumbered_prompt(name):
    model, ids = small(name), prompt()
    with attach(model, rows=B.GemFilter(layer=1, keep_tokens=20, force_last=True)) as run:
        got = decoded(model, ids, ANSWER)
        index = run.kept[0]
    assert len(index) == 20 and int(index[-1]) == 59
    assert far(got, decoded(model, ids[:, index], ANSWER, cache=DynamicCache())) < 1e-5


@every_architecture
def test_specprefill_keeps_whole_chunks_at_their_original_positions(name):
    model, ids = small(name), prompt(70)
    with attach(model, rows=B.SpecPrefill(draft=2, keep_share=0.5, chunk=10, look_ahead=3, pool=3)) as run, torch.no_grad():
        logits = model(ids, logits_to_keep=1).logits
        positions = run.kept[0]
    assert len(positions) == 40 and set((positions // 10).tolist()) >= {6}
    assert torch.equal(positions // 10, torch.tensor(sorted(set((positions // 10).tolist()))).repeat_interleave(10))
    # The same tokens at the same places by the library's own means.
    with torch.no_grad():
        assert far(logits[0, -1], model(ids[:, positions], position_ids=positions[None]).logits[0, -1]) < 1e-5


def test_specprefill_takes_another_model_with_the_same_vocabulary():
    other = small("llama-mha")
    with attach(small("qwen3"), rows=B.SpecPrefill(draft=other, keep_share=0.5, chunk=8)) as run, torch.no_grad():
        small("qwen3")(prompt())
        assert len(run.kept[0]) == 28  # 4 of 8 chunks, the last one has 4 tokens
    torch.manual_seed(0)
    wrong = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZE, "vocab_size": 50}, **SPREAD))
    with attach(small("qwen3"), rows=B.SpecPrefill(draft=wrong)), pytest.raises(InputError, match=r"vocabulary of 50.*97"):
        small("qwen3")(prompt())


def test_asl_first_ratio_is_one_and_a_tau_above_it_drops_at_once():
    model, rule = small("llama-gqa"), B.ASL(first=1, tau=0.0, keep_tokens=0.5, span=2)
    with attach(model, rows=rule) as run, torch.no_grad():
        model(prompt())
        ratios = run.state[rule]["ratios"]
        assert ratios[0] == 1.0 and len(ratios) == 3 and run.state[rule]["dropped"] is None
    smallest = min(ratios[1:])
    drop = ratios.index(smallest)
    rule = B.ASL(first=1, tau=smallest * 1.000001, keep_tokens=0.5, span=2)
    with attach(model, rows=rule) as run, torch.no_grad():
        model(prompt())
        assert run.state[rule]["dropped"] == 2 + drop
        assert [len(kept) for kept in run.kept] == [60] * (2 + drop) + [30] * (3 - drop)
    with attach(model, rows=B.ASL(first=1, tau=1.01, keep_tokens=0.5)) as run, torch.no_grad():
        model(prompt())
        assert [len(kept) for kept in run.kept] == [60, 60, 30, 30, 30]


@every_architecture
def test_fastkv_cache_keeps_its_share_of_every_layer(name):
    model, rows, want = small(name), B.FastKV(layer=3, rate=0.5), dense(name)
    with attach(model, rows=rows, eviction=rows.cache(0.25)) as run:
        decoded(model, prompt(), ANSWER[:1])
        sizes = [layer.keys.shape[2] for layer in run.cache.layers]
    assert sizes == [16] * 5  # 15 of the prompt and one token decoded
    with attach(model, eviction=B.FastKVCache(retain_rate=1.0)):
        assert far(decoded(model, prompt(), ANSWER), want) < 1e-5


@pytest.mark.parametrize(("rule", "window"), [("fastkv", 8), ("pyramidinfer", 12), ("lazyllm", 1), ("random", 0)])
def test_macs_of_a_run_are_those_of_its_counts_with_the_scoring(rule, window):
    rows, counts = DROPPING[rule]
    model = small("llama-gqa")
    with attach(model, rows=rows) as run, torch.no_grad():
        model(prompt(), logits_to_keep=1)
        assert run.macs == prefill_macs(ModelShape.from_config(model.config), counts, window=window).total


def test_generate_works_with_every_rule():
    model = small("qwen3")
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, attention_mask=torch.ones(1, 60, dtype=torch.long))
    plain = model.generate(prompt(), **options)
    for rule in RULES.values():
        with attach(model, rows=rule):
            assert torch.equal(model.generate(prompt(), **options), plain)
    for rule, _ in DROPPING.values():
        with attach(model, rows=rule):
            assert model.generate(prompt(), **options).shape == (1, 64)


# ---- drafts ----


@contextmanager
def counted(*models):
    """Multiply-accumulates of all linear layers while open, counted where they happen."""
    total, handles = [0], []

    def hook(module, args, output):
        total[0] += output.numel() * module.in_features

    for module in {m for model in models for m in model.modules() if isinstance(m, torch.nn.Linear)}:
        handles.append(module.register_forward_hook(hook))
    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()


@every_architecture
def test_draft_is_the_first_layers_with_norm_and_head_and_shares_every_weight(name):
    model, ids = small(name), prompt()
    draft = B.draft_of(model, 3)
    mine = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in draft.parameters()} <= mine
    assert len(draft.model.layers) == 3 and len(model.model.layers) == 5 and model.config.num_hidden_layers == 5
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states[3]
        assert far(draft(ids).logits, model.lm_head(model.model.norm(states))) < 1e-5
        assert far(B.draft_of(model, 5)(ids).logits, model(ids).logits) == 0
    # What happens to the model does not reach the draft, nor the other way round.
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("a hook of the model ran in its draft"))
    with torch.no_grad():
        draft(ids)
    handle.remove()
    assert not draft.training


def test_draft_errors():
    model = small("llama-gqa")
    for layers in (0, 6, True, 2.0):
        with pytest.raises(InputError, match="layers"):
            B.draft_of(model, layers)
    with pytest.raises(UnsupportedModelError, match="Linear"):
        B.draft_of(torch.nn.Linear(2, 2), 1)


@every_architecture
def test_macs_of_reading_with_a_draft_are_those_of_its_layers(name):
    model, ids = small(name), prompt(40)
    draft = B.draft_of(model, 2)
    shape = ModelShape.from_config(draft.config)
    pairs = [0]

    def watch(layer, queries, keys, scaling):
        pairs[0] += queries.shape[1] * queries.shape[3] * keys.shape[2]

    with counted(draft) as linear, torch.no_grad():
        B.look_ahead(draft, ids, 3, watch)
    # The prompt's own attention: the causal half of 40 x 40, both products; each watched row: its own two products, and the one asked for.
    attention = 2 * (40 * 41 // 2) * shape.pair + 3 * pairs[0]
    assert linear[0] + attention == B.draft_reading(shape, 40, 3)


@every_architecture
def test_macs_of_the_first_pass_of_gemfilter_are_those_of_its_layers(name):
    model, ids = small(name), prompt(40)
    rule = B.GemFilter(layer=2, keep_tokens=1.0)
    with attach(model, rows=rule) as run, torch.no_grad():
        model(ids, logits_to_keep=1)
        shape = ModelShape.from_config(model.config)
        assert run.macs == pytest.approx(B.gemfilter_first_pass(shape, 40, 2) + prefill_macs(shape, [40] * 5).total, rel=1e-12)
    draft = B.draft_of(model, 3)
    with counted(draft) as linear, torch.no_grad():
        draft.model(ids)
    last = 40 * (shape.feed_forward + shape.hidden * shape.heads * shape.head_dim)  # FFN and output of layer 2, which the pass leaves out
    attention = 2 * (40 * 41 // 2) * shape.pair + 40 * shape.heads * shape.head_dim
    assert B.gemfilter_first_pass(shape, 40, 2) == linear[0] - last + attention


# ---- LazyLLM with revival ----


@every_architecture
@pytest.mark.parametrize("rule", [B.LazyLLM(rates=(0.5, 0.3, 0.1), revive="all"), B.LazyLLM(layers=(1,), rates=(0.1,), revive="all"),
                                  B.LazyLLM(layers=(2, 4), rates=(0.3, 0.05), revive="all"), B.LazyLLM(rates=(1.0, 1.0, 1.0))],
                         ids=["thirds", "early", "late", "keep-all"])
def test_identity_10_reviving_every_token_at_every_layer_gives_the_logits_of_the_full_model(name, rule):
    with rule.attach(small(name)) as run:
        got = decoded(small(name), prompt(), ANSWER)
        steps = run.steps
    # The prefill is pruned, every step after it is exact.
    assert far(got[1:], dense(name)[1:]) < 1e-5
    first = next((i for i, share in enumerate(rule.plan(5)) if share < 1), 5)
    assert steps[1].revived == (0,) * first + (60,) * (5 - first)
    assert all(step.revived == (0,) * 5 for step in steps[2:])
    if first < 5:
        assert far(got[0], dense(name)[0]) > 1e-3


def test_identity_10_a_drop_before_the_last_layer_needs_only_the_dropped_tokens():
    # Keys of the last layer come from states that saw everything, so reviving what was dropped is enough; no other row has to be read again.
    class Everything(B.LazyLLM):
        def plan(self, layers):
            return (1.0,) * layers if recover[0] else super().plan(layers)

    recover = [False]
    rule, model = Everything(layers=(4,), rates=(0.2,)), small("llama-gqa")
    with rule.attach(model) as run, torch.no_grad():
        out = model(prompt(), logits_to_keep=1)
        run.cache.plan = (1.0,) * 5
        got = []
        for token in ANSWER:
            out = model(token.view(1, 1), cache=out.cache)
            got.append(out.logits[0, -1])
        assert run.steps[1].revived == (0, 0, 0, 0, 48)
    assert far(torch.stack(got), dense("llama-gqa")[1:]) < 1e-5


@every_architecture
@pytest.mark.parametrize("revive", ["selected", "none"])
def test_lazy_decoding_equals_one_full_length_forward_with_the_masks_of_its_choices(name, revive):
    model, ids = small(name), prompt()
    rule = B.LazyLLM(layers=(1, 3), rates=(0.5, 0.3), revive=revive)
    total = 60 + len(ANSWER)
    masks = [torch.eye(total, dtype=torch.bool) for _ in range(5)]
    plain = LazyRun.attend

    def recording(self, module, *args):
        rows, alive = self.cache.rows, self.cache.alive
        mask = torch.zeros(len(rows), total, dtype=torch.bool)
        mask[:, alive] = alive[None] <= rows[:, None]
        masks[module.layer_idx][rows] = mask
        return plain(self, module, *args)

    with pytest.MonkeyPatch.context() as patch, rule.attach(model) as run:
        patch.setattr(LazyRun, "attend", recording)
        got = decoded(model, ids, ANSWER)
        assert (run.revived > 0) == (revive == "selected")
    layer_of = {layer: i for i, layer in enumerate(model.model.layers)}

    def give_mask(layer, args, kwargs):
        bias = torch.zeros(total, total).masked_fill(~masks[layer_of[layer]], float("-inf"))
        return args, {**kwargs, "attention_mask": bias[None, None]}

    handles = [layer.register_forward_pre_hook(give_mask, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(torch.cat([ids, ANSWER[None]], 1)).logits[0]
    for handle in handles:
        handle.remove()
    assert far(got, logits[59:]) < 1e-4


@every_architecture
def test_lazy_steps_count_the_work_of_their_layers(name):
    model = small(name)
    shape = ModelShape.from_config(model.config)
    with B.LazyLLM(layers=(1, 3), rates=(0.5, 0.3)).attach(model) as run, counted(model) as linear:
        decoded(model, prompt(), ANSWER)
        steps = run.steps
        linear_macs = sum(step.macs - sum(step.pairs) * shape.pair - sum(step.probe) * shape.heads * shape.head_dim for step in steps)
    assert linear_macs == linear[0]
    assert [step.tokens for step in steps] == [60, 61, 62, 63, 64]
    assert steps[0].alive == steps[0].rows == (60, 30, 30, 18, 18) and steps[0].pairs == tuple(n * (n + 1) // 2 for n in steps[0].rows)
    assert steps[0].probe == (60, 0, 30, 0, 0)
    for step in steps[1:]:
        assert step.alive == tuple(-(-step.tokens * share // 10) for share in (10, 5, 5, 3, 3))
        assert step.rows == tuple(1 + revived for revived in step.revived)
        assert all(alive <= pairs <= rows * alive for alive, rows, pairs in zip(step.alive, step.rows, step.pairs, strict=True))
    assert run.revived == sum(sum(step.revived) for step in steps) and run.macs == sum(step.macs for step in steps)


def test_lazy_prefill_alone_and_in_a_session_agree():
    model, rule = small("llama-gqa"), B.LazyLLM(layers=(1, 3), rates=(0.5, 0.3))
    with attach(model, rows=rule) as run:
        inside = decoded(model, prompt(), ANSWER)
        work = run.macs
    with rule.attach(model) as run:
        alone = decoded(model, prompt(), ANSWER)
        shape = ModelShape.from_config(model.config)
        assert run.steps[0].macs - shape.lm_head == pytest.approx(work, rel=1e-12)
    assert far(inside[0], alone[0]) < 1e-5
    # Without revival, decoding over what is left is what the session does; the choice among the tokens left is LazyLLM's own.
    assert far(inside[1:], alone[1:]) > 1e-3


def test_lazy_cache_counts_its_bytes():
    model = small("llama-gqa")
    with B.LazyLLM(layers=(3,), rates=(0.5,)).attach(model) as run, torch.no_grad():
        model(prompt())
        entry = 2 * 2 * 8 * 4
        assert run.cache.nbytes == (60 * 3 + 30 * 2) * entry + 30 * 32 * 4
        assert run.cache.get_seq_length() == 60
        with pytest.raises(RunError, match="crop"):
            run.cache.crop(-3)
    with pytest.raises(RunError, match="outside of attach"), torch.no_grad():
        model(prompt(1), cache=run.cache)
    with pytest.raises(InputError, match="layer of the drop"), B.LazyLLM(layers=(5,), rates=(0.5,)).attach(model):
        pass


def test_lazy_run_restores_the_model_and_refuses_what_it_cannot_read():
    model, before = small("llama-gqa"), dense("llama-gqa")
    with pytest.raises(ZeroDivisionError), B.LazyLLM().attach(model):
        raise ZeroDivisionError
    assert far(decoded(model, prompt(), ANSWER, cache=DynamicCache()), before) == 0
    with B.LazyLLM().attach(model), torch.no_grad():
        with pytest.raises(RunError, match="attached already"), B.LazyLLM().attach(model):
            pass
        with pytest.raises(InputError, match="one prompt at a time"):
            model(prompt().expand(2, -1))
        with pytest.raises(InputError, match="padding"):
            model(prompt(), attention_mask=torch.tensor([[0] + [1] * 59]))
        with pytest.raises(InputError, match="labels"):
            model(prompt(), labels=prompt())
    filled = DynamicCache()
    with torch.no_grad():
        model(prompt(), cache=filled)
        with B.LazyLLM().attach(model), pytest.raises(InputError, match="DynamicCache with tokens"):
            model(prompt(), cache=filled)
    torch.manual_seed(0)
    sliding = AutoModelForCausalLM.from_config(Gemma3TextConfig(**SIZE, **SPREAD, num_key_value_heads=2, sliding_window=16))
    with pytest.raises(UnsupportedModelError, match="sliding"), B.LazyLLM().attach(sliding):
        pass


def test_decode_study_counts_every_method_by_its_cache():
    from nbkit.recipes.fastprefill_decode import METHODS, compare

    model = small("llama-gqa")
    shape = ModelShape.from_config(model.config)
    out = compare(model, prompt(), 3, layers=(2,), rates=(0.5,), early=(1, 3), early_rates=(0.5, 0.3), turn=2)
    assert set(out) == set(METHODS)
    assert out["full"]["macs"] == [5 * (shape.row + n * shape.pair) + shape.lm_head for n in (61, 62, 63)]
    free = out["recovery-free"]
    assert free["entries"] == [2 * (60 + t) + 3 * (30 + t) for t in (1, 2, 3)]
    assert free["macs"] == [5 * shape.row + entries * shape.pair + shape.lm_head for entries in free["entries"]]
    # The same rule reads the prompt with and without recovery: the same first token, and from then on only recovery adds rows and entries.
    for ending in ("", "-early"):
        without, recovery = out[f"recovery-free{ending}"], out[f"recovery{ending}"]
        assert without["loss"][0] == pytest.approx(recovery["loss"][0], abs=1e-5) and without["prefill_macs"] == recovery["prefill_macs"]
        assert sum(map(sum, without["revived"])) == 0 < sum(map(sum, recovery["revived"]))
        assert recovery["entries"][-1] == without["entries"][-1] + sum(map(sum, recovery["revived"]))
    assert all(loss > 0 for row in out.values() for loss in row["loss"])


def test_decode_study_ratios_by_hand():
    seconds = np.array([[[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]], [[2.0, 6.0, 4.0], [3.0, 3.0, 3.0]]])
    data = dict.fromkeys(("seconds", "macs", "loss", "entries"), seconds)
    data |= {"methods": np.array(["full", "recovery"]), "revived": np.ones((2, 2, 3, 4)), "prefill_seconds": np.array([[1.0, 1.0], [2.0, 4.0]])}
    study = B.DecodeStudy(data)
    # Ratios of the steps: (2, 3, 1) and (3, 3, 3), their medians 2 and 3. Sums: 12 / 7 and 9 / 3.
    assert study.ratio("recovery").estimate == pytest.approx(2.5)
    assert study.ratio("recovery", what="macs").estimate == pytest.approx((12 / 7 + 3) / 2)
    assert study.difference("recovery").estimate == pytest.approx((12 / 3 - 7 / 3 + 3 - 1) / 2)
    # Prefill and steps: (2, 4, 10, 14) and (4, 7, 10, 13), medians over the two prompts.
    assert study.cumulative("recovery").tolist() == [3.0, 5.5, 10.0, 13.5]
    assert study.rows()[0]["revived"] == 4.0
    with pytest.raises(InputError, match="no revived"):
        B.DecodeStudy({k: v for k, v in data.items() if k != "revived"})
    with pytest.raises(InputError, match="full, recovery"):
        study.ratio("lazy")
    with pytest.raises(InputError, match="seconds, macs"):
        study.ratio("recovery", what="time")
    with pytest.raises(InputError, match="prompts, steps"):
        B.DecodeStudy({**data, "loss": seconds[:, :1]})


# ---- wrong options ----


@pytest.mark.parametrize(("make", "words"), [
    (lambda: B.FastKV(rate=0.0), "rate.*0.0"),
    (lambda: B.FastKV(rate=1.5), "rate.*1.5"),
    (lambda: B.FastKV(rate=float("nan")), "rate.*nan"),
    (lambda: B.FastKV(window=0), "window.*>= 1"),
    (lambda: B.FastKV(pool=4), "pool.*odd"),
    (lambda: B.FastKV(pooling="sum"), "avg, max"),
    (lambda: B.FastKVCache(retain_rate=2), "retain_rate"),
    (lambda: B.PyramidInfer(delta=0.0), "delta"),
    (lambda: B.PyramidInfer(shape="square"), "cosine, linear, constant"),
    (lambda: B.PyramidInfer(least=0), "least"),
    (lambda: B.ASL(tau=-1), "tau"),
    (lambda: B.ASL(tau=float("nan")), "tau"),
    (lambda: B.ASL(span=1), "span"),
    (lambda: B.ASL(first=0), "first"),
    (lambda: B.ASL(keep_tokens=0), "keep_tokens"),
    (lambda: B.GemFilter(keep_tokens=-5), "keep_tokens"),
    (lambda: B.GemFilter(layer=-1), "layer"),
    (lambda: B.SpecPrefill(keep_share=0.0), "keep_share"),
    (lambda: B.SpecPrefill(look_ahead=0), "look_ahead"),
    (lambda: B.SpecPrefill(draft="tiny"), "draft.*str"),
    (lambda: B.SpecPrefill(draft=0), "draft"),
    (lambda: B.SlimInfer(rates=()), "rates"),
    (lambda: B.SlimInfer(rates=(0.3, 0.5)), "never rise"),
    (lambda: B.SlimInfer(layers=(3, 2), rates=(0.5, 0.3)), "layers that rise"),
    (lambda: B.SlimInfer(layers=(3,), rates=(0.5, 0.3)), "2 layers"),
    (lambda: B.SlimInfer(block=0), "block"),
    (lambda: B.LazyLLM(rates=0.5), "tuple of shares"),
    (lambda: B.LazyLLM(layers="12", rates=(0.5, 0.3)), "tuple of layers"),
    (lambda: B.LazyLLM(revive="some"), "selected, all, none"),
    (lambda: B.RandomRows(sinks=-1), "sinks"),
    (lambda: B.OracleRows(), "evidence"),
    (lambda: B.OracleRows(evidence=((5, 5),)), "start < stop"),
    (lambda: B.OracleRows(evidence=(3, 4)), "pairs of positions"),
], ids=lambda value: "" if callable(value) else None)
def test_wrong_options_say_what_is_allowed(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize("rows", [B.FastKV(layer=5), B.RandomRows(layer=9), B.SlimInfer(layers=(7,), rates=(0.5,)), B.ASL(first=4),
                                  B.LazyLLM(layers=(5,), rates=(0.5,)), B.GemFilter(layer=5), B.SpecPrefill(draft=6),
                                  B.OracleRows(evidence=((50, 70),))],
                         ids=lambda part: part.name)
def test_a_rule_that_does_not_fit_the_model_or_the_prompt_is_refused(rows):
    with attach(small("llama-gqa"), rows=rows), torch.no_grad(), pytest.raises(InputError):
        small("llama-gqa")(prompt())


def test_nan_in_the_states_is_an_error():
    torch.manual_seed(0)
    broken = AutoModelForCausalLM.from_config(LlamaConfig(**SIZE, **SPREAD, num_key_value_heads=2)).eval()
    broken.model.layers[0].self_attn.k_proj.weight.data[0, 0] = float("nan")
    with attach(broken, rows=B.FastKV(layer=2, rate=0.5)), torch.no_grad(), pytest.raises(InputError, match="NaN"):
        broken(prompt())
