"""Measure the two drafters of SmolLM2-135M-Instruct that ``drift-smollm2`` trained: data/recordings/drift-smollm2.

What is measured, in which format, and what must be seen for each claim was fixed before any trained drafter had been measured: see
nbkit/methods/attention_drift/evaluate.py. Texts are SmolLM2's own answers to held-out prompts. Every finished part is written at once; a second call
skips it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import nbkit
from nbkit import parallel
from nbkit.loaders import save_recording
from nbkit.methods.attention_drift import Intervention, rms
from nbkit.methods.attention_drift import evaluate as measure
from nbkit.recipes import drift_rollouts, drift_train
from nbkit.recipes.drift_eval import stream_rms

GREEDY, GRAM, ANSWER = 32, 8, 48
LONG, LONG_PROMPT, LONG_ANSWER, LONG_DEPTH = 24, 768, 32, 5
DRAFT_DEPTH, DRIFT_DEPTH = 8, 12
SMOL_STARTS = (136, 164, 192)
SMOL_NOISE_PROMPTS = 24
WINDOWS = {"full": Intervention(), "window": Intervention(window=256), "window+sink": Intervention(window=256, carry_sink=4)}
TEMPLATES = ("as trained", "no first token", "no template", "neither")


@functools.lru_cache(maxsize=1)
def _smol():
    torch.set_num_threads(1)
    return nbkit.load_model("smollm2-135m")


@functools.lru_cache
def _prompts(tokenizer, count: int) -> tuple:
    return tuple(drift_rollouts.prompts(tokenizer, "held-out", count))


def template_ids(tokenizer, template: str, count: int = GREEDY) -> Tensor:
    """The same held-out prompts in one of four templates, (count, tokens): the words do not change, only what stands around them."""
    rows = []
    for prompt in _prompts(tokenizer, count):
        trained = drift_rollouts.chat(tokenizer, prompt)
        words = tokenizer(f"{prompt.request}\n\n", add_special_tokens=False)["input_ids"] + prompt.passage
        rows.append({"as trained": trained, "no first token": trained[1:], "no template": trained[:1] + words, "neither": words}[template])
    return torch.tensor(rows)


def long_ids(tokenizer) -> Tensor:
    """The first 24 held-out prompts with passages that go on in the same document until the prompt has 768 tokens."""
    held = {document.id: document.ids for kind in ("prose", "code") for document in nbkit.load_text(kind, split="held-out", tokenizer=tokenizer)}
    rows = []
    for prompt in _prompts(tokenizer, LONG):
        around = len(drift_rollouts.chat(tokenizer, drift_rollouts.Prompt("", prompt.request, [])))
        passage = held[prompt.document][: LONG_PROMPT - around].tolist()
        rows.append(drift_rollouts.chat(tokenizer, drift_rollouts.Prompt(prompt.document, prompt.request, passage)))
    return torch.tensor(rows)


def greedy_answers(path: Path, ids: Tensor, tokens: int, rows: int, log: Callable[[str], None]) -> dict[str, Tensor]:
    """Greedy answers with the states of the target, from ``path`` or made now, ``rows`` prompts at a time."""
    if not path.exists():
        model, generator = _smol().model, torch.Generator().manual_seed(0)
        parts = [drift_rollouts.answer(model, p, torch.ones(len(p), dtype=torch.bool), generator, tokens) for p in ids.split(rows)]
        save_file({name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        log(f"{path.name}: {tuple(ids.shape)} prompts")
    return load_file(path)


def answer_ends(held: dict[str, Tensor], prompt: int, gram: int = GRAM) -> list[int]:
    """Where each answer ends or starts to repeat a piece of ``gram`` tokens."""
    lengths = held["mask"].sum(1).tolist()
    return [prompt + measure.first_repeat(row[prompt : prompt + n].tolist(), gram) for row, n in zip(held["tokens"], lengths, strict=True)]


def make_texts(work: Path, log: Callable[[str], None]) -> dict[str, dict[str, Tensor]]:
    """All texts of the evaluation: ``sampled``, one greedy set for each template, ``long``."""
    tokenizer = _smol().tokenizer
    out = {}
    for template in TEMPLATES:
        name = "greedy-" + template.replace(" ", "-")
        out[template] = greedy_answers(work / f"{name}.safetensors", template_ids(tokenizer, template), ANSWER, GREEDY, log)
    out["long"] = greedy_answers(work / "greedy-long.safetensors", long_ids(tokenizer), LONG_ANSWER, 4, log)
    source = nbkit.build_path("recipes", "drift-smollm2")
    (path,) = drift_rollouts.make(source, "held-out", 1, log)
    whole = load_file(path)
    sampled = torch.arange(len(whole["tokens"])) % drift_rollouts.GREEDY_EVERY != 0
    out["sampled"] = {name: value[sampled] for name, value in whole.items()}
    return out


@functools.lru_cache(maxsize=1)
def _texts(work: str) -> dict[str, dict[str, Tensor]]:
    """The texts of `make_texts`, read once for all parts."""
    return make_texts(Path(work), lambda line: None)


def _tau(drafter, held: dict[str, Tensor], *, depth: int, answer: int, gram: int = GRAM, count: int | None = None, rows: int = 8, what=None) -> dict:
    """Accepted drafts a chain in greedy answers."""
    prompt = held["tokens"].shape[1] - answer
    tokens, feats = held["tokens"][:count], held["feats"][:count]
    counts = measure.accepted_drafts(drafter, tokens, feats, first=prompt - 2, depth=depth, rows=rows, intervention=what or Intervention())
    return measure.acceptance_by_prompt(counts, depth, first=prompt - 2, ends=answer_ends(held, prompt, gram)[:count])


def smol_part(job: dict) -> dict | list:
    """One part of the measurements of one drafter: drift, templates, noise or long prompts."""
    drafter = nbkit.load_model(f"drift-smollm2-{job['variant']}").model.float().bind(_smol().model)
    texts = _texts(job["work"])
    start = time.perf_counter()
    out = PARTS[job["part"]](drafter, texts)
    return out | {"seconds": round(time.perf_counter() - start, 1)}


def part_key(job: dict) -> list:
    """What names a part in the file of finished ones."""
    return [job["variant"], job["part"]]


def speculative_key(job: dict) -> list:
    """What names a try in the file of finished ones."""
    return [job["variant"], job["prompt"]]


@torch.no_grad()
def part_drift(drafter, texts: dict) -> dict:
    """Accuracy and states by depth on sampled answers, attention beside its control, sinks of the drafter's heads."""
    held, prompt = texts["sampled"], drift_rollouts.PROMPT
    ends = prompt + held["mask"].sum(1)
    forced = measure.forced_steps(
        drafter, held["tokens"], held["feats"], held["greedy"], first=prompt - 2, depth=DRIFT_DEPTH, ends=ends,
    )
    whole = ends >= max(SMOL_STARTS) + DRIFT_DEPTH + 2
    drift = measure.drift_measures(drafter, held["tokens"][whole], held["feats"][whole], starts=SMOL_STARTS, depth=DRIFT_DEPTH)
    position, mass = measure.drafter_sinks(drafter, held["tokens"][:16], held["feats"][:16])
    return {
        "norm_bound": round(float(drafter.norm.weight.detach().abs().max()), 6), **{name: measure.numbers(value) for name, value in forced.items()},
        "drift_rows": whole.nonzero()[:, 0].tolist(), "drift": {name: measure.numbers(value) for name, value in drift.items()},
        "drafter_sinks": position.tolist(), "drafter_sink_mass": measure.numbers(mass),
        "fused_rms": measure.numbers(torch.stack([rms(drafter.fuse(row[prompt:].float())).mean() for row in held["feats"]])),
    }


def part_tau(drafter, texts: dict) -> dict:
    """Acceptance in the four templates, and pinned."""
    found = {template: _tau(drafter, texts[template], depth=DRAFT_DEPTH, answer=ANSWER) for template in TEMPLATES}
    covered = {
        template: round(float(drafter.t2d[texts[template]["tokens"][:, -ANSWER:]].float().mean()), 4) for template in TEMPLATES
    }
    pinned = _tau(drafter, texts["as trained"], depth=DRAFT_DEPTH, answer=ANSWER, what=Intervention(pin=True))
    scaled = texts["as trained"] | {"feats": measure.scaled_stream(texts["as trained"]["feats"].float(), 10.0)}
    return {
        "tau": found["as trained"]["tau"], "rates": found["as trained"]["rates"], "templates": found, "coverage": covered, "tau_pin": pinned["tau"],
        "tau_scaled": _tau(drafter, scaled, depth=DRAFT_DEPTH, answer=ANSWER)["tau"],
    }


def part_noise(drafter, texts: dict) -> dict:
    """Acceptance under noise on both paths."""
    def tau(alpha: float, path: str) -> list:
        what = Intervention(noise=alpha, path=path)
        return _tau(drafter, texts["as trained"], depth=DRAFT_DEPTH, answer=ANSWER, count=SMOL_NOISE_PROMPTS, what=what)["tau"]

    return {"noise": {path: {str(alpha): tau(alpha, path) for alpha in measure.ALPHAS} for path in ("hidden", "embedding")}}


def part_long(drafter, texts: dict) -> dict:
    """Acceptance after prompts of 768 tokens, three times the training length, by attention window."""
    return {"long": {
        name: _tau(drafter, texts["long"], depth=LONG_DEPTH, answer=LONG_ANSWER, rows=1, what=what) for name, what in WINDOWS.items()
    }}


PARTS = {"drift": part_drift, "tau": part_tau, "noise": part_noise, "long": part_long}


def speculative_row(job: dict) -> dict:
    """Speculative against plain greedy decoding of one prompt: same tokens, rounds, seconds (one thread)."""
    from nbkit.methods.attention_drift import speculative_generate

    model, tokenizer = _smol()
    drafter = nbkit.load_model(f"drift-smollm2-{job['variant']}").model.float().bind(model)
    ids = template_ids(tokenizer, "as trained")[job["prompt"]][None]
    start = time.perf_counter()
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["tokens"], do_sample=False)
    middle = time.perf_counter()
    out = speculative_generate(model, drafter, ids, depth=job["depth"], max_new_tokens=job["tokens"])
    equal = out.sequences.shape == plain.shape and bool((out.sequences == plain).all())
    return {
        "variant": job["variant"], "prompt": job["prompt"], "depth": job["depth"], "new_tokens": out.new_tokens, "equal": equal,
        "rounds": out.rounds, "accepted": out.accepted, "tau_without_bonus": out.acceptance_length_without_bonus,
        "plain_seconds": round(middle - start, 3), "seconds": round(time.perf_counter() - middle, 3), "draft_seconds": round(out.draft_seconds, 3),
    }


def target_facts(job: dict) -> dict:
    """Magnitude of the target's streams and the sinks of its heads."""
    held, prompt = _texts(job["work"])["sampled"], drift_rollouts.PROMPT
    position, mass = measure.target_sinks(_smol().model, held["tokens"][:16])
    return {
        "aux_rms": stream_rms(held["feats"], prompt), "aux_rms_first_token": stream_rms(held["feats"][:, :1], 0), "target_sinks": position.tolist(),
        "target_sink_mass": measure.numbers(mass),
    }


def run_smol(work_dir: Path, out_dir: Path, log: Callable[[str], None], *, variants: tuple[str, ...] = ("pre", "post")) -> None:
    """Measure both drafters of SmolLM2 and write data/recordings/drift-smollm2."""
    torch.set_num_threads(1)
    make_texts(work_dir, log)
    texts = _texts(str(work_dir))
    jobs = [{"work": str(work_dir), "variant": variant, "part": part} for part in PARTS for variant in variants]
    rows = parallel.map(smol_part, jobs, executor="serial", key=part_key, resume=work_dir / "parts.jsonl", progress=False)
    cells = {v: {"variant": v, "ttt": drift_train.SMOL_DEPTH, "seed": 0} for v in variants}
    for job, row in zip(jobs, rows, strict=True):
        cells[job["variant"]] |= {name: value for name, value in row.items() if name != "seconds"}
    tries = [{"variant": v, "prompt": p, "tokens": 40, "depth": 4} for p in range(6) for v in variants]
    spoken = parallel.map(
        speculative_row, tries, executor="serial", key=speculative_key, resume=work_dir / "speculative.jsonl", progress=False,
    )
    (facts,) = parallel.map(target_facts, [{"work": str(work_dir)}], executor="serial", resume=work_dir / "target.jsonl", progress=False)
    prompts = _prompts(_smol().tokenizer, drift_rollouts.ROWS)
    save_recording(
        "drift-smollm2",
        {
            "prompts": GREEDY, "depth": DRIFT_DEPTH, **facts, "documents": [prompt.document for prompt in prompts],
            "template_first_repeat": {t: answer_ends(texts[t], texts[t]["tokens"].shape[1] - ANSWER) for t in TEMPLATES},
            "template_prompt_tokens": {t: texts[t]["tokens"].shape[1] - ANSWER for t in TEMPLATES}, "answer_tokens": ANSWER,
            "long_first_repeat": answer_ends(texts["long"], LONG_PROMPT), "cells": list(cells.values()), "speculative": spoken,
        },
        {
            "recipe": "drift-smollm2-eval", "seed": 0, "licence": "MIT", "target": "smollm2-135m",
            "summary": "drift, acceptance by template, length, noise and pinning of two drafters for SmolLM2-135M-Instruct (real model)",
        },
    )
