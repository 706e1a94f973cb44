"""Chain-of-thought depth in in-context weight prediction: how the error depends on depth, pre-training and context (arXiv 2606.03217).

The formulas are our derivation of the model that the paper describes; its theorem itself was not available to us.

    theory = CoTDepthTheory(alpha=2.0, tau=2.0)
    theory.error(range(21))        # exact in the limit of large dimension
    theory.regime()                # "overthinking"
    theory.optimal_depth(60)       # where to stop
"""

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

__all__ = [
    "CoTDepthTheory",
    "Simulation",
    "WeightPredictor",
    "context_baselines",
    "density",
    "edges",
    "exact_errors",
    "gd_risk",
    "ols_risk",
    "one_step_risk",
    "pretrain",
    "quadrature",
    "rate_map",
    "ridge_risk",
    "sample_covariance",
    "sample_moments",
    "sample_prompts",
    "sample_step_matrix",
    "simulate",
]
