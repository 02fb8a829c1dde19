"""Log-probabilities of prompt tokens, from hidden states that a step has left: a few rows at a time.

The logits of all tokens of a step would be far more memory than the step itself: 8192 tokens and 128,256 ids are 4.2
GB. Here at most `PROMPT_ROWS` tokens have logits at a time, whatever their requests, chunks and buckets. So one
executable serves every step, and steps in which no request asks pay nothing for it.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxrunner.stages.step import Pending
from jaxrunner.state.codec import Layout
from jaxrunner.state.reports import raw
from jaxrunner.state.runner_state import RunnerState

PROMPT_ROWS = 256
"""Tokens of one call: as many rows of logits as a large decode has, and enough to use a GPU well."""


def prompt_layout(num_rows: int) -> Layout:
    """The upload of `run_prompt_logprobs`: tokens, rows and positions as in `prompt_logprobs`; padding is zeros."""
    return Layout(tuple((name, (num_rows,)) for name in ("tokens", "rows", "positions")))


def prompt_logprobs(
    model: Model,
    weights: Any,
    state: RunnerState,
    hidden: jax.Array,
    tokens: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
) -> TokenLogprobs:
    """Numbers of N prompt tokens, of raw logits: a prompt is not sampled.

    hidden: [T, hidden], final hidden states of a step's tokens (`StepOutput.hidden`, `Pending.tokens`). positions:
    i32[N], places of the scored tokens in their requests, 1 at least. rows: i32[N], state row of each. tokens: i32[N],
    where in `hidden` the token before it is.
    """
    logits = transformer.logits(model, weights, hidden[tokens], dtype=hidden.dtype)
    scored = state.requests.token_ids[rows, positions]
    listed = state.sampling.list_of("prompt_logprob_ids")[rows]
    return token_logprobs(logits, scored, listed, raw(state.sampling.reports))


def run_prompt_logprobs(
    model: Model, weights: Any, state: RunnerState, pending: Pending, packed: jax.Array, *, num_rows: int
) -> tuple[RunnerState, TokenLogprobs]:
    """`prompt_logprobs` behind a step's first half. packed: by `prompt_layout(num_rows)`. The state is returned as it
    came, so that it can be donated here like everywhere."""
    assert pending.tokens is not None
    parts = prompt_layout(num_rows).unpack(packed)
    return state, prompt_logprobs(model, weights, state, pending.tokens, **parts)
