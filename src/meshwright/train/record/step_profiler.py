"""Profiles of chosen steps by PyTorch's profiler, enabled by `train.profile`.

Each rank in `train.profile_ranks` writes a trace of each range of steps. Operators, kernels and collectives are in it,
under labels of the step and of the pipeline's actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.config.resolve import format_ranges, profiled_ranks, profiled_steps
from meshwright.output_files import writing
from meshwright.train.build_job import Job

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
