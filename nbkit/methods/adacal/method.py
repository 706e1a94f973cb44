"""AdaCal as an attention rule of `nbkit.inference`, and the profile of a model that reads a prompt densely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from nbkit.errors import InputError
from nbkit.inference import Run, attach, register
from nbkit.inference.patterns import Pattern, PatternAttention, causal_pairs

from .augment import Choice
from .config import AdaCalConfig
from .dispatch import Dispatch, dispatch
from .metrics import reduce_rows
from .policy import plan_layer


@register
@dataclass(frozen=True, eq=False)
class AdaCal(PatternAttention):
    """Sparse prefill whose heads are profiled and augmented one by one while the prompt is read.

    The profile of every layer comes from the stream that earlier layers have already thinned out. Decoding stays dense.

    Args:
        config: sizes and policies, see :class:`AdaCalConfig`.
        tokenizer: what the dispatcher reads the prompt with when ``config.task`` is ``auto``. Without one it cannot see a question or a table,
            and every prompt is ``general``.

    Source: reconstructed from the abstract (task dispatch, head-wise profiling, on-demand augmentation) and from prior work.

    >>> AdaCal(AdaCalConfig(task="retrieval")).config.task
    'retrieval'
    """

    name: ClassVar[str] = "adacal"
    config: AdaCalConfig = field(default_factory=AdaCalConfig)
    tokenizer: Any = field(default=None, repr=False)

    def __post_init__(self):
        if not isinstance(self.config, AdaCalConfig):
            raise InputError("config", got=type(self.config).__name__, allowed="an AdaCalConfig", hint="AdaCal(AdaCalConfig(tau=0.6))")

    def pattern(self, run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Pattern:
        """What each head of ``layer`` reads; the profile goes to ``run.state[self]``."""
        state = run.state.setdefault(self, {"read": [0] * run.layers, "dispatch": [], "profile": []})
        # The prompts of a batch come one after another in every layer.
        prompt = state["read"][layer]
        state["read"][layer] += 1
        if prompt == len(state["dispatch"]):
            state["dispatch"].append(self._dispatch(run, prompt))
        task = state["dispatch"][prompt].task
        policy = self.config.policy(task)
        late = policy.fallback_after is not None and policy.fallback_after < 1 and layer >= policy.fallback_after * run.layers
        plan = plan_layer(q[0], k[0], self.config, task=task, scaling=scaling, fallback=late)
        rows, keys = q.shape[2], k.shape[2]
        share = plan.pattern.pairs(rows, keys) / causal_pairs(rows, keys)
        state["profile"] += [{"prompt": prompt} | row for row in rows_of(layer, plan.profile, plan.choice, share)]
        return plan.pattern

    def attend(self, run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Find the pattern, charge its pairs and the probe, and compute the output (1, heads, n, value_dim)."""
        # Transposed views, as models hand them over, would be copied tile by tile.
        return super().attend(run, layer, q.contiguous(), k, v, scaling)

    @contextmanager
    def attach(self, model: Any) -> Iterator[AdaCalRun]:
        """Read prompts with this rule inside the block; the model is restored afterwards.

        Raises: what :func:`nbkit.inference.attach` raises, and InputError from the first forward pass for a prompt shorter than the probe.
        """
        with attach(model, attention=self) as run:
            yield AdaCalRun(run, self)

    def _dispatch(self, run: Run, prompt: int) -> Dispatch:
        if self.config.task != "auto":
            return Dispatch(self.config.task, {})
        if run.ids is None:
            raise InputError("prompt", got="inputs_embeds", allowed="input_ids", hint='name the class: AdaCalConfig(task="retrieval")')
        return dispatch(run.ids[prompt], self.tokenizer, sinks=self.config.sinks, window=self.config.window)


class AdaCalRun:
    """What happened while the last prompt was read: AdaCal's own record in front of everything that the reader's `Run` has."""

    def __init__(self, run: Run, part: AdaCal):
        self._run, self._part = run, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    @property
    def profile(self) -> list[dict[str, Any]]:
        """One row a prompt, layer and head: the metrics, whether the head was active and what it got. Raises: InputError before a prompt was read."""
        return self._read("profile")

    @property
    def task(self) -> str | list[str]:
        """The class whose policy was used; one a prompt for a batch of several."""
        return self._one([found.task for found in self._read("dispatch")])

    @property
    def features(self) -> dict[str, float] | list[dict[str, float]]:
        """What the dispatcher saw; empty when the task was given; one a prompt for a batch of several."""
        return self._one([found.features for found in self._read("dispatch")])

    @staticmethod
    def _one(found: list[Any]) -> Any:
        return found[0] if len(found) == 1 else found

    def _read(self, name: str) -> Any:
        state = self._run.state.get(self._part, {})
        if name not in state:
            raise InputError("run", got="no prompt read yet", allowed="a forward pass inside the with block")
        return state[name]


def rows_of(layer: int, profile: Any, choice: Choice, density: Tensor) -> list[dict[str, Any]]:
    """The record of one layer, one dict a head; density: (heads,) share of the causal pairs, probe not counted."""
    mass = profile.mid[0]
    values = {
        "entropy": profile.entropy[0], "concentration": profile.concentration[0], "mid_mean": reduce_rows(mass, "mean"),
        "mid_max": reduce_rows(mass, "max"), "mid_last": reduce_rows(mass, "last"), "active": choice.active, "dense_rows": choice.dense,
        "columns": (choice.columns >= 0).sum(1), "slashes": (choice.slashes >= 0).sum(1), "covered": choice.covered, "density": density,
    }
    lists = {name: value.tolist() for name, value in values.items()}
    return [{"layer": layer, "head": h} | {name: column[h] for name, column in lists.items()} for h in range(len(mass))]


class _Observer(PatternAttention):
    """Reads densely and profiles every head on the way."""

    name = "adacal-profile"

    def __init__(self, part: AdaCal):
        self.part = part

    def pattern(self, run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Pattern:
        self.part.pattern(run, layer, q, k, v, scaling)
        return Pattern(q.shape[1], window=k.shape[2])


def profile(model: Any, ids: Any, cfg: AdaCalConfig | None = None, *, tokenizer: Any = None) -> list[dict[str, Any]]:
    """The profile of all heads of a model that reads the prompt densely: the offline counterpart of ``AdaCalRun.profile``.

    ids: (tokens,) or (1, tokens); cfg: default with the policy ``general``. ``active``, ``columns``, ``slashes`` and ``density`` say what AdaCal
    would do for these profiles. A sparse stream shows deeper layers other states, so this is not what AdaCal sees online.
    Raises: InputError for a batch or a prompt shorter than the probe.
    """
    part = AdaCal(AdaCalConfig(task="general") if cfg is None else cfg, tokenizer)
    ids = torch.as_tensor(ids).reshape(1, -1) if torch.as_tensor(ids).dim() == 1 else torch.as_tensor(ids)
    if ids.dim() != 2 or len(ids) != 1:
        raise InputError("ids", got=tuple(ids.shape), allowed="(tokens,) or (1, tokens)")
    with torch.inference_mode(), attach(model, attention=_Observer(part)) as run:
        model(ids.to(model.device), logits_to_keep=1)
        return run.state[part]["profile"]
