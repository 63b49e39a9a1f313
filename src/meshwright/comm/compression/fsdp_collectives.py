"""Compressed reduce-scatter of gradients and all-gather of weights for FSDP2.

Both implement FSDP2's public protocols (`FSDPModule.set_custom_reduce_scatter`, `set_custom_all_gather`), with one
object per FSDP2 module. A reduce-scatter becomes an all-to-all of encoded shards, which every rank decodes and sums in
float32 (qgZ of ZeRO++; Wang et al. 2023), optionally with LoCo's error feedback (Xie et al. 2024). Work runs on the
stream on which FSDP2 calls the collective, so no work handle is returned.

Shapes: r ranks in the group, n elements per shard.
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
from meshwright.comm.collectives import all_gather_rows
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.error_feedback_state import ErrorFeedbackMixin, LazyErrorState
from meshwright.comm.kernels import dispatch
from meshwright.comm.node_topology import Links, group_links
from meshwright.log import get_logger

_log = get_logger(__name__)


@dataclass
class SentBytes:
    """Bytes that one rank has sent, in total and to other nodes."""

    payload: int = 0
    """Bytes sent."""
    exact: int = 0
    """Bytes that FSDP2's own collectives would have sent."""
    between: int = 0
    """Bytes of `payload` sent to other nodes."""
    exact_between: int = 0
    """Bytes of `exact` to other nodes, averaged over the group's ranks, assuming rings that leave each node once."""

    @property
    def inside(self) -> int:
        """Bytes of `payload` sent inside the node."""
        return self.payload - self.between

    @property
    def exact_inside(self) -> int:
        """Bytes of `exact` sent inside the node."""
        return self.exact - self.exact_between

    def count_direct(self, payload: Tensor, links: Links) -> None:
        """Count an all-to-all of `payload`, without this rank's own shard."""
        bytes_per_rank = num_bytes(payload) // links.num_ranks
        self.payload += bytes_per_rank * (links.num_ranks - 1)
        self.between += bytes_per_rank * links.between

    def count_ring(self, passed_on: int, links: Links) -> None:
        """Count bytes that every rank sends around a ring."""
        self.payload += passed_on
        self.between += links.crossing(passed_on)

    def count_exact(self, passed_on: int, links: Links) -> None:
        """Count bytes that every rank would have sent around a ring without compression."""
        self.exact += passed_on
        self.exact_between += links.crossing(passed_on)

    def __sub__(self, other: SentBytes) -> SentBytes:
        return SentBytes(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class ByteCounterMixin:
    """Counter of sent bytes, inside and between nodes."""

    def __init__(self, nodes: Sequence[int] | None) -> None:
        """Create a counter, given the node of each global rank, or None for a single node."""
        self._nodes = nodes
        self._links: dict[ProcessGroup | None, Links] = {}
        self.sent = SentBytes()

    def links(self, group: ProcessGroup | None) -> Links:
        """Return the numbers of intra-node and inter-node peers of this rank in `group`."""
        if group not in self._links:
            nodes = [0] * dist.get_world_size() if self._nodes is None else self._nodes
            self._links[group] = group_links(dist.get_process_group_ranks(group), nodes, rank=dist.get_rank())
        return self._links[group]


class _AllocateMixin:
    """Buffer allocation, which FSDP2 delegates to the collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(math.prod(size), dtype=dtype, device=device).view(*size)


class CompressedReduction(ByteCounterMixin, ErrorFeedbackMixin):
    """Base class of reductions over ranks with encoded shards."""

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        rotate: bool = False,
        feedback: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Create the reduction of one module's or bucket's gradients.

        Args:
            name: name of the module or bucket in messages.
            codec: codec of the shards; `exact` sends them unchanged.
            rotate: spread outliers before quantising.
            feedback: carry each step's error into the next one (LoCo).
            nodes: node of each global rank, for the byte counts; None for a single node.
        """
        ByteCounterMixin.__init__(self, nodes)
        assert not (feedback and (rotate or not codec.is_quantised)), "feedback needs quantised, unrotated shards"
        self.name, self._codec, self._rotate = name, codec, rotate
        self._feedback = LazyErrorState(name) if feedback else None
        ErrorFeedbackMixin.__init__(self, {"": self._feedback} if self._feedback else {})

    def _encode(self, rows: Tensor, codec: Codec, feedback: LazyErrorState | None) -> Tensor:
        """Encode `rows` [blocks, elements], with error feedback if there is a state for it."""
        return dispatch.encode(rows, codec, rotate=self._rotate) if feedback is None else feedback.quantise(rows, codec)


class CompressedReduceScatter(_AllocateMixin, CompressedReduction):
    """Compressed reduce-scatter of one FSDP2 module's gradients."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [n] with this rank's shard of the reduced `input_tensor` [r · n]; both contiguous."""
        num_ranks = group.size()
        shards_rn = input_tensor.view(num_ranks, -1)
        payload = self._encode(shards_rn, self._codec, self._feedback)
        self.count_exact(input_tensor, group)
        self.sent.count_direct(payload, self.links(group))
        splits = [1] * num_ranks
        received = all_to_all(payload, send_splits=splits, recv_splits=splits, group=group)
        factor = reduce_factor(op, num_ranks)
        dispatch.decode_sum(received, self._codec, out=output_tensor, rotate=self._rotate, multiplier=factor)

    def count_exact(self, x: Tensor, group: ProcessGroup) -> None:
        """Count the bytes that FSDP2's own reduce-scatter of `x` would have sent."""
        num_ranks = group.size()
        self.sent.count_exact(num_bytes(x) // num_ranks * (num_ranks - 1), self.links(group))


class CompressedAllGather(_AllocateMixin, ByteCounterMixin):
    """Compressed all-gather of one FSDP2 module's weights; all ranks decode the same values."""

    def __init__(self, name: str, codec: Codec, *, rotate: bool = False, nodes: Sequence[int] | None = None) -> None:
        """Create the all-gather of one FSDP2 module; arguments as in `CompressedReduceScatter`."""
        super().__init__(nodes)
        self.name, self._codec, self._rotate = name, codec, rotate
        self._most_ranks = 0
        self._has_warned = False

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [r · n] with the shards [n] of all ranks; the input may alias the output."""
        num_ranks = group.size()
        self._most_ranks = max(self._most_ranks, num_ranks)
        # A smaller group re-gathers weights that were already decoded. Encoding them again, with other quantisation
        # groups, would make the backward's weights differ from the forward's.
        codec = self._codec if self._takes(input_tensor) and num_ranks == self._most_ranks else None
        payload = input_tensor if codec is None else dispatch.encode(input_tensor, codec, rotate=self._rotate)
        gathered = all_gather_rows(payload, group=group)
        self.sent.count_ring(num_bytes(payload) * (num_ranks - 1), self.links(group))
        self.sent.count_exact(num_bytes(input_tensor) * (num_ranks - 1), self.links(group))
        if codec is None:
            output_tensor.copy_(gathered)
        else:
            dispatch.decode(
                gathered.view(num_ranks, -1), codec, out=output_tensor.view(num_ranks, -1), rotate=self._rotate
            )

    def _takes(self, x: Tensor) -> bool:
        """Return whether `x` can be encoded: modules with mixed dtypes pass bytes, which are sent unchanged."""
        if not x.is_floating_point() and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the weights of %s are gathered uncompressed, not as %s, because their dtypes differ; set param_dtype "
                "in FSDP2's MixedPrecisionPolicy to compress them", self.name, self._codec.value,
            )  # fmt: skip
        return x.is_floating_point()


def num_bytes(x: Tensor) -> int:
    """Return the size in bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def reduce_factor(op: Any, num_ranks: int) -> float:
    """Return the factor that FSDP2's reduce op applies to the sum; PyTorch's stubs do not distinguish op types."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / num_ranks
    assert op == dist.ReduceOp.PREMUL_SUM, "FSDP2 sums, averages or multiplies and sums"
    return float(op.__getstate__()[1])  # pickling is the public way to read the factor
