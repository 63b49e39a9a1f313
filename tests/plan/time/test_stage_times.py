"""What hides what within a stage, against times computed by hand for blocks that all take the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cluster.performance import HostCosts
from meshwright.cluster.stacks import MESHWRIGHT
from meshwright.plan.time.kernel_times import KindWork, Work
from meshwright.plan.time.stage_times import Lane, StagePricer
from meshwright.plan.traffic import Purpose
from tests.plan.plans import plan_of
from tests.plan.time.constant_rates import constant_rates

WORDS = "llama-tiny mesh.dp_shard=2"
BLOCKS, GATHER, SCATTER, SUM = 4, 30.0, 40.0, 5.0
UNITS = BLOCKS + 1
FORWARD, TO_INPUT, TO_WEIGHT = 100.0, 120.0, 80.0


class Blocks:
    """Kernels of blocks that take `FORWARD`, `TO_INPUT` and `TO_WEIGHT`; the ends of the model take none."""

    def __init__(self, *, host=0.0, recompute=0.0, scale=1.0):
        self.host, self.recompute, self.scale = host, recompute, scale

    def of_kind(self, kind, *, samples, tokens):
        if not kind.is_block:
            return KindWork(Work(), Work(), Work(), Work())
        parts = (FORWARD, TO_INPUT, TO_WEIGHT)
        works = [Work(products=self.scale * us, host=self.host, flops=us) for us in parts]
        return KindWork(*works, Work(memory=self.recompute, host=self.host if self.recompute else 0.0))


class Sent:
    """Communication of units that takes `GATHER`, `SCATTER` and `SUM`, and of blocks that takes `tensor` per pass."""

    def __init__(self, *, tensor=0.0):
        self.tensor = tensor

    def gather(self, sizes):
        return GATHER, GATHER

    def reduce(self, sizes):
        return SCATTER, SUM

    def of_kind(self, kind):
        own = {Purpose.TENSOR: self.tensor} if kind.is_block and self.tensor else {}
        return own, own, {}

    def num_calls(self, kind):
        return (2, 3) if kind.is_block else (0, 0)


def priced(words=WORDS, kernels=None, sent=None, *, stack=MESHWRIGHT, captured=False, **cluster):
    performance = constant_rates(**cluster).performance
    kernels, sent = kernels or Blocks(), sent or Sent()
    return StagePricer(plan_of(words), kernels, sent, performance, stack, captured=captured).times(0)


def test_gathers_hide_beside_the_block_before():
    """Only the root's gather and that of the first block, which nothing runs beside, are exposed. In the backward, the
    last block's starts with the head."""
    times = priced()
    assert times.forward == BLOCKS * FORWARD + 2 * GATHER
    assert times.backward_input + times.backward_weight == BLOCKS * (TO_INPUT + TO_WEIGHT) + GATHER
    assert times.backward_weight == BLOCKS * TO_WEIGHT
    parts = {name: us for name, us in times.parts.items() if us}
    assert parts == {"products": BLOCKS * (FORWARD + TO_INPUT + TO_WEIGHT), Purpose.WEIGHTS: 3 * GATHER}


def test_gathers_longer_than_blocks_bound_the_stage():
    times = priced(kernels=Blocks(scale=0.1))
    assert times.forward == UNITS * GATHER + 0.1 * FORWARD


@pytest.mark.parametrize("without", ["stream", "prefetch"])
def test_gathers_that_nothing_hides_are_exposed(without):
    """On a CPU, and for a stack that gathers only once it needs a unit."""
    stack = MESHWRIGHT if without == "stream" else replace(MESHWRIGHT, prefetches=False)
    times = priced(stack=stack, is_async=without != "stream")
    assert times.forward == BLOCKS * FORWARD + UNITS * GATHER
    assert times.parts[Purpose.WEIGHTS] == (UNITS + BLOCKS) * GATHER


def test_reductions_after_the_last_blocks_backward_are_exposed():
    """Those of other blocks hide beside the backward, and the root's comes with the first block of the model."""
    assert priced().at_end == pytest.approx({Purpose.GRADIENTS: 2 * SCATTER, Purpose.REPLICAS: 2 * SUM})


def test_gathers_and_reductions_share_the_links():
    """Blocks that take 2 µs hide nothing: all gathers and reductions follow each other, and of the backward without
    reductions, only the last block isn't gathering."""
    short = priced(kernels=Blocks(scale=0.01))
    assert sum(short.at_end.values()) == pytest.approx(UNITS * (SCATTER + SUM) - 2.0)


def test_hidden_gathers_and_reductions_slow_what_runs_beside():
    stack = replace(MESHWRIGHT, slower_beside=0.5)
    alone, slowed = priced(), priced(stack=stack)
    # The first two gathers are exposed.
    assert slowed.forward - alone.forward == pytest.approx(0.5 * (UNITS - 2) * GATHER)
    left = sum(alone.at_end.values())
    assert sum(slowed.at_end.values()) == pytest.approx(left + 0.5 * (UNITS * (SCATTER + SUM) - left))


def test_reductions_on_a_cpu_are_exposed():
    expected = {Purpose.GRADIENTS: UNITS * SCATTER, Purpose.REPLICAS: UNITS * SUM}
    assert priced(is_async=False).at_end == expected
    assert priced(stack=replace(MESHWRIGHT, hides_reductions=False)).at_end == expected


def test_collectives_of_operators_are_waited_for():
    alone, sharded = priced(), priced(sent=Sent(tensor=7.0))
    assert sharded.forward - alone.forward == BLOCKS * 7.0
    assert sharded.parts[Purpose.TENSOR] == 2 * BLOCKS * 7.0


def test_a_stack_may_hide_a_share_of_them_which_slows_what_runs_beside():
    stack = replace(MESHWRIGHT, hidden_tensor=0.5, slower_beside=0.2)
    times = priced(sent=Sent(tensor=10.0), stack=stack)
    assert times.parts[Purpose.TENSOR] == pytest.approx(2 * BLOCKS * 10.0 * (1 - 0.5 * 0.8))


HOST = HostCosts(launch_us=1.0, block_us=150.0, styled_us=10.0, residual=0.0)


def test_a_host_that_is_slower_than_its_device_bounds_a_pass():
    """Each block takes the host 150 µs, 25 µs for its kernels and 10 µs for each of two collectives."""
    of_forward = BLOCKS * (150.0 + 25.0 + 2 * 10.0)
    times = priced(kernels=Blocks(host=25.0), host=HOST)
    assert times.forward == of_forward
    assert times.parts["host"] == pytest.approx(
        of_forward - (BLOCKS * FORWARD + 2 * GATHER)
        + max(0.0, BLOCKS * (150.0 + 2 * 25.0 + 3 * 10.0) - (BLOCKS * (TO_INPUT + TO_WEIGHT) + GATHER))
    )  # fmt: skip
    assert priced(kernels=Blocks(host=25.0), host=HOST, is_async=False).forward == (
        BLOCKS * FORWARD + UNITS * GATHER + of_forward
    )


def test_replayed_blocks_need_no_host():
    times = priced(kernels=Blocks(host=25.0), host=HOST, captured=True)
    assert (times.forward, times.parts["host"]) == (BLOCKS * FORWARD + 2 * GATHER, 0.0)


def test_recomputation_runs_before_the_gradients():
    plain, again = priced(), priced(kernels=Blocks(recompute=60.0))
    assert again.recompute == again.parts["recompute"] == BLOCKS * 60.0
    assert again.per_microbatch - plain.per_microbatch == BLOCKS * 60.0
    assert again.flops == plain.flops == BLOCKS * (FORWARD + TO_INPUT + TO_WEIGHT)


@pytest.mark.parametrize("is_async", [True, False])
def test_spans_are_those_that_times_consist_of(is_async):
    """What a lane does never overlaps, and all lanes together take the whole time."""
    performance = constant_rates(is_async=is_async).performance
    kernels, sent = Blocks(recompute=60.0), Sent(tensor=7.0)
    pricer = StagePricer(plan_of(WORDS), kernels, sent, performance, MESHWRIGHT, captured=False)
    found, times = pricer.spans(0), pricer.times(0)
    for lanes in ((Lane.COMPUTE, Lane.OPERATORS), (Lane.UNITS,)):
        spans = sorted((one.start, one.end) for one in found if one.lane in lanes)
        assert all(one[1] <= other[0] + 1e-9 for one, other in zip(spans, spans[1:], strict=False))
    assert max(one.end for one in found) == pytest.approx(times.per_microbatch + sum(times.at_end.values()))
    assert sum(one.end - one.start for one in found if one.name == "recompute") == BLOCKS * 60.0
    assert sum(one.end - one.start for one in found if one.name == Purpose.TENSOR) == 2 * BLOCKS * 7.0
    assert sum(one.end - one.start for one in found if one.name == Purpose.GRADIENTS) == UNITS * (SCATTER + SUM)
