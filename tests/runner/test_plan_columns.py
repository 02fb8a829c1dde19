"""Plain plans are recognised by identity alone, and their columns say what the plan says."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from jaxrunner.contract import CachedRequestData, KVCacheBlockCopy, NewRequestData, SchedulerOutput, TokenCounts
from jaxrunner.errors import AdmissionError
from jaxrunner.runner.admission import check_scheduler_output
from jaxrunner.runner.block_lists import BlockLists
from jaxrunner.runner.host_rows import HostRows
from jaxrunner.runner.plan_columns import PlainPlans, PlanColumns
from jaxrunner.runner.rows import RowMap
from jaxrunner.state.block_tables import KVGroup, expand_block_ids
from tests.runner.plans import both_runners, new, plan, run

NAMES = tuple(f"request-{i}" for i in range(5))


class Text(str):
    """Equal to a text, and none."""


def requests() -> RowMap:
    rows = RowMap(8)
    for name in NAMES:
        rows.add(name)
    return rows


def steady(names=NAMES, counts=None, new_ids=(), **fields: Any) -> SchedulerOutput:
    """One token for each; the ids in a plan are one and the same object, as a scheduler's are."""
    named = [*names, *new_ids]
    fresh = [NewRequestData(name, [1, 2], None, ([1],)) for name in new_ids]
    num_tokens = dict(zip(named, counts or [1] * len(named), strict=True))
    cached = CachedRequestData(list(names), [None] * len(names), [3] * len(names), [1] * len(names))
    return SchedulerOutput(fresh, cached, num_tokens, sum(num_tokens.values()), **fields)


def check_equal(found: PlanColumns | None, so: SchedulerOutput, rows: RowMap) -> None:
    assert found is not None
    assert found.is_plain
    right = PlanColumns.of(so, rows.row_of)
    for name in ("rows", "counts", "num_tokens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(right, name), name)
    assert (found.req_ids, found.total) == (right.req_ids, right.total)


def test_the_columns_of_plain_plans_are_those_of_any_plan():
    rows, plains = requests(), PlainPlans()
    plans = [steady(), steady(), steady(counts=[1, 3, 1, 2, 1]), steady(NAMES[1:]), steady(NAMES[::-1]), steady()]
    plans += [
        steady(new_ids=("n",), counts=[1, 1, 1, 1, 1, 9]),
        steady(finished_req_ids={"gone"}),
        steady(counts=[900] * 5),
    ]
    for so in plans:
        check_equal(plains.columns(so, rows), so, rows)


def remembering(rows: RowMap, so: SchedulerOutput | None = None) -> PlainPlans:
    """One that has seen a steady plan."""
    plains, so = PlainPlans(), so or steady()
    columns = plains.columns(so, rows)
    assert columns is not None
    plains.remember(so, columns, rows)
    return plains


def test_a_steady_decode_gets_the_columns_of_the_step_before():
    rows = requests()
    plains = remembering(rows)
    found = plains.again(steady(), rows)
    check_equal(found, steady(), rows)
    assert plains.again(steady(), rows) is found
    with pytest.raises(ValueError, match="read-only"):
        found.rows[0] = 7


NEWS = {
    "a request ends": lambda: steady(finished_req_ids={"gone"}),
    "a request is preempted": lambda: steady(preempted_req_ids={"gone"}),
    "a field of another type": lambda: steady(finished_req_ids=[]),
    "a block is zeroed": lambda: steady(new_block_ids_to_zero=[3]),
    "a block is copied": lambda: steady(kv_cache_block_copies=[KVCacheBlockCopy(3, 4)]),
    "a new request": lambda: steady(new_ids=("n",)),
    "one less": lambda: steady(NAMES[1:]),
    "another order": lambda: steady(NAMES[::-1]),
    "another number": lambda: steady(counts=[1, 1, 1, 1, 2]),
    "drafts": lambda: steady(scheduled_spec_decode_tokens={NAMES[0]: [3]}),
    "a resumed request": lambda: with_cached(resumed_req_ids={NAMES[0]}),
    "too few lists of blocks": lambda: with_cached(new_block_ids=[None] * 4),
    "lists of blocks in a tuple": lambda: with_cached(new_block_ids=(None,) * 5),
    "another total": lambda: dataclasses.replace(steady(), total_num_scheduled_tokens=6),
}


def with_cached(**fields: Any) -> SchedulerOutput:
    so = steady()
    return dataclasses.replace(so, scheduled_cached_reqs=dataclasses.replace(so.scheduled_cached_reqs, **fields))


@pytest.mark.parametrize("kind", NEWS)
def test_a_plan_with_news_is_none_that_was_there_before(kind):
    rows = requests()
    plains = remembering(rows)
    assert plains.again(NEWS[kind](), rows) is None
    assert plains.again(steady(), rows) is not None


def shared(names=NAMES, **counts: int) -> TokenCounts:
    return TokenCounts({name: counts.get(name, 1) for name in names})


def test_shared_numbers_of_tokens_are_known_again_and_others_are_looked_at():
    rows, counts = requests(), shared()
    plains = remembering(rows, dataclasses.replace(steady(), num_scheduled_tokens=counts))
    found = plains.again(dataclasses.replace(steady(), num_scheduled_tokens=counts), rows)
    check_equal(found, steady(), rows)
    assert plains.again(dataclasses.replace(steady(), num_scheduled_tokens=shared()), rows) is found
    assert plains.again(steady(), rows) is found
    for other in (shared(NAMES[::-1]), shared((*NAMES[1:], "n")), TokenCounts(shared() | {NAMES[2]: 2})):
        assert plains.again(dataclasses.replace(steady(), num_scheduled_tokens=other), rows) is None
    reversed_ids = dataclasses.replace(steady(NAMES[::-1]), num_scheduled_tokens=counts)
    assert plains.again(reversed_ids, rows) is None


CHANGES = {
    "set": lambda counts: counts.__setitem__("a", 2),
    "delete": lambda counts: counts.__delitem__("a"),
    "merge": lambda counts: counts.__ior__({"a": 2}),
    "clear": lambda counts: counts.clear(),
    "pop": lambda counts: counts.pop("a"),
    "popitem": lambda counts: counts.popitem(),
    "setdefault": lambda counts: counts.setdefault("b", 1),
    "update": lambda counts: counts.update(a=2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_shared_numbers_of_tokens_do_not_change_and_copies_do(change):
    counts = TokenCounts({"a": 1})
    with pytest.raises(TypeError, match="shared by several plans"):
        CHANGES[change](counts)
    assert counts == {"a": 1}
    for other in (dict(counts), counts.copy(), counts | {}, copy.deepcopy(counts), pickle.loads(pickle.dumps(counts))):
        assert type(other) is dict
        assert other == {"a": 1}


def test_plans_with_new_requests_are_not_remembered():
    rows = requests()
    plains = remembering(rows, steady(new_ids=("n",)))
    assert plains.again(steady(new_ids=("n",)), rows) is None


def test_rows_that_were_given_anew_are_looked_up_again():
    rows = requests()
    plains = remembering(rows)
    for name in NAMES[:2]:
        rows.remove(name)
    for name in NAMES[:2]:
        rows.add(name)  # the last freed row first: they have changed places
    so = steady()
    assert plains.again(so, rows) is None
    found = plains.columns(so, rows)
    assert found.rows[:2].tolist() == [2, 1]
    check_equal(found, so, rows)


def with_ids(so: SchedulerOutput, place: int, name: Any) -> SchedulerOutput:
    so.scheduled_cached_reqs.req_ids[place] = name
    return so


def with_counts(so: SchedulerOutput, count: Any) -> SchedulerOutput:
    so.num_scheduled_tokens[NAMES[2]] = count
    so.total_num_scheduled_tokens = sum(so.num_scheduled_tokens.values())
    return so


STRANGE = {
    "cached twice": lambda: with_ids(steady(), 1, NAMES[0]),
    "a cached id of another type": lambda: with_ids(steady(), 1, Text(NAMES[1])),
    "ids of another type": lambda: steady((*NAMES[:4], Text(NAMES[4]))),
    "unknown": lambda: steady((*NAMES, "unknown")),
    "finished": lambda: steady(finished_req_ids={NAMES[3]}),
    "preempted": lambda: steady(preempted_req_ids={NAMES[3]}),
    "no tokens": lambda: with_counts(steady(), 0),
    "negative": lambda: with_counts(steady(), -3),
    "a truth value": lambda: with_counts(steady(), True),
    "a float": lambda: with_counts(steady(), 1.0),
    "new twice": lambda: dataclasses.replace(steady(new_ids=("n",)), scheduled_new_reqs=[new("n", [1], [1])] * 2),
    "tokens for nobody": lambda: dataclasses.replace(steady(new_ids=("n",)), scheduled_new_reqs=[]),
    "no list of new ones": lambda: dataclasses.replace(steady(), scheduled_new_reqs=5),
    "finished is no set": lambda: dataclasses.replace(steady(), finished_req_ids=[NAMES[0]]),
    "preempted is an array": lambda: dataclasses.replace(steady(), preempted_req_ids=np.zeros(3)),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_plan_that_is_refused_is_not_plain(kind):
    rows = requests()
    plains, so = remembering(rows), STRANGE[kind]()
    assert plains.again(so, rows) is None
    assert plains.columns(so, rows) is None
    with pytest.raises(AdmissionError):
        check_scheduler_output(so, rows.row_of)


def test_plans_that_are_accepted_may_be_other_than_plain():
    rows, plains = requests(), PlainPlans()
    equal = "".join([*NAMES[1]])  # another object
    left_out = steady()
    del left_out.num_scheduled_tokens[NAMES[1]]
    left_out.total_num_scheduled_tokens = 4
    for so in (with_ids(steady(), 1, equal), with_counts(steady(), np.int64(1)), left_out):
        assert plains.columns(so, rows) is None
        check_scheduler_output(so, rows.row_of)
    assert PlanColumns.of(left_out, rows.row_of).counts.tolist() == [1, 0, 1, 1, 1]


@both_runners
@pytest.mark.parametrize("warm", [1, 3])
def test_a_runner_refuses_strange_plans_after_steady_ones(runner, warm):
    """Ids, numbers and the total, each wrong in a plan that is otherwise that of the steps before."""
    a, b = "a", "b"
    run(runner, plan({a: 3, b: 2}, [new(a, [5, 6, 7], [1]), new(b, [5, 6], [2])]))
    for _ in range(warm):
        run(runner, plan({a: 1, b: 1}))
    texts = plan({a: 1, b: 1})
    texts.scheduled_cached_reqs.req_ids[1] = Text(b)
    total = dataclasses.replace(plan({a: 1, b: 1}), total_num_scheduled_tokens=3)
    truth = dataclasses.replace(plan({a: 1, b: 1}), num_scheduled_tokens={a: 1, b: True})
    many = plan({a: 1, b: 2})
    for so, text in ((texts, "something else than a text"), (total, "the sum is 2"), (truth, "no integer")):
        with pytest.raises(AdmissionError, match=text):
            runner.execute_model(so)
    with pytest.raises(AdmissionError, match=r"'b': tokens up to \d+ are scheduled of \d+ that are known"):
        runner.execute_model(many)
    assert len(run(runner, plan({a: 1, b: 1}))["a"]) == 1


@pytest.mark.parametrize("per_block", [(1,), (2,), (1, 3)])
def test_blocks_as_columns_are_those_of_a_loop(per_block):
    rng, groups = (
        np.random.default_rng(len(per_block)),
        [KVGroup((i,), blocks_per_kv_block=n) for i, n in enumerate(per_block)],
    )
    host, places = HostRows(9, groups, 64), np.array([4, 2, 7])
    host.num_blocks[places] = rng.integers(0, 5, (3, len(groups)))
    right, held = [], host.num_blocks.copy()
    given = [tuple(rng.permutation(30)[: rng.integers(0, 4)].tolist() for _ in groups) for _ in places]
    for row, lists in zip(places.tolist(), given, strict=True):
        for g, (ids, n) in enumerate(zip(lists, per_block, strict=True)):
            for block in expand_block_ids(ids, n):
                right.append([g, row, held[row, g], block])
                held[row, g] += 1
    blocks = BlockLists.of(given, len(groups)).in_kernel_blocks(host.blocks_per_kv_block)
    writes = host.append_blocks(places, blocks)
    assert writes.dtype == np.int32
    assert writes.tolist() == right
    np.testing.assert_array_equal(host.num_blocks, held)


SOUND = ([([3, 4],), ([],), ([5],)], [[[3]]], [])
UNSOUND = ([([3],), 5], [([3], [4])], [("ab",)], [([3, 3],)], [([0],)], [([9],)], [([True],)], [([3.0],)], [([None],)])


@pytest.mark.parametrize("block_ids", SOUND)
def test_sound_lists_are_taken_in_one_look(block_ids):
    found, right = BlockLists.if_sound(block_ids, 1, 9), BlockLists.of(block_ids, 1)
    assert (found.sizes.tolist(), found.ids.tolist()) == (right.sizes.tolist(), right.ids.tolist())


@pytest.mark.parametrize("block_ids", UNSOUND)
def test_others_are_looked_at_one_by_one(block_ids):
    assert BlockLists.if_sound(block_ids, 1, 9) is None
