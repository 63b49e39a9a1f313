"""Gathering rows and summing them are transposes, and equal index_select and index_add in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.nn.experts.row_map import RowMap


@st.composite
def maps(draw):
    """Unsorted and repeated indices, source rows without any, and possibly no rows at all."""
    num_sources = draw(st.integers(1, 9))
    index = draw(st.lists(st.integers(0, num_sources - 1), max_size=24))
    return RowMap(torch.tensor(index, dtype=torch.int64), num_sources)


def random_rows(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def summed(rows_mh, rows):
    """The sums by index_add, in float64."""
    out = torch.zeros(rows.num_sources, *rows_mh.shape[1:], dtype=torch.float64)
    return out.index_add(0, rows.index_m, rows_mh.double())


@given(maps(), st.integers(1, 5))
def test_sums_are_those_of_index_add(rows, width):
    x_nh, rows_mh = random_rows(rows.num_sources, width), random_rows(len(rows.index_m), width)
    assert torch.equal(rows.gather(x_nh), x_nh[rows.index_m])
    torch.testing.assert_close(rows.sum(rows_mh), summed(rows_mh, rows), rtol=0, atol=1e-13)
    without = rows.index_m.bincount(minlength=rows.num_sources) == 0
    assert (rows.sum(rows_mh)[without] == 0).all()


@given(maps(), st.integers(1, 4))
def test_each_is_the_transpose_of_the_other(rows, width):
    x_nh, rows_mh = random_rows(rows.num_sources, width), random_rows(len(rows.index_m), width)
    one, other = (rows.gather(x_nh) * rows_mh).sum(), (x_nh * rows.sum(rows_mh)).sum()
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("index", [[2, 0, 2, 1, 2], [3, 3], []])
def test_gradients_of_first_and_second_order(index):
    rows = RowMap(torch.tensor(index, dtype=torch.int64), 4)
    for call, size in ((rows.gather, 4), (rows.sum, len(index))):
        x = random_rows(size, 3).requires_grad_()
        assert torch.autograd.gradcheck(call, x)
        if index:
            assert torch.autograd.gradgradcheck(lambda x, call=call: call(x).square(), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(rows=maps(), width=st.sampled_from([1, 3, 8, 64]))
def test_narrow_sums_are_float32_sums_rounded_once(dtype, rows, width):
    """To a nearest number: where two are as near, kernels differ in which they take."""
    rows_mh = random_rows(len(rows.index_m), width, dtype=dtype)
    found, wide = rows.sum(rows_mh), rows.sum(rows_mh.float())
    assert found.dtype == dtype
    errors = [(narrow.double() - wide.double()).abs() for narrow in (found, wide.to(dtype))]
    assert torch.equal(*errors)


def test_a_narrow_sum_of_many_rows_does_not_lose_them():
    """256 + 1 is 256 in bfloat16."""
    rows_mh = torch.cat((torch.full((1, 8), 256.0), torch.ones(512, 8))).to(torch.bfloat16)
    assert (RowMap(torch.zeros(513, dtype=torch.int64), 1).sum(rows_mh) == 768).all()


def test_sums_run_in_the_order_of_the_rows():
    values = torch.tensor([1e8, 1.0, -1e8, 1.0])
    index, expected = torch.tensor([1, 0, 1, 1, 1, 0]), ((values[0] + values[1]) + values[2]) + values[3]
    rows_m1 = torch.tensor([values[0], 5.0, values[1], values[2], values[3], 6.0])[:, None]
    assert RowMap(index, 2).sum(rows_m1).flatten().tolist() == [11.0, expected.item()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    rows = RowMap(torch.randint(0, 700, (5000,)), 700)
    rows_mh, found = torch.randn(5000, 96).to(dtype), []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            found.append(rows.sum(rows_mh))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_strided_rows_and_an_expanded_gradient():
    rows, x_mh = RowMap(torch.tensor([1, 0, 1]), 2), torch.randn(4, 3, dtype=torch.float64).T.requires_grad_()
    torch.testing.assert_close(rows.sum(x_mh), summed(x_mh, rows))
    (gradient,) = torch.autograd.grad(rows.sum(x_mh).sum(), x_mh)
    assert torch.equal(gradient, torch.ones(3, 4, dtype=torch.float64))
    y_nh = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(rows.gather(y_nh).sum(), y_nh)
    assert gradient[:, 0].tolist() == [1.0, 2.0]
