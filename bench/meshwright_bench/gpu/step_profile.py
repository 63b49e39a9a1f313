"""Part `profile`: the compiled step by class of kernel, from the trace that a run's `train.profile` wrote.

Torch-free: the run is one of part `train`, whose trace is read if that part has left it.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.cluster.hardware import Rate
from meshwright.cluster.presets import device_for
from meshwright_bench.gpu.cases import Case, CaseError, Figures, Setting
from meshwright_bench.gpu.commands import measured_run
from meshwright_bench.gpu.kernel_classes import Busy, KernelClass, below_peak, classify, own_times, times_by_class
from meshwright_bench.gpu.sizes import COMPILED, our_words

LOG = logging.getLogger(__name__)

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that keep a GPU busy."""
ON_HOST = ("cpu_op",)
STEP = re.compile(r"step \d+")
LONGEST = 12
"""Number of kernels whose times are kept."""


def cases(setting: Setting) -> list[Case]:
    """Return the one case."""
    return [Case(COMPILED, partial(profile_run, setting))]


def profile_run(setting: Setting) -> Figures:
    """Return the shares of the profiled steps of the compiled run.

    Raises:
        CaseError: the run failed, or wrote no trace.
    """
    run = measured_run(COMPILED, our_words(COMPILED, setting), setting)
    traces = sorted((run.folder / "profile").glob("*.json.gz"))
    if not traces:
        raise CaseError("the run wrote no profile")
    trace = read_trace(traces[0])
    devices = trace.get("deviceProperties", ())
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    return step_figures(events, flops=run.flops, device=devices[0]["name"] if devices else None)


def read_trace(path: Path) -> dict[str, Any]:
    """Return a trace as PyTorch's profiler writes it."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        found: dict[str, Any] = json.load(file)
    return found


def step_figures(events: Sequence[Mapping[str, Any]], *, flops: float, device: str | None) -> dict[str, float | None]:
    """Return milliseconds of a step and the share of each class; with a known device also what its MFU lacks, and why.

    Args:
        events: complete events of a trace, with the steps' own among them.
        flops: FLOPs of a step.
        device: name of the GPU; None for a CPU, whose operators are classified instead of kernels.

    Raises:
        CaseError: the trace has no step.
    """
    steps = [one for one in events if one.get("cat") == "user_annotation" and STEP.fullmatch(one["name"])]
    if not steps:
        raise CaseError("the profile has no step")
    start = min(one["ts"] for one in steps)
    busy = list(_on_device(events)) or list(_on_host(events))
    # Kernels may outlast the host's part of the last step.
    end = max([one["ts"] + one["dur"] for one in steps] + [one.end_us for one in busy])
    spent = times_by_class(busy, start_us=start, end_us=end)
    shares = {kind: time / (end - start) for kind, time in spent.items()}
    found: dict[str, float | None] = {"step_ms": (end - start) / len(steps) / 1e3}
    found |= {f"share.{kind}": share for kind, share in shares.items()}
    found |= {f"launches.{kind}": number / len(steps) for kind, number in count_launches(busy).items()}
    found |= {f"kernel_ms.{name}": time / len(steps) / 1e3 for name, time in longest(busy).items()}
    known = None if device is None else device_for(device)
    if known is not None:
        mfu = flops * len(steps) / ((end - start) / 1e6) / known.peak(Rate.BF16)
        found["mfu"] = mfu
        lacking = below_peak(shares, mfu)
        found |= {f"below_peak.{name}": share for name, share in lacking.items()}
        LOG.info("between an MFU of %.1f %% and 100 %%:", 100 * mfu)
        for name, share in lacking.items():
            LOG.info("  %5.1f %% of the step  %s", 100 * share, name)
    return found


def _on_device(events: Iterable[Mapping[str, Any]]) -> Iterator[Busy]:
    for one in events:
        if one.get("cat") in ON_DEVICE:
            yield Busy(one["name"], one["ts"], one["dur"])


def _on_host(events: Iterable[Mapping[str, Any]]) -> Iterator[Busy]:
    threads: dict[Any, list[Busy]] = {}
    for one in events:
        if one.get("cat") in ON_HOST:
            threads.setdefault(one.get("tid"), []).append(Busy(one["name"], one["ts"], one["dur"]))
    for busy in threads.values():
        yield from own_times(busy)


def count_launches(busy: Iterable[Busy]) -> dict[KernelClass, int]:
    """Return the number of kernels of each class that has some."""
    return Counter(classify(one.name) for one in busy)


def longest(busy: Iterable[Busy]) -> dict[str, float]:
    """Return the microseconds of the names that take most, and of the largest that no rule knows."""
    total: dict[str, float] = {}
    for one in busy:
        total[one.name] = total.get(one.name, 0.0) + one.duration_us
    order = sorted(total, key=lambda name: -total[name])
    unknown = [name for name in order if classify(name) is KernelClass.OTHER]
    return {name: total[name] for name in dict.fromkeys([*order[:LONGEST], *unknown[:LONGEST]])}
