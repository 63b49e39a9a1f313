"""The comparer finds what is planted, and names it; and it says equal of what is equal."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.rebuild.compare import main
from tests.rebuild.differences import prediction_differences, record_differences
from tests.rebuild.layouts import LAYOUTS, chosen, grid
from tests.rebuild.record import Record, Tensor, read_record, read_tensors
from tests.rebuild.sides import ROOT, NoSuchSide, Side, open_side

LOSS = 5.551379203796387
STEPS = tuple({"step": n, "loss": LOSS - n, "grad_norm": 1.5, "skipped": False} for n in range(1, 4))


def floats(*values: float, code: str = "f", dtype: str = "F32") -> Tensor:
    return Tensor(dtype, (len(values),), struct.pack(f"<{len(values)}{code}", *values))


TENSORS = {"model.w": floats(1.0, 2.0, 3.0, 4.0), "model.b": floats(0.0), "comm.rank0": Tensor("U8", (2,), b"\x07\x09")}
RECORD = Record(STEPS, TENSORS, {"sample": "def"})


def next_bit(tensor: Tensor, place: int) -> Tensor:
    data = bytearray(tensor.data)
    data[place] ^= 1
    return replace(tensor, data=bytes(data))


def with_step(number: int, **changes: object) -> Record:
    return replace(RECORD, steps=tuple(one | changes if one["step"] == number else one for one in STEPS))


def with_tensor(**changes: Tensor) -> Record:
    return replace(RECORD, tensors=TENSORS | {name.replace("_", "."): tensor for name, tensor in changes.items()})


LAST_DIGIT = math.nextafter(LOSS - 2, 9)
PLANTED = {
    "a loss in the last digit": (with_step(2, loss=LAST_DIGIT), f"loss at step 2: {LOSS - 2!r} → {LAST_DIGIT!r}"),
    "a loss that is no number": (with_step(3, loss=None), f"loss at step 3: {LOSS - 3!r} → None"),
    "a norm's sign of zero": (with_step(1, grad_norm=-0.0), "grad_norm at step 1: 1.5 → -0.0"),
    "a validation": (with_step(3, validation_loss=2.0), "validation_loss at step 3: (nothing) → 2.0"),
    "a skipped step": (with_step(2, skipped=True), "skipped at step 2: False → True"),
    "a step less": (replace(RECORD, steps=STEPS[:2]), "3 steps on OLD and 2 on NEW"),
    "the sample": (replace(RECORD, drawn={"sample": "deg"}), "sample: 'def' → 'deg'"),
    "one bit": (with_tensor(model_w=next_bit(TENSORS["model.w"], 8)),
        "1 of 3 tensors have other bits, first model.w: 1 of 4 elements, by at most 2.38e-07; of all tensors by "
        "at most 2.38e-07"),
    "the sign of zero": (with_tensor(model_b=floats(-0.0)),
        "1 of 3 tensors have other bits, first model.b: 1 of 1 elements, by at most 0; of all tensors by at most 0"),
    "no number": (with_tensor(model_b=floats(math.nan)),
        "1 of 3 tensors have other bits, first model.b: 1 of 1 elements, by at most nan; of all tensors by at "
        "most nan"),
    "bytes of error feedback": (with_tensor(comm_rank0=Tensor("U8", (2,), b"\x07\x0b")),
        "1 of 3 tensors have other bits, first comm.rank0: 1 of 2 elements, by at most 2; of all tensors by at most 2"),
    "a tensor less": (replace(RECORD, tensors={name: one for name, one in TENSORS.items() if name != "model.b"}),
        "tensor model.b is on OLD alone"),
    "a tensor more": (with_tensor(model_c=floats(1.0)), "tensor model.c is on NEW alone"),
    "another dtype": (with_tensor(model_b=floats(0.0, code="d", dtype="F64")), "tensor model.b: F32 [1] → F64 [1]"),
    "another shape": (with_tensor(model_w=replace(TENSORS["model.w"], shape=(2, 2))),
        "tensor model.w: F32 [4] → F32 [2, 2]"),
    "a failure": (Record(error="error  no such key"), "NEW failed:\nerror  no such key"),
}  # fmt: skip


@pytest.mark.parametrize(("new", "expected"), PLANTED.values(), ids=PLANTED)
def test_a_planted_difference_is_found_and_named(new, expected):
    assert list(record_differences(RECORD, new)) == [expected]


def test_equal_records_are_equal():
    again = Record(*json.loads(json.dumps([STEPS])), {n: replace(t) for n, t in TENSORS.items()}, {"sample": "def"})
    assert list(record_differences(RECORD, again)) == []


def test_of_several_differences_the_first_step_comes_first():
    new = replace(with_tensor(model_b=floats(9.0)), steps=with_step(2, loss=1.0).steps, drawn={})
    found = list(record_differences(RECORD, new))
    assert [one.split()[0] for one in found] == ["loss", "sample:", "1"]
    assert "of all tensors by at most 9" in found[-1]


def test_bfloat16_is_read():
    one, next_one = (Tensor("BF16", (1,), struct.pack("<H", bits)) for bits in (0x3F80, 0x3F81))
    assert (one.values()[0], next_one.values()[0]) == (1.0, 1.0078125)


FIGURES = {"memory.parameters": 100, "traffic.weights": 12, "rank 0: weights, sent, inside_node": 12}


@pytest.mark.parametrize(
    ("new", "totals_only", "expected"),
    [
        (FIGURES, False, []),
        (FIGURES | {"traffic.weights": 13}, False, ["predicted traffic.weights: 12 → 13"]),
        (FIGURES | {"traffic.weights": 13}, True, ["predicted traffic.weights: 12 → 13"]),
        (FIGURES | {"traffic.gradients": 4}, False, ["predicted traffic.gradients: (nothing) → 4"]),
        ({"memory.parameters": 100}, True, ["predicted traffic.weights: 12 → (nothing)"]),
        ({"memory.parameters": 100, "traffic.weights": 12, "traffic.tensor": 0}, True, []),
        ({"refused": "mesh.tp = 3"}, False, ["refused: '(nothing)' → 'mesh.tp = 3'"]),
    ],
)
def test_predictions_are_compared(new, totals_only, expected):
    assert list(prediction_differences(FIGURES, new, totals_only=totals_only)) == expected


def test_another_refusal_differs_where_it_is_told_alike():
    ours, theirs = {"refused": "mesh.tp = 3"}, {"refused": "mesh.tp = 3 of 4"}
    assert len(list(prediction_differences(ours, theirs))) == 1
    assert not list(prediction_differences(ours, theirs, totals_only=True))


def write_checkpoint(folder: Path, pieces: dict[str, tuple[list[int], list[int], bytes]], shape: list[int]) -> Path:
    """A tensor `w` of 16-bit elements in files of a piece each."""
    folder.mkdir(parents=True)
    entry = {"dtype": "BF16", "shape": shape, "pieces": [[o, s, file, "w"] for file, (o, s, _) in pieces.items()]}
    (folder / "layout.json").write_text(json.dumps({"format": 1, "tensors": {"w": entry}}))
    for file, (_, size, data) in pieces.items():
        header = json.dumps({"w": {"dtype": "BF16", "shape": size, "data_offsets": [0, len(data)]}}).encode()
        (folder / file).write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def test_a_tensor_is_put_together_from_its_pieces(tmp_path):
    pieces = {"right": ([0, 1], [2, 2], b"bbccBBCC"), "left": ([0, 0], [2, 1], b"aaAA")}
    found = read_tensors(write_checkpoint(tmp_path / "one", pieces, [2, 3]))
    assert found == {"w": Tensor("BF16", (2, 3), b"aabbccAABBCC")}
    del pieces["left"]
    with pytest.raises(ValueError, match="pieces of w are not the whole"):
        read_tensors(write_checkpoint(tmp_path / "two", pieces, [2, 3]))
    with pytest.raises(ValueError, match="no layout.json"):
        read_tensors(tmp_path)


def test_a_run_is_read_without_what_is_of_the_machine(tmp_path):
    write_checkpoint(tmp_path / "checkpoints" / "00000010", {"file": ([0], [1], b"ab")}, [1])
    write_checkpoint(tmp_path / "checkpoints" / "00000005", {"file": ([0], [1], b"xy")}, [1])
    line = {"step": 1, "loss": LOSS, "tokens_per_s": 3.5, "memory_bytes": 7}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = read_record(tmp_path, "validation 3.1 · 10 steps in 0.4 s\nsample\n  def f(\n")
    assert found == Record(({"step": 1, "loss": LOSS},), {"w": Tensor("BF16", (1,), b"ab")}, {"sample": "  def f(\n"})


def test_the_lists_have_no_name_twice():
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS) >= 22
    assert len({name for name, _ in grid()}) == len(list(grid())) > 200
    fast = list(chosen(["*"], fast=True))
    assert {layout.preset for layout in fast} == {layout.preset for layout in LAYOUTS}
    assert [layout.name for layout in chosen(["*zb-v*"], fast=True)] == ["dit-pp-zb-v-dp_shard"]


def test_a_side_is_a_checkout_or_a_revision(tmp_path):
    with open_side("OLD", str(ROOT), tmp_path) as side:
        assert (side.root, side.commit) == (ROOT, "")
    with pytest.raises(NoSuchSide, match="no-such-thing is neither"), open_side("NEW", "no-such-thing", tmp_path):
        pass


def test_a_checkout_that_is_gone_is_no_run_of_what_is_installed(tmp_path):
    (tmp_path / "src" / "meshwright").mkdir(parents=True)
    package = tmp_path / "src" / "meshwright" / "__init__.py"
    side = Side("OLD", tmp_path)
    package.touch()
    there = side.run(["-c", "import meshwright; print(meshwright.__file__)"], cwd=tmp_path)
    assert (there.returncode, there.stdout.strip()) == (0, str(package))
    amid = side.run(["-c", f"import os; os.unlink({str(package)!r})"], cwd=tmp_path)
    after = side.run(["-c", "import meshwright"], cwd=tmp_path)
    for done in (amid, after):
        assert (done.returncode, done.stderr) == (1, f"the checkout {tmp_path} of OLD is gone")


@pytest.mark.slow
def test_this_checkout_is_as_itself_and_not_as_with_another_seed(forked_meshwright, monkeypatch, capsys, tmp_path):
    """Runs are forked from the server of gangs; predictions are made as they always are."""
    in_side = Side.run

    def run(side, arguments, *, cwd, text=""):
        if arguments[0] != "-m":
            return in_side(side, arguments, cwd=cwd, text=text)
        return forked_meshwright(*arguments[2:], env=side._environment(), cwd=cwd)

    def compare(*words):
        with mock.patch("signal.signal"):
            code = main([str(ROOT), str(ROOT), "--jobs", "1", "--steps", "4", "--keep", str(tmp_path), *words])
        return code, capsys.readouterr().out

    monkeypatch.setattr(Side, "run", run)
    code, same = compare("--only", "one")
    assert code == 0, same
    assert "4 steps · " in same and "goes on from OLD's checkpoint" in same
    assert same.splitlines()[-1].startswith("all 2 equal in ")
    code, other = compare("--only", "one-chunks", "--new-word", "train.seed=1")
    assert code == 1, other
    assert "DIFFERS  one-chunks" in other and " loss_bits_per_byte at step 1: " in other
    assert other.splitlines()[-1].startswith("1 of 2 differ in ")
