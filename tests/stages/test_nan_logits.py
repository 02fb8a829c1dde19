"""NaN logits by hand: counted, failing alone, and never those of padding."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrunner
from jaxrunner import SamplingParams
from jaxrunner.errors import AdmissionError
from jaxrunner.models import transformer
from jaxrunner.scoring import score
from jaxrunner.stages.prompt_logprobs import prompt_logprobs
from jaxrunner.state.reports import Reports
from jaxrunner.state.runner_state import host_view
from tests.conftest import load_tiny
from tests.oracle import logprobs as oracle

PROMPTS, BUCKET = ([5, 9], [6], [7, 8, 3]), jaxrunner.Bucket("mixed", 8, 8, 8)


LOGITS = transformer.logits


def damaged(model, weights, hidden, **options):
    """Three NaN in the first request, one in the second's logits, and nothing but NaN in padding."""
    logits = LOGITS(model, weights, hidden, **options)
    place = jnp.arange(logits.shape[1])
    row = jnp.arange(logits.shape[0])[:, None]
    bad = ((row == 0) & (place < 3)) | ((row == 1) & (place == 9)) | (row >= len(PROMPTS))
    return jnp.where(bad, jnp.nan, logits)


@functools.cache
def after_a_step(nan_check):
    """(state, output, rows)."""
    model, weights = load_tiny("llama")
    reports = Reports(nan_check=nan_check)
    state = jaxrunner.init_state(model, max_requests=4, max_model_len=32, num_blocks=20, block_size=8, reports=reports)
    state, rows = jaxrunner.admit(state, PROMPTS)
    upload = jnp.asarray(jaxrunner.plan(state, {rows[0]: 2, rows[1]: 1, rows[2]: 3}).pack(BUCKET))
    with mock.patch.object(transformer, "logits", damaged):
        run = jax.jit(functools.partial(jaxrunner.step), static_argnames=("model", "bucket"))
        return *run(model, weights, state, upload, bucket=BUCKET), rows


def test_counting_changes_no_token():
    _, output, _ = after_a_step("count")
    assert output.num_nans.tolist() == [3, 1, 0, 0, 0, 0, 0, 0]
    _, plain, _ = after_a_step("off")
    assert plain.num_nans is None
    np.testing.assert_array_equal(output.sampled_token_ids, plain.sampled_token_ids)
    assert output.sampled_token_ids[:2, 0].tolist() == [0, 9], "the first NaN"


def test_a_failing_row_is_as_it_was_before_the_step():
    state, output, rows = after_a_step("fail")
    assert output.failed_by_nan.tolist() == [True, True, *[False] * 6]
    assert output.failed.tolist() == output.failed_by_nan.tolist()
    assert output.num_sampled.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert host_view(state.requests.num_computed_tokens)[rows].tolist() == [0, 0, 3]
    assert host_view(state.requests.total_len)[rows].tolist() == [2, 1, 4]
    assert not host_view(state.requests.counters)[0].any()


def test_by_hand_prompts_are_scored_from_hidden_states():
    """What the refusal says: keep the hidden states and score some of them."""
    model, weights = load_tiny("llama")
    state = jaxrunner.init_state(model, max_requests=4, max_model_len=32, num_blocks=20, block_size=8)
    with pytest.raises(AdmissionError, match=r"prompt_logprobs\.prompt_logprobs"):
        jaxrunner.admit(state, PROMPTS, SamplingParams(prompt_logprobs=1))
    state, rows = jaxrunner.admit(state, PROMPTS)
    upload = jnp.asarray(jaxrunner.plan(state, {rows[0]: 2, rows[2]: 3}).pack(BUCKET))
    run = jax.jit(jaxrunner.step, static_argnames=("model", "bucket", "return_hidden"))
    state, output = run(model, weights, state, upload, bucket=BUCKET, return_hidden=True)
    tokens, positions = jnp.array([0, 2, 3]), jnp.array([1, 1, 2])
    of = jnp.array([rows[0], rows[2], rows[2]])
    found = jax.jit(prompt_logprobs, static_argnums=0)(model, weights, state, output.hidden, tokens, of, positions)
    assert found.logprob_token_ids[:, 0].tolist() == [9, 8, 3]
    whole = score(model, weights, PROMPTS)
    expected = [oracle.log_softmax(row)[t] for row, t in ((whole[0][0], 9), (whole[2][0], 8), (whole[2][1], 3))]
    np.testing.assert_allclose(found.logprobs[:, 0], expected, atol=1e-4)
