"""Compressed gradients for any model under `DistributedDataParallel`, by its public communication hook.

[Note: buckets] DDP reduces buckets of gradients, and an error belongs to the parameters of its bucket, in their order.
After the first backward DDP orders its buckets anew, by the order in which gradients came; so errors are kept by the
numbers of the parameters, and those of buckets that are gone are dropped. The first step's are dropped without a word.

A run that goes on from a checkpoint starts with DDP's first buckets again, while its errors are those of later ones.
To go on with the same bits, its first backward holds gradients back until all are there, reduces them in the saved
buckets, and puts them back into DDP's; the second backward has them by itself.

[Note: streams] All is ordered on the stream that DDP calls the hook on, and the future is completed there at once: on
CUDA it records an event, for which DDP waits. With gloo the hook returns when the result is there, so communication
does not overlap with the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm.collectives import world_size
from meshwright.comm.compression.catalogue import EXACT, Method, Use, find_method
from meshwright.comm.compression.compressed_all_reduce import CompressedAllReduce
from meshwright.comm.compression.error_feedback_state import starting_with
from meshwright.comm.compression.fsdp_collectives import SentBytes
from meshwright.comm.compression.fsdp_compress import Compression
from meshwright.errors import LayoutError
from meshwright.log import get_logger

_log = get_logger(__name__)

Bucket = tuple[int, ...]
"""Numbers of the parameters in a bucket, in the bucket's order."""
_BUCKET = "parameters"
"""The name of a bucket in a state."""


def compress_ddp(model: DistributedDataParallel, *, gradients: str = "loco4") -> Compression:
    """Let DDP average the gradients of `model` in fewer bits.

    Call it before the first backward, and `commit` or `discard` of what it returns after every step.

    Args:
        model: wrapped, without a communication hook.
        gradients: a method of `catalogue.names(Use.GRADIENTS)`, such as loco4 (4 bits with error feedback).

    Raises:
        ConfigError: a name that there is not.
        LayoutError: `model` is not wrapped, or has a communication hook already.
    """
    method = find_method(gradients, Use.GRADIENTS)
    if not isinstance(model, DistributedDataParallel):
        raise _error(
            f"a {type(model).__name__} is not wrapped in DistributedDataParallel",
            "torch.nn.parallel.DistributedDataParallel(model) first, or compress(model) for FSDP2",
        )
    if gradients == EXACT:
        return Compression({}, {})
    reduction = BucketReduction(model, method)
    try:
        # A function without annotations, as DDP compares them with types, and this file's are strings.
        model.register_comm_hook(None, lambda state, bucket: reduction.reduce(bucket))
    except RuntimeError as error:
        raise _error(f"DDP takes no hook: {error}", "call compress_ddp once, before the first backward") from error
    return Compression({"ddp": reduction}, {})


class BucketReduction:
    """The all-reduces of a model's buckets."""

    def __init__(self, model: DistributedDataParallel, method: Method) -> None:
        self._group, self._method = model.process_group, method
        parameters = list(model.module.parameters())
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._sizes = [parameter.numel() for parameter in parameters]
        self._all_reduces: dict[Bucket, CompressedAllReduce] = {}
        self._gone = SentBytes()
        """What buckets that are gone have sent."""
        self._loss_scale: float | None = None
        self._num_backwards = 0
        self._is_restored = False
        self._errors_matter = False
        """Those in hand are not the first step's."""
        self._held: list[tuple[Bucket, Tensor, Future[Tensor]]] = []
        self._num_changed = 0
        """Buckets of this backward whose parameters had an error in others."""

    @property
    def sent(self) -> SentBytes:
        """Bytes that this rank has handed to others."""
        counts = [self._gone, *(comm.sent for comm in self._all_reduces.values())]
        return sum(counts, SentBytes())

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's hook: the mean of the bucket over the ranks, in place. [Note: buckets] [Note: streams]

        Raises:
            LayoutError: gradients are sparse.
        """
        gradients = bucket.buffer()
        if gradients.is_sparse:
            raise _error("a sparse gradient cannot be compressed", "torch.nn.Embedding(…, sparse=False)")
        future: Future[Tensor] = Future(devices=[gradients.device] if gradients.is_cuda else None)
        key = tuple(self._numbers[id(parameter)] for parameter in bucket.parameters())
        is_first_of_restored = self._is_restored and self._num_backwards == 0
        if is_first_of_restored and key not in self._all_reduces:
            self._held.append((key, gradients, future))
        else:
            self._mean(key, gradients)
            future.set_result(gradients)
        if bucket.is_last():
            self._end_backward()
        return future

    def commit(self) -> None:
        """The optimizer has taken the step: its errors are carried into the next."""
        for comm in self._all_reduces.values():
            comm.commit()

    def discard(self) -> None:
        """The step is skipped, for an overflow: its errors are forgotten."""
        for comm in self._all_reduces.values():
            comm.discard()

    def follow_loss_scale(self, loss_scale: float) -> None:
        """The next gradients are multiplied by `loss_scale`, and so are the errors of the last ones."""
        self._loss_scale = loss_scale
        for comm in self._all_reduces.values():
            comm.follow_loss_scale(loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        """The buckets, and the errors of this rank."""
        state = {}
        for number, (bucket, comm) in enumerate(self._all_reduces.items()):
            state[f"{number}.{_BUCKET}"] = torch.tensor(bucket)
            state |= {f"{number}.{key}": value for key, value in comm.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of this rank."""
        self._drop(list(self._all_reduces))
        self._loss_scale = None
        for number in count():
            own = starting_with(f"{number}.", state)
            if not own:
                break
            comm = self._new(tuple(own[_BUCKET].tolist()))
            comm.load_state_dict(own)
        self._is_restored = self._errors_matter = bool(state)

    def _mean(self, bucket: Bucket, gradients: Tensor) -> None:
        comm = self._all_reduces.get(bucket)
        if comm is None:
            changed = self._overlapping(bucket)
            self._num_changed += bool(changed)
            self._drop(changed)
            comm = self._new(bucket)
        comm(gradients, group=self._group, factor=1.0 / world_size(self._group))

    def _new(self, bucket: Bucket) -> CompressedAllReduce:
        method, name = self._method, f"DDP's bucket from parameter {bucket[0]}"
        comm = CompressedAllReduce(name, method.codec, rotate=method.rotate, feedback=method.feedback)
        if self._loss_scale is not None:
            comm.follow_loss_scale(self._loss_scale)
        self._all_reduces[bucket] = comm
        return comm

    def _drop(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            sent = self._all_reduces.pop(bucket).sent
            self._gone += sent

    def _overlapping(self, numbers: Iterable[int]) -> list[Bucket]:
        """The known buckets that have one of these parameters."""
        wanted = set(numbers)
        return [bucket for bucket in self._all_reduces if not wanted.isdisjoint(bucket)]

    def _end_backward(self) -> None:
        is_as_saved = self._reduce_held() if self._held else False
        if self._num_changed and self._method.feedback and self._errors_matter:
            _log.warning("the error feedback of %d buckets starts from zero: DDP has other ones now", self._num_changed)
        self._num_changed = 0
        self._num_backwards += 1
        self._errors_matter = is_as_saved or self._num_backwards > 1

    def _reduce_held(self) -> bool:
        """Reduce what was held back in the saved buckets, or in DDP's own if those do not fit; whether they do."""
        held, self._held = self._held, []
        parts: dict[int, Tensor] = {}
        for key, gradients, _ in held:
            parts.update(zip(key, self._split(key, gradients), strict=True))
        saved = self._overlapping(parts)
        is_as_saved = sorted(parts) == sorted(number for bucket in saved for number in bucket)
        if is_as_saved:
            for key in saved:
                gradients = torch.cat([parts[number] for number in key])
                self._mean(key, gradients)
                for number, part in zip(key, self._split(key, gradients), strict=True):
                    parts[number].copy_(part)
        else:
            for key, gradients, _ in held:
                self._mean(key, gradients)
        for _, gradients, future in held:
            future.set_result(gradients)
        return is_as_saved

    def _split(self, bucket: Bucket, gradients: Tensor) -> tuple[Tensor, ...]:
        """The part of each parameter, as it lies in memory."""
        parts: tuple[Tensor, ...] = gradients.split([self._sizes[n] for n in bucket])  # type: ignore[no-untyped-call]
        return parts


def _error(what: str, fix: str) -> LayoutError:
    rule = "DDP's communication hook compresses dense gradients, and it has one hook"
    return LayoutError(what, where="meshwright.comm.compress_ddp", rule=rule, fix=fix)
