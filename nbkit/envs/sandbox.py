"""Folders that an episode may touch: names that stay inside, temporary folders that go away, programs that see no user settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path

from nbkit.errors import InputError, MissingResourceError, RunError

__all__ = ["Sandbox", "inside", "run_program"]

# Lower case only: on a disk that ignores case two names could otherwise be one file. No part starts with a dot (.git, ..).
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*")
_LONGEST = 120


def inside(name: object) -> bool:
    """Whether a name is a plain relative path: lower-case parts, none starting with a dot, no drive and no backslash.

    >>> [inside(name) for name in ("reports/north.csv", "../x", "/etc/passwd", ".git/config", "a//b", "a\\\\b", "a/../b", 3)]
    [True, False, False, False, False, False, False, False]
    """
    return isinstance(name, str) and len(name) <= _LONGEST and _NAME.fullmatch(name) is not None


class Sandbox:
    """A temporary folder, removed by `close`, at the end of a ``with`` block, or when the object is dropped.

    Raises: InputError when `parent` is not a folder, or from `path` when a name leaves the folder or passes a symbolic link.

    >>> with Sandbox() as box:
    ...     _ = box.path("notes.txt").write_text("x")
    ...     sorted(item.name for item in box.root.iterdir())
    ['notes.txt']
    >>> box.root.exists()
    False
    """

    def __init__(self, *, parent: str | os.PathLike | None = None, prefix: str = "nbkit-"):
        if parent is not None and not Path(parent).is_dir():
            raise InputError("folder for temporary folders", got=str(parent), allowed="a folder that exists", hint="leave root=None")
        self.root = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
        self._finalizer = weakref.finalize(self, _remove, self.root)

    def path(self, name: str) -> Path:
        """The path of a plain relative name in the folder; need not exist."""
        if not inside(name):
            raise InputError("name in the folder", got=name, allowed="relative names of lower-case letters, digits and ._-")
        path = self.root
        for part in name.split("/"):
            path = path / part
            if path.is_symlink():
                raise InputError("name in the folder", got=name, allowed="names that pass no symbolic link")
        return path

    def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _remove(root: Path) -> None:
    """Remove a folder and all in it; links are removed and not followed."""
    if os.name == "nt":
        # git writes read-only files, which Windows does not delete.
        for folder, _, names in os.walk(root):
            for name in names:
                os.chmod(os.path.join(folder, name), 0o600)
    shutil.rmtree(root, ignore_errors=True)


def run_program(args: list[str], *, cwd: Path, env: dict[str, str] | None = None, stdin: bytes | None = None, timeout: float = 30) -> bytes:
    """Standard output of a program started from a list of arguments, with only PATH, HOME (the folder), locale and `env` set.

    Raises: MissingResourceError when the program is not on this machine; RunError when it fails or takes longer than `timeout` seconds.
    """
    clean = {"HOME": str(cwd), "LC_ALL": "C", "TZ": "UTC", "PATH": os.environ.get("PATH", os.defpath)}
    # Windows starts no program without this one.
    if "SYSTEMROOT" in os.environ:
        clean["SYSTEMROOT"] = os.environ["SYSTEMROOT"]
    feed = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    try:
        done = subprocess.run(args, cwd=cwd, env={**clean, **(env or {})}, capture_output=True, timeout=timeout, check=False, **feed)
    except FileNotFoundError:
        raise MissingResourceError(f"program {args[0]!r}", got="not on this machine", hint=f"install {args[0]}") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{args[0]} took longer than {timeout} seconds") from None
    if done.returncode != 0:
        raise RunError(f"{args[0]} failed with status {done.returncode}", got=done.stderr.decode(errors="replace").strip()[-500:])
    return done.stdout
