"""Verify how a step's batch is split and its loss is reduced."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.run_plan import RunPlan
from meshwright.plan.verify.error import Fault, join_names
from meshwright.units import counted


def step_faults(plan: RunPlan) -> Iterator[Fault]:
    """Yield faults in the batch and the loss."""
    yield from _batch(plan)
    yield from _loss(plan)


def _batch(plan: RunPlan) -> Iterator[Fault]:
    batch, ranks = plan.batch, plan.mesh.size(*plan.mesh.view("batch"))
    if min(batch.global_batch, batch.num_microbatches, batch.samples, batch.tokens) < 1:
        yield Fault(f"the batch is {batch}", "all batch sizes must be positive", "batch")
    product = batch.samples * batch.num_microbatches * ranks
    if batch.global_batch != product:
        parts = f"{batch.samples} samples × {counted(batch.num_microbatches, 'micro-batch')} × {counted(ranks, 'rank')}"
        what = f"the global batch is {batch.global_batch}, but {parts} = {product}"
        axis = next(iter(plan.mesh.view("batch")), None)
        yield Fault(what, "all data-parallel ranks have equal shares of the global batch", "batch", axis=axis)
    if batch.num_microbatches != plan.schedule.num_microbatches:
        found = counted(batch.num_microbatches, "micro-batch")
        what = f"the batch has {found}, but the schedule {plan.schedule.num_microbatches}"
        yield Fault(what, "the schedule must run all micro-batches of the step", "batch.num_microbatches")


def _loss(plan: RunPlan) -> Iterator[Fault]:
    mesh, loss = plan.mesh, plan.loss
    summed = {*mesh.view("batch"), *mesh.view("cp"), *(["pp"] if mesh.size("pp") > 1 else [])}
    equal = set(mesh.view("tp"))
    for has, due, words_of in ((loss.summed, summed, "summed"), (loss.equal, equal, "equal")):
        for axis in (*mesh.in_stage(), "pp"):
            if has.count(axis) != (axis in due):
                what = f"loss.{words_of} names {axis} {has.count(axis)} times, but the loss is "
                what += "partial there" if axis in summed else "replicated there" if axis in equal else "complete there"
                rule = (
                    f"it is summed over {join_names(sorted(summed))}, and replicated over {join_names(sorted(equal))}"
                )
                yield Fault(what, rule, f"loss.{words_of}", axis=axis)
    if loss.units is not None and loss.units < 1:
        yield Fault(f"the loss is divided by {loss.units}", "the divisor of the loss must be positive", "loss.units")
