"""One forward pass, any policy: replay evictions on recorded queries, keys and values.

A recorded pass with the full cache answers "what would this policy keep, and when" in milliseconds per layer, because eviction does not
change the keys and values that a layer already holds. It is a first-order answer: after an eviction the later queries of a real run would differ a
little, here they are those of the full cache. `CompactedCache` is the real run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from nbkit import kernels
from nbkit.errors import InputError

from .cache import _find_rotary
from .policy import SegmentedPolicy, Selection
from .scorers import QueryWindow

_RECORDING = "nbkit_recording"


@dataclass(frozen=True)
class Recording:
    """What every layer's attention saw in one pass over one sequence of T tokens.

    Attributes:
        queries: per layer (query_heads, T, head_dim), rotated. keys, values: per layer (kv_heads, T, head_dim).
        scaling: factor on the logits. rotary: see `QueryWindow`. ids: (T,) token ids.
    """

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    scaling: float
    rotary: object
    ids: Tensor

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return len(self.ids)


@dataclass(frozen=True)
class ReplayEvent:
    """One event of one layer: ``kept`` (kv_heads, n) original positions, ``slots`` (kv_heads, T) original positions before it, what was decided."""

    seen: int
    kept: Tensor
    slots: Tensor
    selection: Selection


def record_pass(model, ids: Tensor) -> Recording:
    """Run ``ids`` (T,) through ``model`` once with the full cache and record queries, keys and values of all layers.

    Raises:
        InputError: for an empty sequence, a batch, or ids outside the vocabulary.
    """
    if ids.ndim != 1 or len(ids) < 2:
        raise InputError("ids", got=tuple(ids.shape), allowed="(T,) with T >= 2, one sequence")
    size = model.get_input_embeddings().num_embeddings
    if ids.is_floating_point() or not 0 <= int(ids.min()) <= int(ids.max()) < size:
        seen = f"{ids.dtype} from {ids.min()} to {ids.max()}"
        raise InputError("ids", got=seen, allowed=f"token ids 0..{size - 1}", hint="the model's own tokenizer")
    queries: dict[int, Tensor] = {}
    scale: list[float] = []

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        queries[module.layer_idx] = query[0]
        scale.append(scaling if scaling is not None else query.shape[-1] ** -0.5)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register(_RECORDING, attention)
    AttentionMaskInterface.register(_RECORDING, sdpa_mask)
    model.set_attn_implementation(_RECORDING)
    cache = DynamicCache(config=model.config)
    try:
        with torch.inference_mode():
            model(ids[None], cache=cache, use_cache=True, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    order = sorted(queries)
    return Recording(
        [queries[i] for i in order],
        [cache.layers[i].keys[0] for i in order],
        [cache.layers[i].values[0] for i in order],
        scale[0],
        _find_rotary(model),
        ids,
    )


@torch.inference_mode()
def replay(recording: Recording, policy: SegmentedPolicy, layer: int, prefill: int | None = None) -> list[ReplayEvent]:
    """Apply ``policy`` to one layer of a recorded pass as if the tokens after ``prefill`` had been generated.

    Args:
        layer: index of the layer; negative counts from the end.
        prefill: tokens that are there before counting starts; default ``policy.interval``.

    Returns:
        One `ReplayEvent` for every compaction.

    Raises:
        InputError: for a layer that does not exist or a prefill outside the sequence.
    """
    if not -len(recording.keys) <= layer < len(recording.keys):
        raise InputError("layer", got=layer, allowed=f"{-len(recording.keys)}..{len(recording.keys) - 1}")
    prefill = policy.interval if prefill is None else prefill
    if not 0 < prefill <= recording.tokens:
        raise InputError("prefill", got=prefill, allowed=f"1..{recording.tokens}, the recorded tokens")
    layer %= len(recording.keys)
    keys, values, queries = recording.keys[layer], recording.values[layer], recording.queries[layer]
    heads = keys.shape[0]
    per_token = 2 * len(recording.keys) * heads * keys.shape[-1] * keys.element_size()
    held = torch.arange(0).expand(heads, 0)
    credit = alive = None
    arrived, events = 0, []
    for seen in range(prefill + policy.interval, recording.tokens + 1, policy.interval):
        fresh = torch.arange(arrived, seen).expand(heads, seen - arrived)
        slots = torch.cat([held, fresh], -1)
        alive = None if alive is None else torch.cat([alive, torch.ones_like(fresh, dtype=torch.bool)], -1)
        arrived = seen
        keep = policy.tokens(seen, per_token)
        if slots.shape[-1] <= keep:
            held = slots
            continue
        k, v = kernels.gather_rows((keys[None], values[None]), slots[None])
        # The buffer is emptied at every interval, so only the first one can still see the prefill's queries.
        first = seen - min(policy.buffer, policy.interval if seen > prefill + policy.interval else seen)
        window = QueryWindow(
            queries[None, :, first:seen],
            torch.arange(first, seen),
            recording.scaling,
            recording.rotary,
            policy.seed * 1_000_003 + len(events) * 1009 + layer,
        )
        visible = slots if alive is None else slots.masked_fill(~alive, torch.iinfo(torch.int64).max)
        scores = policy.score(k, v, window, visible[None])
        evidence = None
        if policy.needs_evidence:
            last = window.last(min(policy.window, slots.shape[-1] - 1))
            evidence = kernels.window_evidence(last.states, k, last.scaling, last.positions, slots[None], None if alive is None else alive[None])[
                None
            ]
        if alive is not None:
            scores = scores.masked_fill(~alive[None], -torch.inf)
        chosen = policy.select(scores[None], evidence, keep, credit, None if alive is None else alive[None, None])
        credit = None if chosen.credit is None else chosen.credit.gather(-1, chosen.index)
        held = slots.gather(-1, chosen.index[0, 0])
        alive = None if chosen.valid is None else chosen.valid[0, 0]
        kept = held if alive is None else held.masked_fill(~alive, -1)
        events.append(ReplayEvent(seen, kept, slots, chosen))
    return events
