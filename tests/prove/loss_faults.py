"""Seeded faults of head and loss by chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate

from meshwright.features.head_loss import apply
from meshwright.train.build_job import Job
from tests.prove.seeded_faults import SHARD2, TENSOR2, Fault, replacing

CHUNKS = "train.loss_chunk=20"
NUM_CHUNKS = 4
"""Chunks of a micro-batch of 4 samples of 16 tokens."""


def leaving_out(chunk: int) -> Callable[[Job, Any], Any]:
    """One chunk of each micro-batch adds nothing."""

    def change(job: Job, real: Any) -> Any:
        numbers = count()

        def loss(logits: Tensor, *args: Any) -> Tensor:
            found = real(logits, *args)
            if next(numbers) % NUM_CHUNKS == chunk:
                logits.zero_()
                found = found * 0
            return found

        return loss

    return change


def as_a_full_one(job: Job, real: Any) -> Any:
    """The last chunk, of 4 tokens, counts as much as one of 20."""

    def loss(logits: Tensor, targets: Tensor, *args: Any) -> Tensor:
        found: Tensor = real(logits, targets, *args)
        share = 20 / len(targets)
        logits.mul_(share)
        return found * share

    return loss


def scaled_by_the_number(job: Job, real: Any) -> Any:
    def loss(logits: Tensor, *args: Any) -> Tensor:
        found: Tensor = real(logits, *args)
        logits.mul_(NUM_CHUNKS)
        return found

    return loss


LEFT_OUT = "the loss by chunks of tokens (train.loss_chunk) leaves them out"
REPLACED = (apply,)
LOSS_FAULTS: dict[str, Fault] = {
    "a chunk is left out": Fault(replacing(apply, "cross_entropy_", leaving_out(1)), (*SHARD2, CHUNKS),
        ("of the head's loss, chunk 1 is missing", LEFT_OUT), "head.weight"),
    "the last chunk is left out": Fault(replacing(apply, "cross_entropy_", leaving_out(3)), (*SHARD2, CHUNKS),
        ("of the head's loss, chunk 3 is missing", LEFT_OUT), "head.weight"),
    "the last chunk counts as a full one": Fault(replacing(apply, "cross_entropy_", as_a_full_one), (*SHARD2, CHUNKS),
        ("of the head's loss, chunk 3 counted 5 times", LEFT_OUT), "head.weight"),
    "gradients are multiplied by the number of chunks": Fault(replacing(apply, "cross_entropy_", scaled_by_the_number),
        (*SHARD2, CHUNKS), ("4.000 × the reference", "multiplied by the 4 chunks of its loss")),
    "tp ranks keep their own sums": Fault(replacing(apply, "all_reduce_sum", lambda job, real:
        lambda x, group: x), (*TENSOR2, "train.loss_chunk=20"), ("loss",)),
    "tp ranks keep their own maxima": Fault(replacing(apply, "all_reduce_max", lambda job, real:
        lambda x, group: x), (*TENSOR2, "train.loss_chunk=20"), ("loss",)),
    "hidden states have the gradient of a rank's columns": Fault(
        replacing(apply, "Partial", lambda job, real: Replicate), (*TENSOR2, "train.loss_chunk=20"),
        ("in a pass without head and loss by chunks: check head and loss by chunks",), "norm.weight"),
    "padding counts": Fault(replacing(apply, "IGNORED_TARGET", lambda job, real: -1), (*SHARD2, CHUNKS,
        "data.packing=documents"), ("the loss is computed wrongly from them",)),
}  # fmt: skip
