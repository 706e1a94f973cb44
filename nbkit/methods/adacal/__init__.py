"""AdaCal: adaptive calibration of sparse attention while a prompt is read.

The paper's body is not public: the method is reconstructed from its abstract and from prior work. A cheap probe profiles every head, the prompt's
class sets the policy, and only heads that look into the middle of the prompt get more than sinks and a local window.

    with AdaCal(AdaCalConfig(), tokenizer=tokenizer).attach(model) as run:
        out = model.generate(ids, max_new_tokens=32)     # sparse prefill, dense decoding
    run.task, run.density, run.profile                   # class, share of the causal pairs with the probe, one row a layer and head
"""

from .augment import Augmentation, Choice, augment, choose
from .config import POLICIES, REDUCTIONS, TASKS, AdaCalConfig, TaskPolicy
from .dispatch import Dispatch, classify, dispatch, query_overlap
from .method import AdaCal, AdaCalRun, profile
from .metrics import (
    Zones,
    by_distance,
    column_sums,
    concentration,
    covered_share,
    diagonal_sums,
    entropy,
    probe_attention,
    reduce_rows,
    zone_mass,
    zones,
)
from .policy import LayerPlan, build_mask, plan_layer
from .report import PAPER, Grid, Heads, spearman

__all__ = [
    "PAPER",
    "POLICIES",
    "REDUCTIONS",
    "TASKS",
    "AdaCal",
    "AdaCalConfig",
    "AdaCalRun",
    "Augmentation",
    "Choice",
    "Dispatch",
    "Grid",
    "Heads",
    "LayerPlan",
    "TaskPolicy",
    "Zones",
    "augment",
    "build_mask",
    "by_distance",
    "choose",
    "classify",
    "column_sums",
    "concentration",
    "covered_share",
    "diagonal_sums",
    "dispatch",
    "entropy",
    "plan_layer",
    "probe_attention",
    "profile",
    "query_overlap",
    "reduce_rows",
    "spearman",
    "zone_mass",
    "zones",
]
