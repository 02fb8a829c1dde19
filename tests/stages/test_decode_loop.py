"""`decode_loop`: single steps, bit for bit, in one program; rows stop on the device; the cache stays in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams, admit, audit, init_state, manual, plan, release, reserve
from jaxrunner.compile.buckets import Bucket
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.errors import AdmissionError, CapacityError, DonatedStateError
from jaxrunner.stages.decode_loop import StopReason, decode_loop
from jaxrunner.stages.step import step
from jaxrunner.state.runner_state import host_view
from tests.stages import harness

STEPS, BLOCK, LENGTH = 12, 8, 40
PREFILL = Bucket("mixed", 64, 4, 64, "random")
BUCKETS = {tier: Bucket("decode", 4, 4, 1, tier) for tier in ("greedy", "random")}
KINDS = ("scan", "while")
every_kind = pytest.mark.parametrize("kind", KINDS)
PROMPTS = [[7, 8, 9], list(range(20, 36)), list(range(50, 73))]
"""Tails of 3, 0 and 7 tokens in blocks of 8: the rows cross into new blocks at different steps."""


@functools.cache
def model_and_weights():
    return harness.tiny("llama", (None, 8, None))


@functools.cache
def started(temperature: float, reserved: int = STEPS):
    """(state, rows): three prompts, prefilled, each with its first token, two KV-cache groups."""
    model, weights = model_and_weights()
    state = init_state(model, max_requests=6, max_model_len=LENGTH, num_blocks=50, block_size=BLOCK)
    state, rows = admit(state, PROMPTS, [SamplingParams(temperature=temperature, seed=s) for s in (3, 2**50, -7)])
    inputs = plan(state, {row: len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)})
    state, _ = harness.run(model, weights, state, inputs, PREFILL)
    return (reserve(state, rows, reserved) if reserved else state), rows


def single_steps(state, rows, tier, steps=STEPS):
    """(state, tokens [B, steps]) by calls of `step`, a plan each."""
    model, weights = model_and_weights()
    tokens = []
    for _ in range(steps):
        inputs = plan(state, dict.fromkeys(rows, 1))
        state, output = harness.run(model, weights, state, inputs, BUCKETS[tier])
        tokens.append(np.asarray(output.sampled_token_ids)[: len(rows), 0])
    return state, np.stack(tokens, axis=1)


@functools.cache
def compiled_loop(kind, tier, donate=False):
    """decode_loop in a user's jit, with everything that can be traced traced: one program for most tests."""
    model, _ = model_and_weights()

    def rollout(weights, state, rows, stop_token_ids, max_tokens):
        options = dict(steps=STEPS, kind=kind, bucket=BUCKETS[tier], return_reasons=True)
        return decode_loop(model, weights, state, rows, stop_token_ids=stop_token_ids, max_tokens=max_tokens, **options)

    return jax.jit(rollout, donate_argnums=1 if donate else ())


def loop(state, rows, kind="scan", tier="random", stop_token_ids=(-1, -1), max_tokens=STEPS):
    """(state, tokens, counts, reasons), host arrays but the first."""
    _, weights = model_and_weights()
    stops = np.broadcast_to(np.array(stop_token_ids, np.int32), (3, 2))
    most = np.broadcast_to(np.array(max_tokens, np.int32), (3,))
    state, *rest = compiled_loop(kind, tier)(weights, state, np.array(rows, np.int32), stops, most)
    return state, *map(np.asarray, rest)


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@every_kind
@pytest.mark.parametrize(("tier", "temperature"), [("greedy", 0.0), ("random", 0.9)])
def test_equal_to_single_steps(kind, tier, temperature):
    """Token for token and, in the state, bit for bit: rows of unequal length, over block boundaries, two groups."""
    state, rows = started(temperature)
    expected_state, expected = single_steps(state, rows, tier)
    after, tokens, counts, reasons = loop(state, rows, kind, tier)
    np.testing.assert_array_equal(tokens, expected)
    assert counts.tolist() == [STEPS] * 3
    assert reasons.tolist() == [StopReason.MAX_TOKENS] * 3
    same_bits(after, expected_state)
    audit(after)


def test_rows_in_any_order():
    state, rows = started(0.9)
    _, expected = single_steps(state, rows, "random")
    _, tokens, *_ = loop(state, rows[::-1])
    np.testing.assert_array_equal(tokens, expected[::-1])


@every_kind
def test_a_stop_id_ends_its_row_and_no_other(kind):
    """The id itself is the last token. What the others sample does not change; the stopped row is not touched."""
    state, rows = started(0.9)
    _, free = single_steps(state, rows, "random")
    at = [next(i for i in range(2, STEPS) if free[b, i] not in free[b, :i]) for b in range(2)]
    stops = [[-1, free[0, at[0]]], [free[1, at[1]], free[1, STEPS - 1] + 1], [-1, -1]]
    after, tokens, counts, reasons = loop(state, rows, kind, stop_token_ids=stops)
    assert counts.tolist() == [at[0] + 1, at[1] + 1, STEPS]
    assert reasons.tolist() == [StopReason.STOP_TOKEN, StopReason.STOP_TOKEN, StopReason.MAX_TOKENS]
    for b, count in enumerate(counts):
        np.testing.assert_array_equal(tokens[b, :count], free[b, :count])
        assert (tokens[b, count:] == -1).all()
    # The state equals that of single steps in which a stopped row is not planned.
    expected = state
    for i in range(STEPS):
        expected, _ = single_steps(expected, [r for r, c in zip(rows, counts, strict=True) if i < c], "random", 1)
    same_bits(after, expected)
    audit(after)


def test_max_tokens_of_each_row():
    state, rows = started(0.9)
    _, free = single_steps(state, rows, "random")
    after, tokens, counts, reasons = loop(state, rows, max_tokens=[5, 0, STEPS + 3])
    assert counts.tolist() == [5, 0, STEPS]
    assert reasons.tolist() == [StopReason.MAX_TOKENS, StopReason.MAX_TOKENS, StopReason.STEPS]
    np.testing.assert_array_equal(tokens[0, :5], free[0, :5])
    assert (tokens[1] == -1).all()
    assert host_view(after.requests.total_len)[rows].tolist() == [4 + 5, 17, 24 + STEPS]


def test_the_end_of_the_context():
    """A row stops when it is max_model_len tokens long; its last token is in the history."""
    state, rows = started(0.9)
    state, *_ = loop(state, rows)
    after, tokens, counts, reasons = loop(reserve(state, rows, LENGTH - 36), rows)
    assert counts.tolist() == [9, 11, 4]
    assert reasons.tolist() == [StopReason.OUT_OF_BLOCKS, StopReason.MAX_MODEL_LEN, StopReason.MAX_MODEL_LEN]
    assert int(after.requests.total_len[rows[2]]) == LENGTH
    assert host_view(after.requests.token_ids)[rows[2], 36:].tolist() == tokens[2, :4].tolist()
    audit(after)


@every_kind
def test_without_blocks_a_row_stops_and_writes_nothing(kind):
    """In a trace nothing can be raised: the row says so, and the null block stays as it was."""
    state, rows = started(0.9, reserved=0)
    after, tokens, counts, reasons = loop(state, rows, kind)
    assert counts.tolist() == [8 - 3, 0, 24 - 23]
    assert reasons.tolist() == [StopReason.OUT_OF_BLOCKS] * 3
    assert (tokens[1] == -1).all()
    for before, cache in zip(state.kv.blocks, after.kv.blocks, strict=True):
        changed = (host_view(before) != host_view(cache)).any(axis=(0, 1, 4, 5))
        assert not changed[0].any()
        assert changed.sum() == 6
    audit(after)


def test_rows_that_cannot_decode_are_left_alone_in_a_trace():
    """An empty row, the parking row, one in its prefill: not a bit of the state changes for them."""
    state, rows = started(0.9)
    state, (prefill,) = admit(state, [[1, 2, 3]])
    after, tokens, counts, reasons = loop(state, [6, prefill, 0])
    assert counts.tolist() == [0, 0, 0]
    assert reasons.tolist() == [StopReason.NOT_DECODABLE] * 3
    assert (tokens == -1).all()
    same_bits(after, state)
    _, tokens, counts, _ = loop(state, [6, rows[0], 99])
    assert counts.tolist() == [0, STEPS, 0]


def test_a_prompt_of_one_token_needs_no_prefill():
    model, weights = model_and_weights()
    state, rows = started(0.9)
    state = release(state, rows[1:])
    state, (one,) = admit(state, [[9]], SamplingParams(temperature=0.9, seed=4))
    state = reserve(state, [one], STEPS)
    expected_state, expected = single_steps(state, [one, rows[0]], "random")
    after, tokens, *_ = decode_loop(model, weights, state, [one, rows[0]], steps=STEPS, bucket=BUCKETS["random"])
    np.testing.assert_array_equal(tokens, expected)
    same_bits(after, expected_state)


def test_without_a_jit_the_limits_are_checked_first():
    model, weights = model_and_weights()
    state, rows = started(0.9, reserved=0)
    run = functools.partial(decode_loop, model, weights)
    with pytest.raises(CapacityError, match=r"row 1 has blocks for 5 more token\(s\), 12 may be decoded.*reserve\(sta"):
        run(state, rows, steps=STEPS)
    with pytest.raises(CapacityError, match="row 2 has blocks for 0"):
        run(state, rows, steps=STEPS, max_tokens=[5, 1, 1])
    with pytest.raises(CapacityError, match="row 1 has blocks for 5"):
        jax.jit(lambda w: decode_loop(model, w, state, rows, steps=STEPS))(weights)
    state, (prefill,) = admit(state, [[1, 2, 3]])
    with pytest.raises(AdmissionError, match=r"row 4 has 3 tokens to run: finish its prefill"):
        run(state, [rows[0], prefill], steps=1)
    with pytest.raises(AdmissionError, match="row 6 holds no request"):
        run(state, [6], steps=1)
    with pytest.raises(AdmissionError, match="named twice"):
        run(state, [rows[0], rows[0]], steps=1)
    with pytest.raises(AdmissionError, match="0 steps of 3 rows"):
        run(state, rows, steps=0)
    with pytest.raises(AdmissionError, match="kind is 'for'"):
        run(state, rows, steps=1, kind="for")
    with pytest.raises(AdmissionError, match="stop_token_ids for 2 rows, but 3"):
        run(state, rows, steps=1, stop_token_ids=[[1], [2]])
    for bucket in (PREFILL, Bucket("decode", 2, 2), Bucket("decode", 8, 4, 2)):
        with pytest.raises(CapacityError, match="not a decode bucket"):
            run(state, rows, steps=1, bucket=bucket)


def test_a_plain_call_compiles_once_and_takes_lists():
    """Outside of a jit: lists of stop ids, tokens as before, the tier that the rows need, no compile the next time."""
    model, weights = model_and_weights()
    state, rows = started(0.0)
    _, free = single_steps(state, rows, "greedy", 6)
    run = functools.partial(decode_loop, model, weights, state, rows, steps=6)
    _, tokens, _ = run(stop_token_ids=[[int(free[0, 2])], [], [3, 255]])
    np.testing.assert_array_equal(tokens[1:], np.where(np.arange(6) < 6, free[1:], -1))
    with CompileCounter() as counter:
        run(stop_token_ids=[[int(free[0, 1])], [1], [3, 255]])
    assert counter.count == 0
    _, tokens, counts = run(stop_token_ids=[int(free[0, 2]), 255])
    assert counts[0] == free[0].tolist().index(free[0, 2]) + 1


def test_a_processor_knows_its_rows_and_may_close_over_the_trace():
    """A bias for each row, by position, keeps to its row after another has stopped; the same as in `step`."""
    model, weights = model_and_weights()
    state, rows = started(0.0)
    forced = jnp.array([100, 101, 102])
    packed = plan(state, dict.fromkeys(rows, 1)).pack(BUCKETS["greedy"])

    def rollout(state, forced, limits):
        of_row = jnp.zeros(state.requests.num_rows, jnp.int32).at[jnp.array(rows)].set(forced)

        def force(logits, context):
            ids = of_row[context.rows] + context.position % 2
            return logits.at[jnp.arange(len(ids)), ids].add(1e6)

        bucket = BUCKETS["greedy"]
        looped = decode_loop(
            model, weights, state, rows, steps=4, logits_processors=force, bucket=bucket, max_tokens=limits
        )
        return looped, step(model, weights, state, packed, bucket=bucket, logits_processors=force)[1]

    (_, tokens, counts), output = jax.jit(rollout)(state, forced, jnp.array([1, 4, 3]))
    lengths = host_view(state.requests.total_len)[rows]
    expected = np.asarray(forced)[:, None] + (lengths[:, None] + np.arange(4)) % 2
    expected = np.where(np.arange(4) < np.array([[1], [4], [3]]), expected, -1)
    np.testing.assert_array_equal(tokens, expected)
    assert counts.tolist() == [1, 4, 3]
    np.testing.assert_array_equal(output.sampled_token_ids[:3, 0], expected[:, 0])


@every_kind
def test_the_cache_is_not_copied(kind):
    """Donated: in place, and temporaries do not grow with the cache. Not donated: no more than one new cache."""
    model, weights = model_and_weights()
    _, rows = started(0.9)
    shapes = functools.partial(jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))

    def memory(num_blocks, donate):
        state = jax.eval_shape(
            lambda: init_state(model, max_requests=6, max_model_len=LENGTH, num_blocks=num_blocks, block_size=BLOCK)
        )
        kv = sum(b.size * b.dtype.itemsize for b in state.kv.blocks)

        def rollout(w, s):
            return decode_loop(model, w, s, np.array(rows), steps=STEPS, kind=kind, bucket=BUCKETS["random"])

        lowered = jax.jit(rollout, donate_argnums=1 if donate else ()).lower(shapes(weights), state)
        return lowered.compile().memory_analysis(), kv

    small, kv_small = memory(50, True)
    large, kv_large = memory(2000, True)
    assert large.alias_size_in_bytes >= kv_large
    assert large.temp_size_in_bytes - small.temp_size_in_bytes < kv_small
    kept, _ = memory(2000, False)
    assert kept.temp_size_in_bytes < kv_small + small.temp_size_in_bytes
    assert kept.output_size_in_bytes < 1.1 * kv_large


def test_a_donated_state_is_gone_and_a_kept_one_is_not():
    model, weights = model_and_weights()
    state, rows = started(0.9)
    copy = jax.tree.map(jnp.copy, state)
    arguments = (np.array(rows, np.int32), np.full((3, 2), -1, np.int32), np.full(3, STEPS, np.int32))
    _, tokens, *_ = compiled_loop("scan", "random", donate=True)(weights, copy, *arguments)
    with pytest.raises(DonatedStateError):
        decode_loop(model, weights, copy, rows, steps=1)
    np.testing.assert_array_equal(tokens, loop(state, rows)[1])


def test_seeds_as_forked_rows_and_as_a_vmap_draw_the_same():
    """The documented way, forks that share the prompt's blocks, against `vmap` over seeds of one row."""
    model, weights = model_and_weights()
    state, rows = started(0.9)
    state = release(state, rows[:2])
    row, seeds = rows[2], [5, 2**33, 2**63 + 1]
    forked, forks = manual.fork(state, row, 3, seeds=seeds, num_tokens=STEPS)
    shared = host_view(forked.tables.block_table[0])[[row, *forks], :2]
    assert (shared == shared[0]).all()
    after, tokens, *_ = loop(forked, forks)
    audit(after, shared_blocks=True)
    words = np.array(seeds, np.uint64).view(np.uint32).reshape(3, 2)

    def one(words):
        params = state.sampling.params.at[row, seed_columns()].set(words.view(jnp.int32))
        seeded = state.replace(sampling=state.sampling.replace(params=params))
        return decode_loop(model, weights, seeded, [row], steps=STEPS, bucket=BUCKETS["random"])[1][0]

    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(jnp.asarray(words)), tokens)


def seed_columns():
    from jaxrunner.state.fields import SAMPLING_COLUMN

    return np.array([SAMPLING_COLUMN["seed_lo"], SAMPLING_COLUMN["seed_hi"]])
