"""Runs that can't fit this machine are refused before anything is started, with a way out that works."""

from __future__ import annotations

import re

import pytest

from meshwright.errors import LayoutError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import SHARED, predict_memory, predict_process_memory
from meshwright.plan.rules import load
from meshwright.train.launch import launcher, machine_limits
from meshwright.train.launch.machine_limits import check_machine, check_memory, check_ranks, needed_bytes
from meshwright.units import GIB
from tests.helpers import meshwright, shown_error

CPU = "train.device=cpu"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(machine_limits, "num_cores", lambda: 2)


@pytest.mark.parametrize("words", [
    ["mesh.dp_shard=99999999999", "train.global_batch=99999999999"],
    ["mesh.dp_replicate=96", "train.global_batch=96"],
    ["mesh.dp_shard=48", "mesh.tp=2", "train.global_batch=48"],
    ["mesh.dp_shard=22", "mesh.pp=3", "train.global_batch=66", "train.num_microbatches=3"],
])  # fmt: skip
def test_too_many_ranks(words):
    with pytest.raises(LayoutError, match="ranks, but this machine has 2 cores") as caught:
        check_machine(config := load(None, [*words, CPU]), make_plan(config))
    assert caught.value.rule == "at most 32 ranks per core, 64 on this machine"
    [word] = re.findall(r"mesh\.\w+=\d+", caught.value.fix)
    check_ranks(load(None, [*words, CPU, word]).mesh.axes().num_ranks())


def test_as_many_as_are_allowed():
    check_ranks(64)
    with pytest.raises(LayoutError):
        check_ranks(65)


def test_no_verb_starts_too_many():
    with pytest.raises(LayoutError, match="99999999999 ranks"):
        launcher.launch(print, None, num_ranks=99999999999, threads=1)


@pytest.mark.parametrize("words", [["model.dim=100000000"], ["model.ffn_dim=10000000000"],
                                   ["train.global_batch=1000000000"]])  # fmt: skip
def test_far_more_memory_than_there_is(words):
    with pytest.raises(LayoutError, match=r"1 rank would need .* TiB, but this machine has .* GiB"):
        check_machine(config := load(None, [*words, CPU]), make_plan(config))


@pytest.mark.parametrize(("on_cpu", "words", "excess"), [
    (True, [], 1.1), (True, ["train.compile=true"], 1.5), (False, [], 1.5),
])  # fmt: skip
def test_memory_is_that_of_all_ranks_here(on_cpu, words, excess):
    config = load(None, ["mesh.dp_replicate=4", *words])
    plan = make_plan(config)
    # Ranks on a CPU are processes, which share the pages of libraries.
    needed = 4 * (predict_process_memory(plan) - SHARED) + SHARED if on_cpu else 4 * predict_memory(plan).total()
    for num_bytes in (needed, int(1.01 * needed / excess), None):
        check_memory(config, plan, num_ranks=4, num_bytes=num_bytes, on_cpu=on_cpu, place="here")
    with pytest.raises(LayoutError, match="4 ranks would need"):
        check_memory(config, plan, num_ranks=4, num_bytes=int(0.99 * needed / excess), on_cpu=on_cpu, place="here")


@pytest.mark.parametrize(("words", "num_bytes"), [
    (["train.global_batch=512", "train.seq_len=1024"], 2 * GIB),
    (["train.global_batch=128", "train.seq_len=4096", "mesh.dp_shard=2"], 2 * GIB),
    (["model.dim=2048", "model.num_layers=32", "model.num_heads=16", "model.ffn_dim=8192"], 4 * GIB),
    (["train.global_batch=64", "train.seq_len=8192", "recompute.policy=full"], 2 * GIB),
])  # fmt: skip
def test_what_is_suggested_fits_by_prediction(words, num_bytes):
    config = load(None, words)
    num_ranks = config.mesh.axes().num_ranks()
    with pytest.raises(LayoutError) as caught:
        check_memory(
            config, make_plan(config), num_ranks=num_ranks, num_bytes=num_bytes, on_cpu=True, place="here", what="hosts"
        )
    fixes = caught.value.fix.split(" or ")
    assert fixes and "a smaller" not in caught.value.fix
    for fix in fixes:
        own, _, more = fix.partition(" on ")
        times = int(more.removesuffix(" times as many hosts")) if more else 1
        changed = load(None, [*words, *own.split()])
        assert changed.mesh.axes().num_ranks() == num_ranks * times
        assert needed_bytes(make_plan(changed), num_ranks=num_ranks, on_cpu=True) <= num_bytes


def test_where_cuda_devices_are_ranks_look_at_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_limits, "CUDA_CONTROL", tmp_path)
    check_machine(config := load(None, ["model.dim=100000000"]), make_plan(config))


@pytest.mark.slow
def test_the_command_says_it_before_it_makes_a_folder(tmp_path):
    done = meshwright("run", "model.dim=100000000", CPU, "--out", tmp_path / "run")
    assert done.returncode == 2 and "would need" in shown_error(done.stderr)["error"]
    assert not (tmp_path / "run").exists()
