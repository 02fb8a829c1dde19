"""Input preparation and commit against literal numbers: worked examples, and failures that other runners had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrunner
from jaxrunner.compile.buckets import Bucket
from jaxrunner.models.model import LayerSpec
from jaxrunner.pallas.attention import attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.kv_write import kv_write
from jaxrunner.stages.batch import BatchRequests
from jaxrunner.stages.commit import commit
from jaxrunner.stages.inputs import StepInput
from jaxrunner.stages.prepare_inputs import prepare_inputs
from jaxrunner.state.block_tables import KVGroup, expand_block_ids
from jaxrunner.state.block_writes import no_block_writes
from jaxrunner.state.fields import REQUEST_COLUMN
from tests.stages import harness

COLUMN = REQUEST_COLUMN


def new_state(model=None, *, rows=8, length=128, num_blocks=64, block_size=16, **options):
    model = model or harness.tiny("llama")[0].replace(max_position_embeddings=4096)
    sizes = dict(max_requests=rows, max_model_len=length, num_blocks=num_blocks, block_size=block_size)
    return jaxrunner.init_state(model, **sizes, **options)


def with_rows(state, blocks=None, drafts=None, **columns):
    """The state with some rows' counters set, row -> value, and group 0's tables."""
    counters = np.array(state.requests.counters)
    for name, values in columns.items():
        for row, value in values.items():
            counters[row, COLUMN[name]] = value
    requests = state.requests.replace(counters=jnp.asarray(counters))
    if drafts is not None:
        array = np.array(requests.draft_tokens)
        for row, ids in drafts.items():
            array[row, : len(ids)] = ids
        requests = requests.replace(draft_tokens=jnp.asarray(array))
    table, num_blocks = np.array(state.tables.block_table[0]), np.array(state.tables.num_blocks)
    for row, ids in (blocks or {}).items():
        table[row, : len(ids)] = ids
        num_blocks[row, 0] = len(ids)
    tables = state.tables.replace(block_table=(jnp.asarray(table),), num_blocks=jnp.asarray(num_blocks))
    return state.replace(requests=requests, tables=tables)


def batch_of(state, rows, counts, bucket, drafts=None):
    inputs = StepInput(
        idx_mapping=np.array(rows, np.int32),
        num_scheduled_tokens=np.array(counts, np.int32),
        num_draft_tokens=np.array(drafts or [0] * len(rows), np.int32),
        groups=state.tables.groups,
        block_writes=no_block_writes(),
        num_draft_slots=state.num_draft_tokens,
    )
    return prepare_inputs(state, inputs, bucket=bucket)


def lists(batch, *names):
    return [np.asarray(getattr(batch, name)).tolist() for name in names]


def requests(rows, query_lens, seq_lens, prefill_len, drafts=None):
    as_i32 = [jnp.array(v, jnp.int32) for v in (rows, query_lens, seq_lens, prefill_len, drafts or [0] * len(rows))]
    return BatchRequests(*as_i32)


def counters(state, row):
    return {name: int(np.asarray(state.requests.counters)[row, column]) for name, column in COLUMN.items()}


# Worked examples.


def test_worked_example_of_four_decodes():
    """Computed 1000, 512, 37, 2047 with one token each, and the tail of a bucket of eight."""
    computed = [1000, 512, 37, 2047]
    last = [11, 12, 13, 14]
    rows = [3, 1, 4, 2]
    state = with_rows(
        new_state(length=4096, num_blocks=600),
        num_computed_tokens=dict(zip(rows, computed, strict=True)),
        total_len=dict(zip(rows, [c + 1 for c in computed], strict=True)),
        prefill_len=dict.fromkeys(rows, 30),
        last_sampled_token=dict(zip(rows, last, strict=True)),
        blocks={row: range(128 * i + 1, 128 * i + 130) for i, row in enumerate(rows)},
    )
    batch = batch_of(state, rows, [1] * 4, Bucket("decode", 8, 8))
    assert lists(batch, "query_start_loc", "positions", "seq_lens", "logits_indices", "input_ids") == [
        [0, 1, 2, 3, 4, 4, 4, 4, 4],
        [*computed, 0, 0, 0, 0],
        [1001, 513, 38, 2048, 0, 0, 0, 0],
        [0, 1, 2, 3, 0, 0, 0, 0],
        [*last, 0, 0, 0, 0],
    ]
    blocks = [128 * i + 1 + c // 16 for i, c in enumerate(computed)]
    slots = [b * 16 + c % 16 for b, c in zip(blocks, computed, strict=True)]
    assert batch.slot_mapping[0].tolist() == [*slots, -1, -1, -1, -1]


def test_padding_behind_a_full_batch_is_neutral():
    """Two requests fill the bucket's rows, 11 of its 16 tokens are padding: no row of padding stands behind those."""
    state, rows = jaxrunner.admit(new_state(), [[11, 12, 13], [21, 22]])
    inputs = jaxrunner.plan(state, dict(zip(rows, (3, 2), strict=True)))
    batch = prepare_inputs(state, inputs, bucket=Bucket("mixed", 16, 2, 16))
    assert lists(batch, "query_start_loc", "input_ids", "positions") == [
        [0, 3, 5],
        [11, 12, 13, 21, 22] + [0] * 11,
        [0, 1, 2, 0, 1] + [0] * 11,
    ]
    assert batch.slot_mapping[0].tolist() == [16, 17, 18, 32, 33] + [-1] * 11


def test_post_update_with_rejected_drafts():
    """Row 5 runs 1 + 3 drafts, 2 tokens are kept: computed 100 -> 102, total 101 -> 103."""
    state = with_rows(new_state(), num_computed_tokens={5: 100}, total_len={5: 101}, prefill_len={5: 90})
    sampled = jnp.array([[41, 42, -1, -1], [-1] * 4], jnp.int32)
    after = commit(
        state, requests([5, 0], [4, 0], [104, 0], [90, 0], [3, 0]), sampled, jnp.array([2, 0]), jnp.array([2, 0])
    )
    row = counters(after, 5)
    assert (row["num_computed_tokens"], row["total_len"], row["last_sampled_token"]) == (102, 103, 42)
    history = np.asarray(after.requests.token_ids)
    assert history[5, 101:103].tolist() == [41, 42]
    assert np.count_nonzero(history) == 2
    assert not np.asarray(after.requests.counters)[[0, 1, 2, 3, 4, 6, 7, 8]].any()


def test_commit_drops_padding_whatever_it_holds():
    """Rows that map to the parking row write nothing, even with junk lengths and samples; rows in any order."""
    state = with_rows(new_state(), num_computed_tokens={6: 3, 2: 9}, total_len={6: 4, 2: 10}, prefill_len={6: 4, 2: 8})
    batch = requests([6, 0, 2, 0], [1, 99, 1, -5], [4, 7, 10, 9], [4, 1, 8, 0])
    after = commit(state, batch, jnp.array([[50], [51], [52], [53]], jnp.int32), jnp.array([1, 1, 1, 1], jnp.int32))
    assert not np.asarray(after.requests.counters)[0].any()
    assert not np.asarray(after.requests.token_ids)[0].any()
    assert [counters(after, 6)[n] for n in ("num_computed_tokens", "total_len", "last_sampled_token")] == [4, 5, 50]
    assert [counters(after, 2)[n] for n in ("num_computed_tokens", "total_len", "last_sampled_token")] == [10, 11, 52]
    history = np.asarray(after.requests.token_ids)
    assert (history[6, 4], history[2, 10], np.count_nonzero(history)) == (50, 52, 2)


def test_chunked_prefill_samples_only_at_its_end():
    """600 tokens, 512 then 88: no sample after the first chunk, one after the second."""
    blocks = {3: range(1, 39)}
    state = with_rows(new_state(length=1024), prefill_len={3: 600}, total_len={3: 600}, blocks=blocks)
    first = batch_of(state, [3], [512], Bucket("mixed", 512, 2, 512)).requests
    assert (first.seq_lens.tolist(), first.samples.tolist()) == ([512, 0], [False, False])
    state = commit(state, first, jnp.full((2, 1), -1, jnp.int32), first.samples.astype(jnp.int32))
    assert [counters(state, 3)[n] for n in ("num_computed_tokens", "total_len")] == [512, 600]
    second = batch_of(state, [3], [88], Bucket("mixed", 512, 2, 512)).requests
    assert (second.seq_lens.tolist(), second.samples.tolist()) == ([600, 0], [True, False])


def test_a_prefill_row_with_drafts_listed_keeps_its_ids():
    """seq_len <= prefill_len: known tokens stay, stale drafts do not replace them."""
    state = new_state(num_draft_tokens=2)
    known = np.array(state.requests.token_ids)
    known[1, :12] = np.arange(100, 112)
    state = state.replace(requests=state.requests.replace(token_ids=jnp.asarray(known)))
    state = with_rows(state, prefill_len={1: 12}, total_len={1: 12}, drafts={1: [5, 6]}, blocks={1: [1]})
    state = with_rows(state, num_computed_tokens={1: 8})
    batch = batch_of(state, [1], [4], Bucket("mixed", 8, 2, 8), drafts=[2])
    assert lists(batch, "input_ids", "positions") == [[108, 109, 110, 111, 0, 0, 0, 0], [8, 9, 10, 11, 0, 0, 0, 0]]


def test_decode_with_two_drafts():
    """The last sampled token and its drafts; three logits rows."""
    state = with_rows(
        new_state(num_draft_tokens=2),
        num_computed_tokens={4: 10},
        total_len={4: 11},
        prefill_len={4: 8},
        last_sampled_token={4: 77},
        drafts={4: [5, 6]},
        blocks={4: [1]},
    )
    batch = batch_of(state, [4], [3], Bucket("decode", 6, 2, 3), drafts=[2])
    assert lists(batch, "query_start_loc", "input_ids", "positions", "seq_lens", "logits_indices") == [
        [0, 3, 3],
        [77, 5, 6, 0, 0, 0],
        [10, 11, 12, 0, 0, 0],
        [13, 0],
        [0, 1, 2, 0, 0, 0],
    ]


# Failures that other runners had.


def test_k001_padding_does_not_write_the_last_slot():
    cache = jnp.zeros((1, 2, 5, 16, 1, 2)).at[:, :, 4, 15].set(7.0)
    rows = jnp.ones((8, 1, 2))
    after = np.asarray(kv_write(cache, jnp.int32(0), rows, rows, jnp.array([0, 1, 2] + [-1] * 5, jnp.int32)))
    assert (after[:, :, 0, :3] == 1).all()
    assert (after[:, :, 4, 15] == 7).all()
    assert np.count_nonzero(after) == 2 * (3 * 2 + 2)


def test_k002_as_many_slots_are_written_as_there_are_tokens():
    """Bucket of 16, 10 tokens: ten slots change, in every layer."""
    model, weights = harness.tiny("llama")
    state, rows = jaxrunner.admit(new_state(model), [list(range(10, 20))])
    inputs = jaxrunner.plan(state, {rows[0]: 10})
    after, _ = harness.run(model, weights, state, inputs, Bucket("mixed", 16, 4, 16))
    changed = (np.asarray(after.kv.blocks[0]) != 0).any(axis=(1, 4, 5))
    assert changed.sum(axis=(1, 2)).tolist() == [10] * 3
    assert changed[:, 1, :10].all()


@pytest.mark.parametrize("query_len", [1, None])
def test_k003_a_padded_row_walks_no_keys(query_len):
    """Its length is 0, its output zero, and NaN behind its stale table row goes nowhere."""
    blocks = jnp.full((1, 2, 12, 16, 1, 4), jnp.nan).at[:, :, :4].set(1.0)
    table = np.zeros((4, 128), np.int32)
    table[:3, 0], table[3, :2] = [1, 2, 3], [7, 8]
    metadata = metadata_of([0, 1, 2, 3, 3 if query_len is None else 4], [5, 9, 16, 0], table, query_len)
    out = np.asarray(attention(jnp.ones((4, 1, 4)), blocks, jnp.int32(0), metadata, scale=1.0))
    np.testing.assert_array_equal(out, np.array([1, 1, 1, 0.0])[:, None, None] * np.ones((4, 1, 4)))


def test_k006_sizes_are_padded_before_the_metadata_is_built():
    lengths = [4, 9, 16, 17, 30]
    blocks = {row: [2 * row - 1, 2 * row] for row in range(1, 6)}
    computed = {row: n - 1 for row, n in enumerate(lengths, 1)}
    state = with_rows(new_state(), blocks=blocks, num_computed_tokens=computed)
    batch = batch_of(state, [1, 2, 3, 4, 5], [1] * 5, Bucket("decode", 8, 8))
    slots = [blocks[row][(n - 1) // 16] * 16 + (n - 1) % 16 for row, n in enumerate(lengths, 1)]
    assert lists(batch, "query_start_loc", "seq_lens") == [[0, 1, 2, 3, 4, 5, 5, 5, 5], [*lengths, 0, 0, 0]]
    assert batch.slot_mapping[0].tolist() == [*slots, -1, -1, -1]
    assert batch.block_table[0].shape[0] == 8


@pytest.mark.parametrize("query_len", [1, None])
def test_k007_keys_past_the_end_do_not_enter_the_mean(query_len):
    """24 keys in blocks of 8, query 0, values 1: the output is exactly 1."""
    blocks = jnp.zeros((1, 2, 9, 8, 1, 4)).at[:, 1, 1:4].set(1.0)
    table = np.zeros((1, 128), np.int32)
    table[0, :4] = [1, 2, 3, 4]
    metadata = metadata_of([0, 1], [24], table, query_len)
    out = attention(jnp.zeros((1, 1, 4)), blocks, jnp.int32(0), metadata, scale=1.0)
    np.testing.assert_array_equal(np.asarray(out), 1.0)


def test_k019_logits_are_those_of_each_last_token():
    """Prompts of 3 and 5: hidden rows 2 and 7, and the tokens of each prompt alone."""
    model, weights = harness.tiny("llama")
    prompts = [[5, 6, 7], [50, 60, 70, 80, 90]]
    bucket = Bucket("mixed", 16, 4, 16)
    state, rows = jaxrunner.admit(new_state(model), prompts)
    inputs = jaxrunner.plan(state, dict(zip(rows, (3, 5), strict=True)))
    assert prepare_inputs(state, inputs, bucket=bucket).logits_indices[:2].tolist() == [2, 7]
    _, together = harness.run(model, weights, state, inputs, bucket)
    alone = []
    for row, count in zip(rows, (3, 5), strict=True):
        _, output = harness.run(model, weights, state, jaxrunner.plan(state, {row: count}), bucket)
        alone.append(output.sampled_token_ids[0].tolist())
    assert together.sampled_token_ids[:2].tolist() == alone
    assert alone[0] != alone[1]


def test_k021_a_chunk_sees_the_keys_up_to_its_end():
    """Prompt 10 in chunks of 4 over a cache of NaN: lengths 4, 8, 10, nothing NaN."""
    model, weights = harness.tiny("llama")
    state, (row,) = jaxrunner.admit(new_state(model), [list(range(1, 11))])
    state = state.replace(kv=state.kv.replace(blocks=(jnp.full_like(state.kv.blocks[0], jnp.nan),)))
    bucket, lengths = Bucket("mixed", 16, 4, 16), []
    for count in (4, 4, 2):
        inputs = jaxrunner.plan(state, {row: count})
        lengths.append(int(prepare_inputs(state, inputs, bucket=bucket).seq_lens[0]))
        state, output = harness.run(model, weights, state, inputs, bucket)
        assert np.isfinite(np.asarray(output.hidden)).all()
    assert lengths == [4, 8, 10]


def test_k031_tables_hold_kernel_blocks():
    """Allocator blocks of 32 as kernel blocks of 16: position 40 of [3, 5] is slot 168."""
    assert expand_block_ids([3, 5], 2) == [6, 7, 10, 11]
    state = new_state(blocks_per_kv_block=2)
    state = with_rows(state, blocks={1: expand_block_ids([3, 5], 2)}, num_computed_tokens={1: 40})
    assert batch_of(state, [1], [1], Bucket("decode", 2, 2)).slot_mapping[0].tolist() == [168, -1]


def metadata_of(starts, seq_lens, table, query_len):
    return AttentionMetadata(
        query_start_loc=jnp.array(starts, jnp.int32),
        seq_lens=jnp.array(seq_lens, jnp.int32),
        num_reqs=jnp.int32(len(seq_lens)),
        block_table=jnp.asarray(table),
        slot_mapping=jnp.zeros(starts[-1], jnp.int32),
        query_len=query_len,
    )


@pytest.mark.parametrize("query_len", [1, None])
def test_k034_a_window_is_a_layers_own(query_len):
    """Twelve one-hot values: the windowed call weighs keys 8..11, the global one over the same blocks all twelve."""
    blocks = jnp.zeros((2, 2, 4, 4, 1, 12)).at[:, 1, 1:4].set(jnp.eye(12).reshape(3, 4, 1, 12))
    table = np.zeros((1, 128), np.int32)
    table[0, :3] = [1, 2, 3]
    metadata = metadata_of([0, 1], [12], table, query_len)
    for layer, window, first in ((0, 4, 8), (1, None, 0)):
        out = attention(jnp.zeros((1, 1, 12)), blocks, jnp.int32(layer), metadata, scale=1.0, window=window)
        expected = [0.0] * first + [1 / (12 - first)] * (12 - first)
        np.testing.assert_allclose(np.asarray(out)[0, 0], expected, rtol=1e-6)


def test_k034_shared_and_split_groups_give_the_same():
    """Windowed and global layers in one group or in two: equal hidden states, bit for bit."""
    model, weights = harness.tiny("llama", (4, None, 4))
    split, rows = jaxrunner.admit(new_state(model), [list(range(30, 42))])
    assert len(split.tables.groups) == 2
    shared, _ = jaxrunner.admit(new_state(model, groups=(KVGroup((0, 1, 2)),)), [list(range(30, 42))])
    bucket, outputs = Bucket("mixed", 16, 4, 16), []
    for state in (split, shared):
        outputs.append(harness.run(model, weights, state, jaxrunner.plan(state, {rows[0]: 12}), bucket)[1])
    assert outputs[0].hidden[:12].tolist() == outputs[1].hidden[:12].tolist()


def test_k035_positions_come_from_the_request_not_from_a_window():
    """Window 4 on the first layer, 10 tokens cached: the next position is 10."""
    model = harness.tiny("llama")[0].replace(layers=(LayerSpec(4), LayerSpec(None), LayerSpec(None)))
    state, (row,) = jaxrunner.admit(new_state(model), [list(range(1, 12))])
    counters = state.requests.counters.at[row, COLUMN["num_computed_tokens"]].set(10)
    state = state.replace(requests=state.requests.replace(counters=counters))
    batch = prepare_inputs(state, jaxrunner.plan(state, {row: 1}), bucket=Bucket("decode", 1, 1))
    assert (batch.positions.tolist(), batch.seq_lens.tolist()) == ([10], [11])


def test_k040_the_token_after_a_full_context_is_stored_nowhere():
    """A prompt of max_model_len 16: one token is sampled and counted; no row has an index 16 to hold it."""
    state = new_state(length=16)
    known = np.arange(1, 16 * 9 + 1, dtype=np.int32).reshape(9, 16)
    state = state.replace(requests=state.requests.replace(token_ids=jnp.asarray(known)))
    state = with_rows(state, prompt_len={2: 16}, prefill_len={2: 16}, total_len={2: 16})
    after = commit(state, requests([2], [16], [16], [16]), jnp.array([[77]], jnp.int32), jnp.array([1], jnp.int32))
    np.testing.assert_array_equal(np.asarray(after.requests.token_ids), known)
    row = counters(after, 2)
    assert (row["total_len"], row["num_computed_tokens"], row["last_sampled_token"]) == (17, 16, 77)


@pytest.mark.parametrize("query_len", [1, None])
def test_k128_one_query_sees_all_keys_up_to_its_own(query_len):
    """Index 3 of a cache of 6: equal weights on keys 0..3."""
    blocks = jnp.zeros((1, 2, 3, 6, 1, 6)).at[0, 1, 1, :, 0].set(jnp.eye(6))
    table = np.zeros((1, 128), np.int32)
    table[0, 0] = 1
    out = attention(jnp.zeros((1, 1, 6)), blocks, jnp.int32(0), metadata_of([0, 1], [4], table, query_len), scale=1.0)
    np.testing.assert_array_equal(np.asarray(out)[0, 0], [0.25] * 4 + [0, 0])


GENERATE = """
import jax, numpy as np, jaxrunner
from jaxrunner import SamplingParams
from jaxrunner.compile.buckets import Bucket
from jaxrunner.models.loading import load

def tokens():
    model, weights, _ = load({tiny!r})
    state = jaxrunner.init_state(model, max_requests=3, max_model_len=64, num_blocks=12)
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=2**40 + 5)]
    state, rows = jaxrunner.admit(state, [[1, 2, 3, 4], [9, 8, 7]], params)
    run = jax.jit(jaxrunner.step, static_argnames=("model", "bucket"))
    out = []
    for i in range(6):
        inputs = jaxrunner.plan(state, dict(zip(rows, (1, 1) if i else (4, 3))))
        bucket = Bucket("decode", 2, 2, 1, "random") if i else Bucket("mixed", 8, 2, 8, "random")
        state, output = run(model, weights, state, inputs.pack(bucket), bucket=bucket)
        out.append(np.asarray(output.sampled_token_ids)[:, 0].tolist())
    assert all(x.dtype in ("int32", "float32") for x in jax.tree.leaves(state)), jax.tree.map(lambda x: x.dtype, state)
    return out
"""


def test_k129_tokens_are_the_same_with_64_bit_numbers_on():
    """A whole generation with jax_enable_x64, in a process of its own; the state keeps its 32-bit types."""
    source = GENERATE.format(tiny=str(harness.TINY / "llama"))
    namespace: dict = {}
    exec(source, namespace)
    expected = namespace["tokens"]()
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": jax.default_backend()}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(jax.config.read("jax_disable_most_optimizations"))
    command = [sys.executable, "-W", "error", "-c", source + "print(tokens())"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == str(expected)
