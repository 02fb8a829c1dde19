"""From the runner's log-probabilities to those of one token of one request."""

from __future__ import annotations

import numpy as np

from jaxrunner.contract import LogprobsLists
from jaxrunner.engine.outputs import Logprob
from jaxrunner.models.tokenizer import Tokenizer


def token_logprobs(lists: LogprobsLists, row: int, count: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """token id -> `Logprob`: the sampled token first, then the best `count`, each id once and with its own rank."""
    ids = lists.logprob_token_ids[row, : count + 1].tolist()
    values = np.asarray(lists.logprobs[row, : count + 1], np.float64).tolist()
    ranks = [int(lists.sampled_token_ranks[row]), *range(1, count + 1)]
    found: dict[int, Logprob] = {}
    for token_id, value, rank in zip(ids, values, ranks, strict=False):
        if token_id >= 0 and token_id not in found:
            text = tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else None
            found[token_id] = Logprob(value, rank, text)
    return found
