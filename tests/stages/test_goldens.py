"""Tiny checkpoints against logits and greedy ids computed by another library, in every chunking and batching."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import jaxrunner
from jaxrunner.compile.buckets import Bucket
from tests.stages import harness

ATOL = {
    "llama": 1e-4,
    "llama_bias_tied_headdim": 4e-4,
    "llama_rope_llama3": 2e-4,
    "llama_rope_yarn": 2e-4,
    "mistral": 3e-4,
    "qwen2": 1e-4,
    "qwen3": 1e-4,
    "smollm3": 2e-4,
}
"""Absolute, on float32 logits: twice the effect of relative noise of 1e-6 on the weights."""
RTOL = 1e-4
NUM_GREEDY = 16
MIXED = Bucket("mixed", 80, 3, 80)
DECODE = Bucket("decode", 3, 3, 1)


@functools.cache
def golden(name):
    with np.load(harness.TINY / name / "golden.npz") as file:
        return {key: file[key] for key in file.files}


@functools.cache
def admitted(name, layout, which):
    """(state, rows) with some of the golden's prompts. A state is a value: every test starts from this one."""
    model, _ = harness.tiny(name, layout=layout)
    state = jaxrunner.init_state(model, max_requests=3, max_model_len=128, num_blocks=25)
    return jaxrunner.admit(state, [golden(name)[f"input_ids_{i}"].tolist() for i in which])


def generate(name, which, chunk, layout="layers"):
    """(logits [prompt, vocab], greedy ids) per prompt: prefill in chunks of at most `chunk`, then decode."""
    model, weights = harness.tiny(name, layout=layout)
    state, rows = admitted(name, layout, which)
    left = [len(golden(name)[f"input_ids_{i}"]) for i in which]
    logits, greedy = [[] for _ in which], [[] for _ in which]
    while any(len(g) < NUM_GREEDY for g in greedy):
        counts = [min(n, chunk) if n else int(len(g) < NUM_GREEDY) for n, g in zip(left, greedy, strict=True)]
        running = [i for i, count in enumerate(counts) if count]
        inputs = jaxrunner.plan(state, {rows[i]: counts[i] for i in running})
        bucket = DECODE if inputs.uniform_query_len == 1 else MIXED
        state, output = harness.run(model, weights, state, inputs, bucket)
        all_logits = np.asarray(harness.compiled_logits(model)(weights, output.hidden))
        sampled, end = np.asarray(output.sampled_token_ids), 0
        for b, i in enumerate(running):
            end += counts[i]
            if left[i]:
                logits[i].append(all_logits[end - counts[i] : end])
                left[i] -= counts[i]
            assert (sampled[b, 0] == -1) == (left[i] > 0)
            greedy[i] += [int(sampled[b, 0])] if left[i] == 0 else []
    jaxrunner.audit(state)
    return [np.concatenate(part) for part in logits], greedy


def check(name, which, outcome):
    for i, logits, greedy in zip(which, *outcome, strict=True):
        np.testing.assert_allclose(logits, golden(name)[f"logits_{i}"], rtol=RTOL, atol=ATOL[name])
        assert greedy == golden(name)[f"greedy_{i}"].tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64, 80])
@pytest.mark.parametrize("name", ATOL)
def test_all_prompts_in_one_batch(name, chunk):
    check(name, (0, 1, 2), generate(name, (0, 1, 2), chunk))


@pytest.mark.parametrize(("prompt", "chunk"), [(0, 80), (1, 7), (2, 64), (2, 1)])
@pytest.mark.parametrize("name", ATOL)
def test_one_by_one(name, prompt, chunk):
    check(name, (prompt,), generate(name, (prompt,), chunk))


def test_stacked_layout_equals_layers():
    """The same arrays, scanned over or unrolled: logits and greedy ids agree to rounding."""
    unrolled, stacked = generate("llama", (0, 1, 2), 80), generate("llama", (0, 1, 2), 80, layout="stacked")
    check("llama", (0, 1, 2), stacked)
    for a, b in zip(unrolled[0], stacked[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    assert unrolled[1] == stacked[1]


def test_hidden_state_of_a_step_is_the_last_one_of_the_golden():
    """`return_hidden` gives states after the final norm."""
    model, weights = harness.tiny("llama")
    state, rows = admitted("llama", "layers", (1,))
    _, output = harness.run(model, weights, state, jaxrunner.plan(state, {rows[0]: 17}), MIXED)
    expected = golden("llama")["hidden_states_1"][-1]
    np.testing.assert_allclose(np.asarray(output.hidden)[:17], expected, rtol=RTOL, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_goldens_can_tell_a_window_that_is_one_key_short(name):
    """Logits of the wrong model are far outside of the tolerance."""
    model, weights = harness.tiny(name)
    state, rows = admitted(name, "layers", (2,))
    wrong = model.replace(layers=tuple(type(spec)(window=15, rope=spec.rope) for spec in model.layers))
    _, output = harness.run(wrong, weights, state, jaxrunner.plan(state, {rows[0]: 61}), MIXED)
    logits = np.asarray(harness.compiled_logits(model)(weights, output.hidden))[:61]
    assert np.abs(logits - golden(name)["logits_2"]).max() > 100 * ATOL[name]
