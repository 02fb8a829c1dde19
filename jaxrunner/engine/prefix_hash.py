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


def chain(root: bytes, token_ids: np.ndarray, block_size: int) -> list[bytes]:
    """Hashes of all full blocks of a sequence."""
    digests, parent = [], root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_digest(parent, token_ids[start : start + block_size])
        digests.append(parent)
    return digests
