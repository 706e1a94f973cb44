"""What the selection rules share: attention of the last rows, pooling along tokens, choice of the best tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError

# Attention weights held at once; more rows than fit are read in turns.
_BLOCK = 2**24


def whole(name: str, value: int, least: int) -> int:
    """``value`` if it is a whole number >= ``least``.

    Raises: InputError otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(name, got=value, allowed=f"a whole number >= {least}")
    return value


def share(name: str, value: float) -> float:
    """``value`` if it is a share in (0, 1].

    Raises: InputError otherwise, also for NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InputError(name, got=value, allowed="a share in (0, 1]")
    return value


def amount(name: str, value: float) -> float:
    """``value`` if it is a share in (0, 1] (float) or a number of tokens >= 1 (int).

    Raises: InputError otherwise.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, float) and 0 < value <= 1:
        return value
    raise InputError(name, got=value, allowed="a share in (0, 1] as float, or a number of tokens >= 1 as int")


def tokens_of(keep: float, tokens: int) -> int:
    """Number of tokens that ``keep`` (share or number) leaves of ``tokens``, at least one.

    >>> tokens_of(0.2, 1024), tokens_of(7, 1024), tokens_of(2048, 1024)
    (205, 7, 1024)
    """
    wanted = keep if isinstance(keep, int) else math.ceil(keep * tokens - 1e-9)
    return max(1, min(tokens, wanted))


def row_attention(queries: Tensor, keys: Tensor, scaling: float, *, weights: Tensor | None = None) -> Tensor:
    """Attention of the last rows to every key, summed over these rows: (query_heads, tokens) float32.

    queries: (1, query_heads, rows, head_dim), the last ``rows`` of the sequence; keys: (1, kv_heads, tokens, head_dim), both rotated.
    Row i of r stands at key tokens - r + i and sees nothing behind itself. weights: (rows,), default 1 each.

    >>> queries, keys = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 4, 4)
    >>> [round(x, 3) for x in row_attention(queries, keys, 0.5)[0].tolist()]
    [0.583, 0.583, 0.583, 0.25]
    """
    _, heads, rows, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    if rows > tokens or heads % kv_heads:
        raise InputError("queries", got=tuple(queries.shape), allowed=f"at most {tokens} rows, heads a multiple of {kv_heads}")
    keys = keys[0].float().transpose(1, 2)
    grouped = queries[0].float().reshape(kv_heads, heads // kv_heads, rows, dim)
    weights = torch.ones(rows) if weights is None else weights
    weights = weights.to(keys)
    total = keys.new_zeros(heads, tokens)
    place = torch.arange(tokens, device=keys.device)
    step = max(1, _BLOCK // (heads * tokens))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        logits = (grouped[:, :, start:stop].flatten(1, 2) @ keys).view(heads, stop - start, tokens) * scaling
        hidden = place[None] > (tokens - rows + torch.arange(start, stop, device=keys.device))[:, None]
        shares = logits.masked_fill(hidden, -math.inf).softmax(-1)
        total += (shares * weights[start:stop, None]).sum(1)
    return total


def pool(scores: Tensor, size: int, kind: str = "avg") -> Tensor:
    """Average or maximum of each score with its neighbours along the last axis; ``size`` odd, edges see fewer neighbours.

    The mean at the edges divides by ``size`` all the same, as the published rules do (zero padding).

    >>> pool(torch.tensor([3.0, 0.0, 0.0, 6.0]), 3).tolist(), pool(torch.tensor([3.0, 0.0, 0.0, 6.0]), 3, "max").tolist()
    ([1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 6.0, 6.0])
    """
    if size < 1 or size % 2 == 0:
        raise InputError("pool", got=size, allowed="an odd number >= 1")
    flat = scores.reshape(-1, 1, scores.shape[-1])
    if kind == "avg":
        out = F.avg_pool1d(flat, size, 1, size // 2)
    elif kind == "max":
        out = F.max_pool1d(flat, size, 1, size // 2)
    else:
        raise InputError("kind of pooling", got=kind, allowed="avg, max")
    return out.reshape(scores.shape)


def best(scores: Tensor, count: int, forced: Tensor | Sequence[int] = ()) -> Tensor:
    """Sorted indices of the ``forced`` tokens and of the best others, ``count`` in all (all forced ones, if these are more).

    scores: (tokens,). Of equal scores the earlier token wins, so that a choice never depends on the library's sorting.

    Raises: InputError for NaN scores.

    >>> best(torch.tensor([1.0, 5.0, 1.0, 2.0]), 3, [2]).tolist()
    [1, 2, 3]
    """
    if torch.isnan(scores).any():
        raise InputError("scores", got="NaN", allowed="numbers", hint="look for NaN in the weights or the states of the model")
    chosen = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
    chosen[torch.as_tensor(forced, dtype=torch.long, device=scores.device)] = True
    free = max(0, min(count, scores.shape[-1]) - int(chosen.sum()))
    order = scores.masked_fill(chosen, -math.inf).sort(descending=True, stable=True).indices
    # Forced tokens sort behind every finite score; a score of -inf may stand among them, hence the filter.
    order = order[~chosen[order]]
    chosen[order[:free]] = True
    return chosen.nonzero().flatten()


def edges(tokens: int, sinks: int, window: int) -> Tensor:
    """Indices of the first ``sinks`` and the last ``window`` of ``tokens``.

    >>> edges(10, 2, 3).tolist(), edges(3, 2, 3).tolist()
    ([0, 1, 7, 8, 9], [0, 1, 2])
    """
    return torch.tensor(sorted(set(range(min(sinks, tokens))) | set(range(max(0, tokens - window), tokens))), dtype=torch.long)


def cover(scores: Tensor, sizes: Tensor, tokens: int, forced: Sequence[int]) -> Tensor:
    """Sorted numbers of the ``forced`` groups and of the best others, as many as fit whole into ``tokens``.

    scores, sizes: (groups,). Of equal scores the earlier group wins. The choice stops at the first group that does not fit.

    >>> cover(torch.tensor([0.0, 3.0, 2.0, 1.0]), torch.tensor([4, 4, 4, 4]), 12, [3]).tolist()
    [1, 2, 3]
    """
    if torch.isnan(scores).any():
        raise InputError("scores", got="NaN", allowed="numbers", hint="look for NaN in the weights or the states of the model")
    held = set(forced)
    used = sum(int(sizes[i]) for i in held)
    for i in scores.sort(descending=True, stable=True).indices.tolist():
        if i in held:
            continue
        if used + int(sizes[i]) > tokens:
            break
        held.add(i)
        used += int(sizes[i])
    return torch.tensor(sorted(held), device=scores.device)
