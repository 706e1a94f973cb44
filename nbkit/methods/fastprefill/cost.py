"""What a prefill costs: exact multiply-accumulates from the shapes, and a latency model fitted to timings of this machine."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from nbkit.errors import InputError, UnsupportedModelError
from nbkit.methods.fastprefill.schedule import PruneSchedule

# Multiply-accumulates.


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide the cost of a decoder-only transformer; ``gated``: the FFN has three matrices instead of two.

    >>> ModelShape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152).row
    3538944
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """From a transformers configuration of the Llama, Mistral, Qwen2 or Qwen3 family.

        Raises: UnsupportedModelError when a size is missing or the layers are not all alike.

        >>> from transformers import LlamaConfig
        >>> ModelShape.from_config(LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)).head_dim
        16
        """
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        values = [getattr(config, name, None) for name in names]
        lacking = [name for name, value in zip(names, values, strict=True) if not isinstance(value, int)]
        if lacking:
            got = f"no {', '.join(lacking)} in its configuration"
            raise UnsupportedModelError("model", got=got, allowed="Llama, Mistral, Qwen2, Qwen3 and alike")
        layers, hidden, heads, ffn, vocab = values
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        return cls(layers, hidden, heads, kv_heads, head_dim, ffn, vocab)

    @property
    def qkvo(self) -> int:
        """MACs of the four attention projections for one row."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def feed_forward(self) -> int:
        """MACs of the FFN for one row."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def row(self) -> int:
        """MACs of one row in one layer without attention."""
        return self.qkvo + self.feed_forward

    @property
    def pair(self) -> int:
        """MACs of one visible (query, key) pair in all heads of one layer: q.k and p.v."""
        return 2 * self.heads * self.head_dim

    @property
    def lm_head(self) -> int:
        """MACs of the logits of one row."""
        return self.hidden * self.vocab


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates by module: arrays with one entry a layer, and two numbers for what lies outside of the layers.

    scoring: q.k products that only rank tokens.
    """

    qkvo: np.ndarray
    attention: np.ndarray
    ffn: np.ndarray
    scoring: float = 0.0
    lm_head: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return float(self.qkvo.sum() + self.attention.sum() + self.ffn.sum() + self.scoring + self.lm_head)

    @property
    def attention_share(self) -> float:
        """Share of the score and value products, which is all that sparse attention can save."""
        return float(self.attention.sum()) / self.total


def causal_pairs(rows: Any) -> Any:
    """Visible (query, key) pairs of a causal square: n (n + 1) / 2.

    >>> causal_pairs(4)
    10
    """
    return rows * (rows + 1) // 2


def banded_pairs(rows: int, keys: int, band: int) -> int:
    """Pairs when every row sees at most ``keys`` chosen keys and its ``band`` nearest (itself included): an upper bound, as the two may overlap.

    >>> banded_pairs(4, 1, 1), banded_pairs(4, 4, 4)
    (7, 10)
    """
    most = min(rows, keys + band)
    return causal_pairs(most) + (rows - most) * most


def prefill_macs(
    shape: ModelShape, counts: Sequence[int], *, pairs: Sequence[float] | None = None, last_row_only: bool = False, prune_at: str = "pre",
    window: int = 0, scored: Sequence[int] | str = "drop", lm_head: bool = False,
) -> Macs:
    """Exact MACs of a prefill with ``counts[l]`` rows alive in layer l.

    pairs: visible pairs of every layer, averaged over heads (default: the causal half square n (n + 1) / 2, 576 n^2 MACs in SmolLM2).
    last_row_only: the last layer computes query, attention row, output and FFN for its last row only, which changes no logits.
    prune_at: "pre" drops before a layer, "post_attn" already between attention and FFN of the layer before it.
    window: rows whose q.k scores rank the tokens, 0 leaves scoring out. scored: layers that compute them; "drop" is the layer before each drop,
        "all" every layer before the last drop.
    Raises: InputError when counts or pairs do not fit the model.

    >>> smol = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
    >>> full, pruned = prefill_macs(smol, [1024] * 30), prefill_macs(smol, [1024] * 11 + [308] * 19)
    >>> round(full.total / pruned.total, 2), round(full.attention_share, 2)
    (1.86, 0.14)
    """
    n = np.asarray(counts, dtype=np.int64)
    if n.shape != (shape.layers,) or (n < 1).any() or (np.diff(n) > 0).any():
        raise InputError("counts", got=list(counts)[:40], allowed=f"{shape.layers} numbers >= 1 that never rise")
    if prune_at not in ("pre", "post_attn"):
        raise InputError("prune_at", got=prune_at, allowed="pre, post_attn")
    visible = causal_pairs(n).astype(float) if pairs is None else np.asarray(pairs, dtype=float)
    if visible.shape != n.shape or not (visible >= 0).all():
        raise InputError("pairs", got=np.shape(pairs), allowed=f"{shape.layers} numbers >= 0")
    qkvo, ffn = (n * shape.qkvo).astype(float), (n * shape.feed_forward).astype(float)
    if prune_at == "post_attn":
        ffn[:-1] = n[1:] * float(shape.feed_forward)
    if last_row_only:
        kv = 2 * shape.hidden * shape.head_dim * shape.kv_heads
        qkvo[-1] = n[-1] * kv + shape.qkvo - kv
        ffn[-1], visible[-1] = shape.feed_forward, n[-1]
    before = np.flatnonzero(np.diff(n) < 0)
    if isinstance(scored, str):
        if scored not in ("drop", "all"):
            raise InputError("scored", got=scored, allowed="drop, all, or layers")
        scored = before if scored == "drop" else range(int(before[-1]) + 1 if len(before) else 0)
    where = list(scored)
    scoring = sum(min(window, int(n[layer])) * int(n[layer]) for layer in where) * shape.heads * shape.head_dim
    return Macs(qkvo, visible * shape.pair, ffn, float(scoring), float(shape.lm_head if lm_head else 0))


def schedule_macs(shape: ModelShape, schedule: PruneSchedule, tokens: int, *, floor: int = 1, **options: Any) -> float:
    """Total of prefill_macs for a schedule and a prompt of ``tokens``.

    >>> smol = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
    >>> one = schedule_macs(smol, PruneSchedule.one_shot(15, 0.2, 30), 4096)
    >>> round(schedule_macs(smol, PruneSchedule.full(30), 4096) / one, 2)
    1.76
    """
    return prefill_macs(shape, schedule.check(shape.layers).counts(tokens, floor), **options).total


def gemfilter_macs(shape: ModelShape, tokens: int, layer: int, keep: int) -> float:
    """GemFilter: layers 0..``layer`` on the whole prompt, scores of its last token, then all layers on the ``keep`` chosen tokens.

    >>> smol = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
    >>> round(schedule_macs(smol, PruneSchedule.full(30), 1024) / gemfilter_macs(smol, 1024, 13, 205), 2)
    1.55
    """
    first = prefill_macs(_depth(shape, layer + 1), [tokens] * (layer + 1)).total
    return first + tokens * shape.heads * shape.head_dim + prefill_macs(shape, [min(keep, tokens)] * shape.layers).total


def draft_macs(shape: ModelShape, draft: ModelShape, tokens: int, keep: int, *, look_ahead: int = 8) -> float:
    """SpecPrefill: a draft reads the prompt and looks ``look_ahead`` tokens ahead, then the model reads the ``keep`` chosen tokens.

    >>> smol = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
    >>> draft_macs(smol, smol, 64, 64) > 2 * schedule_macs(smol, PruneSchedule.full(30), 64)
    True
    """
    read = prefill_macs(draft, [tokens] * draft.layers, lm_head=True).total
    ahead = sum(decode_macs(draft, [tokens + i] * draft.layers) for i in range(look_ahead))
    return read + ahead + prefill_macs(shape, [min(keep, tokens)] * shape.layers).total


def decode_macs(shape: ModelShape, cached: Sequence[float], *, recomputed: Sequence[float] | None = None, lm_head: bool = True) -> float:
    """MACs of one decoding step over caches of these lengths (a layer each); ``recomputed``: old tokens revived in each layer in this step.

    A revived token costs its row and its own attention over the cache, like the new one.

    >>> tiny = ModelShape(2, 8, 2, 1, 4, 16, 100)
    >>> decode_macs(tiny, [10, 5]) < decode_macs(tiny, [10, 10]) < decode_macs(tiny, [10, 10], recomputed=[0, 1])
    True
    """
    lengths = np.asarray(cached, dtype=float)
    if lengths.shape != (shape.layers,):
        raise InputError("cached", got=lengths.shape, allowed=f"{shape.layers} lengths")
    rows = 1 + (0 if recomputed is None else np.asarray(recomputed, dtype=float))
    return float((rows * (shape.row + shape.pair * (lengths + 1))).sum()) + (shape.lm_head if lm_head else 0)


def _depth(shape: ModelShape, layers: int) -> ModelShape:
    if not 1 <= layers <= shape.layers:
        raise InputError("layer", got=layers - 1, allowed=f"0 to {shape.layers - 1}")
    return ModelShape(**{**asdict(shape), "layers": layers})


# Costs that the optimiser can charge: rows alive -> cost of one layer, and of scoring them.


@dataclass(frozen=True)
class MacCost:
    """Costs in MACs: hardware-free.

    >>> MacCost(ModelShape(30, 576, 9, 3, 64, 1536, 49152)).layer(2)
    7081344.0
    """

    shape: ModelShape
    window: int = 32

    def layer(self, rows: float) -> float:
        """One layer with ``rows`` alive, dense among them."""
        return float(self.shape.row * rows + self.shape.pair * rows * (rows + 1) / 2)

    def scoring(self, rows: float) -> float:
        """The scores of ``rows`` tokens by the last ``window`` rows."""
        return float(self.shape.heads * self.shape.head_dim * min(self.window, rows) * rows)


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of a prefill: sum over layers of a n + b n m + c W n + e, for n rows that see m keys on average, W of them scoring.

    relative_error: median absolute error of the fit over its own timings, as a share. samples: those timings.
    Source: reconstruction of FastPrefill, section 3.4.

    >>> model = LatencyModel(a=1e-5, b=1e-9, c=1e-8, e=1e-3, window=32)
    >>> LatencyModel.from_json(model.to_json()) == model
    True
    """

    a: float
    b: float
    c: float
    e: float
    window: int = 32
    relative_error: float = 0.0
    samples: tuple[Mapping[str, float], ...] = field(default=(), compare=False)
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        if not all(math.isfinite(x) and x >= 0 for x in (self.a, self.b, self.c, self.e)):
            raise InputError("a, b, c, e", got=(self.a, self.b, self.c, self.e), allowed="finite numbers >= 0")

    def layer(self, rows: float, keys: float | None = None) -> float:
        """Seconds of one layer without scoring; ``keys``: average a row (default: the causal half, (rows + 1) / 2)."""
        m = (rows + 1) / 2 if keys is None else keys
        return float(self.a * rows + self.b * rows * m + self.e)

    def scoring(self, rows: float) -> float:
        """Seconds of scoring ``rows`` tokens."""
        return float(self.c * self.window * rows)

    def total(self, counts: Sequence[int], *, keys: Sequence[float] | None = None) -> float:
        """Seconds of all layers, with the scoring before each drop.

        >>> LatencyModel(1.0, 0.0, 0.5, 2.0, window=2).total([4, 3])
        15.0
        """
        m = [None] * len(counts) if keys is None else list(keys)
        layers = sum(self.layer(n, k) for n, k in zip(counts, m, strict=True))
        return layers + sum(self.scoring(a) for a, b in zip(counts[:-1], counts[1:], strict=True) if b < a)

    @classmethod
    def fit(cls, samples: Sequence[Mapping[str, float]], *, window: int = 32, **meta: Any) -> LatencyModel:
        """Non-negative least squares over timings; each is a dict with rows, keys, scored (W or 0), layer (1, or 0 for scoring alone), seconds.

        Every timing counts by its relative error, so that short prompts are met as well as long ones.
        Raises: InputError for fewer than four timings or one that is not positive.

        >>> rows = [{"rows": n, "keys": n / 2, "scored": 0, "layer": 1, "seconds": 3 * n + 2 * n * n / 2 + 5} for n in (1, 2, 4, 8)]
        >>> model = LatencyModel.fit(rows)
        >>> round(model.a, 6), round(model.b, 6), round(model.e, 6)
        (3.0, 2.0, 5.0)
        """
        from scipy.optimize import nnls

        if len(samples) < 4:
            raise InputError("timings", got=len(samples), allowed=">= 4")
        y = np.array([s["seconds"] for s in samples], dtype=float)
        if not (np.isfinite(y).all() and (y > 0).all()):
            raise InputError("seconds", got=float(y.min()), allowed="> 0")
        terms = [(s["rows"] * s["layer"], s["rows"] * s["keys"] * s["layer"], s["rows"] * s["scored"], s["layer"]) for s in samples]
        x = np.array(terms, dtype=float)
        scale = np.where(x.max(0) > 0, x.max(0), 1.0)
        solution, _ = nnls(x / scale / y[:, None], np.ones(len(y)))
        a, b, c, e = solution / scale
        error = float(np.median(np.abs(x @ (solution / scale) / y - 1)))
        return cls(float(a), float(b), float(c), float(e), window, error, tuple(dict(s) for s in samples), meta)

    def to_json(self) -> str:
        """Text that from_json reads."""
        return json.dumps({**asdict(self), "samples": [dict(s) for s in self.samples], "meta": dict(self.meta)})

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> LatencyModel:
        """A model from the text of to_json, or from the dict in it.

        Raises: InputError for anything else.
        """
        try:
            value = dict(json.loads(text) if isinstance(text, str) else text)
            return cls(**{**value, "samples": tuple(value.get("samples", ()))})
        except (ValueError, TypeError) as error:
            raise InputError("latency model", got=str(error), allowed="JSON of LatencyModel.to_json") from error


def measure_layers(
    model: Any, lengths: Sequence[int] = (128, 256, 512, 1024, 2048), *, window: int = 32, repeat: int = 7, layer: int = 1,
    score: Callable[..., Any] | None = None, clock: Callable[[], float] = time.perf_counter,
) -> LatencyModel:
    """Time one decoder layer, and the scoring of its rows, over prompt lengths on this machine, and fit a LatencyModel to the medians.

    score: (queries (1, H, W, d), keys (1, Hkv, n, d)) -> scores; default: softmax attention of the window.
    Rounds are interleaved over lengths, so that a machine that slows down hits all of them.
    Raises: InputError for fewer than 4 lengths or repeat < 3.
    """
    import torch

    if len(lengths) < 4 or repeat < 3:
        raise InputError("lengths and repeat", got=(len(lengths), repeat), allowed="at least 4 lengths and 3 rounds")
    body, shape = model.model, ModelShape.from_config(model.config)
    score = score or _attention_of_window
    dtype, device = model.dtype, model.device
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, max(lengths), shape.hidden, generator=generator).to(device, dtype)
    q = torch.randn(1, shape.heads, window, shape.head_dim, generator=generator).to(device, dtype)
    k = torch.randn(1, shape.kv_heads, max(lengths), shape.head_dim, generator=generator).to(device, dtype)
    times: dict[tuple[str, int], list[float]] = {(what, n): [] for n in lengths for what in ("layer", "score")}
    with torch.inference_mode():
        for turn in range(repeat + 1):
            for n in lengths:
                positions = torch.arange(n, device=device)[None]
                around = body.rotary_emb(hidden[:, :n], position_ids=positions)
                start = clock()
                body.layers[layer](hidden[:, :n], attention_mask=None, position_ids=positions, position_embeddings=around)
                middle = clock()
                score(q[:, :, -min(window, n):], k[:, :, :n])
                end = clock()
                # The first round warms up.
                if turn:
                    times["layer", n].append(middle - start)
                    times["score", n].append(end - middle)
    samples = [{"rows": n, "keys": (n + 1) / 2, "scored": 0, "layer": 1, "seconds": statistics.median(times["layer", n])} for n in lengths]
    samples += [{"rows": n, "keys": 0, "scored": min(window, n), "layer": 0, "seconds": statistics.median(times["score", n])} for n in lengths]
    return LatencyModel.fit(samples, window=window, threads=torch.get_num_threads(), dtype=str(dtype).removeprefix("torch."), repeat=repeat)


def _attention_of_window(q: Any, k: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    logits = (q.unflatten(1, (k.shape[1], group)) @ k[:, :, None].transpose(-1, -2)) * q.shape[-1] ** -0.5
    return logits.softmax(-1).sum(-2)
