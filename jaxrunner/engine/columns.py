"""What the scheduler knows about running requests, as NumPy columns: a steady step touches no per-request object."""

from __future__ import annotations

import numpy as np


class Columns:
    """One row ("slot") per running request. L = max_model_len, W = blocks of a full sequence, S = stop ids.

    prompt_len, known, planned: tokens of the prompt; tokens whose ids the host has; those and the ones that steps in
    flight will sample. computed: tokens handed to the runner. final: planned length at which a request is over;
    its last token is never run. epoch: raised when a slot changes hands, so that a late result finds nobody.
    tokens: i32[slots, L + 1]. blocks: i32[slots, W]. stops: i32[slots, S], -1 where unused.
    registered: full blocks that the prefix cache knows. structured: bool[slots], the request has a grammar.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, max_stop_ids: int):
        integers = ("prompt_len", "known", "planned", "computed", "final", "num_blocks", "registered", "epoch")
        for name in integers:
            setattr(self, name, np.zeros(num_slots, np.int64))
        self.structured = np.zeros(num_slots, bool)
        self.tokens = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.blocks = np.zeros((num_slots, -(-max_model_len // block_size) + 1), np.int32)
        self.stops = np.full((num_slots, max_stop_ids), -1, np.int32)

    prompt_len: np.ndarray
    known: np.ndarray
    planned: np.ndarray
    computed: np.ndarray
    final: np.ndarray
    num_blocks: np.ndarray
    registered: np.ndarray
    epoch: np.ndarray

    def blocks_of(self, slot: int) -> list[int]:
        return self.blocks[slot, : self.num_blocks[slot]].tolist()

    def append_blocks(self, slot: int, blocks: list[int]) -> None:
        start = self.num_blocks[slot]
        self.blocks[slot, start : start + len(blocks)] = blocks
        self.num_blocks[slot] += len(blocks)
