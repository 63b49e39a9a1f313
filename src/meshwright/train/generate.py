"""Text from a model under training, on whatever layout it lies: every rank runs the same forward passes.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import broadcast_object
from meshwright.parallel.data import reshard
from meshwright.train.build import Job


@torch.no_grad()
def generate(job: Job, prompt: Sequence[int], *, num_tokens: int, temperature: float, seed: int) -> list[int]:
    """Continue `prompt` by `num_tokens` sampled tokens.

    The context is padded to the training length, so that shapes stay those the layout was checked for; causal
    attention never looks at the padding. Rank 0 draws, and its choice goes to the others.
    """
    seq_len = job.config.train.seq_len
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    job.model.eval()
    for _ in range(num_tokens):
        context = tokens[-seq_len:]
        inputs_bt = torch.zeros((1, seq_len), dtype=torch.int64, device=job.device)
        inputs_bt[0, : len(context)] = torch.tensor(context, device=job.device)
        logits_btv = job.model(inputs_bt)
        if isinstance(logits_btv, DTensor):
            logits_btv = logits_btv.full_tensor()
        chances = torch.softmax(logits_btv[0, len(context) - 1].float().cpu() / temperature, dim=-1)
        choice = int(torch.multinomial(chances, 1, generator=generator).item())
        tokens.append(broadcast_object(choice))
    job.model.train()
    reshard(job.model)
    return tokens[len(prompt) :]
