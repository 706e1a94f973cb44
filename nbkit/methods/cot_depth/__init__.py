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

# These need torch, which the formulas and the simulation do without.
_LAZY = ("LinearSelfAttentionCoT", "SoftmaxCoT", "prompt_sampler", "train_cot", "train_gamma")

__all__ = [
    "CoTDepthTheory",
    "LinearSelfAttentionCoT",
    "Simulation",
    "SoftmaxCoT",
    "WeightPredictor",
    "context_baselines",
    "density",
    "edges",
    "exact_errors",
    "gd_risk",
    "ols_risk",
    "one_step_risk",
    "pretrain",
    "prompt_sampler",
    "quadrature",
    "rate_map",
    "ridge_risk",
    "sample_covariance",
    "sample_moments",
    "sample_prompts",
    "sample_step_matrix",
    "simulate",
    "train_cot",
    "train_gamma",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(".attention", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
