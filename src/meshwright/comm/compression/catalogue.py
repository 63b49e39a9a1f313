"""Catalogue of compression codecs and methods, with their encoded sizes and permitted uses.

A *codec* encodes tensor elements as a block of bytes; `codecs` specifies the format bit by bit. A *method* is a codec
with or without rotation and error feedback; the configuration's `comm` section and `meshwright.comm.compress` accept
its name. The planner, the configuration and the collectives all use this file, which does not import torch.

[Note: adding a codec] A method that encodes as others do, with a codec and flags that there are, only needs a row in
`METHODS`. A new codec also needs a member of `Codec` and an implementation:

- `codecs.py`: `encode`, and `_elements` for decoding. Quantised codecs are generic in `Codec.bits`, tested with 8, 4
  and 2.
- `cpu_kernels.cpp` and `triton_kernels.py`, which implement 8, 4 and 2 bits; `dispatch.py` sends quantised codecs to
  them (`_kernels`, `requantise`) and others to the torch reference.

Another way of rounding, or something kept between steps, is a flag of `Method`, as `rotate` and `feedback` are:

- `fsdp_collectives.py`: reductions take the method and encode by its flags. What they keep between steps is a part
  (`ErrorFeedback.parts`), which checkpoints save, and which starts from zero on another layout: runs say so of error
  feedback only (`features/compression/run.py`). `plan/memory.py` counts its bytes.
- `prove/as_run/rounding.py`: a proof of a run in its own precision has a quantiser of its own, which must know
  the rounding. If it doesn't, right runs are NOT PROVED.

In all cases, add a row to the table in `docs/compression.md` and regenerate `docs/config.md` (`meshwright presets
--keys`). Tests check both files against this one, and the size of every method against an encoded block.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Literal

from meshwright.errors import ConfigError

GROUP = 128
SCALE_BYTES = 2
ALIGNMENT = 16
"""Bytes that the size of a quantised block is a multiple of."""


class Codec(Enum):
    """Encoding of elements as bytes, defined by name, bits per element and a flag for quantised codecs."""

    _value_: str
    _bits: int | None
    _is_quantised: bool

    EXACT = "exact", None, False
    BF16 = "bf16", 16, False
    INT8 = "int8", 8, True
    INT4 = "int4", 4, True
    INT2 = "int2", 2, True

    def __new__(cls, name: str, bits: int | None, is_quantised: bool) -> Codec:
        member = object.__new__(cls)
        member._value_, member._bits, member._is_quantised = name, bits, is_quantised
        return member

    @property
    def is_quantised(self) -> bool:
        """True if elements are integers with one scale per group."""
        return self._is_quantised

    @property
    def bits(self) -> int:
        """Bits per element, or per code if quantised; undefined for `exact`."""
        assert self._bits is not None, f"{self.value} sends elements as they are"
        return self._bits

    def encoded_bytes(self, num_elements: int, *, element_bytes: int = 4) -> int:
        """Return the size in bytes of a block of `num_elements` elements; only `exact` uses `element_bytes`."""
        if self is Codec.EXACT:
            return num_elements * element_bytes
        if not self.is_quantised:
            return num_elements * self.bits // 8
        used = num_groups(num_elements) * (GROUP * self.bits // 8 + SCALE_BYTES)
        return -(-used // ALIGNMENT) * ALIGNMENT


ERROR_CODEC = Codec.INT8
"""Codec of the error that error feedback stores between steps."""


class Use(StrEnum):
    """Use of a compression method, which is also a key of the configuration's `comm` section."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    INSIDE_NODE = "inside_node"
    """Gradients inside a node in a two-stage reduction; only the method's codec is used."""

    def describe(self) -> str:
        return "gradients inside a node" if self is Use.INSIDE_NODE else self.value


@dataclass(frozen=True)
class Method:
    """Compression method of gradients or weights."""

    name: str
    codec: Codec
    uses: tuple[Use, ...]
    rotate: bool = False
    """Spread outliers over their neighbours before quantising."""
    feedback: bool = False
    """Add each step's quantisation error to the next step's gradients."""

    def __post_init__(self) -> None:
        assert self.codec.is_quantised or not (self.rotate or self.feedback), (
            "rotation and feedback need a quantised codec"
        )
        assert not (self.rotate and self.feedback), "feedback applies to unrotated elements"

    @property
    def is_lossy(self) -> bool:
        return self.codec is not Codec.EXACT

    @property
    def codec_of_sum(self) -> Codec:
        """Codec of the sum in an all-reduce, which is encoded again."""
        return self.codec if self.feedback or not self.codec.is_quantised else Codec.INT8

    def codec_inside_node(self, configured: Codec) -> Codec:
        """Return the first stage's codec, given the codec of `comm.inside_node`; exact methods stay exact."""
        return configured if self.is_lossy else Codec.EXACT


EXACT = "exact"
"""Name of the method that leaves the collectives of FSDP2 and DDP unchanged."""

METHODS = (
    Method(EXACT, Codec.EXACT, (Use.GRADIENTS, Use.WEIGHTS, Use.INSIDE_NODE)),
    Method("exact-via-all-to-all", Codec.EXACT, (Use.GRADIENTS,)),
    Method("bf16", Codec.BF16, (Use.GRADIENTS, Use.WEIGHTS, Use.INSIDE_NODE)),
    Method("int8", Codec.INT8, (Use.GRADIENTS, Use.WEIGHTS, Use.INSIDE_NODE), rotate=True),
    Method("int4", Codec.INT4, (Use.GRADIENTS, Use.INSIDE_NODE), rotate=True),
    Method("loco4", Codec.INT4, (Use.GRADIENTS,), feedback=True),
    Method("int2", Codec.INT2, (Use.GRADIENTS,)),
    Method("loco2", Codec.INT2, (Use.GRADIENTS,), feedback=True),
)
"""All methods, in listing order; the two 2-bit methods exist for experiments with error feedback."""


def names(use: Use) -> tuple[str, ...]:
    return tuple(method.name for method in METHODS if use in method.uses)


def lossless_names(use: Use) -> tuple[str, ...]:
    """Return the names of the lossless methods for `use`; the last one shares the most code with the lossy ones."""
    return tuple(method.name for method in METHODS if use in method.uses and not method.is_lossy)


def find_method(name: str, use: Use | None = None) -> Method:
    """Return the method called `name`.

    Args:
        use: if given, a use that the method must support.

    Raises:
        ConfigError: the name is unknown, or its method does not support `use`.
    """
    for method in METHODS:
        if method.name == name and (use is None or use in method.uses):
            return method
    known = [method.name for method in METHODS if use is None or use in method.uses]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    what, argument = ("elements", "method") if use is None else (use.describe(), use.value)
    raise ConfigError(
        f"{what} cannot be sent as {name!r}",
        where=f"compressed {argument}",
        rule=f"methods{f' for {what}' if use else ''} are {', '.join(known)}",
        fix=f"{argument}={near[0]!r}",
    )


def is_lossy(name: str) -> bool:
    return find_method(name).is_lossy


def encoded_bytes(name: str, num_elements: int, *, element_bytes: int) -> int:
    """Return the size in bytes of a block of `num_elements` elements with the method called `name`.

    Args:
        element_bytes: size in bytes of an uncompressed element; used by lossless methods only.
    """
    return find_method(name).codec.encoded_bytes(num_elements, element_bytes=element_bytes)


def num_groups(num_elements: int) -> int:
    """Return the number of groups in `num_elements` elements; the last may be partial."""
    return -(-num_elements // GROUP)


if TYPE_CHECKING:
    GradientMethod = str
    WeightMethod = str
    InsideNodeMethod = str
else:
    # Type checkers reject a computed Literal; Pydantic accepts it, and lists the names in its errors.
    GradientMethod = Literal[names(Use.GRADIENTS)]
    WeightMethod = Literal[names(Use.WEIGHTS)]
    InsideNodeMethod = Literal[names(Use.INSIDE_NODE)]
