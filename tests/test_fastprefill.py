"""Exact facts about fastprefill's execution: scores, dropped tokens, key sets by head. `test_identity_NN` are the exact identities of the method;
5, 8 and 10 are in test_fastprefill_baselines.py and test_fastprefill_schedule.py."""

import json
from functools import cache as memo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

import nbkit
from nbkit.errors import InputError, UnsupportedModelError
from nbkit.inference import attach
from nbkit.methods.fastprefill import (
    FastPrefill,
    HeadCache,
    HeadSelected,
    ModelShape,
    PruneSchedule,
    ScoreWeights,
    TokenPruning,
    fit_score_weights,
    head_lifts,
    head_sets,
    layer_scores,
    prefill_macs,
    recalled_mass,
    reduce_heads,
)
from nbkit.methods.fastprefill.baselines import row_attention
from nbkit.methods.fastprefill.calibrate import prompt_lifts

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
every_granularity = pytest.mark.parametrize("granularity", ["shared", "kv", "query"])
exact = settings(deadline=None, max_examples=40, derandomize=True, database=None)
EDGES = dict(sinks=2, window=6)
STEPS = PruneSchedule.from_ratios([1, 0.7, 0.7, 0.3])
FULL = PruneSchedule.full(4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@memo
def small(name="llama-gqa"):
    kind, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**SIZE, **SPREAD, **changes)).eval()


def prompt(length=50, seed=0):
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def write(model, ids, tokens=6):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False)


@torch.no_grad()
def layers_by_hand(model, hidden, places, masks):
    """The decoder on rows at ``places``, with a mask (heads or 1, rows, rows) for every layer; the last hidden states."""
    body = model.model
    around = body.rotary_emb(hidden, places[None])
    for layer, mask in zip(body.layers, masks, strict=True):
        hidden = layer(hidden, attention_mask=mask[None], position_ids=places[None], position_embeddings=around)
    return model.lm_head(body.norm(hidden))


def masked_logits(model, ids, kept, sets=None):
    """All rows, where in each layer the rows outside of ``kept`` are hidden from the other rows; sets: what each head may see, a layer each."""
    tokens = ids.shape[1]
    places, own = torch.arange(tokens), torch.eye(tokens, dtype=torch.bool)
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    masks = [(causal & (torch.isin(places, positions)[None] | own))[None] for positions in kept]
    if sets is not None:
        masks = [mask & (allowed | own) for mask, allowed in zip(masks, sets, strict=True)]
    return layers_by_hand(model, model.model.embed_tokens(ids), places, masks)


class Watched(HeadSelected):
    """Remembers the sets of every layer, as original positions, and the positions alive."""

    def attend(self, run, layer, q, k, v, scaling):
        out = super().attend(run, layer, q, k, v, scaling)
        if layer == 0:
            self.__dict__["log"] = []
        self.log.append((run.positions, run.positions[run.state[self]["sets"]]))
        return out

    def allowed(self, tokens, heads):
        """What each head may see in every layer: bool (heads, tokens, tokens)."""
        out = []
        for alive, sets in self.log:
            rank = torch.full((tokens,), -1)
            rank[alive] = torch.arange(len(alive))
            near = (rank[:, None] - rank[None] < self.band) & (rank[:, None] >= 0) & (rank[None] >= 0)
            columns = torch.zeros(len(sets), tokens, dtype=torch.bool).scatter(1, sets, True).repeat_interleave(heads // len(sets), 0)
            out.append(near[None] | columns[:, None])
        return out


# ---- the identities ----


@every_architecture
@every_granularity
def test_identity_01_ratio_one_and_all_keys_equal_the_model(name, granularity):
    model, ids = small(name), prompt()
    with torch.no_grad():
        expected = model(ids).logits
        text = write(model, ids)
        with FastPrefill(FULL, heads=granularity, head_budget=1.0, **EDGES).attach(model) as run:
            close(model(ids).logits, expected)
            assert torch.equal(write(model, ids), text)
    assert run.counts == [50] * 4 and sum(run.pairs) == 4 * 4 * 1275


@every_architecture
@pytest.mark.parametrize("prune_at", ["pre", "post_attn"])
@pytest.mark.parametrize("score", ["sum", "max", "cummax", "agg-2", "random", "oracle"])
def test_identity_02_dropped_rows_equal_masked_keys(name, prune_at, score):
    model, ids = small(name), prompt()
    part = TokenPruning(STEPS, score=score, prune_at=prune_at, evidence=((10, 13),) if score == "oracle" else (), **EDGES)
    with torch.no_grad(), attach(model, rows=part) as run:
        logits = model(ids).logits
    assert run.counts == [50, 35, 35, 15]
    close(logits, masked_logits(model, ids, run.kept)[:, run.kept[-1]], 1e-4)
    # The test can fail: the dense model gives something else.
    assert (logits[0, -1] - model(ids).logits[0, -1]).abs().max() > 1e-2


@every_architecture
@every_granularity
def test_identity_02_key_sets_equal_masked_keys(name, granularity):
    model, ids = small(name), prompt()
    part = Watched(granularity=granularity, budget=12, band=3, **EDGES)
    with torch.no_grad(), attach(model, rows=TokenPruning(STEPS, **EDGES), attention=part) as run:
        logits = model(ids).logits
    allowed = part.allowed(50, 4)
    close(logits, masked_logits(model, ids, run.kept, allowed)[:, run.kept[-1]], 1e-4)
    counted = []
    for kept, seen in zip(run.kept, allowed, strict=True):
        inside = seen[:, kept][:, :, kept] & torch.ones(len(kept), len(kept), dtype=torch.bool).tril()
        counted.append(float(inside.sum()))
    assert run.pairs == counted
    assert {len(sets) for _, sets in part.log} == {{"shared": 1, "kv": 2 if model.config.num_key_value_heads == 2 else 4, "query": 4}[granularity]}


@every_architecture
def test_identity_03_only_true_positions_matter(name):
    """Rows in any order give the same, as long as positions and mask go with them; without their positions they do not."""
    model, ids = small(name), prompt()
    with torch.no_grad(), attach(model, rows=TokenPruning(STEPS, **EDGES)) as run:
        model(ids)
    places = run.kept[-1]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(1))
    hidden = model.model.embed_tokens(ids)[:, places]

    def read(rows, at):
        mask = (at[:, None] >= at[None])[None]
        return layers_by_hand(model, rows, at, [mask] * 4)

    straight = read(hidden, places)
    close(read(hidden[:, order], places[order]), straight[:, order], 1e-4)
    assert (read(hidden[:, order], places) - straight[:, order]).abs().max() > 1e-2
    # Only distances count.
    close(read(hidden, places + 100), straight, 1e-3)


@every_architecture
def test_identity_04_the_work_that_no_logit_needs(name):
    """The last layer alone for the last row, and dropping rows after the attention of the last but one: the first changes nothing."""
    model, ids = small(name), prompt()
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        with FastPrefill(FULL, heads=None).attach(model, last_row_only=True) as run:
            close(model(ids).logits[:, -1], expected)
    shape = ModelShape.from_config(model.config)
    assert run.macs == prefill_macs(shape, [50] * 4, last_row_only=True).total


@every_architecture
@pytest.mark.parametrize(("prune_at", "score"), [("pre", "max"), ("pre", "cummax"), ("post_attn", "max"), ("pre", "agg-2"), ("pre", "random")])
def test_identity_06_counts_forced_tokens_and_work(name, prune_at, score):
    model, ids = small(name), prompt()
    part = TokenPruning(STEPS, score=score, prune_at=prune_at, **EDGES)
    with torch.no_grad(), attach(model, rows=part) as run:
        out = model(ids)
    counts = STEPS.counts(50, floor=8)
    assert tuple(run.counts) == counts == out.cache.lengths()
    for before, after in zip(run.kept, run.kept[1:], strict=False):
        assert bool((after.diff() > 0).all()) and set(after.tolist()) <= set(before.tolist())
        assert {0, 1, *range(44, 50)} <= set(after.tolist())
    scored = {"max": [0, 2], "cummax": [0, 1, 2], "agg-2": [0, 1, 2], "random": []}[score]
    assert part.layers_scored(4) == frozenset(scored)
    shape = ModelShape.from_config(model.config)
    assert run.macs == prefill_macs(shape, counts, prune_at=prune_at, window=6, scored=scored).total
    assert out.cache.nbytes == sum(counts) * shape.kv_heads * shape.head_dim * 2 * 4


@given(st.integers(0, 10**6), st.integers(1, 20))
@exact
def test_identity_07_own_keys_recall_at_least_as_much_as_shared_ones(seed, count):
    attention = torch.rand(6, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
    own, pairs, one = (recalled_mass(attention, head_sets(attention, 3, count, granularity=g)) for g in ("query", "kv", "shared"))
    assert bool((own >= pairs - 1e-12).all()) and bool((own >= one - 1e-12).all())
    # Within a group the same holds for the sum.
    assert bool((pairs.view(3, 2) * attention.sum(1).view(3, 2)).sum(1).ge((one * attention.sum(1)).view(3, 2).sum(1) - 1e-12).all())


@every_architecture
@pytest.mark.parametrize("options", [{}, {"heads": "kv", "cache": "heads"}, {"heads": "query", "cache": "heads"}, {"heads": None}])
def test_identity_09_single_steps_equal_one_chunk(name, options):
    model, ids, new = small(name), prompt(), torch.tensor([[5, 11, 17, 3]])
    with torch.no_grad(), FastPrefill(STEPS, head_budget=12, band=4, **EDGES, **options).attach(model) as run:
        chunk = model(new, cache=model(ids).cache).logits
        cache, single = model(ids).cache, []
        for token in new[0]:
            single.append(model(token.view(1, 1), cache=cache).logits)
        assert cache.get_seq_length() == 54 and run.counts == [50, 35, 35, 15]
    close(torch.cat(single, 1), chunk, 1e-5)


@pytest.mark.parametrize("options", [dict(heads="query", head_budget=1.0), dict(heads=None)])
def test_identity_01_on_a_real_model(options):
    loaded = nbkit.load_model("smollm2-135m")
    model, layers = loaded.model, loaded.model.config.num_hidden_layers
    text = "The lighthouse keeper wrote down the weather every evening. " * 6 + "On the first day the sea was"
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(ids, logits_to_keep=4).logits
        plain = write(model, ids, 8)
        with FastPrefill(PruneSchedule.full(layers), **options).attach(model) as run:
            # Logits of this model reach about 20; another order of the sums in 30 layers moves them by some 1e-5.
            close(model(ids, logits_to_keep=4).logits, expected, 2e-4)
            assert torch.equal(write(model, ids, 8), plain)
    assert run.counts == [ids.shape[1]] * layers


# ---- scores ----


class Log:
    """What a part needs of a run, without a model."""

    def __init__(self, layers=4, tokens=20):
        self.layers, self.tokens, self.state, self.probe = layers, tokens, {}, 0.0
        self.positions = torch.arange(tokens)

    def charge(self, layer, *, pairs=0.0, probe=0.0):
        self.probe += probe


def planted(peaks, tokens=20, heads=2):
    """Queries and keys of one layer whose heads look at one token each."""
    keys = torch.zeros(1, heads, tokens, tokens)
    keys[0] = torch.eye(tokens) * 8
    queries = torch.zeros(1, heads, tokens, tokens)
    for head, (place, weight) in enumerate(peaks):
        queries[0, head, :, place] = weight
    return queries, keys


def survivors(score, layers_of_peaks, drop, rate=0.25, **options):
    """What TokenPruning keeps before ``drop``, when each layer's heads look where ``layers_of_peaks`` says."""
    run = Log()
    part = TokenPruning(PruneSchedule.one_shot(drop, rate, 4), score=score, sinks=1, window=2, pool=1, **options)
    for layer, peaks in enumerate(layers_of_peaks[:drop]):
        queries, keys = planted(peaks)
        part.observe(run, layer, queries, keys, keys, 1.0)
    return part.keep(run, drop).tolist(), run


def test_scores_rank_by_hand():
    # Head 0 looks a little at 7, head 1 strongly at 9 in layer 0; both look at 12 in layer 1, one of them also makes 5 the second best.
    first, second = [(7, 0.3), (9, 2.0)], [(12, 1.0), (5, 0.5)]
    assert survivors("max", [first, second], 2)[0] == [0, 5, 12, 18, 19]
    assert survivors("cummax", [first, second], 2)[0] == [0, 9, 12, 18, 19]
    assert survivors("agg-2", [first, second, [(3, 2.0), (4, 2.0)]], 3, rate=0.3)[0] == [0, 3, 4, 12, 18, 19]
    assert survivors("cummax", [first, second, [(3, 2.0), (4, 2.0)]], 3, rate=0.3)[0] == [0, 3, 4, 9, 18, 19]
    assert survivors("oracle", [first, second], 2, evidence=((14, 16),))[0] == [0, 14, 15, 18, 19]


@pytest.mark.parametrize("score", ["cummax", "agg-2", "calibrated"])
def test_scores_of_the_past_follow_their_rows(score):
    """Token 9 stands out in layer 0 alone; the first drop moves it to another row, and the second one still finds it."""
    run, weights = Log(), ScoreWeights(np.ones((4, 2)))
    part = TokenPruning(PruneSchedule.from_ratios([1, 0.5, 0.2, 0.2]), score=score, weights=weights, sinks=1, window=2, pool=1)
    peaks = [(9, 2.0), (9, 2.0)]
    queries, keys = planted(peaks)
    part.observe(run, 0, queries, keys, keys, 1.0)
    index = part.keep(run, 1)
    run.positions = run.positions[index]
    assert len(index) == 10 and 9 in run.positions.tolist()
    flat = torch.zeros(1, 2, 10, 20)
    part.observe(run, 1, flat, flat, flat, 1.0)
    assert run.positions[part.keep(run, 2)].tolist() == [0, 9, 18, 19]


def test_the_sum_follows_many_heads_and_the_maximum_one():
    scores = torch.zeros(4, 20)
    scores[:3, 6], scores[3, 11] = 0.5, 1.0
    assert reduce_heads(scores, "sum").argmax() == 6 and reduce_heads(scores, "max").argmax() == 11
    with pytest.raises(InputError, match="sum, max"):
        reduce_heads(scores, "mean")


def test_pooling_takes_the_neighbours_along():
    first = [(9, 2.0), (9, 2.0)]
    run = Log()
    part = TokenPruning(PruneSchedule.one_shot(1, 0.3, 4), sinks=1, window=2, pool=3)
    queries, keys = planted(first)
    part.observe(run, 0, queries, keys, keys, 1.0)
    assert part.keep(run, 1).tolist() == [0, 8, 9, 10, 18, 19]


def test_window_scores_are_attention_and_are_charged_once():
    run = Log()
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(1, 4, 20, 8, generator=generator), torch.randn(1, 2, 20, 8, generator=generator)
    scores = layer_scores(run, 0, queries, keys, 0.3, window=5, size=1)
    logits = queries @ keys.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    attention = logits.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    close(scores, attention[0, :, -5:].sum(1), 1e-5)
    assert layer_scores(run, 0, queries, keys, 0.3, window=5, size=1) is scores and run.probe == 4 * 5 * 20
    layer_scores(run, 1, queries, keys, 0.3, window=5, size=1)
    assert run.probe == 2 * 4 * 5 * 20
    close(scores, row_attention(queries[:, :, -5:], keys, 0.3), 0)


def test_random_rows_follow_the_seed():
    picks = [survivors("random", [[(7, 1.0), (9, 1.0)]] * 2, 2, seed=seed)[0] for seed in (0, 0, 1)]
    assert picks[0] == picks[1] != picks[2]
    assert all({0, 18, 19} < set(pick) and len(pick) == 5 for pick in picks)


def test_a_schedule_that_drops_nothing_scores_nothing():
    run = Log()
    part = TokenPruning(FULL, score="cummax")
    queries, keys = planted([(7, 1.0), (9, 1.0)])
    part.observe(run, 0, queries, keys, keys, 1.0)
    assert part.keep(run, 1) is None and run.probe == 0


def test_short_prompts_are_read_whole():
    """Forced tokens win over the schedule, so that a chat message needs no special case."""
    model = small()
    with torch.no_grad(), FastPrefill(STEPS).attach(model) as run:
        close(model(prompt(12)).logits, model(prompt(12)).logits, 0)
    assert run.counts == [12] * 4
    with torch.no_grad(), attach(model, rows=TokenPruning(PruneSchedule.one_shot(1, 0.05, 4), **EDGES)) as run:
        model(prompt())
    assert run.counts == [50, 8, 8, 8]


# ---- calibrated scores ----


def test_weights_decide_which_head_is_heard():
    first = [(7, 2.0), (9, 1.0)]
    for values, found in ((np.ones((4, 2)), 7), ([[0.1, 1.0]] * 4, 9)):
        assert survivors("calibrated", [first], 1, rate=0.2, weights=ScoreWeights(np.array(values)))[0] == [0, found, 18, 19]


def test_equal_weights_are_the_cumulative_maximum():
    model, ids = small(), prompt()
    kept = []
    for options in (dict(score="cummax"), dict(score="calibrated", weights=ScoreWeights(np.full((4, 4), 2.5)))):
        part = TokenPruning(STEPS, **options, **EDGES)
        with torch.no_grad(), attach(model, rows=part) as run:
            model(ids)
        kept.append([k.tolist() for k in run.kept])
        assert part.layers_scored(4) == frozenset({0, 1, 2})
    assert kept[0] == kept[1]


def test_lifts_by_hand():
    # Ten tokens; the teacher is layer 1 for layer 0, and the last layer has none.
    window, last = torch.zeros(2, 2, 10), torch.zeros(2, 2, 10)
    window[0, 0, 4], window[0, 1, 5] = 1, 1
    last[1, 0, 4], last[1, 1, 6] = 3, 2
    assert head_lifts(window, last, top=0.1).tolist() == pytest.approx(torch.tensor([[6.0, 0.0], [1.0, 1.0]]).numpy())
    # Earlier layers than the middle are no teachers: what layer 1 of 4 attends to does not count for layer 0.
    window, last = torch.zeros(4, 1, 10), torch.zeros(4, 1, 10)
    window[:, 0, 4], last[1, 0, 4], last[2, 0, 7] = 1, 5, 1
    assert head_lifts(window, last, top=0.1)[0, 0] == 0 and head_lifts(window, last, top=0.1)[3, 0] == 1


def test_weights_are_learned_from_prompts_alone():
    model, rows = small(), [prompt(60, seed)[0].numpy() for seed in range(3)]
    options = dict(sinks=2, window=6)
    weights = fit_score_weights(model, rows, **options)
    assert weights.values.shape == (4, 4) and (weights.values[3] == 0).all() and weights.meta["prompts"] == 3
    again = ScoreWeights.from_json(json.dumps(weights.to_json()))
    assert np.array_equal(again.values, weights.values) and again.meta == weights.meta
    lifts = [fit_lifts(model, row) for row in rows]
    assert np.array_equal(fit_score_weights(None, (), lifts=lifts).values, weights.values)
    with torch.no_grad(), attach(model, rows=TokenPruning(STEPS, score="calibrated", weights=weights, **EDGES)) as run:
        model(prompt())
    assert run.counts == [50, 35, 35, 15]


def fit_lifts(model, row):
    return prompt_lifts(model, row, sinks=2, window=6).numpy()


@pytest.mark.parametrize(("make", "text"), [
    (lambda: ScoreWeights(np.zeros((2, 2))), "not all"), (lambda: ScoreWeights(np.ones(3)), "layers, heads"),
    (lambda: ScoreWeights(np.array([[-1.0, 1.0]])), ">= 0"), (lambda: ScoreWeights(np.array([[np.nan, 1.0]])), "finite"),
    (lambda: ScoreWeights.from_json("[1]"), "JSON"), (lambda: ScoreWeights.from_json('{"weights": [[0]]}'), "not all"),
    (lambda: ScoreWeights(np.ones((3, 2))).check(4), "weights belong to one model"), (lambda: fit_score_weights(None, ()), "at least one"),
    (lambda: ScoreWeights(np.ones((3, 2))).apply(0, torch.ones(4, 5)), "3 layers of 4 heads"),
    (lambda: fit_score_weights(small(), [np.arange(30)]), "more than 37"),
])
def test_wrong_weights(make, text):
    with pytest.raises(InputError, match=text):
        make()


# ---- key sets ----


def test_sets_by_hand():
    scores = torch.tensor([[9.0, 1, 0, 2, 0], [0, 1, 8, 0, 0], [0, 6, 0, 0, 5], [0, 0, 0, 7, 0]])
    assert head_sets(scores, 2, 2).tolist() == [[0, 3], [1, 2], [1, 4], [0, 3]]
    assert head_sets(scores, 2, 2, granularity="kv").tolist() == [[0, 2], [1, 3]]
    # Keys 0 and 3 lead the sum (9 each).
    assert head_sets(scores, 2, 2, granularity="shared").tolist() == [[0, 3]]
    assert head_sets(scores, 2, 2, forced=torch.tensor([4])).tolist() == [[0, 4], [2, 4], [1, 4], [3, 4]]
    assert head_sets(torch.zeros(2, 4), 1, 2).tolist() == [[0, 1]] * 2
    assert head_sets(scores, 2, 99).shape == (4, 5)


@every_architecture
@every_granularity
def test_the_cache_holds_the_sets(name, granularity):
    model, ids = small(name), prompt()
    heads = HeadSelected(granularity=granularity, budget=12, band=3, **EDGES)
    log = {}

    class Kept(HeadCache):
        def keep(self, run, layer, k, v, queries, positions):
            log[layer] = run.state[self.heads]["sets"].clone()
            return super().keep(run, layer, k, v, queries, positions)

    with torch.no_grad(), attach(model, attention=heads, eviction=Kept(heads)) as run:
        model(ids)
        sizes = run.cache.lengths()
    kv_heads = model.config.num_key_value_heads
    for layer, sets in log.items():
        held = run.cache.positions(layer)
        unions = [set(sets[h * len(sets) // kv_heads : max(1, (h + 1) * len(sets) // kv_heads)].flatten().tolist()) for h in range(kv_heads)]
        if granularity == "shared":
            unions = [set(sets[0].tolist())] * kv_heads
        assert all(union <= set(row.tolist()) for union, row in zip(unions, held, strict=True))
        assert sizes[layer] == max(len(union) for union in unions)
    assert run.cache.nbytes == sum(sizes) * kv_heads * 8 * 2 * 4
    if granularity != "query" or kv_heads == 4:
        assert sizes == (12,) * 4


def test_the_cache_chooses_for_itself_without_the_attention_part():
    model, heads = small(), HeadSelected(granularity="kv", budget=12, **EDGES)
    with torch.no_grad():
        with attach(model, eviction=HeadCache(heads)) as run:
            model(prompt())
            alone = run.cache.positions(0)
        with attach(model, attention=heads, eviction=HeadCache(heads)) as run:
            model(prompt())
            assert torch.equal(run.cache.positions(0), alone)
    assert alone.shape == (2, 12)


# ---- what is refused ----


@pytest.mark.parametrize(("make", "text"), [
    (lambda: TokenPruning(STEPS, score="mean"), "sum, max, cummax"), (lambda: TokenPruning(STEPS, score="agg-0"), "agg-4"),
    (lambda: TokenPruning([1, 0.5]), "PruneSchedule"), (lambda: TokenPruning(STEPS, window=0), "window"),
    (lambda: TokenPruning(STEPS, sinks=-1), "sinks"),
    (lambda: TokenPruning(STEPS, pool=4), "odd"), (lambda: TokenPruning(STEPS, prune_at="mid"), "post_attn"),
    (lambda: TokenPruning(STEPS, score="oracle"), "evidence"), (lambda: TokenPruning(STEPS, evidence=((4, 4),)), "start < stop"),
    (lambda: TokenPruning(STEPS, evidence=(3,)), "spans"), (lambda: PruneSchedule.from_ratios([1, 0.3, 0.5, 0.5]), "no rise"),
    (lambda: HeadSelected(granularity="head"), "shared, kv, query"), (lambda: HeadSelected(budget=0.0), "share"),
    (lambda: HeadSelected(budget=0), "budget"), (lambda: HeadSelected(band=0), "band"), (lambda: FastPrefill(STEPS, cache="all"), "rows, or heads"),
    (lambda: FastPrefill(STEPS, heads=None, cache="heads"), "granularity"), (lambda: FastPrefill(STEPS, score="best"), "sum, max"),
    (lambda: head_sets(torch.full((2, 4), torch.nan), 1, 2), "NaN"), (lambda: head_sets(torch.ones(2, 4), 1, 2, granularity="x"), "shared"),
])
def test_wrong_options(make, text):
    with pytest.raises(InputError, match=text):
        make()


@pytest.mark.parametrize(("method", "length", "text"), [
    (FastPrefill(PruneSchedule.one_shot(3, 0.5, 6)), 50, "6 ratios"),
    (FastPrefill(STEPS, window=60, strict=True), 50, "64 forced tokens"),
    (FastPrefill(STEPS, sinks=4, window=20, strict=True), 50, "at least 24"),
    (FastPrefill(FULL, head_budget=0.1, strict=True, **EDGES), 50, "head budget"),
    (FastPrefill(STEPS, score="oracle", options={"evidence": ((60, 62),)}), 50, "below 50"),
])
def test_wrong_prompts(method, length, text):
    with method.attach(small()), pytest.raises(InputError, match=text):
        small()(prompt(length))


def test_several_prompts_padding_and_sliding_windows_are_refused():
    with FastPrefill(STEPS, **EDGES).attach(small()):
        with pytest.raises(InputError, match="2 prompts"):
            small()(torch.cat([prompt(), prompt(seed=1)]))
        with pytest.raises(InputError, match="padded"):
            small()(prompt(), attention_mask=torch.tensor([[0] * 3 + [1] * 47]))
    sliding = AutoModelForCausalLM.from_config(MistralConfig(**SIZE, **SPREAD, num_key_value_heads=2, sliding_window=8))
    with pytest.raises(UnsupportedModelError, match="sliding"), FastPrefill(STEPS).attach(sliding):
        pass


def test_nan_states_are_named():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZE, **SPREAD, num_key_value_heads=2)).eval()
    model.model.embed_tokens.weight.data[prompt()[0, 5]] = torch.nan
    for heads in (None, "query"):
        with FastPrefill(STEPS, heads=heads, **EDGES).attach(model), pytest.raises(InputError, match="NaN"):
            model(prompt())


# ---- what was recorded ----


def test_the_recorded_weights_and_table():
    """The default weights fit SmolLM2, and the table follows from the rows."""
    from nbkit.recipes import fastprefill_scores as recipe

    data = nbkit.load_recording("fastprefill-scores").data
    weights = ScoreWeights.default().check(30, 9)
    assert weights.to_json() == data["weights"] and weights.meta["prompts"] == len(data["calibration"]) == 24
    assert {row["id"] for row in data["rows"]}.isdisjoint(data["calibration"]) and len(data["rows"]) == 24
    assert recipe.summary(data["rows"]) == data["table"]
    assert all(row["cells"][f"oracle@{layer}"]["kept"] == 1 for row in data["rows"] for layer in data["layers"])
    assert max(data["bfloat16_change"]) <= 0.02
    part = TokenPruning(PruneSchedule.one_shot(20, 0.3, 30), score="calibrated")
    assert part.layers_scored(30) == frozenset(range(20))
    with attach(small(), rows=TokenPruning(STEPS, score="calibrated", **EDGES)), pytest.raises(InputError, match="weights belong to one model"):
        small()(prompt())
