"""Turn a Llama model in a GGUF file into a folder of safetensors, configuration and tokenizer that transformers opens directly.

transformers reads GGUF too, but needs ``accelerate`` for it, takes five times as long, draws progress bars, and refuses to save what it
read. The weights written here equal its weights bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nbkit.errors import UnsupportedModelError

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
# GGUF token types: 3 is a control token; the others are matched like ordinary text.
_CONTROL = 3


def convert(source: Path, folder: Path) -> None:
    """De-quantise a GGUF Llama into ``folder`` in float32: model.safetensors, config.json and the tokenizer's files.

    Raises: UnsupportedModelError for another architecture or another kind of tokenizer.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields.get("general.architecture"), fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        allowed = ("llama", "gpt2", "smollm")
        raise UnsupportedModelError(f"GGUF file {source.name}", got=kind, allowed=allowed, hint="use the safetensors version of the model")
    _write_json(folder / "config.json", _config(fields, {tensor.name for tensor in reader.tensors}))
    _write_tokenizer(fields, folder)
    _write_weights(reader, fields, folder / "model.safetensors")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any], tensors: set[str]) -> dict[str, Any]:
    """The transformers configuration that describes the same network."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"], "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"], "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"], "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"], "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": _shortest(fields["llama.rope.freq_base"])},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"], "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _shortest(value: float) -> float:
    """The decimal number that the file's float32 stands for: 1e-05 rather than 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE with the ``smollm`` pre-tokenizer: single digits first, then the splits of GPT-2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": fields["llama.context_length"], "clean_up_tokenization_spaces": False,
        **{f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in named.items()},
        "chat_template": fields["tokenizer.chat_template"],
    })


def _write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    """All tensors in float32 under their transformers names."""
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        if name == "rope_freqs":
            continue
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        _, _, part = name.partition("blk.")
        layer, _, piece = part.partition(".")
        if piece in heads:
            # GGUF stores the two halves of each rotary pair next to each other; transformers keeps them half a head apart.
            rows, columns = values.shape
            values = values.reshape(heads[piece], rows // heads[piece] // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        target = f"model.layers.{layer}.{_BLOCK[piece]}" if part else _OUTER[name]
        state[f"{target}.weight"] = np.ascontiguousarray(values)
    save_file(state, path, metadata={"format": "pt"})
