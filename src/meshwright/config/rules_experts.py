"""Rules of expert parallelism: the ranks that share a layer's experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.settings.nearby_sizes import by_distance, divisors, round_up
from meshwright.settings.violation import Fix, Violation
from meshwright.units import counted

KEY = "mesh.ep"


def expert_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `mesh.ep`."""
    ep, mesh = config.mesh.ep, config.mesh
    if ep == 1:
        return
    counts = [kind.experts.num_experts for kind in model_facts(config).kinds if kind.experts is not None]
    if not counts:
        yield Violation(
            LayoutError, f"mesh.ep = {ep} for a model without experts", KEY, "ep shards experts", [{KEY: 1}]
        )
        return
    ranks = mesh.dp_shard * mesh.cp
    sizes: list[Fix] = [{KEY: size} for size in by_distance(divisors(math.gcd(ranks, *counts)), ep)]
    if ranks % ep or (ep % mesh.cp and mesh.cp % ep):
        yield Violation(
            LayoutError,
            f"mesh.ep = {ep} does not divide {counted(ranks, 'rank')}",
            KEY,
            f"ep divides dp_shard × cp = {mesh.dp_shard} × {mesh.cp}, and is a multiple of cp or divides it",
            [*sizes, {"mesh.dp_shard": round_up(mesh.dp_shard, ep)}],
        )
    for count in counts:
        if count % ep:
            yield Violation(
                LayoutError,
                f"mesh.ep = {ep} does not divide {counted(count, 'expert')}",
                KEY,
                "every ep rank holds the same number of experts of a layer",
                sizes,
            )
    if config.comm.secondary_shards is not None:
        yield Violation(
            ConfigError,
            f"comm.secondary_shards = {config.comm.secondary_shards} with mesh.ep = {ep}",
            "comm.secondary_shards",
            "experts and other parameters are stored on different groups of ranks, which secondary shards don't follow",
            [{"comm.secondary_shards": None}, {KEY: 1}],
        )
