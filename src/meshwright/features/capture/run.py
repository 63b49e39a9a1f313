"""Capture of a job's layers as CUDA graphs: which modules, on which backend, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from statistics import mean

from meshwright.capture.run.capture import BackendKind, CaptureSession, Chunk
from meshwright.capture.run.scopes import select
from meshwright.comm.collectives import all_gather_object
from meshwright.config.section_rules import REGION
from meshwright.errors import LayoutError
from meshwright.features.contract import OnRank, RunFeature
from meshwright.pipeline.actions import Overlap
from meshwright.pipeline.execute import takes_turns
from meshwright.train.build_job import Job
from meshwright.train.pipeline_stages import ModelStage, Pipeline

TAKES_TURNS = "overlapped computations of the stage take turns while it runs"
COMPILED = "the simulation runs operators one by one, and a compiled block has none (capture.backend=eager)"


class CaptureOnRank(OnRank):
    """Graphs of this rank's layers."""

    def __init__(self, job: Job) -> None:
        self._job, self._has_noted = job, False

    def attach(self, pipeline: Pipeline) -> None:
        self.session = capture_session(self._job, pipeline)

    def is_steady(self) -> bool:
        return self.session.plan is not None  # graphs are captured without interference

    def running(self) -> AbstractContextManager[None]:
        return self.session.step()

    def notes(self) -> Iterator[str]:
        """Yield what was captured, once, and what has run eagerly nevertheless."""
        if self.session.plan is not None:
            yield from () if self._has_noted else self.session.notes()
            yield from self.session.fallbacks()
            self._has_noted = True


def capture_session(job: Job, pipeline: Pipeline) -> CaptureSession:
    """Return the session of a job whose configuration captures something."""
    config = job.config.capture
    backend: str = config.backend
    if backend == "auto":
        backend = BackendKind.CUDA if job.device.type == "cuda" else BackendKind.SIMULATE
    overlapping = {number for number, stage in pipeline.stages.items() if stage.overlaps}
    row = job.schedule.actions[job.pipeline_rank]
    pairs = [one for one in row if isinstance(one, Overlap) and takes_turns(one, overlapping)]
    refused = {part.stage: TAKES_TURNS for pair in pairs for part in pair.parts()}
    if job.config.train.compile and backend == BackendKind.SIMULATE:
        refused = dict.fromkeys(pipeline.stages, COMPILED)
    return CaptureSession(
        [_chunk(job, n, stage, refused.get(n)) for n, stage in pipeline.stages.items()],
        job.schedule,
        rank=job.pipeline_rank,
        scopes=config.scope,
        backend=backend,
        mode=config.mode,
        strict=config.strict,
        agree=lambda fingerprint: agree_on_capture(fingerprint, job),
        average=lambda numbers: average_over_ranks(numbers, job),
    )


def _chunk(job: Job, number: int, stage: ModelStage, refused: str | None) -> Chunk:
    part = job.parts()[number]
    modules, scopes = {}, {}
    for kind, layer in job.plan.held(part.stage):
        if kind.is_block:
            path = kind.full_name("", layer)
            for name, (module, scope) in select(part.module.get_submodule(path), job.config.capture.scope).items():
                full = f"{path}.{name}".rstrip(".")
                modules[full], scopes[full] = module, scope
    return Chunk(
        number,
        part.module,
        modules,
        scopes,
        microbatch=lambda: stage.microbatch,
        regions=tuple(scope for scope in job.config.capture.scope if scope.startswith(REGION)),
        store=stage.weight_gradients,
        refused=refused,
    )


def average_over_ranks(numbers: dict[str, float], job: Job) -> dict[str, float]:
    """Return the means of numbers by name, over the ranks that have them. Collective: all ranks must call it."""
    if job.axes.num_ranks() == 1:
        return numbers
    found = all_gather_object(numbers)
    names = dict.fromkeys(name for own in found for name in own)
    return {name: mean(own[name] for own in found if name in own) for name in names}


def agree_on_capture(fingerprint: str, job: Job) -> None:
    """Check that ranks of the same pipeline rank have the same capture plan. Collective: all ranks must call it.

    Raises:
        LayoutError: two ranks' plans differ; raised on all ranks.
    """
    if job.axes.num_ranks() == 1:
        return
    found = all_gather_object((job.pipeline_rank, fingerprint))
    first: dict[int, tuple[int, str]] = {}
    for rank, (position, one) in enumerate(found):
        other, expected = first.setdefault(position, (rank, one))
        if one != expected:
            raise LayoutError(
                f"ranks {other} and {rank} have different capture plans: {expected[:8]} and {one[:8]}",
                where=f"rank {rank}, capture",
                rule="ranks that hold the same stages capture the same graphs",
                fix="the same configuration and versions of Meshwright and PyTorch on every node",
            )


class CaptureInRuns(RunFeature):
    def start(self, job: Job) -> OnRank:
        return CaptureOnRank(job)


FEATURE = CaptureInRuns()
