"""Both runners give their forward passes the same arrays, bit for bit, once the requests are in one order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.two_runners_inputs import PER_REQUEST, PER_TOKEN, Inputs, capture, difference, known_ids, known_tokens
from tests.host_runner.test_same_tokens import Lockstep
from tests.runner.plans import CONFIG, GREEDY

LENGTHS = (40, 3, 17, 9, 30, 2, 25)


@pytest.fixture(scope="module")
def steps() -> list[tuple[Inputs, Inputs, dict[str, list[int]]]]:
    """Chunks of prompts, decodes, requests that come, end, move and are preempted; with the tokens known before."""
    lockstep = Lockstep(CONFIG, depth=0, num_blocks=12)
    for number, length in enumerate(LENGTHS):
        prompt = [(7 * number + j) % 200 + 1 for j in range(length)]
        lockstep.add(f"r{number}", prompt, dataclasses.replace(GREEDY, max_tokens=10 + 4 * number), 0)
    found = []
    while lockstep.scheduler.has_unfinished:
        tokens = known_tokens(lockstep.scheduler)
        with capture(lockstep.runners[0], "xla") as device, capture(lockstep.runners[1], "numpy") as host:
            lockstep.step()
        found += zip(device, host, [tokens] * len(device), strict=True)
    assert lockstep.num_preempted
    return found


def compared(device: Inputs, host: Inputs, tokens_of_device, tokens_of_host) -> str | None:
    return difference(device, host, known_ids(device, tokens_of_device), known_ids(host, tokens_of_host))


def with_array(inputs: Inputs, name: str, array: np.ndarray) -> Inputs:
    return dataclasses.replace(inputs, arrays=inputs.arrays | {name: array})


def test_every_step_has_the_same_inputs(steps):
    assert len(steps) > 20
    assert {len(device.req_ids) for device, _, _ in steps} >= {1, 2, 3, 4}
    assert [compared(device, host, tokens, tokens) for device, host, tokens in steps] == [None] * len(steps)


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_REQUEST, "query_lens", "last_token"])
@pytest.mark.parametrize("place", [0, -1])
def test_one_bit_is_a_difference(steps, name, place):
    device, host, tokens = steps[-1]
    flipped = host.arrays[name].copy()
    flipped.flat[place] ^= 1
    right = known_ids(device, tokens)
    assert difference(device, with_array(host, name, flipped), right, right) == name
    assert difference(with_array(device, name, flipped), host, right, right) == name
    assert difference(device, dataclasses.replace(host, req_ids=host.req_ids[1:]), right, right) == "requests"


def test_tokens_that_were_sampled_differently_are_no_difference(steps):
    for device, host, tokens in steps:
        # Another output for every second request, which the ids of its own runner follow.
        other = {r: ids if int(r[1:]) % 2 else [i ^ 1 for i in ids] for r, ids in tokens.items()}
        moved = with_array(host, "input_ids", known_ids(host, other))
        assert compared(device, moved, tokens, other) is None
        if (moved.arrays["input_ids"] != host.arrays["input_ids"]).any():
            assert compared(device, moved, tokens, tokens) == "input_ids"
            assert compared(device, host, tokens, other) == "input_ids"


def test_a_position_past_the_known_tokens_is_a_difference(steps):
    device, host, tokens = steps[-1]
    cut = {req_id: ids[:-1] for req_id, ids in tokens.items()}
    assert known_ids(host, cut)[0] == -1
    assert compared(device, host, tokens, cut) == compared(device, host, cut, tokens) == "input_ids"
