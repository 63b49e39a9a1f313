"""The Triton program's sums of rows: the bits of sums in order, on a GPU where there is one, and by the interpreter."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from meshwright.nn.experts import grouped_linear
from meshwright.nn.experts.grouped_linear import RowMap, sum_bags
from tests.gangs.gang import Gang
from tests.triton_compiler import compile_without_gpu
from tests.triton_interpreter import interpreted, needs_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CASES = ((1, 1, 1), (7, 3, 5), (40, 9, 64), (33, 8, 1100), (12, 30, 513))
"""Rows, source rows, width."""


def on_a_cpu(rank, world_size, check, *args):
    """`check(sum_rows, *args)`, with a program that a CPU interprets."""
    return check(interpreted("meshwright.nn.experts.triton_row_sums").sum_rows, *args)


def random_rows(num_rows, num_sources, width, dtype):
    """Rows of all magnitudes, some of them not finite, and a map that leaves out some source rows."""
    random = torch.Generator().manual_seed(num_rows * width)
    rows = RowMap(torch.randint(num_sources, (num_rows,), generator=random), num_sources)
    rows_mh = torch.randn(num_rows, width, generator=random, dtype=torch.float64)
    rows_mh *= 10.0 ** torch.randint(-3, 3, rows_mh.shape, generator=random)
    rows_mh[0, -1], rows_mh[-1, 0] = float("inf"), -0.0
    return rows, rows_mh.to(dtype)


def sums_in_order(rows, rows_mh):
    """One addition after another, in at least float32, rounded once."""
    wide = torch.promote_types(rows_mh.dtype, torch.float32)
    total = torch.zeros(rows.num_sources, rows_mh.shape[1], dtype=wide)
    for source, row in zip(rows.index_m.tolist(), rows_mh.to(wide), strict=True):
        total[source] += row
    return total.to(rows_mh.dtype)


def same(found, expected):
    found, expected = found.cpu(), expected.cpu()
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def check_bits(sum_rows, case, device="cpu"):
    from meshwright.nn.experts.triton_row_sums import Tiling

    for dtype, tiling in zip(DTYPES, (None, Tiling(1, 2), Tiling(2, 8), Tiling(8, 1)), strict=True):
        rows, rows_mh = random_rows(*case, dtype)
        there = rows_mh.to(device), *(x.to(device) for x in rows.members)
        found = sum_rows(*there, tiling)
        assert same(found, sums_in_order(rows, rows_mh))
        if dtype.itemsize >= 4:
            assert same(found, sum_bags(rows_mh, *rows.members))


@pytest.mark.parametrize("case", CASES)
def test_interpreted_sums_have_the_bits_of_sums_in_order(interpreter, case):
    interpreter.run(on_a_cpu, check_bits, case)


def check_layouts(sum_rows):
    rows, rows_mh = random_rows(9, 4, 6, torch.float32)
    strided = rows_mh.t().contiguous().t()
    assert same(sum_rows(strided, *rows.members), sums_in_order(rows, rows_mh))
    assert sum_rows(rows_mh[:, :0], *rows.members).shape == (4, 0)
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    assert sum_rows(rows_mh, *nothing).shape == (0, 6)


def test_interpreted_any_strides_are_taken_and_nothing_gives_nothing(interpreter):
    interpreter.run(on_a_cpu, check_layouts)


def compiled(rank, world_size, cache, width):
    """The code for an H100, by dtype."""
    from meshwright.nn.experts import triton_row_sums

    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        constants = triton_row_sums.Tiling().constants(width, dtype.itemsize)
        options = {"num_warps": constants.pop("num_warps")}
        name = {torch.bfloat16: "*bf16", torch.float64: "*fp64"}[dtype]
        types = {"rows": name, "out": name, "order": "*i64", "offsets": "*i64", "width": "i32"}
        aligned = ("width",) if width % 16 == 0 else ()
        program = triton_row_sums.sum_rows_program
        found[dtype] = compile_without_gpu(program, constants, types, options, cache=cache, aligned=aligned)
    return found


def test_compiled_sums_take_one_pass_16_bytes_at_a_time(tmp_path):
    """Without a GPU: what the compiler makes of it. Unaligned rows show that the width of loads is seen."""
    needs_triton()
    with Gang(1) as gang:
        [found] = gang.run(compiled, str(tmp_path), 2048, timeout_s=120)
        [unaligned] = gang.run(compiled, str(tmp_path), 2047, timeout_s=120)
    for dtype, code in found.items():
        # Four rows at a time, and one sum; indices and offsets apart.
        assert code.sass.count("LDG.E.128") == 4 and code.sass.count("STG.E.128") == code.sass.count("STG") == 1
        assert not code.spills() and not code.changed_layouts()
        assert "LDG.E.128" not in unaligned[dtype].sass


def test_tensors_of_a_gpu_go_to_triton(monkeypatch):
    monkeypatch.setattr(grouped_linear, "find_triton", lambda: lambda rows_mh, order_m, offsets: (order_m, offsets))
    rows = RowMap(torch.tensor([1, 0, 1]), 2)
    order_m, offsets = grouped_linear._Sum.forward(SimpleNamespace(), SimpleNamespace(is_cuda=True, shape=(3, 5)), rows)
    assert order_m.tolist() == [1, 0, 2] and offsets.tolist() == [0, 1, 3]


def test_without_triton_a_gpu_has_bags_and_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "meshwright.nn.experts.triton_row_sums", raising=False)
    grouped_linear.find_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="meshwright"):
            assert [grouped_linear.find_triton() for _ in range(2)] == [None] * 2
        [line] = [record.getMessage() for record in caplog.records]
        assert "embedding_bag" in line and "triton" in line
    finally:
        grouped_linear.find_triton.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (16_384, 4096, 2048), (5000, 2, 40_000)])
def test_sums_on_a_gpu_have_the_bits_of_sums_in_order(case):
    needs_triton()
    from meshwright.nn.experts.triton_row_sums import sum_rows

    check_bits(sum_rows, case, device="cuda")
    rows, rows_mh = random_rows(*case, torch.bfloat16)
    there = RowMap(rows.index_m.cuda(), rows.num_sources)
    assert same(there.sum(rows_mh.cuda()), sums_in_order(rows, rows_mh))
