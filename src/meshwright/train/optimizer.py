"""AdamW over sharded parameters, its state as named tensors, and the global gradient norm.

State is allocated up front, so that checkpoints at every step, including step 0, contain the same names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from meshwright.config.schema import TrainConfig
from meshwright.mesh.local_shards import num_shards, to_local
from meshwright.parallel.rank_model import RankModel

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


class ShardAdamW(torch.optim.AdamW):
    """Fused AdamW that steps on this rank's shards.

    The update is elementwise, so local shards suffice, and each gradient already has its parameter's placement. Going
    through DTensor dispatch triples the kernel's host time (4.1 ms instead of 1.3 ms for 147 parameters).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            steps, averages, squares = (
                [to_local(self.state[parameter][name]) for parameter in parameters] for name in STATE_NAMES
            )
            adamw(
                [to_local(parameter) for parameter in parameters],
                [to_local(parameter.grad) for parameter in parameters],
                averages,
                squares,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def build_optimizer(model: RankModel, config: TrainConfig) -> torch.optim.AdamW:
    """Build AdamW (Loshchilov and Hutter 2019) with weight decay on matrices but not on vectors (norm weights)."""
    parameters = [p for p in model.parameters() if p.requires_grad]  # empty for a stage without layers
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = ShardAdamW(
        [group for group in groups if group["params"]] or groups[:1],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for parameter in parameters:
        # The fused kernel expects the step count as float32 on the parameter's device.
        step = torch.zeros((), dtype=torch.float32, device=to_local(parameter).device)
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in STATE_NAMES[1:]}
        optimizer.state[parameter] = {"step": step, **moments}
    return optimizer


def named_state(model: RankModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return model and optimizer state as a flat dict keyed `model.<parameter>` and `optimizer.<state>.<parameter>`.

    The tensors are live: a checkpoint is loaded into them in place.
    """
    tensors: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers(saved_only=True):
        tensors[f"model.{name}"] = buffer
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for kind in STATE_NAMES:
            if parameter in optimizer.state:
                tensors[f"optimizer.{kind}.{name}"] = optimizer.state[parameter][kind]
    return tensors


@torch.no_grad()
def local_squared_norm(
    parameters: Iterable[nn.Parameter], *, num_ranks: int, device: torch.device | None = None
) -> Tensor:
    """Return this rank's contribution to the squared global gradient norm, a float64 scalar to sum over all ranks.

    Each gradient shard is held by `num_ranks / num_shards` ranks and weighted by the inverse on each of them, so that
    every parameter counts once on any layout. (`clip_grad_norm_` stacks norms, which fails across meshes.)

    Args:
        parameters: this rank's parameters, excluding shared ones that another stage counts.
        num_ranks: number of ranks in a pipeline stage, over which parameters are sharded or replicated.
        device: device of the result if there are no gradients.
    """
    by_num_shards: dict[int, list[Tensor]] = defaultdict(list)
    device = device or torch.device("cpu")
    for parameter in parameters:
        if parameter.grad is not None:
            by_num_shards[num_shards(parameter.grad)].append(to_local(parameter.grad))
            device = to_local(parameter.grad).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shards, gradients in by_num_shards.items():
        norm = torch.nn.utils.get_total_norm(gradients).to(torch.float64)
        total += norm * norm * (shards / num_ranks)
    return total


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            to_local(parameter.grad).mul_(factor)
