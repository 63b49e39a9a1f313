"""`meshwright draw drift`: errors before any process starts, and without torch; two lines and a picture."""

from __future__ import annotations

import pytest

from tests.helpers import shown_error


@pytest.mark.parametrize(
    ("words", "error", "fix"),
    [
        (("llama-tiny",), "no parameter is shared between stages", "mesh.pp=2 model.tie_embeddings=true"),
        (("dit-digits",), "no parameter is shared between stages", "mesh.pp=2"),
        (("dit-digits", "mesh.pp=5"), "5 stages", ""),
        (("dit-digits", "mesh.qq=2"), "mesh.qq", ""),
        (("-o", "a.pdf"), "a.pdf", "a.svg"),
        (("-o", "none/a.svg"), "folder not found: none", "mkdir -p none"),
    ],
)
def test_bad_input(here, words, error, fix):
    done = here("draw", "drift", *words)
    assert done.returncode == 2 and done.stdout == ""
    parts = shown_error(done.stderr)
    assert error in parts["error"] and fix in parts["fix"]


def test_no_steps_are_refused(here):
    done = here("draw", "drift", "--steps", "0")
    assert done.returncode == 2 and "--steps" in done.stderr


def test_under_a_launcher_is_an_error(here):
    done = here("draw", "drift", WORLD_SIZE="1", RANK="0")
    assert done.returncode == 2 and "without torchrun" in shown_error(done.stderr)["fix"]


@pytest.mark.slow
def test_two_lines_and_a_picture(forked_meshwright, tmp_path):
    words = ("dit-digits", "mesh.pp=2", "pipeline.chunks=2", "model.dim=16", "model.ffn_dim=24", "--steps", "4")
    done = forked_meshwright("draw", "drift", *words, "-o", "drift.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    synced, unsynced, picture = done.stdout.splitlines()
    assert "replicas bitwise equal after all 4 steps · loss" in synced
    assert "replicas differ from step 3 on, by " in unsynced and "after 4 · loss" in unsynced
    assert picture == "figure    drift.svg" and (tmp_path / "drift.svg").exists()
