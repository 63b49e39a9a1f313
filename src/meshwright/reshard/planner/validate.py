"""Type checks for the arguments of `plan`, run before the arguments become a cache key."""

from __future__ import annotations

import operator
import re
from typing import Any

from meshwright.cluster.presets import cluster_preset
from meshwright.cluster.spec import Cluster
from meshwright.errors import ConfigError, LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.link_cost import DEFAULT_CLUSTER, Topology
from meshwright.reshard.planner.steps import dtype_bytes

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}


def check_arguments(src: Any, dst: Any, dtype: Any, topology: Any) -> None:
    """Raise `LayoutError` if an argument of `plan` has the wrong type."""
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise _type_error(name, layout, "src and dst are Layout objects", _layout_fix(name, layout))
    dtype_bytes(dtype)
    if not (topology is None or isinstance(topology, Topology)):
        rule = "a Topology, with the link along each mesh axis, or None"
        raise _type_error("topology", topology, rule, _topology_fix(topology, src.axis_sizes))


def validate_memory_cap(memory_cap_bytes: Any) -> int | None:
    """Return the memory cap as an int, or None for no cap.

    Raises:
        LayoutError: if the cap is neither an integer nor None.
    """
    if memory_cap_bytes is None or type(memory_cap_bytes) is int:
        return memory_cap_bytes
    try:
        if not isinstance(memory_cap_bytes, bool):
            return operator.index(memory_cap_bytes)
    except TypeError:
        pass
    fix = f"memory_cap_bytes={_suggest_bytes(memory_cap_bytes)}"
    raise _type_error("memory_cap_bytes", memory_cap_bytes, "an int number of bytes, or None", fix)


def _type_error(name: str, value: Any, rule: str, fix: str) -> LayoutError:
    return LayoutError(f"{name} = {value!r} has type {type(value).__name__}", where=name, rule=rule, fix=fix)


def _layout_fix(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{name}=Layout.parse({value!r}, axis_sizes=…, shape=…)"
    return f"{name}=Layout.parse(…), or layout_of(x) for a DTensor"


def _topology_fix(value: Any, axis_sizes: tuple[int, ...]) -> str:
    if isinstance(value, Cluster):
        return f"topology=Topology.of(the same cluster, {axis_sizes})"
    name = value if isinstance(value, str) and _is_preset(value) else DEFAULT_CLUSTER
    return f"topology=Topology.of(meshwright.cluster.presets.cluster_preset({name!r}), {axis_sizes})"


def _is_preset(name: str) -> bool:
    try:
        cluster_preset(name)
    except ConfigError:
        return False
    return True


def _suggest_bytes(value: Any) -> int | None:
    """Parse a number of bytes such as `2GB`, `1.5 GiB` or `2e9`; return None if it cannot be parsed."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([kKMGT]?)(i?)[bB]?\s*", str(value))
    if found is None:
        return None
    base = _UNITS[found[2].upper()]
    if found[3]:
        base = 1024 ** list(_UNITS.values()).index(base)
    return int(float(found[1]) * base)
