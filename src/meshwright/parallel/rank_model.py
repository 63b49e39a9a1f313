"""One rank's stages of a model, with tensors addressed by their names in the full model, and its tokens of each
micro-batch.

Shapes: b batch, t tokens of a full sample, s tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collectives import all_gather_rows
from meshwright.models.contract.model_facts import Part
from meshwright.models.contract.task import Batch
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import shard_indices
from meshwright.parallel.private import joined_mesh
from meshwright.plan.run_plan import RunPlan, Stage

T = TypeVar("T")


class StagePart:
    """The module of one pipeline stage."""

    def __init__(self, plan: RunPlan, number: int, module: nn.Module) -> None:
        self.plan, self.number, self.module = plan, number, module

    @property
    def stage(self) -> Stage:
        """The stage in the plan."""
        return self.plan.stages[self.number]

    @property
    def part(self) -> Part:
        """The part of the model that the stage holds."""
        return part_of(self.plan, self.number)

    def keys(self) -> dict[str, str]:
        """Map parameter names in the module to names in the full model, in module order."""
        parameters = self.plan.parameters(self.stage)
        return {kind.full_name(p.name, layer): kind.key(p, layer) for kind, layer, p in parameters}

    def shared_parameter_keys(self) -> dict[str, str]:
        """Map names in the stage to the keys of the shared parameters that they are copies of."""
        return {name: key for key, sites in self.plan.shared for at, name in sites if at == self.number}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with their names in the full model."""
        keys = self.keys()
        for name, parameter in self.module.named_parameters():
            yield keys.get(name, name), parameter

    def named_buffers(self, *, saved_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers with their names in the full model."""
        wanted = {
            kind.full_name(buffer.name, layer)
            for kind, layer in self.plan.held(self.stage)
            for buffer in kind.buffers
            if buffer.saved or not saved_only
        }
        return ((name, buffer) for name, buffer in self.module.named_buffers() if name in wanted)


class RankModel:
    """All pipeline stages of a rank."""

    def __init__(self, parts: Mapping[int, StagePart]) -> None:
        self.parts = dict(parts)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters stage by stage, including all copies of shared ones."""
        return (parameter for part in self.parts.values() for parameter in part.module.parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with their names in the full model; shared parameters only once, from the first stage."""
        return _first_of_each(chain.from_iterable(part.named_parameters() for part in self.parts.values()))

    def named_buffers(self, *, saved_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers with their names in the full model, each name once."""
        parts = self.parts.values()
        return _first_of_each(chain.from_iterable(part.named_buffers(saved_only=saved_only) for part in parts))

    def get_parameter(self, name: str) -> nn.Parameter:
        """Return the parameter with this name in the full model."""
        return dict(self.named_parameters())[name]

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules of all stages."""
        return (module for part in self.parts.values() for module in part.module.modules())

    @property
    def training(self) -> bool:
        """True if all stages are in training mode."""
        return all(part.module.training for part in self.parts.values())

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode."""
        for part in self.parts.values():
            part.module.train(mode)


def _first_of_each(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    found: dict[str, T] = {}
    for name, value in named:
        found.setdefault(name, value)
    return iter(found.items())


def part_of(plan: RunPlan, number: int) -> Part:
    """Return the part of the model that a stage holds."""
    return Part(range(*plan.stages[number].layers), stage=number, num_stages=len(plan.stages))


class TokenShards:
    """The tokens of this rank: those that context parallelism assigns to it, and of these the part of the stream that
    it holds between tensor-parallel regions."""

    def __init__(self, plan: RunPlan, mesh: DeviceMesh | None, rank: int) -> None:
        cp, tp = plan.mesh.view("cp"), plan.mesh.view("tp") if plan.sequence_parallel else ()
        self._plan, self._is_sharded = plan, bool(cp)
        self._group = None if mesh is None or not cp else context_group(mesh, plan)
        self._rank = plan.mesh.line(rank, cp).index(rank)
        self._stream = (plan.mesh.line(rank, tp).index(rank), plan.mesh.size(*tp))

    def localize(self, batch: Batch) -> Batch:
        """Return this rank's tokens of a micro-batch; its conditions tell which these are."""
        return _LocalBatch(batch, tuple(self._localize(one) for one in batch.conditions), self._is_sharded)

    def _localize(self, condition: Any) -> Any:
        if not isinstance(condition, TokenLayout):
            return condition
        layout = replace(condition, stream=self._stream)
        if not self._is_sharded:
            return layout
        from meshwright.plan.context.layers import batch_shards

        return layout.on(batch_shards(self._plan, layout.documents), self._rank)

    def gather(self, out_bs: Tensor, batch: Batch) -> Tensor:
        """Return the outputs [b, t, …] of all tokens from those [b, s, …] of this rank's; all ranks must call this."""
        if not self._is_sharded:
            return out_bs
        layout = _layout_of(self.localize(batch).conditions)
        assert layout.shards is not None
        parts_Rbs = all_gather_rows(out_bs[None], group=self._group)
        token_t = torch.cat([shard_indices(shard) for shard in layout.shards], dim=-1).to(out_bs.device)
        out_bt = parts_Rbs.transpose(0, 1).flatten(1, 2)
        return take_tokens(out_bt, token_t.argsort(-1))


@dataclass(frozen=True)
class _LocalBatch:
    """A rank's tokens of a micro-batch."""

    batch: Batch
    conditions: tuple[Any, ...]
    is_sharded: bool

    @cached_property
    def _index(self) -> Tensor:
        return shard_indices(_layout_of(self.conditions).shard)

    @property
    def inputs(self) -> Tensor:
        """Inputs [b, s, …] of this rank's tokens."""
        return self._local(self.batch.inputs)

    @property
    def targets(self) -> Tensor:
        """Targets [b, s, …] of this rank's tokens."""
        return self._local(self.batch.targets)

    def _local(self, x_bt: Tensor) -> Tensor:
        return take_tokens(x_bt, self._index.to(x_bt.device)) if self.is_sharded else x_bt


def _layout_of(conditions: tuple[Any, ...]) -> TokenLayout:
    return next(one for one in conditions if isinstance(one, TokenLayout))


def take_tokens(x_bt: Tensor, index_s: Tensor) -> Tensor:
    """Return tokens of each sample."""
    if index_s.dim() == 1:
        return x_bt.index_select(1, index_s)
    return x_bt.take_along_dim(index_s.reshape(*index_s.shape, *[1] * (x_bt.dim() - 2)), dim=1)


def context_group(mesh: DeviceMesh, plan: RunPlan) -> ProcessGroup:
    """Return the process group of the ranks that share this rank's samples; all ranks must call this."""
    return joined_mesh(mesh, [plan.mesh.view("cp")]).get_group()
