"""The Triton program gives the torch operations' bits: on a GPU where there is one, and anywhere by the interpreter."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from meshwright.nn.dropout_add import eager
from meshwright.nn.dropout_add import module as operator
from meshwright.nn.dropout_add.eager import DropoutKey, drop_threshold, keep_mask
from tests.gangs.gang import Gang
from tests.nn.dropout_add.cases import DTYPES, drop, inputs, python_mask, python_philox
from tests.triton_compiler import compile_without_gpu
from tests.triton_interpreter import interpreted, needs_triton

SHAPES = ((1, 1), (5, 7), (3, 513), (33, 64))


def on_a_cpu(rank, world_size, check, *args):
    """`check(launch, *args)`, with a program that a CPU interprets."""
    return check(interpreted("meshwright.nn.dropout_add.triton_launch").launch, *args)


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def assert_agrees(launch, shape, dtypes, *, p, key, first_column, device="cpu"):
    """All bits, with the residual and without one, of numbers of all magnitudes."""
    x, residual, rows = (tensor.detach() for tensor in inputs(*shape, seed=sum(shape)))
    x = (x * 10.0 ** torch.randint(-8, 4, shape)).to(dtypes[0])
    x.view(-1)[0], residual.view(-1)[-1] = float("nan"), -0.0
    for given in (residual.to(dtypes[1]), None):
        out_dtype = x.dtype if given is None else torch.promote_types(*dtypes)
        found = []
        for run, where in ((launch, device), (eager.dropout_add, "cpu")):
            out = torch.full(shape, 7.0, dtype=out_dtype, device=where)
            tensors = x.to(where), None if given is None else given.to(where), rows.to(where), key.words.tolist()
            run(*tensors, threshold=drop_threshold(p), first_column=first_column, out=out)
            found.append(out.cpu())
        assert same(*(torch.where(out.isnan(), 1.5, out) for out in found))


def check_agrees(launch, shape, device="cpu"):
    for number, dtype in enumerate(DTYPES):
        other = DTYPES[(number + sum(shape)) % 4]
        key = DropoutKey((0, 1, 2**63 + 3, 2**64 - 1)[number], (1, 2**32 - 1, 0, 2**31)[number])
        for first_column, p in ((0, 0.1), (4, 0.9), (5 + number, 0.5)):
            assert_agrees(launch, shape, (dtype, other), p=p, key=key, first_column=first_column, device=device)


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_interpreted_results_are_the_torch_operations(interpreter, shape):
    interpreter.run(on_a_cpu, check_agrees, shape)


def check_mask(launch):
    rows, key = [0, 2**32 - 1, 2**32, 2**63 - 1], DropoutKey(2**63 + 2**31, 2**31)
    for first in (0, 3):
        out = torch.empty(4, 9)
        sizes = {"threshold": 2**31, "first_column": first, "out": out}
        launch(torch.ones(4, 9), None, torch.tensor(rows), key.words.tolist(), **sizes)
        assert torch.equal(out != 0, python_mask(key, rows, range(first, first + 9), 0.5))
    # A word equal to the threshold keeps, the next smaller one drops; as an integer with a sign it may be negative.
    word, out = max(python_philox((7, 0, 0, 1), (3, 0))), torch.empty(1, 4)
    for threshold, num_kept in ((word, 1), (word + 1, 0)):
        launch(torch.ones(1, 4), None, torch.tensor([7]), [3, 1], threshold=threshold, first_column=0, out=out)
        assert (out != 0).sum() == num_kept


def test_interpreted_masks_are_the_papers(interpreter):
    interpreter.run(on_a_cpu, check_mask)


def check_layouts(launch):
    x, residual, rows = (tensor.detach() for tensor in inputs(6, 8))
    expected, sizes = torch.empty(6, 8), {"threshold": 2**31, "first_column": 0}
    eager.dropout_add(x, residual, rows, [1, 2], out=expected, **sizes)
    strided = x.t().contiguous().t(), torch.stack([residual, x], -1)[..., 0], rows.repeat_interleave(2)[::2]
    out = torch.empty(6, 8)
    launch(*strided, [1, 2], out=out, **sizes)
    assert torch.equal(out, expected)
    for shape in ((0, 8), (6, 0)):
        launch(torch.empty(shape), None, rows[: shape[0]], [1, 2], out=torch.empty(shape), **sizes)


def test_interpreted_any_strides_are_taken(interpreter):
    interpreter.run(on_a_cpu, check_layouts)


def compiled(rank, world_size, cache):
    """The code for an H100, by dtype."""
    from meshwright.nn.dropout_add import triton_launch, triton_program

    program, found = triton_program.dropout_add, {}
    numbers = dict.fromkeys(program.arg_names, "i32") | {"rows": "*i64", "seed": "u64", "site": "i64"}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)):
        constants = triton_launch.tile_constants(4096, dtype, 2**32 - 5) | {"SHIFT": 0, "HAS_RESIDUAL": True}
        types = numbers | dict.fromkeys(("x", "residual", "out"), f"*{name}")
        found[name] = compile_without_gpu(
            program, constants, types, triton_launch.OPTIONS, cache=cache, aligned=("num_columns",)
        )  # fmt: skip
    return found


@pytest.mark.slow
def test_compiled_programs_round_as_pinned_and_move_16_bytes_at_a_time(tmp_path):
    """Without a GPU: what the compiler makes of them."""
    needs_triton()
    with Gang(1) as gang:
        [found] = gang.run(compiled, str(tmp_path), timeout_s=120)
    for name, code in found.items():
        assert "fma.rn" not in code.ptx and ".ftz" not in code.ptx
        wide = "st.global.v2.b64" if name == "fp64" else "st.global.v4.b32"
        assert wide in code.ptx, name
        # Words of a group are interleaved in the registers of the thread that has their elements.
        assert name == "fp64" or not code.changed_layouts()
        # 4 groups of 4 elements a thread, 20 products each, and some less for words that a row's groups share.
        assert name == "fp64" or 60 < code.ptx.count("mul.hi.u32") <= 80


def test_tensors_of_a_cpu_dont_import_triton(gang):
    gang(1).run(drops_without_triton)


def drops_without_triton(rank, world_size):
    drop(*inputs(2, 3, 4)).sum().backward()
    assert "meshwright.nn.dropout_add.triton_program" not in sys.modules


def test_without_triton_a_gpu_has_the_torch_operations_and_the_log_says_so_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("triton_launch", "triton_program"):
        monkeypatch.delitem(sys.modules, f"meshwright.nn.dropout_add.{name}", raising=False)
    operator.find_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="meshwright"):
            assert [operator.find_triton() for _ in range(2)] == [None] * 2
        [line] = [record.getMessage() for record in caplog.records]
        assert "torch operations" in line and "triton" in line
    finally:
        operator.find_triton.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (2, 512), (1, 2050), (4096, 4096), (70_000, 12), (3, 2**20 + 1)])
def test_results_on_a_gpu_are_the_torch_operations_on_a_cpu(shape):
    needs_triton()
    from meshwright.nn.dropout_add.triton_launch import launch

    check_agrees(launch, shape, device="cuda")


@pytest.mark.gpu
def test_the_operator_on_a_gpu_has_the_mask_of_a_cpu_forward_and_backward():
    needs_triton()
    x, residual, rows = inputs(4, 64, 256, dtype=torch.bfloat16)
    expected = drop(x, residual, rows)
    expected.float().sum().backward()
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in (x, residual)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = drop(*on_gpu, rows.cuda(non_blocking=True))
        found.float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(found.cpu(), expected) and same(on_gpu[0].grad.cpu(), x.grad)
    key = DropoutKey(1, 2)
    on_both = [keep_mask(key, tensor, 256, 0.5).cpu() for tensor in (rows, rows.cuda())]
    assert torch.equal(*on_both)
