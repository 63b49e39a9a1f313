"""A pipeline of torch.distributed.pipelining, written with PyTorch only; the lines with `recorder` are for proofs.

meshwright prove script docs/examples/script_pipeline.py --layout "1" --layout "2" --layout "4"
torchrun --nproc-per-node 2 docs/examples/script_pipeline.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from meshwright.prove import Recorder

DIM, LAYERS, CLASSES, BATCH, MICROBATCHES, EPOCHS = 12, 4, 5, 16, 4, 20


class Layer(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer."""
        return x + F.gelu(self.linear(self.norm(x)))


class Stage(nn.Module):
    """Some of the layers; the last stage also has the head."""

    def __init__(self, layers: list[Layer], head: nn.Linear | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the stage."""
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def clip(stage: nn.Module, limit: float) -> Tensor:
    """Clip gradients by the norm of all stages, and return it."""
    squares = torch.stack([p.grad.square().sum() for p in stage.parameters()]).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    nn.utils.clip_grads_with_norm_(stage.parameters(), limit, norm)
    return norm


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_default_dtype(getattr(torch, options.dtype))
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == num_stages - 1

    # Every rank builds the whole model from the same seed, and keeps its stage.
    torch.manual_seed(options.seed)
    layers, head = [Layer() for _ in range(LAYERS)], nn.Linear(DIM, CLASSES)
    data = TensorDataset(torch.randn(2 * BATCH, DIM), torch.randint(CLASSES, (2 * BATCH,)))
    first = rank * LAYERS // num_stages
    module = Stage(layers[first : (rank + 1) * LAYERS // num_stages], head if is_last else None)

    stage = PipelineStage(module, rank, num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def name_in_model(name: str) -> str:
        parts = name.split(".")
        return f"layers.{int(parts[1]) + first}.{'.'.join(parts[2:])}" if parts[0] == "layers" else name

    recorder = Recorder(module, optimizer, names=name_in_model)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)  # all stages see the same batch
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=BATCH, sampler=sampler):
            recorder.batch(inputs, targets, microbatches=1 if num_stages == 1 else MICROBATCHES)
            losses: list[Tensor] = []
            given = (inputs,) if is_first else ()
            if num_stages == 1:
                loss = F.cross_entropy(module(inputs), targets)
                loss.backward()
                losses.append(loss)
            elif is_last:
                schedule.step(*given, target=targets, losses=losses)
            else:
                schedule.step(*given)
            recorder.gradients()
            norm = clip(module, 0.1)
            optimizer.step()
            if is_last:
                recorder.loss(torch.stack(losses).mean())
            recorder.norm(norm)
            recorder.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
