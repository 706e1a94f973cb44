"""The drafter's one decoder layer, with the names of EAGLE checkpoints."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import InputError

from .attention import rotate
from .config import DrafterConfig, is_int


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps) with the statistics in float32.

    >>> RMSNorm(2, 0.0)(torch.tensor([3.0, 4.0])).pow(2).mean().item()
    1.0
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the result has the dtype of ``x``."""
        return (F.rms_norm(x.float(), (x.shape[-1],), None, self.eps) * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Projections of one attention block; what happens between them depends on who calls."""

    def __init__(self, cfg: DrafterConfig, inputs: int):
        super().__init__()
        self.cfg = cfg
        inner = cfg.heads * cfg.head_dim
        self.q_proj = nn.Linear(inputs, inner, bias=False)
        self.k_proj = nn.Linear(inputs, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, cfg.kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, cfg.hidden_size, bias=False)
        self.g_proj = nn.Linear(inputs, inner) if cfg.gate else None

    def query(self, z: Tensor, positions: Tensor) -> Tensor:
        """Queries (batch, heads, T, head_dim), rotated to ``positions`` (batch or 1, T)."""
        return rotate(self._split(self.q_proj(z)), positions, self.cfg.rope_theta)

    def key_value(self, z: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, rotated to ``positions``, and values, (batch, kv_heads, T, head_dim) each."""
        return rotate(self._split(self.k_proj(z)), positions, self.cfg.rope_theta), self._split(self.v_proj(z))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2)

    def finish(self, z: Tensor, mixed: Tensor) -> Tensor:
        """Output projection of the attended values ``mixed`` (batch, heads, T, head_dim)."""
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            mixed = mixed * torch.sigmoid(self.g_proj(z))
        return self.o_proj(mixed)


class MLP(nn.Module):
    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """The decoder layer; submodules are named as in EAGLE checkpoints."""

    def __init__(self, cfg: DrafterConfig):
        super().__init__()
        eagle = cfg.kind == "eagle"
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        if eagle:
            self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.self_attn = Attention(cfg, cfg.hidden_size * (2 if eagle else 1))
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.mlp = MLP(cfg)


def initialise(module: nn.Module, seed: int) -> None:
    """Uniform weights of standard deviation 1/sqrt(3 fan_in); every tensor has a stream of its own, so switches do not change the others."""
    if not is_int(seed):
        raise InputError("seed", got=seed, allowed="an integer")
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim == 2:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
                bound = weight.shape[1] ** -0.5
                weight.copy_((2 * torch.rand(weight.shape, generator=generator) - 1) * bound)
            elif name.endswith("bias"):
                weight.zero_()
