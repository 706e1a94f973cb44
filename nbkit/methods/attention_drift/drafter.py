"""The drafters: one decoder layer that reads the target's hidden states and then its own, step after step.

Notation of the whole package: tokens x_0 .. x_{N-1}; g_t the fused features of the target at position t. A chain that starts at t reads the pairs
(x_{t+1}, g_t), (x_{t+2}, f_1), (x_{t+3}, f_2), ... at positions t, t+1, t+2, ... where f_k is what step k feeds back, and its step k predicts
x_{t+k+1}. Sources: EAGLE-3 (arXiv 2503.01840); the switches `norm_output` and `fc_norm` are the remedy of arXiv 2605.09992 (EAGLE 3.1).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import InputError, UnsupportedModelError

from .attention import KV, attend, attend_diagonal, rotate, visible

KINDS = ("eagle", "mtp")
NOISE_PATHS = ("hidden", "embedding")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape and switches of a drafter.

    Attributes:
        aux_layers: three rising layer numbers, 0-based; the residual stream *after* each of them is read, raw.
        vocab_size: tokens of the target. draft_vocab: tokens the drafter can propose; None means all of them.
        norm_output: feed the normalised state y back instead of the raw one o ("post-norm").
        fc_norm: normalise the three streams separately before they are fused. norm_before_fc: one norm over their concatenation.
        norm_before_residual: the residual of the layer starts from the normalised state.
        gate: multiply the attention output elementwise by a sigmoid gate of the layer's input.
        window: keys that a query sees, counted back from itself; None means all. carry_sink: first positions that stay visible beyond the window.
        kind: ``"eagle"`` or ``"mtp"`` (multi-token-prediction head: reads the target's last state, feedback always normalised).

    Raises: InputError for sizes and switches that do not fit together.

    Source: arXiv 2605.09992; EAGLE 3.1.

    >>> from dataclasses import replace
    >>> base = DrafterConfig(hidden_size=8, intermediate_size=16, heads=2, kv_heads=1, head_dim=4, aux_layers=(0, 1, 2), vocab_size=10)
    >>> base.variant, replace(base, norm_output=True, fc_norm=True).variant, replace(base, gate=True).variant
    ('pre', 'post+fc_norm', 'gate')
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    aux_layers: tuple[int, int, int]
    vocab_size: int
    draft_vocab: int | None = None
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    norm_output: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    gate: bool = False
    window: int | None = None
    carry_sink: int = 0
    kind: str = "eagle"

    def __post_init__(self):
        for name in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size"):
            _positive(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise InputError("kv_heads", got=self.kv_heads, allowed=f"a divisor of heads = {self.heads}")
        if self.head_dim % 2:
            raise InputError("head_dim", got=self.head_dim, allowed="an even number, because rotary positions turn pairs")
        if self.kind not in KINDS:
            raise InputError("kind", got=self.kind, allowed=", ".join(KINDS))
        layers = tuple(self.aux_layers)
        if len(layers) != 3 or any(not _is_int(i) or i < 0 for i in layers) or not layers[0] < layers[1] < layers[2]:
            raise InputError("aux_layers", got=layers, allowed="three rising layer numbers, 0-based", hint="DrafterConfig.from_target picks them")
        object.__setattr__(self, "aux_layers", layers)
        if self.draft_vocab is not None and not (_is_int(self.draft_vocab) and 1 <= self.draft_vocab <= self.vocab_size):
            raise InputError("draft_vocab", got=self.draft_vocab, allowed=f"None or 1..{self.vocab_size}")
        if self.window is not None:
            _positive("window", self.window)
        if not _is_int(self.carry_sink) or self.carry_sink < 0:
            raise InputError("carry_sink", got=self.carry_sink, allowed=">= 0")
        if self.fc_norm and self.norm_before_fc:
            raise InputError("fc_norm and norm_before_fc", got="both", allowed="one of them", hint="fc_norm=True, norm_before_fc=False")
        if self.kind == "mtp" and (self.fc_norm or self.norm_before_fc or self.norm_before_residual or self.gate or not self.norm_output):
            raise InputError(
                "switches of an MTP head", got=self.variant, allowed="norm_output=True and no other switch",
                hint="its inputs and its feedback are normalised by design",
            )

    @classmethod
    def from_target(cls, model, aux_layers=None, draft_vocab: int | None = None, **switches) -> DrafterConfig:
        """Sizes of ``model`` (a causal LM of transformers) with ``switches`` on top.

        Raises: InputError for unknown layers or switches; UnsupportedModelError for a model without the usual sizes.
        """
        config = model.config.get_text_config()
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(switches) - known)
        if unknown:
            raise InputError("switch", got=", ".join(unknown), allowed=", ".join(sorted(known)))
        try:
            heads, hidden = config.num_attention_heads, config.hidden_size
            sizes = dict(
                hidden_size=hidden, heads=heads, kv_heads=getattr(config, "num_key_value_heads", None) or heads,
                head_dim=getattr(config, "head_dim", None) or hidden // heads,
                intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden, rope_theta=_rope_theta(config),
            )
        except AttributeError as error:
            raise UnsupportedModelError("target", got=f"{type(model).__name__}: {error}", allowed="a causal LM of transformers") from error
        layers = default_aux_layers(config.num_hidden_layers) if aux_layers is None else tuple(aux_layers)
        if switches.get("kind") == "mtp":
            switches.setdefault("norm_output", True)
        out = cls(**{**sizes, "aux_layers": layers, "vocab_size": embedding_of(model).shape[0], "draft_vocab": draft_vocab, **switches})
        check_layers(out.aux_layers, config.num_hidden_layers)
        return out

    @property
    def variant(self) -> str:
        """Short name of the switches, e.g. ``pre``, ``post+fc_norm``, ``gate+post``, ``residual-norm``, ``mtp``."""
        if self.kind == "mtp":
            return "mtp"
        parts = [name for on, name in (
            (self.gate, "gate"), (self.norm_before_residual, "residual-norm"), (self.norm_output, "post"),
            (self.fc_norm, "fc_norm"), (self.norm_before_fc, "norm_before_fc"),
        ) if on]
        return "+".join(parts) or "pre"

    @property
    def feature_size(self) -> int:
        """Channels of the target that `fuse` takes: three streams, or the last state for an MTP head."""
        return self.hidden_size * (1 if self.kind == "mtp" else 3)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return {**asdict(self), "aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """Inverse of `to_dict`.

        Raises: InputError for a key that is unknown or missing.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InputError("drafter configuration", got=f"unknown {', '.join(unknown)}", allowed=", ".join(sorted(known)))
        try:
            return cls(**{**values, "aux_layers": tuple(values.get("aux_layers", ()))})
        except TypeError as error:
            raise InputError("drafter configuration", got=str(error), allowed="all sizes of DrafterConfig") from error


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """What is done to a chain while it drafts; the default does nothing.

    Attributes:
        noise: alpha in f <- f + alpha * rms(f) * xi with standard normal xi, drawn anew for every step from ``seed``.
        path: ``"hidden"`` disturbs the state that a step reads, ``"embedding"`` its token embedding.
        pin: scale every fed-back state to the magnitude of the fused features, f <- f * rms(g) / rms(f).
        window, carry_sink: in place of the configuration's own; ``window=0`` switches a window of the configuration off.

    Raises: InputError for a negative noise, an unknown path or a window that means nothing.
    """

    noise: float = 0.0
    path: str = "hidden"
    pin: bool = False
    window: int | None = None
    carry_sink: int | None = None
    seed: int = 0

    def __post_init__(self):
        if not self.noise >= 0:
            raise InputError("noise", got=self.noise, allowed=">= 0")
        if self.path not in NOISE_PATHS:
            raise InputError("path", got=self.path, allowed=", ".join(NOISE_PATHS))
        for name in ("window", "carry_sink"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 0):
                raise InputError(name, got=value, allowed="None or >= 0")

    def limits(self, cfg: DrafterConfig) -> tuple[int | None, int]:
        """Window and carried sink that apply to a drafter with configuration ``cfg``."""
        window = cfg.window if self.window is None else self.window or None
        return window, cfg.carry_sink if self.carry_sink is None else self.carry_sink

    def disturb(self, embeds: Tensor, f: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Embeddings and states of step ``step`` (1, 2, ...) with noise."""
        if not self.noise:
            return embeds, f
        x = f if self.path == "hidden" else embeds
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        xi = torch.randn(x.shape, generator=generator).to(x)
        x = x + self.noise * rms(x)[..., None].to(x.dtype) * xi
        return (embeds, x) if self.path == "hidden" else (x, f)

    def pinned(self, f: Tensor, g: Tensor) -> Tensor:
        """``f`` at the magnitude of the fused features ``g`` if `pin` is set."""
        return f * (rms(g) / rms(f).clamp_min(1e-12))[..., None].to(f.dtype) if self.pin else f


NOTHING = Intervention()


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


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps) with the statistics in float32.

    >>> RMSNorm(2, 0.0)(torch.tensor([3.0, 4.0])).pow(2).mean().item()
    1.0
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the result has the dtype of ``x``."""
        return (F.rms_norm(x.float(), (x.shape[-1],), None, self.eps) * self.weight.float()).to(x.dtype)


class _Attention(nn.Module):
    """Projections of one attention block; what happens between them depends on who calls."""

    def __init__(self, cfg: DrafterConfig, inputs: int):
        super().__init__()
        self.cfg = cfg
        inner = cfg.heads * cfg.head_dim
        self.q_proj = nn.Linear(inputs, inner, bias=False)
        self.k_proj = nn.Linear(inputs, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, cfg.kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, cfg.hidden_size, bias=False)
        self.g_proj = nn.Linear(inputs, inner) if cfg.gate else None

    def qkv(self, z: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, T, head_dim), the first two rotated to ``positions`` (batch or 1, T)."""
        def split(x):
            return x.unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)

        q, k, v = split(self.q_proj(z)), split(self.k_proj(z)), split(self.v_proj(z))
        return rotate(q, positions, self.cfg.rope_theta), rotate(k, positions, self.cfg.rope_theta), v

    def finish(self, z: Tensor, mixed: Tensor) -> Tensor:
        """Output projection of the attended values ``mixed`` (batch, heads, T, head_dim)."""
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            mixed = mixed * torch.sigmoid(self.g_proj(z))
        return self.o_proj(mixed)


class _MLP(nn.Module):
    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """The decoder layer; submodules are named as in EAGLE checkpoints."""

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        eagle = cfg.kind == "eagle"
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        if eagle:
            self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.self_attn = _Attention(cfg, cfg.hidden_size * (2 if eagle else 1))
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.mlp = _MLP(cfg)


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
        self.layers = nn.ModuleList([_Layer(cfg)])
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self._switch_modules()
        _initialise(self, seed)
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
        embed, head = embedding_of(model), model.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError("target", got="no output embedding", allowed="a causal language model")
        cfg = self.cfg
        if embed.shape[0] != cfg.vocab_size or head.weight.shape[0] != cfg.vocab_size:
            raise InputError("vocabulary of the target", got=embed.shape[0], allowed=f"{cfg.vocab_size}, which the drafter was made for")
        if embed.shape[1] != cfg.hidden_size or head.weight.shape[1] != cfg.hidden_size:
            raise InputError("hidden size of the target", got=embed.shape[1], allowed=f"{cfg.hidden_size}, which the drafter was made for")
        check_layers(cfg.aux_layers, model.config.get_text_config().num_hidden_layers)
        bias = getattr(head, "bias", None)
        self._target = (embed.detach(), head.weight.detach(), None if bias is None else bias.detach())
        self._slice_head()
        return self

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
        q, k, v = self.layers[0].self_attn.qkv(z, positions)
        held = KV(k, v, positions, key_mask) if kv is None else kv.extend(k, v, positions, key_mask)
        window, sink = limits or (self.cfg.window, self.cfg.carry_sink)
        plain = kv is None and key_mask is None and window is None
        mask = None if plain and not attention else visible(positions, held.positions, window, sink, held.mask)
        mixed, weights = attend(q, held.keys, held.values, mask, weights=attention)
        out = self._finish(z, residual, mixed, logits)
        return StepOutput(*out, weights, held, k)

    # ---- all chain starts at once ----

    def ttt(
        self, tokens: Tensor, feats: Tensor, depth: int, *, key_mask: Tensor | None = None, positions: Tensor | None = None,
        intervention: Intervention = NOTHING, attention: bool = False, logits: bool = True,
    ) -> list[StepOutput]:
        """Training-time test: ``depth`` chain steps for every start t = 0 .. N-2 in parallel, with teacher tokens and the drafter's own states.

        Step j of start t reads (x_{t+j}, f_{j-1}) at position t+j-1 and attends to the pairs of the text up to t (step 1) and to its own chain
        (the diagonal), exactly as an inference chain started at t. Starts with t + j > N - 1 have no token and read id 0: leave them out.

        Args:
            tokens: (batch, N). feats: (batch, N or N-1, channels) of the target, as `fuse` takes them. key_mask: (batch, N-1), False where the
                pair (x_{t+1}, g_t) is padding. positions: (batch, N-1) of the pairs; default 0, 1, 2, ...
            intervention: see `Intervention`. attention: return weights (batch, heads, N-1, N-1 + own chain keys).

        Returns:
            One `StepOutput` per step over the N-1 starts, without kv.

        Raises: InputError for a depth below 1, fewer than two tokens, or features that do not fit.

        Source: arXiv 2503.01840, section 3.2 (training-time test).
        """
        if not _is_int(depth) or depth < 1:
            raise InputError("depth", got=depth, allowed=">= 1")
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise InputError("tokens", got=tuple(tokens.shape), allowed="(batch, N) with N >= 2")
        starts = tokens.shape[1] - 1
        if feats.ndim != 3 or feats.shape[0] != len(tokens) or feats.shape[1] not in (starts, starts + 1):
            raise InputError("feats", got=tuple(feats.shape), allowed=f"({len(tokens)}, {starts} or {starts + 1}, {self.cfg.feature_size})")
        window, sink = intervention.limits(self.cfg)
        base = torch.arange(starts, device=tokens.device)[None] if positions is None else positions
        g = f = self.fuse(feats[:, :starts])
        # Noise in step 1 must not reach the text's own keys, which other starts read; then the disturbed pair joins the diagonal instead.
        apart = bool(intervention.noise)
        mask = visible(base, base, window, sink, key_mask)
        text_k = text_v = None
        chain_k: list[Tensor] = []
        chain_v: list[Tensor] = []
        steps: list[StepOutput] = []
        for j in range(1, depth + 1):
            shifted = F.pad(tokens[:, j:], (0, max(0, starts - (tokens.shape[1] - j))))[:, :starts]
            embeds, here = self.embed(shifted), base + j - 1
            if j == 1:
                z, residual = self._inputs(embeds, f)
                q, text_k, text_v = self.layers[0].self_attn.qkv(z, here)
                k = text_k
            if j > 1 or apart:
                z, residual = self._inputs(*intervention.disturb(embeds, intervention.pinned(f, g), j))
                q, k, v = self.layers[0].self_attn.qkv(z, here)
                chain_k.append(k)
                chain_v.append(v)
            if chain_k:
                text = visible(here, base, window, sink, key_mask, before=base if apart else base + 1)
                own = _own_chain(here, len(chain_k), window, sink)
                mixed, weights = attend_diagonal(q, text_k, text_v, chain_k, chain_v, text, own, weights=attention)
            else:
                plain = key_mask is None and window is None and positions is None and not attention
                mixed, weights = attend(q, text_k, text_v, None if plain else mask, weights=attention)
            score, o, y, f = self._finish(z, residual, mixed, logits)
            steps.append(StepOutput(score, o, y, f, weights, None, k))
        return steps


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
        feats = feats.to(self.fc.weight.dtype) if self.fc_norm is None and self.input_norm is None else feats
        if self.fc_norm is not None:
            feats = torch.cat([norm(part) for norm, part in zip(self.fc_norm, feats.chunk(3, -1), strict=True)], -1)
        elif self.input_norm is not None:
            feats = self.input_norm(feats)
        return self.fc(feats.to(self.fc.weight.dtype))

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
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(f)], -1))
        return self.layers[0].input_layernorm(x), x


def build(config: Mapping[str, Any]) -> Drafter:
    """The drafter of a saved configuration, not yet bound to its target (what `nbkit.loaders.load_model` calls).

    >>> cfg = DrafterConfig(hidden_size=8, intermediate_size=16, heads=2, kv_heads=1, head_dim=4, aux_layers=(0, 1, 2), vocab_size=10)
    >>> build(cfg.to_dict()).cfg == cfg
    True
    """
    cfg = DrafterConfig.from_dict(config)
    return (MTPHead if cfg.kind == "mtp" else EagleDrafter)(cfg)


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last axis in float32, the magnitude that all tables print.

    >>> rms(torch.tensor([[3.0, 4.0]])).pow(2).tolist()
    [12.5]
    """
    return x.float().pow(2).mean(-1).sqrt()


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """Layers (1, n/2 - 1, n - 4) of n, as common EAGLE-3 trainers choose them; evenly spread in models too shallow for that.

    Raises: InputError below four layers.

    >>> default_aux_layers(32), default_aux_layers(4)
    ((1, 15, 28), (0, 1, 2))
    """
    if layers < 4:
        raise InputError("layers of the target", got=layers, allowed=">= 4")
    return (1, layers // 2 - 1, layers - 4) if layers >= 8 else (0, (layers - 1) // 2, layers - 2)


def check_layers(aux_layers, layers: int) -> None:
    """Raise InputError unless all ``aux_layers`` exist and none is the last, whose raw output transformers does not return."""
    if max(aux_layers) > layers - 2:
        raise InputError(
            "aux_layers", got=tuple(aux_layers), allowed=f"0..{layers - 2}, three rising numbers",
            hint="the state after the last layer is only available behind the final norm",
        )


def embedding_of(model) -> Tensor:
    """Input embedding table (vocabulary, d) of a causal LM."""
    table = model.get_input_embeddings()
    if table is None or not hasattr(table, "weight"):
        raise UnsupportedModelError("target", got="no input embedding", allowed="a causal language model with a token table")
    return table.weight


def _after_loading(drafter: Drafter, _) -> None:
    """The loaded weights may bring another reduced vocabulary, for which the head has to be cut again."""
    drafter._slice_head()


def _own_chain(here: Tensor, held: int, window: int | None, sink: int) -> Tensor | None:
    """Which of its own chain's ``held`` keys each start sees, (batch or 1, starts, held); the last one is itself."""
    if window is None:
        return None
    back = torch.arange(held - 1, -1, -1, device=here.device)
    return (back < window) | (here[..., None] - back < sink)


def _initialise(module: nn.Module, seed: int) -> None:
    """Uniform weights of standard deviation 1/sqrt(3 fan_in); every tensor has a stream of its own, so switches do not change the others."""
    if not _is_int(seed):
        raise InputError("seed", got=seed, allowed="an integer")
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim == 2:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
                bound = weight.shape[1] ** -0.5
                weight.copy_((2 * torch.rand(weight.shape, generator=generator) - 1) * bound)
            elif name.endswith("bias"):
                weight.zero_()


def _rope_theta(config) -> float:
    """Base of the rotary positions; scaled variants are not imitated, the drafter has plain ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _positive(name: str, value: Any) -> None:
    if not _is_int(value) or value < 1:
        raise InputError(name, got=value, allowed="an integer >= 1")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
