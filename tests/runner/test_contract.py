"""The two-phase contract: what execute_model and sample_tokens promise, and what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrunner.contract import (
    CachedRequestData,
    ECConnectorOutput,
    GrammarOutput,
    KVCacheBlockCopy,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    make_empty_encoder_model_runner_output,
)
from jaxrunner.errors import AdmissionError, CapacityError, NotBuiltError
from jaxrunner.state.runner_state import host_view
from tests.runner.plans import both_runners, new, plan, run, snapshot


@both_runners
def test_execute_model_returns_none_and_sample_tokens_completes(runner):
    assert runner.execute_model(plan({"a": 3}, [new("a", [5, 6, 7], [1])])) is None
    output = runner.sample_tokens()
    assert output.req_ids == ["a"]
    assert output.req_id_to_index == {"a": 0}
    assert len(output.sampled_token_ids[0]) == 1


@both_runners
def test_second_execute_model_first_raises_and_loses_nothing(runner):
    runner.execute_model(plan({"a": 3}, [new("a", [5, 6, 7], [1])]))
    with pytest.raises(RuntimeError, match="sample_tokens"):
        runner.execute_model(plan({"a": 1}))
    assert len(runner.sample_tokens().sampled_token_ids[0]) == 1


@both_runners
def test_sample_tokens_without_a_step_raises(runner):
    with pytest.raises(RuntimeError, match="execute_model"):
        runner.sample_tokens()


@both_runners
def test_a_mask_for_a_step_that_needs_none_raises_and_the_step_survives(runner):
    runner.execute_model(plan({"a": 3}, [new("a", [5, 6, 7], [1])]))
    with pytest.raises(AdmissionError, match=r"'a'.*no structured_outputs"):
        runner.sample_tokens(GrammarOutput(["a"], np.zeros((1, 8), np.int32)))
    assert len(runner.sample_tokens().sampled_token_ids[0]) == 1


def test_zero_tokens_still_finishes_frees_and_writes(runner):
    run(runner, plan({"a": 3, "b": 2}, [new("a", [5, 6, 7], [1]), new("b", [8, 9], [2])]))
    row_a, row_b = runner.rows["a"], runner.rows["b"]
    output = runner.execute_model(plan({}, blocks={"b": [3]}, finished_req_ids={"a"}))
    assert output.req_ids == []
    assert output.sampled_token_ids == []
    assert "a" not in runner.rows
    assert not host_view(runner.state.requests.counters[row_a]).any()
    assert host_view(runner.state.tables.num_blocks)[:, 0].tolist()[row_b] == 2
    assert host_view(runner.state.tables.block_table[0])[row_b, :2].tolist() == [2, 3]
    runner.audit()


@both_runners
def test_zero_tokens_admits_new_requests(runner):
    runner.execute_model(plan({}, [new("a", [5, 6, 7], [1])]))
    assert len(run(runner, plan({"a": 3}))["a"]) == 1


def test_empty_outputs_are_not_shared():
    first = ModelRunnerOutput.make_empty()
    first.req_ids.append("x")
    assert ModelRunnerOutput.make_empty().req_ids == []


def test_with_kv_conn_output_only():
    assert ModelRunnerOutput.with_kv_conn_output_only(None).kv_connector_output is None
    silent = KVConnectorOutput(expected_finished_count=3)
    assert ModelRunnerOutput.with_kv_conn_output_only(silent).kv_connector_output is None
    report = KVConnectorOutput(finished_sending={"a"})
    assert ModelRunnerOutput.with_kv_conn_output_only(report).kv_connector_output is report


def test_with_ec_conn_output_is_a_copy():
    base, report = ModelRunnerOutput.make_empty(), ECConnectorOutput(finished_sending={"x"})
    assert base.with_ec_conn_output(None) is base
    assert base.with_ec_conn_output(report).ec_connector_output is report
    assert base.ec_connector_output is None
    assert ModelRunnerOutput.with_ec_conn_output_only(report).ec_connector_output is report


def test_encoder_only_output_lists_the_requests():
    output = make_empty_encoder_model_runner_output(plan({"a": 3, "b": 1}))
    assert output.req_ids == ["a", "b"]
    assert output.sampled_token_ids == [[], []]
    assert output.pooler_output == [None, None]


@both_runners
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduled_spec_decode_tokens", {"a": [1]}),
        ("scheduled_encoder_inputs", {"a": [0]}),
        ("free_encoder_mm_hashes", ["h"]),
        ("num_invalid_spec_tokens", {"a": 1}),
        ("num_spec_tokens_to_schedule", 2),
        ("kv_connector_metadata", object()),
        ("ec_connector_metadata", object()),
        ("ec_manager_metadata", object()),
        ("partial_tail_offloads", {"a": [(0, 1, 2)]}),
    ],
)
def test_a_field_that_is_not_built_raises_and_names_itself(runner, field, value):
    with pytest.raises(NotBuiltError, match=field):
        runner.execute_model(plan({"a": 3}, [new("a", [5, 6, 7], [1])], **{field: value}))
    assert len(runner.rows) == 0


@both_runners
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_features", [object()]),
        ("pooling_params", object()),
        ("lora_request", object()),
        ("prompt_embeds", object()),
        ("prompt_is_token_ids", [True]),
    ],
)
def test_a_request_field_that_is_not_built_raises_and_names_itself(runner, field, value):
    with pytest.raises(NotBuiltError, match=field):
        runner.execute_model(plan({"a": 3}, [new("a", [5, 6, 7], [1], **{field: value})]))
    assert len(runner.rows) == 0


def test_every_contract_field_is_acted_on_or_refused():
    """A field that is added to the contract must be handled somewhere: it may not be silently ignored."""
    from jaxrunner.runner.admission import NOT_BUILT_REQUEST_FIELDS, NOT_BUILT_STEP_FIELDS

    acted_on = {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "new_block_ids_to_zero",
        "kv_cache_block_copies",
    }
    hints = {"num_common_prefix_blocks", "scheduled_encoder_input_stats"}  # a cascade hint and a statistic
    hints |= {"has_structured_output_requests", "pending_structured_output_tokens"}  # for the engine; a runner checks
    fields = {f.name for f in dataclasses.fields(SchedulerOutput)}
    assert fields == acted_on | hints | set(NOT_BUILT_STEP_FIELDS)
    request_fields = {f.name for f in dataclasses.fields(type(new("a", [1], [1])))}
    assert request_fields == set(NOT_BUILT_REQUEST_FIELDS) | {
        "req_id",
        "prompt_token_ids",
        "sampling_params",
        "block_ids",
        "num_computed_tokens",
        "prefill_token_ids",
    }


@both_runners
@pytest.mark.parametrize(
    ("scheduler_output", "message"),
    [
        (plan({"ghost": 1}), "does not hold"),
        (SchedulerOutput(num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1), "neither new nor cached"),
        (SchedulerOutput(num_scheduled_tokens={}, total_num_scheduled_tokens=2), "the sum is 0"),
        (plan({"a": 0}, [new("a", [5], [1])]), "0 scheduled tokens"),
        (plan({"a": 1}, [new("a", [5], [1]), new("a", [5], [2])]), "twice"),
        (plan({"a": 1}, [new("a", [], [1])]), "empty"),
        (plan({"a": 1}, [new("a", [999], [1])]), "token id 999"),
        (plan({"a": 1}, [new("a", [-1], [1])]), "token id -1"),
        (plan({"a": 1}, [new("a", [5], [40])]), "block 40"),
        (plan({"a": 1}, [new("a", [5], [0])]), "block 0"),
        (plan({"a": 1}, [new("a", [1] * 97, [1])]), "max_model_len is 96"),
        (plan({"a": 1}, [new("a", [1, 2], [1], num_computed_tokens=2)]), "last token"),
        (plan({"a": 1}, [new("a", [1, 2], [1], prefill_token_ids=[1])]), "shorter than the prompt"),
        (plan({}, new_block_ids_to_zero=[40]), "block 40"),
        (plan({}, new_block_ids_to_zero=[3, 3]), "twice"),
        (plan({}, kv_cache_block_copies=[KVCacheBlockCopy(0, 3)]), "block 0"),
        (plan({"a": 33}, [new("a", [1] * 40, [1, 2, 3, 4, 5])]), "takes 32"),
    ],
)
def test_a_bad_plan_raises_before_anything_changes(runner, scheduler_output, message):
    run(runner, plan({"good": 3}, [new("good", [5, 6, 7], [9])]))
    before = snapshot(runner)
    with pytest.raises(AdmissionError, match=message):
        runner.execute_model(scheduler_output)
    assert len(runner.rows) == 1
    for was, now in zip(before, snapshot(runner), strict=True):
        np.testing.assert_array_equal(now, was)
    assert len(run(runner, plan({"good": 1}))["good"]) == 1


@both_runners
def test_v1_style_resumption_is_refused_with_the_way_out(runner):
    so = plan({})
    so.scheduled_cached_reqs = CachedRequestData(resumed_req_ids={"a"})
    with pytest.raises(NotBuiltError, match="prefill_token_ids"):
        runner.execute_model(so)


@both_runners
def test_more_requests_than_rows_is_refused(runner):
    requests = [new(f"r{i}", [5], [i + 1]) for i in range(5)]
    with pytest.raises(CapacityError, match="max_num_seqs=4"):
        runner.execute_model(plan({r.req_id: 1 for r in requests}, requests))
    assert len(runner.rows) == 0
