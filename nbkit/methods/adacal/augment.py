"""Which heads get more than the base pattern, and which columns and diagonals they get."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nbkit.errors import InputError

from .config import AdaCalConfig
from .metrics import column_sums, diagonal_sums, probe_attention, reduce_rows, zones

# Of the distractor guard: a head that spreads its mass gains little from single columns.
GUARD_ENTROPY, GUARD_CONCENTRATION = 0.75, 0.3


class Augmentation(NamedTuple):
    """Columns and diagonals added to the base pattern of some heads.

    columns: (heads, v) int64 key positions and slashes: (heads, s) int64 distances, both increasing, -1 where unused; covered: (heads,) share of
    the middle-zone mass of the probe that they cover; curve: (heads, v + s + 1) that share after each step of the greedy order.
    """

    columns: Tensor
    slashes: Tensor
    covered: Tensor
    curve: Tensor


class Choice(NamedTuple):
    """What was decided for the heads of one layer.

    active: (heads,) bool; dense: (heads,) bool, heads whose probe rows stay dense; score: (heads,) reduced middle mass; covered: (heads,) share of
    the middle mass that the added columns and diagonals cover, 0 for heads that were left alone; columns, slashes: as in Augmentation.
    """

    active: Tensor
    dense: Tensor
    score: Tensor
    covered: Tensor
    columns: Tensor
    slashes: Tensor


def augment(
    attention: Tensor, *, sinks: int, window: int, v_cap: int, s_cap: int, kappa: float, slashes_only: Tensor | None = None,
) -> Augmentation:
    """Greedy augmentation: columns and diagonals in the order of their middle-zone mass, until the covered share reaches ``kappa`` or the caps.

    attention: (heads, probe, tokens) of the last rows; slashes_only: (heads,) bool, heads that take no column. A column and a diagonal meet in one
    entry, so the covered mass is the sum of theirs less what they share, without a mask. ``kappa=1`` spends the caps in full.

    >>> a = torch.zeros(1, 1, 9); a[..., 3] = 0.7; a[..., 5] = 0.1; a[..., 8] = 0.2
    >>> augment(a, sinks=1, window=2, v_cap=2, s_cap=0, kappa=0.8).columns
    tensor([[-1,  3]])
    """
    heads, probe, tokens = attention.shape
    mid = attention * zones(probe, tokens, sinks=sinks, window=window, device=attention.device).mid
    whole = mid.sum((-1, -2))
    # Only these can hold a middle entry: columns from the sinks to where the last row's window begins, distances from the window to the sinks.
    count = max(0, tokens - sinks - window)
    v, s = min(v_cap, count), min(s_cap, count)
    columns = column_sums(mid)[:, sinks : sinks + count].topk(v, -1)
    slashes = diagonal_sums(mid)[:, window : window + count].topk(s, -1)
    column, slash = columns.indices + sinks, slashes.indices + window
    usable = torch.ones(heads, v + s, dtype=torch.bool, device=attention.device)
    if slashes_only is not None:
        usable[:, :v] = ~slashes_only[:, None]
    masses = torch.cat([columns.values, slashes.values], 1).masked_fill(~usable, -1.0)
    order = masses.sort(dim=-1, descending=True, stable=True).indices
    rank = order.argsort(-1)
    gain = masses.clamp_min(0).gather(-1, order)
    # An entry on both a chosen column and a chosen diagonal must count once: take it back at the later of the two steps.
    row = column[:, :, None] + slash[:, None, :] - (tokens - probe)
    inside = (row >= 0) & (row < probe)
    at = (row.clamp(0, probe - 1) * tokens + column[:, :, None]).flatten(1)
    shared = mid.flatten(1).gather(1, at).masked_fill(~inside.flatten(1), 0.0)
    later = torch.maximum(rank[:, :v, None], rank[:, v:][:, None, :]).flatten(1)
    shared = shared.masked_fill(~(usable[:, :v, None] & usable[:, v:][:, None, :]).flatten(1), 0.0)
    gain = gain.scatter_add(1, later, -shared)
    share = gain.cumsum(1) / whole.clamp_min(1e-6)[:, None]
    curve = torch.cat([share.new_zeros(heads, 1), share], 1).clamp(0, 1)
    curve = torch.where(whole[:, None] < 1e-6, torch.ones_like(curve), curve)
    steps = rank.new_full((heads, 1), v + s) if kappa >= 1 else (curve < kappa).sum(1, keepdim=True)
    taken = (rank < steps) & usable
    return Augmentation(
        column.masked_fill(~taken[:, :v], -1).sort(-1).values, slash.masked_fill(~taken[:, v:], -1).sort(-1).values,
        curve.gather(1, steps.clamp_max(v + s))[:, 0], curve,
    )


def choose(
    queries: Tensor, keys: Tensor, scaling: float, mass: Tensor, cfg: AdaCalConfig, task: str, *, fallback: bool = False,
    spread: tuple[Tensor, Tensor] | None = None,
) -> Choice:
    """Activate and augment the heads of one layer.

    queries: (heads, probe, head_dim), the rotated probe rows; keys: (kv_heads, tokens, head_dim) up to the last of these rows; mass: (heads, probe)
    middle mass of each row; fallback: whether the best head is activated when none is; spread: entropy and concentration (heads,) each, needed by
    the distractor guard. Only active heads are looked at again. Raises: InputError for NaN.
    """
    if not bool(torch.isfinite(mass).all()):
        raise InputError("queries or keys", got="NaN or infinite attention in the probe", allowed="finite values")
    policy, heads = cfg.policy(task), len(mass)
    score = reduce_rows(mass, policy.reduce)
    # tau = 1 must activate nobody even where rounding puts a mass above 1.
    active = (score > policy.tau) if policy.tau < 1 else torch.zeros_like(score, dtype=torch.bool)
    if fallback and not bool(active.any()):
        active[score.argmax()] = True
    dense = torch.zeros_like(active)
    if policy.dense_top > 0:
        most = max(1, round(policy.dense_top * heads))
        dense[reduce_rows(mass, "max").topk(most).indices] = True
        dense &= active
    v_cap, s_cap = cfg.caps(task)
    chosen = active.nonzero()[:, 0]
    columns = torch.full((heads, 0), -1, dtype=torch.int64, device=mass.device)
    slashes, covered = columns, mass.new_zeros(heads)
    if len(chosen):
        attention = probe_attention(queries[chosen], keys[chosen // (heads // len(keys))], scaling)
        spreads = None
        if cfg.guard and spread is not None:
            spreads = ((spread[0] > GUARD_ENTROPY) & (spread[1] < GUARD_CONCENTRATION))[chosen]
        found = augment(
            attention, sinks=cfg.sinks, window=cfg.window, v_cap=v_cap, s_cap=s_cap, kappa=policy.kappa, slashes_only=spreads,
        )
        columns = _spread_out(found.columns, chosen, heads)
        slashes = _spread_out(found.slashes, chosen, heads)
        covered[chosen] = found.covered.to(covered.dtype)
    return Choice(active, dense, score, covered, columns, slashes)


def _spread_out(index: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Rows of some heads among all heads, without the slots that no head uses."""
    index = index[:, (index >= 0).any(0)]
    out = torch.full((heads, index.shape[1]), -1, dtype=torch.int64, device=index.device)
    out[rows] = index
    return out
