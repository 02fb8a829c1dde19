"""What attention needs to know about a step, once per KV-cache group."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct


class AttentionMetadata(struct.PyTreeNode):
    """What attention of one KV-cache group needs. Built once a step, shared by every layer of the group.

    query_start_loc: i32[B + 1]. seq_lens: i32[B]. num_reqs: i32 scalar. block_table: i32[B, W].
    slot_mapping: i32[T]. query_len: tokens of each request in a uniform decode, None for a ragged batch (static).
    counters: a mutable i32[>= T * H] of zeros, which kernels leave as they found them, see `attention_combine_mosaic`.
    Where it is None, each kernel that needs them has them made, by one more kernel.
    """

    query_start_loc: jax.Array
    seq_lens: jax.Array
    num_reqs: jax.Array
    block_table: jax.Array
    slot_mapping: jax.Array
    counters: Any = None
    query_len: int | None = struct.field(pytree_node=False, default=None)
