"""Bytes that a kind keeps between its forward and its backward, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.nn.recompute_policy import RecomputePolicy


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a kind keeps between forward and backward under each policy, per rank and sample."""

    none: int
    selective: int
    full: int

    def under(self, policy: RecomputePolicy) -> int:
        """Return the bytes under a policy."""
        found: int = getattr(self, policy)
        return found
