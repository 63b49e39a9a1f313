"""Find a model's decoder layers, what runs around them, and what all of it computes and saves, in a few forwards.

Nothing is known by name. What depends on what is read off the autograd graph: each layer's input is replaced by a leaf,
so a layer whose output depends on an earlier layer's parameters has a second stream, and a parameter outside the layers
is used before them if the first layer's input depends on it, and after them if the output does.

Shapes: b batch, t time, d width of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from meshwright.errors import ConfigError
from meshwright.models.contract.model_facts import Saved
from meshwright.models.foreign import private
from meshwright.models.foreign.carry import Arguments, arguments_of, given, put, replace_content, tensors_in
from meshwright.models.foreign.origin import BATCH_DIM, BATCH_TIME_DIM, LAYER_LISTS, TIME_DIM, ForeignModel, Probe
from meshwright.models.foreign.structure import Carried
from meshwright.units import counted

BATCH = 3
"""Samples of the probe."""
TIMES = (37, 88, 704)
"""Tokens of a sample, sizes that a model has nowhere else; the later ones are for models that take chunks."""


class NoForward(Exception):
    """A forward failed, and why."""


def probe(model: nn.Module, origin: ForeignModel) -> Probe:
    """Run a model, on the meta device if it can, and return what it does around its layers.

    Raises:
        ConfigError: it has no list of layers, or no stream between them.
        NoForward: the forward fails, whatever the length of a sample.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    frozen = {name: p for name, p in parameters if not p.requires_grad}
    for parameter in frozen.values():
        parameter.requires_grad_(True)  # gradients show what depends on it
    failed = None
    try:
        for time in TIMES:
            try:
                found = _probe(model, origin, time)
            except NoForward as error:
                failed = failed or error
            else:
                if found.not_split:
                    found = _carrying(model, origin, time) or found
                found.frozen = set(frozen)
                return found
    finally:
        for parameter in frozen.values():
            parameter.requires_grad_(False)
    assert failed is not None, "no length was taken"
    raise failed


def _carrying(model: nn.Module, origin: ForeignModel, time: int) -> Probe | None:
    """Return what a model does if all that its layers take from earlier ones passes between stages; None if it can't
    be split then either."""
    with suppress(ConfigError, NoForward):
        found = _probe(model, origin, time, carries=True)
        return None if found.not_split else found
    return None


def _probe(model: nn.Module, origin: ForeignModel, time: int, *, carries: bool = False) -> Probe:
    path = origin.layers_path(model)
    listed = model.get_submodule(path)
    assert isinstance(listed, LAYER_LISTS), "the layers are a list of modules"
    layers = list(listed)
    if len(set(layers)) < len(layers):
        raise origin.error(f"{path} holds one module more than once", "each layer has parameters of its own")
    found = Probe(path, time)
    watch = _Watch(model, layers, found, origin, carries=carries)
    ids = torch.zeros((BATCH, time), dtype=torch.long, device=next(model.parameters()).device)
    handles = list(watch.register())
    try:
        out = origin.call(model, ids)
        _check_logits(model, out, origin, time)
        watch.conclude(out)
    except ConfigError:
        raise
    except Exception as error:
        if "leaf Variable" in str(error) and "in-place" in str(error):
            what = f"a layer of {type(model).__name__} writes to its input in place"
            rule = "the input of a layer is kept for its recomputation"
            raise origin.error(what, rule, "x = x + …, not x += …") from error
        raise NoForward(f"{type(error).__name__}: {str(error)[:200]}") from error
    finally:
        for handle in handles:
            handle.remove()
    found.vocab_size = out.shape[-1]
    return found


def _check_logits(model: nn.Module, out: Any, origin: ForeignModel, time: int) -> None:
    shape = list(out.shape) if isinstance(out, Tensor) else None
    if shape is None or len(shape) != 3 or shape[:2] != [BATCH, time] or not out.is_floating_point():
        found = f"a {type(out).__name__}" if shape is None else f"a tensor {shape}"
        raise origin.error(
            f"{type(model).__name__} returns {found} for {BATCH} samples of {time} tokens",
            "a model returns logits [b, t, v] of every token, alone, first in a tuple, or as `logits`",
            "a forward(ids) that returns logits of every token",
        )


class _Watch:
    """Hooks that record the calls of layers and of modules outside them."""

    def __init__(
        self, model: nn.Module, layers: list[nn.Module], found: Probe, origin: ForeignModel, *, carries: bool
    ) -> None:
        self._model, self._layers, self._found, self._origin = model, layers, found, origin
        self._carries = carries
        """Whether leaves replace all that a layer takes from earlier ones, and not only its stream."""
        self._phase = "before"
        """`before` all layers, in a `layer`, or `after` a number of calls of layers."""
        self._order: list[int] = []
        self._inputs: list[Tensor] = []
        self._leaves: list[list[Tensor]] = []
        """Those of each call, the stream's first."""
        self._carried: list[list[tuple[Carried, Tensor]]] = []
        """Tensors that each call took besides the stream, with what their leaves replaced."""
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
            arguments = arguments_of(args, kwargs)
            if self._carries:
                self._replace(arguments, key)
            else:
                arguments[key] = stream.detach().requires_grad_()
                self._inputs.append(stream)
                self._leaves.append([arguments[key]])
            return given(arguments)

        return hook

    def _replace(self, arguments: Arguments, key: int | str) -> None:
        """Replace the content of the stream, and of all that depends on earlier layers, by leaves."""
        earlier = {f"{n}": leaf for n, leaf in enumerate(chain(*self._leaves))}
        earlier |= {f"{n}.{name}": p for n in set(self._order[:-1]) for name, p in self._layers[n].named_parameters()}
        found = dict(tensors_in(arguments))
        found = {(key,): found.pop((key,))} | found
        former: list[tuple[Carried, Tensor]] = []
        leaves: list[Tensor] = []
        for path, value in found.items():
            if any(value is leaf for leaf in leaves) or (leaves and not _used(value, earlier)):
                continue
            dims = _batch_dims(value, self._found.time)
            if dims is None:
                self._refuse(f"a layer takes a tensor {list(value.shape)} of earlier ones that isn't one of tokens")
                continue
            per_token = tuple(size for dim, size in enumerate(value.shape) if dim not in dims)
            old, leaf = self._cut(arguments, path, value)
            leaves.append(leaf)
            former.append((Carried(path, per_token, dims), old))
        self._inputs.append(former[0][1])
        self._leaves.append(leaves)
        self._carried.append(former)

    def _cut(self, arguments: Arguments, path: tuple[int | str, ...], value: Tensor) -> tuple[Tensor, Tensor]:
        """Replace a tensor's content by a leaf, and return both."""
        leaf = value.detach().requires_grad_().clone()  # no leaf proper, which its users would keep
        try:
            old = replace_content(value, leaf)
        except RuntimeError:  # what the graph keeps is replaced where the layer finds it
            put(arguments, path, leaf)
            return value, leaf
        self._leaves = [[old if x is value else x for x in leaves] for leaves in self._leaves]
        self._outputs = [old if x is value else x for x in self._outputs]
        return old, value

    def _stream_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
        """Return the argument that is the previous layer's output; before that, the first floating-point tensor."""
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        if self._key is None or not self._outputs:
            found = (key for key, value in named if _batch_dims(value, self._found.time))
            self._key = next(found, None)
            if self._key is None:
                name = type(self._model).__name__
                what = f"the layers of {name} take no differentiable tensor [batch, tokens, …, width]"
                raise self._origin.error(what, "decoder layers pass a stream from one to the next")
        return self._key

    def _after_layer(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            self._phase = f"after {len(self._order)}"
            is_tensor = isinstance(out, Tensor)
            form = ("tensor", 1) if is_tensor else (type(out).__name__, len(out))
            if form[0] not in ("tensor", "tuple", "list"):
                self._refuse(f"a layer returns {form[0]}")
            if self._form not in (None, form):
                self._refuse("layers return different things")
            self._form = form
            stream = out if is_tensor else None if type(out) is dict else out[0]
            if not isinstance(stream, Tensor):
                what = f"a layer of {type(self._model).__name__} returns a {type(out).__name__} without the stream"
                raise self._origin.error(what, "a layer returns the stream, alone or first in a tuple")
            others = [x for x in private.leaves([] if is_tensor else list(out[1:])) if isinstance(x, Tensor)]
            if self._carries and index < len(self._layers) - 1:
                others = []  # they depend on this call's leaves, and the next layer may take them
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
                time = self._found.time
                names = {BATCH: BATCH_DIM, time: TIME_DIM, BATCH * time: BATCH_TIME_DIM}
                self._found.outputs[path] = tuple(names.get(size, size) for size in out.shape)

        return hook

    def _refuse(self, reason: str) -> None:
        self._found.not_split = self._found.not_split or reason

    def conclude(self, out: Tensor) -> None:
        """Read dependencies off the graph."""
        found, count = self._found, len(self._layers)
        last = f"after {len(self._order)}"
        for path, phases in found.phases.items():
            named = {phase: "after" if phase == last else "between" for phase in phases if phase.startswith("after ")}
            found.phases[path] = {named.get(phase, phase) for phase in phases}
        if self._order != list(range(count)):
            calls = f"{counted(len(self._order), 'call')} of {counted(count, 'layer')}"
            self._refuse(f"layers are not called once each, in order ({calls})")
        if self._key is None or self._form is None:
            raise self._origin.error(
                f"{type(self._model).__name__} calls no layer of {found.layers_path}", "decoder layers are called"
            )
        found.stream, found.returns, shape = self._key, self._form, self._inputs[0].shape
        found.batch_dims = _batch_dims(self._inputs[0], found.time) or (0, 1)
        found.per_token = tuple(size for dim, size in enumerate(shape) if dim not in found.batch_dims)
        if any(x.shape != self._inputs[0].shape for x in (*self._inputs, *self._outputs)):
            self._refuse("the stream between layers has more than one shape")
        inside = {id(parameter) for layer in self._layers for parameter in layer.parameters()}
        outside = {name: p for name, p in self._model.named_parameters() if id(p) not in inside}
        for index, stream in enumerate(self._inputs[1:]):
            if stream is not self._outputs[index]:
                found.between_layers = True
                self._check_between(index, stream, outside)
        for index, taken in enumerate(self._carried[1:]):
            for _, value in taken[1:]:
                self._check_between(index, value, outside)
        found.before = _used(self._inputs[0], outside)
        found.after = _used(out, outside)
        if _used(out, self._second):
            self._refuse("the output depends on a second tensor that a layer returns")
        for index, stream in enumerate(self._outputs):
            found.between |= _used(stream, outside)
            if not found.not_split:
                self._check_layer(index, stream)
        self._check_output(out)
        found.unused |= self._unused() | (set(outside) - found.before - found.between - found.after)

    def _check_output(self, out: Tensor) -> None:
        """Check that the output depends on no layer but through the last one's output, or what that one has taken."""
        taken = {f"{call} {n}": leaf for call, leaves in enumerate(self._leaves) for n, leaf in enumerate(leaves)}
        used, last = _used(out, taken), len(self._leaves) - 1
        if self._carries:
            end = tuple(one for n, (one, _) in enumerate(self._carried[last]) if f"{last} {n}" in used)
            self._found.carried = (*(tuple(one for one, _ in call[1:]) for call in self._carried), end)
            self._found.between_layers = True
        calls = {int(name.partition(" ")[0]) for name in used} - ({last} if self._carries else set())
        if calls:
            self._refuse(f"the output depends on layer {self._order[min(calls)]} by more than the stream")

    def _unused(self) -> set[str]:
        """Return the names of the layers' parameters on which no call's output depends."""
        path, names, used = self._found.layers_path, set[str](), set[str]()
        for index, layer in enumerate(self._layers):
            own = {f"{path}.{index}.{name}": parameter for name, parameter in layer.named_parameters()}
            names |= set(own)
            for called, stream in zip(self._order, self._outputs, strict=True):
                used |= _used(stream, own) if called == index else set()
        return names - used

    def _check_between(self, index: int, stream: Tensor, outside: Mapping[str, Tensor]) -> None:
        """Check that the input of the layer after `index` depends on no layer but through the output of that one."""
        self._found.between |= _used(stream, outside)
        others = {f"{n}.": leaf for n, leaf in enumerate(chain(*self._leaves[:index]))} | self._second
        if _used(stream, others):
            self._refuse(f"what is computed between layers {index} and {index + 1} depends on more than the stream")

    def _check_layer(self, index: int, stream: Tensor) -> None:
        """Check that a layer's output depends on no other layer but through its input."""
        others = {name: x for name, x in self._second.items() if int(name.partition(" ")[0]) < index}
        for other, layer in enumerate(self._layers[:index]):
            others |= {f"{other}.{name}": parameter for name, parameter in layer.named_parameters()}
            others |= {f"{other}.{n}": leaf for n, leaf in enumerate(self._leaves[other])}
        used = _used(stream, others)
        if used:
            other = min(int(name.replace(".", " ").partition(" ")[0]) for name in used)
            self._refuse(f"layer {index} depends on layer {other} by more than the stream")


def _batch_dims(value: Any, time: int) -> tuple[int, int] | None:
    """Return the dims of samples and tokens of a differentiable tensor with features, or None for another value."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 3:
        return None
    if torch.is_grad_enabled() and not value.requires_grad:
        return None
    shape = list(value.shape)
    return (shape.index(BATCH), shape.index(time)) if shape.count(BATCH) == shape.count(time) == 1 else None


def _used(value: Tensor, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters that a value depends on."""
    able = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not value.requires_grad or not able:
        return set()
    found = torch.autograd.grad(value.sum(), list(able.values()), allow_unused=True, retain_graph=True)
    return {name for name, gradient in zip(able, found, strict=True) if gradient is not None}


BEFORE, TO_HEAD, AFTER = "before", "to the head", "after"
Place = int | str
"""Index of a layer, or an end. Only of what is saved, that before the head is told from that after it."""


class FusedAttention(TorchFunctionMode):
    """Mode in which attention on the meta device saves what fused kernels do. PyTorch itself would save all scores
    there, as it does on the CPU if keys and values differ in width or the mask is learned."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_attention if func is scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    named: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    is_learned = attn_mask is not None and attn_mask.requires_grad
    if not query.is_meta or query.shape[-1] != value.shape[-1] or is_learned:
        return scaled_dot_product_attention(query, key, value, **named, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        named["attn_mask"] = torch.zeros_like(attn_mask, dtype=query.dtype)  # each call converts its mask
    out: Tensor = private.fused_attention()(query, key, value, **named)[0]
    return out


def saved_by_kind(values: Mapping[Place, Saved], layers: list[int]) -> Saved:
    """Return what a layer of a kind saves on average: windows have masks, and the first saves what all share. A layer
    that isn't called saves nothing."""
    parts = [vars(values.get(layer, Saved())) for layer in layers]
    return Saved(**{name: sum(part[name] for part in parts) / len(parts) for name in parts[0]})
