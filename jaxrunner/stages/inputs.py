"""`StepInput`: what the host says about one step, readable; and its packed form, one int32 vector a bucket."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxrunner.compile.buckets import Bucket, Tier
from jaxrunner.errors import CapacityError
from jaxrunner.state.block_tables import KVGroup
from jaxrunner.state.block_writes import check_block_writes, no_block_writes
from jaxrunner.state.codec import Layout


@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step's batch, in batch order. NumPy only; nothing of it is written after the step was launched.

    idx_mapping: i32[B], state row of each request. num_scheduled_tokens: i32[B], tokens to run, drafts included.
    num_draft_tokens: i32[B]. block_writes: i32[N, 4], blocks that join the tables before the step.
    groups: the state's KV-cache groups. num_draft_slots: K of the state. tier: what the sampler must do.
    keeps_tokens: the hidden states of all tokens are needed after the step, which only ragged steps keep.
    """

    idx_mapping: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_draft_tokens: np.ndarray
    groups: tuple[KVGroup, ...]
    block_writes: np.ndarray = dataclasses.field(default_factory=no_block_writes)
    num_draft_slots: int = 0
    tier: Tier = "greedy"
    keeps_tokens: bool = False

    @property
    def num_reqs(self) -> int:
        return len(self.idx_mapping)

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    @functools.cached_property
    def max_query_len(self) -> int:
        return int(self.num_scheduled_tokens.max(initial=0))

    @property
    def uniform_query_len(self) -> int | None:
        """Tokens per request if all have the same number, else None (vLLM's uniform-decode predicate)."""
        longest = self.max_query_len
        return longest if self.num_reqs and longest * self.num_reqs == self.num_tokens else None

    def layout(self, bucket: Bucket) -> Layout:
        return step_layout(bucket, self.groups, self.num_draft_slots)

    def pack(self, bucket: Bucket) -> np.ndarray:
        """The upload for `bucket`, i32[n]. Raises CapacityError when the step does not fit, naming what is too many."""
        check_block_writes(self.block_writes)
        return self.pack_with(self.block_writes, bucket)

    def pack_with(self, block_writes: np.ndarray, bucket: Bucket) -> np.ndarray:
        """A fresh upload of this batch with these blocks, i32[N, 4], which are of distinct cells. All but the blocks is
        packed once, however often the batch runs."""
        if (known := self._packed.get(bucket)) is None:
            check_fits(self, bucket)
            layout = self.layout(bucket)
            known = self._packed[bucket] = layout, layout.pack(self._batch_sections(bucket))
        layout, packed = known
        return layout.with_rows(packed, "block_writes", block_writes, counted_in="num_block_writes")

    @functools.cached_property
    def _packed(self) -> dict[Bucket, tuple[Layout, np.ndarray]]:
        """Uploads without block writes."""
        return {}

    def _batch_sections(self, bucket: Bucket) -> dict[str, np.ndarray | int | list]:
        starts = np.full(bucket.num_reqs + 1, self.num_tokens, np.int32)
        starts[0] = 0
        np.cumsum(self.num_scheduled_tokens, out=starts[1 : self.num_reqs + 1])
        values: dict[str, np.ndarray | int | list] = {
            "num_reqs": self.num_reqs,
            "idx_mapping": self.idx_mapping,
            "query_start_loc": starts,
        }
        if self.num_draft_slots:
            values["num_draft_tokens"] = self.num_draft_tokens
        return values


@functools.lru_cache
def step_layout(bucket: Bucket, groups: tuple[KVGroup, ...], num_draft_slots: int = 0) -> Layout:
    """Sections of a step's upload. Blocks: as many as the bucket's tokens can newly touch, in every group."""
    sections: list[tuple[str, tuple[int, ...]]] = [
        ("num_reqs", ()),
        ("num_block_writes", ()),
        ("idx_mapping", (bucket.num_reqs,)),
        ("query_start_loc", (bucket.num_reqs + 1,)),
        ("block_writes", (block_write_capacity(bucket, groups), 4)),
    ]
    if num_draft_slots:
        sections.append(("num_draft_tokens", (bucket.num_reqs,)))
    return Layout(tuple(sections))


def block_write_capacity(bucket: Bucket, groups: tuple[KVGroup, ...]) -> int:
    """Staged block writes that one upload holds. A longer list goes through the admit executable."""
    return sum(
        bucket.num_reqs * g.blocks_per_kv_block + -(-(bucket.num_tokens - bucket.num_reqs) // g.block_size)
        for g in groups
    )


def check_fits(inputs: StepInput, bucket: Bucket) -> None:
    """Raises CapacityError unless the batch of `inputs` can run in `bucket`."""
    if inputs.num_reqs > bucket.num_reqs or inputs.num_tokens > bucket.num_tokens:
        raise CapacityError(
            f"{inputs.num_reqs} requests with {inputs.num_tokens} tokens do not fit {bucket}; "
            "take a larger bucket: Ladder.pick(inputs)"
        )
    if bucket.kind == "decode" and inputs.uniform_query_len != bucket.query_len:
        raise CapacityError(
            f"{bucket} needs {bucket.query_len} token(s) for every request; this step has "
            f"{inputs.num_scheduled_tokens.tolist()}. Use a mixed bucket."
        )
