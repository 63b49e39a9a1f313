"""Head and loss by chunks: the same loss and gradients as of all logits, in every dtype, without the logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import LayoutError
from meshwright.features.head_loss.apply import Columns, LossHead, cross_entropy_
from meshwright.features.head_loss.plan import LossChunks, Step
from meshwright.features.head_loss.run import FEATURE
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright_bench.private import LiveBytes
from tests.features.head_loss.models import Scaled
from tests.gangs.gang import GangPool

IGNORED = -100


def made(
    dtype: torch.dtype, *, chunk: int = 7, tokens: int = 12, after: tuple[Step, ...] = ()
) -> tuple[LossHead, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    head = LossHead(16, 50, bias=True, chunk=chunk, after=after).to(dtype)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw).to(dtype)
    x = torch.randn(2, tokens, 16, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(50, (2, tokens), generator=draw)
    targets[0, :3] = IGNORED
    return head, x, targets


def of_all_logits(head: LossHead, x: Tensor, targets: Tensor) -> Tensor:
    logits = head(x).flatten(0, 1)
    logits = logits.float() if logits.dtype is torch.bfloat16 else logits
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("chunk", "tokens"), [(7, 12), (5, 5), (64, 12), (1, 3)])
def test_loss_and_gradients_are_those_of_all_logits(dtype: torch.dtype, limit: float, chunk: int, tokens: int) -> None:
    head, x, targets = made(dtype, chunk=chunk, tokens=tokens)
    with head.computing_loss_of(targets):
        found = head(x)
    due = of_all_logits(head, x, targets)
    assert found.dim() == 0 and found.dtype == due.dtype
    torch.testing.assert_close(found, due, rtol=limit, atol=0.0)
    inputs = (x, *head.parameters())
    for one, right in zip(torch.autograd.grad(found / 7, inputs), torch.autograd.grad(due / 7, inputs), strict=True):
        assert float((one - right).norm() / right.norm()) <= limit and one.dtype == right.dtype


def test_gradients_of_chunks_are_summed_in_float32() -> None:
    """A sum of many rounded terms is as exact as one product."""
    head, x, targets = made(torch.bfloat16, chunk=1, tokens=200)
    wide = head.weight.detach().double().requires_grad_(), head.bias.detach().double().requires_grad_()
    exact = F.linear(x.detach().double(), *wide).flatten(0, 1)
    F.cross_entropy(exact, targets.flatten(), ignore_index=IGNORED, reduction="sum").backward()
    with head.computing_loss_of(targets):
        chunked = torch.autograd.grad(head(x), (head.weight, head.bias))
    at_once = torch.autograd.grad(of_all_logits(head, x, targets), (head.weight, head.bias))
    for found, plain, parameter in zip(chunked, at_once, wide, strict=True):
        errors = [float((one.double() - parameter.grad).norm()) for one in (found, plain)]
        assert errors[0] <= 1.1 * errors[1]


def test_one_chunk_lives_at_a_time() -> None:
    head = LossHead(1, 4096, chunk=8).to(torch.bfloat16)
    head.weight.requires_grad_(False)
    x, targets = torch.ones(1, 64, 1, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1, 64, dtype=torch.long)
    with head.computing_loss_of(targets), LiveBytes() as live:
        head(x)
    assert live.peak <= 1.1 * 8 * 4096 * (4 + 2), "logits in float32, and once more in bfloat16"


def test_what_needs_no_gradient_gets_none() -> None:
    head, x, targets = made(torch.float64)
    head.weight.requires_grad_(False)
    with head.computing_loss_of(targets):
        torch.autograd.backward(head(x))
        with torch.no_grad():
            validation = head(x)
    assert head.weight.grad is None and head.bias.grad is not None and x.grad is not None
    assert not validation.requires_grad and float(validation) == pytest.approx(of_all_logits(head, x, targets).item())


def columns_of_rank(rank: int, world_size: int) -> tuple[float, Tensor]:
    """One rank's columns of the loss and its gradient."""
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 5, 6, 11, IGNORED, 3, 7, 2, 8])
    own = logits.chunk(world_size, 1)[rank].clone()
    group = None if world_size == 1 else torch.distributed.group.WORLD
    return float(cross_entropy_(own, targets, Columns(rank * own.shape[1], group))), own


def test_columns_of_ranks_add_up(gang: GangPool) -> None:
    loss, gradient = columns_of_rank(0, 1)
    (first, a), (second, b) = gang(2).run(columns_of_rank)
    assert first == second == pytest.approx(loss, rel=1e-14)
    torch.testing.assert_close(torch.cat([a, b], 1), gradient, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "after",
    [
        (("div", (30.0,)), ("tanh", ()), ("mul", (30.0,))),
        (("mul", (0.5,)), ("sub", (1,)), ("sigmoid", ()), ("add", (2,)), ("div", (0.1,)), ("rsub", (1.0,))),
        (("clamp", (None, 3.0)), ("pow", (3,))),
        (("mul", (0.0625,)),),
    ],
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_operators_after_the_head_are_applied_with_their_derivative(
    dtype: torch.dtype, limit: float, after: tuple[Step, ...]
) -> None:
    head, x, targets = made(dtype, after=after)
    logits = head(x)
    for name, numbers in after:
        logits = getattr(torch.ops.aten, name)(logits, *numbers)
    due = F.cross_entropy(logits.flatten(0, 1).to(found_dtype(dtype)), targets.flatten(), reduction="sum")
    with head.computing_loss_of(targets):
        found = head(x)
    torch.testing.assert_close(found, due, rtol=limit, atol=0.0)
    inputs = (x, *head.parameters())
    for one, right in zip(torch.autograd.grad(found / 7, inputs), torch.autograd.grad(due / 7, inputs), strict=True):
        assert float((one - right).norm() / right.norm()) <= limit and one.dtype == right.dtype


def found_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a loss is computed in."""
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(("after", "tensors"), [((), 1), ((("mul", (2.0,)),), 1), ((("tanh", ()), ("mul", (2.0,))), 3)])
def test_a_chunk_has_at_most_a_derivative_beside_its_logits(after: tuple[Step, ...], tensors: int) -> None:
    head, targets = LossHead(1, 4096, chunk=16, after=after), torch.zeros(1, 64, dtype=torch.long)
    head.weight.requires_grad_(False)
    x = torch.ones(1, 64, 1, requires_grad=True)
    with head.computing_loss_of(targets), LiveBytes() as live:
        head(x)
    assert 1.0 <= live.peak / (tensors * 16 * 4096 * 4) <= 1.1


@pytest.mark.parametrize(
    ("head", "after", "says"),
    [
        (nn.Linear(4, 8), "softmax(-1)", "softmax is applied to what head returns"),
        (nn.Linear(4, 8), "no_operator()", "no_operator is applied to what head returns"),
        (Scaled(4, 8), "tanh()", "head is tests.features.head_loss.models.Scaled"),
    ],
)
def test_a_head_that_is_not_as_described_is_refused(head: nn.Module, after: str, says: str) -> None:
    plan = make_plan(load("llama-tiny", ["train.loss_chunk=8"]))
    (end,) = (kind for kind in plan.kinds if kind.part(LossChunks))
    part = nn.ModuleDict({"head": head})
    with pytest.raises(LayoutError, match=says):
        FEATURE.before_styles(part, replace(end, parts=(LossChunks("head", 8, (after,)),)))
