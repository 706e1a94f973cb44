"""Eigenvalues of S = X^T X / n for Gaussian X in the limit of large dimension, and the checks of arguments that go with them.

``alpha`` is n/d; the law is that of Marchenko and Pastur, with mean one and an atom of mass 1 - alpha at zero when alpha < 1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from nbkit.errors import InputError

MAX_DEPTH = 2000


def number(name: str, value: float, allowed: str, ok) -> float:
    try:
        converted = float(value)
    except (TypeError, ValueError):
        converted = math.nan
    if isinstance(value, bool) or math.isnan(converted) or not ok(converted):
        raise InputError(name, got=value, allowed=allowed)
    return converted


def check_alpha(value: float, name: str = "alpha") -> float:
    return number(name, value, "finite numbers > 0", lambda x: 0 < x < math.inf)


def check_noise(value: float, name: str = "noise") -> float:
    return number(name, value, "finite numbers >= 0", lambda x: 0 <= x < math.inf)


def check_depths(depths, most: int) -> np.ndarray:
    raw = np.asarray(depths)
    if raw.size == 0 or raw.dtype == bool or not np.issubdtype(raw.dtype, np.number) or np.iscomplexobj(raw):
        raise InputError("depths", got=depths, allowed=f"integers from 0 to {most}")
    if not np.all(np.isfinite(raw)) or np.any(raw != np.floor(raw)) or raw.min() < 0 or raw.max() > most:
        raise InputError("depths", got=depths, allowed=f"integers from 0 to {most}")
    return raw.astype(np.int64)


def edges(alpha: float) -> tuple[float, float]:
    """Smallest and largest eigenvalue of the continuous part of S, (1 -+ alpha^-1/2)^2.

    >>> edges(4.0)
    (0.25, 2.25)
    """
    root = math.sqrt(1 / alpha)
    return (1 - root) ** 2, (1 + root) ** 2


def density(alpha: float, values) -> np.ndarray:
    """Marchenko-Pastur density of the continuous part of S at ``values``; its mass is min(1, alpha).

    >>> grid = np.linspace(0, 4, 100001)
    >>> round(float(np.trapezoid(density(2.0, grid), grid)), 4)
    1.0
    """
    low, high = edges(check_alpha(alpha))
    x = np.asarray(values, dtype=float)
    inside = (x > low) & (x < high)
    safe = np.where(inside, x, 1.0)
    return np.where(inside, alpha / (2 * np.pi * safe) * np.sqrt(np.clip((high - safe) * (safe - low), 0, None)), 0.0)


@lru_cache(maxsize=8)
def _legendre(points: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(points)


@lru_cache(maxsize=64)
def quadrature(alpha: float, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and weights that integrate smooth functions over the law of S; for alpha < 1 the last one is the atom (0, 1 - alpha).

    With L = mid + rad cos(theta) the equidistant rule in theta converges geometrically; close to alpha = 1 the pole at L = 0 comes too near
    and the nodes are packed around it.

    >>> values, weights = quadrature(2.0, 200)
    >>> print(round(float(weights.sum()), 12), round(float(weights @ values), 12), round(float(weights @ values**2), 12))
    1.0 1.0 1.5
    """
    y = 1 / alpha
    gap = abs(math.log(y)) / 2
    # Angle measured from the lower edge: L = (1 - sqrt y)^2 + 4 sqrt y sin^2(angle / 2).
    if gap == 0 or 2 * gap * (nodes + 1) > 36:
        angle = np.arange(1, nodes + 2) * np.pi / (nodes + 1)
        measure = np.full(nodes + 1, np.pi / (nodes + 1))
        if gap == 0:
            # sin^2 / L has a limit at L = 0: the end point belongs to the rule, with half a step.
            angle, measure = np.concatenate([[0.0], angle]), np.concatenate([[np.pi / (nodes + 1) / 2], measure])
    else:
        x, w = _legendre((nodes + 1) // 2)
        split = np.pi / 4
        top = math.asinh(split / gap)
        u = (x + 1) / 2 * top
        angle = np.concatenate([gap * np.sinh(u), split + (x + 1) / 2 * (np.pi - split)])
        measure = np.concatenate([w / 2 * top * gap * np.cosh(u), w / 2 * (np.pi - split)])
    root = math.sqrt(y)
    values = (1 - root) ** 2 + 4 * root * np.sin(angle / 2) ** 2
    positive = values > 0
    ratio = np.where(positive, np.sin(angle) ** 2 / np.where(positive, values, 1.0), 1.0)
    weights = 2 * alpha * y / np.pi * ratio * measure
    if alpha < 1:
        values, weights = np.append(values, 0.0), np.append(weights, 1 - alpha)
    values.flags.writeable = weights.flags.writeable = False
    return values, weights


def resolvent(alpha: float, p: float) -> float:
    """Mean of p / (L + p), p >= 0, in closed form."""
    y = 1 / alpha
    b = p + 1 - y
    root = math.sqrt(b * b + 4 * y * p)
    return (root - b) / (2 * y) if b <= 0 else 2 * p / (b + root)


# Where 1 - x a vanishes outside the support, L = 1 + y + sqrt(y) (u + 1/u) with y = 1/alpha: u in (-1, 0) below it, u in (0, 1) above it.


def amplification(y, u):
    """Mean of L^2 / (L - L(u))^2, at which the random part of Gamma feeds back on itself; closed form."""
    return u**2 * (2 * np.sqrt(y) * u + 1 + y) / (y * (1 - u**2))


def outliers(y, k):
    """The two places L(u) where the amplification equals k, in closed form: (below the support, above it).

    In v = 1/u the condition is the depressed cubic k y v^3 - (1 + y + k y) v - 2 sqrt(y) = 0 with three real roots.
    """
    p, q = (1 + y + k * y) / (k * y), 2 * np.sqrt(y) / (k * y)
    size = 2 * np.sqrt(p / 3)
    angle = np.arccos(np.clip(3 * q / (2 * p) * np.sqrt(3 / p), -1, 1)) / 3
    low, high = np.minimum(size * np.cos(angle + 2 * np.pi / 3), -1.0), np.maximum(size * np.cos(angle), 1.0)
    return tuple(1 + y + np.sqrt(y) * (v + 1 / v) for v in (low, high))
