"""Sparse attention patterns for reading a prompt: one description, one density, and every published rule as a pure function."""

from nbkit.inference.patterns.pattern import Pattern, causal_pairs, mix

__all__ = ["Pattern", "causal_pairs", "mix"]
