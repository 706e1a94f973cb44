"""Attention drift: what autoregressive speculative drafters learn (arXiv 2605.09992).

A drafter in the manner of EAGLE-3 proposes several tokens in a chain and feeds each step's state into the next one. The package trains such drafters
for any causal language model, measures how attention, magnitude and direction change along the chain, and decodes speculatively without
changing the target's output.

    cfg = DrafterConfig.from_target(model, draft_vocab=4096, norm_output=True)
    drafter = EagleDrafter(cfg, model)
    fit_drafter(drafter, model, texts, tokenizer=tokenizer, ttt=4, steps=2000)
    report = drift_report(drafter, model, prompts, tokenizer=tokenizer, depth=8)
    out = speculative_generate(model, drafter, input_ids, depth=5)       # out.sequences: what plain greedy decoding gives
"""

from .chain import Chain, attention_shares, draft_chain, measures, prefill_control, sink_position
from .config import DrafterConfig, default_aux_layers
from .drafter import Drafter, EagleDrafter, MTPHead, StepOutput, build
from .features import Features, coverage, frequent_tokens, target_features
from .files import load_drafter, write_checkpoint
from .fit import Batch, FitResult, fit_drafter, ttt_loss
from .intervention import Intervention, rms
from .report import PAPER, by_step, drift_report
from .speculative import Acceptance, SpeculativeOutput, acceptance, reject, speculative_generate

__all__ = [
    "Acceptance",
    "Batch",
    "Chain",
    "Drafter",
    "DrafterConfig",
    "EagleDrafter",
    "Features",
    "FitResult",
    "Intervention",
    "MTPHead",
    "PAPER",
    "SpeculativeOutput",
    "StepOutput",
    "acceptance",
    "attention_shares",
    "build",
    "by_step",
    "coverage",
    "default_aux_layers",
    "draft_chain",
    "drift_report",
    "fit_drafter",
    "frequent_tokens",
    "load_drafter",
    "measures",
    "prefill_control",
    "reject",
    "rms",
    "sink_position",
    "speculative_generate",
    "target_features",
    "ttt_loss",
    "write_checkpoint",
]
