"""Threefry-2x32 and the Gumbel draws made of it, in NumPy, from the published algorithm (Salmon et al., SC'11)."""

from __future__ import annotations

import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
TINY = np.finfo(np.float32).tiny


def threefry2x32(key, x0, x1):
    """20 rounds. key: two words; x0, x1: counters, any shape. Two words of the same shape."""
    k0, k1 = np.uint32(key[0]), np.uint32(key[1])
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):
        x0, x1 = np.uint32(x0) + k0, np.uint32(x1) + k1
        for i in range(5):
            for r in ROTATIONS[i % 2]:
                x0 = x0 + x1
                x1 = (x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))
                x1 = x1 ^ x0
            x0 = x0 + schedule[(i + 1) % 3]
            x1 = x1 + schedule[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1


def fold_in(key, number: int):
    """The key that `number` makes of `key`."""
    return threefry2x32(key, np.uint32(0), np.uint32(number & 0xFFFFFFFF))


def row_key(seed: int, position: int, stream: int = 0):
    """Key of one draw: 64-bit seed (high word first), folded with the position, then with the stream."""
    seed &= 2**64 - 1
    return fold_in(fold_in((seed >> 32, seed & 0xFFFFFFFF), position), stream)


def bits(key, count: int) -> np.ndarray:
    """u32[count]: entry i depends on the key and on i alone."""
    x0, x1 = threefry2x32(key, np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32))
    return x0 ^ x1


def gumbel(key, count: int) -> np.ndarray:
    """f64[count] of standard Gumbel noise from 23 random bits each."""
    uniform = ((bits(key, count) >> np.uint32(9)) | np.uint32(0x3F800000)).view(np.float32) - np.float32(1)
    return -np.log(-np.log(np.maximum(uniform, TINY).astype(np.float64)))
