"""Cluster files: a cluster as TOML, read with clear errors and written by `meshwright calibrate`. Doesn't import torch.

Tables and keys are those of `Cluster` and of the classes inside it, except that a device and its links are written in
the units of data sheets: `memory_gib`, `peak_tflops`, `bandwidth_gb_per_s`. `preset` names the preset that what isn't
written comes from; a link may be the name of one in `presets.toml`.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from meshwright.cluster.hardware import Cluster, Device, Level, Link, Rate
from meshwright.errors import ConfigError
from meshwright.settings.toml import values_to_toml
from meshwright.units import GIB

T = TypeVar("T")

TERA, GIGA = 1e12, 1e9
DIGITS = 9
"""Digits after the point, in the units of data sheets; calibrations round more."""


@dataclass(frozen=True)
class DeviceTable:
    """A device in the units of its data sheet."""

    name: str
    peak_tflops: Mapping[str, float]
    memory_gib: float
    memory_bandwidth_gb_per_s: float
    launch_overhead_us: float
    source: str

    def device(self, where: str) -> Device:
        """Return the device.

        Raises:
            ConfigError: a rate is of an unknown format.
        """
        for rate in self.peak_tflops:
            if rate not in list(Rate):
                raise _unknown(f"peak_tflops.{rate}", list(Rate), where)
        peaks = {Rate(rate): tflops * TERA for rate, tflops in self.peak_tflops.items()}
        size, bandwidth = round(self.memory_gib * GIB), self.memory_bandwidth_gb_per_s * GIGA
        return Device(self.name, peaks, size, bandwidth, self.launch_overhead_us, self.source)

    @staticmethod
    def of(device: Device) -> dict[str, Any]:
        peaks = {str(rate): round(flops / TERA, DIGITS) for rate, flops in device.peak_flops.items()}
        bandwidth = round(device.memory_bandwidth_bytes_per_s / GIGA, DIGITS)
        table = DeviceTable(
            device.name, peaks, device.memory_bytes / GIB, bandwidth, device.launch_overhead_us, device.source
        )
        return vars(table)


@dataclass(frozen=True)
class LinkTable:
    """A link in the units of its data sheet."""

    name: str
    latency_us: float
    bandwidth_gb_per_s: float
    source: str
    ports: int = 1

    def link(self) -> Link:
        return Link(self.name, self.latency_us, self.bandwidth_gb_per_s * GIGA, self.ports, self.source)

    @staticmethod
    def of(link: Link) -> dict[str, Any]:
        bandwidth = round(link.bandwidth_bytes_per_s / GIGA, DIGITS)
        return vars(LinkTable(link.name, link.latency_us, bandwidth, link.source, link.ports))


def read_cluster(path: Path, presets: Mapping[str, dict[str, Any]], links: Mapping[str, dict[str, Any]]) -> Cluster:
    """Read a cluster file; `presets` and `links` are the tables that it may name.

    Raises:
        ConfigError: the file can't be read, or a key is unknown, missing, of a wrong type or out of range.
    """
    where = str(path)
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        rule = "a cluster is a preset or a TOML file"
        fix = "meshwright presets --devices lists the presets"
        raise ConfigError(f"can't read {path}: {error}", where=where, rule=rule, fix=fix) from None
    except tomllib.TOMLDecodeError as error:
        rule, fix = "a cluster file is TOML: [table], then key = value", "meshwright calibrate -o FILE writes one"
        raise ConfigError(f"{path.name} is not TOML: {error}", where=where, rule=rule, fix=fix) from None
    preset = table.pop("preset", None)
    if preset is not None:
        known = {name.upper(): base for name, base in presets.items()}
        if str(preset).upper() not in known:
            raise _unknown(f"preset = {preset!r}", list(presets), where)
        table = _merged(known[str(preset).upper()], table, links)
    return cluster_of(table, links, where)


def cluster_of(table: Mapping[str, Any], links: Mapping[str, dict[str, Any]], where: str) -> Cluster:
    """Return the cluster of a file's table.

    Raises:
        ConfigError: a key is unknown, missing, of a wrong type or out of range.
    """
    table = {level: table[level] for level in Level if level in table} | dict(table)
    found = dict[str, Link]()
    for level in Level:
        if isinstance(name := table.get(level), str):
            if name not in links:
                raise _unknown(f"{level} = {name!r}", list(links), where)
            table[level] = links[name]
        if level in table:
            facts = {key: value for key, value in _table(table[level], level, where).items() if key != "curve"}
            found[level] = read_value(LinkTable, facts, level, where).link()
    plain = {key: value for key, value in table.items() if key not in (*Level, "device")}
    for key in ("device", Level.INSIDE_NODE, Level.BETWEEN_NODES):
        if key not in table:
            raise _missing(key, "", where)
    device = read_value(DeviceTable, table["device"], "device", where).device(f"{where}, [device]")
    resolved = plain | {"device": device} | found
    return read_value(Cluster, resolved, "", where)


def cluster_toml(cluster: Cluster, comment: str = "") -> str:
    """Return a cluster as the text of a file, which `read_cluster` reads as an equal cluster."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*lines, values_to_toml(_tables(cluster))])


def cluster_json(cluster: Cluster) -> str:
    """Return the tables of a cluster's file as JSON."""
    return json.dumps(_tables(cluster), indent=1, default=vars)


def _tables(cluster: Cluster) -> dict[str, Any]:
    table = {field.name: getattr(cluster, field.name) for field in fields(cluster)}
    table["device"] = DeviceTable.of(cluster.device)
    for level in Level:
        table[level] = None if table[level] is None else LinkTable.of(table[level])
    return table


def read_value(kind: type[T], table: Any, name: str, where: str) -> T:
    """Return a dataclass from a table with its fields.

    Raises:
        ConfigError: a key is unknown, missing, of a wrong type or out of range.
    """
    hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for key, value in _table(table, name, where).items():
        if key not in known:
            raise _unknown(_join(name, key), list(known), where)
        values[key] = _read(hints[key], value, _join(name, key), where)
    for key, field in known.items():
        if key not in values and field.default is MISSING and field.default_factory is MISSING:
            raise _missing(key, name, where)
    return kind(**values)


def _read(kind: Any, value: Any, name: str, where: str) -> Any:
    """Return a value of a field, converted to its type and checked."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if is_dataclass(kind):
        return value if isinstance(value, kind) else read_value(kind, value, name, where)  # type: ignore[arg-type]
    if get_origin(kind) is Mapping:
        inner = get_args(kind)[1]
        return {key: _read(inner, one, _join(name, key), where) for key, one in _table(value, name, where).items()}
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number or kind is int and is_number and value == int(value):
        least = 1 if kind is int and not name.endswith("cores") else 0
        if not least <= value < math.inf:
            rule = f"{name} is a finite number of at least {least}"
            raise ConfigError(f"{name} = {value}", where=where, rule=rule, fix=f"{name.split('.')[-1]} = {least}")
        return kind(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    words = {float: "a number", int: "an integer", str: "a text in quotes", bool: "true or false"}
    fix = {float: "1.0", int: "1", str: '"…"', bool: "true"}
    key = name.split(".")[-1]
    raise ConfigError(f"{name} = {value!r}", where=where, rule=f"{key} is {words[kind]}", fix=f"{key} = {fix[kind]}")


def _merged(base: Mapping[str, Any], table: Mapping[str, Any], links: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of `base` with those of `table` written over them. Another link has its own curve."""
    result = dict(base)
    for key, value in table.items():
        if isinstance(value, str) and key in tuple(Level) and value in links:
            curve = links[value].get("curve")
            result = _merged(result, {"performance": {"links": {key: curve}}}, links) if curve else result
            result[key] = value
            continue
        old = links[result[key]] if key in tuple(Level) and isinstance(result.get(key), str) else result.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = _merged(old, value, links) if both else value  # type: ignore[arg-type]
    return result


def _table(value: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r}", where=where, rule=f"{name} is a table", fix=f"[{name}]")
    return value


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _unknown(what: str, known: list[str], where: str) -> ConfigError:
    word = what.split(" = ")[-1].strip("'") if " = " in what else what.split(".")[-1]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.0)
    return ConfigError(f"{what} is not known", where=where, rule=f"one of {', '.join(known)}", fix=near[0])


def _missing(key: str, name: str, where: str) -> ConfigError:
    table = f"[{name}] has" if name else "the file has"
    fix = f'write {key}, or preset = "H100" for what the file leaves out'
    return ConfigError(f"{key} is missing", where=where, rule=f"{table} {key}", fix=fix)
