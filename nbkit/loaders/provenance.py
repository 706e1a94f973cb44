"""What every loader shares: provenance, hashes, cards, safe names, atomic folders, and the question whether the network is allowed."""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nbkit.errors import HashMismatchError, InputError, MissingResourceError

CARD = "card.json"
CARD_SCHEMA = 1
# A card names its files and nothing more; one this large is not a card.
CARD_MAX_BYTES = 4 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*")
_TRUE = {"1", "true", "yes", "on"}


@dataclass(frozen=True)
class Provenance:
    """Where a loaded object came from, enough to get the same bytes again.

    Attributes:
        origin: what the object is and who published it.
        sha256: hash of the source file, or of the list of its files when there are several (see ``files``).
        licence: SPDX name of the licence.
        bytes: size of the source in bytes.
        revision: version of the package, commit of the repository, or schema and seed of a recipe; None if there is none.
        loaded_from: ``cache``, ``package``, ``project data``, ``folder``, ``environment``, ``hub`` or ``installed files``.
        files: (name, sha256) of every file that was read, where there are several.

    >>> Provenance("demo", "ab" * 32, "MIT", 2_500_000, None, "cache")
    Provenance: demo | MIT | 2.5 MB | sha256 abababababab | from cache
    """

    origin: str
    sha256: str
    licence: str
    bytes: int
    revision: str | None
    loaded_from: str
    files: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        revision = self.revision[:12] if self.revision and re.fullmatch(r"[0-9a-f]{40}", self.revision) else self.revision
        parts = [self.origin, *([revision] if revision else []), self.licence, readable_bytes(self.bytes)]
        return "Provenance: " + " | ".join([*parts, f"sha256 {self.sha256[:12]}", f"from {self.loaded_from}"])

    def _repr_html_(self) -> str:
        rows = [(k, v) for k, v in self.as_dict().items() if k != "files" and v is not None]
        if self.files:
            rows.append(("files", f"{len(self.files)}, first {self.files[0][0]}"))
        cells = "".join(f"<tr><th style='text-align:left'>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows)
        return f"<table class='nbkit-provenance'>{cells}</table>"

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, for a stamp or a card."""
        return asdict(self)


def readable_bytes(n: int) -> str:
    """A size with its unit, in powers of ten.

    >>> readable_bytes(98_362_432), readable_bytes(12)
    ('98.4 MB', '12 B')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_list(files: Mapping[str, str]) -> str:
    """One hash for several files: of the lines ``sha256  name`` in the order of the names, as ``sha256sum`` writes them.

    >>> sha256_of_list({"b": "22", "a": "11"}) == hashlib.sha256(b"11  a" + bytes([10]) + b"22  b" + bytes([10])).hexdigest()
    True
    """
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def check_sha256(path: Path, want: str, *, size: int | None = None, hint: str) -> None:
    """Raise HashMismatchError unless the file has the pinned size and sha256."""
    found = path.stat().st_size
    if size is not None and found != size:
        # A truncated download is the usual cause, and the size says so at once.
        raise HashMismatchError(f"size of {path.name}", got=f"{found} bytes", allowed=f"{size} bytes", hint=hint)
    got = sha256_of(path)
    if got != want:
        raise HashMismatchError(f"sha256 of {path.name}", got=got, allowed=want, hint=hint)


def check_name(name: Any, what: str) -> str:
    """The name of an entry of the project's data, refused if it could leave its folder.

    >>> check_name("lookup-chain", "model")
    'lookup-chain'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"name of a {what}", got=name, allowed="lower-case letters, digits, '-', '_' and inner dots, without slashes")
    return name


def data_root() -> Path:
    """The project's data folder (environment variable NBKIT_DATA, else ``data/`` of the checkout)."""
    import nbkit

    return nbkit.data_path()


def cache_root() -> Path:
    """The folder for what can be rebuilt: environment variable NBKIT_CACHE, else the user's cache folder of this system."""
    setting = os.environ.get("NBKIT_CACHE")
    if setting:
        return Path(setting).expanduser().resolve()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "nbkit"


def env_flag(name: str) -> bool:
    """Whether an environment variable is set to 1, true, yes or on."""
    return os.environ.get(name, "").strip().lower() in _TRUE


def online_allowed(online: bool | None) -> bool:
    """Whether the hub may be asked: the argument, else NBKIT_ONLINE=1; the offline switches of the environment win over both."""
    if any(env_flag(name) for name in ("NBKIT_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return False
    return env_flag("NBKIT_ONLINE") if online is None else bool(online)


def package_versions(*names: str) -> dict[str, str]:
    """Versions of the named installed packages, for a card."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Let only one process at a time build or replace ``target``; the lock file lies in the cache folder, not in the data."""
    from filelock import FileLock

    mark = hashlib.sha256(str(target.resolve()).encode()).hexdigest()[:12]
    path = cache_root() / "locks" / f"{target.name}-{mark}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path):
        yield


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A fresh folder that takes the place of ``target`` when the block ends well and vanishes when it does not.

    Call it while holding the lock of ``target``. Readers see the old folder or the new one, never a mixture.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    old = part.with_name(part.name.replace(".part-", ".old-"))
    try:
        yield part
        # mkdtemp makes the folder private; what is published gets the mode that mkdir would give.
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o777 & ~umask)
        if target.exists():
            target.rename(old)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file of a folder except its card, by name."""
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != CARD)
    return {name: {"sha256": sha256_of(folder / name), "bytes": (folder / name).stat().st_size} for name in names}


def write_card(folder: Path, card: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``card.json`` with the size and hash of every other file of the folder; returns what was written."""
    full = {"schema": CARD_SCHEMA, **card, "files": describe_files(folder)}
    (folder / CARD).write_text(to_json(full, "card", indent=1) + "\n", encoding="utf-8")
    return full


def to_json(value: Any, what: str, *, indent: int | None = None) -> str:
    """Strict JSON text: no NaN, no value that JSON does not have."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False, separators=None if indent else (",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(what, got=str(error), allowed="JSON values: text, finite numbers, true/false/null, lists, objects") from error


def read_json(path: Path, what: str, *, max_bytes: int = CARD_MAX_BYTES) -> Any:
    """Read a JSON file of bounded size."""
    size = path.stat().st_size
    if size > max_bytes:
        raise InputError(f"size of {what}", got=f"{size} bytes", allowed=f"<= {max_bytes} bytes")
    return parse_json(path.read_bytes(), what)


def parse_json(raw: bytes, what: str) -> Any:
    """Parse JSON, with one kind of error for everything that can be wrong with it."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(what, got=f"{type(error).__name__}: {error}", allowed="JSON text in UTF-8") from error


def read_card(folder: Path, *, hint: str, only: str | None = None) -> dict[str, Any]:
    """Read and check the card of a folder, then every file it lists (or just ``only``); nothing else may lie in the folder.

    Raises: MissingResourceError without a card or with a listed file gone; InputError for a malformed card or a path that leaves the
    folder; HashMismatchError for a file that differs from the card or is not on it.
    """
    path = folder / CARD
    if not path.is_file():
        raise MissingResourceError(f"card of {folder.name}", got="no such file", allowed=str(path), hint=hint)
    card = read_json(path, f"card of {folder.name}")
    files = card.get("files") if isinstance(card, dict) else None
    if not isinstance(files, dict) or not files or card.get("schema") != CARD_SCHEMA:
        raise InputError(f"card of {folder.name}", got="no usable list of files", allowed=f"schema {CARD_SCHEMA} with files: name -> sha256, bytes")
    for name, entry in files.items():
        file = folder / name
        if Path(name).name != name or name in {"", ".", ".."} or "\\" in name or file.resolve().parent != folder.resolve():
            raise InputError(f"file name in the card of {folder.name}", got=name, allowed="plain names of files inside the folder")
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or not isinstance(entry.get("bytes"), int):
            raise InputError(f"entry {name} in the card of {folder.name}", got=entry, allowed='{"sha256": "...", "bytes": ...}')
        if not file.is_file():
            raise MissingResourceError(f"file {name} of {folder.name}", got="no such file", allowed=str(file), hint=hint)
        if only in {None, name}:
            check_sha256(file, entry["sha256"], size=entry["bytes"], hint=hint)
    extra = sorted(p.name for p in folder.iterdir() if p.name not in {*files, CARD} and not p.name.startswith("."))
    if extra:
        got = f"files that are not on its card: {', '.join(extra)}"
        raise HashMismatchError(f"folder {folder.name}", got=got, allowed=", ".join(files), hint=hint)
    return card


def card_sha256(card: Mapping[str, Any]) -> str:
    """One hash for all files of a card."""
    return sha256_of_list({name: entry["sha256"] for name, entry in card["files"].items()})


def card_bytes(card: Mapping[str, Any]) -> int:
    """Size of all files of a card, in bytes."""
    return sum(entry["bytes"] for entry in card["files"].values())
