"""The executor on a real process pool and a real local cluster: order, resuming, failing items and dying workers."""

import concurrent.futures
import functools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nbkit import parallel
from nbkit.errors import InputError, NbkitError, RunError

# Functions that worker processes import. An item is a dict so that it can carry the folder in which runs are counted.


def square(x):
    return x * x


def power(exponent, x):
    return x**exponent


def late_first(x):
    time.sleep(0.2 if x == 0 else 0)
    return x


def where(_):
    return os.getpid(), {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def picky(x):
    if x % 3 == 0:
        raise ValueError(f"no {x}, please")
    return x * x


def counted(item):
    """Square, noting the run in a file; dies like a process out of memory at the item with 'die', unless a file 'healed' is there."""
    folder = Path(item["folder"])
    if item.get("die") and not (folder / "healed").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    with open(folder / "runs", "a") as file:
        file.write(f"{item['n']}\n")
    return item["n"] ** 2


def ours(x):
    raise InputError("x", got=x, allowed="something else")


def runs(folder):
    path = Path(folder) / "runs"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def name(item):
    return item["n"]


# Order, executors, environment


@pytest.mark.parametrize("executor", ["serial", None])
def test_results_in_item_order(executor):
    assert parallel.map(late_first, range(5), executor=executor, progress=False) == [0, 1, 2, 3, 4]


def test_equals_the_plain_loop_on_every_executor(cluster):
    want = [square(x) for x in range(20)]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for executor in ("serial", threads, cluster.get_executor()):
            assert parallel.map(square, range(20), executor=executor, progress=False) == want
            assert parallel.map(functools.partial(power, 2), iter(range(20)), executor=executor, progress=False) == want
        assert threads.submit(square, 3).result() == 9  # a given executor stays open


def test_default_runs_in_other_processes_with_one_thread_each(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    before = dict(os.environ)
    found = parallel.map(where, range(4), workers=2, progress=False)
    assert os.getpid() not in {pid for pid, _ in found} and len({pid for pid, _ in found}) <= 2
    assert all(threads == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "3"} for _, threads in found)
    assert dict(os.environ) == before


def test_no_items():
    assert parallel.map(square, [], progress=False) == []
    assert parallel.map(square, [], executor="serial") == []


def outer():
    def inner(x):
        return x

    return inner


@pytest.mark.parametrize("fn", [lambda x: x, outer(), functools.partial(lambda y, x: x, 1)])
def test_functions_that_processes_cannot_import(fn):
    with pytest.raises(InputError, match="top level of a module.*executor='serial'"):
        parallel.map(fn, [1, 2], progress=False)
    assert parallel.map(fn, [1, 2], executor="serial", progress=False) == [1, 2]


def test_function_of_a_notebook_cell():
    # A kernel's __main__ has no file; neither has that of python -c.
    code = "from nbkit import parallel\ndef f(x): return x\ntry: parallel.map(f, [1])\nexcept ValueError as error: print(error)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "defined in a notebook cell" in out.stdout and out.stderr == ""


@pytest.mark.parametrize("options", [{"executor": "threads"}, {"executor": 3}, {"workers": 0}, {"workers": 2, "executor": "serial"}])
def test_bad_options(options):
    with pytest.raises(InputError):
        parallel.map(square, [1], progress=False, **options)


# Failing items


@pytest.mark.parametrize("executor", ["serial", None])
def test_others_finish_when_an_item_fails(executor):
    with pytest.raises(RunError) as caught:
        parallel.map(picky, range(1, 8), executor=executor, progress=False, desc="grid")
    error = caught.value
    assert error.results == [1, 4, None, 16, 25, None, 49]
    assert [(index, item, type(e)) for index, item, e in error.failures] == [(2, 3, ValueError), (5, 6, ValueError)]
    assert isinstance(error.__cause__, ValueError)
    for words in ("grid", "item 2 (3) raised ValueError: no 3, please", "item 5 (6)", "5 of 7 results kept in error.results", "resume="):
        assert words in str(error)


def test_errors_of_the_package_cross_the_process_border():
    with pytest.raises(RunError, match=r"item 0 \(4\) raised InputError: x: got 4") as caught:
        parallel.map(ours, [4], progress=False)
    assert isinstance(caught.value.failures[0][2], NbkitError)


def test_killed_worker_process_keeps_results_and_resumes(tmp_path):
    items = [{"n": n, "folder": str(tmp_path), "die": n == 3} for n in range(6)]
    path = tmp_path / "results.jsonl"
    with pytest.raises(RunError, match="a worker process died") as caught:
        parallel.map(counted, items, workers=1, key=name, resume=path, progress=False)
    error = caught.value
    assert error.results == [0, 1, 4, None, None, None] and isinstance(error.__cause__, concurrent.futures.BrokenExecutor)
    for words in ("item 3", f"3 of 6 results kept in {path}", "same resume=", "memory"):
        assert words in str(error)
    (tmp_path / "healed").touch()
    assert parallel.map(counted, items, workers=1, key=name, resume=path, progress=False) == [0, 1, 4, 9, 16, 25]
    assert sorted(runs(tmp_path)) == [0, 1, 2, 3, 4, 5]  # nothing ran twice


def test_pool_that_breaks_while_items_are_handed_over():
    class Fragile(concurrent.futures.ThreadPoolExecutor):
        left = 2

        def submit(self, *args):
            self.left -= 1
            if self.left < 0:
                raise concurrent.futures.BrokenExecutor("gone")
            return super().submit(*args)

    with Fragile(1) as pool, pytest.raises(RunError, match="a worker process died.*2 of 4 results kept") as caught:
        parallel.map(square, range(4), executor=pool, progress=False)
    assert caught.value.results == [0, 1, None, None]


# Resuming


def test_resume_skips_what_is_done(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    items = [{"n": n, "folder": str(tmp_path)} for n in range(6)]
    run = functools.partial(parallel.map, counted, key=name, resume=path, executor="serial", progress=False)
    assert run(items[:3]) == [0, 1, 4]
    assert run(items[::-1]) == [25, 16, 9, 4, 1, 0]
    assert run(items[2:4]) == [4, 9]
    assert runs(tmp_path) == [0, 1, 2, 5, 4, 3]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["fn"].endswith("test_parallel.counted") and all(set(line) == {"key", "result"} for line in lines[1:]) and len(lines) == 7


def test_failed_items_run_again_and_good_ones_do_not(tmp_path):
    path = tmp_path / "results.jsonl"
    for _ in range(2):
        with pytest.raises(RunError, match=r"2 of 3 results kept in .*results\.jsonl"):
            parallel.map(picky, [1, 2, 3], resume=path, executor="serial", progress=False)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_interrupted_last_line_is_computed_again(tmp_path, cut):
    path = tmp_path / "results.jsonl"
    parallel.map(square, range(4), resume=path, executor="serial", progress=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert parallel.map(square, range(4), resume=path, executor="serial", progress=False) == [0, 1, 4, 9]
    assert path.read_bytes() == whole


def test_header_cut_short_and_garbled_last_line(tmp_path):
    path = tmp_path / "results.jsonl"
    parallel.map(square, range(4), resume=path, executor="serial", progress=False)
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:whole.rindex(b"{")] + b'{"key": \x00\x00\n'):
        path.write_bytes(damaged)
        assert parallel.map(square, range(4), resume=path, executor="serial", progress=False) == [0, 1, 4, 9]
        assert path.read_bytes() == whole


def test_damage_elsewhere_is_reported_and_left_alone(tmp_path):
    path = tmp_path / "results.jsonl"
    parallel.map(square, range(4), resume=path, executor="serial", progress=False)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"{broken\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match="line 3 of"):
        parallel.map(square, range(4), resume=path, executor="serial", progress=False)
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("content", [b"my thesis", b"my thesis\n", b'{"a": 1}\n', b"one\ntwo"])
def test_a_file_that_is_not_ours_is_never_touched(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"results in .*notes\.txt"):
        parallel.map(square, range(4), resume=path, executor="serial", progress=False)
    assert path.read_bytes() == content


def test_another_function_key_or_argument_is_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    two = functools.partial(power, 2)
    parallel.map(two, range(3), resume=path, executor="serial", progress=False)
    for fn, key in ((square, None), (functools.partial(power, 3), None), (two, str)):
        with pytest.raises(InputError, match="made by"):
            parallel.map(fn, range(3), resume=path, key=key, executor="serial", progress=False)
    assert parallel.map(functools.partial(power, 2), range(4), resume=path, executor="serial", progress=False) == [0, 1, 4, 9]


def test_items_need_distinct_json_keys(tmp_path):
    path = tmp_path / "results.jsonl"
    with pytest.raises(InputError, match="two with the key of 1"):
        parallel.map(square, [1, 2, 1], resume=path, executor="serial", progress=False)
    with pytest.raises(InputError, match="key of <object"):
        parallel.map(square, [object()], resume=path, executor="serial", progress=False)
    assert not path.exists()
    assert parallel.map(square, [1, 2, 1], executor="serial", progress=False) == [1, 4, 1]


@dataclass(frozen=True)
class Setting:
    budget: int
    scorer: str


def rich(item):
    return {"score": np.float32(0.5), "kept": np.arange(2), "pair": (1, 2), "missing": math.nan, "of": item.scorer}


def test_results_are_the_same_fresh_and_read(tmp_path):
    path = tmp_path / "results.jsonl"
    items = [Setting(64, "tova"), Setting(128, "tova")]
    fresh = parallel.map(rich, items, resume=path, executor="serial", progress=False)
    read = parallel.map(rich, items, resume=path, executor="serial", progress=False)
    assert repr(fresh) == repr(read)
    assert fresh[0]["score"] == 0.5 and fresh[0]["kept"] == [0, 1] and fresh[0]["pair"] == [1, 2] and math.isnan(fresh[0]["missing"])


def test_result_without_json_form_stops_at_once(tmp_path):
    seen = []
    with pytest.raises(InputError, match=r"result of item 0.*JSON"):
        parallel.map(lambda x: seen.append(x) or {1, 2}, range(9), resume=tmp_path / "r.jsonl", executor="serial", progress=False)
    assert seen == [0]


def test_keyboard_interrupt_keeps_what_is_done(tmp_path):
    path = tmp_path / "results.jsonl"

    def stop_at_two(x):
        if x == 2 and not (tmp_path / "healed").exists():
            raise KeyboardInterrupt
        return x

    with pytest.raises(KeyboardInterrupt):
        parallel.map(stop_at_two, range(4), resume=path, executor="serial", progress=False)
    assert len(path.read_text().splitlines()) == 3
    (tmp_path / "healed").touch()
    assert parallel.map(stop_at_two, range(4), resume=path, executor="serial", progress=False) == [0, 1, 2, 3]


def test_interruption_cancels_what_has_not_started(tmp_path):
    started = []

    def work(x):
        started.append(x)
        time.sleep(0.05)
        return {x} if x == 0 else x  # no JSON form: map stops at once

    with concurrent.futures.ThreadPoolExecutor(1) as threads, pytest.raises(InputError):
        parallel.map(work, range(50), executor=threads, resume=tmp_path / "r.jsonl", progress=False)
    assert len(started) < 10


def test_killed_main_process_resumes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import os, signal, sys
        from nbkit import parallel
        def f(x):
            if x == 3 and len(sys.argv) < 2:
                os.kill(os.getpid(), signal.SIGKILL)
            print("run", x, flush=True)
            return x * 10
        print(parallel.map(f, range(5), executor="serial", resume="r.jsonl", progress=False))
    """))
    first = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert first.returncode == -signal.SIGKILL and first.stdout.split("\n")[:3] == ["run 0", "run 1", "run 2"]
    second = subprocess.run([sys.executable, str(script), "healed"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert second.stdout.split("\n")[:3] == ["run 3", "run 4", "[0, 10, 20, 30, 40]"]


# Progress


def test_bar_goes_to_stdout_only_for_work_that_lasts(capfd):
    parallel.map(square, range(3), executor="serial")
    assert capfd.readouterr() == ("", "")
    parallel.map(lambda x: time.sleep(0.6), range(4), executor="serial", desc="slow work")
    out, err = capfd.readouterr()
    assert "slow work" in out and "/4" in out and err == ""


# A cluster: two worker processes of dask.distributed on this machine


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("distributed", reason="dask.distributed is not installed (extra: cluster)")
    import dask
    from distributed import Client, LocalCluster

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None) as local,
        Client(local) as client,
    ):
        yield client


def test_cluster_uses_its_worker_processes(cluster):
    pids = {pid for pid, _ in parallel.map(where, range(8), executor=cluster.get_executor(), progress=False)}
    assert os.getpid() not in pids and 1 <= len(pids) <= 2


def test_cluster_accepts_inner_functions_and_reports_failing_items(cluster):
    assert parallel.map(lambda x: x + 1, range(4), executor=cluster.get_executor(), progress=False) == [1, 2, 3, 4]
    with pytest.raises(RunError, match=r"item 2 \(3\) raised ValueError: no 3, please") as caught:
        parallel.map(picky, range(1, 5), executor=cluster.get_executor(), progress=False)
    assert caught.value.results == [1, 4, None, 16]


def test_cluster_worker_dies_and_the_rest_resumes(cluster, tmp_path, monkeypatch):
    items = [{"n": n, "folder": str(tmp_path), "die": n == 3} for n in range(6)]
    path = tmp_path / "results.jsonl"
    with pytest.raises(RunError, match=r"a worker process died \(KilledWorker\)") as caught:
        parallel.map(counted, items, executor=cluster.get_executor(), key=name, resume=path, progress=False)
    assert caught.value.results[3] is None
    done = {n for n in range(6) if caught.value.results[n] is not None}
    (tmp_path / "healed").touch()
    # What is handed over, not what workers ran: dask may still be recomputing results that died with the worker.
    executor, sent = cluster.get_executor(), []
    submit = executor.submit
    monkeypatch.setattr(executor, "submit", lambda fn, item, **options: sent.append(item["n"]) or submit(fn, item, **options))
    assert parallel.map(counted, items, executor=executor, key=name, resume=path, progress=False) == [0, 1, 4, 9, 16, 25]
    assert 3 not in done and sent == sorted(set(range(6)) - done)
