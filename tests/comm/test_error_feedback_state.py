"""The error from step to step: committed or not, reset, scaled, flushed, saved and loaded."""

from __future__ import annotations

import logging

import pytest
import torch

from meshwright.comm.compression import fsdp_collectives
from meshwright.comm.compression.catalogue import ERROR_CODEC, Codec
from meshwright.comm.compression.codecs import BETA, decode, encode
from meshwright.comm.compression.fsdp_collectives import ErrorLayout, ErrorState, LazyErrorState
from meshwright.errors import RunError
from tests.comm.test_codecs import gradients

LAYOUT = ErrorLayout(num_blocks=2, num_elements=300)


def new_state():
    return ErrorState("layers.0", LAYOUT)


def pending(state):
    """The gradient not yet sent, e / (1 − β)."""
    n = state.layout.num_elements
    return decode(state.state_dict()["error"], ERROR_CODEC, num_elements=n, dtype=torch.float32) / (1.0 - BETA)


def steps(num_steps, seed=1):
    return [g.view(2, 300) for g in gradients(num_steps, 600, seed=seed)]


def error_of(state):
    return state.state_dict()["error"]


def test_a_skipped_step_commits_nothing():
    taken, skipped = new_state(), new_state()
    bad = torch.full((2, 300), float("inf"))
    for step, g in enumerate(steps(6)):
        payload = taken.quantise(g, Codec.INT4)
        taken.commit()
        if step % 2:
            skipped.quantise(bad if step == 3 else g * 100, Codec.INT4)
            skipped.discard()
        assert torch.equal(skipped.quantise(g, Codec.INT4), payload)
        skipped.commit()
    assert torch.equal(error_of(taken), error_of(skipped)) and error_of(taken).any()
    assert taken.num_steps == skipped.num_steps == 6


def test_the_error_is_reset_after_every_nth_step_and_only_then(monkeypatch):
    monkeypatch.setattr(fsdp_collectives, "RESET_STEPS", 4)
    state = new_state()
    for step, g in enumerate(steps(9), start=1):
        state.quantise(g, Codec.INT4)
        state.discard()  # Skipped steps do not count.
        for _ in range(2):  # Nor do micro-batches.
            state.quantise(g, Codec.INT4)
        state.commit()
        assert bool(error_of(state).any()) == (step % 4 != 0), step


def test_the_values_of_loco():
    """A fifth of what the first step loses is kept, and the error is zero after step 1024."""
    state, (g, *_) = new_state(), steps(1)
    sent = decode(state.quantise(g, Codec.INT2), Codec.INT2, num_elements=300, dtype=torch.float32)
    state.commit()
    kept = decode(error_of(state), Codec.INT8, num_elements=300, dtype=torch.float32)
    assert (kept - 0.2 * (g - sent)).abs().max() < 0.01
    state.load_state_dict(state.state_dict() | {"num_steps": torch.tensor(1021)})
    for step in range(1022, 1026):
        state.quantise(g, Codec.INT2)
        state.commit()
        assert bool(error_of(state).any()) == (step != 1024)


def test_a_state_is_loaded_in_the_middle_of_a_step():
    state, other = new_state(), new_state()
    saved = state.state_dict()
    first, second = steps(2)
    expected = other.quantise(second, Codec.INT4)
    state.quantise(first, Codec.INT4)
    state.load_state_dict(saved)
    assert torch.equal(state.quantise(second, Codec.INT4), expected)


def test_micro_batches_of_a_step_hand_their_error_on():
    one_step, three_steps = new_state(), new_state()
    for g in steps(3):
        assert torch.equal(one_step.quantise(g, Codec.INT4), three_steps.quantise(g, Codec.INT4))
        three_steps.commit()
    one_step.commit()
    assert torch.equal(error_of(one_step), error_of(three_steps))
    assert (one_step.num_steps, three_steps.num_steps) == (1, 3)


def test_resume_is_bitwise_equal(monkeypatch):
    monkeypatch.setattr(fsdp_collectives, "RESET_STEPS", 5)
    whole, first = new_state(), new_state()
    saved, payloads = {}, []
    for step, g in enumerate(steps(8)):
        payloads.append(whole.quantise(g, Codec.INT2))
        whole.commit()
        if step < 3:
            first.quantise(g, Codec.INT2)
            first.commit()
            saved = first.state_dict()
    for _ in range(2):  # What was saved must not change with the state, of which there are two.
        first.quantise(torch.randn(2, 300), Codec.INT2)
        first.commit()
    resumed = new_state()
    resumed.load_state_dict(saved)
    for g, payload in zip(steps(8)[3:], payloads[3:], strict=True):
        assert torch.equal(resumed.quantise(g, Codec.INT2), payload)
        resumed.commit()
    assert torch.equal(error_of(resumed), error_of(whole)) and resumed.num_steps == 8


def test_sums_of_what_came_encoded_go_through_the_same_steps():
    """Micro-batches, and a skipped step: as of `quantise`, when the sums are what it would have been given."""
    plain, summing = new_state(), new_state()
    for step, g in enumerate(steps(5)):
        payloads = torch.stack([encode(part, Codec.BF16) for part in (g, g * 0.5)])
        sums = g.bfloat16().float() + (g * 0.5).bfloat16().float()
        expected = plain.quantise(sums, Codec.INT4)
        assert torch.equal(summing.requantise(payloads, Codec.BF16, Codec.INT4), expected)
        for state in (plain, summing):
            if step == 2:
                state.discard()
            elif step != 3:
                state.commit()
    assert torch.equal(error_of(plain), error_of(summing)) and error_of(plain).any()


@pytest.mark.parametrize(
    "layout", [ErrorLayout(3, 300), ErrorLayout(2, 200), ErrorLayout(4, 150), ErrorLayout(2, 300, (0, 2))]
)
def test_another_layout_starts_from_zero_and_says_so(layout, caplog):
    state = new_state()
    state.quantise(steps(1)[0], Codec.INT4)
    state.commit()
    other = ErrorState("layers.0", layout)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        other.load_state_dict(state.state_dict())
    assert "layers.0 starts from zero" in caplog.text and not error_of(other).any() and other.num_steps == 1
    assert error_of(other).shape == (layout.num_blocks, Codec.INT8.encoded_bytes(layout.num_elements))


def test_the_error_follows_the_loss_scale():
    """A run whose loss scale changes sends the same gradients, after division, as one without."""
    plain, scaled = new_state(), new_state()
    for step, g in enumerate(steps(6)):
        loss_scale = 2.0 ** (10 + 3 * (step % 3))
        scaled.follow_loss_scale(loss_scale)
        sent = scaled.quantise(g * loss_scale, Codec.INT4)
        found = decode(sent, Codec.INT4, num_elements=300, dtype=torch.float32) / loss_scale
        expected = decode(plain.quantise(g, Codec.INT4), Codec.INT4, num_elements=300, dtype=torch.float32)
        assert torch.equal(found, expected)
        plain.commit()
        scaled.commit()
    resumed = new_state()
    resumed.load_state_dict(scaled.state_dict())
    assert resumed.loss_scale == loss_scale
    for limit in (2.0**-140, 2.0**120):  # Too small to be kept, and too large.
        scaled.follow_loss_scale(limit)
        assert pending(scaled).isfinite().all()


def test_the_loss_scale_stays_within_a_step():
    state = new_state()
    state.follow_loss_scale(4.0)
    state.quantise(steps(1)[0], Codec.INT4)
    state.follow_loss_scale(4.0)
    with pytest.raises(RunError, match="from 4 to 8 within a step"):
        state.follow_loss_scale(8.0)
    state.commit()
    state.follow_loss_scale(8.0)


def test_a_loss_scale_is_that_of_errors_to_come():
    """Also of a saved one, whose layout shows at the first use."""
    g, saved = steps(1)[0], LazyErrorState("layers.0")
    saved.follow_loss_scale(2.0)
    saved.quantise(g, Codec.INT4)
    saved.commit()
    late = LazyErrorState("layers.0")
    late.load_state_dict(saved.state_dict())
    for one in (saved, late):
        one.follow_loss_scale(16.0)
    assert torch.equal(late.quantise(g, Codec.INT4), saved.quantise(g, Codec.INT4))
    late.commit()
    assert late.state_dict()["loss_scale"] == 16.0


def test_a_state_of_nothing_is_nothing():
    """A state from before the first step takes back what came after it, and is saved as it was."""
    feedback = LazyErrorState("layers.0")
    before = feedback.state_dict()
    expected = feedback.quantise(steps(1)[0], Codec.INT4)
    feedback.commit()
    feedback.load_state_dict(before)
    assert feedback.state_dict() == {} and torch.equal(feedback.quantise(steps(1)[0], Codec.INT4), expected)


def test_the_error_is_what_was_missing():
    state, missing = new_state(), torch.zeros(2, 300)
    for g in steps(20):
        payload = state.quantise(g, Codec.INT2)
        missing += g - decode(payload, Codec.INT2, num_elements=300, dtype=torch.float32)
        state.commit()
    before = missing.norm()
    missing -= pending(state)
    assert missing.norm() < before / 10


def test_a_saved_layout_keeps_its_pieces():
    state = ErrorState("layers.0", ErrorLayout(2, 300, (1, 3)))
    state.quantise(steps(1)[0], Codec.INT4)
    state.commit()
    same = ErrorState("layers.0", ErrorLayout(2, 300, (1, 3)))
    same.load_state_dict(state.state_dict())
    assert torch.equal(error_of(same), error_of(state)) and error_of(state).any()


def test_a_rank_without_elements():
    state = ErrorState("empty", ErrorLayout(4, 0))
    assert state.quantise(torch.zeros(4, 0), Codec.INT4).shape == (4, 0)
    state.commit()
    state.follow_loss_scale(8.0)
    assert pending(state).shape == (4, 0)
