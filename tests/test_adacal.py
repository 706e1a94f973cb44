"""Exact facts about adacal: metrics, augmentation, masks and dispatch, without a trained model.

`test_identity_NN` are the exact identities of the method; those of real forward passes are in test_adacal_models.py.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbkit import kernels
from nbkit.errors import InputError
from nbkit.inference.patterns import Pattern, a_shape, causal_pairs, tri_shape, vertical_slash
from nbkit.methods.adacal import (
    POLICIES,
    AdaCalConfig,
    TaskPolicy,
    augment,
    build_mask,
    classify,
    column_sums,
    concentration,
    covered_share,
    diagonal_sums,
    dispatch,
    entropy,
    plan_layer,
    probe_attention,
    query_overlap,
    reduce_rows,
    zone_mass,
    zones,
)

exact = settings(deadline=None, max_examples=25, derandomize=True, database=None)
seeds = st.integers(0, 10**6)


def heads(seed, heads=4, kv_heads=2, tokens=40, dim=8, spread=2.0):
    """Random rotated queries (heads, tokens, dim) and keys (kv_heads, tokens, dim); a larger spread peaks the attention."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, tokens, dim, generator=generator) * spread, torch.randn(kv_heads, tokens, dim, generator=generator)


def probe_of(seed, probe, tokens=40, **options):
    queries, keys = heads(seed, tokens=tokens, **options)
    return probe_attention(queries[:, -probe:], keys.repeat_interleave(len(queries) // len(keys), 0), queries.shape[-1] ** -0.5)


def config(**changes):
    return AdaCalConfig(**(dict(sinks=2, window=6, probe=8, v_cap=6, s_cap=7, fallback_after=1.0, dense_top=0.0) | changes))


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


# ---- the identities ----


@exact
@given(seeds, st.sampled_from(["window", "caps", "tau"]))
def test_identity_01_everything_kept_is_the_causal_mask_with_density_one(seed, how):
    queries, keys = heads(seed)
    full = {"window": dict(window=40, tau=1.0), "caps": dict(v_cap=40, s_cap=40, tau=-1.0, kappa=1.0),
            "tau": dict(v_cap=40, s_cap=0, tau=-0.5, kappa=1.0, dense_top=1.0)}[how]
    plan = plan_layer(queries, keys, config(**full), task="general")
    assert torch.equal(plan.pattern.mask(40), causal(40).expand(4, -1, -1))
    assert plan.pattern.density(40, probe=False) == 1.0
    assert plan.pattern.density(40) == pytest.approx(1.0 + 8 * 40 / causal_pairs(40, 40))


@exact
@given(seeds, st.sampled_from(["retrieval", "structure", "general"]))
def test_identity_02_no_active_head_is_the_a_shape(seed, task):
    queries, keys = heads(seed)
    plan = plan_layer(queries, keys, config(tau=1.0, dense_top=0.5), task=task)
    assert not plan.choice.active.any()
    assert torch.equal(plan.pattern.mask(40), a_shape(queries[None], keys[None], sinks=2, window=6).mask(40))


@exact
@given(seeds)
def test_identity_03_all_heads_active_is_uniform_vertical_slash_with_the_same_caps(seed):
    queries, keys = heads(seed)
    mask = build_mask(queries, keys, config(tau=-1.0, kappa=1.0), task="general")
    attention = probe_of(seed, 8)
    key, row = torch.arange(40), torch.arange(40)[:, None]
    for h in range(4):
        mass_of_column = {j: sum(float(attention[h, i, j]) for i in range(8) if 32 + i - j >= 6) for j in range(2, 34)}
        mass_of_slash = {d: sum(float(attention[h, i, 32 + i - d]) for i in range(8) if 32 + i - d >= 2) for d in range(6, 38)}
        columns = sorted(mass_of_column, key=mass_of_column.get)[-6:]
        slashes = sorted(mass_of_slash, key=mass_of_slash.get)[-7:]
        expected = (row - key < 6) | (key < 2) | torch.isin(key, torch.tensor(columns)) | torch.isin(row - key, torch.tensor(slashes))
        assert torch.equal(mask[h], expected & causal(40))


@exact
@given(seeds)
def test_identity_03_without_sinks_it_is_the_vertical_slash_baseline(seed):
    queries, keys = heads(seed)
    mask = build_mask(queries, keys, config(sinks=0, tau=-1.0, kappa=1.0), task="general")
    assert torch.equal(mask, vertical_slash(queries[None], keys[None], v=6, s=7, sinks=0, window=6, probe=8).mask(40))


@exact
@given(seeds)
def test_identity_04_dense_probe_rows_on_the_a_shape_are_the_tri_shape(seed):
    queries, keys = heads(seed)
    bare = config(tau=-1.0, v_cap=0, s_cap=0, dense_top=1.0)
    assert torch.equal(build_mask(queries, keys, bare), tri_shape(queries[None], keys[None], sinks=2, window=6, last=8).mask(40))
    whole = config(tau=-1.0, v_cap=0, s_cap=0, dense_top=1.0, probe=40)
    assert torch.equal(build_mask(queries, keys, whole), causal(40).expand(4, -1, -1))


@exact
@given(seeds, st.sampled_from(["retrieval", "structure", "general"]), st.integers(9, 60))
def test_identity_05_rows_keep_themselves_and_the_sinks_and_stay_causal(seed, task, tokens):
    queries, keys = heads(seed, tokens=tokens)
    mask = build_mask(queries, keys, AdaCalConfig(sinks=2, window=3, probe=8, v_cap=5, s_cap=4), task=task, fallback=True)
    assert mask.diagonal(dim1=1, dim2=2).all() and not (mask & ~causal(tokens)).any()
    assert mask[:, :, :2].sum() == 4 * (2 * tokens - 1)
    logits = torch.randn(4, tokens, tokens).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(logits.softmax(-1).sum(-1), torch.ones(4, tokens))


def test_identity_06_metrics_of_one_hot_and_uniform_rows():
    one_hot = torch.zeros(1, 5, 50)
    one_hot[0, :, 7] = 1.0
    assert entropy(one_hot).item() == 0.0 and concentration(one_hot, top=0.02).item() == 1.0
    uniform = torch.full((50, 50), 1.0).tril()
    uniform = (uniform / uniform.sum(-1, keepdim=True))[None]
    # The first row sees one key and counts 0; every other row reaches the largest entropy.
    torch.testing.assert_close(entropy(uniform), torch.tensor([49 / 50]))
    torch.testing.assert_close(entropy(uniform[:, -10:]), torch.tensor([1.0]))
    torch.testing.assert_close(concentration(torch.full((1, 3, 50), 0.02), top=0.1), torch.tensor([0.1]))


@exact
@given(seeds, st.integers(0, 9), st.integers(1, 30), st.integers(1, 40))
def test_identity_06_zone_masses_sum_to_one(seed, sinks, window, probe):
    attention = probe_of(seed, probe)
    split = zones(probe, 40, sinks=sinks, window=window)
    assert torch.equal(sum(zone.int() for zone in split), causal(40)[-probe:].int())
    torch.testing.assert_close(sum(zone_mass(attention, zone) for zone in split), torch.ones(4, probe))


@exact
@given(seeds, st.integers(1, 40))
def test_identity_07_column_and_diagonal_sums_equal_a_plain_loop(seed, probe):
    attention = probe_of(seed, probe)
    columns, diagonals = torch.zeros(4, 40), torch.zeros(4, 40)
    for i in range(probe):
        for j in range(40 - probe + i + 1):
            columns[:, j] += attention[:, i, j]
            diagonals[:, 40 - probe + i - j] += attention[:, i, j]
    torch.testing.assert_close(column_sums(attention), columns)
    torch.testing.assert_close(diagonal_sums(attention), diagonals)
    torch.testing.assert_close(diagonal_sums(attention).sum(-1), torch.full((4,), float(probe)))


@exact
@given(seeds, st.integers(1, 30), st.integers(0, 6), st.integers(1, 20))
def test_the_kernel_profile_equals_the_metrics_of_the_attention_itself(seed, probe, sinks, window):
    queries, keys = heads(seed)
    attention, split = probe_of(seed, probe), zones(probe, 40, sinks=sinks, window=window)
    found = kernels.head_profile(queries[None, :, -probe:], keys[None], 8**-0.5, sinks=sinks, window=window, top=0.1)
    near = dict(atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.entropy[0], entropy(attention), **near)
    torch.testing.assert_close(found.concentration[0], concentration(attention, top=0.1), **near)
    for name in ("sink", "local", "mid"):
        torch.testing.assert_close(getattr(found, name)[0], zone_mass(attention, getattr(split, name)), **near)
    torch.testing.assert_close(found.columns[0], column_sums(attention), **near)
    torch.testing.assert_close(found.diagonals[0], diagonal_sums(attention), **near)


@exact
@given(seeds, st.floats(0.05, 0.99), st.integers(0, 12), st.integers(0, 12))
def test_identity_08_covered_share_is_exact_and_grows_along_the_greedy_order(seed, kappa, v_cap, s_cap):
    attention, split = probe_of(seed, 8), zones(8, 40, sinks=2, window=6)
    found = augment(attention, sinks=2, window=6, v_cap=v_cap, s_cap=s_cap, kappa=kappa)
    assert (found.curve.diff(dim=1) >= -1e-6).all() and (found.curve[:, 0] == 0).all()
    mask = Pattern(4, window=6, sinks=2, columns=found.columns, slashes=found.slashes).mask(40)[:, -8:]
    torch.testing.assert_close(found.covered, covered_share(attention, mask, split.mid), atol=1e-5, rtol=0)
    spent = (found.columns >= 0).sum(1) + (found.slashes >= 0).sum(1)
    for h in range(4):
        # The target was reached, and one item less would not have done; or the caps were spent.
        n = int(spent[h])
        assert found.curve[h, n] >= kappa or n == v_cap + s_cap
        assert n == 0 or found.curve[h, n - 1] < kappa


def test_identity_08_the_full_middle_zone_is_covered_and_an_empty_one_counts_as_covered():
    attention = probe_of(1, 8)
    assert augment(attention, sinks=2, window=6, v_cap=40, s_cap=40, kappa=1.0).covered.allclose(torch.ones(4))
    nothing = torch.zeros(1, 2, 20)
    nothing[..., 0] = 1.0
    alone = augment(nothing, sinks=2, window=4, v_cap=3, s_cap=3, kappa=0.9)
    assert alone.covered.item() == 1.0 and (alone.columns < 0).all() and (alone.slashes < 0).all()
    assert covered_share(nothing, torch.zeros(2, 20, dtype=torch.bool), zones(2, 20, sinks=2, window=4).mid).item() == 1.0


@exact
@given(seeds, st.sampled_from(["mean", "max", "last"]))
def test_identity_08_density_grows_with_the_caps_and_falls_with_tau(seed, reduce):
    queries, keys = heads(seed)

    def density(**changes):
        return plan_layer(queries, keys, config(reduce=reduce, kappa=1.0, **changes), task="general").pattern.density(40)

    by_tau = [density(tau=tau) for tau in (-1.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    by_cap = [density(tau=0.3, v_cap=cap, s_cap=cap) for cap in (0, 2, 5, 12, 32)]
    assert by_tau == sorted(by_tau, reverse=True) and by_cap == sorted(by_cap)


@exact
@given(seeds, st.sampled_from(["retrieval", "structure", "general"]))
def test_identity_09_profiles_are_per_query_head(seed, task):
    queries, keys = heads(seed, heads=6, kv_heads=2)
    cfg = AdaCalConfig(sinks=2, window=6, probe=8, v_cap=6, s_cap=7)
    grouped = build_mask(queries, keys, cfg, task=task)
    assert torch.equal(grouped, build_mask(queries, keys.repeat_interleave(3, 0), cfg, task=task))
    if task != "retrieval":
        # Each query head is decided on its own; only the dense rows compare the heads of a layer.
        for h in range(6):
            assert torch.equal(grouped[h : h + 1], build_mask(queries[h : h + 1], keys[h // 3 : h // 3 + 1], cfg, task=task))


@exact
@given(seeds, st.integers(9, 39))
def test_identity_10_later_rows_get_the_rows_of_the_whole_mask(seed, rows):
    queries, keys = heads(seed)
    cfg = AdaCalConfig(sinks=2, window=6, probe=8, v_cap=6, s_cap=7)
    whole = build_mask(queries, keys, cfg, task="retrieval")
    assert torch.equal(build_mask(queries[:, -rows:], keys, cfg, task="retrieval"), whole[:, -rows:])


# ---- activation, fallback, guard ----


def test_row_maximum_finds_the_head_that_row_mean_hides():
    # One row of eight looks at key 10 far back, all others at themselves.
    queries, keys = torch.zeros(2, 40, 4), torch.zeros(1, 40, 4)
    keys[0, 10, 0], keys[0, :, 1] = 1.0, torch.arange(40) / 40.0
    queries[:, :, 1] = 400.0
    queries[1, 35] = torch.tensor([4000.0, 0.0, 0.0, 0.0])
    for reduce, expected in (("mean", [False, False]), ("max", [False, True]), ("last", [False, False])):
        plan = plan_layer(queries, keys, config(reduce=reduce, tau=0.5), task="general")
        assert plan.choice.active.tolist() == expected
    found = plan_layer(queries, keys, config(reduce="max", tau=0.5), task="general")
    assert 10 in found.choice.columns[1].tolist() or 25 in found.choice.slashes[1].tolist()
    assert found.choice.score.tolist() == pytest.approx([0.0, 1.0], abs=1e-3)


def test_fallback_activates_the_best_head_only_where_none_is():
    queries, keys = heads(3)
    nobody = plan_layer(queries, keys, config(tau=1.0), task="general")
    best = plan_layer(queries, keys, config(tau=1.0), task="general", fallback=True)
    assert best.choice.active.nonzero()[:, 0].tolist() == [int(nobody.choice.score.argmax())]
    some = plan_layer(queries, keys, config(tau=0.3), task="general")
    assert some.choice.active.any()
    assert torch.equal(plan_layer(queries, keys, config(tau=0.3), task="general", fallback=True).choice.active, some.choice.active)


def test_dense_rows_go_to_the_top_share_of_active_heads():
    queries, keys = heads(5, heads=10, kv_heads=5)
    plan = plan_layer(queries, keys, config(tau=0.0, reduce="max", dense_top=0.2), task="general")
    top = plan.choice.score.topk(2).indices.sort().values.tolist()
    assert plan.choice.dense.nonzero()[:, 0].tolist() == top
    assert plan.pattern.each("dense_rows") == tuple(8 if h in top else 0 for h in range(10))


def test_the_guard_leaves_a_spread_out_head_its_diagonals_only():
    queries, keys = torch.zeros(1, 40, 4), torch.randn(1, 40, 4, generator=torch.Generator().manual_seed(0))
    plain = plan_layer(queries, keys, config(tau=0.1), task="general")
    guarded = plan_layer(queries, keys, config(tau=0.1, guard=True), task="general")
    assert (plain.choice.columns >= 0).any() and not (guarded.choice.columns >= 0).any() and (guarded.choice.slashes >= 0).any()


def test_shift_moves_the_probe_off_a_fixed_ending():
    queries, keys = heads(8)
    moved = plan_layer(queries, keys, config(shift=5, tau=0.3), task="general")
    cut = plan_layer(queries[:, :35], keys[:, :35], config(tau=0.3), task="general")
    assert torch.equal(moved.choice.active, cut.choice.active) and torch.equal(moved.choice.columns, cut.choice.columns)
    assert moved.pattern.probe_pairs == cut.pattern.probe_pairs == 4 * 8 * 35


def test_policies_give_structure_the_smallest_and_retrieval_the_largest_coverage():
    queries, keys = heads(11, heads=8, kv_heads=4, tokens=200, spread=1.5)
    cfg = AdaCalConfig(sinks=4, window=16, probe=16, v_cap=16, s_cap=24)
    density = {task: plan_layer(queries, keys, cfg, task=task).pattern.density(200) for task in POLICIES}
    assert density["structure"] <= density["general"] <= density["retrieval"]


# ---- wrong input ----


@pytest.mark.parametrize("field, value", [
    ("sinks", -1), ("window", 0), ("probe", 0), ("shift", -2), ("v_cap", -1), ("s_cap", -1), ("v_cap", 1.5), ("probe", True), ("task", "tables"),
    ("tau", -2), ("tau", 3), ("tau", math.nan), ("kappa", 1.2), ("kappa", -0.1), ("reduce", "median"), ("top", 0.0), ("guard", "yes"),
    ("dense_top", 2.0), ("fallback_after", -0.5), ("policies", {"general": TaskPolicy()}),
])
def test_configuration_refuses_values_out_of_range(field, value):
    with pytest.raises(InputError, match=field):
        AdaCalConfig(**{field: value})


def test_layers_refuse_a_long_probe_nan_and_unknown_tasks():
    queries, keys = heads(0, tokens=20)
    with pytest.raises(InputError, match="probe.*21 rows of a prompt of 20 tokens"):
        plan_layer(queries, keys, config(probe=21), task="general")
    with pytest.raises(InputError, match="probe"):
        plan_layer(queries, keys, config(probe=8, shift=13), task="general")
    with pytest.raises(InputError, match="task.*poetry"):
        plan_layer(queries, keys, config(), task="poetry")
    with pytest.raises(InputError, match="queries and keys"):
        plan_layer(queries[None], keys, config(), task="general")
    for where in (queries, keys):
        broken = where.clone()
        broken[0, -1, 0] = math.nan
        with pytest.raises(InputError, match="NaN"):
            plan_layer(broken if where is queries else queries, broken if where is keys else keys, config(), task="general")
    with pytest.raises(InputError, match="reduce"):
        reduce_rows(torch.zeros(2, 3), "median")


# ---- dispatch ----


def test_overlap_counts_rare_ngrams_of_the_end_that_stand_in_the_middle():
    filler = np.arange(1000, 1400)
    planted = np.concatenate([filler[:100], [7, 8, 9], filler[100:300], [7, 8, 9]])
    # Bigrams (7, 8) and (8, 9) and the trigram (7, 8, 9).
    assert query_overlap(planted) == (3, 3) and query_overlap(filler) == (0, 0)
    # Only what the ending holds is looked up, and only what is rare counts.
    assert query_overlap(planted, 2) == (1, 2)
    often = np.concatenate([filler[:100], *[np.append([7, 8, 9], filler[200 + i]) for i in range(4)], filler[100:200], [7, 8, 9]])
    assert query_overlap(often) == (0, 0)
    # Near the end is not the middle.
    assert query_overlap(np.concatenate([filler, [7, 8, 9], filler[:20] + 5000, [7, 8, 9]])) == (0, 0)


FEATURES = {"cues": 0.0, "open": 0.0, "symbols": 0.05, "indent": 0.0, "overlap": 0.0, "longest": 0.0}


@pytest.mark.parametrize("changes, task", [
    ({"cues": 1.0, "overlap": 2.0}, "retrieval"),
    ({"open": 1.0, "overlap": 5.0, "longest": 4.0}, "retrieval"),
    ({"cues": 1.0}, "general"),
    ({"overlap": 9.0, "longest": 8.0}, "general"),
    ({"open": 1.0, "overlap": 5.0, "longest": 3.0}, "general"),
    ({"symbols": 0.4, "overlap": 9.0, "longest": 7.0, "open": 1.0}, "structure"),
    ({"symbols": 0.4, "overlap": 9.0, "longest": 8.0, "open": 1.0}, "retrieval"),
    ({"indent": 0.6, "symbols": 0.15}, "structure"),
    # A question about a table whose words are not in it: the signs disagree.
    ({"symbols": 0.4, "cues": 1.0}, "general"),
    ({"symbols": 0.4, "cues": 1.0, "overlap": 3.0}, "retrieval"),
])
def test_classes_follow_from_overlap_cues_and_regularity(changes, task):
    assert classify(FEATURES | changes) == task


class Letters:
    """A tokenizer whose tokens are characters."""

    def __len__(self):
        return 256

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("text, task", [
    ("Lorem ipsum dolor sit amet, consectetur elit. " * 9 + "The box is red.\n" + "Sed do eiusmod tempor incididunt ut labore. " * 9
     + "\n\nQuestion: Where is the box?\nAnswer:", "retrieval"),
    ("12.5;13;0.75;99\n" * 30, "structure"),
    ("A quiet text without any question goes on and on in long sentences of words, one after another. " * 5, "general"),
])
def test_dispatch_reads_the_text_through_the_tokenizer(text, task):
    ids, tokenizer = [ord(c) for c in text], Letters()
    found = dispatch(ids, tokenizer)
    assert found.task == task and found.features["readable"] == 1.0
    assert dispatch(torch.tensor([ids]), tokenizer) == found
    # Unread, nothing but general is possible.
    assert dispatch(ids).task == "general" and dispatch(ids).features["readable"] == 0.0


@pytest.mark.parametrize("ids", [[], [[1, 2], [3, 4]], [0.5, 1.0]], ids=["empty", "batch", "floats"])
def test_dispatch_refuses_what_is_no_single_prompt(ids):
    with pytest.raises(InputError, match="ids"):
        dispatch(ids)
