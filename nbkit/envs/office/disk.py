"""The office on disk: CSV files, a sqlite3 database, a git repository and an outbox file in a temporary folder of its own."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

from nbkit.envs.office.desk import Desk, Refused, house_rules
from nbkit.envs.office.jobs import ROUNDING, UNITS
from nbkit.envs.office.tables import Table
from nbkit.envs.office.world import World
from nbkit.envs.sandbox import Sandbox, run_program
from nbkit.errors import InputError

__all__ = ["DiskDesk"]

# Fixed author and dates, no settings of the user or the machine, no hooks, no questions.
_GIT_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0",
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
       for what, value in (("NAME", "Office"), ("EMAIL", "office@example.org"), ("DATE", "2024-01-02T03:04:05+0000"))},
}
_GIT_SET = (f"core.hooksPath={os.devnull}", "commit.gpgsign=false", "core.autocrlf=false", "core.fsync=none", "gc.auto=0", "init.defaultBranch=main")
# Statements by tool. {a} and {b} are the tables read, {cols} all columns of {a}; ? is the word.
_SQL = {
    "stack": "SELECT * FROM {a} UNION ALL SELECT * FROM {b}",
    "join": "SELECT * FROM {a} JOIN {b} USING (code)",
    "dedupe": "SELECT DISTINCT * FROM {a}",
    "drop": "SELECT * FROM {a} WHERE mark <> ?",
    "exclude": "SELECT * FROM {a} WHERE key <> ?",
    "rank": "SELECT ROW_NUMBER() OVER (ORDER BY amount DESC, key, {cols}) AS place, * FROM {a}",
    "share": "SELECT *, amount * 1000 / (SELECT SUM(amount) FROM {a}) AS share FROM {a}",
}
# Tools that change one column: its name and what it becomes.
_CHANGED = {
    "tidy": ("key", "LOWER(TRIM(key))"), "convert": ("amount", "amount * {unit}"), "round": ("amount", "(amount + {unit} / 2) / {unit} * {unit}"),
}


class DiskDesk(Desk):
    """A desk whose files, rows, commits and mails are real. Raises: MissingResourceError when git is not on this machine."""

    def __init__(self, world: World, lasting: frozenset[str], reverify: int, *, parent: str | os.PathLike | None = None):
        super().__init__(world, lasting, reverify)
        self._box = Sandbox(parent=parent, prefix="office-")
        try:
            self._set_up()
        except BaseException:
            self._box.close()
            raise

    def _set_up(self) -> None:
        self.folder = root = self._box.root
        for name, data in {**self.world.files, "notes/rules.txt": house_rules(self.lasting)}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        # What the tools keep for themselves stands under a name that no call can say.
        self._own = root / ".office"
        for name in ("held", "trash"):
            (self._own / name).mkdir(parents=True)
        (self._own / "outbox.jsonl").touch()
        self._sql = sqlite3.connect(self._own / "office.db", isolation_level=None)
        self._sql.execute("PRAGMA journal_mode=OFF")
        self._sql.execute("PRAGMA synchronous=OFF")
        # Names of tables that calls can say start with a letter.
        self._sql.execute("CREATE TABLE _posted (name TEXT PRIMARY KEY)")
        self._git("init", "-q", "--template=")
        self._git("add", "--", "readme.txt")
        self._git("commit", "-q", "-m", "start")
        self._base = self._git("rev-parse", "HEAD").decode().strip()

    def _git(self, *args: str, stdin: bytes | None = None) -> bytes:
        places = [f"--git-dir={self._own / 'git'}", f"--work-tree={self._box.root / 'reports'}"]
        options = [part for setting in _GIT_SET for part in ("-c", setting)]
        return run_program(["git", *options, *places, *args], cwd=self._box.root / "reports", env=_GIT_ENV, stdin=stdin)

    def _path(self, name: str) -> Path:
        try:
            return self._box.path(name)
        except InputError as error:
            raise Refused(f"{name} passes a link") from error

    def names(self, folder: str) -> list[str] | None:
        path = self._path(folder)
        return sorted(item.name for item in path.iterdir() if not item.is_symlink()) or None if path.is_dir() else None

    def get(self, path: str) -> bytes | None:
        place = self._path(path)
        return place.read_bytes() if place.is_file() else None

    def put(self, path: str, data: bytes) -> None:
        self._path(path).write_bytes(data)

    def table_names(self) -> list[str]:
        found = self._sql.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name <> '_posted'")
        return sorted(name for name, in found)

    def columns(self, table: str) -> tuple[str, ...] | None:
        return tuple(name for name, in self._sql.execute("SELECT name FROM pragma_table_info(?)", (table,))) or None

    def content(self, table: str) -> Table:
        found = self._sql.execute(f"SELECT * FROM {_quoted(table)}")
        return Table(tuple(column[0] for column in found.description), found.fetchall())

    def size(self, table: str) -> tuple[int, int]:
        peak = "MAX(amount)" if "amount" in (self.columns(table) or ()) else "0"
        rows, most = self._sql.execute(f"SELECT COUNT(*), {peak} FROM {_quoted(table)}").fetchone()
        return rows, most or 0

    def fill(self, into: str, table: Table) -> str:
        columns = ", ".join(f"{_quoted(name)} {'INTEGER' if name in ('id', 'amount') else 'TEXT'}" for name in table.columns)
        self._sql.execute("BEGIN")
        self._sql.execute(f"DROP TABLE IF EXISTS {_quoted(into)}")
        self._sql.execute(f"CREATE TABLE {_quoted(into)} ({columns})")
        self._sql.executemany(f"INSERT INTO {_quoted(into)} VALUES ({', '.join('?' * len(table.columns))})", table.rows)
        self._sql.execute("COMMIT")
        return self.content(into).label

    def derive(self, tool: str, into: str, sources: tuple[str, ...], word: str) -> str:
        names = [_quoted(name) for name in sources]
        columns = self.columns(sources[0]) or ()
        values: tuple = (word,) if tool in ("drop", "exclude") else ()
        if tool == "total":
            select = f"SELECT {_quoted(word)}, SUM(amount) AS amount FROM {names[0]} GROUP BY {_quoted(word)}"
        elif tool in _CHANGED:
            name, change = _CHANGED[tool]
            unit = {"convert": UNITS, "round": ROUNDING}.get(tool, {}).get(word, 0)
            new = f"amount_{word}" if tool == "round" else name
            parts = [f"{change.format(unit=unit)} AS {_quoted(new)}" if column == name else _quoted(column) for column in columns]
            select = f"SELECT {', '.join(parts)} FROM {names[0]}"
        else:
            select = _SQL[tool].format(a=names[0], b=names[-1], cols=", ".join(map(_quoted, columns)))
        self._sql.execute("BEGIN")
        # The new table may take the place of one that it is made from.
        self._sql.execute(f"CREATE TABLE _new AS {select}", values)
        self._sql.execute(f"DROP TABLE IF EXISTS {_quoted(into)}")
        self._sql.execute(f"ALTER TABLE _new RENAME TO {_quoted(into)}")
        self._sql.execute("COMMIT")
        return self.content(into).label

    def post(self, table: str) -> None:
        self._sql.execute("INSERT INTO _posted VALUES (?)", (table,))

    def posted(self) -> set[str]:
        return {name for name, in self._sql.execute("SELECT name FROM _posted")}

    def clear(self, keep: str, *, final: bool) -> None:
        old, trash = self._box.root / "old", self._own / "trash"
        for item in list(trash.iterdir()):
            os.replace(item, old / item.name)
        for name in self.names("old") or []:
            if name != keep and final:
                shutil.rmtree(old / name)
            elif name != keep:
                os.replace(old / name, trash / name)

    def trash(self) -> list[str]:
        return sorted(item.name for item in (self._own / "trash").iterdir())

    def record(self, files: tuple[str, ...], message: str) -> None:
        if len(self.log()) > 1:
            # A commit that replaces another starts from where that one started.
            self._git("update-ref", "HEAD", self._base)
            self._git("read-tree", self._base)
        self._git("add", "--", *files)
        self._git("commit", "-q", "--allow-empty", "-m", message)

    def log(self) -> list[str]:
        return self._git("log", "--reverse", "--format=%s").decode().splitlines()

    def head(self) -> dict[str, bytes]:
        names = self._git("ls-tree", "-r", "--name-only", "HEAD").decode().splitlines()
        answer = self._git("cat-file", "--batch", stdin="".join(f"HEAD:{name}\n" for name in names).encode())
        found = {}
        for name in names:
            line, _, rest = answer.partition(b"\n")
            size = int(line.split(b" ")[2])
            found[name], answer = rest[:size], rest[size + 1:]
        return found

    def post_mail(self, tool: str, line: str, *, final: bool) -> None:
        if final:
            with (self._own / "outbox.jsonl").open("a", encoding="utf-8", newline="\n") as outbox:
                outbox.write(line + "\n")
        else:
            (self._own / "held" / f"{tool}.json").write_text(line, encoding="utf-8")

    def mails(self) -> tuple[list[str], list[str]]:
        gone = (self._own / "outbox.jsonl").read_text(encoding="utf-8").splitlines()
        return gone, [path.read_text(encoding="utf-8") for path in sorted((self._own / "held").iterdir())]

    def close(self) -> None:
        """Close the database and remove the folder."""
        self._sql.close()
        self._box.close()


def _quoted(name: str) -> str:
    """A name for a statement; names were checked before, quotes keep key words apart from them."""
    return '"' + name.replace('"', '""') + '"'
