"""Observe a layer's forward: what it takes and returns, and whether a graph could run it.

An observed forward runs eagerly and as usual. What a graph can't do is a reason to leave the layer eager: wait for the
device to read a tensor on the host, move bytes between ranks, hold parameters that are gathered while it runs.

Arguments and results of a layer are a list of tensors and a template of everything else. Tensors may stand in tuples,
lists, dicts and plain objects such as dataclasses. Everything else is a constant: a graph has it baked in, so it must
be equal whenever the graph is replayed.
"""

from __future__ import annotations

import inspect
import random
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshwright.capture.run.private import TorchDispatchMode
from meshwright.capture.run.static_tensors import TensorFacts, is_same
from meshwright.capture.signature import ITEM_BYTES, ArgumentSignature, LayerSignature, ResultSignature, TensorSignature
from meshwright.nn.linear import WeightGradStore
from meshwright.nn.step_handles import StepHandle

HOST_READS = frozenset({
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "tensor", "allclose",
})  # fmt: skip
"""Functions that wait for the device, of which not all are operators on a CPU."""
WAITING = frozenset({
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave.Tensor",
})  # fmt: skip
"""Operators that wait for the device: the shape of their results depends on values, or the host reads them."""
COMMUNICATION = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "fsdp::", "meshwright::all_to_all")
"""Beginnings of the names of operators that move bytes between ranks."""
_PLAIN = (bool, int, float, complex, str, tuple, list, dict, set, deque, count)


@dataclass(frozen=True)
class Hole:
    """Place of a tensor in a template."""

    index: int


@dataclass(frozen=True)
class ObjectTemplate:
    """A plain object with its attributes as templates."""

    kind: type
    attributes: dict[str, Any]


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """Return a value's template and its tensors, in order."""
    tensors: list[Tensor] = []

    def walk(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return Hole(len(tensors) - 1)
        if type(part) in (tuple, list):
            return type(part)(map(walk, part))
        if type(part) is dict:
            return {key: walk(item) for key, item in part.items()}
        if _is_plain_object(part):
            return ObjectTemplate(type(part), {name: walk(item) for name, item in vars(part).items()})
        return part

    return walk(value), tensors


def rebuild(template: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value of a template with the given tensors."""
    if isinstance(template, Hole):
        return tensors[template.index]
    if type(template) in (tuple, list):
        return type(template)(rebuild(part, tensors) for part in template)
    if type(template) is dict:
        return {key: rebuild(part, tensors) for key, part in template.items()}
    if isinstance(template, ObjectTemplate):
        made: Any = object.__new__(template.kind)
        for name, part in template.attributes.items():
            object.__setattr__(made, name, rebuild(part, tensors))  # also of a frozen dataclass
        return made
    return template


def difference(one: Any, other: Any, path: str = "") -> str | None:
    """Return the path of the first constant in which two templates differ; None if they are equal."""
    if isinstance(one, ObjectTemplate) and isinstance(other, ObjectTemplate):
        if one.kind is not other.kind:
            return path or "the arguments"
        one, other = one.attributes, other.attributes
    if type(one) is not type(other):
        return path or "the arguments"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return path or "the arguments"
        return next(filter(None, (difference(one[k], other[k], f"{path}.{k}".lstrip(".")) for k in one)), None)
    if isinstance(one, (tuple, list)):
        if len(one) != len(other):
            return path or "the arguments"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), None)
    try:
        is_equal = one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        is_equal = False
    return None if is_equal else path or "an argument"


def storages(value: Any) -> Iterator[int]:
    """Yield the addresses of the storages of all tensors in a value."""
    yield from (t.untyped_storage().data_ptr() for t in flatten(value)[1])


def _is_plain_object(part: Any) -> bool:
    special = (type, FunctionType, nn.Module, Enum, torch.Generator)
    return hasattr(part, "__dict__") and not callable(part) and not isinstance(part, special)


@dataclass
class Observation:
    """Arguments and results of a layer's forward for one micro-batch."""

    arguments: Any
    """Template of the arguments; its first tensor is the layer's input."""
    inputs: tuple[TensorFacts, ...]
    numbers: tuple[int, ...]
    """Numbers of the tensors after the first; the same tensor has the same number in all layers of a chunk."""
    samples: tuple[Tensor, ...]
    """Values of the tensors after the first."""
    results: Any
    outputs: tuple[TensorFacts, ...]
    main: int
    """Position of the output among the results: the first one with a gradient."""
    weights: dict[str, TensorFacts]
    follows: bool
    """Whether the input is the output of the layer observed before."""
    saved_bytes: int
    reasons: list[str] = field(default_factory=list)

    def order(self) -> list[int]:
        """Return the positions of the results, the output first."""
        return sorted(range(len(self.outputs)), key=lambda at: at != self.main)

    def signature(self, device: str) -> LayerSignature:
        main, *others = (self.outputs[at] for at in self.order())
        return LayerSignature(
            _signature(self.inputs[0], device),
            _signature(main, device),
            follows=self.follows,
            saved_bytes=self.saved_bytes,
            arguments=tuple(
                ArgumentSignature(_signature(one, device), number, one.requires_grad)
                for one, number in zip(self.inputs[1:], self.numbers, strict=True)
            ),
            results=tuple(ResultSignature(_signature(one, device), one.requires_grad) for one in others),
        )


class Observer:
    """Observes the layers of one chunk, in the order in which they run."""

    def __init__(self) -> None:
        self.found: list[Observation] = []
        self._arguments: list[Tensor] = []
        self._last: Tensor | None = None

    def run(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Run a layer's forward, and record it."""
        template, tensors = flatten((args, dict(named)))
        buffers = dict(module.named_buffers())
        saved = _SavedBytes([*tensors, *module.parameters(), *module.buffers()])
        with _Watch() as watch, saved:
            result = forward(*args, **named)
        results, outputs = flatten(result)
        replaced = [name for name, one in module.named_buffers() if buffers.get(name) is not one]
        reasons = [f"it replaces its buffer {name}" for name in replaced]
        reasons = list(dict.fromkeys([*_static_reasons(module, tensors, outputs), *reasons, *watch.reasons]))
        inputs = tuple(map(TensorFacts.of, tensors))
        main = next((at for at, one in enumerate(outputs) if one.requires_grad), 0)
        weights = {name: TensorFacts.of(p) for name, p in module.named_parameters()}
        numbers: tuple[int, ...] = ()
        for tensor in tensors[1:]:
            numbers = (*numbers, self._number(tensor, besides=numbers))
        samples = tuple(one.detach() for one in tensors[1:])
        follows = bool(tensors) and self._last is not None and is_same(self._last, tensors[0])
        self.found.append(
            Observation(
                template, inputs, numbers, samples, results, tuple(map(TensorFacts.of, outputs)), main, weights,
                follows, saved.num_bytes, reasons,
            )
        )  # fmt: skip
        self._last = outputs[main].detach() if outputs else None
        return result

    def _number(self, tensor: Tensor, *, besides: tuple[int, ...]) -> int:
        for number, known in enumerate(self._arguments, 1):
            if number not in besides and is_same(known, tensor):
                return number
        self._arguments.append(tensor.detach())
        return len(self._arguments)


def _static_reasons(module: nn.Module, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[str]:
    reasons = []
    if not tensors:
        reasons.append("it takes no tensor")
    if not any(one.requires_grad for one in outputs):
        reasons.append("nothing in it needs a gradient")
    plain = [one for one in (*tensors, *outputs) if type(one) is Tensor]
    if unknown := [one.dtype for one in plain if _name(one.dtype) not in ITEM_BYTES]:
        reasons.append(f"it takes or returns a tensor of {unknown[0]}")
    taken = {one.untyped_storage().data_ptr() for one in tensors if type(one) is Tensor}
    if any(one.untyped_storage().data_ptr() in taken for one in outputs if type(one) is Tensor):
        reasons.append("it returns one of its arguments, or a view of it")
    if inner := [name for name, one in module.named_modules() if name and isinstance(one, FSDPModule)]:
        reasons.append(f"{inner[0]} is an FSDP unit of its own, gathered while it runs")
    if any(type(one) not in (Tensor, nn.Parameter) for one in (*tensors, *outputs, *module.parameters())):
        is_sharded = any(isinstance(one, DTensor) for one in (*tensors, *outputs, *module.parameters()))
        reasons.append("it is tensor-parallel" if is_sharded else "it takes tensors of another class")
    return reasons


class _Watch(TorchFunctionMode):
    """Context that notes host reads and communication."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []
        self._operators = _Operators(self.reasons)

    def __enter__(self) -> _Watch:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._operators.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        self._operators.__exit__(*raised)  # type: ignore[no-untyped-call]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HOST_READS:
            self.reasons.append(f"it reads a tensor on the host ({func.__name__}, {_caller()})")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, reasons: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reasons = reasons

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith(COMMUNICATION):
            self._reasons.append(f"it communicates ({name})")
        masks = name == "aten::index.Tensor" and any(one.dtype is torch.bool for one in args[1] if one is not None)
        if name in WAITING or masks:
            self._reasons.append(f"it waits for the device ({name}, {_caller()})")
        return func(*args, **(kwargs or {}))


class _SavedBytes(saved_tensors_hooks):
    """Context that counts the bytes of what a forward saves for its backward, except some tensors."""

    def __init__(self, besides: Sequence[Tensor]) -> None:
        self._seen = set(storages([one for one in besides if type(one) in (Tensor, nn.Parameter)]))
        self.num_bytes = 0
        super().__init__(self._count, lambda tensor: tensor)

    def _count(self, tensor: Tensor) -> Tensor:
        if type(tensor) in (Tensor, nn.Parameter):
            address = tensor.untyped_storage().data_ptr()
            if address not in self._seen:
                self._seen.add(address)
                self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor


def _signature(one: TensorFacts, device: str) -> TensorSignature:
    return TensorSignature(one.shape, _name(one.dtype), device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _caller() -> str:
    """Return the innermost line that is neither PyTorch's nor of this file."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and f"{torch.__name__}/" not in frame.filename:
            return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return "unknown"


@contextmanager
def unchanged(modules: Iterable[nn.Module], stores: Iterable[WeightGradStore] = ()) -> Iterator[None]:
    """Context that leaves no trace in modules and generators, however it ends.

    Gradients, values of buffers and of other tensors that modules hold in plain objects (such as the amax of float8
    layers), what step handles got, deferred weight gradients, and the state of the CPU's and the devices' random number
    generators are put back. Gradients are set aside, not copied.
    """
    modules, stores = list(modules), list(stores)
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    held = (t for module in modules for one in module.modules() for t in flatten(dict(vars(one)))[1])
    tensors = {id(t): t for t in held if not isinstance(t, nn.Parameter)}.values()
    handles = {id(h): h for module in modules for h in module.modules() if isinstance(h, StepHandle)}.values()
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    contributions = [(handle, handle.take_contribution()) for handle in handles]
    deferred = [(store, store.take()) for store in stores]
    generator = torch.get_rng_state()
    cuda_generators = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in values:
                tensor.detach().copy_(value)
        for handle, contribution in contributions:
            handle.take_contribution()
            if contribution is not None:
                handle.add_contribution(contribution)
        for store, entries in deferred:
            store.take()
            store.defers = False
            for entry in entries:
                store.put(entry.parameter, entry.compute, *entry.tensors)
        torch.set_rng_state(generator)
        if cuda_generators:
            torch.cuda.set_rng_state_all(cuda_generators)


def host_state(module: nn.Module) -> Any:
    """Return a template of what the forwards of a module may keep on the host, which a graph has baked in.

    That are attributes, variables of the class, of closures and of the file that a forward names, and the state of
    Python's and NumPy's random number generators.
    """
    found: dict[str, Any] = {
        "Python's random numbers": hash(random.getstate()),
        "NumPy's random numbers": repr(list(np.random.get_state())[2:]),
    }
    for name, one in module.named_modules():
        forward = inspect.unwrap(type(one).forward)
        variables = inspect.getclosurevars(forward) if inspect.isfunction(forward) else None
        named = {} if variables is None else {**variables.globals, **variables.nonlocals}
        plain = {k: v for k, v in {**vars(type(one)), **named}.items() if isinstance(v, _PLAIN)}
        found[name] = _by_value(plain) | _by_value(vars(one))
    return flatten(found)[0]


def _by_value(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace containers that a template would hold by identity by their text."""
    unseen = (set, deque, count, dict)
    return {k: repr(v) if isinstance(v, unseen) and type(v) is not dict else v for k, v in values.items()}
