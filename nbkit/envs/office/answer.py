"""What a job should leave behind, worked out from the records themselves, and the verdict on what an episode did leave behind.

Nothing here uses the tools or the plan: it is a second way to the same numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

from nbkit.envs.office.desk import Desk
from nbkit.envs.office.jobs import ROUNDING, UNITS
from nbkit.envs.office.types import Check
from nbkit.envs.office.world import World, folders, world

__all__ = ["Expected", "expected", "verdict"]


class Expected(NamedTuple):
    """The right end of a job: files in reports, commit message, mails, folders left in old, tables (columns and sorted rows) by name."""

    files: dict[str, bytes]
    message: str
    mails: list[str]
    left: list[str]
    tables: dict[str, tuple[tuple[str, ...], list[tuple]]]
    posted: set[str]


def _rows(start: World, words: dict[str, str]) -> list[dict[str, Any]]:
    """All records that the goal picks out, doubles included, as id, key, code, mark, amount."""
    goal, kind, found = words["goal"], start.job.goal.kind, []
    for records in start.records.values():
        for record in records:
            if kind == "scope" and record[start.job.scope] != goal:
                continue
            key = record[goal if kind == "group" else start.job.column]
            found.append({"id": record["id"], "key": key, "code": record["code"], "mark": record["mark"],
                          "amount": record[goal if kind == "measure" else "amount"]})
    return found


def _clean(start: World, words: dict[str, str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    job = start.job
    mark, unit = (words["context"], job.fixed) if job.context.kind == "mark" else (job.fixed, words["context"])
    single = {row["id"]: row for row in rows if row["mark"] != mark}
    return [{**row, "key": row["key"].strip(" ").lower(), "amount": row["amount"] * UNITS[unit]} for row in single.values()]


def _report(start: World, words: dict[str, str], rows: list[dict[str, Any]]) -> str:
    job, totals = start.job, Counter()
    for row in rows:
        totals[row["key"]] += row["amount"]
    whole, rule = totals.total(), job.constraint.kind
    rounding = words["constraint"] if rule == "round" else job.rounding
    head = ["place", "key", "amount" if rule == "exclude" else f"amount_{rounding}", *(["share"] if job.share else [])]
    lines = [",".join(head)]
    for place, key in enumerate(sorted(totals, key=lambda key: (-totals[key], key)), 1):
        if rule == "exclude" and key == words["constraint"]:
            continue
        amount = totals[key]
        if rule != "exclude":
            # Half a unit rounds up.
            amount = int((amount + ROUNDING[rounding] // 2) / ROUNDING[rounding]) * ROUNDING[rounding]
        share = [str(totals[key] * 1000 // whole)] if job.share else []
        lines.append(",".join([str(place), key, str(amount), *share]))
    if rule == "approve":
        lines.append(f"approved by {words['constraint']}")
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=4096)
def expected(template: int, seed: int, slots: tuple[tuple[str, str], ...], lasting: frozenset[str]) -> Expected:
    """The right end of a template's job for one filling of the four slots."""
    start, words = world(template, seed), dict(slots)
    job, goal = start.job, words["goal"]
    raw = _rows(start, words)
    clean = _clean(start, words, raw)
    report = _report(start, words, clean)
    files, attached, left = {f"{goal}_report.csv": report.encode()}, report, list(folders(job))
    keep = words["constraint"] if job.constraint.kind == "protect" else job.keep
    if keep:
        note = f"kept {keep}: {start.files[f'old/{keep}/papers.txt'].decode()}"
        files[f"{goal}_kept.txt"], left = note.encode(), [keep]
        if job.constraint.kind == "protect":
            attached += note
    to = words["constraint"] if job.constraint.kind == "approve" else "office"
    mails = [json.dumps({"tool": "send", "to": to, "text": attached})]
    if job.notice:
        mails.append(json.dumps({"tool": "notify", "to": "team", "text": f"Starting on the {goal} report."}))
    columns, joined = ("id", "key", "code", "mark", "amount"), [tuple(row.values()) for row in (clean if job.left == "clean" else raw)]
    tables, names = {}, []
    for name in job.lists:
        entries = start.lists[f"{words['input']}_{name}"]
        columns, joined = (*columns, name[:-1]), [(*row, entries[row[2]]) for row in joined]
        names.append(f"{goal}_with_{name}")
        tables[names[-1]] = (columns, sorted(joined))
    if job.tally:
        sums = Counter()
        for row in joined:
            sums[row[-1]] += row[4]
        tables[f"{goal}_tally"] = ((job.lists[-1][:-1], "amount"), sorted(sums.items()))
    return Expected(files, f"{goal} report", sorted(mails), sorted(left), tables, set(names) if "join" in lasting else set())


def verdict(wanted: Expected, desk: Desk) -> Check:
    """Compare what is on the desk, byte by byte and row by row, with what should be there."""
    wrong = [f"reports/{name} is not what was asked for" for name, data in wanted.files.items() if desk.get(f"reports/{name}") != data]
    head, log = desk.head(), desk.log()
    if {name: data for name, data in head.items() if name != "readme.txt"} != wanted.files or log != ["start", wanted.message]:
        wrong.append("the repository does not hold the report in one commit")
    gone, held = desk.mails()
    if sorted([*gone, *held]) != wanted.mails:
        wrong.append(f"the outbox holds {len(gone) + len(held)} mails and not the right {len(wanted.mails)}")
    if (desk.names("old") or []) != wanted.left:
        wrong.append("the old folder holds the wrong papers")
    for name, (columns, rows) in wanted.tables.items():
        if desk.columns(name) is None or (found := desk.content(name)).columns != columns or found.rows != rows:
            wrong.append(f"table {name} is not what was asked for")
    if desk.posted() != wanted.posted:
        wrong.append("a wrong table is posted")
    return Check(not wrong, tuple(wrong))
