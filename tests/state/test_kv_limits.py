"""Caches past 32-bit element offsets: written and read right, and refused where a slot number would not fit."""

from __future__ import annotations

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import init_state
from jaxrunner.errors import AdmissionError
from jaxrunner.pallas.attention import attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.kv_write import kv_write
from tests.stages import harness

LIMIT = 2**31 - 1


def shapes(num_blocks, block_size=16, kv_heads=8, head_dim=128, layers=1):
    """The abstract state of a model with such a cache: no memory is taken."""
    model, _ = harness.tiny("llama")
    model = model.replace(layers=model.layers[:1] * layers, num_kv_heads=kv_heads, head_dim=head_dim)
    sizes = dict(max_requests=2, max_model_len=32, num_blocks=num_blocks, block_size=block_size)
    return jax.eval_shape(lambda: init_state(model, **sizes))


@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_a_cache_whose_slots_do_not_fit_32_bits_is_refused(block_size):
    most = LIMIT // block_size
    assert shapes(most, block_size).kv.blocks[0].shape[2] == most
    with pytest.raises(AdmissionError, match=rf"num_blocks is {most + 1}.*2\.\.{most}.*32 bits.*larger blocks"):
        shapes(most + 1, block_size)


@pytest.mark.parametrize("num_blocks", [0, 1, -3])
def test_a_cache_without_a_block_to_use_is_refused(num_blocks):
    with pytest.raises(AdmissionError, match="null block"):
        shapes(num_blocks)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "kv_heads", "head_dim"),
    [
        pytest.param(40_000, 16, 32, 128, id="k027"),
        pytest.param(65_537, 16, 8, 128, id="k028"),
        pytest.param(7_458, 500, 1, 576, id="k029"),
    ],
)
def test_large_caches_are_indexed_by_block_and_offset(num_blocks, block_size, kv_heads, head_dim):
    """Past 2^31 elements, and nothing in the compiled form of write and attention has an axis that long."""
    cache = shapes(num_blocks, block_size, kv_heads, head_dim).kv.blocks[0]
    assert np.prod(cache.shape, dtype=np.int64) > LIMIT
    rows = jax.ShapeDtypeStruct((4, kv_heads, head_dim), jnp.float32)
    zeros = [jnp.zeros(shape, jnp.int32) for shape in ((5,), (4,), (), (4, 128), (4,))]
    meta = AttentionMetadata(*zeros, query_len=1)

    def write_and_attend(cache, layer, k, v):
        cache = kv_write(cache, layer, k, v, meta.slot_mapping)
        return attention(k, cache, layer, meta, scale=1.0), cache

    text = jax.jit(write_and_attend).lower(cache, jnp.int32(0), rows, rows).as_text()
    axes = [int(n) for dims in re.findall(r"tensor<((?:\d+x)+)", text) for n in dims.split("x") if n]
    assert max(axes) < 2**31
    assert str(num_blocks) in text


def test_k029_the_last_block_of_a_large_cache_keeps_what_is_written():
    """2.1e9 elements: block 7457 starts past 2^31. Written in place, read back by attention, nothing else changes.

    One byte an element keeps the test at 2.2 GB; integers, since XLA would widen a float8 cache on the CPU. They go
    past the annotation of the two functions.
    """
    write, attend = inspect.unwrap(kv_write), inspect.unwrap(attention)
    head_dim, block_size, num_blocks = 288, 500, 7_458
    cache = jnp.zeros((1, 2, num_blocks, block_size, 1, head_dim), jnp.int8)
    assert cache.size > LIMIT
    v = jnp.tile(jnp.array([3.0, 5.0])[:, None, None], (1, 1, head_dim))
    slots = jnp.array([7_457 * block_size, 7_457 * block_size + 499], jnp.int32)
    pointer = cache.unsafe_buffer_pointer()
    cache = jax.jit(write, donate_argnums=0)(cache, jnp.int32(0), jnp.zeros_like(v), v, slots)
    assert cache.unsafe_buffer_pointer() == pointer

    table = jnp.zeros((1, 128), jnp.int32).at[0, 0].set(7_457)
    meta = AttentionMetadata(jnp.array([0, 1]), jnp.array([1]), jnp.int32(1), table, slots, query_len=1)
    first = jax.jit(functools.partial(attend, scale=1.0))(v[:1], cache, jnp.int32(0), meta)
    np.testing.assert_array_equal(first, 3)
    host = np.asarray(cache)
    assert (host[0, 1, 7_457, 0] == 3).all()
    assert (host[0, 1, 7_457, 499] == 5).all()
    assert sum(int(np.count_nonzero(host[0, which])) for which in (0, 1)) == 2 * head_dim
