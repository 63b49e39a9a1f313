"""A pipeline stage of a foreign model: the whole forward, in which only the stage's own layers compute.

Every stage runs the model's own forward of token ids, so masks, positions and rotary embeddings are those of the model.
Layers of other stages pass their input on, modules before the layers return zeros, the last layer before the stage's
own returns the stream that was received, and the first one after them ends the forward; where the last layer's stage is
not the last one, the modules after the layers do. What layers take besides the stream passes with it (see `carry`).

Checkpoints, compression and descriptions take parameters in module order; a model that declares its final norm before
its layers would have another, so modules are registered in the order in which they run.

Shapes: b batch, t time, d width of the stream, v vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.foreign import private
from meshwright.models.foreign.carry import arguments_of, at, given, pack, receive, unpack
from meshwright.models.foreign.origin import BATCH_DIM, BATCH_TIME_DIM, LAYER_LISTS, TIME_DIM, ForeignModel, Probe
from meshwright.models.foreign.packing import Float64Mode
from meshwright.models.foreign.structure import Carried, Structure
from meshwright.nn.attention.mask_spec import TokenLayout


class _End(Exception):
    """Ends a forward with what the stage sends."""

    def __init__(self, sent: Tensor | None) -> None:
        super().__init__()
        self.sent = sent


class _Call:
    """Values that the modules of a stage share during a forward."""

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.carried: list[tuple[Carried, Tensor]] = []
        """Tensors that were received besides the stream."""
        self.batch, self.time, self.dtype = 0, 0, torch.float32
        self.output: Tensor | None = None
        """Tensor to send, on a stage that ends with the model's last layer."""
        self.is_first = True
        self.read: list[tuple[nn.Module, str, Tensor]] = []
        """Tensors of replaced modules, whose dtype, device or shape a model may read."""


@dataclass(frozen=True)
class _Edge:
    """Form of what passes between stages."""

    structure: Structure
    width: int
    """Features per token, if more than the stream passes."""

    def received(self, sent: Tensor, start: int) -> list[tuple[Carried, Tensor]]:
        """Return what is received before layer `start`, the stream first."""
        stream, carried = self._stream(), self.structure.carried
        if not carried:
            return [(stream, sent.movedim((0, 1), stream.batch_dims))]
        return list(unpack(sent, (stream, *carried[start])))

    def sent(self, stream: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], stop: int) -> Tensor:
        """Return what is sent before layer `stop`, given the arguments of that layer or, after all, of the last."""
        one, carried = self._stream(), self.structure.carried
        if not carried:
            return stream.movedim(one.batch_dims, (0, 1)).contiguous()
        arguments = arguments_of(args, kwargs)
        others = [(each, at(arguments, each.path)) for each in carried[stop]]
        return pack([(one, stream), *others], self.width)

    def _stream(self) -> Carried:
        return Carried((self.structure.stream,), self.structure.per_token, self.structure.batch_dims)


def make_stage(
    model: nn.Module, structure: Structure, part: Part, origin: ForeignModel, *, allow_empty: bool = False
) -> nn.Module:
    """Turn a model into one of its stages, in place, with its modules in the order in which they run.

    Modules that stand in for those of other stages have an attribute `stands_in`.

    The module's forward takes token ids [b, t] or, but for the first stage, the stream [b, t, d] and then the ids, and
    returns the stream or, on the last stage, logits [b, t, v].
    """
    remove_aliases(model, structure.aliases)
    last, every = (tuple(one.name for one in end.parameters) for end in (structure.last, structure.every))
    arrange(model, structure.layers_path, last, every)
    call, layers = _Call(), model.get_submodule(structure.layers_path)
    edge = _Edge(structure, prod(structure.per_token) + structure.carried_elements(allow_empty=allow_empty))
    assert isinstance(layers, LAYER_LISTS), "the layers are a list of modules"
    for index, layer in enumerate(layers):
        if index in part.layers:
            layer.forward = _in_float64(layer.forward)
        else:
            _empty(layer)
            vars(layer)["stands_in"] = True
            layer.forward = _passing(index, edge, part, call)
    if not part.is_first:
        for path, shape in structure.stubs.items():
            module = model.get_submodule(path)
            call.read += _empty(module)
            vars(module)["stands_in"] = True
            module.forward = _zeros(shape, call)
    if not part.is_last:
        for name in (parameter.name for parameter in structure.last.parameters):
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            call.read.append((module, leaf, getattr(module, leaf).new_empty(0)))
            setattr(module, leaf, None)
            vars(module)["stands_in"] = True
            module.forward = _ending(call)
        for buffer in structure.last.buffers:
            owner, _, leaf = buffer.name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, None)
    model.forward = _stage_forward(model, edge, part, call, origin)
    return model


def _stage_forward(
    model: nn.Module, edge: _Edge, part: Part, call: _Call, origin: ForeignModel
) -> Callable[..., Tensor]:
    forward, structure = model.forward, edge.structure
    layers = model.get_submodule(structure.layers_path)
    assert isinstance(layers, LAYER_LISTS)
    blanks = {} if part.is_first else structure.blanks
    for name in blanks:
        owner, _, leaf = name.rpartition(".")
        delattr(model.get_submodule(owner), leaf)

    def stage_forward(inputs: Tensor, layout: TokenLayout | None = None, token_ids: Tensor | None = None) -> Tensor:
        if not (part.layers or part.is_first or part.is_last):
            return inputs  # no layer of the model would end its forward
        ids = inputs if part.is_first else token_ids
        if ids is None:
            ids = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        if not part.is_first:
            (_, call.received), *call.carried = edge.received(inputs, part.layers.start)
        call.batch, call.time, call.dtype = ids.shape[0], ids.shape[1], inputs.dtype
        for module, leaf, tensor in call.read:
            vars(module)[leaf] = torch.zeros_like(tensor, device=inputs.device)
        for name, shape in blanks.items():
            owner, _, leaf = name.rpartition(".")
            vars(model.get_submodule(owner))[leaf] = inputs.new_zeros(shape)
        if call.is_first and _is_float64(model):  # the reference of a run in bfloat16, whose experts may be grouped
            origin.prepare_float64(model)
        if call.is_first:  # outside of FSDP's own hooks
            if not part.is_first and part.layers and structure.between_layers:
                private.before_call(layers[part.layers.start], _receive(structure, call))
            if not part.is_last and part.layers.stop == len(layers):
                layers[-1].register_forward_hook(_keep(edge, call), with_kwargs=True)
        call.is_first = False
        try:
            with _mode(model):
                logits = origin.call(forward, ids, layout)
            if part.is_last:
                return logits
            sent = call.output
        except _End as end:
            sent = end.sent
        finally:
            call.received = call.output = None
            call.carried = []
        assert sent is not None, "the stage's last layer ran"
        return sent

    return stage_forward


def _passing(index: int, edge: _Edge, part: Part, call: _Call) -> Callable[..., Any]:
    """Return the forward of a layer of another stage."""
    structure = edge.structure
    key, (form, length) = structure.stream, structure.returns

    def passing(*args: Any, **kwargs: Any) -> Any:
        stream = args[key] if isinstance(key, int) else kwargs[key]
        if index == part.layers.start - 1 and not (structure.between_layers and part.layers):
            receive(arguments_of(args, kwargs), call.carried)
            stream = call.received
        if index == part.layers.stop:
            raise _End(edge.sent(stream, args, kwargs, index))
        return stream if form == "tensor" else (tuple if form == "tuple" else list)((stream, *[None] * (length - 1)))

    return passing


def _keep(edge: _Edge, call: _Call) -> Callable[..., None]:
    """Return a hook that keeps what is sent after the model's last layer."""
    form, count = edge.structure.returns[0], len(edge.structure.layers)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call.output = edge.sent(output if form == "tensor" else output[0], args, kwargs, count)

    return hook


def _ending(call: _Call) -> Callable[..., Tensor]:
    """Return the forward of a module after the layers on a stage that ends with the last layer."""

    def ending(*args: Any, **kwargs: Any) -> Tensor:
        raise _End(call.output)

    return ending


def _receive(structure: Structure, call: _Call) -> Callable[..., Any]:
    """Return a function that gives a stage's first layer what was received, to which what is computed between layers
    was applied where it was sent."""
    stream = Carried((structure.stream,), structure.per_token, structure.batch_dims)

    def received(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = arguments_of(args, kwargs)
        if structure.carried:
            assert call.received is not None, "a stage that isn't the first one receives"
            receive(arguments, [(stream, call.received), *call.carried])
        else:
            arguments[structure.stream] = call.received
        return given(arguments)

    return received


def _zeros(shape: tuple[int, ...], call: _Call) -> Callable[..., Tensor]:
    """Return the forward of a module before the layers on a stage that receives the stream."""

    def zeros(*args: Any, **kwargs: Any) -> Tensor:
        sizes = {BATCH_DIM: call.batch, TIME_DIM: call.time, BATCH_TIME_DIM: call.batch * call.time}
        assert call.received is not None, "a stage without the first modules receives the stream"
        return torch.zeros([sizes.get(n, n) for n in shape], dtype=call.dtype, device=call.received.device)

    return zeros


def _empty(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Remove a module's parameters and buffers, and return their owners and names with what they looked like; all else
    stays, since a model reads attributes of its layers."""
    emptied = []
    for inner in module.modules():
        parameters = inner.named_parameters(recurse=False, remove_duplicate=False)
        buffers = inner.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in [*parameters, *buffers]:
            setattr(inner, name, None)
            is_parameter = isinstance(tensor, nn.Parameter)
            emptied.append((inner, name, tensor.new_empty(0) if is_parameter else tensor))
    return emptied


def _mode(module: nn.Module) -> AbstractContextManager[Any]:
    """Return the mode in which a float64 model has no float32 inside."""
    return Float64Mode() if _is_float64(module) else nullcontext()


def _is_float64(module: nn.Module) -> bool:
    first = next(module.parameters(), None)
    return first is not None and first.dtype == torch.float64


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's forward in the mode of its dtype, which its recomputation in the backward needs, too."""

    @functools.wraps(forward)
    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with _mode(forward.__self__):  # type: ignore[attr-defined]
            return forward(*args, **kwargs)

    return in_mode


def stub_shapes(model: nn.Module, paths: Mapping[str, tuple[int, ...]], side: str) -> dict[str, tuple[int, ...]] | None:
    """Return the modules to replace on a stage without a module before the layers, with the shapes of their outputs:
    the module itself if it returns one tensor, else those inside it; None if parameters would be left."""
    if side in paths:
        return {side: paths[side]}
    module = model.get_submodule(side)
    if any(True for _ in module.parameters(recurse=False)):
        return None
    found: dict[str, tuple[int, ...]] = {}
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            inside = stub_shapes(model, paths, f"{side}.{name}")
            if inside is None:
                return None
            found |= inside
    return found


@dataclass(frozen=True)
class Sides:
    """Names of the parameters outside the layers, by where their modules run, all names of tied ones included."""

    first: tuple[str, ...]
    every: tuple[str, ...]
    last: tuple[str, ...]


def containers(path: str) -> tuple[str, ...]:
    """Return the paths of the modules that contain the list of layers, the model first."""
    parts = path.split(".")
    return tuple(".".join(parts[:count]) for count in range(len(parts)))


def side_modules(model: nn.Module, layers_path: str) -> Iterator[str]:
    """Yield the paths of the modules beside those that lead to the layers."""
    on_path = {*containers(layers_path), layers_path}
    for path in containers(layers_path):
        for name, _ in model.get_submodule(path).named_children():
            child = f"{path}.{name}" if path else name
            if child not in on_path:
                yield child


def find_sides(model: nn.Module, probe: Probe) -> Sides:
    """Return where the parameters outside the layers are used."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    canonical = {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}
    sides: dict[str, str] = {}
    own: dict[str, str] = {}
    """Those of the modules that contain the layers."""
    for path in side_modules(model, probe.layers_path):
        module = model.get_submodule(path)
        names = [f"{path}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        side = _side(path, names, canonical, probe)
        sides |= dict.fromkeys(names, side)
    for path in containers(probe.layers_path):
        for name, _ in model.get_submodule(path).named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            sides[full] = own[full] = "every" if full in probe.after | probe.between else "first"
    if "every" in own.values():  # they come before those of other modules, in whatever order these are registered
        sides = {name: "every" if side == "first" else side for name, side in sides.items()}
    return Sides(*(tuple(name for name, side in sides.items() if side == wanted) for wanted in Sides.__match_args__))


def _side(path: str, names: list[str], canonical: dict[str, str], probe: Probe) -> str:
    phases: set[str] = set()
    for inner, found in probe.phases.items():
        if inner == path or inner.startswith(f"{path}."):
            phases |= found
    used = {canonical[name] for name in names}
    if not phases:  # its parameters are read without calling it
        phases |= {"before"} if used & probe.before else set()
        phases |= {"after"} if used & probe.after else set()
    if used <= probe.unused:  # what the layers take from it has no gradient, so they may all need it
        return "every"
    if used & probe.between and phases != {"after"}:
        return "every"
    if phases == {"after"}:
        return "last"
    return "first" if phases <= {"before"} else "every"


def remove_aliases(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Make modules read parameters of others by a property in place of a parameter of their own."""
    for name, target in aliases.items():
        path, _, leaf = name.rpartition(".")
        owner_path, _, owner_leaf = target.rpartition(".")
        module, owner = model.get_submodule(path), model.get_submodule(owner_path)
        delattr(module, leaf)
        read = property(partial(_read, owner, owner_leaf))
        module.__class__ = type(type(module).__name__, (type(module),), {leaf: read})


def _read(owner: nn.Module, leaf: str, reader: nn.Module) -> Any:
    return getattr(owner, leaf)


def arrange(model: nn.Module, layers_path: str, last: tuple[str, ...], every: tuple[str, ...]) -> None:
    """Register the modules on the way to the layers in the order first, every, layers, last."""

    def rank(path: str) -> int:
        if layers_path == path or layers_path.startswith(f"{path}."):
            return 2
        inside = [name for name in (*last, *every) if name.startswith(f"{path}.")]
        return 0 if not inside else 3 if inside[0] in last else 1

    def rank_in(path: str, name: str) -> int:
        return rank(f"{path}.{name}" if path else name)

    for path in containers(layers_path):
        private.order_children(model.get_submodule(path), partial(rank_in, path))
