"""Predicted traffic of transformers models, compared to the byte with what a step really hands to other ranks."""

from __future__ import annotations

import pytest

from meshwright.models.foreign import derive
from meshwright.models.hf.family import _structure
from meshwright.plan.make_plan import make_plan
from meshwright.plan.traffic import predict_traffic
from tests.gangs.gang import GangPool
from tests.prove.proofs import SOURCE
from tests.train.jobs import load_words
from tests.train.test_traffic import all_leaving

pytest.importorskip("transformers")

RECOMPUTE, MICROBATCHES = "recompute.policy=full", "train.num_microbatches=2"
CASES = [
    ("qwen3", "mesh.pp=2", "mesh.tp=2", MICROBATCHES, "train.precision=bfloat16"),
    ("mixtral", "mesh.dp_shard=2", "mesh.tp=2", RECOMPUTE, MICROBATCHES),
]


def words_of(case: tuple[str, ...], cache: object) -> list[str]:
    model, *more = case
    return ["hf-tiny", f"model.config={model}", *more, f"data.source={SOURCE}", f"data.cache_dir={cache}"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_everything_that_is_sent_is_predicted_exactly(gang: GangPool, tmp_path, case: tuple[str, ...]) -> None:
    words = words_of(case, tmp_path)
    plan = make_plan(load_words(words))
    for rank, found in enumerate(gang(4).run(all_leaving, words, timeout_s=300)):
        assert predict_traffic(plan, rank=rank).sent().total() == found


@pytest.mark.slow
def test_recomputation_ends_before_the_last_reduction(monkeypatch, tmp_path):
    """A seeded fault that the test above catches: every reduction is repeated."""
    right = traffic_of(tmp_path / "right")
    monkeypatch.setattr(derive, "final_modules", lambda *_: set())
    assert traffic_of(tmp_path / "wrong") > right


def traffic_of(cache: object) -> int:
    _structure.cache_clear()
    return predict_traffic(make_plan(load_words(words_of(("gpt2", "mesh.tp=2", RECOMPUTE), cache)))).sent().total()
