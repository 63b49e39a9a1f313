"""Loss on held-out text: the same samples on every layout, shared out over the data-parallel ranks."""

from __future__ import annotations

import torch

from meshwright.comm.collectives import all_reduce_sum
from meshwright.data.loader import IGNORED_TARGET, validation_batches
from meshwright.data.text import Tokens
from meshwright.parallel.data import reshard
from meshwright.train.build import Job
from meshwright.train.step import loss_sum, vocab_context


@torch.no_grad()
def validate(job: Job, tokens: Tokens) -> float:
    """Mean loss in nats a token over `train.validation_samples` windows spread evenly over the held-out `tokens`."""
    train, axes = job.config.train, job.axes
    totals = torch.zeros(2, dtype=torch.float64, device=job.device)
    batches = validation_batches(
        tokens,
        seq_len=train.seq_len,
        num_samples=train.validation_samples,
        batch_size=train.global_batch // (axes.data_parallel() * train.num_microbatches),
        data_parallel=axes.data_parallel(),
        data_index=job.data_index,
        device=job.device,
    )
    job.model.eval()
    with vocab_context(job):
        for inputs_bt, targets_bt in batches:
            totals[0] += loss_sum(job.model(inputs_bt), targets_bt)
            totals[1] += (targets_bt != IGNORED_TARGET).sum()
    job.model.train()
    reshard(job.model)
    # Ranks of tp hold the same numbers; the ratio does not change by counting them all.
    loss, num_tokens = all_reduce_sum(totals).tolist()
    return float(loss / num_tokens)
