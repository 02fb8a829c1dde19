"""Random numbers depend on seed, position, token id and stream, and on nothing else; bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.sampling.random import ACCEPT, DRAFT, RESIDUAL, TARGET, USER, gumbel, gumbel_of, row_keys
from jaxrunner.state.fields import split_seed
from tests.oracle import threefry

VOCAB = 300
SEEDS = [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 2**63 + 1, 2**64 - 1]
POSITIONS = [0, 1, 5, 4095, 2**30, 3, 2, 17, 100]


def words(seeds):
    return jnp.array([split_seed(s) for s in seeds], jnp.int32)


def noise(seeds, positions, vocab=VOCAB, stream=TARGET):
    return np.asarray(gumbel(row_keys(words(seeds), jnp.array(positions, jnp.int32), stream=stream), vocab))


def bits(seed, position, stream=TARGET):
    return np.asarray(jax.random.bits(row_keys(words([seed]), jnp.array([position]), stream=stream)[0], (64,)))


def test_draws_equal_threefry_in_numpy():
    actual = noise(SEEDS, POSITIONS)
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        expected = threefry.gumbel(threefry.row_key(seed, position), VOCAB)
        np.testing.assert_allclose(actual[row], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("stream", [TARGET, DRAFT, ACCEPT, RESIDUAL, USER])
def test_bits_equal_threefry_in_numpy(stream):
    for seed, position in zip(SEEDS, POSITIONS, strict=True):
        expected = threefry.bits(threefry.row_key(seed, position, stream), 64)
        np.testing.assert_array_equal(bits(seed, position, stream), expected)


def test_noise_of_single_ids_is_that_of_the_row():
    """Any ids in any order and shape: equal bits."""
    keys, ids = row_keys(words(SEEDS), jnp.array(POSITIONS, jnp.int32)), np.array([[7, 0, 299], [7, 128, 64]])
    for row, key in enumerate(np.asarray(jax.random.key_data(keys))):
        found = np.asarray(gumbel_of((jnp.asarray(key[0]), jnp.asarray(key[1])), jnp.asarray(ids, jnp.uint32)))
        assert found.tobytes() == noise(SEEDS, POSITIONS)[row][ids].tobytes()


def test_rows_do_not_depend_on_their_neighbours():
    """Any subset, any order, any place in the batch: equal bits."""
    whole = noise(SEEDS, POSITIONS)
    for chosen in ([4], [8, 0], [3, 3, 1], list(reversed(range(9)))):
        some = noise([SEEDS[i] for i in chosen], [POSITIONS[i] for i in chosen])
        assert some.tobytes() == whole[chosen].tobytes()


def test_eager_jit_vmap_and_map_agree():
    def one(seed, position):
        return gumbel(row_keys(seed[None], position[None]), VOCAB)[0]

    def many(seed, position):
        return gumbel(row_keys(seed, position), VOCAB)

    args = (words(SEEDS), jnp.array(POSITIONS, jnp.int32))
    expected = np.asarray(many(*args)).tobytes()
    mapped = jax.lax.map(lambda a: one(*a), args)
    for result in (jax.jit(many)(*args), jax.vmap(one)(*args), mapped, jax.jit(jax.vmap(one))(*args)):
        assert np.asarray(result).tobytes() == expected


@pytest.mark.parametrize("other", [2**32 + 7, 2**63 + 7, 2**31 + 7, 8])
def test_both_words_of_a_seed_count(other):
    """Seeds that differ in one bit of either word share no more bits than chance allows."""
    same = (noise([7], [3]) == noise([other], [3])).mean()
    assert same < 0.02


def test_the_words_of_a_seed_are_not_interchangeable():
    assert not np.array_equal(bits(7, 3), bits(7 << 32, 3))
    assert not np.array_equal(bits(1 + (2 << 32), 3), bits(2 + (1 << 32), 3))


@pytest.mark.parametrize("seed", [0, 1, 5, 2**31 - 1])
def test_small_seeds_are_those_of_jax(seed):
    """Below 2^31 the key is `jax.random.key(seed)` folded with position and stream."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 11), TARGET)
    np.testing.assert_array_equal(noise([seed], [11])[0], jax.random.gumbel(key, (VOCAB,)))


def test_a_negative_seed_is_its_two_complement():
    np.testing.assert_array_equal(bits(-1, 3), bits(2**64 - 1, 3))


def test_every_position_has_its_own_draw():
    draws = noise([5] * 200, list(range(200)), 8)
    assert len(np.unique(draws, axis=0)) == 200


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 299])
def test_a_token_keeps_its_draw_when_the_vocabulary_is_padded(vocab):
    assert noise(SEEDS, POSITIONS, vocab).tobytes() == noise(SEEDS, POSITIONS)[:, :vocab].tobytes()


def test_streams_are_independent():
    """Different bits, and no correlation between any two over 20,000 draws."""
    streams = (TARGET, DRAFT, ACCEPT, RESIDUAL, USER)
    assert len(set(streams)) == 5
    draws = np.stack([noise([9] * 20, list(range(20)), 1000, s).ravel() for s in streams])
    correlation = np.corrcoef(draws) - np.eye(5)
    assert np.abs(correlation).max() < 5 / np.sqrt(draws.shape[1])


def test_positions_and_streams_do_not_run_into_each_other():
    """(position 1, stream 0) is not (position 0, stream 1)."""
    seen = {bits(3, position, stream).tobytes() for position in range(8) for stream in range(4)}
    assert len(seen) == 32


def test_without_partitionable_bits_nothing_is_drawn():
    with jax.threefry_partitionable(False), pytest.raises(RuntimeError, match="jax_threefry_partitionable"):
        row_keys(words([1]), jnp.array([1]))


def test_noise_is_finite_and_has_the_moments_of_gumbel():
    draws = noise(list(range(50)), [4] * 50, 2000).ravel()
    assert np.isfinite(draws).all()
    assert abs(draws.mean() - np.euler_gamma) < 0.02
    assert abs(draws.var() - np.pi**2 / 6) < 0.04
