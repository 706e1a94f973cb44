"""Coarse task dispatch: which class of prompt this is, from its tokens alone, in under a millisecond."""

from __future__ import annotations

import re
import weakref
import zlib
from typing import Any, NamedTuple

import numpy as np

from nbkit.errors import InputError

# Tokens at the end in which a question is looked for, and whose n-grams are looked up in what comes before.
CUE_TOKENS, QUERY_TOKENS = 96, 64
# An n-gram is rare when the prompt holds it at most this often.
RARE = 3

_CUES = re.compile(
    r"\?|\b(?:what|which|who|whom|whose|when|where|why|how many|how much)\b|\b(?:answer|question|find|recall|according to|based on)\b", re.IGNORECASE,
)


class Dispatch(NamedTuple):
    """The class of a prompt, ``retrieval``, ``structure`` or ``general``, and the features behind it."""

    task: str
    features: dict[str, float]


def dispatch(ids: Any, tokenizer: Any = None, *, sinks: int = 4, window: int = 64) -> Dispatch:
    """Classify a prompt by overlap with its question, question cues and regularity.

    ``retrieval`` when rare n-grams of the last tokens recur in the middle of the prompt and a question cue stands in the last tokens;
    ``structure`` when the text is regular (tables, logs, code) and no cue is there; ``general`` otherwise, also when the two disagree.

    ids: token ids of one prompt, (tokens,) or (1, tokens); tokenizer: of transformers; without one the text cannot be read, so that no cue and no
    regularity is found and the class is ``general``. sinks, window: what does not count as the middle.
    Raises: InputError for an empty prompt or a batch of several.
    Source: the abstract's "coarse, experience-driven task dispatch"; features and thresholds are reconstructed, set on calibration templates.

    >>> dispatch([5, 6, 7]).task
    'general'
    """
    ids = _one_prompt(ids)
    features = {"tokens": float(len(ids)), "overlap": float(query_overlap(ids, sinks=sinks, window=window)), "readable": float(tokenizer is not None)}
    features |= {"cues": 0.0, "symbols": 0.0, "lines": 0.0, "line_spread": 0.0, "zlib": _zlib_ratio(ids)}
    if tokenizer is not None:
        tail = tokenizer.decode(ids[-CUE_TOKENS:].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        features["cues"] = float(len(_CUES.findall(tail)))
        features |= _regularity(ids, _pieces(tokenizer))
    return Dispatch(classify(features), features)


def classify(features: dict[str, float]) -> str:
    """The class that follows from the features of :func:`dispatch`."""
    asked = features["cues"] > 0
    regular = is_regular(features)
    if asked and features["overlap"] > 0 and not regular:
        return "retrieval"
    return "structure" if regular and not asked else "general"


def is_regular(features: dict[str, float]) -> bool:
    """Whether the text looks like a table, a log or code: many digits and marks, or short lines and repeated material."""
    return features["symbols"] > 0.2 or (features["zlib"] < 0.5 and features["lines"] > 0.06)


def query_overlap(ids: np.ndarray, *, sinks: int = 4, window: int = 64) -> int:
    """How many rare n-grams (n = 2, 3) of the last tokens stand in the middle of the prompt, too.

    >>> query_overlap(np.array([0, 8, 9, *range(20, 120), 8, 9]), sinks=1)
    1
    """
    total = 0
    edge = len(ids) - max(QUERY_TOKENS, window)
    for n in (2, 3):
        if edge - sinks < n or len(ids) < n:
            continue
        grams = np.zeros(len(ids) - n + 1, dtype=np.int64)
        # Wrapping 64-bit arithmetic: a collision of two different n-grams within one prompt is out of the question.
        with np.errstate(over="ignore"):
            for k in range(n):
                grams = grams * np.int64(1_000_003) + ids[k : k + len(grams)]
        start = max(0, len(ids) - QUERY_TOKENS)
        values, inverse, counts = np.unique(grams, return_inverse=True, return_counts=True)
        asked = np.zeros(len(values), dtype=bool)
        asked[inverse[start:]] = True
        middle = np.zeros(len(values), dtype=bool)
        middle[inverse[sinks : max(sinks, edge - n + 1)]] = True
        total += int(np.count_nonzero(asked & middle & (counts <= RARE)))
    return total


def _one_prompt(ids: Any) -> np.ndarray:
    array = np.asarray(ids.detach().cpu() if hasattr(ids, "detach") else ids)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InputError("ids", got=f"shape {array.shape} {array.dtype}", allowed="token ids of one prompt, (tokens,) or (1, tokens)")
    return array.astype(np.int64)


def _zlib_ratio(ids: np.ndarray) -> float:
    """Compressed over plain size of the ids as two or four bytes each."""
    raw = ids.astype("<u2" if ids.max(initial=0) < 2**16 else "<u4").tobytes()
    return len(zlib.compress(raw, 1)) / len(raw)


class _Pieces:
    """Characters, digits, marks and line ends of every token of a tokenizer, filled in as tokens are met."""

    def __init__(self, size: int):
        self.known = np.zeros(size, dtype=bool)
        self.counts = np.zeros((size, 4), dtype=np.float32)

    def learn(self, tokens: np.ndarray, decode: Any) -> None:
        for token in tokens.tolist():
            text = decode([token])
            digits, marks = sum(c.isdigit() for c in text), sum(not (c.isalnum() or c.isspace()) for c in text)
            self.counts[token] = len(text.replace(" ", "")), digits, marks, text.count("\n")
        self.known[tokens] = True


_TABLES: weakref.WeakKeyDictionary[Any, _Pieces] = weakref.WeakKeyDictionary()


def _pieces(tokenizer: Any) -> tuple[_Pieces, Any]:
    if tokenizer not in _TABLES:
        _TABLES[tokenizer] = _Pieces(len(tokenizer))
    return _TABLES[tokenizer], tokenizer


def _regularity(ids: np.ndarray, source: tuple[_Pieces, Any]) -> dict[str, float]:
    """Share of digits and marks among the visible characters, line ends a token, relative spread of the line lengths in tokens."""
    table, tokenizer = source
    unknown = np.unique(ids[~table.known[ids]])
    if len(unknown):
        table.learn(unknown, tokenizer.decode)
    rows = table.counts[ids]
    characters, digits, marks, ends = rows.sum(0)
    visible = max(float(characters - ends), 1.0)
    lengths = np.diff(np.flatnonzero(rows[:, 3] > 0))
    spread = float(lengths.std() / lengths.mean()) if len(lengths) > 1 else 0.0
    return {"symbols": float(digits + marks) / visible, "lines": float(ends) / len(ids), "line_spread": spread}
