"""The per-row fields of the dense batch, declared once, and `RowBank`, which moves all of them.

What a row holds is the tuple `ROW_FIELDS` and nothing else. Allocation, moves and clearing loop over it, so that none
of them can forget a field that is added: one left behind by a move would give a request the parameters of another,
and only when requests finish out of order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrunner.runner.logprob_columns import NO_LOGPROBS

NONE = -1
"""Stands for no row and no place."""


@dataclasses.dataclass(frozen=True)
class RowField:
    """One array over rows. columns: what a row of it is as wide as, by the names of the bank's sizes, or a number.

    empty: what a row without a request holds. used: the field that says how many columns mean something, where a row is
    too wide to be moved whole.
    """

    name: str
    doc: str
    columns: tuple[str | int, ...] = ()
    empty: Any = 0
    used: str | None = None
    dtype: type = np.int32


ROW_FIELDS: tuple[RowField, ...] = (
    RowField("req_ids", "the request", empty=None, dtype=object),
    RowField("token_ids", "prompt and outputs, as far as they have arrived", ("max_model_len",), used="known"),
    RowField("number", "a number of its own for as long as the request is here, see `SamplingContext`; 0 means none"),
    RowField("prompt_len", "tokens the user sent"),
    RowField("prefill_len", "tokens known at (re)admission; more than prompt_len after a preemption"),
    RowField("known", "tokens there are, those included that steps in flight sample"),
    RowField("computed", "tokens that were scheduled: their KV is in the cache, or will be"),
    RowField("scheduled", "tokens of the step that is being planned; 0 where the request is not part of it"),
    RowField("num_blocks", "kernel blocks of each KV-cache group", ("num_groups",)),
    RowField("block_table", "kernel block ids of all groups, one after the other", ("table_width",)),
    RowField("sampling", "sampling parameters, floats bit-cast, see `jaxrunner.state.fields`", ("sampling_width",)),
    RowField("num_logprobs", "best ids whose log-probabilities are asked for", empty=NO_LOGPROBS),
    RowField("num_listed", "ids listed by the request whose log-probabilities are asked for"),
    RowField("num_prompt_scores", "tokens of the prompt that are to be scored"),
    RowField("is_structured", "1 for a request with structured_outputs"),
    RowField("flight_row", "row in each of two steps in flight", (2,), empty=NONE),
    RowField("flight_len", "tokens that each of them runs", (2,)),
    RowField("flight_end", "index of the token that each of them samples; none in the middle of a prompt", (2,), NONE),
)


class RowBank:
    """One array for each field, `[num_rows, ...]`, as an attribute of its name."""

    req_ids: np.ndarray
    token_ids: np.ndarray
    number: np.ndarray
    prompt_len: np.ndarray
    prefill_len: np.ndarray
    known: np.ndarray
    computed: np.ndarray
    scheduled: np.ndarray
    num_blocks: np.ndarray
    block_table: np.ndarray
    sampling: np.ndarray
    num_logprobs: np.ndarray
    num_listed: np.ndarray
    num_prompt_scores: np.ndarray
    is_structured: np.ndarray
    flight_row: np.ndarray
    flight_len: np.ndarray
    flight_end: np.ndarray

    def __init__(self, num_rows: int, sizes: Mapping[str, int], fields: Sequence[RowField] = ROW_FIELDS):
        self.fields = tuple(fields)
        for field in self.fields:
            columns = tuple(c if isinstance(c, int) else sizes[c] for c in field.columns)
            setattr(self, field.name, np.full((num_rows, *columns), field.empty, field.dtype))

    def relocate(self, source: np.ndarray, target: np.ndarray) -> None:
        """Row source[i] becomes row target[i], all at once. A row that is left and not filled again is empty.

        Sources are distinct, and so are targets; a permutation (the same rows on both sides) swaps or cycles them.
        """
        for field in self.fields:
            array = getattr(self, field.name)
            if field.used is None:
                array[target] = array[source]
            else:
                used = getattr(self, field.used)
                width = int(max(used[source].max(), used[target].max()))
                array[target, :width] = array[source, :width]
        self.clear(np.setdiff1d(source, target))

    def clear(self, rows: Any) -> None:
        """Empty these rows. Columns past what `used` counts hold junk before and after."""
        for field in self.fields:
            if field.used is None:
                getattr(self, field.name)[rows] = field.empty
