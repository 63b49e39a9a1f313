"""Evidence of a script's run on one layout: the records of its ranks, placed on a mesh that is inferred from them; and
how much rounding may change what a script computes, which depends on its dtype and its model.

The reference runs again with every weight changed by up to one rounding unit of its dtype. What that changes is what
rounding may change (as in TTrace, arXiv 2506.09280), so a layout may deviate by `MULTIPLE` times as much.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

import numpy as np
import torch

from meshwright.errors import InputError, RunError
from meshwright.mesh.axes import Axes
from meshwright.prove.judge.tensors import Array, LayoutCounts, assemble
from meshwright.prove.judge.verdicts import Verdicts, compare_step, compare_tensors, tensor_scales
from meshwright.prove.record.evidence import Evidence, RecordedShard, Shards
from meshwright.prove.result import StepValue
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


MULTIPLE = 8
"""Times the measured deviation that a layout may deviate."""
FLOOR = 8
"""Rounding units that any tensor may deviate, relative to its largest element."""
NOISE = 4
"""Times its measured deviation below which an element of a gradient is of rounding size."""
FLOAT64 = {"initial": 1e-12, "gradient": 1e-12, "update": 1e-9}
"""Smallest tolerances in float64, those of `meshwright prove`."""
SERIES = {"loss": "loss", "norm": "grad_norm"}
"""Names in reports and in records of what is reported in each step."""
Tolerances = Mapping[Kind, Mapping[str, float]]


@dataclass(frozen=True)
class ScriptTolerances:
    """Relative tolerances of all compared values."""

    tensors: Tolerances
    """By kind and name."""
    series: Mapping[str, tuple[float, ...]]
    """Of losses and norms: one per step."""
    note: str
    """What the tolerances are, and why."""

    def usual(self, kind: Kind) -> float:
        """Return the median tolerance of one kind of tensor."""
        return median(self.tensors[kind].values()) if self.tensors[kind] else 0.0


def measure_tolerances(reference: ScriptEvidence, perturbed: Sequence[ScriptEvidence]) -> ScriptTolerances:
    """Return tolerances from runs of the reference whose initial weights were changed by one rounding unit.

    Raises:
        InputError: the runs differ by more than rounding, so the script is not deterministic.
    """
    errors = {kind: [_errors(reference, other, kind) for other in perturbed] for kind in reference.kinds}
    for other, gradients in zip(perturbed, errors[GRADIENT], strict=True):
        _check_deterministic(reference, other, gradients)
    floor, tensors = FLOOR * reference.unit, dict[Kind, dict[str, float]]()
    for kind, found in errors.items():
        least = FLOOR * reference.eps if kind == INITIAL else floor
        least = max(least, FLOAT64[kind[0]]) if reference.unit == np.finfo(np.float64).eps else least
        worst = {name: max((one[name] for one in found), default=0.0) for name in reference.fulls(kind)}
        usual = median(worst.values()) if worst else 0.0
        tensors[kind] = {name: max(least, MULTIPLE * max(value, usual)) for name, value in worst.items()}
    series = {}
    for name in SERIES:
        runs = [compare_reported(other, reference, name, (math.inf,) * reference.num_steps) for other in perturbed]
        worst_of = [max((run[at].relative_error for run in runs), default=0.0) for at in range(reference.num_steps)]
        series[name] = tuple(max(floor, MULTIPLE * _finite(error)) for error in worst_of)
    limits = tensors[GRADIENT].values()
    note = (
        f"tolerances for {reference.dtypes}: {MULTIPLE} × what one rounding unit in every weight changes in the "
        f"reference; gradients {min(limits):.0e} to {max(limits):.0e}, "
        f"parameters after the last step up to {max(tensors[reference.kinds[-1]].values()):.0e}"
    )
    return ScriptTolerances(tensors, series, note)


def _errors(reference: ScriptEvidence, other: ScriptEvidence, kind: Kind) -> dict[str, float]:
    """Return the error of each tensor of a further run; 0 of one that is not finite, which is no rounding."""
    verdicts, _ = compare_kind(other, reference, kind, LayoutCounts(other.axes, 1, 1))
    return {name: _finite(one.result.error.relative) for name, one in verdicts.items()}


def _finite(error: float) -> float:
    return error if math.isfinite(error) else 0.0


def compare_kind(
    layout: ScriptEvidence,
    reference: ScriptEvidence,
    kind: Kind,
    counts: LayoutCounts,
    tolerances: ScriptTolerances | None = None,
) -> tuple[Verdicts, int]:
    """Compare all tensors of one kind, but for parameters that the layout lacks or shapes otherwise.

    Args:
        tolerances: tolerances; None if errors are to be measured.

    Returns:
        Verdicts, and how many elements are not compared because rounding decides how the step changes them.
    """
    expected = {name: full for name, full in reference.fulls(kind).items() if layout.shapes.get(name) == full.shape}
    shards, num_skipped = layout.shards(kind), 0
    if kind[0] == "update":
        masks = _noisy_elements(reference, {} if tolerances is None else tolerances.tensors[GRADIENT])
        masks = {name: mask for name, mask in masks.items() if name in expected and mask.any()}
        num_skipped = sum(int(mask.sum()) for mask in masks.values())
        shards |= {name: _without(mask, shards.get(name, []), expected[name]) for name, mask in masks.items()}
    if tolerances is None:
        return compare_tensors(shards, expected, counts, math.inf), num_skipped
    limits = {name: tolerances.tensors[kind].get(name, tolerances.usual(kind)) for name in expected}
    return compare_tensors(shards, expected, counts, limits, step=kind[1]), num_skipped


def _noisy_elements(reference: ScriptEvidence, tolerances: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return a mask per parameter of the elements whose gradient in step 1 is of rounding size, but not zero.

    Adam divides a gradient by its own magnitude, so that the sign of such an element, which rounding decides, moves the
    weight by a whole learning rate.
    """
    gradients, found = reference.fulls(GRADIENT), {}
    for name, scale in tensor_scales(gradients).items():
        limit = scale * max(tolerances.get(name, 0.0) * NOISE / MULTIPLE, FLOOR * reference.unit)
        found[name] = (np.abs(gradients[name]) <= limit) & (gradients[name] != 0.0)
    return found


def _without(mask: np.ndarray, shards: list[RecordedShard], expected: np.ndarray) -> list[RecordedShard]:
    """Return shards whose masked elements are the expected ones; one out of bounds stays as it is."""
    found = []
    for shard in shards:
        at = tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.value.shape, strict=True))
        if mask[at].shape == tuple(shard.value.shape):
            value = torch.where(torch.from_numpy(mask[at]), torch.from_numpy(expected[at]), shard.value.double())
            shard = replace(shard, value=value)
        found.append(shard)
    return found


def compare_reported(
    layout: ScriptEvidence, reference: ScriptEvidence, name: str, tolerances: Sequence[float]
) -> tuple[StepValue, ...]:
    """Return the verdict on the losses or norms of each step, without a diagnosis.

    Ranks may report a loss of their own samples, if the mean over ranks is right; a norm has to be the global one.
    """
    found = []
    for step, tolerance in enumerate(tolerances, start=1):
        expected, mean = (one.mean(SERIES[name], step) for one in (reference, layout))
        observed = [mean if value is None else value for value in layout.reported(SERIES[name], step)]
        value = compare_step(step, observed, expected, tolerance)
        is_mean = name == "loss" and compare_step(step, [mean], expected, tolerance).ok
        found.append(replace(value, ok=value.ok or is_mean))
    return tuple(found)


def _check_deterministic(reference: ScriptEvidence, other: ScriptEvidence, gradients: Mapping[str, float]) -> None:
    differing, starts = "", other.fulls(INITIAL)
    # Gradients that cancel, such as those of a key bias under softmax, consist of rounding.
    sizes = tensor_scales(reference.fulls(GRADIENT))
    limit = max(float(np.sqrt(reference.unit)), 64 * reference.unit)
    odd = [name for name, off in gradients.items() if off > limit and sizes[name] > 0.01 * max(sizes.values())]
    if any(
        reference.series("samples", step) != other.series("samples", step) for step in range(1, reference.num_steps + 1)
    ):
        differing = "read different samples"
    elif any(
        not np.array_equal(value, starts.get(name, np.empty(0))) for name, value in reference.fulls(INITIAL).items()
    ):
        differing = "start from different weights"
    elif odd:
        differing = f"have different gradients in step 1, by {max(gradients.values()):.0e} relative ({odd[0]})"
    if differing:
        raise InputError(
            f"{reference.run.script.name} is not deterministic: two runs on {reference.run.layout} {differing}",
            where=f"{reference.run.script}, {reference.run.layout}",
            rule="a proof compares runs, so a run must repeat up to rounding",
            fix="seed everything: torch.manual_seed for weights and dropout, a generator or sampler seed for the data; "
            "and set dropout to 0, whose masks depend on the layout",
        )
