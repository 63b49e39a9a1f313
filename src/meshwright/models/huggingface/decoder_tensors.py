"""Parameters that all our decoders share with Hugging Face's, with both names.

Our rotary embedding pairs elements like Hugging Face's (first half with second half), so weights map by name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from meshwright.models.huggingface.architecture import MappedTensor, Model

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def decoder_tensors(model: Model, feed_forward: Callable[[Model], Iterable[MappedTensor]]) -> Iterator[MappedTensor]:
    """Yield the parameters of a decoder in model order.

    Args:
        model: our description.
        feed_forward: yields the parameters of one block after `ffn_norm`, with names inside the block.
    """
    dim, vocab_size = model["dim"], model["vocab_size"]
    block = [*_attention(model), *feed_forward(model)]
    yield MappedTensor("embed.weight", (vocab_size, dim), (EMBEDDING,))
    for i in range(model["num_layers"]):
        for tensor in block:
            yield tensor.inside(f"blocks.{i}", f"model.layers.{i}")
    yield MappedTensor("norm.weight", (dim,), ("model.norm.weight",))
    if not model["tie_embeddings"]:
        yield MappedTensor("head.weight", (vocab_size, dim), (HEAD,))


def _attention(model: Model) -> Iterator[MappedTensor]:
    dim = model["dim"]
    q_dim, kv_dim = model["num_heads"] * model["head_dim"], model["num_kv_heads"] * model["head_dim"]
    yield MappedTensor("attention_norm.weight", (dim,), ("input_layernorm.weight",))
    yield MappedTensor("attention.wq.weight", (q_dim, dim), ("self_attn.q_proj.weight",))
    yield MappedTensor("attention.wk.weight", (kv_dim, dim), ("self_attn.k_proj.weight",))
    yield MappedTensor("attention.wv.weight", (kv_dim, dim), ("self_attn.v_proj.weight",))
    yield MappedTensor("attention.wo.weight", (dim, q_dim), ("self_attn.o_proj.weight",))
    yield MappedTensor("ffn_norm.weight", (dim,), ("post_attention_layernorm.weight",))
