"""Training a drafter by unrolling it (training-time test) against the target's own distribution."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nbkit.errors import InputError

from .drafter import Drafter
from .features import frequent_tokens, target_features


class Batch(NamedTuple):
    """Training material with the target's part computed beforehand.

    Attributes:
        tokens: (batch, N) ids. feats: (batch, N, 3d) auxiliary streams (None suffices for an MTP head). last: (batch, N, d) final-normed states.
        mask: (batch, N), True at tokens that count as predictions (an assistant's words), or None for all.
        greedy: (batch, N) the target's best next token at every position, or None. With a reduced vocabulary positions whose best token the
            drafter cannot propose are then left out, as EAGLE-3 does; without it they are trained on the distribution within the vocabulary.
    """

    tokens: Tensor
    feats: Tensor | None
    last: Tensor
    mask: Tensor | None = None
    greedy: Tensor | None = None


@dataclass(frozen=True)
class FitResult:
    """What happened during `fit_drafter`.

    Attributes:
        losses: weighted loss per step. accuracy: per step, the share of positions where the drafter's best token is the target's, one number a
            unrolled step. seconds: total, over all resumed calls. tokens: (text positions seen) batch * N summed over steps.
    """

    losses: list[float] = field(default_factory=list)
    accuracy: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0


class TTTLoss(NamedTuple):
    """Loss (a scalar with gradient), its unweighted parts per step, the agreement with the target's best token per step, and counted positions."""

    loss: Tensor
    parts: list[float]
    accuracy: list[float]
    counted: list[int]


def ttt_loss(drafter: Drafter, batch: Batch, *, ttt: int = 4, step_decay: float = 0.8) -> TTTLoss:
    """Sum over unrolled steps j of step_decay^(j-1) * mean cross-entropy from the target's distribution at t + j to the drafter's.

    Step j of start t predicts x_{t+j+1}; it counts where that token exists in the text and ``batch.mask`` holds it.

    Raises: InputError for a depth below 1, texts too short for it, or a mask without any token left.

    Source: arXiv 2503.01840, section 3.2; weights 0.8 as in EAGLE-3's public training code.
    """
    tokens, n = batch.tokens, batch.tokens.shape[1]
    if n < ttt + 2:
        raise InputError("tokens", got=f"{n} per text", allowed=f">= {ttt + 2} for ttt={ttt}")
    counts = torch.ones_like(tokens, dtype=torch.bool) if batch.mask is None else batch.mask.bool()
    weight, bias = drafter.head
    with torch.no_grad():
        # counted[i]: the prediction made at position i is trained on.
        counted = F.pad(counts[:, 1:], (0, 1))
        if batch.greedy is not None and drafter.cfg.draft_vocab is not None:
            counted = counted & drafter.t2d[batch.greedy.long()]
        counted[:, 0] = False
        teacher_at = counted.flatten().nonzero()[:, 0]
        if not len(teacher_at):
            raise InputError("mask", got="no token to train on", allowed="at least one assistant token per batch")
        teacher = F.linear(batch.last.flatten(0, 1)[teacher_at].to(weight.dtype), weight, bias).float()
        best, p = teacher.argmax(-1), teacher.softmax(-1)
        row_of = torch.full((tokens.numel(),), -1, dtype=torch.int64, device=tokens.device)
        row_of[teacher_at] = torch.arange(len(teacher_at), device=tokens.device)
        row_of = row_of.view(tokens.shape)
    feats = drafter.pick_features(batch.feats, batch.last)
    starts = _needed(counted, ttt)
    places = torch.arange(n - 1, device=tokens.device).expand(len(tokens), -1) if starts is None else starts
    row_of = F.pad(row_of, (0, ttt), value=-1)
    total, parts, accuracy, sizes = 0.0, [], [], []
    for j, step in enumerate(drafter.ttt(tokens, feats, ttt, starts=starts, logits=False), 1):
        # Start t predicts at position t + j; starts without that position drop out.
        rows = row_of.gather(1, places + j)
        used = rows >= 0
        index = rows[used]
        sizes.append(len(index))
        if not len(index):
            parts.append(0.0)
            accuracy.append(float("nan"))
            continue
        logits = drafter.logits(step.normed[used]).float()
        loss = -(p[index] * logits.log_softmax(-1)).sum(-1).mean()
        total = total + step_decay ** (j - 1) * loss
        parts.append(loss.item())
        accuracy.append((logits.argmax(-1) == best[index]).float().mean().item())
    return TTTLoss(total, parts, accuracy, sizes)


def _needed(counted: Tensor, ttt: int) -> Tensor | None:
    """The chain starts (batch, S) of which some step counts, filled up to the longest row; None where that is nearly all of them."""
    pairs = counted.shape[1] - 1
    wanted = torch.stack([F.pad(counted[:, j:], (0, j - 1)) for j in range(1, ttt + 1)]).any(0)
    most = int(wanted.sum(1).max())
    if most > 0.9 * pairs:
        return None
    return (~wanted).long().argsort(dim=1, stable=True)[:, :most]


def fit_drafter(
    drafter: Drafter, model, data: Sequence | Tensor | Callable[[int], Batch], *, ttt: int = 4, step_decay: float = 0.8, steps: int = 1000,
    batch: int = 8, lr: float = 1.5e-4, warmup: float = 0.05, weight_decay: float = 0.0, clip: float = 1.0, seed: int = 0, mask=None,
    tokenizer=None, bf16: bool = False, log: Callable[[str], None] | None = None, checkpoint: str | Path | None = None, every: int = 50,
) -> FitResult:
    """Train ``drafter`` in place on the target's own text with AdamW and a cosine rate.

    Args:
        data: texts (with ``tokenizer``), equally long id rows (a (rows, N) tensor or a list of tensors), a list of `Batch`, or a function
            step -> `Batch`. Of rows and texts the target's features are computed on the way; a `Batch` brings them.
        ttt: unrolled steps. step_decay: weight of each further step. batch: rows per step (of texts and rows). warmup: share of steps it rises.
        mask: (rows, N), True at tokens that count, only with id rows.
        bf16: matrix products in bfloat16 by autocast (about twice as fast on CPUs that have it); weights, norms, softmax and loss stay float32.
        log: receives a line every ``every`` steps. checkpoint: file that is written as often and from which a later call goes on.

    Raises: InputError for depth 0, unusable data, or an unbound drafter.

    Source: arXiv 2503.01840, section 3.2; AdamW at 1.5e-4 as in arXiv 2605.09992.
    """
    for name, value in (("ttt", ttt), ("steps", steps), ("batch", batch), ("every", every)):
        if not isinstance(value, int) or value < 1:
            raise InputError(name, got=value, allowed="an integer >= 1")
    batch_at = _batches(drafter, model, data, batch, seed, mask, tokenizer)
    if model is not None and drafter._target is None:
        drafter.bind(model)
    drafter.head  # noqa: B018 (raises here rather than in the middle of a step)
    device = drafter.fc.weight.device
    decay = [p for p in drafter.parameters() if p.ndim == 2]
    other = [p for p in drafter.parameters() if p.ndim != 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    result, first = FitResult(), 0
    settings = {"ttt": ttt, "step_decay": step_decay, "steps": steps, "batch": batch, "lr": lr, "seed": seed, "cfg": drafter.cfg.to_dict()}
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.is_file():
        saved = torch.load(path, weights_only=True)
        if saved["settings"] != settings:
            differ = sorted(key for key in settings if saved["settings"].get(key) != settings[key])
            raise InputError("checkpoint", got=f"another {', '.join(differ)}", allowed="a checkpoint of the same run", hint=f"remove {path.name}")
        drafter.load_state_dict(saved["drafter"])
        optimizer.load_state_dict(saved["optimizer"])
        first, result = saved["step"], FitResult(**saved["result"])
    start, before, seen = time.perf_counter(), result.seconds, result.tokens
    was_training = drafter.training
    drafter.train()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * _rate(step, steps, warmup)
        material = batch_at(step)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            out = ttt_loss(drafter, material, ttt=ttt, step_decay=step_decay)
        if not math.isfinite(float(out.loss.detach())):
            raise InputError("training", got=f"a loss of {float(out.loss.detach())} in step {step}", allowed="a finite loss", hint="a lower lr")
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), clip)
        optimizer.step()
        seen += material.tokens.numel()
        result.losses.append(float(out.loss.detach()))
        result.accuracy.append(out.accuracy)
        done = step + 1
        if done % every == 0 or done == steps:
            result = FitResult(result.losses, result.accuracy, before + time.perf_counter() - start, seen)
            if log is not None:
                lately = result.losses[-every:]
                agree = " ".join(f"{a:.3f}" for a in _mean_rows(result.accuracy[-every:]))
                log(f"step {done}/{steps} loss {sum(lately) / len(lately):.4f} agreement {agree} {result.seconds:.0f} s")
            if path is not None:
                _write(path, {"drafter": drafter.state_dict(), "optimizer": optimizer.state_dict(), "step": done, "settings": settings,
                              "result": dict(vars(result))})
    drafter.train(was_training)
    return result


def _rate(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: linear rise, then half a cosine down to a twentieth."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _mean_rows(rows: list[list[float]]) -> list[float]:
    return torch.tensor(rows).nanmean(0).tolist()


def _write(path: Path, state: dict) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def _batches(drafter: Drafter, model, data, batch: int, seed: int, mask, tokenizer) -> Callable[[int], Batch]:
    """A function step -> Batch for any of the accepted kinds of data; rows are drawn in seeded passes without replacement."""
    if callable(data):
        return data
    items = list(data) if not isinstance(data, Tensor) else data
    if len(items) == 0:
        raise InputError("data", got="nothing", allowed="texts, id rows, batches, or a function step -> Batch")
    if not isinstance(items, Tensor) and isinstance(items[0], tuple):
        ready = [Batch(*one) for one in items]
        return lambda step: ready[_draw(seed, step, 1, len(ready))[0]]
    if not isinstance(items, Tensor) and isinstance(items[0], str):
        items = _tokenize(items, tokenizer)
    if not isinstance(items, Tensor):
        lengths = {len(row) for row in items}
        if len(lengths) != 1:
            raise InputError("data", got=f"rows of {min(lengths)} to {max(lengths)} tokens", allowed="rows of one length", hint="cut or pack them")
        items = torch.stack([torch.as_tensor(row) for row in items])
    if items.ndim != 2:
        raise InputError("data", got=tuple(items.shape), allowed="(rows, N) token ids")
    if mask is not None and tuple(mask.shape) != tuple(items.shape):
        raise InputError("mask", got=tuple(mask.shape), allowed=tuple(items.shape))
    if model is None:
        raise InputError("model", got=None, allowed="the target, whose features the rows need", hint="or pass batches with features")
    if not drafter.vocab_chosen:
        drafter.set_vocab(frequent_tokens(items, drafter.cfg.draft_vocab, drafter.cfg.vocab_size))

    def make(step: int) -> Batch:
        rows = _draw(seed, step, min(batch, len(items)), len(items))
        ids = items[rows].long()
        reduced = drafter.cfg.draft_vocab is not None
        found = target_features(model, ids, drafter.cfg.aux_layers, logits=reduced)
        return Batch(ids, found.aux, found.last, None if mask is None else mask[rows], found.logits.argmax(-1) if reduced else None)

    return make


def _draw(seed: int, step: int, size: int, total: int) -> list[int]:
    """Rows of step ``step``: consecutive slices of one permutation after another, a function of seed and step alone."""
    places = (divmod(at, total) for at in range(step * size, (step + 1) * size))
    return [_permutation(1_000_003 * seed + epoch, total)[place] for epoch, place in places]


@lru_cache(maxsize=4)
def _permutation(seed: int, total: int) -> list[int]:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()


def _tokenize(texts: list[str], tokenizer, length: int = 256) -> Tensor:
    """Texts joined and cut into rows of at most ``length`` tokens."""
    if tokenizer is None:
        raise InputError("tokenizer", got=None, allowed="the target's tokenizer, because data are texts")
    ids = torch.tensor([i for text in texts for i in tokenizer(text)["input_ids"]])
    length = min(length, len(ids))
    return ids[: len(ids) // length * length].view(-1, length)
