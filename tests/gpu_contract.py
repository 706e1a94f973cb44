"""Kernel checks and timings for a machine with a GPU: `python tests/gpu_contract.py` (needs torch with CUDA and triton, nothing else).

Not yet run on a GPU. It runs the contract of kernel_contract.py on CUDA tensors for the torch and the Triton versions, compares CUDA with CPU on the
same inputs, then times both at cache-compaction sizes. A row shows a time only behind its own correctness check. Status 1 when anything is wrong,
2 without a GPU. `--device cpu` runs the same steps on the CPU versions, to test this script; its rows say cpu.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kernel_contract as contract
import torch

from nbkit import kernels
from nbkit.kernels._registry import tensors_in

COLUMNS = ("device", "op", "case", "dtype", "backend", "correct", "median ms", "p20 ms", "p80 ms", "floor MB", "GB/s", "GFLOP", "peak MB")
SAMPLING = 0.1  # seconds of measured work for a row, at least


def cases(device: str, small: bool) -> list[tuple[str, str, str, dict, float]]:
    """Operation, case, dtype, arguments and floating-point operations, at sizes of one compaction event."""
    generator = torch.Generator().manual_seed(contract.SEED)
    found = []
    for tokens in (512,) if small else (2048, 8192, 32768):
        heads, group, window, dim, batch = 8, 4, 32, 128, 1
        scores = torch.randn(batch, heads, tokens, generator=generator)
        segment = (torch.arange(tokens) // 128).expand(batch, heads, tokens).contiguous()
        quota = torch.full((batch, heads, -(-tokens // 128)), 32)
        found.append(("segment_topk", f"{tokens} tokens in runs of 128", "float32", {"scores": scores, "segment": segment, "quota": quota}, 0.0))
        whole = {"scores": scores, "segment": torch.zeros_like(segment), "quota": torch.full((batch, heads, 1), tokens // 4)}
        found.append(("segment_topk", f"{tokens} tokens, one segment", "float32", whole, 0.0))
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            keys, values = (torch.randn(batch, heads, tokens, dim, generator=generator).to(dtype) for _ in range(2))
            index = torch.rand(batch, heads, tokens, generator=generator).argsort(-1)[..., :tokens // 4].sort(-1).values
            found.append(("gather_rows", f"{tokens} tokens, a quarter kept", name, {"x": (keys, values), "index": index}, 0.0))
            queries = torch.randn(batch, heads * group, window, dim, generator=generator).to(dtype)
            args = {"queries": queries, "keys": keys, "scaling": dim**-0.5, "query_positions": torch.arange(tokens - window, tokens),
                    "key_positions": torch.arange(tokens)}
            found.append(("window_evidence", f"{tokens} tokens, window {window}", name, args, 2.0 * batch * heads * group * window * tokens * dim))
    return [(op, case, dtype, contract.mapped(args, lambda _, t: t.to(device)), flop) for op, case, dtype, args, flop in found]


def floor_bytes(op: str, args: dict, out: list[torch.Tensor]) -> int:
    """Bytes that any implementation must move: every input that is read once, and the output."""
    if op == "gather_rows":
        return sum(2 * part.numel() * part.element_size() for part in out) + args["index"].numel() * 8
    return sum(t.untyped_storage().nbytes() for t in tensors_in(args.values())) + sum(part.numel() * part.element_size() for part in out)


def correct(op: kernels.Op, args: dict, out: list[torch.Tensor]) -> tuple[bool, float]:
    """Against float64 (the plain expression at these sizes: the loops would take minutes) under the 2x rule; equality for exact operations."""
    cpu = contract.mapped(args, lambda _, t: t.cpu())
    if op.exact:
        return all(torch.equal(one.cpu(), other) for one, other in zip(out, contract.outputs(op, cpu, "torch"), strict=True)), 0.0
    truth = op.plain[0](**contract.widened(cpu, torch.float64))
    yardstick = [expression(**contract.widened(cpu, torch.float32)) for expression in op.plain]
    bound = 2 * max(float((one.double() - truth).abs().max()) for one in yardstick) + torch.finfo(torch.float32).eps * float(truth.abs().max())
    error = float((out[0].cpu().double() - truth).abs().max())
    return error <= bound, error


def milliseconds(fn: Callable[[], object], device: str) -> list[float]:
    """Time of single calls in ms, device events on CUDA, after a warm-up; at least 20 calls and SAMPLING seconds."""
    for _ in range(5):
        fn()
    times: list[float] = []
    while len(times) < 20 or sum(times) < 1000 * SAMPLING:
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            fn()
            times.append(1000 * (time.perf_counter() - begin))
    return sorted(times)


def timed_row(op_name: str, case: str, dtype: str, args: dict, flop: float, backend: str, device: str) -> list[str]:
    """One line of the table; without times when the result is wrong or the backend cannot run."""
    op, label = kernels.get(op_name), "cpu" if device == "cpu" else torch.cuda.get_device_name()
    head = [label, op_name, case, dtype, backend]
    reasons = op.reasons(backend, tensors_in(args.values()))
    if reasons:
        return [*head, "cannot run: " + "; ".join(reasons), *[""] * (len(COLUMNS) - len(head) - 1)]
    options = {} if op_name == "window_evidence" else {"validate": False}
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    out = op.call(**args, **options, backend=backend)
    peak = f"{(torch.cuda.max_memory_allocated() - before) / 1e6:.2f}" if device == "cuda" else ""
    out = list(out) if isinstance(out, tuple) else [out]
    good, error = correct(op, args, out)
    if not good:
        return [*head, f"NO (err {error:.1e})", *[""] * (len(COLUMNS) - len(head) - 1)]
    times = milliseconds(lambda: op.call(**args, **options, backend=backend), device)
    median, moved = statistics.median(times), floor_bytes(op_name, args, out)
    low, high = times[len(times) // 5], times[4 * len(times) // 5]
    return [*head, f"yes (err {error:.1e})", f"{median:.4f}", f"{low:.4f}", f"{high:.4f}", f"{moved / 1e6:.2f}",
            f"{moved / median / 1e6:.0f}", f"{flop / 1e9:.3f}", peak]


def main(argv: list[str] | None = None) -> int:
    """Contract, then timings; see the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-timings", action="store_true", help="only the contract")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        return 2
    where = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {where}")
    bad = 0
    for backend in ("torch", "triton") if options.device == "cuda" else ("torch",):
        for name in kernels.ops():
            ran, left_out, failures = contract.run(kernels.get(name), backend, options.device)
            print(*failures, sep="\n", end="\n" if failures else "")
            print(f"{name}: {ran} checks ran on {backend} ({options.device}), {left_out} examples left out, {len(failures)} failures", flush=True)
            bad += len(failures) + (ran == 0)
    if not options.no_timings:
        rows = [list(COLUMNS)]
        for case in cases(options.device, small=options.device == "cpu"):
            rows += [timed_row(*case, backend, options.device) for backend in ("torch", "triton")]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        bad += sum(row[COLUMNS.index("correct")].startswith("NO") for row in rows)
        if options.csv:
            with options.csv.open("w", newline="") as file:
                csv.writer(file).writerows(rows)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
