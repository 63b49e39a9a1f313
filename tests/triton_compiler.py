"""Triton programs compiled for a GPU on a machine without one: their code, and what it executes. Triton-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

SM_90 = ("cuda", 90, 32)
"""H100 and H200."""
COUNTED = re.compile(r"^\S+\t(?:@!?U?P\w+ )?(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Code:
    """A compiled program: PTX, machine code, and Triton's last intermediate form that still has layouts."""

    ptx: str
    sass: str
    layouts: str

    @property
    def straight(self) -> str:
        """The machine code without the rare paths behind its end, such as a division's of subnormal numbers."""
        return re.split(r"\tEXIT;", self.sass)[0]

    def instructions(self, *, trips: int = 1) -> int:
        """Count what a thread executes, with `trips` of the one loop that there may be."""
        body = re.search(r"^(LBB\d+):\n(.*\tBRA \1;)", self.straight, re.MULTILINE | re.DOTALL)
        once = len(_counted(self.straight))
        return once if body is None else once + (trips - 1) * len(_counted(body[2]))

    def spills(self) -> bool:
        """Return whether registers are kept in memory."""
        return bool({"LDL", "STL"} & set(_counted(self.sass)))

    def changed_layouts(self) -> list[str]:
        """Tensors that threads exchange through shared memory, by shape and type."""
        lines = (line for line in self.layouts.splitlines() if "convert_layout" in line)
        return [re.search(r"tensor<([^,>]*)", line)[1] for line in lines]


def _counted(sass):
    return [name for name in COUNTED.findall(sass) if name != "NOP"]


def compile_without_gpu(
    program, constants: Mapping[str, object], types: Mapping[str, str], options: Mapping[str, object], *, cache: str,
    aligned: tuple[str, ...] = (),
) -> Code:  # fmt: skip
    """Compile for an H100, in a process that doesn't interpret.

    Args:
        types: of the arguments that are not constants, as in Triton's signatures.
        aligned: numbers that are multiples of 16, as all pointers are.
        cache: folder of the results.
    """
    os.environ["TRITON_CACHE_DIR"] = cache
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = program.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    divisible = [i for i, name in enumerate(names) if signature[name][0] == "*" or name in aligned]
    source = ASTSource(
        program, signature=signature,
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )  # fmt: skip
    code = triton.compile(source, target=GPUTarget(*SM_90), options=dict(options))
    return Code(code.asm["ptx"], code.asm["sass"], code.asm["ttgir"])
