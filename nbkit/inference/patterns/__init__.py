"""Sparse attention patterns for reading a prompt: one description, one density, and every published rule as a pure function."""

from nbkit.inference.patterns.attention import PatternAttention, attend_pattern
from nbkit.inference.patterns.dynamic import block_topk, flex_prefill, root_js_divergence, x_attention
from nbkit.inference.patterns.fit import DuoFit, VerticalSlashFit, fit_duo_gates, fit_vertical_slash
from nbkit.inference.patterns.heads import duo_attention, entropy_infer, head_set, random_flags, task_kv
from nbkit.inference.patterns.parts import (
    AShape,
    BlockTopK,
    Dense,
    Duo,
    EntropyInfer,
    FlexPrefill,
    HeadSet,
    RandomHeads,
    TaskKV,
    TriangleMix,
    TriShape,
    VerticalSlash,
    XAttention,
)
from nbkit.inference.patterns.pattern import Pattern, causal_pairs, mix
from nbkit.inference.patterns.probe import coverage, probe_attention, probe_sums, top_slots
from nbkit.inference.patterns.static import a_shape, dense, equal_choices, tri_shape, triangle_mix, vertical_slash

__all__ = [
    "AShape", "BlockTopK", "Dense", "Duo", "DuoFit", "EntropyInfer", "FlexPrefill", "HeadSet", "Pattern", "PatternAttention", "RandomHeads",
    "TaskKV", "TriShape", "TriangleMix", "VerticalSlash", "VerticalSlashFit", "XAttention", "a_shape", "attend_pattern", "block_topk",
    "causal_pairs", "coverage", "dense", "duo_attention", "entropy_infer", "equal_choices", "fit_duo_gates", "fit_vertical_slash", "flex_prefill",
    "head_set", "mix", "probe_attention", "probe_sums", "random_flags", "root_js_divergence", "task_kv", "top_slots", "tri_shape", "triangle_mix",
    "vertical_slash", "x_attention",
]
