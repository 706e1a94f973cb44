"""What all tests share: no network, one thread, the smallest preset, a build folder of their own, and the closing summary."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports torch or transformers; kernels and servers started by tests inherit it.
os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg",
    OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", NUMEXPR_NUM_THREADS="1",
    NBKIT_PRESET="smoke", PYTHONHASHSEED="0",
    # The claims and pages of a smoke run must not replace those of `make run`.
    NBKIT_BUILD=str(ROOT / "build" / "test"),
)
for _name in ("NBKIT_ONLINE", "NBKIT_ALLOW_UNPINNED", "NBKIT_KERNELS", "NBKIT_DATA", "NBKIT_EXPORT"):
    os.environ.pop(_name, None)


class NetworkUsed(RuntimeError):
    """A test tried to reach another machine."""


def _guarded(connect):
    def guard(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _loopback(str(address[0])):
            raise NetworkUsed(f"tests run without a network, but something connects to {address!r}")
        return connect(self, address)

    return guard


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def pytest_addoption(parser):
    parser.addoption("--phase", default=None, metavar="NAME",
                     help="keep this run's counts in build/test, and close with the totals of all phases there")


def pytest_configure(config):
    socket.socket.connect = _guarded(socket.socket.connect)
    socket.socket.connect_ex = _guarded(socket.socket.connect_ex)
    config.nbkit_started = time.time()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Print the project's own summary after everything that pytest prints, once (not in the workers of xdist)."""
    result = yield
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        counts = _counts(reporter, time.time() - session.config.nbkit_started)
        for line in summary(counts, session.config.option.phase):
            reporter.write_line(line)
    return result


def _counts(reporter, seconds: float) -> dict:
    def number(*kinds):
        return sum(len([report for report in reporter.stats.get(kind, ()) if getattr(report, "when", None) != "teardown" or kind == "error"])
                   for kind in kinds)

    return {"passed": number("passed", "xpassed"), "failed": number("failed", "error"), "skipped": number("skipped", "xfailed"),
            "seconds": round(seconds, 1)}


def summary(counts: dict, phase: str | None) -> list[str]:
    """The closing lines: tests over all phases, notebooks executed, claims by verdict, browser latency."""
    build = Path(os.environ["NBKIT_BUILD"])
    phases = {phase or "this run": counts}
    if phase:
        folder = build / "phases"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{phase}.json").write_text(json.dumps(counts), encoding="utf-8")
        phases = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    total = {key: sum(one[key] for one in phases.values()) for key in counts}
    lines = ["", f"tests: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped"]
    took = ", ".join(f"{name} {one['seconds']:.0f} s" for name, one in phases.items())
    lines.append(f"time: {total['seconds'] / 60:.1f} min ({took})")
    lines.append(_notebooks(build))
    lines.append(_claims(build))
    lines.append(_latency(build))
    return lines


def _notebooks(build: Path) -> str:
    """Notebooks of the project that this run executed, with the time and memory that the notebook checks wrote down."""
    known = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    path = build / "notebooks.json"
    records = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    done = [f"{name} {records[name]['seconds']:.0f} s {records[name]['peak_mb']:.0f} MB" for name in known if name in records]
    return f"notebooks executed: {len(done)} of {len(known)}" + (f" ({', '.join(done)})" if done else "")


def _claims(build: Path) -> str:
    if not (build / "claims").is_dir():
        return "claims: none recorded in this run"
    from nbkit.claims import tally

    papers = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    totals: dict[str, int] = {}
    for slug, verdicts in tally(build / "claims").items():
        # Records written by tests of the claims machinery are no papers.
        for verdict, number in verdicts.items() if slug in papers else ():
            totals[verdict] = totals.get(verdict, 0) + number
    return "claims: " + (", ".join(f"{number} {verdict}" for verdict, number in totals.items()) or "none recorded in this run")


def _latency(build: Path) -> str:
    path = build / "browser" / "latency.json"
    if not path.is_file():
        return "browser latency: not measured"
    measured = json.loads(path.read_text(encoding="utf-8"))
    return "browser latency: " + ", ".join(f"{name} {value:.0f} ms" if isinstance(value, (int, float)) else f"{name} {value}"
                                           for name, value in measured.items())
