"""The scheduler against an oracle runner, without a device: plans, budgets, blocks, prefixes, preemption and ends."""

from __future__ import annotations

import pytest

from jaxrunner import SamplingParams
from jaxrunner.engine import prefix_hash
from jaxrunner.engine.request import Request
from jaxrunner.errors import AdmissionError
from tests.engine.driver import Engine
from tests.oracle.runner import continuation

PROMPT = list(range(1, 21))


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_first():
    engine = Engine()
    engine.add("short", [1, 2, 3], 10)
    assert engine.step().num_scheduled_tokens == {"short": 3}
    engine.add("long", list(range(1, 41)))
    plans = [engine.step().num_scheduled_tokens for _ in range(4)]
    assert plans == [{"short": 1, "long": n} for n in (15, 15, 10, 1)]
    engine.run()
    assert next(r for r in engine.ended if r.request_id == "long").output_token_ids == continuation(
        list(range(1, 41)), 4
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_new_requests_carry_everything_and_later_steps_only_differences(depth):
    engine = Engine(depth=depth)
    engine.add("a", [1, 2, 3, 4, 5])
    first = engine.step()
    assert first.scheduled_new_reqs[0].block_ids == ([1, 2],)
    later = engine.step()
    assert later.scheduled_new_reqs == []
    assert (later.scheduled_cached_reqs.req_ids, later.scheduled_cached_reqs.num_computed_tokens) == (["a"], [5])
    engine.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_every_request_gets_its_continuation(depth, prefix_caching):
    engine = Engine(depth=depth, prefix_caching=prefix_caching)
    lengths = {"a": 1, "b": 7, "c": 16, "d": 30, "e": 4, "f": 50}
    for name, length in lengths.items():
        engine.add(name, PROMPT[:1] * length, 9)
    engine.run()
    for request in engine.ended:
        expected = continuation(PROMPT[:1] * lengths[request.request_id], 9)
        assert request.output_token_ids == expected
        assert request.finish_reason == "length"
    assert len(engine.ended) == len(lengths)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preemption_changes_no_token(depth):
    """K013, K014: too few blocks for all; results of preempted requests that arrive late find nobody."""
    engine = Engine(depth=depth, num_blocks=12, max_num_seqs=4)
    for i in range(6):
        engine.add(f"r{i}", [i + 1] * (3 + i), 24)
    engine.run()
    assert sum(r.num_preemptions for r in engine.ended) > 0
    for r in engine.ended:
        assert r.output_token_ids == continuation(r.prompt_token_ids, 24)


def test_a_resumed_request_comes_as_new_with_all_its_tokens():
    engine = Engine(num_blocks=9, max_num_seqs=2)
    engine.add("a", [1] * 8, 20)
    engine.add("b", [2] * 8, 20)
    while not engine.plans or not engine.plans[-1].preempted_req_ids:
        engine.step()
    assert engine.plans[-1].preempted_req_ids == {"b"}
    while not engine.plans[-1].scheduled_new_reqs:
        engine.step()
    (again,) = engine.plans[-1].scheduled_new_reqs
    assert again.req_id == "b"
    assert again.prefill_token_ids[:8] == again.prompt_token_ids == [2] * 8
    assert len(again.prefill_token_ids) > 8
    engine.run()


def test_priorities_decide_who_runs_first_and_who_is_preempted():
    engine = Engine(num_blocks=9, max_num_seqs=2)
    engine.add("low", [1] * 8, 20, priority=5)
    engine.add("high", [2] * 8, 20, priority=-1)
    engine.add("mid", [3] * 8, 20, priority=2)
    assert [r.request_id for r in engine.scheduler.waiting] == ["high", "mid", "low"]
    assert list(engine.step().num_scheduled_tokens) == ["high", "mid"]
    while not engine.plans[-1].preempted_req_ids:
        engine.step()
    assert engine.plans[-1].preempted_req_ids == {"mid"}
    engine.run()
    assert [r.request_id for r in engine.ended] == ["high", "mid", "low"]


def test_k022_an_identical_prompt_still_runs_its_last_token():
    engine = Engine()
    for name in ("first", "second"):
        engine.add(name, PROMPT[:8], 3)
        engine.run()
    first, second = engine.ended
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    assert second.output_token_ids == first.output_token_ids == continuation(PROMPT[:8], 3)


def test_k023_after_a_full_hit_the_chain_still_has_its_blocks():
    engine = Engine()
    for name in "abc":
        engine.add(name, PROMPT[:8], 2)
        engine.run()
    engine.add("longer", PROMPT[:9], 2)
    engine.run()
    assert [r.num_cached_tokens for r in engine.ended] == [0, 4, 4, 8]


def test_outputs_are_part_of_the_prefix():
    engine = Engine()
    first = engine.add("a", PROMPT[:6], 8)
    engine.run()
    turn = PROMPT[:6] + first.output_token_ids + [50]
    engine.add("b", turn, 2)
    engine.run()
    assert engine.ended[1].num_cached_tokens == 12
    assert engine.ended[1].output_token_ids == continuation(turn, 2)


def test_k024_a_salt_separates_prefixes():
    engine = Engine()
    for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        engine.add(name, PROMPT[:9], 2, cache_salt=salt)
        engine.run()
    assert [r.num_cached_tokens for r in engine.ended] == [0, 0, 0, 8]


def test_k026_new_weights_forget_all_prefixes():
    engine = Engine()
    engine.add("a", PROMPT[:9], 2)
    engine.run()
    engine.scheduler.weights_changed()
    engine.runner.kv.clear()
    engine.add("b", PROMPT[:9], 2)
    engine.run()
    assert engine.ended[1].num_cached_tokens == 0


def test_a_block_is_hashed_once_however_long_its_request_waits(monkeypatch):
    """Waiting, admission, preemption and resumption: one hash for each full block of each request."""
    hashed = []
    real = prefix_hash.block_digest
    monkeypatch.setattr(prefix_hash, "block_digest", lambda *a: hashed.append(a) or real(*a))
    engine = Engine(num_blocks=9)
    for name in "abc":
        engine.add(name, [ord(name), *PROMPT[:14]], 8)
    engine.run()
    assert sum(r.num_preemptions for r in engine.ended)
    assert len(engine.plans) > 20
    assert all(len(r.output_token_ids) == 8 for r in engine.ended)
    assert len(hashed) == len({(parent, tokens.tobytes()) for parent, tokens in hashed}) <= 3 * (22 // 4)


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_run_together_share_what_is_already_computed(depth):
    engine = Engine(depth=depth, max_num_seqs=4, budget=64)
    engine.add("a", PROMPT[:12], 6)
    engine.step()
    for name in "bcd":
        engine.add(name, [*PROMPT[:12], ord(name)], 6)
    engine.step()
    assert (engine.scheduler.pool.ref_count == 4).sum() == 3
    engine.run()
    for r in engine.ended:
        assert r.output_token_ids == continuation(r.prompt_token_ids, 6)


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_and_resubmit_of_an_id_between_two_steps(depth):
    """K017: the old one's late result is not the new one's."""
    engine = Engine(depth=depth)
    engine.add("x", PROMPT[:5], 50)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.abort("x").finish_reason == "abort"
    engine.add("x", PROMPT[5:12], 4)
    plan = engine.step()
    assert plan.finished_req_ids == {"x"}
    assert [r.req_id for r in plan.scheduled_new_reqs] == ["x"]
    engine.run()
    assert engine.ended[-1].output_token_ids == continuation(PROMPT[5:12], 4)


def test_a_streaming_update_takes_the_place_of_the_request():
    engine = Engine(depth=1)
    engine.add("x", PROMPT[:5], 50)
    for _ in range(3):
        engine.step()
    longer = Request("x", PROMPT[:9], SamplingParams(temperature=0.0, max_tokens=3))
    engine.scheduler.replace(longer)
    engine.run()
    assert longer.output_token_ids == continuation(PROMPT[:9], 3)
    assert longer.num_cached_tokens == 4


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_id_ends_a_request_and_later_results_are_dropped(depth):
    expected = continuation(PROMPT[:5], 20)
    engine = Engine(depth=depth)
    request = engine.add("a", PROMPT[:5], 20, stop_token_ids=(expected[6],))
    engine.run()
    end = expected.index(expected[6]) + 1
    assert request.output_token_ids == expected[:end]
    assert (request.finish_reason, request.stop_reason) == ("stop", expected[6])


@pytest.mark.parametrize(("eos", "stops"), [((2, 7), True), ((3,), False)])
def test_k107_every_end_id_of_the_model_stops(eos, stops):
    expected = continuation(PROMPT[:3], 12)
    eos = (expected[5], 96) if stops else (next(t for t in range(97) if t not in expected),)
    engine = Engine()
    request = engine.add("a", PROMPT[:3], 12, eos_token_ids=eos)
    engine.run()
    if stops:
        assert request.output_token_ids == expected[: expected.index(expected[5]) + 1]
        assert (request.finish_reason, request.stop_reason) == ("stop", None)
    else:
        assert request.finish_reason == "length"


def test_a_slot_that_changes_hands_keeps_no_stop_id():
    expected = continuation(PROMPT[:3], 8)
    engine = Engine(max_num_seqs=1)
    engine.add("a", PROMPT[:3], 8, stop_token_ids=(expected[4],))
    engine.run()
    request = engine.add("b", PROMPT[:3], 8)
    engine.run()
    assert request.output_token_ids == expected


def test_an_aborted_request_keeps_what_had_arrived():
    engine = Engine(depth=1)
    request = engine.add("a", PROMPT[:3], 20)
    for _ in range(5):
        engine.step()
    engine.scheduler.abort("a")
    assert request.output_token_ids == continuation(PROMPT[:3], 4)


def test_k059_ignore_eos_covers_all_end_ids_but_not_the_users():
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(11,))
    assert Request("a", [1], params, eos_token_ids=(2, 7)).stop_ids == [11]
    params = SamplingParams(temperature=0.0, stop_token_ids=(11, 2))
    assert Request("a", [1], params, eos_token_ids=(2, 7)).stop_ids == [2, 7, 11]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("length", "max_tokens", "expected"), [(60, None, 4), (60, 2, 2), (64, 10, 1), (63, 10, 1)])
def test_generation_ends_at_the_context_limit(length, max_tokens, expected, depth):
    engine = Engine(depth=depth)
    request = engine.add("a", [5] * length, max_tokens)
    engine.run()
    assert (len(request.output_token_ids), request.finish_reason) == (expected, "length")


def test_requests_that_can_never_run_are_refused_at_once():
    engine = Engine(num_blocks=6)
    with pytest.raises(AdmissionError, match="max_model_len 64"):
        engine.add("a", [1] * 65)
    with pytest.raises(AdmissionError, match="KV blocks"):
        engine.add("b", [1] * 20, 10)
    with pytest.raises(AdmissionError, match="stop ids"):
        engine.add("d", [1], 4, stop_token_ids=range(65))
    engine.add("c", [1] * 4)
    with pytest.raises(AdmissionError, match="already in use"):
        engine.add("c", [1] * 4)
    assert len(engine.scheduler.waiting) == 1


def test_aborting_what_is_unknown_is_nothing():
    engine = Engine()
    assert engine.scheduler.abort("x") is None
    engine.add("a", [1, 2])
    assert engine.scheduler.abort("a").finish_reason == "abort"
    assert not engine.scheduler.has_work


def test_decodes_of_the_same_requests_share_their_numbers_of_tokens():
    engine = Engine()
    for name in "ab":
        engine.add(name, [1, 2, 3], max_tokens=8)
    plans = [engine.step() for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 3, "b": 3}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert plans[2].num_scheduled_tokens is plans[1].num_scheduled_tokens
    engine.add("c", [4])
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}
    engine.run()


def test_requests_that_come_and_go_are_put_in_order_once_a_plan(monkeypatch):
    """Sorting all of them for each one that comes or goes took most of a plan's time."""
    engine, sorts = Engine(), []
    reorder = engine.scheduler._reorder
    monkeypatch.setattr(engine.scheduler, "_reorder", lambda: (sorts.append(None), reorder()))
    for name in "abc":
        engine.add(name, [1, 2, 3], max_tokens=2)
    engine.step()  # all three come
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}  # and end
    assert len(sorts) == 1
    engine.add("d", [4], max_tokens=2)
    assert engine.step().num_scheduled_tokens == {"d": 1}
    assert len(sorts) == 2
    engine.run()


def test_an_id_is_in_use_while_its_request_waits_or_runs_and_free_after():
    engine = Engine()
    for _ in range(2):  # runs to its end
        engine.add("a", [1, 2, 3], max_tokens=2)
        engine.step()
        with pytest.raises(AdmissionError, match="already in use"):
            engine.add("a", [4])
        engine.run()
    for _ in range(2):  # is aborted while it waits
        engine.add("b", [1, 2, 3])
        with pytest.raises(AdmissionError, match="already in use"):
            engine.add("b", [4])
        engine.scheduler.abort("b")
    assert not engine.scheduler.has_unfinished
