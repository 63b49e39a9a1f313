"""Compressed reduce-scatter in two stages (qgZ): inside each node first, then between nodes with error feedback.

Shards are sent at higher precision over the fast links inside a node and summed there. Only the sums, 1/L of the bytes,
are sent between nodes in few bits (ZeRO++; Wang et al. 2023, section 3.3), optionally with LoCo's error feedback (Xie
et al. 2024), whose state covers only the sums: 1/L of the gradient on each rank. `node_topology.TwoStagePlan` is the
communication plan; each stage is one all-to-all.

Shapes: r = N · L ranks of the group, N nodes with L ranks each, n elements of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from meshwright.comm.alltoallv import all_to_all
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.error_feedback_state import ErrorLayout
from meshwright.comm.compression.fsdp_collectives import CompressedReduceScatter, reduce_factor
from meshwright.comm.kernels import dispatch
from meshwright.comm.node_groups import TwoStageGroups
from meshwright.comm.node_topology import Links


class TwoStageReduceScatter(CompressedReduceScatter):
    """Reduce-scatter that encodes each rank's shards inside a node, and the node's sums between nodes."""

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        inside: Codec,
        stages: TwoStageGroups,
        rotate: bool = False,
        feedback: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Create the reduce-scatter of one FSDP2 module.

        Args:
            inside: codec of the shards inside a node; rotated if it is quantised.
            stages: two-stage groups of the group that the module is sharded over.
            name, codec, rotate, feedback, nodes: as in `CompressedReduceScatter`, for the sums between nodes.
        """
        super().__init__(name, codec, rotate=rotate, feedback=feedback, nodes=nodes)
        self._inside, self._groups = inside, stages
        plan = stages.plan
        self._shards = plan.shards_of(stages.rank)
        self._order: Tensor | None = None
        self._links_inside = Links(inside=plan.num_local - 1)
        self._links_between = Links(between=plan.num_nodes - 1, num_nodes=plan.num_nodes)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [n] with this rank's shard of the reduced `input_tensor` [r · n]; both contiguous."""
        plan, num_ranks = self._groups.plan, group.size()
        assert num_ranks == len(plan.ranks), "the stages belong to another group"
        shards_rn = input_tensor.view(num_ranks, -1)
        self.count_exact(input_tensor, group)

        # Reordering after encoding moves fewer bytes.
        rotates = self._inside.is_quantised
        payload = dispatch.encode(shards_rn, self._inside, rotate=rotates).index_select(0, self._order_on(shards_rn))
        self.sent.count_direct(payload, self._links_inside)
        bytes_per_rank = [plan.num_nodes] * plan.num_local
        received = all_to_all(
            payload, send_splits=bytes_per_rank, recv_splits=bytes_per_rank, group=self._groups.inside
        )

        payload = self._encode_sums(received.view(plan.num_local, plan.num_nodes, -1), shards_rn)
        self.sent.count_direct(payload, self._links_between)
        splits = [1] * plan.num_nodes
        received = all_to_all(payload, send_splits=splits, recv_splits=splits, group=self._groups.between)
        factor = reduce_factor(op, num_ranks)
        dispatch.decode_sum(received, self._codec, out=output_tensor, rotate=self._rotate, multiplier=factor)

    def _encode_sums(self, payloads: Tensor, shards_rn: Tensor) -> Tensor:
        """Sum the payloads received inside the node, [L, N, bytes], and encode the sums to send, [N, bytes]."""
        layout = ErrorLayout(payloads.shape[1], shards_rn.shape[1], self._shards)
        rotates = self._inside.is_quantised
        if self._feedback and rotates:
            state = self._feedback.state_for(layout, shards_rn.device)
            return state.requantise(payloads, self._inside, self._codec, rotate=rotates)
        # Exact payloads keep the gradients' dtype in both stages.
        is_exact = Codec.EXACT in (self._inside, self._codec)
        dtype = shards_rn.dtype if is_exact else torch.float32
        sums = torch.empty(layout.num_blocks, layout.num_elements, dtype=dtype, device=shards_rn.device)
        dispatch.decode_sums(payloads, self._inside, out=sums, rotate=rotates)
        if self._feedback:
            return self._feedback.state_for(layout, shards_rn.device).quantise(sums, self._codec)
        return dispatch.encode(sums, self._codec, rotate=self._rotate)

    def _order_on(self, x: Tensor) -> Tensor:
        """Return the send order of the shards as a tensor on the device of `x`."""
        if self._order is None:
            self._order = torch.tensor(self._groups.plan.send_order(), device=x.device)
        return self._order
