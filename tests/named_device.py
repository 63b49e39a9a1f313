"""A device that is another than the CPU in name only: `use()` makes it, for a process that then ends by `os._exit`.

Its tensors hold tensors of the CPU. Operators take them together, as those of a GPU: with a tensor of the CPU that has
dims they raise, unless they copy, or index by it. So what runs on it runs on one device throughout.

Private PyTorch names, checked on 2.13: `torch.utils.backend_registration._setup_privateuseone_for_python_backend`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "named"
MIXES = ("aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_",
         "meshwright::dropout_add")  # fmt: skip
"""Operators that take tensors of several devices."""

LAZY = ("aten::_conj", "aten::_neg_view")
"""Operators that only set a bit, which tells others to read the values otherwise."""


class Named(Tensor):
    """A tensor on the device."""

    held: Tensor
    """Its values."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Named:
        made: Named = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The tensor without its graph; other values may be set."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Named) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def tolist(self) -> Any:
        """Return the values, as tensors of a GPU do."""
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Named({self.held!r})"


class Factories(TorchDispatchMode):
    """Makes tensors of the device where it is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    own = [value for value in tensors if isinstance(value, Named)]
    asked = kwargs.get("device")
    there = bool(own) if asked is None else torch.device(asked).type == NAME
    if asked is not None and there:
        kwargs = {**kwargs, "device": "cpu"}
    others = [value for value in tensors if not isinstance(value, Named) and value.dim()]
    if own and others and not func.name().startswith(MIXES):
        raise RuntimeError(f"{func.name()} takes tensors of {NAME} and of {others[0].device}")
    if func.name() == "aten::copy_":
        there = isinstance(args[0], Named)
    found = func(*_held(args), **_held(kwargs))
    if not there:
        return found
    if func.name() in LAZY:  # bits that the outer tensor would not have
        return Named(found.resolve_conj().resolve_neg())
    made = tree_map_only(Tensor, Named, found)
    return return_and_correct_aliasing(func, args, kwargs, made) if own else made


def _held(values: Any) -> Any:
    return tree_map_only(Named, lambda one: one.held, values)


LIBRARY = torch.library.Library("aten", "IMPL")


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Named:
    """Make the tensor that `torch.tensor` copies to, which asks no mode."""
    return Named(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    _held(target).copy_(_held(source))
    return target


def use() -> torch.device:
    """Make the device known to this process, and return it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
    LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    Factories().__enter__()
    return torch.device(NAME, 0)
