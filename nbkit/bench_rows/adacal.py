"""Bench rows of adacal: time to first token beside full prefill, its kernel beside masked attention, and what deciding costs."""

from __future__ import annotations

import functools
import statistics

from nbkit import bench


@functools.lru_cache(maxsize=3)
def _setting(tokens: int):
    """SmolLM2-135M and a held-out needle prompt; skipped where the weights are not installed."""
    import torch

    import nbkit

    loaded = nbkit.load_model("smollm2-135m")
    prompt = nbkit.load_long_tasks("needle", n=1, tokens=tokens, split="held-out", tokenizer=loaded.tokenizer)[0]
    return loaded, torch.from_numpy(prompt.ids)[None]


def _part(loaded, **changes):
    from nbkit.methods.adacal import AdaCal, AdaCalConfig

    return AdaCal(AdaCalConfig(**changes), loaded.tokenizer)


def _first_token(tokens: int, repeat: int) -> bench.Measured:
    import torch

    loaded, ids = _setting(tokens)
    part = _part(loaded)

    def ours():
        with part.attach(loaded.model):
            loaded.model(ids, logits_to_keep=1)

    with torch.inference_mode():
        return bench.compare(ours, lambda: loaded.model(ids, logits_to_keep=1), repeat=repeat, warmup=1)


def _equals_dense() -> None:
    """With a window over the whole prompt AdaCal gives the logits of the plain model; with its defaults it reads fewer pairs than that."""
    import torch

    loaded, ids = _setting(512)
    with torch.inference_mode():
        dense = loaded.model(ids, logits_to_keep=1).logits
        with _part(loaded, window=512, tau=1.0).attach(loaded.model) as run:
            ours = loaded.model(ids, logits_to_keep=1).logits
        assert torch.allclose(ours, dense, atol=1e-2), f"largest difference {float((ours - dense).abs().max()):.2g}"
        assert sum(run.pairs) == run.dense_pairs
        with _part(loaded).attach(loaded.model) as run:
            loaded.model(ids, logits_to_keep=1)
        assert 0 < run.density < 1


@functools.lru_cache(maxsize=1)
def _layer():
    """Rotated queries, keys, values and AdaCal's pattern of the middle layer at 2,048 tokens."""
    import torch

    from nbkit.inference import attach
    from nbkit.inference.patterns import PatternAttention
    from nbkit.methods.adacal import AdaCalConfig, plan_layer

    loaded, ids = _setting(2048)
    seen = {}

    class Keep(PatternAttention):
        def pattern(self, run, layer, q, k, v, scaling):
            plan = plan_layer(q[0], k[0], AdaCalConfig(), task="retrieval", scaling=scaling, fallback=True)
            if layer == run.layers // 2:
                seen.update(q=q, k=k, v=v, scaling=scaling, pattern=plan.pattern)
            return plan.pattern

    with torch.inference_mode(), attach(loaded.model, attention=Keep()):
        loaded.model(ids, logits_to_keep=1)
    return seen


def _masked(seen):
    from torch.nn import functional as F

    mask = seen["pattern"].mask(seen["q"].shape[2])[None]
    return lambda: F.scaled_dot_product_attention(seen["q"], seen["k"], seen["v"], mask, scale=seen["scaling"], enable_gqa=True)


def _sparse(seen):
    from nbkit.inference.patterns import attend_pattern

    return lambda: attend_pattern(seen["pattern"], seen["q"], seen["k"], seen["v"], seen["scaling"])


def _kernel() -> bench.Measured:
    seen = _layer()
    return bench.compare(_sparse(seen), _masked(seen), repeat=9)


def _kernel_is_exact() -> None:
    import torch

    seen = _layer()
    assert torch.allclose(_sparse(seen)(), _masked(seen)(), atol=1e-4)


def _deciding() -> bench.Measured:
    """Profile and choice of one layer, as a percentage of full prefill spread over the layers."""
    import torch

    from nbkit.methods.adacal import AdaCalConfig, plan_layer

    loaded, ids = _setting(2048)
    seen, layers = _layer(), loaded.model.config.num_hidden_layers
    with torch.inference_mode():
        plan = bench.seconds(lambda: plan_layer(seen["q"][0], seen["k"][0], AdaCalConfig(), task="retrieval", fallback=True), repeat=7)
        full = bench.seconds(lambda: loaded.model(ids, logits_to_keep=1), repeat=2, warmup=1)
    return bench.Measured(100 * statistics.median(plan) * layers / statistics.median(full), n=7)


def _dispatch() -> bench.Measured:
    from nbkit.methods.adacal import dispatch

    loaded, ids = _setting(4096)
    times = sorted(1e3 * x for x in bench.seconds(lambda: dispatch(ids, loaded.tokenizer), repeat=50, warmup=5))
    return bench.Measured(statistics.median(times), n=len(times), low=times[12], high=times[-13])


def _dispatch_is_right() -> None:
    from nbkit.methods.adacal import dispatch

    loaded, ids = _setting(4096)
    assert dispatch(ids, loaded.tokenizer).task == "retrieval"


ROWS = (
    bench.Row("adacal: first token, 2,048 tokens", "ms", "full prefill", lambda: _first_token(2048, 3), _equals_dense),
    bench.Row("adacal: first token, 4,096 tokens", "ms", "full prefill", lambda: _first_token(4096, 2), _equals_dense),
    bench.Row("adacal: attention of one layer, 2,048 tokens", "ms", "masked attention, same pairs", _kernel, _kernel_is_exact),
    bench.Row("adacal: profiling and choosing, 2,048 tokens", "% of prefill", "full prefill", _deciding, _kernel_is_exact),
    bench.Row("adacal: task dispatch, 4,096 tokens", "ms", "none", _dispatch, _dispatch_is_right, goal=1.0),
)
