"""Step buffers and load counters: pending updates, commit, checkpointing and moves between devices and dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.errors import LayoutError
from meshwright.nn.step_handles import LoadCounter, StepBuffer, load_counters, step_buffers


def test_a_step_ends_with_its_commit():
    buffer = StepBuffer((2,), torch.int64)
    assert buffer.pending().tolist() == [0, 0]
    for n in range(3):
        buffer.add(torch.tensor([1, n]))
    pending = buffer.pending()
    assert pending.tolist() == [3, 3] and buffer.value.tolist() == [0, 0]
    pending *= 2  # reduced over two ranks
    assert buffer.pending().tolist() == [3, 3]
    value = buffer.value
    buffer.commit(pending)
    assert buffer.value is value and value.tolist() == [6, 6] and buffer.pending().tolist() == [0, 0]
    buffer.add(torch.tensor([1, 1]))
    buffer.discard()
    assert buffer.pending().tolist() == [0, 0] and buffer.value.tolist() == [6, 6]


def test_what_is_added_is_neither_kept_nor_changed_nor_differentiated():
    buffer, delta = StepBuffer((2,), torch.float32), torch.ones(2, requires_grad=True)
    buffer.add(delta)
    buffer.add(delta)
    assert delta.tolist() == [1, 1] and not buffer.pending().requires_grad and buffer.pending().tolist() == [2, 2]
    buffer.commit(delta)
    assert not buffer.value.requires_grad and buffer.value.tolist() == [1, 1]


@pytest.mark.parametrize("saved", [True, False])
def test_only_the_value_is_in_a_checkpoint(saved):
    buffer = StepBuffer((2,), torch.float32, saved=saved)
    buffer.add(torch.ones(2))
    assert list(buffer.state_dict()) == (["value"] if saved else [])
    assert [name for name, _ in buffer.named_buffers()] == ["value"]


def test_from_the_meta_device():
    with torch.device("meta"):
        counts, mean = StepBuffer((2,), torch.int64), StepBuffer((2,), torch.float32)
        both = nn.ModuleList([counts, mean])
        counts.add(torch.ones(2, dtype=torch.int64))
    both.to_empty(device="cpu").to(torch.bfloat16)
    assert counts.value.dtype is torch.int64 and mean.value.dtype is torch.bfloat16
    counts.value.zero_()
    assert counts.pending().tolist() == [0, 0] and counts.pending().device.type == "cpu"
    counts.add(torch.ones(2, dtype=torch.int64))
    counts.commit(counts.pending())
    assert counts.value.tolist() == [1, 1]


def test_an_update_has_the_buffer_s_shape_and_kind():
    buffer = StepBuffer((2,), torch.int64)
    for call in (buffer.add, buffer.commit):
        with pytest.raises(LayoutError, match=r"shape \[2\] got an update of shape \[1\]"):
            call(torch.ones(1, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="can't be cast"):
            call(torch.ones(2))


def test_a_load_counter_keeps_the_last_step():
    counter = LoadCounter(3)
    assert counter.latest is None and counter.value.dtype is torch.int64 and list(counter.state_dict()) == ["value"]
    for step in (1, 2):
        counter.add(torch.tensor([step, 0, 1]))
        counter.add(torch.tensor([0, 1, 1]))
        counter.commit(counter.pending())
        assert counter.latest.tolist() == [step, 1, 2] and counter.pending().tolist() == [0, 0, 0]
    assert counter.value.tolist() == [3, 2, 4]
    counter.discard()
    assert counter.latest.tolist() == [2, 1, 2], "a skipped step is no step"
    with pytest.raises(LayoutError, match="shape"):
        counter.commit(torch.ones(2, dtype=torch.int64))
    assert counter.latest.tolist() == [2, 1, 2]
    assert counter.to("meta").latest is None


def test_load_counters_are_found_by_name():
    module = nn.ModuleDict({"b": LoadCounter(2), "a": LoadCounter(3), "c": StepBuffer((2,), torch.int64)})
    assert load_counters(module) == [("a", module["a"]), ("b", module["b"])]
    assert [name for name, _ in step_buffers(module)] == ["a", "b", "c"]
