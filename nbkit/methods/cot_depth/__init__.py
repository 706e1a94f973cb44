"""Chain-of-thought depth in in-context weight prediction: how the error depends on depth, pre-training and context (arXiv 2606.03217).

The formulas are our derivation of the model that the paper describes; its theorem itself was not available to us.

    theory = CoTDepthTheory(alpha=2.0, tau=2.0)
    theory.error(range(21))        # exact in the limit of large dimension
    theory.regime()                # "overthinking"
    theory.optimal_depth(60)       # where to stop
"""

import importlib
from typing import Any

from .baselines import gd_risk, ols_risk, one_step_risk, ridge_risk
from .explore import (
    BestTable,
    depth_view,
    describe_best,
    describe_depth,
    describe_eigenvalues,
    draw_best,
    draw_depth,
    draw_eigenvalues,
    eigenvalue_view,
)
from .report import (
    PAPER,
    Runs,
    agreement,
    at_depth,
    best_depths,
    by_draw,
    describe_setting,
    explained,
    fitted_rate,
    follows,
    power_law,
    rises,
    t_interval,
    theory_for,
    trend,
)
from .simulate import (
    Simulation,
    WeightPredictor,
    context_baselines,
    exact_errors,
    pretrain,
    sample_covariance,
    sample_moments,
    sample_prompts,
    sample_step_matrix,
    simulate,
)
from .spectrum import density, edges, quadrature
from .theory import CoTDepthTheory, rate_map
from .tokens import attention_view, describe_attention, draw_attention

# These need torch, which the formulas and the simulation do without.
_LAZY = ("LinearSelfAttentionCoT", "SoftmaxCoT", "prompt_sampler", "train_cot", "train_gamma")

__all__ = [
    "PAPER",
    "BestTable",
    "CoTDepthTheory",
    "LinearSelfAttentionCoT",
    "Runs",
    "Simulation",
    "SoftmaxCoT",
    "WeightPredictor",
    "agreement",
    "at_depth",
    "attention_view",
    "best_depths",
    "by_draw",
    "context_baselines",
    "density",
    "depth_view",
    "describe_attention",
    "describe_best",
    "describe_depth",
    "describe_eigenvalues",
    "describe_setting",
    "draw_attention",
    "draw_best",
    "draw_depth",
    "draw_eigenvalues",
    "edges",
    "eigenvalue_view",
    "exact_errors",
    "explained",
    "fitted_rate",
    "follows",
    "gd_risk",
    "ols_risk",
    "one_step_risk",
    "power_law",
    "pretrain",
    "prompt_sampler",
    "quadrature",
    "rate_map",
    "ridge_risk",
    "rises",
    "sample_covariance",
    "sample_moments",
    "sample_prompts",
    "sample_step_matrix",
    "simulate",
    "t_interval",
    "theory_for",
    "train_cot",
    "train_gamma",
    "trend",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(".attention", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
