"""Each of these is wrong on purpose, and the checks that the project's own notebooks pass must turn red on it.

The panel canary also shows the hole it guards: the notebook itself runs green, because widgets swallow their errors.
"""

import pytest
from notebook_checks import check_notebook, nbmake
from sample_notebook import CELLS, write
from test_house import unsafe

from nbkit.notebooks import audit, lint

SOURCES = dict(CELLS)
# Wrong only when a box is unticked: the first picture and the static figure are fine.
BREAK = "(result):\n    if not len(result['peaks']):\n        raise ValueError('broken callback')\n"
BROKEN_DRAW = SOURCES["draw"].replace("(result):\n", BREAK, 1)
SWALLOWED = "import ipywidgets\n\nwith ipywidgets.Output() as screen:\n    raise ValueError('swallowed by the widget')"
PANEL = ("setup", "compute", "draw", "panel", "sweep")


@pytest.mark.slow
def test_a_broken_callback_turns_the_notebook_red(tmp_path):
    assert BROKEN_DRAW != SOURCES["draw"]
    path = write(tmp_path / "broken.ipynb", PANEL, draw=BROKEN_DRAW)
    problems = check_notebook(path, tmp_path / "executed" / "broken.ipynb", build=tmp_path / "build")
    red = [problem for problem in problems if problem.startswith("nbmake:")]
    assert len(red) == 1 and "RunError" in red[0] and "broken callback" in red[0] and "mark=False" in red[0]


@pytest.mark.slow
def test_what_nbmake_alone_lets_pass_the_audit_catches(tmp_path):
    path = write(tmp_path / "hidden.ipynb", PANEL, draw=BROKEN_DRAW, sweep=SWALLOWED)
    executed = tmp_path / "executed" / "hidden.ipynb"
    _, said = nbmake(path, executed, build=tmp_path / "build")
    assert said == "", "if nbmake has learnt to see this, the audit may become simpler"
    found = {(problem.rule, problem.text) for problem in audit(executed)}
    assert ("error", "ValueError: swallowed by the widget") in found
    assert any(rule == "sweep" and "'Damped wave'" in text for rule, text in found)


@pytest.mark.slow
def test_a_false_claim_turns_the_notebook_red(tmp_path):
    setup = "import numpy as np\nimport nbkit\n\nnbkit.preset()\nenergy = [1.0, 2.0]"
    path = write(tmp_path / "false.ipynb", ("setup", "claims", "stamp"), setup=setup)
    problems = check_notebook(path, tmp_path / "executed" / "false.ipynb", build=tmp_path / "build")
    assert any(problem.startswith("nbmake:") and "ClaimError" in problem and "C1" in problem for problem in problems), problems
    assert any("no claims card" in problem for problem in problems)


def test_a_pickle_loader_turns_the_source_scan_red():
    assert unsafe("import torch\nweights = torch.load('model.pt', weights_only=False)\n")
    assert unsafe("import pickle\n\ndef load_recording(name):\n    return pickle.load(open(name, 'rb'))\n")


@pytest.mark.parametrize(("source", "rule"), [("x = 1\n" * 26, "cell length"), ("text = '" + "x" * 62_000 + "'", "size")], ids=["lines", "bytes"])
def test_an_oversized_cell_turns_the_contract_red(source, rule, tmp_path):
    assert lint(write(tmp_path / "good.ipynb")) == []
    assert [problem.rule for problem in lint(write(tmp_path / "big.ipynb", figure=source))] == [rule]
