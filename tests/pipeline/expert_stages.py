"""Toy stages with an all-to-all in flight in each forward and backward, for tests of overlapped pairs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm.overlap import switch_task
from meshwright.nn.linear import Linear, defer_weight_gradients
from meshwright.nn.recompute import recompute

WIDTH = 4


class GroupExchange:
    """All-to-all of equal parts over a process group."""

    def __init__(self, group):
        self.group = group

    def __call__(self, name, x):
        received = torch.empty_like(x)
        work = dist.all_to_all_single(received, x.contiguous(), group=self.group, async_op=True)
        switch_task()
        work.wait()
        return received


class Exchange(torch.autograd.Function):
    """An exchange whose backward is the same exchange."""

    @staticmethod
    def forward(ctx, x, exchange, name):
        ctx.exchange, ctx.name = exchange, name
        return exchange(f"F{name}", x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.exchange(f"B{ctx.name}", gradient), None, None


class Experts(nn.Module):
    """A linear layer, exchange, linear layer and exchange back."""

    def __init__(self, number, exchange):
        super().__init__()
        torch.manual_seed(number)
        self.attention, self.experts = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.number, self.exchange = number, exchange

    def forward(self, x):
        x = Exchange.apply(self.attention(x).tanh(), self.exchange, f"{self.number} dispatch")
        return Exchange.apply(self.experts(x).tanh(), self.exchange, f"{self.number} combine")


class ExpertStage:
    """A stage of expert layers."""

    def __init__(self, number, num_stages, batches, exchange, *, overlaps, splits=False, recomputes=False):
        self.number, self.is_last, self.batches = number, number == num_stages - 1, batches
        self.module = Experts(number, exchange).double()
        self.overlaps = overlaps
        self.weight_gradients = defer_weight_gradients(self.module) if splits else None
        if recomputes:
            recompute(self.module)

    def forward(self, microbatch, x):
        y = self.module(self.batches[microbatch] if x is None else x)
        return y.square().sum() if self.is_last else y

    def before_backward(self, *, reduces):
        pass

    def reduce(self, *, done):
        pass

    unshard = reshard = lambda self: None

    def sync_shared(self, group_index):
        pass

    def gradients(self):
        return [parameter.grad for parameter in self.module.parameters()]
