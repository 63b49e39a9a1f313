"""The run plan: mesh, contents and sharding of each stage, reductions, recomputation, compilation and communication.

Frozen dataclasses that serialize to JSON (`serialize`). `make_plan` makes the plan from the configuration, `verify`
checks that each gradient is summed exactly where it is partial, memory and traffic are derived from the plan, and the
executors follow it. Data is stored per kind and stage, never per rank, so the size does not depend on the mesh.
Doesn't import torch.

The mesh has dimensions (atoms), and views, which are sets of atoms. Atoms are the configuration's axes, except that
expert parallelism splits dp_shard or cp in two. The expert group is then a view of the same mesh, and every reduction
runs over a set of atoms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from meshwright.features.contract import KindPart, P
from meshwright.mesh.axes import Axes
from meshwright.models.contract.operators import OperatorKind, Rerun
from meshwright.models.contract.tp_styles import Style
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.optim.catalogue import PlannedOptimizer
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.split_layers import SharedParameter

FORMAT = 6
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "float16": 2}
MASTER_DTYPES = {"float32": "float32", "bfloat16": "float32", "float64": "float64"}
"""Dtype of parameters and optimizer state, by `train.precision`."""


EXPERTS = "experts"
"""Name of the unit inside a block that holds the experts sharded by ep."""


class GradientPlacement(StrEnum):
    """Placement of a parameter's gradient along an axis before any reduction."""

    SHARDED = "sharded"
    PARTIAL = "partial"
    EQUAL = "equal"


class ReducedBy(StrEnum):
    """Component that performs a reduction."""

    OURS = "ours"
    FSDP = "fsdp"
    DTENSOR = "dtensor"


@dataclass(frozen=True)
class Shard:
    """A dim sharded over atoms."""

    dim: int
    axes: Atoms


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kind."""

    name: str
    """Name inside the kind."""
    shape: tuple[int, ...]
    role: str
    used: tuple[Shard, ...] = ()
    """Sharding during computation: over tp, and of experts over ep; otherwise never over fsdp."""
    work: Atoms = ()
    """Atoms over which the operator's input is sharded according to the styles, making the gradient partial."""
    stored_dim: int = 0
    """Dim sharded by FSDP."""
    trained: bool = True
    key: str | None = None
    """Full-model name of the parameter to which this one is tied."""

    def gradient(self, axis: str) -> GradientPlacement:
        """Return the placement of the gradient along an axis."""
        if any(axis in shard.axes for shard in self.used):
            return GradientPlacement.SHARDED
        return GradientPlacement.PARTIAL if axis in self.work else GradientPlacement.EQUAL


@dataclass(frozen=True)
class Buffer:
    """A buffer of a kind."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    work: Atoms = ()
    """Atoms along which ranks see different inputs."""
    summed: Atoms = ()
    """Atoms over which the update is summed once per step."""
    saved: bool = True
    load: bool = False
    """Whether it counts the tokens assigned to each expert (`LoadCounter`)."""


@dataclass(frozen=True)
class Unit:
    """An FSDP2 unit: modules whose parameters are gathered, and gradients reduced, together."""

    name: str
    modules: tuple[str, ...]
    """Module paths relative to the kind; empty for the root."""
    parameters: tuple[str, ...]
    """Parameter names relative to the kind; for the root, as kind/name."""
    sharded: Atoms
    """Atoms over which parameters are all-gathered and gradients reduce-scattered."""
    replicas: Atoms
    """Atoms over which gradients are then all-reduced."""
    freed: bool | int = True
    """Reshard after the forward (ZeRO-3); an integer is the number of ranks sharing secondary shards (hpZ)."""
    in_backward: bool = True
    """Whether the backward needs the weights; that of an embedding lookup does not."""
    compute: str = "float32"
    reduce: str = "float32"
    gradients: str = "exact"
    weights: str = "exact"
    inside_node: str = "exact"
    """Codec for gradients inside a node in two-stage reductions."""

    def num_secondary(self) -> int | None:
        """Return the number of ranks sharing secondary shards, or None if there are none."""
        return None if isinstance(self.freed, bool) else self.freed


@dataclass(frozen=True)
class Collective:
    """A collective run by an operator; sizes are per sample."""

    purpose: str
    op: str
    """all_gather, reduce_scatter or all_reduce."""
    axes: Atoms
    elements: int
    """Number of elements of the full tensor, per sample."""
    dtype: str
    forward: int = 0
    """Number of calls per forward."""
    backward: int = 0
    recomputed: int = 0
    """Number of additional calls if the block is fully recomputed; selective recomputation keeps results."""
    tokens: int = 0
    """Tokens of a micro-batch that a call is divided into; 0 if it isn't."""

    def num_calls(self, tokens: int) -> int:
        """Return the number of calls that one is divided into, given the tokens of a micro-batch."""
        return -(-tokens // self.tokens) if self.tokens else 1


@dataclass(frozen=True)
class Auxiliary:
    """An auxiliary loss of a block or an end, averaged over samples."""

    name: str
    work: Atoms
    """Atoms inside a stage over which the loss is partial."""
    in_region: bool = False
    """Whether tp ranks compute the same loss, and each adds 1 / tp of it."""
    num_counts: int = 0
    """Numbers of a sample that blocks count, and that each forward sums over cp."""


@dataclass(frozen=True)
class LayerSpec:
    """A kind of identical blocks, or an end. Blocks that differ in frozen parameters, recomputation, compilation or
    what features add are different kinds."""

    name: str
    described: str
    """Name of the kind in the family's description."""
    path: str
    parameters: tuple[Parameter, ...]
    units: tuple[Unit, ...] = ()
    """FSDP units; all other parameters belong to the stage's root unit."""
    buffers: tuple[Buffer, ...] = ()
    styles: tuple[tuple[str, Style], ...] = ()
    collectives: tuple[Collective, ...] = ()
    auxiliary: tuple[Auxiliary, ...] = ()
    recompute: RecomputePolicy = RecomputePolicy.NONE
    compiled: bool = False
    saved: SavedBytes | None = None
    """Bytes saved for the backward; None for an end that saves nothing."""
    output_elements: int = 0
    """Elements of the output on which a loss is computed, per rank and sample; 0 if there is none."""
    experts: ExpertLayer | None = None
    attention: AttentionLayer | None = None
    operators: tuple[PlannedOperator, ...] = ()
    """What a rank computes in the kind; empty if the family doesn't describe it."""
    parts: tuple[KindPart, ...] = ()
    """What features add to the kind, by which kinds differ; in JSON each is a field of the feature's name."""
    tied: tuple[str, ...] = ()
    """Parameters tied to a parameter of another kind on the same stage."""
    everywhere: bool = False
    """Whether the end is replicated on all stages."""

    def part(self, kind: type[P]) -> P | None:
        """Return the part of a type, or None."""
        return next((one for one in self.parts if isinstance(one, kind)), None)

    def without(self, kind: type[KindPart]) -> LayerSpec:
        """Return the kind without the part of a type."""
        return replace(self, parts=tuple(one for one in self.parts if not isinstance(one, kind)))

    @property
    def is_block(self) -> bool:
        """Whether the kind is a block rather than an end."""
        return "{layer}" in self.path

    def full_name(self, name: str, layer: int | None) -> str:
        """Convert a name relative to the kind to its full-model name."""
        path = self.path.format(layer=layer)
        return f"{path}.{name}" if path and name else path or name

    def key(self, parameter: Parameter, layer: int | None) -> str:
        """Return a parameter's name in checkpoints."""
        return parameter.key or self.full_name(parameter.name, layer)

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)


@dataclass(frozen=True)
class Edge:
    """A tensor sent between stages, without the batch dim, so that validation and generation can use it too."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True)
class Stage:
    """A pipeline stage."""

    pp_rank: int
    layers: tuple[int, int]
    kinds: tuple[str, ...]
    """LayerSpec of each layer."""
    before: tuple[str, ...]
    """Ends before the blocks."""
    after: tuple[str, ...]
    root: Unit
    edge_in: Edge | None = None
    edge_out: Edge | None = None
    splits_backward: bool = False


@dataclass(frozen=True)
class StepSum:
    """A reduction outside units, after the last backward."""

    parameters: tuple[str, ...]
    """Parameters, as kind/name."""
    axes: Atoms
    op: str
    """`sum`, or `mean` for replicas that diverge under a lossy codec."""
    by: ReducedBy
    dtype: str


@dataclass(frozen=True)
class Loss:
    """Reduction of the loss, and its divisor."""

    summed: Atoms
    """Axes over which the loss is partial."""
    equal: Atoms
    """Axes over which the loss is replicated."""
    units: int | None
    """Divisor of a step's loss; None if it is counted over the global batch before the first backward."""


@dataclass(frozen=True)
class BatchShape:
    """Sizes that split a step's samples into micro-batches."""

    global_batch: int
    num_microbatches: int
    samples: int
    """Samples per micro-batch."""
    tokens: int
    """Tokens per sample."""
    packed: bool = False
    """Whether samples are packed documents, which differ from sample to sample."""


Site = tuple[int, str]
"""A stage and the full-model name of a parameter or buffer on it."""


@dataclass(frozen=True)
class RunPlan:
    """The layout and execution plan of a run."""

    format: int
    mesh: Mesh
    masters: str
    """Dtype of parameters, gradients and optimizer state between steps."""
    sequence_parallel: bool
    edge: Edge
    """Tensor passed between blocks, and therefore between stages."""
    kinds: tuple[LayerSpec, ...]
    stages: tuple[Stage, ...]
    shared: tuple[tuple[str, tuple[Site, ...]], ...]
    """Keys of parameters with copies on several stages, with the sites over which their gradients are summed."""
    norm_omits: tuple[Site, ...]
    """Sites left out of the gradient norm, because an earlier stage counts the same parameter."""
    sums: tuple[StepSum, ...]
    loss: Loss
    batch: BatchShape
    schedule: Schedule
    """The lowered schedule."""
    optimizer: PlannedOptimizer
    libraries: int = 0
    """Bytes of a process that libraries of the model's family take, `torch._dynamo` included if they import it."""

    @cached_property
    def _kinds(self) -> dict[str, LayerSpec]:
        return {kind.name: kind for kind in self.kinds}

    def kind(self, name: str) -> LayerSpec:
        """Return the kind with this name."""
        return self._kinds[name]

    def held(self, stage: Stage) -> Iterator[tuple[LayerSpec, int | None]]:
        """Yield the kinds on a stage, with the layer of each block, in module order."""
        yield from ((self.kind(name), None) for name in stage.before)
        yield from ((self.kind(name), layer) for layer, name in enumerate(stage.kinds, stage.layers[0]))
        yield from ((self.kind(name), None) for name in stage.after)

    def parameters(self, stage: Stage) -> Iterator[tuple[LayerSpec, int | None, Parameter]]:
        """Yield kind, layer and parameter for each parameter of a stage, in module order."""
        return ((kind, layer, parameter) for kind, layer in self.held(stage) for parameter in kind.parameters)

    def shared_parameters(self) -> tuple[SharedParameter, ...]:
        """Return the shared parameters in the form used by the pipeline."""
        return tuple(SharedParameter(key, sites) for key, sites in self.shared)

    @property
    def rank_tokens(self) -> int:
        """Tokens of a sample on a context-parallel rank."""
        return self.batch.tokens // self.mesh.size(*self.mesh.view("cp"))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on a rank of the mesh."""
        return self.schedule.stages_of(self.mesh.position(rank, "pp"))

    @property
    def has_units(self) -> bool:
        """Whether FSDP2 wraps the stages: parameters are sharded or replicated, or compute and master dtypes differ."""
        return self.mesh.size(*self.stages[0].root.sharded, *self.stages[0].root.replicas) > 1 or any(
            unit.compute != self.masters for stage in self.stages for unit in self.units(stage)
        )

    def units(self, stage: Stage) -> Iterator[Unit]:
        """Yield a stage's units in the order their forwards end; the root comes last."""
        for kind, _ in self.held(stage):
            yield from kind.units
        yield stage.root

    def unit_of(self, stage: Stage, kind: LayerSpec, parameter: Parameter) -> Unit:
        """Return the unit that holds a parameter of a stage."""
        return next((unit for unit in kind.units if parameter.name in unit.parameters), stage.root)

    def elements(self, parameter: Parameter, *, sharded: Atoms = ()) -> int:
        """Return the number of elements of a parameter on a rank during computation. With `sharded`, return the number
        on the rank that stores the most: if the split is uneven, the first ranks have an extra row."""
        return math.prod(self.local_shape(parameter, sharded=sharded))

    def local_shape(self, parameter: Parameter, *, sharded: Atoms = ()) -> tuple[int, ...]:
        """Return the shape of the largest shard, as `elements`."""
        sizes = list(parameter.shape)
        for shard in parameter.used:
            sizes[shard.dim] = -(-sizes[shard.dim] // self.mesh.size(*shard.axes))
        sizes[parameter.stored_dim] = -(-sizes[parameter.stored_dim] // self.mesh.size(*sharded))
        return tuple(sizes)

    def describe_action(self, rank: int, position: int) -> str:
        """Describe an action of a rank's row: `2F3: forward of micro-batch 3 on stage 2`."""
        row = self.schedule.actions[self.mesh.position(rank, "pp")]
        parts = [part for action in row for part in action.parts()]
        return parts[position].describe() if position < len(parts) else "the end of its row"


Atoms = tuple[str, ...]
"""Names of atoms, outermost first."""


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks with named dimensions (atoms) and views."""

    atoms: tuple[tuple[str, int], ...]
    """Names and sizes of the atoms, outermost first."""
    views: tuple[tuple[str, Atoms], ...]
    """Atoms of each view: samples are sharded over `batch`, parameters are sharded over `fsdp` and replicated over
    `replicas`, experts are sharded over `ep` instead of the same atoms of `fsdp`; `cp` and `tp` are axes."""
    nodes: int | tuple[int, ...]
    """Number of consecutive ranks per node, or the node of each rank."""

    @staticmethod
    def of(axes: Axes, *, ep: int = 1, nodes: int | tuple[int, ...] | None = None) -> Mesh:
        """Return the mesh for a configuration's axes, on a single node if `nodes` is None.

        Consecutive ranks of `dp_shard × cp` form groups of `ep`, which is a multiple of cp or divides it.
        """
        inner_cp, inner_dp = min(ep, axes.cp), max(1, ep // axes.cp)
        dp = (("dp_shard", axes.dp_shard // inner_dp), *((("ep", inner_dp),) if inner_dp > 1 else ()))
        splits_cp = 1 < inner_cp < axes.cp
        cp = (("cp", axes.cp // inner_cp), ("cp_ep", inner_cp)) if splits_cp else (("cp", axes.cp),)
        dp_names, cp_names = tuple(name for name, _ in dp), tuple(name for name, _ in cp)
        views: tuple[tuple[str, Atoms], ...] = (
            ("batch", ("dp_replicate", *dp_names)),
            ("replicas", ("dp_replicate",)),
            ("fsdp", dp_names + cp_names),
            ("cp", cp_names),
            ("tp", ("tp",)),
            ("ep", dp_names[1:] + (cp_names[-1:] if inner_cp > 1 else ())),
        )
        atoms = (("pp", axes.pp), ("dp_replicate", axes.dp_replicate), *dp, *cp, ("tp", axes.tp))
        return Mesh(atoms, views, nodes or axes.num_ranks())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each atom."""
        return dict(self.atoms)

    @cached_property
    def _used_views(self) -> dict[str, Atoms]:
        return {name: tuple(atom for atom in atoms if self.sizes[atom] > 1) for name, atoms in self.views}

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for name, size in reversed(self.atoms):
            strides[name] = stride
            stride *= size
        return strides

    def size(self, *atoms: str) -> int:
        """Return the number of ranks along the given atoms."""
        return math.prod(map(self.sizes.__getitem__, atoms))

    def num_ranks(self) -> int:
        """Return the number of ranks in the mesh."""
        return self.size(*self.sizes)

    def view(self, name: str) -> Atoms:
        """Return the atoms of a view that have more than one rank."""
        return self._used_views[name]

    def in_stage(self) -> Atoms:
        """Return the atoms inside a pipeline stage that have more than one rank."""
        return tuple(name for name, size in self.atoms if name != "pp" and size > 1)

    def position(self, rank: int, atom: str) -> int:
        """Return the coordinate of a rank along an atom."""
        return rank // self._strides[atom] % self.sizes[atom]

    def line(self, rank: int, atoms: Atoms) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along the given atoms, including itself, in order."""
        found = [rank - sum(self.position(rank, atom) * self._strides[atom] for atom in atoms)]
        for atom in atoms:
            found = [start + i * self._strides[atom] for start in found for i in range(self.sizes[atom])]
        return tuple(found)

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.nodes if isinstance(self.nodes, int) else self.nodes[rank]


class ContextMethod(StrEnum):
    """Method of context-parallel attention."""

    RING = "ring"
    """Keys and values travel to the queries that see them."""
    HEADS = "heads"
    """Each rank gets all tokens of some heads."""


@dataclass(frozen=True)
class AttentionLayer:
    """The attention layer of a kind."""

    module: str
    mask: MaskSpec
    """Rules of the mask, without documents."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    axes: Atoms
    """Atoms over which the tokens of a sample are sharded."""
    method: ContextMethod | None = None
    """How queries meet the keys of other ranks; None if every rank has all tokens."""


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture-of-experts layer of a kind, and the dispatch of tokens to it."""

    module: str
    experts: str
    """Path of the module with the experts' parameters."""
    num_experts: int
    top_k: int
    width: int
    """Elements of a row sent to an expert."""
    axes: Atoms
    """Atoms over which the experts are sharded; empty if every rank holds all of them."""
    counted: Atoms
    """Atoms over which each forward sums the experts' counts of a micro-batch."""
    num_groups: int = 1
    """Groups of consecutive experts; a token's experts are in `top_groups` of them."""
    top_groups: int = 1
    capacity: int | None = None
    """Slots per expert and sample; None if nothing is dropped."""
    uniform: bool = False
    """Whether tokens go to experts in turn, so that the dispatch is known."""
    sample_counted: Atoms = ()
    """Atoms over which each forward sums the experts' counts of each sample."""


@dataclass(frozen=True)
class PlannedKernels:
    """Kernels of one pass of an operator that are bound by memory, on a rank."""

    launches: int = 0
    """Kernels launched per micro-batch."""
    num_bytes: int = 0
    """Bytes that they read and write per sample."""
    bytes_once: int = 0
    """Bytes that they read and write once per micro-batch, such as of a table's gradient."""


@dataclass(frozen=True)
class PlannedOperator:
    """An operator of a kind as a rank runs it: `models/contract/operators.py`, after parallelism shards it."""

    name: str
    kind: OperatorKind
    rows: int = 0
    """Rows of a product per sample, of all groups; of what is computed once per sample, 1."""
    inner: int = 0
    columns: int = 0
    groups: int = 1
    """Experts on the rank among whose products the rows are divided."""
    weights: int = 1
    """1 if the weight is trained, so that the backward computes its gradient; 0 if it is frozen or there is none."""
    attention_flops: int = 0
    """Operations of attention's forward per sample, if each sample is one document."""
    rate: str = "float32"
    """Dtype of a product's operands: that of the compute, or `float8`."""
    forward: PlannedKernels = PlannedKernels()
    backward: PlannedKernels = PlannedKernels()
    fused_forward: PlannedKernels | None = None
    """As `forward` in a compiled block; None if there it is a part of other operators' kernels."""
    fused_backward: PlannedKernels | None = None
    fused_on_cuda: bool = False
    """Whether CUDA runs the fused kernels also eagerly, as it does for norms."""
    rerun: Rerun = Rerun.ALWAYS
    inputs: int = 1
    """1 if the backward computes the gradient of a product's input, else 0."""

    @property
    def flops(self) -> int:
        """Operations of the forward per sample."""
        return 2 * self.rows * self.inner * self.columns + self.attention_flops


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a kind keeps between forward and backward under each policy, per rank and sample."""

    none: int
    selective: int
    full: int
    fused: int | None = None
    """As `none` where norms are one kernel, as on CUDA; None if that is as much."""

    def on_cuda(self, *, more: int) -> SavedBytes:
        """Return the bytes on CUDA, which keeps some more without recomputation."""
        return replace(self, none=more + (self.none if self.fused is None else self.fused))

    def under(self, policy: RecomputePolicy) -> int:
        """Return the bytes under a policy."""
        found: int = getattr(self, policy)
        return found
