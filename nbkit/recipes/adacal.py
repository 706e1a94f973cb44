"""Which heads need more than a local window? SmolLM2-135M with chosen heads dense and all others A-shaped: data/recordings/adacal-heads.

Fixed before any result was seen: held-out prompts of 512 tokens of the tasks needle and table, in chunks of 12; heads are ranked over the whole
model by one metric of their dense profile, averaged over 8 calibration prompts of the same task; 20 % of them (10 % and 40 % for the
readings of the middle mass and for random heads) read everything, the rest 4 sinks and 64 local keys. Needle: loss of the first answer
token, which is predicted inside the prefill; table: loss of the last tokens of the prompt. The damage of a head is the rise of that loss on
2 calibration prompts in float32 when this head alone is A-shaped, for all heads of 6 layers. Cells come in the order of importance and each
is written at once; a second call skips it; a time limit ends the run with what is there.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

PROMPTS, CHUNK, CALIBRATION, DAMAGE_PROMPTS, TOKENS = 24, 12, 8, 2, 512
HEAD_TASKS = ("needle", "table")
DAMAGE_LAYERS = (2, 7, 12, 17, 22, 27)
SINKS, WINDOW, PROBE = 4, 64, 64
# Ranking -> (metric of the profile, largest first?).
RANKINGS = {
    "entropy": ("entropy", True), "concentration": ("concentration", False), "mean": ("mid_mean", True), "max": ("mid_max", True),
    "last": ("mid_last", True),
}


@functools.lru_cache(maxsize=1)
def load():
    """SmolLM2-135M in bfloat16 with its tokenizer; `agreement` in the recordings says how far its losses are from those in float32."""
    import torch

    import nbkit

    loaded = nbkit.load_model("smollm2-135m")
    loaded.model.to(torch.bfloat16)
    return loaded


@functools.lru_cache(maxsize=64)
def prompts(kind: str, n: int, tokens: int = TOKENS, split: str = "held-out", keys: int | None = None, depth: float | None = None):
    """Prompts of one task, the same for every cell."""
    from nbkit.loaders.long_tasks import load_long_tasks

    return tuple(load_long_tasks(kind, n=n, tokens=tokens, split=split, tokenizer=load().tokenizer, seed=0, keys=keys, depth=depth))


def read(prompt, part, model=None) -> dict:
    """Read one prompt through an attention rule; the loss is that of tokens predicted inside the prefill.

    Retrieval tasks: the first token of the answer, predicted by the last row. Other tasks: the last ``prompt.inside`` tokens of the prompt.
    """
    import torch
    from torch.nn import functional as F

    from nbkit.inference import attach

    model = load().model if model is None else model
    ids = torch.from_numpy(prompt.ids)[None]
    start = time.perf_counter()
    with torch.inference_mode(), attach(model, attention=part) as run:
        rows = 0 if prompt.category == "retrieval" else prompt.inside
        logits = model(ids, logits_to_keep=rows + 1).logits[0].float()
        density = run.density
    seconds = time.perf_counter() - start
    target = torch.from_numpy(prompt.answer_ids[:1]) if not rows else ids[0, -rows:]
    logits = logits[-1:] if not rows else logits[:-1]
    return {
        "nll": round(float(F.cross_entropy(logits, target)), 5), "top1": round(float((logits.argmax(-1) == target).float().mean()), 4),
        "density": round(float(density), 5), "seconds": round(seconds, 3),
    }


def read_all(items, part_of) -> dict:
    """Read prompts one after another; part_of(prompt) gives the rule. One list a figure."""
    rows = [read(prompt, part_of(prompt)) for prompt in items]
    return {name: [row[name] for row in rows] for name in rows[0]}


@functools.lru_cache(maxsize=1)
def wide():
    """The same model in float32."""
    import nbkit

    return nbkit.load_model("smollm2-135m").model


def agreement(n: int = 4) -> dict:
    """Losses of the dense model in float32 and in bfloat16 on the same calibration prompts."""
    import nbkit.inference.patterns  # noqa: F401 - registers the rules
    from nbkit.inference import get

    dense = get("attention", "dense")
    items = [prompt for kind in HEAD_TASKS for prompt in prompts(kind, n, split="calibration")]
    pairs = [(read(prompt, dense, wide())["nll"], read(prompt, dense)["nll"]) for prompt in items]
    return {"float32": [a for a, _ in pairs], "bfloat16": [b for _, b in pairs]}


# Heads --------------------------------------------------------------------------------------------------------------------------


def head_cells() -> list[dict]:
    """Every cell in the order of importance; "all" and "none" are the dense model and the bare A-shape, a layer asks for damages."""
    def ranked(names, share, chunk=0):
        fixed = {"all": 1.0, "none": 0.0}
        return [{"task": task, "ranking": name, "share": fixed.get(name, share), "chunk": chunk} for name in names for task in HEAD_TASKS]

    names = ["all", "none", "mean", "max", "random-0", "entropy", "concentration"]
    out = ranked(names, 0.2) + ranked(names, 0.2, 1)
    out += [{"task": task, "layer": layer} for layer in DAMAGE_LAYERS for task in HEAD_TASKS]
    out += ranked(["last", "random-1", "random-2"], 0.2) + ranked(["last", "random-1", "random-2"], 0.2, 1)
    return out + [cell for share in (0.1, 0.4) for cell in ranked(["mean", "max", "random-0"], share)]


def cell_key(cell: dict) -> str:
    """Stable name of a cell."""
    return ",".join(f"{name}={cell[name]}" for name in sorted(cell))


@functools.lru_cache(maxsize=4)
def mean_profile(task: str) -> dict:
    """Every metric of every head, averaged over the calibration prompts of a task: name -> (layers, heads)."""
    import numpy as np

    from nbkit.methods.adacal import AdaCalConfig, profile

    cfg = AdaCalConfig(sinks=SINKS, window=WINDOW, probe=PROBE, task="general")
    tables = [profile(load().model, prompt.ids, cfg) for prompt in prompts(task, CALIBRATION, split="calibration")]
    layers = 1 + max(row["layer"] for row in tables[0])
    names = ("entropy", "concentration", "mid_mean", "mid_max", "mid_last")
    return {name: np.mean([[row[name] for row in table] for table in tables], 0).reshape(layers, -1) for name in names}


def flags(cell: dict):
    """The heads that stay dense in a cell: bool (layers, heads)."""
    import torch

    shape = next(iter(mean_profile(cell["task"]).values())).shape
    chosen = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
    if cell["ranking"] == "all":
        chosen[:] = True
    elif cell["ranking"] != "none":
        name, largest = RANKINGS[cell["ranking"]]
        values = torch.from_numpy(mean_profile(cell["task"])[name]).flatten()
        chosen[values.argsort(descending=largest, stable=True)[: round(cell["share"] * len(chosen))]] = True
    return chosen.view(shape)


def evaluate_heads(cell: dict) -> dict:
    """One cell of the ranking experiment, or the damage of the heads of one layer."""
    import nbkit.inference.patterns  # noqa: F401 - registers the rules
    from nbkit.inference import get

    start = time.perf_counter()
    if "layer" in cell:
        found = damage(cell["task"], cell["layer"])
    else:
        drawn = cell["ranking"].startswith("random")
        options = {"share": cell["share"], "seed": int(cell["ranking"][-1])} if drawn else {"active": flags(cell).nonzero().tolist()}
        part = get("attention", "random-heads" if drawn else "head-set", sinks=SINKS, window=WINDOW, **options)
        items = prompts(cell["task"], PROMPTS)[cell["chunk"] * CHUNK :][:CHUNK]
        found = {"ids": [prompt.id for prompt in items]} | read_all(items, lambda prompt: part)
    return {"key": cell_key(cell), "cell": cell} | found | {"total": round(time.perf_counter() - start, 1)}


def damage(task: str, layer: int) -> dict:
    """Rise of the loss when one head of a layer alone is A-shaped: (prompts, heads), by restart from the layer's dense input.

    Everything below the layer is the same for all its heads, so it is computed once and the heads form a batch.
    """
    import torch
    from torch.nn import functional as F

    from nbkit.inference.patterns import Pattern

    # In bfloat16 the damage of most heads is below the rounding of a logit.
    model = wide()
    base, rise = model.model, []
    for prompt in prompts(task, DAMAGE_PROMPTS, split="calibration"):
        ids = torch.from_numpy(prompt.ids)[None]
        rows = 0 if prompt.category == "retrieval" else prompt.inside
        target = torch.from_numpy(prompt.answer_ids[:1]) if not rows else ids[0, -rows:]
        tokens, heads = ids.shape[1], model.config.num_attention_heads
        causal, local = (Pattern(1, window=w, sinks=SINKS).mask(tokens)[0] for w in (tokens, WINDOW))
        # Item h of the batch has head h A-shaped; the last item has none, so it is the dense model.
        mask = causal.expand(heads + 1, heads, -1, -1).clone()
        mask[torch.arange(heads), torch.arange(heads)] = local
        with torch.inference_mode():
            positions = torch.arange(tokens)[None]
            hidden = base.embed_tokens(ids)
            rope = base.rotary_emb(hidden, positions)
            for index, block in enumerate(base.layers[: model.config.num_hidden_layers]):
                if index == layer:
                    hidden = hidden.expand(heads + 1, -1, -1)
                hidden = block(hidden, attention_mask=mask if index == layer else None, position_ids=positions, position_embeddings=rope)
            logits = model.lm_head(base.norm(hidden[:, -(rows + 1) :])).float()
        logits = logits[:, -1:] if not rows else logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), target.repeat(heads + 1), reduction="none").view(heads + 1, -1).mean(1)
        rise.append([round(x, 5) for x in (losses[:heads] - losses[heads]).tolist()])
    return {"rise": rise}


def in_time(evaluate, grid: list[dict], key, resume: Path, minutes: float, log) -> list[dict]:
    """Results of the first cells, as many as the minutes allow, and of all that an earlier call had finished."""
    from nbkit import parallel

    end = time.monotonic() + 60 * minutes
    each = functools.partial(parallel.map, evaluate, executor="serial", progress=False, key=key, resume=resume)
    for count, cell in enumerate(grid, 1):
        if time.monotonic() > end:
            log(f"time is up at cell {count} of {len(grid)}")
            break
        row = each([cell])[0]
        log(f"{count}/{len(grid)} {row['key']} {row['total']} s")
    done = {row["result"]["key"] for row in map(json.loads, resume.read_text().splitlines()) if "result" in row} if resume.exists() else set()
    return each([cell for cell in grid if key(cell) in done])


def run_heads(work_dir: Path, out_dir: Path, log, minutes: float = 60.0) -> None:
    """Evaluate rankings and damages until they or the minutes are used up and write data/recordings/adacal-heads."""
    from nbkit.loaders import save_recording

    grid = head_cells()
    rows = in_time(evaluate_heads, grid, cell_key, work_dir / "cells.jsonl", minutes, log)
    summary = "loss of SmolLM2-135M with the heads that a metric picks kept dense, the others A-shaped"
    profiles = {task: {name: table.round(5).tolist() for name, table in mean_profile(task).items()} for task in HEAD_TASKS}
    save_recording(
        "adacal-heads",
        {
            "model": "smollm2-135m", "dtype": "bfloat16", "agreement": agreement(), "prompts": PROMPTS, "chunk": CHUNK, "tokens": TOKENS,
            "sinks": SINKS, "window": WINDOW, "probe": PROBE, "planned": len(grid), "profiles": profiles, "cells": rows,
        },
        {"recipe": "adacal-heads", "seed": 0, "licence": "MIT", "summary": summary},
    )
