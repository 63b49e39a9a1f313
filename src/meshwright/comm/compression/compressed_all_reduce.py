"""All-reduce with encoded payloads, for DDP's buckets and for the replicas of HSDP.

Each rank owns a shard of the tensor: it receives every rank's encoded values of that shard by an all-to-all, sums them
in float32 and encodes the sum, which is then all-gathered. Values are thus encoded twice, with comparable errors.

[Note: the second encoding] With feedback it has its own error, kept by the shard's owner: the server error of 1-bit
Adam (Tang et al. 2021). Without feedback, quantised codecs use int8 for it. Relative error of the sum over 200 steps,
on 2 and on 8 ranks, with gradients that consist of a constant and ten times as much noise:

    first encoding           second encoding          2 ranks    8 ranks    bits per element
    int4 rotated             int4 rotated             0.066      0.036      8.25
    int4 rotated             int8 rotated             0.047      0.025      12.25
    int4 rotated             none                     0.047      0.025
    int4 with feedback       int4                     0.048      0.026      8.25
    int4 with feedback       int4 with feedback       0.0078     0.0042     8.25
    int4 with feedback       none                     0.0055     0.0030

Shapes: r ranks of the group, n elements of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.comm.alltoallv import all_to_all
from meshwright.comm.collectives import all_gather_rows, world_size
from meshwright.comm.compression.catalogue import Codec, codec_of_sum
from meshwright.comm.compression.error_feedback_state import ErrorFeedbackMixin, LazyErrorState
from meshwright.comm.compression.fsdp_collectives import CompressedReduction, num_bytes
from meshwright.comm.kernels import dispatch
from meshwright.errors import InputError


class CompressedAllReduce(CompressedReduction):
    """Compressed all-reduce, bitwise equal on all ranks. [Note: the second encoding]"""

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        rotate: bool = False,
        feedback: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(f"the shards of {name}", codec, rotate=rotate, feedback=feedback, nodes=nodes)
        self._codec_of_sum = codec_of_sum(codec, feedback=feedback)
        self._of_sum = LazyErrorState(f"the sum of {name}") if feedback else None
        if self._feedback is not None and self._of_sum is not None:
            ErrorFeedbackMixin.__init__(self, {"pieces.": self._feedback, "sum.": self._of_sum})

    def __call__(self, x: Tensor, *, group: ProcessGroup | None, factor: float = 1.0) -> None:
        """Replace the contiguous 1-dim tensor `x` by `factor` times its sum over `group`; sizes are equal on all ranks.

        Ordered on the current stream. A non-finite value on one rank becomes non-finite on all.

        Raises:
            InputError: `x` is not contiguous and 1-dim, or the codec does not support its dtype.
        """
        if x.dim() != 1 or not x.is_contiguous():
            raise InputError(
                f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} cannot be all-reduced in place",
                where="CompressedAllReduce",
                rule="the tensor is contiguous and has one dim",
                fix="pass x.view(-1) of a contiguous tensor",
            )
        num_ranks = world_size(group)
        if num_ranks == 1 or x.numel() == 0:
            x.mul_(factor)
            return
        shards_rn = _shards(x, num_ranks)
        payload = self._encode(shards_rn, self._codec, self._feedback)
        splits = [1] * num_ranks
        received = all_to_all(payload, send_splits=splits, recv_splits=splits, group=group)
        # The exact codec keeps the dtype; others skip an intermediate rounding to it.
        dtype = x.dtype if self._codec is Codec.EXACT else torch.float32
        sum_n = x.new_empty(shards_rn.shape[1], dtype=dtype)
        dispatch.decode_sum(received, self._codec, out=sum_n, rotate=self._rotate, multiplier=factor)
        payload_of_sum = self._encode(sum_n.unsqueeze(0), self._codec_of_sum, self._of_sum)
        gathered = all_gather_rows(payload_of_sum, group=group)
        self._decode_into(x, gathered, len(sum_n))
        links = self.links(group)
        self.sent.count_direct(payload, links)
        self.sent.count_ring(num_bytes(payload_of_sum) * (num_ranks - 1), links)
        self.sent.count_exact(2 * num_bytes(x) * (num_ranks - 1) // num_ranks, links)

    def _decode_into(self, x: Tensor, gathered: Tensor, n: int) -> None:
        """Decode the sums [r, bytes] of shards of `n` elements into `x`, whose last shard may be shorter."""
        num_full = len(x) // n
        full = x[: num_full * n].view(num_full, n)
        dispatch.decode(gathered[:num_full], self._codec_of_sum, out=full, rotate=self._rotate)
        if rest := len(x) - num_full * n:
            last = x.new_empty(n)
            dispatch.decode(gathered[num_full], self._codec_of_sum, out=last, rotate=self._rotate)
            x[-rest:] = last[:rest]


@dataclass(frozen=True)
class AllReduceHook:
    """Hook for `FSDPModule.set_all_reduce_hook` that all-reduces FSDP2's reduce-scatter output over replicas.

    With one hook per module, a model sharded on the mesh of a single replica trains like HSDP. FSDP2 knows only the
    shards and divides by their number, so `factor` is 1 / replicas if gradients are averaged, and 1.0 if they are
    summed or divided by `set_gradient_divide_factor`. With gradient accumulation each reduce-scatter is followed by an
    all-reduce: `set_requires_gradient_sync(False)` skips both, and `set_requires_all_reduce(False)`, which applies to
    native HSDP, has no effect.
    """

    all_reduce: CompressedAllReduce
    group: ProcessGroup
    """Ranks that hold the same shard."""
    factor: float
    """Factor applied to the sum."""

    def __call__(self, reduce_output: Tensor) -> None:
        """Reduce in place, on the stream on which FSDP2 calls the hook."""
        self.all_reduce(reduce_output, group=self.group, factor=self.factor)
        if reduce_output.is_cuda:
            # Allocated on the reduce-scatter stream, which could reuse the memory before this stream's cast has run.
            reduce_output.record_stream(torch.cuda.current_stream(reduce_output.device))


def _shards(x: Tensor, num_ranks: int) -> Tensor:
    """Reshape `x` to one row per rank: a view if it divides evenly, otherwise a copy padded with zeros."""
    n = -(-len(x) // num_ranks)
    missing = n * num_ranks - len(x)
    return (torch.cat([x, x.new_zeros(missing)]) if missing else x).view(num_ranks, n)
