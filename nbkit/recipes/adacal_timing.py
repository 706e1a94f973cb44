"""Time to first token of SmolLM2-135M with AdaCal and without, on an idle machine: data/recordings/adacal-timing.

Fixed before any result was seen: one thread, float32, one held-out needle prompt of each length; rounds in which the plain model and AdaCal
(dispatch on, defaults, probe and decisions included) run one after the other, in changing order, after one round that does not count.
"""

from __future__ import annotations

import time
from pathlib import Path

ROUNDS = {2048: 5, 4096: 4}
METHODS = ("dense", "adacal")


def measure(tokens: int, rounds: int, log) -> dict:
    """Seconds of every round, density and first answer loss at one prompt length."""
    import torch
    from torch.nn import functional as F

    import nbkit
    from nbkit.loaders.long_tasks import load_long_tasks
    from nbkit.methods.adacal import AdaCal, AdaCalConfig

    loaded = nbkit.load_model("smollm2-135m")
    prompt = load_long_tasks("needle", n=1, tokens=tokens, split="held-out", tokenizer=loaded.tokenizer)[0]
    ids, target = torch.from_numpy(prompt.ids)[None], torch.from_numpy(prompt.answer_ids[:1])
    part = AdaCal(AdaCalConfig(), loaded.tokenizer)

    def read(method: str) -> dict:
        start = time.perf_counter()
        if method == "dense":
            logits, facts = loaded.model(ids, logits_to_keep=1).logits, {"density": 1.0}
        else:
            with part.attach(loaded.model) as run:
                logits = loaded.model(ids, logits_to_keep=1).logits
                facts = {"density": run.density, "probe": sum(run.probe) / run.dense_pairs, "task": run.task}
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "nll": float(F.cross_entropy(logits[0].float(), target)), **facts}

    found: dict = {"tokens": tokens, "seconds": {method: [] for method in METHODS}}
    with torch.inference_mode():
        for turn in range(-1, rounds):
            for method in METHODS if turn % 2 else METHODS[::-1]:
                result = read(method)
                if turn >= 0:
                    found["seconds"][method].append(round(result.pop("seconds"), 3))
                found[method] = {name: value for name, value in result.items() if name != "seconds"}
            log(f"{tokens} tokens, round {turn}: {({m: found['seconds'][m][-1:] for m in METHODS})}")
    return found


def run(work_dir: Path, out_dir: Path, log, rounds: dict[int, int] | None = None) -> None:
    """Time both methods and write data/recordings/adacal-timing."""
    import torch

    from nbkit.loaders import save_recording

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lengths = [measure(tokens, count, log) for tokens, count in (rounds or ROUNDS).items()]
    finally:
        torch.set_num_threads(threads)
    save_recording(
        "adacal-timing", {"model": "smollm2-135m", "dtype": "float32", "threads": 1, "lengths": lengths},
        {
            "recipe": "adacal-timing", "seed": 0, "licence": "MIT",
            "summary": "time to first token of SmolLM2-135M with AdaCal and without at 2,048 and 4,096 tokens, interleaved",
        },
    )
