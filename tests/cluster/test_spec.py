"""Peak rates, links of a group and message times of clusters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster.presets import Rate, cluster_preset
from meshwright.errors import ConfigError


def test_a_rate_that_a_device_does_not_have_is_an_error():
    with pytest.raises(ConfigError, match="has no fp8 rate"):
        cluster_preset("A100-80").device.peak(Rate.FP8)


@given(num_devices=st.integers(1, 4096), name=st.sampled_from(["H100", "GB200"]))
def test_a_group_uses_the_fast_link_while_it_fits_into_a_node(num_devices, name):
    cluster = cluster_preset(name)
    fits = num_devices <= cluster.devices_per_node
    assert cluster.link(num_devices) is (cluster.inside_node if fits else cluster.between_nodes)


@given(first=st.integers(0, 2**40), second=st.integers(0, 2**40))
def test_one_message_is_faster_than_two_of_its_halves(first, second):
    link = cluster_preset("H100").between_nodes
    together, apart = link.time_us(first + second), link.time_us(first) + link.time_us(second)
    assert apart - together == pytest.approx(link.latency_us, abs=1e-6 * apart)
