"""On a GPU: the engine's own executables hold the kernels, update the cache in place, and give the golden tokens."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrunner import DeviceRunner, Ladder, RunnerConfig
from tests.conftest import GOLDEN, load_tiny
from tests.runner.plans import new, plan, run

pytestmark = pytest.mark.gpu
CONFIG = RunnerConfig(4, 96, 32, 40, 8, check_invariants=True)
LADDER = Ladder(decode=(4,), mixed=(32,), finish=(4,), tiers=("greedy",))


def greedy(name: str, index: int, implementation) -> tuple[list[int], list[int], DeviceRunner]:
    model, weights = load_tiny(name)
    config = CONFIG.__class__(**{**CONFIG.__dict__, "implementation": implementation})
    runner = DeviceRunner(model, weights, config, ladder=LADDER)
    data = np.load(GOLDEN / "tiny" / name / "golden.npz")
    prompt, expected = data[f"input_ids_{index}"].reshape(-1).tolist(), data[f"greedy_{index}"].tolist()
    blocks = list(range(1, 12))
    lists = (blocks,) * len(runner.groups)
    request = new("a", prompt, blocks)
    request.block_ids = lists
    tokens, done = [], 0
    while done < len(prompt):
        count = min(32, len(prompt) - done)
        tokens += run(runner, plan({"a": count}, [request] if not done else []))["a"]
        done += count
    while len(tokens) < len(expected):
        tokens += run(runner, plan({"a": 1}))["a"]
    return tokens, expected, runner


@pytest.mark.parametrize("name", ["llama", "llama_bias_tied_headdim", "llama_rope_llama3", "mistral", "qwen2"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_tiny_goldens(name, index):
    tokens, expected, _ = greedy(name, index, None)
    assert tokens == expected


def test_the_engine_holds_the_kernel_and_writes_in_place():
    tokens, expected, runner = greedy("llama", 1, {"input_prep": "mosaic"})
    assert tokens == expected
    cache = runner.state.kv.blocks[0]
    for entry in runner.table.entries.values():
        if entry.program.kind in ("step", "begin"):
            text = entry.compiled.as_text()
            assert text.count("mosaic_gpu") >= 1, f"{entry.program} has no Mosaic kernel"
            assert entry.compiled.memory_analysis().alias_size_in_bytes >= cache.nbytes


def test_the_xla_twin_gives_the_same_tokens():
    assert greedy("llama", 2, "xla")[0] == greedy("llama", 2, {"input_prep": "mosaic"})[0]
