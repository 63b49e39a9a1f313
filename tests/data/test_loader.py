"""Loader: targets are inputs shifted by one, and validation reads the same set on every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.loader import IGNORED_TARGET, Loader, validation_batches, validation_windows
from meshwright.data.sampler import WindowOrder, microbatch_samples
from meshwright.data.windows import TokenWindows, num_windows

CPU = torch.device("cpu")
lengths = st.integers(1, 12)


def make_part(length, dtype=np.uint16):
    """Tokens that tell their place."""
    part = np.arange(length, dtype=dtype)
    part.flags.writeable = False
    return part


@given(
    seq_len=lengths,
    count=st.integers(1, 50),
    rest=st.integers(0, 11),
    start=st.integers(0, 200),
    size=st.integers(0, 20),
    dtype=st.sampled_from(["<u2", "<u4", ">i4", "<i8"]),
)
def test_a_sample_is_its_window_and_targets_follow_inputs(seq_len, count, rest, start, size, dtype):
    part = make_part(count * seq_len + 1 + rest % seq_len, dtype)
    order = WindowOrder(count, 3)
    inputs_bt, targets_bt, _ = Loader(TokenWindows(part, seq_len), order, CPU).batch(range(start, start + size))
    assert inputs_bt.dtype == targets_bt.dtype == torch.int64
    assert inputs_bt.shape == targets_bt.shape == (size, seq_len)
    assert inputs_bt.is_contiguous() and targets_bt.is_contiguous()
    for row, window in enumerate(order.windows(range(start, start + size))):
        expected = [int(part[window * seq_len + place]) for place in range(seq_len + 1)]
        assert inputs_bt[row].tolist() == expected[:-1]
        assert targets_bt[row].tolist() == expected[1:]


@given(seq_len=lengths, count=st.integers(1, 40))
def test_an_epoch_reads_every_input_once(seq_len, count):
    part = make_part(count * seq_len + 1)
    inputs_bt, targets_bt, _ = Loader(TokenWindows(part, seq_len), WindowOrder(count, 0), CPU).batch(range(count))
    assert sorted(inputs_bt.flatten().tolist()) == list(range(count * seq_len))
    assert sorted(targets_bt.flatten().tolist()) == list(range(1, count * seq_len + 1))


@given(step=st.integers(0, 50), data_parallel=st.sampled_from([1, 2, 3, 4]), num_microbatches=st.sampled_from([1, 2]))
def test_all_layouts_read_the_same_step(step, data_parallel, num_microbatches):
    loader = Loader(TokenWindows(make_part(401), 4), WindowOrder(100, 1), CPU)
    rows = []
    for data_index in range(data_parallel):
        parts = microbatch_samples(
            step, global_batch=24, data_parallel=data_parallel, data_index=data_index, num_microbatches=num_microbatches
        )
        rows += [loader.batch(part)[0] for part in parts]
    assert torch.equal(torch.cat(rows), loader.batch(range(step * 24, step * 24 + 24))[0])


def test_an_order_over_another_corpus_is_refused():
    with pytest.raises(AssertionError):
        Loader(TokenWindows(make_part(401), 4), WindowOrder(99, 1), CPU)


def test_the_tensors_are_the_callers_own():
    """A step may write into its batch; the corpus is read-only and must not change under another."""
    loader = Loader(TokenWindows(make_part(401), 4), WindowOrder(100, 1), CPU)
    before = [tensor.clone() for tensor in loader.batch(range(5))[:2]]
    inputs_bt, targets_bt, _ = loader.batch(range(5))
    inputs_bt.fill_(-1)
    assert torch.equal(targets_bt, before[1])
    assert torch.equal(loader.batch(range(5))[0], before[0])


@given(count=st.integers(0, 2**41), num_samples=st.integers(0, 300))
def test_validation_windows_are_different_and_evenly_spread(count, num_samples):
    windows = validation_windows(count, num_samples)
    assert len(windows) == min(count, num_samples)
    if len(windows):
        assert windows[0] == 0 and windows[-1] < count
        gaps = np.diff(np.append(windows, count))
        assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


@given(
    seq_len=lengths,
    count=st.integers(0, 30),
    num_samples=st.integers(0, 40),
    batch_size=st.integers(1, 7),
    data_parallel=st.integers(1, 9),
)
def test_a_validation_is_the_same_on_every_layout(seq_len, count, num_samples, batch_size, data_parallel):
    part = make_part(count * seq_len + 1)
    assert num_windows(part, seq_len) == count

    def read(data_parallel, data_index, batch_size):
        layout = {"data_parallel": data_parallel, "data_index": data_index, "batch_size": batch_size}
        chosen = validation_windows(count, num_samples)
        return list(validation_batches(TokenWindows(part, seq_len), chosen, **layout, device=CPU))

    shares = [read(data_parallel, data_index, batch_size) for data_index in range(data_parallel)]
    shapes = {tuple(inputs_bt.shape for inputs_bt, *_ in batches) for batches in shares}
    assert len(shapes) == 1, "shares would wait for each other for ever"
    assert all(shape[0] == batch_size for shape in next(iter(shapes))), "a pipeline's stages take one size"

    rows, padding = [], []
    for batches in shares:
        ignored = 0
        for inputs_bt, targets_bt, _ in batches:
            assert inputs_bt.dtype == targets_bt.dtype == torch.int64
            assert (inputs_bt >= 0).all()
            for inputs, targets in zip(inputs_bt.tolist(), targets_bt.tolist(), strict=True):
                if IGNORED_TARGET in targets:
                    assert set(targets) == {IGNORED_TARGET}
                    ignored += 1
                else:
                    rows.append((inputs, targets))
        padding.append(ignored)
    assert max(padding) <= batch_size
    expected = [
        (list(range(w * seq_len, (w + 1) * seq_len)), list(range(w * seq_len + 1, (w + 1) * seq_len + 1)))
        for w in validation_windows(count, num_samples).tolist()
    ]
    assert rows == expected


def test_the_padding_target_is_the_one_that_torch_ignores():
    logits = torch.randn(3, 5, dtype=torch.float64)
    targets = torch.tensor([1, IGNORED_TARGET, 4])
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    kept = torch.nn.functional.cross_entropy(logits[[0, 2]], targets[[0, 2]], reduction="sum")
    assert torch.equal(loss, kept)
