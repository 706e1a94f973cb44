"""The command line: exit status, what is printed, and that one broken notebook does not hide the others."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

import nbkit
from nbkit import __main__ as cli
from nbkit.__main__ import main
from nbkit.errors import RunError

RECORD = types.SimpleNamespace(seconds=1.25, peak_mb=321.0, cells=7, slowest_cell="x")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout with three notebooks, its own build folder, and stand-ins for what executes and builds."""
    root = tmp_path / "project"
    (root / "notebooks").mkdir(parents=True)
    for name in ("broken", "first", "last"):
        (root / "notebooks" / f"{name}.ipynb").write_text("{}", encoding="utf-8")
    (root / "README.md").write_text("readme", encoding="utf-8")
    (root / "pyproject.toml").write_text("", encoding="utf-8")
    monkeypatch.setenv("NBKIT_BUILD", str(root / "build"))
    monkeypatch.setattr(nbkit, "project_path", lambda *parts: root.joinpath(*parts))
    calls, repaired = [], []

    def execute(path, out, *, preset, timeout):
        calls.append((path.stem, preset, timeout))
        if path.stem == "broken" and not repaired:
            out.write_text("half", encoding="utf-8")
            raise RunError("cell measure", got="\x1b[31mZeroDivisionError\x1b[0m: division by zero")
        out.write_text("{}", encoding="utf-8")
        return RECORD

    def build(executed, out):
        calls.append(("site", sorted(path.stem for path in executed.glob("*.ipynb"))))
        out.mkdir(parents=True, exist_ok=True)
        (out / "index.html").write_text("", encoding="utf-8")

    def merge_readme(readme, **how):
        calls.append(("claims", how))
        return ["ams C1: partly, was reproduced"] if how.get("check") else []

    for name, members in {
        "nbkit.notebooks": {"execute": execute, "lint": lambda path: [f"{path.name}: too big"] if path.stem == "broken" else []},
        "nbkit.widgets.site": {"build": build}, "nbkit.claims": {"merge_readme": merge_readme},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return types.SimpleNamespace(root=root, calls=calls, repaired=repaired)


def test_run_goes_on_after_a_failure_and_fails(project, capsys):
    assert main(["run", "--preset", "smoke"]) == 1
    names = [call[0] for call in project.calls]
    assert names == ["broken", "first", "last", "claims", "site"]
    assert {call[1] for call in project.calls[:3]} == {"smoke"}
    # The site shows what could be executed.
    assert project.calls[-1] == ("site", ["first", "last"])
    out, err = capsys.readouterr()
    assert "✗ broken" in out and "✓ first" in out and "321" in out and "    7" in out
    # The cell's error is shown once, without terminal colours, and without our own stack.
    assert err.count("ZeroDivisionError: division by zero") == 1 and "\x1b" not in err and "Traceback" not in err
    assert "failed: broken" in err


def test_half_executed_copy_is_set_aside_until_the_notebook_works(project):
    executed = project.root / "build" / "executed"
    assert main(["run", "broken"]) == 1
    assert not (executed / "broken.ipynb").exists() and (executed / "failed" / "broken.ipynb").read_text() == "half"
    # `site` does not take it for done.
    assert main(["site"]) == 1 and project.calls[-4][0] == "broken"
    project.repaired.append(True)
    assert main(["site"]) == 0
    assert (executed / "broken.ipynb").is_file() and not (executed / "failed" / "broken.ipynb").exists()


def test_run_of_good_notebooks_succeeds(project, capsys):
    assert main(["run", "first", "last", "--timeout", "7"]) == 0
    assert project.calls[:2] == [("first", os.environ["NBKIT_PRESET"], 7.0), ("last", os.environ["NBKIT_PRESET"], 7.0)]
    assert (project.root / "build" / "site" / "index.html").is_file()


def test_run_without_site(project):
    assert main(["run", "first", "--no-site"]) == 0
    assert [call[0] for call in project.calls] == ["first", "claims"]


def test_run_shows_where_an_unexpected_error_came_from(project, monkeypatch, capsys):
    def execute(path, out, **how):
        raise KeyError("surprise")

    monkeypatch.setattr(sys.modules["nbkit.notebooks"], "execute", execute)
    assert main(["run", "first"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_run_keeps_one_thread_a_kernel(project, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen = []
    monkeypatch.setattr(sys.modules["nbkit.notebooks"], "execute", lambda *a, **k: seen.append(os.environ["OMP_NUM_THREADS"]) or RECORD)
    assert main(["run", "first"]) == 0
    assert seen == ["1"]


def test_unknown_notebook_and_preset(project, capsys, monkeypatch):
    assert main(["run", "nope"]) == 1
    assert "got nope, allowed broken, first, last" in capsys.readouterr().err
    monkeypatch.setenv("NBKIT_PRESET", "huge")
    assert main(["run", "first"]) == 1
    assert "smoke, demo, full" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--timeout", "0"])
    assert stopped.value.code == 2


def test_site_executes_only_what_is_missing_or_older(project):
    executed = project.root / "build" / "executed"
    executed.mkdir(parents=True)
    for name in ("broken", "first", "last"):
        (executed / f"{name}.ipynb").write_text("{}", encoding="utf-8")
    os.utime(executed / "last.ipynb", (1, 1))
    assert main(["site"]) == 0
    assert [call[0] for call in project.calls] == ["last", "site"]


def test_claims_check_fails_on_a_difference(project, capsys):
    assert main(["claims"]) == 0
    assert main(["claims", "--check"]) == 1
    assert "ams C1: partly, was reproduced" in capsys.readouterr().out
    assert main(["claims", "--refresh"]) == 0
    assert project.calls[-1] == ("claims", {"check": False, "refresh": True})


def test_lint_reports_style_and_notebooks(project, capsys, monkeypatch):
    monkeypatch.setattr(cli.subprocess, "run", lambda *a, **k: types.SimpleNamespace(returncode=0))
    assert main(["lint"]) == 1
    assert "broken.ipynb: too big" in capsys.readouterr().out
    (project.root / "notebooks" / "broken.ipynb").unlink()
    assert main(["lint"]) == 0
    monkeypatch.setattr(cli.subprocess, "run", lambda *a, **k: types.SimpleNamespace(returncode=1))
    assert main(["lint"]) == 1


def test_train_lists_and_refuses(capsys):
    assert main(["train"]) == 0
    assert "lookup-chain" in capsys.readouterr().out
    assert main(["train", "nope"]) == 1
    assert "lookup-chain" in capsys.readouterr().err


def test_interrupt_is_no_traceback(monkeypatch, capsys):
    from nbkit import recipes

    def stop(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(recipes, "train", stop)
    assert main(["train", "lookup-chain"]) == 130
    assert "what was finished is kept" in capsys.readouterr().err


def test_doctor_status(monkeypatch, capsys):
    assert main(["doctor"]) == 0
    assert "✓ python" in capsys.readouterr().out
    monkeypatch.setenv("NBKIT_PRESET", "huge")
    assert main(["doctor"]) == 1


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "nbkit", "train"], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "lookup-chain" in done.stdout
    wrong = subprocess.run([sys.executable, "-m", "nbkit", "nonsense"], check=False, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "invalid choice" in wrong.stderr


def test_code_passes_the_linter():
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "nbkit", "tests"]
    done = subprocess.run(command, cwd=nbkit.project_path(), check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
