"""Numbers of a rank's tokens, unique in the run: what random numbers are keyed by.

Shapes: b batch, t time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.errors import LayoutError
from meshwright.nn.attention.token_indices import shard_indices
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.units import counted


def token_rows(layout: TokenLayout, *, device: torch.device | str = "cpu") -> Tensor:
    """Return the number `sample · seq_len + position` of each token that the rank holds, int64 [b, t].

    Positions count from the start of the sample, also in packed documents.

    Raises:
        LayoutError: the layout doesn't number its samples, or doesn't divide into equal parts.
    """
    if layout.samples is None:
        raise LayoutError(
            "the token layout has no numbers of samples",
            rule="random numbers are a function of a token's sample in the run and its position",
            fix="set TokenLayout.samples to the samples' numbers, counted from the start of the run over all ranks",
        )
    part, num_parts = layout.stream
    if layout.num_tokens % num_parts:
        raise LayoutError(
            f"a sample of {counted(layout.num_tokens, 'token')} can't be divided into {num_parts} equal parts",
            rule="sequence parallel divides a rank's tokens equally",
            fix=f"choose a train.seq_len that cp · {num_parts} divides",
        )
    position_bt = shard_indices(layout.shard).view(len(layout.shard), -1)
    sample_b1 = torch.tensor(layout.samples, dtype=torch.int64).unsqueeze(1)
    length = layout.num_tokens // num_parts
    return (sample_b1 * layout.seq_len + position_bt).narrow(1, part * length, length).to(device)
