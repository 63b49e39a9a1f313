"""Names of PyTorch that it doesn't document, or may move.

Private PyTorch names: `torch.utils._device._device_constructors`, `torch.utils._pytree.tree_leaves`,
`torch.utils._python_dispatch.TorchDispatchMode`, `OpOverload._schema`, `Module._modules`, `Module._forward_hooks`,
`Module._forward_pre_hooks`, `Module._backward_hooks`, `Module._backward_pre_hooks`, `Module._call_impl`,
`Module._compiled_call_impl`, `UntypedStorage._cdata`,
`aten._scaled_dot_product_flash_attention_for_cpu` and `Tensor._version`. Checked on 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL = 4096
"""Elements of a tensor that `small_on_cpu` creates on the CPU, at most."""


def small_on_cpu() -> AbstractContextManager[Any]:
    """Return a mode in which new tensors are on the CPU if they are small, and on the meta device if not."""

    class SmallOnCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Run an operator; a constructor runs on the meta device first."""
            kwargs = dict(kwargs or {})
            if func not in _device_constructors() or kwargs.get("device") is not None:
                return func(*args, **kwargs)
            made = func(*args, **{**kwargs, "device": "meta"})
            return func(*args, **{**kwargs, "device": "cpu"}) if made.numel() <= SMALL else made

    mode: AbstractContextManager[Any] = SmallOnCpu()
    return mode


def order_children(module: Any, rank: Callable[[str], int]) -> None:
    """Register a module's children in the order of their rank by name, and otherwise as they are."""
    for name in sorted(module._modules, key=rank):
        module._modules[name] = module._modules.pop(name)


def before_call(module: Any, function: Callable[..., Any]) -> None:
    """Change the arguments of each call of a module, before its hooks and outside of its compiled code."""
    call = module._compiled_call_impl or module._call_impl

    def changed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = function(args, kwargs)
        return call(*args, **kwargs)

    module._compiled_call_impl = changed


def is_hooked(module: Any) -> bool:
    """Return whether a module has hooks, or a forward of its own in place of its class's."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def fused_attention() -> Any:
    """Return PyTorch's operator of attention that doesn't save scores, as it is on the CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def leaves(value: Any) -> list[Any]:
    """Return what is inside nested tuples, lists and mappings."""
    found: list[Any] = tree_leaves(value)
    return found


def is_mutable(operator: Any) -> bool:
    """Return whether an operator writes to its arguments."""
    return bool(operator._schema.is_mutable)


NO_KERNELS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "_local_scalar_dense",
     "_unsafe_view", "_reshape_alias", "lift_fresh", "detach_", "resize_"}
)  # fmt: skip
"""Operators that allocate or look at memory, and compute nothing."""


def base_name(operator: Any) -> str:
    """Return an operator's name without namespace and overload."""
    return str(operator._schema.name).partition("::")[2]


def is_kernel(operator: Any) -> bool:
    """Return whether an operator computes: neither views nor allocates."""
    aliases = [one.alias_info for one in operator._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return bool(aliases) and not is_view and base_name(operator) not in NO_KERNELS


def storage_id(tensor: Any) -> int:
    """Return what tells a tensor's storage from others."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: Any) -> tuple[int, int]:
    """Return what changes when a tensor is written to, or replaced by another."""
    return id(tensor), int(tensor._version)


@contextmanager
def random_operators() -> Iterator[list[str]]:
    """Yield the names of the operators that draw random numbers while the context lasts."""
    found: list[str] = []

    class RandomOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Run an operator, and note whether it draws; attention draws only with dropout."""
            kwargs = kwargs or {}
            if torch.Tag.nondeterministic_seeded in func.tags:
                given = {one.name: one.default_value for one in func._schema.arguments}
                given |= dict(zip(given, args, strict=False)) | kwargs
                if given.get("dropout_p") != 0.0:
                    found.append(str(func))
            return func(*args, **kwargs)

    with RandomOperators():  # type: ignore[no-untyped-call]
        yield found
