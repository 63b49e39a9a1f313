"""`meshwright draw loss`: a line a run, a picture, clear errors, and no torch."""

from __future__ import annotations

from tests.helpers import run_folder, shown_error


def test_a_line_a_run_and_a_picture(here, tmp_path):
    folders = [
        run_folder(tmp_path / name, losses, f'[comm]\ngradients = "{name}"\n')
        for name, losses in (("exact", [4.0, 2.0]), ("loco4", [4.0, 2.5]))
    ]
    done = here("draw", "loss", *folders, "-o", tmp_path / "loss.svg", "--window", "1")
    assert done.returncode == 0, done.stderr
    exact, loco4, picture = done.stdout.splitlines()
    assert "comm.gradients=exact  loss 2.0000 (mean of the last 1 of 2 steps) · validation 7.5000" in exact
    assert loco4.startswith("comm.gradients=loco4") and loco4.endswith("· +25.00% relative to the first")
    assert picture.startswith("figure") and "comm.gradients=loco4" in (tmp_path / "loss.svg").read_text()


def test_bad_input(here, tmp_path):
    for words, error in (((tmp_path,), "is not a run folder"), ((tmp_path, "-o", "a.pdf"), "a.pdf")):
        done = here("draw", "loss", *words)
        assert done.returncode == 2 and error in shown_error(done.stderr)["error"]
