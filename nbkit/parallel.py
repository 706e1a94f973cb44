"""Map a function over items with any executor, a progress bar, and results that survive an interruption.

There is no scheduler here: an executor is whatever has ``submit`` and returns ``concurrent.futures.Future``, a process pool by default,
``dask.distributed.Client(...).get_executor()`` for a cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from nbkit.errors import InputError, RunError

__all__ = ["map"]

FORMAT = 1

# One thread a worker process: several pools of threads on the same cores are slower than none.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")


def map(
    fn: Callable[[Any], Any], items: Iterable[Any], *, executor: Executor | str | None = None, key: Callable[[Any], Any] | None = None,
    resume: str | Path | None = None, desc: str = "", workers: int | None = None, progress: bool = True,
) -> list[Any]:
    """``[fn(item) for item in items]`` computed side by side, in the order of the items.

    executor: None (processes on this machine, ``workers`` of them, one thread each), ``"serial"`` (here, in this process), or any object with the
    interface of ``concurrent.futures.Executor``, which stays open. fn must be importable by worker processes: a function of a module, not of a cell.
    resume: a JSON-lines file that receives every result as it finishes; a later call with the same fn and key computes only what is missing.
    Results then are JSON values, whether fresh or read. key: item -> the JSON value that identifies it (default: the item itself).
    Delete the file when fn changes what it computes: only its name is compared.
    Raises: InputError for a function that cannot be sent to a process, an item without a key, a file made by another fn or key, or (at once) a
    result that JSON cannot hold; RunError when an item failed or a worker process died, after all others finished: ``error.results`` then has
    None in the places of ``error.failures``, a list of (index, item, exception).

    >>> map(abs, [-1, 2, -3], executor="serial", progress=False)
    [1, 2, 3]
    """
    items = list(items)
    store = _Store(resume, fn, items, key) if resume is not None else None
    results: list[Any] = [None] * len(items)
    failures: list[tuple[int, Any, BaseException]] = []
    waiting = list(range(len(items)))
    if store is not None:
        waiting = [i for i in waiting if store.keys[i] not in store.done]
        results = [store.done.get(name) for name in store.keys]
    # closing() ends the pool at once when this loop is left by an exception, not when the traceback is collected.
    with (
        _appending(store), _bar(len(items), len(items) - len(waiting), desc, progress) as advance,
        closing(_outcomes(fn, items, waiting, executor, workers)) as outcomes,
    ):
        for index, outcome in outcomes:
            try:
                result = outcome()
            except Exception as error:  # the item's own error, whatever it is: reported below, when the others are done
                failures.append((index, items[index], error))
            else:
                results[index] = store.add(index, result) if store is not None else result
            advance()
    if failures:
        raise _failed(failures, items, results, store, desc or _innermost(fn)[1])
    return results


# Running.


def _outcomes(
    fn: Callable[[Any], Any], items: list[Any], waiting: list[int], executor: Any, workers: int | None,
) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield (index, call that returns the result or raises) as items finish."""
    if workers is not None and (executor is not None or workers < 1):
        raise InputError("workers", got=workers, allowed=">= 1, and only with the default executor")
    if executor == "serial":
        for index in waiting:
            yield index, functools.partial(fn, items[index])
    elif executor is None:
        _must_be_importable(fn)
        if waiting:
            with _one_thread(), ProcessPoolExecutor(
                min(workers or os.cpu_count() or 1, len(waiting)), mp_context=multiprocessing.get_context("spawn"),
            ) as pool:
                yield from _submitted(pool, fn, items, waiting)
    elif callable(getattr(executor, "submit", None)):
        yield from _submitted(executor, fn, items, waiting)
    else:
        allowed = "None, 'serial' or an object with submit(fn, item)"
        raise InputError("executor", got=executor, allowed=allowed, hint="Client(...).get_executor() for dask")


def _submitted(pool: Executor, fn: Callable[[Any], Any], items: list[Any], waiting: list[int]) -> Iterator[tuple[int, Callable[[], Any]]]:
    # dask takes equal calls for one task and would answer a second try with the remembered failure of the first.
    options = {"pure": False} if type(pool).__module__.startswith("distributed.") else {}
    futures: dict[Future[Any], int] = {}
    broken: list[tuple[int, BaseException]] = []
    try:
        for index in waiting:
            try:
                futures[pool.submit(fn, items[index], **options)] = index
            except BrokenExecutor as error:
                # A worker can die while later items are still being handed over; those before may have finished.
                broken.append((index, error))
        for future in as_completed(futures):
            yield futures[future], future.result
        for index, error in broken:
            yield index, functools.partial(_raise, error)
    finally:
        # After an interruption nothing new may start; finished futures ignore this.
        for future in futures:
            future.cancel()


def _raise(error: BaseException) -> None:
    raise error


def _must_be_importable(fn: Callable[[Any], Any]) -> None:
    """A spawned process finds a function by module and name; say so before ten of them die of it."""
    module, name = _innermost(fn)
    in_cell = module == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    if "<lambda>" in name or "<locals>" in name or in_cell:
        raise InputError(
            f"function {name!r}", got="defined in a notebook cell" if in_cell else "a lambda or an inner function",
            allowed="a function at the top level of a module, because worker processes import it",
            hint="move it to a module or pass executor='serial'",
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit the threads of processes started inside. Set here and not in the workers, where NumPy may be loaded before any code of ours."""
    added = [name for name in _THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _bar(total: int, done: int, desc: str, progress: bool) -> Iterator[Callable[[], Any]]:
    """A bar with the time left, on stdout (stderr of a notebook means trouble), and only for work that lasts."""
    if not progress or done == total:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, initial=done, desc=desc or None, file=sys.stdout, delay=1.0, mininterval=0.5, leave=False) as bar:
        yield bar.update


# Failing.


def _failed(failures: list[tuple[int, Any, BaseException]], items: list[Any], results: list[Any], store: _Store | None, what: str) -> RunError:
    failures.sort(key=lambda failure: failure[0])
    dead = [failure for failure in failures if _is_death(failure[2])]
    own = [failure for failure in failures if not _is_death(failure[2])]
    kept = f"{len(items) - len(failures)} of {len(items)} results kept" + (f" in {store.path}" if store is not None else " in error.results")
    again = "call again with the same resume= for the rest"
    if store is None:
        again = "pass resume='results.jsonl' so that a second call computes only the rest"
    told = [f"item {index} ({_brief(item)}) raised {type(error).__name__}: {_brief(error)}" for index, item, error in own[:3]]
    if len(own) > 3:
        told.append(f"{len(own) - 3} more items failed")
    if dead:
        error = dead[0][2]
        unfinished = ", ".join(f"{index} ({_brief(item)})" for index, item, _ in dead[:3]) + (", ..." if len(dead) > 3 else "")
        told.append(f"a worker process died ({type(error).__name__}); without a result: item {unfinished}")
        again += "; fewer workers if memory ran out; a script needs if __name__ == '__main__'"
    failure = RunError(f"parallel.map of {what}", got=f"{'; '.join(told)}; {kept}", hint=again)
    failure.results = results
    failure.failures = failures
    failure.__cause__ = (own or dead)[0][2]
    return failure


def _is_death(error: BaseException) -> bool:
    # dask.distributed has a class of its own for it; its name is enough and spares the import.
    return isinstance(error, (BrokenExecutor, CancelledError)) or type(error).__name__ in ("KilledWorker", "FutureCancelledError")


def _brief(thing: Any) -> str:
    text = " ".join((str(thing) if isinstance(thing, BaseException) else repr(thing)).split())
    return text if len(text) <= 160 else text[:157] + "..."


# Resuming.


class _Store:
    """The results on disk: a header line with the function and the key, then one line for every finished item."""

    def __init__(self, path: str | Path, fn: Callable[[Any], Any], items: list[Any], key: Callable[[Any], Any] | None):
        self.path = Path(path)
        self.keys = [_hash(item, key) for item in items]
        if len(set(self.keys)) < len(self.keys):
            seen: set[str] = set()
            twice = next(item for item, name in zip(items, self.keys) if name in seen or seen.add(name))
            hint = "key=lambda item: what tells items apart"
            raise InputError("items", got=f"two with the key of {_brief(twice)}", allowed="one key an item", hint=hint)
        self.header = {"nbkit.parallel": FORMAT, "fn": _name(fn), "key": _name(key) if key is not None else "item"}
        self.done: dict[str, Any] = {}
        self._sound = 0
        self._file: Any = None
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        whole, fragment = lines[:-1], lines[-1]
        for number, line in enumerate(whole):
            record = _parse(line)
            if number == 0 and record != self.header:
                hint = "another file for another function or key, or delete this one"
                raise InputError(f"results in {self.path}", got=f"made by {_brief(record or line)}", allowed=str(self.header), hint=hint)
            if number > 0 and (record is None or not {"key", "result"} <= record.keys()):
                if number == len(whole) - 1 and not fragment:
                    return  # damaged by an interruption: its item is computed again, and open() cuts the line off
                hint = "delete the line, or the file to compute everything again"
                raise InputError(f"line {number + 1} of {self.path}", got=_brief(line), allowed="a record with key and result", hint=hint)
            if number > 0:
                self.done[record["key"]] = record["result"]
            self._sound += len(line) + 1
        # A fragment after the last line end is an interrupted write; but never cut a file that does not even begin like one of ours.
        if not whole and not json.dumps(self.header, ensure_ascii=False).encode("utf-8").startswith(fragment):
            raise InputError(f"results in {self.path}", got=_brief(fragment), allowed="a file made by parallel.map", hint="another path for resume=")

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")
        self._file.truncate(self._sound)
        if self._sound == 0:
            self._write(self.header)

    def close(self) -> None:
        self._file.close()

    def add(self, index: int, result: Any) -> Any:
        """Write one result and return it as a later call will read it."""
        text = _dump(result, f"result of item {index}")
        self._write({"key": self.keys[index]}, text)
        return json.loads(text)

    def _write(self, record: dict[str, Any], result: str | None = None) -> None:
        line = json.dumps(record, ensure_ascii=False)
        if result is not None:
            line = f'{line[:-1]}, "result": {result}}}'
        self._file.write(line.encode("utf-8") + b"\n")
        self._file.flush()


@contextmanager
def _appending(store: _Store | None) -> Iterator[None]:
    if store is None:
        yield
        return
    store.open()
    try:
        yield
    finally:
        store.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _hash(item: Any, key: Callable[[Any], Any] | None) -> str:
    value = key(item) if key is not None else item
    text = _dump(value, f"key of {_brief(item)}", sort=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _dump(value: Any, what: str, sort: bool = False) -> str:
    try:
        return json.dumps(value, default=_plain, sort_keys=sort, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        hint = "key=lambda item: item['name']" if sort else "return numbers, strings, lists and dicts, and save large arrays to a file"
        raise InputError(what, got=f"{type(value).__name__}: {error}", allowed="a value that JSON can hold", hint=hint) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "tolist", None)):  # numpy and torch, without importing either
        return value.tolist()
    raise TypeError(f"no JSON form of {type(value).__name__}")


def _innermost(fn: Callable[..., Any]) -> tuple[str, str]:
    """Module and name of the function inside any partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__module__", None) or type(fn).__module__, getattr(fn, "__qualname__", type(fn).__qualname__)


def _name(fn: Callable[..., Any]) -> str:
    """Where a function lives; a partial carries its arguments, because they change what is computed."""
    if isinstance(fn, functools.partial):
        return f"{_name(fn.func)}({_dump([list(fn.args), fn.keywords], 'arguments of the partial function', sort=True)})"
    return ".".join(_innermost(fn))
