"""Threads per rank: a person's choice is kept, and cores that other programs use are said."""

from __future__ import annotations

import os

import pytest

from meshwright.train.launch import machine_limits
from meshwright.train.launch.launcher import NO_THREAD_CACHE, TUNABLES, rank_environment
from meshwright.train.launch.machine_limits import BusyCores, advice, threads_per_rank


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(machine_limits, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("chosen", "variable", "num_ranks", "expected"),
    [
        (None, None, 1, 8), (None, None, 3, 2), (None, None, 100, 1),
        (None, "3", 4, 3), (None, "3,2", 4, 3), (None, "many", 4, 2), (None, "0", 4, 2), (None, "", 4, 2),
        (5, "3", 4, 5),
    ],
)  # fmt: skip
def test_the_configuration_comes_before_the_environment_and_that_before_the_cores(
    monkeypatch, chosen, variable, num_ranks, expected
):
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert threads_per_rank(chosen, num_ranks=num_ranks) == expected


def test_the_environment_is_as_before_once_ranks_have_started(monkeypatch):
    monkeypatch.delenv(TUNABLES, raising=False)
    with rank_environment(3):
        assert os.environ["OMP_NUM_THREADS"] == "3" and os.environ[TUNABLES] == NO_THREAD_CACHE
    assert "OMP_NUM_THREADS" not in os.environ and TUNABLES not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with pytest.raises(KeyError), rank_environment(3):
        raise KeyError
    assert os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(("chosen", "expected"), [
    ("glibc.malloc.arena_max=1", f"glibc.malloc.arena_max=1:{NO_THREAD_CACHE}"),
    ("glibc.malloc.tcache_count=3", "glibc.malloc.tcache_count=3"), ("", NO_THREAD_CACHE),
])  # fmt: skip
def test_a_thread_cache_that_a_user_chose_stays(monkeypatch, chosen, expected):
    monkeypatch.setenv(TUNABLES, chosen)
    with rank_environment(3):
        assert os.environ[TUNABLES] == expected
    assert os.environ[TUNABLES] == chosen


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


def test_a_warning_names_a_number_that_fits():
    assert "other programs use 6.2 of 8 cores: 4 threads per rank may be slow; train.threads=1 may" in advice(
        None, num_ranks=2, others=Busy(6.2)
    )
    assert "train.threads=5 may be faster" in advice(None, num_ranks=1, others=Busy(2.9))


def test_no_warning_on_an_idle_machine_or_where_a_person_has_chosen(monkeypatch):
    assert advice(None, num_ranks=1, others=Busy(0.4)) is None
    assert advice(8, num_ranks=1, others=Busy(8.0)) is None
    assert advice(None, num_ranks=8, others=Busy(8.0)) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert advice(None, num_ranks=1, others=Busy(8.0)) is None


def test_a_kernel_that_does_not_tell_is_taken_as_idle(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_limits, "STAT", tmp_path / "none")
    assert BusyCores().count() == 0.0
