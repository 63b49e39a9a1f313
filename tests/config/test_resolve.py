"""Keys with a syntax of their own: what they mean, and what is refused with a fix that works."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.resolve import group_settings, learning_rate, notes_of, policy_of, profiled_ranks, profiled_steps
from meshwright.config.schema import TrainConfig
from meshwright.errors import ConfigError
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import stage_costs
from meshwright.plan.rules import load
from meshwright.prove.record.plain_optimizer import plain_learning_rate
from tests.helpers import assert_every_fix_works, outcome
from tests.plan.test_memory import planned

SCHEDULES = "tests.optim.schedules"
GROUPS, BLOCKS, STEPS, RANKS = "train.parameter_groups", "recompute.blocks", "train.profile", "train.profile_ranks"
VIOLATIONS = [
    (["train.lr_schedule=wsd", "train.steps=50"], "exceed 50 steps"),
    (["train.lr_schedule=wsd", "train.steps=5"], "exceed 5 steps"),
    (["train.lr_schedule=cosin"], "unknown schedule: cosin"),
    *(([f"{GROUPS}=['head:lr=1','{entry}']"], what) for entry, what in {
        "embedding": "is not lr=… or weight_decay=…", "embedding:": "an empty setting is not", ":lr=1": "is not lr=…",
        "embedding:rate=1": "rate=1 is not lr=…", "embedding:lr=1,lr=2": "each at most once",
        "embedding:lr=fast": "could not convert", "embedding:lr=-1": "lr = -1 is negative",
        "embedding:lr=nan": "not finite", "experts:lr=1": "matches no parameter",
        "block.*:lr=1": "matches no parameter",
    }.items()),
    *(([f"{BLOCKS}={entry}"], f"{BLOCKS} {what}") for entry, what in {
        "fast:0-1": "has the entry fast:0-1", "full": "has the entry full", "full:1-": "has the entry full:1-",
        "full:-1": "has the entry full:-1", "full:3-1": "has the range 3-1 in full:3-1",
        "full:0-4": "names layer 4 in full:0-4, but the model has layers 0-3", "full:2,1-3": "names layer 2 twice",
        "['full:0-1','selective:1']": "names layer 1 twice: full:0-1 and selective:1",
    }.items()),
    ([f"{STEPS}=0-3", "train.steps=500"], "train.profile names step 0, but train.steps = 500"),
    ([f"{STEPS}=5,490-501", "train.steps=500"], "train.profile names step 501, but train.steps = 500"),
    ([f"{STEPS}=1000000000000-2000000000000"], "names step 1000000000000"),
    ([f"{STEPS}=12-10"], "has the range 12-10, whose last step is before its first"),
    ([f"{STEPS}=first"], "train.profile has 'first'"),
    ([f"{STEPS}=5,"], "train.profile has ''"),
    ([f"{STEPS}=5", f"{RANKS}=0-2", "mesh.pp=2"], "names rank 2, but the mesh has 2 ranks"),
    ([f"{STEPS}=5", f"{RANKS}=[]"], "train.profile_ranks has ''"),
    ([f"{RANKS}=all"], "train.profile_ranks without train.profile has no effect"),
    (["train.trackers=mlflow"], "no such tracker: 'mlflow'"),
    (["train.trackers=package.module"], "no such tracker: 'package.module'"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "what"), VIOLATIONS)
def test_wrong_entries_are_refused_with_a_fix_that_works(words, what):
    error = outcome(words)
    assert isinstance(error, ConfigError) and what in error.what and error.where and error.rule
    assert_every_fix_works(error, words)


@st.composite
def configs(draw, schedule):
    total = draw(st.integers(1, 300))
    warmup = draw(st.integers(0, total))
    decay = draw(st.integers(0, total - warmup))
    return TrainConfig(steps=total, warmup_steps=warmup, decay_steps=decay, lr_schedule=schedule,
                       lr=draw(st.floats(1e-6, 10)), min_lr_ratio=draw(st.floats(0, 1)))  # fmt: skip


either = st.one_of(configs("cosine"), configs("wsd"))


def rates(config):
    return [learning_rate(step, config) for step in range(1, config.steps + 1)]


@given(either)
def test_the_rate_warms_up_linearly_falls_and_stays_between_its_bounds(config):
    found, low, high = rates(config), config.lr * config.min_lr_ratio, config.lr
    assert all(math.isfinite(rate) and rate >= 0 for rate in found) and all(rate > 0 for rate in found[:-1])
    for step in range(1, config.warmup_steps + 1):
        assert found[step - 1] == pytest.approx(config.lr * step / config.warmup_steps, rel=1e-12)
    after = found[config.warmup_steps :]
    assert all(a >= b * (1 - 1e-12) for a, b in zip(after, after[1:], strict=False))
    assert all(low * (1 - 1e-12) <= rate <= high * (1 + 1e-12) for rate in after)
    assert learning_rate(config.steps + 1, config) == pytest.approx(low, rel=1e-9), "past the end"


@given(configs("cosine"))
def test_cosine_ends_at_the_smallest(config):
    if config.warmup_steps < config.steps:
        assert rates(config)[-1] == pytest.approx(config.lr * config.min_lr_ratio, rel=1e-9, abs=1e-15)


@given(configs("wsd"))
def test_wsd_is_stable_and_then_decays_to_the_smallest(config):
    found = rates(config)
    stable = found[config.warmup_steps : config.steps - config.decay_steps]
    assert all(rate == pytest.approx(config.lr, rel=1e-12) for rate in stable)
    if config.decay_steps:
        assert found[-1] == pytest.approx(config.lr * config.min_lr_ratio, rel=1e-9, abs=1e-15)
        falls = [a - b for a, b in zip(found[-config.decay_steps - 1 :], found[-config.decay_steps :], strict=False)]
        if config.warmup_steps + config.decay_steps < config.steps:
            assert max(falls) - min(falls) <= config.lr * 1e-9  # in equal steps


def test_half_way_of_the_cosine_is_half_way_between_the_bounds():
    config = TrainConfig(steps=120, warmup_steps=20, lr=2.0, min_lr_ratio=0.5)
    assert learning_rate(70, config) == pytest.approx(1.5)


def test_a_warm_up_that_does_not_end_is_said():
    [note] = notes_of(load("llama-tiny", ["train.steps=5", "train.warmup_steps=20", "train.lr=1e-3"]))
    assert "only reaches 0.00025, not train.lr = 0.001" in note
    assert not list(notes_of(load("llama-tiny", ["train.steps=20", "train.warmup_steps=20"])))


def test_an_own_schedule_is_the_rate_of_trainer_and_reference():
    train = load("llama-tiny", [f"train.lr_schedule={SCHEDULES}:inverse_square_root", "train.warmup_steps=10"]).train
    assert learning_rate(5, train) == train.lr / 2 and learning_rate(40, train) == train.lr / 2
    assert plain_learning_rate(40, train) == train.lr / 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("falls_below_zero", "gives -"),
        ("raises", "raises ValueError('no table') in step 1"),
        ("asks", "no attribute 'peak_lr'\") (it has lr, "),
        ("words", "gives '0.1' in step 1"),
        ("missing", "schedules has no missing"),
    ],
)
def test_a_wrong_schedule_fails_before_training(name, words):
    with pytest.raises(ConfigError) as caught:
        load("llama-tiny", [f"train.lr_schedule={SCHEDULES}:{name}"])
    assert words in caught.value.what and caught.value.where.endswith("train.lr_schedule")


def groups(*entries):
    return load("llama-tiny", ["train.lr=0.1", "train.weight_decay=0.2", f"{GROUPS}={list(entries)}"]).train


def test_roles_and_globs_match_and_later_entries_win():
    entries = "embedding:lr=0.3", "*.attention.*:lr=0.4,weight_decay=0", "blocks.1.*:lr=0.5", "vector:weight_decay=1"
    train = groups(*entries)
    expected = {
        ("embed.weight", "embedding"): (0.3, 0.2),
        ("head.weight", "head"): (0.1, 0.2),
        ("blocks.0.attention.wq.weight", "matrix"): (0.4, 0.0),
        ("blocks.1.attention.wq.weight", "matrix"): (0.5, 0.0),
        ("blocks.1.ffn_norm.weight", "vector"): (0.5, 1.0),
        ("norm.weight", "vector"): (0.1, 1.0),
    }
    found = {key: group_settings(train, *key, num_dims=1 if key[1] == "vector" else 2) for key in expected}
    assert found == expected
    for num_dims in (1, 2, 3):
        found = group_settings(groups(), "norm.weight", "vector", num_dims=num_dims)
        assert found == (0.1, 0.0), "vectors don't decay, whatever their dims"


def policies(*words):
    config = load("llama-tiny", ["model.num_layers=8", *words])
    return "".join(policy_of(config.recompute, layer)[0] for layer in range(8))


def test_each_block_has_the_policy_of_the_entry_that_names_it():
    assert policies() == "nnnnnnnn"
    assert policies(f"{BLOCKS}=full:0-3") == "ffffnnnn"
    assert policies("recompute.policy=full", f"{BLOCKS}=['selective:0,2-3','none:7']") == "sfssfffn"


@pytest.mark.parametrize("layout", [[], ["mesh.pp=2", "pipeline.chunks=2", "train.num_microbatches=2"]])
def test_blocks_with_different_policies_are_different_kinds_on_any_layout(layout):
    plan = make_plan(load("llama-tiny", ["model.num_layers=8", f"{BLOCKS}=['full:0-2','selective:4,6']", *layout]))
    found = [plan.kind(name) for stage in sorted(plan.stages, key=lambda one: one.layers) for name in stage.kinds]
    assert "".join(kind.recompute[0] for kind in found) == "fffnsnsn"
    assert sorted({kind.name for kind in found}) == ["block", "block.2", "block.3"]


def test_compiling_a_recomputed_block_with_step_handles_is_refused():
    with pytest.raises(ConfigError, match="layer 2 recomputed under the policy selective"):
        load("moe-tiny", ["train.compile=true", f"{BLOCKS}=selective:2"])
    load("llama-tiny", ["train.compile=true", f"{BLOCKS}=selective:2"])


def test_memory_follows_the_policy_of_each_block():
    def kept(*words):
        plan = planned("llama-tiny", ["model.num_layers=4", *words])
        (costs,) = (stage_costs(plan, stage) for stage in plan.stages)
        return costs.activation_bytes

    none, selective, full = (kept(f"recompute.policy={policy}") for policy in RecomputePolicy)
    assert full < selective < none
    assert kept(f"{BLOCKS}=['full:0','selective:1-2']") == none - (none - full) // 4 - (none - selective) // 2


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        ("[]", []),
        ("10", [range(10, 11)]),
        ("5,10-12", [range(5, 6), range(10, 13)]),
        ('["10-12","5"]', [range(5, 6), range(10, 13)]),
        ("3-5,6,4-8", [range(3, 9)]),
    ],
)
def test_steps_are_the_fewest_ranges_in_order(value, steps):
    assert profiled_steps(load(None, [f"{STEPS}={value}"]).train) == steps


def test_ranks_are_the_first_or_chosen_or_all():
    words = ["mesh.dp_shard=4", f"{STEPS}=1"]
    assert profiled_ranks(load(None, words)) == [range(1)]
    assert profiled_ranks(load(None, [*words, f"{RANKS}=0,2-3"])) == [range(1), range(2, 4)]
    assert profiled_ranks(load(None, [*words, f"{RANKS}=all"])) == [range(4)]


def test_an_unknown_tracker_is_replaced_and_an_own_one_need_not_be_installed_to_plan():
    assert outcome(["train.trackers=tensorbord"]).fix == "train.trackers=tensorboard or train.trackers=[]"
    assert outcome(['train.trackers=["wandb","wandbb"]']).fix == "train.trackers=wandb"
    assert outcome(["train.trackers=no.such:Sink"]).train.trackers == ("no.such:Sink",)


def test_the_former_key_of_trackers_names_its_successor():
    error = outcome(["train.tensorboard=true"])
    assert error.what == "unknown key train.tensorboard" and error.fix.startswith("train.trackers=tensorboard in place")
