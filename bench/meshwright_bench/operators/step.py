"""Training step of a small transformer with FSDP2 and tensor parallelism from PyTorch alone, for `bench operators`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright_bench.operators.cases import StepSizes


class Block(nn.Module):
    """Pre-norm transformer block with separate projections."""

    def __init__(self, sizes: StepSizes) -> None:
        super().__init__()
        width = sizes.width
        self.head_width = width // sizes.num_heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (self._heads(projection(normed)) for projection in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        fed: Tensor = x + self.down(F.gelu(self.up(self.feed_norm(x))))
        return fed

    def _heads(self, projected: Tensor) -> Tensor:
        heads: Tensor = projected.unflatten(2, (-1, self.head_width)).transpose(1, 2)  # type: ignore[no-untyped-call]
        return heads


class Transformer(nn.Module):
    """Causal language model."""

    def __init__(self, sizes: StepSizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def training_step(sizes: StepSizes) -> Callable[[], object]:
    """Return a training step on a mesh of 2 x 2: FSDP2 over `dp`, tensor and sequence parallelism over `tp`."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Transformer(sizes)
    _parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.length))

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    sequence = Shard(1)
    outer: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], outer)
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {
            **{name: ColwiseParallel(input_layouts=sequence) for name in ("q", "k", "v", "up")},
            **{name: RowwiseParallel(output_layouts=sequence) for name in ("out", "down")},
            **{name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "feed_norm")},
        }
        assert isinstance(block, Block), "the model's own blocks"
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
