"""Exact speculative decoding with a feature drafter: greedy, and sampling by rejection."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from nbkit.errors import InputError, UnsupportedModelError

from .chain import roll
from .drafter import Drafter
from .features import check_ids, target_features
from .intervention import NOTHING, Intervention


@dataclass(frozen=True)
class Acceptance:
    """How far drafts were accepted, from the number of accepted drafts of each round in which ``depth`` tokens were drafted.

    Attributes:
        rates: a_k, share of rounds with at least k accepted drafts, k = 1..depth; never rising.
        conditional: alpha_k = a_k / a_{k-1}; NaN once no round gets there.
        without_bonus: tau = sum of a_k, mean accepted drafts. with_bonus: tau + 1, what EAGLE calls acceptance length.
        rounds: number of rounds.
    """

    rates: np.ndarray
    conditional: np.ndarray
    without_bonus: float
    with_bonus: float
    rounds: int


def acceptance(accepted, depth: int) -> Acceptance:
    """Acceptance by depth from accepted drafts per round (or per chain start).

    Raises: InputError for depth 0 or counts outside 0..depth.

    >>> out = acceptance([0, 2, 3, 1], 3)
    >>> out.rates.tolist(), out.without_bonus, out.with_bonus
    ([0.75, 0.5, 0.25], 1.5, 2.5)
    """
    _check_depth(depth)
    counts = np.asarray(accepted, dtype=np.int64).ravel()
    if len(counts) and not 0 <= counts.min() <= counts.max() <= depth:
        raise InputError("accepted", got=f"{counts.min()} to {counts.max()}", allowed=f"0..{depth} per round")
    rates = np.array([(counts >= k).mean() if len(counts) else np.nan for k in range(1, depth + 1)])
    before = np.concatenate([[1.0], rates[:-1]])
    conditional = np.divide(rates, before, out=np.full(depth, np.nan), where=before > 0)
    tau = float(rates.sum())
    return Acceptance(rates, conditional, tau, tau + 1, len(counts))


@dataclass(frozen=True)
class SpeculativeOutput:
    """Result of `speculative_generate`.

    Attributes:
        sequences: (1, prompt + new) ids, prompt included. new_tokens: how many were added, 1 + sum(accepted + 1): the first comes from the
            prompt's own pass, and every round ends in one token of the target (or the end-of-text token).
        accepted: accepted drafts of each round. drafted: drafts of each round; fewer than ``depth`` only near ``max_new_tokens``.
        seconds: total. draft_seconds: of it, in the drafter.
    """

    sequences: Tensor
    new_tokens: int
    accepted: list[int]
    drafted: list[int]
    depth: int
    seconds: float
    draft_seconds: float

    @property
    def rounds(self) -> int:
        """Verification passes of the target after the prompt's."""
        return len(self.accepted)

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance over the rounds that drafted the full depth."""
        return acceptance([a for a, d in zip(self.accepted, self.drafted, strict=True) if d == self.depth], self.depth)

    @property
    def acceptance_length_without_bonus(self) -> float:
        """Mean accepted drafts per full round."""
        return self.acceptance.without_bonus

    @property
    def acceptance_length_with_bonus(self) -> float:
        """Mean tokens per full round, counting the target's own token that ends it."""
        return self.acceptance.with_bonus

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per pass of the target, the prompt's included."""
        return self.new_tokens / (1 + self.rounds)


@torch.no_grad()
def speculative_generate(
    model, drafter: Drafter, input_ids: Tensor, *, depth: int = 5, max_new_tokens: int = 64, do_sample: bool = False, temperature: float = 1.0,
    seed: int = 0, eos_token_id: int | list[int] | None = None, intervention: Intervention = NOTHING,
) -> SpeculativeOutput:
    """Continue one prompt with drafts that the target verifies; the output is the target's own.

    Greedy output equals plain greedy decoding token for token (up to exact ties in the logits); sampled output has the target's distribution.
    After every verification the chain's keys are dropped and the accepted positions are read again with the target's true features.

    Args:
        input_ids: (1, N) or (N,). depth: drafts per round. temperature: with ``do_sample``. seed: of drafts, acceptance and resampling.
        eos_token_id: stop there; None takes the generation configuration's, an empty list none at all.
        intervention: what is done to the chain (the output stays exact, only acceptance changes).

    Raises: InputError for depth 0, several prompts, ids outside the vocabulary, a drafter of another target or temperature <= 0;
        UnsupportedModelError for a cache that cannot be rolled back.

    Source: arXiv 2211.17192 (rejection); arXiv 2503.01840 (feature drafting).
    """
    _check_depth(depth)
    ids = input_ids[None] if isinstance(input_ids, Tensor) and input_ids.ndim == 1 else input_ids
    check_ids(ids, drafter.cfg.vocab_size)
    if len(ids) != 1:
        raise InputError("input_ids", got=tuple(ids.shape), allowed="one prompt, (1, N) or (N,)")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError("max_new_tokens", got=max_new_tokens, allowed=">= 1")
    if do_sample and not temperature > 0:
        raise InputError("temperature", got=temperature, allowed="> 0", hint="do_sample=False for greedy decoding")
    drafter.check_target(model)
    if drafter._target is None:
        drafter.bind(model)
    start, drafting = time.perf_counter(), 0.0
    ends = _ends(model, eos_token_id)
    generator = torch.Generator(device=ids.device).manual_seed(seed)
    cache = DynamicCache(config=model.config)
    # Layers with a sliding window forget for good unless told that tokens may be taken back.
    cache.activate_past_recording()
    found = target_features(model, ids, drafter.cfg.aux_layers, cache=cache)
    if not cache.is_croppable:
        raise UnsupportedModelError("target", got="a cache that cannot be rolled back", allowed="attention layers", hint="model.generate")
    cache.crop(0)
    new = [_choose(found.logits[:, -1], do_sample, temperature, generator)]
    accepted: list[int] = []
    drafted: list[int] = []
    # Pairs (token, fused features of the position before it) that the drafter has not kept yet; the last one starts the chain.
    tokens = torch.cat([ids[:, 1:], ids.new_tensor([[new[0]]])], 1)
    g = drafter.fuse(drafter.pick_features(found.aux, found.last))
    kv, position, limits = None, 0, intervention.limits(drafter.cfg)
    while len(new) < max_new_tokens and new[-1] not in ends:
        moment = time.perf_counter()
        at = torch.arange(position, position + tokens.shape[1], device=ids.device)[None]
        if tokens.shape[1] > 1:
            kv = drafter.step(drafter.embed(tokens[:, :-1]), g[:, :-1], at[:, :-1], kv, logits=False, limits=limits).kv
        size = min(depth, max_new_tokens - len(new) - 1)
        pick = _Picker(drafter, temperature if do_sample else None, generator)
        if size:
            # Noise of its own for every round.
            own = replace(intervention, seed=intervention.seed + 7919 * len(accepted))
            steps = roll(drafter, kv, tokens[:, -1:], g[:, -1:], at[:, -1:], size, pick, intervention=own)
            pick(size, steps[-1].logits)
        drafting += time.perf_counter() - moment
        checked = ids.new_tensor([[new[-1], *pick.drafts]])
        found = target_features(model, checked, drafter.cfg.aux_layers, cache=cache)
        if do_sample:
            p = torch.softmax(found.logits[0].float() / temperature, -1)
            n, last = reject(p, pick.distributions(p), pick.drafts, generator)
        else:
            best = found.logits[0].argmax(-1).tolist()
            n = next((i for i, token in enumerate(pick.drafts) if token != best[i]), size)
            last = best[n]
        stop = next((i for i in range(n) if pick.drafts[i] in ends), None)
        if stop is not None:
            n, last = stop, pick.drafts[stop]
        accepted.append(n)
        drafted.append(size)
        new += [*pick.drafts[:n], last]
        cache.crop(n - size)
        # The chain's own keys were never added to kv; its first pair and the accepted ones are read again with true features.
        position += tokens.shape[1] - 1
        fresh = drafter.fuse(drafter.pick_features(found.aux[:, : n + 1], found.last[:, : n + 1]))
        tokens = torch.cat([tokens[:, -1:], checked[:, 1 : n + 1], ids.new_tensor([[last]])], 1)
        g = torch.cat([g[:, -1:], fresh], 1)
    sequences = torch.cat([ids, ids.new_tensor([new])], 1)
    return SpeculativeOutput(sequences, len(new), accepted, drafted, depth, time.perf_counter() - start, drafting)


def reject(p: Tensor, q: Tensor, drafts: list[int], generator: torch.Generator) -> tuple[int, int]:
    """Speculative sampling: accept draft i with probability min(1, p_i / q_i), at the first refusal draw from (p_i - q_i)+.

    The token that comes out at every position has the distribution p, whatever q is.

    Args:
        p: (K + 1, vocabulary) of the target. q: (K, vocabulary) of the drafter. drafts: K ids drawn from q.

    Returns:
        How many drafts are accepted, and the token after them.

    Source: arXiv 2211.17192, algorithm 1.

    >>> p = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> reject(p, p[:1], [1], torch.Generator().manual_seed(0))
    (1, 0)
    """
    for i, token in enumerate(drafts):
        u = torch.rand((), generator=generator, device=p.device)
        if u * q[i, token] >= p[i, token]:
            rest = (p[i] - q[i]).clamp_min(0)
            # Rounding can leave nothing where p and q are equal; then the refusal itself was rounding.
            rest = rest if rest.sum() > 0 else p[i]
            return i, int(torch.multinomial(rest, 1, generator=generator))
    return len(drafts), int(torch.multinomial(p[len(drafts)], 1, generator=generator))


class _Picker:
    """Next token of a chain from its logits; keeps the drafts and, when sampling, their distributions."""

    def __init__(self, drafter: Drafter, temperature: float | None, generator: torch.Generator):
        self.drafter, self.temperature, self.generator = drafter, temperature, generator
        self.drafts: list[int] = []
        self._q: list[Tensor] = []

    def __call__(self, step: int, logits: Tensor) -> Tensor:
        if self.temperature is None:
            token = self.drafter.propose(logits)
        else:
            q = torch.softmax(logits[0, 0].float() / self.temperature, -1)
            if self.drafter.cfg.draft_vocab is not None:
                q = torch.zeros(self.drafter.cfg.vocab_size, device=q.device).index_put_((self.drafter.vocab_ids,), q)
            self._q.append(q)
            token = torch.multinomial(q, 1, generator=self.generator)[None]
        self.drafts.append(int(token))
        return token

    def distributions(self, like: Tensor) -> Tensor:
        """(drafts, vocabulary) probabilities that the drafts were drawn from."""
        return torch.stack(self._q) if self._q else like[:0]


def _choose(logits: Tensor, do_sample: bool, temperature: float, generator: torch.Generator) -> int:
    if not do_sample:
        return int(logits.argmax(-1))
    return int(torch.multinomial(torch.softmax(logits[0].float() / temperature, -1), 1, generator=generator))


def _ends(model, eos_token_id) -> set[int]:
    """Ids that end the text."""
    if eos_token_id is None:
        settings = getattr(model, "generation_config", None)
        eos_token_id = getattr(settings, "eos_token_id", None)
    if eos_token_id is None:
        return set()
    return {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)


def _check_depth(depth) -> None:
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise InputError("depth", got=depth, allowed=">= 1")
