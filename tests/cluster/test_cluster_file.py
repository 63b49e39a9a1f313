"""Cluster files: written and read again, on top of presets, and what is wrong with a bad one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.cluster.cluster_file import cluster_json, cluster_toml
from meshwright.cluster.hardware import Level
from meshwright.cluster.performance import LinkCurve, ProductCurve
from meshwright.cluster.presets import cluster_preset, find_cluster, link_names, preset_names
from meshwright.errors import ConfigError


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "mine.toml").write_text(text, "utf-8")
        return find_cluster(str(tmp_path / "mine.toml"))

    return read


def equal(one, other):
    """Equality leaves out what is not hashed; the text has everything."""
    return one == other and cluster_json(one) == cluster_json(other)


@pytest.mark.parametrize("name", preset_names())
def test_a_file_is_read_as_what_was_written(read, name):
    cluster = cluster_preset(name)
    assert equal(read(cluster_toml(cluster, "two\nlines")), cluster)


def test_texts_and_pods_come_back(read):
    base = cluster_preset("H100")
    curve = ProductCurve(1.23456789e14, 0.1, 1e-7, 3e22)
    cluster = replace(
        base,
        name='a "name"\\\twith\nlines',
        nodes_per_pod=32,
        between_pods=replace(base.between_nodes, bandwidth_bytes_per_s=12.5e9),
        performance=replace(base.performance, products={"bfloat16": curve}, is_async=False, cores=3),
    )
    assert equal(read(cluster_toml(cluster)), cluster)
    assert json.loads(cluster_json(cluster))["performance"]["products"]["bfloat16"]["half_columns"] == 3e22


def test_a_preset_and_what_differs_from_it(read):
    found = read(
        'preset = "a100-80"\nbetween_nodes = "roce200"\n[device]\nmemory_gib = 79\n[performance.host]\nlaunch_us = 3'
    )
    base = cluster_preset("A100-80")
    assert found.device == replace(base.device, memory_bytes=79 * 2**30)
    assert found.between_nodes.bandwidth_bytes_per_s == 25e9 and "RoCE" in found.between_nodes.name
    assert found.performance.host == replace(base.performance.host, launch_us=3.0)
    assert found.curve(Level.BETWEEN_NODES) != base.curve(Level.BETWEEN_NODES)  # a link comes with its curve
    assert found.inside_node == base.inside_node and found.performance.products == base.performance.products


def test_a_link_of_a_preset_is_changed_in_part(read):
    found = read('preset = "H100"\n[between_nodes]\nbandwidth_gb_per_s = 25')
    assert found.between_nodes == replace(cluster_preset("H100").between_nodes, bandwidth_bytes_per_s=25e9)


def test_levels(read):
    found = read('preset = "H100"\nnodes_per_pod = 4\nbetween_pods = "roce100"')
    levels = {8: Level.INSIDE_NODE, 9: Level.BETWEEN_NODES, 32: Level.BETWEEN_NODES, 33: Level.BETWEEN_PODS}
    assert {devices: found.level(devices) for devices in levels} == levels
    assert found.link(33).bandwidth_bytes_per_s == 12.5e9
    flat = cluster_preset("H100")
    assert flat.link(10**6) is flat.link_at(Level.BETWEEN_PODS) is flat.between_nodes
    assert flat.curve(Level.BETWEEN_PODS) == flat.curve(Level.BETWEEN_NODES)
    bare = replace(flat, performance=replace(flat.performance, links={}))
    assert bare.curve(Level.INSIDE_NODE) == LinkCurve(bare.inside_node.latency_us)


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ('preset = "H100', "not TOML", "calibrate"),
        ('preset = "H1000"', "H1000", "H100"),
        ('preset = "H100"\nbetween_nodes = "rocee400"', "rocee400", "roce400"),
        ('preset = "H100"\ndevices_per_nod = 4', "devices_per_nod", "devices_per_node"),
        ('preset = "H100"\ndevices_per_node = 0', "devices_per_node = 0", "devices_per_node = 1"),
        ('preset = "H100"\ndevices_per_node = 2.5', "devices_per_node = 2.5", "devices_per_node = 1"),
        ('preset = "H100"\n[device]\nmemory_gib = -1', "device.memory_gib = -1", "memory_gib = 0"),
        ('preset = "H100"\n[device]\nmemory_gib = "80"', "device.memory_gib", "memory_gib = 1.0"),
        ('preset = "H100"\n[device.peak_tflops]\nbf17 = 1', "bf17", "bf16"),
        ('preset = "H100"\n[performance]\nmemory_eficiency = 1', "memory_eficiency", "memory_efficiency"),
        ('preset = "H100"\n[performance.links.inside_node]\nlatency_us = nan', "latency_us = nan", "latency_us = 0"),
        ('preset = "H100"\nperformance = 3', "performance = 3", "[performance]"),
        ("", "device", "preset"),
        ('[device]\nname = "x"', "inside_node", "preset"),
    ],
)
def test_bad_files(read, text, what, fix):
    with pytest.raises(ConfigError) as caught:
        read(text)
    error = caught.value
    assert what in error.what and fix in error.fix and "mine.toml" in error.where and error.rule


def test_what_is_neither_a_preset_nor_a_file(tmp_path):
    with pytest.raises(ConfigError):
        find_cluster(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError) as caught:
        find_cluster("H1000")
    assert caught.value.fix == "H100"
    assert find_cluster("h100") is cluster_preset("H100")


def test_links_by_name():
    generations = {"nvlink2", "nvlink3", "nvlink4", "nvlink5", "xgmi3", "pcie4", "pcie5", "edr", "hdr", "ndr", "xdr"}
    assert generations | {"roce100", "roce200", "roce400"} <= set(link_names())
