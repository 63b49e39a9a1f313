"""Compressed gradients and weights for any model under FSDP2, without the rest of Meshwright.

`two_stage_reduce_scatter` (qgZ) reduces inside each node first, then between nodes. Shards are summed inside a node at
the precision that its fast links allow, and only the sums, 1/L of the bytes, are sent between nodes in few bits
(ZeRO++; Wang et al. 2023, section 3.3), optionally with LoCo's error feedback (Xie et al. 2024). Errors are kept for
the sums only, 1/L of the gradient on each rank. `node_groups.TwoStagePlan` is the communication plan; each stage is
one all-to-all.

Shapes: r = N · L ranks in the group, N nodes with L ranks each, n elements per shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.alltoallv import all_to_all
from meshwright.comm.compression.catalogue import EXACT, Codec, Method, Use, find_method
from meshwright.comm.compression.fsdp_collectives import (
    AllReduceHook,
    CompressedAllGather,
    CompressedAllReduce,
    CompressedReduceScatter,
    ErrorFeedback,
    ErrorLayout,
    Nodes,
    Reduction,
    SentBytes,
    reduce_factor,
)  # fmt: skip
from meshwright.comm.kernels import dispatch
from meshwright.comm.node_groups import Links, Placement, TwoStageGroups, place
from meshwright.comm.private import shard_group
from meshwright.errors import ConfigError, LayoutError
from meshwright.log import get_logger

_log = get_logger(__name__)


ROOT = "the root"
"""Name of the root module in messages."""


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same shards of a model and train on different samples."""

    group: ProcessGroup
    sums: bool = False
    """Sum gradients over the replicas, as with FSDP2's `set_gradient_divide_factor`, instead of averaging them."""


Names = str | Mapping[str, str]


class Compression(ErrorFeedback):
    """Compressed collectives of a model; call `commit` or `discard` after every step."""

    def __init__(self, reductions: Mapping[str, Reduction], all_gathers: Mapping[str, CompressedAllGather]) -> None:
        self._reductions, self._all_gathers = reductions, all_gathers

    def parts(self) -> Mapping[str, ErrorFeedback]:
        return {f"{name}/": comm for name, comm in self._reductions.items()}

    def sent(self) -> SentBytes:
        """Return the number of bytes that this rank has sent since the start."""
        counts = [comm.sent for comm in self._reductions.values()]
        return sum(counts + [comm.sent for comm in self._all_gathers.values()], SentBytes())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state of this rank; modules missing from it start from zero."""
        super().load_state_dict(state)
        unused = [key for key in state if not key.startswith(tuple(self.parts()))]
        if unused and self._reductions:
            names = sorted({key.rpartition("/")[0] or ROOT for key in unused})
            _log.warning(
                "the saved error feedback of %s is not used: the model compresses no gradients under %s",
                ", ".join(names), "this name" if len(names) == 1 else "these names",
            )  # fmt: skip


def compress(
    model: nn.Module,
    *,
    gradients: Names = EXACT,
    weights: Names = EXACT,
    inside_node: Names = Codec.INT8.value,
    nodes: Sequence[int] | None = None,
    placement: Placement | None = None,
    replicas: Replicas | None = None,
) -> Compression:
    """Compress the gradients and weights that the FSDP2 modules of `model` communicate.

    A module that is sharded over several nodes, with the same number of ranks on each, reduces gradients in two stages:
    inside the nodes with method `inside_node`, then between them with method `gradients`. All ranks must call this,
    because it creates process groups. If ranks hold different numbers of model parts, call `place` on all ranks first,
    and pass its result to `compress` for each part.

    Rounding depends on neighbouring elements, so replicas of a parameter over another axis (norms under tensor
    parallelism) get different gradients: average them after the backward, before clipping. Error feedback is stored by
    position: if steps leave different parameters unused, call FSDP2's `set_reduce_scatter_unused_params(True)`. A
    second call replaces the collectives of the first, except with `exact`: FSDP2 cannot unset a custom collective.

    Args:
        model: model with `fully_shard` applied.
        gradients: a method of `catalogue.names(Use.GRADIENTS)`, such as loco4 (4 bits with error feedback); or one for
            each FSDP2 module, by its name in `model`, which is "" for the model itself. So are the others.
        weights: a method of `catalogue.names(Use.WEIGHTS)` for the all-gather; sharded weights are unchanged.
        inside_node: a method of `catalogue.names(Use.INSIDE_NODE)` for the first of two stages;
            exact-via-all-to-all is exact in both.
        nodes: node of each global rank; detected from the hosts if None.
        placement: result of `place`, instead of `nodes`; other ranks then need not call `compress`.
        replicas: replicas to reduce gradients over as well (HSDP), each sharded over its own mesh. With FSDP2's native
            HSDP on a 2-dim mesh, gradients are compressed within a replica only.

    Raises:
        ConfigError: a method is unknown, a mapping has other names than the FSDP2 modules, or both `nodes` and
            `placement` are given.
        CollectiveError: another rank does not call this within the timeout of the default group.
        LayoutError: `model` has no FSDP2 module, or `nodes` or `placement` does not match it.
    """
    options = {Use.GRADIENTS: gradients, Use.WEIGHTS: weights, Use.INSIDE_NODE: inside_node}
    modules = _checked_modules(model, options, places_twice=nodes is not None and placement is not None)
    of_gradients, of_weights, of_inside = (_methods(names, modules, use) for use, names in options.items())
    sends, gathers = (any(one.name != EXACT for one in of.values()) for of in (of_gradients, of_weights))
    if not sends and not gathers:
        return Compression({}, {})
    placement = placement or place([model] if sends else [], nodes=nodes)
    reductions, all_gathers = dict[str, Reduction](), {}
    for name, module in modules.items():
        method = of_gradients[name]
        if method.name != EXACT:
            codec = method.codec_inside_node(of_inside[name].codec)
            reductions |= _compress_gradients(name, module, method, codec, placement, replicas)
        if of_weights[name].name != EXACT:
            all_gathers[name] = CompressedAllGather(name or ROOT, of_weights[name], nodes=placement.nodes)
            module.set_custom_all_gather(all_gathers[name])  # type: ignore[arg-type]
    return Compression(reductions, all_gathers)


def _checked_modules(model: nn.Module, options: Mapping[Use, Names], *, places_twice: bool) -> dict[str, FSDPModule]:
    for use, names in options.items():
        for name in [names] if isinstance(names, str) else names.values():
            find_method(name, use)
    if places_twice:
        what = "nodes and placement both define the node of each rank"
        rule = "a placement already contains the nodes"
        fix = "call place(parts, nodes=nodes), and compress without nodes"
        raise ConfigError(what, where="meshwright.comm.compress, nodes", rule=rule, fix=fix)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        what = "the model has no FSDP2 module"
        rule, fix = "compression replaces FSDP2's collectives", "call torch.distributed.fsdp.fully_shard(model) first"
        raise LayoutError(what, where="meshwright.comm.compress", rule=rule, fix=fix)
    return modules


def _compress_gradients(
    name: str, module: FSDPModule, method: Method, inside: Codec, placement: Placement, replicas: Replicas | None
) -> dict[str, Reduction]:
    """Set the collectives that reduce a module's gradients, and return them by name in the state dict.

    A reduce-scatter has two stages if its placement allows it.
    """
    group = shard_group(module)
    stages = None if group is None else placement.two_stage_groups(group)
    comm = CompressedReduceScatter(name or ROOT, method, nodes=placement.nodes)
    if stages is not None:
        comm = TwoStageReduceScatter(name or ROOT, method, inside=inside, stages=stages, nodes=placement.nodes)
    module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    if replicas is None:
        return {name: comm}
    all_reduce = CompressedAllReduce(name or ROOT, method, nodes=placement.nodes)
    module.set_all_reduce_hook(
        AllReduceHook(all_reduce, replicas.group, 1.0 if replicas.sums else 1.0 / replicas.group.size())
    )
    return {name: comm, f"{name}@replicas": all_reduce}


def _methods(names: Names, modules: Collection[str], use: Use) -> dict[str, Method]:
    """Return the method of each module.

    Raises:
        ConfigError: a mapping lacks a module, or has a name that is none.
    """
    if not isinstance(names, str) and (wrong := sorted(names.keys() ^ modules)):
        what = "is not an FSDP2 module" if wrong[0] in names else f"has no method in {use.value}"
        full = {name: names.get(name, EXACT) for name in modules}
        raise ConfigError(
            f"{wrong[0] or ROOT} {what}",
            where=f"meshwright.comm.compress, {use.value}",
            rule=f"a mapping has a method for each FSDP2 module of the model: {', '.join(map(repr, modules))}",
            fix=f"{use.value}={full}",
        )
    return {module: find_method(names if isinstance(names, str) else names[module], use) for module in modules}


class TwoStageReduceScatter(CompressedReduceScatter):
    """Reduce-scatter that sends encoded shards inside each node, and encoded sums between nodes."""

    def __init__(
        self, name: str, method: Method, *, inside: Codec, stages: TwoStageGroups, nodes: Nodes = None
    ) -> None:
        """Create the reduce-scatter of one FSDP2 module.

        Args:
            name, method, nodes: as in `CompressedReduction`, for the sums between nodes.
            inside: codec of the shards inside a node; rotated if it is quantised.
            stages: two-stage groups of the module's shard group.
        """
        super().__init__(name, method, nodes=nodes)
        self._inside, self._groups = inside, stages
        plan = stages.plan
        self._shards = plan.shards_of(stages.rank)
        self._order: Tensor | None = None
        self._links_inside = Links(inside=plan.num_local - 1)
        self._links_between = Links(between=plan.num_nodes - 1, num_nodes=plan.num_nodes)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [n] with this rank's shard of the reduced `input_tensor` [r · n]; both contiguous."""
        plan, num_ranks = self._groups.plan, group.size()
        assert num_ranks == len(plan.ranks), "the stages belong to another group"
        shards_rn = input_tensor.view(num_ranks, -1)
        self.count_exact(input_tensor, group)

        # Reorder after encoding, when there are fewer bytes to copy.
        rotates = self._inside.is_quantised
        payload = dispatch.encode(shards_rn, self._inside, rotate=rotates).index_select(0, self._order_on(shards_rn))
        self.sent.count_direct(payload, self._links_inside)
        bytes_per_rank = [plan.num_nodes] * plan.num_local
        received = all_to_all(
            payload, send_splits=bytes_per_rank, recv_splits=bytes_per_rank, group=self._groups.inside
        )

        payload = self._encode_sums(received.view(plan.num_local, plan.num_nodes, -1), shards_rn)
        self.sent.count_direct(payload, self._links_between)
        splits = [1] * plan.num_nodes
        received = all_to_all(payload, send_splits=splits, recv_splits=splits, group=self._groups.between)
        factor = reduce_factor(op, num_ranks)
        dispatch.decode_sum(received, self._codec, out=output_tensor, rotate=self._rotate, multiplier=factor)

    def _encode_sums(self, payloads: Tensor, shards_rn: Tensor) -> Tensor:
        """Sum the payloads received inside the node, [L, N, bytes], and encode the sums to send, [N, bytes]."""
        layout = ErrorLayout(payloads.shape[1], shards_rn.shape[1], self._shards)
        rotates = self._inside.is_quantised
        if self._feedback and rotates:
            state = self._feedback.state_for(layout, shards_rn.device)
            return state.requantise(payloads, self._inside, self._codec, rotate=rotates)
        # Exact payloads keep the gradients' dtype in both stages.
        is_exact = Codec.EXACT in (self._inside, self._codec)
        dtype = shards_rn.dtype if is_exact else torch.float32
        sums = torch.empty(layout.num_blocks, layout.num_elements, dtype=dtype, device=shards_rn.device)
        dispatch.decode_sums(payloads, self._inside, out=sums, rotate=rotates)
        if self._feedback:
            return self._feedback.state_for(layout, shards_rn.device).quantise(sums, self._codec)
        return dispatch.encode(sums, self._codec, rotate=self._rotate)

    def _order_on(self, x: Tensor) -> Tensor:
        """Return the send order of the shards as a tensor on the device of `x`."""
        if self._order is None:
            self._order = torch.tensor(self._groups.plan.send_order(), device=x.device)
        return self._order
