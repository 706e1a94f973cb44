"""What recovery costs in decoding: ratios and intervals from the recording ``fastprefill-decode``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval, bootstrap, paired

WHAT = ("seconds", "macs", "loss", "entries", "revived")
"""What was recorded for every step; "revived" counts a token once for every layer that it is computed on in."""


class DecodeStudy:
    """The recording's arrays: seconds, macs, loss, entries (methods, prompts, steps) and revived (methods, prompts, steps, layers).

    Raises: InputError when an array is missing or its shape does not fit.

    >>> data = {k: np.ones((2, 3, 4)) for k in ("seconds", "macs", "loss", "entries")}
    >>> data |= {"methods": np.array(["full", "recovery"]), "revived": np.zeros((2, 3, 4, 5)), "prefill_seconds": np.ones((2, 3))}
    >>> study = DecodeStudy({**data, "seconds": data["seconds"] * np.array([2.0, 3.0])[:, None, None]})
    >>> study.ratio("recovery").estimate, study.cumulative("full").tolist()
    (1.5, [1.0, 3.0, 5.0, 7.0, 9.0])
    """

    def __init__(self, data: Mapping[str, Any]):
        lacking = [name for name in (*WHAT, "methods", "prefill_seconds") if name not in data]
        if lacking:
            raise InputError("recording", got=f"no {', '.join(lacking)}", allowed="the arrays of the recipe fastprefill-decode")
        self.methods = tuple(str(m) for m in data["methods"])
        self.data = {name: np.asarray(data[name], dtype=float) for name in (*WHAT, "prefill_seconds")}
        self.data["revived"] = self.data["revived"].sum(-1)
        shape = self.data["seconds"].shape
        wrong = [name for name in WHAT if self.data[name].shape != shape]
        if wrong or len(shape) != 3 or shape[0] != len(self.methods):
            raise InputError("recording", got=f"{wrong or 'seconds'} {shape}", allowed=f"({len(self.methods)} methods, prompts, steps)")
        self.prompts, self.steps = shape[1:]

    def values(self, what: str, method: str) -> np.ndarray:
        """One array (prompts, steps).

        Raises: InputError for an unknown name.
        """
        if what not in WHAT:
            raise InputError("what", got=what, allowed=", ".join(WHAT))
        if method not in self.methods:
            raise InputError("method", got=method, allowed=", ".join(self.methods))
        return self.data[what][self.methods.index(method)]

    def ratio(self, method: str, base: str = "full", what: str = "seconds") -> Interval:
        """Ratio of a step to the same step under ``base``: median over the steps of a prompt, mean over prompts with its 95 % interval.

        The steps of all methods were interleaved, so that both sides of a ratio saw the same load of the machine. For MACs, which are exact,
        it is the ratio of sums over steps.
        """
        above, below = self.values(what, method), self.values(what, base)
        each = above.sum(1) / below.sum(1) if what == "macs" else np.median(above / below, axis=1)
        return bootstrap(each, method="expanded" if self.prompts < 20 else "percentile")

    def difference(self, method: str, base: str = "full", what: str = "loss") -> Interval:
        """Mean of ``method`` - ``base`` over steps and prompts, paired by prompt."""
        a, b = (self.values(what, m).mean(1) for m in (method, base))
        return paired(a, b, method="expanded" if self.prompts < 20 else "percentile")

    def cumulative(self, method: str) -> np.ndarray:
        """Median over prompts of the seconds after the prefill and after every step: (steps + 1,)."""
        first = self.data["prefill_seconds"][self.methods.index(method)]
        total = first[:, None] + np.concatenate([np.zeros((self.prompts, 1)), self.values("seconds", method).cumsum(1)], 1)
        return np.median(total, axis=0)

    def rows(self) -> list[dict[str, Any]]:
        """One dict a method: time and MAC ratio of a step to the full model's, extra loss, tokens revived a step, entries at the end."""
        return [
            {
                "method": method, "seconds": self.ratio(method), "macs": self.ratio(method, what="macs"), "loss": self.difference(method),
                "revived": float(self.values("revived", method).mean()), "entries": float(self.values("entries", method)[:, -1].mean()),
            }
            for method in self.methods if method != "full"
        ]
