"""Measure the drafters that ``drift-tiny`` trained: data/recordings/drift-grid.

What is measured, in which format, and what must be seen for each claim was fixed before any trained drafter had been measured: see
nbkit/methods/attention_drift/evaluate.py. Texts are what the target itself wrote after held-out documents. Weights are rounded to float16 first, as
they are shipped. Every finished cell is written at once; a second call skips it.

The small target's own greedy text turns in circles after about seventy letters (seen before any drafter was measured), and a loop is easy to draft
at any depth. So ``tau`` and ``rates`` of this recording start in sampled text, and what is accepted is decided by the target's greedy continuation
from that very start, as in decoding. Keys beyond that format:

    prompt_tokens, tokens, draft_depth, starts      64 letters of a document, texts of 160, rates P x 12, chain starts of tau
    target_nats                                      loss of the target on long held-out texts, positions below and from 256 on
    and in cells: fused_rms (P,) and fused_parts P x 3, magnitude of g and of the three streams' parts of it; drafter_sinks and drafter_sink_mass
    (heads,); tau_window {window: (P,)}; long {setting: {tau, rates}}, prompts of 384 letters, though the target has seen no more than 256 either;
    speculative (seed 0): one dict a prompt with equal (to plain greedy decoding), accepted and rounds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import nbkit
from nbkit import parallel
from nbkit.errors import MissingResourceError
from nbkit.loaders import save_recording
from nbkit.methods.attention_drift import Drafter, Intervention, rms, speculative_generate, target_features
from nbkit.methods.attention_drift import evaluate as measure
from nbkit.methods.attention_drift.attention import KV
from nbkit.methods.attention_drift.chain import roll
from nbkit.models import letters
from nbkit.recipes import drift_train
from nbkit.recipes.drift_target import stream, windows

PROMPTS, LENGTH, LONG_PROMPTS, LONG_PROMPT, LONG_LENGTH = 48, 160, 24, 384, 416
FORCED_DEPTH, DRAFT_DEPTH, DRIFT_DEPTH, LONG_DEPTH = 16, 12, 12, 8
FIRST = drift_train.PROMPT
STARTS, LONG_STARTS, DRIFT_STARTS = tuple(range(FIRST - 2, 150, 6)), tuple(range(LONG_PROMPT - 2, 408, 4)), (80, 100, 120, 140)
CLOSER = {("pre", 2), ("post", 2), ("pre", 4), ("post", 4)}
"""Variant and training depth of the cells with noise, windows and long prompts."""
TINY_WINDOWS = (32, 64)
LONG_SETTINGS = {"full": {}, "window": {"window": 256}, "window+sink": {"window": 256, "carry_sink": 4}}
SPECULATIVE, NEW = 2, 48
"""Prompts and new tokens of the comparison with plain greedy decoding."""


@torch.inference_mode()
def continuations(model, tokens: Tensor, starts: Iterable[int], depth: int) -> Tensor:
    """What the target says greedily after x_0 .. x_{t+1} for every start t: (P, starts, depth)."""
    from transformers import DynamicCache

    starts = tuple(starts)
    order = sorted(range(len(starts)), key=lambda i: -starts[i])
    out = tokens.new_zeros(len(tokens), len(starts), depth)
    cache = DynamicCache(config=model.config)
    best = model(tokens[:, : max(starts) + 2], cache=cache).logits.argmax(-1)
    for i in order:
        t = starts[i]
        cache.crop(t + 2 - cache.get_seq_length())
        fresh = best[:, t + 1 : t + 2]
        for k in range(depth):
            out[:, i, k] = fresh[:, 0]
            if k + 1 < depth:
                fresh = model(fresh, cache=cache).logits[:, -1:].argmax(-1)
    return out


@torch.inference_mode()
def accepted_from(drafter: Drafter, tokens: Tensor, feats: Tensor, starts: Iterable[int], truth: Tensor, what: Intervention) -> Tensor:
    """Accepted drafts (P, starts) of the chain that starts at each t in ``tokens`` (P, N) when ``truth`` (P, starts, depth) decides."""
    depth = truth.shape[2]
    last = max(starts)
    g = drafter.fuse(feats[:, : last + 1])
    text = drafter.step(drafter.embed(tokens[:, 1 : last + 2]), g, torch.arange(last + 1), logits=False).kv
    counts = []
    for i, t in enumerate(starts):
        held = KV(text.keys[:, :, :t], text.values[:, :, :t], text.positions[:, :t])
        at = torch.full((len(tokens), 1), t)
        steps = roll(
            drafter, held, tokens[:, t + 1 : t + 2], g[:, t : t + 1], at, depth, lambda k, _, i=i: truth[:, i, k - 1 : k],
            intervention=replace(what, seed=i),
        )
        right = torch.cat([drafter.propose(step.logits) for step in steps], 1) == truth[:, i]
        counts.append(right.long().cumprod(1).sum(1))
    return torch.stack(counts, 1)


def acceptance(counts: Tensor, depth: int) -> dict[str, list]:
    """``tau`` (P,) without bonus and ``rates`` P x depth from accepted drafts (P, starts).

    >>> acceptance(torch.tensor([[0, 2], [1, 1]]), 2)
    {'tau': [1.0, 1.0], 'rates': [[0.5, 0.5], [1.0, 0.0]]}
    """
    rates = (counts[..., None] >= torch.arange(1, depth + 1)).float().mean(1)
    return {"tau": measure.numbers(rates.sum(1)), "rates": measure.numbers(rates)}


@functools.lru_cache(maxsize=1)
def held_out() -> np.ndarray:
    """The letters of all held-out documents."""
    return stream("held-out")


@functools.lru_cache(maxsize=2)
def tiny_texts(name: str = "sampled") -> dict[str, Tensor]:
    """Material of the small target: ``tokens`` (P, N), its states ``aux`` and ``last``, ``best`` next token, and ``next``, see `continuations`.

    Args:
        name: ``"sampled"`` (48 texts of 160 letters) or ``"long"`` (24 of 416).
    """
    model = drift_train._target()
    count, prompt, length, starts, depth = {
        "sampled": (PROMPTS, FIRST, LENGTH, STARTS, DRAFT_DEPTH), "long": (LONG_PROMPTS, LONG_PROMPT, LONG_LENGTH, LONG_STARTS, LONG_DEPTH),
    }[name]
    tokens = drift_train.continue_text(model, windows(held_out(), count, prompt, 8), length, 0.7, 8)
    with torch.inference_mode():
        seen = target_features(model, tokens)
    best = seen.logits.argmax(-1)
    return {"tokens": tokens, "aux": seen.aux, "last": seen.last, "best": best, "next": continuations(model, tokens, starts, depth)}


def _features(drafter: Drafter, texts: dict[str, Tensor]) -> Tensor:
    return drafter.pick_features(texts["aux"], texts["last"])


def tiny_cell(job: dict) -> dict:
    """All measurements of one small drafter."""
    start, (variant, ttt, seed) = time.perf_counter(), (job["variant"], job["ttt"], job["seed"])
    drafter = drift_train.tiny(variant, ttt, seed, work=Path(job["work"])).half().float()
    found = measure_tiny(drafter, closer=(variant, ttt) in CLOSER, decode=seed == 0)
    return {"variant": variant, "ttt": ttt, "seed": seed} | found | {"seconds": round(time.perf_counter() - start, 1)}


def measure_tiny(drafter: Drafter, *, closer: bool = False, decode: bool = False) -> dict:
    """The measurements of one drafter of the small target as JSON values; ``closer`` adds noise, windows and long prompts, ``decode`` decoding."""
    texts = tiny_texts()
    tokens, feats = texts["tokens"], _features(drafter, texts)
    forced = measure.forced_steps(drafter, tokens, feats, texts["best"], first=FIRST - 2, depth=FORCED_DEPTH)
    drift = measure.drift_measures(drafter, tokens, feats, starts=DRIFT_STARTS, depth=DRIFT_DEPTH, rows=PROMPTS)
    position, mass = measure.drafter_sinks(drafter, tokens, feats)
    out = {
        "norm_bound": round(float(drafter.norm.weight.detach().abs().max()), 6), **{name: measure.numbers(value) for name, value in forced.items()},
        **tau(drafter, feats), "drift": {name: measure.numbers(value) for name, value in drift.items()}, **fused(drafter, feats),
        "drafter_sinks": position.tolist(), "drafter_sink_mass": measure.numbers(mass), "tau_pin": tau(drafter, feats, pin=True)["tau"],
    }
    if drafter.kind == "eagle":
        out["tau_scaled"] = tau(drafter, measure.scaled_stream(feats, 10.0))["tau"]
    if closer:
        out["noise"] = {path: {str(a): tau(drafter, feats, noise=a, path=path)["tau"] for a in measure.ALPHAS} for path in ("hidden", "embedding")}
        out["tau_window"] = {str(size): tau(drafter, feats, window=size)["tau"] for size in TINY_WINDOWS}
        out["long"] = {setting: long_tau(drafter, setting) for setting in LONG_SETTINGS}
    if decode:
        out["speculative"] = [decoded(drafter, row[:FIRST]) for row in tokens[:SPECULATIVE]]
    return out


def tau(drafter: Drafter, feats: Tensor, **what) -> dict[str, list]:
    """Acceptance at the small target's texts under an intervention."""
    texts = tiny_texts()
    return acceptance(accepted_from(drafter, texts["tokens"], feats, STARTS, texts["next"], Intervention(**what)), DRAFT_DEPTH)


def long_tau(drafter: Drafter, setting: str) -> dict[str, list]:
    """Acceptance after long prompts."""
    texts, what = tiny_texts("long"), Intervention(**LONG_SETTINGS[setting])
    return acceptance(accepted_from(drafter, texts["tokens"], _features(drafter, texts), LONG_STARTS, texts["next"], what), LONG_DEPTH)


@torch.inference_mode()
def fused(drafter: Drafter, feats: Tensor) -> dict[str, list]:
    """Magnitude of g, and of each stream's part of it, per text; the first positions are left out, as they are far larger in some models."""
    g = drafter.fuse(feats)[:, 8:]
    out = {"fused_rms": measure.numbers(rms(g).mean(1))}
    if drafter.kind == "eagle":
        parts = []
        for i, part in enumerate(feats.chunk(3, -1)):
            part = part if drafter.fc_norm is None else drafter.fc_norm[i](part)
            parts.append(rms(F.linear(part[:, 8:], drafter.fc.weight.chunk(3, 1)[i])).mean(1))
        out["fused_parts"] = measure.numbers(torch.stack(parts, 1))
    return out


def decoded(drafter: Drafter, prompt: Tensor) -> dict:
    """Speculative greedy decoding of one prompt beside plain greedy decoding."""
    model = drift_train._target()
    out = speculative_generate(model, drafter, prompt, depth=5, max_new_tokens=NEW, eos_token_id=[])
    with torch.inference_mode():
        ids = prompt[None]
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return {"equal": torch.equal(out.sequences, plain), "accepted": out.accepted, "rounds": out.rounds}


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
    model, texts = drift_train._target(), tiny_texts()
    position, mass = measure.target_sinks(model, texts["tokens"])
    corpus = windows(held_out(), 2 * LONG_PROMPTS, LONG_LENGTH, 9)
    with torch.inference_mode():
        nats = F.cross_entropy(model(corpus).logits[:, :-1].transpose(1, 2), corpus[:, 1:], reduction="none").mean(0)
    return save_recording(
        "drift-grid",
        {
            "prompts": PROMPTS, "depth": FORCED_DEPTH, "draft_depth": DRAFT_DEPTH, "starts": list(STARTS), "prompt_tokens": FIRST, "tokens": LENGTH,
            "aux_rms": stream_rms(texts["aux"], 8), "target_sinks": position.tolist(), "target_sink_mass": measure.numbers(mass),
            "target_nats": {"below": measure.numbers(nats[: letters.LENGTH].mean()), "beyond": measure.numbers(nats[letters.LENGTH :].mean())},
            "cells": rows,
        },
        {
            "recipe": "drift-grid", "seed": 0, "licence": "MIT", "target": "drift-target", "cells_planned": planned, "cells": len(rows),
            "summary": "drift, acceptance, noise and pinning of small drafters by variant, training depth and seed (trained toys)",
        },
    )
