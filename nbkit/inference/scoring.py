"""Scores of one prompt: how well a model answers, and what reading the prompt cost."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference.parts import Eviction
from nbkit.inference.session import attach

__all__ = ["Score", "score_evictions", "score_prompt", "token_losses"]


@dataclass(frozen=True)
class Score:
    """What one reading of a prompt gave.

    Attributes:
        nll: mean negative log-likelihood of the scored tokens, in nats.
        first_nll: that of the first one, which the prefill alone predicts.
        exact: whether every scored token is the most likely one, given the right ones before it.
        top1: share of the scored tokens that are.
        seconds: wall time of the prefill (time to first token).
        macs: multiply-accumulates of the prefill, or None when nothing counted them.
        density: pairs that attention computed, as a share of all causal pairs, or None.
        cache_bytes: keys and values held after the prefill.
        evidence_kept: share of the evidence tokens alive in each layer, or None without evidence or a count.
    """

    nll: float
    first_nll: float
    exact: bool
    top1: float
    seconds: float
    macs: float | None
    density: float | None
    cache_bytes: int
    evidence_kept: tuple[float, ...] | None


def score_prompt(model: Any, prompt: Any, *, parts: Mapping[str, Any] | None = None, inside: bool = False) -> Score:
    """Read a prompt and score its answer, token by token with the right answer fed in.

    The first answer token is predicted by the prefill, the others in one chunk through the cache that the prefill left: a check of the later
    ones alone would hide damage done to the prefill.

    Args:
        model: causal LM of transformers; left in the mode and state it has.
        prompt: `LongPrompt`, or anything with ``ids``, ``answer_ids``, ``evidence`` and ``inside``.
        parts: what changes the reading, by kind (``rows``, ``attention``, ``eviction``); {} for the dense reading, counted; None for the model
            as it is, with nothing counted (also inside an open `attach` of the caller).
        inside: score the last ``prompt.inside`` tokens of the prompt instead of the answer; they are read inside the prefill.

    Raises: InputError for unknown kinds of parts, an empty prompt or answer, or ``inside`` with rows dropped or a prompt that has none.

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)).eval()
    >>> prompt = SimpleNamespace(ids=np.arange(20), answer_ids=np.array([3, 4]), evidence=(), inside=0)
    >>> 0 < score_prompt(model, prompt).nll < 10
    True
    """
    if unknown := set(parts or ()) - {"rows", "attention", "eviction"}:
        raise InputError("parts", got=", ".join(sorted(map(str, unknown))), allowed="rows, attention, eviction")
    if not len(prompt.ids) or not (inside or len(prompt.answer_ids)):
        raise InputError("prompt", got=f"{len(prompt.ids)} tokens with {len(prompt.answer_ids)} answer tokens", allowed="at least one of each")
    scored = int(prompt.inside)
    if inside and not 0 < scored < len(prompt.ids):
        raise InputError("prompt.inside", got=scored, allowed=f"[1, {len(prompt.ids) - 1}] tokens", hint="inside=False scores the answer")
    if inside and parts and parts.get("rows") is not None:
        raise InputError("inside", got="True with a part that drops rows", allowed="attention parts only", hint="inside=False scores the answer")
    ids = torch.as_tensor(prompt.ids, device=model.device)[None]
    answer = torch.as_tensor(prompt.answer_ids, device=model.device)[None]
    with torch.inference_mode(), _reader(model, parts) as run:
        start = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=scored + 1 if inside else 1)
        seconds = time.perf_counter() - start
        # The prefill's own account, before the answer is read.
        facts = _facts(run, out, prompt)
        if inside:
            logits, target = out.logits[:, :-1], ids[:, -scored:]
        else:
            logits, target = out.logits[:, -1:], answer
            if answer.shape[1] > 1:
                rest = model(answer[:, :-1], cache=out.cache, use_cache=True)
                logits = torch.cat([logits, rest.logits], 1)
    return _score(logits, target, seconds, facts)


def _score(logits: Tensor, target: Tensor, seconds: float, facts: Mapping[str, Any]) -> Score:
    nll, hit = token_losses(logits[0], target[0])
    return Score(float(nll.mean()), float(nll[0]), bool(hit.all()), float(hit.float().mean()), seconds, **facts)


def score_evictions(model: Any, prompt: Any, evictions: Mapping[str, Any], *, parts: Mapping[str, Any] | None = None) -> dict[str, Score]:
    """Scores of several eviction parts by name (None: none), from one reading of the prompt: what each gets from `score_prompt` alone.

    A layer's cache shrinks only after the layer has read the prompt, so the reading is the same for all of them. ``seconds`` are those of the
    reading with the one part's own choice of entries.

    Raises: InputError as `score_prompt`, and for an eviction among ``parts``.

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)).eval()
    >>> prompt = SimpleNamespace(ids=np.arange(20), answer_ids=np.array([3, 4]), evidence=(), inside=0)
    >>> list(score_evictions(model, prompt, {"whole": None}))
    ['whole']
    """
    if (parts or {}).get("eviction") is not None:
        raise InputError("parts", got="an eviction part", allowed="rows and attention", hint="name it among the evictions")
    if not len(prompt.ids) or not len(prompt.answer_ids):
        raise InputError("prompt", got=f"{len(prompt.ids)} tokens with {len(prompt.answer_ids)} answer tokens", allowed="at least one of each")
    ids = torch.as_tensor(prompt.ids, device=model.device)[None]
    answer = torch.as_tensor(prompt.answer_ids, device=model.device)[None]
    several = _Several(evictions)
    scores = {}
    with torch.inference_mode(), attach(model, **(parts or {}) | {"eviction": several}) as run:
        start = time.perf_counter()
        first = model(ids, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - start - sum(several.seconds.values())
        # The answer's chunk must not count as part of the reading.
        facts, whole = _facts(run, first, prompt), first.cache
        for name in evictions:
            cache = copy.deepcopy(whole)
            for layer, slots in several.slots[name].items():
                if slots is not None:
                    cache.layers[layer].retain(slots)
            own = facts | {"cache_bytes": cache.nbytes}
            logits = first.logits[:, -1:]
            if answer.shape[1] > 1:
                logits = torch.cat([logits, model(answer[:, :-1], cache=cache, use_cache=True).logits], 1)
            scores[name] = _score(logits, answer, seconds + several.seconds[name], own)
    return scores


class _Several(Eviction):
    """Asks each of several eviction parts what it would keep, and keeps everything."""

    def __init__(self, parts: Mapping[str, Any]):
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.slots: dict[str, dict[int, Any]] = {name: {} for name in parts}
        self.seconds = dict.fromkeys(parts, 0.0)

    def keep(self, run, layer, k, v, queries, positions):
        for name, part in self.parts.items():
            start = time.perf_counter()
            self.slots[name][layer] = part.keep(run, layer, k, v, queries, positions)
            self.seconds[name] += time.perf_counter() - start


def token_losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood (n,) in nats and whether the target is the most likely token (n,), from logits (n, vocabulary).

    Raises: InputError for logits with NaN.

    >>> token_losses(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))[0].item()  # doctest: +ELLIPSIS
    0.693...
    """
    if torch.isnan(logits).any():
        raise InputError("logits", got="NaN", allowed="numbers", hint="check the model and its parts")
    log_p = logits.float().log_softmax(-1)
    return -log_p.gather(-1, target[:, None])[:, 0], log_p.argmax(-1) == target


def _reader(model: Any, parts: Mapping[str, Any] | None) -> Any:
    if parts is None:
        return contextlib.nullcontext()
    return attach(model, **parts)


def _facts(run: Any, out: Any, prompt: Any) -> dict[str, Any]:
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in out.cache.layers if layer.keys is not None)
    if run is None:
        return {"macs": None, "density": None, "cache_bytes": size, "evidence_kept": None}
    kept = tuple(run.evidence_kept(prompt.evidence)) if prompt.evidence else None
    return {"macs": run.macs, "density": run.density, "cache_bytes": size, "evidence_kept": kept}
