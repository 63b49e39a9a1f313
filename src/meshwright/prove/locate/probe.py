"""Record what the modules of a model take and return, on ranks and in the reference alike.

An attention core is not a module, so that it can be replaced; its queries, keys, values and output are recorded too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.nn.step_handles import StepHandle

Values = dict[str, Tensor]
"""Values of a micro-batch by name, such as `input of blocks.0.ffn`, in the order in which they were computed."""
Take = Callable[[str, Tensor], None]
"""Function that takes the name of a value and the value."""

CORE_VALUES = ("queries", "keys", "values")


@contextmanager
def probed(model: nn.Module, take: Take) -> Iterator[None]:
    """Pass the values of all modules to `take` within the context: local shards, detached and not copied."""
    with torch.no_grad():
        removed: list[Callable[[], None]] = []
        for name, module in comparable_modules(model):
            removed += _hook(name, module, take)
            core = getattr(module, "core", None)
            if callable(core) and not isinstance(core, nn.Module):
                vars(module)["core"] = _ProbedCore(core, f"{name}.core", take)
                removed.append(partial(vars(module).__setitem__, "core", core))
    try:
        yield
    finally:
        for remove in removed:
            remove()


def comparable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose values have the same meaning on all layouts, by name.

    Those inside a layer that counts tokens for experts are left out: its rows are in an order of the layout's own.
    """
    inside = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if any(isinstance(child, StepHandle) for child in module.children())
    )
    for name, module in model.named_modules():
        if name and not name.startswith(inside):
            yield name, module


def _hook(name: str, module: nn.Module, take: Take) -> list[Callable[[], None]]:
    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        _pass_on(f"input of {name}", next((one for one in args if isinstance(one, Tensor)), None), take)

    def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        _pass_on(f"output of {name}", out[0] if isinstance(out, tuple) and out else out, take)

    return [module.register_forward_pre_hook(before).remove, module.register_forward_hook(after).remove]


class _ProbedCore:
    """An attention core whose arguments and outputs are recorded."""

    def __init__(self, core: Any, name: str, take: Take) -> None:
        self._core, self._name, self._take = core, name, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def __call__(self, *args: Any) -> Any:
        for what, value in zip(CORE_VALUES, args, strict=False):
            _pass_on(f"{what} of {self._name}", value, self._take)
        out = self._core(*args)
        _pass_on(f"output of {self._name}", out, self._take)
        return out


def _pass_on(name: str, value: Any, take: Take) -> None:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
        take(name, value.to_local().detach() if isinstance(value, DTensor) else value.detach())
