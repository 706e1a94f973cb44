"""FastPrefill: a long prompt is read with fewer and fewer tokens, by a schedule found offline, and each head reads its own keys.

The paper's body is not public; this is a reconstruction from its abstract and the work it builds on.

    schedule = fit_schedule(model, tokenizer, prompts, latency_budget=0.75)
    with FastPrefill(schedule).attach(model) as run:
        out = model.generate(**inputs, max_new_tokens=32)
    run.counts, run.macs, run.cache.nbytes
"""

from .cost import LatencyModel, MacCost, ModelShape, decode_macs, prefill_macs
from .fitprune import fit_fitprune
from .heads import GRANULARITIES, HeadCache, HeadSelected, head_sets, recalled_mass
from .optimise import Planner, best_one_shot, refine
from .prune import SCORES, TokenPruning, layer_scores, reduce_heads
from .reader import FastPrefill
from .report import PAPER
from .schedule import PruneSchedule, match_cost
from .sensitivity import LayerRunner, SensitivityTable, fit_schedule, prompt_losses

__all__ = [
    "GRANULARITIES",
    "PAPER",
    "SCORES",
    "FastPrefill",
    "HeadCache",
    "HeadSelected",
    "LatencyModel",
    "LayerRunner",
    "MacCost",
    "ModelShape",
    "Planner",
    "PruneSchedule",
    "SensitivityTable",
    "TokenPruning",
    "best_one_shot",
    "decode_macs",
    "fit_fitprune",
    "fit_schedule",
    "head_sets",
    "layer_scores",
    "match_cost",
    "prefill_macs",
    "prompt_losses",
    "recalled_mass",
    "reduce_heads",
    "refine",
]
