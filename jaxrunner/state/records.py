"""From a request's parameters to its admission record, and the checks that stand before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrunner.errors import AdmissionError
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.fields import encode_record, split_seed

LEAST_TOP_P = 2.0**-126
"""The smallest normal float32: a smaller top_p keeps the best id alone just the same, but 0 would mean off."""


def request_record(
    *, prompt_len: int, prefill_len: int, num_computed_tokens: int, params: SamplingParams, seed: int
) -> np.ndarray:
    """i32[RECORD_WIDTH]: every per-row field of a request that enters (or re-enters) the state.

    prefill_len: tokens known now; more than prompt_len when the request was preempted after some output.
    seed: used when `params.seed` is None.
    """
    low, high = split_seed(params.seed if params.seed is not None else seed)
    return encode_record(
        {
            "prompt_len": prompt_len,
            "prefill_len": prefill_len,
            "total_len": prefill_len,
            "num_computed_tokens": num_computed_tokens,
            "last_sampled_token": 0,
            "temperature": params.temperature,
            "seed_lo": low,
            "seed_hi": high,
            "top_k": params.top_k,
            "top_p": max(params.top_p, LEAST_TOP_P),
            "min_p": params.min_p,
            "min_len": prompt_len + params.min_tokens if params.min_tokens else 0,
            "features": int(params.features),
            "repetition_penalty": params.repetition_penalty,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "thinking_budget": 0 if params.thinking_token_budget is None else params.thinking_token_budget + 1,
        }
    )


def derived_seed(seed: int, number: int) -> int:
    """A 64-bit seed for request `number` of an engine with `seed`."""
    return int(np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)[0])


def check_token_ids(token_ids: Sequence[int], vocab_size: int, what: str = "prompt") -> np.ndarray:
    """The ids as i32[n]. Raises AdmissionError for an empty list or an id outside the vocabulary, naming it."""
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise AdmissionError(f"the {what} must be a flat list of integer token ids ({error})") from error
    if ids.ndim != 1:
        raise AdmissionError(f"the {what} must be a flat list of integer token ids, got {token_ids!r}")
    if ids.size == 0:
        raise AdmissionError(f"the {what} is empty; give at least one token id")
    if ids.dtype.kind not in "iu":
        raise AdmissionError(f"the {what} must be integer token ids, got {ids.dtype}")
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        raise AdmissionError(
            f"token id {ids[bad[0]]} at position {bad[0]} of the {what} is outside the vocabulary 0..{vocab_size - 1}; "
            "was it made with another tokenizer?"
        )
    return ids.astype(np.int32)
