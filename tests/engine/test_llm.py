"""The engine over the embedded default model: greedy ids equal to the goldens, streaming, stopping, bad input."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.errors import AdmissionError
from tests.conftest import GOLDEN

pytestmark = pytest.mark.smollm2
PROMPTS = json.loads((GOLDEN / "smollm2" / "prompts.json").read_text())
EXPECTED = {p["name"]: p for p in json.loads((GOLDEN / "smollm2" / "f32.json").read_text())["prompts"]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def assert_equal_up_to_a_near_tie(name: str, ids: list[int]) -> None:
    """Equal to the golden ids; a difference is excused only from the first stored margin below 0.01 on."""
    expected = EXPECTED[name]
    tie = expected["first_margin_below_0.01"]
    end = len(ids) if tie is None else tie
    assert ids[:end] == expected["greedy"][: min(end, len(ids))]


def test_all_prompts_in_one_batch_equal_the_goldens(smollm2_llm):
    outputs = smollm2_llm.generate([p["ids"] for p in PROMPTS], GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_equal_up_to_a_near_tie(prompt["name"], output.outputs[0].token_ids)
        assert output.outputs[0].finish_reason == "length"
    smollm2_llm.runner.audit()
    assert smollm2_llm.scheduler.pool.num_free == smollm2_llm.scheduler.pool.num_usable


@pytest.mark.parametrize("prompt", PROMPTS, ids=[p["name"] for p in PROMPTS])
def test_each_prompt_alone_equals_its_golden(smollm2_llm, prompt):
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    (output,) = smollm2_llm.generate([prompt["ids"]], params)
    assert_equal_up_to_a_near_tie(prompt["name"], output.outputs[0].token_ids)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunk_sizes_give_the_same_tokens(smollm2_llm, chunk):
    """The chunk is cut by the scheduler's token budget; the executables stay the same."""
    scheduler = smollm2_llm.scheduler
    whole, config = scheduler.config, scheduler.config.__class__
    scheduler.config = config(**{**whole.__dict__, "max_num_seqs": 1, "max_num_batched_tokens": chunk})
    try:
        for prompt in PROMPTS[:1] + PROMPTS[2:4]:
            (output,) = smollm2_llm.generate([prompt["ids"]], SamplingParams(temperature=0.0, max_tokens=8))
            assert_equal_up_to_a_near_tie(prompt["name"], output.outputs[0].token_ids)
    finally:
        scheduler.config = whole


def test_logprobs_of_the_forward_pass_equal_the_goldens(smollm2_llm):
    from jaxrunner.scoring import score

    prompt = next(p for p in PROMPTS if p["name"] == "chat_short")
    expected = EXPECTED["chat_short"]
    ids = prompt["ids"] + expected["greedy"][:16]
    (logits,) = score(smollm2_llm.model, smollm2_llm.runner.weights, [ids])
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    for i, top in enumerate(expected["top20"]):
        row = logprobs[len(prompt["ids"]) - 1 + i]
        top_ids, values = (top["ids"], top["logprobs"]) if isinstance(top, dict) else (top[0], top[1])
        np.testing.assert_allclose(row[top_ids], values, atol=1e-3)


def test_chat_stops_at_the_models_own_end(smollm2_llm):
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    (output,) = smollm2_llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=40))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    assert output.prompt_token_ids == PROMPTS[0]["ids"]


def test_streaming_equals_generate_and_grows(smollm2_llm):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    texts = [o.outputs[0].text for o in smollm2_llm.stream("Café and naïve 🙂: the", params)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    (whole,) = smollm2_llm.generate("Café and naïve 🙂: the", params)
    assert texts[-1] == whole.outputs[0].text


def test_leaving_a_stream_early_frees_the_request(smollm2_llm):
    for _ in smollm2_llm.stream("Once upon a time", SamplingParams(temperature=0.0, max_tokens=50)):
        break
    assert not smollm2_llm.scheduler.has_work
    assert smollm2_llm.scheduler.pool.num_free == smollm2_llm.scheduler.pool.num_usable
    smollm2_llm.runner.audit()


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(smollm2_llm):
    params = SamplingParams(temperature=0.9, seed=1234, max_tokens=12)
    (alone,) = smollm2_llm.generate("Once upon a time", params)
    batch = smollm2_llm.generate(
        ["Hello", "Once upon a time", "The"], [SamplingParams(temperature=1.0), params, GREEDY]
    )
    assert batch[1].outputs[0].token_ids == alone.outputs[0].token_ids
    (other,) = smollm2_llm.generate("Once upon a time", SamplingParams(temperature=0.9, seed=1235, max_tokens=12))
    assert other.outputs[0].token_ids != alone.outputs[0].token_ids


def test_stop_token_ids_end_a_request_and_are_named(smollm2_llm):
    (free,) = smollm2_llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
    stop = free.outputs[0].token_ids[3]
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(stop,))
    (stopped,) = smollm2_llm.generate("The capital of France is", params)
    end = free.outputs[0].token_ids.index(stop)
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[: end + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([5, 49152], "token id 49152 at position 1"),
        ({"prompt_tokens": [1]}, "no field"),
        ([1] * 1025, "max_model_len 1024"),
        ([1.5], "integer"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_else_is_lost(smollm2_llm, prompt, message):
    prompts = [[504], prompt] if prompt else prompt
    with pytest.raises(AdmissionError, match=message):
        smollm2_llm.generate(prompts if prompt else [[]], GREEDY)
    assert not smollm2_llm.scheduler.has_work
    assert (
        len(smollm2_llm.generate([[504]], SamplingParams(temperature=0.0, max_tokens=2))[0].outputs[0].token_ids) == 2
    )
