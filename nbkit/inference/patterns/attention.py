"""Attention over a pattern, and the part that every rule becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from torch.nn import functional as F

from nbkit.inference.parts import Attention
from nbkit.inference.patterns.pattern import Pattern
from nbkit.inference.patterns.probe import check
from nbkit.kernels.sparse_attention import sparse_attention

if TYPE_CHECKING:
    from nbkit.inference.session import Run

__all__ = ["PatternAttention", "attend_pattern"]


def attend_pattern(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, scaling: float, *, backend: str | None = None) -> Tensor:
    """Return the attention output (1, heads, n, value_dim) of a pattern, one kernel call for each set of heads of one kind.

    queries: (1, heads, n, d); keys, values: (1, kv_heads, T, d), T >= n. Heads that read everything use the dense kernel of torch.

    >>> import torch
    >>> x = torch.ones(1, 2, 4, 2)
    >>> attend_pattern(Pattern(2, window=[1, 4]), x, x, torch.arange(8.0).view(1, 2, 4, 1), 1.0)[0, :, -1, 0].tolist()
    [3.0, 5.5]
    """
    rows, keys = q.shape[2], k.shape[2]
    out = None
    for which, part in pattern.groups(keys):
        every = len(which) == pattern.heads
        q_, k_, v_ = (q, k, v) if every else _heads(which, q, k, v)
        if max(part.window, part.sinks) >= keys and rows == keys and backend is None:
            some = F.scaled_dot_product_attention(q_, k_, v_, is_causal=rows > 1, scale=scaling, enable_gqa=q_.shape[1] != k_.shape[1])
        else:
            tables = {name: None if (t := getattr(part, name)) is None else t[None].to(q.device) for name in ("columns", "slashes", "blocks")}
            some, _ = sparse_attention(
                q_, k_, v_, scaling, window=part.window, sinks=part.sinks, dense_rows=part.dense_rows, **tables, block=part.block, backend=backend
            )
        if every:
            return some
        if out is None:
            out = q.new_empty(1, pattern.heads, rows, v.shape[3])
        out[:, which] = some
    return out


def _heads(which: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take some query heads and the key heads that they read; key heads are repeated only where a group is split."""
    group = q.shape[1] // k.shape[1]
    kv = [h // group for h in which]
    if len(which) == group * len(set(kv)):
        kv = sorted(set(kv))
    return q[:, list(which)], k[:, kv], v[:, kv]


class PatternAttention(Attention):
    """Attention over the pairs of a pattern; a subclass says which pattern a layer gets and registers itself.

    ``run.state[part]`` maps each layer to what its rule reported (``Pattern.info``).
    """

    checks: ClassVar[dict[str, str]] = {}

    def __post_init__(self):
        for name, kind in self.checks.items():
            value = getattr(self, name)
            if value is not None:
                check(name, value, kind)

    def pattern(self, run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Pattern:
        """Return the pattern of one layer from its rotated queries (1, heads, n, d), keys and values (1, kv_heads, T, d)."""
        raise NotImplementedError

    def attend(self, run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Find the pattern, charge its pairs and its probe, and compute the output (1, heads, n, value_dim)."""
        pattern = self.pattern(run, layer, q, k, v, scaling)
        run.state.setdefault(self, {})[layer] = pattern.info
        run.charge(layer, pairs=float(pattern.pairs(q.shape[2], k.shape[2]).sum()), probe=pattern.probe_pairs)
        return attend_pattern(pattern, q, k, v, scaling)
