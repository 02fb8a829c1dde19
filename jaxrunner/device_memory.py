"""What a device says about its memory, and giving the host's back."""

from __future__ import annotations

import contextlib
import ctypes

import jax


def free_device_bytes(device: jax.Device | None = None) -> int | None:
    """Bytes this process may still allocate on `device` (the first one by default), or None where the backend does not
    say (the CPU)."""
    stats = (device or jax.devices()[0]).memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def return_freed_memory() -> None:
    """Give the C library's free memory back to the system, where it can (glibc).

    Compiling an unrolled model for the CPU takes hundreds of megabytes for a moment, which glibc would keep.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
