"""Data parallelism with accelerate (the extra `accelerate`); the lines with `recorder` are for proofs.

meshwright prove script docs/examples/script_accelerate.py --layout "1 --accumulate 1" --layout "2"
torchrun --nproc-per-node 2 docs/examples/script_accelerate.py
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright.prove import Recorder

DIM, CLASSES, GLOBAL_BATCH, EPOCHS = 12, 5, 16, 20


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_default_dtype(getattr(torch, options.dtype))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)

    torch.manual_seed(options.seed)
    data = TensorDataset(torch.randn(2 * GLOBAL_BATCH, DIM), torch.randint(CLASSES, (2 * GLOBAL_BATCH,)))
    model = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.LayerNorm(4 * DIM), nn.Linear(4 * DIM, CLASSES))
    size = GLOBAL_BATCH // accelerator.num_processes // options.accumulate
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(data, batch_size=size, shuffle=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder = Recorder(model, optimizer)

    for _ in range(EPOCHS):
        for inputs, targets in loader:
            recorder.batch(inputs, targets)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                recorder.loss(loss)  # of this micro-batch: values of a step are averaged
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    recorder.gradients()
                    recorder.norm(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                if accelerator.sync_gradients:
                    recorder.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
