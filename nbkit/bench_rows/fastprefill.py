"""Bench rows of fastprefill: time to first token beside full prefill and every baseline of equal quality, sparse attention, the optimiser."""

from __future__ import annotations

import functools
import statistics

from nbkit import bench
from nbkit.errors import MissingResourceError

TOKENS, SPARSE_TOKENS = 2048, 2048
BASELINES = ("cosine", "asl", "fastkv", "gemfilter", "pyramidinfer", "sliminfer", "lazyllm", "specprefill")


@functools.lru_cache(maxsize=1)
def _setting():
    """SmolLM2-135M and held-out prose; skipped where the weights are not installed."""
    import torch

    import nbkit

    loaded = nbkit.load_model("smollm2-135m")
    text = nbkit.load_text("prose", split="held-out", n=1, tokens=TOKENS, tokenizer=loaded.tokenizer)
    return loaded.model.float(), torch.tensor(text[0].ids)[None]


@functools.lru_cache(maxsize=1)
def _grid():
    from nbkit.loaders import load_recording
    from nbkit.methods.fastprefill.report import Grid

    return Grid(load_recording("fastprefill-grid").data)


def _parts(cell: str) -> dict:
    """The parts of a cell of the grid, for a session; sizes that were fitted to a budget stay shares of the prompt."""
    from nbkit.methods.fastprefill import HeadSelected, ModelShape, PruneSchedule, TokenPruning
    from nbkit.methods.fastprefill.baselines import ASL
    from nbkit.recipes.fastprefill import POOL, PRUNING, SINKS, WINDOW, baseline_rules

    name, _, tau = cell.partition("@")
    schedules = _grid().data["schedules"]
    if cell in schedules:
        return {"rows": TokenPruning(PruneSchedule.from_ratios(schedules[cell]["ratios"]), **PRUNING)}
    if name == "fastprefill":
        heads = HeadSelected(granularity="query", budget=0.2, sinks=SINKS, window=WINDOW, pool=POOL)
        return {**_parts(f"optimised@{tau}"), "attention": heads}
    if name == "asl":
        return {"rows": ASL()}
    rule = baseline_rules(ModelShape.from_config(_setting()[0].config), float(tau))[name]
    if name == "gemfilter":
        rule = type(rule)(keep_tokens=rule.keep_tokens / _grid().data["tokens"])
    return {"rows": rule}


def _equal_quality(*names: str) -> str | None:
    """The cheapest recorded cell of these methods whose mean loss and exact answers stay within the limits of equal quality, or None."""
    from nbkit.methods.fastprefill.report import frontier

    rows = frontier(_grid(), [cell for cell in _grid().names if cell.split("@")[0] in names])
    return rows[0]["cell"] if rows else None


def _read(parts: dict):
    import torch

    from nbkit.inference import attach

    model, ids = _setting()
    with torch.inference_mode(), attach(model, **parts):
        return model(ids, use_cache=True, logits_to_keep=1)


def _ours() -> dict:
    cell = _equal_quality("optimised", "fastprefill")
    if cell is None:
        raise MissingResourceError("schedule of equal quality", got="none in the recording", hint="no budget keeps the quality here")
    return _parts(cell)


def _against_full() -> bench.Measured:
    ours = _ours()
    return bench.compare(lambda: _read(ours), lambda: _read({}), repeat=5, warmup=1, scale=1.0)


def _against(name: str) -> bench.Measured:
    """Beside the cheapest cell of a baseline that keeps the quality; a baseline without one has nothing to be compared with."""
    cell = _equal_quality(name)
    if cell is None:
        raise MissingResourceError(f"{name} of equal quality", got="none in the recording", hint="it loses more than .05 nats or 5 points")
    ours, theirs = _ours(), _parts(cell)
    return bench.compare(lambda: _read(ours), lambda: _read(theirs), repeat=5, warmup=1, scale=1.0)


def _keeping_all_is_full() -> None:
    """A schedule of ones gives the logits of the plain model, and the chosen one leaves the rows that it says."""
    import torch

    from nbkit.inference import attach
    from nbkit.methods.fastprefill import PruneSchedule, TokenPruning

    model, ids = _setting()
    short = ids[:, :256]
    with torch.inference_mode():
        plain = model(short).logits
        with attach(model, rows=TokenPruning(PruneSchedule.full(model.config.num_hidden_layers))):
            kept = model(short).logits
        rule = _ours()["rows"]
        with attach(model, rows=rule) as run:
            model(short)
    assert torch.allclose(plain, kept, atol=1e-4), f"largest difference {float((plain - kept).abs().max()):.2g}"
    assert run.counts == list(rule.schedule.counts(256, 36))


@functools.lru_cache(maxsize=4)
def _heads(density: float):
    """Queries, keys, values of SmolLM2's shapes and key sets that hold ``density`` of the keys."""
    import torch

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, SPARSE_TOKENS, 64, generator=generator) for heads in (9, 3, 3))
    count = max(1, int(density * SPARSE_TOKENS))
    columns = torch.stack([torch.randperm(SPARSE_TOKENS, generator=generator)[:count].sort().values for _ in range(9)])[None]
    return q, k, v, columns


def _sparse_attention(density: float) -> bench.Measured:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as dense

    from nbkit import kernels

    q, k, v, columns = _heads(density)

    def sparse():
        return kernels.sparse_attention(q, k, v, 0.125, window=32, columns=columns)

    with torch.inference_mode():
        return bench.compare(sparse, lambda: dense(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), is_causal=True), repeat=9)


def _sparse_is_exact(density: float) -> None:
    import torch

    from nbkit import kernels

    q, k, v, columns = (x[:, :, -300:] if x.dim() == 4 else x for x in _heads(density))
    columns = columns[:, :, :20] % 300
    columns = columns.sort(-1).values
    out, _ = kernels.sparse_attention(q, k, v, 0.125, window=32, columns=columns)
    distance = torch.arange(300)[:, None] - torch.arange(300)
    chosen = torch.zeros(9, 300, dtype=torch.bool).scatter_(1, columns[0], True)
    seen = ((distance < 32) | chosen[:, None]) & (distance >= 0)
    logits = (q[0].double() @ k[0].double().repeat_interleave(3, 0).transpose(1, 2)) * 0.125
    exact = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v[0].double().repeat_interleave(3, 0)
    assert (out[0] - exact).abs().max() < 1e-4


def _planner():
    from nbkit.loaders import load_recording
    from nbkit.methods.fastprefill import ModelShape, SensitivityTable

    data = load_recording("fastprefill-sensitivity").data
    shape = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
    return SensitivityTable.from_dict(data["table"]).planner(shape, tokens=data["tokens"], floor=data["floor"], scored=data["scored"])


def _optimiser() -> bench.Measured:
    """Table to schedule for one budget, everything included: smoothing, the dynamic program and the way back."""
    times = bench.seconds(lambda: _planner().solve(0.75), repeat=9)
    read = bench.seconds(_planner, repeat=9)
    return bench.Measured(1e3 * (statistics.median(times) - statistics.median(read)), n=9)


def _optimiser_is_optimal() -> None:
    """Never worse than the price-based solution or the best single drop, and within its limit."""
    from nbkit.methods.fastprefill import best_one_shot

    plan = _planner()
    for tau in (0.55, 0.65, 0.75, 0.85):
        best = plan.solve(tau)
        assert plan.cost(best) <= tau * plan.full_cost
        # Costs are rounded up, so a rival gets the same rounding's worth less.
        for rival in (plan.lagrangian(tau - 0.01), best_one_shot(plan, tau - 0.01)):
            assert best.predicted_loss <= rival.predicted_loss + 1e-4


ROWS = (
    bench.Row("fastprefill: first token at equal quality, 2,048 tokens", "s", "full prefill", _against_full, _keeping_all_is_full),
    *(
        bench.Row(f"fastprefill: first token beside {name}", "s", f"{name} at equal quality", functools.partial(_against, name), _keeping_all_is_full)
        for name in BASELINES
    ),
    *(
        bench.Row(
            f"sparse attention, {density:.0%} of the keys a head, 2,048 tokens", "ms", "dense scaled_dot_product_attention",
            functools.partial(_sparse_attention, density), functools.partial(_sparse_is_exact, density),
        )
        for density in (0.25, 0.1, 0.05)
    ),
    bench.Row("fastprefill: optimiser, one budget", "ms", "", _optimiser, _optimiser_is_optimal, goal=20.0),
)
