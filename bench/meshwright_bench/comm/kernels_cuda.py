"""Kernels of compressed collectives on a CUDA device, compared with the device's copy bandwidth.

Several sets of tensors alternate, so that no kernel reads from a cache; time is measured with device events.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import torch

from meshwright.comm.kernels import dispatch
from meshwright_bench.alternate import alternate, variant_name
from meshwright_bench.comm.cases import COPY, DECODE_SUM_8, QUANTISE, TILINGS, CudaTask
from meshwright_bench.comm.kernels import Kernel, check_bits, copy, decode_sum, loco_quantise
from meshwright_bench.train.measure import timer_on

DTYPE = torch.bfloat16


def measure_cuda(task: CudaTask) -> None:
    """Measure and write seconds and bytes as JSON."""
    task.result.write_text(json.dumps(device_kernels(task)), "utf-8")


def device_kernels(task: CudaTask) -> dict[str, Any]:
    """Measure the seconds per round and the bytes of each kernel.

    Raises:
        RunError: the output of a kernel differs from the reference.
    """
    device = torch.device(task.device)
    check_bits(DTYPE, device)
    makers: dict[str, Callable[[], Kernel]] = {
        QUANTISE: partial(loco_quantise, task.num_elements, DTYPE, device),
        DECODE_SUM_8: partial(decode_sum, 8, task.num_elements, DTYPE, device),
    }
    sets = {name: [make() for _ in range(task.num_sets)] for name, make in makers.items()}
    sets[COPY] = [copy(sets[QUANTISE][0].num_bytes, device) for _ in range(task.num_sets)]
    for kernels in sets.values():  # compiles and allocates
        for kernel in kernels:
            kernel.run()
    arms = {name: _cycle([kernel.run for kernel in kernels]) for name, kernels in sets.items()}
    for sizes, variant in variants(device):
        check_bits(DTYPE, device, variant)
        for name in makers:
            arm = arms[variant_name(name, sizes)] = _cycle([partial(kernel.run, variant) for kernel in sets[name]])
            arm()
    timed = alternate(arms, timer=timer_on(device), rounds=task.rounds, steps=task.steps)
    return {
        "num_elements": task.num_elements,
        "bytes": {name: kernels[0].num_bytes for name, kernels in sets.items()},
        "seconds": timed.seconds,
    }


def variants(device: torch.device) -> Iterator[tuple[Mapping[str, int], Any]]:
    """Yield other sizes of programs, and the kernels with them; nothing without Triton."""
    if device.type == "cuda" and dispatch.find_triton() is not None:
        from meshwright.comm.kernels.triton_kernels import Tiling, TritonKernels

        for sizes in TILINGS:
            yield sizes, TritonKernels(Tiling(**sizes))


def _cycle(runs: list[Callable[..., object]]) -> Callable[[], object]:
    """Return a function that calls the functions in turn, one per call."""
    following = cycle(runs)
    return lambda: next(following)()
