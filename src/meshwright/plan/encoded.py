"""The size of what a codec makes of numbers, from names alone: `comm.codecs` has the bytes themselves, and needs torch.

A test holds the two against each other.
"""

from __future__ import annotations

GROUP = 128
"""Elements that share a scale."""
SCALE_BYTES = 2
ALIGNMENT = 16
"""Bytes that the size of a quantised block is a multiple of."""
BITS = {"int8": 8, "int4": 4, "int2": 2}
CODECS = {"exact-via-all-to-all": "exact", "loco4": "int4", "loco2": "int2"}
"""The codec of a way to send, where it doesn't have its name."""


def encoded_bytes(way: str, num_elements: int, *, element_bytes: int) -> int:
    """Bytes that `num_elements` take, sent in a way that the configuration's section `comm` names.

    Args:
        way: a value of `comm.gradients`, `comm.weights` or `comm.inside_node`.
        num_elements: how many there are in one block.
        element_bytes: of one as it is, which matters where nothing is lost.
    """
    codec = CODECS.get(way, way)
    if codec == "exact":
        return num_elements * element_bytes
    if codec == "bf16":
        return num_elements * 2
    used = -(-num_elements // GROUP) * (GROUP * BITS[codec] // 8 + SCALE_BYTES)
    return -(-used // ALIGNMENT) * ALIGNMENT
