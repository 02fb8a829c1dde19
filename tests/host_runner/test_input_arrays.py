"""Input preparation on the host against the NumPy loops, in buffers full of garbage from other steps."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrunner.compile.buckets import Bucket
from jaxrunner.host_runner.input_arrays import HostSizes, upload_layout, write_inputs
from jaxrunner.host_runner.row_fields import NONE, RowBank
from jaxrunner.host_runner.sampling_metadata import SamplingMetadata
from jaxrunner.host_runner.sizes import row_bank
from jaxrunner.host_runner.staging import StagingBuffer
from jaxrunner.state.block_tables import KVGroup
from tests.oracle.input_prep import input_prep

SIZES = HostSizes((KVGroup((0,), None, 4), KVGroup((1,), 6, 8)), 40)
MIXED, DECODE = Bucket("mixed", 24, 8, 24), Bucket("decode", 8, 8)


def random_rows(rng: np.random.Generator, counts: list[int]) -> RowBank:
    rows = row_bank(SIZES, 8)
    for row, count in enumerate(counts):
        rows.scheduled[row] = count
        rows.computed[row] = rng.integers(0, SIZES.max_model_len - count + 1)
        rows.prefill_len[row] = rows.known[row] = rng.integers(1, SIZES.max_model_len)
        rows.number[row] = rng.integers(1, 9)
        rows.prompt_len[row] = rng.integers(1, rows.prefill_len[row] + 1)
        for g, (group, columns) in enumerate(zip(SIZES.groups, SIZES.columns, strict=True)):
            rows.num_blocks[row, g] = -(-(rows.computed[row] + count) // group.block_size)
            held = columns.start + np.arange(rows.num_blocks[row, g])
            rows.block_table[row, held] = rng.integers(1, 500, len(held))
    rows.token_ids[:] = rng.integers(0, 1000, rows.token_ids.shape)
    rows.sampling[: len(counts)] = rng.integers(1, 9, (len(counts), rows.sampling.shape[1]))
    return rows


def written(rows: RowBank, counts: list[int], bucket: Bucket, buffer: StagingBuffer | None = None) -> StagingBuffer:
    buffer = buffer or StagingBuffer(upload_layout(bucket, SIZES))
    metadata = SamplingMetadata.of(rows, len(counts))
    write_inputs(buffer, rows, metadata, np.full(len(counts), NONE), SIZES)
    return buffer


CASES = [(MIXED, [1, 1, 5, 9]), (MIXED, [24]), (MIXED, [3] * 8), (DECODE, [1] * 3), (DECODE, [1] * 8)]
NAMES = ("ragged", "one", "full", "decode", "full-decode")


@pytest.mark.parametrize(("bucket", "counts"), CASES, ids=NAMES)
def test_arrays_equal_the_loops(bucket, counts):
    for seed in range(20):
        rows = random_rows(np.random.default_rng(seed), counts)
        part = written(rows, counts, bucket).parts
        n = len(counts)
        expected = input_prep(
            rows=range(n),
            query_lens=counts,
            computed=rows.computed,
            prefill_len=np.full(8, 99),  # every input id is known to the host
            last_sampled=np.zeros(8, np.int32),
            token_ids=rows.token_ids,
            tables=[rows.block_table[:, columns] for columns in SIZES.columns],
            num_blocks=rows.num_blocks,
            block_sizes=[g.block_size for g in SIZES.groups],
            num_tokens=bucket.num_tokens,
            batch=bucket.num_reqs,
        )
        for name in ("positions", "input_ids", "seq_lens", "logits_indices"):
            np.testing.assert_array_equal(part[name], expected[name], err_msg=name)
        for g, columns in enumerate(SIZES.columns):
            np.testing.assert_array_equal(part["slot_mapping"][g], expected["slot_mapping"][g])
            np.testing.assert_array_equal(part["block_table"][:, columns], expected["block_table"][g])
        starts = np.concatenate([[0], np.cumsum(counts), [sum(counts)] * (bucket.num_reqs - n)])
        np.testing.assert_array_equal(part["query_start_loc"], starts)
        for name, field in {"total_len": "known", "prompt_len": "prompt_len", "number": "number"}.items():
            assert part[name].tolist() == [*getattr(rows, field)[:n]] + [0] * (bucket.num_reqs - n)
        assert int(part["num_reqs"]) == n


@pytest.mark.parametrize(("bucket", "counts"), CASES, ids=NAMES)
def test_a_buffer_full_of_garbage_is_rewritten_whole(bucket, counts):
    """Padding contract: whatever the last step of the bucket left there, an upload is a function of its step alone."""
    rows = random_rows(np.random.default_rng(0), counts)
    clean = written(rows, counts, bucket)
    dirty = StagingBuffer(upload_layout(bucket, SIZES))
    for part in dirty.parts.values():
        part[...] = 40_000
    dirty.num_reqs = bucket.num_reqs
    written(rows, counts, bucket, dirty)
    for name, part in dirty.parts.items():
        np.testing.assert_array_equal(part, clean.parts[name], err_msg=name)


def test_k003_k006_a_smaller_step_after_a_larger_one_leaves_neutral_padding():
    """Five decodes in a bucket of eight, after eight long ones."""
    rng = np.random.default_rng(3)
    buffer = written(random_rows(rng, [1] * 8), [1] * 8, DECODE)
    rows = random_rows(rng, [1] * 5)
    part = written(rows, [1] * 5, DECODE, buffer).parts
    assert part["query_start_loc"].tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert part["seq_lens"].tolist() == [*(rows.computed[:5] + 1), 0, 0, 0]
    assert (part["slot_mapping"][:, 5:] == -1).all()
    assert not part["block_table"][5:].any(), "a padded row names blocks that belong to somebody else by now"


def test_a_bucket_of_one_row_at_the_end_of_the_context():
    """K030: the newest token lies behind the last column of the history; its id comes from the device."""
    bucket = Bucket("decode", 1, 1)
    rows = random_rows(np.random.default_rng(0), [1])
    rows.computed[0] = SIZES.max_model_len
    part = written(rows, [1], bucket).parts
    assert part["positions"].tolist() == [SIZES.max_model_len]
