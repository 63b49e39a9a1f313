"""Evidence of a script's run on one layout: the records of its ranks, placed on a mesh."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshwright.errors import InputError, RunError
from meshwright.mesh.axes import Axes
from meshwright.prove.compare.assemble_shards import assemble
from meshwright.prove.compare.tensor_shards import Array
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.script.layout_choice import ScriptRun
from meshwright.prove.script.rank_record import RankRecord
from meshwright.units import counted

TENSOR_WORDS = ("tp", "tensor", "model", "sp")
DATA_WORDS = ("dp", "data", "fsdp", "shard", "replicate")
KINDS = ("initial", "gradients", "after_first", "parameters")
"""Recorded tensors of each parameter, in the order in which a fault propagates."""
Shards = dict[str, list[RecordedShard]]


@dataclass(frozen=True)
class RanksOnMesh:
    """Axes, and the rank of the script at each position of the mesh (outermost axis first)."""

    axes: Axes
    order: tuple[int, ...]
    note: str = ""
    """Says which rank is which, where the script's order of axes is another."""


def ranks_on_mesh(records: Sequence[RankRecord]) -> RanksOnMesh:
    """Infer the axes of a layout; a layout that does not form a mesh counts as data parallel over all ranks.

    Ranks with different parameters are pipeline stages. Dims of the parameters' DeviceMesh are tensor parallel or data
    parallel, by their name, or else by whether the ranks along them read the same samples.
    """
    num_ranks = len(records)
    stages = list(dict.fromkeys(tuple(record.parameters) for record in records))
    roles = {label: _role(label, records) for label in dict.fromkeys(label for r in records for label in r.lines)}
    shards = _indices(records, [label for label, role in roles.items() if role == "dp_shard"])
    tensors = _indices(records, [label for label, role in roles.items() if role == "tp"])
    seen: Counter[tuple[int, int, int]] = Counter()
    coordinates = []
    for record, shard, tensor in zip(records, shards, tensors, strict=True):
        stage = stages.index(tuple(record.parameters))
        coordinates.append({"pp": stage, "dp_replicate": seen[stage, shard, tensor], "dp_shard": shard, "tp": tensor})
        seen[stage, shard, tensor] += 1
    axes = Axes(**{axis: 1 + max(at[axis] for at in coordinates) for axis in coordinates[0]})
    by_position = {axes.rank(**at): rank for rank, at in enumerate(coordinates)}
    if axes.num_ranks() != num_ranks or sorted(by_position) != list(range(num_ranks)):
        return RanksOnMesh(Axes(dp_replicate=num_ranks), tuple(range(num_ranks)))
    order = tuple(by_position[position] for position in range(num_ranks))
    moved = [f"rank {at} is the script's rank {rank}" for at, rank in enumerate(order) if at != rank]
    return RanksOnMesh(axes, order, f"ranks are numbered by {axes}: {', '.join(moved)}" if moved else "")


def _indices(records: Sequence[RankRecord], labels: list[str]) -> list[int]:
    """Return each rank's position along some mesh dims, as one index."""
    positions = []
    for rank, record in enumerate(records):
        lines = [record.lines.get(label, [rank]) for label in labels]
        positions.append(tuple(line.index(rank) if rank in line else 0 for line in lines))
    known = sorted(set(positions))
    return [known.index(position) for position in positions]


def _role(label: str, records: Sequence[RankRecord]) -> str:
    words = label.lower()
    data = "dp_shard" if any(label in record.sharded for record in records) else "dp_replicate"
    if any(word in words for word in DATA_WORDS):
        return data
    lines = {tuple(record.lines[label]) for record in records if label in record.lines}
    same = all(len({str(records[rank].samples) for rank in line}) == 1 for line in lines)
    return "tp" if any(word in words for word in TENSOR_WORDS) or same else data


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
