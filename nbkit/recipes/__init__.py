"""How each file under ``data/`` was made: ``python -m nbkit train NAME`` makes it again from a seed.

A recipe is a function ``run(work_dir, out_dir, log)``: it keeps its unfinished state in ``work_dir``, so that a second call goes
on where the first one stopped, and moves finished files to ``out_dir`` (the project's data folder) at the end.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbkit
from nbkit.errors import InputError, RunError

__all__ = ["RECIPES", "Recipe", "get", "train"]


@dataclass(frozen=True)
class Recipe:
    """One recipe: ``outputs`` are paths below the data folder, ``minutes`` its time on two cores, ``run`` is "module:function"."""

    name: str
    summary: str
    outputs: tuple[str, ...]
    minutes: float
    run: str

    def load(self) -> Callable[[Path, Path, Callable[[str], None]], None]:
        """The function behind ``run``; its module is imported only now, since most recipes import torch."""
        module, _, function = self.run.partition(":")
        return getattr(importlib.import_module(module), function)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "lookup-chain", "a small Llama that walks a long chain of table lookups, for pass@1 under a cache budget",
            ("models/lookup-chain",), 25, "nbkit.recipes.lookup_chain:run",
        ),
        Recipe(
            "ams-chain", "pass@1 of that model by policy, scorer and budget", ("recordings/ams-chain",), 22, "nbkit.recipes.ams_chain:run",
        ),
        Recipe(
            "ams-text", "loss of SmolLM2-135M on held-out prose by policy, scorer and budget", ("recordings/ams-text",), 40,
            "nbkit.recipes.ams_text:run_text",
        ),
        Recipe(
            "ams-needles", "facts that SmolLM2-135M finds again in a long text by policy, scorer and budget", ("recordings/ams-needles",), 17,
            "nbkit.recipes.ams_text:run_needles",
        ),
        Recipe(
            "ams-loops", "repetition in what SmolLM2-135M writes with a full and a compacted cache", ("recordings/ams-loops",), 18,
            "nbkit.recipes.ams_text:run_loops",
        ),
        Recipe(
            "drift-target", "a small Llama over letters, the target of the small drafters", ("models/drift-target",), 8,
            "nbkit.recipes.drift_target:run",
        ),
        Recipe(
            "drift-tiny", "small drafters: variant by training depth by seed", ("models/drift-tiny",), 45, "nbkit.recipes.drift_train:run_tiny",
        ),
        Recipe(
            "drift-grid", "drift, acceptance, noise and pinning of the small drafters", ("recordings/drift-grid",), 7,
            "nbkit.recipes.drift_eval:run_grid",
        ),
        Recipe(
            "drift-smollm2", "EAGLE-3 drafters for SmolLM2-135M with pre-norm and post-norm feedback",
            ("models/drift-smollm2-pre", "models/drift-smollm2-post"), 60, "nbkit.recipes.drift_train:run_smol",
        ),
        Recipe(
            "drift-smollm2-eval", "drift and acceptance of these two by template, prompt length, noise and pinning",
            ("recordings/drift-smollm2",), 20, "nbkit.recipes.drift_smollm2_eval:run_smol",
        ),
        Recipe(
            "clarify-policy", "a small network that imitates oracle call sequences of office jobs", ("models/clarify-policy",), 1,
            "nbkit.recipes.clarify:run_policy",
        ),
        Recipe(
            "clarify-grid", "success of scripted and learned agents in office jobs by the time a missing fact reaches them",
            ("recordings/clarify-grid",), 2, "nbkit.recipes.clarify:run_grid",
        ),
        Recipe(
            "clarify-smollm2", "success of SmolLM2-135M in office jobs by the time a missing fact reaches it",
            ("recordings/clarify-smollm2",), 11, "nbkit.recipes.clarify:run_smollm2",
        ),
        Recipe(
            "cot-depth-sim", "error by chain-of-thought depth in the reduced model, simulated", ("recordings/cot-depth-sim",), 4,
            "nbkit.recipes.cot_depth:run_sim",
        ),
        Recipe(
            "cot-depth-best", "best chain-of-thought depth by context, pre-training and label noise, from the formula",
            ("recordings/cot-depth-best",), 1, "nbkit.recipes.cot_best:run_best",
        ),
        Recipe(
            "cot-depth-attention", "error by chain-of-thought depth of trained linear attention",
            ("recordings/cot-depth-attention", "models/cot-lsa"), 3, "nbkit.recipes.cot_attention:run_attention",
        ),
        Recipe(
            "cot-depth-softmax", "error by chain-of-thought depth of small softmax transformers", ("recordings/cot-depth-softmax",), 5,
            "nbkit.recipes.cot_attention:run_softmax",
        ),
        Recipe(
            "adacal-heads", "loss of SmolLM2-135M with the heads that a metric picks kept dense, the others A-shaped", ("recordings/adacal-heads",),
            40, "nbkit.recipes.adacal:run_heads",
        ),
        Recipe(
            "adacal-grid", "loss and density of SmolLM2-135M on held-out long prompts by sparse attention rule and task",
            ("recordings/adacal-grid",), 75, "nbkit.recipes.adacal_grid:run",
        ),
        Recipe(
            "adacal-timing", "time to first token of SmolLM2-135M with AdaCal and without", ("recordings/adacal-timing",), 4,
            "nbkit.recipes.adacal_timing:run",
        ),
        Recipe(
            "fastprefill-decode", "decoding steps of SmolLM2-135M with and without recovery of dropped tokens", ("recordings/fastprefill-decode",), 4,
            "nbkit.recipes.fastprefill_decode:run",
        ),
        Recipe(
            "fastprefill-scores", "weights of SmolLM2-135M's heads for choosing prompt tokens, and six scores on held-out long prompts",
            ("recordings/fastprefill-scores",), 12, "nbkit.recipes.fastprefill_scores:run",
        ),
        Recipe(
            "fastprefill-sensitivity", "answer loss of SmolLM2-135M by layer and rate of one drop of prompt tokens, by task",
            ("recordings/fastprefill-sensitivity",), 15, "nbkit.recipes.fastprefill:run_sensitivity",
        ),
        Recipe(
            "fastprefill-grid", "answer loss of SmolLM2-135M on held-out long prompts by pruning schedule and method",
            ("recordings/fastprefill-grid",), 60, "nbkit.recipes.fastprefill:run_grid",
        ),
        Recipe(
            "prefill-timing", "time to first token of SmolLM2-135M by method and prompt length; needs an idle machine",
            ("recordings/prefill-timing",), 8, "nbkit.recipes.prefill_timing:run",
        ),
        Recipe(
            "long-tasks", "answers of SmolLM2-135M to long prompts of nine kinds, with and without the evidence", ("recordings/long-tasks",), 15,
            "nbkit.recipes.long_tasks:run",
        ),
        Recipe(
            "prefill-matrix", "answers, work and cache of SmolLM2-135M by token pruning, sparse attention and eviction on equal budgets",
            ("recordings/prefill-matrix",), 15, "nbkit.recipes.prefill_matrix:run",
        ),
    )
}


def get(name: str) -> Recipe:
    """The recipe of that name.

    Raises: InputError with the known names.

    >>> get("lookup-chain").outputs
    ('models/lookup-chain',)
    """
    if name not in RECIPES:
        raise InputError("recipe", got=name, allowed=", ".join(sorted(RECIPES)), hint="python -m nbkit train lists them")
    return RECIPES[name]


def train(name: str, *, work: Path | None = None, log: Callable[[str], None] = print) -> list[Path]:
    """Run one recipe and return the files and folders it made; a stopped one goes on from ``work``.

    ``work`` defaults to ``build/recipes/NAME``. Files go to the project's data folder; NBKIT_DATA names another one.

    Raises: InputError for an unknown name; MissingResourceError without a data folder; RunError when the recipe ends without its outputs.
    """
    recipe = get(name)
    work_dir = work or nbkit.build_path("recipes", name)
    # Called with no folder at all, data_path says how to get one.
    out_dir = nbkit.data_root() or nbkit.data_path()
    work_dir.mkdir(parents=True, exist_ok=True)
    out_dir.mkdir(parents=True, exist_ok=True)
    recipe.load()(work_dir, out_dir, log)
    made = [out_dir / output for output in recipe.outputs]
    absent = [str(path) for path in made if not path.exists()]
    if absent:
        raise RunError(f"recipe {name} ended without {', '.join(absent)}", hint=f"read its log; its unfinished state is in {work_dir}")
    return made
