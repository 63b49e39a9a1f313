"""Losses of runs beside each other: what is read of them, and how far they are apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.train.record.loss_curves import Curve, common_steps, differences, read_curves, run_names
from meshwright.train.record.record_files import read_metrics
from tests.helpers import run_folder


def test_runs_are_named_by_what_differs(tmp_path):
    first = run_folder(tmp_path / "a", [4.0, None, 2.0], '[comm]\ngradients = "exact"\n[train]\nseed = 3\n')
    other = run_folder(tmp_path / "b", [4.0, 3.0, 2.5], '[comm]\ngradients = "loco4"\n[train]\nseed = 3\n', cut='{"st')
    one, two = read_curves([first, other])
    assert (one.name, two.name) == ("gradients=exact", "gradients=loco4")
    assert one == Curve("gradients=exact", (1, 3), (4.0, 2.0), 7.5, "bits/byte") and two.steps == (1, 2, 3)
    assert read_curves([first])[0].name == "a"


def test_labels_are_short_and_never_equal():
    a, b, c = Path("runs/a"), Path("runs/b"), Path("old/a")
    base = {"train.lr": 0.1, "data.seed": 1, "train.seed": 1, "data.source": "x" * 99}
    sections = run_names([a, b], [base, base | {"data.seed": 2, "train.seed": 2, "train.lr": 0.2}])
    assert sections == ["lr=0.1 data.seed=1 train.seed=1", "lr=0.2 data.seed=2 train.seed=2"]
    assert run_names([a, b, Path("c")], [base, base | {"train.lr": 0.2}, {}])[2] == "c"
    assert run_names([a, b], [base, base]) == ["a", "b"] and run_names([a, c], [base, base]) == ["runs/a", "old/a"]
    assert run_names([a, b, c], [base, base, base | {"train.lr": 0.2}])[0] == "runs/a: lr=0.1"
    many = [{f"model.k{i}": value for i in range(9)} | {"train.lr": lr} for value, lr in ((1, 1), (2, 2), (2, 3))]
    assert run_names([a, b, c], many)[1] == "lr=2 k0=2 k1=2 k2=2 … 6 more"
    long = run_names([a, b], [base, base | {"data.source": "y"}])[0]
    assert len(long) == len("source=") + 32 and "x…x" in long


def test_losses_in_different_units_are_not_compared(tmp_path):
    first, other, old = (
        run_folder(tmp_path / name, [4.0], "", key=key)
        for name, key in (("a", "loss_bits_per_byte"), ("b", "loss_nats_per_token"), ("c", "loss"))
    )
    assert [read_curves([one])[0].unit for one in (first, other, old)] == ["bits/byte", "nats/token", ""]
    for refused, words in ((other, "in nats/token"), (old, "a unit that their metrics don't name")):
        with pytest.raises(InputError, match="are in bits/byte") as caught:
            read_curves([first, first, refused])
        assert words in caught.value.what and f"draw loss {first} {first}, and" in caught.value.fix
    metrics = first / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + (old / "metrics.jsonl").read_text())
    with pytest.raises(InputError, match="several units: loss and loss_bits_per_byte"):
        read_curves([first])


def test_differences_are_means_over_steps_that_both_have():
    first = Curve("x", (1, 2, 3, 4), (1.0, 2.0, 4.0, 8.0), None, "")
    other = Curve("y", (2, 3, 4, 5), (2.2, 4.0, 8.0, 9.0), None, "")
    assert common_steps(other, first) == [2, 3, 4]
    assert differences(other, first, window=1) == ([2, 3, 4], [pytest.approx(0.1), 0.0, 0.0])
    assert differences(other, first, window=3) == ([4], [pytest.approx(0.1 / 3)])
    assert differences(other, first, window=4) == differences(other, first, window=3)
    assert differences(Curve("z", (5,), (1.0,), None, ""), first, window=1) == ([], [])


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
                                  '{"step": true, "loss": 2}', '{"step": 1, "loss": "2"}', '{"step": 1, "loss_x": "2"}',
                                  "", "\x00"])  # fmt: skip
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
