"""The command line: ``python -m nbkit doctor | run | site | train | claims | bench | lint``."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbkit
from nbkit.errors import InputError, MissingResourceError, NbkitError

PRESETS = ("smoke", "demo", "full")
# One thread a kernel: two notebooks on two cores must not fight, and sums in one order give the same digits everywhere.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 done, 1 something failed, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except NbkitError as error:
        print(f"nbkit {options.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"nbkit {options.name}: stopped; what was finished is kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nbkit", description="Research papers as live notebooks.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="command")

    def command(function: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(function.__name__.strip("_"), help=text, description=text)
        sub.set_defaults(command=function)
        return sub

    command(_doctor, "what this machine has, what is missing and how to get it")
    run = command(_run, "execute the notebooks into build/executed, then write the claims table and build/site")
    run.add_argument("notebooks", nargs="*", metavar="NAME", help="slug or path of a notebook (default: all)")
    run.add_argument("--preset", choices=PRESETS, help="sizes of the experiments (default: NBKIT_PRESET, else demo)")
    run.add_argument("--timeout", type=_positive, default=None, metavar="S", help="seconds allowed for one notebook (default by preset)")
    run.add_argument("--no-site", action="store_true", help="execute only")
    site = command(_site, "static pages of the executed notebooks in build/site; executes them first if that was not done")
    site.add_argument("--out", type=Path, default=None, help="folder to write (default: build/site)")
    train = command(_train, "make a file under data/ again from its recipe; without a name, list the recipes")
    train.add_argument("recipe", nargs="?", metavar="NAME")
    claims = command(_claims, "write the table of claims in README.md from build/claims")
    claims.add_argument("--check", action="store_true", help="compare only; fails when a verdict differs")
    claims.add_argument("--refresh", action="store_true", help="rewrite the numbers even where no verdict changed")
    bench = command(_bench, "timings, each behind a correctness check")
    bench.add_argument("words", nargs="*", metavar="WORD", help="only rows whose name contains one of the words")
    command(_lint, "code style and the notebook contract")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _checkout(*parts: str) -> Path:
    path = nbkit.project_path(*parts)
    if path is None or not path.exists():
        raise MissingResourceError(
            "/".join(parts), got="an installation without the project's files" if path is None else f"nothing at {path}",
            allowed="a checkout of the project", hint="clone the project and install it with pip install -e .",
        )
    return path


def _doctor(options: argparse.Namespace) -> int:
    report = nbkit.doctor()
    print(report)
    return 0 if report.ok else 1


def notebooks(names: Sequence[str] = ()) -> list[Path]:
    """The notebooks of the project, or the named ones (slug or path).

    Raises: InputError for a name that is not there.

    >>> notebooks(["no-such-paper"])
    Traceback (most recent call last):
    ...
    nbkit.errors.InputError: notebook: got no-such-paper, allowed ...
    """
    folder = _checkout("notebooks")
    known = sorted(folder.glob("*.ipynb"))
    if not names:
        return known
    found = []
    for name in names:
        path = Path(name) if name.endswith(".ipynb") else folder / f"{name}.ipynb"
        if not path.is_file():
            raise InputError("notebook", got=name, allowed=", ".join(path.stem for path in known) or "none yet")
        found.append(path)
    return found


def _run(options: argparse.Namespace) -> int:
    from nbkit.presets import Preset

    preset = Preset(options.preset or os.environ.get("NBKIT_PRESET") or "demo")
    failed = _execute(notebooks(options.notebooks), preset, options.timeout or _time_limit(preset))
    changes = _merge_claims()
    print(f"claims: {len(changes)} changes in README.md" if changes else "claims: README.md agrees")
    if not options.no_site:
        _build_site(nbkit.build_path("site"))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _time_limit(preset: Any) -> float:
    """Seconds after which a notebook counts as hung: several times what the preset promises."""
    return preset.pick(smoke=300.0, demo=900.0, full=24 * 3600.0)


def _newer(copy: Path, source: Path) -> bool:
    return copy.is_file() and copy.stat().st_mtime >= source.stat().st_mtime


def _execute(paths: Sequence[Path], preset: Any, timeout: float) -> list[str]:
    """Execute the notebooks one after the other, print a line for each, and return the names of those that failed."""
    from nbkit.notebooks import execute

    out = nbkit.build_path("executed")
    # A copy that stopped half-way is kept for reading, but where no page is made of it and no later command takes it for done.
    aside = out / "failed"
    aside.mkdir(parents=True, exist_ok=True)
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    width = max((len(path.stem) for path in paths), default=8)
    failed = []
    print(f"{len(paths)} notebooks, preset {preset.name}")
    print(f"  {'notebook':<{width}}  seconds  peak MB  cells", flush=True)
    for path in paths:
        start = time.perf_counter()
        try:
            record = execute(path, out / path.name, preset=preset.name, timeout=timeout)
        except Exception as error:  # one broken notebook must not hide the state of the others
            failed.append(path.stem)
            if (out / path.name).is_file():
                (out / path.name).replace(aside / path.name)
            print(f"✗ {path.stem:<{width}}  {time.perf_counter() - start:7.1f}  failed", flush=True)
            # An error of the cell is told whole by its message; any other needs the place it came from.
            told = isinstance(error, NbkitError) or type(error).__module__.startswith("nbclient")
            text = str(error) if told else traceback.format_exc()
            print(_plain(text), file=sys.stderr, flush=True)
        else:
            (aside / path.name).unlink(missing_ok=True)
            print(f"✓ {path.stem:<{width}}  {record.seconds:7.1f}  {record.peak_mb:7.0f}  {record.cells:5d}", flush=True)
    return failed


def _plain(text: str) -> str:
    return text if sys.stderr.isatty() else _COLOUR_CODE.sub("", text)


def _merge_claims(**how: bool) -> list[str]:
    from nbkit.claims import merge_readme

    return merge_readme(_checkout("README.md"), **how)


def _build_site(out: Path) -> None:
    from nbkit.widgets.site import build

    build(nbkit.build_path("executed"), out)
    print(f"site: {out / 'index.html'}")


def _site(options: argparse.Namespace) -> int:
    from nbkit.presets import preset

    failed = []
    executed = nbkit.build_path("executed")
    left = [path for path in notebooks() if not _newer(executed / path.name, path)]
    if left:
        failed = _execute(left, preset(), _time_limit(preset()))
    _build_site(options.out or nbkit.build_path("site"))
    return 1 if failed else 0


def _train(options: argparse.Namespace) -> int:
    from nbkit import recipes

    if options.recipe is None:
        for recipe in recipes.RECIPES.values():
            print(f"{recipe.name}: {recipe.summary}\n  writes {', '.join(recipe.outputs)}; about {recipe.minutes:g} minutes on two cores")
        return 0
    made = recipes.train(options.recipe)
    print("\n".join(f"made {path}" for path in made))
    return 0


def _claims(options: argparse.Namespace) -> int:
    changes = _merge_claims(check=options.check, refresh=options.refresh)
    print("\n".join(changes) if changes else "README.md agrees with build/claims")
    return 1 if changes and options.check else 0


def _bench(options: argparse.Namespace) -> int:
    from nbkit import bench

    rows = bench.rows()
    chosen = [row for row in rows if not options.words or any(word in row.name for word in options.words)]
    if not chosen:
        raise InputError("bench rows", got=" ".join(options.words), allowed=", ".join(row.name for row in rows))
    outcomes = bench.run(chosen)
    print(bench.table(outcomes))
    return 1 if any(outcome.state == "wrong" for outcome in outcomes) else 0


def _lint(options: argparse.Namespace) -> int:
    from nbkit.notebooks import lint

    root = _checkout("pyproject.toml").parent
    style = subprocess.run([sys.executable, "-m", "ruff", "check", "nbkit", "tests"], cwd=root, check=False).returncode
    problems = [problem for path in notebooks() for problem in lint(path)]
    print("\n".join(str(problem) for problem in problems) or "notebooks: all rules kept")
    return 1 if style or problems else 0


if __name__ == "__main__":
    sys.exit(main())
