"""Part `tests`: the tests marked `gpu`, in as many processes as pytest-xdist gives. Torch-free."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from meshwright_bench.gpu.cases import Case, CaseError, Figures, NotRunError, Setting
from meshwright_bench.gpu.commands import run_command

ROOT = Path(__file__).parents[3]
MARK = "mark.gpu"
IN_DRY = "tests/nn/dropout_add/test_triton_launch.py"
NEEDS = ("pytest", "hypothesis")
"""Packages that the tests import before any is chosen."""
MOST_WORKERS = 4
"""They share the device."""


def cases(setting: Setting) -> list[Case]:
    """Return the one case."""
    return [Case("pytest", partial(run_tests, setting), NEEDS)]


def marked_files(root: Path = ROOT) -> list[str]:
    """Return the files with tests that are marked `gpu`; collecting the others takes longer than running these."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in files if MARK in path.read_text("utf-8")]


def run_tests(setting: Setting) -> Figures:
    """Run the tests, and return how many passed, failed and were skipped.

    Raises:
        CaseError: a test failed, or none ran.
        NotRunError: all were skipped, which says why.
    """
    result = setting.scratch / "tests.xml"
    result.unlink(missing_ok=True)
    files = [IN_DRY] if setting.is_dry else marked_files()
    # Without xdist, or for one file, in this process.
    workers = [f"-n{min(setting.jobs, MOST_WORKERS)}"] if find_spec("xdist") and not setting.is_dry else []
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", *workers, f"--junitxml={result}", f"--rootdir={ROOT}"]
    failure: CaseError | None = None
    try:
        run_command("pytest", "-m", "pytest", *options, *(str(ROOT / file) for file in files))
    except CaseError as error:
        failure = error
    if not result.is_file():
        raise failure or CaseError("pytest left no result")
    return conclude(result, failure)


def conclude(result: Path, failure: CaseError | None) -> Figures:
    """Return the counts in pytest's JUnit file; raise if a test failed, pytest did, or none ran.

    Raises:
        CaseError: a test failed, or pytest did, which is `failure`.
        NotRunError: all were skipped.
    """
    found = ElementTree.parse(result).getroot().iter("testcase")
    failed, skipped, passed = [], [], 0
    for one in found:
        name = f"{one.get('classname')}.{one.get('name')}"
        if one.find("failure") is not None or one.find("error") is not None:
            failed.append(name)
        elif (skip := one.find("skipped")) is not None:
            skipped.append(skip.get("message") or "skipped")
        else:
            passed += 1
    if failed:
        raise CaseError(f"{len(failed)} of {passed + len(failed)} tests failed, first {failed[0]}")
    if failure is not None:
        raise failure
    if not passed:
        raise NotRunError(re.sub(r"\s+", " ", skipped[0]) if skipped else "no test is marked gpu")
    return {"passed": passed, "skipped": len(skipped)}
