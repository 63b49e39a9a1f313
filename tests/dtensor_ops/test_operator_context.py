"""A context intercepts only what it must: it leaves other operators, threads and PyTorch's plans as they were."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from meshwright.dtensor_ops import operator_context
from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import OperatorContext, for_dtensor
from meshwright.mesh.layout import Layout
from meshwright.reshard.dtensor import redistribute
from meshwright.reshard.planner.plan import plan
from tests.reshard.placing import numbers, place

S0, S1, R = Shard(0), Shard(1), Replicate()
CONTEXTS = {"for_dtensor": for_dtensor, "replicate_fallback": lambda: replicate_fallback(warn=False)}


def intercepted_calls(rank, world_size):
    """Return the operators that pass the layers in a training step without anything to correct, and in one with."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    w, x = place(numbers(8, 8), mesh, [S1]).requires_grad_(), place(numbers(4, 8), mesh, [R])
    run = OperatorContext.run
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(OperatorContext, "run", lambda self, op, *rest: seen.append(str(op)) or run(self, op, *rest))
        for name, context in CONTEXTS.items():
            with context():
                y = (torch.nn.functional.gelu(x @ w) + 1).softmax(0).view(2, 2, 8).sum()
                y.backward()
                w.grad.add_(w.detach())
            found[name] = list(seen)
            seen.clear()
            with context():
                place(numbers(8, 6), mesh, [S0])[1:3].mul_(2)
            found[name, "gathered"] = list(seen)
            seen.clear()
    return found


def test_operators_that_need_no_correction_are_not_intercepted(gang):
    for found in gang(4).run(intercepted_calls):
        for name in CONTEXTS:
            assert found[name] == []
            assert found[name, "gathered"] == ["aten.slice.Tensor", "aten.mul_.Tensor"]


def what_is_left(rank, world_size):
    """Check that a plan made outside of a context hides nothing inside, and the reverse, in either order."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}

    def write(x):
        x[1:3].mul_(0.0)
        return x.full_tensor()[1:3].eq(0.0).all().item()

    def item(x):
        return DTensor.from_local(x.to_local(), mesh, [Partial()], run_check=False).sum().item()

    for time in range(2):
        for name, call in {"write": write, "item": item}.items():
            found[time, name, "outside"] = call(place(numbers(8, 6), mesh, [S0]))
            with for_dtensor():
                found[time, name, "inside"] = call(place(numbers(8, 6), mesh, [S0]))
    dispatcher = DTensor._op_dispatcher
    own = dict(dispatcher._custom_op_handlers)
    with pytest.raises(ZeroDivisionError), replicate_fallback(warn=False):
        assert dispatcher._custom_op_handlers != own
        raise ZeroDivisionError
    restored = dispatcher._custom_op_handlers == own and not dispatcher._allow_implicit_replication
    found["restored"] = restored and DTensor.__torch_function__ is torch._C._disabled_torch_function_impl
    return found


def test_plans_made_outside_hide_nothing_and_nothing_stays(gang):
    total = float(numbers(8, 6).sum())
    for found in gang(4).run(what_is_left):
        for time in range(2):
            assert found[time, "write", "inside"] and not found[time, "write", "outside"]
            assert found[time, "item", "inside"] == pytest.approx(total)
            assert found[time, "item", "outside"] != pytest.approx(total)
        assert found["restored"]


def sizes(rank, world_size):
    """Return the collectives of `is_same_size` between plain tensors and DTensors, and its answers."""
    mesh, answers = init_device_mesh("cpu", (world_size,)), []
    x = place(numbers(8, 6), mesh, [S0])
    with CommDebugMode() as messages:
        for context in CONTEXTS.values():
            with context():
                pairs = [(numbers(8, 6), x), (x, numbers(8, 6)), (x, x), (numbers(2, 6), x), (x.to_local(), x)]
                answers.append([a.is_same_size(b) for a, b in pairs])
        with replicate_fallback(warn=False):
            answers.append([a.is_same_size(b) for a, b in pairs])
    return answers, messages.get_total_counts()


def test_is_same_size_reads_metadata_only(gang):
    for answers, messages in gang(4).run(sizes):
        assert answers == [[True, True, True, False, False]] * 3 and messages == 0


def compiled(rank, world_size):
    """Return the warnings and the results of compiled functions within the contexts, and the expected results."""
    mesh, records, results = init_device_mesh("cpu", (world_size,)), [], []
    x = distribute_tensor(numbers(8, 6), mesh, [S0])
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    operator_context._log.addHandler(handler)
    operator_context._warn_compiled.cache_clear()
    try:
        for context in (for_dtensor, for_dtensor, lambda: replicate_fallback(warn=False)):
            torch._dynamo.reset()
            with context():
                function = torch.compile(lambda x: x.redistribute(placements=[R]) * 2, backend="aot_eager")
                results.append(function(x).to_local())
                results.append((x * 2).full_tensor())
    finally:
        operator_context._log.removeHandler(handler)
    return records, [torch.equal(result, numbers(8, 6) * 2) for result in results]


@pytest.mark.slow
def test_compiling_within_a_context_warns_once(gang):
    for rank, (records, right) in enumerate(gang(4).run(compiled, timeout_s=120.0)):
        assert all(right) and len(records) == (1 if rank == 0 else 0), records
        assert all("torch.compile" in record for record in records)


def async_moves(rank, world_size):
    """Return the plans run by a synchronous redistribution and by an asynchronous one, and whether values agree."""
    mesh, plans = init_device_mesh("cpu", (world_size,)), []
    x = distribute_tensor(numbers(8, 6), mesh, [S0])
    with pytest.MonkeyPatch.context() as patch:
        run = redistribute.execute
        patch.setattr(redistribute, "execute", lambda *args: plans.append(args[0]) or run(*args))
        with for_dtensor():
            now = x.redistribute(placements=[S1]).to_local()
            num_sync = len(plans)
            later = x.redistribute(placements=[S1], async_op=True).to_local()
            return num_sync, len(plans) - num_sync, torch.equal(now, later + 0)


def test_asynchronous_redistributions_are_pytorchs(gang):
    assert gang(4).run(async_moves) == [(1, 0, True)] * 4


def test_cheaper_inputs_can_make_a_product_dearer():
    """Check the numbers of docs/operators.md: the cheapest inputs leave the product partial."""
    n, shape = 4, (1024, 1024)

    def sent(before: str, after: str) -> int:
        layouts = Layout.parse(before, (n,), shape), Layout.parse(after, (n,), shape)
        return plan(*layouts, dtype="fp32").bytes_received

    gathered = sent("S0", "R")
    exchanged = sent("S0", "S1") + sent("S1", "S0")
    mib = 2**20
    assert (gathered, exchanged) == (3 * mib, 1.5 * mib)
    assert (exchanged + sent("P", "S0"), exchanged + sent("P", "R")) == (4.5 * mib, 7.5 * mib)
