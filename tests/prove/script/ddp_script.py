"""A script with DistributedDataParallel and SGD, for tests: wrapped names, plain tensors, a loss of each rank."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.prove import Recorder

DIM, BATCH = 8, 12


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_default_dtype(getattr(torch, options.dtype))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = Recorder(model, optimizer)
    for step in range(10):
        draw = torch.Generator().manual_seed(step)
        batch = torch.randn(BATCH, DIM, generator=draw)
        inputs = batch[rank::size]
        recorder.batch(inputs)
        loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
        loss.backward()
        recorder.gradients()
        recorder.loss(loss)
        optimizer.step()
        recorder.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
