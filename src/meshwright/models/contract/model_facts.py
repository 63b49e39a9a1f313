"""A model as values: its parameters and buffers by kinds of blocks and ends, and the counts that follow. Torch-free.

A family describes itself with these once. The plan derives memory, traffic, FSDP units, pipeline stages and reductions
from them; nothing else is told what a model is made of. Descriptions are tested against the real modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any


class Role(StrEnum):
    """What a parameter is to an optimizer."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    VECTOR = "vector"


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter of a kind of block, or of an end."""

    name: str
    """Inside its kind: `attention.wq.weight`."""
    shape: tuple[int, ...]
    role: Role = Role.MATRIX
    tied_to: str | None = None
    """The parameter of another kind, by its name in the whole model, that this one is: a tied output head."""


def linear(
    name: str,
    fan_in: int,
    fan_out: int,
    *,
    bias: bool = False,
    role: Role = Role.MATRIX,
    tied_to: str | None = None,
) -> tuple[ParameterFacts, ...]:
    """A linear layer's weight, and its bias; or an embedding's table of `fan_out` rows."""
    weight = ParameterFacts(f"{name}.weight", (fan_out, fan_in), role, tied_to=tied_to)
    return (weight, *vectors(fan_out, f"{name}.bias")) if bias else (weight,)


def vectors(size: int, *names: str) -> tuple[ParameterFacts, ...]:
    """Weights and biases of norms, and other vectors."""
    return tuple(ParameterFacts(name, (size,), Role.VECTOR) for name in names)


@dataclass(frozen=True)
class BufferFacts:
    """One buffer of a kind."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it: `float32`, `int64`."""
    saved: bool = True
    """Part of checkpoints; one that isn't is computed again by `Family.initial`."""
    updated: bool = False
    """Counts what passes through a `nn.stepwise.StepBuffer`: summed once a step over micro-batches and ranks."""


@dataclass(frozen=True)
class Saved:
    """Elements that a block's forward leaves for its backward, for each token, by how tensor parallel divides them."""

    full: float = 0.0
    """On every rank of tp."""
    stream: float = 0.0
    """As the stream between blocks is: divided under sequence parallel, else on every rank."""
    divided: float = 0.0
    """Heads and feed-forward columns, always divided."""

    def elements(self, *, tp: int, stream: float) -> float:
        """Of one rank, for a token; `stream` is the part of the stream that it has."""
        return self.full + self.stream * stream + self.divided / tp


@dataclass(frozen=True)
class AuxiliaryLoss:
    """A loss that is computed inside a block and added to the task's: a mean over samples (scope *sample*)."""

    name: str
    weight: float
    on_stream: bool = False
    """It is a sum over tokens of the stream: under sequence parallel each rank of tp has a part of it."""


@dataclass(frozen=True)
class KindFacts:
    """Blocks that are alike, or an end: what comes before the blocks, after them, or goes with every stage."""

    name: str
    path: str
    """Where its modules are in the whole model: `blocks.{layer}`; empty for an end."""
    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[BufferFacts, ...] = ()
    saved: Saved = Saved()
    output: float = 0.0
    """Elements of its output for a token, where a loss is computed on it: kept with its gradient."""
    output_divided: bool = False
    """Tensor parallel divides that output."""
    flops: float = 0.0
    """Forward floating-point operations for a token."""
    unit: tuple[str, ...] = ()
    """An end's modules that may be an FSDP unit of their own, where their largest matrix has more elements than a
    block: a vocabulary's embedding or head, which is worth a collective of its own."""
    auxiliary: tuple[AuxiliaryLoss, ...] = ()

    @cached_property
    def num_elements(self) -> int:
        """Of all its parameters; a tied one counts."""
        return sum(prod(parameter.shape) for parameter in self.parameters)

    def full_name(self, name: str, layer: int | None) -> str:
        """A parameter's, a buffer's or a module's name in the whole model."""
        path = self.path.format(layer=layer)
        return f"{path}.{name}" if path and name else path or name


@dataclass(frozen=True)
class EdgeFacts:
    """What goes from a stage to the next, for one sample."""

    name: str
    shape: tuple[int, ...]
    """Without the batch dim."""
    sequence_dim: int | None = 0
    """The dim that sequence parallel divides; None where it can't be."""


@dataclass(frozen=True)
class ModelFacts:
    """A model of one family."""

    kinds: tuple[KindFacts, ...]
    """The kinds of blocks."""
    layers: tuple[str, ...]
    """Of each layer, the name of its kind."""
    edge: EdgeFacts
    tokens: int
    """Tokens of a sample: what a batch is counted in for people, and activations for memory."""
    identity: Mapping[str, Any]
    """Everything that decides names and shapes of the parameters and what they mean: a checkpoint's identity."""
    first: tuple[KindFacts, ...] = ()
    """Ends that only the first stage has, before its blocks."""
    every: tuple[KindFacts, ...] = ()
    """Ends that every stage has a copy of, before its blocks: their gradients are summed over stages."""
    last: tuple[KindFacts, ...] = ()
    """Ends that only the last stage has, after its blocks."""
    flops_per_token: float = 0.0
    """Floating-point operations of forward and backward for a token."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Keys of the configuration that have no effect on this family, and what they are for."""

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return len(self.layers)

    def kind_of(self, layer: int) -> KindFacts:
        """The kind of a layer."""
        return self._by_name[self.layers[layer]]

    @cached_property
    def _by_name(self) -> dict[str, KindFacts]:
        return {kind.name: kind for kind in self.kinds}

    def held(self, layers: range, *, is_first: bool, is_last: bool) -> Iterator[tuple[KindFacts, int | None]]:
        """Kinds, and the layer of a block, of a stage with these layers, in the order of the module's parameters."""
        yield from ((kind, None) for kind in (*(self.first if is_first else ()), *self.every))
        yield from ((self.kind_of(layer), layer) for layer in layers)
        yield from ((kind, None) for kind in (self.last if is_last else ()))

    @cached_property
    def _whole(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        whole = self.held(range(self.num_layers), is_first=True, is_last=True)
        return tuple(
            (kind.full_name(parameter.name, layer), parameter.shape)
            for kind, layer in whole
            for parameter in kind.parameters
            if parameter.tied_to is None
        )

    def parameter_names(self) -> list[str]:
        """Every parameter of the whole model, each once, in the module's order."""
        return [name for name, _ in self._whole]

    def num_params(self) -> int:
        """Elements of all parameters; a tied or shared one counts once."""
        return sum(prod(shape) for _, shape in self._whole)


@dataclass(frozen=True)
class Part:
    """Consecutive layers of a model: what a pipeline stage holds of it."""

    layers: range
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """Has what comes before the layers, and takes the model's inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Has what comes after the layers, and gives the model's outputs."""
        return self.stage == self.num_stages - 1
