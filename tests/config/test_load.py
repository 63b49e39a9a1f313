"""Presets, files and overrides become one configuration; errors explain what is wrong, and their fixes work."""

from __future__ import annotations

import json
import shlex

import pytest

from meshwright.config.load import known_keys
from meshwright.config.schema import PLANNED_SECTIONS, RunConfig
from meshwright.config.source import preset_names
from meshwright.errors import ConfigError, InputError
from meshwright.plan.rules import load
from meshwright.settings.violation import format_fix
from tests.helpers import assert_every_fix_works, outcome


def value(config: RunConfig, key: str):
    found = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def write(folder, text):
    path = folder / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_nothing_given_is_the_default_preset():
    assert load(None) == load("llama-tiny")
    assert load(None).name == "llama-tiny"


def test_words_go_over_the_file_and_the_file_over_defaults(tmp_path):
    path = write(tmp_path, "[train]\nsteps = 7\nseed = 3\n")
    config = load(path, ["train.steps=9"], defaults=["train.seed=1", "train.steps=1", "train.log_every=4"])
    assert (config.train.steps, config.train.seed, config.train.log_every) == (9, 3, 4)
    assert config.name == "run"


def test_the_last_word_counts():
    assert load(None, ["train.steps=9", "train.steps=5"]).train.steps == 5


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.steps=7", 7), ("train.seed=1_000", 1000), ("train.lr=1e-4", 1e-4), ("train.lr=1", 1.0),
        ("train.compile=true", True), ("mesh.sequence_parallel=False", False), ("train.precision=bfloat16", "bfloat16"),
        ('train.precision="bfloat16"', "bfloat16"), ("data.source=some dir/**/*.txt", "some dir/**/*.txt"),
        ("data.source=/a/b=c,d.txt", "/a/b=c,d.txt"), ('data.source="a # b.txt"', "a # b.txt"),
        ("data.source='a b.txt'", "a b.txt"), ("data.source=it's.txt", "it's.txt"),
        ("data.source=[ab]*.txt", "[ab]*.txt"),
        # Words that happen to be TOML of another type are still strings where a string belongs.
        ("data.source=2024-01-01", "2024-01-01"), ("data.source=123", "123"), ("data.source=[1]", "[1]"),
        ("data.source=true", "true"), ("data.cache_dir=none", None), ("data.cache_dir=null", None),
        ('data.cache_dir="none"', "none"), ("train.threads=2", 2), ("name=my run", "my run"),
        ("model.rope_scaling.factor=4.0", 4.0),
    ],
)  # fmt: skip
def test_words_have_types(word, expected):
    found = value(load(None, [word]), word.partition("=")[0])
    assert found == expected and type(found) is type(expected)


def test_a_section_can_be_unset_and_given_whole():
    assert load("llama3-405b", ["model.rope_scaling=none"]).model.rope_scaling is None
    whole = load("llama-tiny", ["model.rope_scaling={factor = 4.0, original_seq_len = 512}"]).model.rope_scaling
    assert (whole.factor, whole.original_seq_len) == (4.0, 512)


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("train.stpes=7", "train.steps"),
        ("steps=7", "train.steps"),
        ("model.layers=2", "model.num_layers"),
        ("mesh.tensor_parallel=2", "mesh.tp"),
        ("optimizer.lr=0.1", "train.lr"),
        ("train.batch=8", "train.global_batch"),
        ("checkpoint.interval=8", "checkpoint.every"),
        ("pipeline.chunkz=2", "pipeline.chunks"),
    ],
)
def test_an_unknown_key_names_the_nearest(word, nearest):
    error = outcome([word])
    key = word.partition("=")[0]
    assert isinstance(error, ConfigError)
    assert error.what == f"unknown key {key}"
    assert error.where == f"command line, {key}"
    assert error.fix.split(" ")[0].partition("=")[0] == nearest
    assert nearest in known_keys()


def test_an_unknown_key_in_a_file_names_the_file(tmp_path):
    path = write(tmp_path, "[train]\nstpes = 7\n")
    error = outcome([], path)
    assert error.what == "unknown key train.stpes" and error.where == f"{path}, train.stpes"
    assert error.fix.startswith("train.steps")


@pytest.mark.parametrize("text", ["[optimizer]\n", "[optimizer.more]\n", "[parallelism]\n"])
def test_an_unknown_section_without_keys_is_not_ignored(text, tmp_path):
    error = outcome([], write(tmp_path, text))
    assert isinstance(error, ConfigError) and error.what == f"unknown key {text.strip('[]' + chr(10))}"


@pytest.mark.parametrize("section", PLANNED_SECTIONS)
def test_a_planned_section_is_not_available_yet(section, tmp_path):
    for error in (outcome([f"{section}.x=1"]), outcome([], write(tmp_path, f"[{section}]\nx = 1\n"))):
        assert isinstance(error, ConfigError)
        assert "not available yet" in error.what and section in error.what
        assert error.fix == f"remove {section}.x"


WRONG = {
    "train.steps": ["many", "1.5", "true", "none", "0", "-1", '"7"'], "train.lr": ["fast", "nan", "inf", "0"],
    "train.compile": ["1", "yes"], "train.precision": ["fp8", "none"], "train.seed": ["99999999999999999999999"],
    "model.num_heads": ["x"], "model.num_kv_heads": ["0"], "model.dim": ["[1, 2]", "{a = 1}"], "model.kind": ["mamba"],
    "data.token_dtype": ["int4"], "mesh.tp": ["1e3", "2024-01-01"], "checkpoint.keep": ["0"],
    "model.rope_scaling.factor": ["0"], "name": ["a/b", ""], "data.cache_dir": [""], "train.threads": ["1000000"],
}  # fmt: skip


@pytest.mark.parametrize("word", [f"{key}={value}" for key, values in WRONG.items() for value in values])
@pytest.mark.parametrize("preset", ["llama-tiny", "llama3-70b"])
def test_a_wrong_value_is_explained_and_the_fix_works(word, preset):
    key = word.partition("=")[0]
    error = outcome([word], preset)
    assert isinstance(error, ConfigError), f"{word} was taken"
    assert key in error.what and error.where == f"command line, {key}" and error.rule
    assert "None" not in error.what + error.rule + error.fix
    assert_every_fix_works(error, [word], preset)


def test_a_wrong_value_in_a_file_names_the_file(tmp_path):
    path = write(tmp_path, "[train]\nsteps = 'x'\n")
    error = outcome([], path)
    assert error.where == f"{path}, train.steps"
    assert_every_fix_works(error, [], path)


def test_the_fix_of_a_wrong_word_keeps_what_the_preset_says():
    assert "model.num_heads=64" in outcome(["model.num_heads=x"], "llama3-70b").fix


def test_long_input_is_shown_short():
    for error in (outcome([f"train.steps={'9x' * 5000}"]), outcome([f"train.{'x' * 5000}=1"]), outcome(["x" * 5000])):
        assert max(map(len, str(error).splitlines())) <= 200


@pytest.mark.parametrize("section", ["model", "train", "model.rope_scaling"])
def test_a_section_is_no_value(section):
    error = outcome([f"{section}=5"])
    assert isinstance(error, ConfigError)
    assert f"{section} is a section" in error.what and f"{section}." in error.fix


@pytest.mark.parametrize("word", ["=5", "train.steps", ".=1", "train.=5", ".steps=5", "train..steps=5", "=", ""])
def test_what_is_no_override(word):
    error = outcome([word])
    assert isinstance(error, ConfigError) and error.rule and error.fix


def test_a_preset_after_words_is_told_to_come_first():
    error = outcome(["train.steps=5", "llama3-8b"])
    assert "first" in error.rule + error.fix


@pytest.mark.parametrize(
    ("name", "nearest"), [("llama-tinny", "llama-tiny"), ("llama3_8b", "llama3-8b"), ("???", "llama-tiny")]
)
def test_an_unknown_preset_names_the_nearest(name, nearest):
    error = outcome([], name)
    assert isinstance(error, ConfigError)
    assert name in error.what and "llama3-405b" in error.rule
    assert isinstance(outcome([], error.fix.split()[0]), RunConfig) and nearest in error.fix


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    (tmp_path / "config.toml").write_text("")
    error = outcome([], str(tmp_path / "confg.toml"))
    assert "no such file" in error.what and str(tmp_path / "config.toml") in error.fix


@pytest.mark.parametrize("text", ["[train\nsteps=5", "steps = = 5", b"\xff\xfe\x00", "a = 1\na = 2\n", b"x = '\xff'"])
def test_what_is_not_toml_is_said_to_be_not(text, tmp_path):
    error = outcome([], write(tmp_path, text))
    assert isinstance(error, ConfigError) and "not TOML" in error.what and error.fix


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")
    assert load(str(path)).train.steps == 3


def test_a_folder_is_not_a_file(tmp_path):
    (tmp_path / "x.toml").mkdir()
    (tmp_path / "a b.toml").write_text("[train]\nsteps = 7\n")
    error = outcome([], str(tmp_path / "x.toml"))
    assert isinstance(error, ConfigError) and "(a directory)" in error.what
    [source] = shlex.split(error.fix)
    assert outcome([], source).train.steps == 7


@pytest.mark.parametrize("word", ["train.freeze=[1,2]", "train.freeze=['a',2]", "pipeline.layers_per_stage=[2,'x']"])
def test_an_item_that_can_not_be_is_named_with_its_key(word):
    key, _, value = word.partition("=")
    error = outcome([word])
    assert error.what.startswith(f"{key}[{0 if '1' in value else 1}] = ") and error.where == f"command line, {key}"
    assert_every_fix_works(error, [word])


def test_a_fix_is_one_word_to_a_shell():
    assert shlex.split(format_fix({"data.source": "my texts/*.txt", "train.freeze": ("a b*",)})) == [
        "data.source=my texts/*.txt", "train.freeze=a b*",
    ]  # fmt: skip


def test_a_second_toml_key_does_not_hide_in_a_word():
    error = outcome(["train.steps=5\nmodel.dim=4"])
    assert isinstance(error, ConfigError)


def test_known_keys_cover_every_field():
    def walk(tree, prefix):
        for key, item in tree.items():
            yield from walk(item, f"{prefix}{key}.") if isinstance(item, dict) else [f"{prefix}{key}"]

    for preset in ("llama3-405b", "dit-digits"):  # one with every optional section, and the other family
        config = load(preset)
        assert set(walk(json.loads(config.model_dump_json()), "")) == set(known_keys(config.model.kind))


def test_a_key_of_another_kind_of_model():
    error = outcome(["model.vocab_size=300"], "dit-digits")
    assert isinstance(error, ConfigError) and error.what == "dit models have no model.vocab_size"
    assert error.fix == "remove model.vocab_size" and "model.image_size" in error.rule
    assert "model.vocab_size" not in error.rule


def test_a_key_of_another_kind_of_model_that_another_section_has():
    assert "llama has the keys comm.weights, model." in outcome(["model.weights=none"], "llama-tiny").rule


def test_a_preset_of_another_kind_of_model():
    """Its keys can't be left out."""
    error = outcome(["model.kind=llama"], "dit-digits")
    assert isinstance(error, ConfigError) and error.what == "llama models have no model.image_size"
    assert error.fix == "remove model.kind=llama, or start from a preset for llama"


def test_a_kind_of_model_that_there_is_not():
    error = outcome(["model.kind=gpt"])
    assert isinstance(error, ConfigError) and "built-in families are dit, hf, llama" in error.rule
    assert error.fix == "model.kind=llama" and error.what == "model.kind = 'gpt': no such family"
    assert isinstance(outcome([error.fix]), RunConfig)


def test_every_preset_is_valid():
    assert {"llama-tiny", "llama3-8b", "llama3-70b", "llama3-405b"} <= set(preset_names())
    for name in preset_names():
        assert load(name).name == name


def test_errors_are_input_errors_with_exit_code_2():
    assert outcome(["train.steps=x"]).exit_code == 2
    assert issubclass(ConfigError, InputError)
