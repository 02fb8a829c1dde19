"""The order of requests in a batch: vLLM V2's, which puts decodes first."""

from __future__ import annotations

import numpy as np


def batch_order(
    num_tokens: np.ndarray, decode_query_len: int = 1, has_drafts: np.ndarray | None = None
) -> np.ndarray | None:
    """i64[B], the scheduler's place of each request of the batch; None if that is its order already.

    num_tokens: i32[B] and has_drafts: bool[B], of the requests in the scheduler's order. Requests with drafts come
    first; among equals those with exactly `decode_query_len` tokens; then fewer tokens before more. Ties keep the
    scheduler's order. A batch that is uniform keeps it whole.
    """
    is_longer = num_tokens != decode_query_len
    if has_drafts is not None:
        return np.lexsort((num_tokens, is_longer, ~has_drafts))
    # One key, in which most of a batch is in order already: decodes have the least.
    return np.argsort(np.where(is_longer, num_tokens, 0), kind="stable") if is_longer.any() else None
