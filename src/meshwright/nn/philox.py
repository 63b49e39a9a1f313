"""Philox4x32-10, random numbers that are a function of a counter and a key, with plain integer operations of torch
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

No state advances, so the numbers are the same on every layout and device, and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

LANES = 4
"""Words of an output."""
LOW_HALF = 0xFFFFFFFF
"""Mask of the low word of 64 bits."""
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of Philox4x32-10's output, int64 in [0, 2^32), as the counter's are, of shapes that
    broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products wrap around to negative numbers, with the right 64 bits. Words 1 and 3 keep the upper half, too:
        # they only enter an exclusive or, which the mask follows.
        product0, product2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product2 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(LOW_HALF)
        c2 = ((product0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(LOW_HALF)
        c1, c3 = product2, product0
        k0, k1 = (k0 + _KEY_STEPS[0]) & LOW_HALF, (k1 + _KEY_STEPS[1]) & LOW_HALF
    return c0, c1 & LOW_HALF, c2, c3 & LOW_HALF
