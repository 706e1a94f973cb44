"""Shape and switches of a drafter, and what its target must offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from nbkit.errors import InputError, UnsupportedModelError

KINDS = ("eagle", "mtp")


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
            positive(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise InputError("kv_heads", got=self.kv_heads, allowed=f"a divisor of heads = {self.heads}")
        if self.head_dim % 2:
            raise InputError("head_dim", got=self.head_dim, allowed="an even number, because rotary positions turn pairs")
        if self.kind not in KINDS:
            raise InputError("kind", got=self.kind, allowed=", ".join(KINDS))
        layers = tuple(self.aux_layers)
        if len(layers) != 3 or any(not is_int(i) or i < 0 for i in layers) or not layers[0] < layers[1] < layers[2]:
            raise InputError("aux_layers", got=layers, allowed="three rising layer numbers, 0-based", hint="DrafterConfig.from_target picks them")
        object.__setattr__(self, "aux_layers", layers)
        if self.draft_vocab is not None and not (is_int(self.draft_vocab) and 1 <= self.draft_vocab <= self.vocab_size):
            raise InputError("draft_vocab", got=self.draft_vocab, allowed=f"None or 1..{self.vocab_size}")
        if self.window is not None:
            positive("window", self.window)
        if not is_int(self.carry_sink) or self.carry_sink < 0:
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
                intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden, rope_theta=rope_theta_of(config),
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


def rope_theta_of(config) -> float:
    """Base of the rotary positions; scaled variants are not imitated, the drafter has plain ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def positive(name: str, value: Any) -> None:
    """Raise InputError unless ``value`` is an integer >= 1."""
    if not is_int(value) or value < 1:
        raise InputError(name, got=value, allowed="an integer >= 1")


def is_int(value: Any) -> bool:
    """Whether ``value`` is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)
