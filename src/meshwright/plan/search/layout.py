"""A candidate: what a search may change of a run, and the configuration's keys that say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.config.schema import RunConfig
from meshwright.mesh.axes import Axes
from meshwright.plan.search.schedules import SPLIT, V_SHAPED


@dataclass(frozen=True)
class Inner:
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

    @property
    def template(self) -> Inner:
        """The division from whose plan that of this one follows, as recomputation changes no more than a policy; under
        cp, it may change how attention communicates."""
        is_same = self.cp == 1 or self.recompute != "full"
        return replace(self, recompute="none") if is_same else self

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


@dataclass(frozen=True)
class Layout:
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
    def axes(self) -> Axes:
        return Axes(self.pp, self.dp_replicate, self.dp_shard, self.inner.cp, self.inner.tp)

    @property
    def mesh(self) -> tuple[Axes, int]:
        """Sizes of the axes and of ep."""
        return self.axes, self.inner.ep

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def splits_backward(self) -> bool:
        return self.schedule in SPLIT

    @property
    def is_v_shaped(self) -> bool:
        return self.schedule in V_SHAPED

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
        changes = {key: value for key, value in self.keys().items() if _value(base, key) != value}
        return base.with_keys(changes)


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


LAYOUT_KEYS = tuple(Layout(Inner()).keys())
"""Keys that a search sets."""


def layout_keys(config: RunConfig) -> dict[str, Any]:
    """Return a configuration's values of the keys that a search sets."""
    return {key: _value(config, key) for key in LAYOUT_KEYS}


def agrees(layout: Layout, fixed: Mapping[str, Any]) -> bool:
    """Return whether a layout has the given values of keys."""
    keys = layout.keys()
    return all(keys[key] == value for key, value in fixed.items() if key in keys)
