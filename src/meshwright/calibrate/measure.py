"""Measure kernels on a device, in rounds that alternate between all cases, so that a slow moment of a shared machine
hits every case alike. Each round runs a case for `MIN_S` at least; garbage collection is off. Of the rounds the lower
quartile counts: other programs only ever slow a case down, and the fastest round is an extreme of its own.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.calibrate.fit import TimedAttention, TimedProduct

K = TypeVar("K")
Run = Callable[[], object]

MIN_S = 0.002
ROUNDS = 9
CPU_SIZES, CPU_LARGE = (32, 128, 512), ((1024, 1024, 1024), (512, 256, 2048))
CUDA_SIZES, CUDA_LARGE = (512, 2048, 8192), ((16384, 4096, 4096), (64, 4096, 4096))
CPU_LENGTHS, CUDA_LENGTHS = (64, 128, 256, 512), (512, 1024, 2048, 4096, 8192)
HEADS, HEAD_DIM = 4, 64
CHAIN, NUM_PARAMETERS = 32, 64


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(cases: Mapping[K, Run], device: torch.device, *, budget_s: float, rounds: int = ROUNDS) -> dict[K, float]:
    """Return the seconds of each case, over at least two rounds and as many as the budget allows."""
    repeats = {name: _repeats(run, device) for name, run in cases.items()}
    found: dict[K, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + budget_s
    with without_collection():
        for number in range(rounds):
            for name, run in cases.items():
                found[name].append(seconds_of(run, repeats[name], device))
            if number and time.perf_counter() > end:
                break
    return {name: lower_quartile(one) for name, one in found.items()}


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value below which a quarter of the values are."""
    return sorted(values)[len(values) // 4]


def _repeats(run: Run, device: torch.device) -> int:
    """Return how often to run a case in a round; the first run warms up."""
    run()
    once = seconds_of(run, 1, device)
    return max(1, round(MIN_S / max(once, 1e-7)))


def seconds_of(run: Run, repeats: int, device: torch.device) -> float:
    """Return the seconds of a run, the mean over `repeats`."""
    synchronise(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronise(device)
    return (time.perf_counter() - begin) / repeats


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python's garbage collector off in the context."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def dtypes(device: torch.device) -> Sequence[torch.dtype]:
    """Return the dtypes whose products are measured on a device."""
    if device.type == "cuda":
        return (torch.bfloat16, torch.float16, torch.float32)
    return (torch.float32, torch.bfloat16, torch.float64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure_products(
    device: torch.device, dtype: torch.dtype, *, budget_s: float, overhead_s: float
) -> list[TimedProduct]:
    """Time products over a grid of shapes: of each the mean over the memory layouts of a linear layer's forward and of
    both its gradients, which on some devices differ tenfold.

    `overhead_s` is the time of launching a kernel, which isn't the product's.
    """
    is_cuda = device.type == "cuda"
    sizes, large = (CUDA_SIZES, CUDA_LARGE) if is_cuda else (CPU_SIZES, CPU_LARGE)
    cases: dict[tuple[tuple[int, int, int], int], Run] = {}
    for rows, inner, columns in (*product(sizes, sizes, sizes), *large):
        left, right = (torch.randn(*one, device=device, dtype=dtype) for one in ((rows, inner), (inner, columns)))
        left_t, right_t = left.t().contiguous().t(), right.t().contiguous().t()
        for number, (x, y) in enumerate(((left, right_t), (left, right), (left_t, right))):
            cases[(rows, inner, columns), number] = partial(torch.matmul, x, y)
    found = timed(cases, device, budget_s=budget_s)
    # On a GPU, kernels queue up behind each other, so that launching them hides.
    less = 0.0 if is_cuda else overhead_s
    samples = []
    for shape in dict.fromkeys(shape for shape, _ in cases):
        seconds = statistics.fmean(found[shape, number] for number in range(3))
        samples.append(TimedProduct(*shape, max(seconds - less, 0.2 * seconds)))
    return samples


def measure_attention(
    device: torch.device, dtype: torch.dtype, *, budget_s: float, overhead_s: float
) -> list[TimedAttention]:
    """Time causal attention by length, forward and backward; all pairs count as operations, as FlopCounterMode does."""
    lengths = CUDA_LENGTHS if device.type == "cuda" else CPU_LENGTHS
    cases: dict[tuple[int, bool], Run] = {}
    for length in lengths:
        q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
        wanted = [one.clone().requires_grad_() for one in (q, k, v)]
        out = F.scaled_dot_product_attention(wanted[0], wanted[1], wanted[2], is_causal=True)
        gradient = torch.ones_like(out)
        cases[length, False] = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        cases[length, True] = partial(torch.autograd.grad, out, wanted, gradient, retain_graph=True)
    found = timed(cases, device, budget_s=budget_s)
    less = 0.0 if device.type == "cuda" else overhead_s
    net = {key: max(seconds - less, 0.2 * seconds) for key, seconds in found.items()}
    flops = {length: 4.0 * HEADS * length**2 * HEAD_DIM for length in lengths}
    return [TimedAttention(length, flops[length], net[length, False], net[length, True]) for length in lengths]


def measure_memory(device: torch.device, *, budget_s: float) -> list[tuple[int, float]]:
    """Time kernels of blocks that are bound by memory, by the bytes that they read and write: of each size the mean
    over the kernels, as a block has them all."""
    sizes = (2**20, 2**23, 2**26) if device.type == "cuda" else (2**12, 2**14, 2**16, 2**18, 2**20)
    cases: dict[tuple[int, str], tuple[int, Run]] = {}
    for size in sizes:
        x, y = (torch.randn(size // 64, 64, device=device) for _ in range(2))
        cases[size, "add"] = 12 * size, partial(torch.add, x, y)
        cases[size, "multiply"] = 12 * size, partial(torch.mul, x, y)
        cases[size, "scale"] = 8 * size, partial(torch.mul, x, 0.5)
        cases[size, "cast"] = 6 * size, partial(x.to, torch.bfloat16)
        cases[size, "mean"] = 4 * size, partial(x.mean, -1, keepdim=True)
        cases[size, "silu"] = 8 * size, partial(F.silu, x)
        cases[size, "softmax"] = 8 * size, partial(torch.softmax, x, -1)
    found = timed({case: run for case, (_, run) in cases.items()}, device, budget_s=budget_s)
    samples = []
    for size in sizes:
        names = [case for case in cases if case[0] == size]
        moved = round(statistics.fmean(cases[case][0] for case in names))
        samples.append((moved, statistics.fmean(found[case] for case in names)))
    return samples


def measure_copy(device: torch.device, *, budget_s: float) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    size = 2**28 if device.type == "cuda" else 2**24
    x, y = (torch.zeros(size, device=device) for _ in range(2))
    seconds = timed({"copy": lambda: y.copy_(x)}, device, budget_s=budget_s)["copy"]
    return 8 * size / seconds


def measure_host(device: torch.device, *, budget_s: float) -> dict[str, float]:
    """Return the host's time in µs of a kernel with autograd, of one without, of a module's call forward and backward,
    and of the optimizer per parameter.
    """
    x = torch.randn(8, 8, device=device)
    leaf = x.clone().requires_grad_()
    modules = nn.Sequential(*(_Scale() for _ in range(CHAIN)))
    parameters = [nn.Parameter(torch.randn(8, 8, device=device)) for _ in range(NUM_PARAMETERS)]
    for one in parameters:
        one.grad = torch.randn_like(one)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, foreach=True)

    def chain() -> None:
        y: Tensor = leaf
        for _ in range(CHAIN):
            y = y * 0.5
        torch.autograd.backward(y.sum())

    def bare() -> None:
        y = x
        for _ in range(CHAIN):
            y = y * 0.5

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    cases: dict[str, Run] = {
        "chain": chain, "bare": bare, "modules": lambda: torch.autograd.backward(modules(leaf).sum()), "step": step,
    }  # fmt: skip
    found = {name: 1e6 * seconds for name, seconds in timed(cases, device, budget_s=budget_s, rounds=25).items()}
    return {
        "launch": found["chain"] / (2 * CHAIN),
        "bare": found["bare"] / CHAIN,
        "module": max(0.0, found["modules"] - found["chain"]) / (2 * CHAIN),
        "parameter": found["step"] / NUM_PARAMETERS,
    }


class _Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5
