"""Metrics shared by several papers: intervals first, because no number of a notebook stands without one."""

from nbkit.metrics.intervals import Interval, bootstrap, kendall, paired, pass_at_k, sign_test, slope, wilson

__all__ = ["Interval", "bootstrap", "kendall", "paired", "pass_at_k", "sign_test", "slope", "wilson"]
