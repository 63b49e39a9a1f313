"""Cross-section rules: violations state what, where, the rule, and fixes that all work."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.config.schema import RunConfig, run_type
from meshwright.config.source import to_toml
from meshwright.errors import ConfigError, LayoutError
from meshwright.plan.rules import load
from meshwright.settings.violation import format_value
from tests.helpers import assert_every_fix_works, outcome


@pytest.mark.parametrize(
    ("words", "kind", "what", "where"),
    [
        (["mesh.tp=3"], LayoutError, "mesh.tp = 3 does not divide 4 attention heads", "mesh.tp"),
        (["mesh.tp=4"], LayoutError, "mesh.tp = 4 does not divide 2 key/value heads", "mesh.tp"),
        (["mesh.tp=2", "model.ffn_dim=383"], LayoutError, "383 feed-forward columns", "mesh.tp"),
        (["mesh.tp=2", "model.vocab_size=257"], LayoutError, "257 vocabulary entries", "mesh.tp"),
        (["mesh.tp=2", "train.seq_len=255"], LayoutError, "255 tokens per sample", "mesh.tp"),
        (["mesh.dp_shard=3"], LayoutError, "is not divisible by 3", "train.global_batch"),
        (["mesh.dp_shard=64"], LayoutError, "is not divisible by 64", "train.global_batch"),
        (["train.num_microbatches=5"], LayoutError, "is not divisible by 5", "train.global_batch"),
        (["train.global_batch=1", "mesh.dp_replicate=2"], LayoutError, "is not divisible by 2", "train.global_batch"),
        (["model.num_heads=5"], ConfigError, "does not divide model.dim = 128", "model.num_heads"),
        (["model.dim=130"], ConfigError, "does not divide model.dim = 130", "model.num_heads"),
        (["model.dim=1000000000001"], ConfigError, "does not divide model.dim", "model.num_heads"),
        (["model.dim=132"], ConfigError, "head_dim = 33 is odd", "model.dim"),
        (["model.head_dim=33"], ConfigError, "head_dim = 33 is odd", "model.head_dim"),
        (["model.num_kv_heads=3"], ConfigError, "does not divide model.num_heads = 4", "model.num_kv_heads"),
        (["model.num_kv_heads=8"], ConfigError, "does not divide model.num_heads = 4", "model.num_kv_heads"),
        (["train.lr_schedule=wsd", "train.steps=50"], ConfigError, "exceed 50 steps", "train.decay_steps"),
        (["train.lr_schedule=wsd", "train.steps=5"], ConfigError, "exceed 5 steps", "train.decay_steps"),
    ],
)
def test_a_violation_is_explained_and_every_fix_works(words, kind, what, where):
    error = outcome(words)
    assert type(error) is kind and what in error.what
    assert where in error.where
    assert_every_fix_works(error, words)


def test_fewer_micro_batches_come_before_another_batch():
    """A preset has many: the size of the batch is what a training depends on."""
    words = ["mesh.dp_shard=2", "train.global_batch=16", "train.num_microbatches=16"]
    assert outcome(words).fix == "train.num_microbatches=8 or train.global_batch=32"
    assert outcome(["mesh.dp_shard=3"]).fix.startswith("train.global_batch=")


def test_without_sequence_parallel_the_sequence_need_not_divide():
    assert isinstance(outcome(["mesh.tp=2", "train.seq_len=255", "mesh.sequence_parallel=false"]), RunConfig)


@pytest.mark.parametrize("words", [["mesh.tp=2"], ["mesh.dp_shard=2", "mesh.dp_replicate=2"], [], ["mesh.dp_shard=3"]])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 7, 512])
def test_the_mesh_has_as_many_ranks_as_were_started(words, num_ranks):
    words = [*words, "train.global_batch=24"]
    found = outcome(words, num_ranks=num_ranks)
    if isinstance(found, RunConfig):
        assert found.mesh.axes().num_ranks() == num_ranks
        return
    assert isinstance(found, LayoutError)
    assert str(num_ranks) in found.what and f"WORLD_SIZE={num_ranks}" in found.where
    assert "start" in found.fix or "mesh." in found.fix
    if "mesh." in found.fix:
        assert_every_fix_works(found, words, num_ranks=num_ranks)


def test_axes_that_match_the_ranks_are_fine():
    assert isinstance(outcome(["mesh.tp=2", "mesh.dp_shard=2"], num_ranks=4), RunConfig)


small = st.integers(1, 12)


@st.composite
def valid_words(draw):
    """Overrides of a valid run, over all sizes that the rules check."""
    tp, kv_per_tp, group, pairs = (draw(st.integers(1, 3)) for _ in range(4))
    replicate, shard, micro, per = (draw(st.integers(1, 3)) for _ in range(4))
    heads = tp * kv_per_tp * group
    sizes = {
        "model.num_heads": heads,
        "model.num_kv_heads": tp * kv_per_tp,
        "model.dim": heads * 2 * pairs,
        "model.ffn_dim": tp * draw(small),
        "model.vocab_size": tp * draw(st.integers(2, 12)),
        "train.seq_len": tp * draw(small),
        "mesh.tp": tp,
        "mesh.dp_replicate": replicate,
        "mesh.dp_shard": shard,
        "train.num_microbatches": micro,
        "train.global_batch": replicate * shard * micro * per,
    }
    return {key: str(size) for key, size in sizes.items()}


@given(valid_words(), st.data(), st.booleans())
def test_one_wrong_word_in_a_valid_run_has_a_fix_that_works(sizes, data, launched):
    sizes_overrides = [f"{key}={value}" for key, value in sizes.items()]
    config = outcome(sizes_overrides)
    assert isinstance(config, RunConfig), config
    key = data.draw(st.sampled_from([*sizes, "model.head_dim"]))
    word = f"{key}={data.draw(small)}"
    num_ranks = config.mesh.axes().num_ranks() if launched else None
    error = outcome([*sizes_overrides, word], num_ranks=num_ranks)
    assume(not isinstance(error, RunConfig))
    assert error.what and error.where and error.rule and error.fix
    if "=" in error.fix:
        assert_every_fix_works(error, [*sizes_overrides, word], num_ranks=num_ranks)
    else:
        assert launched and error.fix.startswith("start ")


@given(st.dictionaries(st.sampled_from(["model.num_heads", "model.num_kv_heads", "model.dim", "model.ffn_dim",
       "mesh.tp", "mesh.dp_shard", "mesh.dp_replicate", "mesh.pp", "train.num_microbatches", "train.global_batch",
       "train.seq_len", "model.head_dim"]), small))  # fmt: skip
def test_following_the_fixes_of_any_sizes_ends_at_a_valid_run(sizes):
    words = [f"{key}={value}" for key, value in sizes.items()]
    for _ in range(8):
        found = outcome(words)
        if isinstance(found, RunConfig):
            return
        from tests.helpers import alternatives

        words += alternatives(found.fix)[0]
    raise AssertionError(f"still: {found}")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train.freeze=time_embedd.*"], "train.freeze has time_embedd.*, which matches no parameter"),
        (["train.freeze=['embed.*','label.*']"], "train.freeze has label.*, which matches no parameter"),
        (["train.freeze=fps_embed.*"], "train.freeze has fps_embed.*"),
        (["train.freeze=blocks.4.*"], "train.freeze has blocks.4.*"),
        (["train.freeze=*"], "train.freeze leaves no parameter to train"),
        (["train.freeze=['*.weight','*.bias']"], "train.freeze leaves no parameter to train"),
        (["train.freeze=['*.weight','*.bias','x']"], "train.freeze has x"),
        (["train.freeze="], "train.freeze has "),
    ],
)
def test_a_glob_freezes_something_and_not_everything(words, what):
    error = outcome(words, "dit-digits")
    assert isinstance(error, ConfigError) and what in error.what and "train.freeze" in error.where
    assert_every_fix_works(error, words, "dit-digits")


@pytest.mark.parametrize("globs", ["final*", "final.head.weight", "['embed.*','*.head.*']", "['*.weight','embed.*']"])
@pytest.mark.parametrize("preset", ["dit-digits", "dit-digits-video"])
def test_a_projection_that_starts_at_zero_is_not_frozen(preset, globs):
    words = [f"train.freeze={globs}"]
    error = outcome(words, preset)
    assert isinstance(error, ConfigError) and "final.head.weight, which starts at zero" in error.what
    assert_every_fix_works(error, words, preset)
    assert "model.zero_init=false" in error.fix and "train.freeze=" in error.fix


@pytest.mark.parametrize("glob", ["final.head.bias", "final.modulation*", "blocks.*", "embed*"])
def test_what_else_starts_at_zero_may_be_frozen(glob):
    assert isinstance(outcome([f"train.freeze={glob}"], "dit-digits"), RunConfig)


@pytest.mark.parametrize("words", [["head.weight"], ["model.tie_embeddings=true", "head.weight"]])
def test_a_tied_head_is_frozen_by_its_embedding_s_name(words):
    *others, name = words
    found = outcome([*others, f"train.freeze={name}"])
    assert isinstance(found, ConfigError if others else RunConfig)


def test_guidance_needs_samples_without_their_class():
    """The null class is learned from them."""
    words = ["diffusion.label_dropout=0"]
    error = outcome(words, "dit-digits")
    assert isinstance(error, ConfigError) and "guidance" in error.what and "label_dropout" in error.where
    assert_every_fix_works(error, words, "dit-digits")


UNREAD = [
    *(("llama-tiny", f"diffusion.{word}") for word in ("guidance=3", "num_samples=0", "schedule=linear")),
    *(("dit-digits", word) for word in ("train.seq_len=64", "train.sample_tokens=0", "train.sample_prompt=a",
                                        "data.tokenizer=a.json", "data.token_dtype=uint8",
                                        "data.packing=documents", "data.separator=0", "data.text_field=text")),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "word"), UNREAD)
def test_a_key_of_another_kind_of_model_is_not_ignored(preset, word):
    key = word.partition("=")[0]
    error = outcome([word], preset)
    assert isinstance(error, ConfigError) and error.where == f"command line, {key}"
    assert error.what.startswith(f"{key} = ") and error.what.endswith(" has no effect")
    other = "for dit" if preset == "llama-tiny" else "for text"
    assert error.fix.endswith(f"remove {key}, or start from a preset {other}")
    assert_every_fix_works(error, [word], preset)


def test_a_fix_of_another_violation_fixes_it_too():
    words = ["train.seq_len=64", "mesh.tp=3"]
    error = outcome(words, "dit-digits")
    assert "mesh.tp" in error.what and "train.seq_len" in error.fix
    assert_every_fix_works(error, words, "dit-digits")


@pytest.mark.parametrize(("preset", "word"), UNREAD)
def test_a_file_with_all_keys_is_taken_unless_one_asks_for_what_is_not_done(preset, word, tmp_path):
    """A saved run is such a file."""
    path, (key, _, value) = tmp_path / "run.toml", word.partition("=")
    path.write_text(to_toml(load(preset)))
    if preset == "llama-tiny":  # those of before families had sections of their own
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
