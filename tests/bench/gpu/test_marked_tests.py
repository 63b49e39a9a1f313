"""Tests of the part that runs the tests marked gpu."""

from __future__ import annotations

import pytest

from meshwright_bench.gpu import marked_tests
from meshwright_bench.gpu.cases import CaseError, NotRunError, Setting
from meshwright_bench.gpu.marked_tests import ROOT, conclude, marked_files, run_tests

PASSED = '<testcase classname="tests.a" name="test_x"/>'
SKIPPED = '<testcase classname="tests.a" name="test_y"><skipped message="needs a\n CUDA device"/></testcase>'
FAILED = '<testcase classname="tests.b" name="test_z"><failure message="wrong"/></testcase>'
BROKEN = '<testcase classname="tests.b" name="test_w"><error message="no fixture"/></testcase>'


def junit(tmp_path, *cases: str):
    path = tmp_path / "tests.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", "utf-8")
    return path


def test_counts_are_those_of_the_file(tmp_path):
    assert conclude(junit(tmp_path, PASSED, SKIPPED, PASSED), None) == {"passed": 2, "skipped": 1}


@pytest.mark.parametrize("bad", [FAILED, BROKEN])
def test_a_test_that_failed_is_named(tmp_path, bad):
    with pytest.raises(CaseError, match=r"1 of 2 tests failed, first tests.b.test_"):
        conclude(junit(tmp_path, PASSED, bad), CaseError("exit status 1: FAILED"))


def test_pytests_own_failure_is_one_although_no_test_failed(tmp_path):
    with pytest.raises(CaseError, match="exit status 4"):
        conclude(junit(tmp_path, PASSED), CaseError("exit status 4: wrong option"))


@pytest.mark.parametrize(("cases", "why"), [((SKIPPED,), "needs a CUDA device"), ((), "no test")])
def test_where_none_ran_the_reason_is_the_first_one_skipped(tmp_path, cases, why):
    with pytest.raises(NotRunError, match=why):
        conclude(junit(tmp_path, *cases), None)


def test_without_a_result_the_part_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(marked_tests, "run_command", lambda label, *words: [])
    with pytest.raises(CaseError):
        run_tests(Setting("cpu", tmp_path))


def test_only_files_with_a_marked_test_are_collected(tmp_path):
    room = tmp_path / "tests" / "room"
    room.mkdir(parents=True)
    (room / "test_a.py").write_text("@pytest.mark.gpu\ndef test_a(): pass\n", "utf-8")
    (room / "test_b.py").write_text("def test_b(): pass\n", "utf-8")
    (room / "helpers.py").write_text("pytest.mark.gpu\n", "utf-8")
    assert marked_files(tmp_path) == ["tests/room/test_a.py"]
    assert marked_tests.IN_DRY in marked_files(ROOT)
