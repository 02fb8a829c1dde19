"""Small plans for runner tests: scheduler outputs written by hand, over the tiny golden model."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import HostRunner, SamplingParams
from jaxrunner.compile.ladder import Ladder
from jaxrunner.contract import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.state.request_arrays import current
from jaxrunner.state.request_lists import ListSizes
from jaxrunner.state.runner_state import host_view

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
CONFIG = RunnerConfig(
    max_num_seqs=4,
    max_model_len=96,
    max_num_batched_tokens=32,
    num_blocks=40,
    block_size=8,
    list_sizes=ListSizes(stop_ids=16, logit_bias=8, allowed_token_ids=8, bad_words_tokens=8, replay_tokens=4),
    check_invariants=True,
)
LADDER = Ladder(decode=(4,), mixed=(32,), finish=(4,))
both_runners = pytest.mark.parametrize("runner", ["device", "host"], indirect=True)


def new(req_id: str, prompt: list[int], blocks: list[int], params: SamplingParams = GREEDY, **fields) -> NewRequestData:
    return NewRequestData(req_id, prompt, params, (blocks,), **fields)


def plan(
    tokens: dict[str, int],
    new_reqs: list[NewRequestData] | None = None,
    blocks: dict[str, list[int]] | None = None,
    **fields,
) -> SchedulerOutput:
    """A plan: requests of `tokens` that are not new are cached; `blocks` joins their tables."""
    new_ids = {r.req_id for r in new_reqs or []}
    cached = [r for r in dict.fromkeys([*tokens, *(blocks or {})]) if r not in new_ids]
    return SchedulerOutput(
        scheduled_new_reqs=new_reqs or [],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=cached,
            new_block_ids=[([*blocks[r]],) if blocks and r in blocks else None for r in cached],
            num_computed_tokens=[0] * len(cached),
            num_output_tokens=[0] * len(cached),
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        **fields,
    )


def run(runner, scheduler_output: SchedulerOutput) -> dict[str, list[int]]:
    """One whole step; request id -> sampled ids."""
    assert runner.execute_model(scheduler_output) is None
    output = runner.sample_tokens()
    return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))


def num_computed(runner, req_id: str) -> int:
    """Tokens of a request whose KV there is, as its runner counts them."""
    row = runner.rows[req_id]
    if isinstance(runner, HostRunner):
        return int(runner.batch.rows.computed[row])
    return int(host_view(runner.state.requests.num_computed_tokens)[row])


def kept_on_device(runner):
    """What it donates to its programs."""
    return runner.carry if isinstance(runner, HostRunner) else runner.state


def snapshot(runner) -> list[np.ndarray]:
    """Copies of what its runner knows of the requests."""
    if isinstance(runner, HostRunner):
        return [getattr(runner.batch.rows, field.name).copy() for field in runner.batch.rows.fields]
    return [host_view(runner.state.requests.counters), host_view(runner.state.tables.num_blocks)]


def lists_of(runner, row: int) -> np.ndarray:
    """i32[W], the lists of a row, see `request_lists`."""
    return host_view(runner.lists.lists if isinstance(runner, HostRunner) else runner.state.sampling.lists)[row]


def request_values(runner) -> dict[str, np.ndarray]:
    """Name -> values now, by row, of the arrays that requests have for the user's functions."""
    if not isinstance(runner, HostRunner):
        return {name: host_view(value) for name, value in runner.state.request_values.items()}
    runner._arrange()
    carry, known = runner.carry, jnp.asarray(runner.batch.rows.known)
    values = current(carry.extras, carry.sizes.custom, jnp.arange(carry.num_rows), known)
    return {name: host_view(value) for name, value in values.items()}
