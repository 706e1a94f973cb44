"""Depth of chain of thought, measured: recordings cot-depth-sim (reduced model) and cot-depth-attention (trained attention).

cot-depth-sim is a simulation of the reduced model of our derivation (no network is trained by gradients). Its rows:

- ``agreement``: seven settings of (alpha, alpha_test, tau, noise, step) at d = 100, 200 and 400, depth 12, against the formula;
- ``tau``: tau = 1 + f (tau_c - 1) at alpha = 2 and 0.5 without noise, depth 20, d = 400: which side of the transition rises or falls;
- ``rich``: tau 1.5 or 20 with alpha 0.5 or 3, depth 20, d = 400;
- ``ridge``: penalty in pre-training by tau, below and above one, alpha 2, no noise, d = 250, depth 12;
- ``ablation``: Gamma as learned, only its mean diagonal, its symmetric part, or unlimited pre-training, alpha 2, noise 0.1, d = 200, depth 20;
- ``best``: where the best depth lies: alpha 2 by noise (tau = inf), alpha 1 by tau (no noise), d = 400, depth 30;
- ``larger``: the two ``agreement`` settings with Lambda > 0.97 at d = 800, added after the others had been seen, since these two differ from the
  formula at d = 400: does the difference shrink?

Format: ``rows``: a list of {key, group, setting: arguments of ``simulate``, draws, contexts, seconds, error and noise: (draws, contexts, depth + 1),
ols and ridge: (draws, contexts), gd: (draws, contexts, depth + 1)}. Contexts of one draw share one pre-trained Gamma: the draw is the independent
unit. Rows share their seeds, so settings of one shape are paired.

Fixed before any row was computed (``larger`` has no criterion): an ``agreement`` row at d = 400 passes when at every depth up to 8 the 95 % t
interval over draws of the mean error contains the formula or the two differ by at most 3 % (the latter for Lambda < 0.97); over these depths the
largest relative difference at d = 400 is smaller than at d = 100; in ``tau`` at alpha 2 the error falls at depth 12 for tau >= 5 and rises there for
tau <= 2; in ``rich`` the corner (alpha 0.5, tau 20) ends within 3 % of its limit, (3, 20) is below 5e-3 at depth 12, both tau = 1.5 corners end
above their error at depth 1.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

SEED, DRAWS, CONTEXTS = 2026, 8, 4
AGREEMENT = (
    {"alpha": 2.0, "alpha_test": 4.0, "tau": 3.0, "noise": 0.1},
    {"alpha": 0.5, "tau": 4.0, "noise": 0.25, "step": 0.5},
    {"alpha": 4.0, "alpha_test": 1.5, "tau": 6.0, "noise": 0.1, "step": 0.6},
    {"alpha": 3.0, "tau": 1.5, "step": 0.5},
    {"alpha": 2.0, "tau": 4.0},
    {"alpha": 2.0, "tau": 4.0, "noise": 0.5},
    {"alpha": 2.0, "tau": 1.6},
)


def rows() -> list[dict]:
    """Every row of cot-depth-sim: its group and the arguments of ``simulate``."""
    from nbkit.methods.cot_depth import CoTDepthTheory

    out = [{"group": "agreement", "setting": {**one, "d": d, "depth": 12}} for one in AGREEMENT for d in (100, 200, 400)]
    for alpha in (2.0, 0.5):
        critical = CoTDepthTheory(alpha, math.inf).critical_tau()
        factors = (0.3, 0.4, 0.5, 0.7, 1.0, 1.6, 2.0, 3.0)
        out += [{"group": "tau", "setting": {"alpha": alpha, "tau": round(1 + f * (critical - 1), 6), "d": 400, "depth": 20}} for f in factors]
    out += [{"group": "rich", "setting": {"alpha": a, "tau": t, "d": 400, "depth": 20}} for a in (0.5, 3.0) for t in (1.5, 20.0)]
    for tau in (0.5, 0.8, 0.95, 1.05, 1.2, 2.0, 4.0):
        out += [{"group": "ridge", "setting": {"alpha": 2.0, "tau": tau, "ridge": r, "d": 250, "depth": 12}} for r in (0.0, 0.1, 0.5)]
    base = {"alpha": 2.0, "noise": 0.1, "d": 200, "depth": 20}
    for tau in (2.0, 3.0, 4.0, 8.0, 20.0):
        out += [{"group": "ablation", "setting": {**base, "tau": tau, "gamma": kind}} for kind in ("learned", "scalar", "symmetric")]
    out.append({"group": "ablation", "setting": {**base, "tau": "inf"}})
    out += [{"group": "best", "setting": {"alpha": 2.0, "tau": "inf", "noise": s, "d": 400, "depth": 30}} for s in (0.3, 0.1, 0.03)]
    out += [{"group": "best", "setting": {"alpha": 1.0, "tau": tau, "d": 400, "depth": 30}} for tau in (2.0, 3.0, 4.0)]
    out += [{"group": "larger", "setting": {"alpha": 2.0, "tau": tau, "d": 800, "depth": 12}} for tau in (4.0, 1.6)]
    return out


def row_key(row: dict) -> str:
    """Stable name of a row."""
    return row["group"] + ":" + json.dumps(row["setting"], sort_keys=True)


def _short(values) -> list:
    """Six significant digits are far below the spread between draws."""
    import numpy as np

    return np.asarray([float(f"{x:.6g}") for x in np.ravel(values)]).reshape(np.shape(values)).tolist()


def measure(row: dict) -> dict:
    """Simulate one row."""
    from nbkit.methods.cot_depth import simulate

    start = time.perf_counter()
    setting = {**row["setting"], "tau": float(row["setting"]["tau"])}
    run = simulate(**setting, draws=DRAWS, contexts=CONTEXTS, seed=SEED)
    numbers = {"error": run.error, "noise": run.noise, **run.baselines}
    return {
        **row, "key": row_key(row), "draws": DRAWS, "contexts": CONTEXTS, **{key: _short(value) for key, value in numbers.items()},
        "seconds": round(time.perf_counter() - start, 2),
    }


def run_sim(work_dir: Path, out_dir: Path, log) -> None:
    """Simulate all rows and write data/recordings/cot-depth-sim."""
    from nbkit import parallel
    from nbkit.loaders import save_recording

    grid = rows()
    log(f"{len(grid)} rows of {DRAWS} draws by {CONTEXTS} contexts")
    done = parallel.map(measure, grid, executor="serial", key=row_key, resume=work_dir / "rows.jsonl", desc="cot-depth-sim")
    save_recording(
        "cot-depth-sim",
        {"seed": SEED, "draws": DRAWS, "contexts": CONTEXTS, "rows": done},
        {
            "recipe": "cot-depth-sim", "seed": SEED, "licence": "MIT",
            "summary": "error by chain-of-thought depth in the reduced model, simulated at d = 100 to 800",
            "kind": "simulation of the reduced model: least-squares pre-training on sampled prompts, errors averaged exactly over tasks and noise",
        },
    )
