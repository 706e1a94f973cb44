"""Exact facts about the ams method: allocation, selection and scorers, without a language model.

`test_identity_NN` are the exact identities of the method; 9, 10 and 11 also appear in test_ams_models.py with real caches.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbkit.errors import InputError, UnsupportedModelError
from nbkit.methods.ams import (
    ALLOCATIONS,
    SCORERS,
    QueryWindow,
    SegmentedPolicy,
    credited,
    fixed_segments,
    longest_gap,
    mass,
    overlap,
    pool,
    quotas,
    retained,
    retention_by_place,
    segments,
    wipe_out_rate,
)
from nbkit.methods.ams.scorers import expected_attention, rkv

exact = settings(deadline=None, max_examples=40, derandomize=True, database=None)
seeds = st.integers(0, 10**6)


def draw(seed, *shape, peaks=0.0):
    """Positive float64 rows; ``peaks`` > 0 makes a few slots carry most of the weight, as attention does."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) + 1e-3
    return x * torch.exp(peaks * torch.randn(shape, generator=generator, dtype=torch.float64))


def policy(**changes):
    base = dict(keep=32, sinks=3, recent=5, seg_len=(4, 16), window=8, pool=1, ema=None)
    return SegmentedPolicy(**(base | changes))


def pick(p, scores, evidence, credit=None):
    return p.select(scores, evidence, p.keep, credit)


def slots_of(selection):
    return [set(row.tolist()) for row in selection.index.reshape(-1, selection.index.shape[-1])]


# ---- the identities ----


@exact
@given(seeds, st.integers(1, 60), st.integers(0, 20), st.sampled_from(sorted(ALLOCATIONS)))
def test_identity_01_budget_beyond_length_keeps_every_slot(seed, slots, spare, allocation):
    scores = draw(seed, 2, 3, slots)
    chosen = policy(allocation=allocation).select(scores, scores, slots + spare, None)
    assert torch.equal(chosen.index, torch.arange(slots).expand(2, 3, slots)) and chosen.valid is None


@exact
@given(seeds, st.integers(41, 120), st.sampled_from([1.0, 0.999999]))
def test_identity_02_one_segment_is_plain_top_k_with_the_same_must_keep(seed, slots, delta):
    scores, evidence = draw(seed, 1, 2, slots), draw(seed + 1, 1, 2, slots, peaks=2)
    one = pick(policy(segment_mass=1.0, seg_len=(1, slots)), scores, evidence)
    base = pick(policy(allocation="none"), scores, None)
    assert torch.equal(one.index, base.index)
    for row, held in zip(scores.reshape(-1, slots), slots_of(one), strict=True):
        middle = sorted(range(3, slots - 5), key=lambda t: -row[t].item())[: 32 - 8]
        assert held == {0, 1, 2} | set(range(slots - 5, slots)) | set(middle)


def three_events(p, seed, slots=70, new=25):
    """Index sets of three events in a row, with credit carried as the cache does."""
    out, credit, held = [], None, torch.arange(slots).expand(1, 2, slots)
    for event in range(3):
        n = held.shape[-1]
        chosen = pick(p, draw(seed + 10 * event, 1, 2, n), draw(seed + 10 * event + 1, 1, 2, n, peaks=1.5), credit)
        out.append(held.gather(-1, chosen.index))
        credit = None if chosen.credit is None else chosen.credit.gather(-1, chosen.index)
        fresh = torch.arange(slots + event * new, slots + (event + 1) * new).expand(1, 2, new)
        held = torch.cat([out[-1], fresh], -1)
    return out


@exact
@given(seeds, st.floats(0, 1))
def test_identity_03_beta_one_equals_no_credit(seed, decay):
    for a, b in zip(three_events(policy(ema=(decay, 1.0)), seed), three_events(policy(ema=None), seed), strict=True):
        assert torch.equal(a, b)


@exact
@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_identity_04_first_event_does_not_depend_on_credit(seed, decay, beta):
    scores, evidence = draw(seed, 1, 2, 80), draw(seed + 1, 1, 2, 80, peaks=1.5)
    with_credit, without = pick(policy(ema=(decay, beta)), scores, evidence), pick(policy(ema=None), scores, evidence)
    assert torch.equal(with_credit.index, without.index)
    torch.testing.assert_close(with_credit.mass, without.mass, rtol=1e-12, atol=0)


def test_credit_does_change_later_events():
    plain = three_events(policy(ema=None), 5)
    smooth = three_events(policy(ema=(0.9, 0.1)), 5)
    assert torch.equal(plain[0], smooth[0]) and not torch.equal(plain[1], smooth[1])


@exact
@given(seeds, st.integers(1, 150), st.integers(0, 160), st.integers(0, 6), st.floats(0.02, 1))
def test_identity_05_quotas_sum_to_the_budget_within_floor_and_length(seed, slots, keep, floor, delta):
    m = mass(draw(seed, 3, slots, peaks=3))
    cut = segments(m, delta, (2, 24))
    q = quotas(m, cut, keep, floor)
    want = min(keep, slots)
    assert q.sum(-1).tolist() == [want] * 3
    assert bool(((q >= 0) & (q <= cut.lengths)).all())
    low = cut.lengths.clamp_max(floor)
    for row in range(3):
        if int(low[row].sum()) <= want:
            assert bool((q[row] >= low[row]).all())
        else:
            assert bool((q[row] <= low[row]).all())


@exact
@given(seeds, st.integers(20, 120), st.integers(0, 100), st.integers(0, 4), st.floats(1.01, 50))
def test_identity_05_quota_never_falls_when_its_own_mass_grows(seed, slots, keep, floor, factor):
    m = draw(seed, slots, peaks=2)
    cut = segments(m, 0.12, (2, 24))
    before = quotas(m, cut, keep, floor)
    for s in range(int(cut.counts)):
        grown = torch.where(cut.ids == s, m * factor, m)
        assert int(quotas(grown, cut, keep, floor)[s]) >= int(before[s])


@exact
@given(seeds, st.integers(1, 300), st.floats(0.01, 1), st.integers(1, 20), st.integers(0, 40), st.sampled_from([0.0, 1.0, 4.0]))
def test_identity_06_segments_tile_and_respect_both_lengths(seed, slots, delta, shortest, extra, peaks):
    longest = 2 * shortest + extra
    cut = segments(draw(seed, 2, slots, peaks=peaks), delta, (shortest, longest))
    for row in range(2):
        bounds = cut.bounds(row)
        assert bounds[0][0] == 0 and bounds[-1][1] == slots
        assert all(a[1] == b[0] for a, b in zip(bounds[:-1], bounds[1:], strict=True))
        assert cut.ids[row].tolist() == [i for i, (a, b) in enumerate(bounds) for _ in range(a, b)]
        assert max(b - a for a, b in bounds) <= longest
        if slots >= shortest:
            assert min(b - a for a, b in bounds) >= shortest


@exact
@given(seeds, st.integers(2, 200), st.sampled_from([0.02, 0.1, 0.3]))
def test_cuts_stand_where_the_running_mass_reaches_each_step(seed, slots, delta):
    m = draw(seed, slots, peaks=1)
    total, cuts = m.sum().item(), set()
    for k in range(1, math.ceil(1 / delta - 1e-9)):
        running = 0.0
        for t in range(slots):
            running += m[t].item()
            if running >= k * delta * total:
                cuts.add(min(max(t, 1), slots - 1))
                break
    assert [a for a, _ in segments(m, delta, (1, slots)).bounds()] == [0, *sorted(cuts)]


@exact
@given(seeds, st.integers(2, 150), st.sampled_from([1e-3, 0.37, 2.0, 1e4]))
def test_identity_07_scale_of_the_evidence_does_not_matter(seed, slots, a):
    u = draw(seed, 2, slots, peaks=1)
    cut, scaled = segments(mass(u), 0.1, (2, 30)), segments(mass(a * u), 0.1, (2, 30))
    assert torch.equal(cut.ids, scaled.ids)
    assert torch.equal(quotas(mass(u), cut, slots // 2, 1), quotas(mass(a * u), scaled, slots // 2, 1))
    assert torch.equal(segments(a * u, 0.1, (2, 30)).ids, cut.ids)


@exact
@given(st.integers(40, 400), st.sampled_from([0.05, 0.1, 0.125, 0.2, 0.25, 0.5, 1.0]), st.floats(1e-6, 10))
def test_identity_08_constant_evidence_gives_equal_segments(slots, delta, level):
    lengths = segments(mass(torch.full((slots,), level)), delta, (1, slots)).lengths
    assert len(lengths) == round(1 / delta)
    assert (lengths - slots * delta).abs().max() <= 1 + 1e-9


def test_cuts_that_fall_exactly_on_a_slot_are_not_moved_by_rounding():
    for delta in (0.1, 0.05, 0.025):
        starts = [a for a, _ in segments(torch.ones(1000), delta, (1, 1000)).bounds()]
        assert starts == [0] + [round(1000 * delta) * k - 1 for k in range(1, round(1 / delta))]


def attend(q, k, v, bias=None):
    logits = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    return torch.softmax(logits if bias is None else logits + bias, -1) @ v.double()


@exact
@given(seeds, st.integers(40, 90))
def test_identity_09_attention_on_the_gathered_cache_is_masked_attention_on_the_full_one(seed, slots):
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 3, 1, 8), torch.randn(2, 3, slots, 8), torch.randn(2, 3, slots, 8)
    index = pick(policy(), draw(seed, 2, 3, slots), draw(seed + 1, 2, 3, slots, peaks=1)).index
    bias = torch.full((2, 3, 1, slots), -torch.inf).scatter(-1, index[:, :, None], 0.0)
    rows = index[..., None].expand(-1, -1, -1, 8)
    torch.testing.assert_close(attend(q, k.gather(2, rows), v.gather(2, rows)), attend(q, k, v, bias), atol=1e-5, rtol=0)


@exact
@given(seeds)
def test_identity_10_output_does_not_depend_on_the_order_of_kept_entries(seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    order = torch.randperm(30)
    torch.testing.assert_close(attend(q, k[:, :, order], v[:, :, order]), attend(q, k, v), atol=1e-9, rtol=0)


@exact
@given(seeds, st.integers(10, 120), st.integers(4, 100), st.sampled_from(sorted(set(ALLOCATIONS) - {"head"})), st.sampled_from(["paper", "released"]))
def test_identity_12_kept_slots_increase_and_are_exactly_the_budget(seed, slots, keep, allocation, order):
    if order == "released":
        allocation = allocation if allocation in ("mass", "length", "fixed") else "mass"
        keep += 12  # fewer entries than segments is an error there
    p = policy(allocation=allocation, order=order, keep=keep, segment_mass=0.25, fixed_len=40)
    chosen = pick(p, draw(seed, 2, 2, slots), draw(seed + 1, 2, 2, slots, peaks=2))
    assert chosen.index.shape == (2, 2, min(keep, slots))
    assert bool((chosen.index.diff(dim=-1) > 0).all())
    assert 0 <= int(chosen.index.min()) and int(chosen.index.max()) < slots


@exact
@given(seeds, st.integers(60, 200), st.integers(1, 3), st.sampled_from(["mass", "length", "fixed"]), st.booleans())
def test_identity_13_every_segment_keeps_its_floor_in_the_final_set(seed, slots, floor, allocation, recent_in_mass):
    # Scores that love the beginning: plain top-k would leave the other segments empty.
    scores = -torch.arange(slots, dtype=torch.float64).expand(1, 2, slots) + draw(seed, 1, 2, slots)
    p = policy(keep=60, min_keep=floor, allocation=allocation, recent_in_mass=recent_in_mass, segment_mass=0.2, seg_len=(4, 32), fixed_len=32)
    chosen = pick(p, scores, draw(seed + 1, 1, 2, slots, peaks=4))
    if slots <= 60:
        return
    start, end = chosen.middle
    assert (start, end) == (3, slots - 5)
    for head, held in enumerate(slots_of(chosen)):
        assert set(range(start)) | set(range(end, slots)) <= held
        for (a, b), q in zip(chosen.segments.bounds(0, head), chosen.quota[0, head].tolist(), strict=False):
            kept = sum(start + t in held for t in range(a, b))
            assert kept == q and kept >= min(floor, b - a)
            best = sorted(range(a, b), key=lambda t, h=head: -scores[0, h, start + t].item())[:q]
            assert {start + t for t in best} == {t for t in held if start + a <= t < start + b}


@exact
@given(seeds, st.integers(30, 120), st.integers(1, 5), st.data())
def test_identity_14_floors_that_use_the_budget_make_quotas_independent_of_mass(seed, slots, floor, data):
    cut = segments(draw(seed, slots, peaks=2), 0.1, (5, 20))
    keep = data.draw(st.integers(0, floor * int(cut.counts)))
    a, b = (quotas(draw(s, slots, peaks=3), cut, keep, floor) for s in (seed + 1, seed + 2))
    assert torch.equal(a, b)
    assert int(a.max()) - int(a.min()) <= 1


# ---- allocation: the parts ----


def test_mass_is_a_distribution_and_ignores_negative_evidence():
    m = mass(torch.tensor([[-5.0, 1.0, 3.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(m, torch.tensor([[0.0, 0.25, 0.75], [1 / 3] * 3], dtype=torch.float64), atol=1e-11, rtol=0)
    with pytest.raises(InputError, match="NaN"):
        mass(torch.tensor([1.0, float("nan")]))


def test_pool_averages_with_zeros_outside():
    x = torch.tensor([5.0, 0, 0, 10.0, 0, 0, 0])
    naive = [sum(x[j].item() for j in range(i - 2, i + 3) if 0 <= j < 7) / 5 for i in range(7)]
    torch.testing.assert_close(pool(x, 5), torch.tensor(naive))
    assert torch.equal(pool(x, 1), x)
    for kernel in (0, 2, -3):
        with pytest.raises(InputError, match="odd"):
            pool(x, kernel)


def test_credit_follows_its_formula():
    current, credit = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.1, 0.0]).double()
    used, new = credited(current, credit, (0.8, 0.7))
    want_new = 0.8 * torch.tensor([0.1, 0.0, 0.0]).double() + 0.2 * current
    torch.testing.assert_close(new, want_new)
    torch.testing.assert_close(used, 0.7 * current + 0.3 * want_new / want_new.sum())


def chop_and_merge(m, delta, shortest, longest):
    """The released segmentation in loops: chops of exactly ``longest``, then short pieces swallow their right neighbours."""
    running, cuts = np.cumsum(m), set()
    for k in range(1, math.ceil(1 / delta - 1e-9)):
        cuts.add(int(np.clip(np.argmax(running >= k * delta * running[-1] * (1 - 1e-12)), 1, len(m) - 1)))
    edges = [0, *sorted(cuts), len(m)]
    pieces = []
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        pieces += [min(longest, b - s) for s in range(a, b, longest)]
    out, size = [], 0
    for piece in pieces:
        size += piece
        if size >= shortest:
            out.append(size)
            size = 0
    return out + [size] if size else out


@exact
@given(seeds, st.integers(2, 200), st.sampled_from([0.05, 0.11, 0.5, 1.0]), st.integers(1, 12), st.integers(0, 30))
def test_released_segments_equal_chop_and_merge(seed, slots, delta, shortest, extra):
    m = draw(seed, slots, peaks=2)
    got = segments(m, delta, (shortest, shortest + extra), order="released").lengths.tolist()
    assert got == chop_and_merge(m.numpy(), delta, shortest, shortest + extra)


def test_released_segments_leave_a_remainder_where_the_paper_splits_evenly():
    m = torch.ones(100)
    assert segments(m, 1.0, (1, 30), order="released").lengths.tolist() == [30, 30, 30, 10]
    assert segments(m, 1.0, (1, 30)).lengths.tolist() == [25, 25, 25, 25]
    # A short last piece stays short, a merged one may be too long; the paper's order does neither.
    assert segments(m, 1.0, (20, 30), order="released").lengths.tolist() == [30, 30, 30, 10]
    assert segments(torch.ones(65), 1.0, (20, 30)).lengths.tolist() == [22, 22, 21]
    two = torch.cat([torch.full((5,), 10.0), torch.ones(55)])
    assert segments(two, 0.45, (10, 30), order="released").lengths.max() > 30
    assert segments(two, 0.45, (10, 30)).lengths.max() <= 30


def test_fixed_segments_ignore_mass():
    assert fixed_segments(torch.Size([2, 10]), 4).lengths.tolist() == [[4, 4, 2]] * 2


def test_more_segments_than_budget_spreads_single_entries():
    cut = segments(torch.ones(100), 0.1, (1, 100))
    q = quotas(draw(0, 100, peaks=4), cut, 4, 1)
    assert int(q.sum()) == 4 and int(q.max()) == 1
    chosen = q.nonzero().flatten()
    assert int(chosen.diff().max()) <= 3 and int(chosen.diff().min()) >= 2


def test_pitfall_3_more_segments_than_budget_in_released_order_is_an_error_not_an_endless_loop():
    cut = segments(torch.ones(100), 0.1, (1, 100))
    with pytest.raises(InputError, match="10 segments"):
        quotas(torch.ones(100), cut, 9, 1, order="released")
    assert quotas(torch.ones(100), cut, 10, 3, order="released").tolist() == [1] * 10


@exact
@given(seeds, st.integers(10, 100), st.integers(0, 5), st.integers(2, 9), st.data())
def test_released_quotas_fit_the_budget(seed, slots, floor, pieces, data):
    m = draw(seed, slots, peaks=2)
    cut = segments(m, 1 / pieces, (2, slots), order="released")
    keep = data.draw(st.integers(int(cut.counts), slots))
    q = quotas(m, cut, keep, floor, order="released")
    assert int(q.sum()) == keep and bool((q <= cut.lengths).all()) and bool((q >= cut.lengths.clamp_max(min(floor, 1))).all())


GOLDEN = dict(keep=64, sinks=4, recent=32, segment_mass=0.1, seg_len=(1, 256), min_keep=1, ema=None, window=32, pool=1)


def golden_event(order, scores):
    p = SegmentedPolicy(order=order, **GOLDEN)
    return p.select(scores.expand(1, 1, 256), torch.ones(1, 1, 256), 64)


def kept_per_segment(chosen):
    start = chosen.middle[0]
    index = chosen.index[0, 0]
    return [int(((index >= start + a) & (index < start + b)).sum()) for a, b in chosen.segments.bounds(0, 0)]


def test_pitfall_1_released_order_empties_segments_that_had_a_quota():
    scores = -torch.arange(256.0) // 26
    scores[:26] += torch.arange(26) / 26
    scores[0] = 300.0  # one sink is a candidate by itself, the other three come on top of the quota
    scores[210] = 200.0
    chosen = golden_event("released", scores)
    assert chosen.quota[0, 0].tolist() == [7, 7, 7, 7, 6, 6, 6, 6, 6, 6]
    assert kept_per_segment(chosen) == [10, 7, 7, 7, 0, 0, 0, 0, 7, 26]
    # A score that simply falls with position: four segments end empty or below their quota too.
    falling = golden_event("released", -torch.arange(256.0))
    assert kept_per_segment(falling) == [7, 7, 7, 7, 4, 0, 0, 0, 6, 26]
    for s in (scores, -torch.arange(256.0)):
        paper = golden_event("paper", s)
        assert kept_per_segment(paper) == paper.quota[0, 0].tolist() and min(kept_per_segment(paper)) >= 2


@pytest.mark.parametrize("keep, sinks_left", [(32, 0), (20, 0), (34, 2)])
def test_pitfall_4_released_order_loses_the_sinks_first(keep, sinks_left):
    p = SegmentedPolicy(**(GOLDEN | dict(order="released", keep=keep)))
    held = slots_of(p.select(-torch.arange(256.0).expand(1, 1, 256), torch.ones(1, 1, 256), keep))[0]
    assert len(held & set(range(4))) == sinks_left
    assert held - set(range(4)) == set(range(256 - min(32, keep), 256))


@pytest.mark.parametrize("allocation", sorted(ALLOCATIONS))
@pytest.mark.parametrize("keep", [4, 5, 10, 20])
def test_budget_below_must_keep_shrinks_the_recent_suffix_and_keeps_the_sinks(allocation, keep):
    p = SegmentedPolicy(keep=keep, sinks=3, recent=17, allocation=allocation, ema=None)
    held = slots_of(p.select(draw(0, 1, 2, 50), draw(1, 1, 2, 50), keep))
    assert held == [{0, 1, 2} | set(range(50 - (keep - 3), 50))] * 2


def test_recent_in_mass_gives_the_window_the_highest_evidence():
    evidence = draw(3, 1, 2, 60)
    on = pick(policy(recent_in_mass=True, sinks=0, recent=0), evidence, evidence).mass
    u = evidence.clone()
    u[..., 52:] = u[..., :52].amax(-1, keepdim=True)
    torch.testing.assert_close(on, u / u.sum(-1, keepdim=True))
    off = pick(policy(sinks=0, recent=0), evidence, evidence).mass
    torch.testing.assert_close(off, evidence / evidence.sum(-1, keepdim=True))


def test_allocation_length_ignores_mass_where_allocation_mass_follows_it():
    evidence = torch.cat([torch.full((30,), 9.0), torch.ones(50)]).expand(1, 1, 80)
    by_length = pick(policy(allocation="length", sinks=0, recent=0, keep=20, seg_len=(4, 40), min_keep=0), evidence, evidence)
    assert float((by_length.quota - by_length.segments.lengths / 4).abs().max()) < 1
    by_mass = pick(policy(sinks=0, recent=0, keep=20, seg_len=(4, 40), min_keep=0), evidence, evidence)
    assert float((by_mass.quota / by_mass.segments.lengths).max()) > 0.5


def test_ties_go_to_the_older_slot():
    assert slots_of(pick(policy(allocation="none", keep=12), torch.zeros(1, 1, 50), None)) == [{0, 1, 2, 3, 4, 5, 6, 45, 46, 47, 48, 49}]


@exact
@given(seeds, st.integers(40, 120), st.integers(1, 12))
def test_chunkkv_keeps_whole_chunks_shared_by_heads(seed, slots, chunk):
    scores = draw(seed, 2, 3, slots)
    p = policy(allocation="chunk", chunk_len=chunk)
    chosen = p.select(scores, None, 32)
    for row in range(2):
        held = [set(h.tolist()) for h in chosen.index[row]]
        assert held[0] == held[1] == held[2] and len(held[0]) == 32
        pieces = [list(range(a, min(a + chunk, slots - 5))) for a in range(3, slots - 5, chunk)]
        shared = scores[row].mean(0)
        left, want = 32 - 8, set(range(3)) | set(range(slots - 5, slots))
        for piece in sorted(pieces, key=lambda c: -shared[c].mean().item()):
            take = min(left, len(piece))
            want |= set(sorted(piece, key=lambda t: -shared[t].item())[:take])
            left -= take
        assert held[0] == want
        assert sum(0 < len(set(c) & held[0]) < len(c) for c in pieces) <= 1


@exact
@given(seeds, st.integers(40, 100), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_adakv_shares_one_budget_among_heads_with_a_floor(seed, slots, floor):
    scores = draw(seed, 2, 3, slots, peaks=2) * torch.tensor([1.0, 3.0, 30.0])[:, None]
    chosen = policy(allocation="head", head_floor=floor).select(scores, None, 32)
    budget = 24
    for row in range(2):
        held = [{int(t) for t, ok in zip(i, v, strict=True) if ok} for i, v in zip(chosen.index[row], chosen.valid[row], strict=True)]
        assert sum(map(len, held)) == 3 * 32
        must, middle = {0, 1, 2} | set(range(slots - 5, slots)), range(3, slots - 5)
        safe = [set(sorted(middle, key=lambda t, h=h: -scores[row, h, t].item())[: int(floor * budget)]) for h in range(3)]
        rest = sorted(((h, t) for h in range(3) for t in middle if t not in safe[h]), key=lambda x: -scores[row, x[0], x[1]].item())
        want = [must | safe[h] for h in range(3)]
        for h, t in rest[: 3 * (budget - int(floor * budget))]:
            want[h] |= {t}
        assert held == want
    # Real entries increase, and a head's last entries are real whatever its padding.
    assert bool(chosen.valid[..., -5:].all())
    for i, v in zip(chosen.index.reshape(6, -1), chosen.valid.reshape(6, -1), strict=True):
        assert bool((i[v].diff() > 0).all())


def test_adakv_never_revives_padding():
    scores = draw(0, 1, 2, 60)
    alive = torch.ones(1, 2, 60, dtype=torch.bool)
    alive[0, 0, 3:20] = False
    chosen = policy(allocation="head", head_floor=0.5).select(scores.masked_fill(~alive, -torch.inf), None, 32, None, alive)
    real = alive.gather(-1, chosen.index)
    assert bool(real[chosen.valid].all()) and int(chosen.valid.sum()) == 64


# ---- policy: what keep means, and what is refused ----


def test_keep_as_tokens_share_and_bytes():
    assert policy(keep=40).tokens(1000, 64) == 40
    assert policy(keep=0.25).tokens(1001, 64) == 250
    assert policy(keep="6 KiB").tokens(1000, 64) == 96
    assert policy(keep="6200B").tokens(1000, 64) == 96
    assert policy(keep="0.5 MiB").tokens(1000, 2048) == 256
    for keep in (0.003, "128 B"):
        with pytest.raises(InputError, match="sinks"):
            policy(keep=keep).tokens(1000, 64)


@pytest.mark.parametrize(
    "bad, says",
    [
        (dict(scorer="tovva"), "scorer: got tovva, allowed .*tova.*keydiff"),
        (dict(allocation="even"), "allocation"),
        (dict(order="code"), "order"),
        (dict(order="released", allocation="chunk"), "released"),
        (dict(keep=3), "keep: got 3, allowed > 3"),
        (dict(keep=0), "keep"),
        (dict(keep=-5), "keep"),
        (dict(keep=True), "keep"),
        (dict(keep=None), "keep"),
        (dict(keep=0.0), "keep"),
        (dict(keep=1.5), "share"),
        (dict(keep=float("nan")), "keep"),
        (dict(keep="12 bananas"), "KiB"),
        (dict(interval=0), "interval"),
        (dict(min_keep=-1), "min_keep"),
        (dict(sinks=-1), "sinks"),
        (dict(recent=-1), "recent"),
        (dict(window=0), "window"),
        (dict(fixed_len=0), "fixed_len"),
        (dict(chunk_len=0), "chunk_len"),
        (dict(pool=4), "pool"),
        (dict(ema=(0.9, 1.1)), "ema"),
        (dict(ema=(float("nan"), 0.5)), "ema"),
        (dict(head_floor=1.5), "head_floor"),
        (dict(segment_mass=0.0), "segment_mass"),
        (dict(segment_mass=1.1), "segment_mass"),
        (dict(seg_len=(8, 4)), "seg_len"),
        (dict(seg_len=(0, 4)), "seg_len"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(bad, says):
    with pytest.raises(InputError, match=says):
        policy(**bad)


def test_bad_rows_are_refused():
    with pytest.raises(InputError, match="negative or NaN"):
        segments(torch.tensor([1.0, float("nan")]))
    with pytest.raises(InputError, match="negative or NaN"):
        segments(torch.tensor([1.0, -1.0]))
    with pytest.raises(InputError, match="at least one slot"):
        segments(torch.ones(0))
    with pytest.raises(InputError, match="order"):
        segments(torch.ones(4), order="code")
    cut = segments(torch.ones(40))
    with pytest.raises(InputError, match="shape that was segmented"):
        quotas(torch.ones(39), cut, 4)
    for keep, floor in ((-1, 1), (4, -1)):
        with pytest.raises(InputError, match=">= 0"):
            quotas(torch.ones(40), cut, keep, floor)


def test_nan_scores_and_wrong_shapes_name_the_scorer():
    keys = torch.randn(1, 2, 10, 4)

    def lost(keys, values, queries, positions):
        return torch.full(keys.shape[:-1], float("nan"))

    def narrow(keys, values, queries, positions):
        return keys[:, :1, :, 0]

    with pytest.raises(InputError, match="scorer lost: got NaN scores"):
        policy(scorer=lost).score(keys, keys, None, None)
    with pytest.raises(InputError, match="scorer narrow: got shape"):
        policy(scorer=narrow).score(keys, keys, None, None)
    keys[0, 1, 3, 2] = float("nan")
    with pytest.raises(InputError, match="scorer knorm: got NaN"):
        policy(scorer="knorm").score(keys, keys, None, None)


# ---- scorers against loops ----

B, KV, G, T, D, W = 2, 2, 3, 23, 8, 11
START = 40


def rotation(position, dim=D):
    """The rotation matrix of one position, half-split convention, written out."""
    r = np.zeros((dim, dim))
    for i in range(dim // 2):
        angle = position / 100.0 ** (2 * i / dim)
        j = i + dim // 2
        r[i, i] = r[j, j] = math.cos(angle)
        r[i, j], r[j, i] = -math.sin(angle), math.sin(angle)
    return r


def rotary(positions, scale=1.0):
    angle = positions[:, None].double() / 100.0 ** (torch.arange(0, D, 2) / D).double()
    angle = torch.cat([angle, angle], -1)
    return (scale * angle.cos()).float(), (scale * angle.sin()).float()


@pytest.fixture(scope="module")
def scene():
    torch.manual_seed(1)
    keys, values = torch.randn(B, KV, T, D), torch.randn(B, KV, T, D)
    # Slots are what survived: their positions have gaps, the last W of them are the window itself.
    old = torch.stack([torch.randperm(START)[: T - W].sort().values for _ in range(B * KV)]).reshape(B, KV, -1)
    recent = torch.arange(START, START + W)
    positions = torch.cat([old, recent.expand(B, KV, W)], -1)
    queries = QueryWindow(torch.randn(B, KV * G, W, D), recent, D**-0.5, rotary)
    return keys, values, queries, positions


def naive_attention(keys, queries, positions, take):
    """(batch, query head, query, slot) causal attention in loops over everything but the head dimension."""
    out = np.zeros((B, KV * G, take, T))
    for b in range(B):
        for h in range(KV * G):
            for w in range(take):
                at = len(queries.positions) - take + w
                logit = [
                    float(queries.states[b, h, at] @ keys[b, h // G, t]) * queries.scaling
                    if positions[b, h // G, t] <= queries.positions[at] else -math.inf
                    for t in range(T)
                ]
                top = max(logit)
                weight = [math.exp(x - top) for x in logit]
                out[b, h, w] = np.array(weight) / sum(weight)
    return out


def close(got, want):
    np.testing.assert_allclose(got.double().numpy(), want, atol=2e-6, rtol=1e-5)


def test_scorer_tova(scene):
    keys, values, queries, positions = scene
    last = naive_attention(keys, queries, positions, 1)[:, :, 0].mean(1)
    close(SCORERS["tova"](*scene), np.stack([last] * KV, 1))


@pytest.mark.parametrize("name, kernel", [("snapkv", 5), ("rpc", 7)])
def test_scorer_window_mean_with_pooling(scene, name, kernel):
    keys, values, queries, positions = scene
    mean = naive_attention(keys, queries, positions, W).mean(2).reshape(B, KV, G, T).mean(2)
    want = np.zeros_like(mean)
    for t in range(T):
        want[..., t] = mean[..., max(0, t - kernel // 2) : t + kernel // 2 + 1].sum(-1) / kernel
    close(SCORERS[name](*scene), want)


@pytest.mark.parametrize("name", ["snapkv", "rpc"])
def test_scorer_window_is_the_last_32_queries(name):
    torch.manual_seed(0)
    keys = torch.randn(1, 1, 50, D)
    states = torch.randn(1, 1, 45, D)
    at = torch.arange(50).expand(1, 1, 50)
    full = QueryWindow(states, torch.arange(5, 50), 1.0)
    cut = QueryWindow(states[:, :, -32:], torch.arange(18, 50), 1.0)
    assert torch.equal(SCORERS[name](keys, keys, full, at), SCORERS[name](keys, keys, cut, at))


def test_scorer_keydiff(scene):
    keys = scene[0].double()
    want = np.zeros((B, KV, T))
    for b in range(B):
        for h in range(KV):
            anchor = sum(k / k.norm() for k in keys[b, h]) / T
            want[b, h] = [-float(k @ anchor / (k.norm() * anchor.norm())) for k in keys[b, h]]
    close(SCORERS["keydiff"](*scene), want)


def test_scorer_knorm(scene):
    close(SCORERS["knorm"](*scene), np.array([[[-math.sqrt(sum(float(x) ** 2 for x in k)) for k in h] for h in b] for b in scene[0]]))


def test_scorer_streaming_prefers_the_recent(scene):
    assert torch.equal(SCORERS["streaming"](*scene), scene[3].float())


@pytest.mark.parametrize("scale", [1.0, 1.3], ids=["plain", "scaled-rotary"])
def test_scorer_expected_attention_equals_explicit_rotation_and_covariance(scene, scale):
    """``scale``: YaRN-like models multiply cos and sin by a constant, which must not be applied twice to a query."""
    keys, values, queries, positions = scene
    horizon, eps = 16, 0.02
    here = queries.positions.tolist()
    r_bar = scale * sum(rotation(here[-1] + i) for i in range(1, horizon + 1)) / horizon
    want = np.zeros((B, KV, T))
    for b in range(B):
        for h in range(KV * G):
            rows = queries.states[b, h].double().numpy()
            plain = np.stack([rotation(p).T @ q / scale for p, q in zip(here, rows, strict=True)])
            mu = plain.mean(0)
            sigma = sum(np.outer(q - mu, q - mu) for q in plain) / len(plain)
            mu, sigma = r_bar @ mu, r_bar @ sigma @ r_bar.T
            k = keys[b, h // G].double().numpy()
            logit = np.array([mu @ x / math.sqrt(D) + x @ sigma @ x / (2 * D) for x in k])
            weight = np.exp(logit - logit.max())
            want[b, h // G] += weight / weight.sum() / G
    want = (want + eps) * values.double().norm(dim=-1).numpy()
    turned = QueryWindow(queries.states, queries.positions, queries.scaling, lambda p: rotary(p, scale))
    close(expected_attention(keys, values, turned, positions, horizon=horizon, eps=eps), want)


def test_scorer_expected_attention_with_partial_rotary(scene):
    keys, values, queries, positions = scene

    def half(positions):
        return tuple(t[:, [0, 1, 4, 5]] for t in rotary(positions))

    got = expected_attention(keys, values, QueryWindow(queries.states, queries.positions, queries.scaling, half), positions)
    assert got.shape == (B, KV, T) and bool(torch.isfinite(got).all())


def test_scorer_expected_attention_needs_a_rotary_model(scene):
    keys, values, queries, positions = scene
    with pytest.raises(UnsupportedModelError, match="rotary"):
        expected_attention(keys, values, QueryWindow(queries.states, queries.positions, 1.0), positions)


@pytest.mark.parametrize("alike", [0.1, 0.5, 2.0])
def test_scorer_rkv(scene, alike):
    keys, values, queries, positions = scene
    window, kernel, mix = 8, 5, 0.3
    old = T - window
    got = rkv(keys, values, queries, positions, window=window, kernel=kernel, mix=mix, alike=alike)
    for b in range(B):
        for h in range(KV):
            k = keys[b, h, :old].double().numpy()
            attention = np.zeros(old)
            for g in range(G):
                for w in range(window):
                    logit = k @ queries.states[b, h * G + g, W - window + w].double().numpy() * queries.scaling
                    weight = np.exp(logit - logit.max())
                    attention += weight / weight.sum() / (G * window)
            important = np.array([attention[max(0, t - 2) : t + 3].max() for t in range(old)])
            unit = [x / np.linalg.norm(x) for x in k]
            cosine = np.array([[0.0 if i == j else unit[i] @ unit[j] for j in range(old)] for i in range(old)])
            for i in range(old):
                similar = [j for j in range(old) if cosine[i, j] > alike]
                if similar:
                    cosine[i, similar[-1]] = 0.0
            mean = cosine.mean(0)
            redundant = np.exp(mean) / np.exp(mean).sum()
            close(got[b, h, :old], mix * important - (1 - mix) * redundant)
    assert float(got[..., old:].min()) > float(got[..., :old].max())


def test_scorer_rkv_spares_the_newest_copy():
    torch.manual_seed(0)
    keys = torch.randn(1, 1, 40, 16)
    keys[0, 0, 20] = keys[0, 0, 10] = keys[0, 0, 3]
    queries = QueryWindow(torch.zeros(1, 1, 8, 16), torch.arange(32, 40), 1.0)
    score = rkv(keys, keys, queries, torch.arange(40).expand(1, 1, 40))
    assert score[0, 0, 20] > score[0, 0, 10] and score[0, 0, 20] > score[0, 0, 3]
    assert torch.equal(rkv(keys[:, :, :8], None, queries, None), torch.ones(1, 1, 8))


def test_scorer_random_is_seeded(scene):
    keys, values, queries, positions = scene
    a, b, c = (SCORERS["random"](keys, values, QueryWindow(queries.states, queries.positions, 1.0, None, s), positions) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c) and a.shape == (B, KV, T)


def test_every_scorer_has_a_test_here_and_returns_one_number_per_slot(scene):
    assert set(SCORERS) == {"tova", "snapkv", "keydiff", "knorm", "random", "streaming", "expected_attention", "rkv", "rpc"}
    for name in SCORERS:
        out = policy(scorer=name).score(*scene)
        assert out.shape == (B, KV, T) and bool(torch.isfinite(out).all())


# ---- measures ----


@exact
@given(seeds, st.integers(32, 100), st.integers(1, 12))
def test_measures_equal_loops(seed, seen, n):
    rng = np.random.default_rng(seed)
    kept = np.stack([np.sort(rng.choice(seen, n, replace=False)) for _ in range(4)]).reshape(2, 2, n)
    kept[0, 0, 0] = -1
    other = np.stack([np.sort(rng.choice(seen, n, replace=False)) for _ in range(4)]).reshape(2, 2, n)
    rate, gap, place = wipe_out_rate(kept, seen, 8), longest_gap(kept, seen), retention_by_place(kept, seen, 5)
    both = overlap(kept, other, seen)
    for at in np.ndindex(2, 2):
        held = set(kept[at].tolist()) - {-1}
        assert {int(t) for t in np.flatnonzero(retained(kept, seen)[at])} == held
        blocks = [any(t in held for t in range(a, a + 8)) for a in range(0, seen - 7, 8)]
        assert rate[at] == pytest.approx(1 - sum(blocks) / len(blocks))
        runs = "".join("x" if t in held else "." for t in range(seen)).split("x")
        assert gap[at] == max(map(len, runs))
        later = set(other[at].tolist())
        assert both[at] == pytest.approx(len(held & later) / len(held | later))
        assert place[at].sum() > 0 or not held
        edges = np.linspace(0, seen, 6).astype(int)
        assert place[at] == pytest.approx([sum(t in held for t in range(a, b)) / (b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)])


def test_wipe_out_needs_one_block():
    with pytest.raises(InputError, match="one block"):
        wipe_out_rate(np.array([1, 2]), seen=10, block=32)
