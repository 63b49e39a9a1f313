"""Text from a model under training, on whatever layout it lies: every rank runs the same forward passes.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import broadcast_object
from meshwright.parallel.data import reshard
from meshwright.pipeline.lower import forward_only, lower
from meshwright.train.stages import Pipeline, SimpleBatch


def generate(pipeline: Pipeline, prompt: Sequence[int], *, num_tokens: int, temperature: float, seed: int) -> list[int]:
    """Continue `prompt` by `num_tokens` sampled tokens.

    The context is padded to the training length, so that shapes stay those the layout was checked for; causal
    attention never looks at the padding. The first rank that has the logits draws, and its choice goes to the others.
    """
    job = pipeline.job
    seq_len = job.config.train.seq_len
    stage_ranks = job.schedule.stage_ranks
    drawer = job.axes.rank(pp=stage_ranks[-1])
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    inputs_bt = torch.zeros((1, seq_len), dtype=torch.int64, device=job.device)
    found: list[Tensor] = []

    def finish(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
        found.append(logits_btv.full_tensor() if isinstance(logits_btv, DTensor) else logits_btv)
        return logits_btv

    batch = SimpleBatch(inputs_bt, (seq_len,))
    executor = pipeline.executor(lower(forward_only(1, stage_ranks)), batch_size=1)
    pipeline.feed.batch, pipeline.feed.finish = (lambda microbatch: batch), finish
    job.model.eval()
    for _ in range(num_tokens):
        context = tokens[-seq_len:]
        inputs_bt.zero_()
        inputs_bt[0, : len(context)] = torch.tensor(context, device=job.device)
        executor.run()
        choice = None
        if job.context.rank == drawer:
            chances = torch.softmax(found[-1][0, len(context) - 1].float().cpu() / temperature, dim=-1)
            choice = int(torch.multinomial(chances, 1, generator=generator).item())
        found.clear()
        choice = broadcast_object(choice, src=drawer)
        assert choice is not None
        tokens.append(choice)
    job.model.train()
    reshard(job.model)
    return tokens[len(prompt) :]
