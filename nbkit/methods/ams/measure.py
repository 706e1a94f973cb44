"""What an eviction did: wiped regions, retention by place, overlap between events.

All functions take kept positions as ``(..., n)`` integers (-1 is padding) and return one value per leading index.
"""

from __future__ import annotations

import numpy as np

from nbkit.errors import InputError


def retained(kept, seen: int) -> np.ndarray:
    """(..., seen) bool: which of the first ``seen`` original positions are still held."""
    kept = np.asarray(kept)
    flat = kept.reshape(-1, kept.shape[-1])
    out = np.zeros((len(flat), seen + 1), dtype=bool)
    np.put_along_axis(out, np.where(flat < 0, seen, flat), True, axis=1)
    return out[:, :seen].reshape(*kept.shape[:-1], seen)


def wipe_out_rate(kept, seen: int, block: int = 32) -> np.ndarray:
    """Share of consecutive blocks of ``block`` positions without a single survivor.

    The paper reports a "region wipe-out rate" without a formula; this is ours. Positions are whatever ``kept`` counts: original ones, or
    current slots for the per-event form.

    >>> float(wipe_out_rate(np.array([0, 1, 70]), seen=128))
    0.5
    """
    if seen < block:
        raise InputError("seen", got=seen, allowed=f">= {block}, one block")
    held = retained(kept, seen)
    whole = held[..., : seen // block * block]
    return 1 - whole.reshape(*whole.shape[:-1], -1, block).any(-1).mean(-1)


def longest_gap(kept, seen: int) -> np.ndarray:
    """Length of the longest run of consecutive evicted positions."""
    held = retained(kept, seen)
    edge = np.concatenate([np.ones((*held.shape[:-1], 1), bool), held, np.ones((*held.shape[:-1], 1), bool)], -1)
    index = np.where(edge, np.arange(edge.shape[-1]), 0)
    previous = np.maximum.accumulate(index, -1)
    return (np.where(edge, index - np.roll(previous, 1, -1) - 1, 0)[..., 1:]).max(-1)


def retention_by_place(kept, seen: int, bins: int = 10) -> np.ndarray:
    """(..., bins) share of positions held in equal bins of relative position, oldest first."""
    held = retained(kept, seen)
    edges = np.linspace(0, seen, bins + 1).astype(int)
    return np.stack([held[..., a:b].mean(-1) for a, b in zip(edges[:-1], edges[1:], strict=True)], -1)


def overlap(earlier, later, seen: int) -> np.ndarray:
    """Intersection over union of the positions held after two events, among the first ``seen`` positions."""
    a, b = retained(earlier, seen), retained(later, seen)
    return (a & b).sum(-1) / (a | b).sum(-1)
