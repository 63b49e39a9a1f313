"""Use a trained model without training it: its loss on held-out data, and what it generates.

Of the run that trained it, what says what the model and its data are is kept; layout, batch and optimizer are those of
the command.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import MANIFEST, newest_valid, verify
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.config.source import CONFIG_FILE, is_run_folder
from meshwright.errors import CheckpointError, InputError
from meshwright.models.contract.family import Prompt, RunFacts, family_names, find_family
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.settings.import_object import download_fix
from meshwright.settings.toml import values_to_toml
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext

OF_COMMAND = ("mesh", "pipeline", "recompute", "capture", "comm", "checkpoint")
"""Sections that don't say what a model and its data are."""
SOURCE, VALIDATION = "data.source", "data.validation_source"
OTHER_SOURCES = ("mixture", "validation_source")
"""Keys of `data` that another source takes the place of."""
OF_MODEL = ("seq_len", "precision", "seed", "validation_samples", "device", "threads")
"""Keys of `train` that do, or where it runs."""


@dataclass(frozen=True)
class TrainedModel:
    """A model with weights, and how to run it."""

    config: RunConfig
    checkpoint: Path | None
    """Checkpoint with the weights; None if they are the initial ones, of a model's folder."""


@dataclass(frozen=True)
class UseSpec:
    """What ranks do with a model."""

    model: TrainedModel
    folder: Path
    """Folder of what rank 0 leaves."""
    prompt: Prompt | None = None
    """What to generate; None to compute the loss."""

    @property
    def result(self) -> Path:
        """File of the result."""
        return self.folder / "result.json"


def find_model(source: str, words: Sequence[str]) -> TrainedModel:
    """Return the model of a run folder, a checkpoint or a folder in Hugging Face's format, on one rank but for `words`.

    All of a `data.source` among the words is held-out data, where that may be a source of its own.

    Raises:
        InputError, CheckpointError: there is no such model.
        ConfigError, LayoutError: a word doesn't fit it.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    model = _find_model(Path(source), words, given)
    if SOURCE not in given or VALIDATION in given:
        return model
    return replace(model, config=model.config.with_keys({VALIDATION: model.config.data.source}))


def _find_model(path: Path, words: Sequence[str], given: Mapping[str, str]) -> TrainedModel:
    if is_run_folder(path):
        checkpoint, skipped = newest_valid(path / "checkpoints")
        if checkpoint is None:
            reasons = "; ".join(f"{bad.name}: {reason}" for bad, reason in skipped)
            what, fix = f"{path} has no checkpoint{f' that is complete ({reasons})' if reasons else ''}", "another run"
            raise CheckpointError(what, where="command line", rule="a run saves at its end", fix=fix)
        values = tomllib.loads((path / CONFIG_FILE).read_text("utf-8"))
    elif (path / MANIFEST).is_file():
        checkpoint, values = path, verify(path).run.get("config", {})
        home = path.parent.parent
        values = values or (tomllib.loads((home / CONFIG_FILE).read_text("utf-8")) if is_run_folder(home) else {})
    else:
        found = (find_family(kind).open_folder(path) for kind in family_names())
        if opened := next(filter(None, found), None):
            return TrainedModel(load(opened[0], [*opened[1:], *words]), None)
        values = {}
    if not values:
        raise InputError(
            f"{path} is no trained model",
            where="command line",
            rule="a model is a run folder, one of its checkpoints, or a folder in Hugging Face's format",
            fix=download_fix(str(path), "the path {}") or "the path of one, such as runs/llama-tiny-1",
        )
    return TrainedModel(_load(values, words, given), checkpoint)


def _load(values: Mapping[str, Any], words: Sequence[str], given: Mapping[str, str]) -> RunConfig:
    """Return the configuration of a run's model on the layout of `words`, with the run's micro-batches."""
    train, mesh = values.get("train", {}), values.get("mesh", {})
    samples = train.get("global_batch", 1) // train.get("num_microbatches", 1)
    for axis in ("dp_replicate", "dp_shard"):
        wanted = given.get(f"mesh.{axis}", "1")
        samples = samples // mesh.get(axis, 1) * (int(wanted) if wanted.isdigit() else 1)
    kept = {key: value for key, value in values.items() if key not in OF_COMMAND}
    if SOURCE in given:
        kept["data"] = {key: value for key, value in values.get("data", {}).items() if key not in OTHER_SOURCES}
    kept["train"] = {key: train[key] for key in OF_MODEL if key in train}
    kept["train"] |= {"global_batch": max(samples, 1), "steps": 1, "warmup_steps": 0}
    kept["mesh"] = {key: mesh[key] for key in ("sequence_parallel", "cp_method") if key in mesh}
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder, f"{values.get('name', 'model')}.toml")
        path.write_text(values_to_toml(kept), "utf-8")
        return load(str(path), words)


def use(model: TrainedModel, folder: Path, prompt: Prompt | None = None) -> dict[str, Any]:
    """Run a model on the ranks of its mesh, and return what came out: `loss` and `unit`, or `text` or `files`."""
    config, spec = model.config, UseSpec(model, folder, prompt)
    if prompt is None:
        config.family.open_data(_facts(config))  # its errors come before processes start
    launch(
        use_body,
        spec,
        num_ranks=config.mesh.axes().num_ranks(),
        threads=config.train.threads,
        describe_action=make_plan(config).describe_action,
        preload=config.family.preload,
    )
    answer: dict[str, Any] = json.loads(spec.result.read_text("utf-8"))
    return answer


def _facts(config: RunConfig) -> RunFacts:
    return replace(run_facts(config), trains=False)


def use_body(context: RankContext, spec: UseSpec) -> None:
    """Run one rank; torch is imported here, not in the launcher."""
    from meshwright.checkpoint.manifest import read_manifest
    from meshwright.checkpoint.save_load import load as load_tensors
    from meshwright.train.build_job import build_job, choose_device, rank_group, refresh_shared_parameters
    from meshwright.train.forward_only import PipelineForward, validate
    from meshwright.train.optimizer import named_state
    from meshwright.train.pipeline_stages import Pipeline

    config, path = spec.model.config, spec.model.checkpoint
    plan, f, device = make_plan(config), _facts(config), choose_device(config, context)
    with rank_group(config, plan, context, device):
        job = build_job(config, plan, context, device)
        if path is not None:
            state = named_state(job.model, job.optimizer)
            load_tensors(path, {name: tensor for name, tensor in state.items() if name.startswith("model.")})
            refresh_shared_parameters(job)
            for feature in job.features.values():
                feature.restore(path, read_manifest(path))
        pipeline = Pipeline(job)
        if spec.prompt is None:
            task = config.family.task(f, config.family.open_data(f), device)
            loss = validate(pipeline, task)
            answer: dict[str, Any] = {"loss": loss * task.unit.scale, "unit": task.unit.name}
        else:
            answer = dict(config.family.generate(f, PipelineForward(pipeline), spec.prompt, spec.folder))
    if context.rank == 0:
        spec.result.write_text(json.dumps(answer), "utf-8")
