"""KV write and rotary embedding as NumPy loops in float64; shares no code with the package.

Attention's oracle is `jaxrunner.checks.attention_oracle`, since users can judge their own attention by it.
"""

from __future__ import annotations

import numpy as np


def kv_write(blocks, layer, k, v, slot_mapping) -> np.ndarray:
    """A copy of blocks with the rows of k and v at their slots; negative slots are skipped."""
    out = np.array(blocks)
    block_size = blocks.shape[3]
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            out[layer, 0, slot // block_size, slot % block_size] = k[token]
            out[layer, 1, slot // block_size, slot % block_size] = v[token]
    return out


def rms_norm(x, weight, eps) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def rope(x, cos, sin) -> np.ndarray:
    """Rotation of the pairs (i, i + D/2) of each head; cos, sin: [T, D/2]."""
    x, cos, sin = (np.asarray(a, np.float64) for a in (x, cos, sin))
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    for i in range(half):
        a, b = x[..., i], x[..., i + half]
        c, s = cos[:, i, None], sin[:, i, None]
        out[..., i], out[..., i + half] = a * c - b * s, a * s + b * c
    return out
