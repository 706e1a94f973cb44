"""What happened while a prompt was read: rows alive, attention computed, time and multiply-accumulates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from nbkit.errors import InputError

if TYPE_CHECKING:
    from nbkit.inference.cache import RaggedCache

__all__ = ["LayerSize", "Run"]


class LayerSize(NamedTuple):
    """Multiply-accumulates of one row in one decoder layer, without attention: query and output projections, the other projections, FFN."""

    query_output: int
    key_value: int
    ffn: int

    @classmethod
    def of(cls, layer: nn.Module) -> LayerSize:
        """From the linear modules of a decoder layer whose attention module is ``self_attn``.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=30, num_hidden_layers=1)
        >>> LayerSize.of(LlamaForCausalLM(LlamaConfig(**sizes)).model.layers[0])
        LayerSize(query_output=512, key_value=256, ffn=1536)
        """
        sizes = [0, 0, 0]
        for name, module in layer.named_modules():
            if hasattr(module, "in_features") and hasattr(module, "out_features"):
                place = 2 if not name.startswith("self_attn.") else 0 if name.endswith((".q_proj", ".o_proj")) else 1
                sizes[place] += module.in_features * module.out_features
        return cls(*sizes)


@dataclass(eq=False)
class Run:
    """One reader attached to a model; it describes the prompt that was read last and starts anew with each prompt.

    Attributes
    ----------
    layers: number of decoder layers.
    tokens: length N of the prompt; 0 before the first one.
    scaling: factor of the dot products q.k.
    ids: (batch, N) token ids, or None if the model was given embeddings.
    positions: (n,) original positions of the rows alive now.
    kept: one (n_l,) tensor of original positions for every layer that was read.
    cache: the `RaggedCache` that was filled, or None without a cache.
    seconds: wall-clock seconds of every layer of the prefill, as the host sees them.
    pairs, probe: (query, key) pairs attended to, and pairs scored only to choose, of every layer, summed over heads, mean over the batch.
    ffn_rows: rows in the FFN of every layer.
    state: what the parts remember about this prompt, by part.
    """

    layers: int
    sizes: Sequence[LayerSize] = field(repr=False)
    lm_head: int = 0
    tokens: int = 0
    batch: int = 1
    heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    scaling: float = 1.0
    ids: Tensor | None = field(default=None, repr=False)
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long), repr=False)
    kept: list[Tensor] = field(default_factory=list, repr=False)
    cache: RaggedCache | None = field(default=None, repr=False)
    seconds: list[float] = field(default_factory=list, repr=False)
    pairs: list[float] = field(default_factory=list, repr=False)
    probe: list[float] = field(default_factory=list, repr=False)
    ffn_rows: list[int] = field(default_factory=list, repr=False)
    extra_macs: float = 0.0
    state: dict[Any, Any] = field(default_factory=dict, repr=False)
    last_row_only: bool = False
    query_window: int = 64

    def reset(self) -> None:
        """Forget the last prompt; each new prompt does this by itself."""
        self.tokens, self.batch, self.ids, self.cache, self.extra_macs = 0, 1, None, None, 0.0
        self.positions = torch.zeros(0, dtype=torch.long)
        self.kept, self.seconds, self.ffn_rows, self.state = [], [], [], {}
        self.pairs, self.probe = [0.0] * self.layers, [0.0] * self.layers

    def charge(self, layer: int, *, pairs: float = 0.0, probe: float = 0.0) -> None:
        """Add pairs attended to, and pairs scored in order to choose, to ``layer``; both summed over heads."""
        self.pairs[layer] += float(pairs) / self.batch
        self.probe[layer] += float(probe) / self.batch

    def charge_macs(self, macs: float) -> None:
        """Add work outside of the layers, such as a draft model."""
        self.extra_macs += float(macs)

    @property
    def counts(self) -> list[int]:
        """Rows alive in every layer that was read."""
        return [len(positions) for positions in self.kept]

    @property
    def dense_pairs(self) -> float:
        """Pairs of the dense causal attention over the whole prompt, all layers and heads."""
        return float(self.layers * self.heads * (self.tokens * (self.tokens + 1) // 2))

    @property
    def density(self) -> float:
        """Pairs attended to or scored, of all layers and heads, over the pairs of dense causal attention over the whole prompt.

        Raises: InputError before a prompt was read.
        """
        self._check()
        return (sum(self.pairs) + sum(self.probe)) / self.dense_pairs

    @property
    def macs(self) -> float:
        """Multiply-accumulates of the prefill for one prompt, from the shapes, without the logits; see `total_macs`.

        Raises: InputError before a prompt was read.
        """
        return self.total_macs()

    def total_macs(self, *, lm_head: bool = False) -> float:
        """Multiply-accumulates of linear maps, attention pairs and scored pairs; ``lm_head`` adds the logits of one row.

        Norms, rotations, the softmax and sorting are not counted.

        Raises: InputError before a prompt was read.
        """
        self._check()
        total = self.extra_macs + sum(self.pairs) * (self.head_dim + self.value_dim) + sum(self.probe) * self.head_dim
        for layer, (size, rows) in enumerate(zip(self.sizes, self.counts, strict=True)):
            asking = 1 if self.last_row_only and layer == self.layers - 1 else rows
            total += asking * size.query_output + rows * size.key_value + self.ffn_rows[layer] * size.ffn
        return float(total + (self.lm_head if lm_head else 0))

    def evidence_kept(self, spans: Iterable[tuple[int, int]]) -> list[float]:
        """Share of the tokens in the (start, stop) ``spans`` that is alive, a layer each; 1 where there are none."""
        wanted = {place for start, stop in spans for place in range(start, stop)}
        return [len(wanted.intersection(positions.tolist())) / len(wanted) if wanted else 1.0 for positions in self.kept]

    def _check(self) -> None:
        if len(self.kept) != self.layers:
            raise InputError("run", got="no prompt read to the end", allowed="a run whose model has read a prompt",
                             hint="call the model inside the with block")
