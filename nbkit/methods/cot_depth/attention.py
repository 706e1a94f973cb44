"""Attention that reasons by appending its estimate of the weights as a thought: one linear layer, and a small softmax transformer.

A token of the linear layer has 2 d + 2 entries: x (d), y (1), thought w (d), flag (1). Examples are (x, y, 0, 0), a thought is (0, 0, w, 1).
Both models have ``encode(X, y)``, done once a prompt, and ``refine(context, w)``, one chain-of-thought step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import InputError


def _size(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(name, got=value, allowed=f"integers >= {least}")
    return value


def _check_prompts(X: Tensor, y: Tensor, d: int) -> None:
    if X.ndim != 3 or X.shape[-1] != d or y.shape != X.shape[:2] or X.shape[1] == 0:
        raise InputError("X and y", got=f"shapes {tuple(X.shape)} and {tuple(y.shape)}", allowed=f"(prompts, n, {d}) and (prompts, n)")


class LinearSelfAttentionCoT(nn.Module):
    """One linear self-attention layer Z + V Z Z^T W Z / n, called once per thought.

    V and W are (2 d + 2, 2 d + 2). With V_{w,x} = -step Gamma, W_{x,w} = I, W_{y,flag} = -1 and zeros elsewhere the new thought is
    w + step Gamma X^T (y - X w) / n, and since thoughts have x = 0 older ones contribute nothing.

    Source: construction of arXiv 2502.21212, with a matrix Gamma.

    >>> model = LinearSelfAttentionCoT.from_gamma(0.5 * torch.eye(2))
    >>> model(torch.eye(2)[None], torch.ones(1, 2), 2)[0].tolist()
    [[0.0, 0.0], [0.25, 0.25], [0.4375, 0.4375]]
    """

    def __init__(self, d: int):
        super().__init__()
        self.d = _size("d", d)
        self.V = nn.Parameter(torch.zeros(2 * d + 2, 2 * d + 2))
        self.W = nn.Parameter(torch.zeros(2 * d + 2, 2 * d + 2))

    @property
    def blocks(self) -> dict[str, slice]:
        """Where x, y, w and flag stand in a token."""
        d = self.d
        return {"x": slice(0, d), "y": slice(d, d + 1), "w": slice(d + 1, 2 * d + 1), "flag": slice(2 * d + 1, 2 * d + 2)}

    @classmethod
    def from_gamma(cls, gamma: Tensor, *, step: float = 1.0) -> LinearSelfAttentionCoT:
        """The layer whose step is w + step Gamma X^T (y - X w) / n; gamma (d, d). Raises: InputError for another shape."""
        gamma = torch.as_tensor(gamma)
        if gamma.ndim != 2 or gamma.shape[0] != gamma.shape[1]:
            raise InputError("gamma", got=f"shape {tuple(gamma.shape)}", allowed="(d, d)")
        model = cls(len(gamma)).to(gamma.dtype)
        at = model.blocks
        with torch.no_grad():
            model.V[at["w"], at["x"]] = -step * gamma
            model.W[at["x"], at["w"]] = torch.eye(model.d, dtype=gamma.dtype)
            model.W[at["y"], at["flag"]] = -1.0
        return model

    @classmethod
    def random(cls, d: int, *, seed: int, scale: float = 0.02, nudge: float = 0.1) -> LinearSelfAttentionCoT:
        """Random weights of size ``scale``; ``nudge`` > 0 adds the blocks of ``from_gamma`` with Gamma = nudge I, as a head start."""
        model = cls(d)
        noise = torch.Generator().manual_seed(seed)
        start = cls.from_gamma(nudge * torch.eye(d)) if nudge > 0 else model
        with torch.no_grad():
            for name in ("V", "W"):
                weight = getattr(model, name)
                weight.copy_(getattr(start, name) + scale * torch.randn(weight.shape, generator=noise))
        return model

    @property
    def gamma(self) -> Tensor:
        """(d, d) learned preconditioner: -V_{w,x} W_{x,w}."""
        at = self.blocks
        return -(self.V[at["w"], at["x"]] @ self.W[at["x"], at["w"]]).detach()

    def encode(self, X: Tensor, y: Tensor) -> tuple[Tensor, int]:
        """Z Z^T / n of the examples (prompts, 2 d + 2, 2 d + 2), and n."""
        _check_prompts(X, y, self.d)
        z = F.pad(torch.cat([X, y[..., None]], -1), (0, self.d + 1))
        return z.mT @ z / X.shape[1], X.shape[1]

    def token(self, w: Tensor) -> Tensor:
        """The thought token of w: (..., d) -> (..., 2 d + 2)."""
        return torch.cat([w.new_zeros(*w.shape[:-1], self.d + 1), w, w.new_ones(*w.shape[:-1], 1)], -1)

    def refine(self, context: tuple[Tensor, int], w: Tensor) -> Tensor:
        """One step from thought w (prompts, d), the only thought in the context."""
        memory, n = context
        z = self.token(w)
        query = z @ self.W.T
        read = (memory @ query[..., None])[..., 0] + z * (z * query).sum(-1, keepdim=True) / n
        return w + read @ self.V[self.blocks["w"]].T

    def forward(self, X: Tensor, y: Tensor, depth: int, *, append: bool = True) -> Tensor:
        """All thoughts (prompts, depth + 1, d) from X (prompts, n, d), y (prompts, n), starting at w = 0.

        ``append`` keeps every thought in the context, as the paper does; otherwise only the last one stays. Raises: InputError for other shapes.
        """
        memory, n = self.encode(X, y)
        w = X.new_zeros(len(X), self.d)
        path = [w]
        for _ in range(_size("depth", depth, 0)):
            w = self.refine((memory, n), w)
            if append:
                z = self.token(path[-1])
                memory = memory + z[..., :, None] * z[..., None, :] / n
            path.append(w)
        return torch.stack(path, 1)


class _Block(nn.Module):
    """Softmax attention and a two-layer perceptron, both with a residual and a norm before."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(self._split(part) for part in self.kv(self.norm(tokens)).chunk(2, -1))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, tokens: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
        read = F.scaled_dot_product_attention(self._split(self.q(self.norm(tokens))), *keys)
        tokens = tokens + self.out(read.transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.norm2(tokens))


class SoftmaxCoT(nn.Module):
    """A small transformer with softmax attention: a thought token reads the examples and adds a correction to its weights.

    Examples attend to each other, the thought to the examples and itself; so examples are encoded once for all steps.

    >>> model = SoftmaxCoT(3, seed=0)
    >>> model(torch.zeros(2, 6, 3), torch.zeros(2, 6), 4).shape
    torch.Size([2, 5, 3])
    """

    def __init__(self, d: int, *, width: int = 64, layers: int = 2, heads: int = 4, seed: int = 0):
        super().__init__()
        self.d = _size("d", d)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.example, self.thought = nn.Linear(d + 1, width), nn.Linear(d, width)
            self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
            self.norm, self.read = nn.LayerNorm(width), nn.Linear(width, d)
        # The first step starts from "no correction".
        nn.init.zeros_(self.read.weight)
        nn.init.zeros_(self.read.bias)

    def encode(self, X: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the examples in every layer."""
        _check_prompts(X, y, self.d)
        tokens, out = self.example(torch.cat([X, y[..., None]], -1)), []
        for block in self.blocks:
            out.append(block.keys(tokens))
            if len(out) < len(self.blocks):
                tokens = block(tokens, out[-1])
        return out

    def refine(self, context: list[tuple[Tensor, Tensor]], w: Tensor) -> Tensor:
        """One step from thought w (prompts, d)."""
        token = self.thought(w)[:, None]
        for block, (keys, values) in zip(self.blocks, context, strict=True):
            own_keys, own_values = block.keys(token)
            token = block(token, (torch.cat([keys, own_keys], 2), torch.cat([values, own_values], 2)))
        return w + self.read(self.norm(token[:, 0]))

    def forward(self, X: Tensor, y: Tensor, depth: int) -> Tensor:
        """All thoughts (prompts, depth + 1, d), each with only the one before it in the context."""
        context, w = self.encode(X, y), X.new_zeros(len(X), self.d)
        path = [w]
        for _ in range(_size("depth", depth, 0)):
            w = self.refine(context, w)
            path.append(w)
        return torch.stack(path, 1)


Sampler = Callable[[int, torch.Generator], tuple[Tensor, Tensor, Tensor]]


def prompt_sampler(d: int, n: int, *, noise: float = 0.0, prompts: int | None = None, seed: int = 0) -> Sampler:
    """A function (batch, generator) -> X, y, w: fresh prompts, or draws from ``prompts`` fixed ones that depend on ``seed`` alone.

    >>> X, y, w = prompt_sampler(3, 6)(2, torch.Generator().manual_seed(0))
    >>> bool(torch.allclose(y, (X @ w[..., None])[..., 0]))
    True
    """

    def fresh(batch: int, generator: torch.Generator):
        w = torch.randn(batch, d, generator=generator) / d**0.5
        X = torch.randn(batch, n, d, generator=generator)
        return X, (X @ w[..., None])[..., 0] + noise**0.5 * torch.randn(batch, n, generator=generator), w

    if prompts is None:
        return fresh
    fixed = fresh(_size("prompts", prompts), torch.Generator().manual_seed(seed))

    def drawn(batch: int, generator: torch.Generator):
        rows = torch.randint(prompts, (batch,), generator=generator)
        return tuple(part[rows] for part in fixed)

    return drawn


def train_cot(
    model: nn.Module, sampler: Sampler, *, seed: int, unroll: int = 3, steps: int = 2500, batch: int = 256, lr: float = 3e-3, zero_share: float = 0.4,
    spread: float = 1.0, every: int = 50, log: Callable[[str], None] | None = None,
) -> list[tuple[int, float]]:
    """Train ``model`` in place to move its thought to w: squared error after each of ``unroll`` steps, no gradient between steps.

    Args:
        zero_share: chains that start at w = 0; the others start at w - u N(0, I/d), u uniform in (0, spread). 1.0 adds no fresh randomness to
            a fixed set of prompts.
        lr: of Adam, gradients cut at length one; a sixth of it in the last quarter.

    Returns: (step, loss averaged over the unrolled steps and since the last entry) every ``every`` steps.
    Raises: InputError for prompts that do not fit the model, or counts below one.

    >>> model = LinearSelfAttentionCoT.random(2, seed=0)
    >>> history = train_cot(model, prompt_sampler(2, 8), seed=0, steps=60, batch=32, every=30)
    >>> history[1][1] < history[0][1]
    True
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    history, running = [], []
    for step in range(1, _size("steps", steps) + 1):
        optimizer.param_groups[0]["lr"] = lr if step <= 0.75 * steps else lr / 6
        X, y, target = sampler(batch, generator)
        error = torch.randn(target.shape, generator=generator) / model.d**0.5 * torch.rand(batch, 1, generator=generator) * spread
        w = torch.where(torch.rand(batch, 1, generator=generator) < zero_share, 0.0, target - error)
        context, losses = model.encode(X, y), []
        for _ in range(_size("unroll", unroll)):
            w = model.refine(context, w.detach())
            losses.append(((w - target) ** 2).sum(-1).mean())
        optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running.append(float(sum(losses).detach()) / unroll)
        if step % every == 0:
            history.append((step, sum(running) / len(running)))
            running = []
            if log is not None:
                log(f"step {step}: loss {history[-1][1]:.4f}")
    return history


def train_gamma(
    model: LinearSelfAttentionCoT, X: Tensor, y: Tensor, w: Tensor, *, steps: int = 2000, tolerance: float = 1e-6,
) -> list[float]:
    """Train V_{w,x} alone on fixed prompts from w = 0 by gradient descent with momentum, until the loss gains less than ``tolerance`` of itself.

    All other weights stay: this is the reduced model, pre-trained by descent instead of a closed form. Returns the loss before every step.

    >>> X, y, w = prompt_sampler(2, 8)(16, torch.Generator().manual_seed(0))
    >>> losses = train_gamma(LinearSelfAttentionCoT.from_gamma(torch.zeros(2, 2)), X, y, w)
    >>> losses[-1] < losses[0]
    True
    """
    context, at = model.encode(X, y), model.blocks
    start, history = w.new_zeros(w.shape), []
    with torch.no_grad():
        phi = (context[0] @ (model.token(start) @ model.W.T)[..., None])[..., at["x"], 0]
        largest = torch.linalg.matrix_norm(phi, ord=2) ** 2 / len(phi)
    velocity = torch.zeros_like(model.V[at["w"], at["x"]])
    for _ in range(_size("steps", steps)):
        loss = ((model.refine(context, start) - w) ** 2).sum(-1).mean()
        (gradient,) = torch.autograd.grad(loss, model.V)
        with torch.no_grad():
            velocity = 0.9 * velocity - gradient[at["w"], at["x"]] / (2 * largest)
            model.V[at["w"], at["x"]] += velocity
        history.append(float(loss.detach()))
        # Momentum can swing, so the gain is judged over fifty steps.
        if len(history) > 50 and abs(history[-51] - history[-1]) < tolerance * history[-1]:
            break
    return history


def build(config: dict) -> LinearSelfAttentionCoT:
    """The module that config.json of a stored layer describes."""
    return LinearSelfAttentionCoT(config["d"])
