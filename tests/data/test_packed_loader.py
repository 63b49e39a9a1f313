"""Packed loader: batches are the windows, documents and counts agree with them, and all layouts read the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.loader import IGNORED_TARGET, Loader, validation_batches, validation_windows
from meshwright.data.sampler import WindowOrder, microbatch_samples
from tests.data.test_packed_windows import corpora, open_windows

CPU = torch.device("cpu")
LENGTHS = (5, 9, 30, 2, 1, 17, 8, 8, 40, 3)


def make_loader(lengths=LENGTHS, seq_len=8):
    windows = open_windows(lengths, seq_len)
    return windows, Loader(windows, WindowOrder(windows.num_windows, 3), CPU)


@given(start=st.integers(0, 200), size=st.integers(0, 20))
def test_a_batch_is_its_windows(start, size):
    windows, loader = make_loader()
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


def test_an_epoch_counts_all_targets():
    windows, loader = make_loader()
    assert loader.count(range(windows.num_windows)) == sum(length - 1 for length in LENGTHS)


@given(step=st.integers(0, 50), data_parallel=st.sampled_from([1, 2, 3, 4]), num_microbatches=st.sampled_from([1, 2]))
def test_all_layouts_read_the_same_step(step, data_parallel, num_microbatches):
    _, loader = make_loader()
    batches, count = [], 0
    for data_index in range(data_parallel):
        parts = microbatch_samples(
            step, global_batch=24, data_parallel=data_parallel, data_index=data_index, num_microbatches=num_microbatches
        )
        batches += [loader.batch(part) for part in parts]
        count += sum(loader.count(part) for part in parts)
    whole = loader.batch(range(step * 24, step * 24 + 24))
    assert torch.equal(torch.cat([batch.targets for batch in batches]), whole.targets)
    assert tuple(sizes for batch in batches for sizes in batch.documents) == whole.documents
    assert count == (whole.targets != IGNORED_TARGET).sum()


def test_an_order_over_other_windows_is_refused():
    windows, loader = make_loader()
    with pytest.raises(AssertionError):
        Loader(windows, WindowOrder(loader.order.num_windows + 1, 3), CPU)


@given(
    lengths=corpora,
    num_samples=st.integers(0, 40),
    batch_size=st.integers(1, 7),
    data_parallel=st.integers(1, 9),
)
def test_a_validation_is_the_same_on_every_layout(lengths, num_samples, batch_size, data_parallel):
    windows = open_windows([*lengths, 2], 8)
    chosen = validation_windows(windows.num_windows, num_samples)
    shares = [
        list(
            validation_batches(
                windows,
                chosen,
                batch_size=batch_size,
                data_parallel=data_parallel,
                data_index=data_index,
                device=CPU,
            )
        )
        for data_index in range(data_parallel)
    ]
    assert len({len(batches) for batches in shares}) == 1, "shares would wait for each other for ever"
    rows = []
    for batch in (batch for batches in shares for batch in batches):
        assert batch.inputs.shape == (batch_size, 8) and len(batch.documents) == batch_size
        assert all(sum(sizes) == 8 for sizes in batch.documents)
        for inputs, targets, sizes in zip(*(part.tolist() for part in batch[:2]), batch.documents, strict=True):
            if set(targets) != {IGNORED_TARGET}:
                rows.append((inputs, targets, sizes))
    inputs, targets = windows.read(chosen, ignored_target=IGNORED_TARGET)
    assert rows == list(zip(inputs.tolist(), targets.tolist(), windows.documents(chosen), strict=True))
