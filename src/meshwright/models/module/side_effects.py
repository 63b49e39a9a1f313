"""Refuse a module whose forward does more than compute logits from its parameters: it draws random numbers, writes to
buffers, or mixes the samples of a batch. Layouts would differ by it, and a run would train something else unnoticed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.foreign import private
from meshwright.models.foreign.origin import Origin

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def with_buffers(model: nn.Module, origin: Origin) -> nn.Module:
    """Make buffers of tensors that are plain attributes, in place, so that they move with the module.

    Raises:
        ConfigError: tensors are in a list or mapping.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            lost = [x for x in private.leaves(value) if isinstance(x, Tensor) and id(x) not in known]
            if isinstance(value, Tensor) and lost:
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
            elif lost:
                what = f"{path or type(model).__name__}.{name} holds tensors"
                fix = f"register_buffer for each tensor of {name}, with persistent=False"
                raise origin.error(what, "tensors of a module are parameters or buffers, which move with it", fix)
    return model


def check_side_effects(model: nn.Module, origin: Origin, time: int) -> None:
    """Run a forward, and check that all it does is to compute logits.

    Args:
        model: the module, on the meta device or with values.
        origin: calls it.
        time: tokens of a sample that it takes.

    Raises:
        ConfigError: it draws random numbers, writes to a buffer, or mixes samples.
    """
    name = type(model).__name__
    norms = (path for path, module in model.named_modules() if isinstance(module, BATCH_NORMS))
    if (path := next(norms, None)) is not None:
        what = f"{path} of {name} normalises over the samples of a batch"
        raise _error(origin, what, "what a sample gets doesn't depend on others", "torch.nn.LayerNorm or RMSNorm")
    before = {path: private.version(buffer) for path, buffer in model.named_buffers()}
    with private.random_operators() as drawn:
        origin.call(model, torch.zeros((2, time), dtype=torch.long, device=next(model.parameters()).device))
    if drawn:
        what = f"the forward of {name} draws random numbers ({drawn[0]})"
        rule = "a layout has other samples on each rank, and would draw others"
        raise _error(origin, what, rule, "a forward without dropout and noise")
    after = {path: private.version(buffer) for path, buffer in model.named_buffers()}
    changed = [path for path in before if before[path] != after.get(path)]
    if changed:
        what = f"the forward of {name} writes to its buffer {changed[0]}"
        rule = "a forward leaves buffers as they are: ranks would write different values"
        raise _error(origin, what, rule, f"a forward that doesn't write to {changed[0]}")


def _error(origin: Origin, what: str, rule: str, fix: str) -> ConfigError:
    return origin.error(what, rule, f"{fix}, or a family of your own (model.kind=package.module:Family)")
