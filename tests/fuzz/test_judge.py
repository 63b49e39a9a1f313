"""The judge passes what is right, and catches each fault that a run can have: seeded in commands that run nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from subprocess import CompletedProcess

import pytest

from tests.fuzz import __main__ as program
from tests.fuzz.case import Case
from tests.fuzz.commands import Outcome, Status, read_outcome
from tests.fuzz.judge import MAX_REFUSALS, differences, is_exact, judge, shrink, ways

CASE = Case("llama-tiny", ("mesh.dp_shard=2", "train.steps=2", "train.lr=0.01"))
RIGHT = ({"loss_bits_per_byte": 8.0, "grad_norm": 1.0}, {"loss_bits_per_byte": 7.5, "grad_norm": 0.5})
Metrics = tuple[Mapping[str, float], ...]


def refusal(error: str, fix: str) -> Outcome:
    return Outcome(Status.REFUSED, error={"error": error, "where": "command line", "rule": "a rule", "fix": fix})


def runs(laid_out: Metrics = RIGHT, alone: Metrics = RIGHT) -> Callable[[str, Case], Outcome]:
    """Commands that print these numbers, with a mesh and without."""

    def run(verb: str, case: Case) -> Outcome:
        return Outcome(Status.DONE, metrics=laid_out if case.value("mesh.dp_shard") else alone)

    return run


def with_second(**changes: float) -> Metrics:
    return (RIGHT[0], {**RIGHT[1], **changes})


def test_a_right_run_passes() -> None:
    verdict = judge(runs(), CASE)
    assert (verdict.failure, verdict.compared, verdict.summary) == ("", "exact", "ran")


FAULTS = {
    "crash": Outcome(Status.CRASHED, "something\nerror  rank 1 failed at step 1: ValueError('no')\nwhere  there"),
    "hang": Outcome(Status.HUNG, "no end within 400 s"),
    "failed proof": Outcome(Status.NOT_PROVED, "✗ gradients differ\nNOT PROVED in 2 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", ["run", "prove"])
def test_an_end_that_is_none_fails(fault: str, verb: str) -> None:
    verdict = judge(lambda _verb, _case: FAULTS[fault], CASE, verb=verb)
    assert verdict.failure.startswith(str(FAULTS[fault].status)) and verdict.summary == "failed"


def test_a_crash_is_told_by_its_cause() -> None:
    verdict = judge(lambda _verb, _case: FAULTS["crash"], CASE)
    assert verdict.failure == "crashed: error  rank 1 failed at step 1: ValueError('no')"


@pytest.mark.parametrize(
    "metrics",
    [
        with_second(loss_bits_per_byte=7.5 * (1 + 2e-4)),
        with_second(grad_norm=0.5 * (1 + 2e-4)),
        with_second(loss_bits_per_byte=float("nan")),
        with_second(validation_loss_bits_per_byte=7.0),
        RIGHT[:1],
        (),
    ],
    ids=["loss", "norm", "nan", "a validation that one process has not", "a step less", "no steps"],
)
def test_other_numbers_than_one_process_s_fail(metrics: Metrics) -> None:
    assert judge(runs(metrics), CASE).failure
    assert metrics == () or judge(runs(RIGHT, metrics), CASE).failure


def test_updates_that_are_signs_are_not_compared() -> None:
    other, signs = with_second(loss_bits_per_byte=9.0), CASE.with_words(["train.beta2=0.1"])
    assert judge(runs(other), CASE).failure
    assert not judge(runs(other), signs).failure and not judge(runs(other), CASE, compares=False).failure


def test_what_is_rounded_may_differ_a_little() -> None:
    near, far = with_second(loss_bits_per_byte=7.4, grad_norm=0.9), with_second(loss_bits_per_byte=6.9)
    assert list(differences(near, RIGHT, exact=True)) and not list(differences(near, RIGHT, exact=False))
    assert list(differences(far, RIGHT, exact=False))
    for word in ("train.precision=bfloat16", "float8.recipe=delayed", "comm.gradients=int8", "comm.weights=bf16"):
        assert not is_exact(CASE.with_words([word])), word
    assert is_exact(CASE.with_words(["comm.gradients=exact-via-all-to-all", "train.precision=float64"]))


def test_one_process_that_fails_is_a_failure() -> None:
    def run(verb: str, case: Case) -> Outcome:
        return runs()(verb, case) if case.value("mesh.dp_shard") else FAULTS["crash"]

    verdict = judge(run, CASE)
    assert verdict.failure.startswith("alone crashed") and verdict.case == CASE.without("mesh.")


def refuses(fixes: Mapping[str, str], fix: str) -> Callable[[str, Case], Outcome]:
    """Commands that refuse `fixes` until the words have them."""

    def run(verb: str, case: Case) -> Outcome:
        missing = [key for key, value in fixes.items() if case.value(key) != value]
        return refusal(f"{missing[0]} is wrong", fix) if missing else runs()(verb, case)

    return run


def test_fixes_are_followed() -> None:
    fix = "train.seq_len=16 with data.separator=3 (as in the preset), or remove train.lr"
    verdict = judge(refuses({"train.seq_len": "16", "data.separator": "3"}, fix), CASE.without("train.lr="))
    assert (verdict.failure, verdict.fixes, verdict.summary) == ("", (fix,), "ran after fixes")
    assert {"train.seq_len=16", "data.separator=3"} <= set(verdict.case.words)


def test_a_fix_that_is_refused_fails() -> None:
    assert "leads back" in judge(refuses({"train.lr": "0.1"}, "train.lr=0.01"), CASE).failure
    assert "changes nothing" in judge(refuses({"train.lr": "0.1"}, "train.seed=1 or train.seed=2"), CASE).failure


def test_fixes_without_an_end_fail() -> None:
    def run(verb: str, case: Case) -> Outcome:
        return refusal("too small", f"train.seq_len={int(case.value('train.seq_len') or 1) + 1}")

    verdict = judge(run, CASE)
    assert "refused after" in verdict.failure and len(verdict.fixes) == MAX_REFUSALS


def test_fixes_in_a_circle_fail() -> None:
    def run(verb: str, case: Case) -> Outcome:
        return refusal("wrong", f"train.lr={'0.2' if case.value('train.lr') == '0.1' else '0.1'}")

    assert "leads back" in judge(run, CASE).failure


def test_what_a_fix_has_set_is_not_set_back_if_there_is_another_way() -> None:
    for seed in range(8):
        verdict = judge(refuses_packing, CASE.with_words(["data.packing=documents", "data.separator=0"]), seed=seed)
        assert not verdict.failure and len(verdict.fixes) == 2


def refuses_packing(verb: str, case: Case) -> Outcome:
    if case.value("data.packing") == "documents":
        return refusal("no packing", "data.packing=none train.freeze=a" if case.value("data.separator") else "no")
    if case.value("data.separator"):
        return refusal("no effect", "remove data.separator, or data.packing=documents")
    return runs()(verb, case)


@pytest.mark.parametrize("fix", ["start 4 ranks", "data.tokenizer=<the one of the model>", "train.steps=…"])
def test_an_action_is_told(fix: str) -> None:
    verdict = judge(lambda _verb, _case: refusal("wrong", fix), CASE)
    assert (verdict.action, verdict.failure, verdict.summary) == (fix, "", "refused, with an action as the fix")


def test_ways_that_change_no_value() -> None:
    removed = list(ways({"error": "it has no effect", "fix": "train.lr=1 or remove train.lr, or a preset"}, CASE))
    assert [one.words for one in removed] == [
        ("mesh.dp_shard=2", "train.steps=2", "train.lr=1"), ("mesh.dp_shard=2", "train.steps=2"),
    ]  # fmt: skip
    wrong = CASE.with_words(["mesh.pq=2"])
    [named] = ways({"error": "unknown key mesh.pq", "fix": "mesh.pp (the nearest valid key)"}, wrong)
    assert named.words == (*CASE.words, "mesh.pp=2")


ERROR = "error  no\nwhere  command line\nrule   a rule\nfix    train.lr=1\n"


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "status"),
    [
        (0, "", "", Status.DONE),
        (0, "", "Traceback (most recent call last):\nValueError: no", Status.CRASHED),
        (1, "", "Traceback (most recent call last):\nValueError: no", Status.CRASHED),
        (-9, "", "", Status.CRASHED),
        (1, "", "error  rank 0 timed out in all-reduce", Status.HUNG),
        (1, "✗ a gradient\nNOT PROVED in 2 s", "", Status.NOT_PROVED),
        (2, "", ERROR, Status.REFUSED),
        (2, "", f"UserWarning: something\n{ERROR}", Status.CRASHED),
        (2, "", ERROR.replace("fix    train.lr=1\n", ""), Status.CRASHED),
    ],
    ids=["done", "a printed traceback", "a traceback", "killed", "timed out", "not proved", "refused",
         "refused among warnings", "refused without a fix"],
)  # fmt: skip
def test_ends_of_commands_are_read(tmp_path, code, stdout, stderr, status):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({**line, "step": 1, "lr": 1.0}) + "\n" for line in RIGHT))
    found = read_outcome(CompletedProcess([], code, stdout, stderr), path)
    assert found.status is status
    assert found.metrics == (RIGHT if status is Status.DONE else ())


def test_a_failure_is_made_small() -> None:
    words = tuple(f"train.{name}={at}" for at, name in enumerate("abcdefghijklmnopq"))
    case = Case("llama-tiny", (*words, "train.steps=2", "train.threads=1"))

    def run(verb: str, case: Case) -> Outcome:
        if not case.value("train.c"):
            return runs()(verb, case)
        return FAULTS["crash" if case.value("train.k") else "hang"]  # another failure without k

    small = shrink(judge(run, case), lambda one: judge(run, one))
    assert small.words == ("train.c=2", "train.k=10", "train.steps=2", "train.threads=1")


def test_the_program_fails_where_a_case_does(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(program, "start_server", lambda _modules: None)
    for run, code, says in ((runs(RIGHT, RIGHT), 0, "2  ran"), (lambda _v, _c: FAULTS["hang"], 1, "2  failed")):
        monkeypatch.setattr(program, "Commands", lambda *_, run=run: run)
        monkeypatch.setattr("sys.argv", ["fuzz", "--seed", "5", "--count", "2", "--folder", str(tmp_path)])
        assert program.main() == code
        shown = capsys.readouterr().out
        assert says in shown and "[5 1] meshwright run " in shown
        assert ("smallest: meshwright run " in shown) == bool(code)
