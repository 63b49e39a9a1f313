"""The recorder outside a proof, names of parameters, and hashes of samples."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.prove import Recorder
from meshwright.prove.script.layout_choice import FOLDER, STEPS
from meshwright.prove.script.recorder import RecordingComplete, ScriptRecord, hash_rows


def train(model, *, names=None, num_steps=1):
    """Record SGD steps of a model on one rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recorder = Recorder(model, optimizer, names=names)
    for _ in range(num_steps):
        inputs = torch.ones(2, 3)
        recorder.batch(inputs)
        loss = model(inputs).sum()
        loss.backward()
        recorder.gradients()
        recorder.loss(loss)
        optimizer.step()
        recorder.step()
        optimizer.zero_grad()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(STEPS, "1")
    return tmp_path


def test_nothing_happens_outside_a_proof(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(nn.Linear(3, 2), num_steps=3)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_package_stays_callable_and_free_of_torch():
    code = "import sys, meshwright.prove as p; assert callable(p) and 'torch' not in sys.modules; p.Recorder"
    assert subprocess.run([sys.executable, "-c", code + "; assert 'torch' in sys.modules"]).returncode == 0


def test_a_step_is_recorded_and_the_script_ends(folder):
    model = nn.Linear(3, 2)
    start = model.weight.detach().clone()
    with pytest.raises(RecordingComplete) as caught:
        train(model, num_steps=9)
    assert caught.value.code == 0
    record = ScriptRecord(**torch.load(folder / "rank-0.pt", weights_only=True))
    assert torch.equal(record.initial["weight"][1], start)
    (step,) = record.steps
    assert torch.equal(step["gradients"]["weight"][1], torch.full((2, 3), 2.0))
    assert torch.equal(step["weights"]["weight"][1], start - 1.0)
    assert record.optimized == record.trainable == {"weight": True, "bias": True}
    assert (step["options"][0]["lr"], step["microbatches"], record.scaled) == ([0.5], 1, [1.0])


class Wrapped(nn.Module):
    """A module under the names that wrappers add, with a tied weight."""

    def __init__(self):
        super().__init__()
        self.module = nn.Module()
        self.module._orig_mod = nn.Module()
        self.module._orig_mod.first = nn.Linear(3, 3, bias=False)
        self.module._orig_mod.module = nn.Linear(3, 3, bias=False)
        self.module._orig_mod.module.weight = self.module._orig_mod.first.weight

    def forward(self, x):
        return self.module._orig_mod.module(self.module._orig_mod.first(x))


@pytest.mark.parametrize(
    "names, expected",
    [
        (None, ["first.weight", "weight"]),
        ({"first.weight": "layers.4.weight"}, ["layers.4.weight", "weight"]),
        (lambda name: "x." + name, ["x.first.weight", "x.weight"]),
    ],
)
def test_names_are_stripped_and_mapped_and_tied_ones_recorded(folder, names, expected):
    with pytest.raises(RecordingComplete):
        train(Wrapped(), names=names)
    record = ScriptRecord(**torch.load(folder / "rank-0.pt", weights_only=True))
    assert list(record.initial) == expected and record.tied == [expected]


def test_samples_are_hashed_row_by_row_with_dtype_and_values():
    x = torch.arange(6.0).reshape(3, 2)
    a = hash_rows((x, {"y": torch.tensor([0, 1, 2])}))
    assert len(set(a)) == 3
    order = torch.tensor([2, 0, 1])
    assert hash_rows((x[order], {"y": order})) == [a[2], a[0], a[1]]
    assert not set(a) & set(hash_rows((x.double(), {"y": torch.tensor([0, 1, 2])})))
    assert not set(a) & set(hash_rows((x, {"y": torch.tensor([1, 2, 0])})))
    assert hash_rows((x.bfloat16(),)) != hash_rows((x.half(),))


@pytest.mark.parametrize("values", [(), ("text",), (torch.ones(2), torch.ones(3)), (torch.tensor(1.0),)])
def test_a_batch_needs_tensors_with_the_same_rows(values):
    with pytest.raises(InputError, match="recorder.batch"):
        hash_rows(values)
