"""The office's tools and rules, the same for both back ends: what may be asked, what is refused, what the answers say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from nbkit.envs.office.jobs import ROUNDING, UNITS
from nbkit.envs.office.tables import Table, check_sum, list_rows, main_rows
from nbkit.envs.office.types import Call
from nbkit.envs.office.world import World, csv_bytes
from nbkit.envs.sandbox import inside

__all__ = ["LASTING", "TOOLS", "Desk", "house_rules"]

# Tool: the arguments it needs and those it may have.
TOOLS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (frozenset(needed.split()), frozenset(allowed.split())) for name, (needed, allowed) in {
        "list": ("folder", ""), "read": ("path", ""), "count": ("path", ""), "tables": ("", ""), "history": ("", ""), "outbox": ("", ""),
        "load": ("path into key value", "only"), "lookup": ("path into", ""), "stack": ("left right into", ""), "join": ("left right into", ""),
        "dedupe": ("table into", ""), "tidy": ("table into", ""), "drop": ("table into mark", ""), "convert": ("table into unit", ""),
        "total": ("table into by", ""), "rank": ("table into", ""), "share": ("table into", ""), "round": ("table into to", ""),
        "exclude": ("table into key", ""), "peek": ("table", ""), "write": ("table path", ""), "sign": ("path by", ""),
        "purge": ("folder keep note", ""), "commit": ("files message", ""), "notify": ("to text", ""), "send": ("to file", "note"),
        "verify": ("", ""),
    }.items()
}
# The tools whose doing can be made final, and what the house rules then say.
LASTING = {
    "join": "a joined table is posted at once and cannot be replaced",
    "notify": "a notice leaves at once",
    "purge": "what is purged is destroyed",
    "commit": "the repository takes one commit",
    "send": "mail leaves at once",
}
_FREE = {
    "join": "a joined table can be replaced",
    "notify": "a notice is held and can be replaced",
    "purge": "what is purged goes to the trash",
    "commit": "a commit can be replaced",
    "send": "mail is held and can be replaced",
}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
_TEXT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 .,=-]{0,198}[A-Za-z0-9.])?")
_NEEDS = {"drop": ("mark",), "tidy": ("key",), "convert": ("amount",), "rank": ("key", "amount"), "share": ("key", "amount"),
          "round": ("amount",), "exclude": ("key",)}
# Bounds that no honest job comes near; they keep every number exact in 64 bits, and every table small.
_COUNTS, _ROWS, _SUM, _PEAK = frozenset({"convert", "total", "share", "round"}), 5000, 2**50, 2**38


def house_rules(lasting: frozenset[str]) -> bytes:
    """The note on the wall: which doings are final.

    >>> print(house_rules(frozenset({"send"})).decode().splitlines()[-1])
    mail leaves at once
    """
    return "\n".join(LASTING[name] if name in lasting else _FREE[name] for name in LASTING).encode() + b"\n"


class Refused(Exception):
    """A request that the office turns down; the text says why."""


class Desk:
    """Tools over a store that a back end supplies: files, tables, one repository, an outbox.

    `do` runs a call and returns the answer and whether it was done. A call that is turned down changes nothing.
    """

    folder: Path | None = None

    def __init__(self, world: World, lasting: frozenset[str], reverify: int):
        self.world, self.lasting, self.reverify, self.pending = world, lasting, reverify, 0

    # What a back end supplies.
    def names(self, folder: str) -> list[str] | None: raise NotImplementedError
    def get(self, path: str) -> bytes | None: raise NotImplementedError
    def put(self, path: str, data: bytes) -> None: raise NotImplementedError
    def table_names(self) -> list[str]: raise NotImplementedError
    def columns(self, table: str) -> tuple[str, ...] | None: raise NotImplementedError
    def content(self, table: str) -> Table: raise NotImplementedError
    def size(self, table: str) -> tuple[int, int]: raise NotImplementedError
    def fill(self, into: str, table: Table) -> str: raise NotImplementedError
    def derive(self, tool: str, into: str, sources: tuple[str, ...], word: str) -> str: raise NotImplementedError
    def post(self, table: str) -> None: raise NotImplementedError
    def posted(self) -> set[str]: raise NotImplementedError
    def clear(self, keep: str, *, final: bool) -> None: raise NotImplementedError
    def trash(self) -> list[str]: raise NotImplementedError
    def record(self, files: tuple[str, ...], message: str) -> None: raise NotImplementedError
    def log(self) -> list[str]: raise NotImplementedError
    def head(self) -> dict[str, bytes]: raise NotImplementedError
    def post_mail(self, tool: str, line: str, *, final: bool) -> None: raise NotImplementedError
    def mails(self) -> tuple[list[str], list[str]]: raise NotImplementedError
    def close(self) -> None: raise NotImplementedError

    def do(self, call: Call) -> tuple[str, bool]:
        """Run a call: the answer, and whether it was done."""
        name, args = call.name, call.args
        try:
            if self.pending and name != "verify":
                raise Refused(f"the order changed, verify first ({self.pending} to go)")
            fault = _FAULTS.get(call.key(), "")
            if fault == "":
                fault = _fault(call)
                if len(_FAULTS) > 50_000:
                    _FAULTS.clear()
                _FAULTS[call.key()] = fault
            if fault:
                raise Refused(fault)
            return _HANDLERS[name](self, **args), True
        except Refused as no:
            return f"refused: {no}", False

    def tell(self) -> None:
        """A message came in after work began: what was ordered has to be verified again."""
        self.pending += self.reverify

    # Looking.
    def do_list(self, folder: str) -> str:
        names = self.names(folder)
        if names is None:
            raise Refused(f"no folder {folder}")
        return f"{folder}: {', '.join(names)}"

    def _file(self, path: str) -> bytes:
        data = self.get(path)
        if data is None:
            raise Refused(f"no file {path}")
        return data

    def do_read(self, path: str) -> str:
        data = self._file(path)
        return " / ".join(data[:600].decode("utf-8", errors="replace").splitlines()[: 3 if path.endswith(".csv") else 9])

    def do_count(self, path: str) -> str:
        return f"{path}: {self._file(path).count(10)} lines"

    def do_tables(self) -> str:
        return f"tables: {', '.join(self.table_names()) or 'none'}"

    def do_history(self) -> str:
        log, head = self.log(), self.head()
        return f"{len(log)} commits, last '{log[-1]}', check {check_sum(b'|'.join(head[name] for name in sorted(head)))}"

    def do_outbox(self) -> str:
        gone, held = self.mails()
        return f"mail: {len(gone)} gone, {len(held)} held, check {check_sum('|'.join((*gone, *held)).encode())}"

    def do_verify(self) -> str:
        if not self.pending:
            return "nothing to verify"
        self.pending -= 1
        return f"verified, {self.pending} to go"

    # Tables.
    def _columns(self, table: str, *needed: str) -> tuple[str, ...]:
        columns = self.columns(table)
        if columns is None:
            raise Refused(f"no table {table}")
        for name in needed:
            if name not in columns:
                raise Refused(f"{table} has no column {name}")
        return columns

    def _into(self, into: str) -> None:
        if "join" in self.lasting and into in self.posted():
            raise Refused(f"{into} is posted")

    def do_load(self, path: str, into: str, key: str, value: str, only: str = "") -> str:
        table = main_rows(self._file(path), key, value, only)
        if isinstance(table, str):
            raise Refused(table)
        self._into(into)
        return f"{into}: {self.fill(into, table)}"

    def do_lookup(self, path: str, into: str) -> str:
        table = list_rows(self._file(path))
        if isinstance(table, str):
            raise Refused(table)
        self._into(into)
        return f"{into}: {self.fill(into, table)}"

    def do_stack(self, left: str, right: str, into: str) -> str:
        if self._columns(left) != self._columns(right):
            raise Refused("different columns")
        if self.size(left)[0] + self.size(right)[0] > _ROWS:
            raise Refused("too many rows")
        self._into(into)
        return f"{into}: {self.derive('stack', into, (left, right), '')}"

    def do_join(self, left: str, right: str, into: str) -> str:
        mine, other = self._columns(left, "code"), self._columns(right, "code")
        if len(set(mine) & set(other)) != 1:
            raise Refused("both have more columns in common than the code")
        place, rows = other.index("code"), self.content(right).rows
        if len({row[place] for row in rows}) < len(rows):
            raise Refused(f"codes in {right} occur twice")
        self._into(into)
        label = self.derive("join", into, (left, right), "")
        if "join" in self.lasting:
            self.post(into)
            return f"{into}: {label}, posted"
        return f"{into}: {label}"

    def _one(self, tool: str, table: str, into: str, word: str = "") -> str:
        self._columns(table, *_NEEDS.get(tool, ()))
        if into == table:
            raise Refused("a table cannot be made from itself")
        if tool in _COUNTS:
            rows, peak = self.size(table)
            if rows * peak > _SUM or (tool == "convert" and peak * UNITS[word] > _PEAK):
                raise Refused("numbers too large")
        self._into(into)
        return f"{into}: {self.derive(tool, into, (table,), word)}"

    def do_dedupe(self, table: str, into: str) -> str: return self._one("dedupe", table, into)
    def do_tidy(self, table: str, into: str) -> str: return self._one("tidy", table, into)
    def do_drop(self, table: str, into: str, mark: str) -> str: return self._one("drop", table, into, mark)
    def do_convert(self, table: str, into: str, unit: str) -> str: return self._one("convert", table, into, unit)
    def do_exclude(self, table: str, into: str, key: str) -> str: return self._one("exclude", table, into, key)
    def do_round(self, table: str, into: str, to: str) -> str: return self._one("round", table, into, to)

    def do_total(self, table: str, into: str, by: str) -> str:
        self._columns(table, by, "amount")
        if by == "amount":
            raise Refused("amounts cannot be totalled by themselves")
        return self._one("total", table, into, by)

    def _ranked(self, tool: str, table: str, into: str, new: str) -> str:
        if new in self._columns(table):
            raise Refused(f"{table} has a {new} already")
        return self._one(tool, table, into)

    def do_rank(self, table: str, into: str) -> str: return self._ranked("rank", table, into, "place")

    def do_share(self, table: str, into: str) -> str: return self._ranked("share", table, into, "share")

    def do_peek(self, table: str) -> str:
        self._columns(table)
        content = self.content(table)
        return f"{table}: {content.label}, first {', '.join(map(str, content.rows[0])) if content.rows else 'none'}"

    # Output.
    def do_write(self, table: str, path: str) -> str:
        self._columns(table)
        _report(path)
        content = self.content(table)
        data = csv_bytes(content.columns, content.rows)
        self.put(path, data)
        return f"{path}: {len(data)} bytes, check {check_sum(data)}"

    def do_sign(self, path: str, by: str) -> str:
        _report(path)
        lines = self._file(path).decode().splitlines()
        if lines and lines[-1].startswith("approved by "):
            lines.pop()
        data = ("\n".join([*lines, f"approved by {by}"]) + "\n").encode()
        self.put(path, data)
        return f"{path}: approved by {by}, check {check_sum(data)}"

    def do_purge(self, folder: str, keep: str, note: str) -> str:
        _report(note)
        if folder != "old":
            raise Refused("only the folder old may be emptied")
        final, names = "purge" in self.lasting, self.names("old") or []
        if final and len(names) < 2:
            raise Refused("the folder is empty already")
        if keep not in names and keep not in self.trash():
            raise Refused(f"no folder old/{keep}")
        self.clear(keep, final=final)
        data = f"kept {keep}: {(self.get(f'old/{keep}/papers.txt') or b'').decode()}".encode()
        self.put(note, data)
        return f"old: kept {keep}, the rest {'destroyed' if final else 'in the trash'}; {note}: check {check_sum(data)}"

    def do_commit(self, files: str, message: str) -> str:
        names = tuple(files.split(" "))
        parts = [self._file(f"reports/{name}") for name in names]
        final = "commit" in self.lasting
        if final and len(self.log()) > 1:
            raise Refused("the repository takes one commit")
        self.record(names, message)
        return f"committed {len(names)} files as '{message}', check {check_sum(b'|'.join(parts))}{', final' if final else ''}"

    def _mail(self, tool: str, to: str, text: str) -> str:
        line, final = json.dumps({"tool": tool, "to": to, "text": text}), tool in self.lasting
        self.post_mail(tool, line, final=final)
        return f"to {to}: {'gone' if final else 'held'}, check {check_sum(line.encode())}"

    def do_notify(self, to: str, text: str) -> str: return self._mail("notify", to, text)

    def do_send(self, to: str, file: str, note: str = "") -> str:
        text = "".join(self._file(path).decode() for path in (file, note) if path)
        return self._mail("send", to, text)


def _report(path: str) -> None:
    if not path.startswith("reports/") or path.count("/") != 1:
        raise Refused("written files belong directly into reports")


# What was found about a call's arguments, by key: None for nothing wrong. They do not depend on the state of any episode.
_FAULTS: dict[tuple[str, str], str | None] = {}
_HANDLERS: dict[str, Callable[..., str]] = {name: getattr(Desk, f"do_{name}") for name in TOOLS}


def _fault(call: Call) -> str | None:
    """What is wrong with the arguments of a call, whatever the state of the office."""
    if call.name not in TOOLS:
        return f"no tool {call.name}"
    needed, allowed = TOOLS[call.name]
    if not needed <= set(call.args) <= needed | allowed:
        return f"{call.name} takes {', '.join(sorted(needed | allowed)) or 'nothing'}"
    for key, value in call.args.items():
        if not isinstance(value, str):
            return f"{key} must be text"
        if key in ("path", "folder", "file", "note"):
            good = inside(value)
        elif key in ("table", "left", "right", "into", "by") and call.name != "sign":
            good = _NAME.fullmatch(value) is not None and not value.startswith("sqlite_")
        elif key == "files":
            names = value.split(" ")
            good = all(inside(name) and "/" not in name for name in names) and len(set(names)) == len(names)
        elif key == "unit":
            good = value in UNITS
        elif key == "to" and call.name == "round":
            good = value in ROUNDING
        elif key == "keep":
            good = inside(value) and "/" not in value
        else:
            good = _TEXT.fullmatch(value) is not None
        if not good:
            return f"bad {key}"
    return None
