"""EAGLE-3 and EAGLE-3.1 checkpoints of other trainers, by the names of their tensors, so that they can be inspected like our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from nbkit.errors import HashMismatchError, InputError, MissingResourceError, UnsupportedModelError

from .config import DrafterConfig, default_aux_layers
from .drafter import Drafter, EagleDrafter

_FLAGS = ("norm_output", "fc_norm", "norm_before_fc", "norm_before_residual")
_MOST = 64 << 20


def load_drafter(path: str | Path, model=None, *, aux_layers: tuple[int, int, int] | None = None) -> Drafter:
    """Open an EAGLE-3 / 3.1 checkpoint folder (config.json, model.safetensors) and bind it to ``model`` if one is given.

    Tensors are found by name (``fc.weight``, ``fc_norm.{0,1,2}.weight``, ``midlayer.*`` or ``layers.0.*``, ``norm.weight``, ``d2t``, ``t2d``); an
    own ``lm_head.weight`` or ``embed_tokens.weight`` takes the place of the target's. The switches ``norm_output``, ``fc_norm``,
    ``norm_before_fc`` and ``norm_before_residual`` are read from config.json, also inside ``eagle_config``; norms that the file holds are never
    left out. Every tensor must be used and every weight must be there.

    Args:
        path: the folder. model: the target. aux_layers: numbers of the layers after which the target is read; default those of config.json
            (``eagle_aux_hidden_state_layer_ids``; in speculators files number j means *before* layer j, which is converted), else the usual ones.

    Raises: MissingResourceError for missing files; InputError for configurations that do not make sense; HashMismatchError for missing or misshapen
        tensors; UnsupportedModelError for parts that this drafter does not have (biases, query norms, further layers, scaled rotary positions).

    Source: key names of public EAGLE-3.1 checkpoints.
    """
    folder = Path(path)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise MissingResourceError(f"drafter {folder.name}", got=f"no {name}", allowed="a folder with config.json and model.safetensors")
    config, tensors = _config(folder / "config.json"), _tensors(folder / "model.safetensors")
    cfg = _drafter_config(config, tensors, model, aux_layers)
    drafter = EagleDrafter(cfg)
    head, embed = tensors.pop("lm_head.weight", None), tensors.pop("embed_tokens.weight", None)
    expected = drafter.state_dict()
    extra, lacking = sorted(set(tensors) - set(expected)), sorted(set(expected) - set(tensors))
    if extra:
        got = f"{len(extra)} further tensors, first {extra[0]}"
        raise UnsupportedModelError(f"drafter {folder.name}", got=got, allowed="one plain EAGLE-3 layer")
    if lacking:
        raise HashMismatchError(f"weights of {folder.name}", got=f"{len(lacking)} missing tensors, first {lacking[0]}", allowed="all of the drafter")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise HashMismatchError(f"{name} of {folder.name}", got=tuple(tensor.shape), allowed=tuple(expected[name].shape))
    drafter.load_state_dict(tensors)
    rows = cfg.draft_vocab or cfg.vocab_size
    for name, own, size in (("lm_head.weight", head, rows), ("embed_tokens.weight", embed, cfg.vocab_size)):
        if own is not None and tuple(own.shape) != (size, cfg.hidden_size):
            raise HashMismatchError(f"{name} of {folder.name}", got=tuple(own.shape), allowed=(size, cfg.hidden_size))
    drafter.use_own(embed=None if embed is None else embed.float(), head=None if head is None else head.float())
    return drafter.eval() if model is None else drafter.bind(model).eval()


def _config(path: Path) -> dict[str, Any]:
    """config.json with the parts that some trainers nest brought to the top."""
    if path.stat().st_size > _MOST:
        raise InputError(path.name, got=f"{path.stat().st_size} bytes", allowed=f"<= {_MOST}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(path.name, got=str(error), allowed="a JSON object") from error
    if not isinstance(raw, dict):
        raise InputError(path.name, got=type(raw).__name__, allowed="a JSON object")
    nested = {key: raw[key] for key in ("transformer_layer_config", "eagle_config") if isinstance(raw.get(key), dict)}
    return {**nested.get("transformer_layer_config", {}), **raw, **nested.get("eagle_config", {})}


def _tensors(path: Path) -> dict[str, Tensor]:
    """All tensors under the names that `EagleDrafter` uses; buffers that any program can compute are left out."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except SafetensorError as error:
        raise HashMismatchError(f"weights in {path.name}", got=f"a damaged file ({error})", allowed="a complete safetensors file") from error
    renamed = {name.removeprefix("model.").replace("midlayer.", "layers.0.", 1): tensor for name, tensor in found.items()}
    return {name: tensor for name, tensor in renamed.items() if not name.endswith("rotary_emb.inv_freq")}


def _drafter_config(config: dict[str, Any], tensors: dict[str, Tensor], model, aux_layers) -> DrafterConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", None):
        raise UnsupportedModelError("rotary positions", got=f"{kind} scaling", allowed="plain ones")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        sizes = dict(
            hidden_size=hidden, heads=heads, kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads), intermediate_size=int(config["intermediate_size"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("config.json", got=f"no usable {error}", allowed="hidden_size, num_attention_heads and intermediate_size") from error
    if config.get("target_hidden_size") not in (None, hidden):
        raise UnsupportedModelError("drafter", got="another hidden size than its target's", allowed="the same hidden size")
    mapped = "t2d" in tensors or "d2t" in tensors
    vocabulary = len(tensors["t2d"]) if "t2d" in tensors else config.get("vocab_size")
    draft = len(tensors["d2t"]) if "d2t" in tensors else config.get("draft_vocab_size") if mapped else None
    layers = aux_layers or _aux_layers(config, model)
    flags = {name: bool(config.get(name)) for name in _FLAGS}
    flags["fc_norm"] |= any(name.startswith("fc_norm.") for name in tensors)
    flags["norm_before_fc"] |= "input_norm.weight" in tensors
    return DrafterConfig(
        **sizes, aux_layers=tuple(layers), vocab_size=vocabulary, draft_vocab=draft, gate="layers.0.self_attn.g_proj.weight" in tensors,
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0), rms_eps=float(config.get("rms_norm_eps") or 1e-6), **flags,
    )


def _aux_layers(config: dict[str, Any], model) -> tuple[int, ...]:
    """Layer numbers in our meaning (after the layer) from the file or, without any, from the target's depth."""
    given = config.get("eagle_aux_hidden_state_layer_ids")
    if given:
        # Number j of a speculators file is the input of layer j, which is the output of layer j - 1.
        return tuple(int(i) - ("speculators_model_type" in config) for i in given)[:3]
    if model is None:
        allowed = "three layer numbers, or the target as model="
        raise InputError("aux_layers", got="none in config.json", allowed=allowed, hint="aux_layers=(1, 14, 26)")
    return default_aux_layers(model.config.get_text_config().num_hidden_layers)


def write_checkpoint(drafter: Drafter, path: str | Path) -> Path:
    """Write ``drafter`` as an EAGLE-3.1 checkpoint in the layout of speculators; returns the folder.

    Raises: InputError for an MTP head or a gated drafter, for which that layout has no place.
    """
    cfg = drafter.cfg
    if cfg.kind != "eagle" or cfg.gate:
        raise InputError("drafter", got=cfg.variant, allowed="an EAGLE drafter without a gate", hint="nbkit.loaders.save_model keeps every variant")
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    layer = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": cfg.hidden_size, "intermediate_size": cfg.intermediate_size,
        "num_attention_heads": cfg.heads, "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_dim, "vocab_size": cfg.vocab_size,
        "rms_norm_eps": cfg.rms_eps, "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta}, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False,
    }
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": cfg.draft_vocab or cfg.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in cfg.aux_layers], **{name: getattr(cfg, name) for name in _FLAGS},
        "tie_word_embeddings": False, "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors = {**drafter.state_dict(), "lm_head.weight": drafter.head[0]}
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
