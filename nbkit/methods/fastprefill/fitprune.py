"""FitPrune's recipe as a peer of the optimiser: one number alpha decides how much attention every layer may lose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbkit.errors import InputError, RunError
from nbkit.methods.fastprefill.schedule import PruneSchedule


def fitprune_counts(
    window_mass: Any, column_mass: Any, alpha: float, *, cost: Any, limit: float, forced: Any = None, floor: int = 1,
) -> tuple[int, ...]:
    """Rows alive in every layer of one prompt when each layer may lose the share ``alpha`` of its attention.

    window_mass, column_mass: (layers, tokens) attention that each token receives in the full model, largest over heads: from the last rows ("cross"),
        and from all rows ("self"). Before layer l the tokens in both bottom lists of layer l - 1 go; a list is the longest run of smallest tokens
        whose mass, with all that went before, stays below alpha times the layer's total.
    cost: object with layer(rows) and scoring(rows). Dropping stops as soon as the rest at the present size meets ``limit``.
    forced: tokens (indices) that are never dropped.
    Raises: InputError for masses of different or wrong shape, or alpha outside [0, 1].
    Source: arXiv 2409.10197; the paper's image tokens are all prompt tokens here.

    >>> class Rows:
    ...     layer, scoring = staticmethod(float), staticmethod(lambda rows: 0.0)
    >>> mass = np.array([[4, 1, 1, 4]] * 3)
    >>> fitprune_counts(mass, mass, 0.1, cost=Rows, limit=0), fitprune_counts(mass, mass, 0.2, cost=Rows, limit=0)
    ((4, 3, 3), (4, 2, 2))
    """
    cross, own = np.asarray(window_mass, dtype=float), np.asarray(column_mass, dtype=float)
    if cross.ndim != 2 or cross.shape != own.shape or not (np.isfinite(cross).all() and np.isfinite(own).all()):
        raise InputError("masses", got=(cross.shape, own.shape), allowed="two finite arrays (layers, tokens)")
    if not 0 <= alpha <= 1:
        raise InputError("alpha", got=alpha, allowed="a share in [0, 1]")
    layers, tokens = cross.shape
    alive = np.ones(tokens, bool)
    fixed = np.zeros(tokens, bool)
    fixed[[] if forced is None else np.asarray(forced)] = True
    counts, spent = [tokens], cost.layer(tokens)
    for layer in range(1, layers):
        rows = int(alive.sum())
        if spent + (layers - layer) * cost.layer(rows) > limit:
            drop = _bottom(cross[layer - 1], alive, alpha) & _bottom(own[layer - 1], alive, alpha) & ~fixed
            spare = rows - floor
            if drop.sum() > spare:
                # At the floor the weakest go first.
                order = np.argsort(np.where(drop, cross[layer - 1], np.inf), kind="stable")
                drop = np.zeros(tokens, bool)
                drop[order[: max(0, spare)]] = True
            alive &= ~drop
            if drop.any():
                spent += cost.scoring(rows)
        counts.append(int(alive.sum()))
        spent += cost.layer(counts[-1])
    return tuple(counts)


def _bottom(mass: np.ndarray, alive: np.ndarray, alpha: float) -> np.ndarray:
    """Alive tokens of smallest mass that may go together with all that went before."""
    order = np.flatnonzero(alive)[np.argsort(mass[alive], kind="stable")]
    lost = mass[~alive].sum() + np.cumsum(mass[order])
    out = np.zeros(len(mass), bool)
    out[order[lost <= alpha * mass.sum() * (1 + 1e-12)]] = True
    return out


def fit_fitprune(
    masses: Sequence[tuple[Any, Any]], *, tau: float, cost: Any, forced: Sequence[Any] | None = None, floor: int = 1, tolerance: float = 0.01,
) -> PruneSchedule:
    """The smallest alpha, by bisection down to ``tolerance``, whose mean counts over calibration prompts cost at most ``tau`` times full prefill.

    masses: (window_mass, column_mass) of every prompt, all of one length. forced: one index array a prompt.
    Raises: InputError for no prompts or prompts of different length; RunError when alpha = 1 still costs too much.

    >>> class Rows:
    ...     layer, scoring = staticmethod(float), staticmethod(lambda rows: 0.0)
    >>> mass = np.tile(np.arange(1.0, 11), (4, 1))
    >>> fit_fitprune([(mass, mass)], tau=0.8, cost=Rows).ratios
    (1.0, 0.7, 0.7, 0.7)
    """
    shapes = {np.shape(a) for pair in masses for a in pair}
    if len(shapes) != 1:
        raise InputError("masses", got=sorted(shapes), allowed="one shape (layers, tokens) for all prompts")
    if not 0 < tau <= 1:
        raise InputError("latency budget", got=tau, allowed="a share of full prefill in (0, 1]")
    layers, tokens = shapes.pop()
    limit = tau * layers * cost.layer(tokens)
    fixed = forced if forced is not None else [None] * len(masses)

    def recipe(alpha: float) -> tuple[PruneSchedule, float]:
        pairs = zip(masses, fixed, strict=True)
        counts = np.array([fitprune_counts(a, b, alpha, cost=cost, limit=limit, forced=f, floor=floor) for (a, b), f in pairs])
        # A mean of falling counts falls, and rounding to whole rows keeps what is executed equal to what is charged.
        rows = np.floor(counts.mean(0) + 0.5).astype(int)
        schedule = PruneSchedule.from_ratios((rows / tokens).tolist(), rule="fitprune", alpha=alpha, tau=tau)
        fees = sum(cost.scoring(int(a)) for a, b in zip(rows[:-1], rows[1:], strict=True) if b < a)
        return schedule, sum(cost.layer(int(n)) for n in rows) + fees

    low, high = 0.0, 1.0
    best, spent = recipe(high)
    if spent > limit:
        raise RunError("FitPrune cannot meet this budget", got=f"{spent / limit * tau:.3f} of full prefill at alpha = 1", allowed=f"<= {tau:g}",
                       hint="a larger latency budget or a smaller floor")
    while high - low > tolerance:
        alpha = (low + high) / 2
        schedule, spent = recipe(alpha)
        if spent <= limit:
            best, high = schedule, alpha
        else:
            low = alpha
    return best
