"""Hash chains over the full blocks of a sequence: a block's hash names its tokens and everything before them."""

from __future__ import annotations

import hashlib

import numpy as np

DIGEST_SIZE = 16


def block_digest(parent: bytes, token_ids: np.ndarray) -> bytes:
    """Hash of one block. parent: hash of the block before it, or the namespace for the first one."""
    return hashlib.blake2b(
        np.ascontiguousarray(token_ids, np.int32).tobytes(), key=parent, digest_size=DIGEST_SIZE
    ).digest()


def namespace(*parts: object) -> bytes:
    """First parent of a chain. Everything besides the tokens that decides the KV goes in (adapter, weights version)."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=DIGEST_SIZE).digest()


class HashChain:
    """Hashes of the full blocks of one sequence, kept with its request and computed once each, however long it waits
    and however often it is preempted. root: see `namespace`."""

    def __init__(self, root: bytes, block_size: int):
        self.root = root
        self.block_size = block_size
        self._digests: list[bytes] = []

    def first(self, num_blocks: int, token_ids: np.ndarray) -> list[bytes]:
        """The hashes of the first `num_blocks` blocks. token_ids: i32, the sequence from its start on, at least as far
        as those blocks; tokens that were hashed before must not have changed."""
        digests, size = self._digests, self.block_size
        for start in range(len(digests) * size, num_blocks * size, size):
            digests.append(block_digest(digests[-1] if digests else self.root, token_ids[start : start + size]))
        return digests[:num_blocks]
