"""Time to first token of SmolLM2-135M on this machine: data/recordings/prefill-timing.

Fixed before any result was seen: float32, two threads, real prose, 1,024, 2,048 and 4,096 tokens, nine rounds in which every method runs once in a
shuffled order after a warm-up; ratios are taken within a round. FastPrefill runs at the budget that the grid chose for quality and at the smallest.
If the time runs out, at least five rounds are recorded. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nbkit.inference.parts import Attention

LENGTHS, ROUNDS, LEAST_ROUNDS, THREADS, SEED = (1024, 2048, 4096), 9, 5, 2, 0
SHORT = (256, 512)
"""Lengths at which only the full model is timed, for the share of prefill (C1)."""
STEPS, DECODE_TOKENS, DECODE_STEPS, FAST = 4, 2048, 32, 0.55
LONGEST = ("full", "fastprefill", "fastprefill-heads", "fastkv", "gemfilter", "attention-removed")
"""Methods that are timed above the smallest length; the others would take too long to repeat there."""


class Removed(Attention):
    """An attention that reads nothing and costs nothing: what no sparse attention can beat."""

    name = "removed"

    def attend(self, run, layer, q, k, v, scaling):
        return q.new_zeros(*q.shape[:3], v.shape[-1])


def methods(tokens: int, shape: Any) -> dict[str, dict[str, Any]]:
    """Parts of every method that is timed at this length on a model of this shape, by name."""
    from nbkit.loaders import load_recording
    from nbkit.methods.fastprefill import HeadSelected, PruneSchedule, TokenPruning
    from nbkit.methods.fastprefill import baselines as b
    from nbkit.recipes.fastprefill import POOL, PRUNING, SINKS, TOKENS, WINDOW, baseline_rules

    grid = load_recording("fastprefill-grid").data
    tau = grid["chosen_tau"]

    def pruning(budget: float):
        return TokenPruning(PruneSchedule.from_ratios(grid["schedules"][f"optimised@{budget:g}"]["ratios"]), **PRUNING)

    heads = HeadSelected(granularity="query", budget=0.2, sinks=SINKS, window=WINDOW, pool=POOL)
    # The published rules at the work that FastPrefill may do, as shares of the prompt.
    rules = baseline_rules(shape, tau)
    gemfilter = b.GemFilter(keep_tokens=rules["gemfilter"].keep_tokens / TOKENS)
    found = {
        "full": {}, "full-lastrow": {"rows": b.FullLastRow()}, "fastprefill": {"rows": pruning(tau)},
        "fastprefill-heads": {"rows": pruning(tau), "attention": heads}, f"fastprefill@{FAST:g}": {"rows": pruning(FAST)},
        "fastkv": {"rows": rules["fastkv"]}, "gemfilter": {"rows": gemfilter}, "pyramidinfer": {"rows": rules["pyramidinfer"]},
        "attention-sparse": {"attention": heads}, "attention-removed": {"attention": Removed()},
    }
    return {k: v for k, v in found.items() if tokens <= LENGTHS[0] or k in LONGEST}


@contextlib.contextmanager
def ffn_clock(model) -> Iterator[list[float]]:
    """Seconds spent in the FFN of each layer while the block runs."""
    spent: list[float] = []
    start = [0.0]

    def before(module, args):
        start[0] = time.perf_counter()

    def after(module, args, output):
        spent.append(time.perf_counter() - start[0])

    handles = [h for layer in model.model.layers for h in (layer.mlp.register_forward_pre_hook(before), layer.mlp.register_forward_hook(after))]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def first_token(model, ids, parts: dict[str, Any]) -> tuple[float, float, float, Any]:
    """(seconds to the first token's logits, seconds in the FFN, MACs, output) of one prompt."""
    import torch

    from nbkit.inference import attach

    with torch.inference_mode(), attach(model, **parts) as run, ffn_clock(model) as ffn:
        start = time.perf_counter()
        out = model(ids, logits_to_keep=1, use_cache=True)
        spent = time.perf_counter() - start
        return spent, sum(ffn), float(run.macs), out


def decode_seconds(model, out, steps: int) -> float:
    """Median seconds of one greedy decoding step of the full model after a prefill."""
    import torch

    taken = []
    with torch.inference_mode():
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            start = time.perf_counter()
            out = model(token, cache=out.cache, use_cache=True)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def full_and_steps(model, ids) -> tuple[float, float]:
    """Seconds of a plain prefill and of one decoding step behind it."""
    import torch

    with torch.inference_mode():
        start = time.perf_counter()
        out = model(ids, logits_to_keep=1, use_cache=True)
        spent = time.perf_counter() - start
    return spent, decode_seconds(model, out, STEPS)


def one_round(model, ids, lengths, number: int) -> dict[str, Any]:
    """Every method once at every length, in a shuffled order."""
    from nbkit.methods.fastprefill import ModelShape, prefill_macs

    shape = ModelShape.from_config(model.config)
    rng = np.random.default_rng([SEED, number])
    out: dict[str, Any] = {"seconds": {}, "macs": {}, "ffn": {}, "decode": {}}
    for tokens in lengths:
        found = methods(tokens, shape)
        key = str(tokens)
        for table in ("seconds", "macs", "ffn"):
            out[table][key] = {}
        for name in rng.permutation(list(found)).tolist():
            seconds, ffn, macs, _ = first_token(model, ids[:, :tokens], found[name])
            if name == "attention-removed":
                macs = prefill_macs(shape, [tokens] * shape.layers, pairs=[0] * shape.layers).total
            out["seconds"][key][name], out["macs"][key][name], out["ffn"][key][name] = seconds, macs, ffn
    for tokens in (*SHORT, *(n for n in lengths if n < 2048)):
        prefill, step = full_and_steps(model, ids[:, :tokens])
        out["decode"][str(tokens)] = {"prefill": prefill, "step": step}
    return out


def decoding(model, ids) -> dict[str, Any]:
    """C5: single decoding steps of the full model, the recovery-free cache and LazyLLM with revival, in turn, on copies that share the weights."""
    import torch

    from nbkit.inference import attach
    from nbkit.loaders import load_recording
    from nbkit.methods.fastprefill import ModelShape, PruneSchedule, TokenPruning, decode_macs
    from nbkit.methods.fastprefill import baselines as b
    from nbkit.recipes.fastprefill import PRUNING, baseline_rules

    grid, shape = load_recording("fastprefill-grid").data, ModelShape.from_config(model.config)
    tau = grid["chosen_tau"]
    pruning = TokenPruning(PruneSchedule.from_ratios(grid["schedules"][f"optimised@{tau:g}"]["ratios"]), **PRUNING)
    lazy = b.LazyLLM(rates=baseline_rules(shape, tau)["lazyllm"].rates, revive="selected")
    copies = {name: b.draft_of(model, shape.layers) for name in ("full", "recovery-free", "recovery")}
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        free = stack.enter_context(attach(copies["recovery-free"], rows=pruning))
        revived = stack.enter_context(lazy.attach(copies["recovery"]))
        outs = {name: copy(ids, logits_to_keep=1, use_cache=True) for name, copy in copies.items()}
        lengths = [len(p) for p in free.kept]
        for step in range(DECODE_STEPS + 2):
            for name, copy in copies.items():
                token = outs[name].logits[:, -1:].argmax(-1)
                start = time.perf_counter()
                outs[name] = copy(token, cache=outs[name].cache, use_cache=True)
                # Two steps warm up.
                if step >= 2:
                    seconds[name].append(time.perf_counter() - start)
        steps = revived.steps[3:]
    tokens = ids.shape[1]
    return {
        "tokens": tokens, "tau": tau, "seconds": seconds, "revived": [sum(s.revived) for s in steps],
        "macs": {
            "full": [decode_macs(shape, [tokens + 2 + i] * shape.layers) for i in range(DECODE_STEPS)],
            "recovery-free": [decode_macs(shape, [n + 2 + i for n in lengths]) for i in range(DECODE_STEPS)],
            "recovery": [s.macs for s in steps],
        },
    }


def measure(
    work_dir: Path, log, *, lengths=LENGTHS, rounds: int = ROUNDS, decode_tokens: int = DECODE_TOKENS, minutes: float = 8.0,
) -> dict[str, Any]:
    """All rounds, each written as it is done; after ``minutes`` no new one begins once there are LEAST_ROUNDS."""
    import torch

    import nbkit
    from nbkit.methods.fastprefill import ModelShape, measure_layers, prefill_macs

    torch.set_num_threads(THREADS)
    loaded = nbkit.load_model("smollm2-135m")
    model = loaded.model.float()
    text = nbkit.load_text("prose", split="held-out", n=1, tokens=max(*lengths, decode_tokens), tokenizer=loaded.tokenizer)
    ids, shape = torch.tensor(np.asarray(text[0].ids))[None], ModelShape.from_config(model.config)
    path = work_dir / "rounds.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    begin = time.perf_counter()
    if not done:
        one_round(model, ids, lengths[:1], 0)
    for number in range(len(done), rounds):
        if len(done) >= LEAST_ROUNDS and time.perf_counter() - begin > 60 * minutes:
            break
        start = time.perf_counter()
        done.append(one_round(model, ids, lengths, number))
        with path.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        log(f"round {number + 1} of {rounds}: {time.perf_counter() - start:.0f} s")
    keys = [str(n) for n in lengths]
    seconds = {k: {m: [r["seconds"][k][m] for r in done] for m in done[0]["seconds"][k]} for k in keys}
    split = {
        k: {
            "full": seconds[k]["full"], "without": seconds[k]["attention-removed"],
            "attention_share": prefill_macs(shape, [int(k)] * shape.layers).attention_share,
            "ffn_full": [r["ffn"][k]["full"] for r in done], "ffn_without": [r["ffn"][k]["attention-removed"] for r in done],
        }
        for k in keys
    }
    decode = {k: {what: [r["decode"][k][what] for r in done] for what in ("prefill", "step")} for k in done[0]["decode"]}
    steps = decoding(model, ids[:, :decode_tokens])
    model_of_time = measure_layers(model, (128, 256, 512, 1024, 2048))
    return {
        "lengths": list(lengths), "rounds": len(done), "threads": THREADS, "dtype": "float32", "seconds": seconds,
        "macs": {k: done[0]["macs"][k] for k in keys},
        "split": split, "decode": decode, "steps": steps, "latency_model": json.loads(model_of_time.to_json()),
    }


def run(work_dir: Path, out_dir: Path, log) -> None:
    """Measure and write the recording."""
    from nbkit.loaders import save_recording

    save_recording("prefill-timing", measure(work_dir, log), {
        "summary": "time to first token of SmolLM2-135M by method and prompt length, interleaved rounds", "licence": "MIT",
        "recipe": "prefill-timing", "seed": SEED,
        "notes": "wall clock of one machine; ratios within a round are what can be compared, absolute seconds cannot",
    })
