"""From the runner's log-probabilities to those of one token, sampled or of a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jaxrunner.contract import LogprobsLists
from jaxrunner.engine.outputs import Logprob
from jaxrunner.models.tokenizer import Tokenizer


def token_logprobs(
    lists: LogprobsLists, row: int, count: int, tokenizer: Tokenizer | None, num_listed: int = 0
) -> dict[int, Logprob]:
    """token id -> `Logprob`: the chosen token first, then the best `count`, then the `num_listed` that were named.

    Each id stands once. count: -1 for all. A named id that is not among the best has no rank.
    """
    ids = lists.logprob_token_ids[row]
    end = int(np.count_nonzero(ids >= 0))
    count = end - 1 - num_listed if count < 0 else min(count, end - 1 - num_listed)
    values = np.asarray(lists.logprobs[row], np.float64).tolist()
    ranks = itertools.chain([int(lists.sampled_token_ranks[row])], range(1, count + 1), itertools.repeat(None))
    found: dict[int, Logprob] = {}
    for token_id, value, rank in zip(ids[:end].tolist(), values, ranks, strict=False):
        if token_id not in found:
            text = tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else None
            found[token_id] = Logprob(value, rank, text)
    return found


def listed_logprobs(values: np.ndarray, token_ids: Sequence[int]) -> list[dict[int, float]]:
    """values: f32[N, len(token_ids)] -> for each of N tokens, token id -> log-probability."""
    return [dict(zip(token_ids, row, strict=True)) for row in np.asarray(values, np.float64).tolist()]
