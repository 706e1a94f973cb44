"""SmolLM2-135M reading real text through a compacted cache: data/recordings/ams-text, ams-needles, ams-loops.

Fixed before the comparison was seen (one segmented cell had been timed on four of these texts): 24 held-out prose documents of 640 tokens;
the first 64 tokens are the prefill, the rest is read in chunks of 64 with one compaction after each chunk, 4 sinks and 16 recent tokens for
every method. The loss counts from the first token that is read through a compacted cache. Cells are paired text by text.
Each finished cell is written at once; a second call skips it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

TEXTS, TOKENS, BATCH = 24, 640, 8
BUDGETS = (64, 128)
SCORERS = ("tova", "expected_attention", "keydiff", "rkv", "snapkv")
BASE = {"interval": 64, "sinks": 4, "recent": 16, "window": 32, "seg_len": (16, 128), "segment_mass": 0.1, "min_keep": 1}
BETAS = (1.0, 0.9, 0.7, 0.4, 0.1)


def cell_key(cell: dict) -> str:
    """Stable name of a cell."""
    return ",".join(f"{k}={cell[k]}" for k in sorted(cell)).replace(" ", "") or "full"


def text_cells() -> list[dict]:
    """Every reading cell on top of BASE; an empty one is the full cache."""
    out: list[dict] = [{}]
    for keep in BUDGETS:
        for scorer in SCORERS:
            out += [{"scorer": scorer, "allocation": a, "keep": keep} for a in ("none", "mass")]
        out += [{"scorer": "random", "allocation": "none", "keep": keep}, {"scorer": "streaming", "allocation": "none", "keep": keep}]
    out += [{"scorer": "tova", "allocation": "fixed", "keep": 128}, {"scorer": "tova", "allocation": "mass", "keep": 128, "recent_in_mass": True}]
    out += [{"scorer": "tova", "allocation": "mass", "keep": 128, "ema": [0.9, beta]} for beta in BETAS if beta != 0.9]
    return out


def policy_of(cell: dict):
    """The policy of a cell (JSON lists become tuples)."""
    from nbkit.methods.ams import SegmentedPolicy

    return SegmentedPolicy(**(BASE | {k: tuple(v) if isinstance(v, list) else v for k, v in cell.items()}))


@functools.lru_cache(maxsize=1)
def _model():
    import nbkit

    return nbkit.load_model("smollm2-135m")


@functools.lru_cache(maxsize=1)
def texts():
    """(24, 640) token ids of held-out prose, one row per document."""
    import numpy as np

    import nbkit

    return np.stack([d.ids for d in nbkit.load_text("prose", split="held-out", n=TEXTS, tokens=TOKENS, tokenizer=_model().tokenizer)])


def read(model, ids, policy, chunk: int = 64, record: str = "positions"):
    """Teacher-force ``ids`` (texts, tokens) chunk by chunk under a policy (None: full cache).

    Returns (loss of every predicted token (texts, tokens - 1) in nats, cache).
    """
    import torch
    from transformers import DynamicCache

    from nbkit.methods.ams import CompactedCache

    losses = []
    cache = CompactedCache(model.config, policy, record=record) if policy else DynamicCache(config=model.config)

    def go() -> None:
        before = None
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            logits = model(part, cache=cache, use_cache=True).logits.float()
            rows = logits[:, :-1] if before is None else torch.cat([before, logits[:, :-1]], 1)
            target = part[:, 1:] if before is None else part
            losses.append(torch.nn.functional.cross_entropy(rows.transpose(1, 2), target, reduction="none"))
            before = logits[:, -1:]

    with torch.inference_mode():
        if policy is None:
            go()
        else:
            with policy.attach(model):
                go()
    return torch.cat(losses, 1), cache


def describe(cache, sinks: int, recent: int) -> dict:
    """Per-text figures of what was evicted, averaged over layers and heads."""
    import numpy as np

    from nbkit.methods.ams import longest_gap, overlap, retention_by_place, wipe_out_rate

    last = cache.events[-1]
    positions = last.positions.numpy()
    mean = lambda x: x.mean((0, 2)).round(5).tolist()  # noqa: E731 - (layers, texts, heads) -> texts
    ious, slot_wipes = [], []
    held = None
    for event in cache.events:
        now = event.positions.numpy()
        previous = (
            np.broadcast_to(np.arange(event.before), (*now.shape[:-1], event.before))
            if held is None
            else np.concatenate(
                [
                    held,
                    np.broadcast_to(
                        np.arange(event.seen - (event.before - held.shape[-1]), event.seen), (*now.shape[:-1], event.before - held.shape[-1])
                    ),
                ],
                -1,
            )
        )
        slots = np.empty_like(now)
        for where in np.ndindex(now.shape[:-1]):
            slots[where] = np.searchsorted(previous[where], now[where])
        slot_wipes.append(wipe_out_rate(slots, event.before))
        if held is not None:
            # The must-keep sets would raise the overlap by themselves: sinks and both recent suffixes are left out.
            ious.append(overlap(held[..., sinks : held.shape[-1] - recent], now[..., sinks : now.shape[-1] - recent], event.seen))
        held = now
    return {
        "wiped": mean(wipe_out_rate(positions, last.seen)),
        "wiped_first": mean(wipe_out_rate(cache.events[0].positions.numpy(), cache.events[0].seen)),
        "wiped_slots": mean(np.mean(slot_wipes, 0)),
        "gap": mean(longest_gap(positions, last.seen).astype(float)),
        "iou": mean(np.mean(ious, 0)) if ious else None,
        "retention": retention_by_place(positions, last.seen).mean((0, 2)).round(4).tolist(),
    }


def evaluate_text(cell: dict) -> dict:
    """One reading cell."""
    import torch

    loaded, start = _model(), time.perf_counter()
    ids = torch.from_numpy(texts())
    first = cell.get("keep", 0)
    nll, facts = [], []
    for at in range(0, len(ids), BATCH):
        losses, cache = read(loaded.model, ids[at : at + BATCH], policy_of(cell) if cell else None)
        # Tokens after the first compaction of the tightest budget; the same tokens for every cell.
        nll += losses[:, 127:].mean(1).tolist()
        if cell:
            facts.append(describe(cache, BASE["sinks"], BASE["recent"]))
    merged = {k: [x for f in facts for x in (f[k] or [])] for k in facts[0]} if facts else {}
    return {
        "key": cell_key(cell),
        "cell": cell,
        "keep": first,
        "nll": [round(x, 5) for x in nll],
        "seconds": round(time.perf_counter() - start, 1),
    } | merged


def run_text(work_dir: Path, out_dir: Path, log) -> None:
    """Read all texts under every policy and write data/recordings/ams-text."""
    _grid(
        "ams-text",
        text_cells(),
        evaluate_text,
        work_dir,
        out_dir,
        log,
        {"texts": TEXTS, "tokens": TOKENS, "base": _json(BASE)},
        "loss and evictions of SmolLM2-135M on 24 held-out prose texts by policy, scorer and budget",
    )


def _json(values: dict) -> dict:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _grid(name: str, grid: list[dict], evaluate, work_dir: Path, out_dir: Path, log, facts: dict, summary: str) -> None:
    from nbkit import parallel
    from nbkit.loaders import save_recording

    log(f"{name}: {len(grid)} cells")
    rows = parallel.map(evaluate, grid, executor="serial", key=cell_key, resume=work_dir / "cells.jsonl", desc=name)
    save_recording(
        name,
        facts | {"model": "smollm2-135m", "cells": rows},
        {"recipe": name, "seed": 0, "licence": "MIT", "summary": summary},
    )


# Needles ------------------------------------------------------------------------------------------------------------------------

PROMPTS, NEEDLES, CONTEXT = 12, 8, 512
NEEDLE_BUDGETS = (128, 256)
OWNERS = ("cat", "dog", "horse", "cow", "bird", "fish", "lion", "bear")
FACT, QUESTION = "\n\nRemember: the password of the {} is {}.\n\n", "\n\nRemember: the password of the {} is"
"""Chosen among four wordings as the one the full cache answers best, on calibration texts."""


def needle_cells() -> list[dict]:
    """Recall cells at a quarter and a half of the context; an empty one is the full cache."""
    out: list[dict] = [{}]
    for keep in NEEDLE_BUDGETS:
        for scorer in SCORERS:
            out += [{"scorer": scorer, "allocation": a, "keep": keep} for a in ("none", "mass")]
        out += [{"scorer": "random", "allocation": "none", "keep": keep}, {"scorer": "streaming", "allocation": "none", "keep": keep}]
    return out


@functools.lru_cache(maxsize=1)
def needle_prompts():
    """Contexts (12, 512) with eight one-line facts each at spread places, questions (12, 8, q) and answers (12, 8, a), all token ids."""
    import numpy as np

    tokenizer = _model().tokenizer
    rng = np.random.default_rng(2026)
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    contexts, questions, answers = [], [], []
    for filler in texts()[:PROMPTS]:
        codes = rng.integers(1000, 10000, NEEDLES)
        order = rng.permutation(NEEDLES)
        facts = [encode(FACT.format(OWNERS[j], codes[j])) for j in order]
        room = CONTEXT - sum(map(len, facts)) - 8
        cuts = np.linspace(0, room, NEEDLES + 2).astype(int)[1:-1]
        row, at = [], 0
        for cut, fact in zip(cuts, facts, strict=True):
            row += filler[at:cut].tolist() + fact
            at = cut
        row += filler[at : at + CONTEXT - len(row)].tolist()
        contexts.append(row)
        questions.append([encode(QUESTION.format(owner)) for owner in OWNERS])
        answers.append([encode(f" {code}") for code in codes])
    return np.array(contexts), np.array(questions), np.array(answers)


def evaluate_needles(cell: dict) -> dict:
    """Exact recall (greedy digits) and log-probability of every answer, asked through the compacted cache."""
    import torch

    model, start = _model().model, time.perf_counter()
    policy = policy_of(cell) if cell else None
    contexts, questions, answers = (torch.from_numpy(a) for a in needle_prompts())
    _, cache = read(model, contexts, policy)
    # The eight questions share their context: the cache is copied along the batch, not read again.
    cache.batch_repeat_interleave(NEEDLES)
    answers = answers.flatten(0, 1)
    asked = torch.cat([questions.flatten(0, 1), answers], 1)
    with torch.inference_mode(), policy.attach(model) if policy else contextlib.nullcontext():
        logits = model(asked, cache=cache, use_cache=True).logits.float()
    log_p = logits[:, -answers.shape[1] - 1 : -1].log_softmax(-1)
    logprob = log_p.gather(-1, answers.unsqueeze(-1)).sum((1, 2))
    return {
        "key": cell_key(cell),
        "cell": cell,
        "exact": (log_p.argmax(-1) == answers).all(1).int().tolist(),
        "logprob": [round(x, 4) for x in logprob.tolist()],
        "prompt": [row for row in range(PROMPTS) for _ in range(NEEDLES)],
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_needles(work_dir: Path, out_dir: Path, log) -> None:
    """Ask for eight facts under every policy and write data/recordings/ams-needles."""
    _grid(
        "ams-needles",
        needle_cells(),
        evaluate_needles,
        work_dir,
        out_dir,
        log,
        {"prompts": PROMPTS, "needles": NEEDLES, "context": CONTEXT, "base": _json(BASE)},
        "recall of eight facts in 512 tokens of prose by SmolLM2-135M by policy, scorer and budget",
    )


# Loops --------------------------------------------------------------------------------------------------------------------------

STORIES, NEW_TOKENS, GRAM, LOOP_KEEP = 60, 512, 8, 96


def loop_cells() -> list[dict]:
    """Free generation with the full cache and at 96 entries."""
    return (
        [{}]
        + [{"scorer": "tova", "allocation": a, "keep": LOOP_KEEP} for a in ("none", "mass")]
        + [{"scorer": "streaming", "allocation": "none", "keep": LOOP_KEEP}]
    )


def repeated_share(tokens, gram: int = GRAM) -> float:
    """Share of the ``gram``-grams of a sequence that occurred in it before.

    >>> repeated_share([1, 2, 1, 2, 1, 2], gram=2)
    0.6
    """
    grams = [tuple(tokens[i : i + gram]) for i in range(len(tokens) - gram + 1)]
    return 1 - len(set(grams)) / len(grams)


def first_loop(tokens, gram: int = GRAM) -> int:
    """Index at which the first repeated ``gram``-gram starts; the length if none repeats."""
    seen = set()
    for i in range(len(tokens) - gram + 1):
        g = tuple(tokens[i : i + gram])
        if g in seen:
            return i
        seen.add(g)
    return len(tokens)


def evaluate_loops(cell: dict) -> dict:
    """Greedy continuation of 60 prompts of 48 tokens."""
    import torch

    from nbkit.methods.ams import CompactedCache

    model, start = _model().model, time.perf_counter()
    ids = torch.from_numpy(loop_prompts())
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        if not cell:
            out = model.generate(ids, **options)
        else:
            policy = policy_of(cell)
            with policy.attach(model):
                out = model.generate(ids, cache=CompactedCache(model.config, policy, record="none"), **options)
    new = out[:, ids.shape[1] :].tolist()
    return {
        "key": cell_key(cell),
        "cell": cell,
        "repeated": [round(repeated_share(t), 5) for t in new],
        "first_loop": [first_loop(t) for t in new],
        "seconds": round(time.perf_counter() - start, 1),
    }


def loop_prompts():
    """(60, 48) token ids from calibration prose, which no other experiment reads: two windows of each of 30 documents."""
    import numpy as np

    import nbkit

    documents = nbkit.load_text("prose", split="calibration", n=STORIES // 2, tokens=448, tokenizer=_model().tokenizer)
    return np.stack([d.ids[at : at + 48] for d in documents for at in (0, 400)])


def run_loops(work_dir: Path, out_dir: Path, log) -> None:
    """Generate freely under four policies and write data/recordings/ams-loops."""
    _grid(
        "ams-loops",
        loop_cells(),
        evaluate_loops,
        work_dir,
        out_dir,
        log,
        {"prompts": STORIES, "new_tokens": NEW_TOKENS, "gram": GRAM, "base": _json(BASE)},
        "repetition in greedy continuations by SmolLM2-135M with a full and a compacted cache",
    )
