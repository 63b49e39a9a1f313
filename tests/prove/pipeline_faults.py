"""Seeded faults of pipelines: micro-batches, buffers, shared gradients and stages that go astray on real ranks.

As in `seeded_faults`; most damage one rank's row of the table, or a channel, and let the executor run that.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from meshwright.config.facts_for_family import run_facts
from meshwright.mesh.local_shards import to_local
from meshwright.nn.weight_init import normal_shard
from meshwright.parallel import pipeline_shared_gradients
from meshwright.pipeline.actions import ActionKind as K
from meshwright.train.build_job import initialize
from tests.prove.seeded_faults import (
    Fault,
    after_backward,
    drop_reduce_scatter,
    giving,
    on_axis,
    on_rank,
    replacing,
    run_row,
    taking,
    wrapping,
)


def rows(change, *, pp):
    """One rank of the pipeline runs a damaged row, of actions that do one thing each."""

    def tamper(job, step):
        run_row(job, step, change([part for action in job.schedule.actions[pp] for part in action.parts()]))

    return on_axis("pp", pp, tamper)


def without(name):
    return lambda row: [action for action in row if str(action) != name]


def actions(*kinds, **fields):
    """These kinds of actions get other fields, by their own: `microbatch=` or `slot=`."""
    return lambda row: [
        a._replace(**{name: value(getattr(a, name)) for name, value in fields.items()}) if a.kind in kinds else a
        for a in row
    ]


def exchanged(microbatch):
    """0 for 1 and 1 for 0."""
    return {0: 1, 1: 0}.get(microbatch, microbatch)


def repeat(*names):
    """After the last of these actions, all of them once more."""

    def change(row):
        at = max(i for i, action in enumerate(row) if str(action) in names) + 1
        again = [next(action for action in row if str(action) == name) for name in names]
        return [*row[:at], *again, *row[at:]]

    return change


def move(name, before):
    """One action is run right before the last one of another name."""

    def change(row):
        [moved] = [action for action in row if str(action) == name]
        row.remove(moved)
        at = max(i for i, action in enumerate(row) if str(action) == before)
        return [*row[:at], moved, *row[at:]]

    return change


# ---- what goes over the channels


def once(number, change):
    """Change the argument of call `number`, from 0, by itself and that of the call before."""

    def wrap(job, real):
        seen = []

        def call(x):
            seen.append(x.clone())
            return real(change(x, *seen[-2:-1]) if len(seen) == number + 1 else x)

        return call

    return wrap


def channel(kind, *, pp, number, send=None, receive=None):
    """Change what is sent in a transfer, or where it is received, on a rank's only channel of this kind."""

    def tamper(job, step):
        end, change = ("receive", receive) if send is None else ("send", send)
        channels = dict(step.pipeline._channels)
        [key] = [key for key in channels if key[2] is kind and key[end == "receive"] == pp]
        damaged = once(number, change)(job, getattr(channels[key], end))
        step.pipeline._channels = {**channels, key: SimpleNamespace(**{end: damaged})}
        run_row(job, step)

    return on_axis("pp", pp, tamper)


# ---- shared parameters, stages, loss and norm


def sync_times(times):
    """Gradients of shared parameters are summed so often."""
    return wrapping("step.pipeline.shared.sync", lambda job, real: lambda number: [real(number) for _ in range(times)])


@torch.no_grad()
def head_starts_elsewhere(job, step):
    for part in job.parts().values():
        if part.part.is_last and not part.part.is_first:
            weight = part.module.get_parameter("head.weight")
            box = tuple(slice(0, size) for size in weight.shape)
            weight.copy_(normal_shard(job.config.train.seed + 1, "embed.weight", weight.shape, std=0.02, index=box))


def swap_chunks(job, step):
    """What stage 1 gives goes to stage 3's layers, and on to stage 2's."""
    ours, theirs = (step.pipeline.stages[number] for number in sorted(step.pipeline.stages))
    ours._module, theirs._module = theirs._module, ours._module
    ours._is_last, theirs._is_last = theirs._is_last, ours._is_last
    run_row(job, step)


def hand_over_the_previous(job, real):
    """Where one rank has two neighbouring stages, the second is handed the micro-batch before."""
    last = {}

    def pass_output(key, y, *, is_next_local):
        given = last.get(key[0], y) if is_next_local else y
        last[key[0]] = y
        real(key, given, is_next_local=is_next_local)

    return pass_output


def layer_of_another_stage(job, step):
    """Layers are counted from one too low: stage 1 has stage 0's layer again."""
    for part in job.parts().values():
        part.module.blocks = nn.ModuleDict({"0": part.module.blocks["1"]})
        initialize(part.named_parameters(), job.family, run_facts(job.config))


def run_layer_twice(job, step):
    for part in job.parts().values():
        part.module.blocks["again"] = part.module.blocks["1"]


def summed_over_all(job, loss):
    """Every rank counts the loss."""
    total = loss.double()
    dist.all_reduce(total)
    return total / job.axes.data_parallel()


def targets_of_the_next(job, step):
    """The last stage reads the targets of another micro-batch."""
    num, [stage] = job.config.train.num_microbatches, step.pipeline.stages.values()
    stage.forward = taking(lambda job, m, x: ((m + 1) % num, x))(job, stage.forward)
    run_row(job, step)


norm_with_copies = wrapping("step._counted", lambda job, real: list(job.model.parameters()))

# ---- the sum over copies of shared parameters; all come after the start-up check of what ranks declare and hold

SYNC = "step.pipeline.shared.sync"


def scale_sum(factor):
    """Scale the sum."""

    def change(job, real):
        def sync(number):
            real(number)
            for copy in (copy for copies in real.__self__._groups[number].copies.values() for copy in copies):
                to_local(copy.grad).mul_(factor(job))

        return sync

    return wrapping(SYNC, change)


average_over_ranks = scale_sum(lambda job: 1 / job.axes.pp)


def rank_1_differs(key, *, adds_zeros):
    """Rank 1 is in the sum, but adds zeros for a key, or its copies of the key don't get the result."""

    def change(job, real):
        def sync(number):
            mine = [to_local(copy.grad) for copy in real.__self__._groups[number].copies.get(key, [])]
            kept = [gradient.clone() for gradient in mine]
            if adds_zeros:
                torch._foreach_zero_(mine)
            real(number)
            if not adds_zeros:
                torch._foreach_copy_(mine, kept)

        return sync

    return on_axis("pp", 1, wrapping(SYNC, change))


def exchange(first, second):
    """Two keys of one shape have each other's place in the flat buffer."""

    def tamper(job, step):
        for group in step.pipeline.shared._groups:
            if {first, second} <= group.copies.keys():
                order = {first: second, second: first}
                exchanged = {key: group.copies[order.get(key, key)] for key in group.copies}
                group.copies.clear()
                group.copies.update(exchanged)

    return tamper


leave_out_chunks = replacing(pipeline_shared_gradients, "_sum", lambda job, real: lambda copies: copies[0].clone())
"""Of a rank's copies only the first enters the sum."""
hand_out_to_the_first = replacing(pipeline_shared_gradients, "_scatter_to_copies",
    taking(lambda job, flat, values: (flat, [copies[:1] for copies in values])))  # fmt: skip
"""Of a rank's copies only the first gets the sum."""


@torch.no_grad()
def copy_starts_elsewhere(job, step):
    last = list(job.parts().values())[-1]
    to_local(last.module.get_parameter("label_embed.weight")).add_(0.01)


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
    "two micro-batches are swapped on the way to stage 1": Fault(rows(actions(K.FORWARD, K.SEND_FORWARD, K.FREE_OUTPUT,
        microbatch=exchanged), pp=0), PIPE, ("rank 0 read", "with micro-batches in a different order"), UP),
    "a W is lost": Fault(rows(without("1W1"), pp=1), (*PIPE, SPLIT), ("micro-batch 1 is missing on stage 1 (pp rank 1)",
        "deferred weight gradients", "1W1"), UP),
    "a W is run twice": Fault(rows(repeat("1F1", "1I1", "1W1"), pp=1), (*PIPE, SPLIT),
        ("micro-batch 1 counted twice on stage 1",), UP),
    "a micro-batch counts twice on one stage": Fault(rows(repeat("0F1", "0B1"), pp=0), PIPE,
        ("micro-batch 1 counted twice on stage 0 (pp rank 0)", "0B1 ran twice"), UP_0),
    "the last micro-batch's backward is skipped": Fault(rows(without("0B3"), pp=0), PIPE,
        ("micro-batch 3 is missing on stage 0 (pp rank 0)", "0B3"), UP_0),
    "a gradient is lost on the way from stage 2 to stage 1": Fault(channel(K.SEND_BACKWARD, pp=2, number=2,
        send=lambda x, last: 0.0 * x), LONG, ("micro-batch 2 is missing on stages 0 and 1 (pp ranks 0 and 1)",
        "from stage 2 to stage 1"), UP_0),
    "a gradient is sent twice and the next one never": Fault(channel(K.SEND_BACKWARD, pp=1, number=2,
        send=lambda x, last: last), PIPE, ("micro-batch 2 has the value of micro-batch 1",
        "the gradient that stage 0 (pp rank 0) receives is not what", "1SEND_B and 0RECV_B"), UP_0),
    "a stage gets the gradients of other micro-batches": Fault(rows(actions(K.RECV_BACKWARD, K.BACKWARD,
        K.FREE_GRADIENT, microbatch=exchanged), pp=0), GPIPE, ("micro-batch 0 has the value of micro-batch 1",
        "the gradient that stage 0 (pp rank 0) receives is not what", "1SEND_B and 0RECV_B"), UP_0),
    "an input's buffer is stale": Fault(channel(K.SEND_FORWARD, pp=1, number=3, receive=lambda x,
        last: torch.empty_like(x)), PIPE, ("stage 1 (pp rank 1) receives",), UP),
    "inputs are overwritten before their backward": Fault(rows(actions(K.RECV_FORWARD, slot=lambda slot: 0), pp=1),
        (*GPIPE, "recompute.policy=full"), ("the gradient of the output of blocks.1.ffn.up",
        "look at the backward between them"), "blocks.1.attention.wq.weight"),
    "shared gradients are not added up": Fault(sync_times(0), (*PIPE, TIED), ("the sum over pp is missing",
        "a shared parameter needs the sum of its gradients on stages 0 and 1"), "embed.weight"),
    "shared gradients are not added up, on one rank": Fault(sync_times(0), (*VEE, TIED), (), "embed.weight"),
    "a copy of the tied embedding starts elsewhere": Fault(head_starts_elsewhere, (*PIPE, TIED),
        ("initial weights differ on rank 1",), "embed.weight"),
    "a stage is not reduced": Fault(rows(without("1REDUCE"), pp=1), (*SHARDED, SPLIT), ("no gradient",
        "stage 1 (pp rank 1)"), UP),
    "a stage is reduced before its last W": Fault(rows(move("1REDUCE", before="1W3"), pp=1), (*SHARDED, SPLIT),
        ("micro-batch 3 is missing on stage 1",), UP),
    "one rank of a stage loses a W": Fault(on_rank(3, rows(without("1W2"), pp=1)), (*SHARDED, SPLIT),
        ("for data-parallel rank 1 (ranks 1 and 3), micro-batch 2 is missing on stage 1 (pp rank 1)",), UP),
    "one stage is not summed over its ranks": Fault(on_axis("pp", 1, drop_reduce_scatter), SHARDED,
        ("the sum over dp_shard is missing", "on stage 1 (pp rank 1)"), UP),
    "a stage's backward is cut off": Fault(on_axis("pp", 0, after_backward(lambda job: [to_local(p.grad).zero_(
        ) for p in job.model.parameters()])), PIPE, ("zero on stage 0 (pp rank 0)", "no gradient reached"), UP_0),
    "every rank counts the loss": Fault(wrapping("step.accumulate", giving(summed_over_all)), PIPE,
        ("2.000 × the reference", "summed over pp (2 ranks)")),
    "the last stage reads another micro-batch's targets": Fault(on_axis("pp", 1, targets_of_the_next), PIPE,
        ("with micro-batches in a different order", "rank 1 read"), UP),
    "the norm leaves out a stage": Fault(on_axis("pp", 1, wrapping("step._counted", lambda job, real: [])), SHARDED,
        ("left out of the norm", "the shards of ranks 2 and 3 (pp = 1)")),
    "the norm counts both copies of the tied embedding": Fault(norm_with_copies, (*PIPE, TIED), ("counted pp (2) times",
        "embed.weight")),
    "chunks of a rank are exchanged": Fault(on_axis("pp", 1, swap_chunks), VEE, ("what stage 3 (pp rank 0) receives",),
        UP),
    "the next chunk is handed another micro-batch": Fault(wrapping("step._executor._live.pass_output",
        hand_over_the_previous), VEE, ("1 has the value of micro-batch 0", "stage 2 (pp rank 1) receives"), UP),
    "a stage has another stage's layer": Fault(on_axis("pp", 1, layer_of_another_stage), PIPE,
        ("in the reference but not in the layout", "blocks.1")),
    "a layer runs twice": Fault(on_axis("pp", 1, run_layer_twice), PIPE, ("the input of norm",), UP),
}  # fmt: skip

LOUD_FAULTS: dict[str, Fault] = {
    "an input is freed before its backward": Fault(rows(move("1FREE_IN1", before="1F2"), pp=1), (*GPIPE,
        "pipeline.poison=true"), ("modified", "inplace")),
}  # fmt: skip
"""Faults that end the step: autograd sees that what it saved was poisoned."""

DIT = ("dit-digits", "mesh.pp=2", "pipeline.chunks=2", "model.num_layers=4", *FOUR)
DIT_SHARDED = (*DIT, "mesh.dp_shard=2")
DIT_4 = ("dit-digits", "mesh.pp=4", "model.num_layers=4", *FOUR)
DIT_1 = ("dit-digits", "pipeline.chunks=2", "model.num_layers=3", *FOUR)
LLAMA_TIED = ("llama-tiny", "mesh.pp=2", "model.num_layers=2", *FOUR)
LABELS, BIAS_1, BIAS_2 = "label_embed.weight", "time_embed.fc1.bias", "time_embed.fc2.bias"
EMBED = "embed.weight"
BOTH_SUMS = "the sum over pp and over the chunks of a rank is missing"
COPIES_COUNTED = "shared parameters, once per stage that holds a copy"
DUE = "a shared parameter needs the sum of its gradients on stages 0, 1, 2 and 3"

SHARED_FAULTS: dict[str, Fault] = {
    "off": Fault(sync_times(0), DIT, (BOTH_SUMS, DUE, "only the contribution of its own first stage"), LABELS),
    "off, pp 4": Fault(sync_times(0), DIT_4, ("the sum over pp is missing", DUE), BIAS_2),
    "off, one process": Fault(sync_times(0), DIT_1, ("the sum over the chunks of a rank is missing",), LABELS),
    "twice": Fault(sync_times(2), DIT, ("4.000 × the reference", "summed twice over its 4 copies", DUE), LABELS),
    "twice, tied": Fault(sync_times(2), LLAMA_TIED, ("2.000 × the reference", "summed over pp (2 ranks)"), EMBED),
    "averaged over ranks": Fault(average_over_ranks, DIT, ("0.500 × the reference",
        "averaged over pp (2 ranks) instead of summed"), LABELS),
    "averaged over copies": Fault(scale_sum(lambda job: 1 / job.schedule.num_stages), DIT, ("0.250 × the reference",
        "averaged over its 4 copies instead of summed"), LABELS),
    "averaged, pp 4": Fault(average_over_ranks, DIT_4, ("0.250 × the reference",
        "averaged over pp (4 ranks) instead of summed"), LABELS),
    "a key is missing on rank 1": Fault(rank_1_differs(LABELS, adds_zeros=True), DIT, ("label_embed.weight",
        "the contributions of stages 1 and 3 (pp rank 1) are missing", "do not enter the sum over pp"), LABELS),
    "rank 1 does not get a key's sum": Fault(rank_1_differs(LABELS, adds_zeros=False), DIT,
        ("rank 1 holds only the contribution of stage 1 (pp rank 1)",), LABELS),
    "rank 1 does not get a key's sum, sharded": Fault(rank_1_differs(LABELS, adds_zeros=False), DIT_SHARDED,
        ("ranks 2 and 3 hold only the contribution of stage 1 (pp rank 1)", "the sum over pp"), LABELS),
    "two keys are exchanged on rank 1": Fault(on_axis("pp", 1, exchange(BIAS_1, BIAS_2)), DIT,
        ("contributions of time_embed.fc2.bias replace its own", "pp ranks 0 and 1 reduce", "in different orders"),
        BIAS_1),
    "chunks are not added up": Fault(leave_out_chunks, DIT, ("the contributions of stages 2 and 3",
        "the sum over the chunks of a rank is missing"), LABELS),
    "chunks are not added up, one process": Fault(leave_out_chunks, DIT_1,
        ("the sum over the chunks of a rank is missing",), LABELS),
    "the second chunk does not get the sum": Fault(hand_out_to_the_first, DIT, ("time_embed.fc2.bias",
        "on stages 0 and 2 of rank 0", "including several copies on one rank")),
    "the second chunk does not get the sum, one process": Fault(hand_out_to_the_first, DIT_1, ("time_embed.fc2.bias",
        "on stages 0 and 1 of rank 0 differ")),
    "the second chunk starts elsewhere": Fault(on_axis("pp", 1, copy_starts_elsewhere), DIT,
        ("initial weight: the copies of label_embed.weight on stages 1 and 3 of rank 1 differ", "all copies", "start")),
    "the norm counts copies": Fault(norm_with_copies, DIT, ("counted 4 times", COPIES_COUNTED)),
    "the norm counts copies, one process": Fault(norm_with_copies, DIT_1, ("counted 2 times", COPIES_COUNTED)),
    "the norm counts copies, pp 4": Fault(norm_with_copies, DIT_4, ("counted pp (4) times",)),
}  # fmt: skip
