"""The parts that can be measured, by name. A new benchmark is one row of `PARTS`.

Torch-free, and a part's own module is imported only when it is asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import cast

from meshwright.errors import InputError
from meshwright_bench.report import Report


class DeviceChoice(StrEnum):
    """What to measure on; `auto` takes a CUDA device when there is one, as `train.device` does."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Options:
    """What the command line says about any part."""

    device: DeviceChoice = DeviceChoice.AUTO
    rounds: int | None = None
    """Rounds of each comparison; None for the part's own number."""


Say = Callable[[str], None]
"""Told what a longer wait is for."""
Body = Callable[[Options, Say], Report]
"""Measures a part. Runs in the launcher, which imports no torch: what needs it is a rank."""


class Part(StrEnum):
    """What can be measured."""

    TRAIN = "train"
    PIPELINE = "pipeline"
    SHARED_GRADIENTS = "shared-gradients"
    COMM = "comm"
    COMM_LOSS = "comm-loss"
    RESHARD = "reshard"
    OPERATORS = "operators"


@dataclass(frozen=True)
class Row:
    """A part's place in the table."""

    title: str
    body: str
    """`module:function`, a `Body`."""


PARTS = {
    Part.TRAIN: Row("the training step against a bare PyTorch loop", "meshwright_bench.train.benchmark:bench_train"),
    Part.PIPELINE: Row("the pipeline engine against PyTorch's", "meshwright_bench.pipeline.benchmark:bench_pipeline"),
    Part.SHARED_GRADIENTS: Row(
        "the sum of shared parameters' gradients against one of whole gradients",
        "meshwright_bench.shared_gradients.benchmark:bench_shared_gradients",
    ),
    Part.COMM: Row("compressed collectives against FSDP2's own", "meshwright_bench.comm.benchmark:bench_comm"),
    Part.COMM_LOSS: Row(
        "what gradients of few bits cost a training in loss", "meshwright_bench.comm.loss_cost:bench_comm_loss"
    ),
    Part.RESHARD: Row("redistribution by plans against DTensor's", "meshwright_bench.reshard.benchmark:bench_reshard"),
    Part.OPERATORS: Row(
        "operators on DTensors, with and without the fallback", "meshwright_bench.operators.benchmark:bench_operators"
    ),
}


def find_part(name: str) -> Part:
    """The part of that name.

    Raises:
        InputError: there is none.
    """
    if name in set(Part):
        return Part(name)
    near = difflib.get_close_matches(name.lower(), list(Part), n=1, cutoff=0.0)
    raise InputError(
        f"{name} is not a benchmark",
        where="command line, PART",
        rule=f"parts are {', '.join(Part)}",
        fix=f"meshwright bench {near[0]}",
    )


def load_body(part: Part) -> Body:
    """The function that measures a part."""
    module, _, function = PARTS[part].body.partition(":")
    return cast("Body", getattr(import_module(module), function))
