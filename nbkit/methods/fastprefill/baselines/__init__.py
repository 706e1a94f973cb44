"""Other ways of reading a prompt with fewer tokens, all behind one interface: ``nbkit.inference.attach(model, rows=FastKV(...))``.

    full, full-lastrow      everything; everything but the rows that the last layer computes for nothing
    fastkv, asl             one drop, at a given layer or at one chosen at run time
    pyramidinfer, sliminfer a little before every layer; whole blocks at a few layers
    lazyllm                 at a few layers; dropped tokens can come back in decoding (``LazyLLM(...).attach(model)``)
    gemfilter, specprefill  tokens chosen before the model reads, by its first layers or by a draft
    random, oracle          controls
"""

from .asl import ASL, rank_variance, ranks
from .controls import Full, FullLastRow, OracleRows, RandomRows
from .decode import DecodeStudy
from .draft import draft_of, look_ahead, watched
from .fastkv import FastKV, FastKVCache, fastkv_scores, fastkv_slots
from .lazy import REVIVE, LazyCache, LazyLLM, LazyRun, LazyStep, lazy_choice, step_macs
from .prefilter import GemFilter, SpecPrefill, chunk_choice, draft_reading, gemfilter_first_pass, gemfilter_scores, spec_scores
from .pyramid import SHAPES, PyramidInfer, pyramid_counts, pyramid_share
from .row_rule import RowRule
from .rules import best, cover, pool, row_attention, tokens_of
from .slim import SlimInfer, block_scores

__all__ = [
    "ASL",
    "REVIVE",
    "SHAPES",
    "DecodeStudy",
    "FastKV",
    "FastKVCache",
    "Full",
    "FullLastRow",
    "GemFilter",
    "LazyCache",
    "LazyLLM",
    "LazyRun",
    "LazyStep",
    "OracleRows",
    "PyramidInfer",
    "RandomRows",
    "RowRule",
    "SlimInfer",
    "SpecPrefill",
    "best",
    "block_scores",
    "chunk_choice",
    "cover",
    "draft_of",
    "draft_reading",
    "fastkv_scores",
    "fastkv_slots",
    "gemfilter_first_pass",
    "gemfilter_scores",
    "lazy_choice",
    "look_ahead",
    "pool",
    "pyramid_counts",
    "pyramid_share",
    "rank_variance",
    "ranks",
    "row_attention",
    "spec_scores",
    "step_macs",
    "tokens_of",
    "watched",
]
