"""The checks that every notebook of the project passes; the canaries run the same ones on notebooks that are wrong on purpose."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock
from sample_notebook import write

from nbkit.notebooks import MemoryWatch, Record, audit, environment, lint

# nbmake counts per cell; a cell that hangs must not take the whole run with it.
CELL_SECONDS = 120


def nbmake(source: Path, executed: Path, *, preset: str = "smoke", build: Path | None = None) -> tuple[Record, str]:
    """Run a copy of `source` at `executed` under nbmake; its cost and, when it failed, what was said."""
    executed.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, executed)
    env = environment(preset) | ({"NBKIT_BUILD": str(build)} if build else {})
    env.pop("PYTEST_XDIST_WORKER", None)
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [
        sys.executable, "-m", "pytest", "-p", "nbmake.pytest_plugin", "--nbmake", "--overwrite", "--nbmake-kernel=python3",
        f"--nbmake-timeout={CELL_SECONDS}", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(executed.parent), executed.name,
    ]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=env, cwd=executed.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        with MemoryWatch(run.pid) as watch:
            said, _ = run.communicate()
    seconds = time.perf_counter() - begin
    cells = sum(cell["cell_type"] == "code" for cell in json.loads(executed.read_text(encoding="utf-8"))["cells"])
    return Record(source.stem, round(seconds, 1), round(watch.peak_mb, 1), cells, preset=preset), "" if run.returncode == 0 else said


def check_notebook(source: Path, executed: Path, **options) -> list[str]:
    """Everything that is wrong with a notebook: the contract, the run, the outputs."""
    problems = [str(problem) for problem in lint(source)]
    _, said = nbmake(source, executed, **options)
    if said:
        problems.append("nbmake: " + re.sub(r"\x1b\[[0-9;]*m", "", said))
    return problems + [str(problem) for problem in audit(executed)]


def executed_sample(tmp_path_factory) -> Path:
    """The sample notebook, executed once for all workers of a test run."""
    worker = "PYTEST_XDIST_WORKER" in os.environ
    shared = (tmp_path_factory.getbasetemp().parent if worker else tmp_path_factory.getbasetemp()) / "executed-sample"
    shared.mkdir(exist_ok=True)
    executed = shared / "executed" / "sample.ipynb"
    with FileLock(shared / "lock"):
        if not (shared / "done").is_file():
            problems = check_notebook(write(shared / "sample.ipynb"), executed, build=shared / "build")
            assert problems == [], problems
            (shared / "done").touch()
    return executed
