"""A transformers cache whose layers hold different numbers of entries, with the original position of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from nbkit.errors import InputError, RunError, UnsupportedModelError

__all__ = ["RaggedCache", "RaggedLayer", "check_layers"]


def check_layers(config: Any) -> int:
    """The number of layers of a model whose layers all use full attention.

    Raises: UnsupportedModelError for sliding-window, linear-attention and other hybrid layers.

    >>> from transformers import LlamaConfig, MistralConfig
    >>> check_layers(LlamaConfig(num_hidden_layers=3))
    3
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        window = getattr(text, "sliding_window", None)
        kinds = ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    odd = sorted(set(kinds) - {"full_attention"})
    if odd:
        raise UnsupportedModelError("model", got=f"{type(config).__name__} with {', '.join(odd)} layers", allowed="full attention in every layer",
                                    hint="set sliding_window=None if the model allows it")
    return len(kinds)


class RaggedLayer(DynamicLayer):
    """Keys and values of one layer. positions: int64 (slots,), or (kv_heads, slots) where the heads keep different entries."""

    is_croppable = False

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self._cache = cache
        self.seen = 0
        self.positions: Tensor | None = None

    @property
    def slots(self) -> int:
        """Entries held per head."""
        return self.keys.shape[-2] if self.is_initialized else 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append entries; their positions come from the reader that the cache belongs to.

        Raises: RunError outside of `attach()`, where the library would give the entries wrong positions.
        """
        fresh = self._cache._fresh
        if fresh is None:
            raise RunError("RaggedCache", got="a forward pass outside of attach()", hint="decode inside the with block that read the prompt")
        self.seen = self._cache._seen
        if self.positions is not None and self.positions.dim() == 2:
            fresh = fresh.expand(self.positions.shape[0], -1)
        self.positions = fresh if self.positions is None else torch.cat([self.positions, fresh], -1)
        return super().update(key_states, value_states)

    def retain(self, slots: Tensor) -> None:
        """Keep the entries ``slots`` (1, kv_heads, m) of each key head and let the others go."""
        index = slots[..., None]
        self.keys = self.keys.gather(2, index.expand(*slots.shape, self.keys.shape[-1]))
        self.values = self.values.gather(2, index.expand(*slots.shape, self.values.shape[-1]))
        self.positions = self.positions.expand(slots.shape[1], -1).gather(1, slots[0])

    def get_seq_length(self) -> int:
        """Tokens seen, not entries held."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Entries visible to the next queries, and the offset that makes their index end at the right position."""
        return self.slots + query_length, self.seen - self.slots

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen, self.positions = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: dropped entries cannot come back."""
        raise RunError("RaggedCache", got="crop()", hint="assisted generation needs a cache that can step back: read the prompt without attach()")

    def _one_prompt(self, *_: Any, **__: Any) -> None:
        if self.slots:
            raise RunError("RaggedCache", got="beam search or another change of the batch", allowed="one prompt at a time", hint="num_beams=1")

    reorder_cache = batch_repeat_interleave = batch_select_indices = _one_prompt


class RaggedCache(Cache):
    """A cache that a reader of `attach()` fills: every layer keeps the rows that it read.

    ``get_seq_length()`` is the number of tokens seen, whatever was dropped, so positions stay right.

    Raises: UnsupportedModelError for a model with layers other than full attention.

    >>> from transformers import LlamaConfig
    >>> cache = RaggedCache(LlamaConfig(num_hidden_layers=2))
    >>> len(cache), cache.get_seq_length(), cache.nbytes
    (2, 0, 0)
    """

    def __init__(self, config: Any):
        # Set by the reader in every forward pass: positions of the rows alive, tokens seen after the pass; the distance between
        # the next token's rotary position and its place in the text.
        self._fresh: Tensor | None = None
        self._seen = 0
        self._shift = 0
        super().__init__(layers=[RaggedLayer(self) for _ in range(check_layers(config))])

    def lengths(self) -> tuple[int, ...]:
        """Entries held per head in every layer."""
        return tuple(layer.slots for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.slots)

    def positions(self, layer: int) -> Tensor:
        """Original positions held in ``layer``: (slots,), or (kv_heads, slots) after an eviction.

        Raises: InputError while the layer is empty.
        """
        held = self.layers[layer].positions
        if held is None:
            raise InputError("layer", got=f"{layer}, which holds nothing yet", allowed="a cache that has read a prompt")
        return held
