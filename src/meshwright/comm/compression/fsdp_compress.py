"""Compressed gradients and weights for any model under FSDP2, without the rest of Meshwright."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.compression.catalogue import EXACT, Codec, Method, Use, find_method
from meshwright.comm.compression.compressed_all_reduce import AllReduceHook, CompressedAllReduce
from meshwright.comm.compression.error_feedback_state import starting_with
from meshwright.comm.compression.fsdp_collectives import CompressedAllGather, CompressedReduceScatter, SentBytes
from meshwright.comm.compression.two_stage_reduce_scatter import TwoStageReduceScatter
from meshwright.comm.node_groups import Placement, place
from meshwright.comm.private import shard_group
from meshwright.errors import ConfigError, LayoutError
from meshwright.log import get_logger

_log = get_logger(__name__)


ROOT = "the root"
"""The module whose name is empty, in messages."""


@dataclass(frozen=True)
class Replicas:
    """Ranks that have the same shards of a model, and other samples."""

    group: ProcessGroup
    sums: bool = False
    """Gradients are added up over them, as `set_gradient_divide_factor` makes FSDP2 do; else their mean is taken."""


Names = str | Mapping[str, str]
"""A method for all FSDP2 modules, or one for each by its name in the model."""


class Reduction(Protocol):
    """What sums gradients over ranks, and may keep errors of it."""

    @property
    def sent(self) -> SentBytes:
        """Bytes that this rank has handed to others."""

    def commit(self) -> None:
        """The step was taken."""

    def discard(self) -> None:
        """The step is skipped."""

    def follow_loss_scale(self, loss_scale: float) -> None:
        """The next gradients are multiplied by it."""

    def state_dict(self) -> dict[str, Tensor]:
        """The errors of this rank."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from saved ones."""


class Compression:
    """The compressed collectives of a model. A training says after every step whether it was taken."""

    def __init__(self, reductions: Mapping[str, Reduction], all_gathers: Mapping[str, CompressedAllGather]) -> None:
        self._reductions, self._all_gathers = reductions, all_gathers

    def commit(self) -> None:
        """The optimizer has taken the step: its errors are carried into the next."""
        for comm in self._reductions.values():
            comm.commit()

    def discard(self) -> None:
        """The step is skipped, for an overflow: its errors are forgotten."""
        for comm in self._reductions.values():
            comm.discard()

    def follow_loss_scale(self, loss_scale: float) -> None:
        """The losses of the next step are multiplied by `loss_scale`, and so are the errors that go into its gradients.

        Call it before each step's backward where there is a `GradScaler`, with its `get_scale()`.

        Raises:
            RunError: it changes before the last step was committed or discarded.
        """
        for comm in self._reductions.values():
            comm.follow_loss_scale(loss_scale)

    def sent(self) -> SentBytes:
        """Bytes that this rank has handed to others since the start."""
        counts = [comm.sent for comm in self._reductions.values()]
        counts += [comm.sent for comm in self._all_gathers.values()]
        return sum(counts, SentBytes())

    def state_dict(self) -> dict[str, Tensor]:
        """The errors of this rank, which no other rank has."""
        return {
            f"{name}/{key}": value
            for name, comm in self._reductions.items()
            for key, value in comm.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of this rank; a module that it doesn't have starts from zero."""
        left = set(state)
        for name, comm in self._reductions.items():
            own = starting_with(f"{name}/", state)
            comm.load_state_dict(own)
            left -= {f"{name}/{key}" for key in own}
        if left and self._reductions:
            names = sorted({key.rpartition("/")[0] or ROOT for key in left})
            _log.warning(
                "the saved error feedback of %s is not used: the model sends no gradients under %s",
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
    """Let the FSDP2 modules of `model` send gradients and weights in fewer bits.

    A module that is sharded over several nodes, with equally many ranks on each, reduces gradients in two stages:
    inside the nodes as `inside_node` says, then between them as `gradients` says. All ranks of the world call it, as
    process groups are made; ranks that hold different numbers of parts of a model call `place` together before, and
    `compress` for each part with what it gave.

    Rounding depends on neighbouring elements, so replicas of a parameter over another axis (norms under tensor
    parallel) get different gradients: average them after the backward, before clipping. Error feedback is kept by
    position: where steps leave different parameters unused, call FSDP2's `set_reduce_scatter_unused_params(True)`.
    A second call replaces what the first set, except where it says `exact`: FSDP2 takes no custom collective back.

    Args:
        model: with `fully_shard` applied.
        gradients: a method of `catalogue.names(Use.GRADIENTS)`, such as loco4 (4 bits with error feedback); or one for
            each FSDP2 module, by its name in `model`.
        weights: one of `catalogue.names(Use.WEIGHTS)`, by which they are gathered; masters stay as they are.
        inside_node: one of `catalogue.names(Use.INSIDE_NODE)`, of gradients in the first of two stages;
            exact-via-all-to-all is exact in both.
        nodes: the node of each rank of the world, instead of the hosts that they are on.
        placement: what `place` gave, instead of `nodes`; then no other rank needs to call.
        replicas: to reduce gradients over too, of a model that is sharded over the mesh of one replica: this is HSDP.
            Under FSDP2's own, with a mesh of two dims, gradients are compressed within a replica only.

    Raises:
        ConfigError: a name that there is not, or both `nodes` and `placement`.
        LayoutError: there is no FSDP2 module in `model`; or `nodes` or `placement` does not fit it.
    """
    _check_methods(gradients, weights, inside_node)
    _check_once(nodes, placement)
    modules = _fsdp_modules(model)
    of_gradients = _methods(gradients, modules, Use.GRADIENTS)
    of_weights = _methods(weights, modules, Use.WEIGHTS)
    of_inside = _methods(inside_node, modules, Use.INSIDE_NODE)
    sends = [method.name != EXACT for method in of_gradients.values()]
    if not any(sends) and all(method.name == EXACT for method in of_weights.values()):
        return Compression({}, {})
    if placement is None:
        placement = place([model] if any(sends) else [], nodes=nodes)
    reductions: dict[str, Reduction] = {}
    all_gathers = {}
    for name, module in modules.items():
        method = of_gradients[name]
        if method.name != EXACT:
            inside = method.codec_inside_node(of_inside[name].codec)
            reductions |= _compress_gradients(name, module, method, inside, placement, replicas)
        if of_weights[name].name != EXACT:
            all_gathers[name] = _all_gather(name, of_weights[name], placement)
            module.set_custom_all_gather(all_gathers[name])  # type: ignore[arg-type]
    return Compression(reductions, all_gathers)


def _compress_gradients(
    name: str, module: FSDPModule, method: Method, inside: Codec, placement: Placement, replicas: Replicas | None
) -> dict[str, Reduction]:
    """Set the collectives that reduce a module's gradients, and return them by name."""
    comm = _reduce_scatter(name, module, method, inside, placement)
    module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    if replicas is None:
        return {name: comm}
    hook = _all_reduce(name, replicas, method, placement)
    module.set_all_reduce_hook(hook)
    return {name: comm, f"{name}@replicas": hook.all_reduce}


def _check_methods(gradients: Names, weights: Names, inside_node: Names) -> None:
    for names, use in ((gradients, Use.GRADIENTS), (weights, Use.WEIGHTS), (inside_node, Use.INSIDE_NODE)):
        for name in [names] if isinstance(names, str) else names.values():
            find_method(name, use)


def _methods(names: Names, modules: Iterable[str], use: Use) -> dict[str, Method]:
    """The method of each module."""
    return {module: find_method(names if isinstance(names, str) else names[module], use) for module in modules}


def _fsdp_modules(model: nn.Module) -> dict[str, FSDPModule]:
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise LayoutError(
            "the model has no FSDP2 module",
            where="meshwright.comm.compress",
            rule="what is compressed are FSDP2's collectives",
            fix="torch.distributed.fsdp.fully_shard(model) first",
        )
    return modules


def _all_gather(name: str, method: Method, placement: Placement) -> CompressedAllGather:
    return CompressedAllGather(name or ROOT, method.codec, rotate=method.rotate, nodes=placement.nodes)


def _reduce_scatter(
    name: str, module: FSDPModule, method: Method, inside: Codec, placement: Placement
) -> CompressedReduceScatter:
    """In two stages where the placement of the module's group allows it."""
    group = shard_group(module)
    stages = None if group is None else placement.stages_of(group)
    if stages is None:
        return CompressedReduceScatter(
            name or ROOT, method.codec, rotate=method.rotate, feedback=method.feedback, nodes=placement.nodes
        )
    return TwoStageReduceScatter(
        name or ROOT,
        method.codec,
        inside=inside,
        stages=stages,
        nodes=placement.nodes,
        rotate=method.rotate,
        feedback=method.feedback,
    )


def _all_reduce(name: str, replicas: Replicas, method: Method, placement: Placement) -> AllReduceHook:
    comm = CompressedAllReduce(
        name or ROOT, method.codec, rotate=method.rotate, feedback=method.feedback, nodes=placement.nodes
    )
    return AllReduceHook(comm, replicas.group, 1.0 if replicas.sums else 1.0 / replicas.group.size())


def _check_once(nodes: Sequence[int] | None, placement: Placement | None) -> None:
    if nodes is not None and placement is not None:
        raise ConfigError(
            "nodes and placement both say where the ranks are",
            where="meshwright.comm.compress, nodes",
            rule="a placement has the nodes that it was made for",
            fix="place(parts, nodes=nodes), and compress without nodes",
        )
