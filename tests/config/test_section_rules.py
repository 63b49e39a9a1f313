"""Rules within sections: what is refused before processes start, with fixes that all work."""

from __future__ import annotations

import pytest

from meshwright.config.schema import RunConfig, run_type
from meshwright.config.source import to_toml
from meshwright.errors import ConfigError
from meshwright.plan.rules import load
from meshwright.settings.violation import format_value
from tests.helpers import assert_every_fix_works, outcome

LLAMA, DIT, VIDEO = "llama-tiny", "dit-digits", "dit-digits-video"
LAYER, MLP = "capture.scope=layer", "capture.scope=mlp"
MIXED = "data.mixture=['0.7:web/*.jsonl','0.3:stdlib']"
ZERO = "final.head.weight, which starts at zero"

VIOLATIONS = [
    (DIT, ["train.freeze=time_embedd.*"], "train.freeze has time_embedd.*, which matches no parameter", "globs match"),
    (DIT, ["train.freeze=['embed.*','label.*']"], "train.freeze has label.*, which matches no", "globs match"),
    (DIT, ["train.freeze=blocks.4.*"], "train.freeze has blocks.4.*", "globs match"),
    (DIT, ["train.freeze=*"], "train.freeze leaves no parameter to train", "at least one"),
    (DIT, ["train.freeze=['*.weight','*.bias']"], "train.freeze leaves no parameter to train", "at least one"),
    (DIT, ["train.freeze=['*.weight','*.bias','x']"], "train.freeze has x", "globs match"),
    (DIT, ["train.freeze="], "train.freeze has ", "globs match"),
    (DIT, ["train.freeze=final*"], ZERO, ""),
    (VIDEO, ["train.freeze=['embed.*','*.head.*']"], ZERO, ""),
    (DIT, ["diffusion.label_dropout=0"], "guidance", ""),  # the null class is learned from samples without theirs
    (LLAMA, [LAYER, "mesh.tp=2"], "capture.scope = layer with mesh.tp = 2", "moves no bytes between ranks"),
    (LLAMA, [LAYER, "mesh.cp=2"], "capture.scope = layer with mesh.cp = 2", "moves no bytes between ranks"),
    (LLAMA, [MLP, "train.compile=true"], "capture.scope = mlp with train.compile", "captured as a whole"),
    (LLAMA, [MLP, "recompute.policy=full"], "capture.scope = mlp with recomputation", "captured as a whole"),
    (LLAMA, [MLP, "recompute.blocks=full:0"], "capture.scope = mlp with recomputation", "captured as a whole"),
    (LLAMA, [LAYER, "train.compile=true", "capture.backend=simulate"], "train.compile and capture", "one by one"),
    (LLAMA, [LAYER, "capture.backend=cuda", "train.device=cpu"], "with train.device = cpu", "a CUDA device"),
    (LLAMA, ["capture.scope=attentoin"], "has attentoin, which is no module", "globs over the names"),
    (LLAMA, ["capture.scope=['attention','chunk']"], "has chunk, which is no module", "one block at a time"),
    (LLAMA, ["capture.scope=full_step"], "has full_step, which is no module", "between graphs"),
    (LLAMA, ["capture.scope=moe_preprocess"], "has moe_preprocess, which is no module", "within the scope moe"),
    (DIT, [MIXED], "has no effect", "it applies to text"),
    (DIT, ["data.when_exhausted=end"], "has no effect", "it applies to text"),
    (DIT, ["train.eps=1e-300"], "train.eps = 1e-300 is 0 in float32", "division by zero"),
    (LLAMA, ["model.norm_eps=1e-40", "train.precision=bfloat16"], "model.norm_eps = 1e-40 is 0 in float32", "division"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "words", "what", "rule"), VIOLATIONS)
def test_a_violation_is_explained_and_every_fix_works(preset, words, what, rule):
    error = outcome(words, preset)
    assert isinstance(error, ConfigError), error
    assert what in error.what and rule in error.rule
    assert error.where.startswith("command line, ") and error.where.partition(", ")[2].partition(".")[0] in "".join(
        words
    )
    assert_every_fix_works(error, words, preset)
    if what is ZERO:
        assert "model.zero_init=false" in error.fix and "train.freeze=" in error.fix


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        *((DIT, [f"train.freeze={glob}"]) for glob in ("final.head.bias", "final.modulation*", "blocks.*")),
        (LLAMA, ["train.freeze=head.weight"]),
        (LLAMA, [LAYER, "recompute.policy=full"]),
        (LLAMA, [LAYER, "train.compile=true", "capture.backend=eager"]),
        (LLAMA, ["capture.scope=['attention','region:mine','ffn.*']"]),
        (LLAMA, ["mesh.tp=2", "capture.strict=true"]),
        (LLAMA, ["train.eps=1e-300", "model.norm_eps=1e-300", "train.precision=float64"]),
        (LLAMA, ["train.eps=1.2e-38"]),
        (LLAMA, ["train.momentum=0.8", "train.optimizer=muon", "train.beta2=0.9"]),
    ],
)
def test_the_rest_is_allowed(preset, words):
    assert isinstance(outcome(words, preset), RunConfig)


def test_a_tied_head_is_frozen_by_its_embedding_s_name():
    assert isinstance(outcome(["model.tie_embeddings=true", "train.freeze=head.weight"]), ConfigError)


@pytest.mark.parametrize("words", [["train.momentum=0.8"], ["train.beta2=0.9", "train.optimizer=sgd"]])
def test_keys_that_an_optimizer_does_not_read_are_an_error(words):
    assert outcome(words).what == f"{words[0].replace('=', ' = ')} has no effect"


def test_sources_need_not_exist_to_plan():
    assert outcome([MIXED]).data.mixture == ("0.7:web/*.jsonl", "0.3:stdlib")
    assert outcome(["data.mixture=1:stdlib"]).data.mixture == ("1:stdlib",)


@pytest.mark.parametrize("value", ["stdlib", "['1:a','0:b']", "['1:a','1:a']", "['1:a','1e-9:b']"])
def test_a_malformed_mixture(value):
    error = outcome([f"data.mixture={value}"])
    assert isinstance(error, ConfigError) and error.where == "command line, data.mixture" and error.rule and error.fix


def test_a_source_beside_a_mixture():
    words = [MIXED, "data.source=a/*.txt"]
    error = outcome(words)
    assert isinstance(error, ConfigError) and "data.mixture is set too" in error.what
    assert error.where == "command line, data.source" and "'<weight>:a/*.txt' as an entry" in error.fix
    error.fix = error.fix.rpartition(" or ")[0]
    assert_every_fix_works(error, words)


def test_a_mixture_takes_the_place_of_a_presets_source():
    assert outcome([], "llama3-8b").data.source == "data/*.txt"
    config = outcome([MIXED], "llama3-8b")
    assert config.data.source == "stdlib" and config.data.mixture
    assert isinstance(outcome([MIXED, "data.source=data/*.txt"], "llama3-8b"), ConfigError)


UNREAD = [
    *((LLAMA, f"diffusion.{word}") for word in ("guidance=3", "num_samples=0", "schedule=linear")),
    *((DIT, word) for word in ("train.seq_len=64", "train.sample_tokens=0", "train.sample_prompt=a",
                               "data.tokenizer=a.json", "data.packing=documents", "data.separator=0")),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "word"), UNREAD)
def test_a_key_of_another_kind_of_model_is_not_ignored(preset, word, tmp_path):
    """But a file with all keys, such as that of a saved run, is taken unless one asks for what is not done."""
    key, _, value = word.partition("=")
    error = outcome([word], preset)
    assert isinstance(error, ConfigError) and error.where == f"command line, {key}"
    assert error.what.startswith(f"{key} = ") and error.what.endswith(" has no effect")
    other = "for dit" if preset == LLAMA else "for text"
    assert error.fix.endswith(f"remove {key}, or start from a preset {other}")
    assert_every_fix_works(error, [word], preset)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(load(preset)))
    if preset == LLAMA:  # those of before families had sections of their own
        rest = to_toml(run_type("dit")()).partition("[diffusion]")[2].partition("\n[")[0]
        path.write_text(path.read_text() + "\n[diffusion]" + rest)
    assert outcome([], str(path)) == load(preset)
    section, name = key.split(".")
    default = run_type("dit")().model_dump()[section][name]
    assert isinstance(outcome([f"{key}={format_value(default)}"], str(path)), RunConfig)
    text = value if value.isdigit() else f'"{value}"'
    lines = [line for line in path.read_text().splitlines() if line.partition(" ")[0] != name]
    path.write_text("\n".join(lines).replace(f"[{section}]", f"[{section}]\n{name} = {text}"))
    assert outcome([], str(path)).where == f"{path}, {key}"
