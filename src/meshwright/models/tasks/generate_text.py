"""Text from a model under training, on whatever layout it is: every rank runs the same forward passes.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.comm.collectives import broadcast_object
from meshwright.models.contract.task import Forward, SimpleBatch


def generate(
    forward: Forward, prompt: Sequence[int], *, seq_len: int, num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """Continue `prompt` by `num_tokens` sampled tokens.

    The context is padded to the training length, so that shapes stay those the layout was checked for; causal
    attention never looks at the padding. The first rank that has the logits draws, and its choice goes to the others.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    inputs_bt = torch.zeros((1, seq_len), dtype=torch.int64, device=forward.device)
    batch = SimpleBatch(inputs_bt, (seq_len,))
    with forward.evaluating(1, batch_size=1) as run:
        for _ in range(num_tokens):
            context = tokens[-seq_len:]
            inputs_bt.zero_()
            inputs_bt[0, : len(context)] = torch.tensor(context, device=forward.device)
            found = run([batch])
            choice = None
            if forward.rank == forward.source:
                chances = torch.softmax(found[0][0, len(context) - 1].float().cpu() / temperature, dim=-1)
                choice = int(torch.multinomial(chances, 1, generator=generator).item())
            choice = broadcast_object(choice, src=forward.source)
            assert choice is not None
            tokens.append(choice)
    return tokens[len(prompt) :]
