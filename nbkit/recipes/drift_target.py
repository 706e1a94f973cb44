"""Train the small language model over letters on Python sources and reference texts, and write it to data/models/drift-target/.

Plain next-token cross-entropy on windows of 256 characters behind a start token, from calibration documents only; the loss on held-out documents goes
into the card. A second call goes on where the first one stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import nbkit
from nbkit.models import letters

STEPS, BATCH, RATE = 800, 16, 3e-3


def stream(split: str) -> np.ndarray:
    """The characters of all documents of a split, prose and code, as ids (characters,)."""
    return np.concatenate([letters.encode(document.text + "\n") for kind in ("code", "prose") for document in nbkit.load_text(kind, split=split)])


def windows(text: np.ndarray, count: int, length: int, seed) -> Tensor:
    """``count`` random windows of ``length`` tokens, each behind the start token: (count, length)."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length, count)
    rows = np.stack([text[start : start + length - 1] for start in starts])
    return torch.from_numpy(np.concatenate([np.full((count, 1), letters.BOS), rows], 1))


def loss_on(model, ids: Tensor) -> Tensor:
    """Mean cross-entropy in nats a character."""
    return F.cross_entropy(model(ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(work: Path, *, seed: int = 0, steps: int = STEPS, log: Callable[[str], None] = print):
    """Train for ``steps`` steps; returns (model, history of step, loss and seconds)."""
    model, text = letters.build(seed), stream("calibration")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05, betas=(0.9, 0.98))
    first, history, checkpoint = 0, [], work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, history = saved["step"], saved["history"]
    before, start = history[-1]["seconds"] if history else 0.0, time.perf_counter()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 100) * max(0.02, 0.5 * (1 + np.cos(np.pi * step / steps)))
        loss = loss_on(model, windows(text, BATCH, letters.LENGTH, [seed, step]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            history.append({"step": step + 1, "loss": round(loss.item(), 4), "seconds": round(before + time.perf_counter() - start)})
            log(str(history[-1]))
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "history": history}
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
    return model.eval(), history


def run(work_dir: Path, out_dir: Path, log: Callable[[str], None]) -> None:
    """Train with seed 0 and write data/models/drift-target."""
    from nbkit.loaders import save_model

    model, history = train(work_dir, log=log)
    with torch.inference_mode():
        held_out = loss_on(model, windows(stream("held-out"), 128, letters.LENGTH, 1)).item()
    log(f"held-out loss {held_out:.3f} nats a character")
    save_model(model, "drift-target", {
        "summary": "a four-layer Llama over letters that continues Python sources and reference texts", "licence": "MIT", "recipe": "drift-target",
        "seed": 0, "metrics": {"held_out_nats_per_character": held_out, "steps": history[-1]["step"], "seconds": history[-1]["seconds"]},
    })
