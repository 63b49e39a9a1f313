"""Predict the bytes that a rank sends per training step: its messages, with purpose, peers and size, and their sums by
purpose and link, with the plan's codecs and without compression. Excludes validation, sampling and checkpoints.

All-to-alls and sends go directly to their peers. Other collectives use rings that enter and leave each node once, like
NCCL's: each rank forwards as many bytes as it would send to all peers individually, and one rank per node sends them to
the next node.

FSDP2's all-gathers are counted by simulating its state over a stage's actions. A unit that stays unsharded after its
forward is all-gathered by the first forward after each backward; a unit that is resharded, by each forward and each
backward. FSDP2 also prefetches: a unit's backward gathers the unit whose forward ended just before its own. The forward
order is recorded across all micro-batches of a step, so in the second micro-batch, the first unit's backward prefetches
the last unit of the first micro-batch. The next micro-batch uses that prefetch; the last one is wasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from math import prod

from meshwright.comm.compression.catalogue import EXACT, encoded_bytes, find_method
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.pipeline.actions import BACKWARDS, SENDS, Action, ActionKind
from meshwright.pipeline.split_layers import stage_groups
from meshwright.plan.run_plan import BYTES, Atoms, LayerSpec, Mesh, RunPlan, Stage, StepSum
from meshwright.plan.stage_sizes import COUNT_BYTES, LOAD_DTYPE, UnitSizes, buffer_sums, load_rows, unit_sizes


class Purpose(StrEnum):
    """Purpose of sent bytes."""

    GRADIENTS = "gradients"
    """Reduce-scatter over dp_shard."""
    REPLICAS = "replicas"
    """Gradient all-reduce over dp_replicate."""
    WEIGHTS = "weights"
    """All-gather over dp_shard."""
    TENSOR = "tensor"
    """Communication over tp: activations, their gradients, sums for the loss, and gradients of replicated parameters.
    Operators that communicate over other axes use the purpose given in the plan."""
    EXPERTS = "experts"
    """Dispatch of tokens to experts and combination of their outputs over ep, with their gradients and counts."""
    CONTEXT = "context"
    """Keys, values and heads exchanged over cp by attention, with their gradients."""
    STAGES = "stages"
    """Activations and their gradients sent between pipeline stages."""
    BUFFERS = "buffers"
    """All-reduce of buffer updates over ranks that process different samples, and of load counters over pp."""
    SHARED = "shared parameters"
    """All-reduce of the gradients of parameters shared between stages."""
    OPTIMIZER = "optimizer"
    """Matrices gathered on the ranks that compute their updates, and the updates sent back."""


@dataclass(frozen=True)
class Message:
    """A message of the same size to each peer, sent directly or around a ring."""

    purpose: str
    peers: tuple[int, ...]
    """Global ranks of the receivers."""
    num_bytes: int
    """Bytes per peer."""
    in_ring: bool = False


def _context(plan: RunPlan, rank: int, stage: Stage) -> Iterator[Message]:
    """Yield what attention sends to other context-parallel ranks, as if each sample were one document."""
    for name, layers in Counter(stage.kinds).items():
        kind = plan.kind(name)
        if kind.attention is not None and kind.attention.axes:
            from meshwright.plan.context.layers import sent_by_attention

            for peer, num_bytes in sent_by_attention(plan, rank, kind):
                yield Message(Purpose.CONTEXT, (peer,), layers * plan.batch.num_microbatches * num_bytes)


def context_bytes(plan: RunPlan, rank: int) -> int:
    """Return the bytes that a rank's attention sends in a training step, as if each sample were one document."""
    return sum(one.num_bytes for number in plan.stages_of(rank) for one in _context(plan, rank, plan.stages[number]))


def messages(plan: RunPlan, rank: int, *, exact: bool = False) -> Iterator[Message]:
    """Yield all messages that a rank sends in a training step, except sums of scalars.

    Those are the step's one final all-reduce, of the loss and the gradient norm, and the number of loss units if it
    varies. The reductions in cross-entropy over a sharded vocabulary, `LossReductions`, are messages of its head.

    Args:
        plan: plan of the run.
        rank: rank on the mesh.
        exact: whether to ignore compression.
    """
    for number in plan.stages_of(rank):
        stage = plan.stages[number]
        sizes = unit_sizes(plan, stage)
        yield from gradient_messages(plan, rank, sizes, exact=exact)
        yield from _weights(plan, rank, number, sizes, exact=exact)
        yield from _operators(plan, rank, stage, exact=exact)
        yield from _experts(plan, rank, stage)
        yield from _context(plan, rank, stage)
    yield from _buffers(plan, rank)
    yield from _stages(plan, rank)
    yield from shared_messages(plan, rank)
    if moves_matrices(plan):
        from meshwright.plan.matrix_owners import moved_bytes

        for peer, num_bytes in moved_bytes(plan, rank).items():
            yield Message(Purpose.OPTIMIZER, (peer,), num_bytes)


def moves_matrices(plan: RunPlan) -> bool:
    """Return whether updates need whole matrices, which their owners gather."""
    return any(update.whole for update in plan.optimizer.updates)


def _peers(rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(other for other in ranks if other != rank)


def gradient_messages(plan: RunPlan, rank: int, sizes: list[UnitSizes], *, exact: bool = False) -> Iterator[Message]:
    """Yield what the reductions of units' gradients send in a step."""
    for one in sizes:
        unit, elements, size = one.unit, one.num_trained, BYTES[one.unit.reduce]
        name = EXACT if exact else unit.gradients
        method, line = find_method(name), plan.mesh.line(rank, unit.sharded)
        replicas = plan.mesh.line(rank, unit.replicas)
        near, far = two_stage_peers(plan.mesh, rank, line)
        if name == EXACT or not far:
            num_bytes = encoded_bytes(name, elements, element_bytes=size)
            yield Message(Purpose.GRADIENTS, _peers(rank, line), num_bytes, in_ring=name == EXACT)
        else:
            # Each peer on this node receives one shard per node, to keep or to forward.
            inside = method.codec_inside_node(find_method(unit.inside_node).codec)
            num_bytes = (len(far) + 1) * inside.encoded_bytes(elements, element_bytes=size)
            yield Message(Purpose.GRADIENTS, near, num_bytes)
            yield Message(Purpose.GRADIENTS, far, encoded_bytes(name, elements, element_bytes=size))
        share = -(-elements // len(replicas))
        # The all-reduce is a reduce-scatter followed by an all-gather of the sums.
        for codec, in_ring in ((method.codec, name == EXACT), (method.codec_of_sum, True)):
            num_bytes = codec.encoded_bytes(share, element_bytes=size)
            yield Message(Purpose.REPLICAS, _peers(rank, replicas), num_bytes, in_ring=in_ring)


def two_stage_peers(mesh: Mesh, rank: int, line: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the other ranks of `line` on this node, and those with the same local index on other nodes. Both are empty
    if `line` is on a single node or unevenly spread over nodes."""
    nodes: dict[int, list[int]] = {}
    for other in line:
        nodes.setdefault(mesh.node(other), []).append(other)
    own = nodes[mesh.node(rank)]
    if len(nodes) < 2 or any(len(node) != len(own) for node in nodes.values()):
        return (), ()
    local = own.index(rank)
    return _peers(rank, tuple(own)), _peers(rank, tuple(node[local] for node in nodes.values()))


def _weights(plan: RunPlan, rank: int, number: int, sizes: list[UnitSizes], *, exact: bool) -> Iterator[Message]:
    row = plan.schedule.actions[plan.mesh.position(rank, "pp")]
    actions = [one for action in row for one in action.parts() if one.stage == number]
    for one, count in zip(sizes, count_gathers(actions, sizes), strict=True):
        unit, line = one.unit, plan.mesh.line(rank, one.unit.sharded)
        group_size = unit.num_secondary() or len(line)
        start = line.index(rank) // group_size * group_size
        # Secondary shards hold decoded weights, so gathering them is uncompressed.
        in_group = (line[start : start + group_size], count.among_secondary, EXACT)
        for group, times, name in ((line, count.among_all, EXACT if exact else unit.weights), in_group):
            shard = one.num_elements * len(line) // len(group)
            encoded = encoded_bytes(name, shard, element_bytes=BYTES[unit.compute])
            yield Message(Purpose.WEIGHTS, _peers(rank, group), times * encoded, in_ring=True)


def _operators(plan: RunPlan, rank: int, stage: Stage, *, exact: bool) -> Iterator[Message]:
    """Yield the operators' communication, assuming that all parameters are trained, and the sums of gradients that are
    partial over tp."""
    totals: Counter[tuple[str, Atoms]] = Counter()
    samples, microbatches = plan.batch.samples, plan.batch.num_microbatches
    for kind, _ in plan.held(stage):
        for one in kind.collectives:
            recomputed = one.recomputed if kind.recompute == RecomputePolicy.FULL else 0
            shard = -(-samples * one.elements // plan.mesh.size(*one.axes)) * BYTES[one.dtype]
            sent = 2 * shard if one.op == "all_reduce" else shard
            totals[one.purpose, one.axes] += microbatches * (one.forward + one.backward + recomputed) * sent
    for step_sum in plan.sums:
        if step_sum.op == "sum" or not exact:
            totals[Purpose.TENSOR, step_sum.axes] += _sum_bytes(plan, stage, step_sum)
    for (purpose, axes), num_bytes in totals.items():
        yield Message(purpose, _peers(rank, plan.mesh.line(rank, axes)), num_bytes, in_ring=True)


def _experts(plan: RunPlan, rank: int, stage: Stage) -> Iterator[Message]:
    """Yield dispatches and combines, assuming that all parameters are trained, and sums of counts in forwards."""
    for kind, _ in plan.held(stage):
        if kind.experts is not None and kind.experts.axes:
            from meshwright.plan.expert_traffic import sent_by_layer

            for one in sent_by_layer(plan, rank, kind.experts):
                yield Message(Purpose.EXPERTS, (one.rank,), one.num_bytes)
        for axis, counts in count_sums(plan, kind):
            elements = -(-counts // plan.mesh.size(axis))
            num_bytes = 2 * plan.batch.num_microbatches * elements * COUNT_BYTES
            yield Message(Purpose.EXPERTS, _peers(rank, plan.mesh.line(rank, (axis,))), num_bytes, in_ring=True)


def count_sums(plan: RunPlan, kind: LayerSpec) -> Iterator[tuple[str, int]]:
    """Yield axis and numbers of each sum of tokens per expert that a forward of a micro-batch needs."""
    if (layer := kind.experts) is not None:
        yield from ((axis, layer.num_experts) for axis in layer.counted)
        yield from ((axis, plan.batch.samples * layer.num_experts) for axis in layer.sample_counted)
    for one in kind.auxiliary:
        yield from ((axis, plan.batch.samples * one.num_counts) for axis in plan.mesh.view("cp") if one.num_counts)


def _sum_bytes(plan: RunPlan, stage: Stage, step_sum: StepSum) -> int:
    """Return the bytes per peer: sums run per parameter before sharding, means over all shards at once."""
    ranks, names = plan.mesh.size(*step_sum.axes), set(step_sum.parameters)
    found = [p for kind, _, p in plan.parameters(stage) if f"{kind.name}/{p.name}" in names]
    if step_sum.op == "mean":
        elements = -(-sum(plan.elements(p, sharded=stage.root.sharded) for p in found) // ranks)
    else:
        elements = sum(-(-prod(p.shape) // ranks) for p in found)
    return 2 * elements * BYTES[step_sum.dtype]


def buffer_totals(plan: RunPlan, rank: int) -> Iterator[tuple[str, int, str]]:
    """Yield axis, elements and dtype of each all-reduce of a step's buffer updates, and of that of the load counters of
    all stages over pp."""
    for one in buffer_sums(plan, rank):
        yield from ((axis, one.elements, one.dtype) for axis in one.axes)
    if rows := load_rows(plan):
        yield "pp", sum(row.num_experts for row in rows), LOAD_DTYPE


def _buffers(plan: RunPlan, rank: int) -> Iterator[Message]:
    for axis, total, dtype in buffer_totals(plan, rank):
        elements = -(-total // plan.mesh.size(axis))
        peers = _peers(rank, plan.mesh.line(rank, (axis,)))
        yield Message(Purpose.BUFFERS, peers, 2 * elements * BYTES[dtype], in_ring=True)


def _stages(plan: RunPlan, rank: int) -> Iterator[Message]:
    table, line, edge = plan.schedule, plan.mesh.line(rank, ("pp",)), plan.edge
    elements = prod(edge.shape) // plan.mesh.size(*(axis for shard in edge.shards for axis in shard.axes))
    num_bytes = plan.batch.samples * elements * BYTES[edge.dtype]
    for action in table.actions[line.index(rank)]:
        for one in action.parts():
            if one.kind in SENDS:
                yield Message(Purpose.STAGES, (line[table.stage_ranks[one.peer().stage]],), num_bytes)


def shared_messages(plan: RunPlan, rank: int) -> Iterator[Message]:
    """Yield the gradient sums of shared parameters, sized for the dp_shard rank with the largest shards."""
    table, line, shared = plan.schedule, plan.mesh.line(rank, ("pp",)), plan.shared_parameters()
    if not shared:
        return
    copies = {
        (number, kind.full_name(parameter.name, layer)): (parameter, plan.stages[number])
        for number in plan.stages_of(rank)
        for kind, layer, parameter in plan.parameters(plan.stages[number])
        if parameter.trained
    }
    for group in stage_groups(shared):
        ranks = tuple(dict.fromkeys(line[table.stage_ranks[stage]] for stage in group))
        if rank not in ranks:
            continue
        first = [next((site for site in one.sites if site in copies), None) for one in shared if one.stages() == group]
        trained = [copies[site] for site in first if site is not None]
        total = sum(plan.elements(parameter, sharded=stage.root.sharded) for parameter, stage in trained)
        num_bytes = 2 * -(-total // len(ranks)) * BYTES[plan.stages[0].root.reduce]
        yield Message(Purpose.SHARED, _peers(rank, ranks), num_bytes, in_ring=True)


@dataclass
class Gathers:
    """Number of all-gathers per step for one unit."""

    among_all: int = 0
    among_secondary: int = 0
    """All-gathers within the small group of ranks that keeps secondary shards after a forward."""


class _State(Enum):
    SHARDED = auto()
    SECONDARY = auto()
    PREFETCHED = auto()
    """Prefetched but not yet used."""
    UNSHARDED = auto()


def count_gathers(actions: Iterable[Action], units: Sequence[UnitSizes]) -> list[Gathers]:
    """Return the number of all-gathers per unit.

    Args:
        actions: actions of one stage, in schedule order.
        units: units of the stage, in the order their forwards end.
    """
    fsdp = _FsdpState(units)
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            fsdp.forward()
        elif action.kind in BACKWARDS:
            fsdp.backward()
        elif action.kind is ActionKind.UNSHARD:
            fsdp.unshard_all()
        elif action.kind is ActionKind.REDUCE:  # reshard all units after the stage's last backward
            fsdp.states = [_State.SHARDED for _ in units]
    return fsdp.counts


class _FsdpState:
    """Simulated state of FSDP2 on one stage."""

    def __init__(self, units: Sequence[UnitSizes]) -> None:
        self._units = units
        self.states = [_State.SHARDED for _ in units]
        self._stays_unsharded = False
        self._order: list[int] = []
        """Units in the order their forwards ended during this step."""
        self._positions: list[list[int]] = [[] for _ in units]
        """Positions of each unit in `_order`."""
        self.counts = [Gathers() for _ in units]

    def forward(self) -> None:
        for i, unit in enumerate(self._units):
            self._gather(i, _State.UNSHARDED)
            if unit.is_freed:
                is_kept = unit.unit.num_secondary() is not None
                self.states[i] = _State.SECONDARY if is_kept else _State.SHARDED
            self._positions[i].append(len(self._order))
            self._order.append(i)

    def backward(self) -> None:
        reached = [i for i, unit in enumerate(self._units) if unit.has_backward]
        for i in reversed(reached):
            if self._units[i].unit.in_backward:
                self._gather(i, _State.UNSHARDED)
            self._prefetch(i)
            if self._units[i].has_input_gradient:
                self._free(i)
        for i in range(len(self._units)) if reached else ():
            self._free(i)

    def unshard_all(self) -> None:
        """Gather all units and keep them unsharded until the end of the step."""
        self._stays_unsharded = True
        for i in range(len(self._units)):
            self._gather(i, _State.UNSHARDED)

    def _gather(self, i: int, into: _State) -> None:
        if self.states[i] is _State.SHARDED:
            self.counts[i].among_all += 1
        elif self.states[i] is _State.SECONDARY:
            self.counts[i].among_secondary += 1
        self.states[i] = into

    def _prefetch(self, i: int) -> None:
        position = self._positions[i].pop() if self._positions[i] else 0
        ahead = self._order[position - 1] if position > 0 else None
        if ahead is None or not self._units[ahead].unit.in_backward:
            return
        if self.states[ahead] in (_State.SHARDED, _State.SECONDARY):
            self._gather(ahead, _State.PREFETCHED)

    def _free(self, i: int) -> None:
        if self.states[i] in (_State.UNSHARDED, _State.SECONDARY) and not self._stays_unsharded:
            self.states[i] = _State.SHARDED


@dataclass(frozen=True)
class LinkBytes:
    """Number of bytes by link type."""

    inside_node: int = 0
    between_nodes: int = 0

    def total(self) -> int:
        """Return the bytes sent to all other ranks."""
        return self.inside_node + self.between_nodes

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.inside_node + other.inside_node, self.between_nodes + other.between_nodes)

    def __mul__(self, times: int) -> LinkBytes:
        return LinkBytes(self.inside_node * times, self.between_nodes * times)


@dataclass(frozen=True)
class TrafficEntry:
    """Bytes sent for one purpose."""

    purpose: str
    """A `Purpose`, or the purpose of one of the plan's collectives."""
    sent: LinkBytes
    exact: LinkBytes
    """Bytes without compression."""


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by one rank."""

    rank: int
    entries: tuple[TrafficEntry, ...]
    """Entries for all purposes with nonzero traffic."""

    def sent(self) -> LinkBytes:
        """Return the total."""
        return sum((entry.sent for entry in self.entries), LinkBytes())

    def exact(self) -> LinkBytes:
        """Return the total without compression."""
        return sum((entry.exact for entry in self.entries), LinkBytes())

    def of(self, purpose: str) -> TrafficEntry:
        """Return the entry for a purpose, zero if nothing is sent for it."""
        found = (entry for entry in self.entries if entry.purpose == purpose)
        return next(found, TrafficEntry(purpose, LinkBytes(), LinkBytes()))

    def over(self, num_steps: int) -> Traffic:
        """Return the traffic of `num_steps` steps."""
        entries = (TrafficEntry(one.purpose, one.sent * num_steps, one.exact * num_steps) for one in self.entries)
        return Traffic(self.rank, tuple(entries))


def predict_traffic(plan: RunPlan, *, rank: int | None = None) -> Traffic:
    """Predict the bytes that a rank sends in a step.

    Args:
        plan: plan of the run.
        rank: rank on the mesh; None for the rank that sends the most. Ranks of a stage send the same number of bytes,
            except for attention along cp and for updates from whole matrices, so few ranks of each are considered.
    """
    num_ranks = plan.mesh.num_ranks()
    firsts = range(0, num_ranks, num_ranks // plan.mesh.size("pp"))
    candidates = [one for first in firsts for one in _busiest(plan, first)] if rank is None else [rank]
    return max((_rank_traffic(plan, one) for one in candidates), key=lambda traffic: traffic.sent().total())


def _busiest(plan: RunPlan, first: int) -> set[int]:
    """Return the rank along cp whose attention sends the most, and the rank that sends the most for updates."""
    moved: dict[int, int] = {}
    if moves_matrices(plan):
        from meshwright.plan.matrix_owners import bytes_moved_by_rank

        moved = bytes_moved_by_rank(plan, plan.mesh.position(first, "pp"))
    along_cp = max(plan.mesh.line(first, plan.mesh.view("cp")), key=lambda rank: context_bytes(plan, rank))
    return {along_cp, max(moved, key=lambda rank: moved[rank], default=along_cp)}


def _rank_traffic(plan: RunPlan, rank: int) -> Traffic:
    totals: dict[bool, dict[str, LinkBytes]] = {exact: dict.fromkeys(Purpose, LinkBytes()) for exact in (False, True)}
    for exact, found in totals.items():
        for one in messages(plan, rank, exact=exact):
            found[one.purpose] = found.get(one.purpose, LinkBytes()) + by_link(plan, rank, one)
    entries = (TrafficEntry(purpose, sent, totals[True][purpose]) for purpose, sent in totals[False].items())
    return Traffic(rank, tuple(entry for entry in entries if entry.sent.total()))


def by_link(plan: RunPlan, rank: int, message: Message) -> LinkBytes:
    """Return the bytes of a message to all its peers, by link."""
    home, nodes = plan.mesh.node(rank), [plan.mesh.node(peer) for peer in message.peers]
    total, near = len(nodes) * message.num_bytes, nodes.count(home)
    far = total - near * message.num_bytes
    if message.in_ring and far:
        far = total * len({*nodes, home}) // (len(nodes) + 1)
    return LinkBytes(total - far, far)
