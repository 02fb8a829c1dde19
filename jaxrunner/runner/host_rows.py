"""What the host keeps of every state row: enough to refuse a plan before it is run and to choose its executables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxrunner.compile.buckets import Feature, Tier, lowest_tier
from jaxrunner.runner.logprob_columns import NO_LOGPROBS, asked_counts
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.block_tables import KVGroup, expand_block_ids


class HostRows:
    """Columns over rows 0..num_rows-1 (row 0 parks). G = KV-cache groups.

    num_blocks: i32[rows, G], kernel blocks in the row's tables. computed: tokens that were scheduled. known: tokens
    that the device has or will have sampled when the steps so far are done. features: bits of
    `Feature`. num_logprobs, num_listed: best ids asked for, or NO_LOGPROBS, and ids listed. num_prompt_scores: tokens
    of the prompt that are to be scored, 0 for none. is_structured: bool[rows], requests with structured_outputs.
    """

    def __init__(self, num_rows: int, groups: Sequence[KVGroup]):
        self.groups = groups
        self.num_blocks = np.zeros((num_rows, len(groups)), np.int32)
        self.computed = np.zeros(num_rows, np.int32)
        self.known = np.zeros(num_rows, np.int32)
        self.features = np.zeros(num_rows, np.int32)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, np.int32)
        self.num_listed = np.zeros(num_rows, np.int32)
        self.num_prompt_scores = np.zeros(num_rows, np.int32)
        self.is_structured = np.zeros(num_rows, bool)

    def occupy(
        self,
        row: int,
        num_tokens: int,
        num_computed_tokens: int,
        params: SamplingParams,
        *,
        vocab_size: int,
        num_prompt_scores: int = 0,
    ) -> None:
        """A request moves in, with no blocks yet."""
        self.clear(row)
        self.computed[row], self.known[row] = num_computed_tokens, num_tokens
        self.features[row] = params.features
        self.num_logprobs[row], self.num_listed[row] = asked_counts(params, vocab_size)
        self.num_prompt_scores[row] = num_prompt_scores
        self.is_structured[row] = params.structured_outputs is not None

    def clear(self, row: int) -> None:
        """The row's request is gone."""
        self.num_blocks[row] = self.computed[row] = self.known[row] = self.features[row] = 0
        self.num_logprobs[row] = NO_LOGPROBS
        self.num_listed[row] = self.num_prompt_scores[row] = 0
        self.is_structured[row] = False

    def tier_of(self, rows: np.ndarray) -> Tier:
        """The tier that serves all of `rows`."""
        return lowest_tier(int(np.bitwise_or.reduce(self.features[rows])))

    def wants_mask(self, rows: np.ndarray) -> np.ndarray:
        """bool[len(rows)]: requests that ask for the ids their tokens are drawn from."""
        return (self.features[rows] & Feature.SAMPLING_MASK) > 0

    def append_blocks(self, row: int, block_ids: Iterable[Sequence[int]]) -> np.ndarray:
        """Count allocator blocks as the row's. Returns the table writes that append them, i32[N, 4]."""
        parts = []
        for g, ids in enumerate(block_ids):
            kernel_ids = expand_block_ids(list(ids), self.groups[g].blocks_per_kv_block)
            start = self.num_blocks[row, g]
            part = np.empty((len(kernel_ids), 4), np.int32)
            part[:, 0], part[:, 1] = g, row
            part[:, 2] = np.arange(start, start + len(kernel_ids))
            part[:, 3] = kernel_ids
            self.num_blocks[row, g] += len(kernel_ids)
            parts.append(part)
        return np.concatenate(parts)

    def advance(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Count a step that was launched: its tokens, and one more known token for each row that samples. Returns which
        do, bool[len(rows)]."""
        self.computed[rows] += counts
        samples = self.computed[rows] == self.known[rows]
        self.known[rows] += samples
        return samples
