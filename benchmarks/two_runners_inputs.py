"""What the forward pass of a step was given, in one order of requests, whichever runner prepared it.

Runners that sample for themselves may come to other tokens: in another order of rows a matmul rounds differently, and
near-ties of logits fall the other way. So `difference` holds the input ids of each runner to the tokens that its own
scheduler knows, and all other arrays to each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from jaxrunner.host_runner.input_arrays import upload_layout
from jaxrunner.stages.prepare_inputs import prepare_inputs

PER_TOKEN = ("input_ids", "positions", "slot_mapping")
PER_REQUEST = ("seq_lens", "block_table")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """req_ids: in ascending order, and so are the live parts of `arrays`, which have vLLM's names; padding follows.
    query_lens and last_token (which token of its request becomes logits) stand for query_start_loc and logits_indices.
    upload_words: of the step's upload.
    """

    req_ids: list[str]
    arrays: dict[str, np.ndarray]
    upload_words: int


@contextlib.contextmanager
def capture(runner: Any, preparation: str) -> Iterator[list[Inputs]]:
    """The inputs of the steps that `runner` runs inside of the `with`."""
    seen: list[Inputs] = []
    call = runner.table.call

    def recording(entry, *args):
        program = entry.program
        if program.kind in ("step", "begin"):
            _, state, upload = args
            if preparation == "numpy":
                arrays = upload_layout(program.bucket, runner.sizes).unpack(upload.copy())
            else:
                batch = _prepared(state, upload, bucket=program.bucket, implementation=preparation)
                arrays = {
                    name: np.asarray(value) for name, value in vars(batch).items() if not isinstance(value, tuple)
                }
                (slots,), (table,) = batch.slot_mapping, batch.block_table
                arrays |= {"slot_mapping": np.asarray(slots), "block_table": np.asarray(table)}
            pending.append((arrays, len(upload)))
        return call(entry, *args)

    pending: list[tuple[dict[str, np.ndarray], int]] = []
    execute = runner.execute_model

    def executing(plan):
        result = execute(plan)
        for arrays, words in pending:
            batch = runner._planned.metadata if preparation == "numpy" else runner._parked
            seen.append(_in_order(batch.ids.req_ids, arrays, words))
        pending.clear()
        return result

    runner.table.call, runner.execute_model = recording, executing
    try:
        yield seen
    finally:
        del runner.table.call, runner.execute_model


@functools.partial(jax.jit, static_argnames=("bucket", "implementation"))
def _prepared(state, upload, *, bucket, implementation):
    return prepare_inputs(state, upload, bucket=bucket, implementation=implementation)


def _in_order(req_ids: list[str], arrays: dict[str, np.ndarray], upload_words: int) -> Inputs:
    order, starts = np.argsort(req_ids), arrays["query_start_loc"]
    num_reqs, num_tokens = len(req_ids), int(starts[len(req_ids)])
    token = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in order])
    token = np.concatenate([token, np.arange(num_tokens, len(arrays["positions"]))])
    request = np.concatenate([order, np.arange(num_reqs, len(starts) - 1)])
    found = {name: arrays[name].reshape(-1)[token] for name in PER_TOKEN}
    found |= {name: arrays[name][request] for name in PER_REQUEST}
    found["query_lens"] = np.diff(starts)[request]
    live = np.arange(len(request)) < num_reqs
    found["last_token"] = np.where(live, arrays["logits_indices"] - starts[:-1], arrays["logits_indices"])[request]
    return Inputs([req_ids[b] for b in order], found, upload_words)


def known_tokens(scheduler: Scheduler) -> dict[str, list[int]]:
    """Request -> its prompt and what it has generated so far, of all that may be part of the scheduler's next step."""
    for request in scheduler.running.values():
        scheduler.sync(request)
    requests: Iterable[Request] = [*scheduler.running.values(), *scheduler.waiting]
    return {r.request_id: r.prompt_token_ids + r.output_token_ids for r in requests}


def known_ids(inputs: Inputs, tokens: Mapping[str, list[int]]) -> np.ndarray:
    """i32[T], the input ids of a step whose requests have `tokens`: those at its positions, 0 in padding, and -1, which
    is no id, past the tokens of a request.
    """
    query_lens = inputs.arrays["query_lens"][: len(inputs.req_ids)]
    ends = np.cumsum(query_lens)
    found = np.zeros_like(inputs.arrays["input_ids"])
    for req_id, start, end in zip(inputs.req_ids, ends - query_lens, ends, strict=True):
        known = tokens[req_id]
        for place in range(start, end):
            position = inputs.arrays["positions"][place]
            found[place] = known[position] if 0 <= position < len(known) else -1
    return found


def difference(a: Inputs, b: Inputs, ids_of_a: np.ndarray, ids_of_b: np.ndarray) -> str | None:
    """The first thing in which two steps differ, or in which one has other input ids than `known_ids` says of it. Where
    those agree, so do then the input ids.
    """
    if a.req_ids != b.req_ids:
        return "requests"
    for name in a.arrays:
        pairs = ((a, ids_of_a), (b, ids_of_b)) if name == "input_ids" else ((a, b.arrays[name]),)
        if not all(np.array_equal(inputs.arrays[name], right) for inputs, right in pairs):
            return name
    return None
