"""Receive buffers over many steps and between ranks: fixed addresses, outputs that don't fit, and mismatched tables."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm.collectives import open_channels
from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import RECVS, ActionKind
from meshwright.pipeline.execute import Executor, channel_keys
from meshwright.pipeline.generate import ScheduleKind, generate
from meshwright.pipeline.lower import LowerOptions, lower, num_slots
from meshwright.pipeline.receive_buffers import ReceiveBuffers, TensorSpec

SHAPE = (2, 3)
OPEN_S = 300  # until ranks have met: nothing here waits for it
EDGE = TensorSpec(SHAPE, torch.float64)
CPU = torch.device("cpu")


def buffers_of(table, rank, **options):
    return ReceiveBuffers(
        table, rank=rank, edges=dict.fromkeys(range(table.num_stages - 1), EDGE), device=CPU, **options
    )


def receives_of(table, rank):
    return [part for action in table.actions[rank] for part in action.parts() if part.kind in RECVS]


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_what_is_alive_at_once_never_shares_memory(kind, release):
    """Along each row: from a receive to its free nothing else is received into its memory."""
    table = lower(generate(kind, num_stages=4, num_microbatches=8), LowerOptions(release=release))
    filled = {ActionKind.FREE_INPUT: ActionKind.RECV_FORWARD, ActionKind.FREE_GRADIENT: ActionKind.RECV_BACKWARD}
    for rank in range(table.num_ranks):
        buffers, alive, most = buffers_of(table, rank), {}, 0
        for action in table.actions[rank]:
            for part in action.parts():
                if part.kind in RECVS:
                    address = buffers.view(part).data_ptr()
                    assert address not in alive.values(), part
                    alive[part.kind, part.stage, part.microbatch] = address
                    most = max(most, len(alive))
                elif part.kind in filled:
                    del alive[filled[part.kind], part.stage, part.microbatch]
        assert not alive and most <= sum(num_slots(table, rank).values()) == buffers.num_bytes() // EDGE.num_bytes()


def test_one_slot_serves_edges_of_different_shapes():
    """A rank with two stages may receive two shapes: a slot is as large as the larger, and views have their own."""
    table = lower(generate("interleaved", num_stages=2, num_microbatches=4, num_chunks=2))
    edges = {stage: TensorSpec((2, 3 + stage), torch.float32) for stage in range(3)}
    buffers = ReceiveBuffers(table, rank=1, edges=edges, device=CPU)
    for receive in receives_of(table, 1):
        stage = receive.stage - 1 if receive.kind is ActionKind.RECV_FORWARD else receive.stage
        assert tuple(buffers.view(receive).shape) == edges[stage].shape and buffers.view(receive).is_contiguous()


def test_poison_shows_and_what_lies_in_a_slot_is_copied_before_it_goes_on():
    table = lower(generate("1f1b", num_stages=3, num_microbatches=6))
    buffers = buffers_of(table, 1, poison=True)
    view = buffers.view(receives_of(table, 1)[0]).fill_(2.0)
    for inside in (view, view.detach(), view[1:], view.view(3, 2)):
        copy = buffers.copy_if_slot(inside)
        assert copy.untyped_storage().data_ptr() != view.untyped_storage().data_ptr() and torch.equal(copy, inside)
    other = view.clone()
    assert buffers.copy_if_slot(other) is other
    buffers.free(view)
    assert view.isnan().all()


class Scales:
    """A stage on a rank: times its weight; on the last one the sum."""

    weight_gradients = None
    overlaps = False

    def __init__(self, *, is_first, is_last, shape=SHAPE, dtype=torch.float64):
        self.is_first, self.is_last, self.shape, self.dtype = is_first, is_last, shape, dtype
        self.weight = torch.tensor(2.0 + is_last, dtype=torch.float64, requires_grad=True)
        self.addresses = []

    def forward(self, microbatch, x):
        if x is None:
            x = torch.full(self.shape, float(microbatch + 1), dtype=self.dtype)
        else:
            self.addresses.append(x.data_ptr())
        y = (x * self.weight).to(self.dtype)
        return y.square().sum() if self.is_last else y

    def before_backward(self, *, reduces):
        pass


def executor_on_gang(rank, *, num_steps=1, shape=SHAPE, dtype=torch.float64, poison=False):
    """A rank of two with one stage each: its gradient after each step, and where its inputs were."""
    table = lower(generate("f-then-b", num_stages=2, num_microbatches=5))
    keys = channel_keys(table)
    channels = dict(zip(keys, open_channels([key[:2] for key in keys], rank=rank, timeout_s=OPEN_S), strict=True))
    stage = Scales(is_first=rank == 0, is_last=rank == 1, shape=shape if rank == 0 else SHAPE, dtype=dtype)
    buffers = buffers_of(table, rank, poison=poison)
    executor = Executor(table, rank=rank, stages={rank: stage}, channels=channels, buffers=buffers)
    gradients = []
    for _ in range(num_steps):
        executor.run()
        gradients.append(stage.weight.grad.item())
        stage.weight.grad = None
    return gradients, stage.addresses


def run_steps(rank, world_size, poison):
    return executor_on_gang(rank, num_steps=3, poison=poison)


@pytest.mark.parametrize("poison", [False, True])
def test_addresses_are_the_same_in_every_step(gang, poison):
    (first, _), (last, addresses) = gang(2).run(run_steps, poison)
    squares = 6 * sum(m * m for m in range(1, 6))  # Σ x², where the loss is Σ (2 · 3 · x)²
    assert first == [2 * 2 * 9 * squares] * 3 and last == [2 * 3 * 4 * squares] * 3
    steps = [addresses[at : at + 5] for at in (0, 5, 10)]
    assert steps[0] == steps[1] == steps[2] and len(set(addresses)) == 5


def give_misfit(rank, world_size, shape, dtype):
    """Rank 0's stage gives what rank 1's does not take; rank 1 would wait for it."""
    if rank == 1:
        keys = channel_keys(lower(generate("f-then-b", num_stages=2, num_microbatches=5)))
        open_channels([key[:2] for key in keys], rank=rank, timeout_s=OPEN_S)
        return None
    with pytest.raises(ScheduleError) as caught:
        executor_on_gang(rank, shape=shape, dtype=dtype)
    return caught.value.what, caught.value.where, caught.value.fix


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [((2, 4), torch.float64, "[2, 4] float64"), ((2, 3), torch.float32, "[2, 3] float32"),
     ((3, 2), torch.float64, "[3, 2] float64"), ((2, 3, 1), torch.float64, "[2, 3, 1] float64")],
)  # fmt: skip
def test_an_output_that_does_not_fit_is_not_sent(gang, shape, dtype, words):
    what, where, fix = gang(2).run(give_misfit, shape, dtype)[0]
    assert what == f"stage 0 outputs {words}, but stage 1 expects [2, 3] float64"
    assert where == "edge from stage 0 to stage 1" and "[2, 3] float64" in fix
