"""Arguments and results of a layer as a list of tensors and a template of everything else.

Tensors may stand in tuples, lists, dicts and plain objects such as dataclasses. Everything else is a constant: a graph
has it baked in, so it must be equal whenever the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn


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
    return None if one is other or _equal(one, other) else path or "an argument"


def storages(value: Any) -> Iterator[int]:
    """Yield the addresses of the storages of all tensors in a value."""
    yield from (t.untyped_storage().data_ptr() for t in flatten(value)[1])


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_plain_object(part: Any) -> bool:
    special = (type, FunctionType, nn.Module, Enum, torch.Generator)
    return hasattr(part, "__dict__") and not callable(part) and not isinstance(part, special)
