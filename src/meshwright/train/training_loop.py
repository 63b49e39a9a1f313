"""The loop over steps, with validation, checkpoints and records."""

from __future__ import annotations

import math
import time
from pathlib import Path
from shlex import quote

from meshwright.checkpoint import save_load
from meshwright.checkpoint.manifest import read_manifest
from meshwright.config.dump import to_toml
from meshwright.config.facts_for_family import model_facts
from meshwright.config.rules_compression import no_effect_notes
from meshwright.errors import RunError
from meshwright.models.contract.task import Task
from meshwright.output_files import writing
from meshwright.plan.compare import hashes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.serialize import to_json
from meshwright.plan.traffic import predict_traffic
from meshwright.train.build_job import Job, refresh_copies
from meshwright.train.divergence import Proven, not_finite, stopped_unsaved
from meshwright.train.forward_only import PipelineForward
from meshwright.train.gradient_compression import CountingSteps
from meshwright.train.launch.stop_signals import StopSignal
from meshwright.train.lr_schedule import warmup_notes
from meshwright.train.optimizer import named_state
from meshwright.train.record.metrics import Recorder, plot_loss
from meshwright.train.record.reporter import Reporter, Summary, Validation
from meshwright.train.record.timeline_trace import write_trace
from meshwright.train.run_folder import RunFolder, keep_other_plan
from meshwright.train.train_step import StepResult, TrainStep
from meshwright.train.validation_loss import validate


class Trainer:
    """Takes a job from its folder's checkpoint, or from nothing, to the last step."""

    def __init__(self, job: Job, task: Task, corpus: str, folder: RunFolder, reporter: Reporter) -> None:
        """Of a job; `corpus` is the fingerprint of what it trains on."""
        self._job = job
        self._task = task
        self._corpus = corpus
        self._folder = folder
        self._reporter = reporter
        self._stop = StopSignal(job.context)
        self._step = TrainStep(job, task, self._stop.requested)
        self._forward = PipelineForward(self._step.pipeline)
        self._counting = CountingSteps(job.compression)
        self._skipped_in_a_row = 0
        self._proven = Proven(-1, started=False)
        self._saved: Path | None = folder.checkpoint

    def run(self) -> None:
        """Train, and leave metrics, plot and a checkpoint in the run folder.

        Raises:
            RunError: too many non-finite steps in a row, or an end that is not finite, a stop that was asked for, or a
                failed save.
        """
        started = time.perf_counter()
        train = self._job.config.train
        done = self._restore()
        recorder = self._open_folder(done)
        validation = None
        with self._stop:
            for step in range(done + 1, train.steps + 1):
                self._job.context.post("step", step)
                begin = time.perf_counter()
                with self._counting:
                    result = self._step(step)
                seconds = time.perf_counter() - begin
                validation = self._validate(step) if self._is_due(step, train.validate_every) else None
                if recorder is not None:
                    recorder.record(result, seconds, validation)
                self._learn(result, validation)
                if result.stop or self._is_due(step, self._job.config.checkpoint.every):
                    self._save(result, validation)
                self._check(result)
        if done >= train.steps:
            self._reporter.note(f"step {done} is done and train.steps = {train.steps}: nothing left to train")
            validation = self._validate(done)
        if recorder is not None:
            recorder.close()
        self._check_end(max(done, train.steps), validation)
        self._finish(validation, time.perf_counter() - started, done=done)

    def _is_due(self, step: int, every: int) -> bool:
        """Every `every` steps (0: never) and at the last."""
        return step == self._job.config.train.steps or (every > 0 and step % every == 0)

    def _open_folder(self, done: int) -> Recorder | None:
        """Rank 0 writes the run folder."""
        if self._job.context.rank != 0:
            return None
        self._folder.path.mkdir(parents=True, exist_ok=True)
        with writing(self._folder.path / "config.toml") as path:
            path.write_text(to_toml(self._job.config), "utf-8")
        config, notes = self._job.config, []
        if done < config.train.steps or not self._folder.plan.exists():  # else no step is done by this plan
            with writing(self._folder.plan) as path:
                notes = keep_other_plan(path, self._job.plan, done)
                path.write_text(to_json(self._job.plan), "utf-8")
        for note in (*self._folder.notes, *notes, *no_effect_notes(config), *warmup_notes(config.train)):
            self._reporter.note(note)
        return Recorder(self._job, self._folder, self._reporter, done=done)

    def _restore(self) -> int:
        """Load the folder's checkpoint, if there is one. Returns the last step done."""
        path = self._folder.checkpoint
        if path is None:
            return 0
        self._job.context.post("loading a checkpoint")
        manifest = read_manifest(path)
        tensors = named_state(self._job.model, self._job.optimizer)
        if "config" not in manifest.run:
            self._reporter.note(f"{path} holds weights only: starting at step 0 with fresh optimizer state")
            save_load.load(path, {name: tensor for name, tensor in tensors.items() if name.startswith("model.")})
            refresh_copies(self._job)
            return 0
        save_load.load(path, tensors)
        refresh_copies(self._job)
        if lost := self._job.compression.restore(path, manifest):
            self._reporter.note(lost)
        self._proven = Proven(manifest.step - 1, started=False)
        return manifest.step

    def _learn(self, result: StepResult, validation: Validation | None) -> None:
        """Take note of what a step and the validation after it say of the weights, before and after the step."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if not result.skipped:
            self._proven = Proven(result.step - 1, started=True)
        if validation is not None and math.isfinite(validation.loss):
            self._proven = Proven(result.step, started=self._proven.started)

    def _is_sound(self, result: StepResult, validation: Validation | None) -> bool:
        """Whether what a step leaves may be saved, and then take the place of earlier checkpoints.

        Not while steps are skipped: the weights may be what the run diverges from. At the end, when it is saved now or
        never, a finite validation says that they are not.
        """
        if validation is not None and (result.step == self._job.config.train.steps or not result.skipped):
            return math.isfinite(validation.loss)
        return not result.skipped

    def _save(self, result: StepResult, validation: Validation | None) -> None:
        if not self._is_sound(result, validation):
            return
        step = result.step
        self._job.context.post("saving", step)
        self._reporter.waiting(f"saving step {step}")
        self._saved = save_load.save(
            self._folder.checkpoints,
            step,
            named_state(self._job.model, self._job.optimizer) | self._job.compression.state(),
            model=dict(model_facts(self._job.config).identity),
            run={
                "config": self._job.config.model_dump(),
                "corpus": self._corpus,
                "comm": self._job.compression.identity,
                "plan": vars(hashes(self._job.plan)),
                "skipped_in_a_row": 0,  # nothing is saved amid skipped steps; earlier versions ask for it
            },
            keep=self._job.config.checkpoint.keep,
        )

    def _check(self, result: StepResult) -> None:
        """End the run on what all ranks know alike: too many skipped steps, or the wish to stop."""
        train = self._job.config.train
        if self._skipped_in_a_row > train.max_skipped_steps:
            first = (result.step - 1) * train.global_batch
            raise not_finite(
                f"{self._skipped_in_a_row} steps in a row were not finite (loss {result.loss}, gradient norm "
                f"{result.grad_norm})",
                where=f"step {result.step}, samples {first} … {first + train.global_batch - 1}",
                rule=f"at most train.max_skipped_steps = {train.max_skipped_steps} in a row",
                folder=self._folder,
                proven=self._proven,
            )
        if result.stop and result.skipped and result.step < train.steps:
            raise stopped_unsaved(result.step, self._folder)
        if result.stop and result.step < train.steps:
            raise RunError(
                f"stopped after step {result.step}, as asked; saved {self._saved}",
                fix=f"--out {quote(str(self._folder.path))} --resume auto goes on from there",
            )

    def _check_end(self, step: int, validation: Validation | None) -> None:
        """A run whose last numbers are not finite has not ended well, however few they are."""
        what = "the last step was not finite and was skipped" if self._skipped_in_a_row else ""
        if validation is not None and not math.isfinite(validation.loss):
            what = f"the last validation was not finite (loss {validation.loss})"
        if what:
            raise not_finite(
                what,
                where=f"step {step}, the last",
                rule="a run ends with a step and a validation that are finite",
                folder=self._folder,
                proven=self._proven,
            )

    def _validate(self, step: int) -> Validation | None:
        train = self._job.config.train
        if not train.validation_samples:
            return None
        self._job.context.post("validating", step)
        self._reporter.waiting(f"validating on {train.validation_samples} held-out samples")
        loss = validate(self._step.pipeline, self._task)
        found = Validation(loss, self._task.after_validation(self._forward, step, self._folder.path))
        self._reporter.validated(step, found)
        return found

    def _finish(self, validation: Validation | None, seconds: float, *, done: int) -> None:
        """The run's sample, pictures and summary; `done` steps were done before this run."""
        last = max(done, self._job.config.train.steps)
        self._job.context.post("generating text", last)
        self._reporter.waiting("generating text")
        sample = self._task.sample(self._forward)
        self._job.context.post("finishing", last)
        if self._job.context.rank != 0:
            return
        if self._step.timeline is not None:
            write_trace(self._folder.path, self._job.schedule, self._step.timeline)
            self._reporter.note("timelines of the last step: timeline.svg · timeline.json · trace.json")
        out, unit = self._folder.path / "loss.png", self._task.unit
        plot_loss(self._folder.metrics, out, title=self._job.config.name, unit=unit)
        self._reporter.finished(
            Summary(
                steps=last,
                seconds=seconds,
                validation=validation,
                steps_here=last - done,
                traffic=predict_traffic(self._job.plan),
                counted=self._counting.total(),
                folder=self._folder.path,
                checkpoint=self._saved,
                sample=sample,
                plan_given=self._job.plan != make_plan(self._job.config, nodes=self._job.plan.mesh.nodes),
            )
        )
