"""Calibration: measure this machine in processes of its own, and fit a cluster's performance to what they found."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.calibrate import fit, ranks
from meshwright.cluster.collectives import CollectiveOp
from meshwright.cluster.hardware import Cluster, Device, Level, Rate
from meshwright.cluster.host import host_memory_bytes, num_cores
from meshwright.cluster.performance import HostCosts, Performance
from meshwright.cluster.presets import cluster_preset, preset_for
from meshwright.train.launch.launcher import launch

BUDGET_S = 20.0
"""Default time of measuring, beside the start of processes."""
COLLECTIVES_SHARE = 0.25
CPU_PROCESSES = (2, 4)
"""Sizes of groups whose collectives are measured on a CPU: as many as a laptop's cores, and more."""
MODULES = 12
"""Modules that a transformer block calls, by which the host's time of one is multiplied."""
RATES = {"float64": Rate.FP64, "float32": Rate.FP32, "bfloat16": Rate.BF16, "float16": Rate.FP16}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """A calibrated cluster, and how many times were measured for each part of it."""

    cluster: Cluster
    counts: Mapping[str, int]


def calibrate(*, device: str, budget_s: float = BUDGET_S, say: Say = lambda _: None) -> Calibration:
    """Measure this machine, one thread per process, and return it as a cluster.

    Args:
        device: `cpu` or `cuda`.
        budget_s: time of measuring in seconds, beside the start of processes.
        say: called with what is measured next.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as folder:
        say("measuring products, attention, kernels bound by memory, the host")
        request = ranks.Request(f"{folder}/device.json", (1 - COLLECTIVES_SHARE) * budget_s, device)
        launch(ranks.measure_device, request, num_ranks=1, threads=1)
        found = json.loads(Path(request.out).read_text("utf-8"))
        groups = {}
        sizes = _group_sizes(device)
        for size in sizes:
            say(f"measuring collectives between {size} processes")
            request = ranks.Request(f"{folder}/{size}.json", COLLECTIVES_SHARE * budget_s / len(sizes), device)
            launch(ranks.measure_collectives, request, num_ranks=size, threads=1)
            groups[size] = json.loads(Path(request.out).read_text("utf-8"))
    return fitted(found, groups, device=device)


def fitted(found: Mapping[str, Any], groups: Mapping[int, Mapping[str, Any]], *, device: str) -> Calibration:
    """Fit a cluster to what processes have measured: of the device, and of groups by their number of ranks."""
    is_cuda = device == "cuda"
    base = (preset_for(found["device"]) or cluster_preset("H100")) if is_cuda else cluster_preset("CPU")
    products = {name: [fit.TimedProduct(**one) for one in timed] for name, timed in found["products"].items()}
    attention = {name: [fit.TimedAttention(**one) for one in timed] for name, timed in found["attention"].items()}
    memory = fit.fit_memory([(moved, seconds) for moved, seconds in found["memory"]])
    source = f"meshwright calibrate: {found['device']}, {found['versions']}, one thread per process"
    hardware = base.device if is_cuda else _cpu(base.device, found, products, memory, source)
    collectives = [
        fit.TimedCollective(CollectiveOp(op), num_bytes, size, seconds)
        for size, one in groups.items()
        for op, num_bytes, seconds in one["timed"]
    ]
    cores = 0 if is_cuda else num_cores()
    link, curve = base.inside_node, base.curve(Level.INSIDE_NODE)
    if collectives:
        bandwidth, curve = fit.fit_link(collectives, cores=cores)
        if is_cuda:
            curve = replace(curve, efficiency=min(1.0, bandwidth / link.bandwidth_bytes_per_s))
        else:
            link = replace(link, latency_us=curve.latency_us, bandwidth_bytes_per_s=bandwidth, source=source)
    performance = Performance(
        source=source,
        products={name: fit.fit_products(timed) for name, timed in products.items()},
        attention={name: fit.fit_attention(timed) for name, timed in attention.items()},
        memory_efficiency=min(1.0, float(f"{memory.bytes_per_s / hardware.memory_bandwidth_bytes_per_s:.4g}")),
        memory_residual=memory.residual,
        host=_host(found["host"], groups, base.performance.host),
        links={**base.performance.links, Level.INSIDE_NODE: curve},
        is_async=is_cuda,
        cores=cores,
    )
    name = "this machine" if not is_cuda else base.name
    per_node = base.devices_per_node if is_cuda else num_cores()
    cluster = replace(
        base, name=name, device=hardware, devices_per_node=per_node, inside_node=link, performance=performance
    )
    counts = {
        "products": sum(map(len, products.values())),
        "attention": 2 * sum(map(len, attention.values())),
        "memory": len(found["memory"]),
        "collectives": len(collectives),
    }
    return Calibration(cluster, counts)


def _cpu(
    base: Device,
    found: Mapping[str, Any],
    products: Mapping[str, Sequence[fit.TimedProduct]],
    memory: fit.MemoryFit,
    source: str,
) -> Device:
    """Return the device of this machine's CPU: peak rates are the highest that were measured."""
    peaks = {
        RATES[name]: float(f"{max(2 * one.rows * one.inner * one.columns / one.seconds for one in timed):.4g}")
        for name, timed in products.items()
    }
    size = host_memory_bytes()
    return Device(
        name="CPU, one thread per process",
        peak_flops=peaks,
        memory_bytes=base.memory_bytes if size is None else size // num_cores(),
        memory_bandwidth_bytes_per_s=float(f"{max(found['copy'], memory.bytes_per_s):.4g}"),
        launch_overhead_us=float(f"{found['host']['bare']:.4g}"),
        source=source,
    )


def _host(found: Mapping[str, float], groups: Mapping[int, Mapping[str, Any]], base: HostCosts) -> HostCosts:
    """Return the host's costs as measured one by one; those that only whole runs show are the preset's."""
    launch_us, module_us = found["launch"], found["module"]
    costs = replace(base, launch_us=launch_us, compiled_launch_us=found["bare"], parameter_us=found["parameter"])
    costs = replace(costs, block_us=MODULES * module_us)
    if groups:
        costs = replace(costs, unit_us=groups[min(groups)]["unit_us"])
    return replace(costs, **{name: float(f"{us:.4g}") for name, us in vars(costs).items()})


def _group_sizes(device: str) -> tuple[int, ...]:
    if device == "cpu":
        return CPU_PROCESSES
    import torch

    count = torch.cuda.device_count()
    return tuple(size for size in (2, 4, 8) if size <= count)
