"""Log-probabilities: of the model's own logits, natural logarithms, true ranks, each id once, as many as asked for."""

from __future__ import annotations

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.contract import LogprobsLists
from jaxrunner.engine.logprobs import token_logprobs as entry_of
from jaxrunner.runner.output import Asked, AsyncOutput, BatchIds
from jaxrunner.sampling.logprobs import token_logprobs
from jaxrunner.stages.sample import StepOutput
from jaxrunner.state.reports import DEFAULT_REPORTS, Reports
from tests.conftest import GOLDEN

compiled = jax.jit(token_logprobs, static_argnames="reports")


def run(logits, chosen, reports=DEFAULT_REPORTS, listed=()):
    """listed: ids that every row names."""
    named = np.broadcast_to(np.array(listed, np.int32) + 1, (len(logits), len(listed)))
    return compiled(jnp.asarray(logits, jnp.float32), jnp.asarray(chosen, jnp.int32), jnp.asarray(named), reports)


def lists(logits, sampled, num_logprobs, has_token=None, reports=DEFAULT_REPORTS) -> LogprobsLists | None:
    """What a runner hands out for these logits and sampled ids."""
    sampled = jnp.asarray(sampled, jnp.int32)
    found = run(logits, sampled, reports)
    ids = sampled if has_token is None else jnp.where(jnp.asarray(has_token), sampled, -1)
    output = StepOutput(ids[:, None], (ids >= 0).astype(jnp.int32), found)
    asked = Asked.nothing(len(logits))._replace(num_logprobs=np.array(num_logprobs))
    return AsyncOutput(BatchIds([f"r{i}" for i in range(len(logits))]), output, asked).get_output().logprobs


def entries(logits, sampled, count) -> list[dict[int, tuple[float, int]]]:
    """Per row: id -> (logprob, rank), as the engine hands them out."""
    found = lists(logits, sampled, [count] * len(sampled))
    rows = [entry_of(found, row, count, None) for row in range(len(sampled))]
    return [{token: (e.logprob, e.rank) for token, e in row.items()} for row in rows]


def test_k064_a_sampled_id_is_listed_once_and_keeps_its_rank():
    first, last = entries([[4, 3, 2, 1]] * 2, [0, 3], 2)
    assert {token: rank for token, (_, rank) in first.items()} == {0: 1, 1: 2}
    assert {token: rank for token, (_, rank) in last.items()} == {3: 4, 0: 1, 1: 2}
    assert next(iter(last)) == 3, "the sampled token comes first"


def test_k064_the_best_ids_of_a_row_are_distinct_under_ties():
    found = run(jnp.zeros((2, 50)), jnp.array([7, 49]))
    assert found.logprob_token_ids[:, 1:].tolist() == [list(range(20))] * 2
    assert found.sampled_token_ranks.tolist() == [50, 50]  # ids at least as probable


def test_k065_zero_gives_the_sampled_token_alone_and_none_gives_nothing():
    assert lists(np.zeros((2, 30)), [3, 4], [-1, -1]) is None
    found = lists(np.arange(60).reshape(2, 30), [3, 4], [0, -1])
    assert found.logprob_token_ids.tolist() == [[3], [-1]]
    assert found.logprobs[1].tolist() == [-np.inf]
    assert found.sampled_token_ranks.tolist() == [27, 0]
    assert list(entries(np.zeros((1, 30)), [3], 0)[0]) == [3]


def test_k066_logarithms_not_probabilities():
    (row,) = entries([[0, 0]], [0], 2)
    assert [value for value, _ in row.values()] == pytest.approx([-math.log(2)] * 2, abs=1e-6)
    values = np.asarray(run(np.random.default_rng(1).normal(size=(8, 40)) * 50, np.zeros(8)).logprobs)
    assert (values <= 0).all()


def test_each_request_gets_the_columns_it_asked_for():
    found = lists(np.arange(120).reshape(4, 30), [1, 2, 3, 4], [2, -1, 5, 0], has_token=[True, True, False, True])
    assert found.logprob_token_ids.shape == (4, 6)
    assert found.logprob_token_ids[0].tolist() == [1, 29, 28, -1, -1, -1]
    assert (found.logprob_token_ids[1:3] == -1).all(), "nothing was asked for, nothing was sampled"
    assert found.logprob_token_ids[3].tolist() == [4, -1, -1, -1, -1, -1]
    assert found.sampled_token_ranks.tolist() == [29, 0, 0, 26]
    assert found.slice_request(3, 1).logprob_token_ids.tolist() == [[4, -1, -1, -1, -1, -1]]


def test_places_of_a_list_that_are_not_used_have_no_number():
    named = jnp.array([[0, 3, 0], [1, 0, 0]], jnp.int32)  # ids + 1
    found = compiled(jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32), named, DEFAULT_REPORTS)
    assert found.listed_ids.tolist() == [[-1, 2, -1], [0, -1, -1]]
    np.testing.assert_allclose(jnp.exp(found.listed_logprobs), [[0, 0.25, 0], [0.25, 0, 0]], rtol=1e-6)


def test_a_small_vocabulary_has_fewer_columns():
    assert [len(row) for row in entries([[4, 3, 2, 1]], [0], 20)] == [4]


def test_damaged_rows_do_not_raise_and_leave_others_alone():
    rows = np.zeros((4, 6))
    rows[0], rows[1], rows[2, 2] = np.nan, -np.inf, np.inf
    found = run(jnp.asarray(rows, jnp.float32), jnp.array([0, 0, 2, 5]), Reports(max_logprobs=3))
    assert (np.asarray(found.sampled_token_ranks) >= 1).all()
    assert ((np.asarray(found.logprob_token_ids) >= 0) & (np.asarray(found.logprob_token_ids) < 6)).all()
    assert (np.asarray(found.logprobs[1]) == -np.inf).all()
    np.testing.assert_allclose(found.logprobs[3], -math.log(6), rtol=1e-6)


@functools.cache
def golden(name):
    prompts = json.loads((GOLDEN / "smollm2" / "prompts.json").read_text())
    expected = json.loads((GOLDEN / "smollm2" / "f32.json").read_text())["prompts"]
    return tuple(next(p for p in source if p["name"] == name) for source in (prompts, expected))


@pytest.mark.smollm2
def test_an_engine_gives_the_golden_logprobs(smollm2_llm):
    """The 20 best at 8 positions, with their text, and a chosen token that is the best."""
    prompt, expected = golden("chat_short")
    greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=20, ignore_eos=True)
    (output,) = smollm2_llm.generate([prompt["ids"]], greedy)
    completion = output.outputs[0]
    assert completion.token_ids == expected["greedy"][:8]
    assert len(completion.logprobs) == 8
    for token, row, top in zip(completion.token_ids, completion.logprobs, expected["top20"], strict=False):
        assert len(row) == 20
        assert row[token].rank == 1
        assert row[token].decoded_token == smollm2_llm.tokenizer.decode([token], skip_special_tokens=False)
        for rank, (best, value) in enumerate(zip(top["ids"][:5], top["logprobs"], strict=False), 1):
            assert row[best].logprob == pytest.approx(value, abs=1e-3)
            assert row[best].rank == rank
    chosen = [row[token].logprob for token, row in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.smollm2
def test_k065_three_tokens_with_logprobs_zero(smollm2_llm):
    (output,) = smollm2_llm.generate([[504]], SamplingParams(temperature=0.0, max_tokens=3, logprobs=0))
    assert [list(row) for row in output.outputs[0].logprobs] == [[t] for t in output.outputs[0].token_ids]
    streamed = list(smollm2_llm.stream([504], SamplingParams(temperature=0.0, max_tokens=3, logprobs=0)))
    assert [len(o.outputs[0].logprobs) for o in streamed] == [1, 2, 3]
