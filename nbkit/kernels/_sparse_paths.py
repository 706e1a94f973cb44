"""The torch paths of sparse_attention: tiles of gathered keys on the CPU, a masked path for gradients, other devices and non-finite input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad

_SCORES = 2**22  # scores held at once by the masked path
_TILE_ROWS, _SLASH_ROWS = 64, 32  # rows of a tile; a lone slash costs each row as many keys as the tile has rows, so tiles are smaller there
_WHOLE_ROWS = 128  # rows of a block of the heads that are masked
_GATHERED = 2**12  # keys gathered at once: the copies stay in the cache
_BIAS = 2**20  # mask values held at once
_LOOSE = 0.85  # tiles padded to a common number of keys have at least this share of it
_CROWDED = 0.6  # a head whose tiles would gather more than this share of the keys before them is masked instead
_FLAGS = 2**23  # (tile, key) flags held at once


class Pattern(NamedTuple):
    """What the rows see, as in sparse_attention."""

    window: int
    sinks: int
    dense_rows: int
    columns: torch.Tensor | None
    slashes: torch.Tensor | None
    blocks: torch.Tensor | None
    block: int


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, by the path that fits the input."""
    batch, heads, rows, dim = queries.shape
    tokens, value_dim = keys.shape[2], values.shape[3]
    if not (batch and heads and rows):
        return queries.new_zeros(batch, heads, rows, value_dim), queries.new_zeros(batch, heads, rows, dtype=_lse_dtype(queries))
    tensors = (queries, keys, values)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # The fused kernel adds the mask to the logits: NaN stays NaN behind a mask, so such input goes the other way.
    if differentiated or queries.device.type != "cpu" or not all(bool(t.sum(dtype=_lse_dtype(t)).isfinite()) for t in (keys, values)):
        return masked(queries, keys, values, scaling, pattern)
    # In half precision the fused kernel takes a coarser exponential and is no faster.
    dtype, (queries, keys, values) = queries.dtype, (tensor.to(_lse_dtype(tensor)) for tensor in tensors)
    queries, keys, values = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (queries, keys, values))
    if value_dim != dim:  # the fused kernel wants one size; zeros add nothing to a dot product
        queries, keys, values = (pad(tensor, (0, max(dim, value_dim) - tensor.shape[3])) for tensor in (queries, keys, values))
    last = rows if max(pattern.window, pattern.sinks) >= tokens else min(pattern.dense_rows, rows)
    parts = []
    if last < rows:
        path = _banded if pattern.slashes is None and pattern.blocks is None else _tiled
        parts.append(path(queries[:, :, :rows - last], keys[:, :, :tokens - last], values[:, :, :tokens - last], scaling, pattern))
    if last:
        parts.append(_dense(queries[:, :, rows - last:], keys, values, scaling))
    out, lse = (torch.cat(pair, 2) if len(pair) > 1 else pair[0] for pair in zip(*parts, strict=True))
    return out[..., :value_dim].contiguous().to(dtype), lse.contiguous()


def _lse_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _fused(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool = False,
           bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, causal, attn_mask=bias, scale=scaling)


def _dense(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every key up to the row: the square of the last keys, merged with the keys before it."""
    rows, past, group = queries.shape[2], keys.shape[2] - queries.shape[2], queries.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    out, lse = _fused(queries, keys[:, :, past:], values[:, :, past:], scaling, causal=rows > 1)
    if not past:
        return out, lse
    earlier, earlier_lse = _fused(queries, keys[:, :, :past], values[:, :, :past], scaling)
    return _merged(out, lse, earlier, earlier_lse)


def _merged(one: torch.Tensor, one_lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys as attention over both, written to `one`; a set without keys has log-sum-exp -inf."""
    total = torch.logaddexp(one_lse, other_lse)
    return one.mul_((one_lse - total).exp_()[..., None]).addcmul_(other, (other_lse - total).exp_()[..., None]), total


def by_unit(tensor: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """(batch or 1, heads or a divisor, ...) -> (batch * heads, ...)."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1).expand(batch, heads, *tensor.shape[2:]).reshape(batch * heads, *tensor.shape[2:])


def _named(pattern: Pattern, batch: int, heads: int, tokens: int) -> torch.Tensor | None:
    """Keys that every later row of a head sees, (batch * heads, tokens), or None."""
    named = (torch.arange(tokens) < pattern.sinks).expand(batch * heads, tokens) if pattern.sinks else None
    if pattern.columns is not None:
        columns = by_unit(membership(pattern.columns, tokens), batch, heads)
        named = columns if named is None else named | columns
    return named


def _banded(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Window, sinks and columns: the keys near a tile of rows are a slice, and the columns before that slice are a prefix of one sorted list."""
    batch, heads, rows, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    named = _named(pattern, batch, heads, tokens)
    if named is not None and bool(named.all()):
        return _dense(queries, keys, values, scaling)
    size, tiles = _TILE_ROWS, -(-rows // _TILE_ROWS)
    # A slice of whole vectors runs a quarter faster than one that is a key shorter.
    span = -(-(size + pattern.window - 1) // 16) * 16
    q = queries if rows == tiles * size else pad(queries, (0, 0, 0, tiles * size - rows))
    q = q.reshape(batch * kv_heads, -1, tiles, size, dim)
    flat = [tensor.reshape(batch * kv_heads, tokens, dim) for tensor in (keys, values)]
    out, lse = (part.flatten(0, 1) for part in _near(q, *flat, scaling, pattern.window, span, tokens - rows, named))
    if named is not None:
        far = _far(q.flatten(0, 1), *flat, scaling, tokens - rows - span + size, named)
        out, lse = _merged(out, lse, *far) if far is not None else (out, lse)
    return out.view(batch, heads, -1, dim)[:, :, :rows], lse.view(batch, heads, -1)[:, :, :rows]


def _near(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int, span: int, first: int,
          named: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every tile over the slice of `span` keys that ends with its last row: shape of q, (pairs, group, tiles, size, dim)."""
    pairs, group, tiles, size, dim = q.shape
    before, after = span - size, first + tiles * size - k.shape[1]
    slices = [pad(tensor, (0, 0, before, after))[:, first:].unfold(1, span, size).transpose(2, 3) for tensor in (k, v)]
    apart = torch.arange(size)[:, None] + before - torch.arange(span)
    zero = q.new_zeros(size, span)
    causal, band = zero.masked_fill(apart < 0, -math.inf), zero.masked_fill((apart < 0) | (apart >= window), -math.inf)
    if named is not None:
        padded = pad(named, (before, after))[:, first:]
        shown = q.new_zeros(padded.shape).masked_fill_(~padded, -math.inf).unfold(1, span, size).view(pairs, group, tiles, 1, span)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    step = max(1, _BIAS // (pairs * size * span))
    for start in range(0, tiles, step):
        part = slice(start, min(start + step, tiles))
        count = part.stop - start
        # Slices of the first tiles begin before the first key.
        outside = torch.arange(start, part.stop)[:, None, None] * size + first - before + torch.arange(span) < 0
        for member in range(group):
            bias = band if named is None else torch.maximum(band, shown[:, member, part]).add_(causal)
            if start * size + first < before:
                bias = bias.masked_fill(outside, -math.inf)
            out[:, member, part], lse[:, member, part] = _fused(q[:, member, part], slices[0][:, part], slices[1][:, part], scaling,
                                                                bias=bias.expand(pairs, count, size, span))
    return out, lse


def _far(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, first: int,
         named: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of every tile over the named keys before its slice, which starts at key `first` in the first tile; None when there are none."""
    units, tiles, size, dim = q.shape
    tokens, group = k.shape[1], units // k.shape[0]
    begins = (first + torch.arange(tiles) * size).clamp_(0, tokens)
    before = pad(named.cumsum(1), (1, 0))[:, begins]  # (units, tiles)
    most = before[:, -1]
    if not bool(most.any()):
        return None
    out, lse = torch.zeros_like(q), q.new_full((units, tiles, size), -math.inf)
    order = most.argsort(descending=True, stable=True)
    sizes = most[order].tolist()
    here = 0
    while here < units and sizes[here]:
        until = here + 1
        while until < units and sizes[until] >= _LOOSE * sizes[here]:
            until += 1
        unit = order[here:until]
        spots = named[unit, :int(begins[-1])].nonzero()[:, 1]
        starts = pad(most[unit].cumsum(0), (1, 0))[:-1]
        place = spots[(starts[:, None] + torch.arange(sizes[here])).clamp_max_(len(spots) - 1)] + (unit // group * tokens)[:, None]
        columns = [tensor.reshape(-1, dim).index_select(0, place.flatten()).view(1, len(unit), -1, dim) for tensor in (k, v)]
        seen = before[unit]
        for tile, (least, count) in enumerate(zip(*(bound.tolist() for bound in seen.aminmax(dim=0)), strict=True)):
            if not count:
                continue
            bias = None
            if least < count:
                unused = torch.arange(count) >= seen[:, tile, None]
                bias = q.new_zeros(unused.shape).masked_fill_(unused, -math.inf)[None, :, None].expand(-1, -1, size, -1)
            got, got_lse = _fused(q[unit, tile][None], columns[0][:, :, :count], columns[1][:, :, :count], scaling, bias=bias)
            if not least:
                got_lse = got_lse.masked_fill((seen[:, tile] == 0)[None, :, None], -math.inf)
            out[unit, tile], lse[unit, tile] = got[0], got_lse[0]
        here = until
    return out, lse


class _Tiles(NamedTuple):
    """The pattern as tables for tiles of `size` rows; a unit is one (batch, head)."""

    size: int
    count: int  # tiles of a unit
    first: int  # key index at which the first row stands
    tokens: int
    reach: torch.Tensor  # (1 or units, ...) flags by distance from the last row of a tile, far to near, then `tokens` times False: the tile sees it
    named: torch.Tensor | None  # (units, tokens): keys that every later row sees
    blocks: torch.Tensor | None  # (units, row blocks, key blocks)
    block: int
    bias: torch.Tensor  # (lines, size): 0 or -inf for the rows of a tile; lines by distance, then keys seen from a row on, then nothing
    lines: int  # lines by distance of one unit
    window: int  # the window when there are no slashes: then all units share their lines by distance; else 0
    last: torch.Tensor  # (tiles,): key index at which the last row of a tile stands


def _divisor(pattern: Pattern, wanted: int) -> int:
    """Rows of a tile: a divisor of the block, so that a key of `blocks` is seen by all rows of a tile or by none."""
    return wanted if pattern.blocks is None else max(divisor for divisor in range(1, wanted + 1) if pattern.block % divisor == 0)


def _tiled(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Each tile (a block of rows of one head) gathers the keys that one of its rows sees; tiles with about equally many keys run together."""
    batch, heads, rows, dim = queries.shape
    group, tokens = heads // keys.shape[1], keys.shape[2]
    tiles = _tables(pattern, (batch, heads, rows, tokens), queries.dtype)
    size, units = tiles.size, batch * heads
    # A view of transposed queries, as transformers hands them over, stays one where nothing is padded.
    q = pad(queries, (0, 0, 0, tiles.count * size - rows)).reshape(units, tiles.count, size, dim).contiguous()
    k, v = (tensor.reshape(-1, dim) for tensor in (keys, values))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    step = max(1, _FLAGS // (tiles.count * tokens))
    for first in range(0, units, step):
        unit = torch.arange(first, min(first + step, units))
        flags = _flags(tiles, unit)
        spent = flags.sum((1, 2))
        crowded = spent > _CROWDED * (tiles.last + 1).clamp(max=tokens).sum()
        if bool(crowded.any()):
            _whole(queries.flatten(0, 1), keys, values, scaling, pattern, unit[crowded], (out.flatten(1, 2)[:, :rows], lse.flatten(1, 2)[:, :rows]))
        if not bool(crowded.all()):
            for item, index, unused in _gathered(tiles, unit[~crowded], flags[~crowded]):
                place = (index + (item // tiles.count // group * tokens)[:, None]).flatten()
                shape = (len(item), 1, index.shape[1], dim)
                out_here, lse_here = _fused(q.view(-1, 1, size, dim)[item], k.index_select(0, place).view(shape),
                                            v.index_select(0, place).view(shape), scaling, bias=_bias(tiles, item, index, unused))
                out.view(-1, size, dim)[item], lse.view(-1, size)[item] = out_here[:, 0], lse_here[:, 0]
    return out.view(batch, heads, -1, dim)[:, :, :rows], lse.view(batch, heads, -1)[:, :, :rows]


def _whole(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, pattern: Pattern, unit: torch.Tensor,
           results: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Heads (batch * heads numbers `unit`) whose tiles would gather about as much as there is: all keys up to a block of rows, under a mask."""
    (units, rows, _), (batch, kv_heads, tokens) = q.shape, keys.shape[:3]
    heads = units // batch
    k, v = (tensor.flatten(0, 1)[unit // (heads // kv_heads)][None] for tensor in (keys, values))
    size = _divisor(pattern, _WHOLE_ROWS)
    apart = (torch.arange(tokens) < pattern.window).expand(len(unit), tokens)
    if pattern.slashes is not None:
        apart = apart | by_unit(membership(pattern.slashes, tokens), batch, heads)[unit]
    # Far to near, then the keys after the row: line x of the windows over it belongs to the row at key tokens - 1 - x.
    by_distance = pad(q.new_zeros(apart.shape).masked_fill_(~apart.flip(1), -math.inf), (0, size), value=-math.inf)
    named = _named(pattern, batch, heads, tokens)
    named = None if named is None else q.new_zeros(len(unit), 1, tokens).masked_fill_(~named[unit, None], -math.inf)
    blocks = None if pattern.blocks is None else by_unit(pattern.blocks, batch, heads)[unit]
    future = q.new_zeros(size, size).masked_fill_(torch.ones(size, size, dtype=torch.bool).triu(1), -math.inf)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        start, end = tokens - rows + first, tokens - rows + last
        bias = by_distance.unfold(1, end, 1)[:, tokens - end:tokens - start].flip(1)
        if named is not None:
            torch.maximum(bias, named[..., :end], out=bias)
        if blocks is not None:
            squares = blocks[:, first // pattern.block].repeat_interleave(pattern.block, 1)[:, None, :end]
            bias.masked_fill_(squares, 0.0)
        bias[..., start:] += future[:last - first, :last - first]
        out, lse = _fused(q[unit, first:last][None], k[:, :, :end], v[:, :, :end], scaling, bias=bias[None])
        results[0][unit, first:last], results[1][unit, first:last] = out[0], lse[0]


def _tables(pattern: Pattern, shape: tuple[int, int, int, int], dtype: torch.dtype) -> _Tiles:
    batch, heads, rows, tokens = shape
    size = _divisor(pattern, _TILE_ROWS if pattern.slashes is None else _SLASH_ROWS)
    apart = torch.arange(tokens)[None] < pattern.window
    if pattern.slashes is not None:
        apart = apart | by_unit(membership(pattern.slashes, tokens), batch, heads)
    padded = pad(apart, (size, size - 1))
    # A tile sees the key at a distance from its last row when one of its rows stands at a visible distance.
    summed = padded.cumsum(1)
    near = summed[:, size:] > summed[:, :tokens + size - 1]
    lines = padded[:, 1:].unfold(1, size, 1)
    later = torch.ones(size, size, dtype=torch.bool).triu()  # line k: seen from row k of the tile on
    sees = torch.cat([lines.reshape(-1, size), later, later.new_zeros(1, size)])
    return _Tiles(size, -(-rows // size), tokens - rows, tokens, pad(near.flip(1), (0, tokens)),
                  _named(pattern, batch, heads, tokens), None if pattern.blocks is None else by_unit(pattern.blocks, batch, heads), pattern.block,
                  torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -math.inf), lines.shape[1],
                  pattern.window if pattern.slashes is None else 0, tokens - rows + torch.arange(1, -(-rows // size) + 1) * size - 1)


def _flags(tiles: _Tiles, unit: torch.Tensor) -> torch.Tensor:
    """Does a row of a tile see the key: (units, tiles, tokens)."""
    spread = tiles.reach if tiles.window else tiles.reach[unit]
    flags = spread.unfold(1, tiles.tokens, 1)[:, tiles.tokens + tiles.size - 2 - tiles.last]
    at_most = torch.arange(tiles.tokens) <= tiles.last[:, None]
    if tiles.named is not None:
        flags = flags | (tiles.named[unit, None] & at_most)
    if tiles.blocks is not None:
        squares = tiles.blocks[unit[:, None], torch.arange(tiles.count) * tiles.size // tiles.block]
        flags = flags | (squares.repeat_interleave(tiles.block, 2)[..., :tiles.tokens] & at_most)
    return flags.expand(len(unit), -1, -1)


def _gathered(tiles: _Tiles, unit: torch.Tensor, flags: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tiles that run together: their numbers (items,), their keys at the end of (items, most), and which slots before these are unused."""
    number = (unit[:, None] * tiles.count + torch.arange(tiles.count)).flatten()
    flags = flags.reshape(-1, tiles.tokens)
    counts, order = flags.sum(1).sort(descending=True, stable=True)
    found = flags[order].nonzero()[:, 1]
    ends, sizes = counts.cumsum(0), counts.tolist()
    here = 0
    while here < len(sizes):
        most, until = -(-sizes[here] // 16) * 16, here + 1
        while until < len(sizes) and sizes[until] >= _LOOSE * most and (until + 1 - here) * most <= _GATHERED:
            until += 1
        back = torch.arange(most, 0, -1)
        yield number[order[here:until]], found[(ends[here:until, None] - back).clamp_min_(0)], back > counts[here:until, None]
        here = until


def _bias(tiles: _Tiles, item: torch.Tensor, index: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
    """0 where a row of a tile sees a key and -inf elsewhere, (items, 1, size, keys)."""
    unit, tile = item // tiles.count, item % tiles.count
    seen = _seen_by_all(tiles, unit, tile, index)
    start, later = (tiles.first + tile * tiles.size)[:, None], len(tiles.bias) - tiles.size - 1
    if tiles.window and int(tiles.last[tile].max()) < tiles.tokens:
        # No slashes: the last slots are the slice from the window of the first row to the last row, the same distances in all tiles.
        near = min(index.shape[1], tiles.size + tiles.window - 1)
        line = torch.arange(near - tiles.size, -tiles.size, -1) + tiles.size - 1
        band = tiles.bias.index_select(0, line).t()
        future = tiles.bias[later:later + tiles.size].t()
        row = tiles.bias.new_zeros(seen.shape).masked_fill_(~seen | unused, -math.inf)[:, None]
        bias = row.expand(-1, tiles.size, -1).contiguous()
        torch.maximum(bias[..., -near:], band, out=bias[..., -near:])
        bias[..., -tiles.size:] += future[:, -index.shape[1]:]
        return bias.masked_fill_(unused[:, None], -math.inf)[:, None] if bool(unused[:, -near:].any()) else bias[:, None]
    # One line of the table for each key.
    line = start - index + (tiles.size - 1)
    if not tiles.window:
        line += (unit * tiles.lines)[:, None]
    line = torch.where(seen, (later - start + index).clamp_min_(later), line).masked_fill_(unused, len(tiles.bias) - 1)
    return tiles.bias.index_select(0, line.flatten()).view(*line.shape, tiles.size).transpose(1, 2)[:, None]


def _seen_by_all(tiles: _Tiles, unit: torch.Tensor, tile: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Is a key a sink, a column or in a block of the tile."""
    seen = torch.zeros_like(index, dtype=torch.bool) if tiles.named is None else tiles.named[unit[:, None], index]
    if tiles.blocks is not None:
        seen = seen | tiles.blocks[unit[:, None], (tile * tiles.size // tiles.block)[:, None], index // tiles.block]
    return seen


def masked(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """The differentiable path that also keeps NaN in unseen keys and values away: the full mask, a block of rows at a time."""
    batch, heads, rows, dim = queries.shape
    kv_heads, tokens, value_dim = *keys.shape[1:3], values.shape[3]
    group, dtype = heads // kv_heads, _lse_dtype(queries)
    if not (batch and heads and rows):
        return queries.new_zeros(batch, heads, rows, value_dim), queries.new_zeros(batch, heads, rows, dtype=dtype)
    k, v = keys.to(dtype), values.to(dtype)
    bad = ~v.isfinite()
    spoilt = bool(bad.any())
    if spoilt:
        v = v.masked_fill(bad, 0.0)
    step = max(1, _SCORES // (batch * heads * tokens))
    outs, lses = [], []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        end = tokens - rows + stop
        sees = mask(pattern, start, stop, rows, tokens, (batch, heads, kv_heads), keys.device)
        q = (queries[:, :, start:stop].to(dtype) * scaling).reshape(batch, kv_heads, group * (stop - start), dim)
        logits = (q @ k[:, :, :end].transpose(-1, -2)).view(batch, heads, stop - start, end).masked_fill(~sees, -math.inf)
        lse = logits.logsumexp(-1)
        share = (logits - lse[..., None]).exp().view(batch, kv_heads, -1, end)
        out = share @ v[:, :, :end]
        if spoilt:
            touched = sees.expand(batch, heads, -1, -1).reshape(batch, kv_heads, -1, end).to(dtype) @ bad[:, :, :end].to(dtype)
            out = out.masked_fill(touched > 0, math.nan)
        outs.append(out.view(batch, heads, stop - start, value_dim))
        lses.append(lse)
    return torch.cat(outs, 2).to(queries.dtype), torch.cat(lses, 2)


def mask(pattern: Pattern, start: int, stop: int, rows: int, tokens: int, sizes: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Which keys before the end of rows start..stop each of them sees: bool, broadcastable to (batch, heads, stop - start, end)."""
    batch, heads, _ = sizes
    end = tokens - rows + stop
    key = torch.arange(end, device=device)
    at = torch.arange(end - (stop - start), end, device=device)[:, None]
    sees = ((at - key < pattern.window) | (key < pattern.sinks) | (at >= tokens - pattern.dense_rows))[None, None]
    if pattern.columns is not None:
        sees = sees | membership(pattern.columns, tokens)[..., :end].repeat_interleave(heads // pattern.columns.shape[1], 1)[:, :, None]
    if pattern.slashes is not None:
        table = membership(pattern.slashes, tokens)
        sees = sees | table[..., (at - key).clamp_min(0)]
    if pattern.blocks is not None:
        row = torch.arange(start, stop, device=device)
        sees = sees | pattern.blocks[:, :, (row // pattern.block)[:, None], key // pattern.block]
    return sees & (key <= at)


def membership(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Index lists (..., m) as flags (..., size); numbers outside 0..size-1 are left out."""
    inside = (indices >= 0) & (indices < size)
    flags = torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool, device=indices.device)
    return flags.scatter_(-1, torch.where(inside, indices, size), True)[..., :size]
