"""Drafting in a chain, and what happens along it: magnitude, direction, and where attention goes, beside a control without a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError

from .attention import KV, rotate
from .drafter import Drafter, StepOutput
from .intervention import NOTHING, Intervention, rms

RECENT = 8
"""Keys that count as recent: the query's own and those before it, a fixed number, because a share of the chain alone grows with its length."""


@dataclass(frozen=True)
class Chain:
    """What one chain per row did; every tensor is (batch, depth) unless it says otherwise, column k - 1 holding step k.

    Attributes:
        proposed: the drafter's best target ids. fed: the ids that the steps read.
        rms: magnitude of the state that is fed back. rms_out: of the layer's raw output o.
        cos: cosine of the fed-back state with the state that the step read. update: |o - f| / |f|.
        key_cos: cosine of the step's key with the key before it, positions taken out, mean over heads; NaN where there is none before.
        sink, recent_text, chain, prompt: shares of attention that sum to 1: the sink position; other text among the last `RECENT` keys; the chain's
            own k keys (from the pair at which it starts); all other text. recent: the last `RECENT` keys but the sink, text or chain.
        entropy: of the attention weights, in nats. All shares are means over heads.
        attention: one (batch, heads, keys) tensor per step. sink_at: (batch,) the sink's key. fused_rms: (batch,) magnitude of g at the start.
        logits: (batch, depth, draft vocabulary).
    """

    proposed: Tensor
    fed: Tensor
    rms: Tensor
    rms_out: Tensor
    cos: Tensor
    update: Tensor
    key_cos: Tensor
    sink: Tensor
    recent: Tensor
    recent_text: Tensor
    chain: Tensor
    prompt: Tensor
    entropy: Tensor
    attention: list[Tensor]
    sink_at: Tensor
    fused_rms: Tensor
    logits: Tensor


MEASURES = ("rms", "rms_out", "cos", "update", "key_cos", "sink", "recent", "recent_text", "chain", "prompt", "entropy")
"""Names of the per-step measures of a `Chain`."""


def roll(
    drafter: Drafter, kv: KV | None, token: Tensor, g: Tensor, position: Tensor, depth: int, pick: Callable[[int, Tensor], Tensor], *,
    intervention: Intervention = NOTHING, attention: bool = False,
) -> list[StepOutput]:
    """The bare chain: ``depth`` steps of one pair each, on top of the text's ``kv``.

    Args:
        kv: of the pairs before the start, or None. token: (batch, 1) and g: (batch, 1, d), the pair at which the chain starts.
        position: (batch, 1) of that pair. pick: (step, logits (batch, 1, draft vocabulary)) -> next token (batch, 1).
    """
    f, out = g, []
    limits = intervention.limits(drafter.cfg)
    for j in range(1, depth + 1):
        embeds, state = intervention.disturb(drafter.embed(token), intervention.pinned(f, g), j)
        step = drafter.step(embeds, state, position + j - 1, kv, attention=attention, limits=limits)
        out.append(step)
        f, kv = step.feedback, step.kv
        if j < depth:
            token = pick(j, step.logits)
    return out


@torch.no_grad()
def draft_chain(
    drafter: Drafter, tokens: Tensor, feats: Tensor, depth: int = 8, *, teacher: Tensor | None = None, key_mask: Tensor | None = None,
    intervention: Intervention = NOTHING, recent: int = RECENT,
) -> Chain:
    """Draft ``depth`` tokens after each row of ``tokens`` and measure every step.

    Args:
        tokens: (batch, N) text, the last token without features yet. feats: (batch, >= N - 1, channels) of the target, see `target_features`.
        teacher: (batch, >= depth - 1) tokens to feed instead of the drafter's own proposals. key_mask: (batch, N - 1), False at left padding.
        intervention: noise, pinned magnitude, window; the text's own keys are never disturbed.

    Raises: InputError for depth 0, a text of one token, or features that do not fit.

    Source: arXiv 2605.09992 (measures); arXiv 2503.01840 (chain).
    """
    tokens, feats, positions = _text(drafter, tokens, feats, depth, key_mask)
    starts = tokens.shape[1] - 1
    if teacher is not None and (teacher.ndim != 2 or len(teacher) != len(tokens) or teacher.shape[1] < depth - 1):
        raise InputError("teacher", got=tuple(teacher.shape), allowed=f"({len(tokens)}, >= {depth - 1})")
    fused = drafter.fuse(feats)
    limits = intervention.limits(drafter.cfg)
    text = None
    if starts > 1:
        mask = None if key_mask is None else key_mask[:, :-1]
        embeds = drafter.embed(tokens[:, 1:-1])
        text = drafter.step(embeds, fused[:, :-1], positions[:, :-1], key_mask=mask, attention=True, logits=False, limits=limits)
    picked: list[Tensor] = []

    def pick(step: int, logits: Tensor) -> Tensor:
        picked.append(drafter.propose(logits) if teacher is None else teacher[:, step - 1 : step])
        return picked[-1]

    kv, g = (None if text is None else text.kv), fused[:, -1:]
    steps = roll(drafter, kv, tokens[:, -1:], g, positions[:, -1:], depth, pick, intervention=intervention, attention=True)
    sink_at = sink_position(None if text is None else text.attention, len(tokens), tokens.device)
    columns = _columns(drafter, steps, None if text is None else text.keys[:, :, -1:], g, sink_at, starts - 1, positions[:, -1:], recent)
    return Chain(
        proposed=torch.cat([drafter.propose(s.logits) for s in steps], 1), fed=torch.cat([tokens[:, -1:], *picked], 1),
        attention=[s.attention[:, :, -1] for s in steps], sink_at=sink_at, fused_rms=rms(g)[:, 0],
        logits=torch.cat([s.logits for s in steps], 1), **columns,
    )


@torch.no_grad()
def prefill_control(
    drafter: Drafter, tokens: Tensor, feats: Tensor, depth: int, *, sink_at: Tensor | None = None, key_mask: Tensor | None = None,
    intervention: Intervention = NOTHING, recent: int = RECENT,
) -> Chain:
    """The same measures on the same tokens without a chain: every pair carries the target's true features.

    A share on "the chain" rises in any case as the chain gets longer; only what it exceeds this control by is drift. Step k is the pair at the
    position of the chain's step k, and the same positions count as sink, recent and chain. Noise and pin do not apply, windows do.

    Args:
        tokens: (batch, N + depth - 1): the text and the tokens that the chain read after it. feats: (batch, >= N + depth - 2, channels).
        sink_at: (batch,) of the chain; default the argmax over the pairs before the chain.

    Raises: InputError for depth 0, a text of one token, or features that do not fit.
    """
    tokens, feats, positions = _text(drafter, tokens, feats, depth, key_mask)
    starts = tokens.shape[1] - depth
    if starts < 1:
        raise InputError("tokens", got=tuple(tokens.shape), allowed=f"(batch, >= {depth + 1}) for depth {depth}")
    g = drafter.fuse(feats)
    limits = intervention.limits(drafter.cfg)
    out = drafter.step(drafter.embed(tokens[:, 1:]), g, positions, key_mask=key_mask, attention=True, limits=limits)
    first = starts - 1
    if sink_at is None:
        sink_at = sink_position(out.attention[:, :, :first, :first] if first else None, len(tokens), tokens.device)
    steps = []
    for k in range(depth):
        row = slice(first + k, first + k + 1)
        weights = out.attention[:, :, row, : first + k + 1]
        steps.append(StepOutput(out.logits[:, row], out.out[:, row], out.normed[:, row], out.feedback[:, row], weights, None, out.keys[:, :, row]))
    before = out.keys[:, :, first - 1 : first] if first else None
    reads = [g[:, first + k : first + k + 1] for k in range(depth)]
    columns = _columns(drafter, steps, before, g[:, first : first + 1], sink_at, first, positions[:, first : first + 1], recent, reads)
    return Chain(
        proposed=torch.cat([drafter.propose(s.logits) for s in steps], 1), fed=tokens[:, -depth:], attention=[s.attention[:, :, -1] for s in steps],
        sink_at=sink_at, fused_rms=rms(g[:, first]), logits=torch.cat([s.logits for s in steps], 1), **columns,
    )


def sink_position(attention: Tensor | None, batch: int = 1, device=None) -> Tensor:
    """The key with the largest mean attention over all queries and heads of a prefill, (batch,); 0 where there is no text before the chain.

    Args:
        attention: (batch, heads, T, T) causal weights.

    >>> weights = torch.tensor([[1.0, 0, 0], [0.2, 0.8, 0], [0.1, 0.7, 0.2]])
    >>> sink_position(weights[None, None]).tolist()
    [1]
    """
    if attention is None:
        return torch.zeros(batch, dtype=torch.int64, device=device)
    return attention.float().mean((1, 2)).argmax(-1)


def _text(drafter: Drafter, tokens: Tensor, feats: Tensor, depth: int, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Checked tokens, features of all but the last of them, and positions of the pairs."""
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise InputError("depth", got=depth, allowed=">= 1")
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        hint = "the first token after a prompt of one token comes from the target"
        raise InputError("tokens", got=tuple(tokens.shape), allowed="(batch, N) with N >= 2", hint=hint)
    starts = tokens.shape[1] - 1
    if feats.ndim != 3 or len(feats) != len(tokens) or feats.shape[1] < starts:
        raise InputError("feats", got=tuple(feats.shape), allowed=f"({len(tokens)}, >= {starts}, {drafter.cfg.feature_size})")
    if key_mask is None:
        return tokens, feats[:, :starts], torch.arange(starts, device=tokens.device).expand(len(tokens), -1)
    if tuple(key_mask.shape) != (len(tokens), starts):
        raise InputError("key_mask", got=tuple(key_mask.shape), allowed=(len(tokens), starts))
    return tokens, feats[:, :starts], (key_mask.long().cumsum(-1) - 1).clamp_min(0)


def _columns(
    drafter: Drafter, steps: list[StepOutput], key_before: Tensor | None, g: Tensor, sink_at: Tensor, first: int, position: Tensor, recent: int,
    reads: list[Tensor] | None = None,
) -> dict[str, Tensor]:
    """All per-step measures as (batch, depth) tensors.

    Args:
        key_before: rotated key of the pair before the chain, or None. first: key index of the pair at which the chain starts.
        reads: the states that the steps read; default g and then each step's feedback.
    """
    columns: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
    theta = drafter.cfg.rope_theta
    last_key = None if key_before is None else rotate(key_before, 1 - position, theta)
    for k, step in enumerate(steps):
        f = reads[k] if reads is not None else g if k == 0 else steps[k - 1].feedback
        key = rotate(step.keys, -(position + k), theta)
        columns["rms"].append(rms(step.feedback)[:, 0])
        columns["rms_out"].append(rms(step.out)[:, 0])
        columns["cos"].append(F.cosine_similarity(step.feedback.float(), f.float(), dim=-1)[:, 0])
        columns["update"].append(((step.out - f).float().norm(dim=-1) / f.float().norm(dim=-1).clamp_min(1e-12))[:, 0])
        columns["key_cos"].append(
            torch.full_like(columns["rms"][-1], float("nan")) if last_key is None
            else F.cosine_similarity(key.float(), last_key.float(), dim=-1).mean((1, 2))
        )
        for name, share in attention_shares(step.attention[:, :, -1], sink_at, first, recent).items():
            columns[name].append(share)
        last_key = key
    return {name: torch.stack(values, 1) for name, values in columns.items()}


def attention_shares(weights: Tensor, sink_at: Tensor, first: int, recent: int = RECENT) -> dict[str, Tensor]:
    """Shares of one query's attention and its entropy in nats, (batch,) each, means over heads.

    Args:
        weights: (batch, heads, keys) summing to 1. sink_at: (batch,). first: first key of the chain. recent: keys that count as recent.

    Raises: InputError for a recent window below 1.

    >>> out = attention_shares(torch.tensor([[[0.4, 0.1, 0.2, 0.3]]]), torch.tensor([0]), first=3, recent=2)
    >>> {name: round(value.item(), 2) for name, value in out.items()}
    {'sink': 0.4, 'recent': 0.5, 'recent_text': 0.2, 'chain': 0.3, 'prompt': 0.1, 'entropy': 1.28}
    """
    if recent < 1:
        raise InputError("recent", got=recent, allowed=">= 1")
    w = weights.float()
    mean = w.mean(1)
    at = torch.arange(w.shape[-1], device=w.device)[None]
    is_sink = at == sink_at[:, None]
    is_recent = (at >= w.shape[-1] - recent) & ~is_sink
    is_chain = (at >= first) & ~is_sink
    sink, late, chain = ((mean * mask).sum(-1) for mask in (is_sink, is_recent, is_chain))
    near = (mean * (is_recent & ~is_chain)).sum(-1)
    entropy = torch.special.entr(w).sum(-1).mean(1)
    return {"sink": sink, "recent": late, "recent_text": near, "chain": chain, "prompt": mean.sum(-1) - sink - near - chain, "entropy": entropy}


def measures(chain: Chain) -> dict[str, Tensor]:
    """The per-step measures of ``chain`` by name, (batch, depth) each."""
    return {f.name: getattr(chain, f.name) for f in fields(chain) if f.name in MEASURES}
