"""Pass@1 of the lookup-chain model under every policy, scorer and budget: data/recordings/ams-chain.

Places and budgets were set by looking at plain top-k on other chains, so that it is neither always right nor always wrong. Of segmented
policies one cell had been run by then, with a half-trained model on 32 places, where all methods failed alike. Fixed before this grid ran:
256 chains on maps of 8 places, 96 lines, seed 2026, greedy generation, a compaction every 32 tokens, 4 sinks and 8 recent tokens for every
method, budgets 48 to 128. A chain passes if its first 48 lines (192 tokens) are right. Every cell answers the same chains, so cells are
paired chain by chain. Each finished cell is written at once; a second call skips it.
"""

from __future__ import annotations

import time
from pathlib import Path

CHAINS, PLACES, LINES, PASS_LINES, SEED, BATCH = 256, 8, 96, 48, 2026, 64
BUDGETS = (48, 64, 96, 128)
SCORERS = ("tova", "expected_attention", "keydiff", "rkv", "snapkv")
BASE = {"interval": 32, "sinks": 4, "recent": 8, "window": 32, "seg_len": (8, 64), "segment_mass": 0.1, "min_keep": 1, "fixed_len": 32}


def cells() -> list[dict]:
    """Every cell as keyword arguments of SegmentedPolicy on top of BASE; an empty one is the full cache."""
    out: list[dict] = [{}]
    for keep in BUDGETS:
        for scorer in SCORERS:
            out += [{"scorer": scorer, "allocation": a, "keep": keep} for a in ("none", "mass")]
        for scorer in ("knorm", "random", "rpc"):
            out += [{"scorer": scorer, "allocation": a, "keep": keep} for a in ("none", "mass")]
        out.append({"scorer": "streaming", "allocation": "none", "keep": keep})
        out.append({"scorer": "snapkv", "allocation": "chunk", "keep": keep})
        out.append({"scorer": "snapkv", "allocation": "head", "keep": keep})
        for change in ({"allocation": "length"}, {"ema": None}, {"allocation": "fixed"}, {"recent_in_mass": True}, {"order": "released"}):
            out.append({"scorer": "tova", "allocation": "mass", "keep": keep} | change)
    for window in (4, 8, 16, 24, 32):
        for longest in (16, 32, 64, 128, 256):
            out.append({"scorer": "tova", "allocation": "mass", "keep": 64, "window": window, "seg_len": (8, longest)})
    return list({cell_key(c): c for c in out}.values())


def cell_key(cell: dict) -> str:
    """Stable name of a cell, independent of the order of its arguments."""
    full = BASE | {"ema": (0.9, 0.9), "recent_in_mass": False, "order": "paper"} | cell
    return "full" if not cell else ",".join(f"{k}={full[k]}" for k in sorted(full)).replace(" ", "")


def answer(model, chains, cell: dict, record: str = "none"):
    """Let the model continue all chains under one policy; returns (generated tokens, cache or None)."""
    import torch

    from nbkit.methods.ams import CompactedCache, SegmentedPolicy

    ids = torch.from_numpy(chains.prompt)
    new = chains.answer.shape[1]
    options = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        if not cell:
            return model.generate(ids, **options)[:, ids.shape[1] :].numpy(), None
        policy = SegmentedPolicy(**(BASE | cell))
        cache = CompactedCache(model.config, policy, record=record)
        with policy.attach(model):
            return model.generate(ids, cache=cache, **options)[:, ids.shape[1] :].numpy(), cache


def chains():
    """The 256 chains that every cell answers."""
    from nbkit.models.lookup_chain import sample_chains

    return sample_chains(CHAINS, LINES, seed=SEED, places=PLACES)


def part(chains, start: int):
    """The batch of ``BATCH`` chains that starts at ``start``: cells are always answered in these batches, so a sample can be repeated exactly."""
    from nbkit.models.lookup_chain import Chains

    where = slice(start, start + BATCH)
    return Chains(chains.prompt[where], chains.answer[where], chains.distance[where])


def evaluate(cell: dict) -> dict:
    """One cell: lines before the first error of every chain, key and value bytes of one chain at the end, and seconds."""
    import nbkit
    from nbkit.models.lookup_chain import score_chains

    model = nbkit.load_model("lookup-chain").model
    everything, start = chains(), time.perf_counter()
    lines, held = [], 0
    for at in range(0, CHAINS, BATCH):
        batch = part(everything, at)
        generated, cache = answer(model, batch, cell)
        lines += score_chains(batch, generated)["correct_lines"].tolist()
        held = None if cache is None else cache.nbytes["physical"] // BATCH
    return {"key": cell_key(cell), "cell": cell, "correct_lines": lines, "seconds": round(time.perf_counter() - start, 2), "bytes": held}


def run(work_dir: Path, out_dir: Path, log) -> None:
    """Evaluate all cells and write the recording."""
    from nbkit import parallel
    from nbkit.loaders import save_recording

    grid = cells()
    log(f"{len(grid)} cells of {CHAINS} chains")
    rows = parallel.map(evaluate, grid, executor="serial", key=cell_key, resume=work_dir / "cells.jsonl", desc="ams-chain")
    save_recording(
        "ams-chain",
        {
            "chains": CHAINS,
            "places": PLACES,
            "lines": LINES,
            "pass_lines": PASS_LINES,
            "seed": SEED,
            "base": {k: list(v) if isinstance(v, tuple) else v for k, v in BASE.items()},
            "cells": rows,
        },
        {"recipe": "ams-chain", "seed": SEED, "licence": "MIT", "summary": "pass@1 of the lookup-chain model by policy, scorer and budget"},
    )
