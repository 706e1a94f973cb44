"""Recordings: results of slow runs and logs of real systems, kept under ``data/recordings/<name>/`` with a card.

A recording is JSON (compressed when long) or a set of arrays (npz without objects). Reading one is bounded in size however well it was
compressed, and never runs anything.
"""

from __future__ import annotations

import gzip
import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbkit.errors import InputError, MissingResourceError
from nbkit.loaders.provenance import (
    CARD,
    Provenance,
    card_bytes,
    card_sha256,
    check_name,
    data_root,
    locked,
    new_folder,
    package_versions,
    parse_json,
    read_card,
    to_json,
    write_card,
)

# The largest recording that may come out of a compressed file.
MAX_BYTES = 256 << 20
_COMPRESS_FROM = 64 << 10
_JSON, _GZIP, _NPZ = "data.json", "data.json.gz", "data.npz"
_CARD_KEYS = ("summary", "licence", "recipe", "seed")


@dataclass(frozen=True)
class Recording:
    """What was recorded and where it came from.

    Attributes:
        data: the JSON value, or a dict of arrays by name.
        provenance: origin, hash, licence.
        card: everything on its card, such as recipe, seed, versions and what the numbers mean.
    """

    data: Any
    provenance: Provenance
    card: dict[str, Any] = field(repr=False)


def load_recording(name: str) -> Recording:
    """Read the recording ``data/recordings/<name>/``, checked against its card.

    Raises: MissingResourceError when it is not there; HashMismatchError when it differs from its card; InputError for a name that
    leaves the folder, objects in an array, or more than 256 MiB after decompression.
    """
    check_name(name, "recording")
    folder = data_root() / "recordings" / name
    if not folder.is_dir():
        known = sorted(path.parent.name for path in data_root().glob(f"recordings/*/{CARD}"))
        hint = "python -m nbkit train lists the recipes that make them"
        raise MissingResourceError(f"recording {name}", got="no such folder", allowed=", ".join(known) or str(folder), hint=hint)
    card = read_card(folder, hint=f"python -m nbkit train {_recipe_of(folder)}")
    readers = {_JSON: _read_json, _GZIP: _read_gzip, _NPZ: _read_npz}
    present = [file for file in readers if file in card["files"]]
    if len(present) != 1:
        raise InputError(f"files of recording {name}", got=", ".join(card["files"]), allowed=f"one of {', '.join(readers)}")
    data = readers[present[0]](folder / present[0], f"recording {name}")
    origin = f"{name}, recorded by the recipe {card.get('recipe')} of nbkit"
    revision = f"seed {card.get('seed')}"
    return Recording(data, Provenance(origin, card_sha256(card), str(card.get("licence")), card_bytes(card), revision, "project data"), card)


def save_recording(name: str, data: Any, card: Mapping[str, Any]) -> Path:
    """Write a recording to ``data/recordings/<name>/`` in one step, the same bytes for the same data.

    Args:
        data: a JSON value, or a non-empty dict of numpy arrays (no objects).
        card: ``summary``, ``licence``, ``recipe`` and ``seed`` (JSON values), and anything else worth keeping.

    Raises: InputError for data that neither JSON nor plain arrays can hold, or a card that lacks a key.
    """
    check_name(name, "recording")
    lacking = [key for key in _CARD_KEYS if key not in card]
    if lacking:
        raise InputError("card of the recording", got=f"no {', '.join(lacking)}", allowed=f"a dict with {', '.join(_CARD_KEYS)}")
    file, content = _encode(data)
    full = {"name": name, **card, "versions": package_versions("torch", "transformers", "numpy")}
    to_json(full, "card of the recording")
    target = data_root() / "recordings" / name
    with locked(target), new_folder(target) as part:
        (part / file).write_bytes(content)
        write_card(part, full)
    return target


def _recipe_of(folder: Path) -> str:
    """The recipe that a card names, for a hint; the folder's name when the card cannot say."""
    try:
        card = parse_json((folder / CARD).read_bytes(), CARD)
        return str(card["recipe"])
    except (OSError, InputError, KeyError, TypeError):
        return folder.name


def _encode(data: Any) -> tuple[str, bytes]:
    """File name and bytes of a recording."""
    import numpy as np

    if isinstance(data, Mapping) and data and all(isinstance(value, np.ndarray) for value in data.values()):
        wrong = [key for key, value in data.items() if value.dtype.hasobject or not isinstance(key, str) or not key.isidentifier()]
        if wrong:
            raise InputError("arrays of the recording", got=wrong[0], allowed="arrays of numbers or text under names that are identifiers")
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **data)
        return _NPZ, buffer.getvalue()
    raw = to_json(data, "data of the recording").encode()
    if len(raw) > MAX_BYTES:
        raise InputError("size of the recording", got=f"{len(raw)} bytes", allowed=f"<= {MAX_BYTES} bytes")
    # A fixed time stamp keeps the file, and so its hash, the same from run to run.
    return (_JSON, raw) if len(raw) < _COMPRESS_FROM else (_GZIP, gzip.compress(raw, compresslevel=9, mtime=0))


def _too_large(what: str, size: str) -> InputError:
    return InputError(f"size of {what}", got=size, allowed=f"<= {MAX_BYTES} bytes after decompression")


def _read_json(path: Path, what: str) -> Any:
    if path.stat().st_size > MAX_BYTES:
        raise _too_large(what, f"{path.stat().st_size} bytes")
    return parse_json(path.read_bytes(), what)


def _read_gzip(path: Path, what: str) -> Any:
    """Decompress no more than the limit, whatever the file claims."""
    try:
        with gzip.open(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(what, got=f"a damaged gzip file ({error})", allowed="a complete gzip file") from error
    if len(raw) > MAX_BYTES:
        raise _too_large(what, f"more than {MAX_BYTES} bytes")
    return parse_json(raw, what)


def _read_npz(path: Path, what: str) -> dict[str, Any]:
    """Arrays of an npz file, after its sizes have been checked; numpy refuses objects by default."""
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(info.file_size for info in archive.infolist())
            if total > MAX_BYTES:
                raise _too_large(what, f"{total} bytes")
            for info in archive.infolist():
                with archive.open(info) as member:
                    _check_npy_header(member, info.file_size, f"{info.filename} of {what}")
        with np.load(path) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(what, got=f"{type(error).__name__}: {error}", allowed="an npz file of plain arrays") from error


def _check_npy_header(member: Any, size: int, what: str) -> None:
    """Refuse a header that promises more than the file holds: numpy would first allocate what it promises."""
    from numpy.lib import format as npy

    version = npy.read_magic(member)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise InputError(what, got=f"npy version {version}", allowed="versions 1.0 and 2.0")
    shape, _, dtype = read(member)
    if dtype.hasobject:
        raise InputError(what, got="an array of objects, which only a pickle can hold", allowed="numbers or text")
    if math.prod(shape) * dtype.itemsize > size:
        raise InputError(what, got=f"a header that promises shape {shape} of {dtype}", allowed=f"at most the {size} bytes that are there")
