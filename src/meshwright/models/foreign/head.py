"""Find the linear layer whose result a model's output is, once elementwise operators such as a soft cap or a scale were
applied to it; or say why the output is not that.

A loss by chunks of tokens applies the same operators to the logits of a chunk, and a forward that computes it ends with
the layer. So nothing else may see logits.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.contract.model_facts import HeadFacts
from meshwright.models.foreign import private
from meshwright.models.foreign.origin import ForeignModel
from meshwright.nn.linear import Linear


def find_head(model: nn.Module, origin: ForeignModel, ids: Tensor, vocab_size: int) -> HeadFacts:
    """Return the head of a model that maps token ids to logits of a vocabulary."""
    if private.is_hooked(model):
        return HeadFacts(reason=f"{type(model).__name__} has hooks, which see its logits")
    plain = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features == vocab_size}
    odd = [path for path, m in plain.items() if type(m) not in (nn.Linear, Linear) or private.is_hooked(m)]
    with torch.no_grad(), _Trails() as trails:
        handles = [m.register_forward_hook(trails.start(path)) for path, m in plain.items()]
        try:
            found = trails.of(origin.call(model, ids))
        finally:
            for handle in handles:
                handle.remove()
    if found is None:
        return HeadFacts(reason=f"the logits of {type(model).__name__} are not what a linear layer returns")
    if found.path in odd:
        return HeadFacts(reason=f"{found.path} has hooks, or a forward of its own")
    if trails.calls[found.path] > 1:
        return HeadFacts(reason=f"a forward calls {found.path} {trails.calls[found.path]} times")
    return HeadFacts(reason=found.reason) if found.reason else found


class _Trails(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that follows what linear layers return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self._trails: dict[int, tuple[Tensor, HeadFacts]] = {}
        """Tensors made of a layer's result. They are kept: the id of one that is freed could be that of another."""

    def start(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.calls[path] += 1
            self._trails[id(out)] = out, HeadFacts(path)

        return hook

    def of(self, tensor: Tensor) -> HeadFacts | None:
        return self._trails.get(id(tensor), (None, None))[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out, taken = func(*args, **(kwargs or {})), [x for x in private.leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = func.overloadpacket.__name__
        if private.is_mutable(func):
            written = {private.storage_id(x) for x in taken}
            for key, (tensor, one) in self._trails.items():
                if private.storage_id(tensor) in written:
                    self._trails[key] = tensor, replace(one, reason=f"{name} writes to what {one.path} returns")
        elif found := next((head for x in taken if (head := self.of(x)) is not None), None):
            step = "" if kwargs else _step(func, args)
            after = replace(found, after=(*found.after, step))
            other = replace(
                found, reason=found.reason or f"{name} of what {found.path} returns is not elementwise with numbers"
            )
            self._trails |= {id(x): (x, after if step else other) for x in private.leaves(out) if isinstance(x, Tensor)}
        return out


def _step(operator: Any, args: tuple[Any, ...]) -> str:
    """Return an operator's name and numbers if it is elementwise in its first argument and has no other tensors."""
    if torch.Tag.pointwise not in operator.tags or not all(isinstance(one, int | float | None) for one in args[1:]):
        return ""
    return f"{operator.overloadpacket.__name__}({json.dumps(args[1:])[1:-1]})"
