"""Rows of experts: products against one per expert, unwritten memory, and sums against index_add in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.nn.experts import grouped_linear as module
from meshwright.nn.experts.grouped_linear import RowGroups, RowMap, fits_grouped_mm, grouped_linear, narrow
from tests.nn.experts.uninitialized import poisoned_memory

WIDTHS = {"aligned": (16, 24), "not aligned": (5, 7)}
"""Of inputs and outputs; the second ones don't fit grouped_mm."""
TOLERANCE = {torch.bfloat16: 0.04, torch.float16: 0.004, torch.float32: 1e-5, torch.float64: 1e-12}
EDGES = [[0, 0, 0], [0, 5, 3], [5, 0, 3], [5, 3, 0], [0, 7, 0], [4]]

sizes = st.lists(st.one_of(st.just(0), st.integers(0, 9)), min_size=1, max_size=6)
dtypes = st.sampled_from(list(TOLERANCE))


def make(sizes, widths, dtype):
    """Rows, matrices and the outputs' gradient."""
    num_rows, (width, out_width) = sum(sizes), widths
    x_rd, gradient_rf = torch.randn(num_rows, width).to(dtype), torch.randn(num_rows, out_width).to(dtype)
    return x_rd, torch.randn(len(sizes), out_width, width).to(dtype), gradient_rf


def reference(sizes, x_rd, weight_efd, gradient_rf):
    """Outputs and both gradients, one expert after another, in float64."""
    x_rd, weight_efd = (x.detach().double().requires_grad_() for x in (x_rd, weight_efd))
    parts = [
        torch.einsum("rd,fd->rf", part, weight) for part, weight in zip(x_rd.split(sizes), weight_efd, strict=True)
    ]
    out_rf = torch.cat(parts)
    return [out_rf.detach(), *torch.autograd.grad(out_rf, (x_rd, weight_efd), gradient_rf.double())]


def computed(sizes, x_rd, weight_efd, gradient_rf, *, on_host=True):
    """Outputs and both gradients of `grouped_linear`."""
    x_rd, weight_efd = x_rd.clone().requires_grad_(), weight_efd.clone().requires_grad_()
    groups = RowGroups(torch.tensor(sizes), list(sizes) if on_host else None)
    out_rf = grouped_linear(x_rd, weight_efd, groups)
    return [out_rf.detach(), *torch.autograd.grad(out_rf, (x_rd, weight_efd), gradient_rf)]


def check(sizes, widths, dtype):
    given_tensors = make(sizes, widths, dtype)
    expected = reference(sizes, *given_tensors)
    found = computed(sizes, *given_tensors)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other, rtol=0, atol=TOLERANCE[dtype] * scale)
    without = torch.tensor(sizes) == 0
    assert (found[2][without] == 0).all(), "an expert without rows has a gradient of zeros"


@given(sizes, st.sampled_from(list(WIDTHS)), dtypes)
def test_outputs_and_gradients_are_those_of_each_expert_alone(sizes, widths, dtype):
    check(sizes, WIDTHS[widths], dtype)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_groups_without_rows(edge, widths):
    for dtype in TOLERANCE:
        check(edge, WIDTHS[widths], dtype)


@settings(max_examples=20)
@given(sizes, st.sampled_from([torch.bfloat16, torch.float32]))
def test_the_loop_computes_the_same(sizes, dtype):
    x_rd, weight_efd, gradient_rf = make(sizes, WIDTHS["aligned"], dtype)
    groups = RowGroups(torch.tensor(sizes))
    assert fits_grouped_mm(x_rd, weight_efd.shape[1])
    pairs = [
        (module.multiply(x_rd, weight_efd.mT, groups), module.multiply_loop(x_rd, weight_efd.mT, groups)),
        (module.multiply(gradient_rf, weight_efd, groups), module.multiply_loop(gradient_rf, weight_efd, groups)),
        (module.weight_gradient(gradient_rf, x_rd, groups), module.weight_gradient_loop(gradient_rf, x_rd, groups)),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE[dtype] * 10)


@pytest.mark.parametrize(("width", "out_width", "dtype", "fits"), [
    (8, 8, torch.bfloat16, True), (8, 4, torch.bfloat16, False), (4, 8, torch.bfloat16, False),
    (4, 4, torch.float32, True), (2, 4, torch.float32, False), (8, 8, torch.float64, False),
])  # fmt: skip
def test_what_fits_grouped_mm(width, out_width, dtype, fits):
    assert fits_grouped_mm(torch.empty(3, width, dtype=dtype), out_width) is fits


def test_grouped_mm_is_used_where_it_fits(monkeypatch):
    calls = []
    real = torch.nn.functional.grouped_mm
    monkeypatch.setattr(module.F, "grouped_mm", lambda *args, **named: calls.append(1) or real(*args, **named))
    for dtype, num_calls in ((torch.bfloat16, 3), (torch.float64, 0)):
        calls.clear()
        computed([2, 0, 3], *make([2, 0, 3], WIDTHS["aligned"], dtype))
        assert len(calls) == num_calls


def test_an_expanded_gradient_and_sizes_that_only_the_device_knows():
    given_tensors = make([2, 0, 3], WIDTHS["aligned"], torch.float32)
    expanded = torch.ones(1, 1).expand_as(given_tensors[2])
    expected = reference([2, 0, 3], *given_tensors[:2], expanded)
    found = computed([2, 0, 3], *given_tensors[:2], expanded, on_host=False)
    torch.testing.assert_close([x.double() for x in found], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_needs_no_gradient_gets_none(frozen):
    x_rd, weight_efd, gradient_rf = make([2, 3], WIDTHS["aligned"], torch.float32)
    expected = reference([2, 3], x_rd, weight_efd, gradient_rf)
    trained = weight_efd if frozen == "x" else x_rd
    trained.requires_grad_()
    grouped_linear(x_rd, weight_efd, RowGroups(torch.tensor([2, 3]))).backward(gradient_rf)
    torch.testing.assert_close(trained.grad.double(), expected[2 if frozen == "x" else 1], rtol=0, atol=1e-4)
    assert (x_rd if frozen == "x" else weight_efd).grad is None


@settings(max_examples=20)
@given(sizes, st.sampled_from(list(WIDTHS)), dtypes)
def test_no_unwritten_memory_is_read(sizes, widths, dtype):
    given_tensors = make(sizes, WIDTHS[widths], dtype)
    expected = computed(sizes, *given_tensors)
    with poisoned_memory():
        found = computed(sizes, *given_tensors)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not any(one.isnan().any() for one in found)


@pytest.mark.parametrize(("num_values", "dtype"), [
    (2**15 - 1, torch.int16), (2**15, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int64),
])  # fmt: skip
def test_narrow_integers_hold_all_values(num_values, dtype):
    index = torch.tensor([num_values - 1, 0, num_values // 2])
    found = narrow(index, num_values)
    assert found.dtype == dtype and torch.equal(found.long(), index)


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
