"""Times of kernels against times computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cluster.performance import AttentionCurve, HostCosts, ProductCurve
from meshwright.cluster.stacks import MESHWRIGHT
from meshwright.errors import ConfigError
from meshwright.models.contract.operators import OperatorKind, Rerun
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.run_plan import PlannedKernels, PlannedOperator
from meshwright.plan.time.kernel_times import KernelTimes, Work, residuals
from tests.plan.costs import CostModel
from tests.plan.plans import plan_of
from tests.plan.time.constant_rates import FLOPS, MOVED, constant_rates

HOST = HostCosts(launch_us=5.0, compiled_launch_us=3.0, residual=0.25)
ROWS, INNER, COLUMNS = 400, 1000, 300
PRODUCT = PlannedOperator("product", OperatorKind.PRODUCT, rate="float32", rows=ROWS, inner=INNER, columns=COLUMNS)
ONE_PRODUCT = 2 * ROWS * INNER * COLUMNS / FLOPS
NORM = PlannedOperator(
    "norm",
    OperatorKind.MEMORY,
    rate="float32",
    forward=PlannedKernels(3, 6000),
    backward=PlannedKernels(4, 10_000),
    fused_forward=PlannedKernels(1, 2000),
    fused_backward=PlannedKernels(1, 4000),
)
ATTENTION = PlannedOperator("attention", OperatorKind.ATTENTION, rate="float32", attention_flops=20_000)


def kind(*operators, **changes):
    return replace(plan_of("llama-tiny").kinds[0], operators=operators, compiled=False,
                   recompute=RecomputePolicy.NONE, **changes)  # fmt: skip


def work_of(one, cluster=None, *, samples=1, tokens=100):
    cluster = cluster or constant_rates(host=HOST)
    return KernelTimes(cluster.device, cluster.performance, MESHWRIGHT).of_kind(one, samples=samples, tokens=tokens)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_product_has_one_product_for_each_gradient(samples):
    work = work_of(kind(PRODUCT), samples=samples)
    expected = Work(products=samples * ONE_PRODUCT, host=5.0, flops=samples * ONE_PRODUCT * FLOPS)
    assert (work.forward, work.backward_input, work.backward_weight) == (expected,) * 3
    assert work.recompute == Work()


def test_what_needs_no_gradient_has_none():
    """Frozen weights, and the first product of a model, whose input is data."""
    work = work_of(kind(replace(PRODUCT, weights=0), replace(PRODUCT, inputs=0)))
    assert (work.backward_weight.products, work.backward_input.products) == (ONE_PRODUCT, ONE_PRODUCT)


def test_a_product_that_moves_more_than_it_computes_takes_the_time_of_its_bytes():
    """One row: its weights are read once, in the forward and for its input; the weight's gradient is written."""
    work = work_of(kind(replace(PRODUCT, rows=1)))
    us = 4 * (INNER + INNER * COLUMNS + COLUMNS) / MOVED
    assert (work.forward.products, work.backward_weight.products) == (pytest.approx(us),) * 2


@pytest.mark.parametrize("is_async", [True, False])
def test_grouped_products_divide_the_rows(is_async):
    grouped = replace(PRODUCT, kind=OperatorKind.GROUPED, groups=4)
    work = work_of(kind(grouped), constant_rates(host=HOST, is_async=is_async))
    assert work.forward.products == pytest.approx(ONE_PRODUCT)
    assert work.forward.host == (5.0 if is_async else 20.0)  # a CPU runs one product per group


def test_kernels_bound_by_memory_take_the_time_of_their_bytes():
    work = work_of(kind(NORM), samples=2)
    assert (work.forward, work.backward_input) == (Work(memory=120.0, host=15.0), Work(memory=200.0, host=20.0))


def test_tables_are_written_once_per_micro_batch():
    table = replace(NORM, backward=PlannedKernels(1, 100, bytes_once=5000))
    assert [work_of(kind(table), samples=n).backward_input.memory for n in (1, 3)] == [51.0, 53.0]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_gpu_runs_some_kernels_fused_in_eager_blocks_too(is_async):
    fused = kind(replace(NORM, fused_on_cuda=True))
    assert work_of(fused, constant_rates(host=HOST, is_async=is_async)).forward.memory == (20.0 if is_async else 60.0)


def test_compiled_blocks_run_the_fused_kernels():
    work = work_of(replace(kind(NORM), compiled=True))
    assert (work.forward, work.backward_input) == (Work(memory=20.0, host=3.0), Work(memory=40.0, host=3.0))


def test_attentions_backward_has_five_products_for_two():
    work = work_of(kind(ATTENTION))
    assert work.forward == Work(attention=20.0, host=5.0, flops=20_000)
    assert work.backward_input == Work(attention=50.0, host=5.0, flops=50_000)


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (RecomputePolicy.NONE, ""),
        (RecomputePolicy.SELECTIVE, "always"),
        (RecomputePolicy.FULL, "always full"),
    ],
)
def test_recomputation_runs_the_forwards_of_a_policy_again(policy, again):
    operators = [replace(NORM, rerun=rerun, forward=PlannedKernels(1, 10**power)) for rerun, power in
                 ((Rerun.ALWAYS, 3), (Rerun.FULL, 4), (Rerun.NEVER, 5))]  # fmt: skip
    times = {"always": 10.0, "full": 100.0}
    work = work_of(replace(kind(*operators), recompute=policy))
    assert work.recompute.memory == sum(times[word] for word in again.split())
    assert work.recompute.host == 5.0 * len(again.split())


def test_rates_fall_with_small_shapes():
    cluster = constant_rates()
    curve = ProductCurve(FLOPS * 1e6, half_rows=ROWS, half_inner=INNER / 3)
    slow = replace(cluster.performance, products={"float32": curve},
                   attention={"float32": AttentionCurve(FLOPS * 1e6, half_length=50, backward_slower=2.0)})  # fmt: skip
    work = work_of(kind(PRODUCT, ATTENTION), replace(cluster, performance=slow))
    assert work.forward.products == pytest.approx(ONE_PRODUCT * 2 * 4 / 3)
    # The gradient of the input has INNER columns and reduces over COLUMNS; that of the weight reduces over ROWS.
    assert work.backward_weight.products == pytest.approx(
        ONE_PRODUCT * (INNER + ROWS) / INNER * (ROWS + INNER / 3) / ROWS
    )
    assert (work.forward.attention, work.backward_input.attention) == (pytest.approx(30.0), pytest.approx(150.0))


def test_attention_that_moves_more_than_it_computes_takes_the_time_of_its_bytes():
    moving = replace(ATTENTION, forward=PlannedKernels(1, 30_000), backward=PlannedKernels(1, 4000))
    work = work_of(kind(moving), constant_rates())
    assert (work.forward.attention, work.backward_input.attention) == (300.0, 50.0)
    assert work.forward.memory == 0.0


def test_a_stack_slows_the_kernels_that_it_names():
    cluster, one = constant_rates(), kind(PRODUCT, NORM, ATTENTION)
    slow = replace(MESHWRIGHT, slower_products=1.5, slower_memory=2.0, slower_attention=3.0)
    plain, slower = (
        KernelTimes(cluster.device, cluster.performance, stack).of_kind(one, samples=1, tokens=100).forward
        for stack in (MESHWRIGHT, slow)
    )
    found = (slower.products / plain.products, slower.memory / plain.memory, slower.attention / plain.attention)
    assert found == pytest.approx((1.5, 2.0, 3.0))


def test_a_stack_may_slow_products_in_float8_only():
    cluster, rates = constant_rates(), ("float32", "float8")
    performance = replace(cluster.performance, products=dict.fromkeys(rates, ProductCurve(FLOPS * 1e6)))
    slow = KernelTimes(cluster.device, performance, replace(MESHWRIGHT, slower_float8=1.5))
    wide, narrow = (slow.of_kind(kind(replace(PRODUCT, rate=one)), samples=1, tokens=100).forward for one in rates)
    assert (wide.products, narrow.products) == pytest.approx((ONE_PRODUCT, 1.5 * ONE_PRODUCT))


def test_an_unknown_rate_is_an_error():
    with pytest.raises(ConfigError, match="int3"):
        work_of(kind(replace(PRODUCT, rate="int3")))


def test_residuals_are_of_the_least_certain_rate_in_use():
    cluster = constant_rates(host=HOST)
    curves = {"float32": ProductCurve(1e9, residual=0.1), "bfloat16": ProductCurve(1e9, residual=0.3)}
    performance = replace(cluster.performance, products=curves)
    assert residuals(performance, ["float32"])["products"] == 0.1
    assert residuals(performance, ["float32", "bfloat16"])["products"] == 0.3
    assert residuals(performance, [])["host"] == 0.25


@pytest.mark.parametrize("policy", RecomputePolicy)
@pytest.mark.parametrize("name", ["llama-tiny", "moe-tiny", "dit-digits", "llama-tiny float8.recipe=current"])
def test_times_are_of_the_operations_and_kernels_that_costs_count(name, policy):
    plan = plan_of(f"{name} train.precision=bfloat16 recompute.policy={policy}")
    cluster = constant_rates(host=HostCosts(launch_us=1.0, compiled_launch_us=1.0, residual=0.0))
    for one in plan.kinds:
        work = work_of(one, cluster, samples=plan.batch.samples, tokens=plan.batch.tokens)
        costs = CostModel.of(plan, on_cuda=True).of_kind(one)
        pairs = ((work.forward, costs.forward), (work.backward_input, costs.input_gradient),
                 (work.backward_weight, costs.weight_gradient), (work.recompute, costs.recomputation))  # fmt: skip
        for priced, counted in pairs:
            assert (priced.flops, priced.host) == (pytest.approx(counted.flops), counted.launches)
