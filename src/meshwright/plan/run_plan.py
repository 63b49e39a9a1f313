"""A run as a value: what every stage holds, how it is sharded, and what is reduced, recomputed, compiled and sent.

Frozen, torch-free, and written as JSON (`text`). `make` makes it from the configuration; `verify` checks that every
gradient is summed exactly where it is partial; memory and traffic are folds over it; the executors do what it says.
Facts are per kind of block and per stage, never per rank, so its size does not depend on the mesh's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from meshwright.models.contract.tp_styles import Style
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.shared_parameters import SharedParameter
from meshwright.plan.mesh_views import Atoms, Mesh

FORMAT = 1
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "float16": 2}


class Gradient(StrEnum):
    """What a parameter's gradient is along an axis before any reduction."""

    SHARDED = "sharded"
    PARTIAL = "partial"
    EQUAL = "equal"


class By(StrEnum):
    """Who carries a reduction out."""

    OURS = "ours"
    FSDP = "fsdp"
    DTENSOR = "dtensor"


@dataclass(frozen=True)
class Shard:
    """A dim that is sharded over atoms."""

    dim: int
    axes: Atoms


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kind."""

    name: str
    """Inside its kind."""
    shape: tuple[int, ...]
    role: str
    used: tuple[Shard, ...] = ()
    """How it is sharded while an operator uses it: tp, never fsdp."""
    work: Atoms = ()
    """Atoms that divide what it is applied to, so that its gradient is partial over them: the styles say it."""
    stored_dim: int = 0
    """The dim that its unit shards."""
    trained: bool = True
    key: str | None = None
    """Its name in the whole model, where that is another parameter's: a copy of a tied one."""

    def gradient(self, axis: str) -> Gradient:
        """What its gradient is along an axis."""
        if any(axis in shard.axes for shard in self.used):
            return Gradient.SHARDED
        return Gradient.PARTIAL if axis in self.work else Gradient.EQUAL


@dataclass(frozen=True)
class Buffer:
    """A buffer of a kind."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    work: Atoms = ()
    """Atoms over which ranks see different parts of what it counts."""
    summed: Atoms = ()
    """Atoms over which its update is summed, once a step."""
    saved: bool = True


@dataclass(frozen=True)
class Unit:
    """What FSDP2 wraps together: gathered and reduced as one."""

    name: str
    modules: tuple[str, ...]
    """Paths below the kind's; the root's is empty."""
    parameters: tuple[str, ...]
    """Inside the kind; of the root, as kind/name."""
    sharded: Atoms
    """Gathered, and gradients scattered, over these."""
    replicas: Atoms
    """Then gradients are all-reduced over these."""
    freed: bool | int = True
    """After the forward (ZeRO-3); a number of ranks keeps the weights among them instead (hpZ)."""
    in_backward: bool = True
    """Its backward needs the weights: a lookup's does not."""
    compute: str = "float32"
    reduce: str = "float32"
    gradients: str = "exact"
    weights: str = "exact"
    inside_node: str = "exact"
    """How gradients are sent inside a node where they are reduced in two stages."""

    def num_secondary(self) -> int | None:
        """Ranks that keep the weights among them; None where it is freed, or kept, as a whole."""
        return None if isinstance(self.freed, bool) else self.freed


@dataclass(frozen=True)
class Collective:
    """What an operator moves for one sample: traffic is a fold over these."""

    purpose: str
    op: str
    """all_gather, reduce_scatter or all_reduce."""
    axes: Atoms
    elements: int
    """Of the full tensor, for one sample."""
    dtype: str
    forward: int = 0
    """Times in a forward."""
    backward: int = 0
    recomputed: int = 0
    """Times more, where its block is recomputed."""


@dataclass(frozen=True)
class Auxiliary:
    """A loss inside a block, a mean over samples."""

    name: str
    work: Atoms
    """Atoms of a stage over which ranks have parts of it."""


@dataclass(frozen=True)
class Kind:
    """Blocks, or an end, that are alike in everything: what is frozen, recomputed or compiled otherwise is another."""

    name: str
    described: str
    """The family's name of it."""
    path: str
    parameters: tuple[Parameter, ...]
    units: tuple[Unit, ...] = ()
    """The other parameters are in their stage's root."""
    buffers: tuple[Buffer, ...] = ()
    styles: tuple[tuple[str, Style], ...] = ()
    collectives: tuple[Collective, ...] = ()
    auxiliary: tuple[Auxiliary, ...] = ()
    recompute: str = "none"
    compiled: bool = False
    saved_elements: int = 0
    """Of a rank, for one sample: what its forward leaves for its backward."""
    output_elements: int = 0
    """Of a rank, for one sample: an output that a loss is computed on."""
    tied: tuple[str, ...] = ()
    """Parameters here that are another one's of the same stage, which has them among its own."""
    everywhere: bool = False
    """An end that every stage has a copy of."""

    @property
    def is_block(self) -> bool:
        """Layers are of it; else it is an end."""
        return "{layer}" in self.path

    def full_name(self, name: str, layer: int | None) -> str:
        """A name inside it as the whole model has it."""
        path = self.path.format(layer=layer)
        return f"{path}.{name}" if path and name else path or name

    def key(self, parameter: Parameter, layer: int | None) -> str:
        """A parameter's name in checkpoints."""
        return parameter.key or self.full_name(parameter.name, layer)

    @cached_property
    def num_elements(self) -> int:
        """Of all parameters."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)


@dataclass(frozen=True)
class Edge:
    """A tensor between stages, without its batch dim, so that validation and generation use it too."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage holds."""

    pp_rank: int
    layers: tuple[int, int]
    kinds: tuple[str, ...]
    """One a layer."""
    before: tuple[str, ...]
    """Kinds without a layer, before the blocks."""
    after: tuple[str, ...]
    root: Unit
    edge_in: Edge | None = None
    edge_out: Edge | None = None
    splits_backward: bool = False


@dataclass(frozen=True)
class StepSum:
    """A reduction outside units, after the last backward."""

    parameters: tuple[str, ...]
    """As kind/name."""
    axes: Atoms
    op: str
    """sum; or mean, where equal copies drift apart through a codec."""
    by: By
    dtype: str


@dataclass(frozen=True)
class Loss:
    """How the loss and its divisor are put together."""

    summed: Atoms
    """Ranks have parts of it."""
    equal: Atoms
    """Ranks have the same."""
    units: int | None
    """What it is divided by in a step; None where it is counted over the global batch before the first backward."""


@dataclass(frozen=True)
class BatchShape:
    """How a step's samples are divided."""

    global_batch: int
    num_microbatches: int
    samples: int
    """Of a micro-batch."""
    tokens: int
    """Of a sample."""


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps of parameters of some roles."""

    roles: tuple[str, ...]
    names: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, as far as memory and checkpoints know it."""

    name: str
    states: tuple[OptimizerState, ...]


Site = tuple[int, str]
"""A stage, and a parameter's name there."""


@dataclass(frozen=True)
class RunPlan:
    """A run."""

    format: int
    mesh: Mesh
    masters: str
    """The dtype of parameters, gradients and optimizer state between steps."""
    sequence_parallel: bool
    edge: Edge
    """What goes between blocks, and so between stages."""
    kinds: tuple[Kind, ...]
    stages: tuple[Stage, ...]
    shared: tuple[tuple[str, tuple[Site, ...]], ...]
    """Keys of parameters with copies on several stages: their gradients are summed over these sites."""
    norm_omits: tuple[Site, ...]
    """Copies that an earlier stage counts in the gradient norm: stage and key."""
    sums: tuple[StepSum, ...]
    loss: Loss
    batch: BatchShape
    schedule: Schedule
    """The lowered table."""
    optimizer: Optimizer

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        return {kind.name: kind for kind in self.kinds}

    def kind(self, name: str) -> Kind:
        """The kind of this name."""
        return self._kinds[name]

    def held(self, stage: Stage) -> Iterator[tuple[Kind, int | None]]:
        """Kinds, and the layer of a block, in the order of the module's parameters."""
        yield from ((self.kind(name), None) for name in stage.before)
        yield from ((self.kind(name), layer) for layer, name in enumerate(stage.kinds, stage.layers[0]))
        yield from ((self.kind(name), None) for name in stage.after)

    def parameters(self, stage: Stage) -> Iterator[tuple[Kind, int | None, Parameter]]:
        """All of a stage's, in the module's order."""
        return ((kind, layer, parameter) for kind, layer in self.held(stage) for parameter in kind.parameters)

    def shared_parameters(self) -> tuple[SharedParameter, ...]:
        """As the pipeline's table and executors know them."""
        return tuple(SharedParameter(key, sites) for key, sites in self.shared)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank of the mesh."""
        return self.schedule.stages_of(self.mesh.position(rank, "pp"))

    @property
    def has_units(self) -> bool:
        """FSDP2 wraps the stages: something is sharded or repeated, or computed in another dtype than it is kept in."""
        return self.mesh.size(*self.stages[0].root.sharded, *self.stages[0].root.replicas) > 1 or any(
            unit.compute != self.masters for stage in self.stages for unit in self.units(stage)
        )

    def units(self, stage: Stage) -> Iterator[Unit]:
        """Of a stage, in the order in which their forwards end: the root's comes last."""
        for kind, _ in self.held(stage):
            yield from kind.units
        yield stage.root

    def elements(self, parameter: Parameter, *, sharded: Atoms = ()) -> int:
        """Of a rank, as used; with `sharded`, of the rank that stores most: the first have a row more where rows don't
        divide."""
        sizes = list(parameter.shape)
        for shard in parameter.used:
            sizes[shard.dim] = -(-sizes[shard.dim] // self.mesh.size(*shard.axes))
        sizes[parameter.stored_dim] = -(-sizes[parameter.stored_dim] // self.mesh.size(*sharded))
        return math.prod(sizes)

    def action_words(self, rank: int, position: int) -> str:
        """What a rank of the mesh does at a position of its row: `2F3: forward of micro-batch 3 on stage 2`."""
        row = self.schedule.actions[self.mesh.position(rank, "pp")]
        parts = [part for action in row for part in action.parts()]
        return parts[position].describe() if position < len(parts) else "the end of its row"
