"""Host memory for weights that the CPU backend uses where they lie: aligned for XLA, and in huge pages.

A decode step on a CPU reads every weight once and little else, so it runs at the speed of memory; with pages of 4 KB
some of that goes into looking up addresses.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

ALIGNMENT = 64
"""Bytes; JAX's CPU backend takes an array over without a copy only if it begins at a multiple of this."""
HUGE_PAGE = 2 << 20


class HostBuffers:
    """Uninitialised arrays, one after the other out of one private mapping, which lives as long as any of them.

    shapes: of all arrays that will be asked for. Where the system has no huge pages to give, ordinary ones are used.
    """

    def __init__(self, shapes: Iterable[tuple[int, ...]], dtype: Any):
        self._dtype = np.dtype(dtype)
        self._used = 0
        total = sum(self._span(shape) for shape in shapes)
        # Whole huge pages between its ends: the kernel may place the mapping anywhere.
        mapping = mmap.mmap(-1, max(total, 1) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapping, np.uint8)
        start = -memory.ctypes.data % HUGE_PAGE
        self._memory = memory[start : start + total]

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next array. Fill it, give it to `jax.device_put(..., may_alias=True)`, and never write to it again."""
        start, size = self._used, self._size(shape)
        self._used += self._span(shape)
        if self._used > self._memory.size:
            raise ValueError(f"an array of shape {shape} was not announced")
        return self._memory[start : start + size].view(self._dtype).reshape(shape)

    def _size(self, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize

    def _span(self, shape: tuple[int, ...]) -> int:
        return -(-self._size(shape) // ALIGNMENT) * ALIGNMENT


def host_buffers_help() -> bool:
    """Whether weights are best built here: on a CPU, of a system whose mappings can be private."""
    return jax.default_backend() == "cpu" and hasattr(mmap, "MAP_PRIVATE")
