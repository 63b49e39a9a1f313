"""The balance loss that transformers' mixtures add, and whether it is the one that is trained.

Transformers takes it over all tokens of a batch; here it is that of each sample alone. A small model shows whether both
are the same for one sample, with the same gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.models.foreign.origin import ForeignModel
from meshwright.models.foreign.packing import Float64Mode, float64_model, random_tokens
from meshwright.models.foreign.router_loss import loss_of, watch_routers
from meshwright.models.foreign.structure import RouterLoss
from meshwright.models.hf import private

TOLERANCE = 1e-10
NOT_KNOWN = "its routers are not known"


def balance_loss(origin: ForeignModel, model: nn.Module, weight: float, length: int) -> RouterLoss | None:
    """Return the loss of a model's routers, whose weight is known; None if transformers doesn't tell them."""
    routers, top_k = tuple(private.routers(model)), private.top_k(model)
    if not routers or top_k is None:
        return None
    widths = set[int]()
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda _, inputs, out, index=index: widths.add((out[index] if isinstance(out, tuple) else out).shape[-1])
        )
        for path, index in routers
    ]
    ids = torch.zeros((1, length), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        origin.call(model, ids)
    for handle in handles:
        handle.remove()
    return RouterLoss(weight, routers, widths.pop(), top_k) if len(widths) == 1 else None


def why_not_its_own(small: ForeignModel, weight: float, length: int) -> str:
    """Return why the loss of a small model is not the one that its own forward adds for each of two samples alone, or
    an empty string if it is."""
    try:
        model, ids = float64_model(small), random_tokens(length)
        parameters = [one for one in model.parameters() if one.requires_grad]
        if (loss := balance_loss(small, model, weight, length)) is None:
            return NOT_KNOWN

        def gradients(added: Tensor) -> list[Tensor]:
            found = torch.autograd.grad(added, parameters, allow_unused=True, materialize_grads=True)
            return [added.detach(), *found]

        with Float64Mode():
            own = gradients(sum(private.added_loss(model, one[None], routed=True) for one in ids))
            routers = watch_routers(model, loss)
            for router in routers:
                router.num_samples = len(ids)
            small.call(model, ids)
            sums = torch.stack([one for router in routers if (one := router.take()) is not None]).sum(0)
            ours = gradients(weight * loss_of(sums, sums[:, 0].detach()))
    except Exception as error:  # whatever their forwards raise
        return f"trying it fails: {type(error).__name__}: {str(error)[:150]}"
    pairs = zip(ours, own, strict=True)
    worst = max(float((a - b).abs().max()) / max(float(b.abs().max()), weight) for a, b in pairs)
    return "" if worst <= TOLERANCE else f"it is not their balance loss (relative error {worst:.1e})"
