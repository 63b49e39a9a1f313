"""Views that could only be had by moving data: they share no memory with what they are views of.

A slice along a dim that is cut, a diagonal, windows: DTensor (or the fallback) gathers the tensor first, and the view
is of the gathered copy. What was written to it would not reach the tensor, nor would it see what is written there
later, and nothing would say so. Within `for_dtensor` and `replicate_fallback` such views are as on one device:

- A write to one is done on a copy of the whole tensor and comes back to all of it: a gather, and the rest by slicing.
- After a write to the tensor, by whatever name, its views that live on are made anew: a gather.

Whether a view lies apart is the same on all ranks: something had to move for it. Whether it still lives may not be,
since garbage is collected when each rank likes, so the ranks ask each other before they gather.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.dtensor_ops.consensus import on_any_rank
from meshwright.dtensor_ops.private import (
    OpOverload,
    dtensor_of,
    gathered,
    is_alias,
    is_view,
    out_of_place,
    own_tensor,
    schema_of,
    turn_into,
)
from meshwright.dtensor_ops.refused_ops import turned_refused
from meshwright.dtensor_ops.run_replicated import Call, Run, piece_like, run_on_copies
from meshwright.reshard.dtensor import DTensorSpec, spec_of
from meshwright.reshard.dtensor.redistribute_local import Redistributor

Gathers = Callable[[Call], None]
"""Is told of a call for which a whole tensor is gathered, before that is done."""
Origins = MutableMapping[DTensor, "_Origin"]
"""Where tensors' values come from, as long as they live."""


@dataclass(frozen=True)
class _Step:
    """One view of what is viewed: an operator without its tensor, and which of its results."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | None

    def of(self, tensor: Tensor) -> Tensor:
        result = self.operator(tensor, *self.args, **self.kwargs)
        view: Tensor = result if self.place is None else result[self.place]
        return view


@dataclass(eq=False)
class _Family:
    """A tensor and all views of it. It holds the tensor's memory and not the tensor, which has a graph behind it."""

    local: Tensor
    spec: DTensorSpec
    apart: Origins = field(default_factory=WeakIdKeyDictionary)
    """The views that lie apart and still live on this rank, with their origins."""
    has_apart: bool = False
    """Some may live, on some rank; all ranks say the same."""

    def tensor(self) -> DTensor:
        return dtensor_of(self.local, self.spec)

    def whole(self) -> Tensor:
        """A copy of all of it on this rank."""
        whole = gathered(self.tensor())
        return whole.clone() if is_alias(whole, self.local) else whole

    def keep(self, whole: Tensor) -> None:
        """Write all of it: this rank's piece, and the views that lie apart."""
        self.local.copy_(piece_like(whole, self.tensor()))
        self.renew(whole)

    def renew(self, whole: Tensor) -> None:
        """Make the views that lie apart those of `whole`."""
        for view, origin in list(self.apart.items()):
            own_tensor(view).copy_(piece_like(origin.of(whole), view))


@dataclass(frozen=True, eq=False)
class _Origin:
    """Where a tensor's values come from."""

    family: _Family
    steps: tuple[_Step, ...] = ()
    is_apart: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """The same view of another tensor of the family's shape."""
        for step in self.steps:
            whole = step.of(whole)
        return whole

    def is_memory(self) -> bool:
        """On one device it would be a view; some operators copy where they must (`reshape`)."""
        shape, stride, dtype = self.family.spec.tensor_meta  # type: ignore[misc]
        base = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return is_alias(self.of(base), base)


class Views:
    """A layer that keeps views what they are.

    Args:
        mover: the hook of this thread's redistributions, which counts them.
        gathers: is told of writes that gather, and may raise.
        origins: what a context around this one knows.
    """

    def __init__(self, mover: Redistributor, gathers: Gathers | None = None, origins: Origins | None = None) -> None:
        self.origins: Origins = WeakIdKeyDictionary() if origins is None else origins
        """Of views, and of what they are views of."""
        self._mover = mover
        self._gathers = gathers

    def __call__(self, call: Call, run: Run) -> Any:
        """What `call` returns, by `run`."""
        if call.operator.is_view:
            return self._viewed(call, run)
        if torch.Tag.inplace_view in call.operator.tags:
            return self._turned(call, run)
        if len(self.origins) and schema_of(call.operator).is_mutable:
            return self._written(call, run)
        return run(call)

    def _viewed(self, call: Call, run: Run) -> Any:
        """Run a view and note where its results come from."""
        before = self._mover.num_redistributions
        result = run(call)
        base = call.args[0] if call.args else None
        if not isinstance(base, DTensor):
            return result
        origin = self.origins.get(base)
        if origin is None:
            origin = self.origins[base] = _Origin(_Family(own_tensor(base), spec_of(base)))
        is_apart = origin.is_apart or self._mover.num_redistributions > before
        for place, view in [(None, result)] if isinstance(result, Tensor) else enumerate(result):
            if view is not base and isinstance(view, DTensor):
                step = _Step(call.operator, call.args[1:], call.kwargs, place)
                self._note(view, _Origin(origin.family, (*origin.steps, step), is_apart))
        return result

    def _note(self, view: DTensor, origin: _Origin) -> None:
        if origin.is_apart and not origin.is_memory():
            return
        self.origins[view] = origin
        if origin.is_apart:
            origin.family.apart[view] = origin
            origin.family.has_apart = True

    def _turned(self, call: Call, run: Run) -> Any:
        """Run a view that its tensor becomes, in place; DTensor's own leave the tensor's shape as it was."""
        view, tensor = out_of_place(call.operator), call.args[0] if call.args else None
        if view is None or call.kwargs or not isinstance(tensor, DTensor):
            return run(call)
        if tensor.requires_grad and is_view(tensor):
            raise turned_refused(call.operator)
        turned = self._viewed(Call(view, call.args), run)
        turn_into(tensor, turned, call.operator, call.args)
        self._note(tensor, self.origins[turned])
        return tensor

    def _origin_of(self, tensor: Tensor) -> _Origin | None:
        return self.origins.get(tensor) if isinstance(tensor, DTensor) else None

    def _written(self, call: Call, run: Run) -> Any:
        """Run a write to some member of a family: all of its members have the new values."""
        found = [(tensor, self._origin_of(tensor)) for tensor in call.written()]
        known = [(tensor, origin) for tensor, origin in found if origin is not None]
        apart = any(origin.is_apart for _, origin in known)
        families = list({id(origin.family): origin.family for _, origin in known}.values())
        if apart:
            return self._write_through(call, families)
        result = run(call)
        for family in families:
            self._renew(family)
        return result

    def _write_through(self, call: Call, families: Sequence[_Family]) -> Any:
        """Run a write on whole tensors, of which the views that are written are views, and keep them."""
        if self._gathers is not None:
            self._gathers(call)
        wholes = {id(family): family.whole() for family in families}
        members = [(tensor, self._origin_of(tensor)) for tensor in call.tensors()]
        given = {
            id(tensor): origin.of(wholes[id(origin.family)])
            for tensor, origin in members
            if origin is not None and id(origin.family) in wholes
        }
        result = run_on_copies(call, given)
        for family in families:
            family.keep(wholes[id(family)])
        return result

    def _renew(self, family: _Family) -> None:
        if not family.has_apart:
            return
        family.has_apart = on_any_rank(len(family.apart) > 0, family.spec.mesh)
        if family.has_apart:
            family.renew(family.whole())
