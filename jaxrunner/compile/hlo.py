"""What a compiled program holds, read from its optimized HLO text: its Mosaic kernels, and the large arrays it makes.

text = jax.jit(f).lower(...).compile().as_text()
mosaic_kernels(text)  # {"input_prep_kernel": 1, "attention_with_rope": 32, ...}
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

KERNELS_OF_OP: dict[str, tuple[str, ...]] = {
    "input_prep": ("input_prep_kernel",),
    "rope_kv_write": ("rope_kv_write", "attention_with_rope"),
    "attention": ("attention_decode", "attention_prefill", "attention_with_rope"),
    "commit": ("commit_rows",),
}
"""The ops of a step and the Mosaic kernels that do them."""

_TARGET = 'custom_call_target="mosaic_gpu'
_TRITON = 'custom_call_target="triton_kernel_call'
"""Of jax-triton, which only attention calls; XLA's own Triton products are fusions."""
_IN_PLACE = (
    "parameter",
    "bitcast",
    "get-tuple-element",
    "tuple",
    "while",
    "call",
    "conditional",
    "optimization-barrier",
)
"""Opcodes whose result is another instruction's array under a new name."""
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One line outside of the fused computations: what it makes is in memory. arrays: (dtype, shape) of its results."""

    name: str
    opcode: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    line: str


def mosaic_kernels(text: str) -> Counter[str]:
    """Mosaic GPU kernel -> its calls in the program's text. A call in the body of a loop counts once."""
    return Counter(_kernel_name(line) for line in text.splitlines() if _TARGET in line)


def implementations(text: str) -> dict[str, str]:
    """Op -> `"mosaic"` if one of its kernels is in the program, else `"xla"`; attention may be `"triton"` as well."""
    held = mosaic_kernels(text)
    found = {op: "mosaic" if any(held[k] for k in kernels) else "xla" for op, kernels in KERNELS_OF_OP.items()}
    if found["attention"] == "xla" and _TRITON in text:
        found["attention"] = "triton"
    return found


def made_arrays(text: str, sizes: Iterable[int]) -> list[Instruction]:
    """Instructions that write an array of one of `sizes` elements into new memory, whatever its shape and type.

    A kernel that aliases its result to an operand, a loop or a tuple makes nothing new; a copy, a transposition, a
    conversion, a slice or a fusion that ends in one does.
    """
    wanted = set(sizes)
    return [
        instruction
        for instruction in instructions(text)
        if instruction.opcode not in _IN_PLACE
        and "output_to_operand_aliasing" not in instruction.line
        and any(math.prod(shape) in wanted for _, shape in instruction.arrays)
    ]


def instructions(text: str) -> Iterator[Instruction]:
    """Every instruction outside of the fused computations."""
    fused = set(re.findall(r" fusion(?:-start)?\(.*?\bcalls=%?([\w.-]+)", text))
    inside = None
    for line in text.splitlines():
        if line and not line[0].isspace():
            inside = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0].split("(")[0]
        elif inside not in fused and (match := _INSTRUCTION.match(line)):
            name, result, opcode = match.groups()
            arrays = tuple((d, tuple(int(n) for n in s.split(",") if n)) for d, s in _ARRAY.findall(result))
            yield Instruction(name, opcode, arrays, line)


def _kernel_name(line: str) -> str:
    """Pallas traces a kernel under its function's name: op_name is ".../attention_decode/mpmd_map"."""
    if match := re.search(r'op_name="[^"]*?([^"/]+)/[^"/]+"', line):
        return match[1]
    match = re.search(r"(\w+)_mosaic_gpu\b", line)
    return match[1] if match else "unnamed"
