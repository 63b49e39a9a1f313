"""Arguments of `plan`, checked before they are a cache's key: one of another type gets an error that says so."""

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
    """See that each is of its type.

    Raises:
        LayoutError: one is not.
    """
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise _refused(name, layout, "a plan goes from one Layout to another", _layout_fix(name, layout))
    dtype_bytes(dtype)
    if not (topology is None or isinstance(topology, Topology)):
        rule = "a Topology, with the link along each mesh axis, or None"
        raise _refused("topology", topology, rule, _topology_fix(topology, src.axis_sizes))


def whole_bytes(memory_cap_bytes: Any) -> int | None:
    """A memory cap as a whole number, or none.

    Raises:
        LayoutError: it is neither.
    """
    if memory_cap_bytes is None or type(memory_cap_bytes) is int:
        return memory_cap_bytes
    try:
        if not isinstance(memory_cap_bytes, bool):
            return operator.index(memory_cap_bytes)
    except TypeError:
        pass
    fix = f"memory_cap_bytes={_bytes_meant(memory_cap_bytes)}"
    raise _refused("memory_cap_bytes", memory_cap_bytes, "a whole number of bytes, or None", fix)


def _refused(name: str, value: Any, rule: str, fix: str) -> LayoutError:
    return LayoutError(f"{name} = {value!r}, which is a {type(value).__name__}", where=name, rule=rule, fix=fix)


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


def _bytes_meant(value: Any) -> int | None:
    """The number of bytes in `2GB`, `1.5 GiB` or `2e9`; None where there is none."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([kKMGT]?)(i?)[bB]?\s*", str(value))
    if found is None:
        return None
    base = _UNITS[found[2].upper()]
    if found[3]:
        base = 1024 ** list(_UNITS.values()).index(base)
    return int(float(found[1]) * base)
