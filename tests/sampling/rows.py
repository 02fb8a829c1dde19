"""Sampling parameters as the device holds them, for tests: one row a `SamplingParams`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import SamplingParams
from jaxrunner.compile.buckets import Tier
from jaxrunner.sampling.history import History
from jaxrunner.sampling.sampler import sample_tokens
from jaxrunner.state.fields import REQUEST_FIELDS
from jaxrunner.state.records import request_record
from jaxrunner.state.request_lists import ListSizes, list_writes
from jaxrunner.state.sampling import SamplingState, ThinkingTokens

LEFT_BEHIND = 1
SIZES = ListSizes(stop_ids=4, logit_bias=4, allowed_token_ids=6, bad_words_tokens=9, replay_tokens=4)


def sampling_state(
    params: Sequence[SamplingParams],
    *,
    prompt_len: int = 1,
    eos: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    thinking: ThinkingTokens | None = None,
) -> SamplingState:
    """The rows that admission would write."""
    records, lists = [], np.zeros((len(params), SIZES.width), np.int32)
    for row, request in enumerate(params):
        seed = row if seeds is None else int(seeds[row])
        record = request_record(
            prompt_len=prompt_len, prefill_len=prompt_len, num_computed_tokens=0, params=request, seed=seed
        )
        records.append(record[len(REQUEST_FIELDS) :])
        for column, word in list_writes(request, eos, SIZES):
            lists[row, column] = word
    return SamplingState(jnp.asarray(np.stack(records)), jnp.asarray(lists), SIZES, thinking)


@functools.cache
def compiled(tier: Tier):
    """run(logits, params, position) -> token ids, of rows without a history."""

    def run(logits, params, position):
        history = NO_HISTORY._replace(rows=jnp.ones_like(position), prompt_len=position)
        return sample_tokens(logits, params, position, tier=tier, history=history).token_ids

    return jax.jit(run)


def history_of(tokens: Sequence[Sequence[int]], prompt_len: Sequence[int] | int, width: int = 12) -> History:
    """Rows 1, 2, ... with these tokens and another's id behind them; row 0 is the parking row's."""
    table = np.full((len(tokens) + 1, width), LEFT_BEHIND, np.int32)
    table[0] = 0
    for row, ids in enumerate(tokens, 1):
        table[row, : len(ids)] = ids
    lengths = np.broadcast_to(np.asarray(prompt_len, np.int32), len(tokens))
    return History(jnp.asarray(table), jnp.arange(1, len(tokens) + 1), jnp.asarray(lengths))


NO_HISTORY = history_of([[]], 0)
