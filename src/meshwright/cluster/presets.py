"""Cluster presets by name, read from `presets.toml`, which cites a source for each figure, and clusters by the name of
a preset or the path of a file. Doesn't import torch."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.cluster import cluster_file
from meshwright.cluster.hardware import Cluster, Device, Level
from meshwright.errors import ConfigError
from meshwright.output_files import user_cache

RESERVE = 0.06
"""Share of a GPU's memory that is left to CUDA's context, NCCL's buffers and fragmentation."""
HERE = "here"
"""Name of this machine as it was calibrated."""
OWN_KEYS = ("cuda_names", "listed", "host")
"""Keys of a preset that a cluster file doesn't have."""


def preset_names() -> list[str]:
    """Return the names accepted by `cluster_preset`, in file order."""
    return list(_read()["clusters"])


def link_names() -> list[str]:
    """Return the names of links that a cluster file may use."""
    return list(_read()["links"])


def cluster_preset(name: str) -> Cluster:
    """Return the cluster preset with this name, ignoring case.

    Raises:
        ConfigError: the preset is unknown.
    """
    key = name.upper()
    if key not in _read()["clusters"]:
        names = preset_names()
        longer = [full for full in names if key and full.startswith(key)]
        near = longer or difflib.get_close_matches(key, names, n=1, cutoff=0.0)
        raise ConfigError(
            f"{name} is not a cluster preset", rule=f"presets are {', '.join(names)}", fix=" or ".join(near)
        )
    return _preset(key)


def preset_on(name: str, link: str) -> Cluster:
    """Return a preset with another link between its nodes, by the link's name."""
    table = {**_as_file(name), "between_nodes": link}
    curves = {**table["performance"]["links"], "between_nodes": _read()["links"][link]["curve"]}
    performance = {**table["performance"], "links": curves}
    return cluster_file.cluster_of({**table, "performance": performance}, _read()["links"], f"presets.toml, {name}")


def own_file() -> Path | None:
    """Return the path of this machine's cluster file, which `meshwright calibrate` writes unless told another; None
    without a home directory."""
    cache = user_cache()
    return None if cache is None else cache / "cluster.toml"


def find_cluster(name_or_path: str) -> Cluster:
    """Return the preset of this name, this machine as it was calibrated (`here`), or the cluster of a file.

    Raises:
        ConfigError: there is none, or the file isn't valid.
    """
    if name_or_path == HERE:
        path = own_file()
        if path is None or not path.exists():
            rule = f"{HERE} is this machine as measured"
            raise ConfigError("this machine isn't calibrated", where="--cluster", rule=rule, fix="meshwright calibrate")
        return read_cluster(path)
    if name_or_path.upper() in _read()["clusters"]:
        return _preset(name_or_path.upper())
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        return read_cluster(path)
    return cluster_preset(name_or_path)


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ConfigError: the file can't be read, or a key is unknown, missing, of a wrong type or out of range.
    """
    presets = {name: _as_file(name) for name in preset_names()}
    return cluster_file.read_cluster(path, presets, _read()["links"])


def cluster_of_device(name: str) -> Cluster | None:
    """Return the cluster of the device that a run records, `cpu` or a GPU's CUDA name: this machine as calibrated, if
    that is the device's, else its preset; None if there is none."""
    path, preset = own_file(), _preset("CPU") if name == "cpu" else preset_for(name)
    if path is None or not path.exists():
        return preset
    own = read_cluster(path)
    is_own = not own.performance.is_async if name == "cpu" else preset and preset.device.name == own.device.name
    return own if is_own else preset


def gpus_by_memory(num_bytes: int) -> tuple[list[Cluster], list[Cluster]]:
    """Return the listed presets of GPUs that have less memory beside `RESERVE`, and the others; the smallest first."""
    gpus = [cluster_preset(name) for name, table in _read()["clusters"].items() if table.get("listed")]
    gpus.sort(key=lambda cluster: cluster.device.memory_bytes)
    first = sum(cluster.device.memory_bytes * (1 - RESERVE) < num_bytes for cluster in gpus)
    return gpus[:first], gpus[first:]


def device_for(cuda_name: str) -> Device | None:
    """Return the device for a `torch.cuda.get_device_name` such as `NVIDIA H200`, or None if no preset has it.

    Names must match exactly, because variants (PCIe, NVL, MIG slices) share a prefix but have different rates.
    """
    found = preset_for(cuda_name)
    return None if found is None else found.device


def preset_for(cuda_name: str) -> Cluster | None:
    """Return the preset of the device with this `torch.cuda.get_device_name`, as `device_for` finds it."""
    short = cuda_name.removeprefix("NVIDIA ")
    for name, table in _read()["clusters"].items():
        if short in table.get("cuda_names", ()):
            return _preset(name)
    return None


@cache
def _preset(name: str) -> Cluster:
    return cluster_file.cluster_of(_as_file(name), _read()["links"], f"presets.toml, {name}")


def _as_file(name: str) -> dict[str, Any]:
    """Return a preset as the table of a cluster file: what the device, the host and the links achieve is joined."""
    tables = _read()
    table = {key: value for key, value in tables["clusters"][name].items() if key not in OWN_KEYS}
    device = tables["devices"][table["device"]]
    curves = {level: tables["links"][table[level]].get("curve") for level in Level if level in table}
    performance = {
        **device["performance"],
        "host": tables["hosts"][tables["clusters"][name]["host"]],
        "links": {level: curve for level, curve in curves.items() if curve},
    }
    facts = {key: value for key, value in device.items() if key != "performance"}
    return {"name": name, **table, "device": facts, "performance": performance}


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text("utf-8"))
