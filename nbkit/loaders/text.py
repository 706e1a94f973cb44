"""Real text without a download: what ships with Python and with numpy.

``prose`` is reference documentation in English: the chapters of the Python language reference that ``help()`` shows, and for each module its
docstrings in the order of the source, without their examples. ``code`` is the source of the standard library. Both consist of documents of
at least 1,500 tokens of SmolLM2, cleaned of stray white space, and fall into two halves, ``calibration`` and ``held-out``, by the hash of a
document's text, so that no text is ever in both.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from nbkit.errors import InputError, MissingResourceError
from nbkit.loaders.provenance import Provenance, sha256_of, sha256_of_list

SPLITS = ("calibration", "held-out")
# Membership must not depend on a tokenizer, so it goes by characters; with these, every document has 1,500 tokens of SmolLM2 or more.
MIN_CHARS = {"prose": 7_500, "code": 9_000}
# Control characters except the newline, soft hyphens, zero-width and direction marks, the byte-order mark.
_INVISIBLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_SUFFIXES = {".txt", ".md", ".rst", ".py"}

# Modules with long docstrings of their own. Near copies (Chebyshev, Hermite, ...; mean, nanmean, ...) are represented by one, because two of
# them in different splits would leak.
_PROSE_STDLIB = """
_pydecimal argparse ast asyncio/base_events bdb cgi codecs concurrent/futures/_base configparser datetime difflib doctest email/_header_value_parser
email/message enum ftplib http/client http/cookiejar http/server imaplib importlib/_bootstrap_external inspect ipaddress json/__init__
logging/__init__ logging/handlers nntplib optparse os pathlib pdb platform pydoc random re/__init__ shutil smtplib socket socketserver ssl statistics
subprocess tarfile threading tkinter/__init__ traceback turtle typing unittest/case unittest/mock urllib/parse urllib/request uuid
xml/etree/ElementTree xml/sax/handler zipfile
""".split()
_PROSE_NUMPY = """
_core/_ufunc_config _core/arrayprint _core/einsumfunc _core/fromnumeric _core/function_base _core/multiarray _core/numeric _core/records
_core/shape_base _core/strings fft/_pocketfft lib/_arraypad_impl lib/_arraysetops_impl lib/_format_impl lib/_function_base_impl lib/_histograms_impl
lib/_index_tricks_impl lib/_iotools lib/_npyio_impl lib/_polynomial_impl lib/_shape_base_impl lib/_stride_tricks_impl lib/_twodim_base_impl
lib/_type_check_impl lib/_utils_impl lib/recfunctions linalg/_linalg ma/core ma/extras matrixlib/defmatrix polynomial/chebyshev polynomial/polyutils
testing/_private/utils
""".split()
# "specialnames" and "compound" repeat whole other topics, "debugger" the docstring of pdb.
_NOT_PROSE = {"compound", "debugger", "specialnames"}
# Left out of ``code``: tests and demos, tables of data, files that differ from machine to machine, near copies of other modules.
_NOT_CODE = {
    "__pycache__", "aifc.py", "dist-packages", "distutils", "encodings", "ensurepip", "entities.py", "idlelib", "lib2to3", "lzma.py", "pydoc_data",
    "site-packages", "stringprep.py", "sunau.py", "test", "tests", "tix.py", "turtledemo",
}


@dataclass(frozen=True)
class Document:
    """One document, or its beginning.

    Attributes:
        id: stable name, such as ``topics/operator-summary``.
        text: the cleaned text.
        origin: file it was taken from, relative to its package.
        sha256: hash of the whole cleaned text; decides the split.
        ids: (tokens,) int64 token ids of ``text``, without special tokens.
    """

    id: str
    text: str = field(repr=False)
    origin: str
    sha256: str = field(repr=False)
    ids: Any = field(repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Number of tokens of ``text``."""
        return len(self.ids)


@dataclass(frozen=True)
class TextSet:
    """Documents of one split, in the order given by the seed."""

    name: str
    split: str
    documents: list[Document] = field(repr=False)
    provenance: Provenance

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return sum(document.tokens for document in self.documents)

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]

    def __repr__(self) -> str:
        return f"{self.name} ({self.split}): {len(self)} documents, {self.tokens} tokens\n{self.provenance!r}"


@dataclass(frozen=True)
class _Raw:
    """A document before it is chosen and counted."""

    id: str
    text: str
    file: Path
    origin: str
    sha256: str


def load_text(
    name: str | os.PathLike = "prose", *, split: str = "calibration", n: int | None = None, tokens: int | None = None, tokenizer: Any = None,
    seed: int = 0,
) -> TextSet:
    """Load documents of one split, in an order that depends on the seed alone.

    Args:
        name: ``prose``, ``code``, or a path: a text file or a folder of .txt, .md, .rst and .py files.
        split: ``calibration`` or ``held-out``; a document is in one of them, by the hash of its text.
        n: how many documents; None for all.
        tokens: cut every document to exactly this many tokens and leave shorter ones out; None for whole documents.
        tokenizer: of transformers or tokenizers; None for SmolLM2's.
        seed: another seed gives another order.

    Raises: InputError for an unknown name or split, or more documents than there are; MissingResourceError when a path does not exist or the
    default tokenizer is not here.
    """
    if split not in SPLITS:
        raise InputError("split", got=split, allowed=" or ".join(SPLITS))
    for what, value in (("n", n), ("tokens", tokens)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(what, got=value, allowed="an integer >= 1 or None")
    text = os.fspath(name)
    raw = _choose(_collect(text, name), split, seed)
    encode, decode = _codec(tokenizer)
    documents, files = [], {}
    for item in raw:
        if n is not None and len(documents) == n:
            break
        ids, content = encode(item.text), item.text
        if tokens is not None:
            if len(ids) < tokens:
                continue
            if len(ids) > tokens:
                # The cut may fall inside a character; what is left of it is no text.
                ids = ids[:tokens]
                content = decode(ids.tolist()).rstrip("\ufffd")
        documents.append(Document(item.id, content, item.origin, item.sha256, ids))
        if item.origin not in files:
            files[item.origin] = sha256_of(item.file)
    if not documents or (n is not None and len(documents) < n):
        size = f" of >= {tokens} tokens" if tokens else ""
        raise InputError(f"documents of {text} ({split}){size}", got=n, allowed=f"<= {len(documents)}", hint="lower n or tokens")
    size = sum(len(document.text.encode()) for document in documents)
    described = TEXTS.get(text)
    origin, licence, revision = described.describe() if described else (text, "not stated", None)
    place = "installed files" if described else "folder"
    return TextSet(text, split, documents, Provenance(origin, sha256_of_list(files), licence, size, revision, place, tuple(sorted(files.items()))))


def clean(text: str, *, blank_lines: int = 1) -> str:
    """Text in NFC with plain newlines, no tabs, control characters or trailing spaces, and at most ``blank_lines`` blank lines in a row.

    >>> clean("a \\t b  \\r\\n\\n\\n\\nc\\x0c")
    'a        b\\n\\nc'
    """
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n").expandtabs(8)
    text = "\n".join(line.rstrip() for line in _INVISIBLE.sub("", text).split("\n"))
    return re.sub(rf"\n{{{blank_lines + 2},}}", "\n" * (blank_lines + 1), text).strip("\n")


def _collect(text: str, name: str | os.PathLike) -> Iterator[_Raw]:
    """All documents of a name or a path."""
    if isinstance(name, str) and name in TEXTS:
        return iter(_cached(name))
    path = Path(text).expanduser()
    if not isinstance(name, os.PathLike) and not path.exists() and not (os.sep in text or text.startswith((".", "~"))):
        raise InputError("text", got=name, allowed=f"{', '.join(TEXTS)}, or a path")
    if not path.exists():
        raise MissingResourceError("text", got=f"{path}, no such file or folder", allowed=f"{', '.join(TEXTS)}, or a path that exists")
    return _from_path(path)


@functools.cache
def _cached(name: str) -> tuple[_Raw, ...]:
    """The documents of a registered name, read once in a process: the second split costs nothing."""
    return tuple(TEXTS[name].documents())


def _from_path(path: Path) -> Iterator[_Raw]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    for file in files:
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        yield from _raw(name, _read(file), file, name, blank_lines=2 if file.suffix == ".py" else 1)


def _choose(documents: Iterator[_Raw], split: str, seed: int) -> list[_Raw]:
    """The documents of a split, each text once, ordered by a hash of seed and text: a document more or less moves no other."""
    unique = {document.sha256: document for document in documents}
    side = SPLITS.index(split)
    chosen = [document for document in unique.values() if int(document.sha256[:8], 16) % len(SPLITS) == side]
    return sorted(chosen, key=lambda document: hashlib.sha256(f"{seed}/{document.sha256}".encode()).hexdigest())


def _codec(tokenizer: Any) -> tuple[Callable[[str], Any], Callable[[list[int]], str]]:
    """Functions from text to (tokens,) int64 ids and back."""
    import numpy as np

    if tokenizer is None:
        from tokenizers import Tokenizer

        from nbkit.loaders.models import tokenizer_file

        tokenizer = Tokenizer.from_file(str(tokenizer_file()))
    if hasattr(tokenizer, "encode_batch"):
        # The cheap parts of the tokenizers library: no offsets, which a long text would make slow.
        return (
            lambda text: np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.int64),
            lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        )
    if not callable(tokenizer):
        raise InputError("tokenizer", got=type(tokenizer).__name__, allowed="a tokenizer of transformers or tokenizers, or None")
    return (
        # verbose=False: a document longer than the model's window is no mistake here.
        lambda text: np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64),
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
    )


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _raw(id: str, text: str, file: Path, origin: str, *, blank_lines: int, min_chars: int = 1) -> Iterator[_Raw]:
    """The document if it is long enough, else nothing."""
    text = clean(text, blank_lines=blank_lines)
    if len(text) >= min_chars:
        yield _Raw(id, text, file, origin, hashlib.sha256(text.encode()).hexdigest())


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


class _Prose:
    """Reference documentation: language reference topics and docstrings."""

    summary = "reference documentation in English: chapters of the Python language reference, docstrings of the standard library and numpy"

    def describe(self) -> tuple[str, str, str]:
        version = f"Python {_python_version()}, numpy {metadata.version('numpy')}"
        return "language reference and docstrings that ship with Python and numpy", "PSF-2.0 AND BSD-3-Clause", version

    def documents(self) -> Iterator[_Raw]:
        yield from self._topics()
        numpy = importlib.util.find_spec("numpy")
        roots = [("python", _stdlib(), _PROSE_STDLIB)]
        if numpy is not None and numpy.submodule_search_locations:
            roots.append(("numpy", Path(numpy.submodule_search_locations[0]), _PROSE_NUMPY))
        for label, root, modules in roots:
            for module in modules:
                file = root / f"{module}.py"
                # The list spans several versions of Python; a module that this one lacks is simply not there.
                if file.is_file():
                    yield from _raw(
                        f"{label}/{module.replace('/', '.').removesuffix('.__init__')}", _docstrings(file), file, f"{label}/{module}.py",
                        blank_lines=1, min_chars=MIN_CHARS["prose"],
                    )

    def _topics(self) -> Iterator[_Raw]:
        from pydoc_data import topics

        file, origin = Path(topics.__file__), "python/pydoc_data/topics.py"
        for topic, text in sorted(topics.topics.items()):
            if topic not in _NOT_PROSE:
                yield from _raw(f"topics/{topic}", _without_examples(_dedent(text)), file, origin, blank_lines=1, min_chars=MIN_CHARS["prose"])


class _Code:
    """Source files of the standard library."""

    summary = "source code: modules of the Python standard library"

    def describe(self) -> tuple[str, str, str]:
        return "source of the Python standard library", "PSF-2.0", f"Python {_python_version()}"

    def documents(self) -> Iterator[_Raw]:
        root = _stdlib()
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if _NOT_CODE.isdisjoint(parts) and not file.name.startswith("_sysconfigdata") and "config-" not in parts[0]:
                name = "/".join(parts)
                yield from _raw(f"python/{name}", _read(file), file, f"python/{name}", blank_lines=2, min_chars=MIN_CHARS["code"])


TEXTS: dict[str, Any] = {"prose": _Prose(), "code": _Code()}


def _docstrings(file: Path) -> str:
    """All docstrings of a module in the order of the source, without their interactive examples."""
    try:
        tree = ast.parse(_read(file))
    except SyntaxError:
        return ""
    nodes = sorted(_documented(tree), key=lambda node: getattr(node, "lineno", 0))
    found = dict.fromkeys(_without_examples(doc) for node in nodes if (doc := ast.get_docstring(node)))
    return "\n\n".join(found)


def _documented(node: ast.AST) -> Iterator[ast.AST]:
    """The module and the classes and functions in it; statements only, which is far quicker than ast.walk over every expression."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node
    for block in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, block, ()) if isinstance(node, (ast.stmt, ast.Module, ast.ExceptHandler)) else ():
            yield from _documented(child)


def _without_examples(doc: str) -> str:
    """A docstring without doctest blocks: from each prompt to the next blank line, and the heading they leave empty."""
    lines, skipping = [], False
    for line in doc.expandtabs(8).splitlines():
        if line.lstrip().startswith(">>>"):
            skipping = True
        elif not line.strip():
            skipping = False
        if not skipping:
            lines.append(line)
    return re.sub(r"\n+Examples?:*\n-*\s*(?=\n\n|\Z)", "", "\n".join(lines)).strip()


def _dedent(text: str) -> str:
    """Topics are indented by three spaces under their headings; one level of it goes."""
    return re.sub(r"^ {3}(?=\S)", "", text, flags=re.M)
