"""The office in memory: plain Python on values that nobody changes, with results kept for the next episode."""

from __future__ import annotations

from nbkit.envs.office.desk import Desk, house_rules
from nbkit.envs.office.jobs import ROUNDING, UNITS
from nbkit.envs.office.tables import Table
from nbkit.envs.office.world import World

__all__ = ["MemoryDesk"]

# Results kept per world before it starts afresh.
_KEPT = 3000


def _derived(tool: str, tables: tuple[Table, ...], word: str) -> Table:
    """The table that a tool makes from others."""
    table = tables[0]
    columns, rows = table.columns, table.rows
    at = {name: number for number, name in enumerate(columns)}
    if tool == "stack":
        return Table(columns, rows + tables[1].rows)
    if tool == "join":
        other, code = tables[1], tables[1].columns.index("code")
        found: dict[str, list[tuple]] = {}
        for row in other.rows:
            found.setdefault(row[code], []).append(row[:code] + row[code + 1:])
        names = columns + other.columns[:code] + other.columns[code + 1:]
        return Table(names, [row + more for row in rows for more in found.get(row[at["code"]], ())])
    if tool == "dedupe":
        return Table(columns, list(set(rows)))
    if tool == "drop":
        return Table(columns, [row for row in rows if row[at["mark"]] != word])
    if tool == "exclude":
        return Table(columns, [row for row in rows if row[at["key"]] != word])
    if tool == "total":
        sums: dict = {}
        for row in rows:
            sums[row[at[word]]] = sums.get(row[at[word]], 0) + row[at["amount"]]
        return Table((word, "amount"), list(sums.items()))
    if tool == "rank":
        order = sorted(rows, key=lambda row: (-row[at["amount"]], row[at["key"]], *row))
        return Table(("place", *columns), [(place, *row) for place, row in enumerate(order, 1)])
    if tool == "share":
        whole = sum(row[at["amount"]] for row in rows)
        return Table((*columns, "share"), [(*row, row[at["amount"]] * 1000 // whole if whole else 0) for row in rows])
    place = at["key" if tool == "tidy" else "amount"]
    if tool == "round":
        unit = ROUNDING[word]
        columns = (*columns[:place], f"amount_{word}", *columns[place + 1:])
        return Table(columns, [(*row[:place], (row[place] + unit // 2) // unit * unit, *row[place + 1:]) for row in rows])
    if tool == "convert":
        return Table(columns, [(*row[:place], row[place] * UNITS[word], *row[place + 1:]) for row in rows])
    return Table(columns, [(*row[:place], row[place].strip(" ").lower(), *row[place + 1:]) for row in rows])


class MemoryDesk(Desk):
    """A desk whose files and tables are values in dictionaries.

    A result is looked up by the tool, its word and the very tables it reads, so an episode costs as much as its look-ups.
    """

    def __init__(self, world: World, lasting: frozenset[str], reverify: int):
        super().__init__(world, lasting, reverify)
        self._files = {**world.files, "notes/rules.txt": house_rules(lasting)}
        self._tables: dict[str, Table] = {}
        self._posted: set[str] = set()
        self._trash: dict[str, bytes] = {}
        self._base = {"readme.txt": world.files["reports/readme.txt"]}
        self._head, self._log = self._base, ["start"]
        self._gone: list[str] = []
        self._held: dict[str, str] = {}

    def names(self, folder: str) -> list[str] | None:
        start, size = folder + "/", len(folder) + 1
        found = {name[size:].partition("/")[0] for name in self._files if name.startswith(start)}
        return sorted(found) if found else None

    def get(self, path: str) -> bytes | None:
        return self._files.get(path)

    def put(self, path: str, data: bytes) -> None:
        self._files[path] = data

    def table_names(self) -> list[str]:
        return sorted(self._tables)

    def columns(self, table: str) -> tuple[str, ...] | None:
        found = self._tables.get(table)
        return None if found is None else found.columns

    def content(self, table: str) -> Table:
        return self._tables[table]

    def size(self, table: str) -> tuple[int, int]:
        found = self._tables[table]
        return len(found.rows), found.peak

    def fill(self, into: str, table: Table) -> str:
        self._tables[into] = table
        return table.label

    def derive(self, tool: str, into: str, sources: tuple[str, ...], word: str) -> str:
        tables = tuple(self._tables[name] for name in sources)
        memo, key = self.world.memo, (tool, word, tables)
        made = memo.get(key)
        if made is None:
            if len(memo) > _KEPT:
                memo.clear()
            made = memo[key] = _derived(tool, tables, word)
        self._tables[into] = made
        return made.label

    def post(self, table: str) -> None:
        self._posted.add(table)

    def posted(self) -> set[str]:
        return self._posted

    def clear(self, keep: str, *, final: bool) -> None:
        self._files.update(self._trash)
        self._trash = {}
        for name in [name for name in self._files if name.startswith("old/") and not name.startswith(f"old/{keep}/")]:
            data = self._files.pop(name)
            if not final:
                self._trash[name] = data

    def trash(self) -> list[str]:
        return [name.split("/")[1] for name in self._trash]

    def record(self, files: tuple[str, ...], message: str) -> None:
        self._head = {**self._base, **{name: self._files[f"reports/{name}"] for name in files}}
        self._log = ["start", message]

    def log(self) -> list[str]:
        return self._log

    def head(self) -> dict[str, bytes]:
        return self._head

    def post_mail(self, tool: str, line: str, *, final: bool) -> None:
        if final:
            self._gone.append(line)
        else:
            self._held[tool] = line

    def mails(self) -> tuple[list[str], list[str]]:
        return self._gone, [self._held[tool] for tool in sorted(self._held)]

    def close(self) -> None:
        """Nothing to tidy away."""
