"""The padding contract: garbage in everything that is padding, dead or free changes no bit of what is live."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrunner import init_state
from jaxrunner.stages.inputs import step_layout
from jaxrunner.stages.prepare_inputs import prepare_inputs
from jaxrunner.stages.step import begin_step, finish_step
from jaxrunner.state.requests import PARKING_ROW
from tests.stages import harness
from tests.stages.test_step import DECODE, MARGIN, MIXED, MODELS

BUCKETS = {"mixed": MIXED.replace(tier="random"), "decode": DECODE}
JUNK = (2**31 - 1, -1, -(2**31), 10**9, 7)
every_model = pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_two_groups"])
every_bucket = pytest.mark.parametrize("kind", BUCKETS)


def junk(rng, shape):
    return rng.choice(np.array(JUNK, np.int64), size=shape).astype(np.int32)


def used_slots(host, batch, writes, g):
    """bool[N, block_size]: slots whose contents a live request may read after the step."""
    groups, tables = host.template.tables.groups, harness.oracle_state(host, writes)["tables"][g]
    used = np.zeros(host.kv[g].shape[2:4], bool)
    counts = dict(batch)
    for row in np.flatnonzero(host.total_len):
        p = np.arange(host.num_computed_tokens[row] + counts.get(row, 0))
        used[np.asarray(tables[row], int)[p // groups[g].block_size], p % groups[g].block_size] = True
    return used


def draw(name, kind, seed):
    """A clean case: (model, weights, host, batch, writes); dead KV is zero."""
    model, weights = harness.tiny(*MODELS[name])
    host, batch, writes = harness.random_host(model, np.random.default_rng(100 + seed), BUCKETS[kind])
    for g, kv in enumerate(host.kv):
        kv[:, :, ~used_slots(host, [], (), g)] = 0
    return model, weights, host, batch, writes


def poison_state(host, rng):
    """NaN in dead slots and the null block, junk in free rows and in table columns that are not in use."""
    host = copy.deepcopy(host)
    free = np.flatnonzero(host.total_len == 0)
    free = free[free != PARKING_ROW]
    for g, kv in enumerate(host.kv):
        kv[:, :, ~used_slots(host, [], (), g)] = np.nan
        unused = np.arange(host.block_table[g].shape[1]) >= host.num_blocks[:, g, None]
        unused[PARKING_ROW] = False
        host.block_table[g][unused] = junk(rng, unused.sum())
    for name in ("prompt_len", "prefill_len", "total_len", "num_computed_tokens", "last_sampled_token"):
        getattr(host, name)[free] = junk(rng, len(free))
    host.token_ids[free] = junk(rng, host.token_ids[free].shape)
    host.params[free], host.num_blocks[free] = junk(rng, host.params[free].shape), junk(rng, (len(free), 1))
    return host


def poison_upload(packed, bucket, groups, rng, num_draft_slots=0):
    """The packed vector with junk in every entry past the live ones."""
    vector, layout = packed.copy(), step_layout(bucket, groups, num_draft_slots)
    parts = layout.unpack(vector)  # views of the copy
    num_reqs, num_writes = int(parts["num_reqs"]), int(parts["num_block_writes"])
    live = {"idx_mapping": num_reqs, "query_start_loc": num_reqs + 1, "block_writes": num_writes}
    live["num_draft_tokens"] = num_reqs
    for section in parts.keys() & live.keys():
        tail = parts[section][live[section] :]
        tail[...] = junk(rng, tail.shape)
    assert (vector != packed).any()
    return vector


@every_model
@every_bucket
def test_poison_changes_no_live_bit(name, kind):
    for seed in range(5):
        model, weights, host, batch, writes = draw(name, kind, seed)
        bucket, rng = BUCKETS[kind], np.random.default_rng(seed)
        state = harness.to_state(host)
        packed = harness.step_input(state, batch, bucket.tier, writes).pack(bucket)
        clean_state, clean = harness.run(model, weights, state, packed, bucket)
        poisoned = poison_state(host, rng)
        bad_upload = poison_upload(packed, bucket, state.tables.groups, rng)
        after, output = harness.run(model, weights, harness.to_state(poisoned), bad_upload, bucket)

        assert_same_bits(output.sampled_token_ids, clean.sampled_token_ids)
        assert_same_bits(output.num_sampled, clean.num_sampled)
        num_tokens = sum(count for _, count in batch)
        assert_same_bits(output.hidden[:num_tokens], clean.hidden[:num_tokens])
        assert np.isfinite(np.asarray(output.hidden)).all(), "NaN reached the hidden states of padding"
        compare_states(harness.to_host(after), harness.to_host(clean_state), poisoned, host, batch, writes)


def compare_states(after, clean, poisoned, host, batch, writes):
    live = np.flatnonzero(host.total_len)
    for field in ("prompt_len", "prefill_len", "total_len", "num_computed_tokens", "last_sampled_token", "token_ids"):
        assert_same_bits(getattr(after, field)[live], getattr(clean, field)[live])
        free = np.flatnonzero(host.total_len == 0)
        assert_same_bits(getattr(after, field)[free], getattr(poisoned, field)[free])
        assert not getattr(after, field)[PARKING_ROW].any()
    assert_same_bits(after.num_blocks[live], clean.num_blocks[live])
    for g in range(len(host.kv)):
        used = used_slots(host, batch, writes, g)
        assert_same_bits(after.kv[g][:, :, used], clean.kv[g][:, :, used])
        assert np.isnan(after.kv[g][:, :, ~used]).all(), "a dead slot was written"
        assert not after.block_table[g][PARKING_ROW].any()
        for row in live:
            columns = slice(0, after.num_blocks[row, g])
            assert_same_bits(after.block_table[g][row, columns], clean.block_table[g][row, columns])
    assert not after.num_blocks[PARKING_ROW].any()


def assert_same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


@every_bucket
def test_poison_changes_no_bit_of_the_batch(kind):
    """Between the stages all padding is neutral, whatever the upload holds in it, draft counts included."""
    model, _ = harness.tiny("llama")
    bucket, rng = BUCKETS[kind], np.random.default_rng(0)
    host, batch, writes = harness.random_host(model, np.random.default_rng(103), bucket)
    assert len(batch) < bucket.num_reqs, "choose a seed that leaves padding"
    sizes = dict(max_requests=harness.ROWS, max_model_len=harness.MAX_MODEL_LEN, num_blocks=harness.NUM_BLOCKS)
    with_drafts = init_state(model, num_draft_tokens=2, **sizes)
    inputs = dataclasses.replace(harness.step_input(with_drafts, batch, block_writes=writes), num_draft_slots=2)
    packed = inputs.pack(bucket)
    build = jax.jit(functools.partial(prepare_inputs, bucket=bucket))
    states = []
    for description in (host, poison_state(host, rng)):
        state = harness.to_state(description)
        drafts = with_drafts.requests.draft_tokens
        states.append(state.replace(requests=state.requests.replace(draft_tokens=drafts)))
    clean = build(states[0], packed)
    poisoned = build(states[1], poison_upload(packed, bucket, with_drafts.tables.groups, rng, num_draft_slots=2))
    jax.tree.map(assert_same_bits, poisoned, clean)
    check_neutral(clean, batch)


def check_neutral(batch_arrays, batch):
    """Padding of a clean batch: the numbers of the padding contract."""
    n, tokens = len(batch), sum(count for _, count in batch)
    assert (np.asarray(batch_arrays.idx_mapping)[n:] == PARKING_ROW).all()
    assert (np.asarray(batch_arrays.query_start_loc)[n:] == tokens).all()
    for field in ("seq_lens", "prefill_len", "num_draft_tokens"):
        assert not np.asarray(getattr(batch_arrays, field))[n:].any(), field
    for field in ("positions", "input_ids"):
        assert not np.asarray(getattr(batch_arrays, field))[tokens:].any(), field
    assert not np.asarray(batch_arrays.block_table[0])[n:].any()
    assert (np.asarray(batch_arrays.slot_mapping[0])[tokens:] == -1).all()
    assert (np.asarray(batch_arrays.slot_mapping[0])[:tokens] > 0).all()


@every_model
def test_another_bucket_gives_the_same_tokens(name):
    """A decode batch in the decode bucket and in a ragged one; a ragged one split in two halves with more padding."""
    model, weights, host, batch, writes = draw(name, "decode", 1)
    state = harness.to_state(host)
    inputs = harness.step_input(state, batch, "greedy", writes)
    _, decode = harness.run(model, weights, state, inputs, DECODE)
    _, mixed = harness.run(model, weights, state, inputs, BUCKETS["mixed"])
    compare_tokens(model, weights, decode, mixed, len(batch))


def test_the_two_halves_of_a_step_equal_the_whole():
    """`begin_step` padded to more rows, then `finish_step` on fewer, is `step`, bit for bit."""
    model, weights, host, batch, writes = draw("llama", "mixed", 0)
    bucket, state = BUCKETS["mixed"], harness.to_state(host)
    packed = harness.step_input(state, batch, bucket.tier, writes).pack(bucket)
    whole_state, whole = harness.run(model, weights, state, packed, bucket)
    begin = jax.jit(functools.partial(begin_step, model, bucket=bucket, pending_reqs=16))
    finish = jax.jit(functools.partial(finish_step, model, tier=bucket.tier, num_reqs=8))
    state, pending = begin(weights, state, packed)
    assert pending.hidden.shape[0] == 16
    state, output = finish(weights, state, pending)
    assert_same_bits(output.sampled_token_ids, whole.sampled_token_ids)
    assert_same_bits(output.num_sampled, whole.num_sampled)
    jax.tree.map(assert_same_bits, state, whole_state)


def compare_tokens(model, weights, a, b, num_reqs):
    """Equal hidden states to rounding; equal tokens wherever the best logit leads by more than that."""
    logits = np.asarray(harness.compiled_logits(model)(weights, a.hidden))[:num_reqs]
    np.testing.assert_allclose(np.asarray(a.hidden)[:num_reqs], np.asarray(b.hidden)[:num_reqs], rtol=1e-4, atol=2e-4)
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    sure = first - second > MARGIN
    assert sure.any()
    tokens = [np.asarray(o.sampled_token_ids)[:num_reqs, 0] for o in (a, b)]
    np.testing.assert_array_equal(tokens[0][sure], tokens[1][sure])
