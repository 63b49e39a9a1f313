"""Hugging Face's names for the parameters of our Llama, and the parameters' shapes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.models.huggingface.architecture import MappedTensor, Model
from meshwright.models.huggingface.decoder_tensors import decoder_tensors


def mapped_tensors(model: Model) -> Iterator[MappedTensor]:
    """Yield the parameters of a Llama, in model order."""
    return decoder_tensors(model, _feed_forward)


def _feed_forward(model: Model) -> Iterator[MappedTensor]:
    dim, ffn_dim = model["dim"], model["ffn_dim"]
    yield MappedTensor("ffn.gate.weight", (ffn_dim, dim), ("mlp.gate_proj.weight",))
    yield MappedTensor("ffn.up.weight", (ffn_dim, dim), ("mlp.up_proj.weight",))
    yield MappedTensor("ffn.down.weight", (dim, ffn_dim), ("mlp.down_proj.weight",))
