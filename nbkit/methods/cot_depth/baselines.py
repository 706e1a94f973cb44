"""What depth is compared with: least squares, the best ridge, gradient descent and a single prediction, all in the same limit."""

from __future__ import annotations

import math

import numpy as np

from .spectrum import MAX_DEPTH, check_alpha, check_depths, check_noise, edges, number, quadrature, resolvent
from .theory import CoTDepthTheory


def ols_risk(alpha: float, noise: float = 0.0) -> float:
    """Error of (minimum-norm) least squares on the test prompt; inf at alpha = 1 with noise.

    >>> ols_risk(2.0, 0.5), ols_risk(0.5)
    (0.5, 0.5)
    """
    alpha, noise = check_alpha(alpha), check_noise(noise)
    if alpha == 1:
        return math.inf if noise > 0 else 0.0
    return noise / (alpha - 1) if alpha > 1 else 1 - alpha + noise * alpha / (1 - alpha)


def ridge_risk(alpha: float, noise: float = 0.0) -> float:
    """Error of ridge regression with the best penalty noise / alpha on S: the Bayes estimator of this prior, below which no method gets.

    >>> round(ridge_risk(2.0, 0.5), 6), ridge_risk(0.5)
    (0.280776, 0.5)
    """
    alpha, noise = check_alpha(alpha), check_noise(noise)
    return resolvent(alpha, noise / alpha) if noise > 0 else max(0.0, 1 - alpha)


def gd_risk(depths, alpha: float, noise: float = 0.0, *, step: float | None = None, nodes: int = 600) -> np.ndarray:
    """Error of t steps of plain gradient descent on the test prompt; ``step`` defaults to the best constant one, 2 / (L- + L+).

    >>> gd_risk([0, 1, 2], 2.0).round(4).tolist()
    [1.0, 0.3333, 0.1852]
    """
    t = check_depths(depths, MAX_DEPTH)
    alpha, noise = check_alpha(alpha), check_noise(noise)
    low, high = edges(alpha)
    step = 2 / (low + high) if step is None else number("step", step, "finite numbers > 0", lambda x: 0 < x < math.inf)
    values, weights = quadrature(alpha, nodes)
    keep = values > 0
    power = (1 - step * values) ** t[..., None]
    return power**2 @ weights + noise / alpha * ((1 - power[..., keep]) ** 2 @ (weights[keep] / values[keep]))


def one_step_risk(alpha: float, tau: float, noise: float = 0.0) -> float:
    """Error of a single prediction, (1 - c) tau / (tau - 1): the double descent in tau that depth amplifies.

    >>> round(one_step_risk(2.0, 4.0), 6)
    0.444444
    """
    theory = CoTDepthTheory(alpha, tau, noise)
    return (1 - theory.gain) * (1.0 if math.isinf(tau) else tau / (tau - 1))
