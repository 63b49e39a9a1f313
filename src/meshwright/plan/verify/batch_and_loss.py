"""Verify a step as a whole: how its batch is divided, and how its loss is put together."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.run_plan import RunPlan
from meshwright.plan.verify.error import Fault, words


def step_faults(plan: RunPlan) -> Iterator[Fault]:
    """What is wrong with the batch and the loss."""
    yield from _batch(plan)
    yield from _loss(plan)


def _batch(plan: RunPlan) -> Iterator[Fault]:
    batch, ranks = plan.batch, plan.mesh.size(*plan.mesh.view("batch"))
    if min(batch.global_batch, batch.num_microbatches, batch.samples, batch.tokens) < 1:
        yield Fault(f"a batch of {batch}", "a step has samples, and they have tokens", "batch")
    product = batch.samples * batch.num_microbatches * ranks
    if batch.global_batch != product:
        parts = f"{batch.samples} samples × {batch.num_microbatches} micro-batches × {ranks} ranks"
        what = f"a global batch of {batch.global_batch}, and {parts} are {product}"
        axis = next(iter(plan.mesh.view("batch")), None)
        yield Fault(what, "ranks that divide samples have equal parts of the global batch", "batch", axis=axis)
    if batch.num_microbatches != plan.schedule.num_microbatches:
        what = f"{batch.num_microbatches} micro-batches, and the schedule has {plan.schedule.num_microbatches}"
        yield Fault(what, "the schedule runs the step's micro-batches", "batch.num_microbatches")


def _loss(plan: RunPlan) -> Iterator[Fault]:
    mesh, loss = plan.mesh, plan.loss
    summed = {*mesh.view("batch"), *mesh.view("cp"), *(["pp"] if mesh.size("pp") > 1 else [])}
    equal = set(mesh.view("tp"))
    for has, due, words_of in ((loss.summed, summed, "summed"), (loss.equal, equal, "equal")):
        for axis in (*mesh.in_stage(), "pp"):
            if has.count(axis) != (axis in due):
                what = f"the loss is {words_of} over {axis} {has.count(axis)} times, and ranks there have "
                what += "parts of it" if axis in summed else "the same" if axis in equal else "all of it"
                rule = f"the loss is summed over {words(sorted(summed))}, and equal over {words(sorted(equal))}"
                yield Fault(what, rule, f"loss.{words_of}", axis=axis)
    if loss.units is not None and loss.units < 1:
        yield Fault(f"a loss divided by {loss.units}", "a step's loss is divided by its units", "loss.units")
