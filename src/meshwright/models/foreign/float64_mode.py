"""Float64 without float32 inside: casts of a model to float32 become casts to float64.

A third of transformers' models compute norms, softmax or rotary angles in float32 whatever their dtype, and thereby
differ by 1e-8 when a batch is merely split. A proof in float64 needs the model's mathematics, not this rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Float64Mode(TorchFunctionMode):
    """Function mode in which every floating-point dtype that is asked for, or taken by default, is float64."""

    def __enter__(self) -> Float64Mode:
        """Begin."""
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        torch.set_default_dtype(self._default)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator with dtypes replaced."""
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
