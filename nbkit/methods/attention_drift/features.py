"""What the drafter reads from its target: three raw streams, the last state, and the logits that it imitates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbkit.errors import InputError

from .config import check_layers, default_aux_layers, embedding_of
from .drafter import Drafter


@dataclass(frozen=True)
class Features:
    """One pass of the target over (batch, N) tokens.

    Attributes:
        aux: (batch, N, 3d) residual stream after the three auxiliary layers, low to high, raw. last: (batch, N, d) final-normed state.
        logits: (batch, N, vocabulary), or None where they were not asked for.
        cache: the target's key-value cache, or None.
    """

    aux: Tensor
    last: Tensor
    logits: Tensor | None
    cache: object = None


@torch.no_grad()
def target_features(
    model, ids: Tensor, aux_layers: Sequence[int] | None = None, *, attention_mask: Tensor | None = None, cache=None, logits: bool = True,
) -> Features:
    """Run the target once and keep what a drafter needs; works on any causal LM of transformers that returns hidden states.

    transformers returns ``hidden_states[i + 1]`` after layer i, but the last entry only behind the final norm: it is never an auxiliary stream.

    Args:
        ids: (batch, N) token ids. aux_layers: 0-based, default `default_aux_layers`. attention_mask: (batch, N), 0 at padding; positions are
            then counted from the first real token. cache: continue this cache. logits: False skips the large head.

    Raises: InputError for unknown layers, empty input or ids outside the vocabulary.
    """
    depth = model.config.get_text_config().num_hidden_layers
    aux_layers = default_aux_layers(depth) if aux_layers is None else tuple(aux_layers)
    if not aux_layers or min(aux_layers) < 0:
        raise InputError("aux_layers", got=aux_layers, allowed=f"0..{depth - 2}")
    check_layers(aux_layers, depth)
    check_ids(ids, embedding_of(model).shape[0])
    extra = {}
    if attention_mask is not None:
        if cache is not None:
            raise InputError("attention_mask", got="a mask and a cache", allowed="one of them")
        extra = {"attention_mask": attention_mask, "position_ids": pair_positions(attention_mask)}
    out = model(
        input_ids=ids, output_hidden_states=True, use_cache=cache is not None, logits_to_keep=0 if logits else 1,
        **({"cache": cache} if cache is not None else {}), **extra,
    )
    states = out.hidden_states
    return Features(torch.cat([states[i + 1] for i in aux_layers], -1), states[-1], out.logits if logits else None, cache)


def pair_positions(attention_mask: Tensor) -> Tensor:
    """Positions (batch, N) counted from the first real token of left-padded rows.

    >>> pair_positions(torch.tensor([[0, 0, 1, 1, 1]])).tolist()
    [[0, 0, 0, 1, 2]]
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise InputError unless ``ids`` is a non-empty (batch, N) tensor of ids below ``vocabulary``."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        got = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError("input ids", got=got, allowed="(batch, N) integer token ids, not empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise InputError("input ids", got=f"ids from {low} to {high}", allowed=f"0..{vocabulary - 1}", hint="the target's own tokenizer")


def frequent_tokens(tokens: Tensor, size: int, vocab_size: int) -> Tensor:
    """The ``size`` most frequent ids of ``tokens`` (ties and unseen ones by lower id), sorted.

    Raises: InputError for a size outside 1..vocab_size.

    >>> frequent_tokens(torch.tensor([5, 5, 3, 9, 9, 9]), 2, 12).tolist()
    [5, 9]
    """
    if not 1 <= size <= vocab_size:
        raise InputError("size", got=size, allowed=f"1..{vocab_size}")
    check_ids(tokens.reshape(1, -1), vocab_size)
    counts = torch.bincount(tokens.flatten().long(), minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(drafter: Drafter, tokens: Tensor) -> float:
    """Share of ``tokens`` (the target's own choices) that the drafter's vocabulary holds: an upper limit of its acceptance."""
    if drafter.cfg.draft_vocab is None:
        return 1.0
    drafter.vocab_ids  # noqa: B018 (raises when the vocabulary has not been chosen)
    return drafter.t2d[tokens.flatten()].double().mean().item()
