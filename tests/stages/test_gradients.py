"""Gradients through the step: the log-likelihood of a sequence with respect to the weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import admit, init_state, plan
from jaxrunner.compile.buckets import Bucket
from jaxrunner.models import transformer
from jaxrunner.pallas.attention import attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.attention_reference import attention_reference
from jaxrunner.stages.step import step
from tests.stages import harness

BUCKET = Bucket("mixed", 16, 2, 16)
SEQUENCES = [[5, 9, 200, 31, 7, 7, 64], [1, 2, 3, 4, 250]]
REFERENCE = {"attention": "reference"}
MODELS = {"llama": ("llama", None), "qwen2, two groups": ("qwen2", (None, 4, 4))}


@functools.cache
def likelihood(name):
    """(weights, an empty cache, f(weights, cache): the summed log-likelihood of both sequences, from one ragged step,
    its gradient)."""
    model, weights = harness.tiny(*MODELS[name])
    state = init_state(model, max_requests=2, max_model_len=32, num_blocks=8)
    state, rows = admit(state, SEQUENCES)
    packed = plan(state, {row: len(ids) for row, ids in zip(rows, SEQUENCES, strict=True)}).pack(BUCKET)
    flat = np.concatenate(SEQUENCES)
    predicted = np.array([i for i in range(len(flat) - 1) if i + 1 != len(SEQUENCES[0])])
    run = functools.partial(step, model, bucket=BUCKET, return_hidden=True, implementation=REFERENCE)

    def value(weights, kv):
        _, output = run(weights, state.replace(kv=kv), packed)
        logprobs = jax.nn.log_softmax(transformer.logits(model, weights, output.hidden))
        return logprobs[predicted, flat[predicted + 1]].sum()

    return weights, state.kv, jax.jit(value), jax.jit(jax.grad(value))


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_finite_difference(name):
    """Along a random direction of all weights, and in each single array along its own gradient."""
    weights, kv, value, grad = likelihood(name)
    gradient = grad(weights, kv)
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, weights))
    slopes = [np.asarray(g) for g in jax.tree.leaves(gradient)]
    rng = np.random.default_rng(0)
    alone = [[g if i == j else np.zeros_like(g) for j, g in enumerate(slopes)] for i in range(len(slopes))]
    for direction in [[rng.normal(size=g.shape).astype(np.float32) for g in slopes], *alone]:
        size = np.sqrt(sum(np.vdot(d, d) for d in direction))
        assert size > 0, "an array has no gradient"
        unit = [d / size for d in direction]
        slope = sum(np.vdot(g, d) for g, d in zip(slopes, unit, strict=True))

        def moved(t, unit=unit):
            changed = [leaf + np.float32(t) * d for leaf, d in zip(leaves, unit, strict=True)]
            return float(value(jax.tree.unflatten(structure, changed), kv))

        # Fourth order, so that the step may be long: rounding of float32 is about 1e-5 here.
        near, far = moved(0.03) - moved(-0.03), moved(0.06) - moved(-0.06)
        assert abs((8 * near - far) / 0.36 - slope) < 2e-3 * abs(slope) + 2e-3


def test_what_lies_in_dead_slots_does_not_enter_the_gradient():
    """A cache full of NaN, but for what the step itself writes, gives the same bits."""
    weights, kv, _, grad = likelihood("llama")
    poisoned = grad(weights, jax.tree.map(lambda blocks: jnp.full_like(blocks, jnp.nan), kv))
    for clean, found in zip(jax.tree.leaves(grad(weights, kv)), jax.tree.leaves(poisoned), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(clean, found)


def test_a_gradient_step_raises_the_likelihood():
    weights, kv, value, grad = likelihood("llama")
    better = jax.tree.map(lambda w, g: w + 1e-3 * g, weights, grad(weights, kv))
    assert float(value(better, kv)) > float(value(weights, kv)) + 0.1


def random_case(seed, decode):
    """Arguments of attention: 3 live requests of a batch of 4, random tables, NaN wherever nothing is live."""
    rng = np.random.default_rng(seed)
    size, width, pool = 4, 128, 40
    query_lens = np.full(3, 2) if decode else rng.integers(1, 9, 3)
    seq_lens = query_lens + rng.integers(0, 30, 3)
    num_tokens = 8 if decode else 32
    blocks = np.full((2, 2, pool, size, 2, 8), np.nan, np.float32)
    table = np.zeros((4, width), np.int32)
    ids = iter(rng.permutation(np.arange(1, pool)))
    for b, n in enumerate(seq_lens):
        for column in range(-(-n // size)):
            table[b, column] = next(ids)
            live = min(size, n - column * size)
            blocks[:, :, table[b, column], :live] = rng.normal(size=(2, 2, live, 2, 8))
    metadata = AttentionMetadata(
        query_start_loc=jnp.asarray([0, *np.cumsum(query_lens), query_lens.sum()], jnp.int32),
        seq_lens=jnp.asarray([*seq_lens, 0], jnp.int32),
        num_reqs=jnp.int32(3),
        block_table=jnp.asarray(table),
        slot_mapping=jnp.zeros(num_tokens, jnp.int32),
        query_len=2 if decode else None,
    )
    q = jnp.asarray(rng.normal(size=(num_tokens, 6, 8)), jnp.float32)
    return (q, jnp.asarray(blocks), jnp.int32(1), metadata), int(query_lens.sum())


@pytest.mark.parametrize("options", [{}, {"window": 5, "soft_cap": 0.7}, {"sinks": np.linspace(-1, 2, 6)}], ids=str)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "ragged"])
def test_the_reference_equals_the_loops(decode, options):
    options = {n: jnp.asarray(v, jnp.float32) if n == "sinks" else v for n, v in options.items()}
    reference = jax.jit(functools.partial(attention_reference, scale=0.4, **options))
    loops = jax.jit(functools.partial(attention, scale=0.4, implementation="xla", **options))
    for seed in range(5):
        arguments, live = random_case(seed, decode)
        out, expected = reference(*arguments), loops(*arguments)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out[:live], expected[:live], atol=2e-6)
        assert not np.asarray(out[live:]).any(), "padding gives zeros"
