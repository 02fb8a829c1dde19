"""The order of requests in a batch: vLLM V2's, which puts decodes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def sort_requests(
    num_scheduled_tokens: Mapping[str, int],
    decode_query_len: int = 1,
    drafts: Mapping[str, Sequence[int]] | None = None,
) -> tuple[list[str], np.ndarray]:
    """(request ids, i32 token counts) in batch order.

    Requests with drafts come first; among equals those with exactly `decode_query_len` tokens; then fewer tokens
    before more. Ties keep the scheduler's order. A batch that is uniform keeps it whole.
    """
    ids = list(num_scheduled_tokens)
    counts = np.fromiter(num_scheduled_tokens.values(), np.int32, len(ids))
    if not drafts and (counts == decode_query_len).all():
        return ids, counts
    no_draft = np.array([not (drafts and drafts.get(i)) for i in ids])
    order = np.lexsort((counts, counts != decode_query_len, no_draft))
    return [ids[i] for i in order], counts[order]
