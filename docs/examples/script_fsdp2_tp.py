"""FSDP2 with tensor and sequence parallelism, written with PyTorch only; the lines with `recorder` are for proofs.

meshwright prove script docs/examples/script_fsdp2_tp.py --layout "1 --accumulate 1" --layout "4 --tp 2"
torchrun --nproc-per-node 4 docs/examples/script_fsdp2_tp.py --tp 2
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from meshwright.prove import Recorder

VOCAB, DIM, LAYERS, SEQUENCE, GLOBAL_BATCH, EPOCHS = 32, 16, 2, 8, 16, 20


class Block(nn.Module):
    """A normalised feed-forward layer, which mixes neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the next token; input and output embeddings are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism, with activations sharded over the sequence between layers, then FSDP2."""
    if mesh["tp"].size() > 1:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        model.head.weight = model.embed.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def local(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def reduce_norm_gradients(model: Model, mesh: DeviceMesh) -> None:
    """Sum the gradients of norms over tp: each rank has seen its part of the sequence only."""
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.grad is not None:
            dist.all_reduce(local(parameter.grad), group=mesh["tp"].get_group())


def global_norm(model: Model) -> Tensor:
    """Return the norm of all gradients; each is on its own mesh."""
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return torch.stack([norm.full_tensor() for norm in norms]).norm()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_default_dtype(getattr(torch, options.dtype))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    dp_size, dp_rank = mesh["dp"].size(), mesh["dp"].get_local_rank()

    torch.manual_seed(options.seed)
    corpus = torch.randint(VOCAB, (2 * GLOBAL_BATCH, SEQUENCE + 1))
    model = Model()
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = Recorder(model, optimizer)

    data = TensorDataset(corpus[:, :-1], corpus[:, 1:])
    sampler = DistributedSampler(data, num_replicas=dp_size, rank=dp_rank, shuffle=True)
    size = GLOBAL_BATCH // dp_size // options.accumulate
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for at, (inputs, targets) in enumerate(DataLoader(data, batch_size=size, sampler=sampler), 1):
            recorder.batch(inputs, targets)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss = loss / options.accumulate
            loss.backward()
            total += loss.detach()
            if at % options.accumulate:
                continue
            reduce_norm_gradients(model, mesh)
            recorder.gradients()
            norm = global_norm(model)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_((0.1 / norm).clamp(max=1.0))
            optimizer.step()
            recorder.loss(total)
            recorder.norm(norm)
            recorder.step()
            optimizer.zero_grad()
            total = torch.zeros(())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
