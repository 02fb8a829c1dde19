"""Input preparation as NumPy loops, written from the formulas; shares no code with the package."""

from __future__ import annotations

import numpy as np


def input_prep(
    *,
    rows,
    query_lens,
    computed,
    prefill_len,
    last_sampled,
    token_ids,
    tables,
    num_blocks,
    block_sizes,
    num_tokens,
    batch,
    num_draft_tokens=None,
    draft_tokens=None,
):
    """The arrays of a step as a dict.

    rows, query_lens, num_draft_tokens: of the live requests only. computed, prefill_len, last_sampled, token_ids,
    draft_tokens, tables (one a group), num_blocks: by state row. num_tokens, batch: padded sizes.
    """
    groups = range(len(tables))
    entries = 1 if draft_tokens is None else 1 + draft_tokens.shape[1]
    out = {
        "positions": np.zeros(num_tokens, np.int32),
        "input_ids": np.zeros(num_tokens, np.int32),
        "seq_lens": np.zeros(batch, np.int32),
        "logits_indices": np.zeros(batch * entries, np.int32),
        "block_table": [np.zeros((batch, tables[g].shape[1]), np.int32) for g in groups],
        "slot_mapping": [np.full(num_tokens, -1, np.int32) for _ in groups],
    }
    start = 0
    for b, (row, length) in enumerate(zip(rows, query_lens, strict=True)):
        drafts = 0 if num_draft_tokens is None else int(num_draft_tokens[b])
        end = start + length
        seq_len = out["seq_lens"][b] = computed[row] + length
        for g in groups:
            out["block_table"][g][b, : num_blocks[row, g]] = tables[g][row, : num_blocks[row, g]]
        for i in range(length):
            position = computed[row] + i
            out["positions"][start + i] = position
            out["input_ids"][start + i] = token_ids[row, min(position, token_ids.shape[1] - 1)]
            for g in groups:
                block, offset = divmod(int(position), block_sizes[g])
                physical = out["block_table"][g][b, block]
                out["slot_mapping"][g][start + i] = physical * block_sizes[g] + offset
        if seq_len > prefill_len[row]:  # samples again: the newest token and its drafts never left the device
            if length > drafts and seq_len - drafts - 1 >= prefill_len[row]:
                out["input_ids"][end - drafts - 1] = last_sampled[row]
            for i in range(drafts):
                out["input_ids"][end - drafts + i] = draft_tokens[row, i]
        for i in range(entries):
            index = min(end - 1 - drafts + i, end - 1)
            out["logits_indices"][b * entries + i] = max(index, 0)
        start = end
    return out
