"""Times on cores that processes share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cluster.presets import cluster_preset

CPU = replace(cluster_preset("CPU").performance, cores=4, shared={"products": 2.0})


def test_a_process_alone_is_not_slower():
    assert CPU.slower("products", 1) == CPU.slower("host", 1) == 1.0


@pytest.mark.parametrize(("processes", "slower"), [(2, 4 / 3), (4, 2.0), (8, 4.0)])
def test_processes_slow_each_other_up_to_the_cores_and_wait_beyond(processes, slower):
    assert CPU.slower("products", processes) == pytest.approx(slower)
    assert CPU.slower("host", processes) == pytest.approx(max(1.0, processes / 4))


def test_processes_of_gpus_share_no_cores():
    assert cluster_preset("H100").performance.slower("products", 8) == 1.0
