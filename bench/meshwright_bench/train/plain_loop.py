"""The opponent: the training loop a good engineer writes in plain PyTorch for the same model and the same batches.

It uses none of Meshwright but what both sides must share to compute the same thing: the family's module,
the initial values, the order of samples and the learning rate of a step. It looks at nothing while it trains: no
metrics, no check for non-finite losses, no wish to stop, and on CUDA no wait for the device.

bfloat16 is mixed precision by hand, which is what FSDP2's policy amounts to on one rank: weights and activations in
bfloat16, float32 masters that the optimizer updates, gradients brought to float32. (Under `torch.autocast`, the
other common way, the residual stream stays float32 and every product casts its weight again: more work.)

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
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.data.sampler import WindowOrder
from meshwright.data.text_corpus import Tokens
from meshwright.models.contract.model_facts import Part
from meshwright.train.build_job import initialize
from meshwright.train.lr_schedule import learning_rate

BareStep = Callable[[int], Tensor]
"""Runs the step numbered so, from 1; returns this rank's mean loss, which nothing waits for."""


class BareBatches:
    """All tokens as one tensor on the device, and every step's windows worked out beforehand."""

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
        self._reach = torch.arange(train.seq_len + 1, device=device)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the step numbered `step`, from 1."""
        tokens_bt = self._tokens[self._starts[step - 1][:, None] + self._reach].long()
        return tokens_bt[:, :-1], tokens_bt[:, 1:]


def bare_step(config: RunConfig, batches: BareBatches, *, device: torch.device) -> BareStep:
    """The bare counterpart of a run: one process in float32 or bfloat16, or FSDP2 over all ranks in float32."""
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
    """The loop in the parameters' own precision, sharded or not."""
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
    """The loop with bfloat16 weights and activations, and float32 masters, gradients and moments."""
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
    """Fused AdamW; matrices decay, vectors do not."""
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
    """That of the step, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config)
