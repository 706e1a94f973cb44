"""A prompt that went through the full model once, and rules that drop rows replayed from what was stored of it.

The inputs, queries, keys and values of all layers are kept for a prompt and its answer. A rule is then replayed from its first drop on: the layers
before it are those of the full model. Since attention is causal, the answer rows read what a cache filled by the pruned prefill would hold, so the
answer's loss is that of the pruned cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbkit.errors import InputError, UnsupportedModelError
from nbkit.methods.fastprefill.cost import ModelShape, prefill_macs

_NAME = "nbkit_stored_states"


@dataclass
class Stored:
    """One prompt and its answer after the full model: per layer the inputs (1, rows, hidden) and the rotated q, k, v (1, heads, rows, head_dim).

    tokens: length of the prompt; the rows behind it are the answer's. nll, exact: answer loss of the full model (mean nats per token), greedy match.
    """

    ids: Any
    tokens: int
    inputs: list[Any]
    qkv: list[tuple[Any, Any, Any]]
    nll: float = float("nan")
    first_nll: float = float("nan")
    exact: bool = False


@dataclass
class Replay:
    """What a replayed rule did; also the ``run`` that the rule sees while it chooses (tokens, layers, ids, positions, state, charge).

    kept: positions alive in each layer. nll: mean nats per answer token; exact: the greedy answer (teacher forced) is right.
    """

    tokens: int
    layers: int
    ids: Any
    positions: Any
    state: dict = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)
    other_macs: float = 0.0
    nll: float = float("nan")
    first_nll: float = float("nan")
    exact: bool = False

    def charge(self, layer: int, *, pairs: float = 0.0, probe: float = 0.0) -> None:
        """Note scored (query, key) pairs of a layer, summed over heads."""
        if pairs:
            raise InputError("rule", got="one that charges attention pairs", allowed="rules that only drop rows")
        self.probe[layer] += probe

    def charge_macs(self, macs: float) -> None:
        """Note work outside of the layers, such as a draft's."""
        self.other_macs += macs

    @property
    def counts(self) -> list[int]:
        """Rows alive in each layer."""
        return [len(p) for p in self.kept]

    def macs(self, shape: ModelShape) -> float:
        """Multiply-accumulates of this prefill, scoring included."""
        return prefill_macs(shape, self.counts).total + sum(self.probe) * shape.head_dim + self.other_macs

    def evidence_kept(self, spans: Sequence[tuple[int, int]]) -> list[float]:
        """Share of the tokens in ``spans`` that is alive, a layer each; 1 where there are none."""
        wanted = {i for start, stop in spans for i in range(start, stop)}
        return [len(wanted.intersection(p.tolist())) / len(wanted) if wanted else 1.0 for p in self.kept]


class LayerRunner:
    """Runs the decoder layers of a causal LM one by one on rows with their own positions; use it as a context manager.

    Raises: UnsupportedModelError for models without model.layers, with sliding-window layers, or without transformers' attention interface.
    """

    def __init__(self, model: Any):
        body = getattr(model, "model", None)
        if any(getattr(body, name, None) is None for name in ("layers", "embed_tokens", "norm", "rotary_emb")):
            raise UnsupportedModelError("model", got=type(model).__name__, allowed="Llama, Mistral, Qwen2, Qwen3 and alike",
                                        hint="it needs model.embed_tokens, model.layers, model.norm and model.rotary_emb")
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise UnsupportedModelError("layers", got=", ".join(sorted(kinds)), allowed="full_attention")
        self.model, self.body, self.shape = model, body, ModelShape.from_config(model.config)
        self._seen: tuple[Any, Any, Any] | None = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[LayerRunner]:
        """Catch q, k and v of every layer while the block runs; the model's attention is put back afterwards."""
        import torch
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def catch(module, query, key, value, attention_mask, scaling=None, **kwargs):
            self._seen = (query, key, value)
            return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)

        AttentionInterface.register(_NAME, catch)
        config, training = self.model.config, self.model.training
        before = config._attn_implementation
        config._attn_implementation = _NAME
        self.model.eval()
        try:
            with torch.inference_mode():
                yield self
        finally:
            config._attn_implementation = before
            self.model.train(training)

    def layer(self, index: int, hidden: Any, positions: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        """One layer on rows (1, n, hidden) at rising ``positions`` (n,): its output and rotated (q, k, v)."""
        around = self.body.rotary_emb(hidden, position_ids=positions[None])
        out = self.body.layers[index](hidden, attention_mask=None, position_ids=positions[None], position_embeddings=around)
        return (out[0] if isinstance(out, tuple) else out), self._seen

    def answer(self, hidden: Any, ids: Any, length: int) -> tuple[float, float, bool]:
        """Mean and first negative log-likelihood of the last ``length`` ids, and whether greedy decoding gives them, from the last layer's output."""
        logits = self.model.lm_head(self.body.norm(hidden[0, -length - 1 : -1])).float()
        target = ids[-length:]
        nll = logits.logsumexp(-1) - logits.gather(-1, target[:, None])[:, 0]
        return float(nll.mean()), float(nll[0]), bool((logits.argmax(-1) == target).all())

    def store(self, prompt_ids: Any, answer_ids: Any) -> Stored:
        """Prompt and answer through the full model.

        Raises: InputError for an empty prompt or answer.
        """
        import torch

        prompt, answer = np.asarray(prompt_ids, dtype=np.int64), np.asarray(answer_ids, dtype=np.int64)
        if prompt.ndim != 1 or answer.ndim != 1 or not len(prompt) or not len(answer):
            raise InputError("prompt and answer", got=(prompt.shape, answer.shape), allowed="two rows of token ids")
        ids = torch.from_numpy(np.concatenate([prompt, answer])).to(self.model.device)
        hidden, positions = self.body.embed_tokens(ids[None]), torch.arange(len(ids), device=ids.device)
        stored = Stored(ids, len(prompt), [], [])
        for index in range(self.shape.layers):
            stored.inputs.append(hidden)
            hidden, qkv = self.layer(index, hidden, positions)
            stored.qkv.append(qkv)
        stored.nll, stored.first_nll, stored.exact = self.answer(hidden, ids, len(answer))
        return stored

    def replay(self, stored: Stored, rule: Any) -> Replay:
        """The same prompt under a rule that drops rows (a `Rows` part), restarted from the stored input of its first drop.

        A rule that chooses prompt tokens before layer 0 is read from there; the answer then follows its last position.
        Raises: InputError for rules that drop after attention, or keep indices that do not rise.
        """
        import torch

        if getattr(rule, "prune_at", "pre") != "pre" or getattr(rule, "last_row_only", False):
            raise InputError("rule", got=type(rule).__name__, allowed="one that drops rows before layers", hint="score_prompt() runs every part")
        tokens, layers = stored.tokens, self.shape.layers
        places = torch.arange(len(stored.ids), device=stored.ids.device)
        run = Replay(tokens, layers, stored.ids[None, :tokens], places[:tokens], probe=[0.0] * layers)
        scaling = getattr(self.body.layers[0].self_attn, "scaling", self.shape.head_dim**-0.5)
        hidden, chosen = None, rule.prefilter(run, self.model, run.ids)
        if chosen is not None:
            index, positions = chosen
            hidden = stored.inputs[0][:, _with_answer(index, tokens, len(places))]
            answer = positions[-1] + 1 + torch.arange(len(places) - tokens, device=places.device)
            places, run.positions = torch.cat([positions, answer]), run.positions[index]
        for index in range(layers):
            keep = rule.keep(run, index) if index else None
            if keep is not None:
                alive = _with_answer(keep, len(run.positions), len(places))
                hidden = (stored.inputs[index] if hidden is None else hidden)[:, alive]
                places, run.positions = places[alive], run.positions[keep]
            run.kept.append(run.positions)
            if hidden is None:
                qkv = stored.qkv[index]
            else:
                hidden, qkv = self.layer(index, hidden, places)
            rule.observe(run, index, *(x[:, :, : len(run.positions)] for x in qkv), scaling)
        if hidden is None:
            run.nll, run.first_nll, run.exact = stored.nll, stored.first_nll, stored.exact
        else:
            run.nll, run.first_nll, run.exact = self.answer(hidden, stored.ids, len(stored.ids) - tokens)
        return run

    def attention_masses(self, stored: Stored, window: int = 32) -> tuple[np.ndarray, np.ndarray]:
        """Attention that each prompt token receives, (layers, tokens) each, largest over heads: from the last ``window`` rows, and from all."""
        import torch

        tokens = stored.tokens
        hide = torch.ones(tokens, tokens, dtype=torch.bool, device=stored.ids.device).triu(1)
        window_mass, column_mass = [], []
        for q, k, _ in stored.qkv:
            group = self.shape.heads // self.shape.kv_heads
            largest = [torch.zeros(tokens, device=hide.device) for _ in range(2)]
            for head in range(self.shape.heads):
                logits = q[0, head, :tokens].float() @ k[0, head // group, :tokens].float().T * self.shape.head_dim**-0.5
                shares = logits.masked_fill_(hide, float("-inf")).softmax(-1)
                largest[0] = torch.maximum(largest[0], shares[-window:].sum(0))
                largest[1] = torch.maximum(largest[1], shares.sum(0))
            window_mass.append(largest[0].cpu().numpy())
            column_mass.append(largest[1].cpu().numpy())
        return np.stack(window_mass), np.stack(column_mass)


def _with_answer(keep: Any, alive: int, rows: int) -> Any:
    """Kept prompt rows, of ``alive``, and all answer rows behind them."""
    import torch

    if not len(keep) or int(keep[0]) < 0 or int(keep[-1]) >= alive or bool((keep.diff() <= 0).any()):
        raise InputError("kept rows", got=keep.tolist()[:8], allowed=f"rising indices below {alive}")
    return torch.cat([keep, torch.arange(alive, rows, device=keep.device)])
