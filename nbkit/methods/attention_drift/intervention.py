"""What can be done to a chain while it drafts: noise, pinned magnitude, another window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nbkit.errors import InputError

from .config import DrafterConfig, is_int

NOISE_PATHS = ("hidden", "embedding")


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """What is done to a chain while it drafts; the default does nothing.

    Attributes:
        noise: alpha in f <- f + alpha * rms(f) * xi with standard normal xi, drawn anew for every step from ``seed``.
        path: ``"hidden"`` disturbs the state that a step reads, ``"embedding"`` its token embedding.
        pin: scale every fed-back state to the magnitude of the fused features, f <- f * rms(g) / rms(f).
        window, carry_sink: in place of the configuration's own; ``window=0`` switches a window of the configuration off.

    Raises: InputError for a negative noise, an unknown path or a window that means nothing.
    """

    noise: float = 0.0
    path: str = "hidden"
    pin: bool = False
    window: int | None = None
    carry_sink: int | None = None
    seed: int = 0

    def __post_init__(self):
        if not self.noise >= 0:
            raise InputError("noise", got=self.noise, allowed=">= 0")
        if self.path not in NOISE_PATHS:
            raise InputError("path", got=self.path, allowed=", ".join(NOISE_PATHS))
        for name in ("window", "carry_sink"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 0):
                raise InputError(name, got=value, allowed="None or >= 0")

    def limits(self, cfg: DrafterConfig) -> tuple[int | None, int]:
        """Window and carried sink that apply to a drafter with configuration ``cfg``."""
        window = cfg.window if self.window is None else self.window or None
        return window, cfg.carry_sink if self.carry_sink is None else self.carry_sink

    def disturb(self, embeds: Tensor, f: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Embeddings and states of step ``step`` (1, 2, ...) with noise."""
        if not self.noise:
            return embeds, f
        x = f if self.path == "hidden" else embeds
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        xi = torch.randn(x.shape, generator=generator).to(x)
        x = x + self.noise * rms(x)[..., None].to(x.dtype) * xi
        return (embeds, x) if self.path == "hidden" else (x, f)

    def pinned(self, f: Tensor, g: Tensor) -> Tensor:
        """``f`` at the magnitude of the fused features ``g`` if `pin` is set."""
        return f * (rms(g) / rms(f).clamp_min(1e-12))[..., None].to(f.dtype) if self.pin else f


NOTHING = Intervention()


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last axis in float32, the magnitude that all tables print.

    >>> rms(torch.tensor([[3.0, 4.0]])).pow(2).tolist()
    [12.5]
    """
    return x.float().pow(2).mean(-1).sqrt()
