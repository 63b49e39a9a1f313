"""Plain FSDP2 training with 4-bit gradients and 8-bit weights; only four lines are specific to Meshwright.

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
    """Build a model and apply FSDP2, as without compression."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def main() -> None:
    """Train, with an overflow at step 10 and a restart halfway."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build()
    compression = meshwright.comm.compress(model, gradients="loco4", weights="int8")  # 1. after fully_shard
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(rank)  # each rank has its own data
    for step in range(1, STEPS + 1):
        x = torch.randn(32, DIM, generator=data)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        (loss * torch.inf if step == 10 else loss).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.full_tensor().isfinite():
            optimizer.step()
            compression.commit()  # 2. step taken: carry its rounding errors into the next one
        else:
            compression.discard()  # 3. step skipped: drop its rounding errors
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
    """Save and load the per-rank rounding errors, which belong in a checkpoint next to model and optimizer."""
    file = Path(tempfile.gettempdir()) / f"errors-{os.environ['MASTER_PORT']}-{rank}.pt"
    torch.save(compression.state_dict(), file)  # 4. saved and loaded by the same rank of the same layout
    reloaded = meshwright.comm.compress(model, gradients="loco4", weights="int8")
    reloaded.load_state_dict(torch.load(file))
    file.unlink()
    return reloaded


if __name__ == "__main__":
    main()
