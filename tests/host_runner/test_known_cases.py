"""Known failure cases of a design that moves rows, and what only a `HostRunner` can get wrong."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, FlightRecorder, HostRunner, Ladder, SamplingParams, StructuredOutputsParams, fork_state
from jaxrunner.contract import GrammarOutput, KVCacheBlockCopy
from jaxrunner.errors import AdmissionError, InvariantError, NotBuiltError
from tests.conftest import GOLDEN, load_tiny
from tests.host_runner.plans import host_runner
from tests.runner.plans import CONFIG, GREEDY, new, num_computed, plan, run

TINY = str(GOLDEN / "tiny" / "llama")
ONLY_5 = SamplingParams(temperature=0.0, allowed_token_ids=[5], ignore_eos=True)
ONLY_7 = SamplingParams(temperature=0.0, allowed_token_ids=[7], ignore_eos=True)


@pytest.fixture
def host(host_table) -> HostRunner:
    return host_runner(load_tiny("llama"), host_table)


def test_k009_a_swap_takes_the_restriction_of_each_row_along(host):
    """Two requests change rows because one has become a decode; each goes on under its own restriction."""
    prompt = [3, 4, 5, 6, 8, 9]
    run(host, plan({"a": 2, "b": 2}, [new("a", prompt, [1], ONLY_5), new("b", [3, 4], [2], ONLY_7)]))
    assert (host.rows["a"], host.rows["b"]) == (0, 1)
    assert run(host, plan({"a": 2, "b": 1})) == {"b": [7], "a": []}
    assert (host.rows["a"], host.rows["b"]) == (1, 0)
    assert run(host, plan({"a": 2, "b": 1})) == {"b": [7], "a": [5]}


def test_k010_the_row_that_a_move_leaves_is_empty(host):
    """B, restricted, moves into A's row; C, unrestricted, comes into the row that B has left."""
    run(host, plan({"a": 2, "b": 2}, [new("a", [3, 4], [1]), new("b", [3, 4], [2], ONLY_5)]))
    host.execute_model(plan({}, finished_req_ids={"a"}))
    assert host.rows == {"b": 0}
    assert not host.lists.lists[1].any()
    assert not host.batch.rows.sampling[1].any()
    free = run(host, plan({"c": 2, "b": 1}, [new("c", [3, 4], [3])]))
    assert free["b"] == [5]
    alone = run(host, plan({"d": 2}, [new("d", [3, 4], [4])], finished_req_ids={"b", "c"}))
    assert free["c"] == alone["d"] != [5]


def test_k016_a_request_that_was_not_in_the_step_before_takes_nothing_from_it(host_table):
    """One step in flight: A samples while B waits; B's next input is its own token, long on the host."""
    host = host_runner(load_tiny("llama"), host_table, async_scheduling=True)
    prompts = {"a": [5, 9, 17], "b": [33, 65]}
    outputs = []

    def step(counts, fresh=()):
        host.execute_model(plan(counts, list(fresh)))
        outputs.append(host.sample_tokens())

    step({"a": 3, "b": 2}, [new("a", prompts["a"], [1]), new("b", prompts["b"], [2])])
    for counts in ({"a": 1}, {"a": 1}, {"a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 1}):
        step(counts)
    tokens = {"a": [], "b": []}
    for output in (o.get_output() for o in outputs):
        for req_id, ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            tokens[req_id] += ids
    for req_id, prompt in prompts.items():
        fresh = host_runner(load_tiny("llama"), host_table)
        alone = run(fresh, plan({"x": len(prompt)}, [new("x", prompt, [1])]))["x"]
        for _ in range(len(tokens[req_id]) - 1):
            alone += run(fresh, plan({"x": 1}))["x"]
        assert tokens[req_id] == alone


def test_a_request_without_an_id_left_is_as_before_although_a_later_step_was_launched(host_table):
    """The later step has no input for it: it reports the same, and neither step counts."""
    host = host_runner(load_tiny("llama"), host_table, async_scheduling=True)
    stuck = dataclasses.replace(ONLY_5, bad_words_token_ids=[[5]])
    host.execute_model(plan({"a": 2, "b": 2}, [new("a", [3, 4], [1], stuck), new("b", [3, 4], [2])]))
    outputs = [host.sample_tokens()]
    for counts in ({"a": 1, "b": 1}, {"b": 1}, {"b": 1}):
        host.execute_model(plan(counts))
        outputs.append(host.sample_tokens())
    failed = [list(o.get_output().sampling_errors) for o in outputs]
    assert failed == [["a"], ["a"], [], []]
    assert num_computed(host, "a") == 0
    assert int(host.batch.rows.known[host.rows["a"]]) == 2


def test_a_mask_without_an_id_is_reported_with_both_steps_that_were_launched_before_anybody_knew(host_table):
    """The later step has a mask that would leave an id, but no input."""
    host = host_runner(load_tiny("llama"), host_table, async_scheduling=True)
    structured = dataclasses.replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-z]*"))
    none, every = (GrammarOutput(["a"], np.full((1, 8), word, np.int32)) for word in (0, -1))
    host.execute_model(plan({"a": 2, "b": 2}, [new("a", [3, 4], [1], structured), new("b", [3, 4], [2])]))
    outputs = [host.sample_tokens(none)]
    for counts, mask in (({"a": 1, "b": 1}, every), ({"b": 1}, None), ({"a": 2, "b": 1}, every)):
        host.execute_model(plan(counts))
        outputs.append(host.sample_tokens(mask))
    results = [o.get_output() for o in outputs]
    assert [list(r.sampling_errors) for r in results] == [["a"], ["a"], [], []]
    assert [r.sampled_token_ids[r.req_id_to_index["a"]] for r in results[:2]] == [[], []]
    alone = run(host_runner(load_tiny("llama"), host_table), plan({"x": 2}, [new("x", [3, 4], [1])]))["x"]
    last = results[3]
    assert last.sampled_token_ids[last.req_id_to_index["a"]] == alone, "it begins again where it was"


def test_a_request_has_one_number_of_its_own_for_its_life(host):
    """What `SamplingContext.rows` says, whichever row of the batch the request is in."""
    of = {}
    prompt = [3, 4, 5, 6]
    fresh = {name: new(name, prompt, [i + 1]) for i, name in enumerate("abcdef")}
    steps = [
        plan({"a": 2, "b": 4, "c": 4}, [fresh["a"], fresh["b"], fresh["c"]]),
        plan({"c": 1, "a": 2}),
        plan({"c": 1, "d": 4, "e": 4}, [fresh["d"], fresh["e"]], finished_req_ids={"a"}),
        plan({"f": 4, "b": 1}, [fresh["f"]], finished_req_ids={"c"}),
    ]
    for so in steps:
        run(host, so)
        seen = {name: int(host.batch.rows.number[row]) for name, row in host.rows.items()}
        assert of | seen == seen | of, "the number of a request has changed"
        assert len(set(seen.values())) == len(seen)
        assert all(1 <= number <= CONFIG.max_num_seqs for number in seen.values())
        of |= seen
    assert not host.batch.rows.number[host.batch.num_reqs :].any()


def test_k001_k003_what_nobody_computed_has_no_influence(host_table):
    """The cache is NaN but for what a step writes; three of four rows live, in padded steps of both kinds."""
    seen = []
    for junk in (0.0, np.nan):
        host = host_runner(load_tiny("llama"), host_table)
        blocks = tuple(jnp.full_like(b, junk) for b in host.carry.kv.blocks)
        host.carry = host.carry.replace(kv=host.carry.kv.replace(blocks=blocks))
        drawn = SamplingParams(seed=3, top_k=30, logprobs=2)
        fresh = [new("a", [5, 9, 17], [1]), new("b", [4] * 9, [2, 3], drawn), new("c", [7], [4], drawn)]
        tokens = [run(host, plan({"a": 3, "b": 9, "c": 1}, fresh))]
        tokens += [run(host, plan({"a": 1, "b": 1, "c": 1})) for _ in range(4)]
        seen.append(tokens)
        last = np.asarray(host.carry.kv.blocks[0][:, :, 5:])
        assert np.isnan(last).all() if np.isnan(junk) else (last == 0).all(), "padding wrote into somebody's block"
    assert seen[0] == seen[1]


def test_a_plan_without_tokens_still_finishes_frees_and_writes(host):
    run(host, plan({"a": 3, "b": 2}, [new("a", [5, 6, 7], [1]), new("b", [8, 9], [2])]))
    assert host.execute_model(plan({}, blocks={"b": [3]}, finished_req_ids={"a"})).req_ids == []
    assert host.rows == {"b": 0}
    assert host.batch.rows.block_table[0, :3].tolist() == [2, 3, 0]
    assert not host.batch.rows.block_table[1].any()
    host.audit()


def test_a_bad_plan_changes_nothing(host):
    run(host, plan({"good": 3}, [new("good", [5, 6, 7], [9])]))
    before = {f.name: getattr(host.batch.rows, f.name).copy() for f in host.batch.rows.fields}
    refused = {
        "block 40": plan({"a": 1}, [new("a", [5], [40])]),
        "of 4 that are known": plan({"good": 2}),
        "block is listed twice": plan({"good": 1}, blocks={"good": [3, 3]}),
    }
    for message, bad in refused.items():
        with pytest.raises(AdmissionError, match=message):
            host.execute_model(bad)
    for name, array in before.items():
        np.testing.assert_array_equal(getattr(host.batch.rows, name), array)
    assert len(run(host, plan({"good": 1}))["good"]) == 1


def test_blocks_are_zeroed_and_copied_before_the_forward_pass(host_table):
    """B continues from a copy of A's tail block, which held NaN; both go on with the same token."""
    host = host_runner(load_tiny("llama"), host_table, check_invariants=False)
    prompt = [5, 9, 17, 33]
    first = run(host, plan({"a": 4}, [new("a", prompt, [1])]))["a"]
    poisoned = tuple(b.at[:, :, 2:4].set(np.nan) for b in host.carry.kv.blocks)
    host.carry = host.carry.replace(kv=host.carry.kv.replace(blocks=poisoned))
    copy = new("b", prompt, [2], prefill_token_ids=prompt + first, num_computed_tokens=4)
    moves = dict(new_block_ids_to_zero=[3], kv_cache_block_copies=[KVCacheBlockCopy(1, 2)])
    step = run(host, plan({"b": 1, "a": 1}, [copy], **moves))
    assert step["a"] == step["b"]
    assert not np.asarray(host.carry.kv.blocks[0][:, :, 3]).any()


def test_an_audit_finds_a_row_that_was_not_cleared(host):
    run(host, plan({"a": 2}, [new("a", [3, 4], [1])]))
    host.batch.rows.num_logprobs[2] = 3
    with pytest.raises(InvariantError, match="num_logprobs"):
        host.audit()


def test_what_needs_state_on_the_device_is_refused_with_the_way_out(host, tmp_path):
    with pytest.raises(NotBuiltError, match="use a DeviceRunner"):
        FlightRecorder(host, tmp_path / "flight")
    with pytest.raises(NotBuiltError, match="forked"):
        fork_state(host.state)


def test_all_programs_are_made_from_shapes_alone(host):
    """What sizes a KV cache before there is one: the same programs as the runner's own."""
    programs = HostRunner.programs_of(host.model, host.weights, host.config, host.ladder)
    assert programs.all() == host.table.programs.all()
    assert programs.identity(programs.all()[0]) == host.table.programs.identity(programs.all()[0])
    assert not any(program.kind == "admit" for program in programs.all())


def test_an_engine_runs_over_a_host_runner():
    """More requests than rows, chunked prefill, a shared prefix: the greedy tokens of the checkpoint."""
    data = np.load(GOLDEN / "tiny" / "llama" / "golden.npz")
    prompts = [data[f"input_ids_{i}"].reshape(-1).tolist() for i in (1, 0, 1)]
    ladder = Ladder(decode=(2,), mixed=(16,), finish=(2,))
    options = dict(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=16, num_blocks=12, block_size=8)
    llm = LLM(TINY, runner="host", ladder=ladder, **options)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [data[f"greedy_{i}"][:8].tolist() for i in (1, 0, 1)]
    assert isinstance(llm.runner, HostRunner)
