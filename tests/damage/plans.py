"""Damaged plans for a runner that holds the request "good" in decode and the request "long" in the middle of a prefill.

`damaged_plans` draws them from a seed: (label, plan, texts of which the error must hold one).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxrunner.contract import KVCacheBlockCopy, NewRequestData, SchedulerOutput
from jaxrunner.sampling_params import SamplingParams
from tests.runner.plans import CONFIG, new, plan

Case = tuple[str, SchedulerOutput, tuple[str, ...]]
WRONG = (5, "x", 1.5, object())


def damaged_plans(rng: np.random.Generator, count: int) -> Iterator[Case]:
    makers = [_step_fields, _request_fields, _tokens, _blocks, _ids, _counts, _moves, _not_built]
    for i in range(count):
        yield makers[i % len(makers)](rng)


def one_of(rng: np.random.Generator, values: Any) -> Any:
    return values[rng.integers(len(values))]


def fresh(**fields: Any) -> NewRequestData:
    return dataclasses.replace(new("bad", [5, 6, 7], [20]), **fields)


def with_fields(scheduler_output: SchedulerOutput, **fields: Any) -> SchedulerOutput:
    return dataclasses.replace(scheduler_output, **fields)


def _step_fields(rng: np.random.Generator) -> Case:
    field = one_of(rng, ("scheduled_new_reqs", "num_scheduled_tokens", "finished_req_ids", "preempted_req_ids"))
    value = one_of(rng, (*WRONG, [5], {5: 1}, {"a": "x"}, {5}, {("a",)}, "good"))
    if field == "preempted_req_ids" and not value:
        value = 5
    return f"{field} = {value!r}", with_fields(plan({"good": 1}), **{field: value}), (field, "tokens", "total")


def _request_fields(rng: np.random.Generator) -> Case:
    cases: tuple[tuple[str, Any, str], ...] = (
        ("req_id", one_of(rng, (5, None, ["a"], b"x")), "scheduled_new_reqs"),
        ("sampling_params", one_of(rng, WRONG), "sampling_params"),
        ("sampling_params", SamplingParams(stop_token_ids=[10_000]), "stop_token_ids"),
        ("num_computed_tokens", one_of(rng, (*WRONG[1:], None, -1, 3, 4, 10**12, True)), "num_computed_tokens"),
        ("block_ids", one_of(rng, (None, *WRONG, [5], ("ab",), (), ([20], [21]))), "block"),
        ("prefill_token_ids", one_of(rng, ([5], [7, 6, 5, 4], [5, 6, 7, 999], [5, 6, [7]], "x", 5)), "bad"),
    )
    field, value, named = one_of(rng, cases)
    request = fresh(**{field: value})
    scheduler_output = plan({"good": 1, "bad": 3}, [])
    scheduler_output.scheduled_new_reqs = [request]
    scheduler_output.scheduled_cached_reqs = plan({"good": 1}).scheduled_cached_reqs
    return f"{field} = {value!r}", scheduler_output, (named, "neither new nor cached")


def _tokens(rng: np.random.Generator) -> Case:
    outside = int(rng.integers(256, 2**31))
    prompts: tuple[Any, ...] = (
        [],
        [-1],
        [5, outside, 6],
        [10**30],
        [1.5, 2.0],
        ["a"],
        [[5], [6]],
        [[5], [6, 7]],
        [None],
        [True, False],
        "abc",
        5,
        {"a": 1},
        [5] * (CONFIG.max_model_len + 1),
        list(range(200)) * 50,
    )
    prompt = one_of(rng, prompts)
    request = fresh(prompt_token_ids=prompt)
    return f"prompt {str(prompt)[:40]}", plan({"good": 1, "bad": 1}, [request]), ("'bad'",)


def _blocks(rng: np.random.Generator) -> Case:
    bad = one_of(rng, (0, -1, CONFIG.num_blocks, CONFIG.num_blocks + int(rng.integers(10**6)), 2**40, "x", None, 1.5))
    kind = rng.integers(6)
    if kind == 0:
        return f"block {bad!r}", plan({"good": 1, "bad": 3}, [fresh(block_ids=([bad],))]), ("'bad'",)
    if kind == 1:
        return f"more: block {bad!r}", plan({"good": 1}, blocks={"good": [bad]}), ("'good'",)
    if kind == 2:
        return "too many blocks", plan({"good": 1, "bad": 3}, [fresh(block_ids=([*range(1, 40)] * 10,))]), ("'bad'",)
    if kind == 3:
        return "a block twice", plan({"good": 1, "bad": 3}, [fresh(block_ids=([20, 21, 20],))]), ("'bad'",)
    scheduler_output = plan({"good": 1})
    if kind == 4:
        blocks = one_of(rng, (([21], [22]), (), "ab", 5, [21], ([21], None)))
        scheduler_output.scheduled_cached_reqs.new_block_ids = [blocks]
        return f"new_block_ids {blocks!r}", scheduler_output, ("'good'",)
    lists = one_of(rng, ([], [None, None], None, 5, ([21],)))
    scheduler_output.scheduled_cached_reqs.new_block_ids = lists
    return f"new_block_ids {lists!r}", scheduler_output, ("new_block_ids",)


def _ids(rng: np.random.Generator) -> Case:
    name = f"unknown{rng.integers(1000)}"
    kind = rng.integers(6)
    if kind == 0:
        return "an unknown cached id", plan({"good": 1, name: 1}), (name,)
    if kind == 1:
        return "cached and finished", plan({"good": 1, "long": 1}, finished_req_ids={"long"}), ("long",)
    if kind == 2:
        return "cached and preempted", plan({"good": 1, "long": 1}, preempted_req_ids={"long"}), ("long",)
    if kind == 3:
        return "new twice", plan({"good": 1, "bad": 3}, [fresh(), fresh()]), ("twice",)
    scheduler_output = plan({"good": 1})
    if kind == 4:
        scheduler_output.scheduled_cached_reqs = plan({"good": 1, "long": 1}).scheduled_cached_reqs
        scheduler_output.scheduled_cached_reqs.req_ids = ["good", "good"]
        return "cached twice", scheduler_output, ("twice",)
    return "scheduled only", with_fields(scheduler_output, num_scheduled_tokens={"good": 1, name: 1}), (name, "total")


def _counts(rng: np.random.Generator) -> Case:
    kind = rng.integers(5)
    if kind == 0:
        return (
            "another total",
            with_fields(plan({"good": 1}), total_num_scheduled_tokens=int(rng.integers(2, 99))),
            ("total",),
        )
    if kind == 1:
        bad = one_of(rng, (0, -1, -(10**9), 1.5, "x", None))
        scheduler_output = with_fields(plan({"good": 1}), num_scheduled_tokens={"good": bad})
        total = bad if isinstance(bad, int) else 1
        return f"count {bad!r}", with_fields(scheduler_output, total_num_scheduled_tokens=total), ("tokens",)
    if kind == 2:
        return "more than are known", plan({"good": 1, "bad": int(rng.integers(4, 8))}, [fresh()]), ("'bad'",)
    if kind == 3:
        prompt = [5] * 30
        return (
            "more than the blocks hold",
            plan({"bad": int(rng.integers(9, 31))}, [fresh(prompt_token_ids=prompt)]),
            ("'bad'",),
        )
    requests = [new(f"n{i}", [5], [21 + i]) for i in range(CONFIG.max_num_seqs)]
    if rng.random() < 0.5:
        return "too many requests", plan({r.req_id: 1 for r in requests}, requests), ("max_num_seqs",)
    request = new("bad", [5] * 64, list(range(20, 28)))
    return "too many tokens", plan({"bad": CONFIG.max_num_batched_tokens + 1}, [request]), ("tokens",)


def _moves(rng: np.random.Generator) -> Case:
    bad = one_of(rng, (0, -1, CONFIG.num_blocks, 2**40, "x", None, 1.5))
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("zero", {"new_block_ids_to_zero": [bad]}),
        ("zero twice", {"new_block_ids_to_zero": [30, 30]}),
        ("zero", {"new_block_ids_to_zero": one_of(rng, WRONG)}),
        ("copy", {"kv_cache_block_copies": [KVCacheBlockCopy(bad, 30)]}),
        ("copy", {"kv_cache_block_copies": [KVCacheBlockCopy(30, bad)]}),
        ("chain", {"kv_cache_block_copies": [KVCacheBlockCopy(30, 31), KVCacheBlockCopy(31, 32)]}),
        ("copies", {"kv_cache_block_copies": one_of(rng, (*WRONG, [5], [(30, 31)], [None]))}),
    )
    label, fields = one_of(rng, cases)
    return f"{label} {fields}", plan({"good": 1}, **fields), ("block",)


def _not_built(rng: np.random.Generator) -> Case:
    step: Callable[[str, Any], Case] = lambda f, v: (f"{f} = {v!r}", plan({"good": 1}, **{f: v}), (f,))  # noqa: E731
    if rng.random() < 0.5:
        field = one_of(rng, ("pooling_params", "lora_request", "prompt_embeds", "mm_features"))
        return field, plan({"good": 1, "bad": 3}, [fresh(**{field: [1]})]), (field,)
    cases = (
        ("scheduled_spec_decode_tokens", {"good": [1]}),
        ("num_spec_tokens_to_schedule", 3),
        ("kv_connector_metadata", {"a": 1}),
        ("scheduled_encoder_inputs", {"a": [1]}),
    )
    return step(*one_of(rng, cases))
