"""How decode attention deals the keys of requests out to CTAs, and what one CTA is told."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas.attention_mosaic import Geometry, Options, page_index, value_offset
from jaxrunner.sampling.best_ids import best_ids
from jaxrunner.state.kv_cache import KEY

MAX_SPLITS = 32
MOST_CTAS = 1056
"""With shares: eight for each of 132 SMs."""
COMBINING = 1.05
"""What writing and combining partial results costs, as a factor."""


def default_splits(ctas: int, at_once: int) -> int:
    """Shares of a request's keys: enough CTAs to fill the GPU, and some rounds of them when it is full.

    ctas: with one share each. at_once: that the GPU holds.
    """
    if ctas >= MOST_CTAS:
        return 1
    wanted = at_once if ctas < at_once // 2 else MOST_CTAS
    return max(1, min(MAX_SPLITS, wanted // ctas))


def tiles_of_share(tiles: jax.Array, ctas: int, splits: int, min_tiles: int, at_once: int) -> jax.Array:
    """i32[1], most tiles of one share. tiles: i32[B], key tiles of each request. ctas: row tiles of a request.

    CTAs run in rounds of `at_once` and take as long as their tiles, so the best number of shares is seldom the
    largest: of 1..splits shares of the longest request, the one whose rounds end first. Where a request has one share
    at most, any number will do.
    """
    if splits == 1:
        return jnp.ones(1, jnp.int32)
    shares = jnp.arange(1, splits + 1, dtype=jnp.int32)
    each = jnp.maximum(-(-tiles.max() // shares), min_tiles)
    number = jnp.maximum(ctas * (-(-tiles // each[:, None])).sum(axis=1), 1)
    mean = ctas * tiles.sum() / number
    rounds = -(-number // at_once)
    cost = jnp.maximum(each, rounds * mean) * jnp.where(shares > 1, COMBINING, 1.0)
    return each[jnp.argmin(cost)].reshape(1)


def longest_first(tiles: jax.Array) -> jax.Array:
    """i32[B], the requests in the order of their key tiles, i32[B], most first: what is begun last should be short."""
    return best_ids(tiles[None].astype(jnp.float32), len(tiles))[0]


class Share(NamedTuple):
    """One CTA's part of a request: `tiles` key tiles from `first` on, one of `shares` shares."""

    shares: jax.Array
    first: jax.Array
    tiles: jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call of decode attention. tokens: of a CTA. splits: most shares. stages: tiles in flight."""

    geometry: Geometry
    options: Options
    query_len: int
    tokens: int
    splits: int
    stages: int

    def tile_range(self, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First key tile that a request sees, and the one after its last."""
        tile_kv, window = self.geometry.tile_kv, self.options.window
        last = lax.div(seq_len + (tile_kv - 1), jnp.int32(tile_kv))
        if window is None:
            return jnp.zeros_like(last), last
        return lax.div(self.oldest_key(seq_len, window), jnp.int32(tile_kv)), last

    def oldest_key(self, seq_len: jax.Array, window: int) -> jax.Array:
        """Position of the first key that a token of the step sees."""
        return jnp.maximum(seq_len - self.query_len - window + 1, 0)

    def share_of(self, seq_len: jax.Array, largest: jax.Array, split: jax.Array) -> Share:
        """largest: see `tiles_of_share`."""
        first, last = self.tile_range(seq_len)
        tiles = last - first
        shares = jnp.clip(lax.div(tiles + (largest - 1), largest), 1, self.splits)
        each = lax.div(tiles + (shares - 1), shares)
        start = split * each
        return Share(shares, first + start, jnp.maximum(jnp.minimum(tiles - start, each), 0))


class Fresh(NamedTuple):
    """References of a step whose new keys and values are not in the cache yet, see `attention_with_rope`.

    qkv: [T, H + 2 * KVH, D]. slots: [T]. rope: cosines and sines, None without. Norms: [D] or None; eps: theirs.
    """

    qkv: Any
    slots: Any
    rope: tuple[Any, Any] | None
    q_norm: Any
    k_norm: Any
    eps: float


class Arrays(NamedTuple):
    """References to what a kernel reads and writes; sinks, scales, partial results and the counters of shares that have
    written them where there are any.

    q is a `Fresh` where queries, keys and values come as the projection left them.
    """

    q: Any
    kv: Any
    layer: Any
    table: Any
    seq_lens: Any
    sinks: Any
    scales: Any
    out: Any
    partials: Any
    counters: Any


class Place(NamedTuple):
    """One CTA's work: a request, its tile of tokens and of heads, the number of its share, and the share."""

    request: jax.Array
    token_tile: jax.Array
    head: jax.Array
    split: jax.Array
    share: Share


class Keys:
    """The keys and values that a CTA reads.

    first_position: of its first token. query: number of that token in its request's step.
    """

    def __init__(self, call: Call, arrays: Arrays, place: Place):
        geometry, window = call.geometry, call.options.window
        self.call, self.arrays, self.place = call, arrays, place
        self.seq_len = arrays.seq_lens[place.request]
        self.head = lax.div(place.head, jnp.int32(geometry.head_tiles))
        self.query = place.token_tile * call.tokens
        self.first_position = self.seq_len - call.query_len + self.query
        self.base = (arrays.layer[0] * 2 + KEY) * geometry.num_blocks
        self.last_page = jnp.maximum(lax.div(self.seq_len - 1, jnp.int32(geometry.page)), 0)
        self.first_page = jnp.int32(0)
        if window is not None:
            self.first_page = lax.div(call.oldest_key(self.seq_len, window), jnp.int32(geometry.page))

    def first_key(self, i: jax.Array) -> jax.Array:
        """Position of the first key of the share's i-th tile."""
        return (self.place.share.first + i) * self.call.geometry.tile_kv

    def pages(self, i: jax.Array, *, values: bool = False) -> list[Any]:
        """References to the pages of the share's i-th tile; what is outside the request repeats a page of it."""
        geometry = self.call.geometry
        page = (self.place.share.first + i) * geometry.pages_of_tile
        offset = value_offset(geometry) if values else 0
        found = []
        for j in range(geometry.pages_of_tile):
            live = jnp.clip(page + j, self.first_page, self.last_page)
            index = page_index(geometry, self.base, self.arrays.table, self.place.request, live)
            found.append(self.arrays.kv.at[index + offset, :, self.head])
        return found

    def token_of(self, i: Any) -> jax.Array:
        """Row in q of the tile's i-th token, or of the last one."""
        query_len = self.call.query_len
        return self.place.request * query_len + jnp.minimum(self.query + i, query_len - 1)
