"""The claims of a paper, what was measured here, and verdicts that are computed and never typed in.

A notebook makes one :class:`Claims`, adds or skips every claim of the paper, and ends with ``claims.card()``.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
import platform
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from nbkit.errors import ClaimError, InputError, MissingResourceError
from nbkit.metrics.intervals import Interval
from nbkit.presets import preset

__all__ = [
    "NOT_REPRODUCED", "NOT_TESTABLE", "PARTLY", "README_END", "README_START", "REPRODUCED", "VERDICTS",
    "Above", "All", "Below", "Card", "Claims", "Entry", "Equals", "Part", "Within", "merge_readme", "tally",
]

REPRODUCED = "reproduced"
PARTLY = "partly"
NOT_REPRODUCED = "not reproduced at this scale"
NOT_TESTABLE = "not testable here"
VERDICTS = (REPRODUCED, PARTLY, NOT_REPRODUCED, NOT_TESTABLE)

SCHEMA = 1
README_START = "<!-- nbkit claims: start -->"
README_END = "<!-- nbkit claims: end -->"

# Versions that can move a number; only those installed are recorded.
_PACKAGES = ("numpy", "torch", "transformers", "nbkit")


# Criteria. Each has judge(measured) -> verdict and str() -> the text that is printed beside the verdict.


@dataclass(frozen=True)
class Above:
    """Reproduced when the whole interval lies above x; partly when only the estimate does (as for a number without an interval).

    on="estimate": looks at the estimate alone, so it can give at most "partly"; meant for ``partly=``.

    >>> Above(0).judge(Interval(2.0, 0.5, 3.5)), Above(0).judge(Interval(2.0, -0.5, 4.5)), Above(0).judge(2.0)
    ('reproduced', 'partly', 'partly')
    """

    x: float
    on: str = "interval"

    def __post_init__(self):
        _check_bound(self, self.x)

    def judge(self, measured: Interval) -> str:
        estimate, low, _, bare = _numbers(self, measured)
        return _grade(low > self.x and not bare and self.on == "interval", estimate > self.x)

    def __str__(self) -> str:
        return f"{_subject(self)} above {_show(self.x)}"


@dataclass(frozen=True)
class Below:
    """Reproduced when the whole interval lies below x; partly when only the estimate does. See :class:`Above`.

    >>> Below(0.05).judge(Interval(0.02, 0.01, 0.03))
    'reproduced'
    """

    x: float
    on: str = "interval"

    def __post_init__(self):
        _check_bound(self, self.x)

    def judge(self, measured: Interval) -> str:
        estimate, _, high, bare = _numbers(self, measured)
        return _grade(high < self.x and not bare and self.on == "interval", estimate < self.x)

    def __str__(self) -> str:
        return f"{_subject(self)} below {_show(self.x)}"


@dataclass(frozen=True)
class Within:
    """Reproduced when the whole interval lies in [lo, hi]; partly when only the estimate does (as for a number without an interval).

    >>> Within(-0.1, 0.1).judge(Interval(0.02, -0.05, 0.2))
    'partly'
    """

    lo: float
    hi: float
    on: str = "interval"

    def __post_init__(self):
        _check_bound(self, self.lo, self.hi)
        if self.lo > self.hi:
            raise InputError("Within", got=f"lo {self.lo} > hi {self.hi}", allowed="lo <= hi")

    def judge(self, measured: Interval) -> str:
        estimate, low, high, bare = _numbers(self, measured)
        whole = self.lo <= low and high <= self.hi and not bare and self.on == "interval"
        return _grade(whole, self.lo <= estimate <= self.hi)

    def __str__(self) -> str:
        return f"{_subject(self)} within [{_show(self.lo)}, {_show(self.hi)}]"


@dataclass(frozen=True)
class Equals:
    """For exact quantities: reproduced when the number (or the whole interval) is x up to atol; partly when only the estimate of an interval is.

    >>> Equals(0).judge(0.0), Equals(0).judge(1e-9), Equals(0, 1e-6).judge(1e-9)
    ('reproduced', 'not reproduced at this scale', 'reproduced')
    """

    x: float
    atol: float = 0.0

    def __post_init__(self):
        _check_bound(self, self.x, self.atol)

    def judge(self, measured: Interval | float) -> str:
        estimate, low, high, _ = _numbers(self, measured)
        return _grade(max(abs(low - self.x), abs(high - self.x)) <= self.atol, abs(estimate - self.x) <= self.atol)

    def __str__(self) -> str:
        return f"equal to {_show(self.x)}" + (f" up to {_show(self.atol)}" if self.atol else " exactly")


@dataclass(frozen=True, init=False)
class All:
    """Named exact facts: reproduced when all are true, partly when some are. Takes no measurement.

    Names are keywords, or keys of a mapping where they contain spaces.

    >>> print(All({"no live segment loses its floor": True}, quotas_sum_to_budget=False))
    every fact true: no live segment loses its floor (true), quotas_sum_to_budget (false)
    """

    facts: tuple[tuple[str, bool], ...]

    def __init__(self, facts: Mapping[str, bool] | None = None, /, **named: bool):
        together = {**(facts or {}), **named}
        if not together:
            raise InputError("All", got="no facts", allowed="at least one named boolean")
        for name, value in together.items():
            # numpy's bool is welcome, 0.3 or an array is not: a fact is true or false.
            if type(value).__name__ not in ("bool", "bool_"):
                raise InputError(f"fact {name!r}", got=value, allowed="True or False", hint="compare it first, for example bool(x == y)")
        object.__setattr__(self, "facts", tuple((str(name), bool(value)) for name, value in together.items()))

    def judge(self, measured: None = None) -> str:
        return _grade(all(value for _, value in self.facts), any(value for _, value in self.facts))

    @property
    def count(self) -> str:
        """How many of the facts hold."""
        return f"{sum(value for _, value in self.facts)} of {len(self.facts)} facts true"

    def __str__(self) -> str:
        return "every fact true: " + ", ".join(f"{name} ({'true' if value else 'false'})" for name, value in self.facts)


Criterion = Above | Below | Within | Equals | All


# Entries.


@dataclass(frozen=True)
class Part:
    """One measurement of a claim with its own criterion; a claim made of parts is reproduced when every part is.

    label: what was measured; partly: a criterion that replaces the criterion's own rule for "partly".
    Raises: ClaimError for NaN or infinite numbers; InputError for a missing measurement or a wrong criterion.

    >>> Part("recall", Interval(0.1, -0.02, 0.2), Above(0)).verdict
    'partly'
    """

    label: str
    measured: Interval | float | None
    criterion: Criterion
    partly: Criterion | None = None
    unit: str = ""
    verdict: str = field(init=False)

    def __post_init__(self):
        for name, rule in (("criterion", self.criterion), ("partly", self.partly)):
            if not isinstance(rule, Criterion) and not (name == "partly" and rule is None):
                raise InputError(f"{name} of {self.label!r}", got=rule, allowed="Above, Below, Within, Equals or All", hint="criterion=Above(0.0)")
        object.__setattr__(self, "measured", _measurement(self.label, self.measured, self.criterion))
        verdict = self.criterion.judge(self.measured)
        if self.partly is not None and verdict != REPRODUCED:
            verdict = NOT_REPRODUCED if self.partly.judge(self.measured) == NOT_REPRODUCED else PARTLY
        object.__setattr__(self, "verdict", verdict)

    @property
    def value(self) -> str:
        """The measurement as text, with its unit."""
        if isinstance(self.criterion, All):
            return self.criterion.count
        text = self.measured.short if isinstance(self.measured, Interval) else f"{self.measured:.4g}"
        return f"{text} {self.unit}".rstrip()

    @property
    def rule(self) -> str:
        """The criterion as text, with the interval's level and method."""
        text = str(self.criterion) + (f"; partly if {self.partly}" if self.partly is not None else "")
        if isinstance(self.measured, Interval) and self.measured.method != "exact":
            count = f", n = {self.measured.n}" if self.measured.n is not None else ""
            text += f" ({self.measured.level * 100:g} % {self.measured.method or 'interval'}{count})"
        elif isinstance(self.measured, float) and not isinstance(self.criterion, Equals):
            text += " (no interval: partly at most)"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        measured = self.measured.as_dict() if isinstance(self.measured, Interval) else self.measured
        return {
            "label": self.label, "measured": measured, "value": self.value, "unit": self.unit, "criterion": self.rule,
            "rule": str(self.criterion) + (f"; partly if {self.partly}" if self.partly is not None else ""), "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Entry:
    """One claim: the paper's statement and number, the parts measured here or the reason why there is none, and the verdict that follows."""

    id: str
    statement: str
    paper: str
    parts: tuple[Part, ...] = ()
    source: str = ""
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Reproduced if every part is; not reproduced if no part is even partly; otherwise partly."""
        if not self.parts:
            return NOT_TESTABLE
        grades = {part.verdict for part in self.parts}
        return _grade(grades == {REPRODUCED}, grades != {NOT_REPRODUCED})

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "id": self.id, "statement": self.statement, "paper": self.paper, "verdict": self.verdict,
            "parts": [part.as_dict() for part in self.parts], "source": self.source, "reason": self.reason,
        }


class Claims:
    """The claims of one paper, in the order of ``ids``; each is added or skipped once, then ``card()`` closes the notebook.

    Raises: InputError for a malformed slug, no ids, or the same id twice.

    >>> claims = Claims("ams", ids=["C1", "C5"])
    >>> claims.add("C1", statement="top-k wipes out regions", paper="11.3 %", measured=Interval(-2.6, -3.1, -2.0), criterion=Below(0), unit="points")
    'reproduced'
    >>> claims.skip("C5", statement="beats the full cache", paper="54.2 > 52.8", reason="no headroom on a small model")
    'not testable here'
    """

    def __init__(self, slug: str, *, ids: Iterable[str]):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", slug):
            raise InputError("slug", got=slug, allowed="lower-case letters, digits and _, such as 'ams'")
        self.slug = slug
        self.ids = tuple(ids) if not isinstance(ids, str) else (ids,)
        if not self.ids or len(set(self.ids)) < len(self.ids):
            raise InputError("ids", got=list(self.ids), allowed="every claim of the paper's card, once each", hint='ids=["C1", "C2"]')
        self._entries: dict[str, Entry] = {}
        self._expected: dict[str, str] = {}

    def add(
        self, id: str, *, statement: str, paper: str, measured: Interval | float | None = None, criterion: Criterion | None = None,
        partly: Criterion | None = None, unit: str = "", source: str = "", parts: Iterable[Part] = (), expect: str | None = None,
    ) -> str:
        """Add one measured claim and return its verdict. Running the cell again replaces the entry.

        Either ``measured`` with ``criterion`` (and ``unit``, ``partly``), or ``parts`` when the claim needs several measurements.
        source: what was measured, on what: "trained model, 200 chains"; expect: ``card()`` raises if the verdict is weaker than this.
        Raises: ClaimError for a NaN; InputError for an unknown id, an empty text, or no criterion.
        """
        self._check(id, statement=statement, paper=paper)
        parts = tuple(parts)
        if (criterion is None) == (not parts) or (parts and (measured is not None or partly is not None or unit)):
            raise InputError(
                f"claim {id}", got="both or neither of criterion= and parts=", allowed="measured= with criterion=, or parts=[Part(...), ...]",
            )
        if expect not in (None, *VERDICTS[:2]):
            raise InputError(f"expect of claim {id}", got=expect, allowed=f"{REPRODUCED!r}, {PARTLY!r} or None")
        if not parts:
            parts = (Part(id, measured, criterion, partly, unit),)
        self._entries[id] = Entry(id, statement, paper, parts, source)
        self._expected.pop(id, None)
        if expect is not None:
            self._expected[id] = expect
        return self._entries[id].verdict

    def skip(self, id: str, *, statement: str, paper: str, reason: str) -> str:
        """Enter a claim that cannot be tested here, with the reason, and return its verdict.

        Raises: InputError for an unknown id or an empty text.
        """
        self._check(id, statement=statement, paper=paper, reason=reason)
        self._entries[id] = Entry(id, statement, paper, reason=reason)
        self._expected.pop(id, None)
        return NOT_TESTABLE

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries so far, in the order of ``ids``."""
        return tuple(self._entries[id] for id in self.ids if id in self._entries)

    def card(self) -> Card:
        """Write ``build/claims/<slug>.json`` and return the card, a table in Jupyter and in plain text.

        Raises: ClaimError if a claim is missing (nothing is written then) or came out weaker than ``expect``.
        """
        missing = [id for id in self.ids if id not in self._entries]
        if missing:
            raise ClaimError(f"claims of {self.slug}", got=f"nothing for {', '.join(missing)}", allowed="claims.add or claims.skip for every id")
        card = Card(self.slug, preset().name, self.entries, _versions(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        _write(_folder() / f"{self.slug}.json", json.dumps(card.as_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        weaker = [e for e in self.entries if e.id in self._expected and VERDICTS.index(e.verdict) > VERDICTS.index(self._expected[e.id])]
        if weaker:
            facts = []
            for entry in weaker:
                numbers = "; ".join(f"{part.value}: {part.rule}" for part in entry.parts) or entry.reason
                facts.append(f"{entry.id} {entry.verdict}, expected {self._expected[entry.id]} ({numbers})")
            raise ClaimError(f"claims of {self.slug}", got="; ".join(facts), hint="the cell that measures it; a verdict follows from the numbers")
        return card

    def _check(self, id: str, **texts: str) -> None:
        if id not in self.ids:
            raise InputError("claim id", got=id, allowed=", ".join(self.ids))
        for name, text in texts.items():
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{name} of claim {id}", got=text, allowed="a sentence")

    def __repr__(self) -> str:
        return f"claims of {self.slug}: {len(self._entries)} of {len(self.ids)} entered"


@dataclass(frozen=True, repr=False)
class Card:
    """All claims of a paper with their verdicts; shows as a table in Jupyter and as plain text elsewhere."""

    slug: str
    preset: str
    entries: tuple[Entry, ...]
    versions: Mapping[str, str]
    time: str

    @property
    def tally(self) -> dict[str, int]:
        """How many claims got each verdict."""
        return _count(entry.verdict for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": SCHEMA, "slug": self.slug, "preset": self.preset, "time": self.time, "versions": dict(self.versions),
            "entries": [entry.as_dict() for entry in self.entries],
        }

    def __str__(self) -> str:
        lines = [f"Claims of {self.slug}, preset {self.preset}: {_summary(self.tally)}"]
        for entry in self.entries:
            lines += ["", f"{entry.id:<4} {_MARK[entry.verdict]} {entry.verdict}"]
            rows = [("claim", entry.statement), ("paper", entry.paper)]
            for part in entry.parts:
                label = f"{part.label}: " if len(entry.parts) > 1 else ""
                verdict = f" -> {part.verdict}" if len(entry.parts) > 1 else ""
                rows += [("here", f"{label}{part.value}{verdict}"), ("rule", part.rule)]
            rows += [("from", entry.source)] if entry.source else []
            rows += [("reason", entry.reason)] if entry.reason else []
            for name, text in rows:
                lines += textwrap.wrap(text, 104, initial_indent=f"     {name:<7}", subsequent_indent=" " * 12)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{name}</th>' for name in ("Id", "Claim", "Paper", "Measured here", "Verdict"))
        body = "".join(self._row(entry) for entry in self.entries)
        caption = f"Claims of {self.slug}, preset {self.preset}: {_summary(self.tally)}"
        return (
            f'<div class="nbkit-claims" data-slug="{_escape(self.slug)}"><style>{_STYLE}</style><table><caption>{_escape(caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    @staticmethod
    def _row(entry: Entry) -> str:
        cells = []
        for part in entry.parts:
            several = len(entry.parts) > 1
            label = f"{_escape(part.label)}: " if several else ""
            verdict = f" {_badge(part.verdict)}" if several else ""
            cells.append(f"<div>{label}<b>{_escape(part.value)}</b>{verdict}<small>{_escape(part.rule)}</small></div>")
        if entry.source:
            cells.append(f"<small>{_escape(entry.source)}</small>")
        if entry.reason:
            cells.append(f"<div>{_escape(entry.reason)}</div>")
        return (
            f'<tr><th scope="row">{_escape(entry.id)}</th><td>{_escape(entry.statement)}</td><td>{_escape(entry.paper)}</td>'
            f"<td>{''.join(cells)}</td><td>{_badge(entry.verdict)}</td></tr>"
        )


# Summary and README.


def tally(folder: str | Path | None = None) -> dict[str, dict[str, int]]:
    """How many claims got each verdict, by paper, from ``build/claims/*.json`` (or another folder).

    Raises: InputError for a file that is not a claims record.
    """
    return {record["slug"]: _count(entry["verdict"] for entry in record["entries"]) for record in _records(folder)}


def merge_readme(readme: str | Path | None = None, folder: str | Path | None = None, *, check: bool = False, refresh: bool = False) -> list[str]:
    """Write the table of claims between the markers of README.md from ``build/claims/*.json``; returns what differed, one line a difference.

    A paper's rows are rewritten when a claim, a rule or a verdict changed, not when only digits did (timings differ on every machine);
    refresh=True rewrites all numbers. Papers without a record keep their rows, and a smoke run never replaces the rows of a larger preset.
    check=True writes nothing. Raises: MissingResourceError without a README, InputError without the two markers or for a damaged record.
    """
    path = Path(readme) if readme is not None else _readme()
    if not path.is_file():
        raise MissingResourceError("README with the table of claims", got=f"no file {path}", hint="give its path: merge_readme('README.md')")
    raw = path.read_bytes().decode("utf-8")
    # Work on plain line ends; a checkout with Windows ones gets them back.
    text = raw.replace("\r\n", "\n")
    if text.count(README_START) != 1 or text.count(README_END) != 1 or text.index(README_START) > text.index(README_END):
        raise InputError(f"markers in {path.name}", got="not one start before one end", allowed=f"the two lines {README_START} and {README_END}")
    before, rest = text.split(README_START)
    old, after = rest.split(README_END)
    sections = {match["slug"]: match for match in _SECTION.finditer(old)}
    merged = {slug: match[0] for slug, match in sections.items()}
    differences = []
    for record in _records(folder):
        slug, known = record["slug"], sections.get(record["slug"])
        new = _section(record)
        if known is None:
            differences.append(f"{slug}: not in the table yet")
        elif record["preset"] == "smoke" and known["preset"] != "smoke":
            continue
        elif known["key"] != _SECTION.match(new)["key"] or known["preset"] != record["preset"]:
            differences += _differences(slug, known, record)
        elif not refresh or known[0] == new:
            continue
        else:
            differences.append(f"{slug}: other digits, same verdicts")
        merged[slug] = new
    body = "\n\n".join(merged[slug] for slug in sorted(merged)) or "No notebook has been run yet."
    result = f"{before}{README_START}\n{body}\n{README_END}{after}"
    if not check and result != text:
        _write(path, result.replace("\n", "\r\n") if "\r\n" in raw else result)
    return differences


_SECTION = re.compile(
    r"<!-- claims of (?P<slug>[a-z][a-z0-9_]*) preset=(?P<preset>\w+) key=(?P<key>[0-9a-f]{12}) -->\n(?P<rows>.*?)\n<!-- end of (?P=slug) -->",
    re.DOTALL,
)


def _section(record: Mapping[str, Any]) -> str:
    slug, counts = record["slug"], _count(entry["verdict"] for entry in record["entries"])
    lines = [
        f"<!-- claims of {slug} preset={record['preset']} key={_key(record)} -->",
        f"**[{slug}](notebooks/{slug}.ipynb)** (preset {record['preset']}): {_summary(counts)}", "",
        "| id | claim | paper | measured here | verdict |", "|---|---|---|---|---|",
    ]
    for entry in record["entries"]:
        several = len(entry["parts"]) > 1
        here = [(f"{part['label']}: " if several else "") + part["value"] for part in entry["parts"]] or [entry["reason"]]
        cells = [entry["id"], entry["statement"], entry["paper"], "; ".join(here)]
        lines.append("| " + " | ".join(map(_markdown, cells)) + f" | {_MARK[entry['verdict']]} {entry['verdict']} |")
    return "\n".join([*lines, f"<!-- end of {slug} -->"])


def _key(record: Mapping[str, Any]) -> str:
    """Twelve hex digits over everything in the table except the measured digits."""
    rows = []
    for entry in record["entries"]:
        parts = [[part["label"], part["unit"], part["rule"]] for part in entry["parts"]]
        rows.append([entry["id"], entry["statement"], entry["paper"], entry["verdict"], entry["reason"], parts])
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode()).hexdigest()[:12]


def _differences(slug: str, known: re.Match[str], record: Mapping[str, Any]) -> list[str]:
    """What a reader wants to know about a changed section: verdicts by id, else that the wording changed."""
    old = {}
    for row in known["rows"].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        if len(cells) == 7 and cells[1] not in ("id", "---"):
            old[cells[1]] = cells[5].partition(" ")[2]
    new = {_markdown(entry["id"]): entry["verdict"] for entry in record["entries"]}
    changed = [
        f"{slug} {id}: the table says {old.get(id, 'nothing')}, this run says {new.get(id, 'nothing')}"
        for id in {**old, **new} if old.get(id) != new.get(id)
    ]
    if known["preset"] != record["preset"]:
        changed.append(f"{slug}: the table is of preset {known['preset']}, this run of {record['preset']}")
    return changed or [f"{slug}: claims or rules are worded differently"]


def _records(folder: str | Path | None) -> list[dict[str, Any]]:
    records, fields = [], {"id", "statement", "paper", "parts", "reason"}
    for path in sorted((Path(folder) if folder is not None else _folder()).glob("*.json")):
        what, hint = f"claims record {path.name}", "delete it and run the notebook again"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            sound = record["schema"] == SCHEMA and record["slug"] == path.stem and isinstance(record["preset"], str)
            sound = sound and all(entry["verdict"] in VERDICTS and fields <= entry.keys() for entry in record["entries"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(what, got=f"{type(error).__name__}: {error}", hint=hint) from error
        if not sound:
            raise InputError(what, got="another schema, slug or verdict", allowed=f"schema {SCHEMA}", hint=hint)
        records.append(record)
    return records


# Helpers.


def _grade(whole: bool, some: bool) -> str:
    return REPRODUCED if whole else PARTLY if some else NOT_REPRODUCED


def _check_bound(criterion: Any, *bounds: float) -> None:
    name = type(criterion).__name__
    if not all(isinstance(bound, (int, float)) and not math.isnan(bound) for bound in bounds):
        raise InputError(name, got=bounds, allowed="numbers")
    if getattr(criterion, "on", "interval") not in ("interval", "estimate"):
        raise InputError(f"on of {name}", got=criterion.on, allowed="interval, estimate")


def _numbers(criterion: Any, measured: Any) -> tuple[float, float, float, bool]:
    """Estimate, low and high of a measurement, and whether it is a bare number without an interval."""
    if isinstance(measured, Interval):
        return measured.estimate, measured.low, measured.high, False
    if measured is None:
        raise InputError(f"measurement for {type(criterion).__name__}", got=None, allowed="an Interval or a number")
    return float(measured), float(measured), float(measured), True


def _measurement(label: str, measured: Any, criterion: Any) -> Interval | float | None:
    if isinstance(criterion, All):
        if measured is not None:
            raise InputError(f"measurement of {label!r}", got=measured, allowed="None, because All(...) holds the facts")
        return None
    if not isinstance(measured, Interval):
        # float() would take True for 1 and read "0.3" from a text.
        if isinstance(measured, (bool, str, bytes)) or not hasattr(measured, "__float__"):
            raise InputError(f"measurement of {label!r}", got=measured, allowed="an Interval or a number", hint="All(**{text: bool}) for a fact")
        measured = float(measured)
    numbers = (measured.estimate, measured.low, measured.high) if isinstance(measured, Interval) else (measured,)
    if not all(map(math.isfinite, numbers)):
        hint = "find the cell where the NaN or the infinity starts"
        raise ClaimError(f"measurement of {label!r}", got=str(measured), allowed="finite numbers", hint=hint)
    return measured


def _subject(criterion: Any) -> str:
    return "whole interval" if criterion.on == "interval" else "estimate"


def _show(number: float) -> str:
    return f"{number:.6g}"


def _count(verdicts: Iterable[str]) -> dict[str, int]:
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def _summary(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _folder() -> Path:
    import nbkit

    return Path(nbkit.build_path("claims"))


def _readme() -> Path:
    return Path(__file__).resolve().parent.parent / "README.md"


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(text.encode("utf-8"))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _escape(text: str) -> str:
    return html.escape(str(text), quote=True)


def _markdown(text: str) -> str:
    """A table cell of GitHub Markdown that shows the text as it is: no HTML, no emphasis, no row or column break, no marker."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(" ".join(str(text).split()), quote=False))


def _badge(verdict: str) -> str:
    return f'<span class="nbkit-verdict nbkit-v{VERDICTS.index(verdict)}"><span aria-hidden="true">{_MARK[verdict]}</span> {verdict}</span>'


# Shape as well as colour tells the verdicts apart.
_MARK = {REPRODUCED: "●", PARTLY: "◐", NOT_REPRODUCED: "○", NOT_TESTABLE: "–"}

# Text takes the theme's own colour and colours appear only as borders and marks, so both themes keep full contrast.
_STYLE = " ".join("""
.nbkit-claims { color: var(--jp-content-font-color1, inherit); overflow-x: auto; margin: .5em 0; }
.nbkit-claims table { border-collapse: collapse; width: 100%; max-width: 75em; margin: 0; color: inherit; font-size: .95em; line-height: 1.4; }
.nbkit-claims caption { text-align: left; font-weight: 600; padding: .3em 0; caption-side: top; color: inherit; }
.nbkit-claims table th, .nbkit-claims table td { text-align: left !important; vertical-align: top; padding: .45em .7em;
 white-space: normal; max-width: none;
 border: 0; border-bottom: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .4)); }
.nbkit-claims table tbody tr, .nbkit-claims table tbody tr:nth-child(odd), .nbkit-claims table tbody tr:hover { background: transparent; }
.nbkit-claims table th:nth-child(4) { width: 42%; }
.nbkit-claims small { display: block; opacity: .8; font-size: .85em; }
.nbkit-claims td div + div { margin-top: .4em; }
.nbkit-verdict { display: inline-block; border-left: .3em solid; padding: 0 .4em; }
.nbkit-v0 { border-color: #009E73; } .nbkit-v1 { border-color: #E69F00; } .nbkit-v2 { border-color: #D55E00; } .nbkit-v3 { border-color: #808080; }
""".split())
