"""FastPrefill as one object: a schedule of dropped tokens and head-specific sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nbkit.errors import InputError
from nbkit.inference import Run, attach
from nbkit.methods.fastprefill.heads import HeadCache, HeadSelected
from nbkit.methods.fastprefill.prune import TokenPruning
from nbkit.methods.fastprefill.schedule import PruneSchedule

__all__ = ["FastPrefill"]


@dataclass(frozen=True)
class FastPrefill:
    """Recovery-free layer-wise token pruning: deeper layers read fewer tokens, each head reads its own keys, nothing is computed again.

    schedule: share of the prompt that each layer reads. score: how tokens are ranked (`TokenPruning`). heads: granularity of the key sets,
    "query", "kv" or "shared", or None for dense attention among the rows alive. head_budget: share of the prompt in each set.
    sinks, window: first and last tokens that always stay. pool: neighbours that share a token's score. prune_at: "pre" or "post_attn".
    band: nearest rows that each row reads beside its set. cache: "rows" keeps every row alive of a layer in its cache, "heads" only the sets.
    strict: InputError instead of more rows where a budget is smaller than sinks + window. options: more options of `TokenPruning`.

    Source: reconstruction of FastPrefill, section 3 (the paper's body is not public).

    >>> FastPrefill(PruneSchedule.one_shot(2, 0.3, 4), heads=None).parts()["attention"] is None
    True
    """

    schedule: PruneSchedule
    score: str = "max"
    heads: str | None = "query"
    head_budget: float = 0.2
    sinks: int = 4
    window: int = 32
    pool: int = 7
    prune_at: str = "pre"
    band: int = 32
    cache: str = "rows"
    strict: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        if self.cache not in ("rows", "heads") or (self.cache == "heads" and self.heads is None):
            raise InputError("cache", got=self.cache, allowed="rows, or heads where heads= names a granularity")
        self.parts()

    def parts(self) -> dict[str, Any]:
        """The parts of a session: rows, attention, eviction."""
        common = {"sinks": self.sinks, "window": self.window, "pool": self.pool, "strict": self.strict}
        pooling = {"pooling": self.options["pooling"]} if "pooling" in self.options else {}
        rows = TokenPruning(self.schedule, score=self.score, prune_at=self.prune_at, **common, **self.options)
        heads = None
        if self.heads is not None:
            heads = HeadSelected(granularity=self.heads, budget=self.head_budget, band=self.band, **common, **pooling)
        return {"rows": rows, "attention": heads, "eviction": HeadCache(heads) if self.cache == "heads" else None}

    @contextmanager
    def attach(self, model: Any, *, last_row_only: bool = False) -> Iterator[Run]:
        """Read prompts this way while the block runs; see `nbkit.inference.attach`.

        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=30, num_hidden_layers=3)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        >>> method = FastPrefill(PruneSchedule.one_shot(1, 0.5, 3), sinks=1, window=4, band=4)
        >>> with method.attach(model) as run:
        ...     ids = model.generate(torch.arange(20)[None], max_new_tokens=2, do_sample=False)
        >>> run.counts, run.cache.lengths()
        ([20, 10, 10], (21, 11, 11))
        """
        with attach(model, **self.parts(), last_row_only=last_row_only) as run:
            yield run
