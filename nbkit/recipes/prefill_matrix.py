"""Token pruning x sparse attention x cache eviction on SmolLM2-135M, on equal budgets: data/recordings/prefill-matrix.

Fixed before any result was seen: 16 held-out prompts of 768 tokens of each of needle, multikey, qa and code; budgets of 0.75 of the full
model's multiply-accumulates and 0.5 of its cache bytes. FastPrefill drops once, before two thirds of the layers, and its rate is the highest that
meets the work budget beside the attention it is combined with, solved on one calibration prompt each of needle and code. The segmented eviction
keeps as many entries per head, in the layers that hold more, as meet the cache budget. Nothing can be tuned in the combinations without
FastPrefill or without eviction: they are read as they are, and the table says which budgets they miss. The model runs in bfloat16; work and
cache are counted exactly, seconds were measured on a shared machine and are only a hint.
Each finished score is written at once; a second call goes on; a time limit ends the run with the prompts that were read.
"""

from __future__ import annotations

from pathlib import Path

KINDS, PROMPTS, TOKENS = ("needle", "multikey", "qa", "code"), 16, 768
TUNED_ON = ("needle", "code")
TIME, SPACE = 0.75, 0.5
SCORE = "cummax"


def axes(layers: int, tokenizer) -> dict[str, list]:
    """Entries of the three axes; a rate in (0, 1] becomes the share of rows that FastPrefill leaves."""
    from nbkit.methods.adacal import AdaCal
    from nbkit.methods.ams.eviction import AmsEviction
    from nbkit.methods.fastprefill import PruneSchedule, TokenPruning

    def fastprefill(rate: float) -> TokenPruning:
        return TokenPruning(PruneSchedule.one_shot(round(2 * layers / 3), rate, layers), score=SCORE)

    return {
        "rows": ["none", ("fastprefill", fastprefill)],
        "attention": ["dense", ("adacal", AdaCal(tokenizer=tokenizer))],
        "eviction": ["none", ("ams", AmsEviction())],
    }


def run(work_dir: Path, out_dir: Path, log, minutes: float = 60.0) -> None:
    """Read prompts with every combination until they or the minutes are used up and write data/recordings/prefill-matrix."""
    import torch

    import nbkit
    from nbkit.inference.combine import matrix
    from nbkit.loaders import load_long_tasks, save_recording

    loaded = nbkit.load_model("smollm2-135m")
    model = loaded.model.to(torch.bfloat16)

    def load(kind: str, n: int, split: str):
        return list(load_long_tasks(kind, n=n, tokens=TOKENS, split=split, tokenizer=loaded.tokenizer))

    sets = [load(kind, PROMPTS, "held-out") for kind in KINDS]
    # Task by task in turns, so that a run that is stopped has read all tasks.
    prompts = [one for same in zip(*sets, strict=True) for one in same]
    tune = [load(kind, 1, "calibration")[0] for kind in TUNED_ON]
    log(f"prefill-matrix: {len(prompts)} prompts")
    found = matrix(model, prompts, **axes(model.config.num_hidden_layers, loaded.tokenizer), time=TIME, space=SPACE, tune=tune,
                   resume=work_dir / "scores.jsonl", minutes=minutes)
    read = len({cell["prompt"] for cell in found.cells})
    log(f"{read} of {len(prompts)} prompts\n{found}")
    cells = [{k: round(v, 5) if isinstance(v, float) else v for k, v in cell.items()} for cell in found.cells]
    save_recording(
        "prefill-matrix", {"model": "smollm2-135m", "dtype": "bfloat16", "tokens": TOKENS, "time": TIME, "space": SPACE, "cells": cells},
        {
            "recipe": "prefill-matrix", "seed": 0, "licence": "MIT",
            "summary": f"answers, work and cache of SmolLM2-135M on {read} held-out long prompts by token pruning, sparse attention and eviction; "
                       "real model in bfloat16, generated prompts",
        },
    )
