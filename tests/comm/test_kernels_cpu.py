"""The C++ kernels give the reference's bits, with every instruction set that this processor has."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm import build_cpu, codecs, feedback, kernels, kernels_cpu
from meshwright.comm.codecs import QUANTISED_DTYPES, Codec
from meshwright.comm.kernels_cpu import CpuKernels, Isa
from meshwright.errors import RunError
from tests.comm.data import KINDS, fresh

QUANTISED = [Codec.INT8, Codec.INT4, Codec.INT2]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        build_cpu._compiler()
    except build_cpu.BuildError as error:
        pytest.skip(f"needs a C++ compiler: {error}")
    return build_cpu.open_library()


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


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN like NaN; signs of zeros count."""
    assert a.dtype == b.dtype and a.shape == b.shape
    return torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30)) and torch.equal(
        a.isnan() | a.signbit(), b.isnan() | b.signbit()
    )


@settings(max_examples=60)
@cases
def test_codecs_agree_with_the_reference(compiled, num_elements, kind, dtype, codec, rotate, rows, seed):
    x = fresh(kind, (rows, num_elements), dtype, seed=seed)
    payloads = codecs.encode(x, codec, rotate=rotate)
    assert torch.equal(compiled.encode(x, codec, rotate=rotate), payloads)
    assert torch.equal(compiled.encode(x[0], codec, rotate=rotate), payloads[0])
    for multiplier in (1.0, 1 / 3):
        options = {"rotate": rotate, "multiplier": multiplier}
        size = {"num_elements": num_elements, "dtype": dtype}
        out = torch.full((rows, num_elements), 5.0, dtype=dtype)
        total = codecs.decode_sum(payloads, codec, **size, **options)
        assert same(compiled.decode_sum(payloads, codec, out=out[0], **options), total) and same(out[0], total)
        each = codecs.decode(payloads, codec, **size, **options)
        assert same(compiled.decode(payloads, codec, out=out, **options), each)
        assert same(compiled.decode(payloads[0], codec, out=out[-1], **options), each[0])


@settings(max_examples=60)
@cases
def test_error_feedback_agrees_with_the_reference(compiled, num_elements, kind, dtype, codec, rotate, rows, seed):
    error = torch.zeros(rows, Codec.INT8.encoded_bytes(num_elements), dtype=torch.uint8)
    beta = 0.5 if rotate else feedback.BETA
    for step in range(3):
        g = fresh(kind, (rows, num_elements), dtype, seed=seed + step)
        payload, new_error = feedback.loco_quantise(g, error, codec, beta=beta)
        found = compiled.loco_quantise(g, error, codec, beta=beta)
        assert torch.equal(found[0], payload) and torch.equal(found[1], new_error)
        compiled.loco_quantise(g, error, codec, beta=beta, new_error=error)
        assert torch.equal(error, new_error)


@pytest.mark.parametrize("codec", QUANTISED)
def test_every_half_is_converted_as_torch_does(compiled, codec):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = every.view(dtype).view(-1, 1)
        payloads = codecs.encode(x, codec)
        assert torch.equal(compiled.encode(x, codec), payloads)
    ones = codecs.encode(torch.ones(1), codec)[: 16 * codec.bits].expand(len(every), -1)
    # A block of one group with any scale whatever: what is decoded passes every value on to the rounding of halves.
    blocks = torch.cat([ones, every.view(-1, 1).view(torch.uint8)], -1)
    blocks = torch.nn.functional.pad(blocks, (0, codec.encoded_bytes(1) - blocks.shape[-1]))
    for dtype in QUANTISED_DTYPES:
        some = blocks[::97]
        found = compiled.decode(some, codec, out=torch.empty(len(some), 1, dtype=dtype))
        assert same(found, codecs.decode(some, codec, num_elements=1, dtype=dtype))


def test_rounding_to_halves_is_that_of_torch(compiled):
    """Values that a product with any multiplier takes between two halves, subnormal ones and the largest among them."""
    block = codecs.encode(torch.full((1,), -128.0), Codec.INT8)
    generator = torch.Generator().manual_seed(5)
    multipliers = torch.exp2(torch.empty(2000).uniform_(-40, 12, generator=generator)).tolist()
    exact = [65504, 65519.99, 65520, 65536, 2**-14, 2**-24, 2**-25, 3 * 2**-26, 3 * 2**-25, 1 + 2**-11, 1 + 3 * 2**-11]
    for dtype in (torch.float16, torch.bfloat16):
        for multiplier in [*multipliers, *(value / 128 for value in exact)]:
            found = compiled.decode(block, Codec.INT8, out=torch.empty(1, dtype=dtype), multiplier=multiplier)
            expected = codecs.decode(block, Codec.INT8, num_elements=1, dtype=dtype, multiplier=multiplier)
            assert torch.equal(found, expected), multiplier


def test_nothing_is_nothing(compiled):
    for rows in (0, 2):
        payload = compiled.encode(torch.zeros(rows, 0), Codec.INT4)
        assert payload.shape == (rows, 0)
        assert compiled.decode(payload, Codec.INT4, out=torch.empty(rows, 0)).shape == (rows, 0)
        error = torch.zeros(rows, 0, dtype=torch.uint8)
        assert [x.shape for x in compiled.loco_quantise(torch.zeros(rows, 0), error, Codec.INT4)] == [(rows, 0)] * 2
    assert compiled.decode_sum(payload, Codec.INT4, out=torch.empty(0)).shape == (0,)


def test_strided_gradients(compiled):
    x = torch.randn(300, 2).t()
    error = torch.zeros(2, Codec.INT8.encoded_bytes(300), dtype=torch.uint8)
    assert torch.equal(compiled.encode(x, Codec.INT4), codecs.encode(x, Codec.INT4))
    assert torch.equal(compiled.loco_quantise(x, error, Codec.INT4)[0], feedback.loco_quantise(x, error, Codec.INT4)[0])


def test_the_best_instruction_set_is_chosen(library):
    best = CpuKernels(library).isa
    flags = torch.backends.cpu.get_cpu_capability()
    assert best is {"AVX512": Isa.AVX512, "AVX2": Isa.AVX2}.get(flags, best)


def test_without_a_compiler_the_reference_works_and_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    kernels_cpu.find_kernels.cache_clear()
    try:
        x = torch.randn(2, 200)
        error = torch.zeros(2, Codec.INT8.encoded_bytes(200), dtype=torch.uint8)
        with caplog.at_level(logging.WARNING, logger="meshwright"):
            payload = kernels.encode(x, Codec.INT4)
            total = kernels.decode_sum(payload, Codec.INT4, out=torch.empty(200))
            each = kernels.decode(payload, Codec.INT4, out=torch.empty(2, 200))
            kernels.loco_quantise(x, error, Codec.INT4, new_error=error)
        assert torch.equal(payload, codecs.encode(x, Codec.INT4))
        assert torch.equal(total, codecs.decode_sum(payload, Codec.INT4, num_elements=200, dtype=torch.float32))
        assert torch.equal(each, codecs.decode(payload, Codec.INT4, num_elements=200, dtype=torch.float32))
        assert error.any()
        [line] = [record.getMessage() for record in caplog.records]
        assert "torch reference" in line and "no-such-compiler" in line
    finally:
        kernels_cpu.find_kernels.cache_clear()


def fake_compiler(folder, script):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def libraries():
    return list(build_cpu.cache_folder().glob("*.so"))


def test_the_library_is_built_once_and_again_when_damaged(library, monkeypatch, tmp_path, caplog):
    """With a compiler that copies what was built already."""
    log = tmp_path / "calls"
    script = f'while [ "$1" != -o ]; do shift; done; cp "{library._name}" "$2"; echo called >> "{log}"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        assert CpuKernels(build_cpu.open_library()).isa in Isa
    assert log.read_text().split() == ["called"]
    [built] = libraries()
    assert built.name.startswith("kernels_cpu-")
    # In another folder: a path that this process has loaded is not read again.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    build_cpu.cache_folder().mkdir(parents=True)
    damaged = build_cpu.cache_folder() / built.name
    damaged.write_bytes(built.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        build_cpu.open_library()
    assert "damaged" in caplog.text and log.read_text().split() == ["called"] * 2
    assert libraries() == [damaged]
    assert damaged.read_bytes() == built.read_bytes()


def test_one_of_the_ranks_builds(library, monkeypatch, tmp_path):
    log = tmp_path / "calls"
    script = f'while [ "$1" != -o ]; do shift; done; sleep 0.1; cp "{library._name}" "$2"; echo called >> "{log}"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(lambda _: build_cpu.open_library(), range(3)))
    assert {one._name for one in opened} == {str(path) for path in libraries()} and len(libraries()) == 1
    assert log.read_text().split() == ["called"]


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'what a source' >&2; exit 3"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(build_cpu.BuildError, match="ended with 3: what a source"):
        build_cpu.open_library()
    assert libraries() == []


def test_a_cache_that_cannot_be_written_is_done_without(library, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    script = f'while [ "$1" != -o ]; do shift; done; cp "{library._name}" "$2"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        assert CpuKernels(build_cpu.open_library()).isa in Isa
    assert "for this process alone" in caplog.text


def test_an_instruction_set_that_is_missing_is_refused(library):
    class Without:
        def __getitem__(self, name):
            return (lambda: name == "has_baseline") if name.startswith("has_") else library[name]

    with pytest.raises(RunError, match="avx2"):
        CpuKernels(Without(), Isa.AVX2)
    assert CpuKernels(Without()).isa is Isa.BASELINE
