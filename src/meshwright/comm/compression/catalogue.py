"""The catalogue of codecs and methods: what each is, how large what it sends is, and where it may be used.

A *codec* is the format of the elements in a block of bytes; `codecs` says what every bit is. A *method* is a name that
the configuration's section `comm` and `meshwright.comm.compress` take: a codec, and what is done around it. Planner,
configuration and collectives read them here, without torch.

[Note: adding a codec] A method with a codec that exists takes one row of `METHODS` here. A codec that does not exist
takes a member of `Codec` here first, and its bytes:

- `codecs.py`: `encode` and `_elements`, which reads a block. Quantised integers follow `Codec.bits`, tested with 8, 4
  and 2.
- `cpu_kernels.cpp` and `triton_programs.py`, which know 8, 4 and 2 bits; or `kernels.py`, whose `_kernels` and
  `requantise` say which codecs go to them: the quantised ones. Others go to the reference.

Either way the table of `docs/compression.md` gets a row and `docs/config.md` is printed anew (`meshwright presets
--keys`); tests compare both with this file, and the size of every method with what is encoded.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Literal

from meshwright.errors import ConfigError

GROUP = 128
"""Elements that share a scale."""
SCALE_BYTES = 2
ALIGNMENT = 16
"""Bytes that the size of a quantised block is a multiple of."""


class Codec(Enum):
    """How elements are written as bytes: the name, the bits of an element, and whether it is quantised."""

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
        """Whether elements become integers with a scale for each group."""
        return self._is_quantised

    @property
    def bits(self) -> int:
        """Bits of an element, of its code if it is quantised; `exact` has none of its own."""
        assert self._bits is not None, f"{self.value} sends elements as they are"
        return self._bits

    def encoded_bytes(self, num_elements: int, *, element_bytes: int = 4) -> int:
        """Bytes of the block of `num_elements` elements; `element_bytes`, those of one, matter to `exact` only."""
        if self is Codec.EXACT:
            return num_elements * element_bytes
        if not self.is_quantised:
            return num_elements * self.bits // 8
        used = num_groups(num_elements) * (GROUP * self.bits // 8 + SCALE_BYTES)
        return -(-used // ALIGNMENT) * ALIGNMENT


ERROR_CODEC = Codec.INT8
"""How the errors of error feedback are kept."""


class Use(StrEnum):
    """What a method is used for: a key of the configuration's section `comm`."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    INSIDE_NODE = "inside_node"
    """Gradients inside a node, where they are reduced in two stages; only the method's codec counts."""

    def words(self) -> str:
        """What is sent, for people."""
        return "gradients inside a node" if self is Use.INSIDE_NODE else self.value


@dataclass(frozen=True)
class Method:
    """How gradients or weights are sent."""

    name: str
    codec: Codec
    uses: tuple[Use, ...]
    rotate: bool = False
    """Outliers are spread over their neighbours before they are quantised."""
    feedback: bool = False
    """What the codec loses of gradients is added to those of the next step."""

    def __post_init__(self) -> None:
        assert self.codec.is_quantised or not (self.rotate or self.feedback), "what is not quantised needs neither"
        assert not (self.rotate and self.feedback), "feedback is of elements as they are"

    @property
    def is_lossy(self) -> bool:
        """Whether what arrives is not what was sent."""
        return self.codec is not Codec.EXACT

    @property
    def codec_of_sum(self) -> Codec:
        """The codec of the second stage of an all-reduce with this method."""
        return codec_of_sum(self.codec, feedback=self.feedback)

    def codec_inside_node(self, configured: Codec) -> Codec:
        """The codec of the first of two stages, where `comm.inside_node` is `configured`: what is exact stays so."""
        return configured if self.is_lossy else Codec.EXACT


EXACT = "exact"
"""The method that leaves the collectives of FSDP2 and DDP as they are."""

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
"""All methods, in the order in which they are listed for people; the last two are to see what feedback does."""


def names(use: Use) -> tuple[str, ...]:
    """The methods that there are for `use`."""
    return tuple(method.name for method in METHODS if use in method.uses)


def lossless_names(use: Use) -> tuple[str, ...]:
    """Those of them by which a run computes what it would without compression; the last is nearest to the others."""
    return tuple(method.name for method in METHODS if use in method.uses and not method.is_lossy)


def find_method(name: str, use: Use | None = None) -> Method:
    """The method of this name.

    Args:
        use: what it must be allowed for, if it is given.

    Raises:
        ConfigError: there is none of this name, or not for this use.
    """
    for method in METHODS:
        if method.name == name and (use is None or use in method.uses):
            return method
    raise _unknown(name, use)


def _unknown(name: str, use: Use | None) -> ConfigError:
    known = [method.name for method in METHODS if use is None or use in method.uses]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    what, argument = ("elements", "method") if use is None else (use.words(), use.value)
    return ConfigError(
        f"{what} cannot be sent as {name!r}",
        where=f"compressed {argument}",
        rule=f"{what} is one of {', '.join(known)}" if use else f"methods are {', '.join(known)}",
        fix=f"{argument}={near[0]!r}",
    )


def is_lossy(name: str) -> bool:
    """Whether what arrives by the method of this name is not what was sent."""
    return find_method(name).is_lossy


def encoded_bytes(name: str, num_elements: int, *, element_bytes: int) -> int:
    """Bytes of one block of `num_elements` elements, by the method of this name.

    Args:
        element_bytes: of an element as it is, which matters where nothing is lost.
    """
    return find_method(name).codec.encoded_bytes(num_elements, element_bytes=element_bytes)


def codec_of_sum(codec: Codec, *, feedback: bool) -> Codec:
    """The codec of the second stage of an all-reduce. [Note: the second encoding] in `all_reduce` says why."""
    return codec if feedback or not codec.is_quantised else Codec.INT8


def num_groups(num_elements: int) -> int:
    """Groups of `num_elements` elements, the last of which may be partial."""
    return -(-num_elements // GROUP)


if TYPE_CHECKING:
    GradientMethod = str
    WeightMethod = str
    InsideNodeMethod = str
else:
    # Type checkers take no computed Literal. Pydantic does, and lists the names in its errors.
    GradientMethod = Literal[names(Use.GRADIENTS)]
    WeightMethod = Literal[names(Use.WEIGHTS)]
    InsideNodeMethod = Literal[names(Use.INSIDE_NODE)]
