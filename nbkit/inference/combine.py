"""Token pruning x sparse attention x cache eviction in one small matrix, on equal budgets of work and of cache.

Everything that is registered can be an axis entry; a new class appears by its name.
"""

from __future__ import annotations

import dataclasses
import re
import time as clock
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbkit import parallel
from nbkit.errors import InputError
from nbkit.inference.parts import KINDS, Part, get
from nbkit.inference.scoring import score_evictions
from nbkit.inference.session import attach
from nbkit.metrics import bootstrap, paired

__all__ = ["Cell", "Matrix", "fill", "matrix"]

NOTHING = ("none", "dense")
"""Labels that stand for no part: every row, dense attention, the whole cache."""
_STEPS = 7
_SLACK = 0.02


@dataclass(frozen=True)
class Cell:
    """One combination. rate: what a tuned entry was set to; keep: entries per head that an eviction was set to; None where nothing was tuned."""

    rows: str
    attention: str
    eviction: str
    tokens: int
    rate: float | None = None
    keep: int | None = None
    parts: Mapping[str, Part | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def labels(self) -> tuple[str, str, str]:
        """Names along the three axes."""
        return self.rows, self.attention, self.eviction


@dataclass(frozen=True)
class Matrix:
    """Scores of every cell and prompt.

    Attributes:
        cells: (cell, prompt id) -> score, as a list of dicts with the labels, the prompt's id, kind and tokens, and the fields of `Score`.
        time, space: budgets as shares of the full model's work and cache, or None.
    """

    cells: list[dict[str, Any]] = field(repr=False)
    time: float | None = None
    space: float | None = None

    @property
    def labels(self) -> list[tuple[str, str, str]]:
        """Combinations in the order they were given; the full model first."""
        return list(dict.fromkeys((c["rows"], c["attention"], c["eviction"]) for c in self.cells))

    @property
    def kinds(self) -> list[str]:
        """Kinds of prompts."""
        return list(dict.fromkeys(c["kind"] for c in self.cells))

    def table(self, kind: str | None = None, *, seed: int = 0) -> list[dict[str, Any]]:
        """One dict a combination: means over the prompts, with intervals of what they lose against the full model on the same prompts.

        ``nll_rise`` (nats a token) and ``exact_rise`` (points) are intervals of paired differences; ``speedup`` is the median of the ratios of
        time to first token, full over cell; ``macs``, ``bytes`` and ``density`` are shares of the full model's, ``fits`` whether both budgets
        were met (2 % of slack; None without budgets).

        kind: prompts of one kind only; None for all of them.
        Raises: InputError for a kind that was not read.
        """
        if kind is not None and kind not in self.kinds:
            raise InputError("kind", got=kind, allowed=", ".join(self.kinds))
        full = self._scores(self.labels[0], kind)
        names = list(full)
        method = "percentile" if len(names) >= 20 else "expanded"
        column = lambda scores, key: np.array([scores[name][key] for name in names], float)  # noqa: E731
        out = []
        for labels in self.labels:
            own = self._scores(labels, kind)
            macs, size = (float(np.mean(column(own, k) / column(full, k))) for k in ("macs", "cache_bytes"))
            budgets = [(macs, self.time), (size, self.space)]
            ratios = column(full, "seconds") / column(own, "seconds")
            row = dict(zip(KINDS, labels, strict=True)) | {
                "kind": kind or "all", "prompts": len(names), "nll": float(column(own, "nll").mean()), "exact": float(column(own, "exact").mean()),
                "macs": macs, "bytes": size, "density": float(column(own, "density").mean()), "speedup": float(np.median(ratios)),
                "fits": None if self.time is None and self.space is None else all(b is None or x <= b * (1 + _SLACK) for x, b in budgets),
                "rate": own[names[0]]["rate"], "keep": own[names[0]]["keep"],
            }
            if len(names) > 1:
                row["nll_rise"] = paired(column(own, "nll"), column(full, "nll"), seed=seed, method=method)
                row["exact_rise"] = paired(100 * column(own, "exact"), 100 * column(full, "exact"), seed=seed, method=method)
                row["speedup_interval"] = bootstrap(ratios, np.median, n=500, seed=seed, method=method)
            out.append(row)
        return out

    def compare(self, a: tuple[str, str, str], b: tuple[str, str, str], kind: str | None = None, *, seed: int = 0) -> Any:
        """Interval of the paired difference in nats a token, ``a`` minus ``b`` on the same prompts.

        Raises: InputError for a combination that was not read.
        """
        one, two = self._scores(a, kind), self._scores(b, kind)
        method = "percentile" if len(one) >= 20 else "expanded"
        return paired([one[name]["nll"] for name in one], [two[name]["nll"] for name in one], seed=seed, method=method)

    def _scores(self, labels: tuple[str, str, str], kind: str | None) -> dict[str, dict[str, Any]]:
        found = {c["prompt"]: c for c in self.cells if (c["rows"], c["attention"], c["eviction"]) == tuple(labels) and kind in (None, c["kind"])}
        if not found:
            raise InputError("combination", got=" + ".join(labels), allowed="; ".join(" + ".join(x) for x in self.labels))
        return found

    def __str__(self) -> str:
        lines = [f"{'rows':<14}{'attention':<14}{'eviction':<12}{'nll':>7}{'exact':>7}{'MACs':>7}{'bytes':>7}{'density':>9}{'faster':>8}  fits"]
        for row in self.table():
            fits = {True: "yes", False: "no", None: ""}[row["fits"]]
            lines.append(f"{row['rows']:<14}{row['attention']:<14}{row['eviction']:<12}{row['nll']:>7.3f}{row['exact']:>7.2f}{row['macs']:>7.2f}"
                         f"{row['bytes']:>7.2f}{row['density']:>9.2f}{row['speedup']:>8.2f}  {fits}".rstrip())
        return "\n".join(lines)


def matrix(
    model: Any, prompts: Iterable[Any], *, rows: Sequence[Any] = ("none",), attention: Sequence[Any] = ("dense",),
    eviction: Sequence[Any] = ("none",), time: float | None = None, space: float | None = None, tune: Sequence[Any] = (),
    resume: str | Path | None = None, minutes: float | None = None, progress: bool = False,
) -> Matrix:
    """Read every prompt with every combination of parts, and with the full model, and score the answers.

    Entries of an axis are names of registered parts, "none" or "dense" for no part, parts, pairs (label, part), or pairs (label, function of a
    rate in (0, 1]) for a part that is tuned: more work at a higher rate.

    Args:
        model: causal LM of transformers in eval mode.
        prompts: of one or more kinds and lengths, such as `load_long_tasks` makes.
        time: budget of multiply-accumulates, as a share of the full model's. Tuned entries get the highest rate that meets it in each
            combination, so that pruning and sparse attention together may do as much as each alone.
        space: budget of cache bytes, as a share of the full model's. Every eviction part with a ``budget`` keeps as many entries per head, in
            layers that have more, as meet it, so that what pruning saves before goes to the other layers.
        tune: prompts that budgets are solved on, default the first one of every length. Other prompts cost the same where a part's work goes
            by the length alone.
        resume: file that receives each score; a later call reads it and goes on.
        minutes: stop after the prompt with which this time is up; None reads all of them.

    Raises: InputError for no prompts, unknown parts, two entries of one label, budgets outside (0, 1], or a budget that the lowest rate misses.

    One registered class makes a new row:

    >>> from types import SimpleNamespace
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from nbkit.inference import PARTS, Rows, register
    >>> _ = torch.manual_seed(0)
    >>> sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=30, num_hidden_layers=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> prompts = [SimpleNamespace(id=i, kind="any", ids=np.arange(20), answer_ids=np.array([3]), evidence=(), inside=0) for i in range(2)]
    >>> @register
    ... class SecondHalf(Rows):
    ...     name = "second-half"
    ...     def keep(self, run, layer):
    ...         return torch.arange(run.tokens // 2, run.tokens)
    >>> table = matrix(model, prompts, rows=["none", "second-half"]).table()
    >>> [(row["rows"], row["bytes"]) for row in table]
    [('none', 1.0), ('second-half', 0.75)]
    >>> _ = PARTS["rows"].pop("second-half")
    """
    prompts = list(prompts)
    if not prompts:
        raise InputError("prompts", got="none", allowed="at least one")
    if len({p.id for p in prompts}) < len(prompts):
        raise InputError("prompts", got="two with the same id", allowed="ids of their own")
    for name, value in (("time", time), ("space", space)):
        if value is not None and not 0 < value <= 1:
            raise InputError(name, got=value, allowed="a share in (0, 1] or None")
    axes = [_axis(kind, entries) for kind, entries in zip(KINDS, (rows, attention, eviction), strict=True)]
    samples: dict[int, list[Any]] = {}
    for prompt in tune:
        samples.setdefault(len(prompt.ids), []).append(prompt)
    for prompt in prompts:
        samples.setdefault(len(prompt.ids), [prompt])
    lengths = list(dict.fromkeys(len(p.ids) for p in prompts))
    groups = {tokens: _groups(model, axes, samples[tokens], time, space) for tokens in lengths}
    # All cells of a prompt in a row: whatever slows the machine down slows them all. Cells that differ in eviction share one reading.
    end = None if minutes is None else clock.monotonic() + 60 * minutes
    made: list[list[dict[str, Any]]] = []
    for number, prompt in enumerate(prompts):
        if number and end is not None and clock.monotonic() > end:
            break
        items = [(model, group, prompt) for group in groups[len(prompt.ids)]]
        made += parallel.map(_read, items, executor="serial", key=_key, resume=resume, desc=f"prompt {number + 1}/{len(prompts)}", progress=progress)
    return Matrix([cell for group in made for cell in group], time, space)


def fill(lengths: Sequence[int], total: float) -> int:
    """The largest k with sum(min(length, k)) <= total: entries per head that every layer may keep.

    Raises: InputError when not even one entry a layer fits.

    >>> fill([10, 10, 4], 18)
    7
    """
    if total < len(lengths):
        raise InputError("cache budget", got=f"{total:g} entries", allowed=f">= {len(lengths)}, one a layer", hint="raise space")
    left, ordered = float(total), sorted(lengths)
    for done, length in enumerate(ordered):
        share = left / (len(ordered) - done)
        if share < length:
            return int(share)
        left -= length
    return max(ordered)


def _axis(kind: str, entries: Sequence[Any]) -> list[tuple[str, Part | Callable | None]]:
    """Labels and parts of one axis."""
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise InputError(kind, got=entries, allowed="a list of names, parts or (label, part)")
    out: list[tuple[str, Any]] = []
    for entry in entries:
        label, part = entry if isinstance(entry, tuple) else (entry, entry) if isinstance(entry, str) else (getattr(entry, "name", "?"), entry)
        if isinstance(part, str):
            part = None if part in NOTHING else get(kind, part)
        if part is not None and not callable(part) and not (isinstance(part, Part) and part.kind == kind):
            raise InputError(kind, got=type(part).__name__, allowed=f"a part of kind {kind!r} or a function that makes one")
        out.append((str(label), part))
    if not out or len({label for label, _ in out}) < len(out):
        raise InputError(kind, got=[label for label, _ in out], allowed="one or more entries with labels of their own", hint="(label, part) pairs")
    return out


def _groups(model: Any, axes: list[list[tuple[str, Any]]], samples: list[Any], time: float | None, space: float | None) -> list[list[Cell]]:
    """Cells by what reads the prompt, the full model first, each combination tuned to the budgets."""
    tokens = len(samples[0].ids)
    groups: dict[tuple[str, str], dict[str, Cell]] = {("none", "dense"): {"none": Cell("none", "dense", "none", tokens)}}
    work, lengths = _cost(model, {}, samples)
    for row_label, row in axes[0]:
        for attention_label, attention in axes[1]:
            labels = _plain("rows", row_label), _plain("attention", attention_label)
            pair, rate = _tuned(model, row, attention, samples, None if time is None else time * work)
            group, held = groups.setdefault(labels, {}), None
            for label, eviction in axes[2]:
                label, parts, keep = _plain("eviction", label), dict(pair), None
                if callable(eviction):
                    eviction = eviction(1.0 if rate is None else rate)
                if eviction is not None:
                    if space is not None and "budget" in getattr(eviction, "__dataclass_fields__", ()):
                        held = held or _cost(model, pair, samples)[1]
                        keep = fill(held, space * sum(lengths))
                        eviction = dataclasses.replace(eviction, budget=keep)
                    parts["eviction"] = eviction
                group.setdefault(label, Cell(*labels, label, tokens, rate, keep, parts))
    return [list(group.values()) for group in groups.values()]


def _plain(kind: str, label: str) -> str:
    """One label for no part."""
    return ("dense" if kind == "attention" else "none") if label in NOTHING else label


def _tuned(model: Any, row: Any, attention: Any, samples: list[Any], limit: float | None) -> tuple[dict[str, Part], float | None]:
    """Parts of a combination, the tuned ones at the highest rate whose work stays below the limit."""
    tuned = callable(row) or callable(attention)
    at = lambda rate: {  # noqa: E731
        kind: part(rate) if callable(part) else part for kind, part in (("rows", row), ("attention", attention)) if part is not None
    }
    if not tuned:
        return at(1.0), None
    if limit is None or _cost(model, at(1.0), samples)[0] <= limit:
        return at(1.0), 1.0
    low, high, best = 0.0, 1.0, None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _cost(model, at(middle), samples)[0] <= limit:
            low = best = middle
        else:
            high = middle
    if best is None:
        raise InputError("time", got=f"{limit:.4g} MACs", allowed="what the tuned part reaches at its lowest rate", hint="raise time")
    return at(best), best


def _cost(model: Any, parts: Mapping[str, Part], samples: list[Any]) -> tuple[float, tuple[int, ...]]:
    """Mean work and the lengths of the cache's layers after the prefill."""
    work = []
    with torch.inference_mode(), attach(model, **parts) as run:
        for prompt in samples:
            model(torch.as_tensor(prompt.ids, device=model.device)[None], use_cache=True, logits_to_keep=1)
            work.append(run.macs)
        return float(np.mean(work)), run.cache.lengths()


def _read(item: tuple[Any, list[Cell], Any]) -> list[dict[str, Any]]:
    model, group, prompt = item
    parts = {kind: part for kind, part in group[0].parts.items() if kind != "eviction"}
    scores = score_evictions(model, prompt, {cell.eviction: cell.parts.get("eviction") for cell in group}, parts=parts)
    out = []
    for cell in group:
        score = dataclasses.asdict(scores[cell.eviction])
        kept = score.pop("evidence_kept")
        out.append({
            "rows": cell.rows, "attention": cell.attention, "eviction": cell.eviction, "rate": cell.rate, "keep": cell.keep, "prompt": prompt.id,
            "kind": getattr(prompt, "kind", ""), "tokens": cell.tokens, **score, "evidence_kept": None if kept is None else round(min(kept), 4),
        })
    return out


def _key(item: tuple[Any, list[Cell], Any]) -> list[Any]:
    """What the scores depend on; addresses of objects are left out."""
    model, group, prompt = item
    cells = [[*cell.labels, {kind: re.sub(r" at 0x[0-9a-f]+", "", repr(part)) for kind, part in cell.parts.items()}] for cell in group]
    return [type(model).__name__, model.num_parameters(), str(model.dtype), group[0].tokens, cells, prompt.id]
