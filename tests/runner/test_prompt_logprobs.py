"""Log-probabilities of prompts behind a runner: any chunks, any company, evictions; against transformers."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from jaxrunner import HostRunner, SamplingParams
from jaxrunner.errors import AdmissionError
from tests.conftest import GOLDEN
from tests.oracle import logprobs as oracle
from tests.runner.plans import CONFIG, GREEDY, both_runners, new, plan

ATOL, BLOCKS = 3e-4, {"a": [1, 2, 3, 4, 5, 6, 7, 8, 9], "b": [10, 11, 12, 13], "c": [14, 15, 16]}
ASKING = SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=3, prompt_logprob_token_ids=[255, 0])


@functools.cache
def golden() -> tuple[list[int], np.ndarray]:
    """(a prompt of 61 tokens, the log-probabilities after each)."""
    data = np.load(GOLDEN / "tiny" / "llama" / "golden.npz")
    return data["input_ids_2"].reshape(-1).tolist(), np.stack([oracle.log_softmax(r) for r in data["logits_2"][-61:]])


def step(runner, so):
    assert runner.execute_model(so) is None
    return runner.sample_tokens()


def assert_scores_of(output, req_id, prompt, num_best=3, listed=(255, 0)):
    """Every token from the second on: number, rank, the best ids in order, the listed ids."""
    lists, expected = output.prompt_logprobs_dict[req_id], golden()[1]
    assert lists.logprob_token_ids.shape == (len(prompt) - 1, num_best + 1)
    assert lists.logprob_token_ids[:, 0].tolist() == prompt[1:]
    for i, token in enumerate(prompt[1:]):
        assert lists.logprobs[i, 0] == pytest.approx(expected[i, token], abs=ATOL)
        at_least, at_most = ((expected[i] >= expected[i, token] + slack).sum() for slack in (ATOL, -ATOL))
        assert max(at_least, 1) <= lists.sampled_token_ranks[i] <= at_most
        best = lists.logprob_token_ids[i, 1:]
        np.testing.assert_allclose(lists.logprobs[i, 1:], np.sort(expected[i])[::-1][:num_best], atol=ATOL)
        np.testing.assert_allclose(lists.logprobs[i, 1:], expected[i, best], atol=ATOL)
    found = output.prompt_token_id_logprobs_dict[req_id]
    np.testing.assert_allclose(found, expected[: len(prompt) - 1, list(listed)], atol=ATOL)


@both_runners
@pytest.mark.parametrize("chunks", [(32, 29), (1, 1, 32, 1, 25, 1), (30, 30, 1)])
def test_every_chunking_gives_the_scores_of_the_whole_prompt(runner, chunks):
    """Also chunks of one token, which would be a decode; nothing is handed out before the last chunk."""
    prompt, _ = golden()
    fresh = [new("a", prompt, BLOCKS["a"], ASKING)]
    for i, count in enumerate(chunks):
        output = step(runner, plan({"a": count}, fresh if i == 0 else []))
        assert (output.prompt_logprobs_dict == {}) == (i < len(chunks) - 1)
    assert_scores_of(output, "a", prompt)
    after = step(runner, plan({"a": 1}))
    assert after.prompt_logprobs_dict == after.prompt_token_id_logprobs_dict == {}


@both_runners
def test_requests_in_one_step_get_what_each_asked_for(runner):
    """Scores of three prompts end in different steps, beside a decode; only listed ids; a prompt of one token."""
    prompt, expected = golden()
    few = dataclasses.replace(ASKING, prompt_logprobs=0, prompt_logprob_token_ids=None)
    listed = dataclasses.replace(ASKING, prompt_logprobs=None, prompt_logprob_token_ids=[7])
    step(runner, plan({"d": 3}, [new("d", [5, 6, 7], [20, 21], GREEDY)]))
    fresh = [new("a", prompt[:20], BLOCKS["a"], ASKING), new("b", prompt[:12], BLOCKS["b"], few)]
    first = step(runner, plan({"d": 1, "a": 15, "b": 12}, fresh))
    assert list(first.prompt_logprobs_dict) == ["b"]
    assert first.prompt_token_id_logprobs_dict == {}
    scores = first.prompt_logprobs_dict["b"]
    assert scores.logprob_token_ids.tolist() == [[t] for t in prompt[1:12]]
    np.testing.assert_allclose(scores.logprobs[:, 0], [expected[i, prompt[i + 1]] for i in range(11)], atol=ATOL)
    last = step(runner, plan({"d": 1, "b": 1, "a": 5, "c": 9}, [new("c", prompt[:9], BLOCKS["c"], listed)]))
    assert list(last.prompt_logprobs_dict) == ["a"]
    assert_scores_of(last, "a", prompt[:20])
    found = last.prompt_token_id_logprobs_dict["c"]
    assert (found.shape, found.dtype) == ((8, 1), np.float32)
    np.testing.assert_allclose(found[:, 0], expected[:8, 7], atol=ATOL)
    one = step(runner, plan({"e": 1}, [new("e", [5], [22], ASKING)], finished_req_ids=set("abcd")))
    assert one.prompt_logprobs_dict == {}
    assert len(one.sampled_token_ids[0]) == 1


@both_runners
def test_k068_a_prompt_that_is_evicted_between_chunks_is_scored_whole(runner):
    """Chunks 4/4/1 of 9 tokens, evicted after the first; resumed after its first token it has been reported."""
    prompt = golden()[0][:9]
    step(runner, plan({"a": 4}, [new("a", prompt, BLOCKS["a"], ASKING)]))
    assert runner.execute_model(plan({}, preempted_req_ids={"a"})) is not None
    fresh = [new("a", prompt, BLOCKS["b"], ASKING)]
    outputs = [step(runner, plan({"a": n}, fresh if i == 0 else [])) for i, n in enumerate((4, 4, 1))]
    assert outputs[0].prompt_logprobs_dict == outputs[1].prompt_logprobs_dict == {}
    assert_scores_of(outputs[2], "a", prompt)
    (token,) = outputs[2].sampled_token_ids[0]
    assert runner.execute_model(plan({}, preempted_req_ids={"a"})) is not None
    again = step(runner, plan({"a": 10}, [new("a", prompt, [20, 21], ASKING, prefill_token_ids=[*prompt, token])]))
    assert again.prompt_logprobs_dict == {}
    assert len(again.sampled_token_ids[0]) == 1


@both_runners
def test_an_id_that_comes_back_in_one_step_begins_anew(runner):
    prompt = golden()[0]
    step(runner, plan({"a": 4}, [new("a", prompt[:9], BLOCKS["a"], ASKING)]))
    fresh = [new("a", prompt[:12], BLOCKS["b"], ASKING)]
    assert_scores_of(step(runner, plan({"a": 12}, fresh, finished_req_ids={"a"})), "a", prompt[:12])
    plain = step(runner, plan({"a": 12}, [new("a", prompt[:12], BLOCKS["a"])], finished_req_ids={"a"}))
    assert plain.prompt_logprobs_dict == {}
    step(runner, plan({"a": 4}, [new("a", prompt[:9], BLOCKS["a"], ASKING)]))
    runner.execute_model(plan({}, finished_req_ids={"a"}))
    assert len(runner._prompts) == 0, "nobody waits for the scores of a request that has ended"


@both_runners
def test_a_row_forgets_what_its_last_owner_asked_for(runner):
    """The next owner asks for nothing, the one after it for the numbers of its own token alone."""
    prompt = golden()[0][:9]
    asking = dataclasses.replace(ASKING, logprobs=2, logprob_token_ids=[7, 8])
    assert_scores_of(step(runner, plan({"a": 9}, [new("a", prompt, BLOCKS["a"], asking)])), "a", prompt)
    row = runner.rows["a"]
    output = step(runner, plan({"b": 9}, [new("b", prompt, BLOCKS["b"])], finished_req_ids={"a"}))
    assert (output.logprobs, output.prompt_logprobs_dict) == (None, {})
    assert runner.rows["b"] == row
    rows = runner.batch.rows if isinstance(runner, HostRunner) else runner._host
    assert (rows.num_listed[row], rows.num_prompt_scores[row]) == (0, 0)
    own = dataclasses.replace(GREEDY, logprobs=0)
    output = step(runner, plan({"c": 9}, [new("c", prompt, BLOCKS["a"], own)], finished_req_ids={"b"}))
    assert output.logprobs.logprob_token_ids.tolist() == output.sampled_token_ids


@both_runners
def test_results_may_be_read_late_and_in_any_order(runner):
    runner.config = dataclasses.replace(CONFIG, async_scheduling=True)
    prompt = golden()[0][:25]
    fresh = [new("a", prompt, BLOCKS["a"], ASKING)]
    outputs = [step(runner, plan({"a": n}, fresh if i == 0 else [])) for i, n in enumerate((10, 10, 5, 1))]
    runner.execute_model(plan({}, finished_req_ids={"a"}))
    last, *others = [output.get_output() for output in reversed(outputs[:3])]
    assert_scores_of(last, "a", prompt)
    assert all(output.prompt_logprobs_dict == {} for output in others)
    assert outputs[2].get_output() is last


@both_runners
def test_tokens_that_were_not_run_here_cannot_be_scored(runner):
    prompt = golden()[0][:20]
    step(runner, plan({"b": 20}, [new("b", prompt, BLOCKS["a"])]))
    cached = new("a", prompt, BLOCKS["a"], ASKING, num_computed_tokens=8)
    with pytest.raises(AdmissionError, match=r"'a': prompt_logprobs.*8 are computed.*prefix cache"):
        runner.execute_model(plan({"a": 12}, [cached]))
    assert "a" not in runner.rows


@both_runners
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": 21}, "'a': prompt_logprobs is 21; at most 20"),
        ({"prompt_logprobs": -1}, "'a': prompt_logprobs is -1.*max_logprobs=-1"),
        ({"prompt_logprob_token_ids": [256]}, "prompt_logprob_token_ids holds 256"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids holds -1"),
        ({"logprob_token_ids": [1] * 129}, r"ListSizes\(logprob_token_ids=129\)"),
        ({"prompt_logprob_token_ids": [1] * 129}, r"ListSizes\(prompt_logprob_token_ids=129\)"),
    ],
)
def test_what_a_runner_does_not_give_is_refused(runner, fields, message):
    with pytest.raises(AdmissionError, match=message):
        runner.execute_model(plan({"a": 2}, [new("a", [1, 2], [1], SamplingParams(**fields))]))
    assert len(runner.rows) == 0
