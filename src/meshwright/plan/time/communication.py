"""Times of a plan's communication: collectives of operators, exchanges of attention and experts, gathers and
reductions of FSDP units, and sums at the step's end. Doesn't import torch."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

from meshwright.cluster.collectives import GroupShape, collective_us
from meshwright.cluster.presets import Cluster
from meshwright.comm.compression.catalogue import encoded_bytes
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.run_plan import BYTES, Atoms, LayerSpec, Mesh, RunPlan, Stage, Unit
from meshwright.plan.stage_sizes import UnitSizes, buffer_sums
from meshwright.plan.traffic import Purpose

Exposed = Counter[str]
"""Time in µs by purpose."""


class Communication:
    """Times of a plan's messages on a cluster, as seen by the first rank of each stage."""

    def __init__(self, plan: RunPlan, cluster: Cluster) -> None:
        self._plan, self._cluster = plan, cluster

    def us(self, op: str, num_bytes: float, atoms: Atoms) -> float:
        """Return the time of a collective of `num_bytes`, those of the full tensor, among the ranks along atoms."""
        return collective_us(self._cluster, op, num_bytes, group_shape(self._plan.mesh, atoms))

    def of_kind(self, kind: LayerSpec) -> tuple[Exposed, Exposed, Exposed]:
        """Return the time of a kind's collectives per micro-batch: of the forward, backward and recomputation."""
        forward, backward, again = Exposed(), Exposed(), Exposed()
        for one in kind.collectives:
            calls = one.num_calls(self._plan.batch.samples * self._plan.rank_tokens)
            whole = self._plan.batch.samples * one.elements * BYTES[one.dtype]
            each = calls * self.us(one.op, whole / calls, one.axes)
            forward[one.purpose] += one.forward * each
            backward[one.purpose] += one.backward * each
            if kind.recompute is RecomputePolicy.FULL:
                again[one.purpose] += one.recomputed * each
        for purpose, (ahead, back) in ((Purpose.EXPERTS, self._experts(kind)), (Purpose.CONTEXT, self._context(kind))):
            forward[purpose] += ahead
            backward[purpose] += back
            if kind.recompute is RecomputePolicy.FULL:
                again[purpose] += ahead
        return forward, backward, again

    def num_calls(self, kind: LayerSpec) -> tuple[int, int]:
        """Return how many collectives a kind's operators call per micro-batch in forward and backward."""
        tokens = self._plan.batch.samples * self._plan.rank_tokens
        calls = [(one.num_calls(tokens), one) for one in kind.collectives]
        return sum(number * one.forward for number, one in calls), sum(number * one.backward for number, one in calls)

    def _experts(self, kind: LayerSpec) -> tuple[float, float]:
        """Return the time of dispatch and combine, forward and backward, under a balanced load."""
        layer = kind.experts
        if layer is None or not layer.axes:
            return 0.0, 0.0
        from meshwright.plan.expert_traffic import sent_by_layer  # only where ep shards experts

        sent = sum(one.num_bytes for one in sent_by_layer(self._plan, 0, layer)) / self._plan.batch.num_microbatches
        size = self._plan.mesh.size(*layer.axes)
        # An all-to-all of n bytes sends (size - 1) / size of them; dispatch and combine, forward and backward.
        each = self.us("all_to_all", sent / 4 * size / (size - 1), layer.axes)
        return 2 * each, 2 * each

    def _context(self, kind: LayerSpec) -> tuple[float, float]:
        """Return the time of attention's exchanges over cp, forward and backward."""
        layer = kind.attention
        if layer is None or not layer.axes:
            return 0.0, 0.0
        from meshwright.plan.context.layers import sent_by_attention  # only where cp shards tokens

        forwards = 2 if kind.recompute is RecomputePolicy.FULL else 1
        busiest = max(
            sum(sent for _, sent in sent_by_attention(self._plan, rank, kind))
            for rank in self._plan.mesh.line(0, layer.axes)
        )
        size = self._plan.mesh.size(*layer.axes)
        each = self.us("all_to_all", busiest / (forwards + 1) * size / (size - 1), layer.axes)
        return each, each

    def gather(self, sizes: UnitSizes) -> float:
        """Return the time of an all-gather of a unit's parameters."""
        unit = sizes.unit
        if not unit.sharded:
            return 0.0
        size = self._plan.mesh.size(*unit.sharded)
        whole = size * encoded_bytes(unit.weights, sizes.num_elements, element_bytes=BYTES[unit.compute])
        return self.us("all_gather", whole, unit.sharded)

    def reduce(self, sizes: UnitSizes) -> tuple[float, float]:
        """Return the times of a unit's reduce-scatter over shards and all-reduce over replicas."""
        unit, size = sizes.unit, self._plan.mesh.size(*sizes.unit.sharded)
        if not sizes.num_trained:
            return 0.0, 0.0
        shard = encoded_bytes(unit.gradients, sizes.num_trained, element_bytes=BYTES[unit.reduce])
        scattered = self.us("reduce_scatter", size * shard, unit.sharded) if unit.sharded else 0.0
        return scattered, self.us("all_reduce", shard, unit.replicas) if unit.replicas else 0.0

    def edge(self, stage: int) -> tuple[float, float, int]:
        """Return latency in µs, bytes per µs and bytes of a transfer from a stage to the next one."""
        plan, edge = self._plan, self._plan.edge
        elements = math.prod(edge.shape) // plan.mesh.size(*(axis for shard in edge.shards for axis in shard.axes))
        num_bytes = plan.batch.samples * elements * BYTES[edge.dtype]
        line = plan.mesh.line(0, ("pp",))
        ends = tuple(plan.mesh.node(line[plan.stages[one].pp_rank]) for one in (stage, stage + 1))
        shape = GroupShape(2, 1) if ends[0] == ends[1] else GroupShape(1, 2)
        empty, full = (collective_us(self._cluster, "send", size, shape) for size in (0, num_bytes))
        return empty, num_bytes / max(full - empty, 1e-9), num_bytes

    def at_end(self, rank: int, stages: list[Stage]) -> Exposed:
        """Return the time of sums after the last backward, by purpose: of gradients that are partial over tp, buffers,
        parameters shared between stages, and the loss with the gradients' norm."""
        plan, found = self._plan, Exposed()
        for stage in stages:
            for one in plan.sums:
                names = set(one.parameters)
                sizes = [
                    BYTES[one.dtype] * math.prod(parameter.shape)
                    for kind, _, parameter in plan.parameters(stage)
                    if f"{kind.name}/{parameter.name}" in names
                ]
                found[Purpose.TENSOR] += sum(self.us("all_reduce", size, one.axes) for size in sizes)
        for total in buffer_sums(plan, rank):
            size = total.elements * BYTES[total.dtype]
            found[Purpose.BUFFERS] += sum(self.us("all_reduce", size, (axis,)) for axis in total.axes)
        shared = [sites for _, sites in plan.shared if any(plan.stages[stage] in stages for stage, _ in sites)]
        for sites in shared:
            size = self._shared_bytes(sites[0])
            found[Purpose.SHARED] += self.us("all_reduce", size, ("pp",)) if plan.mesh.size("pp") > 1 else 0.0
        if plan.mesh.num_ranks() > 1:
            found["scalars"] += self.us("all_reduce", 16, tuple(plan.mesh.sizes))
        return found

    def _shared_bytes(self, site: tuple[int, str]) -> int:
        plan, stage = self._plan, self._plan.stages[site[0]]
        return sum(
            plan.elements(parameter, sharded=stage.root.sharded) * BYTES[stage.root.reduce]
            for kind, layer, parameter in plan.parameters(stage)
            if kind.full_name(parameter.name, layer) == site[1]
        )

    def has_nodes(self, unit: Unit) -> bool:
        """Return whether a unit's shards are on several nodes."""
        return group_shape(self._plan.mesh, unit.sharded).nodes > 1


@lru_cache(maxsize=256)
def group_shape(mesh: Mesh, atoms: Atoms) -> GroupShape:
    """Return how many ranks along atoms share a node, and over how many nodes the group extends."""
    if not isinstance(mesh.nodes, int):
        nodes = Counter(map(mesh.node, mesh.line(0, atoms)))
        return GroupShape(max(nodes.values()), len(nodes))
    inside = total = 1
    for atom in atoms:
        size = mesh.sizes[atom]
        stride = math.prod(other for _, other in mesh.atoms[[name for name, _ in mesh.atoms].index(atom) + 1 :])
        inside *= min(size, max(1, mesh.nodes // stride))
        total *= size
    return GroupShape(inside, -(-total // inside))
