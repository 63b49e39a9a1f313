"""Every seeded fault of shared gradients is caught, and the parameter and the cause are named."""

from __future__ import annotations

import pytest

from meshwright.prove.report import render, to_json
from tests.gangs.gang import GangPool
from tests.prove.proofs import proof, small_config, small_dit_config
from tests.prove.shared_faults import SHARED_FAULTS


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED_FAULTS)
def test_a_seeded_fault_is_caught_and_named(gang: GangPool, name: str) -> None:
    fault = SHARED_FAULTS[name]
    preset, *words = fault.layout
    config = small_dit_config(preset, *words) if "dit" in preset else small_config("model.tie_embeddings=true", *words)
    result = proof(gang, config, "tests.prove.shared_faults", "SHARED_FAULTS", name, few=True)
    report, screen = to_json(result, loss_unit="nats/token"), render(result)
    assert not report["passed"]
    text = " ".join(" ".join(screen).lower().split())
    missing = [words for words in fault.says if words.lower() not in text]
    assert not missing, "\n".join([f"missing: {missing}", *screen])
    assert "not recognised" not in text, "\n".join(screen)
    if fault.at:
        (entry,) = (entry for entry in report["parameters"] if entry["name"] == fault.at)
        assert entry["verdict"] == "wrong" and entry["cause"]
