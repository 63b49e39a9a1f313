"""Runs that can't fit this machine are refused with a way out that works; threads are chosen, or fit the cores."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from meshwright.errors import LayoutError
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import SHARED, predict_process_memory
from meshwright.plan.rules import load
from meshwright.train.launch import launcher, machine_limits
from meshwright.train.launch.launcher import ALLOCATOR, TUNABLES, rank_environment
from meshwright.train.launch.machine_limits import (
    BusyCores,
    advice,
    check_machine,
    check_memory,
    check_ranks,
    needed_bytes,
    threads_per_rank,
)
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
    needed = 4 * (predict_process_memory(plan) - SHARED) + SHARED if on_cpu else 4 * predict_cuda_memory(plan).total()
    for num_bytes in (needed, int(1.01 * needed / excess), None):
        check_memory(config, plan, num_ranks=4, num_bytes=num_bytes, on_cpu=on_cpu, place="here")
    with pytest.raises(LayoutError, match="4 ranks would need"):
        check_memory(config, plan, num_ranks=4, num_bytes=int(0.99 * needed / excess), on_cpu=on_cpu, place="here")


@pytest.mark.parametrize(("words", "num_bytes"), [
    (["train.global_batch=512", "train.seq_len=1024"], 2 * GIB),
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
    config = load(None, ["model.dim=100000000"])
    assert check_machine(config, make_plan(config)) is None


@pytest.mark.slow
def test_the_command_says_it_before_it_makes_a_folder(tmp_path):
    done = meshwright("run", "model.dim=100000000", CPU, "--out", tmp_path / "run")
    assert done.returncode == 2 and "would need" in shown_error(done.stderr)["error"]
    assert not (tmp_path / "run").exists()


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(machine_limits, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("chosen", "variable", "num_ranks", "expected"),
    [
        (None, None, 1, 8), (None, None, 3, 2), (None, None, 100, 1), (5, "3", 4, 5),
        (None, "3,2", 4, 3), (None, "many", 4, 2), (None, "0", 4, 2), (None, "", 4, 2),
    ],
)  # fmt: skip
def test_the_configuration_comes_before_the_environment_and_that_before_the_cores(
    monkeypatch, eight_cores, chosen, variable, num_ranks, expected
):
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert threads_per_rank(chosen, num_ranks=num_ranks) == expected


def test_the_environment_is_as_before_once_ranks_have_started(monkeypatch, eight_cores):
    monkeypatch.delenv(TUNABLES, raising=False)
    with rank_environment(3):
        assert os.environ["OMP_NUM_THREADS"] == "3" and os.environ[TUNABLES].count("=") == len(ALLOCATOR)
    assert "OMP_NUM_THREADS" not in os.environ and TUNABLES not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with pytest.raises(KeyError), rank_environment(3):
        raise KeyError
    assert os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("chosen", ["glibc.malloc.arena_max=1", "glibc.malloc.tcache_count=3", ""])
def test_what_a_user_chose_of_the_allocator_stays(monkeypatch, chosen):
    monkeypatch.setenv(TUNABLES, chosen)
    own = dict(one.split("=") for one in chosen.split(":") if one)
    with rank_environment(3):
        assert dict(one.split("=") for one in os.environ[TUNABLES].split(":")) == _words(ALLOCATOR) | own
    assert os.environ[TUNABLES] == chosen


def test_the_docs_have_the_settings_for_other_launchers():
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text("utf-8")
    assert f"`{TUNABLES}={':'.join(f'{name}={number}' for name, number in ALLOCATOR.items())}`" in page


def _words(numbers):
    return {name: str(number) for name, number in numbers.items()}


def stat(path, *rows):
    path.write_text("".join(f"{name} {' '.join(map(str, ticks))}\n" for name, ticks in rows))


def test_business_is_that_of_other_programs_on_our_cores(monkeypatch, tmp_path):
    """A second in which one of our two cores was busy, half of that with this process."""
    monkeypatch.setattr(machine_limits, "STAT", path := tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    tick, now, own = os.sysconf("SC_CLK_TCK"), [10.0], [4.0]
    monkeypatch.setattr(machine_limits.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "times", lambda: os.times_result((own[0], 0, 0, 0, 0)))
    idle = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    stat(path, ("cpu", [99 * tick] * 10), *((f"cpu{core}", idle) for core in range(4)))
    others = BusyCores()
    busy = [tick // 4, 0, tick // 4, 7, 7, 0, tick // 4, tick // 4, 99, 99]
    stat(path, ("cpu", idle), ("cpu0", [99 * tick] * 10), ("cpu1", busy), ("cpu2", idle), ("cpu3", [tick] * 10))
    now[0], own[0] = 11.0, 4.5
    assert others.count() == pytest.approx(0.5)


class Busy(BusyCores):
    def __init__(self, cores):
        self.cores = cores

    def count(self):
        return self.cores


def test_a_warning_names_a_number_that_fits(eight_cores):
    assert "other programs use 6.2 of 8 cores: 4 threads per rank may be slow; train.threads=1 may" in advice(
        None, num_ranks=2, others=Busy(6.2)
    )
    assert "train.threads=5 may be faster" in advice(None, num_ranks=1, others=Busy(2.9))


def test_no_warning_on_an_idle_machine_or_where_a_person_has_chosen(monkeypatch, eight_cores):
    assert advice(None, num_ranks=1, others=Busy(0.4)) is None
    assert advice(8, num_ranks=1, others=Busy(8.0)) is None
    assert advice(None, num_ranks=8, others=Busy(8.0)) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert advice(None, num_ranks=1, others=Busy(8.0)) is None


def test_a_kernel_that_does_not_tell_is_taken_as_idle(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_limits, "STAT", tmp_path / "none")
    assert BusyCores().count() == 0.0
