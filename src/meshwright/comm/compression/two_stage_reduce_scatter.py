"""A reduce-scatter in two stages: inside each node first, then between nodes, where error feedback is (qgZ).

Pieces are summed inside a node at the precision of its fast links, and only the sums, 1/L of the bytes, are sent
between nodes in few bits (ZeRO++; Wang et al. 2023, section 3.3), with LoCo's feedback where it is asked for (Xie et
al. 2024). What is fed back is the error of those sums: 1/L of the gradient on each rank. Who sends what to whom is in
`nodes.TwoStages`; each stage is one all-to-all.

Shapes: r = N · L ranks of the group, N nodes with L of them each, n elements of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from meshwright.comm.alltoallv import all_to_all
from meshwright.comm.compression.catalogue import Codec
from meshwright.comm.compression.error_feedback_state import ErrorLayout
from meshwright.comm.compression.fsdp_collectives import CompressedReduceScatter, factor_of
from meshwright.comm.kernels import dispatch
from meshwright.comm.node_groups import Stages
from meshwright.comm.node_topology import Links


class TwoStageReduceScatter(CompressedReduceScatter):
    """The sum or mean over the ranks, of sums that each node has encoded of what each rank has encoded."""

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        inside: Codec,
        stages: Stages,
        rotate: bool = False,
        feedback: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """For one FSDP2 module.

        Args:
            inside: codec of the pieces inside a node; rotated where it is quantised.
            stages: of the group that the module is sharded over.
            name, codec, rotate, feedback, nodes: as of `CompressedReduceScatter`, of the sums between nodes.
        """
        super().__init__(name, codec, rotate=rotate, feedback=feedback, nodes=nodes)
        self._inside, self._stages = inside, stages
        plan = stages.plan
        self._pieces = plan.pieces_of(stages.rank)
        self._order: Tensor | None = None
        self._links_inside = Links(inside=plan.num_local - 1)
        self._links_between = Links(between=plan.num_nodes - 1, num_nodes=plan.num_nodes)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: ReduceOp, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` [n] with this rank's piece of the reduced `input_tensor` [r · n]; both contiguous."""
        plan, num_ranks = self._stages.plan, group.size()
        assert num_ranks == len(plan.ranks), "the stages are of another group"
        pieces_rn = input_tensor.view(num_ranks, -1)
        self.count_exact(input_tensor, group)

        # Rearranged as bytes, which are fewer.
        rotates = self._inside.is_quantised
        payload = dispatch.encode(pieces_rn, self._inside, rotate=rotates).index_select(0, self._order_on(pieces_rn))
        self.sent.count_direct(payload, self._links_inside)
        to_each = [plan.num_nodes] * plan.num_local
        received = all_to_all(payload, send_splits=to_each, recv_splits=to_each, group=self._stages.inside)

        payload = self._encoded_sums(received.view(plan.num_local, plan.num_nodes, -1), pieces_rn)
        self.sent.count_direct(payload, self._links_between)
        one_each = [1] * plan.num_nodes
        received = all_to_all(payload, send_splits=one_each, recv_splits=one_each, group=self._stages.between)
        factor = factor_of(op, num_ranks)
        dispatch.decode_sum(received, self._codec, out=output_tensor, rotate=self._rotate, multiplier=factor)

    def _encoded_sums(self, payloads: Tensor, pieces_rn: Tensor) -> Tensor:
        """What is sent between nodes, [N, bytes], of what was received inside, [L, N, bytes]."""
        layout = ErrorLayout(payloads.shape[1], pieces_rn.shape[1], self._pieces)
        rotates = self._inside.is_quantised
        if self._feedback and rotates:
            state = self._feedback.error_of(layout, pieces_rn.device)
            return state.requantise(payloads, self._inside, self._codec, rotate=rotates)
        # Exact bytes are of the gradients' own type, in either stage.
        is_exact = Codec.EXACT in (self._inside, self._codec)
        dtype = pieces_rn.dtype if is_exact else torch.float32
        sums = torch.empty(layout.num_blocks, layout.num_elements, dtype=dtype, device=pieces_rn.device)
        dispatch.decode_sums(payloads, self._inside, out=sums, rotate=rotates)
        if self._feedback:
            return self._feedback.error_of(layout, pieces_rn.device).quantise(sums, self._codec)
        return dispatch.encode(sums, self._codec, rotate=self._rotate)

    def _order_on(self, x: Tensor) -> Tensor:
        """The order of the pieces as a tensor beside `x`."""
        if self._order is None:
            self._order = torch.tensor(self._stages.plan.order(), device=x.device)
        return self._order
