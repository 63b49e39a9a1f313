"""Model descriptions: parameters and buffers by kind of block or end, with counts, initial values and the loss's unit.

A family returns a description from `describe`. The plan derives memory, traffic, FSDP units, pipeline stages and
reductions from it; no other code knows a model's structure. Tests compare descriptions with real modules. Doesn't
import torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from meshwright.models.contract.operators import Operator
from meshwright.models.contract.saved import Saved as Saved
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.optim.role import Role as Role

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter of a block or end module."""

    name: str
    """Name relative to the kind, e.g. `attention.wq.weight`."""
    shape: tuple[int, ...]
    role: Role = Role.MATRIX
    tied_to: str | None = None
    """Full-model name of the parameter of another kind to which this one is tied, e.g. for an output head."""
    frozen: bool = False
    """Whether it is never trained: no loss depends on it by a gradient."""


def linear(
    name: str, fan_in: int, fan_out: int, *, bias: bool = False, role: Role = Role.MATRIX, tied_to: str | None = None
) -> tuple[ParameterFacts, ...]:
    """Return the weight and optional bias of a linear layer, or an embedding table of `fan_out` rows."""
    weight = ParameterFacts(f"{name}.weight", (fan_out, fan_in), role, tied_to=tied_to)
    return (weight, *vectors(fan_out, f"{name}.bias")) if bias else (weight,)


def vectors(size: int, *names: str) -> tuple[ParameterFacts, ...]:
    """Return 1-D parameters, such as weights and biases of norms."""
    return tuple(ParameterFacts(name, (size,), Role.VECTOR) for name in names)


@dataclass(frozen=True)
class BufferFacts:
    """A buffer of a kind of block or end."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """PyTorch name of the dtype: `float32`, `int64`."""
    saved: bool = True
    """Whether to save it in checkpoints; other buffers are recomputed by `Family.initial`."""
    updated: bool = False
    """Whether a `nn.step_handles.StepBuffer` updates it: summed once per step over micro-batches and ranks."""
    load: bool = False
    """Whether the step buffer is a `LoadCounter`, whose counts are part of the run's metrics."""


@dataclass(frozen=True)
class LinearInput:
    """A tensor of a block that linear layers (`nn.linear.Linear`) multiply, by which the block supports float8."""

    layers: tuple[str, ...]
    """Paths of all linear layers inside the block that read the tensor."""
    width: int
    """Elements per token."""
    divided: bool = False
    """Whether tp shards it, as it does the inputs of row-parallel layers."""
    freed: Saved = Saved()
    """Elements saved for these layers only: nothing keeps it if all of them save float8 copies instead."""


@dataclass(frozen=True)
class AuxiliaryLoss:
    """A loss of a block or an end that is added to the task's loss, averaged over samples (scope *sample*)."""

    name: str
    weight: float
    on_stream: bool = False
    """Whether it is summed over tokens of the stream and therefore partial over tp with sequence parallelism."""
    in_region: bool = False
    """Whether it is computed in a module of the style region, where tp ranks compute the same loss from partial
    gradients, so that each adds 1 / tp of it."""
    num_counts: int = 0
    """Numbers of a sample that blocks count for a loss of the last end, and that its forward sums over cp."""


@dataclass(frozen=True)
class AttentionFacts:
    """The attention layer of a block, by which a block supports packed documents and context parallelism."""

    module: str
    """Path of the layer inside the block. Context parallelism replaces its attribute `core`
    (`nn.attention.attention.AttentionCore`)."""
    mask: MaskSpec
    """Rules of the mask, without documents."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of keys, or of values where these are wider."""
    sinks: bool = False
    """Whether heads have a score of no key (`nn.attention.attention.ScoreRules`)."""
    soft_cap: bool = False
    """Whether scores are capped."""

    def flops(self, seq_len: int) -> float:
        """Return the forward operations per token of a sample that is a single document."""
        return self.mask.flops(seq_len, num_heads=self.num_heads, head_dim=self.head_dim) / seq_len


@dataclass(frozen=True)
class ExpertFacts:
    """A mixture-of-experts layer of a block."""

    module: str
    """Path of the layer inside the block. Expert parallelism replaces its attribute `dispatcher`."""
    experts: str
    """Path of the module inside the block that owns the parameters with the role *experts*."""
    num_experts: int
    top_k: int
    """Experts per token."""
    width: int
    """Elements of a row sent to an expert."""
    num_groups: int = 1
    """Groups of consecutive experts; a token's experts are in `top_groups` of them."""
    top_groups: int = 1
    capacity: int | None = None
    """Slots per expert and sample; None if nothing is dropped."""
    over_batch: bool = False
    """Whether a forward sums the experts' counts over all ranks with different tokens."""
    over_sample: bool = False
    """Whether a forward sums each sample's counts over the ranks that share its tokens."""
    uniform: bool = False
    """Whether token i of a sample goes to experts i · top_k, i · top_k + 1, … (modulo their number)."""


@dataclass(frozen=True)
class HeadFacts:
    """The linear layer at the end, if nothing but elementwise operators turns its result into the output, and the loss
    is the output's cross-entropy."""

    path: str = ""
    """Path of the layer; empty without one. It may be a module of `KindFacts.unit`, but not inside of one."""
    after: tuple[str, ...] = ()
    """The operators by their names in `torch.ops.aten`, with their numbers: `div(30.0)`, `tanh()`, `mul(30.0)` for a
    soft cap."""
    saved: Saved = Saved()
    """What they save for the backward, as a part of `KindFacts.saved`."""
    reason: str = ""
    """Why there is no such layer, to be shown."""


@dataclass(frozen=True)
class KindFacts:
    """A kind of identical blocks, or an end, i.e. modules before or after the blocks or on every stage."""

    name: str
    path: str
    """Module path in the full model, such as `blocks.{layer}`; empty for an end."""
    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[BufferFacts, ...] = ()
    saved: Saved = Saved()
    """All that is saved without recomputation, inputs included."""
    fused: Saved | None = None
    """What is saved instead where a norm is one kernel, as on CUDA and in compiled blocks; None if that is `saved`."""
    compiled: Saved | None = None
    """What a compiled block saves; None if that is `fused`, or unknown and at most that."""
    kept: Saved | None = None
    """Results that selective recomputation keeps, without the input and collectives' results; None if these are the
    results of `operators`, or as much as `saved` if they are unknown, too."""
    recalled: Saved = Saved()
    """What any recomputed block keeps besides its input: indices, and values of `nn/kept_results.py`."""
    output: float = 0.0
    """Elements per token of an output on which a loss is computed; it is stored together with its gradient."""
    head: HeadFacts = HeadFacts()
    output_divided: bool = False
    """Whether the output is sharded over tp."""
    flops: float = 0.0
    """Forward floating-point operations per token of a sample that is one document; those of `operators`, if given."""
    unit: tuple[str, ...] = ()
    """Modules of an end, such as an embedding or head, that form a separate FSDP unit if their largest matrix has more
    elements than a block and is therefore worth a separate collective."""
    operators: tuple[Operator, ...] = ()
    """What the kind computes, in the order of the forward; empty if unknown, and then a plan has no times."""
    linear_inputs: tuple[LinearInput, ...] = ()
    """Inputs of the linear layers that can run in float8; empty if none can."""
    auxiliary: tuple[AuxiliaryLoss, ...] = ()
    experts: ExpertFacts | None = None
    attention: AttentionFacts | None = None

    def __post_init__(self) -> None:
        if self.operators:
            object.__setattr__(self, "flops", sum(one.flops for one in self.operators))

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of all parameters, tied ones included."""
        return sum(prod(parameter.shape) for parameter in self.parameters)

    def full_name(self, name: str, layer: int | None) -> str:
        """Convert the name of a parameter, buffer or module to its full-model name."""
        path = self.path.format(layer=layer)
        return f"{path}.{name}" if path and name else path or name


@dataclass(frozen=True)
class EdgeFacts:
    """The tensor sent between pipeline stages for one sample."""

    name: str
    shape: tuple[int, ...]
    """Shape without the batch dim."""
    sequence_dim: int | None = 0
    """Dim sharded by sequence parallelism; None if not applicable."""
    carried: int = 0
    """Elements per token of other tensors that are sent in the same one, flat."""

    @property
    def sent(self) -> tuple[int, ...]:
        """Shape of what is sent."""
        return (self.shape[0], prod(self.shape[1:]) + self.carried) if self.carried else self.shape


@dataclass(frozen=True)
class ModelFacts:
    """Description of a model."""

    kinds: tuple[KindFacts, ...]
    """Kinds of blocks."""
    layers: tuple[str, ...]
    """Kind of each layer, by name."""
    edge: EdgeFacts
    tokens: int
    """Tokens per sample, used for displayed batch sizes and activation memory."""
    identity: Mapping[str, Any]
    """Everything that determines the names, shapes and meaning of parameters, to match checkpoints."""
    first: tuple[KindFacts, ...] = ()
    """Ends on the first stage only, before its blocks."""
    every: tuple[KindFacts, ...] = ()
    """Ends replicated on every stage, before its blocks; their gradients are summed over stages."""
    last: tuple[KindFacts, ...] = ()
    """Ends on the last stage only, after its blocks."""
    flops_per_token: float = 0.0
    """Forward and backward floating-point operations per token of a sample that is one document. Packed documents take
    fewer, which a description cannot know: it is an upper bound with them."""
    has_dropout: bool = False
    """Whether blocks apply `train.dropout`, with masks that don't depend on the layout (`nn.dropout_add`)."""
    keeps_documents_apart: bool = False
    """Whether the model masks packed documents by itself, from the token layout, without `KindFacts.attention`."""
    undeferred: str = ""
    """A matrix whose gradient no layer can defer (`nn/linear.py`), so that schedules can't split the
    backward; empty if there is none, or if it is unknown."""
    not_expert_parallel: str = ""
    """Why no kind has `experts`, to be shown; empty if there is nothing to say."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys ignored by the family, with the models they apply to. A key that models must be built for is
    allowed by a fact instead, like `has_dropout`."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kind_of(self, layer: int) -> KindFacts:
        return self._by_name[self.layers[layer]]

    @cached_property
    def _by_name(self) -> dict[str, KindFacts]:
        return {kind.name: kind for kind in self.kinds}

    @cached_property
    def masks(self) -> Counter[MaskSpec]:
        """Number of layers by the mask of their attention."""
        found = (self._by_name[name].attention for name in self.layers)
        return Counter(one.mask for one in found if one is not None)

    def held(self, layers: range, *, is_first: bool, is_last: bool) -> Iterator[tuple[KindFacts, int | None]]:
        """Yield the kinds on a stage with these layers, and the layer of each block, in module order."""
        yield from ((kind, None) for kind in (*(self.first if is_first else ()), *self.every))
        yield from ((self.kind_of(layer), layer) for layer in layers)
        yield from ((kind, None) for kind in (self.last if is_last else ()))

    @cached_property
    def _all_parameters(self) -> tuple[tuple[str, ParameterFacts], ...]:
        held = self.held(range(self.num_layers), is_first=True, is_last=True)
        return tuple(
            (kind.full_name(parameter.name, layer), parameter)
            for kind, layer in held
            for parameter in kind.parameters
            if parameter.tied_to is None
        )

    def parameter_names(self) -> list[str]:
        """Return the names of all parameters of the full model in module order, without duplicates."""
        return [name for name, _ in self._all_parameters]

    def named_parameters(self) -> tuple[tuple[str, ParameterFacts], ...]:
        """Return all parameters of the full model with their names, in module order, without duplicates."""
        return self._all_parameters

    def num_params(self) -> int:
        """Return the total number of parameter elements; tied or shared parameters count once."""
        return sum(prod(parameter.shape) for _, parameter in self._all_parameters)


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a model, held by a pipeline stage."""

    layers: range
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """Whether the part holds the ends before the layers and takes the model's inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the part holds the ends after the layers and returns the model's outputs."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True)
class Normal:
    """Samples of N(0, std²) that depend only on the seed, name and position, so they are the same on every layout."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Samples of the uniform distribution in [-bound, bound), as independent of the layout as normal ones."""

    bound: float


@dataclass(frozen=True)
class Constant:
    value: float


@dataclass(frozen=True)
class Computed:
    """Values computed by a function that returns the full tensor on the CPU, such as rotary frequencies."""

    compute: Callable[[], Tensor]


@dataclass(frozen=True)
class Stored:
    """Values in a file, of which a rank reads no more than its shard."""

    read: Callable[[Sequence[slice] | None], Tensor]
    """Returns a region of the full tensor, given one slice with start and stop per dim; for None, all of it."""


Fill = Normal | Uniform | Constant | Computed | Stored
ZEROS, ONES = Constant(0.0), Constant(1.0)


@dataclass(frozen=True)
class LossUnit:
    """Unit in which a loss is displayed."""

    name: str
    scale: float = 1.0
    """Factor from the loss's own unit to this one."""
    own: str = ""
    """Name of the loss's own unit, if that is another one."""

    def unscaled(self) -> LossUnit:
        """Return the loss's own unit."""
        return LossUnit(self.own or self.name)

    def words(self, loss: float) -> str:
        """Format a loss in this unit."""
        return f"{loss * self.scale:.3f} {self.name}"

    def metric(self, name: str) -> str:
        """Return the name of a metric in this unit, such as `loss_bits_per_byte`."""
        return f"{name}_" + re.sub(r"\W+", "_", self.name.replace("/", " per "))


def unit_of_metric(key: str) -> str:
    """Return the name of the unit in a metric's key: `bits/byte` for `loss_bits_per_byte`, nothing for `loss`."""
    return key.partition("loss_")[2].replace("_per_", "/").replace("_", " ")
