"""Runs of transformers' experts in bfloat16 are proved as they run: grouped on whole ranks, one by one under tp."""

from __future__ import annotations

import pytest

from meshwright import api
from tests.models.hf.runs import hf_config

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mesh.dp_shard=2", "mesh.tp=2"])
def test_experts_in_bfloat16_are_proved_as_they_run(layout):
    proof = api.prove(hf_config("mixtral", layout, "train.precision=bfloat16"), as_run=True)
    assert proof, "\n".join(proof.lines)
