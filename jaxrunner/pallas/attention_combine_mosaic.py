"""What becomes of the result of a share: the request's, where it is the only one, else the CTA that ends last combines
what all have left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.attention_mosaic import NEG_INF, softmax_factor
from jaxrunner.pallas.attention_shares import Arrays, Call, Keys, Place

AT_ONCE = 8
"""Shares whose results are on their way at once."""


def deliver(
    call: Call,
    arrays: Arrays,
    keys: Keys,
    top: jax.Array,
    total: jax.Array,
    layout: Any,
    finished: Callable[[jax.Array | None], jax.Array],
    store: Callable[[jax.Array, Callable[..., None]], None],
) -> None:
    """The end of a share. top, total: of its running softmax in log2 units, one number a query, in `layout`.

    finished: sinks or None -> the result in registers. store: (that, put) -> nothing; it calls put(token of the tile,
    columns, values [heads, columns]).
    """
    geometry, place, (queries,) = call.geometry, keys.place, top.shape
    request, token_tile, head, split, share = place

    def to_result():
        sinks = None
        if arrays.sinks is not None:
            sinks = compat.load(arrays.sinks.at[head, compat.ds(0, queries)], layout=layout, optimized=False)

        def put(i, columns, rows):
            @compat.when(keys.query + i < call.query_len)
            def _():
                row = request * call.query_len + keys.query + i
                arrays.out[row, head, :, columns] = rows.astype(geometry.q_dtype)

        store(finished(sinks), put)

    def to_partials():
        result_ref, sum_ref = arrays.partials

        def put(i, columns, rows):
            here = compat.ds(i * geometry.heads, geometry.heads)
            result_ref[request, token_tile, head, split, here, columns] = rows

        store(finished(None), put)
        positive = jnp.where(total > 0, total, 1.0)
        sums = jnp.where(total > 0, top + jnp.log2(positive), NEG_INF)
        sum_ref[request, token_tile, head, split, compat.ds(0, queries)] = sums
        _combine_if_last(call, arrays, place)

    if call.splits == 1:
        to_result()
    else:
        compat.when(share.shares == 1)(to_result)
        compat.when(share.shares > 1)(to_partials)


def _combine_if_last(call: Call, arrays: Arrays, place: Place) -> None:
    """To be called by every share of a request once its partial results are written; the last one writes the result."""
    token_tiles, head_tiles = arrays.partials[0].shape[1:3]
    number = (place.request * token_tiles + place.token_tile) * head_tiles + place.head
    counter = arrays.counters.at[number]

    @compat.when(compat.is_last(counter, place.share.shares))
    def _():
        arrays.counters[number] = 0  # for the next layer
        compat.loop(0, call.tokens)(lambda i: _combine(call, arrays, place, i))


def _combine(call: Call, arrays: Arrays, place: Place, token: jax.Array) -> None:
    """The heads of one token."""
    result_ref, sum_ref = arrays.partials
    heads, head_dim, shares = call.geometry.heads, call.geometry.head_dim, place.share.shares
    layout = compat.rows_layout(heads, head_dim, 4)
    column = layout.reduce(1)
    here = compat.ds(token * heads, heads)

    def across(vector):
        return compat.spread(vector, (heads, head_dim), 0, layout)

    def some(i, carry):
        acc, top, total = carry
        logs, parts = [], []
        for u in range(min(AT_ONCE, call.splits)):
            share = i * AT_ONCE + u
            # Shares that do not exist repeat the last one; their weight is zero.
            at = (place.request, place.token_tile, place.head, jnp.minimum(share, shares - 1), here)
            log = compat.load(sum_ref.at[at], layout=column, optimized=False)
            logs.append(log + jnp.where(share < shares, 0.0, NEG_INF))
            parts.append(compat.load(result_ref.at[at], layout=layout, optimized=False))
        highest = functools.reduce(jnp.maximum, logs, top)
        shift = jnp.where(highest > NEG_INF, highest, 0.0)
        keep = jnp.exp2(top - shift)
        weights = [jnp.exp2(log - shift) for log in logs]
        acc = functools.reduce(
            jnp.add, [part * across(w) for part, w in zip(parts, weights, strict=True)], acc * across(keep)
        )
        return acc, highest, functools.reduce(jnp.add, weights, total * keep)

    carry = (
        compat.filled((heads, head_dim), 0.0, layout),
        compat.filled((heads,), NEG_INF, column),
        compat.filled((heads,), 0.0, column),
    )
    acc, top, total = lax.fori_loop(0, lax.div(shares + (AT_ONCE - 1), jnp.int32(AT_ONCE)), some, carry)
    sinks = None
    if arrays.sinks is not None:
        sinks = compat.load(arrays.sinks.at[place.head, compat.ds(0, heads)], layout=column, optimized=False)
    factor = softmax_factor(top, total, sinks)
    query = place.token_tile * call.tokens + token

    @compat.when(query < call.query_len)
    def _():
        row = place.request * call.query_len + query
        arrays.out[row, place.head] = (acc * across(factor)).astype(call.geometry.q_dtype)
