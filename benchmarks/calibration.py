"""How fast this CPU is right now: a fixed loop of pure Python, run before and after whatever the host bounds.

The peer's figures come from a machine whose CPU has two speeds and switches within seconds: the loop took 2.8 to 3.0 ms
there, or 5 to 6. Only figures whose calibrations agree may be compared.
"""

from __future__ import annotations

import time
from typing import Literal

ROUNDS = 40_000
FAST_MS, SLOW_MS = 3.4, 4.6
"""Below the first the CPU is fast, above the second slow: the peer report's bounds."""


def calibrate() -> float:
    """Milliseconds of ROUNDS rounds of an addition, two masks and a store into a dictionary."""
    started = time.perf_counter()
    total, table = 0, {}
    for i in range(ROUNDS):
        total += i & 7
        table[i & 255] = total
    return (time.perf_counter() - started) * 1e3


def speed(before: float, after: float) -> Literal["fast", "slow", "mixed"]:
    """What a turn between two calibrations was run at."""
    if max(before, after) < FAST_MS:
        return "fast"
    return "slow" if min(before, after) > SLOW_MS else "mixed"
