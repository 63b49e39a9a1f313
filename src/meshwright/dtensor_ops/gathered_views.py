"""View semantics for gathered views, which share no memory with their base tensor.

For a slice along a sharded dim, a diagonal or an unfold, DTensor (or the fallback) gathers the tensor first, and the
result is a view of the gathered copy. Writes to the view would silently miss the base tensor, and later writes to the
base would not show in the view. Within `for_dtensor` and `replicate_fallback`, such views behave as on one device:

- A write to a gathered view runs on the gathered base tensor, and each rank keeps its shard. This costs one gather.
- After a write to the base, through any alias, its live gathered views are refreshed. This costs one gather.

All ranks agree on which views are gathered, because gathering communicates. They may disagree on which views are still
alive, since each rank runs garbage collection at its own time, so the ranks reach consensus before they gather.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.dtensor_ops.private import (
    OpOverload,
    become_view,
    gather_full,
    is_alias,
    is_view,
    local_tensor,
    memory_key,
    out_of_place_view,
    schema_of,
    wrap_local,
)
from meshwright.dtensor_ops.run_replicated import CONTEXT, OpCall, OperatorError, RunOp, run_replicated, shard_like
from meshwright.reshard.dtensor import DTensorSpec, spec_of
from meshwright.reshard.dtensor.redistribute import Redistributor

OnGather = Callable[[OpCall], None]
"""Callback invoked with an operator call before a full tensor is gathered for it."""
Origins = MutableMapping[DTensor, "_ViewOrigin"]
"""View origins by live tensor."""
FamiliesByMemory = dict[int, tuple[StorageWeakRef, list["_ViewFamily"]]]
"""Families by the memory that a DTensor and its views share: that of the DTensors themselves, which holds no values."""


@dataclass(frozen=True)
class _ViewOp:
    """View operator without its tensor argument, and the result's index if the operator returns several."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None

    def apply(self, tensor: Tensor) -> Tensor:
        result = self.operator(tensor, *self.args, **self.kwargs)
        view: Tensor = result if self.index is None else result[self.index]
        return view


@dataclass(eq=False)
class _ViewFamily:
    """Base tensor and its views. Holds the local tensor, since the DTensor would keep its autograd graph alive."""

    local: Tensor
    spec: DTensorSpec
    gathered_views: Origins = field(default_factory=WeakIdKeyDictionary)
    """Origins of the gathered views that are alive on this rank."""
    has_gathered_views: bool = False
    """True if gathered views may be alive on some rank; the same on all ranks."""

    def tensor(self) -> DTensor:
        return wrap_local(self.local, self.spec)

    def gather_base(self) -> Tensor:
        """Gather the full base tensor on this rank as a copy."""
        full = gather_full(self.tensor())
        return full.clone() if is_alias(full, self.local) else full

    def write_back(self, full: Tensor) -> None:
        """Copy `full` into this rank's shard of the base tensor and into the gathered views."""
        self.local.copy_(shard_like(full, self.tensor()))
        self.refresh_views(full)

    def refresh_views(self, full: Tensor) -> None:
        """Update the gathered views from the full base tensor."""
        for view, origin in list(self.gathered_views.items()):
            local_tensor(view).copy_(shard_like(origin.apply(full), view))


@dataclass(frozen=True, eq=False)
class _ViewOrigin:
    """Base of a view, and the view operators that produce the view from it."""

    family: _ViewFamily
    memory: torch.UntypedStorage
    """Memory of the base, kept alive so that all ranks find the same families for it."""
    view_ops: tuple[_ViewOp, ...] = ()
    is_gathered: bool = False

    def apply(self, full: Tensor) -> Tensor:
        """Return the same view of another tensor with the base's shape."""
        for view_op in self.view_ops:
            full = view_op.apply(full)
        return full

    def is_view_on_one_device(self) -> bool:
        """Return True if the result would alias its base on one device; `reshape`, for example, may copy."""
        shape, stride, dtype = self.family.spec.tensor_meta  # type: ignore[misc]
        base = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return is_alias(self.apply(base), base)


class ViewRegistry:
    """Gathered views, their bases, and views of either that were made after the first of them.

    Attributes:
        origins: origins of views and of their bases.
        families: families whose memory is alive.
        is_tracking: True once a view has been gathered: from then on, all views and writes must be followed. Ranks
            collect garbage at their own time, so this cannot end with the last gathered view.
    """

    def __init__(self) -> None:
        self.is_tracking = False
        self.origins: Origins = WeakIdKeyDictionary()
        self.families: FamiliesByMemory = {}

    def add(self, base: DTensor) -> _ViewOrigin:
        """Return the origin of a tensor as the base of a new family."""
        self.is_tracking = True
        memory = base.untyped_storage()
        family = _ViewFamily(local_tensor(base), spec_of(base))
        reference = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        _, families = self.families.setdefault(memory_key(memory), (reference, []))
        families.append(family)
        origin = self.origins[base] = _ViewOrigin(family, memory)
        return origin

    def families_of(self, tensor: DTensor) -> list[_ViewFamily]:
        """Return the families of the tensor's memory: views may have been made before any view was tracked."""
        self.drop_expired()
        _, families = self.families.get(memory_key(tensor.untyped_storage()), (None, []))
        origin = self.origins.get(tensor)
        return families if origin is None or origin.family in families else [*families, origin.family]

    def drop_expired(self) -> None:
        """Forget the families, and free the bases, of which no tensor is alive."""
        expired = [key for key, (memory, _) in self.families.items() if memory.expired()]  # type: ignore[no-untyped-call]
        for key in expired:
            del self.families[key]


class GatheredViews:
    """Layer that gives gathered views the semantics of views. `mover` counts this thread's redistributions, `on_gather`
    is called before a write that gathers, and may raise, and `registry` holds the views of an enclosing context."""

    def __init__(
        self, mover: Redistributor, on_gather: OnGather | None = None, registry: ViewRegistry | None = None
    ) -> None:
        self.registry = registry or ViewRegistry()
        self._mover = mover
        self._on_gather = on_gather

    def is_tracking(self) -> bool:
        """Return True if views and writes must pass this layer, because a gathered view may be alive."""
        return self.registry.is_tracking

    def __call__(self, call: OpCall, run: RunOp) -> Any:
        """Execute `call` with `run` and track views."""
        if call.operator.is_view:
            return self._run_view(call, run)
        if torch.Tag.inplace_view in call.operator.tags:
            return self._run_inplace_view(call, run)
        if self.is_tracking() and schema_of(call.operator).is_mutable:
            return self._run_write(call, run)
        return run(call)

    def _run_view(self, call: OpCall, run: RunOp) -> Any:
        """Run a view operator and record the origins of its results."""
        before = self._mover.num_redistributions
        result = run(call)
        base = call.args[0] if call.args else None
        if not isinstance(base, DTensor):
            return result
        is_gathered = self._mover.num_redistributions > before
        self.registry.drop_expired()
        if not is_gathered and not self.is_tracking():
            return result
        origin = self.registry.origins.get(base) or self.registry.add(base)
        is_gathered = is_gathered or origin.is_gathered
        for index, view in [(None, result)] if isinstance(result, Tensor) else enumerate(result):
            if view is not base and isinstance(view, DTensor):
                view_op = _ViewOp(call.operator, call.args[1:], call.kwargs, index)
                view_ops = (*origin.view_ops, view_op)
                self._record(view, _ViewOrigin(origin.family, origin.memory, view_ops, is_gathered))
        return result

    def _record(self, view: DTensor, origin: _ViewOrigin) -> None:
        if origin.is_gathered and not origin.is_view_on_one_device():
            return
        self.registry.origins[view] = origin
        if origin.is_gathered:
            origin.family.gathered_views[view] = origin
            origin.family.has_gathered_views = True

    def _run_inplace_view(self, call: OpCall, run: RunOp) -> Any:
        """Run an in-place view operator such as `t_`; DTensor alone would leave the tensor's shape unchanged."""
        view_operator, tensor = out_of_place_view(call.operator), call.args[0] if call.args else None
        if view_operator is None or call.kwargs or not isinstance(tensor, DTensor):
            return run(call)
        if tensor.requires_grad and is_view(tensor):
            raise OperatorError(
                f"{call.operator} transforms a view in place, which its gradient would not undo",
                where=CONTEXT,
                rule="autograd replays a view of a DTensor as it was first created",
                fix="use the out-of-place operator",
            )
        view = self._run_view(OpCall(view_operator, call.args), run)
        become_view(tensor, view, call.operator, call.args)
        origin = self.registry.origins.get(view)
        if origin is not None:
            self._record(tensor, origin)
        return tensor

    def _run_write(self, call: OpCall, run: RunOp) -> Any:
        """Run an operator that writes to a base or a view, and update the base's other views."""
        written = [tensor for tensor in call.written_tensors() if isinstance(tensor, DTensor)]
        known = [origin for tensor in written if (origin := self.registry.origins.get(tensor)) is not None]
        families = list({id(origin.family): origin.family for origin in known}.values())
        is_gathered = any(origin.is_gathered for origin in known)
        result = self._write_through(call, families) if is_gathered else run(call)
        touched = {id(family): family for tensor in written for family in self.registry.families_of(tensor)}
        for origin in known:
            _, others = self.registry.families.get(memory_key(origin.memory), (None, []))
            touched.update({id(family): family for family in others})
        for family in touched.values():
            if not is_gathered or family not in families:
                self._refresh(family)
        return result

    def _write_through(self, call: OpCall, families: Sequence[_ViewFamily]) -> Any:
        """Run a write to gathered views on the gathered base tensors, then write the bases back."""
        if self._on_gather is not None:
            self._on_gather(call)
        full_bases = {id(family): family.gather_base() for family in families}
        full_by_id = {}
        for tensor in call.dtensors():
            origin = self.registry.origins.get(tensor)
            if origin is not None and id(origin.family) in full_bases:
                full_by_id[id(tensor)] = origin.apply(full_bases[id(origin.family)])
        result = run_replicated(call, full_by_id)
        for family in families:
            family.write_back(full_bases[id(family)])
        return result

    def _refresh(self, family: _ViewFamily) -> None:
        if not family.has_gathered_views:
            return
        family.has_gathered_views = any_rank(len(family.gathered_views) > 0, family.spec.mesh)
        if family.has_gathered_views:
            family.refresh_views(family.gather_base())


def any_rank(condition: bool, mesh: DeviceMesh) -> bool:
    """Return True if `condition` holds on any rank of the mesh. Must be called on all ranks."""
    return all_reduce_int(int(condition), mesh, "max") == 1


def all_reduce_int(value: int, mesh: DeviceMesh, op: str) -> int:
    """Return the minimum ("min") or maximum ("max") of `value` over all ranks of the mesh."""
    local = torch.tensor([value], device=mesh.device_type)
    return int(DTensor.from_local(local, mesh, [Partial(op)] * mesh.ndim, run_check=False).full_tensor().item())
