"""Cluster presets by name, read from `presets.toml`, which cites a source for each figure."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from meshwright.cluster.spec import Cluster, Device, Link, Rate
from meshwright.errors import ConfigError
from meshwright.units import GIB

RESERVE = 0.06
"""Share of a GPU's memory that is left to CUDA's context, NCCL's buffers and fragmentation."""


def preset_names() -> list[str]:
    """Return the names accepted by `cluster_preset`, in file order."""
    return list(_read()["clusters"])


def cluster_preset(name: str) -> Cluster:
    """Return the cluster preset with this name, ignoring case.

    Raises:
        ConfigError: the preset is unknown.
    """
    tables = _read()
    key = name.upper()
    if key not in tables["clusters"]:
        names = preset_names()
        longer = [full for full in names if key and full.startswith(key)]
        near = longer or difflib.get_close_matches(key, names, n=1, cutoff=0.0)
        raise ConfigError(
            f"{name} is not a cluster preset", rule=f"presets are {', '.join(names)}", fix=" or ".join(near)
        )
    table = tables["clusters"][key]
    return Cluster(
        name=key,
        device=_device(table),
        devices_per_node=table["devices_per_node"],
        inside_node=_link(tables["links"][table["inside_node"]]),
        between_nodes=_link(tables["links"][table["between_nodes"]]),
    )


def gpus_by_memory(num_bytes: int) -> tuple[list[Cluster], list[Cluster]]:
    """Return the presets of GPUs that have less memory beside `RESERVE`, and the others; the smallest first."""
    gpus = [cluster_preset(name) for name in preset_names() if name != "CPU"]
    gpus.sort(key=lambda cluster: cluster.device.memory_bytes)
    first = sum(cluster.device.memory_bytes * (1 - RESERVE) < num_bytes for cluster in gpus)
    return gpus[:first], gpus[first:]


def device_for(cuda_name: str) -> Device | None:
    """Return the device for a `torch.cuda.get_device_name` such as `NVIDIA H200`, or None if no preset has it.

    Names must match exactly, because variants (PCIe, NVL, MIG slices) share a prefix but have different rates.
    """
    short = cuda_name.removeprefix("NVIDIA ")
    for table in _read()["clusters"].values():
        if short in table["cuda_names"]:
            return _device(table)
    return None


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(resources.files("meshwright.cluster").joinpath("presets.toml").read_text("utf-8"))


def _device(table: dict[str, Any]) -> Device:
    return Device(
        name=table["device_name"],
        peak_flops={Rate(rate): tflops * 1e12 for rate, tflops in table["peak_tflops"].items()},
        memory_bytes=table["memory_gib"] * GIB,
        memory_bandwidth_bytes_per_s=table["memory_bandwidth_gb_per_s"] * 1e9,
        launch_overhead_us=float(table["launch_overhead_us"]),
        source=table["source"],
    )


def _link(table: dict[str, Any]) -> Link:
    return Link(
        name=table["name"],
        latency_us=float(table["latency_us"]),
        bandwidth_bytes_per_s=table["bandwidth_gb_per_s"] * 1e9,
        ports=table["ports"],
        source=table["source"],
    )
