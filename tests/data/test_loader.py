"""Loader: batches are the windows, all layouts read the same, and a validation keeps its proportions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.loader import IGNORED_TARGET, Loader, chosen_validation, validation_batches, validation_windows
from meshwright.data.mixtures.entries import ONE
from meshwright.data.sampler import WindowOrder, microbatch_samples
from meshwright.data.windows import TokenWindows
from tests.data.test_packed_windows import corpora, open_windows

CPU = torch.device("cpu")
LENGTHS = (5, 9, 30, 2, 1, 17, 8, 8, 40, 3)
KINDS = ["stream", "packed"]


def make_part(length, dtype=np.uint16):
    """Tokens that tell their place."""
    part = np.arange(length, dtype=dtype)
    part.flags.writeable = False
    return part


def make_loader(kind):
    windows = TokenWindows(make_part(801), 8) if kind == "stream" else open_windows(LENGTHS, 8)
    return windows, Loader(windows, WindowOrder(windows.num_windows, 3), CPU)


@given(
    seq_len=st.integers(1, 12),
    count=st.integers(1, 50),
    rest=st.integers(0, 11),
    start=st.integers(0, 200),
    size=st.integers(0, 20),
    dtype=st.sampled_from(["<u2", "<u4", ">i4", "<i8"]),
)
def test_a_sample_is_its_window_and_targets_follow_inputs(seq_len, count, rest, start, size, dtype):
    part = make_part(count * seq_len + 1 + rest % seq_len, dtype)
    order = WindowOrder(count, 3)
    batch = Loader(TokenWindows(part, seq_len), order, CPU).batch(range(start, start + size))
    assert batch.documents is None
    for tensor in batch[:2]:
        assert tensor.dtype == torch.int64 and tensor.shape == (size, seq_len) and tensor.is_contiguous()
    for row, window in enumerate(order.windows(range(start, start + size))):
        expected = [int(part[window * seq_len + place]) for place in range(seq_len + 1)]
        assert batch.inputs[row].tolist() == expected[:-1]
        assert batch.targets[row].tolist() == expected[1:]


@given(start=st.integers(0, 200), size=st.integers(0, 20))
def test_a_packed_batch_is_its_windows(start, size):
    windows, loader = make_loader("packed")
    samples = range(start, start + size)
    batch = loader.batch(samples)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.shape == batch.targets.shape == (size, 8)
    chosen = loader.order.windows(samples)
    inputs, targets = windows.read(chosen, ignored_target=IGNORED_TARGET)
    np.testing.assert_array_equal(batch.inputs.numpy(), inputs)
    np.testing.assert_array_equal(batch.targets.numpy(), targets)
    assert batch.documents == windows.documents(chosen)
    assert loader.count(samples) == (batch.targets != IGNORED_TARGET).sum()


def test_an_epoch_reads_every_input_once_and_counts_all_targets():
    _, loader = make_loader("stream")
    inputs_bt, targets_bt, _ = loader.batch(range(100))
    assert sorted(inputs_bt.flatten().tolist()) == list(range(800))
    assert sorted(targets_bt.flatten().tolist()) == list(range(1, 801))
    windows, packed = make_loader("packed")
    assert packed.count(range(windows.num_windows)) == sum(length - 1 for length in LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
@given(step=st.integers(0, 50), data_parallel=st.sampled_from([1, 2, 3, 4]), num_microbatches=st.sampled_from([1, 2]))
def test_all_layouts_read_the_same_step(kind, step, data_parallel, num_microbatches):
    _, loader = make_loader(kind)
    batches, count = [], 0
    for data_index in range(data_parallel):
        parts = microbatch_samples(
            step, global_batch=24, data_parallel=data_parallel, data_index=data_index, num_microbatches=num_microbatches
        )
        batches += [loader.batch(part) for part in parts]
        count += sum(loader.count(part) for part in parts)
    whole = loader.batch(range(step * 24, step * 24 + 24))
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), whole.inputs)
    assert torch.equal(torch.cat([batch.targets for batch in batches]), whole.targets)
    assert kind == "stream" or tuple(sizes for batch in batches for sizes in batch.documents) == whole.documents
    assert count == (whole.targets != IGNORED_TARGET).sum()


def test_an_order_over_other_windows_is_refused():
    windows, loader = make_loader("packed")
    with pytest.raises(AssertionError):
        Loader(windows, WindowOrder(loader.order.num_windows + 1, 3), CPU)


def test_the_tensors_are_the_callers_own():
    """A step may write into its batch; the corpus is read-only and must not change under another."""
    _, loader = make_loader("stream")
    before = [tensor.clone() for tensor in loader.batch(range(5))[:2]]
    inputs_bt, targets_bt, _ = loader.batch(range(5))
    inputs_bt.fill_(-1)
    assert torch.equal(targets_bt, before[1])
    assert torch.equal(loader.batch(range(5)).inputs, before[0])


@given(count=st.integers(0, 2**41), num_samples=st.integers(0, 300))
def test_validation_windows_are_different_and_evenly_spread(count, num_samples):
    windows = validation_windows(count, num_samples)
    assert len(windows) == min(count, num_samples)
    if len(windows):
        assert windows[0] == 0 and windows[-1] < count
        gaps = np.diff(np.append(windows, count))
        assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=corpora, num_samples=st.integers(0, 40), batch_size=st.integers(1, 7), data_parallel=st.integers(1, 9))
def test_a_validation_is_the_same_on_every_layout(kind, lengths, num_samples, batch_size, data_parallel):
    windows = TokenWindows(make_part(sum(lengths)), 8) if kind == "stream" else open_windows([*lengths, 2], 8)
    chosen = validation_windows(windows.num_windows, num_samples)
    layout = {"batch_size": batch_size, "data_parallel": data_parallel, "device": CPU}
    shares = [
        list(validation_batches(windows, chosen, data_index=data_index, **layout))
        for data_index in range(data_parallel)
    ]
    assert len({len(batches) for batches in shares}) == 1, "shares would wait for each other for ever"
    rows, padding = [], []
    for batches in shares:
        padding.append(0)
        for batch in batches:
            assert batch.inputs.dtype == batch.targets.dtype == torch.int64
            assert batch.inputs.shape == (batch_size, 8), "a pipeline's stages take one size"
            assert kind == "stream" or [sum(sizes) for sizes in batch.documents] == [8] * batch_size
            for row, (inputs, targets) in enumerate(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)):
                padding[-1] += set(targets) == {IGNORED_TARGET}
                if set(targets) != {IGNORED_TARGET}:
                    rows.append((inputs, targets, batch.documents and batch.documents[row]))
    assert max(padding) <= batch_size
    inputs, targets = windows.read(chosen, ignored_target=IGNORED_TARGET) if len(chosen) else np.empty((2, 0, 8))
    documents = windows.documents(chosen) or [None] * len(chosen)
    assert rows == list(zip(inputs.tolist(), targets.tolist(), documents, strict=True))


def test_the_padding_target_is_the_one_that_torch_ignores():
    logits = torch.randn(3, 5, dtype=torch.float64)
    targets = torch.tensor([1, IGNORED_TARGET, 4])
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    kept = torch.nn.functional.cross_entropy(logits[[0, 2]], targets[[0, 2]], reduction="sum")
    assert torch.equal(loss, kept)


@given(
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=5),
    weights=st.lists(st.integers(1, 50), min_size=5, max_size=5),
    num_samples=st.integers(0, 400),
)
def test_a_validation_keeps_the_proportions_and_spreads_over_each_source(sizes, weights, num_samples):
    total = sum(weights[: len(sizes)])
    ends = [round(ONE * sum(weights[: at + 1]) / total) for at in range(len(sizes))]
    shares = np.diff([0, *ends]).tolist()
    found = chosen_validation(sizes, shares, num_samples)
    assert len(found) == min(num_samples, sum(sizes)) and (np.diff(found) >= 0).all()
    first = 0
    for size, share in zip(sizes, shares, strict=True):
        own = found[(found >= first) & (found < first + size)] - first
        assert abs(len(own) * ONE - len(found) * share) < ONE
        if len(own):
            repeats = np.bincount(own, minlength=size)
            assert own[0] == 0 and repeats.max() <= -(-len(own) // size)
        first += size
    assert (chosen_validation(sizes[:1], [ONE], num_samples) == validation_windows(sizes[0], num_samples)).all()
