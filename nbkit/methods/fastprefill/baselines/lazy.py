"""LazyLLM: dropped tokens wait with their state and come back in decoding when they are needed again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from nbkit.errors import InputError, RunError, UnsupportedModelError
from nbkit.inference.cache import check_layers
from nbkit.inference.parts import register
from nbkit.methods.fastprefill.cost import ModelShape

from .row_rule import RowRule, drops_of, plan_of, steps_of
from .rules import best, row_attention, tokens_of

REVIVE = ("selected", "all", "none")
"""Which dropped tokens come back in decoding: those that the last token selects, all of them at once, or none."""
_NAME = "nbkit_lazy"


def lazy_choice(attention: Tensor, count: int, forced: Sequence[int] | Tensor) -> Tensor:
    """Sorted indices of the ``count`` tokens with the most attention of the last token, averaged over heads; the ``forced`` ones stay.

    attention: (query_heads, tokens).

    >>> lazy_choice(torch.tensor([[0.1, 0.5, 0.2, 0.2], [0.1, 0.1, 0.6, 0.2]]), 2, [3]).tolist()
    [2, 3]
    """
    return best(attention.mean(0), count, forced)


@register
@dataclass(frozen=True)
class LazyLLM(RowRule):
    """Progressive pruning by the attention of the last token; dropped tokens keep their state and can be revived while decoding.

    layers, rates: before each of these layers the best ``rates`` of all tokens seen so far stay alive. Default layers: 1/3, 1/2 and 2/3 of the
    depth. revive: "selected" = a dropped token that the last token selects again is computed on from the layer at which it had stopped;
    "all" = with the first decoding step everything dropped is read again and nothing is pruned any more, which gives exactly what the full model
    gives; "none" = dropped tokens never come back.

    As ``rows=`` of a session this is the prefill alone, without revival; ``LazyLLM(...).attach(model)`` is the whole method.

    Source: LazyLLM, arXiv 2407.14057 (no official code): layers and rates are our reconstruction at short prompts.

    >>> LazyLLM().drops(30), LazyLLM(layers=(20,), rates=(0.3,)).plan(30)[18:22]
    ((10, 15, 20), (1.0, 1.0, 0.3, 0.3))
    """

    layers: tuple[int, ...] | None = None
    rates: tuple[float, ...] = (0.7, 0.5, 0.3)
    revive: str = "selected"
    name: ClassVar[str] = "lazyllm"

    def __post_init__(self):
        layers, rates = steps_of(self.layers, self.rates)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "rates", rates)
        if self.revive not in REVIVE:
            raise InputError("revive", got=self.revive, allowed=", ".join(REVIVE))

    def plan(self, layers: int) -> tuple[float, ...]:
        """Share of the tokens alive in every layer of a model of ``layers`` layers.

        >>> LazyLLM(layers=(1, 3), rates=(0.5, 0.2)).plan(4)
        (1.0, 0.5, 0.5, 0.2)
        """
        return plan_of(self.layers, self.rates, layers)

    def drops(self, layers):
        return drops_of(self.plan(layers))

    def choose(self, run, layer, queries, keys, scaling):
        rows = keys.shape[2]
        run.charge(layer, probe=float(queries.shape[1] * rows))
        attention = row_attention(queries[:, :, -1:], keys, scaling)
        return lazy_choice(attention, tokens_of(self.plan(run.layers)[layer + 1], run.tokens), (rows - 1,))

    @contextmanager
    def attach(self, model) -> Iterator[LazyRun]:
        """Read prompts and decode with revival while open; the model is as before afterwards.

        Raises: UnsupportedModelError for a model without `model.layers` or with sliding windows; RunError when the model is attached already.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=30)
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes)).eval()
        >>> with LazyLLM(layers=(1,), rates=(0.5,)).attach(model) as run:
        ...     out = model.generate(torch.arange(1, 11)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
        >>> run.steps[0].alive, len(run.steps)
        ((10, 5, 5), 3)
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        run = LazyRun(model, self)
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, _no_mask)
        body, config = model.model, model.config
        before = config._attn_implementation
        handles = [model.register_forward_pre_hook(run._begin, with_kwargs=True), model.register_forward_hook(run._end, with_kwargs=True),
                   body.norm.register_forward_pre_hook(run._leave)]
        handles += [layer.register_forward_pre_hook(run._enter, with_kwargs=True) for layer in body.layers]
        for layer in body.layers:
            layer.self_attn.nbkit_lazy = run
        config._attn_implementation = _NAME
        try:
            yield run
        finally:
            config._attn_implementation = before
            if run.cache is not None:
                run.cache.reading = False
            for handle in handles:
                handle.remove()
            for layer in body.layers:
                del layer.self_attn.nbkit_lazy


@dataclass(frozen=True)
class LazyStep:
    """What one forward did: tokens seen after it, and for every layer the tokens alive, the rows computed and the revived ones among these.

    pairs: visible (query, key) pairs of every layer; probe: q.k products of a layer that only rank tokens, in one head; seconds: wall time;
    new: tokens read for the first time. macs: exact, with the logits of one row.
    """

    tokens: int
    new: int
    alive: tuple[int, ...]
    rows: tuple[int, ...]
    revived: tuple[int, ...]
    pairs: tuple[int, ...]
    probe: tuple[int, ...]
    seconds: float
    macs: float


def step_macs(shape: ModelShape, rows: Sequence[int], pairs: Sequence[int], *, probe: Sequence[int] = (), logits: int = 1) -> float:
    """Exact MACs of one forward: ``rows`` computed and ``pairs`` visible in every layer, ``probe`` q.k products in one head, ``logits`` rows.

    A recovery-free step has rows 1 and as many pairs as its cache holds, the new token included; a revived token adds a row and its own pairs.

    >>> tiny = ModelShape(2, 8, 2, 1, 4, 16, 100)
    >>> step_macs(tiny, [1, 1], [11, 6]) == 2 * tiny.row + 17 * tiny.pair + tiny.lm_head
    True
    """
    if len(rows) != shape.layers or len(pairs) != shape.layers:
        raise InputError("rows and pairs", got=(len(rows), len(pairs)), allowed=f"{shape.layers} numbers each")
    return float(sum(rows) * shape.row + sum(pairs) * shape.pair + sum(probe) * shape.heads * shape.head_dim + logits * shape.lm_head)


class LazyCache(Cache):
    """Keys and values of every layer in the order of the prompt, and the waiting state of each token that has not passed all layers.

    A token has passed layers 0..depth-1 and has keys there; its one stored state is its input to layer ``depth``. So a dropped token costs one
    vector, whichever layer it waits at.
    """

    def __init__(self, layers: int, rule: LazyLLM):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.rule, self.plan = rule, rule.plan(layers)
        self.seen = 0
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.hidden: Tensor | None = None
        self.anchor: tuple[int, Tensor] | None = None
        self.depth = self.rows = self.alive = torch.zeros(0, dtype=torch.long)
        self.reading = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of a mask over all tokens."""
        return self.seen + query_length, 0

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of the tokens that have them, and of the waiting states."""
        if self.hidden is None:
            return 0
        layers = len(self.plan)
        slot = sum(t[0].shape[0] * t.shape[-1] * t.element_size() for t in (self.keys[0], self.values[0]))
        waiting = int((self.depth < layers).sum())
        anchor = 0 if self.anchor is None else self.anchor[1].nbytes
        return int(self.depth.sum()) * slot + waiting * self.hidden.shape[-1] * self.hidden.element_size() + anchor

    def crop(self, *args, **kwargs):
        """Not defined here: what a token waits for depends on the tokens after it."""
        raise RunError("crop of a cache with waiting tokens", hint="read the prompt again")

    reorder_cache = batch_repeat_interleave = batch_select_indices = crop

    def _grow(self, new: Tensor) -> None:
        """Add the embedded tokens ``new`` (rows, hidden)."""
        old, self.seen = self.seen, self.seen + len(new)
        self.hidden = _room(self.hidden, new, self.seen, 0)
        self.hidden[old : self.seen] = new.detach()
        self.depth = torch.cat([self.depth.to(new.device), torch.zeros(len(new), dtype=torch.long, device=new.device)])

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Store the keys and values of the rows at work; returns those of all tokens alive in this layer.

        Raises: RunError outside of `LazyLLM.attach`, where nobody says which rows these are.
        """
        if not self.reading:
            raise RunError("LazyCache", got="a forward pass outside of attach()", hint="decode inside the with block that read the prompt")
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[layer_idx] = held = _room(store[layer_idx], states, self.seen, 2)
            held[:, :, self.rows] = states.detach()
        # Nothing is copied where every token is alive.
        alive = slice(self.seen) if len(self.alive) == self.seen else self.alive
        return self.keys[layer_idx][:, :, alive], self.values[layer_idx][:, :, alive]


@dataclass
class LazyRun:
    """One attached model: ``steps`` holds a `LazyStep` for every forward since the last prompt began, ``cache`` its cache."""

    model: object
    rule: LazyLLM
    steps: list[LazyStep] = field(default_factory=list)
    cache: LazyCache | None = None

    def __post_init__(self):
        body = getattr(self.model, "model", None)
        if not isinstance(getattr(body, "layers", None), torch.nn.ModuleList) or not hasattr(body, "rotary_emb"):
            raise UnsupportedModelError("model", got=type(self.model).__name__, allowed="a causal LM with model.layers and rotary positions")
        check_layers(self.model.config)
        if str(self.model.config._attn_implementation).startswith("nbkit"):
            raise RunError("the model is attached already", hint="leave the other context first")
        self.shape = ModelShape.from_config(self.model.config)
        # A rule that does not fit the model is an error now, not in the first forward.
        self.rule.plan(self.shape.layers)

    @property
    def revived(self) -> int:
        """Tokens revived in decoding, summed over layers and steps."""
        return sum(sum(step.revived) for step in self.steps)

    @property
    def macs(self) -> float:
        """MACs of all steps."""
        return sum(step.macs for step in self.steps)

    # Hooks, in the order in which one forward calls them.

    def _begin(self, model, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or ids.shape[0] != 1:
            raise InputError("input_ids", got="none" if ids is None else tuple(ids.shape), allowed="(1, tokens)", hint="one prompt at a time")
        if kwargs.get("labels") is not None:
            raise InputError("labels", got="labels", allowed="none while rows are dropped", hint="score the answer from the logits")
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            raise InputError("attention_mask", got="padding", allowed="no padding", hint="one prompt at a time")
        given = kwargs.get("cache")
        if not isinstance(given, LazyCache):
            if given is not None and given.get_seq_length():
                raise InputError("cache", got=f"{type(given).__name__} with tokens in it", allowed="an empty cache, or the LazyCache of the run")
            given = LazyCache(self.shape.layers, self.rule)
            self.steps, self.cache = [], given
        self.new, self.start = ids.shape[1], time.perf_counter()
        self.log = {name: [] for name in ("alive", "rows", "revived", "pairs", "probe")}
        kwargs.update(input_ids=ids, cache=given, use_cache=True)
        kwargs.pop("position_ids", None)
        self.cache, given.reading = given, True
        return (), kwargs

    def _enter(self, layer, args, kwargs):
        """Hand the layer the rows that have come as far as this layer: new, going on, or revived."""
        cache, index = self.cache, layer.self_attn.layer_idx
        states = kwargs.pop("hidden_states", args[0] if args else None)
        if index == 0:
            cache._grow(states[0])
            if cache.anchor is not None:
                self._revive_all()
            cache.alive = torch.arange(cache.seen, device=states.device)
            self.fresh = cache.seen - self.new
        else:
            self._store(states, index)
        if self.rule.revive == "none":
            cache.alive = cache.alive[(cache.depth[cache.alive] > index) | (cache.alive >= self.fresh)]
        cache.rows = cache.alive[cache.depth[cache.alive] == index]
        if self.rule.revive == "all" and self.fresh == 0 and cache.anchor is None and index in self.rule.drops(self.shape.layers):
            # All rows are still there at the first drop: the states from which they can be read again.
            cache.anchor = (index, cache.hidden[: cache.seen].clone())
        if index == 0 or not torch.equal(cache.rows, self.placed):
            self.placed, self.around = cache.rows, self.model.model.rotary_emb(states, position_ids=cache.rows[None])
        kwargs.update(attention_mask=None, position_ids=cache.rows[None], position_embeddings=self.around)
        return (cache.hidden[cache.rows][None],), kwargs

    def _store(self, states: Tensor, index: int) -> None:
        """Keep what the layer before ``index`` made of its rows."""
        cache = self.cache
        cache.hidden[cache.rows] = states[0].detach()
        cache.depth[cache.rows] = index
        cache.alive = self.chosen

    def _revive_all(self) -> None:
        """Put every token of the prompt back to the first drop, and drop nothing from now on."""
        cache = self.cache
        layer, states = cache.anchor
        cache.hidden[: len(states)] = states
        cache.depth[: len(states)] = layer
        cache.anchor, cache.plan = None, (1.0,) * self.shape.layers

    def attend(self, module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the rows at work over the tokens alive, and the choice of those that stay alive for the next layer."""
        cache, index = self.cache, module.layer_idx
        rows, alive = cache.rows, cache.alive
        square = len(rows) == len(alive)
        visible = None if square else alive[None] <= rows[:, None]
        single = len(rows) == 1
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=None if single else visible, is_causal=square and not single,
                                             scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
        self.log["alive"].append(len(alive))
        self.log["rows"].append(len(rows))
        self.log["revived"].append(int((rows < self.fresh).sum()))
        self.log["pairs"].append(len(rows) * (len(rows) + 1) // 2 if square else int(visible.sum()))
        self.log["probe"].append(0)
        self.chosen = alive
        after = index + 1
        if after < self.shape.layers and cache.plan[after] < cache.plan[index]:
            count = tokens_of(cache.plan[after], cache.seen)
            if count < len(alive):
                # In the prompt only its last token is sure to stay; a token that is being decoded always goes through.
                first = cache.seen - 1 if self.fresh == 0 else self.fresh
                forced = (alive >= first).nonzero().flatten()
                self.log["probe"][-1] = len(alive)
                self.chosen = alive[lazy_choice(row_attention(query[:, :, -1:], key, scaling), count, forced)]
        return out

    def _leave(self, norm, args):
        """The rows of new tokens; revived ones have no logits."""
        rows = self.cache.rows
        self.cache.hidden[rows] = args[0][0].detach()
        self.cache.depth[rows] = self.shape.layers
        return (args[0][:, rows >= self.fresh],)

    def _end(self, model, args, kwargs, output):
        log = {name: tuple(values) for name, values in self.log.items()}
        macs = step_macs(self.shape, log["rows"], log["pairs"], probe=log["probe"])
        self.steps.append(LazyStep(self.cache.seen, self.new, seconds=time.perf_counter() - self.start, macs=macs, **log))
        self.cache.reading, output.cache = False, self.cache
        return output


def _room(held: Tensor | None, like: Tensor, size: int, axis: int, spare: int = 64) -> Tensor:
    """``held``, or a longer copy of it when ``size`` entries along ``axis`` do not fit."""
    if held is not None and held.shape[axis] >= size:
        return held
    shape = list(like.shape)
    shape[axis] = size + spare - (0 if held is None else held.shape[axis])
    more = like.new_zeros(shape)
    return more if held is None else torch.cat([held, more], axis)


def _attend(module, query, key, value, attention_mask, **options):
    out = module.nbkit_lazy.attend(module, query, key, value, options.get("scaling") or query.shape[-1] ** -0.5)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*args, **kwargs):
    return None
