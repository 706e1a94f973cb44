"""The reduced model at finite dimension: sampled pre-training, exact averages over tasks and label noise, and a predictor for prompts of your own.

Works where the formula does not: ridge in pre-training, fewer prompts than dimensions (tau < 1), any matrix Gamma.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nbkit.errors import InputError, RunError

from .spectrum import check_alpha, check_noise, number


def _count(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(name, got=value, allowed=f"integers >= {least}")
    return int(value)


def _step(value: float) -> float:
    return number("step", value, "(0, 1]", lambda x: 0 < x <= 1)


# ---- prompts ----


def sample_prompts(prompts: int, n: int, d: int, *, noise: float = 0.0, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw prompts: X (prompts, n, d) standard normal, y = X w + label noise (prompts, n), tasks w ~ N(0, I/d) (prompts, d).

    >>> [part.shape for part in sample_prompts(3, 8, 4, seed=0)]
    [(3, 8, 4), (3, 8), (3, 4)]
    """
    prompts, n, d = _count("prompts", prompts), _count("n", n), _count("d", d)
    noise, rng = check_noise(noise), np.random.default_rng(seed)
    w = rng.standard_normal((prompts, d)) / math.sqrt(d)
    x = rng.standard_normal((prompts, n, d))
    y = np.einsum("pnd,pd->pn", x, w) + math.sqrt(noise) * rng.standard_normal((prompts, n))
    return x, y, w


def sample_moments(prompts: int, n: int, d: int, *, noise: float = 0.0, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw phi = X^T y / n and w of each prompt, (prompts, d) both, exactly distributed but without forming X.

    Given w, X splits into its part along w and an independent Gaussian part across it, so that phi needs two chi-squares and d normals.

    >>> phi, w = sample_moments(20000, 40, 10, seed=0)
    >>> round(float((phi * w).sum(1).mean()), 1)
    1.0
    """
    prompts, n, d = _count("prompts", prompts), _count("n", n, 2), _count("d", d, 2)
    noise, rng = check_noise(noise), np.random.default_rng(seed)
    w = rng.standard_normal((prompts, d)) / math.sqrt(d)
    length = np.linalg.norm(w, axis=1)
    along, e, s = rng.chisquare(n, prompts), rng.standard_normal(prompts), math.sqrt(noise)
    inner = length * along + s * np.sqrt(along) * e
    size = np.sqrt((length * np.sqrt(along) + s * e) ** 2 + noise * rng.chisquare(n - 1, prompts))
    unit = w / length[:, None]
    across = rng.standard_normal((prompts, d))
    across -= (across * unit).sum(1, keepdims=True) * unit
    return (inner[:, None] * unit + size[:, None] * across) / n, w


def sample_covariance(n: int, d: int, *, seed: int) -> np.ndarray:
    """S = X^T X / n of one test prompt, (d, d).

    >>> sample_covariance(50, 3, seed=0).shape
    (3, 3)
    """
    x = np.random.default_rng(seed).standard_normal((_count("n", n), _count("d", d)))
    return x.T @ x / n


# ---- pre-training ----


def pretrain(phi: np.ndarray, w: np.ndarray, *, ridge: float = 0.0) -> np.ndarray:
    """Gamma (d, d) that maps phi to w with the least squared error over the prompts.

    Args:
        phi, w: (prompts, d), X^T y / n and the task of every prompt.
        ridge: penalty; ridge * prompts / d * ||Gamma||^2 is added. Zero with fewer prompts than dimensions gives the smallest such Gamma.

    Raises: InputError for shapes that do not match, values that are not finite or a negative penalty.
    Source: the direct one-step objective of pre-training; normal equations.

    >>> pretrain(np.eye(2), 3 * np.eye(2)).tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    phi, w = np.asarray(phi, dtype=float), np.asarray(w, dtype=float)
    ridge = number("ridge", ridge, "finite numbers >= 0", lambda x: 0 <= x < math.inf)
    if phi.ndim != 2 or phi.shape != w.shape or phi.size == 0:
        raise InputError("phi and w", got=f"shapes {phi.shape} and {w.shape}", allowed="two arrays (prompts, d)")
    if not (np.isfinite(phi).all() and np.isfinite(w).all()):
        raise InputError("phi and w", got="NaN or infinite values", allowed="finite numbers")
    prompts, d = phi.shape
    if ridge == 0 and prompts < d:
        return np.linalg.solve(phi @ phi.T, phi).T.dot(w).T
    return np.linalg.solve(phi.T @ phi + ridge * prompts / d * np.eye(d), phi.T @ w).T


# ---- errors ----


@dataclass(frozen=True)
class Simulation:
    """Errors of one setting.

    Attributes:
        signal, noise: (draws, contexts, depth + 1), averaged exactly over tasks and label noise of each test context; contexts of one draw
            share the pre-trained Gamma, so draws are the independent units.
        baselines: ``ols``, ``ridge`` and ``gd`` of the same contexts, (draws, contexts) or (draws, contexts, depth + 1).
    """

    signal: np.ndarray
    noise: np.ndarray
    baselines: dict[str, np.ndarray]

    @property
    def error(self) -> np.ndarray:
        """Total error, (draws, contexts, depth + 1)."""
        return self.signal + self.noise


def exact_errors(gamma: np.ndarray, s: np.ndarray, depth: int, *, n: int, noise: float = 0.0, step: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Signal and noise part of the error after 0..depth steps in one context, (depth + 1,) each, averaged exactly over w and label noise.

    With M = I - step Gamma S the signal is ||M^t||^2 / d and the noise (noise / n) tr(A S A^T), A = sum of M^i step Gamma over i < t.

    >>> signal, _ = exact_errors(np.eye(3) / 2, np.eye(3), 2, n=9)
    >>> signal.tolist()
    [1.0, 0.25, 0.0625]
    """
    d, depth = len(s), _count("depth", depth, 0)
    noise, n = check_noise(noise), _count("n", n)
    scaled = _step(step) * np.asarray(gamma)
    m = np.eye(d) - scaled @ s
    power, total = np.eye(d), np.zeros((d, d))
    signal, extra = np.ones(depth + 1), np.zeros(depth + 1)
    with np.errstate(over="ignore"):
        for t in range(1, depth + 1):
            power = m @ power
            signal[t] = (power**2).sum() / d
            if noise > 0:
                total = m @ total + scaled
                extra[t] = noise / n * ((total @ s) * total).sum()
    return signal, extra


def context_baselines(s: np.ndarray, depth: int, *, n: int, noise: float = 0.0) -> dict[str, np.ndarray]:
    """Errors of least squares, of the Bayes ridge and of gradient descent after 0..depth steps in one context, from the eigenvalues of S.

    Gradient descent takes the best constant step of this context, 2 over the sum of the extreme eigenvalues that are not zero.

    >>> context_baselines(np.diag([0.5, 1.5]), 1, n=4)["gd"].tolist()
    [1.0, 0.25]
    """
    values = np.clip(np.linalg.eigvalsh(s), 0, None)
    d, noise = len(values), check_noise(noise)
    keep = values > 1e-10 * values.max()
    live = values[keep]
    ols = 1 - live.size / d + noise / n * (1 / live).sum()
    penalty = noise * d / n
    ridge = ols if penalty == 0 else (penalty / (values + penalty)).mean()
    power = (1 - 2 / (live[0] + live[-1]) * live)[None, :] ** np.arange(depth + 1)[:, None]
    gd = 1 - live.size / d + (power**2).sum(1) / d + noise / n * ((1 - power) ** 2 / live).sum(1)
    return {"ols": np.asarray(ols), "ridge": np.asarray(ridge), "gd": gd}


def simulate(
    alpha: float, tau: float, noise: float = 0.0, *, alpha_test: float | None = None, noise_test: float | None = None, step: float = 1.0,
    ridge: float = 0.0, d: int = 200, depth: int = 12, draws: int = 5, contexts: int = 4, gamma: str = "learned", seed: int = 0,
) -> Simulation:
    """Pre-train Gamma on tau * d sampled prompts, iterate it in fresh test contexts and measure the error at every depth.

    Args:
        alpha, tau, noise, alpha_test, noise_test, step: as in CoTDepthTheory; tau may be any number > 0, inf uses Gamma = c I.
        ridge: penalty in pre-training, see ``pretrain``.
        draws: independent pre-trainings; contexts: test prompts of each.
        gamma: ``learned``; ``scalar`` keeps only its mean diagonal (no estimation error in any direction); ``symmetric`` its symmetric part.

    Raises: InputError for values outside these ranges; RunError when an error is not a number.

    >>> run = simulate(2.0, 4.0, d=100, depth=2, draws=2, contexts=2, seed=1)
    >>> run.error.shape, bool(abs(run.error.mean((0, 1))[1] - 0.444) < 0.05)
    ((2, 2, 3), True)
    """
    alpha, noise = check_alpha(alpha), check_noise(noise)
    context = alpha if alpha_test is None else check_alpha(alpha_test, "alpha_test")
    label = noise if noise_test is None else check_noise(noise_test, "noise_test")
    tau = number("tau", tau, "numbers > 0; inf for unlimited pre-training", lambda x: x > 0)
    d, draws, contexts, depth = _count("d", d, 2), _count("draws", draws), _count("contexts", contexts), _count("depth", depth, 0)
    if gamma not in ("learned", "scalar", "symmetric"):
        raise InputError("gamma", got=gamma, allowed="'learned', 'scalar' or 'symmetric'")
    n, n_test = max(2, round(alpha * d)), max(2, round(context * d))
    signal, extra = np.empty((draws, contexts, depth + 1)), np.empty((draws, contexts, depth + 1))
    references: list[dict[str, np.ndarray]] = []
    for draw in range(draws):
        matrix = _gamma(alpha, tau, noise, n, d, ridge, gamma, [seed, draw, 0])
        for context_index in range(contexts):
            s = sample_covariance(n_test, d, seed=[seed, draw, 1 + context_index])
            signal[draw, context_index], extra[draw, context_index] = exact_errors(matrix, s, depth, n=n_test, noise=label, step=step)
            references.append(context_baselines(s, depth, n=n_test, noise=label))
    if np.isnan(signal).any() or np.isnan(extra).any():
        raise RunError("simulation", got="errors that are not numbers", hint="fewer steps: the iteration has left the range of floating point")
    baselines = {key: np.stack([one[key] for one in references]).reshape(draws, contexts, *references[0][key].shape) for key in references[0]}
    return Simulation(signal, extra, baselines)


def _gamma(alpha, tau, noise, n, d, ridge, kind, seed) -> np.ndarray:
    if math.isinf(tau):
        return np.eye(d) / (1 + (1 + noise) / alpha)
    phi, w = sample_moments(max(1, round(tau * d)), n, d, noise=noise, seed=seed)
    matrix = pretrain(phi, w, ridge=ridge)
    if kind == "scalar":
        return np.eye(d) * np.trace(matrix) / d
    return (matrix + matrix.T) / 2 if kind == "symmetric" else matrix


def sample_step_matrix(alpha: float, tau: float, noise: float = 0.0, *, step: float = 1.0, d: int = 150, seed: int = 0) -> np.ndarray:
    """One sampled M = I - step Gamma S, (d, d): its eigenvalues against the circle of radius sqrt(Lambda) show where depth amplifies errors.

    >>> sample_step_matrix(2.0, 4.0, d=30).shape
    (30, 30)
    """
    alpha, noise, d = check_alpha(alpha), check_noise(noise), _count("d", d, 2)
    tau = number("tau", tau, "numbers > 0", lambda x: x > 0)
    n = max(2, round(alpha * d))
    matrix = _gamma(alpha, tau, noise, n, d, 0.0, "learned", [seed, 0])
    return np.eye(d) - _step(step) * matrix @ sample_covariance(n, d, seed=[seed, 1])


# ---- the predictor ----


class WeightPredictor:
    """In-context weight prediction with chain-of-thought depth, with the interface of a scikit-learn estimator.

    ``fit`` learns the one-step matrix ``gamma_`` from prompts whose weights are known; ``predict`` refines its answer ``depth`` times.

    Args:
        step: step size in (0, 1].
        ridge: penalty in pre-training, see ``pretrain``; a small one is the antidote to overthinking.

    >>> x, y, w = sample_prompts(400, 40, 10, seed=0)
    >>> model = WeightPredictor(step=0.8).fit(x[:300], y[:300], w[:300])
    >>> errors = model.error(x[300:], y[300:], w[300:], depth=6)
    >>> bool(errors[6] < errors[1] < errors[0])
    True
    """

    def __init__(self, *, step: float = 1.0, ridge: float = 0.0):
        self.step = step
        self.ridge = ridge

    def __repr__(self) -> str:
        return f"WeightPredictor(step={self.step!r}, ridge={self.ridge!r})"

    def get_params(self, deep: bool = True) -> dict[str, float]:
        """The arguments of the constructor by name."""
        return {"step": self.step, "ridge": self.ridge}

    def set_params(self, **params: float) -> WeightPredictor:
        """Change arguments of the constructor; InputError for others."""
        for name, value in params.items():
            if name not in self.get_params():
                raise InputError("parameter", got=name, allowed=", ".join(self.get_params()))
            setattr(self, name, value)
        return self

    def fit(self, X: np.ndarray, y: np.ndarray, w: np.ndarray) -> WeightPredictor:
        """Learn ``gamma_`` (d, d) from X (prompts, n, d), y (prompts, n) and w (prompts, d)."""
        _step(self.step)
        X, y = self._prompts(X, y)
        w = np.asarray(w, dtype=float)
        if w.shape != (len(X), X.shape[-1]):
            raise InputError("w", got=f"shape {w.shape}", allowed=f"({len(X)}, {X.shape[-1]}), the weights of every prompt")
        self.gamma_ = pretrain(np.einsum("pnd,pn->pd", X, y) / X.shape[1], w, ridge=self.ridge)
        self.n_features_in_ = X.shape[-1]
        return self

    def predict(self, X: np.ndarray, y: np.ndarray, *, depth: int = 1, return_path: bool = False) -> np.ndarray:
        """Weights after ``depth`` steps from zero: (prompts, d), or (d,) for one prompt X (n, d), y (n,).

        ``return_path`` gives all steps, (depth + 1, prompts, d) or (depth + 1, d).
        Raises: InputError before ``fit``, for another number of features or shapes that do not match.
        """
        if not hasattr(self, "gamma_"):
            raise InputError("WeightPredictor", got="predict before fit", allowed="fit(X, y, w) first")
        single = np.ndim(X) == 2
        X, y = self._prompts(np.asarray(X)[None], np.asarray(y)[None]) if single else self._prompts(X, y)
        if X.shape[-1] != self.n_features_in_:
            raise InputError("X", got=f"{X.shape[-1]} features", allowed=f"{self.n_features_in_}, as in fit")
        w = np.zeros((len(X), X.shape[-1]))
        path = [w]
        for _ in range(_count("depth", depth, 0)):
            residual = y - np.einsum("pnd,pd->pn", X, w)
            w = w + _step(self.step) * np.einsum("pnd,pn->pd", X, residual) / X.shape[1] @ self.gamma_.T
            path.append(w)
        out = np.stack(path) if return_path else w
        return out[..., 0, :] if single else out

    def error(self, X: np.ndarray, y: np.ndarray, w: np.ndarray, *, depth: int = 1) -> np.ndarray:
        """Mean squared distance to the true weights after 0..depth steps, (depth + 1,)."""
        path = self.predict(X, y, depth=depth, return_path=True)
        return ((path - np.asarray(w)) ** 2).sum(-1).reshape(len(path), -1).mean(1)

    def score(self, X: np.ndarray, y: np.ndarray, w: np.ndarray, *, depth: int = 1) -> float:
        """Share of the weights' squared length that is explained after ``depth`` steps: 1 is perfect, 0 is as good as zeros."""
        return float(1 - self.error(X, y, w, depth=depth)[-1] / (np.asarray(w) ** 2).sum(-1).mean())

    @staticmethod
    def _prompts(X, y) -> tuple[np.ndarray, np.ndarray]:
        X, y = np.asarray(X, dtype=float), np.asarray(y, dtype=float)
        if X.ndim != 3 or y.shape != X.shape[:2] or X.size == 0:
            raise InputError("X and y", got=f"shapes {X.shape} and {y.shape}", allowed="(prompts, n, d) and (prompts, n)")
        if not (np.isfinite(X).all() and np.isfinite(y).all()):
            raise InputError("X and y", got="NaN or infinite values", allowed="finite numbers")
        return X, y
