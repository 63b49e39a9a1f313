"""Context parallelism beside overlapped tasks and in compiled blocks."""

from __future__ import annotations

from functools import partialmethod
from unittest import mock

import pytest
import torch

from meshwright.comm import alltoallv
from tests.train.jobs import make_job, run_on

WORDS = ["model.dim=16", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=24", "model.num_layers=2",
         "train.seq_len=24", "train.global_batch=4", "data.packing=documents"]  # fmt: skip


def count_switches(rank, world_size, words):
    """Calls of `switch_task` in a step."""
    calls, before = [], alltoallv.switch_task
    alltoallv.switch_task = lambda: calls.append(1)
    try:
        _, step = make_job(rank, world_size, words)
        step(1)
        return len(calls)
    finally:
        alltoallv.switch_task = before


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_a_ring_takes_no_turns(gang, corpus, method):
    """How often it waits depends on the documents of its ranks, while other ranks take the same turns."""
    words = [*corpus, *WORDS, "mesh.cp=2", f"mesh.cp_method={method}"]
    found = run_on(gang, 2, count_switches, words)
    assert all(calls == 0 for calls in found) is (method == "ring"), found


TRACED = partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""Blocks are traced as ever, and the graphs then run without Inductor, which takes a minute to compile them."""


def losses(rank, world_size, words):
    with mock.patch.object(torch.nn.Module, "compile", TRACED):
        _, step = make_job(rank, world_size, words)
    return [step(number).loss for number in range(1, 4)], len(alltoallv._in_flight())


@pytest.mark.slow
@pytest.mark.parametrize("more", [["mesh.cp_method=ring"], ["mesh.cp_method=heads", "recompute.policy=selective"]])
def test_compiled_blocks_wait_for_what_they_receive(gang, corpus, more):
    words = [*corpus, *WORDS, "mesh.cp=2", *more]
    expected = run_on(gang, 2, losses, words)[0][0]
    for found, in_flight in run_on(gang, 2, losses, [*words, "train.compile=true"]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert not in_flight
