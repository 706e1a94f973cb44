"""From one layer's queries and keys to its pattern: profile, choose, and write down what each head reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nbkit import kernels
from nbkit.errors import InputError
from nbkit.inference.patterns import Pattern

from .augment import Choice, choose
from .config import AdaCalConfig
from .metrics import check_probe


class LayerPlan(NamedTuple):
    """The pattern of one layer with what led to it: the profile (batch axis of 1) and the choice of heads."""

    pattern: Pattern
    profile: kernels.HeadProfile
    choice: Choice


def plan_layer(
    queries: Tensor, keys: Tensor, cfg: AdaCalConfig, *, task: str, scaling: float | None = None, fallback: bool = False,
) -> LayerPlan:
    """Profile the heads of a layer from its last rows and choose what each of them reads.

    queries: (heads, rows, head_dim) and keys: (kv_heads, tokens, head_dim), rotated, the rows being the last ones; task: one of the three
    classes; scaling: default 1/sqrt(head_dim); fallback: activate the best head when none is active. The probe is charged in the pattern.
    Raises: InputError for a probe longer than the rows, NaN, or an unknown task.
    """
    if queries.dim() != 3 or keys.dim() != 3:
        got = f"{tuple(queries.shape)} and {tuple(keys.shape)}"
        raise InputError("queries and keys", got=got, allowed="(heads, rows, dim) and (kv_heads, tokens, dim)")
    heads, rows, dim = queries.shape
    tokens = keys.shape[1]
    check_probe(cfg.probe, rows - cfg.shift)
    scaling = dim**-0.5 if scaling is None else scaling
    probe = queries[:, rows - cfg.shift - cfg.probe : rows - cfg.shift]
    seen = keys[:, : tokens - cfg.shift]
    profile = kernels.head_profile(probe[None], seen[None], scaling, sinks=cfg.sinks, window=cfg.window, top=cfg.top)
    spread = (profile.entropy[0], profile.concentration[0])
    choice = choose(probe, seen, scaling, profile.mid[0], cfg, task, fallback=fallback, spread=spread)
    dense_rows = [(cfg.probe + cfg.shift) if flag else 0 for flag in choice.dense.tolist()]
    pattern = Pattern(
        heads, window=cfg.window, sinks=cfg.sinks, dense_rows=dense_rows, columns=choice.columns, slashes=choice.slashes,
        probe_pairs=float(heads * cfg.probe * (tokens - cfg.shift)), info={"task": task, "active": choice.active.tolist()},
    )
    return LayerPlan(pattern, profile, choice)


def build_mask(
    queries: Tensor, keys: Tensor, cfg: AdaCalConfig, *, task: str = "general", scaling: float | None = None, fallback: bool = False,
) -> Tensor:
    """The pattern of one layer as a mask, bool (heads, rows, tokens): the pure form of AdaCal, for tests and pictures.

    Arguments as in :func:`plan_layer`.

    >>> import torch
    >>> q, k = torch.randn(2, 16, 8), torch.randn(1, 16, 8)
    >>> cfg = AdaCalConfig(sinks=1, window=4, probe=4, tau=1.0)
    >>> int(build_mask(q, k, cfg)[0, 9].sum())
    5
    """
    return plan_layer(queries, keys, cfg, task=task, scaling=scaling, fallback=fallback).pattern.mask(queries.shape[1], keys.shape[1])
