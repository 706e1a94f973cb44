"""SlimInfer: whole blocks of tokens are dropped at a few layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nbkit.inference.parts import register

from .row_rule import RowRule, drops_of, plan_of, steps_of
from .rules import cover, tokens_of, whole


def block_scores(queries: Tensor, keys: Tensor, blocks: Tensor, *, unit: int) -> Tensor:
    """Score of each block of tokens: the best unit in it, by q.k of the mean query with the unit's mean key, averaged over heads: (blocks,).

    queries: (1, query_heads, rows, head_dim) of the last rows; keys: (1, kv_heads, tokens, head_dim); blocks: (tokens,) non-decreasing
    numbers 0..B-1. A unit is ``unit`` neighbouring tokens of one block.

    >>> keys = torch.tensor([0.0, 0.0, 1.0, 3.0, 0.0, 1.0]).view(1, 1, 6, 1)
    >>> block_scores(torch.ones(1, 1, 1, 1), keys, torch.tensor([0, 0, 1, 1, 2, 2]), unit=2).tolist()
    [0.0, 2.0, 0.5]
    """
    heads, kv_heads, tokens = queries.shape[1], keys.shape[1], keys.shape[2]
    starts = torch.cat([blocks.new_zeros(1), (blocks[1:] != blocks[:-1]).nonzero().flatten() + 1])
    inside = torch.arange(tokens, device=blocks.device) - starts[blocks]
    # One number for every (block, unit in it), counted in the order of the tokens.
    mark = torch.cat([blocks.new_ones(1), ((inside[1:] % unit == 0) | (blocks[1:] != blocks[:-1])).long()])
    units = mark.cumsum(0) - 1
    count = int(units[-1]) + 1
    sums = keys.new_zeros(kv_heads, count, keys.shape[3], dtype=torch.float32).index_add_(1, units, keys[0].float())
    means = sums / torch.bincount(units, minlength=count)[None, :, None]
    query = queries[0].float().mean(1).view(kv_heads, heads // kv_heads, -1)
    scores = (query @ means.transpose(1, 2)).flatten(0, 1).mean(0)
    owner = blocks[mark.nonzero().flatten()]
    return torch.full((int(blocks[-1]) + 1,), -math.inf).to(scores).scatter_reduce_(0, owner, scores, "amax")


@register
@dataclass(frozen=True)
class SlimInfer(RowRule):
    """Whole blocks of tokens are dropped before a few layers; the first and the last block always stay.

    layers, rates: before each layer the best blocks stay until the share ``rates`` of the prompt is reached (the last one in may be cut off
    by no more than a block). Default layers: 1/3, 1/2 and 2/3 of the depth. A block's score is that of its best unit (`block_scores`), from
    the mean of the last ``window`` queries.

    Source: SlimInfer, arXiv 2508.06447: block-wise pruning of hidden states at a few layers by small units of tokens; block and unit sizes,
    layers and rates are our reconstruction at short prompts.

    >>> SlimInfer().drops(30), SlimInfer(layers=(2,), rates=(0.5,)).drops(4)
    ((10, 15, 20), (2,))
    """

    layers: tuple[int, ...] | None = None
    rates: tuple[float, ...] = (0.7, 0.5, 0.3)
    block: int = 32
    unit: int = 8
    window: int = 32
    name: ClassVar[str] = "sliminfer"

    def __post_init__(self):
        layers, rates = steps_of(self.layers, self.rates)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "rates", rates)
        for name in ("block", "unit", "window"):
            whole(name, getattr(self, name), 1)

    def drops(self, layers):
        return drops_of(plan_of(self.layers, self.rates, layers))

    def choose(self, run, layer, queries, keys, scaling):
        rows = keys.shape[2]
        names, blocks = (run.positions // self.block).unique_consecutive(return_inverse=True)
        scores = block_scores(queries[:, :, -min(self.window, rows):], keys, blocks, unit=self.unit)
        run.charge(layer, probe=float(queries.shape[1] * -(-rows // self.unit)))
        rate = plan_of(self.layers, self.rates, run.layers)[layer + 1]
        chosen = cover(scores, torch.bincount(blocks), tokens_of(rate, run.tokens), (0, len(names) - 1))
        return torch.isin(blocks, chosen).nonzero().flatten()
