"""Mixtral's names in Hugging Face's format for the parameters of our mixture of experts. Torch-free.

Files have one tensor per expert and projection; ours stacks all experts' tensors of a projection. transformers 5
stacks them in memory as well, joining gate and up, but its files have not changed. Checked against 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.models.huggingface.architecture import MappedTensor, Model
from meshwright.models.huggingface.decoder_tensors import decoder_tensors


def mapped_tensors(model: Model) -> Iterator[MappedTensor]:
    """Yield the parameters of a Mixtral, in model order."""
    return decoder_tensors(model, _feed_forward)


def load_counters(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Return the names and shapes of the routers' counters of tokens per expert."""
    return {f"blocks.{i}.moe.router.load.value": (model["num_experts"],) for i in range(model["num_layers"])}


def _feed_forward(model: Model) -> Iterator[MappedTensor]:
    num_experts, dim, expert_dim = model["num_experts"], model["dim"], model["expert_dim"]
    gate = "block_sparse_moe.gate.weight"  # the router; a projection of an expert in ours is also called gate
    yield MappedTensor("moe.router.gate.weight", (num_experts, dim), (gate,))
    yield _stack("gate", "w1", num_experts, (expert_dim, dim))
    yield _stack("up", "w3", num_experts, (expert_dim, dim))
    yield _stack("down", "w2", num_experts, (dim, expert_dim))


def _stack(ours: str, theirs: str, num_experts: int, shape: tuple[int, int]) -> MappedTensor:
    names = tuple(f"block_sparse_moe.experts.{j}.{theirs}.weight" for j in range(num_experts))
    return MappedTensor(f"moe.experts.{ours}", (num_experts, *shape), names, is_stacked=True)
