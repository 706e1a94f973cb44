"""The method as a part of a faster prefill: the cache of every layer shrinks once, right after that layer has read the prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from nbkit import kernels
from nbkit.errors import InputError
from nbkit.inference import Eviction, register

from .policy import SegmentedPolicy
from .scorers import QueryWindow


@dataclass(frozen=True)
class _PolicyEviction(Eviction):
    """One event of a `SegmentedPolicy` a layer; layers that hold no more than ``keep`` entries stay as they are."""

    budget: int | float = 0.25
    scorer: str = "snapkv"
    sinks: int = 4
    recent: int = 16
    window: int = 32
    allocation: ClassVar[str] = "none"

    def __post_init__(self):
        if self.scorer == "expected_attention":
            raise InputError("scorer", got=self.scorer, allowed="scorers that read queries and keys alone", hint='scorer="snapkv"')
        if isinstance(self.budget, str):
            raise InputError("budget", got=self.budget, allowed="tokens (int) or a share of the prompt (float in (0, 1])")
        self.policy  # noqa: B018 - the policy checks its options

    @property
    def policy(self) -> SegmentedPolicy:
        """The policy of every event."""
        return SegmentedPolicy(scorer=self.scorer, keep=self.budget, allocation=self.allocation, sinks=self.sinks, recent=self.recent,
                               window=self.window)

    def with_keep(self, keep: int | float) -> _PolicyEviction:
        """The same part with another number of entries per head."""
        return replace(self, budget=keep)

    def keep(self, run, layer: int, k: Tensor, v: Tensor, queries: Tensor, positions: Tensor) -> Tensor | None:
        """Slots (1, kv_heads, m) that stay, or None where the layer is small enough.

        k, v: (1, kv_heads, n, d). queries: (1, heads, W, d), the last rows alive. positions: (n,) original positions, which may have gaps.
        """
        policy = self.policy
        slots = k.shape[2]
        keep = policy.tokens(run.tokens, 1)
        if keep >= slots:
            return None
        places = positions.expand(*k.shape[:2], -1)
        window = QueryWindow(queries, positions[-queries.shape[2] :], run.scaling, seed=policy.seed + layer)
        scores = policy.score(k, v, window, places)
        evidence = None
        if policy.needs_evidence:
            last = window.last(min(policy.window, slots - 1))
            evidence = kernels.window_evidence(last.states, k, last.scaling, last.positions, places)
        return policy.select(scores, evidence, keep).index.to(torch.int64)


@register
@dataclass(frozen=True)
class AmsEviction(_PolicyEviction):
    """Segments of equal attention mass share out the entries, a token scorer chooses inside each.

    Args:
        budget: entries per head that stay: tokens (int), or a share (float) of the prompt, not of the rows that reached the layer.
        scorer: name in `SCORERS`, or a callable; ``expected_attention`` needs the model's rotation and is not available here.
        sinks, recent, window: see `SegmentedPolicy`.

    Raises: InputError as `SegmentedPolicy` does, or for a budget in bytes.
    Source: arXiv 2605.23200, one event at the end of the prefill.

    >>> AmsEviction(budget=64).policy.allocation
    'mass'
    """

    name: ClassVar[str] = "ams"
    allocation: ClassVar[str] = "mass"


@register
@dataclass(frozen=True)
class SnapKVEviction(_PolicyEviction):
    """The scorer's best entries over the whole prompt, without segments. Options as in `AmsEviction`.

    Source: SnapKV, arXiv 2404.14469.

    >>> SnapKVEviction(budget=64).policy.allocation
    'none'
    """

    name: ClassVar[str] = "snapkv"
    allocation: ClassVar[str] = "none"
