"""Operators on DTensors whose dims are cut in an order other than that of the mesh's axes.

DTensor 2.13 takes placements for all that there is to know: `detach`, `t`, views, `copy_` from, and products with, a
tensor cut in the axes' order keep a rank's piece and forget which piece it is. Values change places, and nothing says
so. Within `for_dtensor` and `replicate_fallback` such operators are seen first:

- One that works element by element has no use for the order, as long as all its tensors have the same: those that
  have another one are moved, the operator runs on what looks like the default order, and its result gets the real one.
  So an optimizer's step on ordered parameters writes in place, and its states lie as they do.
- Any other gets copies of its inputs in the default order, and what it writes goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.dtensor_ops.private import (
    OpOverload,
    correct_aliasing,
    cut_in_order,
    own_tensor,
    same_layout,
    schema_of,
    tree_map_only,
)
from meshwright.dtensor_ops.run_replicated import Call, Run
from meshwright.reshard.dtensor import new_dtensor, spec_of
from meshwright.reshard.dtensor.redistribute_local import Redistributor, redistribute_detached

BY_ELEMENT = (
    "_foreach_", "_fused_", "copy_", "zero_", "fill_", "_to_copy", "detach", "alias", "clone", "zeros_like",
    "ones_like", "full_like", "empty_like",
)  # fmt: skip
"""Names that begin like this are computed element by element, like those that PyTorch tags so."""
LOOK_AT_ALL = ("_foreach_norm", "_foreach_max")
"""But for these."""

Replaced = dict[int, Tensor]
"""By the `id` of an operator's tensor, what it gets instead."""


def works_by_element(operator: OpOverload) -> bool:
    """Each element of its result depends on elements at the same place alone."""
    name = schema_of(operator).name.rpartition("::")[2]
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    return torch.Tag.pointwise in operator.tags or (name.startswith(BY_ELEMENT) and not name.startswith(LOOK_AT_ALL))


class Orders:
    """A layer that keeps to the orders of cuts.

    Args:
        mover: counts what is moved for views.
    """

    def __init__(self, mover: Redistributor) -> None:
        self._mover = mover

    def __call__(self, call: Call, run: Run) -> Any:
        """What `call` returns, by `run`."""
        if all(cut_in_order(tensor) for tensor in call.dtensors()):
            return run(call)
        if works_by_element(call.operator):
            columns = _columns(call)
            replaced = [_in_one_order(column, call) for column in columns]
            if None not in replaced:
                return _by_element(call, run, columns, {k: v for one in replaced if one for k, v in one.items()})
        return self._in_default_order(call, run)

    def _in_default_order(self, call: Call, run: Run) -> Any:
        """On copies of what is ordered; what is written goes back."""
        ordered = {id(t): t for t in call.dtensors() if not cut_in_order(t)}
        copies = {key: redistribute_detached(t, t.placements, None) for key, t in ordered.items()}
        self._mover.num_redistributions += len(copies)
        result = run(_with(call, copies))
        for tensor in call.written():
            if isinstance(tensor, DTensor) and id(tensor) in ordered:
                own_tensor(tensor).copy_(own_tensor(_moved_like(copies[id(tensor)], tensor)))
        given = {id(copies[key]): tensor for key, tensor in ordered.items()}
        return tree_map_only(Tensor, lambda x: given.get(id(x), x), result)


def _columns(call: Call) -> list[list[Tensor]]:
    """Tensors that an operator computes with each other: of one on lists, those at each place of the lists."""
    values = [*call.args, *call.kwargs.values()]
    lists = [value for value in values if isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value)]
    if not lists:
        return [call.tensors()]
    single = [value for value in values if isinstance(value, Tensor)]
    return [[x for x in (*(one[at] for one in lists if at < len(one)), *single) if isinstance(x, Tensor)]
            for at in range(max(map(len, lists)))]  # fmt: skip


def _lead(column: Sequence[Tensor], written: set[int]) -> DTensor | None:
    """The tensor whose order the others take: the one that is written, else the first with an order of its own."""
    dtensors = [x for x in column if isinstance(x, DTensor)]
    ordered = [x for x in dtensors if not cut_in_order(x)]
    if not ordered:
        return None
    return next((x for x in dtensors if id(x) in written), ordered[0])


def _in_one_order(column: Sequence[Tensor], call: Call) -> Replaced | None:
    """What each of these tensors is replaced by to have one order, passed off as the default one. None: it can't be."""
    written = {id(x) for x in call.written()}
    lead = _lead(column, written)
    if lead is None:
        return {}
    if any(placement.is_partial() for placement in lead.placements):
        return None
    found: Replaced = {}
    for x in column:
        if not isinstance(x, DTensor):
            if x.numel() != 1:
                return None
        elif x.shape == lead.shape and x.dim():
            if not same_layout(x, lead) and id(x) in written:
                return None
            local = own_tensor(x if same_layout(x, lead) else _moved_like(x, lead))
            found[id(x)] = new_dtensor(local, lead.device_mesh, lead.placements, None, like=x)
        elif x.dim() or not all(placement.is_replicate() for placement in x.placements):
            return None
    return found


def _by_element(call: Call, run: Run, columns: Sequence[Sequence[Tensor]], replaced: Replaced) -> Any:
    """The operator on tensors of one order, and its results with that order."""
    written = {id(x) for x in call.written()}
    leads = [_lead(column, written) for column in columns]
    given = {id(replaced[id(x)]): x for x in call.written() if id(x) in replaced}
    result = run(_with(call, replaced))

    def named(x: Any, lead: DTensor | None) -> Any:
        if id(x) in given:
            return given[id(x)]
        if lead is None or cut_in_order(lead) or not isinstance(x, DTensor):
            return x
        assert x.placements == lead.placements and x.shape == lead.shape, "an element stays where it is"
        return new_dtensor(own_tensor(x), x.device_mesh, x.placements, spec_of(lead).shard_order, like=x)

    if isinstance(result, list | tuple) and len(result) == len(leads):
        return type(result)(named(x, lead) for x, lead in zip(result, leads, strict=True))
    result = tree_map_only(Tensor, lambda x: named(x, leads[0]), result)
    return correct_aliasing(call.operator, call.args, call.kwargs, result) if call.operator.is_view else result


def _moved_like(x: DTensor, like: DTensor) -> DTensor:
    return redistribute_detached(x, like.placements, spec_of(like).shard_order)


def _with(call: Call, replaced: Mapping[int, Tensor]) -> Call:
    args, kwargs = tree_map_only(Tensor, lambda x: replaced.get(id(x), x), (call.args, call.kwargs))
    return Call(call.operator, args, kwargs)
