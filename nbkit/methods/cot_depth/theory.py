"""Error of chain-of-thought depth t in in-context weight prediction, exactly, in the limit of large dimension.

The model: tasks w ~ N(0, I/d), prompts of n examples y = X w + noise, a matrix Gamma pre-trained on B prompts to map X^T y / n to w in one
step, and at test time w <- w + step * Gamma X^T (y - X w) / n, repeated t times from w = 0. Ratios stay fixed as d grows: ``alpha`` = n/d,
``tau`` = B/d. Errors are E||w - w_t||^2 with E||w||^2 = 1.

These formulas are our derivation of the model that arXiv 2606.03217 describes, not the paper's theorem, whose text was not available.

Glossary: S = X^T X / n of the test prompt, L an eigenvalue of S, a(L) = 1 - c L, m(x, y) = mean of 1 / ((1 - x a)(1 - y a)),
beta(x, y) = nu * mean of L^2 / ((1 - x a)(1 - y a)), where c I is the mean of step * Gamma and nu the size of its random part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nbkit.errors import InputError, RunError

from .spectrum import MAX_DEPTH, amplification, check_alpha, check_depths, check_noise, edges, number, outliers, quadrature

MAX_RECURSION = 100
# How close to one Lambda has to be to count as critical.
CRITICAL = 1e-9


class Rate(NamedTuple):
    """Growth factors of the error per step: ``value`` is the largest of ``plus`` (small eigenvalues), ``minus`` (large, oscillating) and ``edge``."""

    value: float
    plus: float
    minus: float
    edge: float


class Indices(NamedTuple):
    """Stability indices; the iteration contracts when both are below one and step * c does not overshoot the largest eigenvalue."""

    plus: float
    minus: float


class OptimalDepth(NamedTuple):
    """Best depth: an int, or inf when E_t falls towards its limit forever; ``reached`` is False when it lies beyond the depths searched."""

    depth: float
    error: float
    reached: bool


class Components(NamedTuple):
    """Error split into what is left of w (``signal``) and what label noise of the test prompt adds (``noise``)."""

    signal: np.ndarray
    noise: np.ndarray


@dataclass(frozen=True)
class CoTDepthTheory:
    """Exact error of t chain-of-thought steps in the limit d -> infinity.

    Attributes:
        alpha: examples per dimension n/d of the pre-training prompts, > 0.
        tau: pre-training prompts per dimension B/d, > 1; inf for unlimited pre-training.
        noise: variance of the label noise in pre-training.
        alpha_test: n/d of the test prompt; None for ``alpha``.
        noise_test: label noise of the test prompt; None for ``noise``.
        step: step size in (0, 1]; 1 is the plain model.
        nodes: points of the quadrature over the eigenvalues of S.

    Raises: InputError for values outside these ranges.
    Source: our derivation of the model described in arXiv 2606.03217; Marchenko-Pastur law, rainbow pairings of the random part of Gamma.

    >>> theory = CoTDepthTheory(2.0, 4.0)
    >>> theory.error([0, 1, 2, 4]).round(3).tolist()
    [1.0, 0.444, 0.243, 0.119]
    >>> theory.regime(), round(theory.critical_tau(), 6)
    ('exponential', 3.5)
    >>> CoTDepthTheory(2.0, 2.0).optimal_depth(60).depth
    7
    """

    alpha: float
    tau: float
    noise: float = 0.0
    alpha_test: float | None = None
    noise_test: float | None = None
    step: float = 1.0
    nodes: int = 600

    def __post_init__(self):
        check_alpha(self.alpha)
        hint = "WeightPredictor or the recording cot-depth-sim: below tau = 1 and with ridge the scalar formula does not hold"
        tau = number("tau", self.tau, "numbers; inf for unlimited pre-training", lambda x: True)
        if tau <= 1:
            raise InputError("tau", got=self.tau, allowed="> 1 pre-training prompts per dimension", hint=hint)
        check_noise(self.noise)
        if self.alpha_test is not None:
            check_alpha(self.alpha_test, "alpha_test")
        if self.noise_test is not None:
            check_noise(self.noise_test, "noise_test")
        number("step", self.step, "(0, 1]", lambda x: 0 < x <= 1)
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 50:
            raise InputError("nodes", got=self.nodes, allowed="integers >= 50")

    # ---- what the formulas are made of ----

    @property
    def context(self) -> float:
        """Examples per dimension of the test prompt."""
        return float(self.alpha if self.alpha_test is None else self.alpha_test)

    @property
    def label_noise(self) -> float:
        """Label noise variance of the test prompt."""
        return float(self.noise if self.noise_test is None else self.noise_test)

    @property
    def gain(self) -> float:
        """c: mean of step * Gamma; (1 + (1 + noise) / alpha)^-1 times the step."""
        return self.step / (1 + (1 + self.noise) / self.alpha)

    @property
    def spread(self) -> float:
        """nu: size of the random part of step * Gamma, step^2 c0 (1 - c0) / (tau - 1)."""
        c = self.gain / self.step
        return self.step**2 * c * (1 - c) / (self.tau - 1)

    @property
    def _ratio(self) -> float:
        return self.alpha * (self.tau - 1) / (1 + self.noise)  # c^2 / nu

    def spectrum(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues of the test S and their weights, (nodes,) each; sums over them replace integrals."""
        return quadrature(self.context, self.nodes)

    # ---- the error ----

    def error(self, depths) -> np.ndarray:
        """E_t for one depth or many (any shape of integers from 0 to 2000): signal plus noise.

        Raises: InputError for other depths; RunError should an error come out negative.
        Source: E_t = [x^t y^t] m / (1 - x y beta) plus the noise term of ``components``.
        """
        signal, noise = self.components(depths)
        return signal + noise

    def components(self, depths) -> Components:
        """E_t split into signal and noise, arrays in the shape of ``depths``; coefficients are read off a circle by FFT."""
        t = check_depths(depths, MAX_DEPTH)
        most = int(t.max())
        if self.spread == 0:
            signal, noise = self._unlimited(most)
        else:
            signal = self._positive(self._diagonal(most, noise=False))
            noise = np.zeros(most + 1)
            if self.label_noise > 0 and most > 0:
                noise[1:] = self.label_noise / self.context * self._positive(self._diagonal(most - 1, noise=True))
        return Components(signal[t], noise[t])

    def _unlimited(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """tau = inf: E_t = mean of a^(2t) + noise / alpha * mean of (1 - a^t)^2 / L."""
        values, weights = self.spectrum()
        a, keep = 1 - self.gain * values, values > 0
        signal, noise, power = np.empty(most + 1), np.zeros(most + 1), np.ones_like(a)
        for t in range(most + 1):
            signal[t] = weights @ power**2
            if self.label_noise > 0:
                noise[t] = self.label_noise / self.context * (weights[keep] @ ((1 - power[keep]) ** 2 / values[keep]))
            power = power * a
        return signal, noise

    @staticmethod
    def _positive(errors: np.ndarray) -> np.ndarray:
        if np.any(np.isnan(errors)) or np.any(errors <= 0):
            where = int(np.argmin(np.where(np.isnan(errors), -np.inf, errors)))
            raise RunError("error by FFT", got=f"{errors[where]} at depth {where}", allowed="> 0", hint="error_recursion, or more nodes")
        return errors

    def _diagonal(self, most: int, *, noise: bool) -> np.ndarray:
        """Diagonal coefficients (0..most) of the generating function of signal or noise.

        x and y = z/x run over one circle of ``size`` points, so that every mean over L is a divided difference of a function of one variable.
        The radius is a hair below the nearest singularity: ``cut`` balances aliasing exp(-cut) against rounding exp(2 cut most / size).
        """
        size = 4 * max(16, (2 if most <= 128 else 1) * most)
        cut = 36 / (1 + 2 * most / size)
        nearest = 1 / math.sqrt(self.rate().value)
        if noise or self.context < 1:
            nearest = min(nearest, 1.0)
        radius = nearest * math.exp(-cut / size)
        x = radius * np.exp(2j * np.pi * np.arange(size) / size)
        values, weights = self.spectrum()
        denominator = 1 / (1 - x[:, None] * (1 - self.gain * values))
        powers = range(4) if noise else (0, 2)
        moment = {k: denominator @ (weights * values**k) for k in powers}
        squared = {k: (denominator**2) @ (weights * values**k) for k in powers}
        coefficients = np.empty(size // 4 + 1, dtype=complex)
        # In blocks, so that memory stays at a few megabytes for any depth.
        block = max(1, 2**17 // size)
        for start in range(0, coefficients.size, block):
            rows = np.arange(start, min(start + block, coefficients.size))
            left = np.arange(size)[None, :]
            right = (2 * rows[:, None] - left) % size
            u, v = x[left], x[right]
            same = right == left
            gap = np.where(same, 1.0, u - v)

            def mean(k, left=left, right=right, u=u, v=v, same=same, gap=gap):
                return np.where(same, squared[k][left], (u * moment[k][left] - v * moment[k][right]) / gap)

            f = self._noise_function(u, v, mean, moment[2][left], moment[2][right]) if noise else self._signal_function(u, v, mean)
            coefficients[rows] = f.mean(-1)
        with np.errstate(over="ignore"):
            scale = np.exp(-2 * math.log(radius) * np.arange(most + 1))
        return np.fft.irfft(coefficients.conj(), n=size // 2)[: most + 1] * scale

    def _signal_function(self, x, y, mean):
        return mean(0) / (1 - x * y * self.spread * mean(2))

    def _noise_function(self, x, y, mean, second_x, second_y):
        """Sum over i, j < t of D_ij as one generating function: D / ((1 - x)(1 - y))."""
        c, nu = self.gain, self.spread
        m, beta = mean(0), nu * mean(2)
        hx, hy = x * c * nu * second_x, y * c * nu * second_y
        g = (c**2 * nu * mean(3) - beta * (hx + hy) + beta * nu) / (1 - x * y * beta)
        return (c**2 * mean(1) + m * (x * y * g - hx - hy + nu)) / ((1 - x) * (1 - y))

    def error_recursion(self, depths) -> np.ndarray:
        """E_t by the plain recursion over coefficients, the reference for ``error`` (integers from 0 to 100; slow beyond 60).

        Source: b_pq = beta_{p+q} + sum beta_{i+j-2} b_{p-i,q-j}; E_pq = m_{p+q} + sum m_{i+j-2} b_{p-i,q-j}; for noise the expansion of D.

        >>> theory = CoTDepthTheory(2.0, 3.0, 0.1)
        >>> bool(np.allclose(theory.error_recursion([1, 5, 9]), theory.error([1, 5, 9]), rtol=1e-10))
        True
        """
        t = check_depths(depths, MAX_RECURSION)
        most, c, nu = int(t.max()), self.gain, self.spread
        values, weights = self.spectrum()
        power = (1 - c * values)[:, None] ** np.arange(2 * most + 3)
        order = np.add.outer(np.arange(most + 1), np.arange(most + 1))
        m, d0 = (((weights * values**k) @ power)[order] for k in (0, 1))
        second = (weights * values**2) @ power
        beta, g3 = nu * second[order], nu * ((weights * values**3) @ power)[order]
        errors = np.diag(_divide(m, beta)).copy()
        if self.label_noise > 0 and most > 0:
            h = c * nu * second[: most + 1]
            outer = np.zeros_like(m)  # x h(x) + y h(y), less nu at the origin
            outer[1:, 0] = outer[0, 1:] = h[:-1]
            outer[0, 0] -= nu
            g = _divide(c**2 * g3 - _multiply(beta, outer), beta)
            inner = -outer
            inner[1:, 1:] += g[:-1, :-1]
            d = c**2 * d0 + _multiply(m, inner)
            errors[1:] += self.label_noise / self.context * np.diag(d.cumsum(0).cumsum(1))[:-1]
        return errors[t]

    # ---- asymptotics ----

    def rate(self) -> Rate:
        """Lambda in E_t - E_inf ~ K t^(-1/2) Lambda^t, with its three candidates.

        ``plus`` and ``minus`` are 1/x^2 at the solutions of x^2 nu mean(L^2 / (1 -+ x a)^2) = 1, found in closed form; ``edge`` is max |a|^2.
        """
        y, c = 1 / self.context, self.gain
        low, high = edges(self.context)
        edge = max((1 - c * low) ** 2, (1 - c * high) ** 2)
        if self.spread == 0:
            plus, minus = (1 - c * low) ** 2, (1 - c * high) ** 2
        else:
            plus, minus = (float((1 - c * place) ** 2) for place in outliers(y, min(self._ratio, 1e15)))
        return Rate(max(plus, minus, edge), plus, minus, edge)

    def _per_ratio(self) -> Indices:
        """The stability indices times c^2 / nu: they depend on the test spectrum and the gain alone."""
        alpha, y = self.context, 1 / self.context
        place = (2 / self.gain - 1 - y) / math.sqrt(y)
        minus = math.inf if place <= 2 else float(amplification(y, 2 / (place + math.sqrt(place**2 - 4))))
        return Indices(min(1.0, alpha), minus)

    def indices(self) -> Indices:
        """I_plus = (nu / c^2) min(1, alpha_test) and I_minus = nu mean(L^2 / (2 - c L)^2), inf when c L reaches 2."""
        plus, minus = self._per_ratio()
        if self.spread == 0:
            return Indices(0.0, math.inf if math.isinf(minus) else 0.0)
        return Indices(plus / self._ratio, minus / self._ratio)

    def critical_tau(self) -> float:
        """The tau at which Lambda = 1; below it depth does harm. inf when no amount of pre-training helps.

        >>> [round(CoTDepthTheory(alpha, 9.0).critical_tau(), 9) for alpha in (1.5, 2.0, 3.0, 0.5)]
        [7.0, 3.5, 2.0, 6.0]
        """
        return 1 + max(self._per_ratio()) * (1 + self.noise) / self.alpha

    def regime(self) -> str:
        """"exponential", "saturation" (alpha_test < 1), "polynomial" (Lambda = 1) or "overthinking" (Lambda > 1)."""
        value = self.rate().value
        if abs(value - 1) <= CRITICAL:
            return "polynomial"
        if value > 1:
            return "overthinking"
        return "saturation" if self.context < 1 else "exponential"

    def limit(self) -> float:
        """E_t as t grows: the least-squares floor noise / (alpha - 1), a plateau for alpha_test < 1, inf when depth does harm.

        For alpha_test < 1 the signal tends to (1 - alpha) / (1 - I_plus); the noise to D at x = y = 1, where m has a pole that a zero of its
        factor cancels.
        """
        alpha, noise, value = self.context, self.label_noise, self.rate().value
        critical = abs(value - 1) <= CRITICAL
        if value > 1 + CRITICAL or (critical and noise > 0):
            return math.inf
        if alpha >= 1:
            return noise / (alpha - 1) if noise > 0 else 0.0
        c, nu, plus = self.gain, self.spread, self.indices().plus
        if plus >= 1 - CRITICAL:
            return math.inf
        k1, k2 = alpha**2 / (1 - alpha), alpha**3 / (1 - alpha) ** 3  # means of 1/L and 1/L^2 over the continuous part
        h1 = nu / c * (alpha - c)
        beta, beta1, beta2 = plus, nu / c**3 * (k1 - c * alpha), nu / c**4 * (k2 - 2 * c * k1 + c**2 * alpha)
        b1, b2 = beta + beta1, beta + 2 * beta1 + beta2  # first and mixed derivatives of x y beta
        # Mixed derivative of c^2 g3 - beta (x h + y h) + beta nu, with h(1) = nu.
        top = nu / c**2 * (k1 - 2 * c * alpha + c**2) - (beta2 * 2 * nu + 2 * beta1 * (nu + h1)) + beta2 * nu
        g2 = (top + b2 * nu + 2 * b1 * h1) / (1 - beta)
        plateau = (1 - alpha) / (1 - beta)
        return plateau + noise / alpha * (k1 + (1 - alpha) * (nu + 2 * h1 + g2))

    def optimal_depth(self, max_depth: int = 400) -> OptimalDepth:
        """The depth with the smallest error among 0..max_depth.

        Depths are searched in doubling ranges until the minimum lies in the first half. ``depth`` is inf when E_t falls towards a limit that
        no finite depth beats; ``reached`` is False when the minimum lies beyond max_depth (``depth`` is then max_depth).
        """
        most = int(check_depths(max_depth, MAX_DEPTH).max())
        limit, high = self.limit(), min(32, most)
        while True:
            errors = self.error(np.arange(high + 1))
            best = int(errors.argmin())
            if (best <= high // 2 and errors[best] <= limit) or high == most:
                break
            high = min(2 * high, most)
        if limit < errors[best]:
            return OptimalDepth(math.inf, limit, True)
        return OptimalDepth(best, float(errors[best]), best < most)

    def unlimited(self) -> CoTDepthTheory:
        """The same test with unlimited pre-training (tau = inf, Gamma = c I)."""
        return replace(self, tau=math.inf)


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of two power series in x and y, (n, n) coefficients each, cut off at the same order."""
    n, out = len(a), np.zeros_like(b)
    for i in range(n):
        for j in range(n):
            if a[i, j] != 0:
                out[i:, j:] += a[i, j] * b[: n - i, : n - j]
    return out


def _divide(a: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Coefficients of a / (1 - x y beta)."""
    out = a.copy()
    for p in range(1, len(a)):
        for q in range(1, len(a)):
            out[p, q] += (beta[:p, :q] * out[p - 1 :: -1, q - 1 :: -1][:p, :q]).sum()
    return out


def rate_map(alphas, taus, *, noise: float = 0.0, step: float = 1.0, test_ratio: float = 1.0) -> np.ndarray:
    """Lambda over a grid, (len(taus), len(alphas)): below one the error falls geometrically, above one depth does harm.

    Args:
        alphas: (A,) context lengths n/d of pre-training, > 0.
        taus: (T,) pre-training prompts B/d, > 1; inf is allowed.
        test_ratio: context length of the test prompt over that of pre-training.

    Raises: InputError for values outside these ranges.

    >>> rate_map([2.0], [3.5, 1e9]).round(4).tolist()
    [[1.0], [0.8889]]
    """
    alpha, tau = np.atleast_1d(np.asarray(alphas, dtype=float)), np.atleast_1d(np.asarray(taus, dtype=float))
    if alpha.ndim != 1 or not np.all((alpha > 0) & np.isfinite(alpha)):
        raise InputError("alphas", got=alphas, allowed="finite numbers > 0")
    if tau.ndim != 1 or not np.all(tau > 1):
        raise InputError("taus", got=taus, allowed="numbers > 1")
    noise, ratio = check_noise(noise), check_alpha(test_ratio, "test_ratio")
    step = number("step", step, "(0, 1]", lambda x: 0 < x <= 1)
    y = np.broadcast_to(1 / (alpha * ratio), (tau.size, alpha.size))
    c = step / (1 + (1 + noise) / alpha)
    # A ratio of 1e15 is infinity for double precision, and keeps the cubic regular.
    k = np.minimum(alpha * (tau[:, None] - 1) / (1 + noise), 1e15)
    return np.maximum(*((1 - c * place) ** 2 for place in outliers(y, k)))
