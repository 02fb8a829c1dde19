"""The sampler: exact argmax, draws from the softmax, extreme temperatures and damaged rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.sampling.sampler import GREEDY_BELOW
from jaxrunner.state.fields import REQUEST_FIELDS, SAMPLING_COLUMN
from jaxrunner.state.records import request_record
from jaxrunner.state.sampling import SamplingState
from tests.oracle import threefry
from tests.sampling.rows import compiled

run = {tier: compiled(tier) for tier in ("greedy", "random")}


def params(temperatures, seeds=None):
    """One record a row, as admission makes it."""
    rows = [
        request_record(
            prompt_len=1, prefill_len=1, num_computed_tokens=0, params=SamplingParams(temperature=t), seed=int(s)
        )[len(REQUEST_FIELDS) :]
        for t, s in zip(temperatures, seeds if seeds is not None else range(len(temperatures)), strict=True)
    ]
    return SamplingState(params=jnp.asarray(np.stack(rows)))


def sample(logits, temperatures, seeds=None, positions=None, tier="random"):
    logits = jnp.asarray(logits, jnp.float32)
    positions = jnp.asarray(positions if positions is not None else [5] * len(logits), jnp.int32)
    return np.asarray(run[tier](logits, params(temperatures, seeds), positions))


@pytest.mark.parametrize("tier", ["greedy", "random"])
def test_greedy_takes_the_lowest_id_on_a_tie(tier):
    logits = np.zeros((3, 9))
    logits[0, [3, 5]] = 2
    logits[1, [8, 1]] = 1
    assert sample(logits, [0.0] * 3, tier=tier).tolist() == [3, 1, 0]


def test_greedy_rows_in_a_random_batch_are_exact():
    """Temperature 0 among sampled rows: the argmax, whatever the noise would have been."""
    logits = np.random.default_rng(0).normal(size=(64, 50)) * 0.01
    temperatures = [0.0, 1.0] * 32
    tokens = sample(logits, temperatures)
    np.testing.assert_array_equal(tokens[::2], logits.astype(np.float32).argmax(-1)[::2])
    assert (tokens[1::2] != logits.argmax(-1)[1::2]).any()


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_draws_have_the_softmax_distribution(temperature):
    """Chi-square over 100,000 draws with fixed seeds; the 99.9 % bound of 9 degrees of freedom is 27.9."""
    count = 100_000
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, 0.2, -2.0, 1.0])
    state = SamplingState(params=jnp.tile(params([temperature], [2**40 + 1]).params, (count, 1)))
    positions = jnp.arange(count, dtype=jnp.int32)
    tokens = run["random"](jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1)), state, positions)
    weights = np.exp((logits - logits.max()) / temperature)
    expected = count * weights / weights.sum()
    observed = np.bincount(np.asarray(tokens), minlength=10)
    assert ((observed - expected) ** 2 / expected).sum() < 27.9


def test_draws_have_the_distribution_over_seeds_too():
    """One position, 100,000 seeds: neighbouring seeds are independent."""
    count = 100_000
    seeds = np.arange(count, dtype=np.uint64) * np.uint64(2**32 + 1)
    words = np.tile(np.asarray(params([1.0]).params), (count, 1))
    low = SAMPLING_COLUMN["seed_lo"]
    words[:, low : low + 2] = seeds.view(np.int32).reshape(-1, 2)
    state = SamplingState(params=jnp.asarray(words))
    tokens = run["random"](jnp.zeros((count, 4)), state, jnp.full(count, 7, jnp.int32))
    observed = np.bincount(np.asarray(tokens), minlength=4)
    assert ((observed - count / 4) ** 2 / (count / 4)).sum() < 16.3


def test_a_draw_is_argmax_of_scaled_logits_plus_noise():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(40, 60)).astype(np.float32) * 3
    temperatures, positions = rng.choice([0.2, 0.7, 1.3], 40), rng.integers(0, 5000, 40)
    seeds = [int(s) for s in rng.integers(0, 2**64, 40, dtype=np.uint64)]
    tokens = sample(logits, temperatures, seeds, positions)
    for row in range(40):
        noise = threefry.gumbel(threefry.row_key(seeds[row], int(positions[row])), 60)
        scores = logits[row].astype(np.float64) / np.float32(temperatures[row]) + noise
        assert np.sort(scores)[-1] - np.sort(scores)[-2] > 1e-4, "choose another seed for this test"
        assert tokens[row] == scores.argmax()


def test_k042_neighbours_do_not_matter():
    """A seeded row alone, beside unseeded, differently seeded and greedy ones, and in another place."""
    rng = np.random.default_rng(2)
    mine, others = rng.normal(size=(16, 50)), rng.normal(size=(5, 50))
    alone = [sample(mine[i : i + 1], [0.8], [42], [i])[0] for i in range(16)]
    for place, seeds, temperatures in ((0, [1, 2, 3, 4, 5], [0.8] * 5), (5, [42] * 5, [0.0, 1.0, 0.0, 2.0, 1e-4])):
        for i in range(16):
            logits = np.insert(others, place, mine[i], axis=0)
            batch = sample(logits, np.insert(temperatures, place, 0.8), np.insert(seeds, place, 42), [i] * 6)
            assert batch[place] == alone[i]
    assert len(set(alone)) > 3


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e-6, 9.9e-6, 1e-5, 1.1e-5, 1e-4])
def test_k050_tiny_temperatures_take_the_best(temperature):
    """Half-precision sized and very large logits: no overflow, always the best id."""
    rows = [[9.5, 2.0, 1.5], [2.9e38, 3e38, -3e38], [0.99e34, -1e34, 1e34]]
    assert sample(rows, [temperature] * 3).tolist() == [0, 1, 2]


def test_a_temperature_below_the_bound_is_greedy():
    """The bound is the one by which a request is put into the greedy tier."""
    for temperature in (0.0, 9.9e-6, 1.1e-5, 1.0):
        assert SamplingParams(temperature=temperature).is_greedy == (temperature < GREEDY_BELOW)
    tied = [[1.0, 1.0, 1.0, 1.0]] * 64
    assert not sample(tied, [9.9e-6] * 64).any()
    assert sample(tied, [1.1e-5] * 64).any()


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("tier", ["greedy", "random"])
def test_k052_damaged_rows_give_an_id_in_range(tier, temperature):
    """All NaN, all -inf, +inf, NaN among numbers: an id of the vocabulary; the sound row next to them is right."""
    vocab = 8
    rows = np.zeros((6, vocab))
    rows[0], rows[1] = np.nan, -np.inf
    rows[2, 3], rows[3, 5] = np.inf, np.nan
    rows[4, :] = -np.inf
    rows[4, 6] = 1.0
    rows[5, 7] = 9e4
    tokens = sample(rows, [temperature] * 6, tier=tier)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert tokens.dtype == np.int32
    assert tokens[4:].tolist() == [6, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_k125_nan_beside_a_number(temperature):
    """[0, NaN] gave 2147483647 on one device and 1 on another."""
    assert sample([[0.0, np.nan]], [temperature])[0] in (0, 1)


def test_ids_without_a_token_are_never_drawn():
    """-inf at the end of a padded vocabulary, over 2,000 draws at a high temperature."""
    logits = np.zeros((2000, 12))
    logits[:, 9:] = -np.inf
    tokens = sample(logits, [50.0] * 2000)
    assert set(tokens) == set(range(9))
