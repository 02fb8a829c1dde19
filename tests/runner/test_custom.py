"""Custom logits processors and samplers behind a runner: chunks, preemption, neighbours, recordings, no compilation.

The tokens of a request that asks for `counted` are base, base + 1, ..., by a count in an array of its own.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrunner import DeviceRunner, FlightRecorder, HostRunner, LogitsProcessor, RequestArray, SamplingParams, replay
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.compile.programs import COPY
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from jaxrunner.errors import AdmissionError, CheckpointError, ImplementationError
from jaxrunner.runner.device_runner import _admission_call
from jaxrunner.state.admission import AdmitEntry, apply_admit, pack_admit
from jaxrunner.state.fields import RECORD_WIDTH
from jaxrunner.state.request_arrays import request_rows
from jaxrunner.state.runner_state import host_view
from tests.conftest import load_tiny
from tests.runner.conftest import table_of
from tests.runner.plans import CONFIG, GREEDY, LADDER, both_runners, kept_on_device, new, plan, request_values, run
from tests.sampling.custom import counted, nudge, picky

PROMPT, BLOCKS = list(range(40, 50)), {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9], "d": [10, 11, 12]}
RECORD = np.ones(RECORD_WIDTH, np.int32)
CUSTOM = dataclasses.replace(CONFIG, logits_processors=(counted, nudge), sampler=picky)


def counting(base, **fields):
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **fields}, extra_args={"counted": {"base": base}})


@pytest.fixture
def runner(request):
    """As of `conftest`, with functions of the user's."""
    runner_class = HostRunner if getattr(request, "param", "device") == "host" else DeviceRunner
    made = runner_class(*load_tiny("llama"), CUSTOM, ladder=LADDER)
    made.table = table_of(runner_class, CUSTOM)
    return made


def calls(runner, req_id):
    return int(request_values(runner)["counted.calls"][runner.rows[req_id]])


@both_runners
def test_k012_a_stateful_processor_counts_tokens_and_survives_a_preemption(runner):
    """A prompt of 10 in chunks of 6 and 4, three decodes, preempted, resumed in chunks: 0, 1, 4, and the next is 5."""
    assert run(runner, plan({"a": 6}, [new("a", PROMPT, BLOCKS["a"], counting(100))])) == {"a": []}
    row = runner.rows["a"]
    assert calls(runner, "a") == 0
    tokens = run(runner, plan({"a": 4}))["a"]
    assert calls(runner, "a") == 1
    for _ in range(3):
        tokens += run(runner, plan({"a": 1}))["a"]
    assert (tokens, calls(runner, "a")) == ([100, 101, 102, 103], 4)
    runner.execute_model(plan({}, preempted_req_ids={"a"}))
    run(runner, plan({"b": 10}, [new("b", PROMPT, BLOCKS["b"], counting(7))]))
    assert runner.rows["b"] == row, "another request has its row in between"
    back = new("a", PROMPT, BLOCKS["a"], counting(100), prefill_token_ids=PROMPT + tokens)
    assert run(runner, plan({"b": 1, "a": 8}, [back])) == {"b": [8], "a": []}
    assert calls(runner, "a") == 4
    assert run(runner, plan({"b": 1, "a": 6})) == {"b": [9], "a": [104]}
    assert (calls(runner, "a"), calls(runner, "b")) == (5, 3)
    runner.audit()


@both_runners
def test_a_token_that_was_on_its_way_at_a_preemption_counts_once(runner):
    """The scheduler has not seen the third token and comes back without it; then without all: it starts anew."""
    run(runner, plan({"a": 10}, [new("a", PROMPT, BLOCKS["a"], counting(30))]))
    for _ in range(2):
        run(runner, plan({"a": 1}))
    runner.execute_model(plan({}, preempted_req_ids={"a"}))
    too_far = new("a", PROMPT, BLOCKS["a"], counting(30), prefill_token_ids=[*PROMPT, 30])
    with pytest.raises(AdmissionError, match=r"'a' comes back with 11 tokens, and counted.*at least 12"):
        runner.execute_model(plan({"a": 11}, [too_far]))
    back = new("a", PROMPT, BLOCKS["a"], counting(30), prefill_token_ids=[*PROMPT, 30, 31])
    assert run(runner, plan({"a": 12}, [back]))["a"] == [32]
    assert run(runner, plan({"a": 1}))["a"] == [33]
    again = new("a", PROMPT, BLOCKS["a"], counting(30))
    assert run(runner, plan({"a": 10}, [again], preempted_req_ids={"a"}))["a"] == [30]


@both_runners
def test_a_resumption_in_the_plan_of_its_preemption(runner):
    run(runner, plan({"a": 10}, [new("a", PROMPT, BLOCKS["a"], counting(30))]))
    back = new("a", PROMPT, BLOCKS["a"], counting(30), prefill_token_ids=[*PROMPT, 30])
    assert run(runner, plan({"a": 11}, [back], preempted_req_ids={"a"}))["a"] == [31]


@both_runners
def test_what_a_runner_does_not_know_it_does_not_make_up(runner):
    """A request that comes from elsewhere with output is refused if the function has a history of its own."""
    foreign = new("a", PROMPT, BLOCKS["a"], counting(30), prefill_token_ids=[*PROMPT, 30])
    with pytest.raises(AdmissionError, match=r"'a' comes back with 11 tokens, and counted.*does not know"):
        runner.execute_model(plan({"a": 11}, [foreign]))
    assert len(runner.rows) == 0
    stateless = dataclasses.replace(GREEDY, extra_args={"nudge": {"scale": 0.0}})
    run(runner, plan({"a": 11}, [new("a", PROMPT, BLOCKS["a"], stateless, prefill_token_ids=[*PROMPT, 30])]))


@both_runners
def test_kept_values_are_dropped_when_their_request_ends(runner):
    fresh = [new(r, PROMPT, BLOCKS[r], counting(9)) for r in "ab"]
    run(runner, plan({"a": 10, "b": 10}, fresh))
    runner.execute_model(plan({}, preempted_req_ids={"a", "b"}))
    assert len(runner._kept) == 2
    runner.execute_model(plan({}, finished_req_ids={"a"}))
    run(runner, plan({"b": 11}, [new("b", PROMPT, BLOCKS["b"], counting(9), prefill_token_ids=[*PROMPT, 9])]))
    assert len(runner._kept) == 0


@both_runners
def test_neighbours_do_not_notice(runner):
    """Greedy and drawn, their tokens are those of a runner without any custom function."""
    drawn = SamplingParams(seed=4, top_k=20)
    plain = type(runner)(*load_tiny("llama"), CONFIG, ladder=LADDER)
    plain.table = table_of(type(runner))
    seen = []
    for each, others in ((plain, [GREEDY, GREEDY]), (runner, [counting(50), counting(3, temperature=0.7)])):
        params = dict(zip("abcd", [GREEDY, drawn, *others], strict=True))
        tokens = run(each, plan(dict.fromkeys("abcd", 8), [new(r, PROMPT[:8], BLOCKS[r], params[r]) for r in "abcd"]))
        for _ in range(4):
            for req_id, ids in run(each, plan(dict.fromkeys("abcd", 1))).items():
                tokens[req_id] += ids
        seen.append(tokens)
    assert seen[0]["a"] == seen[1]["a"]
    assert seen[0]["b"] == seen[1]["b"]
    assert (seen[1]["c"], seen[1]["d"]) == ([50, 51, 52, 53, 54], [3, 4, 5, 6, 7])


@both_runners
def test_a_row_forgets_the_arrays_of_its_last_owner(runner):
    run(runner, plan({"a": 10}, [new("a", PROMPT, BLOCKS["a"], counting(200))]))
    row = runner.rows["a"]
    first = run(runner, plan({"b": 10}, [new("b", PROMPT, BLOCKS["b"], GREEDY)], finished_req_ids={"a"}))
    assert runner.rows["b"] == row
    values = {name: value[row] for name, value in request_values(runner).items()}
    assert not values["counted"]
    assert (values["counted.base"], values["counted.calls"], values["nudge.scale"]) == (0, 0, np.float32(0.25))
    again = run(runner, plan({"c": 10}, [new("c", PROMPT, BLOCKS["c"], counting(5))], finished_req_ids={"b"}))
    assert again["c"] == [5] != first["b"]
    runner.execute_model(plan({}, finished_req_ids={"c"}))
    if isinstance(runner, HostRunner):
        runner._arrange()
    assert all(not host_view(value)[row].any() for value in kept_on_device(runner).extras.values())


@both_runners
def test_a_sampler_that_takes_no_id_fails_its_request_alone(runner):
    jumping = SamplingParams(seed=1, extra_args={"picky": {"jump": 1000}})
    fresh = [new("a", PROMPT, BLOCKS["a"], jumping), new("b", PROMPT, BLOCKS["b"], counting(60))]
    assert runner.execute_model(plan({"a": 10, "b": 10}, fresh)) is None
    output = runner.sample_tokens()
    assert output.sampled_token_ids == [[], [60]]
    assert list(output.sampling_errors) == ["a"]
    assert "sampler" in output.sampling_errors["a"]
    row = runner.rows["a"]
    assert request_values(runner)["picky.sum"][row] == 0, "what did not happen was not counted"


@both_runners
def test_other_parameters_compile_nothing(runner):
    """New values, more requests than one upload of arrays holds, preemptions: all in the executables of the first."""
    runner.table.get(COPY)
    run(runner, plan({"a": 10}, [new("a", PROMPT, BLOCKS["a"], counting(0, temperature=1.0))]))
    run(runner, plan({"a": 1}))
    runner.execute_model(plan({}, preempted_req_ids={"a"}))
    calm = SamplingParams(temperature=0.0, extra_args={"nudge": {"scale": -1.5, "bias": np.ones(3)}})
    with CompileCounter() as counter:
        fresh = [new("b", PROMPT, BLOCKS["b"], counting(99)), new("c", PROMPT, BLOCKS["c"], calm)]
        back = new("a", PROMPT, BLOCKS["a"], counting(0, temperature=1.0), prefill_token_ids=[*PROMPT, 0, 1])
        tokens = run(runner, plan({"a": 12, "b": 10, "c": 10}, [*fresh, back]))
        tokens = run(runner, plan({"a": 1, "b": 1, "c": 1}))
        runner.execute_model(plan({}, preempted_req_ids={"b"}))
    assert (tokens["a"], tokens["b"], tokens["c"]) == ([3], [100], [0])
    assert counter.count == 0


def test_wide_arrays_go_up_in_calls_of_bounded_size():
    """Three requests with 5000 words each fill a call each; with three words, one takes them all."""
    for width, calls in ((5000, [1, 1, 1]), (3, [3])):
        wide = LogitsProcessor(lambda x, _: x, name="wide", arrays=(RequestArray("bias", (width,)),))
        made = DeviceRunner(*load_tiny("llama"), dataclasses.replace(CONFIG, logits_processors=wide), ladder=LADDER)
        programs, entries = made.table.programs, [AdmitEntry(row, RECORD, arrays=arrays(wide)) for row in (1, 2, 3)]
        found = []
        while entries:
            count, program = _admission_call(entries, programs)
            found.append(count)
            layout = programs.admit_layout(program)
            assert layout.size < 3 * 8192
            state = apply_admit(made.state, pack_admit(layout, entries[:count]), layout=layout)
            assert host_view(state.extras["wide.bias"]).sum() == count * width
            entries = entries[count:]
        assert found == calls


def arrays(wide):
    bias = np.ones(wide.arrays[0].shape)
    return request_rows(SamplingParams(extra_args={"wide": {"bias": bias}}), (wide.declared,), 4)


@both_runners
@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_are_preempted_again_and_again_lose_no_count(runner, depth):
    """Four requests, blocks for hardly two, results none or one step late: all count on."""
    scheduler = Scheduler(dataclasses.replace(CONFIG, num_blocks=9), 1, prefix_caching=False)
    requests = [Request(f"r{i}", PROMPT[: 6 + i], counting(10 * i, max_tokens=28)) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    in_flight, steps = [], 0
    while scheduler.has_work or in_flight:
        scheduled, frame = scheduler.schedule()
        if runner.execute_model(scheduled) is None:
            in_flight.append((frame, runner.sample_tokens()))
        while in_flight and (len(in_flight) > depth or not scheduled.total_num_scheduled_tokens):
            scheduler.update(*in_flight.pop(0))
        steps += 1
        assert steps < 300
    assert [r.output_token_ids for r in requests] == [list(range(10 * i, 10 * i + 28)) for i in range(4)]
    assert sum(r.num_preemptions for r in requests) >= 3
    assert len(runner._kept) == 0


@both_runners
def test_a_preempted_request_that_is_aborted_leaves_nothing_behind(runner):
    scheduler = Scheduler(CONFIG, 1)
    request = Request("r", PROMPT, counting(1, max_tokens=5))
    scheduler.add(request)
    scheduled, frame = scheduler.schedule()
    runner.execute_model(scheduled)
    scheduler.update(frame, runner.sample_tokens())
    scheduler._preempt("r")
    runner.execute_model(scheduler.schedule()[0])
    assert len(runner._kept) == 1
    scheduler.abort("r")
    assert scheduler.has_work
    runner.execute_model(scheduler.schedule()[0])
    assert len(runner._kept) == 0
    assert not scheduler.has_work


def test_a_recording_replays_with_the_same_functions_alone(runner, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrunner.recorder.BucketTable", lambda programs, **options: runner.table)
    with FlightRecorder(runner, tmp_path / "r"):
        run(runner, plan({"a": 10}, [new("a", PROMPT, BLOCKS["a"], counting(77))]))
        run(runner, plan({"a": 1}))
        runner.execute_model(plan({}, preempted_req_ids={"a"}))
        back = new("a", PROMPT, BLOCKS["a"], counting(77), prefill_token_ids=[*PROMPT, 77, 78])
        assert run(runner, plan({"a": 12}, [back]))["a"] == [79]
    report = replay(tmp_path / "r", *load_tiny("llama"), logits_processors=(counted, nudge), sampler=picky)
    assert report.exact
    assert (report.outputs, report.states) == (3, 1)
    with pytest.raises(CheckpointError, match=r"\['counted', 'nudge', 'sampler picky'\], not with \[\]"):
        replay(tmp_path / "r", *load_tiny("llama"))


def test_a_function_of_another_kind_is_refused_before_anything_runs():
    with pytest.raises(ImplementationError, match=r"\(logits, context\), but <lambda> takes \(logits\)"):
        dataclasses.replace(CONFIG, logits_processors=[lambda logits: logits])
    broken = DeviceRunner(
        *load_tiny("llama"), dataclasses.replace(CONFIG, logits_processors=lambda x, _: x[0]), ladder=LADDER
    )
    with pytest.raises(ImplementationError, match=r"float32\[256\]; expected float32\[4, 256\]"):
        broken.table.programs.trace(broken.table.programs.finish(1, "greedy"))
