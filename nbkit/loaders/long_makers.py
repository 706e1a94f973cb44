"""How each kind of long prompt is made, one at a time; :mod:`nbkit.loaders.long_tasks` is the way in."""

from __future__ import annotations

import ast
import csv
import functools
import gzip
import importlib.util
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nbkit.errors import InputError, MissingResourceError
from nbkit.loaders import long_templates as words
from nbkit.loaders.text import _choose, _codec, _collect

__all__ = ["CONTINUATION", "MAKERS", "Made", "Task", "Tools", "tools_of"]

CONTINUATION = 48
"""Tokens of the continuation that the free kinds are scored on."""
_LEAST_FILLER = 64
_QA_ANSWER = 8


@dataclass(frozen=True)
class Tools:
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


@functools.lru_cache(maxsize=4)
def tools_of(tokenizer: Any) -> Tools:
    """The tools of a tokenizer, None for SmolLM2's."""
    return Tools(*_codec(tokenizer))


@dataclass(frozen=True)
class Task:
    """What a maker needs for one prompt."""

    kind: str
    tools: Tools
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
class Made:
    """A prompt before it gets its name; see `LongPrompt`."""

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
    task: Task, template: str, stream: tuple[str, np.ndarray], statements: list[tuple[float, str, bool]], question: str, answer: str, chance: float,
    limit: int | None = None,
) -> Made:
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
    return Made(template, name, np.concatenate(row), answer, answer_ids, tuple(spans), task.depth, 0, chance)


def _stream(task: Task, name: str = "", tokens: int = 0) -> tuple[str, np.ndarray]:
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


def _needle(task: Task, keys: int = 1) -> Made:
    which, (statement, question) = task.wording(words.NEEDLE)
    names = [str(x) for x in task.rng.choice(words.KEYS[task.split], size=keys, replace=False)]
    values = task.numbers(keys)
    said = [(task.depth, statement.format(key=names[0], value=values[0]), True)]
    said += [(task.place(), statement.format(key=k, value=v), False) for k, v in zip(names[1:], values[1:], strict=True)]
    ask = question.format(key=names[0])
    return _compose(task, f"{task.kind}-{task.split}-{which}", _stream(task), said, ask, values[0], task.guess(keys))


def _multikey(task: Task) -> Made:
    return _needle(task, task.keys)


def _tracking(task: Task) -> Made:
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


def _aggregation(task: Task) -> Made:
    which, (statement, question) = task.wording(words.AGGREGATION)
    options = [str(x) for x in task.rng.choice(words.OPTIONS[task.split], size=task.keys, replace=False)]
    # The winner has eight votes and every other option one, spread over the whole text.
    counts = [8, *[1] * (task.keys - 1)]
    said = []
    for option, count in zip(options, counts, strict=True):
        said += [(task.place(), statement.format(option=option), option == options[0]) for _ in range(count)]
    made = _compose(task, f"aggregation-{task.split}-{which}", _stream(task), said, question, f" {options[0]}", 1 / task.keys)
    return replace(made, depth=None)


def _qa(task: Task) -> Made:
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


def _window(task: Task, template: str, name: str, ids: np.ndarray, *, short: bool = False) -> Made | None:
    """A window that starts with a line and whose continuation starts with content; ``short``: None instead of an error where there is none."""
    starts = task.tools.starts(ids)
    starts = starts[starts + task.tokens + CONTINUATION <= len(ids)]
    fit = [int(s) for s in starts if task.tools.content(int(ids[s + task.tokens]))]
    if not fit and short:
        return None
    if not fit:
        raise InputError(f"text {name}", got=f"{len(ids)} tokens", allowed=f">= {task.tokens + CONTINUATION} tokens", hint="fewer tokens")
    start = fit[int(task.rng.integers(len(fit)))]
    answer_ids = ids[start + task.tokens : start + task.tokens + CONTINUATION]
    prompt = ids[start : start + task.tokens]
    return Made(template, name, prompt, task.tools.decode(answer_ids.tolist()), answer_ids, (), None, CONTINUATION, None)


def _document(task: Task, text: str) -> Made:
    return _window(task, f"{text}-window", *_stream(task, text, task.tokens + CONTINUATION + 256))


def _code(task: Task) -> Made:
    return _document(task, "code")


def _prose(task: Task) -> Made:
    return _document(task, "prose")


def _table(task: Task) -> Made:
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


def _log(task: Task) -> Made:
    which, line = task.wording(words.LOGS)
    documents = _documents("code", task.split)
    rng, clock = task.rng, int(task.rng.integers(0, 80_000))
    lines, total = [], 0
    # A few modules come back again and again, each with its own size, as in a real log.
    pool = rng.choice(len(documents), size=12, replace=False)
    room = task.tokens + CONTINUATION + 256
    while True:
        clock = (clock + int(rng.integers(1, 9))) % 86_400
        document = documents[int(rng.choice(pool))]
        text = line.format(
            day=1 + task.index % 28, h=clock // 3600, m=clock // 60 % 60, s=clock % 60, module=document.id.removeprefix("python/"),
            size=len(document.text), ms=int(rng.integers(2, 250)), worker=int(rng.integers(1, 9)), status=str(rng.choice(["INFO", "DEBUG", "OK"])),
            code=int(rng.choice([200, 200, 200, 304])),
        )
        lines.append(task.tools.encode(text))
        total += len(lines[-1])
        if total < room:
            continue
        # Lines of one shape can all meet a line end there: then the log goes on.
        made = _window(task, f"log-{task.split}-{which}", "module sizes", np.concatenate(lines), short=total < 2 * room)
        if made is not None:
            return made


MAKERS: dict[str, Callable[[Task], Made]] = {
    "needle": _needle, "multikey": _multikey, "tracking": _tracking, "aggregation": _aggregation, "qa": _qa, "code": _code, "table": _table,
    "log": _log, "prose": _prose,
}
