"""SamplingParams: what is accepted has an effect, the rest raises and names itself."""

from __future__ import annotations

import pytest

from jaxrunner import SamplingParams
from jaxrunner.errors import AdmissionError, NotBuiltError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
    ],
)
def test_what_is_not_built_raises_and_names_itself(name, value):
    with pytest.raises(NotBuiltError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -1), ("top_k", 0), ("stop", []), ("bad_words", []), ("stop", None), ("top_p", 1), ("min_p", 0)],
)
def test_values_that_ask_for_nothing_are_accepted(name, value):
    assert SamplingParams(**{name: value}) == SamplingParams()
    assert SamplingParams(**{name: value}).tier == "random"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**64}, "64 bits"),
        ({"seed": -(2**63) - 1}, "64 bits"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens 17 is more than max_tokens 16"),
        ({"logprobs": -2}, "logprobs is -2"),
        ({"logprobs": True}, "logprobs is True"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs is 1.5"),
        ({"logprob_token_ids": [1.5]}, "logprob_token_ids"),
        ({"prompt_logprob_token_ids": ["a"]}, "prompt_logprob_token_ids"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: 1e39}}, "logit_bias"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words_token_ids": [[1], []]}, "without an id"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"replay_token_ids": ["a"]}, "replay_token_ids"),
    ],
)
def test_impossible_values_raise(fields, message):
    with pytest.raises(AdmissionError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "tier"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": 9e-6, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, "greedy"),
        ({"stop": "x"}, "random"),
        ({"top_k": 1}, "filtered"),
        ({"top_p": 0.99}, "filtered"),
        ({"min_p": 0.01}, "filtered"),
        ({"temperature": 0, "min_tokens": 1}, "constrained"),
        ({"temperature": 0, "logprobs": 0}, "logprobs"),
        ({"top_k": 3, "logprobs": 2}, "full"),
        ({"logprob_token_ids": [3]}, "logprobs"),
        ({"temperature": 0, "prompt_logprobs": 2, "prompt_logprob_token_ids": [3]}, "greedy"),
        ({"temperature": 0, "repetition_penalty": 1.1}, "constrained"),
        ({"frequency_penalty": -0.1}, "constrained"),
        ({"presence_penalty": 0.1}, "constrained"),
        ({"logit_bias": {3: 1.0}}, "constrained"),
        ({"allowed_token_ids": [3]}, "constrained"),
        ({"bad_words_token_ids": [[3]]}, "constrained"),
        ({"thinking_token_budget": 0}, "constrained"),
        ({"replay_token_ids": [1]}, "constrained"),
        ({"temperature": 0, "return_sampling_mask": True}, "full"),
        ({"logit_bias": {}, "bad_words": [], "thinking_token_budget": -1, "replay_token_ids": []}, "random"),
    ],
)
def test_the_tier_is_the_lowest_that_does_what_is_asked(fields, tier):
    assert SamplingParams(**fields).tier == tier


def test_stop_is_a_string_or_a_list():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))
    assert SamplingParams().stop_strings == ()


def test_every_field_is_used_or_listed_as_not_built():
    import dataclasses

    from jaxrunner.sampling_params import NOT_BUILT_DEFAULTS

    used = {"temperature", "max_tokens", "seed", "ignore_eos", "stop_token_ids"}
    used |= {"top_k", "top_p", "min_p", "min_tokens", "logprobs", "stop", "include_stop_str_in_output"}
    used |= {"repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "allowed_token_ids"}
    used |= {"logprob_token_ids", "prompt_logprobs", "prompt_logprob_token_ids"}
    used |= {"bad_words", "bad_words_token_ids", "thinking_token_budget", "replay_token_ids", "return_sampling_mask"}
    used |= {"extra_args", "structured_outputs"}
    assert {f.name for f in dataclasses.fields(SamplingParams)} == used | set(NOT_BUILT_DEFAULTS)
