"""Both runners give their forward passes the same arrays, bit for bit, once the requests are in one order."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.two_runners_inputs import PER_REQUEST, PER_TOKEN, Inputs, capture, difference
from tests.host_runner.test_same_tokens import Lockstep
from tests.runner.plans import CONFIG, GREEDY

LENGTHS = (40, 3, 17, 9, 30, 2, 25)


@pytest.fixture(scope="module")
def steps() -> list[tuple[Inputs, Inputs]]:
    """Chunks of prompts, decodes, requests that come, end, move and are preempted."""
    lockstep = Lockstep(CONFIG, depth=0, num_blocks=12)
    for number, length in enumerate(LENGTHS):
        prompt = [(7 * number + j) % 200 + 1 for j in range(length)]
        lockstep.add(f"r{number}", prompt, dataclasses.replace(GREEDY, max_tokens=10 + 4 * number), 0)
    found = []
    while lockstep.scheduler.has_unfinished:
        with capture(lockstep.runners[0], "xla") as device, capture(lockstep.runners[1], "numpy") as host:
            lockstep.step()
        found += zip(device, host, strict=True)
    assert lockstep.num_preempted
    return found


def test_every_step_has_the_same_inputs(steps):
    assert len(steps) > 20
    assert {len(device.req_ids) for device, _ in steps} >= {1, 2, 3, 4}
    assert [difference(device, host) for device, host in steps] == [None] * len(steps)


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_REQUEST, "query_lens", "last_token"])
def test_one_bit_is_a_difference(steps, name):
    device, host = steps[-1]
    flipped = host.arrays[name].copy()
    flipped.flat[-1] ^= 1
    changed = host.arrays | {name: flipped}
    assert difference(device, Inputs(host.req_ids, changed, host.upload_words)) == name
    assert difference(device, Inputs(host.req_ids[1:], host.arrays, host.upload_words)) == "requests"
