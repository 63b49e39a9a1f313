"""Record how a model's constructor initialises its tensors, on the meta device.

The last operator that wrote a whole tensor says how its values are distributed; what was written in parts, by an
unknown operator, or made from other tensors is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.foreign import private
from meshwright.models.foreign.structure import FillFacts

COMPUTED = FillFacts("computed")


def build_recorded(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, FillFacts]]:
    """Build a model on the meta device, and return it with the initial values of its parameters and buffers, by every
    one of their names."""
    with torch.device("meta"), _Recorder() as recorder:
        model = build()
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return model, {name: recorder.fill(tensor) for name, tensor in tensors}


def _written(name: str, arguments: tuple[Any, ...]) -> FillFacts:
    """Return the values that an operator writes to a whole tensor.

    Args:
        name: name of the operator without its overload, such as `aten.normal_`.
        arguments: its arguments after the tensor or shape.
    """
    if name in ("aten.zero_", "aten.zeros"):
        return FillFacts("constant", 0.0)
    if name == "aten.ones":
        return FillFacts("constant", 1.0)
    if name in ("aten.fill_", "aten.full") and isinstance(arguments[0], int | float):
        return FillFacts("constant", float(arguments[0]))
    if name in ("aten.normal_", "aten.randn"):
        mean, std = _completed(arguments)
        return FillFacts("normal", float(std)) if mean == 0 else COMPUTED
    if name == "aten.uniform_":
        low, high = _completed(arguments)
        return FillFacts("uniform", float(high)) if low == -high else COMPUTED
    return COMPUTED


def _completed(arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Return the parameters of a distribution, by default 0 and 1."""
    found = [*arguments, *(0.0, 1.0)[len(arguments) :]]
    return float(found[0]), float(found[1])


class _Recorder(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records what operators write to whole storages."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fills: dict[int, FillFacts | None] = {}
        self._kept: list[Any] = []
        """Storages that were written to: a tensor that is made unseen could have the id of one that is freed."""

    def fill(self, tensor: Tensor) -> FillFacts:
        """Return how a tensor's values are distributed."""
        found = self._fills.get(private.storage_id(tensor))
        return COMPUTED if found is None or not tensor.is_floating_point() else found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note what it wrote."""
        out = func(*args, **(kwargs or {}))
        name = str(func).rpartition(".")[0]
        taken = {private.storage_id(x) for x in private.leaves((args, kwargs)) if isinstance(x, Tensor)}
        if private.is_mutable(func):
            self._note(args[0], _written(name, args[1:]))
        for made in private.leaves(out):
            if isinstance(made, Tensor) and private.storage_id(made) not in taken:
                is_empty = name.startswith(("aten.empty", "aten.new_empty"))
                values = args[1:2] if name == "aten.full" else ()
                self._note(made, None if is_empty else _written(name, values))
        return out

    def _note(self, tensor: Tensor, values: FillFacts | None) -> None:
        self._kept.append(tensor.untyped_storage())
        is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        self._fills[private.storage_id(tensor)] = values if is_whole else COMPUTED
