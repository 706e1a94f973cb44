"""Sparse attention and head profiles: exact facts beyond the contract suite, bad input, and what the fast paths promise."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from nbkit import kernels
from nbkit.errors import InputError
from nbkit.kernels import _sparse_paths, sparse_attention

NAN = math.nan


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch):
    monkeypatch.delenv("NBKIT_KERNELS", raising=False)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def triple(batch=1, kv_heads=3, group=3, rows=150, tokens=None, dim=16, seed=0):
    tokens = tokens or rows
    return (normal(batch, kv_heads * group, rows, dim, seed=seed), normal(batch, kv_heads, tokens, dim, seed=seed + 1),
            normal(batch, kv_heads, tokens, dim, seed=seed + 2), dim**-0.5)


def indices(*shape, below, seed=3):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def yardstick(args, **pattern):
    """The plain expression in float64, with the full mask."""
    q, k, v, scaling = args
    out, lse = kernels.get("sparse_attention").plain[0](q.double(), k.double(), v.double(), scaling, **pattern)
    return out.float(), lse.float()


def close(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


# --- sparse_attention: what a pattern means ------------------------------------------------------------------------------------------------------

EVERY = torch.arange(150)[None, None]


@pytest.mark.parametrize("pattern", [{"window": 150}, {"sinks": 150}, {"dense_rows": 150}, {"columns": EVERY}, {"slashes": EVERY},
                                     {"blocks": torch.ones(1, 1, 3, 3, dtype=torch.bool)}], ids=lambda pattern: next(iter(pattern)))
def test_full_visibility_is_dense_attention(pattern):
    q, k, v, scaling = triple()
    out, lse = sparse_attention(q, k, v, scaling, **{"window": 1} | pattern)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), atol=1e-5, rtol=1e-5)
    close([lse], [yardstick((q, k, v, scaling), window=150)[1]])


def test_window_one_copies_the_values():
    q, k, v, scaling = triple()
    out, lse = sparse_attention(q, k, v, scaling)
    torch.testing.assert_close(out, v.repeat_interleave(3, 1))
    torch.testing.assert_close(lse, (q * k.repeat_interleave(3, 1)).sum(-1) * scaling)


def test_a_column_in_reach_of_window_or_sinks_changes_nothing():
    args = triple(rows=70)
    columns = torch.tensor([[[0, 1, 2, 2, 1, -1]]])
    plain = sparse_attention(*args, window=9, sinks=3)
    close(sparse_attention(*args, window=9, sinks=3, columns=columns), plain)
    close(sparse_attention(*args, window=9, sinks=3, slashes=torch.tensor([[[0, 8, 8, -1]]])), plain)


def test_sinks_are_columns_and_the_window_is_slashes():
    args = triple(rows=90)
    close(sparse_attention(*args, window=7, sinks=5), sparse_attention(*args, window=7, columns=torch.arange(5)[None, None]))
    close(sparse_attention(*args, window=7, sinks=5), sparse_attention(*args, window=1, sinks=5, slashes=torch.arange(7)[None, None]))


def test_pieces_merge_by_their_log_sum_exp():
    """Two disjoint sets of keys, read apart, give what they give together; the self key that both see is taken out once."""
    args = triple(rows=120)
    left, right = torch.arange(0, 60)[None, None], torch.arange(60, 120)[None, None]
    (one, a), (other, b), (own, c) = (sparse_attention(*args, columns=columns) for columns in (left, right, None))
    total = torch.logaddexp(a, b)
    mass = (total.exp() - c.exp())[..., None]
    merged = (one * a.exp()[..., None] + other * b.exp()[..., None] - own * c.exp()[..., None]) / mass
    want, lse = sparse_attention(*args, window=120)
    torch.testing.assert_close(mass[..., 0].log(), lse, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(merged, want, atol=1e-3, rtol=1e-3)


def test_later_rows_are_the_end_of_all_rows():
    q, k, v, scaling = triple(rows=200)
    pattern = {"window": 20, "sinks": 2, "columns": indices(1, 9, 12, below=200), "slashes": indices(1, 1, 4, below=200)}
    out, lse = sparse_attention(q, k, v, scaling, **pattern)
    close(sparse_attention(q[:, :, 83:], k, v, scaling, **pattern), (out[:, :, 83:], lse[:, :, 83:]))


def test_per_key_head_columns_are_shared_by_its_query_heads():
    args = triple(rows=80)
    columns = indices(1, 3, 6, below=80)
    close(sparse_attention(*args, window=4, columns=columns), sparse_attention(*args, window=4, columns=columns.repeat_interleave(3, 1)))


@pytest.mark.parametrize("rows", [128, 256, 512])
def test_queries_may_be_a_transposed_view(rows):
    q, k, v, scaling = triple(rows=rows)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    pattern = {"window": 8, "sinks": 2, "slashes": indices(1, 9, 5, below=rows), "columns": indices(1, 9, 6, below=rows, seed=4)}
    for got, want in zip(sparse_attention(*views, scaling, **pattern), sparse_attention(q, k, v, scaling, **pattern), strict=True):
        assert torch.equal(got, want)


def test_pattern_of_one_batch_serves_all():
    args = triple(batch=2, rows=60)
    columns, squares = indices(1, 9, 6, below=60), normal(1, 9, 4, 4) > 0.5
    close(sparse_attention(*args, columns=columns, blocks=squares, block=16),
          sparse_attention(*args, columns=columns.expand(2, -1, -1), blocks=squares.expand(2, -1, -1, -1), block=16))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_pattern_equals_the_masked_expression(data):
    draw = data.draw
    kv_heads, group, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 200))
    rows, block = draw(st.integers(1, tokens)), draw(st.sampled_from([1, 5, 16, 48, 67]))
    args = triple(1, kv_heads, group, rows, tokens, 8, seed=draw(st.integers(0, 99)))
    pattern = {"window": draw(st.integers(1, 90)), "sinks": draw(st.integers(0, 6)), "dense_rows": draw(st.integers(0, 20)), "block": block}
    if draw(st.booleans()):
        pattern["columns"] = indices(1, kv_heads * group, draw(st.integers(0, 40)), below=tokens)
    if draw(st.booleans()):
        pattern["slashes"] = indices(1, draw(st.sampled_from([1, kv_heads * group])), draw(st.integers(0, 12)), below=tokens)
    if draw(st.booleans()):
        pattern["blocks"] = normal(1, kv_heads * group, -(-rows // block), -(-tokens // block)) > draw(st.sampled_from([-1.0, 0.5, 2.0]))
    close(sparse_attention(*args, **pattern), yardstick(args, **pattern))


# --- the paths of the torch version --------------------------------------------------------------------------------------------------------------

def counted(monkeypatch):
    """Pairs (rows times keys) that go through the fused kernel, a causal square as half."""
    pairs = []
    real = _sparse_paths._fused

    def fused(queries, keys, values, scaling, causal=False, bias=None):
        pairs.append(queries.shape[:3].numel() * keys.shape[2] / (2 if causal else 1))
        return real(queries, keys, values, scaling, causal, bias)
    monkeypatch.setattr(_sparse_paths, "_fused", fused)
    return pairs


@pytest.mark.parametrize(("pattern", "most"), [
    ({"window": 64, "sinks": 4}, 0.15),
    ({"window": 64, "columns": indices(1, 9, 100, below=2048)}, 0.26),
    ({"window": 64, "slashes": torch.arange(500, 532)[None, None]}, 0.22),
    ({"blocks": torch.eye(32, dtype=torch.bool)[None, None], "window": 1}, 0.16),
], ids=["a-shape", "columns", "slashes", "blocks"])
def test_work_follows_the_visible_pairs(monkeypatch, pattern, most):
    pairs = counted(monkeypatch)
    sparse_attention(*triple(rows=2048, dim=8), **pattern)
    assert sum(pairs) <= most * 9 * 2048 * 2049 / 2


def test_heads_with_few_columns_do_not_pay_for_heads_with_many(monkeypatch):
    columns = torch.full((1, 9, 1024), -1)
    columns[0, 0] = torch.arange(1024)
    pairs = counted(monkeypatch)
    sparse_attention(*triple(rows=1024, dim=8), window=16, columns=columns)
    assert sum(pairs) <= 0.35 * 9 * 1024 * 1025 / 2


def test_heads_that_are_crowded_are_masked_and_the_others_gathered(monkeypatch):
    args = triple(rows=500)
    slashes = torch.full((1, 9, 60), -1)
    slashes[0, ::2] = indices(5, 60, below=500)
    masked = []
    real = _sparse_paths._whole
    monkeypatch.setattr(_sparse_paths, "_whole", lambda *rest: (masked.append(rest[5].tolist()), real(*rest)))
    got = sparse_attention(*args, window=8, slashes=slashes)
    assert masked == [[0, 2, 4, 6, 8]]
    close(got, yardstick(args, window=8, slashes=slashes))


def test_memory_limits_do_not_change_the_result(monkeypatch):
    args = triple(batch=2, rows=300)
    patterns = [{"window": 30, "columns": indices(1, 9, 30, below=300)}, {"window": 30, "slashes": indices(1, 9, 2, below=300)},
                {"window": 5, "blocks": normal(1, 9, 5, 5) > 1.0}]
    whole = [sparse_attention(*args, **pattern) for pattern in patterns]
    for name in ("_SCORES", "_BIAS", "_GATHERED", "_FLAGS"):
        monkeypatch.setattr(_sparse_paths, name, 1000)
    for pattern, want in zip(patterns, whole, strict=True):
        close(sparse_attention(*args, **pattern), want)


def test_gradients_equal_those_of_dense_attention():
    q, k, v, scaling = (part.requires_grad_() if isinstance(part, torch.Tensor) else part for part in triple(rows=20))
    grads = torch.autograd.grad(sparse_attention(q, k, v, scaling, window=20)[0].square().sum(), (q, k, v))
    want = torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square().sum(), (q, k, v))
    for one, other in zip(grads, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_what_a_row_does_not_see_cannot_spoil_it(backend):
    q, k, v, scaling = triple(kv_heads=1, group=2, rows=12, dim=4)
    want = sparse_attention(q, k, v, scaling, window=2, sinks=1, backend=backend)
    k[:, :, 5], v[:, :, 5, 1] = NAN, NAN
    out, lse = sparse_attention(q, k, v, scaling, window=2, sinks=1, backend=backend)
    seen = torch.tensor([i in (5, 6) for i in range(12)])
    assert bool(out[:, :, seen].isnan().all()) and bool(lse[:, :, seen].isnan().all())
    close((out[:, :, ~seen], lse[:, :, ~seen]), (want[0][:, :, ~seen], want[1][:, :, ~seen]))


def test_a_bad_value_spoils_its_element_only():
    q, k, v, scaling = triple(kv_heads=1, group=2, rows=12, dim=4)
    want, lse = sparse_attention(q, k, v, scaling, window=2)
    v[:, :, 5, 1] = NAN
    out, lse_now = sparse_attention(q, k, v, scaling, window=2)
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[:, :, 5:7, 1] = True
    assert torch.equal(out.isnan(), touched)
    close((out[~touched], lse_now), (want[~touched], lse))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    args = [part.to(dtype) if isinstance(part, torch.Tensor) else part for part in triple(rows=100)]
    out, lse = sparse_attention(*args, window=9, sinks=2)
    wide, wide_lse = sparse_attention(*(part.float() if isinstance(part, torch.Tensor) else part for part in args), window=9, sinks=2)
    assert out.dtype == dtype and torch.equal(out, wide.to(dtype)) and torch.equal(lse, wide_lse)


GOOD = dict(zip(("queries", "keys", "values", "scaling"), triple(rows=20, dim=4), strict=True))


@pytest.mark.parametrize(("change", "message"), [
    ({"queries": torch.zeros(1, 9, 20, 4, dtype=torch.int64)}, "queries"),
    ({"queries": torch.zeros(9, 20, 4)}, "queries"),
    ({"keys": torch.zeros(1, 3, 20, 5)}, "keys"),
    ({"keys": torch.zeros(1, 3, 20, 4, dtype=torch.float64)}, "keys"),
    ({"values": torch.zeros(1, 3, 19, 4)}, "values"),
    ({"keys": torch.zeros(1, 4, 20, 4), "values": torch.zeros(1, 4, 20, 4)}, "multiple of kv_heads = 4"),
    ({"keys": torch.zeros(1, 3, 19, 4), "values": torch.zeros(1, 3, 19, 4)}, "at most tokens = 19"),
    ({"scaling": NAN}, "scaling"),
    ({"window": 0}, "window"), ({"window": 2.0}, "window"), ({"sinks": -1}, "sinks"), ({"dense_rows": True}, "dense_rows"), ({"block": 0}, "block"),
    ({"columns": torch.zeros(1, 2, 3, dtype=torch.int64)}, "columns.*heads 1 or 3 or 9"),
    ({"columns": torch.zeros(1, 9, 3)}, "columns"),
    ({"columns": torch.tensor([[[20]]])}, "values 20 to 20"),
    ({"slashes": torch.tensor([[[-2]]])}, "values -2 to -2"),
    ({"slashes": torch.zeros(1, 3, 2, dtype=torch.int64)}, "slashes"),
    ({"blocks": torch.ones(1, 1, 2, 2, dtype=torch.bool), "block": 8}, r"blocks.*\(\.\.\., 3, 3\)"),
    ({"blocks": torch.ones(1, 1, 1, 1)}, "blocks"),
    ({"columns": torch.zeros(1, 1, 1, dtype=torch.int64, device="meta")}, "one device"),
])
def test_bad_input_is_named(change, message):
    with pytest.raises(InputError, match=message):
        sparse_attention(**GOOD | change)


# --- head_profile --------------------------------------------------------------------------------------------------------------------------------

def shares_of(q, k, scaling):
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scaling
    rows, tokens = q.shape[2], k.shape[2]
    return logits.masked_fill(torch.ones(rows, tokens, dtype=torch.bool).triu(tokens - rows + 1), -math.inf).softmax(-1)


def test_masses_and_sums_agree_with_the_attention_matrix():
    q, k, _, scaling = triple(rows=24, tokens=100)
    profile = kernels.head_profile(q, k, scaling, window=10)
    shares = shares_of(q, k, scaling)
    torch.testing.assert_close(profile.columns, shares.sum(2))
    by_hand = torch.stack([sum(shares[:, :, i, 76 + i - apart] for i in range(24) if apart <= 76 + i) for apart in range(100)], -1)
    torch.testing.assert_close(profile.diagonals, by_hand)
    torch.testing.assert_close(profile.sink + profile.local + profile.mid, torch.ones(1, 9, 24))
    torch.testing.assert_close(profile.diagonals.sum(-1), torch.full((1, 9), 24.0))
    torch.testing.assert_close(profile.sink, shares[..., :4].sum(-1))
    torch.testing.assert_close(profile.local.sum(-1), profile.diagonals[..., :10].sum(-1))
    torch.testing.assert_close(profile.concentration, shares.mean(2).sort(-1, descending=True).values[..., :2].sum(-1))


def test_uniform_rows_have_entropy_one_and_concentration_top():
    profile = kernels.head_profile(torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 50, 4), 1.0, top=0.1)
    torch.testing.assert_close(profile.entropy, torch.ones(1, 2))
    torch.testing.assert_close(profile.concentration, torch.full((1, 2), 0.1))


def test_rows_that_look_at_one_key_have_entropy_zero_and_concentration_one():
    keys = torch.zeros(1, 1, 50, 4)
    keys[0, 0, 7] = 1.0
    profile = kernels.head_profile(torch.full((1, 2, 6, 4), 100.0), keys, 1.0, window=5)
    assert float(profile.entropy.abs().max()) == 0.0
    assert torch.equal(profile.concentration, torch.ones(1, 2)) and torch.equal(profile.mid, torch.ones(1, 2, 6))
    assert torch.equal(profile.columns[..., 7], torch.full((1, 2), 6.0)) and float(profile.columns.sum()) == 12.0


def test_a_row_alone_has_entropy_zero():
    profile = kernels.head_profile(normal(1, 2, 1, 4), normal(1, 2, 1, 4), 1.0)
    assert torch.equal(profile.entropy, torch.zeros(1, 2)) and torch.equal(profile.local, torch.ones(1, 2, 1))


def test_local_comes_before_sink():
    profile = kernels.head_profile(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), 1.0, sinks=2, window=3)
    torch.testing.assert_close(profile.sink[0, 0], torch.tensor([0.0, 0.0, 0.0, 0.25]))
    torch.testing.assert_close(profile.local[0, 0], torch.tensor([1.0, 1.0, 1.0, 0.75]))


def test_profile_in_small_blocks_is_the_same(monkeypatch):
    q, k, _, scaling = triple(rows=24, tokens=100)
    whole = kernels.head_profile(q, k, scaling, window=10)
    monkeypatch.setattr(sys.modules["nbkit.kernels.head_profile"], "_SHARES", 700)
    close(kernels.head_profile(q, k, scaling, window=10), whole)


def test_later_keys_never_reach_a_row():
    q, k, _, scaling = triple(rows=1, tokens=40)
    spoilt = torch.cat([k, torch.full((1, 3, 1, 16), NAN)], 2)
    two = torch.cat([q, torch.zeros_like(q)], 2)
    profile = kernels.head_profile(two, spoilt, scaling, window=10)
    close([profile.mid[..., 0]], [kernels.head_profile(q, k, scaling, window=10).mid[..., 0]])


def test_profile_carries_no_gradient():
    q, k, _, scaling = triple(rows=4)
    assert not any(part.requires_grad for part in kernels.head_profile(q.requires_grad_(), k, scaling))


@pytest.mark.parametrize(("change", "message"), [
    ({"queries": torch.zeros(1, 9, 20, 4, dtype=torch.int64)}, "queries"),
    ({"keys": torch.zeros(1, 3, 20, 5)}, "keys"),
    ({"keys": torch.zeros(1, 4, 20, 4)}, "multiple of kv_heads = 4"),
    ({"keys": torch.zeros(1, 3, 19, 4)}, "at most tokens = 19"),
    ({"scaling": math.inf}, "scaling"), ({"sinks": -1}, "sinks"), ({"window": 0}, "window"), ({"top": 0.0}, "top"), ({"top": 1.5}, "top"),
    ({"keys": torch.zeros(1, 3, 20, 4, device="meta")}, "one device"),
])
def test_profile_bad_input_is_named(change, message):
    with pytest.raises(InputError, match=message):
        kernels.head_profile(**{name: GOOD[name] for name in ("queries", "keys", "scaling")} | change)
