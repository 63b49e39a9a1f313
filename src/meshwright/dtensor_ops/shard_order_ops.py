"""Layer for operators on DTensors with a non-default shard order.

DTensor 2.13 considers only placements. `detach`, `t`, views, and `copy_` from or products with a tensor in the default
shard order keep a rank's shard but lose track of which shard it is, so values silently change position. Within
`for_dtensor` and `replicate_fallback`, such operators are intercepted:

- An elementwise operator does not depend on the order if all its tensors share one. Tensors with another order are
  redistributed, the operator runs on the shards as if in default order, and its result gets the actual order. An
  optimizer step on such parameters thus writes in place, and the optimizer states have the same order.
- Any other operator gets copies of its inputs in the default order, and its writes are copied back.
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
    has_default_order,
    has_same_layout,
    local_tensor,
    schema_of,
    tree_map_only,
)
from meshwright.dtensor_ops.run_replicated import OpCall, RunOp
from meshwright.reshard.dtensor import new_dtensor, spec_of
from meshwright.reshard.dtensor.redistribute import Redistributor, redistribute_detached

ELEMENTWISE_PREFIXES = (
    "_foreach_", "_fused_", "copy_", "zero_", "fill_", "_to_copy", "detach", "alias", "clone", "zeros_like",
    "ones_like", "full_like", "empty_like",
)  # fmt: skip
"""Name prefixes of elementwise operators, in addition to those that PyTorch tags as pointwise."""
REDUCTION_PREFIXES = ("_foreach_norm", "_foreach_max")
"""Name prefixes of reductions that match `ELEMENTWISE_PREFIXES` but are not elementwise."""

Replacements = dict[int, Tensor]
"""Replacements of an operator's tensors, by `id`."""


def is_elementwise(operator: OpOverload) -> bool:
    """Return True if each element of the result depends only on input elements at the same index."""
    name = schema_of(operator).name.rpartition("::")[2]
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    return torch.Tag.pointwise in operator.tags or (
        name.startswith(ELEMENTWISE_PREFIXES) and not name.startswith(REDUCTION_PREFIXES)
    )


class ShardOrders:
    """Layer that preserves shard orders; `mover` counts the redistributions, from which the view layer infers which
    views are gathered."""

    def __init__(self, mover: Redistributor) -> None:
        self._mover = mover

    def __call__(self, call: OpCall, run: RunOp) -> Any:
        """Compute `call` with `run` and preserve shard orders."""
        if all(has_default_order(tensor) for tensor in call.dtensors()):
            return run(call)
        if is_elementwise(call.operator):
            groups = _elementwise_groups(call)
            replacements = [_align_order(group, call) for group in groups]
            if None not in replacements:
                return _run_elementwise(call, run, groups, {k: v for r in replacements if r for k, v in r.items()})
        return self._run_in_default_order(call, run)

    def _run_in_default_order(self, call: OpCall, run: RunOp) -> Any:
        """Run `call` on copies in the default order and copy writes back."""
        ordered = {id(t): t for t in call.dtensors() if not has_default_order(t)}
        reordered = {key: redistribute_detached(t, t.placements, None) for key, t in ordered.items()}
        self._mover.num_redistributions += len(reordered)
        result = run(_with_tensors(call, reordered))
        for tensor in call.written_tensors():
            if isinstance(tensor, DTensor) and id(tensor) in ordered:
                local_tensor(tensor).copy_(local_tensor(_redistribute_like(reordered[id(tensor)], tensor)))
        originals = {id(reordered[key]): tensor for key, tensor in ordered.items()}
        return tree_map_only(Tensor, lambda x: originals.get(id(x), x), result)


def _elementwise_groups(call: OpCall) -> list[list[Tensor]]:
    """Group the tensors that an operator combines; a foreach operator combines those at the same list index."""
    values = [*call.args, *call.kwargs.values()]
    lists = [value for value in values if isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value)]
    if not lists:
        return [call.tensors()]
    single = [value for value in values if isinstance(value, Tensor)]
    return [[x for x in (*(items[i] for items in lists if i < len(items)), *single) if isinstance(x, Tensor)]
            for i in range(max(map(len, lists)))]  # fmt: skip


def _reference(group: Sequence[Tensor], written: set[int]) -> DTensor | None:
    """Return the tensor that sets the group's shard order: a written one, else the first with a non-default order."""
    dtensors = [x for x in group if isinstance(x, DTensor)]
    ordered = [x for x in dtensors if not has_default_order(x)]
    if not ordered:
        return None
    return next((x for x in dtensors if id(x) in written), ordered[0])


def _align_order(group: Sequence[Tensor], call: OpCall) -> Replacements | None:
    """Redistribute the tensors to one shard order, relabeled as the default; return None if impossible."""
    written = {id(x) for x in call.written_tensors()}
    reference = _reference(group, written)
    if reference is None:
        return {}
    if any(placement.is_partial() for placement in reference.placements):
        return None
    replacements: Replacements = {}
    for x in group:
        if not isinstance(x, DTensor):
            if x.numel() != 1:
                return None
        elif x.shape == reference.shape and x.dim():
            if not has_same_layout(x, reference) and id(x) in written:
                return None
            local = local_tensor(x if has_same_layout(x, reference) else _redistribute_like(x, reference))
            replacements[id(x)] = new_dtensor(local, reference.device_mesh, reference.placements, None, like=x)
        elif x.dim() or not all(placement.is_replicate() for placement in x.placements):
            return None
    return replacements


def _run_elementwise(call: OpCall, run: RunOp, groups: Sequence[Sequence[Tensor]], replacements: Replacements) -> Any:
    """Run an operator on tensors that share a shard order, and give the results that order."""
    written = {id(x) for x in call.written_tensors()}
    references = [_reference(group, written) for group in groups]
    originals = {id(replacements[id(x)]): x for x in call.written_tensors() if id(x) in replacements}
    result = run(_with_tensors(call, replacements))

    def restore_order(x: Any, reference: DTensor | None) -> Any:
        if id(x) in originals:
            return originals[id(x)]
        if reference is None or has_default_order(reference) or not isinstance(x, DTensor):
            return x
        assert x.placements == reference.placements and x.shape == reference.shape, "elementwise result moved"
        return new_dtensor(local_tensor(x), x.device_mesh, x.placements, spec_of(reference).shard_order, like=x)

    if isinstance(result, list | tuple) and len(result) == len(references):
        return type(result)(restore_order(x, reference) for x, reference in zip(result, references, strict=True))
    result = tree_map_only(Tensor, lambda x: restore_order(x, references[0]), result)
    return correct_aliasing(call.operator, call.args, call.kwargs, result) if call.operator.is_view else result


def _redistribute_like(x: DTensor, like: DTensor) -> DTensor:
    return redistribute_detached(x, like.placements, spec_of(like).shard_order)


def _with_tensors(call: OpCall, replacements: Mapping[int, Tensor]) -> OpCall:
    args, kwargs = tree_map_only(Tensor, lambda x: replacements.get(id(x), x), (call.args, call.kwargs))
    return OpCall(call.operator, args, kwargs)
