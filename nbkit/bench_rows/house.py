"""The package's own costs."""

from __future__ import annotations

import subprocess
import sys

from nbkit.bench import Measured, Row, compare


def _fresh(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def _stays_light() -> None:
    heavy = _fresh("import sys, nbkit; print(sorted({'torch', 'transformers', 'plotly', 'numpy'} & set(sys.modules)))").stdout.strip()
    assert heavy == "[]", f"import nbkit also imports {heavy}"


def _import_time() -> Measured:
    return compare(lambda: _fresh("import nbkit"), lambda: _fresh("pass"))


ROWS = (Row("import nbkit", unit="ms", baseline="python -c pass", measure=_import_time, check=_stays_light, goal=300),)
