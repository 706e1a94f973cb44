"""Every notebook keeps the contract, runs under nbmake on a copy, and comes out right; and the checks themselves notice what they should."""

import copy
import json
import os
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from filelock import FileLock
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from notebook_checks import executed_sample, nbmake
from sample_notebook import notebook, write

import nbkit
from nbkit.errors import InputError, RunError
from nbkit.notebooks import audit, execute, lint

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# The preset promises 45 s on two idle cores; here two workers share them.
LIMIT_SECONDS = 120
LIMIT_MB = 4096


def note(record) -> None:
    """Add a record to build/notebooks.json, whichever worker ran it."""
    path = nbkit.build_path("notebooks.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        known[record.notebook] = record.as_dict()
        path.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_the_contract(path):
    assert [str(problem) for problem in lint(path)] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_comes_out_right(path):
    before = path.read_bytes()
    executed = nbkit.build_path("executed", path.name)
    record, said = nbmake(path, executed)
    note(record)
    assert not said, said
    assert [str(problem) for problem in audit(executed)] == []
    assert path.read_bytes() == before
    print(f"{path.stem}: {record.seconds:.0f} s, peak {record.peak_mb:.0f} MB, {record.cells} cells")
    assert record.seconds <= LIMIT_SECONDS and record.peak_mb <= LIMIT_MB, record


# The checks notice each broken rule.


def broken(change) -> nbformat.NotebookNode:
    book = notebook()
    change(book)
    return book


def cell(book, name):
    return next(c for c in book.cells if c.id == name)


def code(source, name="figure"):
    return lambda book: cell(book, name).update(source=source)


def text(source):
    return lambda book: cell(book, "setup-text").update(source=source)


RULES = {
    "outputs": lambda b: cell(b, "setup").update(execution_count=3),
    "outputs, state": lambda b: b.metadata.update(widgets={}),
    "outputs, times": lambda b: cell(b, "setup").metadata.update(execution={}),
    "kernel": lambda b: b.metadata.kernelspec.update(name="conda-base"),
    "metadata": lambda b: b.metadata.update(execution={"timeout": 900}),
    "metadata, tag": lambda b: cell(b, "sweep").metadata.update(tags=["skip-execution"]),
    "metadata, allow": lambda b: b.metadata.update(execution={"allow_errors": True}),
    "id": lambda b: cell(b, "setup").update(id="1f0c2b9a"),
    "id, twice": lambda b: cell(b, "setup").update(id="draw"),
    "text before code": lambda b: cell(b, "setup-text").update(source="##"),
    "cell length": code("\n".join(f"a{i} = {i}" for i in range(26))),
    "definitions": code("def f():\n    pass\n\ndef g():\n    pass"),
    "install": code("%pip install numpy"),
    "install, shell": code("!uv pip install numpy"),
    "path": code("open('/home/me/data.json')"),
    "path, windows": code(r"open('C:\\data.json')"),
    "warnings": code("import warnings\nwarnings.simplefilter('ignore')"),
    "syntax": code("def f(:"),
    "number in text": text("The accuracy rises by 7.2 points."),
    "number in text, end": text("It reaches 0.93."),
    "size": lambda b: b.cells.append(new_markdown_cell("word " * 13_000, id="long")),
    "skeleton": code("'nothing'", "stamp"),
}


@pytest.mark.parametrize("name", RULES)
def test_lint_notices(name, tmp_path):
    path = tmp_path / "sample.ipynb"
    path.write_text(json.dumps(broken(RULES[name])))
    found = lint(path)
    assert {problem.rule for problem in found} == {name.split(",")[0]}, [str(problem) for problem in found]


@pytest.mark.parametrize("prose", [
    "Equation 3.1, section 2.4 and Table 1.2, Figures 4.1 and 4.2.", "Claim C1 says `+7.2` points.", "With $\\beta = 0.9$ it forgets.", "$$x = 0.5$$",
    "See [the page](https://example.org/1.5/x) of arXiv 2607.11942.", "Python 3.11, version 2.13 or v1.2.3.", "```\n0.5\n```\nNothing else here.",
    "About 12 points, 3 of 4 runs.",
])
def test_lint_accepts(prose, tmp_path):
    path = tmp_path / "sample.ipynb"
    nbformat.write(broken(text(prose)), path)
    assert lint(path) == []


def test_lint_refuses_what_is_no_notebook(tmp_path):
    (tmp_path / "a.ipynb").write_text("{")
    with pytest.raises(InputError, match="a.ipynb"):
        lint(tmp_path / "a.ipynb")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """Text of the executed sample, which passes everything."""
    return executed_sample(tmp_path_factory).read_text(encoding="utf-8")


def outputs(book, name):
    return next(c for c in book["cells"] if c["id"] == name)["outputs"]


def state(book):
    return book["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]


def plotly_of(book):
    return next(o for o in outputs(book, "panel") if "application/vnd.plotly.v1+json" in o.get("data", {}))


def picture_of(book):
    return next(o for o in outputs(book, "figure") if "image/png" in o.get("data", {}))


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "boom", "traceback": []}
BLANK = ("iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAAAAABX3VL4AAAAC0lEQVR4nGP4DwUADvwD/d2Bv1kAAAAASUVORK5CYII=")
AUDITS = {
    "error": lambda b: outputs(b, "setup").append(ERROR),
    "error, widget state": lambda b: state(b).update(x={"model_name": "OutputModel", "state": {"outputs": [ERROR]}}),
    "widget error": lambda b: next(m for m in state(b).values() if "indices" in m["state"])["state"].update(error="ValueError: boom"),
    "stderr": lambda b: outputs(b, "setup").append({"output_type": "stream", "name": "stderr", "text": ["x.py:1: UserWarning: careful\n"]}),
    "empty figure": lambda b: plotly_of(b)["data"]["application/vnd.plotly.v1+json"]["data"][0].update(y=[None, float("nan")]),
    "empty figure, no trace": lambda b: plotly_of(b)["data"]["application/vnd.plotly.v1+json"].update(data=[]),
    "empty figure, blank": lambda b: picture_of(b)["data"].update({"image/png": BLANK}),
    "alt": lambda b: picture_of(b)["metadata"].pop("nbkit"),
    "claims": lambda b: outputs(b, "claims").clear(),
    "stamp": lambda b: outputs(b, "stamp").clear(),
    "sweep": lambda b: outputs(b, "sweep").clear(),
    "not run": lambda b: next(c for c in b["cells"] if c["id"] == "stamp").update(execution_count=None),
}


@pytest.mark.parametrize("name", AUDITS)
def test_audit_notices(name, sample, tmp_path):
    book = json.loads(sample)
    AUDITS[name](book)
    path = tmp_path / "sample.ipynb"
    path.write_text(json.dumps(book))
    assert {problem.rule for problem in audit(path)} == {name.split(",")[0]}


def test_audit_sees_an_unswept_panel_in_the_widget_alone(sample, tmp_path):
    book = json.loads(sample)
    outputs(book, "sweep").clear()
    outputs(book, "panel")[:] = [o for o in outputs(book, "panel") if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    (tmp_path / "sample.ipynb").write_text(json.dumps(book))
    assert ["panel 'Damped wave'" in problem.text for problem in audit(tmp_path / "sample.ipynb")] == [True]


def test_audit_lets_progress_bars_and_the_expected_exception_pass(sample, tmp_path):
    book = copy.deepcopy(json.loads(sample))
    bar = "\r 40%|####      | 4/10 [00:01<00:01,  3.1it/s]\r100%|##########| 10/10 [00:02<00:00, 3.0it/s]\n"
    outputs(book, "setup").append({"output_type": "stream", "name": "stderr", "text": bar})
    outputs(book, "stamp").append(ERROR)
    next(c for c in book["cells"] if c["id"] == "stamp")["metadata"]["tags"] = ["raises-exception"]
    (tmp_path / "sample.ipynb").write_text(json.dumps(book))
    assert audit(tmp_path / "sample.ipynb") == []


# execute().


def small(path, *sources):
    cells = [new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources)]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": {"name": "no-such-kernel", "display_name": "x"}}), path)
    return path


def test_execute_uses_this_interpreter_and_measures_the_whole_process_tree(tmp_path):
    report = ("import json, os, sys\n"
              "print(json.dumps([sys.executable] + [os.environ[name] for name in ('OMP_NUM_THREADS', 'NBKIT_EXPORT', 'NBKIT_PRESET')]))")
    child = ("import subprocess\nheavy = 'import time; x = bytearray(300 << 20); x[::4096] = b\"1\" * len(x[::4096]); time.sleep(1)'\n"
             "subprocess.run([sys.executable, '-c', heavy], check=True)")
    path = small(tmp_path / "a.ipynb", report, child)
    before = path.read_bytes()
    record = execute(path, tmp_path / "out" / "a.ipynb", preset="smoke", timeout=60)
    assert path.read_bytes() == before
    printed = json.loads(outputs(json.loads((tmp_path / "out" / "a.ipynb").read_text()), "cell-0")[0]["text"][0])
    assert printed == [sys.executable, "1", "1", "smoke"]
    assert record.peak_mb > 300 and record.cells == 2 and record.slowest_cell == "cell-1" and 1 <= record.slowest_seconds <= record.seconds


def test_execute_kills_a_notebook_that_hangs_with_its_children(tmp_path):
    hang = ("import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
            "open('child', 'w').write(str(child.pid))\ntime.sleep(300)")
    begin = time.perf_counter()
    with pytest.raises(RunError, match=r"h.ipynb: got still running in cell 'cell-1' after 6 s"):
        execute(small(tmp_path / "h.ipynb", "1", hang), tmp_path / "out" / "h.ipynb", timeout=6)
    assert time.perf_counter() - begin < 60
    child = int((tmp_path / "out" / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_execute_raises_and_keeps_the_copy_when_a_cell_fails(tmp_path):
    path = small(tmp_path / "f.ipynb", "print('before')", "1 / 0", "print('after')")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(path, tmp_path / "out" / "f.ipynb", timeout=60)
    book = json.loads((tmp_path / "out" / "f.ipynb").read_text())
    assert outputs(book, "cell-0") and outputs(book, "cell-1")[0]["ename"] == "ZeroDivisionError" and not outputs(book, "cell-2")
    with pytest.raises(InputError, match="another file"):
        execute(path, path)


def test_execute_leaves_the_environment_alone(tmp_path):
    before = dict(os.environ)
    execute(small(tmp_path / "e.ipynb", "1"), tmp_path / "out" / "e.ipynb", timeout=60)
    assert dict(os.environ) == before


def test_the_sample_keeps_the_contract(tmp_path):
    assert lint(write(tmp_path / "sample.ipynb")) == []
