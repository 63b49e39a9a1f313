"""Whole files and command lines of other frameworks lead to ours, and what is of a validation stays one."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.overlay import fields
from meshwright.config.schema import RunConfig
from meshwright.errors import MeshwrightError
from meshwright.models.contract.family import family_names
from tests.helpers import outcome

TORCHTITAN = {
    "job.dump_folder": "--out", "job.description": None, "model.name": "first word", "model.flavor": "first word",
    "model.hf_assets_path": "data.tokenizer", "optimizer.name": "train.optimizer", "optimizer.lr": "train.lr",
    "lr_scheduler.warmup_steps": "train.warmup_steps", "training.local_batch_size": "train.num_microbatches",
    "training.global_batch_size": "train.global_batch", "training.seq_len": "train.seq_len",
    "training.max_norm": "train.max_grad_norm", "training.steps": "train.steps", "training.dataset": "data.source",
    "parallelism.data_parallel_shard_degree": "mesh.dp_shard", "parallelism.tensor_parallel_degree": "mesh.tp",
    "parallelism.pipeline_parallel_degree": "mesh.pp", "parallelism.context_parallel_degree": "mesh.cp",
    "parallelism.pipeline_parallel_schedule": "pipeline.schedule", "checkpoint.interval": "checkpoint.every",
    "checkpoint.keep_latest_k": "checkpoint.keep", "activation_checkpoint.mode": "recompute.policy",
    "compile.enable": "train.compile", "validation.freq": "train.validate_every", "metrics.log_freq": "train.log_every",
    "validation.steps": "train.validation_samples", "metrics.enable_wandb": "train.trackers",
}  # fmt: skip
"""Keys of a file of torchtitan's, and what of ours the error names."""
MEGATRON = {
    "--tensor-model-parallel-size": "mesh.tp", "--pipeline-model-parallel-size": "mesh.pp",
    "--num-layers-per-virtual-pipeline-stage": "pipeline.chunks", "--context-parallel-size": "mesh.cp",
    "--cp-comm-type": "mesh.cp_method", "--expert-model-parallel-size": "mesh.ep",
    "--micro-batch-size": "train.num_microbatches", "--global-batch-size": "train.global_batch",
    "--recompute-granularity": "recompute.policy", "--bf16": "train.precision", "--data-path": "data.source",
    "--lr-decay-style": "train.lr_schedule", "--lr-warmup-iters": "train.warmup_steps", "--clip-grad": "max_grad_norm",
    "--save-interval": "checkpoint.every", "--train-iters": "train.steps", "--eval-iters": "train.validation_samples",
    "--untie-embeddings-and-output-weights": "model.tie_embeddings", "--min-lr": "train.min_lr_ratio",
}  # fmt: skip
"""Options of a command line of Megatron-LM's, likewise."""


@pytest.mark.parametrize("name", [*TORCHTITAN, *MEGATRON])
@pytest.mark.parametrize("value", ["2", "AdamW"])
def test_names_of_whole_files_and_commands_lead_to_ours(name: str, value: str) -> None:
    """Whatever their value is, the error is ours."""
    expected = {**TORCHTITAN, **MEGATRON}[name]
    error = outcome([f"{name}={value}"])
    assert isinstance(error, MeshwrightError)
    said = f"{error.rule} {error.fix}"
    assert expected is None or expected in said


@pytest.mark.parametrize("section", ["model", "optimizer", "validation", "x.y"])
def test_no_section_of_others_makes_a_name_of_ours_a_crash(section: str) -> None:
    for key in {key.rpartition(".")[2] for kind in family_names() for key in fields(kind)}:
        assert isinstance(outcome([f"{section}.{key}=1"]), MeshwrightError | RunConfig)


def test_batches_of_a_validation_become_samples() -> None:
    assert outcome(["validation.steps=5"]).fix.startswith("train.validation_samples=80 ")


@pytest.mark.parametrize("name", ["validation.seq_len", "eval.batch_size", "evaluation.steps"])
def test_what_is_of_a_validation_is_none_of_training(name: str) -> None:
    error = outcome([f"{name}=4"])
    assert error.what == f"unknown key {name}" and not any(
        key in error.fix for key in ("train.seq_len", "train.global_batch", "train.steps")
    )


def test_a_virtual_stage_s_layers_become_chunks() -> None:
    words = ["model.num_layers=8", "mesh.pp=2", "train.num_microbatches=4"]
    assert outcome([*words, "--num-layers-per-virtual-pipeline-stage=2"]).fix.startswith("pipeline.chunks=2 ")


def test_a_name_without_a_counterpart_hides_no_translation(tmp_path: Path) -> None:
    """In a whole file of torchtitan's, which has both: the unknown one comes next."""
    text = "[job]\ndescription = 'x'\n[nonsense]\nenable = true\n[optimizer]\nname = 'AdamW'\n[training]\nsteps = 20\n"
    (tmp_path / "titan.toml").write_text(text)
    error = outcome([], str(tmp_path / "titan.toml"))
    assert error.fix == "train.optimizer=adamw train.steps=20 in place of optimizer.name, training.steps"
    (tmp_path / "titan.toml").write_text(text.partition("[optimizer]")[0])
    assert "job.description" in outcome([], str(tmp_path / "titan.toml")).what


@pytest.mark.parametrize("name", ["--load-checkpoint-path", "optimizer.betas", "mesh.fsd"])
def test_a_key_that_only_looks_alike_is_not_suggested(name: str) -> None:
    error = outcome([f"{name}=2"])
    assert error.what.startswith("unknown") and "nearest" not in error.fix
