"""Make the plan's optimizer: for each role, what updates its parameters and which states it keeps."""

from __future__ import annotations

from meshwright.config.schema import TrainConfig
from meshwright.optim.catalogue import optimizers_by_role
from meshwright.optim.contract import MatrixOptimizer
from meshwright.optim.role import Role
from meshwright.plan.run_plan import MASTER_DTYPES, Optimizer, OptimizerState, RoleUpdate


def make_optimizer(train: TrainConfig) -> Optimizer:
    """Return the optimizer of a run; roles that are updated alike, with the same states, are joined."""
    masters = MASTER_DTYPES[train.precision]
    by_update: dict[RoleUpdate, list[Role]] = {}
    for role, (name, optimizer) in optimizers_by_role(train.optimizer).items():
        states = tuple(
            OptimizerState(state_name, state.dims, state.dtype or masters)
            for state_name, state in optimizer.states(role).items()
        )
        update = RoleUpdate((), name, states, isinstance(optimizer, MatrixOptimizer))
        by_update.setdefault(update, []).append(role)
    updates = (
        RoleUpdate(tuple(role.value for role in roles), update.optimizer, update.states, update.whole)
        for update, roles in by_update.items()
    )
    return Optimizer(train.optimizer, tuple(updates), moved=train.precision)
