"""`metrics.jsonl`: one object a step, readable at any moment, and after a resume as if never interrupted."""

from __future__ import annotations

import errno
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import CONTINUE, RunError
from meshwright.models.tasks.next_token import text_unit
from meshwright.train.record.metrics import plot_loss
from meshwright.train.record.record_files import MetricsFile, read_metrics

UNIT = text_unit(1.0)
LOSS = UNIT.metric("loss")


def fill(path, last, *, after=0):
    file = MetricsFile(path, after_step=after, unit=UNIT)
    for step in range(after + 1, last + 1):
        file.write({"step": step, LOSS: 1 / step})
    file.close()


def test_every_line_is_there_at_once(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", after_step=0, unit=UNIT)
    for step in (1, 2):
        file.write({"step": step, LOSS: 1.5})
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path, value):
    file = MetricsFile(tmp_path / "metrics.jsonl", after_step=0, unit=UNIT)
    file.write({"step": 1, LOSS: value, "samples": [0, 7], "skipped": True})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, LOSS: None, "samples": [0, 7], "skipped": True}


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_resuming_reads_as_if_never_interrupted(tmp_path_factory, done, from_step, last, half_a_line):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    fill(path, done)
    if half_a_line:
        path.write_text(path.read_text() + '{"step": 1')
    from_step = min(from_step, done)
    fill(path, last, after=from_step)
    assert [line["step"] for line in read_metrics(path)] == list(range(1, max(from_step, last) + 1))


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    fill(path, 3)
    whole = path.read_text()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_text(whole[: len(whole) - cut])
        assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_a_full_disk_is_said_to_be_full(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", after_step=0, unit=UNIT)

    file._file = Full()
    with pytest.raises(RunError, match=r"can't write metrics.jsonl: No space left") as error:
        file.write({"step": 1})
    assert error.value.where == str(tmp_path / "metrics.jsonl") and CONTINUE in error.value.fix


class Full:
    """A file on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        pass


@given(st.floats(0, 100), st.floats(0.1, 20))
def test_bits_per_byte(loss, size):
    unit = text_unit(size)
    assert unit.name == "bits/byte" and loss * unit.scale * math.log(2) * size == pytest.approx(loss)
    assert text_unit(None).words(loss) == f"{loss:.3f} nats/token"


@pytest.mark.parametrize(
    ("losses", "bytes_per_token"), [([], None), ([None, None], 1.0), ([2.0], None), ([2.0, None, 1.0], 1.0)]
)
def test_a_loss_is_plotted_whatever_came_of_it(tmp_path, losses, bytes_per_token):
    path = tmp_path / "metrics.jsonl"
    unit = text_unit(bytes_per_token)
    key = unit.metric("loss")
    lines = [{"step": i + 1, key: loss, f"validation_{key}": loss} for i, loss in enumerate(losses)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot_loss(path, tmp_path / "loss.png", title="x", unit=unit)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_losses_without_a_unit_get_it_when_a_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null, "validation_loss": 1.5}\n{"step": 3, "loss": 1}\n'
    )
    fill(path, 3, after=2)
    assert list(read_metrics(path)) == [
        {"step": 1, LOSS: 2.5 * UNIT.scale},
        {"step": 2, LOSS: None, f"validation_{LOSS}": 1.5 * UNIT.scale},
        {"step": 3, LOSS: 1 / 3},
    ]
