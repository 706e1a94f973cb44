"""Bench rows of attention_drift: what drafting gains on SmolLM2-135M, and what one step of a chain costs."""

from __future__ import annotations

import functools
import time

from nbkit import bench

NEW, DEPTH, PROMPTS = 48, 4, 3


@functools.lru_cache(maxsize=1)
def _setting():
    """SmolLM2-135M, its two drafters, and three held-out prompts; skipped where the weights are not installed."""
    import torch

    import nbkit
    from nbkit.recipes import drift_smollm2_eval

    model, tokenizer = nbkit.load_model("smollm2-135m")
    drafters = {v: nbkit.load_model(f"drift-smollm2-{v}", dtype=torch.float32).model.bind(model) for v in ("pre", "post")}
    return model, drafters, drift_smollm2_eval.template_ids(tokenizer, "as trained", PROMPTS)


def _plain(ids):
    import torch

    model = _setting()[0]
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def _drafted(ids, variant: str):
    from nbkit.methods.attention_drift import speculative_generate

    model, drafters, _ = _setting()
    return speculative_generate(model, drafters[variant], ids, depth=DEPTH, max_new_tokens=NEW)


@functools.lru_cache(maxsize=1)
def _runs() -> dict:
    """Every prompt decoded plainly and with each drafter, in turn: {name: [(new tokens, seconds, output)]}."""
    out: dict[str, list] = {"plain": [], "pre": [], "post": []}
    _plain(_setting()[2][:1])
    for ids in _setting()[2].split(1):
        for name in out:
            begin = time.perf_counter()
            done = _plain(ids) if name == "plain" else _drafted(ids, name)
            seconds = time.perf_counter() - begin
            out[name].append((done.shape[1] - ids.shape[1] if name == "plain" else done.new_tokens, seconds, done))
    return out


def _rate(name: str) -> float:
    rows = _runs()[name]
    return sum(tokens for tokens, _, _ in rows) / sum(seconds for _, seconds, _ in rows)


def _decoding(variant: str) -> bench.Measured:
    """Tokens per second over all prompts."""
    return bench.Measured(_rate(variant), _rate("plain"), n=PROMPTS)


def _same_text() -> None:
    """Drafting changes no token."""
    import torch

    runs = _runs()
    for name in ("pre", "post"):
        for (_, _, plain), (_, _, drafted) in zip(runs["plain"], runs[name], strict=True):
            assert torch.equal(plain, drafted.sequences), f"{name}: drafting changed the text"


def _length() -> bench.Measured:
    """Acceptance length with the bonus token, post against pre."""
    from nbkit.methods.attention_drift import acceptance

    length = {}
    for name in ("pre", "post"):
        full = [a for _, _, out in _runs()[name] for a, d in zip(out.accepted, out.drafted, strict=True) if d == DEPTH]
        length[name] = acceptance(full, DEPTH).with_bonus
    return bench.Measured(length["post"], length["pre"], n=PROMPTS)


def _step() -> bench.Measured:
    """One more step of a chain behind 128 tokens, against one decoding step of the target."""
    import torch
    from transformers import DynamicCache

    model, drafters, ids = _setting()
    drafter, ids = drafters["post"], ids[:1]
    d = drafter.cfg.hidden_size
    with torch.inference_mode():
        text = drafter.step(drafter.embed(ids), torch.zeros(1, ids.shape[1], d), torch.arange(ids.shape[1]), logits=False).kv
        cache = DynamicCache(config=model.config)
        model(ids, cache=cache)
        embeds, f, at = drafter.embed(ids[:, :1]), torch.ones(1, 1, d), torch.tensor([ids.shape[1]])

        def target() -> None:
            model(ids[:, :1], cache=cache)
            cache.crop(-1)

        return bench.compare(lambda: drafter.step(embeds, f, at, text), target, repeat=25, warmup=3)


ROWS = (
    *(bench.Row(f"attention_drift: SmolLM2, {v}-norm drafts of 4", "tokens/s", "plain greedy decoding", functools.partial(_decoding, v), _same_text)
      for v in ("pre", "post")),
    bench.Row("attention_drift: acceptance length, post-norm (with bonus token)", "tokens", "pre-norm", _length, _same_text),
    bench.Row("attention_drift: one step of a chain, d = 576", "ms", "one decoding step of the target", _step, _same_text),
)
