"""A synchronous scheduler: continuous batching with chunked prefill.

A request is admitted when a row and the KV blocks for its whole life are free, so a running request never runs out of
blocks and none is preempted. Decodes are scheduled before prefill chunks fill the rest of the token budget.
"""

from __future__ import annotations

from collections import deque

from jaxrunner.contract import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxrunner.engine.block_pool import BlockPool
from jaxrunner.engine.request import Request
from jaxrunner.errors import AdmissionError
from jaxrunner.runner.config import RunnerConfig


class Scheduler:
    """config: the runner's. num_groups: KV-cache groups of the model."""

    def __init__(self, config: RunnerConfig, num_groups: int):
        self.config = config
        self.pools = [BlockPool(config.num_blocks) for _ in range(num_groups)]
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._finished: set[str] = set()

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or the runner still holds one that is."""
        return bool(self.waiting or self.running or self._finished)

    def add(self, request: Request) -> None:
        """Queue a request. Raises AdmissionError if it could never run."""
        length, limit = len(request.prompt_token_ids), self.config.max_model_len
        if length > limit:
            raise AdmissionError(
                f"request {request.request_id!r}: a prompt of {length} tokens exceeds max_model_len {limit}; "
                "shorten it or start with a larger max_model_len"
            )
        if (need := self._blocks_needed(request)) > self.pools[0].num_usable:
            raise AdmissionError(
                f"request {request.request_id!r} needs {need} KV blocks, the cache has {self.pools[0].num_usable}; "
                "lower max_tokens or start with a larger cache (num_blocks or kv_bytes)"
            )
        if request.request_id in self.running or any(r.request_id == request.request_id for r in self.waiting):
            raise AdmissionError(f"request id {request.request_id!r} is already in use")
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Drop a request; returns it, or None if it is unknown or finished."""
        if (request := self.running.get(request_id)) is not None:
            self._finish(request)
        else:
            request = next((r for r in self.waiting if r.request_id == request_id), None)
            if request is not None:
                self.waiting.remove(request)
        if request is not None:
            request.finish_reason = "abort"
        return request

    def schedule(self) -> SchedulerOutput:
        """The next step's plan."""
        budget = self.config.max_num_batched_tokens
        tokens: dict[str, int] = {}
        cached = CachedRequestData()
        # Decodes have one token to run; they go first so that a long prefill cannot starve them.
        for request in sorted(self.running.values(), key=lambda r: r.num_tokens - r.num_computed_tokens > 1):
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count:
                tokens[request.request_id] = count
                budget -= count
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.num_output_tokens.append(len(request.output_token_ids))
                request.num_computed_tokens += count
        new = []
        while self.waiting and budget and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            need = self._blocks_needed(request)
            if any(pool.num_free < need for pool in self.pools):
                break
            self.waiting.popleft()
            request.blocks = tuple(pool.allocate(need) for pool in self.pools)
            self.running[request.request_id] = request
            count = min(len(request.prompt_token_ids), budget)
            tokens[request.request_id] = count
            budget -= count
            new.append(NewRequestData(request.request_id, request.prompt_token_ids, request.params, request.blocks))
            request.num_computed_tokens = count
        finished, self._finished = self._finished, set()
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            finished_req_ids=finished,
        )

    def update(self, output: ModelRunnerOutput) -> list[Request]:
        """Take a step's tokens; returns the requests that got one, finished ones included."""
        touched = []
        for req_id, ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            request = self.running.get(req_id)
            if request is None or not ids:
                continue
            for token_id in ids:
                request.append(token_id, self.config.max_model_len)
                if request.finish_reason:
                    break
            touched.append(request)
            if request.finish_reason:
                self._finish(request)
        return touched

    def _finish(self, request: Request) -> None:
        del self.running[request.request_id]
        self._finished.add(request.request_id)
        for pool, blocks in zip(self.pools, request.blocks, strict=True):
            pool.free(blocks)

    def _blocks_needed(self, request: Request) -> int:
        # The last token that is sampled is never run, so it needs no KV.
        limit = self.config.max_model_len
        tokens = len(request.prompt_token_ids) + request.max_tokens(limit) - 1
        return -(-min(tokens, limit) // self.config.block_size)
