"""The abstract's claims, and the numbers that the recordings ``fastprefill-grid`` and ``prefill-timing`` give for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.metrics import Interval, bootstrap, paired, slope

PAPER: dict[str, dict[str, str]] = {
    "C1": {"statement": "prefill dominates the time to first token in long-context local use", "paper": "no number in the abstract"},
    "C2": {"statement": "sparse attention leaves the FFN's cost, so its gain is capped", "paper": "no number in the abstract"},
    "C3": {
        "statement": "letting a second model choose the tokens loses quality when memory is tight (here: at equal prefill cost, draft included)",
        "paper": "no number in the abstract",
    },
    "C4": {"statement": "hand-made pruning schedules are worse than optimised ones at equal cost", "paper": "no number in the abstract"},
    "C4b": {
        "statement": "a schedule calibrated on a mix of tasks transfers; specialised ones do not",
        "paper": "not a claim of the abstract; follows from the data-driven optimiser",
    },
    "C5": {
        "statement": "recovering dropped tokens slows decoding; a recovery-free cache does not",
        "paper": "the end-to-end gain (3.03x) is larger than that of the time to first token (2.13x)",
    },
    "C6": {"statement": "keys chosen by each head keep the quality", "paper": "no number in the abstract"},
    "C7": {"statement": "quality stays comparable on long-context tasks", "paper": "LongBench and RULER, no number in the abstract"},
    "C8": {
        "statement": "faster time to first token (here: over full prefill)",
        "paper": "up to 2.13x (3.03x end to end) over other accelerators, not over full prefill",
    },
}
"""The claims and numbers of the abstract, by the ids of the notebook; the paper's body is not public."""

HEURISTICS = ("one-shot-middle", "linear", "cosine", "fitprune")
"""Schedules that are not tuned on measured losses; "single-best" is the tuned one."""

QUALITY_NATS, QUALITY_POINTS = 0.05, 5.0
"""What counts as equal quality: mean extra loss per answer token, and lost points of exact answers."""


class Grid:
    """Cells of ``fastprefill-grid`` by name: one number per prompt, in the order of ``prompts``.

    >>> data = {"prompts": ["a", "b"], "kinds": ["needle", "qa"]}
    >>> data["cells"] = {"full": {"nll": {"a": 1.0, "b": 2.0}}, "x": {"nll": {"a": 1.5, "b": 2.0}}}
    >>> Grid(data).extra("x").tolist(), Grid(data).names
    ([0.5, 0.0], ('full', 'x'))
    """

    def __init__(self, data: Mapping[str, Any]):
        self.data = data
        self.prompts = list(data["prompts"])
        self.kinds = dict(zip(self.prompts, data["kinds"], strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """All cells."""
        return tuple(self.data["cells"])

    def values(self, what: str, cell: str, prompts: Sequence[str] | None = None) -> np.ndarray:
        """``what`` (nll, exact, macs, density, evidence) of one cell for these prompts (default: all prompts of the cell).

        Raises: InputError for an unknown cell, or a prompt that it did not answer.
        """
        if cell not in self.data["cells"]:
            raise InputError("cell", got=cell, allowed=", ".join(self.names), hint="only recorded cells can be looked up")
        found = self.data["cells"][cell][what]
        wanted = self.common(cell) if prompts is None else prompts
        lacking = [p for p in wanted if p not in found]
        if lacking:
            raise InputError(f"prompts of {cell}", got=lacking[:3], allowed=f"{len(found)} others", hint="compare over common(...)")
        return np.array([found[p] for p in wanted], dtype=float)

    def common(self, *cells: str, kinds: Iterable[str] | None = None) -> list[str]:
        """Prompts that all these cells answered, of some tasks."""
        held = [set(self.data["cells"][c]["nll"]) for c in cells if self._known(c)]
        chosen = set(kinds) if kinds is not None else set(self.kinds.values())
        return [p for p in self.prompts if self.kinds[p] in chosen and all(p in h for h in held)]

    def _known(self, cell: str) -> bool:
        if cell not in self.data["cells"]:
            raise InputError("cell", got=cell, allowed=", ".join(self.names))
        return True

    def extra(self, cell: str, *, base: str = "full", kinds: Iterable[str] | None = None) -> np.ndarray:
        """Extra answer loss over ``base``, nats per token, one a prompt."""
        prompts = self.common(cell, base, kinds=kinds)
        return self.values("nll", cell, prompts) - self.values("nll", base, prompts)

    def difference(self, cell: str, other: str, *, what: str = "nll", kinds: Iterable[str] | None = None) -> Interval:
        """Paired difference cell - other over prompts, with its 95 % bootstrap interval."""
        prompts = self.common(cell, other, kinds=kinds)
        return paired(self.values(what, cell, prompts), self.values(what, other, prompts), method=_method(len(prompts)))

    def mean(self, what: str, cell: str, *, kinds: Iterable[str] | None = None) -> Interval:
        """Mean of a cell over its prompts, with its 95 % bootstrap interval."""
        prompts = self.common(cell, kinds=kinds)
        return bootstrap(self.values(what, cell, prompts), method=_method(len(prompts)))

    def cost_share(self, cell: str, *, base: str = "full") -> float:
        """Mean MACs of a cell over those of ``base`` on the same prompts."""
        prompts = self.common(cell, base)
        return float(self.values("macs", cell, prompts).sum() / self.values("macs", base, prompts).sum())

    def rows(self, cells: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """One dict a cell: MAC share, extra loss and lost points of exact answers with intervals, evidence kept, number of prompts."""
        out = []
        for cell in cells if cells is not None else self.names:
            if cell == "full":
                continue
            out.append({
                "cell": cell, "macs": self.cost_share(cell), "nll": self.difference(cell, "full"),
                "points": self.difference(cell, "full", what="exact").scale(100), "evidence": float(self.values("evidence", cell).mean()),
                "prompts": len(self.common(cell, "full")),
            })
        return out

    def beats_heuristics(self, tau: float, heuristics: Sequence[str] = HEURISTICS) -> dict[str, Interval]:
        """C4 at one budget: optimised minus each recorded schedule in answer loss, over the prompts that both answered."""
        found = [name for name in heuristics if f"{name}@{tau:g}" in self.names]
        return {name: self.difference(f"optimised@{tau:g}", f"{name}@{tau:g}") for name in found}

    def budgets_won(self, heuristics: Sequence[str] = HEURISTICS) -> dict[float, bool]:
        """C4: whether at each budget the optimised schedule beats all of ``heuristics`` with the whole interval; False where one is missing."""
        won = {}
        for tau in self.data["taus"]:
            gains = self.beats_heuristics(tau, heuristics)
            won[tau] = len(gains) == len(heuristics) and all(gain.high < 0 for gain in gains.values())
        return won

    def granularity(self, granularity: str, budget: float) -> Interval:
        """C6: answer loss with that granularity ("kv", "query") minus that with shared key sets, at the same budget a head."""
        return self.difference(f"heads-{granularity}@{budget:g}", f"heads-shared@{budget:g}")

    def quality(self, cell: str) -> list[dict[str, Any]]:
        """C7: extra loss and lost points of a cell for every task and for all ("all")."""
        kinds = sorted({self.kinds[p] for p in self.common(cell, "full")})
        out = []
        for name, chosen in [("all", None), *((k, [k]) for k in kinds)]:
            out.append({
                "task": name, "nll": self.difference(cell, "full", kinds=chosen),
                "points": self.difference(cell, "full", what="exact", kinds=chosen).scale(100),
                "prompts": len(self.common(cell, "full", kinds=chosen)),
            })
        return out


def frontier(grid: Grid, cells: Iterable[str], *, nats: float = QUALITY_NATS, points: float = QUALITY_POINTS) -> list[dict[str, Any]]:
    """Rows of the cells that answered all prompts with a mean extra loss and mean lost points within the limits, cheapest first."""
    every = len(grid.common("full"))
    rows = [r for r in grid.rows(cells) if r["prompts"] == every and r["nll"].estimate <= nats and r["points"].estimate >= -points]
    return sorted(rows, key=lambda row: row["macs"])


class Timing:
    """Interleaved timings of ``prefill-timing``: seconds by round of every method at every length.

    >>> data = {"lengths": [512], "seconds": {"512": {"full": [1.0, 2.0], "x": [0.5, 1.0]}}, "macs": {"512": {"full": 4.0, "x": 2.0}}}
    >>> Timing(data).ratio("x", 512).estimate, Timing(data).mac_ratio("x", 512)
    (2.0, 2.0)
    """

    def __init__(self, data: Mapping[str, Any]):
        self.data = data
        self.lengths = list(data["lengths"])

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that were timed at every length."""
        tables = [self.data["seconds"][str(n)] for n in self.lengths]
        return tuple(m for m in tables[0] if all(m in t for t in tables))

    def seconds(self, method: str, tokens: int) -> np.ndarray:
        """Time to first token of every round.

        Raises: InputError for a method or length that was not timed.
        """
        table = self.data["seconds"].get(str(tokens))
        if table is None or method not in table:
            known = ", ".join(table) if table else ", ".join(map(str, self.lengths))
            raise InputError("timing", got=(method, tokens), allowed=known)
        return np.asarray(table[method], dtype=float)

    def ratio(self, method: str, tokens: int, *, base: str = "full") -> Interval:
        """Speed-up over ``base``: median over rounds of base / method within the round, with a bootstrap interval over rounds."""
        ratios = self.seconds(base, tokens) / self.seconds(method, tokens)
        return bootstrap(ratios, stat=_median, method=_method(len(ratios)))

    def mac_ratio(self, method: str, tokens: int, *, base: str = "full") -> float:
        """Speed-up in MACs."""
        table = self.data["macs"][str(tokens)]
        return float(table[base] / table[method])

    def rows(self, *, base: str = "full") -> list[dict[str, Any]]:
        """One dict a method and length: median seconds, measured and MAC speed-up."""
        return [
            {"method": m, "tokens": n, "seconds": float(np.median(self.seconds(m, n))), "speed_up": self.ratio(m, n, base=base),
             "mac_speed_up": self.mac_ratio(m, n, base=base)}
            for n in self.lengths for m in self.methods
        ]

    def prefill_share(self, steps: int = 32) -> tuple[list[int], np.ndarray]:
        """C1: lengths and (lengths, rounds) share of prefill in the time of prefill and ``steps`` decoding steps."""
        table = self.data["decode"]
        lengths = sorted(int(n) for n in table)
        prefill = np.array([table[str(n)]["prefill"] for n in lengths], dtype=float)
        step = np.array([table[str(n)]["step"] for n in lengths], dtype=float)
        return lengths, prefill / (prefill + steps * step)

    def prefill_slope(self, steps: int = 32) -> Interval:
        """C1: rise of that share per doubling of the prompt, bootstrap over rounds."""
        lengths, shares = self.prefill_share(steps)
        rounds = np.tile(np.arange(shares.shape[1]), (len(lengths), 1))
        x = np.tile(np.log2(lengths)[:, None], (1, shares.shape[1]))
        return slope(x.ravel(), shares.ravel(), cluster=rounds.ravel(), method=_method(shares.shape[1]))

    def without_attention(self, tokens: int) -> dict[str, Any]:
        """C2: gain of a prefill whose attention costs nothing, the bound 1 / (1 - attention share) + 10 %, and the FFN's time ratio."""
        split = self.data["split"][str(tokens)]
        full, without = np.asarray(split["full"], float), np.asarray(split["without"], float)
        share = float(split["attention_share"])
        ffn = np.asarray(split["ffn_without"], float) / np.asarray(split["ffn_full"], float)
        method = _method(len(ffn))
        return {
            "gain": bootstrap(full / without, stat=_median, method=method), "bound": 1 / (1 - share), "limit": 1.1 / (1 - share),
            "ffn": bootstrap(ffn, stat=_median, method=method),
        }

    def step_ratio(self, method: str, base: str = "full") -> Interval:
        """C5: decoding step time of ``method`` over that of ``base``, median over rounds."""
        table = self.data["steps"]["seconds"]
        ratios = np.asarray(table[method], float) / np.asarray(table[base], float)
        return bootstrap(ratios, stat=_median, method=_method(len(ratios)))


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _method(units: int) -> str:
    # The percentile interval of a few units is too short; "expanded" corrects for that.
    return "percentile" if units >= 20 else "expanded"
