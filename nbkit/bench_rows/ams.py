"""Bench rows of ams: what an event costs beside the decoding it serves, and what it saves."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
from pathlib import Path

from nbkit import bench
from nbkit.errors import MissingResourceError

PROMPT, KEEP, INTERVAL = 1024, 128, 64


@functools.lru_cache(maxsize=1)
def _setting():
    """SmolLM2-135M and 1,024 tokens of held-out prose; skipped where the weights are not installed."""
    import torch

    import nbkit

    loaded = nbkit.load_model("smollm2-135m")
    text = nbkit.load_text("prose", split="held-out", n=1, tokens=PROMPT, tokenizer=loaded.tokenizer)
    return loaded.model, torch.tensor(text[0].ids)[None]


def _policy(**changes):
    from nbkit.methods.ams import SegmentedPolicy

    return SegmentedPolicy(**({"scorer": "tova", "keep": KEEP, "interval": INTERVAL} | changes))


def _filled(policy):
    """A cache after prefill and one interval of decoding, just before its event (interval set beyond reach)."""
    import torch

    from nbkit.methods.ams import CompactedCache

    model, ids = _setting()
    cache = CompactedCache(model.config, policy, record="none")
    with torch.inference_mode(), policy.attach(model):
        model(ids[:, :-INTERVAL], cache=cache)
        model(ids[:, -INTERVAL:], cache=cache)
    return model, cache


def _selection_share() -> bench.Measured:
    """Selection, without the gather, at the steady size keep + interval, as a percentage of the decoding steps of one interval."""
    import torch

    from nbkit.methods.ams import CompactedCache, record_pass, replay

    model, ids = _setting()
    policy = _policy()
    recording = record_pass(model, ids[0, : KEEP + 2 * INTERVAL])
    layers = len(recording.keys)
    # replay() runs the very code of an event layer by layer; the cache itself selects for all layers in one call, so this is an upper bound.
    one_layer = statistics.median(bench.seconds(lambda: replay(recording, policy, 0, prefill=KEEP), repeat=9))
    events = len(replay(recording, policy, 0, prefill=KEEP))
    cache = CompactedCache(model.config, policy, record="none")
    with torch.inference_mode(), policy.attach(model):
        model(ids[:, :KEEP], cache=cache)
        step = statistics.median(bench.seconds(lambda: model(ids[:, :1], cache=cache), repeat=INTERVAL // 2, warmup=2))
    return bench.Measured(100 * (one_layer / events * layers) / (step * INTERVAL), n=9)


def _selection_is_exact() -> None:
    """The same slots as the reference kernels give."""
    import torch

    from nbkit.methods.ams import record_pass, replay

    model, ids = _setting()
    recording = record_pass(model, ids[0, :320])
    fast = replay(recording, _policy(), 3)
    before = os.environ.get("NBKIT_KERNELS")
    os.environ["NBKIT_KERNELS"] = "reference"
    try:
        slow = replay(recording, _policy(), 3)
    finally:
        os.environ.pop("NBKIT_KERNELS")
        if before is not None:
            os.environ["NBKIT_KERNELS"] = before
    assert len(fast) == len(slow) > 1
    same = statistics.mean(float((a.kept == b.kept).all(-1).float().mean()) for a, b in zip(fast, slow, strict=True))
    # float32 against float64 scores may swap near-ties; anything more is a defect.
    assert same > 0.9, f"only {same:.0%} of the head-events agree with the reference kernels"
    assert all(torch.equal(a.kept, a.kept.sort(-1).values) for a in fast)


def _bytes_share() -> bench.Measured:
    """Key and value bytes after 1,024 tokens, as a percentage of the full cache."""
    model, cache = _filled(_policy())
    config = model.config
    full = PROMPT * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return bench.Measured(100 * cache.nbytes["physical"] / full, 100.0)


def _bytes_are_exact() -> None:
    model, cache = _filled(_policy())
    assert cache.nbytes["physical"] == KEEP * 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim * 4
    assert cache.nbytes["logical"] == cache.nbytes["physical"]


def _gather_against_mask() -> bench.Measured:
    """One decoding step on the gathered cache against one on the full cache with a mask over the same entries."""
    import torch
    from transformers import DynamicCache

    model, ids = _setting()
    with torch.inference_mode():
        short = DynamicCache(config=model.config)
        model(ids[:, :KEEP], cache=short)
        full = DynamicCache(config=model.config)
        model(ids, cache=full)
        mask = torch.zeros(1, 1, 1, PROMPT + 4096, dtype=torch.bool)
        mask[..., :KEEP] = True
        token = ids[:, :1]

        def gathered():
            model(token, cache=short, position_ids=torch.tensor([[PROMPT]]))
            short.crop(-1)

        def masked():
            model(token, cache=full, attention_mask=mask[..., : PROMPT + 1])
            full.crop(-1)

        return bench.compare(gathered, masked, repeat=25, warmup=3)


def _gather_equals_mask() -> None:
    """Both caches hold the first entries: the same logits."""
    import torch
    from transformers import DynamicCache

    model, ids = _setting()
    with torch.inference_mode():
        short, full = DynamicCache(config=model.config), DynamicCache(config=model.config)
        model(ids[:, :KEEP], cache=short)
        model(ids, cache=full)
        mask = torch.zeros(1, 1, 1, PROMPT + 1, dtype=torch.bool)
        mask[..., :KEEP] = True
        mask[..., -1] = True
        a = model(ids[:, :1], cache=short, position_ids=torch.tensor([[PROMPT]])).logits
        b = model(ids[:, :1], cache=full, attention_mask=mask, position_ids=torch.tensor([[PROMPT]])).logits
    assert torch.allclose(a, b, atol=1e-3), f"largest difference {float((a - b).abs().max()):.2g}"


NEW_TOKENS, PEER_PROMPT = 192, 256


@functools.lru_cache(maxsize=1)
def _kvpress() -> dict:
    """kvpress' answer on the same weights and prompt, from the Python named by NBKIT_KVPRESS_PYTHON."""
    import torch

    from nbkit.loaders.models import tokenizer_file

    python = os.environ.get("NBKIT_KVPRESS_PYTHON")
    if not python:
        raise MissingResourceError("NBKIT_KVPRESS_PYTHON", got="not set", hint="name a Python that has kvpress; see README, Bench")
    model, ids = _setting()
    request = {
        "folder": str(tokenizer_file("smollm2-135m").parent), "ids": ids[0, :PEER_PROMPT].tolist(), "new_tokens": NEW_TOKENS, "interval": INTERVAL,
        "keep": KEEP, "repeat": 3, "threads": torch.get_num_threads(),
    }
    script = Path(__file__).parent.parent / "peers" / "kvpress_decoding.py"
    # Kept out of our own package path: the peer must see its environment's libraries only.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, str(script)], input=json.dumps(request), capture_output=True, text=True, timeout=1800, env=env)
    if done.returncode:
        raise MissingResourceError("kvpress", got=done.stderr.strip().splitlines()[-1:], hint="run nbkit/peers/kvpress_decoding.py by hand")
    return json.loads(done.stdout.strip().splitlines()[-1])


@functools.lru_cache(maxsize=1)
def _ours() -> tuple[list[int], list[float], int]:
    """The same policy here: KeyDiff, no protected tokens, one segment; tokens, seconds and slots at the end."""
    import time

    import torch

    from nbkit.methods.ams import CompactedCache

    model, ids = _setting()
    ids = ids[:, :PEER_PROMPT]
    policy = _policy(scorer="keydiff", allocation="none", sinks=0, recent=0)
    seconds = []
    for _ in range(4):
        cache = CompactedCache(model.config, policy, record="none")
        begin = time.perf_counter()
        with torch.inference_mode(), policy.attach(model):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        seconds.append(time.perf_counter() - begin)
    return out[0, PEER_PROMPT:].tolist(), seconds[1:], cache.layers[0].slots


def _beside_kvpress() -> bench.Measured:
    ours, theirs = _ours()[1], _kvpress()["seconds"]
    return bench.Measured(statistics.median(ours), statistics.median(theirs), n=len(ours), low=min(ours), high=max(ours))


def _equals_kvpress() -> None:
    """The same greedy tokens through the first compaction up to the second, and as many slots at the end."""
    theirs, (tokens, _, slots) = _kvpress(), _ours()
    assert theirs["tokens"][: 2 * INTERVAL] == tokens[: 2 * INTERVAL], "different tokens: not the same weights, scores or positions"
    assert theirs["slots"] == slots, f"{theirs['slots']} slots against {slots}"


ROWS = (
    bench.Row("ams: selection per event", "% of decoding", "the decoding steps of one interval", _selection_share, _selection_is_exact, goal=5.0),
    bench.Row("ams: bytes held at 1,024 tokens", "% of full", "full cache", _bytes_share, _bytes_are_exact),
    bench.Row("ams: decoding step, gathered cache", "ms", "masked full cache, same entries", _gather_against_mask, _gather_equals_mask),
    bench.Row("ams: 192 tokens, KeyDiff at 128 entries", "s", "kvpress DecodingPress", _beside_kvpress, _equals_kvpress),
)
