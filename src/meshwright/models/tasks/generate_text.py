"""Generate text from a model during training, on any layout: all ranks run the same forward passes.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.comm.collectives import broadcast_object
from meshwright.models.contract.task import Forward, SimpleBatch
from meshwright.nn.attention.token_layout import TokenLayout


def generate(
    forward: Forward, prompt: Sequence[int], *, seq_len: int, num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Continue `prompt` by `num_tokens` sampled tokens.

    The context is padded to the training length, to keep the shapes that the layout was checked for; causal attention
    ignores the padding. The first rank with the logits samples each token and broadcasts it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    inputs_bt = torch.zeros((1, seq_len), dtype=torch.int64, device=forward.device)
    batch = SimpleBatch(inputs_bt, (TokenLayout(seq_len),))
    with forward.evaluating(1, batch_size=1) as run:
        for _ in range(num_tokens):
            context = tokens[-seq_len:]
            inputs_bt.zero_()
            inputs_bt[0, : len(context)] = torch.tensor(context, device=forward.device)
            logits = run([batch])
            token = None
            if forward.rank == forward.source:
                probabilities = torch.softmax(logits[0][0, len(context) - 1].float().cpu() / temperature, dim=-1)
                token = int(torch.multinomial(probabilities, 1, generator=generator).item())
            token = broadcast_object(token, src=forward.source)
            assert token is not None
            tokens.append(token)
    return tokens[len(prompt) :]
