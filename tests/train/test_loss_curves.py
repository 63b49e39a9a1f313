"""Losses of runs beside each other: what is read of them, and how far they are apart."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.train.record.draw_loss_curves import differences
from meshwright.train.record.loss_curves import Curve, read_curves, read_metrics
from tests.helpers import run_folder


def test_runs_are_named_by_what_differs(tmp_path):
    first = run_folder(tmp_path / "a", [4.0, None, 2.0], '[comm]\ngradients = "exact"\n[train]\nseed = 3\n')
    other = run_folder(tmp_path / "b", [4.0, 3.0, 2.5], '[comm]\ngradients = "loco4"\n[train]\nseed = 3\n', cut='{"st')
    one, two = read_curves([first, other])
    assert (one.name, two.name) == ("comm.gradients=exact", "comm.gradients=loco4")
    assert one == Curve("comm.gradients=exact", (1, 3), (4.0, 2.0), 7.5) and two.steps == (1, 2, 3)
    assert read_curves([first])[0].name == "a"


def test_differences_are_means_over_steps_that_both_have():
    first = Curve("x", (1, 2, 3, 4), (1.0, 2.0, 4.0, 8.0), None)
    other = Curve("y", (2, 3, 4, 5), (2.2, 4.0, 8.0, 9.0), None)
    assert differences(other, first, window=1) == ([2, 3, 4], [pytest.approx(0.1), 0.0, 0.0])
    assert differences(other, first, window=3) == ([4], [pytest.approx(0.1 / 3)])
    assert differences(other, first, window=4) == ([], [])


@pytest.mark.parametrize("missing", ["metrics.jsonl", "config.toml", "steps", "toml"])
def test_what_is_no_run_is_named(tmp_path, missing):
    config = "a =" if missing == "toml" else "a = 1"
    folder = run_folder(tmp_path / "a", [None] if missing == "steps" else [1.0], config)
    if "." in missing:
        (folder / missing).unlink()
    with pytest.raises(InputError, match="is not a run folder") as caught:
        read_curves([folder])
    assert missing.split(".")[0][:4] in caught.value.what


@pytest.mark.parametrize("line", ["garbage", "[1]", "3", '{"a": 1}', '{"step": 1}', '{"step": "1", "loss": 2}',
                                  '{"step": true, "loss": 2}', '{"step": 1, "loss": "2"}', "", "\x00"])  # fmt: skip
def test_a_line_that_is_no_steps_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n' + line + '\n{"step": 3, "loss": null}\n')
    with pytest.raises(InputError, match="is not a step") as caught:
        list(read_metrics(path))
    assert caught.value.where == f"{path}, line 2"


def test_a_record_that_is_no_text_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_bytes(b'{"step": 1, "loss": 2, "x": "\xff"}\n')
    for name in "ab":
        with pytest.raises(InputError, match="can't be read"):
            list(read_metrics(tmp_path / name))
