"""Changes of a run for which no layout fits, with which one does, found by trying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import gpus_by_memory
from meshwright.config.schema import RunConfig
from meshwright.plan.search.search import Found, Search
from meshwright.units import format_bytes

MOST_DOUBLINGS = 6
Change = tuple[str, RunConfig, Cluster, int]


def fitting_changes(found: Found, fixed: Mapping[str, Any]) -> list[str]:
    """Return the nearest changes of each sort with which a layout fits, in words."""
    best = (next((one[0] for one in sort if _fits(one, fixed)), None) for sort in _sorts(found))
    return [words for words in best if words is not None]


def _fits(change: Change, fixed: Mapping[str, Any]) -> bool:
    _, base, cluster, num_devices = change
    return Search(base, cluster, num_devices, fixed=fixed).fits()


def _sorts(found: Found) -> Iterator[Iterator[Change]]:
    """Yield changes by sort: more devices, larger ones, shorter samples, less exact numbers."""
    base, cluster, number = found.base, found.cluster, found.num_devices
    more = (number << power for power in range(1, MOST_DOUBLINGS + 1))
    yield ((f"{one} devices", base, cluster, one) for one in more)
    _, larger = gpus_by_memory(cluster.device.memory_bytes)
    others = (one for one in larger if one.device.memory_bytes > cluster.device.memory_bytes)
    yield ((f"{one.name}, of {format_bytes(one.device.memory_bytes)}", base, one, number) for one in others)
    tokens = base.train.seq_len
    lengths = (tokens >> power for power in range(1, tokens.bit_length()))
    yield ((f"train.seq_len={one}", base.with_keys({"train.seq_len": one}), cluster, number) for one in lengths)
    if base.train.precision != "bfloat16" and cluster.performance.is_async:
        key = {"train.precision": "bfloat16"}
        yield iter([("train.precision=bfloat16", base.with_keys(key), cluster, number)])
