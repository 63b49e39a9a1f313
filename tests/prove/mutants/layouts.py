"""Layouts whose proofs look for mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from meshwright.config.schema import RunConfig
from tests.prove.proofs import small_config, small_dit_config, small_expert_config


@dataclass(frozen=True)
class Layout:
    """A small configuration by name."""

    name: str
    make: Callable[..., RunConfig]
    words: tuple[str, ...]

    @cache  # noqa: B019
    def config(self) -> RunConfig:
        """Return the configuration of its proof."""
        return self.make(*self.words)

    @cache  # noqa: B019
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.config().mesh.axes().num_ranks()


VEE = ("pipeline.schedule=zb-v", "model.num_layers=4", "train.num_microbatches=4")
LAYOUTS = [
    Layout("tp", small_config, ("mesh.tp=2", "train.num_microbatches=2")),
    Layout("tp, whole sequences", small_config, ("mesh.tp=2", "mesh.sequence_parallel=false", "train.dropout=0.25")),
    Layout("dp_shard, packed", small_config, ("mesh.dp_shard=2", "train.num_microbatches=2", "data.packing=documents")),
    Layout("cp ring, window", small_config, ("mesh.cp=2", "model.window=6", "model.global_every=2")),
    Layout("cp heads, packed", small_config, ("mesh.cp=2", "mesh.cp_method=heads", "data.packing=documents",
                                              "recompute.policy=selective")),
    Layout("pp zb-v", small_config, ("mesh.pp=2", *VEE)),
    Layout("ep", small_expert_config, ("mesh.dp_shard=2", "mesh.ep=2", "train.num_microbatches=2")),
    Layout("ep, groups", small_expert_config, (
        "mesh.dp_shard=2", "mesh.ep=2", "model.score=sigmoid", "model.num_groups=4", "model.top_groups=2",
        "model.balance_bias=true", "model.bias_rate=0.05", "model.route_scale=2.5", "model.num_dense_layers=1",
        "model.num_shared_experts=1", "recompute.policy=full")),
    Layout("dit tp", small_dit_config, ("mesh.tp=2", "model.ffn_dim=22")),
    Layout("dit pp", small_dit_config, ("mesh.pp=2", "train.num_microbatches=2")),
    Layout("hsdp", small_config, ("mesh.dp_replicate=2", "mesh.dp_shard=2")),
    Layout("tp, pp", small_config, ("mesh.tp=2", "mesh.pp=2", "pipeline.schedule=1f1b", "train.num_microbatches=2")),
    Layout("cp, dp_shard", small_config, ("mesh.cp=2", "mesh.dp_shard=2", "data.packing=documents", "model.window=4")),
    Layout("ep, tp", small_expert_config, (
        "mesh.dp_shard=2", "mesh.ep=2", "mesh.tp=2", "model.balance_scope=global-batch", "model.z_loss=0.01")),
]  # fmt: skip
