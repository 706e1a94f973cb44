"""Depth of chain of thought in trained attention: recordings cot-depth-attention and cot-depth-softmax, model cot-lsa.

Small networks trained from random weights on sampled regression prompts ("trained toys"); none starts at a closed-form optimum. Groups of rows,
the first two in cot-depth-attention, the third in cot-depth-softmax:

- ``linear``: one linear attention layer, d = 16, n = 64, no noise, fresh prompts, three seeds with a nudge towards the block structure and one
  without; evaluated with one thought in the context (``markov``) and with all thoughts appended (``append``);
- ``descent``: Gamma alone trained by gradient descent on tau * d fixed prompts, d = 64, n = 128, tau 2 and 4, three draws, stopped after 10, 30
  or 100 steps or at convergence, against the closed form in the same contexts;
- ``softmax``: a two-layer softmax transformer of width 64, d = 5, three seeds, chains that start at w = 0 (``zero``); context n = 5, 10, 20 with
  unlimited prompts, and n = 10 with 64 fixed prompts. Planned too, and cut for lack of computing time before any of them ran: 512 fixed prompts, and
  chains of which six in ten start near the answer (``mixed``). When they were cut, most rows of the other cells and two with 64 prompts were known.

Format: ``rows``: a list of {key, group, setting, seconds, loss: (step, loss) pairs, mean and median: error at depth 0..12 over the test prompts,
sem: standard error of the mean}; linear rows have these three under ``markov`` and ``append``, and ``gamma``: {diagonal, off_diagonal: root mean
square}; descent rows have ``closed`` and ``trained``: {steps: error at depth 0..12 averaged exactly over tasks, mean of four contexts}.
``reference`` (cot-depth-attention): the reduced model Gamma = n / (n + d + 1) I on the test prompts of ``linear`` {mean, median, sem}; ``test``:
{prompts, seed}: all rows of one shape (d, n) see the same test prompts.

Fixed before any row was computed: ``linear`` follows the reduced model if for every nudged seed, one thought in the context, the rank correlation of
the mean curves over depth 1..8 exceeds 0.9 and |log ratio| < 0.35 wherever the reference exceeds 0.01. ``descent`` agrees if at convergence every
depth up to 8 is within 1 % of the closed form. ``softmax``, zero starts: (shape) for n = 10 with unlimited prompts the best depth is below 12 in all
three seeds; (context) best depths averaged over seeds do not fall from n = 5 to 10 to 20 and rise overall; (prompts) the same from 64 to unlimited
prompts (worded for 64, 512 and unlimited at first; 512 left the wording when it was cut). Looked at before: a linear layer of seed 0 after 300
steps (follows the reference), and softmax, n = 10, unlimited prompts, seed 0, after 600 steps (rises after depth 3 with zero starts, does not
rise up to depth 12 with mixed ones).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

DEPTH, TEST, TEST_SEED = 12, 2000, 777
LINEAR = {"d": 16, "n": 64, "steps": 2500, "batch": 256}
DESCENT = {"d": 64, "n": 128, "contexts": 4}
SOFTMAX = {"d": 5, "steps": 1500, "batch": 64, "lr": 1e-3}


def attention_rows() -> list[dict]:
    """Every row of cot-depth-attention: its group and setting."""
    out = [{"group": "linear", "setting": {"seed": seed, "nudge": 0.1}} for seed in range(3)]
    out.append({"group": "linear", "setting": {"seed": 0, "nudge": 0.0}})
    out += [{"group": "descent", "setting": {"tau": tau, "seed": seed}} for tau in (2.0, 4.0) for seed in range(3)]
    return out


def softmax_rows() -> list[dict]:
    """Every row of cot-depth-softmax."""
    cells = [(5, None, "zero"), (10, None, "zero"), (20, None, "zero"), (10, 64, "zero")]
    return [
        {"group": "softmax", "setting": {"n": n, "prompts": prompts, "start": start, "seed": seed}}
        for n, prompts, start in cells for seed in range(3)
    ]


def attention_key(row: dict) -> str:
    """Stable name of a row."""
    return row["group"] + ":" + json.dumps(row["setting"], sort_keys=True)


def _curve(path, w) -> dict:
    """Mean, standard error and median over prompts of the squared error at every depth."""
    error = ((path.double() - w.double()[:, None]) ** 2).sum(-1)
    numbers = {"mean": error.mean(0), "sem": error.std(0) / len(error) ** 0.5, "median": error.median(0).values}
    return {key: [float(f"{x:.5g}") for x in value.tolist()] for key, value in numbers.items()}


def held_out(d: int, n: int):
    """The prompts on which all networks of one shape are tested."""
    import torch

    from nbkit.methods.cot_depth import prompt_sampler

    return prompt_sampler(d, n)(TEST, torch.Generator().manual_seed(TEST_SEED))


def train_linear(seed: int, nudge: float):
    """The linear layer of one seed and its history."""
    from nbkit.methods.cot_depth import LinearSelfAttentionCoT, prompt_sampler, train_cot

    model = LinearSelfAttentionCoT.random(LINEAR["d"], seed=seed, nudge=nudge)
    sampler = prompt_sampler(LINEAR["d"], LINEAR["n"])
    return model, train_cot(model, sampler, seed=seed, steps=LINEAR["steps"], batch=LINEAR["batch"], every=100)


def _linear(setting: dict, work_dir: Path) -> dict:
    import torch
    from safetensors.torch import save_file

    model, history = train_linear(**setting)
    X, y, w = held_out(LINEAR["d"], LINEAR["n"])
    with torch.inference_mode():
        curves = {name: _curve(model(X, y, DEPTH, append=name == "append"), w) for name in ("markov", "append")}
    gamma = model.gamma
    off = gamma - torch.diag(gamma.diagonal())
    if setting == {"seed": 0, "nudge": 0.1}:
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, work_dir / "linear.safetensors")
    shape = {"diagonal": round(gamma.diagonal().mean().item(), 5), "off_diagonal": round(off.square().mean().sqrt().item(), 5)}
    return {"loss": history, **curves, "gamma": shape}


def _descent(setting: dict) -> dict:
    import numpy as np
    import torch

    from nbkit.methods.cot_depth import LinearSelfAttentionCoT, exact_errors, pretrain, sample_covariance, sample_prompts, train_gamma

    d, n, seed = DESCENT["d"], DESCENT["n"], setting["seed"]
    X, y, w = sample_prompts(round(setting["tau"] * d), n, d, seed=[seed, 0])
    contexts = [sample_covariance(n, d, seed=[seed, 1 + i]) for i in range(DESCENT["contexts"])]

    def curve(gamma):
        return [float(f"{x:.6g}") for x in np.mean([exact_errors(gamma, s, DEPTH, n=n)[0] for s in contexts], axis=0)]

    trained, taken = {}, {}
    for steps in (10, 30, 100, 3000):
        model = LinearSelfAttentionCoT.from_gamma(torch.zeros(d, d, dtype=torch.float64))
        history = train_gamma(model, *(torch.from_numpy(part) for part in (X, y, w)), steps=steps, tolerance=1e-9)
        name = "converged" if steps == 3000 else str(steps)
        trained[name], taken[name] = curve(model.gamma.numpy()), len(history)
    closed = curve(pretrain(np.einsum("pnd,pn->pd", X, y) / n, w))
    return {"closed": closed, "trained": trained, "steps": taken}


def _softmax(setting: dict) -> dict:
    import torch

    from nbkit.methods.cot_depth import SoftmaxCoT, prompt_sampler, train_cot

    d, n, seed = SOFTMAX["d"], setting["n"], setting["seed"]
    model = SoftmaxCoT(d, seed=seed)
    share = 1.0 if setting["start"] == "zero" else 0.4
    sampler = prompt_sampler(d, n, prompts=setting["prompts"], seed=1000 + seed)
    options = {"steps": SOFTMAX["steps"], "batch": SOFTMAX["batch"], "lr": SOFTMAX["lr"], "zero_share": share}
    history = train_cot(model, sampler, seed=seed, every=100, **options)
    X, y, w = held_out(d, n)
    with torch.inference_mode():
        return {"loss": history, **_curve(model(X, y, DEPTH), w)}


def measure_attention(row: dict, *, work_dir: str) -> dict:
    """Train and test one row."""
    start = time.perf_counter()
    if row["group"] == "linear":
        found = _linear(row["setting"], Path(work_dir))
    else:
        found = {"descent": _descent, "softmax": _softmax}[row["group"]](row["setting"])
    return {**row, "key": attention_key(row), **found, "seconds": round(time.perf_counter() - start, 1)}


def _train(rows: list[dict], name: str, work_dir: Path, log) -> list[dict]:
    from functools import partial

    import torch

    from nbkit import parallel

    torch.set_num_threads(1)
    log(f"{len(rows)} networks")
    measure = partial(measure_attention, work_dir=str(work_dir))
    return parallel.map(measure, rows, executor="serial", key=attention_key, resume=work_dir / "networks.jsonl", desc=name)


KIND = "trained toys: small networks trained from random weights on sampled regression prompts"


def run_attention(work_dir: Path, out_dir: Path, log) -> None:
    """Train the linear layers, write data/recordings/cot-depth-attention and data/models/cot-lsa (linear, seed 0)."""
    import torch
    from safetensors.torch import load_file

    from nbkit.loaders import save_model, save_recording
    from nbkit.methods.cot_depth import LinearSelfAttentionCoT

    done = _train(attention_rows(), "cot-depth-attention", work_dir, log)
    d, n = LINEAR["d"], LINEAR["n"]
    X, y, w = held_out(d, n)
    reduced = LinearSelfAttentionCoT.from_gamma(n / (n + d + 1) * torch.eye(d))
    with torch.inference_mode():
        reference = _curve(reduced(X, y, DEPTH, append=False), w)
    settings = {"linear": LINEAR, "descent": DESCENT}
    save_recording(
        "cot-depth-attention",
        {"depth": DEPTH, "test": {"prompts": TEST, "seed": TEST_SEED}, "settings": settings, "reference": reference, "rows": done},
        {
            "recipe": "cot-depth-attention", "seed": 0, "licence": "MIT", "kind": KIND,
            "summary": "error by chain-of-thought depth of trained linear attention",
        },
    )
    model = LinearSelfAttentionCoT(d)
    model.load_state_dict(load_file(work_dir / "linear.safetensors"))
    first = next(row for row in done if row["setting"] == {"seed": 0, "nudge": 0.1})
    card = {
        "summary": "one linear self-attention layer trained to refine regression weights step by step (d = 16, n = 64)",
        "licence": "MIT", "recipe": "cot-depth-attention", "seed": 0,
        "metrics": {"error_by_depth": first["markov"]["mean"], "gamma": first["gamma"], "steps": LINEAR["steps"]},
        "note": "trained from random weights of size 0.02 with a nudge of 0.1 towards the block structure",
    }
    save_model(model, "cot-lsa", card, config={"d": d})


def run_softmax(work_dir: Path, out_dir: Path, log) -> None:
    """Train the softmax transformers, write data/recordings/cot-depth-softmax."""
    from nbkit.loaders import save_recording

    done = _train(softmax_rows(), "cot-depth-softmax", work_dir, log)
    save_recording(
        "cot-depth-softmax",
        {"depth": DEPTH, "test": {"prompts": TEST, "seed": TEST_SEED}, "settings": {"softmax": SOFTMAX}, "rows": done},
        {
            "recipe": "cot-depth-softmax", "seed": 0, "licence": "MIT", "kind": KIND,
            "summary": "error by chain-of-thought depth of small softmax transformers",
        },
    )
