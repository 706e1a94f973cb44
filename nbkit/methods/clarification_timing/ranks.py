"""Rank statistics of the study: agreement of agents (Kendall tau-b with permutation), trend (Page), association (Spearman)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval, bootstrap

from .outcomes import Outcomes, cells, condition_name

FORMS = ("cells", "centred", "gain", "profile")


@dataclass(frozen=True)
class Agreement:
    """Kendall tau-b of two agents, its interval over templates and the p value of the permutation test (None for ``profile``)."""

    a: str
    b: str
    form: str
    tau: Interval
    p: float | None


def kendall_panel(
    table: Outcomes, *, form: str = "cells", coverage: float = 1.0, n_perm: int = 5000, n_boot: int = 1000, seed: int = 0,
) -> list[Agreement]:
    """Agreement of every pair of agents about which variants and timings succeed.

    form: ``cells``, success shares of all (variant, condition) pairs but the sham ones; ``centred``, injected conditions only, minus the mean of each
    variant; ``gain``, injected minus never; ``profile``, means by (dimension, condition), where ``coverage`` < 1 gives every agent its own random
    share of the variants. The permutation test shuffles the variants of one agent within each dimension; the interval resamples templates.
    Raises: InputError for an unknown form, fewer than two agents, agents on different variants, or coverage outside (0, 1] or with another form.
    Source: arXiv 2605.07937 reports tau without saying which; tau-b because 0/1 outcomes tie. The forms are ours.
    """
    if form not in FORMS:
        raise InputError("form", got=form, allowed=", ".join(FORMS))
    if not 0 < coverage <= 1 or (coverage < 1 and form != "profile"):
        raise InputError("coverage", got=coverage, allowed="in (0, 1], below 1 only with form='profile'")
    if len(table.agents) < 2:
        raise InputError("agents", got=len(table.agents), allowed=">= 2")
    counted = [cells(table.where(table["arm"] != "sham"), agent) for agent in table.agents]
    first = counted[0]
    for other in counted[1:]:
        names = [[condition_name(*condition) for condition in one.conditions] for one in (first, other)]
        if names[0] != names[1] or other.variants.tolist() != first.variants.tolist():
            raise InputError("panel", got=f"{first.agent} and {other.agent} on different variants or conditions", allowed="identical ones")
    share = [one.c / one.n for one in counted]
    inject = [i for i, (arm, _) in enumerate(first.conditions) if arm == "inject"]
    if form == "centred":
        share = [s[:, inject] - s[:, inject].mean(1, keepdims=True) for s in share]
    elif form == "gain":
        share = [s[:, inject] - s[:, [first.at("never")]] for s in share]
    rng = np.random.default_rng(seed)
    groups = [np.flatnonzero(first.dimension == d) for d in dict.fromkeys(first.dimension.tolist())]
    if form == "profile":
        return [_profile_agreement(counted, share, pair, groups, coverage, n_boot, rng) for pair in itertools.combinations(range(len(counted)), 2)]
    shuffles = np.tile(np.arange(len(first.variants)), (n_perm, 1))
    for rows in groups:
        shuffles[:, rows] = rng.permuted(np.tile(rows, (n_perm, 1)), axis=1)
    draws = _template_draws(first.template, n_boot, rng)
    out = []
    for i, j in itertools.combinations(range(len(counted)), 2):
        x, y = (_levels(share[at]) for at in (i, j))
        tau = float(_taus(x, y, [np.arange(len(x))], [np.arange(len(x))])[0])
        null = _taus(x, y, [np.arange(len(x))] * n_perm, shuffles)
        p = (np.count_nonzero(np.abs(null) >= abs(tau) - 1e-12) + 1) / (n_perm + 1)
        again = _taus(x, y, draws, draws)
        again = again[np.isfinite(again)]
        low, high = np.quantile(again, [0.025, 0.975]) if len(again) else (math.nan, math.nan)
        interval = Interval(tau, min(low, tau), max(high, tau), n=len(set(first.template.tolist())), method="tau-b, cluster bootstrap")
        out.append(Agreement(counted[i].agent, counted[j].agent, form, interval, float(p)))
    return out


def _profile_agreement(counted: Any, share: Any, pair: Any, groups: Any, coverage: float, n_boot: int, rng: np.random.Generator) -> Agreement:
    """Tau of two profiles; the interval redraws templates and, below full coverage, which variants each agent has."""
    template = counted[0].template
    names = np.unique(template)

    def profiles(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sides: list[list[np.ndarray]] = [[], []]
        for rows in groups:
            pool = np.concatenate([rows[template[rows] == t] for t in drawn])
            for side, at in zip(sides, pair):
                part = pool if coverage == 1 else rng.choice(pool, max(2, round(coverage * len(pool))), replace=False)
                side.append(share[at][part].mean(0))
        return np.concatenate(sides[0]), np.concatenate(sides[1])

    # Below full coverage one split is luck, so the estimate is the mean over splits.
    estimate = float(np.mean([tau_b(*profiles(names)) for _ in range(1 if coverage == 1 else 200)]))
    again = [tau_b(*profiles(rng.choice(names, len(names)))) for _ in range(n_boot)]
    low, high = np.nanquantile(again, [0.025, 0.975])
    method = "tau-b of profiles, cluster bootstrap"
    interval = Interval(estimate, min(low, estimate), max(high, estimate), n=len(names), method=method)
    return Agreement(counted[pair[0]].agent, counted[pair[1]].agent, "profile", interval, None)


def tau_b(x: Any, y: Any) -> float:
    """Kendall tau-b from the table of joint counts: O(m log m + levels^2), NaN when one side is constant.

    >>> tau_b([1, 2, 2, 3], [1, 2, 2, 3]), tau_b([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """
    x, y = _levels(np.asarray(x, float)[:, None]), _levels(np.asarray(y, float)[:, None])
    if x.shape != y.shape:
        raise InputError("x and y", got=f"{len(x)} and {len(y)} values", allowed="the same number")
    rows = [np.arange(len(x))]
    return float(_taus(x, y, rows, rows)[0])


def _levels(values: np.ndarray) -> np.ndarray:
    """Values as small integers in the same order; rounding joins what only differs by the order of additions."""
    return np.unique(values.round(9), return_inverse=True)[1].reshape(values.shape)


def _taus(x: np.ndarray, y: np.ndarray, rows_x: Any, rows_y: Any) -> np.ndarray:
    """tau-b of x[rows_x[i]] and y[rows_y[i]] for every i, from joint counts."""
    nx, ny = int(x.max()) + 1, int(y.max()) + 1
    out = []
    for at in range(0, len(rows_x), 64):
        a, b = np.stack([x[r].ravel() for r in rows_x[at : at + 64]]), np.stack([y[r].ravel() for r in rows_y[at : at + 64]])
        code = (np.arange(len(a))[:, None] * nx + a) * ny + b
        joint = np.bincount(code.ravel(), minlength=len(a) * nx * ny).reshape(len(a), nx, ny).astype(float)
        # Pairs in the same order: each cell times all cells strictly below and to the right of it.
        below = joint[:, ::-1, ::-1].cumsum(1).cumsum(2)[:, ::-1, ::-1]
        concordant = (joint[:, :-1, :-1] * below[:, 1:, 1:]).sum((1, 2))
        mirrored = joint[:, :, ::-1]
        below = mirrored[:, ::-1, ::-1].cumsum(1).cumsum(2)[:, ::-1, ::-1]
        discordant = (mirrored[:, :-1, :-1] * below[:, 1:, 1:]).sum((1, 2))
        m = a.shape[1]
        pairs = m * (m - 1) / 2
        tied_x, tied_y = ((s * (s - 1) / 2).sum(1) for s in (joint.sum(2), joint.sum(1)))
        with np.errstate(invalid="ignore", divide="ignore"):
            out.append((concordant - discordant) / np.sqrt((pairs - tied_x) * (pairs - tied_y)))
    return np.concatenate(out)


def _template_draws(template: np.ndarray, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Row numbers of n resamples of whole templates."""
    members = [np.flatnonzero(template == t) for t in np.unique(template)]
    # Resamples differ in length when templates do; equal lengths are padded by nothing because every template has all its dimensions.
    sizes = {len(m) for m in members}
    if len(sizes) != 1:
        raise InputError("panel", got=f"templates with {sorted(sizes)} variants", allowed="the same number for every template")
    table = np.stack(members)
    return list(table[rng.integers(len(members), size=(n, len(members)))].reshape(n, -1))


@dataclass(frozen=True)
class Trend:
    """Page's L, its standardised value z and the one-sided p value (increasing)."""

    statistic: float
    z: float
    p: float


def page_trend(values: Any) -> Trend:
    """Page's test that the columns increase from left to right, from ranks within rows (ties get mean ranks), normal approximation.

    values: (subjects, conditions in the predicted order). Raises: InputError for fewer than 2 rows or 3 columns.
    Source: Page, JASA 58 (1963).

    >>> page_trend([[1, 2, 3], [1, 2, 3], [1, 3, 2], [1, 2, 3]]).p < 0.01
    True
    """
    values = np.asarray(values, float)
    if values.ndim != 2 or values.shape[0] < 2 or values.shape[1] < 3:
        raise InputError("values", got=f"shape {values.shape}", allowed="at least 2 rows and 3 columns")
    m, n = values.shape
    ranks = np.stack([_ranks(row) for row in values])
    statistic = float(ranks.sum(0) @ np.arange(1, n + 1))
    mean = m * n * (n + 1) ** 2 / 4
    variance = m * n**2 * (n + 1) ** 2 * (n - 1) / 144
    z = (statistic - mean) / math.sqrt(variance)
    return Trend(statistic, z, 0.5 * math.erfc(z / math.sqrt(2)))


def spearman(x: Any, y: Any, cluster: Any = None, *, n: int = 2000, seed: int = 0) -> Interval:
    """Spearman's rank correlation with a bootstrap interval over clusters.

    x, y: (m,). Raises: InputError when shapes differ or a side is constant.

    >>> spearman([1, 2, 3, 4, 5], [1, 2, 3, 5, 4]).estimate
    0.9
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.shape != y.shape or x.ndim != 1 or np.ptp(x) == 0 or np.ptp(y) == 0:
        raise InputError("x and y", got=f"shapes {x.shape} and {y.shape}", allowed="two vectors of one length, neither of them constant")
    interval = bootstrap(np.stack([x, y], 1), _rank_correlation, cluster, n=n, seed=seed)
    return Interval(interval.estimate, interval.low, interval.high, interval.level, interval.n, f"Spearman, {interval.method}")


def _rank_correlation(rows: np.ndarray) -> float:
    a, b = (_ranks(column) for column in rows.T)
    spread = math.sqrt(float(((a - a.mean()) ** 2).sum() * ((b - b.mean()) ** 2).sum()))
    return round(float(((a - a.mean()) * (b - b.mean())).sum()) / spread, 12) if spread else math.nan


def _ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[inverse]
