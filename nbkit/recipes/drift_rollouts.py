"""Answers of SmolLM2 to chat prompts about real passages, with the states a drafter reads: the material of ``drift-smollm2``.

Every prompt has the same number of tokens (the passage fills what the template and the request leave), so a batch needs no padding. Three
quarters of the answers are sampled, the rest greedy. Calibration documents give the training prompts, held-out documents the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import nbkit
from nbkit.methods.attention_drift import Batch, default_aux_layers

PROMPT, ANSWER, ROWS = 128, 128, 64
"""Tokens of a prompt, of an answer, and prompts a batch."""
TRAIN_BATCHES = 6
TEMPERATURE, GREEDY_EVERY = 0.7, 4
REQUESTS = {
    "prose": ("Summarize this passage:", "Explain this passage to a student:", "List the main points of this text:", "Continue this text:"),
    "code": ("Explain what this code does:", "Write documentation for this code:", "List the names used in this code:", "Continue this code:"),
}


@dataclass(frozen=True)
class Prompt:
    """One prompt: where its passage comes from and its pieces, so that other templates can be put around the same words."""

    document: str
    request: str
    passage: list[int]


def prompts(tokenizer, split: str, count: int, seed: int = 0) -> list[Prompt]:
    """``count`` prompts over prose and code of one split, every other one about code; passages of one document do not overlap."""
    room = PROMPT - max(len(chat(tokenizer, Prompt("", request, []))) for kind in REQUESTS.values() for request in kind)
    pools = {}
    for kind in REQUESTS:
        documents = nbkit.load_text(kind, split=split, tokenizer=tokenizer, seed=seed)
        # The first passage of every document, then the second of every one, ...
        pools[kind] = [
            (document.id, document.ids[start : start + PROMPT].tolist())
            for start in range(0, max(len(document.ids) for document in documents), PROMPT)
            for document in documents
            if len(document.ids) >= start + PROMPT
        ]
    out = []
    for number in range(count):
        kind = ("prose", "code")[number % 2]
        name, passage = pools[kind][number // 2]
        request = REQUESTS[kind][(number // 2) % len(REQUESTS[kind])]
        own = PROMPT - len(chat(tokenizer, Prompt("", request, [])))
        assert own >= room > 0
        out.append(Prompt(name, request, passage[:own]))
    return out


def chat(tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt in the model's chat template."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": f"{prompt.request}\n\n\0"}], tokenize=False, add_generation_prompt=True)
    before, after = text.split("\0")
    encode = lambda part: tokenizer(part, add_special_tokens=False)["input_ids"]  # noqa: E731 (used on the next line only)
    return encode(before) + prompt.passage + encode(after)


@torch.inference_mode()
def answer(model, ids: Tensor, greedy: Tensor, generator: torch.Generator, tokens: int = ANSWER) -> dict[str, Tensor]:
    """Continue ``ids`` (rows, P) by ``tokens`` and keep the states of the whole sequence of N = P + tokens.

    greedy: (rows,) bool. Returns tokens (rows, N), feats (rows, N, 3d) and last (rows, N, d) in float16, greedy (rows, N) the target's best next
    token, and mask (rows, N), True at answer tokens up to and including the first end of text.
    """
    from transformers import DynamicCache

    config = model.config
    layers = default_aux_layers(config.num_hidden_layers)
    cache = DynamicCache(config=config)
    end = model.generation_config.eos_token_id
    ends = torch.tensor(end if isinstance(end, list) else [end])
    feats, last, best, text = [], [], [], [ids]
    fresh = ids
    for step in range(tokens + 1):
        out = model(fresh, cache=cache, output_hidden_states=True)
        states = out.hidden_states
        feats.append(torch.cat([states[i + 1] for i in layers], -1).half())
        last.append(states[-1].half())
        best.append(out.logits.argmax(-1))
        if step == tokens:
            break
        drawn = torch.multinomial((out.logits[:, -1].float() / TEMPERATURE).softmax(-1), 1, generator=generator)
        fresh = torch.where(greedy[:, None], best[-1][:, -1:], drawn)
        text.append(fresh)
    whole = torch.cat(text, 1)
    ended = torch.isin(whole, ends)
    ended[:, : ids.shape[1]] = False
    mask = ended.long().cumsum(1) - ended.long() == 0
    mask[:, : ids.shape[1]] = False
    return {"tokens": whole, "feats": torch.cat(feats, 1), "last": torch.cat(last, 1), "greedy": torch.cat(best, 1), "mask": mask}


def make(work_dir: Path, split: str, batches: int, log: Callable[[str], None]) -> list[Path]:
    """Write ``rollouts-<split>-<n>.safetensors`` of 64 answers each and return them; finished files are kept."""
    paths = [work_dir / f"rollouts-{split}-{number}.safetensors" for number in range(batches)]
    if all(path.exists() for path in paths):
        return paths
    model, tokenizer = nbkit.load_model("smollm2-135m")
    found = prompts(tokenizer, split, ROWS * batches)
    for number, path in enumerate(paths):
        if path.exists():
            continue
        rows = found[number * ROWS : (number + 1) * ROWS]
        ids = torch.tensor([chat(tokenizer, prompt) for prompt in rows])
        greedy = torch.arange(ROWS) % GREEDY_EVERY == 0
        made = answer(model, ids, greedy, torch.Generator().manual_seed(1000 * number + (split != "calibration")))
        save_file({key: value.contiguous() for key, value in made.items()}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        log(f"{path.name}: {int(made['mask'].sum())} answer tokens of {made['mask'].numel()}")
    return paths


def load(path: Path) -> Batch:
    """The rollouts of one file as material for `fit_drafter`, still in float16."""
    held = load_file(path)
    return Batch(held["tokens"], held["feats"], held["last"], held["mask"], held["greedy"])
