"""Steps that decode the same requests again and again are counted as one number, and come to what single steps do."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrunner.errors import AdmissionError
from jaxrunner.runner.block_lists import BlockLists
from jaxrunner.runner.host_rows import HostRows
from jaxrunner.runner.plan_columns import CheckedPlan, Growth, PlanColumns
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.block_tables import KVGroup
from tests.runner.plans import CONFIG, both_runners, new, plan, run

ROWS = np.array([4, 2, 7], np.int32)
ONES = np.ones(3, np.int32)
COLUMNS = PlanColumns(ROWS, ONES, ["a", "b", "c"], ONES, 3, True)


def decoding(groups: list[KVGroup], blocks: int, max_model_len: int = 64) -> HostRows:
    """Three requests with 3, 4 and 5 tokens computed, whose last step gave each of them one more."""
    host = HostRows(9, groups, max_model_len)
    for length, row in enumerate(ROWS.tolist(), start=3):
        host.occupy(row, length, 0, SamplingParams(), vocab_size=50)
    host.num_blocks[ROWS] = blocks
    assert host.advance(ROWS, np.array([3, 4, 5], np.int32)).all()
    return host


def steady(host: HostRows, places: list[int] | None = None, per_group: int = 1) -> CheckedPlan:
    if not places:
        return CheckedPlan(COLUMNS, None, True)
    lists = [tuple([9] * per_group for _ in host.groups) for _ in places]
    blocks, rows = BlockLists.of(lists, len(host.groups)), ROWS[places]
    before = host.num_blocks[rows]
    return CheckedPlan(COLUMNS, Growth(np.array(places), rows, blocks, before, before + blocks.sizes), True)


def take(host: HostRows, checked: CheckedPlan) -> None:
    if checked.growth is not None:
        host.grow(checked.growth)
    assert host.advance(ROWS, ONES).tolist() == [True] * 3


@pytest.mark.parametrize("num_groups", [1, 2])
def test_steady_steps_come_to_what_single_steps_do(num_groups):
    host = decoding([KVGroup((i,), block_size=4) for i in range(num_groups)], blocks=2)
    for step in range(9):
        checked = steady(host, [step % 3])
        assert host.may_go_on(checked)
        take(host, checked)
    assert host.computed[ROWS].tolist() == [12, 13, 14]
    assert host.known[ROWS].tolist() == [13, 14, 15]
    assert host.num_blocks[ROWS].tolist() == [[5] * num_groups] * 3
    assert host.computed.sum() == 39  # no other row has moved
    assert not host.may_go_on(steady(host))  # who reads a column has ended the run


def test_a_block_that_ends_stops_the_run_and_a_new_one_carries_it_on():
    host = decoding([KVGroup((0,), block_size=4)], blocks=2)
    for _ in range(3):  # until the longest has eight tokens
        assert host.may_go_on(steady(host))
        take(host, steady(host))
    assert not host.may_go_on(steady(host))
    assert not host.may_go_on(steady(host, [0, 1]))
    grown = steady(host, [2])
    assert host.may_go_on(grown)
    assert not host.may_go_on(steady(host))  # a block of a plan that was not run is none
    assert host.may_go_on(grown)
    take(host, grown)
    assert not host.may_go_on(steady(host, [2]))  # the second has eight tokens now
    assert host.may_go_on(steady(host, [1]))


def test_the_shorter_one_of_two_tables_ends_the_run():
    host = decoding([KVGroup((0,), block_size=4), KVGroup((1,), block_size=2)], blocks=3)
    take_one = steady(host)
    assert host.may_go_on(take_one)
    take(host, take_one)
    assert not host.may_go_on(steady(host))


def test_max_model_len_ends_the_run_whatever_blocks_there_are():
    host = decoding([KVGroup((0,), block_size=4)], blocks=2, max_model_len=6)
    assert host.may_go_on(steady(host))
    take(host, steady(host))
    assert not host.may_go_on(steady(host, [0, 1, 2], per_group=3))


def test_requests_that_got_no_token_or_ran_other_numbers_are_looked_at_one_by_one():
    host = HostRows(9, [KVGroup((0,), block_size=4)], 64)
    host.occupy(4, 8, 0, SamplingParams(), vocab_size=50)
    rows, counts = ROWS[:1], ONES[:1]
    host.num_blocks[rows] = 9
    columns = PlanColumns(rows, counts, ["a"], counts, 1, True)
    assert not host.advance(rows, counts).any()  # a piece of a prompt
    assert not host.may_go_on(CheckedPlan(columns, None, True))
    host.advance(rows, np.array([7], np.int32))
    assert not host.may_go_on(CheckedPlan(columns._replace(rows=rows.copy()), None, True))
    assert not host.may_go_on(CheckedPlan(columns._replace(total=2), None, True))
    assert host.may_go_on(CheckedPlan(columns, None, True))


def test_a_row_that_changes_hands_ends_the_run():
    host = decoding([KVGroup((0,), block_size=4)], blocks=2)
    assert host.may_go_on(steady(host))
    take(host, steady(host))
    host.occupy(2, 20, 0, SamplingParams(), vocab_size=50)
    assert host.computed[ROWS].tolist() == [4, 0, 6]
    assert host.known[ROWS].tolist() == [5, 20, 7]


@both_runners
def test_a_steady_decode_past_its_blocks_is_refused_and_goes_on_with_another(runner):
    run(runner, plan({"a": 3, "b": 5}, [new("a", [5, 6, 7], [1]), new("b", [5, 6, 7, 8, 9], [2])]))
    for _ in range(3):
        run(runner, plan({"a": 1, "b": 1}))
    for blocks in (None, {"a": [3]}):
        with pytest.raises(AdmissionError, match=r"'b': tokens up to 9 are scheduled of 8 that its blocks hold"):
            runner.execute_model(plan({"a": 1, "b": 1}, blocks=blocks))
    for given, text in ((7, "block ids are 7"), ((), "0 block lists for 1 KV-cache groups")):
        broken = plan({"a": 1, "b": 1})
        broken.scheduled_cached_reqs.new_block_ids[1] = given
        with pytest.raises(AdmissionError, match=f"'b': {text}"):
            runner.execute_model(broken)
    run(runner, plan({"a": 1, "b": 1}, blocks={"b": [4]}))
    run(runner, plan({"a": 1, "b": 1}))
    with pytest.raises(AdmissionError, match=r"'a': tokens up to 9 are scheduled of 8 that its blocks hold"):
        runner.execute_model(plan({"a": 1, "b": 1}))
    run(runner, plan({"b": 1}))  # and others go on without it
    runner.audit()


@both_runners
def test_a_steady_decode_past_max_model_len_is_refused(runner):
    blocks = list(range(1, 1 + CONFIG.max_model_len // 8))
    run(runner, plan({"a": 3}, [new("a", [5, 6, 7], blocks)]))
    for _ in range(CONFIG.max_model_len - 3):
        run(runner, plan({"a": 1}))
    with pytest.raises(AdmissionError, match=r"'a': tokens up to 97 are scheduled of 96"):
        runner.execute_model(plan({"a": 1}))
