"""Step times: complete, exclusive, in order, and of no influence on the tokens."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from jaxrunner import LLM, DeviceRunner, Ladder, SamplingParams, StepTimer
from jaxrunner.contract import SchedulerOutput
from jaxrunner.ladder.recording import StepRecorder
from jaxrunner.selection.registry import HOMES
from jaxrunner.timing.ranges import RANGES
from jaxrunner.timing.times import DISPATCH, HOST
from tests.conftest import GOLDEN
from tests.runner.plans import new, plan, run

PROMPTS = [[5, 6, 7], list(range(9, 29)), [3]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


LADDER = Ladder(decode=(2,), mixed=(16,), finish=(2,), tiers=("greedy",))
TABLES: dict = {}


@pytest.fixture(scope="module", params=itertools.product(HOMES, [True, False]), ids=lambda p: f"{p[0]}-async={p[1]}")
def llm(request):
    name, is_async = request.param
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 16, "ladder": LADDER}
    made = LLM(str(GOLDEN / "tiny" / "llama"), runner=name, async_scheduling=is_async, **sizes)
    made.runner.table = TABLES.setdefault(name, made.runner.table)  # compiled once
    return made


def ids(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def test_every_step_is_recorded_once_and_the_tokens_are_the_same(llm, monkeypatch):
    expected = ids(llm.generate(PROMPTS, PARAMS))
    plans, execute = [], llm.runner.execute_model
    monkeypatch.setattr(llm.runner, "execute_model", lambda so: plans.append(so) or execute(so))
    llm.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    with StepTimer(llm.runner) as timer:
        begun = time.perf_counter_ns()
        assert ids(llm.generate(PROMPTS, PARAMS)) == expected
        wall = time.perf_counter_ns() - begun
    times = timer.times
    sizes = [(len(p.num_scheduled_tokens), p.total_num_scheduled_tokens) for p in plans]
    sizes = [size for size in sizes if size[1]]
    seen = list(zip(times.num_reqs.tolist(), times.num_tokens.tolist(), strict=True))
    # The last step may still be in flight when every request has ended.
    assert seen in (sizes, sizes[:-1])
    assert times.number.tolist() == list(range(len(times)))
    assert (times.spent >= 0).all()
    assert times.spent.sum() <= wall  # exclusive: nothing is counted twice
    assert all(name.startswith(("begin ", "decode[")) for name in times.program)
    fused = np.array([name.startswith("decode") for name in times.program])
    assert (times.us("sample") > 0).tolist() == (~fused).tolist()
    assert (times.us("forward") > 0).all()
    assert (times.us("admit")[0] > 0) == isinstance(llm.runner, DeviceRunner)
    assert times.host_us == pytest.approx(times.us(*HOST))
    assert times.dispatch_us == pytest.approx(times.us(*DISPATCH))


def test_steps_of_the_device_follow_each_other(llm):
    with StepTimer(llm.runner) as timer:
        llm.generate(PROMPTS, PARAMS)
    begin, end = timer.times.device_ns()
    assert (begin <= end).all()
    assert (begin[1:] >= end[:-1]).all()
    assert (timer.times.device_us >= 0).all()


def test_the_ring_keeps_the_newest_steps(llm):
    with StepTimer(llm.runner) as timer:
        assert len(timer.times) == 0
        llm.generate(PROMPTS, PARAMS)
    whole = timer.times
    with StepTimer(llm.runner, capacity=3) as timer:
        llm.generate(PROMPTS, PARAMS)
    kept = timer.times
    assert kept.number.tolist() == whole.number[-3:].tolist()
    assert kept.num_tokens.tolist() == whole.num_tokens[-3:].tolist()
    assert kept.program == whole.program[-3:]


def test_after_close_the_runner_is_as_it_was(llm):
    annotate = llm.runner.annotate
    timer = StepTimer(llm.runner)
    timer.close()
    timer.close()
    assert llm.runner.annotate is annotate
    assert llm.runner.execute_model.__func__ is type(llm.runner).execute_model
    llm.generate(PROMPTS, PARAMS)
    assert len(timer.times) == 0
    with pytest.raises(ValueError, match="capacity is 0"):
        StepTimer(llm.runner, capacity=0)


def test_there_is_one_timer_at_a_time_beside_other_recorders(llm):
    with StepRecorder(llm.runner) as recorder:
        with StepTimer(llm.runner) as timer, pytest.raises(RuntimeError, match="a StepTimer already"):
            StepTimer(llm.runner)
        with StepTimer(llm.runner) as timer:
            llm.generate(PROMPTS, PARAMS)
        llm.generate([[1, 2]], PARAMS)
    recorded = recorder.steps.num_tokens.astype(int).tolist()
    assert 0 < len(timer.times) < len(recorded)
    assert timer.times.num_tokens.tolist() == recorded[: len(timer.times)]


def test_a_refused_plan_and_one_without_tokens_are_no_steps(runner):
    with StepTimer(runner) as timer:
        with pytest.raises(ValueError, match="neither new nor cached"):
            runner.execute_model(SchedulerOutput(num_scheduled_tokens={"x": 1}, total_num_scheduled_tokens=1))
        run(runner, plan({"a": 3}, [new("a", [1, 2, 3], [1])]))
        assert runner.execute_model(plan({}, finished_req_ids={"a"})) is not None
        run(runner, plan({"b": 2}, [new("b", [1, 2], [1])]))
    assert timer.times.num_tokens.tolist() == [3, 2]


def test_what_is_made_on_demand_is_apart_from_the_hosts_own_work(runner, monkeypatch):
    get = runner.table.get

    def slow(*args, **options):
        time.sleep(0.05)
        return get(*args, **options)

    monkeypatch.setattr(runner.table, "get", slow)
    with StepTimer(runner) as timer:
        run(runner, plan({"a": 3}, [new("a", [1, 2, 3], [1])]))
    times = timer.times
    assert times.us("lookup")[0] >= 150_000  # admit, begin, finish
    column = RANGES.index("preprocess")
    whole, own = times.end[0, column] - times.begin[0, column], times.spent[0, column]
    assert whole - own >= 100_000_000  # admit, begin
