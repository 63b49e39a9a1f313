"""What was predicted for a run beside what it measured: the time of a step by part, and the memory of a rank by type.

Parts of a prediction and of a measurement aren't the same, so both are joined into what each can tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from meshwright.errors import InputError
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.memory import library_bytes, predict_memory, predict_process_memory
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.time.step_time import StepTime
from meshwright.train.record.step_parts import StepParts
from meshwright.train.report.run_data import RunData

PARTS = {
    "compute": "forward and backward",
    "communication": "exposed communication",
    "bubble": "pipeline bubble",
    "data": "data",
    "optimizer": "optimizer",
    "core": "waiting for a core",
    "other": "other",
}
"""Name of each field of `StepParts`, in the order of the bars."""
COMPUTE = ("products", "attention", "memory", "recompute", "host")
ALONE = {"bubble": "bubble", "cores": "core", "optimizer": "optimizer", "step": "other"}
"""Field of `StepParts` of each predicted part that is neither computation nor communication."""


@dataclass(frozen=True)
class Compared:
    """A predicted and a measured value, in seconds or bytes."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class MeasuredRun:
    """A run's plan, and what it measured of its last steps by rank."""

    plan: RunPlan
    device: str
    """`cpu`, or the CUDA name of a GPU."""
    captured: bool
    """Whether blocks were replayed as CUDA graphs."""
    ranks: Sequence[StepParts]
    memory: Sequence[Mapping[str, int]]
    """Bytes by type."""

    @staticmethod
    def of(run: RunData) -> MeasuredRun:
        """Return what a run measured.

        Raises:
            InputError: the run has no measurement or no plan.
        """
        if run.plan is None or run.measured is None:
            what = f"{run.folder} has no {'plan' if run.plan is None else 'measured step'}"
            rule = "a run writes its plan as it starts, and measures its last steps"
            raise InputError(what, where=str(run.folder), rule=rule, fix="a run that has ended")
        return MeasuredRun(
            run.plan,
            run.device,
            run.config.get("capture.scope") == ["layer"],
            [StepParts(**parts) for parts in run.measured["parts"]],
            run.measured["memory"],
        )

    @property
    def fullest(self) -> Mapping[str, int]:
        """Memory of the rank that held the most."""
        return max(self.memory, key=lambda held: held["peak"])


def compare_time(time: StepTime, ranks: Sequence[StepParts], *, on_cpu: bool) -> list[Compared]:
    """Return a row for each part of a step, the mean over ranks, and one for the whole step.

    On a GPU, communication inside blocks is measured as computation, so that both are one part.
    """
    predicted = dict.fromkeys(PARTS, 0.0)
    for part, us in time.parts.items():
        name = "compute" if part in COMPUTE else ALONE.get(part, "communication")
        predicted[name] += us / 1e6
    measured = {name: fmean(getattr(one, name) for one in ranks) for name in PARTS}
    # What a step does outside its operations is predicted as one.
    joined = {"data": "other"} | ({} if on_cpu else {"communication": "compute"})
    names = dict(PARTS) | {"other": "data and other"} | ({} if on_cpu else {"compute": "computation and communication"})
    rows = []
    for name in PARTS:
        if name not in joined:
            own = (name, *(one for one, into in joined.items() if into == name))
            rows.append(Compared(names[name], *(sum(values[one] for one in own) for values in (predicted, measured))))
    whole = Compared("a step", time.total / 1e6, sum(measured.values()))
    return [*(row for row in rows if row.predicted or row.measured), whole]


def compare_memory(plan: RunPlan, measured: Mapping[str, int], *, on_cpu: bool) -> list[Compared]:
    """Return a row for each type that can be measured, one for the others, whose sum is, and the total."""
    predicted = predict_memory(plan)
    alone = [field.name for field in fields(predicted) if field.name in measured]
    apart = {*measured, "workspace"} if on_cpu else measured.keys()
    others = [memory_name(field.name) for field in fields(predicted) if field.name not in apart]
    types = [Compared(memory_name(name), getattr(predicted, name), measured[name]) for name in alone]
    base = library_bytes(plan) if on_cpu else measured["base"]
    total = predict_process_memory(plan) if on_cpu else base + predict_cuda_memory(plan).total()
    others += ["holes between tensors"] * on_cpu
    rows = [
        Compared("Python and its libraries" if on_cpu else "held before the run", base, measured["base"]),
        *types,
        Compared(
            f"{', '.join(others[:-1])} and {others[-1]}",
            total - base - sum(one.predicted for one in types),
            max(0, measured["peak"] - measured["base"] - sum(one.measured for one in types)),
        ),
        Compared("total", total, measured["peak"]),
    ]
    return [row for row in rows if row.predicted or row.measured]


def memory_name(name: str) -> str:
    """Return the words for a field of the predicted memory."""
    return {"errors": "error feedback", "buffers": "receive buffers"}.get(name, name.replace("_", " "))


def format_difference(predicted: float, measured: float, written: str) -> str:
    """Return how far a measured value, `written` so, is from a predicted one."""
    if predicted == measured:
        return "0"
    return f"{measured / predicted - 1:+.1%}" if predicted else f"+{written}"


def as_rows(found: Iterable[Compared], write: Callable[[float], str]) -> list[tuple[str, str, str, str]]:
    """Return name, predicted and measured value, and difference of each row, as words."""
    return [
        (one.name, write(one.predicted), write(one.measured),
         format_difference(one.predicted, one.measured, write(one.measured)))
        for one in found
    ]  # fmt: skip
