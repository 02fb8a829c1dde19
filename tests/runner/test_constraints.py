"""Constraints behind a runner: what a request brings, what it may not, and that no neighbour ever notices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import DeviceRunner, ListSizes, SamplingParams, ThinkingTokens
from jaxrunner.errors import AdmissionError
from jaxrunner.runner.output import Asked, AsyncOutput, BatchIds
from jaxrunner.sampling.packed_bits import pack_bits
from jaxrunner.stages.sample import StepOutput
from jaxrunner.state.runner_state import host_view
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, GREEDY, LADDER, both_runners, lists_of, new, num_computed, plan, run

PROMPT, BLOCKS = [5, 9, 17, 9], {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9], "d": [10, 11, 12]}
HEAVY = SamplingParams(
    temperature=0.9,
    seed=2**40 + 3,
    top_p=0.9,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=0.2,
    logit_bias={9: 2.0, 255: -1.0},
    bad_words_token_ids=[[17], [9, 5]],
)


def admit(req_id, params, prompt=PROMPT, **fields):
    return new(req_id, prompt, BLOCKS[req_id], params, **fields)


def complete(runner, req_id, params, count, gone=()):
    tokens = run(runner, plan({req_id: len(PROMPT)}, [admit(req_id, params)], finished_req_ids=set(gone)))[req_id]
    for _ in range(count - 1):
        tokens += run(runner, plan({req_id: 1}))[req_id]
    return tokens


@both_runners
def test_a_seed_gives_the_same_tokens_in_any_company_row_and_after_a_preemption(runner):
    """With penalties, biases and bad words: alone; as the third of three; resumed after three tokens, in chunks."""
    alone = complete(runner, "a", HEAVY, 7)
    others = [
        admit("b", SamplingParams(seed=1, presence_penalty=2.0, allowed_token_ids=[3, 4, 5])),
        admit("c", GREEDY),
        admit("d", HEAVY),
    ]
    first = run(runner, plan({"b": 4, "c": 4, "d": 4}, others, finished_req_ids={"a"}))
    tokens = first["d"]
    for _ in range(2):
        tokens += run(runner, plan({"d": 1, "b": 1, "c": 1}))["d"]
    assert runner.execute_model(plan({}, preempted_req_ids={"d", "c"})) is not None
    back = new("d", PROMPT, [20, 21, 22], HEAVY, prefill_token_ids=PROMPT + tokens)
    assert run(runner, plan({"b": 1, "d": 4}, [back]))["d"] == []
    tokens += run(runner, plan({"d": 3, "b": 1}))["d"]
    for _ in range(3):
        tokens += run(runner, plan({"d": 1, "b": 1}))["d"]
    assert tokens == alone
    assert len(set(alone)) > 2
    runner.audit()


@both_runners
def test_k061_the_order_of_requests_does_not_matter(runner):
    """[no penalty, penalty] and [penalty, no penalty]: both requests have the same tokens in both."""
    penalty = SamplingParams(temperature=0.0, repetition_penalty=0.2, ignore_eos=True)
    seen = []
    for order in (("a", "b"), ("b", "a")):
        fresh = {"a": admit("a", GREEDY), "b": admit("b", penalty)}
        tokens = run(runner, plan(dict.fromkeys(order, 4), [fresh[r] for r in order]))
        for _ in range(5):
            for req_id, ids in run(runner, plan(dict.fromkeys(order, 1))).items():
                tokens[req_id] += ids
        seen.append((tokens["a"], tokens["b"]))
        runner.execute_model(plan({}, finished_req_ids={"a", "b"}))
    assert seen[0] == seen[1]
    assert len(set(seen[0][1])) < 6, "a penalty below 1 brings ids back"
    assert len(set(seen[0][0])) == 6


@both_runners
def test_a_request_without_any_id_left_fails_alone(runner):
    """Allowed: one id, which is a bad word too. Its neighbours get the tokens that they get without it."""
    drawn = SamplingParams(seed=7)
    expected = complete(runner, "a", drawn, 3), complete(runner, "b", HEAVY, 3, gone="a")
    stuck = SamplingParams(temperature=0.0, allowed_token_ids=[8], bad_words_token_ids=[[8]])
    fresh = [admit("c", drawn), admit("d", HEAVY), admit("a", stuck)]
    assert runner.execute_model(plan({"c": 4, "a": 4, "d": 4}, fresh, finished_req_ids={"b"})) is None
    output = runner.sample_tokens()
    tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    assert tokens["a"] == []
    assert list(output.sampling_errors) == ["a"]
    assert "'a'" in output.sampling_errors["a"]
    assert num_computed(runner, "a") == 0, "the row is as it was before the step"
    for finished in ({"a"}, set()):
        assert runner.execute_model(plan({"c": 1, "d": 1}, finished_req_ids=finished)) is None
        output = runner.sample_tokens()
        assert output.sampling_errors == {}
        for req_id, ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            tokens[req_id] += ids
    assert (tokens["c"], tokens["d"]) == expected


@both_runners
def test_a_trace_is_replayed_and_then_the_request_goes_on_by_itself(runner):
    """Log-probabilities are those of the given ids; a preemption in the middle of the trace changes nothing."""
    plain = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1)
    own = complete(runner, "a", dataclasses.replace(plain, logprobs=None), 2)
    trace = [0, 255, own[0]]
    replaying = dataclasses.replace(plain, replay_token_ids=trace)
    assert runner.execute_model(plan({"b": 4}, [admit("b", replaying)], finished_req_ids={"a"})) is None
    output = runner.sample_tokens()
    assert output.sampled_token_ids == [[0]]
    assert output.logprobs.logprob_token_ids[0].tolist() == [0, own[0]]
    assert output.logprobs.sampled_token_ranks[0] > 1
    assert run(runner, plan({"b": 1}))["b"] == [255]
    assert runner.execute_model(plan({}, preempted_req_ids={"b"})) is not None
    back = new("b", PROMPT, [20, 21], replaying, prefill_token_ids=[*PROMPT, 0, 255])
    tokens = run(runner, plan({"b": 6}, [back]))["b"] + run(runner, plan({"b": 1}))["b"]
    follow = new("c", [*PROMPT, *trace], BLOCKS["c"], GREEDY)
    assert tokens == [own[0], *run(runner, plan({"c": 7}, [follow], finished_req_ids={"b"}))["c"]]


@both_runners
def test_sampling_masks_of_the_requests_that_ask(runner):
    """The ids that each token was drawn from, ascending; nothing for a neighbour, an unfinished prompt, or nobody."""
    asking = SamplingParams(seed=3, top_k=3, return_sampling_mask=True)
    allowed = SamplingParams(temperature=0.0, allowed_token_ids=[200, 7, 31], return_sampling_mask=True)
    fresh = [admit("a", asking), admit("b", allowed), admit("c", HEAVY), admit("d", asking)]
    assert runner.execute_model(plan({"a": 4, "b": 4, "c": 4, "d": 2}, fresh)) is None
    output = runner.sample_tokens()
    masks = {req_id: output.sampling_masks.of_request(i).tolist() for i, req_id in enumerate(output.req_ids)}
    tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    assert len(masks["a"]) == 3
    assert tokens["a"][0] in masks["a"]
    assert masks["b"] == [7, 31, 200]
    assert tokens["b"][0] in masks["b"]
    assert masks["c"] == masks["d"] == []
    assert output.sampling_masks.token_ids.dtype == np.int32
    assert runner.execute_model(plan({"c": 1}, finished_req_ids={"a", "b", "d"})) is None
    assert runner.sample_tokens().sampling_masks is None


def test_masks_are_taken_apart_as_numpy_does_it():
    """Dense and sparse rows, bits at both ends of a word and of the vocabulary, rows that do not count."""
    rng = np.random.default_rng(0)
    bits = rng.random((6, 100)) < np.array([0.0, 0.02, 0.5, 1.0, 0.5, 0.5])[:, None]
    bits[1, [0, 31, 32, 99]] = True
    ids = np.array([5, 5, 5, 5, -1, 5], np.int32)[:, None]
    output = StepOutput(ids, (ids[:, 0] >= 0).astype(np.int32), sampling_mask=pack_bits(jnp.asarray(bits)))
    wanted = np.array([True, True, True, True, True, False])
    step_output = jax.tree.map(jnp.asarray, output)
    asked = Asked.nothing(6)._replace(wants_mask=wanted)
    masks = AsyncOutput(BatchIds("abcdef"), step_output, asked).get_output().sampling_masks
    for row, expected in enumerate([*bits[:4], [], []]):
        assert masks.of_request(row).tolist() == np.flatnonzero(expected).tolist()


@both_runners
def test_k010_a_row_forgets_every_list_of_its_last_owner(runner):
    free = complete(runner, "a", GREEDY, 4)
    everything = dataclasses.replace(HEAVY, allowed_token_ids=[3, 4], min_tokens=2, replay_token_ids=[3])
    complete(runner, "b", everything, 3, gone="a")
    row = runner.rows["b"]
    assert lists_of(runner, row).any()
    assert complete(runner, "c", GREEDY, 4, gone="b") == free
    assert runner.rows["c"] == row
    assert not lists_of(runner, row).any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {1200: -100.0}}, r"logit_bias holds 1200.*0\.\.255"),  # K054
        ({"logit_bias": dict.fromkeys(range(4), 1.0)}, r"ListSizes\(logit_bias=4\)"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids holds -1"),
        ({"allowed_token_ids": range(5)}, r"ListSizes\(allowed_token_ids=5\)"),
        ({"bad_words_token_ids": [[1, 256]]}, "bad_words_token_ids holds 256"),
        ({"bad_words_token_ids": [[1, 2], [3, 4, 5]]}, r"ListSizes\(bad_words_tokens=5\)"),
        ({"bad_words": ["the"]}, "bad_words_token_ids"),
        ({"replay_token_ids": [1]}, r"ListSizes\(replay_tokens=1\)"),
        ({"thinking_token_budget": 4}, "ThinkingTokens"),
    ],
)
def test_what_a_row_cannot_hold_is_refused_with_the_way_out(fields, message):
    """Before anything has changed: the plan's other request is admitted by the next plan."""
    model, weights = load_tiny("llama")
    sizes = ListSizes(logit_bias=3, allowed_token_ids=4, bad_words_tokens=4, replay_tokens=0)
    runner = DeviceRunner(model, weights, dataclasses.replace(CONFIG, list_sizes=sizes), ladder=LADDER)
    bad = admit("a", SamplingParams(**fields))
    with pytest.raises(AdmissionError, match=rf"request 'a'.*{message}"):
        runner.execute_model(plan({"a": 4, "b": 4}, [bad, admit("b", GREEDY)]))
    assert len(runner.rows) == 0
    assert not host_view(runner.state.sampling.params).any()


def test_a_config_says_what_thinking_is():
    with pytest.raises(AdmissionError, match="thinking"):
        ThinkingTokens(start=(), end=(1,))
    assert ThinkingTokens(start=[1], end=[2, 3]).forced_end == (2, 3)
    with pytest.raises(AdmissionError, match="replay_tokens"):
        ListSizes(replay_tokens=-1)
