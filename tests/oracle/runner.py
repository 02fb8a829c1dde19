"""An independent runner for scheduler tests: plain Python, no device, no code of the package.

It obeys the contract and checks the plan while it does: KV is modelled as "which prefix was this slot computed for", so
a block that is shared, reused or forgotten wrongly is seen at the next token that reads it. The next token of a
sequence is a fixed function of all its tokens.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

VOCAB = 97


def next_token(tokens: list[int]) -> int:
    """What this "model" samples after `tokens`."""
    return int.from_bytes(hashlib.sha256(repr(tokens).encode()).digest()[:4], "little") % VOCAB


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def prefix_name(tokens: list[int]) -> bytes:
    return hashlib.sha256(repr(tokens).encode()).digest()


class OracleRunner:
    """max_num_seqs rows, blocks of block_size tokens. One KV-cache group."""

    def __init__(self, max_num_seqs: int, num_blocks: int, block_size: int, max_num_batched_tokens: int):
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.budget = max_num_batched_tokens
        self.requests: dict[str, SimpleNamespace] = {}
        self.kv: dict[tuple[int, int], bytes] = {}
        self.steps = 0

    def step(self, plan) -> SimpleNamespace:
        """Run a plan; an object with req_ids and sampled_token_ids."""
        self.steps += 1
        for req_id in plan.finished_req_ids | (plan.preempted_req_ids or set()):
            self.requests.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.requests, "a new request must be unknown or finished first"
            known = list(new.prefill_token_ids or new.prompt_token_ids)
            assert known[: len(new.prompt_token_ids)] == new.prompt_token_ids
            assert 0 <= new.num_computed_tokens < len(known)
            self.requests[new.req_id] = SimpleNamespace(
                tokens=known, prefill=len(known), computed=new.num_computed_tokens, blocks=list(new.block_ids[0])
            )
        cached = plan.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.requests[req_id].blocks += blocks[0] if blocks else []
        assert len(self.requests) <= self.max_num_seqs
        assert sum(plan.num_scheduled_tokens.values()) == plan.total_num_scheduled_tokens <= self.budget
        assert set(plan.num_scheduled_tokens) == set(cached.req_ids) | {r.req_id for r in plan.scheduled_new_reqs}
        sampled = [self._run(req_id, count) for req_id, count in plan.num_scheduled_tokens.items()]
        return SimpleNamespace(req_ids=list(plan.num_scheduled_tokens), sampled_token_ids=sampled)

    def _run(self, req_id: str, count: int) -> list[int]:
        r = self.requests[req_id]
        assert count > 0
        assert r.computed + count <= len(r.tokens), "tokens were scheduled that nobody knows"
        assert all(0 < b < self.num_blocks for b in r.blocks)
        assert len(r.blocks) * self.block_size >= r.computed + count, "not enough blocks"
        for position in range(r.computed):
            assert self.kv.get(self._slot(r, position)) == prefix_name(r.tokens[: position + 1]), (
                f"{req_id}: the KV of position {position} is not that of its prefix"
            )
        for position in range(r.computed, r.computed + count):
            self.kv[self._slot(r, position)] = prefix_name(r.tokens[: position + 1])
        r.computed += count
        if r.computed < r.prefill:
            return []
        r.tokens.append(next_token(r.tokens))
        return [r.tokens[-1]]

    def _slot(self, r: SimpleNamespace, position: int) -> tuple[int, int]:
        return r.blocks[position // self.block_size], position % self.block_size
