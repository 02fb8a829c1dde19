"""Fields of an output that hold something for each request are made when they are read, and then are the reader's."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from jaxrunner.contract import ECConnectorOutput, ModelRunnerOutput
from jaxrunner.runner.output import BatchIds, SampledOutput

IDS = BatchIds(["a", "b", "c"])
SAMPLED = np.array([[5], [-1], [7]], np.int32)
WHOLE = ModelRunnerOutput(["a", "b", "c"], {"a": 0, "b": 1, "c": 2}, [[5], [], [7]])


def fields(output: ModelRunnerOutput) -> dict:
    return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}


def test_an_output_holds_what_one_with_lists_holds():
    output = SampledOutput(IDS, SAMPLED)
    assert output.sampled is SAMPLED
    assert output.order(["a", "b", "c"]) is None
    assert not {"req_ids", "req_id_to_index", "sampled_token_ids"} & vars(output).keys()
    assert output.order(["c", "a", "b"]).tolist() == WHOLE.order(["c", "a", "b"]).tolist() == [1, 2, 0]
    assert fields(output) == fields(WHOLE)
    assert WHOLE.sampled.tolist() == SAMPLED.tolist()


@pytest.mark.parametrize("changed", [ModelRunnerOutput.make_empty(), WHOLE])
def test_lists_as_an_array_have_a_column_at_least(changed):
    assert changed.sampled.dtype == np.int32
    assert changed.sampled.shape == (len(changed.req_ids), 1)


def test_lists_of_several_tokens_are_padded():
    output = dataclasses.replace(WHOLE, sampled_token_ids=[[5, 6], [], [7]])
    assert output.sampled.tolist() == [[5, 6], [-1, -1], [7, -1]]


def test_what_a_reader_changes_is_seen_and_stays_in_its_output():
    output, other = SampledOutput(IDS, SAMPLED), SampledOutput(IDS, SAMPLED)
    output.sampled_token_ids[0].clear()
    output.req_ids.reverse()
    del output.req_id_to_index["a"]
    assert output.sampled.tolist() == [[-1], [-1], [7]]
    assert output.order(["a", "b", "c"]).tolist() == [2, 1, 0]
    assert fields(other) == fields(WHOLE)


def test_copies_hold_the_same():
    report = ECConnectorOutput({"x"})
    for output in (SampledOutput(IDS, SAMPLED), WHOLE):
        assert fields(pickle.loads(pickle.dumps(output))) == fields(WHOLE)
        changed = output.with_ec_conn_output(report)
        assert fields(changed) == fields(WHOLE) | {"ec_connector_output": report}
        assert changed.sampled.tolist() == SAMPLED.tolist()
        assert changed.order(["a", "b", "c"]) is None
        assert output.ec_connector_output is None
