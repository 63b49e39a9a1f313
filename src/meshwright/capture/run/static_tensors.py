"""Memory at addresses that a layer's graphs read and write: static tensors of a plan, weights, and weight gradients.

A parameter whose storage stays where it is is read there. FSDP2 allocates gathered weights again in each step, also on
one rank in mixed precision, so graphs read a copy in the compute dtype, which the first micro-batch of a step refreshes
in place.

Graphs of parameters whose gradients nobody watches add to a buffer that is the parameter's `.grad` itself. With
`zero_grad(set_to_none=True)` the parameter loses the buffer, but the buffer stays where it is, and is zeroed and set as
`.grad` again before the next replay. (`torch.cuda.make_graphed_callables` returns aliases of one static gradient
instead, which autograd may take as `.grad`: with several micro-batches, the last one's gradient is then counted twice
and the others' are lost; pytorch#181723.)

FSDP2 and DistributedDataParallel watch gradients as autograd accumulates them. Graphs of their parameters write to
memory that all layers share, and autograd gets a clone, so that every hook runs exactly as in eager execution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.capture.lifetimes import COPIES, Content, Role
from meshwright.capture.plan import CaptureMode, CapturePlan
from meshwright.capture.run.private import copy_all
from meshwright.errors import CaptureError


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same numbers at the same addresses."""
    places = ((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (one, other))
    return next(places) == next(places)


@dataclass(frozen=True)
class Static:
    """A tensor of a micro-batch in the static memory of a plan."""

    memory: StaticTensors
    content: Content

    def read(self) -> Tensor:
        return self.memory.read(self.content)

    def hold(self) -> Tensor:
        return self.memory.hold(self.content)


class StaticTensors:
    """The buffers of a plan, allocated once; if it `poisons`, what is released is filled with NaN."""

    def __init__(self, plan: CapturePlan, *, device: torch.device, poisons: bool) -> None:
        self._poisons = poisons
        self._slots, self._by_slot = dict(plan.slots), plan.mode is CaptureMode.SLOT
        self._index = {(one.role, one.stage, one.layer, one.number, one.instance): one.buffer for one in plan.tensors}
        self._buffers = [torch.zeros(one.shape, dtype=getattr(torch, one.dtype), device=device) for one in plan.buffers]
        self._held: list[Content | None] = [None] * len(self._buffers)

    def has(self, content: Content) -> bool:
        return self._owner(content) in self._index

    def write(self, content: Content, value: Tensor) -> Tensor:
        """Copy a value into the buffer of `content`, and return the buffer.

        Raises:
            CaptureError: the value has another shape or dtype than planned.
        """
        buffer = self.hold(content)
        if buffer.shape != value.shape or buffer.dtype != value.dtype:
            raise CaptureError(
                f"{content} is {tuple(value.shape)} {value.dtype}, its memory {tuple(buffer.shape)} {buffer.dtype}",
                where="capture, static tensors",
                rule="a graph's tensors have the shapes and dtypes of its plan",
            )
        with torch.no_grad():
            buffer.copy_(value)
        return buffer

    def hold(self, content: Content) -> Tensor:
        """Return the buffer of `content`, which a graph is about to write."""
        index = self._find(content)
        self._held[index] = content
        return self._buffers[index]

    def read(self, content: Content) -> Tensor:
        """Return the buffer of `content`.

        Raises:
            CaptureError: something else has been written to it since.
        """
        index = self._find(content)
        if self._held[index] != content:
            raise CaptureError(
                f"{content} is read after {self._held[index] or 'nothing'} was written to its memory",
                where=f"capture, buffer {index}",
                rule="static tensors share memory only if they are never alive together",
            )
        return self._buffers[index]

    def is_at(self, content: Content, x: Tensor) -> bool:
        """Return whether `x` is the buffer of `content` itself."""
        index = self._index.get(self._owner(content))
        return index is not None and is_same(self._buffers[index], x)

    def release(self, content: Content) -> None:
        """Forget `content`, unless its buffer holds something else by now."""
        index = self._find(content)
        if self._held[index] == content:
            self._held[index] = None
            if self._poisons and self._buffers[index].is_floating_point():
                with torch.no_grad():
                    self._buffers[index].fill_(float("nan"))

    def clear(self) -> None:
        self._held = [None] * len(self._buffers)

    def addresses(self) -> tuple[int, ...]:
        return tuple(buffer.data_ptr() for buffer in self._buffers)

    def _owner(self, content: Content) -> tuple[Role, int, int, int, int]:
        by_slot, m = self._by_slot and content.role not in COPIES, content.microbatch
        instance = self._slots[content.stage][m] if by_slot else m
        return content.role, content.stage, content.layer, content.number, instance

    def _find(self, content: Content) -> int:
        index = self._index.get(self._owner(content))
        if index is None:
            what = f"{content} has no memory in the plan"
            rule = "a layer that follows another one reads that layer's output as it is"
            fix = "LayerSignature(…, follows=False) for a layer whose input comes from elsewhere"
            raise CaptureError(what, where="capture, static tensors", rule=rule, fix=fix)
        return index


@dataclass(frozen=True)
class TensorFacts:
    """Shape, dtype and gradient of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        what = f"{'×'.join(map(str, self.shape)) or 'a scalar'} {str(self.dtype).removeprefix('torch.')}"
        return f"{what} {'with' if self.requires_grad else 'without'} a gradient"

    @staticmethod
    def of(tensor: Tensor) -> TensorFacts:
        return TensorFacts(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class StaticWeights:
    """Weights of one layer, or copies of them.

    Args:
        facts: what its forward computes with, by name, without duplicates.
    """

    def __init__(
        self, module: nn.Module, facts: Mapping[str, TensorFacts], *, copies: bool, device: torch.device
    ) -> None:
        self._module, self._facts = module, dict(facts)
        own = dict(module.named_parameters())
        self._leaves: dict[str, nn.Parameter] = {}
        """Tensors that graphs read: copies, or aliases of the parameters, whose own nodes belong to other streams."""
        for name, one in facts.items():
            memory = torch.zeros(one.shape, dtype=one.dtype, device=device) if copies else own[name].detach()
            self._leaves[name] = nn.Parameter(memory, requires_grad=one.requires_grad)
        self._copies = copies
        self._fixed = {} if copies else {name: p.data_ptr() for name, p in own.items()}
        self._owners = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in facts
        }
        self._is_fresh = False

    def replacements(self) -> dict[str, nn.Parameter]:
        """Return what graphs read by every name in the module, names of tied parameters included."""
        first = {id(p): name for name, p in self._module.named_parameters()}
        every = self._module.named_parameters(remove_duplicate=False)
        return {name: self._leaves[first[id(p)]] for name, p in every}

    def trained(self) -> list[nn.Parameter]:
        return [p for name, p in self._leaves.items() if self._facts[name].requires_grad]

    def current(self) -> list[nn.Parameter]:
        """Return the module's own parameters that get these gradients, in the same order."""
        return [p for name, p in self._own().items() if self._facts[name].requires_grad]

    def expire(self) -> None:
        """Refresh the copies at the next use: the optimizer has changed the parameters, or may have."""
        self._is_fresh = False

    @torch.no_grad()
    def refresh(self, where: str) -> None:
        """Make sure that graphs read the parameters' values.

        Raises:
            CaptureError: a parameter is no longer where it was, or what it was.
        """
        if self._copies and self._is_fresh:
            return
        found = self._own()
        for name, one in self._facts.items():
            if (
                TensorFacts.of(found[name]) != one
                or self._fixed.get(name, address := found[name].data_ptr()) != address
            ):
                raise CaptureError(
                    f"the parameter {name} has moved since its graphs were captured",
                    where=where,
                    rule="graphs read parameters at fixed addresses",
                    fix="capture again after replacing parameters; for parameters that move in each step, "
                    "capture(…, copies_weights=True)",
                )
        if self._copies:
            copy_all(list(self._leaves.values()), [found[name] for name in self._leaves])
        self._is_fresh = True

    def addresses(self) -> tuple[int, ...]:
        return tuple(p.data_ptr() for p in self._leaves.values())

    def _own(self) -> dict[str, nn.Parameter]:
        return {name: getattr(owner, last) for name, (owner, last) in self._owners.items()}


class WeightGradients:
    """Gradients of one layer's parameters, by position, in memory that graphs write to."""

    returns: bool
    """Whether autograd accumulates them."""

    def __init__(self, memory: Sequence[Tensor]) -> None:
        self._memory = memory

    def prepare(self, positions: Collection[int]) -> None:
        """Get ready for a replay that computes these gradients; the others stay None, as in eager execution."""

    def store(self, position: int, gradient: Tensor) -> None:
        """Store a gradient; a part of the graph."""
        raise NotImplementedError

    def result(self, position: int) -> Tensor | None:
        """Return what autograd should accumulate after a replay; None if the graph has done so."""

    def addresses(self) -> tuple[int, ...]:
        return tuple(one.data_ptr() for one in self._memory)


class AccumulatedGradients(WeightGradients):
    """Gradients that graphs accumulate in buffers, which become those of the layer's parameters."""

    returns = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__([torch.zeros_like(parameter, requires_grad=False) for parameter in parameters])
        self._parameters = parameters

    @torch.no_grad()
    def prepare(self, positions: Collection[int]) -> None:
        """Make the buffers the parameters' gradients, with the values that those have."""
        for position in positions:
            parameter, buffer = self._parameters[position], self._memory[position]
            if parameter.grad is buffer:
                continue
            if parameter.grad is None:
                buffer.zero_()
            else:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer

    @torch.no_grad()
    def store(self, position: int, gradient: Tensor) -> None:
        self._memory[position].add_(gradient)


SharedOutputs = dict[tuple[torch.Size, torch.dtype, int], Tensor]
"""Memory for the gradients of one layer at a time, by shape, dtype and number among those of the layer."""


class ReturnedGradients(WeightGradients):
    """Gradients of parameters, or of the copies that graphs read, in `outputs` until autograd accumulates them."""

    returns = True

    def __init__(self, parameters: Sequence[Tensor], outputs: SharedOutputs) -> None:
        seen: Counter[tuple[torch.Size, torch.dtype]] = Counter()
        memory = []
        for one in parameters:
            key = (one.shape, one.dtype, seen[one.shape, one.dtype])
            seen[one.shape, one.dtype] += 1
            if key not in outputs:
                outputs[key] = torch.zeros_like(one, requires_grad=False)
            memory.append(outputs[key])
        super().__init__(memory)

    @torch.no_grad()
    def store(self, position: int, gradient: Tensor) -> None:
        self._memory[position].copy_(gradient)

    def result(self, position: int) -> Tensor:
        """Return a clone of the gradient: autograd may keep it as `.grad`, and the next replay overwrites it."""
        return self._memory[position].clone()
