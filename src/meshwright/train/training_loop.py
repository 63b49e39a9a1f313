"""The training loop: steps, validation, checkpoints and metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from meshwright.checkpoint import save_load
from meshwright.checkpoint.manifest import read_manifest
from meshwright.comm.collectives import all_gather_object, barrier
from meshwright.config.facts_for_family import model_facts
from meshwright.config.resolve import notes_of, profiled_steps
from meshwright.config.source import to_toml
from meshwright.errors import RunError, StoppedError, continue_command
from meshwright.models.contract.task import Task
from meshwright.output_files import writing
from meshwright.parallel.apply_plan import compile_seconds
from meshwright.pipeline.timeline import to_values
from meshwright.plan.compare import hashes
from meshwright.plan.serialize import to_json
from meshwright.plan.traffic import predict_traffic
from meshwright.train.build_job import Job, refresh_shared_parameters
from meshwright.train.forward_only import PipelineForward, validate
from meshwright.train.launch.rank_context import CHECKPOINT, COMPILING, FIRST_STEP, MODEL, StopSignal
from meshwright.train.optimizer import named_state
from meshwright.train.record.metrics import Recorder, draw_metrics
from meshwright.train.record.reporter import Reporter, Summary, Validation
from meshwright.train.record.run_measurement import StepProfiler, measured_steps
from meshwright.train.run_folder import (
    FiniteSteps,
    RunFolder,
    files_to_carry,
    keep_other_plan,
    not_finite,
    stopped_unsaved,
)
from meshwright.train.train_step import StepResult, TrainStep
from meshwright.units import counted


class Trainer:
    """Trainer that runs a job to the last step, from a checkpoint or from scratch."""

    def __init__(
        self,
        job: Job,
        task: Task,
        corpus: str,
        folder: RunFolder,
        reporter: Reporter,
        *,
        base_bytes: int,
        plan_given: bool = False,
    ) -> None:
        """Set up the loop.

        Args:
            job: the job.
            task: the training task.
            corpus: fingerprint of the training data.
            folder: the run folder.
            reporter: reporter of this rank.
            base_bytes: memory of the process before the job was built.
            plan_given: whether the plan is another than that of the configuration.
        """
        self._job = job
        self._task = task
        self._corpus = corpus
        self._folder = folder
        self._reporter = reporter
        self._base_bytes, self._seconds, self._plan_given = base_bytes, 0.0, plan_given
        self._stop = StopSignal(job.context)
        self._profiler = StepProfiler(job, folder.path)
        self._step = TrainStep(job, task, self._stop.requested, self._is_time_to_save)
        self._forward = PipelineForward(self._step.pipeline)
        self._features = tuple(job.features.values())
        self._skipped_in_a_row = 0
        self._finite = FiniteSteps(-1, started=False)
        self._saved: Path | None = folder.checkpoint
        self._saved_at = time.monotonic()
        is_rank_0 = job.context.rank == 0  # which writes them
        self._sidecars = files_to_carry(job.config, folder.checkpoint) if is_rank_0 else {}
        self._end_ids = task.end_ids() if is_rank_0 else ()

    def run(self) -> None:
        """Train, writing metrics, loss plot and checkpoints to the run folder.

        Raises:
            RunError: too many steps in a row were not finite, the last step or validation was not finite, a stop was
                requested, or saving failed.
        """
        started = time.perf_counter()
        train = self._job.config.train
        self._job.start.end(MODEL)
        done = self._restore()
        if self._folder.checkpoint is not None:
            self._job.start.end(CHECKPOINT)
        with self._recording(done) as recorder:
            validation = self._run_steps(done, recorder)
            last = max(done, train.steps)
            self._check_end(last, validation, recorder)
            seconds = time.perf_counter() - started
            self._finish(validation, seconds, done=done, recorder=recorder)

    def _run_steps(self, done: int, recorder: Recorder | None) -> Validation | None:
        """Run the steps after `done`, and return the last step's validation."""
        train, validation = self._job.config.train, None
        steps = range(done + 1, train.steps + 1)
        self._step.measure(measured_steps(steps, profiled_steps(train)), base_bytes=self._base_bytes)
        with self._stop, self._step.prefetching(steps):
            for step in steps:
                self._job.context.post("step", step)
                with self._profiler.step(step) as self._step.label:
                    begin = time.perf_counter()
                    with ExitStack() as counting:
                        for feature in self._features:
                            counting.enter_context(feature.counting())
                        result = self._step(step)
                    seconds = time.perf_counter() - begin  # without starting a profile, or writing it
                    self._seconds += seconds
                if step == steps[0]:
                    self._report_start()
                validation = self._validate(step) if self._is_due(step, train.validate_every) else None
                for note in (note for feature in self._features for note in feature.notes()):
                    self._reporter.note(note)
                if recorder is not None:
                    recorder.record(result, seconds, validation, self._step.load_counts())
                self._track_finite(result, validation)
                if result.stop or result.save or self._is_checkpoint_due(step):
                    self._save(result, validation)
                self._check(result, recorder)
        if done >= train.steps:
            self._reporter.note(f"step {done} is complete and train.steps = {train.steps}: nothing left to train")
            validation = self._validate(done)
        return validation

    def _report_start(self) -> None:
        """Exchange and report the times of the start, after the first step."""
        start = self._job.start
        start.end(FIRST_STEP)
        if any(kind.compiled for kind in self._job.plan.kinds) and (seconds := compile_seconds()):
            start.move(seconds, out_of=FIRST_STEP, to=COMPILING)
        self._reporter.under_way(all_gather_object(start.seconds))

    @contextmanager
    def _recording(self, done: int) -> Iterator[Recorder | None]:
        """Open the run folder, and close the recorder at the end of the block, on rank 0."""
        recorder = self._open_folder(done)
        try:
            yield recorder
        except BaseException:
            if recorder is not None:
                recorder.close(failed=True)
            raise
        if recorder is not None:
            recorder.close(failed=False)

    def _fail_together(self, error: RunError, recorder: Recorder | None) -> NoReturn:
        """Raise an error that all ranks have, after they have closed trackers and profiles: the first rank to exit ends
        the others."""
        self._profiler.write()
        if isinstance(error, StoppedError):
            self._report_measurement()
        if recorder is not None:
            recorder.close(failed=True)
            self._note_profiles()
        if self._job.config.train.trackers or self._job.config.train.profile:
            barrier()
        raise error

    def _report_measurement(self) -> None:
        """Exchange and report what all ranks measured, and write the timelines if they were asked for."""
        facts = self._step.measurement.gather()
        if self._job.context.rank != 0:
            return
        if facts is None:
            if self._job.config.train.trace:
                self._reporter.note("no timeline: all steps were profiled or captured graphs, or none was left to run")
            return
        timelines = {"predicted": facts.predicted, "measured": facts.measured}
        more = {"plan": hashes(self._job.plan).fingerprint, "steps_s": self._seconds, "timeline": to_values(timelines)}
        self._reporter.measured({**facts.to_json(), **more})
        if self._job.config.train.trace:
            from meshwright.train.record.figures import write_trace

            write_trace(self._folder.path, self._job.schedule, timelines, overlaps=self._step.pipeline.overlaps)
            self._reporter.note(f"timelines of step {facts.steps[-1]}: timeline.svg · timeline.json · trace.json")

    def _note_profiles(self) -> None:
        """Report the profiles that were written, if any were asked for."""
        if self._job.config.train.profile:
            self._reporter.note(self._profiler.summary())

    def _is_due(self, step: int, every: int) -> bool:
        """Return whether `step` is the last step or a multiple of `every`; 0 means the last step only."""
        return step == self._job.config.train.steps or (every > 0 and step % every == 0)

    def _is_checkpoint_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step, however long ago the last one was."""
        checkpoint, is_last = self._job.config.checkpoint, step == self._job.config.train.steps
        return (checkpoint.every > 0 and step % checkpoint.every == 0) or (is_last and checkpoint.at_end)

    def _is_time_to_save(self) -> bool:
        """Return whether checkpoint.minutes have passed: on rank 0, whose clock decides for all."""
        minutes = self._job.config.checkpoint.minutes
        return self._job.context.rank == 0 and 0 < minutes * 60 <= time.monotonic() - self._saved_at

    def _open_folder(self, done: int) -> Recorder | None:
        """Write configuration and plan, and return the recorder, on rank 0; return None on other ranks."""
        if self._job.context.rank != 0:
            return None
        self._folder.path.mkdir(parents=True, exist_ok=True)
        with writing(self._folder.path / "config.toml") as path:
            path.write_text(to_toml(self._job.config), "utf-8")
        config, notes = self._job.config, []
        if done < config.train.steps or not self._folder.plan.exists():  # otherwise no step uses this plan
            with writing(self._folder.plan) as path:
                notes = keep_other_plan(path, self._job.plan, done)
                path.write_text(to_json(self._job.plan), "utf-8")
        for note in (*self._folder.notes, *notes, *notes_of(config)):
            self._reporter.note(note)
        return Recorder(self._job, self._folder, self._reporter, unit=self._task.unit, done=done)

    def _restore(self) -> int:
        """Load the checkpoint to resume from, if any, and return the last completed step."""
        path = self._folder.checkpoint
        if path is None:
            return 0
        self._job.context.post("loading a checkpoint")
        manifest = read_manifest(path)
        tensors = named_state(self._job.model, self._job.optimizer)
        if "config" not in manifest.run:
            self._reporter.note(f"{path} holds weights only: starting at step 0 with fresh optimizer state")
            save_load.load(path, {name: tensor for name, tensor in tensors.items() if name.startswith("model.")})
            refresh_shared_parameters(self._job)
            return 0
        save_load.load(path, tensors)
        refresh_shared_parameters(self._job)
        for feature in self._features:
            if lost := feature.restore(path, manifest):
                self._reporter.note(lost)
        self._finite = FiniteSteps(manifest.step - 1, started=False)
        return manifest.step

    def _track_finite(self, result: StepResult, validation: Validation | None) -> None:
        """Record the newest weights known to be finite: a loss vouches for those before the step, a validation for
        those after it."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if not result.skipped:
            self._finite = FiniteSteps(result.step - 1, started=True)
        if validation is not None and math.isfinite(validation.loss):
            self._finite = FiniteSteps(result.step, started=self._finite.started)

    def _may_save(self, result: StepResult, validation: Validation | None) -> bool:
        """Return whether the weights after a step may be saved and replace earlier checkpoints.

        Weights are not saved while steps are being skipped, since the run may be diverging; after the last step, a
        finite validation shows that they are good.
        """
        if validation is not None and (result.step == self._job.config.train.steps or not result.skipped):
            return math.isfinite(validation.loss)
        return not result.skipped

    def _save(self, result: StepResult, validation: Validation | None) -> None:
        if not self._may_save(result, validation):
            return
        step = result.step
        self._job.context.post("saving", step)
        self._reporter.waiting(f"saving step {step}")
        begin = time.perf_counter()
        tensors = named_state(self._job.model, self._job.optimizer)
        for feature in self._features:
            tensors |= feature.state()
        self._saved = save_load.save(
            self._folder.checkpoints,
            step,
            tensors,
            model=dict(model_facts(self._job.config).identity),
            run={
                "config": self._job.config.model_dump(),
                "corpus": self._corpus,
                "directory": str(Path.cwd()),  # of relative paths in the configuration
                "end_ids": self._end_ids,
                **{one.saved_as: one.identity for one in self._features if one.saved_as},
                "plan": vars(hashes(self._job.plan)),
                "skipped_in_a_row": 0,  # nothing is saved between skipped steps; earlier versions read this
            },
            keep=self._job.config.checkpoint.keep,
            sidecars=self._sidecars,
        )
        self._saved_at = time.monotonic()
        self._reporter.saved(step, self._saved, time.perf_counter() - begin)

    def _check(self, result: StepResult, recorder: Recorder | None) -> None:
        """End the run on all ranks after too many skipped steps or a stop request."""
        train = self._job.config.train
        if self._skipped_in_a_row > train.max_skipped_steps:
            first = (result.step - 1) * train.global_batch
            error = not_finite(
                f"{self._skipped_in_a_row} steps in a row were not finite (loss {result.loss}, gradient norm "
                f"{result.grad_norm})",
                where=f"step {result.step}, samples {first} … {first + train.global_batch - 1}",
                rule=f"at most train.max_skipped_steps = {train.max_skipped_steps} in a row",
                folder=self._folder,
                finite=self._finite,
            )
        elif result.stop and result.skipped and result.step < train.steps:
            error = stopped_unsaved(result.step, self._folder)
        elif result.stop and result.step < train.steps:
            plan = ["--plan", str(self._folder.plan)] if self._plan_given else []
            error = StoppedError(
                f"stopped after step {result.step}, as requested; saved {self._saved}",
                fix=f"{continue_command(self._folder.path, plan)}, which continues from there",
            )
        else:
            return
        self._fail_together(error, recorder)

    def _check_end(self, step: int, validation: Validation | None, recorder: Recorder | None) -> None:
        """Raise if the last step or the last validation was not finite."""
        what = "the last step was not finite and was skipped" if self._skipped_in_a_row else ""
        if validation is not None and not math.isfinite(validation.loss):
            what = f"the last validation was not finite (loss {validation.loss})"
        if what:
            error = not_finite(
                what,
                where=f"step {step}, the last",
                rule="the last step and the last validation of a run are finite",
                folder=self._folder,
                finite=self._finite,
            )
            self._fail_together(error, recorder)

    def _validate(self, step: int) -> Validation | None:
        train = self._job.config.train
        if not train.validation_samples:
            return None
        self._job.context.post("validating", step)
        self._reporter.waiting(f"validating on {counted(train.validation_samples, 'held-out sample')}")
        loss = validate(self._step.pipeline, self._task)
        found = self._task.after_validation(self._forward, step, self._folder.path)
        validation = Validation(
            loss,
            {name: value for name, value in found.items() if not isinstance(value, Path)},
            {name: value for name, value in found.items() if isinstance(value, Path)},
        )
        self._reporter.validated(step, validation)
        return validation

    def _finish(self, validation: Validation | None, seconds: float, *, done: int, recorder: Recorder | None) -> None:
        """Write the run's sample, figures and summary; `done` is the number of steps completed before this run."""
        last = max(done, self._job.config.train.steps)
        self._job.context.post("finishing", last)
        self._report_measurement()
        self._job.context.post("generating text", last)
        self._reporter.waiting("generating text")
        sample = self._task.sample(self._forward)
        self._job.context.post("finishing", last)
        if recorder is None:
            return
        if sample is not None:
            recorder.record_sample(last, sample)
        self._note_profiles()
        self._reporter.finished(
            Summary(
                steps=last,
                seconds=seconds,
                validation=validation,
                steps_here=last - done,
                traffic=predict_traffic(self._job.plan),
                counted=next((sent for one in self._features if (sent := one.traffic()) is not None), None),
                all_to_alls=tuple(sent for one in self._features for sent in one.all_to_alls()),
                folder=self._folder.path,
                checkpoint=self._saved,
                sample=sample,
                plan_given=self._plan_given,
                figures=draw_metrics(self._job, self._folder, self._task.unit),
            )
        )
