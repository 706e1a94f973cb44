"""Bench rows of sparse attention on this machine: one layer of 9 heads (3 key heads of size 64) against dense attention, as density falls."""

from __future__ import annotations

import functools

from nbkit import bench

HEADS, KV_HEADS, DIM, WINDOW, SINKS = 9, 3, 64, 64, 4
TOKENS, DENSITIES = (1024, 2048, 4096), (1.0, 0.5, 0.3, 0.2, 0.1)


@functools.lru_cache(maxsize=1)
def _layer(tokens: int):
    import torch

    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, tokens, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))


def _pattern(tokens: int, density: float) -> dict:
    """Window, sinks and as many random columns of its own for every head as bring its visible pairs to this share of the causal ones."""
    import torch

    if density == 1.0:
        return {"window": tokens}
    key = torch.arange(tokens)
    # Rows that see key j only because it is a column stand at j + window or later.
    gain = (tokens - WINDOW - key).clamp_min(0).double()
    missing = density * tokens * (tokens + 1) / 2 - float((tokens - key).clamp(max=WINDOW).sum()) - float(gain[:SINKS].sum())
    generator = torch.Generator().manual_seed(1)
    orders = [SINKS + torch.randperm(tokens - SINKS, generator=generator) for _ in range(HEADS)]
    counts = [int((gain[order].cumsum(0) < missing).sum()) for order in orders]
    columns = torch.full((1, HEADS, max(1, *counts)), -1)
    for head, (order, count) in enumerate(zip(orders, counts, strict=True)):
        columns[0, head, :count] = order[:count]
    return {"window": WINDOW, "sinks": SINKS, "columns": columns}


def _sees(tokens: int, pattern: dict, head: int):
    import torch

    key = torch.arange(tokens)
    apart = key[:, None] - key
    sees = (apart < pattern["window"]) | (key < pattern.get("sinks", 0))
    if "columns" in pattern:
        sees |= torch.isin(key, pattern["columns"][0, head])
    return sees & (apart >= 0)


def _check(tokens: int, density: float) -> None:
    """Two heads equal dense attention under the full mask, and the pattern has the density that the row says (where the window alone has less)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from nbkit import kernels

    queries, keys, values = _layer(tokens)
    pattern = _pattern(tokens, density)
    out, _ = kernels.sparse_attention(queries, keys, values, DIM**-0.5, **pattern)
    for head in (0, HEADS - 1):
        sees = _sees(tokens, pattern, head)
        share, floor = (float(one.sum()) / (tokens * (tokens + 1) / 2) for one in (sees, _sees(tokens, {"window": WINDOW, "sinks": SINKS}, head)))
        assert abs(share - max(density, floor)) < 0.02, f"density {share:.3f}"
        group = head * KV_HEADS // HEADS
        want = scaled_dot_product_attention(queries[:, head], keys[:, group], values[:, group], attn_mask=sees)
        torch.testing.assert_close(out[:, head], want, atol=1e-5, rtol=1e-4)


def _time(tokens: int, density: float) -> bench.Measured:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from nbkit import kernels

    queries, keys, values = _layer(tokens)
    pattern = _pattern(tokens, density)
    with torch.inference_mode():
        return bench.compare(lambda: kernels.sparse_attention(queries, keys, values, DIM**-0.5, **pattern),
                             lambda: scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True))


ROWS = tuple(bench.Row(f"sparse attention, {tokens} tokens, density {density:g}", unit="ms", baseline="dense causal attention",
                       measure=functools.partial(_time, tokens, density), check=functools.partial(_check, tokens, density))
             for tokens in TOKENS for density in DENSITIES if density > 0.15 or tokens > 1024)
