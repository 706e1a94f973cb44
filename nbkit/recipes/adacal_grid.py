"""Every sparse way of reading a prompt on the same held-out prompts of SmolLM2-135M: data/recordings/adacal-grid.

Fixed before any result was seen, except the number of tasks and the order of the cells, which were cut to the time at hand when early cells were
known; no setting of a rule changed. Tasks: of the retrieval tasks the first two, in the order of RETRIEVAL, whose first answer token the dense model
gets right on 8 calibration prompts above chance with the whole Wilson interval; then table, code and prose. Prompts of 512 tokens in chunks
of 12 (held-out templates, fillers and keys); a cell is one method on one chunk. 4 sinks and 64 local keys for every method that has them, all
else at the defaults of the rule. Loss: first answer token, predicted inside the prefill, or the last 48 tokens of the prompt. Density includes
the probe. Matched density: window 32 and probe 16, and one knob a method set by bisection on three calibration prompts. Cells come in the order
of importance and each is written at once; a second call skips it; a time limit ends the run with what is there.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from pathlib import Path

from nbkit.errors import RunError
from nbkit.recipes.adacal import CHUNK, SINKS, TOKENS, WINDOW, cell_key, in_time, load, prompts, read

RETRIEVAL = ("needle", "tracking", "multikey", "qa", "aggregation")
FREE = ("table", "code", "prose")
CHECKED, WANTED = 8, 2
CORE = ("dense", "a-shape", "adacal", "adacal-general", "vertical-slash", "tri-shape")
OTHERS = ("flexprefill", "xattention", "adacal-uniform", "trianglemix", "block-topk", "entropyinfer", "taskkv", "random-heads")
MATCHED = ("adacal", "vertical-slash", "tri-shape", "random-heads", "flexprefill", "xattention")
LONG = ("dense", "a-shape", "adacal", "vertical-slash", "tri-shape")
DENSITIES = (0.3, 0.25)
SMALL = ((8, 64), (16, 64))
RIVALS = (0, 1, 3, 6)
SHAPED = {"a-shape", "vertical-slash", "tri-shape", "trianglemix", "taskkv", "random-heads", "head-set"}


@functools.lru_cache(maxsize=256)
def part_of(method: str, options: tuple = ()):
    """The rule of a method; "adacal-general" is AdaCal without dispatch, "adacal-uniform" has every head active up to the caps."""
    import nbkit.inference.patterns  # noqa: F401 - registers the rules
    from nbkit.inference import get
    from nbkit.methods.adacal import POLICIES, AdaCal, AdaCalConfig

    given = dict(options)
    if method.startswith("adacal"):
        shape = {"sinks": SINKS, "window": WINDOW}
        if method == "adacal-general":
            shape["task"] = "general"
        elif method == "adacal-uniform":
            shape |= {"task": "general", "tau": -1.0, "kappa": 1.0}
        if "ease" in given:
            ease = given.pop("ease")
            given["policies"] = {
                task: dataclasses.replace(policy, tau=min(2.0, max(-1.0, policy.tau - ease)), kappa=1.0) for task, policy in POLICIES.items()
            }
        return AdaCal(AdaCalConfig(**(shape | given)), load().tokenizer)
    if method in SHAPED:
        given = {"sinks": SINKS, "window": WINDOW} | given
    return get("attention", method, **given)


def rival_part(prompt, rivals: int):
    """A-shape plus the columns of the right statement and of some statements with another key."""
    import torch

    from nbkit.inference.patterns import Pattern, PatternAttention

    (start, stop), *_ = prompt.evidence
    others = [place for place in statements(prompt) if place != start][:rivals]
    columns = torch.cat([torch.arange(place, place + stop - start) for place in [start, *others]])

    class GivenColumns(PatternAttention):
        name = "given-columns"

        def pattern(self, run, layer, q, k, v, scaling):
            return Pattern(q.shape[1], window=WINDOW, sinks=SINKS, columns=columns.expand(q.shape[1], -1))

    return GivenColumns()


def statements(prompt) -> list[int]:
    """Where the statements of a multikey prompt begin: places that start like the right one and leave room for it before the end."""
    start, stop = prompt.evidence[0]
    opening = prompt.ids[start : start + 4].tolist()
    # The question at the end starts alike and is cut off before the value.
    return [i for i in range(prompt.tokens - (stop - start) + 1) if prompt.ids[i : i + 4].tolist() == opening]


def evaluate(cell: dict) -> dict:
    """One method on one chunk of prompts."""
    extra = {name: cell[name] for name in ("keys", "depth") if name in cell}
    size = cell.get("size", CHUNK)
    items = prompts(cell["task"], (cell["chunk"] + 1) * size, cell["tokens"], **extra)[cell["chunk"] * size :]
    options = tuple(sorted(cell.get("options", {}).items()))
    start, rows = time.perf_counter(), []
    for prompt in items:
        part = rival_part(prompt, cell["rivals"]) if "rivals" in cell else part_of(cell["method"], options)
        rows.append(read(prompt, part))
    figures = {name: [row[name] for row in rows] for name in rows[0]}
    digest = hashlib.sha256(b"".join(p.ids.tobytes() for p in items)).hexdigest()[:12]
    facts = {"key": grid_key(cell), "cell": cell, "ids": [p.id for p in items], "digest": digest}
    return facts | figures | {"total": round(time.perf_counter() - start, 1)}


def grid_key(cell: dict) -> str:
    """Stable name of a cell."""
    return cell_key({name: json.dumps(value, sort_keys=True) if isinstance(value, dict) else value for name, value in cell.items()})


def same_prompts(rows: list[dict]) -> None:
    """Raise RunError when two cells of one chunk have read different prompts: the tasks were changed between two runs."""
    seen: dict[tuple, str] = {}
    for row in rows:
        where = tuple(row["cell"].get(name) for name in ("task", "tokens", "chunk", "size", "keys", "depth"))
        if seen.setdefault(where, row["digest"]) != row["digest"]:
            raise RunError(f"prompts of {row['key']} differ from those of an earlier cell", hint="delete the recipe's work folder and run it again")


def classes(kind: str, n: int = 24, tokens: int = TOKENS) -> dict[str, int]:
    """How the dispatcher classifies held-out prompts of a task."""
    from nbkit.methods.adacal import TASKS, dispatch

    found = [dispatch(prompt.ids, load().tokenizer).task for prompt in prompts(kind, n, tokens)]
    return {task: found.count(task) for task in TASKS}


# What is chosen on calibration prompts.


def usable(cell: dict) -> dict:
    """First answer tokens that the dense model gets right on 8 calibration prompts of a task, and the chance level."""
    items = prompts(cell["task"], CHECKED, split="calibration")
    right = sum(read(prompt, part_of("dense"))["top1"] for prompt in items)
    # A guess of the leading digit is right once in nine.
    return {"key": grid_key(cell), "cell": cell, "right": int(right), "n": len(items), "chance": max(items[0].chance, 1 / 9)}


def knob(method: str, x: float) -> dict:
    """Options of a method at setting x in [0, 1]; its density grows with x."""
    shape = {"window": 32}
    if method == "adacal":
        return shape | {"probe": 16, "ease": 2 * x - 1}
    if method == "vertical-slash":
        return shape | {"probe": 16, "v": round(256 * x), "s": round(384 * x)}
    if method == "tri-shape":
        return shape | {"last": round(TOKENS * x)}
    if method == "random-heads":
        return shape | {"share": round(x, 4), "seed": 0}
    return {"gamma" if method == "flexprefill" else "threshold": round(min(0.999, max(0.01, x)), 4)}


def match(cell: dict) -> dict:
    """The setting of a method whose mean density on three calibration prompts comes nearest to the target from below, by bisection."""
    from nbkit.inference.patterns import Pattern

    items = [prompts(task, 1, split="calibration")[0] for task in ("needle", "table", "prose")]

    def density(x: float) -> float:
        options = knob(cell["method"], x)
        bare = Pattern(1, window=options.get("window", WINDOW), sinks=SINKS, dense_rows=options.get("last", 0)).density(TOKENS)
        # Known without reading anything.
        if cell["method"] == "tri-shape":
            return bare
        if cell["method"] == "random-heads":
            return bare + options["share"] * (1 - bare)
        part = part_of(cell["method"], tuple(sorted(options.items())))
        return sum(read(prompt, part)["density"] for prompt in items) / len(items)

    low, high, found = 0.0, 1.0, {}
    for _ in range(6):
        middle = (low + high) / 2
        value = density(middle)
        found[middle] = value
        low, high = (middle, high) if value <= cell["density"] else (low, middle)
    if low not in found:
        found[low] = density(low)
    return {"key": grid_key(cell), "cell": cell, "options": knob(cell["method"], low), "density": round(found[low], 4)}


# The grid.


def cells(tasks: list[str]) -> list[dict]:
    """The cells at default settings in the order of importance."""
    out = [_cell(task, method) for task in tasks for method in CORE]
    out += [_cell(task, "a-shape", options={"window": w}) for w in (256, 32, 128) for task in ("needle", "prose")]
    out += [_cell("needle", method, depth=1.0) for method in ("dense", "a-shape")]
    out += [_cell(task, "vertical-slash", options={"v": v, "s": s}) for v, s in SMALL for task in tasks]
    return out + [_cell("multikey", "given-columns", keys=7, rivals=rivals) for rivals in RIVALS]


def matched_cells(tasks: list[str], matches: list[dict], chunk: int = 0) -> list[dict]:
    """Cells of one density at the settings that came near it; a setting far from its target (the knob's floor lies above) is no match."""
    near = [row for row in matches if abs(row["density"] - row["cell"]["density"]) < 0.03]
    return [_cell(task, row["cell"]["method"], chunk, options=row["options"]) for row in near for task in tasks]


def more_cells(tasks: list[str]) -> list[dict]:
    """Further baselines, rival statements under the usual rules, longer prompts, second chunks."""
    out = [_cell(task, method) for method in OTHERS for task in tasks]
    out += [_cell("multikey", method, keys=7) for method in ("dense", "adacal", "vertical-slash")]
    out += [_cell(task, method, 0, 1024, size=6) for task in ("needle", "table") for method in LONG]
    out += [_cell(task, method, 1) for task in tasks for method in CORE]
    return out + [_cell(task, method, 0, 2048, size=4) for task in ("needle", "table") for method in LONG]


def _cell(task: str, method: str, chunk: int = 0, tokens: int = TOKENS, **more) -> dict:
    return {"task": task, "method": method, "chunk": chunk, "tokens": tokens, **more}


def run(work_dir: Path, out_dir: Path, log, minutes: float = 75.0) -> None:
    """Evaluate cells until they or the minutes are used up and write data/recordings/adacal-grid."""
    from nbkit import parallel
    from nbkit.loaders import save_recording
    from nbkit.metrics import wilson

    end = time.monotonic() + 60 * minutes
    each = functools.partial(parallel.map, executor="serial", progress=False, key=grid_key)
    checks, tasks = [], []
    for count in range(1, len(RETRIEVAL) + 1):
        checks = each(usable, [{"task": task} for task in RETRIEVAL[:count]], resume=work_dir / "usable.jsonl")
        tasks = [row["cell"]["task"] for row in checks if wilson(row["right"], row["n"]).low > row["chance"]]
        if len(tasks) == WANTED:
            break
    tasks += FREE
    log(f"tasks: {tasks} of {[(row['cell']['task'], row['right']) for row in checks]}")
    grid, matches, rows = [], [], []
    for stage in (cells, DENSITIES[0], more_cells, DENSITIES[1]):
        if callable(stage):
            grid += stage(tasks)
        else:
            if time.monotonic() > end and not (work_dir / f"match-{stage}.jsonl").exists():
                break
            found = each(match, [{"method": method, "density": stage} for method in MATCHED], resume=work_dir / f"match-{stage}.jsonl")
            matches += found
            grid += matched_cells(tasks, found)
        rows = in_time(evaluate, grid, grid_key, work_dir / "cells.jsonl", (end - time.monotonic()) / 60, log)
    same_prompts(rows)
    save_recording(
        "adacal-grid",
        {
            "model": "smollm2-135m", "dtype": "bfloat16", "tasks": tasks, "usable": checks, "matched": matches, "chunk": CHUNK, "tokens": TOKENS,
            "sinks": SINKS, "window": WINDOW, "classes": {kind: classes(kind) for kind in RETRIEVAL + FREE}, "cells": rows,
        },
        {
            "recipe": "adacal-grid", "seed": 0, "licence": "MIT",
            "summary": "loss and density of SmolLM2-135M on held-out long prompts by sparse attention rule and task",
        },
    )
