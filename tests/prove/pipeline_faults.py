"""Seeded faults of pipelines: micro-batches, buffers, shared gradients and stages that go astray on real ranks.

As in `seeded_faults`; most damage one rank's row of the table, or a channel, and let the executor run that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.collectives import Channel
from meshwright.config.facts_for_family import run_facts
from meshwright.mesh.local_shards import to_local
from meshwright.nn.weight_init import normal_shard
from meshwright.pipeline.actions import RECVS, Action, ActionKind
from meshwright.prove.record.layout_run import Tamper
from meshwright.train.build_job import Job, initialize
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import Fault, after_backward, drop_reduce_scatter, on, on_rank, wrapping

K = ActionKind
Row = list[Action]


def run_row(job: Job, step: TrainStep, row: Iterable[Action] | None = None) -> None:
    """Bind this rank's row again: another one, or the same to damaged stages and channels."""
    actions = list(job.schedule.actions)
    if row is not None:
        actions[job.pipeline_rank] = tuple(row)
    table = replace(job.schedule, actions=tuple(actions))
    step._executor = step.pipeline.executor(table, batch_size=job.microbatch_size)


def on_stage(pp: int, tamper: Tamper) -> Tamper:
    return on(lambda job: job.pipeline_rank == pp, tamper)


def rows(change: Callable[[Row], Iterable[Action]], *, pp: int) -> Tamper:
    """One rank of the pipeline runs a damaged row."""

    def tamper(job: Job, step: TrainStep) -> None:
        run_row(job, step, change([part for action in job.schedule.actions[pp] for part in action.parts()]))

    return on_stage(pp, tamper)


def without(*names: str) -> Callable[[Row], Iterable[Action]]:
    return lambda row: [action for action in row if str(action) not in names]


def swap_microbatches(*kinds: ActionKind) -> Callable[[Row], Iterable[Action]]:
    """Micro-batches 0 and 1 have each other's place in these actions."""
    other = {0: 1, 1: 0}
    return lambda row: [
        replace(a, microbatch=other.get(a.microbatch, a.microbatch)) if a.kind in kinds else a for a in row
    ]


def repeat(*names: str) -> Callable[[Row], Iterable[Action]]:
    """After the last of these actions, all of them once more."""

    def change(row: Row) -> Row:
        at = max(i for i, action in enumerate(row) if str(action) in names) + 1
        again = [next(action for action in row if str(action) == name) for name in names]
        return [*row[:at], *again, *row[at:]]

    return change


def one_slot(kind: ActionKind) -> Callable[[Row], Iterable[Action]]:
    """Every receive of this kind fills the first buffer."""
    assert kind in RECVS
    return lambda row: [replace(action, slot=0) if action.kind is kind else action for action in row]


def reduce_before_last_weights(row: Row) -> Row:
    [reduce] = [action for action in row if action.kind is K.REDUCE]
    row.remove(reduce)
    last = max(i for i, action in enumerate(row) if action.kind is K.BACKWARD_WEIGHT)
    return [*row[:last], reduce, *row[last:]]


# ---- what goes over the channels


class OtherPayload:
    """A channel on which one transfer is damaged."""

    def __init__(self, real: Channel, number: int) -> None:
        self._real, self._number, self._count, self._last = real, number, -1, torch.empty(0)

    def _is_it(self) -> bool:
        self._count += 1
        return self._count == self._number


class SendsZeros(OtherPayload):
    """A gradient gets lost."""

    def send(self, x: Tensor) -> Any:
        return self._real.send(0.0 * x if self._is_it() else x)


class SendsThePrevious(OtherPayload):
    """A gradient is sent twice, and the next one never."""

    def send(self, x: Tensor) -> Any:
        sent = self._last if self._is_it() else x
        self._last = x.clone()
        return self._real.send(sent)


class LeavesSlotStale(OtherPayload):
    """What arrives goes elsewhere; the slot keeps what it had."""

    def receive(self, x: Tensor) -> Any:
        return self._real.receive(torch.empty_like(x) if self._is_it() else x)


def channel(damage: type[OtherPayload], kind: ActionKind, *, pp: int, number: int) -> Tamper:
    """Damage transfer `number`, from 0, on the only channel of this kind that a rank of the pipeline has."""

    def tamper(job: Job, step: TrainStep) -> None:
        end, channels = int(hasattr(damage, "receive")), dict(step.pipeline._channels)
        [key] = [key for key in channels if key[2] is kind and key[end] == pp]
        step.pipeline._channels = {**channels, key: damage(channels[key], number)}
        run_row(job, step)

    return on_stage(pp, tamper)


# ---- shared parameters


def no_sync(job: Job, step: TrainStep) -> None:
    for stage in step.pipeline.stages.values():
        stage.sync_shared = lambda n: None
    run_row(job, step)


@torch.no_grad()
def copy_starts_elsewhere(job: Job, step: TrainStep) -> None:
    for part in job.parts().values():
        if part.part.is_last and not part.part.is_first:
            weight = part.module.get_parameter("head.weight")
            box = tuple(slice(0, size) for size in weight.shape)
            weight.copy_(normal_shard(job.config.train.seed + 1, "embed.weight", weight.shape, std=0.02, index=box))


# ---- stages, loss and norm


def swap_chunks(job: Job, step: TrainStep) -> None:
    """What stage 1 gives goes to stage 3's layers, and on to stage 2's."""
    ours, theirs = (step.pipeline.stages[number] for number in sorted(step.pipeline.stages))
    ours._module, theirs._module = theirs._module, ours._module
    ours._is_last, theirs._is_last = theirs._is_last, ours._is_last
    run_row(job, step)


def hand_over_the_previous(job: Job, step: TrainStep) -> None:
    """Where one rank has two neighbouring stages, the second is handed the micro-batch before."""
    live = step._executor._live
    real, last = live.pass_output, {}

    def pass_output(key: tuple[int, int], y: Tensor, *, is_next_local: bool) -> None:
        given = last.get(key[0], y) if is_next_local else y
        last[key[0]] = y
        real(key, given, is_next_local=is_next_local)

    live.pass_output = pass_output  # type: ignore[method-assign]


def layer_of_another_stage(job: Job, step: TrainStep) -> None:
    """Layers are counted from one too low: stage 1 has stage 0's layer again."""
    for part in job.parts().values():
        part.module.blocks = nn.ModuleDict({"0": part.module.blocks["1"]})
        initialize(part.named_parameters(), job.family, run_facts(job.config))


def run_layer_twice(job: Job, step: TrainStep) -> None:
    for part in job.parts().values():
        part.module.blocks["again"] = part.module.blocks["1"]


def loss_on_every_rank(job: Job, real: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    def accumulate(number: int) -> Tensor:
        loss = real(number).double()
        dist.all_reduce(loss)
        return loss / job.axes.data_parallel()

    return accumulate


def targets_of_the_next(job: Job, step: TrainStep) -> None:
    """The last stage reads the targets of another micro-batch."""
    num, [stage] = job.config.train.num_microbatches, step.pipeline.stages.values()
    real = stage.forward
    stage.forward = lambda m, x: real((m + 1) % num, x)
    run_row(job, step)


norm_with_copies = wrapping("step._counted", lambda job, real: list(job.model.parameters()))


def free_input_early(row: Row) -> Row:
    """Right after the forward, while the backward is still to come."""
    [freed] = [action for action in row if str(action) == "1FREE_IN1"]
    row.remove(freed)
    at = 1 + next(i for i, action in enumerate(row) if str(action) == "1F1")
    return [*row[:at], freed, *row[at:]]


FOUR = ("train.num_microbatches=4", "train.global_batch=8")
PIPE = ("mesh.pp=2", *FOUR)
LONG = ("mesh.pp=4", "model.num_layers=4", *FOUR)
TIED = "model.tie_embeddings=true"
SPLIT = "pipeline.schedule=zb-h1"
SHARDED = (*PIPE, "mesh.dp_shard=2")
GPIPE = (*PIPE, "pipeline.schedule=f-then-b")
VEE = (*PIPE, "pipeline.schedule=zb-v", "model.num_layers=4")
UP = "blocks.1.ffn.up.weight"
"""Of stage 1 in `PIPE`."""
UP_0 = "blocks.0.ffn.up.weight"

PIPELINE_FAULTS: dict[str, Fault] = {
    "two micro-batches are swapped on the way to stage 1": Fault(rows(swap_microbatches(K.FORWARD, K.SEND_FORWARD,
        K.FREE_OUTPUT), pp=0), PIPE, ("rank 0 read", "with micro-batches in a different order"), UP),
    "a W is lost": Fault(rows(without("1W1"), pp=1), (*PIPE, SPLIT), ("micro-batch 1 is missing on stage 1 (pp rank 1)",
        "deferred weight gradients", "1W1"), UP),
    "a W is run twice": Fault(rows(repeat("1F1", "1I1", "1W1"), pp=1), (*PIPE, SPLIT),
        ("micro-batch 1 counted twice on stage 1",), UP),
    "a micro-batch counts twice on one stage": Fault(rows(repeat("0F1", "0B1"), pp=0), PIPE,
        ("micro-batch 1 counted twice on stage 0 (pp rank 0)", "0B1 ran twice"), UP_0),
    "the last micro-batch's backward is skipped": Fault(rows(without("0B3"), pp=0), PIPE,
        ("micro-batch 3 is missing on stage 0 (pp rank 0)", "0B3"), UP_0),
    "a gradient is lost on the way from stage 2 to stage 1": Fault(channel(SendsZeros, K.SEND_BACKWARD, pp=2, number=2),
        LONG, ("micro-batch 2 is missing on stages 0 and 1 (pp ranks 0 and 1)", "from stage 2 to stage 1"), UP_0),
    "a gradient is sent twice and the next one never": Fault(channel(SendsThePrevious, K.SEND_BACKWARD, pp=1, number=2),
        PIPE, ("micro-batch 2 has the value of micro-batch 1",
        "the gradient that stage 0 (pp rank 0) receives is not what", "1SEND_B and 0RECV_B"), UP_0),
    "a stage gets the gradients of other micro-batches": Fault(rows(swap_microbatches(K.RECV_BACKWARD, K.BACKWARD,
        K.FREE_GRADIENT), pp=0), GPIPE, ("micro-batch 0 has the value of micro-batch 1",
        "the gradient that stage 0 (pp rank 0) receives is not what", "1SEND_B and 0RECV_B"), UP_0),
    "an input's buffer is stale": Fault(channel(LeavesSlotStale, K.SEND_FORWARD, pp=1, number=3), PIPE,
        ("stage 1 (pp rank 1) receives",), UP),
    "inputs are overwritten before their backward": Fault(rows(one_slot(K.RECV_FORWARD), pp=1), (*GPIPE,
        "recompute.policy=full"), ("the gradient of the output of blocks.1.ffn.up",
        "look at the backward between them"), "blocks.1.attention.wq.weight"),
    "shared gradients are not added up": Fault(no_sync, (*PIPE, TIED), ("the sum over pp is missing",
        "a shared parameter needs the sum of its gradients on stages 0 and 1"), "embed.weight"),
    "shared gradients are not added up, on one rank": Fault(no_sync, (*VEE, TIED), (), "embed.weight"),
    "a copy of the tied embedding starts elsewhere": Fault(copy_starts_elsewhere, (*PIPE, TIED),
        ("initial weights differ on rank 1",), "embed.weight"),
    "a stage is not reduced": Fault(rows(without("1REDUCE"), pp=1), (*SHARDED, SPLIT), ("no gradient",
        "stage 1 (pp rank 1)"), UP),
    "a stage is reduced before its last W": Fault(rows(reduce_before_last_weights, pp=1), (*SHARDED, SPLIT),
        ("micro-batch 3 is missing on stage 1",), UP),
    "one rank of a stage loses a W": Fault(on_rank(3, rows(without("1W2"), pp=1)), (*SHARDED, SPLIT),
        ("for data-parallel rank 1 (ranks 1 and 3), micro-batch 2 is missing on stage 1 (pp rank 1)",), UP),
    "one stage is not summed over its ranks": Fault(on_stage(1, drop_reduce_scatter), SHARDED,
        ("the sum over dp_shard is missing", "on stage 1 (pp rank 1)"), UP),
    "a stage's backward is cut off": Fault(on_stage(0,
        after_backward(lambda job: [to_local(p.grad).zero_() for p in job.model.parameters()])), PIPE,
        ("zero on stage 0 (pp rank 0)", "no gradient reached"), UP_0),
    "every rank counts the loss": Fault(wrapping("step.accumulate", loss_on_every_rank), PIPE, ("2.000 × the reference",
        "summed over pp (2 ranks)")),
    "the last stage reads another micro-batch's targets": Fault(on_stage(1, targets_of_the_next), PIPE,
        ("with micro-batches in a different order", "rank 1 read"), UP),
    "the norm leaves out a stage": Fault(on_stage(1, wrapping("step._counted", lambda job, real: [])), SHARDED,
        ("left out of the norm", "the shards of ranks 2 and 3 (pp = 1)")),
    "the norm counts both copies of the tied embedding": Fault(norm_with_copies, (*PIPE, TIED), ("counted pp (2) times",
        "embed.weight")),
    "chunks of a rank are exchanged": Fault(on_stage(1, swap_chunks), VEE, ("what stage 3 (pp rank 0) receives",), UP),
    "the next chunk is handed another micro-batch": Fault(hand_over_the_previous, VEE,
        ("1 has the value of micro-batch 0", "stage 2 (pp rank 1) receives"), UP),
    "a stage has another stage's layer": Fault(on_stage(1, layer_of_another_stage), PIPE,
        ("in the reference but not in the layout", "blocks.1")),
    "a layer runs twice": Fault(on_stage(1, run_layer_twice), PIPE, ("the input of norm",), UP),
}  # fmt: skip

LOUD_FAULTS: dict[str, Fault] = {
    "an input is freed before its backward": Fault(rows(free_input_early, pp=1), (*GPIPE, "pipeline.poison=true"),
        ("modified", "inplace")),
}  # fmt: skip
"""Faults that end the step: autograd sees that what it saved was poisoned."""
