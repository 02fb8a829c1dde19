"""`BlockLists`: blocks that join the tables of many requests, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

SEQUENCES = {tuple, list}


class BlockLists(NamedTuple):
    """Of n requests, a list for each of G KV-cache groups. sizes: i32[n, G], blocks in each list. ids: i32[N], of
    all blocks, request after request and within one group after group.
    """

    sizes: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, block_ids: Sequence[Sequence[Sequence[int]]], num_groups: int) -> BlockLists:
        """block_ids: of each request a list for each group, as `check_block_lists` wants them: allocator blocks."""
        lists = list(chain.from_iterable(block_ids))
        return cls._of_lists(lists, list(chain.from_iterable(lists)), num_groups)

    @classmethod
    def if_sound(cls, block_ids: Sequence[Any], num_groups: int, num_blocks: int) -> BlockLists | None:
        """`of` these, if `check_block_lists` accepts the lists of every request and all blocks are in 1..num_blocks-1.
        One look at all of them; None also where each of them has to be looked at.
        """
        if not {*map(type, block_ids)} <= SEQUENCES or not {*map(len, block_ids)} <= {num_groups}:
            return None
        lists = [*chain.from_iterable(block_ids)]
        if not {*map(type, lists)} <= SEQUENCES:
            return None
        ids = [*chain.from_iterable(lists)]
        if not {*map(type, ids)} <= {int} or not 0 < min(ids, default=1) <= max(ids, default=1) < num_blocks:
            return None
        if len({*ids}) != len(ids) and not all(len(set(each)) == len(each) for each in lists):
            return None
        return cls._of_lists(lists, ids, num_groups)

    def in_kernel_blocks(self, per_block: np.ndarray) -> BlockLists:
        """Allocator block b of a group as the kernels see it: blocks b*n, ..., b*n + n-1. per_block: i32[G], each n."""
        if max(per_block.tolist()) == 1:
            return self
        n = np.repeat(np.tile(per_block, len(self.sizes)), self.sizes.ravel())
        ids = np.repeat(self.ids * n - (n.cumsum() - n), n) + np.arange(n.sum())
        return BlockLists(self.sizes * per_block, ids.astype(np.int32))

    @classmethod
    def _of_lists(cls, lists: list[Sequence[int]], ids: list[int], num_groups: int) -> BlockLists:
        sizes = np.fromiter(map(len, lists), np.int32, len(lists)).reshape(-1, num_groups)
        return cls(sizes, np.fromiter(ids, np.int32, len(ids)))
