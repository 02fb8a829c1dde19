"""vLLM V2's batch order (oracle 7 of its facts): drafts first, then decodes, then by length; ties keep their order."""

from __future__ import annotations

import numpy as np

from jaxrunner.runner.batch_order import batch_order


def test_order_with_drafts():
    ids, num_tokens = "abcdef", np.array([512, 1, 4, 1, 3, 64], np.int32)
    order = batch_order(num_tokens, 4, np.array([i in "ce" for i in ids]))
    assert [ids[i] for i in order] == ["c", "e", "b", "d", "f", "a"]
    assert num_tokens[order].tolist() == [4, 3, 1, 1, 64, 512]


def test_order_without_drafts():
    assert batch_order(np.array([512, 1, 1, 8], np.int32)).tolist() == [1, 2, 3, 0]


def test_a_uniform_batch_keeps_the_scheduler_order():
    assert batch_order(np.array([1, 1, 1], np.int32)) is None
