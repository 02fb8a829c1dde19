"""Input preparation on the CPU: from dense rows to the flat arrays of one step, vectorised NumPy, in the upload itself.

Nothing is masked on the device: what a staging buffer holds past the live rows and tokens is written here at every
step, because it still holds what an earlier step of the bucket left there. Source: vLLM V1, `_prepare_inputs`.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxrunner.compile.buckets import Bucket
from jaxrunner.host_runner.row_fields import NONE, RowBank
from jaxrunner.host_runner.sampling_metadata import SamplingMetadata
from jaxrunner.host_runner.staging import StagingBuffer
from jaxrunner.state.block_tables import NULL_BLOCK, PAD_SLOT_ID, KVGroup, table_width
from jaxrunner.state.codec import Layout
from jaxrunner.state.fields import SAMPLING_FIELDS
from jaxrunner.state.reports import DEFAULT_REPORTS, Reports
from jaxrunner.state.request_arrays import ArraySets
from jaxrunner.state.request_lists import DEFAULT_LIST_SIZES, ListSizes
from jaxrunner.state.sampling import ThinkingTokens


@dataclasses.dataclass(frozen=True)
class HostSizes:
    """What is static in every step of a `HostRunner`: see `RunnerConfig` and `KVGroup`. custom: the arrays that the
    user's logits processors and sampler declare."""

    groups: tuple[KVGroup, ...]
    max_model_len: int
    list_sizes: ListSizes = DEFAULT_LIST_SIZES
    thinking: ThinkingTokens | None = None
    reports: Reports = DEFAULT_REPORTS
    custom: ArraySets = ()

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Columns of each group's block table."""
        return tuple(table_width(self.max_model_len, g.block_size, 1) for g in self.groups)

    @functools.cached_property
    def blocks_per_kv_block(self) -> np.ndarray:
        """i32[G], kernel blocks in an allocator block."""
        return np.array([group.blocks_per_kv_block for group in self.groups], np.int32)

    @functools.cached_property
    def columns(self) -> tuple[slice, ...]:
        """Each group's columns in the block table of all groups."""
        ends = np.cumsum(self.widths).tolist()
        return tuple(slice(end - width, end) for end, width in zip(ends, self.widths, strict=True))


def upload_layout(bucket: Bucket, sizes: HostSizes) -> Layout:
    """Sections of a step's upload: B requests and T tokens of the bucket, G KV-cache groups, W columns of all tables.

    total_len: tokens that there are, those of steps in flight included; a row that computes the last of them samples.
    newest_row: row in the step before, if that is in flight: what it samples is the last input id of this one. number:
    of the requests, see `ROW_FIELDS`. The others are the arrays of vLLM by their names.
    """
    b, t = bucket.num_reqs, bucket.num_tokens
    return Layout(
        (
            ("num_reqs", ()),
            ("query_start_loc", (b + 1,)),
            ("seq_lens", (b,)),
            ("total_len", (b,)),
            ("newest_row", (b,)),
            ("logits_indices", (b,)),
            ("prompt_len", (b,)),
            ("number", (b,)),
            ("params", (b, len(SAMPLING_FIELDS))),
            ("input_ids", (t,)),
            ("positions", (t,)),
            ("slot_mapping", (len(sizes.groups), t)),
            ("block_table", (b, sum(sizes.widths))),
        )
    )


def write_inputs(
    buffer: StagingBuffer, rows: RowBank, metadata: SamplingMetadata, newest_row: np.ndarray, sizes: HostSizes
) -> None:
    """Write a step of the first B rows into `buffer`, whatever that held.

    rows: `scheduled` says how many tokens each row runs, from `computed` on. newest_row: i32[B], see `upload_layout`.
    """
    part, num_reqs = buffer.parts, metadata.num_reqs
    counts, computed = rows.scheduled[:num_reqs], rows.computed[:num_reqs]
    part["num_reqs"][...] = num_reqs
    starts = part["query_start_loc"]
    starts[0] = 0
    np.cumsum(counts, out=starts[1 : num_reqs + 1])
    num_tokens = int(starts[num_reqs])
    starts[num_reqs + 1 :] = num_tokens

    _set(part["seq_lens"], computed + counts, 0)
    _set(part["total_len"], rows.known[:num_reqs], 0)
    _set(part["newest_row"], newest_row, NONE)
    _set(part["logits_indices"], starts[1 : num_reqs + 1] - 1, 0)
    if buffer.metadata is not metadata:  # most steps have those of the step before
        _set(part["prompt_len"], metadata.prompt_len, 0)
        _set(part["number"], metadata.number, 0)
        _set(part["params"], metadata.params, 0)
        buffer.metadata = metadata

    if num_tokens == num_reqs:
        row, positions = np.arange(num_reqs), computed
    else:
        row = np.repeat(np.arange(num_reqs), counts)
        positions = np.arange(num_tokens) + (computed - starts[:num_reqs])[row]
    _set(part["positions"], positions, 0)
    _set(part["input_ids"], rows.token_ids[row, np.minimum(positions, rows.token_ids.shape[1] - 1)], 0)
    for slots, group, columns in zip(part["slot_mapping"], sizes.groups, sizes.columns, strict=True):
        block, offset = np.divmod(positions, group.block_size)
        _set(slots, rows.block_table[row, columns.start + block] * group.block_size + offset, PAD_SLOT_ID)
    part["block_table"][:num_reqs] = rows.block_table[:num_reqs]
    part["block_table"][num_reqs : buffer.num_reqs] = NULL_BLOCK
    buffer.num_reqs = num_reqs


def _set(section: np.ndarray, values: np.ndarray, padding: int) -> None:
    section[: len(values)] = values
    section[len(values) :] = padding
