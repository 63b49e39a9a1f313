"""What one rank sends in a step, message by message: to whom, what for, and how many bytes.

An all-to-all and a transfer go to the ranks that they are for. The other collectives go in rings that cross each node
once, as NCCL's do: every rank hands on as much as it would to all others one by one, and of each node one rank hands
it to the next node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from meshwright.comm.catalogue import EXACT, encoded_bytes, find_method
from meshwright.config.pipeline import layers_per_stage, lowered_table
from meshwright.config.rules_comm import has_drifting_copies
from meshwright.config.schema import RunConfig
from meshwright.models.shapes import Part
from meshwright.models.spec import LlamaSpec
from meshwright.pipeline.shared import stage_groups
from meshwright.pipeline.stages import layer_ranges
from meshwright.pipeline.table import SENDS
from meshwright.plan.fsdp_units import Unit, fsdp_units, trained_shapes
from meshwright.plan.gathers import count_gathers

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
LOSS_REDUCTIONS = 3
"""Of a cross-entropy over a divided vocabulary, a number a token each: the maximum, the sum, and the target's."""


class What(StrEnum):
    """What bytes are sent for."""

    GRADIENTS = "gradients"
    """Reduced and scattered over dp_shard."""
    REPLICAS = "replicas"
    """Gradients added up over dp_replicate."""
    WEIGHTS = "weights"
    """Gathered over dp_shard."""
    TENSOR = "tensor"
    """What tp exchanges: activations, their gradients, the loss's sums, and gradients of what is whole on each rank."""
    STAGES = "stages"
    """Activations and their gradients, from stage to stage."""
    SHARED = "shared parameters"
    """Their gradients, added up over the stages that have a copy."""


@dataclass(frozen=True)
class Message:
    """The same number of bytes to each of some ranks, or as much around the ring of them."""

    what: What
    peers: tuple[int, ...]
    """Global ranks, without the one that sends."""
    num_bytes: int
    """To each."""
    in_ring: bool = False


@dataclass(frozen=True)
class Place:
    """A rank of a configuration's mesh."""

    config: RunConfig
    rank: int
    ranks_per_node: int

    def line(self, axis: str) -> tuple[int, ...]:
        """The ranks along `axis`, this one included."""
        axes = self.config.mesh.axes()
        position = axes.coordinate(self.rank)
        return tuple(axes.rank(**{**position, axis: i}) for i in range(axes.size(axis)))

    def others(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those that are not this one."""
        return tuple(rank for rank in ranks if rank != self.rank)

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.ranks_per_node

    def compute_bytes(self) -> int:
        """Of an element of weights and activations."""
        return BYTES[self.config.train.precision]

    def reduce_bytes(self) -> int:
        """Of an element of a gradient that is reduced."""
        return max(4, self.compute_bytes())

    def parts(self) -> list[Part]:
        """The stages on this rank."""
        table, ranges = lowered_table(self.config), layer_ranges(layers_per_stage(self.config))
        stages = table.stages_of(self.config.mesh.axes().coordinate(self.rank)["pp"])
        return [Part(ranges[stage], stage=stage, num_stages=table.num_stages) for stage in stages]


def place_of(config: RunConfig, rank: int, *, ranks_per_node: int | None) -> Place:
    """A rank's place, with as many ranks a node as the configuration says, else as given, else all on one."""
    per_node = config.comm.ranks_per_node or ranks_per_node or config.mesh.axes().num_ranks()
    return Place(config, rank, per_node)


def messages(place: Place) -> Iterator[Message]:
    """All of a step of training; without its one sum of loss and gradient norm."""
    for part in place.parts():
        units = fsdp_units(place.config, part)
        yield from _gradients(place, units)
        yield from _weights(place, part, units)
        yield from _tensor(place, part)
    yield from _stages(place)
    yield from _shared(place)


def _gradients(place: Place, units: list[Unit]) -> Iterator[Message]:
    method, size = find_method(place.config.comm.gradients), place.reduce_bytes()
    line, replicas = place.line("dp_shard"), place.line("dp_replicate")
    near, far = two_stages(place, line)
    inside = method.codec_inside_node(find_method(place.config.comm.inside_node).codec)
    is_builtin = method.name == EXACT
    for elements in (unit.num_trained for unit in units):
        num_bytes = method.codec.encoded_bytes(elements, element_bytes=size)
        if is_builtin or not far:
            yield Message(What.GRADIENTS, place.others(line), num_bytes, in_ring=is_builtin)
        else:
            # A piece for each node, which the rank of this node will send on or keep.
            inside_bytes = (len(far) + 1) * inside.encoded_bytes(elements, element_bytes=size)
            yield Message(What.GRADIENTS, near, inside_bytes)
            yield Message(What.GRADIENTS, far, num_bytes)
        share = -(-elements // len(replicas))
        # Reduced as pieces, of which then all gather the sums.
        for codec, in_ring in ((method.codec, is_builtin), (method.codec_of_sum, True)):
            num_bytes = codec.encoded_bytes(share, element_bytes=size)
            yield Message(What.REPLICAS, place.others(replicas), num_bytes, in_ring=in_ring)


def two_stages(place: Place, line: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The others of `line` on this node, and those at the same place on other nodes; nobody where it is on one node, or
    has more ranks on some nodes than on others."""
    nodes: dict[int, list[int]] = {}
    for rank in line:
        nodes.setdefault(rank // place.ranks_per_node, []).append(rank)
    own = nodes[place.rank // place.ranks_per_node]
    if len(nodes) < 2 or any(len(node) != len(own) for node in nodes.values()):
        return (), ()
    local = own.index(place.rank)
    return place.others(tuple(own)), place.others(tuple(node[local] for node in nodes.values()))


def _weights(place: Place, part: Part, units: list[Unit]) -> Iterator[Message]:
    comm, line = place.config.comm, place.line("dp_shard")
    row = lowered_table(place.config).actions[place.config.mesh.axes().coordinate(place.rank)["pp"]]
    actions = [one for action in row for one in action.parts() if one.stage == part.stage]
    few = comm.secondary_shards or len(line)
    start = line.index(place.rank) // few * few
    counts = count_gathers(actions, units, secondary=comm.secondary_shards is not None)
    for unit, count in zip(units, counts, strict=True):
        # What was sent encoded once is sent among few as it was decoded.
        among_few = (line[start : start + few], count.among_secondary, EXACT)
        for group, times, method in ((line, count.among_all, comm.weights), among_few):
            piece = unit.num_elements * len(line) // len(group)
            encoded = encoded_bytes(method, piece, element_bytes=place.compute_bytes())
            yield Message(What.WEIGHTS, place.others(group), times * encoded, in_ring=True)


def _stream_elements(config: RunConfig) -> int:
    """Of a micro-batch's activations between two blocks, before tp divides them."""
    axes, train = config.mesh.axes(), config.train
    samples = train.global_batch // (axes.data_parallel() * train.num_microbatches)
    return samples * config.tokens_a_sample() * config.model.dim


def _tensor(place: Place, part: Part) -> Iterator[Message]:
    """With and without sequence parallel a product's input is gathered, or the sum of its gradients is, and its output
    is summed: an all-reduce, or an all-gather and a reduce-scatter. As if everything were trained."""
    config, line = place.config, place.line("tp")
    if len(line) == 1:
        return
    exchanges = len(part.layers) * _exchanges_of_a_block(config)
    loss_bytes = 0
    if isinstance(config.model.spec(), LlamaSpec):
        exchanges += 2 * (part.is_first + part.is_last)
        tokens = _stream_elements(config) // config.model.dim
        if part.is_last:
            loss_bytes = 2 * LOSS_REDUCTIONS * -(-tokens // len(line)) * place.reduce_bytes()
    piece = -(-_stream_elements(config) // len(line)) * place.compute_bytes()
    total = config.train.num_microbatches * (exchanges * piece + loss_bytes)
    total += _norm_bytes(place, part, len(line)) + _copies_bytes(place, part, len(line))
    yield Message(What.TENSOR, place.others(line), total, in_ring=True)


def _exchanges_of_a_block(config: RunConfig) -> int:
    """All-gathers and reduce-scatters of the stream in forward and backward; an all-reduce is two."""
    once = 2 * 2 * 2  # attention and feed-forward, what goes in and what comes out, forward and backward
    if config.recompute.policy != "full":
        return once
    if not isinstance(config.model.spec(), LlamaSpec):
        return once + 4
    # Recomputation ends with the last thing that was kept, which is before a Llama block's last sum.
    return once + (3 if config.mesh.sequence_parallel else 2)


def _norm_bytes(place: Place, part: Part, tp: int) -> int:
    """The sum of what each rank's tokens give to parameters that are whole on all of them, once a step."""
    config = place.config
    if not config.mesh.sequence_parallel:
        return 0
    shapes = trained_shapes(config, part)
    trained = [shape for shape, is_trained in shapes.items() if is_trained and shape.tp_dim is None]
    # A gradient that was added up over micro-batches has the type that it is reduced in.
    size = place.compute_bytes() if config.train.num_microbatches == 1 else place.reduce_bytes()
    return sum(2 * -(-prod(shape.shape) // tp) * size for shape in trained)


def _copies_bytes(place: Place, part: Part, tp: int) -> int:
    """The mean of what each rank got for parameters that are whole on all of them, where that is not the same."""
    if not has_drifting_copies(place.config):
        return 0
    dp_shard = place.config.mesh.dp_shard
    trained = [shape for shape, is_trained in trained_shapes(place.config, part).items() if is_trained]
    total = sum(shape.on_rank(tp=tp, dp_shard=dp_shard) for shape in trained if shape.tp_dim is None)
    return 2 * -(-total // tp) * place.reduce_bytes()


def _stages(place: Place) -> Iterator[Message]:
    config, table, line = place.config, lowered_table(place.config), place.line("pp")
    divided = config.mesh.tp if config.mesh.sequence_parallel else 1
    num_bytes = _stream_elements(config) // divided * place.compute_bytes()
    for action in table.actions[line.index(place.rank)]:
        for one in action.parts():
            if one.kind in SENDS:
                yield Message(What.STAGES, (line[table.stage_ranks[one.peer().stage]],), num_bytes)


def _shared(place: Place) -> Iterator[Message]:
    """Of the rank of dp_shard that holds most, where they do not hold the same."""
    config, table, line = place.config, lowered_table(place.config), place.line("pp")
    shared = config.model.spec().shared_parameters(table.num_stages)
    parts, axes = {part.stage: trained_shapes(config, part) for part in place.parts()}, config.mesh.axes()
    for group in stage_groups(shared):
        ranks = tuple(dict.fromkeys(line[table.stage_ranks[stage]] for stage in group))
        if place.rank not in ranks:
            continue
        sites = [next(site for site in one.sites if site[0] in parts) for one in shared if one.stages() == group]
        copies = {(stage, shape.name): shape for stage, part in parts.items() for shape in part if part[shape]}
        trained = [copies[site] for site in sites if site in copies]
        total = sum(shape.on_rank(tp=axes.tp, dp_shard=axes.dp_shard) for shape in trained)
        num_bytes = 2 * -(-total // len(ranks)) * place.reduce_bytes()
        yield Message(What.SHARED, place.others(ranks), num_bytes, in_ring=True)
