"""Evidence of a script's run on one layout, the records of its ranks placed on a mesh, and how much rounding may change
it, which depends on the script's dtype and on its model.

The reference runs again with every weight changed by up to one rounding unit of its dtype. What that changes is what
rounding may change (as in TTrace, arXiv 2506.09280), so a layout may deviate by `MULTIPLE` times as much.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import numpy as np

from meshwright.errors import InputError, RunError
from meshwright.mesh.axes import Axes
from meshwright.prove.judge.tensors import Array, assemble, max_difference, safe_ratio
from meshwright.prove.judge.verdicts import tensor_scales
from meshwright.prove.record.evidence import RecordedShard
from meshwright.prove.result import StepValue
from meshwright.prove.script.layout_choice import ScriptRun
from meshwright.prove.script.recorder import RankRecord
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


MULTIPLE = 8
"""Times the measured deviation that a layout may deviate."""
FLOOR = 8
"""Rounding units that any tensor may deviate, relative to its largest element."""
NOISE = 4
"""Times its measured deviation below which an element of a gradient is of rounding size."""
FLOAT64 = {"initial": 1e-12, "gradients": 1e-12, "after_first": 1e-9, "parameters": 1e-9}
"""Smallest tolerances in float64, those of `meshwright prove`."""


@dataclass(frozen=True)
class ScriptTolerances:
    """Relative tolerances of all compared values."""

    tensors: Mapping[str, Mapping[str, float]]
    """[kind][name]"""
    losses: tuple[float, ...]
    """[step]"""
    norms: tuple[float, ...]
    note: str
    """What the tolerances are, and why."""

    def usual(self, kind: str) -> float:
        """Return the median tolerance of one kind of tensor."""
        return median(self.tensors[kind].values()) if self.tensors[kind] else 0.0


def measure_tolerances(reference: ScriptEvidence, perturbed: Sequence[ScriptEvidence]) -> ScriptTolerances:
    """Return tolerances from runs of the reference whose initial weights were changed by one rounding unit.

    Raises:
        InputError: the runs differ by more than rounding, so the script is not deterministic.
    """
    for other in perturbed:
        _check_deterministic(reference, other)
    floor, is_float64 = FLOOR * reference.unit, reference.unit == np.finfo(np.float64).eps
    tensors = {}
    for kind in KINDS:
        least = FLOOR * reference.eps if kind == "initial" else floor
        least = max(least, FLOAT64[kind]) if is_float64 else least
        measured = (
            _deviations(reference, perturbed, kind) if kind != "initial" else dict.fromkeys(reference.shapes, 0.0)
        )
        usual = median(measured.values()) if measured else 0.0
        tensors[kind] = {name: max(least, MULTIPLE * max(value, usual)) for name, value in measured.items()}
    losses, norms = (_series(reference, perturbed, name, floor) for name in ("losses", "norms"))
    gradients = tensors["gradients"].values()
    note = (
        f"tolerances for {reference.dtypes}: {MULTIPLE} × what one rounding unit in every weight changes in the "
        f"reference; gradients {min(gradients):.0e} to {max(gradients):.0e}, "
        f"parameters after the last step up to {max(tensors['parameters'].values()):.0e}"
    )
    return ScriptTolerances(tensors, losses, norms, note)


def _deviations(reference: ScriptEvidence, perturbed: Sequence[ScriptEvidence], kind: str) -> dict[str, float]:
    expected = reference.fulls(kind)
    scales = tensor_scales(expected)
    skipped = noisy_elements(reference, {}) if kind in ("after_first", "parameters") else {}
    worst = dict.fromkeys(expected, 0.0)
    for other in perturbed:
        for name, value in other.fulls(kind).items():
            if name in expected and value.shape == expected[name].shape and value.size:
                value = np.where(skipped[name], expected[name], value) if name in skipped else value
                off = safe_ratio(max_difference(value, expected[name])[0], scales[name])
                worst[name] = max(worst[name], off)
    return worst


def noisy_elements(reference: ScriptEvidence, tolerances: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return a mask per parameter of the elements whose gradient in step 1 is of rounding size, but not zero.

    Adam divides a gradient by its own magnitude, so that the sign of such an element, which rounding decides, moves the
    weight by a whole learning rate.
    """
    gradients = reference.fulls("gradients")
    scales = tensor_scales(gradients)
    found = {}
    for name, value in gradients.items():
        limit = scales[name] * max(tolerances.get(name, 0.0) * NOISE / MULTIPLE, FLOOR * reference.unit)
        found[name] = (np.abs(value) <= limit) & (value != 0.0)
    return found


def _series(
    reference: ScriptEvidence, perturbed: Sequence[ScriptEvidence], name: str, floor: float
) -> tuple[float, ...]:
    expected, found = reported(reference, name), []
    for step, value in enumerate(expected):
        others = [reported(other, name)[step] for other in perturbed]
        off = max((safe_ratio(abs(other - value), abs(value)) for other in others), default=0.0)
        found.append(max(floor, MULTIPLE * off) if np.isfinite(off) else floor)
    return tuple(found)


def _check_deterministic(reference: ScriptEvidence, other: ScriptEvidence) -> None:
    differing = ""
    if [record.samples for record in reference.records] != [record.samples for record in other.records]:
        differing = "read different samples"
    elif any(
        not np.array_equal(value, other.fulls("initial")[name]) for name, value in reference.fulls("initial").items()
    ):
        differing = "start from different weights"
    else:
        limit = max(float(np.sqrt(reference.unit)), 64 * reference.unit)
        deviations = _deviations(reference, [other], "gradients")
        sizes = tensor_scales(reference.fulls("gradients"))
        # Gradients that cancel, such as those of a key bias under softmax, consist of rounding.
        odd = [name for name, off in deviations.items() if off > limit and sizes[name] > 0.01 * max(sizes.values())]
        if odd:
            differing = f"have different gradients in step 1, by {max(deviations.values()):.0e} relative ({odd[0]})"
    if differing:
        raise InputError(
            f"{reference.run.script.name} is not deterministic: two runs on {reference.run.layout} {differing}",
            where=f"{reference.run.script}, {reference.run.layout}",
            rule="a proof compares runs, so a run must repeat up to rounding",
            fix="seed everything: torch.manual_seed for weights and dropout, a generator or sampler seed for the data; "
            "and set dropout to 0, whose masks depend on the layout",
        )


def reported(evidence: ScriptEvidence, name: str) -> list[float]:
    """Return the loss or norm of each step, averaged over the ranks that report one; NaN without any."""
    by_rank = _by_rank(evidence, name)
    return [_mean(column) for column in zip(*by_rank, strict=True)]


def compare_reported(
    layout: ScriptEvidence, reference: ScriptEvidence, name: str, tolerances: Sequence[float]
) -> tuple[StepValue, ...]:
    """Return the verdict on each step, without a diagnosis.

    Ranks may report a loss of their own samples, if the mean over ranks is right; a norm has to be the global one.
    """
    steps = []
    columns = list(zip(*_by_rank(layout, name), strict=True))
    for at, expected in enumerate(reported(reference, name)):
        mean, tolerance = _mean(columns[at]), tolerances[at]
        found = tuple(mean if math.isnan(value) else value for value in columns[at])
        errors = [_error(value, expected) for value in found]
        worst = int(np.argmax(errors))
        is_mean = name == "losses" and _error(mean, expected) <= tolerance
        ok = is_mean or errors[worst] <= tolerance
        steps.append(StepValue(at + 1, expected, found, errors[worst], worst, tolerance, ok))
    return tuple(steps)


def _by_rank(evidence: ScriptEvidence, name: str) -> list[list[float]]:
    """Return one value per rank and step: the mean of those reported, NaN for none."""
    return [[_mean(values) for values in getattr(record, name)] for record in evidence.records]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _error(value: float, expected: float) -> float:
    off = safe_ratio(abs(value - expected), abs(expected))
    return off if math.isfinite(off) else math.inf
