"""Constraints through the engine: goldens of transformers, words as text, errors that stay with their request."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.engine.bad_words import bad_words_token_ids
from jaxrunner.errors import AdmissionError
from tests.conftest import GOLDEN

COUNT, TEXT, ALLOWED = 24, "The capital of France is", 6
STUCK = {"allowed_token_ids": [40, 41], "bad_words_token_ids": [[40, 40], [41]]}
smollm2 = pytest.mark.smollm2


@functools.cache
def golden(name: str):
    return json.loads((GOLDEN / "smollm2" / name).read_text())


def prompt_ids(name: str) -> list[int]:
    return next(p["ids"] for p in golden("prompts.json") if p["name"] == name)


def parameters(arguments: dict) -> dict:
    """Our names for transformers' arguments."""
    found = {}
    if "repetition_penalty" in arguments:
        found["repetition_penalty"] = arguments["repetition_penalty"]
    if "bad_words_ids" in arguments:
        found["bad_words_token_ids"] = arguments["bad_words_ids"]
    if "sequence_bias" in arguments:
        found["logit_bias"] = {token: value for (token,), value in arguments["sequence_bias"]}
    if "allowed" in arguments:
        found["allowed_token_ids"] = arguments["allowed"]
    return found


@functools.cache
def golden_cases() -> list[dict]:
    """All but one, so that the batch's prompts are one step."""
    done = [c for c in golden("f32.json")["processed_greedy"] if parameters(c["hf_arguments"])]
    return [c for c in done if c["prompt"] != "raw_code"]


@pytest.fixture(scope="module")
def outputs(smollm2_llm):
    """One batch for all tests, name or number of a golden case -> its output: a few executables serve them all."""
    greedy = functools.partial(SamplingParams, temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    asked = {
        i: (prompt_ids(c["prompt"]), greedy(**parameters(c["hf_arguments"]))) for i, c in enumerate(golden_cases())
    }
    asked |= {
        "free": (TEXT, greedy()),
        "banned": (TEXT, greedy(bad_words=[" Paris"])),
        "stuck": ([504], greedy(**STUCK)),
    }
    prompt, allowed = asked[ALLOWED]
    asked[ALLOWED] = prompt, dataclasses.replace(allowed, return_sampling_mask=True)
    prompts, params = map(list, zip(*asked.values(), strict=True))
    made = smollm2_llm.generate(prompts, params)
    return dict(zip(asked, (output.outputs[0] for output in made), strict=True))


@smollm2
def test_greedy_continuations_equal_those_of_transformers(outputs):
    """Seven cases, up to the first place where float32 may choose otherwise."""
    assert len(golden_cases()) == 7
    for i, case in enumerate(golden_cases()):
        sure = next((i for i, margin in enumerate(case["margins"]) if margin < 0.01), COUNT)
        assert sure >= 9
        assert outputs[i].token_ids[:sure] == case["greedy"][:COUNT][:sure], case["label"]


@smollm2
def test_k056_k057_words_are_banned_as_they_are_written(smollm2_llm, outputs):
    """Without special tokens, at the start of a text and after a space, whatever the number of ids."""
    tokenizer = smollm2_llm.tokenizer
    words = ["capital", " Paris", "exag"]
    ids = bad_words_token_ids(tokenizer, words)
    spelled = [tokenizer.decode(word, skip_special_tokens=False) for word in ids]
    assert spelled == [form for word in words for form in (word.strip(), f" {word.strip()}")]
    assert len({len(word) for word in ids}) > 1
    assert "Paris" in outputs["free"].text
    assert "Paris" not in outputs["banned"].text


@smollm2
def test_a_request_without_any_id_left_ends_with_an_error_of_its_own(outputs):
    stuck = outputs["stuck"]
    assert (stuck.token_ids, stuck.finish_reason) == ([40], "error")
    assert "forbid every token id" in stuck.error
    others = [output for name, output in outputs.items() if name != "stuck"]
    assert all((len(o.token_ids), o.finish_reason, o.error) == (COUNT, "length", None) for o in others)


@smollm2
def test_a_sampling_mask_for_each_token(outputs):
    assert outputs[ALLOWED].sampling_mask == [golden_cases()[ALLOWED]["hf_arguments"]["allowed"]] * COUNT
    assert outputs["free"].sampling_mask is None


def test_a_stream_ends_with_the_error():
    options = {"max_num_seqs": 1, "max_model_len": 32, "max_num_batched_tokens": 16}
    llm = LLM(str(GOLDEN / "tiny" / "llama"), **options)
    *_, last = llm.stream([5, 9], SamplingParams(temperature=0.0, **STUCK))
    assert (last.outputs[0].token_ids, last.outputs[0].finish_reason) == ([40], "error")
    assert last.request_id in last.outputs[0].error
    for fields, message in (
        ({"logit_bias": {256: 1.0}}, "256"),
        ({"replay_token_ids": [1]}, "replay_tokens=1"),
        ({"thinking_token_budget": 3}, "ThinkingTokens"),
        ({"bad_words": ["a"]}, "no tokenizer"),
    ):
        with pytest.raises(AdmissionError, match=message):
            llm.generate([[1], [2]], [SamplingParams(), SamplingParams(**fields)])
    assert not llm.scheduler.has_unfinished
