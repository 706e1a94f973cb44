"""Tables as values: rows with a short check sum, and the parts of CSV reading that both back ends share."""

from __future__ import annotations

import csv
import io
import json
import zlib
from functools import lru_cache

__all__ = ["Table", "check_sum", "list_rows", "main_rows"]


def check_sum(data: bytes) -> str:
    """Six hexadecimal digits that change with the content.

    >>> check_sum(b"123456789")  # the test value of CRC-32 is cbf43926
    'f43926'
    """
    return f"{zlib.crc32(data) & 0xFFFFFF:06x}"


class Table:
    """Columns and rows that nobody changes; rows are kept sorted, so that equal contents compare equal."""

    __slots__ = ("columns", "label", "peak", "rows")

    def __init__(self, columns: tuple[str, ...], rows: list[tuple]):
        self.columns = columns
        self.rows = sorted(rows)
        # The largest amount; rows without one count as 0.
        self.peak = max((row[columns.index("amount")] for row in rows), default=0) if "amount" in columns else 0
        self.label = f"{len(rows)} rows, check {check_sum(json.dumps([columns, self.rows]).encode())}"


def _parse(data: bytes) -> tuple[list[str], list[list[str]]]:
    rows = list(csv.reader(io.StringIO(data.decode("utf-8", errors="replace"))))
    return (rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]) if rows else ([], [])


@lru_cache(maxsize=4096)
def main_rows(data: bytes, key: str, value: str, only: str) -> Table | str:
    """The rows of a main file as (id, key, code, mark, amount), or what is wrong with the request."""
    columns, rows = _parse(data)
    column, _, word = only.partition("=")
    for name in ("id", key, "code", "mark", value, *([column] if only else [])):
        if name not in columns:
            return f"no column {name}"
    at = {name: columns.index(name) for name in columns}
    try:
        return Table(("id", "key", "code", "mark", "amount"), [
            (int(row[at["id"]]), row[at[key]], row[at["code"]], row[at["mark"]], int(row[at[value]]))
            for row in rows if not only or row[at[column]] == word
        ])
    except ValueError:
        return f"column {value} holds no whole numbers"


@lru_cache(maxsize=4096)
def list_rows(data: bytes) -> Table | str:
    """The rows of a list file, which has a code and one more column, or what is wrong with the request."""
    columns, rows = _parse(data)
    if len(columns) != 2 or columns[0] != "code" or not columns[1].isidentifier() or columns[1] in ("id", "key", "mark", "amount"):
        return "not a list of codes"
    return Table(tuple(columns), [tuple(row) for row in rows])
