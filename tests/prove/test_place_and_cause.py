"""Seeded faults of data, forward and optimizer are caught, and their place and cause are named."""

from __future__ import annotations

import pytest

from tests.gangs.gang import GangPool
from tests.prove.branch_faults import BRANCH_FAULTS
from tests.prove.data_faults import DATA_FAULTS, IMAGE_FAULTS
from tests.prove.forward_faults import FORWARD_FAULTS
from tests.prove.optimizer_faults import OPTIMIZER_FAULTS
from tests.prove.proofs import assert_named, proof, small_config, small_dit_config

TABLES = {
    "forward_faults.FORWARD_FAULTS": FORWARD_FAULTS,
    "optimizer_faults.OPTIMIZER_FAULTS": OPTIMIZER_FAULTS,
    "data_faults.DATA_FAULTS": DATA_FAULTS,
    "data_faults.IMAGE_FAULTS": IMAGE_FAULTS,
    "branch_faults.BRANCH_FAULTS": BRANCH_FAULTS,
}
QUICK = {"a rank is given its neighbour's samples"}
MORE_STEPS = {"weights are gathered once", "a cache of the first step"}
"""Told from other faults by the third step; those of branches by steps that must be skipped."""
CASES = [
    pytest.param(where, name, marks=() if name in QUICK else pytest.mark.slow, id=name)
    for where, table in TABLES.items()
    for name in sorted(table, key=lambda name: table[name].layout)
]
"""Those of a layout come together: they share what they are compared with."""


@pytest.mark.parametrize(("where", "name"), CASES)
def test_a_fault_is_placed_and_named(gang: GangPool, where: str, name: str) -> None:
    module, table = where.split(".")
    fault = TABLES[where][name]
    config = small_dit_config(*fault.layout) if table == "IMAGE_FAULTS" else small_config(*fault.layout)
    few = table != "BRANCH_FAULTS" and name not in MORE_STEPS
    assert_named(proof(gang, config, f"tests.prove.{module}", table, name, second_pass=True, few=few), fault)
