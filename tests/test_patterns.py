"""Sparse attention patterns: every rule against a loop over single pairs, one density, golden cases by hand, identities between rules."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from nbkit.errors import InputError
from nbkit.inference import PARTS, attach, get
from nbkit.inference.patterns import (
    Pattern,
    a_shape,
    attend_pattern,
    block_topk,
    causal_pairs,
    coverage,
    dense,
    duo_attention,
    entropy_infer,
    equal_choices,
    fit_duo_gates,
    fit_vertical_slash,
    flex_prefill,
    head_set,
    mix,
    probe_attention,
    probe_sums,
    random_flags,
    root_js_divergence,
    task_kv,
    tri_shape,
    triangle_mix,
    vertical_slash,
    x_attention,
)

HEADS, KV, DIM = 4, 2, 8


def qkv(seed, rows, *, heads=HEADS, kv=KV, dim=DIM, scale=1.5):
    generator = torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(1, h, rows, dim, generator=generator) for h in (heads, kv, kv))


RULES = {
    "dense": lambda q, k, v: dense(q, k),
    "a-shape": lambda q, k, v: a_shape(q, k, sinks=3, window=10),
    "tri-shape": lambda q, k, v: tri_shape(q, k, sinks=3, window=10, last=12),
    "trianglemix": lambda q, k, v: triangle_mix(q, k, layer=1, layers=2, sinks=3, window=10, last=12),
    "vertical-slash": lambda q, k, v: vertical_slash(q, k, v=[3, 0, 9, 5], s=7, sinks=3, window=10, probe=16),
    "block-topk": lambda q, k, v: block_topk(q, k, block=16, top=2),
    "flexprefill": lambda q, k, v: flex_prefill(q, k, gamma=0.6, tau=0.4, block=8),
    "xattention": lambda q, k, v: x_attention(q, k, threshold=0.6, stride=4, block=16),
    "duo": lambda q, k, v: duo_attention(q, k, gates=[0.2, 0.8, 0.5, 0.4], sinks=3, window=10),
    "taskkv": lambda q, k, v: task_kv(q, k, v, sinks=3, window=10, middle=9, probe=16),
    "entropyinfer": lambda q, k, v: entropy_infer(q, k, block=8, segment=16, base=16, dense_until=20),
    "head-set": lambda q, k, v: head_set(q, k, active=[True, False, False, True], sinks=3, window=10),
    "head-rows": lambda q, k, v: head_set(q, k, active=[True, False, False, True], sinks=3, window=10, last=9),
}
rule = pytest.mark.parametrize("name", RULES)


def loop_mask(p, rows, keys):
    """The definition, one pair at a time."""
    mask = torch.zeros(p.heads, rows, keys, dtype=torch.bool)
    sizes = list(zip(p.each("window"), p.each("sinks"), p.each("dense_rows"), strict=True))
    for h, (window, sinks, last) in enumerate(sizes):
        columns = set() if p.columns is None else set(p.columns[h].tolist())
        slashes = set() if p.slashes is None else set(p.slashes[h].tolist())
        for i in range(rows):
            at = keys - rows + i
            for j in range(at + 1):
                mask[h, i, j] = (
                    at - j < window or j < sinks or j in columns or at - j in slashes or i >= rows - last
                    or (p.blocks is not None and bool(p.blocks[h, i // p.block, j // p.block]))
                )
    return mask


def drawn(seed):
    """A pattern with everything that can occur, and its numbers of rows and keys."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    keys = number(1, 40)
    rows, heads, block = number(1, keys + 1), number(1, 4), number(1, 20)
    options = {
        "window": [number(1, keys + 3) for _ in range(heads)] if number(0, 2) else number(1, 9),
        "sinks": number(0, 6),
        "dense_rows": [number(0, rows + 2) for _ in range(heads)] if number(0, 2) else number(0, 4),
    }
    if number(0, 2):
        options["columns"] = torch.randint(-1, keys + 2, (heads, number(0, 9)), generator=generator)
    if number(0, 2):
        options["slashes"] = torch.randint(-1, keys + 2, (heads, number(0, 9)), generator=generator)
    if number(0, 2):
        options |= {"blocks": torch.rand(heads, -(-rows // block), -(-keys // block), generator=generator) < 0.3, "block": block}
    return Pattern(heads, **options), rows, keys


# ---- the description ----


@pytest.mark.parametrize("seed", range(25))
def test_mask_and_count_of_any_pattern_equal_a_loop_over_single_pairs(seed):
    pattern, rows, keys = drawn(seed)
    expected = loop_mask(pattern, rows, keys)
    assert torch.equal(pattern.mask(rows, keys), expected)
    assert pattern.pairs(rows, keys).tolist() == expected.sum((1, 2)).tolist()


@pytest.mark.parametrize("seed", range(25))
def test_groups_of_heads_and_mixtures_describe_the_same_pairs(seed):
    pattern, rows, keys = drawn(seed)
    mask = pattern.mask(rows, keys)
    seen = []
    for heads, part in pattern.groups(keys):
        assert torch.equal(part.mask(rows, keys), mask[heads])
        assert all(isinstance(getattr(part, name), int) for name in ("window", "sinks", "dense_rows"))
        seen += heads
    assert sorted(seen) == list(range(pattern.heads))
    other = Pattern(pattern.heads, window=2, sinks=1, columns=torch.tensor([[0, 3, 5]]), probe_pairs=7.0)
    active = [h % 2 == 0 for h in range(pattern.heads)]
    mixed = mix(active, pattern, other)
    expected = torch.where(torch.tensor(active)[:, None, None], mask, other.mask(rows, keys))
    assert torch.equal(mixed.mask(rows, keys), expected)
    assert mixed.probe_pairs == 7.0


def test_density_is_pairs_and_probe_over_the_causal_pairs_of_all_heads():
    pattern = Pattern(3, window=2, sinks=1, probe_pairs=33.0)
    pairs = int(pattern.mask(10).sum())
    assert pattern.density(10, probe=False) == pairs / (3 * 55)
    assert pattern.density(10) == (pairs + 33) / (3 * 55)
    assert causal_pairs(10, 10) == 55
    assert pattern.density(4, 10) == (int(pattern.mask(4, 10).sum()) + 33) / (3 * (7 + 8 + 9 + 10))


@rule
@pytest.mark.parametrize("rows", (64, 77))
def test_every_rule_is_causal_keeps_each_row_and_the_first_key_and_counts_right(name, rows):
    q, k, v = qkv(0, rows)
    pattern = RULES[name](q, k, v)
    mask = pattern.mask(rows)
    assert torch.equal(mask, loop_mask(pattern, rows, rows))
    assert not mask.triu(1).any()
    assert mask.diagonal(dim1=1, dim2=2).all()
    assert mask[:, :, 0].all()
    assert pattern.pairs(rows).tolist() == mask.sum((1, 2)).tolist()
    assert pattern.density(rows, probe=False) == pytest.approx(mask.sum().item() / (HEADS * rows * (rows + 1) / 2))


@rule
def test_a_rule_that_computed_scores_charges_them(name):
    q, k, v = qkv(1, 64)
    expected = {
        "vertical-slash": HEADS * 16 * 64,
        "taskkv": HEADS * 16 * 64,
        "block-topk": HEADS * 4 * 5 // 2,
        # Rows of blocks read 4, 8, 12 and 16 strided keys with 4 strided rows each; one strided product is 4 scores.
        "xattention": HEADS * 4 * (4 + 8 + 12 + 16) * 4,
        # Two pools of queries by two pools of keys, 4 segments by 8 blocks.
        "entropyinfer": HEADS * 4 * 4 * 8,
    }
    pattern = RULES[name](q, k, v)
    if name == "flexprefill":
        assert pattern.probe_pairs == HEADS * (8 * 64 + 8) + sum(pattern.info["query_aware"]) * 36
    else:
        assert pattern.probe_pairs == expected.get(name, 0)


# ---- static rules ----


def test_a_shape_and_tri_shape_by_hand():
    q, k, _ = qkv(2, 6, heads=1, kv=1)
    assert a_shape(q, k, sinks=1, window=2).mask(6)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1],
    ]
    assert tri_shape(q, k, sinks=1, window=2, last=1).mask(6)[0, -1].all()


def test_dense_last_rows_for_all_heads_on_an_a_shape_is_a_tri_shape_and_all_rows_is_dense():
    q, k, _ = qkv(3, 50)
    rows = head_set(q, k, active=[True] * HEADS, sinks=2, window=7, last=11)
    assert torch.equal(rows.mask(50), tri_shape(q, k, sinks=2, window=7, last=11).mask(50))
    for pattern in (tri_shape(q, k, sinks=2, window=7, last=50), a_shape(q, k, sinks=0, window=50), head_set(q, k, active=[True] * HEADS)):
        assert torch.equal(pattern.mask(50), dense(q, k).mask(50))
        assert pattern.density(50) == 1


def test_trianglemix_is_dense_below_the_middle_and_tri_shaped_above():
    q, k, _ = qkv(4, 40)
    tri = tri_shape(q, k, sinks=2, window=7, last=5).mask(40)
    for layer in range(5):
        mask = triangle_mix(q, k, layer=layer, layers=5, sinks=2, window=7, last=5).mask(40)
        assert torch.equal(mask, dense(q, k).mask(40) if layer < 2 else tri)
    assert triangle_mix(q, k, layer=0, layers=5, dense_layers=0, last=5).dense_rows == 5


# ---- probe sums and vertical-slash ----


@pytest.mark.parametrize(("rows", "keys", "window"), [(5, 12, 0), (5, 12, 3), (12, 12, 0), (1, 7, 2), (4, 4, 4)])
def test_column_and_diagonal_sums_equal_loops_including_truncated_diagonals(rows, keys, window):
    q, k, _ = qkv(5, keys)
    attention = probe_attention(q, k, rows=rows)
    full = torch.softmax(
        (q[0] @ k[0].repeat_interleave(2, 0).transpose(1, 2) / math.sqrt(DIM)).masked_fill(torch.ones(keys, keys).triu(1).bool(), -math.inf), -1
    )
    assert torch.allclose(attention, full[:, -rows:], atol=1e-6)
    columns, diagonals = torch.zeros(HEADS, keys), torch.zeros(HEADS, keys)
    for h in range(HEADS):
        for r in range(rows):
            at = keys - rows + r
            for j in range(at + 1):
                if at - j >= window:
                    columns[h, j] += attention[h, r, j]
                    diagonals[h, at - j] += attention[h, r, j]
    found = probe_sums(attention, window=window)
    assert torch.allclose(found[0], columns, atol=1e-5)
    assert torch.allclose(found[1], diagonals, atol=1e-5)
    if not window:
        assert torch.allclose(found[1].sum(1), torch.full((HEADS,), float(rows)), atol=1e-4)


def test_vertical_slash_takes_the_heaviest_columns_and_diagonals_outside_the_a_shape():
    rows, sinks, window, probe = 60, 2, 6, 10
    q, k, _ = qkv(6, rows)
    pattern = vertical_slash(q, k, v=[4, 0, 3, 9], s=[2, 5, 0, 1], sinks=sinks, window=window, probe=probe)
    attention = probe_attention(q, k, rows=probe).double()
    for h, (v, s) in enumerate([(4, 2), (0, 5), (3, 0), (9, 1)]):
        columns = {j: sum(float(attention[h, r, j]) for r in range(probe) if rows - probe + r - j >= window) for j in range(sinks, rows)}
        slashes = {d: sum(float(attention[h, r, rows - probe + r - d]) for r in range(probe) if rows - probe + r >= d) for d in range(window, rows)}
        for table, mass, count in ((pattern.columns, columns, v), (pattern.slashes, slashes, s)):
            assert {x for x in table[h].tolist() if x >= 0} == set(sorted(mass, key=mass.get, reverse=True)[:count])


def test_vertical_slash_finds_a_planted_column_and_a_planted_diagonal():
    rows = 128
    q = torch.zeros(1, 2, rows, 4)
    k = torch.zeros(1, 2, rows, 4)
    # Head 0: all rows look at key 40. Head 1: row i looks at key i - 30 through a one-hot code of the last rows.
    q[0, 0, :, 0] = k[0, 0, 40, 0] = 8.0
    pattern = vertical_slash(q, k, v=1, s=0, sinks=1, window=8, probe=4, scaling=1.0)
    assert pattern.columns[0].tolist() == [40]
    for r in range(4):
        q[0, 1, rows - 4 + r, r] = k[0, 1, rows - 4 + r - 30, r] = 8.0
    pattern = vertical_slash(q, k, v=0, s=1, sinks=1, window=8, probe=4, scaling=1.0)
    assert pattern.slashes[1].tolist() == [30]


def test_vertical_slash_with_caps_beyond_the_prompt_is_dense_and_density_grows_with_the_caps():
    q, k, _ = qkv(7, 50)
    assert vertical_slash(q, k, v=50, s=50, window=5, probe=8).density(50, probe=False) == 1
    densities = [vertical_slash(q, k, v=v, s=v, sinks=2, window=5, probe=8).density(50) for v in (0, 2, 4, 8, 16, 32)]
    assert densities == sorted(densities) and len(set(densities)) == 6
    assert {v + s for v, s in equal_choices(96)} == {96}


# ---- rules that read the values ----


def test_coverage_counts_the_fewest_entries_that_reach_the_share():
    mass = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    assert [coverage(mass, share).tolist() for share in (0.3, 0.4, 0.41, 0.7, 1.0)] == [[1, 2], [1, 2], [2, 2], [2, 3], [4, 4]]


def test_root_js_divergence_is_finite_with_zeros_and_symmetric():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    # 0.5 * (.5 ln 2) twice.
    assert root_js_divergence(p, q).item() == pytest.approx(math.sqrt(0.5 * math.log(2)))
    assert root_js_divergence(p, q).item() == pytest.approx(root_js_divergence(q, p).item())
    assert root_js_divergence(p, p).item() == 0


def test_block_topk_by_hand():
    # Four blocks of two tokens; the mean query of block 3 fits key block 1 best, that of block 2 fits block 1 less than block 0.
    k = torch.tensor([0.0, 0.0, 1.0, 1.0, -1.0, -1.0, 5.0, 5.0]).view(1, 1, 8, 1)
    q = torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0, -1.0, 2.0, 2.0]).view(1, 1, 8, 1)
    assert block_topk(q, k, block=2, top=1).blocks[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert block_topk(q, k, block=2, top=0).blocks[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert block_topk(q, k, block=2, top=4).density(8, probe=False) == 1


@pytest.mark.parametrize("rows", (64, 61))
def test_block_topk_equals_a_loop_over_blocks(rows):
    q, k, _ = qkv(8, rows)
    block, top = 8, 2
    found = block_topk(q, k, block=block, top=top).blocks
    for h in range(HEADS):
        tiles = range(0, rows, block)
        mean_q = [q[0, h, i : i + block].mean(0) for i in tiles]
        mean_k = [k[0, h // 2, i : i + block].mean(0) for i in tiles]
        for r in range(8):
            ranked = sorted(range(1, r), key=lambda c, h=h, r=r, a=mean_q, b=mean_k: float(a[r] @ b[c]), reverse=True)
            assert set(found[h, r].nonzero()[:, 0].tolist()) == {0, r} | set(ranked[:top])


def test_flexprefill_by_hand():
    # Blocks of 2 tokens, 8 tokens, and one head that attends to key 2 alone: a column holds all mass, pooling sees half of it.
    q = torch.zeros(1, 1, 8, 2)
    k = torch.zeros(1, 1, 8, 2)
    q[0, 0, :, 0], k[0, 0, 2, 0] = 1.0, 20.0
    pattern = flex_prefill(q, k, gamma=0.9, tau=0.0, block=2, scaling=1.0)
    # One column reaches 90 %, rounded up to a block of 2; the last rows 6 and 7 reach key 2 over the distances 4 and 5.
    assert pattern.info["query_aware"] == (False,)
    assert pattern.columns.shape == (1, 2) and 2 in pattern.columns[0].tolist()
    assert sorted(pattern.slashes[0].tolist()) == [4, 5]
    assert (pattern.window, pattern.sinks, pattern.blocks) == (2, 2, None)
    # The pooled last rows send e^10 / (e^10 + 3) of the mass to block 1: the divergence is tiny, so a small tau makes the head query-aware,
    # and the pooled map of 4 rows of blocks (1; half and half made 1 by e^10; ...) covers 90 % with blocks (0,0), (1,1), (2,1), (3,1).
    pattern = flex_prefill(q, k, gamma=0.9, tau=0.1, block=2, scaling=1.0)
    assert pattern.info["query_aware"] == (True,) and pattern.columns is None and pattern.slashes is None
    assert pattern.blocks[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert pattern.probe_pairs == 2 * 8 + 4 + 10


@pytest.mark.parametrize("gamma", (0.3, 0.8))
def test_flexprefill_lines_reach_coverage_gamma_on_the_last_rows(gamma):
    rows, block = 96, 8
    q, k, _ = qkv(9, rows)
    pattern = flex_prefill(q, k, gamma=gamma, tau=0.0, block=block)
    columns, diagonals = probe_sums(probe_attention(q, k, rows=block))
    for table, mass in ((pattern.columns, columns), (pattern.slashes, diagonals)):
        for h in range(HEADS):
            kept = [x for x in table[h].tolist() if x >= 0]
            assert len(kept) % block == 0 and len(kept) >= block
            assert mass[h, kept].sum() >= gamma * block - 1e-4
            # One block fewer would not do, unless the budget forces it.
            fewer = mass[h].sort(descending=True).values[: len(kept) - block].sum()
            assert len(kept) == block or fewer < gamma * block
    assert flex_prefill(q, k, gamma=gamma, tau=0.0, block=block, min_budget=40).columns.ge(0).sum(1).min() >= 40


def test_flexprefill_query_aware_blocks_cover_gamma_of_the_pooled_map():
    rows, block, gamma = 96, 8, 0.5
    q, k, _ = qkv(10, rows)
    pattern = flex_prefill(q, k, gamma=gamma, tau=1.0, block=block)
    assert pattern.info["query_aware"] == (True,) * HEADS
    mean_q, mean_k = (x[0].view(-1, rows // block, block, DIM).mean(2) for x in (q, k))
    for h in range(HEADS):
        scores = (mean_q[h] @ mean_k[h // 2].T / math.sqrt(DIM)).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
        pooled = scores.softmax(-1)
        assert pooled[pattern.blocks[h]].sum() >= gamma * 12
        order = pooled.flatten().sort(descending=True)
        need = int((order.values.cumsum(0) < gamma * 12).sum()) + 1
        expected = torch.zeros(144, dtype=torch.bool)
        expected[order.indices[:need]] = True
        expected = expected.view(12, 12)
        # Besides: the best block of every row (the smallest budget), the first block and the row's own.
        expected[torch.arange(12), pooled.argmax(1)] = True
        expected[:, 0] = True
        assert torch.equal(pattern.blocks[h], (expected | torch.eye(12, dtype=torch.bool)).tril())


def test_flexprefill_with_full_coverage_is_dense_and_a_short_prompt_says_that_it_is_dense():
    q, k, _ = qkv(11, 64)
    for tau in (0.0, 1.0):
        pattern = flex_prefill(q, k, gamma=1.0, tau=tau, block=8)
        assert pattern.density(64, probe=False) == 1 and not pattern.info["dense"]
    short = flex_prefill(q, k, block=32)
    assert short.info["dense"] and short.density(64) == 1 and short.probe_pairs == 0


@pytest.mark.parametrize("rows", (64, 59))
def test_xattention_equals_loops_over_anti_diagonals(rows):
    stride, block, threshold = 4, 8, 0.7
    q, k, _ = qkv(12, rows)
    found = x_attention(q, k, threshold=threshold, stride=stride, block=block).blocks
    tiles, blocks = -(-rows // stride), -(-rows // block)
    for h in range(HEADS):
        scores = torch.full((tiles, tiles), -math.inf, dtype=torch.float64)
        for a in range(tiles):
            for b in range(a + 1):
                pairs = [(a * stride + stride - 1 - t, b * stride + t) for t in range(stride)]
                scores[a, b] = sum(float(q[0, h, i] @ k[0, h // 2, j]) for i, j in pairs if i < rows and j < rows) / math.sqrt(DIM) / stride
        share = scores.softmax(-1)
        for r in range(blocks):
            mass = [float(share[2 * r : 2 * r + 2, 2 * c : 2 * c + 2].sum()) for c in range(r + 1)]
            kept, total = {0, r}, sum(mass[c] for c in {0, r})
            for c in sorted(range(1, r), key=mass.__getitem__, reverse=True):
                if total >= threshold * sum(mass):
                    break
                kept.add(c)
                total += mass[c]
            assert set(found[h, r].nonzero()[:, 0].tolist()) == kept


def test_xattention_keeps_the_first_column_of_key_blocks_not_the_first_row_and_everything_at_threshold_one():
    q, k, _ = qkv(13, 64)
    sparse = x_attention(q, k, threshold=0.05, stride=4, block=8).blocks
    assert sparse[:, :, 0].all()
    assert not sparse[:, 0, 1:].any()
    assert x_attention(q, k, threshold=1.0, stride=4, block=8).density(64, probe=False) == 1


def test_entropyinfer_budgets_follow_the_entropy_and_stay_between_one_and_three_bases():
    rows, block, segment, base = 160, 8, 16, 16
    q, k, _ = qkv(14, rows)
    pattern = entropy_infer(q, k, block=block, segment=segment, base=base, dense_until=32)
    budgets = pattern.info["budgets"]
    assert budgets.min() >= base and budgets.max() <= 3 * base
    # The query heads of one key head share the scores, so also the blocks.
    assert torch.equal(pattern.blocks[0], pattern.blocks[1]) and torch.equal(pattern.blocks[2], pattern.blocks[3])
    for h in (0, 2):
        entropies = [0.0]
        for s in range(10):
            rows_of = slice(s * segment, (s + 1) * segment)
            scores = []
            for c in range(2 * s):
                keys = k[0, h // 2, c * block : (c + 1) * block]
                bounds = [
                    sum(float(end @ edge) for head in (h, h + 1) for end in (q[0, head, rows_of].amax(0), q[0, head, rows_of].amin(0))) / 2
                    for edge in (keys.amax(0), keys.amin(0))
                ]
                # The larger bound is taken for each query head, then averaged.
                per_head = []
                for head in (h, h + 1):
                    ends = (q[0, head, rows_of].amax(0), q[0, head, rows_of].amin(0))
                    per_head.append(max(sum(float(end @ edge) for end in ends) / 2 for edge in (keys.amax(0), keys.amin(0))))
                assert sum(bounds) <= 2 * sum(per_head) + 1e-3
                scores.append(sum(per_head) / 2)
            if not s:
                expected = float(base)
                continue
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            entropies.append(float(-torch.special.xlogy(weights, weights).sum()))
            if s > 1:
                change = min(max((entropies[s] - entropies[s - 1]) / (entropies[s - 1] + 1e-9), 0), 1.4)
                expected = min(max(expected + 0.5 * base * (change - 0.4), base), 3 * base)
            assert float(budgets[h, s]) == pytest.approx(expected, abs=1e-3)
            earlier = pattern.blocks[h, 2 * s, : 2 * s]
            if 2 * s * block >= 32:
                best = sorted(range(2 * s), key=scores.__getitem__, reverse=True)[: int(expected / block)]
                assert set(earlier.nonzero()[:, 0].tolist()) == set(best)
    assert pattern.dense_rows == 16
    rigid = entropy_infer(q, k, block=block, segment=segment, base=base, dense_until=32, rigid_below=100.0)
    assert all(rigid.info["rigid"]) and (rigid.info["budgets"] == base).all()
    assert entropy_infer(q, k, dense_until=rows).info["dense"]


def test_task_kv_keeps_the_farthest_heads_whole_and_the_middle_of_the_others():
    rows = 60
    q, k, v = qkv(15, rows)
    projection = torch.randn(12, HEADS * DIM, generator=torch.Generator().manual_seed(0))
    pattern = task_kv(q, k, v, projection=projection, far=0.5, sinks=2, window=5, middle=6, probe=8)
    attention = probe_attention(q, k, rows=8)
    outputs = torch.stack([projection[:, h * DIM : (h + 1) * DIM] @ (attention[h] @ v[0, h // 2]).mean(0) for h in range(HEADS)])
    distance = (outputs - outputs.mean(0)).norm(dim=1)
    assert torch.allclose(pattern.info["distance"], distance, rtol=1e-4)
    whole = set(distance.argsort(descending=True)[:2].tolist())
    assert {h for h, w in enumerate(pattern.each("window")) if w == rows} == whole
    reference = vertical_slash(q, k, v=6, s=0, sinks=2, window=5, probe=8)
    for h in set(range(HEADS)) - whole:
        assert torch.equal(pattern.mask(rows)[h], reference.mask(rows)[h])


def test_duo_gates_of_key_heads_serve_their_query_heads_and_the_threshold_counts_as_reached():
    q, k, _ = qkv(16, 30)
    by_key_head = duo_attention(q, k, gates=[0.5, 0.4], sinks=1, window=3)
    assert torch.equal(by_key_head.mask(30), duo_attention(q, k, gates=[0.5, 0.5, 0.4, 0.4], sinks=1, window=3).mask(30))
    assert by_key_head.each("window") == (30, 30, 3, 3)


def test_random_flags_have_a_fixed_count_and_follow_the_seed():
    flags = [random_flags(30, 9, share=0.2, seed=seed) for seed in range(5)]
    assert all(int(f.sum()) == 54 for f in flags)
    assert torch.equal(flags[0], random_flags(30, 9, share=0.2, seed=0))
    assert not torch.equal(flags[0], flags[1])


@pytest.mark.parametrize("name", sorted(set(RULES) - {"vertical-slash", "duo", "head-set", "head-rows"}))  # these get their sizes a head
def test_patterns_are_per_query_head(name):
    """Query heads that share keys get their own pattern: permuting heads within a group permutes the pattern."""
    q, k, v = qkv(17, 64)
    swap = [1, 0, 3, 2]
    mask, swapped = RULES[name](q, k, v).mask(64), RULES[name](q[:, swap], k, v).mask(64)
    assert torch.equal(swapped, mask[swap])


# ---- bad input ----


BAD = {
    "window": lambda q, k, v: a_shape(q, k, window=0),
    "sinks": lambda q, k, v: a_shape(q, k, sinks=-1),
    "last": lambda q, k, v: tri_shape(q, k, last=-1),
    "layer": lambda q, k, v: triangle_mix(q, k, layer=5, layers=5),
    "dense_layers": lambda q, k, v: triangle_mix(q, k, layer=0, layers=5, dense_layers=6),
    "v": lambda q, k, v: vertical_slash(q, k, v=-1),
    "s": lambda q, k, v: vertical_slash(q, k, s=[1, 2, 3]),
    "rows": lambda q, k, v: vertical_slash(q, k, probe=0),
    "budget": lambda q, k, v: equal_choices(0),
    "top": lambda q, k, v: block_topk(q, k, top=-1),
    "gamma": lambda q, k, v: flex_prefill(q, k, gamma=0.0),
    "gamma ": lambda q, k, v: flex_prefill(q, k, gamma=1.1),
    "tau": lambda q, k, v: flex_prefill(q, k, tau=-0.1),
    "min_budget": lambda q, k, v: flex_prefill(q, k, min_budget=0),
    "threshold": lambda q, k, v: x_attention(q, k, threshold=0.0),
    "stride": lambda q, k, v: x_attention(q, k, stride=0),
    "block": lambda q, k, v: x_attention(q, k, stride=8, block=12),
    "gates": lambda q, k, v: duo_attention(q, k, gates=[0.1, 0.2, 0.3]),
    "gates ": lambda q, k, v: duo_attention(q, k, gates=[0.1, 1.2]),
    "far": lambda q, k, v: task_kv(q, k, v, far=1.5),
    "middle": lambda q, k, v: task_kv(q, k, v, middle=-1),
    "projection": lambda q, k, v: task_kv(q, k, v, projection=torch.zeros(3, 3)),
    "segment": lambda q, k, v: entropy_infer(q, k, block=8, segment=12),
    "delta": lambda q, k, v: entropy_infer(q, k, delta=-1.0),
    "active": lambda q, k, v: head_set(q, k, active=[True]),
    "share": lambda q, k, v: random_flags(2, 2, share=2.0, seed=0),
    "heads": lambda q, k, v: Pattern(0),
    "window ": lambda q, k, v: Pattern(2, window=[1, 0]),
    "sinks ": lambda q, k, v: Pattern(2, sinks=1.5),
    "dense_rows": lambda q, k, v: Pattern(2, dense_rows=[1, 2, 3]),
    "columns": lambda q, k, v: Pattern(2, columns=torch.zeros(3, 4, dtype=torch.int64)),
    "slashes": lambda q, k, v: Pattern(2, slashes=torch.tensor([[-2]])),
    "blocks": lambda q, k, v: Pattern(2, blocks=torch.ones(1, 2, 2, dtype=torch.bool), block=8).mask(64),
    "probe_pairs": lambda q, k, v: Pattern(2, probe_pairs=-1.0),
    "active ": lambda q, k, v: mix([True], Pattern(2), Pattern(2)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_option_is_named(name):
    with pytest.raises(InputError) as error:
        BAD[name](*qkv(18, 64))
    assert error.value.what == name.strip()


@rule
def test_nan_batches_and_odd_heads_are_refused(name):
    q, k, v = qkv(19, 64)
    broken = q.clone()
    broken[0, 0, 3, 0] = math.nan
    with pytest.raises(InputError, match="NaN"):
        RULES[name](broken, k, v)
    with pytest.raises(InputError, match="one prompt at a time"):
        RULES[name](q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), v)
    with pytest.raises(InputError, match="divides"):
        RULES[name](q[:, :3], k, v)


@pytest.mark.parametrize("name", ("block-topk", "flexprefill", "xattention", "entropyinfer"))
def test_rules_in_blocks_refuse_a_part_of_the_rows(name):
    q, k, v = qkv(20, 64)
    with pytest.raises(InputError, match="all rows"):
        RULES[name](q[:, :, 10:], k, v)


# ---- as parts of a prefill ----

OPTIONS = {
    "a-shape": {"sinks": 3, "window": 10}, "tri-shape": {"sinks": 3, "window": 10, "last": 12}, "trianglemix": {"window": 10, "last": 12},
    "vertical-slash": {"v": 5, "s": 7, "window": 10, "probe": 16, "last": 3}, "block-topk": {"block": 16, "top": 2},
    "flexprefill": {"gamma": 0.6, "tau": 0.3, "block": 8}, "xattention": {"threshold": 0.6, "stride": 4, "block": 16},
    "duo": {"gates": [[0.2, 0.8, 0.5, 0.4]] * 3, "window": 10}, "taskkv": {"window": 10, "middle": 9, "probe": 16},
    "entropyinfer": {"block": 8, "segment": 16, "base": 16, "dense_until": 20}, "head-set": {"active": [(0, 1), (1, 2), (2, 3)], "window": 10},
    "random-heads": {"share": 0.5, "window": 10, "last": 9}, "dense": {},
}
part = pytest.mark.parametrize("name", OPTIONS)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": 60}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, initializer_range=0.3)).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 60, (1, 90), generator=torch.Generator().manual_seed(1))


class _Run:
    """What a part needs of a run."""

    layers = 3

    def __init__(self):
        self.state, self.charged = {}, []

    def charge(self, layer, *, pairs=0.0, probe=0.0):
        self.charged.append((layer, pairs, probe))


def masked_attention(q, k, v, mask, scaling):
    group = q.shape[1] // k.shape[1]
    scores = (q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3)) * scaling
    return (scores.masked_fill(~mask, -math.inf).softmax(-1) @ v.double().repeat_interleave(group, 1)).float()


def test_every_rule_of_the_table_is_registered():
    known = {
        "dense", "a-shape", "tri-shape", "trianglemix", "vertical-slash", "block-topk", "flexprefill", "xattention", "duo", "entropyinfer", "taskkv",
        "random-heads", "head-set",
    }
    assert known <= set(PARTS["attention"])
    assert known == set(OPTIONS)


@part
@pytest.mark.parametrize("rows", (64, 75))
def test_the_kernel_gives_the_output_of_masked_dense_attention_and_the_part_charges_its_pattern(name, rows):
    q, k, v = qkv(21, rows)
    rule, run, scaling = get("attention", name, **OPTIONS[name]), _Run(), 0.3
    for layer in (0, 2):
        pattern = rule.pattern(run, layer, q, k, v, scaling)
        mask = pattern.mask(rows)
        out = rule.attend(run, layer, q, k, v, scaling)
        assert torch.allclose(out, masked_attention(q, k, v, mask, scaling), atol=1e-5)
        assert run.charged[-1] == (layer, float(mask.sum()), pattern.probe_pairs)
    assert set(run.state[rule]) == {0, 2}
    assert hash(rule) == hash(get("attention", name, **OPTIONS[name]))


@part
def test_short_prompts_and_half_precision_are_read_with_the_default_sizes(name):
    options = {"duo": {"gates": [[0.9, 0.1]] * 3}}.get(name, {})
    rule = get("attention", name, **options)
    for rows in (1, 2, 17, 63, 64, 65, 130):
        q, k, v = qkv(rows, rows)
        mask = rule.pattern(_Run(), 1, q, k, v, 0.3).mask(rows)
        assert mask.diagonal(dim1=1, dim2=2).all() and mask[:, :, 0].all() and not mask.triu(1).any()
        assert torch.allclose(rule.attend(_Run(), 1, q, k, v, 0.3), masked_attention(q, k, v, mask, 0.3), atol=1e-5)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    mask = rule.pattern(_Run(), 1, q, k, v, 0.3).mask(rows)
    out = rule.attend(_Run(), 1, q, k, v, 0.3)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), masked_attention(q, k, v, mask, 0.3), atol=0.05)


@pytest.mark.parametrize("seed", range(12))
def test_heads_with_different_patterns_are_put_together_right(seed):
    pattern, rows, keys = drawn(seed)
    # Key heads shared by groups that the pattern may split.
    pattern = pattern.select([h % pattern.heads for h in range(HEADS)])
    for name in ("columns", "slashes"):
        table = getattr(pattern, name)
        if table is not None:
            object.__setattr__(pattern, name, table.masked_fill(table >= keys, -1))
    q, k, v = qkv(seed, keys)
    q = q[:, :, keys - rows :]
    assert torch.allclose(attend_pattern(pattern, q, k, v, 0.4), masked_attention(q, k, v, pattern.mask(rows, keys), 0.4), atol=1e-5)


def read(model, ids, name, /, **options):
    with torch.no_grad(), attach(model, attention=get("attention", name, **options)) as run:
        return model(ids).logits, run


def test_a_pattern_that_covers_the_prompt_is_the_dense_model(model, ids):
    with torch.no_grad():
        expected = model(ids).logits
    for name, options in (
        ("dense", {}), ("a-shape", {"window": 90}), ("tri-shape", {"last": 90, "window": 4}), ("trianglemix", {"dense_layers": 3}),
        ("vertical-slash", {"v": 90, "s": 90, "window": 4}), ("flexprefill", {"gamma": 1.0, "block": 8}), ("xattention", {"threshold": 1.0}),
        ("block-topk", {"block": 16, "top": 6}), ("duo", {"gates": [[1.0, 1.0]] * 3}), ("taskkv", {"far": 1.0, "model": model}),
        ("head-set", {"active": [(layer, head) for layer in range(3) for head in range(HEADS)]}), ("random-heads", {"share": 1.0}),
        ("entropyinfer", {"dense_until": 90}),
    ):
        logits, run = read(model, ids, name, **options)
        assert torch.allclose(logits, expected, atol=1e-5), name
        assert run.density - sum(run.probe) / run.dense_pairs == pytest.approx(1), name


def test_a_narrow_pattern_changes_the_logits_and_the_density_of_the_run_is_that_of_its_patterns(model, ids):
    with torch.no_grad():
        expected = model(ids).logits
    logits, run = read(model, ids, "a-shape", window=8, sinks=2)
    q = torch.zeros(1, HEADS, 90, 8)
    assert run.density == pytest.approx(a_shape(q, q, sinks=2, window=8).density(90))
    # The first 8 rows see everything they may; row 20 does not.
    assert torch.allclose(logits[:, :8], expected[:, :8], atol=1e-5)
    assert (logits[:, 20] - expected[:, 20]).abs().max() > 1e-3
    _, run = read(model, ids, "vertical-slash", window=8, v=4, s=4, probe=16)
    assert run.probe == [float(HEADS * 16 * 90)] * 3
    assert run.density == pytest.approx((sum(run.pairs) + sum(run.probe)) / (3 * HEADS * 90 * 91 / 2))


def test_head_set_and_random_heads_differ_only_in_the_chosen_heads(model, ids):
    flags = random_flags(3, HEADS, share=0.5, seed=4)
    drawn_heads, run_drawn = read(model, ids, "random-heads", share=0.5, seed=4, window=8)
    given, run_given = read(model, ids, "head-set", active=[tuple(x) for x in flags.nonzero().tolist()], window=8)
    assert torch.equal(drawn_heads, given) and run_drawn.pairs == run_given.pairs


def test_flexprefill_reports_a_prompt_that_it_reads_densely(model, ids):
    rule = get("attention", "flexprefill", block=64)
    with torch.no_grad(), attach(model, attention=rule) as run:
        model(ids)
        assert all(info["dense"] for info in run.state[rule].values())


def test_vertical_slash_table_gives_each_head_its_sizes(model, ids):
    table = torch.tensor([[[1, 8], [2, 7], [3, 6], [9, 0]]] * 3)
    q, k, v = qkv(22, 64)
    pattern = get("attention", "vertical-slash", table=table, window=6).pattern(_Run(), 1, q, k, v, None)
    assert (pattern.columns >= 0).sum(1).tolist() == [1, 2, 3, 9]
    assert (pattern.slashes >= 0).sum(1).tolist() == [8, 7, 6, 0]
    with pytest.raises(InputError, match="fit the table on this model"):
        read(model, ids, "vertical-slash", table=table[:2])


def test_the_offline_search_keeps_the_choice_with_most_mass_measured_by_loops(model, ids):
    choices = ((2, 10), (6, 6), (11, 1))
    fit = fit_vertical_slash(model, ids, choices=choices, sinks=1, window=5, probe=8, rows=90)
    assert fit.table.shape == (3, HEADS, 2) and fit.choices == choices
    for layer in range(3):
        for head in range(HEADS):
            assert tuple(fit.table[layer, head].tolist()) == choices[int(fit.mass[layer, head].argmax())]
    # Layer 0 by hand: its queries and keys come straight from the embeddings.
    captured = {}

    class Look(PARTS["attention"]["dense"]):
        def attend(self, run, layer, q, k, v, scaling):
            captured.setdefault(layer, (q, k))
            return super().attend(run, layer, q, k, v, scaling)

    with torch.no_grad(), attach(model, attention=Look()):
        model(ids)
    q, k = captured[0]
    full = probe_attention(q, k, rows=90)[:, 5:].double()
    for c, (v, s) in enumerate(choices):
        mask = vertical_slash(q, k, v=v, s=s, sinks=1, window=5, probe=8).mask(90)[:, 5:]
        assert torch.allclose(fit.mass[0, :, c].double(), (full * mask).sum((1, 2)) / 85, atol=1e-4)
    # Several prompts: the mean of their masses.
    other = ids.flip(1)
    both = fit_vertical_slash(model, [ids, other], choices=choices, sinks=1, window=5, probe=8, rows=90)
    alone = fit_vertical_slash(model, other, choices=choices, sinks=1, window=5, probe=8, rows=90)
    assert torch.allclose(both.mass, (fit.mass + alone.mass) / 2, atol=1e-6)


def test_duo_gates_start_dense_follow_the_sparsity_and_leave_the_weights_alone(model, ids):
    before = {name: p.clone() for name, p in model.named_parameters()}
    first = fit_duo_gates(model, [(ids[0], 10)], steps=1, window=8)
    # All gates at 1 is the dense model, so the first loss is rounding.
    assert first.losses[0] < 1e-8
    assert first.gates.shape == (3, KV) and torch.allclose(first.gates, torch.full((3, KV), 0.98), atol=1e-4)
    fit = fit_duo_gates(model, [(ids[0], 10)], steps=30, lr=0.05, sparsity=10.0, window=8)
    assert (fit.gates == 0).all() and fit.losses[-1] > fit.losses[0]
    fit = fit_duo_gates(model, [(ids[0], 10)], steps=30, lr=0.05, sparsity=0.0, window=8, per="query")
    assert fit.gates.shape == (3, HEADS) and (fit.gates > 0.95).all()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.requires_grad and p.grad is None


def test_duo_training_tells_the_head_that_the_answer_needs():
    """One layer whose head 1 writes nothing: only the gate of head 0 has a reason to stay."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 60}
    small = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, initializer_range=0.5)).eval()
    with torch.no_grad():
        small.model.layers[0].self_attn.o_proj.weight[:, 8:] = 0
    text = torch.randint(0, 60, (60,), generator=torch.Generator().manual_seed(2))
    gates = fit_duo_gates(small, [(text, 20)], steps=60, lr=0.05, sparsity=0.05, sinks=1, window=4).gates[0]
    assert gates[0] > 0.8 and gates[1] == 0


WRONG_PARTS = {
    "window": ("a-shape", {"window": 0}), "sinks": ("tri-shape", {"sinks": -1}), "last": ("tri-shape", {"last": -2}),
    "dense_layers": ("trianglemix", {"dense_layers": -1}), "v": ("vertical-slash", {"v": -1}), "probe": ("vertical-slash", {"probe": 0}),
    "top": ("block-topk", {"top": -1}), "gamma": ("flexprefill", {"gamma": 1.5}), "gamma ": ("flexprefill", {"gamma": 0.0}),
    "tau": ("flexprefill", {"tau": 2.0}), "threshold": ("xattention", {"threshold": 0.0}), "stride": ("xattention", {"stride": 0}),
    "gates": ("duo", {}), "far": ("taskkv", {"far": -0.1}), "segment": ("entropyinfer", {"segment": 0}), "active": ("head-set", {"active": [3]}),
    "share": ("random-heads", {"share": 1.2}), "seed": ("random-heads", {"seed": -1}),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_a_part_refuses_a_wrong_option_when_it_is_made(name):
    kind, options = WRONG_PARTS[name]
    with pytest.raises(InputError) as error:
        get("attention", kind, **options)
    assert error.value.what == name.strip()


def test_parts_and_fits_refuse_what_does_not_fit_the_model(model, ids):
    with pytest.raises(InputError, match="fit the gates on this model"):
        read(model, ids, "duo", gates=[[1.0, 1.0]])
    with pytest.raises(InputError, match="layer 0..2"):
        read(model, ids, "head-set", active=[(3, 0)])
    with pytest.raises(InputError, match="dense_layers"):
        read(model, ids, "trianglemix", dense_layers=4)
    with pytest.raises(InputError, match="choices"):
        fit_vertical_slash(model, ids, choices=[(-1, 3)])
    with pytest.raises(InputError, match="prompts"):
        fit_vertical_slash(model, [])
    with pytest.raises(InputError, match="prompts"):
        fit_duo_gates(model, [(ids[0], 91)])
    with pytest.raises(InputError, match="per"):
        fit_duo_gates(model, [(ids[0], 9)], per="layer")
    with pytest.raises(InputError, match="steps"):
        fit_duo_gates(model, [(ids[0], 9)], steps=0)


def test_dense_heads_use_the_dense_kernel_of_torch():
    q, k, v = qkv(23, 40)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(attend_pattern(dense(q, k), q, k, v, 0.3), expected)
