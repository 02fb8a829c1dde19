"""On a GPU: executables that were lowered in another process, or come from disk, are those that would be made here."""

from __future__ import annotations

import dataclasses

import pytest

from jaxrunner import DeviceRunner, Ladder, RunnerConfig
from jaxrunner.compile.hlo import made_arrays, mosaic_kernels
from jaxrunner.compile.lowering_process import LoweringProcess
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import random_weights
from tests.runner.plans import new, plan, run

pytestmark = pytest.mark.gpu
MODEL = Model(
    "LlamaForCausalLM", 512, 512, 512, 8, 8, 64, (LayerSpec(),) * 2, max_position_embeddings=256, dtype="bfloat16"
)
CONFIG = RunnerConfig(4, 256, 64, 128, 16)
LADDER = Ladder(decode=(4,), mixed=(64,), finish=(4,), tiers=("greedy",))


def tokens_of(runner: DeviceRunner) -> list[int]:
    kv = runner.state.kv.blocks[0]
    place = kv.unsafe_buffer_pointer()
    out = run(runner, plan({"a": 40}, [new("a", list(range(5, 45)), list(range(1, 6)))]))["a"]
    for _ in range(8):
        out += run(runner, plan({"a": 1}))["a"]
    assert runner.state.kv.blocks[0].unsafe_buffer_pointer() == place, "the cache has moved"
    return out


@pytest.fixture(scope="module")
def weights():
    return random_weights(MODEL)


@pytest.fixture(scope="module")
def made_here(weights):
    runner = DeviceRunner(MODEL, weights, CONFIG, ladder=LADDER)
    runner.warm_up(processes=0)
    return tokens_of(runner), runner.table.entries


def test_lowered_in_a_process_without_the_device(weights, made_here):
    tokens, entries = made_here
    runner = DeviceRunner(MODEL, weights, CONFIG, ladder=LADDER)
    process = LoweringProcess(runner.table.programs)
    runner.table.compiler.lower = process.lower
    try:
        runner.warm_up(processes=0)
    finally:
        process.close()
    cache = runner.state.kv.blocks[0]
    for program, entry in runner.table.entries.items():
        text, expected = entry.compiled.as_text(), entries[program].compiled.as_text()
        assert mosaic_kernels(text) == mosaic_kernels(expected), program
        assert len(made_arrays(text, [cache.size])) == len(made_arrays(expected, [cache.size])), program
        assert entry.temp_bytes == pytest.approx(entries[program].temp_bytes, rel=0.01, abs=4096), program
    assert tokens_of(runner) == tokens


def test_from_disk(weights, made_here, tmp_path):
    tokens, entries = made_here
    config = dataclasses.replace(CONFIG, executable_cache=str(tmp_path / "executables"))
    for start in ("cold", "warm"):
        runner = DeviceRunner(MODEL, weights, config, ladder=LADDER)
        runner.warm_up(processes=0)
        loaded = [entry.load_seconds > 0 for entry in runner.table.entries.values()]
        assert loaded == [start == "warm"] * len(entries)
        assert tokens_of(runner) == tokens
    for program, entry in runner.table.entries.items():
        assert entry.temp_bytes == pytest.approx(entries[program].temp_bytes, rel=0.01, abs=4096), program
