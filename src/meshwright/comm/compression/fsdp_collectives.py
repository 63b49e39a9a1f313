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
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from meshwright.comm.alltoallv import all_to_all
from meshwright.comm.collectives import all_gather_into
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.error_feedback_state import Feedback, KeepsErrors
from meshwright.comm.kernels import dispatch
from meshwright.comm.node_topology import Links, links_of
from meshwright.log import get_logger

_log = get_logger(__name__)


@dataclass
class SentBytes:
    """What one rank has handed to others, and how much of it to other nodes."""

    payload: int = 0
    """Bytes sent."""
    exact: int = 0
    """Bytes that FSDP2's own collectives would have taken for the same."""
    between: int = 0
    """Of `payload`, bytes between nodes; the rest stayed inside one."""
    exact_between: int = 0
    """Of `exact`, bytes between nodes: the mean over the ranks of the group, in rings that cross each node once."""

    @property
    def inside(self) -> int:
        """Of `payload`, bytes inside a node."""
        return self.payload - self.between

    @property
    def exact_inside(self) -> int:
        """Of `exact`, bytes inside a node."""
        return self.exact - self.exact_between

    def count_direct(self, payload: Tensor, links: Links) -> None:
        """Count an all-to-all of all but this rank's own part of `payload`."""
        to_each = num_bytes(payload) // links.num_ranks
        self.payload += to_each * (links.num_ranks - 1)
        self.between += to_each * links.between

    def count_ring(self, passed_on: int, links: Links) -> None:
        """Count bytes that every rank passes on."""
        self.payload += passed_on
        self.between += links.crossing(passed_on)

    def count_exact(self, passed_on: int, links: Links) -> None:
        """Count bytes that every rank would have passed on without compression."""
        self.exact += passed_on
        self.exact_between += links.crossing(passed_on)

    def __sub__(self, other: SentBytes) -> SentBytes:
        return SentBytes(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class CountsBytes:
    """Bytes are counted by the nodes that they go to."""

    def __init__(self, nodes: Sequence[int] | None) -> None:
        """With the node of each rank of the world; all are on one if not given."""
        self._nodes = nodes
        self._links: dict[ProcessGroup | None, Links] = {}
        self.sent = SentBytes()

    def links(self, group: ProcessGroup | None) -> Links:
        """How this rank reaches the others of `group`."""
        if group not in self._links:
            nodes = [0] * dist.get_world_size() if self._nodes is None else self._nodes
            self._links[group] = links_of(dist.get_process_group_ranks(group), nodes, rank=dist.get_rank())
        return self._links[group]


class _Allocates:
    """FSDP2 lets the collective allocate its buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor."""
        return torch.empty(math.prod(size), dtype=dtype, device=device).view(*size)


class CompressedReduction(CountsBytes, KeepsErrors):
    """A sum over ranks of pieces that each of them encodes."""

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        rotate: bool = False,
        feedback: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """For the gradients of one module or bucket, step by step.

        Args:
            name: theirs, for messages.
            codec: of the pieces; `exact` sends them as they are.
            rotate: spread outliers before quantising.
            feedback: carry each step's error into the next one (LoCo).
            nodes: the node of each rank of the world, for the count of bytes; all are on one if not given.
        """
        CountsBytes.__init__(self, nodes)
        assert not (feedback and (rotate or not codec.is_quantised)), "feedback is for quantised pieces as they are"
        self.name, self._codec, self._rotate = name, codec, rotate
        self._feedback = Feedback(name) if feedback else None
        KeepsErrors.__init__(self, {"": self._feedback} if self._feedback else {})

    def _encoded(self, rows: Tensor, codec: Codec, feedback: Feedback | None) -> Tensor:
        """The blocks of `rows` [blocks, elements], by the feedback that they have."""
        return dispatch.encode(rows, codec, rotate=self._rotate) if feedback is None else feedback.quantise(rows, codec)


class CompressedReduceScatter(_Allocates, CompressedReduction):
    """The sum or mean over the ranks of what each has encoded, for one FSDP2 module."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [n] with this rank's piece of the reduced `input_tensor` [r · n]; both contiguous."""
        num_ranks = group.size()
        pieces_rn = input_tensor.view(num_ranks, -1)
        payload = self._encoded(pieces_rn, self._codec, self._feedback)
        self.count_exact(input_tensor, group)
        self.sent.count_direct(payload, self.links(group))
        one_each = [1] * num_ranks
        received = all_to_all(payload, send_splits=one_each, recv_splits=one_each, group=group)
        factor = factor_of(op, num_ranks)
        dispatch.decode_sum(received, self._codec, out=output_tensor, rotate=self._rotate, multiplier=factor)

    def count_exact(self, x: Tensor, group: ProcessGroup) -> None:
        """Count what FSDP2's own reduce-scatter of `x` would have sent."""
        num_ranks = group.size()
        self.sent.count_exact(num_bytes(x) // num_ranks * (num_ranks - 1), self.links(group))


class CompressedAllGather(_Allocates, CountsBytes):
    """Weights as every rank decodes them from what each has encoded; all ranks compute with the same ones."""

    def __init__(self, name: str, codec: Codec, *, rotate: bool = False, nodes: Sequence[int] | None = None) -> None:
        """For one FSDP2 module; arguments as of `CompressedReduceScatter`."""
        super().__init__(nodes)
        self.name, self._codec, self._rotate = name, codec, rotate
        self._most_ranks = 0
        self._has_warned = False

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [r · n] with the pieces [n] of all ranks; the input may lie in the output."""
        num_ranks = group.size()
        self._most_ranks = max(self._most_ranks, num_ranks)
        # What fewer ranks gather is what they kept of weights that were sent: encoded again in other groups of
        # elements, the backward's weights would not be the forward's.
        codec = self._codec if self._takes(input_tensor) and num_ranks == self._most_ranks else None
        payload = input_tensor if codec is None else dispatch.encode(input_tensor, codec, rotate=self._rotate)
        gathered = all_gather_into(payload, group=group)
        self.sent.count_ring(num_bytes(payload) * (num_ranks - 1), self.links(group))
        self.sent.count_exact(num_bytes(input_tensor) * (num_ranks - 1), self.links(group))
        if codec is None:
            output_tensor.copy_(gathered)
        else:
            dispatch.decode(
                gathered.view(num_ranks, -1), codec, out=output_tensor.view(num_ranks, -1), rotate=self._rotate
            )

    def _takes(self, x: Tensor) -> bool:
        """Whether `x` can be encoded: modules with weights of several types hand over bytes, which go as they are."""
        if not x.is_floating_point() and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the weights of %s are gathered as they are, not as %s: they have several types, which one param_dtype "
                "in FSDP2's MixedPrecisionPolicy would change", self.name, self._codec.value,
            )  # fmt: skip
        return x.is_floating_point()


def num_bytes(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def factor_of(op: Any, num_ranks: int) -> float:
    """What a sum is multiplied by: `op` is one of FSDP2's, whose types PyTorch's stubs don't tell apart."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / num_ranks
    assert op == dist.ReduceOp.PREMUL_SUM, "FSDP2 sums, averages or multiplies and sums"
    return float(op.__getstate__()[1])  # pickling is the public way to read the factor
