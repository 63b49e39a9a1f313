"""Names of PyTorch that it doesn't document, or may move.

Private PyTorch names: `torch.utils._device._device_constructors`, `torch.utils._pytree.tree_leaves`, `Module._modules`
and `UntypedStorage._cdata`. Checked on 2.13. PyTorch is imported inside the functions: a plan doesn't need it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

SMALL = 4096
"""Elements of a tensor that `small_on_cpu` creates on the CPU, at most."""


def small_on_cpu() -> AbstractContextManager[Any]:
    """Return a mode in which new tensors are on the CPU if they are small, and on the meta device if not."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

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


def leaves(value: Any) -> list[Any]:
    """Return what is inside nested tuples, lists and mappings."""
    from torch.utils._pytree import tree_leaves

    found: list[Any] = tree_leaves(value)
    return found


def storage_id(tensor: Any) -> int:
    """Return what tells a tensor's storage from others."""
    return int(tensor.untyped_storage()._cdata)
