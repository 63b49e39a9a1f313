"""The optimizer of a run: parameters in groups with their settings and states, as the plan says, and one update of all.

States are allocated up front, so that checkpoints at every step, including step 0, contain the same names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshwright.config.resolve import group_settings
from meshwright.config.schema import TrainConfig
from meshwright.mesh.local_shards import local_box, num_shards, sharded_zeros, to_local
from meshwright.optim.catalogue import find_optimizer
from meshwright.optim.contract import MatrixOptimizer, Optimizer, Settings, Slot
from meshwright.optim.role import Role
from meshwright.parallel.rank_model import RankModel, StagePart
from meshwright.plan.run_plan import RunPlan

if TYPE_CHECKING:
    from meshwright.optim.owner_updates import OwnerUpdates, Site


@dataclass(eq=False)
class Member:
    """A parameter of a group."""

    site: Site
    role: Role
    parameter: nn.Parameter
    state: dict[str, Tensor]


@dataclass(eq=False)
class Group:
    """Parameters that are updated with the same settings.

    Args:
        optimizer: updates them.
        peak: their highest learning rate.
        settings: their settings, with the learning rate of the step.
        members: the parameters.
    """

    optimizer: Optimizer
    peak: float
    settings: Settings
    members: list[Member] = field(default_factory=list)


class RunOptimizer:
    """Optimizer of a rank's stages."""

    def __init__(self, model: RankModel, plan: RunPlan, train: TrainConfig, *, rank: int) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """States by name, of all parameters that are trained."""
        self._peak = train.lr
        by_settings: dict[tuple[str, float, float], Group] = {}
        for part in model.parts.values():
            for member, name, peak, decay in _members(part, train):
                key = (name, peak, decay)
                if key not in by_settings:
                    settings = Settings(peak, decay, train.beta1, train.beta2, train.eps, train.momentum)
                    by_settings[key] = Group(find_optimizer(name), peak, settings)
                by_settings[key].members.append(member)
                self.state[member.parameter] = member.state
        self.groups = list(by_settings.values())
        self._owners = _owner_updates(plan, rank, self.groups)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters that have a gradient; those from whole matrices on all ranks of their stages together.

        Args:
            lr: learning rate of the step for parameters whose peak is `train.lr`; others have the same share of theirs.
        """
        whole: dict[Site, tuple[Slot, Settings]] = {}
        for group in self.groups:
            settings = replace(group.settings, lr=lr * (group.peak / self._peak))
            if isinstance(group.optimizer, MatrixOptimizer):
                whole |= {member.site: (_slot(member), settings) for member in group.members}
            elif slots := [_slot(member) for member in group.members if member.parameter.grad is not None]:
                group.optimizer.update(slots, settings)
        if self._owners is not None:
            self._owners.run(whole)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for parameter in self.state:
            parameter.grad = None


def _members(part: StagePart, train: TrainConfig) -> Iterator[tuple[Member, str, float, float]]:
    """Yield the trained parameters of a stage with what updates them, their peak learning rate and weight decay."""
    plan = part.plan
    for kind, layer, planned in plan.parameters(part.stage):
        name = kind.full_name(planned.name, layer)
        if not planned.trained:
            continue
        parameter, update = part.module.get_parameter(name), plan.optimizer.update_of(planned.role)
        state = {one.name: sharded_zeros(parameter, one.dims, getattr(torch, one.dtype)) for one in update.states}
        key, num_dims = kind.key(planned, layer), len(planned.shape)
        peak, decay = group_settings(train, key, planned.role, num_dims=num_dims)
        member = Member((part.number, name), Role(planned.role), parameter, state)
        yield member, update.optimizer, peak, decay


def _slot(member: Member) -> Slot:
    parameter = member.parameter
    # Ranks must move the same matrices, so one without a gradient, such as an expert without tokens, has zeros.
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return Slot(
        name=member.site[1],
        role=member.role,
        shape=tuple(parameter.shape),
        parameter=to_local(parameter.detach()),
        gradient=to_local(gradient),
        state={name: to_local(state) for name, state in member.state.items()},
    )


def _owner_updates(plan: RunPlan, rank: int, groups: list[Group]) -> OwnerUpdates | None:
    """Return the updates from whole matrices, or None if the optimizer needs none."""
    optimizer = find_optimizer(plan.optimizer.name)
    if not isinstance(optimizer, MatrixOptimizer):
        return None
    from meshwright.optim.owner_updates import OwnerUpdates  # moves matrices, which others don't
    from meshwright.plan.matrix_owners import whole_matrices

    matrices = whole_matrices(plan, plan.mesh.position(rank, "pp"))
    members = (member for group in groups for member in group.members)
    stacked = {one.site: local_box(one.parameter).offset[0] for one in members if one.parameter.dim() == 3}
    dtype = getattr(torch, plan.optimizer.moved)
    return OwnerUpdates(optimizer, matrices, rank=rank, dtype=dtype, first_index=stacked)


def named_state(model: RankModel, optimizer: RunOptimizer) -> dict[str, Tensor]:
    """Return model and optimizer state as a flat dict keyed `model.<parameter>` and `optimizer.<state>.<parameter>`.

    The tensors are live: a checkpoint is loaded into them in place.
    """
    tensors: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers(saved_only=True):
        tensors[f"model.{name}"] = buffer
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for kind, state in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{kind}.{name}"] = state
    return tensors


@torch.no_grad()
def local_squared_norm(
    parameters: Iterable[nn.Parameter], *, num_ranks: int, device: torch.device | None = None
) -> Tensor:
    """Return this rank's contribution to the squared global gradient norm, a float64 scalar to sum over all ranks.

    Each gradient shard is held by `num_ranks / num_shards` ranks and weighted by the inverse on each of them, so that
    every parameter counts once on any layout. (`clip_grad_norm_` stacks norms, which fails across meshes.)

    Args:
        parameters: this rank's parameters, excluding shared ones that another stage counts.
        num_ranks: number of ranks in a pipeline stage, over which parameters are sharded or replicated.
        device: device of the result if there are no gradients.
    """
    by_num_shards: dict[int, list[Tensor]] = defaultdict(list)
    device = device or torch.device("cpu")
    for parameter in parameters:
        if parameter.grad is not None:
            by_num_shards[num_shards(parameter.grad)].append(to_local(parameter.grad))
            device = to_local(parameter.grad).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shards, gradients in by_num_shards.items():
        norm = torch.nn.utils.get_total_norm(gradients).to(torch.float64)
        total += norm * norm * (shards / num_ranks)
    return total


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            to_local(parameter.grad).mul_(factor)
