"""Choosing among given options by the log-likelihood that a language model gives them.

The prefix is read once: keys and values of what two prefixes share are kept between calls, and all options continue it in one batched call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbkit.errors import InputError, UnsupportedModelError

__all__ = ["SCORES", "Choice", "ChoiceScorer"]

SCORES = ("sum", "mean", "pmi")
"""Log-likelihood of the whole option; per token; minus its log-likelihood after a prefix that says nothing."""


@dataclass(frozen=True)
class Choice:
    """Scores of the options after one prefix, in nats.

    Attributes:
        options: the texts.
        sum, mean: (options,) log-likelihood, whole and per token.
        pmi: (options,) sum minus the sum after the scorer's null prefix; None without one.
        tokens: (options,) number of tokens.

    >>> choice = Choice(("a", "b"), np.array([-1.0, -3.0]), np.array([-1.0, -1.5]), None, np.array([1, 2]))
    >>> choice.pick(), round(float(choice.probabilities()[0]), 3), round(choice.entropy(), 3)
    (0, 0.881, 0.365)
    """

    options: tuple[str, ...]
    sum: np.ndarray
    mean: np.ndarray
    pmi: np.ndarray | None
    tokens: np.ndarray

    def score(self, by: str = "sum") -> np.ndarray:
        """(options,) the scores of one kind. Raises: InputError for an unknown kind, or pmi without a null prefix."""
        if by not in SCORES:
            raise InputError("score", got=by, allowed=", ".join(SCORES))
        value = getattr(self, by)
        if value is None:
            raise InputError("score", got="pmi without a null prefix", allowed="a scorer made with null=")
        return value

    def pick(self, by: str = "sum") -> int:
        """Index of the best option; the first of equals."""
        return int(np.argmax(self.score(by)))

    def probabilities(self, by: str = "sum") -> np.ndarray:
        """(options,) softmax of the scores."""
        score = self.score(by)
        weights = np.exp(score - score.max())
        return weights / weights.sum()

    def entropy(self, by: str = "sum") -> float:
        """Entropy of the probabilities in nats, from 0 to log(options)."""
        p = self.probabilities(by)
        return float(-(p * np.log(np.maximum(p, 1e-300))).sum())


class ChoiceScorer:
    """Constrained log-likelihood choice with any causal language model of transformers.

    lead: put before every option (a space, for tokenizers that join it with the word), so the prefix should not end in one. null: a prefix that
    carries no information, for ``pmi``. window: only the last so many tokens of the prefix are read. reuse: keep keys and values of the last prefix;
    False reads every prefix from its start. memo: results by (prefix, options), never computed twice; ``tokens_read`` counts what was computed.
    Raises: InputError for a window below 1 or a missing tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any, *, lead: str = " ", null: str | None = None, window: int | None = None, reuse: bool = True):
        if tokenizer is None:
            raise InputError("tokenizer", got=None, allowed="the tokenizer of the model")
        if window is not None and window < 1:
            raise InputError("window", got=window, allowed=">= 1 tokens, or None")
        self.model, self.tokenizer, self.lead, self.null, self.window, self.reuse = model, tokenizer, lead, null, window, reuse
        self.memo: dict[tuple[str, tuple[str, ...], str | None], Choice] = {}
        self._bases: dict[tuple[str, tuple[str, ...]], np.ndarray] = {}
        self.tokens_read = 0
        self._ids: list[int] = []
        self._cache: Any = None
        self._last: Any = None
        self._encoded: dict[str, tuple[int, ...]] = {}

    def __call__(self, prefix: str, options: Sequence[str], *, null: str | None = None) -> Choice:
        """Score the options after the prefix; ``null`` stands in for the scorer's null prefix.

        Raises: InputError for no options, an option or a prefix without tokens; UnsupportedModelError for a model whose cache cannot be cut back.
        """
        null = self.null if null is None else null
        key = prefix, tuple(options), null
        if key not in self.memo:
            base = None if null is None else self._base(null, key[1])
            sums = self._sums(prefix, key[1])
            tokens = np.array([len(self._encode(option)) for option in key[1]])
            self.memo[key] = Choice(key[1], sums, sums / tokens, None if base is None else sums - base, tokens)
        return self.memo[key]

    def _base(self, null: str, options: tuple[str, ...]) -> np.ndarray:
        """Sums after a null prefix; kept apart, so that reading it does not push out what is known of the last prefix."""
        if (null, options) not in self._bases:
            kept = self._ids, self._cache, self._last
            self._ids, self._cache, self._last = [], None, None
            self._bases[null, options] = self._sums(null, options)
            self._ids, self._cache, self._last = kept
        return self._bases[null, options]

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode(self, option: str) -> tuple[int, ...]:
        if option not in self._encoded:
            ids = tuple(self.tokenizer(self.lead + option, add_special_tokens=False)["input_ids"])
            if not option or not ids:
                raise InputError("option", got=option, allowed="text of at least one token")
            self._encoded[option] = ids
        return self._encoded[option]

    def _sums(self, prefix: str, options: tuple[str, ...]) -> np.ndarray:
        """(options,) log-likelihood of each option after the prefix."""
        import torch

        if not options:
            raise InputError("options", got="none", allowed="at least one")
        encoded = [self._encode(option) for option in options]
        with torch.inference_mode():
            first = self._read(prefix)
            sums = first[[ids[0] for ids in encoded]].double()
            longer = [i for i, ids in enumerate(encoded) if len(ids) > 1]
            if longer:
                width = max(len(encoded[i]) for i in longer) - 1
                rows = torch.zeros(len(longer), width, dtype=torch.long)
                for row, i in zip(rows, longer):
                    # The last token of an option is only predicted, never read; what stands right of the end is not looked at.
                    row[: len(encoded[i]) - 1] = torch.tensor(encoded[i][:-1])
                logp = self._continue(rows)
                for row, i in zip(logp, longer):
                    for at, token in enumerate(encoded[i][1:]):
                        sums[i] += row[at, token].double()
        return sums.numpy()

    def _read(self, prefix: str) -> Any:
        """(vocabulary,) log-probabilities of the token after the prefix; keys and values of the shared part are not computed again."""
        import torch

        ids = self.tokenizer(prefix, add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputError("prefix", got=prefix, allowed="text of at least one token")
        ids = ids if self.window is None else ids[-self.window :]
        if ids == self._ids:
            return self._last
        shared = 0
        if self.reuse and self._cache is not None:
            limit = min(len(ids) - 1, len(self._ids))
            while shared < limit and ids[shared] == self._ids[shared]:
                shared += 1
        cache = self._cut(shared) if shared else self._new_cache()
        # Until the call below is through, nothing is known to be read.
        self._ids, self._cache = [], None
        new = torch.tensor([ids[shared:]], device=self.model.device)
        out = self.model(new, cache=cache, use_cache=True, logits_to_keep=1)
        self.tokens_read += len(ids) - shared
        self._ids, self._cache, self._last = list(ids), cache, out.logits[0, -1].float().log_softmax(-1).cpu()
        return self._last

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _cut(self, tokens: int) -> Any:
        """The cache, cut back to its first ``tokens``."""
        layers = self._cache.layers
        if any(not hasattr(layer, "crop") or getattr(layer, "is_sliding", False) for layer in layers):
            raise UnsupportedModelError("cache of the model", got="layers that forget", allowed="full attention in all layers", hint="reuse=False")
        if tokens < len(self._ids):
            self._cache.crop(tokens - len(self._ids))
        return self._cache

    def _continue(self, rows: Any) -> Any:
        """(rows, width, vocabulary) log-probabilities after each token of the rows, all of which continue the prefix read last."""
        import copy

        branch = copy.deepcopy(self._cache)
        branch.batch_repeat_interleave(len(rows))
        self.tokens_read += rows.numel()
        return self.model(rows.to(self.model.device), cache=branch, use_cache=True).logits.float().log_softmax(-1).cpu()
