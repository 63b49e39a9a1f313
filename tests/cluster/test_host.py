"""Cores and memory of this machine."""

from __future__ import annotations

from meshwright.cluster import host
from meshwright.cluster.host import CGROUP_LIMITS, host_memory_bytes


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    assert set(CGROUP_LIMITS) and 2**28 < host_memory_bytes() < 2**50
    for text, expected in (("1048576\n", 2**20), ("max\n", host_memory_bytes())):
        (tmp_path / "limit").write_text(text)
        monkeypatch.setattr(host, "CGROUP_LIMITS", (str(tmp_path / "limit"), str(tmp_path / "none")))
        assert host_memory_bytes() == expected
