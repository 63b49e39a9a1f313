"""What the tests of dropout + add share: an independent Philox, and random inputs."""

from __future__ import annotations

import torch

from meshwright.nn.dropout_add.eager import DropoutKey
from meshwright.nn.dropout_add.module import dropout_add

KEY = DropoutKey(0x9876_5432_10FE_DCBA, 5)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def python_philox(counter, key):
    """Philox4x32-10 as the paper writes it, with Python's integers."""
    left0, right0, left1, right1 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * left0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * left1, 2**32)
        left0, right0, left1, right1 = high1 ^ right0 ^ k0, low1, high0 ^ right1 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return left0, right0, left1, right1


def python_mask(key, rows, columns, p):
    """The mask, one element at a time."""
    drop = round(p * 2**32)
    seed = key.seed % 2**32, key.seed >> 32
    return torch.tensor(
        [
            [python_philox((row % 2**32, row >> 32, c // 4, key.site), seed)[c % 4] >= drop for c in columns]
            for row in rows
        ]
    )


def inputs(*shape, dtype=torch.float32, seed=0):
    """x and residual with gradients, rows."""
    random = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for _ in range(2))
    rows = torch.randint(2**62, shape[:-1], generator=random)
    return x.requires_grad_(), residual.requires_grad_(), rows


def drop(x, residual, rows, p=0.3, **named):
    return dropout_add(x, residual, p, training=True, rows_bt=rows, **{"key": KEY} | named)
