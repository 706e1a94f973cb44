"""A small language model over ASCII letters: the target of the small drafters.

One token is one character; token 0 starts every sequence and never occurs inside, so that attention has a place to rest.
"""

from __future__ import annotations

import numpy as np

from nbkit.errors import InputError

VOCAB, BOS, LENGTH = 128, 0, 256
"""Token ids, the id that starts a sequence, and the tokens of a training sequence."""


def encode(text: str) -> np.ndarray:
    """Token ids (characters,) int64 of ``text`` without the start; what is not ASCII is left out.

    >>> encode("Hi é!").tolist()
    [72, 105, 32, 33]
    """
    return np.frombuffer(text.replace("\0", "").encode("ascii", "ignore"), np.uint8).astype(np.int64)


def decode(ids) -> str:
    """The characters of ``ids``; starts are left out.

    Raises: InputError for ids outside the vocabulary.

    >>> decode([0, 72, 105])
    'Hi'
    """
    ids = np.asarray(ids).ravel()
    if ids.size and not 0 <= ids.min() <= ids.max() < VOCAB:
        raise InputError("ids", got=f"{ids.min()} to {ids.max()}", allowed=f"0..{VOCAB - 1}")
    return bytes(ids[ids != BOS].astype(np.uint8)).decode("ascii")


def build(seed: int, *, dim: int = 128, layers: int = 4, heads: int = 4, kv_heads: int = 2):
    """A randomly initialised Llama over letters (0.9 M parameters)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=4 * LENGTH, tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=None,
        pad_token_id=None, attention_dropout=0.0, rms_norm_eps=1e-5,
    ))
