"""Runners with processed log-probabilities of all ids, in which a NaN ends its request: one of each for all tests."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import DeviceRunner, HostRunner, SamplingParams
from jaxrunner.compile.counter import CompileCounter
from tests.conftest import GOLDEN, load_tiny
from tests.oracle import logprobs as oracle
from tests.runner.conftest import table_of
from tests.runner.plans import CONFIG, GREEDY, LADDER, new, num_computed, plan

REPORTING = dataclasses.replace(CONFIG, logprobs_mode="processed_logprobs", max_logprobs=-1, nan_check="fail")
DATA = np.load(GOLDEN / "tiny" / "llama" / "golden.npz")
PROMPT, SCORES = DATA["input_ids_1"].reshape(-1).tolist(), DATA["logits_1"].reshape(-1, 256)[-17:]
BLOCKS = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9], "d": [10, 11, 12]}
VOCAB, DAMAGED, ATOL = 256, 201, 3e-4


@pytest.fixture(params=[DeviceRunner, HostRunner], ids=["device", "host"])
def runner(request):
    """A token's embedding is NaN: whoever reads it has NaN logits from there on."""
    model, weights = load_tiny("llama")
    damaged = {**weights, "embed_tokens": weights["embed_tokens"].at[DAMAGED].set(jnp.nan)}
    fresh = request.param(model, damaged, REPORTING, ladder=LADDER)
    fresh.table = table_of(request.param, REPORTING)
    return fresh


def step(runner, so):
    assert runner.execute_model(so) is None
    return runner.sample_tokens()


def test_all_ids_of_a_token_and_of_a_prompt(runner):
    """-1 gives every id once, best first; a neighbour gets its three; what top_k drops has -inf."""
    every = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    three = SamplingParams(temperature=2.0, seed=1, top_k=2, logprobs=3, logprob_token_ids=[5])
    fresh = [new("a", PROMPT, BLOCKS["a"], every), new("b", PROMPT[:15], BLOCKS["b"], three)]
    output = step(runner, plan({"a": 17, "b": 15}, fresh))
    a, b = output.req_id_to_index["a"], output.req_id_to_index["b"]
    lists = output.logprobs
    assert lists.logprob_token_ids.shape == (2, VOCAB + 1)
    assert sorted(lists.logprob_token_ids[a, 1:].tolist()) == list(range(VOCAB))
    assert (np.diff(lists.logprobs[a, 1:]) <= 0).all()
    expected = oracle.log_softmax(SCORES[16])
    np.testing.assert_allclose(lists.logprobs[a], expected[lists.logprob_token_ids[a]], atol=ATOL)
    shown, rest = lists.logprobs[b, :5], lists.logprob_token_ids[b, 5:]
    two = oracle.log_softmax(np.sort(SCORES[14])[:-3:-1] / 2.0)
    np.testing.assert_allclose(shown[1:3], two, atol=ATOL)
    assert shown[3] == -np.inf
    assert lists.logprob_token_ids[b, 4] == 5
    assert (rest == -1).all()
    prompt = output.prompt_logprobs_dict["a"]
    assert prompt.logprob_token_ids.shape == (16, VOCAB + 1)
    for i, row in enumerate(prompt.logprobs):
        expected = oracle.log_softmax(SCORES[i])
        np.testing.assert_allclose(row, expected[prompt.logprob_token_ids[i]], atol=ATOL)
        assert sorted(prompt.logprob_token_ids[i, 1:].tolist()) == list(range(VOCAB))


def test_a_nan_ends_its_request_and_touches_no_other(runner):
    """In a prompt, in an unfinished one, and beside a decode; every executable kind; tokens as in clean company."""
    drawn = SamplingParams(seed=7, top_k=20)
    clean = [
        step(
            runner,
            plan({"b": 4, "c": 4}, [new("b", [5, 9, 17, 9], BLOCKS["b"], drawn), new("c", [8] * 4, BLOCKS["c"])]),
        )
    ]
    clean += [step(runner, plan({"b": 1, "c": 1})) for _ in range(2)]
    assert [o.num_nans_in_logits for o in clean] == [{"b": 0, "c": 0}] * 3
    expected = [dict(zip(o.req_ids, o.sampled_token_ids, strict=True)) for o in clean]
    runner.execute_model(plan({}, finished_req_ids={"b", "c"}))

    fresh = [new("b", [5, 9, 17, 9], BLOCKS["c"], drawn), new("c", [8] * 4, BLOCKS["b"])]
    bad = new("a", [5, DAMAGED, 3], BLOCKS["a"], GREEDY)
    unfinished = new("d", [DAMAGED] * 9, BLOCKS["d"], GREEDY)
    for gone, so in enumerate(
        (
            plan({"b": 4, "a": 3, "c": 4, "d": 5}, [*fresh, bad, unfinished]),
            plan({"b": 1, "c": 1}),
            plan({"b": 1, "c": 1}),
        )
    ):
        so.finished_req_ids = {"a", "d"} if gone == 1 else set()
        output = step(runner, so)
        tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        assert {r: tokens[r] for r in "bc"} == expected[gone]
        if gone == 0:
            assert output.num_nans_in_logits == {"a": VOCAB, "b": 0, "c": 0, "d": VOCAB}
            assert tokens["a"] == tokens["d"] == []
            assert output.sampling_errors.keys() == {"a", "d"}
            assert "'a': 256 of its logits are NaN" in output.sampling_errors["a"]
            assert num_computed(runner, "a") == num_computed(runner, "d") == 0
        else:
            assert output.sampling_errors == {}
    runner.audit()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, repetition_penalty=1.1)], ids=["fused", "split"])
def test_a_nan_is_reported_with_both_steps_that_were_launched_before_anybody_knew(runner, params):
    """One step in flight; a request's last prompt token is the damaged one. Then it is as it was before both steps."""
    runner.config = dataclasses.replace(REPORTING, async_scheduling=True)
    damaged = new("a", [5, DAMAGED], BLOCKS["a"], params, num_computed_tokens=1)
    outputs = [step(runner, plan({"a": 1, "b": 1}, [damaged, new("b", [5], BLOCKS["b"], params)]))]
    outputs.append(step(runner, plan({"a": 1, "b": 1})))
    outputs.append(step(runner, plan({"b": 1})))
    results = [output.get_output() for output in outputs]
    assert [list(result.sampling_errors) for result in results] == [["a"], ["a"], []]
    for result in results[:2]:
        assert result.num_nans_in_logits == {"a": VOCAB, "b": 0}
        assert "'a': 256 of its logits are NaN" in result.sampling_errors["a"]
        assert list(map(len, result.sampled_token_ids)) == [int(req_id == "b") for req_id in result.req_ids]
    assert num_computed(runner, "a") == 1
    step(runner, plan({"b": 1}, finished_req_ids={"a"}))


@pytest.mark.parametrize("runner", [DeviceRunner], indirect=True)
def test_k117_no_mode_compiles_after_warm_up(runner):
    """Processed log-probabilities of every kind of step and of prompts; the modes are part of the executables, which
    both runners make alike."""
    runner.warm_up()
    kinds = ({"logprobs": 2}, {"logprobs": -1, "top_p": 0.9}, {"prompt_logprobs": 1}, {"logprob_token_ids": [4]}, {})
    rng, number, live = np.random.default_rng(0), 0, {}
    with CompileCounter() as counter:
        for _ in range(40):
            gone = {r for r in live if rng.random() < 0.3}
            live = {r: blocks for r, blocks in live.items() if r not in gone}
            tokens, fresh = dict.fromkeys(live, 1), []
            while len(live) < 4 and rng.random() < 0.7:
                free = next(b for b in BLOCKS.values() if b not in live.values())
                req_id, number = f"r{number}", number + 1
                params = SamplingParams(float(rng.integers(0, 2)), seed=number, **kinds[rng.integers(len(kinds))])
                prompt = rng.integers(2, 200, rng.integers(1, 7)).tolist()
                live[req_id], tokens[req_id] = free, len(prompt)
                fresh.append(new(req_id, prompt, free, params))
            so = plan(tokens, fresh, finished_req_ids=gone)
            if runner.execute_model(so) is None:
                runner.sample_tokens()
    assert counter.count == 0
    assert number > 15
