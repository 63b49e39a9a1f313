"""The Triton kernels give the reference's bits: on a GPU where there is one, and anywhere by Triton's interpreter."""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.comm.compression import codecs
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.codecs import QUANTISED_DTYPES
from meshwright.comm.kernels import dispatch
from meshwright.errors import InputError
from tests.comm.agree import (
    QUANTISED,
    assert_any_layout_is_taken,
    assert_codecs_agree,
    assert_feedback_agrees,
    assert_requantising_agrees,
    assert_smallest_scale_agrees,
    same,
)  # fmt: skip
from tests.comm.data import assorted
from tests.gangs.gang import Gang
from tests.helpers import covering_pairs, quick_and_slow
from tests.triton_interpreter import interpret_triton, needs_triton

LENGTHS = (1, 127, 128, 129, 1000, 4227)
CASES = covering_pairs(itertools.product(LENGTHS, QUANTISED, QUANTISED_DTYPES, (False, True)))


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Gang]:
    """A process of its own: Triton decides when it is imported whether it interprets, for good."""
    needs_triton()
    with Gang(1) as gang:
        yield gang


def interpreted(rank, world_size, check, *args):
    """`check(kernels, *args)`, with kernels that a CPU interprets."""
    if "meshwright.comm.kernels.triton_kernels" not in sys.modules:
        import meshwright.comm.compression.fsdp_compress  # noqa: F401

        assert "meshwright.comm.kernels.triton_kernels" not in sys.modules, "only tensors of a GPU need Triton"
        interpret_triton()
    from meshwright.comm.kernels.triton_kernels import TritonKernels

    torch.set_num_threads(1)
    return check(TritonKernels(), *args)


def test_one_file_imports_triton():
    """That which is imported when the first tensor of a GPU comes."""
    uses = re.compile(r"^\s*(import|from) triton\b", re.MULTILINE)
    files = Path(dispatch.__file__).parents[1].rglob("*.py")
    assert [file.name for file in files if uses.search(file.read_text("utf-8"))] == ["triton_kernels.py"]


def check_codecs(kernels, length, codec, dtype, rotate, device="cpu"):
    x = assorted((1 + rotate, length), dtype, seed=length)
    assert_codecs_agree(kernels, x, codec, rotate=rotate, multipliers=(1 / 3,), device=device)


def check_feedback(kernels, length, codec, dtype, rotate, device="cpu"):
    steps = [assorted((1 + rotate, length), dtype, seed=length + step) for step in range(2)]
    assert_feedback_agrees(kernels, steps, codec, beta=0.5 if rotate else codecs.BETA, device=device)


def check_requantising(kernels, length, inner, codec, rotate, device="cpu"):
    x = assorted((3, 2, length), torch.float32, seed=length)
    error = torch.zeros(2, Codec.INT8.encoded_bytes(length), dtype=torch.uint8)
    error = codecs.loco_quantise(x[0], error, codec)[1]
    assert_requantising_agrees(kernels, x, inner, error, codec, rotate=rotate, device=device)


@pytest.mark.parametrize(("length", "codec", "dtype", "rotate"), quick_and_slow(CASES, CASES[::4]))
def test_interpreted_codecs_agree_with_the_reference(interpreter, length, codec, dtype, rotate):
    interpreter.run(interpreted, check_codecs, length, codec, dtype, rotate)


@pytest.mark.parametrize(("length", "codec", "dtype", "rotate"), quick_and_slow(CASES, CASES[2::4]))
def test_interpreted_feedback_agrees_with_the_reference(interpreter, length, codec, dtype, rotate):
    interpreter.run(interpreted, check_feedback, length, codec, dtype, rotate)


@pytest.mark.parametrize(
    ("length", "inner", "codec", "rotate"), [(129, Codec.INT8, Codec.INT4, False), (1000, Codec.INT2, Codec.INT8, True)]
)
def test_interpreted_requantising_agrees_with_the_reference(interpreter, length, inner, codec, rotate):
    interpreter.run(interpreted, check_requantising, length, inner, codec, rotate)


def compiled_without_a_gpu(rank, world_size, cache):
    """The machine code, by kernel for 4 bits, for an H200; and what the intermediate one says of memory."""
    os.environ["TRITON_CACHE_DIR"] = cache
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from meshwright.comm.kernels import triton_kernels

    numbers = {"multiplier": "fp32", "beta": "fp32", "rest": "fp32"}
    numbers |= dict.fromkeys(("num_elements", "num_groups", "rank_stride", "block_stride"), "i32")
    found = {}
    for name in ("encode", "loco", "decode", "requantise"):
        program = getattr(triton_kernels, name)
        tiles = triton_kernels._tiles(torch.empty(1, 1), 4, itemsize=2)
        given = {"NUM_RANKS": 8, "BITS": 4, "INNER_BITS": 8, "ROTATE": name != "decode"}
        given |= {"GROUPS": tiles.groups, "WIDTH": tiles.width}
        constants = {(i,): given[arg] for i, arg in enumerate(program.arg_names) if arg in given}
        types = numbers | dict.fromkeys(("x", "g", "out"), "*bf16") | dict.fromkeys(given, "constexpr")
        signature = {arg: types.get(arg, "*u8") for arg in program.arg_names}
        whole = [i for i, arg in enumerate(program.arg_names) if signature[arg][0] == "*" or arg in STRIDES]
        aligned = {(i,): [["tt.divisibility", 16]] for i in whole}
        source = ASTSource(program, signature=signature, constexprs=constants, attrs=aligned)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=triton_kernels.OPTIONS)
        found[name] = code.asm["ptx"], code.asm["sass"], code.asm["ttgir"]
    return found


STRIDES = ("num_elements", "rank_stride", "block_stride")


@pytest.mark.slow
def test_compiled_programs_round_as_pinned_and_move_16_bytes_at_a_time(tmp_path):
    """Without a GPU: what the compiler makes of them."""
    needs_triton()
    with Gang(1) as gang:
        [found] = gang.run(compiled_without_a_gpu, str(tmp_path), timeout_s=120)
    for name, (ptx, sass, layouts) in found.items():
        assert ".ftz" not in ptx and "div.full" not in ptx and "div.approx" not in ptx
        assert ("div.rn.f32" in ptx) == (name != "decode")
        # The product that `loco` adds in one rounding is exact; a division has its own.
        assert ("fma.rn.f32" in ptx) == (name in ("loco", "requantise"))
        assert name != "decode" or "FFMA" not in sass
        # Only scales change their layout, and elements go in and out in the widest loads and stores there are.
        changed = [line for line in layouts.splitlines() if "convert_layout" in line]
        assert all("xi16" in line for line in changed), changed
        if name != "requantise":
            assert f"{'st' if name == 'decode' else 'ld'}.global.v4.b32" in ptx


@pytest.mark.parametrize("check", [assert_smallest_scale_agrees, assert_any_layout_is_taken])
def test_interpreted_the_smallest_scale_and_any_layout_agree(interpreter, check):
    interpreter.run(interpreted, check)


def check_refusals(kernels):
    x = torch.randn(2, 130)
    payload, error = codecs.encode(x, Codec.INT4), torch.zeros(1, 272, dtype=torch.uint8)
    with pytest.raises(InputError, match="not a block of 129 elements"):
        kernels.decode(payload[:, 16:], Codec.INT4, out=torch.empty(2, 129))
    with pytest.raises(InputError, match="float64"):
        kernels.encode(x.double(), Codec.INT4)
    with pytest.raises(InputError, match="an error of shape"):
        kernels.loco_quantise(x, error, Codec.INT4)
    with pytest.raises(InputError, match="an error of shape"):
        kernels.requantise(payload.unsqueeze(0), Codec.INT4, error=error, codec=Codec.INT4, num_elements=130)


def test_interpreted_what_does_not_fit_is_refused(interpreter):
    interpreter.run(interpreted, check_refusals)


def test_without_triton_a_gpu_has_the_reference_and_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "meshwright.comm.kernels.triton_kernels", raising=False)
    dispatch.find_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="meshwright"):
            assert [dispatch._kernels(SimpleNamespace(is_cuda=True), Codec.INT4) for _ in range(2)] == [None] * 2
        [line] = [record.getMessage() for record in caplog.records]
        assert "torch reference" in line and "triton" in line
    finally:
        dispatch.find_triton.cache_clear()


def test_tensors_of_a_gpu_go_to_triton(monkeypatch):
    kernels = SimpleNamespace(requantise=lambda x, *args, **options: "there")
    monkeypatch.setattr(dispatch, "find_triton", lambda: kernels)
    tensor = SimpleNamespace(is_cuda=True)
    assert dispatch._kernels(tensor, Codec.EXACT) is None
    options = {"error": tensor, "codec": Codec.INT4, "num_elements": 1}
    assert dispatch.requantise(tensor, Codec.INT8, **options) == "there"


@pytest.mark.gpu
@pytest.mark.parametrize("length", [*LENGTHS, 3_000_000, 3_000_001])
@pytest.mark.parametrize("codec", QUANTISED)
@pytest.mark.parametrize("rotate", [False, True])
def test_kernels_on_a_gpu_agree_with_the_reference(length, codec, rotate):
    needs_triton()
    from meshwright.comm.kernels.triton_kernels import TritonKernels

    found = TritonKernels()
    for dtype in QUANTISED_DTYPES:
        check_codecs(found, length, codec, dtype, rotate, device="cuda")
        check_feedback(found, length, codec, dtype, rotate, device="cuda")
    for inner in QUANTISED:
        check_requantising(found, length, inner, codec, rotate, device="cuda")


@pytest.mark.gpu
def test_blocks_beyond_2_to_the_31_bytes_are_found():
    needs_triton()
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs a GPU with 40 GB of memory")
    length, ends = 1_200_000_064, 128 * 64
    x = torch.zeros(2, length, dtype=torch.bfloat16, device="cuda")
    x[:, -ends:] = torch.randn(2, ends, device="cuda")
    payload = dispatch.encode(x, Codec.INT8)
    assert payload.numel() > 2**31
    last = codecs.encode(x[:, -ends - 64 :].cpu(), Codec.INT8)
    start = (length - 64) // 128 * 128 - ends
    assert same(payload[:, start:][:, : ends + 128], last[:, : ends + 128])
    decoded = dispatch.decode(payload, Codec.INT8, out=torch.empty_like(x))
    expected = codecs.decode(last, Codec.INT8, num_elements=ends + 64, dtype=torch.bfloat16)
    assert same(decoded[:, -ends - 64 :], expected)
