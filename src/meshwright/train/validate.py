"""Loss on held-out text: the same samples on every layout, shared out over the data-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.collectives import all_reduce_sum
from meshwright.data.loader import IGNORED_TARGET, validation_batches
from meshwright.data.text import Tokens
from meshwright.parallel.data import reshard
from meshwright.pipeline.lower import forward_only, lower
from meshwright.train.stages import Pipeline
from meshwright.train.step import loss_sum, vocab_context


def validate(pipeline: Pipeline, tokens: Tokens) -> float:
    """Mean loss in nats a token over `train.validation_samples` windows spread evenly over the held-out `tokens`."""
    job = pipeline.job
    train, axes = job.config.train, job.axes
    totals = torch.zeros(2, dtype=torch.float64, device=job.device)
    batches = list(
        validation_batches(
            tokens,
            seq_len=train.seq_len,
            num_samples=train.validation_samples,
            batch_size=job.microbatch_size,
            data_parallel=axes.data_parallel(),
            data_index=job.data_index,
            device=job.device,
        )
    )

    def finish(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
        loss = loss_sum(logits_btv, targets_bt)
        totals[0] += loss
        totals[1] += (targets_bt != IGNORED_TARGET).sum()
        return loss

    table = lower(forward_only(len(batches), job.schedule.stage_ranks))
    executor = pipeline.executor(table, batch_size=job.microbatch_size)
    pipeline.feed.batch, pipeline.feed.finish = batches.__getitem__, finish
    job.model.eval()
    with vocab_context(job):
        executor.run()
    job.model.train()
    reshard(job.model)
    # Ranks of tp hold the same numbers, and all but the last stage's none; the ratio is that of one copy.
    loss, num_tokens = all_reduce_sum(totals).tolist()
    return float(loss / num_tokens)
