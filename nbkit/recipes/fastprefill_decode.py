"""SmolLM2-135M decoding after a full, a recovery-free and a recovering prefill: data/recordings/fastprefill-decode.

Fixed before any result was seen: 8 held-out prompts of 1,024 tokens, two of each of four kinds; the 32 tokens that the full model writes greedily are
read one at a time by every method, so that all do the same steps. All methods keep the same share of the prompt from the same layers on. In every
step the methods take turns, in an order that rotates, each on its own shell of the same weights: a machine that slows down hits all of them.
Seconds are wall times of this machine; multiply-accumulates and revived tokens are exact.
"""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack
from pathlib import Path

KINDS, EACH, TOKENS, STEPS = ("needle", "tracking", "qa", "prose"), 2, 1024, 32
LAYERS, RATES = (20,), (0.3,)
EARLY, EARLY_RATES = (10, 15, 20), (0.7, 0.5, 0.3)
METHODS = ("full", "recovery-free", "recovery", "recovery-free-early", "recovery-early")
"""The dense model; LazyLLM's rule without and with its recovery, for one drop (LAYERS, RATES), and for three (EARLY, EARLY_RATES)."""


@functools.lru_cache(maxsize=1)
def _model():
    import torch

    import nbkit

    return nbkit.load_model("smollm2-135m", device="cpu", dtype=torch.float32)


def items() -> list[list]:
    """[kind, number of the prompt] of every unit of work."""
    return [[kind, i] for kind in KINDS for i in range(EACH)]


@functools.lru_cache(maxsize=len(KINDS))
def _prompts(kind: str):
    from nbkit.loaders import load_long_tasks

    return load_long_tasks(kind, n=EACH, tokens=TOKENS, split="held-out", tokenizer=_model().tokenizer, seed=0)


def compare(model, ids, steps: int, *, layers=LAYERS, rates=RATES, early=EARLY, early_rates=EARLY_RATES, turn: int = 0) -> dict:
    """All methods on one prompt: for every one seconds, MACs, revived tokens and loss of every step, and the same of the prefill.

    ids: (1, tokens). The loss is that of the token which the full model writes next, in nats.
    """
    import torch

    from nbkit.inference import attach
    from nbkit.methods.fastprefill.baselines import LazyLLM, draft_of, step_macs
    from nbkit.methods.fastprefill.cost import ModelShape

    depth = model.config.num_hidden_layers
    shape = ModelShape.from_config(model.config)
    plans = {"": (layers, rates), "-early": (early, early_rates)}
    out: dict = {method: {"seconds": [], "macs": [], "revived": [], "entries": [], "loss": []} for method in METHODS}
    with ExitStack() as stack, torch.inference_mode():
        shells, runs, last = {}, {}, {}
        for method in METHODS:
            shells[method] = draft_of(model, depth)
            ending = "-early" if method.endswith("early") else ""
            rule = LazyLLM(*plans[ending])
            if method.startswith("recovery-free"):
                runs[method] = stack.enter_context(attach(shells[method], rows=rule))
            elif method != "full":
                runs[method] = stack.enter_context(rule.attach(shells[method]))
        rotated = [METHODS[(turn + i) % len(METHODS)] for i in range(len(METHODS))]
        for method in rotated:
            start = time.perf_counter()
            last[method] = shells[method](ids, use_cache=True, logits_to_keep=1)
            out[method]["prefill_seconds"] = time.perf_counter() - start
        for _ in range(steps):
            token = last["full"].logits[:, -1].argmax(-1)
            rotated = [*rotated[1:], rotated[0]]
            for method in rotated:
                row = out[method]
                row["loss"].append(float(-last[method].logits[0, -1].log_softmax(-1)[token]))
                start = time.perf_counter()
                last[method] = shells[method](token[:, None], cache=last[method].cache, use_cache=True)
                row["seconds"].append(time.perf_counter() - start)
                if method == "full" or method.startswith("recovery-free"):
                    cache = last[method].cache
                    held = [layer.keys.shape[-2] for layer in cache.layers]
                    row["macs"].append(step_macs(shape, [1] * depth, held))
                    row["revived"].append([0] * depth)
                    row["entries"].append(sum(held))
                else:
                    done = runs[method].steps[-1]
                    row["macs"].append(done.macs)
                    row["revived"].append(list(done.revived))
                    row["entries"].append(int(runs[method].cache.depth.sum()))
        for method in METHODS:
            if method == "full":
                pairs = [ids.shape[1] * (ids.shape[1] + 1) // 2] * depth
                out[method]["prefill_macs"] = step_macs(shape, [ids.shape[1]] * depth, pairs)
            elif method.startswith("recovery-free"):
                # The same rule reads the prompt in both: the same work.
                out[method]["prefill_macs"] = runs[method.replace("recovery-free", "recovery")].steps[0].macs
            else:
                out[method]["prefill_macs"] = runs[method].steps[0].macs
    return out


def evaluate(item: list) -> dict:
    """One prompt of SmolLM2 under all methods."""
    import torch

    kind, number = item
    prompt = list(_prompts(kind))[number]
    return {"kind": kind, "id": str(prompt.id), **compare(_model().model, torch.as_tensor(prompt.ids)[None], STEPS, turn=items().index(item))}


def run(work_dir: Path, out_dir: Path, log) -> None:
    """Write data/recordings/fastprefill-decode: arrays (method, prompt, step), revived tokens also by layer."""
    import numpy as np
    import torch

    from nbkit import parallel
    from nbkit.loaders import save_recording

    torch.set_num_threads(1)
    start = time.perf_counter()
    done = parallel.map(evaluate, items(), executor="serial", resume=work_dir / "prompts.jsonl", desc="prompts")
    log(f"{len(done)} prompts in {time.perf_counter() - start:.0f} s")
    table = {name: np.array([[unit[method][name] for unit in done] for method in METHODS]) for name in done[0]["full"]}
    for method, seconds, macs, revived in zip(METHODS, table["seconds"], table["macs"], table["revived"], strict=True):
        log(f"{method}: {1e3 * np.median(seconds):.1f} ms and {macs.mean() / 1e6:.1f} M MACs a step, {revived.sum(-1).mean():.1f} revived")
    arrays = {
        "methods": np.array(METHODS), "kinds": np.array([unit["kind"] for unit in done]), "ids": np.array([unit["id"] for unit in done]),
        "seconds": table["seconds"].astype(np.float32), "prefill_seconds": table["prefill_seconds"].astype(np.float32),
        "macs": table["macs"], "prefill_macs": table["prefill_macs"], "revived": table["revived"].astype(np.int32),
        "entries": table["entries"].astype(np.int64), "loss": table["loss"].astype(np.float32),
    }
    card = {
        "summary": f"SmolLM2-135M, {STEPS} decoding steps after {TOKENS} tokens: seconds, multiply-accumulates and revived tokens, "
        "with and without recovery of dropped tokens",
        "licence": "MIT",
        "recipe": "fastprefill-decode",
        "seed": 0,
        "layers": {"recovery": LAYERS, "recovery-early": EARLY},
        "rates": {"recovery": RATES, "recovery-early": EARLY_RATES},
        "threads": 1,
        "dtype": "float32",
        "note": "the wall times belong to the machine that made the recording; multiply-accumulates, revived tokens and losses do not",
    }
    save_recording("fastprefill-decode", arrays, card)
