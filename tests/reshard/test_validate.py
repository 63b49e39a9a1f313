"""Arguments of `plan` of other types: refused, each with a fix that works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.cluster.presets import cluster_preset
from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard import Topology, plan

A, B = (Layout.parse(text, (2, 2), (64, 64)) for text in ("S0 S1", "S1 S0"))


def error_of(*ends: Any, **arguments: Any) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        plan(*ends, **arguments)
    assert caught.value.what and caught.value.where and caught.value.rule and caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("cap", "fix"),
    [("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("100kb", 10**5), ("64M", 64 * 10**6), (2e9, 2 * 10**9),
     ("30000", 30000), ("lots", None), (True, None), ([1], None), (float("inf"), None), (-1.0, None)],
)  # fmt: skip
def test_a_cap_is_a_whole_number_of_bytes(cap: Any, fix: int | None) -> None:
    error = error_of(A, B, memory_cap_bytes=cap)
    assert error.where == "memory_cap_bytes" and repr(cap) in error.what
    assert error.fix == f"memory_cap_bytes={fix}"
    plan(A, B, memory_cap_bytes=fix)


def test_a_cap_of_numpy_is_one() -> None:
    assert plan(A, B, memory_cap_bytes=np.int64(10**6)) is plan(A, B, memory_cap_bytes=10**6)


@pytest.mark.parametrize("topology", ["H100", "b200", "nothing", 5, ["H100"], cluster_preset("H100")])
def test_a_topology_is_made_of_a_cluster(topology: Any) -> None:
    import meshwright.cluster.presets

    error = error_of(A, B, topology=topology)
    assert error.where == "topology"
    if isinstance(topology, str) and topology != "nothing":
        assert repr(topology) in error.fix
    expression = error.fix.removeprefix("topology=").replace("the same cluster", "cluster")
    names = {"meshwright": meshwright, "Topology": Topology, "cluster": topology}
    plan(A, B, topology=eval(expression, names))


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [("float32", "fp32"), ("bfloat16", "bf16"), ("INT64", "int64"), ("bf17", "bf16"), (None, "bf16"),
     (["fp32"], "bf16"), (4, "bf16")],
)  # fmt: skip
def test_a_dtype_is_a_name(dtype: Any, fix: str) -> None:
    error = error_of(A, B, dtype=dtype)
    assert error.where == "dtype" and error.fix == f"dtype={fix!r}"
    plan(A, B, dtype=fix)


def test_a_dtype_of_torch_has_a_name() -> None:
    import torch

    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.bool, "bool"), (torch.half, "fp16")):
        assert error_of(A, B, dtype=dtype).fix == f"dtype={name!r}"


@pytest.mark.parametrize(("ends", "where"), [(("S0 S1", B), "src"), ((A, "S1 S0"), "dst"), ((None, B), "src")])
def test_ends_are_layouts(ends: tuple[Any, Any], where: str) -> None:
    error = error_of(*ends)
    assert error.where == where and "Layout.parse(" in error.fix
