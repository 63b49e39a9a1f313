"""Modules that compute below float64 in a forward, as noted on the ranks while they run.

A model that casts to float32 inside does so in any proof, and its rounding looks like a wrong forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.prove.locate.first_difference import FirstDifference, Forward
from meshwright.units import counted

MAX_ROUNDINGS = 16
"""Rounding errors of the narrow dtype, relative to the largest value, that computing in it explains."""


class NarrowOperators(TorchFunctionMode):
    """Function mode that notes modules whose operators return floating-point tensors below float64."""

    def __init__(self) -> None:
        super().__init__()
        self._running: list[str] = []
        self._ran: dict[str, str] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and note the dtype of what it returns."""
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor) and one.is_floating_point() and one.dtype is not torch.float64:
                self._ran[self._running[-1] if self._running else ""] = str(one.dtype).removeprefix("torch.")
        return out

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Know which module of a model runs."""
        removed: list[Callable[[], None]] = []
        for name, module in model.named_modules():
            removed.append(module.register_forward_pre_hook(lambda _, args, name=name: self._enter(name)).remove)
            removed.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True).remove)
        try:
            yield
        finally:
            for remove in removed:
                remove()

    def _enter(self, name: str) -> None:
        self._running.append(name)

    def _leave(self) -> None:
        self._running.pop()

    def take(self) -> dict[str, str]:
        """Return the modules noted since the last call, with the dtypes, and forget them."""
        ran, self._ran = self._ran, {}
        return ran


def narrow_words(first: FirstDifference, forward: Forward) -> str | None:
    """Say that the first difference is the rounding of a module that computes below float64, if there is one."""
    ran: dict[str, str] = {}
    for value in first.wrong:
        names = list(forward.ranks[value.rank][value.cell % forward.num_microbatches])
        at = names.index(first.name)
        right = [place for place, name in enumerate(names[:at]) if name in first.right_before]
        for name in names[right[-1] + 1 if right else 0 : at + 1]:
            ran |= forward.narrow[value.rank].get(name, {})
    error = max(value.error for value in first.wrong)
    dtypes = sorted(set(ran.values()), key=lambda dtype: torch.finfo(getattr(torch, dtype)).eps)
    if not ran or error > MAX_ROUNDINGS * torch.finfo(getattr(torch, dtypes[-1])).eps:
        return None
    every = {module for rank in forward.narrow for modules in rank.values() for module in modules}
    more = f" and {counted(len(every) - 1, 'other module')}" if len(every) > 1 else ""
    module, dtype = next(iter(ran.items()))
    return f"part of the computation runs in {dtype}, in {module or 'the model'}{more}: the difference is its rounding"
