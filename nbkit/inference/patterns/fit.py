"""What two rules learn offline from prompts: the sizes of vertical-slash heads and the gates of DuoAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError
from nbkit.inference.parts import Attention
from nbkit.inference.patterns.pattern import Pattern
from nbkit.inference.patterns.probe import check, grouped_scores, probe_attention, probe_sums, shape_of, top_slots
from nbkit.inference.patterns.static import equal_choices
from nbkit.inference.session import attach

__all__ = ["DuoFit", "VerticalSlashFit", "fit_duo_gates", "fit_vertical_slash", "kept_mass"]


class VerticalSlashFit(NamedTuple):
    """table: int64 (layers, heads, 2), columns and diagonals of every head. mass: (layers, heads, choices), share of attention kept."""

    table: Tensor
    mass: Tensor
    choices: tuple[tuple[int, int], ...]


def kept_mass(
    q: Tensor, k: Tensor, choices: Sequence[tuple[int, int]], *, scaling: float | None = None, sinks: int = 4, window: int = 64, probe: int = 64,
    rows: int = 256,
) -> Tensor:
    """Share of the attention of ``rows`` rows spread over the prompt that a vertical-slash pattern of each size keeps: (heads, choices).

    The columns and diagonals come from the last ``probe`` rows; the mass is measured on rows beyond the window, which no A-shape covers.

    >>> q = torch.zeros(1, 1, 100, 4)
    >>> kept_mass(q, q, [(0, 0), (100, 100)], sinks=0, window=10)[0].round(decimals=3)
    tensor([0.2510, 1.0000])
    """
    heads, count, keys = shape_of(q, k, square=True)
    columns, diagonals = probe_sums(probe_attention(q, k, rows=probe, scaling=scaling), window=window)
    at = torch.linspace(min(window, keys - 1), keys - 1, min(rows, keys), device=q.device).round().long().unique()
    scores = grouped_scores(q[0, :, at].float() * (q.shape[-1] ** -0.5 if scaling is None else scaling), k[0].float())
    distance = at[:, None] - torch.arange(keys, device=q.device)
    attention = scores.masked_fill_(distance < 0, -torch.inf).softmax(-1)
    kept = []
    for v, s in choices:
        lines = {"columns": top_slots(columns, v, first=sinks), "slashes": top_slots(diagonals, s, first=window)}
        pattern = Pattern(heads, window=window, sinks=sinks, **lines)
        kept.append((attention * pattern.mask(count, only=at)).sum((1, 2)) / len(at))
    return torch.stack(kept, 1)


class _Search(Attention):
    """Dense attention that measures every choice on the way."""

    def __init__(self, measure: Callable[[Tensor, Tensor, float], Tensor]):
        self.measure, self.mass = measure, {}

    def attend(self, run, layer, q, k, v, scaling):
        self.mass[layer] = self.measure(q, k, scaling)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)


def fit_vertical_slash(
    model: Any, prompts: Sequence[Tensor], *, choices: Sequence[tuple[int, int]] | None = None, sinks: int = 4, window: int = 64,
    probe: int = 64, rows: int = 256,
) -> VerticalSlashFit:
    """Give each head the (columns, diagonals) sizes, out of ``choices`` of equal sum, that keep most of its attention mass.

    prompts: one or more int64 (tokens,) or (1, tokens); the mass is averaged over them, all read densely. Equal sums mean nearly equal
    density: a column at place j costs N - j pairs and a diagonal at distance t costs N - t. choices: default ``equal_choices()``.

    Raises: InputError without prompts or with a negative size.
    Source: Jiang et al. 2024 (MInference), algorithm 1, kernel-aware search; its public search uses one prompt and scores only rows
    from 2,500 on, which leaves none in a short prompt.
    """
    choices = tuple((int(v), int(s)) for v, s in (equal_choices() if choices is None else choices))
    if not choices or min(min(c) for c in choices) < 0:
        raise InputError("choices", got=choices, allowed="one or more pairs of counts >= 0")
    prompts = [prompts] if isinstance(prompts, Tensor) else list(prompts)
    if not prompts:
        raise InputError("prompts", got="none", allowed="one or more")
    total = None
    for ids in prompts:
        search = _Search(lambda q, k, scaling: kept_mass(q, k, choices, scaling=scaling, sinks=sinks, window=window, probe=probe, rows=rows))
        with torch.no_grad(), attach(model, attention=search):
            model(torch.as_tensor(ids).view(1, -1), logits_to_keep=1)
        mass = torch.stack([search.mass[layer] for layer in sorted(search.mass)])
        total = mass if total is None else total + mass
    mass = total / len(prompts)
    return VerticalSlashFit(torch.tensor(choices)[mass.argmax(-1).cpu()], mass, choices)


class DuoFit(NamedTuple):
    """gates: float32 (layers, heads) in [0, 1]. losses: distillation loss of every step."""

    gates: Tensor
    losses: list[float]


class _Gated(Attention):
    """gate * dense + (1 - gate) * A-shape for every head, differentiable in the gates."""

    def __init__(self, gates: Tensor, sinks: int, window: int):
        self.gates, self.sinks, self.window = gates, sinks, window

    def attend(self, run, layer, q, k, v, scaling):
        gates = self.gates[layer].repeat_interleave(q.shape[1] // self.gates.shape[1])[None, :, None, None].to(q.dtype)
        mask = Pattern(1, window=self.window, sinks=self.sinks).mask(q.shape[2]).to(q.device)
        full = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        stream = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
        return gates * full + (1 - gates) * stream


def fit_duo_gates(
    model: Any, prompts: Sequence[tuple[Tensor, int]], *, steps: int = 100, lr: float = 0.02, sparsity: float = 0.05, sinks: int = 4,
    window: int = 64, per: str = "kv", log: Callable[[str], None] | None = None,
) -> DuoFit:
    """Train one gate a head so that gated attention gives the last hidden states of dense attention while the gates go to 0.

    prompts: (ids (tokens,), rows): the loss is the mean squared error of the last hidden state over the last ``rows`` rows, those that
    write the answers of a passkey text; ``sparsity`` weighs the mean gate. Prompts are taken in turn, one a step. The weights stay as
    they are. per: "kv" (as published) or "query" heads. Adam; gates start at 1 and are clamped to [0, 1] after each step.

    Raises: InputError without prompts, for rows outside the prompt, for another ``per``.
    Source: Xiao et al. 2024 (DuoAttention), section 2.2: 2,000 steps, lr .02, L1 weight .05, 10 passkeys in a text.
    """
    check("steps", steps, "size")
    if per not in ("kv", "query"):
        raise InputError("per", got=per, allowed='"kv" or "query"')
    prompts = [(torch.as_tensor(ids).view(1, -1), rows) for ids, rows in prompts]
    if not prompts or not all(1 <= rows <= ids.shape[1] for ids, rows in prompts):
        raise InputError("prompts", got=[rows for _, rows in prompts], allowed="one or more (ids, rows), 1 <= rows <= tokens")
    config = model.config.get_text_config(decoder=True)
    heads = config.num_key_value_heads if per == "kv" else config.num_attention_heads
    gates = torch.ones(config.num_hidden_layers, heads, device=model.device, requires_grad=True)
    optimizer = torch.optim.Adam([gates], lr=lr)
    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    targets: dict[int, Tensor] = {}
    losses = []
    try:
        for step in range(steps):
            which = step % len(prompts)
            ids, rows = prompts[which]
            if which not in targets:
                with torch.no_grad():
                    targets[which] = model.base_model(ids, use_cache=False).last_hidden_state[:, -rows:]
            with attach(model, attention=_Gated(gates, sinks, window)):
                hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, -rows:]
            loss = (hidden - targets[which]).float().pow(2).mean()
            optimizer.zero_grad()
            (loss + sparsity * gates.mean()).backward()
            optimizer.step()
            with torch.no_grad():
                gates.clamp_(0, 1)
            losses.append(float(loss.detach()))
            if log is not None:
                log(f"step {step + 1}/{steps}: loss {losses[-1]:.4f}, mean gate {float(gates.detach().mean()):.3f}")
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return DuoFit(gates.detach().clone(), losses)
