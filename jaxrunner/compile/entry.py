"""An executable as a runner holds it: what it took to make it, what it needs, and what it was used for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxrunner.compile.programs import Program


@dataclasses.dataclass
class Entry:
    """Seconds to trace, lower and compile it, or to load it from the cache; bytes of its code, of its temporaries and
    of those outputs that are no donated argument; and its use so far."""

    program: Program
    compiled: Any
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    code_bytes: int = 0
    temp_bytes: int = 0
    output_bytes: int = 0
    hits: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0

    @property
    def waste(self) -> float:
        """Part of the tokens it ran that were padding."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def row(self) -> dict[str, Any]:
        """Everything but the executable, by the names of the columns of `BucketTable.stats`."""
        return {
            "executable": str(self.program),
            "trace_s": self.trace_seconds,
            "lower_s": self.lower_seconds,
            "compile_s": self.compile_seconds,
            "load_s": self.load_seconds,
            "code_bytes": self.code_bytes,
            "temp_bytes": self.temp_bytes,
            "hits": self.hits,
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "waste": self.waste,
        }


def memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The bytes of an `Entry`, 0 where the backend does not say."""
    analysis = compiled.memory_analysis()

    def size(name: str) -> int:
        return int(getattr(analysis, f"{name}_size_in_bytes", 0) or 0)

    outputs = max(0, size("output") - size("alias"))
    return {"code_bytes": size("generated_code"), "temp_bytes": size("temp"), "output_bytes": outputs}
