"""What the host keeps of every state row: enough to refuse a plan before it is run and to choose its executables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrunner.compile.buckets import Feature, Tier, lowest_tier
from jaxrunner.runner.block_lists import BlockLists
from jaxrunner.runner.logprob_columns import NO_LOGPROBS, asked_counts
from jaxrunner.runner.output import Asked
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.block_tables import KVGroup
from jaxrunner.state.block_writes import BLOCK, COLUMN, GROUP, ROW


class RowFacts(NamedTuple):
    """What stays as it is while B rows keep their requests. tier: that serves all of them. is_structured: bool[B],
    requests with structured_outputs; has_grammar: there is one. asked: what goes into the output beside tokens.
    """

    tier: Tier
    is_structured: np.ndarray
    has_grammar: bool
    asked: Asked


class HostRows:
    """Columns over rows 0..num_rows-1 (row 0 parks). G = KV-cache groups.

    num_blocks: i32[rows, G], kernel blocks in the row's tables. computed: tokens that were scheduled. known: tokens
    that the device has or will have sampled when the steps so far are done. features: bits of
    `Feature`. num_logprobs, num_listed: best ids asked for, or NO_LOGPROBS, and ids listed. num_prompt_scores: tokens
    of the prompt that are to be scored, 0 for none. is_structured: bool[rows], requests with structured_outputs.
    """

    def __init__(self, num_rows: int, groups: Sequence[KVGroup]):
        self.groups = groups
        self.blocks_per_kv_block = np.array([group.blocks_per_kv_block for group in groups], np.int32)
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

    def facts(self, rows: np.ndarray) -> RowFacts:
        """rows: i32[B]."""
        features, is_structured = self.features[rows], self.is_structured[rows]
        wants_mask = (features & Feature.SAMPLING_MASK) > 0
        return RowFacts(
            tier=lowest_tier(int(np.bitwise_or.reduce(features))),
            is_structured=is_structured,
            has_grammar=bool(is_structured.any()),
            asked=Asked(self.num_logprobs[rows], self.num_listed[rows], wants_mask),
        )

    def append_blocks(self, rows: np.ndarray, blocks: BlockLists) -> np.ndarray:
        """Count kernel blocks as those of distinct rows. Returns the table writes that append them, i32[N, 4]."""
        held, sizes, flat = self.num_blocks[rows], blocks.sizes, blocks.sizes.ravel()
        self.num_blocks[rows] = held + sizes
        first = np.empty((*sizes.shape, 4), np.int32)  # of each list, as if its first place were that among all writes
        first[..., GROUP] = np.arange(len(self.groups))
        first[..., ROW] = rows[:, None]
        first[..., COLUMN] = held - (flat.cumsum() - flat).reshape(sizes.shape)
        writes = np.repeat(first.reshape(-1, 4), flat, axis=0)
        writes[:, COLUMN] += np.arange(len(writes), dtype=np.int32)
        writes[:, BLOCK] = blocks.ids
        return writes

    def advance(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Count a step that was launched: its tokens, and one more known token for each row that samples. Returns which
        do, bool[len(rows)]."""
        ends, known = self.computed[rows] + counts, self.known[rows]
        samples = ends == known
        self.computed[rows], self.known[rows] = ends, known + samples
        return samples
