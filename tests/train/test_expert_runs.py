"""Runs with experts on several ranks: all tokens to one expert, and a rank that fails within an expert."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from meshwright.errors import RunError
from meshwright.nn.experts.router import ExpertLoad
from meshwright.plan.rules import load
from meshwright.train.choose_folder import choose_folder
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RunSpec
from meshwright.train.record.reporter import Reporter
from tests.helpers import open_data, small_corpus
from tests.train.jobs import make_job, run_on
from tests.train.runs import LIMIT_S, STEPS, is_alive, wait_until

MOE = ["moe-tiny", "model.dim=32", "model.expert_dim=24", "model.num_heads=2", "model.num_shared_experts=1",
       "model.balance_bias=true", "model.bias_rate=0.001", "model.z_loss=0.01", "train.seq_len=32",
       "train.precision=float64", "train.lr=0.002"]  # fmt: skip
EXPERT = 5
"""The one that gets all tokens."""


def send_all_to_one(rank, world_size, words, num_steps):
    """Losses and norms of a run whose routers prefer one expert by far, and its loads."""
    job, step = make_job(rank, world_size, words)
    loads = [one for one in job.model.modules() if isinstance(one, ExpertLoad)]
    for load_of in loads:
        load_of.bias[EXPERT] = 100.0
    results = [step(number) for number in range(1, num_steps + 1)]
    values = [load_of.value.tolist() for load_of in loads]
    return [one.loss for one in results], [one.grad_norm for one in results], values


LAYOUTS = {
    "ep 2": ["mesh.dp_shard=2", "mesh.ep=2"],
    "ep 2 of dp_shard 4": ["mesh.dp_shard=4", "mesh.ep=2"],
    "ep 2, tp 2": ["mesh.dp_shard=2", "mesh.ep=2", "mesh.tp=2"],
    "ep 2, zb-h1": ["mesh.dp_shard=2", "mesh.ep=2", "mesh.pp=2", "pipeline.schedule=zb-h1", "train.num_microbatches=2",
                    "recompute.policy=full"],
}  # fmt: skip
TOP_K = {"one": ["model.top_k=1", "model.normalize=false"], "two": []}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return [*MOE, *small_corpus(tmp_path_factory.mktemp("corpus"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "top_k"), [("ep 2 of dp_shard 4", "two"), ("ep 2, tp 2", "one"), ("ep 2, zb-h1", "two")]
)
def test_with_all_tokens_on_one_expert_ranks_train_as_one_does(gang, words, layout, top_k):
    words = [*words, *TOP_K[top_k]]
    num_ranks = load("moe-tiny", LAYOUTS[layout]).mesh.axes().num_ranks()
    ((losses, norms, loads),) = run_on(gang, 1, send_all_to_one, words, 3)
    found = run_on(gang, num_ranks, send_all_to_one, [*words, *LAYOUTS[layout]], 3)
    num_tokens, num_choices = 3 * 8 * 32, {"one": 1, "two": 2}[top_k]
    assert all(load_of[EXPERT] == num_tokens and sum(load_of) == num_tokens * num_choices for load_of in loads)
    for rank_losses, rank_norms, rank_loads in found:
        torch.testing.assert_close(rank_losses, losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(rank_norms, norms, rtol=0, atol=1e-9)
        assert rank_loads and all(load_of in loads for load_of in rank_loads)
    assert losses[-1] < losses[0]


# Failures


class Armed:
    """A board that knows when a rank has come to step 3."""

    def __init__(self, board):
        self._board, self.step = board, 0

    def __getattr__(self, name):
        return getattr(self._board, name)

    def post(self, rank, phase, step):
        self._board.post(rank, phase, step)
        self.step = step if phase == "step" else 0


def fail_in_an_expert(context, argument):
    """A training in which rank 1's experts fail in step 3, in the forward or in the backward."""
    from meshwright.nn.experts import grouped_linear
    from meshwright.train.rank_run import run_rank

    spec, folder, where = argument
    (folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    board = Armed(context.board)
    real = getattr(grouped_linear, where)

    def failing(*args):
        if context.rank == 1 and board.step == 3:
            (folder / "failed-at").write_text(str(time.monotonic()))
            raise ArithmeticError("an expert's weights are gone")
        return real(*args)

    setattr(grouped_linear, where, failing)
    run_rank(replace(context, board=board), spec)


@pytest.mark.slow
@pytest.mark.usefixtures("gang")  # whose server ranks are forked from
@pytest.mark.parametrize(("layout", "where"), [("ep 2", "multiply"), ("ep 2, zb-h1", "weight_gradient")])
def test_a_rank_that_fails_in_an_expert_is_named_and_ends_the_others(tmp_path, where, layout):
    """Not after `train.timeout_s`, which is 600 s, but as soon as the launcher sees it."""
    words = [*MOE[1:], *STEPS, *small_corpus(tmp_path / "corpus"), *LAYOUTS[layout], "train.seq_len=32"]
    config, out = load("moe-tiny", words), tmp_path / "run"
    num_ranks = config.mesh.axes().num_ranks()
    with ExitStack() as hold:
        folder = choose_folder(config, out=out, resume=None, corpus=open_data(config).fingerprint, hold=hold)
    spec = RunSpec(config, Reporter, folder=folder)
    with pytest.raises(RunError) as caught:
        launch(fail_in_an_expert, (spec, out, where), num_ranks=num_ranks, threads=1, on_interrupt=lambda: None)
    assert time.monotonic() - float((out / "failed-at").read_text()) < LIMIT_S < config.train.timeout_s
    assert caught.value.what.startswith("rank 1 failed in step 3"), caught.value.what
    assert "ArithmeticError: an expert's weights are gone" in caught.value.what
    assert caught.value.where.startswith("rank 1 of ")
    pids = [int(path.read_text()) for path in out.glob("pid-*")]
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=60)
    assert len(pids) == num_ranks
