"""vLLM V2's batch order (oracle 7 of its facts): drafts first, then decodes, then by length; ties keep their order."""

from __future__ import annotations

from jaxrunner.runner.batch_order import sort_requests


def test_order_with_drafts():
    tokens = {"a": 512, "b": 1, "c": 4, "d": 1, "e": 3, "f": 64}
    drafts = {"c": [1, 2, 3], "e": [1, 2]}
    ids, counts = sort_requests(tokens, 4, drafts)
    assert ids == ["c", "e", "b", "d", "f", "a"]
    assert counts.tolist() == [4, 3, 1, 1, 64, 512]


def test_order_without_drafts():
    ids, counts = sort_requests({"a": 512, "b": 1, "c": 1, "d": 8})
    assert ids == ["b", "c", "d", "a"]
    assert counts.tolist() == [1, 1, 8, 512]


def test_a_uniform_batch_keeps_the_scheduler_order():
    assert sort_requests({"z": 1, "a": 1, "m": 1})[0] == ["z", "a", "m"]
