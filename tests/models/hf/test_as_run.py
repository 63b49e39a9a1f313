"""Runs of transformers' experts in bfloat16 are proved as they run: grouped on whole ranks, one by one under tp."""

from __future__ import annotations

import pytest

from meshwright.prove.as_run.configuration import as_configured
from meshwright.prove.as_run.driver import render
from tests.models.hf.runs import hf_config
from tests.prove.as_run.proofs import proof

pytest.importorskip("transformers")


@pytest.mark.slow
def test_experts_in_bfloat16_are_proved_as_they_run(gang):
    config = as_configured(hf_config("mixtral", "mesh.tp=2", "train.precision=bfloat16"))
    result = proof(gang, config)
    assert result.passed, "\n".join(render(result))
