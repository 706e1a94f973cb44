"""What dropping tokens at one layer costs: the table of losses behind the optimiser, measured by restarting from stored layer inputs.

A prompt and its answer go through the full model once; the inputs, queries, keys and values of all layers are kept. Every rule that drops rows is
then replayed from its first drop on: the layers before it are those of the full model. Since attention is causal, the answer rows read what a cache
filled by the pruned prefill would hold, so the answer's loss is that of the pruned cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbkit.errors import InputError, UnsupportedModelError
from nbkit.methods.fastprefill.cost import MacCost, ModelShape, causal_pairs, prefill_macs
from nbkit.methods.fastprefill.optimise import FORBIDDEN, Planner, refine
from nbkit.methods.fastprefill.schedule import PruneSchedule

RATES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Keep rates of the table beside 1."""

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


def prompt_losses(
    runner: LayerRunner, stored: Stored, *, layers: Sequence[int], rates: Sequence[float] = RATES, evidence: Sequence[tuple[int, int]] = (),
    **pruning: Any,
) -> dict[str, Any]:
    """Extra answer loss of one prompt for one drop at each layer to each rate: ``loss[i][j]`` nats per token over the full model's ``nll``.

    Also ``exact[i][j]`` and ``kept[i][j]``, the share of evidence tokens that survive. pruning: options of TokenPruning (score, sinks, window, pool).
    """
    from nbkit.methods.fastprefill.prune import TokenPruning

    out: dict[str, Any] = {"nll": stored.nll, "full_exact": stored.exact, "loss": [], "exact": [], "kept": []}
    for layer in layers:
        runs = [runner.replay(stored, TokenPruning(PruneSchedule.one_shot(layer, rate, runner.shape.layers), **pruning)) for rate in rates]
        out["loss"].append([run.nll - stored.nll for run in runs])
        out["exact"].append([run.exact for run in runs])
        out["kept"].append([run.evidence_kept(evidence)[-1] for run in runs])
    return out


@dataclass(frozen=True)
class SensitivityTable:
    """Losses by prompt, layer and rate, with what each prompt is.

    layers, rates: the grid, rising. losses: (prompts, layers, rates) nats per answer token over the full model. kinds: task of each prompt.
    draws: calibration draw of each prompt.
    Raises: InputError when shapes or orders do not fit, or a loss is NaN.

    >>> table = SensitivityTable((2, 4), (0.1, 0.5), np.array([[[3.0, 1.0], [0.5, 0.6]]]), ("needle",))
    >>> table.smooth()[0].tolist()
    [[3.0, 1.0], [0.55, 0.55]]
    """

    layers: tuple[int, ...]
    rates: tuple[float, ...]
    losses: np.ndarray
    kinds: tuple[str, ...]
    draws: tuple[int, ...] = ()

    def __post_init__(self):
        losses = np.asarray(self.losses, dtype=float)
        object.__setattr__(self, "losses", losses)
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "rates", tuple(self.rates))
        object.__setattr__(self, "kinds", tuple(self.kinds))
        object.__setattr__(self, "draws", tuple(self.draws) or (0,) * len(self.kinds))
        if losses.shape != (len(self.kinds), len(self.layers), len(self.rates)) or not losses.size:
            raise InputError("losses", got=losses.shape, allowed=f"({len(self.kinds)} prompts, {len(self.layers)} layers, {len(self.rates)} rates)")
        if len(self.draws) != len(self.kinds):
            raise InputError("draws", got=len(self.draws), allowed=f"{len(self.kinds)}, one for every prompt")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1 or list(self.rates) != sorted(set(self.rates)):
            raise InputError("layers and rates", got=(self.layers, self.rates), allowed="rising, layers from 1 on")
        if not 0 < self.rates[0] <= self.rates[-1] < 1:
            raise InputError("rates", got=self.rates, allowed="shares in (0, 1); the losses at 1 are 0")
        if not np.isfinite(losses).all():
            raise InputError("losses", got="NaN or infinity", allowed="finite numbers", hint="find the prompt whose full model fails")

    def mean(self, *, kinds: Sequence[str] | None = None, draw: int | None = None) -> np.ndarray:
        """(layers, rates) mean over tasks of the mean over prompts (a task with more prompts weighs no more), of some tasks or one draw."""
        return self.by_kind(kinds=kinds, draw=draw)[1].mean(0)

    def by_kind(self, *, kinds: Sequence[str] | None = None, draw: int | None = None) -> tuple[tuple[str, ...], np.ndarray]:
        """The tasks and their (tasks, layers, rates) means over prompts.

        Raises: InputError for a task or draw that the table does not have.
        """
        names = tuple(dict.fromkeys(self.kinds)) if kinds is None else tuple(kinds)
        which = [[i for i, (k, d) in enumerate(zip(self.kinds, self.draws, strict=True)) if k == name and draw in (None, d)] for name in names]
        if not names or not all(which):
            raise InputError("tasks", got=names, allowed=", ".join(dict.fromkeys(self.kinds)))
        return names, np.stack([self.losses[i].mean(0) for i in which])

    def smooth(self, **choice: Any) -> tuple[np.ndarray, float]:
        """Least-squares fit of the mean that falls with rate and with layer and is >= 0; and the mean absolute change, in nats."""
        raw = self.mean(**choice)
        fitted = np.maximum(monotone(raw), 0)
        return fitted, float(np.abs(fitted - raw).mean())

    def smooth_by_kind(self, **choice: Any) -> tuple[tuple[str, ...], np.ndarray]:
        """The same for every task alone."""
        names, raw = self.by_kind(**choice)
        return names, np.stack([np.maximum(monotone(rows), 0) for rows in raw])

    def spread(self, losses: np.ndarray, depth: int) -> tuple[np.ndarray, tuple[float, ...]]:
        """(..., depth, rates + 1) table for a Planner, and its rates: linear between layers, the last value beyond, no drop before the first.

        losses: (..., layers, rates), such as from smooth().
        """
        losses = np.asarray(losses, dtype=float)
        inside = np.arange(depth)
        flat = losses.reshape(-1, len(self.layers), len(self.rates))
        out = np.zeros((len(flat), depth, len(self.rates) + 1))
        for block, rows in zip(out, flat, strict=True):
            for j in range(len(self.rates)):
                block[:, j] = np.interp(inside, self.layers, rows[:, j])
        out[:, : self.layers[0], : len(self.rates)] = FORBIDDEN
        return out.reshape(*losses.shape[:-2], depth, -1), (*self.rates, 1.0)

    def planner(self, shape: ModelShape, *, tokens: int, cost: Any = None, window: int = 32, floor: int = 36, by_kind: bool = False,
                scored: str = "drop", **choice: Any) -> Planner:
        """A Planner over the smoothed table; ``by_kind`` keeps tasks apart, for the worst-task objective. choice: kinds, draw."""
        losses = self.smooth_by_kind(**choice)[1] if by_kind else self.smooth(**choice)[0]
        table, rates = self.spread(losses, shape.layers)
        return Planner(table, rates, tokens=tokens, cost=cost or MacCost(shape, window), floor=floor, scored=scored)

    def as_dict(self) -> dict[str, Any]:
        """JSON values that from_dict reads."""
        return {
            "layers": list(self.layers), "rates": list(self.rates), "losses": np.round(self.losses, 5).tolist(), "kinds": list(self.kinds),
            "draws": list(self.draws),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> SensitivityTable:
        """A table from as_dict().

        Raises: InputError for a missing key.
        """
        try:
            return cls(value["layers"], value["rates"], np.asarray(value["losses"]), value["kinds"], tuple(value.get("draws", ())))
        except KeyError as error:
            raise InputError("sensitivity table", got=f"no {error}", allowed="layers, rates, losses, kinds, draws") from error


def monotone(table: Any, *, rounds: int = 200, tolerance: float = 1e-9) -> np.ndarray:
    """The closest table (least squares) that never rises along either axis: isotonic regressions in turn, by Dykstra's projections.

    >>> monotone([[1.0, 2.0], [1.0, 0.0]]).tolist()
    [[1.5, 1.5], [1.0, 0.0]]
    """
    from scipy.optimize import isotonic_regression

    current = np.array(table, dtype=float)
    corrections = [np.zeros_like(current), np.zeros_like(current)]
    for _ in range(rounds):
        before = current
        for axis in (0, 1):
            target = current + corrections[axis]
            lines = target.T if axis == 0 else target
            fitted = np.stack([isotonic_regression(line, increasing=False).x for line in lines])
            current = fitted.T if axis == 0 else fitted
            corrections[axis] = target - current
        if np.abs(current - before).max() < tolerance:
            break
    # What a finite number of rounds leaves open along the first axis is closed without opening the second.
    return np.minimum.accumulate(current, axis=0)


def default_layers(depth: int, count: int = 9) -> tuple[int, ...]:
    """``count`` layers for the table, evenly from about a tenth of the depth to the last but two.

    >>> default_layers(30)
    (3, 6, 9, 12, 15, 18, 21, 24, 27)
    """
    if depth < 2:
        raise InputError("model", got=f"{depth} layer", allowed=">= 2 layers", hint="with one layer nothing can be dropped")
    return tuple(sorted({int(i) for i in np.linspace(max(1, depth // 10), max(1, depth - max(1, depth // 10)), count).round()}))


def fit_schedule(
    model: Any, tokenizer: Any, prompts: Sequence[Any], *, latency_budget: float = 0.75, objective: str = "mean", rates: Sequence[float] = RATES,
    layers: Sequence[int] | None = None, score: str = "max", cost: Any = "macs", refine_evaluations: int = 0, sinks: int = 4, window: int = 32,
    **pruning: Any,
) -> PruneSchedule:
    """Measure the table on calibration prompts and return the best schedule within a latency budget.

    prompts: LongPrompt objects, or (prompt text, answer text) pairs, which ``tokenizer`` encodes. latency_budget: share of full prefill.
    objective: "mean" over tasks or "worst" task. rates, layers: the grid (1 is added to the rates; default `default_layers`). cost: "macs", a
    LatencyModel, or any object with layer(rows) and scoring(rows). refine_evaluations: measured coordinate moves afterwards (at most 50).
    The costs are those of the median prompt length. meta holds the smoothing's change in nats.
    Raises: InputError for no prompts, an unknown cost or objective, or a budget outside (0, 1]; RunError for one that no schedule meets.
    Source: reconstruction of FastPrefill, section 3.5.
    """
    if not prompts:
        raise InputError("prompts", got="none", allowed="at least one calibration prompt")
    if not 0 < latency_budget <= 1:
        raise InputError("latency budget", got=latency_budget, allowed="a share of full prefill in (0, 1]")
    if objective not in ("mean", "worst"):
        raise InputError("objective", got=objective, allowed="mean, worst")
    if not 0 <= refine_evaluations <= 50:
        raise InputError("refine_evaluations", got=refine_evaluations, allowed="0 to 50")
    runner = LayerRunner(model)
    charge = MacCost(runner.shape, window) if isinstance(cost, str) and cost == "macs" else cost
    if not all(callable(getattr(charge, name, None)) for name in ("layer", "scoring")):
        raise InputError("cost", got=cost, allowed="'macs', a LatencyModel, or an object with layer(rows) and scoring(rows)")
    grid = tuple(layers) if layers is not None else default_layers(runner.shape.layers)
    wrong = [layer for layer in grid if not 1 <= layer < runner.shape.layers]
    if wrong:
        raise InputError("layers", got=wrong, allowed=f"1 to {runner.shape.layers - 1}")
    shares = tuple(sorted({float(r) for r in rates} - {1.0}))
    options = {"score": score, "sinks": sinks, "window": window, **pruning}
    items = [_encoded(prompt, tokenizer) for prompt in prompts]
    with runner.attached():
        # Refinement replays every prompt again: it is stored twice rather than all at once, as one takes about 0.2 MB a token.
        rows = [prompt_losses(runner, runner.store(ids, answer), layers=grid, rates=shares, **options) for ids, answer, _ in items]
        table = SensitivityTable(grid, shares, np.array([row["loss"] for row in rows]), tuple(kind for _, _, kind in items))
        tokens = int(np.median([len(ids) for ids, _, _ in items]))
        floor = min(tokens, sinks + window)
        planner = table.planner(runner.shape, tokens=tokens, cost=charge, window=window, floor=floor, by_kind=objective == "worst",
                                scored="all" if score == "cummax" else "drop")
        schedule = planner.solve(latency_budget, objective=objective).with_loss(None, smoothing=table.smooth()[1], score=score)
        schedule = schedule.with_loss(planner.loss(schedule, objective=objective))
        if refine_evaluations:
            schedule, _ = refine(schedule, _measured(runner, items, options, objective), planner, latency_budget, max_evaluations=refine_evaluations)
    return schedule


def _measured(runner: LayerRunner, items: Sequence[tuple[Any, Any, str]], options: Mapping[str, Any], objective: str) -> Any:
    """schedule -> measured extra loss on the calibration prompts."""
    from nbkit.methods.fastprefill.prune import TokenPruning

    def evaluate(schedule: PruneSchedule) -> float:
        by_kind: dict[str, list[float]] = {}
        for ids, answer, kind in items:
            stored = runner.store(ids, answer)
            by_kind.setdefault(kind, []).append(runner.replay(stored, TokenPruning(schedule, **options)).nll - stored.nll)
        means = [float(np.mean(values)) for values in by_kind.values()]
        return max(means) if objective == "worst" else float(np.mean(means))

    return evaluate


def _encoded(prompt: Any, tokenizer: Any) -> tuple[Any, Any, str]:
    """(prompt ids, answer ids, task) of a LongPrompt or a pair of texts."""
    if hasattr(prompt, "answer_ids"):
        return prompt.ids, prompt.answer_ids, getattr(prompt, "kind", "prompts")
    try:
        text, answer = prompt
        return tokenizer(text)["input_ids"], tokenizer(answer, add_special_tokens=False)["input_ids"], "prompts"
    except (TypeError, ValueError) as error:
        raise InputError("prompt", got=type(prompt).__name__, allowed="a LongPrompt or a (prompt, answer) pair of texts") from error


def dense_density(shape: ModelShape, counts: Sequence[int]) -> float:
    """Visible pairs of a dense attention among the alive rows, over those of full prefill.

    >>> dense_density(ModelShape(2, 8, 2, 1, 4, 16, 100), [3, 1])
    0.5833333333333334
    """
    return float(sum(causal_pairs(int(n)) for n in counts) / (shape.layers * causal_pairs(int(counts[0]))))
