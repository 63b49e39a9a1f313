"""Compressed gradients and weights for any model under FSDP2, without the rest of Meshwright."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.codecs import Codec
from meshwright.comm.compressed import CompressedAllGather, CompressedReduceScatter, SentBytes
from meshwright.errors import ConfigError, LayoutError


@dataclass(frozen=True)
class _Way:
    """How gradients are sent."""

    codec: Codec
    feedback: bool = False
    rotate: bool = False


EXACT = "exact"
GRADIENTS = {
    "exact-via-all-to-all": _Way(Codec.EXACT),
    "bf16": _Way(Codec.BF16),
    "int8": _Way(Codec.INT8, rotate=True),
    "int4": _Way(Codec.INT4, rotate=True),
    "loco4": _Way(Codec.INT4, feedback=True),
    "int2": _Way(Codec.INT2, rotate=True),
    "loco2": _Way(Codec.INT2, feedback=True),
}
"""Ways of gradients by name, besides `exact`, which is FSDP2's own; the last two are to see what feedback does."""
WEIGHTS = {"bf16": Codec.BF16, "int8": Codec.INT8}


class Compression:
    """The compressed collectives of a model. A training says after every step whether it was taken."""

    def __init__(
        self, reduce_scatters: Mapping[str, CompressedReduceScatter], all_gathers: Mapping[str, CompressedAllGather]
    ) -> None:
        self._reduce_scatters, self._all_gathers = reduce_scatters, all_gathers

    def commit(self) -> None:
        """The optimizer has taken the step: its errors are carried into the next."""
        for comm in self._reduce_scatters.values():
            if comm.error is not None:
                comm.error.commit()

    def discard(self) -> None:
        """The step is skipped, for an overflow: its errors are forgotten."""
        for comm in self._reduce_scatters.values():
            if comm.error is not None:
                comm.error.discard()

    def sent(self) -> SentBytes:
        """Bytes that this rank has handed to others since the start."""
        counts = [comm.sent for comm in self._reduce_scatters.values()]
        counts += [comm.sent for comm in self._all_gathers.values()]
        return SentBytes(sum(count.payload for count in counts), sum(count.exact for count in counts))

    def state_dict(self) -> dict[str, Tensor]:
        """The errors of this rank, which no other rank has."""
        return {
            f"{name}.{key}": value
            for name, comm in self._reduce_scatters.items()
            if comm.error is not None
            for key, value in comm.error.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state of this rank; a module that it doesn't have starts from zero."""
        for name, comm in self._reduce_scatters.items():
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            if own:
                comm.load(own)


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
    _check(gradients, [EXACT, *GRADIENTS], "gradients")
    _check(weights, [EXACT, *WEIGHTS], "weights")
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


def _check(name: str, known: list[str], what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"{what} cannot be sent as {name!r}",
            where=f"meshwright.comm.compress, {what}",
            rule=f"{what} is one of {', '.join(known)}",
            fix=f"{what}={near[0]!r}",
        )
