"""On a GPU with room for it: a KV pool of 80 GB. Its far end is written and read as its near end is."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.pallas.attention import attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.kv_write import kv_write
from jaxrunner.pallas.rope_kv_write import rope_kv_write

pytestmark = pytest.mark.gpu
POOL_BYTES = 80 * 10**9
LAYERS, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 32, 16, 32, 8, 128
NUM_BLOCKS = POOL_BYTES // (LAYERS * 2 * BLOCK_SIZE * KV_HEADS * HEAD_DIM * 2)
SEQ_LENS = (300, 17, 128)
TOKENS = sum(SEQ_LENS)
WIDTH = 128
RAGGED = (40, 17, 1)
"""Queries of each request in the ragged batch: the end of a prompt, a whole one, a decode."""


def room() -> bool:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0) > POOL_BYTES + 2 * 10**9


@functools.partial(jax.jit, static_argnames="shape")
def zeros(shape):
    return jnp.zeros(shape, jnp.bfloat16)


def tables(far: bool) -> tuple[np.ndarray, np.ndarray]:
    """(block table, slots of all tokens): scattered blocks among the first, or the last, 100 of the pool."""
    ids = np.random.default_rng(1).permutation(100)[: sum(-(-n // BLOCK_SIZE) for n in SEQ_LENS)] + 1
    ids = NUM_BLOCKS - ids if far else ids
    table, slots, taken = np.zeros((len(SEQ_LENS), WIDTH), np.int32), [], 0
    for row, n in enumerate(SEQ_LENS):
        count = -(-n // BLOCK_SIZE)
        table[row, :count] = ids[taken : taken + count]
        position = np.arange(n)
        slots.append(table[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        taken += count
    return table, np.concatenate(slots).astype(np.int32)


def metadata(table: np.ndarray, query_lens, query_len: int | None) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(query_lens)]), jnp.int32),
        seq_lens=jnp.asarray(SEQ_LENS, jnp.int32),
        num_reqs=jnp.int32(len(SEQ_LENS)),
        block_table=jnp.asarray(table),
        slot_mapping=jnp.full(sum(query_lens), -1, jnp.int32),
        query_len=query_len,
    )


def attend(q, blocks, layer, table, implementation) -> list[np.ndarray]:
    """Decode and ragged attention over the requests of a table."""
    f = jax.jit(functools.partial(attention, scale=HEAD_DIM**-0.5, implementation=implementation))
    ones = (1,) * len(SEQ_LENS)
    batches = [metadata(table, ones, 1), metadata(table, RAGGED, None)]
    return [np.asarray(f(q[: len(m.slot_mapping)], blocks, jnp.int32(layer), m)).astype(np.float32) for m in batches]


def writers(operands):
    """The two ops that write, as (blocks, layer, slots) -> blocks, each with its cache donated."""
    qkv, rope = operands
    k, v = qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    plain = jax.jit(functools.partial(kv_write, implementation="mosaic"), donate_argnums=0)
    fused = jax.jit(functools.partial(rope_kv_write, implementation="mosaic"), donate_argnums=1)
    return {
        "kv_write": lambda blocks, layer, slots: plain(blocks, layer, k, v, slots),
        "rope_kv_write": lambda blocks, layer, slots: fused(qkv, blocks, layer, slots, rope)[1],
    }


@jax.jit
def pages(blocks, layer, table):
    return blocks[layer, :, table]


@jax.jit
def written(blocks):
    """i32[L, 2, N]: numbers other than zero in each block."""
    return jnp.count_nonzero(blocks, axis=(3, 4, 5)).astype(jnp.int32)


@pytest.mark.parametrize("op", ["kv_write", "rope_kv_write"])
def test_the_far_end_is_written_and_read_as_the_near_end(op):
    if not room():
        pytest.skip("this GPU has no room for a pool of 80 GB")
    keys = jax.random.split(jax.random.key(0), 2)
    qkv = jax.random.normal(keys[0], (TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM), jnp.bfloat16)
    qkv = jnp.where(qkv == 0, jnp.bfloat16(1), qkv)
    angles = jnp.arange(TOKENS, dtype=jnp.float32)[:, None] * 10000.0 ** -(jnp.arange(HEAD_DIM // 2) / 64)
    write = writers((qkv, (jnp.cos(angles), jnp.sin(angles))))[op]
    q = jax.random.normal(keys[1], (sum(RAGGED), HEADS, HEAD_DIM), jnp.bfloat16)

    blocks = zeros((LAYERS, 2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM))
    assert blocks.nbytes > 79.9e9
    pointer = blocks.unsafe_buffer_pointer()
    ends = {False: 0, True: LAYERS - 1}
    for far, layer in ends.items():
        blocks = write(blocks, jnp.int32(layer), jnp.asarray(tables(far)[1]))
    assert blocks.unsafe_buffer_pointer() == pointer, "the pool was copied"

    near, far = (np.asarray(pages(blocks, ends[end], tables(end)[0])) for end in (False, True))
    assert near.astype(np.float32).any()
    np.testing.assert_array_equal(near, far)
    # Nothing else of the pool was touched: exactly the slots of both ends hold numbers.
    expected = np.zeros((LAYERS, 2, NUM_BLOCKS), np.int32)
    for end, layer in ends.items():
        np.add.at(expected[layer], (slice(None), tables(end)[1] // BLOCK_SIZE), KV_HEADS * HEAD_DIM)
    np.testing.assert_array_equal(np.asarray(written(blocks)), expected)

    near, far = (attend(q, blocks, ends[end], tables(end)[0], "mosaic") for end in (False, True))
    xla = attend(q, blocks, ends[True], tables(True)[0], "xla")
    for a, b, c in zip(near, far, xla, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.linalg.norm(b - c) < 6e-3 * np.linalg.norm(c)
