"""Small tools of the session: finding the decoder, replacing a layer's forward, masks, checks of indices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from nbkit.errors import InputError, UnsupportedModelError

STANDARD = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""Modules of a pre-norm decoder layer."""


def decoder_of(model: Any) -> nn.Module:
    """The module with the decoder layers, ``model.model`` in Llama and alike.

    Raises: UnsupportedModelError for encoder-decoder models and for models without such a module.
    """
    for candidate in (model, getattr(model, "base_model", None), getattr(model, "model", None)):
        if isinstance(getattr(candidate, "layers", None), nn.ModuleList) and not getattr(candidate.config, "is_encoder_decoder", False):
            return candidate
    raise UnsupportedModelError("model", got=type(model).__name__,
                                allowed="a decoder of transformers with a list of layers, such as Llama, Mistral or Qwen3")


def replace(stack: ExitStack, owner: Any, name: str, value: Callable) -> None:
    """Set an attribute of one object and put its own one, or that of its class, back at the end."""
    own = owner.__dict__.get(name)
    object.__setattr__(owner, name, value)
    if own is None:
        stack.callback(owner.__dict__.pop, name)
    else:
        stack.callback(object.__setattr__, owner, name, own)


@torch.no_grad()
def check_standard(body: nn.Module, layer: nn.Module) -> None:
    """Two rows through a decoder layer and through `standard_layer` must give the same.

    Raises: UnsupportedModelError if they do not.
    """
    wrong = UnsupportedModelError("decoder layer", got=type(layer).__name__,
                                  allowed="standard pre-norm layers: attention and FFN each with one norm before",
                                  hint='prune_at="pre" and last_row_only=False work with other layers')
    if set(dict(layer.named_children())) != STANDARD or not hasattr(body, "rotary_emb"):
        raise wrong
    weight = next(layer.parameters())
    hidden = torch.linspace(-1, 1, 2 * body.config.hidden_size, device=weight.device, dtype=weight.dtype).view(1, 2, -1)
    places = torch.arange(2, device=weight.device)[None]
    options = {"position_ids": places, "position_embeddings": body.rotary_emb(hidden, places), "attention_mask": None}
    there, here = layer(hidden, **options), standard_layer(layer, hidden, lambda x: x, options)
    if not isinstance(there, Tensor) or not torch.allclose(there, here, rtol=1e-4, atol=1e-5):
        raise wrong


def standard_layer(layer: nn.Module, hidden: Tensor, cut: Callable[[Tensor], Tensor], options: dict) -> Tensor:
    """A pre-norm decoder layer; ``cut`` drops rows between attention and FFN, of the attention's output and of what it is added to."""
    attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden), **options)[0]
    hidden = cut(hidden) + cut(attended)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def chunk_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """Every new row sees what was there before and the new rows up to itself; None where one new row sees everything."""
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)[None, None]


def rising(name: str, index: Any, below: int | None) -> Tensor:
    """``index`` as an int64 tensor (k,), k >= 1, of strictly increasing numbers >= 0."""
    index = torch.as_tensor(index)
    limit = "" if below is None else f" below {below}"
    if index.dim() != 1 or not len(index) or index.dtype not in (torch.int64, torch.int32):
        raise InputError(name, got=f"{index.dtype} {tuple(index.shape)}", allowed=f"at least one whole number{limit}, strictly increasing")
    if int(index[0]) < 0 or (below is not None and int(index[-1]) >= below) or bool((index.diff() <= 0).any()):
        raise InputError(name, got=f"numbers from {int(index[0])} to {int(index[-1])}", allowed=f"strictly increasing numbers{limit}")
    return index.long()
