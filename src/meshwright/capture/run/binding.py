"""Static tensors of a layer and a micro-batch: where its graphs find and leave what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.capture.lifetimes import Content, Role, first_with, follows_another
from meshwright.capture.run.backend import CapturedLayer
from meshwright.capture.run.static_tensors import Static, StaticTensors
from meshwright.capture.signature import LayerSignature


@dataclass(frozen=True)
class Binding:
    """Static tensors of a layer and a micro-batch; None for gradients that there are none of."""

    inputs: tuple[Static, ...]
    """The input, or the output of the layer that this one follows, and the arguments."""
    outputs: tuple[Static, ...]
    """The output and the further results."""
    output_gradients: tuple[Static | None, ...]
    input_gradients: tuple[Static | None, ...]
    leaving_output: Content | None
    """Copy of the output for the next stage, if it has one."""
    leaving_gradient: Content | None
    """Copy of the input's gradient for the previous stage, if it has one."""
    inner: tuple[Static, ...]
    """Those that nothing outside the chunk reads."""


def bind(one: CapturedLayer, m: int, layers: Sequence[LayerSignature], statics: StaticTensors) -> Binding:
    """Return the static tensors of a layer and a micro-batch.

    Args:
        one: the layer.
        m: the micro-batch.
        layers: captured layers of its chunk.
        statics: static tensors of the plan.
    """
    observed, number = one.observed, one.number
    own = Content(Role.INPUT, one.stage, number, m)
    source = replace(own, role=Role.OUTPUT, layer=number - 1) if follows_another(layers, number) else own
    arguments = [replace(own, layer=first_with(layers, n), number=n) for n in observed.numbers]
    inputs = [source, *arguments]
    outputs = [replace(own, role=Role.OUTPUT, number=at) for at in range(len(observed.outputs))]
    gradients = [replace(content, role=Role.OUTPUT_GRADIENT) for content in outputs]
    if number + 1 < len(layers) and follows_another(layers, number + 1):
        gradients[0] = replace(own, role=Role.INPUT_GRADIENT, layer=number + 1)
    has_gradient = [observed.outputs[at].requires_grad for at in observed.order()]
    found = [replace(own, role=Role.INPUT_GRADIENT, number=n) for n in (0, *observed.numbers)]
    wanted = [facts.requires_grad for facts in observed.inputs]
    given = [statics.at(c) if has else None for c, has in zip(gradients, has_gradient, strict=True)]
    returned = [statics.at(c) if has else None for c, has in zip(found, wanted, strict=True)]
    is_first, is_last = number == 0, number == len(layers) - 1
    inner = [statics.at(c) for c in inputs if c.role is Role.INPUT]
    inner += [statics.at(c) for c in outputs[1 if is_last else 0 :]]
    inner += [static for static in (*given, *returned[1 if is_first else 0 :]) if static is not None]
    leaving = [replace(own, role=role) for role in (Role.HANDED_OVER, Role.HANDED_BACK)]
    copies = [content if statics.has(content) else None for content in leaving]
    return Binding(
        tuple(map(statics.at, inputs)),
        tuple(map(statics.at, outputs)),
        tuple(given),
        tuple(returned),
        leaving_output=copies[0],
        leaving_gradient=copies[1],
        inner=tuple(inner),
    )
