"""What the panels show: one chain beside its prefill control, whether the target agrees, and the figure of both."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError
from nbkit.metrics import wilson

from .chain import RECENT, Chain, attention_shares, draft_chain, prefill_control
from .drafter import Drafter
from .features import target_features
from .intervention import Intervention

DEPTH = 16
GREEN, RED, GREY = "#009E73", "#D55E00", "#7F7F7F"
BLUE, ORANGE, PURPLE, AMBER = "#0072B2", "#D55E00", "#CC79A7", "#E69F00"
PARTS = (("sink", BLUE), ("prompt", GREY), ("recent_text", AMBER), ("chain", PURPLE))
NAMES = {"sink": "sink", "prompt": "other prompt", "recent_text": "recent prompt", "chain": "chain"}
MAY_BE_EMPTY = "may be empty"
_KEPT = 256


class Texts:
    """Texts of the target with its states, and the chains that drafters draw from one place in them.

    Args:
        tokens: (P, N). aux, last: states of the target at those tokens. best: (P, N) its greedy token after each position. at: tokens of the prompt;
            chains propose what follows. words: id -> text of a token. model: the target, which then checks the drafts live; None if the tokens behind
            ``at`` are the target's own greedy answer, which chains read and are judged by. depth: longest chain.

    Raises: InputError when no chain of this depth fits.
    """

    def __init__(
        self, tokens: Tensor, aux: Tensor, last: Tensor, best: Tensor, *, at: int, words: Callable[[int], str], model=None, depth: int = DEPTH,
    ):
        if not 2 <= at <= tokens.shape[1] - depth:
            raise InputError("at", got=at, allowed=f"2..{tokens.shape[1] - depth} for {tokens.shape[1]} tokens and depth {depth}")
        self.tokens, self.aux, self.last, self.best = tokens, aux.float(), last.float(), best
        self.at, self.words, self.model, self.depth = at, words, model, depth
        self._held: OrderedDict[tuple, Any] = OrderedDict()

    def feats(self, drafter: Drafter, row: int) -> Tensor:
        """The states of text ``row`` that this drafter reads, (1, N, channels)."""
        return drafter.pick_features(self.aux[row : row + 1], self.last[row : row + 1])

    def chain(self, drafter: Drafter, row: int, what: Intervention) -> tuple[Chain, Chain, np.ndarray]:
        """The chain after the prompt of text ``row``, its prefill control, and the target's choice at every step (depth,)."""
        return self._keep(("chain", drafter, row, what), lambda: self._chain(drafter, row, what))

    def accuracy(self, drafter: Drafter, row: int, what: Intervention, every: int = 2) -> tuple[np.ndarray, int]:
        """Share of chain starts in text ``row`` whose step k proposes the target's greedy token, (depth,), and the number of starts.

        Chains read the text itself, so a wrong proposal does not end them.
        """
        return self._keep(("accuracy", drafter, row, what), lambda: self._accuracy(drafter, row, what, every))

    def _keep(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._held:
            self._held[key] = make()
            if len(self._held) > _KEPT:
                self._held.popitem(last=False)
        return self._held[key]

    @torch.no_grad()
    def _chain(self, drafter: Drafter, row: int, what: Intervention) -> tuple[Chain, Chain, np.ndarray]:
        text, feats, answer = self.tokens[row : row + 1, : self.at], self.feats(drafter, row), self.tokens[row : row + 1, self.at :]
        if self.model is None:
            chain = draft_chain(drafter, text, feats, self.depth, teacher=answer[:, : self.depth - 1], intervention=what)
            best = answer[0, : self.depth]
        else:
            chain = draft_chain(drafter, text, feats, self.depth, intervention=what)
            found = target_features(self.model, torch.cat([text, chain.fed[:, 1:]], 1), drafter.cfg.aux_layers)
            best, feats = found.logits[0, self.at - 1 :].argmax(-1), drafter.pick_features(found.aux, found.last)
        read = torch.cat([text, chain.fed[:, 1:]], 1)
        return chain, prefill_control(drafter, read, feats, self.depth, sink_at=chain.sink_at, intervention=what), best.numpy()

    @torch.no_grad()
    def _accuracy(self, drafter: Drafter, row: int, what: Intervention, every: int) -> tuple[np.ndarray, int]:
        tokens, first = self.tokens[row : row + 1], self.at // 2
        starts = torch.arange(first, tokens.shape[1] - 1 - self.depth, every)[None]
        if not starts.numel():
            raise InputError("depth", got=self.depth, allowed=f"< {tokens.shape[1] - 1 - first} for {tokens.shape[1]} tokens")
        steps = drafter.ttt(tokens, self.feats(drafter, row), self.depth, starts=starts, intervention=what)
        right = [drafter.propose(step.logits)[0] == self.best[row, starts[0] + j] for j, step in enumerate(steps, 1)]
        return torch.stack(right).float().mean(1).numpy(), starts.numel()


def chain_view(
    texts: Texts, drafter: Drafter, row: int, depth: int, what: Intervention, *, step: int = 1, head: int | None = None, ttt: int = 2,
    beside: Mapping[str, Any] | None = None, live_accuracy: bool = True,
) -> dict[str, Any]:
    """Everything the panel shows of one chain.

    Args:
        depth: steps shown. step: whose attention is shown, cut to ``depth``. head: None for the mean over heads. ttt: training depth of the drafter.
        beside: what the lower left plot shows: ``recorded`` (steps,) accuracy, or ``bars`` {drafter: {template: (value, low, high)}}.

    Returns:
        ``rms``, ``cos``, shares ``sink``, ``prompt``, ``recent_text``, ``chain`` and the same with ``control_``, (depth,) each; of one query
        ``weights`` (keys,), ``kind`` (keys,) index into `PARTS` and ``letters``; ``drafted`` and ``wanted`` words and ``correct``, (depth,) each;
        ``accepted`` drafts; ``accuracy`` (depth,) or empty.

    Raises: InputError for a depth, step or head that does not exist.
    """
    if not 1 <= depth <= texts.depth:
        raise InputError("depth", got=depth, allowed=f"1..{texts.depth}")
    if head is not None and not 0 <= head < drafter.cfg.heads:
        raise InputError("head", got=head, allowed=f"None or 0..{drafter.cfg.heads - 1}")
    if step < 1:
        raise InputError("step", got=step, allowed=">= 1")
    chain, control, best = texts.chain(drafter, row, what)
    step, first, sink = min(step, depth), texts.at - 2, int(chain.sink_at[0])
    out: dict[str, Any] = {"depth": depth, "step": step, "ttt": ttt, "variant": drafter.cfg.variant, "sink_at": sink, "k": np.arange(1, depth + 1)}
    for prefix, source in (("", chain), ("control_", control)):
        out[prefix + "rms"], out[prefix + "cos"] = (getattr(source, name)[0, :depth].numpy() for name in ("rms", "cos"))
        for name, _ in PARTS:
            out[prefix + name] = _shares(source, first, head, depth)[name]
    weights = chain.attention[step - 1][0]
    out["weights"] = (weights.mean(0) if head is None else weights[head]).float().numpy()
    at = np.arange(len(out["weights"]))
    # Key s is the pair (token s + 1, state s).
    out["kind"] = np.select([at == sink, at >= first, at >= len(at) - RECENT], [0, 3, 2], 1)
    read = [*texts.tokens[row, 1 : texts.at].tolist(), *chain.fed[0, 1:step].tolist()]
    out["letters"] = [_visible(texts.words(token)) for token in read]
    proposed = chain.proposed[0, :depth].numpy()
    out["correct"] = proposed == best[:depth]
    out["accepted"] = int(out["correct"].cumprod().sum())
    out["drafted"], out["wanted"] = ([_visible(texts.words(int(t))) for t in ids] for ids in (proposed, best[:depth]))
    out["accuracy"], out["starts"] = np.zeros(0), 0
    if live_accuracy:
        whole, out["starts"] = texts.accuracy(drafter, row, what)
        out["accuracy"] = whole[:depth]
    return out | {"recorded": np.zeros(0), "bars": {}} | dict(beside or {})


def _shares(source: Chain, first: int, head: int | None, depth: int) -> dict[str, np.ndarray]:
    if head is None:
        return {name: getattr(source, name)[0, :depth].numpy() for name, _ in PARTS}
    rows = [attention_shares(w[:, head : head + 1], source.sink_at, first) for w in source.attention[:depth]]
    return {name: np.array([float(row[name]) for row in rows]) for name, _ in PARTS}


def _visible(word: str) -> str:
    """A token as it can be shown."""
    shown = word.replace("\n", "⏎").replace("\t", "⇥")
    return shown if shown.strip() else "␣" * max(1, len(shown))


@functools.cache
def _layout() -> dict:
    def axes(n: str, x: Sequence[float], y: Sequence[float], xtitle: str, ytitle: str) -> dict:
        return {"xaxis" + n: {"domain": list(x), "anchor": "y" + n, "title": {"text": xtitle}},
                "yaxis" + n: {"domain": list(y), "anchor": "x" + n, "title": {"text": ytitle}}}

    left, right = (0, 0.44), (0.58, 1)
    layout = {
        "height": 990, "barmode": "overlay", "margin": {"t": 40, "b": 140, "l": 66, "r": 60},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.085, "x": 0, "yref": "paper"},
        **axes("", (0, 1), (0.77, 1), "key: position in the text (tokens)", "attention weight"),
        **axes("2", left, (0.4, 0.66), "chain step k", "magnitude rms"),
        **axes("3", right, (0.4, 0.66), "chain step k", "share of attention"),
        **axes("4", left, (0, 0.28), "chain step k", "share right"),
        **axes("5", right, (0, 0.28), "", "chain step k"),
        "yaxis6": {"overlaying": "y2", "side": "right", "anchor": "x2", "range": [-0.25, 1.04], "tickvals": [0, 0.5, 1],
                   "title": {"text": "cosine"}, "showgrid": False, "zeroline": False},
    }
    layout["yaxis2"]["rangemode"] = "tozero"
    layout["yaxis3"]["range"], layout["yaxis4"]["range"] = [0, 1.02], [0, 1.04]
    layout["xaxis5"] |= {
        "range": [-0.2, 2.2], "tickvals": [0.35, 1.5], "ticktext": ["drafted", "target"], "side": "top", "showgrid": False, "zeroline": False,
    }
    layout["yaxis5"] |= {"showgrid": False, "dtick": 1}
    return layout


def draw_chain(result: Mapping) -> dict[str, Any]:
    """Attention of one step over the text; magnitude and cosine; shares beside the control; accuracy (or bars); the verification trace."""
    k, weights, kind = result["k"], result["weights"], result["kind"]
    one, two, three, four, five = ({"xaxis": "x" + n, "yaxis": "y" + n} for n in ("", "2", "3", "4", "5"))
    at, letters = np.arange(len(weights)), np.array(result["letters"], dtype=object)
    data: list[dict] = []
    for number, (name, color) in enumerate(PARTS):
        chosen = kind == number
        data.append({
            "type": "bar", "x": at[chosen], "y": weights[chosen], "width": np.full(chosen.sum(), 2.0 if number == 0 else 0.9), "name": NAMES[name],
            "marker": {"color": color}, "customdata": letters[chosen], "hovertemplate": "%{x} “%{customdata}”: %{y:.3f}<extra></extra>",
            "meta": MAY_BE_EMPTY,
        } | one)
    data += [
        _line(k, result["rms"], "rms of the state", BLUE, "solid", "circle") | two,
        _line(k, result["control_rms"], "rms, prefill", BLUE, "dot", "circle-open") | two,
        _line(k, result["cos"], "cos(f_k, f_k−1)", ORANGE, "dash", "square") | {"xaxis": "x2", "yaxis": "y6"},
    ]
    total, control = np.zeros(len(k)), np.zeros(len(k))
    for name, color in PARTS:
        total, control = total + result[name], control + result["control_" + name]
        data.append({"type": "scatter", "x": k, "y": result[name], "stackgroup": "chain", "mode": "lines", "line": {"width": 0, "color": color},
                     "fillcolor": color, "opacity": 0.6, "showlegend": False, "name": NAMES[name]} | three)
        if name != "chain":
            beside = _line(k, control, "prefill control" if name == "sink" else "", "#1f2328", "dash", None)
            data.append(beside | {"showlegend": name == "sink"} | three)
    data += _accuracy_or_bars(result, four) + _trace(result, five)
    layout = copy.deepcopy(_layout())
    for axis in ("xaxis2", "xaxis3"):
        layout[axis]["range"] = [0.7, len(k) + 0.3 if len(k) > 1 else 1.3]
    layout["yaxis"]["range"] = [0, 1.08 * float(weights.max())]
    layout["xaxis"]["range"] = [-1.5, len(weights) + 0.5]
    # The same rows at every depth: the exported page cannot animate the range of this axis.
    layout["yaxis5"]["range"] = [16.6, 0.4]
    layout["yaxis2"]["range"] = [0, 1.1 * float(max(result["rms"].max(), result["control_rms"].max()))]
    if result["bars"]:
        layout["xaxis4"] |= {"type": "category", "title": {"text": ""}}
        # A range with an open end is no number to an animated page.
        top = 1.1 * max(high for values in result["bars"].values() for _, _, high in values.values())
        layout["yaxis4"] = layout["yaxis4"] | {"title": {"text": "accepted (no bonus)"}, "range": [0, top]}
    else:
        layout["xaxis4"]["range"] = [0.7, max(len(k), 2) + 0.3]
        layout["shapes"] = [{"type": "line", "xref": "x4", "yref": "y4", "x0": result["ttt"] + 0.5, "x1": result["ttt"] + 0.5, "y0": 0, "y1": 1.04,
                             "line": {"color": GREY, "dash": "dashdot", "width": 2}, "visible": bool(result["ttt"] <= len(k))}]
    layout["annotations"] = _titles(result)
    return {"data": data, "layout": layout}


def _line(x, y, name: str, color: str, dash: str, symbol: str | None) -> dict:
    style = {"type": "scatter", "x": x, "y": y, "name": name, "line": {"color": color, "dash": dash, "width": 2.2}}
    return style | ({"mode": "lines"} if symbol is None else {"mode": "lines+markers", "marker": {"symbol": symbol, "size": 7}})


def _accuracy_or_bars(result: Mapping, place: dict) -> list[dict]:
    if result["bars"]:
        out = []
        for number, (name, values) in enumerate(result["bars"].items()):
            middle, low, high = (np.array([v[i] for v in values.values()]) for i in range(3))
            out.append({
                "type": "bar", "x": list(values), "y": middle, "name": name, "width": 0.36, "offset": -0.38 + 0.4 * number,
                "marker": {"color": (BLUE, ORANGE)[number], "pattern": {"shape": ("", "/")[number]}},
                "error_y": {"array": high - middle, "arrayminus": middle - low},
            } | place)
        return out
    n = result["starts"]
    bounds = [wilson(round(a * n), n) for a in result["accuracy"]]
    live = _line(result["k"], result["accuracy"], f"right, this text ({n} starts)", GREEN, "solid", "diamond") | {"meta": MAY_BE_EMPTY}
    live["error_y"] = {"array": [b.high - b.estimate for b in bounds], "arrayminus": [b.estimate - b.low for b in bounds], "thickness": 1}
    recorded = result["recorded"][: len(result["k"])]
    held = _line(np.arange(1, len(recorded) + 1), recorded, "recorded mean, undisturbed", GREY, "dash", None) | {"meta": MAY_BE_EMPTY}
    return [live | place, held | place]


def _trace(result: Mapping, place: dict) -> list[dict]:
    """Drafted tokens beside the target's, green while accepted, red at the refusal, grey behind it."""
    k, n = result["k"], result["accepted"]
    colors = [GREEN if i < n else RED if i == n else "#c4c8cd" for i in range(len(k))]
    marks = ["circle" if i < n else "x" if i == n else "circle-open" for i in range(len(k))]
    state = ["accepted" if i < n else "refused" if i == n else "dropped" for i in range(len(k))]
    agree = ["" if right else "≠ " for right in result["correct"]]
    return [
        {"type": "scatter", "x": np.full(len(k), 0.1), "y": k, "mode": "markers+text", "marker": {"color": colors, "symbol": marks, "size": 11},
         "text": ["  " + word[:14] for word in result["drafted"]], "textposition": "middle right", "textfont": {"size": 13}, "showlegend": False,
         "customdata": state, "hovertemplate": "step %{y}: %{customdata}<extra></extra>", "cliponaxis": False} | place,
        {"type": "scatter", "x": np.full(len(k), 1.3), "y": k, "mode": "text", "showlegend": False, "textposition": "middle right",
         "text": [mark + word[:14] for mark, word in zip(agree, result["wanted"])], "textfont": {"size": 13}, "hoverinfo": "skip"} | place,
    ]


def _titles(result: Mapping) -> list[dict]:
    lower = "accepted drafts by template (recorded)" if result["bars"] else f"right by depth; trained to depth {result['ttt']} (line)"
    texts = (
        (0, 1.0, f"attention of step {result['step']}, {result['variant']}"), (0, 0.66, "magnitude and direction"),
        (0.58, 0.66, "shares; dashed: prefill control"), (0, 0.28, lower),
        (0.58, 0.315, f"{result['accepted']} of {result['depth']} drafts accepted (+ 1 bonus token)"),
    )
    return [{"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
             "font": {"size": 16}} for x, y, text in texts]


def describe_chain(result: Mapping) -> str:
    """One sentence for readers who do not see the figure."""
    rms, sink, chain = result["rms"], result["sink"], result["chain"]
    return (
        f"{result['variant']} drafter: from step 1 to {result['depth']} the magnitude goes from {rms[0]:.2f} to {rms[-1]:.2f}, the sink's share from "
        f"{sink[0]:.2f} to {sink[-1]:.2f}, the chain's from {chain[0]:.2f} to {chain[-1]:.2f} (prefill control {result['control_chain'][-1]:.2f}); "
        f"{result['accepted']} of {result['depth']} drafts accepted, not counting the bonus token."
    )


def untrained_chain(steps: int = 16, dim: int = 64, *, normalise: bool, chains: int = 200, seed: int = 0) -> dict[str, np.ndarray]:
    """A layer of random weights that feeds on its own state, f <- f + u(RMS(f), x), raw or normalised after every step: magnitude and direction.

    The smallest model of a drafter's chain: the update u sees only the direction of f, so its size does not follow f.

    Returns:
        ``rms``, ``cos`` (of f_k with f_{k-1}), ``update`` (|u| / |f|), (steps,) each, means over ``chains`` random token sequences.

    >>> raw, normed = (untrained_chain(normalise=flag) for flag in (False, True))
    >>> bool(raw["rms"][-1] > 2 * raw["rms"][0]), bool(abs(normed["rms"] - 1).max() < 1e-5)
    (True, True)
    """
    if steps < 1 or dim < 1 or chains < 1:
        raise InputError("steps, dim, chains", got=(steps, dim, chains), allowed=">= 1")
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(2 * dim, 4 * dim, generator=generator) / (2 * dim) ** 0.5
    w2 = torch.randn(4 * dim, dim, generator=generator) / (4 * dim) ** 0.5
    f = F.rms_norm(torch.randn(chains, dim, generator=generator), (dim,))
    columns: dict[str, list[float]] = {"rms": [], "cos": [], "update": []}
    for _ in range(steps):
        token = torch.randn(chains, dim, generator=generator)
        u = torch.tanh(torch.cat([F.rms_norm(f, (dim,)), token], 1) @ w1) @ w2
        new = f + u
        columns["update"].append(float((u.norm(dim=1) / f.norm(dim=1)).mean()))
        columns["cos"].append(float(F.cosine_similarity(new, f).mean()))
        f = F.rms_norm(new, (dim,)) if normalise else new
        columns["rms"].append(float(f.pow(2).mean(1).sqrt().mean()))
    return {name: np.array(values) for name, values in columns.items()}
