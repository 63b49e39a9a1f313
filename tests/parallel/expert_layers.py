"""One layer's experts on several ranks, and all of them on one: what both compute, and what the ranks sent for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.alltoallv import _in_flight
from meshwright.comm.collective_log import group_record
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router import Routing
from meshwright.nn.experts.router_config import RouterConfig
from meshwright.nn.linear import compute_deferred, defer_weight_gradients
from meshwright.nn.recompute import recompute
from meshwright.parallel.expert_dispatch import AllToAllDispatcher

B, T, D, EXPERT_DIM, NUM_EXPERTS = 2, 5, 4, 6, 8
EXPERTS = ("experts.gate", "experts.up", "experts.down")


@dataclass(frozen=True)
class Case:
    """Whom tokens go to."""

    experts: tuple[int, ...] = ()
    """Those that tokens choose in turn; the router's choice if empty."""
    top_k: int = 2
    capacity_factor: float | None = None
    without_room: tuple[int, ...] = ()
    """Ranks that drop every choice."""
    shared_dim: int = 0

    def config(self) -> RouterConfig:
        """The router's settings."""
        return RouterConfig(NUM_EXPERTS, self.top_k, balance_loss=0.1, capacity_factor=self.capacity_factor)


def make(case: Case, rank: int) -> tuple[MixtureOfExperts, Tensor]:
    """The whole layer, the same on all ranks, and this rank's tokens."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(D, case.config(), expert_dim=EXPERT_DIM, shared_dim=case.shared_dim).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    if case.experts:
        layer.router.best = lambda scores_bte: in_turn(case, scores_bte)
    if rank in case.without_room:
        route = layer.router.forward
        layer.router.forward = lambda x_btd: drop_all(route(x_btd))
    x_btd = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return layer, x_btd


def drop_all(routing: Routing) -> Routing:
    """The same without any choice."""
    experts_nk, weights_nk = torch.full_like(routing.experts_nk, NUM_EXPERTS), routing.weights_nk * 0.0
    return replace(routing, experts_nk=experts_nk, weights_nk=weights_nk, drops=True)


def in_turn(case: Case, scores_bte: Tensor) -> Tensor:
    """Experts [b, t, k], the same for all samples."""
    choices = torch.tensor(case.experts * (T * case.top_k))[: T * case.top_k]
    return choices.view(1, T, case.top_k).expand(scores_bte.shape[0], -1, -1)


def keep_experts(layer: MixtureOfExperts, rank: int, world_size: int) -> None:
    """Leave this rank its experts, and let tokens travel."""
    for name in EXPERTS:
        parameter = layer.get_parameter(name)
        mine = parameter.detach().chunk(world_size)[rank].clone()
        setattr(layer.experts, name.removeprefix("experts."), nn.Parameter(mine))
    assert dist.group.WORLD is not None
    layer.dispatcher = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD)


@dataclass(frozen=True)
class Result:
    """What a rank computed."""

    out_btd: Tensor
    gradients: dict[str, Tensor | None]
    """Of parameters, and of the tokens: `x`."""
    num_collectives: tuple[int, int] = (0, 0)
    """Of the forward and of the backward."""
    split_reads: tuple[int, int] = (0, 0)
    bytes_sent: tuple[int, int] = (0, 0)
    in_flight: int = 0
    """Transfers that nobody waited for."""


class After(nn.Module):
    """A layer within a block: something before and after it."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_btd: Tensor) -> Tensor:
        """Map [b, t, d] to [b, t, d]."""
        out: Tensor = x_btd + self.layer(x_btd.tanh())
        return out


def compute(layer: MixtureOfExperts, x_btd: Tensor, *, how: str = "plain", frozen: Sequence[str] = ()) -> Result:
    """A forward and a backward; `how`: plain, recompute, or deferred."""
    for name in frozen:
        if name != "x":
            layer.get_submodule(name).requires_grad_(False)
    x_btd = x_btd.clone().requires_grad_("x" not in frozen)
    block = After(layer)
    store = defer_weight_gradients(block) if how == "deferred" else None
    if store is not None:
        store.defers = True
    if how == "recompute":
        recompute(block)
    marks = [_counts()]
    out_btd = block(x_btd)
    marks.append(_counts())
    out_btd.square().sum().backward()
    marks.append(_counts())
    if store is not None:
        compute_deferred(store.take())
    gradients = {name: p.grad for name, p in layer.named_parameters()} | {"x": x_btd.grad}
    collectives, reads, sent = (
        (after[n] - before[n], last[n] - after[n]) for before, after, last in [marks] for n in range(3)
    )
    return Result(out_btd.detach(), gradients, collectives, reads, sent, len(_in_flight()))


def _counts() -> tuple[int, int, int]:
    if not dist.is_initialized():
        return 0, 0, 0
    record = group_record(None)
    return record.count, record.split_reads, record.sent["all_to_all"]


def on_rank(rank: int, world_size: int, case: Case, options: Sequence[dict[str, Any]]) -> list[Result]:
    """Results of a rank that holds its experts only."""
    found = []
    for named in options:
        layer, x_btd = make(case, rank)
        keep_experts(layer, rank, world_size)
        found.append(compute(layer, x_btd, **named))
    return found


def reference(case: Case, world_size: int, **named: Any) -> list[Result]:
    """The same of a rank that holds all experts, each rank's tokens after the other's; experts' gradients are sums."""
    found = []
    for rank in range(world_size):
        layer, x_btd = make(case, rank)
        found.append(compute(layer, x_btd, **named))
    for name in EXPERTS:
        parts = [one.gradients[name] for one in found]
        total = None if parts[0] is None else sum(parts)
        for rank, one in enumerate(found):
            one.gradients[name] = None if total is None else total.chunk(world_size)[rank]
    return [replace(one) for one in found]
