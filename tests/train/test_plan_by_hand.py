"""A plan changed by hand is what runs: units, recomputation, stages and codecs; and what a run takes from no file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.checkpoint.manifest import read_manifest
from meshwright.errors import ConfigError, InputError, LayoutError
from meshwright.plan.compare import hashes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load_plan
from meshwright.plan.serialize import from_json, to_json
from meshwright.plan.traffic import predict_traffic
from tests.helpers import SMALL
from tests.train.jobs import job_of, load_words

WORDS = ("model.num_layers=4",)
CHANGES = {
    "units": ("mesh.dp_shard=2",),
    "nested": ("mesh.dp_shard=2",),
    "reduce": ("mesh.dp_shard=2",),
    "root": ("mesh.dp_shard=2",),
    "recomputed": ("mesh.dp_shard=2",),
    "stages": ("mesh.pp=2", "train.num_microbatches=2"),
    "codec": ("mesh.dp_shard=2",),
}


def block_of(plan):
    return next(kind for kind in plan.kinds if kind.is_block)


def with_block(plan, block):
    return replace(plan, kinds=tuple(block if kind.name == block.name else kind for kind in plan.kinds))


def changed(plan, change):
    """A plan as somebody changes it."""
    block = block_of(plan)
    (unit,) = block.units
    if change == "units":  # gathered parameters stay until the backward
        return with_block(plan, replace(block, units=(replace(unit, freed=False),)))
    if change == "nested":  # the feed-forward is gathered by itself, and told after the block
        inner = tuple(name for name in unit.parameters if name.startswith("ffn."))
        outer = replace(unit, parameters=tuple(name for name in unit.parameters if name not in inner))
        ffn = replace(unit, name="ffn", modules=("ffn",), parameters=inner)
        return with_block(plan, replace(block, units=(outer, ffn)))
    if change == "reduce":
        return with_block(plan, replace(block, units=(replace(unit, reduce="float64"),)))
    if change == "root":  # blocks have no unit of their own
        (stage,) = plan.stages
        own = [f"{block.name}/{parameter.name}" for parameter in block.parameters]
        before = [name for name in stage.root.parameters if name.startswith("embed/")]
        after = [name for name in stage.root.parameters if name not in before]
        root = replace(stage.root, parameters=(*before, *own, *after))
        return replace(with_block(plan, replace(block, units=())), stages=(replace(stage, root=root),))
    if change == "recomputed":  # the last two layers
        (stage,) = plan.stages
        again = replace(block, name="again", recompute="full")
        kinds = (*plan.kinds[: plan.kinds.index(block) + 1], again, *plan.kinds[plan.kinds.index(block) + 1 :])
        return replace(plan, kinds=kinds, stages=(replace(stage, kinds=("block", "block", "again", "again")),))
    if change == "stages":
        first, second = plan.stages
        stages = (replace(first, layers=(0, 1), kinds=first.kinds[:1]),
                  replace(second, layers=(1, 4), kinds=(*first.kinds[1:], *second.kinds)))  # fmt: skip
        return replace(plan, stages=stages)
    return with_block(plan, replace(block, units=(replace(unit, gradients="int8", weights="int8"),)))


def train(rank, world_size, words, change, folder):
    """Three steps of a plan, which went through a file: losses, and what was seen of the change."""
    config = load_words(words)
    plan = make_plan(config)
    if change:
        path = folder / f"plan-{rank}.json"
        path.write_text(to_json(changed(plan, change)), "utf-8")
        plan = load_plan(path, config)
    job, step = job_of(config, rank, world_size, plan)
    calls = {}
    for part in job.parts().values():
        for name, module in part.module.named_modules():
            if name.endswith("attention"):  # recomputation stops before the end of the block
                module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    losses = [step(number).loss for number in (1, 2, 3)]
    modules = [(name, one) for part in job.parts().values() for name, one in part.module.named_modules()]
    compression = job.features.get("compression")
    sent = compression and compression._sent()
    return {
        "losses": losses,
        "units": [name for name, module in modules if isinstance(module, FSDPModule)],
        "reduced": {
            name: module._get_fsdp_state()._mp_policy.reduce_dtype
            for name, module in modules
            if isinstance(module, FSDPModule)
        },
        "layers": sorted({name.split(".")[1] for name, _ in modules if name.startswith("blocks.")}),
        "calls": calls,
        "sent": None if sent is None else sent.inside + sent.between,
    }


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_what_runs(gang, corpus, tmp_path, change):
    words = [*WORDS, *CHANGES[change], *corpus]
    words += ["train.precision=float64"] if change not in ("codec", "reduce") else []
    plan = make_plan(load_words(words))
    before, after = (gang(2).run(train, words, one, tmp_path) for one in ("", change))
    if change in ("units", "nested", "root", "recomputed"):
        assert [one["losses"] for one in after] == [one["losses"] for one in before]
    elif change == "stages":
        for one, other in zip(after, before, strict=True):
            assert one["losses"] == pytest.approx(other["losses"], rel=1e-12)
        assert [one["layers"] for one in before] == [["0", "1"], ["2", "3"]]
        assert [one["layers"] for one in after] == [["0"], ["1", "2", "3"]]
    if change == "nested":
        assert set(after[0]["units"]) - set(before[0]["units"]) == {f"blocks.{n}.ffn" for n in range(4)}
    if change == "reduce":
        assert {*after[0]["reduced"].values()} == {torch.float64, None} != {*before[0]["reduced"].values()}
    if change == "root":
        assert before[0]["units"] == ["", *(f"blocks.{n}" for n in range(4))] and after[0]["units"] == [""]
    if change == "recomputed":
        assert set(before[0]["calls"].values()) == {3}
        assert after[0]["calls"] == {f"blocks.{n}.attention": 3 if n < 2 else 6 for n in range(4)}
    if change == "codec":
        other = changed(plan, change)
        entries = predict_traffic(other).entries
        assert before[0]["sent"] is None and after[0]["losses"] != before[0]["losses"]
        exact_root = sum(entry.sent.total() for entry in entries) - after[0]["sent"] / 3
        root = next(stage.root for stage in other.stages)
        size = sum(p.shape[0] * (p.shape[1] if len(p.shape) > 1 else 1) for k, _, p in other.parameters(other.stages[0])
                   if f"{k.name}/{p.name}" in root.parameters)  # fmt: skip
        # What is not compressed: the root's gradients once, and its weights once a step.
        assert exact_root == pytest.approx(2 * 4 * size / 2)


def gathers(rank, world_size, words, change):
    """All-gathers of FSDP2 in a step."""
    config = load_words(words)
    plan = make_plan(config)
    job, step = job_of(config, rank, world_size, changed(plan, change) if change else plan)
    step(1)
    with torch.profiler.profile() as profile:
        step(2)
    return sum(event.name == "c10d::_allgather_base_" for event in profile.events())


@pytest.mark.slow
def test_units_that_are_kept_are_gathered_once_a_step(gang, corpus):
    words = [*WORDS, "mesh.dp_shard=2", *corpus]
    freed, kept = (gang(2).run(gathers, words, change)[0] for change in ("", "units"))
    assert freed - kept == 4, "the blocks' second gather"


WRONG = {
    "another model": (["model.dim=64", "model.head_dim=16"], None, ConfigError, "for another model"),
    "another mesh": (["mesh.dp_shard=4", "train.global_batch=16"], None, ConfigError, "mesh.atoms"),
    "another batch": (["train.global_batch=16"], None, ConfigError, "batch.global_batch"),
    "frozen": (["train.freeze=embed.*"], None, ConfigError, ".trained"),
    "an unknown field": ([], lambda tree: tree.update(extra=1), ConfigError, "extra"),
    "another version": ([], lambda tree: tree.update(format=99), ConfigError, "99"),
    "traffic of nobody": (
        [],
        lambda tree: [
            one.update(elements=3 * one["elements"]) for kind in tree["kinds"] for one in kind["collectives"]
        ],
        ConfigError,
        "collectives in the plan differs",
    ),
    "activations of nobody": ([], lambda tree: tree["kinds"][1]["saved"].update(none=5), ConfigError, "saved"),
    "another kind": ([], lambda tree: tree["kinds"][1].update(described="blocks"), ConfigError, "of kind 'blocks'"),
    "no plan": ([], lambda tree: tree.clear(), ConfigError, ""),
    "a wrong one": ([], lambda tree: tree["stages"][0]["root"]["parameters"].pop(), LayoutError, "in no unit"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_plan_that_does_not_fit_is_refused_with_a_fix(tmp_path, case):
    more, damage, kind, what = WRONG[case]
    words = ["mesh.dp_shard=2", "mesh.tp=2", *WORDS]
    tree = json.loads(to_json(make_plan(load_words(words))))
    if damage is not None:
        damage(tree)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(tree), "utf-8")
    with pytest.raises(kind) as caught:
        load_plan(path, load_words([*words, *more]))
    error = caught.value
    assert what in error.what + error.where and str(path) in error.where and error.rule and error.fix


def test_a_file_that_can_t_be_read(tmp_path):
    with pytest.raises(InputError) as caught:
        load_plan(tmp_path / "no.json", load_words(WORDS))
    assert "meshwright plan" in caught.value.fix


@pytest.mark.slow
def test_the_command_runs_and_proves_a_plan_from_a_file(forked_meshwright, tmp_path, corpus):
    words = [*SMALL, *corpus, "mesh.dp_shard=2", "train.steps=2", "train.global_batch=4", "train.seq_len=16"]
    done = forked_meshwright("plan", "llama-tiny", *words, "-o", tmp_path / "plan.json", "--diff", "llama-tiny")
    assert done.returncode == 0 and "mesh.atoms[dp_shard]" in done.stdout, done.stderr
    block = changed(from_json((tmp_path / "plan.json").read_text("utf-8"), where="x"), "units")
    (tmp_path / "mine.json").write_text(to_json(block), "utf-8")
    run = ["run", "llama-tiny", *words, "--plan", tmp_path / "mine.json", "--out", tmp_path / "run"]
    done = forked_meshwright(*run)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/plan.json").read_text("utf-8") == to_json(block)
    assert f"--plan {tmp_path / 'run/plan.json'}" in done.stdout
    done = forked_meshwright(
        "run", "llama-tiny", *words, "train.steps=3", "--out", tmp_path / "run", "--resume", "auto"
    )
    assert "which has false for kinds[block].units[block].freed, where this one has true" in done.stdout, done.stderr
    assert (tmp_path / "run/plan-to-00000002.json").read_text("utf-8") == to_json(block)
    assert f"--plan {tmp_path / 'run/plan.json'}" not in done.stdout
    manifest = read_manifest(tmp_path / "run/checkpoints/00000002")
    assert manifest.run["plan"] == vars(hashes(block))
    done = forked_meshwright("prove", "llama-tiny", *words, "--plan", tmp_path / "mine.json")
    assert done.returncode == 0 and "PROVED" in done.stdout, done.stderr
