"""Experts of transformers whose rows travel compute what the same module does for all tokens, whoever gets none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.nn.experts.dispatched import dispatch_tokens
from meshwright.nn.recompute import recompute
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.parallel.expert_dispatch import AllToAllDispatcher

pytest.importorskip("transformers")

N, D, NUM_EXPERTS, RANKS = 6, 8, 4, 2
LIMIT_S = 20
"""For a body: a rank that stays out of a collective is one that the others wait for."""
CHOICES = {
    "several": [[0, 3], [1, 2], [3, 1], [2, 0], [0, 1], [3, 2]],
    "one expert gets none": [[0, 3], [1, 0], [3, 1], [1, 0], [0, 1], [3, 0]],
    "one rank gets none": [[2, 3]] * N,
    "one expert gets all": [[1]] * N,
    "nobody gets any": [[NUM_EXPERTS]] * N,
}
"""Experts of each token; their number stands for none."""


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x_nd: Tensor, experts_nk: Tensor, weights_nk: Tensor) -> Any:
        return x_nd + self.experts(x_nd.tanh(), experts_nk, weights_nk).sin()


def make(kind: str, implementation: str) -> nn.Module:
    """The same module on all ranks; `mixtral` or, with biases, `gpt_oss`."""
    from transformers import GptOssConfig, MixtralConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    of_config, of_experts = {"mixtral": (MixtralConfig, MixtralExperts), "gpt_oss": (GptOssConfig, GptOssExperts)}[kind]
    config = of_config(hidden_size=D, intermediate_size=8, num_local_experts=NUM_EXPERTS)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    made = of_experts(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made if implementation == "grouped_mm" else made.double()


def step(experts: nn.Module, choices: str, rank: int, policy: RecomputePolicy) -> dict[str, Tensor | None]:
    """Output, and gradients of a rank's tokens, weights and parameters."""
    block, dtype = Block(experts), next(experts.parameters()).dtype
    recompute(block, policy)
    experts_nk, generator = torch.tensor(CHOICES[choices]), torch.Generator().manual_seed(rank)
    x_nd = torch.randn(N, D, generator=generator, dtype=dtype, requires_grad=True)
    weights_nk = torch.rand(experts_nk.shape, generator=generator, dtype=dtype, requires_grad=True)
    out_nd = block(x_nd, experts_nk, weights_nk)
    out_nd.square().sum().backward()
    inputs = {"out": out_nd.detach(), "x": x_nd.grad, "weights": weights_nk.grad}
    return inputs | {name: parameter.grad for name, parameter in experts.named_parameters()}


def on_rank(rank: int, world_size: int, kind: str, implementation: str, choices: str) -> list[dict[str, Tensor | None]]:
    found = []
    for policy in (RecomputePolicy.NONE, RecomputePolicy.FULL, RecomputePolicy.SELECTIVE):
        if policy is RecomputePolicy.SELECTIVE and (kind, implementation) == ("gpt_oss", "grouped_mm"):
            continue  # biases are added in place to products, which are kept
        experts: Any = make(kind, implementation)
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.detach().chunk(world_size)[rank].clone()))
        dispatch_tokens(experts)
        assert dist.group.WORLD is not None
        experts.dispatcher = AllToAllDispatcher(NUM_EXPERTS, dist.group.WORLD)
        found.append(step(experts, choices, rank, policy))
    return found


@pytest.mark.parametrize(
    ("kind", "implementation", "choices"),
    [
        ("gpt_oss", "eager", "several"),
        ("mixtral", "eager", "one rank gets none"),
        ("mixtral", "grouped_mm", "one expert gets none"),
        ("gpt_oss", "grouped_mm", "one expert gets all"),
        ("mixtral", "eager", "nobody gets any"),
    ],
)
def test_ranks_compute_what_the_module_does(gang: Any, kind: str, implementation: str, choices: str) -> None:
    found = gang(RANKS).run(on_rank, kind, implementation, choices, timeout_s=LIMIT_S)
    due = [step(make(kind, implementation), choices, rank, RecomputePolicy.NONE) for rank in range(RANKS)]
    tolerance = 1e-12 if implementation == "eager" else 1e-5
    for rank, of_policies in enumerate(found):
        for values in of_policies:
            for name, value in values.items():
                parts = [0.0 if one[name] is None else one[name] for one in due]
                assert value is not None, f"{name} has no gradient, not even zeros"
                expected = parts[rank] if name in ("out", "x", "weights") else sum(parts)
                expected = torch.zeros_like(value) if isinstance(expected, float) else expected
                if expected.shape != value.shape:
                    expected = expected.chunk(RANKS)[rank]
                torch.testing.assert_close(value, expected, rtol=0, atol=tolerance, msg=f"{name} of rank {rank}")
