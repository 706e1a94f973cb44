"""Demand curves: success, value of information and regret by the time of the message, with intervals over templates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval
from nbkit.metrics.intervals import _t_quantile

from .outcomes import Outcomes, cells

QUANTITIES = ("success", "voi", "normalised", "regret")
AGAINST = ("never", "sham")


class Resampling:
    """Bootstrap over clusters with one set of draws for all quantities, so that any two of them can be compared draw by draw.

    cluster: (rows,) labels. The draws are those of `nbkit.metrics.bootstrap` with the same seed; below 20 clusters the interval is widened by the t
    quantile as its method "expanded" does.
    Source: Efron and Tibshirani (1993), ch. 13; Hesterberg, The American Statistician 69 (2015), section 5.

    >>> r = Resampling(np.array([0, 0, 1, 1]), n=500, seed=0)
    >>> r.interval(*r.mean(np.array([1.0, 3.0, 5.0, 7.0]))).estimate
    4.0
    """

    def __init__(self, cluster: np.ndarray, *, n: int = 5000, seed: int = 0, level: float = 0.95):
        labels, first, row = np.unique(cluster, return_index=True, return_inverse=True)
        # Numbered by first appearance, so that names of clusters do not move the draws.
        self._row = np.argsort(np.argsort(first))[row]
        self.clusters, self.level = len(labels), level
        if self.clusters < 2:
            raise InputError("clusters", got=f"{self.clusters}", allowed=">= 2", hint="more templates")
        rng = np.random.default_rng(seed)
        self.weights = rng.multinomial(self.clusters, np.full(self.clusters, 1 / self.clusters), size=n).astype(float)

    def mean(self, values: np.ndarray, rows: np.ndarray | None = None) -> tuple[Any, np.ndarray]:
        """Mean over ``rows`` (a mask) and its value in every resample: (columns,) and (n, columns), or a number and (n,) for one column."""
        values = np.asarray(values, float)
        rows = np.ones(len(values), bool) if rows is None else rows
        sums = np.zeros((self.clusters, *values.shape[1:]))
        np.add.at(sums, self._row[rows], values[rows])
        sizes = np.bincount(self._row[rows], minlength=self.clusters).astype(float)
        with np.errstate(invalid="ignore"):
            draws = self.weights @ sums / (self.weights @ sizes).reshape(-1, *([1] * (values.ndim - 1)))
        return values[rows].mean(0), draws

    def interval(self, estimate: float, draws: np.ndarray, name: str = "cluster bootstrap") -> Interval:
        """Percentile interval of the draws; expanded below 20 clusters.

        Raises: InputError when more than 5 % of the draws are not finite.
        """
        finite = draws[np.isfinite(draws)]
        if len(finite) < 0.95 * len(draws):
            raise InputError("resamples", got=f"{len(draws) - len(finite)} of {len(draws)} without a finite value", allowed="at most 5 %")
        tail = (1 - self.level) / 2
        if self.clusters < 20:
            g = self.clusters
            tail = NormalDist().cdf(-math.sqrt(g / (g - 1)) * _t_quantile(1 - tail, g - 1))
            name += " (expanded)"
        low, high = np.quantile(finite, [tail, 1 - tail])
        return Interval(estimate, low, high, self.level, self.clusters, name)


@dataclass(frozen=True)
class DemandCurve:
    """Success by time of the message for every agent and dimension.

    Attributes:
        rows: dicts with agent, dimension, fraction, the intervals ``success``, ``voi``, ``normalised`` (None where the gain of the oracle is not
            above zero with its interval) and ``regret``, the share ``delivered``, the minimum detectable difference ``mde`` of ``voi`` at 80 %
            power, the p value ``p`` of a sign-flip test of ``voi`` over clusters and ``p_holm``, corrected over all dimensions and timings of an
            agent.
        levels: dicts with agent, dimension and the intervals ``oracle``, ``never`` and ``gain`` (oracle - never).
        timings: fractions.
    """

    rows: list[dict[str, Any]]
    levels: list[dict[str, Any]]
    timings: tuple[float, ...]
    k: int
    against: str
    _draws: dict[tuple[str, str], dict[str, tuple[np.ndarray, np.ndarray]]] = field(repr=False)
    _resampling: Resampling = field(repr=False)

    @cached_property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents."""
        return tuple(dict.fromkeys(agent for agent, _ in self._draws))

    @cached_property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the missing dimensions."""
        return tuple(dict.fromkeys(dimension for _, dimension in self._draws))

    def at(self, agent: str, dimension: str, fraction: float) -> dict[str, Any]:
        """The row of one point. Raises: InputError when it is not there."""
        for row in self.rows:
            if row["agent"] == agent and row["dimension"] == dimension and abs(row["fraction"] - fraction) < 1e-6:
                return row
        raise InputError("point of the curve", got=(agent, dimension, fraction), allowed=f"{self.agents}, {self.dimensions}, {self.timings}")

    def level(self, agent: str, dimension: str) -> dict[str, Any]:
        """The oracle, never and gain intervals of one curve."""
        self._check(agent, dimension)
        return next(row for row in self.levels if row["agent"] == agent and row["dimension"] == dimension)

    def array(self, agent: str, dimension: str, what: str = "voi") -> np.ndarray:
        """(timings, 3) estimate, low and high of a quantity; NaN where it is not defined."""
        rows = [self.at(agent, dimension, f)[what] for f in self.timings]
        return np.array([[np.nan] * 3 if r is None else [r.estimate, r.low, r.high] for r in rows])

    def contrast(self, agent: str, a: str, b: str, fraction: float, what: str = "normalised") -> Interval:
        """Dimension a minus dimension b at one time, over the same resampled templates.

        Raises: InputError for the normalised value of a curve whose oracle gains nothing.
        """
        self.at(agent, a, fraction)
        column = int(np.argmin([abs(f - fraction) for f in self.timings]))
        pairs = [self.at(agent, d, fraction)[what] and self._draws[agent, d][what] for d in (a, b)]
        if None in pairs:
            raise InputError("normalised value", got=f"{a} or {b} of {agent}: the oracle's gain is not above zero", allowed="a curve with a gain")
        (estimate_a, draws_a), (estimate_b, draws_b) = pairs
        difference = estimate_a[column] - estimate_b[column], draws_a[:, column] - draws_b[:, column]
        return self._resampling.interval(*difference, "paired cluster bootstrap")

    def window(self, agent: str, dimension: str, share: float = 0.95) -> tuple[float, ...]:
        """Timings at which asking is nearly optimal: VOI of at least ``share`` of its largest value; empty if that is not above zero."""
        voi = self.array(agent, dimension)[:, 0]
        best = voi.max()
        return tuple(f for f, v in zip(self.timings, voi) if best > 0 and v >= share * best - 1e-12)

    def bound(self, agent: str, commitment: Sequence[dict[str, Any]], denom: str = "taken") -> list[dict[str, Any]]:
        """The bound VOI(t) <= VOI(0) (1 - C(t)) at every dimension and time, C from :func:`commitment`.

        Returns dicts with dimension, fraction, ``bound``, ``voi`` and the interval ``slack`` (bound - voi); ``holds``: the slack is not below zero
        with its interval. VOI(0) is oracle - never.
        """
        out = []
        table = {(row["variant"], round(row["fraction"], 6)): row[denom] for row in commitment if row["agent"] == agent}
        for dimension in self.dimensions:
            self._check(agent, dimension)
            drawn = self._draws[agent, dimension]
            variants, rows = drawn["variants"]
            for i, f in enumerate(self.timings):
                values = np.zeros(len(rows))
                values[rows] = [table[v, round(f, 6)] for v in variants]
                share, draws = self._resampling.mean(values, rows)
                gain, gain_draws = drawn["gain"]
                bound, bound_draws = gain * (1 - share), gain_draws * (1 - draws)
                voi, voi_draws = drawn["voi"][0][i], drawn["voi"][1][:, i]
                slack = self._resampling.interval(bound - voi, bound_draws - voi_draws)
                row = {"agent": agent, "dimension": dimension, "fraction": f, "commitment": float(share), "bound": float(bound), "voi": float(voi)}
                out.append({**row, "slack": slack, "holds": slack.high >= -1e-12, "holds_in_mean": slack.estimate >= -1e-12})
        return out

    def _check(self, agent: str, dimension: str) -> None:
        if (agent, dimension) not in self._draws:
            raise InputError("curve", got=(agent, dimension), allowed=f"{self.agents} and {self.dimensions}")


def demand_curve(
    table: Outcomes, *, k: int = 3, cluster: str = "template", against: str = "never", n: int = 5000, seed: int = 0, level: float = 0.95,
) -> DemandCurve:
    """Demand curves of all agents and dimensions of an experiment.

    k: of pass@k, at most the number of trials; cluster: column that holds the independent units; against: ``never`` or ``sham`` (a message of the
    same length at the same time), what the value of information is measured against. Normalised: VOI(t) / (oracle - never).
    Raises: InputError for an arm that was not run, fewer trials than k, or fewer than two clusters.
    Source: arXiv 2605.07937 for S, VOI and regret; the sham arm and the normalised value are ours.
    """
    if against not in AGAINST:
        raise InputError("against", got=against, allowed=", ".join(AGAINST))
    if cluster not in ("template", "variant"):
        raise InputError("cluster", got=cluster, allowed="template, variant")
    timings = table.timings
    if not timings:
        raise InputError("timings", got="no injected episodes", allowed="a table of ForcedInjection.run")
    rows, levels, all_draws = [], [], {}
    resampling = None
    for agent in table.agents:
        counted = cells(table, agent)
        score = counted.score(k)
        labels = counted.template if cluster == "template" else counted.variants
        resampling = Resampling(labels, n=n, seed=seed, level=level)
        inject = [counted.at("inject", f) for f in timings]
        base = [counted.at("never")] * len(timings) if against == "never" else [counted.at("sham", f) for f in timings]
        delivered = _delivered(table, agent)
        start = len(rows)
        for dimension in dict.fromkeys(counted.dimension.tolist()):
            mask = counted.dimension == dimension
            oracle, never = (resampling.mean(score[:, counted.at(arm)], mask) for arm in ("oracle", "never"))
            success, voi = resampling.mean(score[:, inject], mask), resampling.mean(score[:, inject] - score[:, base], mask)
            gain = oracle[0] - never[0], oracle[1] - never[1]
            regret = oracle[0] - success[0], oracle[1][:, None] - success[1]
            with np.errstate(invalid="ignore", divide="ignore"):
                normalised = voi[0] / gain[0], voi[1] / gain[1][:, None]
            intervals = {name: resampling.interval(*value) for name, value in (("oracle", oracle), ("never", never), ("gain", gain))}
            levels.append({"agent": agent, "dimension": dimension, **intervals})
            quantities = {"success": success, "voi": voi, "normalised": normalised, "regret": regret}
            all_draws[agent, dimension] = {**quantities, "gain": gain, "variants": (counted.variants[mask], mask)}
            # A ratio means nothing unless its denominator is clearly above zero.
            defined = intervals["gain"].low > 0
            for i, f in enumerate(timings):
                row = {"agent": agent, "dimension": dimension, "fraction": f}
                for name, (estimate, draws) in quantities.items():
                    usable = name != "normalised" or defined
                    row[name] = resampling.interval(estimate[i], draws[:, i]) if usable else None
                differences = (score[:, inject[i]] - score[:, base[i]])[mask]
                row["delivered"] = delivered[dimension, f]
                row["mde"] = detectable_difference(differences, labels[mask])
                row["p"] = sign_flip(differences, labels[mask], seed=seed)
                rows.append(row)
        for row, p in zip(rows[start:], holm([row["p"] for row in rows[start:]])):
            row["p_holm"] = p
    return DemandCurve(rows, levels, timings, k, against, all_draws, resampling)


def _delivered(table: Outcomes, agent: str) -> dict[tuple[str, float], float]:
    """Share of injected episodes that still ran when the message came."""
    part = table.where(agent=agent, arm="inject")
    found: dict[tuple[str, float], list[bool]] = {}
    for dimension, f, got in zip(part["dimension"].tolist(), part["fraction"].tolist(), part["delivered"].tolist()):
        found.setdefault((dimension, round(f, 6)), []).append(got)
    return {key: float(np.mean(got)) for key, got in found.items()}


def wasted_compute(table: Outcomes, *, cluster: str = "template", n: int = 5000, seed: int = 0) -> list[dict[str, Any]]:
    """Share of the actions before the message that the oracle's run does not contain, by agent and time.

    Returns dicts with agent, fraction, the intervals ``wasted`` and ``excess`` (minus the agent's own share in the oracle condition, which is
    exploration and not waste). Undelivered episodes count with all their actions. Source: arXiv 2605.07937, multiset comparison of (name, arguments).
    """
    out = []
    for agent in table.agents:
        part = table.where(agent=agent)
        own = _mean_by_variant(part.where(arm="oracle"), "wasted")
        for f in table.timings:
            share = _mean_by_variant(part.where(arm="inject", fraction=f), "wasted")
            labels = _labels(part, share, cluster)
            resampling = Resampling(labels, n=n, seed=seed)
            values = np.array([share[v] for v in share])
            excess = np.array([share[v] - own[v] for v in share])
            row = {name: resampling.interval(*resampling.mean(x)) for name, x in (("wasted", values), ("excess", excess))}
            out.append({"agent": agent, "fraction": f, **row})
    return out


def wasted_matrix(table: Outcomes, agent: str) -> np.ndarray:
    """(variants, timings) mean wasted share of one agent, for :func:`page_trend`; variants in alphabetical order."""
    part = table.where(agent=agent, arm="inject")
    columns = [_mean_by_variant(part.where(fraction=f), "wasted") for f in table.timings]
    return np.array([[column[v] for column in columns] for v in sorted(columns[0])])


def _mean_by_variant(table: Outcomes, column: str) -> dict[str, float]:
    variants, row = np.unique(table["variant"], return_inverse=True)
    return dict(zip(variants.tolist(), (np.bincount(row, table[column]) / np.bincount(row)).tolist()))


def _labels(table: Outcomes, variants: Any, cluster: str) -> np.ndarray:
    of = dict(zip(table["variant"].tolist(), table[cluster].tolist()))
    return np.array([of[v] for v in variants])


def detectable_difference(values: np.ndarray, cluster: np.ndarray, *, power: float = 0.8, level: float = 0.95) -> float:
    """Smallest true mean difference that a two-sided test over clusters finds with the wanted power, from the spread of the cluster means.

    >>> round(detectable_difference(np.array([0.0, 1.0] * 10), np.arange(20)), 3)
    0.321
    """
    labels, row = np.unique(cluster, return_inverse=True)
    means = np.bincount(row, values) / np.bincount(row)
    error = means.std(ddof=1) / math.sqrt(len(labels))
    normal = NormalDist()
    return float((normal.inv_cdf((1 + level) / 2) + normal.inv_cdf(power)) * error)


def sign_flip(values: np.ndarray, cluster: np.ndarray, *, n: int = 5000, seed: int = 0) -> float:
    """Two-sided p value of a mean difference of zero, flipping the sign of whole clusters at random.

    >>> sign_flip(np.ones(20), np.arange(20)) < 0.001
    True
    """
    _, row = np.unique(cluster, return_inverse=True)
    sums = np.bincount(row, values)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(n, len(sums)))
    as_large = np.abs(signs @ sums) >= abs(sums.sum()) - 1e-12
    return float((as_large.sum() + 1) / (n + 1))


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for their number, step down. Source: Holm, Scandinavian Journal of Statistics 6 (1979).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    out, largest = np.empty(len(order)), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p[i]))
        out[i] = largest
    return out.tolist()
