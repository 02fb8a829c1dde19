"""What the host keeps of every state row: enough to refuse a plan before it is run and to choose its executables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrunner.compile.buckets import Feature, Tier, lowest_tier
from jaxrunner.runner.block_lists import BlockLists
from jaxrunner.runner.logprob_columns import NO_LOGPROBS, asked_counts
from jaxrunner.runner.output import Asked
from jaxrunner.runner.plan_columns import CheckedPlan, Growth
from jaxrunner.runner.steady_steps import SteadySteps
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
    A steady decode enters its steps into none of them until somebody reads one, see `SteadySteps`.
    """

    def __init__(self, num_rows: int, groups: Sequence[KVGroup], max_model_len: int):
        self.groups = groups
        self.max_model_len = max_model_len
        self._block_sizes = np.array([group.block_size for group in groups], np.int32)
        self._group_numbers = np.arange(len(groups), dtype=np.int32)
        self.blocks_per_kv_block = np.array([group.blocks_per_kv_block for group in groups], np.int32)
        self.num_blocks = np.zeros((num_rows, len(groups)), np.int32)
        self._computed = np.zeros(num_rows, np.int32)
        self._known = np.zeros(num_rows, np.int32)
        self.features = np.zeros(num_rows, np.int32)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, np.int32)
        self.num_listed = np.zeros(num_rows, np.int32)
        self.num_prompt_scores = np.zeros(num_rows, np.int32)
        self.is_structured = np.zeros(num_rows, bool)
        self._steady: SteadySteps | None = None
        self._sampled: np.ndarray | None = None

    @property
    def computed(self) -> np.ndarray:
        self._settle()
        return self._computed

    @property
    def known(self) -> np.ndarray:
        self._settle()
        return self._known

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
        before = self.num_blocks[rows]
        self.num_blocks[rows] = before + blocks.sizes
        return self._writes(rows, before, blocks)

    def grow(self, growth: Growth) -> np.ndarray:
        """`append_blocks` of known requests."""
        self.num_blocks[growth.rows] = growth.held
        return self._writes(growth.rows, growth.before, growth.blocks)

    def _writes(self, rows: np.ndarray, before: np.ndarray, blocks: BlockLists) -> np.ndarray:
        sizes = blocks.sizes
        writes = np.empty((*sizes.shape, 4), np.int32)
        writes[..., GROUP] = self._group_numbers
        writes[..., ROW] = rows[:, None]
        writes[..., COLUMN] = before
        writes = writes.reshape(-1, 4)
        if len(blocks.ids) != len(writes) or not sizes.all():
            flat = sizes.ravel()
            writes[:, COLUMN] -= flat.cumsum() - flat  # of each list, as if its first place were that among all writes
            writes = np.repeat(writes, flat, axis=0)
            writes[:, COLUMN] += np.arange(len(writes), dtype=np.int32)
        writes[:, BLOCK] = blocks.ids
        return writes

    def may_go_on(self, plan: CheckedPlan) -> bool:
        """Whether `plan` stays within all limits because it repeats the step before, in which each of its requests got
        a token. False where that is not enough to know it."""
        rows, growth = plan.columns.rows, plan.growth
        if self._steady is None:
            if rows is not self._sampled or plan.columns.total != len(rows):
                return False
            self._steady = SteadySteps(rows, self._computed[rows], self._limits(self.num_blocks[rows]))
        elif rows is not self._steady.rows:
            return False
        if growth is None:
            return self._steady.have_room()
        return self._steady.have_room(growth.places, self._limits(growth.held))

    def advance(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Count a step that was launched: its tokens, and one more known token for each row that samples. Returns which
        do, bool[len(rows)]."""
        steady = self._steady
        if steady is not None and rows is steady.rows:
            steady.advance()
            return steady.samples
        self._settle()
        ends, known = self._computed[rows] + counts, self._known[rows]
        samples = ends == known
        self._computed[rows], self._known[rows] = ends, known + samples
        self._sampled = rows if samples.all() else None
        return samples

    def _limits(self, num_blocks: np.ndarray) -> np.ndarray:
        """i32[n], most tokens of requests with so many blocks, i32[n, G]."""
        return np.minimum(np.minimum.reduce(num_blocks * self._block_sizes, axis=1), self.max_model_len)

    def _settle(self) -> None:
        """Enter the steps of a steady decode into the columns."""
        if (steady := self._steady) is not None:
            self._computed[steady.rows] += steady.count
            self._known[steady.rows] += steady.count
            self._steady = self._sampled = None
