"""What SmolLM2-135M can do with the long prompts at all: data/recordings/long-tasks.

Wordings were chosen on a few calibration prompts of 512 tokens. Fixed after that and before these figures: a retrieval kind is usable if, on 24
calibration prompts (12 of 512 and 12 of 1,024 tokens), the Wilson interval of its exact answers lies above the chance of a reader who knows
the candidates but not the evidence; a free kind if its continuation is likelier after the whole prompt than after its last 64 tokens, by the
interval of the paired difference on 12 held-out prompts. Held-out prompts only describe the first. The controls are the same questions in
prompts without the evidence. The model runs in bfloat16; ``float32`` holds the same held-out prompts in both precisions.
Cells come in the order of importance and each is written at once; a second call skips it; a time limit ends the run with what is there.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from types import SimpleNamespace

SHORT = 64
RECHECKED = ("needle", "multikey", "qa", "code")


def cells() -> list[dict]:
    """Calibration first, then held-out prompts, controls, the check of the precision, and longer prompts."""
    from nbkit.loaders.long_tasks import TASKS

    retrieval = [kind for kind, category in TASKS.items() if category == "retrieval"]
    cell = lambda kind, n, tokens, split, **more: {"kind": kind, "n": n, "tokens": tokens, "split": split, "dtype": "bfloat16"} | more  # noqa: E731
    out = [cell(kind, 12, tokens, "calibration") for tokens in (512, 1024) for kind in retrieval]
    out += [cell(kind, 24, 1024, "held-out") for kind in retrieval]
    out += [cell(kind, 12, 1024, "held-out", **short) for kind in TASKS if kind not in retrieval for short in ({}, {"short": SHORT})]
    out += [cell(kind, 12, 512, "held-out", evidence=False) for kind in retrieval]
    # With a second chain the right number is one of two.
    out += [cell("tracking", 12, 512, "calibration", keys=2)]
    out += [cell(kind, 2, 1024, "held-out") | {"dtype": "float32"} for kind in RECHECKED]
    return out + [cell(kind, 8, 2048, "held-out") for kind in ("needle", "multikey", "tracking", "qa")]


def cell_key(cell: dict) -> str:
    """Stable name of a cell."""
    return ",".join(f"{k}={cell[k]}" for k in sorted(cell))


@functools.lru_cache(maxsize=1)
def _model(dtype: str):
    import torch

    import nbkit

    loaded = nbkit.load_model("smollm2-135m")
    loaded.model.to(getattr(torch, dtype))
    return loaded


def evaluate(cell: dict) -> dict:
    """Scores of the model as it is on the prompts of one cell."""
    from nbkit.inference.scoring import score_prompt
    from nbkit.loaders import load_long_tasks

    loaded, start = _model(cell["dtype"]), time.perf_counter()
    options = {name: cell[name] for name in ("keys", "evidence") if name in cell}
    prompts = load_long_tasks(cell["kind"], n=cell["n"], tokens=cell["tokens"], split=cell["split"], tokenizer=loaded.tokenizer, **options)
    read = prompts
    if "short" in cell:
        read = [SimpleNamespace(ids=p.ids[-cell["short"] :], answer_ids=p.answer_ids, evidence=(), inside=0) for p in prompts]
    scores = [score_prompt(loaded.model, p) for p in read]
    return {
        "key": cell_key(cell), "cell": cell, "chance": prompts[0].chance, "ids": [p.id for p in prompts], "depth": [p.depth for p in prompts],
        "exact": [int(s.exact) for s in scores], "nll": [round(s.nll, 4) for s in scores], "first_nll": [round(s.first_nll, 4) for s in scores],
        "top1": [round(s.top1, 4) for s in scores], "seconds": round(time.perf_counter() - start, 1),
    }


def usable(rows: list[dict]) -> dict[str, dict]:
    """Whether each kind counts, and the figures behind it."""
    from nbkit.errors import RunError
    from nbkit.loaders.long_tasks import TASKS
    from nbkit.metrics import paired, wilson

    def find(kind: str, **wanted) -> list[dict]:
        plain = {"dtype": "bfloat16", "keys": None, "evidence": None, "short": None} | wanted
        return [r for r in rows if r["cell"]["kind"] == kind and all(r["cell"].get(k) == v for k, v in plain.items())]

    out = {}
    for kind, category in TASKS.items():
        if category == "retrieval":
            found = find(kind, split="calibration")
            if sum(len(r["exact"]) for r in found) < 24:
                raise RunError("too little time for the calibration prompts", hint="call the recipe again, it goes on where it stopped")
            right, n = sum(sum(r["exact"]) for r in found), sum(len(r["exact"]) for r in found)
            share, chance = wilson(right, n), max(r["chance"] for r in found)
            out[kind] = {"usable": bool(share.low > chance), "exact": share.as_dict(), "chance": chance}
        else:
            found = find(kind, split="held-out") + find(kind, split="held-out", short=SHORT)
            if len(found) < 2:
                raise RunError("too little time for the free kinds", hint="call the recipe again, it goes on where it stopped")
            gain = paired(found[1]["nll"], found[0]["nll"], method="expanded")
            out[kind] = {"usable": bool(gain.low > 0), "nats_from_context": gain.as_dict(), "chance": None}
    return out


def run(work_dir: Path, out_dir: Path, log, minutes: float = 60.0) -> None:
    """Score cells until they or the minutes are used up and write data/recordings/long-tasks.

    Raises: RunError when the time did not even reach to the cells that decide which kinds count.
    """
    from nbkit import parallel
    from nbkit.loaders import save_recording

    grid = cells()
    log(f"long-tasks: {len(grid)} cells, {sum(c['n'] for c in grid)} prompts")
    end, rows = time.monotonic() + 60 * minutes, []
    for cell in grid:
        if time.monotonic() > end:
            log(f"time is up after {len(rows)} cells")
            break
        rows += parallel.map(evaluate, [cell], executor="serial", progress=False, key=cell_key, resume=work_dir / "cells.jsonl")
        log(f"{rows[-1]['key']}: exact {sum(rows[-1]['exact'])} of {cell['n']}, {rows[-1]['seconds']} s")
    verdicts = usable(rows)
    log("usable: " + ", ".join(kind for kind, entry in verdicts.items() if entry["usable"]))
    save_recording(
        "long-tasks", {"model": "smollm2-135m", "usable": verdicts, "cells": rows},
        {
            "recipe": "long-tasks", "seed": 0, "licence": "MIT",
            "summary": "answers of SmolLM2-135M to long prompts of nine kinds, with and without the evidence; real model in bfloat16, generated "
                       "prompts whose wordings were chosen on calibration prompts before",
        },
    )
