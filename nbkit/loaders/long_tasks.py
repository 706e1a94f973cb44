"""Long prompts with known answers, made from text that ships with installed packages: what a faster way of reading a prompt must not break.

Categories follow long-context suites: *retrieval* (``needle``, ``multikey``, ``tracking``, ``aggregation``, ``qa``), *structure* (``code``,
``table``, ``log``) and *general* (``prose``). The first are scored on an answer whose evidence lies at a known place; the others on their own
continuation. Splits share no document, no wording and no key.

Source: the kinds of task follow RULER (arXiv 2404.06654) and LongBench (arXiv 2308.14508); every prompt is the project's own.
"""

from __future__ import annotations

import ast
import csv
import functools
import gzip
import hashlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nbkit.errors import InputError, MissingResourceError
from nbkit.loaders import long_templates as words
from nbkit.loaders.text import SPLITS, _choose, _codec, _collect

__all__ = ["TASKS", "LongPrompt", "LongTaskSet", "load_long_tasks"]

TASKS: dict[str, str] = {
    "needle": "retrieval", "multikey": "retrieval", "tracking": "retrieval", "aggregation": "retrieval", "qa": "retrieval",
    "code": "structure", "table": "structure", "log": "structure", "prose": "general",
}
"""Category of every kind of task."""

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CONTINUATION = 48
"""Tokens of the continuation that the free kinds are scored on."""
_LEAST_FILLER = 64
_QA_ANSWER = 8


@dataclass(frozen=True)
class LongPrompt:
    """One prompt with its answer.

    Attributes:
        id: unique and stable.
        kind, category: see `TASKS`.
        template: wording or line format it was made with.
        filler: the text it is embedded in or cut from.
        ids: (tokens,) int64 token ids.
        answer: text of the answer.
        answer_ids: (answer tokens,) int64; the first of them carries content.
        evidence: half-open token spans without which the answer cannot be known; empty for the free kinds.
        depth: place of the (first) evidence as a share of the filler, or None.
        inside: how many of the prompt's last tokens can be scored instead of an answer; 0 for the retrieval kinds.
        chance: share of exact answers of a reader who knows the candidates but not the evidence; None for the free kinds.
    """

    id: str
    kind: str
    category: str
    template: str
    filler: str
    ids: np.ndarray = field(repr=False, compare=False)
    answer: str
    answer_ids: np.ndarray = field(repr=False, compare=False)
    evidence: tuple[tuple[int, int], ...]
    depth: float | None
    inside: int
    chance: float | None

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids)


@dataclass(frozen=True)
class LongTaskSet:
    """Prompts of one kind, length and split."""

    kind: str
    category: str
    split: str
    tokens: int
    prompts: tuple[LongPrompt, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[LongPrompt]:
        return iter(self.prompts)

    def __getitem__(self, index: int) -> LongPrompt:
        return self.prompts[index]


@dataclass(frozen=True)
class _Tools:
    """The tokenizer, and what depends on it alone."""

    encode: Callable[[str], np.ndarray]
    decode: Callable[[list[int]], str]
    pieces: dict[int, str] = field(default_factory=dict)
    read: dict[str, np.ndarray] = field(default_factory=dict)

    def piece(self, token: int) -> str:
        """Text of one token."""
        if token not in self.pieces:
            self.pieces[token] = self.decode([int(token)])
        return self.pieces[token]

    def ids(self, document: Any) -> np.ndarray:
        """Token ids of a whole document, each read once."""
        if document.sha256 not in self.read:
            self.read[document.sha256] = self.encode(document.text)
        return self.read[document.sha256]

    def starts(self, ids: np.ndarray) -> np.ndarray:
        """Indices at which a line starts, 0 among them."""
        ends = [i + 1 for i, token in enumerate(ids[:-1].tolist()) if self.piece(token).endswith("\n")]
        return np.array([0, *ends])

    def content(self, token: int) -> bool:
        """Whether a token holds a letter or a digit."""
        return any(c.isalnum() for c in self.piece(token))


def load_long_tasks(
    kind: str, *, n: int = 8, tokens: int = 1024, split: str = "calibration", tokenizer: Any = None, seed: int = 0, filler: str = "prose",
    evidence: bool = True, digits: int = 4, keys: int | None = None, hops: int = 2, depth: float | None = None,
) -> LongTaskSet:
    """Make ``n`` prompts of exactly ``tokens`` tokens; the same arguments give the same prompts.

    Args:
        kind: name in `TASKS`.
        n: how many; places of the evidence cycle through .1, .3, .5, .7 and .9 of the filler.
        tokens: length of every prompt.
        split: ``calibration`` or ``held-out``; they share no document, wording, key or line format.
        tokenizer: of transformers or tokenizers; None for SmolLM2's.
        seed: another seed gives other prompts.
        filler: ``prose`` or ``code``, what needles, keys, variables and votes are hidden in.
        evidence: False leaves the evidence out and asks all the same: the control that no reader can answer from the prompt.
        digits: of the values asked for by needle, multikey and tracking.
        keys: statements that look like evidence, the right one among them (default: 4 for multikey, 1 chain for tracking, 4 options for aggregation).
        hops: statements from a name to its value in tracking; the question names the last of the chain alone.
        depth: one place for all prompts, in [0, 1], instead of the cycle.

    Raises: InputError for an unknown kind or split, numbers out of range, or more text than there is.

    >>> tasks = load_long_tasks("needle", n=2, tokens=512)
    >>> tasks[0].tokens, tasks[0].answer.isdigit(), len(tasks[0].answer_ids)
    (512, True, 4)
    """
    if kind not in TASKS:
        raise InputError("kind", got=kind, allowed=", ".join(TASKS))
    if split not in SPLITS:
        raise InputError("split", got=split, allowed=" or ".join(SPLITS))
    if filler not in ("prose", "code"):
        raise InputError("filler", got=filler, allowed="prose or code")
    keys = keys if keys is not None else {"tracking": 1}.get(kind, 4)
    bounds = {"n": (n, 1, 10_000), "tokens": (tokens, 128, 32_768), "digits": (digits, 1, 9), "keys": (keys, 1 if kind == "tracking" else 2, 7),
              "hops": (hops, 1, 4), "seed": (seed, 0, 2**32)}
    for name, (value, low, high) in bounds.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
            raise InputError(name, got=value, allowed=f"an integer in [{low}, {high}]")
    if depth is not None and not 0 <= depth <= 1:
        raise InputError("depth", got=depth, allowed="a share in [0, 1] or None")
    if kind == "tracking" and keys * hops > len(words.KEYS[split]):
        raise InputError("keys * hops", got=keys * hops, allowed=f"<= {len(words.KEYS[split])}")
    tools = _tools(tokenizer)
    make = _MAKERS[kind]
    prompts = []
    for index in range(n):
        # A generator of its own for every prompt: more prompts change none of the first ones.
        rng = np.random.default_rng([seed, index, int(tokens), *hashlib.sha256(f"{kind}/{split}".encode()).digest()[:4]])
        place = DEPTHS[(index + seed) % len(DEPTHS)] if depth is None else float(depth)
        task = _Task(kind, tools, rng, split, int(tokens), index, filler, evidence, place, digits, keys, hops)
        made = make(task)
        if not tools.content(int(made.answer_ids[0])):
            raise InputError("tokenizer", got=f"answer {made.answer!r} that starts with token {tools.piece(made.answer_ids[0])!r}",
                             allowed="tokenizers that do not split off a space before a word or number")
        prompts.append(LongPrompt(
            f"{kind}-{split}-{tokens}-{seed}-{index}" + ("" if evidence else "-absent"), kind, TASKS[kind], made.template, made.filler, made.ids,
            made.answer, made.answer_ids, made.evidence, made.depth, made.inside, made.chance,
        ))
    return LongTaskSet(kind, TASKS[kind], split, int(tokens), tuple(prompts))


@functools.lru_cache(maxsize=4)
def _tools(tokenizer: Any) -> _Tools:
    return _Tools(*_codec(tokenizer))


@dataclass(frozen=True)
class _Task:
    """What a maker needs for one prompt."""

    kind: str
    tools: _Tools
    rng: np.random.Generator
    split: str
    tokens: int
    index: int
    filler: str
    evidence: bool
    depth: float
    digits: int
    keys: int
    hops: int

    def wording(self, table: dict[str, tuple]) -> tuple[int, Any]:
        """Wordings take turns, out of step with the depths."""
        options = table[self.split]
        which = self.index % len(options)
        return which, options[which]

    def numbers(self, count: int) -> list[str]:
        """Different numbers of ``digits`` digits, without a leading zero."""
        low = 10 ** (self.digits - 1)
        drawn = self.rng.choice(9 * low, size=count, replace=False) if 9 * low <= 10**6 else self.rng.integers(0, 9 * low, count)
        return [str(low + int(x)) for x in drawn]

    def guess(self, keys: int | None = None) -> float:
        """Chance of the right number, among the values said or, if there is one alone, among all numbers."""
        keys = self.keys if keys is None else keys
        return 1 / keys if keys > 1 else 1 / (9 * 10 ** (self.digits - 1))

    def place(self) -> float:
        """A place for a statement that is no evidence."""
        return float(self.rng.uniform(0.05, 0.95))


@dataclass(frozen=True)
class _Made:
    template: str
    filler: str
    ids: np.ndarray
    answer: str
    answer_ids: np.ndarray
    evidence: tuple[tuple[int, int], ...]
    depth: float | None
    inside: int
    chance: float | None


# Retrieval ----------------------------------------------------------------------------------------------------------------------


def _compose(
    task: _Task, template: str, stream: tuple[str, np.ndarray], statements: list[tuple[float, str, bool]], question: str, answer: str, chance: float,
    limit: int | None = None,
) -> _Made:
    """Put statements (place, text, is evidence) between lines of a filler and a question at the end, exactly ``task.tokens`` long."""
    tools = task.tools
    name, ids = stream
    tail = tools.encode(question)
    pieces = [(place, tools.encode(text), proof) for place, text, proof in sorted(statements, key=lambda s: s[0]) if task.evidence or not proof]
    room = task.tokens - len(tail) - sum(len(piece) for _, piece, _ in pieces)
    if room < _LEAST_FILLER:
        raise InputError("tokens", got=task.tokens, allowed=f">= {task.tokens - room + _LEAST_FILLER} for this task", hint="fewer keys or hops")
    starts = tools.starts(ids)
    first = starts[starts <= len(ids) - room]
    start = int(task.rng.choice(first))
    text = ids[start : start + room].copy()
    breaks = starts[(starts >= start) & (starts <= start + room)] - start
    row, spans, at, done = [], [], 0, 0
    for place, piece, proof in pieces:
        cut = int(breaks[np.abs(breaks - place * room).argmin()])
        if abs(cut - place * room) > 0.03 * room:
            # A long line is broken where the place falls.
            cut = max(1, round(place * room))
            text[cut - 1] = tools.encode("\n")[-1]
        cut = max(done, cut)
        row.append(text[done:cut])
        at += cut - done
        if proof:
            spans.append((at, at + len(piece)))
        row.append(piece)
        at, done = at + len(piece), cut
    row += [text[done:], tail]
    answer_ids = tools.encode(answer)[:limit]
    answer = tools.decode(answer_ids.tolist()) if limit else answer
    return _Made(template, name, np.concatenate(row), answer, answer_ids, tuple(spans), task.depth, 0, chance)


def _stream(task: _Task, name: str = "", tokens: int = 0) -> tuple[str, np.ndarray]:
    """Any document of at least so many tokens; by default one to hide things in."""
    name, tokens = name or task.filler, tokens or task.tokens
    documents = _documents(name, task.split)
    for index in task.rng.permutation(len(documents)).tolist():
        # No token of this text is longer than its characters.
        if len(documents[index].text) >= tokens and len(ids := task.tools.ids(documents[index])) >= tokens:
            return documents[index].id, ids
    raise InputError("tokens", got=task.tokens, allowed=f"at most the longest document of {name}", hint="fewer tokens")


@functools.lru_cache(maxsize=4)
def _documents(name: str, split: str) -> tuple[Any, ...]:
    """Documents of one split of `load_text`, not yet read into tokens."""
    return tuple(_choose(_collect(name, name), split, 0))


def _needle(task: _Task, keys: int = 1) -> _Made:
    which, (statement, question) = task.wording(words.NEEDLE)
    names = [str(x) for x in task.rng.choice(words.KEYS[task.split], size=keys, replace=False)]
    values = task.numbers(keys)
    said = [(task.depth, statement.format(key=names[0], value=values[0]), True)]
    said += [(task.place(), statement.format(key=k, value=v), False) for k, v in zip(names[1:], values[1:], strict=True)]
    ask = question.format(key=names[0])
    return _compose(task, f"{task.kind}-{task.split}-{which}", _stream(task), said, ask, values[0], task.guess(keys))


def _multikey(task: _Task) -> _Made:
    return _needle(task, task.keys)


def _tracking(task: _Task) -> _Made:
    which, (statement, link, question) = task.wording(words.TRACKING)
    names = [str(x) for x in task.rng.choice(words.KEYS[task.split], size=task.keys * task.hops, replace=False)]
    values = task.numbers(task.keys)
    said: list[tuple[float, str, bool]] = []
    for chain in range(task.keys):
        own = names[chain * task.hops : (chain + 1) * task.hops]
        # The links of a chain keep their order: a variable is set before it is used.
        start = task.depth if chain == 0 else task.place()
        places = [start, *np.sort(task.rng.uniform(start, 0.98, task.hops - 1)).tolist()]
        said.append((places[0], statement.format(key=own[0], value=values[chain]), chain == 0))
        said += [(places[i], link.format(key=own[i], other=own[i - 1]), chain == 0) for i in range(1, task.hops)]
    ask = question.format(key=names[task.hops - 1])
    return _compose(task, f"tracking-{task.split}-{which}", _stream(task), said, ask, values[0], task.guess())


def _aggregation(task: _Task) -> _Made:
    which, (statement, question) = task.wording(words.AGGREGATION)
    options = [str(x) for x in task.rng.choice(words.OPTIONS[task.split], size=task.keys, replace=False)]
    # The winner has eight votes and every other option one, spread over the whole text.
    counts = [8, *[1] * (task.keys - 1)]
    said = []
    for option, count in zip(options, counts, strict=True):
        said += [(task.place(), statement.format(option=option), option == options[0]) for _ in range(count)]
    made = _compose(task, f"aggregation-{task.split}-{which}", _stream(task), said, question, f" {options[0]}", 1 / task.keys)
    return _Made(**{**made.__dict__, "depth": None})


def _qa(task: _Task) -> _Made:
    which, (statement, question) = task.wording(words.QA)
    entries = _entries(task.split)
    order = task.rng.permutation(len(entries))
    name, text = entries[order[0]]
    # The first word is given: what a sentence starts with is a matter of style, not of the entry.
    word, rest = text.split(" ", 1)
    asked = task.tools.decode(task.tools.encode(f" {rest}")[:_QA_ANSWER].tolist())
    lines, total = [], 0
    for i in order[1:]:
        if asked in entries[i][1]:
            continue
        lines.append(task.tools.encode(statement.format(name=entries[i][0], text=entries[i][1])))
        total += len(lines[-1])
        if total >= task.tokens + 64:
            break
    if total < task.tokens:
        raise InputError("tokens", got=task.tokens, allowed=f"<= {total}", hint="fewer tokens")
    stream = ("docstrings", np.concatenate(lines))
    said = [(task.depth, statement.format(name=name, text=text), True)]
    return _compose(task, f"qa-{task.split}-{which}", stream, said, question.format(name=name) + word, f" {rest}", 1 / len(lines), limit=_QA_ANSWER)


@functools.lru_cache(maxsize=2)
def _entries(split: str) -> tuple[tuple[str, str], ...]:
    """(function, first sentence of its docstring) from the standard library, every name and every sentence once."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for document in _documents("code", split):
        module = document.id.removeprefix("python/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        try:
            tree = ast.parse(document.text)
        except SyntaxError:
            continue
        for node in _functions(tree):
            first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
            name = f"{module}.{node.name}"
            good = first.endswith(".") and 30 <= len(first) <= 110 and first[0].isupper() and not {'"', "`"} & set(first)
            # The second word is where the answer starts.
            good = good and (first.split(" ", 2) + [""])[1].isalpha()
            if good and not node.name.startswith("_") and name not in found and first not in seen:
                found[name] = first
                seen.add(first)
    return tuple(sorted(found.items()))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions and methods of a module, nested ones left out."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


# Continuations ------------------------------------------------------------------------------------------------------------------


def _window(task: _Task, template: str, name: str, ids: np.ndarray) -> _Made:
    """A window that starts with a line and whose continuation starts with content."""
    starts = task.tools.starts(ids)
    starts = starts[starts + task.tokens + CONTINUATION <= len(ids)]
    fit = [int(s) for s in starts if task.tools.content(int(ids[s + task.tokens]))]
    if not fit:
        raise InputError(f"text {name}", got=f"{len(ids)} tokens", allowed=f">= {task.tokens + CONTINUATION} tokens", hint="fewer tokens")
    start = fit[int(task.rng.integers(len(fit)))]
    answer_ids = ids[start + task.tokens : start + task.tokens + CONTINUATION]
    prompt = ids[start : start + task.tokens]
    return _Made(template, name, prompt, task.tools.decode(answer_ids.tolist()), answer_ids, (), None, CONTINUATION, None)


def _document(task: _Task, text: str) -> _Made:
    return _window(task, f"{text}-window", *_stream(task, text, task.tokens + CONTINUATION + 256))


def _code(task: _Task) -> _Made:
    return _document(task, "code")


def _prose(task: _Task) -> _Made:
    return _document(task, "prose")


def _table(task: _Task) -> _Made:
    which, delimiter = task.wording(words.DELIMITERS)
    names = words.TABLES[task.split]
    name = names[task.index // 2 % len(names)]
    header, *rows = _rows(name)
    keep = min(len(header), 6)
    columns = task.rng.permutation(len(header))[:keep]
    lines, total = [], 0
    # Another order of rows and another choice of columns for every prompt; the rows go round if a table is short.
    while total < task.tokens + CONTINUATION + 256:
        for i in (task.rng.permutation(len(rows))).tolist():
            lines.append(task.tools.encode(delimiter.join(rows[i][c] for c in columns) + "\n"))
            total += len(lines[-1])
            if total >= task.tokens + CONTINUATION + 256:
                break
    return _window(task, f"table-{task.split}-{which}", name, np.concatenate(lines))


@functools.lru_cache(maxsize=8)
def _rows(name: str) -> tuple[tuple[str, ...], ...]:
    """Header and rows of a table that ships with plotly."""
    spec = importlib.util.find_spec("plotly")
    path = Path(spec.origin).parent / "package_data" / "datasets" / f"{name}.csv.gz" if spec and spec.origin else Path(f"{name}.csv.gz")
    if not path.is_file():
        raise MissingResourceError("table", got=f"{name}, not in the installed plotly", allowed="a plotly with data sets", hint="pip install plotly")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return tuple(tuple(_short(cell) for cell in row) for row in csv.reader(io.StringIO(file.read())) if row)


def _short(cell: str) -> str:
    """Numbers with four significant digits: more of them are noise that no context predicts."""
    try:
        return cell if "." not in cell else f"{float(cell):.4g}" if abs(float(cell)) < 1e4 else f"{float(cell):.0f}"
    except ValueError:
        return cell


def _log(task: _Task) -> _Made:
    which, line = task.wording(words.LOGS)
    documents = _documents("code", task.split)
    rng, clock = task.rng, int(task.rng.integers(0, 80_000))
    lines, total = [], 0
    # A few modules come back again and again, each with its own size, as in a real log.
    pool = rng.choice(len(documents), size=12, replace=False)
    while total < task.tokens + CONTINUATION + 256:
        clock = (clock + int(rng.integers(1, 9))) % 86_400
        document = documents[int(rng.choice(pool))]
        text = line.format(
            day=1 + task.index % 28, h=clock // 3600, m=clock // 60 % 60, s=clock % 60, module=document.id.removeprefix("python/"),
            size=len(document.text), ms=int(rng.integers(2, 250)), worker=int(rng.integers(1, 9)), status=str(rng.choice(["INFO", "DEBUG", "OK"])),
            code=int(rng.choice([200, 200, 200, 304])),
        )
        lines.append(task.tools.encode(text))
        total += len(lines[-1])
    return _window(task, f"log-{task.split}-{which}", "module sizes", np.concatenate(lines))


_MAKERS: dict[str, Callable[[_Task], _Made]] = {
    "needle": _needle, "multikey": _multikey, "tracking": _tracking, "aggregation": _aggregation, "qa": _qa, "code": _code, "table": _table,
    "log": _log, "prose": _prose,
}
