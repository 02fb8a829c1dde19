"""A recorded vLLM plan, duck-typed, replayed: every index array of the step compared with the formulas."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrunner import SamplingParams, StructuredOutputsParams, prepare_inputs
from jaxrunner.errors import NotBuiltError
from jaxrunner.runner.from_vllm import scheduler_output_from_vllm
from tests.runner.plans import run


def vllm_params(**fields):
    defaults = dict(
        temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, seed=3, max_tokens=20, stop=[], stop_token_ids=[],
        ignore_eos=False, n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, min_tokens=0,
        logprobs=None, prompt_logprobs=None, logit_bias=None, allowed_token_ids=None, bad_words=None,
        structured_outputs=None, detokenize=True, output_kind=0, skip_special_tokens=True,
    )  # fmt: skip
    return SimpleNamespace(**{**defaults, **fields})


def recorded(step: int, **fields):
    """What vLLM's scheduler sends for two requests (block size 8): a prefill of both, then one decode of each."""
    new = [
        SimpleNamespace(
            req_id="long", prompt_token_ids=list(range(2, 22)), mm_features=[], sampling_params=vllm_params(),
            pooling_params=None, block_ids=([7, 3, 9],), num_computed_tokens=0, lora_request=None,
            prompt_embeds=None, prefill_token_ids=list(range(2, 22)),
        ),
        SimpleNamespace(
            req_id="short", prompt_token_ids=[50], mm_features=[], sampling_params=vllm_params(temperature=0.0),
            pooling_params=None, block_ids=([4],), num_computed_tokens=0, lora_request=None,
            prompt_embeds=None, prefill_token_ids=[50],
        ),
    ]  # fmt: skip
    cached = SimpleNamespace(
        req_ids=["long", "short"], resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
        new_block_ids=[None, ([5],)], num_computed_tokens=[20, 1], num_output_tokens=[1, 1],
    )  # fmt: skip
    empty = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_token_ids=[], all_token_ids={}, new_block_ids=[],
        num_computed_tokens=[], num_output_tokens=[],
    )  # fmt: skip
    tokens = {"long": 20, "short": 1} if step == 0 else {"long": 1, "short": 1}
    plan = dict(
        scheduled_new_reqs=new if step == 0 else [], scheduled_cached_reqs=empty if step == 0 else cached,
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={}, num_common_prefix_blocks=[0],
        finished_req_ids=set(), free_encoder_mm_hashes=[], preempted_req_ids=set(), kv_connector_metadata=None,
    )  # fmt: skip
    return SimpleNamespace(**{**plan, **fields})


def test_a_recorded_prefill_gives_the_index_arrays_of_the_formulas(runner):
    so = scheduler_output_from_vllm(recorded(0))
    plan = runner.check(so)
    writes = runner.update_states(so, plan)
    ids, inputs, *_ = runner.build_inputs(plan.columns)
    assert not len(writes)  # they go up with the requests
    bucket = runner.ladder.pick(inputs)
    batch = prepare_inputs(runner.state, inputs, bucket=bucket)
    assert ids.req_ids == ["short", "long"]  # one-token requests first
    assert batch.query_start_loc.tolist() == [0, 1, 21, 21, 21]
    assert batch.seq_lens.tolist() == [1, 20, 0, 0]
    assert batch.positions.tolist() == [0, *range(20), *[0] * 11]
    assert batch.input_ids.tolist() == [50, *range(2, 22), *[0] * 11]
    assert batch.logits_indices.tolist() == [0, 20, 0, 0]
    slots = [4 * 8] + [[7, 3, 9][p // 8] * 8 + p % 8 for p in range(20)]
    assert batch.slot_mapping[0].tolist() == slots + [-1] * 11
    assert batch.block_table[0][:2, :4].tolist() == [[4, 0, 0, 0], [7, 3, 9, 0]]


def test_a_recorded_run_replays(runner):
    assert set(run(runner, scheduler_output_from_vllm(recorded(0)))) == {"long", "short"}
    so = scheduler_output_from_vllm(recorded(1))
    plan = runner.check(so)
    writes = runner.update_states(so, plan)
    assert writes.tolist() == [[0, runner.rows["short"], 1, 5]]
    inputs = dataclasses.replace(runner.build_inputs(plan.columns).inputs, block_writes=writes)
    batch = prepare_inputs(runner.state, inputs, bucket=runner.ladder.pick(inputs))
    assert batch.positions.tolist() == [20, 1, 0, 0]
    assert batch.slot_mapping[0].tolist() == [9 * 8 + 4, 4 * 8 + 1, -1, -1]


def test_parameters_carry_over():
    so = scheduler_output_from_vllm(recorded(0))
    assert so.scheduled_new_reqs[0].sampling_params == SamplingParams(temperature=0.7, seed=3, max_tokens=20)
    fields = dict(top_p=0.9, top_k=40, min_p=0.1, min_tokens=2, logprobs=3, stop=["x"], include_stop_str_in_output=True)
    fields |= dict(presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={3: 1.0})
    fields |= dict(logprob_token_ids=[7], prompt_logprobs=-1, prompt_logprob_token_ids=[8, 9])
    fields |= dict(allowed_token_ids=[3, 4], bad_words_token_ids=[[3, 4]], thinking_token_budget=5)
    source = recorded(0)
    source.scheduled_new_reqs[0].sampling_params = vllm_params(**fields)
    params = scheduler_output_from_vllm(source).scheduled_new_reqs[0].sampling_params
    assert params == SamplingParams(temperature=0.7, seed=3, max_tokens=20, **fields)


def test_structured_outputs_carry_over():
    """vLLM's object holds the name of its backend and other things as well."""
    other = dict(json=None, regex=None, grammar=None, json_object=None, disable_fallback=False, _backend="guidance")
    other |= dict(disable_any_whitespace=False, whitespace_pattern=None, disable_additional_properties=False)
    source = recorded(0)
    given = vllm_params(structured_outputs=SimpleNamespace(choice=["a", "b"], structural_tag=None, **other))
    source.scheduled_new_reqs[0].sampling_params = given
    params = scheduler_output_from_vllm(source).scheduled_new_reqs[0].sampling_params
    assert params.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    given.structured_outputs = SimpleNamespace(structural_tag="{}", choice=None, **other)
    with pytest.raises(NotBuiltError, match="structural_tag"):
        scheduler_output_from_vllm(source)


@pytest.mark.parametrize("field", ["encoder_input_updates", "has_sync_kv_loads", "aux_output_connector_metadata"])
def test_fields_of_newer_releases_are_refused_by_name(field):
    with pytest.raises(NotBuiltError, match=field):
        scheduler_output_from_vllm(recorded(0, **{field: {"a": 1}}))


@pytest.mark.parametrize(("name", "value"), [("logits_processors", [print]), ("n", 2)])
def test_a_parameter_that_is_not_built_is_refused_by_name(name, value):
    source = recorded(0)
    source.scheduled_new_reqs[0].sampling_params = vllm_params(**{name: value})
    with pytest.raises(NotBuiltError, match=name):
        scheduler_output_from_vllm(source)


def test_numpy_block_ids_are_taken_as_lists():
    source = recorded(0)
    source.scheduled_new_reqs[0].block_ids = (np.array([7, 3, 9]),)
    assert scheduler_output_from_vllm(source).scheduled_new_reqs[0].block_ids == ([7, 3, 9],)
