"""Attention drift: what autoregressive speculative drafters learn (arXiv 2605.09992).

A drafter in the manner of EAGLE-3 proposes several tokens in a chain and feeds each step's state into the next one. The package trains such drafters
for any causal language model, measures how attention, magnitude and direction change along the chain, and decodes speculatively without
changing the target's output.

    cfg = DrafterConfig.from_target(model, draft_vocab=4096, norm_output=True)
    drafter = EagleDrafter(cfg, model)
    fit_drafter(drafter, model, texts, tokenizer=tokenizer, ttt=4, steps=2000)
"""

from .drafter import Drafter, DrafterConfig, EagleDrafter, Intervention, MTPHead, StepOutput, build, default_aux_layers, rms
from .features import Features, coverage, frequent_tokens, target_features
from .fit import Batch, FitResult, fit_drafter, ttt_loss

__all__ = [
    "Batch",
    "Drafter",
    "DrafterConfig",
    "EagleDrafter",
    "Features",
    "FitResult",
    "Intervention",
    "MTPHead",
    "StepOutput",
    "build",
    "coverage",
    "default_aux_layers",
    "fit_drafter",
    "frequent_tokens",
    "rms",
    "target_features",
    "ttt_loss",
]
