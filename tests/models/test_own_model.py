"""The custom-model example: run, proved, checkpointed across layouts and planned, without changes in src."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import save_load
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Part
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.traffic import predict_traffic
from meshwright.plan.verify import verify
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from tests.helpers import clean_environment, meshwright, quick_and_slow, small_corpus
from tests.models.real_costs import measure
from tests.plan.costs import costs_of_stage
from tests.plan.micro_batches import MicroBatch, wrong
from tests.prove.proofs import prove_with, record_on_rank
from tests.train.jobs import job_of
from tests.train.runs import final_state
from tests.train.test_traffic import Leaving

EXAMPLE = Path(__file__).parents[2] / "docs/examples/own_model"
SMALL = ("model.num_layers=4", "model.dim=32", "model.ffn_dim=48", "train.seq_len=16", "train.global_batch=16",
         "train.steps=6", "train.warmup_steps=1", "train.validation_samples=8", "train.sample_tokens=4",
         "train.threads=1")  # fmt: skip
ZB = ("mesh.pp=2", "pipeline.schedule=zb-v", "train.num_microbatches=4")
LAYOUTS = {
    "cp": ("mesh.cp=2",),
    "cp, tp, packed": ("mesh.cp=2", "data.packing=documents", "mesh.tp=2"),
    "zb-v, dp_replicate, recomputed": (*ZB, "mesh.dp_replicate=2", "recompute.policy=full"),
}
"""dp_shard, and zb-v over tp, compute the same by `test_checkpoints_move_between_layouts`."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A copy of the example, elsewhere; and a small corpus."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(EXAMPLE, folder / "own_model")
    return folder


@pytest.fixture(scope="module")
def words(home):
    return [*SMALL, *small_corpus(home / "corpus")]


@pytest.fixture(scope="module", autouse=True)
def importable(home):
    with on_path(home):
        yield


def preset(home):
    return f"{home}/own_model/gpt.toml"


def outside(home):
    """Folder and environment that the command runs in."""
    env = clean_environment(PYTHONPATH=str(home / "own_model"), OMP_NUM_THREADS="1")
    return {"env": env, "cwd": home, "timeout_s": 300}


def test_it_is_small_and_described_as_it_is_built(home, words):
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert sum(len(path.read_text("utf-8").splitlines()) for path in files) <= 240
    config = load(preset(home), words)
    facts = model_facts(config)
    for part in (Part(range(4)), Part(range(1), 0, 3), Part(range(1, 3), 1, 3), Part(range(3, 4), 2, 3)):
        module = build_part(config.family, run_facts(config), dtype=torch.float32, part=part)
        held = list(facts.held(part.layers, is_first=part.is_first, is_last=part.is_last))
        names = {name: tuple(p.shape) for name, p in module.named_parameters()}
        described = {kind.full_name(p.name, layer): p for kind, layer in held for p in kind.parameters}
        assert {name: p.shape for name, p in described.items() if p.tied_to not in names} == names
        buffers = {kind.full_name(b.name, layer): b.shape for kind, layer in held for b in kind.buffers}
        assert {name: tuple(b.shape) for name, b in module.named_buffers()} == buffers


@contextmanager
def on_path(home):
    """The example can be imported: a worker that lives on doesn't know it before."""
    sys.path.insert(0, f"{home}/own_model")
    try:
        yield
    finally:
        sys.path.remove(f"{home}/own_model")


def record(rank, world_size, home, words):
    with on_path(home):
        return record_on_rank(rank, world_size, as_proof(load(preset(home), words)))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "cp" else pytest.mark.slow) for name in LAYOUTS],
)
def test_it_is_proved(gang, home, words, layout):
    words = [*words, *LAYOUTS[layout]]
    config = as_proof(load(preset(home), words))
    verify(make_plan(config))
    records = gang(config.mesh.axes().num_ranks()).run(record, str(home), words, timeout_s=300)
    result = prove_with(records, config)
    assert result.passed, "\n".join(render(result))
    saved = [r.steps[-1]["weights"] for r in records]
    compared = {name for weights in saved for name in weights}
    assert "seen.value" in compared and sum("norm.bias" in name for name in compared) == 5
    assert sum(bool((found["seen.value"][1] > 0).any()) for found in saved if "seen.value" in found)


def all_leaving(rank, world_size, home, words):
    """Bytes that leave a rank in a step, the second one."""
    with on_path(home):
        _, step = job_of(load(preset(home), words), rank, world_size)
        step(1)
        with Leaving() as mode:
            step(2)
        return mode.total


@pytest.mark.parametrize(
    ("world_size", "layout"),
    quick_and_slow(
        [(2, ("mesh.dp_replicate=2",)), (2, ("mesh.tp=2", "recompute.policy=full")), (4, (*ZB, "mesh.tp=2"))],
        [(2, ("mesh.dp_replicate=2",))],
    ),
)  # fmt: skip
def test_traffic_is_predicted_to_the_byte(gang, home, words, world_size, layout):
    config = load(preset(home), [*words, *layout])
    found = gang(world_size).run(all_leaving, str(home), [*words, *layout], timeout_s=120)
    assert [predict_traffic(make_plan(config), rank=rank).sent().total() for rank in range(world_size)] == found


@pytest.mark.slow
def test_it_is_planned_by_the_command(home, words):
    done = meshwright("plan", preset(home), *words, "mesh.dp_shard=2", "mesh.tp=2", "--json", "-", **outside(home))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["memory"]["parameters"] > 0 and figures["traffic"]["tensor"] > 0 and figures["fingerprint"]


MOVED = ("train.precision=float64", "checkpoint.every=3", "train.max_grad_norm=1e30")


@pytest.fixture(scope="module")
def first(forked_meshwright, home, words):
    """A run on one layout, to its end."""
    more = [*words, *MOVED, "mesh.dp_shard=2", "--out", "first"]
    done = forked_meshwright("run", preset(home), *more, **outside(home))
    assert done.returncode == 0, done.stderr
    return home / "first"


@pytest.mark.slow
def test_the_run_counts_every_token_of_every_step_once(first):
    tensors = save_load.read_tensors(first / "checkpoints/00000006", ["model.seen.value"])
    assert int(tensors["model.seen.value"].sum()) == 6 * 16 * 16
    assert 'kind = "parallel_gpt.family:Gpt"' in (first / "config.toml").read_text("utf-8")


@pytest.mark.slow
def test_checkpoints_move_between_layouts(forked_meshwright, home, words, first, tmp_path):
    """Trained to the end on one layout, and from the middle on another, in float64."""
    middle = first / "checkpoints/00000003"
    layout = ("mesh.tp=2", *ZB, "recompute.policy=full", "train.validation_samples=0", "train.sample_tokens=0")
    more = [*words, *MOVED, *layout, "--resume", middle, "--out", tmp_path / "second"]
    done = forked_meshwright("run", preset(home), *more, **outside(home))
    assert done.returncode == 0, done.stderr
    one, two = (final_state(folder) for folder in (first, tmp_path / "second"))
    assert one.keys() == two.keys() and "model.seen.value" in one
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def test_what_a_family_lacks_is_said(home, words, tmp_path, monkeypatch):
    from tests.helpers import outcome

    (tmp_path / "broken_family.py").write_text(
        "from meshwright.models.contract.family import Family\nclass Half(Family):\n    pass\nx = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind, what in (("broken_family:Half", "lacks"), ("broken_family:x", "is not a family"),
                       ("no_such:X", "not found"),
                       ("broken_family:Hal", "has no Hal"), ("own model", "no such family")):  # fmt: skip
        error = outcome([f"model.kind={kind}"], preset(home))
        assert what in error.what and "model.kind" in error.where and error.fix, error.what
    error = outcome([*words, "mesh.tp=2", "mesh.sequence_parallel=true"], preset(home))
    assert "mesh.sequence_parallel=false" in error.fix
    error = outcome([*words, "train.compile=true", "recompute.policy=full"], preset(home))
    assert "block has activation" in error.what and "recompute.policy=none or train.compile=false" in error.fix


@pytest.mark.parametrize("policy", RecomputePolicy)
def test_costs_are_those_of_the_module(home, words, policy):
    batch = MicroBatch([str(preset(home)), *words], policy)
    costs = costs_of_stage(batch.plan, batch.plan.stages[0])
    forward, backward = measure(batch.of_model)
    assert not wrong(costs.forward, forward), (costs.forward, forward)
    assert not wrong(costs.backward(), backward), (costs.backward(), backward)
