"""Triton's interpreter as it has to be for tests on a CPU: imported anew, and rounding as a GPU does. Torch-free."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from typing import Any

import pytest


def needs_triton() -> None:
    """Skip without Triton; it is not imported here, where it would not be the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton: pip install triton")


def interpreted(module: str) -> Any:
    """Return a module of Triton programs, which this process interprets from now on, for good."""
    import torch

    if module not in sys.modules:
        interpret_triton()
    torch.set_num_threads(1)
    return importlib.import_module(module)


def interpret_triton() -> None:
    """Make this process interpret Triton's programs that it imports from now on, for good."""
    forget_triton()
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    assert interpreter._convert_float and interpreter.InterpreterBuilder.create_fma
    interpreter._convert_float = bfloat16_as_a_gpu_has_it
    interpreter.InterpreterBuilder.create_fma = fused_as_on_a_gpu


def forget_triton():
    """PyTorch's compiler may have imported it, to compile: imported again it interprets."""
    for name in list(sys.modules):
        if re.match(r"triton(?!\._C\b)\b", name):  # a library that is loaded stays
            del sys.modules[name]


def bfloat16_as_a_gpu_has_it(x, source, target, rounding):
    """For the interpreter's own conversion, which cuts off what a GPU rounds, and loses the smallest numbers."""
    import numpy as np
    import torch

    if str(source) == "bf16":
        return x.astype(np.uint32) << 16
    assert (str(source), str(target)) == ("fp32", "bf16")
    return torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16).view(torch.int16).numpy()


def fused_as_on_a_gpu(builder, a, b, c):
    """For the interpreter's own product and sum, which round twice."""
    import numpy as np

    wide = a.data.astype(np.float64) * b.data.astype(np.float64) + c.data.astype(np.float64)
    return type(a)(wide.astype(np.float32), a.dtype)
