"""Kernels of compressed collectives, compared with a memory copy, on any device.

A memory-bound kernel is at best as fast as a copy of the same number of bytes, so the copy is the baseline. Before
timing, the output of each kernel is compared bitwise with the torch reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.compression import codecs
from meshwright.comm.compression.catalogue import ERROR_CODEC, Codec
from meshwright.comm.kernels import dispatch
from meshwright.comm.kernels.dispatch import find_kernels
from meshwright.errors import RunError
from meshwright_bench.alternate import alternate
from meshwright_bench.comm.cases import COPY, DTYPES, KernelTask
from meshwright_bench.train.measure import timer_on

CODEC = Codec.INT4
CHECKED_ELEMENTS = 12_345
"""Number of elements to check; not a multiple of the group size."""


@dataclass(frozen=True)
class Kernel:
    """Repeatable kernel call."""

    run: Callable[..., object]
    """Takes the kernels to run, by default those that `dispatch` finds."""
    num_bytes: int
    """Bytes read and written."""


def measure_kernels(task: KernelTask) -> None:
    """Measure on the CPU and write seconds, bytes and the instruction set as JSON."""
    task.result.write_text(json.dumps(cpu_kernels(task)), "utf-8")


def cpu_kernels(task: KernelTask) -> dict[str, Any]:
    """Measure the seconds per round and the bytes of each kernel.

    Raises:
        RunError: the output of a kernel differs from the reference.
    """
    cpu = torch.device("cpu")
    num_elements, kernels = task.num_elements, {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        check_bits(dtype, cpu)
        kernels[f"loco4_{name}"] = loco_quantise(num_elements, dtype, cpu)
        kernels[f"int4_{name}"] = encode(num_elements, dtype, CODEC, rotate=False)
        kernels[f"int8_rotated_{name}"] = encode(num_elements, dtype, Codec.INT8, rotate=True)
        for num_blocks in (2, 8):
            kernels[f"decode_sum_{num_blocks}_{name}"] = decode_sum(num_blocks, num_elements, dtype, cpu)
    kernels[COPY] = copy(kernels[f"loco4_{DTYPES[0]}"].num_bytes, cpu)
    for kernel in kernels.values():
        kernel.run()
    arms = {name: kernel.run for name, kernel in kernels.items()}
    timed = alternate(arms, timer=timer_on(cpu), rounds=task.rounds, steps=task.steps)
    library = find_kernels()
    return {
        "isa": "torch reference" if library is None else library.isa.value,
        "num_elements": num_elements,
        "bytes": {name: kernel.num_bytes for name, kernel in kernels.items()},
        "seconds": timed.seconds,
    }


def loco_quantise(num_elements: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return the kernel that quantizes a gradient to 4 bits with error feedback, as in a training step."""
    g = _random((num_elements,), dtype, device)
    error = dispatch.loco_quantise(g, _zero_error(num_elements, device), CODEC)[1]
    new_error = torch.empty_like(error)
    num_bytes = _bytes(g, error, new_error) + CODEC.encoded_bytes(num_elements)
    return Kernel(lambda kernels=dispatch: kernels.loco_quantise(g, error, CODEC, new_error=new_error), num_bytes)


def encode(num_elements: int, dtype: torch.dtype, codec: Codec, *, rotate: bool) -> Kernel:
    """Return the kernel that encodes a tensor, on the CPU."""
    x = _random((num_elements,), dtype, torch.device("cpu"))
    return Kernel(lambda: dispatch.encode(x, codec, rotate=rotate), _bytes(x) + codec.encoded_bytes(num_elements))


def decode_sum(num_blocks: int, num_elements: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return the kernel that decodes and sums the 4-bit blocks of several ranks."""
    block = dispatch.encode(_random((num_elements,), dtype, device), CODEC)
    payloads = block.repeat(num_blocks, 1)
    out = torch.empty(num_elements, dtype=dtype, device=device)
    return Kernel(
        lambda kernels=dispatch: kernels.decode_sum(payloads, CODEC, out=out, multiplier=1 / num_blocks),
        _bytes(payloads, out),
    )


def copy(num_bytes: int, device: torch.device) -> Kernel:
    """Return a copy that reads and writes `num_bytes` in total."""
    x = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    y = torch.ones_like(x)
    return Kernel(lambda: y.copy_(x), _bytes(x, y))


def check_bits(dtype: torch.dtype, device: torch.device, kernels: Any = dispatch) -> None:
    """Compare kernels on a device, by default those that `dispatch` finds, bitwise with the torch reference on the CPU.

    Raises:
        RunError: the results differ.
    """
    g = _random((CHECKED_ELEMENTS,), dtype, torch.device("cpu"))
    _, error = codecs.loco_quantise(g, _zero_error(CHECKED_ELEMENTS, g.device), CODEC)
    payload, new_error = codecs.loco_quantise(g, error, CODEC)
    blocks = torch.stack([payload, codecs.encode(g, CODEC), payload])
    total = codecs.decode_sum(blocks, CODEC, num_elements=CHECKED_ELEMENTS, dtype=dtype, multiplier=1 / 3)
    ours = kernels.loco_quantise(g.to(device), error.to(device), CODEC)
    out = torch.empty(CHECKED_ELEMENTS, dtype=dtype, device=device)
    kernels.decode_sum(blocks.to(device), CODEC, out=out, multiplier=1 / 3)
    pairs = {"payload": (ours[0], payload), "new error": (ours[1], new_error), "sum": (out, total)}
    if incorrect := [name for name, (actual, expected) in pairs.items() if not torch.equal(actual.cpu(), expected)]:
        raise RunError(
            f"incorrect {' and '.join(incorrect)} of the {dtype} kernels on {device}",
            where="bench comm",
            rule="kernels must equal the torch reference bitwise, else the comparison is meaningless",
            fix="this is a bug: please report it with this message",
        )


def _zero_error(num_elements: int, device: torch.device) -> Tensor:
    num_bytes = ERROR_CODEC.encoded_bytes(num_elements)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
