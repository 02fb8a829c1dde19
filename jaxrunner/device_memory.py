"""What a device says about its memory."""

from __future__ import annotations

import jax


def free_device_bytes(device: jax.Device | None = None) -> int | None:
    """Bytes this process may still allocate on `device` (the first one by default), or None where the backend does not
    say (the CPU)."""
    stats = (device or jax.devices()[0]).memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
