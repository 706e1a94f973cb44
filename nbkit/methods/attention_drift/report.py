"""Tables: what drafting does to a drafter on given prompts (`drift_report`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from nbkit.errors import InputError

from .chain import MEASURES, RECENT, draft_chain, measures, prefill_control
from .drafter import Drafter
from .features import check_ids, target_features
from .intervention import NOTHING, Intervention

_NAMES = {name: "prompt_share" if name == "prompt" else name for name in MEASURES}


@torch.no_grad()
def drift_report(
    drafter: Drafter, model, prompts: Iterable[str | Tensor], *, depth: int = 8, tokenizer=None, teacher: bool = False,
    intervention: Intervention = NOTHING, recent: int = RECENT, control: bool = True,
) -> dict[str, np.ndarray]:
    """One chain after each prompt, measured step by step beside a prefill of the same tokens with true features.

    The prompt's last token takes the place of the token that the target has just decided: the chain's first proposal is the token after the prompt.

    Args:
        prompts: texts (with ``tokenizer``) or id tensors (N,), N >= 2. depth: chain steps. teacher: feed the target's own greedy tokens instead of
            the drafter's proposals (acceptance is the same, the steps after a wrong proposal stay on the target's text).
        control: whether to run the prefill control.

    Returns:
        Columns of equal length, one row per prompt and step: ``prompt``, ``k``, ``token`` (proposed), the measures of `Chain` (its ``prompt`` share
        as ``prompt_share``), ``fused_rms``, ``correct`` (the target's greedy choice after the tokens read so far), ``accepted`` (all steps up to k
        correct) and, with ``control``, every measure as ``control_...``.

    Raises: InputError for depth 0, no prompts, a drafter of another target, texts without a tokenizer, or prompts of fewer than two tokens.

    Source: arXiv 2605.09992 (measures); the control is ours.
    """
    if not isinstance(depth, int) or depth < 1:
        raise InputError("depth", got=depth, allowed=">= 1")
    drafter.check_target(model)
    rows: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        ids = _ids(prompt, tokenizer, drafter.cfg.vocab_size)
        # Noise of its own for every prompt, so that prompts are independent.
        own = replace(intervention, seed=intervention.seed + 7919 * number)
        rows += _chain_rows(drafter, model, ids, number, depth, teacher, own, recent, control)
    if not rows:
        raise InputError("prompts", got="none", allowed="at least one text or id tensor")
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def by_step(report: Mapping[str, np.ndarray], column: str) -> np.ndarray:
    """One column of a `drift_report` as (prompts, depth).

    Raises: InputError for an unknown column.

    >>> by_step({"prompt": np.array([0, 0, 1, 1]), "k": np.array([1, 2, 1, 2]), "rms": np.array([1.0, 2.0, 3.0, 4.0])}, "rms").tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    if column not in report:
        raise InputError("column", got=column, allowed=", ".join(report))
    return np.asarray(report[column]).reshape(-1, int(np.max(report["k"])))


def _ids(prompt: str | Tensor, tokenizer, vocabulary: int) -> Tensor:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError("tokenizer", got=None, allowed="the target's tokenizer, because prompts are texts")
        prompt = torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.int64)
    ids = prompt.reshape(1, -1) if isinstance(prompt, Tensor) else torch.as_tensor(prompt).reshape(1, -1)
    check_ids(ids, vocabulary)
    if ids.shape[1] < 2:
        raise InputError("prompt", got="one token", allowed=">= 2 tokens", hint="the first token after it comes from the target alone")
    return ids


def _chain_rows(drafter, model, ids, number, depth, teacher, intervention, recent, control) -> list[dict[str, Any]]:
    """The rows of one prompt."""
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    text = target_features(model, ids, drafter.cfg.aux_layers, cache=cache)
    cache.crop(0)
    feats = drafter.pick_features(text.aux, text.last)
    truth = _greedy(model, text.logits[:, -1:].argmax(-1), depth - 1, cache) if teacher else None
    chain = draft_chain(drafter, ids, feats, depth, teacher=truth, intervention=intervention, recent=recent)
    # What follows the prompt in the chain's own reading, and the target's view of it.
    read = chain.fed[:, 1:]
    best, later = text.logits[:, -1:].argmax(-1), None
    if depth > 1:
        later = target_features(model, read, drafter.cfg.aux_layers, cache=cache)
        best = torch.cat([best, later.logits.argmax(-1)], 1)
    correct = chain.proposed == best
    columns = {
        "k": torch.arange(1, depth + 1)[None], "token": chain.proposed, **{_NAMES[n]: v for n, v in measures(chain).items()},
        "fused_rms": chain.fused_rms[:, None].expand(-1, depth), "correct": correct, "accepted": correct.long().cumprod(1).bool(),
    }
    if control:
        true = feats if later is None else torch.cat([feats, drafter.pick_features(later.aux, later.last)], 1)
        beside = prefill_control(
            drafter, torch.cat([ids, read], 1), true, depth, sink_at=chain.sink_at, intervention=intervention, recent=recent,
        )
        columns |= {"control_" + _NAMES[n]: v for n, v in measures(beside).items()}
    values = {name: value[0].tolist() for name, value in columns.items()}
    return [{"prompt": number, **{name: value[k] for name, value in values.items()}} for k in range(depth)]


def _greedy(model, token: Tensor, count: int, cache: DynamicCache) -> Tensor:
    """``token`` (1, 1) and what the target says after it, (1, max(count, 1)); the cache is put back."""
    out = [token]
    for _ in range(count - 1):
        out.append(model(out[-1], cache=cache, use_cache=True).logits[:, -1:].argmax(-1))
    cache.crop(min(0, 1 - count))
    return torch.cat(out, 1)


PAPER: dict[str, dict[str, str]] = {
    "C1": {
        "statement": "along the chain attention moves from the sink to recent drafted tokens",
        "paper": "Llama-3.1-8B, step 1 to 8: sink 0.46 to 0.08, recent 0.14 to 0.31",
    },
    "C2": {
        "statement": "in MTP heads the move comes as one jump, then nothing",
        "paper": "Qwen3.5-9B: sink 10-12 % before drafting, 4-5 % right after; recent 30-35 % to 40-45 %, then flat",
    },
    "C3": {
        "statement": "the drafter's state grows with every step (pre-norm)",
        "paper": "magnitude at step 1/2/3/8: Llama-8B 3.92/4.87/5.86/14.02, gpt-oss-120B 497/511/537/647",
    },
    "C4": {
        "statement": "the target's streams are unbalanced and the top one dominates what is fused",
        "paper": "magnitude low/middle/high: Llama-8B 0.56/0.58/0.78, gpt-oss-120B 3/163/1455",
    },
    "C5": {
        "statement": "pre-norm drafters fail beyond their training depth, post-norm ones do not",
        "paper": "acceptance at step 1/16, trained at depth 2: pre 0.93/0.00, post 0.93/0.53",
    },
    "C6": {
        "statement": "post-norm holds the magnitude and flattens the drift of attention",
        "paper": "magnitude 1.21 to 1.20, sink 0.11 to 0.10, recent 0.50 to 0.53",
    },
    "C7": {
        "statement": "sink and magnitude are separate faults: a gate removes the sink, not the growth",
        "paper": "gate: sink 0.03 to 0.02, magnitude 8.41 to 39.07; gate + post: entropy falls to 0.63 nats",
    },
    "C8": {
        "statement": "post-norm tolerates noise in the fed-back state",
        "paper": "acceptance kept at noise 0.1/0.5/1.0: pre 82/5/0 %, post 99/58/22 %; on embeddings 99/86/64 and 98/93/75 %",
    },
    "C9": {
        "statement": "rescaling the state at inference alone is no cure, least of all for pre-norm",
        "paper": "acceptance 3.06 to 1.33 (-56 %) pre, 3.15 to 2.09 (-34 %) post",
    },
    "C10": {
        "statement": "post-norm is more robust to another chat template",
        "paper": "Llama-8B, as trained / neither template nor first token: pre 2.74/1.34, post 2.73/2.59",
    },
    "C11": {
        "statement": "on long prompts full attention fails, a window with the sink rescues, post-norm gains",
        "paper": "full 0.05 pre, 0.83 post; window 2.43/2.97; window and first token 2.53/2.99",
    },
    "C12": {
        "statement": "on ordinary prompts post-norm gains a little",
        "paper": "1.10 times on average over seven benchmarks; one slight loss (5.87 to 5.81)",
    },
    "C13": {"statement": "post-norm can be trained at a shorter depth", "paper": "training depth 8 to 4 suffices: a third less time"},
    "C14": {
        "statement": "the drafter's sink sits where the target's sink is",
        "paper": "Llama position 0, Qwen position 1, gpt-oss none",
    },
}
"""The paper's claims and numbers by the ids of the notebook. The numbers of the abstract are the paper's; those of its tables and figures are taken
from public notes of readers, because its body was not open to us."""
