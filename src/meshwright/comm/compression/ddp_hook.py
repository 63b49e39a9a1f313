"""Compressed gradients for any model under `DistributedDataParallel`, through its public communication hook.

[Note: buckets] DDP reduces gradients in buckets, and an error belongs to the parameters of its bucket, in bucket order.
After the first backward, DDP rebuilds its buckets in the order in which gradients became ready. Errors are therefore
keyed by parameter indices, and errors of dropped buckets are discarded, with a warning after the first step.

A resumed run starts with DDP's initial buckets again, while its saved errors belong to the rebuilt ones. For a bitwise
identical resume, the first backward holds gradients back until all are ready, reduces them in the saved buckets, and
copies them back into DDP's buckets. From the second backward on, DDP itself uses the saved buckets.

[Note: streams] All work runs on the stream on which DDP calls the hook, and the future is completed immediately: on
CUDA it records an event that DDP waits for. With gloo, the hook blocks until the result is ready, so communication
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
from meshwright.comm.compression.fsdp_collectives import (
    CompressedAllReduce,
    ErrorFeedback,
    Reduction,
    SentBytes,
    strip_prefix,
)  # fmt: skip
from meshwright.comm.compression.fsdp_compress import Compression
from meshwright.errors import LayoutError
from meshwright.log import get_logger

_log = get_logger(__name__)

Bucket = tuple[int, ...]
"""Indices of the parameters in a bucket, in bucket order."""
_BUCKET = "parameters"


def compress_ddp(model: DistributedDataParallel, *, gradients: str = "loco4") -> Compression:
    """Compress the gradients of `model`; call before the first backward, and `commit` or `discard` after every step.

    Args:
        gradients: a method of `catalogue.names(Use.GRADIENTS)`, such as loco4 (4 bits with error feedback).

    Raises:
        ConfigError: the method is unknown.
        LayoutError: `model` is not wrapped in DDP, or already has a communication hook.
    """
    method = find_method(gradients, Use.GRADIENTS)
    if not isinstance(model, DistributedDataParallel):
        raise _error(
            f"a {type(model).__name__} is not wrapped in DistributedDataParallel",
            "wrap it in torch.nn.parallel.DistributedDataParallel first, or call compress(model) for FSDP2",
        )
    if gradients == EXACT:
        return Compression({}, {})
    reduction = BucketReduction(model, method)
    try:
        # A lambda, because DDP checks the hook's annotations against types, and annotations are strings in this file.
        model.register_comm_hook(None, lambda state, bucket: reduction.reduce(bucket))
    except RuntimeError as error:
        raise _error(
            f"DDP rejected the communication hook: {error}", "call compress_ddp once, before the first backward"
        ) from error
    return Compression({"ddp": reduction}, {})


class BucketReduction(Reduction):
    """Compressed all-reduces of a DDP model's buckets."""

    def __init__(self, model: DistributedDataParallel, method: Method) -> None:
        self._group, self._method = model.process_group, method
        parameters = list(model.module.parameters())
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._sizes = [parameter.numel() for parameter in parameters]
        self._all_reduces: dict[Bucket, CompressedAllReduce] = {}
        self.sent = SentBytes()
        self._loss_scale: float | None = None
        self._num_backwards = 0
        self._is_restored = False
        self._has_prior_errors = False
        """True if the current errors come from more than the first step."""
        self._held: list[tuple[Bucket, Tensor, Future[Tensor]]] = []
        self._num_changed = 0
        """Number of buckets in this backward that replaced buckets with other parameters."""

    def parts(self) -> Mapping[str, ErrorFeedback]:
        return {f"{number}.": comm for number, comm in enumerate(self._all_reduces.values())}

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket over the ranks in place, when called by DDP. [Note: buckets] [Note: streams]

        Raises:
            LayoutError: the gradients are sparse.
        """
        gradients = bucket.buffer()
        if gradients.is_sparse:
            raise _error("sparse gradients cannot be compressed", "use torch.nn.Embedding(…, sparse=False)")
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

    def follow_loss_scale(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        super().follow_loss_scale(loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the buckets and this rank's errors."""
        state = {}
        for number, (bucket, comm) in enumerate(self._all_reduces.items()):
            state[f"{number}.{_BUCKET}"] = torch.tensor(bucket)
            state |= {f"{number}.{key}": value for key, value in comm.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._drop(list(self._all_reduces))
        self._loss_scale = None
        for number in count():
            saved = strip_prefix(f"{number}.", state)
            if not saved:
                break
            comm = self._new(tuple(saved[_BUCKET].tolist()))
            comm.load_state_dict(saved)
        self._is_restored = self._has_prior_errors = bool(state)

    def _mean(self, bucket: Bucket, gradients: Tensor) -> None:
        comm = self._all_reduces.get(bucket)
        if comm is None:
            changed = self._overlapping(bucket)
            self._num_changed += bool(changed)
            self._drop(changed)
            comm = self._new(bucket)
        comm(gradients, group=self._group, factor=1.0 / world_size(self._group))

    def _new(self, bucket: Bucket) -> CompressedAllReduce:
        comm = CompressedAllReduce(f"DDP's bucket from parameter {bucket[0]}", self._method)
        comm.sent = self.sent  # also of buckets that will be dropped
        if self._loss_scale is not None:
            comm.follow_loss_scale(self._loss_scale)
        self._all_reduces[bucket] = comm
        return comm

    def _drop(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            del self._all_reduces[bucket]

    def _overlapping(self, numbers: Iterable[int]) -> list[Bucket]:
        """Return the known buckets that contain any of the parameters `numbers`."""
        parameters = set(numbers)
        return [bucket for bucket in self._all_reduces if not parameters.isdisjoint(bucket)]

    def _end_backward(self) -> None:
        is_as_saved = self._reduce_held() if self._held else False
        if self._num_changed and self._method.feedback and self._has_prior_errors:
            _log.warning("the error feedback of %d buckets starts from zero: DDP rebuilt them", self._num_changed)
        self._num_changed = 0
        self._num_backwards += 1
        self._has_prior_errors = is_as_saved or self._num_backwards > 1

    def _reduce_held(self) -> bool:
        """Reduce the held gradients in the saved buckets if they match, else in DDP's; return whether they match."""
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
        parts: tuple[Tensor, ...] = gradients.split([self._sizes[n] for n in bucket])  # type: ignore[no-untyped-call]
        return parts


def _error(what: str, fix: str) -> LayoutError:
    rule = "compression needs dense gradients, and a DDP model without another communication hook"
    return LayoutError(what, where="meshwright.comm.compress_ddp", rule=rule, fix=fix)
