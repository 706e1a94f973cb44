"""Intervals and exact tests with NumPy alone: bootstrap over clusters, Wilson, sign test, pass@k, slope, Kendall.

What is resampled is the *cluster*: the text, the problem, the seed; never the token or the attempt inside it. Pass ``cluster=`` whenever
several values share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from nbkit.errors import InputError

__all__ = ["Interval", "bootstrap", "kendall", "paired", "pass_at_k", "sign_test", "slope", "wilson"]

METHODS = ("percentile", "bca", "expanded")

# Resampling counts are drawn in blocks of at most this many numbers, which bounds memory at about 30 MB.
_BLOCK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    n: number of independent units behind it (clusters, trials); method: how it was made.
    Raises: InputError when low > high or level is outside (0, 1).

    >>> print(Interval(7.213, 3.1, 11.42, n=200, method="paired bootstrap"))
    7.21 [3.10, 11.42] (95 % paired bootstrap, n = 200)
    >>> f"{Interval(0.072, 0.031, 0.114).scale(100):.2f} points"
    '7.20 [3.10, 11.40] points'
    >>> Interval.exact(16384).short
    '16384 (exact)'
    """

    estimate: float
    low: float
    high: float
    level: float = 0.95
    n: int | None = None
    method: str = ""

    def __post_init__(self):
        for name in ("estimate", "low", "high"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.low > self.high:
            raise InputError("interval", got=f"low {self.low} > high {self.high}", allowed="low <= high")
        if not 0 < self.level < 1:
            raise InputError("interval level", got=self.level, allowed="between 0 and 1, such as 0.95")

    @classmethod
    def exact(cls, value: float) -> Interval:
        """An interval of width zero for a quantity that is computed, not sampled: bytes, counts of a fixed set, a closed form."""
        return cls(value, value, value, method="exact")

    @property
    def short(self) -> str:
        """Estimate and bounds without the method, rounded to the width of the interval."""
        if self.method == "exact":
            return f"{_digits(self.estimate, 0.0)} (exact)"
        width = self.high - self.low
        return f"{_digits(self.estimate, width)} [{_digits(self.low, width)}, {_digits(self.high, width)}]"

    def scale(self, factor: float) -> Interval:
        """The same interval in another unit, for example ``scale(100)`` from a share to percentage points; a negative factor swaps the bounds."""
        low, high = sorted((self.low * factor, self.high * factor))
        return replace(self, estimate=self.estimate * factor, low=low, high=high)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"estimate": self.estimate, "low": self.low, "high": self.high, "level": self.level, "n": self.n, "method": self.method}

    def __str__(self) -> str:
        if self.method == "exact":
            return self.short
        about = f"{self.level * 100:g} %" + (f" {self.method}" if self.method else "") + (f", n = {self.n}" if self.n is not None else "")
        return f"{self.short} ({about})"

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        return f"{self.estimate:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def bootstrap(
    values: Any, stat: Callable[[np.ndarray], float] = np.mean, cluster: Any = None, *, n: int = 2000, seed: int = 0, level: float = 0.95,
    method: str = "percentile",
) -> Interval:
    """Bootstrap interval of a statistic, resampling whole clusters.

    values: (m,) or (m, columns), one row an observation; stat: rows -> number; cluster: (m,) labels of the independent units, default each row.
    method: ``percentile``; ``bca`` (bias-corrected and accelerated); ``expanded`` (percentiles widened by the t quantile, for few clusters: below
    about 20 the plain percentile interval is too narrow). Values that are all equal give width zero: use :func:`wilson` for shares near 0 or 1.
    Raises: InputError for NaN, no values, or fewer than two clusters.
    Source: Efron and Tibshirani (1993), ch. 13-14; expanded: Hesterberg, The American Statistician 69 (2015), section 5.

    >>> bootstrap([1.0, 2.0, 3.0, 4.0], seed=0).estimate
    2.5
    """
    values = _numbers("values", values)
    groups = _groups(cluster, len(values))
    if method not in METHODS:
        raise InputError("method", got=method, allowed=", ".join(METHODS))
    if not 0 < level < 1:
        raise InputError("level", got=level, allowed="between 0 and 1")
    if n < 100:
        raise InputError("n", got=n, allowed=">= 100 resamples", hint="n=2000 is cheap and stable")
    estimate = float(stat(values))
    rng = np.random.default_rng(seed)
    if stat is np.mean and values.ndim == 1:
        draws = _resample_means(values, groups, n, rng)
    else:
        draws = _resample(values, stat, groups, n, rng)
    finite = draws[np.isfinite(draws)]
    if len(finite) < 0.95 * n:
        bad = f"{n - len(finite)} of {n} resamples without a finite value"
        raise InputError("statistic", got=bad, allowed="at most 5 %", hint="more clusters or more spread in x")
    tail = (1 - level) / 2
    low, high = tail, 1 - tail
    if method == "expanded":
        low = NormalDist().cdf(-math.sqrt(len(groups) / (len(groups) - 1)) * _t_quantile(1 - tail, len(groups) - 1))
        high = 1 - low
    elif method == "bca":
        low, high = _bca_levels(estimate, finite, values, stat, groups, (low, high))
    bounds = np.quantile(finite, [low, high])
    name = ("cluster " if cluster is not None else "") + "bootstrap" + ("" if method == "percentile" else f" ({method})")
    return Interval(estimate, bounds[0], bounds[1], level, len(groups), name)


def paired(a: Any, b: Any, cluster: Any = None, *, n: int = 2000, seed: int = 0, level: float = 0.95, method: str = "percentile") -> Interval:
    """Bootstrap interval of the mean of ``a - b``, where a[i] and b[i] were measured on the same item.

    a, b: (m,); cluster: (m,) labels of the independent units. Options as in :func:`bootstrap`. Raises: InputError when the shapes differ.

    >>> paired([3.0, 5.0], [1.0, 3.0]).estimate
    2.0
    """
    a, b = _numbers("a", a), _numbers("b", b)
    if a.shape != b.shape or a.ndim != 1:
        raise InputError("a and b", got=f"shapes {a.shape} and {b.shape}", allowed="two vectors of one length, item i in both the same")
    interval = bootstrap(a - b, cluster=cluster, n=n, seed=seed, level=level, method=method)
    return replace(interval, method=f"paired {interval.method}")


def slope(x: Any, y: Any, cluster: Any = None, *, n: int = 2000, seed: int = 0, level: float = 0.95, method: str = "percentile") -> Interval:
    """Bootstrap interval of the least-squares slope of y on x (unit of y per unit of x).

    x, y: (m,); cluster: (m,) labels of the independent units, for example the text measured at every budget. Raises: InputError when x is constant.

    >>> slope([0, 1, 2, 3], [1, 3, 5, 7]).short
    '2 [2, 2]'
    """
    x, y = _numbers("x", x), _numbers("y", y)
    if x.shape != y.shape or x.ndim != 1:
        raise InputError("x and y", got=f"shapes {x.shape} and {y.shape}", allowed="two vectors of one length")
    if np.ptp(x) == 0:
        raise InputError("x", got=f"one value, {x[0]:g}", allowed="at least two different values")
    interval = bootstrap(np.stack([x, y], axis=1), _least_squares, cluster, n=n, seed=seed, level=level, method=method)
    return replace(interval, method=f"slope, {interval.method}")


def wilson(k: int, n: int, *, level: float = 0.95) -> Interval:
    """Wilson score interval of a proportion: k successes in n independent trials.

    Raises: InputError unless 0 <= k <= n and n >= 1. Source: Wilson, JASA 22 (1927); recommended by Brown, Cai and DasGupta (2001).

    >>> print(wilson(81, 263))
    0.308 [0.255, 0.366] (95 % Wilson, n = 263)
    """
    k, n = _count("k", k), _count("n", n)
    if n < 1 or k > n:
        raise InputError("successes and trials", got=f"k = {k}, n = {n}", allowed="0 <= k <= n and n >= 1")
    if not 0 < level < 1:
        raise InputError("level", got=level, allowed="between 0 and 1")
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    share = k / n
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # At k = 0 and k = n a bound is 0 or 1 exactly; subtraction leaves rounding dust there.
    return Interval(share, 0.0 if k == 0 else centre - half, 1.0 if k == n else centre + half, level, n, "Wilson")


def sign_test(k: int, n: int) -> float:
    """Exact two-sided p value of k positive signs among n (ties left out), under equal chances.

    Raises: InputError unless 0 <= k <= n.

    >>> sign_test(5, 5)
    0.0625
    """
    k, n = _count("k", k), _count("n", n)
    if k > n:
        raise InputError("positive signs", got=f"{k} of {n}", allowed="0 <= k <= n")
    tail = sum(math.comb(n, i) for i in range(min(k, n - k) + 1))
    return min(1.0, 2 * tail / 2**n)


def pass_at_k(n: Any, c: Any, k: int) -> Any:
    """Unbiased estimate of the chance that at least one of k attempts succeeds, from c successes in n attempts.

    n, c: integers or arrays of one shape (a problem each); returns a float or an array. Raises: InputError unless 0 <= c <= n and 1 <= k <= n.
    Source: Chen et al., arXiv 2107.03374, eq. 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    >>> pass_at_k(4, [0, 1, 4], 1)
    array([0.  , 0.25, 1.  ])
    """
    attempts, successes = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    k = _count("k", k)
    out = np.empty(attempts.shape)
    for at in np.ndindex(attempts.shape):
        total, right = _count("n", attempts[at]), _count("c", successes[at])
        if right > total or not 1 <= k <= total:
            raise InputError("pass@k", got=f"n = {total}, c = {right}, k = {k}", allowed="0 <= c <= n and 1 <= k <= n")
        out[at] = 1 - math.comb(total - right, k) / math.comb(total, k)
    return out if attempts.ndim else float(out)


def kendall(x: Any, y: Any) -> float:
    """Kendall's tau-b: rank correlation of x and y with ties, from -1 to 1. Cost O(m^2).

    x, y: (m,). Raises: InputError when one of them is constant. Source: Kendall, Biometrika 33 (1945).

    >>> kendall([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    x, y = _numbers("x", x), _numbers("y", y)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise InputError("x and y", got=f"shapes {x.shape} and {y.shape}", allowed="two vectors of one length >= 2")
    rows, columns = np.triu_indices(len(x), 1)
    order_x, order_y = np.sign(x[rows] - x[columns]), np.sign(y[rows] - y[columns])
    untied = float(np.count_nonzero(order_x)) * float(np.count_nonzero(order_y))
    if untied == 0:
        raise InputError("x or y", got="all values equal", allowed="at least two different values in each")
    return float(np.sum(order_x * order_y) / math.sqrt(untied))


def _numbers(name: str, values: Any) -> np.ndarray:
    """A float array with at least one row and no NaN."""
    array = np.asarray(values, dtype=float)
    if array.ndim not in (1, 2) or len(array) == 0:
        raise InputError(name, got=f"shape {array.shape}", allowed="a vector (or rows by columns) with at least one row")
    if not np.isfinite(array).all():
        bad = f"{np.count_nonzero(~np.isfinite(array))} values that are NaN or infinite"
        raise InputError(name, got=bad, allowed="finite numbers", hint="find out where they come from first")
    return array


def _count(name: str, value: Any) -> int:
    if value != int(value) or value < 0:
        raise InputError(name, got=str(value), allowed="an integer >= 0")
    return int(value)


def _groups(cluster: Any, rows: int) -> list[np.ndarray]:
    """The row numbers of every cluster, in order of first appearance (so that labels can be renamed without changing the draw)."""
    labels = np.arange(rows) if cluster is None else np.asarray(cluster)
    if labels.shape != (rows,):
        raise InputError("cluster", got=f"shape {labels.shape}", allowed=f"({rows},), one label a row")
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    members = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
    groups = [members[i] for i in np.argsort(first, kind="stable")]
    if len(groups) < 2:
        hint = "resample texts, problems or seeds, and measure more of them"
        raise InputError("independent units", got=f"{len(groups)} cluster", allowed=">= 2", hint=hint)
    return groups


def _resample_means(values: np.ndarray, groups: list[np.ndarray], n: int, rng: np.random.Generator) -> np.ndarray:
    """Means of n resamples: a resample is how often each cluster was drawn, so a matrix product replaces the loop."""
    sums = np.array([values[rows].sum() for rows in groups])
    sizes = np.array([len(rows) for rows in groups], dtype=float)
    draws, block = [], max(1, _BLOCK // len(groups))
    for start in range(0, n, block):
        counts = rng.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=min(block, n - start))
        draws.append(counts @ sums / (counts @ sizes))
    return np.concatenate(draws)


def _resample(values: np.ndarray, stat: Callable[[np.ndarray], float], groups: list[np.ndarray], n: int, rng: np.random.Generator) -> np.ndarray:
    draws = np.empty(n)
    for i in range(n):
        chosen = rng.integers(len(groups), size=len(groups))
        draws[i] = stat(values[np.concatenate([groups[j] for j in chosen])])
    return draws


def _bca_levels(
    estimate: float, draws: np.ndarray, values: np.ndarray, stat: Callable[[np.ndarray], float], groups: list[np.ndarray],
    levels: tuple[float, float],
) -> tuple[float, float]:
    """Percentile levels corrected for median bias and for the acceleration found by leaving one cluster out."""
    normal = NormalDist()
    # Half of the ties count as below, or a discrete statistic would look biased; the clip keeps the quantile finite.
    below = (np.count_nonzero(draws < estimate) + 0.5 * np.count_nonzero(draws == estimate)) / len(draws)
    bias = normal.inv_cdf(min(max(below, 0.5 / len(draws)), 1 - 0.5 / len(draws)))
    rows = np.arange(len(values))
    left_out = np.array([float(stat(values[np.setdiff1d(rows, group)])) for group in groups])
    centred = left_out.mean() - left_out
    spread = float(np.sum(centred**2))
    acceleration = float(np.sum(centred**3)) / (6 * spread**1.5) if spread > 0 else 0.0
    moved = []
    for level in levels:
        z = bias + normal.inv_cdf(level)
        moved.append(normal.cdf(bias + z / (1 - acceleration * z)))
    return moved[0], moved[1]


def _least_squares(rows: np.ndarray) -> float:
    x, y = rows[:, 0] - rows[:, 0].mean(), rows[:, 1]
    spread = float(x @ x)
    return float(x @ y) / spread if spread > 0 else math.nan


def _t_quantile(level: float, freedom: int) -> float:
    """Quantile of Student's t above the median: bisection on the distribution function, which is a sum in closed form for whole degrees of freedom.

    Source: Abramowitz and Stegun (1964), 26.7.3 and 26.7.4.
    """

    def inside(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        cosine = math.cos(angle)
        total = term = cosine if freedom % 2 else 1.0
        for i in range(3 if freedom % 2 else 2, freedom - 1, 2):
            term *= cosine * cosine * (i - 1) / i
            total += term
        if freedom % 2:
            return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
        return math.sin(angle) * total

    low, high = 0.0, 1.0
    while inside(high) < 2 * level - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 2 * level - 1 else (low, middle)
    return high


def _digits(value: float, width: float) -> str:
    """A number rounded so that three digits of the interval's width stay visible: a bound just above a threshold must not print as the threshold."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and (width == 0 or abs(value) >= 1e6):
        return str(int(value))
    if width == 0 or not math.isfinite(width):
        return f"{value:.4g}"
    decimals = max(2 - math.floor(math.log10(width)), 0)
    # Below a width of about 1e-6 the exponent form is shorter.
    text = f"{value:.{decimals}f}" if decimals < 9 else f"{value:.4g}"
    return text.removeprefix("-") if float(text) == 0 else text
