"""Train the drafters of attention_drift: a grid on the small target, and two on SmolLM2.

The comparison that matters is pre-norm against post-norm, so both start from the same weights, see the same rows in the same order and take the same
number of steps; the rate of each is the best of three on a seed that the grid does not use, judged on rows kept back from training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

import nbkit
from nbkit import parallel
from nbkit.errors import InputError
from nbkit.loaders import save_model as save_project_model
from nbkit.methods.attention_drift import (
    Batch,
    Drafter,
    DrafterConfig,
    EagleDrafter,
    MTPHead,
    build,
    fit_drafter,
    frequent_tokens,
    target_features,
    ttt_loss,
)
from nbkit.models import letters
from nbkit.recipes import drift_rollouts
from nbkit.recipes.drift_target import stream, windows

SWITCHES: dict[str, dict] = {
    "pre": {}, "post": {"norm_output": True}, "fc_norm": {"fc_norm": True}, "post+fc_norm": {"norm_output": True, "fc_norm": True},
    "gate": {"gate": True}, "gate+post": {"gate": True, "norm_output": True}, "residual-norm": {"norm_before_residual": True},
    "mtp": {"kind": "mtp"},
}
DEPTHS, SEEDS, OTHERS_DEPTH = (1, 2, 4, 8), (0, 1, 2, 3, 4), 2
"""Training depths and seeds of pre and post; the other variants are trained at one depth."""
PROMPT, ROWS, KEPT_BACK = 64, 1600, 64
"""Characters of a prompt, rows of the target's own text, and how many of them choose the rate."""
STEPS, BATCH = 300, 4
RATES, RATE_SEED, RATE_DEPTH = (1e-3, 2e-3, 4e-3), 100, 2

SMOL_STEPS, SMOL_ROWS, SMOL_DEPTH, SMOL_RATE, SMOL_VOCAB = 560, 8, 4, 1e-3, 4096


@torch.inference_mode()
def continue_text(model, prompts: Tensor, length: int, temperature: float, seed: int) -> Tensor:
    """Sample (greedy at temperature 0) from the target until rows are ``length`` tokens long."""
    from transformers import DynamicCache

    generator, cache, rows, fresh = torch.Generator().manual_seed(seed), DynamicCache(config=model.config), [prompts], prompts
    for _ in range(length - prompts.shape[1]):
        logits = model(fresh, cache=cache, logits_to_keep=1).logits[:, -1].float()
        # The start token never occurs inside a text.
        logits[:, letters.BOS] = -math.inf
        fresh = logits.argmax(-1, keepdim=True)
        if temperature > 0:
            fresh = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        rows.append(fresh)
    return torch.cat(rows, 1)


def tiny_rows(model, work: Path) -> Tensor:
    """The target's own text, (rows, 256): 64 characters of a calibration document, then 192 that it sampled at temperature 0.7."""
    path = work / "rows.pt"
    if not path.exists():
        prompts = windows(stream("calibration"), ROWS, PROMPT, 7)
        parts = [continue_text(model, prompts[i : i + 200], letters.LENGTH, 0.7, i) for i in range(0, ROWS, 200)]
        torch.save(torch.cat(parts), path)
    return torch.load(path, weights_only=True)


def folder(work: Path, variant: str, ttt: int, seed: int) -> Path:
    """Where a drafter of the grid lies."""
    return work / f"{variant}-ttt{ttt}-seed{seed}"


def config_of(model, variant: str) -> DrafterConfig:
    """The shape of a drafter of the grid: the target's own sizes and the switches of ``variant``."""
    return DrafterConfig.from_target(model, **SWITCHES[variant])


def fresh(cfg: DrafterConfig, model, seed: int) -> Drafter:
    """An untrained drafter; the same seed gives the weights that variants share the same values."""
    return (MTPHead if cfg.kind == "mtp" else EagleDrafter)(cfg, model, seed=seed)


def grid() -> list[tuple[str, int, int]]:
    """All (variant, training depth, seed) of the grid, first seeds first."""
    main = [(variant, ttt) for ttt in (2, 4, 1, 8) for variant in ("pre", "post")]
    other = [(variant, OTHERS_DEPTH) for variant in SWITCHES if variant not in ("pre", "post")]
    return [(variant, ttt, seed) for seed in SEEDS for variant, ttt in main + other]


@lru_cache(maxsize=1)
def _material(work: str) -> Batch:
    """All rows with the target's states in float16 (one pass for the whole grid), and which tokens count."""
    model, rows = _target(), tiny_rows(_target(), Path(work))
    layers = config_of(model, "pre").aux_layers
    seen = [target_features(model, part, layers, logits=False) for part in rows.split(100)]
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[:, :PROMPT] = False
    return Batch(rows, torch.cat([s.aux for s in seen]).half(), torch.cat([s.last for s in seen]).half(), mask)


def _rows(whole: Batch, chosen) -> Batch:
    greedy = None if whole.greedy is None else whole.greedy[chosen]
    return Batch(whole.tokens[chosen], whole.feats[chosen].float(), whole.last[chosen].float(), whole.mask[chosen], greedy)


def _drawn(whole: Batch, first: int, rows: int, seed: int) -> Callable[[int], Batch]:
    """step -> ``rows`` rows of those from ``first`` on, in one permutation after another; a function of seed and step alone."""
    total = len(whole.tokens) - first

    def at(step: int) -> Batch:
        epoch, place = divmod(step, total // rows)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
        return _rows(whole, first + order[place * rows : (place + 1) * rows])

    return at


@lru_cache(maxsize=1)
def _target():
    torch.set_num_threads(1)
    return nbkit.load_model("drift-target").model


def fit_tiny(job: dict) -> dict:
    """Train one drafter of the grid and write its weights; returns what happened."""
    work, variant, ttt, seed = Path(job["work"]), job["variant"], job["ttt"], job["seed"]
    model, whole = _target(), _material(str(work))
    drafter = fresh(config_of(model, variant), model, seed)
    result = fit_drafter(drafter, model, _drawn(whole, KEPT_BACK, BATCH, seed), ttt=ttt, steps=STEPS, batch=BATCH, lr=job["lr"], seed=seed, bf16=True)
    with torch.inference_mode():
        kept = ttt_loss(drafter.eval(), _rows(whole, slice(0, KEPT_BACK)), ttt=ttt)
    if "keep" in job:
        target = folder(work, variant, ttt, seed)
        target.mkdir(exist_ok=True)
        save_model(drafter, str(target / "model.part"))
        (target / "model.part").replace(target / "model.safetensors")
    return {"loss": float(kept.loss), "accuracy": kept.accuracy, "seconds": result.seconds, "tokens": result.tokens}


def _name(job: dict) -> list:
    return [job["variant"], job["ttt"], job["seed"], job["lr"]]


def rates(work: Path, log: Callable[[str], None]) -> dict[str, float]:
    """The rate of every norm: the lowest loss on rows kept back, at training depth 2, seed 100."""
    jobs = [{"work": str(work), "variant": v, "ttt": RATE_DEPTH, "seed": RATE_SEED, "lr": lr} for v in ("pre", "post") for lr in RATES]
    found = parallel.map(fit_tiny, jobs, executor="serial", key=_name, resume=work / "rates.jsonl", desc="rates", progress=False)
    loss = {(job["variant"], job["lr"]): result["loss"] for job, result in zip(jobs, found)}
    log(json.dumps({f"{v} {lr}": round(value, 4) for (v, lr), value in loss.items()}))
    return {v: min(RATES, key=lambda lr: loss[v, lr]) for v in ("pre", "post")}


def tiny_jobs(work: Path, log: Callable[[str], None]) -> Iterator[tuple[dict, dict]]:
    """Train what is missing of the grid, one drafter at a time; yields (job, what happened)."""
    best = rates(work, log)
    log(f"rates: {best}")
    for variant, ttt, seed in grid():
        lr = best["post" if SWITCHES[variant].get("norm_output") or variant == "mtp" else "pre"]
        job = {"work": str(work), "variant": variant, "ttt": ttt, "seed": seed, "lr": lr, "keep": True}
        (out,) = parallel.map(fit_tiny, [job], executor="serial", key=_name, resume=work / "fits" / f"{variant}-{ttt}-{seed}.jsonl", progress=False)
        log(f"{variant} ttt {ttt} seed {seed}: loss {out['loss']:.3f}, accuracy {[round(a, 3) for a in out['accuracy']]}, {out['seconds']:.0f} s")
        yield job, out


class TinyDrafters(torch.nn.Module):
    """All first-seed drafters of the grid in one file: ``drafters[name]`` with names such as ``post-ttt2``."""

    def __init__(self, configs: dict[str, dict]):
        super().__init__()
        self.drafters = torch.nn.ModuleDict({name: build(config) for name, config in configs.items()})


def build_tiny(config: dict) -> TinyDrafters:
    """Make the module of data/models/drift-tiny from its config.json."""
    return TinyDrafters(config["drafters"])


def tiny(variant: str, ttt: int, seed: int = 0, *, work: Path | None = None, model=None) -> Drafter:
    """A trained drafter of the grid, bound to the small target: seed 0 from the project's data, any seed from the recipe's folder ``work``."""
    model = _target() if model is None else model
    if work is None:
        if seed != 0:
            raise InputError("seed", got=seed, allowed="0 without work=", hint="python -m nbkit train drift-tiny makes the others")
        held = _shipped()
        name = f"{variant}-ttt{ttt}".replace(".", "_")
        if name not in held:
            raise InputError("drafter", got=name, allowed=", ".join(held))
        return held[name].bind(model)
    drafter = build(config_of(model, variant).to_dict())
    load_model(drafter, folder(work, variant, ttt, seed) / "model.safetensors")
    return drafter.bind(model).eval()


@lru_cache(maxsize=1)
def _shipped() -> torch.nn.ModuleDict:
    return nbkit.load_model("drift-tiny", dtype=torch.float32).model.drafters


def run_tiny(work_dir: Path, out_dir: Path, log: Callable[[str], None]) -> None:
    """Train the grid and write the drafters of seed 0 to data/models/drift-tiny in float16."""
    torch.set_num_threads(1)
    (work_dir / "fits").mkdir(exist_ok=True)
    outcomes = [({key: job[key] for key in ("variant", "ttt", "seed", "lr")}, out) for job, out in tiny_jobs(work_dir, log)]
    model = _target()
    names = [(variant, ttt) for variant, ttt, seed in grid() if seed == 0]
    configs = {f"{variant}-ttt{ttt}": config_of(model, variant).to_dict() for variant, ttt in names}
    held = TinyDrafters(configs)
    for variant, ttt in names:
        held.drafters[f"{variant}-ttt{ttt}"] = tiny(variant, ttt, 0, work=work_dir, model=model)
    save_project_model(held.half(), "drift-tiny", {
        "summary": "drafters for drift-target, first seed of every variant and training depth", "licence": "MIT", "recipe": "drift-tiny", "seed": 0,
        "metrics": {"steps": STEPS, "rows": BATCH, "length": letters.LENGTH, "fits": [job | out for job, out in outcomes]},
    }, config={"drafters": configs})


def fit_smol(work: Path, variant: str, log: Callable[[str], None]) -> None:
    """Train the SmolLM2 drafter of one variant and write data/models/drift-smollm2-<variant>."""
    torch.set_num_threads(1)
    model = nbkit.load_model("smollm2-135m").model
    paths = drift_rollouts.make(work, "calibration", drift_rollouts.TRAIN_BATCHES, log)
    held = [drift_rollouts.load(path) for path in paths]
    whole = Batch(*(torch.cat([getattr(batch, name) for batch in held]) for name in Batch._fields))
    cfg = DrafterConfig.from_target(model, draft_vocab=SMOL_VOCAB, **SWITCHES[variant])
    drafter = fresh(cfg, model, 0)
    drafter.set_vocab(frequent_tokens(whole.tokens, SMOL_VOCAB, cfg.vocab_size))
    result = fit_drafter(
        drafter, model, _drawn(whole, 0, SMOL_ROWS, 0), ttt=SMOL_DEPTH, steps=SMOL_STEPS, batch=SMOL_ROWS, lr=SMOL_RATE, seed=0,
        bf16=True, log=log, checkpoint=work / f"{variant}.pt", every=20,
    )
    last = [sum(step[k] for step in result.accuracy[-50:]) / 50 for k in range(SMOL_DEPTH)]
    save_project_model(drafter.half(), f"drift-smollm2-{variant}", {
        "summary": f"EAGLE-3 drafter for SmolLM2-135M-Instruct, {variant}-norm feedback", "licence": "MIT", "recipe": "drift-smollm2", "seed": 0,
        "metrics": {"steps": SMOL_STEPS, "ttt": SMOL_DEPTH, "lr": SMOL_RATE, "rows": SMOL_ROWS, "positions": result.tokens, "seconds": result.seconds,
                    "loss_last_50": sum(result.losses[-50:]) / 50, "training_accuracy_last_50": last},
    }, config=cfg.to_dict())


def run_smol(work_dir: Path, out_dir: Path, log: Callable[[str], None]) -> None:
    """Rollouts of SmolLM2, then the pre-norm and the post-norm drafter on the same rows in the same order."""
    drift_rollouts.make(work_dir, "held-out", 1, log)
    for variant in ("pre", "post"):
        fit_smol(work_dir, variant, log)
