"""Plans to test: generated and random tables with layers of several shapes. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from meshwright.capture.plan import CapturePlan, plan_capture
from meshwright.capture.signature import ArgumentSignature, LayerSignature, ResultSignature, TensorSignature
from meshwright.pipeline import Schedule, generate, lower

STREAM = TensorSignature((2, 8, 4))
WIDE = TensorSignature((2, 8, 16))
LAYER = LayerSignature(STREAM, STREAM, saved_bytes=1000, temporary_bytes=100)
SCALED = LayerSignature(STREAM, STREAM, arguments=(ArgumentSignature(TensorSignature((2, 4)), 1, True),))


def table(kind, *, ranks, microbatches, chunks=None) -> Schedule:
    return lower(generate(kind, num_stages=ranks, num_microbatches=microbatches, num_chunks=chunks))


def plan(
    kind="1f1b", *, ranks=4, microbatches=8, chunks=None, rank=0, layers=2, signatures=LAYER, **options
) -> CapturePlan:
    return plan_capture(
        table(kind, ranks=ranks, microbatches=microbatches, chunks=chunks),
        rank=rank,
        layers_per_chunk=layers,
        signatures=signatures,
        **options,
    )


def random_layers(random: Random) -> tuple[LayerSignature, ...]:
    """Zero to three layers; shapes, arguments, results, and what stands between layers, differ."""
    arguments = [ArgumentSignature(TensorSignature((2, 4)), at, random.random() < 0.5) for at in (1, 2)]
    edges = [random.choice((STREAM, STREAM, WIDE)) for _ in range(random.randint(1, 4))]
    layers = tuple(
        LayerSignature(
            source,
            target,
            follows=random.random() < 0.7,
            saves_output=random.random() < 0.5,
            saved_bytes=random.randint(0, 99),
            temporary_bytes=random.randint(0, 99),
            arguments=tuple(one for one in arguments if random.random() < 0.5),
            results=(ResultSignature(TensorSignature((2, 8))),) * random.randint(0, 1),
        )
        for source, target in zip(edges, edges[1:], strict=False)
    )
    # Arguments are numbered as they come.
    numbers: dict[int, int] = {}
    for argument in (one for layer in layers for one in layer.arguments):
        numbers.setdefault(argument.number, len(numbers) + 1)
    return tuple(
        replace(layer, arguments=tuple(replace(one, number=numbers[one.number]) for one in layer.arguments))
        for layer in layers
    )
