"""Seeded faults of models of transformers, planted on a built job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.config.schema import RunConfig
from meshwright.mesh.local_shards import to_local
from meshwright.models.foreign import stage as stage_module
from meshwright.models.hf import origin as origin_module
from meshwright.models.hf.attention import Attending
from meshwright.nn.experts.grouped_linear import RowGroups
from meshwright.nn.experts.router import Routing
from meshwright.prove.result import ProofResult
from meshwright.train import pipeline_stages
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.gangs.gang import GangPool
from tests.prove.proofs import Seed, proof
from tests.prove.seeded_faults import skip_partial_sums_over_tp


def float32_inside(job: Job, step: TrainStep) -> None:
    """Ranks keep the model's casts to float32; the reference, in another process, has none."""
    stage_module.Float64Mode = nullcontext  # type: ignore[assignment,misc]


def other_ranks_experts(job: Job, step: TrainStep) -> None:
    """Ranks compute the tokens of the other rank's experts with their own."""
    for module in job.model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(_shift_experts, prepend=True)


def _shift_experts(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, index, *others = inputs
    return x, (index + module.num_experts) % (2 * module.num_experts), *others


def dispatching(change: Callable[[Any, Routing], Routing], after: Callable[[Any], None] = lambda dispatch: None) -> Any:
    """Change what the dispatchers of experts are told, or the dispatches that they start."""

    def tamper(job: Job, step: TrainStep) -> None:
        for module in job.model.modules():
            if type(module).__name__.endswith("Experts"):
                _change_dispatcher(module, change, after)

    return tamper


def _change_dispatcher(module: Any, change: Callable[[Any, Routing], Routing], after: Callable[[Any], None]) -> None:
    start = module.dispatcher.start

    def started(x: Any, routing: Routing, cache: Any) -> Any:
        dispatch = start(x, change(module.dispatcher, routing), cache)
        after(dispatch)
        return dispatch

    module.dispatcher.start = started


def _to_neighbours(dispatcher: Any, routing: Routing) -> Routing:
    num_local = dispatcher.num_experts // dist.get_world_size(dispatcher.group)
    return replace(routing, experts_nk=(routing.experts_nk + num_local) % dispatcher.num_experts)


def _one_row_later(dispatch: Any) -> None:
    """The first expert of each rank gets a row less, and the second one more."""
    receive = dispatch.receive

    def received() -> Any:
        rows = receive()
        (first, second, *others) = rows.groups.sizes
        sizes = [first - 1, second + 1, *others] if first else rows.groups.sizes
        return replace(rows, groups=RowGroups(torch.tensor(sizes)))

    dispatch.receive = received


def _weighted_again(dispatch: Any) -> None:
    combine = dispatch.combine
    dispatch.combine = lambda rows, out: combine(rows, out * rows.weights_r[:, None])


def shared_by_each_rank(job: Job, step: TrainStep) -> None:
    """Each rank of ep adds the output of the experts that all tokens pass."""
    for module in job.model.modules():
        if hasattr(module, "shared_experts"):
            _add_shared(module, job.config.mesh.ep - 1)


def _add_shared(module: Any, times: int) -> None:
    outputs: list[Any] = []
    module.shared_experts.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    module.register_forward_hook(lambda module, inputs, out: out + times * outputs.pop())


def documents_in_one(job: Job, step: TrainStep) -> None:
    """Masks of ranks have no documents; the reference runs each document alone."""
    Attending.mask = mask_without_documents(Attending.mask)  # type: ignore[method-assign]


def mask_without_documents(mask: Callable[..., Any]) -> Any:
    def without_documents(self: Attending, *args: Any) -> Any:
        self.layout = self.layout and replace(self.layout, documents=None)
        return mask(self, *args)

    return without_documents


def other_layers_window(job: Job, step: TrainStep) -> None:
    """Attention of layer 1 gets the mask of layer 0."""
    layers = job.model.parts[0].module.get_submodule("model.layers")
    first, second = (layers.get_submodule(f"{number}.self_attn") for number in range(2))
    masks: list[Any] = []
    first.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    second.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": masks.pop()}), with_kwargs=True
    )


def local_positions(job: Job, step: TrainStep) -> None:
    """Positions count from the first token of a rank's shard."""

    def given(layout: Any, ids: Tensor, first: int = 0) -> dict[str, Tensor]:
        return {"position_ids": torch.arange(ids.shape[1]).expand(ids.shape)}

    origin_module.given_positions = given  # type: ignore[assignment]


def without_sinks(job: Job, step: TrainStep) -> None:
    """Attention of layer 2 has no sinks."""
    module: Any = job.model.parts[0].module.get_submodule("model.layers.2.self_attn")
    core = module.core

    class WithoutSinks(type(core)):  # type: ignore[misc]
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scores: Any) -> Tensor:
            return super().__call__(q, k, v, mask, replace(scores, sinks_n=None))

    core.__class__ = WithoutSinks


def averaged_adapters(job: Job, step: TrainStep) -> None:
    """Ranks average over tp what the first matrices of adapters should get the sum of."""
    for module in job.model.modules():
        for first in getattr(module, "lora_A", {}).values():
            first.register_forward_hook(lambda module, inputs, out: out / 2 + (out / 2).detach())


def other_mask_on_later_stages(job: Job, step: TrainStep) -> None:
    """Attention of stages after the first sees the keys after the query."""
    for number, part in job.parts().items():
        for module in part.module.modules() if number else ():
            if hasattr(module, "is_causal"):
                module.is_causal = False


def other_epsilon_on_later_stages(job: Job, step: TrainStep) -> None:
    for number, part in job.parts().items():
        for module in part.module.modules() if number else ():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-2


def carried_without_gradient(job: Job, step: TrainStep) -> None:
    """Only the stream's gradient goes back to earlier stages."""
    receive = stage_module.receive

    def detached(arguments: Any, state: Any) -> None:
        receive(arguments, [state[0], *((one, carried.detach()) for one, carried in state[1:])])

    stage_module.receive = detached


def sum_accumulated_over_tp(job: Job, step: TrainStep) -> None:
    """All-reduce what has accumulated after every backward, as transformers' `replicated_with_grad_allreduce` does."""
    set_sync, sync = pipeline_stages.set_gradient_sync, pipeline_stages.sync_partial_gradients

    def sum_accumulated(model: nn.Module) -> list[nn.Parameter]:
        partial = [p for p in model.parameters() if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial()]
        for parameter in partial:
            dist.all_reduce(to_local(parameter.grad), group=parameter.grad.device_mesh.get_group("tp"))
        return partial

    def before_backward(model: nn.Module, reduces: bool) -> None:
        sum_accumulated(model)
        set_sync(model, reduces)

    def after_last(model: nn.Module) -> None:
        for parameter in sum_accumulated(model):
            local, of = to_local(parameter.grad), parameter.data
            parameter.grad = DTensor.from_local(local, of.device_mesh, of.placements, run_check=False)
        sync(model)

    pipeline_stages.set_gradient_sync, pipeline_stages.sync_partial_gradients = before_backward, after_last


FAULTS = {
    "keys after the query are seen on later stages": other_mask_on_later_stages,
    "another epsilon on later stages": other_epsilon_on_later_stages,
    "adapters are averaged over tp": averaged_adapters,
    # Gradients of norms of heads stay those of the rank's own heads, as if the norms were replicated.
    "norms of heads are not summed over tp": skip_partial_sums_over_tp,
    "accumulated norms of heads are summed over tp in every backward": sum_accumulated_over_tp,
    "float32 inside of one side": float32_inside,
    "experts of the other rank": other_ranks_experts,
    "experts of the neighbouring rank": dispatching(_to_neighbours),
    "numbers of rows are off by one": dispatching(lambda _, routing: routing, _one_row_later),
    "routing weights are applied twice": dispatching(lambda _, routing: routing, _weighted_again),
    "shared experts are added by each rank": shared_by_each_rank,
    "packed documents see each other": documents_in_one,
    "the window of another layer": other_layers_window,
    "positions in the shard": local_positions,
    "sinks are left out": without_sinks,
    "what passes with the stream has no gradient": carried_without_gradient,
}


REPLACED = (stage_module, origin_module, Attending)


def seed_of(fault: str) -> Seed:
    """A fault by name, or none."""
    return Seed(__name__, "FAULTS", fault) if fault else Seed()


def proof_of(gang: GangPool, config: RunConfig, fault: str = "") -> ProofResult:
    """The proof with a fault, if one is named."""
    return proof(gang, config, seed_of(fault))
