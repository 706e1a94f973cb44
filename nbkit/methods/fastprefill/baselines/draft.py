"""Reading a prompt with a smaller model first: a draft from the first layers, and what its attention sees."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nbkit.errors import InputError, UnsupportedModelError

from .rules import whole

_SPY = "nbkit_draft"
Watcher = Callable[[int, Tensor, Tensor, float], None]


def draft_of(model, layers: int):
    """A causal LM of the first ``layers`` layers of ``model`` with its final norm and head; all weights are shared, none is copied.

    The modules are new shells around the same parameters: the draft has its own configuration and no hooks, so it can be read while ``model``
    itself is attached. It predicts from the first layers alone, without any training for that.

    Raises: InputError for a number of layers that ``model`` does not have; UnsupportedModelError without `model.model.layers`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=30)
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes))
    >>> draft = draft_of(model, 2)
    >>> draft.config.num_hidden_layers, draft.lm_head.weight is model.lm_head.weight
    (2, True)
    """
    body = getattr(model, "model", None)
    if not isinstance(getattr(body, "layers", None), nn.ModuleList) or not hasattr(model.config, "num_hidden_layers"):
        raise UnsupportedModelError("model", got=type(model).__name__, allowed="a causal LM with model.layers, such as Llama, Mistral or Qwen3")
    depth = len(body.layers)
    if whole("layers", layers, 1) > depth:
        raise InputError("layers", got=layers, allowed=f"1 to {depth}, the depth of the model")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:layers]
    draft = _shell(model, config, layers)
    config._attn_implementation = "sdpa"
    return draft.eval()


def _shell(module: nn.Module, config, layers: int | None = None, name: str = "") -> nn.Module:
    """The same module class around the same parameters and buffers, with fresh dictionaries."""
    new = copy.copy(module)
    for key, value in module.__dict__.items():
        if key.endswith("_hooks") or "_hooks_" in key:
            new.__dict__[key] = type(value)() if isinstance(value, dict | OrderedDict) else value
    # A forward that somebody has put over that of the class belongs to the module it was made for.
    new.__dict__.pop("forward", None)
    for key in ("_parameters", "_buffers"):
        new.__dict__[key] = dict(module.__dict__[key])
    children = module._modules.items()
    if name == "layers" and isinstance(module, nn.ModuleList) and layers is not None:
        children = list(children)[:layers]
        layers = None
    new.__dict__["_modules"] = {key: None if child is None else _shell(child, config, layers, key) for key, child in children}
    if "config" in new.__dict__:
        new.__dict__["config"] = config
    return new


@contextmanager
def watched(draft, watch: Watcher) -> Iterator[None]:
    """While open, ``watch(layer, queries, keys, scaling)`` sees the rotated queries and keys of every attention of ``draft``.

    queries: (1, query_heads, rows, head_dim); keys: (1, kv_heads, tokens, head_dim), the whole cache of the layer.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module, query, key, value, attention_mask, **options):
        module.config.nbkit_watch(module.layer_idx, query, key, options.get("scaling") or query.shape[-1] ** -0.5)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(_SPY, attend)
    AttentionMaskInterface.register(_SPY, sdpa_mask)
    before = draft.config._attn_implementation
    draft.config._attn_implementation, draft.config.nbkit_watch = _SPY, watch
    try:
        yield
    finally:
        draft.config._attn_implementation = before
        del draft.config.nbkit_watch


@torch.no_grad()
def look_ahead(draft, ids: Tensor, steps: int, watch: Watcher) -> Tensor:
    """Read ``ids`` (1, tokens) with ``draft`` and decode ``steps`` tokens greedily; ``watch`` sees the attention of these steps only.

    The first watched row is the one of the first generated token. Returns the generated tokens, (steps,).
    """
    generated = []
    out = draft(ids, use_cache=True, logits_to_keep=1)
    with watched(draft, watch):
        for _ in range(steps):
            generated.append(out.logits[:, -1].argmax(-1))
            out = draft(generated[-1][:, None], cache=out.cache, use_cache=True)
    return torch.cat(generated)
