"""When does clarification timing matter: demand curves by forced injection (arXiv 2605.07937).

A fact is missing from a job. It is sent to the agent after a fixed share of the run; what is measured is how success falls with that time, for every
kind of fact.

    suite = OfficeOps()
    experiment = ForcedInjection(suite, timings=(0.1, 0.3, 0.5, 0.7, 0.9), trials=5, budget=1.2)
    table = experiment.run([Eager(), Deferring(), LearnedPolicy.load()])
    curve = demand_curve(table, k=3)
    curve.at("eager", "goal", 0.5)["voi"]          # Interval
"""

from nbkit.agents import Deferring, Eager, HFChoiceAgent, LearnedPolicy, OpenAICompatibleAgent, Restart
from nbkit.envs.office import DIMENSIONS, OfficeOps

from .explore import MARKS, ask_view, declared_commitment, demand_view, describe_ask, describe_demand, draw_ask, draw_demand, live_agent
from .grid import Grid
from .inject import TIMINGS, ForcedInjection, Run, budget_actions, commitment, moment, oracle_passes, sham_message, with_word
from .measure import DemandCurve, Resampling, demand_curve, detectable_difference, holm, sign_flip, wasted_compute, wasted_matrix
from .outcomes import ARMS, Cells, Outcomes, cells, condition_name
from .policy import AskPolicy, EntropyPolicy, NeverAsk, State, ask_summary, in_window, sessions, window_contrast
from .ranks import Agreement, Trend, kendall_panel, page_trend, spearman, tau_b
from .report import PAPER, TIMES, RecordedChoices, ReplayedModel, SweptAgent, as_in_paper, loss_by_commitment, waste_contrast

__all__ = [
    "ARMS", "DIMENSIONS", "MARKS", "PAPER", "TIMES", "TIMINGS", "Agreement", "AskPolicy", "Cells", "Deferring", "DemandCurve", "Eager",
    "EntropyPolicy", "ForcedInjection", "Grid", "HFChoiceAgent", "LearnedPolicy", "NeverAsk", "OfficeOps", "OpenAICompatibleAgent", "Outcomes",
    "RecordedChoices", "ReplayedModel", "Resampling", "Restart", "Run", "State", "SweptAgent", "Trend", "as_in_paper", "ask_summary", "ask_view",
    "budget_actions", "cells", "commitment", "condition_name", "declared_commitment", "demand_curve", "demand_view", "describe_ask",
    "describe_demand", "detectable_difference", "draw_ask", "draw_demand", "holm", "in_window", "kendall_panel", "live_agent", "loss_by_commitment",
    "moment", "oracle_passes", "page_trend", "sessions", "sham_message", "sign_flip", "spearman", "tau_b", "waste_contrast", "wasted_compute",
    "wasted_matrix", "window_contrast", "with_word",
]
