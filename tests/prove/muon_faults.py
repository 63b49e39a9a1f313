"""Seeded faults of Muon: gradients are right, and the cause must be named."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from meshwright.optim.catalogue import COEFFICIENTS, TINY, Muon
from meshwright.optim.contract import Settings, Slot
from meshwright.optim.owner_updates import Site
from meshwright.prove.record.layout_run import Tamper
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import Fault

MUON = "train.optimizer=muon"
SHARD2 = ("mesh.dp_shard=2", MUON)
HYBRID = ("mesh.dp_replicate=2", "mesh.dp_shard=2", MUON)
TENSOR2 = ("mesh.tp=2", MUON)


class PlainMomentum(Muon):
    def prepare(self, slot: Slot, settings: Settings) -> Tensor:
        return slot.state["momentum"].mul_(settings.momentum).add_(slot.gradient).clone()


class Unscaled(Muon):
    def apply(self, slot: Slot, update: Tensor, settings: Settings) -> None:
        super().apply(slot, update / max(slot.shape) ** 0.5, settings)


class Forgetful(Muon):
    def prepare(self, slot: Slot, settings: Settings) -> Tensor:
        slot.state["momentum"].zero_()
        return super().prepare(slot, settings)


class FourIterations(Muon):
    def transform(self, matrices: Tensor) -> Tensor:
        a, b, c = COEFFICIENTS
        x = matrices / (matrices.square().sum((-2, -1), keepdim=True).sqrt() + TINY)
        for _ in range(4):
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return x


class NeighboursUpdate(Muon):
    def transform(self, matrices: Tensor) -> Tensor:
        return super().transform(matrices).roll(1, 0)


def another(optimizer: type[Muon]) -> Tamper:
    """Another optimizer of matrices."""

    def tamper(job: Job, step: TrainStep) -> None:
        changed = optimizer()
        for group in job.optimizer.groups:
            if isinstance(group.optimizer, Muon):
                group.optimizer = changed
        assert job.optimizer._owners is not None
        job.optimizer._owners._optimizer = changed

    return tamper


def shards_alone(job: Job, step: TrainStep) -> None:
    """Each rank makes its own shard orthogonal."""

    def run(slots: Mapping[Site, tuple[Slot, Settings]]) -> None:
        for slot, settings in slots.values():
            Muon().update([slot], settings)

    assert job.optimizer._owners is not None
    job.optimizer._owners.run = run  # type: ignore[method-assign]


def keep_momentum(job: Job, step: TrainStep) -> None:
    """Owners send matrices back as they came."""
    assert job.optimizer._owners is not None
    job.optimizer._owners._transform = list  # type: ignore[method-assign, assignment]


MUON_FAULTS: dict[str, Fault] = {
    "each rank makes its own rows orthogonal": Fault(shards_alone, SHARD2,
        ("each rank makes its own shard orthogonal, instead of the whole matrix",)),
    "momentum is not Nesterov's": Fault(another(PlainMomentum), SHARD2, ("the momentum is not Nesterov's",)),
    "updates are not scaled": Fault(another(Unscaled), SHARD2,
        ("updated by about 0.2 × the reference step", "a different learning rate")),
    "momentum is cleared": Fault(another(Forgetful), SHARD2, ("momentum is stale",)),
    "four iterations": Fault(another(FourIterations), SHARD2, ("iterate once too little",)),
}  # fmt: skip
UNKNOWN_MUON_FAULTS: dict[str, Fault] = {
    "a neighbour's update": Fault(another(NeighboursUpdate), SHARD2, ()),
    "matrices come back as they were": Fault(keep_momentum, SHARD2, ()),
}
