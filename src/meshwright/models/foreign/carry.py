"""Tensors that a layer takes from earlier ones besides the stream, and that pass between pipeline stages with it.

They are in the layer's arguments: another output of the layer before, keys and values that several layers read, states
that are computed between layers. A model may read its own variable for one of them again, after the layer, so what
arrives replaces the content of the tensor that it has. The probe does the same with leaves of the graph: what a layer
still depends on is found there.

Shapes: b batch, t time, f all features of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import swap_tensors

from meshwright.models.foreign.structure import Carried

Arguments = dict[int | str, Any]
"""Arguments of a layer, by position or name."""


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    return dict(chain(enumerate(args), kwargs.items()))


def given(arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as a call takes them."""
    args = tuple(value for key, value in arguments.items() if isinstance(key, int))
    return args, {key: value for key, value in arguments.items() if isinstance(key, str)}


def tensors_in(value: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Tensor]]:
    """Yield the differentiable tensors inside nested mappings and sequences, with the path to each."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield path, value
    elif isinstance(value, Mapping | list | tuple):
        for key, inner in list(value.items() if isinstance(value, Mapping) else enumerate(value)):
            yield from tensors_in(inner, (*path, key))


def at(value: Any, path: Sequence[int | str]) -> Any:
    """Return what is at a path inside a value; None if nothing is."""
    for key in path:
        is_there = key in value if isinstance(value, Mapping) else isinstance(key, int) and key < len(value or ())
        value = value[key] if is_there else None
    return value


def put(value: Any, path: Sequence[int | str], new: Any) -> Any:
    """Return a value with another one at a path inside it; mappings and lists are changed in place."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, MutableMapping):
        value[key] = put(value.get(key), rest, new)
        return value
    assert isinstance(key, int), "what isn't a mapping is a sequence"
    items = value if isinstance(value, list) else list(value or ())
    items += [None] * (key + 1 - len(items))
    items[key] = put(items[key], rest, new)
    return items if items is value else tuple(items)


def replace_content(tensor: Tensor, new: Tensor) -> Tensor:
    """Give a tensor the content of another, to which nobody else refers, and return its former one."""
    former = new.to(tensor.dtype)
    swap_tensors(tensor, former)  # type: ignore[no-untyped-call]
    return former


def receive(arguments: Arguments, state: Iterable[tuple[Carried, Tensor]]) -> None:
    """Replace carried tensors in a layer's arguments by what was received, in place."""
    for one, new in state:
        found = at(arguments, one.path)
        if isinstance(found, Tensor):
            replace_content(found, new)
        else:
            put(arguments, one.path, new)


def pack(tensors: Iterable[tuple[Carried, Tensor]], width: int) -> Tensor:
    """Return tensors as one [b, t, f] with `width` features, the last of which are zeros if some stage sends more."""
    parts = [tensor.movedim(one.batch_dims, (0, 1)).flatten(2) for one, tensor in tensors]
    joined = torch.cat([part.to(parts[0].dtype) for part in parts], -1)
    return torch.nn.functional.pad(joined, (0, width - joined.shape[-1]))


def unpack(packed: Tensor, state: Iterable[Carried]) -> Iterator[tuple[Carried, Tensor]]:
    """Yield the tensors that were packed, each with its own dims."""
    start = 0
    for one in state:
        size = prod(one.per_token)
        part = packed.narrow(-1, start, size)
        yield one, part.reshape(*part.shape[:2], *one.per_token).movedim((0, 1), one.batch_dims)
        start += size
