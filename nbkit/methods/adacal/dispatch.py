"""Coarse task dispatch: which class of prompt this is, from its tokens alone, in under a millisecond."""

from __future__ import annotations

import re
import weakref
import zlib
from typing import Any, NamedTuple

import numpy as np

from nbkit.errors import InputError

# Tokens at the end in which the question is looked for; a final paragraph longer than this is none.
QUERY_TOKENS = 64
# An n-gram is rare when the prompt holds it at most this often.
RARE = 3
LONGEST = 8
_FACTOR = np.int64(1_000_003)

_CUES = re.compile(
    r"\?(?=\s|$)|^\s*(?:question|answer|q|a)\s*:|^\s*(?:what|which|who|whom|whose|when|where|why|how|find|recall|answer)\b",
    re.IGNORECASE | re.MULTILINE,
)


class Dispatch(NamedTuple):
    """The class of a prompt, ``retrieval``, ``structure`` or ``general``, and the features behind it."""

    task: str
    features: dict[str, float]


def dispatch(ids: Any, tokenizer: Any = None, *, sinks: int = 4, window: int = 64) -> Dispatch:
    """Classify a prompt by overlap of its ending with its middle, by question cues, and by regularity.

    ``retrieval``: rare n-grams of the final paragraph recur in the middle, and it is a question: a cue word or mark, or an unfinished sentence
    that repeats at least four tokens of the middle (eight in regular text). ``structure``: the text is regular (tables, logs, code) and asks
    nothing. ``general``: all else.

    ids: token ids of one prompt, (tokens,) or (1, tokens); tokenizer: of transformers; without one the text cannot be read, so that no cue and no
    regularity is found and the class is ``general``. sinks, window: what does not count as the middle.
    Raises: InputError for an empty prompt or a batch of several.
    Source: the abstract's "coarse, experience-driven task dispatch"; features and thresholds are reconstructed, set on calibration templates.

    >>> dispatch([5, 6, 7]).task
    'general'
    """
    ids = _one_prompt(ids)
    features = {"tokens": float(len(ids)), "readable": float(tokenizer is not None), "zlib": _zlib_ratio(ids)}
    ending = min(QUERY_TOKENS, len(ids))
    features |= {"cues": 0.0, "open": 0.0, "symbols": 0.0, "lines": 0.0, "indent": 0.0}
    if tokenizer is not None:
        features |= _regularity(ids, tokenizer)
        tail = tokenizer.decode(ids[-QUERY_TOKENS:].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        paragraph = tail.rstrip("\n").rpartition("\n\n")
        features["cues"] = float(len(_CUES.findall(paragraph[2])))
        if paragraph[1]:
            features["open"] = float(not paragraph[2].rstrip().endswith((".", "!", ";", "}")))
            ending = max(1, round(ending * len(paragraph[2]) / max(len(tail), 1)))
    features["overlap"], features["longest"] = map(float, query_overlap(ids, ending, sinks=sinks, window=window))
    return Dispatch(classify(features), features)


def classify(features: dict[str, float]) -> str:
    """The class that follows from the features of :func:`dispatch`."""
    regular = is_regular(features)
    # Code and tables repeat themselves anyway, so there an ending has to repeat more.
    asked = features["cues"] > 0 or (features["open"] > 0 and features["longest"] >= (LONGEST if regular else 4))
    if asked and features["overlap"] > 0:
        return "retrieval"
    return "structure" if regular and not asked else "general"


def is_regular(features: dict[str, float]) -> bool:
    """Whether the text looks like a table, a log or code: many digits and marks, or indented lines."""
    return features["symbols"] > 0.25 or (features["indent"] > 0.4 and features["symbols"] > 0.12)


def query_overlap(ids: np.ndarray, ending: int = QUERY_TOKENS, *, sinks: int = 4, window: int = 64) -> tuple[int, int]:
    """How many rare n-grams (n = 2, 3) of the last ``ending`` tokens stand in the middle of the prompt, too, and the longest rare one (up to 8).

    >>> query_overlap(np.array([0, 8, 9, *range(20, 120), 8, 9]), 2, sinks=1)
    (1, 2)
    """
    total, longest = 0, 0
    if len(ids) < 2:
        return total, longest
    edge, last = len(ids) - max(QUERY_TOKENS, window), max(0, len(ids) - ending)
    # Wrapping 64-bit arithmetic; two different n-grams of one prompt do not collide in practice.
    with np.errstate(over="ignore"):
        grams = ids[:-1] * _FACTOR + ids[1:]
        asked = np.unique(grams[last:]) if last < len(grams) else grams[:0]
        if not len(asked):
            return total, longest
        # Where a bigram of the ending stands; a longer n-gram can only start there.
        at = np.flatnonzero(asked[np.searchsorted(asked, grams).clip(max=len(asked) - 1)] == grams)
        grams = grams[at]
        for n in range(2, LONGEST + 1):
            values, which, counts = np.unique(grams, return_inverse=True, return_counts=True)
            common = np.zeros((2, len(values)), dtype=bool)
            common[0, which[at >= last]] = True
            common[1, which[(at >= sinks) & (at + n <= edge)]] = True
            common = common.all(0)
            rare = int(np.count_nonzero(common & (counts <= RARE)))
            total += rare if n <= 3 else 0
            longest = n if rare else longest
            stays = common[which] & (at + n < len(ids))
            at = at[stays]
            if not len(at):
                break
            grams = grams[stays] * _FACTOR + ids[at + n]
    return total, longest


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
    """Visible characters, digits and marks, line ends and indents of every token of a tokenizer, filled in as tokens are met."""

    def __init__(self, size: int):
        self.known = np.zeros(size, dtype=bool)
        self.counts = np.zeros((size, 4), dtype=np.float32)

    def learn(self, tokens: np.ndarray, decode: Any) -> None:
        for token in tokens.tolist():
            text = decode([token])
            visible = "".join(text.split())
            symbols = sum(not c.isalpha() for c in visible)
            # Indents are runs of blanks, alone or behind a line end.
            indent = text.isspace() and text.rpartition("\n")[2].count(" ") >= 2
            self.counts[token] = len(visible), symbols, text.count("\n"), indent
        self.known[tokens] = True


_TABLES: weakref.WeakKeyDictionary[Any, _Pieces] = weakref.WeakKeyDictionary()


def _regularity(ids: np.ndarray, tokenizer: Any) -> dict[str, float]:
    """Share of digits and marks among the visible characters, line ends a token, indents a line."""
    table = _TABLES.get(tokenizer)
    if table is None or len(table.known) <= ids.max():
        table = _TABLES[tokenizer] = _Pieces(max(len(tokenizer), int(ids.max()) + 1))
    unknown = np.unique(ids[~table.known[ids]])
    if len(unknown):
        table.learn(unknown, tokenizer.decode)
    visible, symbols, ends, indents = table.counts[ids].sum(0).tolist()
    return {"symbols": symbols / max(visible, 1.0), "lines": ends / len(ids), "indent": indents / max(ends, 1.0)}
