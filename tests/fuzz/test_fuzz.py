"""Cases of a fixed seed come out right, and faults seeded in real runs are caught."""

from __future__ import annotations

import pytest

from tests.fuzz.case import Case
from tests.fuzz.commands import Commands
from tests.fuzz.draw import ALWAYS, draw
from tests.fuzz.judge import judge
from tests.fuzz.stopped import judge_stopped
from tests.gangs.gang import GangPool

SEED = 106
"""Its first cases are of all families, over each axis, and on few ranks."""
FAULTS = {"crash": "crashed", "hang": "hung", "other logits": "differs from one process"}


@pytest.fixture(scope="module")
def run(gang: GangPool, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Commands in a folder of their own, forked from the server of gangs."""
    pytest.importorskip("transformers")
    return Commands(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_a_case_comes_out_right(run: Commands, number: int) -> None:
    case = draw(SEED, number)
    verdict = judge(run, case, seed=number)
    assert not verdict.failure, f"{case.command()}\n{verdict.case.command()}\n{verdict.failure}\n{verdict.detail}"


@pytest.mark.slow
def test_a_stopped_case_goes_on_by_what_it_prints(run: Commands) -> None:
    case = draw(SEED, 2)
    verdict = judge_stopped(run, case, seed=2)
    assert not verdict.failure, f"{case.command()}\n{verdict.case.command()}\n{verdict.failure}\n{verdict.detail}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_run_is_caught(run: Commands, fault: str) -> None:
    words = [f"{key}={value}" for key, value in ALWAYS.items()]
    words += ["model.builder=tests.fuzz.faulty_module:Faulty", f"model.arguments.fault={fault}", "mesh.dp_replicate=2"]
    words += ["data.source=text/*.txt", "train.seq_len=16", "train.global_batch=4", "train.validation_samples=0"]
    words += ["train.sample_tokens=0", "train.timeout_s=5"]
    verdict = judge(run, Case("module-tiny", ()).with_words(words))
    assert FAULTS[fault] in verdict.failure, verdict
