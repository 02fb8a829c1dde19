"""`step` against a whole-step NumPy oracle: random ragged batches over random states, one executable a bucket."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrunner import audit
from jaxrunner.compile.buckets import Bucket
from jaxrunner.compile.counter import CompileCounter
from tests.oracle import step as oracle
from tests.stages import harness

MIXED = Bucket("mixed", 64, 8, 64, "greedy")
DECODE = Bucket("decode", 8, 8, 1, "greedy")
MODELS = {
    "llama": ("llama", None),
    "mistral": ("mistral", None),
    "qwen2_two_groups": ("qwen2", (None, 8, 8)),
    "llama_bias_tied_headdim": ("llama_bias_tied_headdim", None),
}
EXAMPLES = 7
ATOL = 1e-3
MARGIN = 2e-3


def cases():
    for name in MODELS:
        yield pytest.param(name, MIXED.replace(tier="random"), id=f"{name}-mixed-random")
        yield pytest.param(name, DECODE, id=f"{name}-decode-greedy")
    yield pytest.param("llama", MIXED, id="llama-mixed-greedy")
    yield pytest.param("mistral", DECODE.replace(tier="random"), id="mistral-decode-random")
    yield pytest.param("llama", Bucket("decode", 24, 8, 3), id="llama-decode-of-three")
    yield pytest.param("qwen2_two_groups", Bucket("decode", 24, 8, 3), id="qwen2-decode-of-three")


@pytest.mark.parametrize(("name", "bucket"), list(cases()))
def test_random_batches_equal_the_oracle(name, bucket):
    directory, windows = MODELS[name]
    model, weights = harness.tiny(directory, windows)
    config = oracle.read_config(harness.TINY / directory, list(windows) if windows else None)
    oracle_weights = oracle.read_weights(harness.TINY / directory)
    examples = [draw(model, bucket, seed) for seed in range(EXAMPLES)]
    first = examples[0]
    harness.run(model, weights, first["state"], first["packed"], bucket)
    with CompileCounter() as counter:
        outcomes = [harness.run(model, weights, e["state"], e["packed"], bucket) for e in examples]
        jax.block_until_ready(outcomes)
    assert counter.count == 0, "the step was compiled again for a batch that fits its bucket"
    for example, (state, output) in zip(examples, outcomes, strict=True):
        expected_state, results = oracle.step(config, oracle_weights, example["oracle"], example["batch"])
        logits = harness.compiled_logits(model)(weights, output.hidden)
        compare_outputs(output, np.asarray(logits), results, example["batch"])
        compare_states(harness.to_host(state), expected_state, results, example)
        audit(state)


def draw(model, bucket, seed):
    host, batch, writes = harness.random_host(model, np.random.default_rng(seed), bucket)
    state = harness.to_state(host)
    inputs = harness.step_input(state, batch, bucket.tier, writes)
    plain = harness.oracle_state(host, writes)
    return dict(host=host, batch=batch, writes=writes, state=state, packed=inputs.pack(bucket), oracle=plain)


def compare_outputs(output, logits, results, batch):
    assert np.isfinite(np.asarray(output.hidden)).all(), "hidden states of padding must be finite too"
    sampled, counts = np.asarray(output.sampled_token_ids), np.asarray(output.num_sampled)
    assert (sampled[len(batch) :] == -1).all()
    assert (counts[len(batch) :] == 0).all()
    end = 0
    for b, (hidden, result) in enumerate(zip(harness.live_hidden(output, batch), results, strict=True)):
        end += len(hidden)
        if len(hidden):
            np.testing.assert_allclose(hidden, result["hidden"], rtol=1e-4, atol=ATOL)
            np.testing.assert_allclose(logits[end - 1], result["logits"], rtol=1e-4, atol=ATOL)
        assert counts[b] == (result["sampled"] is not None)
        if result["sampled"] is None:
            assert sampled[b, 0] == -1
        elif result["margin"] > MARGIN:
            assert sampled[b, 0] == result["sampled"]


def compare_states(after, expected, results, example):
    """Counters, histories, tables and the cache; what the step must not touch is equal bit for bit."""
    host, batch, writes = example["host"], example["batch"], example["writes"]
    ties = {row for (row, _), r in zip(batch, results, strict=True) if r["margin"] <= MARGIN}
    sure = [row for row in range(harness.ROWS + 1) if row not in ties]
    for name, plain in (("num_computed_tokens", "num_computed"), ("total_len", "total_len")):
        np.testing.assert_array_equal(getattr(after, name), expected[plain], err_msg=name)
    for name, plain in (("last_sampled_token", "last_sampled"), ("token_ids", "token_ids")):
        np.testing.assert_array_equal(getattr(after, name)[sure], np.array(expected[plain])[sure], err_msg=name)
    for name in ("prompt_len", "prefill_len", "params"):
        np.testing.assert_array_equal(getattr(after, name), getattr(host, name), err_msg=name)
    for g in range(len(host.kv)):
        for row, blocks in expected["tables"][g].items():
            assert after.num_blocks[row, g] == len(blocks)
            assert after.block_table[g][row, : len(blocks)].tolist() == blocks
        written = np.zeros(host.kv[g].shape[2:4], bool)
        for block, offset in harness.new_slots(host, batch, writes, g):
            written[block, offset] = True
        assert not written[0].any(), "the oracle wrote to the null block"
        np.testing.assert_allclose(
            after.kv[g][:, :, written], expected["kv"][g][:, :, written], rtol=1e-4, atol=ATOL, err_msg="new KV"
        )
        np.testing.assert_array_equal(after.kv[g][:, :, ~written], host.kv[g][:, :, ~written], err_msg="other KV")


def test_the_examples_reach_every_kind_of_row():
    """Ragged prefill, decode, empty, unscheduled and free rows, long contexts, out of order, with new blocks."""
    model, _ = harness.tiny("llama")
    seen = set()
    for seed in range(EXAMPLES):
        example = draw(model, MIXED, seed)
        host, batch = example["host"], example["batch"]
        rows = [row for row, _ in batch]
        seen |= {"out of order"} if rows != sorted(rows) else set()
        seen |= {"unscheduled"} if (np.delete(host.total_len, rows) > 0).any() else set()
        seen |= {"new blocks"} if example["writes"] else set()
        for row, count in batch:
            end = host.num_computed_tokens[row] + count
            seen.add("empty" if count == 0 else "chunk" if end < host.prefill_len[row] else "samples")
            seen |= {"decode"} if host.num_computed_tokens[row] >= host.prefill_len[row] else set()
            seen |= {"second chunk of keys"} if end > 256 else set()
    assert seen == {
        "out of order",
        "unscheduled",
        "new blocks",
        "empty",
        "chunk",
        "samples",
        "decode",
        "second chunk of keys",
    }


def test_a_request_without_tokens_is_left_alone():
    """It is in the batch with 0 tokens, its prefill long done: nothing is sampled, no counter moves."""
    model, weights = harness.tiny("llama")
    host = harness.empty_host(model)
    for row, computed in ((2, 20), (5, 9)):
        host.prompt_len[row], host.prefill_len[row] = 4, 4
        host.num_computed_tokens[row], host.total_len[row], host.last_sampled_token[row] = computed, computed + 1, 7
        host.num_blocks[row, 0], host.block_table[0][row, :2] = 2, (row, row + 20)
    state = harness.to_state(host)
    after, output = harness.run(model, weights, state, harness.step_input(state, [(5, 0), (2, 1)]), MIXED)
    assert np.asarray(output.num_sampled)[:2].tolist() == [0, 1]
    assert output.sampled_token_ids[0, 0] == -1
    np.testing.assert_array_equal(after.requests.counters[5], state.requests.counters[5])
    assert after.requests.num_computed_tokens[2] == 21
