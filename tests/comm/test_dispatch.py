"""The C++ kernels give the reference's bits, with every instruction set that this processor has."""

from __future__ import annotations

import ctypes
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm.compression import codecs
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.codecs import QUANTISED_DTYPES
from meshwright.comm.kernels import dispatch
from meshwright.comm.kernels.dispatch import CpuKernels, Isa
from meshwright.errors import RunError
from tests.comm.agree import (
    QUANTISED,
    assert_any_layout_is_taken,
    assert_codecs_agree,
    assert_feedback_agrees,
    assert_smallest_scale_agrees,
    same,
)  # fmt: skip
from tests.comm.data import KINDS, fresh


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        dispatch._compiler()
    except dispatch.BuildError as error:
        pytest.skip(f"needs a C++ compiler: {error}")
    return dispatch.open_library()


@pytest.fixture(scope="module", params=list(Isa), ids=lambda isa: isa.value)
def compiled(request, library) -> CpuKernels:
    try:
        return CpuKernels(library, request.param)
    except RunError as error:
        pytest.skip(str(error))


cases = given(
    num_elements=st.integers(1, 700) | st.integers(900, 2600),  # the C++ takes 8 groups at a time, 1024 elements
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(QUANTISED_DTYPES),
    codec=st.sampled_from(QUANTISED),
    rotate=st.booleans(),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=30)  # for each instruction set
@cases
def test_codecs_agree_with_the_reference(compiled, num_elements, kind, dtype, codec, rotate, rows, seed):
    assert_codecs_agree(compiled, fresh(kind, (rows, num_elements), dtype, seed=seed), codec, rotate=rotate)


@settings(max_examples=30)  # for each instruction set
@cases
def test_error_feedback_agrees_with_the_reference(compiled, num_elements, kind, dtype, codec, rotate, rows, seed):
    steps = [fresh(kind, (rows, num_elements), dtype, seed=seed + step) for step in range(3)]
    assert_feedback_agrees(compiled, steps, codec, beta=0.5 if rotate else codecs.BETA)


@pytest.mark.parametrize("inner", [Codec.EXACT, Codec.BF16, Codec.INT8])
def test_between_nodes_goes_the_sum_of_what_came_inside(inner):
    x = fresh("heavy", (3, 2, 300), torch.float32, seed=1)
    rotate = inner.is_quantised
    payloads = codecs.encode(x.view(6, 300), inner, rotate=rotate).view(3, 2, -1)
    size = {"num_elements": 300, "rotate": rotate}
    error = torch.zeros(2, Codec.INT8.encoded_bytes(300), dtype=torch.uint8)
    error = codecs.loco_quantise(x[0], error, Codec.INT4)[1]
    total = [codecs.decode_sum(payloads[:, i], inner, dtype=torch.float32, **size) for i in range(2)]
    for where in (dispatch, codecs):
        for beta in (0.5, codecs.BETA):
            expected = codecs.loco_quantise(torch.stack(total), error, Codec.INT4, beta=beta)
            found = where.requantise(payloads, inner, error=error, codec=Codec.INT4, beta=beta, **size)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    kept = error.clone()
    dispatch.requantise(payloads, inner, error=kept, codec=Codec.INT4, new_error=kept, **size)
    assert torch.equal(kept, expected[1])


EVERY_HALF = torch.arange(2**16, dtype=torch.int32).to(torch.int16)


@cache
def reference_of_halves(dtype, codec):
    """Computed once, for the kernels of every instruction set."""
    return codecs.encode(EVERY_HALF.view(dtype).view(-1, 1), codec)


@pytest.mark.parametrize("codec", QUANTISED)
def test_every_half_is_converted_as_torch_does(compiled, codec):
    every = EVERY_HALF
    for dtype in (torch.float16, torch.bfloat16):
        payloads = reference_of_halves(dtype, codec)
        assert torch.equal(compiled.encode(every.view(dtype).view(-1, 1), codec), payloads)
    ones = codecs.encode(torch.ones(1), codec)[: 16 * codec.bits].expand(len(every), -1)
    # A block of one group with any scale whatever: what is decoded passes every value on to the rounding of halves.
    blocks = torch.cat([ones, every.view(-1, 1).view(torch.uint8)], -1)
    blocks = torch.nn.functional.pad(blocks, (0, codec.encoded_bytes(1) - blocks.shape[-1]))
    for dtype in QUANTISED_DTYPES:
        some = blocks[::97]
        found = compiled.decode(some, codec, out=torch.empty(len(some), 1, dtype=dtype))
        assert same(found, codecs.decode(some, codec, num_elements=1, dtype=dtype))


@cache
def reference_of_products():
    """A block, and what it is in halves times multipliers that take it between two, subnormal and the largest too."""
    block = codecs.encode(torch.full((1,), -128.0), Codec.INT8)
    generator = torch.Generator().manual_seed(5)
    multipliers = torch.exp2(torch.empty(2000).uniform_(-40, 12, generator=generator)).tolist()
    exact = [65504, 65519.99, 65520, 65536, 2**-14, 2**-24, 2**-25, 3 * 2**-26, 3 * 2**-25, 1 + 2**-11, 1 + 3 * 2**-11]
    cases = itertools.product((torch.float16, torch.bfloat16), [*multipliers, *(value / 128 for value in exact)])
    size = {"num_elements": 1}
    return block, {(d, m): codecs.decode(block, Codec.INT8, dtype=d, multiplier=m, **size) for d, m in cases}


def test_rounding_to_halves_is_that_of_torch(compiled):
    block, products = reference_of_products()
    for (dtype, multiplier), expected in products.items():
        found = compiled.decode(block, Codec.INT8, out=torch.empty(1, dtype=dtype), multiplier=multiplier)
        assert torch.equal(found, expected), multiplier


def test_the_smallest_scale_and_any_layout_agree(compiled):
    assert_smallest_scale_agrees(compiled)
    assert_any_layout_is_taken(compiled)
    nothing = torch.zeros(2, 0, dtype=torch.uint8)
    assert compiled.decode_sum(nothing, Codec.INT4, out=torch.empty(0)).shape == (0,)


def test_the_best_instruction_set_is_chosen(library):
    best = CpuKernels(library).isa
    flags = torch.backends.cpu.get_cpu_capability()
    assert best is {"AVX512": Isa.AVX512, "AVX2": Isa.AVX2}.get(flags, best)


def test_without_a_compiler_the_reference_works_and_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    dispatch.find_kernels.cache_clear()
    try:
        x = torch.randn(2, 200)
        error = torch.zeros(2, Codec.INT8.encoded_bytes(200), dtype=torch.uint8)
        with caplog.at_level(logging.WARNING, logger="meshwright"):
            payload = dispatch.encode(x, Codec.INT4)
            total = dispatch.decode_sum(payload, Codec.INT4, out=torch.empty(200))
            each = dispatch.decode(payload, Codec.INT4, out=torch.empty(2, 200))
            dispatch.loco_quantise(x, error, Codec.INT4, new_error=error)
        assert torch.equal(payload, codecs.encode(x, Codec.INT4))
        assert torch.equal(total, codecs.decode_sum(payload, Codec.INT4, num_elements=200, dtype=torch.float32))
        assert torch.equal(each, codecs.decode(payload, Codec.INT4, num_elements=200, dtype=torch.float32))
        assert error.any()
        [line] = [record.getMessage() for record in caplog.records]
        assert "torch reference" in line and "no-such-compiler" in line
    finally:
        dispatch.find_kernels.cache_clear()


def fake_compiler(folder, script):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def libraries():
    return list(dispatch.cache_folder().glob("*.so"))


def test_the_library_is_built_once_and_again_when_damaged(library, monkeypatch, tmp_path, caplog):
    """With a compiler that copies what was built already."""
    log = tmp_path / "calls"
    script = f'while [ "$1" != -o ]; do shift; done; cp "{library._name}" "$2"; echo called >> "{log}"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        assert CpuKernels(dispatch.open_library()).isa in Isa
    assert log.read_text().split() == ["called"]
    [built] = libraries()
    assert built.name.startswith("kernels_cpu-")
    # In another folder: a path that this process has loaded is not read again.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    dispatch.cache_folder().mkdir(parents=True)
    damaged = dispatch.cache_folder() / built.name
    damaged.write_bytes(built.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        dispatch.open_library()
    assert "damaged" in caplog.text and log.read_text().split() == ["called"] * 2
    assert libraries() == [damaged]
    assert damaged.read_bytes() == built.read_bytes()


def test_one_of_the_ranks_builds(library, monkeypatch, tmp_path):
    log = tmp_path / "calls"
    script = f'while [ "$1" != -o ]; do shift; done; sleep 0.1; cp "{library._name}" "$2"; echo called >> "{log}"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(lambda _: dispatch.open_library(), range(3)))
    assert {one._name for one in opened} == {str(path) for path in libraries()} and len(libraries()) == 1
    assert log.read_text().split() == ["called"]


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'what a source' >&2; exit 3"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(dispatch.BuildError, match="failed with exit code 3: what a source"):
        dispatch.open_library()
    assert libraries() == []


def test_a_cache_that_cannot_be_written_is_done_without(library, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    script = f'while [ "$1" != -o ]; do shift; done; cp "{library._name}" "$2"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        assert CpuKernels(dispatch.open_library()).isa in Isa
    assert "for this process only" in caplog.text


def test_an_instruction_set_that_is_missing_is_refused(library):
    class Without:
        def __getitem__(self, name):
            return (lambda: name == "has_baseline") if name.startswith("has_") else library[name]

    with pytest.raises(RunError, match="avx2"):
        CpuKernels(Without(), Isa.AVX2)
    assert CpuKernels(Without()).isa is Isa.BASELINE
