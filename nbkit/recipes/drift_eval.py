"""Measure the drafters that ``drift-tiny`` trained: data/recordings/drift-grid.

What is measured, in which format, and what must be seen for each claim was fixed before any trained drafter had been measured: see
nbkit/methods/attention_drift/evaluate.py. Texts are the target's own continuations of held-out documents. Weights are rounded to float16 first, as
they are shipped. Every finished cell is written at once; a second call skips it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import nbkit
from nbkit import parallel
from nbkit.errors import MissingResourceError
from nbkit.loaders import save_recording
from nbkit.methods.attention_drift import Intervention, rms, target_features
from nbkit.methods.attention_drift import evaluate as measure
from nbkit.models import letters
from nbkit.recipes import drift_train
from nbkit.recipes.drift_target import stream, windows

PROMPTS, TINY_GRAM = 48, 32
"""Prompts of the small target, and the length of a repeated piece of text that counts as a loop, in letters (eight tokens of about four letters)."""
FORCED_DEPTH, DRAFT_DEPTH, DRIFT_DEPTH = 16, 8, 12
TINY_STARTS = (96, 136, 176, 216)
NOISY = {("pre", 2), ("post", 2), ("pre", 4), ("post", 4)}


@functools.lru_cache(maxsize=1)
def tiny_texts() -> dict[str, Tensor]:
    """Held-out material of the small target: ``sampled`` and ``greedy`` (48, 256) texts, each with ``..._aux``, ``..._last``, ``..._best``."""
    model = drift_train._target()
    prompts = windows(stream("held-out"), PROMPTS, drift_train.PROMPT, 8)
    out = {}
    for name, temperature in (("sampled", 0.7), ("greedy", 0.0)):
        out[name] = drift_train.continue_text(model, prompts, letters.LENGTH, temperature, 8)
        with torch.inference_mode():
            seen = target_features(model, out[name])
        out |= {f"{name}_aux": seen.aux, f"{name}_last": seen.last, f"{name}_best": seen.logits.argmax(-1)}
    return out


def tiny_ends() -> list[int]:
    """Where the greedy texts of the small target start to repeat themselves."""
    first = drift_train.PROMPT
    return [first + measure.first_repeat(row[first:].tolist(), TINY_GRAM) for row in tiny_texts()["greedy"]]


def norm_bound(drafter) -> float:
    return round(float(drafter.norm.weight.detach().abs().max()), 6)


def _features(drafter, texts: dict[str, Tensor], name: str) -> Tensor:
    return drafter.pick_features(texts[f"{name}_aux"], texts[f"{name}_last"])


def tiny_cell(job: dict) -> dict:
    """All measurements of one small drafter."""
    start, (variant, ttt, seed) = time.perf_counter(), (job["variant"], job["ttt"], job["seed"])
    drafter = drift_train.tiny(variant, ttt, seed, work=Path(job["work"])).half().float()
    return {"variant": variant, "ttt": ttt, "seed": seed} | measure_tiny(drafter, noise=(variant, ttt) in NOISY) | {
        "seconds": round(time.perf_counter() - start, 1)
    }


def measure_tiny(drafter, *, noise: bool) -> dict:
    """The measurements of one drafter of the small target as JSON values."""
    texts, ends, first = tiny_texts(), tiny_ends(), drift_train.PROMPT
    sampled, greedy = _features(drafter, texts, "sampled"), _features(drafter, texts, "greedy")
    forced = measure.forced_steps(drafter, texts["sampled"], sampled, texts["sampled_best"], first=first, depth=FORCED_DEPTH)
    drift = measure.drift_measures(drafter, texts["sampled"], sampled, starts=TINY_STARTS, depth=DRIFT_DEPTH)

    def tau(feats: Tensor, **what) -> dict[str, list]:
        counts = measure.accepted_drafts(
            drafter, texts["greedy"], feats, first=first - 2, depth=DRAFT_DEPTH, intervention=Intervention(**what),
        )
        return measure.acceptance_by_prompt(counts, DRAFT_DEPTH, first=first - 2, ends=ends)

    plain = tau(greedy)
    out = {
        "norm_bound": norm_bound(drafter), **{name: measure.numbers(value) for name, value in forced.items()},
        **{key: plain[key] for key in ("tau", "rates")}, "drift": {name: measure.numbers(value) for name, value in drift.items()},
        "tau_pin": tau(greedy, pin=True)["tau"],
    }
    if drafter.kind == "eagle":
        out["tau_scaled"] = tau(measure.scaled_stream(greedy, 10.0))["tau"]
    if noise:
        out["noise"] = {path: {str(a): tau(greedy, noise=a, path=path)["tau"] for a in measure.ALPHAS} for path in ("hidden", "embedding")}
    return out


def stream_rms(feats: Tensor, first: int) -> list:
    """Mean magnitude of the three streams per text, from position ``first`` on (the first positions of a text are far larger)."""
    return measure.numbers(torch.stack([rms(part[:, first:].float()).mean(1) for part in feats.chunk(3, -1)], 1))


def _key(job: dict) -> list:
    return [job["variant"], job["ttt"], job["seed"]]


def run_grid(work_dir: Path, out_dir: Path, log: Callable[[str], None], *, seeds: tuple[int, ...] = drift_train.SEEDS) -> None:
    """Measure every drafter of the grid that ``drift-tiny`` trained and write data/recordings/drift-grid."""
    torch.set_num_threads(1)
    trained = nbkit.build_path("recipes", "drift-tiny")
    jobs = [{"work": str(trained), "variant": v, "ttt": t, "seed": s} for v, t, s in drift_train.grid() if s in seeds]
    present = [job for job in jobs if (drift_train.folder(trained, *_key(job)) / "model.safetensors").is_file()]
    if not present:
        raise MissingResourceError("trained drafters", got="none", allowed=str(trained), hint="python -m nbkit train drift-tiny")
    rows = parallel.map(tiny_cell, present, executor="serial", key=_key, resume=work_dir / "cells.jsonl", desc="drift-grid", progress=False)
    log(f"{len(rows)} of {len(jobs)} drafters measured")
    save_grid(rows, len(jobs))


def save_grid(rows: list[dict], planned: int) -> Path:
    """Write the recording from measured cells."""
    texts = tiny_texts()
    position, mass = measure.target_sinks(drift_train._target(), texts["sampled"])
    return save_recording(
        "drift-grid",
        {
            "prompts": PROMPTS, "depth": FORCED_DEPTH, "aux_rms": stream_rms(texts["sampled_aux"], 8), "target_sinks": position.tolist(),
            "target_sink_mass": measure.numbers(mass), "first_repeat": tiny_ends(), "prompt_tokens": drift_train.PROMPT,
            "tokens": letters.LENGTH, "cells": rows,
        },
        {
            "recipe": "drift-grid", "seed": 0, "licence": "MIT", "target": "drift-target", "cells_planned": planned, "cells": len(rows),
            "summary": "drift, acceptance, noise and pinning of small drafters by variant, training depth and seed (trained toys)",
        },
    )
