"""FastPrefill: a long prompt is read with fewer and fewer tokens, by a schedule found offline, and each head reads its own keys.

The paper's body is not public; this is a reconstruction from its abstract and the work it builds on.

    schedule = fit_schedule(model, tokenizer, prompts, latency_budget=0.75)
    with FastPrefill(schedule).attach(model) as run:
        out = model.generate(**inputs, max_new_tokens=32)
    run.counts, run.macs, run.cache.nbytes
"""

from .calibrate import ScoreWeights, fit_score_weights, head_lifts
from .cost import (
    LatencyModel,
    MacCost,
    ModelShape,
    causal_pairs,
    decode_macs,
    draft_macs,
    gemfilter_macs,
    measure_layers,
    prefill_macs,
    schedule_macs,
)
from .fitprune import fit_fitprune
from .heads import GRANULARITIES, HeadCache, HeadSelected, head_sets, recalled_mass
from .optimise import Planner, best_one_shot, refine, surrogate
from .prune import SCORES, TokenPruning, layer_scores, reduce_heads
from .reader import FastPrefill
from .report import PAPER, Grid, Timing, frontier
from .schedule import PruneSchedule, match_cost
from .sensitivity import SensitivityTable, default_layers, fit_schedule, prompt_losses
from .stored import LayerRunner

__all__ = [
    "GRANULARITIES",
    "PAPER",
    "SCORES",
    "FastPrefill",
    "Grid",
    "HeadCache",
    "HeadSelected",
    "LatencyModel",
    "LayerRunner",
    "MacCost",
    "ModelShape",
    "Planner",
    "PruneSchedule",
    "ScoreWeights",
    "SensitivityTable",
    "Timing",
    "TokenPruning",
    "best_one_shot",
    "causal_pairs",
    "decode_macs",
    "default_layers",
    "draft_macs",
    "fit_fitprune",
    "fit_schedule",
    "fit_score_weights",
    "frontier",
    "gemfilter_macs",
    "head_lifts",
    "head_sets",
    "layer_scores",
    "match_cost",
    "measure_layers",
    "prefill_macs",
    "prompt_losses",
    "recalled_mass",
    "reduce_heads",
    "refine",
    "schedule_macs",
    "surrogate",
]
