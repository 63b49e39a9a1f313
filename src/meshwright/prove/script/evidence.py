"""Evidence of a script's run on one layout: the records of its ranks, placed on a mesh that is inferred from them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from meshwright.errors import InputError, RunError
from meshwright.mesh.axes import Axes
from meshwright.prove.judge.tensors import Array, assemble
from meshwright.prove.record.evidence import Evidence, RecordedShard, Shards
from meshwright.prove.script.layout_choice import ScriptRun
from meshwright.prove.script.recorder import ScriptRecord, rounding_unit

TENSOR_WORDS = ("tp", "tensor", "model", "sp")
DATA_WORDS = ("dp", "data", "fsdp", "shard", "replicate")


def ranks_on_mesh(records: Sequence[ScriptRecord]) -> tuple[Axes, tuple[int, ...]]:
    """Infer the axes of a layout, and the script's rank at each position of the mesh (outermost axis first).

    A layout that does not form a mesh counts as data parallel over all ranks.

    Ranks with different parameters are pipeline stages. Dims of the parameters' DeviceMesh are tensor parallel or data
    parallel, by their name, or else by whether the ranks along them read the same samples.
    """
    num_ranks = len(records)
    stages = list(dict.fromkeys(tuple(record.shapes) for record in records))
    roles = {label: _role(label, records) for label in dict.fromkeys(label for r in records for label in r.lines)}
    shards = _indices(records, [label for label, role in roles.items() if role == "dp_shard"])
    tensors = _indices(records, [label for label, role in roles.items() if role == "tp"])
    seen: Counter[tuple[int, int, int]] = Counter()
    coordinates = []
    for record, shard, tensor in zip(records, shards, tensors, strict=True):
        stage = stages.index(tuple(record.shapes))
        coordinates.append({"pp": stage, "dp_replicate": seen[stage, shard, tensor], "dp_shard": shard, "tp": tensor})
        seen[stage, shard, tensor] += 1
    axes = Axes(**{axis: 1 + max(at[axis] for at in coordinates) for axis in coordinates[0]})
    by_position = {axes.rank(**at): rank for rank, at in enumerate(coordinates)}
    if axes.num_ranks() != num_ranks or len(by_position) != num_ranks:
        return Axes(dp_replicate=num_ranks), tuple(range(num_ranks))
    return axes, tuple(by_position[position] for position in range(num_ranks))


def _indices(records: Sequence[ScriptRecord], labels: list[str]) -> list[int]:
    """Return each rank's position along some mesh dims, as one index."""
    positions = [
        tuple(record.lines.get(label, [rank]).index(rank) for label in labels) for rank, record in enumerate(records)
    ]
    known = sorted(set(positions))
    return [known.index(position) for position in positions]


def _role(label: str, records: Sequence[ScriptRecord]) -> str:
    data = "dp_shard" if any(label in record.sharded for record in records) else "dp_replicate"
    if any(word in label.lower() for word in DATA_WORDS):
        return data
    lines = {tuple(record.lines[label]) for record in records if label in record.lines}
    same = all(len({str(records[rank].steps[0]["samples"]) for rank in line}) == 1 for line in lines)
    return "tp" if any(word in label.lower() for word in TENSOR_WORDS) or same else data


Kind = tuple[str, int]
"""Kind of tensor, as reports name it, and the step after which it is compared: initial weights are of step 0."""
INITIAL, GRADIENT, FIRST = ("initial", 0), ("gradient", 1), ("update", 1)


@dataclass(frozen=True)
class ScriptEvidence(Evidence):
    """What the ranks of one layout recorded; ranks are in the order of the mesh."""

    ranks: tuple[ScriptRecord, ...]
    run: ScriptRun = field(kw_only=True)
    note: str = ""
    """Says which rank is which, where the script's order of axes is another."""
    _fulls: dict[Kind, dict[str, Array]] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Recorded tensors of each parameter, in the order in which a fault propagates."""
        return tuple(dict.fromkeys((INITIAL, GRADIENT, FIRST, ("update", self.num_steps))))

    def shards(self, kind: Kind) -> Shards:
        """Return the shards of one kind of tensor."""
        return self.gradients(1) if kind == GRADIENT else self.weights(kind[1])

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of each parameter, in the order of the model."""
        return {name: tuple(shape) for record in self.ranks for name, shape in record.shapes.items()}

    @cached_property
    def holders(self) -> dict[str, list[int]]:
        """The pipeline stages that hold each parameter."""
        found: dict[str, list[int]] = defaultdict(list)
        for rank, record in enumerate(self.ranks):
            stage = self.axes.coordinate(rank)["pp"]
            for name in record.shapes:
                found[name] += [stage] if stage not in found[name] else []
        return found

    @cached_property
    def tied(self) -> set[tuple[str, ...]]:
        """Groups of names that share one tensor."""
        return {tuple(group) for record in self.ranks for group in record.tied}

    def batch(self, step: int) -> Counter[str]:
        """Return the samples of a step's global batch: those of one reading rank per data-parallel index."""
        by_index = dict[int, list[str]]()
        for rank, samples in enumerate(self.series("samples", step)):
            if samples:
                by_index.setdefault(self.axes.data_index(rank), samples)
        return Counter(sample for samples in by_index.values() for sample in samples)

    def reported(self, name: str, step: int) -> list[float | None]:
        """Return the loss or norm of a step on each rank: the mean of what it reports, None if it reports nothing."""
        return [float(np.mean(values)) if values else None for values in self.series(name, step)]

    def mean(self, name: str, step: int) -> float:
        """Return the loss or norm of a step, averaged over the ranks that report one; NaN without any."""
        known = [value for value in self.reported(name, step) if value is not None]
        return sum(known) / len(known) if known else math.nan

    def fulls(self, kind: Kind) -> dict[str, Array]:
        """Return the full tensors of one kind.

        Raises:
            RunError: the shards of a tensor do not form it.
        """
        if kind not in self._fulls:
            shards = self.shards(kind)
            self._fulls[kind] = {name: self._full(kind, name, shards[name]) for name in shards}
        return self._fulls[kind]

    def _full(self, kind: Kind, name: str, shards: list[RecordedShard]) -> Array:
        found = assemble(name, shards, self.shapes[name], self.axes)
        if found.faults:
            raise RunError(
                f"the shards of {name} ({' of step '.join(map(str, kind))}) on {self.run.layout} do not make it up: "
                + "; ".join(found.faults),
                where=f"{self.run.script.name}, {self.run.layout}",
                rule="the reference holds every element of every parameter",
                fix='put a layout of one process first: --layout "1"',
            )
        replica = next(found.replicas(), None)
        return np.zeros(self.shapes[name]) if replica is None else replica.value

    @property
    def eps(self) -> float:
        """Rounding unit of the parameters' dtype."""
        return max(rounding_unit(record.dtype) for record in self.ranks)

    @property
    def unit(self) -> float:
        """Rounding unit of the parameters or of the forward pass, whichever is larger."""
        return max(self.eps, *(rounding_unit(record.computed_in) for record in self.ranks))

    @property
    def dtypes(self) -> str:
        """Dtype of the parameters, and that of the forward pass where it is coarser."""
        dtype = max((record.dtype for record in self.ranks), key=rounding_unit)
        computed_in = max((record.computed_in for record in self.ranks), key=rounding_unit)
        return f"{dtype}, computed in {computed_in}" if self.unit > self.eps else dtype


def gather(run: ScriptRun, records: Sequence[ScriptRecord]) -> ScriptEvidence:
    """Place the records of all ranks on a mesh, with partial gradients summed over the ranks that share them."""
    (axes, order), complete = ranks_on_mesh(records), _complete(records)
    microbatches = max(1, *(record.steps[0]["microbatches"] for record in records))
    moved = [f"rank {at} is the script's rank {rank}" for at, rank in enumerate(order) if at != rank]
    note = f"ranks are numbered by {axes}: {', '.join(moved)}" if moved else ""
    return ScriptEvidence(axes, microbatches, tuple(complete[rank] for rank in order), run=run, note=note)


def _complete(records: Sequence[ScriptRecord]) -> list[ScriptRecord]:
    gradients = [dict(record.steps[0]["gradients"]) for record in records]
    partial = {name: dims for record in records for name, dims in record.partial.items()}
    for name, dim in ((name, dim) for name, dims in partial.items() for dim in dims):
        values = {rank: found[name][1] for rank, found in enumerate(gradients) if name in found}
        for rank in values:
            total = sum((values[other] for other in records[rank].lines[dim]), torch.zeros(()))
            gradients[rank][name] = gradients[rank][name][0], total
    return [
        replace(record, steps=[{**record.steps[0], "gradients": found}, *record.steps[1:]])
        for record, found in zip(records, gradients, strict=True)
    ]


def load_evidence(run: ScriptRun) -> ScriptEvidence:
    """Load the records of a run.

    Raises:
        InputError: the script did not call all methods of the recorder.
    """
    records = [ScriptRecord(**torch.load(run.record(rank), weights_only=True)) for rank in range(run.layout.num_ranks)]
    for series, what, call in (
        ("gradients", "no gradient", "recorder.gradients() after backward"),
        ("samples", "no sample", "recorder.batch(inputs, targets) per micro-batch"),
        ("loss", "no loss", "recorder.loss(value) once per step"),
    ):
        if not any(record.steps[0][series] for record in records):
            raise InputError(
                f"{run.script.name} recorded {what} in step 1",
                where=f"{run.script}, {run.layout}",
                rule="a proof compares samples, losses, gradients and parameters",
                fix=call,
            )
    return gather(run, records)
