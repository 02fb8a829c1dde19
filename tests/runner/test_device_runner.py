"""Runners over real plans: the same tokens however a batch is cut, ordered, freed and refilled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrunner import HostRunner, SamplingParams
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.contract import KVCacheBlockCopy
from jaxrunner.errors import AdmissionError
from jaxrunner.state.runner_state import host_view
from tests.conftest import GOLDEN
from tests.runner.plans import CONFIG, both_runners, new, plan, run, snapshot

BLOCKS = {"a": list(range(1, 8)), "b": list(range(8, 20)), "c": list(range(20, 32))}


@pytest.fixture(scope="module")
def golden():
    data = np.load(GOLDEN / "tiny" / "llama" / "golden.npz")
    return [(data[f"input_ids_{i}"].reshape(-1).tolist(), data[f"greedy_{i}"].tolist()) for i in range(3)]


def complete(runner, req_id: str, prompt: list[int], steps: int, chunk: int = 32, **fields) -> list[int]:
    tokens, done = [], 0
    known = fields.get("prefill_token_ids") or prompt
    first = [new(req_id, prompt, BLOCKS[req_id], **fields)]
    while done < len(known):
        count = min(chunk, len(known) - done)
        tokens += run(runner, plan({req_id: count}, first))[req_id]
        first, done = [], done + count
    for _ in range(steps - 1):
        tokens += run(runner, plan({req_id: 1}))[req_id]
    return tokens


@both_runners
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_greedy_equals_the_golden_at_every_chunk_size(runner, golden, chunk):
    prompt, greedy = golden[1]
    assert complete(runner, "a", prompt, 16, chunk) == greedy


@both_runners
def test_a_batch_of_all_prompts_equals_each_alone(runner, golden):
    (p0, g0), (p1, g1), (p2, g2) = golden
    tokens = {"a": [], "b": [], "c": []}

    def step(so):
        for req_id, ids in run(runner, so).items():
            tokens[req_id] += ids

    step(
        plan(
            {"c": 14, "a": 1, "b": 17},
            [new("c", p2, BLOCKS["b"]), new("a", p0, BLOCKS["a"]), new("b", p1, BLOCKS["c"])],
        )
    )
    step(plan({"c": 30, "b": 1, "a": 1}))
    step(plan({"c": len(p2) - 44, "b": 1, "a": 1}))
    for _ in range(20):
        step(plan(dict.fromkeys(("a", "b", "c"), 1)))
    assert [tokens[r][:16] for r in "abc"] == [g0, g1, g2]


@both_runners
def test_the_result_does_not_depend_on_dict_order(runner, golden):
    """K011: rows follow the batch order of the plan, results follow the request."""
    (p0, g0), (p1, g1), _ = golden
    run(runner, plan({"b": len(p1), "a": 1}, [new("a", p0, BLOCKS["a"]), new("b", p1, BLOCKS["b"])]))
    first = run(runner, plan({"b": 1, "a": 1}))
    second = run(runner, plan({"a": 1, "b": 1}))
    assert [first["a"][0], second["a"][0]] == g0[1:3]
    assert [first["b"][0], second["b"][0]] == g1[1:3]


@both_runners
def test_abort_and_resubmit_of_an_id_in_one_step(runner, golden):
    """K017: the old request is removed before the new one of the same id is added."""
    (p0, _), (p1, g1), _ = golden
    complete(runner, "a", p0, 5)
    so = plan({"a": len(p1)}, [new("a", p1, BLOCKS["b"])], finished_req_ids={"a"})
    tokens = run(runner, so)["a"]
    for _ in range(3):
        tokens += run(runner, plan({"a": 1}))["a"]
    assert tokens == g1[:4]
    assert len(runner.rows) == 1


@both_runners
def test_a_new_request_replaces_one_of_its_id_without_a_finish(runner, golden):
    (p0, _), (p1, g1), _ = golden
    complete(runner, "a", p0, 3)
    assert run(runner, plan({"a": len(p1)}, [new("a", p1, BLOCKS["b"])]))["a"] == g1[:1]
    assert len(runner.rows) == 1
    runner.audit()


@both_runners
def test_preemption_and_resumption_continue_the_same_tokens(runner, golden):
    """K015: the resumed prefill covers prompt and outputs, and samples after the last of them only."""
    prompt, greedy = golden[1]
    first = complete(runner, "a", prompt, 4)
    assert runner.execute_model(plan({}, preempted_req_ids={"a"})) is not None
    assert len(runner.rows) == 0
    rest = complete(runner, "a", prompt, 4, chunk=5, prefill_token_ids=prompt + first)
    assert first + rest == greedy[:8]
    row = runner.rows["a"]
    rows = runner.batch.rows if isinstance(runner, HostRunner) else runner.state.requests
    assert host_view(rows.prompt_len)[row] == len(prompt)
    assert host_view(rows.prefill_len)[row] == len(prompt) + 4


@both_runners
def test_a_prefix_hit_starts_in_the_middle(runner, golden):
    """A request whose first blocks hold another's KV computes only the rest."""
    prompt, greedy = golden[1]
    complete(runner, "a", prompt, 2)
    shared = new("b", prompt, BLOCKS["a"][:1] + BLOCKS["b"][:3], num_computed_tokens=8)
    config, runner.config = (
        runner.config,
        runner.config.__class__(**{**runner.config.__dict__, "check_invariants": False}),
    )
    assert run(runner, plan({"b": len(prompt) - 8}, [shared]))["b"] == greedy[:1]
    runner.config = config


def test_blocks_are_zeroed_and_copied_before_the_forward_pass(runner, golden):
    """A copy-on-write tail: `b` continues from a private copy of `a`'s last block, which `a` goes on writing."""
    prompt, greedy = golden[1]
    tokens = complete(runner, "a", prompt, 4)
    known = prompt + tokens[:3]
    tail = BLOCKS["a"][len(known) // 8]
    shared = [*BLOCKS["a"][: len(known) // 8], BLOCKS["b"][0]]
    copy = new(
        "b", prompt, shared + BLOCKS["b"][1:3], prefill_token_ids=known + tokens[3:], num_computed_tokens=len(known)
    )
    runner.state = runner.state.replace(
        kv=runner.state.kv.replace(blocks=tuple(b.at[:, :, BLOCKS["b"][0]].set(np.nan) for b in runner.state.kv.blocks))
    )
    runner.config = runner.config.__class__(**{**runner.config.__dict__, "check_invariants": False})
    so = plan(
        {"b": 1, "a": 1},
        [copy],
        new_block_ids_to_zero=[BLOCKS["b"][0] + 3],
        kv_cache_block_copies=[KVCacheBlockCopy(tail, BLOCKS["b"][0])],
    )
    step = run(runner, so)
    assert step["a"] == step["b"] == greedy[4:5]
    assert not np.asarray(runner.state.kv.blocks[0][:, :, BLOCKS["b"][0] + 3]).any()


@both_runners
def test_a_known_request_is_not_run_past_its_tokens_its_blocks_or_the_context(runner, golden):
    """Each plan is refused before anything has changed: the requests go on as if it had not come."""
    (p0, g0), (p1, g1), _ = golden
    refused = {
        "'a': tokens up to 3 are scheduled of 2 that are known": plan({"a": 2}),
        "'b': tokens up to 17 are scheduled of 16 that its blocks hold": plan({"a": 1, "b": 8}),
        "'b': tokens up to 18 are scheduled of 17 that are known": plan({"b": 9}, blocks={"b": [10]}),
    }
    assert (len(p0), len(p1)) == (1, 17)
    assert run(runner, plan({"a": 1, "b": 9}, [new("a", p0, BLOCKS["a"]), new("b", p1, [8, 9])]))["a"] == g0[:1]
    for message, so in refused.items():
        before = snapshot(runner)
        with pytest.raises(AdmissionError, match=message):
            runner.execute_model(so)
        for was, now in zip(before, snapshot(runner), strict=True):
            np.testing.assert_array_equal(now, was)
    assert run(runner, plan({"a": 1, "b": 8}, blocks={"b": [10]})) == {"a": g0[1:2], "b": g1[:1]}


@both_runners
def test_a_request_ends_at_the_context(runner):
    prompt = [5] * CONFIG.max_model_len
    assert len(run(runner, plan({"c": 32}, [new("c", prompt, BLOCKS["c"])]))["c"]) == 0
    run(runner, plan({"c": 32}))
    assert len(run(runner, plan({"c": 32}))["c"]) == 1
    with pytest.raises(AdmissionError, match="tokens up to 97 are scheduled of 96"):
        runner.execute_model(plan({"c": 1}))


@both_runners
def test_the_scheduler_mirror_never_overwrites_the_device_count(runner, golden):
    prompt, greedy = golden[1]
    tokens = complete(runner, "a", prompt, 2)
    so = plan({"a": 1})
    so.scheduled_cached_reqs.num_computed_tokens = [3]
    assert tokens + run(runner, so)["a"] == greedy[:3]


@both_runners
def test_a_row_is_reused_without_a_trace(runner, golden):
    (p0, g0), (p1, _), _ = golden
    noisy = SamplingParams(temperature=1.5, seed=7)
    run(runner, plan({"b": len(p1)}, [new("b", p1, BLOCKS["b"], noisy)]))
    row = runner.rows["b"]
    tokens = run(runner, plan({"a": 1}, [new("a", p0, BLOCKS["a"])], finished_req_ids={"b"}))["a"]
    assert runner.rows["a"] == row
    for _ in range(3):
        tokens += run(runner, plan({"a": 1}))["a"]
    assert tokens == g0[:4]


@both_runners
def test_asynchronous_outputs_may_be_read_late(runner, golden):
    """K084, K085: the next steps are launched before this step's tokens are read; each output keeps its own."""
    runner.config = dataclasses.replace(CONFIG, async_scheduling=True)
    prompt, greedy = golden[1]
    outputs = []
    runner.execute_model(plan({"a": len(prompt)}, [new("a", prompt, BLOCKS["a"])]))
    outputs.append(runner.sample_tokens())
    for _ in range(7):
        runner.execute_model(plan({"a": 1}))
        outputs.append(runner.sample_tokens())
    assert [o.get_output().sampled_token_ids[0][0] for o in reversed(outputs)] == greedy[7::-1]
    assert outputs[0].get_output() is outputs[0].get_output()


@both_runners
def test_seeded_draws_do_not_depend_on_neighbours_rows_or_order(runner, golden):
    """K042: the same tokens alone and beside an unseeded request."""
    (p0, _), (p1, _), _ = golden
    seeded = SamplingParams(temperature=0.8, seed=42 + 2**40)
    wild = SamplingParams(temperature=1.0)
    run(runner, plan({"z": 2}, [new("z", [3, 4], [30])]))
    alone = run(runner, plan({"a": len(p1), "z": 1}, [new("a", p1, BLOCKS["a"], seeded)]))["a"]
    for _ in range(5):
        alone += run(runner, plan({"a": 1, "z": 1}))["a"]
    plan_b = plan(
        {"b": len(p0), "a": len(p1)},
        [new("b", p0, BLOCKS["b"], wild), new("a", p1, BLOCKS["c"], seeded)],
        finished_req_ids={"a", "z"},
    )
    beside = run(runner, plan_b)["a"]
    for _ in range(5):
        beside += run(runner, plan({"b": 1, "a": 1}))["a"]
    assert beside == alone


@both_runners
def test_k040_a_prompt_that_fills_the_context_gives_one_token(runner):
    """Rule: it is run, its one token is returned, and nothing is stored past the last column."""
    prompt = [int(x) for x in np.random.default_rng(0).integers(2, 200, 96)]
    blocks = list(range(1, 13))
    run(runner, plan({"a": 32}, [new("a", prompt, blocks)]))
    run(runner, plan({"a": 32}))
    assert len(run(runner, plan({"a": 32}))["a"]) == 1
    rows = runner.batch.rows if isinstance(runner, HostRunner) else runner.state.requests
    assert host_view(rows.token_ids)[runner.rows["a"]].tolist() == prompt


@both_runners
def test_500_mixed_steps_compile_nothing(runner, golden):
    """After the first uses nothing compiles, helper functions included."""
    runner.warm_up()
    rng = np.random.default_rng(1)
    free, live, serial = list(range(1, 40)), {}, 0
    finished: set[str] = set()

    def random_plan():
        nonlocal serial
        tokens, fresh, budget = {}, [], 32
        for req_id, request in list(live.items()):
            count = min(int(rng.integers(1, 9)), request["left"], budget) if request["left"] else min(1, budget)
            if count:
                request["left"] = max(request["left"] - count, 0)
                tokens[req_id], budget = count, budget - count
        while len(live) < 4 and len(free) >= 8 and budget > 4 and rng.random() < 0.6:
            req_id, serial = f"r{serial}", serial + 1
            length = int(rng.integers(1, 30))
            count = min(length, budget)
            live[req_id] = {"left": length - count, "blocks": [free.pop() for _ in range(8)], "age": 0}
            kinds = (
                {},
                {"top_k": 5},
                {"min_tokens": 2, "top_p": 0.9},
                {"logprobs": int(rng.integers(0, 4)), "logprob_token_ids": [7]},
                {"prompt_logprobs": 1},
                {"repetition_penalty": 1.3, "logit_bias": {int(rng.integers(256)): 2.0}},
                {"allowed_token_ids": [3, 4, 5], "return_sampling_mask": True},
            )
            params = SamplingParams(float(rng.integers(0, 2)), seed=serial, **kinds[rng.integers(len(kinds))])
            fresh.append(new(req_id, rng.integers(2, 250, length).tolist(), live[req_id]["blocks"], params))
            tokens[req_id], budget = count, budget - count
        return plan(tokens, fresh, finished_req_ids=set(finished))

    def one_step():
        so = random_plan()
        finished.clear()
        if runner.execute_model(so) is None:
            runner.sample_tokens()
        for req_id in list(live):
            live[req_id]["age"] += 1
            if live[req_id]["age"] > rng.integers(8, 28):
                free.extend(live.pop(req_id)["blocks"])
                finished.add(req_id)

    runner.config = CONFIG.__class__(**{**CONFIG.__dict__, "check_invariants": False})
    with CompileCounter() as counter:
        for _ in range(500):
            one_step()
    runner.audit()
    assert serial > 20
    assert counter.count == 0, f"{counter.count} programs were compiled after warm-up"
