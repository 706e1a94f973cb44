"""What the panels show: schedules for a latency budget, the work of a prefill, which tokens die where, and what each head's keys recall."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbkit.errors import InputError
from nbkit.methods.fastprefill.cost import MacCost, Macs, ModelShape, banded_pairs, prefill_macs, schedule_macs
from nbkit.methods.fastprefill.optimise import Planner, surrogate
from nbkit.methods.fastprefill.report import Grid
from nbkit.methods.fastprefill.schedule import PruneSchedule, match_cost
from nbkit.methods.fastprefill.sensitivity import SensitivityTable
from nbkit.methods.fastprefill.stored import LayerRunner, Replay, Stored

BLUE, ORANGE, GREEN, PURPLE, AMBER, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"
FAMILIES = ("optimised", "one-shot-middle", "linear", "cosine")
"""Schedules of the budget panel: the optimiser's, and three rules of one parameter at the same cost."""
STYLES = {
    "optimised": (BLUE, "solid", "circle"), "one-shot-middle": (ORANGE, "dash", "square"), "linear": (GREEN, "dot", "diamond"),
    "cosine": (PURPLE, "dashdot", "triangle-up"),
}
LOWEST_LOSS = 0.005
"""Losses below it are drawn at it: the axis is logarithmic."""
ROW = 64
"""Tokens in one line of the token map."""
MAY_BE_EMPTY = "may be empty"


# Schedules for a budget.


class Plans:
    """Schedules for any budget, prompt length and mix of calibration tasks, from one table of losses.

    table: losses by task, layer and rate, measured at prompts of ``tokens``. shape: sizes of the model. grid: recorded held-out results, shown
    beside what the table predicts.
    window, floor: rows that score, and rows that always stay. scored: layers whose scores are charged, "drop" or "all".
    """

    TAUS = tuple(round(0.56 + 0.04 * i, 2) for i in range(12))
    """Budgets of the predicted curves."""

    def __init__(
        self, table: SensitivityTable, shape: ModelShape, *, tokens: int, grid: Grid | None = None, window: int = 32, floor: int = 36,
        scored: str = "all",
    ):
        self.table, self.shape, self.window, self.floor, self.scored = table, shape, window, floor, scored
        self.mixes = ("all tasks", *dict.fromkeys(table.kinds))
        self.measured = {} if grid is None else _measured(grid)
        # Once, so that moving a control never waits for a whole curve.
        self.curves = {
            mix: {f: np.array([self.schedule(f, tau, mix, tokens, "mean").predicted_loss for tau in self.TAUS]) for f in FAMILIES}
            for mix in self.mixes
        }

    @functools.cache  # noqa: B019 - as many entries as the controls have choices, and a Plans lives as long as its notebook
    def planner(self, mix: str, tokens: int, objective: str) -> Planner:
        """The optimiser over one mix of tasks; few cost steps keep the worst-task search live.

        Raises: InputError for a mix that the table does not have.
        """
        if mix not in self.mixes:
            raise InputError("mix", got=mix, allowed=", ".join(self.mixes))
        table, rates = self.table.spread(self._losses(mix, objective), self.shape.layers)
        buckets = 12 if objective == "worst" else 60
        cost = MacCost(self.shape, self.window)
        return Planner(table, rates, tokens=tokens, cost=cost, floor=self.floor, buckets=buckets, scored=self.scored)

    def _losses(self, mix: str, objective: str) -> np.ndarray:
        kinds = None if mix == "all tasks" else [mix]
        return self.table.smooth_by_kind(kinds=kinds)[1] if objective == "worst" else self.table.smooth(kinds=kinds)[0]

    def expected(self, schedule: PruneSchedule, mix: str, objective: str) -> float:
        """Expected extra loss; drops before the first measured layer count as if they were there, which flatters the rules that do so."""
        table, rates = self.table.spread(self._losses(mix, objective), self.shape.layers)
        table[..., : self.table.layers[0], :] = table[..., self.table.layers[0], None, :]
        losses = surrogate(table, rates, schedule)
        return float(losses.max() if objective == "worst" else losses.mean())

    @functools.cache  # noqa: B019
    def schedule(self, family: str, tau: float, mix: str, tokens: int, objective: str) -> PruneSchedule:
        """The schedule of one family at a budget; a rule gets the largest size that the budget allows."""
        planner, layers = self.planner(mix, tokens, objective), self.shape.layers
        if family == "optimised":
            return planner.solve(tau, objective=objective, rounds=4)
        make = {
            "one-shot-middle": lambda x: PruneSchedule.one_shot(layers // 2, x, layers), "linear": lambda x: PruneSchedule.linear(x, layers),
            "cosine": lambda x: PruneSchedule.pyramid(x, layers),
        }[family]
        limit = tau * planner.full_cost
        found = match_cost(make, lambda s: self.cost(s, tokens), limit, low=0.05 if family == "cosine" else 0.01, steps=14)
        return found.with_loss(self.expected(found, mix, objective))

    def cost(self, schedule: PruneSchedule, tokens: int) -> float:
        """MACs of a schedule, its scoring included."""
        return schedule_macs(self.shape, schedule, tokens, floor=self.floor, window=self.window, scored=self.scored)

    def view(self, tau: float, objective: str, mix: str, tokens: int) -> dict[str, Any]:
        """Schedules and expected losses at one budget.

        Returns:
            ``ratios`` {family: (layers,)}, ``predicted`` {family: nats}, ``share`` {family: cost over full prefill}, ``curves`` {family: (taus,)}
            mean losses expected at the table's prompt length, ``measured`` {family: (taus, estimates, lows, highs)} of the held-out recording, and
            the setting.
        """
        planner = self.planner(mix, tokens, objective)
        found = {family: self.schedule(family, tau, mix, tokens, objective) for family in FAMILIES}
        return {
            "tau": tau, "objective": objective, "mix": mix, "tokens": tokens, "layers": np.arange(self.shape.layers),
            "ratios": {f: np.array(s.ratios) for f, s in found.items()}, "predicted": {f: float(s.predicted_loss) for f, s in found.items()},
            "share": {f: self.cost(s, tokens) / planner.full_cost for f, s in found.items()}, "taus": np.array(self.TAUS),
            "curves": self.curves[mix], "measured": self.measured,
        }


def _measured(grid: Grid) -> dict[str, tuple[np.ndarray, ...]]:
    """Held-out extra losses of every family at the recorded budgets, with intervals."""
    out = {}
    for family in FAMILIES:
        taus = [tau for tau in grid.data["taus"] if f"{family}@{tau:g}" in grid.names]
        found = [grid.difference(f"{family}@{tau:g}", "full") for tau in taus]
        out[family] = tuple(np.array(column) for column in (taus, *([getattr(i, w) for i in found] for w in ("estimate", "low", "high"))))
    return out


def draw_budget(result: Mapping) -> dict[str, Any]:
    """The share of the prompt alive in every layer, and expected and measured loss against the budget."""
    data: list[dict] = []
    for family in FAMILIES:
        color, dash, _ = STYLES[family]
        data.append({"type": "scatter", "x": result["layers"], "y": result["ratios"][family], "mode": "lines", "name": family,
                     "line": {"shape": "hv", "color": color, "dash": dash, "width": 3 if family == "optimised" else 2},
                     "hovertemplate": "layer %{x}: %{y:.2f}<extra></extra>"})
    for family in FAMILIES:
        color, dash, symbol = STYLES[family]
        place = {"xaxis": "x2", "yaxis": "y2", "legendgroup": family, "showlegend": False}
        data.append({"type": "scatter", "x": result["taus"], "y": np.maximum(result["curves"][family], LOWEST_LOSS), "mode": "lines",
                     "name": f"{family}, expected", "line": {"color": color, "dash": dash, "width": 2}} | place)
        taus, middle, low, high = result["measured"].get(family, (np.zeros(0),) * 4)
        middle, low, high = (np.maximum(values, LOWEST_LOSS) for values in (middle, low, high))
        data.append({"type": "scatter", "x": taus, "y": middle, "mode": "markers", "name": f"{family}, measured", "meta": MAY_BE_EMPTY,
                     "marker": {"color": color, "symbol": symbol, "size": 10, "line": {"width": 1, "color": "#1f2328"}},
                     "error_y": {"array": high - middle, "arrayminus": middle - low, "thickness": 1.2}} | place)
        data.append({"type": "scatter", "x": [result["tau"]], "y": [max(result["predicted"][family], LOWEST_LOSS)], "mode": "markers",
                     "name": f"{family}, here", "marker": {"color": color, "symbol": f"{symbol}-open", "size": 15, "line": {"width": 3}}} | place)
    layout = {
        "height": 470, "margin": {"t": 60, "b": 110, "l": 66, "r": 20}, "legend": {"orientation": "h", "y": -0.22, "x": 0},
        "xaxis": {"domain": [0, 0.46], "title": {"text": "layer"}, "range": [-0.5, len(result["layers"]) - 0.5]},
        "yaxis": {"title": {"text": "share of the prompt alive"}, "range": [0, 1.05]},
        "xaxis2": {"domain": [0.58, 1], "anchor": "y2", "title": {"text": "budget τ (share of full prefill)"}, "range": [0.53, 1.02]},
        "yaxis2": {"anchor": "x2", "type": "log", "title": {"text": "extra answer loss (nats)"}, "range": [np.log10(LOWEST_LOSS) - 0.05, 1.05],
                   "tickvals": [0.01, 0.03, 0.1, 0.3, 1, 3, 10]},
        "annotations": _titles((0, f"{result['tokens']:,} tokens, budget {result['tau']:.2f}, {result['objective']} loss over {result['mix']}"),
                               (0.58, "lines expected, points measured on held-out prompts")),
    }
    return {"data": data, "layout": layout}


def describe_budget(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    ratios = result["ratios"]["optimised"]
    drops = [i for i in range(1, len(ratios)) if ratios[i] < ratios[i - 1]]
    where = f"drops before layers {', '.join(map(str, drops))} down to {ratios[-1]:.2f}" if drops else "drops nothing"
    worst = max((f for f in FAMILIES if f != "optimised"), key=lambda f: result["predicted"][f])
    return (f"At a budget of {result['tau']:.2f} the optimised schedule {where}; it is expected to cost {result['predicted']['optimised']:.3f} nats "
            f"per answer token, the {worst} schedule of equal cost {result['predicted'][worst]:.3f}.")


# The work of a prefill.


def work_view(
    shape: ModelShape, schedule: PruneSchedule, tokens: int, keys: float, *, floor: int = 36, window: int = 32, band: int = 32,
) -> dict[str, Any]:
    """MACs by module of full prefill, of sparse attention alone, of token pruning alone, and of both.

    keys: share of the prompt that each head may read. Returns ``names``, ``parts`` {module: (4,) GMACs} and ``speed_up`` (4,).
    """
    if not 0 < keys <= 1:
        raise InputError("keys", got=keys, allowed="a share in (0, 1]")
    counts, chosen = schedule.check(shape.layers).counts(tokens, floor), max(floor, round(keys * tokens))

    def sparse(rows: Sequence[int]) -> list[int]:
        return [banded_pairs(n, min(n, chosen), band) for n in rows]

    full = [tokens] * shape.layers
    every = list(range(shape.layers))
    works = {
        "full": prefill_macs(shape, full), "sparse attention": prefill_macs(shape, full, pairs=sparse(full), window=window, scored=every),
        "token pruning": prefill_macs(shape, counts, window=window),
        "both": prefill_macs(shape, counts, pairs=sparse(counts), window=window, scored=every),
    }
    totals = np.array([work.total for work in works.values()])
    return {"names": list(works), "parts": _modules(list(works.values())), "speed_up": totals[0] / totals, "tokens": tokens, "keys": keys,
            "attention_share": works["full"].attention_share}


def _modules(works: Sequence[Macs]) -> dict[str, np.ndarray]:
    read = {"projections": "qkvo", "FFN": "ffn", "attention": "attention", "scores": "scoring"}
    return {name: np.array([float(np.sum(getattr(work, field))) for work in works]) / 1e9 for name, field in read.items()}


def draw_work(result: Mapping) -> dict[str, Any]:
    """Stacked bars of the work by module."""
    look = {"projections": (BLUE, ""), "FFN": (SKY, "/"), "attention": (ORANGE, "\\"), "scores": (GREY, ".")}
    data = [{"type": "bar", "x": result["names"], "y": result["parts"][name], "name": name,
             "marker": {"color": color, "pattern": {"shape": shape, "fgopacity": 0.35}}, "hovertemplate": "%{y:.1f} GMACs<extra></extra>"}
            for name, (color, shape) in look.items()]
    top = float(sum(values for values in result["parts"].values()).max())
    heights = sum(result["parts"].values())
    marks = [{"x": name, "y": float(height), "text": f"<b>{gain:.2f}×</b>", "showarrow": False, "yanchor": "bottom", "font": {"size": 15}}
             for name, height, gain in zip(result["names"], heights, result["speed_up"], strict=True)]
    layout = {
        "height": 430, "barmode": "stack", "margin": {"t": 60, "b": 90, "l": 76, "r": 20}, "legend": {"orientation": "h", "y": -0.16, "x": 0},
        "xaxis": {"type": "category"}, "yaxis": {"title": {"text": "work of the prefill (GMACs)"}, "range": [0, 1.14 * top]},
        "annotations": marks + _titles((0, f"{result['tokens']:,} tokens: attention is {100 * result['attention_share']:.0f} % of full prefill")),
    }
    return {"data": data, "layout": layout}


def describe_work(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    gains = ", ".join(f"{name} {gain:.2f} times" for name, gain in zip(result["names"][1:], result["speed_up"][1:], strict=True))
    return f"At {result['tokens']:,} tokens attention is {100 * result['attention_share']:.0f} % of full prefill; less work by {gains}."


# Which tokens die where.


def chosen_rows(runner: LayerRunner, stored: Stored, rule: Any) -> list[Any]:
    """Positions alive in every layer if the scores were those of the full model: exact up to and with the first drop, an estimate behind it."""
    import torch

    layers = runner.shape.layers
    run = Replay(stored.tokens, layers, stored.ids[None, : stored.tokens], torch.arange(stored.tokens), probe=[0.0] * layers)
    scaling, kept = runner.shape.head_dim**-0.5, []
    for layer in range(layers):
        keep = rule.keep(run, layer) if layer else None
        if keep is not None:
            run.positions = run.positions[keep]
        kept.append(run.positions)
        rule.observe(run, layer, *(x[:, :, run.positions] for x in stored.qkv[layer]), scaling)
    return kept


def strip_view(runner: LayerRunner, stored: Stored, prompt: Any, rule: Any, *, words: Sequence[str], exact: bool = True) -> dict[str, Any]:
    """The layer at which each token of a prompt dies, and what that does to the answer.

    exact: read the prompt again from the first drop on; otherwise a quick estimate by the full model's scores, without a loss.

    Returns:
        ``dies`` (tokens,) the first layer without the token (the depth if it stays), ``evidence`` spans, ``kept`` (layers,) evidence alive,
        ``nll`` and ``exact`` (NaN and None in an estimate), ``full_nll``, ``alive`` (layers,) counts, ``words`` (tokens,).
    """
    if exact:
        with runner.attached():
            replay = runner.replay(stored, rule)
        kept, nll, right = replay.kept, replay.nll, replay.exact
    else:
        kept, nll, right = chosen_rows(runner, stored, rule), float("nan"), None
    dies = np.zeros(stored.tokens, dtype=int)
    for positions in kept:
        dies[positions.numpy()] += 1
    wanted = np.zeros(stored.tokens, dtype=bool)
    for start, stop in prompt.evidence:
        wanted[start:stop] = True
    alive = [float(np.isin(np.flatnonzero(wanted), p.numpy()).mean()) if wanted.any() else 1.0 for p in kept]
    return {
        "dies": dies, "depth": runner.shape.layers, "evidence": [list(span) for span in prompt.evidence], "kept": np.array(alive), "nll": nll,
        "exact": right, "full_nll": stored.nll, "full_exact": stored.exact, "alive": np.array([len(p) for p in kept]), "words": list(words),
        "answer": prompt.answer, "kind": prompt.kind,
    }


def draw_strip(result: Mapping) -> dict[str, Any]:
    """The prompt as a map, one cell a token, coloured by the layer at which it dies, evidence outlined; below, what is alive by layer."""
    dies, depth = result["dies"], result["depth"]
    lines = -(-len(dies) // ROW)
    padded = np.full(lines * ROW, np.nan)
    padded[: len(dies)] = dies
    words = np.full(lines * ROW, "", dtype=object)
    words[: len(dies)] = result["words"]
    layers = np.arange(depth)
    data = [
        {"type": "heatmap", "z": padded.reshape(lines, ROW), "customdata": words.reshape(lines, ROW), "zmin": 0, "zmax": depth,
         "colorscale": "Cividis", "hovertemplate": "“%{customdata}” dies at layer %{z}<extra></extra>", "xgap": 1, "ygap": 1,
         "colorbar": {"title": {"text": "dies at layer", "side": "right"}, "len": 0.62, "y": 0.69, "tickvals": [0, 10, 20, depth],
                      "ticktext": ["0", "10", "20", "stays"]}},
        {"type": "scatter", "x": layers, "y": result["alive"] / len(dies), "mode": "lines", "name": "prompt alive", "xaxis": "x2", "yaxis": "y2",
         "line": {"shape": "hv", "color": GREY, "width": 2.5, "dash": "dash"}},
        {"type": "scatter", "x": layers, "y": result["kept"], "mode": "lines", "name": "evidence alive", "xaxis": "x2", "yaxis": "y2",
         "line": {"shape": "hv", "color": ORANGE, "width": 3}},
    ]
    boxes = [box for start, stop in result["evidence"] for box in _boxes(start, stop)]
    verdict = f"answer “{result['answer'].strip()}”: "
    if result["exact"] is None:
        verdict += "estimate, the exact result follows"
    else:
        verdict += f"{'right' if result['exact'] else 'wrong'}, {result['nll']:.2f} nats (full {result['full_nll']:.2f})"
    layout = {
        "height": 520, "margin": {"t": 50, "b": 90, "l": 66, "r": 20}, "legend": {"orientation": "h", "y": -0.16, "x": 0},
        "xaxis": {"domain": [0, 1], "anchor": "y", "range": [-0.5, ROW - 0.5], "showticklabels": False, "showgrid": False, "zeroline": False},
        "yaxis": {"domain": [0.42, 0.95], "anchor": "x", "range": [lines - 0.5, -0.5], "tickvals": list(range(0, lines, 2)),
                  "ticktext": [str(ROW * i) for i in range(0, lines, 2)], "title": {"text": "token"}, "showgrid": False, "zeroline": False},
        "xaxis2": {"domain": [0, 1], "anchor": "y2", "title": {"text": "layer"}, "range": [-0.5, depth - 0.5]},
        "yaxis2": {"domain": [0, 0.3], "anchor": "x2", "title": {"text": "share alive"}, "range": [0, 1.05]},
        "shapes": boxes or [{"type": "rect", "visible": False}], "annotations": _titles((0, f"{result['kind']}; {verdict}")),
    }
    return {"data": data, "layout": layout}


def _boxes(start: int, stop: int) -> list[dict]:
    """Outlines of the tokens start..stop-1 in the map."""
    out = []
    for line in range(start // ROW, (stop - 1) // ROW + 1):
        left, right = max(start, line * ROW) - line * ROW, min(stop, (line + 1) * ROW) - line * ROW
        out.append({"type": "rect", "xref": "x", "yref": "y", "x0": left - 0.5, "x1": right - 0.5, "y0": line - 0.5, "y1": line + 0.5,
                    "line": {"color": ORANGE, "width": 3}})
    return out


def describe_strip(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    left, kept = result["alive"][-1] / len(result["dies"]), result["kept"][-1]
    first = f"{100 * left:.0f} % of the prompt and {100 * kept:.0f} % of the evidence are alive at the end"
    if result["exact"] is None:
        return f"{first}; the answer's loss is being computed."
    return (f"{first}; the answer costs {result['nll']:.2f} nats a token ({result['full_nll']:.2f} with everything) "
            f"and is {'right' if result['exact'] else 'wrong'}.")


# What each head's keys recall.


def recall_view(runner: LayerRunner, stored: Stored, layer: int, budget: float, *, sinks: int = 4, window: int = 32, size: int = 7) -> dict[str, Any]:
    """Share of each query head's window attention that its keys hold, if they are chosen by the layer, by key head or by query head.

    Returns ``recalled`` {granularity: (heads,)} and the setting.
    """
    import torch

    from nbkit.methods.fastprefill.baselines.rules import edges, pool, row_attention
    from nbkit.methods.fastprefill.heads import GRANULARITIES, head_sets, recalled_mass

    if not 0 <= layer < runner.shape.layers:
        raise InputError("layer", got=layer, allowed=f"0..{runner.shape.layers - 1}")
    tokens = stored.tokens
    q, k, _ = (x[:, :, :tokens] for x in stored.qkv[layer])
    with torch.inference_mode():
        attention = row_attention(q[:, :, -window:], k, runner.shape.head_dim**-0.5)
        count, forced = max(sinks + window, round(budget * tokens)), edges(tokens, sinks, window)
        scores = pool(attention, size, "max")
        sets = {how: head_sets(scores, runner.shape.kv_heads, count, granularity=how, forced=forced) for how in GRANULARITIES}
        recalled = {how: recalled_mass(attention, chosen).numpy() for how, chosen in sets.items()}
    return {"recalled": recalled, "layer": layer, "keys": count, "tokens": tokens, "group": runner.shape.heads // runner.shape.kv_heads}


def draw_recall(result: Mapping) -> dict[str, Any]:
    """Recalled attention mass, one group of bars a query head."""
    look = {"shared": (GREY, ""), "kv": (AMBER, "/"), "query": (BLUE, "x")}
    names = {"shared": "one set a layer", "kv": "one set a key head", "query": "one set a query head"}
    heads = np.arange(len(result["recalled"]["query"]))
    data = [{"type": "bar", "x": heads, "y": result["recalled"][how], "name": names[how], "hovertemplate": "head %{x}: %{y:.3f}<extra></extra>",
             "marker": {"color": color, "pattern": {"shape": shape, "fgopacity": 0.35}}} for how, (color, shape) in look.items()]
    layout = {
        "height": 400, "barmode": "group", "margin": {"t": 50, "b": 100, "l": 66, "r": 20}, "legend": {"orientation": "h", "y": -0.24, "x": 0},
        "xaxis": {"title": {"text": f"query head ({result['group']} share a key head)"}, "range": [-0.6, len(heads) - 0.4], "dtick": 1},
        "yaxis": {"title": {"text": "attention recalled"}, "range": [0, 1.03]},
        "annotations": _titles((0, f"layer {result['layer']}: {result['keys']} of {result['tokens']} keys a head")),
    }
    return {"data": data, "layout": layout}


def describe_recall(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    mean = {how: float(values.mean()) for how, values in result["recalled"].items()}
    return (f"In layer {result['layer']}, {result['keys']} of {result['tokens']} keys recall {100 * mean['shared']:.0f} % of the attention if all "
            f"heads share them, {100 * mean['kv']:.0f} % by key head and {100 * mean['query']:.0f} % by query head.")


def _titles(*items: tuple[float, str]) -> list[dict]:
    return [{"text": text, "x": x, "y": 1.02, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
             "font": {"size": 15}} for x, text in items]
