"""Constraints against an oracle in plain Python: any mixture of them, any history, damaged and forbidden rows."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

from jaxrunner import SamplingParams, ThinkingTokens
from jaxrunner.sampling.constraints import constrain, has_no_id
from jaxrunner.sampling.sampler import sample_tokens
from tests.oracle import sampler as oracle
from tests.sampling.rows import history_of, sampling_state

ROWS, VOCAB, WIDTH = 4, 7, 12
EOS = (2, 5)
MARKS = {"start": (3, 4), "end": (5,), "forced_end": (0, 1, 5)}
THINKING = ThinkingTokens(**MARKS)
run = jax.jit(lambda *args: (out := constrain(*args)[0], has_no_id(out)))
sample = jax.jit(lambda *args: sample_tokens(*args[:3], tier="full", history=args[3]))


def inputs(logits, requests, tokens, prompt_len):
    """Arguments of `constrain` for rows of parameters as dictionaries."""
    params = [SamplingParams(**request) for request in requests]
    state = sampling_state(params, eos=EOS, thinking=THINKING)
    # min_len depends on the prompt of each row.
    rows = [sampling_state([p], prompt_len=n, eos=EOS) for p, n in zip(params, prompt_len, strict=True)]
    state = state.replace(params=jnp.concatenate([row.params for row in rows]))
    position = jnp.array([len(row) for row in tokens], jnp.int32)
    return jnp.asarray(logits, jnp.float32), state, position, history_of(tokens, prompt_len, WIDTH)


def expected(logits, requests, tokens, prompt_len) -> np.ndarray:
    rows = []
    for row, request, known, n in zip(np.float32(logits), requests, tokens, prompt_len, strict=True):
        own = list(request.get("stop_token_ids", ()))
        stop_ids = own if request.get("ignore_eos") else [*EOS, *own]
        rows.append(oracle.constrained(row, request, known, n, stop_ids=stop_ids, marks=MARKS))
    return np.stack(rows)


ids = st.integers(0, VOCAB - 1)
numbers = st.sampled_from([-np.inf, -40.0, -1.5, -0.0, 0.0, 0.75, 2.0, 30.0])
requests = st.fixed_dictionaries(
    {},
    optional={
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=6),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -0.5, 1.25, 100.0]), max_size=4),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(ids, max_size=2),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.5, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.25, 2.0]),
        "presence_penalty": st.sampled_from([-0.5, 0.0, 1.0]),
        "bad_words_token_ids": st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
        "thinking_token_budget": st.integers(-1, 4),
    },
)
# Few ids, so that words, marks and repetitions occur.
histories = st.lists(st.sampled_from([0, 1, 3, 4, 5, 6]), min_size=1, max_size=WIDTH - 1)
rows = st.tuples(st.lists(numbers, min_size=VOCAB, max_size=VOCAB), requests, histories, st.integers(1, WIDTH))


@settings(max_examples=150, deadline=None)
@given(st.lists(rows, min_size=ROWS, max_size=ROWS))
def test_any_mixture_equals_the_oracle(batch):
    logits, requests, tokens, prompt_len = map(list, zip(*batch, strict=True))
    prompt_len = [min(n, len(known)) for n, known in zip(prompt_len, tokens, strict=True)]
    result, is_stuck = map(np.asarray, run(*inputs(logits, requests, tokens, prompt_len)))
    wanted = expected(logits, requests, tokens, prompt_len)
    np.testing.assert_array_equal(result == -np.inf, wanted == -np.inf)
    np.testing.assert_allclose(result, wanted, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(is_stuck, (wanted == -np.inf).all(axis=1))
    for i, request in enumerate(requests):
        if SamplingParams(**request).tier == "random":
            assert result[i].tobytes() == np.float32(logits[i]).tobytes(), "a row that asks for nothing"


def below_best(row) -> np.ndarray:
    """What `temperature.scale` starts from. Beside an id that a thinking budget forces, which gets 1e9, all others are
    equal in float32."""
    row = np.float32(row)
    return row - row.max() if np.isfinite(row.max()) else row


DEAD = ([-np.inf] * VOCAB, {}, [0], 1)
FORCED = ([*[-np.inf] * 4, -1.5, -1.5, 0.0], {"thinking_token_budget": 0}, [3, 4], 1)


@settings(max_examples=100, deadline=None)
@example([(DEAD, 0.0, 0, 0.3)] * (ROWS - 1) + [(FORCED, 0.4, 3, 1.0)])
@given(
    st.lists(
        st.tuples(rows, st.sampled_from([0.0, 0.4, 1.0]), st.sampled_from([0, 1, 3]), st.sampled_from([0.3, 0.8, 1.0])),
        min_size=ROWS,
        max_size=ROWS,
    )
)
def test_a_sampling_mask_is_what_the_token_was_drawn_from(batch):
    """Constraints, then filters; and a token of a row that has one is among its ids."""
    logits, requests, tokens, prompt_len = map(list, zip(*(row for row, *_ in batch), strict=True))
    prompt_len = [min(n, len(known)) for n, known in zip(prompt_len, tokens, strict=True)]
    asked = [{"temperature": temperature, "top_k": top_k, "top_p": top_p} for _, temperature, top_k, top_p in batch]
    requests = [request | more for request, more in zip(requests, asked, strict=True)]
    out = sample(*inputs(logits, requests, tokens, prompt_len))
    bits = np.unpackbits(np.asarray(out.sampling_mask).view(np.uint8), axis=1, bitorder="little")
    assert bits.shape == (ROWS, 32)
    for i, row in enumerate(expected(logits, requests, tokens, prompt_len)):
        mask = set(np.flatnonzero(bits[i]).tolist())
        sets = [oracle.kept(below_best(row), requests[i], slack=slack) for slack in (-1e-5, 1e-5)]
        assert sets[0] <= mask <= sets[1]
        assert bool(out.no_id_left[i]) == (not mask)
        assert not mask or int(out.token_ids[i]) in mask


def test_k060_a_penalty_above_1_never_makes_a_repeat_more_likely():
    """1.5 of [2, -2], both seen: [1.3333, -3]."""
    logits = [[2.0, -2.0, *[0.0] * (VOCAB - 2)]]
    result, _ = run(*inputs(logits, [{"repetition_penalty": 1.5}], [[0, 1]], [1]))
    np.testing.assert_allclose(np.asarray(result)[0, :2], [4 / 3, -3.0], rtol=1e-6)


def test_all_penalties_of_a_worked_example():
    """Logits [2, -1, 0.5, 0], prompt {0}, output 1 twice and 2 once; 2, 0.5 and 0.25."""
    request = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    logits = [[2.0, -1.0, 0.5, *[0.0] * (VOCAB - 3)]]
    result, _ = run(*inputs(logits, [request], [[0, 1, 2, 1]], [1]))
    assert np.asarray(result)[0, :4].tolist() == [1.0, -3.25, -0.5, 0.0]


def test_draws_after_penalties_have_the_exact_distribution():
    """Chi-square of 100,000 draws against the oracle's filtered probabilities; 99.9 % of 4 degrees of freedom: 18.5."""
    count = 100_000
    request = {"top_k": 5, "temperature": 1.3, "seed": 11, "frequency_penalty": 0.7, "repetition_penalty": 1.4}
    logits = np.array([2.0, 1.0, 0.5, 0.25, -0.5, 1.5, -1.0])
    tokens, prompt_len = [0, 5, 5, 1], 2
    one, state, _, history = inputs([logits], [request], [tokens], [prompt_len])
    rows = jnp.zeros(count, jnp.int32)
    # The position decides the draw, so the history is the same at every one of them.
    position = jnp.arange(len(tokens), len(tokens) + count)
    table = jnp.pad(history.token_ids[1:, : len(tokens)], ((0, 0), (0, 2)), constant_values=-1)
    many = history._replace(token_ids=table, rows=rows, prompt_len=jnp.full(count, prompt_len))
    draw = jax.jit(lambda *args: sample_tokens(*args[:3], tier="constrained", history=args[3]).token_ids)
    params = state.take(rows).replace(thinking=None)
    seen = np.bincount(np.asarray(draw(jnp.tile(one, (count, 1)), params, position, many)), minlength=VOCAB)
    row = oracle.constrained(logits, request, tokens, prompt_len, stop_ids=[], marks=MARKS)
    ids = sorted(oracle.kept(row, request))
    assert len(ids) == 5
    assert seen.sum() == seen[ids].sum() == count
    weight = np.exp(row[ids] / 1.3)
    expected = count * weight / weight.sum()
    assert ((seen[ids] - expected) ** 2 / expected).sum() < 18.5


def test_k054_a_bias_past_the_vocabulary_changes_no_row():
    """Vocabulary 7, ids 9 and 2^31 - 2 in row 0: nothing is cut to 6, nothing lands in row 1."""
    arguments = inputs(np.zeros((2, VOCAB)), [{"logit_bias": {9: 5.0, 2**31 - 2: 7.0, 6: 1.0}}, {}], [[1], [1]], [1, 1])
    result = np.asarray(run(*arguments)[0])
    assert result.tolist() == [[0, 0, 0, 0, 0, 0, 1], [0] * 7]


def test_an_allowed_id_past_the_vocabulary_allows_nothing():
    arguments = inputs(np.zeros((2, VOCAB)), [{"allowed_token_ids": [9]}, {}], [[1], [1]], [1, 1])
    result, is_stuck = map(np.asarray, run(*arguments))
    assert (result[0] == -np.inf).all()
    assert is_stuck.tolist() == [True, False]


@pytest.mark.parametrize("token", [0, VOCAB - 1])
def test_the_ends_of_the_vocabulary_can_be_allowed_biased_banned_and_forced(token):
    marks = dataclasses.replace(THINKING, forced_end=(token,))
    requests = [
        {"allowed_token_ids": [token]},
        {"logit_bias": {token: 3.0}},
        {"bad_words_token_ids": [[token]]},
        {"thinking_token_budget": 0},
    ]
    logits, state, position, history = inputs(np.zeros((4, VOCAB)), requests, [[1], [1], [1], [3, 4]], [1, 1, 1, 2])
    result = np.asarray(jax.jit(constrain)(logits, state.replace(thinking=marks), position, history)[0])
    assert np.flatnonzero(result[0] == 0).tolist() == np.flatnonzero(result[1] == 3).tolist() == [token]
    assert np.flatnonzero(result[2] == -np.inf).tolist() == np.flatnonzero(result[3] == 1e9).tolist() == [token]


def test_a_vocabulary_of_one():
    requests = [{"frequency_penalty": 1.0}, {"allowed_token_ids": [0]}, {"bad_words_token_ids": [[0]]}, {}]
    logits, state, position, history = inputs(np.zeros((4, VOCAB)), requests, [[0, 0, 0]] * 4, [1] * 4)
    out = sample(logits[:, :1], state.replace(thinking=None), position, history)
    assert out.token_ids.tolist() == [0] * 4
    assert out.no_id_left.tolist() == [False, False, True, False]
    assert np.asarray(out.sampling_mask)[:, 0].tolist() == [1, 1, 0, 1]


def test_damaged_rows_stay_damaged_and_touch_no_neighbour():
    """NaN and +inf go through every op: reporting them is another's work; they are not "every id is forbidden"."""
    everything = {
        "logit_bias": {1: 1.0},
        "repetition_penalty": 2.0,
        "frequency_penalty": 1.0,
        "bad_words_token_ids": [[4]],
    }
    logits = np.zeros((4, VOCAB))
    logits[0], logits[1, 1], logits[2, 3] = np.nan, np.nan, np.inf
    requests = [{"bad_words_token_ids": [[4]]}, everything, everything, everything]
    result, is_stuck = map(np.asarray, run(*inputs(logits, requests, [[1, 1, 3]] * 4, [2] * 4)))
    assert np.isnan(result[0]).sum() == VOCAB - 1
    assert np.flatnonzero(np.isnan(result[1])).tolist() == [1]
    assert np.flatnonzero(result[2] == np.inf).tolist() == [3]
    assert not is_stuck.any()
    np.testing.assert_allclose(result[3], expected(logits, requests, [[1, 1, 3]] * 4, [2] * 4)[3])


def test_a_history_without_room_is_refused():
    logits, state, position, _ = inputs(np.zeros((1, VOCAB)), [{}], [[1]], [1])
    with pytest.raises(ValueError, match="history"):
        sample_tokens(logits, state, position, tier="constrained")
