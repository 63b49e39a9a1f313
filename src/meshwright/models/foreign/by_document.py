"""Modules that mix tokens otherwise than by attention, such as recurrences and convolutions, run document by document.

A packed sample is divided at the ends of its documents, and each goes through such a module alone, which is what
packing means. A layer that is recomputed gets the documents of its micro-batch as one of its arguments.

Shapes: b samples, t tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.nn.attention.mask_spec import Documents, TokenLayout

LAYOUT = "packed_layout"
"""Argument by which a layer gets the placement of its tokens."""


class _Current:
    """Documents of the forward that runs in a layer."""

    documents: Documents | None = None


def run_by_document(layer: nn.Module, paths: Iterable[str], layout: Callable[[], TokenLayout | None]) -> None:
    """Let modules inside a layer run document by document, in place; `layout` tells where the micro-batch's tokens are
    that the layer is called for."""
    current, forward = _Current(), layer.forward

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, LAYOUT: layout()}

    def with_layout(*args: Any, **kwargs: Any) -> Any:
        found = kwargs.pop(LAYOUT, None)
        current.documents = None if found is None else found.documents
        try:
            return forward(*args, **kwargs)
        finally:
            current.documents = None

    layer.register_forward_pre_hook(add, with_kwargs=True)
    layer.forward = with_layout
    for path in paths:
        module = layer.get_submodule(path)
        module.forward = _by_document(module.forward, current)
        vars(module)["runs_eagerly"] = True  # a graph would be compiled again for other documents


def _by_document(forward: Callable[..., Any], current: _Current) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if current.documents is None:
            return forward(*args, **kwargs)
        samples = []
        for sample, lengths in enumerate(current.documents):
            parts, start = [], 0
            for length in lengths:
                place = sample, start, length, sum(lengths)
                parts.append(forward(*_cut(args, *place), **_cut(kwargs, *place)))
                start += length
            samples.append(_joined(parts, 1))
        return _joined(samples, 0)

    return run


def _cut(value: Any, sample: int, start: int, length: int, num_tokens: int) -> Any:
    """Return a document's part of arguments: of the tensors [b, t, …] among them, or [1, t, …] for all samples."""
    if isinstance(value, dict):
        return {name: _cut(one, sample, start, length, num_tokens) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cut(one, sample, start, length, num_tokens) for one in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == num_tokens:
        row = min(sample, value.shape[0] - 1)
        return value[row : row + 1, start : start + length]
    return value


def _joined(parts: list[Any], dim: int) -> Any:
    """Return results one after the other along a dim; of what is no tensor, the first."""
    if isinstance(parts[0], tuple | list):
        return type(parts[0])(_joined(list(one), dim) for one in zip(*parts, strict=True))
    return torch.cat(parts, dim) if isinstance(parts[0], Tensor) else parts[0]
