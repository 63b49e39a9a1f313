"""Compressed reduce-scatter of gradients and all-gather of weights for FSDP2, all-reduce, and the errors they keep.

The first two implement FSDP2's public protocols (`FSDPModule.set_custom_reduce_scatter`, `set_custom_all_gather`), with
one object per FSDP2 module. A reduce-scatter becomes an all-to-all of encoded shards, which every rank decodes and sums
in float32 (qgZ of ZeRO++; Wang et al. 2023), optionally with LoCo's error feedback (Xie et al. 2024). Work runs on the
stream on which FSDP2 calls the collective, so no work handle is returned.

In an all-reduce, for DDP buckets and HSDP replicas, each rank owns a shard of the tensor. It receives all ranks'
encoded values of that shard in an all-to-all, sums them in float32, and encodes the sum for an all-gather. Values are
thus encoded twice, with comparable errors.

[Note: steps of error feedback] Errors persist across steps and are saved in checkpoints. A step is open from the first
`quantise` to `commit` or `discard`. Only `commit` makes its error the new state, so a step skipped after an overflow
leaves no trace. A second `quantise` in an open step, for another micro-batch, continues from the first one's error.
This takes two buffers of one byte per element.

[Note: the second encoding] With feedback, the second encoding has its own error, kept by the shard's owner: the server
error of 1-bit Adam (Tang et al. 2021). Without feedback it is int8, regardless of the first. Relative error of the sum
over 200 steps, on 2 and on 8 ranks, for gradients made of a constant and ten times as much noise:

    first encoding           second encoding          2 ranks    8 ranks    bits per element
    int4 rotated             int4 rotated             0.066      0.036      8.25
    int4 rotated             int8 rotated             0.047      0.025      12.25
    int4 rotated             none                     0.047      0.025
    int4 with feedback       int4                     0.048      0.026      8.25
    int4 with feedback       int4 with feedback       0.0078     0.0042     8.25
    int4 with feedback       none                     0.0055     0.0030

Shapes: r ranks in the group, n elements per shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from meshwright.comm.alltoallv import all_to_all
from meshwright.comm.collectives import all_gather_rows, world_size
from meshwright.comm.compression.catalogue import ERROR_CODEC, Codec, Method
from meshwright.comm.compression.codecs import join_block, split_block
from meshwright.comm.kernels import dispatch
from meshwright.comm.node_groups import Links, group_links
from meshwright.errors import InputError, RunError
from meshwright.log import get_logger
from meshwright.units import counted

_log = get_logger(__name__)

RESET_STEPS = 1024
"""Number of steps after which the error is reset to zero, as in LoCo, so that stale errors do not persist."""


@dataclass(frozen=True)
class ErrorLayout:
    """Assignment of error blocks to gradient elements; an error saved with another layout cannot be used."""

    num_blocks: int
    """Number of blocks, one per rank that receives a shard of the gradient."""
    num_elements: int
    shards: tuple[int, ...] = ()
    """Indices of the gradient shards that the blocks belong to; if empty, all shards in order."""

    def describe(self) -> str:
        of = f", shards {list(self.shards)}" if self.shards else ""
        return f"{counted(self.num_blocks, 'block')} of {counted(self.num_elements, 'element')}{of}"


class ErrorFeedback:
    """State that reductions keep between steps: errors of parts that begin and end their steps together.

    Whatever else a method keeps, such as a count of random draws, is a part, too: runs save and restore all of them.
    """

    def parts(self) -> Mapping[str, ErrorFeedback]:
        """Return the parts by the prefix of their keys in a state dict."""
        return {}

    def commit(self) -> None:
        """Carry the step's errors into the next one, after the optimizer step."""
        for part in self.parts().values():
            part.commit()

    def discard(self) -> None:
        """Drop the step's errors, after a step skipped for an overflow."""
        for part in self.parts().values():
            part.discard()

    def follow_loss_scale(self, loss_scale: float) -> None:
        """Rescale the errors to the loss scale of the next step's gradients.

        With a `GradScaler`, call it with `get_scale()` before each step's backward.

        Raises:
            RunError: the loss scale changes before the last step was committed or discarded.
        """
        for part in self.parts().values():
            part.follow_loss_scale(loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's errors, which differ between ranks."""
        found = {prefix: part.state_dict() for prefix, part in self.parts().items()}
        return {prefix + key: value for prefix, state in found.items() for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore saved errors of this rank; those missing from `state` start from zero."""
        for prefix, part in self.parts().items():
            part.load_state_dict(strip_prefix(prefix, state))


class ErrorState(ErrorFeedback):
    """Errors of one parameter group, called `name` in log messages. [Note: steps of error feedback]"""

    def __init__(self, name: str, layout: ErrorLayout, *, device: torch.device | str = "cpu") -> None:
        self.name = name
        self.layout = layout
        self.num_steps = 0
        """Committed steps since the start of training."""
        self.loss_scale = 1.0
        """Loss scale of the gradients that the error belongs to."""
        num_bytes = ERROR_CODEC.encoded_bytes(layout.num_elements)
        self._error = torch.zeros(layout.num_blocks, num_bytes, dtype=torch.uint8, device=device)
        self._next = torch.empty_like(self._error)
        self._is_open = False

    def quantise(self, g: Tensor, codec: Codec) -> Tensor:
        """Encode gradients [blocks, elements] plus the error as a payload [blocks, bytes]; opens a step."""
        error = self._next if self._is_open else self._error
        payload, _ = dispatch.loco_quantise(g, error, codec, new_error=self._next)
        self._is_open = True
        return payload

    def requantise(self, payloads: Tensor, inner: Codec, codec: Codec, *, rotate: bool = False) -> Tensor:
        """Quantise the sums over ranks of `payloads` [ranks, blocks, bytes] encoded with `inner`; opens a step."""
        error = self._next if self._is_open else self._error
        payload, _ = dispatch.requantise(
            payloads,
            inner,
            error=error,
            codec=codec,
            num_elements=self.layout.num_elements,
            rotate=rotate,
            new_error=self._next,
        )
        self._is_open = True
        return payload

    def commit(self) -> None:
        """Count the step even if it had no gradients."""
        if self._is_open:
            self._error, self._next = self._next, self._error
            self._is_open = False
        self.num_steps += 1
        if self.num_steps % RESET_STEPS == 0:
            self._error.zero_()

    def discard(self) -> None:
        self._is_open = False

    def follow_loss_scale(self, loss_scale: float) -> None:
        if loss_scale == self.loss_scale:
            return
        if self._is_open:
            what = f"the loss scale changes from {self.loss_scale:g} to {loss_scale:g} within a step"
            rule = "all gradients of a step have the same loss scale"
            fix = "call commit() or discard() at the end of each step, and then follow_loss_scale()"
            raise RunError(what, where=f"the error feedback of {self.name}", rule=rule, fix=fix)
        codes, scales = split_block(self._error, ERROR_CODEC.bits, num_elements=self.layout.num_elements)
        # Codes are unchanged, and multiplying a scale by a power of two is exact.
        scaled = scales.float() * (loss_scale / self.loss_scale)
        kept = scaled.isfinite() & (scaled.abs() >= torch.finfo(torch.float32).tiny)
        scaled = torch.where(kept, scaled, 0.0).to(torch.bfloat16)
        self._error = join_block(codes, scaled, ERROR_CODEC.bits)
        self.loss_scale = loss_scale

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "error": self._error.clone(),
            "layout": torch.tensor([self.layout.num_blocks, self.layout.num_elements, *self.layout.shards]),
            "num_steps": torch.tensor(self.num_steps),
            "loss_scale": torch.tensor(self.loss_scale, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state; if its layout differs, log a warning and start from a zero error."""
        self.discard()
        self.num_steps = int(state["num_steps"])
        self.loss_scale = float(state["loss_scale"])
        num_blocks, num_elements, *shards = state["layout"].tolist()
        saved = ErrorLayout(num_blocks, num_elements, tuple(shards))
        if saved == self.layout:
            self._error.copy_(state["error"])
            return
        self._error.zero_()
        _log.warning(
            "the error feedback of %s starts from zero: it was saved for %s, not for %s",
            self.name, saved.describe(), self.layout.describe(),
        )  # fmt: skip


class LazyErrorState(ErrorFeedback):
    """Error state created on first use, when the layout of the gradients is known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._error: ErrorState | None = None
        self._saved: Mapping[str, Tensor] | None = None
        self._loss_scale: float | None = None

    def parts(self) -> Mapping[str, ErrorFeedback]:
        return {} if self._error is None else {"": self._error}

    def quantise(self, g: Tensor, codec: Codec) -> Tensor:
        """Encode gradients plus the error; a change of layout resets the error, with a warning."""
        return self.state_for(ErrorLayout(*g.shape), g.device).quantise(g, codec)

    def state_for(self, layout: ErrorLayout, device: torch.device) -> ErrorState:
        """Return the error state for this layout, restored from the previous or saved state if there is one."""
        if self._error is None or self._error.layout != layout:
            saved = self._saved if self._error is None else self._error.state_dict()
            self._error = ErrorState(self._name, layout, device=device)
            if saved is not None:
                self._error.load_state_dict(saved)
            if self._loss_scale is not None:
                self._error.follow_loss_scale(self._loss_scale)
        return self._error

    def follow_loss_scale(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        super().follow_loss_scale(loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._saved or {}) if self._error is None else super().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved error once the layout is known; an empty state resets it."""
        self._saved, self._loss_scale = dict(state) or None, None
        if self._saved is None:
            self._error = None
        super().load_state_dict(state)


def strip_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of `state` whose keys start with `prefix`, with the prefix removed."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


Nodes = Sequence[int] | None
"""Node of each global rank; None for a single node."""


@dataclass
class SentBytes:
    """Bytes that one rank has sent, in total and to other nodes."""

    payload: int = 0
    exact: int = 0
    """Bytes that FSDP2's own collectives would have sent."""
    between: int = 0
    """Bytes of `payload` sent to other nodes."""
    exact_between: int = 0
    """Bytes of `exact` to other nodes, averaged over the group's ranks, assuming rings that leave each node once."""

    @property
    def inside(self) -> int:
        return self.payload - self.between

    @property
    def exact_inside(self) -> int:
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


class _Collective:
    """Collective of one FSDP2 module that counts the bytes it sends, given the node of each global rank."""

    def __init__(self, name: str, method: Method, *, nodes: Nodes = None) -> None:
        self.name, self._codec, self._rotate = name, method.codec, method.rotate
        self._nodes = nodes
        self._links: dict[ProcessGroup | None, Links] = {}
        self.sent = SentBytes()

    def links(self, group: ProcessGroup | None) -> Links:
        """Return the numbers of intra-node and inter-node peers of this rank in `group`."""
        if group not in self._links:
            nodes = [0] * dist.get_world_size() if self._nodes is None else self._nodes
            self._links[group] = group_links(dist.get_process_group_ranks(group), nodes, rank=dist.get_rank())
        return self._links[group]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, which FSDP2 leaves to the collective."""
        return torch.empty(math.prod(size), dtype=dtype, device=device).view(*size)


class Reduction(ErrorFeedback):
    """Reduction of gradients over ranks, which may keep error feedback."""

    sent: SentBytes


class CompressedReduction(_Collective, Reduction):
    """Base class of reductions over ranks with encoded shards.

    Args:
        name: name of the module or bucket in messages.
        method: how the shards are sent; methods of the codec `exact` send them unchanged.
        nodes: node of each global rank, for the byte counts; None for a single node.
    """

    def __init__(self, name: str, method: Method, *, nodes: Nodes = None) -> None:
        super().__init__(name, method, nodes=nodes)
        self._feedback = LazyErrorState(name) if method.feedback else None

    def parts(self) -> Mapping[str, ErrorFeedback]:
        return {} if self._feedback is None else {"": self._feedback}

    def _encode(self, rows: Tensor, codec: Codec, feedback: LazyErrorState | None) -> Tensor:
        """Encode `rows` [blocks, elements], with error feedback if `feedback` is given."""
        return dispatch.encode(rows, codec, rotate=self._rotate) if feedback is None else feedback.quantise(rows, codec)


class CompressedReduceScatter(CompressedReduction):
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


class CompressedAllGather(_Collective):
    """Compressed all-gather of one FSDP2 module's weights; all ranks decode the same values."""

    def __init__(self, name: str, method: Method, *, nodes: Nodes = None) -> None:
        super().__init__(name, method, nodes=nodes)
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
    """Return the factor that FSDP2's reduce op applies to the sum; PyTorch's stubs don't distinguish the ops."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / num_ranks
    assert op == dist.ReduceOp.PREMUL_SUM, "FSDP2 sums, averages or multiplies and sums"
    return float(op.__getstate__()[1])  # pickling is the public way to read the factor


class CompressedAllReduce(CompressedReduction):
    """Compressed all-reduce, bitwise equal on all ranks. [Note: the second encoding]"""

    def __init__(self, name: str, method: Method, *, nodes: Nodes = None) -> None:
        super().__init__(f"the shards of {name}", method, nodes=nodes)
        self._codec_of_sum = method.codec_of_sum
        self._of_sum = LazyErrorState(f"the sum of {name}") if method.feedback else None

    def parts(self) -> Mapping[str, ErrorFeedback]:
        return {} if not (self._feedback and self._of_sum) else {"pieces.": self._feedback, "sum.": self._of_sum}

    def __call__(self, x: Tensor, *, group: ProcessGroup | None, factor: float = 1.0) -> None:
        """Replace the contiguous 1-dim tensor `x` by `factor` times its sum over `group`; sizes are equal on all ranks.

        Runs on the current stream. A value that is non-finite on one rank becomes non-finite on all ranks.

        Raises:
            InputError: `x` is not contiguous and 1-dim, or the codec does not support its dtype.
        """
        if x.dim() != 1 or not x.is_contiguous():
            what = f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} cannot be all-reduced in place"
            rule, fix = "the tensor is contiguous and has one dim", "pass x.view(-1) of a contiguous tensor"
            raise InputError(what, where="CompressedAllReduce", rule=rule, fix=fix)
        num_ranks = world_size(group)
        if num_ranks == 1 or x.numel() == 0:
            x.mul_(factor)
            return
        missing = -len(x) % num_ranks  # the last shard is padded with zeros
        shards_rn = (torch.cat([x, x.new_zeros(missing)]) if missing else x).view(num_ranks, -1)
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

    With one hook per module, a model sharded over the mesh of a single replica trains like HSDP. FSDP2 only divides by
    the number of shards, so `factor` is 1 / replicas if gradients are averaged, and 1.0 if they are summed or if
    `set_gradient_divide_factor` sets the divisor. With gradient accumulation, an all-reduce follows each
    reduce-scatter: `set_requires_gradient_sync(False)` skips both, while `set_requires_all_reduce(False)`, which is
    for native HSDP, has no effect.
    """

    all_reduce: CompressedAllReduce
    group: ProcessGroup
    factor: float

    def __call__(self, reduce_output: Tensor) -> None:
        """Reduce in place, on the stream on which FSDP2 calls the hook."""
        self.all_reduce(reduce_output, group=self.group, factor=self.factor)
        if reduce_output.is_cuda:
            # Allocated on the reduce-scatter stream, which could reuse the memory before this stream's cast has run.
            reduce_output.record_stream(torch.cuda.current_stream(reduce_output.device))
