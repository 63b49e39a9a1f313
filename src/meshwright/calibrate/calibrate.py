"""Calibration: measure this machine in processes of its own, and fit a cluster's performance to what they found."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.calibrate import fit, ranks
from meshwright.calibrate.small_runs import small_runs
from meshwright.cluster.collectives import CollectiveOp
from meshwright.cluster.hardware import Cluster, Device, Rate
from meshwright.cluster.host import host_memory_bytes, num_cores
from meshwright.cluster.performance import Performance
from meshwright.cluster.presets import cluster_preset, preset_for
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.time.step_time import predict_step
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.machine_limits import RANKS_PER_CORE

BUDGET_S = 24.0
"""Default time of measuring, beside the start of processes."""
GROUPS_SHARE = 0.5
CPU_PROCESSES = (2, 4)
"""Sizes of groups whose collectives and runs are measured on a CPU: as many as a laptop's cores, and more."""
RATES = {"float64": Rate.FP64, "float32": Rate.FP32, "bfloat16": Rate.BF16, "float16": Rate.FP16}
MEMORY_RESIDUAL = 0.15
"""How much kernels bound by memory differ from each other, as it is on machines that were measured."""

DISTURBED = 0.35
"""Standard deviation of times' logarithm by other programs that keep all cores busy: kernels and steps then took up to
1.8 times as long, though only time on a core was counted (2 cores of an AMD EPYC)."""

Say = Callable[[str], None]
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Calibration:
    """A calibrated cluster, how many times were measured for each part of it, and how many cores others used then."""

    cluster: Cluster
    counts: Mapping[str, int]
    others: float


def calibrate(*, device: str, budget_s: float = BUDGET_S, say: Say = lambda _: None) -> Calibration:
    """Measure this machine, one thread per process, and return it as a cluster.

    Args:
        device: `cpu` or `cuda`.
        budget_s: time of measuring in seconds, beside the start of processes.
        say: called with what is measured next.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as folder:
        say("measuring products, attention, kernels bound by memory, the host, steps")
        request = ranks.Request(f"{folder}/device.json", (1 - GROUPS_SHARE) * budget_s, device)
        launch(ranks.measure_device, request, num_ranks=1, threads=1)
        found = json.loads(Path(request.out).read_text("utf-8"))
        groups = {}
        sizes = _group_sizes(device)
        for size in sizes:
            say(f"measuring collectives and steps of {size} processes")
            request = ranks.Request(f"{folder}/{size}.json", GROUPS_SHARE * budget_s / len(sizes), device)
            launch(ranks.measure_group, request, num_ranks=size, threads=1)
            groups[size] = json.loads(Path(request.out).read_text("utf-8"))
    say("fitting")
    return fitted(found, groups, device=device)


def fitted(found: Found, groups: Mapping[int, Found], *, device: str) -> Calibration:
    """Fit a cluster to what processes have measured: of the device, and of groups by their number of ranks."""
    products = {name: [fit.TimedProduct(**one) for one in timed] for name, timed in found["products"].items()}
    attention = {name: [fit.TimedAttention(**one) for one in timed] for name, timed in found["attention"].items()}
    collectives = [
        fit.TimedCollective(CollectiveOp(op), num_bytes, size, seconds)
        for size, one in groups.items()
        for op, num_bytes, seconds in one["timed"]
    ]
    cluster = _of_device(found, products, attention, device)
    shared = {name: max(1.0, slower) for name, slower in groups.get(num_cores(), {}).get("shared", {}).items()}
    cluster = replace(cluster, performance=fit.rounded(replace(cluster.performance, shared=shared)))
    if collectives:
        cluster = fit.fit_link(cluster, collectives)
    runs = list(_timed_runs({1: found, **groups}, device))
    if runs:
        cluster = fit.fit_runs(cluster, runs)
    cluster = _at_most_all(cluster)
    cluster = _less_certain(cluster, DISTURBED * min(1.0, found["others"] / num_cores()))
    counts = {
        "products": sum(map(len, products.values())),
        "attention": 2 * sum(map(len, attention.values())),
        "collectives": len(collectives),
        "steps": len(runs),
    }
    return Calibration(cluster, counts, found["others"])


def _at_most_all(cluster: Cluster) -> Cluster:
    """Return the cluster with as much bandwidth as kernels achieve, if that is more than was measured."""
    old, device = cluster.performance, cluster.device
    more = max(1.0, old.memory_efficiency)
    bandwidth = float(f"{device.memory_bandwidth_bytes_per_s * more:.4g}")
    efficiency, update = old.memory_efficiency / more, old.update_efficiency / more
    performance = fit.rounded(replace(old, memory_efficiency=efficiency, update_efficiency=update))
    return replace(cluster, device=replace(device, memory_bandwidth_bytes_per_s=bandwidth), performance=performance)


def _less_certain(cluster: Cluster, deviation: float) -> Cluster:
    """Return the cluster with a deviation of all its times more."""
    old = cluster.performance
    alone, group = (math.hypot(one, deviation) for one in (old.residual, old.group_residual))
    performance = replace(old, residual=alone, group_residual=group)
    return replace(cluster, performance=fit.rounded(performance))


def _of_device(
    found: Found,
    products: Mapping[str, Sequence[fit.TimedProduct]],
    attention: Mapping[str, Sequence[fit.TimedAttention]],
    device: str,
) -> Cluster:
    """Return the cluster with what kernels show."""
    is_cuda = device == "cuda"
    base = (preset_for(found["device"]) or cluster_preset("H100")) if is_cuda else cluster_preset("CPU")
    source = f"meshwright calibrate: {found['device']}, {found['versions']}, one thread per process"
    hardware = base.device if is_cuda else _cpu(base.device, found, products, source)
    own = found["host"]
    host = replace(base.performance.host, launch_us=own["launch"], compiled_launch_us=own["bare"])
    host = replace(host, parameter_us=own["parameter"])
    performance = Performance(
        source=source,
        products={name: fit.fit_products(timed) for name, timed in products.items()},
        attention={name: fit.fit_attention(timed) for name, timed in attention.items()},
        memory_efficiency=min(1.0, found["memory"] / hardware.memory_bandwidth_bytes_per_s),
        memory_residual=MEMORY_RESIDUAL,
        host=host,
        links=base.performance.links,
        is_async=is_cuda,
        update_efficiency=min(1.0, own["update_bytes_per_s"] / hardware.memory_bandwidth_bytes_per_s),
        cores=0 if is_cuda else num_cores(),
    )
    if is_cuda:
        return replace(base, performance=performance)
    # Ranks on a CPU are processes, of which a machine may have more than cores.
    per_node, link = RANKS_PER_CORE * num_cores(), replace(base.inside_node, source=source)
    return replace(
        base, name="this machine", device=hardware, devices_per_node=per_node, inside_node=link, performance=performance
    )


def _timed_runs(groups: Mapping[int, Found], device: str) -> Iterator[fit.TimedRun]:
    for size, one in groups.items():
        for config, seconds in zip(small_runs(size, device=device), one["runs"], strict=True):
            plan = make_plan(config)
            predict = partial(_predicted_us, plan)
            yield fit.TimedRun(predict, 1e6 * seconds, size)


def _predicted_us(plan: RunPlan, cluster: Cluster) -> float:
    return predict_step(plan, cluster).total


def _cpu(base: Device, found: Found, products: Mapping[str, Sequence[fit.TimedProduct]], source: str) -> Device:
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
        memory_bandwidth_bytes_per_s=float(
            f"{max(found['copy'], found['memory'], found['host']['update_bytes_per_s']):.4g}"
        ),
        launch_overhead_us=float(f"{found['host']['bare']:.4g}"),
        source=source,
    )


def _group_sizes(device: str) -> tuple[int, ...]:
    if device == "cpu":
        return tuple(sorted({*CPU_PROCESSES, min(num_cores(), 16)} - {1}))
    import torch

    count = torch.cuda.device_count()
    return tuple(size for size in (2, 4, 8) if size <= count)
