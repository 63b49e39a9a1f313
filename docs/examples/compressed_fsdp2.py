"""A plain FSDP2 training whose gradients travel in four bits and whose weights in eight: four lines are Meshwright's.

torchrun --nproc-per-node 2 docs/examples/compressed_fsdp2.py
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import meshwright.comm

DIM, STEPS = 64, 60


def build() -> nn.Sequential:
    """A model with FSDP2 applied, as it would be without compression."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def main() -> None:
    """Train, with a step that overflows and a restart in the middle."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build()
    compression = meshwright.comm.compress(model, gradients="loco4", weights="int8")  # 1. after fully_shard
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(rank)  # each rank has its own
    for step in range(1, STEPS + 1):
        x = torch.randn(32, DIM, generator=data)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        (loss * torch.inf if step == 10 else loss).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.full_tensor().isfinite():
            optimizer.step()
            compression.commit()  # 2. the step was taken: its rounding errors go into the next one
        else:
            compression.discard()  # 3. the step is skipped: they are forgotten
            if rank == 0:
                print(f"step {step} is skipped on all ranks")
        optimizer.zero_grad()
        if step == STEPS // 2:
            compression = restarted(model, compression, rank)
        if rank == 0 and step in (1, STEPS):
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        sent = compression.sent()
        print(f"bytes sent since the restart: {sent.payload} instead of {sent.exact}")
    dist.destroy_process_group()


def restarted(model: nn.Module, compression: meshwright.comm.Compression, rank: int) -> meshwright.comm.Compression:
    """What belongs to a checkpoint besides model and optimizer: the errors, which each rank has of its own."""
    file = Path(tempfile.gettempdir()) / f"errors-{os.environ['MASTER_PORT']}-{rank}.pt"
    torch.save(compression.state_dict(), file)  # 4. saved, and loaded by the same rank of the same layout
    again = meshwright.comm.compress(model, gradients="loco4", weights="int8")
    again.load_state_dict(torch.load(file))
    file.unlink()
    return again


if __name__ == "__main__":
    main()
