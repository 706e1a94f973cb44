"""Best chain-of-thought depth by the formula: recording cot-depth-best, a table for a panel whose every point needs a search.

Format: ``alphas``, ``taus`` (the last is "inf"), ``noises`` and ``best`` [alpha][tau][noise]: the best depth up to 200, "inf" when the error falls
forever towards a limit that no depth beats, null when the best depth lies beyond 200. Step size one, test prompts like those of pre-training.
Exact in the limit of large dimension: nothing here is sampled.
"""

from __future__ import annotations

import math
from pathlib import Path

DEEPEST = 200
ALPHAS = (0.5, 1.0, 1.5, 2.0, 4.0)
TAUS = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 20.0, math.inf)
NOISES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def search(cell: dict) -> float | str | None:
    """The entry of one cell {alpha, tau, noise}."""
    from nbkit.methods.cot_depth import CoTDepthTheory

    theory = CoTDepthTheory(cell["alpha"], float(cell["tau"]), cell["noise"])
    # Noise-free and stable: every further step helps, which needs no search.
    if cell["noise"] == 0 and theory.regime() == "exponential":
        return "inf"
    found = theory.optimal_depth(DEEPEST)
    if not found.reached:
        return None
    return "inf" if math.isinf(found.depth) else found.depth


def run_best(work_dir: Path, out_dir: Path, log) -> None:
    """Fill the table and write data/recordings/cot-depth-best."""
    from nbkit import parallel
    from nbkit.loaders import save_recording

    taus = [tau if math.isfinite(tau) else "inf" for tau in TAUS]
    cells = [{"alpha": a, "tau": t, "noise": s} for a in ALPHAS for t in taus for s in NOISES]
    log(f"{len(cells)} searches")
    found = iter(parallel.map(search, cells, executor="serial", resume=work_dir / "cells.jsonl", desc="cot-depth-best"))
    best = [[[next(found) for _ in NOISES] for _ in taus] for _ in ALPHAS]
    save_recording(
        "cot-depth-best",
        {"alphas": list(ALPHAS), "taus": taus, "noises": list(NOISES), "deepest": DEEPEST, "best": best},
        {
            "recipe": "cot-depth-best", "seed": 0, "licence": "MIT",
            "summary": "best chain-of-thought depth by context, pre-training and label noise, from the formula",
            "kind": "evaluation of a formula (our derivation) in the limit of large dimension; nothing is sampled",
        },
    )
