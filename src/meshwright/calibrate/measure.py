"""Measure kernels on a device, in rounds that alternate between all cases, so that a slow moment of a shared machine
hits every case alike. Each round runs a case for `MIN_S` at least; garbage collection is off. The lower quartile of the
rounds counts, as of a run's steps: other programs only ever slow a case down, and the fastest round is an extreme. On a
CPU a lone thread is timed by the time that it has had a core, so that waiting for one isn't counted.
"""

from __future__ import annotations

import gc
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
from meshwright.train.optimizer import local_squared_norm, scale_gradients

K = TypeVar("K")
Run = Callable[[], object]
Clock = Callable[[], float]

MIN_S = 0.001
ROUNDS = 20
QUANTILE = 0.25
CPU_SIZES, CPU_ROWS, CPU_LENGTHS = (64, 256, 768), (16, 128, 1024), (32, 128, 512)
CUDA_SIZES, CUDA_ROWS, CUDA_LENGTHS = (512, 2048, 8192), (64, 1024, 16384), (512, 1024, 2048, 4096, 8192)
LONGEST_S = 0.02
"""Longest time of a product on a CPU: larger ones are left out, as of a dtype that it has no instructions for."""
HEADS, HEAD_DIMS, TOKENS = 4, (32, 64), 1024
CHAIN = 32
UPDATED = ((64, 64), (2**20, 20))
"""Elements and number of parameters that are updated: of a time per parameter, and of one per byte."""
UPDATE_BYTES = 40
"""Read and written per element: seven tensors by AdamW, one by the norm, two by clipping."""
HELD_BYTES = 2**25
"""Results of kernels bound by memory that are held at a time: more than caches, as the activations of a step are."""


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(cases: Mapping[K, Run], device: torch.device, *, budget_s: float, rounds: int = ROUNDS) -> dict[K, float]:
    """Return the seconds of each case, over at least two rounds and as many as the budget allows."""
    end = time.perf_counter() + budget_s
    repeats = {name: _repeats(run, device) for name, run in cases.items()}
    found: dict[K, list[float]] = {name: [] for name in cases}
    with without_collection():
        for number in range(rounds):
            for name, run in cases.items():
                found[name].append(seconds_of(run, repeats[name], device))
            if number and time.perf_counter() > end:
                break
    return {name: low_quantile(one) for name, one in found.items()}


def low_quantile(values: Sequence[float]) -> float:
    """Return the lower quartile of values."""
    return sorted(values)[int(QUANTILE * len(values))]


def _repeats(run: Run, device: torch.device) -> int:
    """Return how often to run a case in a round; the first run warms up."""
    run()
    once = seconds_of(run, 1, device)
    return max(1, round(MIN_S / max(once, 1e-7)))


def seconds_of(run: Run, repeats: int, device: torch.device, *, clock: Clock | None = None) -> float:
    """Return the seconds of a run, the mean over `repeats`, by a clock: on a CPU the time that the thread has had a
    core, unless another is given."""
    clock = clock or (time.thread_time if device.type == "cpu" else time.perf_counter)
    synchronise(device)
    begin = clock()
    for _ in range(repeats):
        run()
    synchronise(device)
    return (clock() - begin) / repeats


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


def measure_products(device: torch.device, dtype: torch.dtype, *, budget_s: float) -> list[TimedProduct]:
    """Time products over a grid of shapes, in the memory layouts of a linear layer's forward and of both its gradients,
    which on some devices differ tenfold."""
    is_cuda = device.type == "cuda"
    sizes, rows = (CUDA_SIZES, CUDA_ROWS) if is_cuda else (CPU_SIZES, CPU_ROWS)
    cases: dict[tuple[int, int, int, int], Run] = {}
    slowest = [0.0] * 3  # seconds per operation of the last case that was kept, by layout
    for shape in sorted(product(rows, sizes, sizes), key=lambda one: one[0] * one[1] * one[2]):
        left, right = (torch.randn(*one, device=device, dtype=dtype) for one in (shape[:2], shape[1:]))
        left_t, right_t = left.t().contiguous().t(), right.t().contiguous().t()
        flops = 2 * shape[0] * shape[1] * shape[2]
        for number, (x, y) in enumerate(((left, right_t), (left, right), (left_t, right))):
            if is_cuda or flops * slowest[number] < LONGEST_S:
                run = cases[(*shape, number)] = partial(torch.matmul, x, y)
                slowest[number] = seconds_of(run, 1, device) / flops
    found = timed(cases, device, budget_s=budget_s)
    return [TimedProduct(*case, seconds) for case, seconds in found.items()]


def measure_attention(
    device: torch.device, dtype: torch.dtype, *, budget_s: float, overhead_s: float
) -> list[TimedAttention]:
    """Time causal attention by length and size of heads, forward and backward; `overhead_s` is the time of launching a
    kernel, which isn't its own."""
    lengths = CUDA_LENGTHS if device.type == "cuda" else CPU_LENGTHS
    cases: dict[tuple[int, int, bool], Run] = {}
    for length, dim in product(lengths, HEAD_DIMS):
        shape = (max(1, TOKENS // length), HEADS, length, dim)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        wanted = [one.clone().requires_grad_() for one in (q, k, v)]
        out = F.scaled_dot_product_attention(wanted[0], wanted[1], wanted[2], is_causal=True)
        gradient = torch.ones_like(out)
        cases[length, dim, False] = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        cases[length, dim, True] = partial(torch.autograd.grad, out, wanted, gradient, retain_graph=True)
    found = timed(cases, device, budget_s=budget_s)
    less = 0.0 if device.type == "cuda" else overhead_s
    net = {key: max(seconds - less, 0.2 * seconds) for key, seconds in found.items()}
    samples = []
    for length, dim in product(lengths, HEAD_DIMS):
        pairs = max(1, TOKENS // length) * length * (length + 1) / 2
        flops = 4.0 * HEADS * dim * pairs
        samples.append(TimedAttention(length, flops, net[length, dim, False], net[length, dim, True]))
    return samples


def memory_cases(device: torch.device) -> dict[str, tuple[int, Run]]:
    """Return kernels of blocks that are bound by memory, with the bytes that they read and write. Their results are
    held for a while, as a step holds activations, so that they come from memory and not from caches."""
    size = 2**24 if device.type == "cuda" else 2**18
    x, y = (torch.randn(size // 64, 64, device=device) for _ in range(2))
    count = max(1, HELD_BYTES // (4 * size))
    kernels: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "add": (12, partial(torch.add, x, y)),
        "multiply": (12, partial(torch.mul, x, y)),
        "scale": (8, partial(torch.mul, x, 0.5)),
        "mean": (4, partial(x.mean, -1, keepdim=True)),
        "silu": (8, partial(F.silu, x)),
    }
    return {name: (moved * size * count, partial(_held, run, count)) for name, (moved, run) in kernels.items()}


def _held(run: Callable[[], Tensor], count: int) -> None:
    results = [run() for _ in range(count)]
    results.clear()


def measure_memory(device: torch.device, *, budget_s: float) -> float:
    """Return the bytes per second that kernels bound by memory achieve."""
    cases = memory_cases(device)
    found = timed({name: run for name, (_, run) in cases.items()}, device, budget_s=budget_s)
    return sum(moved for moved, _ in cases.values()) / sum(found.values())


def measure_copy(device: torch.device, *, budget_s: float) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    size = 2**28 if device.type == "cuda" else 2**24
    x, y = (torch.zeros(size, device=device) for _ in range(2))
    seconds = timed({"copy": lambda: y.copy_(x)}, device, budget_s=budget_s)["copy"]
    return 8 * size / seconds


def measure_host(device: torch.device, *, budget_s: float) -> dict[str, float]:
    """Return the host's time in µs of a kernel with autograd, of one without, and of the optimizer per parameter; and
    the bytes per second that its update of large parameters reads and writes."""
    x = torch.randn(8, 8, device=device)
    small, large = ([torch.zeros(size, device=device) for _ in range(count)] for size, count in UPDATED)
    cases: dict[str, Run] = {
        "chain": partial(_chain, x.clone().requires_grad_()),
        "bare": partial(_chain, x),
        "small": _update(small),
        "large": _update(large),
    }
    found = timed(cases, device, budget_s=budget_s, rounds=25)
    (_, num_small), (size, num_large) = UPDATED
    parameter_s = found["small"] / num_small
    return {
        "launch": 1e6 * found["chain"] / (2 * CHAIN),
        "bare": 1e6 * found["bare"] / CHAIN,
        "parameter": 1e6 * parameter_s,
        "update_bytes_per_s": UPDATE_BYTES * size * num_large / (found["large"] - num_large * parameter_s),
    }


def _update(tensors: Sequence[Tensor]) -> Run:
    """Return a function that takes the norm of gradients, clips them and updates parameters, as a step does."""
    parameters = [nn.Parameter(one) for one in tensors]
    for one in parameters:
        one.grad = torch.full_like(one, 1e-3)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    def update() -> None:
        local_squared_norm(parameters, num_ranks=1)
        scale_gradients(parameters, 1.0)
        optimizer.step()

    return update


def _chain(x: Tensor) -> None:
    """Run tiny kernels, forward and, if `x` wants a gradient, backward."""
    y = x
    for _ in range(CHAIN):
        y = y * 0.5
    if x.requires_grad:
        torch.autograd.backward(y.sum())


def sharing_cases(device: torch.device) -> dict[str, Run]:
    """Return a case of each part of the work, to be timed alone and on all cores at a time."""
    x, y = (torch.randn(256, 256, device=device) for _ in range(2))
    q, k, v = (torch.randn(4, HEADS, 128, 32, device=device) for _ in range(3))
    kernels = [run for _, run in memory_cases(device).values()]
    tiny = torch.randn(8, 8, device=device, requires_grad=True)
    return {
        "products": partial(torch.matmul, x, y),
        "attention": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        "memory": lambda: [run() for run in kernels],
        "host": partial(_chain, tiny),
    }
