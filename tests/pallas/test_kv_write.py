"""`kv_write`: every implementation bit-equal to the oracle, in place, negative slots masked."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import compat
from jaxrunner.pallas.kv_write import kv_write
from tests.oracle import attention as oracle

UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
HEADS = [(2, 64), (3, 64), (1, 256), (4, 80), (8, 128)]
"""KV heads and head size: rows that 128 divides and rows that it does not."""


def arguments(num_kv_heads: int, head_dim: int, tokens: int, dtype=ml_dtypes.bfloat16, seed: int = 0):
    """(blocks, layer, k, v, slot_mapping): scattered slots, some negative."""
    rng = np.random.default_rng(seed)
    num_blocks = 2 + -(-tokens // 16)
    blocks = rng.standard_normal((3, 2, num_blocks, 16, num_kv_heads, head_dim)).astype(dtype)
    k, v = rng.standard_normal((2, tokens, num_kv_heads, head_dim)).astype(dtype)
    slots = rng.permutation(num_blocks * 16)[:tokens].astype(np.int32)
    slots[1::4] = -1
    slots[2::8] = np.iinfo(np.int32).min
    return blocks, np.int32(1), k, v, slots


def check(args, result) -> None:
    np.testing.assert_array_equal(np.asarray(result), oracle.kv_write(*args))


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_xla(num_kv_heads, head_dim, dtype):
    args = arguments(num_kv_heads, head_dim, 21, dtype)
    check(args, jax.jit(functools.partial(kv_write, implementation="xla"))(*map(jnp.asarray, args)))


@needs_mosaic
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), HEADS[:4])
@pytest.mark.parametrize("tokens_per_cta", [1, 4])
def test_mosaic_interpreted(num_kv_heads, head_dim, tokens_per_cta):
    from jaxrunner.pallas.kv_write_mosaic import kv_write_mosaic

    args = arguments(num_kv_heads, head_dim, 6)
    with compat.interpreting():
        f = jax.jit(functools.partial(kv_write_mosaic, tokens_per_cta=tokens_per_cta))
        result = jax.block_until_ready(f(*map(jnp.asarray, args)))
    check(args, result)


@needs_mosaic
def test_mosaic_by_name_has_no_races():
    args = arguments(2, 64, 5)
    with compat.interpreting(detect_races=True):
        f = jax.jit(functools.partial(kv_write, implementation="mosaic"))
        result = jax.block_until_ready(f(*map(jnp.asarray, args)))
    check(args, result)


@needs_mosaic
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("tokens", [64, 8192])
def test_mosaic_lowers_to_one_kernel_in_place(num_kv_heads, head_dim, tokens):
    """A cache of more than 2^31 elements: one custom call that aliases it, and nothing that copies it."""
    num_blocks = 2**32 // (32 * 2 * 16 * num_kv_heads * head_dim)
    cache = jax.ShapeDtypeStruct((32, 2, num_blocks, 16, num_kv_heads, head_dim), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((tokens, num_kv_heads, head_dim), jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (tokens,))]
    f = functools.partial(kv_write, implementation="mosaic")
    text = compat.lower_for_cuda(f, cache, ints[0], rows, rows, ints[1]).as_text()
    assert text.count(f"custom_call @{compat.CUSTOM_CALL}") == 1
    assert "output_operand_alias" in text
    assert "stablehlo.scatter" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("tokens", [1, 70, 3000])
def test_mosaic_on_the_gpu(num_kv_heads, head_dim, tokens):
    args = arguments(num_kv_heads, head_dim, tokens)
    blocks = jnp.asarray(args[0])
    pointer = blocks.unsafe_buffer_pointer()
    f = jax.jit(functools.partial(kv_write, implementation="mosaic"), donate_argnums=0)
    result = f(blocks, *map(jnp.asarray, args[1:]))
    check(args, result)
    assert result.unsafe_buffer_pointer() == pointer


@needs_mosaic
def test_mosaic_refuses_narrow_rows():
    args = arguments(1, 64, 3)
    with pytest.raises(ImplementationError, match="128 elements or more"), compat.interpreting():
        kv_write(*map(jnp.asarray, args), implementation="mosaic")
    check(args, kv_write(*map(jnp.asarray, args)))
