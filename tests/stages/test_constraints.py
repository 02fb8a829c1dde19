"""Constraints by hand: known sequences through `step` and `decode_loop`, whose tokens only the device sees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import Bucket, ListSizes, SamplingParams, StopReason, ThinkingTokens, admit, init_state, plan, reserve
from jaxrunner import decode_loop as run_loop
from jaxrunner.sampling.packed_bits import pack_bits
from jaxrunner.stages.step import step
from jaxrunner.state.audit import audit
from tests.conftest import load_tiny
from tests.stages.harness import constant

SIZES = ListSizes(stop_ids=4, logit_bias=4, allowed_token_ids=4, bad_words_tokens=8, replay_tokens=4)
THINKING = ThinkingTokens(start=(30, 31), end=(32,), forced_end=(33, 32))
PREFILL, DECODE = Bucket("mixed", 16, 4, 16, "constrained"), Bucket("decode", 4, 4, 1, "constrained")
STEPS = 5
SCORES = np.zeros(256, np.float32)
SCORES[[5, 6]] = 4.0, 3.0


@functools.cache
def executables():
    """(a prefill, a loop of STEPS), of constant logits: 4 for id 5, 3 for id 6, 0 for all others."""
    model, weights = constant(*load_tiny("llama"), SCORES)

    def prefill(state, packed, grammar_bitmask):
        return step(model, weights, state, packed, bucket=PREFILL, grammar_bitmask=grammar_bitmask)

    def loop(state, rows):
        options = dict(steps=STEPS, bucket=DECODE, return_reasons=True)
        return run_loop(model, weights, state, rows, **options)

    return jax.jit(prefill), jax.jit(loop)


def generate(prompts, params, grammar_bitmask=None):
    """(tokens of each row: one by `step`, the rest by `decode_loop`; why each stopped; first output; state)."""
    model, _ = load_tiny("llama")
    prefill, loop = executables()
    state = init_state(
        model, max_requests=4, max_model_len=32, num_blocks=20, block_size=8, list_sizes=SIZES, thinking=THINKING
    )
    state, rows = admit(state, prompts, [SamplingParams(**{"temperature": 0.0, **p}) for p in params], vocab_size=256)
    inputs = plan(state, {row: len(prompt) for row, prompt in zip(rows, prompts, strict=True)})
    if grammar_bitmask is None:
        grammar_bitmask = jnp.full((4, 8), 2**32 - 1, jnp.uint32)
    state, output = prefill(state, inputs.pack(PREFILL), grammar_bitmask)
    audit(state)
    first = np.asarray(output.sampled_token_ids)[: len(rows), 0].tolist()
    state, tokens, counts, reasons = loop(reserve(state, rows, STEPS), np.array(rows, np.int32))
    audit(state)
    made = [[t] * (t >= 0) + np.asarray(tokens)[b, : counts[b]].tolist() for b, t in enumerate(first)]
    return made, [StopReason(int(r)) for r in reasons], output, state


def test_k062_penalties_count_tokens_that_the_host_has_not_seen():
    """Repetition 2: of 4, 3 it is 5, of 2, 3 it is 6, of 2, 1.5 it is 5 from there on. Frequency 0.75: see below."""
    tokens, *_ = generate([[9]] * 4, [{"repetition_penalty": 2.0}, {"frequency_penalty": 0.75}, {}, {}])
    assert tokens[0] == [5, 6, 5, 5, 5, 5]
    # 4, 3 | 3.25, 3 | 2.5, 3 | 2.5, 2.25 | 1.75, 2.25 | 1.75, 1.5
    assert tokens[1] == [5, 5, 6, 5, 6, 5]
    assert tokens[2] == [5] * 6


def test_k063_prompt_and_output_are_told_apart():
    """The prompt is [5, 5]. Repetition counts it at once, presence and frequency only what was sampled."""
    tokens, *_ = generate(
        [[5, 5]] * 3,
        [{"repetition_penalty": 1.5}, {"presence_penalty": 1.5}, {"frequency_penalty": 2.0}],
    )
    assert tokens[0] == [6, 5, 5, 5, 5, 5]  # 2.67, 3 | 2.67, 2 | ...
    assert tokens[1] == [5, 6, 5, 5, 5, 5]  # 4, 3 | 2.5, 3 | 2.5, 1.5 | ...
    assert tokens[2][:4] == [5, 6, 5, 6]  # 4, 3 | 2, 3 | 2, 1 | 0, 1; then 0 is a tie with every other id


def test_k057_a_word_is_banned_in_each_of_its_spellings():
    """[31, 41, 59] and [265 -> 65]: 65 always, 59 only after [31, 41] in the output, wherever the prompt ends."""
    words = {"bad_words_token_ids": [[31, 41, 59], [65]]}
    replayed = {"replay_token_ids": [31, 41]}
    fifty_nine = {"logit_bias": {59: 50.0, 65: 90.0}}
    tokens, *_ = generate([[31, 41], [9], [31], [9]], [words | fifty_nine] + [words | fifty_nine | replayed] * 2 + [{}])
    assert tokens[0][0] == 59, "a prefix in the prompt does not count"
    assert tokens[1][:4] == [31, 41, 5, 59]
    assert tokens[2][:3] == [31, 41, 5]
    assert all(65 not in row for row in tokens)


def test_a_spent_thinking_budget_ends_the_thinking_in_order():
    """forced_end is [33, 32]; once it is out the request goes on. Thinking may begin in the prompt or in the output."""
    params = [
        {"thinking_token_budget": 2},
        {"thinking_token_budget": 0},
        {"thinking_token_budget": 1, "replay_token_ids": [30, 31]},
        {"thinking_token_budget": 0},
    ]
    tokens, *_ = generate([[30, 31], [9, 30, 31, 33], [9], [30, 31, 32, 9]], params)
    assert tokens[0] == [5, 5, 33, 32, 5, 5]
    assert tokens[1] == [32, 5, 5, 5, 5, 5]
    assert tokens[2] == [30, 31, 5, 33, 32, 5]
    assert tokens[3] == [5] * 6, "this one has ended before"


def test_rows_that_nothing_is_left_for_stop_alone():
    """At once in the step, later in the loop, and never; a stuck row is as it was before."""
    once_each = {"allowed_token_ids": [7, 8], "bad_words_token_ids": [[7, 7], [7, 8], [8]]}
    params = [{"allowed_token_ids": [7], "bad_words_token_ids": [[7]]}, once_each, {}]
    tokens, reasons, output, state = generate([[9, 9], [9], [9]], params)
    assert np.asarray(output.no_id_left).tolist() == [True, False, False, False]
    assert output.num_sampled.tolist() == [0, 1, 1, 0]
    assert tokens == [[], [7], [5] * 6]
    # The first still has its prompt of two to run, which is no decode.
    assert reasons == [StopReason.NOT_DECODABLE, StopReason.NO_ID_LEFT, StopReason.STEPS]
    assert state.requests.num_computed_tokens[1:4].tolist() == [0, 1, 6]
    assert state.requests.total_len[1:4].tolist() == [2, 2, 7]


def test_a_grammar_mask_comes_before_everything():
    """Allowed by the grammar: 6, 7 and 40. A bias of 100 does not bring 5 back; row 1 is left without an id."""
    allowed = np.zeros((4, 256), bool)
    allowed[0, [6, 7, 40]], allowed[1, 40], allowed[2:] = True, True, True
    params = [{"logit_bias": {5: 100.0}}, {"bad_words_token_ids": [[40]]}, {}]
    _, _, output, _ = generate([[9]] * 3, params, pack_bits(jnp.asarray(allowed)))
    assert np.asarray(output.sampled_token_ids)[:3, 0].tolist() == [6, -1, 5]
    assert np.asarray(output.no_id_left).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("vocab", "words"), [(70, 3), (70, 2), (33, 4), (1, 1)])
def test_bits_of_a_mask_are_those_of_numpy(vocab, words):
    """Fewer words than the vocabulary needs: the rest is forbidden. More: padding, which is cut off."""
    from jaxrunner.sampling.grammar import is_allowed, mask_by_grammar

    rng = np.random.default_rng(vocab)
    bits = rng.random((5, words * 32)) < 0.5
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    result = np.asarray(mask_by_grammar(jnp.zeros((5, vocab)), jnp.asarray(packed)))
    expected = np.pad(bits, ((0, 0), (0, max(0, vocab - words * 32))))[:, :vocab]
    np.testing.assert_array_equal(result == 0, expected)
    assert (np.isneginf(result) != expected).all()
    chosen = rng.integers(vocab, size=5, dtype=np.int32)
    found = np.asarray(is_allowed(jnp.asarray(packed), jnp.asarray(chosen)))
    np.testing.assert_array_equal(found, expected[np.arange(5), chosen])
    np.testing.assert_array_equal(
        np.asarray(pack_bits(jnp.asarray(expected))),
        np.packbits(np.pad(expected, ((0, 0), (0, -vocab % 32))), axis=1, bitorder="little").view(np.uint32),
    )
