"""Find a model's decoder layers and what runs around them, in one forward. Nothing is known by name.

What depends on what is read off the autograd graph: each layer's input is replaced by a leaf, so a layer whose output
depends on an earlier layer's parameters has a second stream, and a parameter outside the layers is used before them if
the first layer's input depends on it, and after them if the output does.

Shapes: b batch, t time, d width of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.hf import private
from meshwright.models.hf.source import KEY
from meshwright.units import counted

BATCH, TIME = 3, 37
"""Samples and tokens of the probe: sizes that a model has nowhere else."""
BATCH_DIM, TIME_DIM, BATCH_TIME_DIM = -1, -2, -3
"""Stand for sizes of the batch, the tokens of a sample, and both, in shapes."""


class NoForward(Exception):
    """A forward failed, and why."""


@dataclass
class Probe:
    """Findings of a probe."""

    layers_path: str
    per_token: tuple[int, ...] = ()
    """Shape of the stream per token: its width, after others where it has several parts."""
    stream: int | str = 0
    """Position or name of the stream among a layer's arguments."""
    returns: tuple[str, int] = ("tensor", 1)
    """Form of a layer's output and its length."""
    vocab_size: int = 0
    before: set[str] = field(default_factory=set)
    """Names of parameters outside the layers that the first layer's input depends on."""
    after: set[str] = field(default_factory=set)
    """Names of those that the output depends on, given the last layer's output."""
    between: set[str] = field(default_factory=set)
    """Names of those that a layer's output depends on, given its input."""
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the outputs of modules outside the layers that return one tensor, by path."""
    phases: dict[str, set[str]] = field(default_factory=dict)
    """Phases in which each module outside the layers ran: before, between, after."""
    unused: set[str] = field(default_factory=set)
    """Names of parameters that no output depends on by a gradient."""
    not_split: str = ""


def layers_path(model: nn.Module, config: Any) -> str:
    """Return the path of the list of decoder layers: the longest of those as long as `num_hidden_layers`.

    Raises:
        ConfigError: there is no such list.
    """
    count: Any = getattr(config, "num_hidden_layers", None)
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = [(sum(p.numel() for p in module.parameters()), path) for path, module in lists if len(module) == count > 0]
    if not found:
        lengths = ", ".join(f"{path} ({len(module)})" for path, module in lists) or "none"
        raise ConfigError(
            f"{type(model).__name__} has no list of num_hidden_layers = {count} layers; its lists: {lengths}",
            where=KEY,
            rule="a model has a torch.nn.ModuleList of num_hidden_layers layers, to shard, recompute and split",
            fix=f"{KEY}=qwen3, or a family of your own (model.kind=package.module:Family)",
        )
    largest: tuple[int, str] = max(found)
    return largest[1]


def probe(model: nn.Module, config: Any) -> Probe:
    """Run a model once, on the meta device if it can, and return what it does around its layers.

    Raises:
        ConfigError: it has no list of layers, or no stream between them.
        NoForward: the forward fails.
    """
    path = layers_path(model, config)
    listed = model.get_submodule(path)
    assert isinstance(listed, nn.ModuleList), "the layers are a list of modules"
    layers = list(listed)
    found = Probe(path)
    watch = _Watch(model, layers, found)
    ids = torch.zeros((BATCH, TIME), dtype=torch.long, device=next(model.parameters()).device)
    handles = list(watch.register())
    try:
        with private.on_meta():
            out = private.logits(model(input_ids=ids, use_cache=False))
        watch.conclude(out)
    except ConfigError:
        raise
    except Exception as error:
        raise NoForward(f"{type(error).__name__}: {str(error)[:200]}") from error
    finally:
        for handle in handles:
            handle.remove()
    found.vocab_size = out.shape[-1]
    return found


class _Watch:
    """Hooks that record the calls of layers and of modules outside them."""

    def __init__(self, model: nn.Module, layers: list[nn.Module], found: Probe) -> None:
        self._model, self._layers, self._found = model, layers, found
        self._phase = "before"
        self._order: list[int] = []
        self._inputs: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._second: dict[str, Tensor] = {}
        """Differentiable tensors that layers return besides the stream."""
        self._form: tuple[str, int] | None = None
        self._key: int | str | None = None
        inside = {module for layer in layers for module in layer.modules()}
        holds = layers[0]
        self._outside = {
            path: module
            for path, module in model.named_modules()
            if module not in inside and all(inner is not holds for inner in module.modules())
        }

    def register(self) -> Iterator[Any]:
        """Register the hooks and yield their handles."""
        for index, layer in enumerate(self._layers):
            yield layer.register_forward_pre_hook(self._before_layer(index), with_kwargs=True)
            yield layer.register_forward_hook(self._after_layer(index), with_kwargs=True)
        for path, module in self._outside.items():
            yield module.register_forward_hook(self._after_module(path))

    def _before_layer(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._order.append(index)
            self._phase = "layer"
            key = self._stream_key(args, kwargs)
            stream = args[key] if isinstance(key, int) else kwargs[key]
            leaf = stream.detach().requires_grad_()
            self._inputs.append(stream)
            self._leaves.append(leaf)
            if isinstance(key, int):
                return (*args[:key], leaf, *args[key + 1 :]), kwargs
            return args, {**kwargs, key: leaf}

        return hook

    def _stream_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
        """Return the argument that is the previous layer's output; before that, the first floating-point tensor."""
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        if self._key is None or not self._outputs:
            found = (key for key, value in named if _is_stream(value))
            self._key = next(found, None)
            if self._key is None:
                raise _no_stream(self._model)
        return self._key

    def _after_layer(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            self._phase = "after" if index == len(self._layers) - 1 else "between"
            is_tensor = isinstance(out, Tensor)
            form = ("tensor", 1) if is_tensor else (type(out).__name__, len(out))
            if form[0] not in ("tensor", "tuple", "list"):
                self._refuse(f"a layer returns {form[0]}")
            if self._form not in (None, form):
                self._refuse("layers return different things")
            self._form = form
            stream = out if is_tensor else out[0]
            others = [x for x in private.leaves([] if is_tensor else list(out[1:])) if isinstance(x, Tensor)]
            self._second |= {f"{index} {n}": x for n, x in enumerate(others) if x.requires_grad}
            self._outputs.append(stream)
            if index < len(self._layers) - 1:
                return None
            end = stream.detach().requires_grad_()  # what is after the layers depends on nothing before its leaf
            return end if is_tensor else type(out)((end, *out[1:]))

        return hook

    def _after_module(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self._found.phases.setdefault(path, set()).add(self._phase)
            if isinstance(out, Tensor):
                self._found.outputs[path] = _symbolic(out.shape)

        return hook

    def _refuse(self, reason: str) -> None:
        self._found.not_split = self._found.not_split or reason

    def conclude(self, out: Tensor) -> None:
        """Read dependencies off the graph."""
        found, count = self._found, len(self._layers)
        if self._order != list(range(count)):
            calls = f"{counted(len(self._order), 'call')} of {counted(count, 'layer')}"
            self._refuse(f"layers are not called once each, in order ({calls})")
        assert self._key is not None and self._form is not None, "layers were found, so they are called"
        found.stream, found.returns, found.per_token = self._key, self._form, tuple(self._inputs[0].shape[2:])
        if any(x.shape != self._inputs[0].shape for x in (*self._inputs, *self._outputs)):
            self._refuse("the stream between layers has more than one shape")
        for index, stream in enumerate(self._inputs[1:]):
            if stream is not self._outputs[index]:
                self._refuse(f"something is computed between layers {index} and {index + 1}")
        inside = {id(p): i for i, layer in enumerate(self._layers) for p in layer.parameters()}
        outside = {name: p for name, p in self._model.named_parameters() if id(p) not in inside}
        found.before = _used(self._inputs[0], outside)
        found.after = _used(out, outside)
        if _used(out, self._second):
            self._refuse("the output depends on a second tensor that a layer returns")
        for index, stream in enumerate(self._outputs):
            found.between |= _used(stream, outside)
            self._check_layer(index, stream)
            own = {f"{found.layers_path}.{index}.{n}": p for n, p in self._layers[index].named_parameters()}
            found.unused |= set(own) - _used(stream, own)
        found.unused |= set(outside) - found.before - found.between - found.after

    def _check_layer(self, index: int, stream: Tensor) -> None:
        """Check that a layer's output depends on no other layer but through its input."""
        others = {name: x for name, x in self._second.items() if int(name.partition(" ")[0]) < index}
        for other, layer in enumerate(self._layers[:index]):
            others |= {f"{other}.{name}": parameter for name, parameter in layer.named_parameters()}
            others[f"{other}."] = self._leaves[other]
        used = _used(stream, others)
        if used:
            other = min(int(name.replace(".", " ").partition(" ")[0]) for name in used)
            self._refuse(f"layer {index} depends on layer {other} by more than the stream")


def _is_stream(value: Any) -> bool:
    """Return whether a value is a differentiable tensor [b, t, …, d]."""
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
    return is_float and value.dim() >= 3 and tuple(value.shape[:2]) == (BATCH, TIME)


def _no_stream(model: nn.Module) -> ConfigError:
    return ConfigError(
        f"the layers of {type(model).__name__} take no differentiable tensor [batch, tokens, …, width]",
        where=KEY,
        rule="decoder layers pass a stream from one to the next",
        fix=f"{KEY}=qwen3, or a family of your own (model.kind=package.module:Family)",
    )


def _symbolic(shape: Iterable[int]) -> tuple[int, ...]:
    """Return a shape in which sizes of the probe are replaced by what they stand for."""
    names = {BATCH: BATCH_DIM, TIME: TIME_DIM, BATCH * TIME: BATCH_TIME_DIM}
    return tuple(names.get(size, size) for size in shape)


def _used(value: Tensor, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters that a value depends on."""
    able = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not value.requires_grad or not able:
        return set()
    found = torch.autograd.grad(value.sum(), list(able.values()), allow_unused=True, retain_graph=True)
    return {name for name, gradient in zip(able, found, strict=True) if gradient is not None}
