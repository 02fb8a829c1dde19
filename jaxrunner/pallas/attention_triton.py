"""Paged attention as Triton kernels, for NVIDIA GPUs of compute capability 8.0 or newer, through jax-triton.

One kernel serves uniform decodes, whose keys are split over programs and combined by a second kernel, and ragged
batches. It needs the extra `jaxrunner[triton]`. Unlike the Mosaic kernels it also takes float32, any block size and any
head size up to 256.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.pallas import implementation, triton_compat
from jaxrunner.pallas.attention_metadata import AttentionMetadata

KERNELS = "jaxrunner.pallas.attention_triton_kernels"
MAX_SPLITS = 32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """rows: of a matrix tile. tile_kv: keys in it. warps, stages: of a program; a stage is a tile of keys in flight."""

    rows: int
    tile_kv: int
    warps: int
    stages: int


def attention_triton(
    q: jax.Array,
    blocks: jax.Array,
    layer: jax.Array,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    num_splits: int | None = None,
    sizes: Sizes | None = None,
) -> jax.Array:
    """See `jaxrunner.pallas.attention.attention`.

    num_splits: shares of a request's keys in a uniform decode; None for as many as fill the GPU. sizes: of the tiles.

    Raises ImplementationError where the kernels cannot run or take this call.
    """
    refuse(q, blocks, soft_cap)
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_blocks, block_size, num_kv_heads, _ = blocks.shape
    num_reqs, width = metadata.block_table.shape
    query_len, group = metadata.query_len, num_heads // num_kv_heads
    sizes = sizes or default_sizes(q.dtype, head_dim, group, query_len, small=triton_compat.small_shared_memory())
    head_tiles = -(-group // sizes.rows)
    heads = -(-group // head_tiles)
    tokens = min(sizes.rows // heads, query_len or num_tokens)
    if query_len is None:
        tiles, splits = num_tokens // tokens + num_reqs + 1, 1
    else:
        tiles = num_reqs * -(-query_len // tokens)
        splits = num_splits or default_splits(
            tiles * num_kv_heads * head_tiles, -(-width * block_size // sizes.tile_kv)
        )
    shape = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "COLUMNS": _power_of_two(head_dim)}
    sink_logits = jnp.zeros(1, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    split_dtype = q.dtype if splits == 1 else jnp.float32
    split_shape = (num_tokens, num_heads, splits)
    out, lse = triton_compat.call(
        KERNELS,
        "attend",
        q,
        blocks,
        jnp.reshape(layer, 1).astype(jnp.int32),
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        sink_logits,
        out=(
            jax.ShapeDtypeStruct((*split_shape, head_dim), split_dtype),
            jax.ShapeDtypeStruct(split_shape if splits > 1 else (1,), jnp.float32),
        ),
        grid=(tiles * num_kv_heads * head_tiles, splits),
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        SCALE=float(scale),
        SOFT_CAP=float(soft_cap or 0.0),
        WINDOW=window or 0,
        HAS_SINKS=sinks is not None,
        QUERY_LEN=query_len or 0,
        NUM_TOKENS=num_tokens,
        NUM_REQS=num_reqs,
        WIDTH=width,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEADS=heads,
        HEAD_TILES=head_tiles,
        TOKENS=tokens,
        BLOCK_SIZE=block_size,
        NUM_BLOCKS=num_blocks,
        ROWS=sizes.rows,
        TILE_KV=sizes.tile_kv,
        SPLITS=splits,
        STAGES=sizes.stages,
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",  # of products of float32 alone
        **shape,
    )
    if splits == 1:
        return out.reshape(q.shape)
    (combined,) = triton_compat.call(
        KERNELS,
        "combine",
        out,
        lse,
        sink_logits,
        out=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        grid=(num_tokens * num_heads,),
        num_warps=2,
        num_stages=1,
        HAS_SINKS=sinks is not None,
        SPLITS=splits,
        SPLITS_PADDED=_power_of_two(splits),
        **shape,
    )
    return combined


def reason_against(q: Any, blocks: Any, soft_cap: float | None) -> str | None:
    """Why the kernels cannot take this call on any machine, or None."""
    if blocks.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or q.dtype != blocks.dtype:
        return f"it needs queries and cache of one type, bfloat16, float16 or float32, not {q.dtype} and {blocks.dtype}"
    if blocks.shape[5] > 256:
        return f"it needs a head size of at most 256, not {blocks.shape[5]}"
    if soft_cap is not None and soft_cap <= 0:
        return f"it needs a positive soft cap, not {soft_cap}"
    return None


def refuse(q: Any, blocks: Any, soft_cap: float | None) -> None:
    """Raises ImplementationError with the reason where the kernels cannot run or take this call."""
    implementation.refuse("attention", "triton", triton_compat.refusal(), reason_against(q, blocks, soft_cap))


def default_sizes(dtype: Any, head_dim: int, group: int, query_len: int | None, *, small: bool) -> Sizes:
    """By type, head size, rows that share keys, and whether the GPU has `small` shared memory (about 100 KB)."""
    wide, single = head_dim > 128, jnp.dtype(dtype) == jnp.float32
    if single:  # without tensor cores
        return Sizes(16 if query_len or wide else 32, 32, 4, 1 if wide else 2)
    if query_len is None:
        return Sizes(64, 32 if small else 64, 4, 2) if wide else Sizes(128, 64, 8, 2 if small else 3)
    rows = min(max(16, _power_of_two(group * query_len)), 64)
    return Sizes(rows, 32 if wide else 64, 2 if rows == 16 else 4, 2 if small else 3)


def default_splits(programs: int, tiles_of_table: int) -> int:
    """Enough for two programs on each multiprocessor, each with two tiles of keys of the longest request or more."""
    wanted = round(2 * triton_compat.num_cores() / programs)
    return max(1, min(wanted, MAX_SPLITS, tiles_of_table // 2))


def _power_of_two(n: int) -> int:
    """The smallest that is at least n, and at least the 16 of a matrix product."""
    return max(16, 1 << (n - 1).bit_length())
