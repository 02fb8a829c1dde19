"""What the decode and the prefill kernel of attention share: shapes, refusals, how rows and pages move.

Queries of one request that share a KV head are the rows of one matrix tile: token-major, the `group` heads of a token
next to each other. Grouped heads so read their keys once, and a tile may begin at any token: its rows are loaded and
stored token by token, so nothing is gathered, padded or masked in memory.

Keys and values arrive by the copy engine as pages, the greatest common divisor of a tile and a block, from the cache
seen as [layers * 2 * blocks * pages of a block, page, KVH, D]: an index into its first axis stays small however many
elements the cache has. Pages outside a request, or older than its window, are replaced by a live one, so that nothing
in dead blocks enters a tile.

The tensor core takes no float8 beside types of 16 bits. Tiles of a float8 cache are widened on their way, to float16,
which holds each of its values; queries and probabilities are float16 then too, and the scales of keys and of values
multiply scores and results in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat, implementation
from jaxrunner.state.kv_cache import VALUE
from jaxrunner.state.kv_dtype import FLOAT8_BYTES, from_bytes, is_float8

TILE_ROWS = 64
"""Rows of the tensor core's matrix tile."""
LOG2E = math.log2(math.e)
NEG_INF = float("-inf")
DTYPES = (jnp.bfloat16, jnp.float16)
FLOAT16_MAX = 65504.0
WIDENED_ROWS = 32
"""Rows of a float8 tile that are in registers at once."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call; see `attention`."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @property
    def factor(self) -> float:
        """What `Options.capped` leaves to multiply, so that exp2 is the softmax's exponential."""
        return self.scale * LOG2E if self.soft_cap is None else self.soft_cap * LOG2E

    def capped(self, scores: jax.Array) -> jax.Array:
        return scores if self.soft_cap is None else jnp.tanh(scores * (self.scale / self.soft_cap))


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Static sizes and types of a call. A row tile holds `tokens` tokens x `heads` heads of one KV head's group.

    cache_dtype: of the pages. q_dtype: of queries and result.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    tile_kv: int
    cache_dtype: Any
    q_dtype: Any

    @property
    def float8(self) -> bool:
        return self.cache_dtype == FLOAT8_BYTES

    @property
    def dtype(self) -> Any:
        """What the tensor core multiplies."""
        return jnp.dtype(jnp.float16) if self.float8 else self.cache_dtype

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @functools.cached_property
    def heads(self) -> int:
        return next(n for n in range(min(self.group, TILE_ROWS), 0, -1) if self.group % n == 0)

    @property
    def head_tiles(self) -> int:
        """Row tiles over the heads of a group: 1 unless it has more heads than a tile has rows."""
        return self.group // self.heads

    @property
    def tokens(self) -> int:
        return TILE_ROWS // self.heads

    @property
    def page(self) -> int:
        return math.gcd(self.block_size, self.tile_kv)

    @property
    def pages_of_tile(self) -> int:
        return self.tile_kv // self.page

    @property
    def columns(self) -> int:
        """Columns of a row that are staged at once."""
        return 64 if self.head_dim % 64 == 0 else self.head_dim

    def queries(self, q: jax.Array) -> jax.Array:
        """[T, H, D] -> [T, KVH * head_tiles, heads, D]."""
        return q.reshape(q.shape[0], self.num_kv_heads * self.head_tiles, self.heads, self.head_dim)

    def pages(self, blocks: jax.Array) -> jax.Array:
        """The cache as [L * 2 * N * pages of a block, page, KVH, D]."""
        return blocks.reshape(-1, self.page, self.num_kv_heads, self.head_dim)


def shape_of(q: Any, blocks: Any, query_len: int | None = None) -> dict[str, Any]:
    """What decides the best sizes of a kernel beside how much there is to do, see `tuned_sizes`."""
    shape = {
        "num_heads": q.shape[1],
        "num_kv_heads": blocks.shape[4],
        "head_dim": q.shape[2],
        "block_size": blocks.shape[3],
        "dtype": "float8_e4m3fn" if is_float8(blocks) else jnp.dtype(blocks.dtype).name,
    }
    return shape if query_len is None else shape | {"query_len": query_len}


def reason_against(q: Any, blocks: Any, scale: float, soft_cap: float | None) -> str | None:
    """Why the kernels cannot take this call on any machine, or None."""
    head_dim, block_size = blocks.shape[5], blocks.shape[3]
    float8 = is_float8(blocks)
    if q.dtype not in DTYPES or (q.dtype != blocks.dtype and not float8):
        return (
            "it needs queries of bfloat16 or float16 and a cache of their type or of float8, "
            f"not {q.dtype} and {blocks.dtype}"
        )
    if float8 and head_dim % 32:
        return f"over float8 it needs a head size that is a multiple of 32, not {head_dim}"
    if head_dim % 16 or not 32 <= head_dim <= 256:
        return f"it needs a head size that is a multiple of 16 from 32 to 256, not {head_dim}"
    if block_size % 8 or block_size < 16:
        return f"it needs a block size that is a multiple of 8 and at least 16, not {block_size}"
    if scale <= 0 or (soft_cap is not None and soft_cap <= 0):
        return f"it needs a positive scale and soft cap, not {scale} and {soft_cap}"
    if math.prod(blocks.shape[:4]) * blocks.shape[4] >= 2**31:
        return f"it numbers the cache's rows in 32 bits, and {blocks.shape} has more"
    return None


def refuse(q: Any, blocks: Any, scale: float, soft_cap: float | None) -> None:
    """Raises ImplementationError with the reason where the kernels cannot run or take this call."""
    implementation.refuse(
        "attention", "mosaic", compat.tensor_core_refusal(), reason_against(q, blocks, scale, soft_cap)
    )


def default_tile_kv(head_dim: int, *, prefill: bool) -> int:
    """Keys of a tile, so that two stages fit (decode: in half of an SM's memory, for two CTAs)."""
    if prefill:
        return 128 if head_dim <= 128 else 64
    return 128 if head_dim <= 64 else 64


def sink_rows(sinks: jax.Array | None, geometry: Geometry) -> jax.Array:
    """Sinks in units of log2 for each row of a tile, f32[KVH * head_tiles, TILE_ROWS]; one dummy without sinks."""
    if sinks is None:
        return jnp.zeros((1, TILE_ROWS), jnp.float32)
    by_tile = sinks.astype(jnp.float32).reshape(-1, geometry.heads) * LOG2E
    return jnp.tile(by_tile, (1, -(-TILE_ROWS // geometry.heads)))[:, :TILE_ROWS]


def load_rows(
    source: Any,
    target: Any,
    staging: Any,
    geometry: Geometry,
    token_of: Any,
    tokens: int,
    head: Any,
    *,
    layout: Any = None,
) -> None:
    """Queries of some tokens, GMEM -> rows of a swizzled SMEM tile, through a row-major staging buffer.

    source: `Geometry.queries`. token_of: number of the tile's token -> a valid index. Rows past them keep garbage,
    which stays in those rows. layout: of the tile in registers on its way, by default the tensor core's.
    """
    heads, columns = geometry.heads, geometry.columns
    of_token = compat.rows_layout(heads, columns, jnp.dtype(staging.dtype).itemsize, in_smem=True)
    unrolled, here = _unrolled(tokens), compat.ds(0, columns)
    for start in range(0, geometry.head_dim, columns):
        part = compat.ds(start, columns)

        def some(first, part=part):
            refs = [source.at[token_of(first + i), head, :, part] for i in range(unrolled)]
            values = [compat.load(ref, layout=of_token, optimized=False) for ref in refs]
            for i, value in enumerate(values):
                staging[compat.ds((first + i) * heads, heads), here] = value.astype(staging.dtype)

        _in_steps(some, tokens, unrolled)
        fill_columns(target, part, staging, geometry, layout or compat.tile_layout())


def fill_columns(target: Any, part: Any, staging: Any, geometry: Geometry, layout: Any) -> None:
    """Some columns of the tile of queries, from the staging buffer. layout: of them in registers on their way."""
    compat.commit()
    tile = compat.load(staging.at[:, compat.ds(0, geometry.columns)], layout=layout, optimized=False)
    if tile.dtype != geometry.dtype:
        tile = tile.astype(jnp.float32)
    if geometry.float8:  # beyond float16 is infinity, and infinity minus infinity no score
        tile = jnp.minimum(jnp.maximum(tile, -FLOAT16_MAX), FLOAT16_MAX)
    target[:, part] = tile.astype(geometry.dtype)
    compat.commit()


def store_rows(value: jax.Array, staging: Any, geometry: Geometry, put: Any, tokens: int) -> None:
    """The way back: rows of a matrix tile in registers -> put(token of the tile, columns, values [heads, columns])."""
    width = geometry.columns
    parts = (value[:, start : start + width] for start in range(0, geometry.head_dim, width))
    store_columns(parts, staging, geometry, put, tokens)


def store_columns(parts: Iterable[jax.Array], staging: Any, geometry: Geometry, put: Any, tokens: int) -> None:
    """`store_rows` of a matrix that comes as its columns, `Geometry.columns` at a time."""
    heads, columns = geometry.heads, geometry.columns
    layout = compat.rows_layout(heads, columns, jnp.dtype(staging.dtype).itemsize, in_smem=True)
    unrolled, here = _unrolled(tokens), compat.ds(0, columns)
    for number, value in enumerate(parts):
        staging[:, here] = value.astype(staging.dtype)
        compat.commit()

        part = compat.ds(number * columns, columns)

        def some(first, part=part):
            for i in range(unrolled):
                rows = staging.at[compat.ds((first + i) * heads, heads), here]
                put(first + i, part, compat.load(rows, layout=layout, optimized=False))

        _in_steps(some, tokens, unrolled)
        compat.commit()


def _unrolled(tokens: int) -> int:
    """Tokens moved at once: as many loads are in flight."""
    return next(n for n in range(min(tokens, 16), 0, -1) if tokens % n == 0)


def _in_steps(move: Any, tokens: int, step: int) -> None:
    if tokens == step:
        move(0)
    else:
        compat.loop(0, tokens // step)(lambda i: move(i * step))


def page_index(geometry: Geometry, base: Any, table: Any, request: Any, page: Any) -> Any:
    """First-axis index into `Geometry.pages` of a request's page. base: index of the first block of (layer, k or v)."""
    per_block = geometry.block_size // geometry.page
    if per_block == 1:
        return base + table[request, page]
    column, inner = lax.div(page, jnp.int32(per_block)), lax.rem(page, jnp.int32(per_block))
    return (base + table[request, column]) * per_block + inner


def value_offset(geometry: Geometry) -> int:
    """From a key page's index to that of its values."""
    return VALUE * geometry.num_blocks * (geometry.block_size // geometry.page)


def widen(source: Any, target: Any, geometry: Geometry) -> None:
    """A tile of a float8 cache [tile_kv, D], SMEM -> registers -> the tile that the tensor core reads, also in SMEM.

    `compat.commit` has to follow.
    """
    layout = compat.rows_layout(WIDENED_ROWS, geometry.head_dim, 2)
    for start in range(0, geometry.tile_kv, WIDENED_ROWS):
        rows = compat.ds(start, WIDENED_ROWS)
        value = compat.load(source.at[rows], layout=layout, optimized=False)
        target[rows] = from_bytes(value).astype(geometry.dtype)


def by_scale(values: jax.Array, scales: Any, layer: Any, which: int) -> jax.Array:
    """Scores times the scale of the keys, or results times that of the values; unchanged without scales."""
    if scales is None:
        return values
    return values * compat.repeated(scales[layer, which], values.shape, compat.tile_layout())


def clear_tail(tile: Any, live: Any) -> None:
    """Zero the rows of a value tile from `live` on: a probability of 0 does not remove a NaN."""
    value = compat.load(tile, layout=compat.tile_layout(), optimized=False)
    rows = compat.index_of(tile.shape, 0)
    tile[...] = jnp.where(rows < live, value, jnp.zeros_like(value))
    compat.commit()


def visible(
    shape: tuple[int, ...],
    geometry: Geometry,
    first_key: Any,
    first_position: Any,
    window: int | None,
    *,
    axis: int = 0,
    one_token: bool = False,
) -> jax.Array:
    """bool[shape]: may the query (of the token first_position + query // heads) see the key first_key + key?

    Queries are numbered along `axis`, keys along the other. query // heads >= x is query >= x * heads, which needs no
    division. one_token: all queries are of one token and see the same keys.
    """
    if one_token:
        key = compat.index_of(shape, 1 - axis)
        mask = key <= first_position - first_key
        return mask if window is None else mask & (key > first_position - window - first_key)
    difference = compat.index_of(shape, axis) - compat.index_of(shape, 1 - axis) * geometry.heads
    mask = difference >= (first_key - first_position) * geometry.heads
    return mask if window is None else mask & (difference < (first_key - first_position + window) * geometry.heads)


def spread(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number a row over the columns of a matrix."""
    return compat.spread(rows, shape, 0, compat.tile_layout())


def softmax_factor(top: jax.Array, total: jax.Array, sink: jax.Array | None) -> jax.Array:
    """What the sums of values are multiplied with at the end of a running softmax in log2 units; rows without keys
    give zeros."""
    if sink is None:
        return 1.0 / jnp.where(total > 0, total, 1.0)
    highest = jnp.maximum(top, sink)
    keep = jnp.exp2(top - highest)
    return keep / (total * keep + jnp.exp2(sink - highest))


def finish(acc: jax.Array, top: jax.Array, total: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Rows of the result from a running softmax in log2 units, see `softmax_factor`."""
    return acc * spread(softmax_factor(top, total, sink), acc.shape)
