"""Log-probabilities on the host: from what the device found for every row to the columns that each one asks for."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrunner.compile.buckets import Feature
from jaxrunner.contract import LogprobsLists
from jaxrunner.sampling.logprobs import TokenLogprobs
from jaxrunner.sampling_params import SamplingParams

NO_LOGPROBS = -1
"""Stands for a request that asks for none at all; 0 asks for those of its own tokens."""
NO_ID = -1


def asked_counts(params: SamplingParams, vocab_size: int) -> tuple[int, int]:
    """(best ids, listed ids) that a request asks for with each of its tokens; NO_LOGPROBS for none at all."""
    if Feature.LOGPROBS not in params.features:
        return NO_LOGPROBS, 0
    best = params.logprobs or 0
    return vocab_size if best < 0 else min(best, vocab_size), len(params.logprob_token_ids or ())


class Found(NamedTuple):
    """The fields of a `TokenLogprobs`, on their way to the host or there; None for what no request needs."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    listed_ids: Any
    listed_logprobs: Any
    every: Any


def start_copy(found: TokenLogprobs, num_best: int, num_listed: int) -> Found:
    """Only what requests with so many best and listed ids need, on its way to the host."""
    kept = Found(**vars(found))
    if num_best < found.logprobs.shape[1]:
        kept = kept._replace(every=None)
    if not num_listed:
        kept = kept._replace(listed_ids=None, listed_logprobs=None)
    for array in jax.tree.leaves(kept):
        array.copy_to_host_async()
    return kept


def columns(found: Found, num_best: np.ndarray, num_listed: np.ndarray, has_token: np.ndarray) -> LogprobsLists:
    """The chosen id, the best ids and the listed ids of each row, as many as it asks for.

    found: as NumPy arrays, B rows or more. num_best: i32[B], NO_LOGPROBS for a row without any. num_listed: i32[B].
    has_token: bool[B], rows that have a chosen id; the others show nothing.
    """
    count, have = len(num_best), found.logprobs.shape[1]
    ids, values = found.logprob_token_ids[:count], found.logprobs[:count]
    if found.every is not None and num_best.max() >= have:
        ids, values = _with_all_ids(found, ids, values, num_best)
        have = ids.shape[1]
    if found.listed_ids is not None:
        ids = np.concatenate([ids, found.listed_ids[:count]], axis=1)
        values = np.concatenate([values, found.listed_logprobs[:count]], axis=1)
    asked = np.where(num_best > NO_LOGPROBS, np.minimum(num_best, have - 1), NO_LOGPROBS)
    width = np.where(asked > NO_LOGPROBS, asked + 1 + num_listed, 0)
    place = np.arange(max(int(width.max(initial=0)), 1))
    # Listed ids stand behind the last best id that the device found; they move up to the last one that was asked for.
    source = np.where(place <= asked[:, None], place, place - asked[:, None] - 1 + have)
    source = np.minimum(source, ids.shape[1] - 1)
    has_any = has_token & (asked > NO_LOGPROBS)
    shown = (place < width[:, None]) & has_any[:, None]
    return LogprobsLists(
        np.where(shown, np.take_along_axis(ids, source, axis=1), NO_ID),
        np.where(shown, np.take_along_axis(values, source, axis=1), np.float32(-np.inf)),
        np.where(has_any, found.sampled_token_ranks[:count], 0),
    )


def _with_all_ids(
    found: Found, ids: np.ndarray, values: np.ndarray, num_best: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Columns for the most best ids that a row asks for. Such rows are few, and sorted one by one."""
    missing = int(num_best.max()) + 1 - ids.shape[1]
    ids = np.pad(ids, ((0, 0), (0, missing)), constant_values=NO_ID)
    values = np.pad(values, ((0, 0), (0, missing)), constant_values=-np.inf)
    for row in np.flatnonzero(num_best >= found.logprobs.shape[1]).tolist():
        every = found.every[row]
        order = np.argsort(-every, kind="stable")[: num_best[row]]
        ids[row, 1 : 1 + len(order)], values[row, 1 : 1 + len(order)] = order, every[order]
    return ids, values
