"""Float8 runs: amax equal on all ranks, one all-reduce a step, and bitwise the same however a step is scheduled."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import Replicate

from meshwright.features.float8 import run as float8_run
from meshwright.features.float8 import run as parallel_float8
from meshwright.features.float8.linear import Float8Linear
from meshwright.features.float8.run import ParallelFloat8Linear
from meshwright.mesh.process_groups import process_group
from meshwright.nn.linear import Linear
from meshwright.parallel.data_parallel import fsdp_modules
from tests.train.jobs import make_job, pieces, run_on, trace

DELAYED, CURRENT, CACHED = "float8.recipe=delayed", "float8.recipe=current", "float8.cache_weights=true"
BF16, PARTS = "train.precision=bfloat16", "train.num_microbatches=4"
TP = "mesh.tp=2"
FOUR_LAYERS = "model.num_layers=4"
STEPS = 3


class MaxReductions:
    """All-reduces of maxima within the context: their sizes."""

    def __enter__(self):
        self.sizes, self._real = [], dist.all_reduce

        def counted(x, op=dist.ReduceOp.SUM, **named):
            if op == dist.ReduceOp.MAX:
                self.sizes.append(x.numel())
            return self._real(x, op, **named)

        dist.all_reduce = counted
        return self

    def __exit__(self, *raised):
        dist.all_reduce = self._real


def amax_of_steps(rank, world_size, words, fault):
    """What a rank knows after each step, what it measured itself, and its all-reduces of maxima."""
    job, step = make_job(rank, world_size, words)
    history = job.features["float8"].history
    found = []
    for number in range(1, STEPS + 1):
        loss = step.accumulate(number)
        own = history.amax.clone()
        alone = mock.patch.object(float8_run, "all_reduce_max") if fault == "alone" else nullcontext()
        with MaxReductions() as maxima, alone:
            step.update(number, loss)
        found.append((history.history[0].clone(), own, maxima.sizes))
    return found


AMAX_LAYOUTS = {
    "dp_shard 2": (2, ("mesh.dp_shard=2",)),
    "cp 2": (2, ("mesh.cp=2",)),
    "tp 2": (2, ("mesh.tp=2",)),
    "dp_shard 2, pp 2": (4, ("mesh.dp_shard=2", "mesh.pp=2", PARTS)),
}
QUICK = ("dp_shard 2",)


def common_amax(ranks):
    """Check that all ranks know the largest magnitudes of all, and return the number of each step's reductions."""
    for steps in zip(*ranks, strict=True):
        largest = torch.stack([own for _, own, _ in steps]).amax(0)
        assert (largest > 0).all(), "every layer's input, weight and gradient was measured on some rank"
        assert all(torch.equal(known, largest) for known, _, _ in steps)
    return {tuple(sizes) for steps in ranks for _, _, sizes in steps}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in AMAX_LAYOUTS])
def test_all_ranks_know_the_same_amax_from_one_all_reduce_a_step(gang, corpus, name):
    world_size, layout = AMAX_LAYOUTS[name]
    ranks = gang(world_size).run(amax_of_steps, [*corpus, DELAYED, *layout], None, timeout_s=120)
    assert common_amax(ranks) == {(2 * 7 * 3,)}, "two blocks of seven layers, with three tensors each"


def test_a_rank_that_keeps_its_amax_to_itself_is_caught(gang, corpus):
    ranks = gang(2).run(amax_of_steps, [*corpus, DELAYED, "mesh.dp_shard=2"], "alone")
    with pytest.raises(AssertionError):
        common_amax(ranks)


def state_of(rank, world_size, words):
    """Losses and norms, and the amax history."""
    job, step = make_job(rank, world_size, words)
    results = [step(number) for number in range(1, STEPS + 1)]
    state = job.features["float8"].state()
    return [(r.loss, r.grad_norm) for r in results], {name: value.clone() for name, value in state.items()}


def assert_same(found, expected):
    for (results, state), (wanted, wanted_state) in zip(found, expected, strict=True):
        assert results == wanted
        assert state.keys() == wanted_state.keys()
        assert all(torch.equal(state[name], wanted_state[name]) for name in state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recipe"),
    [
        ("zb-h1", (DELAYED,)),
        ("zb-h1", (CURRENT, CACHED)),
    ],
)
def test_split_backwards_are_bitwise_1f1b(gang, corpus, schedule, recipe):
    """In float32: with bfloat16, FSDP2 adds up whole gradients in float32, but deferred ones in bfloat16."""
    words = [*corpus, *recipe, "mesh.pp=2", PARTS]
    one, other = (gang(2).run(state_of, [*words, f"pipeline.schedule={s}"]) for s in ("1f1b", schedule))
    assert_same(other, one)


@pytest.mark.slow
def test_zb_v_is_bitwise_its_unsplit_placement(gang, corpus):
    """Stages in a V; the same placement without split backwards is one process, whose sums over ranks differ."""
    words = [*corpus, DELAYED, FOUR_LAYERS, PARTS]
    ((expected, state),) = [state_of(0, 1, words)]
    for found, found_state in gang(2).run(state_of, [*words, "mesh.pp=2", "pipeline.schedule=zb-v"]):
        assert [loss for loss, _ in found] == [loss for loss, _ in expected]
        assert all(torch.equal(found_state[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("policy", "recipe"), [("selective", (DELAYED,)), pytest.param("full", (CURRENT, CACHED), marks=pytest.mark.slow)]
)
def test_recomputation_is_bitwise_none(corpus, policy, recipe):
    words = [*corpus, *recipe, "train.num_microbatches=2"]
    assert_same([state_of(0, 1, [*words, f"recompute.policy={policy}"])], [state_of(0, 1, words)])


@pytest.mark.parametrize("policy", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_compiled_recomputation_is_bitwise_an_eager_run(corpus, policy):
    """Delayed scales, whose magnitudes a graph takes in place, also where it is recomputed."""
    words = [*corpus, DELAYED, "train.num_microbatches=2"]
    found, *graphs = traced(0, 1, state_of, [*words, COMPILED, f"recompute.policy={policy}"])
    assert_same([found], [state_of(0, 1, words)])
    assert graphs == [1, 0]


def test_cached_weights_are_bitwise_weights_cast_each_time(corpus):
    words = [*corpus, CURRENT, "train.num_microbatches=2"]
    assert_same([state_of(0, 1, [*words, CACHED])], [state_of(0, 1, words)])


def test_a_step_casts_each_cached_weight_once(corpus):
    job, step = make_job(0, 1, [*corpus, CURRENT, CACHED, "train.num_microbatches=2"])
    layers = [module for module in job.model.modules() if isinstance(module, Float8Linear)]
    with mock.patch.object(Float8Linear, "refresh_cached_weight", autospec=True) as refresh:
        refresh.side_effect = lambda layer, weight: refreshed.append(layer)
        refreshed = []
        step(1)
    assert layers and refreshed == layers


def test_blocks_that_are_kept_have_plain_layers(corpus):
    words = [*corpus, FOUR_LAYERS, CURRENT, "float8.keep_first=1", "float8.keep_last=1", "float8.modules=['*.ffn.*']"]
    job, step = make_job(0, 1, words)
    module = job.parts()[0].module
    blocks = [module.blocks[str(layer)] for layer in range(4)]
    kinds = [(type(block.ffn.up), type(block.attention.wq)) for block in blocks]
    assert kinds == [(Linear, Linear), *[(ParallelFloat8Linear, Linear)] * 2, (Linear, Linear)]
    assert type(module.head) is not Float8Linear and torch.isfinite(torch.tensor(step(1).loss))
    names = [kind.name for kind in job.plan.kinds if kind.is_block]
    assert len(names) == 2 and job.plan.stages[0].kinds == (names[0], names[1], names[1], names[0])


def gradients_under_known_scales(rank, world_size, words, fault=False):
    """Loss and gradients of a step whose scales are the same on every layout."""
    unsummed = mock.patch.object(parallel_float8, "Partial", Replicate) if fault else nullcontext()
    with unsummed:
        return gradients_of_step(*make_job(rank, world_size, words))


def gradients_of_step(job, step):
    job.features["float8"].history.history.copy_(torch.tensor([8.0, 1.0, 2.0**-9]).repeat(2 * 7))
    job.features["float8"].history.refresh()
    loss = step.accumulate(1)
    return float(loss), pieces(job, gradients=True)


SHARDED = {
    "tp 2": (2, (TP,)),
    "tp 2, whole sequences": (2, (TP, "mesh.sequence_parallel=false")),
    "tp 2, dp_shard 2, selective": (4, (TP, "mesh.dp_shard=2", "recompute.policy=selective")),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "tp 2" else pytest.mark.slow) for n in SHARDED])
def test_under_the_same_scales_gradients_do_not_depend_on_the_layout(gang, corpus, name):
    """Up to float32 sums in another order, which may move a number to the next one in float8."""
    world_size, layout = SHARDED[name]
    assert_close_to_whole(gang(world_size), [*corpus, DELAYED], layout)


def test_products_of_shards_that_are_not_summed_are_caught(gang, corpus):
    with pytest.raises(AssertionError):
        assert_close_to_whole(gang(2), [*corpus, DELAYED], (TP,), fault=True)


def assert_close_to_whole(ranks, words, layout, *, fault=False):
    _, whole = gradients_under_known_scales(0, 1, words)
    for _, found in ranks.run(gradients_under_known_scales, [*words, *layout], fault, timeout_s=120):
        assert found.keys() == whole.keys()
        for key, piece in found.items():
            expected = piece.of(whole[key].values)
            assert (piece.values - expected).norm() <= 0.02 * expected.norm(), key


def alone(body, *args):
    """Run a body on one rank that has a process group, as bfloat16 needs."""
    with process_group(rank=0, num_ranks=1, device=torch.device("cpu"), timeout_s=60, store_path=None):
        return [body(0, 1, *args)]


COMPILED = "train.compile=true"
TRACED = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
"""Blocks are traced as ever, and the graphs then run without Inductor, which takes half a minute to compile them."""


def traced(rank, world_size, body, *args):
    """What a body returns, and the number of graphs that dynamo traced."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch.nn.Module, "compile", TRACED):
        return body(rank, world_size, *args), counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.slow
def test_fsdp_in_bfloat16_trains_close_to_bfloat16(gang, corpus):
    def losses(words):
        traces = [one for one, *_ in gang(2).run(traced, trace, words, 8, timeout_s=120)]
        assert all(one.results == traces[0].results for one in traces)
        return traces[0].losses

    layout = [*corpus, BF16, "mesh.dp_shard=2", "recompute.policy=full", COMPILED]
    found, expected = losses([*layout, CURRENT]), losses(layout)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert not torch.equal(found, expected) and found[-1] < found[0] - 0.5


def refreshed(rank, world_size, words):
    """Whether cached weights are those of the masters, after a step."""
    job, step = make_job(rank, world_size, words)
    step(1)
    job.features["float8"].begin()
    layers = [m for m in job.model.modules() if isinstance(m, Float8Linear)]
    assert layers and fsdp_modules(job.model)
    close = [
        torch.allclose(one.cached.data.float() * one.cached.inverse, one.weight.to_local(), rtol=0.07, atol=1e-3)
        for one in layers
    ]
    before = [one.cached.data.clone() for one in layers]
    step(2)
    job.features["float8"].begin()
    return all(close), any(not torch.equal(a, b.cached.data.clone()) for a, b in zip(before, layers, strict=True))


def test_cached_weights_follow_the_masters_of_fsdp(corpus):
    assert alone(refreshed, [*corpus, CURRENT, CACHED, BF16]) == [(True, True)]


def test_torchao_trains_close_to_ours(corpus):
    pytest.importorskip("torchao")
    theirs, *graphs = traced(0, 1, trace, [*corpus, CURRENT, COMPILED], 4)
    torch.testing.assert_close(theirs.losses, trace(0, 1, [*corpus, CURRENT], 4).losses, rtol=0, atol=0.01)
    assert graphs == [1, 0]


@pytest.mark.slow
def test_compiled_it_trains_the_same(corpus):
    """To the rounding of fused operators, which may move a number to the next one in float8."""
    words = [*corpus, DELAYED, "model.num_layers=1", "float8.modules=*.ffn.*"]
    ((found, state), (expected, eager)) = (state_of(0, 1, [*words, f"train.compile={c}"]) for c in ("true", "false"))
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], abs=1e-3)
    assert all((state[name] > 0).any() for name in state)
    assert all(torch.allclose(state[name], eager[name], rtol=0.05) for name in state)


@pytest.mark.parametrize("recipe", [DELAYED, pytest.param(CURRENT, marks=pytest.mark.slow)])
def test_shards_are_traced_into_one_graph_for_all_blocks(gang, corpus, recipe):
    words = [*corpus, TP, recipe]
    expected = gang(2).run(state_of, words)
    found = gang(2).run(traced, state_of, [*words, COMPILED], timeout_s=120)
    assert_same([one for one, *_ in found], expected)
    assert all(graphs == [1, 0] for _, *graphs in found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("mesh.dp_shard=2", "mesh.ep=2"), (TP,)], ids=" ".join)
def test_attention_and_shared_experts_run_in_float8(gang, corpus, layout):
    words = ["moe-tiny", *corpus, DELAYED, *layout, "model.num_shared_experts=1"]
    for results, _ in run_on(gang, 2, state_of, words):
        assert results[-1][0] < results[0][0]
