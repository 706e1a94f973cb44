"""Rules that choose the prompt tokens before the model reads them: GemFilter and SpecPrefill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference.parts import Rows, register
from nbkit.methods.fastprefill.cost import ModelShape, decode_macs, prefill_macs

from .draft import draft_of, look_ahead, watched
from .rules import amount, best, cover, pool, share, tokens_of, whole


def gemfilter_scores(query: Tensor, keys: Tensor, *, size: int = 5) -> Tensor:
    """Raw q.k of the last token, no softmax and no scale, summed over heads and averaged over ``size`` neighbours: (tokens,).

    query: (1, query_heads, 1, head_dim); keys: (1, kv_heads, tokens, head_dim), both rotated.

    >>> gemfilter_scores(torch.ones(1, 2, 1, 1), torch.tensor([0.0, 3.0, 0.0]).view(1, 1, 3, 1), size=3).tolist()
    [2.0, 2.0, 2.0]
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    grouped = query[0, :, -1].float().view(kv_heads, heads // kv_heads, -1)
    return pool((grouped @ keys[0].float().transpose(1, 2)).flatten(0, 1).sum(0), size)


class _Found(Exception):
    """Ends the first pass as soon as its queries and keys are known."""


@register
@dataclass(frozen=True)
class GemFilter(Rows):
    """The first layers read the whole prompt and choose ``keep_tokens`` of it; the model then reads these alone, renumbered from 0.

    layer: its queries and keys choose, default 13/32 of the depth. keep_tokens: share (float) or number (int); the published number is 1024.
    force_last: also keep the last token of the prompt; the published code does not, so its answer may start from another token.
    The first pass ends at the scores of ``layer``; its states are not used again.

    Source: GemFilter, arXiv 2409.17422, and its code (layer 13 of 32, pool 5).

    >>> GemFilter(layer=2, keep_tokens=64).keep_tokens
    64
    """

    layer: int | None = None
    keep_tokens: float = 0.2
    pool: int = 5
    force_last: bool = False
    name: ClassVar[str] = "gemfilter"

    def __post_init__(self):
        amount("keep_tokens", self.keep_tokens)
        if self.layer is not None:
            whole("layer", self.layer, 0)
        pool(torch.zeros(1), self.pool)

    def filter_layer(self, layers: int) -> int:
        """The layer that chooses, in a model of ``layers`` layers.

        >>> GemFilter().filter_layer(32), GemFilter().filter_layer(30)
        (13, 12)
        """
        layer = 13 * layers // 32 if self.layer is None else self.layer
        if layer >= layers:
            raise InputError("layer of the filter", got=layer, allowed=f"0 to {layers - 1} in a model of {layers} layers")
        return layer

    @torch.no_grad()
    def prefilter(self, run, model, ids):
        """Indices of the chosen tokens and their new positions 0..k-1."""
        layer, tokens = self.filter_layer(run.layers), ids.shape[-1]
        found: dict[str, Tensor] = {}

        def watch(index, queries, keys, scaling):
            if index == layer:
                found["scores"] = gemfilter_scores(queries[:, :, -1:], keys, size=self.pool)
                raise _Found

        draft = draft_of(model, layer + 1)
        try:
            with watched(draft, watch):
                draft.model(ids.reshape(1, -1), use_cache=False)
        except _Found:
            pass
        forced = (tokens - 1,) if self.force_last else ()
        index = best(found["scores"], tokens_of(self.keep_tokens, tokens), forced)
        run.charge_macs(gemfilter_first_pass(ModelShape.from_config(model.config), tokens, layer))
        return index, torch.arange(len(index), device=index.device)


def gemfilter_first_pass(shape: ModelShape, tokens: int, layer: int) -> float:
    """MACs of the first pass: ``layer`` whole layers, the projections to queries and keys of the next one, and the scores of one token.

    >>> smol = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
    >>> gemfilter_first_pass(smol, 2, 0) == 2 * 576 * 64 * 15 + 2 * 576
    True
    """
    pairs = tokens * (tokens + 1) // 2
    whole_layers = layer * (tokens * shape.row + pairs * shape.pair)
    # The library computes query, key and value in one go before the attention is asked.
    projections = tokens * shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    return float(whole_layers + projections + tokens * shape.heads * shape.head_dim)


def spec_scores(attention: Tensor, *, size: int = 13) -> Tensor:
    """SpecPrefill's token scores: pooled along tokens, maximum over layers and heads, mean over look-ahead steps: (tokens,).

    attention: (steps, layers * heads, tokens) softmax attention of the look-ahead rows to the prompt.

    >>> [round(x, 3) for x in spec_scores(torch.tensor([[[0.0, 0.9], [0.5, 0.1]], [[0.2, 0.1], [0.1, 0.3]]]), size=1).tolist()]
    [0.35, 0.6]
    """
    steps = [pool(step, size).amax(0) for step in attention.double()]
    return torch.stack(steps).mean(0)


def chunk_choice(scores: Tensor, keep: float, *, chunk: int = 32) -> Tensor:
    """Sorted token indices of the best chunks by mean score: ceil(keep * chunks) of them, the last one always among them.

    >>> chunk_choice(torch.tensor([9.0, 9.0, 0.0, 0.0, 5.0, 6.0, 1.0]), 0.5, chunk=2).tolist()
    [0, 1, 6]
    """
    tokens = scores.shape[0]
    owner = torch.arange(tokens, device=scores.device) // chunk
    sizes = torch.bincount(owner)
    means = scores.new_zeros(len(sizes)).index_add_(0, owner, scores) / sizes
    chunks = tokens_of(keep, len(sizes))
    return torch.isin(owner, cover(means, torch.ones_like(sizes), chunks, (len(sizes) - 1,))).nonzero().flatten()


@register
@dataclass(frozen=True)
class SpecPrefill(Rows):
    """A draft reads the prompt and looks ahead; the model reads only the chunks that the draft attends to, at their original positions.

    draft: number of first layers of the model itself (`draft_of`; None = a third), or another causal LM with the same tokenizer.
    keep_share: share of the ``chunk``-token chunks that stay. The chunk with the last token is always one of them, since the answer starts there.

    Source: SpecPrefill, arXiv 2502.02789, and its code (8 tokens ahead, pool 13, chunks of 32, the top 10 %). With a draft of the model's own
    first layers it needs no second set of weights, but these layers were not trained to predict.

    >>> SpecPrefill(keep_share=0.25).chunk
    32
    """

    draft: Any = field(default=None, hash=False)
    keep_share: float = 0.1
    look_ahead: int = 8
    pool: int = 13
    chunk: int = 32
    name: ClassVar[str] = "specprefill"

    def __post_init__(self):
        share("keep_share", self.keep_share)
        whole("look_ahead", self.look_ahead, 1)
        whole("chunk", self.chunk, 1)
        pool(torch.zeros(1), self.pool)
        if isinstance(self.draft, int):
            whole("draft", self.draft, 1)
        elif self.draft is not None and not callable(self.draft):
            raise InputError("draft", got=type(self.draft).__name__, allowed="a number of layers, a causal LM, or None")

    @torch.no_grad()
    def prefilter(self, run, model, ids):
        """Indices of the chosen tokens and the same as positions."""
        tokens = ids.shape[-1]
        if isinstance(self.draft, int) or self.draft is None:
            draft = draft_of(model, max(1, run.layers // 3) if self.draft is None else self.draft)
        else:
            draft = _other(self.draft, model)
        rows: list[list[Tensor]] = []

        def watch(layer, queries, keys, scaling):
            if layer == 0:
                rows.append([])
            rows[-1].append(_softmax_row(queries, keys, scaling)[:, :tokens])

        look_ahead(draft, ids.reshape(1, -1), self.look_ahead, watch)
        attention = torch.stack([torch.cat(step) for step in rows])
        index = chunk_choice(spec_scores(attention, size=self.pool), self.keep_share, chunk=self.chunk)
        run.charge_macs(draft_reading(ModelShape.from_config(draft.config), tokens, self.look_ahead))
        return index, index.clone()


def draft_reading(shape: ModelShape, tokens: int, steps: int) -> float:
    """MACs of a draft that reads ``tokens`` and decodes ``steps`` more, with one row of logits each time.

    The softmax rows that it is asked for are those of its own attention, but a fused attention does not hand them out: they cost once more.

    >>> smol = ModelShape(10, 576, 9, 3, 64, 1536, 49152)
    >>> draft_reading(smol, 1024, 0) == prefill_macs(smol, [1024] * 10, lm_head=True).total
    True
    """
    read = prefill_macs(shape, [tokens] * shape.layers, lm_head=True).total
    ahead = sum(decode_macs(shape, [tokens + i] * shape.layers) for i in range(steps))
    again = sum(shape.layers * shape.heads * shape.head_dim * (tokens + i + 1) for i in range(steps))
    return float(read + ahead + again)


def _softmax_row(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention of the last row over all keys: (query_heads, tokens)."""
    heads, kv_heads = queries.shape[1], keys.shape[1]
    grouped = queries[0, :, -1].float().view(kv_heads, heads // kv_heads, -1)
    return ((grouped @ keys[0].float().transpose(1, 2)) * scaling).softmax(-1).flatten(0, 1)


def _other(draft, model):
    words, wanted = getattr(draft.config, "vocab_size", None), model.config.vocab_size
    if words != wanted:
        raise InputError("draft", got=f"a vocabulary of {words}", allowed=f"{wanted}, as the model", hint="use a draft with the same tokenizer")
    return draft_of(draft, draft.config.num_hidden_layers)
