"""Rope, KV write and attention as one kernel against the two ops that it is composed of."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import compat
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.attention_with_rope import attention_with_rope

UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """seq_lens: of a decode; 0 is a padded row."""

    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 128
    block_size: int = BLOCK
    norms: bool = False
    rope: bool = True
    window: int | None = None

    def build(self, seed: int = 0):
        """(qkv, cache of two layers, layer, metadata, rope, norms); NaN wherever nothing may be read."""
        rng = np.random.default_rng(seed)
        batch, heads = len(self.seq_lens), self.num_heads + 2 * self.num_kv_heads
        width = max(128, -(-max(self.seq_lens) // self.block_size))
        blocks_of = [-(-n // self.block_size) for n in self.seq_lens]
        num_blocks = 1 + sum(blocks_of)
        cache = np.full((2, 2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim), np.nan, np.float32)
        table, slots = np.zeros((batch, width), np.int32), np.full(batch, -1, np.int32)
        free = rng.permutation(np.arange(1, num_blocks))
        for i, (length, count) in enumerate(zip(self.seq_lens, blocks_of, strict=True)):
            table[i, :count], free = free[:count], free[count:]
            for position in range(length - 1):
                place = (table[i, position // self.block_size], position % self.block_size)
                cache[:, :, *place] = rng.normal(size=(2, 2, self.num_kv_heads, self.head_dim))
            if length:
                slots[i] = table[i, (length - 1) // self.block_size] * self.block_size + (length - 1) % self.block_size
        qkv = jnp.asarray(rng.normal(size=(batch, heads, self.head_dim)), jnp.bfloat16)
        angles = jnp.asarray(rng.uniform(0, 6, (batch, self.head_dim // 2)), jnp.float32)
        metadata = AttentionMetadata(
            query_start_loc=jnp.arange(batch + 1, dtype=jnp.int32),
            seq_lens=jnp.asarray(self.seq_lens, jnp.int32),
            num_reqs=jnp.int32(batch),
            block_table=jnp.asarray(table),
            slot_mapping=jnp.asarray(slots),
            query_len=1,
        )
        rope = (jnp.cos(angles), jnp.sin(angles)) if self.rope else None
        norms = jnp.asarray(rng.normal(1, 0.2, (2, self.head_dim)), jnp.bfloat16)
        named = {"q_norm": norms[0], "k_norm": norms[1]} if self.norms else {}
        return qkv, jnp.asarray(cache, jnp.bfloat16), jnp.int32(1), metadata, rope, named


CASES = {
    "one tile, a padded row": Case((5, 0, 64)),
    "the new token begins a tile": Case((65, 1, 129)),
    "norms, 16 heads of a KV head": Case((70, 33), num_heads=16, norms=True),
    "two KV heads, 7 heads each, no rotation": Case((40, 130), num_heads=14, num_kv_heads=2, rope=False),
    "a window": Case((150, 20), window=70),
    "a block longer than a tile": Case((150, 128), block_size=128),
}


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def run(case: Case, arrays, attend=attention_with_rope, **named) -> tuple[np.ndarray, np.ndarray]:
    """(result, cache) in float32."""
    *arrays, norms = arrays
    f = functools.partial(attend, scale=case.head_dim**-0.5, window=case.window, **norms, **named)
    out, cache = jax.jit(f)(*arrays)
    return np.asarray(out.astype(jnp.float32)), np.asarray(cache.astype(jnp.float32))


ULP = 2**-7
"""The most of a bfloat16's last place, relative: XLA may round a rotation or a norm in another place."""


def check(case: Case, got, expected) -> None:
    """Nothing but the new keys and values is written; the result is as the tensor core rounds it; zeros for padding."""
    np.testing.assert_allclose(got[0], expected[0], atol=0.02, rtol=0.02)
    near = 1e-2 if case.norms else 1e-5
    np.testing.assert_allclose(got[1], expected[1], atol=near, rtol=ULP)
    assert not got[0][np.asarray(case.seq_lens) == 0].any()


@needs_mosaic
@every_case
@pytest.mark.parametrize("splits", [1, 2])
def test_interpreted(case, splits):
    from jaxrunner.pallas.attention_decode_mosaic import decode_attention_with_rope

    arrays = case.build()
    with compat.interpreting():
        got = run(case, arrays, functools.partial(decode_attention_with_rope, num_splits=splits))
    check(case, got, run(case, arrays, implementation="xla"))


@needs_mosaic
def test_more_shares_are_allowed_than_there_are():
    """Of 3 and 1 tiles in at most 5 shares: the third of three has none behind it."""
    from jaxrunner.pallas.attention_decode_mosaic import decode_attention_with_rope

    case = Case((180, 60))
    arrays = case.build()
    with compat.interpreting():
        got = run(case, arrays, functools.partial(decode_attention_with_rope, num_splits=5, min_tiles=1))
    check(case, got, run(case, arrays, implementation="xla"))


@needs_mosaic
def test_layers_share_their_counters():
    """Two layers one after the other, keys in shares: what the first left in the counters, the second begins with."""
    from jaxrunner.pallas.attention_decode_mosaic import decode_attention_with_rope

    case = Case((200, 140))
    qkv, cache, layer, metadata, rope, _ = case.build()

    def layers(qkv, cache, metadata, rope):
        metadata = metadata.replace(counters=jax.new_ref(jnp.zeros(2 * case.num_heads, jnp.int32)))
        attend = functools.partial(decode_attention_with_rope, scale=case.head_dim**-0.5, num_splits=2)
        _, cache = attend(qkv, cache, jnp.int32(0), metadata, rope)
        return attend(qkv, cache, layer, metadata, rope)

    with compat.interpreting():
        out, written = jax.jit(layers)(qkv, cache, metadata, rope)
        got = np.asarray(out, np.float32), np.asarray(written, np.float32)
    expected = run(case, (qkv, cache, layer, metadata, rope, {}), implementation="xla")
    np.testing.assert_allclose(got[0], expected[0], atol=0.02, rtol=0.02)
    np.testing.assert_allclose(got[1][1], expected[1][1], atol=1e-5, rtol=ULP)


MODELS = {
    "Llama-3-8B": (32, 8, False),
    "Qwen3-8B": (32, 8, True),
    "Qwen2.5-7B": (28, 4, False),
    "Llama-2-7B": (32, 32, False),
    "16 heads of a KV head": (16, 1, True),
}


@needs_mosaic
@pytest.mark.parametrize("batch", [1, 64, 256])
@pytest.mark.parametrize("model", MODELS)
def test_lowers_as_one_kernel_in_place(model, batch):
    """By its public name, with nothing asked for; the cache is neither gathered from nor copied."""
    num_heads, num_kv_heads, norms = MODELS[model]
    heads, dtype = (num_heads + 2 * num_kv_heads, 128), jnp.bfloat16
    named = dict.fromkeys(("q_norm", "k_norm"), jnp.ones(128, dtype)) if norms else {}

    def f(qkv, cache, layer, metadata, rope):
        metadata = AttentionMetadata(*metadata, query_len=1)
        choice = {"attention_with_rope": "mosaic"}
        return attention_with_rope(qkv, cache, layer, metadata, rope, scale=0.1, implementation=choice, **named)

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    qkv, cache = (jax.ShapeDtypeStruct(s, dtype) for s in [(batch, *heads), (2, 2, 9, BLOCK, num_kv_heads, 128)])
    metadata = (i32(batch + 1), i32(batch), i32(), i32(batch, 128), i32(batch))
    rope = (jax.ShapeDtypeStruct((batch, 64), jnp.float32),) * 2
    text = compat.lower_for_cuda(f, qkv, cache, i32(), metadata, rope).as_text()
    assert text.count(f"custom_call @{compat.CUSTOM_CALL}") == 1
    assert "dynamic_gather" not in text
    assert "output_operand_alias" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 64}, "heads of 128"),
        ({"num_heads": 32}, "at most 16 of them"),
    ],
)
@needs_mosaic
def test_what_the_kernel_cannot_take_is_composed_or_refused(change, reason):
    case = dataclasses.replace(Case((17, 40)), **change)
    arrays = case.build()
    expected = run(case, arrays, implementation="xla")
    check(case, run(case, arrays), expected)
    with compat.interpreting(), pytest.raises(ImplementationError, match=reason):
        run(case, arrays, implementation={"attention_with_rope": "mosaic"})


@pytest.mark.gpu
@every_case
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_on_the_gpu(case, splits):
    from jaxrunner.pallas.attention_decode_mosaic import decode_attention_with_rope

    arrays = case.build(seed=1)
    got = run(case, arrays, functools.partial(decode_attention_with_rope, num_splits=splits))
    check(case, got, run(case, arrays, implementation="xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 64, 300])
def test_on_the_gpu_of_many_lengths(batch):
    """Public name, shares of the keys as chosen, several calls that share their counters."""
    lens = np.random.default_rng(batch).integers(0, 700, batch)
    case = Case(tuple(int(n) for n in lens), num_heads=32, num_kv_heads=8)
    qkv, cache, layer, metadata, rope, _ = case.build(seed=2)

    def steps(qkv, cache, metadata, rope):
        metadata = metadata.replace(counters=jax.new_ref(jnp.zeros(batch * case.num_heads, jnp.int32)))
        first, cache = attention_with_rope(qkv, cache, jnp.int32(0), metadata, rope, scale=case.head_dim**-0.5)
        second, cache = attention_with_rope(qkv, cache, layer, metadata, rope, scale=case.head_dim**-0.5)
        return second, cache, first

    got = jax.jit(steps)(qkv, cache, metadata, rope)
    expected = run(case, (qkv, cache, layer, metadata, rope, {}), implementation="xla")
    np.testing.assert_allclose(np.asarray(got[0], np.float32), expected[0], atol=0.02, rtol=0.02)
    np.testing.assert_allclose(np.asarray(got[1][1], np.float32), expected[1][1], atol=1e-5, rtol=ULP)
