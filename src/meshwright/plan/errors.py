"""Bytes of error feedback on a rank: LoCo keeps an error of all that it sends, twice, to be able to skip a step."""

from __future__ import annotations

from meshwright.comm.catalogue import ERROR_CODEC, find_method
from meshwright.plan.fsdp_units import fsdp_units
from meshwright.plan.messages import Place, two_stages

COPIES = 2
"""The error of the steps that were taken, and that of the step under way."""


def error_bytes(place: Place) -> int:
    """Of the gradient that a rank sends: all of it, or with two stages that of its place in the nodes."""
    if not find_method(place.config.comm.gradients).feedback:
        return 0
    line, num_replicas = place.line("dp_shard"), len(place.line("dp_replicate"))
    far = two_stages(place, line)[1]
    total = 0
    for unit in (unit for part in place.parts() for unit in fsdp_units(place.config, part) if unit.num_trained):
        if len(line) > 1:
            total += (len(far) + 1 if far else len(line)) * _kept(unit.num_trained)
        if num_replicas > 1:  # of every piece, and of the sum of the own one
            total += (num_replicas + 1) * _kept(-(-unit.num_trained // num_replicas))
    return COPIES * total


def _kept(num_elements: int) -> int:
    return ERROR_CODEC.encoded_bytes(num_elements)
