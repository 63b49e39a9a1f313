"""Tiny models of Hugging Face's causal types, and what a step does with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.hf.tiny_config import tiny_config


def build_tiny(model_type: str, dtype: torch.dtype) -> nn.Module:
    """A tiny model with the same initial weights each time, with experts computed one by one where it has some."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"experts_implementation": "eager"}
    while True:
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(tiny_config(model_type), **options)
        except (TypeError, ValueError) as error:
            if not options or "experts" not in str(error):
                raise
            options = {}
        else:
            return model.to(dtype).train()


def random_tokens(num_samples: int = 2, seq_len: int = 32, seed: int = 1) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, (num_samples, seq_len), generator=torch.Generator().manual_seed(seed))


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits without a cache."""
    return model(input_ids=tokens, use_cache=False).logits


def step(model: nn.Module, tokens: Tensor) -> float:
    """Loss per token of the next one, with gradients left in the parameters."""
    logits = logits_of(model, tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()


def future_leak(model: nn.Module, tokens: Tensor) -> float:
    """Largest change of the first half's logits when the second half's tokens change."""
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = random_tokens(len(tokens), tokens.shape[1] - half, seed=2)
    with torch.no_grad():
        return (logits_of(model, tokens) - logits_of(model, other))[:, :half].abs().max().item()
