"""Fits recover the curves that times with noise were made from."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from meshwright.calibrate.fit import (
    TimedAttention,
    TimedCollective,
    TimedProduct,
    TimedRun,
    fit_attention,
    fit_link,
    fit_logs,
    fit_products,
    fit_runs,
)
from meshwright.cluster.collectives import CollectiveOp, GroupShape, collective_us
from meshwright.cluster.hardware import Level
from meshwright.cluster.performance import HostCosts, LinkCurve, ProductCurve
from meshwright.cluster.presets import cluster_preset

SIZES = (32, 128, 512, 2048)


def noise(seed, deviation, count):
    return np.exp(np.random.default_rng(seed).normal(0, deviation, count))


SHAPES = [(*shape, number) for shape in itertools.product((32, 128, 512), repeat=3) for number in range(3)]
CURVE = ProductCurve(8e10, 40.0, 12.0, 90.0, 1.2, 0.8)


def timed_products(seed, deviation, launch_s=3e-6):
    slower = (1.0, CURVE.input_gradient_slower, CURVE.weight_gradient_slower)
    return [
        TimedProduct(*one, (launch_s + CURVE.seconds(*one[:3]) * slower[one[3]]) * each)
        for one, each in zip(SHAPES, noise(seed, deviation, len(SHAPES)), strict=True)
    ]


@pytest.mark.parametrize("deviation", [0.0, 0.05, 0.2])
def test_products(deviation):
    found = fit_products(timed_products(1, deviation))
    assert found.residual == pytest.approx(deviation, rel=0.25, abs=0.02)
    for *shape, _ in SHAPES:
        assert found.seconds(*shape) == pytest.approx(CURVE.seconds(*shape), rel=0.1 + deviation)
    assert found.input_gradient_slower == pytest.approx(1.2, rel=0.02 + deviation / 2)
    assert found.weight_gradient_slower == pytest.approx(0.8, rel=0.02 + deviation / 2)


def test_two_calibrations_under_noise_differ_by_less_than_their_residuals_say():
    first, second = (fit_products(timed_products(seed, 0.2)) for seed in (2, 3))
    for *shape, _ in SHAPES:
        assert abs(np.log(first.seconds(*shape) / second.seconds(*shape))) < first.residual + second.residual


def test_a_residual_is_that_of_times_that_the_fit_has_not_seen():
    measured = np.exp(np.random.default_rng(8).normal(0, 0.1, 4))
    found = fit_logs(lambda values: values, [1.0] * 4, [0.05] * 4, measured.tolist())
    assert found.residual < found.expected  # four parameters take half of four errors
    assert found.expected == pytest.approx(float(np.sqrt(np.mean(np.log(measured) ** 2))), rel=0.05)


def test_attention():
    factors = noise(4, 0.05, 10)
    samples = []
    for number, length in enumerate((64, 128, 256, 512, 1024)):
        flops = 4.0 * length**2 * 64
        forward = flops / 5e10 * (1 + 80 / length)
        samples.append(
            TimedAttention(length, flops, forward * factors[number], 2.5 * 1.3 * forward * factors[number + 5])
        )
    found = fit_attention(samples)
    assert found.flops_per_s == pytest.approx(5e10, rel=0.1)
    assert found.half_length == pytest.approx(80, rel=0.3)
    assert found.backward_slower == pytest.approx(1.3, rel=0.06)
    assert 0.02 < found.residual < 0.1


@pytest.mark.parametrize("cores", [0, 2])
def test_links_are_fitted_as_collectives_are_priced(cores):
    base = cluster_preset("CPU")
    link = replace(base.inside_node, bandwidth_bytes_per_s=2e9)
    true = LinkCurve(70.0, reduce_scatter_slower=1.5, cached_bytes=1.5 * 2**20, uncached_slower=3.0)
    curves = {Level.INSIDE_NODE: true}
    cluster = replace(base, inside_node=link, performance=replace(base.performance, links=curves, cores=cores))
    ops = (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_REDUCE)
    cases = list(itertools.product(ops, (2**10, 2**16, 2**20, 2**22, 2**24), (2, 4)))
    samples = [
        TimedCollective(op, size, ranks, collective_us(cluster, op, size, GroupShape(ranks)) / 1e6 * each)
        for (op, size, ranks), each in zip(cases, noise(6, 0.1, len(cases)), strict=True)
    ]
    found = fit_link(replace(cluster, inside_node=base.inside_node), samples)
    curve = found.curve(Level.INSIDE_NODE)
    assert found.inside_node.bandwidth_bytes_per_s == pytest.approx(2e9, rel=0.15)
    assert curve.uncached_slower == pytest.approx(3, rel=0.15) and curve.cached(2**24) == pytest.approx(
        true.cached(2**24), rel=0.1
    )
    assert curve.latency_us == pytest.approx(70, rel=0.1) and curve.reduce_scatter_slower == pytest.approx(1.5, rel=0.1)
    assert curve.residual == pytest.approx(0.1, rel=0.4)


def test_costs_that_runs_show_are_found_and_others_stay():
    cluster = cluster_preset("CPU")
    true = replace(cluster.performance.host, launch_us=4.0, block_us=250.0, step_us=900.0)
    counts = [(400, 8, 1, 0), (800, 16, 1, 0), (1600, 32, 1, 0), (400, 8, 4, 0), (100, 32, 2, 0)]

    def us(host: HostCosts, count: tuple[int, ...]) -> float:
        launches, blocks, steps, units = count
        return 50 + launches * host.launch_us + blocks * host.block_us + steps * host.step_us + units * host.unit_us

    runs = [TimedRun(lambda c, n=n: us(c.performance.host, n), us(true, n)) for n in counts]
    found = fit_runs(cluster, runs).performance
    for count in counts:
        assert us(found.host, count) == pytest.approx(us(true, count), rel=0.05)
    assert found.host.unit_us == pytest.approx(cluster.performance.host.unit_us)  # no run has a unit
    assert found.residual < 0.05 and found.products == cluster.performance.products


def test_runs_move_measured_rates_less_than_guessed_costs():
    cluster = cluster_preset("CPU")

    def us(c):
        return 1e12 / c.performance.products["float32"].flops_per_s + c.performance.host.step_us

    found = fit_runs(cluster, [TimedRun(us, 1.3 * us(cluster))]).performance
    rate = cluster.performance.products["float32"].flops_per_s / found.products["float32"].flops_per_s
    assert us(replace(cluster, performance=found)) == pytest.approx(1.3 * us(cluster), rel=0.05)
    assert 1 <= rate < found.host.step_us / cluster.performance.host.step_us


def test_steps_of_several_processes_leave_what_one_process_shows():
    cluster = cluster_preset("CPU")

    def us(c, units):
        return 1e12 / c.performance.products["float32"].flops_per_s + units * c.performance.host.unit_us

    alone, disturbed = us(cluster, 0), 5 * us(cluster, 10)
    runs = [TimedRun(lambda c: us(c, 0), alone), TimedRun(lambda c: us(c, 10), disturbed, num_ranks=2)]
    found = fit_runs(cluster, runs).performance
    assert found.products == cluster.performance.products
    assert us(replace(cluster, performance=found), 10) == pytest.approx(disturbed, rel=0.05)
