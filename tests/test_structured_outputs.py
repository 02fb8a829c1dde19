"""What a request may ask its output to look like, and what is refused before any engine sees it."""

from __future__ import annotations

import pytest

from jaxrunner import SamplingParams, StructuredOutputsParams, admit, init_state
from jaxrunner.errors import AdmissionError
from tests.conftest import load_tiny


def test_nothing_of_the_callers_is_kept():
    """Values and texts that say the same are equal and hash alike, so that they are compiled once."""
    schema, choice = {"type": "object"}, ["a", "b"]
    params = StructuredOutputsParams(json=schema), StructuredOutputsParams(choice=choice)
    schema["type"], choice[0] = "array", "c"
    same = StructuredOutputsParams(json='{ "type": "object" }'), StructuredOutputsParams(choice=("a", "b"))
    assert params == same
    assert [p.kind for p in params] == ["json", "choice"]
    assert len({*params, *same}) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one.*none"),
        ({"json_object": False}, "exactly one.*none"),
        ({"regex": "a", "choice": ["a"]}, r"exactly one.*\['regex', 'choice'\]"),
        ({"regex": 3}, "regex is 3"),
        ({"grammar": b"start: A"}, "grammar is b'start: A'"),
        ({"choice": []}, "choice is"),
        ({"choice": "yes"}, "choice is 'yes'"),
        ({"choice": ["a", ""]}, "choice is"),
        ({"json": "{"}, "no JSON schema"),
        ({"json": {"type": {1, 2}}}, "no JSON schema"),
        ({"json": {}, "whitespace_pattern": 1}, "whitespace_pattern is 1"),
        ({"regex": "a", "disable_any_whitespace": True}, "regex has no whitespace"),
    ],
)
def test_what_means_nothing_is_refused(fields, message):
    with pytest.raises(AdmissionError, match=f"structured_outputs.*{message}"):
        StructuredOutputsParams(**fields)


def test_sampling_params_take_nothing_else():
    with pytest.raises(AdmissionError, match=r"structured_outputs.*no StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_by_hand_a_mask_is_an_argument_of_the_step():
    model, _ = load_tiny("llama")
    state = init_state(model, max_requests=2, max_model_len=16, num_blocks=8, block_size=8)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(AdmissionError, match="grammar_bitmask"):
        admit(state, [[1, 2]], [params], vocab_size=256)
