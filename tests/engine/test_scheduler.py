"""The scheduler alone, without a device: plans, budgets, blocks and ends."""

from __future__ import annotations

import pytest

from jaxrunner import SamplingParams
from jaxrunner.contract import ModelRunnerOutput
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from jaxrunner.errors import AdmissionError
from jaxrunner.runner.config import RunnerConfig


def make(max_num_seqs=3, max_model_len=64, max_num_batched_tokens=16, num_blocks=30, block_size=4) -> Scheduler:
    return Scheduler(RunnerConfig(max_num_seqs, max_model_len, max_num_batched_tokens, num_blocks, block_size), 1)


def request(req_id: str, length: int, max_tokens: int | None = 4, **fields) -> Request:
    return Request(req_id, list(range(1, length + 1)), SamplingParams(temperature=0.0, max_tokens=max_tokens), **fields)


def answer(scheduler: Scheduler, so, token: int = 9) -> None:
    """Give every request whose prefill is complete one token."""
    done = [
        r
        for r in so.num_scheduled_tokens
        if scheduler.running[r].num_computed_tokens >= scheduler.running[r].num_tokens
    ]
    ids = list(so.num_scheduled_tokens)
    tokens = [[token] if r in done else [] for r in ids]
    scheduler.update(ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, tokens))


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_first():
    scheduler = make()
    scheduler.add(request("short", 3, 10))
    so = scheduler.schedule()
    assert so.num_scheduled_tokens == {"short": 3}
    answer(scheduler, so)
    scheduler.add(request("long", 40))
    for expected in (
        {"short": 1, "long": 15},
        {"short": 1, "long": 15},
        {"short": 1, "long": 10},
        {"short": 1, "long": 1},
    ):
        so = scheduler.schedule()
        assert so.num_scheduled_tokens == expected
        assert so.total_num_scheduled_tokens == sum(expected.values())
        answer(scheduler, so)
    assert len(scheduler.running["short"].output_token_ids) == 5


def test_new_requests_carry_everything_and_later_steps_only_differences():
    scheduler = make()
    scheduler.add(request("a", 5))
    so = scheduler.schedule()
    assert so.scheduled_new_reqs[0].block_ids == ([1, 2],)  # 5 + 4 - 1 tokens in blocks of 4
    answer(scheduler, so)
    so = scheduler.schedule()
    assert so.scheduled_new_reqs == []
    assert (so.scheduled_cached_reqs.req_ids, so.scheduled_cached_reqs.num_computed_tokens) == (["a"], [5])


def test_requests_wait_for_rows_and_for_blocks():
    scheduler = make(max_num_seqs=2, num_blocks=5)
    for name in "abc":
        scheduler.add(request(name, 4, 5))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a", "b"]
    assert [r.request_id for r in scheduler.waiting] == ["c"]
    scheduler.abort("a")
    so = scheduler.schedule()
    assert so.finished_req_ids == {"a"}
    assert [r.req_id for r in so.scheduled_new_reqs] == ["c"]


def test_blocks_come_back_when_idle():
    scheduler = make()
    for name in "abcd":
        scheduler.add(request(name, 6))
    while scheduler.has_work:
        so = scheduler.schedule()
        if so.num_scheduled_tokens:
            answer(scheduler, so)
    assert scheduler.pools[0].num_free == scheduler.pools[0].num_usable


@pytest.mark.parametrize(
    ("token", "fields", "reason", "stop_reason"),
    [
        (7, {"eos_token_ids": (2, 7)}, "stop", None),
        (2, {"eos_token_ids": (2, 7)}, "stop", None),
        (9, {"eos_token_ids": (2, 7)}, None, None),
    ],
)
def test_k107_every_end_id_of_the_model_stops(token, fields, reason, stop_reason):
    r = request("a", 2, **fields)
    r.append(token, 64)
    assert (r.finish_reason, r.stop_reason) == (reason, stop_reason)


def test_k059_ignore_eos_covers_all_end_ids_but_not_the_users():
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(11,))
    r = Request("a", [1], params, eos_token_ids=(2, 7))
    for token in (2, 7, 2):
        r.append(token, 64)
        assert r.finish_reason is None
    r.append(11, 64)
    assert (r.finish_reason, r.stop_reason) == ("stop", 11)


@pytest.mark.parametrize(("length", "max_tokens", "expected"), [(60, None, 4), (60, 2, 2), (64, 10, 1), (63, 10, 1)])
def test_generation_ends_at_the_context_limit(length, max_tokens, expected):
    r = request("a", length, max_tokens)
    while r.finish_reason is None:
        r.append(9, 64)
    assert (len(r.output_token_ids), r.finish_reason) == (expected, "length")


def test_requests_that_can_never_run_are_refused_at_once():
    scheduler = make(num_blocks=6)
    with pytest.raises(AdmissionError, match="max_model_len 64"):
        scheduler.add(request("a", 65))
    with pytest.raises(AdmissionError, match="KV blocks"):
        scheduler.add(request("b", 20, 10))
    scheduler.add(request("c", 4))
    with pytest.raises(AdmissionError, match="already in use"):
        scheduler.add(request("c", 4))
    assert len(scheduler.waiting) == 1


def test_aborting_what_is_unknown_is_nothing():
    scheduler = make()
    assert scheduler.abort("x") is None
    scheduler.add(request("a", 4))
    assert scheduler.abort("a").finish_reason == "abort"
    assert not scheduler.has_work
