"""Time compiled feed-forward layers in bfloat16 and float8 on a GPU, forward and backward."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

from meshwright.features.float8.linear import AmaxHistory, Float8Linear
from meshwright.features.float8.rules import Float8Layers, Float8Recipe
from meshwright.features.float8.run import apply_float8
from meshwright.nn.transformer_block import FeedForward
from meshwright_bench.alternate import alternate
from meshwright_bench.float8.cases import BFLOAT16, LAYERS, SIDES, LayerTask
from meshwright_bench.train.measure import timer_on

PATHS = ("1.gate", "1.up", "1.down")


def measure(task: LayerTask) -> None:
    """Time all layers, and write seconds per side and round to the task's result file."""
    found = {name: time_sides(*sizes, device=torch.device("cuda"), task=task) for name, sizes in LAYERS.items()}
    task.result.write_text(json.dumps(found), "utf-8")


def time_sides(
    num_tokens: int, width: int, ffn_dim: int, *, device: torch.device, task: LayerTask
) -> dict[str, list[float]]:
    """Return seconds per forward and backward by side and round."""
    torch.compiler.reset()  # other sizes would be compiled as dynamic ones
    x = torch.randn(1, num_tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    arms = {side: _step(torch.compile(layer), x, gradient) for side, layer in sides(width, ffn_dim, device).items()}
    for arm in arms.values():
        arm()  # compile
    timed = alternate(arms, timer=timer_on(device), rounds=task.rounds, steps=task.steps)
    return {side: list(values) for side, values in timed.seconds.items()}


def sides(width: int, ffn_dim: int, device: torch.device) -> dict[str, nn.Module]:
    """Return a norm and the feed-forward layer of each side, with the same weights; torchao's where it is installed."""
    plain = nn.Sequential(nn.RMSNorm(width), FeedForward(width, ffn_dim=ffn_dim)).to(device, torch.bfloat16)
    found: dict[str, nn.Module] = {BFLOAT16: plain}
    for side, recipe in SIDES.items():
        if recipe == Float8Recipe.TORCHAO and find_spec("torchao") is None:
            continue
        found[side] = copy.deepcopy(plain)
        apply_float8(found[side], Float8Layers(Float8Recipe(recipe), PATHS))
        history = AmaxHistory(len(PATHS), length=16, device=device)
        for number, path in enumerate(PATHS):
            layer = found[side].get_submodule(path)
            if not isinstance(layer, Float8Linear):
                continue  # torchao's
            if side == "delayed":
                layer.slots = history.slots(number)
            elif side == "cached":
                layer.refresh_cached_weight(layer.weight)
    return found


def _step(layer: Callable[..., torch.Tensor], x: torch.Tensor, gradient: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        layer(x).backward(gradient)  # type: ignore[no-untyped-call]

    return run
