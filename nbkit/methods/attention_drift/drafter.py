"""The drafters: one decoder layer that reads the target's hidden states and then its own, step after step.

Notation of the whole package: tokens x_0 .. x_{N-1}; g_t the fused features of the target at position t. A chain that starts at t reads the pairs
(x_{t+1}, g_t), (x_{t+2}, f_1), (x_{t+3}, f_2), ... at positions t, t+1, t+2, ... where f_k is what step k feeds back, and its step k predicts
x_{t+k+1}. Sources: EAGLE-3 (arXiv 2503.01840); the switches `norm_output` and `fc_norm` are the remedy of arXiv 2605.09992 (EAGLE 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import InputError, UnsupportedModelError

from .attention import KV, attend, attend_diagonal, visible
from .config import DrafterConfig, check_layers, embedding_of, is_int
from .intervention import NOTHING, Intervention
from .layers import DecoderLayer, RMSNorm, initialise


@dataclass(frozen=True)
class StepOutput:
    """One step of a drafter over T positions.

    Attributes:
        logits: (batch, T, draft vocabulary), or None where they were not asked for.
        out: (batch, T, d) raw output o of the layer. normed: y, its final norm, from which logits are read. feedback: what the next step reads.
        attention: (batch, heads, T, keys) weights, or None where they were not asked for.
        kv: keys and values including this step's. keys: (batch, kv_heads, T, head_dim) of this step alone, rotated.
    """

    logits: Tensor | None
    out: Tensor
    normed: Tensor
    feedback: Tensor
    attention: Tensor | None
    kv: KV | None
    keys: Tensor


class Drafter(nn.Module):
    """What EAGLE drafters and MTP heads share; use `EagleDrafter` or `MTPHead`.

    The target's embedding and head are read through `bind`, without gradients; they are neither parameters nor part of the state dict.
    """

    kind = ""

    def __init__(self, cfg: DrafterConfig, model=None, vocab_ids=None, seed: int = 0):
        super().__init__()
        if cfg.kind != self.kind:
            raise InputError("kind of drafter", got=cfg.kind, allowed=self.kind, hint="build(cfg.to_dict()) picks the class")
        self.cfg = cfg
        self.fc = nn.Linear(cfg.feature_size if self.kind == "eagle" else 2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(cfg)])
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self._switch_modules()
        initialise(self, seed)
        self._target: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._head: tuple[Tensor, Tensor | None] | None = None
        self._own: tuple[Tensor | None, Tensor | None] = (None, None)
        self.d2t = self.t2d = None
        if cfg.draft_vocab is not None:
            del self.d2t, self.t2d
            self.register_buffer("d2t", torch.zeros(cfg.draft_vocab, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(cfg.vocab_size, dtype=torch.bool))
        if vocab_ids is not None:
            self.set_vocab(vocab_ids)
        if model is not None:
            self.bind(model)
        self.register_load_state_dict_post_hook(_after_loading)

    def _switch_modules(self) -> None:
        """Modules that only some switches need."""

    # ---- the target's part ----

    @property
    def vocab_ids(self) -> Tensor:
        """Target ids (draft vocabulary,) that the drafter can propose, in the order of its logits.

        Raises: InputError while a reduced vocabulary has not been chosen.
        """
        if self.cfg.draft_vocab is None:
            return torch.arange(self.cfg.vocab_size, device=self.fc.weight.device)
        if not self.vocab_chosen:
            raise InputError("draft vocabulary", got="not chosen yet", allowed=f"{self.cfg.draft_vocab} target ids", hint="drafter.set_vocab(ids)")
        return torch.arange(self.cfg.draft_vocab, device=self.d2t.device) + self.d2t

    @property
    def vocab_chosen(self) -> bool:
        """Whether the drafter knows which tokens it can propose; always true for the full vocabulary."""
        return self.cfg.draft_vocab is None or bool(self.t2d.any())

    def set_vocab(self, ids) -> None:
        """Choose the reduced vocabulary: ``cfg.draft_vocab`` different target ids.

        Raises: InputError for a wrong number, duplicates or ids the target does not have.
        """
        cfg = self.cfg
        ids = torch.as_tensor(ids, dtype=torch.int64).flatten().sort().values
        if cfg.draft_vocab is None:
            raise InputError("vocab_ids", got=f"{len(ids)} ids", allowed="None, because cfg.draft_vocab is None")
        if len(ids) != cfg.draft_vocab or len(ids.unique()) != len(ids) or ids[0] < 0 or ids[-1] >= cfg.vocab_size:
            got = f"{len(ids)} ids, {len(ids.unique())} different, from {int(ids.min())} to {int(ids.max())}" if len(ids) else "no ids"
            raise InputError("vocab_ids", got=got, allowed=f"{cfg.draft_vocab} different ids within 0..{cfg.vocab_size - 1}")
        self.d2t.copy_(ids.to(self.d2t.device) - torch.arange(len(ids), device=self.d2t.device))
        self.t2d.zero_()
        self.t2d[ids] = True
        self._slice_head()

    def bind(self, model) -> Drafter:
        """Attach the embedding and the head of the target ``model`` (frozen); returns the drafter.

        Raises: InputError when hidden size, vocabulary or number of layers do not fit.
        """
        embed, head = self.check_target(model)
        bias = getattr(head, "bias", None)
        self._target = (embed.detach(), head.weight.detach(), None if bias is None else bias.detach())
        self._slice_head()
        return self

    def check_target(self, model) -> tuple[Tensor, nn.Module]:
        """Embedding table and head of ``model``, if it is one that this drafter fits.

        Raises: InputError when hidden size, vocabulary or number of layers do not fit; UnsupportedModelError without a head.
        """
        embed, head = embedding_of(model), model.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError("target", got="no output embedding", allowed="a causal language model")
        cfg = self.cfg
        if embed.shape[0] != cfg.vocab_size or head.weight.shape[0] != cfg.vocab_size:
            raise InputError("vocabulary of the target", got=embed.shape[0], allowed=f"{cfg.vocab_size}, which the drafter was made for")
        if embed.shape[1] != cfg.hidden_size or head.weight.shape[1] != cfg.hidden_size:
            raise InputError("hidden size of the target", got=embed.shape[1], allowed=f"{cfg.hidden_size}, which the drafter was made for")
        check_layers(cfg.aux_layers, model.config.get_text_config().num_hidden_layers)
        return embed, head

    def use_own(self, *, embed: Tensor | None = None, head: Tensor | None = None) -> None:
        """Read embeddings (vocabulary, d) and head (draft vocabulary, d) from these frozen tables instead of the target's.

        Raises: InputError for tables of another shape.
        """
        rows = self.cfg.draft_vocab or self.cfg.vocab_size
        for name, table, size in (("embed", embed, self.cfg.vocab_size), ("head", head, rows)):
            if table is not None and tuple(table.shape) != (size, self.cfg.hidden_size):
                raise InputError(name, got=tuple(table.shape), allowed=(size, self.cfg.hidden_size))
        self._own = (None if embed is None else embed.detach(), None if head is None else head.detach())
        self._slice_head()

    def _slice_head(self) -> None:
        self._head = None
        if self._own[1] is not None:
            self._head = (self._own[1], None)
        elif self._target is not None and self.vocab_chosen:
            _, weight, bias = self._target
            if self.cfg.draft_vocab is not None:
                ids = self.vocab_ids.to(weight.device)
                weight, bias = weight[ids], None if bias is None else bias[ids]
            self._head = (weight, bias)

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Weight (draft vocabulary, d) and bias of the target's head, cut to the draft vocabulary.

        Raises: InputError before `bind`.
        """
        if self._head is None and self._target is None:
            raise InputError("drafter", got="no target", allowed="a drafter that is bound to one", hint="drafter.bind(model)")
        if self._head is None:
            raise InputError("draft vocabulary", got="not chosen yet", allowed=f"{self.cfg.draft_vocab} target ids", hint="drafter.set_vocab(ids)")
        return self._head

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings (..., d) of target ids, from the target's own table.

        Raises: InputError before `bind`.
        """
        table = self._own[0] if self._own[0] is not None else self._target[0] if self._target is not None else None
        if table is None:
            raise InputError("drafter", got="no target", allowed="a drafter that is bound to one", hint="drafter.bind(model)")
        return F.embedding(tokens, table).to(self.fc.weight.dtype)

    def logits(self, normed: Tensor) -> Tensor:
        """Scores over the draft vocabulary of states that the final norm has already seen; no second norm is applied."""
        weight, bias = self.head
        return F.linear(normed, weight.to(normed.dtype), None if bias is None else bias.to(normed.dtype))

    def propose(self, logits: Tensor) -> Tensor:
        """Target ids of the best tokens, (...) for logits (..., draft vocabulary)."""
        best = logits.argmax(-1)
        return best if self.cfg.draft_vocab is None else best + self.d2t[best]

    def pick_features(self, aux: Tensor | None, last: Tensor | None) -> Tensor:
        """The one of the target's auxiliary streams (.., 3d) and last state (.., d) that this kind of drafter reads.

        Raises: InputError when it is missing or has another width.
        """
        chosen = last if self.kind == "mtp" else aux
        if chosen is None or chosen.shape[-1] != self.cfg.feature_size:
            got = None if chosen is None else tuple(chosen.shape)
            raise InputError("features", got=got, allowed=f"{self.cfg.feature_size} channels", hint="target_features(model, ids, cfg.aux_layers)")
        return chosen

    # ---- one step ----

    def fuse(self, feats: Tensor) -> Tensor:
        """g (..., d): the state that the first step of a chain reads, from features of the target."""
        raise NotImplementedError

    def _inputs(self, embeds: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention and start of the residual."""
        raise NotImplementedError

    def _finish(self, z: Tensor, residual: Tensor, mixed: Tensor, logits: bool) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """(logits, o, y, feedback) after the attention."""
        layer = self.layers[0]
        r = residual + layer.self_attn.finish(z, mixed)
        o = r + layer.mlp(layer.post_attention_layernorm(r))
        y = self.norm(o)
        return (self.logits(y) if logits else None), o, y, (y if self.cfg.norm_output else o)

    def step(
        self, embeds: Tensor, f: Tensor, positions: Tensor, kv: KV | None = None, *, key_mask: Tensor | None = None,
        attention: bool = False, logits: bool = True, limits: tuple[int | None, int] | None = None,
    ) -> StepOutput:
        """Read T pairs of token embedding and state; used for the prompt (T pairs at once) and for every step of a chain (T = 1).

        Args:
            embeds, f: (batch, T, d). positions: (T,) or (batch, T), of the pairs. kv: what earlier calls returned.
            key_mask: (batch, T), False where a pair is padding. attention, logits: whether to return them.
            limits: (window, carried sink) in place of the configuration's.
        """
        z, residual = self._inputs(embeds, f)
        positions = positions.expand(len(z), -1) if positions.ndim == 2 else positions[None].expand(len(z), -1)
        attn = self.layers[0].self_attn
        q, (k, v) = attn.query(z, positions), attn.key_value(z, positions)
        held = KV(k, v, positions, key_mask) if kv is None else kv.extend(k, v, positions, key_mask)
        window, sink = limits or (self.cfg.window, self.cfg.carry_sink)
        plain = kv is None and key_mask is None and window is None
        mask = None if plain and not attention else visible(positions, held.positions, window, sink, held.mask)
        mixed, weights = attend(q, held.keys, held.values, mask, weights=attention)
        out = self._finish(z, residual, mixed, logits)
        return StepOutput(*out, weights, held, k)

    # ---- all chain starts at once ----

    def ttt(
        self, tokens: Tensor, feats: Tensor, depth: int, *, starts: Tensor | None = None, key_mask: Tensor | None = None,
        positions: Tensor | None = None, intervention: Intervention = NOTHING, attention: bool = False, logits: bool = True,
    ) -> list[StepOutput]:
        """Training-time test: ``depth`` chain steps for every start t = 0 .. N-2 in parallel, with teacher tokens and the drafter's own states.

        Step j of start t reads (x_{t+j}, f_{j-1}) at position t+j-1 and attends to the pairs of the text up to t (step 1) and to its own chain
        (the diagonal), exactly as an inference chain started at t. Starts with t + j > N - 1 have no token and read id 0: leave them out.

        Args:
            tokens: (batch, N). feats: (batch, N or N-1, channels) of the target, as `fuse` takes them. starts: (batch, S) the starts to unroll;
                default all N-1 of them. key_mask: (batch, N-1), False where the pair (x_{t+1}, g_t) is padding. positions: (batch, N-1) of the
                pairs; default 0, 1, 2, ... intervention: see `Intervention`. attention: return weights (batch, heads, S, N-1 + own chain keys).

        Returns:
            One `StepOutput` per step over the starts, without kv.

        Raises: InputError for a depth below 1, fewer than two tokens, or features or starts that do not fit.

        Source: arXiv 2503.01840, section 3.2 (training-time test).
        """
        pairs = self._check_ttt(tokens, feats, depth, starts)
        window, sink = intervention.limits(self.cfg)
        base = torch.arange(pairs, device=tokens.device)[None] if positions is None else positions
        index = torch.arange(pairs, device=tokens.device).expand(len(tokens), -1) if starts is None else starts

        def take(x: Tensor) -> Tensor:
            return x if starts is None else x.gather(1, starts[..., None].expand(-1, -1, x.shape[-1]))

        at = base if starts is None else base.expand(len(tokens), -1).gather(1, starts)
        attn = self.layers[0].self_attn
        fused = self.fuse(feats[:, :pairs])
        z, residual = self._inputs(self.embed(tokens[:, 1:]), fused)
        text_k, text_v = attn.key_value(z, base)
        z, residual, g = take(z), take(residual), take(fused)
        k = text_k if starts is None else text_k.gather(2, starts[:, None, :, None].expand(-1, text_k.shape[1], -1, text_k.shape[3]))
        # Noise in step 1 must not reach the text's own keys, which other starts read; then the disturbed pair joins the diagonal instead.
        apart = bool(intervention.noise)
        padded, f = F.pad(tokens, (0, depth)), g
        chain_k: list[Tensor] = []
        chain_v: list[Tensor] = []
        steps: list[StepOutput] = []
        for j in range(1, depth + 1):
            here = at + j - 1
            if j > 1 or apart:
                embeds = self.embed(padded.gather(1, index + j))
                z, residual = self._inputs(*intervention.disturb(embeds, intervention.pinned(f, g), j))
                k, v = attn.key_value(z, here)
                chain_k.append(k)
                chain_v.append(v)
            q = attn.query(z, here)
            if chain_k:
                text = visible(here, base, window, sink, key_mask, before=at if apart else at + 1)
                own = _own_chain(here, len(chain_k), window, sink)
                mixed, weights = attend_diagonal(q, text_k, text_v, chain_k, chain_v, text, own, weights=attention)
            else:
                plain = starts is None and key_mask is None and window is None and positions is None and not attention
                mixed, weights = attend(q, text_k, text_v, None if plain else visible(at, base, window, sink, key_mask), weights=attention)
            score, o, y, f = self._finish(z, residual, mixed, logits)
            steps.append(StepOutput(score, o, y, f, weights, None, k))
        return steps

    def _check_ttt(self, tokens: Tensor, feats: Tensor, depth: int, starts: Tensor | None) -> int:
        """Number of pairs of the text, after checking what `ttt` was given."""
        if not is_int(depth) or depth < 1:
            raise InputError("depth", got=depth, allowed=">= 1")
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise InputError("tokens", got=tuple(tokens.shape), allowed="(batch, N) with N >= 2")
        batch, pairs = len(tokens), tokens.shape[1] - 1
        if feats.ndim != 3 or len(feats) != batch or feats.shape[1] not in (pairs, pairs + 1):
            raise InputError("feats", got=tuple(feats.shape), allowed=f"({batch}, {pairs} or {pairs + 1}, {self.cfg.feature_size})")
        if starts is not None and (starts.ndim != 2 or len(starts) != batch or starts.numel() == 0 or starts.min() < 0 or starts.max() >= pairs):
            raise InputError("starts", got=tuple(starts.shape), allowed=f"({batch}, S) numbers within 0..{pairs - 1}")
        return pairs


class EagleDrafter(Drafter):
    """EAGLE-3 drafter: three fused streams of the target, one decoder layer on [embedding; state], frozen target embedding and head.

    Args:
        cfg: see `DrafterConfig`. model: target to bind to. vocab_ids: the reduced vocabulary. seed: of the initial weights; the same seed gives
            the same weights in every variant that has them.

    Source: arXiv 2503.01840; `norm_output`, `fc_norm`: arXiv 2605.09992.

    >>> cfg = DrafterConfig(hidden_size=8, intermediate_size=16, heads=2, kv_heads=1, head_dim=4, aux_layers=(0, 1, 2), vocab_size=10)
    >>> drafter = EagleDrafter(cfg)
    >>> drafter.fuse(torch.zeros(1, 5, 24)).shape, sorted(drafter.state_dict())[0]
    (torch.Size([1, 5, 8]), 'fc.weight')
    """

    kind = "eagle"

    def _switch_modules(self) -> None:
        cfg = self.cfg
        self.fc_norm = nn.ModuleList([RMSNorm(cfg.hidden_size, cfg.rms_eps) for _ in range(3)]) if cfg.fc_norm else None
        self.input_norm = RMSNorm(3 * cfg.hidden_size, cfg.rms_eps) if cfg.norm_before_fc else None

    def fuse(self, feats: Tensor) -> Tensor:
        """g (..., d) from the three auxiliary streams (..., 3d) of the target."""
        if feats.shape[-1] != self.cfg.feature_size:
            raise InputError("feats", got=tuple(feats.shape), allowed=f"(..., {self.cfg.feature_size}), three streams of the target")
        if self.fc_norm is not None:
            feats = torch.cat([norm(part) for norm, part in zip(self.fc_norm, feats.chunk(3, -1), strict=True)], -1)
        elif self.input_norm is not None:
            feats = self.input_norm(feats)
        # Under autocast the product is bfloat16; the residual stream that starts here stays in the drafter's own type.
        return self.fc(feats.to(self.fc.weight.dtype)).to(self.fc.weight.dtype)

    def _inputs(self, embeds: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        hidden = layer.hidden_norm(f)
        return torch.cat([layer.input_layernorm(embeds), hidden], -1), hidden if self.cfg.norm_before_residual else f


class MTPHead(Drafter):
    """Multi-token-prediction head: one decoder layer shared over steps on W [norm(embedding); norm(state)], target's last state first.

    Same interface as `EagleDrafter`; `fuse` takes the target's last (final-normed) state (..., d).

    >>> cfg = DrafterConfig(hidden_size=8, intermediate_size=16, heads=2, kv_heads=1, head_dim=4, aux_layers=(0, 1, 2), vocab_size=10,
    ...                     norm_output=True, kind="mtp")
    >>> MTPHead(cfg).fuse(torch.ones(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    kind = "mtp"

    def _switch_modules(self) -> None:
        self.pre_fc_norm_embedding = RMSNorm(self.cfg.hidden_size, self.cfg.rms_eps)
        self.pre_fc_norm_hidden = RMSNorm(self.cfg.hidden_size, self.cfg.rms_eps)

    def fuse(self, feats: Tensor) -> Tensor:
        """The target's last state itself, (..., d)."""
        if feats.shape[-1] != self.cfg.feature_size:
            raise InputError("feats", got=tuple(feats.shape), allowed=f"(..., {self.cfg.feature_size}), the target's last state")
        return feats.to(self.fc.weight.dtype)

    def _inputs(self, embeds: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(f)], -1)).to(self.fc.weight.dtype)
        return self.layers[0].input_layernorm(x), x


def build(config: Mapping[str, Any]) -> Drafter:
    """The drafter of a saved configuration, not yet bound to its target (what `nbkit.loaders.load_model` calls).

    >>> cfg = DrafterConfig(hidden_size=8, intermediate_size=16, heads=2, kv_heads=1, head_dim=4, aux_layers=(0, 1, 2), vocab_size=10)
    >>> build(cfg.to_dict()).cfg == cfg
    True
    """
    cfg = DrafterConfig.from_dict(config)
    return (MTPHead if cfg.kind == "mtp" else EagleDrafter)(cfg)


def _after_loading(drafter: Drafter, _) -> None:
    """The loaded weights may bring another reduced vocabulary, for which the head has to be cut again."""
    drafter._slice_head()


def _own_chain(here: Tensor, held: int, window: int | None, sink: int) -> Tensor | None:
    """Which of its own chain's ``held`` keys each start sees, (batch or 1, starts, held); the last one is itself."""
    if window is None:
        return None
    back = torch.arange(held - 1, -1, -1, device=here.device)
    return (back < window) | (here[..., None] - back < sink)
