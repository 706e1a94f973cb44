"""The offline optimiser: which share of the prompt every layer keeps, so that the expected loss is smallest under a limit on cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbkit.errors import InputError, RunError
from nbkit.methods.fastprefill.schedule import PruneSchedule

# Of equal losses the schedule that keeps more rows: worth this much loss for one layer at full length.
_TIE = 1e-7
# Loss of a drop before the first measured layer: finite, so that differences stay numbers.
FORBIDDEN = 1e6


class Planner:
    """Optimal schedules for one table of losses, one prompt length and one cost; one pass answers every latency budget.

    table: (layers, rates) or (tasks, layers, rates) expected extra loss, nats per answer token, when from that layer on only that share is kept;
        layer 0 is never read. rates: shares, one of them 1 (its losses count as 0).
    cost: object with layer(rows) and scoring(rows), such as MacCost or LatencyModel; scoring is charged at every drop.
    floor: rows that no layer goes below. buckets: cost steps a full layer, to which costs of thinned layers are rounded *up*.
    scored: "drop" charges the scores before each drop, "all" those of every layer (for scores that remember earlier layers).
    Raises: InputError for shapes that do not fit, rates without 1 or out of (0, 1], or a table with NaN.
    Source: reconstruction of FastPrefill, section 3.5: V_l(i, b) = min_{j <= i} V_{l-1}(j, b - cost_l(r_i)) + D_l(r_i) - D_l(r_j).

    >>> from nbkit.methods.fastprefill.cost import MacCost, ModelShape
    >>> cost = MacCost(ModelShape(4, 8, 2, 1, 4, 16, 100))
    >>> table = np.array([[0, 0, 0], [0.9, 0.6, 0], [0.5, 0.1, 0], [0.2, 0.05, 0]])
    >>> plan = Planner(table, (0.25, 0.5, 1.0), tokens=64, cost=cost)
    >>> plan.solve(0.75).ratios, plan.solve(1.0).ratios
    ((1.0, 1.0, 0.5, 0.25), (1.0, 1.0, 1.0, 1.0))
    """

    def __init__(self, table: Any, rates: Sequence[float], *, tokens: int, cost: Any, floor: int = 1, buckets: int = 100, scored: str = "drop"):
        rates = np.asarray(rates, dtype=float)
        order = np.argsort(-rates)
        self.rates = rates[order]
        if rates.ndim != 1 or not len(rates) or self.rates[0] != 1 or not (self.rates > 0).all() or len(set(rates.tolist())) != len(rates):
            raise InputError("rates", got=rates.tolist(), allowed="different shares in (0, 1], one of them 1")
        tables = np.asarray(table, dtype=float)
        tables = tables[None] if tables.ndim == 2 else tables
        if tables.ndim != 3 or tables.shape[-1] != len(rates) or tables.shape[1] < 1:
            raise InputError("table", got=np.shape(table), allowed=f"([tasks,] layers, {len(rates)} rates)")
        if np.isnan(tables[:, 1:]).any():
            raise InputError("table", got="NaN", allowed="numbers", hint="a layer or rate was not measured: smooth() fills the grid")
        if scored not in ("drop", "all"):
            raise InputError("scored", got=scored, allowed="drop, all")
        if buckets < 1:
            raise InputError("buckets", got=buckets, allowed=">= 1")
        self.tables = np.minimum(tables[:, :, order], FORBIDDEN)
        self.tables[:, :, 0] = 0
        self.tables[:, 0] = 0
        self.layers, self.tokens, self.floor, self.buckets, self.scored = tables.shape[1], tokens, floor, buckets, scored
        self.rows = np.array(PruneSchedule((1.0, *self.rates)).counts(tokens, floor)[1:])
        self.price = np.array([cost.layer(int(n)) for n in self.rows])
        self.fee = np.array([cost.scoring(int(n)) for n in self.rows])
        self.full_cost = self.layers * float(self.price[0])
        # A full layer is a whole number of buckets, so that full prefill costs exactly what it is allowed at tau = 1.
        unit = self.price[0] / buckets
        plain, wide = (np.ceil(x / unit - 1e-9).astype(int) for x in (self.price, self.price + self.fee))
        drops = [(old, new) for new in range(len(self.rates)) for old in range(new)]
        stays = [(rate, rate) for rate in range(len(self.rates))]
        # Steps (phase before, phase after, rate before, rate after, buckets). With scored = "all" phase 0 will drop again and phase 1 will not, so
        # that every layer before the last drop pays for its scores; otherwise the layer before a drop pays, with that drop.
        if scored == "all":
            self._steps = [(0, 0, a, b, int(wide[b])) for a, b in drops + stays]
            self._steps += [(0, 1, a, b, int(plain[b])) for a, b in drops] + [(1, 1, a, b, int(plain[b])) for a, b in stays]
            self._starts = ((0, int(wide[0])), (1, int(plain[0])))
        else:
            fees = np.ceil((self.price[None] + self.fee[:, None]) / unit - 1e-9).astype(int)
            self._steps = [(0, 0, a, b, int(fees[a, b])) for a, b in drops] + [(0, 0, a, b, int(plain[b])) for a, b in stays]
            self._starts = ((0, int(plain[0])),)
        self._memory: dict[bytes, np.ndarray] = {}

    # Costs and losses of a given schedule.

    def cost(self, schedule: PruneSchedule) -> float:
        """Exact cost of a schedule on the grid of rates, scoring included, in the unit of the cost object."""
        index = self._index(schedule)
        drops = [a for a, b in zip(index[:-1], index[1:], strict=True) if b > a]
        if self.scored == "all":
            last = max((layer for layer in range(1, self.layers) if index[layer] > index[layer - 1]), default=0)
            fees = sum(self.fee[i] for i in index[:last])
        else:
            fees = sum(self.fee[i] for i in drops)
        return float(sum(self.price[i] for i in index) + fees)

    def loss(self, schedule: PruneSchedule, *, objective: str = "mean") -> float:
        """Expected extra loss of a schedule: the sum over layers of D_l(r_l) - D_l(r_{l-1}); ratios between grid rates are interpolated."""
        losses = surrogate(self.tables, self.rates, schedule)
        return float(losses.max() if objective == "worst" else losses.mean())

    def _index(self, schedule: PruneSchedule) -> list[int]:
        schedule.check(self.layers)
        index = [int(np.argmin(np.abs(self.rates - r))) for r in schedule.ratios]
        if any(abs(self.rates[i] - r) > 1e-9 for i, r in zip(index, schedule.ratios, strict=True)):
            raise InputError("schedule", got=str(schedule), allowed=f"ratios out of {self.rates.tolist()}")
        return index

    # Solving.

    def solve(self, tau: float, *, objective: str = "mean", rounds: int = 16) -> PruneSchedule:
        """The schedule with the smallest expected loss at a cost of at most ``tau`` times full prefill.

        objective: "mean" over tasks (exact), or "worst": smallest loss of the worst task, by ``rounds`` of multiplicative weights on tasks;
            meta then has ``bound``, which no schedule on the grid can beat.
        Raises: InputError for tau outside (0, 1] or an unknown objective; RunError when no schedule on the grid is that cheap.
        """
        limit = self._limit(tau)
        if objective == "mean":
            ratios = self._walk(self.tables.mean(0), limit)
            return self._named(ratios, tau, objective)
        if objective != "worst":
            raise InputError("objective", got=objective, allowed="mean, worst")
        weights = np.full(len(self.tables), 1 / len(self.tables))
        best, best_loss, bound = None, math.inf, -math.inf
        for _ in range(rounds if len(self.tables) > 1 else 1):
            ratios = self._walk(np.tensordot(weights, self.tables, 1), limit)
            losses = surrogate(self.tables, self.rates, PruneSchedule(ratios))
            bound = max(bound, float(weights @ losses))
            if losses.max() < best_loss - 1e-12:
                best, best_loss = ratios, float(losses.max())
            scale = max(float(np.ptp(losses)), 1e-9)
            weights = weights * np.exp((losses - losses.max()) / scale)
            weights /= weights.sum()
        return self._named(best, tau, objective, bound=bound)

    def lagrangian(self, tau: float, *, steps: int = 40) -> PruneSchedule:
        """The same by bisecting the price of cost: never better than solve(), and equal to it on the convex hull of (cost, loss)."""
        self._limit(tau)
        table, limit = self.tables.mean(0), tau * self.full_cost * (1 + 1e-12)
        low, high = 0.0, 1.0
        best = self._priced(table, high)
        while self.cost(PruneSchedule(best)) > limit:
            if high > 1e12:
                raise RunError("no schedule on this grid is that cheap", got=f"tau = {tau:g}", hint="a larger latency budget or smaller rates")
            low, high = high, high * 8
            best = self._priced(table, high)
        for _ in range(steps):
            price = (low + high) / 2
            ratios = self._priced(table, price)
            if self.cost(PruneSchedule(ratios)) <= limit:
                best, high = ratios, price
            else:
                low = price
        return self._named(best, tau, "mean", solver="lagrangian")

    def _limit(self, tau: float) -> int:
        if not 0 < tau <= 1:
            raise InputError("latency budget", got=tau, allowed="a share of full prefill in (0, 1]")
        return math.floor(tau * self.layers * self.buckets + 1e-6)

    def _named(self, ratios: Sequence[float], tau: float, objective: str, **meta: Any) -> PruneSchedule:
        schedule = PruneSchedule(tuple(ratios))
        about = {"rule": "optimised", "tau": tau, "objective": objective, "tokens": self.tokens, "floor": self.floor}
        return schedule.with_loss(self.loss(schedule, objective=objective), **about, cost_share=self.cost(schedule) / self.full_cost, **meta)

    def _reach(self, table: np.ndarray) -> np.ndarray:
        """V[layer, phase, rate, bucket]: smallest loss of layers 0..layer at exactly that rounded cost, inf where none."""
        key = table.tobytes()
        if key in self._memory:
            return self._memory[key]
        most = self.layers * self.buckets
        value = np.full((self.layers, len(self._starts), len(self.rates), most + 1), np.inf)
        for phase, bucket in self._starts:
            if bucket <= most:
                value[0, phase, 0, bucket] = 0.0
        widest = max(step[-1] for step in self._steps)
        for layer in range(1, self.layers):
            before, now = value[layer - 1], value[layer]
            # Buckets that a prefix of this many layers can reach.
            used = min(most, (layer + 1) * widest) + 1
            for phase, after, old, new, shift in self._steps:
                if shift < used:
                    target = now[after, new, shift:used]
                    np.minimum(target, before[phase, old, : used - shift] + self._change(table, layer, old, new), out=target)
        # One table is asked for many budgets; a handful covers the tasks and their mean.
        if len(self._memory) >= 4:
            self._memory.pop(next(iter(self._memory)))
        self._memory[key] = value
        return value

    def _change(self, table: np.ndarray, layer: int, old: int, new: int) -> float:
        return float(table[layer, new] - table[layer, old] + _TIE * (1 - self.rates[new]))

    def _walk(self, table: np.ndarray, limit: int) -> tuple[float, ...]:
        value = self._reach(table)
        last = value[-1, -1][:, : limit + 1]
        if not np.isfinite(last).any():
            raise RunError(
                "no schedule on this grid is that cheap", got=f"limit {limit / (self.layers * self.buckets):.3f} of full prefill",
                allowed=f">= {self.cheapest:.3f}", hint="a larger latency budget, smaller rates or a smaller floor",
            )
        rate, bucket = (int(i) for i in np.unravel_index(int(np.argmin(last)), last.shape))
        if last[rate, bucket] > FORBIDDEN / 2:
            raise RunError("the budget asks for a drop before the first measured layer", hint="a larger latency budget, or more layers in the grid")
        path, phase = [rate], len(self._starts) - 1
        for layer in range(self.layers - 1, 0, -1):
            options = [
                (value[layer - 1, start, old, bucket - shift] + self._change(table, layer, old, new), start, old, shift)
                for start, after, old, new, shift in self._steps if after == phase and new == path[-1] and shift <= bucket
            ]
            _, phase, old, shift = min(options)
            bucket -= shift
            path.append(old)
        return tuple(float(self.rates[i]) for i in reversed(path))

    @property
    def cheapest(self) -> float:
        """Cost of the cheapest schedule on the grid as a share of full prefill: everything dropped after layer 0."""
        rest = self.price[-1] * (self.layers - 1) + (self.fee[0] if self.layers > 1 else 0)
        return float((self.price[0] + rest) / self.full_cost)

    def _priced(self, table: np.ndarray, price: float) -> tuple[float, ...]:
        """Smallest loss + price * cost / full cost, layer by layer."""
        count = len(self.rates)
        layer_price, fee = price * self.price / self.full_cost, price * self.fee / self.full_cost
        lower = np.tril(np.ones((count, count), bool))
        score = np.where(np.arange(count) == 0, layer_price[0], np.inf)
        back = []
        for layer in range(1, self.layers):
            # options[new, old]
            options = np.where(lower, score[None] + table[layer][:, None] - table[layer][None], np.inf)
            options = options + np.where(np.tril(lower, -1), fee[None], 0.0)
            back.append(options.argmin(1))
            score = options.min(1) + layer_price + _TIE * (1 - self.rates)
        path = [int(score.argmin())]
        for choice in reversed(back):
            path.append(int(choice[path[-1]]))
        return tuple(float(self.rates[i]) for i in reversed(path))


def surrogate(table: Any, rates: Sequence[float], schedule: PruneSchedule) -> np.ndarray:
    """Expected extra loss of any schedule, one number a task: sum over layers of D_l(r_l) - D_l(r_{l-1}).

    table: ([tasks,] layers, rates); losses between two rates are interpolated, below the smallest rate they stay at its value.

    >>> table = [[0, 0], [0.4, 0.0], [0.1, 0.0]]
    >>> surrogate(table, (0.5, 1.0), PruneSchedule((1.0, 1.0, 0.75))).tolist()
    [0.05]
    """
    tables = np.asarray(table, dtype=float)
    tables = tables[None] if tables.ndim == 2 else tables
    rates = np.asarray(rates, dtype=float)
    order = np.argsort(rates)
    schedule.check(tables.shape[1])
    losses = np.zeros(len(tables))
    for layer, _ in schedule.drops:
        ends = (schedule.ratios[layer], schedule.ratios[layer - 1])
        for task, rows in enumerate(tables[:, layer]):
            harm = np.where(rates[order] == 1, 0.0, rows[order])
            after, before = np.interp(ends, rates[order], harm)
            losses[task] += after - before
    return losses


def best_one_shot(planner: Planner, tau: float, *, layers: Sequence[int] | None = None) -> PruneSchedule:
    """The single drop with the smallest mean loss in the table whose cost is at most ``tau``: the hand-made schedule tuned on the same data.

    layers: where a drop may lie (default: all after the first).
    Raises: RunError when no single drop is that cheap.
    """
    limit, table = tau * planner.full_cost, planner.tables.mean(0)
    found = []
    for layer in layers if layers is not None else range(1, planner.layers):
        for index, rate in enumerate(planner.rates[1:].tolist(), start=1):
            schedule = PruneSchedule.one_shot(layer, rate, planner.layers)
            if planner.cost(schedule) <= limit * (1 + 1e-12):
                found.append((float(table[layer, index]), -sum(schedule.ratios), schedule))
    if not found:
        raise RunError("no single drop on this grid is that cheap", got=f"tau = {tau:g}", hint="a larger latency budget or smaller rates")
    loss, _, schedule = min(found, key=lambda item: item[:2])
    return schedule.with_loss(loss, tau=tau, tuned=True)


def refine(
    schedule: PruneSchedule, evaluate: Callable[[PruneSchedule], float], planner: Planner, tau: float, *, max_evaluations: int = 50,
) -> tuple[PruneSchedule, list[dict[str, Any]]]:
    """Coordinate moves on *measured* loss: a drop one layer earlier or later, one step of its rate, or one such move that pays for another.

    evaluate: schedule -> mean calibration loss. Moves within the limit are tried in the order of their expected loss; the first that measures
    better is taken. Returns the best schedule and the history of all evaluations (at most ``max_evaluations``).
    Raises: InputError for fewer than one evaluation.
    """
    if max_evaluations < 1:
        raise InputError("max_evaluations", got=max_evaluations, allowed=">= 1")
    limit = tau * planner.full_cost * (1 + 1e-12)
    best = evaluate(schedule)
    history = [{"ratios": list(schedule.ratios), "loss": best, "accepted": True}]
    seen = {schedule.ratios}
    improved = True
    while improved and len(history) < max_evaluations:
        improved = False
        singles = _moves(schedule, planner)
        pairs = [second for first in singles for second in _moves(first, planner)]
        near = {s.ratios: s for s in singles + pairs if s.ratios not in seen and planner.cost(s) <= limit}
        for candidate in sorted(near.values(), key=planner.loss):
            if len(history) >= max_evaluations:
                break
            seen.add(candidate.ratios)
            loss = evaluate(candidate)
            history.append({"ratios": list(candidate.ratios), "loss": loss, "accepted": loss < best})
            if loss < best:
                schedule, best, improved = candidate.with_loss(planner.loss(candidate), **schedule.meta), loss, True
                break
    return schedule.with_loss(schedule.predicted_loss, refined_loss=best, evaluations=len(history)), history


def _moves(schedule: PruneSchedule, planner: Planner) -> list[PruneSchedule]:
    """Neighbours of a schedule on the grid: one drop one layer earlier or later, or one grid step more or less."""
    index, out = planner._index(schedule), []
    edges = [layer for layer in range(1, len(index)) if index[layer] > index[layer - 1]]
    for at, edge in enumerate(edges):
        end = edges[at + 1] if at + 1 < len(edges) else len(index)
        if edge > 1:
            out.append(_changed(index, edge - 1, edge, index[edge]))
        out.append(_changed(index, edge, edge + 1, index[edge - 1]))
        if index[edge] + 1 < len(planner.rates):
            out.append(_changed(index, edge, end, index[edge] + 1))
        out.append(_changed(index, edge, end, index[edge] - 1))
    valid = [new for new in out if all(a <= b for a, b in zip(new[:-1], new[1:], strict=True))]
    return [PruneSchedule(tuple(float(planner.rates[i]) for i in new)) for new in valid]


def _changed(index: list[int], start: int, stop: int, value: int) -> list[int]:
    return [value if start <= layer < stop else i for layer, i in enumerate(index)]
