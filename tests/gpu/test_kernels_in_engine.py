"""On a GPU: which kernels every executable of an engine holds, counted, and that each updates the state in place."""

from __future__ import annotations

import functools

import pytest

from jaxrunner import DeviceRunner, Ladder, RunnerConfig
from jaxrunner.compile.buckets import TIER_FEATURES, Feature
from jaxrunner.compile.hlo import implementations, mosaic_kernels
from jaxrunner.compile.programs import Program
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import random_weights
from tests.runner.plans import new, plan, run

pytestmark = pytest.mark.gpu
MODEL = Model(
    "LlamaForCausalLM", 512, 512, 512, 8, 8, 128, (LayerSpec(),) * 3, max_position_embeddings=256, dtype="bfloat16"
)
CONFIG = RunnerConfig(256, 256, 256, 1024, 16)
LADDER = Ladder(decode=(4, 256), mixed=(64, 256), finish=(256,))


@functools.cache
def engine() -> DeviceRunner:
    runner = DeviceRunner(MODEL, random_weights(MODEL), CONFIG, ladder=LADDER)
    runner.warm_up()
    return runner


def expected(program: Program) -> dict[str, int]:
    """One input preparation a step; one rotation with KV write and one attention a layer, in a decode as one; a filter
    and a draw of sampled tokens; one search for the best ids where log-probabilities are reported, of prompts too;
    one commit at the end. Admission and block moves hold none."""
    if program.kind == "finish":
        assert program.tier is not None
        filters = {"sampling_filter": 1, "sampling_draw": 1} if Feature.FILTERS in TIER_FEATURES[program.tier] else {}
        search = {"best_ids": 1} if Feature.LOGPROBS in TIER_FEATURES[program.tier] else {}
        return {"commit_rows": 1} | filters | search
    if program.kind == "prompt":
        return {"best_ids": 1}
    if program.bucket is None:
        return {}
    layers = MODEL.num_layers
    kernels = {"input_prep_kernel": 1}
    if program.kind == "step":
        kernels["commit_rows"] = 1
    if program.bucket.kind == "mixed":
        return kernels | {"rope_kv_write": layers, "attention_prefill": layers}
    return kernels | {"attention_with_rope": layers}


def test_every_executable_holds_its_kernels_and_no_other():
    kinds = set()
    for program, entry in engine().table.entries.items():
        text = entry.compiled.as_text()
        assert dict(mosaic_kernels(text)) == expected(program), str(program)
        kinds |= {frozenset(expected(program))}
        if program.bucket is not None:
            found = implementations(text)
            assert {found[op] for op in found if op != "commit" or program.kind == "step"} == {"mosaic"}
    assert len(kinds) == 9, "decodes, fused and not; ragged; finishes; prompts; the rest"


def test_every_executable_updates_the_state_in_place():
    kv_bytes = engine().state.kv.nbytes
    for program, entry in engine().table.entries.items():
        memory = entry.compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= kv_bytes, str(program)
        assert memory.temp_size_in_bytes < kv_bytes / 2, str(program)


def test_the_cache_stays_where_it_is():
    runner = engine()
    before = runner.state
    pointer = before.kv.blocks[0].unsafe_buffer_pointer()
    run(runner, plan({"a": 40}, [new("a", list(range(3, 43)), [1, 2, 3, 4])]))
    for _ in range(3):
        run(runner, plan({"a": 1}))
    assert before.kv.blocks[0].is_deleted(), "the state was not donated"
    assert runner.state.kv.blocks[0].unsafe_buffer_pointer() == pointer
    run(runner, plan({"b": 1}, [new("b", [5], [5])], finished_req_ids={"a"}))
    assert runner.state.kv.blocks[0].unsafe_buffer_pointer() == pointer
