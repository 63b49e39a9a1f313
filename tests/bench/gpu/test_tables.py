"""Tests of the tables of `bench/gpu`: families, proofs, arms and rows, whose words are a run's on a GPU."""

from __future__ import annotations

import pytest

from meshwright.config.facts_for_family import model_facts
from meshwright.models.contract.family import family_names
from meshwright_bench.gpu import memory, proofs, start
from meshwright_bench.gpu.cases import Setting
from meshwright_bench.gpu.commands import config_of, run_words
from meshwright_bench.gpu.parts import PARTS, load_cases
from meshwright_bench.gpu.sizes import ARMS, COMPILED, DRY, LARGE, SMALL, our_words


@pytest.fixture
def on_gpu(tmp_path) -> Setting:
    return Setting("cuda", tmp_path, "NVIDIA H200")


def names(cases) -> list[str]:
    return [case.name for case in cases]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_has_cases_of_different_names(tmp_path, part, device):
    setting = Setting(device, tmp_path, "NVIDIA H200" if device == "cuda" else None)
    found = names(load_cases(part.function, setting))
    assert found and len(set(found)) == len(found)


def test_every_family_starts_eager_and_compiled(on_gpu):
    started = [name.partition(".")[::2] for name in names(start.cases(on_gpu))]
    found = [(config_of([preset]).model.kind, way) for preset, way in started]
    assert sorted(found) == sorted((name, way) for name in family_names() for way in ("eager", "compiled"))


@pytest.mark.parametrize("preset", start.PRESETS)
def test_the_words_of_a_familys_start_are_a_run(preset, on_gpu):
    config = config_of(run_words((preset, *start.PRESETS[preset][0], "train.steps=2"), on_gpu))
    assert config.train.device == "cuda" and not config.checkpoint.at_end


@pytest.mark.parametrize("name", proofs.PROOFS)
def test_the_words_of_a_proof_are_a_run_of_one_process(name, on_gpu):
    found = config(name, on_gpu)
    assert found.mesh.axes().num_ranks() == 1 and found.train.device == "cuda"


@pytest.mark.parametrize(
    ("key", "value", "as_run"),
    [
        ("train.compile", True, True),
        ("train.dropout", 0.1, True),
        ("train.optimizer", "muon", False),
        ("capture.scope", ("layer",), False),
        ("float8.recipe", "current", True),
        ("data.packing", "documents", True),
        ("model.kind", "moe", True),
        ("model.kind", "hf", True),
        ("model.kind", "dit", True),
    ],
)
def test_each_kernel_and_feature_has_a_proof(key, value, as_run, on_gpu):
    section, _, name = key.partition(".")
    found = [one for one in proofs.PROOFS if getattr(getattr(config(one, on_gpu), section), name) == value]
    assert as_run in [proofs.PROOFS[one].as_run for one in found]


def config(proof: str, setting: Setting):
    return config_of(proofs.proof_words(proof, setting))


@pytest.mark.parametrize("arm", ARMS)
def test_our_arms_are_the_large_model(arm, on_gpu):
    config = config_of(run_words(our_words(arm, on_gpu), on_gpu))
    assert 1.49e9 < model_facts(config).num_params() < 1.51e9
    train = config.train
    assert (train.global_batch, train.seq_len, train.precision, train.compile) == (4, 4096, "bfloat16", True)
    assert bool(train.profile) is (arm == COMPILED)
    assert not train.validation_samples and not train.sample_tokens and not config.checkpoint.at_end


def test_a_dry_runs_arms_compile_nothing(tmp_path):
    setting = Setting("cpu", tmp_path)
    assert not any(config_of(run_words(our_words(arm, setting), setting)).train.compile for arm in ARMS)


def test_memory_compares_the_arms_the_plain_loss_and_small_runs(on_gpu):
    rows = {case.name: case.run.args[1] for case in memory.cases(on_gpu)}
    assert {*ARMS, memory.LOGITS, *memory.SMALL_ROWS} == set(rows)
    configs = {name: config_of(run_words(words, on_gpu)) for name, words in rows.items()}
    assert configs[memory.LOGITS].train.loss_chunk == 0 and not configs[memory.LOGITS].train.profile
    assert rows[COMPILED] == our_words(COMPILED, on_gpu), "the same words as the arm, whose run is read"
    assert configs["small.captured"].capture.scope == ("layer",)


@pytest.mark.parametrize("size", [LARGE, SMALL, DRY])
def test_no_token_is_read_twice_and_both_sides_have_enough(size):
    steps = 20
    tenth = size.num_tokens(steps) // 10  # held out
    assert size.num_tokens(steps) - tenth >= steps * size.global_batch * size.seq_len
