"""Patterns that do not look at the values, and the vertical-slash pattern that looks at the last rows.

The published sizes belong to prompts of about 128 thousand tokens. The defaults here keep their shares at N = 2,048 (128 + 3,968 of
131,072 tokens become 4 + 64), so that one setting serves prompts of 512 to 4,096 tokens; the number of last rows follows the length
of a question (64), which does not shrink with the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference.patterns.pattern import Pattern
from nbkit.inference.patterns.probe import check, probe_attention, probe_sums, shape_of, top_slots

__all__ = ["a_shape", "dense", "equal_choices", "triangle_mix", "tri_shape", "vertical_slash"]


def dense(q: Tensor, k: Tensor) -> Pattern:
    """Every row reads every earlier key.

    queries: (1, heads, n, d); keys: (1, kv_heads, T, d).

    >>> q = torch.zeros(1, 2, 8, 4)
    >>> dense(q, q).density(8)
    1.0
    """
    heads, _, keys = shape_of(q, k)
    return Pattern(heads, window=keys)


def a_shape(q: Tensor, k: Tensor, *, sinks: int = 4, window: int = 64) -> Pattern:
    """Each row reads the first ``sinks`` keys and the ``window`` keys up to itself.

    >>> q = torch.zeros(1, 1, 4, 4)
    >>> a_shape(q, q, sinks=1, window=1).mask(4)[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]

    Raises: InputError for a window below 1, a batch, NaN values.
    Source: Xiao et al. 2024 (StreamingLLM) as used for prefill in MInference: 128 sinks and a window of 3,968 at 128 thousand tokens.
    """
    check("sinks", sinks, "count")
    check("window", window, "size")
    return Pattern(shape_of(q, k)[0], window=window, sinks=sinks)


def tri_shape(q: Tensor, k: Tensor, *, sinks: int = 4, window: int = 64, last: int = 64) -> Pattern:
    """A-shape whose last ``last`` rows read everything.

    >>> q = torch.zeros(1, 1, 4, 4)
    >>> tri_shape(q, q, sinks=0, window=1, last=2).mask(4)[0].int().tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]

    Source: SCBench (Li et al. 2024), Tri-shape, n_last = 100.
    """
    check("sinks", sinks, "count")
    check("window", window, "size")
    check("last", last, "count")
    return Pattern(shape_of(q, k)[0], window=window, sinks=sinks, dense_rows=last)


def triangle_mix(
    q: Tensor, k: Tensor, *, layer: int, layers: int, dense_layers: int | None = None, sinks: int = 4, window: int = 64, last: int = 64
) -> Pattern:
    """Dense in the first ``dense_layers`` layers (default half of them), Tri-shape above.

    >>> q = torch.zeros(1, 1, 256, 4)
    >>> [round(triangle_mix(q, q, layer=layer, layers=2).density(256), 2) for layer in (0, 1)]
    [1.0, 0.76]

    Source: He et al. 2025 (TriangleMix): dense below layer 16 of 32, then sinks 8, window 512, last 128 at 128 thousand tokens.
    """
    dense_layers = layers // 2 if dense_layers is None else dense_layers
    if not 0 <= layer < layers:
        raise InputError("layer", got=layer, allowed=f"0..{layers - 1}")
    if not 0 <= dense_layers <= layers:
        raise InputError("dense_layers", got=dense_layers, allowed=f"0..{layers}")
    return dense(q, k) if layer < dense_layers else tri_shape(q, k, sinks=sinks, window=window, last=last)


def vertical_slash(
    q: Tensor, k: Tensor, *, scaling: float | None = None, v: int | Sequence[int] | Tensor = 64, s: int | Sequence[int] | Tensor = 96,
    sinks: int = 4, window: int = 64, probe: int = 64, dense_rows: int = 0,
) -> Pattern:
    """A-shape plus the ``v`` columns and ``s`` diagonals that hold most attention of the last ``probe`` rows outside the A-shape.

    v, s: counts, one for all heads or one a head. Sinks and local diagonals are kept beside the caps and do not use them up; columns
    are ranked by the mass they receive from rows at a distance of at least ``window``. Diagonals near T are seen by few probe rows.

    >>> q = torch.zeros(1, 1, 300, 4)
    >>> pattern = vertical_slash(q, q, v=300, s=300)
    >>> bool(pattern.mask(300).sum() == 300 * 301 // 2), round(pattern.density(300, probe=False), 3)
    (True, 1.0)

    Source: Jiang et al. 2024 (MInference), vertical-slash heads: first 30 columns and last 100 diagonals forced, last_q = 64.
    """
    check("sinks", sinks, "count")
    check("window", window, "size")
    heads, rows, keys = shape_of(q, k)
    counts = []
    for name, value in (("v", v), ("s", s)):
        value = torch.as_tensor(value)
        if value.is_floating_point() or value.numel() not in (1, heads) or int(value.min()) < 0:
            raise InputError(name, got=value.tolist(), allowed=f"a count >= 0, or {heads} of them, one a head")
        counts.append(value.reshape(-1).to(q.device))
    columns, diagonals = probe_sums(probe_attention(q, k, rows=probe, scaling=scaling), window=window)
    return Pattern(
        heads, window=window, sinks=sinks, dense_rows=dense_rows, columns=top_slots(columns, counts[0], first=sinks),
        slashes=top_slots(diagonals, counts[1], first=window), probe_pairs=float(heads * min(probe, rows) * keys),
    )


def equal_choices(budget: int = 160) -> tuple[tuple[int, int], ...]:
    """Return (columns, diagonals) pairs with the same sum, from slash-heavy to column-heavy: what an offline search chooses from.

    >>> equal_choices(160)
    ((8, 152), (16, 144), (32, 128), (64, 96), (96, 64), (128, 32), (152, 8))

    Source: MInference's search offers (30, 800), (100, 750), (500, 700), (3500, 100) and others of equal kernel time.
    """
    check("budget", budget, "size")
    columns = [round(budget * share) for share in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)]
    return tuple((v, budget - v) for v in columns)
