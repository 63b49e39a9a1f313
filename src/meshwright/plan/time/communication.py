"""Times of a plan's communication: collectives of operators, exchanges of attention and experts, gathers and
reductions of FSDP units, and sums at the step's end. Doesn't import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain

from meshwright.cluster.collectives import CollectiveOp, GroupShape, collective_us, group_shape
from meshwright.cluster.hardware import Cluster
from meshwright.comm.compression.catalogue import encoded_bytes
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.run_plan import BYTES, Atoms, LayerSpec, RunPlan, Stage
from meshwright.plan.stage_sizes import UnitSizes, buffer_sums
from meshwright.plan.traffic import Purpose

Times = Mapping[str, float]
"""Times in µs by purpose, or by part of a step."""


def added(*times: Times) -> dict[str, float]:
    """Return the sums of times by name."""
    return {str(name): sum(one.get(name, 0.0) for one in times) for name in dict.fromkeys(chain(*times))}


SCALAR_BYTES = 16
"""Of the loss and the squared norm, which a step reduces at its end."""


class Communication:
    """Times of a plan's messages on a cluster, as seen by the first rank of each stage."""

    def __init__(self, plan: RunPlan, cluster: Cluster) -> None:
        self._plan, self._cluster = plan, cluster
        self._on_node = min(plan.mesh.num_ranks(), cluster.devices_per_node)
        self._shapes: dict[Atoms, GroupShape] = {}

    def us(self, op: str, num_bytes: float, atoms: Atoms) -> float:
        """Return the time of a collective of `num_bytes`, those of the full tensor, among the ranks along atoms."""
        if atoms not in self._shapes:
            self._shapes[atoms] = group_shape(self._cluster, self._plan.mesh.line(0, atoms))
        shape = self._shapes[atoms]
        # Groups beside this one do the same at the same time.
        return collective_us(self._cluster, op, num_bytes, shape, concurrent=max(1, self._on_node // shape.inside))

    def of_kind(self, kind: LayerSpec) -> tuple[Times, Times, Times]:
        """Return the time of a kind's collectives per micro-batch: of the forward, backward and recomputation."""
        forward, backward, again = ([self._exchanges(kind)[number]] for number in (0, 1, 0))
        for one in kind.collectives:
            calls = one.num_calls(self._plan.batch.samples * self._plan.rank_tokens)
            whole = self._plan.batch.samples * one.elements * BYTES[one.dtype]
            each = calls * self.us(one.op, whole / calls, one.axes)
            forward.append({one.purpose: one.forward * each})
            backward.append({one.purpose: one.backward * each})
            again.append({one.purpose: one.recomputed * each})
        recomputes = kind.recompute is RecomputePolicy.FULL
        return added(*forward), added(*backward), added(*again) if recomputes else {}

    def _exchanges(self, kind: LayerSpec) -> tuple[Times, Times]:
        """Return the time of exchanges between experts and in attention, of a forward and a backward."""
        found = ((Purpose.EXPERTS, self._experts(kind)), (Purpose.CONTEXT, self._context(kind)))
        used = [(purpose, times) for purpose, times in found if any(times)]
        return {purpose: ahead for purpose, (ahead, _) in used}, {purpose: back for purpose, (_, back) in used}

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
        ends = [line[plan.stages[one].pp_rank] for one in (stage, stage + 1)]
        empty, full = (collective_us(self._cluster, CollectiveOp.SEND, size, ends) for size in (0, num_bytes))
        return empty, num_bytes / max(full - empty, 1e-9), num_bytes

    def at_end(self, rank: int, stages: list[Stage]) -> Times:
        """Return the time of sums after the last backward, by purpose: of gradients that are partial over tp, buffers,
        parameters shared between stages, and the loss with the gradients' norm."""
        return added(*({purpose: us} for purpose, us in self._sums(rank, stages)))

    def _sums(self, rank: int, stages: list[Stage]) -> Iterator[tuple[str, float]]:
        plan = self._plan
        for stage in stages:
            held = [(f"{kind.name}/{one.name}", math.prod(one.shape)) for kind, _, one in plan.parameters(stage)]
            for total in plan.sums:
                names, size = set(total.parameters), BYTES[total.dtype]
                for name, elements in held:
                    if name in names:
                        yield Purpose.TENSOR, self.us("all_reduce", elements * size, total.axes)
        for buffer in buffer_sums(plan, rank):
            for axis in buffer.axes:
                yield Purpose.BUFFERS, self.us("all_reduce", buffer.elements * BYTES[buffer.dtype], (axis,))
        for _, sites in plan.shared:
            if any(plan.stages[stage] in stages for stage, _ in sites):
                yield Purpose.SHARED, self.us("all_reduce", self._shared_bytes(sites[0]), ("pp",))
        yield "scalars", self.us("all_reduce", SCALAR_BYTES, tuple(plan.mesh.sizes))

    def _shared_bytes(self, site: tuple[int, str]) -> int:
        plan, stage = self._plan, self._plan.stages[site[0]]
        return sum(
            plan.elements(parameter, sharded=stage.root.sharded) * BYTES[stage.root.reduce]
            for kind, layer, parameter in plan.parameters(stage)
            if kind.full_name(parameter.name, layer) == site[1]
        )
