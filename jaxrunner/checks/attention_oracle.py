"""Paged attention as NumPy loops in float64; shares no code with the implementations it judges."""

from __future__ import annotations

import numpy as np


def attention(
    q, blocks, layer, block_table, seq_lens, query_lens, *, scale, window=None, soft_cap=None, sinks=None
) -> np.ndarray:
    """float64[T, H, D]. query_lens: of the live requests, whose tokens lie one after the other; other rows are zero.

    blocks: [L, 2, N, P, KVH, D]. A query at position p sees the keys max(0, p - window + 1) .. p of its request.
    """
    q = np.asarray(q, np.float64)
    block_size, num_kv_heads = blocks.shape[3:5]
    group = q.shape[1] // num_kv_heads
    out = np.zeros(q.shape)
    start = 0
    for b, query_len in enumerate(query_lens):
        seq_len = int(seq_lens[b])
        used = block_table[b, : -(-seq_len // block_size)]
        keys, values = (
            np.asarray(blocks[layer, which, used], np.float64).reshape(-1, num_kv_heads, q.shape[2])[:seq_len]
            for which in (0, 1)
        )
        for i in range(query_len):
            position = seq_len - query_len + i
            first = 0 if window is None else max(0, position - window + 1)
            if position < 0:
                continue
            for head in range(q.shape[1]):
                k, v = (x[first : position + 1, head // group] for x in (keys, values))
                scores = k @ q[start + i, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                top = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
                p = np.exp(scores - top)
                total = p.sum() + (0.0 if sinks is None else np.exp(float(sinks[head]) - top))
                out[start + i, head] = p @ v / total
        start += query_len
    return out
