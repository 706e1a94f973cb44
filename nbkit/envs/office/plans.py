"""The plan of a job: its actions in order, and which of them depend on the hidden word by the flow of data."""

from __future__ import annotations

from functools import lru_cache

from nbkit.envs.office.jobs import JOBS, Job
from nbkit.envs.office.types import Call, Step, Variant
from nbkit.errors import InputError

__all__ = ["plan"]


class _Pattern:
    """A plan in the making: calls with ``{goal}`` and so on where slot words go, and what each reads and writes."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict, str, tuple[str, ...], str]] = []

    def add(self, kind: str, name: str, *, reads: tuple[str, ...] = (), writes: str = "", **args: str) -> None:
        self.rows.append((name, args, kind, reads, writes))

    def table(self, kind: str, name: str, source: str, into: str, **args: str) -> str:
        """A step from one table to another; returns the new one."""
        self.add(kind, name, reads=(source,), writes=into, table="{goal}_" + source, into="{goal}_" + into, **args)
        return into

    def peek(self, kind: str, source: str) -> None:
        self.add(kind, "peek", reads=(source,), table="{goal}_" + source)


def _looks(job: Job, steps: _Pattern) -> None:
    for look in job.looks:
        if look in ("incoming", "lists", "old"):
            steps.add("inspect", "list", folder=look)
        elif look == "rules":
            steps.add("inspect", "read", path="notes/rules.txt")
        elif look == "head":
            steps.add("inspect", "read", path=f"incoming/{job.files[0]}.csv")
        elif look == "count":
            steps.add("inspect", "count", path=f"incoming/{job.files[-1]}.csv")
        else:
            steps.add("inspect", look)


def _load(job: Job, steps: _Pattern) -> str:
    for stem in job.files:
        args = {"key": job.column, "value": "amount"}
        if job.goal.kind == "scope":
            args["only"] = f"{job.scope}={{goal}}"
        elif job.goal.kind == "group":
            args["key"] = "{goal}"
        else:
            args["value"] = "{goal}"
        steps.add("load", "load", writes=stem, path=f"incoming/{stem}.csv", into="{goal}_" + stem, **args)
    rows = job.files[0]
    for number, stem in enumerate(job.files[1:], 2):
        into = f"all{number}"
        steps.add("load", "stack", reads=(rows, stem), writes=into, left="{goal}_" + rows, right="{goal}_" + stem, into="{goal}_" + into)
        rows = into
    if "stack" in job.peeks:
        steps.peek("load", rows)
    return rows


def _join(job: Job, steps: _Pattern, left: str) -> None:
    for name in job.lists:
        steps.add("load", "lookup", writes=name, path=f"lists/{{input}}_{name}.csv", into="{goal}_" + name)
        if job.scan:
            steps.peek("load", name)
    for name in job.lists:
        into = f"with_{name}"
        steps.add("load", "join", reads=(left, name), writes=into, left="{goal}_" + left, right="{goal}_" + name, into="{goal}_" + into)
        left = into
    if "join" in job.peeks:
        steps.peek("load", left)
    if job.tally:
        steps.table("load", "total", left, "tally", by=job.lists[-1][:-1])


def _clean(job: Job, steps: _Pattern, rows: str) -> str:
    for name in job.clean:
        args = {}
        if name == "drop":
            args["mark"] = "{context}" if job.context.kind == "mark" else job.fixed
        elif name == "convert":
            args["unit"] = "{context}" if job.context.kind == "unit" else job.fixed
        rows = steps.table("clean", name, rows, name, **args)
        if name in job.peeks:
            steps.peek("clean", rows)
    return rows


def _derive(job: Job, steps: _Pattern, rows: str) -> str:
    names = ("total", "rank", "share") if job.share else ("total", "rank")
    for name in names:
        args = {"by": "key"} if name == "total" else {}
        rows = steps.table("derive", name, rows, name, **args)
        if name in job.peeks:
            steps.peek("derive", rows)
    return rows


def _output(job: Job, steps: _Pattern, rows: str) -> None:
    rule = job.constraint.kind
    if rule == "exclude":
        rows = steps.table("output", "exclude", rows, "final", key="{constraint}")
    else:
        rows = steps.table("output", "round", rows, "final", to="{constraint}" if rule == "round" else job.rounding)
    report = "reports/{goal}_report.csv"
    steps.add("output", "write", reads=(rows,), writes="written", table="{goal}_" + rows, path=report)
    files, reads = "{goal}_report.csv", ("written",)
    if rule == "approve":
        steps.add("output", "sign", reads=reads, writes="signed", path=report, by="{constraint}")
        reads = ("signed",)
    final = reads
    if rule == "protect" or job.keep:
        keep = "{constraint}" if rule == "protect" else job.keep
        steps.add("output", "purge", writes="kept", folder="old", keep=keep, note="reports/{goal}_kept.txt")
        files, reads = files + " {goal}_kept.txt", (*reads, "kept")
    steps.add("output", "commit", reads=reads, writes="commit", files=files, message="{goal} report")
    # A report about what was kept goes out with the mail as well.
    attached = {"file": report} if rule != "protect" else {"file": report, "note": "reports/{goal}_kept.txt"}
    to = "{constraint}" if rule == "approve" else "office"
    steps.add("output", "send", reads=reads if rule == "protect" else final, writes="mail", to=to, **attached)
    for end in job.ends:
        steps.add("close", end, reads=("commit",) if end == "history" else ("mail", "notice"))


@lru_cache(maxsize=64)
def _pattern(template: int) -> tuple[tuple[str, dict, str, tuple[str, ...], str], ...]:
    job, steps = JOBS[template], _Pattern()
    _looks(job, steps)
    raw = _load(job, steps)
    if job.notice:
        steps.add("load", "notify", writes="notice", to="team", text="Starting on the {goal} report.")
    if job.left == "raw" and job.place == "early":
        _join(job, steps, raw)
    rows = _clean(job, steps, raw)
    left = rows if job.left == "clean" else raw
    if job.place == "mid" or (job.left == "clean" and job.place == "early"):
        _join(job, steps, left)
    final = _derive(job, steps, rows)
    if job.place == "late":
        _join(job, steps, left)
    _output(job, steps, final)
    return tuple(steps.rows)


def dependent_rows(template: int, slot: str) -> list[bool]:
    """Which rows of a template's plan use the slot or read what such a row wrote."""
    mark, touched, result = f"{{{slot}}}", set(), []
    for _, args, _, reads, writes in _pattern(template):
        depends = any(mark in str(value) for value in args.values()) or not touched.isdisjoint(reads)
        if depends and writes:
            touched.add(writes)
        result.append(depends)
    return result


@lru_cache(maxsize=8192)
def _steps(template: int, slot: str, words: tuple[tuple[str, str], ...], lasting: frozenset[str]) -> tuple[Step, ...]:
    filled, mark = dict(words), f"{{{slot}}}"
    steps = []
    for (name, args, kind, _, _), depends in zip(_pattern(template), dependent_rows(template, slot)):
        call = Call(name, {key: value.format(**filled) for key, value in args.items()})
        fields = tuple(key for key, value in args.items() if mark in value)
        steps.append(Step(call, depends, name not in lasting, kind, fields))
    return tuple(steps)


def plan(variant: Variant, value: str | None = None) -> list[Step]:
    """The actions that do the job of a variant when the hidden word is `value` (default: the right one); always equally many.

    A step's `depends` is declared from the flow of data: its arguments hold the hidden word, or it reads what such a step wrote.

    Raises: InputError when `value` is none of the variant's options.

    >>> from nbkit.envs.office import OfficeOps
    >>> variant = OfficeOps().variants[0]
    >>> print(variant.dimension, "->", *[step.call.name for step in plan(variant) if not step.depends])
    goal -> list list read read
    """
    word = variant.answer if value is None else value
    if word not in variant.options:
        raise InputError("hidden value", got=word, allowed=", ".join(variant.options))
    words = tuple((name, word if name == variant.slot else known) for name, known in variant.slots.items())
    return list(_steps(variant.template, variant.slot, words, variant.lasting))
