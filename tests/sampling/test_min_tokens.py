"""min_tokens: every id that could end a request is out of reach until it has so many tokens."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrunner
from jaxrunner import Bucket, DeviceRunner, SamplingParams, init_state
from jaxrunner.errors import AdmissionError, InvariantError
from jaxrunner.sampling.min_tokens import mask_stop_ids
from jaxrunner.state.admission import AdmitEntry, admit_layout, pack_admit
from jaxrunner.state.request_lists import ListSizes, check_lists, masked_stop_ids
from tests.conftest import GOLDEN, load_tiny
from tests.runner.plans import CONFIG, LADDER, new, plan
from tests.sampling.rows import compiled, sampling_state

EOS = (2, 7)
sample = compiled("constrained")


def tokens_at(position, params, logits, prompt_len=5):
    state = sampling_state(params, prompt_len=prompt_len, eos=EOS)
    return np.asarray(sample(jnp.asarray(logits, jnp.float32), state, jnp.full(len(params), position))).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_k058_every_end_id_is_masked_for_the_first_outputs(temperature):
    """End ids [2, 7], min_tokens 3, both far ahead: none at output 0, 1, 2; free from output 3 on."""
    logits = np.zeros((1, 20))
    logits[0, [2, 7]], logits[0, 11] = [100, 120], 50
    params = SamplingParams(temperature=temperature, min_tokens=3)
    assert [tokens_at(5 + i, [params], logits)[0] for i in range(5)] == [11, 11, 11, 7, 7]
    again = pickle.loads(pickle.dumps(params))
    assert masked_stop_ids(again, EOS) == masked_stop_ids(params, EOS) == [2, 7]


def test_k059_ignore_eos_frees_the_models_ids_but_not_the_users():
    logits = np.zeros((2, 20))
    logits[:, 7], logits[:, 9], logits[:, 3] = 100, 120, 50
    both = [
        SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True, stop_token_ids=(9,)),
        SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(9,)),
    ]
    assert tokens_at(5, both, logits) == [7, 3]
    assert tokens_at(8, both, logits) == [9, 9]


def test_k055_an_id_past_the_vocabulary_masks_no_other_row():
    """Vocabulary 100, id 150 in row 0: (0, 150) would be (1, 50) in a flat array; nor may it be cut to 99."""
    logits = np.arange(200, dtype=np.float32).reshape(2, 100)
    stop_ids = np.zeros((2, 3), np.int32)
    stop_ids[0] = [151, 2**31 - 1, 100]
    args = map(jnp.asarray, (logits, stop_ids, np.int32([9, 0]), np.int32([5, 5])))
    masked = np.asarray(mask_stop_ids(*args))
    assert np.flatnonzero(np.isinf(masked[0])).tolist() == [99]
    np.testing.assert_array_equal(masked[1], logits[1])


def test_unused_entries_mask_nothing():
    logits = np.zeros((3, 6), np.float32)
    args = map(jnp.asarray, (logits, np.zeros((3, 4), np.int32), np.full(3, 9, np.int32), np.full(3, 5, np.int32)))
    masked = mask_stop_ids(*args)
    np.testing.assert_array_equal(masked, logits)


def test_limits_are_checked_and_named():
    model, weights = load_tiny("llama")
    params = SamplingParams(min_tokens=1, stop_token_ids=range(10, 20))
    check_lists(params, EOS, vocab_size=100, sizes=ListSizes(stop_ids=12))
    with pytest.raises(AdmissionError, match=r"12 stop ids.*a row holds 11.*list_sizes=ListSizes\(stop_ids=12\)"):
        check_lists(params, EOS, vocab_size=100, sizes=ListSizes(stop_ids=11))
    check_lists(SamplingParams(stop_token_ids=range(50)), EOS, vocab_size=100, sizes=ListSizes(stop_ids=1))
    with pytest.raises(AdmissionError, match=r"150.*vocabulary 0\.\.99"):
        check_lists(SamplingParams(stop_token_ids=(150,)), EOS, vocab_size=100, sizes=ListSizes(stop_ids=9))
    with pytest.raises(AdmissionError, match="stop_ids"):
        ListSizes(stop_ids=0)
    small = dataclasses.replace(CONFIG, list_sizes=ListSizes(stop_ids=2))
    runner = DeviceRunner(model, weights, small, ladder=LADDER)
    many = SamplingParams(min_tokens=1, stop_token_ids=(10, 11, 12), ignore_eos=True)
    with pytest.raises(AdmissionError, match=r"request 'a'.*stop_ids=3"):
        runner.execute_model(plan({"a": 2}, [new("a", [5, 6], [1], many)]))
    with pytest.raises(AdmissionError, match=r"request 'a'.*256"):
        runner.execute_model(plan({"a": 2}, [new("a", [5, 6], [1], SamplingParams(stop_token_ids=(256,)))]))
    assert len(runner.rows) == 0
    with pytest.raises(InvariantError, match="without a record"):
        pack_admit(admit_layout(4, 4, num_list_writes=2), [AdmitEntry(1, list_writes=np.ones((1, 2), np.int32))])


def test_k058_by_hand_through_step():
    """`admit` with the model's end ids, a processor that adds 100 to id 7: three other tokens, then 7."""
    model, weights = load_tiny("llama")
    state = init_state(model, max_requests=2, max_model_len=32, num_blocks=8)
    params = SamplingParams(temperature=0.0, min_tokens=3)
    state, (row,) = jaxrunner.admit(state, [[5, 9]], params, vocab_size=model.vocab_size, eos_token_ids=EOS)

    @functools.partial(jax.jit, static_argnames="bucket")
    def step(state, packed, bucket):
        return jaxrunner.step(
            model, weights, state, packed, bucket=bucket, logits_processors=lambda x, _: x.at[:, 7].add(100.0)
        )

    tokens, bucket = [], Bucket("mixed", 2, 2, 2, "constrained")
    for count in (2, 1, 1, 1):
        inputs = jaxrunner.plan(state, {row: count})
        assert inputs.tier == "constrained"
        state, output = step(state, inputs.pack(bucket), bucket)
        tokens.append(int(output.sampled_token_ids[0, 0]))
    assert not {2, 7} & set(tokens[:3])
    assert tokens[3] == 7


@pytest.mark.smollm2
def test_the_golden_with_min_tokens(smollm2_llm):
    """A chat that ends after 8 tokens goes on to 12 and more, id for id as transformers does with min_new_tokens."""
    data = json.loads((GOLDEN / "smollm2" / "f32.json").read_text())["processed_greedy"]
    (case,) = [c for c in data if c["label"].startswith("min_tokens 12")]
    prompts = json.loads((GOLDEN / "smollm2" / "prompts.json").read_text())
    prompt = next(p["ids"] for p in prompts if p["name"] == case["prompt"])
    params = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=12)
    (longer,) = smollm2_llm.generate([prompt], params)
    assert longer.outputs[0].token_ids == case["greedy"]
    assert longer.outputs[0].finish_reason == "stop"
    with pytest.raises(AdmissionError, match="stop_ids=100"):
        smollm2_llm.generate([prompt], SamplingParams(min_tokens=1, stop_token_ids=range(100)))
