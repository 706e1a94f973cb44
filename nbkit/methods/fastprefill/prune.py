"""Which tokens the deeper layers still read: scores from the attention of the prompt's last rows, and the part that drops the rest for good."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference.parts import Rows, register
from nbkit.methods.fastprefill.baselines.rules import best, edges, pool, row_attention, whole
from nbkit.methods.fastprefill.schedule import PruneSchedule

__all__ = ["SCORES", "TokenPruning", "layer_scores", "reduce_heads"]

SCORES = ("sum", "max", "cummax", "agg-4", "calibrated", "random", "oracle")
"""Names of `TokenPruning` scores; "agg-4" stands for agg-m with any number of layers m."""


def layer_scores(run: Any, layer: int, q: Tensor, k: Tensor, scaling: float, *, window: int = 32, size: int = 7, pooling: str = "max") -> Tensor:
    """Window attention of every query head to every row alive, pooled along the rows: (heads, n) float32.

    Softmax attention of the last ``window`` rows over all rows alive, summed over the window. Computed once a layer: a second part that asks
    for the same reads it from ``run.state``, and only the first is charged.

    Source: SnapKV, arXiv 2404.14469; FastKV, arXiv 2502.01068.
    """
    window = min(window, q.shape[2])
    key = (layer, window, size, pooling)
    held = run.state.get(layer_scores)
    if held is None or held[0] != key:
        run.charge(layer, probe=float(q.shape[1] * window * k.shape[2]))
        held = run.state[layer_scores] = (key, pool(row_attention(q[:, :, -window:], k, scaling), size, pooling))
    return held[1]


def reduce_heads(scores: Tensor, how: str = "max") -> Tensor:
    """One score a token from the scores of all heads (heads, n): their sum or their maximum.

    >>> reduce_heads(torch.tensor([[1.0, 0.0], [2.0, 4.0]]), "sum").tolist()
    [3.0, 4.0]
    """
    if how not in ("sum", "max"):
        raise InputError("reduction over heads", got=how, allowed="sum, max")
    return scores.sum(0) if how == "sum" else scores.amax(0)


@register
@dataclass(frozen=True)
class TokenPruning(Rows):
    """Drops rows by a schedule: before layer l the best counts(N)[l] rows stay, scored by the layer before; dropped rows never come back.

    schedule: `PruneSchedule` with one ratio for every layer; None drops once to 0.3 at two thirds of the depth. The first ``sinks`` and the last
    ``window`` tokens always stay, even if the schedule asks for fewer rows (``strict``: InputError then, and for prompts no longer than them).
    score: "sum" or "max" over the heads of the layer before; "cummax", the maximum over all heads of all layers so far; "agg-m", over the last
    m layers; "calibrated", like "cummax" with heads weighed by what they foretold on calibration prompts (``weights``: ScoreWeights, default
    those of the recording ``fastprefill-scores``); controls: "random" (``seed``) and "oracle", which keeps the ``evidence`` spans and scores
    the rest by "max".
    pool, pooling: each token takes the "max" or "avg" of its ``pool`` neighbours. prune_at: "pre", or "post_attn" before the FFN of the layer before.

    Raises: InputError for an unknown score, a schedule of another depth, evidence outside of the prompt, NaN scores.
    Source: reconstruction of FastPrefill, section 3.2 (the paper's body is not public); agg-m after CLAA, arXiv 2602.16054.

    >>> TokenPruning(PruneSchedule.one_shot(1, 0.5, 3), score="agg-2").layers_scored(3)
    frozenset({0})
    """

    schedule: PruneSchedule | None = None
    score: str = "max"
    sinks: int = 4
    window: int = 32
    pool: int = 7
    pooling: str = "max"
    prune_at: str = "pre"
    evidence: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    weights: Any = field(default=None, repr=False)
    strict: bool = False
    name: ClassVar[str] = "fastprefill"

    def __post_init__(self):
        if self.schedule is not None and not isinstance(self.schedule, PruneSchedule):
            raise InputError("schedule", got=type(self.schedule).__name__, allowed="a PruneSchedule", hint="PruneSchedule.from_ratios([1, ...])")
        if self.score not in SCORES and not re.fullmatch(r"agg-[1-9]\d*", str(self.score)):
            raise InputError("score", got=self.score, allowed=", ".join(SCORES))
        whole("sinks", self.sinks, 0)
        whole("window", self.window, 1)
        pool(torch.zeros(1), self.pool, self.pooling)
        if self.prune_at not in ("pre", "post_attn"):
            raise InputError("prune_at", got=self.prune_at, allowed="pre, post_attn")
        object.__setattr__(self, "evidence", _spans(self.evidence))
        if self.score == "oracle" and not self.evidence:
            raise InputError("evidence", got="none", allowed="(start, stop) spans of prompt positions", hint='score="max" needs none')

    def plan(self, layers: int) -> PruneSchedule:
        """The schedule for a model of ``layers`` layers.

        Raises: InputError for a schedule of another depth, or a model of one layer, where nothing can be dropped.

        >>> TokenPruning().plan(30).drops
        ((20, 0.3),)
        """
        if self.schedule is not None:
            return self.schedule.check(layers)
        return PruneSchedule.one_shot(round(2 * layers / 3), 0.3, layers)

    @property
    def memory(self) -> float:
        """Number of layers whose scores decide a drop."""
        if self.score in ("cummax", "calibrated"):
            return math.inf
        return int(self.score[4:]) if self.score.startswith("agg-") else 1

    def layers_scored(self, layers: int) -> frozenset[int]:
        """Layers whose window attention is computed."""
        if self.score == "random":
            return frozenset()
        return frozenset(layer for drop, _ in self.plan(layers).drops for layer in range(drop - min(self.memory, drop), drop))

    def observe(self, run, layer, q, k, v, scaling):
        """Take in the layer's window attention, where a later drop needs it."""
        state = self._state(run)
        if layer not in state["scored"]:
            return
        scores = layer_scores(run, layer, q, k, scaling, window=self.window, size=self.pool, pooling=self.pooling)
        if self.score == "calibrated":
            here = self._weights(run.layers).apply(layer, scores)
        else:
            here = reduce_heads(scores, "sum" if self.score == "sum" else "max")
        past = state["history"]
        # All layers so far are one running maximum; of the last m layers each is kept.
        state["history"] = [torch.stack([*past, here]).amax(0)] if math.isinf(self.memory) else [*past, here][-int(self.memory) :]

    def keep(self, run, layer):
        """The rows that the schedule leaves for ``layer``."""
        state = self._state(run)
        count, alive = state["counts"][layer], len(run.positions)
        if count >= alive:
            return None
        forced = edges(alive, self.sinks, self.window).to(run.positions.device)
        if self.score == "oracle":
            wanted = torch.cat([torch.arange(start, stop) for start, stop in self.evidence]).to(run.positions)
            forced = torch.cat([forced, torch.isin(run.positions, wanted).nonzero().flatten()]).unique()
        index = best(self._scores(run, layer, state, alive), count, forced)
        state["history"] = [scores[index] for scores in state["history"]]
        return index

    def _scores(self, run: Any, layer: int, state: dict, alive: int) -> Tensor:
        if self.score == "random":
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + layer * 1009 + run.tokens)
            return torch.rand(alive, generator=generator).to(run.positions.device)
        return torch.stack(state["history"]).amax(0)

    def _weights(self, layers: int) -> Any:
        from nbkit.methods.fastprefill.calibrate import ScoreWeights

        weights = ScoreWeights.default() if self.weights is None else self.weights
        return weights.check(layers)

    def _state(self, run: Any) -> dict:
        if self not in run.state:
            forced = self.sinks + self.window
            schedule = self.plan(run.layers)
            counts = schedule.counts(run.tokens, floor=forced)
            lowest = min(schedule.ratios)
            if self.strict and schedule.drops and forced >= run.tokens:
                raise InputError("sinks + window", got=f"{forced} forced tokens", allowed=f"fewer than the {run.tokens} of the prompt",
                                 hint="a smaller window, or read short prompts without pruning")
            if self.strict and schedule.drops and math.ceil(lowest * run.tokens - 1e-9) < forced:
                raise InputError("budget of the schedule", got=f"{lowest:g} of {run.tokens} tokens",
                                 allowed=f"at least {forced} tokens (sinks + window)", hint="raise the ratios, or lower sinks and window")
            if self.evidence and max(stop for _, stop in self.evidence) > run.tokens:
                raise InputError("evidence", got=f"a span up to {max(stop for _, stop in self.evidence)}", allowed=f"positions below {run.tokens}")
            run.state[self] = {"counts": counts, "scored": self.layers_scored(run.layers), "history": []}
        return run.state[self]


def _spans(evidence: Sequence) -> tuple[tuple[int, int], ...]:
    try:
        spans = tuple((int(start), int(stop)) for start, stop in evidence)
    except (TypeError, ValueError) as error:
        raise InputError("evidence", got=repr(evidence)[:80], allowed="(start, stop) spans of prompt positions") from error
    wrong = [span for span in spans if not 0 <= span[0] < span[1]]
    if wrong:
        raise InputError("evidence", got=wrong, allowed="(start, stop) spans with 0 <= start < stop")
    return spans
