"""Presets are complete and consistent, found by name and by CUDA's name; links of a group, and message times."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster.hardware import Rate
from meshwright.cluster.presets import RESERVE, cluster_preset, device_for, gpus_by_memory, preset_names
from meshwright.errors import ConfigError
from meshwright.units import GIB

ACCELERATORS = ["A100-40", "A100-80", "H100", "H200", "B200", "GB200"]


def test_gpus_fit_what_is_as_large_as_their_memory_without_the_reserve():
    largest = int(cluster_preset("H100").device.memory_bytes * (1 - RESERVE))
    for num_bytes, smaller in ((0, 0), (largest, 1), (largest + 1, 3), (10**15, 6)):
        names = [[cluster.name for cluster in part] for part in gpus_by_memory(num_bytes)]
        assert names == [ACCELERATORS[:smaller], ACCELERATORS[smaller:]]


@pytest.mark.parametrize("name", preset_names())
def test_every_figure_is_there_with_a_source_and_links_get_slower_outward(name):
    cluster = cluster_preset(name)
    device, links = cluster.device, (cluster.inside_node, cluster.between_nodes)
    assert cluster.name == name
    assert cluster.devices_per_node >= 1
    assert all(rate > 0 for rate in device.peak_flops.values())
    assert device.memory_bytes >= GIB
    assert device.memory_bandwidth_bytes_per_s > 1e9
    assert device.launch_overhead_us > 0
    assert all(link.latency_us > 0 and link.ports >= 1 for link in links)
    assert all(len(one.source) > 20 for one in (device, *links))
    assert cluster.inside_node.bandwidth_bytes_per_s > cluster.between_nodes.bandwidth_bytes_per_s
    assert cluster.inside_node.latency_us < cluster.between_nodes.latency_us
    assert cluster.device.memory_bandwidth_bytes_per_s > cluster.inside_node.bandwidth_bytes_per_s


@pytest.mark.parametrize("name", ACCELERATORS)
def test_rates_are_dense(name):
    """Each narrower format doubles the rate, so a figure with sparsity would stand out as a quadrupling."""
    device = cluster_preset(name).device
    tensor_core_rates = [Rate.TF32, Rate.BF16, Rate.FP8, Rate.FP4]
    rates = [device.peak(rate) for rate in tensor_core_rates if rate in device.peak_flops]
    for wide, narrow in zip(rates, rates[1:], strict=False):
        assert narrow / wide == pytest.approx(2, rel=0.03)
    assert device.peak(Rate.BF16) == device.peak(Rate.FP16)


def test_what_memory_and_rates_are_known_to_be():
    assert cluster_preset("H200").device.memory_bytes == 141 * GIB
    assert cluster_preset("H100").device.peak(Rate.BF16) == pytest.approx(989.4e12)
    assert cluster_preset("A100-80").device.memory_bandwidth_bytes_per_s == pytest.approx(2.039e12)
    assert cluster_preset("GB200").devices_per_node == 72


def test_case_does_not_matter():
    assert cluster_preset("a100-80") == cluster_preset("A100-80")


@pytest.mark.parametrize("name, fix", [("H1000", "H100"), ("A100", "A100-40 or A100-80"), ("gb20", "GB200"), ("?", "")])
def test_an_unknown_preset_names_the_nearest(name, fix):
    with pytest.raises(ConfigError) as caught:
        cluster_preset(name)
    assert caught.value.fix == fix or (not fix and caught.value.fix in preset_names())
    assert name in caught.value.what and "GB200" in caught.value.rule


@pytest.mark.parametrize(
    "cuda_name, preset",
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_devices_are_found_by_their_cuda_name(cuda_name, preset):
    assert device_for(cuda_name) == cluster_preset(preset).device


@pytest.mark.parametrize(
    "cuda_name",
    ["NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090", ""],
)
def test_other_devices_are_not_mistaken_for_these(cuda_name):
    assert device_for(cuda_name) is None


def test_presets_need_no_torch():
    code = "import sys; from meshwright.cluster.presets import cluster_preset as c; c('H100')"
    subprocess.run([sys.executable, "-c", code + "; sys.exit('torch' in sys.modules)"], check=True)


def test_clusters_are_values():
    cluster = cluster_preset("H100")
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert len({cluster, cluster_preset("H100"), cluster_preset("H200")}) == 2


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
