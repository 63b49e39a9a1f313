"""`meshwright prove`: bad input ends it before any process starts, and without torch."""

from __future__ import annotations

import pytest

from tests.helpers import shown_error


@pytest.mark.parametrize(
    ("path", "error", "fix"),
    [("none/x.json", "folder not found: none", "mkdir -p none"), ("a-folder", "can't write a-folder", "another name")],
)
def test_a_result_that_can_not_be_written(here, tmp_path, path, error, fix):
    (tmp_path / "a-folder").mkdir()
    done = here("prove", "llama-tiny", "--json", path)
    assert done.returncode == 2 and done.stdout == ""
    parts = shown_error(done.stderr)
    assert error in parts["error"] and fix in parts["fix"] and parts["where"] == "command line, --json"
