"""Times of a plan's communication: collectives of operators, exchanges of attention and experts, gathers and
reductions of FSDP units, and sums at the step's end. Doesn't import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain

from meshwright.cluster.collectives import CollectiveOp, GroupShape, collective_us, group_shape
from meshwright.cluster.hardware import Cluster
from meshwright.comm.compression.catalogue import EXACT, encoded_bytes
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.run_plan import BYTES, Atoms, ContextMethod, LayerSpec, RunPlan, Stage
from meshwright.plan.stage_sizes import COUNT_BYTES, UnitSizes
from meshwright.plan.traffic import (
    Purpose,
    buffer_totals,
    count_sums,
    gradient_messages,
    moves_matrices,
    shared_messages,
)

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
        self.processes = max(1.0, self._on_node / plan.mesh.size("pp"))
        """Ranks on a node that are at the same place of the pipeline."""
        self._lines: dict[Atoms, tuple[int, ...]] = {}
        self._shapes: dict[tuple[int, ...], GroupShape] = {}

    def us(self, op: str, num_bytes: float, atoms: Atoms) -> float:
        """Return the time of a collective of `num_bytes`, those of the full tensor, among the ranks along atoms."""
        if atoms not in self._lines:
            self._lines[atoms] = self._plan.mesh.line(0, atoms)
        return self._among(self._lines[atoms], op, num_bytes)

    def _among(self, ranks: tuple[int, ...], op: str, num_bytes: float) -> float:
        if ranks not in self._shapes:
            self._shapes[ranks] = group_shape(self._cluster, ranks)
        shape = self._shapes[ranks]
        # Groups beside this one do the same at the same time.
        return collective_us(self._cluster, op, num_bytes, shape, concurrent=max(1, self._on_node // shape.inside))

    def of_kind(self, kind: LayerSpec) -> tuple[Times, Times, Times]:
        """Return the time of a kind's collectives per micro-batch: of the forward, backward and recomputation."""
        ahead, back = self._exchanges(kind)
        forward, backward, again = [ahead], [back], [ahead]
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
        """Return the time of dispatch and combine, forward and backward."""
        counted = sum(self.us("all_reduce", n * COUNT_BYTES, (axis,)) for axis, n in count_sums(self._plan, kind))
        if (layer := kind.experts) is None or not layer.axes:
            return counted, 0.0
        from meshwright.plan.expert_traffic import sent_by_layer  # only where ep shards experts

        sent = sum(one.num_bytes for one in sent_by_layer(self._plan, 0, layer)) / self._plan.batch.num_microbatches
        size = self._plan.mesh.size(*layer.axes)
        # An all-to-all of n bytes sends (size - 1) / size of them; dispatch and combine, forward and backward.
        each = self.us("all_to_all", sent / 4 * size / (size - 1), layer.axes)
        return counted + 2 * each, 2 * each

    def _context(self, kind: LayerSpec) -> tuple[float, float]:
        """Return the time of attention's exchanges over cp, forward and backward."""
        layer = kind.attention
        if layer is None or not layer.axes:
            return 0.0, 0.0
        from meshwright.plan.context.layers import sent_by_attention  # only where cp shards tokens

        forwards = 2 if kind.recompute is RecomputePolicy.FULL else 1
        size, line = self._plan.mesh.size(*layer.axes), self._plan.mesh.line(0, layer.axes)
        ranks = line if layer.method is ContextMethod.RING else line[:1]  # of heads, all send the same
        sent = (sent_by_attention(self._plan, rank, kind, layer.mask.documents) for rank in ranks)
        busiest = max(sum(num_bytes for _, num_bytes in one) for one in sent)
        each = self.us("all_to_all", busiest / (forwards + 1) * size / (size - 1), layer.axes)
        return each, each

    def gather(self, sizes: UnitSizes) -> tuple[float, float]:
        """Return the times of all-gathers of a unit's parameters: among all its ranks, and among those that share
        secondary shards, which aren't encoded."""
        unit = sizes.unit
        if not unit.sharded:
            return 0.0, 0.0
        line = self._plan.mesh.line(0, unit.sharded)
        element_bytes = BYTES[unit.compute]
        whole = len(line) * encoded_bytes(unit.weights, sizes.num_elements, element_bytes=element_bytes)
        near = line[: unit.num_secondary() or len(line)]
        among_secondary = self._among(near, "all_gather", len(line) * sizes.num_elements * element_bytes)
        return self.us("all_gather", whole, unit.sharded), among_secondary

    def reduce(self, sizes: UnitSizes) -> tuple[float, float]:
        """Return the times of a unit's reductions over shards and over replicas."""
        unit = sizes.unit
        if not sizes.num_trained:
            return 0.0, 0.0
        if unit.gradients == EXACT:
            shard = sizes.num_trained * BYTES[unit.reduce]
            whole = shard * self._plan.mesh.size(*unit.sharded)
            scattered = self.us("reduce_scatter", whole, unit.sharded) if unit.sharded else 0.0
            return scattered, self.us("all_reduce", shard, unit.replicas) if unit.replicas else 0.0
        times = dict.fromkeys((Purpose.GRADIENTS, Purpose.REPLICAS), 0.0)
        for one in gradient_messages(self._plan, 0, [sizes]):
            ranks = (0, *one.peers)
            op = "all_gather" if one.in_ring else "all_to_all"
            times[Purpose(one.purpose)] += self._among(ranks, op, len(ranks) * one.num_bytes)
        return times[Purpose.GRADIENTS], times[Purpose.REPLICAS]

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
        parameters shared between stages, whole matrices for their owners, and the loss with the gradients' norm."""
        return added(*({purpose: us} for purpose, us in self._sums(rank, stages)))

    def _sums(self, rank: int, stages: list[Stage]) -> Iterator[tuple[str, float]]:
        plan = self._plan
        for stage in stages:
            for total in plan.sums:
                names, size = set(total.parameters), BYTES[total.dtype]
                found = [one for kind, _, one in plan.parameters(stage) if f"{kind.name}/{one.name}" in names]
                if total.op == "mean":
                    counts = [sum(plan.elements(one, sharded=stage.root.sharded) for one in found)]
                else:
                    counts = [math.prod(one.shape) for one in found]
                yield Purpose.TENSOR, sum(self.us("all_reduce", count * size, total.axes) for count in counts)
        for axis, elements, dtype in buffer_totals(plan, rank):
            yield Purpose.BUFFERS, self.us("all_reduce", elements * BYTES[dtype], (axis,))
        for one in shared_messages(plan, rank):
            ranks = (rank, *one.peers)  # the message counts both halves of the all-reduce
            yield Purpose.SHARED, self._among(ranks, "all_reduce", one.num_bytes * len(ranks) / 2)
        if moves_matrices(plan):
            yield Purpose.OPTIMIZER, self._moved(rank)
        yield "scalars", self.us("all_reduce", SCALAR_BYTES, tuple(plan.mesh.sizes))

    def _moved(self, rank: int) -> float:
        """Return the time in which whole matrices are gathered by their owners and updates are sent back."""
        from meshwright.plan.matrix_owners import bytes_moved_by_rank  # only for updates from whole matrices

        sent = bytes_moved_by_rank(self._plan, self._plan.mesh.position(rank, "pp"))
        ranks = tuple(sorted(sent))
        return (
            self._among(ranks, "all_to_all", max(sent.values()) * len(ranks) / max(1, len(ranks) - 1)) if sent else 0.0
        )
