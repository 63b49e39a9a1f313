"""Baseline: a well-written training loop in plain PyTorch for the same model and the same batches.

It shares with Meshwright only what both sides need to compute the same losses: the module of the model family, initial
values, sample order and learning rates. It has no metrics, no check for non-finite losses, no stop requests and, on
CUDA, no synchronization with the device.

bfloat16 means mixed precision by hand, equivalent to FSDP2's policy on one rank: weights and activations in bfloat16,
float32 master weights that the optimizer updates, gradients converted to float32. (`torch.autocast`, the other common
method, keeps the residual stream in float32 and casts each weight in every product, which is more work.)

Shapes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.resolve import learning_rate
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.data.sampler import WindowOrder
from meshwright.data.text_corpus import Tokens
from meshwright.models.contract.model_facts import Part
from meshwright.train.build_job import initialize

BareStep = Callable[[int], Tensor]
"""Function that runs the step of a given number, from 1, and returns this rank's mean loss without synchronizing."""


class BareBatches:
    """Batches of a run: the tokens as one device tensor, with precomputed windows for each step."""

    def __init__(
        self, tokens: Tokens, order: WindowOrder, config: RunConfig, *, num_steps: int, rank: int, device: torch.device
    ) -> None:
        train = config.train
        batch = train.global_batch // config.mesh.axes().num_ranks()
        samples = torch.arange(num_steps)[:, None] * train.global_batch + rank * batch + torch.arange(batch)
        windows = torch.from_numpy(order.windows(samples.numpy()))
        dtype = torch.uint8 if tokens.dtype.itemsize == 1 else torch.int32
        self._tokens = torch.tensor(tokens, dtype=dtype, device=device)
        self._starts = (windows * train.seq_len).to(device)
        self._offsets = torch.arange(train.seq_len + 1, device=device)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, numbered from 1."""
        tokens_bt = self._tokens[self._starts[step - 1][:, None] + self._offsets].long()
        return tokens_bt[:, :-1], tokens_bt[:, 1:]


def bare_step(config: RunConfig, batches: BareBatches, *, device: torch.device) -> BareStep:
    """Build the bare counterpart of a run: one process in float32 or bfloat16, or FSDP2 over all ranks in float32."""
    train = config.train
    with device:
        f = run_facts(config)
        model = config.family.build(f, Part(range(model_facts(config).num_layers)))
    initialize(model.named_parameters(), config.family, f)
    blocks = list(model.get_submodule("blocks").children())
    if train.compile:
        for block in blocks:
            block.compile()
    if train.precision == "bfloat16":
        return mixed_loop(model, batches, train)
    num_ranks = config.mesh.axes().num_ranks()
    if num_ranks > 1:
        mesh = init_device_mesh(device.type, (num_ranks,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return plain_loop(model, batches, train)


def plain_loop(model: nn.Module, batches: BareBatches, config: TrainConfig) -> BareStep:
    """Return a step in the precision of the parameters, sharded or not."""
    weights = list(model.parameters())
    optimizer = adamw(weights, config)

    def step(number: int) -> Tensor:
        inputs_bt, targets_bt = batches[number]
        loss = F.cross_entropy(model(inputs_bt).flatten(0, 1), targets_bt.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights, config.max_grad_norm)
        set_learning_rate(optimizer, number, config)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mixed_loop(model: nn.Module, batches: BareBatches, config: TrainConfig) -> BareStep:
    """Return a step with bfloat16 weights and activations, and float32 master weights, gradients and moments."""
    masters = [nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
    weights = list(model.to(torch.bfloat16).parameters())
    optimizer = adamw(masters, config)

    def step(number: int) -> Tensor:
        inputs_bt, targets_bt = batches[number]
        loss = F.cross_entropy(model(inputs_bt).flatten(0, 1).float(), targets_bt.flatten())
        torch.autograd.backward(loss)
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        nn.utils.clip_grad_norm_(masters, config.max_grad_norm)
        set_learning_rate(optimizer, number, config)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        return loss.detach()

    return step


def adamw(weights: list[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """Return a fused AdamW with weight decay for matrices but not for vectors."""
    return torch.optim.AdamW(
        [
            {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainConfig) -> None:
    """Set the learning rate of a step in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config)
