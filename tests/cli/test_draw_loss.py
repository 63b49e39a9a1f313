"""`meshwright draw loss`: lines for each run, a picture, clear errors, and no torch."""

from __future__ import annotations

from tests.helpers import run_folder, shown_error


def test_what_each_run_says_and_a_picture(here, tmp_path):
    folders = [
        run_folder(tmp_path / name, losses, f'[comm]\ngradients = "{name}"\n')
        for name, losses in (("exact", [4.0, 2.0]), ("loco4", [4.0, 2.5]), ("int2", [4.0, 2.0, 8.0]))
    ]
    done = here("draw", "loss", *folders, "-o", tmp_path / "loss.svg")
    assert done.returncode == 0, done.stderr
    *lines, picture = done.stdout.splitlines()
    assert lines == [
        "gradients=exact",
        "  loss 2.0000 bits/byte · step 2 · validation 7.5000",
        "gradients=loco4",
        "  loss 2.5000 bits/byte · step 2 · validation 7.5000",
        "  +25.00% relative to the first run · step 2",
        "gradients=int2",
        "  loss 8.0000 bits/byte · step 3 · validation 7.5000",
        "  +0.00% relative to the first run · common step 2",
    ]
    drawn = (tmp_path / "loss.svg").read_text()
    assert picture.startswith("figure") and "gradients=loco4, validation 7.5000" in drawn
    assert "loss (bits/byte)" in drawn and "difference relative to the first run at common steps" in drawn
    done = here("draw", "loss", *folders[:2], "--window", "9")
    assert done.stdout.splitlines()[-1] == "  +12.50% relative to the first run · mean of steps 1 … 2"


def test_a_run_in_another_unit_is_refused(here, tmp_path):
    folders = [run_folder(tmp_path / key, [2.0], "", key=key) for key in ("loss_bits_per_byte", "loss_squared_error")]
    done = here("draw", "loss", *folders)
    assert done.returncode == 2 and "in squared error" in shown_error(done.stderr)["error"]


def test_bad_input(here, tmp_path):
    for words, error in (((tmp_path,), "is not a run folder"), ((tmp_path, "-o", "a.pdf"), "a.pdf")):
        done = here("draw", "loss", *words)
        assert done.returncode == 2 and error in shown_error(done.stderr)["error"]
