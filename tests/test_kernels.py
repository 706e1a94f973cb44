"""Kernels: the contract suite on every registered operation and backend, dispatch, bad input, and exact facts of each operation."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import kernel_contract as contract
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbkit import kernels
from nbkit.errors import BackendError, InputError

HERE = Path(__file__).parent
NAN, INF = math.nan, math.inf
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform")


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch):
    monkeypatch.delenv("NBKIT_KERNELS", raising=False)


# --- the contract ------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("check", contract.CHECKS)
@pytest.mark.parametrize("op", kernels.ops())
def test_contract_torch(op, check):
    entry = kernels.get(op)
    for example in contract.examples_of(entry):
        contract.CHECKS[check](entry, example.args, "torch")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("op", kernels.ops())
def test_contract_triton_interpreter(op):
    """In a process of its own: Triton reads TRITON_INTERPRET when a kernel is decorated."""
    command = [sys.executable, HERE / "kernel_contract.py", op, "--backend", "triton"]
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=interpreted, capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 0 and " 0 failures" in done.stdout, done.stdout + done.stderr


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("op", kernels.ops())
def test_triton_compiles_without_a_gpu(op, tmp_path):
    """The interpreter is laxer than the compiler: every kernel must also become machine code for two GPU generations."""
    program = """if True:
        import json, sys, triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from nbkit import kernels
        sizes = []
        for program in kernels.get(sys.argv[1]).triton_programs():
            names = program.kernel.arg_names
            assert set(program.types) | set(program.constants) <= set(names), "a signature names an argument that the kernel lacks"
            signature = {name: "constexpr" if name in program.constants else program.types.get(name, "i32") for name in names}
            for capability in (80, 90):
                source = ASTSource(program.kernel, signature, constexprs=dict(program.constants))
                sizes.append(len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]))
        print(json.dumps(sizes))
    """
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program, op], env=clean, capture_output=True, text=True, cwd=HERE.parent)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    assert len(sizes) >= 2 and min(sizes) > 0


def _broken_topk(scores, segment, quota):
    """Ties to the higher position."""
    flipped = [tensor.flip(-1) for tensor in (scores, segment)]
    return kernels.get("segment_topk").versions["torch"](*flipped, quota).flip(-1)


def _broken_gather(many, index):
    """Leaves the last row of fresh memory unwritten."""
    whole = kernels.get("gather_rows").versions["torch"](many, index)
    out = tuple(torch.empty_like(part) for part in whole)
    for part, copy in zip(whole, out, strict=True):
        copy[:, :, :-1] = part[:, :, :-1]
        if copy.numel() and not bool(copy[:, :, -1:].isnan().any()):
            copy[:, :, -1:] = part[:, :, -1:]
    return out


def _broken_evidence(queries, keys, scaling, query_positions, key_positions, valid):
    """Half-precision logits, the error that a loose tolerance lets through."""
    return kernels.get("window_evidence").versions["torch"](queries.bfloat16().float(), keys.bfloat16().float(), scaling, query_positions,
                                                            key_positions, valid)


def _broken_groups(queries, keys, *rest):
    """Query heads interleaved instead of in groups."""
    heads = keys.shape[1]
    swapped = queries.unflatten(1, (-1, heads)).transpose(1, 2).flatten(1, 2) if queries.numel() else queries
    return kernels.get("window_evidence").versions["torch"](swapped, keys, *rest)


def _broken_input(scores, segment, quota):
    """Writes to its input."""
    out = kernels.get("segment_topk").versions["torch"](scores, segment, quota)
    quota.clamp_(max=1)
    return out


@pytest.mark.parametrize(("op", "broken", "check"), [
    ("segment_topk", _broken_topk, "agreement"),
    ("segment_topk", _broken_input, "untouched"),
    ("gather_rows", _broken_gather, "poison"),
    ("window_evidence", _broken_evidence, "agreement"),
    ("window_evidence", _broken_groups, "heads"),
], ids=lambda value: getattr(value, "__name__", value))
def test_contract_catches(op, broken, check):
    """The suite itself is tested: a version that breaks one promise fails the check of that promise."""
    entry = kernels.get(op)
    module = sys.modules[f"nbkit.kernels.{op}"]
    original = module.OP
    module.OP = dataclasses.replace(entry, versions=entry.versions | {"torch": broken})
    try:
        failed = 0
        for example in contract.examples_of(entry):
            args = contract.mapped(example.args, lambda _, t: t.clone())
            if broken is _broken_gather:
                args = contract.mapped(args, lambda name, t: t.float() if name == "x" else t)
            try:
                contract.CHECKS[check](entry, args, "torch")
            except AssertionError:
                failed += 1
        assert failed
    finally:
        module.OP = original


# --- dispatch ----------------------------------------------------------------------------------------------------------------------------------

def topk_args():
    return torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 0, 0]), torch.tensor([1])


def test_order_argument_then_environment_then_capability(monkeypatch):
    op = kernels.get("segment_topk")
    tensors = list(topk_args())
    assert op.choose(None, tensors) == ("torch", "capability")
    monkeypatch.setenv("NBKIT_KERNELS", "reference")
    assert op.choose(None, tensors) == ("reference", "the environment variable NBKIT_KERNELS")
    assert op.choose("torch", tensors) == ("torch", "the argument backend=")
    monkeypatch.setenv("NBKIT_KERNELS", "")
    assert op.choose(None, tensors) == ("torch", "capability")


@needs_triton
def test_cuda_tensors_choose_triton_only_where_it_can_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def on_cuda(dtype, gradient=False):
        return SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=dtype, requires_grad=gradient,
                               is_floating_point=lambda: dtype.is_floating_point)
    op = kernels.get("window_evidence")
    assert op.choose(None, [on_cuda(torch.bfloat16), on_cuda(torch.int64)]) == ("triton", "capability: cuda tensors")
    assert op.choose(None, [on_cuda(torch.float64)])[0] == "torch"
    assert op.choose(None, [on_cuda(torch.float32, gradient=True)])[0] == "torch"
    with pytest.raises(BackendError, match="no float64 in the Triton version"):
        op.choose("triton", [on_cuda(torch.float64)])
    with pytest.raises(BackendError, match="requires gradients"):
        op.choose("triton", [on_cuda(torch.float32, gradient=True)])


def test_forced_backend_that_cannot_run_raises(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="tensors are on cpu, Triton needs cuda"):
        kernels.segment_topk(*topk_args(), backend="triton")
    monkeypatch.setenv("NBKIT_KERNELS", "triton")
    with pytest.raises(BackendError, match="NBKIT_KERNELS"):
        kernels.segment_topk(*topk_args())


def test_unknown_names(monkeypatch):
    with pytest.raises(InputError, match="allowed gather_rows, head_profile, segment_topk, sparse_attention, window_evidence"):
        kernels.get("top_k")
    with pytest.raises(InputError, match="reference, torch, triton"):
        kernels.segment_topk(*topk_args(), backend="cuda")
    monkeypatch.setenv("NBKIT_KERNELS", "fast")
    with pytest.raises(InputError, match="NBKIT_KERNELS"):
        kernels.segment_topk(*topk_args())
    with pytest.raises(InputError, match="not registered yet"):
        kernels.register(kernels.get("segment_topk"))


def test_explain_says_why_not(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    table = kernels.explain("window_evidence", torch.zeros(1, 1, 1, 4, dtype=torch.float64), torch.zeros(1, 1, 2, 4, dtype=torch.float64), 0.5)
    states = {backend: (state, why) for backend, state, why in table.rows}
    assert table.chosen == "torch" and states["torch"] == ("runs", "capability")
    assert states["reference"][0] == "can run" and states["triton"][0] == "cannot run"
    assert "tensors are on cpu" in states["triton"][1] and "no float64 in the Triton version" in states["triton"][1]
    assert all(text in table._repr_html_() for text in ("<caption>nbkit.kernels.window_evidence", "no float64", "<th scope='col'>why"))
    forced = kernels.explain("segment_topk", *topk_args(), backend="triton")
    assert forced.chosen == "none" and forced.rows[-1][:2] == ("none", "raises")


def test_choices_count_what_ran(monkeypatch):
    monkeypatch.setattr(kernels._registry, "_RAN", {})
    assert kernels.choices() == {}
    kernels.segment_topk(*topk_args())
    kernels.segment_topk(*topk_args(), backend="reference")
    kernels.segment_topk(*topk_args())
    assert kernels.choices() == {"segment_topk": {"torch on cpu": 2, "reference on cpu": 1}}


def test_triton_is_imported_on_the_first_triton_call_only():
    program = ("import sys, torch; from nbkit import kernels; ids = torch.zeros(3, dtype=torch.int64); "
               "kernels.segment_topk(torch.zeros(3), ids, ids[:1]); print('triton' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=HERE.parent).stdout.strip() == "False"


# --- segment_topk ------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("scores", "segment", "quota", "kept"), [
    ([1.0, 3.0, 3.0, 3.0], [0, 0, 0, 0], [2], [1, 2]),  # ties: lower position first
    ([0.0, -0.0, 0.0, -0.0], [0, 0, 0, 0], [2], [0, 1]),  # -0.0 ties with 0.0
    ([-0.0, 0.0, -1e-40, 1e-40], [0, 0, 0, 0], [2], [0, 3]),  # subnormals are numbers
    ([-INF, 1.0, INF, -INF], [0, 0, 0, 0], [3], [0, 1, 2]),  # -inf is the worst, yet a candidate
    ([-INF, -INF], [0, -1], [5], [0]),  # segment -1 is never kept
    ([5.0, 4.0, 3.0, 2.0, 1.0], [0, 0, 1, 1, 1], [0, 9], [2, 3, 4]),  # nothing of one, all of the other
    ([5.0, 4.0, 3.0], [2, 2, 2], [7, 7, 1], [0]),  # empty segments
    ([1.0, 2.0, 3.0, 4.0], [-1, 0, -1, 0], [1], [3]),  # holes anywhere
], ids=["ties", "signed-zero", "subnormal", "infinities", "not-selectable", "zero-and-all", "empty-segments", "holes"])
def test_topk_golden(backend, scores, segment, quota, kept):
    mask = kernels.segment_topk(torch.tensor(scores), torch.tensor(segment), torch.tensor(quota), backend=backend)
    assert mask.nonzero().flatten().tolist() == kept


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_topk_property(data):
    """Every segment keeps exactly min(quota, length), and none that it drops beats one that it keeps."""
    tokens, segments = data.draw(st.integers(0, 24)), data.draw(st.integers(1, 5))
    numbers = st.sampled_from([-INF, -2.0, -0.0, 0.0, 1.0, 1.5, INF]) | st.floats(allow_nan=False, width=32)
    scores = torch.tensor(data.draw(st.lists(numbers, min_size=tokens, max_size=tokens)), dtype=torch.float32)
    segment = torch.tensor(sorted(data.draw(st.lists(st.integers(-1, segments - 1), min_size=tokens, max_size=tokens))), dtype=torch.int64)
    quota = torch.tensor(data.draw(st.lists(st.integers(0, 8), min_size=segments, max_size=segments)), dtype=torch.int64)
    mask = kernels.segment_topk(scores, segment, quota)
    assert torch.equal(mask, kernels.segment_topk(scores, segment, quota, backend="reference"))
    assert not mask[segment < 0].any()
    for s in range(segments):
        kept, dropped = scores[mask & (segment == s)], scores[~mask & (segment == s)]
        assert len(kept) == min(int(quota[s]), int((segment == s).sum()))
        assert not len(kept) or not len(dropped) or kept.min() >= dropped.max()


def test_topk_one_segment_is_topk():
    scores = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(1))
    mask = kernels.segment_topk(scores, torch.zeros(2, 3, 50, dtype=torch.int64), torch.full((2, 3, 1), 11))
    assert torch.equal(mask, torch.zeros_like(mask).scatter(-1, scores.topk(11).indices, True))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("change", "message"), [
    ({"scores": torch.tensor([1.0, NAN, 2.0])}, "scores: got NaN"),
    ({"scores": torch.tensor([1, 2, 3])}, r"scores: got \(3,\) int64, allowed floating point"),
    ({"segment": torch.tensor([0, 0, 1])}, r"segment: got ids 0..1, allowed -1..0"),
    ({"segment": torch.tensor([-2, 0, 0])}, r"segment: got ids -2..0"),
    ({"segment": torch.tensor([0, 0])}, r"segment: got \(2,\) int64, allowed \(3,\) int64"),
    ({"segment": torch.tensor([0, 0, 0], dtype=torch.int32)}, "segment: got .* int32"),
    ({"quota": torch.tensor([-1])}, "quota: got -1, allowed >= 0"),
    ({"quota": torch.tensor([[1]])}, r"quota: got \(1, 1\) int64, allowed \(segments,?\)"),
])
def test_topk_bad_input(backend, change, message):
    args = dict(zip(("scores", "segment", "quota"), topk_args(), strict=True)) | change
    with pytest.raises(InputError, match=message):
        kernels.segment_topk(**args, backend=backend)


def test_validation_can_be_left_out():
    scores = torch.tensor([1.0, NAN, 2.0])
    assert kernels.segment_topk(scores, *topk_args()[1:], validate=False).shape == (3,)
    assert kernels.gather_rows(torch.zeros(1, 1, 2, 1), torch.tensor([[[1]]]), validate=False).shape == (1, 1, 1, 1)


# --- gather_rows -------------------------------------------------------------------------------------------------------------------------------

def test_gather_is_a_copy_with_the_structure_of_its_input():
    keys, values = torch.rand(1, 2, 6, 3), torch.rand(1, 2, 6, 4)
    index = torch.tensor([[[0, 5], [2, 3]]])
    pair = kernels.gather_rows((keys, values), index)
    assert isinstance(pair, tuple) and isinstance(kernels.gather_rows(keys, index), torch.Tensor)
    assert torch.equal(pair[0][0, 1], keys[0, 1, 2:4]) and torch.equal(pair[1][0, 0], values[0, 0, [0, 5]])
    before = keys.clone()
    pair[0].fill_(NAN)
    assert torch.equal(keys, before)
    assert torch.equal(kernels.gather_rows(values, torch.arange(6).expand(1, 2, 6)), values)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("x", "index", "message"), [
    (torch.zeros(1, 1, 4, 2), torch.tensor([[[4]]]), r"index: got 4..4, allowed 0..3"),
    (torch.zeros(1, 1, 4, 2), torch.tensor([[[-1, 2]]]), r"index: got -1..2"),
    (torch.zeros(1, 1, 0, 2), torch.tensor([[[0]]]), "x has no tokens"),
    (torch.zeros(1, 2, 4, 2), torch.tensor([[[0]]]), r"index: got \(1, 1, 1\) int64, allowed \(1, 2, kept\)"),
    (torch.zeros(1, 1, 4, 2), torch.tensor([[[0]]], dtype=torch.int32), "int32"),
    (torch.zeros(1, 4, 2), torch.tensor([[[0]]]), r"x: got \(1, 4, 2\)"),
    ((torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 5, 2)), torch.tensor([[[0]]]), r"x: got \(1, 1, 5, 2\)"),
    ((), torch.tensor([[[0]]]), "non-empty tuple"),
])
def test_gather_bad_input(backend, x, index, message):
    with pytest.raises(InputError, match=message):
        kernels.gather_rows(x, index, backend=backend)


# --- window_evidence ---------------------------------------------------------------------------------------------------------------------------

def attention(batch=2, heads=2, group=3, window=6, tokens=40, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads * group, window, dim, generator=generator), torch.randn(batch, heads, tokens, dim, generator=generator), dim**-0.5


def test_evidence_is_a_distribution_over_the_visible_keys():
    queries, keys, scaling = attention()
    positions, valid = torch.arange(40), torch.arange(40) >= 7
    evidence = kernels.window_evidence(queries, keys, scaling, torch.arange(29, 35), positions, valid)
    torch.testing.assert_close(evidence.sum(-1), torch.ones(2, 2))
    assert not evidence[..., :7].any() and not evidence[..., 35:].any() and bool((evidence[..., 7:35] > 0).all())


def test_evidence_equals_the_attention_of_sdpa():
    """With one-hot values, scaled_dot_product_attention returns its own weights."""
    queries, keys, scaling = attention()
    sees = torch.arange(40) <= torch.arange(34, 40)[:, None]
    weights = torch.nn.functional.scaled_dot_product_attention(
        queries, keys.repeat_interleave(3, 1), torch.eye(40).expand(2, 6, 40, 40), attn_mask=sees, scale=scaling)
    want = weights.unflatten(1, (2, 3)).mean((2, 3))
    torch.testing.assert_close(kernels.window_evidence(queries, keys, scaling, torch.arange(34, 40), torch.arange(40)), want)


def test_evidence_depends_on_position_differences_only_through_the_mask():
    queries, keys, scaling = attention()
    at, positions = torch.arange(30, 36), torch.arange(40)
    assert torch.equal(kernels.window_evidence(queries, keys, scaling, at, positions),
                       kernels.window_evidence(queries, keys, scaling, at + 1000, positions + 1000))


def test_evidence_of_compacted_keys_uses_true_positions():
    """Dropping keys that no query sees changes nothing for the others: what a compacted cache relies on."""
    queries, keys, scaling = attention(tokens=40)
    kept = torch.tensor([0, 1, 5, 8, 13, 21, 33, 34, 35])
    valid = torch.zeros(40, dtype=torch.bool)
    valid[kept] = True
    at = torch.arange(30, 36)
    full = kernels.window_evidence(queries, keys, scaling, at, torch.arange(40), valid)
    torch.testing.assert_close(kernels.window_evidence(queries, keys[:, :, kept], scaling, at, kept), full[..., kept])


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_evidence_of_blind_queries_is_exactly_zero(backend):
    queries, keys, scaling = attention(batch=1, heads=1, window=2, tokens=5)
    half = kernels.window_evidence(queries, keys, scaling, torch.tensor([-1, 4]), torch.arange(5), backend=backend)
    torch.testing.assert_close(half.sum(), torch.tensor(0.5))
    blind = kernels.window_evidence(queries, keys, scaling, valid=torch.zeros(5, dtype=torch.bool), backend=backend)
    assert torch.equal(blind, torch.zeros(1, 1, 5))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_evidence_shows_nan_of_visible_keys_and_hides_that_of_invisible_ones(backend):
    queries, keys, scaling = attention()
    keys[0, 1, 3] = NAN
    seen = kernels.window_evidence(queries, keys, scaling, backend=backend)
    assert bool(seen[0, 1].isnan().all()) and bool(seen[0, 0].isfinite().all()) and bool(seen[1].isfinite().all())
    assert bool(kernels.window_evidence(queries, keys, scaling, valid=torch.arange(40) != 3, backend=backend).isfinite().all())


def test_evidence_does_not_depend_on_the_block_size(monkeypatch):
    queries, keys, scaling = attention(batch=5)
    module = sys.modules["nbkit.kernels.window_evidence"]
    args = (queries, keys, scaling, torch.arange(34, 40), torch.arange(40), torch.arange(40) > 2)
    whole = kernels.window_evidence(*args)
    monkeypatch.setattr(module, "_CPU_BLOCK", 1)
    torch.testing.assert_close(kernels.window_evidence(*args), whole)


@pytest.mark.parametrize(("change", "message"), [
    ({"keys": torch.zeros(2, 4, 5, 8)}, "query_heads: got 6, allowed a multiple of kv_heads = 4"),
    ({"keys": torch.zeros(2, 0, 5, 8)}, "query_heads"),
    ({"keys": torch.zeros(2, 2, 5, 7)}, r"keys: got \(2, 2, 5, 7\) float32, allowed \(2, kv_heads, tokens, 8\) float32"),
    ({"keys": torch.zeros(2, 2, 5, 8, dtype=torch.float16)}, "float16"),
    ({"queries": torch.zeros(6, 3, 8)}, "queries: got"),
    ({"queries": torch.zeros(2, 6, 3, 8, dtype=torch.int64)}, "queries: got .* int64"),
    ({"scaling": INF}, "scaling: got inf"),
    ({"query_positions": torch.arange(3)}, "both or neither"),
    ({"query_positions": torch.arange(4), "key_positions": torch.arange(5)}, r"query_positions: got \(4,\) int64, allowed \(3,\) or \(2, 3\)"),
    ({"query_positions": torch.arange(3), "key_positions": torch.arange(6)}, r"key_positions: got \(6,\) int64, allowed int64, broadcastable"),
    ({"query_positions": torch.arange(3), "key_positions": torch.arange(5.0)}, "key_positions: got .* float32"),
    ({"valid": torch.ones(5)}, "valid: got .* float32, allowed bool"),
    ({"valid": torch.ones(3, 2, 5, dtype=torch.bool)}, "valid"),
])
def test_evidence_bad_input(change, message):
    args = {"queries": torch.zeros(2, 6, 3, 8), "keys": torch.zeros(2, 2, 5, 8), "scaling": 0.5} | change
    with pytest.raises(InputError, match=message):
        kernels.window_evidence(**args)
