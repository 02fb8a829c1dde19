"""The sampler behind a runner: tiers, log-probabilities of the requests that ask, and rows that forget their owner."""

from __future__ import annotations

import numpy as np

from jaxrunner import SamplingParams
from tests.runner.plans import both_runners, lists_of, new, plan, run


def step(runner, so):
    assert runner.execute_model(so) is None
    return runner.sample_tokens()


@both_runners
def test_a_runner_reports_what_each_request_asks_for_and_samples_the_same(runner):
    """A chunk without a token, a decode beside a prefill, different numbers, and none when the asking one is gone."""
    asking = SamplingParams(temperature=0.8, seed=5, logprobs=3, top_k=20)
    plain = SamplingParams(temperature=0.8, seed=6)
    prompt = list(range(20, 40))
    first = step(
        runner, plan({"a": 8, "b": 3}, [new("a", prompt, [1, 2, 3, 4], asking), new("b", [5, 6, 7], [5], plain)])
    )
    assert first.logprobs.sampled_token_ranks.tolist() == [0, 0]
    assert (first.logprobs.logprob_token_ids == -1).all()
    outputs = [step(runner, plan({"a": 12, "b": 1})), step(runner, plan({"a": 1, "b": 1}))]
    for output in outputs:
        a, b = output.req_id_to_index["a"], output.req_id_to_index["b"]
        ids, values = output.logprobs.logprob_token_ids, output.logprobs.logprobs
        assert [ids[a, 0]] == output.sampled_token_ids[a]
        assert ids.shape == (2, 4)
        assert (ids[b] == -1).all()
        assert (np.diff(values[a, 1:]) <= 0).all()
        assert values[a, 0] <= values[a, 1]
        assert 1 <= output.logprobs.sampled_token_ranks[a] <= 20
    alone = step(runner, plan({"b": 1}, finished_req_ids={"a"}))
    assert alone.logprobs is None
    # The same requests without log-probabilities draw the same tokens.
    silent = SamplingParams(temperature=0.8, seed=5, top_k=20)
    step(runner, plan({"c": 8}, [new("c", prompt, [6, 7, 8, 9], silent)], finished_req_ids={"b"}))
    tokens = [step(runner, plan({"c": 12})).sampled_token_ids[0], step(runner, plan({"c": 1})).sampled_token_ids[0]]
    assert tokens == [output.sampled_token_ids[output.req_id_to_index["a"]] for output in outputs]


@both_runners
def test_a_row_forgets_the_stop_ids_of_its_last_owner(runner):
    """Greedy tokens become stop ids, the request must avoid them; the next one need not."""
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)

    def generate(req_id, params, count, gone=()):
        tokens = run(runner, plan({req_id: 3}, [new(req_id, [5, 9, 17], [1, 2], params)], finished_req_ids=set(gone)))[
            req_id
        ]
        for _ in range(count - 1):
            tokens += run(runner, plan({req_id: 1}))[req_id]
        return tokens

    free = generate("a", greedy, 5)
    banned = SamplingParams(temperature=0.0, ignore_eos=True, min_tokens=3, stop_token_ids=tuple(set(free)))
    held = generate("b", banned, 5, gone=["a"])
    row = runner.rows["b"]
    assert not set(held[:3]) & set(free)
    stop_ids = lists_of(runner, row)[runner.config.list_sizes.columns["stop_ids"]]
    assert sorted(set(stop_ids.tolist()) - {0}) == sorted(t + 1 for t in set(free))
    assert generate("c", greedy, 5, gone=["b"]) == free
    assert runner.rows["c"] == row
    assert not lists_of(runner, row).any()


@both_runners
def test_a_batch_runs_in_the_lowest_tier_that_covers_it(runner):
    """Also when the request that asked for most has gone."""
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(seed=1)
    asked = {"g": greedy, "r": drawn, "f": SamplingParams(top_k=3), "l": SamplingParams(temperature=0.0, logprobs=0)}
    fresh = [new(req_id, [5, 6], [1 + i], params) for i, (req_id, params) in enumerate(asked.items())]
    before = {str(e.program): e.hits for e in runner.table.entries.values()}
    run(runner, plan(dict.fromkeys(asked, 2), fresh))
    gone = set()
    for req_id in ("l", "f", "r"):
        gone = {req_id}
        del asked[req_id]
        run(runner, plan(dict.fromkeys(asked, 1), finished_req_ids=gone))
    used = {str(e.program): e.hits - before.get(str(e.program), 0) for e in runner.table.entries.values()}
    assert [used[f"finish[4]/{tier}"] for tier in ("full", "filtered", "random")] == [1, 1, 1]
    assert used["decode[4x1]/greedy"] == 1
    assert used["begin decode[4x1]"] == 2
