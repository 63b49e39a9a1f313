"""Schedules of a user's own."""

from __future__ import annotations


def inverse_square_root(step, train):
    return train.lr * min(step / train.warmup_steps, (train.warmup_steps / step) ** 0.5)


def falls_below_zero(step, train):
    return 0.001 - step / 1e5


def raises(step, train):
    raise ValueError("no table")


def asks(step, train):
    return train.peak_lr


def words(step, train):
    return "0.1"
