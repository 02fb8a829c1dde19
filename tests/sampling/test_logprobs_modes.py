"""Modes of log-probabilities, each against its definition in NumPy, on rows with constraints and filters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner import SamplingParams
from jaxrunner.engine.logprobs import token_logprobs as entry_of
from jaxrunner.errors import AdmissionError
from jaxrunner.runner.logprob_columns import NO_LOGPROBS, columns, start_copy
from jaxrunner.sampling.sampler import sample_tokens
from jaxrunner.state.reports import DEFAULT_REPORTS, Reports, check_reports
from tests.oracle import logprobs as oracle
from tests.oracle import sampler as sampler_oracle
from tests.sampling.rows import history_of, sampling_state

ROWS, VOCAB, HISTORY = 4, 90, [3, 4, 5, 4]
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
MARKS = {"start": (1,), "end": (2,), "forced_end": (2,)}
REQUESTS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]), "logprobs": st.sampled_from([None, 0, 2, 20, 21, -1, 500])},
    optional={
        "top_k": st.integers(1, 30),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.2),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-1.0, 1.0),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, 3), min_size=1, max_size=4),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        "logprob_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
    },
)


@functools.cache
def sampler(mode: str):
    """run(logits, params) -> Sampled, of ROWS rows with the same history; all ids may be asked for."""
    history = history_of([HISTORY] * ROWS, 2)

    def run(logits, params):
        params = params.replace(reports=Reports(mode, -1))
        return sample_tokens(logits, params, jnp.full(ROWS, len(HISTORY)), tier="full", history=history)

    return jax.jit(run)


def expected_scores(mode: str, logits: np.ndarray, request: dict, kept: np.ndarray) -> np.ndarray:
    """f64[V]. kept: bool[V], ids that the token was drawn from."""
    scores = np.asarray(logits, np.float64)
    if mode.startswith("processed"):
        scores = sampler_oracle.constrained(scores, request, HISTORY, 2, stop_ids=[], marks=MARKS)
        scores = np.where(kept, scores / (request["temperature"] or 1.0), -np.inf)
    return oracle.log_softmax(scores) if mode.endswith("logprobs") else scores


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(requests=st.lists(REQUESTS, min_size=ROWS, max_size=ROWS), seed=st.integers(0, 2**32 - 1))
def test_a_batch_reports_what_each_row_asks_for(mode, requests, seed):
    """Best ids up to all of them, listed ids, and the number and rank of the token; whole numbers make ties."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=(ROWS, VOCAB)) * 4).astype(np.float32)
    params = [SamplingParams(**request) for request in requests]
    sampled = sampler(mode)(jnp.asarray(logits), sampling_state(params, seeds=rng.integers(0, 2**63, ROWS)))
    count = [NO_LOGPROBS if p.logprobs is None and not p.logprob_token_ids else p.logprobs or 0 for p in params]
    wanted = np.array([VOCAB if p.logprobs == -1 else min(n, VOCAB) for n, p in zip(count, params, strict=True)])
    listed = [p.logprob_token_ids or () for p in params]
    num_listed = np.array([len(ids) for ids in listed])
    found = jax.tree.map(np.asarray, start_copy(sampled.logprobs, int(wanted.max()), int(num_listed.max())))
    lists = columns(found, wanted, num_listed, np.ones(ROWS, bool))
    masks = np.unpackbits(np.asarray(sampled.sampling_mask).view(np.uint8), axis=1, bitorder="little")
    for row, request in enumerate(requests):
        got = entry_of(lists, row, max(wanted[row], 0), None, num_listed[row])
        if wanted[row] == NO_LOGPROBS:
            assert got == {}
            continue
        scores = expected_scores(mode, logits[row], request, masks[row, :VOCAB] > 0)
        token, best = int(sampled.token_ids[row]), min(int(wanted[row]), VOCAB)
        expected = oracle.entry(scores, token, best, listed[row])
        assert len(got) == len(expected)
        assert list(got) == list(expected) or mode.startswith("processed")
        for place, (token_id, entry) in enumerate(got.items()):
            assert entry.logprob == pytest.approx(scores[token_id], abs=2e-5)
            if mode.startswith("raw"):
                assert entry.rank == expected[token_id][1]
            elif place == 0:  # float32 may part what is equal in float64
                least, most = ((scores > scores[token] + slack).sum() for slack in (1e-5, -1e-5))
                assert max(least, 1) <= entry.rank <= most
        assert lists.sampled_token_ranks[row] == got[token].rank


@pytest.mark.parametrize("mode", MODES)
def test_raw_numbers_are_of_the_models_own_logits(mode):
    """A bias of 5 on id 0 and a temperature move the processed ones only."""
    logits = np.tile(np.arange(VOCAB, dtype=np.float32) / 9, (ROWS, 1))
    params = sampling_state([SamplingParams(temperature=0.5, logit_bias={0: 5.0}, logprobs=1)] * ROWS)
    found = sampler(mode)(jnp.asarray(logits), params).logprobs
    moved = (logits[0] + 5.0 * (np.arange(VOCAB) == 0)) / 0.5 if mode.startswith("processed") else logits[0]
    expected = oracle.log_softmax(moved) if mode.endswith("logprobs") else moved
    np.testing.assert_allclose(found.every[0], expected, rtol=1e-5)


def test_a_small_temperature_costs_no_digits():
    """Logits of 1e5 have steps of 0.008; log-probabilities of 1e-5 apart are told from one another."""
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, :3] = [9.0, 9.0 - 2**-16, 8.0]
    params = sampling_state([SamplingParams(temperature=1e-4, logprobs=2)] * ROWS)
    found = sampler("processed_logprobs")(jnp.asarray(logits), params).logprobs
    expected = oracle.log_softmax(logits[0].astype(np.float64) / np.float64(np.float32(1e-4)))
    np.testing.assert_allclose(found.logprobs[0, 1:3], expected[:2], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "reports", "message"),
    [
        ({"logprobs": 21}, DEFAULT_REPORTS, r"logprobs is 21; at most 20.*max_logprobs=21 or max_logprobs=-1"),
        ({"logprobs": -1}, DEFAULT_REPORTS, "logprobs is -1; at most 20.*start with max_logprobs=-1"),
        ({"prompt_logprobs": 1}, Reports(max_logprobs=0), "prompt_logprobs is 1; at most 0"),
        ({"prompt_logprobs": 129}, Reports(max_logprobs=128), "start with max_logprobs=-1"),
    ],
)
def test_more_than_the_runner_gives_is_refused_with_the_way_out(fields, reports, message):
    with pytest.raises(AdmissionError, match=message):
        check_reports(SamplingParams(**fields), reports)
    check_reports(SamplingParams(**fields), Reports(max_logprobs=-1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs_mode": "logits"}, "processed_logits"),
        ({"max_logprobs": 129}, "0 to 128"),
        ({"max_logprobs": -2}, "-1 for all ids"),
        ({"nan_check": "raise"}, "fail"),
    ],
)
def test_modes_and_limits_that_do_not_exist(fields, message):
    with pytest.raises(AdmissionError, match=message):
        Reports(**fields)
