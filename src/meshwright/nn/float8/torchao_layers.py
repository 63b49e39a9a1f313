"""Linear layers of torchao, with current scaling, in place of a module's own (extra `torchao`).

They save their inputs as they are, and can't defer the gradients of their weights.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from meshwright.nn.private import has_scaled_mm


def convert_to_torchao(module: nn.Module, paths: Collection[str]) -> None:
    """Replace the linear layers at these paths by torchao's, with the same parameters; on a CPU they emulate."""
    # Imported late: torchao is optional, and takes seconds to import.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulates = not torch.cuda.is_available() or not has_scaled_mm(torch.device("cuda"))
    convert_to_float8_training(
        module,
        config=Float8LinearConfig(emulate=emulates),
        module_filter_fn=lambda _, path: path in paths,
    )
