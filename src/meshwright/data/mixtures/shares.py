"""Shares of a mixture's sources, as integers. Imports nothing, so that plans start fast."""

from __future__ import annotations

BLOCK = 4096
"""Samples in a block, B."""
ONE = 2**32
"""The sum of all shares."""
MIN_SHARE = ONE // BLOCK
"""Smallest share of a source: one sample of each block."""
