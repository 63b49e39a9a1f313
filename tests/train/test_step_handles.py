"""Auxiliary losses are those of their own kind, whatever other kinds call theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.errors import LayoutError
from meshwright.plan.run_plan import Auxiliary
from meshwright.train.step_handles import _auxiliary
from tests.plan.plans import fake


def test_losses_of_one_name_in_two_kinds():
    plan = fake(tp=2)
    block, end = plan.kind("block"), plan.kind("head")
    other = replace(block, auxiliary=(Auxiliary("balance", ()),))
    held = [(block, 1), (other, 10), (replace(end, auxiliary=(Auxiliary("balance", ("dp_shard",)),)), None)]
    assert block.auxiliary[0].work == ("tp",)
    assert _auxiliary(held, "blocks.1.balance", "balance").work == ("tp",)
    assert _auxiliary(held, "blocks.10.balance", "balance").work == ()
    assert _auxiliary(held, "balance", "balance").work == ("dp_shard",)
    with pytest.raises(LayoutError, match=r"blocks\.1\.z computes .* z, but the plan lists no such loss"):
        _auxiliary(held, "blocks.1.z", "z")
