"""One way to change how a transformers causal LM reads a prompt: drop rows, thin out attention, shrink the cache; and nothing else.

Rows keep the rotation of their original position whatever is dropped. The prompt is the first forward pass on an empty cache; later passes
(a token or a chunk) attend to everything that the cache holds.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from nbkit.errors import InputError, RunError, UnsupportedModelError
from nbkit.inference._tools import check_standard, chunk_mask, decoder_of, replace, rising, standard_layer
from nbkit.inference.cache import RaggedCache, check_layers
from nbkit.inference.parts import Attention, Eviction, Part, Rows
from nbkit.inference.run import LayerSize, Run

__all__ = ["ATTENTION", "Run", "attach", "decoder_of"]

ATTENTION = "nbkit_inference"
_SESSIONS: dict[int, _Session] = {}


@contextmanager
def attach(
    model: Any, *, rows: Rows | None = None, attention: Attention | None = None, eviction: Eviction | None = None, last_row_only: bool = False,
) -> Iterator[Run]:
    """Let the parts take over how ``model`` reads prompts while the block runs; the model is put back afterwards.

    Works with ``model(...)`` and ``model.generate(...)``; without an explicit cache a `RaggedCache` is made (``run.cache``). With rows dropped,
    the logits are those of the rows alive at the end (``run.positions``), the prompt's last row among them. A padding mask is only a mask of
    ones. One prompt at a time, unless attention is the only part.

    last_row_only: the last layer computes query, attention (dense) and FFN for the last row alone; the same logits there, the only ones.

    Raises
    ------
    UnsupportedModelError: no decoder layers, layers other than full attention, attention outside of transformers' attention interface,
        or (for post_attn and last_row_only) decoder layers that are not the standard pre-norm ones.
    InputError: a part of another kind; in a forward pass: padding, own masks, several prompts with rows or eviction, labels with rows, another
        kind of cache, kept rows that are not strictly increasing indices with the last row among them.
    RunError: the model is attached already.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=30, num_hidden_layers=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> class Even(Rows):
    ...     def keep(self, run, layer):
    ...         return torch.arange(1, run.tokens, 2)
    >>> with attach(model, rows=Even()) as run:
    ...     out = model(torch.arange(8)[None])
    >>> out.logits.shape[1], run.kept[1].tolist(), run.cache.lengths(), run.cache.get_seq_length()
    (4, [1, 3, 5, 7], (8, 4), 8)
    """
    for kind, part in (("rows", rows), ("attention", attention), ("eviction", eviction)):
        if part is not None and (not isinstance(part, Part) or part.kind != kind):
            raise InputError(kind, got=type(part).__name__, allowed=f"a part of kind {kind!r}", hint="nbkit.inference.get(kind, name)")
    body = decoder_of(model)
    check_layers(body.config)
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError("model", got=type(model).__name__, allowed="models that go through transformers' attention interface")
    implementation = body.config._attn_implementation
    if id(body.config) in _SESSIONS or str(implementation).startswith("nbkit_"):
        raise RunError("the model is attached already", hint="leave the other with block first: one reader at a time")
    given = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if given is not None:
        raise UnsupportedModelError("generation_config.cache_implementation", got=given, allowed="None", hint="a RaggedCache replaces it")
    session = _Session(model, body, rows, attention, eviction, last_row_only)
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _mask)
    with ExitStack() as stack:
        model.set_attn_implementation(ATTENTION)
        stack.callback(model.set_attn_implementation, implementation)
        _SESSIONS[id(body.config)] = session
        stack.callback(_SESSIONS.pop, id(body.config))
        session.install(stack)
        yield session.run


def _mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """No mask in an attached forward pass: `_attention` knows what its rows may see."""
    session = _SESSIONS.get(id(config))
    return None if session is not None and session.active else sdpa_mask(*args, config=config, **kwargs)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any):
    session = _SESSIONS.get(id(module.config))
    if session is None or not session.active:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return session.attend(module, query, key, value, **options)


class _Session:
    """The hooks of one attached model. active: inside a forward pass of its decoder; prefill: that pass reads the prompt."""

    def __init__(self, model, body, rows, attention, eviction, last_row_only):
        self.model, self.body = model, body
        self.rows, self.attention, self.eviction = rows, attention, eviction
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self.run = Run(len(body.layers), [LayerSize.of(layer) for layer in body.layers], 0 if head is None else head.weight.numel())
        self.run.last_row_only = bool(last_row_only or getattr(rows, "last_row_only", False))
        self.run.reset()
        self.prune_at = getattr(rows, "prune_at", "pre")
        if self.prune_at not in ("pre", "post_attn"):
            raise InputError("prune_at", got=self.prune_at, allowed="pre, post_attn")
        self.active = self.prefill = False
        self.rope: tuple[Tensor, Tensor] | None = None
        self.rotary: Tensor | None = None
        self.attended = -1
        self.started = 0.0
        self.names = list(inspect.signature(body.forward).parameters)

    # Setting up.

    def install(self, stack: ExitStack) -> None:
        """Hang the hooks into the model."""
        layers = self.body.layers
        late = self.prune_at == "post_attn"
        changed = range(len(layers)) if late else [len(layers) - 1] if self.run.last_row_only else []
        for index in changed:
            check_standard(self.body, layers[index])
        for index in changed:
            replace(stack, layers[index], "forward", self._forward_of(layers[index], index, layers[index].forward))
        if self.run.last_row_only:
            attention = layers[-1].self_attn
            for name in ("q_proj", "o_proj"):
                module = getattr(attention, name, None)
                if module is None:
                    raise UnsupportedModelError("model", got=f"attention without {name}", allowed="separate query and output projections",
                                                hint="last_row_only=False")
                stack.callback(module.register_forward_pre_hook(self._last_row).remove)
                stack.callback(module.register_forward_hook(self._spread).remove)
        stack.callback(self.body.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        stack.callback(self.body.register_forward_hook(self._end, always_call=True).remove)
        if self.rows is not None and self.model is not self.body:
            stack.callback(self.model.register_forward_pre_hook(self._no_labels, with_kwargs=True).remove)
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(self._enter_of(index), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(self._leave_of(index)).remove)
        if hasattr(self.model, "_prepare_cache_for_generation"):
            replace(stack, self.model, "_prepare_cache_for_generation", self._generation_cache(self.model._prepare_cache_for_generation))

    def _generation_cache(self, prepare: Callable) -> Callable:
        def wrapped(generation_config, model_kwargs, *args, **kwargs):
            done = prepare(generation_config, model_kwargs, *args, **kwargs)
            cache = model_kwargs.get("cache")
            # The cache that generate() made by itself; one that the caller chose is checked in the forward pass.
            if type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False):
                model_kwargs["cache"] = RaggedCache(self.body.config)
            return done

        return wrapped

    def _forward_of(self, layer: nn.Module, index: int, original: Callable) -> Callable:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any):
            if not (self.active and self.prefill):
                return original(hidden_states, *args, **kwargs)
            last = index == self.run.layers - 1
            if last and self.run.last_row_only:
                return standard_layer(layer, hidden_states, lambda hidden: hidden[:, -1:], kwargs)
            chosen: list[Tensor | None] = []

            def cut(hidden: Tensor) -> Tensor:
                if not chosen:
                    chosen.append(None if last or self.prune_at == "pre" else self._ask(index + 1))
                return hidden if chosen[0] is None else hidden[:, chosen[0]]

            return standard_layer(layer, hidden_states, cut, kwargs)

        return forward

    # One forward pass.

    def _no_labels(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if kwargs.get("labels") is not None:
            raise InputError("labels", got="labels while rows are dropped", allowed="None",
                             hint="the logits of dropped rows do not exist: score the answer through the cache")

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        kwargs = dict(zip(self.names, args, strict=False)) | kwargs
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        given = ids if ids is not None else embeds
        if given is None:
            return (), kwargs
        batch, new = given.shape[:2]
        cache = kwargs.get("cache")
        use_cache = kwargs.get("use_cache")
        if cache is None and (self.body.config.use_cache if use_cache is None else use_cache):
            cache = kwargs["cache"] = RaggedCache(self.body.config)
        if cache is not None and not isinstance(cache, RaggedCache):
            raise InputError("cache", got=type(cache).__name__, allowed="RaggedCache", hint="leave the cache out, or pass RaggedCache(model.config)")
        seen = 0 if cache is None else cache.get_seq_length()
        self._check_mask(kwargs.pop("attention_mask", None))
        if new == 0:
            raise InputError("prompt", got="0 tokens", allowed="at least one token")
        self.prefill, self.attended = seen == 0, -1
        if self.prefill:
            self._start(kwargs, given, batch, new, cache)
        else:
            if self.run.batch != batch or cache.layers[0].keys.shape[0] != batch:
                raise InputError("batch", got=batch, allowed=f"{cache.layers[0].keys.shape[0]}, as in the prompt")
            places = torch.arange(seen, seen + new, device=given.device)
            kwargs["position_ids"] = (places + cache._shift)[None]
            cache._fresh = places
        if cache is not None:
            cache._seen = seen + new
        self.active = True
        return (), kwargs

    def _start(self, kwargs: dict, given: Tensor, batch: int, new: int, cache: RaggedCache | None) -> None:
        run = self.run
        if batch > 1 and (self.rows is not None or self.eviction is not None):
            raise InputError("batch", got=f"{batch} prompts", allowed="one prompt while rows are dropped or the cache is shrunk")
        run.reset()
        run.tokens, run.batch, run.cache, run.ids = new, batch, cache, kwargs.get("input_ids")
        run.positions = torch.arange(new, device=given.device)
        places = kwargs.get("position_ids")
        if places is None:
            places = run.positions
        else:
            places = places.reshape(-1, places.shape[-1])
            if places.shape[-1] != new or bool((places != places[:1]).any()) or bool((places[0].diff() <= 0).any()):
                raise InputError("position_ids", got="positions that do not rise, or differ between rows",
                                 allowed=f"{new} strictly increasing positions")
            places = places[0]
        shift = int(places[-1]) + 1 - new
        if self.rows is not None:
            found = self.rows.prefilter(run, self.model, run.ids) if run.ids is not None else None
            if found is None and run.ids is None and type(self.rows).prefilter is not Rows.prefilter:
                raise InputError("prompt", got="inputs_embeds", allowed="input_ids", hint="this part chooses among token ids")
            if found is not None:
                index = rising("indices of prefilter()", found[0], new)
                renumbered = rising("positions of prefilter()", found[1], None)
                if len(renumbered) != len(index):
                    raise InputError("prefilter()", got=f"{len(index)} indices and {len(renumbered)} positions", allowed="as many of both")
                name = "input_ids" if run.ids is not None else "inputs_embeds"
                kwargs[name] = kwargs[name][:, index]
                original = torch.equal(renumbered, index)
                places = places[index] if original else renumbered.to(places)
                shift = shift if original else int(places[-1]) + 1 - new
                run.positions = run.positions[index]
        if cache is not None:
            cache._shift = shift
        self.rotary, self.rope = places, None
        kwargs["position_ids"] = places[None]

    def _check_mask(self, mask: Any) -> None:
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise InputError("attention_mask", got="a mask of one's own", allowed="None or ones", hint="the parts decide what is attended to")
        if not bool(mask.all()):
            raise InputError("attention_mask", got="a padded batch", allowed="prompts without padding", hint="read the prompts one by one")

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        cache, self.active, self.rope = self.run.cache, False, None
        if cache is not None:
            cache._fresh = None

    def _enter_of(self, index: int) -> Callable:
        def enter(module: nn.Module, args: tuple, kwargs: dict):
            if not (self.active and self.prefill):
                return None
            self.started = time.perf_counter()
            run = self.run
            args = list(args)
            hidden = args[0] if args else kwargs["hidden_states"]
            if index == 0:
                self.rope = kwargs.get("position_embeddings")
            elif self.rows is not None and self.prune_at == "pre":
                chosen = self._ask(index)
                hidden = hidden if chosen is None else hidden[:, chosen]
            run.kept.append(run.positions)
            run.ffn_rows.append(len(run.positions))
            if run.cache is not None:
                run.cache._fresh = run.positions
            kwargs = kwargs | {"position_embeddings": self.rope, "position_ids": self.rotary[None]}
            if args:
                args[0] = hidden
            else:
                kwargs["hidden_states"] = hidden
            return tuple(args), kwargs

        return enter

    def _ask(self, layer: int) -> Tensor | None:
        """The rows that ``layer`` reads, as indices into the rows alive; positions and rotations follow."""
        found, run = self.rows.keep(self.run, layer), self.run
        if found is None:
            return None
        alive = len(run.positions)
        index = rising(f"rows kept before layer {layer}", found, alive).to(run.positions.device)
        if int(index[-1]) != alive - 1:
            raise InputError(f"rows kept before layer {layer}", got=f"a last row of {int(index[-1])}",
                             allowed=f"the last row alive, {alive - 1}, among them", hint="the next token is predicted from it")
        if len(index) == alive:
            return None
        if self.rope is None:
            raise UnsupportedModelError("model", got="layers without position_embeddings",
                                        allowed="rotary positions that the model hands to its layers")
        run.positions, self.rotary = run.positions[index], self.rotary[index]
        self.rope = tuple(part[:, index] for part in self.rope)
        if self.prune_at == "post_attn":
            run.ffn_rows[layer - 1] = len(index)
        return index

    def _leave_of(self, index: int) -> Callable:
        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            if not self.active:
                return
            if self.attended != index:
                raise UnsupportedModelError("model", got=f"a layer {index} whose attention does not go through transformers' attention interface",
                                            allowed="models that do")
            if self.prefill:
                if index == self.run.layers - 1 and self.run.last_row_only:
                    self.run.ffn_rows[index] = 1
                self.run.seconds.append(time.perf_counter() - self.started)

        return leave

    # Attention.

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, **options: Any):
        """Attention of one layer: by the parts in the prompt, dense over what the cache holds afterwards."""
        layer, run = module.layer_idx, self.run
        self.attended = layer
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if not self.prefill:
            mask = chunk_mask(query.shape[2], key.shape[2], query.device)
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
        run.heads, run.head_dim, run.value_dim, run.scaling = query.shape[1], query.shape[3], value.shape[3], scaling
        rows = query.shape[2]
        if run.last_row_only and layer == run.layers - 1:
            out, _ = sdpa_attention_forward(module, query[:, :, -1:], key, value, None, scaling=scaling, **options)
            run.pairs[layer] = float(run.heads * rows)
            self._evict(layer, query[:, :, -1:], key, value)
            # The output projection takes the last row alone; the others are only there for the shape.
            return out.expand(-1, rows, -1, -1), None
        if self.rows is not None:
            self.rows.observe(run, layer, query, key, value, scaling)
        if self.attention is None:
            out, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **options)
        else:
            each = [self.attention.attend(run, layer, query[i : i + 1], key[i : i + 1], value[i : i + 1], scaling) for i in range(run.batch)]
            out = torch.cat(each) if len(each) > 1 else each[0]
            shape = (run.batch, run.heads, rows, run.value_dim)
            if tuple(out.shape) != shape:
                raise InputError(f"output of attend() in {type(self.attention).__name__}", got=tuple(out.shape), allowed=f"{shape}")
            out = out.transpose(1, 2).contiguous()
        if not run.pairs[layer]:
            run.pairs[layer] = float(run.heads * (rows * (rows + 1) // 2))
        self._evict(layer, query[:, :, -run.query_window :], key, value)
        return out, None

    def _evict(self, layer: int, queries: Tensor, key: Tensor, value: Tensor) -> None:
        if self.eviction is None or self.run.cache is None:
            return
        slots = self.eviction.keep(self.run, layer, key, value, queries, self.run.positions)
        if slots is None:
            return
        held = self.run.cache.layers[layer]
        if slots.dtype != torch.int64 or slots.dim() != 3 or slots.shape[:2] != key.shape[:2] or not slots.shape[2]:
            raise InputError(f"slots of {type(self.eviction).__name__}", got=f"{slots.dtype} {tuple(slots.shape)}",
                             allowed=f"int64 (1, {key.shape[1]}, m) with m >= 1")
        if int(slots.min()) < 0 or int(slots.max()) >= held.slots or bool((slots.diff(dim=-1) <= 0).any()):
            raise InputError(f"slots of {type(self.eviction).__name__}", got="slots out of order or out of range",
                             allowed=f"strictly increasing numbers below {held.slots}")
        held.retain(slots)

    # The last layer for its last row.

    def _last_row(self, module: nn.Module, args: tuple):
        return (args[0][:, -1:], *args[1:]) if self.active and self.prefill else None

    def _spread(self, module: nn.Module, args: tuple, output: Tensor):
        return output.expand(-1, len(self.run.positions), -1) if self.active and self.prefill else None
