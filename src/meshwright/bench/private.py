"""What PyTorch has no public call for, for benchmarks: seeing every operator, trees of tensors, samples of operators.

Private PyTorch names are used here and nowhere else in this room: `torch.utils._python_dispatch.TorchDispatchMode`,
`tree_leaves` and `tree_map_only` of `torch.utils._pytree`, and `op_db` of
`torch.testing._internal.common_methods_invocations`. Checked on 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from meshwright.errors import InputError


def operators() -> list[Any]:
    """PyTorch's descriptions of its operators, with samples.

    Raises:
        InputError: they can't be imported.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        raise InputError(
            f"PyTorch's samples of its operators need {error.name}, which is not installed",
            where="torch.testing._internal",
            rule="bench operators runs PyTorch's own samples",
            fix=f"pip install {error.name}",
        ) from error
    return list(op_db)
