"""A transformers cache that compacts itself while a model generates.

Keys keep the rotation of their original position and the next token keeps its true position: only the tensors get shorter.
Works with every decoder that goes through transformers' attention interface and uses full attention in all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from nbkit import kernels
from nbkit.errors import InputError, RunError, UnsupportedModelError

from .policy import SegmentedPolicy, Selection
from .scorers import QueryWindow

ATTENTION = "nbkit_compacting"


@dataclass(frozen=True)
class Event:
    """One compaction of all layers.

    Attributes:
        seen: tokens seen when it happened.
        before: slots per head before it; after it: ``positions.shape[-1]``.
        positions: (layers, batch, kv_heads, n) int32 original positions that stayed, -1 where a head keeps fewer.
        selection: what the policy decided, or None if the cache was not asked to record it.
    """

    seen: int
    before: int
    positions: Tensor
    selection: Selection | None


class CompactedLayer(DynamicLayer):
    """Keys and values of one layer after eviction, with the original position of every slot."""

    is_croppable = False

    def __init__(self, cache: CompactedCache):
        super().__init__()
        self._cache = cache
        self._clear()

    def _clear(self) -> None:
        self.seen = 0
        self.kept_positions: Tensor | None = None
        self.valid: Tensor | None = None
        self.credit: Tensor | None = None
        self.queries: list[Tensor] = []
        self.scaling = 1.0

    @property
    def slots(self) -> int:
        """Slots held per head."""
        return self.keys.shape[-2] if self.is_initialized else 0

    @property
    def positions(self) -> Tensor:
        """(batch, kv_heads, slots) int64 original position of every slot."""
        batch, heads, slots = self.keys.shape[:3]
        old = self.kept_positions
        fresh = slots - (0 if old is None else old.shape[-1])
        new = torch.arange(self.seen - fresh, self.seen, device=self.keys.device).expand(batch, heads, fresh)
        return new.contiguous() if old is None else torch.cat([old, new], -1)

    @property
    def alive(self) -> Tensor | None:
        """(batch, kv_heads, slots) bool, False on padding; None if there is none."""
        if self.valid is None:
            return None
        fresh = self.slots - self.valid.shape[-1]
        return torch.cat([self.valid, self.valid.new_ones(*self.valid.shape[:-1], fresh)], -1)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append new entries and tell the attention that follows whose they are."""
        session = _SESSION.get()
        if session is None or session.policy is not self._cache.policy:
            raise RunError(
                "CompactedCache", got="a forward pass outside of its policy's attach()",
                hint="with policy.attach(model): model.generate(**inputs, cache=cache)",
            )
        if session.layer is not None:
            session.layer = None
            raise UnsupportedModelError(
                "model", got="attention that does not go through transformers' attention interface", allowed="models that do",
                hint="use a DynamicCache",
            )
        self.seen += key_states.shape[-2]
        out = super().update(key_states, value_states)
        session.layer = self
        return out

    def get_seq_length(self) -> int:
        """Tokens seen, which is the next token's position; not the slots held."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots visible to the next queries, and the offset that makes their index equal their position."""
        if query_length == 0:
            raise InputError("prompt", got="0 tokens", allowed="at least one token")
        return self.slots + query_length, self.seen - self.slots

    def reset(self) -> None:
        """Forget everything, credit and query buffer too."""
        super().reset()
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: evicted entries cannot come back."""
        raise RunError("CompactedCache", got="crop()", hint="assisted generation needs a cache that can step back: use DynamicCache")

    def _each(self, fn) -> None:
        self.keys, self.values = fn(self.keys), fn(self.values)
        self.queries = [fn(q) for q in self.queries]
        for name in ("kept_positions", "valid", "credit"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else fn(value))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        if self.slots:
            self._each(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        if self.slots:
            self._each(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows."""
        if self.slots:
            self._each(lambda t: t[indices])

    def observe(self, query: Tensor, scaling: float) -> None:
        """Remember the newest queries, as many as the policy needs: (batch, query_heads, new, head_dim)."""
        self.scaling = scaling
        limit = self._cache.policy.buffer
        # A copy where it is cut: a view would keep the whole prefill's queries alive.
        self.queries.append(query if query.shape[2] <= limit else query[:, :, -limit:].clone())
        while sum(q.shape[2] for q in self.queries[1:]) >= limit:
            self.queries.pop(0)

    def window(self, rotary, seed: int) -> QueryWindow:
        """The buffered queries with their true positions."""
        states = torch.cat(self.queries, 2)[:, :, -self._cache.policy.buffer :]
        positions = torch.arange(self.seen - states.shape[2], self.seen, device=states.device)
        return QueryWindow(states, positions, self.scaling, rotary, seed)

    def mask(self, given: Tensor | None, query: Tensor) -> Tensor | None:
        """Combine transformers' mask with the padding of heads that keep fewer entries."""
        alive = self.alive
        if alive is None:
            return given
        new, groups = query.shape[2], query.shape[1] // alive.shape[1]
        out = alive.repeat_interleave(groups, 1)[:, :, None].expand(-1, -1, new, -1)
        if given is None and new > 1:
            fresh = torch.ones(new, new, dtype=torch.bool, device=query.device).tril()
            given = torch.cat([fresh.new_ones(new, self.slots - new), fresh], 1)
        if given is None:
            return out
        return out & given if given.dtype == torch.bool else given.masked_fill(~out, torch.finfo(given.dtype).min)


class CompactedCache(Cache):
    """A cache whose layers are cut to ``policy.keep`` entries per head every ``policy.interval`` generated tokens.

    Args:
        config: the model's config.
        policy: what stays.
        record: "positions" keeps the surviving positions of every event in `events`; "full" also what the policy decided;
            "none" keeps nothing.

    The first forward pass is the prefill and stays uncompressed until the first event; chunks given later count as generated tokens.

    Raises:
        UnsupportedModelError: for sliding-window, linear-attention or other hybrid layers.
    """

    def __init__(self, config, policy: SegmentedPolicy, record: str = "positions"):
        if record not in ("none", "positions", "full"):
            raise InputError("record", got=record, allowed="none, positions or full")
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        if getattr(text, "sliding_window", None) and getattr(text, "layer_types", None) is None:
            kinds = ["sliding_attention"] * text.num_hidden_layers
        odd = sorted(set(kinds) - {"full_attention"})
        if odd:
            raise UnsupportedModelError(
                "config", got=f"{type(config).__name__} with {', '.join(odd)} layers", allowed="full attention in every layer",
                hint="set sliding_window=None if the model allows it",
            )
        self.policy = policy
        self.record = record
        self.events: list[Event] = []
        self._pending = 0
        self._count = 0
        super().__init__(layers=[CompactedLayer(self) for _ in kinds])

    def kept_positions(self, layer: int, row: int = 0) -> Tensor:
        """Original positions held now, (kv_heads, slots); -1 on padding."""
        held = self.layers[layer]
        positions = held.positions if held.alive is None else held.positions.masked_fill(~held.alive, -1)
        return positions[row]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held: ``logical`` counts entries that can be attended to, ``physical`` the key and value tensors, ``bookkeeping`` the rest."""
        logical = physical = other = 0
        for layer in self.layers:
            if not layer.slots:
                continue
            physical += layer.keys.nbytes + layer.values.nbytes
            alive, held = layer.alive, layer.keys.nbytes + layer.values.nbytes
            logical += held if alive is None else held // alive.numel() * int(alive.sum())
            extra = [layer.kept_positions, layer.valid, layer.credit, *layer.queries]
            other += sum(t.nbytes for t in extra if t is not None)
        return {"logical": logical, "physical": physical, "bookkeeping": other}

    def reset(self) -> None:
        """Forget everything, so that the cache can serve the next sample."""
        for layer in self.layers:
            layer.reset()
        self.events.clear()
        self._pending = self._count = 0

    def _step(self, new: int, rotary) -> None:
        """After the last layer of a forward pass with ``new`` tokens: count, and compact when the interval is full."""
        first = self.layers[0]
        if first.seen > new:
            self._pending += new
        if self._pending >= self.policy.interval:
            self._pending = 0
            self._compact(rotary)

    @torch.no_grad()
    def _compact(self, rotary) -> None:
        policy, layers = self.policy, self.layers
        first = layers[0]
        before = first.slots
        per_token = sum((layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes) for layer in layers)
        keep = policy.tokens(first.seen, per_token)
        if before <= keep:
            for layer in layers:
                layer.queries.clear()
            return
        scores, evidence = [], []
        for number, layer in enumerate(layers):
            window = layer.window(rotary, policy.seed * 1_000_003 + self._count * 1009 + number)
            positions, alive = layer.positions, layer.alive
            # Padding stands in the future, so that no query's attention reaches it.
            visible = positions if alive is None else positions.masked_fill(~alive, torch.iinfo(torch.int64).max)
            score = policy.score(layer.keys, layer.values, window, visible)
            scores.append(score if alive is None else score.masked_fill(~alive, -torch.inf))
            if policy.needs_evidence:
                last = window.last(min(policy.window, before - 1))
                evidence.append(kernels.window_evidence(last.states, layer.keys, last.scaling, last.positions, positions, alive))
        credit = None if first.credit is None else torch.stack([layer.credit for layer in layers])
        chosen = policy.select(
            torch.stack(scores), torch.stack(evidence) if evidence else None, keep, credit,
            None if first.valid is None else torch.stack([layer.alive for layer in layers]),
        )
        kept = torch.stack([layer.positions for layer in layers]).gather(-1, chosen.index)
        for number, layer in enumerate(layers):
            layer.keys, layer.values = kernels.gather_rows((layer.keys, layer.values), chosen.index[number])
            layer.kept_positions = kept[number]
            layer.valid = None if chosen.valid is None else chosen.valid[number]
            layer.credit = None if chosen.credit is None else chosen.credit[number].gather(-1, chosen.index[number])
            layer.queries.clear()
        self._count += 1
        if self.record != "none":
            shown = kept if chosen.valid is None else kept.masked_fill(~chosen.valid, -1)
            self.events.append(Event(first.seen, before, shown.int().cpu(), chosen if self.record == "full" else None))


@dataclass
class _Session:
    policy: SegmentedPolicy
    rotary: object
    layer: CompactedLayer | None = field(default=None)


_SESSION: ContextVar[_Session | None] = ContextVar("nbkit_ams_session", default=None)


def _compacting_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Scaled dot-product attention that hands the rotated queries to the layer that was just updated."""
    session = _SESSION.get()
    layer, given = (session.layer, attention_mask) if session is not None else (None, attention_mask)
    if layer is None or layer.keys is not key:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    session.layer = None
    new = query.shape[2]
    if given is not None and not bool((given[..., -1, :] if given.dtype == torch.bool else given[..., -1, :] == 0).all()):
        raise InputError(
            "attention_mask", got="a padded batch", allowed="prompts of equal length",
            hint="generate row by row or group prompts by length: a padded row would spend its budget on padding",
        )
    out = sdpa_attention_forward(module, query, key, value, layer.mask(attention_mask, query), scaling=scaling, **kwargs)
    layer.observe(query.detach(), scaling if scaling is not None else query.shape[-1] ** -0.5)
    if layer is layer._cache.layers[-1]:
        layer._cache._step(new, session.rotary)
    return out


def _find_rotary(model):
    """``positions (n,) -> cos, sin`` from the model's rotary module, or None."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "rotary_emb" and hasattr(module, "inv_freq"):
            probe = torch.zeros(1, dtype=torch.float32, device=module.inv_freq.device)
            # A copy: some rotary modules re-tune themselves to the longest position they are asked about.
            module = deepcopy(module)

            def rotary(positions: Tensor, module=module, probe=probe):
                cos, sin = module(probe, positions[None])
                return cos[0], sin[0]

            return rotary
    return None


@contextmanager
def attach(policy: SegmentedPolicy, model) -> Iterator[object]:
    """See `SegmentedPolicy.attach`."""
    implementation = model.config._attn_implementation
    kind = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if kind is not None:
        raise UnsupportedModelError("generation_config.cache_implementation", got=kind, allowed="None", hint="a CompactedCache replaces it")
    AttentionInterface.register(ATTENTION, _compacting_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    token = _SESSION.set(_Session(policy, _find_rotary(model)))
    try:
        yield model
    finally:
        _SESSION.reset(token)
        model.set_attn_implementation(implementation)
