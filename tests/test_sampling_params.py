"""SamplingParams: what is accepted has an effect, the rest raises and names itself."""

from __future__ import annotations

import pytest

from jaxrunner import SamplingParams
from jaxrunner.errors import AdmissionError, NotBuiltError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.05),
        ("stop", ["x"]),
        ("min_tokens", 1),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
        ("logit_bias", {1: 2.0}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("structured_outputs", object()),
    ],
)
def test_what_is_not_built_raises_and_names_itself(name, value):
    with pytest.raises(NotBuiltError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", -1), ("top_k", 0), ("stop", []), ("bad_words", []), ("stop", None)]
)
def test_values_that_ask_for_nothing_are_accepted(name, value):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**64}, "64 bits"),
        ({"seed": -(2**63) - 1}, "64 bits"),
    ],
)
def test_impossible_values_raise(fields, message):
    with pytest.raises(AdmissionError, match=message):
        SamplingParams(**fields)


def test_every_field_is_used_or_listed_as_not_built():
    import dataclasses

    from jaxrunner.sampling_params import NOT_BUILT_DEFAULTS

    used = {"temperature", "max_tokens", "seed", "ignore_eos", "stop_token_ids"}
    assert {f.name for f in dataclasses.fields(SamplingParams)} == used | set(NOT_BUILT_DEFAULTS)
