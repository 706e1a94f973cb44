"""SmolLM2-135M reading long prompts with fewer tokens: data/recordings/fastprefill-sensitivity and fastprefill-grid.

Fixed before any held-out result was seen (the step of the budget rule and the layers of the tuned single drop after the calibration table, the others
before it): 24 calibration prompts in three draws of about 8, 40 held-out prompts with other templates and fillers, 768 tokens
each, spread evenly over the usable tasks (those with a known chance level count only if the full model's exact answers on 8 calibration prompts lie
above it with their whole 95 % interval); 8 layers and 6 rates for the table; budgets .85, .75, .65, .55 of full prefill's MACs; 4 sinks, a window
of 32, pooling over 7; one score for all schedules, chosen on calibration prompts alone. A hand-made schedule gets the largest size that its budget
allows. The budget shown for quality is the smallest one, in steps of .01, whose expected extra loss on calibration is at most .05 nats. The model
runs in bfloat16 if its answer loss stays within .02 nats of float32 on six calibration prompts. Every prompt is written as it is done; a second call
goes on.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, CALIBRATION, DRAWS, HELD_OUT, USABLE_PROMPTS, SEED = 768, 24, 3, 40, 8, 0
LAYERS, RATES = (6, 9, 12, 15, 18, 21, 24, 27), (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
TAUS = (0.85, 0.75, 0.65, 0.55)
SINKS, WINDOW, POOL = 4, 32, 7
FLOOR = SINKS + WINDOW
SCORE, SCORED = "cummax", "all"
HEAD_PROMPTS, HEAD_BUDGETS = 40, (0.05, 0.1, 0.15, 0.2)
BASELINE_TAUS, SPECIAL_TAUS, FAST_TAU = (0.75, 0.65), (0.65, 0.55), 0.65
TUNED = ("optimised", "single-best")
RULES = ("one-shot-middle", "linear", "cosine", "fitprune")
SLOW = ("linear", "cosine", "fitprune")
"""Schedules that drop from the first layers on, so that hardly anything of the full model's pass can be used again."""
SAFE_LOSS = 0.05
DRAFT_LAYERS = 10
PRUNING = {"score": SCORE, "sinks": SINKS, "window": WINDOW, "pool": POOL}


# The model and the prompts.


@functools.lru_cache(maxsize=2)
def runner(dtype: str):
    """SmolLM2-135M, one thread, as a LayerRunner; and its tokenizer."""
    import torch

    import nbkit
    from nbkit.methods.fastprefill.stored import LayerRunner

    torch.set_num_threads(1)
    loaded = nbkit.load_model("smollm2-135m")
    return LayerRunner(loaded.model.to(getattr(torch, dtype))), loaded.tokenizer


@functools.lru_cache(maxsize=8)
def prompts(split: str, count: int, kinds: tuple[str, ...]):
    """``count`` prompts, one task after the other in turn, by id."""
    import nbkit
    from nbkit.loaders.long_tasks import load_long_tasks

    tokenizer = nbkit.load_model("smollm2-135m").tokenizer
    each = -(-count // len(kinds))
    sets = [list(load_long_tasks(kind, n=each, tokens=TOKENS, split=split, tokenizer=tokenizer, seed=SEED)) for kind in kinds]
    chosen = [items[i] for i in range(each) for items in sets][:count]
    return {prompt.id: prompt for prompt in chosen}


def usable_kinds(work_dir: Path, log) -> tuple[str, ...]:
    """Tasks on which the full model is clearly above chance, and those that are scored on their own continuation."""
    from nbkit.loaders.long_tasks import TASKS
    from nbkit.metrics import wilson

    path = work_dir / "usable.json"
    if not path.exists():
        table, (run, _) = {}, runner("bfloat16")
        for kind in TASKS:
            chosen = list(prompts("calibration", USABLE_PROMPTS, (kind,)).values())
            chance = chosen[0].chance
            if chance is None:
                table[kind] = {"usable": True, "chance": None}
                continue
            with run.attached():
                right = sum(run.store(p.ids, p.answer_ids).exact for p in chosen)
            table[kind] = {"usable": wilson(right, len(chosen)).low > chance, "chance": chance, "right": right, "prompts": len(chosen)}
        path.write_text(json.dumps(table))
    table = json.loads(path.read_text())
    log(f"tasks: {table}")
    return tuple(kind for kind, entry in table.items() if entry["usable"])


def dtype_of(work_dir: Path, kinds: tuple[str, ...], log) -> str:
    """bfloat16 if it changes the full model's answer loss by at most .02 nats on average over six calibration prompts, else float32."""
    path = work_dir / "dtype.json"
    if not path.exists():
        chosen = list(prompts("calibration", CALIBRATION, kinds).values())[:6]
        nll: dict[str, list[float]] = {}
        for dtype in ("float32", "bfloat16"):
            run, _ = runner(dtype)
            with run.attached():
                nll[dtype] = [run.store(p.ids, p.answer_ids).nll for p in chosen]
            # One model at a time in memory and no half-precision weights left behind.
            runner.cache_clear()
        change = float(np.mean(np.abs(np.subtract(nll["float32"], nll["bfloat16"]))))
        path.write_text(json.dumps({"dtype": "bfloat16" if change <= 0.02 else "float32", "mean_change": change, **nll}))
    found = json.loads(path.read_text())
    log(f"{found['dtype']}: mean change of the answer loss against float32 {found['mean_change']:.4f} nats")
    return found["dtype"]


# The table.


def losses_of(work_dir: str, dtype: str, kinds: list[str], name: str) -> dict[str, Any]:
    """One calibration prompt: its losses over the grid; its attention masses go to a file for FitPrune."""
    from nbkit.methods.fastprefill.sensitivity import prompt_losses

    prompt, start = prompts("calibration", CALIBRATION, tuple(kinds))[name], time.perf_counter()
    run, _ = runner(dtype)
    with run.attached():
        stored = run.store(prompt.ids, prompt.answer_ids)
        out = prompt_losses(run, stored, layers=LAYERS, rates=RATES, evidence=prompt.evidence, **PRUNING)
        masses = np.stack(run.attention_masses(stored, WINDOW)).astype(np.float32)
    np.save(Path(work_dir) / f"{name.replace('/', '-')}.npy", masses)
    return {"id": name, "kind": prompt.kind, "seconds": round(time.perf_counter() - start, 1), **out}


def run_sensitivity(work_dir: Path, out_dir: Path, log) -> None:
    """Measure the table on the calibration prompts, fit FitPrune on the same prompts, and write the recording."""
    from nbkit import parallel
    from nbkit.loaders import save_recording
    from nbkit.methods.fastprefill.cost import MacCost
    from nbkit.methods.fastprefill.fitprune import fit_fitprune
    from nbkit.methods.fastprefill.sensitivity import SensitivityTable

    kinds = usable_kinds(work_dir, log)
    dtype = dtype_of(work_dir, kinds, log)
    names = list(prompts("calibration", CALIBRATION, kinds))
    measure = functools.partial(losses_of, str(work_dir), dtype, list(kinds))
    rows = parallel.map(measure, names, executor="serial", resume=work_dir / "prompts.jsonl", desc="fastprefill-sensitivity")
    # Prompts of one task follow each other at a distance of the number of tasks: each draw gets all tasks.
    draws = tuple((i // len(kinds)) % DRAWS for i in range(len(names)))
    table = SensitivityTable(LAYERS, RATES, np.array([row["loss"] for row in rows]), tuple(row["kind"] for row in rows), draws)
    shape = runner(dtype)[0].shape
    masses = [tuple(np.load(work_dir / f"{name.replace('/', '-')}.npy")) for name in names]
    forced = [np.r_[:SINKS, TOKENS - WINDOW : TOKENS]] * len(masses)
    peers = {f"{tau:g}": fit_fitprune(masses, tau=tau, cost=MacCost(shape, WINDOW), forced=forced, floor=FLOOR) for tau in TAUS}
    data = {
        "tokens": TOKENS, "score": SCORE, "scored": SCORED, "sinks": SINKS, "window": WINDOW, "pool": POOL, "floor": FLOOR,
        "dtype": json.loads((work_dir / "dtype.json").read_text()),
        "kinds": json.loads((work_dir / "usable.json").read_text()),
        "table": table.as_dict(), "smoothing": table.smooth()[1], "ids": names,
        "full": [{"id": r["id"], "kind": r["kind"], "nll": r["nll"], "exact": r["full_exact"]} for r in rows],
        "exact": [r["exact"] for r in rows], "kept": np.round([r["kept"] for r in rows], 3).tolist(),
        "fitprune": {tau: {"ratios": list(s.ratios), "alpha": s.meta["alpha"]} for tau, s in peers.items()},
        "seconds": [r["seconds"] for r in rows],
    }
    save_recording("fastprefill-sensitivity", data, {
        "summary": "extra answer loss of SmolLM2-135M for one drop of prompt tokens by layer, rate and task", "licence": "MIT",
        "recipe": "fastprefill-sensitivity", "seed": SEED,
        "notes": "a real model on prompts generated over real text; every cell restarts from the full model's stored layer inputs",
    })


# The grid.


@functools.lru_cache(maxsize=1)
def schedules() -> dict[str, Any]:
    """Every schedule of the grid by cell name, from the recording of the table."""
    from nbkit.loaders import load_recording
    from nbkit.methods.fastprefill.cost import MacCost, schedule_macs
    from nbkit.methods.fastprefill.optimise import best_one_shot
    from nbkit.methods.fastprefill.schedule import PruneSchedule, match_cost
    from nbkit.methods.fastprefill.sensitivity import SensitivityTable

    data = load_recording("fastprefill-sensitivity").data
    table, shape = SensitivityTable.from_dict(data["table"]), runner(data["dtype"]["dtype"])[0].shape
    options = {"tokens": TOKENS, "cost": MacCost(shape, WINDOW), "floor": FLOOR, "scored": SCORED}
    planner, depth = table.planner(shape, **options), shape.layers
    full = planner.full_cost

    def cost(schedule) -> float:
        return schedule_macs(shape, schedule, TOKENS, floor=FLOOR, window=WINDOW, scored=SCORED)

    # The tuned single drop reads the table as it was measured, without smoothing.
    raw = type(planner)(*table.spread(table.mean(), depth), **options)
    out = {}
    for tau in TAUS:
        out[f"optimised@{tau:g}"] = planner.solve(tau)
        out[f"one-shot-middle@{tau:g}"] = match_cost(lambda rate: PruneSchedule.one_shot(depth // 2, rate, depth), cost, tau * full)
        out[f"linear@{tau:g}"] = match_cost(lambda end: PruneSchedule.linear(end, depth), cost, tau * full)
        out[f"cosine@{tau:g}"] = match_cost(lambda delta: PruneSchedule.pyramid(delta, depth), cost, tau * full, low=0.05)
        out[f"fitprune@{tau:g}"] = PruneSchedule.from_ratios(data["fitprune"][f"{tau:g}"]["ratios"], rule="fitprune", tau=tau)
        out[f"single-best@{tau:g}"] = best_one_shot(raw, tau)
    out[f"optimised@{safe_tau(planner):g}"] = planner.solve(safe_tau(planner))
    apart = table.planner(shape, by_kind=True, **options)
    for tau in SPECIAL_TAUS:
        out[f"worst-task@{tau:g}"] = apart.solve(tau, objective="worst")
        for kind in ("needle", "code"):
            if kind in table.kinds:
                out[f"{kind}-only@{tau:g}"] = table.planner(shape, kinds=[kind], **options).solve(tau)
    return out


def safe_tau(planner) -> float:
    """The smallest budget, in steps of .01, whose expected extra loss is at most .05 nats."""
    return min(tau / 100 for tau in range(50, 101) if planner.solve(tau / 100).predicted_loss <= SAFE_LOSS)


def chosen_tau(found: dict[str, Any]) -> float:
    """The budget that stands for equal quality: that of safe_tau()."""
    return min(float(k[10:]) for k, s in found.items() if k.startswith("optimised@") and s.predicted_loss <= SAFE_LOSS)


@functools.lru_cache(maxsize=8)
def baseline_rules(shape, tau: float) -> dict[str, Any]:
    """The published rules at the largest size that the budget allows, everything that they compute included."""
    from nbkit.methods.fastprefill import baselines as b
    from nbkit.methods.fastprefill.cost import ModelShape, prefill_macs, schedule_macs
    from nbkit.methods.fastprefill.schedule import PruneSchedule, match_cost

    depth, limit = shape.layers, tau * prefill_macs(shape, [TOKENS] * shape.layers).total

    def largest(cost, low: int, high: int) -> int:
        return max(k for k in range(low, high + 1) if cost(k) <= limit)

    def whole(rows: int) -> float:
        return prefill_macs(shape, [rows] * depth).total

    draft = ModelShape(**{**vars(shape), "layers": DRAFT_LAYERS})
    first, reading = b.gemfilter_first_pass(shape, TOKENS, 13 * depth // 32), b.draft_reading(draft, TOKENS, 8)
    chunks = largest(lambda c: reading + whole(32 * c), 1, TOKENS // 32)
    fastkv = match_cost(lambda r: PruneSchedule.one_shot(depth // 2, r, depth), lambda s: schedule_macs(shape, s, TOKENS, window=8), limit)

    def pyramid(delta: float) -> float:
        counts, recent = b.pyramid_counts(TOKENS, depth, delta=delta), TOKENS // 5
        return prefill_macs(shape, counts, window=recent, scored=[i for i in range(depth - 1) if counts[i + 1] < counts[i]]).total

    deltas = [x / 1000 for x in range(300, 1000)]

    def steps(window: int) -> tuple[float, ...]:
        at = [depth // 3, depth // 2, 2 * depth // 3]

        def rates(scale: float) -> tuple[float, ...]:
            return tuple(max(0.04, 1 - scale * (1 - r)) for r in (0.7, 0.5, 0.3))

        def cost(scale: float) -> float:
            ratios = [1.0] * depth
            for layer, rate in zip(at, rates(scale), strict=True):
                ratios[layer:] = [rate] * (depth - layer)
            return schedule_macs(shape, PruneSchedule(tuple(ratios)), TOKENS, window=window)

        return rates(min(s / 1000 for s in range(1, 1400) if cost(s / 1000) <= limit))

    return {
        "gemfilter": b.GemFilter(keep_tokens=largest(lambda k: first + whole(k), 1, TOKENS)),
        "specprefill": b.SpecPrefill(draft=DRAFT_LAYERS, keep_share=chunks / (TOKENS // 32)),
        "fastkv": b.FastKV(layer=depth // 2, rate=float(fastkv.ratios[-1])),
        "pyramidinfer": b.PyramidInfer(delta=max(d for d in deltas if pyramid(d) <= limit)),
        "lazyllm": b.LazyLLM(rates=steps(1), revive="none"),
        "sliminfer": b.SlimInfer(rates=steps(1)),
    }


def part_of(cell: str) -> str:
    """The part of the grid that measures a schedule."""
    name, _, tau = cell.partition("@")
    if name not in TUNED + RULES:
        return "special"
    if name not in SLOW:
        return "schedules"
    return "rules-more" if float(tau) in TAUS[::2] else "rules"


def row_of(run, outcome, prompt) -> dict[str, float]:
    """What the grid keeps of one replay."""
    return {
        "nll": round(outcome.nll, 5), "exact": float(outcome.exact), "macs": outcome.macs(run.shape),
        "evidence": round(outcome.evidence_kept(prompt.evidence)[-1], 4),
    }


def setting() -> tuple[str, tuple[str, ...]]:
    """Type of the weights and tasks, as the recording of the table has them."""
    from nbkit.loaders import load_recording

    data = load_recording("fastprefill-sensitivity").data
    return data["dtype"]["dtype"], tuple(dict.fromkeys(data["table"]["kinds"]))


def replay_cells(which: str, name: str) -> dict[str, Any]:
    """One held-out prompt under the schedules or under the published rules, from one stored pass of the full model."""
    from nbkit.methods.fastprefill import baselines as b
    from nbkit.methods.fastprefill.prune import TokenPruning

    (dtype, kinds), start = setting(), time.perf_counter()
    prompt, run, found = prompts("held-out", HELD_OUT, kinds)[name], runner(dtype)[0], schedules()
    rules: dict[str, Any] = {}
    if which.startswith("baselines"):
        tau = BASELINE_TAUS[which == "baselines-more"]
        rules |= {f"{k}@{tau:g}": rule for k, rule in baseline_rules(run.shape, tau).items()}
        layer, rate = found[f"single-best@{tau:g}"].drops[0]
        rules[f"random@{tau:g}"] = b.RandomRows(layer=layer, rate=rate, sinks=SINKS, window=WINDOW, seed=SEED)
        if prompt.evidence:
            rules[f"oracle@{tau:g}"] = b.OracleRows(evidence=prompt.evidence, layer=layer, rate=rate, sinks=SINKS, window=WINDOW)
        if which == "baselines":
            rules["asl"] = b.ASL()
    else:
        if which == "schedules":
            rules["full"] = b.Full()
        rules |= {k: TokenPruning(s, **PRUNING) for k, s in found.items() if part_of(k) == which}
    with run.attached():
        stored = run.store(prompt.ids, prompt.answer_ids)
        cells = {k: row_of(run, run.replay(stored, rule), prompt) for k, rule in rules.items()}
    return {"id": name, "kind": prompt.kind, "cells": cells, "seconds": round(time.perf_counter() - start, 1)}


def session_cells(which: str, name: str) -> dict[str, Any]:
    """One held-out prompt through the whole method: head-selected keys alone ("heads", C6), or with the schedules ("fast", C7)."""
    from nbkit.inference import scoring
    from nbkit.methods.fastprefill import HeadSelected, TokenPruning

    (dtype, kinds), start = setting(), time.perf_counter()
    prompt, run = prompts("held-out", HELD_OUT, kinds)[name], runner(dtype)[0]
    options = {"sinks": SINKS, "window": WINDOW, "pool": POOL}
    settings: dict[str, dict[str, Any]] = {}
    if which.startswith("heads"):
        for budget in HEAD_BUDGETS[which == "heads" :: 2]:
            for granularity in ("shared", "kv", "query"):
                settings[f"heads-{granularity}@{budget:g}"] = {"attention": HeadSelected(granularity=granularity, budget=budget, **options)}
    else:
        found = schedules()
        for tau in sorted({chosen_tau(found), FAST_TAU}):
            part = HeadSelected(granularity="query", budget=0.2, **options)
            settings[f"fastprefill@{tau:g}"] = {"rows": TokenPruning(found[f"optimised@{tau:g}"], **PRUNING), "attention": part}
    cells = {}
    for key, parts in settings.items():
        score = scoring.score_prompt(run.model, prompt, parts=parts)
        cells[key] = {
            "nll": round(score.nll, 5), "exact": float(score.exact), "macs": float(score.macs), "density": round(float(score.density), 5),
            "evidence": round(float(score.evidence_kept[-1]), 4) if score.evidence_kept else 1.0,
        }
    return {"id": name, "kind": prompt.kind, "cells": cells, "seconds": round(time.perf_counter() - start, 1)}


GROUPS = {
    "schedules": replay_cells, "rules": replay_cells, "heads": session_cells, "fast": session_cells, "baselines": replay_cells,
    "rules-more": replay_cells, "special": replay_cells, "heads-more": session_cells, "baselines-more": replay_cells,
}
"""Parts of the grid in the order in which they run, the core comparisons first."""


def group_prompts(which: str) -> list[str]:
    """Prompts of one part of the grid."""
    held = prompts("held-out", HELD_OUT, setting()[1])
    if which.startswith("heads"):
        return list(held)[:HEAD_PROMPTS]
    return [name for name, p in held.items() if which != "special" or p.kind in ("needle", "multikey", "code")]


def run_grid(work_dir: Path, out_dir: Path, log) -> None:
    """All parts in turn; the recording is written again after each of them, with what is there."""
    from nbkit import parallel

    for which, fn in GROUPS.items():
        names = group_prompts(which)
        log(f"{which}: {len(names)} prompts")
        measure = functools.partial(fn, which)
        parallel.map(measure, names, executor="serial", resume=work_dir / f"{which}.jsonl", desc=f"fastprefill-grid {which}")
        save_grid(work_dir, log)


def save_grid(work_dir: Path, log) -> None:
    """Write the recording from all rows that are done."""
    from nbkit.loaders import save_recording

    found = schedules()
    cells: dict[str, dict[str, dict[str, float]]] = {}
    kinds: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    for which in GROUPS:
        path = work_dir / f"{which}.jsonl"
        # The first line names the function; what stands behind the last line end is half a result.
        for line in path.read_text().split("\n")[1:-1] if path.exists() else []:
            row = json.loads(line)["result"]
            name = row["id"]
            kinds[name] = row["kind"]
            seconds.setdefault(which, []).append(row["seconds"])
            for cell, values in row["cells"].items():
                for what, value in values.items():
                    cells.setdefault(cell, {}).setdefault(what, {})[name] = value
    data = {
        "tokens": TOKENS, "taus": list(TAUS), "chosen_tau": chosen_tau(found), "score": SCORE, "prompts": list(kinds),
        "kinds": list(kinds.values()), "cells": cells, "seconds": {k: float(np.median(v)) for k, v in seconds.items()},
        "schedules": {k: {"ratios": list(s.ratios), "predicted_loss": s.predicted_loss} for k, s in found.items()},
    }
    save_recording("fastprefill-grid", data, {
        "summary": "answer loss, exact answers and MACs of SmolLM2-135M on held-out long prompts by pruning schedule and method", "licence": "MIT",
        "recipe": "fastprefill-grid", "seed": SEED,
        "notes": "a real model on prompts generated over real text; schedules and published rules are replayed from stored layer inputs of the full "
                 "model, which gives the answer loss of the pruned cache; head selection runs in the session itself",
        "prompts": {which: len(v) for which, v in seconds.items()},
    })
    log(f"{len(cells)} cells, prompts by part: { {k: len(v) for k, v in seconds.items()} }")
