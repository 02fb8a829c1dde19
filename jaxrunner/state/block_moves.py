"""Whole KV blocks zeroed and copied before a step's forward pass: new blocks that must hold no old NaN, copy-on-write.

All zeroing happens before all copying, and every copy reads the cache as it was before any copy, so that entries of
one call do not depend on their order. One small executable serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.errors import AdmissionError
from jaxrunner.state.codec import Layout
from jaxrunner.state.kv_cache import KVCache

MOVES_PER_CALL = 64


class HoldsCache(Protocol):
    """A pytree node with a KV cache."""

    kv: KVCache

    def replace(self, **changes: Any) -> Any: ...


S = TypeVar("S", bound=HoldsCache)


def move_layout(entries: int = MOVES_PER_CALL) -> Layout:
    """Kernel block ids; the same in every KV-cache group."""
    return Layout((("num_zero", ()), ("num_copy", ()), ("zero", (entries,)), ("src", (entries,)), ("dst", (entries,))))


def pack_moves(zero: Sequence[int], copies: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Uploads for these blocks, MOVES_PER_CALL of each kind at a time; copies are (source, destination).

    Raises AdmissionError if two entries write one block, since their order would be undefined, or if a copy reads a
    block that another one writes.
    """
    written = [*zero, *(dst for _, dst in copies)]
    if len(set(written)) != len(written):
        raise AdmissionError("a KV block is zeroed or copied to twice in one step")
    if chained := {src for src, _ in copies} & {dst for _, dst in copies}:
        raise AdmissionError(f"KV block {min(chained)} is the source of one copy and the destination of another")
    layout = move_layout()
    # All zeroing first: a copy may read a block that this step zeroes.
    uploads = [layout.pack({"num_zero": len(part), "zero": list(part)}) for part in batched(zero, MOVES_PER_CALL)]
    for pairs in batched(copies, MOVES_PER_CALL):
        src, dst = [s for s, _ in pairs], [d for _, d in pairs]
        uploads.append(layout.pack({"num_copy": len(pairs), "src": src, "dst": dst}))
    return uploads


def batched(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Parts of at most `size` items (`itertools.batched` needs Python 3.12)."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def apply_moves(state: S, packed: jax.Array) -> S:
    """The state with the blocks of `packed` (see `pack_moves`) zeroed, then copied, in every KV-cache group."""
    part = move_layout().unpack(packed)
    index = jnp.arange(MOVES_PER_CALL)
    blocks = []
    for cache in state.kv.blocks:
        out_of_range = cache.shape[2]
        zero = jnp.where(index < part["num_zero"], part["zero"], out_of_range)
        cache = cache.at[:, :, zero].set(0, mode="drop")
        moved = cache[:, :, jnp.where(index < part["num_copy"], part["src"], 0)]
        dst = jnp.where(index < part["num_copy"], part["dst"], out_of_range)
        blocks.append(cache.at[:, :, dst].set(moved, mode="drop"))
    return state.replace(kv=state.kv.replace(blocks=tuple(blocks)))
