"""Adapter for private PyTorch names: parameter dicts and compiled calls of modules, and dispatch modes.

This is the only file of the room that uses private PyTorch names: `Module._parameters`, `Module._compiled_call_impl`,
`torch._foreach_copy_` and `torch.utils._python_dispatch.TorchDispatchMode`, checked on 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


@contextmanager
def using_parameters(module: nn.Module, replacements: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute with other tensors in place of parameters, by name, within the context; hooks of modules don't run."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in replacements.items():
            path, _, last = name.rpartition(".")
            owner = cast(dict[str, Any], module.get_submodule(path)._parameters)
            before.append((owner, last, owner[last]))
            owner[last] = tensor
        yield
    finally:
        for owner, last, tensor in reversed(before):
            owner[last] = tensor


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others in place, with few kernels; needs `torch.no_grad`."""
    torch._foreach_copy_(list(targets), list(sources))


def undo_compile(module: nn.Module) -> bool:
    """Undo `Module.compile`, and return whether the module was compiled."""
    compiled, module._compiled_call_impl = module._compiled_call_impl, None
    return compiled is not None
