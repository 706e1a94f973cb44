"""AMS: adaptive mass-segmented compression of the key-value cache (arXiv 2605.23200).

First divide each head's cache into segments of about equal attention mass and give every segment a quota, then let any token scorer
choose inside each segment.

    policy = SegmentedPolicy(scorer="tova", keep=128, interval=64)
    cache = CompactedCache(model.config, policy)
    with policy.attach(model):
        out = model.generate(**inputs, cache=cache, max_new_tokens=512)
    cache.kept_positions(layer=0)      # (kv_heads, slots) original positions

As one event at the end of a faster prefill: ``nbkit.inference.attach(model, eviction=AmsEviction(budget=0.25))``.
"""

from .allocate import Segmentation, credited, fixed_segments, mass, pool, quotas, segments
from .cache import CompactedCache, CompactedLayer, Event
from .eviction import AmsEviction, SnapKVEviction
from .explore import describe_inspection, draw_inspection, inspect_layer
from .measure import longest_gap, overlap, retained, retention_by_place, wipe_out_rate
from .policy import ALLOCATIONS, SegmentedPolicy, Selection
from .replay import Recording, ReplayEvent, record_pass, replay
from .report import PAPER, Grid
from .scorers import SCORERS, QueryWindow

__all__ = [
    "ALLOCATIONS",
    "PAPER",
    "SCORERS",
    "AmsEviction",
    "CompactedCache",
    "CompactedLayer",
    "Event",
    "Grid",
    "QueryWindow",
    "Recording",
    "ReplayEvent",
    "SegmentedPolicy",
    "Segmentation",
    "Selection",
    "SnapKVEviction",
    "credited",
    "describe_inspection",
    "draw_inspection",
    "fixed_segments",
    "inspect_layer",
    "longest_gap",
    "mass",
    "overlap",
    "pool",
    "quotas",
    "record_pass",
    "replay",
    "retained",
    "retention_by_place",
    "segments",
    "wipe_out_rate",
]
