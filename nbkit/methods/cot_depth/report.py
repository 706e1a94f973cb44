"""Reading the recordings cot-depth-sim and cot-depth-attention, and the comparisons that the verdicts are computed from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval

from .theory import CoTDepthTheory

# Fixed before the runs: how far apart simulation and formula may be at d = 400, at which depths, and where the tolerance applies.
TOLERANCE, AGREEMENT_DEPTH, STABLE = 0.03, 8, 0.97


def t_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Mean of independent values with Student's t interval, made for the few draws of a simulation.

    Raises: InputError for fewer than two values or values that are not finite.

    >>> t_interval([1.0, 2.0, 3.0]).short
    '2.00 [-0.48, 4.48]'
    """
    from scipy.stats import t

    x = np.asarray(values, dtype=float)
    if x.ndim != 1 or x.size < 2 or not np.isfinite(x).all():
        raise InputError("values", got=values, allowed="two or more finite numbers")
    half = float(t.ppf((1 + level) / 2, x.size - 1)) * x.std(ddof=1) / math.sqrt(x.size)
    return Interval(x.mean(), x.mean() - half, x.mean() + half, level, x.size, "t interval over draws")


class Runs:
    """Rows of one recording by group and setting.

    >>> runs = Runs({"rows": [{"group": "tau", "setting": {"alpha": 2.0, "tau": 5.0, "d": 400}, "error": [[[1.0, 0.5]]]}]})
    >>> runs("tau", alpha=2.0, tau=5.0)["error"]
    [[[1.0, 0.5]]]
    """

    def __init__(self, data: Mapping):
        self.data = data

    def group(self, name: str, **setting) -> list[Mapping]:
        """All rows of a group whose settings contain ``setting``; a value of None also matches a setting without that entry."""
        rows = [row for row in self.data["rows"] if row["group"] == name]
        return [row for row in rows if all(row["setting"].get(key) == value for key, value in setting.items())]

    def __call__(self, name: str, **setting) -> Mapping:
        """The one row that matches. Raises: InputError when none or several do."""
        found = self.group(name, **setting)
        if len(found) != 1:
            known = "; ".join(str(row["setting"]) for row in self.group(name)[:6])
            raise InputError(f"row of group {name!r}", got=f"{len(found)} rows with {setting}", allowed=f"one of {known} ...")
        return found[0]


def theory_for(setting: Mapping) -> CoTDepthTheory:
    """The formula for the setting of a row."""
    names = ("noise", "alpha_test", "step")
    return CoTDepthTheory(setting["alpha"], float(setting["tau"]), **{key: setting[key] for key in names if key in setting})


def by_draw(row: Mapping, what: str = "error") -> np.ndarray:
    """Mean over contexts, (draws, ...): the independent units of a row."""
    return np.asarray(row[what], dtype=float).mean(1)


def at_depth(row: Mapping, depth: int) -> Interval:
    """Error of a row at one depth, t interval over draws."""
    return t_interval(by_draw(row)[:, depth])


def describe_setting(setting: Mapping) -> str:
    """A setting as a short label.

    >>> describe_setting({"alpha": 2.0, "tau": 4.0, "noise": 0.5, "d": 400})
    'α 2, τ 4, s² 0.5'
    """
    names = {"alpha": "α", "alpha_test": "α test", "tau": "τ", "noise": "s²", "step": "η"}
    return ", ".join(f"{text} {setting[key]:g}" if not isinstance(setting[key], str) else f"{text} {setting[key]}"
                     for key, text in names.items() if key in setting)


# ---- C1: formula and simulation ----


@dataclass(frozen=True)
class Agreement:
    """Simulation against formula for one setting: ``relative`` difference (mean over draws / formula - 1) by dimension, depths 1 to 8."""

    label: str
    rate: float
    relative: dict[int, list[Interval]]
    passes: bool
    shrinks: bool


def agreement(runs: Runs) -> list[Agreement]:
    """All settings of the group ``agreement``, judged by the rule fixed before the run (see the recipe cot-depth-sim).

    ``passes``: at d = 400 and every depth up to 8 the t interval over draws contains the formula, or they differ by at most 3 % where
    Lambda < 0.97. ``shrinks``: the largest difference over these depths is smaller at d = 400 than at d = 100.
    """
    settings: dict[str, dict[int, Mapping]] = {}
    for row in [*runs.group("agreement"), *runs.group("larger")]:
        settings.setdefault(describe_setting(row["setting"]), {})[row["setting"]["d"]] = row
    out = []
    for label, rows in settings.items():
        theory = theory_for(rows[400]["setting"])
        exact = theory.error(np.arange(1, AGREEMENT_DEPTH + 1))
        relative = {d: [t_interval(column) for column in (by_draw(row)[:, 1 : AGREEMENT_DEPTH + 1] / exact - 1).T] for d, row in sorted(rows.items())}
        near = theory.rate().value < STABLE
        ok = all(v.low <= 0 <= v.high or (near and abs(v.estimate) <= TOLERANCE) for v in relative[400])
        largest = {d: max(abs(v.estimate) for v in values) for d, values in relative.items()}
        out.append(Agreement(label, theory.rate().value, relative, ok, largest[400] < largest[100]))
    return out


# ---- C2: phases ----


def fitted_rate(theory: CoTDepthTheory, first: int = 20, last: int = 200) -> float:
    """Slope of log((E_t - E_inf) sqrt(t)) over depths first..last, which tends to log Lambda; NaN when E_t crosses its limit there.

    >>> theory = CoTDepthTheory(2.0, 1.6)
    >>> abs(fitted_rate(theory) - math.log(theory.rate().value)) < 1e-3
    True
    """
    t, limit = np.arange(first, last + 1), theory.limit()
    gap = theory.error(t) - (limit if math.isfinite(limit) else 0.0)
    if gap.min() <= 0 <= gap.max():
        return math.nan
    return float(np.polyfit(t, np.log(np.abs(gap) * np.sqrt(t)), 1)[0])


def trend(row: Mapping, depth: int) -> Interval:
    """Change of log E per step around a depth, (log E_{t+1} - log E_{t-1}) / 2, t interval over draws: negative while the error falls."""
    log = np.log(by_draw(row))
    return t_interval((log[:, depth + 1] - log[:, depth - 1]) / 2)


# ---- C3: the best depth ----


def power_law(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of y ~ x^p by least squares on logarithms.

    >>> round(power_law([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def explained(x: Sequence[float], y: Sequence[float], *, log: bool) -> float:
    """Share of the variance of y explained by a straight line in log x; ``log``: by a power law of x instead, judged on y itself."""
    x, y = np.log(np.asarray(x, dtype=float)), np.asarray(y, dtype=float)
    fit = np.exp(np.polyval(np.polyfit(x, np.log(y), 1), x)) if log else np.polyval(np.polyfit(x, y, 1), x)
    return float(1 - ((y - fit) ** 2).sum() / ((y - y.mean()) ** 2).sum())


# ---- C5: trained attention ----


@dataclass(frozen=True)
class Follows:
    """A trained curve against its reference: ``rank`` correlation over depths 1 to 8, largest |log ratio| where the reference exceeds 0.01."""

    rank: float
    log_ratio: float

    @property
    def holds(self) -> bool:
        """The rule fixed before the run."""
        return self.rank > 0.9 and self.log_ratio < 0.35


def follows(curve: Sequence[float], reference: Sequence[float]) -> Follows:
    """Compare the errors of a trained layer at depths 0, 1, ... with those of the reduced model on the same prompts.

    >>> follows([1, 0.5, 0.3, 0.2, 0.1, 0.08, 0.06, 0.05, 0.04], [1, 0.5, 0.3, 0.2, 0.1, 0.08, 0.06, 0.05, 0.04]).holds
    True
    """
    from scipy.stats import spearmanr

    ours, theirs = (np.asarray(values, dtype=float)[1 : AGREEMENT_DEPTH + 1] for values in (curve, reference))
    large = theirs > 0.01
    return Follows(float(spearmanr(ours, theirs).statistic), float(np.abs(np.log(ours[large] / theirs[large])).max()))


def best_depths(rows: Iterable[Mapping]) -> list[int]:
    """Depth of the smallest mean error of each row (a seed)."""
    return [int(np.argmin(row["mean"])) for row in rows]


def rises(values: Sequence[float]) -> bool:
    """Whether a sequence never falls and ends above its start.

    >>> rises([2, 2, 3]), rises([2, 3, 2]), rises([2, 2, 2])
    (True, False, False)
    """
    values = list(values)
    return all(a <= b for a, b in zip(values, values[1:], strict=False)) and values[0] < values[-1]


PAPER: dict[str, dict[str, str]] = {
    "C1": {
        "statement": "an exact formula gives the error at every depth, pre-training and context (here: our derivation against simulation)",
        "paper": "theorem and simulations in the proportional limit; its numbers were not available to us",
    },
    "C2": {
        "statement": "a sharp transition separates exponential and polynomial improvement, saturation and overthinking",
        "paper": "four regimes; E_t - E_inf ~ K t^(-1/2) Lambda^t",
    },
    "C3": {
        "statement": "the best depth follows scaling laws (here: exponents of our formula)",
        "paper": "a characterised scaling; its exponents were not available to us",
    },
    "C4": {
        "statement": "depth pays only with rich pre-training and rich context",
        "paper": "little pre-training amplifies errors, little context saturates",
    },
    "C5": {
        "statement": "the predictions also hold for learned linear attention and for softmax attention",
        "paper": "figures; their numbers were not available to us",
    },
}
"""The paper's claims by the ids of the notebook."""
