"""Which keys every row of every head reads: one description, its mask, its count of pairs, one density."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nbkit.errors import InputError

__all__ = ["Pattern", "causal_pairs", "mix"]


def causal_pairs(rows: int, keys: int) -> int:
    """Count the (row, key) pairs of one dense causal head; ``rows`` are the last rows over ``keys`` keys.

    >>> causal_pairs(4, 4), causal_pairs(2, 4)
    (10, 7)
    """
    if not 0 <= rows <= keys:
        raise InputError("rows", got=rows, allowed=f"0..{keys}, the number of keys")
    return rows * keys - rows * (rows - 1) // 2


def _per_head(name: str, value: Any, heads: int, least: int) -> int | tuple[int, ...]:
    """Return one int, or one int a head where they differ."""
    if isinstance(value, Tensor):
        value = value.tolist()
    values = tuple(value) if isinstance(value, Sequence) else (value,) * heads
    if len(values) != heads or any(isinstance(v, bool) or int(v) != v or v < least for v in values):
        raise InputError(name, got=value, allowed=f"an int >= {least}, or {heads} of them, one a head")
    values = tuple(int(v) for v in values)
    return values[0] if len(set(values)) == 1 else values


def _index_table(name: str, value: Tensor | None, heads: int) -> Tensor | None:
    """Check an index table (heads, slots) with -1 for unused slots and give it one line a head."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[0] not in (1, heads) or value.dtype != torch.int64:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(name, got=got, allowed=f"int64 ({heads}, slots), -1 for an unused slot")
    if value.numel() and int(value.min()) < -1:
        raise InputError(name, got=int(value.min()), allowed=">= -1")
    return value.expand(heads, -1) if value.shape[1] else None


def _present(table: Tensor, size: int) -> Tensor:
    """Turn an index table (heads, slots) into flags (heads, size); slots of -1 and beyond ``size`` are left out."""
    flags = torch.zeros(table.shape[0], size + 1, dtype=torch.bool, device=table.device)
    flags.scatter_(1, torch.where((table < 0) | (table >= size), size, table), True)
    return flags[:, :size]


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """The keys that each row of each head of one layer reads.

    Row i of n stands at key p = T - n + i. It reads key j iff j <= p and (p - j < window, or j < sinks, or j in ``columns``, or
    p - j in ``slashes``, or ``blocks[h, i // block, j // block]``, or i >= n - dense_rows): the rule of
    :func:`nbkit.kernels.sparse_attention`.

    heads: query heads. window (>= 1), sinks, dense_rows: an int, or one a head. columns, slashes: int64 (heads, slots), -1 unused.
    blocks: bool (heads, ceil(n / block), ceil(T / block)). probe_pairs: scores computed in order to find the pattern, summed over
    the heads. info: what the rule wants to report (``dense=True`` where a rule fell back to dense attention).

    >>> pattern = Pattern(2, window=2, sinks=1)
    >>> pattern.mask(4)[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    >>> pattern.pairs(4).tolist(), pattern.density(4)
    ([9, 9], 0.9)

    Raises: InputError for a window below 1 (a row would read nothing), negative sizes, tables of another shape or type.
    Source: density is (pairs read + pairs probed) / (N (N + 1) / 2), one denominator for every rule; each published code has its own.
    """

    heads: int
    window: int | tuple[int, ...] = 1
    sinks: int | tuple[int, ...] = 0
    dense_rows: int | tuple[int, ...] = 0
    columns: Tensor | None = None
    slashes: Tensor | None = None
    blocks: Tensor | None = None
    block: int = 64
    probe_pairs: float = 0.0
    info: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads < 1:
            raise InputError("heads", got=self.heads, allowed="an int >= 1")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise InputError("block", got=self.block, allowed="an int >= 1")
        for name, least in (("window", 1), ("sinks", 0), ("dense_rows", 0)):
            object.__setattr__(self, name, _per_head(name, getattr(self, name), self.heads, least))
        for name in ("columns", "slashes"):
            object.__setattr__(self, name, _index_table(name, getattr(self, name), self.heads))
        blocks = self.blocks
        if blocks is not None:
            if not isinstance(blocks, Tensor) or blocks.dim() != 3 or blocks.shape[0] not in (1, self.heads) or blocks.dtype != torch.bool:
                got = tuple(blocks.shape) if isinstance(blocks, Tensor) else type(blocks).__name__
                raise InputError("blocks", got=got, allowed=f"bool ({self.heads}, query blocks, key blocks)")
            object.__setattr__(self, "blocks", blocks.expand(self.heads, -1, -1))
        if not self.probe_pairs >= 0:
            raise InputError("probe_pairs", got=self.probe_pairs, allowed=">= 0")

    @property
    def device(self) -> torch.device:
        """Where the tables live (the CPU when there are none)."""
        table = next((t for t in (self.columns, self.slashes, self.blocks) if t is not None), None)
        return torch.device("cpu") if table is None else table.device

    def each(self, name: str) -> tuple[int, ...]:
        """Return ``window``, ``sinks`` or ``dense_rows`` as one int a head.

        >>> Pattern(3, window=4).each("window")
        (4, 4, 4)
        """
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * self.heads

    def select(self, heads: Sequence[int]) -> Pattern:
        """Return the pattern of the given heads alone; tables that none of them uses are dropped and the probe is not charged."""
        heads = list(heads)
        pick = {name: tuple(self.each(name)[h] for h in heads) for name in ("window", "sinks", "dense_rows")}
        for name in ("columns", "slashes", "blocks"):
            table = getattr(self, name)
            table = None if table is None else table[heads]
            if table is not None and name != "blocks":
                # Slots that every chosen head leaves unused would still cost the kernel a gather.
                table = table[:, (table >= 0).any(0)]
            pick[name] = None if table is None or not (table.any() if name == "blocks" else table.numel()) else table
        return Pattern(len(heads), **pick, block=self.block)

    def groups(self, keys: int | None = None) -> Iterator[tuple[list[int], Pattern]]:
        """Yield (heads, their pattern) for sets of heads with the same sizes and kinds of table, so that one kernel call serves each.

        With ``keys`` given, heads whose window covers all of them form one dense group.
        """
        used = {}
        for name in ("columns", "slashes", "blocks"):
            table = getattr(self, name)
            flags = None if table is None else (table.flatten(1) if name == "blocks" else table >= 0).any(1)
            used[name] = [False] * self.heads if flags is None else flags.tolist()
        sets: dict[tuple, list[int]] = {}
        for head, sizes in enumerate(zip(self.each("window"), self.each("sinks"), self.each("dense_rows"), *used.values(), strict=True)):
            dense = keys is not None and max(sizes[:2]) >= keys
            sets.setdefault(("dense",) if dense else sizes, []).append(head)
        for kind, heads in sets.items():
            yield heads, (Pattern(len(heads), window=keys) if kind == ("dense",) else self.select(heads))

    def mask(self, rows: int, keys: int | None = None, *, only: Tensor | None = None) -> Tensor:
        """Return bool (heads, rows, keys), True where a row reads a key; ``keys`` defaults to ``rows``, ``only`` picks some rows.

        >>> Pattern(1, window=2).mask(100, only=torch.tensor([0, 99])).sum(2).tolist()
        [[1, 2]]
        """
        keys = rows if keys is None else keys
        causal_pairs(rows, keys)
        device = self.device
        row = (torch.arange(rows, device=device) if only is None else only.to(device))[:, None]
        key = torch.arange(keys, device=device)
        distance = row + (keys - rows) - key
        window, sinks, dense = (torch.tensor(self.each(name), device=device)[:, None, None] for name in ("window", "sinks", "dense_rows"))
        seen = (distance < window) | (key < sinks) | (row >= rows - dense)
        if self.columns is not None:
            seen |= _present(self.columns, keys)[:, None, :]
        if self.slashes is not None:
            seen |= _present(self.slashes, keys)[:, distance.clamp(min=0)]
        if self.blocks is not None:
            self._check_blocks(rows, keys)
            seen |= self.blocks[:, row // self.block, key // self.block]
        return seen & (distance >= 0)

    def _check_blocks(self, rows: int, keys: int) -> None:
        need = (-(-rows // self.block), -(-keys // self.block))
        if tuple(self.blocks.shape[1:]) != need:
            raise InputError("blocks", got=tuple(self.blocks.shape), allowed=f"({self.heads}, {need[0]}, {need[1]}) for {rows} rows over {keys} keys")

    def pairs(self, rows: int, keys: int | None = None) -> Tensor:
        """Count the pairs that each head reads, int64 (heads,), without building a mask unless a head has slashes and blocks at once."""
        keys = rows if keys is None else keys
        causal_pairs(rows, keys)
        counts = torch.zeros(self.heads, dtype=torch.int64)
        for heads, part in self.groups():
            if part.slashes is not None and part.blocks is not None:
                count = sum(part.mask(rows, keys, only=chunk).sum((1, 2)) for chunk in torch.arange(rows).split(128))
            else:
                count = part._count(rows, keys)
            counts[heads] = count.cpu()
        return counts

    def _count(self, rows: int, keys: int) -> Tensor:
        """Count the pairs of heads with equal sizes: window first, then columns, slashes and blocks outside what is counted already."""
        device, window, heads = self.device, self.window, self.heads
        sparse = max(rows - self.dense_rows, 0)  # rows that follow the pattern; the rest are dense
        first = keys - rows
        place = torch.arange(first, first + sparse, device=device)
        total = causal_pairs(rows, keys) - causal_pairs(sparse, first + sparse) + (place + 1).clamp(max=window).sum()
        total = total.expand(heads).clone()
        columns = torch.zeros(1, keys, dtype=torch.bool, device=device) if self.columns is None else _present(self.columns, keys).clone()
        columns[:, : self.sinks] = True
        # before[:, x] = columns at 0..x-1, so a row at p reads before[:, p - window + 1] columns outside its window.
        before = torch.nn.functional.pad(columns.long().cumsum(1), (1, 0))
        outside = (place - window + 1).clamp(min=0)
        total += before[:, outside].sum(1)
        if self.slashes is not None:
            far = _present(self.slashes, keys)
            far[:, :window] = False
            upto = torch.nn.functional.pad(far.long().cumsum(1), (1, 0))
            total += upto[:, place + 1].sum(1)
            # A column c and a slash s meet in the row p = c + s: such a pair was counted twice.
            column = torch.arange(keys, device=device)
            meet = upto[:, (first + sparse - column).clamp(0, keys)] - upto[:, (first - column).clamp(0, keys)]
            total -= (meet * columns).sum(1)
        if self.blocks is not None:
            self._check_blocks(rows, keys)
            edges = torch.arange(self.blocks.shape[2] + 1, device=device) * self.block
            # Keys of each key block that lie outside the window of the row and are no columns: (heads, rows, key blocks).
            reach = torch.minimum(edges.clamp(max=keys), outside[:, None])
            fresh = (reach - before[:, reach]).diff(dim=-1)
            chosen = self.blocks.repeat_interleave(self.block, 1)[:, :sparse]
            total += (fresh * chosen).sum((1, 2))
        return total

    def density(self, rows: int, keys: int | None = None, *, probe: bool = True) -> float:
        """Return the share of the dense causal pairs that is computed, the probe included unless ``probe=False``."""
        keys = rows if keys is None else keys
        spent = float(self.pairs(rows, keys).sum()) + (self.probe_pairs if probe else 0.0)
        return spent / (self.heads * causal_pairs(rows, keys))


def mix(active: Tensor | Sequence[bool], yes: Pattern, no: Pattern) -> Pattern:
    """Take the active heads from one pattern and the others from another; both probes are charged.

    >>> mix([True, False], Pattern(2, window=8), Pattern(2, window=1)).window
    (8, 1)
    """
    flags = [bool(a) for a in (active.tolist() if isinstance(active, Tensor) else active)]
    if not len(flags) == yes.heads == no.heads:
        raise InputError("active", got=f"{len(flags)} flags for patterns of {yes.heads} and {no.heads} heads", allowed="the same number")
    if yes.blocks is not None and no.blocks is not None and yes.block != no.block:
        raise InputError("block", got=(yes.block, no.block), allowed="one block size for both patterns")
    device = yes.device if yes.device.type != "cpu" else no.device
    chosen = torch.tensor(flags, device=device)
    merged: dict[str, Any] = {}
    for name in ("window", "sinks", "dense_rows"):
        merged[name] = tuple(a if f else b for f, a, b in zip(flags, yes.each(name), no.each(name), strict=True))
    for name in ("columns", "slashes"):
        a, b = getattr(yes, name), getattr(no, name)
        if a is None and b is None:
            continue
        width = max(t.shape[1] for t in (a, b) if t is not None)
        table = torch.full((len(flags), width), -1, dtype=torch.int64, device=device)
        for source, where in ((a, chosen), (b, ~chosen)):
            if source is not None:
                table[:, : source.shape[1]][where] = source[where]
        merged[name] = table
    a, b = yes.blocks, no.blocks
    if a is not None or b is not None:
        shape = a if a is not None else b
        a, b = (torch.zeros_like(shape) if t is None else t for t in (a, b))
        merged["blocks"] = torch.where(chosen[:, None, None], a, b)
        merged["block"] = yes.block if yes.blocks is not None else no.block
    return Pattern(len(flags), **merged, probe_pairs=yes.probe_pairs + no.probe_pairs, info=no.info | yes.info)
