"""Plans to test: generated and random tables with layers of several shapes. Torch-free."""

from __future__ import annotations

from random import Random

from meshwright.capture.plan import CapturePlan, plan_capture
from meshwright.capture.signature import LayerSignature, TensorSignature
from meshwright.pipeline import Schedule, generate, lower

STREAM = TensorSignature((2, 8, 4))
WIDE = TensorSignature((2, 8, 16))
LAYER = LayerSignature(STREAM, STREAM, saved_bytes=1000, temporary_bytes=100)


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
    """Zero to three layers; shapes, and what stands between layers, differ."""
    edges = [random.choice((STREAM, STREAM, WIDE)) for _ in range(random.randint(1, 4))]
    return tuple(
        LayerSignature(
            source,
            target,
            follows=random.random() < 0.7,
            saves_output=random.random() < 0.5,
            saved_bytes=random.randint(0, 99),
            temporary_bytes=random.randint(0, 99),
        )
        for source, target in zip(edges, edges[1:], strict=False)
    )
