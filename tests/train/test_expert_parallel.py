"""Expert parallelism in steps, runs and pipelines: the same run on every layout, bitwise twice, and through a kill."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from meshwright.comm import alltoallv
from meshwright.errors import RunError
from meshwright.nn.experts.layer import Experts
from meshwright.nn.experts.router import ExpertLoad
from meshwright.nn.linear import WeightGradStore
from meshwright.pipeline import execute
from meshwright.plan.expert_traffic import describe_rows
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory
from meshwright.plan.rules import load
from meshwright.train.choose_folder import choose_folder
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RunSpec
from meshwright.train.pipeline_stages import ModelStage
from meshwright.train.record.reporter import Reporter
from tests.helpers import open_data, quick_and_slow, small_corpus
from tests.train.jobs import make_job, pieces, run_on, trace
from tests.train.runs import LIMIT_S, STEPS, Fault, final_state, is_alive, metrics, train, wait_until
from tests.train.test_kill import killed

TINY = ["moe-tiny", "model.dim=32", "model.expert_dim=24", "model.num_heads=2", "train.seq_len=32"]
FP64 = "train.precision=float64"
NUM_STEPS = 5
BALANCED = ["model.balance_loss=0.02", "model.balance_bias=true", "model.bias_rate=0.01", "model.z_loss=0.001"]


@pytest.fixture(scope="module")
def alone(corpus):
    """Some steps of one process."""
    return trace(0, 1, [*corpus, *TINY, *BALANCED, FP64], NUM_STEPS)


@pytest.mark.parametrize(("dp", "ep"), quick_and_slow([(2, 2), (4, 2)], quick=[(2, 2)]))
def test_losses_do_not_depend_on_the_layout(gang, corpus, alone, dp, ep):
    words = [*corpus, *TINY, *BALANCED, FP64, f"mesh.dp_shard={dp}", f"mesh.ep={ep}"]
    found = run_on(gang, dp, trace, words, NUM_STEPS)[0]
    torch.testing.assert_close(found.losses, alone.losses, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.norms, alone.norms, rtol=0, atol=1e-8)
    for name, piece in found.final.items():
        torch.testing.assert_close(piece.values, piece.of(alone.final[name].values), rtol=0, atol=1e-8)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(gang, corpus):
    words = [*corpus, *TINY, *BALANCED, "mesh.dp_shard=4", "mesh.ep=2", "model.num_shared_experts=1"]
    first, second = (run_on(gang, 4, trace, words, 2) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.results == other.results
        assert all(torch.equal(piece.values, other.final[name].values) for name, piece in one.final.items())


def dtypes_of_experts(rank, world_size, words):
    """Dtypes of the rows and of the routing weights that experts get in a step."""
    job, step = make_job(rank, world_size, words)
    found = set()
    for module in (module for module in job.model.modules() if isinstance(module, Experts)):
        module.register_forward_pre_hook(lambda _, inputs: found.add((inputs[0].dtype, inputs[2].dtype)))
    step(1)
    return found


@pytest.mark.parametrize("ep", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_routing_weights_stay_wide_in_bfloat16(gang, corpus, ep):
    words = [*corpus, *TINY, "train.precision=bfloat16", "mesh.dp_shard=2", f"mesh.ep={ep}"]
    for found in run_on(gang, 2, dtypes_of_experts, words):
        assert found == {(torch.bfloat16, torch.float32)}


def sent_in_steps(rank, world_size, words, num_steps):
    job, step = make_job(rank, world_size, words)
    traffic = job.features["all_to_alls"]
    for number in range(1, num_steps + 1):
        with traffic.counting():
            step(number)
    (found,) = traffic.all_to_alls()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["mesh.ep=4", "train.num_microbatches=2", "recompute.policy=full", "model.top_k=3"],
        pytest.param(
            ["mesh.ep=4", "model.drop=over-capacity", "model.capacity_factor=0.75", "model.num_experts=16"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["recomputed", "capacity"],
)
def test_bytes_are_predicted_exactly_with_uniform_routing(gang, corpus, words):
    words = [*corpus, *TINY, "mesh.dp_shard=4", "model.routing=uniform", "model.num_shared_experts=1", *words]
    for found in run_on(gang, 4, sent_in_steps, words, 2):
        assert found.sent == found.predicted > 0


@pytest.mark.slow
def test_bytes_follow_from_the_load_of_a_real_router(gang, corpus):
    """The prediction from the experts' counts is within 5 % on each rank, where the uniform one may be far off."""
    words = [*corpus, *TINY, "mesh.dp_shard=4", "mesh.ep=4", "model.balance_loss=0", "train.lr=1e-2"]
    for found in run_on(gang, 4, sent_in_steps, words, 6):
        assert found.explained == pytest.approx(found.sent, rel=0.05)


def test_the_plan_counts_rows_once_per_rank():
    plan = make_plan(load("moe-tiny", ["mesh.dp_shard=8", "mesh.ep=8", "model.num_experts=64", "model.top_k=8",
                                       "model.dim=1024"]))  # fmt: skip
    assert describe_rows(plan, 0) == ("one row per token and rank: 1.001 × the lower bound, 32% less than per expert")


def test_memory_counts_the_experts_of_a_rank_and_their_capacity():
    def memory(*words):
        return predict_memory(make_plan(load("moe-tiny", ["mesh.dp_shard=8", *words])))

    spread, sharded = memory(), memory("mesh.ep=8")
    assert spread.parameters == sharded.parameters, "the same shards, by another split"
    assert sharded.gathered < spread.gathered / 3, "a rank gathers no experts of others"
    capacity = ["mesh.ep=8", "model.drop=over-capacity"]
    narrow, wide = (memory(*capacity, f"model.capacity_factor={factor}") for factor in (1.0, 2.0))
    assert wide.activations > narrow.activations == pytest.approx(sharded.activations, rel=0.01)  # fewer indices
    full = "recompute.policy=full"
    kept = memory("mesh.ep=8", full).activations - memory(full).activations
    # Per layer and sample, each of 128 tokens is a row of 128 × float32 for 2 of the 8 ranks.
    rows = 4 * 2 * (128 * 2) * 128 * 4
    assert rows < kept < 1.1 * rows, "a recomputed block keeps the rows that it received, their weights and indices"


EXPERTS = [
    "model.kind=moe",
    "model.balance_loss=0",
    "model.balance_bias=true",
    "model.bias_rate=0.01",
    "model.dim=32",
    "model.expert_dim=24",
]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_other_numbers_of_expert_ranks(gang, corpus, tmp_path):
    """ep 2 in a pipeline, then 4: the same counters and biases, bit for bit, as of a run on one process."""
    words = [*corpus, *EXPERTS, FP64]
    pipelined = [*words, "mesh.dp_shard=2", "mesh.ep=2", "mesh.pp=2", "train.num_microbatches=2"]
    killed(pipelined, tmp_path / "moved", Fault(rank=1, step=5))
    train([*words, "mesh.dp_shard=4", "mesh.ep=4"], tmp_path / "moved", resume="auto")
    train(words, tmp_path / "whole")
    moved, whole = final_state(tmp_path / "moved"), final_state(tmp_path / "whole")
    balanced = [name for name in whole if ".load." in name]
    assert len(balanced) == 4 and moved.keys() == whole.keys()
    assert all(torch.equal(moved[name], whole[name]) for name in balanced)
    assert any(moved[name].any() for name in balanced if name.endswith("load.bias"))
    found, expected = metrics(tmp_path / "moved"), metrics(tmp_path / "whole")
    assert [line["expert_counts"] for line in found] == [line["expert_counts"] for line in expected]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1e-9)


TINY_PIPELINES = [*TINY, "model.num_layers=4", "mesh.pp=2", "train.num_microbatches=4"]


def deferred_shapes(rank, world_size, words):
    """Shapes of the gradients that a step defers, of local shards."""
    put, found = WeightGradStore.put, []

    def counting(self, parameter, compute, *tensors):
        found.append(tuple(getattr(parameter, "shape", ())))
        put(self, parameter, compute, *tensors)

    _, step = make_job(rank, world_size, words)
    WeightGradStore.put = counting
    try:
        step(1)
    finally:
        WeightGradStore.put = put
    return found


@pytest.mark.slow
def test_zb_v_defers_the_products_of_experts(gang, corpus):
    """Three stacked matrices and the router's of each of a rank's two layers, in each split backward."""
    words = [*corpus, *TINY_PIPELINES, "mesh.dp_shard=2", "mesh.ep=2", "pipeline.schedule=zb-v"]
    for found in run_on(gang, 4, deferred_shapes, words):
        stacked, routers = (sum(len(shape) == 3 for shape in found), found.count((8, 32)))
        assert stacked == 2 * 4 * 3 and routers == 2 * 4


def router_gradients(rank, world_size, words):
    job, step = make_job(rank, world_size, words)
    step.accumulate(1)
    return {name: piece for name, piece in pieces(job, gradients=True).items() if "router" in name}


def test_balance_losses_of_inner_stages_have_gradients(gang, corpus):
    words = [*corpus, *TINY_PIPELINES, "pipeline.schedule=zb-v", "train.precision=float64"]
    losses = {weight: [*words, f"model.balance_loss={weight}"] for weight in (0.0, 1.0)}
    without, balanced = (run_on(gang, 2, router_gradients, losses[weight]) for weight in (0.0, 1.0))
    names = set()
    for ours, theirs in zip(balanced, without, strict=True):
        for name, piece in ours.items():
            names.add(name)
            assert (piece.values - theirs[name].values).norm() > 1e-2 * theirs[name].values.norm()
    assert len(names) == 4


class Transfers:
    """Counts the all-to-alls of rows during which another task started one of its own."""

    def __init__(self):
        self.num_overlapped, self._starts = 0, []
        self._real = alltoallv.start_into, alltoallv.wait_rows

    def start(self, out, x, **named):
        self._starts.append((threading.get_ident(), out.data_ptr() if x.is_floating_point() else None))
        self._real[0](out, x, **named)

    def wait(self, out):
        mine, address = threading.get_ident(), out.data_ptr()
        starts = [at for at, (_, one) in enumerate(self._starts) if one == address]
        since = starts[-1] if starts else len(self._starts)
        self.num_overlapped += any(thread != mine for thread, _ in self._starts[since:])
        self._real[1](out)

    def __enter__(self):
        alltoallv.start_into, alltoallv.wait_rows = self.start, self.wait
        return self

    def __exit__(self, *raised):
        alltoallv.start_into, alltoallv.wait_rows = self._real


def dualpipe_trace(rank, world_size, words, overlaps):
    """A trace, and the numbers of pairs that took turns and of all-to-alls that hid behind another task."""
    stage, run, pairs = ModelStage.__init__, execute.run_overlapped, []

    def init(self, *args):
        stage(self, *args)
        assert self.overlaps, "the stages have all-to-alls in flight"
        self.overlaps = overlaps

    def counting(first, second, **named):
        pairs.append(1)
        return run(first, second, **named)

    ModelStage.__init__, execute.run_overlapped = init, counting
    try:
        with Transfers() as transfers:
            return trace(rank, world_size, words, 2), len(pairs), transfers.num_overlapped
    finally:
        ModelStage.__init__, execute.run_overlapped = stage, run


@pytest.mark.slow
def test_overlapped_pairs_compute_the_same_bits(gang, corpus):
    words = [*corpus, *TINY_PIPELINES, "mesh.dp_shard=2", "mesh.ep=2", "pipeline.schedule=dualpipe-v",
             "model.num_shared_experts=1", "recompute.policy=full"]  # fmt: skip
    together, apart = (run_on(gang, 4, dualpipe_trace, words, overlaps) for overlaps in (True, False))
    assert all(pairs > 0 and hidden >= 2 * pairs for _, pairs, hidden in together)
    assert not any(pairs or hidden for _, pairs, hidden in apart)
    for (ours, *_), (theirs, *_) in zip(together, apart, strict=True):
        assert ours.results == theirs.results
        assert all(torch.equal(piece.values, theirs.final[name].values) for name, piece in ours.final.items())


MOE = ["moe-tiny", "model.dim=32", "model.expert_dim=24", "model.num_heads=2", "model.num_shared_experts=1",
       "model.balance_bias=true", "model.bias_rate=0.001", "model.z_loss=0.01", "train.seq_len=32",
       "train.precision=float64", "train.lr=0.002"]  # fmt: skip
MIXTRAL = ["hf-tiny", "model.config=mixtral"]
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
    from meshwright.nn.experts import dispatched, grouped_linear
    from meshwright.train.rank_run import run_rank

    spec, folder, where = argument
    (folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    board = Armed(context.board)
    owner = dispatched._Dispatched if where == "_outputs" else grouped_linear
    real = getattr(owner, where)

    def failing(*args, **named):
        if context.rank == 1 and board.step == 3:
            (folder / "failed-at").write_text(str(time.monotonic()))
            raise ArithmeticError("an expert's weights are gone")
        return real(*args, **named)

    setattr(owner, where, failing)
    run_rank(replace(context, board=board), spec)


@pytest.mark.slow
@pytest.mark.usefixtures("gang")  # whose server ranks are forked from
@pytest.mark.parametrize(
    ("model", "layout", "where"),
    [(MOE, "ep 2", "multiply"), (MOE, "ep 2, zb-h1", "weight_gradient"), (MIXTRAL, "ep 2", "_outputs")],
)
def test_a_rank_that_fails_in_an_expert_is_named_and_ends_the_others(tmp_path, model, where, layout):
    """Not after `train.timeout_s`, which is 600 s, but as soon as the launcher sees it."""
    words = [*model[1:], *STEPS, *small_corpus(tmp_path / "corpus"), *LAYOUTS[layout], "train.seq_len=32"]
    if model is MIXTRAL:
        pytest.importorskip("transformers")
        words.remove("model.num_layers=2")
    config, out = load(model[0], words), tmp_path / "run"
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
