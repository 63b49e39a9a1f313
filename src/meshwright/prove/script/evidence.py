"""Evidence of a script's run on one layout: the records of its ranks, placed on a mesh."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshwright.errors import InputError, RunError
from meshwright.prove.compare.assemble_shards import assemble
from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.script.layout_choice import ScriptRun
from meshwright.prove.script.rank_record import RankRecord
from meshwright.prove.script.ranks_on_mesh import RanksOnMesh, ranks_on_mesh
from meshwright.units import counted

KINDS = ("initial", "gradients", "after_first", "parameters")
"""Recorded tensors of each parameter, in the order in which a fault propagates."""
Shards = dict[str, list[RecordedShard]]


@dataclass(frozen=True)
class ScriptEvidence:
    """What the ranks of one layout recorded; ranks are in the order of the mesh."""

    run: ScriptRun
    mesh: RanksOnMesh
    records: tuple[RankRecord, ...]
    _fulls: dict[str, dict[str, Array]] = field(default_factory=dict)

    def shards(self, kind: str) -> Shards:
        """Return the shards of one kind of tensor; partial gradients are summed over the ranks that share them."""
        found: Shards = defaultdict(list)
        for rank, record in enumerate(self.records):
            for name, (offset, value) in getattr(record, kind).items():
                found[name].append(RecordedShard(rank, tuple(offset), value))
        if kind == "gradients":
            for name in {name for record in self.records for name in record.partial}:
                found[name] = self._summed(name, found[name])
        return dict(found)

    def _summed(self, name: str, shards: list[RecordedShard]) -> list[RecordedShard]:
        values = {shard.rank: shard.value for shard in shards}
        place = {rank: at for at, rank in enumerate(self.mesh.order)}
        for label in next(record.partial[name] for record in self.records if name in record.partial):
            lines = {rank: [place[other] for other in self.records[rank].lines[label]] for rank in values}
            values = {
                rank: sum((values[other] for other in lines[rank][1:]), values[lines[rank][0]]) for rank in values
            }
        return [RecordedShard(shard.rank, shard.offset, values[shard.rank]) for shard in shards]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of each parameter, in the order of the model."""
        return {name: tuple(shape) for record in self.records for name, shape in record.shapes.items()}

    def fulls(self, kind: str) -> dict[str, Array]:
        """Return the full tensors of one kind.

        Raises:
            RunError: the shards of a tensor do not form it, or its replicas differ.
        """
        if kind not in self._fulls:
            self._fulls[kind] = {name: self._full(kind, name, shards) for name, shards in self.shards(kind).items()}
        return self._fulls[kind]

    def _full(self, kind: str, name: str, shards: list[RecordedShard]) -> Array:
        found = assemble(name, shards, self.shapes[name], self.mesh.axes)
        if found.faults:
            raise RunError(
                f"the shards of {name} ({kind}) on {self.run.layout} do not make it up: {'; '.join(found.faults)}",
                where=f"{self.run.script.name}, {self.run.layout}",
                rule="the reference holds every element of every parameter",
                fix='put a layout of one process first: --layout "1"',
            )
        replicas = list(found.replicas())
        return replicas[0].value if replicas else np.zeros(self.shapes[name])

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of step 1, at least one."""
        return max(1, *(record.microbatches[0] for record in self.records))

    @property
    def eps(self) -> float:
        """Rounding unit of the parameters' dtype."""
        return max(record.eps for record in self.records)

    @property
    def unit(self) -> float:
        """Rounding unit of the parameters or of the forward pass, whichever is larger."""
        return max(self.eps, *(record.unit for record in self.records))

    @property
    def dtypes(self) -> str:
        """Dtype of the parameters, and that of the forward pass where it is coarser."""
        _, dtype = max((record.eps, record.dtype) for record in self.records)
        unit, computed_in = max((record.unit, record.computed_in) for record in self.records)
        return f"{dtype}, computed in {computed_in}" if unit > self.eps else dtype


def load_evidence(run: ScriptRun) -> ScriptEvidence:
    """Load the records of a run.

    Raises:
        InputError: the script called no recorder, or ended before the last step.
    """
    lacking = [rank for rank in range(run.layout.num_ranks) if not run.record(rank).exists()]
    if lacking:
        printed = run.printed(lacking[0])
        raise InputError(
            f"{run.script.name} ended without {counted(run.num_steps, 'recorded step')} on rank {lacking[0]}",
            where=f"{run.script}, {run.layout}" + ("\n       " + printed.replace("\n", "\n       ") if printed else ""),
            rule="a script makes a meshwright.prove.Recorder and calls its step() after every step of the optimizer",
            fix="see docs/prove-scripts.md; if the script trains for fewer steps, lower --steps",
        )
    records = [RankRecord.load(run.record(rank)) for rank in range(run.layout.num_ranks)]
    _check(run, records)
    mesh = ranks_on_mesh(records)
    return ScriptEvidence(run, mesh, tuple(records[rank] for rank in mesh.order))


def _check(run: ScriptRun, records: list[RankRecord]) -> None:
    """Check that the script called all methods of the recorder that a proof needs.

    Raises:
        InputError: it did not.
    """
    for called, what, call in (
        (any(record.gradients for record in records), "no gradient", "recorder.gradients() after backward"),
        (any(record.samples[0] for record in records), "no sample", "recorder.batch(inputs, targets) per micro-batch"),
        (any(record.losses[0] for record in records), "no loss", "recorder.loss(value) once per step"),
    ):
        if not called:
            raise InputError(
                f"{run.script.name} recorded {what} in step 1",
                where=f"{run.script}, {run.layout}",
                rule="a proof compares samples, losses, gradients and parameters",
                fix=call,
            )
