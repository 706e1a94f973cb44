"""Which heads foretell what later layers will look at: weights of heads learned from prompts alone, without answers or marked evidence.

A prompt goes through the full model once. The teacher is the attention of its last row in the later half of the layers: what the answer is made
from. A head is worth as much as its own favourite tokens receive from the teacher, beyond chance.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference import Rows, attach
from nbkit.methods.fastprefill.baselines.rules import edges, pool, row_attention, whole

__all__ = ["RECORDING", "ScoreWeights", "fit_score_weights", "head_lifts"]

RECORDING = "fastprefill-scores"


@dataclass(frozen=True, eq=False)
class ScoreWeights:
    """Non-negative weight of every head: float (layers, heads). The score of a token before layer l is the largest weighted attention so far.

    meta: how the weights came about, JSON values.
    Raises: InputError for another shape, negative or infinite weights, or nothing but zeros.

    >>> weights = ScoreWeights(np.array([[1.0, 0.0], [2.0, 1.0]]))
    >>> weights.apply(0, torch.tensor([[1.0, 3.0], [9.0, 9.0]])).tolist()
    [1.0, 3.0]
    >>> ScoreWeights.from_json(weights.to_json()).values.tolist()
    [[1.0, 0.0], [2.0, 1.0]]
    """

    values: np.ndarray
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        values = np.asarray(self.values, dtype=float)
        if values.ndim != 2 or not values.size or not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise InputError("score weights", got=values.shape, allowed="finite numbers >= 0, (layers, heads), not all of them 0")
        object.__setattr__(self, "values", values)

    @classmethod
    def default(cls) -> ScoreWeights:
        """The weights of SmolLM2-135M in the recording ``fastprefill-scores``.

        Raises: MissingResourceError without that recording.
        """
        return _recorded()

    def check(self, layers: int, heads: int | None = None) -> ScoreWeights:
        """These weights, if they fit a model.

        Raises: InputError if not.
        """
        if self.values.shape[0] != layers or (heads is not None and self.values.shape[1] != heads):
            raise InputError("score weights", got=f"{self.values.shape[0]} layers of {self.values.shape[1]} heads",
                             allowed=f"{layers} layers" + ("" if heads is None else f" of {heads} heads"),
                             hint="weights belong to one model: fit_score_weights(model, prompts)")
        return self

    def apply(self, layer: int, scores: Tensor) -> Tensor:
        """Largest weighted score of ``layer`` over its heads: (heads, n) -> (n,)."""
        self.check(self.values.shape[0], scores.shape[0])
        return (scores * torch.as_tensor(self.values[layer], dtype=scores.dtype, device=scores.device)[:, None]).amax(0)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that from_json reads."""
        return {"weights": self.values.tolist(), "meta": dict(self.meta)}

    @classmethod
    def from_json(cls, value: str | Mapping[str, Any]) -> ScoreWeights:
        """Weights from the value of to_json, or its text.

        Raises: InputError for anything else.
        """
        try:
            value = json.loads(value) if isinstance(value, str) else value
            return cls(np.array(value["weights"], dtype=float), dict(value.get("meta", {})))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("score weights", got=f"{type(error).__name__}: {error}", allowed="JSON with weights (layers, heads)") from error


@functools.cache
def _recorded() -> ScoreWeights:
    from nbkit.loaders import load_recording

    return ScoreWeights.from_json(load_recording(RECORDING).data["weights"])


def head_lifts(window: Tensor, last: Tensor, *, top: float = 0.05) -> Tensor:
    """How much more of the teacher's attention a head's favourite tokens get than the mean token does: (layers, heads); 1 is chance.

    window: (layers, heads, n) pooled window attention, whose best ``top`` share are a head's favourites. last: (layers, heads, n) pooled
    attention of the last row; the teacher of layer l is its maximum over the heads of layers max(l + 1, layers / 2) and later. The last layer
    has no later one: its lift is 1.

    >>> window = torch.tensor([[[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]], [[0.0] * 4] * 2])
    >>> last = torch.tensor([[[0.0] * 4] * 2, [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 2.0]]])
    >>> head_lifts(window, last, top=0.25)[0].round(decimals=2).tolist()
    [1.33, 2.67]
    """
    layers, heads, keys = window.shape
    count = max(1, math.ceil(top * keys))
    out = torch.ones(layers, heads, dtype=torch.float64)
    for layer in range(layers - 1):
        teacher = last[max(layer + 1, layers // 2):].double().flatten(0, 1).amax(0)
        favourites = window[layer].sort(dim=1, descending=True, stable=True).indices[:, :count]
        out[layer] = teacher[favourites].mean(1) / teacher.mean().clamp(min=1e-12)
    return out


class _Watch(Rows):
    """Keeps every row and notes the pooled attention of the window and of the last row."""

    def __init__(self, window: int, size: int, pooling: str):
        self.window, self.size, self.pooling = window, size, pooling
        self.seen: list[tuple[Tensor, Tensor]] = []

    def observe(self, run, layer, q, k, v, scaling):
        self.seen.append(tuple(pool(row_attention(q[:, :, -rows:], k, scaling), self.size, self.pooling).cpu() for rows in (self.window, 1)))


def prompt_lifts(model: Any, ids: Any, *, sinks: int = 4, window: int = 32, size: int = 7, pooling: str = "max", top: float = 0.05) -> Tensor:
    """`head_lifts` of one prompt, (layers, heads); the first ``sinks`` and the last ``window`` tokens, which always stay, are left out.

    Raises: InputError for a prompt no longer than these.
    """
    ids = torch.as_tensor(np.asarray(ids, dtype=np.int64)).reshape(1, -1).to(model.device)
    if ids.shape[1] <= sinks + window + 1:
        raise InputError("prompt", got=f"{ids.shape[1]} tokens", allowed=f"more than {sinks + window + 1} (sinks + window + 1)")
    watch = _Watch(window, size, pooling)
    with torch.inference_mode(), attach(model, rows=watch):
        model(ids, logits_to_keep=1, use_cache=False)
    free = torch.ones(ids.shape[1], dtype=torch.bool)
    free[edges(ids.shape[1], sinks, window)] = False
    seen, last = (torch.stack([pair[i] for pair in watch.seen])[..., free] for i in (0, 1))
    return head_lifts(seen, last, top=top)


def fit_score_weights(model: Any, prompts: Iterable[Any], *, sinks: int = 4, window: int = 32, pool: int = 7, pooling: str = "max", top: float = 0.05,
                      lifts: Sequence[Any] = ()) -> ScoreWeights:
    """Weights of the heads for ``TokenPruning(score="calibrated", weights=...)``: mean lift over the prompts beyond chance, at least 0.

    prompts: LongPrompt objects or rows of token ids, each read once by the full model. Answers and evidence are not looked at.
    lifts: `head_lifts` of prompts that were read before (a recipe that goes on).
    Raises: InputError without prompts, or when no head is better than chance.
    """
    whole("window", window, 1)
    found = [np.asarray(lift, dtype=float) for lift in lifts]
    for prompt in prompts:
        found.append(prompt_lifts(model, getattr(prompt, "ids", prompt), sinks=sinks, window=window, size=pool, pooling=pooling, top=top).numpy())
    if not found:
        raise InputError("prompts", got="none", allowed="at least one calibration prompt")
    values = np.clip(np.mean(found, axis=0) - 1, 0, None).round(3)
    return ScoreWeights(values, {"prompts": len(found), "sinks": sinks, "window": window, "pool": pool, "pooling": pooling, "top": top})
