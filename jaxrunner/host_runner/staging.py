"""`StagingRing`: the host buffers in which uploads are written, and the guard of their reuse.

A launch returns while the device still reads its upload, and on the CPU the "device" array may be this very memory: a
buffer rewritten then changes the inputs of a step that runs already. Each bucket has two buffers, used in turn, and a
buffer is handed out only when the step that read it last is over. With one step in flight that one is always over, so
the wait costs nothing. Source: the hazard is that of vLLM V1, whose `synchronize_input_prep` waits for an event.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrunner.state.codec import Layout

ALIGNMENT_BYTES = 64
"""What XLA asks of host memory that it reads where it lies."""


class StagingBuffer:
    """vector: the upload. parts: its sections, views to write into. num_reqs: rows of it that are not padding.

    reader: results of the step that reads it.
    """

    def __init__(self, layout: Layout):
        self.vector = aligned_zeros(layout.size)
        self.parts: dict[str, np.ndarray] = layout.unpack(self.vector)
        self.num_reqs = 0
        self.metadata: Any = None
        self.reader: Any = None


class StagingRing:
    """depth: buffers of each layout."""

    def __init__(self, depth: int = 2):
        self._depth = depth
        self._buffers: dict[Layout, list[StagingBuffer]] = {}

    def acquire(self, layout: Layout) -> StagingBuffer:
        """The buffer of this layout whose turn it is, when nothing reads it any more. It holds what it held."""
        buffers = self._buffers.setdefault(layout, [])
        if len(buffers) < self._depth:
            buffers.append(StagingBuffer(layout))
        else:
            buffers.append(buffers.pop(0))
        buffer = buffers[-1]
        jax.block_until_ready(buffer.reader)
        return buffer


def aligned_zeros(size: int) -> np.ndarray:
    """i32[size] that XLA need not copy."""
    memory = np.zeros(size * 4 + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size * 4].view(np.int32)
