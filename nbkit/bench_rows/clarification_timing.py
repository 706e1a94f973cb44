"""Bench rows of clarification_timing: what an episode costs in memory and on disk, and a choice of the language model."""

from __future__ import annotations

import functools
import statistics

from nbkit import bench

WINDOW = 1024


@functools.lru_cache(maxsize=1)
def _job():
    """One job with its goal missing and an eager agent that is told at half of the run."""
    from nbkit.agents import Eager
    from nbkit.envs.office import OfficeOps
    from nbkit.methods.clarification_timing import ForcedInjection

    suite = OfficeOps(seed=0)
    return ForcedInjection(suite, timings=(0.5,), trials=1, budget=1.6), Eager(), suite.variants[0]


def _episode(backend: str):
    experiment, agent, variant = _job()
    return experiment.episode(agent, variant, fraction=0.5, backend=backend)


def _memory_against_disk() -> bench.Measured:
    """A warm episode with its trace and its check, in memory and on disk."""
    return bench.compare(lambda: _episode("memory"), lambda: _episode("disk"), repeat=9, warmup=2)


def _twins_agree() -> None:
    memory, disk = _episode("memory"), _episode("disk")
    assert memory.trace == disk.trace and memory.row == disk.row and len(memory.trace) >= 20


def _rate() -> bench.Measured:
    """Milliseconds an episode over the 84 jobs under three conditions, every world visited before."""
    from nbkit.envs.office import OfficeOps
    from nbkit.methods.clarification_timing import ForcedInjection

    experiment, agent = ForcedInjection(OfficeOps(seed=0), timings=(0.5,), trials=1), _job()[1]
    cells = [(v, arm) for v in experiment.suite.variants for arm in ("oracle", "never", "inject")]

    def play() -> None:
        for variant, arm in cells:
            experiment.row(agent, variant, arm=arm, fraction=0.5)

    times = [1000 * s / len(cells) for s in bench.seconds(play, repeat=5, warmup=1)]
    return bench.Measured(statistics.median(times), n=len(times), low=min(times), high=max(times))


def _oracle_passes() -> None:
    experiment, agent, _ = _job()
    assert all(experiment.row(agent, variant, arm="oracle")["passed"] for variant in experiment.suite.variants)


@functools.lru_cache(maxsize=1)
def _model():
    """SmolLM2-135M and the prompts that one run makes it read; skipped where the weights are not installed."""
    import nbkit
    from nbkit.agents import HFChoiceAgent
    from nbkit.envs.office import OfficeOps
    from nbkit.methods.clarification_timing import ForcedInjection

    loaded = nbkit.load_model("smollm2-135m", dtype="bfloat16")
    agent = HFChoiceAgent(loaded.model, loaded.tokenizer, window=WINDOW)
    experiment = ForcedInjection(OfficeOps(seed=0), timings=(0.5,), trials=1)
    variant = next(v for v in experiment.suite.variants if v.dimension == "context")
    experiment.episode(agent, variant, fraction=0.5)
    return loaded, list(agent.scorer.memo)


def _choose(reuse: bool):
    from nbkit.agents import ChoiceScorer

    loaded, prompts = _model()
    scorer = ChoiceScorer(loaded.model, loaded.tokenizer, reuse=reuse)
    return [scorer(prefix, options) for prefix, options, _ in prompts]


def _prefix_cache() -> bench.Measured:
    """Milliseconds a choice over the prompts of one run, the shared part of neighbouring prompts read once or every time."""
    choices = len(_model()[1])
    return bench.compare(lambda: _choose(True), lambda: _choose(False), repeat=5, warmup=1, scale=1000 / choices)


def _same_choices() -> None:
    import numpy as np

    for kept, fresh in zip(_choose(True), _choose(False), strict=True):
        # In bfloat16 the two orders of computing differ by rounding.
        np.testing.assert_allclose(kept.sum, fresh.sum, atol=0.3)


ROWS = (
    bench.Row("clarification_timing: a scripted episode", "ms", "none", _rate, _oracle_passes, goal=0.7),
    bench.Row("clarification_timing: an episode in memory", "ms", "the same on disk", _memory_against_disk, _twins_agree),
    bench.Row("clarification_timing: a choice of SmolLM2", "ms", "without prefix cache", _prefix_cache, _same_choices),
)
