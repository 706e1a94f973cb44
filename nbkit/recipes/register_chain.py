"""Train the register-chain model (see nbkit/models/register_chain.py) and write it to data/models/register-chain/.

A Llama of four layers learns the task with plain next-token cross-entropy on the chain tokens. Chain length grows by a
curriculum: once the running token accuracy passes 0.985 the length is multiplied by 1.5, up to ``lines``. Every minute the state
is written to ``work``; a second call goes on where the first one stopped.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from nbkit.models import register_chain as task

DIM, LAYERS, HEADS, KV_HEADS = 128, 4, 4, 2


def build_model(seed: int):
    """A randomly initialised four-layer Llama for the task (0.8 M parameters)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=task.VOCAB, hidden_size=DIM, intermediate_size=3 * DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=task.BOS,
        eos_token_id=None, pad_token_id=None, attention_dropout=0.0, rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config)


def train(work: Path, *, seed: int = 0, lines: int = 96, minutes: float = 60.0, tokens_per_batch: int = 6000, lr: float = 2e-3, log=print):
    """Train until the target length is reached at the wanted accuracy or the time is over; returns (model, history)."""
    work.mkdir(parents=True, exist_ok=True)
    model = build_model(seed)
    decay = [p for p in model.parameters() if p.ndim == 2]
    other = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": other, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.98))
    state = {"step": 0, "length": 12, "accuracy": 0.0, "seconds": 0.0, "at_target": 0}
    history: list[dict] = []
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state, history = saved["state"], saved["history"]
        log(f"resumed at step {state['step']}")
    start, offset, saved_at = time.time(), state["seconds"], time.time()
    anneal = 1500
    while state["at_target"] < anneal:
        state["seconds"] = offset + time.time() - start
        if state["seconds"] > 60 * minutes:
            break
        length = state["length"]
        n = max(8, tokens_per_batch // (task.PROMPT_TOKENS + task.LINE * length))
        batch = task.sample_chains(n, length, seed=[seed, state["step"]])
        ids = torch.from_numpy(batch.tokens)
        for group in optimizer.param_groups:
            warm = min(1.0, (state["step"] + 1) / 200)
            group["lr"] = lr * warm * max(0.02, 1 - state["at_target"] / anneal)
        model.train()
        logits = model(ids, use_cache=False).logits[:, task.PROMPT_TOKENS - 1 : -1]
        target = ids[:, task.PROMPT_TOKENS :]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        accuracy = (logits.argmax(-1) == target).float().mean().item()
        state["accuracy"] = 0.95 * state["accuracy"] + 0.05 * accuracy
        state["step"] += 1
        if length >= lines:
            state["at_target"] += 1
        elif state["accuracy"] > 0.985:
            state["length"] = min(lines, int(length * 1.5))
            state["accuracy"] = 0.9
        if state["step"] % 50 == 0:
            history.append({"step": state["step"], "seconds": round(state["seconds"]), "lines": length, "loss": round(loss.item(), 4), "accuracy": round(state["accuracy"], 4)})
            log(json.dumps(history[-1]))
        if time.time() - saved_at > 60:
            saved_at = time.time()
            part = checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state, "history": history}, part)
            part.replace(checkpoint)
    return model.eval(), history


if __name__ == "__main__":
    import sys

    import functools
    train(Path(sys.argv[1]), seed=int(sys.argv[2]), log=functools.partial(print, flush=True))
