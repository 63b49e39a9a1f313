"""The Triton kernels give the reference's bits: on a GPU where there is one, and anywhere by Triton's interpreter."""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.comm.compression import codecs
from meshwright.comm.compression.catalogue import GROUP, Codec
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
from tests.triton_compiler import compile_without_gpu
from tests.triton_interpreter import interpreted, needs_triton

LENGTHS = (1, 127, 128, 129, 1000, 4227)
CASES = covering_pairs(itertools.product(LENGTHS, QUANTISED, QUANTISED_DTYPES, (False, True)))


def on_a_cpu(rank, world_size, check, *args, **tiling):
    """`check(kernels, *args)`, with kernels that a CPU interprets, in programs of these sizes."""
    name = "meshwright.comm.kernels.triton_kernels"
    if name not in sys.modules:
        import meshwright.comm.compression.fsdp_compress  # noqa: F401

        assert name not in sys.modules, "only tensors of a GPU need Triton"
    kernels = interpreted(name)
    return check(kernels.TritonKernels(kernels.Tiling(**tiling)), *args)


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
    interpreter.run(on_a_cpu, check_codecs, length, codec, dtype, rotate)


@pytest.mark.parametrize(("length", "codec", "dtype", "rotate"), quick_and_slow(CASES, CASES[2::4]))
def test_interpreted_feedback_agrees_with_the_reference(interpreter, length, codec, dtype, rotate):
    interpreter.run(on_a_cpu, check_feedback, length, codec, dtype, rotate)


@pytest.mark.parametrize("tiling", [{"num_warps": 8, "elements": 16, "ranks": 1}, {"num_warps": 2, "ranks": 2}])
def test_interpreted_sizes_of_programs_change_no_bit(interpreter, tiling):
    """Sums of three ranks in more than one go, some with a rest."""
    interpreter.run(on_a_cpu, check_feedback, 4227, Codec.INT4, torch.bfloat16, False, **tiling)
    interpreter.run(on_a_cpu, check_requantising, 1000, Codec.INT4, Codec.INT8, True, **tiling)


@pytest.mark.parametrize(
    ("length", "inner", "codec", "rotate"), [(129, Codec.INT8, Codec.INT4, False), (1000, Codec.INT2, Codec.INT8, True)]
)
def test_interpreted_requantising_agrees_with_the_reference(interpreter, length, inner, codec, rotate):
    interpreter.run(on_a_cpu, check_requantising, length, inner, codec, rotate)


BUDGET = 0.85 * 132 * 4 * 32 * 1.98e9 / 4.17e12
"""Instructions of a thread per byte, 0.85 of what an H200 issues while a copy moves a byte: 132 multiprocessors, four
instructions of 32 threads a cycle at 1.98 GHz, 4.17 TB/s."""
NUM_RANKS = 8
BYTES = {
    "encode": 2 + 66 / 128,
    "loco": 2 + 2 * 130 / 128 + 66 / 128,
    "decode": 2 + NUM_RANKS * 66 / 128,
    "requantise": (NUM_RANKS + 2) * 130 / 128 + 66 / 128,
}
"""Read and written per element, in bfloat16 and 4 bits, as it is compiled below."""
STRIDES = ("num_elements", "rank_stride", "block_stride", "error_bytes", "payload_bytes")
NUMBERS = dict.fromkeys(("beta", "rest", "multiplier"), "fp32") | dict.fromkeys((*STRIDES, "num_groups", "one"), "i32")
POINTERS = dict.fromkeys(("x", "g", "out"), "*bf16")
BLOCKS = dict.fromkeys(("payload", "payloads", "error", "new_error"), "*u8")


def compiled(rank, world_size, cache, names, **known):
    """Programs for 4 bits, by name: the code for an H200, and the instructions that an element takes."""
    from meshwright.comm.kernels import triton_kernels

    tiling, found = triton_kernels.Tiling(), {}
    for name in names:
        program = getattr(triton_kernels, name)
        sizes = triton_kernels.tile_constants(tiling, program, 4, itemsize=2)
        given = {"NUM_RANKS": NUM_RANKS, "RANKS": tiling.ranks, "BITS": 4, "INNER_BITS": 8}
        given |= {"ROTATE": name != "decode"} | sizes | known
        code = compile_without_gpu(
            program, {arg: value for arg, value in given.items() if arg in program.arg_names},
            NUMBERS | POINTERS | BLOCKS, tiling.options, cache=cache, aligned=STRIDES,
        )  # fmt: skip
        elements = sizes["GROUPS"] * GROUP // (32 * tiling.num_warps)
        found[name] = code, code.instructions(trips=NUM_RANKS // tiling.ranks) / elements
    return found


@pytest.fixture(scope="module")
def compiler() -> Iterator[Gang]:
    """A process that does not interpret."""
    needs_triton()
    with Gang(1) as gang:
        yield gang


@pytest.mark.slow
def test_compiled_programs_round_as_pinned(compiler, tmp_path):
    """Without a GPU: what the compiler makes of them."""
    [found] = compiler.run(compiled, str(tmp_path), tuple(BYTES), timeout_s=120)
    for name, (code, _) in found.items():
        ptx = code.ptx
        assert ".ftz" not in ptx and "div.full" not in ptx and "div.approx" not in ptx
        assert ("div.rn.f32" in ptx) == (name != "decode")
        # Products that are added in one rounding are exact; a division has its own.
        assert ("fma.rn.f32" in ptx) == (name != "encode")
        assert_registers_suffice(code)


def assert_registers_suffice(code):
    """Only scales change their layout: the threads that pack a byte's codes have them."""
    assert all(re.fullmatch(r"\d+xi16", tensor) for tensor in code.changed_layouts())
    assert not code.spills()


def test_compiled_programs_move_16_bytes_at_a_time_and_take_less_time_than_their_bytes(compiler, tmp_path):
    """Without a GPU, and without rotations, which are for links that are slower than this."""
    names = ("encode", "loco", "decode")
    [found] = compiler.run(compiled, str(tmp_path), names, ROTATE=False, timeout_s=120)
    for name, (code, instructions) in found.items():
        assert_registers_suffice(code)
        assert f"{'st' if name == 'decode' else 'ld'}.global.v4.b32" in code.ptx
        assert "ld.global.b8" not in code.ptx, "codes are loaded as words"
        assert instructions < BUDGET * BYTES[name], f"{name}: {instructions:.1f} per element"
    # If the compiler knows the mask of a code, it takes two operations.
    [found] = compiler.run(compiled, str(tmp_path), ("decode",), ROTATE=False, one=1, timeout_s=120)
    assert found["decode"][1] > BUDGET * BYTES["decode"]


@pytest.mark.parametrize("check", [assert_smallest_scale_agrees, assert_any_layout_is_taken])
def test_interpreted_the_smallest_scale_and_any_layout_agree(interpreter, check):
    interpreter.run(on_a_cpu, check)


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
    interpreter.run(on_a_cpu, check_refusals)


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
