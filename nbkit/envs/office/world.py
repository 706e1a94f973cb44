"""The papers on the desk: CSV files with marked, doubled and untidy rows, made from a seed, and the records behind them."""

from __future__ import annotations

import csv
import io
import random
from functools import lru_cache
from typing import Any

from nbkit.envs.office.jobs import JOBS, MARKS, Job

__all__ = ["World", "csv_bytes", "world"]

_CODES = tuple(f"c{number}" for number in range(1, 10))


def csv_bytes(columns: tuple[str, ...], rows: list[tuple]) -> bytes:
    """A CSV file with a header line and plain line ends.

    >>> csv_bytes(("key", "amount"), [("tea", 3)])
    b'key,amount\\ntea,3\\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()


class World:
    """What one episode starts from. `records`: rows of each main file; `lists`: code to value per list file; `files`: bytes by name.

    `memo` holds results that the memory back end has worked out before; nothing in it can change an answer.
    """

    def __init__(self, template: int, seed: int):
        self.job = job = JOBS[template]
        # A seed of text, so that neighbouring templates and seeds share nothing.
        rng = random.Random(f"office/{job.name}/{seed}")
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.lists: dict[str, dict[str, str]] = {}
        self.files: dict[str, bytes] = {"reports/readme.txt": b"Reports of the house.\n"}
        self.memo: dict[Any, Any] = {}
        first = 1
        for stem in job.files:
            rows = _records(job, rng, first)
            first += len(rows)
            rows += [dict(row) for row in rng.sample(rows, 5)]
            rng.shuffle(rows)
            self.records[stem] = rows
            columns = tuple(rows[0])
            self.files[f"incoming/{stem}.csv"] = csv_bytes(columns, [tuple(row.values()) for row in rows])
        for name in job.lists:
            values = [f"{name[:-1]}{number}" for number in rng.sample(range(1, 10), 9)]
            for turn, source in enumerate(job.input.words):
                # Each source gives every code another value than all other sources do.
                entries = {code: values[(place + turn) % 9] for place, code in enumerate(_CODES)}
                self.lists[f"{source}_{name}"] = entries
                self.files[f"lists/{source}_{name}.csv"] = csv_bytes(("code", name[:-1]), list(entries.items()))
        for folder in folders(job):
            self.files[f"old/{folder}/papers.txt"] = f"{rng.randint(2, 90)} pages of {folder}\n".encode()


def folders(job: Job) -> tuple[str, ...]:
    """The folders in old/ at the start."""
    if job.constraint.kind == "protect":
        return job.constraint.words
    return ("contracts", "invoices", "maps", "minutes", "receipts")


def _untidy(rng: random.Random, word: str) -> str:
    return rng.choice((word, word, word, word, f" {word}", f"{word.upper()} ", word.capitalize()))


def _records(job: Job, rng: random.Random, first: int) -> list[dict[str, Any]]:
    """Rows of one main file: half of them carry a mark, every mark occurs in every part that a goal can pick out."""
    rows: list[dict[str, Any]] = []

    def amount() -> int:
        # Large enough that one row more or less shows through any rounding.
        return rng.randint(10_000, 99_999)

    def row(marks: str, **middle: Any) -> None:
        values = {word: amount() for word in job.goal.words} if job.goal.kind == "measure" else {"amount": amount()}
        rows.append({"id": first + len(rows), **middle, "code": rng.choice(_CODES), "mark": marks, **values})

    if job.goal.kind == "scope":
        for scope in job.goal.words:
            marks = rng.sample((*MARKS, "ok", "ok"), 10)
            for key, mark in zip(job.keys, marks):
                row("ok", **{job.scope: scope, job.column: _untidy(rng, key)})
                row(mark, **{job.scope: scope, job.column: _untidy(rng, key)})
    elif job.goal.kind == "group":
        for number in range(48):
            # Every value of every column occurs; which ones go together is chance.
            values = {column: _untidy(rng, f"{column}-{'abcdef'[rng.randrange(6) if number > 5 else number]}") for column in job.goal.words}
            row(MARKS[number // 2 % 8] if number % 2 else "ok", **values)
    else:
        for number in range(40):
            row(MARKS[number // 2 % 8] if number % 2 else "ok", **{job.column: _untidy(rng, job.keys[number // 4])})
    return rows


@lru_cache(maxsize=160)
def world(template: int, seed: int) -> World:
    """The world of a template and a seed; kept for the next episode that starts from it."""
    return World(template, seed)
