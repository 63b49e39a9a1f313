"""Measurements of a few steps of every run, and profiles of chosen steps by PyTorch's profiler (`train.profile`).

Measuring is cheap: a measured step reads its thread's clocks around each operation of the pipeline table, the last one
also counts collectives, and ranks exchange what they found once, after the last step. Nothing is synchronized on a CPU.
Ranks' clocks are aligned by the sum over all ranks that ends each step."""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.comm.collective_log import CollectiveBytes, Sent, count_collectives
from meshwright.comm.collectives import all_gather_object
from meshwright.config.resolve import format_ranges, profiled_ranks, profiled_steps
from meshwright.mesh.local_shards import to_local
from meshwright.models.contract.task import Batch
from meshwright.output_files import writing
from meshwright.pipeline.actions import ActionKind
from meshwright.pipeline.execute import Executor
from meshwright.pipeline.simulate import Costs, StageCosts, simulate
from meshwright.pipeline.timeline import Reading, Span, ThreadClock, TimedOperation, Timeline, compute_spans
from meshwright.plan.traffic import LinkBytes, predict_traffic
from meshwright.train.build_job import Job
from meshwright.train.record.step_parts import ZERO, CountedPurpose, RawParts, StepParts, count_purposes, raw_parts

PAGE_BYTES = resource.getpagesize()
MEASURED_STEPS = 5


def measured_steps(steps: range, profiled: Sequence[range] = ()) -> frozenset[int]:
    """Return the steps to measure, evenly spread up to the last one, without the first, which warms up.

    Args:
        steps: the steps of the run.
        profiled: ranges of steps that some rank profiles; none of these is measured, on any rank.
    """
    free = [step for step in steps[1:] or steps if not any(step in one for one in profiled)]
    apart = max(1, len(free) // MEASURED_STEPS)
    return frozenset(free[::-apart][:MEASURED_STEPS])


@dataclass(frozen=True)
class MeasuredRank:
    """Measurements of one rank."""

    parts: dict[int, RawParts]
    """Times of the measured steps, by number."""
    spans: tuple[Span, ...]
    """Computations of the last measured step; none on ranks outside the first pipeline."""
    memory: dict[str, int]
    """Bytes by type: fields of the predicted memory that can be measured, `base` and `peak`."""
    sent: dict[Sent, int] | None
    """Bytes sent in the last measured step, for `count_purposes`; None if they weren't counted."""
    compressed: LinkBytes | None
    cost_s: float
    """CPU time that measuring took."""


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of all ranks, on every rank."""

    steps: tuple[int, ...]
    parts: tuple[StepParts, ...]
    """By rank, mean over the measured steps."""
    measured: Timeline
    predicted: Timeline
    """Simulation of the same table with the measured times of computations, and transfers that take no time."""
    memory: tuple[dict[str, int], ...]
    """Bytes by type, by rank."""
    sent: tuple[CountedPurpose, ...] | None
    """Bytes by purpose of rank `sent_by`, whose prediction is the largest."""
    sent_by: int
    cost_s: float
    """Most CPU time that measuring took on a rank, without this exchange."""

    def to_json(self) -> dict[str, Any]:
        """Return all but the timelines as JSON values."""
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in ("measured", "predicted")}


class _Step:
    """Measurement of one step."""

    def __init__(self, number: int, read: Callable[[], Reading], *, counts: bool) -> None:
        self.number = number
        self.read = read
        self.timed: list[TimedOperation] = []
        self.marks: dict[str, Reading] = {}
        self.sent = CollectiveBytes()
        self.counts = counts
        self._data = ZERO

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the collectives of the context, if this step does."""
        with count_collectives() if self.counts else nullcontext(CollectiveBytes()) as found:
            yield
        self.sent.update(found)
        self.sent.cost_s += found.cost_s

    def batch(self, batch: Callable[[int], Batch], microbatch: int) -> Batch:
        """Return a batch, and add the time to that of data."""
        begin = self.read()
        try:
            return batch(microbatch)
        finally:
            self._data = Reading(*map(sum, zip(self._data, self.read() - begin, strict=True)))

    def parts(self) -> RawParts:
        """Return the times of the step."""
        return raw_parts(self.timed, self._data, **self.marks)


class RunMeasurement:
    """Measurement of the steps of a run on this rank."""

    def __init__(self, job: Job, executor: Executor, steps: frozenset[int], *, base_bytes: int) -> None:
        """Set up the measurement.

        Args:
            job: the job.
            executor: runs the steps.
            steps: numbers of the steps to measure.
            base_bytes: memory of the process before the model was built.
        """
        self._job, self._executor, self._steps = job, executor, steps
        self._is_cuda = job.device.type == "cuda"
        self._base_bytes = base_bytes
        self._current: _Step | None = None
        self._parts: dict[int, RawParts] = {}
        self._last: _Step | None = None
        self._memory: dict[str, int] = {}
        self._compressed: LinkBytes | None = None
        self._cost_s = 0.0

    @contextmanager
    def step(self, number: int, *, possible: bool) -> Iterator[None]:
        """Measure step `number` within the context, if it is chosen and `possible`."""
        if not possible or number not in self._steps:
            yield
            return
        is_last = number == max(self._steps)
        before = self._compressed_bytes()
        self._current = current = _Step(number, self._read, counts=is_last and not self._job.config.train.compile)
        try:
            current.marks["begin"] = self._read()
            yield
            current.marks["end"] = self._read()
        finally:
            self._current = None
        begin = time.thread_time()
        self._parts[number], self._last = current.parts(), current
        after = self._compressed_bytes()
        self._compressed = None if after is None or before is None else after + before * -1
        self._cost_s += (
            current.sent.cost_s + self._cost_of_reading(3 * len(current.timed) + 10) + time.thread_time() - begin
        )

    def run(self, executor: Executor) -> bool:
        """Run a measured step's row and return True; return False if this step is not measured."""
        if self._current is None:
            return False
        with self._current.counting():
            self._current.timed = executor.run_timed(self._current.read)
        return True

    def counting(self) -> AbstractContextManager[None]:
        """Return a context that counts collectives in a measured step."""
        return nullcontext() if self._current is None else self._current.counting()

    def batches(self, batch: Callable[[int], Batch]) -> Callable[[int], Batch]:
        """Return the function from micro-batches to batches, with its time measured in a measured step."""
        return batch if self._current is None else partial(self._current.batch, batch)

    def mark(self, name: str) -> None:
        """Read the clocks at a point of a measured step."""
        if self._current is not None:
            self._current.marks[name] = self._current.read()

    def measure_memory(self) -> None:
        """Measure the memory of tensors while a measured step has its gradients."""
        if self._current is None or self._memory:
            return
        begin, job = time.thread_time(), self._job
        parameters = list(job.model.parameters())
        states = (state for parameter in parameters for state in job.optimizer.state.get(parameter, {}).values())
        buffers = (buffer for part in job.parts().values() for buffer in part.module.buffers())
        self._memory = {
            "parameters": tensor_bytes((*parameters, *buffers)),
            "gradients": tensor_bytes(parameter.grad for parameter in parameters),
            "optimizer": tensor_bytes(states),
            "buffers": self._executor.buffer_bytes(),
        }
        self._cost_s += time.thread_time() - begin

    def gather(self) -> MeasuredRun | None:
        """Exchange the measurements; all ranks call this after the last step.

        Returns:
            Measurements of the steps that all ranks measured; None if there is none.
        """
        if not self._steps:  # the same on all ranks
            return None
        self._clock.close()
        job, last = self._job, self._last
        coordinate = job.axes.coordinate(job.context.rank)
        is_first = not any(position for axis, position in coordinate.items() if axis != "pp")
        spans = compute_spans(last.timed, rank=job.pipeline_rank) if is_first and last is not None else []
        zero = last.marks["reduced"].wall if last is not None else 0.0
        mine = MeasuredRank(
            parts=self._parts,
            spans=_since(zero, spans),
            memory={**self._memory, "base": self._base_bytes, "peak": peak_bytes(job.device)},
            sent=dict(last.sent) if last is not None and last.counts else None,
            compressed=self._compressed,
            cost_s=self._cost_s,
        )
        ranks = all_gather_object(mine)  # also by a rank without measurements: the others wait for it
        steps = set.intersection(*(set(one.parts) for one in ranks))
        return _combine(job, ranks, sorted(steps)) if steps else None

    @cached_property
    def _clock(self) -> ThreadClock:
        """Clock of the thread that runs the steps."""
        return ThreadClock()

    def _read(self) -> Reading:
        if not self._is_cuda:
            return self._clock()
        torch.cuda.synchronize()
        now = time.perf_counter()
        return Reading(now, now, 0.0)  # what a GPU waits for can't be told apart from outside

    def _cost_of_reading(self, times: int) -> float:
        begin = time.thread_time()
        for _ in range(10):
            self._clock()
        return times * (time.thread_time() - begin) / 10

    def _compressed_bytes(self) -> LinkBytes | None:
        return next((sent for one in self._job.features.values() if (sent := one.sent()) is not None), None)


def _combine(job: Job, ranks: list[MeasuredRank], steps: list[int]) -> MeasuredRun:
    spans = sorted((span for one in ranks for span in one.spans), key=lambda span: (span.rank, span.start))
    zero = min((span.start for span in spans), default=0.0)
    measured = Timeline(job.axes.pp, _since(zero, spans))
    predicted = simulate(job.schedule, measured_costs(measured, job.schedule.num_stages)).timeline
    parts = []
    for rank, one in enumerate(ranks):
        mine = predicted.of_rank(job.plan.mesh.position(rank, "pp"))
        idle = predicted.makespan - sum(span.end - span.start for span in mine)
        split = [asdict(one.parts[step].split(idle)) for step in steps]
        parts.append(StepParts(**{name: sum(each[name] for each in split) / len(split) for name in split[0]}))
    sender = predict_traffic(job.plan).rank
    sent, compressed = ranks[sender].sent, ranks[sender].compressed
    return MeasuredRun(
        steps=tuple(steps),
        parts=tuple(parts),
        measured=measured,
        predicted=predicted,
        memory=tuple(one.memory for one in ranks),
        sent=None if sent is None else tuple(count_purposes(job.plan, sender, sent, compressed)),
        sent_by=sender,
        cost_s=max(one.cost_s for one in ranks),
    )


def _since(zero: float, spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(one._replace(start=one.start - zero, end=one.end - zero) for one in spans)


def measured_costs(timeline: Timeline, num_stages: int) -> Costs:
    """Return the median time of each kind of computation on each stage, with transfers that take no time.

    With them, a simulation of the same table differs from the measured timeline by waiting that the table doesn't
    explain.
    """
    times: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for span in timeline.spans:
        times[span.action.stage, span.action.kind].append(span.end - span.start)

    def median(stage: int, kind: ActionKind) -> float:
        return statistics.median(times.get((stage, kind), [0.0]))

    stages = []
    for stage in range(num_stages):
        inputs, weights = median(stage, ActionKind.BACKWARD_INPUT), median(stage, ActionKind.BACKWARD_WEIGHT)
        if (stage, ActionKind.BACKWARD) in times and (stage, ActionKind.BACKWARD_WEIGHT) not in times:
            inputs, weights = median(stage, ActionKind.BACKWARD), 0.0
        stages.append(StageCosts(median(stage, ActionKind.FORWARD), inputs, weights))
    return Costs(stages)


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory allocated on a CUDA device in bytes; on CPU, the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE_BYTES
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory allocated on a CUDA device in bytes; on CPU, the peak resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the distinct storages of these tensors' local shards."""
    storages = {}
    for tensor in tensors:
        if tensor is not None and (storage := to_local(tensor).untyped_storage()).nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


DIRECTORY = "profile"
VIEWER = "https://ui.perfetto.dev"

Label = Callable[[str], AbstractContextManager[object]]
"""Function that returns a context whose time is shown under a name in the profile."""


class StepProfiler:
    """Profiler of one rank's steps; ranks that write no profile follow the others', so that each can summarize them."""

    def __init__(self, job: Job, folder: Path) -> None:
        """Set up for a run in `folder`; nothing is recorded before the first chosen step."""
        self._folder = folder / DIRECTORY
        self._rank, self._is_on_cuda = job.context.rank, job.device.type == "cuda"
        self._steps, self._ranks = profiled_steps(job.config.train), profiled_ranks(job.config)
        self._recorded = range(0)
        self._profile: profile | None = None
        self._written: list[range] = []

    def step(self, step: int) -> AbstractContextManager[Label | None]:
        """Profile step `step`, counted from 1, within the context, if it is chosen; steps run in ascending order.

        Returns:
            Context that yields the function that labels parts of the step, or None if this rank doesn't profile it.

        Raises:
            RunError: the file can't be written, after the last step of a range.
        """
        chosen = next((steps for steps in self._steps if step in steps), None)
        return nullcontext() if chosen is None else self._record(step, is_last=step == chosen[-1])

    @contextmanager
    def _record(self, step: int, *, is_last: bool) -> Iterator[Label | None]:
        if not self._recorded:
            self._recorded = range(step, step)
            self._start()
        label = None if self._profile is None else record_function
        with nullcontext() if label is None else label(f"step {step}"):
            yield label
        self._recorded = range(self._recorded.start, step + 1)
        if is_last:
            self.write()

    def _start(self) -> None:
        if any(self._rank in ranks for ranks in self._ranks):
            device = [ProfilerActivity.CUDA] if self._is_on_cuda else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *device])
            self._profile.start()

    def write(self) -> None:
        """Write the steps recorded since the last file, if there are any.

        Raises:
            RunError: the file can't be written.
        """
        steps, self._recorded = self._recorded, range(0)
        if not steps:
            return
        if self._profile is not None:
            self._profile.stop()
            with writing(self._folder / _file_name(str(self._rank), steps)) as path:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._profile.export_chrome_trace(str(path))
            self._profile = None
        self._written.append(steps)

    def summary(self) -> str:
        """Return a line for the user that names the files of all ranks."""
        if not self._written:
            return f"no step of train.profile = {format_ranges(self._steps)} was run, so there is no profile"
        ranks = format_ranges(self._ranks)
        is_one = ranks.isdigit()
        names = " · ".join(_file_name(ranks if is_one else "*", steps) for steps in self._written)
        of_ranks = "" if is_one else f" (ranks {ranks})"
        return f"profiles{of_ranks} in {self._folder}: {names}; open them in {VIEWER}"


def _file_name(rank: str, steps: range) -> str:
    return f"rank-{rank}-step{'s' * (len(steps) > 1)}-{format_ranges([steps])}.json.gz"
