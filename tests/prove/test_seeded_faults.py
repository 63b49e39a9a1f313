"""A proof that cannot fail is worthless: every seeded fault is caught, and named in the right words."""

from __future__ import annotations

from itertools import cycle

import pytest

from meshwright.prove.report import render, to_json
from tests.gangs.gang import GangPool
from tests.prove.proofs import prove_with, record_few_steps, record_on_rank, small_config
from tests.prove.seeded_faults import FAULTS

LAYOUTS = {
    "one process": (),
    "dp_replicate 2 × dp_shard 2": ("mesh.dp_replicate=2", "mesh.dp_shard=2"),
    "tp 2": ("mesh.tp=2",),
    "tp 2, no sequence parallel": ("mesh.tp=2", "mesh.sequence_parallel=false"),
    "dp_shard 3, uneven": ("mesh.dp_shard=3", "train.global_batch=12"),
}


MICROBATCHES_AND_TIED = ((4, "true"), (1, "false"), (4, "false"), (1, "true"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_microbatches", "tied"),
    [(layout, *both) for layout, both in zip(LAYOUTS, cycle(MICROBATCHES_AND_TIED), strict=False)],
)
def test_a_right_layout_is_proved(gang: GangPool, layout: str, num_microbatches: int, tied: str) -> None:
    batch = () if "uneven" in layout else (f"train.global_batch={16 if num_microbatches == 4 else 8}",)
    words = (*LAYOUTS[layout], *batch, f"train.num_microbatches={num_microbatches}", f"model.tie_embeddings={tied}")
    config = small_config(*words)
    records = gang(config.mesh.axes().num_ranks()).run(record_few_steps, config)
    result = prove_with(records, config)
    assert result.passed, "\n".join(render(result))


QUICK_FAULTS = {
    "accumulation is overwritten",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK_FAULTS else pytest.mark.slow) for n in FAULTS])
def test_a_seeded_fault_is_caught_and_named(gang: GangPool, name: str) -> None:
    fault = FAULTS[name]
    config = small_config(*fault.layout)
    ranks = gang(config.mesh.axes().num_ranks())
    records = ranks.run(record_on_rank, config, "tests.prove.seeded_faults", "FAULTS", name, few=True)
    result = prove_with(records, config)
    report, screen = to_json(result, loss_unit="nats/token"), " ".join(render(result))
    assert not report["passed"]
    text = " ".join(screen.lower().split())
    missing = [words for words in fault.says if words.lower() not in text]
    assert not missing, "\n".join(render(result))
    if fault.at:
        (entry,) = (entry for entry in report["parameters"] if entry["name"] == fault.at)
        assert entry["verdict"] == "wrong"
        assert entry["cause"]


def test_the_suite_is_large_enough() -> None:
    assert len(FAULTS) >= 15 and set(FAULTS) >= QUICK_FAULTS
