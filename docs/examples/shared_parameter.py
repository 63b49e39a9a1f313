"""Two pipeline stages that share an embedding, trained by a plain loop: its replicas stay bitwise equal.

python docs/examples/shared_parameter.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from meshwright.parallel.pipeline_shared_gradients import SharedGradients
from meshwright.pipeline.split_layers import SharedParameter

DIM, CLASSES, STEPS, MAX_NORM = 16, 10, 20, 1.0


class Stage(nn.Module):
    """Half of the model. Both halves are conditioned on the label, so each has a replica of the label embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Embedding(CLASSES, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """Map [batch, DIM] to [batch, DIM]."""
        return x + self.mlp(x + self.label(label))


# One shared parameter: its key, and for each replica the stage and the parameter's name in that stage's module.
SHARED = [SharedParameter("label.weight", sites=((0, "label.weight"), (1, "label.weight")))]


def train(rank: int, rendezvous: str) -> None:
    """Train one stage: rank 0 the first, rank 1 the second."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(rank)  # the stages, and so the replicas, start differently
    stage = Stage()
    shared = SharedGradients(SHARED, {rank: stage})  # checks the declarations; replicas get stage 0's weights
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(0)  # the same on both ranks
    for step in range(1, STEPS + 1):
        x, label = torch.randn(32, DIM, generator=data), torch.randint(CLASSES, (32,), generator=data)
        loss = forward_backward(rank, stage, x, label)
        shared.sync_all()  # after the last backward, before anything reads the gradients
        clip(stage, shared)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step in (1, STEPS):
            print(f"step {step}: loss {loss:.3f}")
    replicas = [torch.empty(CLASSES, DIM) for _ in range(2)]
    dist.all_gather(replicas, stage.label.weight.detach())
    if rank == 1:
        print(f"copies bitwise equal: {torch.equal(*replicas)}")
    dist.destroy_process_group()


def forward_backward(rank: int, stage: Stage, x: Tensor, label: Tensor) -> float:
    """Run forward and backward of one micro-batch; return the loss on the last stage, else 0."""
    target = torch.nn.functional.one_hot(label, DIM).float()
    if rank == 0:
        y = stage(x, label)
        dist.send(y.detach(), 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, 1)
        y.backward(gradient)
        return 0.0
    x = torch.empty_like(x)
    dist.recv(x, 0)
    x.requires_grad_()
    loss = (stage(x, label) - target).square().mean()
    loss.backward()
    dist.send(x.grad, 0)
    return loss.item()


def clip(stage: Stage, shared: SharedGradients) -> None:
    """Clip the gradient norm over both stages to MAX_NORM, counting the shared gradient once."""
    counted = [p.grad.square().sum() for p in stage.parameters() if p not in shared.duplicates]
    squared_norm = torch.stack(counted).sum()
    dist.all_reduce(squared_norm)
    for parameter in stage.parameters():
        parameter.grad.mul_(MAX_NORM / squared_norm.sqrt().clamp(min=MAX_NORM))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"{folder}/rendezvous",), nprocs=2)
