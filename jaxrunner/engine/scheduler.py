"""The scheduler: continuous batching with chunked prefill, prefix caching, priorities and preemption.

Running requests are scheduled before new ones are admitted, decodes before prefill chunks. When the KV blocks run out,
the request that would run last gives its blocks back and waits; it resumes by running all its known tokens again.
The scheduler may plan a step before the tokens of the one before have arrived: a request's planned length counts them.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np

from jaxrunner.contract import (
    NO_TOKEN,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenCounts,
)
from jaxrunner.engine.block_pool import BlockPool
from jaxrunner.engine.columns import Columns
from jaxrunner.engine.prefix_hash import HashChain, namespace
from jaxrunner.engine.request import Request
from jaxrunner.errors import AdmissionError
from jaxrunner.runner.config import RunnerConfig


@dataclasses.dataclass(frozen=True)
class Frame:
    """A step in flight: the slot and its epoch of every scheduled request, in the plan's order."""

    req_ids: list[str]
    slots: np.ndarray
    epochs: np.ndarray


class Scheduler:
    """config: the runner's. num_groups: KV-cache groups of the model (they share block ids).

    prefix_caching: reuse KV of equal prefixes. max_stop_ids: stop ids of one request.
    """

    def __init__(self, config: RunnerConfig, num_groups: int, *, prefix_caching: bool = True, max_stop_ids: int = 64):
        self.config = config
        self.num_groups = num_groups
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(config.num_blocks)
        self.columns = Columns(config.max_num_seqs, config.max_model_len, config.block_size, max_stop_ids)
        self.running: dict[str, Request] = {}
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._waiting_ids: set[str] = set()
        self._slot_of: dict[str, int] = {}
        self._request_at: list[Request | None] = [None] * config.max_num_seqs
        self._order = np.zeros(0, np.int64)
        self._is_ordered = True
        self._decodes: TokenCounts | None = None
        self._ids: list[str] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._arrivals = itertools.count()
        self._weights_version = 0

    # -- requests in and out ---------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or the runner still holds one that is."""
        return bool(self.has_unfinished or self._finished or self._preempted)

    @property
    def waiting(self) -> list[Request]:
        """Requests that are not running, in the order in which they will be admitted."""
        return [request for _, request in sorted(self._waiting, key=lambda item: item[0])]

    def add(self, request: Request) -> None:
        """Queue a request. Raises AdmissionError if it could never run."""
        self._check(request)
        if request.request_id in self.running or request.request_id in self._waiting_ids:
            raise AdmissionError(f"request id {request.request_id!r} is already in use")
        request.arrival = next(self._arrivals)
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.order, request))
        self._waiting_ids.add(request.request_id)

    def replace(self, request: Request) -> None:
        """Put `request` in the place of one with the same id, running or waiting (a streaming update)."""
        self._check(request)
        self.abort(request.request_id)
        self.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Drop a request; returns it, or None if it is unknown or finished. Its late results find nobody."""
        request = self.running.get(request_id)
        if request is not None:
            self.sync(request)
            self._retire(request_id, self._finished)
        else:
            if request_id not in self._waiting_ids:
                return None
            request = next(r for _, r in self._waiting if r.request_id == request_id)
            self._waiting = [item for item in self._waiting if item[1] is not request]
            heapq.heapify(self._waiting)
            self._waiting_ids.discard(request_id)
            if request.num_preemptions:
                self._finished.add(request_id)  # the runner keeps something of it until it hears of its end
        request.finish_reason = "abort"
        return request

    def owner(self, frame: Frame, request_id: str) -> Request | None:
        """The request that a row of a step in flight belongs to, None if it has gone since."""
        place = frame.req_ids.index(request_id)
        slot = int(frame.slots[place])
        return self._request_at[slot] if self.columns.epoch[slot] == frame.epochs[place] else None

    def structured(self, frame: Frame) -> list[tuple[str, Request | None]]:
        """The requests with a grammar of a step in flight: id, and the request, None if it has gone since."""
        columns, found = self.columns, []
        for place in np.flatnonzero(columns.structured[frame.slots]).tolist():
            slot = int(frame.slots[place])
            is_there = columns.epoch[slot] == frame.epochs[place]
            found.append((frame.req_ids[place], self._request_at[slot] if is_there else None))
        return found

    def sync(self, request: Request) -> None:
        """Bring `request.output_token_ids` up to what has arrived."""
        slot = self._slot_of.get(request.request_id)
        if slot is not None and self._request_at[slot] is request:
            start = self.columns.prompt_len[slot] + len(request.output_token_ids)
            request.output_token_ids += self.columns.tokens[slot, start : self.columns.known[slot]].tolist()

    def weights_changed(self) -> None:
        """Forget every cached prefix: it was computed with other weights."""
        self._weights_version += 1
        self.pool.reset_prefixes()

    def check_idle(self) -> None:
        """Raises InvariantError if blocks are held although no request lives."""
        if not self.has_unfinished:
            self.pool.check_idle()

    # -- planning --------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[SchedulerOutput, Frame]:
        """The next step's plan, and what is needed to take its result."""
        cached, slots, counts = self._schedule_running()
        ids = cached.req_ids
        budget = self.config.max_num_batched_tokens - int(counts.sum())
        new: list[NewRequestData] = []
        if self._waiting and not self._preempted:
            new, new_slots, new_counts = self._admit(budget)
            ids = ids + [r.req_id for r in new]
            slots = np.concatenate([slots, np.array(new_slots, np.int64)])
            counts = np.concatenate([counts, np.array(new_counts, np.int64)])
        samples, total = self._advance(slots, counts), int(counts.sum())
        structured = self.columns.structured[slots]
        # A request that has an id in flight after this step and another one before it.
        waits = structured & (self.columns.planned[slots] - samples > self.columns.known[slots])
        finished, self._finished = self._finished, set()
        preempted, self._preempted = self._preempted, set()
        plan = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self._token_counts(ids, counts, total),
            total_num_scheduled_tokens=total,
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            has_structured_output_requests=bool(structured.any()),
            pending_structured_output_tokens=bool(waits.any()),
        )
        return plan, Frame(ids, slots, self.columns.epoch[slots])

    def _token_counts(self, ids: list[str], counts: np.ndarray, total: int) -> dict[str, int]:
        """One and the same mapping for all plans in which all running requests decode, until one comes or goes."""
        if ids is not self._ids or total != len(ids):
            return dict(zip(ids, counts.tolist(), strict=True))
        if self._decodes is None:
            self._decodes = TokenCounts(dict.fromkeys(ids, 1))
        return self._decodes

    def _schedule_running(self) -> tuple[CachedRequestData, np.ndarray, np.ndarray]:
        columns = self.columns
        while True:
            if not self._is_ordered:
                self._reorder()
            slots, ids = self._order, self._ids
            counts = np.minimum(columns.planned[slots], columns.final[slots] - 1) - columns.computed[slots]
            counts = self._within_budget(counts)
            ends = columns.computed[slots] + counts
            missing = -(-ends // self.config.block_size) - columns.num_blocks[slots]
            fresh = self._take_blocks(slots, missing)
            if fresh is not None:
                break
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(ids)
        for index, blocks in fresh.items():
            new_blocks[index] = (blocks,) * self.num_groups
        if not counts.all():
            keep = np.flatnonzero(counts)
            slots, counts = slots[keep], counts[keep]
            kept = keep.tolist()
            ids, new_blocks = [ids[i] for i in kept], [new_blocks[i] for i in kept]
        outputs = columns.planned[slots] - columns.prompt_len[slots]
        cached = CachedRequestData(ids, new_blocks, columns.computed[slots].tolist(), outputs.tolist())
        return cached, slots, counts

    def _within_budget(self, counts: np.ndarray) -> np.ndarray:
        budget = self.config.max_num_batched_tokens
        if counts.sum() <= budget:
            return counts
        order = np.argsort(counts > 1, kind="stable")
        ordered = counts[order]
        clipped = np.clip(budget - (np.cumsum(ordered) - ordered), 0, ordered)
        result = np.empty_like(counts)
        result[order] = clipped
        return result

    def _take_blocks(self, slots: np.ndarray, missing: np.ndarray) -> dict[int, list[int]] | None:
        """Blocks for each request that needs some, by its place in the order. None if one had to be preempted: the
        blocks that were taken stay with their requests and the plan starts over."""
        needy = np.flatnonzero(missing > 0)
        if missing[needy].sum() > self.pool.num_free:
            self._preempt(self._ids[-1])
            return None
        fresh = {}
        for index in needy.tolist():
            fresh[index] = self.pool.allocate(int(missing[index]))
            self.columns.append_blocks(int(slots[index]), fresh[index])
        return fresh

    def _preempt(self, request_id: str) -> None:
        request = self.running[request_id]
        self.sync(request)
        request.num_preemptions += 1
        self._retire(request_id, self._preempted)
        self._enqueue(request)

    def _admit(self, budget: int) -> tuple[list[NewRequestData], list[int], list[int]]:
        new, slots, counts = [], [], []
        while self._waiting and budget > 0 and self._free_slots:
            request = self._waiting[0][1]
            tokens = request.known_token_ids
            hit = self._cached_prefix(request, tokens)
            needed = -(-len(tokens) // self.config.block_size) - len(hit)
            if needed > self.pool.num_free - sum(self.pool.ref_count[b] == 0 for b in hit):
                break
            heapq.heappop(self._waiting)
            self._waiting_ids.discard(request.request_id)
            self.pool.share(hit)
            blocks = hit + self.pool.allocate(needed)
            computed = len(hit) * self.config.block_size
            slot = self._occupy(request, tokens, blocks, computed)
            count = min(len(tokens) - computed, budget)
            budget -= count
            slots.append(slot)
            counts.append(count)
            new.append(
                NewRequestData(
                    request.request_id,
                    request.prompt_token_ids,
                    request.seeded_params,
                    (blocks,) * self.num_groups,
                    computed,
                    tokens.tolist() if request.output_token_ids else None,
                )
            )
        return new, slots, counts

    def _cached_prefix(self, request: Request, tokens: np.ndarray) -> list[int]:
        """Blocks of the longest cached prefix; at least the last token is left to run, since its logits are needed, and
        all of a prompt whose tokens are to be scored."""
        if not self.prefix_caching:
            return []
        root = namespace(self._weights_version, request.cache_salt)
        if request.hash_chain is None or request.hash_chain.root != root:
            request.hash_chain = HashChain(root, self.config.block_size)
        usable = 0 if request.runs_whole_prompt else len(tokens) - 1
        return self.pool.longest_prefix(request.hash_chain.first(usable // self.config.block_size, tokens))

    # -- slots -----------------------------------------------------------------------------------------------------

    def _occupy(self, request: Request, tokens: np.ndarray, blocks: list[int], computed: int) -> int:
        slot, columns = self._free_slots.pop(), self.columns
        prompt_len = len(request.prompt_token_ids)
        columns.prompt_len[slot] = prompt_len
        columns.known[slot] = columns.planned[slot] = len(tokens)
        columns.computed[slot] = computed
        columns.final[slot] = prompt_len + request.max_tokens(self.config.max_model_len)
        columns.tokens[slot, : len(tokens)] = tokens
        columns.num_blocks[slot] = 0
        columns.append_blocks(slot, blocks)
        columns.registered[slot] = computed // self.config.block_size
        columns.structured[slot] = request.grammar is not None
        columns.stops[slot] = -1
        columns.stops[slot, : len(request.stop_ids)] = request.stop_ids
        if request.num_cached_tokens is None:
            request.num_cached_tokens = computed
        self.running[request.request_id] = request
        self._slot_of[request.request_id], self._request_at[slot] = slot, request
        self._is_ordered = False
        return slot

    def _retire(self, request_id: str, into: set[str]) -> None:
        """Take a request out of its slot; the runner hears of it with the next plan."""
        slot = self._slot_of.pop(request_id)
        del self.running[request_id]
        self._request_at[slot] = None
        self.columns.epoch[slot] += 1
        self.pool.free(self.columns.blocks_of(slot))
        self._free_slots.append(slot)
        into.add(request_id)
        self._is_ordered = False

    def _reorder(self) -> None:
        """Once a plan, however many requests have come and gone since the last."""
        ordered = sorted(self.running.values(), key=lambda r: r.order)
        self._ids, self._decodes = [r.request_id for r in ordered], None
        self._order = np.fromiter(map(self._slot_of.__getitem__, self._ids), np.int64, len(ordered))
        self._is_ordered = True

    def _advance(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Count a planned step: computed tokens, and one more planned token where it will sample. Returns where."""
        columns = self.columns
        columns.computed[slots] += counts
        samples = columns.computed[slots] == columns.planned[slots]
        columns.planned[slots] += samples
        self._register_full_blocks(slots)
        return samples

    # -- results ---------------------------------------------------------------------------------------------------

    def update(self, frame: Frame, output: ModelRunnerOutput) -> list[Request]:
        """Take a step's tokens; returns the requests that ended with it. Rows whose request is gone are dropped."""
        columns = self.columns
        slots, epochs = frame.slots, frame.epochs
        if (index := output.order(frame.req_ids)) is not None:
            slots, epochs = slots[index], epochs[index]
        (tokens,) = output.sampled.T
        live = (tokens != NO_TOKEN) & (columns.epoch[slots] == epochs)
        slots, tokens = slots[live], tokens[live]
        columns.tokens[slots, columns.known[slots]] = tokens
        columns.known[slots] += 1
        self._register_full_blocks(slots)
        over = (columns.known[slots] >= columns.final[slots]) | (columns.stops[slots] == tokens[:, None]).any(axis=1)
        return [self._finish(int(slots[i]), int(tokens[i])) for i in np.flatnonzero(over)]

    def _finish(self, slot: int, token_id: int) -> Request:
        request = self._request_at[slot]
        assert request is not None
        self.sync(request)
        request.finish(token_id)
        self._retire(request.request_id, self._finished)
        return request

    def _register_full_blocks(self, slots: np.ndarray) -> None:
        """Make blocks findable once all their tokens are known and handed to the runner."""
        if not self.prefix_caching:
            return
        columns, size = self.columns, self.config.block_size
        full = np.minimum(columns.computed[slots], columns.known[slots]) // size
        grown = full > columns.registered[slots]
        for slot, end in zip(slots[grown].tolist(), full[grown].tolist(), strict=True):
            request = self._request_at[slot]
            assert request is not None
            assert request.hash_chain is not None
            start = int(columns.registered[slot])
            digests = request.hash_chain.first(end, columns.tokens[slot])[start:]
            for block, digest in zip(columns.blocks[slot, start:end].tolist(), digests, strict=True):
                self.pool.register(block, digest)
            columns.registered[slot] = end

    def _check(self, request: Request) -> None:
        length, limit = len(request.prompt_token_ids), self.config.max_model_len
        if length > limit:
            raise AdmissionError(
                f"request {request.request_id!r}: a prompt of {length} tokens exceeds max_model_len {limit}; "
                "shorten it or start with a larger max_model_len"
            )
        tokens = min(length + request.max_tokens(limit) - 1, limit)
        if (need := -(-tokens // self.config.block_size)) > self.pool.num_usable:
            raise AdmissionError(
                f"request {request.request_id!r} needs {need} KV blocks, the cache has {self.pool.num_usable}; "
                "lower max_tokens or start with a larger cache (num_blocks or kv_bytes)"
            )
        if len(request.stop_ids) > (most := self.columns.stops.shape[1]):
            raise AdmissionError(f"request {request.request_id!r} has {len(request.stop_ids)} stop ids; at most {most}")
