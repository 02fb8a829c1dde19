"""The per-row fields of a request, declared once.

A row of `RequestState.counters` and of `SamplingState.params` is a vector of 32-bit words. This module says which
column is which; admission, the accessors of the state, the audit and the tests all read it here, so a field that is
added cannot be forgotten by one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Field:
    """One column: its name, `"i32"` or `"f32"` (stored bit-cast), and what it means."""

    name: str
    dtype: str
    doc: str


REQUEST_FIELDS: tuple[Field, ...] = (
    Field("prompt_len", "i32", "tokens the user sent"),
    Field("prefill_len", "i32", "tokens known at (re)admission; more than prompt_len after a preemption"),
    Field("total_len", "i32", "tokens known now, the newest one included although it has no KV yet"),
    Field("num_computed_tokens", "i32", "tokens whose KV is in the cache; the device's number is the truth"),
    Field("last_sampled_token", "i32", "input id of the next decode step"),
)

SAMPLING_FIELDS: tuple[Field, ...] = (
    Field("temperature", "f32", "0 means greedy"),
    Field("seed_lo", "i32", "low word of the 64-bit seed"),
    Field("seed_hi", "i32", "high word of the 64-bit seed"),
    Field("top_k", "i32", "ids to draw from; 0 means all"),
    Field("top_p", "f32", "mass to draw from; 0 and 1 mean all"),
    Field("min_p", "f32", "least probability relative to the largest; 0 means none"),
    Field("min_len", "i32", "no stop id is sampled at a position below: prompt_len + min_tokens; 0 means anywhere"),
    Field("features", "i32", "bits of `Feature`: what the request asks of the sampler"),
    Field("repetition_penalty", "f32", "divides positive and multiplies other logits of ids seen; 0 and 1 are off"),
    Field("frequency_penalty", "f32", "subtracted for each time an id was sampled; 0 is off"),
    Field("presence_penalty", "f32", "subtracted if an id was sampled; 0 is off"),
    Field("thinking_budget", "i32", "tokens that may follow the start of thinking, plus 1; 0 is off"),
)

REQUEST_COLUMN: dict[str, int] = {f.name: i for i, f in enumerate(REQUEST_FIELDS)}
SAMPLING_COLUMN: dict[str, int] = {f.name: i for i, f in enumerate(SAMPLING_FIELDS)}
PREFILL_LEN, TOTAL_LEN = REQUEST_COLUMN["prefill_len"], REQUEST_COLUMN["total_len"]
NUM_COMPUTED, LAST_SAMPLED = REQUEST_COLUMN["num_computed_tokens"], REQUEST_COLUMN["last_sampled_token"]
RECORD_FIELDS: tuple[Field, ...] = REQUEST_FIELDS + SAMPLING_FIELDS
RECORD_WIDTH = len(RECORD_FIELDS)


_FLOATS = [column for column, field in enumerate(RECORD_FIELDS) if field.dtype == "f32"]


def encode_record(values: Mapping[str, int | float]) -> np.ndarray:
    """One admission record, i32[RECORD_WIDTH]: every per-row field, floats bit-cast.

    Raises KeyError for a field that is missing or unknown: an admission rewrites the whole row or nothing.
    """
    if strange := values.keys() ^ {f.name for f in RECORD_FIELDS}:
        raise KeyError(f"record fields differ from the declaration: {sorted(strange)}")
    integers = [0 if f.dtype == "f32" else values[f.name] for f in RECORD_FIELDS]
    for value in integers:
        if not -(2**31) <= value < 2**31:
            raise OverflowError(f"{value} does not fit 32 bits")
    words = np.array(integers, np.int32)
    words[_FLOATS] = np.array([values[RECORD_FIELDS[column].name] for column in _FLOATS], np.float32).view(np.int32)
    return words


def split_seed(seed: int) -> tuple[int, int]:
    """(low, high) words of a 64-bit seed as signed 32-bit numbers."""
    low, high = seed & (2**32 - 1), (seed >> 32) & (2**32 - 1)
    return (low ^ 2**31) - 2**31, (high ^ 2**31) - 2**31
