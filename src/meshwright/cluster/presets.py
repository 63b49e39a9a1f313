"""Specification of clusters (devices, links, devices per node) and presets by name, read from `presets.toml`, which
cites a source for each figure.

Peak rates are the vendor's figures for dense operands; the fraction that kernels achieve is determined by calibration,
not here. All quantities are per device: a link's bandwidth is that of one device in one direction.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

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


class Rate(StrEnum):
    """Number formats with separate peak rates. TF32 means float32 operands on tensor cores."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True)
class Device:
    """An accelerator, or a CPU process.

    Attributes:
        peak_flops: dense floating-point operations per second, by number format.
        memory_bytes: memory capacity as rounded in the data sheet; CUDA reports one or two percent less.
        memory_bandwidth_bytes_per_s: total of reads and writes.
        launch_overhead_us: time between kernel launches if the host is the bottleneck.
        source: source of the figures.
    """

    name: str
    peak_flops: Mapping[Rate, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_overhead_us: float
    source: str

    def peak(self, rate: Rate) -> float:
        """Return the peak rate for a number format.

        Raises:
            ConfigError: the device does not support the format.
        """
        if rate not in self.peak_flops:
            rule = f"it supports {', '.join(self.peak_flops)}"
            raise ConfigError(f"{self.name} has no {rate} rate", rule=rule, fix="use one of these, or another device")
        return self.peak_flops[rate]


@dataclass(frozen=True)
class Link:
    """A link between devices; a message takes `latency_us + bytes / bandwidth`.

    Attributes:
        bandwidth_bytes_per_s: bandwidth of one port in one direction.
        ports: number of concurrent transfers to different devices at full bandwidth each. A switch that spreads each
            transfer over all of a device's lanes counts as one port.
        source: source of the figures.
    """

    name: str
    latency_us: float
    bandwidth_bytes_per_s: float
    ports: int
    source: str

    def time_us(self, num_bytes: float) -> float:
        """Return the transfer time of one message through one port."""
        return self.latency_us + num_bytes / self.bandwidth_bytes_per_s * 1e6


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes. A node is the domain of the fast link, such as a server or an entire rack."""

    name: str
    device: Device
    devices_per_node: int
    inside_node: Link
    between_nodes: Link

    def link(self, num_devices: int) -> Link:
        """Return the slowest link within `num_devices` consecutive devices, starting at a node boundary."""
        return self.inside_node if num_devices <= self.devices_per_node else self.between_nodes
