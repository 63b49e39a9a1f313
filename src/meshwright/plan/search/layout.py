"""A candidate: what a search may change of a run, and the configuration's keys that say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.config.schema import RunConfig
from meshwright.mesh.axes import Axes
from meshwright.plan.search.schedules import SPLIT, V_SHAPED


class Inner(NamedTuple):
    """What decides the work of a block on a rank, however blocks and samples are divided among ranks."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    samples: int = 1
    """Samples per micro-batch."""
    recompute: str = "none"
    compiled: bool = False

    @property
    def fewest_shards(self) -> int:
        """Least size of dp_shard that experts are divided over."""
        return max(1, self.ep // self.cp)

    def keys(self) -> dict[str, Any]:
        """Return the keys of the configuration, but for the samples."""
        return {
            "mesh.tp": self.tp,
            "mesh.cp": self.cp,
            "mesh.ep": self.ep,
            "mesh.sequence_parallel": self.sequence_parallel,
            "recompute.policy": self.recompute,
            "recompute.blocks": (),
            "train.compile": self.compiled,
        }


class Layout(NamedTuple):
    """A layout of a run on all devices."""

    inner: Inner
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    reshard: bool = True

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes that tell meshes apart; dp_replicate and dp_shard count as one."""
        return self.pp, self.data_parallel, self.inner.cp, self.inner.tp, self.inner.ep

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def is_v_shaped(self) -> bool:
        return self.schedule in V_SHAPED

    @property
    def splits_backward(self) -> bool:
        return self.schedule in SPLIT

    def axes(self) -> Axes:
        return Axes(self.pp, self.dp_replicate, self.dp_shard, self.inner.cp, self.inner.tp)

    def keys(self) -> dict[str, Any]:
        """Return the keys of the configuration that make this layout."""
        return {
            **self.inner.keys(),
            "mesh.pp": self.pp,
            "mesh.dp_replicate": self.dp_replicate,
            "mesh.dp_shard": self.dp_shard,
            "mesh.reshard_after_forward": self.reshard,
            "mesh.cp_method": "auto",
            "train.num_microbatches": self.num_microbatches,
            "pipeline.schedule": self.schedule if self.pp > 1 else "auto",
            "pipeline.chunks": self.chunks if self.pp > 1 and self.chunks > 1 else None,
            "pipeline.layers_per_stage": None,
            "comm.secondary_shards": None,
        }

    def configured(self, base: RunConfig) -> RunConfig:
        """Return the configuration of a run with this layout; no rule is checked."""
        own = layout_keys(base)
        return base.with_keys({key: value for key, value in self.keys().items() if own[key] != value})

    def agrees(self, fixed: Mapping[str, Any]) -> bool:
        """Return whether the layout has given values of keys."""
        keys = self.keys()
        return all(keys[key] == value for key, value in fixed.items())


LAYOUT_KEYS = tuple(Layout(Inner()).keys())
"""Keys that a search sets."""


def layout_keys(config: RunConfig) -> dict[str, Any]:
    """Return a configuration's values of the keys that a search sets."""
    found = {}
    for key in LAYOUT_KEYS:
        section, name = key.split(".")
        found[key] = getattr(getattr(config, section), name)
    return found
