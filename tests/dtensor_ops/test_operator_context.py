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
from meshwright.reshard.dtensor.redistribute import redistribute
from meshwright.reshard.planner.plan import plan
from meshwright.reshard.run.execute import execute
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
        name = "meshwright.reshard.dtensor.redistribute.execute"
        patch.setattr(name, lambda *args: plans.append(args[0]) or execute(*args))
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


F = torch.nn.functional
QUIET_CONTEXTS = {"for_dtensor": for_dtensor, "replicate_fallback": lambda: replicate_fallback(warn=False)}
READERS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.max()),
    "bool": lambda x: bool((x > -100).all()),
    "is_nonzero": lambda x: x.sum().is_nonzero(),
    "int": lambda x: int((x > 0).sum()),
    "of one row": lambda x: x[:1, :1].item(),
}


def read(rank, world_size):
    """Compare, by context and reader, with and without inference mode, scalars with those of a plain tensor."""
    found = {}
    plain = numbers(7, 6)
    x = place(plain, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    for context, enter in QUIET_CONTEXTS.items():
        for name, reader in READERS.items():
            for is_inference in {False, name != "of one row"}:  # PyTorch views no DTensor made outside inference mode
                with torch.inference_mode(is_inference), enter():
                    found[context, name, is_inference] = abs(float(reader(x)) - float(reader(plain))) < 1e-5
    return found


def test_numbers_of_parts_are_those_of_the_whole(gang):
    for found in gang(4).run(read, timeout_s=120.0):
        assert {key for key, same in found.items() if not same} == set()


def printed(rank, world_size):
    plain = numbers(3, 2)
    x = place(plain, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    with replicate_fallback(warn="error"):
        return x.tolist() == plain.tolist(), f"{x.sum():.3f}" == f"{plain.sum():.3f}"


def test_what_is_printed(gang):
    assert gang(4).run(printed, timeout_s=120.0) == [(True, True)] * 4


PARTS = {
    "sum": [Partial(), Shard(0)],
    "two sums": [Partial(), Partial()],
    "average": [Partial("avg"), Replicate()],
    "largest": [Shard(1), Partial("max")],
    "product": [Partial("product"), Shard(0)],
    "no parts": [Shard(0), Shard(0)],
}
FILLS = {
    "fill_": lambda x: x.fill_(2.5),
    "a view": lambda x: x[1:3].fill_(2.5),
    "hinge": lambda x: x.copy_(F.hinge_embedding_loss(x, torch.ones_like(x), margin=2.5, reduction="none")),
}


def filled(rank, world_size):
    """Compare, by context, placements and fill, the values with those of a plain tensor."""
    found, mesh = {}, init_device_mesh("cpu", (2, 2))
    for context, enter in QUIET_CONTEXTS.items():
        for parts, placements in PARTS.items():
            for name, fill in FILLS.items():
                if name == "hinge" and context == "for_dtensor":
                    continue  # it also clamps partial values in place, which takes a gather
                plain = numbers(8, 6).abs()
                x = redistribute(place(plain, mesh, [Replicate()] * 2), placements)
                alias = x.detach()
                with enter():
                    fill(x)
                fill(plain)
                found[context, parts, name] = torch.allclose(alias.full_tensor(), plain, atol=1e-5)
    return found


@pytest.mark.slow
def test_partial_values_are_filled(gang):
    for found in gang(4).run(filled, timeout_s=120.0):
        assert {key for key, same in found.items() if not same} == set()


LOOKUPS = {
    "rows": lambda table, index: F.embedding(index, table),
    "one row": lambda table, index: F.embedding(index[0, 0], table),
    "gather": lambda table, index: torch.gather(table, 0, index[:1] @ index.new_ones(4, 6).long()),
}


def looked_up(rank, world_size):
    """Check, by context and lookup, two live results, each used twice, and the gradient."""
    found, mesh = {}, init_device_mesh("cpu", (world_size,))
    plain = numbers(10, 6).requires_grad_()
    indices = [torch.arange(12).view(3, 4) % n for n in (5, 7)]
    for context, enter in QUIET_CONTEXTS.items():
        for name, look in LOOKUPS.items():
            table = place(plain.detach(), mesh, [Shard(0)]).requires_grad_()
            plain.grad = None
            with enter():
                pairs = []
                for x in (plain, table):
                    whole = [i if x is plain else place(i, mesh, [Replicate()]) for i in indices]
                    a, b = (look(x, i) for i in whole)
                    total = (a * a + b).sum() + (b * 2).sum()
                    total.backward()
                    pairs.append([t if x is plain else t.full_tensor() for t in (a, b, total, x.grad)])
            found[context, name] = all(torch.allclose(p, q, atol=1e-5) for p, q in zip(*pairs, strict=True))
    return found


@pytest.mark.slow
def test_what_was_looked_up_can_be_used_again(gang):
    for found in gang(4).run(looked_up, timeout_s=120.0):
        assert {key for key, same in found.items() if not same} == set()


def scalars_alone(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    parts = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    return place(numbers(8, 6), mesh, [Shard(0)]).sum().item(), parts.fill_(2.0).full_tensor().tolist()


def test_dtensor_alone_gets_partial_values_wrong(gang):
    """Justify the layer: if this fails, PyTorch has fixed the operators."""
    found = gang(4).run(scalars_alone, timeout_s=120.0)
    assert len({number for number, _ in found}) == 4
    assert all(values == [8.0, 8.0] for _, values in found)


SLICES = {
    "rows": lambda x: x[3:6], "one shard's rows": lambda x: x[:3], "a row": lambda x: x[7], "last row": lambda x: x[-1],
    "stride": lambda x: x[1:10:3], "columns": lambda x: x[:, 2:5], "a column": lambda x: x[:, 4],
    "of a transposed": lambda x: x.t()[2:5], "both dims": lambda x: x[2:7, 1:4],
}  # fmt: skip
PLACED = {"rows": (S0, R), "both": (S0, S1), "columns": (R, S1), "partial": (S0, Partial()), "both on rows": (S0, S0)}


def sliced(rank, world_size):
    """Compare slices of 11 x 6 with those of plain tensors and with DTensor's placements; return differences."""
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    full = torch.arange(66.0).view(11, 6)
    for where, placements in PLACED.items():
        for name, take in SLICES.items():
            x = redistribute(distribute_tensor(full, mesh, [R, R]), placements).requires_grad_()
            theirs = take(x)
            for context in (for_dtensor, lambda: replicate_fallback(warn="error")):
                x.grad = None
                with context():
                    ours = take(x)
                    values = ours.full_tensor()
                    (values * values.detach()).sum().backward()
                expected = full.clone().requires_grad_()
                part = take(expected)
                (part * part.detach()).sum().backward()
                same = torch.equal(values, part) and ours.stride() == theirs.stride()
                if not same or not torch.equal(x.grad.full_tensor(), expected.grad):
                    found.append((where, name, "values"))
                if where != "partial" and ours.placements != theirs.placements:
                    found.append((where, name, ours.placements, theirs.placements))
    return found


@pytest.mark.slow
def test_slices_equal_dtensors(gang):
    assert gang(4).run(sliced) == [[]] * 4


def received(rank, world_size):
    """Return the rows that this rank receives for a slice of three of 4,096 rows, and for one as wide as two shards."""
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.arange(8192.0).view(4096, 2), mesh, [S0])
    rows, send = [], operator_context.all_to_all_into

    def counted(out, given, *, send_splits, recv_splits, group):
        rows.append(sum(recv_splits) - recv_splits[rank])
        send(out, given, send_splits=send_splits, recv_splits=recv_splits, group=group)

    with pytest.MonkeyPatch.context() as patch, torch.distributed.tensor.debug.CommDebugMode() as messages:
        patch.setattr(operator_context, "all_to_all_into", counted)
        with for_dtensor():
            x[1022:1025], x[512:2560]
    return rows, messages.get_total_counts()


def test_a_slice_moves_only_its_rows(gang):
    """A rank receives the rows that it does not hold, which no other way to replicate the slice can undercut."""
    held = [(2, 512), (1, 1024), (0, 512), (0, 0)]
    for (few, many), (rows, messages) in zip(held, gang(4).run(received), strict=True):
        assert rows == [3 - few, 2048 - many] and messages == 2
