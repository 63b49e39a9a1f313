"""FSDP2's collectives with encoded payloads: gradients are reduce-scattered and weights gathered in fewer bits.

Both follow FSDP2's public protocols (`FSDPModule.set_custom_reduce_scatter`, `set_custom_all_gather`), one object for
each of its modules. A reduce-scatter becomes an all-to-all of encoded pieces, which every rank decodes and sums in
float32 (qgZ of ZeRO++; Wang et al. 2023), with LoCo's error feedback where it is asked for (Xie et al. 2024). Work is
ordered on the stream that FSDP2 calls on, so there is nothing for it to wait for.

Shapes: r ranks of the group, n elements of a piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from meshwright.comm import kernels
from meshwright.comm.all_to_all import all_to_all
from meshwright.comm.codecs import Codec
from meshwright.comm.collectives import all_gather_into
from meshwright.comm.error_state import Feedback, KeepsErrors


@dataclass
class SentBytes:
    """What one rank has handed to others."""

    payload: int = 0
    """Bytes sent."""
    exact: int = 0
    """Bytes that the same would have taken as it was."""

    def add(self, payload: Tensor, exact: Tensor, num_ranks: int) -> None:
        """Count a transfer of all but this rank's own part of `payload`, which stands for `exact`."""
        self.payload += payload.numel() * payload.element_size() * (num_ranks - 1) // num_ranks
        self.exact += exact.numel() * exact.element_size() * (num_ranks - 1) // num_ranks


class _Allocates:
    """FSDP2 lets the collective allocate its buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor."""
        return torch.empty(math.prod(size), dtype=dtype, device=device).view(*size)


class CompressedReduceScatter(_Allocates, KeepsErrors):
    """The sum or mean over the ranks of what each has encoded."""

    def __init__(self, name: str, codec: Codec, *, rotate: bool = False, feedback: bool = False) -> None:
        """For one FSDP2 module.

        Args:
            name: the module's, for messages and checkpoints.
            codec: of the pieces; `exact` sends them as they are.
            rotate: spread outliers before quantising.
            feedback: carry each step's error into the next one (LoCo).
        """
        assert not (feedback and (rotate or not codec.is_quantised)), "feedback is for quantised pieces as they are"
        self.name, self._codec, self._rotate = name, codec, rotate
        self._feedback = Feedback(name) if feedback else None
        super().__init__({"": self._feedback} if self._feedback else {})
        self.sent = SentBytes()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [n] with this rank's piece of the reduced `input_tensor` [r · n]; both contiguous."""
        num_ranks = group.size()
        pieces_rn = input_tensor.view(num_ranks, -1)
        payload = self._encoded(pieces_rn)
        self.sent.add(payload, input_tensor, num_ranks)
        one_each = [1] * num_ranks
        received = all_to_all(payload, send_splits=one_each, recv_splits=one_each, group=group)
        factor = _factor(op, num_ranks)
        kernels.decode_sum(received, self._codec, out=output_tensor, rotate=self._rotate, multiplier=factor)

    def _encoded(self, pieces_rn: Tensor) -> Tensor:
        if self._feedback is None:
            return kernels.encode(pieces_rn, self._codec, rotate=self._rotate)
        return self._feedback.quantise(pieces_rn, self._codec)


class CompressedAllGather(_Allocates):
    """Weights as every rank decodes them from what each has encoded; all ranks compute with the same ones."""

    def __init__(self, codec: Codec, *, rotate: bool = False) -> None:
        self._codec, self._rotate = codec, rotate
        self.sent = SentBytes()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [r · n] with the pieces [n] of all ranks; the input may lie in the output."""
        num_ranks = group.size()
        # Modules with weights of several types hand over bytes, which can only be sent as they are.
        codec = self._codec if input_tensor.is_floating_point() else None
        payload = input_tensor if codec is None else kernels.encode(input_tensor, codec, rotate=self._rotate)
        gathered = all_gather_into(payload.clone() if codec is None else payload, group=group)
        self.sent.payload += payload.numel() * payload.element_size() * (num_ranks - 1)
        self.sent.exact += input_tensor.numel() * input_tensor.element_size() * (num_ranks - 1)
        if codec is None:
            output_tensor.copy_(gathered)
        else:
            kernels.decode(
                gathered.view(num_ranks, -1), codec, out=output_tensor.view(num_ranks, -1), rotate=self._rotate
            )


def _factor(op: Any, num_ranks: int) -> float:
    """What a sum is multiplied by: `op` is one of FSDP2's, whose types PyTorch's stubs don't tell apart."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / num_ranks
    assert op == dist.ReduceOp.PREMUL_SUM, "FSDP2 sums, averages or multiplies and sums"
    return float(op.__getstate__()[1])  # pickling is the public way to read the factor
