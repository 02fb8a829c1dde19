"""Constraints through the engine: goldens of transformers, words as text, errors that stay with their request."""

from __future__ import annotations

import functools
import json

import pytest

from jaxrunner import SamplingParams
from jaxrunner.engine.bad_words import bad_words_token_ids
from jaxrunner.errors import AdmissionError
from tests.conftest import GOLDEN

pytestmark = pytest.mark.smollm2


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


def cases() -> list[dict]:
    return [c for c in golden("f32.json")["processed_greedy"] if parameters(c["hf_arguments"])]


def test_greedy_continuations_equal_those_of_transformers(smollm2_llm):
    """Eight cases in one batch, up to the first place where float32 may choose otherwise."""
    chosen = cases()
    assert len(chosen) == 8
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, **parameters(c["hf_arguments"])) for c in chosen
    ]
    outputs = smollm2_llm.generate([prompt_ids(c["prompt"]) for c in chosen], params)
    for case, output in zip(chosen, outputs, strict=True):
        sure = next((i for i, margin in enumerate(case["margins"]) if margin < 0.01), 24)
        assert sure >= 9
        assert output.outputs[0].token_ids[:sure] == case["greedy"][:24][:sure], case["label"]


def test_k056_k057_words_are_banned_as_they_are_written(smollm2_llm):
    """Without special tokens, at the start of a text and after a space, whatever the number of ids."""
    tokenizer = smollm2_llm.tokenizer
    ids = bad_words_token_ids(tokenizer, ["capital", " Paris", "exag"])
    assert [tokenizer.decode(word, skip_special_tokens=False) for word in ids] == [
        "capital",
        " capital",
        "Paris",
        " Paris",
        "exag",
        " exag",
    ]
    assert len({len(word) for word in ids}) > 1
    prompt = "The capital of France is"
    free, banned = (
        smollm2_llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, bad_words=words))[0]
        .outputs[0]
        .text
        for words in (None, [" Paris"])
    )
    assert "Paris" in free
    assert "Paris" not in banned


def test_a_request_without_any_id_left_ends_with_an_error_of_its_own(smollm2_llm):
    """Also one that has generated before, and in a stream; the others get all their tokens."""
    stuck = SamplingParams(temperature=0.0, allowed_token_ids=[40, 41], bad_words_token_ids=[[40, 40], [41]])
    plain = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    alone = smollm2_llm.generate(["1, 2, 3,"], plain)[0].outputs[0]
    first, second = smollm2_llm.generate(["1, 2, 3,", "1, 2, 3,"], [stuck, plain])
    assert first.outputs[0].token_ids == [40]
    assert first.outputs[0].finish_reason == "error"
    assert first.finished
    assert first.request_id in first.outputs[0].error
    assert (second.outputs[0].token_ids, second.outputs[0].error) == (alone.token_ids, None)
    *_, last = smollm2_llm.stream("1, 2, 3,", stuck)
    assert (last.outputs[0].token_ids, last.outputs[0].finish_reason) == ([40], "error")


def test_a_sampling_mask_for_each_token(smollm2_llm):
    params = SamplingParams(temperature=1.0, seed=4, top_k=5, max_tokens=6, return_sampling_mask=True, ignore_eos=True)
    silent = SamplingParams(temperature=1.0, seed=4, top_k=5, max_tokens=6, ignore_eos=True)
    asked, other = smollm2_llm.generate(["Once upon a time"] * 2, [params, silent])
    completion = asked.outputs[0]
    assert [len(ids) for ids in completion.sampling_mask] == [5] * 6
    assert all(token in ids for token, ids in zip(completion.token_ids, completion.sampling_mask, strict=True))
    assert other.outputs[0].sampling_mask is None
    assert other.outputs[0].token_ids == completion.token_ids


def test_what_cannot_be_done_is_refused_before_anything_runs(smollm2_llm):
    for fields, message in (
        ({"logit_bias": {49152: 1.0}}, "49152"),
        ({"replay_token_ids": [1]}, "replay_tokens=1"),
        ({"thinking_token_budget": 3}, "ThinkingTokens"),
    ):
        with pytest.raises(AdmissionError, match=message):
            smollm2_llm.generate(["a", "b"], [SamplingParams(), SamplingParams(**fields)])
    assert not smollm2_llm.scheduler.has_unfinished
