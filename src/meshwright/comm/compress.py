"""Compressed gradients and weights for any model under FSDP2, without the rest of Meshwright."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.codecs import Codec
from meshwright.comm.compressed import CompressedAllGather, CompressedReduceScatter, SentBytes
from meshwright.comm.error_state import starting_with
from meshwright.errors import ConfigError, LayoutError


@dataclass(frozen=True)
class Way:
    """How gradients are sent."""

    codec: Codec
    feedback: bool = False
    rotate: bool = False


EXACT = "exact"
GRADIENTS = {
    "exact-via-all-to-all": Way(Codec.EXACT),
    "bf16": Way(Codec.BF16),
    "int8": Way(Codec.INT8, rotate=True),
    "int4": Way(Codec.INT4, rotate=True),
    "loco4": Way(Codec.INT4, feedback=True),
    "int2": Way(Codec.INT2, rotate=True),
    "loco2": Way(Codec.INT2, feedback=True),
}
"""Ways of gradients by name, besides `exact`, which is FSDP2's own; the last two are to see what feedback does."""
WEIGHTS = {"bf16": Codec.BF16, "int8": Codec.INT8}


class Reduction(Protocol):
    """What sums gradients over ranks, and may keep errors of it."""

    @property
    def sent(self) -> SentBytes:
        """Bytes that this rank has handed to others."""

    def commit(self) -> None:
        """The step was taken."""

    def discard(self) -> None:
        """The step is skipped."""

    def state_dict(self) -> dict[str, Tensor]:
        """The errors of this rank."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from saved ones."""


class Compression:
    """The compressed collectives of a model. A training says after every step whether it was taken."""

    def __init__(self, reductions: Mapping[str, Reduction], all_gathers: Mapping[str, CompressedAllGather]) -> None:
        self._reductions, self._all_gathers = reductions, all_gathers

    def commit(self) -> None:
        """The optimizer has taken the step: its errors are carried into the next."""
        for comm in self._reductions.values():
            comm.commit()

    def discard(self) -> None:
        """The step is skipped, for an overflow: its errors are forgotten."""
        for comm in self._reductions.values():
            comm.discard()

    def sent(self) -> SentBytes:
        """Bytes that this rank has handed to others since the start."""
        counts = [comm.sent for comm in self._reductions.values()]
        counts += [comm.sent for comm in self._all_gathers.values()]
        return SentBytes(sum(count.payload for count in counts), sum(count.exact for count in counts))

    def state_dict(self) -> dict[str, Tensor]:
        """The errors of this rank, which no other rank has."""
        return {
            f"{name}.{key}": value
            for name, comm in self._reductions.items()
            for key, value in comm.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of this rank; a module that it doesn't have starts from zero."""
        for name, comm in self._reductions.items():
            if own := starting_with(f"{name}.", state):
                comm.load_state_dict(own)


def compress(model: nn.Module, *, gradients: str = EXACT, weights: str = EXACT) -> Compression:
    """Let the FSDP2 modules of `model` send gradients and weights in fewer bits.

    Args:
        model: with `fully_shard` applied.
        gradients: exact, exact-via-all-to-all, bf16, int8, int4, or loco4 (4 bits with error feedback).
        weights: exact, bf16 or int8, in which they are gathered; masters stay as they are.

    Raises:
        ConfigError: a name that there is not.
        LayoutError: there is no FSDP2 module in `model`.
    """
    check_name(gradients, [EXACT, *GRADIENTS], "gradients")
    check_name(weights, [EXACT, *WEIGHTS], "weights")
    modules = {name or "root": module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise LayoutError(
            "the model has no FSDP2 module",
            where="meshwright.comm.compress",
            rule="what is compressed are FSDP2's collectives",
            fix="torch.distributed.fsdp.fully_shard(model) first",
        )
    reduce_scatters, all_gathers = {}, {}
    for name, module in modules.items():
        if gradients != EXACT:
            way = GRADIENTS[gradients]
            comm = CompressedReduceScatter(name, way.codec, rotate=way.rotate, feedback=way.feedback)
            reduce_scatters[name] = comm
            module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
        if weights != EXACT:
            all_gathers[name] = CompressedAllGather(WEIGHTS[weights], rotate=WEIGHTS[weights].is_quantised)
            module.set_custom_all_gather(all_gathers[name])  # type: ignore[arg-type]
    return Compression(reduce_scatters, all_gathers)


def check_name(name: str, known: list[str], what: str) -> None:
    """Refuse a way of sending `what` that there is not.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"{what} cannot be sent as {name!r}",
            where=f"compressed {what}",
            rule=f"{what} is one of {', '.join(known)}",
            fix=f"{what}={near[0]!r}",
        )
