"""The paged KV cache: one array per KV-cache group over layers, keys/values and blocks.

It is donated from step to step and written in place. It is indexed by (layer, k or v, block, offset), never through
one flat index, so that it may hold more than 2^31 elements; a slot number (block * block_size + offset) is int32 and
`init_state` refuses a cache in which it would not fit.
"""

from __future__ import annotations

import jax
from flax import struct

KEY, VALUE = 0, 1


class KVCache(struct.PyTreeNode):
    """blocks: per group [layers of the group, 2, num_blocks, block_size, num_kv_heads, head_dim].
    An fp8 cache holds the bytes of float8_e4m3fn as uint8 (see `kv_dtype.FLOAT8_BYTES`; `from_bytes` reads them).
    scales: of an fp8 cache f32[layers of the group, 2] per group, see `kv_scales`; empty for any other type.
    """

    blocks: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))
