"""Names of other frameworks, in words and in whole files, lead to ours: what an error suggests in their place loads,
and tables name real keys.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

from meshwright.config.foreign_names import CHOICES, DERIVED, DIFFERENCES, KEYS, PRESETS, UNAVAILABLE, VALUES
from meshwright.config.overlay import fields, is_valid
from meshwright.config.schema import RunConfig
from meshwright.config.source import preset_names
from meshwright.config.translate import find_meaning, nearest_preset, normalize, parse_value, value_named
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models.contract.family import family_names, find_family
from meshwright.plan.rules import load
from tests.helpers import alternatives, assert_every_fix_works, outcome

WORDS = {
    "mesh.fsdp=4": "mesh.dp_shard=4",
    "fsdp=true": "mesh.dp_shard=2",
    "mesh.dp=2": "mesh.dp_shard=2",
    "mesh.data_parallel_shard_degree=4": "mesh.dp_shard=4",
    "parallelism.data_parallel_shard_degree=-1": "mesh.dp_shard=1",
    "tensor_model_parallel_size=2": "mesh.tp=2",
    "Tensor-Model-Parallel-Size=2": "mesh.tp=2",
    "--tensor-parallel-size=2": "mesh.tp=2",
    "num_processes=8": "mesh.dp_shard=8",
    "max_steps=10": "train.steps=10",
    "training.steps=10k": "train.steps=10000",
    "train_iters=1e3": "train.steps=1000",
    "num_train_epochs=3": "train.steps=800",
    "per_device_train_batch_size=4": "train.num_microbatches=4",
    "micro_batch_size=8": "train.num_microbatches=2",
    "gradient_accumulation_steps=2": "train.num_microbatches=2",
    "learning_rate=1e-4": "train.lr=0.0001",
    "lr=1e-4": "train.lr=0.0001",
    "--lr=3": "train.lr=3.0",
    "optimizer.lr=8e-4": "train.lr=0.0008",
    "seq_length=512": "train.seq_len=512",
    "max_position_embeddings=4k": "train.seq_len=4096",
    "sliding_window=64": "model.window=64",
    "bf16=true": "train.precision=bfloat16",
    "bf16=false": "train.precision=float32",
    "fp16=true": "train.precision=bfloat16",
    "training.dtype=bf16": "train.precision=bfloat16",
    "mixed_precision=no": "train.precision=float32",
    "warmup_steps=30": "train.warmup_steps=30",
    "warmup_ratio=0.1": "train.warmup_steps=80",
    "min_lr=0.0004": "train.min_lr_ratio=0.1",
    "lr_scheduler_type=warmup_stable_decay": "train.lr_schedule=wsd",
    "clip_grad=0.5": "train.max_grad_norm=0.5",
    "gradient_clipping=0": "train.max_grad_norm=1e+30",
    "gradient_checkpointing=true": "recompute.policy=full",
    "recompute_activations=true": "recompute.policy=selective",
    "activation_checkpoint.mode=selective": "recompute.policy=selective",
    "activation_checkpoint.mode=none": "recompute.policy=none",
    "zero_stage=2": "mesh.reshard_after_forward=false",
    "zero_optimization.stage=3": "mesh.reshard_after_forward=true",
    "checkpoint.interval=500": "checkpoint.every=500",
    "seed=3": "train.seed=3",
    "compile.enable=true": "train.compile=true",
    "report_to=tensorboard": "train.trackers=tensorboard",
    "enable_wandb=true": "train.trackers=wandb",
    "report_to=none": "train.trackers=[]",
    "enable_profiling=true": "train.trace=true",
    "use_cpu=true": "train.device=cpu",
    "tokenizer_model=a.json": "data.tokenizer=a.json",
    "dataset=texts/*.txt": "data.source=texts/*.txt",
    "num_workers=4": "data.prefetch=4",
    "sample_packing=true": "data.packing=documents",
    "pipeline_parallel_schedule=Interleaved1F1B": "pipeline.schedule=interleaved",
    "virtual_pipeline_model_parallel_size=2": "pipeline.chunks=2",
    "zero_quantized_weights=true": "comm.weights=int8",
    "fp8_recipe=delayed": "float8.recipe=delayed",
}
"""Another framework's word, and the first of the words that the default preset takes in its place: those that are more
than another name, which `test_what_every_name_suggests_loads` has all of."""

VALUE_WORDS = {
    "train.precision=bf16": "train.precision=bfloat16",
    "train.precision=fp32": "train.precision=float32",
    "train.precision=float16": "train.precision=bfloat16",
    "train.precision=fp16": "train.precision=bfloat16",
    "train.precision=BFloat16": "train.precision=bfloat16",
    "train.precision=true": "train.precision=float32",
    "train.seq_len=128k": "train.seq_len=131072",
    "train.steps=10k": "train.steps=10000",
    "train.steps=1e3": "train.steps=1000",
    "train.steps=1.5k": "train.steps=1500",
    "train.steps=1,000": "train.steps=1000",
    "train.compile=yes": "train.compile=true",
    "train.lr=2k": "train.lr=2000.0",
    "recompute.policy=selective_ac": "recompute.policy=selective",
    "recompute.policy=op": "recompute.policy=selective",
    "recompute.policy=Full": "recompute.policy=full",
    "recompute.policy=off": "recompute.policy=none",
    "pipeline.schedule=GPipe": "pipeline.schedule=f-then-b",
    "pipeline.schedule=1F1B": "pipeline.schedule=1f1b",
    "pipeline.schedule=Interleaved1F1B": "pipeline.schedule=interleaved",
    "pipeline.schedule=ZBVZeroBubble": "pipeline.schedule=zb-v",
    "pipeline.schedule=DualPipeV": "pipeline.schedule=dualpipe-v",
    "mesh.reshard_after_forward=never": "mesh.reshard_after_forward=false",
    "train.max_grad_norm=0": "train.max_grad_norm=1e+30",
}


def suggestion(error: ConfigError) -> list[str]:
    """The words that an error suggests in place of others."""
    assert isinstance(error, ConfigError), error
    assert error.what and error.where and error.rule
    [words] = alternatives(error.fix)
    return words


@pytest.mark.parametrize(("word", "own"), WORDS.items())
def test_a_foreign_key_names_ours_and_the_suggestion_loads(word, own):
    error = outcome([word])
    words = suggestion(error)
    name = word.partition("=")[0]
    assert words[0] == own and name in error.what and f"{name} is {own.partition('=')[0]} here" in error.rule
    assert isinstance(outcome(words), RunConfig), error


@pytest.mark.parametrize(("word", "own"), VALUE_WORDS.items())
def test_a_foreign_value_names_ours_and_the_suggestion_loads(word, own):
    error = outcome([word])
    assert alternatives(error.fix)[0] == [own]
    assert_every_fix_works(error, [word])


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV", "Interleaved1F1B", "GPipe", "1F1B"])
def test_a_foreign_schedule_on_a_pipeline(name):
    words = ["mesh.pp=2", f"pipeline.schedule={name}"]
    error = outcome(words)
    assert alternatives(error.fix)[0][0] == f"pipeline.schedule={value_named('pipeline.schedule', name)}"
    assert_every_fix_works(error, words)


def test_all_foreign_keys_are_in_one_error():
    words = ["--tensor-parallel-size=2", "mesh.pp=2", "--bf16=true", "--micro-batch-size=4", "--global-batch-size=64"]
    error = outcome(words)
    kept = suggestion(error)
    assert kept == ["mesh.tp=2", "train.precision=bfloat16", "train.global_batch=64", "train.num_microbatches=16"]
    assert isinstance(outcome(["mesh.pp=2", *kept]), RunConfig)


def test_batch_size_and_accumulation_make_the_global_batch():
    words = ["per_device_train_batch_size=4", "gradient_accumulation_steps=8", "num_processes=2"]
    assert suggestion(outcome(words))[:3] == ["train.num_microbatches=8", "mesh.dp_shard=2", "train.global_batch=64"]


def test_a_value_that_does_not_fit_is_said_not_to():
    """The default preset has four heads."""
    error = outcome(["tensor_parallel_size=3"])
    [word] = suggestion(error)
    assert word == "mesh.tp=2" and isinstance(outcome([word]), RunConfig)
    assert error.fix == "mesh.tp=2 in place of tensor_parallel_size (mesh.tp = 3 does not fit)"


def test_float16_is_said_not_to_be_available():
    for word in ("train.precision=fp16", "fp16=true", "--fp16=true"):
        assert "float16 needs loss scaling" in outcome([word]).rule


def test_an_invalid_value_does_not_hide_what_another_means():
    assert alternatives(outcome(["train.steps=10k", "train.seq_len=128k"]).fix) == [["train.steps=10000"]]


def test_foreign_keys_in_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[parallelism]\ntensor_parallel_degree = 2\n[training]\nseq_len = 64\nsteps = 5\n")
    error = outcome([], str(path))
    assert suggestion(error) == ["mesh.tp=2", "train.seq_len=64", "train.steps=5"]
    assert error.where == f"{path}, parallelism.tensor_parallel_degree"


@pytest.mark.parametrize(
    ("word", "own"),
    [
        ("num_local_experts=16", "model.num_experts=16"),
        ("moe_router_topk=4", "model.top_k=4"),
        ("num_experts=16", "model.num_experts=16"),
        ("moe_ffn_hidden_size=64", "model.expert_dim=64"),
        ("num_experts_per_tok=1", "model.top_k=1"),
        ("expert_capacity_factor=1.5", "model.capacity_factor=1.5"),
        ("num_local_experts=many", "model.num_experts=8"),
    ],
)
def test_a_foreign_key_of_another_family_names_a_preset(word, own):
    error = outcome([word])
    preset, words = error.fix.split()[0], suggestion(error)
    assert words[0] == own and preset == "moe-tiny"
    assert isinstance(outcome(words, preset), RunConfig)
    assert suggestion(outcome([word], preset)) == words


def test_experts_are_sharded_by_a_foreign_name():
    words = suggestion(outcome(["expert_model_parallel_size=2", "num_processes=2"], "moe-tiny"))
    assert words[:2] == ["mesh.ep=2", "mesh.dp_shard=2"]
    assert isinstance(outcome(words, "moe-tiny"), RunConfig)


@pytest.mark.parametrize(("word", "fix"), [("output_dir=x", "--out x"), ("resume_from_checkpoint=a", "--resume a")])
def test_a_foreign_name_of_an_option(word, fix):
    assert outcome([word]).fix == fix


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("llama", "llama-tiny"),
        ("llama3", "llama3-8b"),
        ("llama-3-8b", "llama3-8b"),
        ("meta-llama/Llama-3.1-8B", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("llama3_1_405b", "llama3-405b"),
        ("mixtral", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3-like"),
        ("dit", "dit-digits"),
        ("DiT-XL/2", "dit-xl-2"),
        ("moe", "moe-tiny"),
        ("gpt2", "llama-tiny"),
        ("stable-diffusion", "dit-digits"),
        ("something-else", "llama-tiny"),
    ],
)
def test_a_model_names_the_nearest_preset(name, preset):
    error = outcome([], name)
    assert isinstance(error, ConfigError) and error.fix == preset
    assert isinstance(outcome([], error.fix), RunConfig)


def test_a_file_of_another_format_says_how_to_write_one(tmp_path):
    assert outcome([], "config.yaml").fix.startswith("meshwright presets llama-tiny > config.toml")


def test_weights_in_hugging_face_format_are_imported(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert f"meshwright checkpoint import {tmp_path}" in outcome([], str(tmp_path)).fix


def all_names() -> list[str]:
    """Every name that has a key of ours."""
    tables = (KEYS, *(find_family(kind).foreign_names for kind in family_names()))
    return [*(name for table in tables for text in table.values() for name in text.split()), *CHOICES, *DERIVED]


def wrong_targets() -> list[str]:
    """Keys and values in the tables that no family has."""
    tables = [KEYS, VALUES, UNAVAILABLE, DIFFERENCES, *(find_family(kind).foreign_names for kind in family_names())]
    keys = {key for table in tables for key in table} | {key for key, _ in CHOICES.values()} | set(DERIVED.values())
    wrong = [key for key in keys if not any(key in fields(kind) for kind in family_names())]
    for key, values in [*((key, table) for key, table in VALUES.items()), *CHOICES.values()]:
        for text in values.values():
            owner = next((kind for kind in family_names() if key in fields(kind)), None)
            if owner is None:
                continue
            known = value_named(key, text) == text if key == "pipeline.schedule" else True
            if not known or not is_valid(owner, key, parse_value(text, fields(owner)[key].annotation)):
                wrong.append(f"{key}={text}")
    return wrong + [preset for preset in PRESETS.values() if preset not in preset_names()]


def test_every_key_and_value_in_the_tables_exists():
    assert wrong_targets() == []


@pytest.mark.parametrize(
    ("table", "entry", "found"),
    [
        ("KEYS", {"mesh.tensor": "tensor_parallel"}, "mesh.tensor"),
        ("CHOICES", {"bf16": ("train.dtype", {})}, "train.dtype"),
        ("CHOICES", {"bf16": ("train.precision", {"true": "bf16"})}, "train.precision=bf16"),
        ("DERIVED", {"epochs": "train.epochs"}, "train.epochs"),
        ("VALUES", {"train.precision": {"half": "float16"}}, "train.precision=float16"),
        ("VALUES", {"pipeline.schedule": {"zbv": "zbv"}}, "pipeline.schedule=zbv"),
        ("PRESETS", {"gpt": "gpt-2"}, "gpt-2"),
    ],
)
def test_a_wrong_entry_is_found(monkeypatch, table, entry, found):
    monkeypatch.setitem(globals(), table, {**globals()[table], **entry})
    assert wrong_targets() == [found]


def test_the_tables_have_many_names_and_no_name_twice():
    names = list(map(normalize, all_names()))
    assert len(names) >= 150 and len(set(names)) == len(names)
    assert all(find_meaning(name) for name in names)


def test_no_foreign_name_hides_a_key():
    """A name that is the last part of one of our keys in the sections looked up by it means this key."""
    for kind in family_names():
        for key in fields(kind):
            section, _, tail = key.rpartition(".")
            meaning = find_meaning(tail) if section in ("mesh", "train") else None
            assert meaning is None or meaning.key == key


def test_the_nearest_preset_is_none_for_unknown_words():
    assert nearest_preset("7", preset_names()) is None and nearest_preset("???", preset_names()) is None


def test_what_every_name_suggests_loads():
    for name, value in zip(all_names(), cycle(["2", "true", "anything"]), strict=False):
        if find_meaning(name).key.startswith("lora."):  # needs transformers, see tests/models/hf/test_lora.py
            continue
        preset = "llama-tiny" if find_meaning(name).key in fields(load(None).model.kind) else "moe-tiny"
        error = outcome([f"{name}={value}"], preset)
        words = suggestion(error)
        assert isinstance(outcome(words, preset), RunConfig), f"{name}={value}: {error}"


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
