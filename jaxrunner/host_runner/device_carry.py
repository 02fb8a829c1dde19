"""`DeviceCarry`: what a `HostRunner` has on the device from step to step, and how that follows the rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.host_runner.input_arrays import HostSizes
from jaxrunner.host_runner.row_fields import NONE
from jaxrunner.state.codec import Layout
from jaxrunner.state.kv_cache import KVCache
from jaxrunner.state.request_arrays import ArraySets, from_words, num_words, row_shapes, updated_names

TOKEN, FAILED = range(2)
"""Columns of `DeviceCarry.outcome`."""
ARRAYS = "array of "
"""Before the name of an array, that of its section in an upload."""
WORDS_PER_CALL = 8192
"""Of arrays of new requests in one call of `arrange`, unless one request alone has more."""


class DeviceCarry(struct.PyTreeNode):
    """Donated to every program. kv: the cache. sizes: static.

    outcome: i32[R, 2], of each row of the last step: the token it sampled, -1 for none, and whether it failed. extras:
    name -> [R, ...], arrays of requests in batch order, see `jaxrunner.state.request_arrays`.
    """

    kv: KVCache
    outcome: jax.Array
    extras: dict[str, jax.Array]
    sizes: HostSizes = struct.field(pytree_node=False)

    @property
    def num_rows(self) -> int:
        return self.outcome.shape[0]


def arrange_layout(num_rows: int, sets: ArraySets) -> Layout:
    """The upload of `arrange`. source: row in which the content of each row is now, NONE for empty rows. num_new: so
    many of the rows in `row` get what follows, words of each array."""
    words_of = num_words(sets)
    room = max(1, min(num_rows, WORDS_PER_CALL // sum(words_of.values())))
    arrays = ((ARRAYS + name, (room, words)) for name, words in words_of.items())
    return Layout((("source", (num_rows,)), ("num_new", ()), ("row", (room,)), *arrays))


def arrange(carry: DeviceCarry, packed: jax.Array) -> DeviceCarry:
    """The arrays of requests in the order of a batch whose rows moved, with those of new requests."""
    sets, out_of_range = carry.sizes.custom, carry.num_rows
    part = arrange_layout(carry.num_rows, sets).unpack(packed)
    source, new = part["source"], part["row"]
    new = jnp.where(jnp.arange(len(new)) < part["num_new"], new, out_of_range)
    extras = {}
    for name, (shape, dtype) in row_shapes(sets).items():
        old = carry.extras[name]
        is_there = (source != NONE).reshape(-1, *[1] * (old.ndim - 1))
        moved = jnp.where(is_there, old[jnp.maximum(source, 0)], jnp.zeros((), dtype))
        extras[name] = moved.at[new].set(from_words(part[ARRAYS + name], shape, dtype), mode="drop")
    return carry.replace(extras=extras)


def copy_arrays(carry: DeviceCarry, rows: jax.Array) -> tuple[DeviceCarry, dict[str, jax.Array]]:
    """(the carry as it is, the updated arrays of some rows by name, to be kept for preempted requests)."""
    return carry, {name: carry.extras[name][rows] for name in updated_names(carry.sizes.custom)}
