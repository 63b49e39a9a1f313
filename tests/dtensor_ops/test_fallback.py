"""Operators without a sharding rule: correct values, in-place writes, gradients, warnings and errors."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.torch_version import TorchVersion

from meshwright.dtensor_ops.fallback import CHECKS, is_incorrect, replicate_fallback
from meshwright.dtensor_ops.run_replicated import OpCall, OperatorError
from tests.reshard.placing import numbers, place

MANY_S = 120
"""Timeout for bodies of many operators, which take seconds, and ten times as long on a loaded machine."""

LAYOUTS = {
    "even": ((4,), [Shard(0)]),
    "cut along dim 1, unevenly": ((4,), [Shard(1)]),
    "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "two dims": ((2, 2), [Shard(1), Shard(0)]),
    "partial": ((2, 2), [Partial(), Shard(0)]),
    "copies": ((4,), [Replicate()]),
}


def by_layout(rank, world_size):
    """Check, by layout, the values and placements of results and of writes into an output tensor."""
    found = {}
    x = numbers(8, 6)
    for name, (mesh_shape, placements) in LAYOUTS.items():
        mesh = init_device_mesh("cpu", mesh_shape)
        d = place(x, mesh, placements)
        with replicate_fallback(warn=False) as fallbacks:
            y = torch.renorm(d, 2, 0, 1.0)
            into = place(numbers(8, 6, seed=3), mesh, [Replicate() if p.is_partial() else p for p in placements])
            held = into.to_local()
            same = torch.ops.aten.renorm.out(d, 2, 0, 1.0, out=into)
        expected = torch.renorm(x, 2, 0, 1.0)
        whole = [Replicate() if p.is_partial() else p for p in placements]
        found[name] = (
            torch.allclose(y.full_tensor(), expected, atol=1e-6),
            list(y.placements) == whole,
            same is into and torch.equal(into.to_local(), held),
            torch.allclose(into.full_tensor(), expected, atol=1e-6),
            fallbacks.counts,
        )
    return found


def test_results_are_right_and_lie_as_the_input_of_their_shape(gang):
    counts = {"aten.renorm.default": 1, "aten.renorm.out": 1}
    for found in gang(4).run(by_layout, timeout_s=MANY_S):
        assert found == dict.fromkeys(LAYOUTS, (True, True, True, True, counts))


def in_place(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = numbers(7, 6)
    d = place(x, mesh, [Shard(0)])
    local = d.to_local()
    with replicate_fallback(warn=False):
        same = d.renorm_(2, 0, 1.0)
        partial = place(x, mesh, [Partial()])
        alias = partial.detach()
        partial.renorm_(2, 0, 1.0)
        failed = place(x, mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="renorm"):
            failed.renorm_(-1.0, 0, 1.0)
    expected = torch.renorm(x, 2, 0, 1.0)
    kept = torch.equal(failed.full_tensor(), x)
    parts = torch.allclose(alias.full_tensor(), expected) and alias.placements == (Partial(),)
    return same is d, torch.equal(d.to_local(), local), torch.equal(d.full_tensor(), expected), kept, parts


def test_in_place_writes_into_the_given_tensor_or_leaves_it(gang):
    assert gang(4).run(in_place) == [(True, True, True, True, True)] * 4


def gradients(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    plain = [numbers(6, 3).requires_grad_(), numbers(5, 3, seed=1).requires_grad_()]
    placed = [place(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in plain]
    torch.cdist(*plain).square().sum().backward()
    with replicate_fallback(warn=False) as fallbacks:
        torch.cdist(*placed).square().sum().backward()
    close = all(torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-5) for a, b in zip(placed, plain, strict=True))
    return (
        close,
        [list(x.grad.placements) == [Shard(0)] for x in placed],
        "aten._cdist_backward.default" in fallbacks.counts,
    )


def test_gradients_flow(gang):
    assert gang(4).run(gradients, timeout_s=MANY_S) == [(True, [True, True], True)] * 4


F = torch.nn.functional
BACKWARDS = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x[None].mT, 1),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "vector_norm, inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "vector_norm, -inf": lambda x: torch.linalg.vector_norm(x, float("-inf")),
    "norm by rows, inf": lambda x: x.norm(float("inf"), dim=1),
    "sum over no dim": lambda x: torch.ops.aten.sum.dim_IntList(x, [], True) * x,
    "amax": lambda x: x.amax(()) * x.amin(0),
    "var": lambda x: x.var() * x,
    "logsumexp": lambda x: x.logsumexp(0),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([1, 0, 4, 3, 2])),
    "max_pool1d": lambda x: F.max_pool1d(x[None], 2),
    "conv1d": lambda x: F.conv1d(x[None], torch.ones(2, 5, 2)),
    "cumprod": lambda x: x.cumprod(0),
    "svd": lambda x: torch.linalg.svdvals(x),
    "index": lambda x: x[torch.tensor([4, 0, 0])],
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1])),
}
"""Functions of a 5 × 5 matrix, on four ranks sharded as 2, 2, 1 and 0."""


def backwards(rank, world_size):
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    for name, call in BACKWARDS.items():
        for dim in (0, 1):
            plain = numbers(5, 5, seed=4).requires_grad_()
            placed = place(plain.detach(), mesh, [Shard(dim)]).requires_grad_()
            with replicate_fallback(warn=False):
                result = call(placed)
                result.square().sum().backward()
            expected = call(plain)
            expected.square().sum().backward()
            values = torch.allclose(result.full_tensor(), expected, atol=1e-5)
            found[name, dim] = values, torch.allclose(placed.grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-4)
    return found


@pytest.mark.slow
def test_gradients_are_right_on_uneven_and_empty_shards(gang):
    """All operators of PyTorch: `tests/bench/test_operators.py`, slow."""
    for found in gang(4).run(backwards, timeout_s=MANY_S):
        assert {key: outcome for key, outcome in found.items() if outcome != (True, True)} == {}
        assert len(found) == 2 * len(BACKWARDS)


def group_norms(rank, world_size):
    """For each input that is sharded: whether a group norm's results and gradients are those of plain tensors."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    for sharded, placement in ((0, Shard(0)), (0, Shard(1)), (1, Shard(0)), (2, Shard(0))):
        plain = [numbers(1, 6, 3, seed=4), numbers(6, seed=5), numbers(6, seed=6)]
        placed = [place(x, mesh, [placement if n == sharded else Replicate()]) for n, x in enumerate(plain)]
        outcomes = []
        with replicate_fallback(warn=False):
            for inputs in (plain, placed):
                inputs = [x.detach().requires_grad_() for x in inputs]
                result = F.group_norm(inputs[0], 2, *inputs[1:])
                outcomes.append([result, *torch.autograd.grad(result.square().sum(), inputs)])
            full = [x.full_tensor() for x in outcomes[1]]
        found[sharded, str(placement)] = [
            torch.allclose(x, y, atol=1e-4) for x, y in zip(full, outcomes[0], strict=True)
        ]
    return found


def test_group_norm_has_right_gradients_wherever_it_is_sharded(gang):
    """Its operator is told sizes, which DTensor passes on as those of the full tensor."""
    for found in gang(2).run(group_norms, timeout_s=MANY_S):
        assert len(found) == 4 and all(outcome == [True] * 4 for outcome in found.values()), found


class Lines(logging.Handler):
    """A handler that collects log messages."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def said(rank, world_size):
    """Collect the log lines and the error for `warn` True, False and "error"."""
    mesh = init_device_mesh("cpu", (world_size,))
    d, seen = place(numbers(8, 6), mesh, [Shard(0)]), Lines()
    logger = logging.getLogger("meshwright.dtensor_ops.fallback")
    logger.addHandler(seen)
    try:
        with replicate_fallback():
            for _ in range(2):
                torch.renorm(d, 2, 0, 1.0)
            torch.cdist(d, d)
        with replicate_fallback(warn=False):
            torch.renorm(d, 2, 0, 1.0)
        with replicate_fallback(warn="error"), pytest.raises(OperatorError) as caught:
            torch.renorm(d, 2, 0, 1.0)
        assert isinstance(caught.value, RuntimeError)  # as PyTorch's own refusals
    finally:
        logger.removeHandler(seen)
    return seen.lines, str(caught.value)


def test_an_operator_is_named_once_with_its_bytes_or_refused(gang):
    results = gang(4).run(said)
    lines, text = results[0]
    assert len(lines) == 2 and all(other == [] for other, _ in results[1:])
    assert "aten.renorm.default" in lines[0] and "144 B" in lines[0]
    assert "aten._cdist_forward" in lines[1] and "144 B" in lines[1], "one tensor twice is gathered once"
    for part in ("aten.renorm.default", "(8, 6)", "Shard(dim=0)", "144 B", "register_sharding", "where", "rule", "fix"):
        assert part in text


def refused(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = numbers(8, 6)
    d, found = place(x, mesh, [Shard(0)]), {}
    calls = {
        "resize_": lambda: place(x, mesh, [Shard(0)]).resize_(4, 4),
        "set_": lambda: place(x, mesh, [Shard(0)]).set_(d),
        "data_ptr": d.data_ptr,
        "strides of a transposed": lambda: d.t().as_strided((2, 2), (1, 1)),
        "cauchy_": lambda: place(x, mesh, [Shard(0)]).cauchy_(),
        "normal": lambda: torch.normal(d, d.abs()),
        "poisson": lambda: torch.poisson(d.abs()),
        "own plain tensor": lambda: d + torch.full((8, 6), float(rank)),
        "multinomial": lambda: torch.multinomial(d.abs(), 2),
        # PyTorch warns where an output with elements is resized, and a warning beside an error may be a SystemError.
        "out of another shape": lambda: torch.ops.aten.renorm.out(
            d, 2, 0, 1.0, out=place(numbers(0, 3), mesh, [Shard(0)])
        ),
        "two meshes": lambda: torch.cdist(d, place(x, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])),
    }
    for name, call in calls.items():
        with replicate_fallback(warn=False):
            try:
                call()
                found[name] = "nothing"
            except OperatorError as error:
                found[name] = error.what if error.rule and error.fix else "no rule or fix"
    return found


REFUSALS = {
    "resize_": "depends on the memory", "set_": "depends on the memory", "data_ptr": "depends on the memory",
    "strides of a transposed": "depends on the memory", "cauchy_": "draws random numbers",
    "normal": "draws random numbers", "poisson": "draws random numbers", "own plain tensor": "differ between ranks",
    "multinomial": "draws random numbers",

    "out of another shape": "of shape (0, 3)", "two meshes": "on different meshes",
}  # fmt: skip


def test_operators_that_cannot_fall_back_are_rejected(gang):
    for found in gang(4).run(refused, timeout_s=MANY_S):
        assert {name: what for name, what in found.items() if REFUSALS[name] not in what} == {}


def differing_after_alike(rank, world_size):
    """Mix in plain tensors of one shape: the same on all ranks, replicated, and other ones."""
    mesh = init_device_mesh("cpu", (world_size,))
    x = numbers(8, 6)
    d, found = place(x, mesh, [Shard(0)]), []
    with replicate_fallback(warn=False):
        for mix in (torch.add, lambda a, b: torch.einsum("ij,ij->ij", a, b)):
            for before in (x, place(x, mesh, [Replicate()])):
                assert torch.equal(mix(d, before).full_tensor(), mix(x, x))
                try:
                    mix(d, torch.full((8, 6), float(rank)))
                    found.append("")
                except OperatorError as error:
                    found.append(error.what)
        own = torch.full((8, 6), float(rank))
        assert torch.is_same_size(d, own) and torch.full((6,), float(rank)).expand_as(d)[3, 3] == rank, "shapes alone"
    try:
        d + x
    except RuntimeError as error:
        found.append(str(error))
    return found


def test_a_plan_of_replicated_tensors_hides_no_plain_one_that_differs(gang):
    for *refused, outside in gang(2).run(differing_after_alike):
        assert len(refused) == 4 and all("differ between ranks" in what for what in refused), refused
        assert "mixed torch.Tensor and DTensor" in outside


def mixed(rank, world_size):
    """Check plain tensors that are the same on all ranks, indices read on the host, dims smaller than the mesh."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, small = numbers(8, 6), numbers(3, 5)
    d, s = place(x, mesh, [Shard(0)]), place(small, mesh, [Shard(0)])
    with replicate_fallback(warn=False) as fallbacks:
        found = [
            torch.equal((d + x).full_tensor(), x + x),
            torch.equal(torch.tensor_split(d, place(torch.tensor([2, 3]), mesh, [Shard(0)]))[1].full_tensor(), x[2:3]),
        ]
        counts = dict(fallbacks.counts)
        found += [
            torch.equal(s.max().full_tensor(), small.max()),
            torch.allclose(torch.fft.fft(s).full_tensor(), torch.fft.fft(small)),
            torch.equal(s.argmax().full_tensor(), small.argmax()),
            torch.equal(torch.squeeze_copy(s).full_tensor(), small),
        ]
    return found, [name for name in counts if "add" in name]


def test_plain_tensors_of_one_value_and_empty_pieces(gang):
    assert gang(4).run(mixed, timeout_s=MANY_S) == [([True] * 6, [])] * 4


def left_behind(rank, world_size):
    """Record the outcome outside, after a nested context, after an exception, and in another thread."""
    mesh = init_device_mesh("cpu", (world_size,))
    d, found = place(numbers(8, 6), mesh, [Shard(0)]), {}

    def raises(key):
        try:
            torch.renorm(d, 2, 0, 1.0)
            found[key] = "ran"
        except NotImplementedError:
            found[key] = "not implemented"
        except OperatorError:
            found[key] = "refused"

    raises("before")
    with replicate_fallback(warn=False):
        with replicate_fallback(warn="error"):
            raises("nested")
        raises("after nested")
        with pytest.raises(ZeroDivisionError), replicate_fallback(warn="error"):
            raise ZeroDivisionError
        raises("after an exception")
        thread = threading.Thread(target=raises, args=("thread",))
        thread.start()
        thread.join()
    raises("after")
    return found


def test_the_context_holds_on_its_thread_until_it_ends(gang):
    assert gang(4).run(left_behind) == [{
        "before": "not implemented", "nested": "refused", "after nested": "ran", "after an exception": "ran",
        "thread": "not implemented", "after": "not implemented",
    }] * 4  # fmt: skip


F = torch.nn.functional
aten = torch.ops.aten
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


def gradient_of(call):
    """Return a function that computes the gradient_of of `call` with respect to its first input."""

    def of(x, *others):
        x = x.detach().requires_grad_()
        y = call(x, *others)
        y.square().sum().backward()
        return x.grad

    return of


def parts_of_eight_bits(rank, world_size):
    """Multiply with a partial float8 tensor."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, w = (torch.arange(256.0).view(16, 16) % 7).to(torch.float8_e4m3fn), torch.eye(16).to(torch.float8_e4m3fn)
    parts = DTensor.from_local(x if rank == 1 else torch.zeros(16, 16).to(x.dtype), mesh, [P])
    one, other = (place(torch.ones(()), mesh, [R]), DTensor.from_local(w, mesh, [R]).t())
    with replicate_fallback(warn=False):
        y = torch._scaled_mm(parts, other, one, one, out_dtype=torch.float32).full_tensor()
    return torch.equal(y, x.float())


def test_a_product_of_parts_of_eight_bits(gang):
    assert gang(4).run(parts_of_eight_bits, timeout_s=120.0) == [True] * 4


CASES = {
    "kernel cut": ("convolution.default", F.conv1d, (numbers(4, 3, 9), S0), (numbers(8, 3, 3, seed=1), S0)),
    "channels cut": ("convolution.default", F.conv1d, (numbers(4, 8, 9), S1), (numbers(6, 8, 3, seed=1), R)),
    "image cut": ("convolution.default", F.conv2d, (numbers(2, 3, 8, 8), Shard(3)), (numbers(4, 3, 1, 1, seed=1), R)),
    "image cut, gradient_of": (
        "convolution_backward.default", gradient_of(lambda x, w: F.conv2d(x, w, padding=1)),
        (numbers(2, 3, 8, 8), Shard(2)), (numbers(4, 3, 3, 3, seed=1), R),
    ),
    "bias cut": (
        "convolution.default", F.conv1d, (numbers(4, 3, 9), R), (numbers(8, 3, 3, seed=1), R), (numbers(8), S0)
    ),
    "kernel cut, gradient_of": (
        "convolution_backward.default", gradient_of(F.conv1d), (numbers(4, 3, 9), S0), (numbers(8, 3, 3, seed=1), S0)
    ),
    "partial, gradient_of": (
        "convolution_backward.default", gradient_of(F.conv1d), (numbers(4, 3, 9), P), (numbers(8, 3, 3, seed=1), R)
    ),
    "squeezed": ("squeeze_copy.default", torch.squeeze_copy, (numbers(4, 5), S0)),
    "squeezed dim": ("squeeze_copy.dim", lambda x: torch.squeeze_copy(x, 0), (numbers(4, 5), S0)),
    "squeezed dims": ("squeeze_copy.dims", lambda x: torch.squeeze_copy(x, (0, 1)), (numbers(4, 5), S0)),
    "equal shapes": ("equal.default", torch.equal, (numbers(5, 1), S1), (numbers(5), R)),
    "det": ("_linalg_det.default", gradient_of(torch.linalg.det), (numbers(4, 4).t(), S0)),
    "slogdet": ("_linalg_slogdet.default", gradient_of(lambda x: torch.linalg.slogdet(x)[1]), (numbers(4, 4).t(), S0)),
    "pooling without a batch": (
        "_adaptive_avg_pool2d_backward.default", gradient_of(lambda x: F.adaptive_avg_pool2d(x, (5, 5))),
        (numbers(8, 4, 3), S1),
    ),
    "group norm, gradient_of": (
        "native_group_norm_backward.default", gradient_of(lambda x, w: F.group_norm(x, 2, w)),
        (numbers(4, 8, 3), S1), (numbers(8, seed=1), S0),
    ),
    "to eight bits": ("_to_copy.default", lambda x: x.to(torch.float8_e4m3fn).float(), (numbers(8, 6) / 256, P)),
    "view of nothing": ("view.default", lambda x: x.view(2, 0, 3), (numbers(6, 0), S0)),
    "reshaped nothing": ("_unsafe_view.default", lambda x: aten._unsafe_view(x, (0, 3, 2)), (numbers(6, 0), S0)),
    "complex number": ("", lambda x: aten.mul.Scalar(x, 1j), (numbers(8, 6), S0)),
    "wrong shape of a piece": ("", torch.addmv, (numbers(1), S0), (numbers(5, 10), S0), (numbers(10), S0)),
    "vector and matrix": ("", lambda x, w: (x @ w) * 1, (numbers(10), S0), (numbers(10, 5), S0)),
    "smallest of nothing": ("", lambda x: torch.aminmax(x, dim=0)[0], (numbers(5, 0, 5), S0)),
}  # fmt: skip
"""By problem: the operator in `CHECKS`, a call of it, and its inputs with their placements."""
WRONG_ALONE = ("kernel cut", "image cut", "partial, gradient_of", "det", "slogdet", "complex number")
"""Cases that DTensor alone computes incorrectly, or raises for, without leaving other ranks hanging."""


def outcome(call, inputs, context, mesh):
    """Return True if a call gives the same result on DTensors and plain tensors, or the name of its exception."""
    expected = call(*(x for x, _ in inputs))
    try:
        with context:
            got = call(*(place(x, mesh, [p]) for x, p in inputs))
            got = got.full_tensor() if isinstance(got, DTensor) else got
    except Exception as error:
        return type(error).__name__
    if not isinstance(expected, torch.Tensor):
        return abs(got - expected) < 1e-5
    return got.shape == expected.shape and torch.allclose(got, expected, atol=1e-5)


def within(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        name: outcome(call, inputs, replicate_fallback(warn=False), mesh) for name, (_, call, *inputs) in CASES.items()
    }


@pytest.mark.slow
def test_they_are_right_in_the_fallback(gang):
    for found in gang(4).run(within, timeout_s=120.0):
        assert found == dict.fromkeys(CASES, True)


def test_each_check_has_a_case():
    assert {f"aten.{operator}" for operator, *_ in CASES.values() if operator} | {
        "aten.reshape.default",  # as `view`, in inference mode
    } == set(CHECKS)  # fmt: skip


def alone(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return {name: outcome(CASES[name][1], CASES[name][2:], nullcontext(), mesh) for name in WRONG_ALONE}


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="lists operators that are incorrect in 2.13")
def test_dtensor_alone_gets_them_wrong(gang):
    """Justify the checks: if this fails, PyTorch has fixed one of the operators."""
    results = gang(4).run(alone, timeout_s=120.0)
    assert [name for name in WRONG_ALONE if all(found[name] is True for found in results)] == []


def test_what_draws_by_itself_is_seen_before_it_runs():
    x = torch.empty(2, device="meta")
    attention = aten._scaled_dot_product_flash_attention.default
    assert not is_incorrect(OpCall(attention, (x, x, x)))
    assert not is_incorrect(OpCall(attention, (x, x, x, 0.0)))
    assert is_incorrect(OpCall(attention, (x, x, x, 0.1)))
    assert is_incorrect(OpCall(attention, (x, x, x), {"dropout_p": 0.1}))
    assert is_incorrect(OpCall(aten.multinomial.default, (x, 1)))
    assert not is_incorrect(OpCall(aten.native_dropout.default, (x, 0.5, True))), "DTensor sees to it"
