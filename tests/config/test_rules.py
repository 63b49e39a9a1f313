"""Rules of the mesh, the batch and compression: violations state what, where, the rule, and fixes that all work."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.comm.compression.catalogue import Use, names
from meshwright.config.schema import CommConfig, RunConfig
from meshwright.errors import ConfigError, LayoutError, MeshwrightError
from meshwright.plan.rules import load
from tests.helpers import alternatives, assert_every_fix_works, outcome

LLAMA, MOE, DIT, ROWS = "llama-tiny", "moe-tiny", "dit-digits", "tests/plan/rows.toml"
DROPS, TWELVE = ["model.drop=over-capacity", "model.capacity_factor=2.0"], ["mesh.dp_shard=12", "train.global_batch=24"]
HPZ, NODE = "comm.secondary_shards", "comm.ranks_per_node"

VIOLATIONS = [
    (LLAMA, ["mesh.tp=3"], LayoutError, "mesh.tp = 3 does not divide 4 attention heads", "mesh.tp", ""),
    (LLAMA, ["mesh.tp=4"], LayoutError, "mesh.tp = 4 does not divide 2 key/value heads", "mesh.tp", ""),
    (LLAMA, ["mesh.tp=2", "model.ffn_dim=383"], LayoutError, "383 feed-forward columns", "mesh.tp", ""),
    (LLAMA, ["mesh.tp=2", "model.vocab_size=257"], LayoutError, "257 vocabulary entries", "mesh.tp", ""),
    (LLAMA, ["mesh.tp=2", "train.seq_len=255"], LayoutError, "255 tokens per sample", "mesh.tp", ""),
    (LLAMA, ["mesh.dp_shard=3"], LayoutError, "is not divisible by 3", "train.global_batch", "train.global_batch="),
    (LLAMA, ["train.num_microbatches=5"], LayoutError, "is not divisible by 5", "train.global_batch", ""),
    (LLAMA, ["train.global_batch=1", "mesh.dp_replicate=2"], LayoutError, "divisible by 2", "train.global_batch", ""),
    # Fewer micro-batches come first: the size of the batch is what a training depends on.
    (LLAMA, ["mesh.dp_shard=2", "train.global_batch=16", "train.num_microbatches=16"], LayoutError, "divisible by 32",
     "train.global_batch", "train.num_microbatches=8 or train.global_batch=32"),
    (LLAMA, ["model.num_heads=5"], ConfigError, "does not divide model.dim = 128", "model.num_heads", ""),
    (LLAMA, ["model.dim=1000000000001"], ConfigError, "does not divide model.dim", "model.num_heads", ""),
    (LLAMA, ["model.dim=132"], ConfigError, "head_dim = 33 is odd", "model.dim", ""),
    (LLAMA, ["model.head_dim=33"], ConfigError, "head_dim = 33 is odd", "model.head_dim", ""),
    (LLAMA, ["model.num_kv_heads=3"], ConfigError, "does not divide model.num_heads = 4", "model.num_kv_heads", ""),
    (LLAMA, ["model.num_kv_heads=8"], ConfigError, "does not divide model.num_heads = 4", "model.num_kv_heads", ""),
    (LLAMA, ["comm.gradients=loco4", "train.precision=float64"], ConfigError, "= loco4 with", "comm.gradients", ""),
    (LLAMA, ["comm.weights=int8", "train.precision=float64"], ConfigError, "= int8 with", "comm.weights", ""),
    (LLAMA, [f"{HPZ}=3", "mesh.dp_shard=8"], LayoutError, f"{HPZ} = 3 and", HPZ, ""),
    (LLAMA, [f"{HPZ}=8", "mesh.dp_shard=8"], LayoutError, f"{HPZ} = 8 and", HPZ, ""),
    (LLAMA, [f"{HPZ}=2"], LayoutError, f"{HPZ} = 2 and", HPZ, ""),
    (LLAMA, [f"{HPZ}=2", "mesh.dp_shard=4", "mesh.reshard_after_forward=false"], ConfigError, "after_forward", HPZ, ""),
    (LLAMA, [f"{HPZ}=2", "mesh.dp_shard=4", "mesh.tp=2"], LayoutError, "with mesh.tp = 2", HPZ, ""),
    (LLAMA, [f"{NODE}=3", "mesh.dp_shard=4"], LayoutError, "does not divide 4 ranks", NODE, ""),
    (LLAMA, ["mesh.cp=3"], LayoutError, "cp = 3 does not divide 128 tokens", "mesh.cp", "mesh.cp=2"),
    (LLAMA, ["mesh.cp=4", "mesh.tp=2", "train.seq_len=12"], LayoutError,
     "cp × tp = 4 × 2, with mesh.sequence_parallel does not divide 12 tokens", "mesh.cp", "mesh.cp=2"),
    (LLAMA, ["mesh.cp=4", "mesh.cp_method=heads"], LayoutError,
     "mesh.cp_method = heads, but cp = 4 does not divide the key/value heads of a tp rank (2)", "mesh.cp_method",
     "mesh.cp_method=auto"),
    (LLAMA, ["mesh.cp=2", "mesh.tp=2", "mesh.cp_method=heads"], LayoutError,
     "cp = 2 does not divide the key/value heads of a tp rank (1)", "mesh.cp_method", "mesh.cp_method=auto"),
    (LLAMA, ["mesh.cp_method=ring"], ConfigError, "mesh.cp_method = ring has no effect", "mesh.cp_method", "=auto"),
    (MOE, ["mesh.cp=2", *DROPS], LayoutError, "the capacity of experts in moe_block counts all tokens of a sample",
     "mesh.cp", "mesh.cp=1"),
    (MOE, ["mesh.cp=2", "model.routing=uniform"], LayoutError, "uniform routing in moe_block counts all tokens",
     "mesh.cp", "mesh.cp=1"),
    (DIT, ["mesh.cp=2"], LayoutError, "this model's blocks need the full sequence", "mesh.cp", "mesh.dp_shard=2"),
    # A family of a user's own need not describe its attention; then its samples can't be sharded by tokens.
    (ROWS, ["mesh.cp=2", "mesh.tp=1"], LayoutError, "don't describe their attention (KindFacts.attention)",
     "mesh.cp", ""),
    (MOE, ["mesh.ep=3"], LayoutError, "mesh.ep = 3 does not divide 1 rank", "mesh.ep", "mesh.ep=1"),
    (MOE, ["mesh.ep=2"], LayoutError, "mesh.ep = 2 does not divide 1 rank", "mesh.ep", "mesh.dp_shard=2"),
    (MOE, ["mesh.ep=8", *TWELVE], LayoutError, "mesh.ep = 8 does not divide 12 ranks", "mesh.ep", "mesh.ep=4"),
    (MOE, ["mesh.ep=3", *TWELVE], LayoutError, "mesh.ep = 3 does not divide 8 experts", "mesh.ep", "mesh.ep=4"),
    (MOE, ["mesh.ep=16", "mesh.dp_shard=16"], LayoutError, "does not divide 8 experts", "mesh.ep", "mesh.ep=8"),
    (MOE, ["mesh.ep=2", "mesh.dp_shard=4", f"{HPZ}=2"], ConfigError, f"{HPZ} = 2 with mesh.ep = 2", HPZ, f"{HPZ}=none"),
    (LLAMA, ["mesh.ep=2", "mesh.dp_shard=2"], LayoutError, "mesh.ep = 2 for a model without experts", "mesh.ep", "=1"),
    (DIT, ["mesh.ep=2", "mesh.dp_shard=2"], LayoutError, "mesh.ep = 2 for a model without experts", "mesh.ep", "=1"),
    (DIT, ["train.seq_len=64", "mesh.tp=3"], LayoutError, "mesh.tp", "mesh.tp", "train.seq_len"),  # fixes that too
]  # fmt: skip


@pytest.mark.parametrize(("preset", "words", "kind", "what", "where", "fix"), VIOLATIONS)
def test_a_violation_is_explained_and_every_fix_works(preset, words, kind, what, where, fix):
    error = outcome(words, preset)
    assert isinstance(error, MeshwrightError), error
    assert type(error) is kind and what in error.what and error.rule and fix in error.fix
    assert where in error.where
    assert_every_fix_works(error, words, preset)


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        (LLAMA, ["mesh.tp=2", "train.seq_len=255", "mesh.sequence_parallel=false"]),
        (LLAMA, ["comm.gradients=exact-via-all-to-all", "train.precision=float64", "mesh.dp_shard=2"]),
        (LLAMA, ["comm.gradients=loco4", "comm.weights=int8"]),
        (LLAMA, [f"{HPZ}=2", f"{NODE}=2", "mesh.dp_shard=4"]),
        (LLAMA, ["mesh.cp=2", "mesh.cp_method=heads"]),
        (LLAMA, ["mesh.cp=8", "mesh.cp_method=ring", "mesh.tp=2", "model.window=16"]),
        (LLAMA, ["mesh.cp=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "data.packing=documents"]),
        (MOE, ["mesh.cp=4", "mesh.ep=2"]),
        (MOE, ["mesh.cp=2", "mesh.ep=4", "mesh.dp_shard=2"]),
        (MOE, ["mesh.ep=4", "mesh.dp_shard=8"]),
        (MOE, ["mesh.ep=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.pp=2", "mesh.tp=2"]),
        (MOE, ["mesh.ep=1", "mesh.dp_shard=4", f"{HPZ}=2"]),
    ],
)
def test_what_fits_is_accepted(preset, words):
    assert isinstance(outcome(words, preset), RunConfig)


@pytest.mark.parametrize("words", [["mesh.tp=2"], ["mesh.dp_shard=2", "mesh.dp_replicate=2"], [], ["mesh.dp_shard=3"]])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 512])
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


def test_expert_parallelism_takes_no_ranks_of_its_own():
    words = ["mesh.ep=4", "mesh.dp_shard=4"]
    assert isinstance(outcome(words, MOE, num_ranks=4), RunConfig)
    assert isinstance(outcome(words, MOE, num_ranks=16), LayoutError)


@pytest.mark.parametrize("use", Use)
def test_the_configuration_takes_the_methods_that_there_are(use):
    assert CommConfig.model_fields[use].annotation.__args__ == names(use)
    with pytest.raises(ConfigError) as refused:
        load(LLAMA, [f"comm.{use}=int3"])
    assert f"comm.{use} is one of " + ", ".join(map(repr, names(use)[:-1])) in str(refused.value)


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
        words += alternatives(found.fix)[0]
    raise AssertionError(f"still: {found}")


@given(st.fixed_dictionaries({
    "mesh.cp": st.integers(2, 9), "mesh.tp": st.sampled_from([1, 2]), "train.seq_len": st.integers(1, 40),
    "model.num_kv_heads": st.sampled_from([2, 4]), "mesh.cp_method": st.sampled_from(["auto", "ring", "heads"]),
    "mesh.sequence_parallel": st.sampled_from(["true", "false"]),
}))  # fmt: skip
def test_any_sizes_of_samples_have_fixes_that_work(chosen):
    cp, tp = chosen["mesh.cp"], chosen["mesh.tp"]
    divided = cp * (tp if chosen["mesh.sequence_parallel"] == "true" else 1)
    fits = chosen["train.seq_len"] % divided == 0
    fits &= chosen["mesh.cp_method"] != "heads" or chosen["model.num_kv_heads"] // tp % cp == 0
    check_fixes("mesh.cp", [f"{key}={value}" for key, value in chosen.items()], LLAMA, fits=fits)


@given(st.fixed_dictionaries(dict.fromkeys(("mesh.ep", "mesh.dp_shard", "model.num_experts", "mesh.tp"), small)))
def test_any_sizes_of_experts_have_fixes_that_work(sizes):
    ep = sizes["mesh.ep"]
    fits = ep == 1 or (sizes["mesh.dp_shard"] % ep == 0 and sizes["model.num_experts"] % ep == 0)
    words = [*(f"{key}={value}" for key, value in sizes.items()), f"train.global_batch={sizes['mesh.dp_shard']}"]
    check_fixes("mesh.ep", words, MOE, fits=fits)


def check_fixes(key, words, preset, *, fits):
    """Sizes that fit are taken; for those that don't, the error of the key has fixes that all work."""
    found = outcome(words, preset)
    if isinstance(found, RunConfig):
        assert fits
    elif key in found.where:
        assert not fits and "=" in found.fix
        assert_every_fix_works(found, words, preset)
