"""The parts of `bench/gpu`, most valuable first; a new one is a row. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from meshwright_bench.gpu.cases import Case, Setting

HERE = "meshwright_bench.gpu"


@dataclass(frozen=True)
class Part:
    """A part: a process of its own, with its limit."""

    name: str
    title: str
    function: str
    """`module:function`, from a `Setting` to the part's cases."""
    limit_s: float
    keys: tuple[str, ...] = ()
    """Globs over the figures that the table shows."""
    measures: bool = True
    """Its times count, so its cases run one by one, but in a dry run."""


def load_cases(function: str, setting: Setting) -> list[Case]:
    """Return the cases that a part's `module:function` gives."""
    module, _, name = function.partition(":")
    return cast("Callable[[Setting], list[Case]]", getattr(import_module(module), name))(setting)


PARTS = (
    Part("start", "every family trains two steps", f"{HERE}.start:cases", 90, measures=False),
    Part("tests", "tests marked gpu", f"{HERE}.marked_tests:cases", 90, ("pytest.*",), measures=False),
    Part("proofs", "proofs on the device", f"{HERE}.proofs:cases", 90, measures=False),
    Part("train", "speed beside transformers'", f"{HERE}.train_arms:cases", 180, ("*.tokens_per_s", "*.peak_bytes")),
    Part("capture", "CUDA graphs", f"{HERE}.benches:capture_cases", 75, ("*_over_eager", "*_over_pytorch")),
    Part("float8", "float8 against bfloat16", f"{HERE}.benches:float8_cases", 60, ("layers.*",)),
    Part(
        "kernels",
        "4-bit and experts' kernels",
        f"{HERE}.benches:kernel_cases",
        60,
        ("*_over_floor", "*combine_over_copy"),
    ),
    Part("memory", "memory predicted and allocated", f"{HERE}.memory:cases", 90, ("*.error",)),
    Part(
        "profile",
        "the step by class of kernel",
        f"{HERE}.step_profile:cases",
        60,
        ("*.share.*", "*.mfu", "*below_peak*"),
    ),
)
