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
    fit_host,
    fit_link,
    fit_memory,
    fit_positive,
    fit_products,
    recalibrated,
)
from meshwright.cluster.collectives import CollectiveOp, GroupShape, collective_us
from meshwright.cluster.hardware import Level
from meshwright.cluster.performance import HostCosts, LinkCurve, ProductCurve
from meshwright.cluster.presets import cluster_preset

SIZES = (32, 128, 512, 2048)


def noise(seed, deviation, count):
    return np.exp(np.random.default_rng(seed).normal(0, deviation, count))


@pytest.mark.parametrize("deviation", [0.0, 0.05, 0.2])
def test_products(deviation):
    curve = ProductCurve(8e10, 40.0, 12.0, 90.0)
    shapes = list(itertools.product(SIZES, repeat=3))
    factors = noise(1, deviation, len(shapes))
    found = fit_products(
        [TimedProduct(*shape, curve.seconds(*shape) * each) for shape, each in zip(shapes, factors, strict=True)]
    )
    assert found.residual == pytest.approx(deviation, rel=0.25, abs=0.02)
    for shape in shapes:
        assert found.seconds(*shape) == pytest.approx(curve.seconds(*shape), rel=0.03 + deviation)
    assert found.flops_per_s == pytest.approx(curve.flops_per_s, rel=0.02 + deviation / 2)


def test_two_calibrations_under_noise_differ_by_less_than_their_residuals_say():
    curve = ProductCurve(8e10, 40.0, 12.0, 90.0)
    shapes = list(itertools.product(SIZES, repeat=3))
    first, second = (
        fit_products(
            [
                TimedProduct(*shape, curve.seconds(*shape) * each)
                for shape, each in zip(shapes, noise(seed, 0.2, len(shapes)), strict=True)
            ]
        )
        for seed in (2, 3)
    )
    for shape in shapes:
        assert abs(np.log(first.seconds(*shape) / second.seconds(*shape))) < first.residual + second.residual


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


def test_memory():
    sizes = (2**10, 2**14, 2**18, 2**22, 2**26)
    times = (np.array([3e-6 + size / 2e10 for size in sizes]) * noise(5, 0.03, len(sizes))).tolist()
    found = fit_memory(list(zip(sizes, times, strict=True)))
    assert found.launch_us == pytest.approx(3, rel=0.1) and found.bytes_per_s == pytest.approx(2e10, rel=0.1)
    assert 0 < found.residual < 0.06


@pytest.mark.parametrize("cores", [0, 2])
def test_links_are_fitted_as_collectives_are_priced(cores):
    base = cluster_preset("CPU")
    link = replace(base.inside_node, bandwidth_bytes_per_s=2e9)
    curves = {Level.INSIDE_NODE: LinkCurve(70.0)}
    cluster = replace(base, inside_node=link, performance=replace(base.performance, links=curves, cores=cores))
    ops = (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_REDUCE)
    cases = list(itertools.product(ops, (2**10, 2**16, 2**20, 2**24), (2, 4)))
    samples = [
        TimedCollective(op, size, ranks, collective_us(cluster, op, size, GroupShape(ranks)) / 1e6 * each)
        for (op, size, ranks), each in zip(cases, noise(6, 0.1, len(cases)), strict=True)
    ]
    bandwidth, curve = fit_link(samples, cores=cores)
    assert bandwidth == pytest.approx(2e9, rel=0.1) and curve.latency_us == pytest.approx(70, rel=0.1)
    assert curve.residual == pytest.approx(0.1, rel=0.4)


def test_no_coefficient_is_negative():
    rows = np.array([(1.0, 1.0), (1.0, 2.0), (1.0, 4.0)])
    found, _ = fit_positive(rows, np.array([3.0, 2.0, 1.0]))
    assert (found >= 0).all() and found[0] > 0


def test_host_costs_that_runs_show_are_found_and_others_stay():
    cluster = cluster_preset("CPU")
    true = replace(cluster.performance.host, launch_us=4.0, block_us=250.0, step_us=900.0)
    counts = [(400, 8, 1, 0), (800, 16, 1, 0), (1600, 32, 1, 0), (400, 8, 4, 0), (100, 32, 2, 0)]

    def us(host: HostCosts, count: tuple[int, ...]) -> float:
        launches, blocks, steps, units = count
        return 50 + launches * host.launch_us + blocks * host.block_us + steps * host.step_us + units * host.unit_us

    runs = [TimedRun(lambda c, n=n: us(c.performance.host, n), us(true, n)) for n in counts]
    found = fit_host(cluster, runs)
    for count in counts:
        assert us(found, count) == pytest.approx(us(true, count), rel=0.05)
    assert found.unit_us == cluster.performance.host.unit_us  # no run has a unit
    assert found.residual < 0.05


def test_a_run_scales_the_parts_that_it_measured():
    cluster = cluster_preset("A100-80")
    found = recalibrated(cluster, {"products": 100.0, "memory": 50.0, "host": 10.0, "bubble": 5.0},
                         {"products": 200.0, "memory": 25.0, "host": 20.0})  # fmt: skip
    old, new = cluster.performance, found.performance
    assert new.products["bfloat16"].flops_per_s == pytest.approx(old.products["bfloat16"].flops_per_s / 2, rel=1e-3)
    assert new.memory_efficiency == pytest.approx(2 * old.memory_efficiency)
    assert new.host.launch_us == 2 * old.host.launch_us and new.host.residual == old.host.residual
    assert new.attention == old.attention and found.device == cluster.device and new.source != old.source
