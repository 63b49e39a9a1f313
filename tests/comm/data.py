"""Data that codecs have to get right: fresh each time, of every kind that has broken one."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import Codec, Method
from meshwright.comm.compression.codecs import encode

KINDS = ("gaussian", "heavy", "constant", "denormal", "tiny", "huge", "zero", "sparse", "mixed", "infinite", "nan",
         "ties")  # fmt: skip


def fresh(kind: str, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> Tensor:
    """Values of a kind; the same seed gives the same ones. In float16, some values of `heavy` and `mixed` overflow
    to infinity, and those of `tiny` are zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    sign = x.sign()
    if kind == "heavy":
        x = x / torch.rand(shape, generator=generator).clamp_min(1e-3) ** 2
    elif kind == "constant":
        x = x[..., :1].expand(shape).clone()
    elif kind == "denormal":
        x = x * 2.0**-130 if dtype is not torch.float16 else x * 2.0**-18
    elif kind == "tiny":  # Around the smallest scale that is not sent as zero.
        x = x * 2.0 ** torch.randint(-128, -118, (*shape[:-1], 1), generator=generator)
    elif kind == "huge":
        x = x * torch.finfo(dtype).max / 4
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    elif kind == "zero":
        x = x.sign() * 0.0
    elif kind == "sparse":
        x = x * (torch.rand(shape, generator=generator) < 0.01)
    elif kind == "mixed":  # Every magnitude that float32 has, in one group.
        x = x * 2.0 ** torch.randint(-140, 100, shape, generator=generator)
    elif kind in ("infinite", "nan"):
        poison = float("inf") * sign if kind == "infinite" else torch.full(shape, float("nan"))
        x = torch.where(torch.rand(shape, generator=generator) < 0.01, poison, x)
    elif kind == "ties":  # On the border between two codes, and the largest magnitude with both signs.
        x = torch.randint(-16, 17, shape, generator=generator) * 0.5
    return x.to(dtype)


def assorted(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> Tensor:
    """Groups of 128 values, each of another kind: all kinds in 1536 values in a row."""
    *outer, length = shape
    num_groups = -(-length // 128)
    shards = [fresh(KINDS[(seed + i) % len(KINDS)], (*outer, 128), dtype, seed=seed + i) for i in range(num_groups)]
    return torch.cat(shards, -1)[..., :length].contiguous()


def method_of(codec: Codec, *, rotate: bool = False, feedback: bool = False) -> Method:
    """A method that the catalogue need not have."""
    return Method(f"test-{codec.value}", codec, (), rotate=rotate, feedback=feedback)


def encode_by(method: Method, x: Tensor) -> Tensor:
    """What a method sends of `x` in a first step, in which no error from before is added."""
    return encode(x, method.codec, rotate=method.rotate)


@contextmanager
def logged():
    """Yield a list that gets the messages logged within the context."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("meshwright").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("meshwright").removeHandler(handler)
