"""Array operations in up to three versions: `reference` (float64 loops, obviously right), `torch` (the CPU path) and `triton`.

The version is chosen by the argument `backend=`, then by the environment variable NBKIT_KERNELS, then by capability (Triton for CUDA
tensors that it supports, torch otherwise). A forced version that cannot run raises; `explain(op, *args)` says why, `choices()` says what ran.
The Triton versions are checked in the Triton interpreter and compiled for sm_80 and sm_90; not yet run on a GPU.

To add an operation: write `nbkit/kernels/<op>.py` with its versions and an `examples` generator, `register(Op(...))` it, and import its
function below; the contract suite in tests/test_kernels.py then covers it.
"""

from nbkit.kernels._registry import Example, Explanation, Op, Program, choices, explain, get, ops, register
from nbkit.kernels.gather_rows import gather_rows
from nbkit.kernels.head_profile import HeadProfile, head_profile
from nbkit.kernels.segment_topk import segment_topk
from nbkit.kernels.sparse_attention import sparse_attention
from nbkit.kernels.window_evidence import window_evidence

__all__ = [
    "Example", "Explanation", "HeadProfile", "Op", "Program", "choices", "explain", "gather_rows", "get", "head_profile", "ops", "register",
    "segment_topk", "sparse_attention", "window_evidence",
]
