"""The catalogue against what codecs make of elements; and what is a mistake in a name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshwright.comm
from meshwright.comm.compression.catalogue import (
    ALIGNMENT,
    EXACT,
    GROUP,
    METHODS,
    Codec,
    Use,
    encoded_bytes,
    find_method,
    is_lossy,
    lossless_names,
    names,
)  # fmt: skip
from meshwright.comm.compression.codecs import decode
from meshwright.errors import ConfigError
from tests.comm.data import encode_by

ALL = [method.name for method in METHODS]
LENGTHS = sorted({0, 1, 2, *(n + i for n in (GROUP, 2 * GROUP, 8 * GROUP, 64 * GROUP) for i in (-1, 0, 1)), 100_003})
"""Around ends of groups and of what alignment adds."""

CODECS_OF_SUMS = {
    "exact": "exact", "exact-via-all-to-all": "exact", "bf16": "bf16",
    "int8": "int8", "int4": "int8", "loco4": "int4", "int2": "int8", "loco2": "int2",
}  # fmt: skip
"""By method of gradients, the codec of the sum in an all-reduce."""


def size_of(name, num_elements, dtype):
    return len(encode_by(find_method(name), torch.ones(num_elements, dtype=dtype)))


@given(
    name=st.sampled_from(ALL),
    n=st.sampled_from(LENGTHS) | st.integers(0, 20_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_sizes_are_those_of_the_codecs(name, n, dtype):
    assert encoded_bytes(name, n, element_bytes=dtype.itemsize) == size_of(name, n, dtype)


def test_sizes_of_a_table():
    """By hand: codes, two bytes a group, filled up to 16."""
    assert [encoded_bytes("int8", n, element_bytes=4) for n in (0, 1, 128, 129, 1024)] == [0, 144, 144, 272, 1040]
    assert [encoded_bytes("loco4", n, element_bytes=2) for n in (1, 129, 1024)] == [80, 144, 528]
    assert [encoded_bytes("int2", n, element_bytes=2) for n in (1, 129, 1024)] == [48, 80, 272]
    assert [encoded_bytes(n, 7, element_bytes=8) for n in ("exact", "exact-via-all-to-all", "bf16")] == [56, 56, 14]
    assert all(encoded_bytes(name, 1001, element_bytes=4) % ALIGNMENT == 0 for name in ALL if name.startswith("int"))


def limit(codec):
    """Of the relative error; half of a float's bits are taken for its exponent."""
    if codec is Codec.EXACT:
        return 0.0
    return 1.2 * 2.0 ** (1 - codec.bits) if codec.is_quantised else 2.0 ** (-codec.bits / 2)


@pytest.mark.parametrize("use", Use)
def test_every_method_brings_elements_back(use):
    """What is not lossy to the bit, the rest within what its bits lose of numbers between -1 and 1."""
    x = torch.rand(1000) * 2 - 1
    for name in names(use):
        method = find_method(name, use)
        payload = encode_by(method, x)
        found = decode(payload, method.codec, num_elements=1000, dtype=x.dtype, rotate=method.rotate)
        assert torch.equal(found, x) != method.is_lossy
        assert float((found - x).norm()) <= limit(method.codec) * float(x.norm())


def test_what_is_for_what():
    """Names that configurations have stay; there may be more."""
    assert CODECS_OF_SUMS.keys() <= set(names(Use.GRADIENTS))
    assert {"exact", "bf16", "int8"} <= set(names(Use.WEIGHTS))
    assert {"exact", "bf16", "int8", "int4"} <= set(names(Use.INSIDE_NODE))
    assert {name for use in Use for name in names(use)} == set(ALL), "each method is for something"
    assert {codec.value for codec in Codec} <= set(ALL), "each codec is a method under its own name"
    assert not any(find_method(name).feedback for use in (Use.WEIGHTS, Use.INSIDE_NODE) for name in names(use))


def test_what_is_lossless():
    lossless = ["exact", "exact-via-all-to-all"]
    assert [name for name in ALL if not is_lossy(name)] == lossless == list(lossless_names(Use.GRADIENTS))
    assert lossless_names(Use.WEIGHTS) == lossless_names(Use.INSIDE_NODE) == (EXACT,)


def test_codecs_of_stages():
    """The sum of an all-reduce is int8 without feedback; inside a node what is exact stays so."""
    of_sums = {one.name: one.codec_of_sum.value for one in METHODS}
    assert of_sums.items() >= CODECS_OF_SUMS.items()
    inside = {method.name for method in METHODS if method.codec_inside_node(Codec.INT4) is Codec.EXACT}
    assert inside == {"exact", "exact-via-all-to-all"}
    assert find_method("loco4").codec_inside_node(Codec.BF16) is Codec.BF16


@pytest.mark.parametrize(
    ("name", "use", "what", "fix"),
    [
        ("loco44", Use.GRADIENTS, "gradients", "gradients='loco4'"),
        ("loco4", Use.WEIGHTS, "weights", "weights='exact'"),
        ("int16", Use.INSIDE_NODE, "gradients inside a node", "inside_node='int8'"),
    ],
)
def test_a_name_that_there_is_not(name, use, what, fix):
    with pytest.raises(ConfigError) as refused:
        find_method(name, use)
    error = refused.value
    assert (error.what, error.fix) == (f"{what} cannot be sent as {name!r}", fix)
    assert (error.where, error.rule) == (f"compressed {use}", f"methods for {what} are {', '.join(names(use))}")


def test_a_name_without_a_use():
    with pytest.raises(ConfigError, match="elements cannot be sent as 'loco5'") as refused:
        find_method("loco5")
    assert refused.value.rule == f"methods are {', '.join(ALL)}"
    assert refused.value.fix in {f"method={name!r}" for name in ALL}


@pytest.mark.slow
def test_public_names_are_no_files():
    """Whichever file of the room is imported first: torch is imported once, the package anew for each."""
    code = """
import importlib, sys, torch
for first in ("compression", "alltoallv", "node_groups", "kernels"):
    for name in [name for name in sys.modules if name.partition(".")[0] == "meshwright"]:
        del sys.modules[name]
    importlib.import_module(f"meshwright.comm.{first}")
    comm = importlib.import_module("meshwright.comm")
    assert first in vars(comm), "the package is the one that was imported now"
    assert all(callable(getattr(comm, name)) for name in comm.__all__), first
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'compres'"):
        meshwright.comm.compres  # noqa: B018
